//! The members of a group: list, add, remove.

pub mod add;
pub mod list;
pub mod remove;
