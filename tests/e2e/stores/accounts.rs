//! The own account: changes that hold only at the epoch they were judged at, and what each leaves in the outbox.

use std::time::Duration;

use latchkey_server::domain::{
    audit::EventKind,
    mail::EpochNews,
    password::PasswordHash,
    ports::{
        Accounts, AddressChange, AddressRequest, Claimed, Creation, NewPassword, NewUser, Outbox, Removal, Rename,
        Renamed, Sessions, Task, Users,
    },
    session::{Amr, Profile, Session, SessionId},
    user::{Epoch, Name, UserId},
};
use tokio::task::JoinSet;
use uuid::Uuid;

use super::{Fixture, REQUESTED, a_new_user, an_email, an_event};

const AT: time::OffsetDateTime = time::macros::datetime!(2026-03-04 06:00:00 UTC);
const OWN: SessionId = SessionId(Uuid::from_u128(7));

async fn created(fixture: &Fixture, email: &str) -> NewUser {
    let user = a_new_user(email);
    let creation = fixture.stores.create_user(&fixture.app, user.clone(), None).await.unwrap();
    assert_eq!(creation, Creation::Created);
    user
}

/// With a verified address, at the first epoch.
async fn verified(fixture: &Fixture, email: &str) -> UserId {
    let user = created(fixture, email).await;
    fixture.execute(&format!("UPDATE users SET email_verified_at = now() WHERE id = '{}'", user.id)).await;
    user.id
}

fn a_session(user: UserId, epoch: i64) -> Session {
    Session { id: OWN, user, epoch: Epoch(epoch), generation: 1, amr: Amr::Password, auth_time: AT }
}

fn a_rename(user: UserId, epoch: i64) -> Rename {
    let event = an_event(EventKind::Renamed, user);
    Rename { user, epoch: Epoch(epoch), name: Name::parse("Grace Hopper").unwrap(), at: AT, event }
}

fn a_password(user: UserId, epoch: i64) -> NewPassword {
    let event = an_event(EventKind::PasswordChanged, user);
    let password_hash = PasswordHash::new("$argon2id$second");
    NewPassword { user, epoch: Epoch(epoch), password_hash, keep: OWN, at: AT, event }
}

fn a_request(user: UserId, epoch: i64, address: &str) -> AddressRequest {
    let event = an_event(EventKind::AddressChangeRequested, user);
    AddressRequest { user, epoch: Epoch(epoch), address: an_email(address), mailed: true, at: AT, event }
}

fn a_change(user: UserId, epoch: i64, address: &str) -> AddressChange {
    let event = an_event(EventKind::AddressChanged, user);
    AddressChange { user, epoch: Epoch(epoch), address: address.to_owned(), keep: OWN, at: AT, event }
}

fn a_removal(user: UserId, epoch: i64) -> Removal {
    Removal { user, epoch: Epoch(epoch), event: an_event(EventKind::UserDeleted, user) }
}

/// What is due now, by kind.
async fn due(fixture: &Fixture) -> Vec<Claimed> {
    let mut rows = fixture.stores.claim(100, 100, Duration::from_secs(60)).await.unwrap();
    rows.sort_by_key(|row| match &row.task {
        Task::Mail(mail) | Task::MailToFormer(mail, _) => mail.kind.as_str(),
        Task::CarryEpoch(_) => "epoch",
        Task::CarryProfile(_) => "profile",
    });
    rows
}

/// The same once the request has had its time.
async fn queued(fixture: &Fixture) -> Vec<Claimed> {
    fixture.execute("UPDATE outbox SET due_at = now() - interval '1 s', lease_until = NULL").await;
    due(fixture).await
}

fn kinds(rows: &[Claimed]) -> Vec<&str> {
    let kind = |row: &Claimed| match &row.task {
        Task::Mail(mail) => mail.kind.as_str(),
        Task::MailToFormer(..) => "to-former",
        Task::CarryEpoch(_) => "epoch",
        Task::CarryProfile(_) => "profile",
    };
    rows.iter().map(kind).collect()
}

