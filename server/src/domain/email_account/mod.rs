//! The account with an email address and a password: register, verify, confirm, log in, and reset a forgotten password
//! (specification: Accounts).

mod confirm;
mod confirm_password;
mod forgot_password;
mod login;
mod register;
mod verify;

pub use confirm::{ConfirmError, Confirmed, confirm};
pub use confirm_password::{ResetPasswordError, ResetPasswordInput, reset_password};
pub use forgot_password::forgot_password;
pub use login::{LoggedIn, LoginError, LoginInput, log_in};
pub use register::{RegisterError, RegisterInput, Registered, register};
pub use verify::{VerifyError, verify};
