//! Codes, sessions, flows, limits and refusal counts in Redis, and the client that they share.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use prometheus_client::registry::Registry;
use redis::{Cmd, Pipeline, Script, Value};
use tokio::{task::AbortHandle, time::Instant};
use tracing::{Span, error, info};

use super::{UrlReadError, UrlSource};
use crate::domain::ports::StoreError;

mod client;
mod metrics;
mod stores;

pub use client::{
    error::{CallError, CallErrorKind},
    url::RedisUrlError,
};
pub(crate) use stores::refusals;

use client::RedisClient;
use metrics::{Metrics, Operation};

/// The time limit of a call, including connecting.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);
/// After a failure to connect, read the URL, query sentinels or look up slots, calls fail for this long without a
/// retry.
const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// How often the server checks Redis's eviction policy.
const POLICY_CHECK_INTERVAL: Duration = Duration::from_secs(60);
const POLICY_RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// How to reach Redis.
#[derive(Clone, Debug)]
pub struct Options {
    /// `redis://user:password@host/database`, `redis-sentinel://…` or `redis-cluster://…`; `rediss` for TLS, with the
    /// system's certificate authorities or those of `SSL_CERT_FILE` (docs/redis.md).
    pub url: UrlSource,
    /// Added to Redis's clock. Zero outside tests.
    pub clock_offset: time::Duration,
}

