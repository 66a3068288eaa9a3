//! Refusals are held for clients that return before the time in `Retry-After` is over.

use std::time::Duration;

use latchkey_crds::rendered::RenderedApp;
use serde_json::json;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{FailingStores, Reply, TestServer, access_token, exchange, get_request, login_request, wait_until};
use crate::{
    domain::client::ClientAddress,
    http::{
        error::Problem,
        parked::{ParkedConnection, ParkedRefusal, finish, http1_bytes},
        refusals::HoldPlace,
    },
};

/// Sends a login that must be refused. Returns how long the refusal takes.
async fn refused_login(server: &TestServer, last: u8) -> Duration {
    let began = tokio::time::Instant::now();
    let reply = exchange(server.connect_from(server.public(), last), login_request().as_bytes()).await;
    assert!(matches!(reply.status, 429 | 503), "{}", reply.status);
    assert!(reply.header("retry-after").is_some());
    began.elapsed()
}

/// Records that the client 192.0.2.`last` has returned early `returns` times.
fn record_early_returns(server: &TestServer, last: u8, returns: u32) {
    let client = ClientAddress::from_ip([192, 0, 2, last].into());
    let mut now = tokio::time::Instant::now();
    for _ in 0..=returns {
        server.budgets.refusals().hold(client, now, now, Duration::from_secs(5), HoldPlace::Connection);
        now += Duration::from_secs(4);
    }
}

#[tokio::test]
async fn a_client_that_ignores_retry_after_waits_for_its_refusals() {
    for stores in [FailingStores::Overloaded, FailingStores::Limited, FailingStores::Unavailable] {
        let server = TestServer::new(stores);
        for _ in 0..4 {
            refused_login(&server, 1).await;
        }
        assert_eq!(server.budgets.refusals().held_count(), 0);
        record_early_returns(&server, 2, 5);
        assert!(refused_login(&server, 2).await >= Duration::from_secs(1));
        // A refusal that was sent is no longer counted as held.
        assert_eq!(server.budgets.refusals().held_count(), 0);
    }
}

/// Adds a GitHub provider and a redirect URL to an App.
fn add_github(document: &mut RenderedApp) {
    document.redirect_urls = vec!["https://shop.example.com/done".parse().unwrap()];
    let settings = json!({ "preset": "github", "clientID": "x", "secret": "s" });
    let provider = json!({ "name": "github", "resource": "github", "linkByEmail": false, "settings": settings });
    document.providers = vec![serde_json::from_value(provider).unwrap()];
}

/// Begins a flow, and returns the request to its callback.
async fn github_callback() -> String {
    let redirect = TestServer::with_app(FailingStores::Overloaded, add_github)
        .send_request(get_request("/shop/github/redirect", ""))
        .await;
    assert_eq!(redirect.status, 302, "{}", redirect.body);
    let (_, state) = redirect.header("location").unwrap().split_once("state=").unwrap();
    let (cookie, _) = redirect.header("set-cookie").unwrap().split_once(';').unwrap();
    get_request(&format!("/shop/github/callback?state={state}&code=c"), &format!("Cookie: {cookie}\r\n"))
}

#[tokio::test]
async fn a_callback_that_is_refused_before_its_state_is_used_is_held_like_other_refusals() {
    let callback = github_callback().await;
    for (stores, error) in
        [(FailingStores::Limited, "rate_limited"), (FailingStores::Unavailable, "temporarily_unavailable")]
    {
        let server = TestServer::with_app(stores, add_github);
        let refused = async |last| {
            let began = tokio::time::Instant::now();
            let reply = exchange(server.connect_from(server.public(), last), callback.as_bytes()).await;
            assert_eq!((reply.status, reply.header("set-cookie")), (302, None));
            let location = reply.header("location").unwrap();
            assert!(location.starts_with(&format!("https://shop.example.com/done?error={error}&")), "{location}");
            began.elapsed()
        };
        let before = tokio::time::Instant::now();
        refused(1).await;
        let is_logged =
            |_: &usize| server.budgets.refusals().count_for_log("callback", http::StatusCode::FOUND, before);
        assert_eq!((0..20).filter(is_logged).count(), 9, "ten per second are logged, one of them before");
        record_early_returns(&server, 2, 5);
        assert!(refused(2).await >= Duration::from_secs(1));
    }
}

#[tokio::test(start_paused = true)]
async fn a_refusal_of_forward_auth_is_sent_immediately() {
    let server = TestServer::new(FailingStores::Unavailable);
    record_early_returns(&server, 1, 10);
    assert!(refused_login(&server, 1).await >= Duration::from_secs(4));
    let token = access_token(&server);
    for path in ["/v1/shop/authorize", "/v1/shop/authorize/page"] {
        let began = tokio::time::Instant::now();
        let request = get_request(path, &format!("Authorization: Bearer {token}\r\n"));
        let reply = exchange(server.connect_from(server.public(), 1), request.as_bytes()).await;
        reply.assert_refused(503, "temporarily_unavailable");
        assert!(began.elapsed() < Duration::from_millis(500), "{path}: {:?}", began.elapsed());
    }
}

