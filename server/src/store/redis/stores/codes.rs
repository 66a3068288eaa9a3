//! Codes sent by email: one key per code, deleted when the code is used or expires.

use latchkey_crds::types::AppId;
use redis::{Pipeline, Value};

use super::super::{RedisStore, metrics::Operation};
use crate::{
    domain::{
        code::{CodeKey, CodeRecord},
        ports::{Codes, StoreError},
    },
    store::Stores,
};

/// How much longer a key lives than its code is valid: the record holds the exact end, and clocks differ.
const SLACK_SECONDS: i64 = 60;

/// The Redis key of a code.
fn code_key(app: &AppId, key: &CodeKey) -> String {
    format!("lk:{{{app}:{}}}:code", key.as_str())
}

// === impl RedisStore ===

impl RedisStore {
    fn parse_code(&self, value: Value) -> Result<Option<CodeRecord>, StoreError> {
        let json: Option<Vec<u8>> = redis::from_redis_value(value).map_err(|_| self.unexpected_value())?;
        json.map(|json| serde_json::from_slice(&json)).transpose().map_err(|_| self.unexpected_value())
    }
}

impl Codes for Stores {
    async fn store_code(&self, app: &AppId, key: &CodeKey, record: &CodeRecord) -> Result<(), StoreError> {
        let redis = &self.redis;
        let json = serde_json::to_vec(record).map_err(|_| redis.unexpected_value())?;
        let offset = redis.clock_offset.whole_seconds();
        let until = (record.expires_at + SLACK_SECONDS - offset).max(1);
        let mut commands = Pipeline::new();
        commands.cmd("SET").arg(code_key(app, key)).arg(json).arg("EXAT").arg(until);
        redis.send(Operation::StoreCode, &commands).await.map(drop)
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
        let mut commands = Pipeline::new();
        commands.cmd("GETDEL").arg(code_key(app, key));
        let values = self.redis.send(Operation::ConsumeCode, &commands).await?;
        let value = values.into_iter().next().ok_or_else(|| self.redis.unexpected_value())?;
        self.redis.parse_code(value)
    }
}
