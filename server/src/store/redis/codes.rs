//! Codes that were mailed: a key each, gone when it is taken or has ended.

use latchkey_crds::types::AppId;
use redis::{Pipeline, Value};

use super::{Redis, metrics::Operation};
use crate::{
    domain::{
        code::{CodeKey, CodeRecord},
        ports::{Codes, StoreError},
    },
    store::Stores,
};

/// How much longer a code is kept than it holds: the end that counts is in the record, and clocks differ.
const SLACK_SECONDS: i64 = 60;

/// Where a code is kept.
fn key_of(app: &AppId, key: &CodeKey) -> String {
    format!("lk:{{{app}:{}}}:code", key.as_str())
}

// === impl Redis ===

impl Redis {
    fn read_code(&self, value: Value) -> Result<Option<CodeRecord>, StoreError> {
        let json: Option<Vec<u8>> = redis::from_redis_value(value).map_err(|_| self.unreadable())?;
        json.map(|json| serde_json::from_slice(&json)).transpose().map_err(|_| self.unreadable())
    }
}

impl Codes for Stores {
    async fn put_code(&self, app: &AppId, key: &CodeKey, record: &CodeRecord) -> Result<(), StoreError> {
        let redis = &self.redis;
        let json = serde_json::to_vec(record).map_err(|_| redis.unreadable())?;
        let offset = redis.clock_offset.whole_seconds();
        let until = (record.expires_at + SLACK_SECONDS - offset).max(1);
        let mut commands = Pipeline::new();
        commands.cmd("SET").arg(key_of(app, key)).arg(json).arg("EXAT").arg(until);
        redis.send(Operation::PutCode, &commands).await.map(drop)
    }

    async fn find_code(&self, app: &AppId, keys: &[CodeKey]) -> Result<Option<(CodeKey, CodeRecord)>, StoreError> {
        if keys.is_empty() {
            return Ok(None);
        }
        let mut commands = Pipeline::new();
        for key in keys {
            // One by one: the keys lie in different slots.
            commands.cmd("GET").arg(key_of(app, key));
        }
        let values = self.redis.send(Operation::FindCode, &commands).await?;
        for (key, value) in keys.iter().zip(values) {
            if let Some(record) = self.redis.read_code(value)? {
                return Ok(Some((key.clone(), record)));
            }
        }
        Ok(None)
    }

    async fn take_code(&self, app: &AppId, key: &CodeKey) -> Result<Option<CodeRecord>, StoreError> {
        let mut commands = Pipeline::new();
        commands.cmd("GETDEL").arg(key_of(app, key));
        let values = self.redis.send(Operation::TakeCode, &commands).await?;
        let value = values.into_iter().next().ok_or_else(|| self.redis.unreadable())?;
        self.redis.read_code(value)
    }
}
