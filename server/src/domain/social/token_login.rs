//! The use case of *login* with a provider's token (specification: Social login, Login with a provider token).

use latchkey_crds::rendered::RenderedProvider;

use super::{
    error::ProviderLoginError,
    login_attempt::{LoginAttempt, ProviderLogin, acquire_provider_permit},
};
use crate::domain::{
    call::Call,
    identity::ProviderOperation,
    ports::{AuditLog, GroupChanges, Identities, Outbox, Providers, RateLimits, Sessions, Users},
};

/// Logs in the user who got the token from the provider.
pub async fn log_in_with_token<S>(
    call: Call<'_, S>,
    provider: &RenderedProvider,
    token: &str,
    nonce: Option<&str>,
) -> Result<ProviderLogin, ProviderLoginError>
where
    S: Users + Identities + GroupChanges + RateLimits + Outbox + Sessions + Providers + AuditLog,
{
    let permit = acquire_provider_permit(call, ProviderOperation::Login, provider).await?;
    let identity = call.stores.validate_token(&permit, provider, token, nonce).await?;
    drop(permit);
    LoginAttempt { call, provider }.log_in(&identity).await
}
