//! The outbox: rows are claimed under a lease, fairly to Apps, and settled by whoever still holds them.

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
    Postgres,
    errors::Fault,
    users::{columns, payload},
};
use crate::{
    domain::{
        email::Email,
        mail::{EpochNews, Mail, MailKind},
        ports::{Backlog, Claimed, Outbox, Outcome, StoreError, Task},
        session::SessionId,
        user::{Epoch, UserId},
    },
    store::Stores,
};

/// The kinds of the rows that carry an epoch or a profile; the others are named after their mail.
const EPOCH: &str = "epoch";
const PROFILE: &str = "profile";
/// The longest text of an error that is kept, as the table has it.
const MAX_ERROR_CHARS: usize = 500;
/// Where counting stops: more than that is a number to worry about, not one to know.
const MOST_COUNTED: i64 = 100_000;
/// How many dead letters a list shows: those that matter are the newest.
const MOST_LISTED: i64 = 10_000;
/// How long a listener may hear nothing before it asks whether its connection still lives.
const SILENCE: Duration = Duration::from_secs(30);
const LISTENER_LIMIT: Duration = Duration::from_secs(3);
const LISTENER_PAUSE: Duration = Duration::from_secs(5);

/// A row that is tried no more.
#[derive(Clone, Debug)]
pub struct DeadLetter {
    pub app: String,
    pub id: Uuid,
    pub kind: String,
    pub user: Option<Uuid>,
    pub attempts: i32,
    pub created_at: OffsetDateTime,
    pub dead_at: OffsetDateTime,
    /// Our own words.
    pub error: Option<String>,
}

struct Row {
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

// === impl Row ===

impl TryFrom<Row> for Claimed {
    type Error = Fault;

    fn try_from(row: Row) -> Result<Self, Fault> {
        let task = if row.kind == EPOCH {
            let (user, epoch) = row.user_id.zip(row.epoch).ok_or(Fault::unreadable())?;
            Task::CarryEpoch(EpochNews {
                user: UserId(user),
                epoch: Epoch(epoch),
                keep: row.keep_session.map(SessionId),
            })
        } else if row.kind == PROFILE {
            Task::CarryProfile(UserId(row.user_id.ok_or(Fault::unreadable())?))
        } else {
            let kind = MailKind::ALL.into_iter().find(|kind| kind.as_str() == row.kind).ok_or(Fault::unreadable())?;
            let requested_at = row.requested_at.unwrap_or(row.created_at);
            let mail = Mail { kind, user: row.user_id.map(UserId), requested_at };
            match row.former {
                None => Task::Mail(mail),
                Some(former) => Task::MailToFormer(mail, Email::parse(&former).map_err(|_| Fault::unreadable())?),
            }
        };
        Ok(Self {
            id: row.id,
            app: row.app_id.parse().map_err(|_| Fault::unreadable())?,
            attempts: u32::try_from(row.attempts).map_err(|_| Fault::unreadable())?,
            task,
            lease_until: row.lease_until,
            trace: row.trace,
        })
    }
}

// === impl DeadLetter ===

impl fmt::Display for DeadLetter {
    /// A line of a list, with tabs between its columns.
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

fn shortened(error: &str) -> String {
    error.chars().take(MAX_ERROR_CHARS).collect()
}

// === impl Postgres ===

impl Postgres {
    /// The dead letters, the newest first.
    pub async fn dead_letters(&self) -> Result<Vec<DeadLetter>, StoreError> {
        let mut held = self.hold("dead_letters").await?;
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
            MOST_LISTED,
        );
        let answer = timeout_at(until, query.fetch_all(connection)).await;
        held.done(answer)
    }