#[tokio::test]
async fn a_session_is_of_its_user_at_its_epoch_or_at_one_on_its_way_that_names_it() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    let user = verified(&fixture, "ada@example.com").await;
    let found = async |session: &Session| stores.user_of_session(app, session).await.unwrap().is_some();
    assert!(found(&a_session(user, 1)).await);
    assert!(!found(&a_session(user, 2)).await);
    stores.set_password(app, a_password(user, 1)).await.unwrap().unwrap();
    assert!(found(&a_session(user, 1)).await, "named by the row that is on its way");
    assert!(found(&a_session(user, 2)).await);
    let other = Session { id: SessionId(Uuid::from_u128(8)), ..a_session(user, 1) };
    assert!(!found(&other).await);
    stores.epoch_carried(app, &EpochNews { user, epoch: Epoch(2), keep: Some(OWN) }).await.unwrap();
    assert!(!found(&a_session(user, 1)).await, "Redis has it at the later epoch");
    fixture.execute("UPDATE users SET disabled_at = now()").await;
    assert!(!found(&a_session(user, 2)).await);
}

#[tokio::test]
async fn a_rename_leaves_a_row_that_carries_the_profile_where_the_request_does_not() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    // Unverified accounts may rename.
    let user = created(&fixture, "ada@example.com").await.id;
    let first = stores.rename(app, a_rename(user, 1)).await.unwrap().unwrap();
    let Renamed { user: renamed, row } = stores.rename(app, a_rename(user, 1)).await.unwrap().unwrap();
    assert_eq!((renamed.name.as_str(), renamed.updated_at, renamed.created_at), ("Grace Hopper", AT, REQUESTED));
    assert_eq!((first.user.version, renamed.version, renamed.epoch), (2, 3, Epoch(1)));
    assert!(due(&fixture).await.is_empty(), "the request carries it itself first");
    stores.profile_carried(app, row).await.unwrap();
    let rows = queued(&fixture).await;
    let [Claimed { task: Task::CarryProfile(carried), id, .. }] = rows.as_slice() else { panic!("{rows:?}") };
    assert_eq!((*carried, *id), (user, first.row), "each takes its own row away");
}

#[tokio::test]
async fn nothing_holds_at_another_epoch_for_a_disabled_user_or_for_an_unverified_one() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    let user = verified(&fixture, "ada@example.com").await;
    stores.ask_for_address(app, a_request(user, 1, "new@example.com")).await.unwrap().unwrap();
    let before = async || fixture.count("SELECT sum(hashtext(users::text)) FROM users").await;
    let nothing = async |epoch: i64, unverified: bool| {
        if !unverified {
            assert!(stores.rename(app, a_rename(user, epoch)).await.unwrap().is_none());
            assert!(stores.change_address(app, a_change(user, epoch, "new@example.com")).await.unwrap().is_none());
        }
        assert!(stores.set_password(app, a_password(user, epoch)).await.unwrap().is_none());
        assert!(stores.ask_for_address(app, a_request(user, epoch, "b@example.com")).await.unwrap().is_none());
        assert!(stores.delete_user(app, a_removal(user, epoch)).await.unwrap().is_none());
    };
    for epoch in [0, 2] {
        let users = before().await;
        nothing(epoch, false).await;
        assert_eq!(before().await, users);
    }
    fixture.execute("UPDATE users SET disabled_at = created_at").await;
    let users = before().await;
    nothing(1, false).await;
    assert_eq!(before().await, users);
    fixture.execute("UPDATE users SET disabled_at = NULL, email_verified_at = NULL").await;
    let users = before().await;
    nothing(1, true).await;
    assert_eq!(before().await, users);
    assert_eq!(kinds(&queued(&fixture).await), ["address-changing", "confirm"], "of the request alone");
}

