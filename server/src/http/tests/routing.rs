//! Paths, methods, public documents, request ids and CORS.

use std::sync::Arc;

use serde_json::json;
use uuid::Uuid;

use super::{EMAIL_ENDPOINTS, FailingStores, TestServer, exchange, get_request};
use crate::http::admin_service;

#[tokio::test]
async fn unknown_paths_and_unknown_apps_have_different_errors() {
    let server = TestServer::new(FailingStores::Panicking);
    for path in ["/", "/nothing", "/v1/shop/email/login/", "/v1/shop/nothing", "/shop/nothing"] {
        server.send_request(get_request(path, "")).await.assert_refused(404, "not_found");
    }
    server.post("/v1/nobody/email/login", "", "{}").await.assert_refused(404, "app_not_found");
    server.post("/v1/sh%6Fp/email/login", "", "{}").await.assert_refused(404, "app_not_found");
    server.send_request(get_request("/nobody/.well-known/jwks.json", "")).await.assert_refused(404, "app_not_found");
    let admin = admin_service(Arc::clone(&server.state), server.metrics.clone(), Arc::clone(&server.budgets));
    exchange(server.connect(admin), get_request("/users", "").as_bytes()).await.assert_refused(404, "not_found");
}

#[tokio::test]
async fn a_wrong_method_gets_the_list_of_allowed_methods() {
    let server = TestServer::new(FailingStores::Panicking);
    let reply = server.send_request(get_request("/v1/shop/email/login", "")).await;
    reply.assert_refused(405, "method_not_allowed");
    assert_eq!(reply.header("allow"), Some("POST, OPTIONS"));
    let reply = server.post("/shop/.well-known/jwks.json", "", "{}").await;
    reply.assert_refused(405, "method_not_allowed");
    assert_eq!(reply.header("allow"), Some("GET, HEAD, OPTIONS"));
}

#[tokio::test]
async fn head_is_get_without_the_body() {
    let server = TestServer::new(FailingStores::Panicking);
    let got = server.send_request(get_request("/shop/.well-known/jwks.json", "")).await;
    let head = server.send_request(get_request("/shop/.well-known/jwks.json", "").replacen("GET", "HEAD", 1)).await;
    assert_eq!((head.status, head.body.as_str()), (200, ""));
    for header in ["content-length", "etag", "content-type", "cache-control"] {
        assert_eq!(head.header(header), got.header(header), "{header}");
    }
    assert_eq!(got.header("content-length"), Some(got.body.len().to_string().as_str()));
}

#[tokio::test]
async fn public_documents_can_be_cached_and_revalidated() {
    let server = TestServer::new(FailingStores::Panicking);
    for path in [
        "/shop/.well-known/jwks.json",
        "/shop/.well-known/openid-configuration",
        "/.well-known/oauth-authorization-server/shop",
        "/shop/.well-known/oauth-authorization-server",
        "/openapi.json",
    ] {
        let reply = server.send_request(get_request(path, "")).await;
        assert_eq!(reply.status, 200, "{path}");
        assert_eq!(reply.header("cache-control"), Some("public, max-age=300"));
        assert_eq!(reply.header("x-content-type-options"), Some("nosniff"));
        let again = server
            .send_request(get_request(path, &format!("If-None-Match: {}\r\n", reply.header("etag").unwrap())))
            .await;
        assert_eq!((again.status, again.body.as_str()), (304, ""), "{path}");
        assert_eq!(again.header("etag"), reply.header("etag"));
    }
    let keys = server.send_request(get_request("/shop/.well-known/jwks.json", "")).await.json();
    assert_eq!(keys["keys"][0]["kid"], "s1");
    assert_eq!(keys["keys"][0]["alg"], "ES256");
    assert!(keys["keys"][0].get("d").is_none(), "the private part of the key is not published");
    assert_eq!(
        server.send_request(get_request("/shop/.well-known/openid-configuration", "")).await.json(),
        json!({
            "issuer": "https://auth.example.com/shop",
            "jwks_uri": "https://auth.example.com/shop/.well-known/jwks.json",
            "token_endpoint": "https://auth.example.com/v1/shop/token",
            "revocation_endpoint": "https://auth.example.com/v1/shop/revoke",
            "introspection_endpoint": "https://auth.example.com/v1/shop/introspect",
            "userinfo_endpoint": "https://auth.example.com/v1/shop/userinfo",
            "response_types_supported": ["none"],
            "grant_types_supported": ["authorization_code", "refresh_token"],
            "code_challenge_methods_supported": ["S256"],
            "token_endpoint_auth_methods_supported": ["none"],
            "revocation_endpoint_auth_methods_supported": ["none"],
            "introspection_endpoint_auth_methods_supported": ["Bearer"],
            "subject_types_supported": ["public"],
            "id_token_signing_alg_values_supported": ["ES256"],
            "claims_supported": [
                "iss", "aud", "sub", "client_id", "iat", "exp", "jti", "sid", "auth_time", "amr", "email",
                "email_verified", "name", "updated_at",
            ],
        })
    );
}

