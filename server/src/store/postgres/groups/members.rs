//! Adds and removes the members of groups.

use latchkey_crds::types::AppId;
use sqlx::{Connection, PgConnection};
use tokio::time::timeout_at;

use super::change::{ChangedRow, MembershipRow, lock_users, record_change, record_events};
use crate::{
    domain::{
        audit::{Event, EventKind},
        groups::{GroupsChange, MAX_GROUPS_PER_USER, ManagedGroupName},
        ports::{MemberOutcome, StoreError},
        user::UserId,
    },
    store::postgres::PostgresStore,
};

enum Outcome {
    Changed(Vec<ChangedRow>),
    Unchanged,
    GroupNotFound,
    UserNotFound,
    TooMany,
}

/// A change to the members of a group.
#[derive(Clone, Copy)]
enum Change {
    Add,
    Remove,
}

impl PostgresStore {
    pub(super) async fn add_member(
        &self,
        app: &AppId,
        name: &ManagedGroupName,
        user: UserId,
        event: &Event,
    ) -> Result<MemberOutcome, StoreError> {
        let mut call = self.begin_administration("add_member").await?;
        let (connection, deadline) = call.parts();
        let outcome = timeout_at(deadline, change_member(connection, app, name, user, event, Change::Add)).await;
        let outcome = call.end_call(outcome)?;
        self.member_outcome(outcome)
    }

    pub(super) async fn remove_member(
        &self,
        app: &AppId,
        name: &ManagedGroupName,
        user: UserId,
        event: &Event,
    ) -> Result<MemberOutcome, StoreError> {
        let mut call = self.begin_administration("remove_member").await?;
        let (connection, deadline) = call.parts();
        let outcome = timeout_at(deadline, change_member(connection, app, name, user, event, Change::Remove)).await;
        let outcome = call.end_call(outcome)?;
        self.member_outcome(outcome)
    }

    fn member_outcome(&self, outcome: Outcome) -> Result<MemberOutcome, StoreError> {
        Ok(match outcome {
            Outcome::Changed(rows) => {
                let row = rows.into_iter().next();
                let Some(row) = row else { return Ok(MemberOutcome::UserNotFound) };
                MemberOutcome::Changed(GroupsChange::try_from(row).map_err(|error| self.record_error(error))?)
            }
            Outcome::Unchanged => MemberOutcome::Unchanged,
            Outcome::GroupNotFound => MemberOutcome::GroupNotFound,
            Outcome::UserNotFound => MemberOutcome::UserNotFound,
            Outcome::TooMany => MemberOutcome::TooMany,
        })
    }
}

async fn change_member(
    connection: &mut PgConnection,
    app: &AppId,
    name: &ManagedGroupName,
    user: UserId,
    event: &Event,
    change: Change,
) -> Result<Outcome, sqlx::Error> {
    let mut transaction = connection.begin().await?;
    let outcome = change_in_transaction(&mut transaction, app, name, user, event, change).await?;
    if matches!(outcome, Outcome::Changed(_)) {
        transaction.commit().await?;
    } else {
        transaction.rollback().await?;
    }
    Ok(outcome)
}

async fn change_in_transaction(
    connection: &mut PgConnection,
    app: &AppId,
    name: &ManagedGroupName,
    user: UserId,
    event: &Event,
    change: Change,
) -> Result<Outcome, sqlx::Error> {
    if lock_users(connection, app, &[user.0]).await?.is_empty() {
        return Ok(Outcome::UserNotFound);
    }
    // The lock lasts until the commit, so that no member is added while the group is being deleted.
    let group = sqlx::query_scalar!(
        "SELECT name FROM groups WHERE app_id = $1 AND name = $2 FOR KEY SHARE",
        app.as_str(),
        name.as_str(),
    )
    .fetch_optional(&mut *connection)
    .await?;
    if group.is_none() {
        return Ok(Outcome::GroupNotFound);
    }
    let (kind, memberships) = match change {
        Change::Add => {
            // The user is locked, so the count is exact.
            let before = sqlx::query!(
                r#"
                SELECT count(*) AS "memberships!",
                    coalesce(bool_or(name = $3 AND source = ''), false) AS "is_member!"
                FROM group_members WHERE app_id = $1 AND user_id = $2
                "#,
                app.as_str(),
                user.0,
                name.as_str(),
            )
            .fetch_one(&mut *connection)
            .await?;
            if before.is_member {
                return Ok(Outcome::Unchanged);
            }
            if before.memberships >= i64::from(MAX_GROUPS_PER_USER) {
                return Ok(Outcome::TooMany);
            }
            sqlx::query!(
                "INSERT INTO group_members (app_id, user_id, name, source, created_at) VALUES ($1, $2, $3, '', $4)",
                app.as_str(),
                user.0,
                name.as_str(),
                event.at,
            )
            .execute(&mut *connection)
            .await?;
            let added = MembershipRow { user_id: user.0, name: name.as_str().to_owned(), source: String::new() };
            (EventKind::GroupMemberAdded, vec![added])
        }
        Change::Remove => {
            let removed = sqlx::query_as!(
                MembershipRow,
                "DELETE FROM group_members WHERE app_id = $1 AND user_id = $2 AND name = $3
                 RETURNING user_id, name, source",
                app.as_str(),
                user.0,
                name.as_str(),
            )
            .fetch_all(&mut *connection)
            .await?;
            (EventKind::GroupMemberRemoved, removed)
        }
    };
    if memberships.is_empty() {
        return Ok(Outcome::Unchanged);
    }
    let changed = record_change(connection, app, &[user.0]).await?;
    record_events(connection, app, event, kind, memberships).await?;
    Ok(Outcome::Changed(changed))
}
