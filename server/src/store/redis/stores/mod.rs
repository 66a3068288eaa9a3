//! The ports of the domain over Redis: one file per kind of data.

mod codes;
mod flows;
mod limits;
pub(super) mod refusal_queue;
pub(crate) mod refusals;
mod sessions;
mod windows;
