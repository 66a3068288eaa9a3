//! Flows: unbound flows, the ids of used flows, and one-time codes that wait for their exchange.

use latchkey_crds::{rendered::Window, types::AppId};
use redis::{Cmd, Pipeline, Value};

use super::{
    super::{
        handle::{RedisStore, TTL_SLACK_SECONDS},
        metrics::Operation,
        scripts::script_command,
    },
    windows::{AcquireReply, hashed_subject},
};
use crate::{
    domain::{
        client::ClientAddress,
        flow::{FLOW_SECONDS, FlowBinding, FlowId, LoginCodeKey, PendingLogin, StoredLogin, TooManyFlows},
        ports::{Flows, StoreError, StoreFlowError},
        session::SessionId,
    },
    store::stores::Stores,
};

/// Maximum number of unbound flows that one client address can start (specification: Social login, Redirect).
const FLOWS_PER_CLIENT: Window = Window { count: 30, window_seconds: 60 };
/// Maximum number of unbound flows that all client addresses of one IPv6 /48 can start together.
const FLOWS_PER_SITE: Window = Window { count: 300, window_seconds: 60 };
/// Maximum number of live unbound flows per App (specification: Social login, Redirect). A further flow evicts the
/// oldest flow of the client (IPv4 address or IPv6 /48) with the most flows.
const MAX_FLOWS: u32 = 10_000;
/// How long Redis stores a used one-time code. A second use in that time ends the session of the first use.
const USED_CODE_SECONDS: i64 = 24 * 60 * 60;

/// The keys of an App's unbound flows, or of its pushed requests of public clients, which are bounded in the same way.
/// All keys are in one slot, so that a script can count the flows.
pub(super) struct FlowKeys {
    /// The keys of three indexes: the ids of flows, scored by their end time; the client of each flow id; the number of
    /// flows of each client.
    indexes: [String; 3],
    /// The key prefix of a flow; the flow's id follows.
    flow_prefix: String,
    /// The key prefix of a client's flow ids; the client follows.
    client_prefix: String,
}

impl FlowKeys {
    fn new(app: &AppId) -> Self {
        Self::of_kind(app, "flows")
    }

    /// The keys of the pushed requests of public clients.
    pub(super) fn pushed_requests(app: &AppId) -> Self {
        Self::of_kind(app, "pushed")
    }

    fn of_kind(app: &AppId, kind: &str) -> Self {
        let key = |name: &str| format!("lk:{{{app}:{kind}}}:{name}");
        Self { indexes: ["alive", "clients", "counts"].map(key), flow_prefix: key("flow:"), client_prefix: key("of:") }
    }

    pub(super) fn flow(&self, id: &str) -> String {
        format!("{}{id}", self.flow_prefix)
    }
}

/// Returns the client to which a flow belongs when flows are evicted: the IPv4 address, or the /48 of an IPv6 address.
/// With the /64, a site (a /48) could spread its flows over 65,536 clients.
fn eviction_client(client: ClientAddress) -> String {
    hashed_subject(&client.ipv6_site().map_or_else(|| client.to_string(), |site| site.to_string()))
}

fn used_flow_key(app: &AppId, id: &FlowId) -> String {
    format!("lk:{{{app}:{}}}:flow-used", id.as_str())
}

/// Returns a command that sets the key of a used flow, unless the key is already set.
fn mark_flow_used(app: &AppId, id: &FlowId) -> Cmd {
    let mut command = redis::cmd("SET");
    command.arg(used_flow_key(app, id)).arg(1).arg("NX").arg("EX").arg(FLOW_SECONDS + TTL_SLACK_SECONDS);
    command
}

fn login_code_key(app: &AppId, key: &LoginCodeKey) -> String {
    format!("lk:{{{app}:{}}}:login-code", key.as_str())
}

/// Returns the keys of the counters of a client address and of its site (IPv6 /48), with their windows.
fn counter_keys(app: &AppId, client: ClientAddress) -> Vec<(String, Window)> {
    let key = |subject: String| format!("lk:{{{app}:{}}}:unboundFlows:60", hashed_subject(&subject));
    let mut counters = vec![(key(client.to_string()), FLOWS_PER_CLIENT)];
    counters.extend(client.ipv6_site().map(|site| (key(site.to_string()), FLOWS_PER_SITE)));
    counters
}

// === impl RedisStore ===

impl RedisStore {
    /// Returns a command that stores a flow, and evicts another one if there are too many.
    pub(super) fn store_flow_command(
        &self,
        keys: FlowKeys,
        id: &str,
        text: &str,
        client: ClientAddress,
        lifetime_seconds: i64,
    ) -> Cmd {
        let arguments = [
            self.offset_millis(),
            keys.flow_prefix,
            keys.client_prefix,
            (lifetime_seconds * 1000).to_string(),
            MAX_FLOWS.to_string(),
            id.to_owned(),
            text.to_owned(),
            eviction_client(client),
        ];
        script_command(&self.scripts().store_flow, &keys.indexes, &arguments)
    }

