//! Users and the outbox, in Postgres.

#[derive(Clone)]
pub struct Postgres {}
