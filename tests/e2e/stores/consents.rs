//! The consents of users to Clients.

use latchkey_server::domain::{
    audit::EventKind,
    openid::scope::Scopes,
    password::PasswordHash,
    ports::{Consents, CreateUserOutcome, MAX_CONSENTS, NewConsent, PasswordReset, Users},
    user::{Epoch, UserId},
};
use time::{Duration, OffsetDateTime, macros::datetime};
use tokio::task::JoinSet;

use super::{Fixture, a_new_user, a_user_id, an_app, an_event};

const ALLOWED_AT: OffsetDateTime = datetime!(2026-03-04 06:00:00 UTC);

fn scopes(names: &str) -> Scopes {
    Scopes::parse_known(names)
}

async fn create_user(fixture: &Fixture, email: &str) -> UserId {
    let user = a_new_user(email);
    let id = user.id;
    assert_eq!(fixture.stores.create_user(&fixture.app, user, None).await.unwrap(), CreateUserOutcome::Created);
    id
}

fn a_consent(user: UserId, client: &str, names: &str, minutes: i64) -> NewConsent {
    NewConsent {
        user,
        client_uid: client.to_owned(),
        scopes: scopes(names),
        at: ALLOWED_AT + Duration::minutes(minutes),
        event: an_event(EventKind::ConsentGiven, user),
    }
}

async fn add(fixture: &Fixture, consent: NewConsent) -> bool {
    fixture.stores.add_consent(&fixture.app, consent).await.unwrap()
}

#[tokio::test]
async fn a_later_consent_adds_its_scopes() {
    let fixture = Fixture::new().await;
    let Fixture { stores, app, .. } = &fixture;
    let user = create_user(&fixture, "ada@example.com").await;
    assert!(stores.consented_scopes(app, user, "uid-1").await.unwrap().is_empty());
    assert!(add(&fixture, a_consent(user, "uid-1", "openid email", 0)).await);
    assert!(add(&fixture, a_consent(user, "uid-1", "openid groups", 5)).await);
    assert!(add(&fixture, a_consent(user, "uid-2", "openid", 9)).await);
    assert_eq!(stores.consented_scopes(app, user, "uid-1").await.unwrap(), scopes("openid email groups"));
    let listed = stores.consents(app, user).await.unwrap();
    let listed: Vec<_> = listed.iter().map(|consent| (consent.client_uid.as_str(), consent.at - ALLOWED_AT)).collect();
    assert_eq!(listed, [("uid-2", Duration::minutes(9)), ("uid-1", Duration::minutes(5))]);
    assert_eq!(fixture.count("SELECT count(*) FROM audit_events WHERE kind = 'consent_given'").await, 3);
    // Another user, another Client and another App have no consent.
    let other = create_user(&fixture, "eve@example.com").await;
    assert!(stores.consented_scopes(app, other, "uid-1").await.unwrap().is_empty());
    assert!(stores.consented_scopes(app, user, "uid-3").await.unwrap().is_empty());
    assert!(stores.consented_scopes(&an_app(), user, "uid-1").await.unwrap().is_empty());
}

#[tokio::test]
async fn a_withdrawn_consent_is_gone_and_recorded_once() {
    let fixture = Fixture::new().await;
    let Fixture { stores, app, .. } = &fixture;
    let user = create_user(&fixture, "ada@example.com").await;
    assert!(add(&fixture, a_consent(user, "uid-1", "openid", 0)).await);
    assert!(add(&fixture, a_consent(user, "uid-2", "openid", 0)).await);
    let event = || an_event(EventKind::ConsentWithdrawn, user);
    assert!(stores.remove_consent(app, user, "uid-1", event()).await.unwrap());
    assert!(!stores.remove_consent(app, user, "uid-1", event()).await.unwrap());
    assert!(stores.consented_scopes(app, user, "uid-1").await.unwrap().is_empty());
    assert!(!stores.consented_scopes(app, user, "uid-2").await.unwrap().is_empty());
    assert_eq!(fixture.count("SELECT count(*) FROM audit_events WHERE kind = 'consent_withdrawn'").await, 1);
}

