//! Implements ports of the domain with Redis, in one file per kind of data.

mod client_codes;
mod client_sessions;
mod codes;
mod flows;
mod groups;
mod limits;
mod pushed_requests;
pub(super) mod refusal_queue;
pub(crate) mod refusals;
mod sessions;
mod windows;
