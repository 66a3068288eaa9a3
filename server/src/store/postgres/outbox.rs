//! The outbox: a deliverer claims rows under a lease, fairly between Apps, and settles those whose lease it still
//! holds.

use std::{fmt, sync::Arc, time::Duration};

use latchkey_crds::types::AppId;
use sqlx::{
    Connection, PgConnection, PgPool,
    postgres::{PgListener, PgPoolOptions},
};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};
use tokio::{
    sync::Notify,
    time::{sleep, timeout, timeout_at},
};
use tracing::{debug, warn};
use uuid::Uuid;

use super::{
    PostgresStore,
    errors::CallError,
    users::{mail_columns, mail_payload},
};
use crate::{
    domain::{
        email::Email,
        mail::{EpochChange, Mail, MailKind},
        ports::{ClaimedRow, DeliveryOutcome, Outbox, OutboxBacklog, OutboxTask, StoreError},
        session::SessionId,
        user::{Epoch, UserId},
    },
    store::Stores,
};

/// The kinds of rows that carry an epoch or a profile to Redis. The other kinds are those of mails.
const EPOCH_KIND: &str = "epoch";
const PROFILE_KIND: &str = "profile";
/// The maximum length of a stored error, as in the table.
const MAX_ERROR_CHARS: usize = 500;
/// Where counting stops: above this, the exact number does not matter.
const MAX_COUNTED: i64 = 100_000;
/// How many dead letters a list contains, newest first.
const MAX_LISTED: i64 = 10_000;
/// A listener that received nothing for this long pings its connection.
const LISTENER_IDLE_LIMIT: Duration = Duration::from_secs(30);
const LISTENER_TIMEOUT: Duration = Duration::from_secs(3);
const LISTENER_PAUSE: Duration = Duration::from_secs(5);

/// A row that is not attempted any more.
#[derive(Clone, Debug)]
pub struct DeadLetter {
    pub app: String,
    pub id: Uuid,
    pub kind: String,
    pub user: Option<Uuid>,
    pub attempts: i32,
    pub created_at: OffsetDateTime,
    pub dead_at: OffsetDateTime,
    /// A message of this server, never text of a peer.
    pub error: Option<String>,
}

struct OutboxRow {
    app_id: String,
    id: Uuid,
    kind: String,
    user_id: Option<Uuid>,
    requested_at: Option<OffsetDateTime>,
    epoch: Option<i64>,
    keep_session: Option<Uuid>,
    former: Option<String>,
    trace: Option<String>,
    attempts: i32,
    created_at: OffsetDateTime,
    lease_until: OffsetDateTime,
}

// === impl OutboxRow ===

impl TryFrom<OutboxRow> for ClaimedRow {
    type Error = CallError;

    fn try_from(row: OutboxRow) -> Result<Self, CallError> {
        let task = if row.kind == EPOCH_KIND {
            let (user, epoch) = row.user_id.zip(row.epoch).ok_or(CallError::unexpected_row())?;
            OutboxTask::PropagateEpoch(EpochChange {
                user: UserId(user),
                epoch: Epoch(epoch),
                kept_session: row.keep_session.map(SessionId),
            })
        } else if row.kind == PROFILE_KIND {
            OutboxTask::PropagateProfile(UserId(row.user_id.ok_or(CallError::unexpected_row())?))
        } else {
            let kind =
                MailKind::ALL.into_iter().find(|kind| kind.as_str() == row.kind).ok_or(CallError::unexpected_row())?;
            let requested_at = row.requested_at.unwrap_or(row.created_at);
            let mail = Mail { kind, recipient: row.user_id.map(UserId), requested_at };
            match row.former {
                None => OutboxTask::Mail(mail),
                Some(former) => OutboxTask::MailToFormerAddress(
                    mail,
                    Email::parse(&former).map_err(|_| CallError::unexpected_row())?,
                ),
            }
        };
        Ok(Self {
            id: row.id,
            app: row.app_id.parse().map_err(|_| CallError::unexpected_row())?,
            attempts: u32::try_from(row.attempts).map_err(|_| CallError::unexpected_row())?,
            task,
            lease_until: row.lease_until,
            trace: row.trace,
        })
    }
}

// === impl DeadLetter ===

