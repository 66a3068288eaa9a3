//! List, create, read, change and delete users; sessions, mails and identities.

use http::{Method, StatusCode};
use latchkey_tests::{
    builders::Provider,
    passwords::{NEW_PASSWORD, PASSWORD},
};
use serde_json::{Value, json};

use super::AdministrationTest;
use crate::support::app;

const EMAIL: &str = "ada@example.com";

#[tokio::test]
async fn a_user_is_created_logs_in_and_is_disabled_enabled_and_deleted() {
    let test = AdministrationTest::start().await;
    let (admin, client, app) = (test.admin(), test.test_app.client(), test.test_app.id());
    let body = json!({
        "email": "Ada@Example.com", "email_verified": true, "name": "Ada", "password": PASSWORD,
        "external_id": "crm:1", "metadata": { "plan": "pro" },
    });
    let created = admin.post("users", &body).await.expect(StatusCode::OK);
    assert_eq!(created.header("etag"), Some("\"1\""));
    assert_eq!(created.header("cache-control"), Some("no-store"));
    let id = created.string("id").to_owned();
    let expected = json!({
        "id": id, "local_id": id, "email": "Ada@Example.com", "email_verified": true, "pending_email": null,
        "name": "Ada", "state": "active", "has_password": true, "password_algorithm": "argon2id",
        "external_id": "crm:1", "metadata": { "plan": "pro" }, "created_by": "administrator",
        "created_at": created.integer("created_at"), "last_signed_in_at": null, "version": 1, "identities": [],
    });
    assert_eq!(created.body, expected);
    let session = client.authenticate(app, EMAIL, PASSWORD).await;
    let path = format!("users/{id}");
    let read = admin.get(&path).await.expect(StatusCode::OK);
    assert!(read.integer("last_signed_in_at") >= created.integer("created_at"));
    assert_eq!(read.integer("version"), 1, "a login does not change the version");

    let disabled = admin.patch(&path, &json!({ "disabled": true })).await.expect(StatusCode::OK);
    assert_eq!((disabled.string("state"), disabled.header("etag")), ("disabled", Some("\"2\"")));
    session.get("user").await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    client.login(app, EMAIL, PASSWORD).await.expect_error(StatusCode::FORBIDDEN, "user_disabled");
    let again = admin.patch(&path, &json!({ "disabled": true })).await.expect(StatusCode::OK);
    assert_eq!(again.integer("version"), 2, "nothing changed");
    admin.patch(&path, &json!({ "disabled": false })).await.expect(StatusCode::OK);
    client.login(app, EMAIL, PASSWORD).await.expect(StatusCode::OK);

    admin.delete(&path).await.expect(StatusCode::OK);
    admin.delete(&path).await.expect_error(StatusCode::NOT_FOUND, "not_found");
    admin.get(&path).await.expect_error(StatusCode::NOT_FOUND, "not_found");
    client.login(app, EMAIL, PASSWORD).await.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");

    let events = admin.get(&format!("events?user={id}")).await.expect(StatusCode::OK);
    let events = events.body["events"].as_array().unwrap().clone();
    let kinds: Vec<_> = events.iter().map(|event| event["kind"].as_str().unwrap()).collect();
    let expected =
        ["user_deleted", "logged_in", "user_enabled", "login_refused", "user_disabled", "logged_in", "user_created"];
    let without_refusals: Vec<_> = expected.into_iter().filter(|kind| *kind != "login_refused").collect();
    assert_eq!(kinds, without_refusals);
    let actor = json!({ "namespace": "shop", "name": "runs" });
    assert_eq!(events[0]["detail"], json!({ "actor": actor }));
    assert_eq!(events[3]["detail"], json!({ "actor": actor, "fields": ["disabled"] }));
    assert_eq!(events[0]["ip"], Value::Null);
}

