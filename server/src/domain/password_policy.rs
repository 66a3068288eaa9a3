//! Whether a password can be set.

use super::{
    app::App,
    client::ClientInfo,
    error::CommonError,
    password::{Password, WeakPassword},
    ports::PasswordHasher,
};

pub(super) enum PasswordPolicyError {
    Weak(WeakPassword),
    Common(CommonError),
}

/// Whether a password can be set: its length, then its strength given these guess words.
pub(super) async fn check_password_policy<S: PasswordHasher>(
    stores: &S,
    app: &App,
    caller: &ClientInfo,
    password: &Password,
    guesses: Vec<String>,
) -> Result<(), PasswordPolicyError> {
    password.check_length(&app.doc.password).map_err(PasswordPolicyError::Weak)?;
    match stores.is_strong_enough(app, caller.client_address(), password, guesses).await {
        Ok(true) => Ok(()),
        Ok(false) => Err(PasswordPolicyError::Weak(WeakPassword::Guessable)),
        Err(busy) => Err(PasswordPolicyError::Common(busy.into())),
    }
}
