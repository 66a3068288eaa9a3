//! Claims events that are due for sending: the server gets a lease on each event.

use std::time::Duration;

use sqlx::{Connection, PgConnection};
use tokio::time::timeout_at;

use super::{EventRow, MANY_FAILURES, event_query, key_columns, known_keys, known_kinds};
use crate::{
    domain::ports::{ClaimableWebhook, ClaimedEvent, StoreError, WebhookKey},
    store::postgres::PostgresStore,
};

/// The maximum number of events of one webhook that are being sent, over all servers.
const MAX_IN_FLIGHT: i64 = 16;

struct KeyRow {
    app_id: String,
    webhook: String,
}

impl PostgresStore {
    pub(super) async fn webhooks_with_due_events(&self) -> Result<Vec<WebhookKey>, StoreError> {
        let mut call = self.begin_webhook_call("due_webhooks").await?;
        let (connection, deadline) = call.parts();
        // For each webhook, a loose index scan reads only the event that is due first, however many events the webhook
        // has.
        let query = sqlx::query_as!(
            KeyRow,
            r#"
            WITH RECURSIVE waiting AS (
                (
                    SELECT app_id, webhook, due_at FROM webhook_events
                    WHERE dead_at IS NULL ORDER BY app_id, webhook, due_at LIMIT 1
                )
                UNION ALL
                SELECT later.app_id, later.webhook, later.due_at
                FROM waiting CROSS JOIN LATERAL (
                    SELECT event.app_id, event.webhook, event.due_at FROM webhook_events AS event
                    WHERE event.dead_at IS NULL
                        AND (event.app_id, event.webhook) > (waiting.app_id, waiting.webhook)
                    ORDER BY event.app_id, event.webhook, event.due_at LIMIT 1
                ) AS later
            )
            SELECT app_id AS "app_id!", webhook AS "webhook!" FROM waiting
            WHERE due_at <= statement_timestamp() AND NOT EXISTS (
                SELECT FROM webhooks
                WHERE webhooks.app_id = waiting.app_id AND webhooks.name = waiting.webhook
                    AND webhooks.paused_until > statement_timestamp()
            )
            "#
        );
        let rows = timeout_at(deadline, query.fetch_all(connection)).await;
        let rows = call.end_call(rows)?;
        Ok(known_keys(rows.iter().map(|row| (row.app_id.as_str(), row.webhook.as_str()))))
    }

    pub(super) async fn claim_webhook_events(
        &self,
        webhooks: &[ClaimableWebhook],
        limit: usize,
        lease: Duration,
    ) -> Result<Vec<ClaimedEvent>, StoreError> {
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let mut call = self.begin_webhook_call("claim_events").await?;
        let (connection, deadline) = call.parts();
        let rows = timeout_at(deadline, claim(connection, webhooks, limit, lease.as_secs_f64())).await;
        let claimed: Result<_, _> = call.end_call(rows)?.into_iter().map(ClaimedEvent::try_from).collect();
        claimed.map_err(|error| self.record_error(error))
    }
}

