//! Errors: one format, a closed set of codes, and each code for its own reason (specification: HTTP API, Errors).

use std::{collections::BTreeSet, time::Duration};

use http::{Method, StatusCode};
use latchkey_tests::{builders::App, client::ApiResponse, redis, stack::Stack};
use serde_json::{Value, json};

use crate::support::{NAME, PASSWORD, TestApp, WRONG_CODE, WRONG_PASSWORD, app, post_head, send_raw, status_of};

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

/// The errors of other endpoints only.
const OTHER_ENDPOINT_ERRORS: [&str; 13] = [
    "access_denied",
    "account_link_required",
    "invalid_client",
    "invalid_grant",
    "invalid_provider_token",
    "invalid_state",
    "last_identity",
    "origin_not_allowed",
    "provider_error",
    "provider_not_found",
    "reauthentication_required",
    "redirect_url_not_allowed",
    "unsupported_grant_type",
];

/// Checks the format of an error and records it.
fn record_error(seen: &mut BTreeSet<(u16, String)>, answer: &ApiResponse) {
    let error = answer.string("error");
    let names: BTreeSet<&str> = answer.body.as_object().expect("an object").keys().map(String::as_str).collect();
    let known = BTreeSet::from(["error", "error_description", "fields", "request_id"]);
    assert!(names.is_subset(&known), "{}", answer.text);
    assert!(!answer.string("error_description").is_empty(), "{}", answer.text);
    assert_eq!(answer.header("x-request-id"), Some(answer.string("request_id")), "{}", answer.text);
    assert_eq!(answer.header("x-content-type-options"), Some("nosniff"), "{}", answer.text);
    assert!(answer.header("content-type").expect("a type").starts_with("application/json"), "{}", answer.text);
    let with_fields = answer.body.get("fields").is_some();
    assert!(!with_fields || ["invalid_request", "weak_password"].contains(&error), "{}", answer.text);
    for field in answer.body["fields"].as_array().into_iter().flatten() {
        assert!(["field", "code", "message"].iter().all(|name| field[name].is_string()), "{}", answer.text);
    }
    match answer.status.as_u16() {
        401 => assert!(answer.header("www-authenticate").is_some_and(|challenge| challenge.starts_with("Bearer"))),
        405 => assert!(answer.header("allow").is_some()),
        429 | 503 => {
            assert!(answer.header("retry-after").is_some_and(|wait| wait.parse::<u64>().is_ok_and(|wait| wait >= 1)))
        }
        _ => {}
    }
    seen.insert((answer.status.as_u16(), error.to_owned()));
}

#[tokio::test]
async fn every_error_of_the_six_endpoints_has_the_same_format() {
    let shop = app().limit("codesPerClient", &[(3, 3600)]);
    let off = app().set("/enumerationProtection", "Off").set("/requireVerifiedEmail", true);
    let closed = app().set("/signUp", "Closed");
    let builder = Stack::builder().app(&shop).app(&off).app(&closed).own_redis(redis::Options::for_tests());
    let shop = TestApp { stack: builder.start().await, app: shop };
    let (id, client) = (shop.id(), shop.client());
    let mut seen = BTreeSet::new();
    let mut note = |answer: ApiResponse| record_error(&mut seen, &answer);

    // The head of this request does not end; the other requests run meanwhile.
    let late = tokio::spawn(send_raw(shop.stack.server().public, post_head(&shop.email_path("login"))));

    note(client.post(&shop.email_path("login"), &json!({})).await);
    note(client.register(id, NAME, EMAIL, "password").await);
    note(client.login(id, EMAIL, PASSWORD).await);
    note(client.with_token(id, "x").verify().await);
    note(client.register(closed.id(), NAME, EMAIL, PASSWORD).await);
    note(client.login("nowhere", EMAIL, PASSWORD).await);
    note(client.post(&shop.email_path("nothing"), &json!({})).await);
    note(client.get(&shop.email_path("login")).await);
    let large = client.request(Method::POST, &shop.email_path("login")).header("content-type", "application/json");
    note(client.send(large.body(" ".repeat(64 * 1024 + 1))).await);
    note(client.send(client.request(Method::POST, &shop.email_path("login")).body("{}")).await);

    client.register(off.id(), NAME, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    note(client.login(off.id(), EMAIL, PASSWORD).await);
    let code = shop.code(EMAIL, 1).await;
    client.confirm(off.id(), &code).await.expect(StatusCode::OK);
    note(client.register(off.id(), NAME, EMAIL, PASSWORD).await);
    shop.sql("UPDATE users SET disabled_at = now()").await;
    note(client.login(off.id(), EMAIL, PASSWORD).await);
    for _ in 0..4 {
        note(client.confirm(id, WRONG_CODE).await);
    }

    shop.sql("ALTER TABLE users RENAME TO elsewhere").await;
    let fault = client.login(id, EMAIL, PASSWORD).await;
    assert_eq!(fault.body["request_id"].as_str(), fault.header("x-request-id"));
    for secret in ["users", "relation", "SQL", "sqlx", "select"] {
        assert!(!fault.text.to_lowercase().contains(&secret.to_lowercase()), "{}", fault.text);
    }
    note(fault);
    shop.sql("ALTER TABLE elsewhere RENAME TO users").await;

    let late = late.await.unwrap();
    assert_eq!(status_of(&late), Some(408), "{late}");
    // A response of the HTTP library itself can have no body.
    if let Some((_, body)) = late.split_once("\r\n\r\n").filter(|(_, body)| !body.is_empty()) {
        let body: Value = serde_json::from_str(body).unwrap();
        assert_eq!(body["error"], "invalid_request");
    }

    assert!(shop.stack.redis().stop(Duration::from_secs(20)));
    note(client.login(id, EMAIL, PASSWORD).await);

    seen.insert((408, "invalid_request".to_owned()));
    let expected: BTreeSet<_> =
        EMAIL_ENDPOINT_ERRORS.iter().map(|(status, error)| (*status, (*error).to_owned())).collect();
    assert_eq!(seen, expected);
}

#[tokio::test]
async fn the_set_of_errors_is_closed_and_documented() {
    fn errors(document: &Value, found: &mut Vec<BTreeSet<String>>) {
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
                object.values().for_each(|value| errors(value, found));
            }
            Value::Array(array) => array.iter().for_each(|value| errors(value, found)),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }
    let shop = TestApp::start().await;
    let document = shop.client().get("openapi.json").await.expect(StatusCode::OK);
    let mut found = Vec::new();
    errors(&document.body, &mut found);
    let ours: BTreeSet<String> =
        EMAIL_ENDPOINT_ERRORS.iter().map(|(_, error)| *error).chain(OTHER_ENDPOINT_ERRORS).map(str::to_owned).collect();
    assert!(!found.is_empty());
    for set in found {
        assert_eq!(set, ours);
    }
}

