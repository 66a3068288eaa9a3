//! Foreign password hashes: stores a hash with its class (kind and cost), removes expired hashes, and removes classes
//! that no user has.

use std::sync::Arc;

use latchkey_crds::types::AppId;
use sqlx::{Connection, PgConnection};
use time::OffsetDateTime;
use tokio::time::timeout_at;

use crate::{
    domain::{
        audit::{Detail, EventKind},
        foreign_hash::{HashClass, MAX_CLASSES, MAX_WEIGHT},
        password::PasswordHash,
        ports::StoreError,
        user::UserId,
        webhook::Webhook,
    },
    store::postgres::{
        OwnershipClaim, PostgresStore,
        audit::{self, BatchEvent},
    },
};

/// The outcome of [`PostgresStore::set_foreign_hash`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetForeignHashOutcome {
    Stored,
    /// With the class of this hash, the App would have too many classes, or classes with too much weight (cost).
    /// Nothing was stored.
    TooManyKinds,
    /// The user does not exist.
    NoUser,
}

/// Which foreign hashes of an App have expired.
#[derive(Clone, Debug)]
pub struct ForeignHashExpiry {
    /// The App and its owner, according to the rendered document. Nothing is removed if the database knows another
    /// owner.
    pub claim: OwnershipClaim,
    /// Hashes that were imported before this time have expired.
    pub imported_before: OffsetDateTime,
    /// The class (kind and cost) of the hashes that this server makes. Hashes of this class are not removed.
    pub native: HashClass,
    pub now: OffsetDateTime,
    /// The webhooks of the App.
    pub webhooks: Arc<[Webhook]>,
}

impl PostgresStore {
    /// Stores the hash as the password of the user, and adds its class to the App if the hash is foreign: its function
    /// or its parameters differ from the defaults of new hashes.
    pub async fn set_foreign_hash(
        &self,
        app: &AppId,
        user: UserId,
        hash: &PasswordHash,
        at: OffsetDateTime,
    ) -> Result<SetForeignHashOutcome, StoreError> {
        let mut call = self.begin_call("set_foreign_hash").await?;
        let (connection, deadline) = call.parts();
        let outcome = timeout_at(deadline, set_foreign_hash(connection, app, user, hash, at)).await;
        call.end_call(outcome)
    }

    /// Removes up to `max_hashes` expired hashes, and records an event for each. Returns how many were removed. Skips
    /// users with a locked row; the next run removes their hashes.
    pub async fn remove_expired_foreign_hashes(
        &self,
        expiry: &ForeignHashExpiry,
        max_hashes: u32,
    ) -> Result<u64, StoreError> {
        let mut call = self.begin_call("remove_foreign_hashes").await?;
        let (connection, deadline) = call.parts();
        let removing = remove_expired(connection, expiry, max_hashes, self.should_notify());
        let removed = timeout_at(deadline, removing).await;
        call.end_call(removed)
    }

    /// Removes, in all Apps, each class of foreign hashes that no user's hash belongs to, unless a hash of the class was
    /// stored within the last hour. Returns how many were removed.
    pub async fn sweep_hash_classes(&self) -> Result<u64, StoreError> {
        let mut call = self.begin_call("sweep_hash_classes").await?;
        let (connection, deadline) = call.parts();
        // A transaction that stores a hash of the class locks the row of the class. Then this statement waits for the
        // transaction, and reads the new time.
        let query = sqlx::query!(
            "DELETE FROM hash_classes
             WHERE touched_at < clock_timestamp() - interval '1 hour' AND NOT EXISTS (
                SELECT FROM users
                WHERE users.app_id = hash_classes.app_id AND users.foreign_hash = hash_classes.class
             )"
        );
        let deleted = timeout_at(deadline, query.execute(connection)).await;
        Ok(call.end_call(deleted)?.rows_affected())
    }
}

