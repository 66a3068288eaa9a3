//! Login flows: unbound flows, the ids of used flows, and login codes that wait for their exchange.

use std::time::Duration;

use latchkey_crds::{rendered::Window, types::AppId};
use redis::{Pipeline, Value};

use super::{
    super::{RedisStore, metrics::Operation, script_command},
    limits::{bucket_millis, hashed_subject},
};
use crate::{
    domain::{
        client::ClientAddress,
        flow::{FLOW_SECONDS, FlowBinding, FlowId, LoginCodeKey, PendingLogin, StoredLogin, TooManyFlows},
        ports::{Flows, StoreError, StoreFlowError},
        session::SessionId,
    },
    store::Stores,
};

/// How much longer a key lives than its content is valid: the content holds the exact end, and clocks differ.
const SLACK_SECONDS: i64 = 60;
/// Unbound flows that one client address can start (specification: Social login, Redirect), and the /48 of an IPv6
/// address.
const FLOWS_PER_CLIENT: Window = Window { count: 30, window_seconds: 60 };
const FLOWS_PER_SITE: Window = Window { count: 300, window_seconds: 60 };
/// Maximum number of live unbound flows per App (specification: Social login, Redirect). One more evicts the oldest
/// flow of the client address with the most flows.
const MAX_FLOWS: u32 = 10_000;
/// How long a used login code is kept: a second use in that time ends its session.
const USED_CODE_SECONDS: i64 = 24 * 60 * 60;

/// The keys of an App's unbound flows, in one slot so that a script can count them.
struct FlowKeys {
    /// Ids by their end, the client of each id, and the number of flows per client.
    indexes: [String; 3],
    /// The key prefix of flows; the id follows.
    flow_prefix: String,
    /// The key prefix of the ids of one client; the client follows.
    client_prefix: String,
}

impl FlowKeys {
    fn new(app: &AppId) -> Self {
        let key = |name: &str| format!("lk:{{{app}:flows}}:{name}");
        Self { indexes: ["alive", "clients", "counts"].map(key), flow_prefix: key("flow:"), client_prefix: key("of:") }
    }

    fn flow(&self, id: &FlowId) -> String {
        format!("{}{}", self.flow_prefix, id.as_str())
    }
}

/// The client that a flow counts for when flows are evicted: the IPv4 address, or the /48 of an IPv6 address. Counted
/// by the /64, a site could spread its flows over 65,536 client addresses.
fn eviction_client(client: ClientAddress) -> String {
    hashed_subject(&client.ipv6_site().map_or_else(|| client.to_string(), |site| site.to_string()))
}

fn used_flow_key(app: &AppId, id: &FlowId) -> String {
    format!("lk:{{{app}:{}}}:flow-used", id.as_str())
}

fn login_code_key(app: &AppId, key: &LoginCodeKey) -> String {
    format!("lk:{{{app}:{}}}:login-code", key.as_str())
}

/// The counters of a client address and of its site.
fn counter_keys(app: &AppId, client: ClientAddress) -> Vec<(String, Window)> {
    let key = |subject: String| format!("lk:{{{app}:{}}}:unboundFlows:60", hashed_subject(&subject));
    let mut counters = vec![(key(client.to_string()), FLOWS_PER_CLIENT)];
    counters.extend(client.ipv6_site().map(|site| (key(site.to_string()), FLOWS_PER_SITE)));
    counters
}

fn too_many_flows(name: &'static str, window: Window, millis: i64) -> TooManyFlows {
    let millis = u64::try_from(millis).unwrap_or(0);
    TooManyFlows { name, window, retry_after: Duration::from_millis(millis).max(Duration::from_secs(1)) }
}

// === impl RedisStore ===

impl RedisStore {
    /// Counts a new unbound flow for the client address and its site, or for neither.
    async fn count_flow(&self, app: &AppId, client: ClientAddress) -> Result<(), StoreFlowError> {
        let counters = counter_keys(app, client);
        let mut commands = Pipeline::new();
        for (key, window) in &counters {
            let arguments = [self.offset_millis(), window.count.to_string(), bucket_millis(window).to_string()];
            commands.add_command(script_command(&self.scripts().acquire, std::slice::from_ref(key), &arguments));
        }
        let values = self.send(Operation::AcquireLimits, &commands).await?;
        let mut taken = Pipeline::new();
        let mut refused = None;
        for ((key, window), value) in counters.iter().zip(values) {
            let (place, number): (usize, i64) = redis::from_redis_value(value).map_err(|_| self.unexpected_value())?;
            if place > 0 {
                refused = Some(too_many_flows("unboundFlowsPerClient", *window, number));
            } else {
                let arguments = [(number / bucket_millis(window)).to_string()];
                taken.add_command(script_command(&self.scripts().release, std::slice::from_ref(key), &arguments));
            }
        }
        let Some(refused) = refused else { return Ok(()) };
        if !taken.is_empty() {
            self.send(Operation::ReleaseLimits, &taken).await?;
        }
        Err(refused.into())
    }
}

