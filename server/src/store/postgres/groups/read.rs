//! Reads the groups of users.

use std::{iter::zip, sync::Arc};

use latchkey_crds::types::{AppId, GroupName};
use sqlx::PgConnection;
use tokio::time::timeout_at;
use uuid::Uuid;

use crate::{
    domain::{
        groups::{Membership, UserGroups},
        ports::StoreError,
        user::UserId,
    },
    store::postgres::{CallError, PostgresStore},
};

/// The groups of a user.
pub(super) struct GroupsRow {
    pub(super) user_id: Uuid,
    pub(super) version: i64,
    /// The group name of each membership, sorted by the bytes of the names. A name occurs once for each source.
    pub(super) names: Vec<String>,
    /// The source of each membership: the Provider that reported it. Empty if an administrator added the member.
    pub(super) sources: Vec<String>,
}

impl PostgresStore {
    /// Returns the groups of a user, or `None` if there is no such user.
    pub(in crate::store) async fn user_groups(
        &self,
        app: &AppId,
        user: UserId,
    ) -> Result<Option<UserGroups>, StoreError> {
        let mut call = self.begin_call("user_groups").await?;
        let (connection, deadline) = call.parts();
        let rows = timeout_at(deadline, read_groups(connection, app, &[user.0])).await;
        let Some(row) = call.end_call(rows)?.pop() else { return Ok(None) };
        UserGroups::try_from(row).map(Some).map_err(|error| self.record_error(error))
    }

    /// Removes outbox rows of changed groups, after the groups were written to Redis.
    pub(in crate::store) async fn remove_groups_rows(&self, app: &AppId, rows: &[Uuid]) -> Result<(), StoreError> {
        let mut call = self.begin_call("groups_carried").await?;
        let (connection, deadline) = call.parts();
        let query = sqlx::query!(
            "DELETE FROM outbox WHERE app_id = $1 AND id = ANY ($2) AND kind = 'groups'",
            app.as_str(),
            rows
        );
        let removed = timeout_at(deadline, query.execute(connection)).await;
        call.end_call(removed).map(drop)
    }
}

/// Reads the groups of these users with one statement, so that the version belongs to the memberships.
pub(super) async fn read_groups(
    connection: &mut PgConnection,
    app: &AppId,
    users: &[Uuid],
) -> Result<Vec<GroupsRow>, sqlx::Error> {
    sqlx::query_as!(
        GroupsRow,
        r#"
        SELECT users.id AS user_id, users.groups_version AS version,
            ARRAY (
                SELECT group_members.name FROM group_members
                WHERE group_members.app_id = users.app_id AND group_members.user_id = users.id
                ORDER BY group_members.name, group_members.source
            ) AS "names!",
            ARRAY (
                SELECT group_members.source FROM group_members
                WHERE group_members.app_id = users.app_id AND group_members.user_id = users.id
                ORDER BY group_members.name, group_members.source
            ) AS "sources!"
        FROM users WHERE users.app_id = $1 AND users.id = ANY ($2)
        "#,
        app.as_str(),
        users,
    )
    .fetch_all(connection)
    .await
}

// === impl UserGroups ===

impl TryFrom<GroupsRow> for UserGroups {
    type Error = CallError;

    fn try_from(row: GroupsRow) -> Result<Self, CallError> {
        let membership = |(name, source): (String, String)| {
            let name = name.parse::<GroupName>().map_err(|_| CallError::unexpected_row());
            name.map(|name| Membership { name, source })
        };
        let memberships: Result<Arc<[Membership]>, CallError> = zip(row.names, row.sources).map(membership).collect();
        Ok(Self { version: row.version, memberships: memberships? })
    }
}
