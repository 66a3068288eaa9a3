//! The handle to Redis. It sends commands and scripts. Each call has a trace span, metrics and a deadline.

use std::sync::{Arc, Weak};

use prometheus_client::registry::Registry;
use redis::{Cmd, FromRedisValue, Pipeline, Value};
use tokio::{task::AbortHandle, time::Instant};
use tracing::Span;

use super::{
    client::{RedisClient, error::CallError, timeouts::CALL_TIMEOUT},
    metrics::{Metrics, Operation},
    scripts::Scripts,
    stores::refusal_queue::RefusalQueue,
};
use crate::domain::ports::{Replication, StoreError};

/// A key lives this much longer than its content is valid. The content itself contains the time at which it expires.
/// The extra time allows for clocks that differ.
pub(super) const TTL_SLACK_SECONDS: i64 = 60;

/// A handle to Redis. Clones share connections.
#[derive(Clone)]
pub struct RedisStore {
    shared: Arc<Shared>,
    clock_offset: time::Duration,
}

/// A handle that does not keep the connections open.
pub(super) struct WeakRedisStore {
    shared: Weak<Shared>,
    clock_offset: time::Duration,
}

/// The state that all handles share.
pub(super) struct Shared {
    pub(super) client: Arc<RedisClient>,
    pub(super) scripts: Arc<Scripts>,
    pub(super) metrics: Metrics,
    /// The task that watches the eviction policy.
    pub(super) policy_watch: AbortHandle,
    pub(super) refusal_queue: RefusalQueue,
}

/// Creates the trace span of a call.
fn call_span(operation: Operation) -> Span {
    let operation = operation.as_str();
    latchkey_telemetry::child_span!(
        "client",
        "redis",
        otel.name = operation,
        db.system.name = "redis",
        db.operation.name = operation,
    )
}

// === impl RedisStore ===

impl RedisStore {
    pub(super) fn new(shared: Shared, clock_offset: time::Duration) -> Self {
        Self { shared: Arc::new(shared), clock_offset }
    }

    /// Returns a handle over the same connections, with `by` added to the clock offset.
    pub fn with_clock_ahead(&self, by: time::Duration) -> Self {
        Self { shared: Arc::clone(&self.shared), clock_offset: self.clock_offset + by }
    }

    pub(super) fn downgrade(&self) -> WeakRedisStore {
        WeakRedisStore { shared: Arc::downgrade(&self.shared), clock_offset: self.clock_offset }
    }

    /// Registers the metrics under names without a prefix. `registry` must add the prefix `redis`.
    pub fn register_metrics(&self, registry: &mut Registry) {
        self.shared.metrics.register(registry);
    }

    pub(super) fn scripts(&self) -> &Scripts {
        &self.shared.scripts
    }

    pub(super) fn refusal_queue(&self) -> &RefusalQueue {
        &self.shared.refusal_queue
    }

    /// Returns the clock offset in milliseconds, as scripts expect it.
    pub(super) fn offset_millis(&self) -> String {
        self.clock_offset.whole_milliseconds().to_string()
    }

    /// Returns the time at which a key expires if its content is valid until `expires_at`: in Unix seconds by Redis's
    /// own clock, without the offset.
    pub(super) fn key_expiry(&self, expires_at: i64) -> i64 {
        (expires_at + TTL_SLACK_SECONDS - self.clock_offset.whole_seconds()).max(1)
    }

    /// Sends commands as one pipeline. Returns a value for each command.
    pub(super) async fn send(&self, operation: Operation, commands: &Pipeline) -> Result<Vec<Value>, StoreError> {
        let span = call_span(operation);
        let started = Instant::now();
        let outcome = self.shared.client.send(commands, started + CALL_TIMEOUT).await;
        self.observe(operation, started, &span, outcome)
    }

    /// Sends one command and returns its value.
    pub(super) async fn send_one(&self, operation: Operation, command: Cmd) -> Result<Value, StoreError> {
        let mut commands = Pipeline::new();
        commands.add_command(command);
        self.send(operation, &commands).await?.into_iter().next().ok_or_else(|| self.unexpected_value())
    }

    /// Like `send_one`, for writes that must not be lost. If Redis has replicas, waits up to 100 ms for one of them to
    /// acknowledge the write.
    pub(super) async fn send_replicated(
        &self,
        operation: Operation,
        command: Cmd,
    ) -> Result<(Value, Replication), StoreError> {
        let span = call_span(operation);
        let started = Instant::now();
        let outcome = self.shared.client.send_replicated(command, started + CALL_TIMEOUT).await;
        self.observe(operation, started, &span, outcome)
    }

    fn observe<T>(
        &self,
        operation: Operation,
        started: Instant,
        span: &Span,
        outcome: Result<T, CallError>,
    ) -> Result<T, StoreError> {
        self.shared.metrics.observe(operation, started.elapsed());
        outcome.map_err(|error| {
            latchkey_telemetry::record_error(span, error.kind.as_str());
            self.store_error(error)
        })
    }

    /// Parses a value. Counts an error if the value has another type.
    pub(super) fn parse<T: FromRedisValue>(&self, value: Value) -> Result<T, StoreError> {
        redis::from_redis_value(value).map_err(|_| self.unexpected_value())
    }

    /// Counts and returns the error for a value of an unexpected form.
    pub(super) fn unexpected_value(&self) -> StoreError {
        self.store_error(CallError::unexpected_reply())
    }

    fn store_error(&self, error: CallError) -> StoreError {
        self.shared.metrics.count_error(error.kind);
        error.into()
    }
}

// === impl WeakRedisStore ===

impl WeakRedisStore {
    /// Returns a handle that keeps the connections open. `None` if the last such handle was dropped.
    pub(super) fn upgrade(&self) -> Option<RedisStore> {
        Some(RedisStore { shared: self.shared.upgrade()?, clock_offset: self.clock_offset })
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.policy_watch.abort();
    }
}
