//! The users of the App: list, create, read, change, delete; the groups of a user.

pub mod change;
pub mod create;
pub mod groups;
pub mod list;
pub mod read;
pub mod remove;
