//! Forward auth for ingresses: a real NGINX in front of an application, and the requests that Traefik and Envoy send.

use std::{
    convert::Infallible,
    fs,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use latchkey_tests::{
    builders::App,
    client::{ApiClient, ApiResponse, AuthenticatedClient},
    eventually,
    nginx::Nginx,
    passwords::PASSWORD,
    process,
    stack::Stack,
};
use serde_json::{Map, Value, json};
use tokio::{net::TcpListener, task::JoinHandle};

use crate::support::{NAME, TestApp, app, claims_of};

/// Maximum time until an ended session is refused. The server uses the result of a session lookup for up to a second; a
/// loaded machine takes longer.
const SESSION_END_LIMIT: Duration = Duration::from_secs(10);
/// Maximum time until the server notices that a store is unavailable, or available again.
const STORE_LIMIT: Duration = Duration::from_secs(30);
const EMAIL: &str = "ada@example.com";
const AUTH_HEADERS: [&str; 5] =
    ["x-auth-user-id", "x-auth-email", "x-auth-email-verified", "x-auth-name", "x-auth-session-id"];

/// An application that returns each request as JSON and counts the requests.
struct Application {
    addr: SocketAddr,
    request_count: Arc<AtomicUsize>,
    accept_task: JoinHandle<()>,
}

/// A service, an application, and NGINX in front of the application. NGINX has the configuration of docs/gate.md.
struct NginxSetup {
    test_app: TestApp,
    application: Application,
    nginx: Nginx,
}

// === impl Application ===

impl Application {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let request_count = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&request_count);
        let accept_task = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let counted = Arc::clone(&counted);
                let service = service_fn(move |request| {
                    counted.fetch_add(1, Ordering::Relaxed);
                    echo(request)
                });
                // NGINX can close a connection at any time.
                tokio::spawn(async move {
                    drop(http1::Builder::new().serve_connection(TokioIo::new(stream), service).await);
                });
            }
        });
        Self { addr, request_count, accept_task }
    }

    fn request_count(&self) -> usize {
        self.request_count.load(Ordering::Relaxed)
    }
}

impl Drop for Application {
    fn drop(&mut self) {
        self.accept_task.abort();
    }
}

async fn echo(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let mut headers = Map::new();
    for name in parts.headers.keys() {
        let values: Vec<&str> = parts.headers.get_all(name).iter().filter_map(|value| value.to_str().ok()).collect();
        headers.insert(name.to_string(), json!(values));
    }
    let received = json!({
        "method": parts.method.as_str(),
        "path": parts.uri.path(),
        "headers": headers,
        "body": String::from_utf8_lossy(&body),
    });
    let mut response = Response::new(Full::from(received.to_string()));
    response.headers_mut().insert(http::header::CONTENT_TYPE, http::HeaderValue::from_static("application/json"));
    Ok(response)
}

// === impl NginxSetup ===

impl NginxSetup {
    async fn start(test_app: TestApp) -> Self {
        let application = Application::start().await;
        let addr = process::free_addr();
        let docs = fs::read_to_string(process::root().join("docs/gate.md")).unwrap();
        let (_, block) = docs.split_once("```nginx\n").expect("docs/gate.md has a configuration of NGINX");
        let (configuration, _) = block.split_once("```").unwrap();
        let mut configuration = configuration.to_owned();
        for (documented, actual) in [
            ("server 127.0.0.1:8080;", format!("server {};", test_app.stack.server().public)),
            ("listen 127.0.0.1:8000;", format!("listen {addr};")),
            ("proxy_pass http://127.0.0.1:3000;", format!("proxy_pass http://{};", application.addr)),
            ("/v1/shop/authorize;", format!("/v1/{}/authorize;", test_app.id())),
        ] {
            assert_eq!(configuration.matches(documented).count(), 1, "{documented}");
            configuration = configuration.replace(documented, &actual);
        }
        let nginx = Nginx::start(addr, &configuration).await.unwrap();
        Self { test_app, application, nginx }
    }

