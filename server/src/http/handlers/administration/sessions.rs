//! The sessions of a user: list, end one, end all.

pub mod end;
pub mod end_all;
pub mod list;
