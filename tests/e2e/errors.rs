//! Errors: one format, a fixed set of codes, and one reason for each code (specification: HTTP API, Errors).

use std::{collections::BTreeSet, time::Duration};

use http::{Method, StatusCode};
use latchkey_tests::{
    builders::App,
    client::ApiResponse,
    passwords::{PASSWORD, WRONG_PASSWORD},
    redis,
    stack::Stack,
};
use serde_json::{Value, json};

use crate::support::{NAME, TestApp, WRONG_CODE, app, post_head, send_raw, status_of};

const EMAIL: &str = "ada@example.com";

/// The errors of the six email endpoints.
const EMAIL_ENDPOINT_ERRORS: [(u16, &str); 18] = [
    (400, "invalid_code"),
    (400, "invalid_request"),
    (400, "weak_password"),
    (401, "invalid_credentials"),
    (401, "invalid_token"),
    (403, "email_not_verified"),
    (403, "registration_disabled"),
    (403, "user_disabled"),
    (404, "app_not_found"),
    (404, "not_found"),
    (405, "method_not_allowed"),
    (408, "invalid_request"),
    (409, "email_taken"),
    (413, "payload_too_large"),
    (415, "unsupported_media_type"),
    (429, "rate_limited"),
    (500, "server_error"),
    (503, "temporarily_unavailable"),
];

/// The errors that none of the six email endpoints returns, including the errors of the administration listener.
const OTHER_ENDPOINT_ERRORS: [&str; 24] = [
    "access_denied",
    "account_link_required",
    "external_id_taken",
    "identity_taken",
    "invalid_client",
    "invalid_grant",
    "invalid_provider_token",
    "invalid_request_uri",
    "invalid_scope",
    "invalid_state",
    "last_identity",
    "origin_not_allowed",
    "provider_error",
    "provider_not_found",
    "reauthentication_required",
    "redirect_url_not_allowed",
    "registration_not_supported",
    "request_not_supported",
    "request_uri_not_supported",
    "too_many_groups",
    "unmet_authentication_requirements",
    "unsupported_grant_type",
    "unsupported_response_type",
    "version_conflict",
];

/// Checks the format of an error and records it.
fn record_error(seen: &mut BTreeSet<(u16, String)>, response: &ApiResponse) {
    let error = response.string("error");
    let names: BTreeSet<&str> = response.body.as_object().expect("an object").keys().map(String::as_str).collect();
    let allowed = BTreeSet::from(["error", "error_description", "fields", "request_id"]);
    assert!(names.is_subset(&allowed), "{}", response.text);
    assert!(!response.string("error_description").is_empty(), "{}", response.text);
    assert_eq!(response.header("x-request-id"), Some(response.string("request_id")), "{}", response.text);
    assert_eq!(response.header("x-content-type-options"), Some("nosniff"), "{}", response.text);
    assert!(response.header("content-type").expect("a type").starts_with("application/json"), "{}", response.text);
    let has_fields = response.body.get("fields").is_some();
    assert!(!has_fields || ["invalid_request", "weak_password"].contains(&error), "{}", response.text);
    for field in response.body["fields"].as_array().into_iter().flatten() {
        assert!(["field", "code", "message"].iter().all(|name| field[name].is_string()), "{}", response.text);
    }
    match response.status.as_u16() {
        401 => assert!(response.header("www-authenticate").is_some_and(|challenge| challenge.starts_with("Bearer"))),
        405 => assert!(response.header("allow").is_some()),
        429 | 503 => {
            assert!(response.header("retry-after").is_some_and(|wait| wait.parse::<u64>().is_ok_and(|wait| wait >= 1)))
        }
        _ => {}
    }
    seen.insert((response.status.as_u16(), error.to_owned()));
}

