//! Ends a lease with the outcome of the delivery.

use sqlx::{Connection, PgConnection};
use tokio::time::timeout_at;
use tracing::debug;

use crate::{
    domain::ports::{ClaimedEvent, EventOutcome, StoreError},
    store::postgres::PostgresStore,
};

/// How an outcome changes the state of the webhook.
struct StateChange {
    /// Whether to count a failure; otherwise the count begins again.
    has_failed: bool,
    stopped_for: Option<String>,
}

impl PostgresStore {
    pub(super) async fn finish_webhook_event(
        &self,
        claimed: &ClaimedEvent,
        outcome: EventOutcome,
    ) -> Result<(), StoreError> {
        let mut call = self.begin_webhook_call("finish_event").await?;
        let (connection, deadline) = call.parts();
        let finished = timeout_at(deadline, finish(connection, claimed, outcome)).await;
        if !call.end_call(finished)? {
            debug!(app = %claimed.key.app, id = %claimed.event.id, "lost the lease of an event before settling it");
        }
        Ok(())
    }
}

/// Returns whether the lease was still valid. Otherwise nothing is changed.
async fn finish(
    connection: &mut PgConnection,
    claimed: &ClaimedEvent,
    outcome: EventOutcome,
) -> Result<bool, sqlx::Error> {
    let (app, webhook) = (claimed.key.app.as_str(), claimed.key.webhook.as_str());
    let (id, lease) = (claimed.event.id, claimed.lease_until);
    let mut transaction = connection.begin().await?;
    let dead = |error: String, attempts: i32| {
        sqlx::query!(
            "UPDATE webhook_events
             SET lease_until = NULL, attempts = attempts + $5, dead_at = statement_timestamp(), error = $6
             WHERE app_id = $1 AND webhook = $2 AND id = $3 AND lease_until = $4",
            app,
            webhook,
            id,
            lease,
            attempts,
            error
        )
    };
    let failed = Some(StateChange { has_failed: true, stopped_for: None });
    let (query, state) = match outcome {
        EventOutcome::Sent => {
            let query = sqlx::query!(
                "DELETE FROM webhook_events WHERE app_id = $1 AND webhook = $2 AND id = $3 AND lease_until = $4",
                app,
                webhook,
                id,
                lease
            );
            (query, Some(StateChange { has_failed: false, stopped_for: None }))
        }
        EventOutcome::Failed { at, error } => {
            let query = sqlx::query!(
                "UPDATE webhook_events SET lease_until = NULL, attempts = attempts + 1, due_at = $5, error = $6
                 WHERE app_id = $1 AND webhook = $2 AND id = $3 AND lease_until = $4",
                app,
                webhook,
                id,
                lease,
                at,
                error
            );
            (query, failed)
        }
        EventOutcome::GivenUp { error } => (dead(error, 1), failed),
        EventOutcome::Gone { fingerprint, error } => {
            (dead(error, 1), Some(StateChange { has_failed: true, stopped_for: Some(fingerprint) }))
        }
        EventOutcome::Stopped { error } => (dead(error, 0), None),
        EventOutcome::Wait { at } => {
            let query = sqlx::query!(
                "UPDATE webhook_events SET lease_until = NULL, due_at = $5
                 WHERE app_id = $1 AND webhook = $2 AND id = $3 AND lease_until = $4",
                app,
                webhook,
                id,
                lease,
                at
            );
            (query, None)
        }
    };
    if query.execute(&mut *transaction).await?.rows_affected() == 0 {
        transaction.rollback().await?;
        return Ok(false);
    }
    if let Some(state) = state {
        // Most deliveries succeed after a success, and then change nothing.
        sqlx::query!(
            "UPDATE webhooks
             SET failures = CASE WHEN $3 THEN failures + 1 ELSE 0 END, stopped_for = coalesce($4, stopped_for)
             WHERE app_id = $1 AND name = $2 AND ($3 OR failures > 0)",
            app,
            webhook,
            state.has_failed,
            state.stopped_for,
        )
        .execute(&mut *transaction)
        .await?;
    }
    transaction.commit().await?;
    Ok(true)
}
