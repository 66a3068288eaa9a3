//! Deletes a group. Its members are removed in batches, so that no transaction locks many users.

use latchkey_crds::types::AppId;
use sqlx::{Connection, PgConnection};
use tokio::time::timeout_at;

use super::change::{ChangedRow, MembershipRow, lock_users, record_change, record_events};
use crate::{
    domain::{
        audit::{Event, EventKind},
        groups::{GroupsChange, ManagedGroupName},
        ports::{GroupRemoval, StoreError},
    },
    store::postgres::{CallError, PostgresStore},
};

/// Maximum number of users in a batch. The groups of all these users stay in memory until they are written to Redis;
/// the groups of one user have at most 64 KiB.
const USERS_PER_BATCH: i64 = 200;

enum Outcome {
    Removed(Vec<ChangedRow>),
    Partial(Vec<ChangedRow>),
    NotFound,
}

impl PostgresStore {
    pub(super) async fn remove_group(
        &self,
        app: &AppId,
        name: &ManagedGroupName,
        event: &Event,
    ) -> Result<GroupRemoval, StoreError> {
        let mut call = self.begin_administration("remove_group").await?;
        let (connection, deadline) = call.parts();
        let outcome = timeout_at(deadline, remove(connection, app, name, event)).await;
        let changes = |rows: Vec<ChangedRow>| {
            let changes: Result<Vec<GroupsChange>, CallError> = rows.into_iter().map(GroupsChange::try_from).collect();
            changes.map_err(|error| self.record_error(error))
        };
        Ok(match call.end_call(outcome)? {
            Outcome::Removed(rows) => GroupRemoval::Removed(changes(rows)?),
            Outcome::Partial(rows) => GroupRemoval::Partial(changes(rows)?),
            Outcome::NotFound => GroupRemoval::NotFound,
        })
    }
}

async fn remove(
    connection: &mut PgConnection,
    app: &AppId,
    name: &ManagedGroupName,
    event: &Event,
) -> Result<Outcome, sqlx::Error> {
    let mut transaction = connection.begin().await?;
    let outcome = remove_in_transaction(&mut transaction, app, name, event).await?;
    if matches!(outcome, Outcome::NotFound) {
        transaction.rollback().await?;
    } else {
        transaction.commit().await?;
    }
    Ok(outcome)
}

async fn remove_in_transaction(
    connection: &mut PgConnection,
    app: &AppId,
    name: &ManagedGroupName,
    event: &Event,
) -> Result<Outcome, sqlx::Error> {
    let members = sqlx::query_scalar!(
        "SELECT DISTINCT user_id FROM group_members WHERE app_id = $1 AND name = $2 ORDER BY user_id LIMIT $3",
        app.as_str(),
        name.as_str(),
        USERS_PER_BATCH,
    )
    .fetch_all(&mut *connection)
    .await?;
    // The users are locked before the group, as in every change to memberships.
    let users = lock_users(connection, app, &members).await?;
    let group = sqlx::query_scalar!(
        "SELECT name FROM groups WHERE app_id = $1 AND name = $2 FOR UPDATE",
        app.as_str(),
        name.as_str(),
    )
    .fetch_optional(&mut *connection)
    .await?;
    if group.is_none() {
        return Ok(Outcome::NotFound);
    }
    let removed = sqlx::query_as!(
        MembershipRow,
        "DELETE FROM group_members WHERE app_id = $1 AND name = $2 AND user_id = ANY ($3)
         RETURNING user_id, name, source",
        app.as_str(),
        name.as_str(),
        &users,
    )
    .fetch_all(&mut *connection)
    .await?;
    // The lock on the group prevents administrators from adding members until the commit. With `ORDER BY`, Postgres
    // reads the index instead of the table.
    let remaining = sqlx::query_scalar!(
        "SELECT user_id FROM group_members WHERE app_id = $1 AND name = $2 ORDER BY user_id, source LIMIT 1",
        app.as_str(),
        name.as_str(),
    )
    .fetch_optional(&mut *connection)
    .await?;
    if remaining.is_none() {
        sqlx::query!("DELETE FROM groups WHERE app_id = $1 AND name = $2", app.as_str(), name.as_str())
            .execute(&mut *connection)
            .await?;
    }
    // A locked user may have left the group before the lock, so only users with a removed membership have changed.
    let mut changed: Vec<_> = removed.iter().map(|row| row.user_id).collect();
    changed.sort_unstable();
    changed.dedup();
    let changed = record_change(connection, app, &changed).await?;
    record_events(connection, app, event, EventKind::GroupMemberRemoved, removed).await?;
    Ok(if remaining.is_none() { Outcome::Removed(changed) } else { Outcome::Partial(changed) })
}
