//! Groups and their members. The table `groups` has the groups that administrators manage. The table `group_members`
//! has the memberships, including those from providers.
//!
//! Every change to memberships locks the users first, in the order of their ids, and then the group. Every change to a
//! user's memberships raises the user's `groups_version`, and an outbox row propagates the groups to Redis.

use latchkey_crds::types::{AppId, GroupName};
use time::OffsetDateTime;

use crate::{
    domain::{
        audit::Event,
        groups::{GroupTitle, ManagedGroupName, Membership},
        ports::{
            GroupAdministration, GroupPage, GroupRemoval, MemberOutcome, MemberPage, MemberPosition, PutGroupOutcome,
            StoreError,
        },
        user::UserId,
    },
    store::Stores,
};

mod change;
mod list;
mod members;
mod put;
mod read;
mod remove;
mod reported;

pub(super) use reported::remove_reported;

impl GroupAdministration for Stores {
    async fn groups(&self, app: &AppId, after: Option<&GroupName>, limit: u16) -> Result<GroupPage, StoreError> {
        self.postgres.groups(app, after, limit).await
    }

    async fn put_group(
        &self,
        app: &AppId,
        name: &ManagedGroupName,
        title: Option<&GroupTitle>,
        at: OffsetDateTime,
    ) -> Result<PutGroupOutcome, StoreError> {
        self.postgres.put_group(app, name, title, at).await
    }

    async fn remove_group(
        &self,
        app: &AppId,
        name: &ManagedGroupName,
        event: Event,
    ) -> Result<GroupRemoval, StoreError> {
        self.postgres.remove_group(app, name, &event).await
    }

    async fn group_members(
        &self,
        app: &AppId,
        name: &ManagedGroupName,
        after: Option<&MemberPosition>,
        limit: u16,
    ) -> Result<Option<MemberPage>, StoreError> {
        self.postgres.group_members(app, name, after, limit).await
    }

    async fn add_member(
        &self,
        app: &AppId,
        name: &ManagedGroupName,
        user: UserId,
        event: Event,
    ) -> Result<MemberOutcome, StoreError> {
        self.postgres.add_member(app, name, user, &event).await
    }

    async fn remove_member(
        &self,
        app: &AppId,
        name: &ManagedGroupName,
        user: UserId,
        event: Event,
    ) -> Result<MemberOutcome, StoreError> {
        self.postgres.remove_member(app, name, user, &event).await
    }

    async fn memberships(&self, app: &AppId, user: UserId) -> Result<Option<Vec<Membership>>, StoreError> {
        self.postgres.memberships(app, user).await
    }
}
