//! Pages of groups and members, and the memberships of a user.

use latchkey_crds::types::{AppId, GroupName};
use sqlx::PgConnection;
use time::OffsetDateTime;
use tokio::time::timeout_at;
use uuid::Uuid;

use crate::{
    domain::{
        groups::{Group, GroupMember, ManagedGroupName, Membership},
        ports::{GroupPage, MemberPage, MemberPosition, StoreError},
        user::UserId,
    },
    store::postgres::{CallError, PostgresStore},
};

struct GroupRow {
    name: String,
    title: Option<String>,
    created_at: OffsetDateTime,
}

struct MemberRow {
    user_id: Uuid,
    source: String,
    created_at: OffsetDateTime,
}

struct NameAndSource {
    name: String,
    source: String,
}

impl PostgresStore {
    pub(super) async fn groups(
        &self,
        app: &AppId,
        after: Option<&GroupName>,
        limit: u16,
    ) -> Result<GroupPage, StoreError> {
        let mut call = self.begin_administration("groups").await?;
        let (connection, deadline) = call.parts();
        // Every name is greater than the empty text. The query reads one row more than the page has, to find out
        // whether another page follows.
        let query = sqlx::query_as!(
            GroupRow,
            "SELECT name, title, created_at FROM groups WHERE app_id = $1 AND name > $2 ORDER BY name LIMIT $3",
            app.as_str(),
            after.map_or("", GroupName::as_str),
            i64::from(limit) + 1,
        );
        let rows = timeout_at(deadline, query.fetch_all(connection)).await;
        let mut rows = call.end_call(rows)?;
        let has_more = rows.len() > usize::from(limit);
        rows.truncate(usize::from(limit));
        let groups: Result<Vec<Group>, CallError> = rows
            .into_iter()
            .map(|GroupRow { name, title, created_at }| Ok(Group { name: parse_name(&name)?, title, created_at }))
            .collect();
        let groups = groups.map_err(|error| self.record_error(error))?;
        let next = groups.last().filter(|_| has_more).map(|last| last.name.clone());
        Ok(GroupPage { groups, next })
    }

    pub(super) async fn group_members(
        &self,
        app: &AppId,
        name: &ManagedGroupName,
        after: Option<&MemberPosition>,
        limit: u16,
    ) -> Result<Option<MemberPage>, StoreError> {
        let mut call = self.begin_administration("group_members").await?;
        let (connection, deadline) = call.parts();
        let rows = timeout_at(deadline, read_members(connection, app, name, after, i64::from(limit) + 1)).await;
        let Some(mut rows) = call.end_call(rows)? else { return Ok(None) };
        let has_more = rows.len() > usize::from(limit);
        rows.truncate(usize::from(limit));
        let members: Vec<GroupMember> = rows
            .into_iter()
            .map(|MemberRow { user_id, source, created_at }| GroupMember { user: UserId(user_id), source, created_at })
            .collect();
        let last = members.last().filter(|_| has_more);
        let next = last.map(|last| MemberPosition { user: last.user, source: last.source.clone() });
        Ok(Some(MemberPage { members, next }))
    }

    pub(super) async fn memberships(&self, app: &AppId, user: UserId) -> Result<Option<Vec<Membership>>, StoreError> {
        let mut call = self.begin_administration("memberships").await?;
        let (connection, deadline) = call.parts();
        let rows = timeout_at(deadline, read_memberships(connection, app, user)).await;
        let Some(rows) = call.end_call(rows)? else { return Ok(None) };
        let memberships: Result<Vec<Membership>, CallError> = rows
            .into_iter()
            .map(|NameAndSource { name, source }| Ok(Membership { name: parse_name(&name)?, source }))
            .collect();
        memberships.map(Some).map_err(|error| self.record_error(error))
    }
}

fn parse_name(name: &str) -> Result<GroupName, CallError> {
    name.parse().map_err(|_| CallError::unexpected_row())
}

/// Returns `None` if there is no such group.
async fn read_members(
    connection: &mut PgConnection,
    app: &AppId,
    name: &ManagedGroupName,
    after: Option<&MemberPosition>,
    rows: i64,
) -> Result<Option<Vec<MemberRow>>, sqlx::Error> {
    let exists = sqlx::query_scalar!(
        r#"SELECT EXISTS (SELECT FROM groups WHERE app_id = $1 AND name = $2) AS "exists!""#,
        app.as_str(),
        name.as_str(),
    )
    .fetch_one(&mut *connection)
    .await?;
    if !exists {
        return Ok(None);
    }
    // No user has the nil UUID, so the first page begins after it.
    sqlx::query_as!(
        MemberRow,
        "SELECT user_id, source, created_at FROM group_members
         WHERE app_id = $1 AND name = $2 AND (user_id, source) > ($3, $4)
         ORDER BY user_id, source LIMIT $5",
        app.as_str(),
        name.as_str(),
        after.map_or(Uuid::nil(), |after| after.user.0),
        after.map_or("", |after| after.source.as_str()),
        rows,
    )
    .fetch_all(connection)
    .await
    .map(Some)
}

/// Returns `None` if there is no such user.
async fn read_memberships(
    connection: &mut PgConnection,
    app: &AppId,
    user: UserId,
) -> Result<Option<Vec<NameAndSource>>, sqlx::Error> {
    let exists = sqlx::query_scalar!(
        r#"SELECT EXISTS (SELECT FROM users WHERE app_id = $1 AND id = $2) AS "exists!""#,
        app.as_str(),
        user.0,
    )
    .fetch_one(&mut *connection)
    .await?;
    if !exists {
        return Ok(None);
    }
    sqlx::query_as!(
        NameAndSource,
        "SELECT name, source FROM group_members WHERE app_id = $1 AND user_id = $2 ORDER BY name, source",
        app.as_str(),
        user.0,
    )
    .fetch_all(connection)
    .await
    .map(Some)
}