    /// Makes a dead letter due again, with no attempts counted. Whether there was one of that id.
    pub async fn retry_dead_letter(&self, id: Uuid) -> Result<bool, StoreError> {
        let mut held = self.hold("retry_dead_letter").await?;
        let (connection, until) = held.parts();
        let query = sqlx::query!(
            "UPDATE outbox SET dead_at = NULL, error = NULL, attempts = 0, due_at = statement_timestamp(), \
             lease_until = NULL
             WHERE dead_at IS NOT NULL AND id = $1",
            id
        );
        let answer = timeout_at(until, query.execute(connection)).await;
        let retried = held.done(answer)?.rows_affected() > 0;
        if retried {
            self.wake();
        }
        Ok(retried)
    }
}

/// Whether claiming may find anything; asked first, so that an idle outbox costs no lock.
async fn anything_due(connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
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

async fn claim(
    connection: &mut PgConnection,
    most: i64,
    per_app: i64,
    lease_seconds: f64,
) -> Result<Vec<Row>, sqlx::Error> {
    if !anything_due(connection).await? {
        return Ok(Vec::new());
    }
    let kinds: Vec<String> =
        MailKind::ALL.iter().map(|kind| kind.as_str()).chain([EPOCH, PROFILE]).map(str::to_owned).collect();
    let mut transaction = connection.begin().await?;
    // One claims at a time. The claim itself is a second statement, so that it sees what the one before it has taken.
    sqlx::query!("SELECT one FROM outbox_claims FOR UPDATE").fetch_one(&mut *transaction).await?;
    // The Apps with waiting rows are found by leaps over the index, however many rows each has. A row's turn is its
    // place in its App's line, behind what is held already: the first of every App come before the second of any.
    let rows = sqlx::query_as!(
        Row,
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
        let (kind, to, requested_at) = columns(Some(&mail));
        let mut held = self.postgres.hold("enqueue").await?;
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
            self.postgres.tells(),
            payload(),
        );
        let answer = timeout_at(until, query.fetch_one(connection)).await;
        held.done(answer)?;
        self.postgres.wake();
        Ok(())
    }

    async fn claim(&self, most: usize, per_app: usize, lease: Duration) -> Result<Vec<Claimed>, StoreError> {
        let most = i64::try_from(most).unwrap_or(i64::MAX);
        let per_app = i64::try_from(per_app).unwrap_or(i64::MAX);
        let mut held = self.postgres.hold("claim").await?;
        let (connection, until) = held.parts();
        let answer = timeout_at(until, claim(connection, most, per_app, lease.as_secs_f64())).await;
        let rows = held.done(answer)?;
        let claimed: Result<Vec<_>, _> = rows.into_iter().map(Claimed::try_from).collect();
        claimed.map_err(|fault| self.postgres.refused(fault))
    }

    async fn settle(&self, claimed: &Claimed, outcome: Outcome) -> Result<(), StoreError> {
        let mut held = self.postgres.hold("settle").await?;
        let (connection, until) = held.parts();
        let (app, id, lease) = (claimed.app.as_str(), claimed.id, claimed.lease_until);
        let query = match outcome {
            Outcome::Done => {
                sqlx::query!("DELETE FROM outbox WHERE app_id = $1 AND id = $2 AND lease_until = $3", app, id, lease)
            }
            Outcome::Retry { at, error } => sqlx::query!(
                "UPDATE outbox SET lease_until = NULL, attempts = attempts + 1, due_at = $4, error = $5
                 WHERE app_id = $1 AND id = $2 AND lease_until = $3",
                app,
                id,
                lease,
                at,
                shortened(&error)
            ),
            Outcome::Wait { at } => sqlx::query!(
                "UPDATE outbox SET lease_until = NULL, due_at = $4
                 WHERE app_id = $1 AND id = $2 AND lease_until = $3",
                app,
                id,
                lease,
                at
            ),
            Outcome::Dead { error } => sqlx::query!(
                "UPDATE outbox SET lease_until = NULL, attempts = attempts + 1, dead_at = statement_timestamp(), \
                 error = $4
                 WHERE app_id = $1 AND id = $2 AND lease_until = $3",
                app,
                id,
                lease,
                shortened(&error)
            ),
        };
        let answer = timeout_at(until, query.execute(connection)).await;
        let settled = held.done(answer)?.rows_affected() > 0;
        if !settled {
            debug!(app = %claimed.app, id = %claimed.id, "a row of the outbox was not ours any more");
        }
        Ok(())
    }

    async fn epoch_carried(&self, app: &AppId, news: &EpochNews) -> Result<(), StoreError> {
        let mut held = self.postgres.hold("epoch_carried").await?;
        let (connection, until) = held.parts();
        // Those of earlier epochs have nothing left to say.
        let query = sqlx::query!(
            "DELETE FROM outbox WHERE app_id = $1 AND user_id = $2 AND kind = 'epoch' AND epoch <= $3",
            app.as_str(),
            news.user.0,
            news.epoch.0
        );
        let answer = timeout_at(until, query.execute(connection)).await;
        held.done(answer).map(drop)
    }

    async fn notified(&self) {
        self.postgres.shared.news.notified().await;
    }

    async fn backlog(&self) -> Result<Backlog, StoreError> {
        let mut held = self.postgres.hold("backlog").await?;
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
            MOST_COUNTED
        );
        let answer = timeout_at(until, query.fetch_one(connection)).await;
        let row = held.done(answer)?;
        let count = |count: i64| u64::try_from(count).unwrap_or(0);
        Ok(Backlog { due: count(row.due), oldest_due_seconds: row.oldest, dead: count(row.dead) })
    }
}

/// Listens for rows that other servers enqueue, for as long as the task lives. Where it cannot, polling goes on alone.
pub(super) async fn listen(pool: PgPool, news: Arc<Notify>) {
    let mut heard = true;
    loop {
        let error = match listen_once(&pool, &news).await {
            Ok(never) => match never {},
            Err(error) => error,
        };
        // Said once, not each time: the calls say that Postgres is away.
        if heard {
            let fault = Fault::from(&error);
            warn!(error = &fault as &dyn std::error::Error, "not listening for mail; the outbox is polled");
        }
        heard = false;
        sleep(LISTENER_PAUSE).await;
    }
}

async fn listen_once(pool: &PgPool, news: &Notify) -> Result<std::convert::Infallible, sqlx::Error> {
    // A pool of its own: a connection that listens is of no use to calls.
    let own = PgPoolOptions::new()
        .max_connections(1)
        .acquire_timeout(LISTENER_LIMIT)
        .test_before_acquire(false)
        .connect_lazy_with(pool.connect_options().as_ref().clone());
    let mut listener = PgListener::connect_with(&own).await?;
    listener.eager_reconnect(false);
    listener.listen("latchkey_outbox").await?;
    // What came while nobody listened.
    news.notify_one();
    loop {
        match timeout(SILENCE, listener.try_recv()).await {
            Ok(Ok(Some(_))) => news.notify_one(),
            Ok(Ok(None)) => return Err(sqlx::Error::Io(std::io::ErrorKind::ConnectionReset.into())),
            Ok(Err(error)) => return Err(error),
            Err(_) => {
                let alive = timeout(LISTENER_LIMIT, sqlx::query("SELECT 1").execute(&mut listener)).await;
                alive.map_err(|_| sqlx::Error::Io(std::io::ErrorKind::TimedOut.into()))??;
            }
        }
    }
}
