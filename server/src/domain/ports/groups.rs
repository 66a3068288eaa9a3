//! Groups of users, in Postgres and Redis.

use std::{future::Future, sync::Arc};

use latchkey_crds::types::{AppId, GroupName};
use time::OffsetDateTime;
use uuid::Uuid;

use super::{error::StoreResult, sessions::Replication};
use crate::domain::{
    audit::Event,
    groups::{Group, GroupMember, GroupTitle, GroupsChange, ManagedGroupName, Membership, ReportedGroups, UserGroups},
    user::UserId,
};

/// The groups of users, in Redis.
pub trait Groups: Sync {
    /// Returns the user's memberships, sorted by name and source, including those that do not count now (see
    /// `user_groups` in [`crate::domain::groups`]). Redis stores them beside the profile, so that most calls do not
    /// need Postgres. If Redis has no groups of the user, the call reads them from Postgres and stores them in Redis.
    fn of_user(&self, app: &AppId, user: UserId) -> impl Future<Output = StoreResult<Arc<[Membership]>>> + Send;
}

/// Changes to the groups of users in Postgres, and the propagation of these changes to Redis.
pub trait GroupChanges: Sync {
    /// Returns the groups in Postgres, or `None` if there is no such user.
    fn current_groups(&self, app: &AppId, user: UserId)
    -> impl Future<Output = StoreResult<Option<UserGroups>>> + Send;

    /// Writes the groups to Redis. Does nothing if the stored groups are newer, or if the user was deleted.
    fn store_groups(
        &self,
        app: &AppId,
        user: UserId,
        groups: &UserGroups,
    ) -> impl Future<Output = StoreResult<Replication>> + Send;

    /// Removes outbox rows of changed groups. Must not be called before Redis has the groups and, if there are
    /// replicas, one of the replicas has them too.
    fn remove_groups_rows(&self, app: &AppId, rows: &[Uuid]) -> impl Future<Output = StoreResult<()>> + Send;

    /// Replaces the user's memberships from the Provider, in one transaction with the events. If the user would have
    /// more than 500 memberships, the user gets none from the Provider. Returns `None` and writes nothing if the
    /// memberships are the same, or there is no such user. `event`: the values that all the events share; the store
    /// sets the kind, the id and the group of each event.
    fn replace_reported_groups(
        &self,
        app: &AppId,
        reported: ReportedGroups,
        event: Event,
    ) -> impl Future<Output = StoreResult<Option<GroupsChange>>> + Send;
}

/// A page of groups.
#[derive(Clone, Debug)]
pub struct GroupPage {
    /// Sorted by name, byte by byte.
    pub groups: Vec<Group>,
    /// The name of the last group. `None` on the last page.
    pub next: Option<GroupName>,
}

/// A page of members of a group.
#[derive(Clone, Debug)]
pub struct MemberPage {
    /// Sorted by user id, then by source.
    pub members: Vec<GroupMember>,
    /// `None` on the last page.
    pub next: Option<MemberPosition>,
}

/// The last member that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberPosition {
    pub user: UserId,
    pub source: String,
}

/// The outcome of creating or changing a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutGroupOutcome {
    Done,
    /// The App has the maximum number of groups; nothing was written.
    TooMany,
}

/// The outcome of one batch in the deletion of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GroupRemoval {
    /// The group is deleted. The last members were removed with it.
    Removed(Vec<GroupsChange>),
    /// Some members were removed. There can be more.
    Partial(Vec<GroupsChange>),
    NotFound,
}

/// The outcome of adding or removing a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemberOutcome {
    Changed(GroupsChange),
    /// Nothing was written: the user to add already is a member, or the user to remove is not a member.
    Unchanged,
    GroupNotFound,
    UserNotFound,
    /// The user has the maximum number of memberships; nothing was written.
    TooMany,
}

/// The groups that administrators manage, in Postgres. A change, its outbox rows and its events are one transaction.
/// All calls of this trait together use only a part of the connection pool.
pub trait GroupAdministration: Sync {
    /// Returns the next page: at most `limit` groups that follow `after`.
    fn groups(
        &self,
        app: &AppId,
        after: Option<&GroupName>,
        limit: u16,
    ) -> impl Future<Output = StoreResult<GroupPage>> + Send;

    /// Creates the group at this time, or replaces its title. Writes nothing if the group has this title.
    fn put_group(
        &self,
        app: &AppId,
        name: &ManagedGroupName,
        title: Option<&GroupTitle>,
        at: OffsetDateTime,
    ) -> impl Future<Output = StoreResult<PutGroupOutcome>> + Send;

    /// Removes a batch of members, those from providers included, and deletes the group with its last members. The call
    /// is repeated until the group is deleted. `event`: the values that all the events share; the store sets the kind,
    /// the id, the user and the group of each event.
    fn remove_group(
        &self,
        app: &AppId,
        name: &ManagedGroupName,
        event: Event,
    ) -> impl Future<Output = StoreResult<GroupRemoval>> + Send;

    /// Returns the next page: at most `limit` members that follow `after`. Returns `None` if there is no such group.
    fn group_members(
        &self,
        app: &AppId,
        name: &ManagedGroupName,
        after: Option<&MemberPosition>,
        limit: u16,
    ) -> impl Future<Output = StoreResult<Option<MemberPage>>> + Send;

    /// Makes the user a member of the group. `event`: the event without the group, which the store sets.
    fn add_member(
        &self,
        app: &AppId,
        name: &ManagedGroupName,
        user: UserId,
        event: Event,
    ) -> impl Future<Output = StoreResult<MemberOutcome>> + Send;

    /// Removes all memberships of the user in the group, including those from providers. `event`: the event without the
    /// group, which the store sets.
    fn remove_member(
        &self,
        app: &AppId,
        name: &ManagedGroupName,
        user: UserId,
        event: Event,
    ) -> impl Future<Output = StoreResult<MemberOutcome>> + Send;

    /// Returns the user's memberships, sorted by name and source, or `None` if there is no such user.
    fn memberships(
        &self,
        app: &AppId,
        user: UserId,
    ) -> impl Future<Output = StoreResult<Option<Vec<Membership>>>> + Send;
}
