//! Codes, sessions, limits and refusals, in Redis: connections, scripts, and what errors mean.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use prometheus_client::registry::Registry;
use redis::{Cmd, Pipeline, Script, Value};
use tokio::{task::AbortHandle, time::Instant};
use tracing::{Span, error, info};

use super::{Unreadable, UrlSource};
use crate::domain::ports::StoreError;

mod cluster;
mod codes;
mod errors;
mod flows;
mod form;
mod limits;
mod line;
mod link;
mod metrics;
mod node;
pub(crate) mod refusals;
mod sentinel;
mod sessions;

pub use errors::{Fault, FaultKind};
pub use form::Malformed;

use link::Link;
use metrics::{Metrics, Operation};

/// What a call may take in all, connecting included.
const CALL_LIMIT: Duration = Duration::from_secs(2);
/// What failed (a connection, a look at the URL, at sentinels or at slots) is not tried again for so long.
const PAUSE: Duration = Duration::from_millis(100);
/// How often the policy for a full memory is looked at.
const POLICY_INTERVAL: Duration = Duration::from_secs(60);
const POLICY_RETRY: Duration = Duration::from_secs(5);

/// How to reach Redis.
#[derive(Clone, Debug)]
pub struct Options {
    /// `redis://user:password@host/database`, `redis-sentinel://…`, `redis-cluster://…`, or with `rediss` for TLS, with
    /// the system's authorities or those of `SSL_CERT_FILE` (docs/redis.md).
    pub url: UrlSource,
    /// Added to Redis's clock; zero outside tests.
    pub clock_offset: time::Duration,
}

