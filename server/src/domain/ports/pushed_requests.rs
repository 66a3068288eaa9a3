//! Pushed authorization requests, in Redis.

use std::future::Future;

use latchkey_crds::types::AppId;

use super::error::StoreResult;
use crate::domain::{
    client::ClientAddress,
    openid::par::{PushedRequest, PushedRequestKey},
};

/// Pushed authorization requests, in Redis.
pub trait PushedRequests: Sync {
    /// Stores a request. Those of public clients are bounded for each App: a further one evicts the oldest of the
    /// client address with the most. `from` is the address that pushed it.
    fn store_pushed_request(
        &self,
        app: &AppId,
        key: &PushedRequestKey,
        request: &PushedRequest,
        from: ClientAddress,
    ) -> impl Future<Output = StoreResult<()>> + Send;

    /// Finds a request. Does not remove it.
    fn find_pushed_request(
        &self,
        app: &AppId,
        key: &PushedRequestKey,
    ) -> impl Future<Output = StoreResult<Option<PushedRequest>>> + Send;

    /// Removes a request, and remembers that it was used. Only the first call returns true, whether or not the request
    /// was still stored.
    fn use_pushed_request(&self, app: &AppId, key: &PushedRequestKey)
    -> impl Future<Output = StoreResult<bool>> + Send;
}
