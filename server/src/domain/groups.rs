//! Groups of users (specification: Groups).

use std::{fmt, sync::Arc};

use futures::{StreamExt, stream::FuturesUnordered};
use latchkey_crds::types::{AppId, GroupName, ProviderName};
use time::OffsetDateTime;
use tracing::warn;
use uuid::Uuid;

use super::{
    call::Call,
    ports::{GroupChanges, Groups, Replication, StoreError},
    user::UserId,
};

/// The maximum number of groups that administrators can create in an App.
pub const MAX_GROUPS_PER_APP: u32 = 10_000;
/// The maximum number of memberships of a user, those from providers included.
pub const MAX_GROUPS_PER_USER: u32 = 500;
/// The maximum number of concurrent writes of users' groups to Redis in one request.
const CONCURRENT_WRITES: usize = 16;

/// The name of a group that administrators manage: a letter or digit, then up to 127 characters of `[A-Za-z0-9._:@-]`.
/// So the name needs no encoding in a path. Groups from providers can have other names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManagedGroupName(GroupName);

/// The title of a group, for people: trimmed, 1–100 characters, no control characters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupTitle(Box<str>);

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidGroupTitle {
    #[error("is empty")]
    Empty,
    #[error("is longer than 100 characters")]
    TooLong,
    #[error("has a control character")]
    ControlCharacter,
}

/// A group that administrators manage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    pub name: GroupName,
    pub title: Option<String>,
    pub created_at: OffsetDateTime,
}

/// A member of a group. If several sources (administrators or Providers) made a user a member, the user is listed once
/// for each source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupMember {
    pub user: UserId,
    /// The name of the Provider that reported the membership. Empty: an administrator added the member.
    pub source: String,
    pub created_at: OffsetDateTime,
}

/// A membership of a user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Membership {
    pub name: GroupName,
    /// The name of the Provider that reported the membership. Empty: an administrator added the user.
    pub source: String,
}

/// The memberships of a user, as Redis stores them beside the profile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UserGroups {
    /// Rises with every change to the groups. Older groups never replace newer ones.
    pub version: i64,
    /// Sorted by name and source, without duplicates.
    pub memberships: Arc<[Membership]>,
}

/// A change to the groups of a user. It is already stored in Postgres.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupsChange {
    pub user: UserId,
    /// The groups after the change.
    pub groups: UserGroups,
    /// The id of the outbox row. If the request cannot write the groups to Redis, the outbox worker does so later
    /// because of this row.
    pub outbox_row: Uuid,
}

/// The groups that a provider has reported for a user at a login.
#[derive(Clone, Debug)]
pub struct ReportedGroups {
    pub user: UserId,
    pub provider: ProviderName,
    /// Sorted, without duplicates.
    pub names: Vec<GroupName>,
}

// === impl ManagedGroupName ===

impl ManagedGroupName {
    /// The syntax of a group name, as a regular expression for JSON schemas.
    pub const PATTERN: &str = "^[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}$";

    /// Returns `None` if the text is not the name of a group that administrators manage.
    pub fn parse(text: &str) -> Option<Self> {
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._:@-".contains(&byte);
        if !text.starts_with(|first: char| first.is_ascii_alphanumeric()) || !text.bytes().all(is_allowed) {
            return None;
        }
        text.parse().ok().map(Self)
    }

    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }
}

impl fmt::Display for ManagedGroupName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

// === impl GroupTitle ===

impl GroupTitle {
    pub const MAX_CHARS: usize = 100;

