//! Ends a lease with the outcome of the delivery.

use sqlx::{Connection, PgConnection};
use tokio::time::timeout_at;
use tracing::debug;

use super::MANY_FAILURES;
use crate::{
    domain::ports::{ClaimedEvent, EventOutcome, StoreError},
    store::postgres::PostgresStore,
};

/// How long, in seconds, a webhook pauses after each failure when many deliveries in a row have failed. Without the
/// pause, a receiver that refuses connections would be called hundreds of times a second.
const PAUSE_SECONDS: f64 = 1.0;
/// The maximum number of events of a stopped webhook that become dead letters together.
const STOPPED_BATCH: i64 = 5_000;

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
            let (app, id) = (&claimed.key.app, &claimed.event.id);
            debug!(%app, %id, "the lease of an event ended before the outcome of its delivery was stored");
        }
        Ok(())
    }
}

/// Stores the outcome. Returns whether the lease was still valid. If not, nothing is changed.
async fn finish(
    connection: &mut PgConnection,
    claimed: &ClaimedEvent,
    outcome: EventOutcome,
) -> Result<bool, sqlx::Error> {
    let mut transaction = connection.begin().await?;
    // The row of the webhook is changed before the row of the event, because claims and the deletion of an App lock the
    // rows in this order.
    match &outcome {
        EventOutcome::Sent => change_state(&mut transaction, claimed, false, None).await?,
        EventOutcome::Failed { .. } | EventOutcome::GivenUp { .. } => {
            change_state(&mut transaction, claimed, true, None).await?;
        }
        EventOutcome::Gone { fingerprint, .. } => {
            change_state(&mut transaction, claimed, true, Some(fingerprint)).await?;
        }
        EventOutcome::Stopped { .. } | EventOutcome::Wait { .. } => {}
    }
    let (app, webhook) = (claimed.key.app.as_str(), claimed.key.webhook.as_str());
    let (id, lease) = (claimed.event.id, claimed.lease_until);
    let query = match outcome {
        EventOutcome::Sent => sqlx::query!(
            "DELETE FROM webhook_events WHERE app_id = $1 AND webhook = $2 AND id = $3 AND lease_until = $4",
            app,
            webhook,
            id,
            lease
        ),
        EventOutcome::Failed { after, error } => sqlx::query!(
            "UPDATE webhook_events
             SET lease_until = NULL, attempts = attempts + 1, error = $6,
                due_at = statement_timestamp() + make_interval(secs => $5)
             WHERE app_id = $1 AND webhook = $2 AND id = $3 AND lease_until = $4",
            app,
            webhook,
            id,
            lease,
            after.as_secs_f64(),
            error
        ),
        EventOutcome::GivenUp { error } | EventOutcome::Gone { error, .. } => sqlx::query!(
            "UPDATE webhook_events
             SET lease_until = NULL, attempts = attempts + 1, dead_at = statement_timestamp(), error = $5
             WHERE app_id = $1 AND webhook = $2 AND id = $3 AND lease_until = $4",
            app,
            webhook,
            id,
            lease,
            error
        ),
        EventOutcome::Stopped { error } => sqlx::query!(
            "WITH due AS MATERIALIZED (
                SELECT app_id, webhook, id FROM webhook_events
                WHERE app_id = $1 AND webhook = $2 AND dead_at IS NULL AND due_at <= statement_timestamp()
                    AND (lease_until IS NULL OR lease_until <= statement_timestamp()
                        OR (id = $3 AND lease_until = $4))
                ORDER BY due_at, id LIMIT $6
                FOR UPDATE SKIP LOCKED
             )
             UPDATE webhook_events SET lease_until = NULL, dead_at = statement_timestamp(), error = $5
             FROM due
             WHERE webhook_events.app_id = due.app_id AND webhook_events.webhook = due.webhook
                AND webhook_events.id = due.id",
            app,
            webhook,
            id,
            lease,
            error,
            STOPPED_BATCH
        ),
        EventOutcome::Wait { after } => sqlx::query!(
            "UPDATE webhook_events
             SET lease_until = NULL, due_at = statement_timestamp() + make_interval(secs => $5)
             WHERE app_id = $1 AND webhook = $2 AND id = $3 AND lease_until = $4",
            app,
            webhook,
            id,
            lease,
            after.as_secs_f64()
        ),
    };
    if query.execute(&mut *transaction).await?.rows_affected() == 0 {
        transaction.rollback().await?;
        return Ok(false);
    }
    transaction.commit().await?;
    Ok(true)
}

/// Counts a failure in the row of the webhook, or resets the count after a success. If a delivery succeeds after
/// another success, as most deliveries do, the row is not written.
async fn change_state(
    connection: &mut PgConnection,
    claimed: &ClaimedEvent,
    has_failed: bool,
    stopped_for: Option<&str>,
) -> Result<(), sqlx::Error> {
    sqlx::query!(
        "UPDATE webhooks
         SET failures = CASE WHEN $3 THEN failures + 1 ELSE 0 END, stopped_for = coalesce($4, stopped_for),
            paused_until = CASE WHEN $3 AND failures + 1 >= $5 THEN statement_timestamp() + make_interval(secs => $6) END
         WHERE app_id = $1 AND name = $2 AND ($3 OR failures > 0)",
        claimed.key.app.as_str(),
        claimed.key.webhook.as_str(),
        has_failed,
        stopped_for,
        MANY_FAILURES,
        PAUSE_SECONDS,
    )
    .execute(connection)
    .await
    .map(drop)
}
