//! Users: one account an address, and changes that hold only at the epoch they were decided at.

use std::time::{Duration, Instant};

use latchkey_server::domain::{
    audit::{Event, EventKind},
    mail::EpochNews,
    password::PasswordHash,
    ports::{Claimed, Confirmation, Creation, NewUser, Outbox, PasswordReset, Task, Users},
    session::SessionId,
    user::{Epoch, UserId},
};
use tokio::task::JoinSet;
use uuid::Uuid;

use super::{Fixture, REQUESTED, a_mail, a_new_user, a_user_id, an_app, an_email, an_event};

const AT: time::OffsetDateTime = time::macros::datetime!(2026-03-04 06:00:00 UTC);

async fn created(fixture: &Fixture, email: &str) -> NewUser {
    let user = a_new_user(email);
    let creation = fixture.stores.create_user(&fixture.app, user.clone(), None).await.unwrap();
    assert_eq!(creation, Creation::Created);
    user
}

fn a_confirmation(user: UserId, epoch: Epoch) -> Confirmation {
    let (address, session) = ("ada@example.com".to_owned(), SessionId(Uuid::from_u128(7)));
    let event = an_event(EventKind::Confirmed, user);
    Confirmation { user, epoch, address, session, kept: false, at: AT, event }
}

fn a_reset(user: UserId, epoch: Epoch) -> PasswordReset {
    let password_hash = PasswordHash::new("$argon2id$second");
    let event = an_event(EventKind::PasswordReset, user);
    PasswordReset { user, epoch, address: "ada@example.com".to_owned(), password_hash, at: AT, event }
}

fn again_event(user: UserId) -> Event {
    an_event(EventKind::RegisteredAgain, user)
}

/// Everything in the outbox, also what is not due yet.
async fn queued(fixture: &Fixture) -> Vec<Claimed> {
    fixture.execute("UPDATE outbox SET due_at = now() - interval '1 s', lease_until = NULL").await;
    let mut rows = fixture.stores.claim(100, 100, Duration::from_secs(60)).await.unwrap();
    rows.sort_by_key(|row| matches!(row.task, Task::CarryEpoch(_)));
    rows
}

async fn link(fixture: &Fixture, user: UserId) {
    fixture
        .execute(&format!(
            "INSERT INTO identities (app_id, authority, subject, user_id, provider, linked_at)
             VALUES ('{}', 'https://idp.example', '{user}', '{user}', 'idp', now())",
            fixture.app
        ))
        .await;
}

async fn identities(fixture: &Fixture) -> i64 {
    fixture.count("SELECT count(*) FROM identities").await
}

#[tokio::test]
async fn a_created_user_is_found_by_id_and_by_address_in_any_case() {
    let fixture = Fixture::new().await;
    let new = a_new_user("Ada@Example.com");
    let mail = a_mail(Some(new.id));
    fixture.stores.create_user(&fixture.app, new.clone(), Some(mail)).await.unwrap();

    let user = fixture.stores.user(&fixture.app, new.id).await.unwrap().unwrap();
    assert_eq!(user.email.as_ref().map(|email| email.as_str()), Some("Ada@Example.com"));
    assert_eq!((user.name.as_str(), user.created_at), ("Ada Lovelace", REQUESTED));
    assert_eq!(user.password_hash, Some(new.password_hash));
    assert!(!user.email_verified && !user.contested && !user.disabled && user.pending_email.is_none());

    let found = fixture.stores.user_by_email(&fixture.app, &an_email("aDA@eXAMPLE.com")).await.unwrap().unwrap();
    assert_eq!((found.id, found.epoch), (new.id, user.epoch));
    assert!(fixture.stores.user_by_email(&fixture.app, &an_email("eva@example.com")).await.unwrap().is_none());
    assert!(fixture.stores.user(&fixture.app, a_user_id()).await.unwrap().is_none());

    let rows = queued(&fixture).await;
    let [Claimed { task: Task::Mail(mail), app, attempts: 0, .. }] = rows.as_slice() else { panic!("{rows:?}") };
    assert_eq!((app, mail.user, mail.requested_at), (&fixture.app, Some(new.id), REQUESTED));
}