impl fmt::Display for DeadLetter {
    /// One line, with tabs between the columns.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |time: OffsetDateTime| time.format(&Rfc3339).map_err(|_| fmt::Error);
        let user = self.user.map_or_else(|| "-".to_owned(), |user| user.to_string());
        let (created, dead) = (text(self.created_at)?, text(self.dead_at)?);
        let error = self.error.as_deref().unwrap_or("-");
        write!(
            f,
            "{}\t{}\t{}\t{user}\tattempts={}\tcreated={created}\tdead={dead}\t{error}",
            self.id, self.app, self.kind, self.attempts
        )
    }
}

fn truncated_error(error: &str) -> String {
    error.chars().take(MAX_ERROR_CHARS).collect()
}

// === impl PostgresStore ===

impl PostgresStore {
    /// Lists the dead letters, newest first.
    pub async fn dead_letters(&self) -> Result<Vec<DeadLetter>, StoreError> {
        let mut held = self.begin_call("dead_letters").await?;
        let (connection, until) = held.parts();
        let query = sqlx::query_as!(
            DeadLetter,
            r#"
            SELECT app_id AS app, id, kind, user_id AS user, attempts, created_at, dead_at AS "dead_at!", error
            FROM outbox
            WHERE dead_at IS NOT NULL
            ORDER BY dead_at DESC, app_id, id
            LIMIT $1
            "#,
            MAX_LISTED,
        );
        let answer = timeout_at(until, query.fetch_all(connection)).await;
        held.end_call(answer)
    }

    /// Makes a dead letter due again and resets its attempts. Returns whether there was one with this id.
    pub async fn retry_dead_letter(&self, id: Uuid) -> Result<bool, StoreError> {
        let mut held = self.begin_call("retry_dead_letter").await?;
        let (connection, until) = held.parts();
        let query = sqlx::query!(
            "UPDATE outbox SET dead_at = NULL, error = NULL, attempts = 0, due_at = statement_timestamp(), \
             lease_until = NULL
             WHERE dead_at IS NOT NULL AND id = $1",
            id
        );
        let answer = timeout_at(until, query.execute(connection)).await;
        let retried = held.end_call(answer)?.rows_affected() > 0;
        if retried {
            self.notify_deliverer();
        }
        Ok(retried)
    }
}

/// Whether any row is due. Checked before claiming, so that an idle outbox takes no lock.
async fn has_due_rows(connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar!(
        r#"
        SELECT EXISTS (
            SELECT FROM outbox
            WHERE dead_at IS NULL AND due_at <= statement_timestamp()
                AND (lease_until IS NULL OR lease_until <= statement_timestamp())
        ) AS "due!"
        "#
    )
    .fetch_one(connection)
    .await
}

async fn claim_rows(
    connection: &mut PgConnection,
    most: i64,
    per_app: i64,
    lease_seconds: f64,
) -> Result<Vec<OutboxRow>, sqlx::Error> {
    if !has_due_rows(connection).await? {
        return Ok(Vec::new());
    }
    let kinds: Vec<String> =
        MailKind::ALL.iter().map(|kind| kind.as_str()).chain([EPOCH_KIND, PROFILE_KIND]).map(str::to_owned).collect();
    let mut transaction = connection.begin().await?;
    // One server claims at a time. The claim is a second statement, so that it sees the previous server's claim.
    sqlx::query!("SELECT one FROM outbox_claims FOR UPDATE").fetch_one(&mut *transaction).await?;
    // A loose index scan finds the Apps with waiting rows, however many rows each has. A row's `turn` is its position
    // in its App's queue, after the rows that are held already: the first row of every App comes before the second of
    // any.
    let rows = sqlx::query_as!(
        OutboxRow,
        r#"
        WITH RECURSIVE waiting AS (
            (SELECT app_id FROM outbox WHERE dead_at IS NULL ORDER BY app_id, due_at LIMIT 1)
            UNION ALL
            SELECT (
                SELECT outbox.app_id FROM outbox
                WHERE outbox.dead_at IS NULL AND outbox.app_id > waiting.app_id
                ORDER BY outbox.app_id, outbox.due_at LIMIT 1
            )
            FROM waiting WHERE waiting.app_id IS NOT NULL
        ), room AS MATERIALIZED (
            SELECT waiting.app_id, (
                SELECT count(*) FROM outbox
                WHERE outbox.app_id = waiting.app_id AND outbox.lease_until > statement_timestamp()
            ) AS held
            FROM waiting WHERE waiting.app_id IS NOT NULL
        ), due AS (
            SELECT room.app_id, line.id, line.due_at,
                room.held + row_number() OVER (PARTITION BY room.app_id ORDER BY line.due_at, line.id) AS turn
            FROM room CROSS JOIN LATERAL (
                SELECT outbox.id, outbox.due_at FROM outbox
                WHERE outbox.app_id = room.app_id AND outbox.dead_at IS NULL
                    AND outbox.due_at <= statement_timestamp()
                    AND (outbox.lease_until IS NULL OR outbox.lease_until <= statement_timestamp())
                    AND outbox.kind = ANY ($4)
                ORDER BY outbox.due_at, outbox.id
                LIMIT greatest($2 - room.held, 0)
                FOR UPDATE SKIP LOCKED
            ) AS line
        ), taken AS (
            SELECT app_id, id FROM due ORDER BY turn, due_at, app_id LIMIT $1
        )
        UPDATE outbox SET lease_until = statement_timestamp() + make_interval(secs => $3)
        FROM taken
        WHERE outbox.app_id = taken.app_id AND outbox.id = taken.id
        RETURNING outbox.app_id, outbox.id, outbox.kind, outbox.user_id, outbox.requested_at, outbox.epoch,
            outbox.keep_session, outbox.payload->>'former' AS former, outbox.payload->>'trace' AS trace,
            outbox.attempts, outbox.created_at, outbox.lease_until AS "lease_until!"
        "#,
        most,
        per_app,
        lease_seconds,
        &kinds,
    )
    .fetch_all(&mut *transaction)
    .await?;
    transaction.commit().await?;
    Ok(rows)
}