#[tokio::test]
async fn a_well_formed_request_id_is_kept_and_any_other_is_replaced() {
    let server = TestServer::new(FailingStores::Panicking);
    let id = async |headers: &str| {
        server.send_request(get_request("/", headers)).await.header("x-request-id").unwrap().to_owned()
    };
    assert_eq!(id("X-Request-Id: Trace.1_2-3\r\n").await, "Trace.1_2-3");
    assert_eq!(id(&format!("X-Request-Id: {}\r\n", "a".repeat(128))).await, "a".repeat(128));
    let too_long = format!("X-Request-Id: {}\r\n", "a".repeat(129));
    for bad in ["", "X-Request-Id: a b\r\n", "X-Request-Id: \r\n", "X-Request-Id: a\r\nX-Request-Id: b\r\n", &too_long]
    {
        let generated = Uuid::parse_str(&id(bad).await).unwrap();
        assert_eq!(generated.get_version_num(), 7, "{bad}");
    }
}

#[tokio::test]
async fn cors_headers_depend_on_the_allowed_origins_of_the_app() {
    let server = TestServer::new(FailingStores::Unavailable);
    let preflight = |origin: &str, path: &str| {
        format!(
            "OPTIONS {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nOrigin: {origin}\r\n\
             Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: content-type\r\n\r\n"
        )
    };
    let login = "/v1/shop/email/login";
    let reply = server.send_request(preflight("https://shop.example.com", login)).await;
    assert_eq!(reply.status, 204);
    assert_eq!(reply.header("access-control-allow-origin"), Some("https://shop.example.com"));
    assert_eq!(reply.header("access-control-allow-credentials"), Some("true"));
    assert_eq!(reply.header("access-control-allow-methods"), Some("POST, OPTIONS"));
    let reply = server.send_request(preflight("https://evil.example", login)).await;
    assert_eq!(reply.status, 204);
    assert!(!reply.headers.keys().any(|name| name.starts_with("access-control")), "{:?}", reply.headers);
    server
        .send_request(preflight("https://shop.example.com", "/v1/nobody/email/login"))
        .await
        .assert_refused(404, "app_not_found");

    // Errors have the CORS headers, too: a page of the App must be able to read errors.
    let (_, body) = EMAIL_ENDPOINTS[0];
    for (body, status) in [(body, 503), ("{}", 400)] {
        let reply = server.post(login, "Origin: https://shop.example.com\r\n", body).await;
        assert_eq!(reply.status, status);
        assert_eq!(reply.header("access-control-allow-origin"), Some("https://shop.example.com"));
        assert_eq!(reply.header("vary"), Some("Origin"));
        // A request is not refused because of its origin: login uses no cookie.
        let reply = server.post(login, "Origin: https://evil.example\r\n", body).await;
        assert_eq!(reply.status, status);
        assert_eq!(reply.header("access-control-allow-origin"), None);
        assert_eq!(reply.header("vary"), Some("Origin"));
    }
    let reply = server.send_request(get_request("/openapi.json", "Origin: https://shop.example.com\r\n")).await;
    assert_eq!(reply.header("access-control-allow-origin"), None);
}
