//! *login* with a provider's token.

use latchkey_crds::rendered::RenderedProvider;

use super::{
    error::ProviderLoginError,
    login_attempt::{LoginAttempt, ProviderLogin, acquire_provider_permit},
};
use crate::domain::{
    app::App,
    client::ClientInfo,
    clock::Env,
    identity::ProviderOperation,
    ports::{AuditLog, Identities, Outbox, Providers, RateLimits, Sessions, Users},
};

/// Logs in the user of a provider's token.
pub async fn log_in_with_token<S>(
    stores: &S,
    env: &Env,
    app: &App,
    provider: &RenderedProvider,
    caller: &ClientInfo,
    token: &str,
    nonce: Option<&str>,
) -> Result<ProviderLogin, ProviderLoginError>
where
    S: Users + Identities + RateLimits + Outbox + Sessions + Providers + AuditLog,
{
    let permit = acquire_provider_permit(stores, ProviderOperation::Login, app, provider, caller).await?;
    let vouched = stores.validate_token(&permit, provider, token, nonce).await?;
    drop(permit);
    LoginAttempt { stores, env, app, provider, caller }.log_in(&vouched).await
}
