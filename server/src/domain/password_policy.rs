//! Checks whether a password can be set (specification: Accounts, Passwords).

use super::{
    call::Call,
    error::CommonError,
    password::{Password, WeakPassword},
    ports::PasswordHasher,
};

pub(super) enum PasswordPolicyError {
    Weak(WeakPassword),
    Common(CommonError),
}

/// Checks the length, and then the strength. `guesses` are the words that an attacker would try first.
pub(super) async fn check_password_policy<S: PasswordHasher>(
    call: Call<'_, S>,
    password: &Password,
    guesses: Vec<String>,
) -> Result<(), PasswordPolicyError> {
    password.check_length(&call.app.doc.password).map_err(PasswordPolicyError::Weak)?;
    match call.stores.is_strong_enough(call.app, call.client_address(), password, guesses).await {
        Ok(true) => Ok(()),
        Ok(false) => Err(PasswordPolicyError::Weak(WeakPassword::Guessable)),
        Err(overloaded) => Err(PasswordPolicyError::Common(overloaded.into())),
    }
}