#[tokio::test]
async fn apps_do_not_see_each_others_users() {
    let fixture = Fixture::new().await;
    let user = created(&fixture, "ada@example.com").await;
    let other = an_app();
    assert!(fixture.stores.user(&other, user.id).await.unwrap().is_none());
    assert!(fixture.stores.user_by_email(&other, &user.email).await.unwrap().is_none());
    let namesake = fixture.stores.create_user(&other, a_new_user("ada@example.com"), None).await.unwrap();
    assert_eq!(namesake, Creation::Created);
}

#[tokio::test]
async fn a_pending_address_matches_nobody() {
    let fixture = Fixture::new().await;
    let user = created(&fixture, "ada@example.com").await;
    fixture
        .execute("UPDATE users SET pending_email = 'Eva@example.com', pending_email_canonical = 'eva@example.com'")
        .await;
    let eva = an_email("eva@example.com");
    assert!(fixture.stores.user_by_email(&fixture.app, &eva).await.unwrap().is_none());
    let user = fixture.stores.user(&fixture.app, user.id).await.unwrap().unwrap();
    assert_eq!(user.pending_email.map(|email| email.as_str().to_owned()), Some("Eva@example.com".to_owned()));
    assert_eq!(
        fixture.stores.create_user(&fixture.app, a_new_user("eva@example.com"), None).await.unwrap(),
        Creation::Created
    );
}

#[tokio::test]
async fn twenty_at_once_make_one_user_and_one_mail() {
    let fixture = Fixture::new().await;
    let mut tasks = JoinSet::new();
    for number in 0..20 {
        let (stores, app) = (fixture.stores.clone(), fixture.app.clone());
        tasks.spawn(async move {
            let user = a_new_user(if number % 2 == 0 { "ada@example.com" } else { "Ada@Example.com" });
            let mail = a_mail(Some(user.id));
            stores.create_user(&app, user, Some(mail)).await.unwrap()
        });
    }
    let creations = tasks.join_all().await;
    assert_eq!(creations.iter().filter(|creation| **creation == Creation::Created).count(), 1);
    assert_eq!(fixture.count("SELECT count(*) FROM users").await, 1);
    assert_eq!(fixture.count("SELECT count(*) FROM outbox").await, 1);
}

#[tokio::test]
async fn registering_again_contests_only_what_is_unverified_and_at_the_epoch() {
    let fixture = Fixture::new().await;
    let user = created(&fixture, "ada@example.com").await;
    let stores = &fixture.stores;
    let contested = async || stores.user(&fixture.app, user.id).await.unwrap().unwrap().contested;
    let again = async |epoch: i64, contest: bool| {
        stores
            .registered_again(
                &fixture.app,
                user.id,
                Epoch(epoch),
                contest,
                Some(a_mail(Some(user.id))),
                again_event(user.id),
            )
            .await
            .unwrap();
    };
    again(1, false).await;
    assert!(!contested().await);
    again(2, true).await;
    assert!(!contested().await, "the epoch has moved");
    again(1, true).await;
    assert!(contested().await);
    again(1, false).await;
    assert!(contested().await, "who registers with the right password later does not undo it");
    assert_eq!(fixture.count("SELECT count(*) FROM outbox").await, 4, "the mail is queued in any case");

    fixture.execute("UPDATE users SET contested = false, email_verified_at = now()").await;
    again(1, true).await;
    assert!(!contested().await);
    stores.registered_again(&fixture.app, user.id, Epoch(1), true, None, again_event(user.id)).await.unwrap();
    assert_eq!(fixture.count("SELECT count(*) FROM outbox").await, 5);
}

#[tokio::test]
async fn a_hash_is_renewed_only_where_it_is_still_the_same() {
    let fixture = Fixture::new().await;
    let user = created(&fixture, "ada@example.com").await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    let hash = async || stores.user(app, user.id).await.unwrap().unwrap().password_hash.unwrap();
    stores.renew_hash(app, user.id, &PasswordHash::new("$other"), PasswordHash::new("$new")).await.unwrap();
    assert_eq!(hash().await, user.password_hash);
    stores.renew_hash(app, user.id, &user.password_hash, PasswordHash::new("$new")).await.unwrap();
    assert_eq!(hash().await, PasswordHash::new("$new"));
}