#[tokio::test]
async fn an_unknown_app_gets_the_same_response_from_every_endpoint() {
    let shop = TestApp::start().await;
    let client = shop.client();
    let long = "a".repeat(64);
    for app in ["nowhere", "SHOP", "-shop", "v1", "healthz", "sh%6Fp", long.as_str(), "%00", "..%2F"] {
        for operation in ["login", "register", "verify", "confirm", "forgot-password", "confirm-password"] {
            let answer = client.post(&format!("v1/{app}/email/{operation}"), &json!({})).await;
            answer.expect_error(StatusCode::NOT_FOUND, "app_not_found");
        }
        let keys = client.get(&format!("{app}/.well-known/jwks.json")).await;
        keys.expect_error(StatusCode::NOT_FOUND, "app_not_found");
    }
}

#[tokio::test]
async fn an_unknown_path_is_not_found_and_a_wrong_method_gets_the_allowed_ones() {
    let shop = TestApp::start().await;
    let client = shop.client();
    let login = shop.email_path("login");
    for path in
        ["", "v1", &format!("{login}/"), &format!("{login}/more"), &login.replace("v1", "v2"), "metrics", "readyz"]
    {
        client.post(path, &json!({})).await.expect_error(StatusCode::NOT_FOUND, "not_found");
    }
    for method in [Method::GET, Method::PUT, Method::DELETE, Method::PATCH, Method::HEAD, Method::TRACE] {
        let answer = client.send(client.request(method.clone(), &login)).await;
        assert_eq!(answer.status, StatusCode::METHOD_NOT_ALLOWED, "{method}");
        let allow = answer.header("allow").unwrap();
        assert!(allow.split(", ").any(|allowed| allowed == "POST"), "{allow}");
        assert!(!allow.contains("GET"), "{allow}");
        if method != Method::HEAD {
            answer.expect_error(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed");
        }
    }
    let keys = client.post_without_body(&format!("{}/.well-known/jwks.json", shop.id())).await;
    let keys = keys.expect_error(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed");
    let allow = keys.header("allow").unwrap();
    assert!(allow.contains("GET") && allow.contains("HEAD"), "{allow}");
}

#[tokio::test]
async fn every_response_has_a_request_id_and_keeps_a_well_formed_one() {
    let shop = TestApp::start().await;
    let client = shop.client();
    let long = "a".repeat(128);
    for id in ["a", "Trace_1.2-3", long.as_str()] {
        for path in ["openapi.json", "nothing", shop.email_path("login").as_str()] {
            let answer = client.send(client.request(Method::GET, path).header("x-request-id", id)).await;
            assert_eq!(answer.header("x-request-id"), Some(id), "{path}");
            assert_eq!(answer.header("x-content-type-options"), Some("nosniff"), "{path}");
        }
    }
    let too_long = "a".repeat(129);
    let mut seen = BTreeSet::new();
    for id in ["", "a b", "a\tb", "a,b", "a/b", "<script>", "\u{e9}", too_long.as_str()] {
        let request = client.request(Method::GET, "openapi.json").header("x-request-id", id.as_bytes());
        let answer = client.send(request).await.expect(StatusCode::OK);
        let fresh = answer.header("x-request-id").unwrap();
        let well_formed = |symbol: char| symbol.is_ascii_alphanumeric() || "._-".contains(symbol);
        assert!((1..=128).contains(&fresh.len()) && fresh.chars().all(well_formed), "{fresh}");
        assert!(seen.insert(fresh.to_owned()), "a new id each time");
        assert_eq!(answer.headers.get_all("x-request-id").iter().count(), 1);
    }
}

#[tokio::test]
async fn a_refusal_changes_nothing() {
    let shop = TestApp::start_with(App::new("shop")).await;
    let client = shop.client();
    client.register(shop.id(), NAME, EMAIL, "password").await.expect(StatusCode::BAD_REQUEST);
    client.register(shop.id(), "", EMAIL, PASSWORD).await.expect(StatusCode::BAD_REQUEST);
    client.login(shop.id(), EMAIL, WRONG_PASSWORD).await.expect(StatusCode::UNAUTHORIZED);
    let mut connection = shop.stack.database.connect().await.unwrap();
    let (users, mails): (i64, i64) =
        sqlx::query_as("SELECT (SELECT count(*) FROM users), (SELECT count(*) FROM outbox)")
            .fetch_one(&mut connection)
            .await
            .unwrap();
    assert_eq!((users, mails), (0, 0));
    // The refusals did not use up the mail limit of the address either.
    client.register(shop.id(), NAME, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    shop.mail(EMAIL, 1).await;
}
