//! How administrators create users.

use latchkey_server::domain::{
    administration::{CreatedBy, UserState, Version},
    audit::EventKind,
    mail::MailKind,
    password::PasswordHash,
    ports::{Identities, NewAdministeredUser, NewFederatedUser, NewIdentity, UserAdministration, UserConflict, Users},
};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::{
    AUTHORITY, CHANGED_AT, Fixture, REQUESTED_AT, a_new_user, a_user_id, an_event, an_external_id, an_identity, create,
    digest, events, metadata, outbox_kinds, read, start_app_deletion,
};
use crate::stores::{an_app, an_email, assert_unavailable};

#[tokio::test]
async fn a_created_user_has_all_the_given_values() {
    let fixture = Fixture::new().await;
    let new = NewAdministeredUser {
        external_id: Some(an_external_id("crm:1")),
        metadata: Some(metadata(json!({ "plan": "gold", "seats": [1, 2.5] }))),
        identities: vec![an_identity("2"), an_identity("1"), an_identity("1")],
        ..a_new_user("Ada@Example.com")
    };
    let created = create(&fixture, new.clone()).await;
    let read = read(&fixture, new.id).await;
    for user in [created, read] {
        assert_eq!(user.id, new.id);
        assert_eq!(user.email, new.email);
        assert!(user.email_verified && !user.disabled && !user.contested && user.pending_email.is_none());
        assert_eq!((user.state(), user.created_by), (UserState::Active, CreatedBy::Administrator));
        assert_eq!((user.name.as_str(), user.created_at), ("Ada Lovelace", REQUESTED_AT));
        assert_eq!(user.password_hash, Some(PasswordHash::new("$argon2id$first")));
        assert_eq!((&user.external_id, &user.metadata), (&new.external_id, &new.metadata));
        assert_eq!((user.version, user.last_signed_in_at), (Version(1), None));
        let [first, second] = user.identities.try_into().unwrap();
        assert_eq!((first.subject.as_str(), second.subject.as_str()), ("1", "2"));
        assert_eq!((first.provider.as_str(), first.authority.as_str()), ("idp", AUTHORITY));
        assert_eq!(first.linked_at, CHANGED_AT);
    }
    assert_eq!(events(&fixture).await, [("user_created".to_owned(), json!(null))]);
    assert!(outbox_kinds(&fixture).await.is_empty());
}

#[tokio::test]
async fn a_user_can_be_created_disabled_unverified_and_with_a_mail() {
    let fixture = Fixture::new().await;
    let new = NewAdministeredUser {
        email_verified: false,
        disabled: true,
        name: None,
        password_hash: None,
        ..a_new_user("ada@example.com")
    };
    let event = an_event(EventKind::UserCreated, new.id);
    let user = fixture
        .stores
        .create_administered_user(&fixture.app, new, Some(MailKind::Confirm), event)
        .await
        .unwrap()
        .unwrap();
    assert!(!user.email_verified && user.disabled && user.name.is_empty() && user.password_hash.is_none());
    assert_eq!(outbox_kinds(&fixture).await, ["confirm"]);
}

#[tokio::test]
async fn a_user_with_an_identity_needs_no_email_address() {
    let fixture = Fixture::new().await;
    let new =
        NewAdministeredUser { email: None, identities: vec![an_identity("1")], ..a_new_user("unused@example.com") };
    let user = create(&fixture, new).await;
    assert!(user.email.is_none() && !user.email_verified);
    assert_eq!(user.state(), UserState::Active);
    let found = fixture.stores.user_by_identity(&fixture.app, AUTHORITY, "1").await.unwrap().unwrap();
    assert_eq!(found.id, user.id);
}

#[tokio::test]
async fn the_first_taken_value_is_reported_and_nothing_is_written() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    let by_external_id =
        create(&fixture, NewAdministeredUser { external_id: Some(an_external_id("1")), ..a_new_user("a@example.com") })
            .await;
    let by_email = create(&fixture, a_new_user("ada@example.com")).await;
    let by_identity =
        create(&fixture, NewAdministeredUser { identities: vec![an_identity("1")], ..a_new_user("b@example.com") })
            .await;
    let before = digest(&fixture).await;
    let mut new = NewAdministeredUser {
        external_id: Some(an_external_id("1")),
        identities: vec![an_identity("2"), an_identity("1")],
        ..a_new_user("ADA@example.com")
    };
    let create = async |user: &NewAdministeredUser| {
        let event = an_event(EventKind::UserCreated, user.id);
        stores.create_administered_user(app, user.clone(), Some(MailKind::Confirm), event).await.unwrap().unwrap_err()
    };
    assert_eq!(create(&new).await, UserConflict::ExternalIdTaken(by_external_id.id));
    new.external_id = Some(an_external_id("2"));
    assert_eq!(create(&new).await, UserConflict::EmailTaken(by_email.id));
    new.email = Some(an_email("c@example.com"));
    assert_eq!(create(&new).await, UserConflict::IdentityTaken(by_identity.id));
    assert_eq!(digest(&fixture).await, before);
    new.identities.pop();
    let event = an_event(EventKind::UserCreated, new.id);
    stores.create_administered_user(app, new.clone(), None, event).await.unwrap().unwrap();

    // Another App can have the same values.
    let event = an_event(EventKind::UserCreated, new.id);
    stores.create_administered_user(&an_app(), new, None, event).await.unwrap().unwrap();
}