#[tokio::test]
async fn a_new_password_ends_what_waits_and_is_told() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    let user = verified(&fixture, "ada@example.com").await;
    stores.ask_for_address(app, a_request(user, 1, "new@example.com")).await.unwrap().unwrap();
    fixture.execute(&format!("DELETE FROM outbox; UPDATE users SET password_session = '{OWN}'")).await;
    let changed = stores.set_password(app, a_password(user, 1)).await.unwrap().unwrap();
    assert_eq!((changed.epoch, changed.version), (Epoch(2), 3));
    assert_eq!(changed.password_hash, Some(PasswordHash::new("$argon2id$second")));
    assert!(changed.pending_email.is_none() && changed.password_session.is_none());
    assert_eq!(kinds(&due(&fixture).await), ["password-changed"]);
    let rows = queued(&fixture).await;
    let [Claimed { task: Task::CarryEpoch(news), .. }, _] = rows.as_slice() else { panic!("{rows:?}") };
    assert_eq!(*news, EpochNews { user, epoch: Epoch(2), keep: Some(OWN) });

    // The only address that there is goes on waiting, and nobody can be told.
    fixture
        .execute(
            "DELETE FROM outbox;
             UPDATE users SET email = NULL, email_canonical = NULL, email_verified_at = NULL,
                pending_email = 'x@example.com', pending_email_canonical = 'x@example.com'",
        )
        .await;
    let changed = stores.set_password(app, a_password(user, 2)).await.unwrap().unwrap();
    assert!(changed.pending_email.is_some());
    assert_eq!(kinds(&queued(&fixture).await), ["epoch"]);
}

#[tokio::test]
async fn a_change_of_the_address_takes_it_from_an_unverified_account_and_from_no_other() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    let user = verified(&fixture, "Ada@example.com").await;
    let other = created(&fixture, "new@example.com").await.id;
    stores.ask_for_address(app, a_request(user, 1, "New@example.com")).await.unwrap().unwrap();
    fixture.execute(&format!("UPDATE users SET email_verified_at = now() WHERE id = '{other}'")).await;
    assert!(stores.change_address(app, a_change(user, 1, "new@example.com")).await.unwrap().is_none());
    assert!(stores.change_address(app, a_change(user, 1, "elsewhere@example.com")).await.unwrap().is_none());
    assert_eq!(fixture.count("SELECT count(*) FROM users").await, 2);
    fixture.execute(&format!("UPDATE users SET email_verified_at = NULL WHERE id = '{other}'")).await;
    fixture.execute("DELETE FROM outbox WHERE kind = 'confirm'").await;
    fixture
        .execute(&format!("INSERT INTO outbox (app_id, kind, user_id) VALUES ('{app}', 'confirm', '{other}')"))
        .await;

    let changed = stores.change_address(app, a_change(user, 1, "new@example.com")).await.unwrap().unwrap();
    assert_eq!(changed.removed, Some(EpochNews { user: other, epoch: Epoch(2), keep: None }));
    let user_now = changed.user;
    assert_eq!(user_now.email.as_ref().map(|email| email.as_str()), Some("New@example.com"), "as it was asked for");
    assert!(user_now.email_verified && user_now.pending_email.is_none());
    assert_eq!((user_now.epoch, user_now.version), (Epoch(2), 3));
    assert!(stores.user(app, other).await.unwrap().is_none());

    let events = "SELECT count(*) FROM audit_events WHERE user_id = ";
    assert_eq!(fixture.count(&format!("{events} '{other}' AND kind = 'user_deleted'")).await, 1);
    assert_eq!(fixture.count(&format!("{events} '{user}' AND kind = 'address_changed'")).await, 1);
    let rows = queued(&fixture).await;
    assert_eq!(kinds(&rows), ["to-former", "address-changing", "epoch", "epoch"]);
    let Task::MailToFormer(mail, former) = &rows[0].task else { panic!("{rows:?}") };
    assert_eq!((mail.kind.as_str(), mail.user, former.as_str()), ("address-changed", Some(user), "Ada@example.com"));
    let mut news: Vec<_> = rows
        .iter()
        .filter_map(|row| if let Task::CarryEpoch(news) = &row.task { Some((news.user, news.keep)) } else { None })
        .collect();
    news.sort_by_key(|(_, keep)| keep.is_some());
    assert_eq!(news, [(other, None), (user, Some(OWN))]);
}

