//! The account with an email address and a password: register, verify, confirm, log in, and reset a forgotten password
//! (specification: Accounts).

mod check_login;
mod confirm;
mod confirm_password;
mod forgot_password;
mod login;
mod register;
mod verify;

pub(in crate::domain) use check_login::check_login;
pub use check_login::{LoginError, LoginInput};
pub(in crate::domain) use confirm::{AppliedConfirmation, apply_confirmation, find_confirmation_code};
pub use confirm::{ConfirmError, Confirmed, confirm};
pub use confirm_password::{ResetPasswordError, ResetPasswordInput, reset_password};
pub use forgot_password::forgot_password;
pub use login::{LoggedIn, log_in};
pub use register::{RegisterError, RegisterInput, Registered, register};
pub use verify::{VerifyError, verify};
