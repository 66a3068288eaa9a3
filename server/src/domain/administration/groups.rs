//! Groups and their members.

use time::{Duration, OffsetDateTime};

use super::AdministratorCall;
use crate::domain::{
    audit::EventKind,
    groups::{GroupTitle, ManagedGroupName, propagate_groups},
    ports::{GroupAdministration, GroupChanges, GroupRemoval, MemberOutcome, PutGroupOutcome, StoreError},
    user::UserId,
};

/// The maximum time that one call spends on removing members of a group. If members remain, the client must repeat the
/// call.
const MAX_REMOVAL_TIME: Duration = Duration::seconds(30);

/// Why a call about groups failed.
#[derive(Debug, thiserror::Error)]
pub enum GroupError {
    #[error("there is no such group")]
    GroupNotFound,
    #[error("there is no such user")]
    UserNotFound,
    #[error("the App has the maximum number of groups")]
    TooManyInApp,
    #[error("the user has the maximum number of groups")]
    TooManyOfUser,
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A group has so many members that one call cannot remove all of them.
#[derive(Debug, thiserror::Error)]
#[error("the group still has members; repeat the call")]
struct MembersLeft;

/// Creates the group, or replaces its title.
pub async fn put_group<S: GroupAdministration>(
    admin: AdministratorCall<'_, S>,
    name: &ManagedGroupName,
    title: Option<&GroupTitle>,
) -> Result<(), GroupError> {
    match admin.stores().put_group(admin.app_id(), name, title, admin.call.env.now()).await? {
        PutGroupOutcome::Done => Ok(()),
        PutGroupOutcome::TooMany => Err(GroupError::TooManyInApp),
    }
}

/// Deletes the group and its memberships, in batches. If the call fails, some memberships can remain, and the call can
/// be repeated.
pub async fn remove_group<S: GroupAdministration + GroupChanges>(
    admin: AdministratorCall<'_, S>,
    name: &ManagedGroupName,
) -> Result<(), GroupError> {
    let started: OffsetDateTime = admin.call.env.now();
    let mut has_removed = false;
    loop {
        let event = admin.event(EventKind::GroupMemberRemoved, None);
        match admin.stores().remove_group(admin.app_id(), name, event).await? {
            GroupRemoval::Removed(changes) => {
                propagate_groups(admin.stores(), admin.app_id(), &changes).await;
                return Ok(());
            }
            GroupRemoval::Partial(changes) => {
                propagate_groups(admin.stores(), admin.app_id(), &changes).await;
                has_removed = true;
            }
            // A concurrent call has deleted the group after this call had removed members.
            GroupRemoval::NotFound if has_removed => return Ok(()),
            GroupRemoval::NotFound => return Err(GroupError::GroupNotFound),
        }
        if admin.call.env.now() - started > MAX_REMOVAL_TIME {
            return Err(StoreError::Unavailable { store: "Postgres", source: Box::new(MembersLeft) }.into());
        }
    }
}

/// Makes the user a member of the group. Does nothing if an administrator has already added the user to the group.
pub async fn add_member<S: GroupAdministration + GroupChanges>(
    admin: AdministratorCall<'_, S>,
    name: &ManagedGroupName,
    user: UserId,
) -> Result<(), GroupError> {
    let event = admin.event(EventKind::GroupMemberAdded, user);
    let outcome = admin.stores().add_member(admin.app_id(), name, user, event).await?;
    finish_change(admin, outcome).await
}

/// Removes the user from the group. Does nothing if the user is not a member.
pub async fn remove_member<S: GroupAdministration + GroupChanges>(
    admin: AdministratorCall<'_, S>,
    name: &ManagedGroupName,
    user: UserId,
) -> Result<(), GroupError> {
    let event = admin.event(EventKind::GroupMemberRemoved, user);
    let outcome = admin.stores().remove_member(admin.app_id(), name, user, event).await?;
    finish_change(admin, outcome).await
}

async fn finish_change<S: GroupChanges>(
    admin: AdministratorCall<'_, S>,
    outcome: MemberOutcome,
) -> Result<(), GroupError> {
    match outcome {
        MemberOutcome::Changed(change) => {
            propagate_groups(admin.stores(), admin.app_id(), &[change]).await;
            Ok(())
        }
        MemberOutcome::Unchanged => Ok(()),
        MemberOutcome::GroupNotFound => Err(GroupError::GroupNotFound),
        MemberOutcome::UserNotFound => Err(GroupError::UserNotFound),
        MemberOutcome::TooMany => Err(GroupError::TooManyOfUser),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::VecDeque,
        sync::{
            Mutex,
            atomic::{AtomicI64, Ordering},
        },
    };

    use latchkey_crds::types::{AppId, GroupName};
    use uuid::Uuid;

    use super::*;
    use crate::{
        domain::{
            administration::Actor,
            audit::Event,
            call::Call,
            client::ClientInfo,
            clock::{Clock, Env},
            groups::{GroupsChange, Membership, ReportedGroups, UserGroups},
            ports::{GroupPage, MemberPage, MemberPosition, Replication},
        },
        fixtures,
    };

    /// A clock that advances by `step_seconds` each time it is read.
    struct SlowClock {
        step_seconds: i64,
        reads: AtomicI64,
    }

    impl Clock for SlowClock {
        fn now(&self) -> OffsetDateTime {
            let reads = self.reads.fetch_add(1, Ordering::Relaxed);
            OffsetDateTime::UNIX_EPOCH + Duration::seconds(reads * self.step_seconds)
        }
    }

    /// An implementation of the ports in memory. Each call of `remove_group` returns the next outcome in `removals`.
    /// `propagated` records each user when the user's groups are written to Redis.
    #[derive(Default)]
    struct FakeStores {
        removals: Mutex<VecDeque<GroupRemoval>>,
        propagated: Mutex<Vec<u128>>,
    }

    impl GroupChanges for FakeStores {
        async fn current_groups(&self, _: &AppId, _: UserId) -> Result<Option<UserGroups>, StoreError> {
            unreachable!("a change has the groups")
        }

        async fn store_groups(&self, _: &AppId, user: UserId, _: &UserGroups) -> Result<Replication, StoreError> {
            self.propagated.lock().unwrap().push(user.0.as_u128());
            Ok(Replication::Complete)
        }

        async fn remove_groups_rows(&self, _: &AppId, _: &[Uuid]) -> Result<(), StoreError> {
            Ok(())
        }

        async fn replace_reported_groups(
            &self,
            _: &AppId,
            _: ReportedGroups,
            _: Event,
        ) -> Result<Option<GroupsChange>, StoreError> {
            unreachable!("nobody logs in")
        }
    }

    impl GroupAdministration for FakeStores {
        async fn groups(&self, _: &AppId, _: Option<&GroupName>, _: u16) -> Result<GroupPage, StoreError> {
            unreachable!("nothing is listed")
        }

        async fn put_group(
            &self,
            _: &AppId,
            _: &ManagedGroupName,
            _: Option<&GroupTitle>,
            _: OffsetDateTime,
        ) -> Result<PutGroupOutcome, StoreError> {
            unreachable!("no group is created")
        }

        async fn remove_group(&self, _: &AppId, _: &ManagedGroupName, _: Event) -> Result<GroupRemoval, StoreError> {
            Ok(self.removals.lock().unwrap().pop_front().expect("another batch"))
        }

        async fn group_members(
            &self,
            _: &AppId,
            _: &ManagedGroupName,
            _: Option<&MemberPosition>,
            _: u16,
        ) -> Result<Option<MemberPage>, StoreError> {
            unreachable!("nothing is listed")
        }

        async fn add_member(
            &self,
            _: &AppId,
            _: &ManagedGroupName,
            _: UserId,
            _: Event,
        ) -> Result<MemberOutcome, StoreError> {
            unreachable!("no member is added")
        }

        async fn remove_member(
            &self,
            _: &AppId,
            _: &ManagedGroupName,
            _: UserId,
            _: Event,
        ) -> Result<MemberOutcome, StoreError> {
            unreachable!("no single member is removed")
        }

        async fn memberships(&self, _: &AppId, _: UserId) -> Result<Option<Vec<Membership>>, StoreError> {
            unreachable!("nothing is listed")
        }
    }

    fn groups_change(user: u128) -> GroupsChange {
        GroupsChange {
            user: UserId(Uuid::from_u128(user)),
            groups: UserGroups { version: 1, memberships: std::sync::Arc::default() },
            outbox_row: Uuid::from_u128(user),
        }
    }

    /// Deletes a group from stores that return `removals`, one for each batch. Returns the outcome, the users that
    /// `propagated` records, and how many of `removals` were not used.
    async fn remove(
        step_seconds: i64,
        removals: impl IntoIterator<Item = GroupRemoval>,
    ) -> (Result<(), GroupError>, Vec<u128>, usize) {
        let stores = FakeStores { removals: Mutex::new(removals.into_iter().collect()), ..FakeStores::default() };
        let clock = SlowClock { step_seconds, reads: AtomicI64::new(0) };
        let env = Env { clock: Box::new(clock), ..Env::system() };
        let app = fixtures::app(fixtures::rendered("shop"));
        let client = ClientInfo { ip: "192.0.2.1".parse().unwrap(), user_agent: None };
        let actor = Actor { namespace: "shop".to_owned(), name: "runs".to_owned() };
        let call = Call { stores: &stores, env: &env, app: &app, client: &client };
        let admin = AdministratorCall { call, actor: &actor };
        let outcome = remove_group(admin, &ManagedGroupName::parse("staff").unwrap()).await;
        let left = stores.removals.lock().unwrap().len();
        let mut propagated = stores.propagated.into_inner().unwrap();
        propagated.sort_unstable();
        (outcome, propagated, left)
    }

    #[tokio::test]
    async fn a_group_is_removed_batch_by_batch() {
        let batches = [
            GroupRemoval::Partial(vec![groups_change(1), groups_change(2)]),
            GroupRemoval::Partial(vec![groups_change(3)]),
            GroupRemoval::Removed(vec![groups_change(4)]),
        ];
        let (outcome, propagated, left) = remove(0, batches).await;
        assert!(outcome.is_ok() && left == 0);
        assert_eq!(propagated, [1, 2, 3, 4]);
    }

    #[tokio::test]
    async fn a_missing_group_is_an_error_only_in_the_first_batch() {
        let (outcome, propagated, _) =
            remove(0, [GroupRemoval::Partial(vec![groups_change(1)]), GroupRemoval::NotFound]).await;
        assert!(outcome.is_ok());
        assert_eq!(propagated, [1]);
        let (outcome, ..) = remove(0, [GroupRemoval::NotFound]).await;
        assert!(matches!(outcome, Err(GroupError::GroupNotFound)));
    }

    #[tokio::test]
    async fn a_removal_that_takes_too_long_ends_between_two_batches() {
        let batches = (1..=100).map(|user| GroupRemoval::Partial(vec![groups_change(user)]));
        let (outcome, propagated, left) = remove(4, batches).await;
        assert!(matches!(outcome, Err(GroupError::Store(StoreError::Unavailable { .. }))));
        assert!((1..99).contains(&left), "{left} batches are left");
        assert_eq!(propagated.len(), 100 - left, "the groups of all removed members are written to Redis");
    }
}
