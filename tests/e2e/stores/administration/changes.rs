//! How administrators change users, end their sessions, send them mails, remove their identities, and delete them.

use latchkey_crds::types::AppId;
use latchkey_server::{
    domain::{
        administration::{AdminUser, UserState, Version},
        audit::{Event, EventKind},
        mail::{EpochChange, MailKind},
        ports::{
            ChangeOutcome, ChangedByAdministrator, IdentityRemoval, MailOutcome, NewAdministeredUser, Outbox,
            OwnAccounts, RemovalOutcome, UserAdministration, UserChange, UserConflict, Users,
        },
        user::{Epoch, Name, UserId},
    },
    store::Stores,
};
use serde_json::json;
use tokio::task::JoinSet;

use super::{
    CHANGED_AT, Fixture, a_change, a_new_user, a_user_id, an_event, an_external_id, an_identity, create, digest,
    events, metadata, outbox_kinds, read,
};
use crate::stores::{an_app, an_email};

async fn change(fixture: &Fixture, change: UserChange) -> ChangeOutcome {
    fixture.stores.change_user(&fixture.app, change).await.unwrap()
}

async fn expect_changed(fixture: &Fixture, of: UserChange) -> ChangedByAdministrator {
    match change(fixture, of).await {
        ChangeOutcome::Changed(changed) => *changed,
        other => panic!("{other:?}"),
    }
}

fn a_name(text: &str) -> Option<Name> {
    Some(Name::parse(text).unwrap())
}

/// The kind and the changed fields of the newest event.
async fn last_event(fixture: &Fixture) -> (String, serde_json::Value) {
    let mut connection = fixture.database.connect().await.unwrap();
    let (kind, fields): (String, Option<serde_json::Value>) = sqlx::query_as(
        "SELECT kind, detail->'fields' FROM audit_events WHERE app_id = $1 AND kind <> 'user_created' ORDER BY at DESC \
         LIMIT 1",
    )
    .bind(fixture.app.as_str())
    .fetch_one(&mut connection)
    .await
    .unwrap();
    (kind, fields.unwrap_or(json!(null)))
}

/// A change with an event that is newer than all earlier events.
fn a_later_change(user: UserId, seconds: i64) -> UserChange {
    let at = CHANGED_AT + time::Duration::seconds(seconds);
    let mut change = a_change(user);
    (change.at, change.event.at) = (at, at);
    change
}

#[tokio::test]
async fn a_change_writes_only_the_difference_and_its_event_names_the_changed_fields_in_order() {
    let fixture = Fixture::new().await;
    let user = create(&fixture, a_new_user("ada@example.com")).await;
    let of = UserChange {
        external_id: Some(Some(an_external_id("crm:1"))),
        metadata: Some(Some(metadata(json!({ "plan": "gold" })))),
        disabled: Some(false),
        email_verified: Some(true),
        name: Some(a_name("Grace Hopper")),
        ..a_change(user.id)
    };
    let ChangedByAdministrator { user: after, epoch_change, profile_row } = expect_changed(&fixture, of.clone()).await;
    assert_eq!(after.name, "Grace Hopper");
    assert_eq!(after.external_id, Some(an_external_id("crm:1")));
    assert_eq!(after.metadata, Some(metadata(json!({ "plan": "gold" }))));
    assert!(after.email_verified && !after.disabled);
    assert_eq!((after.version, after.epoch), (Version(2), Epoch(1)));
    assert!(epoch_change.is_none());
    assert_eq!(last_event(&fixture).await, ("user_changed".to_owned(), json!(["name", "metadata", "external_id"])));
    let row = profile_row.expect("the name is part of the profile");
    assert_eq!(outbox_kinds(&fixture).await, ["profile"]);
    fixture.stores.remove_profile_row(&fixture.app, row).await.unwrap();
    assert_eq!(fixture.count("SELECT count(*) FROM outbox").await, 0);

    // Repeats the change, which no longer makes a difference.
    let before = digest(&fixture).await;
    match change(&fixture, of).await {
        ChangeOutcome::Unchanged(user) => assert_eq!(user.version, Version(2)),
        other => panic!("{other:?}"),
    }
    assert!(matches!(change(&fixture, a_change(user.id)).await, ChangeOutcome::Unchanged(_)));
    assert_eq!(digest(&fixture).await, before);

    let of =
        UserChange { external_id: Some(None), metadata: Some(None), name: Some(None), ..a_later_change(user.id, 1) };
    let after = expect_changed(&fixture, of).await.user;
    assert_eq!((after.name.as_str(), after.external_id, after.metadata), ("", None, None));
    assert_eq!(last_event(&fixture).await, ("user_changed".to_owned(), json!(["name", "metadata", "external_id"])));
}

