//! Users: each email address has at most one account. A change to an account applies only if the account still has the
//! epoch that the caller expects. The epoch is a counter; raising it ends sessions and codes.

use std::time::{Duration, Instant};

use latchkey_server::domain::{
    audit::{Event, EventKind},
    mail::EpochChange,
    password::PasswordHash,
    ports::{ClaimedRow, Confirmation, CreateUserOutcome, NewUser, Outbox, OutboxTask, PasswordReset, Users},
    session::SessionId,
    user::{Epoch, UserId},
};
use tokio::task::JoinSet;
use uuid::Uuid;

use super::{Fixture, REQUESTED_AT, a_mail, a_new_user, a_user_id, an_app, an_email, an_event};

const CHANGED_AT: time::OffsetDateTime = time::macros::datetime!(2026-03-04 06:00:00 UTC);

async fn create_user(fixture: &Fixture, email: &str) -> NewUser {
    let user = a_new_user(email);
    let creation = fixture.stores.create_user(&fixture.app, user.clone(), None).await.unwrap();
    assert_eq!(creation, CreateUserOutcome::Created);
    user
}

fn a_confirmation(user: UserId, epoch: Epoch) -> Confirmation {
    let (address, session) = ("ada@example.com".to_owned(), SessionId(Uuid::from_u128(7)));
    let event = an_event(EventKind::Confirmed, user);
    Confirmation { user, epoch, address, session, keeps_session: false, at: CHANGED_AT, event }
}

fn a_reset(user: UserId, epoch: Epoch) -> PasswordReset {
    let password_hash = PasswordHash::new("$argon2id$second");
    let event = an_event(EventKind::PasswordReset, user);
    PasswordReset { user, epoch, address: "ada@example.com".to_owned(), password_hash, at: CHANGED_AT, event }
}

fn registered_again_event(user: UserId) -> Event {
    an_event(EventKind::RegisteredAgain, user)
}

/// Claims all rows of the outbox, also those that are not due yet.
async fn claim_all_rows(fixture: &Fixture) -> Vec<ClaimedRow> {
    fixture.execute("UPDATE outbox SET due_at = now() - interval '1 s', lease_until = NULL").await;
    let mut rows = fixture.stores.claim(100, 100, Duration::from_secs(60)).await.unwrap();
    rows.sort_by_key(|row| matches!(row.task, OutboxTask::PropagateEpoch(_)));
    rows
}

async fn link_identity(fixture: &Fixture, user: UserId) {
    fixture
        .execute(&format!(
            "INSERT INTO identities (app_id, authority, subject, user_id, provider, linked_at)
             VALUES ('{}', 'https://idp.example', '{user}', '{user}', 'idp', now())",
            fixture.app
        ))
        .await;
}

async fn count_identities(fixture: &Fixture) -> i64 {
    fixture.count("SELECT count(*) FROM identities").await
}

#[tokio::test]
async fn a_created_user_is_found_by_id_and_by_email_address_in_upper_or_lower_case() {
    let fixture = Fixture::new().await;
    let new = a_new_user("Ada@Example.com");
    let mail = a_mail(Some(new.id));
    fixture.stores.create_user(&fixture.app, new.clone(), Some(mail)).await.unwrap();

    let user = fixture.stores.user(&fixture.app, new.id).await.unwrap().unwrap();
    assert_eq!(user.email.as_ref().map(|email| email.as_str()), Some("Ada@Example.com"));
    assert_eq!((user.name.as_str(), user.created_at), ("Ada Lovelace", REQUESTED_AT));
    assert_eq!(user.password_hash, Some(new.password_hash));
    assert!(!user.email_verified && !user.contested && !user.disabled && user.pending_email.is_none());

    let found = fixture.stores.user_by_email(&fixture.app, &an_email("aDA@eXAMPLE.com")).await.unwrap().unwrap();
    assert_eq!((found.id, found.epoch), (new.id, user.epoch));
    assert!(fixture.stores.user_by_email(&fixture.app, &an_email("eva@example.com")).await.unwrap().is_none());
    assert!(fixture.stores.user(&fixture.app, a_user_id()).await.unwrap().is_none());

    let rows = claim_all_rows(&fixture).await;
    let [ClaimedRow { task: OutboxTask::Mail(mail), app, attempts: 0, .. }] = rows.as_slice() else {
        panic!("{rows:?}")
    };
    assert_eq!((app, mail.recipient, mail.requested_at), (&fixture.app, Some(new.id), REQUESTED_AT));
}

#[tokio::test]
async fn apps_do_not_see_each_others_users() {
    let fixture = Fixture::new().await;
    let user = create_user(&fixture, "ada@example.com").await;
    let other = an_app();
    assert!(fixture.stores.user(&other, user.id).await.unwrap().is_none());
    assert!(fixture.stores.user_by_email(&other, &user.email).await.unwrap().is_none());
    let creation = fixture.stores.create_user(&other, a_new_user("ada@example.com"), None).await.unwrap();
    assert_eq!(creation, CreateUserOutcome::Created);
}