/// Adds a hash class to an App, or marks the class as used now. Returns false, and writes nothing, if the App would
/// have too many classes or too much weight. Must be called in the transaction that stores a hash of the class, before
/// the hash is stored.
pub(in crate::store::postgres) async fn add_hash_class(
    transaction: &mut PgConnection,
    app: &AppId,
    class: HashClass,
) -> Result<bool, sqlx::Error> {
    let max_classes = i64::try_from(MAX_CLASSES).unwrap_or(i64::MAX);
    // Only one transaction at a time counts the classes of an App. The statement after the lock sees what others have
    // committed.
    sqlx::query!("SELECT pg_advisory_xact_lock(hashtextextended('latchkey_hash_classes ' || $1, 0))", app.as_str())
        .execute(&mut *transaction)
        .await?;
    let added = sqlx::query!(
        "INSERT INTO hash_classes (app_id, class, weight, touched_at)
         SELECT $1, $2, $3, clock_timestamp()
         FROM (SELECT count(*) AS classes, coalesce(sum(weight), 0) AS weight FROM hash_classes
             WHERE app_id = $1 AND class <> $2) AS others
         WHERE others.classes < $4 AND others.weight + $3 <= $5
         ON CONFLICT (app_id, class) DO UPDATE SET touched_at = excluded.touched_at",
        app.as_str(),
        class.to_string(),
        class.weight(),
        max_classes,
        MAX_WEIGHT,
    )
    .execute(transaction)
    .await?;
    Ok(added.rows_affected() > 0)
}

async fn set_foreign_hash(
    connection: &mut PgConnection,
    app: &AppId,
    user: UserId,
    hash: &PasswordHash,
    at: OffsetDateTime,
) -> Result<SetForeignHashOutcome, sqlx::Error> {
    let class = hash.foreign_class(HashClass::DEFAULT_NATIVE);
    let mut transaction = connection.begin().await?;
    if let Some(class) = class
        && !add_hash_class(&mut transaction, app, class).await?
    {
        transaction.rollback().await?;
        return Ok(SetForeignHashOutcome::TooManyKinds);
    }
    let updated = sqlx::query!(
        "UPDATE users SET password_hash = $3, foreign_hash = $4, foreign_hash_at = $5, version = version + 1,
            updated_at = $6
         WHERE app_id = $1 AND id = $2",
        app.as_str(),
        user.0,
        hash.expose(),
        class.map(|class| class.to_string()),
        class.map(|_| at),
        at,
    )
    .execute(&mut *transaction)
    .await?;
    if updated.rows_affected() == 0 {
        transaction.rollback().await?;
        return Ok(SetForeignHashOutcome::NoUser);
    }
    transaction.commit().await?;
    Ok(SetForeignHashOutcome::Stored)
}

async fn remove_expired(
    connection: &mut PgConnection,
    expiry: &ForeignHashExpiry,
    max_hashes: u32,
    notify: bool,
) -> Result<u64, sqlx::Error> {
    let ForeignHashExpiry { claim, imported_before, native, now, .. } = expiry;
    let mut transaction = connection.begin().await?;
    let removed = sqlx::query!(
        r#"
        WITH owner AS (
            SELECT app_id FROM apps
            WHERE app_id = $1 AND state = 'active' AND namespace = $5
                AND ($6::text IS NULL OR incarnation IS NULL OR incarnation = $6)
            FOR SHARE
        ), expired AS (
            SELECT users.id FROM users JOIN owner ON users.app_id = owner.app_id
            WHERE users.app_id = $1 AND users.foreign_hash IS NOT NULL AND users.foreign_hash_at < $2
                AND users.foreign_hash = ANY (ARRAY (SELECT class FROM hash_classes WHERE hash_classes.app_id = $1))
                -- The hash can be native: a server of an earlier version replaces the hash, but not its class, and
                -- the parameters of new hashes can have changed since the import.
                AND NOT starts_with(users.password_hash, $7)
            LIMIT $4
            FOR UPDATE OF users SKIP LOCKED
        )
        UPDATE users
        SET password_hash = NULL,
            foreign_hash = NULL,
            foreign_hash_at = NULL,
            version = version + 1,
            updated_at = $3
        FROM expired
        WHERE users.app_id = $1 AND users.id = expired.id
        RETURNING users.id, users.version
        "#,
        claim.app.as_str(),
        imported_before,
        now,
        i64::from(max_hashes),
        claim.namespace,
        claim.incarnation.as_deref(),
        format!("${native}$"),
    )
    .fetch_all(&mut *transaction)
    .await?;
    let event = BatchEvent {
        kind: EventKind::PasswordRemoved,
        at: *now,
        detail: Detail::default(),
        webhooks: &expiry.webhooks,
    };
    let users: Vec<_> = removed.into_iter().map(|row| (row.id, row.version)).collect();
    audit::insert_for_users(&mut transaction, &claim.app, &event, &users, notify).await?;
    transaction.commit().await?;
    Ok(users.len() as u64)
}
