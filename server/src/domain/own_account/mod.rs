//! The user's own account: read, rename and delete it, and change its password and its email address (specification:
//! Accounts).

mod account;
mod change_address;
mod change_password;
mod check_password;
mod delete;
mod rename;

pub use account::{OwnAccountError, load_user};
pub use change_address::{ChangeAddressError, ChangeAddressInput, PendingAddressChange, request_address_change};
pub use change_password::{ChangePasswordError, ChangePasswordInput, change_password};
pub(in crate::domain) use check_password::check_password;
pub use delete::delete_account;
pub use rename::rename_user;