#[tokio::test]
async fn every_error_of_the_six_endpoints_has_the_same_format() {
    let limited = app().limit("codesPerClient", &[(3, 3600)]);
    let revealing = app().set("/enumerationProtection", "Off").set("/requireVerifiedEmail", true);
    let closed = app().set("/signUp", "Closed");
    let builder = Stack::builder().app(&limited).app(&revealing).app(&closed).own_redis(redis::Options::for_tests());
    let test_app = TestApp { stack: builder.start().await, app: limited };
    let (id, client) = (test_app.id(), test_app.client());
    let mut seen = BTreeSet::new();
    let mut record = |response: ApiResponse| record_error(&mut seen, &response);

    // The head of this request is incomplete. While the server waits for the rest of the head, the test sends the other
    // requests.
    let unfinished = tokio::spawn(send_raw(test_app.stack.server().public, post_head(&test_app.email_path("login"))));

    record(client.post(&test_app.email_path("login"), &json!({})).await);
    record(client.register(id, NAME, EMAIL, "password").await);
    record(client.login(id, EMAIL, PASSWORD).await);
    record(client.with_token(id, "x").verify().await);
    record(client.register(closed.id(), NAME, EMAIL, PASSWORD).await);
    record(client.login("nowhere", EMAIL, PASSWORD).await);
    record(client.post(&test_app.email_path("nothing"), &json!({})).await);
    record(client.get(&test_app.email_path("login")).await);
    let large = client.request(Method::POST, &test_app.email_path("login")).header("content-type", "application/json");
    record(client.send(large.body(" ".repeat(64 * 1024 + 1))).await);
    record(client.send(client.request(Method::POST, &test_app.email_path("login")).body("{}")).await);

    client.register(revealing.id(), NAME, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    record(client.login(revealing.id(), EMAIL, PASSWORD).await);
    let code = test_app.code(EMAIL, 1).await;
    client.confirm(revealing.id(), &code).await.expect(StatusCode::OK);
    record(client.register(revealing.id(), NAME, EMAIL, PASSWORD).await);
    test_app.sql("UPDATE users SET disabled_at = now()").await;
    record(client.login(revealing.id(), EMAIL, PASSWORD).await);
    for _ in 0..4 {
        record(client.confirm(id, WRONG_CODE).await);
    }

    test_app.sql("ALTER TABLE users RENAME TO elsewhere").await;
    let server_error = client.login(id, EMAIL, PASSWORD).await;
    assert_eq!(server_error.body["request_id"].as_str(), server_error.header("x-request-id"));
    for secret in ["users", "relation", "SQL", "sqlx", "select"] {
        assert!(!server_error.text.to_lowercase().contains(&secret.to_lowercase()), "{}", server_error.text);
    }
    record(server_error);
    test_app.sql("ALTER TABLE elsewhere RENAME TO users").await;

    let unfinished = unfinished.await.unwrap();
    assert_eq!(status_of(&unfinished), Some(408), "{unfinished}");
    // If the server's HTTP library itself responds, the response can be without a body.
    if let Some((_, body)) = unfinished.split_once("\r\n\r\n").filter(|(_, body)| !body.is_empty()) {
        let body: Value = serde_json::from_str(body).unwrap();
        assert_eq!(body["error"], "invalid_request");
    }

    assert!(test_app.stack.redis().stop(Duration::from_secs(20)));
    record(client.login(id, EMAIL, PASSWORD).await);

    seen.insert((408, "invalid_request".to_owned()));
    let expected: BTreeSet<_> =
        EMAIL_ENDPOINT_ERRORS.iter().map(|(status, error)| (*status, (*error).to_owned())).collect();
    assert_eq!(seen, expected);
}

#[tokio::test]
async fn the_openapi_document_lists_exactly_the_known_errors() {
    fn collect_error_sets(document: &Value, found: &mut Vec<BTreeSet<String>>) {
        let strings = |values: &Value| -> BTreeSet<String> {
            values.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
        };
        match document {
            Value::Object(object) => {
                let of_enum = object.get("enum").map(strings).unwrap_or_default();
                let of_constants = object.get("oneOf").and_then(Value::as_array).into_iter().flatten();
                let of_constants: BTreeSet<String> =
                    of_constants.filter_map(|one| one["const"].as_str()).map(str::to_owned).collect();
                for set in [of_enum, of_constants] {
                    if set.contains("invalid_request") {
                        found.push(set);
                    }
                }
                object.values().for_each(|value| collect_error_sets(value, found));
            }
            Value::Array(array) => array.iter().for_each(|value| collect_error_sets(value, found)),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }
    let test_app = TestApp::start().await;
    let document = test_app.client().get("openapi.json").await.expect(StatusCode::OK);
    let mut found = Vec::new();
    collect_error_sets(&document.body, &mut found);
    let expected: BTreeSet<String> =
        EMAIL_ENDPOINT_ERRORS.iter().map(|(_, error)| *error).chain(OTHER_ENDPOINT_ERRORS).map(str::to_owned).collect();
    assert!(!found.is_empty());
    for set in found {
        assert_eq!(set, expected);
    }
}

#[tokio::test]
async fn email_endpoints_and_the_jwks_have_the_same_response_for_an_unknown_app() {
    let test_app = TestApp::start().await;
    let client = test_app.client();
    let long = "a".repeat(64);
    for app in ["nowhere", "SHOP", "-shop", "v1", "healthz", "sh%6Fp", long.as_str(), "%00", "..%2F"] {
        for operation in ["login", "register", "verify", "confirm", "forgot-password", "confirm-password"] {
            let response = client.post(&format!("v1/{app}/email/{operation}"), &json!({})).await;
            response.expect_error(StatusCode::NOT_FOUND, "app_not_found");
        }
        let keys = client.get(&format!("{app}/.well-known/jwks.json")).await;
        keys.expect_error(StatusCode::NOT_FOUND, "app_not_found");
    }
}

#[tokio::test]
async fn an_unknown_path_gets_404_and_a_wrong_method_gets_the_allowed_methods() {
    let test_app = TestApp::start().await;
    let client = test_app.client();
    let login = test_app.email_path("login");
    for path in
        ["", "v1", &format!("{login}/"), &format!("{login}/more"), &login.replace("v1", "v2"), "metrics", "readyz"]
    {
        client.post(path, &json!({})).await.expect_error(StatusCode::NOT_FOUND, "not_found");
    }
    for method in [Method::GET, Method::PUT, Method::DELETE, Method::PATCH, Method::HEAD, Method::TRACE] {
        let response = client.send(client.request(method.clone(), &login)).await;
        assert_eq!(response.status, StatusCode::METHOD_NOT_ALLOWED, "{method}");
        let allow = response.header("allow").unwrap();
        assert!(allow.split(", ").any(|allowed| allowed == "POST"), "{allow}");
        assert!(!allow.contains("GET"), "{allow}");
        if method != Method::HEAD {
            response.expect_error(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed");
        }
    }
    let keys = client.post_without_body(&format!("{}/.well-known/jwks.json", test_app.id())).await;
    let keys = keys.expect_error(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed");
    let allow = keys.header("allow").unwrap();
    assert!(allow.contains("GET") && allow.contains("HEAD"), "{allow}");
}

#[tokio::test]
async fn every_response_has_a_request_id_and_keeps_a_well_formed_id_from_the_request() {
    let test_app = TestApp::start().await;
    let client = test_app.client();
    let long = "a".repeat(128);
    for id in ["a", "Trace_1.2-3", long.as_str()] {
        for path in ["openapi.json", "nothing", test_app.email_path("login").as_str()] {
            let response = client.send(client.request(Method::GET, path).header("x-request-id", id)).await;
            assert_eq!(response.header("x-request-id"), Some(id), "{path}");
            assert_eq!(response.header("x-content-type-options"), Some("nosniff"), "{path}");
        }
    }
    let too_long = "a".repeat(129);
    let mut seen = BTreeSet::new();
    for id in ["", "a b", "a\tb", "a,b", "a/b", "<script>", "\u{e9}", too_long.as_str()] {
        let request = client.request(Method::GET, "openapi.json").header("x-request-id", id.as_bytes());
        let response = client.send(request).await.expect(StatusCode::OK);
        let generated = response.header("x-request-id").unwrap();
        let well_formed = |symbol: char| symbol.is_ascii_alphanumeric() || "._-".contains(symbol);
        assert!((1..=128).contains(&generated.len()) && generated.chars().all(well_formed), "{generated}");
        assert!(seen.insert(generated.to_owned()), "a new id each time");
        assert_eq!(response.headers.get_all("x-request-id").iter().count(), 1);
    }
}

#[tokio::test]
async fn a_refusal_changes_nothing() {
    let test_app = TestApp::start_with(App::new("shop")).await;
    let client = test_app.client();
    client.register(test_app.id(), NAME, EMAIL, "password").await.expect(StatusCode::BAD_REQUEST);
    client.register(test_app.id(), "", EMAIL, PASSWORD).await.expect(StatusCode::BAD_REQUEST);
    client.login(test_app.id(), EMAIL, WRONG_PASSWORD).await.expect(StatusCode::UNAUTHORIZED);
    let mut connection = test_app.stack.database.connect().await.unwrap();
    let (users, mails): (i64, i64) =
        sqlx::query_as("SELECT (SELECT count(*) FROM users), (SELECT count(*) FROM outbox)")
            .fetch_one(&mut connection)
            .await
            .unwrap();
    assert_eq!((users, mails), (0, 0));
    // The rejected requests did not count towards the mail limit of the email address, either.
    client.register(test_app.id(), NAME, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    test_app.mail(EMAIL, 1).await;
}
