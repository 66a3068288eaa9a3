//! Exports: the data of one user, and all users.

pub mod user;
pub mod users;
