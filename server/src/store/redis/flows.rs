//! Social logins under way: flows that no browser holds, those that were used, and codes that wait for their exchange.

use std::time::Duration;

use latchkey_crds::{rendered::Window, types::AppId};
use redis::{Pipeline, Value};

use super::{
    Redis, call,
    limits::{hashed, part_millis},
    metrics::Operation,
};
use crate::{
    domain::{
        client::ClientAddress,
        flow::{Binding, FLOW_SECONDS, FlowId, FoundLogin, LoginCodeKey, PendingLogin, TooManyFlows},
        ports::{Flows, KeepError, StoreError},
        session::SessionId,
    },
    store::Stores,
};

/// How much longer a key is kept than what it holds counts: the end that counts is inside, and clocks differ.
const SLACK_SECONDS: i64 = 60;
/// Unbound flows that one client address may begin (contract, 5), and the /48 of an IPv6 one.
const PER_CLIENT: Window = Window { count: 30, window_seconds: 60 };
const PER_SITE: Window = Window { count: 300, window_seconds: 60 };
/// Unbound flows of one App that are kept (contract, 5). One more takes the place of the oldest of the client address
/// that has the most.
const MAX_KEPT: u32 = 10_000;
/// How long a code that was used is remembered: a second use in that time ends its session.
const USED_SECONDS: i64 = 24 * 60 * 60;

/// The keys of an App's unbound flows: in one slot, so that they can be counted.
struct Keys {
    /// Ids by their end, the client address of each id, and the number of each client address.
    indexes: [String; 3],
    /// Of a flow, without its id.
    flow: String,
    /// Of the ids of one client address, without it.
    of_client: String,
}

impl Keys {
    fn of(app: &AppId) -> Self {
        let key = |name: &str| format!("lk:{{{app}:flows}}:{name}");
        Self { indexes: ["alive", "clients", "counts"].map(key), flow: key("flow:"), of_client: key("of:") }
    }

    fn flow(&self, id: &FlowId) -> String {
        format!("{}{}", self.flow, id.as_str())
    }
}

/// What a flow counts for when the heaviest is looked for: the IPv4 address, or the /48 of an IPv6 one. A site has 65,536
/// client addresses and would never weigh anything by the /64.
fn weighed_by(client: ClientAddress) -> String {
    hashed(&client.site().map_or_else(|| client.to_string(), |site| site.to_string()))
}

fn used_key(app: &AppId, id: &FlowId) -> String {
    format!("lk:{{{app}:{}}}:flow-used", id.as_str())
}

fn login_key(app: &AppId, key: &LoginCodeKey) -> String {
    format!("lk:{{{app}:{}}}:login-code", key.as_str())
}

/// The counters of a client address and of its site.
fn counters(app: &AppId, client: ClientAddress) -> Vec<(String, Window)> {
    let key = |subject: String| format!("lk:{{{app}:{}}}:unboundFlows:60", hashed(&subject));
    let mut counters = vec![(key(client.to_string()), PER_CLIENT)];
    counters.extend(client.site().map(|site| (key(site.to_string()), PER_SITE)));
    counters
}

fn too_many(name: &'static str, window: Window, millis: i64) -> TooManyFlows {
    let millis = u64::try_from(millis).unwrap_or(0);
    TooManyFlows { name, window, retry_after: Duration::from_millis(millis).max(Duration::from_secs(1)) }
}

// === impl Redis ===

impl Redis {
    /// Counts one more unbound flow of a client address, or nothing at all.
    async fn count_flow(&self, app: &AppId, client: ClientAddress) -> Result<(), KeepError> {
        let counters = counters(app, client);
        let mut commands = Pipeline::new();
        for (key, window) in &counters {
            let arguments = [self.offset_millis(), window.count.to_string(), part_millis(window).to_string()];
            commands.add_command(call(&self.scripts().take, std::slice::from_ref(key), &arguments));
        }
        let values = self.send(Operation::TakeLimits, &commands).await?;
        let mut taken = Pipeline::new();
        let mut refused = None;
        for ((key, window), value) in counters.iter().zip(values) {
            let (place, number): (usize, i64) = redis::from_redis_value(value).map_err(|_| self.unreadable())?;
            if place > 0 {
                refused = Some(too_many("unboundFlowsPerClient", *window, number));
            } else {
                let arguments = [(number / part_millis(window)).to_string()];
                taken.add_command(call(&self.scripts().give_back, std::slice::from_ref(key), &arguments));
            }
        }
        let Some(refused) = refused else { return Ok(()) };
        if !taken.is_empty() {
            self.send(Operation::GiveBack, &taken).await?;
        }
        Err(refused.into())
    }
}

