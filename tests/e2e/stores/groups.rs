//! Groups: memberships in Postgres, and the groups of each user in Redis.

use std::{collections::BTreeSet, time::Duration};

use latchkey_crds::types::{GroupName, ProviderName};
use latchkey_server::{
    domain::{
        audit::EventKind,
        groups::{GroupTitle, GroupsChange, ManagedGroupName, Membership, ReportedGroups, UserGroups},
        mail::EpochChange,
        ports::{
            AccountTransfer, CreateUserOutcome, GroupAdministration, GroupChanges, GroupRemoval, Groups, Identities,
            MemberOutcome, NewIdentity, Outbox, OutboxTask, OwnAccounts, PutGroupOutcome, Replication, Sessions,
            UnlinkOutcome, UnlinkRequest, UserAdministration, UserDeletion, Users,
        },
        session::{Amr, NewSession, OpenOutcome, Profile, SessionId},
        user::{Epoch, UserId},
    },
    store::postgres::{DeleteOutcome, OwnershipClaim},
};
use latchkey_tests::proxy::Proxy;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use uuid::Uuid;

use super::{Fixture, REQUESTED_AT, a_new_user, a_user_id, an_event, assert_unavailable, faults::stores_via, now};

const GROUPS_LIMIT: usize = 10_000;
const MEMBERSHIPS_LIMIT: usize = 500;

fn group(name: &str) -> ManagedGroupName {
    ManagedGroupName::parse(name).unwrap()
}

fn provider() -> ProviderName {
    "corp".parse().unwrap()
}

async fn create_user(fixture: &Fixture, email: &str) -> UserId {
    let user = a_new_user(email);
    let id = user.id;
    assert_eq!(fixture.stores.create_user(&fixture.app, user, None).await.unwrap(), CreateUserOutcome::Created);
    id
}

async fn create_group(fixture: &Fixture, name: &str) {
    let outcome = fixture.stores.put_group(&fixture.app, &group(name), None, REQUESTED_AT).await.unwrap();
    assert_eq!(outcome, PutGroupOutcome::Done);
}

async fn add(fixture: &Fixture, name: &str, user: UserId) -> MemberOutcome {
    let event = an_event(EventKind::GroupMemberAdded, user);
    fixture.stores.add_member(&fixture.app, &group(name), user, event).await.unwrap()
}

async fn remove(fixture: &Fixture, name: &str, user: UserId) -> MemberOutcome {
    let event = an_event(EventKind::GroupMemberRemoved, user);
    fixture.stores.remove_member(&fixture.app, &group(name), user, event).await.unwrap()
}

#[track_caller]
fn expect_changed(outcome: MemberOutcome) -> GroupsChange {
    match outcome {
        MemberOutcome::Changed(change) => change,
        other => panic!("{other:?}"),
    }
}

/// Reports these groups at a login with the Provider `corp`.
async fn report(fixture: &Fixture, user: UserId, names: &[&str]) -> Option<GroupsChange> {
    let names: BTreeSet<GroupName> = names.iter().map(|name| name.parse().unwrap()).collect();
    let reported = ReportedGroups { user, provider: provider(), names: names.into_iter().collect() };
    let event = an_event(EventKind::GroupMemberAdded, user);
    fixture.stores.replace_reported_groups(&fixture.app, reported, event).await.unwrap()
}

/// The names of the memberships, each once.
fn membership_names(memberships: &[Membership]) -> Vec<&str> {
    let mut names: Vec<&str> = memberships.iter().map(|membership| membership.name.as_str()).collect();
    names.dedup();
    names
}

async fn group_names(fixture: &Fixture, user: UserId) -> Vec<String> {
    let groups = fixture.stores.of_user(&fixture.app, user).await.unwrap();
    groups.iter().map(|group| group.name.as_str().to_owned()).collect()
}

/// The name and the source of each membership.
async fn memberships(fixture: &Fixture, user: UserId) -> Vec<(String, String)> {
    let found = fixture.stores.memberships(&fixture.app, user).await.unwrap().expect("the user exists");
    found.into_iter().map(|membership| (membership.name.as_str().to_owned(), membership.source)).collect()
}

