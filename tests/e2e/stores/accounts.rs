//! Changes that users make to their own accounts. A change applies only if nothing has raised the user's epoch since
//! the user was read. Each change writes outbox rows.

use std::time::Duration;

use latchkey_server::domain::{
    audit::EventKind,
    mail::EpochChange,
    password::PasswordHash,
    ports::{
        AddressChange, AddressChangeRequest, ClaimedRow, CreateUserOutcome, NewUser, Outbox, OutboxTask, OwnAccounts,
        PasswordChange, Rename, Renamed, Sessions, UserDeletion, Users,
    },
    session::{Amr, Profile, Session, SessionId},
    user::{Epoch, Name, UserId},
};
use tokio::task::JoinSet;
use uuid::Uuid;

use super::{Fixture, REQUESTED_AT, a_new_user, an_email, an_event};

const CHANGED_AT: time::OffsetDateTime = time::macros::datetime!(2026-03-04 06:00:00 UTC);
const OWN_SESSION: SessionId = SessionId(Uuid::from_u128(7));

async fn create_user(fixture: &Fixture, email: &str) -> NewUser {
    let user = a_new_user(email);
    let creation = fixture.stores.create_user(&fixture.app, user.clone(), None).await.unwrap();
    assert_eq!(creation, CreateUserOutcome::Created);
    user
}

/// Creates a user with a verified email address, at epoch 1.
async fn create_verified_user(fixture: &Fixture, email: &str) -> UserId {
    let user = create_user(fixture, email).await;
    fixture.execute(&format!("UPDATE users SET email_verified_at = now() WHERE id = '{}'", user.id)).await;
    user.id
}

fn a_session(user: UserId, epoch: i64) -> Session {
    Session { id: OWN_SESSION, user, epoch: Epoch(epoch), generation: 1, amr: Amr::Password, auth_time: CHANGED_AT }
}

fn a_rename(user: UserId, epoch: i64) -> Rename {
    let event = an_event(EventKind::Renamed, user);
    Rename { user, epoch: Epoch(epoch), name: Name::parse("Grace Hopper").unwrap(), at: CHANGED_AT, event }
}

fn a_password_change(user: UserId, epoch: i64) -> PasswordChange {
    let event = an_event(EventKind::PasswordChanged, user);
    let password_hash = PasswordHash::new("$argon2id$second");
    PasswordChange { user, epoch: Epoch(epoch), password_hash, kept_session: OWN_SESSION, at: CHANGED_AT, event }
}

fn an_address_request(user: UserId, epoch: i64, address: &str) -> AddressChangeRequest {
    let event = an_event(EventKind::AddressChangeRequested, user);
    AddressChangeRequest {
        user,
        epoch: Epoch(epoch),
        address: an_email(address),
        is_mailed: true,
        at: CHANGED_AT,
        event,
    }
}

fn an_address_change(user: UserId, epoch: i64, address: &str) -> AddressChange {
    let event = an_event(EventKind::AddressChanged, user);
    AddressChange {
        user,
        epoch: Epoch(epoch),
        address: address.to_owned(),
        kept_session: OWN_SESSION,
        at: CHANGED_AT,
        event,
    }
}

fn a_user_deletion(user: UserId, epoch: i64) -> UserDeletion {
    UserDeletion { user, epoch: Epoch(epoch), event: an_event(EventKind::UserDeleted, user) }
}

/// Claims the outbox rows that are due now. Returns them sorted by kind.
async fn due_rows(fixture: &Fixture) -> Vec<ClaimedRow> {
    let mut rows = fixture.stores.claim(100, 100, Duration::from_secs(60)).await.unwrap();
    rows.sort_by_key(|row| match &row.task {
        OutboxTask::Mail(mail) | OutboxTask::MailToFormerAddress(mail, _) => mail.kind.as_str(),
        OutboxTask::PropagateEpoch(_) => "epoch",
        OutboxTask::PropagateProfile(_) => "profile",
        OutboxTask::PropagateGroups(_) => "groups",
    });
    rows
}

/// Makes all outbox rows due and claims them. A row that propagates a change is not due at first, because the request
/// that made the change tries to propagate it.
async fn all_rows(fixture: &Fixture) -> Vec<ClaimedRow> {
    fixture.execute("UPDATE outbox SET due_at = now() - interval '1 s', lease_until = NULL").await;
    due_rows(fixture).await
}

fn row_kinds(rows: &[ClaimedRow]) -> Vec<&str> {
    let kind = |row: &ClaimedRow| match &row.task {
        OutboxTask::Mail(mail) => mail.kind.as_str(),
        OutboxTask::MailToFormerAddress(..) => "to-former",
        OutboxTask::PropagateEpoch(_) => "epoch",
        OutboxTask::PropagateProfile(_) => "profile",
        OutboxTask::PropagateGroups(_) => "groups",
    };
    rows.iter().map(kind).collect()
}

