//! Deletes accounts that were not verified in time.

use std::{collections::HashSet, sync::Arc};

use sqlx::{Connection, PgConnection};
use time::OffsetDateTime;
use tokio::time::timeout_at;
use uuid::Uuid;

use crate::{
    domain::{
        audit::{Detail, EventKind},
        ports::StoreError,
        user::{Epoch, UserId},
        webhook::Webhook,
    },
    store::{
        Stores,
        postgres::{
            OwnershipClaim, PostgresStore,
            audit::{self, BatchEvent},
            outbox,
        },
    },
};

/// Maximum number of accounts without a verified email address that one statement reads. The statement takes some
/// milliseconds.
const MAX_READ_ACCOUNTS: u32 = 1000;

/// Which unverified accounts of an App have expired.
#[derive(Clone, Debug)]
pub struct UnverifiedExpiry {
    /// The App and its owner, according to the rendered document. Nothing is deleted if the database knows another
    /// owner.
    pub claim: OwnershipClaim,
    /// Accounts created before this time have expired.
    pub created_before: OffsetDateTime,
    /// An account to which a code was sent after this time stays: the code may still be valid.
    pub code_sent_before: OffsetDateTime,
    pub now: OffsetDateTime,
    /// The webhooks of the App.
    pub webhooks: Arc<[Webhook]>,
}

/// The position after which the next batch starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnverifiedPosition {
    created_at: OffsetDateTime,
    id: Uuid,
}

/// The outcome of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnverifiedBatch {
    pub deleted: u64,
    /// `None` after the last batch.
    pub next: Option<UnverifiedPosition>,
}

struct Candidate {
    id: Uuid,
    epoch: i64,
    created_at: OffsetDateTime,
}

impl PostgresStore {
    /// Returns the Apps with unverified accounts that were created before the App's time in `created_before`.
    pub(crate) async fn apps_with_unverified(
        &self,
        apps: &[String],
        created_before: &[OffsetDateTime],
    ) -> Result<HashSet<String>, StoreError> {
        let mut call = self.begin_call("apps_with_unverified").await?;
        let (connection, deadline) = call.parts();
        let query = sqlx::query_scalar!(
            r#"
            SELECT app.id AS "id!"
            FROM unnest($1::text[], $2::timestamptz[]) AS app (id, before)
            WHERE EXISTS (
                SELECT FROM users
                WHERE users.app_id = app.id AND users.email_verified_at IS NULL AND users.created_at < app.before
            )
            "#,
            apps,
            created_before,
        );
        let apps = timeout_at(deadline, query.fetch_all(connection)).await;
        Ok(call.end_call(apps)?.into_iter().collect())
    }
}

impl Stores {
    /// Locks up to `max_accounts` expired accounts that were created by registration and have no identity, starting
    /// after a position. Deletes the locked accounts that have no live session. Disabled accounts stay. The rows are
    /// locked from before the check in Redis until the commit. Therefore a concurrent confirmation either comes before
    /// the lock, and the account stays, or comes after the commit, and finds no account. Several servers can call this
    /// at the same time.
    pub async fn delete_unverified(
        &self,
        unverified: &UnverifiedExpiry,
        after: Option<UnverifiedPosition>,
        max_accounts: u32,
    ) -> Result<UnverifiedBatch, StoreError> {
        let app = &unverified.claim.app;
        let mut call = self.postgres.begin_call("delete_unverified").await?;
        let (connection, deadline) = call.parts();
        let deleting = async {
            let mut transaction = connection.begin().await?;
            let positions = read_next_unverified(&mut transaction, unverified, after).await?;
            let candidates = lock_candidates(&mut transaction, unverified, &positions, max_accounts).await?;
            let next = if candidates.len() >= max_accounts as usize {
                candidates.last().map(|last| UnverifiedPosition { created_at: last.created_at, id: last.id })
            } else if positions.len() >= MAX_READ_ACCOUNTS as usize {
                positions.last().copied()
            } else {
                None
            };
            // Redis is changed first. If a later step fails, the next run repeats all steps. After such a failure,
            // nobody can log in to these accounts for some minutes.
            let users: Vec<_> = candidates.iter().map(|user| (UserId(user.id), Epoch(user.epoch + 1))).collect();
            let retired = match self.redis.retire_users(app, &users).await {
                Ok(retired) => retired,
                Err(error) => {
                    transaction.rollback().await?;
                    return Ok(Err(error));
                }
            };
            let ids: Vec<Uuid> = retired.iter().map(|user| user.0).collect();
            let notify = self.postgres.should_notify();
            let deleted = delete_candidates(&mut transaction, unverified, &ids, notify).await?;
            transaction.commit().await?;
            Ok(Ok(UnverifiedBatch { deleted, next }))
        };
        let batch = timeout_at(deadline, deleting).await;
        call.end_call(batch)?
    }
}

