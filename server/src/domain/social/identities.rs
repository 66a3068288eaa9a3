//! Lists, links and unlinks the identities of a logged-in user (specification: Social login, A user's identities).

use latchkey_crds::{rendered::RenderedProvider, types::ProviderName};

use super::provider::{new_identity, provider_detail};
use crate::domain::{
    audit::EventKind,
    authentication::AuthenticatedSession,
    call::Call,
    email::Email,
    error::CommonError,
    flow::IdentityToLink,
    identity::{Identity, ProviderError, ProviderOperation},
    ports::{
        Identities, LinkOutcome, LinkRequest, NewIdentity, Providers, RateLimits, UnlinkOutcome, UnlinkRequest, Users,
    },
    rate_limits,
    user::User,
};

#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    #[error("the login was too long ago")]
    ReauthenticationRequired,
    #[error("the email address of the account is not verified")]
    EmailNotVerified,
    #[error("the identity belongs to another account")]
    AlreadyLinked,
    #[error("there is no valid access token of a live session")]
    InvalidToken,
    #[error(transparent)]
    Provider(#[from] ProviderError),
    #[error(transparent)]
    Common(CommonError),
}

impl<E: Into<CommonError>> From<E> for LinkError {
    fn from(error: E) -> Self {
        Self::Common(error.into())
    }
}

/// Links the identity of a provider's token to a logged-in user. Does nothing if the identity is already linked to that
/// user.
pub async fn link_identity<S: Users + Identities + RateLimits + Providers>(
    call: Call<'_, S>,
    signed_in: &AuthenticatedSession,
    provider: &RenderedProvider,
    token: &str,
    nonce: Option<&str>,
) -> Result<(), LinkError> {
    if !signed_in.is_recent(call.env) {
        return Err(LinkError::ReauthenticationRequired);
    }
    let permit = call.stores.try_acquire(ProviderOperation::Login, call.app, provider, call.client_address())?;
    call.stores.acquire(call.app_id(), rate_limits::logins(call.app, call.client_address())).await?;
    let user = user_to_link(call, signed_in).await?;
    let verified = call.stores.validate_token(&permit, provider, token, nonce).await?;
    drop(permit);
    link_verified_identity(call, signed_in, &user, new_identity(provider, &verified, call.env.now())).await
}

/// Links an identity to a logged-in user. *callback* has verified and stored the identity for a hosted page.
pub(in crate::domain) async fn link_stored_identity<S: Users + Identities>(
    call: Call<'_, S>,
    signed_in: &AuthenticatedSession,
    stored: IdentityToLink,
) -> Result<(), LinkError> {
    let user = user_to_link(call, signed_in).await?;
    let IdentityToLink { provider, authority, subject, email } = stored;
    let email = email.and_then(|email| Email::parse(&email).ok());
    let identity = NewIdentity { authority, subject, provider, email, at: call.env.now() };
    link_verified_identity(call, signed_in, &user, identity).await
}

/// Returns the user of the session, or an error if no identity can be linked to this user.
async fn user_to_link<S: Users>(call: Call<'_, S>, signed_in: &AuthenticatedSession) -> Result<User, LinkError> {
    let user = call.stores.user(call.app_id(), signed_in.user_id()).await?;
    let user = user.filter(|user| !user.disabled && user.epoch == signed_in.session.epoch);
    let user = user.ok_or(LinkError::InvalidToken)?;
    // Without this check, an attacker could register the email address of another person and link an identity. After
    // that person has confirmed the email address, the attacker could still log in with the identity.
    if user.email.is_some() && !user.email_verified {
        return Err(LinkError::EmailNotVerified);
    }
    Ok(user)
}

async fn link_verified_identity<S: Identities>(
    call: Call<'_, S>,
    signed_in: &AuthenticatedSession,
    user: &User,
    identity: NewIdentity,
) -> Result<(), LinkError> {
    let event = signed_in.event(call, EventKind::IdentityLinked).with_detail(provider_detail(&identity.provider));
    let linking = LinkRequest { user: user.id, epoch: user.epoch, address: None, identity, event };
    match call.stores.link_identity(call.app_id(), linking).await? {
        LinkOutcome::Done => Ok(()),
        LinkOutcome::AlreadyLinked(owner) if owner == user.id => Ok(()),
        LinkOutcome::AlreadyLinked(_) => Err(LinkError::AlreadyLinked),
        LinkOutcome::UserChanged => Err(LinkError::InvalidToken),
    }
}

/// Returns all identities of the user.
pub async fn list_identities<S: Identities>(
    call: Call<'_, S>,
    signed_in: &AuthenticatedSession,
) -> Result<Vec<Identity>, CommonError> {
    Ok(call.stores.identities(call.app_id(), signed_in.user_id()).await?)
}

/// Removes the identities of a Provider from the user, but never the last way to log in.
pub async fn unlink_identity<S: Identities + RateLimits>(
    call: Call<'_, S>,
    signed_in: &AuthenticatedSession,
    provider: &ProviderName,
) -> Result<UnlinkOutcome, CommonError> {
    call.stores.acquire(call.app_id(), rate_limits::logins(call.app, call.client_address())).await?;
    let unlinking = UnlinkRequest {
        user: signed_in.user_id(),
        provider: provider.clone(),
        usable: call.app.doc.providers.iter().map(|provider| provider.name.clone()).collect(),
        event: signed_in.event(call, EventKind::IdentityUnlinked).with_detail(provider_detail(provider)),
    };
    Ok(call.stores.unlink_identity(call.app_id(), unlinking).await?)
}