#[tokio::test]
async fn a_session_is_valid_at_its_epoch_or_if_a_pending_epoch_change_keeps_it() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    let user = create_verified_user(&fixture, "ada@example.com").await;
    let is_valid = async |session: &Session| stores.user_of_session(app, session).await.unwrap().is_some();
    assert!(is_valid(&a_session(user, 1)).await);
    assert!(!is_valid(&a_session(user, 2)).await);
    stores.set_password(app, a_password_change(user, 1)).await.unwrap().unwrap();
    assert!(is_valid(&a_session(user, 1)).await, "the outbox row names the session");
    assert!(is_valid(&a_session(user, 2)).await);
    let other_session = Session { id: SessionId(Uuid::from_u128(8)), ..a_session(user, 1) };
    assert!(!is_valid(&other_session).await);
    stores
        .remove_epoch_row(app, &EpochChange { user, epoch: Epoch(2), kept_session: Some(OWN_SESSION) })
        .await
        .unwrap();
    assert!(!is_valid(&a_session(user, 1)).await, "in Redis the session has the later epoch");
    fixture.execute("UPDATE users SET disabled_at = now()").await;
    assert!(!is_valid(&a_session(user, 2)).await);
}

#[tokio::test]
async fn a_rename_leaves_a_row_that_propagates_the_profile_if_the_request_does_not() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    // An unverified account can be renamed, too.
    let user = create_user(&fixture, "ada@example.com").await.id;
    let first_rename = stores.rename(app, a_rename(user, 1)).await.unwrap().unwrap();
    let Renamed { user: renamed, outbox_row } = stores.rename(app, a_rename(user, 1)).await.unwrap().unwrap();
    assert_eq!(
        (renamed.name.as_str(), renamed.updated_at, renamed.created_at),
        ("Grace Hopper", CHANGED_AT, REQUESTED_AT)
    );
    assert_eq!((first_rename.user.version, renamed.version, renamed.epoch), (2, 3, Epoch(1)));
    assert!(due_rows(&fixture).await.is_empty(), "the request propagates it first");
    stores.remove_profile_row(app, outbox_row).await.unwrap();
    let rows = all_rows(&fixture).await;
    let [ClaimedRow { task: OutboxTask::PropagateProfile(row_user), id, .. }] = rows.as_slice() else {
        panic!("{rows:?}")
    };
    assert_eq!((*row_user, *id), (user, first_rename.outbox_row), "each rename removes its own row");
}

#[tokio::test]
async fn no_change_applies_at_another_epoch_or_to_a_disabled_user_and_most_do_not_apply_to_an_unverified_user() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    let user = create_verified_user(&fixture, "ada@example.com").await;
    stores.request_address_change(app, an_address_request(user, 1, "new@example.com")).await.unwrap().unwrap();
    let users_checksum = async || fixture.count("SELECT sum(hashtext(users::text)) FROM users").await;
    let assert_nothing_applies = async |epoch: i64, is_unverified: bool| {
        if !is_unverified {
            assert!(stores.rename(app, a_rename(user, epoch)).await.unwrap().is_none());
            assert!(
                stores.change_address(app, an_address_change(user, epoch, "new@example.com")).await.unwrap().is_none()
            );
        }
        assert!(stores.set_password(app, a_password_change(user, epoch)).await.unwrap().is_none());
        assert!(
            stores
                .request_address_change(app, an_address_request(user, epoch, "b@example.com"))
                .await
                .unwrap()
                .is_none()
        );
        assert!(stores.delete_user(app, a_user_deletion(user, epoch)).await.unwrap().is_none());
    };
    for epoch in [0, 2] {
        let before = users_checksum().await;
        assert_nothing_applies(epoch, false).await;
        assert_eq!(users_checksum().await, before);
    }
    fixture.execute("UPDATE users SET disabled_at = created_at").await;
    let before = users_checksum().await;
    assert_nothing_applies(1, false).await;
    assert_eq!(users_checksum().await, before);
    fixture.execute("UPDATE users SET disabled_at = NULL, email_verified_at = NULL").await;
    let before = users_checksum().await;
    assert_nothing_applies(1, true).await;
    assert_eq!(users_checksum().await, before);
    assert_eq!(
        row_kinds(&all_rows(&fixture).await),
        ["address-changing", "confirm"],
        "only the rows of the address request"
    );
}