/// Returns the positions of the next accounts without a verified email address: oldest first, at most
/// `MAX_READ_ACCOUNTS`. The limit bounds the work of `lock_candidates`, which also checks the other conditions. Most of
/// the accounts may not meet them, for example because they have an identity.
async fn read_next_unverified(
    connection: &mut PgConnection,
    unverified: &UnverifiedExpiry,
    after: Option<UnverifiedPosition>,
) -> Result<Vec<UnverifiedPosition>, sqlx::Error> {
    let (created_at, id) = after.map(|after| (after.created_at, after.id)).unzip();
    sqlx::query_as!(
        UnverifiedPosition,
        r#"
        SELECT created_at, id FROM users
        WHERE app_id = $1 AND email_verified_at IS NULL AND created_at < $2
            AND ($3::timestamptz IS NULL OR (created_at, id) > ($3, $4))
        ORDER BY created_at, id
        LIMIT $5
        "#,
        unverified.claim.app.as_str(),
        unverified.created_before,
        created_at,
        id,
        i64::from(MAX_READ_ACCOUNTS),
    )
    .fetch_all(connection)
    .await
}

/// Locks expired accounts. The lock on the App's row prevents a concurrent deletion of the App's users, as in
/// `create_user`. If the clocks of the server and the database differ, the time of the slower clock applies, so that no
/// account is deleted too early.
async fn lock_candidates(
    connection: &mut PgConnection,
    unverified: &UnverifiedExpiry,
    positions: &[UnverifiedPosition],
    max_accounts: u32,
) -> Result<Vec<Candidate>, sqlx::Error> {
    let UnverifiedExpiry { claim, created_before, code_sent_before, now, .. } = unverified;
    let ids: Vec<Uuid> = positions.iter().map(|position| position.id).collect();
    sqlx::query_as!(
        Candidate,
        r#"
        WITH owner AS (
            SELECT app_id FROM apps
            WHERE app_id = $1 AND state = 'active' AND namespace = $2
                AND ($3::text IS NULL OR incarnation IS NULL OR incarnation = $3)
            FOR SHARE
        )
        SELECT users.id, users.epoch, users.created_at
        FROM users JOIN owner ON users.app_id = owner.app_id
        WHERE users.app_id = $1
            AND users.email_verified_at IS NULL
            AND (users.email IS NOT NULL OR users.pending_email IS NOT NULL)
            AND users.disabled_at IS NULL
            AND users.created_by = 'registration'
            AND users.created_at < least($4, statement_timestamp() - ($6::timestamptz - $4::timestamptz))
            AND users.id = ANY ($7)
            AND NOT EXISTS (
                SELECT FROM identities WHERE identities.app_id = users.app_id AND identities.user_id = users.id
            )
            AND NOT EXISTS (
                SELECT FROM audit_events AS event
                WHERE event.app_id = users.app_id AND event.user_id = users.id AND event.at >= $5
                    AND event.kind = ANY ($8)
            )
        ORDER BY users.created_at, users.id
        LIMIT $9
        FOR UPDATE OF users SKIP LOCKED
        "#,
        claim.app.as_str(),
        claim.namespace,
        claim.incarnation.as_deref(),
        created_before,
        code_sent_before,
        now,
        &ids,
        &CODE_EVENTS.map(|kind| kind.as_str().to_owned()),
        i64::from(max_accounts),
    )
    .fetch_all(connection)
    .await
}

/// Events after which the user gets a code that verifies the email address.
const CODE_EVENTS: [EventKind; 5] = [
    EventKind::Registered,
    EventKind::RegisteredAgain,
    EventKind::ConfirmationRequested,
    EventKind::PasswordResetRequested,
    EventKind::MailRequested,
];

/// Deletes users. This is a separate statement, so that it sees identities that were linked before the rows were
/// locked.
async fn delete_candidates(
    connection: &mut PgConnection,
    unverified: &UnverifiedExpiry,
    users: &[Uuid],
    notify: bool,
) -> Result<u64, sqlx::Error> {
    let app = &unverified.claim.app;
    let deleted = sqlx::query!(
        "DELETE FROM users
         WHERE app_id = $1 AND id = ANY ($2) AND email_verified_at IS NULL
            AND NOT EXISTS (
                SELECT FROM identities WHERE identities.app_id = users.app_id AND identities.user_id = users.id
            )
         RETURNING id, version + 1 AS \"version!\"",
        app.as_str(),
        users,
    )
    .fetch_all(&mut *connection)
    .await?;
    let deleted: Vec<_> = deleted.into_iter().map(|row| (row.id, row.version)).collect();
    let ids: Vec<_> = deleted.iter().map(|(id, _)| *id).collect();
    outbox::delete_rows_of(connection, app, &ids).await?;
    let event = BatchEvent {
        kind: EventKind::UserDeleted,
        at: unverified.now,
        detail: Detail { reason: Some("unverified"), ..Detail::default() },
        webhooks: &unverified.webhooks,
    };
    audit::insert_for_users(connection, app, &event, &deleted, notify).await?;
    Ok(deleted.len() as u64)
}