    /// Requests a page of the application, with this access token in a cookie.
    async fn get_with_cookie(&self, token: Option<&str>) -> ApiResponse {
        let browser = ApiClient::new(self.nginx.addr());
        let request = browser.request(Method::GET, "basket?sort=price");
        browser.send(with_cookie(request, token)).await
    }

    #[track_caller]
    fn assert_not_reached(&self, expected_count: usize) {
        assert_eq!(self.application.request_count(), expected_count, "a request reached the application");
    }
}

fn with_cookie(request: reqwest::RequestBuilder, token: Option<&str>) -> reqwest::RequestBuilder {
    match token {
        Some(token) => request.header("Cookie", format!("theme=dark; access_token={token}; lang=en")),
        None => request.header("Cookie", "theme=dark"),
    }
}

/// The value of a header that the application received; `None` if it did not receive the header.
fn received_header<'a>(response: &'a ApiResponse, name: &str) -> Option<&'a str> {
    let values = response.body["headers"][name].as_array()?;
    assert_eq!(values.len(), 1, "{name} in {}", response.text);
    values[0].as_str()
}

/// Registers, confirms and logs in a user.
async fn log_in_new_user(test_app: &TestApp, email: &str) -> AuthenticatedClient {
    test_app.register_and_confirm(email).await.authenticate(test_app.id(), email, PASSWORD).await
}

async fn log_out(user: &AuthenticatedClient) {
    user.send(user.request(Method::POST, "logout")).await.expect(StatusCode::OK);
}

/// The token with one changed claim, signed again with the App's key.
fn token_with_claim(test_app: &TestApp, token: &str, claim: &str, value: Value) -> String {
    let document = fs::read(test_app.stack.rendered().join(format!("{}.json", test_app.id()))).unwrap();
    let document: Value = serde_json::from_slice(&document).unwrap();
    let key = &document["keys"]["signing"][0];
    let mut claims = claims_of(token);
    claims[claim] = value;
    let header = Header {
        typ: Some("at+jwt".to_owned()),
        kid: key["id"].as_str().map(str::to_owned),
        ..Header::new(Algorithm::ES256)
    };
    let pem = key["privateKey"].as_str().unwrap();
    jsonwebtoken::encode(&header, &claims, &EncodingKey::from_ec_pem(pem.as_bytes()).unwrap()).unwrap()
}