#[tokio::test]
async fn a_new_password_cancels_pending_changes_and_sends_a_notice() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    let user = create_verified_user(&fixture, "ada@example.com").await;
    stores.request_address_change(app, an_address_request(user, 1, "new@example.com")).await.unwrap().unwrap();
    fixture.execute(&format!("DELETE FROM outbox; UPDATE users SET password_session = '{OWN_SESSION}'")).await;
    let changed = stores.set_password(app, a_password_change(user, 1)).await.unwrap().unwrap();
    assert_eq!((changed.epoch, changed.version), (Epoch(2), 3));
    assert_eq!(changed.password_hash, Some(PasswordHash::new("$argon2id$second")));
    assert!(changed.pending_email.is_none() && changed.password_session.is_none());
    assert_eq!(row_kinds(&due_rows(&fixture).await), ["password-changed"]);
    let rows = all_rows(&fixture).await;
    let [ClaimedRow { task: OutboxTask::PropagateEpoch(epoch_change), .. }, _] = rows.as_slice() else {
        panic!("{rows:?}")
    };
    assert_eq!(*epoch_change, EpochChange { user, epoch: Epoch(2), kept_session: Some(OWN_SESSION) });

    // A pending address stays pending. The account has no other address, so there is no notice.
    fixture
        .execute(
            "DELETE FROM outbox;
             UPDATE users SET email = NULL, email_canonical = NULL, email_verified_at = NULL,
                pending_email = 'x@example.com', pending_email_canonical = 'x@example.com'",
        )
        .await;
    let changed = stores.set_password(app, a_password_change(user, 2)).await.unwrap().unwrap();
    assert!(changed.pending_email.is_some());
    assert_eq!(row_kinds(&all_rows(&fixture).await), ["epoch"]);
}

#[tokio::test]
async fn a_change_of_address_replaces_only_an_unverified_account() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    let user = create_verified_user(&fixture, "Ada@example.com").await;
    let other = create_user(&fixture, "new@example.com").await.id;
    stores.request_address_change(app, an_address_request(user, 1, "New@example.com")).await.unwrap().unwrap();
    fixture.execute(&format!("UPDATE users SET email_verified_at = now() WHERE id = '{other}'")).await;
    assert!(stores.change_address(app, an_address_change(user, 1, "new@example.com")).await.unwrap().is_none());
    assert!(stores.change_address(app, an_address_change(user, 1, "elsewhere@example.com")).await.unwrap().is_none());
    assert_eq!(fixture.count("SELECT count(*) FROM users").await, 2);
    fixture.execute(&format!("UPDATE users SET email_verified_at = NULL WHERE id = '{other}'")).await;
    fixture.execute("DELETE FROM outbox WHERE kind = 'confirm'").await;
    fixture
        .execute(&format!("INSERT INTO outbox (app_id, kind, user_id) VALUES ('{app}', 'confirm', '{other}')"))
        .await;

    let changed = stores.change_address(app, an_address_change(user, 1, "new@example.com")).await.unwrap().unwrap();
    assert_eq!(changed.removed, Some(EpochChange { user: other, epoch: Epoch(2), kept_session: None }));
    let user_now = changed.user;
    assert_eq!(user_now.email.as_ref().map(|email| email.as_str()), Some("New@example.com"), "as requested");
    assert!(user_now.email_verified && user_now.pending_email.is_none());
    assert_eq!((user_now.epoch, user_now.version), (Epoch(2), 3));
    assert!(stores.user(app, other).await.unwrap().is_none());

    let events = "SELECT count(*) FROM audit_events WHERE user_id = ";
    assert_eq!(fixture.count(&format!("{events} '{other}' AND kind = 'user_deleted'")).await, 1);
    assert_eq!(fixture.count(&format!("{events} '{user}' AND kind = 'address_changed'")).await, 1);
    let rows = all_rows(&fixture).await;
    assert_eq!(row_kinds(&rows), ["to-former", "address-changing", "epoch", "epoch"]);
    let OutboxTask::MailToFormerAddress(mail, former) = &rows[0].task else { panic!("{rows:?}") };
    assert_eq!(
        (mail.kind.as_str(), mail.recipient, former.as_str()),
        ("address-changed", Some(user), "Ada@example.com")
    );
    let mut epoch_changes: Vec<_> = rows
        .iter()
        .filter_map(|row| {
            if let OutboxTask::PropagateEpoch(epoch_change) = &row.task {
                Some((epoch_change.user, epoch_change.kept_session))
            } else {
                None
            }
        })
        .collect();
    epoch_changes.sort_by_key(|(_, kept_session)| kept_session.is_some());
    assert_eq!(epoch_changes, [(other, None), (user, Some(OWN_SESSION))]);
}

