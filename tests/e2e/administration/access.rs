//! Who may call what, the order of the checks, and the number of calls in flight.

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

use super::AdministrationTest;
use crate::support::LIVE_LIMIT;

/// Each call with the ServiceAccounts that may make it.
const CALLS: [(&str, &str, &[&str]); 16] = [
    ("GET", "users", &["reads", "runs"]),
    ("POST", "users", &["runs"]),
    ("GET", "users/{ID}", &["reads", "runs"]),
    ("PATCH", "users/{ID}", &["runs"]),
    ("DELETE", "users/{ID}", &["runs"]),
    ("GET", "users/{ID}/sessions", &["reads", "runs"]),
    ("DELETE", "users/{ID}/sessions", &["runs"]),
    ("DELETE", "users/{ID}/sessions/{ID}", &["runs"]),
    ("POST", "users/{ID}/mails", &["runs"]),
    ("DELETE", "users/{ID}/identities/github", &["runs"]),
    ("GET", "users/{ID}/export", &["reads", "runs"]),
    ("GET", "export", &["reads", "runs"]),
    ("POST", "imports", &["imports", "runs"]),
    ("GET", "events", &["reads", "runs"]),
    ("GET", "dead-letters", &["reads", "runs"]),
    ("POST", "dead-letters/retry", &["runs"]),
];

#[tokio::test]
async fn each_role_can_make_its_calls_and_no_others() {
    let test = AdministrationTest::start().await;
    let unlisted = test.administrator("stranger");
    for (method, path, allowed) in CALLS {
        let path = path.replace("{ID}", &Uuid::now_v7().to_string());
        let method: Method = method.parse().unwrap();
        for role in ["asks", "reads", "imports", "runs"] {
            let admin = test.administrator(role);
            let response = admin.send(admin.request(method.clone(), &path)).await;
            if allowed.contains(&role) {
                let is_past_the_role_check = [200, 400, 404, 415].contains(&response.status.as_u16());
                assert!(is_past_the_role_check, "{method} {path} by {role}: {}", response.text);
            } else {
                response.expect_error(StatusCode::FORBIDDEN, "access_denied");
            }
        }
        let response = unlisted.send(unlisted.request(method.clone(), &path)).await;
        response.expect_error(StatusCode::UNAUTHORIZED, "invalid_client");
    }
    let with_hashes = test.administrator("reads").get("export?hashes=true").await;
    with_hashes.expect_error(StatusCode::FORBIDDEN, "access_denied");
}

#[tokio::test]
async fn an_error_of_the_query_or_the_body_comes_before_a_missing_user() {
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

/// A client that reads nothing holds its response in the memory of the server.
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
        // The response has begun, and does not fit into the buffers of the connection.
        stream.readable().await.unwrap();
        held.push(stream);
    }
    test.admin().get("users?limit=1").await.expect_error(StatusCode::TOO_MANY_REQUESTS, "rate_limited");
    drop(held);
    eventually("the calls have ended", LIVE_LIMIT, || async {
        (test.admin().get("users?limit=1").await.status == StatusCode::OK).then_some(())
    })
    .await;
}

/// Sends the head of a request whose body never comes.
async fn send_head(test: &AdministrationTest, name: &str, path: &str, media_type: &str) -> TcpStream {
    let mut stream = TcpStream::connect(test.address()).await.unwrap();
    let head = format!(
        "POST /v1/{}/{path} HTTP/1.1\r\nHost: latchkey.test\r\nAuthorization: Bearer {}\r\n\
         Content-Type: {media_type}\r\nContent-Length: 10\r\n\r\n",
        test.test_app.id(),
        test.token(name)
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream
}

#[tokio::test]
async fn eight_calls_of_a_caller_and_two_imports_of_an_app_can_be_in_flight() {
    let test = AdministrationTest::start().await;
    let mut held = Vec::new();
    for _ in 0..8 {
        held.push(send_head(&test, "runs", "users", "application/json").await);
    }
    let refused = eventually("a ninth call is refused", LIVE_LIMIT, || async {
        let response = test.admin().get("users").await;
        (response.status == StatusCode::TOO_MANY_REQUESTS).then_some(response)
    })
    .await;
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
    eventually("a third import is refused", LIVE_LIMIT, || async {
        let response = test.admin().import("source=test", &[]).await;
        (response.status == StatusCode::TOO_MANY_REQUESTS).then_some(())
    })
    .await;
    test.administrator("imports").get("users").await.expect_error(StatusCode::FORBIDDEN, "access_denied");
    // A body that does not come is given up after 30 s.
    let mut response = Vec::new();
    let read = timeout(Duration::from_secs(90), imports[0].read_to_end(&mut response)).await;
    read.expect("the server closes the connection").unwrap();
    assert!(response.starts_with(b"HTTP/1.1 408"), "{}", String::from_utf8_lossy(&response));
}
