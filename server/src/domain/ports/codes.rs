//! Codes that were sent by email, in Redis.

use std::future::Future;

use latchkey_crds::types::AppId;

use super::error::StoreResult;
use crate::domain::code::{CodeKey, CodeRecord};

/// Codes that were sent by email, in Redis.
pub trait Codes: Sync {
    /// Stores a code until it expires. Also stores a code again after the transaction that used it failed.
    fn store_code(
        &self,
        app: &AppId,
        key: &CodeKey,
        record: &CodeRecord,
    ) -> impl Future<Output = StoreResult<()>> + Send;

    /// Looks under each key, without using the code.
    fn find_code(
        &self,
        app: &AppId,
        keys: &[CodeKey],
    ) -> impl Future<Output = StoreResult<Option<(CodeKey, CodeRecord)>>> + Send;

    /// Removes and returns the code: of concurrent calls one gets it.
    fn consume_code(&self, app: &AppId, key: &CodeKey) -> impl Future<Output = StoreResult<Option<CodeRecord>>> + Send;
}
