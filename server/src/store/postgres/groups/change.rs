//! Steps that changes to memberships share.

use std::collections::HashMap;

use latchkey_crds::types::AppId;
use sqlx::PgConnection;
use uuid::Uuid;

use super::read::{GroupsRow, read_groups};
use crate::{
    domain::{
        audit::{Event, EventKind},
        groups::{GroupsChange, UserGroups},
        user::UserId,
    },
    store::postgres::{CallError, audit, outbox},
};

/// A row of `group_members`.
pub(super) struct MembershipRow {
    pub(super) user_id: Uuid,
    pub(super) name: String,
    pub(super) source: String,
}

/// The groups of a user after a change, and the outbox row that propagates them.
pub(super) struct ChangedRow {
    groups: GroupsRow,
    outbox_row: Uuid,
}

/// Locks users in the order of their ids, until the transaction ends. Returns the users that exist.
pub(super) async fn lock_users(
    connection: &mut PgConnection,
    app: &AppId,
    users: &[Uuid],
) -> Result<Vec<Uuid>, sqlx::Error> {
    sqlx::query_scalar!(
        "SELECT id FROM users WHERE app_id = $1 AND id = ANY ($2) ORDER BY id FOR UPDATE",
        app.as_str(),
        users,
    )
    .fetch_all(connection)
    .await
}

/// Records that the memberships of these users have changed: raises the version of their groups, and adds the outbox
/// rows. The transaction must have locked the users.
pub(super) async fn record_change(
    connection: &mut PgConnection,
    app: &AppId,
    users: &[Uuid],
) -> Result<Vec<ChangedRow>, sqlx::Error> {
    raise_versions(connection, app, users).await?;
    let rows: HashMap<Uuid, Uuid> = outbox::insert_groups_changes(connection, app, users).await?.into_iter().collect();
    let groups = read_groups(connection, app, users).await?;
    let changed = groups.into_iter().filter_map(|groups| {
        let outbox_row = *rows.get(&groups.user_id)?;
        Some(ChangedRow { groups, outbox_row })
    });
    Ok(changed.collect())
}

/// Raises the `groups_version` of these users.
pub(super) async fn raise_versions(
    connection: &mut PgConnection,
    app: &AppId,
    users: &[Uuid],
) -> Result<(), sqlx::Error> {
    sqlx::query!(
        "UPDATE users SET groups_version = groups_version + 1 WHERE app_id = $1 AND id = ANY ($2)",
        app.as_str(),
        users,
    )
    .execute(connection)
    .await
    .map(drop)
}

/// Writes one event for each membership.
pub(super) async fn record_events(
    connection: &mut PgConnection,
    app: &AppId,
    event: &Event,
    kind: EventKind,
    memberships: Vec<MembershipRow>,
) -> Result<(), sqlx::Error> {
    if memberships.is_empty() {
        return Ok(());
    }
    let (mut users, mut names, mut sources) = (Vec::new(), Vec::new(), Vec::new());
    for MembershipRow { user_id, name, source } in memberships {
        users.push(user_id);
        names.push(name);
        sources.push(source);
    }
    audit::insert_for_memberships(connection, app, event, kind, &users, &names, &sources).await
}

// === impl ChangedRow ===

impl TryFrom<ChangedRow> for GroupsChange {
    type Error = CallError;

    fn try_from(row: ChangedRow) -> Result<Self, CallError> {
        Ok(Self {
            user: UserId(row.groups.user_id),
            groups: UserGroups::try_from(row.groups)?,
            outbox_row: row.outbox_row,
        })
    }
}