#[tokio::test]
async fn numbers_in_another_notation_do_not_change_metadata() {
    let fixture = Fixture::new().await;
    let new = NewAdministeredUser {
        metadata: Some(metadata(json!({ "a": 1e18, "b": 1.0 }))),
        ..a_new_user("ada@example.com")
    };
    let user = create(&fixture, new).await;
    let same = metadata(json!({ "b": 1, "a": 1e18 }));
    let of = UserChange { metadata: Some(Some(same)), ..a_change(user.id) };
    assert!(matches!(change(&fixture, of).await, ChangeOutcome::Unchanged(_)));
    let of = UserChange { metadata: Some(Some(metadata(json!({})))), ..a_change(user.id) };
    let after = expect_changed(&fixture, of).await;
    assert_eq!(after.user.metadata, Some(metadata(json!({}))));
    assert!(after.profile_row.is_none() && after.epoch_change.is_none(), "metadata are not part of the profile");
}

#[tokio::test]
async fn a_new_address_takes_effect_immediately_and_the_former_address_gets_a_notice() {
    let fixture = Fixture::new().await;
    let user = create(&fixture, a_new_user("ada@example.com")).await;
    fixture
        .execute("UPDATE users SET pending_email = 'p@example.com', pending_email_canonical = 'p@example.com'")
        .await;
    let of = UserChange { email: Some(an_email("Eva@example.com")), ..a_change(user.id) };
    let ChangedByAdministrator { user: after, epoch_change, profile_row } = expect_changed(&fixture, of).await;
    assert_eq!(after.email, Some(an_email("Eva@example.com")));
    assert!(!after.email_verified && after.pending_email.is_none());
    assert_eq!(after.state(), UserState::Unverified);
    assert_eq!(epoch_change, Some(EpochChange { user: user.id, epoch: Epoch(2), kept_session: None }));
    assert!(profile_row.is_none(), "the epoch row propagates the change");
    assert_eq!(last_event(&fixture).await.1, json!(["email", "email_verified"]));
    assert_eq!(outbox_kinds(&fixture).await, ["epoch", "to-former"]);
    fixture.execute("DELETE FROM outbox").await;

    // A verified address replaces an unverified address, so nobody gets a notice.
    let of = UserChange {
        email: Some(an_email("ida@example.com")),
        email_verified: Some(true),
        ..a_later_change(user.id, 1)
    };
    let after = expect_changed(&fixture, of).await;
    assert!(after.user.email_verified);
    assert_eq!(after.epoch_change.unwrap().epoch, Epoch(3));
    assert_eq!(outbox_kinds(&fixture).await, ["epoch"]);
    assert_eq!(last_event(&fixture).await.1, json!(["email", "email_verified"]));
}

#[tokio::test]
async fn another_spelling_of_the_address_keeps_the_verification_and_the_epoch() {
    let fixture = Fixture::new().await;
    let user = create(&fixture, a_new_user("ada@example.com")).await;
    fixture
        .execute("UPDATE users SET pending_email = 'p@example.com', pending_email_canonical = 'p@example.com'")
        .await;
    let of = UserChange { email: Some(an_email("Ada@Example.com")), ..a_change(user.id) };
    let ChangedByAdministrator { user: after, epoch_change, profile_row } = expect_changed(&fixture, of).await;
    assert_eq!(after.email.unwrap().as_str(), "Ada@Example.com");
    assert!(after.email_verified && after.pending_email.is_some());
    assert!(epoch_change.is_none() && profile_row.is_some());
    assert_eq!(last_event(&fixture).await.1, json!(["email"]));
    assert_eq!(outbox_kinds(&fixture).await, ["profile"]);
}

#[tokio::test]
async fn a_change_of_email_verified_raises_the_epoch() {
    let fixture = Fixture::new().await;
    let user = create(&fixture, a_new_user("ada@example.com")).await;
    for (verified, epoch) in [(false, 2), (true, 3)] {
        let of = UserChange { email_verified: Some(verified), ..a_later_change(user.id, epoch) };
        let after = expect_changed(&fixture, of).await;
        assert_eq!((after.user.email_verified, after.epoch_change.unwrap().epoch), (verified, Epoch(epoch)));
        assert_eq!(last_event(&fixture).await, ("user_changed".to_owned(), json!(["email_verified"])));
    }
    assert!(read(&fixture, user.id).await.password_hash.is_some());
}