#[tokio::test]
async fn a_change_applies_only_to_the_version_in_if_match() {
    let test = AdministrationTest::start().await;
    let admin = test.admin();
    let path = format!("users/{}", admin.create(&json!({ "email": EMAIL })).await);
    let change = |tag: &str, name: &str| {
        admin.send(admin.request(Method::PATCH, &path).header("If-Match", tag).json(&json!({ "name": name })))
    };
    for stale in ["\"2\"", "W/\"1\"", "1", "\"1\", \"2\"", "\"x\""] {
        change(stale, "Grace").await.expect_error(StatusCode::PRECONDITION_FAILED, "version_conflict");
    }
    let changed = change("\"1\"", "Grace").await.expect(StatusCode::OK);
    assert_eq!((changed.string("name"), changed.header("etag")), ("Grace", Some("\"2\"")));
    change("*", "Ada").await.expect(StatusCode::OK);
    let deletion = admin.request(Method::DELETE, &path).header("If-Match", "\"1\"");
    admin.send(deletion).await.expect_error(StatusCode::PRECONDITION_FAILED, "version_conflict");
    let deletion = admin.request(Method::DELETE, &path).header("If-Match", "\"3\"");
    admin.send(deletion).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn a_new_address_ends_the_sessions_and_notifies_the_former_address() {
    let test = AdministrationTest::start().await;
    let (admin, client, app) = (test.admin(), test.test_app.client(), test.test_app.id());
    let body = json!({ "email": EMAIL, "email_verified": true, "password": PASSWORD });
    let path = format!("users/{}", admin.create(&body).await);
    let session = client.authenticate(app, EMAIL, PASSWORD).await;
    // The canonical address is the same, so the session continues.
    let respelled = admin.patch(&path, &json!({ "email": "Ada@example.com" })).await.expect(StatusCode::OK);
    assert_eq!((respelled.string("email"), &respelled.body["email_verified"]), ("Ada@example.com", &json!(true)));
    session.get("user").await.expect(StatusCode::OK);
    let moved = admin.patch(&path, &json!({ "email": "grace@example.com" })).await.expect(StatusCode::OK);
    assert_eq!((moved.string("state"), &moved.body["email_verified"]), ("unverified", &json!(false)));
    session.get("user").await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    let notice = test.test_app.mail("Ada@example.com", 1).await;
    assert_eq!(notice.code, None);
    let verified = admin.patch(&path, &json!({ "email_verified": true })).await.expect(StatusCode::OK);
    assert_eq!(verified.string("state"), "active");
    client.login(app, "grace@example.com", PASSWORD).await.expect(StatusCode::OK);
    client.login(app, EMAIL, PASSWORD).await.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");
}

#[tokio::test]
async fn verifying_a_contested_account_removes_its_password() {
    let test = AdministrationTest::start().await;
    let (admin, client, app) = (test.admin(), test.test_app.client(), test.test_app.id());
    test.test_app.register(EMAIL).await;
    client.register(app, "Mallory", EMAIL, NEW_PASSWORD).await.expect(StatusCode::OK);
    let listed = admin.get("users?state=contested").await.expect(StatusCode::OK);
    let user = &listed.body["users"][0];
    assert_eq!((&user["state"], &user["has_password"]), (&json!("contested"), &json!(true)));
    assert_eq!(user.get("identities"), None);
    let path = format!("users/{}", user["id"].as_str().unwrap());
    let verified = admin.patch(&path, &json!({ "email_verified": true })).await.expect(StatusCode::OK);
    assert_eq!((verified.string("state"), &verified.body["has_password"]), ("active", &json!(false)));
    for password in [PASSWORD, NEW_PASSWORD] {
        client.login(app, EMAIL, password).await.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");
    }
}

#[tokio::test]
async fn a_conflict_names_the_other_user() {
    let test = AdministrationTest::start().await;
    let admin = test.admin();
    let ada = admin.create(&json!({ "email": EMAIL, "external_id": "1" })).await;
    let grace = admin.create(&json!({ "email": "grace@example.com", "external_id": "2" })).await;
    let conflict = |response: latchkey_tests::client::ApiResponse, error: &str| {
        let response = response.expect_error(StatusCode::CONFLICT, error);
        assert_eq!(response.string("user_id"), ada);
    };
    conflict(admin.post("users", &json!({ "email": "ADA@example.com" })).await, "email_taken");
    // If both values are taken, the external id is reported.
    conflict(admin.post("users", &json!({ "email": EMAIL, "external_id": "1" })).await, "external_id_taken");
    let path = format!("users/{grace}");
    conflict(admin.patch(&path, &json!({ "email": EMAIL, "name": "Grace" })).await, "email_taken");
    conflict(admin.patch(&path, &json!({ "external_id": "1" })).await, "external_id_taken");
    for null in [json!({ "email": null }), json!({ "name": null })] {
        admin.patch(&path, &null).await.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    }
    let unchanged = admin.get(&path).await.expect(StatusCode::OK);
    assert_eq!((unchanged.string("name"), unchanged.integer("version")), ("", 1), "nothing has changed");
}

#[tokio::test]
async fn an_error_names_the_invalid_fields() {
    let test = AdministrationTest::start_with(app().set("/allowedEmailDomains", json!(["example.com"])), &[]).await;
    let admin = test.admin();
    let invalid = async |body: Value| {
        let response = admin.post("users", &body).await.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
        let fields = response.body["fields"].as_array().unwrap().iter();
        fields
            .map(|field| format!("{}: {}", field["field"].as_str().unwrap(), field["code"].as_str().unwrap()))
            .collect::<Vec<_>>()
    };
    assert_eq!(invalid(json!({})).await, ["email: missing"]);
    assert_eq!(invalid(json!({ "email": "ada@evil.example" })).await, ["email: domain_not_allowed"]);
    assert_eq!(invalid(json!({ "email": EMAIL, "email_verified": "yes" })).await, ["email_verified: invalid"]);
    assert_eq!(invalid(json!({ "email": EMAIL, "mail": "confirm", "email_verified": true })).await, ["mail: invalid"]);
    assert_eq!(invalid(json!({ "email": EMAIL, "metadata": "x" })).await, ["metadata: invalid"]);
    assert_eq!(invalid(json!({ "email": EMAIL, "metadata": { "a": "x".repeat(8192) } })).await, ["metadata: too_long"]);
    let identities = json!([{ "provider": "nobody", "subject": "1" }, { "provider": "nobody", "color": "red" }, 7]);
    assert_eq!(
        invalid(json!({ "email": EMAIL, "identities": identities })).await,
        [
            "identities[0].provider: unknown_provider",
            "identities[1].subject: missing",
            "identities[1].provider: unknown_provider",
            "identities[1].color: invalid",
            "identities[2]: invalid",
        ]
    );
    let many: Vec<_> = (0..200).map(|number| (format!("unknown{number}"), Value::Null)).collect();
    assert_eq!(invalid(Value::Object(many.into_iter().collect())).await.len(), 20, "at most 20 fields are named");
    let weak = admin.post("users", &json!({ "email": EMAIL, "password": "12345678" })).await;
    weak.expect_error(StatusCode::BAD_REQUEST, "weak_password");
    let listed = admin.get("users").await.expect(StatusCode::OK);
    assert_eq!(listed.body, json!({ "users": [] }), "no refused call has created a user");
}

#[tokio::test]
async fn users_are_listed_in_pages_and_found_by_filters() {
    let test = AdministrationTest::start().await;
    let admin = test.admin();
    let mut ids = Vec::new();
    for number in 0..7 {
        let body = json!({
            "email": format!("User{number}@example.com"), "name": format!("Name {number}"),
            "external_id": format!("crm:{number}"), "email_verified": number % 2 == 0, "disabled": number == 6,
        });
        ids.push(admin.create(&body).await);
    }
    let page = async |query: &str| {
        let response = admin.get(&format!("users?{query}")).await.expect(StatusCode::OK);
        let users = response.body["users"].as_array().unwrap().iter();
        let found: Vec<String> = users.map(|user| user["id"].as_str().unwrap().to_owned()).collect();
        (found, response.body["next"].as_str().map(str::to_owned))
    };
    let all_pages = async |query: &str| {
        let (mut found, mut next) = page(&format!("{query}&limit=3")).await;
        let mut pages = 1;
        while let Some(cursor) = next {
            let (more, following) = page(&format!("{query}&limit=3&cursor={cursor}")).await;
            found.extend(more);
            next = following;
            pages += 1;
        }
        (found, pages)
    };
    let mut descending = ids.clone();
    descending.reverse();
    for query in ["order=asc", "email_prefix=USER", "name_prefix=nAmE"] {
        assert_eq!(all_pages(query).await, (ids.clone(), 3), "{query}");
    }
    assert_eq!(all_pages("order=desc").await, (descending, 3));
    let one = |number: usize| (vec![ids[number].clone()], None);
    assert_eq!(page("email=user3%40EXAMPLE.com").await, one(3));
    assert_eq!(page("external_id=crm%3A4").await, one(4));
    assert_eq!(page("state=disabled").await, one(6));
    assert_eq!(page("state=unverified").await, (vec![ids[1].clone(), ids[3].clone(), ids[5].clone()], None));
    assert_eq!(page("name_prefix=name%205").await, one(5));
    assert_eq!(page("email_prefix=%25").await, (Vec::new(), None), "% is no wildcard");
    let (_, next) = page("limit=3").await;
    let other = admin.get(&format!("users?order=desc&cursor={}", next.unwrap())).await;
    let other = other.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    assert_eq!(other.body["fields"][0]["field"], "cursor");
}

#[tokio::test]
async fn the_sessions_of_a_user_are_listed_and_ended() {
    let test = AdministrationTest::start().await;
    let (admin, client, app) = (test.admin(), test.test_app.client(), test.test_app.id());
    let body = json!({ "email": EMAIL, "email_verified": true, "password": PASSWORD });
    let path = format!("users/{}", admin.create(&body).await);
    let first = client.authenticate(app, EMAIL, PASSWORD).await;
    let second = client.authenticate(app, EMAIL, PASSWORD).await;
    let third = client.authenticate(app, EMAIL, PASSWORD).await;
    let own = first.get("sessions").await.expect(StatusCode::OK);
    let own = own.body["sessions"].as_array().unwrap();
    let first_id = own.iter().find(|session| session["current"] == true).unwrap()["id"].as_str().unwrap();
    let listed = admin.get(&format!("{path}/sessions")).await.expect(StatusCode::OK);
    let sessions = listed.body["sessions"].as_array().unwrap();
    assert_eq!(sessions.len(), 3);
    assert!(sessions.iter().all(|session| session.get("current").is_none()));
    admin.delete(&format!("{path}/sessions/{first_id}")).await.expect(StatusCode::OK);
    let again = admin.delete(&format!("{path}/sessions/{first_id}")).await;
    again.expect_error(StatusCode::NOT_FOUND, "not_found");
    first.get("user").await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    second.get("user").await.expect(StatusCode::OK);
    admin.delete(&format!("{path}/sessions")).await.expect(StatusCode::OK);
    for session in [second, third] {
        session.get("user").await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    }
    client.authenticate(app, EMAIL, PASSWORD).await.get("user").await.expect(StatusCode::OK);
}

#[tokio::test]
async fn a_mail_is_queued_only_if_the_user_can_use_it() {
    let test = AdministrationTest::start().await;
    let (admin, client, app) = (test.admin(), test.test_app.client(), test.test_app.id());
    let id = admin.create(&json!({ "email": EMAIL, "mail": "confirm" })).await;
    let confirm = test.test_app.code(EMAIL, 1).await;
    let mails = format!("users/{id}/mails");
    let queued = async |mail: &str| {
        admin.post(&mails, &json!({ "mail": mail })).await.expect(StatusCode::OK).body["queued"].as_bool().unwrap()
    };
    client.confirm(app, &confirm).await.expect(StatusCode::OK);
    assert!(!queued("confirm").await, "there is nothing to confirm");
    assert!(queued("reset").await);
    let reset = test.test_app.code(EMAIL, 2).await;
    client.confirm_password(app, EMAIL, &reset, PASSWORD).await.expect(StatusCode::OK);
    client.login(app, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    admin.patch(&format!("users/{id}"), &json!({ "disabled": true })).await.expect(StatusCode::OK);
    assert!(!queued("reset").await, "the user is disabled");
    admin.post(&mails, &json!({})).await.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    admin.post(&mails, &json!({ "mail": "spam" })).await.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    let events = admin.get(&format!("events?user={id}&kind=mail_requested")).await.expect(StatusCode::OK);
    assert_eq!(events.body["events"].as_array().unwrap().len(), 1);
    assert_eq!(events.body["events"][0]["detail"]["mail"], "reset");
}

#[tokio::test]
async fn an_invited_user_can_set_a_password_although_sign_up_is_closed() {
    let test = AdministrationTest::start_with(app().set("/signUp", "Closed"), &[]).await;
    let (admin, client, app) = (test.admin(), test.test_app.client(), test.test_app.id());
    client.register(app, "Ada", EMAIL, PASSWORD).await.expect_error(StatusCode::FORBIDDEN, "registration_disabled");
    let both = json!({ "email": EMAIL, "mail": "invitation", "password": PASSWORD });
    admin.post("users", &both).await.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    let invited = json!({ "email": EMAIL, "name": "Ada", "mail": "invitation" });
    let id = admin.create(&invited).await;
    let code = test.test_app.code(EMAIL, 1).await;
    client.confirm_password(app, EMAIL, &code, PASSWORD).await.expect(StatusCode::OK);
    client.login(app, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let user = admin.get(&format!("users/{id}")).await.expect(StatusCode::OK);
    assert_eq!((user.string("state"), &user.body["email_verified"]), ("active", &json!(true)));
    let again = admin.post(&format!("users/{id}/mails"), &json!({ "mail": "invitation" })).await;
    assert_eq!(again.expect(StatusCode::OK).body, json!({ "queued": false }), "the user has a password");
    let before = test.test_app.settled_mail_count(EMAIL).await;
    admin.post("users", &invited).await.expect_error(StatusCode::CONFLICT, "email_taken");
    assert_eq!(test.test_app.settled_mail_count(EMAIL).await, before, "a repeated call sends no mail");
}

#[tokio::test]
async fn mails_that_administrators_request_have_a_separate_limit() {
    let test = AdministrationTest::start_with(app().limit("mailsPerRecipient", &[(2, 600)]), &[]).await;
    let (admin, client, app) = (test.admin(), test.test_app.client(), test.test_app.id());
    let id = admin.create(&json!({ "email": EMAIL, "email_verified": true })).await;
    for nth in 1..=2 {
        admin.post(&format!("users/{id}/mails"), &json!({ "mail": "reset" })).await.expect(StatusCode::OK);
        test.test_app.code(EMAIL, nth).await;
    }
    let limited = admin.post(&format!("users/{id}/mails"), &json!({ "mail": "reset" })).await;
    limited.expect_error(StatusCode::TOO_MANY_REQUESTS, "rate_limited");
    client.forgot_password(app, EMAIL).await.expect(StatusCode::OK);
    test.test_app.code(EMAIL, 3).await;
}

#[tokio::test]
async fn the_last_identity_of_a_user_without_an_address_cannot_be_removed() {
    let (github, gitlab) = (Provider::new("github", "github"), Provider::new("gitlab", "gitlab"));
    let app = app().set("/allowUsersWithoutEmail", true);
    let test = AdministrationTest::start_with(app, &[github, gitlab]).await;
    let admin = test.admin();
    let identities = json!([{ "provider": "github", "subject": "1" }, { "provider": "gitlab", "subject": "2" }]);
    let created = admin.post("users", &json!({ "identities": identities })).await.expect(StatusCode::OK);
    let id = created.string("id");
    assert_eq!(created.body["identities"][0]["subject"], "1");
    assert!(created.body["identities"][0]["authority"].as_str().unwrap().starts_with("github:https://"));
    let taken = admin.post("users", &json!({ "identities": [{ "provider": "github", "subject": "1" }] })).await;
    assert_eq!(taken.expect_error(StatusCode::CONFLICT, "identity_taken").string("user_id"), id);
    let found = admin.get("users?subject=2&provider=gitlab").await.expect(StatusCode::OK);
    assert_eq!(found.body["users"][0]["id"], id);

    let path = |provider: &str| format!("users/{id}/identities/{provider}");
    admin.delete(&path("github")).await.expect(StatusCode::OK);
    admin.delete(&path("github")).await.expect_error(StatusCode::NOT_FOUND, "not_found");
    admin.delete(&path("gitlab")).await.expect_error(StatusCode::CONFLICT, "last_identity");
    admin.patch(&format!("users/{id}"), &json!({ "email": EMAIL })).await.expect(StatusCode::OK);
    admin.delete(&path("gitlab")).await.expect(StatusCode::OK);
}
