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
    /// Stores a request. The number of requests of public clients is limited for each App. At the limit, a new request
    /// replaces the oldest request of the client address with the most requests. `from` is the address that pushed the
    /// request.
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

    /// Removes a request, and remembers that it was used. The first call for a request returns true, each later call
    /// false, whether the request is still stored or not.
    fn use_pushed_request(&self, app: &AppId, key: &PushedRequestKey)
    -> impl Future<Output = StoreResult<bool>> + Send;
}
