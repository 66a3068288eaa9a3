//! Creates a group, or replaces its title.

use latchkey_crds::types::AppId;
use sqlx::{Connection, PgConnection};
use time::OffsetDateTime;
use tokio::time::timeout_at;

use crate::{
    domain::{
        groups::{GroupTitle, MAX_GROUPS_PER_APP, ManagedGroupName},
        ports::{PutGroupOutcome, StoreError},
    },
    store::postgres::{PostgresStore, apps, users::app_being_deleted},
};

enum Outcome {
    /// The group is new, or has a new title.
    Written,
    Unchanged,
    TooMany,
    /// The App's users are being deleted.
    AppBeingDeleted,
}

impl PostgresStore {
    pub(super) async fn put_group(
        &self,
        app: &AppId,
        name: &ManagedGroupName,
        title: Option<&GroupTitle>,
        at: OffsetDateTime,
    ) -> Result<PutGroupOutcome, StoreError> {
        let mut call = self.begin_administration("put_group").await?;
        let (connection, deadline) = call.parts();
        let title = title.map(GroupTitle::as_str);
        let outcome = timeout_at(deadline, put(connection, app, name, title, at)).await;
        match call.end_call(outcome)? {
            Outcome::Written | Outcome::Unchanged => Ok(PutGroupOutcome::Done),
            Outcome::TooMany => Ok(PutGroupOutcome::TooMany),
            Outcome::AppBeingDeleted => Err(app_being_deleted()),
        }
    }
}

async fn put(
    connection: &mut PgConnection,
    app: &AppId,
    name: &ManagedGroupName,
    title: Option<&str>,
    at: OffsetDateTime,
) -> Result<Outcome, sqlx::Error> {
    let mut transaction = connection.begin().await?;
    let outcome = put_in_transaction(&mut transaction, app, name, title, at).await?;
    if matches!(outcome, Outcome::Written) {
        transaction.commit().await?;
    } else {
        transaction.rollback().await?;
    }
    Ok(outcome)
}

async fn put_in_transaction(
    connection: &mut PgConnection,
    app: &AppId,
    name: &ManagedGroupName,
    title: Option<&str>,
    at: OffsetDateTime,
) -> Result<Outcome, sqlx::Error> {
    // Locks the App's row, so that no group is created while the App's users are being deleted.
    if !apps::is_active(connection, app).await? {
        return Ok(Outcome::AppBeingDeleted);
    }
    let stored = sqlx::query_scalar!(
        "SELECT title FROM groups WHERE app_id = $1 AND name = $2 FOR NO KEY UPDATE",
        app.as_str(),
        name.as_str(),
    )
    .fetch_optional(&mut *connection)
    .await?;
    if let Some(stored) = stored {
        if stored.as_deref() == title {
            return Ok(Outcome::Unchanged);
        }
        sqlx::query!(
            "UPDATE groups SET title = $3 WHERE app_id = $1 AND name = $2",
            app.as_str(),
            name.as_str(),
            title,
        )
        .execute(connection)
        .await?;
        return Ok(Outcome::Written);
    }
    // Only one call at a time counts the groups of an App. The statement after the lock sees what other calls have
    // committed. Another call may also have created this group.
    sqlx::query!("SELECT pg_advisory_xact_lock(hashtextextended('latchkey_groups ' || $1, 0))", app.as_str())
        .execute(&mut *connection)
        .await?;
    let written = sqlx::query!(
        "INSERT INTO groups (app_id, name, title, created_at)
         SELECT $1, $2, $3, $4
         WHERE (SELECT count(*) FROM groups WHERE app_id = $1) < $5
            OR EXISTS (SELECT FROM groups WHERE app_id = $1 AND name = $2)
         ON CONFLICT (app_id, name) DO UPDATE SET title = excluded.title",
        app.as_str(),
        name.as_str(),
        title,
        at,
        i64::from(MAX_GROUPS_PER_APP),
    )
    .execute(connection)
    .await?;
    Ok(if written.rows_affected() > 0 { Outcome::Written } else { Outcome::TooMany })
}
