//! The `Groups` and `GroupChanges` ports: Postgres stores the memberships, and Redis stores each user's groups next to
//! the user's profile.

use std::sync::Arc;

use latchkey_crds::types::AppId;
use uuid::Uuid;

use super::stores::Stores;
use crate::domain::{
    audit::Event,
    groups::{GroupsChange, Membership, ReportedGroups, UserGroups},
    ports::{GroupChanges, Groups, Replication, StoreError},
    user::UserId,
};

impl Groups for Stores {
    async fn of_user(&self, app: &AppId, user: UserId) -> Result<Arc<[Membership]>, StoreError> {
        if let Some(groups) = self.redis.stored_groups(app, user).await? {
            return Ok(groups.memberships);
        }
        let Some(groups) = self.postgres.user_groups(app, user).await? else { return Ok(Arc::default()) };
        // If the groups change between the two calls, Redis keeps the groups with the higher version.
        self.redis.store_groups(app, user, &groups).await?;
        Ok(groups.memberships)
    }
}

impl GroupChanges for Stores {
    async fn current_groups(&self, app: &AppId, user: UserId) -> Result<Option<UserGroups>, StoreError> {
        self.postgres.user_groups(app, user).await
    }

    async fn store_groups(&self, app: &AppId, user: UserId, groups: &UserGroups) -> Result<Replication, StoreError> {
        self.redis.store_groups(app, user, groups).await
    }

    async fn remove_groups_rows(&self, app: &AppId, rows: &[Uuid]) -> Result<(), StoreError> {
        self.postgres.remove_groups_rows(app, rows).await
    }

    async fn replace_reported_groups(
        &self,
        app: &AppId,
        reported: ReportedGroups,
        event: Event,
    ) -> Result<Option<GroupsChange>, StoreError> {
        self.postgres.replace_reported_groups(app, &reported, &event).await
    }
}
