//! The identities of a logged-in user.

use latchkey_crds::{rendered::RenderedProvider, types::ProviderName};

use super::provider::{new_identity, provider_detail};
use crate::domain::{
    app::App,
    audit::{Event, EventKind},
    authentication::{AuthenticatedSession, RECENT_LOGIN},
    client::ClientInfo,
    clock::Env,
    error::CommonError,
    identity::{Identity, ProviderError, ProviderOperation},
    ports::{Identities, LinkOutcome, LinkRequest, Providers, RateLimits, UnlinkOutcome, UnlinkRequest, Users},
    rate_limits,
};

#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    #[error("the login was too long ago")]
    ReauthenticationRequired,
    #[error("the account's address is not verified")]
    EmailNotVerified,
    /// The identity is linked to another account.
    #[error("the identity belongs to another account")]
    AlreadyLinked,
    #[error("there is no valid access token of a live session")]
    InvalidToken,
    #[error(transparent)]
    Provider(#[from] ProviderError),
    #[error(transparent)]
    Common(#[from] CommonError),
}

/// Links an identity to a logged-in user. Does nothing if it is already linked to that user.
#[expect(clippy::too_many_arguments, reason = "the parameters of every use case, the provider and its token")]
pub async fn link_identity<S: Users + Identities + RateLimits + Providers>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &ClientInfo,
    signed_in: &AuthenticatedSession,
    provider: &RenderedProvider,
    token: &str,
    nonce: Option<&str>,
) -> Result<(), LinkError> {
    if env.now() - signed_in.session.auth_time > RECENT_LOGIN {
        return Err(LinkError::ReauthenticationRequired);
    }
    let permit = stores.try_acquire(ProviderOperation::Login, app, provider, caller.client_address())?;
    stores.acquire(app.id(), rate_limits::provider_logins(app, caller)).await.map_err(CommonError::from)?;
    let user = stores.user(app.id(), signed_in.user_id()).await.map_err(CommonError::from)?;
    let user = user.filter(|user| !user.disabled && user.epoch == signed_in.session.epoch);
    let user = user.ok_or(LinkError::InvalidToken)?;
    // Otherwise somebody could add an identity to an account that somebody else confirms later, and get in with it.
    if user.email.is_some() && !user.email_verified {
        return Err(LinkError::EmailNotVerified);
    }
    let vouched = stores.validate_token(&permit, provider, token, nonce).await?;
    drop(permit);
    let identity = new_identity(provider, &vouched, env.now());
    let event = Event::new(env, caller, EventKind::IdentityLinked, user.id);
    let event = event.in_session(signed_in.session.id).with_detail(provider_detail(&provider.name));
    let linking = LinkRequest { user: user.id, epoch: user.epoch, address: None, identity, event };
    match stores.link_identity(app.id(), linking).await.map_err(CommonError::from)? {
        LinkOutcome::Done => Ok(()),
        LinkOutcome::AlreadyLinked(owner) if owner == user.id => Ok(()),
        LinkOutcome::AlreadyLinked(_) => Err(LinkError::AlreadyLinked),
        LinkOutcome::UserChanged => Err(LinkError::InvalidToken),
    }
}

/// The identities of a user: the ways to log in other than a password.
pub async fn list_identities<S: Identities>(
    stores: &S,
    app: &App,
    signed_in: &AuthenticatedSession,
) -> Result<Vec<Identity>, CommonError> {
    Ok(stores.identities(app.id(), signed_in.user_id()).await?)
}

/// Removes a Provider's identities from their user, but never the last way to log in.
pub async fn unlink_identity<S: Identities>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &ClientInfo,
    signed_in: &AuthenticatedSession,
    provider: &ProviderName,
) -> Result<UnlinkOutcome, CommonError> {
    let event = Event::new(env, caller, EventKind::IdentityUnlinked, signed_in.user_id());
    let unlinking = UnlinkRequest {
        user: signed_in.user_id(),
        provider: provider.clone(),
        usable: app.doc.providers.iter().map(|provider| provider.name.clone()).collect(),
        event: event.in_session(signed_in.session.id).with_detail(provider_detail(provider)),
    };
    Ok(stores.unlink_identity(app.id(), unlinking).await?)
}
