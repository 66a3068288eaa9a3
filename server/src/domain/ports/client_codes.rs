//! Authorization codes of clients, and the assertions with which clients authenticate, in Redis.

use std::future::Future;

use latchkey_crds::types::AppId;

use super::error::StoreResult;
use crate::domain::{
    openid::code::{ClientCodeKey, ClientCodeRecord, ExchangedCode, Redemption, StoredClientCode},
    session::SessionId,
};

/// Authorization codes of clients, in Redis.
pub trait ClientCodes: Sync {
    /// Stores a new code. The code stays stored for twice as long as it can be exchanged, so that the result of an
    /// exchange after the expiry does not depend on the clocks of the servers.
    fn store_client_code(
        &self,
        app: &AppId,
        key: &ClientCodeKey,
        record: &ClientCodeRecord,
    ) -> impl Future<Output = StoreResult<()>> + Send;

    /// Finds a code. An exchanged code is still found for 24 hours. Changes nothing.
    fn find_client_code(
        &self,
        app: &AppId,
        key: &ClientCodeKey,
    ) -> impl Future<Output = StoreResult<Option<StoredClientCode>>> + Send;

    /// Records that the code was exchanged for this open session, and replaces the record with `exchanged`. Of
    /// concurrent calls, only one gets the outcome [`Redemption::First`].
    fn redeem_client_code(
        &self,
        app: &AppId,
        key: &ClientCodeKey,
        exchanged: &ExchangedCode,
        session: SessionId,
    ) -> impl Future<Output = StoreResult<Redemption>> + Send;

    /// Records the use of an assertion (RFC 7523) by its `jti`, until `expires_at` (Unix seconds). Returns true for the
    /// first use.
    fn use_assertion(
        &self,
        app: &AppId,
        client_uid: &str,
        jti: &str,
        expires_at: i64,
    ) -> impl Future<Output = StoreResult<bool>> + Send;
}
