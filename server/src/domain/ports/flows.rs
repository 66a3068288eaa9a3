//! Social logins in progress, in Redis.

use std::future::Future;

use latchkey_crds::types::AppId;

use super::error::{StoreError, StoreResult};
use crate::domain::{
    client::ClientAddress,
    flow::{FlowBinding, FlowId, LoginCodeKey, PendingLogin, StoredLogin, TooManyFlows},
    session::SessionId,
};

#[derive(Debug, thiserror::Error)]
pub enum StoreFlowError {
    #[error(transparent)]
    TooManyFlows(#[from] TooManyFlows),
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Social logins in progress, in Redis.
pub trait Flows: Sync {
    /// Stores a flow that is not bound to a browser, within the limits for such flows. The flow expires after
    /// `lifetime_seconds`. Pages also store long transactions here.
    fn store_flow(
        &self,
        app: &AppId,
        id: &FlowId,
        sealed: &str,
        client: ClientAddress,
        lifetime_seconds: i64,
    ) -> impl Future<Output = Result<(), StoreFlowError>> + Send;

    /// Finds a flow that is not bound to a browser. Does not mark the flow as used.
    fn find_flow(&self, app: &AppId, id: &FlowId) -> impl Future<Output = StoreResult<Option<String>>> + Send;

    /// Marks a flow as used. The first call for a flow returns true, each later call false.
    fn consume_flow(
        &self,
        app: &AppId,
        id: &FlowId,
        binding: FlowBinding,
    ) -> impl Future<Output = StoreResult<bool>> + Send;

    /// Stores a login until its one-time code expires.
    fn store_login(
        &self,
        app: &AppId,
        key: &LoginCodeKey,
        login: &PendingLogin,
    ) -> impl Future<Output = StoreResult<()>> + Send;

    /// Finds a login by its one-time code. Does not redeem the code. A redeemed code is still found for a while.
    fn find_login(
        &self,
        app: &AppId,
        key: &LoginCodeKey,
    ) -> impl Future<Output = StoreResult<Option<StoredLogin>>> + Send;

    /// Records that the one-time code was exchanged for this open session. Returns `None` for the first exchange. For
    /// each later exchange, returns the session of the first exchange.
    fn redeem_login(
        &self,
        app: &AppId,
        key: &LoginCodeKey,
        session: SessionId,
    ) -> impl Future<Output = StoreResult<Option<SessionId>>> + Send;
}
