//! Codes that were sent by email, in Redis.

use std::future::Future;

use latchkey_crds::types::AppId;

use super::error::StoreResult;
use crate::domain::code::{CodeKey, CodeRecord};

/// Codes that were sent by email, in Redis.
pub trait Codes: Sync {
    /// Stores a code until it expires: a new code, or a consumed code after its transaction has failed.
    fn store_code(
        &self,
        app: &AppId,
        key: &CodeKey,
        record: &CodeRecord,
    ) -> impl Future<Output = StoreResult<()>> + Send;

    /// Finds the code that is stored under one of the keys. Does not consume the code.
    fn find_code(
        &self,
        app: &AppId,
        keys: &[CodeKey],
    ) -> impl Future<Output = StoreResult<Option<(CodeKey, CodeRecord)>>> + Send;

    /// Removes and returns the code. Of concurrent calls, only one gets the code.
    fn consume_code(&self, app: &AppId, key: &CodeKey) -> impl Future<Output = StoreResult<Option<CodeRecord>>> + Send;
}
