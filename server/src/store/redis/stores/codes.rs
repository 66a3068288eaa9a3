//! Codes sent by email: one key per code, deleted when the code is used or expires.

use latchkey_crds::types::AppId;
use redis::{Pipeline, Value};

use super::super::{handle::RedisStore, metrics::Operation};
use crate::{
    domain::{
        code::{CodeKey, CodeRecord},
        ports::{Codes, StoreError},
    },
    store::stores::Stores,
};

/// Returns the Redis key of a code.
fn code_key(app: &AppId, key: &CodeKey) -> String {
    format!("lk:{{{app}:{}}}:code", key.as_str())
}

// === impl RedisStore ===

impl RedisStore {
    fn parse_code(&self, value: Value) -> Result<Option<CodeRecord>, StoreError> {
        let json: Option<Vec<u8>> = self.parse(value)?;
        json.map(|json| serde_json::from_slice(&json)).transpose().map_err(|_| self.unexpected_value())
    }
}

impl Codes for Stores {
    async fn store_code(&self, app: &AppId, key: &CodeKey, record: &CodeRecord) -> Result<(), StoreError> {
        let redis = &self.redis;
        let json = serde_json::to_vec(record).map_err(|_| redis.unexpected_value())?;
        let mut command = redis::cmd("SET");
        command.arg(code_key(app, key)).arg(json).arg("EXAT").arg(redis.key_expiry(record.expires_at));
        redis.send_one(Operation::StoreCode, command).await.map(drop)
    }

    async fn find_code(&self, app: &AppId, keys: &[CodeKey]) -> Result<Option<(CodeKey, CodeRecord)>, StoreError> {
        if keys.is_empty() {
            return Ok(None);
        }
        let mut commands = Pipeline::new();
        for key in keys {
            // One GET per key: the keys are in different slots.
            commands.cmd("GET").arg(code_key(app, key));
        }
        let values = self.redis.send(Operation::FindCode, &commands).await?;
        for (key, value) in keys.iter().zip(values) {
            if let Some(record) = self.redis.parse_code(value)? {
                return Ok(Some((key.clone(), record)));
            }
        }
        Ok(None)
    }

    async fn consume_code(&self, app: &AppId, key: &CodeKey) -> Result<Option<CodeRecord>, StoreError> {
        let mut command = redis::cmd("GETDEL");
        command.arg(code_key(app, key));
        let value = self.redis.send_one(Operation::ConsumeCode, command).await?;
        self.redis.parse_code(value)
    }
}