#[tokio::test]
async fn a_drain_sends_held_refusals_immediately() {
    let server = TestServer::new(FailingStores::Overloaded);
    record_early_returns(&server, 1, 10);
    let refused = refused_login(&server, 1);
    let drained = async {
        wait_until("the refusal is held", || server.budgets.refusals().held_count() == 1).await;
        server.drain.begin();
    };
    let (waited, ()) = tokio::join!(refused, drained);
    assert!(waited < Duration::from_secs(4), "{waited:?}");
    assert_eq!(server.budgets.refusals().held_count(), 0);
}

/// A request with a body that does not fit an exhausted budget.
const LARGE_BODY: &[u8] = b"POST /v1/shop/email/login HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n\
                            Content-Length: 65536\r\n\r\n{";

/// Takes all request bytes until the result is dropped.
fn exhaust_budget(server: &TestServer) -> impl Sized {
    server.budgets.request_bytes().try_acquire(None, 16 << 20).unwrap()
}

#[tokio::test(start_paused = true)]
async fn held_refusals_of_large_bodies_occupy_no_connection() {
    let server = TestServer::new(FailingStores::Overloaded);
    let _all = exhaust_budget(&server);
    let service = server.public();
    let addresses = 2..14;
    for last in addresses.clone() {
        record_early_returns(&server, last, 10);
    }
    // The listener has 1,434 connections.
    let began = tokio::time::Instant::now();
    let mut clients = Vec::new();
    for last in addresses.cycle().take(3_000) {
        let mut client = server.connect_from(service.clone(), last);
        client.write_all(LARGE_BODY).await.unwrap();
        clients.push(client);
    }
    wait_until("the refusals are held", || server.budgets.refusals().held_count() == 3_000).await;
    let document = exchange(server.connect_from(service.clone(), 1), get_request("/openapi.json", "").as_bytes()).await;
    assert_eq!(document.status, 200);
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    for mut client in clients {
        let mut reply = Vec::new();
        client.read_to_end(&mut reply).await.unwrap();
        assert!(began.elapsed() >= Duration::from_secs(4), "{:?}", began.elapsed());
        let reply = Reply::parse(&reply);
        reply.assert_refused(503, "temporarily_unavailable");
        assert_eq!((reply.header("connection"), reply.header("retry-after")), (Some("close"), Some("5")));
        assert_eq!(reply.header("content-length"), Some(reply.body.len().to_string().as_str()));
    }
    wait_until("no refusal is held", || server.budgets.refusals().held_count() == 0).await;
}

#[tokio::test(start_paused = true)]
async fn the_refusal_of_a_large_head_is_held() {
    let server = TestServer::new(FailingStores::Overloaded);
    let _all = exhaust_budget(&server);
    record_early_returns(&server, 2, 10);
    let head = format!("GET /openapi.json HTTP/1.1\r\nX-Filler: {}", "x".repeat(20_000));
    for (last, hold) in [(1, 0), (2, 4)] {
        let began = tokio::time::Instant::now();
        let reply = exchange(server.connect_from(server.public(), last), head.as_bytes()).await;
        reply.assert_refused(503, "temporarily_unavailable");
        assert_eq!(began.elapsed().as_secs(), hold);
    }
}

#[tokio::test]
async fn a_drain_sends_held_refusals_of_large_bodies_immediately() {
    let server = TestServer::new(FailingStores::Overloaded);
    let _all = exhaust_budget(&server);
    record_early_returns(&server, 1, 10);
    let refused = exchange(server.connect(server.public()), LARGE_BODY);
    let drained = async {
        wait_until("the refusal is held", || server.budgets.refusals().held_count() == 1).await;
        server.drain.begin();
    };
    let began = tokio::time::Instant::now();
    let (reply, ()) = tokio::join!(refused, drained);
    reply.assert_refused(503, "temporarily_unavailable");
    assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
}

#[tokio::test]
async fn a_refusal_that_is_held_without_its_connection_needs_little_memory() {
    let server = TestServer::new(FailingStores::Overloaded);
    record_early_returns(&server, 1, 10);
    let (client, now) = (ClientAddress::from_ip([192, 0, 2, 1].into()), tokio::time::Instant::now());
    let held = server.budgets.refusals().hold(client, now, now, Duration::from_secs(5), HoldPlace::Socket).unwrap();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let stream = tokio::net::TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let response = http1_bytes(Problem::over_budget().to_response("0197f0a5-5c1e-7f3a-9d52-6f1c1f0f7c11"));
    let response_bytes = response.len();
    let parked = ParkedConnection { stream, refusal: ParkedRefusal::new(response, held), timeouts: server.timeouts };
    let drain = server.drain.begun();
    let task_bytes = size_of_val(&finish(std::future::ready(Some(parked)), &drain));
    // In addition, tokio needs a header for the task, and a registration for the socket.
    assert!(task_bytes + response_bytes + 512 <= 2048, "{task_bytes} + {response_bytes}");
}