#[tokio::test]
async fn one_of_several_concurrent_creations_with_one_address_succeeds_and_the_others_name_the_user_who_got_it() {
    let fixture = Fixture::new().await;
    let mut tasks = JoinSet::new();
    for number in 0..20 {
        let (stores, app) = (fixture.stores.clone(), fixture.app.clone());
        tasks.spawn(async move {
            let email = if number % 2 == 0 { "ada@example.com" } else { "Ada@Example.com" };
            let user = NewAdministeredUser { identities: vec![an_identity("1")], ..a_new_user(email) };
            let event = an_event(EventKind::UserCreated, user.id);
            let created = stores.create_administered_user(&app, user, Some(MailKind::Confirm), event).await;
            created.unwrap().map(|user| user.id)
        });
    }
    let (created, refused): (Vec<_>, Vec<_>) = tasks.join_all().await.into_iter().partition(Result::is_ok);
    let [Ok(winner)] = created.as_slice() else { panic!("{created:?}") };
    assert!(refused.iter().all(|outcome| *outcome == Err(UserConflict::EmailTaken(*winner))), "{refused:?}");
    assert_eq!(fixture.count("SELECT count(*) FROM users").await, 1);
    assert_eq!(fixture.count("SELECT count(*) FROM identities").await, 1);
    assert_eq!(fixture.count("SELECT count(*) FROM outbox").await, 1);
    assert_eq!(events(&fixture).await.len(), 1);
}

#[tokio::test]
async fn no_user_is_created_while_the_users_of_the_app_are_being_deleted() {
    let fixture = Fixture::new().await;
    start_app_deletion(&fixture).await;
    let new = a_new_user("ada@example.com");
    let event = an_event(EventKind::UserCreated, new.id);
    assert_unavailable(fixture.stores.create_administered_user(&fixture.app, new, None, event).await);
    let event = an_event(EventKind::Exported, None);
    assert_unavailable(fixture.stores.record_administration(&fixture.app, event).await);
    assert_eq!(fixture.count("SELECT count(*) FROM users").await, 0);
    assert!(events(&fixture).await.is_empty());
}

#[tokio::test]
async fn created_by_distinguishes_registrations_from_logins_with_a_provider() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    let registered = crate::stores::a_new_user("ada@example.com");
    stores.create_user(app, registered.clone(), None).await.unwrap();
    assert_eq!(read(&fixture, registered.id).await.created_by, CreatedBy::Registration);

    let id = a_user_id();
    let federated = NewFederatedUser {
        id,
        email: Some(an_email("eva@example.com")),
        pending_email: None,
        name: String::new(),
        created_at: REQUESTED_AT,
        event: an_event(EventKind::Registered, id),
    };
    let identity = NewIdentity {
        authority: AUTHORITY.to_owned(),
        subject: "1".to_owned(),
        provider: "idp".parse().unwrap(),
        email: None,
        at: REQUESTED_AT,
    };
    assert!(stores.create_federated_user(app, federated, identity, None).await.unwrap());
    assert_eq!(read(&fixture, id).await.created_by, CreatedBy::Provider);
}

#[tokio::test]
async fn the_largest_metadata_are_stored_and_read() {
    let fixture = Fixture::new().await;
    // `[0,0,…]` needs the most space in Postgres, and Postgres returns 1e+18 with 19 digits.
    let zeros = vec![0; 4093];
    let powers = vec![1e18; 1364];
    for (email, value) in [("a@example.com", json!({ "": zeros })), ("b@example.com", json!({ "": powers }))] {
        assert!((8 * 1024 - 5..=8 * 1024).contains(&value.to_string().len()), "{}", value.to_string().len());
        let new = NewAdministeredUser { metadata: Some(metadata(value)), ..a_new_user(email) };
        let user = create(&fixture, new.clone()).await;
        let length = |user: &super::AdminUser| {
            let metadata: Value = serde_json::from_str(user.metadata.as_ref().unwrap().as_json().get()).unwrap();
            metadata[""].as_array().unwrap().len()
        };
        assert!([4093, 1364].contains(&length(&user)));
        assert_eq!(length(&read(&fixture, new.id).await), length(&user));
    }
}