impl Flows for Stores {
    async fn keep_flow(&self, app: &AppId, id: &FlowId, sealed: &str, client: ClientAddress) -> Result<(), KeepError> {
        let redis = &self.redis;
        redis.count_flow(app, client).await?;
        let keys = Keys::of(app);
        let arguments = [
            redis.offset_millis(),
            keys.flow,
            keys.of_client,
            (FLOW_SECONDS * 1000).to_string(),
            MAX_KEPT.to_string(),
            id.as_str().to_owned(),
            sealed.to_owned(),
            weighed_by(client),
        ];
        match redis.ask(Operation::KeepFlow, call(&redis.scripts().keep_flow, &keys.indexes, &arguments)).await? {
            Value::Int(_) => Ok(()),
            _ => Err(redis.unreadable().into()),
        }
    }

    async fn find_flow(&self, app: &AppId, id: &FlowId) -> Result<Option<String>, StoreError> {
        let mut commands = Pipeline::new();
        commands.cmd("GET").arg(Keys::of(app).flow(id));
        let values = self.redis.send(Operation::FindFlow, &commands).await?;
        let value = values.into_iter().next().ok_or_else(|| self.redis.unreadable())?;
        redis::from_redis_value(value).map_err(|_| self.redis.unreadable())
    }

    async fn use_flow(&self, app: &AppId, id: &FlowId, binding: Binding) -> Result<bool, StoreError> {
        let redis = &self.redis;
        let command = match binding {
            Binding::Browser => {
                let life = FLOW_SECONDS + SLACK_SECONDS;
                let mut command = redis::cmd("SET");
                command.arg(used_key(app, id)).arg(1).arg("NX").arg("EX").arg(life);
                command
            }
            Binding::None => {
                let keys = Keys::of(app);
                let arguments = [id.as_str().to_owned(), keys.flow, keys.of_client];
                call(&redis.scripts().use_flow, &keys.indexes, &arguments)
            }
        };
        match redis.ask(Operation::UseFlow, command).await? {
            Value::Okay | Value::Int(1) => Ok(true),
            Value::Nil | Value::Int(0) => Ok(false),
            _ => Err(redis.unreadable()),
        }
    }

    async fn put_login(&self, app: &AppId, key: &LoginCodeKey, login: &PendingLogin) -> Result<(), StoreError> {
        let redis = &self.redis;
        let json = serde_json::to_vec(login).map_err(|_| redis.unreadable())?;
        let until = (login.expires_at + SLACK_SECONDS - redis.clock_offset.whole_seconds()).max(1);
        let key = login_key(app, key);
        let mut commands = Pipeline::new();
        commands.cmd("HSET").arg(&key).arg("login").arg(json);
        commands.cmd("EXPIREAT").arg(&key).arg(until);
        redis.send(Operation::PutLogin, &commands).await.map(drop)
    }

    async fn find_login(&self, app: &AppId, key: &LoginCodeKey) -> Result<Option<FoundLogin>, StoreError> {
        let unreadable = || self.redis.unreadable();
        let mut commands = Pipeline::new();
        commands.cmd("HMGET").arg(login_key(app, key)).arg("login").arg("session");
        let values = self.redis.send(Operation::FindLogin, &commands).await?;
        let value = values.into_iter().next().ok_or_else(unreadable)?;
        let (login, session): (Option<Vec<u8>>, Option<String>) =
            redis::from_redis_value(value).map_err(|_| unreadable())?;
        let Some(login) = login else { return Ok(None) };
        let login = serde_json::from_slice(&login).map_err(|_| unreadable())?;
        let session = session.map(|session| session.parse()).transpose().map_err(|_| unreadable())?;
        Ok(Some(FoundLogin { login, session }))
    }

    async fn take_login(
        &self,
        app: &AppId,
        key: &LoginCodeKey,
        session: SessionId,
    ) -> Result<Option<SessionId>, StoreError> {
        let unreadable = || self.redis.unreadable();
        let key = login_key(app, key);
        let mut commands = Pipeline::new();
        // The first use is the one that sets the field.
        commands.cmd("HSETNX").arg(&key).arg("session").arg(session.to_string());
        commands.cmd("HGET").arg(&key).arg("session");
        commands.cmd("EXPIRE").arg(&key).arg(USED_SECONDS);
        let values = self.redis.send(Operation::TakeLogin, &commands).await?;
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