#[tokio::test]
async fn a_pending_email_address_matches_no_user() {
    let fixture = Fixture::new().await;
    let user = create_user(&fixture, "ada@example.com").await;
    fixture
        .execute("UPDATE users SET pending_email = 'Eva@example.com', pending_email_canonical = 'eva@example.com'")
        .await;
    let eva = an_email("eva@example.com");
    assert!(fixture.stores.user_by_email(&fixture.app, &eva).await.unwrap().is_none());
    let user = fixture.stores.user(&fixture.app, user.id).await.unwrap().unwrap();
    assert_eq!(user.pending_email.map(|email| email.as_str().to_owned()), Some("Eva@example.com".to_owned()));
    assert_eq!(
        fixture.stores.create_user(&fixture.app, a_new_user("eva@example.com"), None).await.unwrap(),
        CreateUserOutcome::Created
    );
}

#[tokio::test]
async fn twenty_concurrent_registrations_create_one_user_and_one_mail() {
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
    assert_eq!(creations.iter().filter(|creation| **creation == CreateUserOutcome::Created).count(), 1);
    assert_eq!(fixture.count("SELECT count(*) FROM users").await, 1);
    assert_eq!(fixture.count("SELECT count(*) FROM outbox").await, 1);
}

#[tokio::test]
async fn registering_again_contests_an_account_only_if_it_is_unverified_and_has_the_expected_epoch() {
    let fixture = Fixture::new().await;
    let user = create_user(&fixture, "ada@example.com").await;
    let stores = &fixture.stores;
    let contested = async || stores.user(&fixture.app, user.id).await.unwrap().unwrap().contested;
    let register_again = async |epoch: i64, contest: bool| {
        stores
            .record_repeated_registration(
                &fixture.app,
                user.id,
                Epoch(epoch),
                contest,
                Some(a_mail(Some(user.id))),
                registered_again_event(user.id),
            )
            .await
            .unwrap();
    };
    register_again(1, false).await;
    assert!(!contested().await);
    register_again(2, true).await;
    assert!(!contested().await, "the epoch has changed");
    register_again(1, true).await;
    assert!(contested().await);
    register_again(1, false).await;
    assert!(contested().await, "a later registration with the right password does not undo it");
    assert_eq!(fixture.count("SELECT count(*) FROM outbox").await, 4, "the mail is queued in any case");

    fixture.execute("UPDATE users SET contested = false, email_verified_at = now()").await;
    register_again(1, true).await;
    assert!(!contested().await);
    stores
        .record_repeated_registration(&fixture.app, user.id, Epoch(1), true, None, registered_again_event(user.id))
        .await
        .unwrap();
    assert_eq!(fixture.count("SELECT count(*) FROM outbox").await, 5);
}

#[tokio::test]
async fn a_hash_is_replaced_only_if_it_has_not_changed() {
    let fixture = Fixture::new().await;
    let user = create_user(&fixture, "ada@example.com").await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    let hash = async || stores.user(app, user.id).await.unwrap().unwrap().password_hash.unwrap();
    stores.replace_hash(app, user.id, &PasswordHash::new("$other"), PasswordHash::new("$new")).await.unwrap();
    assert_eq!(hash().await, user.password_hash);
    stores.replace_hash(app, user.id, &user.password_hash, PasswordHash::new("$new")).await.unwrap();
    assert_eq!(hash().await, PasswordHash::new("$new"));
}

#[tokio::test]
async fn confirming_verifies_the_address_and_raises_the_epoch() {
    let fixture = Fixture::new().await;
    let user = create_user(&fixture, "Ada@example.com").await;
    link_identity(&fixture, user.id).await;
    let changed =
        fixture.stores.confirm_address(&fixture.app, a_confirmation(user.id, Epoch(1))).await.unwrap().unwrap();
    assert!(changed.user.email_verified && !changed.was_contested);
    assert_eq!((changed.user.id, changed.user.epoch), (user.id, Epoch(2)));
    assert_eq!(changed.user.password_hash, Some(user.password_hash));
    assert_eq!(count_identities(&fixture).await, 0, "the owner has not proved that the identity is theirs");
    let rows = fixture.stores.claim(10, 10, Duration::from_secs(60)).await.unwrap();
    assert!(rows.is_empty(), "the request propagates the epoch first: {rows:?}");
    let rows = claim_all_rows(&fixture).await;
    let [ClaimedRow { task: OutboxTask::PropagateEpoch(epoch_change), .. }] = rows.as_slice() else {
        panic!("{rows:?}")
    };
    assert_eq!(*epoch_change, EpochChange { user: user.id, epoch: Epoch(2), kept_session: None });
}

#[tokio::test]
async fn confirming_with_the_accounts_own_session_keeps_the_identities_and_this_session() {
    let fixture = Fixture::new().await;
    let user = create_user(&fixture, "ada@example.com").await;
    link_identity(&fixture, user.id).await;
    let change = Confirmation { keeps_session: true, ..a_confirmation(user.id, Epoch(1)) };
    let session = change.session;
    fixture.stores.confirm_address(&fixture.app, change).await.unwrap().unwrap();
    assert_eq!(count_identities(&fixture).await, 1);
    let rows = claim_all_rows(&fixture).await;
    let [ClaimedRow { task: OutboxTask::PropagateEpoch(epoch_change), .. }] = rows.as_slice() else {
        panic!("{rows:?}")
    };
    assert_eq!(epoch_change.kept_session, Some(session));
}