    /// Returns a command that removes a flow. Its reply is 1, or 0 if there is no such flow.
    pub(super) fn consume_flow_command(&self, keys: FlowKeys, id: &str) -> Cmd {
        let arguments = [id.to_owned(), keys.flow_prefix, keys.client_prefix];
        script_command(&self.scripts().consume_flow, &keys.indexes, &arguments)
    }

    /// Counts a new unbound flow for the client address and its site. If one of them has reached its maximum, counts
    /// the flow for neither.
    async fn count_flow(&self, app: &AppId, client: ClientAddress) -> Result<(), StoreFlowError> {
        let counters = counter_keys(app, client);
        let mut commands = Pipeline::new();
        for (key, window) in &counters {
            commands.add_command(self.acquire_command(std::slice::from_ref(key), &[*window]));
        }
        let values = self.send(Operation::AcquireLimits, &commands).await?;
        let mut releases = Pipeline::new();
        let mut limited = None;
        for ((key, window), value) in counters.iter().zip(values) {
            match self.parse_acquire(value)? {
                AcquireReply::Counted(at) => {
                    releases.add_command(self.release_command(std::slice::from_ref(key), &[*window], at));
                }
                AcquireReply::Limited { retry_after, .. } => {
                    limited = Some(TooManyFlows { name: "unboundFlowsPerClient", window: *window, retry_after });
                }
            }
        }
        let Some(limited) = limited else { return Ok(()) };
        if !releases.is_empty() {
            self.send(Operation::ReleaseLimits, &releases).await?;
        }
        Err(limited.into())
    }
}

impl Flows for Stores {
    async fn store_flow(
        &self,
        app: &AppId,
        id: &FlowId,
        sealed: &str,
        client: ClientAddress,
        lifetime_seconds: i64,
    ) -> Result<(), StoreFlowError> {
        let redis = &self.redis;
        redis.count_flow(app, client).await?;
        let command = redis.store_flow_command(FlowKeys::new(app), id.as_str(), sealed, client, lifetime_seconds);
        match redis.send_one(Operation::StoreFlow, command).await? {
            Value::Int(_) => Ok(()),
            _ => Err(redis.unexpected_value().into()),
        }
    }

    async fn find_flow(&self, app: &AppId, id: &FlowId) -> Result<Option<String>, StoreError> {
        let mut command = redis::cmd("GET");
        command.arg(FlowKeys::new(app).flow(id.as_str()));
        let value = self.redis.send_one(Operation::FindFlow, command).await?;
        self.redis.parse(value)
    }

    async fn consume_flow(&self, app: &AppId, id: &FlowId, binding: FlowBinding) -> Result<bool, StoreError> {
        let redis = &self.redis;
        let command = match binding {
            FlowBinding::Browser => mark_flow_used(app, id),
            FlowBinding::Unbound => redis.consume_flow_command(FlowKeys::new(app), id.as_str()),
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
        let key = login_code_key(app, key);
        let mut commands = Pipeline::new();
        commands.cmd("HSET").arg(&key).arg("login").arg(json);
        commands.cmd("EXPIREAT").arg(&key).arg(redis.key_expiry(login.expires_at));
        redis.send(Operation::StoreLogin, &commands).await.map(drop)
    }

    async fn find_login(&self, app: &AppId, key: &LoginCodeKey) -> Result<Option<StoredLogin>, StoreError> {
        let unreadable = || self.redis.unexpected_value();
        let mut command = redis::cmd("HMGET");
        command.arg(login_code_key(app, key)).arg("login").arg("session");
        let value = self.redis.send_one(Operation::FindLogin, command).await?;
        let (login, session): (Option<Vec<u8>>, Option<String>) = self.redis.parse(value)?;
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
        // The first use of the code sets the field `session`; later uses do not change it.
        commands.cmd("HSETNX").arg(&key).arg("session").arg(session.to_string());
        commands.cmd("HGET").arg(&key).arg("session");
        commands.cmd("EXPIRE").arg(&key).arg(USED_CODE_SECONDS);
        let values = self.redis.send(Operation::RedeemLogin, &commands).await?;
        let mut values = values.into_iter();
        let (is_first, stored) = (values.next().ok_or_else(unreadable)?, values.next().ok_or_else(unreadable)?);
        match is_first {
            Value::Int(1) => Ok(None),
            Value::Int(0) => {
                let stored: String = self.redis.parse(stored)?;
                stored.parse().map(Some).map_err(|_| unreadable())
            }
            _ => Err(unreadable()),
        }
    }
}