/// Opens a session, so that Redis has the profile of the user.
async fn open_session(fixture: &Fixture, user: UserId) {
    let session = NewSession {
        kind: None,
        id: SessionId(Uuid::from_u128(rand::random())),
        user,
        epoch: Epoch(1),
        profile: Profile { version: 1, email: None, email_verified: false, name: "Ada".to_owned() },
        amr: Amr::Password,
        auth_time: now(),
        ip: "192.0.2.1".to_owned(),
        user_agent: None,
        ends_at: now() + time::Duration::days(1),
        idle_seconds: 3600,
    };
    assert_eq!(fixture.stores.open_session(&fixture.app, &session).await.unwrap(), OpenOutcome::Opened);
}

/// The kind, the user and the detail of each event about a membership.
async fn events(fixture: &Fixture) -> Vec<(String, Uuid, Value)> {
    let mut connection = fixture.database.connect().await.unwrap();
    sqlx::query_as(
        "SELECT kind, user_id, detail FROM audit_events WHERE app_id = $1 AND kind LIKE 'group_member_%'
         ORDER BY kind, detail->>'group', user_id",
    )
    .bind(fixture.app.as_str())
    .fetch_all(&mut connection)
    .await
    .unwrap()
}

/// The users of the outbox rows that propagate groups. Claims all rows, also those that are not due yet.
async fn propagated_users(fixture: &Fixture) -> Vec<UserId> {
    fixture.execute("UPDATE outbox SET due_at = now() - interval '1 s', lease_until = NULL").await;
    let rows = fixture.stores.claim(100, 100, Duration::from_secs(60)).await.unwrap();
    let users = rows.iter().filter_map(|row| match &row.task {
        OutboxTask::PropagateGroups(user) => Some(*user),
        _ => None,
    });
    users.collect()
}

/// A checksum of all rows that a change to groups can write.
async fn digest(fixture: &Fixture) -> i64 {
    fixture
        .count(
            "SELECT (SELECT coalesce(sum(hashtext(users::text)), 0) FROM users)
                + (SELECT coalesce(sum(hashtext(groups::text)), 0) FROM groups)
                + (SELECT coalesce(sum(hashtext(group_members::text)), 0) FROM group_members)
                + (SELECT coalesce(sum(hashtext(outbox::text)), 0) FROM outbox)
                + (SELECT coalesce(sum(hashtext(audit_events::text)), 0) FROM audit_events)",
        )
        .await
}

#[tokio::test]
async fn a_group_is_created_once_and_its_title_can_change() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    let title = GroupTitle::parse("Platform").unwrap();
    for (title, expected) in [(None, None), (Some(&title), Some("Platform")), (None, None)] {
        let outcome = stores.put_group(app, &group("team"), title, REQUESTED_AT).await.unwrap();
        assert_eq!(outcome, PutGroupOutcome::Done);
        let page = stores.groups(app, None, 10).await.unwrap();
        let [found] = &page.groups[..] else { panic!("{page:?}") };
        assert_eq!((found.name.as_str(), found.title.as_deref()), ("team", expected));
        assert_eq!((found.created_at, &page.next), (REQUESTED_AT, &None));
        let before = digest(&fixture).await;
        stores.put_group(app, &group("team"), title, now()).await.unwrap();
        assert_eq!(digest(&fixture).await, before, "nothing is written if nothing changes");
    }
}