#[tokio::test]
async fn confirming_a_contested_account_removes_its_password() {
    let fixture = Fixture::new().await;
    let user = create_user(&fixture, "ada@example.com").await;
    fixture
        .stores
        .record_repeated_registration(&fixture.app, user.id, Epoch(1), true, None, registered_again_event(user.id))
        .await
        .unwrap();
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
    let user = create_user(&fixture, "ada@example.com").await;
    link_identity(&fixture, user.id).await;
    fixture
        .stores
        .record_repeated_registration(&fixture.app, user.id, Epoch(1), true, None, registered_again_event(user.id))
        .await
        .unwrap();
    let changed = fixture.stores.reset_password(&fixture.app, a_reset(user.id, Epoch(1))).await.unwrap().unwrap();
    assert!(changed.was_contested && !changed.user.contested && changed.user.email_verified);
    assert_eq!(changed.user.password_hash, Some(PasswordHash::new("$argon2id$second")));
    assert_eq!(count_identities(&fixture).await, 0, "the address was unverified");
    let rows = claim_all_rows(&fixture).await;
    let [
        ClaimedRow { task: OutboxTask::Mail(notice), .. },
        ClaimedRow { task: OutboxTask::PropagateEpoch(epoch_change), .. },
    ] = rows.as_slice()
    else {
        panic!("{rows:?}")
    };
    assert_eq!(
        (notice.kind.as_str(), notice.recipient, notice.requested_at),
        ("password-changed", Some(user.id), CHANGED_AT)
    );
    assert_eq!(*epoch_change, EpochChange { user: user.id, epoch: Epoch(2), kept_session: None });

    link_identity(&fixture, user.id).await;
    fixture.stores.reset_password(&fixture.app, a_reset(user.id, Epoch(2))).await.unwrap().unwrap();
    assert_eq!(count_identities(&fixture).await, 1, "the address was verified");
}

#[tokio::test]
async fn a_stale_code_changes_nothing() {
    let fixture = Fixture::new().await;
    let user = create_user(&fixture, "ada@example.com").await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    let before = fixture.count("SELECT sum(hashtext(users::text)) FROM users").await;
    let other_email = "eva@example.com".to_owned();
    for (epoch, id, address) in [
        (Epoch(2), user.id, "ada@example.com".to_owned()),
        (Epoch(0), user.id, "ada@example.com".to_owned()),
        (Epoch(1), a_user_id(), "ada@example.com".to_owned()),
        (Epoch(1), user.id, other_email),
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
async fn only_one_of_many_changes_at_one_epoch_applies() {
    let fixture = Fixture::new().await;
    let user = create_user(&fixture, "ada@example.com").await;
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
    let applied = tasks.join_all().await;
    assert_eq!(applied.iter().filter(|applied| **applied).count(), 1);
    assert_eq!(fixture.stores.user(&fixture.app, user.id).await.unwrap().unwrap().epoch, Epoch(2));
    assert_eq!(fixture.count("SELECT count(*) FROM outbox WHERE kind = 'epoch'").await, 1);
}

/// The response times for known and unknown email addresses must not differ (specification: Accounts, Equal response
/// times). Each of ten rounds compares the median time of `create_user` with that of `record_repeated_registration`.
/// The test fails only if the medians differ by 0.2 ms or more in every round. This practically never happens by
/// chance, because a median scatters by only about 0.02 ms.
#[tokio::test]
async fn registering_again_takes_as_long_as_creating_a_user() {
    let fixture = Fixture::new().await;
    let user = create_user(&fixture, "ada@example.com").await;
    let mut smallest_difference = f64::INFINITY;
    for round in 0..10 {
        let (mut creation_times, mut repetition_times) = (Vec::new(), Vec::new());
        for number in 0..100 {
            let new = a_new_user(&format!("u{round}x{number}@example.com"));
            let mail = Some(a_mail(Some(new.id)));
            let started = Instant::now();
            fixture.stores.create_user(&fixture.app, new, mail).await.unwrap();
            creation_times.push(started.elapsed());
            let mail = Some(a_mail(Some(user.id)));
            let started = Instant::now();
            fixture
                .stores
                .record_repeated_registration(
                    &fixture.app,
                    user.id,
                    Epoch(1),
                    true,
                    mail,
                    registered_again_event(user.id),
                )
                .await
                .unwrap();
            repetition_times.push(started.elapsed());
        }
        creation_times.sort();
        repetition_times.sort();
        let difference = (creation_times[50].as_secs_f64() - repetition_times[50].as_secs_f64()).abs() * 1000.0;
        smallest_difference = smallest_difference.min(difference);
    }
    assert!(smallest_difference < 0.2, "the medians differ by {smallest_difference:.3} ms");
}