#[tokio::test]
async fn verifying_a_contested_account_removes_its_password() {
    let fixture = Fixture::new().await;
    let new = NewAdministeredUser { email_verified: false, ..a_new_user("ada@example.com") };
    let user = create(&fixture, new).await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    let event = an_event(EventKind::RegisteredAgain, user.id);
    stores.record_repeated_registration(app, user.id, Epoch(1), true, None, event).await.unwrap();
    let contested = read(&fixture, user.id).await;
    assert_eq!((contested.state(), contested.version), (UserState::Contested, Version(2)));
    let event = an_event(EventKind::RegisteredAgain, user.id);
    stores.record_repeated_registration(app, user.id, Epoch(1), true, None, event).await.unwrap();
    assert_eq!(read(&fixture, user.id).await.version, Version(2), "the account is contested already");

    let of = UserChange { name: Some(None), ..a_later_change(user.id, 1) };
    let after = expect_changed(&fixture, of).await.user;
    assert!(after.contested && after.password_hash.is_some());
    let of = UserChange { email_verified: Some(true), ..a_later_change(user.id, 2) };
    let after = expect_changed(&fixture, of).await.user;
    assert!(!after.contested && after.password_hash.is_none() && after.email_verified);
}

#[tokio::test]
async fn disabling_raises_the_epoch_and_enabling_does_not() {
    let fixture = Fixture::new().await;
    let user = create(&fixture, a_new_user("ada@example.com")).await;
    let of = UserChange { disabled: Some(true), name: Some(None), ..a_later_change(user.id, 1) };
    let after = expect_changed(&fixture, of).await;
    assert!(after.user.disabled);
    assert_eq!(after.epoch_change, Some(EpochChange { user: user.id, epoch: Epoch(2), kept_session: None }));
    assert_eq!(last_event(&fixture).await, ("user_disabled".to_owned(), json!(["name", "disabled"])));
    let of = UserChange { disabled: Some(false), ..a_later_change(user.id, 2) };
    let after = expect_changed(&fixture, of).await;
    assert!(!after.user.disabled && after.epoch_change.is_none() && after.profile_row.is_none());
    assert_eq!(after.user.version, Version(3));
    assert_eq!(last_event(&fixture).await, ("user_enabled".to_owned(), json!(["disabled"])));
}

#[tokio::test]
async fn a_refused_change_writes_nothing() {
    let fixture = Fixture::new().await;
    let with_external_id =
        NewAdministeredUser { external_id: Some(an_external_id("crm:1")), ..a_new_user("eva@example.com") };
    let eva = create(&fixture, with_external_id).await.id;
    let without_address =
        NewAdministeredUser { email: None, identities: vec![an_identity("1")], ..a_new_user("x@example.com") };
    let ida = create(&fixture, without_address).await.id;
    let ada = create(&fixture, a_new_user("ada@example.com")).await.id;
    let before = digest(&fixture).await;
    let name = Some(a_name("Grace Hopper"));

    let of = UserChange { name: name.clone(), ..a_change(a_user_id()) };
    assert!(matches!(change(&fixture, of).await, ChangeOutcome::NotFound));
    let of = UserChange { name: name.clone(), if_version: Some(Version(2)), ..a_change(ada) };
    assert!(matches!(change(&fixture, of).await, ChangeOutcome::VersionConflict));
    let of = UserChange { name: name.clone(), email_verified: Some(true), ..a_change(ida) };
    assert!(matches!(change(&fixture, of).await, ChangeOutcome::NoAddress));
    let of = UserChange { name: name.clone(), email: Some(an_email("EVA@example.com")), ..a_change(ada) };
    match change(&fixture, of.clone()).await {
        ChangeOutcome::Conflict(conflict) => assert_eq!(conflict, UserConflict::EmailTaken(eva)),
        other => panic!("{other:?}"),
    }
    let of = UserChange { external_id: Some(Some(an_external_id("crm:1"))), ..of };
    match change(&fixture, of).await {
        ChangeOutcome::Conflict(conflict) => assert_eq!(conflict, UserConflict::ExternalIdTaken(eva)),
        other => panic!("{other:?}"),
    }
    let other_app = fixture.stores.change_user(&an_app(), UserChange { name: name.clone(), ..a_change(ada) }).await;
    assert!(matches!(other_app.unwrap(), ChangeOutcome::NotFound));
    assert_eq!(digest(&fixture).await, before);

    let of = UserChange { name, if_version: Some(Version(1)), ..a_change(ada) };
    expect_changed(&fixture, of).await;
}