#[tokio::test]
async fn a_password_reset_removes_the_consents_only_if_the_address_was_unverified() {
    let fixture = Fixture::new().await;
    let Fixture { stores, app, .. } = &fixture;
    let user = create_user(&fixture, "ada@example.com").await;
    let other = create_user(&fixture, "eve@example.com").await;
    let reset = |epoch| PasswordReset {
        user,
        epoch,
        address: "ada@example.com".to_owned(),
        password_hash: PasswordHash::new("$argon2id$second"),
        at: ALLOWED_AT,
        event: an_event(EventKind::PasswordReset, user),
    };
    for user in [user, other] {
        assert!(add(&fixture, a_consent(user, "uid-1", "openid", 0)).await);
    }
    stores.reset_password(app, reset(Epoch(1))).await.unwrap().unwrap();
    assert!(stores.consents(app, user).await.unwrap().is_empty(), "the address was unverified");
    assert_eq!(stores.consents(app, other).await.unwrap().len(), 1);
    assert!(add(&fixture, a_consent(user, "uid-1", "openid", 0)).await);
    stores.reset_password(app, reset(Epoch(2))).await.unwrap().unwrap();
    assert_eq!(stores.consents(app, user).await.unwrap().len(), 1, "the address was verified");
}

#[tokio::test]
async fn the_oldest_consents_beyond_the_maximum_are_removed() {
    let fixture = Fixture::new().await;
    let Fixture { stores, app, .. } = &fixture;
    let user = create_user(&fixture, "ada@example.com").await;
    for number in 0..MAX_CONSENTS {
        assert!(add(&fixture, a_consent(user, &format!("uid-{number}"), "openid", number)).await);
    }
    // The new consent stays, even if the clock of the server that adds it is behind.
    assert!(add(&fixture, a_consent(user, "new", "openid", -5)).await);
    let listed = stores.consents(app, user).await.unwrap();
    assert_eq!(i64::try_from(listed.len()).unwrap(), MAX_CONSENTS);
    assert!(listed.iter().any(|consent| consent.client_uid == "new"));
    assert!(!listed.iter().any(|consent| consent.client_uid == "uid-0"));
    assert!(listed.iter().any(|consent| consent.client_uid == "uid-1"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_consents_lose_no_scope() {
    let fixture = Fixture::new().await;
    let user = create_user(&fixture, "ada@example.com").await;
    let mut calls = JoinSet::new();
    for names in ["openid", "profile", "email", "groups", "offline_access"] {
        let (stores, app) = (fixture.another_server().await, fixture.app.clone());
        calls.spawn(async move { stores.add_consent(&app, a_consent(user, "uid-1", names, 0)).await.unwrap() });
    }
    assert!(calls.join_all().await.into_iter().all(|added| added));
    let all = scopes("openid profile email groups offline_access");
    assert_eq!(fixture.stores.consented_scopes(&fixture.app, user, "uid-1").await.unwrap(), all);
}

#[tokio::test]
async fn consents_are_deleted_with_their_user() {
    let fixture = Fixture::new().await;
    let user = create_user(&fixture, "ada@example.com").await;
    assert!(add(&fixture, a_consent(user, "uid-1", "openid", 0)).await);
    fixture.execute(&format!("DELETE FROM users WHERE id = '{user}'")).await;
    assert_eq!(fixture.count("SELECT count(*) FROM consents").await, 0);
    for gone in [user, a_user_id()] {
        assert!(!add(&fixture, a_consent(gone, "uid-1", "openid", 0)).await);
    }
    assert_eq!(fixture.count("SELECT count(*) FROM consents").await, 0);
    assert_eq!(fixture.count("SELECT count(*) FROM audit_events WHERE kind = 'consent_given'").await, 1);
}