impl Outbox for Stores {
    async fn enqueue(&self, app: &AppId, mail: Mail) -> Result<(), StoreError> {
        let (kind, to, requested_at) = mail_columns(Some(&mail));
        let mut held = self.postgres.begin_call("enqueue").await?;
        let (connection, until) = held.parts();
        let query = sqlx::query_scalar!(
            r#"
            WITH queued AS (
                INSERT INTO outbox (app_id, kind, user_id, requested_at, payload)
                VALUES ($1, $2, $3, $4, $6::text::jsonb)
                RETURNING id
            )
            SELECT count(pg_notify('latchkey_outbox', '')) AS "told!" FROM queued WHERE $5
            "#,
            app.as_str(),
            kind,
            to,
            requested_at,
            self.postgres.should_notify(),
            mail_payload(),
        );
        let answer = timeout_at(until, query.fetch_one(connection)).await;
        held.end_call(answer)?;
        self.postgres.notify_deliverer();
        Ok(())
    }

    async fn claim(&self, most: usize, per_app: usize, lease: Duration) -> Result<Vec<ClaimedRow>, StoreError> {
        let most = i64::try_from(most).unwrap_or(i64::MAX);
        let per_app = i64::try_from(per_app).unwrap_or(i64::MAX);
        let mut held = self.postgres.begin_call("claim").await?;
        let (connection, until) = held.parts();
        let answer = timeout_at(until, claim_rows(connection, most, per_app, lease.as_secs_f64())).await;
        let rows = held.end_call(answer)?;
        let claimed: Result<Vec<_>, _> = rows.into_iter().map(ClaimedRow::try_from).collect();
        claimed.map_err(|fault| self.postgres.record_error(fault))
    }

    async fn finish(&self, claimed: &ClaimedRow, outcome: DeliveryOutcome) -> Result<(), StoreError> {
        let mut held = self.postgres.begin_call("settle").await?;
        let (connection, until) = held.parts();
        let (app, id, lease) = (claimed.app.as_str(), claimed.id, claimed.lease_until);
        let query = match outcome {
            DeliveryOutcome::Done => {
                sqlx::query!("DELETE FROM outbox WHERE app_id = $1 AND id = $2 AND lease_until = $3", app, id, lease)
            }
            DeliveryOutcome::Retry { at, error } => sqlx::query!(
                "UPDATE outbox SET lease_until = NULL, attempts = attempts + 1, due_at = $4, error = $5
                 WHERE app_id = $1 AND id = $2 AND lease_until = $3",
                app,
                id,
                lease,
                at,
                truncated_error(&error)
            ),
            DeliveryOutcome::Wait { at } => sqlx::query!(
                "UPDATE outbox SET lease_until = NULL, due_at = $4
                 WHERE app_id = $1 AND id = $2 AND lease_until = $3",
                app,
                id,
                lease,
                at
            ),
            DeliveryOutcome::Dead { error } => sqlx::query!(
                "UPDATE outbox SET lease_until = NULL, attempts = attempts + 1, dead_at = statement_timestamp(), \
                 error = $4
                 WHERE app_id = $1 AND id = $2 AND lease_until = $3",
                app,
                id,
                lease,
                truncated_error(&error)
            ),
        };
        let answer = timeout_at(until, query.execute(connection)).await;
        let settled = held.end_call(answer)?.rows_affected() > 0;
        if !settled {
            debug!(app = %claimed.app, id = %claimed.id, "lost the lease of an outbox row before settling it");
        }
        Ok(())
    }

