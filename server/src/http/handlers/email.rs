//! The six email endpoints (contract, 3).

pub mod confirm;
pub mod confirm_password;
pub mod forgot_password;
pub mod login;
pub mod register;
pub mod verify;
