//! Lists of users: their pages and their filters.

use latchkey_server::domain::{
    administration::{UserState, Version},
    audit::EventKind,
    ports::{AuditLog, NewAdministeredIdentity, NewAdministeredUser, Order, SubjectOf, UserAdministration, UserFilter},
    user::{Name, UserId},
};
use latchkey_tests::postgres::{self as test_postgres, Database, Postgres as PostgresServer};
use uuid::Uuid;

use super::{AUTHORITY, Fixture, a_new_user, all_pages, an_event, an_external_id, an_identity, create, read};
use crate::stores::{an_app, an_email, now, stores};

const ASCENDING: UserFilter = UserFilter::All { order: Order::Ascending };
const DESCENDING: UserFilter = UserFilter::All { order: Order::Descending };

async fn create_named(fixture: &Fixture, email: &str, name: &str) -> UserId {
    let name = Some(Name::parse(name).unwrap());
    create(fixture, NewAdministeredUser { name, ..a_new_user(email) }).await.id
}

/// Returns the ids of all users that match the filter, read in pages of two.
async fn ids(fixture: &Fixture, filter: &UserFilter) -> Vec<UserId> {
    all_pages(fixture, filter, 2).await.into_iter().map(|user| user.id).collect()
}

async fn emails(fixture: &Fixture, filter: &UserFilter) -> Vec<String> {
    let users = all_pages(fixture, filter, 2).await;
    users.into_iter().map(|user| user.email.unwrap().as_str().to_owned()).collect()
}

async fn names(fixture: &Fixture, filter: &UserFilter) -> Vec<String> {
    all_pages(fixture, filter, 2).await.into_iter().map(|user| user.name).collect()
}

#[tokio::test]
async fn pages_list_the_users_of_the_app_by_id_in_both_orders() {
    let fixture = Fixture::new().await;
    let mut created = Vec::new();
    for number in 0..6 {
        let identities = vec![an_identity(&number.to_string())];
        let new = NewAdministeredUser { identities, ..a_new_user(&format!("u{number}@example.com")) };
        created.push(create(&fixture, new).await.id);
    }
    let other = a_new_user("u0@example.com");
    let event = an_event(EventKind::UserCreated, other.id);
    fixture.stores.create_administered_user(&an_app(), other, None, event).await.unwrap().unwrap();
    fixture.stores.record(&fixture.app, an_event(EventKind::LoggedIn, created[0])).await;

    created.sort();
    assert_eq!(ids(&fixture, &ASCENDING).await, created);
    for limit in [1, 2, 3, 5, 6, 7, 500] {
        let users = all_pages(&fixture, &ASCENDING, limit).await;
        assert_eq!(users.iter().map(|user| user.id).collect::<Vec<_>>(), created, "{limit}");
        assert!(users.iter().all(|user| user.identities.is_empty() && user.last_signed_in_at.is_none()));
    }
    created.reverse();
    assert_eq!(ids(&fixture, &DESCENDING).await, created);
    let full = fixture.stores.users(&fixture.app, &ASCENDING, None, 6).await.unwrap();
    assert!(full.next.is_none(), "no empty last page follows a full page");
    assert!(fixture.stores.users(&an_app(), &ASCENDING, None, 6).await.unwrap().users.is_empty());
}

#[tokio::test]
async fn a_user_is_found_by_email_address_external_id_and_subject() {
    let fixture = Fixture::new().await;
    let microsoft = |tenant: &str| NewAdministeredIdentity {
        provider: "microsoft".parse().unwrap(),
        authority: format!("https://login.example/{tenant}"),
        subject: "1".to_owned(),
    };
    let ada = NewAdministeredUser {
        external_id: Some(an_external_id("Crm:1")),
        identities: vec![an_identity("1"), microsoft("a"), microsoft("b")],
        ..a_new_user("ada@example.com")
    };
    let ada = create(&fixture, ada).await.id;
    let eva = NewAdministeredUser { identities: vec![microsoft("c")], ..a_new_user("eva@example.com") };
    let eva = create(&fixture, eva).await.id;

    let find = async |filter: UserFilter| ids(&fixture, &filter).await;
    assert_eq!(find(UserFilter::Email(an_email("ADA@example.com"))).await, [ada]);
    assert!(find(UserFilter::Email(an_email("ad@example.com"))).await.is_empty());
    assert_eq!(find(UserFilter::ExternalId(an_external_id("Crm:1"))).await, [ada]);
    assert!(find(UserFilter::ExternalId(an_external_id("crm:1"))).await.is_empty());
    let by_subject = |subject: &str, of: SubjectOf| UserFilter::Subject { subject: subject.to_owned(), of };
    let authority = |authority: &str| SubjectOf::Authority(authority.to_owned());
    let provider = |name: &str| SubjectOf::Provider(name.parse().unwrap());
    assert_eq!(find(by_subject("1", authority(AUTHORITY))).await, [ada]);
    assert_eq!(find(by_subject("1", authority("https://login.example/c"))).await, [eva]);
    assert!(find(by_subject("2", authority(AUTHORITY))).await.is_empty());
    let mut both = [ada, eva];
    both.sort();
    assert_eq!(find(by_subject("1", provider("microsoft"))).await, both);
    assert_eq!(all_pages(&fixture, &by_subject("1", provider("microsoft")), 1).await.len(), 2);
    assert!(find(by_subject("1", provider("google"))).await.is_empty());
}

