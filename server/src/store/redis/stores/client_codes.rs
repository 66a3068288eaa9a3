//! Authorization codes of clients, and used assertions (JWTs with which clients authenticate). Redis stores a code as a
//! hash with two fields: what the user granted and, after the exchange, the session.

use aws_lc_rs::digest::{SHA256, digest};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use latchkey_crds::types::AppId;
use redis::{Pipeline, Value};

use super::super::{metrics::Operation, scripts::script_command};
use crate::{
    domain::{
        openid::code::{ClientCodeKey, ClientCodeRecord, ExchangedCode, Redemption, StoredClientCode},
        ports::{ClientCodes, StoreError},
        session::SessionId,
    },
    store::stores::Stores,
};

/// How long Redis keeps a code after its exchange, in seconds. During this time, a second exchange is detected, and
/// ends the session of the first exchange.
const USED_CODE_SECONDS: u32 = 24 * 60 * 60;

fn code_key(app: &AppId, key: &ClientCodeKey) -> String {
    format!("lk:{{{app}:{}}}:client-code", key.as_str())
}

/// The Redis key of a used assertion. A newline separates UID and `jti` in the hashed text, because a UID contains no
/// newline.
fn assertion_key(app: &AppId, client_uid: &str, jti: &str) -> String {
    let hash = digest(&SHA256, format!("{client_uid}\n{jti}").as_bytes());
    format!("lk:{{{app}:{}}}:jti", URL_SAFE_NO_PAD.encode(hash))
}

impl ClientCodes for Stores {
    async fn store_client_code(
        &self,
        app: &AppId,
        key: &ClientCodeKey,
        record: &ClientCodeRecord,
    ) -> Result<(), StoreError> {
        let redis = &self.redis;
        let json = serde_json::to_vec(record).map_err(|_| redis.unexpected_value())?;
        let key = code_key(app, key);
        let mut commands = Pipeline::new();
        commands.cmd("HSET").arg(&key).arg("code").arg(json);
        // The code is valid for 60 s. The slack is another 60 s, so the key lives for 120 s.
        commands.cmd("EXPIREAT").arg(&key).arg(redis.key_expiry(record.expires_at));
        redis.send(Operation::StoreClientCode, &commands).await.map(drop)
    }

    async fn find_client_code(&self, app: &AppId, key: &ClientCodeKey) -> Result<Option<StoredClientCode>, StoreError> {
        let unreadable = || self.redis.unexpected_value();
        let mut command = redis::cmd("HMGET");
        command.arg(code_key(app, key)).arg("code").arg("session");
        let value = self.redis.send_one(Operation::FindClientCode, command).await?;
        let (record, session): (Option<Vec<u8>>, Option<String>) = self.redis.parse(value)?;
        let Some(record) = record else { return Ok(None) };
        let Some(session) = session else {
            let record = serde_json::from_slice(&record).map_err(|_| unreadable())?;
            return Ok(Some(StoredClientCode::New(Box::new(record))));
        };
        let exchanged = serde_json::from_slice(&record).map_err(|_| unreadable())?;
        let session = session.parse().map_err(|_| unreadable())?;
        Ok(Some(StoredClientCode::Exchanged(exchanged, session)))
    }

    async fn redeem_client_code(
        &self,
        app: &AppId,
        key: &ClientCodeKey,
        exchanged: &ExchangedCode,
        session: SessionId,
    ) -> Result<Redemption, StoreError> {
        let keys = [code_key(app, key)];
        let json = serde_json::to_string(exchanged).map_err(|_| self.redis.unexpected_value())?;
        let arguments = [session.to_string(), USED_CODE_SECONDS.to_string(), json];
        let command = script_command(&self.redis.scripts().redeem_client_code, &keys, &arguments);
        let (value, _) = self.redis.send_replicated(Operation::RedeemClientCode, command).await?;
        let first: Option<String> = self.redis.parse(value)?;
        match first.as_deref() {
            None => Ok(Redemption::Unknown),
            Some("") => Ok(Redemption::First),
            Some(session) => session.parse().map(Redemption::Again).map_err(|_| self.redis.unexpected_value()),
        }
    }

    async fn use_assertion(
        &self,
        app: &AppId,
        client_uid: &str,
        jti: &str,
        expires_at: i64,
    ) -> Result<bool, StoreError> {
        let mut command = redis::cmd("SET");
        command.arg(assertion_key(app, client_uid, jti)).arg(1).arg("NX");
        // An assertion is still accepted for some seconds after `expires_at`. The slack in the expiry of the key is
        // longer.
        command.arg("EXAT").arg(self.redis.key_expiry(expires_at));
        // Waits for a replica: if a failover lost the key, anybody who has seen the assertion could use it again.
        let (stored, _) = self.redis.send_replicated(Operation::UseAssertion, command).await?;
        match stored {
            Value::Okay => Ok(true),
            Value::Nil => Ok(false),
            _ => Err(self.redis.unexpected_value()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::super::handle::TTL_SLACK_SECONDS, *};

    #[test]
    fn keys_contain_no_code_and_no_jti() {
        let app: AppId = "shop".parse().unwrap();
        let key = assertion_key(&app, "uid", "a-jti");
        assert!(!key.contains("a-jti") && key.starts_with("lk:{shop:") && key.ends_with("}:jti"), "{key}");
        assert_ne!(assertion_key(&app, "uid2", "a-jti"), key);
        assert_eq!(TTL_SLACK_SECONDS, 60, "a code is stored for 120 s");
    }
}
