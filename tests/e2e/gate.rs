//! The gate for ingresses: a real NGINX in front of an application, and the requests that Traefik and Envoy send.

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
    client::{Anonymous, Answer, SignedIn},
    eventually,
    nginx::Nginx,
    process,
    stack::Stack,
};
use serde_json::{Map, Value, json};
use tokio::{net::TcpListener, task::JoinHandle};

use crate::support::{NAME, PASSWORD, Shop, app, claims_of};

/// A session is looked up each second; a loaded machine takes longer.
const OUT_LIMIT: Duration = Duration::from_secs(10);
/// What a store that is cut off takes to be noticed, or to be there again.
const STORE_LIMIT: Duration = Duration::from_secs(30);
const EMAIL: &str = "ada@example.com";
const HEADERS: [&str; 5] =
    ["x-auth-user-id", "x-auth-email", "x-auth-email-verified", "x-auth-name", "x-auth-session-id"];

/// An application that tells what it was sent, and counts.
struct Application {
    addr: SocketAddr,
    asked: Arc<AtomicUsize>,
    accepting: JoinHandle<()>,
}

/// A service, an application, and NGINX before it as the docs configure it.
struct Front {
    shop: Shop,
    application: Application,
    nginx: Nginx,
}

// === impl Application ===

impl Application {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let asked = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&asked);
        let accepting = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let counted = Arc::clone(&counted);
                let service = service_fn(move |request| {
                    counted.fetch_add(1, Ordering::Relaxed);
                    tell(request)
                });
                // NGINX closes connections when it likes.
                tokio::spawn(async move {
                    drop(http1::Builder::new().serve_connection(TokioIo::new(stream), service).await);
                });
            }
        });
        Self { addr, asked, accepting }
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }
}

impl Drop for Application {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn tell(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let mut headers = Map::new();
    for name in parts.headers.keys() {
        let values: Vec<&str> = parts.headers.get_all(name).iter().filter_map(|value| value.to_str().ok()).collect();
        headers.insert(name.to_string(), json!(values));
    }
    let told = json!({
        "method": parts.method.as_str(),
        "path": parts.uri.path(),
        "headers": headers,
        "body": String::from_utf8_lossy(&body),
    });
    let mut response = Response::new(Full::from(told.to_string()));
    response.headers_mut().insert(http::header::CONTENT_TYPE, http::HeaderValue::from_static("application/json"));
    Ok(response)
}

// === impl Front ===

impl Front {
    async fn of(shop: Shop) -> Self {
        let application = Application::start().await;
        let addr = process::free_addr();
        let docs = fs::read_to_string(process::root().join("docs/gate.md")).unwrap();
        let (_, block) = docs.split_once("```nginx\n").expect("docs/gate.md has a configuration of NGINX");
        let (configuration, _) = block.split_once("```").unwrap();
        let mut configuration = configuration.to_owned();
        for (documented, ours) in [
            ("server 127.0.0.1:8080;", format!("server {};", shop.stack.server().public)),
            ("listen 127.0.0.1:8000;", format!("listen {addr};")),
            ("proxy_pass http://127.0.0.1:3000;", format!("proxy_pass http://{};", application.addr)),
            ("/v1/shop/authorize;", format!("/v1/{}/authorize;", shop.id())),
        ] {
            assert_eq!(configuration.matches(documented).count(), 1, "{documented}");
            configuration = configuration.replace(documented, &ours);
        }
        let nginx = Nginx::start(addr, &configuration).await.unwrap();
        Self { shop, application, nginx }
    }

    /// A browser with this in the application's cookie, and with headers of its own making.
    async fn visit(&self, token: Option<&str>) -> Answer {
        let browser = Anonymous::new(self.nginx.addr());
        let request = browser.request(Method::GET, "basket?sort=price");
        browser.send(with_cookie(request, token)).await
    }

    #[track_caller]
    fn nobody_came(&self, before: usize) {
        assert_eq!(self.application.asked(), before, "the application was asked");
    }
}

fn with_cookie(request: reqwest::RequestBuilder, token: Option<&str>) -> reqwest::RequestBuilder {
    match token {
        Some(token) => request.header("Cookie", format!("theme=dark; access_token={token}; lang=en")),
        None => request.header("Cookie", "theme=dark"),
    }
}

/// The header as the application got it; none where it did not.
fn got<'a>(answer: &'a Answer, name: &str) -> Option<&'a str> {
    let values = answer.body["headers"][name].as_array()?;
    assert_eq!(values.len(), 1, "{name} in {}", answer.text);
    values[0].as_str()
}

