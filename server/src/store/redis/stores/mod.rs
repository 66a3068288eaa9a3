//! The ports of the domain over Redis: one file per kind of data.

mod codes;
mod flows;
mod limits;
pub(crate) mod refusals;
mod sessions;
