//! Pushed authorization requests: one key per request. Anybody can push requests of a public client. Therefore the
//! number of these requests is bounded for each App, in the same way as the number of unbound flows.

use latchkey_crds::types::AppId;
use redis::{Pipeline, Value};

use super::{
    super::{handle::TTL_SLACK_SECONDS, metrics::Operation},
    flows::FlowKeys,
};
use crate::{
    domain::{
        client::ClientAddress,
        openid::par::{PUSHED_REQUEST_SECONDS, PushedRequest, PushedRequestKey, USED_REQUEST_SECONDS},
        ports::{PushedRequests, StoreError},
    },
    store::stores::Stores,
};

fn request_key(app: &AppId, key: &PushedRequestKey) -> String {
    if key.is_public() {
        return FlowKeys::pushed_requests(app).flow(key.as_str());
    }
    format!("lk:{{{app}:{}}}:par", key.as_str())
}

fn used_key(app: &AppId, key: &PushedRequestKey) -> String {
    format!("lk:{{{app}:{}}}:par-used", key.as_str())
}

impl PushedRequests for Stores {
    async fn store_pushed_request(
        &self,
        app: &AppId,
        key: &PushedRequestKey,
        request: &PushedRequest,
        from: ClientAddress,
    ) -> Result<(), StoreError> {
        let redis = &self.redis;
        let json = serde_json::to_string(request).map_err(|_| redis.unexpected_value())?;
        let command = if key.is_public() {
            let lifetime = PUSHED_REQUEST_SECONDS + TTL_SLACK_SECONDS;
            redis.store_flow_command(FlowKeys::pushed_requests(app), key.as_str(), &json, from, lifetime)
        } else {
            let mut command = redis::cmd("SET");
            command.arg(request_key(app, key)).arg(json).arg("EXAT").arg(redis.key_expiry(request.expires_at));
            command
        };
        redis.send_one(Operation::StorePushedRequest, command).await.map(drop)
    }

    async fn find_pushed_request(
        &self,
        app: &AppId,
        key: &PushedRequestKey,
    ) -> Result<Option<PushedRequest>, StoreError> {
        let mut command = redis::cmd("GET");
        command.arg(request_key(app, key));
        let value = self.redis.send_one(Operation::FindPushedRequest, command).await?;
        let json: Option<Vec<u8>> = self.redis.parse(value)?;
        json.map(|json| serde_json::from_slice(&json)).transpose().map_err(|_| self.redis.unexpected_value())
    }

    async fn use_pushed_request(&self, app: &AppId, key: &PushedRequestKey) -> Result<bool, StoreError> {
        let lifetime = USED_REQUEST_SECONDS + TTL_SLACK_SECONDS;
        let mut commands = Pipeline::new();
        commands.cmd("SET").arg(used_key(app, key)).arg(1).arg("NX").arg("EX").arg(lifetime);
        if key.is_public() {
            commands.add_command(self.redis.consume_flow_command(FlowKeys::pushed_requests(app), key.as_str()));
        } else {
            commands.cmd("DEL").arg(request_key(app, key));
        }
        match self.redis.send(Operation::UsePushedRequest, &commands).await?.first() {
            Some(Value::Okay) => Ok(true),
            Some(Value::Nil) => Ok(false),
            _ => Err(self.redis.unexpected_value()),
        }
    }
}
