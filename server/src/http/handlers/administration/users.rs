//! The users of the App: list, create, read, change, delete.

pub mod change;
pub mod create;
pub mod list;
pub mod read;
pub mod remove;