/// The URL cannot be read or is not a Redis URL. The message does not contain the URL.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error(transparent)]
    UnreadableUrl(#[from] UrlReadError),
    #[error("the URL of Redis cannot be used: {0}")]
    InvalidUrl(#[from] RedisUrlError),
}

/// A handle to Redis. Clones share connections.
#[derive(Clone)]
pub struct RedisStore {
    shared: Arc<Shared>,
    clock_offset: time::Duration,
}

struct Shared {
    client: Arc<RedisClient>,
    scripts: Arc<Scripts>,
    metrics: Metrics,
    policy_watch: AbortHandle,
    refusal_counter: refusals::RefusalCounter,
}

/// The code of a script: the shared parts from `scripts/lib`, then `scripts/NAME.lua`.
macro_rules! code {
    ($name:ident $($part:ident)*) => {
        concat!(
            $(include_str!(concat!("scripts/lib/", stringify!($part), ".lua")),)*
            include_str!(concat!("scripts/", stringify!($name), ".lua")),
        )
    };
}

/// Declares the scripts, each with its shared parts. A script touches the keys of one slot.
macro_rules! scripts {
    ($($name:ident: $($part:ident),*;)+) => {
        struct Scripts {
            $($name: Script,)+
        }

        impl Scripts {
            const CODES: &[&str] = &[$(code!($name $($part)*)),+];

            fn new() -> Self {
                Self { $($name: Script::new(code!($name $($part)*)),)+ }
            }
        }
    };
}

scripts! {
    acquire: now, windows;
    consume_flow: flows;
    count_refusal: now;
    due_quarters: now;
    end_other_sessions:;
    end_session: now, session;
    get_session: now, session;
    list_sessions: now;
    open_session: now, session;
    raise_epoch: session;
    refresh: now, session, rate_marks;
    release:;
    retire_user: now;
    store_flow: now, flows;
    store_profile: session;
}

// === impl Options ===

impl Options {
    pub fn new(url: UrlSource) -> Self {
        Self { url, clock_offset: time::Duration::ZERO }
    }
}

// === impl Scripts ===

impl Scripts {
    /// Commands that load all scripts, so that calls can use EVALSHA.
    fn load(&self) -> Pipeline {
        let mut pipeline = Pipeline::new();
        for code in Self::CODES {
            pipeline.cmd("SCRIPT").arg("LOAD").arg(*code);
        }
        pipeline
    }
}

/// The trace span of a call.
fn call_span(operation: Operation) -> Span {
    let operation = operation.as_str();
    latchkey_trace::child_span!(
        "client",
        "redis",
        otel.name = operation,
        db.system.name = "redis",
        db.operation.name = operation,
    )
}

/// A command that runs a loaded script.
fn script_command(script: &Script, keys: &[String], arguments: &[String]) -> Cmd {
    let mut command = redis::cmd("EVALSHA");
    command.arg(script.get_hash()).arg(keys.len()).arg(keys).arg(arguments);
    command
}

// === impl Redis ===

impl RedisStore {
    /// Reads the URL. Connections are opened on first use. Must be called in a tokio runtime.
    pub fn connect(options: Options) -> Result<Self, ConnectError> {
        client::check_url(&options.url)?;
        let scripts = Arc::new(Scripts::new());
        let link = Arc::new(RedisClient::new(options.url, Arc::clone(&scripts)));
        let metrics = Metrics::new();
        let watch = tokio::spawn(watch_eviction_policy(Arc::clone(&link), metrics.clone())).abort_handle();
        let shared = Arc::new_cyclic(|shared| {
            let refusals = refusals::RefusalCounter::start(Weak::clone(shared), options.clock_offset);
            Shared { client: link, scripts, metrics, policy_watch: watch, refusal_counter: refusals }
        });
        Ok(Self { shared, clock_offset: options.clock_offset })
    }

    /// A handle over the same connections with a clock that is `by` ahead.
    pub fn with_clock_ahead(&self, by: time::Duration) -> Self {
        Self { shared: Arc::clone(&self.shared), clock_offset: self.clock_offset + by }
    }

    /// Registers metrics under names without a prefix; the caller passes a registry with the prefix.
    pub fn register_metrics(&self, registry: &mut Registry) {
        self.shared.metrics.register(registry);
    }

    fn scripts(&self) -> &Scripts {
        &self.shared.scripts
    }

    fn offset_millis(&self) -> String {
        self.clock_offset.whole_milliseconds().to_string()
    }

    /// Sends commands as one pipeline. Returns a value for each.
    async fn send(&self, operation: Operation, commands: &Pipeline) -> Result<Vec<Value>, StoreError> {
        let span = call_span(operation);
        let started = Instant::now();
        let answer = self.shared.client.send(commands, started + CALL_TIMEOUT).await;
        self.observe(operation, started, &span, answer)
    }

    /// Sends one command and returns its value.
    async fn send_one(&self, operation: Operation, command: Cmd) -> Result<Value, StoreError> {
        let mut commands = Pipeline::new();
        commands.add_command(command);
        self.send(operation, &commands).await?.into_iter().next().ok_or_else(|| self.unexpected_value())
    }

    /// Like `send`, for writes that must not be lost. Also returns whether a replica has the write, if there are
    /// replicas.
    async fn send_replicated(
        &self,
        operation: Operation,
        command: Cmd,
    ) -> Result<(Value, crate::domain::ports::Replication), StoreError> {
        let span = call_span(operation);
        let started = Instant::now();
        let until = started + CALL_TIMEOUT;
        let answer = self.shared.client.send_replicated(command, until).await;
        self.observe(operation, started, &span, answer)
    }

    fn observe<T>(
        &self,
        operation: Operation,
        started: Instant,
        span: &Span,
        answer: Result<T, CallError>,
    ) -> Result<T, StoreError> {
        self.shared.metrics.observe(operation, started.elapsed());
        answer.map_err(|fault| {
            latchkey_trace::record_error(span, fault.kind.as_str());
            self.store_error(fault)
        })
    }

    fn store_error(&self, fault: CallError) -> StoreError {
        self.shared.metrics.count_error(fault.kind);
        fault.into()
    }

    /// The error for a value of an unexpected form.
    fn unexpected_value(&self) -> StoreError {
        self.store_error(CallError::unexpected_reply())
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.policy_watch.abort();
    }
}

/// Logs an error and sets a metric while Redis evicts keys when its memory is full: that ends sessions and loses
/// limits.
async fn watch_eviction_policy(link: Arc<RedisClient>, metrics: Metrics) {
    let mut reported = None;
    loop {
        let mut commands = Pipeline::new();
        commands.cmd("INFO").arg("memory");
        let answers = link.send_to_all(&commands, Instant::now() + CALL_TIMEOUT).await.unwrap_or_default();
        let policy_of = |values: Vec<Value>| {
            let info = values.into_iter().next().and_then(client::text)?;
            client::info_field(&info, "maxmemory_policy").map(str::to_owned)
        };
        // In a cluster, a policy that evicts on any primary counts.
        let policies: Vec<String> = answers.into_iter().filter_map(policy_of).collect();
        let policy = policies.iter().find(|policy| *policy != "noeviction").or(policies.first());
        let Some(policy) = policy else {
            tokio::time::sleep(POLICY_RETRY_INTERVAL).await;
            continue;
        };
        let evicts = policy != "noeviction";
        metrics.set_evicts(evicts);
        if reported != Some(evicts) && evicts {
            error!(
                policy,
                "Redis evicts keys when full: sessions and limits can be lost; set maxmemory-policy to noeviction"
            );
        } else if reported == Some(true) {
            info!(policy, "Redis no longer evicts keys");
        }
        reported = Some(evicts);
        tokio::time::sleep(POLICY_CHECK_INTERVAL).await;
    }
}
