//! The user's own account: how a user reads the account, changes the name and deletes the account, and the response of
//! *userinfo* (specification: Accounts, Deletion of an account).

use std::sync::Arc;

use http::{Method, StatusCode};
use latchkey_tests::{
    builders::App,
    eventually,
    passwords::{NEW_PASSWORD, PASSWORD, WRONG_PASSWORD},
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::Barrier,
};

use crate::{
    fault_support::unlimited_app,
    support::{MAIL_LIMIT, NAME, TestApp, WRONG_CODE, app, claims_of, read_all, status_of},
    user_session::UserSession,
};

const EMAIL: &str = "ada@example.com";

fn field_names(body: &Value) -> Vec<&str> {
    body.as_object().expect("an object").keys().map(String::as_str).collect()
}

// === request bodies and tokens ===

/// Sends the head of a request to change the name, with `Expect: 100-continue`. Does not send the body. `authorization`
/// is a complete header line, or empty.
async fn send_head_expecting_continue(test_app: &TestApp, authorization: &str, body: &str) -> TcpStream {
    let mut stream = TcpStream::connect(test_app.stack.server().public).await.unwrap();
    let (path, length) = (format!("/v1/{}/user", test_app.id()), body.len());
    let head = format!(
        "PATCH {path} HTTP/1.1\r\nHost: latchkey.test\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\
         {authorization}Expect: 100-continue\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream
}

#[tokio::test]
async fn a_body_is_not_read_without_a_token_and_not_used_after_the_session_has_ended() {
    let test_app = TestApp::start().await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    let body = json!({ "name": "Grace" }).to_string();
    for authorization in ["", "Authorization: Bearer a.b.c\r\n"] {
        let response = read_all(&mut send_head_expecting_continue(&test_app, authorization, &body).await).await;
        assert_eq!(status_of(&response), Some(401), "{response}");
    }

    let authorization = format!("Authorization: Bearer {}\r\n", owner.signed_in.token());
    let mut stream = send_head_expecting_continue(&test_app, &authorization, &body).await;
    let mut interim = [0; 25];
    stream.read_exact(&mut interim).await.unwrap();
    assert_eq!(&interim, b"HTTP/1.1 100 Continue\r\n\r\n");
    owner.signed_in.post("logout", &json!({})).await.expect(StatusCode::OK);
    stream.write_all(body.as_bytes()).await.unwrap();
    let response = read_all(&mut stream).await;
    assert_eq!(status_of(&response), Some(401), "{response}");
    assert_eq!(test_app.query_number(&format!("SELECT count(*) FROM users WHERE name = '{NAME}'")).await, 1);
}

// === read ===

#[tokio::test]
async fn a_user_can_read_the_stored_data() {
    let test_app = TestApp::start().await;
    test_app.register(EMAIL).await;
    let owner = test_app.log_in_again(EMAIL).await;
    let response = owner.get_user().await.expect(StatusCode::OK);
    assert_eq!(response.body["email"], EMAIL, "the owner can see an unverified address");
    assert_eq!(response.body["email_verified"], false);

    let code = test_app.code(EMAIL, 1).await;
    owner.signed_in.confirm(&code).await.expect(StatusCode::OK);
    let response = owner.get_user().await.expect(StatusCode::OK);
    assert_eq!(response.header("cache-control"), Some("no-store"));
    let created: i64 = test_app.query_number("SELECT floor(extract(epoch FROM created_at))::bigint FROM users").await;
    assert_eq!(
        response.body,
        json!({
            "id": owner.user,
            "local_id": owner.user,
            "email": EMAIL,
            "email_verified": true,
            "name": NAME,
            "created_at": created,
            "has_password": true,
        })
    );
    let head = owner.signed_in.send(owner.signed_in.request(Method::HEAD, "user")).await.expect(StatusCode::OK);
    assert_eq!(head.text, "");
}

#[tokio::test]
async fn an_account_can_have_no_password_and_no_address() {
    let test_app = TestApp::start().await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    test_app
        .sql("UPDATE users SET password_hash = NULL, email = NULL, email_canonical = NULL, email_verified_at = NULL")
        .await;
    let body = owner.get_user().await.expect(StatusCode::OK).body;
    assert_eq!(
        (&body["email"], &body["email_verified"], &body["has_password"]),
        (&json!(null), &json!(false), &json!(false))
    );
    let body = owner.signed_in.get("userinfo").await.expect(StatusCode::OK).body;
    assert_eq!(field_names(&body), ["email_verified", "name", "sub", "updated_at"]);
}

#[tokio::test]
async fn userinfo_returns_the_claims_of_openid_connect() {
    let test_app = TestApp::start().await;
    test_app.register(EMAIL).await;
    let owner = test_app.log_in_again(EMAIL).await;
    let body = owner.signed_in.get("userinfo").await.expect(StatusCode::OK).body;
    assert_eq!(field_names(&body), ["email_verified", "name", "sub", "updated_at"], "no address before it is verified");
    assert_eq!(body["email_verified"], false);

    owner.signed_in.confirm(&test_app.code(EMAIL, 1).await).await.expect(StatusCode::OK);
    let response = owner.signed_in.get("userinfo").await.expect(StatusCode::OK);
    assert_eq!(response.header("cache-control"), Some("no-store"));
    assert_eq!(response.header("content-type"), Some("application/json"));
    let updated: i64 = test_app.query_number("SELECT floor(extract(epoch FROM updated_at))::bigint FROM users").await;
    assert_eq!(
        response.body,
        json!({ "sub": owner.user, "name": NAME, "email": EMAIL, "email_verified": true, "updated_at": updated })
    );
    let without_token = owner.client.get(&format!("v1/{}/userinfo", test_app.id())).await;
    let without_token = without_token.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    let challenge = without_token.header("www-authenticate").expect("a challenge");
    assert!(challenge.starts_with("Bearer ") && !challenge.contains("error="), "{challenge}");
}

/// A call to each endpoint of the user's own account except `user/identities` and `user/activity`, with a valid body.
fn account_calls() -> [(Method, &'static str, Value); 6] {
    [
        (Method::GET, "user", Value::Null),
        (Method::GET, "userinfo", Value::Null),
        (Method::PATCH, "user", json!({ "name": "Grace" })),
        (Method::POST, "user/password", json!({ "password": NEW_PASSWORD, "current_password": PASSWORD })),
        (Method::POST, "user/email", json!({ "email": "new@example.com", "password": PASSWORD })),
        (Method::DELETE, "user", json!({ "password": PASSWORD })),
    ]
}

async fn call(owner: &UserSession, method: Method, path: &str, body: &Value) -> latchkey_tests::client::ApiResponse {
    let request = owner.signed_in.request(method, path);
    owner.signed_in.send(if body.is_null() { request } else { request.json(body) }).await
}

#[tokio::test]
async fn a_session_in_redis_is_refused_if_its_user_is_deleted_disabled_or_at_a_later_epoch() {
    let test_app = TestApp::start().await;
    for (email, change) in [
        ("ada@example.com", "UPDATE users SET disabled_at = now()"),
        ("grace@example.com", "DELETE FROM users"),
        ("joan@example.com", "UPDATE users SET epoch = epoch + 1"),
    ] {
        let owner = test_app.log_in_new_user(email).await;
        test_app.settled_mail_count(email).await;
        test_app.sql(&format!("{change} WHERE email_canonical = '{email}'")).await;
        let before = test_app.database_checksum().await;
        for (method, path, body) in account_calls() {
            let response = call(&owner, method.clone(), path, &body).await;
            assert_eq!(response.status, StatusCode::UNAUTHORIZED, "{change}: {method} {path}: {}", response.text);
            assert_eq!(response.body["error"], "invalid_token", "{change}: {method} {path}");
        }
        owner.signed_in.verify().await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
        assert_eq!(test_app.database_checksum().await, before, "{change}");
    }
}

#[tokio::test]
async fn the_account_endpoints_need_an_access_token_of_the_app_in_the_header() {
    let (own_app, other_app) = (app(), app());
    let stack = latchkey_tests::stack::Stack::builder().app(&own_app).app(&other_app).start().await;
    let test_app = TestApp { stack, app: own_app };
    let owner = test_app.log_in_new_user(EMAIL).await;
    let before = test_app.database_checksum().await;
    let other_client = owner.client.with_token(other_app.id(), owner.signed_in.token());
    for (method, path, body) in account_calls() {
        let at_other_app = other_client.send(other_client.request(method.clone(), path).json(&body)).await;
        at_other_app.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
        let anonymous = owner.client.request(method.clone(), &format!("v1/{}/{path}", test_app.id())).json(&body);
        let anonymous = owner.client.send(anonymous).await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
        assert!(anonymous.header("www-authenticate").unwrap().starts_with("Bearer"), "{method} {path}");
        let query = format!("v1/{}/{path}?access_token={}", test_app.id(), owner.signed_in.token());
        let query = owner.client.send(owner.client.request(method, &query).json(&body)).await;
        query.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    }
    assert_eq!(test_app.database_checksum().await, before);
    owner.assert_live().await;
}

#[tokio::test]
async fn the_response_to_a_wrong_method_names_the_allowed_methods() {
    let test_app = TestApp::start().await;
    for (path, allow) in [
        ("user", ["DELETE", "GET", "HEAD", "OPTIONS", "PATCH"].as_slice()),
        ("userinfo", &["GET", "HEAD", "OPTIONS"]),
        ("user/password", &["OPTIONS", "POST"]),
        ("user/email", &["OPTIONS", "POST"]),
    ] {
        let client = test_app.client();
        let response = client.send(client.request(Method::PUT, &format!("v1/{}/{path}", test_app.id()))).await;
        let response = response.expect_error(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed");
        let mut allowed: Vec<&str> = response.header("allow").unwrap().split(", ").collect();
        allowed.sort_unstable();
        assert_eq!(allowed, allow, "{path}");
    }
}

// === rename ===

#[tokio::test]
async fn a_new_name_is_trimmed_and_appears_in_every_later_token() {
    let test_app = TestApp::start().await;
    test_app.register(EMAIL).await;
    // A user with an unverified email address can change the name.
    let owner = test_app.log_in_again(EMAIL).await;
    let other = test_app.log_in_again(EMAIL).await;
    let renamed = owner.rename_user("  Grace \u{1f680} Hopper\t").await.expect(StatusCode::OK);
    assert_eq!(renamed.body["name"], "Grace \u{1f680} Hopper");
    assert_eq!(renamed.body, owner.get_user().await.body, "the response is the user");
    for owner in [owner, other] {
        let refreshed = owner.refresh().await.expect(StatusCode::OK);
        let claims = claims_of(refreshed.string("access_token"));
        assert_eq!((&claims["name"], &claims["sub"]), (&json!("Grace \u{1f680} Hopper"), &json!(owner.user)));
    }
    let profiles = test_app.query_number("SELECT count(*) FROM outbox WHERE kind = 'profile'").await;
    assert_eq!(profiles, 0, "the request updated the sessions itself");
}

#[tokio::test]
async fn renaming_is_counted_in_logins_per_client() {
    let test_app = TestApp::start_with(app().limit("loginsPerClient", &[(3, 600)])).await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    for name in ["Grace", "Ada"] {
        owner.rename_user(name).await.expect(StatusCode::OK);
    }
    let before = test_app.database_checksum().await;
    owner.rename_user("Barbara").await.expect_error(StatusCode::TOO_MANY_REQUESTS, "rate_limited");
    assert_eq!(test_app.database_checksum().await, before);
}

#[tokio::test]
async fn an_invalid_name_is_refused_and_changes_nothing() {
    let test_app = TestApp::start().await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    let before = test_app.database_checksum().await;
    for (body, code) in [
        (json!({}), "missing"),
        (json!({ "nickname": "Grace" }), "missing"),
        (json!({ "name": "" }), "empty"),
        (json!({ "name": " \t " }), "empty"),
        (json!({ "name": null }), "invalid"),
        (json!({ "name": 5 }), "invalid"),
        (json!({ "name": ["Grace"] }), "invalid"),
        (json!({ "name": "a\u{0}b" }), "invalid"),
        (json!({ "name": "a\r\nBcc: b" }), "invalid"),
        (json!({ "name": "x".repeat(201) }), "too_long"),
    ] {
        let response = owner.send(Method::PATCH, "user", &body).await;
        let response = response.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
        assert_eq!(
            response.body["fields"],
            json!([{ "field": "name", "code": code, "message": response.body["fields"][0]["message"] }])
        );
    }
    for body in ["", "[]", "\"Grace\"", "{\"name\": \"a\", \"name\": \"b\"}", "{\"name\": \"\u{fffd}", "nonsense"] {
        let request = owner.signed_in.request(Method::PATCH, "user").header("content-type", "application/json");
        let response = owner.signed_in.send(request.body(body)).await;
        response.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    }
    let request = owner.signed_in.request(Method::PATCH, "user").header("content-type", "text/plain");
    let response = owner.signed_in.send(request.body("{\"name\": \"Grace\"}")).await;
    response.expect_error(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type");
    assert_eq!(test_app.database_checksum().await, before);
    assert_eq!(owner.get_user().await.body["name"], NAME);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_have_the_stored_name_after_concurrent_renames() {
    let test_app =
        TestApp::from_builder(unlimited_app("names"), latchkey_tests::stack::Stack::builder().servers(2)).await;
    let owner = Arc::new(test_app.log_in_new_user(EMAIL).await);
    let start = Arc::new(Barrier::new(6));
    let tasks: Vec<_> = (0..6)
        .map(|number| {
            let (owner, start) = (owner.clone(), start.clone());
            let client = test_app.stack.client_of(number % 2).with_token(test_app.id(), owner.signed_in.token());
            tokio::spawn(async move {
                start.wait().await;
                let body = json!({ "name": format!("Name {number}") });
                client.send(client.request(Method::PATCH, "user").json(&body)).await.expect(StatusCode::OK)
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("no call panics");
    }
    let stored = owner.get_user().await.expect(StatusCode::OK);
    let refreshed = owner.refresh().await.expect(StatusCode::OK);
    assert_eq!(claims_of(refreshed.string("access_token"))["name"], stored.body["name"]);
}

// === delete ===

#[tokio::test]
async fn deleting_an_account_deletes_all_its_data() {
    let test_app = TestApp::start().await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    let other = test_app.log_in_again(EMAIL).await;
    let bystander = test_app.log_in_new_user("grace@example.com").await;
    test_app
        .sql(&format!(
            "INSERT INTO identities (app_id, authority, subject, user_id, provider, linked_at)
         SELECT app_id, 'https://id.example', id::text, id, 'id', now() FROM users;
         INSERT INTO outbox (app_id, kind, user_id, requested_at, dead_at)
         SELECT app_id, 'reset', id, now(), now() FROM users WHERE id = '{}'",
            owner.user
        ))
        .await;
    let reset = test_app.request_reset_code(EMAIL, 2).await;
    test_app.make_login_stale(&owner).await;

    let response = owner.delete_user(&json!({ "password": PASSWORD })).await.expect(StatusCode::OK);
    assert_eq!(response.body, json!({}));
    owner.assert_ended().await;
    other.assert_ended().await;
    let login = test_app.client().login(test_app.id(), EMAIL, PASSWORD).await;
    login.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");
    let late_reset = test_app.client().confirm_password(test_app.id(), EMAIL, &reset, NEW_PASSWORD).await;
    late_reset.expect_error(StatusCode::BAD_REQUEST, "invalid_code");
    let of_user = |table: &str, column: &str| format!("SELECT count(*) FROM {table} WHERE {column} = '{}'", owner.user);
    assert_eq!(test_app.query_number(&of_user("users", "id")).await, 0);
    assert_eq!(test_app.query_number(&of_user("identities", "user_id")).await, 0);
    assert_eq!(test_app.query_number(&of_user("outbox", "user_id")).await, 0, "neither mails nor dead letters");
    assert_eq!(test_app.settled_mail_count(EMAIL).await, 2, "no mail after that");

    // The email address can be registered again, by a new user with another id.
    test_app.register(EMAIL).await;
    let code = test_app.code(EMAIL, 3).await;
    let new_user = test_app.client().confirm(test_app.id(), &code).await.expect(StatusCode::OK);
    assert_ne!(new_user.string("local_id"), owner.user);
    owner.assert_ended().await;
    bystander.assert_live().await;
    assert_eq!(test_app.query_number("SELECT count(*) FROM identities").await, 1);
}

#[tokio::test]
async fn a_deletion_needs_the_password_or_a_recent_login() {
    let test_app = TestApp::start().await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    let before = test_app.database_checksum().await;
    // Even after a recent login, a wrong password is rejected.
    let wrong = owner.delete_user(&json!({ "password": WRONG_PASSWORD })).await;
    let wrong = wrong.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");
    assert!(wrong.header("www-authenticate").unwrap().starts_with("Bearer"));
    test_app.make_login_stale(&owner).await;
    for body in [json!({}), json!({ "current_password": PASSWORD })] {
        let stale = owner.delete_user(&body).await;
        let stale = stale.expect_error(StatusCode::UNAUTHORIZED, "reauthentication_required");
        assert!(stale.header("www-authenticate").unwrap().starts_with("Bearer"));
    }
    let without_body = owner.signed_in.send(owner.signed_in.request(Method::DELETE, "user")).await;
    without_body.expect_error(StatusCode::UNAUTHORIZED, "reauthentication_required");
    for body in [json!({ "password": "" }), json!({ "password": null }), json!({ "password": [PASSWORD] })] {
        owner.delete_user(&body).await.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    }
    assert_eq!(test_app.database_checksum().await, before);
    owner.assert_live().await;

    // A request without a body has the same effect as a request with an empty object.
    let owner = test_app.log_in_again(EMAIL).await;
    let without_body =
        owner.signed_in.send(owner.signed_in.request(Method::DELETE, "user")).await.expect(StatusCode::OK);
    assert_eq!(without_body.body, json!({}));
    owner.assert_ended().await;
}

#[tokio::test]
async fn a_wrong_password_for_a_deletion_counts_as_a_login_failure() {
    let test_app = TestApp::start_with(app().limit("loginFailuresPerClient", &[(3, 600)])).await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    for _ in 0..3 {
        let wrong = owner.delete_user(&json!({ "password": WRONG_PASSWORD })).await;
        wrong.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");
    }
    let limited = owner.delete_user(&json!({ "password": PASSWORD })).await;
    let limited = limited.expect_error(StatusCode::TOO_MANY_REQUESTS, "rate_limited");
    assert!(limited.header("ratelimit-policy").unwrap().contains("loginFailuresPerClient"));
    let login = owner.client.login(test_app.id(), EMAIL, PASSWORD).await;
    login.expect_error(StatusCode::TOO_MANY_REQUESTS, "rate_limited");
    owner.assert_live().await;
}

#[tokio::test]
async fn a_deletion_is_counted_once_in_logins_per_client_even_if_the_epoch_rises_during_the_call() {
    let test_app = TestApp::start_with(app().limit("loginsPerClient", &[(2, 600)])).await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    let body = json!({ "password": PASSWORD });
    test_app.raise_epoch_during(&owner, owner.delete_user(&body)).await.expect(StatusCode::OK);
    assert_eq!(test_app.query_number("SELECT count(*) FROM users").await, 0);
}

#[tokio::test]
async fn a_user_with_an_unverified_address_cannot_delete_the_account_or_change_password_or_address() {
    let test_app = TestApp::start().await;
    test_app.register(EMAIL).await;
    let owner = test_app.log_in_again(EMAIL).await;
    test_app.settled_mail_count(EMAIL).await;
    let before = test_app.database_checksum().await;
    for response in [
        owner.delete_user(&json!({})).await,
        owner.delete_user(&json!({ "password": PASSWORD })).await,
        owner.delete_user(&json!({ "password": WRONG_PASSWORD })).await,
        owner.change_password(Some(PASSWORD), NEW_PASSWORD).await,
        owner.change_password(None, NEW_PASSWORD).await,
        owner.change_address(Some(PASSWORD), "new@example.com").await,
    ] {
        response.expect_error(StatusCode::FORBIDDEN, "email_not_verified");
    }
    assert_eq!(test_app.database_checksum().await, before);
    assert_eq!(test_app.settled_mail_count("new@example.com").await, 0);
    owner.assert_live().await;

    // An account without an email address has nothing to verify, so the user can delete it.
    test_app.sql("UPDATE users SET email = NULL, email_canonical = NULL").await;
    owner.delete_user(&json!({})).await.expect(StatusCode::OK);
    owner.assert_ended().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deletion_that_races_logins_and_refreshes_leaves_no_session() {
    let test_app =
        TestApp::from_builder(unlimited_app("gone"), latchkey_tests::stack::Stack::builder().servers(2)).await;
    for round in 0..6_u64 {
        let email = format!("ada{round}@example.com");
        let owner = Arc::new(test_app.log_in_new_user(&email).await);
        let tab = Arc::new(test_app.log_in_again(&email).await);
        let start = Arc::new(Barrier::new(9));
        let mut tasks = Vec::new();
        for number in 0..8_u64 {
            let (start, tab, app, email) = (start.clone(), tab.clone(), test_app.id().to_owned(), email.clone());
            let client = test_app.stack.client_of(usize::try_from(number % 2).unwrap());
            tasks.push(tokio::spawn(async move {
                start.wait().await;
                tokio::time::sleep(std::time::Duration::from_millis(number * (2 + round))).await;
                if number % 2 == 0 { tab.refresh().await } else { client.login(&app, &email, PASSWORD).await }
            }));
        }
        start.wait().await;
        owner.delete_user(&json!({ "password": PASSWORD })).await.expect(StatusCode::OK);
        for task in tasks {
            let response = task.await.expect("no call panics");
            match response.status {
                StatusCode::OK => {
                    let token = response.body["token"].as_str().or(response.body["access_token"].as_str()).unwrap();
                    test_app.verify(token).await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
                }
                StatusCode::BAD_REQUEST => drop(response.expect_error(StatusCode::BAD_REQUEST, "invalid_grant")),
                _ => drop(response.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials")),
            }
        }
        tab.assert_ended().await;
        assert_eq!(test_app.session_count().await, 0, "in round {round}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_several_concurrent_deletions_succeeds_and_the_others_find_no_user() {
    let test_app =
        TestApp::from_builder(unlimited_app("twice"), latchkey_tests::stack::Stack::builder().servers(2)).await;
    let owner = Arc::new(test_app.log_in_new_user(EMAIL).await);
    let mut tasks = Vec::new();
    for _ in 0..8 {
        let owner = owner.clone();
        tasks.push(tokio::spawn(async move { owner.delete_user(&json!({})).await }));
    }
    let mut deleted = 0;
    for task in tasks {
        let response = task.await.expect("no call panics");
        if response.status == StatusCode::OK {
            deleted += 1;
        } else {
            response.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
        }
    }
    assert_eq!(deleted, 1);
    assert_eq!(test_app.query_number("SELECT count(*) FROM users").await, 0);
}

#[tokio::test]
async fn the_outbox_ends_the_sessions_if_a_server_dies_during_a_deletion() {
    let test_app = TestApp::start().await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    test_app.settled_mail_count(EMAIL).await;
    // The state after a server died between its writes to Postgres and to Redis.
    test_app
        .sql(&format!(
            "INSERT INTO outbox (app_id, kind, user_id, epoch)
         SELECT app_id, 'epoch', id, epoch + 1 FROM users WHERE id = '{0}';
         DELETE FROM users WHERE id = '{0}'; NOTIFY latchkey_outbox",
            owner.user
        ))
        .await;
    let ended = || async { (owner.refresh().await.status == StatusCode::BAD_REQUEST).then_some(()) };
    eventually("the end of the session", MAIL_LIMIT, ended).await;
    owner.assert_ended().await;
    assert_eq!(test_app.session_count().await, 0);
    let code = test_app.client().confirm(test_app.id(), WRONG_CODE).await;
    code.expect_error(StatusCode::BAD_REQUEST, "invalid_code");
}

#[tokio::test]
async fn a_deletion_follows_the_common_rules_for_request_bodies() {
    let test_app = TestApp::start_with(App::new("form")).await;
    let owner = test_app.log_in_new_user(EMAIL).await;
    let before = test_app.database_checksum().await;
    let send = async |content_type: &str, body: String| {
        let request = owner.signed_in.request(Method::DELETE, "user").header("content-type", content_type);
        owner.signed_in.send(request.body(body)).await
    };
    for body in ["[]", "null", "{\"password\": \"a\", \"password\": \"b\"}", "{", "\u{1}"] {
        send("application/json", body.to_owned()).await.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    }
    let large = format!("{{\"password\": \"{}\"}}", "x".repeat(70_000));
    send("application/json", large).await.expect_error(StatusCode::PAYLOAD_TOO_LARGE, "payload_too_large");
    let plain = send("text/plain", "{}".to_owned()).await;
    plain.expect_error(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type");
    assert_eq!(test_app.database_checksum().await, before);
    owner.assert_live().await;
}
