//! A call to Postgres: one connection, one deadline and one trace span. The metrics count its errors.

use std::{sync::Arc, time::Duration};

use sqlx::{PgConnection, Postgres, pool::PoolConnection};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, error::Elapsed, timeout_at},
};
use tracing::Span;

use super::{CallError, PostgresStore};
use crate::domain::ports::StoreError;

/// The time limit of a call, including the wait for a connection: a stalled Postgres causes 503s, not a queue.
const CALL_TIMEOUT: Duration = Duration::from_secs(4);

/// A connection for one call, with the call's deadline. A call that is cut off, by the deadline or by cancellation,
/// leaves the connection in an unknown state, so the connection is closed. Postgres then rolls back.
pub(super) struct CallConnection {
    connection: Option<PoolConnection<Postgres>>,
    deadline: Instant,
    postgres: PostgresStore,
    span: Span,
    /// Present in calls of administrators, of consumers of webhook events, and of the webhook workers.
    _permit: Option<OwnedSemaphorePermit>,
}

// === impl PostgresStore ===

impl PostgresStore {
    /// Acquires a connection for a call. `operation` names the call's trace span.
    pub(super) async fn begin_call(&self, operation: &'static str) -> Result<CallConnection, StoreError> {
        let deadline = Instant::now() + CALL_TIMEOUT;
        let span = call_span(operation);
        self.begin_call_until(deadline, span, None).await
    }

    /// Like `begin_call`, for a call of an administrator or of a consumer of webhook events. All these calls together
    /// use only a part of the pool.
    pub(super) async fn begin_administration(&self, operation: &'static str) -> Result<CallConnection, StoreError> {
        self.begin_limited(operation, &self.shared.administration).await
    }

    /// Like `begin_call`, for the workers of webhooks, which together use two connections.
    pub(super) async fn begin_webhook_call(&self, operation: &'static str) -> Result<CallConnection, StoreError> {
        self.begin_limited(operation, &self.shared.webhooks).await
    }

    async fn begin_limited(
        &self,
        operation: &'static str,
        permits: &Arc<Semaphore>,
    ) -> Result<CallConnection, StoreError> {
        let deadline = Instant::now() + CALL_TIMEOUT;
        let span = call_span(operation);
        let permits = Arc::clone(permits);
        let Ok(Ok(permit)) = timeout_at(deadline, permits.acquire_owned()).await else {
            return Err(self.record_error_in(&span, CallError::pool_timeout()));
        };
        // The wait for the permit may have used most of the time until the deadline.
        match timeout_at(deadline, self.begin_call_until(deadline, span.clone(), Some(permit))).await {
            Ok(call) => call,
            Err(_) => Err(self.record_error_in(&span, CallError::pool_timeout())),
        }
    }

    async fn begin_call_until(
        &self,
        deadline: Instant,
        span: Span,
        permit: Option<OwnedSemaphorePermit>,
    ) -> Result<CallConnection, StoreError> {
        self.reread_url(false);
        let started = Instant::now();
        let mut acquired = self.shared.acquire().await;
        if let Err(error) = &acquired
            && error.may_succeed_with_new_url()
            && self.reread_url(true)
        {
            acquired = self.shared.acquire().await;
        }
        self.shared.metrics.observe_wait(started.elapsed());
        let connection = acquired.map_err(|error| self.record_error_in(&span, error))?;
        Ok(CallConnection { connection: Some(connection), deadline, postgres: self.clone(), span, _permit: permit })
    }

    fn record_error_in(&self, span: &Span, error: CallError) -> StoreError {
        latchkey_telemetry::record_error(span, error.kind.as_str());
        self.record_error(error)
    }

    pub(super) fn record_error(&self, error: CallError) -> StoreError {
        if error.makes_connections_suspect() {
            *self.shared.last_broken.lock() = Some(Instant::now());
        }
        self.shared.metrics.count_error(error.kind);
        error.into()
    }
}

fn call_span(operation: &'static str) -> Span {
    latchkey_telemetry::child_span!(
        "client",
        "postgres",
        otel.name = operation,
        db.system.name = "postgresql",
        db.operation.name = operation,
    )
}

// === impl CallConnection ===

impl CallConnection {
    /// Returns the connection and the call's deadline.
    pub(super) fn parts(&mut self) -> (&mut PgConnection, Instant) {
        (self.connection.as_mut().expect("the connection is present until `end_call`"), self.deadline)
    }

    /// Ends the call. The connection returns to the pool, or is closed if the deadline has passed.
    pub(super) fn end_call<T>(mut self, result: Result<Result<T, sqlx::Error>, Elapsed>) -> Result<T, StoreError> {
        let Ok(result) = result else {
            return Err(self.postgres.record_error_in(&self.span, CallError::deadline()));
        };
        drop(self.connection.take());
        if result.is_ok() {
            self.postgres.shared.availability.record_success();
        }
        result.map_err(|error| self.postgres.record_error_in(&self.span, CallError::from(&error)))
    }
}

impl Drop for CallConnection {
    fn drop(&mut self) {
        if let Some(mut connection) = self.connection.take() {
            connection.close_on_drop();
        }
    }
}