    pub fn parse(input: &str) -> Result<Self, InvalidGroupTitle> {
        let trimmed = input.trim();
        if trimmed.is_empty() {
            return Err(InvalidGroupTitle::Empty);
        }
        if trimmed.chars().any(char::is_control) {
            return Err(InvalidGroupTitle::ControlCharacter);
        }
        if trimmed.chars().count() > Self::MAX_CHARS {
            return Err(InvalidGroupTitle::TooLong);
        }
        Ok(Self(trimmed.into()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Returns the names of the user's groups that count in the App now, sorted, without duplicates. Each read applies the
/// App's current document. So the groups from a provider stop counting when the provider is removed from the App, not
/// only at the user's next login.
pub(super) async fn user_groups<S: Groups>(call: Call<'_, S>, user: UserId) -> Result<Arc<[GroupName]>, StoreError> {
    let memberships = call.stores.of_user(call.app_id(), user).await?;
    let counted = memberships.iter().filter(|membership| call.app.takes_groups_from(&membership.source));
    let mut names: Vec<GroupName> = counted.map(|membership| membership.name.clone()).collect();
    names.dedup();
    Ok(names.into())
}

/// Makes sure that Redis has the groups of a user who logs in, so that the user's tokens can have them while Postgres
/// is unavailable. A failure is only logged: the groups are then read when they are needed.
pub(super) async fn load_groups<S: Groups>(call: Call<'_, S>, user: UserId) {
    if let Err(error) = call.stores.of_user(call.app_id(), user).await {
        warn!(
            app = %call.app_id(),
            error = &error as &dyn std::error::Error,
            "the groups of a user were not loaded at the login; they are read when they are needed"
        );
    }
}

/// Writes changed groups to Redis before the response. If that fails, or if no replica acknowledges the groups, the
/// outbox worker writes them later, because the transaction of the change has added outbox rows.
pub(super) async fn propagate_groups<S: GroupChanges>(stores: &S, app: &AppId, changes: &[GroupsChange]) {
    let (mut rows, mut first_error) = (Vec::new(), None);
    let mut running = FuturesUnordered::new();
    let mut waiting = changes.iter();
    loop {
        while running.len() < CONCURRENT_WRITES
            && let Some(change) = waiting.next()
        {
            running.push(store(stores, app, change));
        }
        match running.next().await {
            Some(Ok(row)) => rows.extend(row),
            Some(Err(error)) => first_error = first_error.or(Some(error)),
            None => break,
        }
    }
    if !rows.is_empty()
        && let Err(error) = stores.remove_groups_rows(app, &rows).await
    {
        first_error = first_error.or(Some(error));
    }
    if let Some(error) = first_error {
        warn!(
            %app,
            error = &error as &dyn std::error::Error,
            "changed groups were not written to Redis now; the outbox worker writes them later"
        );
    }
}

/// Writes the groups of one user to Redis. Returns the outbox row if the row is no longer needed.
async fn store<S: GroupChanges>(stores: &S, app: &AppId, change: &GroupsChange) -> Result<Option<Uuid>, StoreError> {
    let replication = stores.store_groups(app, change.user, &change.groups).await?;
    Ok((replication == Replication::Complete).then_some(change.outbox_row))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use latchkey_crds::rendered::RenderedProvider;

    use super::*;
    use crate::{
        domain::{app::App, audit::Event, client::ClientInfo, clock::Env},
        fixtures,
    };

    #[test]
    fn a_managed_name_needs_no_encoding_in_a_path() {
        for valid in ["a", "0", "team-1", "argo:admins", "ops@example.com", "A.b_c-", &"a".repeat(128)] {
            assert_eq!(ManagedGroupName::parse(valid).unwrap().as_str(), valid);
        }
        for invalid in ["", "-a", ".a", ":a", "@a", "_a", "a b", "a/b", "a%3Ab", "é", "a\n", "a*", &"a".repeat(129)] {
            assert_eq!(ManagedGroupName::parse(invalid), None, "{invalid}");
        }
    }

    #[test]
    fn a_title_is_trimmed_and_has_1_to_100_characters_without_control_characters() {
        assert_eq!(GroupTitle::parse("  Platform team ").unwrap().as_str(), "Platform team");
        assert!(GroupTitle::parse(&"é".repeat(100)).is_ok());
        assert_eq!(GroupTitle::parse(&"é".repeat(101)), Err(InvalidGroupTitle::TooLong));
        assert_eq!(GroupTitle::parse(" \t"), Err(InvalidGroupTitle::Empty));
        assert_eq!(GroupTitle::parse("a\u{0}b"), Err(InvalidGroupTitle::ControlCharacter));
    }

    /// Records what is written to Redis, and which outbox rows are removed.
    struct FakeStores {
        replication: Replication,
        /// Writing the groups of this user fails.
        failing: Option<UserId>,
        stored: Mutex<Vec<(UserId, UserGroups)>>,
        removed: Mutex<Vec<Uuid>>,
    }

    impl GroupChanges for FakeStores {
        async fn current_groups(&self, _: &AppId, _: UserId) -> Result<Option<UserGroups>, StoreError> {
            unreachable!("the change has the groups")
        }

        async fn store_groups(&self, _: &AppId, user: UserId, groups: &UserGroups) -> Result<Replication, StoreError> {
            if self.failing == Some(user) {
                return Err(StoreError::Unavailable { store: "Redis", source: "gone".into() });
            }
            self.stored.lock().unwrap().push((user, groups.clone()));
            Ok(self.replication)
        }

        async fn remove_groups_rows(&self, _: &AppId, rows: &[Uuid]) -> Result<(), StoreError> {
            self.removed.lock().unwrap().extend(rows);
            Ok(())
        }

        async fn replace_reported_groups(
            &self,
            _: &AppId,
            _: ReportedGroups,
            _: Event,
        ) -> Result<Option<GroupsChange>, StoreError> {
            unreachable!("nothing is reported")
        }
    }

    fn membership(name: &str, source: &str) -> Membership {
        Membership { name: name.parse().unwrap(), source: source.to_owned() }
    }

    /// Every user has these memberships.
    struct FakeGroups(Arc<[Membership]>);

    impl Groups for FakeGroups {
        async fn of_user(&self, _: &AppId, _: UserId) -> Result<Arc<[Membership]>, StoreError> {
            Ok(Arc::clone(&self.0))
        }
    }

    #[tokio::test]
    async fn groups_count_only_while_the_app_takes_them_over_from_their_provider() {
        let stores = FakeGroups(Arc::new([
            membership("dev", "corp"),
            membership("ops", ""),
            membership("ops", "corp"),
            membership("root", "old"),
        ]));
        let provider = |name: &str, groups: bool| -> RenderedProvider {
            let mut provider = serde_json::json!({
                "name": name,
                "resource": name,
                "linkByEmail": true,
                "settings": { "preset": "oidc", "clientID": "client", "secret": "secret" },
            });
            if groups {
                provider["groups"] = serde_json::json!({ "claim": "groups", "prefix": "" });
            }
            serde_json::from_value(provider).unwrap()
        };
        let app = |providers| {
            let mut doc = fixtures::rendered("shop");
            doc.providers = providers;
            fixtures::app(doc)
        };
        let env = Env::system();
        let client = ClientInfo { ip: "192.0.2.1".parse().unwrap(), user_agent: None };
        let names = async |app: &App| -> Vec<String> {
            let call = Call { stores: &stores, env: &env, app, client: &client };
            let names = user_groups(call, UserId(Uuid::nil())).await.unwrap();
            names.iter().map(|name| name.as_str().to_owned()).collect()
        };
        assert_eq!(names(&app(vec![provider("corp", true), provider("old", true)])).await, ["dev", "ops", "root"]);
        assert_eq!(names(&app(vec![provider("corp", true)])).await, ["dev", "ops"], "old was removed");
        assert_eq!(names(&app(vec![provider("corp", false)])).await, ["ops"], "corp has no groups any more");
        assert_eq!(names(&app(Vec::new())).await, ["ops"]);
    }

    fn groups_change(number: u128) -> GroupsChange {
        let memberships = Arc::new([membership(&format!("team-{number}"), "")]);
        GroupsChange {
            user: UserId(Uuid::from_u128(number)),
            groups: UserGroups { version: 1, memberships },
            outbox_row: Uuid::from_u128(1_000 + number),
        }
    }

    /// Propagates the groups of the users 1 to 40. Returns the users with stored groups and the users with removed
    /// outbox rows, both sorted.
    async fn propagate(replication: Replication, failing: Option<UserId>) -> (Vec<u128>, Vec<u128>) {
        let stores = FakeStores { replication, failing, stored: Mutex::default(), removed: Mutex::default() };
        let changes: Vec<_> = (1..=40).map(groups_change).collect();
        propagate_groups(&stores, &"shop".parse().unwrap(), &changes).await;
        let stored = stores.stored.into_inner().unwrap();
        for (user, groups) in &stored {
            assert_eq!(*groups, groups_change(user.0.as_u128()).groups);
        }
        let mut stored: Vec<_> = stored.iter().map(|(user, _)| user.0.as_u128()).collect();
        let mut removed: Vec<_> =
            stores.removed.into_inner().unwrap().iter().map(|row| row.as_u128() - 1_000).collect();
        stored.sort_unstable();
        removed.sort_unstable();
        (stored, removed)
    }

    #[tokio::test]
    async fn an_outbox_row_stays_until_a_replica_has_the_groups() {
        let all: Vec<u128> = (1..=40).collect();
        assert_eq!(propagate(Replication::Complete, None).await, (all.clone(), all.clone()));
        assert_eq!(propagate(Replication::Unconfirmed, None).await, (all.clone(), Vec::new()));
        let failing = UserId(Uuid::from_u128(7));
        let others: Vec<u128> = all.into_iter().filter(|number| *number != 7).collect();
        assert_eq!(propagate(Replication::Complete, Some(failing)).await, (others.clone(), others));
    }
}