#[tokio::test]
async fn nginx_lets_only_a_logged_in_browser_through() {
    let (app, other) = (app(), App::new("other"));
    let stack = Stack::builder().app(&app).app(&other).start().await;
    let setup = NginxSetup::start(TestApp { stack, app }).await;
    let user = log_in_new_user(&setup.test_app, EMAIL).await;
    let stranger = setup.test_app.client();
    stranger.register(other.id(), NAME, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let stranger = stranger.authenticate(other.id(), EMAIL, PASSWORD).await;
    let login = user.client().login(setup.test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);

    let allowed = setup.get_with_cookie(Some(user.token())).await.expect(StatusCode::OK);
    assert_eq!((&allowed.body["method"], &allowed.body["path"]), (&json!("GET"), &json!("/basket")));
    let before = setup.application.request_count();
    assert_eq!(before, 1);

    let exp = claims_of(user.token())["exp"].as_i64().unwrap();
    for (who, token) in [
        ("no cookie", None),
        ("an empty cookie", Some(String::new())),
        ("garbage", Some("garbage".to_owned())),
        ("half a token", Some(user.token()[..user.token().len() / 2].to_owned())),
        ("another App's token", Some(stranger.token().to_owned())),
        ("a refresh token", Some(login.string("refresh_token").to_owned())),
        ("an expired token", Some(token_with_claim(&setup.test_app, user.token(), "exp", json!(exp - 3600)))),
        (
            "a foreign issuer",
            Some(token_with_claim(&setup.test_app, user.token(), "iss", json!("https://evil.example/shop"))),
        ),
    ] {
        let refused = setup.get_with_cookie(token.as_deref()).await;
        assert_eq!(refused.status, StatusCode::UNAUTHORIZED, "{who}: {}", refused.text);
        assert!(refused.header("www-authenticate").is_some_and(|header| header.starts_with("Bearer realm=")), "{who}");
        setup.assert_not_reached(before);
    }
    // A token that was signed again, but has valid claims, is accepted. So the two tokens above that were signed again
    // were rejected only because of their claims.
    let renewed = token_with_claim(&setup.test_app, user.token(), "exp", json!(exp + 1));
    setup.get_with_cookie(Some(&renewed)).await.expect(StatusCode::OK);

    // A program sends its token in a header. Its request reaches the application unchanged.
    let program = ApiClient::new(setup.nginx.addr());
    let request = program.request(Method::POST, "basket").bearer_auth(user.token()).body("two apples");
    let received = program.send(request).await.expect(StatusCode::OK);
    assert_eq!((&received.body["method"], &received.body["body"]), (&json!("POST"), &json!("two apples")));
    let before = setup.application.request_count();
    let request = program.request(Method::POST, "basket").body("two apples");
    program.send(request).await.expect(StatusCode::UNAUTHORIZED);
    setup.assert_not_reached(before);
}

#[tokio::test]
async fn nginx_overrides_the_identity_headers_of_a_client() {
    let setup = NginxSetup::start(TestApp::start().await).await;
    let test_app = &setup.test_app;
    let user = log_in_new_user(test_app, EMAIL).await;
    let claims = claims_of(user.token());
    let with_forged_headers = |browser: &ApiClient| {
        let mut request = browser.request(Method::GET, "basket");
        for name in AUTH_HEADERS {
            request = request
                .header(name, "root")
                .header(name.to_uppercase(), "admin")
                .header(name.replace('-', "_"), "root");
        }
        request
    };
    let browser = ApiClient::new(setup.nginx.addr());
    let received =
        browser.send(with_cookie(with_forged_headers(&browser), Some(user.token()))).await.expect(StatusCode::OK);
    assert_eq!(received_header(&received, "x-auth-user-id"), claims["sub"].as_str());
    assert_eq!(received_header(&received, "x-auth-session-id"), claims["sid"].as_str());
    assert_eq!(received_header(&received, "x-auth-email"), Some(EMAIL));
    assert_eq!(received_header(&received, "x-auth-email-verified"), Some("true"));
    assert_eq!(received_header(&received, "x-auth-name"), Some("Ada%20Lovelace"));
    assert!(!received.text.contains("root") && !received.text.contains("admin"), "{}", received.text);

    // For an unverified user, the application receives no `X-Auth-Email` header, even if the client sends one.
    let client = test_app.client();
    let unverified = "grace@example.com";
    client.register(test_app.id(), "Zoë „Ω“ O'Neil 100%", unverified, PASSWORD).await.expect(StatusCode::OK);
    let user = client.authenticate(test_app.id(), unverified, PASSWORD).await;
    let received =
        browser.send(with_cookie(with_forged_headers(&browser), Some(user.token()))).await.expect(StatusCode::OK);
    assert_eq!(received_header(&received, "x-auth-email"), None);
    assert_eq!(received_header(&received, "x-auth-email-verified"), Some("false"));
    assert_eq!(
        received_header(&received, "x-auth-name"),
        Some("Zo%C3%AB%20%E2%80%9E%CE%A9%E2%80%9C%20O%27Neil%20100%25")
    );
    assert!(!received.text.contains("root") && !received.text.contains("admin"), "{}", received.text);
}

#[tokio::test]
async fn an_ended_session_is_refused_within_a_second_and_other_sessions_continue() {
    let setup = NginxSetup::start(TestApp::start().await).await;
    let user = log_in_new_user(&setup.test_app, EMAIL).await;
    let other_session = setup.test_app.client().authenticate(setup.test_app.id(), EMAIL, PASSWORD).await;
    for _ in 0..20 {
        setup.get_with_cookie(Some(user.token())).await.expect(StatusCode::OK);
    }
    log_out(&user).await;
    eventually("the browser is refused", SESSION_END_LIMIT, || async {
        let response = setup.get_with_cookie(Some(user.token())).await;
        (response.status == StatusCode::UNAUTHORIZED).then_some(())
    })
    .await;
    let before = setup.application.request_count();
    for _ in 0..20 {
        setup.get_with_cookie(Some(user.token())).await.expect(StatusCode::UNAUTHORIZED);
    }
    setup.assert_not_reached(before);
    setup.get_with_cookie(Some(other_session.token())).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn requests_with_a_valid_token_get_503_and_never_401_without_redis() {
    let setup = NginxSetup::start(TestApp::from_builder(app(), Stack::builder().proxied()).await).await;
    let user = log_in_new_user(&setup.test_app, EMAIL).await;
    setup.get_with_cookie(Some(user.token())).await.expect(StatusCode::OK);
    let redis = setup.test_app.stack.redis_proxy.as_ref().unwrap();
    redis.refuse().await;
    // Without Redis, the server still accepts a session for up to a second after the last lookup.
    let refused = eventually("the browser gets a 503", STORE_LIMIT, || async {
        let response = setup.get_with_cookie(Some(user.token())).await;
        assert_ne!(response.status, StatusCode::UNAUTHORIZED);
        (response.status != StatusCode::OK).then_some(response)
    })
    .await;
    let refused = refused.expect(StatusCode::SERVICE_UNAVAILABLE);
    assert!(refused.header("retry-after").is_some());
    let response = user.get("authorize").await.expect_error(StatusCode::SERVICE_UNAVAILABLE, "temporarily_unavailable");
    assert!(response.header("retry-after").is_some());
    // To reject a malformed token, the server needs no store.
    setup.get_with_cookie(Some("garbage")).await.expect(StatusCode::UNAUTHORIZED);
    redis.restore().unwrap();
    eventually("the browser is accepted again", STORE_LIMIT, || async {
        (setup.get_with_cookie(Some(user.token())).await.status == StatusCode::OK).then_some(())
    })
    .await;
}

/// The number of session lookups of the server.
async fn session_lookups(test_app: &TestApp) -> u64 {
    let metrics = test_app.stack.server().get_ops("metrics").await.text;
    let name = "latchkey_redis_seconds_count{operation=\"get_session\"} ";
    let count = metrics.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("0");
    count.parse().unwrap()
}

#[tokio::test]
async fn a_session_is_looked_up_once_per_second_however_often_its_token_is_sent() {
    let test_app = TestApp::start().await;
    let user = log_in_new_user(&test_app, EMAIL).await;
    let other = log_in_new_user(&test_app, "grace@example.com").await;
    let before = session_lookups(&test_app).await;
    let began = Instant::now();
    for _ in 0..300 {
        user.get("authorize").await.expect(StatusCode::OK);
    }
    let max_lookups = began.elapsed().as_secs() + 1;
    let after = session_lookups(&test_app).await;
    assert!(
        (1..=max_lookups).contains(&(after - before)),
        "{} lookups, at most {max_lookups} are expected",
        after - before
    );
    // A cached lookup is used only for its own token, and a malformed token is rejected without a lookup.
    other.get("authorize").await.expect(StatusCode::OK);
    assert_eq!(session_lookups(&test_app).await, after + 1);
    for _ in 0..50 {
        let stranger = test_app.client().with_token(test_app.id(), "a.b.c");
        stranger.get("authorize").await.expect(StatusCode::UNAUTHORIZED);
    }
    assert_eq!(session_lookups(&test_app).await, after + 1);
}

/// The values of the five forward auth headers.
fn auth_header_values(headers: &HeaderMap) -> Vec<String> {
    let value = |name: &str| {
        let mut values = headers.get_all(name).iter();
        let (Some(only), None) = (values.next(), values.next()) else { panic!("{name} once in {headers:?}") };
        only.to_str().unwrap().to_owned()
    };
    AUTH_HEADERS.iter().map(|name| value(name)).collect()
}

#[tokio::test]
async fn forward_auth_accepts_the_requests_of_traefik_and_envoy() {
    let test_app = TestApp::start_with(app().set("/allowedOrigins", json!(["https://shop.example.com"]))).await;
    let user = log_in_new_user(&test_app, EMAIL).await;
    let claims = claims_of(user.token());
    let id = |claim: &str| claims[claim].as_str().unwrap().to_owned();
    let expected = [id("sub"), EMAIL.to_owned(), "true".to_owned(), "Ada%20Lovelace".to_owned(), id("sid")];
    let endpoint = format!("v1/{}/authorize", test_app.id());
    let client = test_app.client();

    // Traefik sends GET requests without a body to one URL. Headers describe the original request, except for the
    // length of the original body.
    let with_traefik_headers = |request: reqwest::RequestBuilder| {
        request
            .header("X-Forwarded-Method", "POST")
            .header("X-Forwarded-Proto", "https")
            .header("X-Forwarded-Host", "shop.example.com")
            .header("X-Forwarded-Uri", "/basket?sort=price")
            .header("X-Forwarded-For", "203.0.113.9")
            .header("Origin", "https://shop.example.com")
            .header("Content-Type", "application/x-www-form-urlencoded")
    };
    let auth_request = with_traefik_headers(client.request(Method::GET, &endpoint)).bearer_auth(user.token());
    let response = client.send(auth_request).await.expect(StatusCode::OK);
    assert_eq!(auth_header_values(&response.headers), expected);
    assert_eq!((response.text.as_str(), response.header("cache-control")), ("", Some("no-store")));
    client
        .send(with_traefik_headers(client.request(Method::GET, &endpoint)))
        .await
        .expect_error(StatusCode::UNAUTHORIZED, "invalid_token");

    // Envoy keeps the method, appends the path of the original request to the path of the URL, and sends no body.
    for method in ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND"] {
        let method: Method = method.parse().unwrap();
        for path in ["", "/", "/basket", "/a/b/c/d/e/f", "//", "/..%2f..%2femail/login", "/authorize?token=x&y=%00"] {
            let auth_request = || {
                client
                    .request(method.clone(), &format!("{endpoint}{path}"))
                    .header("Content-Length", "0")
                    .header("X-Envoy-Internal", "true")
                    .header("Origin", "https://shop.example.com")
                    .header("Access-Control-Request-Method", "PUT")
            };
            let response = client.send(auth_request().bearer_auth(user.token())).await;
            assert_eq!(response.status, StatusCode::OK, "{method} {path}: {}", response.text);
            assert_eq!(auth_header_values(&response.headers), expected, "{method} {path}");
            let refused = client.send(auth_request()).await;
            assert_eq!(refused.status, StatusCode::UNAUTHORIZED, "{method} {path}: {}", refused.text);
            for response in [response, refused] {
                let cors = response.headers.keys().find(|name| name.as_str().starts_with("access-control-"));
                assert_eq!(cors, None, "{method} {path}");
            }
        }
    }

    // The server ignores a body of any content type.
    let auth_request =
        client.request(Method::POST, &endpoint).header("Content-Type", "text/plain").body("{".repeat(2000));
    client.send(auth_request.bearer_auth(user.token())).await.expect(StatusCode::OK);

    // The token is accepted only in the Authorization header.
    let cookie = with_cookie(client.request(Method::GET, &endpoint), Some(user.token()));
    client.send(cookie).await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    let path_with_token = format!("{endpoint}?access_token={}", user.token());
    client.get(&path_with_token).await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    let two_tokens = client.request(Method::GET, &endpoint).bearer_auth(user.token()).bearer_auth(user.token());
    client.send(two_tokens).await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    client.get("v1/nobody/authorize").await.expect_error(StatusCode::NOT_FOUND, "app_not_found");
    for misspelled in ["authorized", "authoriz", "Authorize"] {
        client
            .get(&format!("v1/{}/{misspelled}", test_app.id()))
            .await
            .expect_error(StatusCode::NOT_FOUND, "not_found");
    }
}
