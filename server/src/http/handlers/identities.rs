//! The three endpoints for the identities of a user (docs/specification/social-login.md).

pub mod link;
pub mod list;
pub mod unlink;