async fn claim(
    connection: &mut PgConnection,
    webhooks: &[ClaimableWebhook],
    limit: i64,
    lease_seconds: f64,
) -> Result<Vec<EventRow>, sqlx::Error> {
    let (apps, names) = key_columns(webhooks.iter().map(|webhook| &webhook.key));
    // A separate transaction: otherwise another server that inserts the same rows would wait for the end of the claim.
    sqlx::query!(
        "INSERT INTO webhooks (app_id, name) SELECT * FROM unnest($1::text[], $2::text[]) ORDER BY 1, 2
         ON CONFLICT DO NOTHING",
        &apps,
        &names,
    )
    .execute(&mut *connection)
    .await?;
    let mut transaction = connection.begin().await?;
    // Only one server at a time claims the events of a webhook; other servers skip this webhook. The claim is a second
    // statement, so that it sees the previous server's claim.
    let locked = sqlx::query_as!(
        KeyRow,
        r#"
        SELECT app_id, name AS webhook FROM webhooks
        WHERE (app_id, name) IN (SELECT * FROM unnest($1::text[], $2::text[]))
        FOR UPDATE SKIP LOCKED
        "#,
        &apps,
        &names,
    )
    .fetch_all(&mut *transaction)
    .await?;
    let (apps, names): (Vec<_>, Vec<_>) = locked.into_iter().map(|row| (row.app_id, row.webhook)).unzip();
    let (mut namespaces, mut rooms) = (Vec::new(), Vec::new());
    for (app, name) in apps.iter().zip(&names) {
        let locked = webhooks.iter().find(|other| other.key.app.as_str() == app && other.key.webhook.as_str() == name);
        namespaces.push(locked.map_or_else(String::new, |webhook| webhook.namespace.clone()));
        rooms.push(locked.map_or(0, |webhook| i64::try_from(webhook.room).unwrap_or(i64::MAX)));
    }
    // `turn` is an event's position in the queue of its webhook, in which the events that are already leased come
    // first. The first event of every webhook is claimed before the second event of any webhook.
    let rows = event_query!(
        "
            WITH candidate AS (
                SELECT webhook.app_id, webhook.name, event.id, event.due_at, webhook.namespace, webhook.room,
                    webhook.leased + event.number AS turn
                FROM (
                    SELECT webhooks.app_id, webhooks.name, wanted.namespace, wanted.room,
                        CASE WHEN webhooks.failures >= $6 THEN 1 ELSE $5::bigint END AS capacity, (
                            SELECT count(*) FROM webhook_events AS event
                            WHERE event.app_id = webhooks.app_id AND event.webhook = webhooks.name
                                AND event.lease_until > statement_timestamp()
                        ) AS leased
                    FROM unnest($1::text[], $2::text[], $8::text[], $9::bigint[])
                        AS wanted (app_id, name, namespace, room)
                    JOIN webhooks ON webhooks.app_id = wanted.app_id AND webhooks.name = wanted.name
                    WHERE webhooks.paused_until IS NULL OR webhooks.paused_until <= statement_timestamp()
                ) AS webhook
                CROSS JOIN LATERAL (
                    SELECT event.id, event.due_at, row_number() OVER (ORDER BY event.due_at, event.id) AS number
                    FROM webhook_events AS event
                    WHERE event.app_id = webhook.app_id AND event.webhook = webhook.name AND event.dead_at IS NULL
                        AND event.due_at <= statement_timestamp()
                        AND (event.lease_until IS NULL OR event.lease_until <= statement_timestamp())
                        AND event.kind = ANY ($7)
                    ORDER BY event.due_at, event.id
                    LIMIT greatest(webhook.capacity - webhook.leased, 0)
                ) AS event
            ), chosen AS MATERIALIZED (
                SELECT app_id, name, id
                FROM (
                    SELECT *, row_number() OVER (PARTITION BY namespace ORDER BY turn, due_at, app_id) AS place
                    FROM candidate
                ) AS placed
                WHERE place <= room
                ORDER BY turn, due_at, app_id
                LIMIT $3
            )
            UPDATE webhook_events SET lease_until = statement_timestamp() + make_interval(secs => $4)
            FROM chosen
            WHERE webhook_events.app_id = chosen.app_id AND webhook_events.webhook = chosen.name
                AND webhook_events.id = chosen.id AND webhook_events.dead_at IS NULL
                AND (webhook_events.lease_until IS NULL OR webhook_events.lease_until <= statement_timestamp())
            RETURNING webhook_events.*
        ",
        &apps,
        &names,
        limit,
        lease_seconds,
        MAX_IN_FLIGHT,
        MANY_FAILURES,
        &known_kinds(),
        &namespaces,
        &rooms,
    )
    .fetch_all(&mut *transaction)
    .await?;
    transaction.commit().await?;
    Ok(rows)
}
