//! The use case of *confirm* (specification: Accounts, Confirm).

use crate::domain::{
    audit::{Event, EventKind},
    authentication::{AuthenticatedSession, AuthenticationError},
    call::Call,
    code::{CodeKey, CodePurpose, CodeRecord},
    epochs::{propagate_epoch, propagate_epoch_change},
    error::CommonError,
    login_limits::remember_client,
    ports::{
        AddressChange, AddressChanged, AuditLog, ChangedUser, Codes, Confirmation, Outbox, OwnAccounts, RateLimits,
        Sessions, StoreError, Users,
    },
    rate_limits,
    session::{Amr, Session, SessionId},
    sessions::open::open_session_with_id,
    stored_codes::{find_code, restore_code},
    token::{self, Tokens},
    user::{User, UserId},
};

pub struct Confirmed {
    pub user: User,
    pub tokens: Tokens,
    /// Whether the account was contested: its email address was registered again with another password. If so, the
    /// password of the account was removed, and the session of `tokens` can set a new password.
    pub password_required: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum ConfirmError {
    /// The code is wrong, used or expired. The error does not say which.
    #[error("the code is not valid")]
    InvalidCode,
    #[error(transparent)]
    Common(CommonError),
}

impl<E: Into<CommonError>> From<E> for ConfirmError {
    fn from(error: E) -> Self {
        Self::Common(error.into())
    }
}

/// A confirmation that was applied. The client has not got its session yet.
pub(in crate::domain) struct AppliedConfirmation {
    pub(in crate::domain) user: User,
    /// The client's session, if this session continues after the confirmation. The confirmation has raised the epoch of
    /// the user and of this session.
    pub(in crate::domain) kept_session: Option<Session>,
    /// The id of the session to open if no session continues. If the account was contested, only this session can set a
    /// password without the old one.
    pub(in crate::domain) new_session: SessionId,
    pub(in crate::domain) was_contested: bool,
}

/// Confirms an email address with the code of a mail. Returns tokens of the session of `bearer` if this session belongs
/// to the user who got the code, otherwise tokens of a new session.
pub async fn confirm<S: Users + OwnAccounts + Outbox + RateLimits + Codes + Sessions + AuditLog>(
    call: Call<'_, S>,
    code: &str,
    bearer: Option<&str>,
) -> Result<Confirmed, ConfirmError> {
    let permit = call.stores.acquire(call.app_id(), rate_limits::codes(call.app, call.client_address())).await?;
    let outcome = confirm_with_tokens(call, code, bearer).await;
    if !matches!(outcome, Err(ConfirmError::InvalidCode)) {
        call.stores.release(call.app_id(), permit).await;
    }
    outcome
}

async fn confirm_with_tokens<S: Users + OwnAccounts + Outbox + RateLimits + Codes + Sessions + AuditLog>(
    call: Call<'_, S>,
    code: &str,
    bearer: Option<&str>,
) -> Result<Confirmed, ConfirmError> {
    let (key, record) = find_confirmation_code(call, code).await?;
    let bearer_session = bearer_session_of(call, bearer, record.user).await?;
    let AppliedConfirmation { user, kept_session, new_session, was_contested } =
        apply_confirmation(call, &key, &record, bearer_session).await?;
    let tokens = match kept_session {
        Some(session) => token::issue_tokens(call.app, call.env, &user.profile(), &session)?,
        // No session is opened if another change has raised the user's epoch again. The code is consumed, so the client
        // gets the error for a consumed code.
        None => {
            let opened = open_session_with_id(call, &user, new_session, Amr::Code).await?;
            opened.ok_or(ConfirmError::InvalidCode)?
        }
    };
    remember_client(call, &user).await;
    Ok(Confirmed { user, tokens, password_required: was_contested })
}

/// Finds the code of a confirmation. Does not consume the code.
pub(in crate::domain) async fn find_confirmation_code<S: Codes>(
    call: Call<'_, S>,
    code: &str,
) -> Result<(CodeKey, CodeRecord), ConfirmError> {
    let found = find_code(call, code, &[CodePurpose::Confirm, CodePurpose::Change]).await?;
    found.ok_or(ConfirmError::InvalidCode)
}

/// Consumes the code, and confirms the address. `kept_session` is the client's live session, if it belongs to the user
/// of the code: this session continues.
pub(in crate::domain) async fn apply_confirmation<S>(
    call: Call<'_, S>,
    key: &CodeKey,
    record: &CodeRecord,
    kept_session: Option<Session>,
) -> Result<AppliedConfirmation, ConfirmError>
where
    S: Users + OwnAccounts + Outbox + Codes + Sessions,
{
    // Only the account that requested a new email address can confirm it. For anybody else the code is not consumed.
    if record.purpose == CodePurpose::Change
        && kept_session.as_ref().is_none_or(|session| session.epoch != record.epoch)
    {
        return Err(ConfirmError::InvalidCode);
    }
    let record = call.stores.consume_code(call.app_id(), key).await?.ok_or(ConfirmError::InvalidCode)?;
    let new_session = SessionId(call.env.new_uuid());
    let session = kept_session.as_ref().map_or(new_session, |session| session.id);
    let applied = match (record.purpose, &kept_session) {
        (CodePurpose::Change, Some(_)) => change_address(call, &record, session).await,
        (CodePurpose::Change, None) => Ok(None),
        (CodePurpose::Confirm | CodePurpose::Reset, _) => {
            let event = Event {
                session: kept_session.as_ref().map(|session| session.id),
                ..call.event(EventKind::Confirmed, record.user)
            };
            let change = Confirmation {
                user: record.user,
                epoch: record.epoch,
                address: record.address.clone(),
                session,
                keeps_session: kept_session.is_some(),
                at: event.at,
                event,
            };
            call.stores.confirm_address(call.app_id(), change).await
        }
    };
    let ChangedUser { user, was_contested } = match applied {
        Ok(changed) => changed.ok_or(ConfirmError::InvalidCode)?,
        Err(error) => {
            restore_code(call, key, &record).await;
            return Err(error.into());
        }
    };
    propagate_epoch(call, &user, kept_session.as_ref().map(|session| session.id)).await;
    let kept_session = kept_session.map(|session| Session { epoch: user.epoch, ..session });
    Ok(AppliedConfirmation { user, kept_session, new_session, was_contested })
}

/// Makes the pending email address the address of the account. Deletes an unverified account that had this address.
async fn change_address<S: OwnAccounts + Sessions + Outbox>(
    call: Call<'_, S>,
    record: &CodeRecord,
    session: SessionId,
) -> Result<Option<ChangedUser>, StoreError> {
    let event = call.event(EventKind::AddressChanged, record.user).in_session(session);
    let change = AddressChange {
        user: record.user,
        epoch: record.epoch,
        address: record.address.clone(),
        kept_session: session,
        at: event.at,
        event,
    };
    let Some(AddressChanged { user, removed }) = call.stores.change_address(call.app_id(), change).await? else {
        return Ok(None);
    };
    if let Some(removed) = removed {
        propagate_epoch_change(call, &removed, None).await;
    }
    Ok(Some(ChangedUser { user, was_contested: false }))
}

/// Returns the session of the Bearer token if it is a session of `user`. Returns `None` for an invalid token or a token
/// of another user, because *confirm* needs no session.
async fn bearer_session_of<S: Sessions>(
    call: Call<'_, S>,
    bearer: Option<&str>,
    user: UserId,
) -> Result<Option<Session>, CommonError> {
    let Some(bearer) = bearer else { return Ok(None) };
    match AuthenticatedSession::authenticate(call, bearer).await {
        Ok(signed_in) => Ok(Some(signed_in.session).filter(|session| session.user == user)),
        Err(AuthenticationError::InvalidToken) => Ok(None),
        Err(AuthenticationError::Store(error)) => Err(error.into()),
    }
}
