//! Requests from OpenID Connect clients: what is refused before a store is used, and what happens if the stores fail.
//! The end-to-end tests use real stores.

use base64::{Engine, engine::general_purpose::STANDARD};
use latchkey_crds::rendered::RenderedClientAuthentication;
use serde_json::json;

use super::{FailingStores, Reply, TestServer, get_request};
use crate::fixtures::{self, CLIENT_SECRET};

const REFRESH: &str = "grant_type=refresh_token&refresh_token=lkrc_x";

fn server(stores: FailingStores) -> TestServer {
    TestServer::with_app(stores, |app| {
        app.pages = Some(fixtures::pages());
        let mut public = fixtures::client("spa");
        public.authentication = RenderedClientAuthentication::None;
        app.clients = vec![fixtures::client("grafana"), public];
    })
}

fn basic() -> String {
    format!("Authorization: Basic {}\r\n", STANDARD.encode(format!("grafana:{CLIENT_SECRET}")))
}

async fn post_form(server: &TestServer, endpoint: &str, headers: &str, body: &str) -> Reply {
    let length = body.len();
    let head = format!(
        "POST /v1/shop/{endpoint} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {length}\r\n\
         Content-Type: application/x-www-form-urlencoded\r\n{headers}\r\n{body}"
    );
    server.send_request(head).await
}

#[tokio::test]
async fn a_malformed_request_from_a_client_is_refused_before_a_store_is_used() {
    let server = server(FailingStores::Panicking);
    for (headers, body) in [
        (basic(), format!("{REFRESH}&client_id=spa")),
        (basic(), format!("{REFRESH}&client_secret=x")),
        (basic(), format!("{REFRESH}&client_assertion=x")),
        (basic(), format!("{REFRESH}&scope=openid&scope=email")),
        (String::new(), format!("{REFRESH}&client_secret=x&client_assertion=y")),
    ] {
        for endpoint in ["token", "par", "revoke", "introspect"] {
            let reply = post_form(&server, endpoint, &headers, &body).await;
            reply.assert_refused(400, "invalid_request");
        }
    }
    let json = server.post("/v1/shop/token", &basic(), r#"{"refresh_token": "lkr_x"}"#).await;
    json.assert_refused(415, "unsupported_media_type");
    let json = server.post("/v1/shop/token", "", r#"{"refresh_token": "lkrc_x"}"#).await;
    json.assert_refused(415, "unsupported_media_type");
}

#[tokio::test]
async fn an_outage_is_503_for_clients_but_the_metadata_is_still_served() {
    let server = server(FailingStores::Unavailable);
    for (headers, body) in [(basic(), REFRESH.to_owned()), (String::new(), format!("{REFRESH}&client_id=spa"))] {
        for endpoint in ["token", "par"] {
            let reply = post_form(&server, endpoint, &headers, &body).await;
            reply.assert_refused(503, "temporarily_unavailable");
            assert!(reply.header("retry-after").is_some());
        }
    }
    let metadata = server.send_request(get_request("/shop/.well-known/openid-configuration", "")).await;
    let metadata = metadata.json();
    assert_eq!(metadata["authorization_endpoint"], "https://auth.example.com/shop/authorize");
    assert_eq!(metadata["response_types_supported"], json!(["code"]));
    let keys = server.send_request(get_request("/shop/.well-known/jwks.json", "")).await;
    assert_eq!(keys.json()["keys"][0]["kid"], "s1");
}

#[tokio::test]
async fn a_reached_limit_is_429() {
    let server = server(FailingStores::Limited);
    for (headers, body) in [(basic(), REFRESH.to_owned()), (String::new(), format!("{REFRESH}&client_id=spa"))] {
        post_form(&server, "token", &headers, &body).await.assert_refused(429, "rate_limited");
    }
}

#[tokio::test]
async fn an_app_without_clients_has_no_endpoints_for_clients() {
    let server = TestServer::new(FailingStores::Panicking);
    for method in ["GET", "POST", "OPTIONS", "DELETE"] {
        let reply = server
            .send_request(format!(
                "{method} /v1/shop/par HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
            ))
            .await;
        reply.assert_refused(404, "not_found");
    }
    let reply = post_form(&server, "userinfo", "", "access_token=x").await;
    reply.assert_refused(405, "method_not_allowed");
    assert_eq!(reply.header("allow"), Some("GET, HEAD, OPTIONS"));
    let origin = "Origin: https://grafana.example.com\r\n";
    let reply = server.send_request(get_request("/shop/.well-known/jwks.json", origin)).await;
    assert_eq!(reply.header("access-control-allow-origin"), None);
}

#[tokio::test]
async fn userinfo_accepts_a_token_in_the_header_or_in_the_form_but_not_in_both() {
    let server = server(FailingStores::Panicking);
    let bearer = "Authorization: Bearer a.b.c\r\n";
    post_form(&server, "userinfo", bearer, "access_token=a.b.c").await.assert_refused(400, "invalid_request");
    post_form(&server, "userinfo", bearer, "").await.assert_refused(401, "invalid_token");
    post_form(&server, "userinfo", "", "access_token=a.b.c").await.assert_refused(401, "invalid_token");
    post_form(&server, "userinfo", "", "").await.assert_refused(401, "invalid_token");
    server.post("/v1/shop/userinfo", bearer, "{}").await.assert_refused(415, "unsupported_media_type");
}
