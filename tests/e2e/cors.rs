//! CORS: responses allow exactly the origins that the App lists, with credentials, and never a wildcard (specification:
//! HTTP API, CORS).

use http::{Method, StatusCode};
use latchkey_tests::{
    client::{ApiClient, ApiResponse},
    passwords::PASSWORD,
};
use serde_json::{Value, json};

use crate::support::{NAME, TestApp, app};

const LISTED_ORIGIN: &str = "https://shop.example.com";
const EMAIL: &str = "ada@example.com";

async fn start_app() -> TestApp {
    TestApp::start_with(app().set("/allowedOrigins", json!([LISTED_ORIGIN, "http://localhost:3000"]))).await
}

async fn preflight(client: &ApiClient, path: &str, origin: &str, method: &str) -> ApiResponse {
    let request = client
        .request(Method::OPTIONS, path)
        .header("origin", origin)
        .header("access-control-request-method", method)
        .header("access-control-request-headers", "authorization,content-type");
    client.send(request).await
}

async fn post(client: &ApiClient, path: &str, origin: &str, body: &Value) -> ApiResponse {
    client.send(client.request(Method::POST, path).header("origin", origin).json(body)).await
}

fn cors_headers(response: &ApiResponse) -> Vec<&str> {
    let names = response.headers.keys().map(http::HeaderName::as_str);
    names.filter(|name| name.starts_with("access-control-")).collect()
}

#[tokio::test]
async fn options_answers_a_preflight_from_a_listed_origin() {
    let test_app = start_app().await;
    for operation in ["login", "register", "verify", "confirm", "forgot-password", "confirm-password"] {
        for origin in [LISTED_ORIGIN, "http://localhost:3000"] {
            let response = preflight(&test_app.client(), &test_app.email_path(operation), origin, "POST").await;
            assert!(response.status.is_success(), "{}", response.status);
            assert_eq!(response.header("access-control-allow-origin"), Some(origin));
            assert_eq!(response.header("access-control-allow-credentials"), Some("true"));
            let methods = response.header("access-control-allow-methods").unwrap();
            assert!(methods.split(", ").any(|method| method == "POST"), "{methods}");
            let headers = response.header("access-control-allow-headers").unwrap().to_lowercase();
            assert!(headers.contains("content-type") && headers.contains("authorization"), "{headers}");
            assert!(response.header("vary").unwrap().contains("Origin"));
            assert!(response.header("x-request-id").is_some());
        }
    }
}

#[tokio::test]
async fn an_unlisted_origin_gets_a_response_without_cors_headers() {
    let test_app = start_app().await;
    for origin in [
        "https://evil.example",
        "https://shop.example.com.evil.example",
        "https://evil.shop.example.com",
        "http://shop.example.com",
        "https://shop.example.com:443",
        "https://shop.example.com/",
        "https://SHOP.example.com",
        "http://localhost:3001",
        "null",
        "*",
        "",
    ] {
        let client = test_app.client();
        let response = preflight(&client, &test_app.email_path("login"), origin, "POST").await;
        assert_eq!(cors_headers(&response), [""; 0], "{origin}");
        assert_ne!(response.status, StatusCode::FORBIDDEN);
        let body = json!({ "email": EMAIL, "password": PASSWORD });
        let response = post(&client, &test_app.email_path("login"), origin, &body).await;
        let response = response.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials");
        assert_eq!(cors_headers(&response), [""; 0], "{origin}");
        assert!(response.header("vary").is_some_and(|vary| vary.contains("Origin")), "caches must know");
    }
}

#[tokio::test]
async fn a_page_from_a_listed_origin_can_read_responses_and_errors() {
    let test_app = start_app().await;
    let client = test_app.client();
    let account = json!({ "name": NAME, "email": EMAIL, "password": PASSWORD });
    let responses = [
        (post(&client, &test_app.email_path("register"), LISTED_ORIGIN, &account).await, StatusCode::OK),
        (post(&client, &test_app.email_path("login"), LISTED_ORIGIN, &account).await, StatusCode::OK),
        (
            post(&client, &test_app.email_path("confirm"), LISTED_ORIGIN, &json!({ "code": "x" })).await,
            StatusCode::BAD_REQUEST,
        ),
        (post(&client, &test_app.email_path("verify"), LISTED_ORIGIN, &json!({})).await, StatusCode::UNAUTHORIZED),
        (post(&client, &test_app.email_path("login"), LISTED_ORIGIN, &json!([])).await, StatusCode::BAD_REQUEST),
    ];
    for (response, status) in responses {
        let response = response.expect(status);
        assert_eq!(response.header("access-control-allow-origin"), Some(LISTED_ORIGIN));
        assert_eq!(response.header("access-control-allow-credentials"), Some("true"));
        let exposed = response.header("access-control-expose-headers").unwrap().to_lowercase();
        for name in ["x-request-id", "retry-after"] {
            assert!(exposed.contains(name), "{exposed}");
        }
        assert!(response.header("vary").unwrap().contains("Origin"));
    }
}

#[tokio::test]
async fn no_response_has_a_wildcard() {
    let test_app = start_app().await;
    let client = test_app.client();
    let jwks = format!("{}/.well-known/jwks.json", test_app.id());
    for path in [test_app.email_path("login").as_str(), &jwks, "openapi.json", "v1/nowhere/email/login", "nothing"] {
        for origin in [LISTED_ORIGIN, "https://evil.example"] {
            let responses = [
                preflight(&client, path, origin, "POST").await,
                client.send(client.request(Method::GET, path).header("origin", origin)).await,
            ];
            for response in responses {
                let allowed = response.header("access-control-allow-origin");
                assert!(
                    allowed.is_none_or(|allowed| allowed == LISTED_ORIGIN && origin == LISTED_ORIGIN),
                    "{path}: {allowed:?}"
                );
            }
        }
    }
}

#[tokio::test]
async fn an_app_without_origins_allows_no_origin() {
    let test_app = TestApp::start().await;
    let response = preflight(&test_app.client(), &test_app.email_path("login"), LISTED_ORIGIN, "POST").await;
    assert_eq!(cors_headers(&response), [""; 0]);
}