    async fn remove_epoch_row(&self, app: &AppId, news: &EpochChange) -> Result<(), StoreError> {
        let mut held = self.postgres.begin_call("epoch_carried").await?;
        let (connection, until) = held.parts();
        // Rows of earlier epochs are obsolete.
        let query = sqlx::query!(
            "DELETE FROM outbox WHERE app_id = $1 AND user_id = $2 AND kind = 'epoch' AND epoch <= $3",
            app.as_str(),
            news.user.0,
            news.epoch.0
        );
        let answer = timeout_at(until, query.execute(connection)).await;
        held.end_call(answer).map(drop)
    }

    async fn wait_for_notification(&self) {
        self.postgres.shared.outbox_notify.notified().await;
    }

    async fn backlog(&self) -> Result<OutboxBacklog, StoreError> {
        let mut held = self.postgres.begin_call("backlog").await?;
        let (connection, until) = held.parts();
        let query = sqlx::query!(
            r#"
            SELECT
                (SELECT count(*) FROM (
                    SELECT FROM outbox WHERE dead_at IS NULL AND due_at <= statement_timestamp() LIMIT $1
                ) AS due) AS "due!",
                coalesce(extract(epoch FROM statement_timestamp() - (
                    SELECT min(due_at) FROM outbox WHERE dead_at IS NULL AND due_at <= statement_timestamp()
                ))::float8, 0) AS "oldest!",
                (SELECT count(*) FROM (
                    SELECT FROM outbox WHERE dead_at IS NOT NULL LIMIT $1
                ) AS dead) AS "dead!"
            "#,
            MAX_COUNTED
        );
        let answer = timeout_at(until, query.fetch_one(connection)).await;
        let row = held.end_call(answer)?;
        let count = |count: i64| u64::try_from(count).unwrap_or(0);
        Ok(OutboxBacklog { due: count(row.due), oldest_due_seconds: row.oldest, dead: count(row.dead) })
    }
}

/// Listens for rows that other servers enqueue. While it cannot, the outbox is only polled.
pub(super) async fn listen(pool: PgPool, news: Arc<Notify>) {
    let mut was_listening = true;
    loop {
        let error = match listen_once(&pool, &news).await {
            Ok(never) => match never {},
            Err(error) => error,
        };
        // Logged once: an outage of Postgres is logged by the calls.
        if was_listening {
            let fault = CallError::from(&error);
            warn!(error = &fault as &dyn std::error::Error, "cannot listen for new outbox rows; polling only");
        }
        was_listening = false;
        sleep(LISTENER_PAUSE).await;
    }
}

async fn listen_once(pool: &PgPool, news: &Notify) -> Result<std::convert::Infallible, sqlx::Error> {
    // A separate pool: calls cannot use a connection that listens.
    let own = PgPoolOptions::new()
        .max_connections(1)
        .acquire_timeout(LISTENER_TIMEOUT)
        .test_before_acquire(false)
        .connect_lazy_with(pool.connect_options().as_ref().clone());
    let mut listener = PgListener::connect_with(&own).await?;
    listener.eager_reconnect(false);
    listener.listen("latchkey_outbox").await?;
    // Rows may have been enqueued before LISTEN.
    news.notify_one();
    loop {
        match timeout(LISTENER_IDLE_LIMIT, listener.try_recv()).await {
            Ok(Ok(Some(_))) => news.notify_one(),
            Ok(Ok(None)) => return Err(sqlx::Error::Io(std::io::ErrorKind::ConnectionReset.into())),
            Ok(Err(error)) => return Err(error),
            Err(_) => {
                let alive = timeout(LISTENER_TIMEOUT, sqlx::query("SELECT 1").execute(&mut listener)).await;
                alive.map_err(|_| sqlx::Error::Io(std::io::ErrorKind::TimedOut.into()))??;
            }
        }
    }
}