/// A user with a verified address, signed in.
async fn signed_in(shop: &Shop, email: &str) -> SignedIn {
    shop.confirmed(email).await.sign_in(shop.id(), email, PASSWORD).await
}

async fn log_out(user: &SignedIn) {
    user.send(user.request(Method::POST, "logout")).await.expect(StatusCode::OK);
}

/// The token again, with one claim changed and signed anew by the App's own key.
fn resigned(shop: &Shop, token: &str, claim: &str, value: Value) -> String {
    let document = fs::read(shop.stack.rendered().join(format!("{}.json", shop.id()))).unwrap();
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
async fn nginx_lets_a_signed_in_browser_through_and_nobody_else() {
    let (app, other) = (app(), App::new("other"));
    let stack = Stack::builder().app(&app).app(&other).start().await;
    let front = Front::of(Shop { stack, app }).await;
    let user = signed_in(&front.shop, EMAIL).await;
    let stranger = front.shop.client();
    stranger.register(other.id(), NAME, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let stranger = stranger.sign_in(other.id(), EMAIL, PASSWORD).await;
    let login = user.client().login(front.shop.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);

    let through = front.visit(Some(user.token())).await.expect(StatusCode::OK);
    assert_eq!((&through.body["method"], &through.body["path"]), (&json!("GET"), &json!("/basket")));
    let before = front.application.asked();
    assert_eq!(before, 1);

    let exp = claims_of(user.token())["exp"].as_i64().unwrap();
    for (who, token) in [
        ("no cookie", None),
        ("an empty one", Some(String::new())),
        ("garbage", Some("garbage".to_owned())),
        ("half a token", Some(user.token()[..user.token().len() / 2].to_owned())),
        ("another App's token", Some(stranger.token().to_owned())),
        ("a refresh token", Some(login.string("refresh_token").to_owned())),
        ("an expired token", Some(resigned(&front.shop, user.token(), "exp", json!(exp - 3600)))),
        ("another issuer's", Some(resigned(&front.shop, user.token(), "iss", json!("https://evil.example/shop")))),
    ] {
        let refused = front.visit(token.as_deref()).await;
        assert_eq!(refused.status, StatusCode::UNAUTHORIZED, "{who}: {}", refused.text);
        assert!(refused.header("www-authenticate").is_some_and(|told| told.starts_with("Bearer realm=")), "{who}");
        front.nobody_came(before);
    }
    // What was signed anew is refused for its claim alone.
    let renewed = resigned(&front.shop, user.token(), "exp", json!(exp + 1));
    front.visit(Some(&renewed)).await.expect(StatusCode::OK);

    // A program shows its token itself, and what it sends arrives whole.
    let program = Anonymous::new(front.nginx.addr());
    let request = program.request(Method::POST, "basket").bearer_auth(user.token()).body("two apples");
    let told = program.send(request).await.expect(StatusCode::OK);
    assert_eq!((&told.body["method"], &told.body["body"]), (&json!("POST"), &json!("two apples")));
    let before = front.application.asked();
    let request = program.request(Method::POST, "basket").body("two apples");
    program.send(request).await.expect(StatusCode::UNAUTHORIZED);
    front.nobody_came(before);
}

#[tokio::test]
async fn nginx_tells_the_application_who_it_is_whatever_a_client_says() {
    let front = Front::of(Shop::open().await).await;
    let shop = &front.shop;
    let user = signed_in(shop, EMAIL).await;
    let claims = claims_of(user.token());
    let lying = |browser: &Anonymous| {
        let mut request = browser.request(Method::GET, "basket");
        for name in HEADERS {
            request = request
                .header(name, "root")
                .header(name.to_uppercase(), "admin")
                .header(name.replace('-', "_"), "root");
        }
        request
    };
    let browser = Anonymous::new(front.nginx.addr());
    let told = browser.send(with_cookie(lying(&browser), Some(user.token()))).await.expect(StatusCode::OK);
    assert_eq!(got(&told, "x-auth-user-id"), claims["sub"].as_str());
    assert_eq!(got(&told, "x-auth-session-id"), claims["sid"].as_str());
    assert_eq!(got(&told, "x-auth-email"), Some(EMAIL));
    assert_eq!(got(&told, "x-auth-email-verified"), Some("true"));
    assert_eq!(got(&told, "x-auth-name"), Some("Ada%20Lovelace"));
    assert!(!told.text.contains("root") && !told.text.contains("admin"), "{}", told.text);

    // An unverified user has no address, and a client cannot give them one.
    let client = shop.client();
    let unverified = "grace@example.com";
    client.register(shop.id(), "Zoë „Ω“ O'Neil 100%", unverified, PASSWORD).await.expect(StatusCode::OK);
    let user = client.sign_in(shop.id(), unverified, PASSWORD).await;
    let told = browser.send(with_cookie(lying(&browser), Some(user.token()))).await.expect(StatusCode::OK);
    assert_eq!(got(&told, "x-auth-email"), None);
    assert_eq!(got(&told, "x-auth-email-verified"), Some("false"));
    assert_eq!(got(&told, "x-auth-name"), Some("Zo%C3%AB%20%E2%80%9E%CE%A9%E2%80%9C%20O%27Neil%20100%25"));
    assert!(!told.text.contains("root") && !told.text.contains("admin"), "{}", told.text);
}

#[tokio::test]
async fn an_ended_session_is_out_within_a_second_and_its_neighbour_stays() {
    let front = Front::of(Shop::open().await).await;
    let user = signed_in(&front.shop, EMAIL).await;
    let neighbour = front.shop.client().sign_in(front.shop.id(), EMAIL, PASSWORD).await;
    for _ in 0..20 {
        front.visit(Some(user.token())).await.expect(StatusCode::OK);
    }
    log_out(&user).await;
    eventually("the browser is out", OUT_LIMIT, || async {
        let answer = front.visit(Some(user.token())).await;
        (answer.status == StatusCode::UNAUTHORIZED).then_some(())
    })
    .await;
    let before = front.application.asked();
    for _ in 0..20 {
        front.visit(Some(user.token())).await.expect(StatusCode::UNAUTHORIZED);
    }
    front.nobody_came(before);
    front.visit(Some(neighbour.token())).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn without_redis_nobody_comes_in_and_nobody_is_called_a_stranger() {
    let front = Front::of(Shop::of(app(), Stack::builder().proxied()).await).await;
    let user = signed_in(&front.shop, EMAIL).await;
    front.visit(Some(user.token())).await.expect(StatusCode::OK);
    let redis = front.shop.stack.redis_proxy.as_ref().unwrap();
    redis.refuse().await;
    // Who was let in a moment ago still is.
    let away = eventually("the browser is told to wait", STORE_LIMIT, || async {
        let answer = front.visit(Some(user.token())).await;
        assert_ne!(answer.status, StatusCode::UNAUTHORIZED);
        (answer.status != StatusCode::OK).then_some(answer)
    })
    .await;
    let away = away.expect(StatusCode::SERVICE_UNAVAILABLE);
    assert!(away.header("retry-after").is_some());
    let asked = user.get("authorize").await.expect_error(StatusCode::SERVICE_UNAVAILABLE, "temporarily_unavailable");
    assert!(asked.header("retry-after").is_some());
    // Garbage needs no store.
    front.visit(Some("garbage")).await.expect(StatusCode::UNAUTHORIZED);
    redis.restore().unwrap();
    eventually("the browser is in again", STORE_LIMIT, || async {
        (front.visit(Some(user.token())).await.status == StatusCode::OK).then_some(())
    })
    .await;
}

/// How often the server has looked a session up.
async fn looks(shop: &Shop) -> u64 {
    let metrics = shop.stack.server().ops("metrics").await.text;
    let line = "latchkey_redis_seconds_count{operation=\"get_session\"} ";
    let count = metrics.lines().find_map(|told| told.strip_prefix(line)).unwrap_or("0");
    count.parse().unwrap()
}

#[tokio::test]
async fn however_often_a_token_comes_its_session_is_looked_up_once_a_second() {
    let shop = Shop::open().await;
    let user = signed_in(&shop, EMAIL).await;
    let other = signed_in(&shop, "grace@example.com").await;
    let before = looks(&shop).await;
    let began = Instant::now();
    for _ in 0..300 {
        user.get("authorize").await.expect(StatusCode::OK);
    }
    let most = began.elapsed().as_secs() + 1;
    let after = looks(&shop).await;
    assert!((1..=most).contains(&(after - before)), "{} looks, at most {most} are right", after - before);
    // What is known of one token is nothing to another, and no store keeps the gate from refusing.
    other.get("authorize").await.expect(StatusCode::OK);
    assert_eq!(looks(&shop).await, after + 1);
    for _ in 0..50 {
        let stranger = shop.client().signed_in(shop.id(), "a.b.c");
        stranger.get("authorize").await.expect(StatusCode::UNAUTHORIZED);
    }
    assert_eq!(looks(&shop).await, after + 1);
}

/// The five headers as the gate sends them.
fn five(headers: &HeaderMap) -> Vec<String> {
    let value = |name: &str| {
        let mut values = headers.get_all(name).iter();
        let (Some(only), None) = (values.next(), values.next()) else { panic!("{name} once in {headers:?}") };
        only.to_str().unwrap().to_owned()
    };
    HEADERS.iter().map(|name| value(name)).collect()
}

#[tokio::test]
async fn the_gate_takes_what_traefik_and_envoy_send() {
    let shop = Shop::with(app().set("/allowedOrigins", json!(["https://shop.example.com"]))).await;
    let user = signed_in(&shop, EMAIL).await;
    let claims = claims_of(user.token());
    let id = |claim: &str| claims[claim].as_str().unwrap().to_owned();
    let expected = [id("sub"), EMAIL.to_owned(), "true".to_owned(), "Ada%20Lovelace".to_owned(), id("sid")];
    let gate = format!("v1/{}/authorize", shop.id());
    let client = shop.client();

    // Traefik asks by GET at one address, and tells of the request in headers; a POST's length is left out.
    let traefik = |request: reqwest::RequestBuilder| {
        request
            .header("X-Forwarded-Method", "POST")
            .header("X-Forwarded-Proto", "https")
            .header("X-Forwarded-Host", "shop.example.com")
            .header("X-Forwarded-Uri", "/basket?sort=price")
            .header("X-Forwarded-For", "203.0.113.9")
            .header("Origin", "https://shop.example.com")
            .header("Content-Type", "application/x-www-form-urlencoded")
    };
    let ask = traefik(client.request(Method::GET, &gate)).bearer_auth(user.token());
    let answer = client.send(ask).await.expect(StatusCode::OK);
    assert_eq!(five(&answer.headers), expected);
    assert_eq!((answer.text.as_str(), answer.header("cache-control")), ("", Some("no-store")));
    client
        .send(traefik(client.request(Method::GET, &gate)))
        .await
        .expect_error(StatusCode::UNAUTHORIZED, "invalid_token");

    // Envoy keeps the method, puts the path behind the prefix, and sends no body.
    for method in ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND"] {
        let method: Method = method.parse().unwrap();
        for path in ["", "/", "/basket", "/a/b/c/d/e/f", "//", "/..%2f..%2femail/login", "/authorize?token=x&y=%00"] {
            let ask = || {
                client
                    .request(method.clone(), &format!("{gate}{path}"))
                    .header("Content-Length", "0")
                    .header("X-Envoy-Internal", "true")
                    .header("Origin", "https://shop.example.com")
                    .header("Access-Control-Request-Method", "PUT")
            };
            let answer = client.send(ask().bearer_auth(user.token())).await;
            assert_eq!(answer.status, StatusCode::OK, "{method} {path}: {}", answer.text);
            assert_eq!(five(&answer.headers), expected, "{method} {path}");
            let refused = client.send(ask()).await;
            assert_eq!(refused.status, StatusCode::UNAUTHORIZED, "{method} {path}: {}", refused.text);
            for answer in [answer, refused] {
                let cors = answer.headers.keys().find(|name| name.as_str().starts_with("access-control-"));
                assert_eq!(cors, None, "{method} {path}");
            }
        }
    }

    // A body is nothing to the gate, whatever it says of itself.
    let ask = client.request(Method::POST, &gate).header("Content-Type", "text/plain").body("{".repeat(2000));
    client.send(ask.bearer_auth(user.token())).await.expect(StatusCode::OK);

    // The token comes in that one header alone.
    let cookie = with_cookie(client.request(Method::GET, &gate), Some(user.token()));
    client.send(cookie).await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    let query = format!("{gate}?access_token={}", user.token());
    client.get(&query).await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    let twice = client.request(Method::GET, &gate).bearer_auth(user.token()).bearer_auth(user.token());
    client.send(twice).await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    client.get("v1/nobody/authorize").await.expect_error(StatusCode::NOT_FOUND, "app_not_found");
    for near in ["authorized", "authoriz", "Authorize"] {
        client.get(&format!("v1/{}/{near}", shop.id())).await.expect_error(StatusCode::NOT_FOUND, "not_found");
    }
}
