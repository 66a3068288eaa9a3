//! Calls that need a token.

use std::time::Duration;

use serde_json::Value;

use super::{FailingStores, TestServer, access_token, get_request};
use crate::http::{
    openapi,
    routes::{Route, RouteTable, Verb},
};

#[tokio::test]
async fn verify_without_a_valid_token_is_401_whatever_its_body() {
    let server = TestServer::new(FailingStores::Panicking);
    let verify = "/v1/shop/email/verify";
    let bare_request = format!("POST {verify} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    let reply = server.send_request(bare_request.clone()).await;
    reply.assert_refused(401, "invalid_token");
    assert_eq!(reply.header("www-authenticate"), Some("Bearer realm=\"shop\""));
    server.post(verify, "", "").await.assert_refused(401, "invalid_token");
    server.post(verify, "", " { } ").await.assert_refused(401, "invalid_token");
    for data in [r#"{"email": "ada@example.com"}"#, "[]", "null", "{", " "] {
        server.post(verify, "", data).await.assert_refused(401, "invalid_token");
    }
    let reply = server.post(verify, "Authorization: Bearer nonsense\r\n", "{}").await;
    reply.assert_refused(401, "invalid_token");
    assert_eq!(reply.header("www-authenticate"), Some("Bearer realm=\"shop\", error=\"invalid_token\""));
}

#[tokio::test]
async fn forward_auth_requires_a_token_with_any_method_and_sends_no_cors_headers() {
    let server = TestServer::new(FailingStores::Unavailable);
    let token = access_token(&server);
    for method in ["GET", "OPTIONS", "POST", "PROPFIND"] {
        for suffix in ["", "/", "/a//b/../c"] {
            let request = |headers: &str| {
                format!(
                    "{method} /v1/shop/authorize{suffix} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\
                     Origin: https://shop.example.com\r\nAccess-Control-Request-Method: GET\r\n{headers}\r\n"
                )
            };
            let reply = server.send_request(request("")).await;
            reply.assert_refused(401, "invalid_token");
            assert_eq!(reply.header("www-authenticate"), Some("Bearer realm=\"shop\""));
            assert!(!reply.headers.keys().any(|name| name.starts_with("access-control") || name == "vary"));
            let reply = server.send_request(request("Authorization: Bearer a.b.c\r\n")).await;
            reply.assert_refused(401, "invalid_token");
            let reply = server.send_request(request(&format!("Authorization: Bearer {token}\r\n"))).await;
            reply.assert_refused(503, "temporarily_unavailable");
            assert_eq!(reply.header("retry-after"), Some("5"));
        }
    }
    server.send_request(get_request("/v1/nobody/authorize", "")).await.assert_refused(404, "app_not_found");
}

/// Whether a call needs a token, according to the OpenAPI document.
fn needs_token(document: &Value, route: Route) -> bool {
    let method = match route.verb() {
        Verb::Get | Verb::GetOnly | Verb::Any => "get",
        Verb::Post => "post",
        Verb::Put => "put",
        Verb::Patch => "patch",
        Verb::Delete => "delete",
    };
    let security = document["paths"][route.path_template()][method]["security"].as_array();
    let alternatives = security.unwrap_or_else(|| panic!("{} has no `security`", route.name()));
    !alternatives.is_empty()
        && alternatives.iter().all(|schemes| schemes.as_object().is_some_and(|schemes| !schemes.is_empty()))
}

/// Headers and bodies that most calls refuse when they read them. The last two bodies are never complete.
const INVALID_BODIES: [&str; 7] = [
    "Content-Type: application/json\r\nContent-Length: 1\r\n\r\n{",
    "Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
    "Content-Type: application/json\r\nContent-Length: 10\r\n\r\n{\"name\": 5}",
    "Content-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}",
    "Content-Length: 0\r\n\r\n",
    "Content-Type: application/json\r\nContent-Length: 65537\r\n\r\n{",
    "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n8\r\n{\"name\":\r\n",
];

/// The stores panic, so the test fails if a call uses a store. It also fails if a call waits for a body: the body
/// timeout is longer than the test waits.
#[tokio::test]
async fn a_call_without_its_required_token_is_401_whatever_its_body_and_parameters() {
    let mut server = TestServer::new(FailingStores::Panicking);
    server.timeouts.body = Duration::from_secs(600);
    server.timeouts.linger = Duration::from_millis(5);
    let document = openapi::public_document(&server.state.settings.base_url);
    let mut call_count = 0;
    for route in Route::ALL.iter().copied() {
        let path = route.path_template().replace("{APPID}", "shop").replace("{PROVIDER}", "nobody");
        let path = path.replace("{SESSION}", "%00not-an-id").replace("{SUFFIX}", "a/b");
        let method = match route.verb() {
            Verb::Get | Verb::GetOnly => "GET",
            Verb::Post | Verb::Any => "POST",
            Verb::Put => "PUT",
            Verb::Patch => "PATCH",
            Verb::Delete => "DELETE",
        };
        let head = format!("{method} {path}?x=%ff HTTP/1.1\r\nHost: a\r\nConnection: close\r\n");
        if !needs_token(&document, route) {
            let reply = server.send_request(format!("{head}Content-Length: 0\r\n\r\n")).await;
            assert_ne!(reply.status, 401, "{} needs a token, but the OpenAPI document does not say so", route.name());
            continue;
        }
        call_count += 1;
        let code = if route == Route::Introspect { "invalid_client" } else { "invalid_token" };
        for (token, challenge) in [
            ("", "Bearer realm=\"shop\""),
            ("Authorization: Basic YTpi\r\n", "Bearer realm=\"shop\""),
            ("Authorization: Bearer a.b.c\r\n", "Bearer realm=\"shop\", error=\"invalid_token\""),
        ] {
            for body in INVALID_BODIES {
                let reply = server.send_request(format!("{head}{token}{body}")).await;
                reply.assert_refused(401, code);
                assert_eq!(reply.header("www-authenticate"), Some(challenge), "{} {body:?}", route.name());
            }
        }
    }
    assert!(call_count >= 15, "only {call_count} calls need a token");
}

#[tokio::test]
async fn introspection_authenticates_the_caller_first() {
    let server = TestServer::new(FailingStores::Panicking);
    for authorization in ["", "Authorization: Bearer a.b.c\r\n", "Authorization: Basic YTpi\r\n"] {
        for body in ["", "nonsense", r#"{"token": "a.b.c"}"#] {
            let reply = server.post("/v1/shop/introspect", authorization, body).await;
            reply.assert_refused(401, "invalid_client");
            assert!(reply.header("www-authenticate").unwrap().starts_with("Bearer realm=\"shop\""));
        }
    }
}
