//! The passwords of tests, benchmarks and `make run`.
//!
//! A test uses these passwords if the value of the password does not matter. All are strong enough for every App.

/// The password that users register with.
pub const PASSWORD: &str = "violet-Anchor-mills-27";
/// The password that a change or a reset sets.
pub const NEW_PASSWORD: &str = "copper-Lantern-drift-58";
/// A password that no account has.
pub const WRONG_PASSWORD: &str = "not-The-password-91";