#[tokio::test]
async fn of_many_who_take_one_address_at_once_one_has_it() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    for round in 0..5 {
        let prize = format!("prize{round}@example.com");
        let mut tasks = JoinSet::new();
        for who in 0..8 {
            let user = verified(&fixture, &format!("u{round}x{who}@example.com")).await;
            stores.ask_for_address(app, a_request(user, 1, &prize)).await.unwrap().unwrap();
            let (stores, app, prize) = (stores.clone(), app.clone(), prize.clone());
            tasks.spawn(async move {
                if who % 4 == 3 {
                    // Registers it, and keeps it only where it comes last or never.
                    let user = a_new_user(&prize);
                    stores.create_user(&app, user, None).await.unwrap();
                    return false;
                }
                stores.change_address(&app, a_change(user, 1, &prize)).await.unwrap().is_some()
            });
        }
        let won = tasks.join_all().await;
        assert_eq!(won.iter().filter(|won| **won).count(), 1, "in round {round}");
        let owners =
            format!("SELECT count(*) FROM users WHERE email_canonical = '{prize}' AND email_verified_at IS NOT NULL");
        assert_eq!(fixture.count(&owners).await, 1);
    }
}

#[tokio::test]
async fn two_who_want_each_others_address_do_not_wait_for_each_other() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    let users = [verified(&fixture, "a@example.com").await, verified(&fixture, "b@example.com").await];
    for (user, wanted) in users.iter().zip(["b@example.com", "a@example.com"]) {
        stores.ask_for_address(app, a_request(*user, 1, wanted)).await.unwrap().unwrap();
    }
    let mut tasks = JoinSet::new();
    for _ in 0..4 {
        for (user, wanted) in users.iter().zip(["b@example.com", "a@example.com"]) {
            let (stores, app, change) = (stores.clone(), app.clone(), a_change(*user, 1, wanted));
            tasks.spawn(async move { stores.change_address(&app, change).await.unwrap().is_some() });
        }
    }
    assert!(tasks.join_all().await.iter().all(|changed| !changed), "each has a verified owner");
}

#[tokio::test]
async fn a_deleted_user_leaves_one_row_that_ends_the_sessions() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    let user = verified(&fixture, "ada@example.com").await;
    let bystander = verified(&fixture, "eva@example.com").await;
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
    assert_eq!(stores.delete_user(app, a_removal(user, 1)).await.unwrap(), Some(Epoch(2)));
    assert_eq!(stores.delete_user(app, a_removal(user, 1)).await.unwrap(), None);
    assert!(stores.user(app, user).await.unwrap().is_none());
    assert_eq!(fixture.count("SELECT count(*) FROM identities").await, 1);
    let rows = format!("SELECT count(*) FROM outbox WHERE user_id = '{user}'");
    assert_eq!(fixture.count(&rows).await, 1);
    let rows = format!("SELECT epoch FROM outbox WHERE user_id = '{user}' AND kind = 'epoch' AND keep_session IS NULL");
    assert_eq!(fixture.count(&rows).await, 2);
    assert_eq!(fixture.count("SELECT count(*) FROM outbox").await, 4);
    let events = "SELECT count(*) FROM audit_events WHERE kind = 'user_deleted'";
    assert_eq!(fixture.count(events).await, 1, "what outlives the user, once");
}

#[tokio::test]
async fn the_profile_of_a_user_who_is_gone_does_not_come_back() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    let user = verified(&fixture, "ada@example.com").await;
    let profile = |version| Profile { version, email: None, email_verified: false, name: "Ada".to_owned() };
    let news = |epoch| EpochNews { user, epoch: Epoch(epoch), keep: None };
    stores.raise_epoch(app, &news(2), Some(&profile(2))).await.unwrap();
    stores.raise_epoch(app, &news(3), None).await.unwrap();
    // What a rename that came first still carries.
    stores.put_profile(app, user, &profile(4)).await.unwrap();
    stores.raise_epoch(app, &news(2), Some(&profile(3))).await.unwrap();
    let mut redis = latchkey_tests::redis::Redis::shared().await.connect().await.unwrap();
    let key = format!("lk:{{{app}:{user}}}:user");
    let fields: Vec<String> = redis::cmd("HKEYS").arg(&key).query_async(&mut redis).await.unwrap();
    assert_eq!(fields, ["epoch"]);
}