#[tokio::test]
async fn disabled_has_priority_over_contested_and_contested_over_unverified() {
    let fixture = Fixture::new().await;
    let mut users = Vec::new();
    for number in 0..8 {
        users.push(create(&fixture, a_new_user(&format!("u{number}@example.com"))).await.id);
    }
    let without_address =
        NewAdministeredUser { email: None, identities: vec![an_identity("1")], ..a_new_user("x@example.com") };
    // A user without an email address counts as active, because there is nothing to verify.
    let without_address = create(&fixture, without_address).await.id;
    users.sort();
    let mut active = [&users[6..], &[without_address]].concat();
    active.sort();
    for (number, change) in [
        (0, "disabled_at = now(), contested = true, email_verified_at = NULL"),
        (1, "disabled_at = now(), email_verified_at = NULL"),
        (2, "disabled_at = now()"),
        (3, "contested = true, email_verified_at = NULL"),
        (4, "email_verified_at = NULL"),
        (5, "email_verified_at = NULL"),
    ] {
        fixture.execute(&format!("UPDATE users SET {change} WHERE id = '{}'", users[number])).await;
    }
    for (state, expected) in [
        (UserState::Disabled, &users[..3]),
        (UserState::Contested, &users[3..4]),
        (UserState::Unverified, &users[4..6]),
        (UserState::Active, &active[..]),
    ] {
        assert_eq!(ids(&fixture, &UserFilter::State { state, order: Order::Ascending }).await, expected);
        let mut reversed = expected.to_vec();
        reversed.reverse();
        assert_eq!(ids(&fixture, &UserFilter::State { state, order: Order::Descending }).await, reversed);
        for user in expected {
            assert_eq!(read(&fixture, *user).await.state(), state);
        }
    }
}

#[tokio::test]
async fn email_prefixes_are_compared_and_sorted_by_the_bytes_of_the_canonical_address() {
    let fixture = Fixture::new().await;
    for email in ["Ada@b.example", "ada@a.example", "ada-b@a.example", "ad_a@a.example", "adb@a.example", "z@a.example"]
    {
        create(&fixture, a_new_user(email)).await;
    }
    let found = async |prefix: &str| emails(&fixture, &UserFilter::EmailPrefix(prefix.to_owned())).await;
    assert_eq!(found("ada").await, ["ada-b@a.example", "ada@a.example", "Ada@b.example"]);
    assert_eq!(found("ad_").await, ["ad_a@a.example"], "no wildcard");
    assert_eq!(found("ad").await.len(), 5);
    assert_eq!(found("z@a.example").await, ["z@a.example"]);
    assert!(found("z@a.example1").await.is_empty());
    assert!(found("%").await.is_empty());
}

#[tokio::test]
async fn name_prefixes_ignore_case_and_users_with_the_same_name_are_all_listed() {
    let fixture = Fixture::new().await;
    for (number, name) in ["Ada", "ADA", "ada B", "Adb", "ad%", "ada", "Eva"].into_iter().enumerate() {
        create_named(&fixture, &format!("u{number}@example.com"), name).await;
    }
    let found = async |prefix: &str| names(&fixture, &UserFilter::NamePrefix(prefix.to_owned())).await;
    let ada = found("ada").await;
    let (same, last) = ada.split_at(3);
    assert_eq!(last, ["ada B"]);
    assert!(same.iter().all(|name| name.eq_ignore_ascii_case("ada")), "{same:?}");
    assert_eq!(found("ad%").await, ["ad%"], "no wildcard");
    assert_eq!(found("ad").await.len(), 6);
    assert_eq!(found("").await.len(), 7);
    assert!(found("f").await.is_empty());
}

/// With the locale C, as in the databases of the other tests, Postgres lowers only ASCII letters. So this test creates
/// a database with another locale.
#[tokio::test]
async fn name_prefixes_ignore_the_case_of_all_letters_in_a_database_with_a_unicode_locale() {
    let server = PostgresServer::shared().await;
    let name = format!("u_{:016x}", rand::random::<u64>());
    let create_database = format!("CREATE DATABASE {name} TEMPLATE template0 LC_COLLATE 'C.UTF-8' LC_CTYPE 'C.UTF-8'");
    server.execute("postgres", &create_database).await.unwrap();
    let database = Database { url: server.url(&name, server.addr()), addr: server.addr(), name };
    test_postgres::migrate(&database).unwrap();
    let redis = latchkey_tests::redis::Redis::shared().await.url();
    let fixture = Fixture { stores: stores(&database.url, &redis), app: an_app(), database };
    for (number, name) in ["ÉVA", "éva", "Éx", "Eva", "éz", "日本"].into_iter().enumerate() {
        create_named(&fixture, &format!("u{number}@example.com"), name).await;
    }
    let found = async |prefix: &str| names(&fixture, &UserFilter::NamePrefix(prefix.to_owned())).await;
    assert_eq!(found("év").await.len(), 2);
    assert_eq!(found("é").await[2..], ["Éx", "éz"], "sorted by bytes");
    assert_eq!(found("日").await, ["日本"]);
}

#[tokio::test]
async fn a_user_has_the_time_of_the_newest_login() {
    let fixture = Fixture::new().await;
    let user = create(&fixture, a_new_user("ada@example.com")).await;
    assert_eq!(user.last_signed_in_at, None);
    let newest = now().replace_microsecond(0).unwrap();
    for (kind, age) in [
        (EventKind::LoggedIn, 90),
        (EventKind::LoggedIn, 60),
        (EventKind::LoggedOut, 30),
        (EventKind::PasswordChanged, 10),
    ] {
        let mut event = an_event(kind, user.id);
        event.at = newest - time::Duration::seconds(age);
        fixture.stores.record(&fixture.app, event).await;
    }
    let user = read(&fixture, user.id).await;
    assert_eq!(user.last_signed_in_at, Some(newest - time::Duration::seconds(60)));
    assert_eq!(user.version, Version(1), "a login does not raise the version");
    assert!(fixture.stores.administered_user(&fixture.app, UserId(Uuid::nil())).await.unwrap().is_none());
}
