//! Memberships that providers report.

use std::collections::BTreeSet;

use latchkey_crds::types::{AppId, GroupName};
use sqlx::{Connection, PgConnection};
use time::OffsetDateTime;
use tokio::time::timeout_at;

use super::change::{ChangedRow, MembershipRow, lock_users, raise_versions, record_change, record_events};
use crate::{
    domain::{
        audit::{Event, EventKind},
        groups::{GroupsChange, MAX_GROUPS_PER_USER, ReportedGroups},
        ports::StoreError,
        user::UserId,
    },
    store::postgres::{PostgresStore, outbox},
};

impl PostgresStore {
    /// Replaces the memberships that a Provider reported. Returns `None` if nothing changed, or if the user does not
    /// exist.
    pub(in crate::store) async fn replace_reported_groups(
        &self,
        app: &AppId,
        reported: &ReportedGroups,
        event: &Event,
    ) -> Result<Option<GroupsChange>, StoreError> {
        let mut call = self.begin_call("replace_groups").await?;
        let (connection, deadline) = call.parts();
        let changed = timeout_at(deadline, replace(connection, app, reported, event)).await;
        let changed = call.end_call(changed)?;
        changed.map(GroupsChange::try_from).transpose().map_err(|error| self.record_error(error))
    }
}

async fn replace(
    connection: &mut PgConnection,
    app: &AppId,
    reported: &ReportedGroups,
    event: &Event,
) -> Result<Option<ChangedRow>, sqlx::Error> {
    // Nearly all logins report the same groups as the previous login. Such a login takes no lock.
    let wanted: BTreeSet<&str> = reported.names.iter().map(GroupName::as_str).collect();
    let stored = stored_names(connection, app, reported).await?;
    if stored.iter().map(String::as_str).eq(wanted.iter().copied()) {
        return Ok(None);
    }
    let mut transaction = connection.begin().await?;
    let changed = replace_in_transaction(&mut transaction, app, reported, wanted, event).await?;
    if changed.is_some() {
        transaction.commit().await?;
    } else {
        transaction.rollback().await?;
    }
    Ok(changed)
}

async fn replace_in_transaction(
    connection: &mut PgConnection,
    app: &AppId,
    reported: &ReportedGroups,
    mut wanted: BTreeSet<&str>,
    event: &Event,
) -> Result<Option<ChangedRow>, sqlx::Error> {
    let user = reported.user.0;
    if lock_users(connection, app, &[user]).await?.is_empty() {
        return Ok(None);
    }
    let others = sqlx::query_scalar!(
        r#"SELECT count(*) AS "others!" FROM group_members WHERE app_id = $1 AND user_id = $2 AND source <> $3"#,
        app.as_str(),
        user,
        reported.provider.as_str(),
    )
    .fetch_one(&mut *connection)
    .await?;
    let count = i64::try_from(wanted.len()).unwrap_or(i64::MAX);
    if others.saturating_add(count) > i64::from(MAX_GROUPS_PER_USER) {
        wanted.clear();
    }
    let stored = stored_names(connection, app, reported).await?;
    let before: BTreeSet<&str> = stored.iter().map(String::as_str).collect();
    let added: Vec<String> = wanted.difference(&before).map(|name| (*name).to_owned()).collect();
    let removed: Vec<String> = stored.into_iter().filter(|name| !wanted.contains(name.as_str())).collect();
    if added.is_empty() && removed.is_empty() {
        return Ok(None);
    }
    sqlx::query!(
        "DELETE FROM group_members WHERE app_id = $1 AND user_id = $2 AND source = $3 AND name = ANY ($4)",
        app.as_str(),
        user,
        reported.provider.as_str(),
        &removed,
    )
    .execute(&mut *connection)
    .await?;
    insert(connection, app, reported, &added, event.at).await?;
    let changed = record_change(connection, app, &[user]).await?;
    let memberships = |names: Vec<String>| -> Vec<MembershipRow> {
        let source = reported.provider.as_str();
        names.into_iter().map(|name| MembershipRow { user_id: user, name, source: source.to_owned() }).collect()
    };
    record_events(connection, app, event, EventKind::GroupMemberRemoved, memberships(removed)).await?;
    record_events(connection, app, event, EventKind::GroupMemberAdded, memberships(added)).await?;
    Ok(changed.into_iter().next())
}

async fn insert(
    connection: &mut PgConnection,
    app: &AppId,
    reported: &ReportedGroups,
    names: &[String],
    at: OffsetDateTime,
) -> Result<(), sqlx::Error> {
    sqlx::query!(
        "INSERT INTO group_members (app_id, user_id, name, source, created_at)
         SELECT $1, $2, name, $3, $4 FROM unnest($5::text[]) AS added (name)",
        app.as_str(),
        reported.user.0,
        reported.provider.as_str(),
        at,
        names,
    )
    .execute(connection)
    .await
    .map(drop)
}

/// The names of the user's stored groups from the Provider, sorted by their bytes.
async fn stored_names(
    connection: &mut PgConnection,
    app: &AppId,
    reported: &ReportedGroups,
) -> Result<Vec<String>, sqlx::Error> {
    sqlx::query_scalar!(
        "SELECT name FROM group_members WHERE app_id = $1 AND user_id = $2 AND source = $3 ORDER BY name",
        app.as_str(),
        reported.user.0,
        reported.provider.as_str(),
    )
    .fetch_all(connection)
    .await
}

/// Removes the memberships that a Provider reported, because the user's identities at the Provider were removed. If
/// `provider` is `None`, or if the user has no identity left, removes the memberships that all Providers reported. The
/// second condition is necessary because an identity stores the name of its Provider at the time of the link, but a
/// membership can have a later name. The transaction must have locked the user. If `notify` is set, servers are
/// notified when the transaction commits, and one of them writes the groups to Redis.
pub(in crate::store::postgres) async fn remove_reported(
    connection: &mut PgConnection,
    app: &AppId,
    user: UserId,
    provider: Option<&str>,
    event: &Event,
    notify: bool,
) -> Result<(), sqlx::Error> {
    let removed = sqlx::query_as!(
        MembershipRow,
        "DELETE FROM group_members
         WHERE app_id = $1 AND user_id = $2 AND source <> ''
            AND ($3::text IS NULL OR source = $3
                OR NOT EXISTS (SELECT FROM identities WHERE identities.app_id = $1 AND identities.user_id = $2))
         RETURNING user_id, name, source",
        app.as_str(),
        user.0,
        provider,
    )
    .fetch_all(&mut *connection)
    .await?;
    if removed.is_empty() {
        return Ok(());
    }
    raise_versions(connection, app, &[user.0]).await?;
    outbox::insert_due_groups_change(connection, app, user, notify).await?;
    record_events(connection, app, event, EventKind::GroupMemberRemoved, removed).await
}