#[tokio::test]
async fn only_one_of_several_users_who_concurrently_change_to_the_same_address_gets_it() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    for round in 0..5 {
        let target = format!("prize{round}@example.com");
        let mut tasks = JoinSet::new();
        for index in 0..8 {
            let user = create_verified_user(&fixture, &format!("u{round}x{index}@example.com")).await;
            stores.request_address_change(app, an_address_request(user, 1, &target)).await.unwrap().unwrap();
            let (stores, app, target) = (stores.clone(), app.clone(), target.clone());
            tasks.spawn(async move {
                if index % 4 == 3 {
                    // Registers the email address. A later change of address takes it from this unverified account.
                    let user = a_new_user(&target);
                    stores.create_user(&app, user, None).await.unwrap();
                    return false;
                }
                stores.change_address(&app, an_address_change(user, 1, &target)).await.unwrap().is_some()
            });
        }
        let won = tasks.join_all().await;
        assert_eq!(won.iter().filter(|won| **won).count(), 1, "in round {round}");
        let owners =
            format!("SELECT count(*) FROM users WHERE email_canonical = '{target}' AND email_verified_at IS NOT NULL");
        assert_eq!(fixture.count(&owners).await, 1);
    }
}

#[tokio::test]
async fn swapping_addresses_does_not_deadlock() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    let users =
        [create_verified_user(&fixture, "a@example.com").await, create_verified_user(&fixture, "b@example.com").await];
    for (user, target) in users.iter().zip(["b@example.com", "a@example.com"]) {
        stores.request_address_change(app, an_address_request(*user, 1, target)).await.unwrap().unwrap();
    }
    let mut tasks = JoinSet::new();
    for _ in 0..4 {
        for (user, target) in users.iter().zip(["b@example.com", "a@example.com"]) {
            let (stores, app, change) = (stores.clone(), app.clone(), an_address_change(*user, 1, target));
            tasks.spawn(async move { stores.change_address(&app, change).await.unwrap().is_some() });
        }
    }
    assert!(tasks.join_all().await.iter().all(|changed| !changed), "both addresses have a verified owner");
}

#[tokio::test]
async fn a_deleted_user_leaves_one_row_that_ends_the_sessions() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    let user = create_verified_user(&fixture, "ada@example.com").await;
    let bystander = create_verified_user(&fixture, "eva@example.com").await;
    for user in [user, bystander] {
        fixture
            .execute(&format!(
                "INSERT INTO identities (app_id, authority, subject, user_id, provider, linked_at)
                 VALUES ('{app}', 'https://idp.example', '{user}', '{user}', 'idp', now());
                 INSERT INTO outbox (app_id, kind, user_id, dead_at) VALUES ('{app}', 'reset', '{user}', now());
                 INSERT INTO outbox (app_id, kind, user_id) VALUES ('{app}', 'reset', '{user}');
                 INSERT INTO outbox (app_id, kind, user_id, epoch) VALUES ('{app}', 'epoch', '{user}', 1)"
            ))
            .await;
    }
    assert_eq!(stores.delete_user(app, a_user_deletion(user, 1)).await.unwrap(), Some(Epoch(2)));
    assert_eq!(stores.delete_user(app, a_user_deletion(user, 1)).await.unwrap(), None);
    assert!(stores.user(app, user).await.unwrap().is_none());
    assert_eq!(fixture.count("SELECT count(*) FROM identities").await, 1);
    let rows = format!("SELECT count(*) FROM outbox WHERE user_id = '{user}'");
    assert_eq!(fixture.count(&rows).await, 1);
    let rows = format!("SELECT epoch FROM outbox WHERE user_id = '{user}' AND kind = 'epoch' AND keep_session IS NULL");
    assert_eq!(fixture.count(&rows).await, 2);
    assert_eq!(fixture.count("SELECT count(*) FROM outbox").await, 4);
    let events = "SELECT count(*) FROM audit_events WHERE kind = 'user_deleted'";
    assert_eq!(fixture.count(events).await, 1, "one event, which outlives the user");
}

#[tokio::test]
async fn the_profile_of_a_deleted_user_does_not_return() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    let user = create_verified_user(&fixture, "ada@example.com").await;
    let profile = |version| Profile { version, email: None, email_verified: false, name: "Ada".to_owned() };
    let epoch_change = |epoch| EpochChange { user, epoch: Epoch(epoch), kept_session: None };
    stores.raise_epoch(app, &epoch_change(2), Some(&profile(2))).await.unwrap();
    stores.raise_epoch(app, &epoch_change(3), None).await.unwrap();
    // An earlier rename and an earlier epoch change reach Redis only after the deletion.
    stores.store_profile(app, user, &profile(4)).await.unwrap();
    stores.raise_epoch(app, &epoch_change(2), Some(&profile(3))).await.unwrap();
    let mut redis = latchkey_tests::redis::Redis::shared().await.connect().await.unwrap();
    let key = format!("lk:{{{app}:{user}}}:user");
    let fields: Vec<String> = redis::cmd("HKEYS").arg(&key).query_async(&mut redis).await.unwrap();
    assert_eq!(fields, ["epoch"]);
}