#[tokio::test]
async fn only_one_of_several_concurrent_changes_to_the_same_version_applies() {
    let fixture = Fixture::new().await;
    let user = create(&fixture, a_new_user("ada@example.com")).await.id;
    let mut tasks = JoinSet::new();
    for number in 0..12 {
        let (stores, app) = (fixture.stores.clone(), fixture.app.clone());
        tasks.spawn(async move {
            let name = Some(a_name(&format!("Name {number}")));
            let of = UserChange { name, if_version: Some(Version(1)), ..a_change(user) };
            matches!(stores.change_user(&app, of).await.unwrap(), ChangeOutcome::Changed(_))
        });
    }
    let applied = tasks.join_all().await;
    assert_eq!(applied.iter().filter(|applied| **applied).count(), 1);
    assert_eq!(read(&fixture, user).await.version, Version(2));
    assert_eq!(fixture.count("SELECT count(*) FROM outbox").await, 1);
}

#[tokio::test]
async fn one_of_several_concurrent_changes_to_one_address_applies_and_the_others_name_the_user_who_got_it() {
    let fixture = Fixture::new().await;
    let mut tasks = JoinSet::new();
    for number in 0..8 {
        let user = create(&fixture, a_new_user(&format!("u{number}@example.com"))).await.id;
        let (stores, app) = (fixture.stores.clone(), fixture.app.clone());
        tasks.spawn(async move {
            let of = UserChange { email: Some(an_email("ada@example.com")), ..a_change(user) };
            match stores.change_user(&app, of).await.unwrap() {
                ChangeOutcome::Changed(changed) => Ok(changed.user.id),
                ChangeOutcome::Conflict(UserConflict::EmailTaken(owner)) => Err(owner),
                other => panic!("{other:?}"),
            }
        });
    }
    let (applied, refused): (Vec<_>, Vec<_>) = tasks.join_all().await.into_iter().partition(Result::is_ok);
    let [Ok(owner)] = applied.as_slice() else { panic!("{applied:?}") };
    assert!(refused.iter().all(|refused| *refused == Err(*owner)), "{refused:?}");
}

#[tokio::test]
async fn a_deletion_removes_the_user_the_identities_and_the_outbox_rows() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    let new = NewAdministeredUser { identities: vec![an_identity("1")], ..a_new_user("ada@example.com") };
    let user = create(&fixture, new).await.id;
    stores.enqueue(app, crate::stores::a_mail(Some(user))).await.unwrap();
    let before = digest(&fixture).await;
    let remove = async |app: &AppId, user: UserId, version: Option<i64>| {
        let event = an_event(EventKind::UserDeleted, user);
        stores.remove_user(app, user, version.map(Version), event).await.unwrap()
    };
    assert_eq!(remove(app, user, Some(2)).await, RemovalOutcome::VersionConflict);
    assert_eq!(remove(app, a_user_id(), None).await, RemovalOutcome::NotFound);
    assert_eq!(remove(&an_app(), user, None).await, RemovalOutcome::NotFound);
    assert_eq!(digest(&fixture).await, before);

    let removed = EpochChange { user, epoch: Epoch(2), kept_session: None };
    assert_eq!(remove(app, user, Some(1)).await, RemovalOutcome::Removed(removed));
    assert_eq!(fixture.count("SELECT count(*) FROM users").await, 0);
    assert_eq!(fixture.count("SELECT count(*) FROM identities").await, 0);
    assert_eq!(outbox_kinds(&fixture).await, ["epoch"]);
    assert_eq!(last_event(&fixture).await.0, "user_deleted");
    assert_eq!(remove(app, user, None).await, RemovalOutcome::NotFound);
    assert_eq!(remove(app, user, Some(1)).await, RemovalOutcome::NotFound);
}

