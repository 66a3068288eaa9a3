//! The four endpoints for sessions (docs/specification/sessions.md).

pub mod end;
pub mod end_others;
pub mod list;
pub mod log_out;