#[tokio::test]
async fn confirming_verifies_raises_the_epoch_and_says_so() {
    let fixture = Fixture::new().await;
    let user = created(&fixture, "Ada@example.com").await;
    link(&fixture, user.id).await;
    let changed =
        fixture.stores.confirm_address(&fixture.app, a_confirmation(user.id, Epoch(1))).await.unwrap().unwrap();
    assert!(changed.user.email_verified && !changed.was_contested);
    assert_eq!((changed.user.id, changed.user.epoch), (user.id, Epoch(2)));
    assert_eq!(changed.user.password_hash, Some(user.password_hash));
    assert_eq!(identities(&fixture).await, 0, "nobody has shown that they are the owner's");
    let rows = fixture.stores.claim(10, 10, Duration::from_secs(60)).await.unwrap();
    assert!(rows.is_empty(), "the request carries the epoch itself first: {rows:?}");
    let rows = queued(&fixture).await;
    let [Claimed { task: Task::CarryEpoch(news), .. }] = rows.as_slice() else { panic!("{rows:?}") };
    assert_eq!(*news, EpochNews { user: user.id, epoch: Epoch(2), keep: None });
}

#[tokio::test]
async fn confirming_with_the_accounts_own_session_keeps_identities_and_names_the_session() {
    let fixture = Fixture::new().await;
    let user = created(&fixture, "ada@example.com").await;
    link(&fixture, user.id).await;
    let change = Confirmation { kept: true, ..a_confirmation(user.id, Epoch(1)) };
    let session = change.session;
    fixture.stores.confirm_address(&fixture.app, change).await.unwrap().unwrap();
    assert_eq!(identities(&fixture).await, 1);
    let rows = queued(&fixture).await;
    let [Claimed { task: Task::CarryEpoch(news), .. }] = rows.as_slice() else { panic!("{rows:?}") };
    assert_eq!(news.keep, Some(session));
}

#[tokio::test]
async fn confirming_a_contested_account_takes_its_password() {
    let fixture = Fixture::new().await;
    let user = created(&fixture, "ada@example.com").await;
    fixture.stores.registered_again(&fixture.app, user.id, Epoch(1), true, None, again_event(user.id)).await.unwrap();
    let changed =
        fixture.stores.confirm_address(&fixture.app, a_confirmation(user.id, Epoch(1))).await.unwrap().unwrap();
    assert!(changed.was_contested && !changed.user.contested);
    assert_eq!(changed.user.password_hash, None);
    assert_eq!(changed.user.password_session, Some(SessionId(Uuid::from_u128(7))), "the session that may set one");
    fixture.stores.reset_password(&fixture.app, a_reset(user.id, Epoch(2))).await.unwrap().unwrap();
    let user = fixture.stores.user(&fixture.app, user.id).await.unwrap().unwrap();
    assert_eq!(user.password_session, None);
}

#[tokio::test]
async fn resetting_sets_the_password_and_queues_the_notice() {
    let fixture = Fixture::new().await;
    let user = created(&fixture, "ada@example.com").await;
    link(&fixture, user.id).await;
    fixture.stores.registered_again(&fixture.app, user.id, Epoch(1), true, None, again_event(user.id)).await.unwrap();
    let changed = fixture.stores.reset_password(&fixture.app, a_reset(user.id, Epoch(1))).await.unwrap().unwrap();
    assert!(changed.was_contested && !changed.user.contested && changed.user.email_verified);
    assert_eq!(changed.user.password_hash, Some(PasswordHash::new("$argon2id$second")));
    assert_eq!(identities(&fixture).await, 0, "the address was unverified");
    let rows = queued(&fixture).await;
    let [Claimed { task: Task::Mail(notice), .. }, Claimed { task: Task::CarryEpoch(news), .. }] = rows.as_slice()
    else {
        panic!("{rows:?}")
    };
    assert_eq!((notice.kind.as_str(), notice.user, notice.requested_at), ("password-changed", Some(user.id), AT));
    assert_eq!(*news, EpochNews { user: user.id, epoch: Epoch(2), keep: None });

    link(&fixture, user.id).await;
    fixture.stores.reset_password(&fixture.app, a_reset(user.id, Epoch(2))).await.unwrap().unwrap();
    assert_eq!(identities(&fixture).await, 1, "the address was verified");
}