#[tokio::test]
async fn a_deletion_during_changes_leaves_nothing_of_the_user() {
    async fn change_name(stores: &Stores, app: &AppId, user: UserId, number: usize) -> bool {
        let of = UserChange { name: Some(a_name(&format!("Name {number}"))), ..a_change(user) };
        match stores.change_user(app, of).await.unwrap() {
            ChangeOutcome::Changed(_) => true,
            ChangeOutcome::NotFound => false,
            other => panic!("{other:?}"),
        }
    }
    let fixture = Fixture::new().await;
    for round in 0..5 {
        let user = create(&fixture, a_new_user(&format!("u{round}@example.com"))).await.id;
        let mut tasks = JoinSet::new();
        for number in 0..8 {
            let (stores, app) = (fixture.stores.clone(), fixture.app.clone());
            tasks.spawn(async move {
                if number == 4 {
                    let event = an_event(EventKind::UserDeleted, user);
                    let outcome = stores.remove_user(&app, user, None, event).await.unwrap();
                    assert!(matches!(outcome, RemovalOutcome::Removed(_)), "{outcome:?}");
                    true
                } else {
                    change_name(&stores, &app, user, number).await
                }
            });
        }
        tasks.join_all().await;
        assert_eq!(fixture.count("SELECT count(*) FROM users").await, 0);
        assert_eq!(fixture.count("SELECT count(*) FROM outbox WHERE kind <> 'epoch'").await, 0);
    }
}

#[tokio::test]
async fn ending_all_sessions_raises_the_epoch() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    let user = create(&fixture, a_new_user("ada@example.com")).await.id;
    let event = |user| an_event(EventKind::SessionsEnded, user);
    let raised = stores.end_all_sessions(app, user, event(user)).await.unwrap();
    assert_eq!(raised, Some(EpochChange { user, epoch: Epoch(2), kept_session: None }));
    assert_eq!(outbox_kinds(&fixture).await, ["epoch"]);
    assert_eq!(last_event(&fixture).await.0, "sessions_ended");
    let after: AdminUser = read(&fixture, user).await;
    assert_eq!((after.epoch, after.version), (Epoch(2), Version(2)));
    let before = digest(&fixture).await;
    let unknown = a_user_id();
    assert_eq!(stores.end_all_sessions(app, unknown, event(unknown)).await.unwrap(), None);
    assert_eq!(digest(&fixture).await, before);
}

#[tokio::test]
async fn a_mail_is_queued_only_if_no_mail_of_the_same_kind_waits() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    let unverified = NewAdministeredUser { email_verified: false, ..a_new_user("ada@example.com") };
    let user = create(&fixture, unverified).await.id;
    let queue = async |user: UserId, kind: MailKind| {
        let event: Event = an_event(EventKind::MailRequested, user);
        stores.queue_mail(app, user, kind, event).await.unwrap()
    };
    assert_eq!(queue(user, MailKind::Reset).await, MailOutcome::Queued);
    assert_eq!(queue(user, MailKind::Reset).await, MailOutcome::Waiting);
    assert_eq!(queue(user, MailKind::Confirm).await, MailOutcome::Queued);
    assert_eq!(queue(a_user_id(), MailKind::Confirm).await, MailOutcome::NotFound);
    assert_eq!(outbox_kinds(&fixture).await, ["confirm", "reset"]);
    assert_eq!(queue(user, MailKind::Reset).await, MailOutcome::Waiting, "a server delivers it now");
    fixture.execute("UPDATE outbox SET lease_until = NULL, dead_at = now() WHERE kind = 'reset'").await;
    assert_eq!(queue(user, MailKind::Reset).await, MailOutcome::Queued, "a dead letter does not wait");
    let kinds: Vec<_> = events(&fixture).await.into_iter().map(|event| event.0).collect();
    assert_eq!(kinds.iter().filter(|kind| *kind == "mail_requested").count(), 3);
}