#[tokio::test]
async fn pages_of_groups_are_sorted_by_bytes() {
    let fixture = Fixture::new().await;
    let expected = ["0", "A", "Z:1", "a", "a.b", "a:b", "ab", "b"];
    for name in ["b", "ab", "a:b", "a", "A", "Z:1", "a.b", "0"] {
        create_group(&fixture, name).await;
    }
    for limit in [1, 3, 8, 500] {
        let (mut names, mut after) = (Vec::new(), None::<GroupName>);
        loop {
            let page = fixture.stores.groups(&fixture.app, after.as_ref(), limit).await.unwrap();
            assert!(page.next.is_none() || page.groups.len() == usize::from(limit));
            names.extend(page.groups.into_iter().map(|group| group.name.as_str().to_owned()));
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        assert_eq!(names, expected, "{limit} per page");
    }
}

#[tokio::test]
async fn a_member_is_added_and_removed_with_one_event_and_one_version_each() {
    let fixture = Fixture::new().await;
    let user = create_user(&fixture, "ada@example.com").await;
    create_group(&fixture, "team").await;
    let version = "SELECT version FROM users";
    let before = fixture.count(version).await;

    let added = expect_changed(add(&fixture, "team", user).await);
    assert_eq!(
        (added.user, added.groups.version, membership_names(&added.groups.memberships)),
        (user, 1, vec!["team"])
    );
    assert_eq!(memberships(&fixture, user).await, [("team".to_owned(), String::new())]);
    assert_eq!(propagated_users(&fixture).await, [user]);
    fixture.stores.remove_groups_rows(&fixture.app, &[added.outbox_row]).await.unwrap();
    assert_eq!(fixture.count("SELECT count(*) FROM outbox").await, 0);
    let unchanged = digest(&fixture).await;
    assert_eq!(add(&fixture, "team", user).await, MemberOutcome::Unchanged);
    assert_eq!(digest(&fixture).await, unchanged);

    let removed = expect_changed(remove(&fixture, "team", user).await);
    assert_eq!((removed.groups.version, removed.groups.memberships.len()), (2, 0));
    assert_eq!(remove(&fixture, "team", user).await, MemberOutcome::Unchanged);
    let detail = json!({ "group": "team" });
    let expected = [
        ("group_member_added".to_owned(), user.0, detail.clone()),
        ("group_member_removed".to_owned(), user.0, detail),
    ];
    assert_eq!(events(&fixture).await, expected);
    assert_eq!(fixture.count(version).await, before, "groups are not part of the user's version");
}

#[tokio::test]
async fn calls_about_unknown_groups_or_users_change_nothing() {
    let fixture = Fixture::new().await;
    let user = create_user(&fixture, "ada@example.com").await;
    create_group(&fixture, "team").await;
    let before = digest(&fixture).await;
    assert_eq!(add(&fixture, "other", user).await, MemberOutcome::GroupNotFound);
    assert_eq!(remove(&fixture, "other", user).await, MemberOutcome::GroupNotFound);
    assert_eq!(add(&fixture, "team", a_user_id()).await, MemberOutcome::UserNotFound);
    assert_eq!(remove(&fixture, "team", a_user_id()).await, MemberOutcome::UserNotFound);
    let (stores, app) = (&fixture.stores, &fixture.app);
    assert!(stores.group_members(app, &group("other"), None, 10).await.unwrap().is_none());
    assert!(stores.memberships(app, a_user_id()).await.unwrap().is_none());
    let event = an_event(EventKind::GroupMemberRemoved, user);
    assert_eq!(stores.remove_group(app, &group("other"), event).await.unwrap(), GroupRemoval::NotFound);
    assert_eq!(digest(&fixture).await, before);
}

#[tokio::test]
async fn the_members_of_a_group_are_listed_by_user_and_source() {
    let fixture = Fixture::new().await;
    create_group(&fixture, "team").await;
    let mut expected = Vec::new();
    for number in 0..7 {
        let user = create_user(&fixture, &format!("u{number}@example.com")).await;
        expect_changed(add(&fixture, "team", user).await);
        expected.push((user, String::new()));
        if number % 2 == 0 {
            report(&fixture, user, &["team", "other"]).await.unwrap();
            expected.push((user, "corp".to_owned()));
        }
    }
    expected.sort();
    for limit in [1, 2, 500] {
        let (mut found, mut after) = (Vec::new(), None);
        loop {
            let page = fixture.stores.group_members(&fixture.app, &group("team"), after.as_ref(), limit).await;
            let page = page.unwrap().expect("the group exists");
            assert!(page.members.len() <= usize::from(limit));
            found.extend(page.members.into_iter().map(|member| (member.user, member.source)));
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        assert_eq!(found, expected, "{limit} per page");
    }
}

#[tokio::test]
async fn an_app_never_has_more_than_ten_thousand_groups() {
    let fixture = Fixture::new().await;
    fixture
        .execute(&format!(
            "INSERT INTO groups (app_id, name, created_at)
             SELECT '{}', 'g' || number, now() FROM generate_series(1, {}) AS number",
            fixture.app,
            GROUPS_LIMIT - 3
        ))
        .await;
    let mut tasks = JoinSet::new();
    for number in 0..8 {
        let (stores, app) = (fixture.another_server().await, fixture.app.clone());
        tasks.spawn(async move {
            let name = group(&format!("new-{number}"));
            // Changes to a title are not limited.
            assert_eq!(stores.put_group(&app, &group("g1"), None, now()).await.unwrap(), PutGroupOutcome::Done);
            stores.put_group(&app, &name, None, now()).await.unwrap()
        });
    }
    let outcomes = tasks.join_all().await;
    assert_eq!(outcomes.iter().filter(|outcome| **outcome == PutGroupOutcome::Done).count(), 3);
    assert_eq!(fixture.count("SELECT count(*) FROM groups").await, i64::try_from(GROUPS_LIMIT).unwrap());
    let title = GroupTitle::parse("Title").unwrap();
    let existing = fixture.stores.put_group(&fixture.app, &group("g1"), Some(&title), now()).await.unwrap();
    assert_eq!(existing, PutGroupOutcome::Done);
    let other_app = fixture.stores.put_group(&super::an_app(), &group("team"), None, now()).await.unwrap();
    assert_eq!(other_app, PutGroupOutcome::Done, "each App has its own limit");
}

#[tokio::test]
async fn a_user_is_never_in_more_than_five_hundred_groups() {
    let fixture = Fixture::new().await;
    let user = create_user(&fixture, "ada@example.com").await;
    fixture
        .execute(&format!(
            "INSERT INTO group_members (app_id, user_id, name, source, created_at)
             SELECT '{}', '{user}', 'g' || number, CASE WHEN number % 2 = 0 THEN 'other' ELSE '' END, now()
             FROM generate_series(1, {}) AS number",
            fixture.app,
            MEMBERSHIPS_LIMIT - 2
        ))
        .await;
    for number in 0..8 {
        create_group(&fixture, &format!("new-{number}")).await;
    }
    let mut tasks = JoinSet::new();
    for number in 0..8 {
        let (stores, app) = (fixture.another_server().await, fixture.app.clone());
        tasks.spawn(async move {
            let event = an_event(EventKind::GroupMemberAdded, user);
            stores.add_member(&app, &group(&format!("new-{number}")), user, event).await.unwrap()
        });
    }
    let outcomes = tasks.join_all().await;
    assert_eq!(outcomes.iter().filter(|outcome| matches!(outcome, MemberOutcome::Changed(_))).count(), 2);
    assert_eq!(outcomes.iter().filter(|outcome| **outcome == MemberOutcome::TooMany).count(), 6);
    assert_eq!(fixture.count("SELECT count(*) FROM group_members").await, i64::try_from(MEMBERSHIPS_LIMIT).unwrap());
    assert_eq!(fixture.count("SELECT groups_version FROM users").await, 2);
    assert!(report(&fixture, user, &["corp:one"]).await.is_none(), "there is no room for a group of a provider");
}

#[tokio::test]
async fn a_group_is_deleted_with_its_members_in_batches() {
    let fixture = Fixture::new().await;
    create_group(&fixture, "big").await;
    create_group(&fixture, "small").await;
    fixture
        .execute(&format!(
            "INSERT INTO users (app_id, id, name, created_at, updated_at)
             SELECT '{0}', gen_random_uuid(), '', now(), now() FROM generate_series(1, 450);
             INSERT INTO group_members (app_id, user_id, name, source, created_at)
             SELECT '{0}', id, group_name, '', now() FROM users, unnest(ARRAY['big', 'small']) AS added (group_name)",
            fixture.app
        ))
        .await;
    let mut batches = Vec::new();
    loop {
        let event = an_event(EventKind::GroupMemberRemoved, a_user_id());
        match fixture.stores.remove_group(&fixture.app, &group("big"), event).await.unwrap() {
            GroupRemoval::Partial(changes) => batches.push(changes),
            GroupRemoval::Removed(changes) => {
                batches.push(changes);
                break;
            }
            GroupRemoval::NotFound => panic!("the group exists until it is deleted"),
        }
    }
    assert!(batches.len() > 1, "no transaction locks all users");
    let users: BTreeSet<UserId> = batches.iter().flatten().map(|change| change.user).collect();
    assert_eq!(users.len(), 450);
    for change in batches.iter().flatten() {
        assert_eq!((change.groups.version, membership_names(&change.groups.memberships)), (1, vec!["small"]));
    }
    assert_eq!(fixture.count("SELECT count(*) FROM group_members WHERE name = 'big'").await, 0);
    assert_eq!(fixture.count("SELECT count(*) FROM outbox WHERE kind = 'groups'").await, 450);
    let events = events(&fixture).await;
    let recorded: BTreeSet<UserId> = events.iter().map(|(_, user, _)| UserId(*user)).collect();
    assert_eq!((events.len(), recorded), (450, users));
    let page = fixture.stores.groups(&fixture.app, None, 10).await.unwrap();
    assert_eq!(page.groups.iter().map(|group| group.name.as_str()).collect::<Vec<_>>(), ["small"]);
}

#[tokio::test]
async fn no_member_is_added_during_the_deletion_of_a_group() {
    for round in 0..5 {
        let fixture = Fixture::new().await;
        create_group(&fixture, "team").await;
        let mut tasks = JoinSet::new();
        for number in 0..8 {
            let user = create_user(&fixture, &format!("u{number}@example.com")).await;
            let (stores, app) = (fixture.stores.clone(), fixture.app.clone());
            tasks.spawn(async move {
                if number == 4 {
                    loop {
                        let event = an_event(EventKind::GroupMemberRemoved, user);
                        match stores.remove_group(&app, &group("team"), event).await.unwrap() {
                            GroupRemoval::Partial(_) => {}
                            GroupRemoval::Removed(_) => return,
                            GroupRemoval::NotFound => panic!("nobody else deletes the group"),
                        }
                    }
                }
                let event = an_event(EventKind::GroupMemberAdded, user);
                let outcome = stores.add_member(&app, &group("team"), user, event).await.unwrap();
                assert!(matches!(outcome, MemberOutcome::Changed(_) | MemberOutcome::GroupNotFound), "{outcome:?}");
            });
        }
        tasks.join_all().await;
        assert_eq!(fixture.count("SELECT count(*) FROM groups").await, 0, "round {round}");
        assert_eq!(fixture.count("SELECT count(*) FROM group_members").await, 0, "round {round}");
    }
}

#[tokio::test]
async fn groups_are_read_from_redis_and_older_groups_never_replace_newer_ones() {
    let fixture = Fixture::new().await;
    let user = create_user(&fixture, "ada@example.com").await;
    create_group(&fixture, "team").await;
    open_session(&fixture, user).await;
    assert!(group_names(&fixture, user).await.is_empty());
    let GroupsChange { groups: first, .. } = expect_changed(add(&fixture, "team", user).await);
    assert!(group_names(&fixture, user).await.is_empty(), "Redis has the groups of before the change");
    let (stores, app) = (&fixture.stores, &fixture.app);
    assert_eq!(stores.store_groups(app, user, &first).await.unwrap(), Replication::Complete);
    assert_eq!(group_names(&fixture, user).await, ["team"]);
    assert_eq!(stores.current_groups(app, user).await.unwrap(), Some(first.clone()));

    let old = Membership { name: "old".parse().unwrap(), source: String::new() };
    let older = UserGroups { version: 0, memberships: first.memberships.iter().cloned().chain([old]).collect() };
    stores.store_groups(app, user, &older).await.unwrap();
    assert_eq!(group_names(&fixture, user).await, ["team"]);

    // Without Postgres, the groups are still known.
    let proxy = Proxy::start(fixture.database.addr).unwrap();
    let without_postgres = stores_via(&fixture, &proxy);
    proxy.refuse().await;
    assert_eq!(membership_names(&without_postgres.of_user(app, user).await.unwrap()), ["team"]);
    let stranger = create_user(&fixture, "grace@example.com").await;
    assert_unavailable(without_postgres.of_user(app, stranger).await);
    assert!(group_names(&fixture, stranger).await.is_empty());
    assert!(without_postgres.of_user(app, stranger).await.unwrap().is_empty(), "they were read in the meantime");
}

/// A request reads the groups in Postgres, then they change, and then the request writes what it has read to Redis.
#[tokio::test]
async fn a_slow_reader_does_not_bring_back_former_groups_of_a_user_without_a_session() {
    let fixture = Fixture::new().await;
    let user = create_user(&fixture, "ada@example.com").await;
    create_group(&fixture, "team").await;
    expect_changed(add(&fixture, "team", user).await);
    let (stores, app) = (&fixture.stores, &fixture.app);
    let read = stores.current_groups(app, user).await.unwrap().unwrap();
    let removed = expect_changed(remove(&fixture, "team", user).await);
    stores.store_groups(app, user, &removed.groups).await.unwrap();
    stores.store_groups(app, user, &read).await.unwrap();
    assert!(group_names(&fixture, user).await.is_empty());
    // A session that is opened later does not bring back the former groups, either.
    open_session(&fixture, user).await;
    assert!(group_names(&fixture, user).await.is_empty());
    expect_changed(add(&fixture, "team", user).await);
    assert!(group_names(&fixture, user).await.is_empty(), "Redis has groups");
}

#[tokio::test]
async fn a_deleted_user_leaves_no_groups() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    create_group(&fixture, "team").await;
    let user = create_user(&fixture, "ada@example.com").await;
    open_session(&fixture, user).await;
    let change = expect_changed(add(&fixture, "team", user).await);
    stores.store_groups(app, user, &change.groups).await.unwrap();
    fixture.execute("UPDATE users SET email_verified_at = now()").await;
    let deletion = UserDeletion { user, epoch: Epoch(1), event: an_event(EventKind::UserDeleted, user) };
    let epoch = stores.delete_user(app, deletion).await.unwrap().expect("the user is deleted");
    assert_eq!(fixture.count("SELECT count(*) FROM group_members").await, 0);
    assert!(propagated_users(&fixture).await.is_empty(), "the rows of the user are deleted");
    stores.raise_epoch(app, &EpochChange { user, epoch, kept_session: None }, None).await.unwrap();
    assert!(group_names(&fixture, user).await.is_empty());
    // A request that has read the groups before the deletion does not bring them back.
    stores.store_groups(app, user, &change.groups).await.unwrap();
    assert!(group_names(&fixture, user).await.is_empty());
}

#[tokio::test]
async fn a_deleted_app_leaves_no_groups() {
    let fixture = Fixture::new().await;
    let claim = OwnershipClaim {
        app: fixture.app.clone(),
        namespace: "shop".to_owned(),
        incarnation: Some("i1".to_owned()),
        handover: 0,
    };
    fixture.stores.postgres.claim_apps(std::slice::from_ref(&claim)).await.unwrap();
    for number in 0..7 {
        create_group(&fixture, &format!("team-{number}")).await;
    }
    for number in 0..5 {
        let user = create_user(&fixture, &format!("u{number}@example.com")).await;
        expect_changed(add(&fixture, "team-1", user).await);
        report(&fixture, user, &["corp:staff"]).await.unwrap();
    }
    let other = super::an_app();
    fixture.stores.put_group(&other, &group("team"), None, now()).await.unwrap();
    let mut batches = 0;
    while fixture.stores.delete_users(&claim, 2, || true).await.unwrap() != DeleteOutcome::Done {
        batches += 1;
    }
    assert!(batches >= 4, "a batch deletes at most two groups");
    assert_eq!(fixture.count("SELECT count(*) FROM group_members").await, 0);
    let left = format!("SELECT count(*) FROM groups WHERE app_id = '{}'", fixture.app);
    assert_eq!(fixture.count(&left).await, 0);
    assert_eq!(fixture.count("SELECT count(*) FROM groups").await, 1, "the group of the other App");
    let refused = fixture.stores.put_group(&fixture.app, &group("late"), None, now()).await;
    assert_unavailable(refused);
    assert_eq!(fixture.count(&left).await, 0);
}

#[tokio::test]
async fn a_login_replaces_the_groups_of_its_provider_only() {
    let fixture = Fixture::new().await;
    let user = create_user(&fixture, "ada@example.com").await;
    create_group(&fixture, "team").await;
    expect_changed(add(&fixture, "team", user).await);
    let first = report(&fixture, user, &["corp:a", "corp:b", "team"]).await.unwrap();
    assert_eq!(membership_names(&first.groups.memberships), ["corp:a", "corp:b", "team"]);
    let sources: Vec<&str> = first.groups.memberships.iter().map(|membership| membership.source.as_str()).collect();
    assert_eq!(sources, ["corp", "corp", "", "corp"], "a membership keeps its source");
    fixture.stores.store_groups(&fixture.app, user, &first.groups).await.unwrap();
    assert_eq!(fixture.stores.of_user(&fixture.app, user).await.unwrap(), first.groups.memberships);
    assert_eq!(first.groups.version, 2, "one version for the whole login");
    let before = digest(&fixture).await;
    assert!(report(&fixture, user, &["team", "corp:b", "corp:a"]).await.is_none());
    assert_eq!(digest(&fixture).await, before, "the same groups write nothing");

    let second = report(&fixture, user, &["corp:b", "corp:c"]).await.unwrap();
    assert_eq!(membership_names(&second.groups.memberships), ["corp:b", "corp:c", "team"]);
    let expected = [("corp:b", "corp"), ("corp:c", "corp"), ("team", "")];
    let expected = expected.map(|(name, source)| (name.to_owned(), source.to_owned()));
    assert_eq!(memberships(&fixture, user).await, expected);
    let last = report(&fixture, user, &[]).await.unwrap();
    assert_eq!(membership_names(&last.groups.memberships), ["team"]);
    assert!(report(&fixture, a_user_id(), &["corp:a"]).await.is_none(), "there is no such user");

    let of = |kind: &str, groups: &[&str]| -> Vec<(String, Uuid, Value)> {
        let detail = |group: &&str| json!({ "group": group, "provider": "corp" });
        groups.iter().map(|group| (kind.to_owned(), user.0, detail(group))).collect()
    };
    let mut events = events(&fixture).await;
    events.retain(|(_, _, detail)| detail.get("provider").is_some());
    let added = of("group_member_added", &["corp:a", "corp:b", "corp:c", "team"]);
    let removed = of("group_member_removed", &["corp:a", "corp:b", "corp:c", "team"]);
    assert_eq!(events, [added, removed].concat());
}

#[tokio::test]
async fn too_many_reported_groups_give_no_groups() {
    let fixture = Fixture::new().await;
    let user = create_user(&fixture, "ada@example.com").await;
    let names: Vec<String> = (0..MEMBERSHIPS_LIMIT).map(|number| format!("corp:{number}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    assert_eq!(report(&fixture, user, &names).await.unwrap().groups.memberships.len(), MEMBERSHIPS_LIMIT);
    let with_another: Vec<&str> = names.iter().copied().chain(["corp:more"]).collect();
    assert!(report(&fixture, user, &with_another).await.unwrap().groups.memberships.is_empty());
    let before = digest(&fixture).await;
    assert!(report(&fixture, user, &with_another).await.is_none());
    assert_eq!(digest(&fixture).await, before);
    create_group(&fixture, "team").await;
    expect_changed(add(&fixture, "team", user).await);
    assert!(report(&fixture, user, &names).await.is_none(), "groups of administrators count, too");
    assert_eq!(report(&fixture, user, &names[1..]).await.unwrap().groups.memberships.len(), MEMBERSHIPS_LIMIT);
}

#[tokio::test]
async fn concurrent_logins_leave_the_groups_of_one_of_them() {
    let fixture = Fixture::new().await;
    let user = create_user(&fixture, "ada@example.com").await;
    let mut tasks = JoinSet::new();
    for number in 0..8 {
        let (stores, app) = (fixture.stores.clone(), fixture.app.clone());
        tasks.spawn(async move {
            let names =
                [format!("corp:{number}"), format!("corp:{number}x")].map(|name| name.parse::<GroupName>().unwrap());
            let reported = ReportedGroups { user, provider: provider(), names: names.to_vec() };
            let event = an_event(EventKind::GroupMemberAdded, user);
            let change = stores.replace_reported_groups(&app, reported, event).await.unwrap();
            let change = change.expect("the groups differ from those of the other logins");
            stores.store_groups(&app, user, &change.groups).await.unwrap();
        });
    }
    tasks.join_all().await;
    let stored = fixture.stores.current_groups(&fixture.app, user).await.unwrap().unwrap();
    assert_eq!((stored.version, stored.memberships.len()), (8, 2));
    let first = stored.memberships[0].name.as_str();
    assert_eq!(stored.memberships[1].name.as_str(), format!("{first}x"));
    assert_eq!(group_names(&fixture, user).await, membership_names(&stored.memberships), "Redis has the last change");
}

fn an_identity(subject: &str) -> NewIdentity {
    NewIdentity {
        authority: "https://idp.example".to_owned(),
        subject: subject.to_owned(),
        provider: provider(),
        email: None,
        at: REQUESTED_AT,
    }
}

async fn link(fixture: &Fixture, user: UserId, subject: &str) {
    fixture
        .execute(&format!(
            "INSERT INTO identities (app_id, authority, subject, user_id, provider, linked_at)
             VALUES ('{}', 'https://idp.example', '{subject}', '{user}', 'corp', now())",
            fixture.app
        ))
        .await;
}

/// Asserts that the user has only the group `team`, and that a due outbox row propagates the change.
async fn assert_reported_groups_are_gone(fixture: &Fixture, user: UserId) {
    assert_eq!(memberships(fixture, user).await, [("team".to_owned(), String::new())]);
    let due = "SELECT count(*) FROM outbox WHERE kind = 'groups' AND due_at <= now()";
    assert!(fixture.count(due).await >= 1);
    let removed = ("group_member_removed".to_owned(), user.0, json!({ "group": "corp:staff", "provider": "corp" }));
    let events = events(fixture).await;
    assert!(events.contains(&removed), "{events:?}");
}

#[tokio::test]
async fn the_groups_of_a_provider_are_removed_with_the_identity() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    create_group(&fixture, "team").await;
    let mut users = Vec::new();
    for number in 0..3 {
        let user = create_user(&fixture, &format!("u{number}@example.com")).await;
        expect_changed(add(&fixture, "team", user).await);
        report(&fixture, user, &["corp:staff"]).await.unwrap();
        link(&fixture, user, &format!("{number}")).await;
        users.push(user);
    }
    let [unlinks, loses, transferred] = users[..] else { panic!("three users") };

    let event = an_event(EventKind::IdentityUnlinked, unlinks);
    let unlinking = UnlinkRequest { user: unlinks, provider: provider(), usable: Vec::new(), event };
    assert_eq!(stores.unlink_identity(app, unlinking).await.unwrap(), UnlinkOutcome::Done);
    assert_reported_groups_are_gone(&fixture, unlinks).await;

    let event = an_event(EventKind::IdentityUnlinked, loses);
    stores.remove_identities(app, loses, "corp", event).await.unwrap();
    assert_reported_groups_are_gone(&fixture, loses).await;

    // The email address of the account is not verified. The provider has verified the address for its user, so that
    // user gets the account.
    let transfer = AccountTransfer {
        user: transferred,
        epoch: Epoch(1),
        address: "u2@example.com".to_owned(),
        name: "Ada".to_owned(),
        identity: an_identity("new"),
        event: an_event(EventKind::IdentityLinked, transferred),
    };
    assert!(stores.transfer_account(app, transfer).await.unwrap().is_some());
    assert_reported_groups_are_gone(&fixture, transferred).await;
}
