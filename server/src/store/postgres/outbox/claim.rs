//! Claims the rows that are due for delivery, each for a limited time (the lease).

use std::time::Duration;

use sqlx::{Connection, PgConnection};
use time::OffsetDateTime;
use tokio::time::timeout_at;
use uuid::Uuid;

use super::{EPOCH_KIND, GROUPS_KIND, PROFILE_KIND};
use crate::{
    domain::{
        email::Email,
        mail::{EpochChange, Mail, MailKind},
        ports::{ClaimedRow, OutboxTask, StoreError},
        session::SessionId,
        user::{Epoch, UserId},
    },
    store::postgres::{CallError, PostgresStore},
};

struct OutboxRow {
    app_id: String,
    id: Uuid,
    kind: String,
    user_id: Option<Uuid>,
    requested_at: Option<OffsetDateTime>,
    epoch: Option<i64>,
    keep_session: Option<Uuid>,
    /// The recipient, if the mail goes to the email address that the user had before a change.
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
        } else if row.kind == GROUPS_KIND {
            OutboxTask::PropagateGroups(UserId(row.user_id.ok_or(CallError::unexpected_row())?))
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

// === impl PostgresStore ===

impl PostgresStore {
    pub(super) async fn claim_outbox_rows(
        &self,
        max_rows: usize,
        per_app: usize,
        lease: Duration,
    ) -> Result<Vec<ClaimedRow>, StoreError> {
        let max_rows = i64::try_from(max_rows).unwrap_or(i64::MAX);
        let per_app = i64::try_from(per_app).unwrap_or(i64::MAX);
        let mut call = self.begin_call("claim").await?;
        let (connection, deadline) = call.parts();
        let rows = timeout_at(deadline, claim_rows(connection, max_rows, per_app, lease.as_secs_f64())).await;
        let rows = call.end_call(rows)?;
        let claimed: Result<Vec<_>, _> = rows.into_iter().map(ClaimedRow::try_from).collect();
        claimed.map_err(|error| self.record_error(error))
    }
}

/// Whether any row is due for delivery and not claimed. Checked before claiming, so that an idle outbox takes no lock.
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
    max_rows: i64,
    per_app: i64,
    lease_seconds: f64,
) -> Result<Vec<OutboxRow>, sqlx::Error> {
    if !has_due_rows(connection).await? {
        return Ok(Vec::new());
    }
    let propagations = [EPOCH_KIND, PROFILE_KIND, GROUPS_KIND];
    let kinds: Vec<String> =
        MailKind::ALL.iter().map(|kind| kind.as_str()).chain(propagations).map(str::to_owned).collect();
    let mut transaction = connection.begin().await?;
    // One server claims at a time. The claim is a second statement, so that it sees the previous server's claim.
    sqlx::query!("SELECT one FROM outbox_claims FOR UPDATE").fetch_one(&mut *transaction).await?;
    // A loose index scan finds the Apps with waiting rows, however many rows each has. A row's `turn` is its position
    // in the queue of its App, in which the rows that are already leased come first. The first row of every App is
    // claimed before the second row of any App.
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
            ) AS leased
            FROM waiting WHERE waiting.app_id IS NOT NULL
        ), due AS (
            SELECT room.app_id, line.id, line.due_at,
                room.leased + row_number() OVER (PARTITION BY room.app_id ORDER BY line.due_at, line.id) AS turn
            FROM room CROSS JOIN LATERAL (
                SELECT outbox.id, outbox.due_at FROM outbox
                WHERE outbox.app_id = room.app_id AND outbox.dead_at IS NULL
                    AND outbox.due_at <= statement_timestamp()
                    AND (outbox.lease_until IS NULL OR outbox.lease_until <= statement_timestamp())
                    AND outbox.kind = ANY ($4)
                ORDER BY outbox.due_at, outbox.id
                LIMIT greatest($2 - room.leased, 0)
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
        max_rows,
        per_app,
        lease_seconds,
        &kinds,
    )
    .fetch_all(&mut *transaction)
    .await?;
    transaction.commit().await?;
    Ok(rows)
}
