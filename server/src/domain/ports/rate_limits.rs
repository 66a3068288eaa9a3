//! Rate limits, in Redis.

use std::future::Future;

use latchkey_crds::types::AppId;

use super::error::{StoreError, StoreResult};
use crate::domain::{
    client::ClientAddress,
    email::AccountKey,
    rate_limits::{RateLimitCheck, RateLimited},
};

/// Acquired rate limits, each with the time at which Redis counted the use (in Unix milliseconds by the clock of
/// Redis). [`RateLimits::release`] needs both.
#[derive(Clone, Debug, Default)]
pub struct RateLimitPermit(pub Vec<(RateLimitCheck, i64)>);

#[derive(Debug, thiserror::Error)]
pub enum AcquireError {
    #[error(transparent)]
    RateLimited(#[from] RateLimited),
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Rate limits, in Redis, so that they apply to all servers together.
pub trait RateLimits: Sync {
    /// Counts one use in every window of every check. If one of the windows is full, counts nothing.
    fn acquire(
        &self,
        app: &AppId,
        checks: Vec<RateLimitCheck>,
    ) -> impl Future<Output = Result<RateLimitPermit, AcquireError>> + Send;

    /// Whether one use fits into every window of every check. Counts nothing, so several concurrent uses can together
    /// exceed the limit.
    fn check_limits(
        &self,
        app: &AppId,
        checks: Vec<RateLimitCheck>,
    ) -> impl Future<Output = Result<(), AcquireError>> + Send;

    /// Subtracts the uses of a permit, so that they no longer count. A failure is only logged: the limit is then
    /// stricter until the window ends.
    fn release(&self, app: &AppId, permit: RateLimitPermit) -> impl Future<Output = ()> + Send;

    /// Whether somebody at the client address has, in the last 30 days, logged in to the account with a provider or
    /// sent the right password, confirmed its email address, or reset its password.
    fn is_known_client(
        &self,
        app: &AppId,
        account: &AccountKey,
        client: ClientAddress,
    ) -> impl Future<Output = StoreResult<bool>> + Send;

    /// Makes the client address known to the account for 30 days. A failure is only logged.
    fn remember_client(
        &self,
        app: &AppId,
        account: &AccountKey,
        client: ClientAddress,
    ) -> impl Future<Output = ()> + Send;
}
