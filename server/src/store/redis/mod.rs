//! Codes, sessions and limits, in Redis.

#[derive(Clone)]
pub struct Redis {}