/// The use case reads the user without a lock, so the user can change before the mail is queued.
#[tokio::test]
async fn a_mail_is_not_queued_if_the_user_can_no_longer_get_it() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    let queue = async |user: UserId, kind: MailKind| {
        stores.queue_mail(app, user, kind, an_event(EventKind::MailRequested, user)).await.unwrap()
    };
    let without_password = NewAdministeredUser { password_hash: None, ..a_new_user("grace@example.com") };
    let without_address =
        NewAdministeredUser { email: None, identities: vec![an_identity("1")], ..a_new_user("unused@example.com") };
    let with_password = create(&fixture, a_new_user("ada@example.com")).await.id;
    let without_password = create(&fixture, without_password).await.id;
    let without_address = create(&fixture, without_address).await.id;
    let before = digest(&fixture).await;
    for (user, kind) in [
        (with_password, MailKind::Confirm),
        (with_password, MailKind::Invitation),
        (without_address, MailKind::Reset),
        (without_address, MailKind::Confirm),
    ] {
        assert_eq!(queue(user, kind).await, MailOutcome::NotPossible, "{kind:?}");
    }
    assert_eq!(digest(&fixture).await, before, "no mail and no event");
    assert_eq!(queue(without_password, MailKind::Invitation).await, MailOutcome::Queued);
    expect_changed(&fixture, UserChange { disabled: Some(true), ..a_change(without_password) }).await;
    let before = digest(&fixture).await;
    assert_eq!(queue(without_password, MailKind::Reset).await, MailOutcome::NotPossible);
    assert_eq!(digest(&fixture).await, before);
    // A pending address can be confirmed.
    fixture
        .execute(&format!(
            "UPDATE users SET pending_email = 'new@example.com', pending_email_canonical = 'new@example.com'
             WHERE id = '{with_password}'"
        ))
        .await;
    assert_eq!(queue(with_password, MailKind::Confirm).await, MailOutcome::Queued);
}

#[tokio::test]
async fn concurrent_requests_queue_one_mail() {
    let fixture = Fixture::new().await;
    let user = create(&fixture, a_new_user("ada@example.com")).await.id;
    let mut tasks = JoinSet::new();
    for _ in 0..12 {
        let (stores, app) = (fixture.stores.clone(), fixture.app.clone());
        tasks.spawn(async move {
            let event = an_event(EventKind::MailRequested, user);
            stores.queue_mail(&app, user, MailKind::Reset, event).await.unwrap()
        });
    }
    let outcomes = tasks.join_all().await;
    assert_eq!(outcomes.iter().filter(|outcome| **outcome == MailOutcome::Queued).count(), 1);
    assert_eq!(outbox_kinds(&fixture).await, ["reset"]);
}

#[tokio::test]
async fn the_last_identity_of_a_user_without_an_address_stays() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    let mut identities = vec![an_identity("1"), an_identity("2"), an_identity("3")];
    identities[2].provider = "google".parse().unwrap();
    let user = create(&fixture, NewAdministeredUser { email: None, identities, ..a_new_user("x@example.com") }).await;
    let with_address = NewAdministeredUser { identities: vec![an_identity("4")], ..a_new_user("ada@example.com") };
    let with_address = create(&fixture, with_address).await.id;
    let remove = async |user: UserId, provider: &str| {
        let event = an_event(EventKind::IdentityUnlinked, user);
        stores.remove_identities(app, user, provider, event).await.unwrap()
    };
    assert_eq!(remove(user.id, "idp").await, IdentityRemoval::Removed);
    let before = digest(&fixture).await;
    assert_eq!(remove(user.id, "google").await, IdentityRemoval::LastIdentity);
    assert_eq!(remove(user.id, "idp").await, IdentityRemoval::NotFound);
    assert_eq!(remove(a_user_id(), "idp").await, IdentityRemoval::NotFound);
    assert_eq!(digest(&fixture).await, before);
    let after = read(&fixture, user.id).await;
    assert_eq!((after.identities.len(), after.version), (1, Version(1)), "identities do not raise the version");
    assert_eq!(remove(with_address, "idp").await, IdentityRemoval::Removed);
    assert!(read(&fixture, with_address).await.identities.is_empty());
    let removed = events(&fixture).await.into_iter().filter(|event| event.0 == "identity_unlinked").count();
    assert_eq!(removed, 2);
}

#[tokio::test]
async fn concurrent_removals_leave_one_identity() {
    let fixture = Fixture::new().await;
    for round in 0..10 {
        let mut identities = vec![an_identity(&format!("{round}a")), an_identity(&format!("{round}b"))];
        identities[1].provider = "google".parse().unwrap();
        let new = NewAdministeredUser { email: None, identities, ..a_new_user("x@example.com") };
        let user = create(&fixture, new).await.id;
        let mut tasks = JoinSet::new();
        for provider in ["idp", "google"] {
            let (stores, app) = (fixture.stores.clone(), fixture.app.clone());
            tasks.spawn(async move {
                let event = an_event(EventKind::IdentityUnlinked, user);
                stores.remove_identities(&app, user, provider, event).await.unwrap()
            });
        }
        let outcomes = tasks.join_all().await;
        assert!(outcomes.contains(&IdentityRemoval::Removed), "{outcomes:?}");
        assert!(outcomes.contains(&IdentityRemoval::LastIdentity), "{outcomes:?}");
    }
}
