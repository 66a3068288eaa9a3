//! The six email endpoints (docs/specification/accounts.md).

pub mod confirm;
pub mod confirm_password;
pub mod forgot_password;
pub mod login;
pub mod register;
pub mod verify;