impl Flows for Stores {
    async fn store_flow(
        &self,
        app: &AppId,
        id: &FlowId,
        sealed: &str,
        client: ClientAddress,
    ) -> Result<(), StoreFlowError> {
        let redis = &self.redis;
        redis.count_flow(app, client).await?;
        let keys = FlowKeys::new(app);
        let arguments = [
            redis.offset_millis(),
            keys.flow_prefix,
            keys.client_prefix,
            (FLOW_SECONDS * 1000).to_string(),
            MAX_FLOWS.to_string(),
            id.as_str().to_owned(),
            sealed.to_owned(),
            eviction_client(client),
        ];
        match redis
            .send_one(Operation::StoreFlow, script_command(&redis.scripts().store_flow, &keys.indexes, &arguments))
            .await?
        {
            Value::Int(_) => Ok(()),
            _ => Err(redis.unexpected_value().into()),
        }
    }

    async fn find_flow(&self, app: &AppId, id: &FlowId) -> Result<Option<String>, StoreError> {
        let mut commands = Pipeline::new();
        commands.cmd("GET").arg(FlowKeys::new(app).flow(id));
        let values = self.redis.send(Operation::FindFlow, &commands).await?;
        let value = values.into_iter().next().ok_or_else(|| self.redis.unexpected_value())?;
        redis::from_redis_value(value).map_err(|_| self.redis.unexpected_value())
    }

    async fn consume_flow(&self, app: &AppId, id: &FlowId, binding: FlowBinding) -> Result<bool, StoreError> {
        let redis = &self.redis;
        let command = match binding {
            FlowBinding::Browser => {
                let life = FLOW_SECONDS + SLACK_SECONDS;
                let mut command = redis::cmd("SET");
                command.arg(used_flow_key(app, id)).arg(1).arg("NX").arg("EX").arg(life);
                command
            }
            FlowBinding::Unbound => {
                let keys = FlowKeys::new(app);
                let arguments = [id.as_str().to_owned(), keys.flow_prefix, keys.client_prefix];
                script_command(&redis.scripts().consume_flow, &keys.indexes, &arguments)
            }
        };
        match redis.send_one(Operation::ConsumeFlow, command).await? {
            Value::Okay | Value::Int(1) => Ok(true),
            Value::Nil | Value::Int(0) => Ok(false),
            _ => Err(redis.unexpected_value()),
        }
    }

    async fn store_login(&self, app: &AppId, key: &LoginCodeKey, login: &PendingLogin) -> Result<(), StoreError> {
        let redis = &self.redis;
        let json = serde_json::to_vec(login).map_err(|_| redis.unexpected_value())?;
        let until = (login.expires_at + SLACK_SECONDS - redis.clock_offset.whole_seconds()).max(1);
        let key = login_code_key(app, key);
        let mut commands = Pipeline::new();
        commands.cmd("HSET").arg(&key).arg("login").arg(json);
        commands.cmd("EXPIREAT").arg(&key).arg(until);
        redis.send(Operation::StoreLogin, &commands).await.map(drop)
    }

    async fn find_login(&self, app: &AppId, key: &LoginCodeKey) -> Result<Option<StoredLogin>, StoreError> {
        let unreadable = || self.redis.unexpected_value();
        let mut commands = Pipeline::new();
        commands.cmd("HMGET").arg(login_code_key(app, key)).arg("login").arg("session");
        let values = self.redis.send(Operation::FindLogin, &commands).await?;
        let value = values.into_iter().next().ok_or_else(unreadable)?;
        let (login, session): (Option<Vec<u8>>, Option<String>) =
            redis::from_redis_value(value).map_err(|_| unreadable())?;
        let Some(login) = login else { return Ok(None) };
        let login = serde_json::from_slice(&login).map_err(|_| unreadable())?;
        let session = session.map(|session| session.parse()).transpose().map_err(|_| unreadable())?;
        Ok(Some(StoredLogin { login, session }))
    }

    async fn redeem_login(
        &self,
        app: &AppId,
        key: &LoginCodeKey,
        session: SessionId,
    ) -> Result<Option<SessionId>, StoreError> {
        let unreadable = || self.redis.unexpected_value();
        let key = login_code_key(app, key);
        let mut commands = Pipeline::new();
        // The use that sets the field is the first one.
        commands.cmd("HSETNX").arg(&key).arg("session").arg(session.to_string());
        commands.cmd("HGET").arg(&key).arg("session");
        commands.cmd("EXPIRE").arg(&key).arg(USED_CODE_SECONDS);
        let values = self.redis.send(Operation::RedeemLogin, &commands).await?;
        let mut values = values.into_iter();
        let (first, held) = (values.next().ok_or_else(unreadable)?, values.next().ok_or_else(unreadable)?);
        match first {
            Value::Int(1) => Ok(None),
            Value::Int(0) => {
                let held: String = redis::from_redis_value(held).map_err(|_| unreadable())?;
                held.parse().map(Some).map_err(|_| unreadable())
            }
            _ => Err(unreadable()),
        }
    }
}