#[tokio::test]
async fn a_stale_code_changes_nothing() {
    let fixture = Fixture::new().await;
    let user = created(&fixture, "ada@example.com").await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    let before = fixture.count("SELECT sum(hashtext(users::text)) FROM users").await;
    let elsewhere = "eva@example.com".to_owned();
    for (epoch, id, address) in [
        (Epoch(2), user.id, "ada@example.com".to_owned()),
        (Epoch(0), user.id, "ada@example.com".to_owned()),
        (Epoch(1), a_user_id(), "ada@example.com".to_owned()),
        (Epoch(1), user.id, elsewhere),
    ] {
        let confirmation = Confirmation { address: address.clone(), ..a_confirmation(id, epoch) };
        assert!(stores.confirm_address(app, confirmation).await.unwrap().is_none());
        let reset = PasswordReset { address, ..a_reset(id, epoch) };
        assert!(stores.reset_password(app, reset).await.unwrap().is_none());
    }
    fixture.execute("UPDATE users SET disabled_at = created_at").await;
    assert!(stores.confirm_address(app, a_confirmation(user.id, Epoch(1))).await.unwrap().is_none());
    assert!(stores.reset_password(app, a_reset(user.id, Epoch(1))).await.unwrap().is_none());
    fixture.execute("UPDATE users SET disabled_at = NULL").await;
    assert_eq!(fixture.count("SELECT sum(hashtext(users::text)) FROM users").await, before);
    assert_eq!(fixture.count("SELECT count(*) FROM outbox").await, 0);
}

#[tokio::test]
async fn of_many_changes_at_one_epoch_one_holds() {
    let fixture = Fixture::new().await;
    let user = created(&fixture, "ada@example.com").await;
    let mut tasks = JoinSet::new();
    for number in 0..20 {
        let (stores, app, id) = (fixture.stores.clone(), fixture.app.clone(), user.id);
        tasks.spawn(async move {
            if number % 2 == 0 {
                stores.confirm_address(&app, a_confirmation(id, Epoch(1))).await.unwrap().is_some()
            } else {
                stores.reset_password(&app, a_reset(id, Epoch(1))).await.unwrap().is_some()
            }
        });
    }
    let held = tasks.join_all().await;
    assert_eq!(held.iter().filter(|held| **held).count(), 1);
    assert_eq!(fixture.stores.user(&fixture.app, user.id).await.unwrap().unwrap().epoch, Epoch(2));
    assert_eq!(fixture.count("SELECT count(*) FROM outbox WHERE kind = 'epoch'").await, 1);
}

/// Known and unknown addresses are registered in like time: the halves are the same two calls, so the difference is what
/// the stores make. Ten such differences; were the calls alike, each median would be off by about 0.02 ms, so that the
/// smallest of the ten is above the bound without a cause practically never happens.
#[tokio::test]
async fn registering_again_costs_what_creating_costs() {
    let fixture = Fixture::new().await;
    let user = created(&fixture, "ada@example.com").await;
    let mut smallest = f64::INFINITY;
    for round in 0..10 {
        let (mut fresh, mut again) = (Vec::new(), Vec::new());
        for number in 0..100 {
            let new = a_new_user(&format!("u{round}x{number}@example.com"));
            let mail = Some(a_mail(Some(new.id)));
            let started = Instant::now();
            fixture.stores.create_user(&fixture.app, new, mail).await.unwrap();
            fresh.push(started.elapsed());
            let mail = Some(a_mail(Some(user.id)));
            let started = Instant::now();
            fixture
                .stores
                .registered_again(&fixture.app, user.id, Epoch(1), true, mail, again_event(user.id))
                .await
                .unwrap();
            again.push(started.elapsed());
        }
        fresh.sort();
        again.sort();
        let difference = (fresh[50].as_secs_f64() - again[50].as_secs_f64()).abs() * 1000.0;
        smallest = smallest.min(difference);
    }
    assert!(smallest < 0.2, "the medians differ by {smallest:.3} ms");
}