/// The URL is not there or not one of Redis. The text does not hold it.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error(transparent)]
    Unreadable(#[from] Unreadable),
    #[error("the URL of Redis cannot be used: {0}")]
    Malformed(#[from] Malformed),
}

/// A handle to Redis.
#[derive(Clone)]
pub struct Redis {
    shared: Arc<Shared>,
    clock_offset: time::Duration,
}

struct Shared {
    link: Arc<Link>,
    scripts: Arc<Scripts>,
    metrics: Metrics,
    watch: AbortHandle,
    refusals: refusals::Counting,
}

/// Declares the scripts, each put together from its parts; each touches the keys of one slot.
macro_rules! scripts {
    ($($name:ident = $($part:literal)+;)+) => {
        struct Scripts {
            $($name: Script,)+
        }

        impl Scripts {
            const CODES: &[&str] = &[$(concat!($(include_str!($part)),+)),+];

            fn new() -> Self {
                Self { $($name: Script::new(concat!($(include_str!($part)),+)),)+ }
            }
        }
    };
}

scripts! {
    open = "now.lua" "session.lua" "open.lua";
    get = "now.lua" "session.lua" "get.lua";
    refresh = "now.lua" "session.lua" "marks.lua" "refresh.lua";
    list = "now.lua" "list.lua";
    end = "now.lua" "session.lua" "end.lua";
    end_others = "end_others.lua";
    raise = "session.lua" "raise.lua";
    retire = "now.lua" "retire.lua";
    profile = "session.lua" "profile.lua";
    take = "now.lua" "windows.lua" "take.lua";
    give_back = "give_back.lua";
    keep_flow = "now.lua" "forget_flow.lua" "keep_flow.lua";
    use_flow = "forget_flow.lua" "use_flow.lua";
    refuse = "now.lua" "refuse.lua";
    due = "now.lua" "due.lua";
}

// === impl Options ===

impl Options {
    pub fn new(url: UrlSource) -> Self {
        Self { url, clock_offset: time::Duration::ZERO }
    }
}

// === impl Scripts ===

impl Scripts {
    /// Loads all of them, so that calls need only name them.
    fn load(&self) -> Pipeline {
        let mut pipeline = Pipeline::new();
        for code in Self::CODES {
            pipeline.cmd("SCRIPT").arg("LOAD").arg(*code);
        }
        pipeline
    }
}

/// The span of a call, from its making to its end.
fn span(operation: Operation) -> Span {
    let operation = operation.as_str();
    latchkey_trace::child!(
        "client",
        "redis",
        otel.name = operation,
        db.system.name = "redis",
        db.operation.name = operation,
    )
}

/// A call of a loaded script.
fn call(script: &Script, keys: &[String], arguments: &[String]) -> Cmd {
    let mut command = redis::cmd("EVALSHA");
    command.arg(script.get_hash()).arg(keys.len()).arg(keys).arg(arguments);
    command
}

// === impl Redis ===

impl Redis {
    /// Reads the URL; connections are made when they are needed. Needs a running tokio.
    pub fn connect(options: Options) -> Result<Self, ConnectError> {
        link::check(&options.url)?;
        let scripts = Arc::new(Scripts::new());
        let link = Arc::new(Link::new(options.url, Arc::clone(&scripts)));
        let metrics = Metrics::new();
        let watch = tokio::spawn(watch_policy(Arc::clone(&link), metrics.clone())).abort_handle();
        let shared = Arc::new_cyclic(|shared| {
            let refusals = refusals::Counting::start(Weak::clone(shared), options.clock_offset);
            Shared { link, scripts, metrics, watch, refusals }
        });
        Ok(Self { shared, clock_offset: options.clock_offset })
    }

    /// The same Redis over the same connections, so much later by its clock.
    pub fn later(&self, by: time::Duration) -> Self {
        Self { shared: Arc::clone(&self.shared), clock_offset: self.clock_offset + by }
    }

    /// Under names without a prefix: the registry is to be one of Redis's own.
    pub fn register(&self, registry: &mut Registry) {
        self.shared.metrics.register(registry);
    }

    fn scripts(&self) -> &Scripts {
        &self.shared.scripts
    }

    fn offset_millis(&self) -> String {
        self.clock_offset.whole_milliseconds().to_string()
    }

    /// Sends commands in one go; an answer for each.
    async fn send(&self, operation: Operation, commands: &Pipeline) -> Result<Vec<Value>, StoreError> {
        let span = span(operation);
        let started = Instant::now();
        let answer = self.shared.link.send(commands, started + CALL_LIMIT).await;
        self.observed(operation, started, &span, answer)
    }

    /// Sends one command; its answer.
    async fn ask(&self, operation: Operation, command: Cmd) -> Result<Value, StoreError> {
        let mut commands = Pipeline::new();
        commands.add_command(command);
        self.send(operation, &commands).await?.into_iter().next().ok_or_else(|| self.unreadable())
    }

    /// As `send`, for what must not be lost: whether a replica has it too, where there are any.
    async fn send_replicated(
        &self,
        operation: Operation,
        command: Cmd,
    ) -> Result<(Value, crate::domain::ports::Carried), StoreError> {
        let span = span(operation);
        let started = Instant::now();
        let until = started + CALL_LIMIT;
        let answer = self.shared.link.send_replicated(command, until).await;
        self.observed(operation, started, &span, answer)
    }

    fn observed<T>(
        &self,
        operation: Operation,
        started: Instant,
        span: &Span,
        answer: Result<T, Fault>,
    ) -> Result<T, StoreError> {
        self.shared.metrics.took(operation, started.elapsed());
        answer.map_err(|fault| {
            latchkey_trace::fail(span, fault.kind.as_str());
            self.failed(fault)
        })
    }

    fn failed(&self, fault: Fault) -> StoreError {
        self.shared.metrics.failed(fault.kind);
        fault.into()
    }

    /// An answer of a form that no command of ours has.
    fn unreadable(&self) -> StoreError {
        self.failed(Fault::unreadable())
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.watch.abort();
    }
}

/// A Redis that evicts keys when it is full ends sessions and forgets limits: whoever runs it must hear of that.
async fn watch_policy(link: Arc<Link>, metrics: Metrics) {
    let mut told = None;
    loop {
        let mut commands = Pipeline::new();
        commands.cmd("INFO").arg("memory");
        let answers = link.send_to_all(&commands, Instant::now() + CALL_LIMIT).await.unwrap_or_default();
        let policy_of = |values: Vec<Value>| {
            let info = values.into_iter().next().and_then(link::text)?;
            link::field(&info, "maxmemory_policy").map(str::to_owned)
        };
        // In a cluster, the worst of all.
        let policies: Vec<String> = answers.into_iter().filter_map(policy_of).collect();
        let policy = policies.iter().find(|policy| *policy != "noeviction").or(policies.first());
        let Some(policy) = policy else {
            tokio::time::sleep(POLICY_RETRY).await;
            continue;
        };
        let evicts = policy != "noeviction";
        metrics.evicts(evicts);
        if told != Some(evicts) && evicts {
            error!(
                policy,
                "Redis evicts keys when it is full: sessions and limits can vanish; set maxmemory-policy noeviction"
            );
        } else if told == Some(true) {
            info!(policy, "Redis does not evict keys any more");
        }
        told = Some(evicts);
        tokio::time::sleep(POLICY_INTERVAL).await;
    }
}
