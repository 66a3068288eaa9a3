//! *confirm-password*.

use crate::domain::{
    app::App,
    audit::{Event, EventKind, Refusal, RefusalKind},
    client::ClientInfo,
    clock::Env,
    code::CodePurpose,
    email::Email,
    epochs::propagate_epoch,
    error::CommonError,
    login_limits::remember_client,
    password::{self, Password, WeakPassword},
    password_policy::{PasswordPolicyError, check_password_policy},
    ports::{AuditLog, Codes, Outbox, PasswordHasher, PasswordReset, RateLimits, Sessions, Users},
    rate_limits,
    stored_codes::{find_code, restore_code},
    user::Name,
};

pub struct ResetPasswordInput {
    pub email: Email,
    pub code: String,
    pub password: Password,
}

#[derive(Debug, thiserror::Error)]
pub enum ResetPasswordError {
    /// Wrong, used and expired codes and unknown addresses give the same error.
    #[error("the code is not valid")]
    InvalidCode,
    #[error(transparent)]
    Weak(#[from] WeakPassword),
    #[error(transparent)]
    Common(#[from] CommonError),
}

impl From<PasswordPolicyError> for ResetPasswordError {
    fn from(error: PasswordPolicyError) -> Self {
        match error {
            PasswordPolicyError::Weak(weak) => Self::Weak(weak),
            PasswordPolicyError::Common(trouble) => Self::Common(trouble),
        }
    }
}

pub async fn reset_password<S: Users + Outbox + RateLimits + Codes + Sessions + PasswordHasher + AuditLog>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &ClientInfo,
    request: ResetPasswordInput,
) -> Result<(), ResetPasswordError> {
    let guess = stores.acquire(app.id(), rate_limits::codes(app, caller)).await.map_err(CommonError::from)?;
    let email = request.email.clone();
    let outcome = apply_reset_code(stores, env, app, caller, request).await;
    // A weak password counts like a wrong code: scoring is work, and the code may not have been checked yet.
    if matches!(outcome, Ok(()) | Err(ResetPasswordError::Common(_))) {
        stores.release(app.id(), guess).await;
    }
    if matches!(outcome, Err(ResetPasswordError::InvalidCode)) {
        // Looked up for known and unknown addresses alike. A failure of the lookup does not change the response.
        let user = stores.user_by_email(app.id(), &email).await.ok().flatten();
        let account = Some(email.account_key(app.id()));
        let refusal = Refusal::new(RefusalKind::PasswordReset, caller, account, user.map(|user| user.id));
        stores.count_refusal(app.id(), refusal);
    }
    outcome
}

async fn apply_reset_code<S: Users + Outbox + RateLimits + Codes + Sessions + PasswordHasher + AuditLog>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &ClientInfo,
    request: ResetPasswordInput,
) -> Result<(), ResetPasswordError> {
    // First with the address alone, so that a weak password is rejected alike for right and wrong codes.
    check_password_policy(stores, app, caller, &request.password, password::guess_words(Some(&request.email), None))
        .await?;
    let found = find_code(stores, env, app, &request.code, &[CodePurpose::Reset]).await?;
    let (key, record) = found.ok_or(ResetPasswordError::InvalidCode)?;
    if record.address != request.email.canonical() {
        return Err(ResetPasswordError::InvalidCode);
    }
    let user =
        stores.user(app.id(), record.user).await.map_err(CommonError::from)?.ok_or(ResetPasswordError::InvalidCode)?;
    // With a right code the name counts too. A password that is rejected here does not use the code.
    let name = Name::parse(&user.name).ok();
    check_password_policy(
        stores,
        app,
        caller,
        &request.password,
        password::guess_words(Some(&request.email), name.as_ref()),
    )
    .await?;
    let password_hash =
        stores.hash(app, caller.client_address(), &request.password).await.map_err(CommonError::from)?;
    let record =
        stores.consume_code(app.id(), &key).await.map_err(CommonError::from)?.ok_or(ResetPasswordError::InvalidCode)?;
    let event = Event::new(env, caller, EventKind::PasswordReset, record.user);
    let change = PasswordReset {
        user: record.user,
        epoch: record.epoch,
        address: record.address.clone(),
        password_hash,
        at: event.at,
        event,
    };
    let changed = match stores.reset_password(app.id(), change).await {
        Ok(changed) => changed.ok_or(ResetPasswordError::InvalidCode)?,
        Err(error) => {
            restore_code(stores, app, &key, &record).await;
            return Err(CommonError::from(error).into());
        }
    };
    let user = changed.user;
    propagate_epoch(stores, app, &user, None).await;
    remember_client(stores, app, caller, &user).await;
    Ok(())
}
