//! Which calls each role can make, the order of the checks, and the maximum number of calls in flight.

use std::time::Duration;

use http::{Method, StatusCode};
use latchkey_tests::eventually;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};
use uuid::Uuid;

use super::{AdministrationTest, Administrator};
use crate::support::LIVE_LIMIT;

/// A call to the administration API. The user and the webhook in its path do not exist. The tests make the calls in the
/// order of the table, so that the group `staff` is created before it is used.
pub(super) struct ApiCall {
    pub(super) method: &'static str,
    pub(super) path: &'static str,
    body: Option<&'static str>,
    /// The status of the response to an allowed caller.
    status: u16,
    /// The ServiceAccounts that have the right to make the call.
    allowed: &'static [&'static str],
}

/// All calls of the administration API except those for pull webhooks.
pub(super) const CALLS: [ApiCall; 23] = [
    call("GET", "users", None, 200, &["reads", "runs"]),
    call("POST", "users", Some(r#"{"email":"ada@example.com"}"#), 200, &["runs"]),
    call("GET", "users/{ID}", None, 404, &["reads", "runs"]),
    call("PATCH", "users/{ID}", Some(r#"{"name":"Ada"}"#), 404, &["runs"]),
    call("DELETE", "users/{ID}", None, 404, &["runs"]),
    call("GET", "users/{ID}/sessions", None, 404, &["reads", "runs"]),
    call("DELETE", "users/{ID}/sessions", None, 404, &["runs"]),
    call("DELETE", "users/{ID}/sessions/{ID}", None, 404, &["runs"]),
    call("POST", "users/{ID}/mails", Some(r#"{"mail":"reset"}"#), 404, &["runs"]),
    call("DELETE", "users/{ID}/identities/github", None, 404, &["runs"]),
    call("GET", "users/{ID}/groups", None, 404, &["reads", "runs"]),
    call("GET", "groups", None, 200, &["reads", "runs"]),
    call("PUT", "groups/staff", Some(r#"{"title":"Staff"}"#), 200, &["runs"]),
    call("GET", "groups/staff/members", None, 200, &["reads", "runs"]),
    call("PUT", "groups/staff/members/{ID}", None, 404, &["runs"]),
    call("DELETE", "groups/staff/members/{ID}", None, 404, &["runs"]),
    call("DELETE", "groups/staff", None, 200, &["runs"]),
    call("GET", "users/{ID}/export", None, 404, &["reads", "runs"]),
    call("GET", "export", None, 200, &["reads", "runs"]),
    call("POST", "imports?source=test", Some("\n"), 200, &["imports", "runs"]),
    call("GET", "events", None, 200, &["reads", "runs"]),
    call("GET", "dead-letters", None, 200, &["reads", "runs"]),
    call("POST", "dead-letters/retry", Some(r#"{"ids":["{ID}"]}"#), 200, &["runs"]),
];

/// The calls for pull webhooks. The webhook `unknown` does not exist. The server reports this before a missing right,
/// so every role gets 404.
const PULL_CALLS: [ApiCall; 2] = [
    call("GET", "webhooks/unknown/events", None, 404, &["asks", "reads", "imports", "runs"]),
    call(
        "POST",
        "webhooks/unknown/acknowledge",
        Some(r#"{"ids":["{ID}"]}"#),
        404,
        &["asks", "reads", "imports", "runs"],
    ),
];

const fn call(
    method: &'static str,
    path: &'static str,
    body: Option<&'static str>,
    status: u16,
    allowed: &'static [&'static str],
) -> ApiCall {
    ApiCall { method, path, body, status, allowed }
}

#[tokio::test]
async fn the_tables_have_every_documented_call() {
    let test = AdministrationTest::start().await;
    let document = test.admin().client.get("openapi.json").await.expect(StatusCode::OK);
    let mut documented = Vec::new();
    for (path, operations) in document.body["paths"].as_object().unwrap() {
        let Some(path) = path.strip_prefix("/v1/{APPID}/") else { continue };
        let path = path.replace("{USER}", "{ID}").replace("{SESSION}", "{ID}");
        let path = path.replace("{PROVIDER}", "github").replace("{WEBHOOK}", "unknown");
        let path = path.replace("{GROUP}", "staff");
        for method in ["get", "post", "put", "patch", "delete"] {
            if operations.get(method).is_some() {
                documented.push(format!("{} {path}", method.to_uppercase()));
            }
        }
    }
    let without_query = |call: ApiCall| format!("{} {}", call.method, call.path.split('?').next().unwrap());
    let mut calls: Vec<_> = CALLS.into_iter().chain(PULL_CALLS).map(without_query).collect();
    documented.sort();
    calls.sort();
    assert_eq!(calls, documented);
}

#[tokio::test]
async fn each_role_can_make_its_calls_and_no_others() {
    let test = AdministrationTest::start().await;
    let unlisted = test.administrator("stranger");
    for ApiCall { method, path, body, status, allowed } in CALLS.into_iter().chain(PULL_CALLS) {
        let id = Uuid::now_v7().to_string();
        let path = path.replace("{ID}", &id);
        let media_type = if path.starts_with("imports") { "application/x-ndjson" } else { "application/json" };
        let send = async |administrator: &Administrator| {
            let request = administrator.request(method.parse().unwrap(), &path);
            let request = match body {
                Some(body) => request.header("Content-Type", media_type).body(body.replace("{ID}", &id)),
                None => request,
            };
            administrator.send(request).await
        };
        for role in ["asks", "reads", "imports", "runs"] {
            let response = send(&test.administrator(role)).await;
            if allowed.contains(&role) {
                assert_eq!(response.status.as_u16(), status, "{method} {path} by {role}: {}", response.text);
            } else {
                response.expect_error(StatusCode::FORBIDDEN, "access_denied");
            }
        }
        send(&unlisted).await.expect_error(StatusCode::UNAUTHORIZED, "invalid_client");
    }
    for query in ["hashes=true", "hashes=true&after=x&sort=1"] {
        let with_hashes = test.administrator("reads").get(&format!("export?{query}")).await;
        with_hashes.expect_error(StatusCode::FORBIDDEN, "access_denied");
    }
}

#[tokio::test]
async fn an_invalid_query_or_body_is_reported_before_a_missing_user() {
    let test = AdministrationTest::start().await;
    let admin = test.admin();
    let user = format!("users/{}", Uuid::now_v7());
    admin.get(&format!("{user}?sort=1")).await.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    let unknown = admin.patch(&user, &json!({ "nmae": "Ada" })).await;
    let unknown = unknown.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    assert_eq!(unknown.body["fields"][0]["field"], "nmae");
    admin.patch(&user, &json!({ "name": "Ada" })).await.expect_error(StatusCode::NOT_FOUND, "not_found");
    admin.get("users/not-a-uuid").await.expect_error(StatusCode::NOT_FOUND, "not_found");
    let stale = admin.request(Method::PATCH, &user).header("If-Match", "\"1\"").json(&json!({ "name": "Ada" }));
    admin.send(stale).await.expect_error(StatusCode::NOT_FOUND, "not_found");
}

/// The server keeps a response in memory until the client has read it, so the call counts as in flight until then.
#[tokio::test]
async fn a_call_is_in_flight_until_its_response_is_read() {
    let test = AdministrationTest::start().await;
    let metadata = json!({ "a": "x".repeat(8000) });
    let lines: Vec<_> = (0..500)
        .map(|number| {
            json!({
                "external_id": format!("{number}"), "email": format!("u{number}@example.com"), "metadata": metadata,
            })
        })
        .collect();
    for batch in lines.chunks(250) {
        test.admin().import("source=test", batch).await.expect(StatusCode::OK);
    }
    let mut held = Vec::new();
    for _ in 0..4 {
        let mut stream = TcpStream::connect(test.address()).await.unwrap();
        let head = format!(
            "GET /v1/{}/users?limit=500 HTTP/1.1\r\nHost: latchkey.test\r\nAuthorization: Bearer {}\r\n\r\n",
            test.test_app.id(),
            test.token("reads")
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        // The response has begun. The rest does not fit into the buffers of the connection.
        stream.readable().await.unwrap();
        held.push(stream);
    }
    test.admin().get("users?limit=1").await.expect_error(StatusCode::TOO_MANY_REQUESTS, "rate_limited");
    let reader = test.administrator("reads");
    reader.get("export").await.expect_error(StatusCode::TOO_MANY_REQUESTS, "rate_limited");
    // The server checks the rights of the caller before the maximum number of calls in flight.
    reader.get("export?hashes=true").await.expect_error(StatusCode::FORBIDDEN, "access_denied");
    drop(held);
    eventually("the calls have ended", LIVE_LIMIT, || async {
        (test.admin().get("users?limit=1").await.status == StatusCode::OK).then_some(())
    })
    .await;
}

/// Sends the head of a request, and never sends its body. Returns when the server waits for the body, so that the call is
/// in flight.
async fn send_head(test: &AdministrationTest, name: &str, path: &str, media_type: &str) -> TcpStream {
    let mut stream = TcpStream::connect(test.address()).await.unwrap();
    let head = format!(
        "POST /v1/{}/{path} HTTP/1.1\r\nHost: latchkey.test\r\nAuthorization: Bearer {}\r\n\
         Content-Type: {media_type}\r\nContent-Length: 10\r\nExpect: 100-continue\r\n\r\n",
        test.test_app.id(),
        test.token(name)
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut interim = [0; 25];
    stream.read_exact(&mut interim).await.unwrap();
    assert_eq!(interim.as_slice(), b"HTTP/1.1 100 Continue\r\n\r\n");
    stream
}

#[tokio::test]
async fn a_caller_has_at_most_eight_calls_in_flight_and_an_app_at_most_two_imports() {
    let test = AdministrationTest::start().await;
    let mut held = Vec::new();
    for _ in 0..8 {
        held.push(send_head(&test, "runs", "users", "application/json").await);
    }
    let refused = test.admin().get("users").await.expect(StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(refused.header("retry-after"), Some("1"));
    assert_eq!(refused.header("ratelimit"), None);
    test.administrator("reads").get("users").await.expect(StatusCode::OK);
    drop(held);
    eventually("the calls have ended", LIVE_LIMIT, || async {
        (test.admin().get("users").await.status == StatusCode::OK).then_some(())
    })
    .await;

    let mut imports = Vec::new();
    for _ in 0..2 {
        imports.push(send_head(&test, "imports", "imports?source=test", "application/x-ndjson").await);
    }
    test.admin().import("source=test", &[]).await.expect(StatusCode::TOO_MANY_REQUESTS);
    test.administrator("imports").get("users").await.expect_error(StatusCode::FORBIDDEN, "access_denied");
    // The server waits 30 s for a body, and then closes the connection.
    let mut response = Vec::new();
    let read = timeout(Duration::from_secs(90), imports[0].read_to_end(&mut response)).await;
    read.expect("the server closes the connection").unwrap();
    assert!(response.starts_with(b"HTTP/1.1 408"), "{}", String::from_utf8_lossy(&response));
}
