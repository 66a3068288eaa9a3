//! Clients and providers that overload a server: each has a limit, and other clients are served.

use std::{fs, time::Duration};

use futures::{StreamExt, stream, stream::FuturesUnordered};
use http::{Method, StatusCode};
use latchkey_tests::{eventually, stack::ServerProcess};
use serde_json::json;

use super::{AppRedirect, CookieClient, Person, SocialTest, app};

const LIMIT: Duration = Duration::from_secs(30);
/// Maximum number of concurrent calls of one client address to one Provider (docs/decisions/0024).
const MAX_CALLS_PER_CLIENT: usize = 4;
const HOUR: u32 = 3600;

fn grace() -> Person {
    Person::verified("1", "grace@example.com")
}

/// The peak resident memory in KiB (`VmHWM` of proc(5)).
fn peak_memory_kib(server: &ServerProcess) -> u64 {
    let pid = server.pid().expect("the server runs");
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("the server runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a VmHWM line");
    line.trim().trim_end_matches("kB").trim().parse().expect("a number")
}

#[tokio::test]
async fn a_storm_of_callbacks_from_one_client_address_does_not_block_other_clients() {
    let social = SocialTest::start().await;
    // Each flow has its own cookie jar, because a browser has at most four flows.
    let client = social.test_app.client();
    let mut flows = Vec::new();
    for _ in 0..32 {
        let mut browser = CookieClient { client: client.clone(), ..social.new_client() };
        let authorization = browser.start_flow(&social.path("redirect")).await;
        let code = social.upstream.approve(&authorization, &Person::verified("storm", "storm@example.com"));
        flows.push((browser, authorization, code));
    }
    social.upstream.delay_subject(Some("storm"));
    let callback = social.path("callback");
    let mut storm: FuturesUnordered<_> = flows
        .into_iter()
        .map(|(mut browser, authorization, code)| {
            let callback = &callback;
            async move {
                let response = browser.callback(callback, &authorization, &code).await;
                (response, browser, authorization, code)
            }
        })
        .collect();
    let mut refused = Vec::new();
    while refused.len() < 32 - MAX_CALLS_PER_CLIENT {
        let finished =
            tokio::time::timeout(LIMIT, storm.next()).await.expect("a refusal is immediate").expect("a response");
        AppRedirect::expect_error(&finished.0, "temporarily_unavailable");
        refused.push(finished);
    }
    eventually("the others wait for the provider", LIMIT, || async {
        (social.upstream.exchange_count() == MAX_CALLS_PER_CLIENT).then_some(())
    })
    .await;
    assert_eq!(social.counts().await, (0, 0, 0));
    AppRedirect::expect_session(&social.log_in(&grace()).await);

    // A rejected callback has used nothing up: the same callback succeeds later.
    social.upstream.delay_subject(None);
    while let Some((response, ..)) = storm.next().await {
        AppRedirect::expect_session(&response);
    }
    let (_, mut browser, authorization, code) = refused.swap_remove(0);
    AppRedirect::expect_session(&browser.callback(&callback, &authorization, &code).await);
    assert!(browser.cookies.is_empty());
    assert_eq!(social.counts().await, (2, 2, 1 + MAX_CALLS_PER_CLIENT + 1));
    assert_eq!(social.upstream.exchange_count(), 1 + MAX_CALLS_PER_CLIENT + 1);
}

#[tokio::test]
async fn callbacks_are_counted_in_logins_per_client() {
    let social = SocialTest::with_app(app().limit("loginsPerClient", &[(2, HOUR)])).await;
    let mut browser = social.new_client();
    for _ in 0..2 {
        // The code is made up, but only the provider can detect this. So the server calls the provider.
        let authorization = browser.start_flow(&social.path("redirect")).await;
        let response = browser.callback(&social.path("callback"), &authorization, "code-of-nobody").await;
        AppRedirect::expect_error(&response, "provider_error");
    }
    let authorization = browser.start_flow(&format!("{}?state=mine", social.path("redirect"))).await;
    let code = social.upstream.approve(&authorization, &grace());
    let response = browser.callback(&social.path("callback"), &authorization, &code).await;
    assert_eq!(AppRedirect::expect_error(&response, "rate_limited").parameter("state"), "mine");
    let body = json!({ "token": social.upstream.access_token(&grace()) });
    let request = browser.request(Method::POST, &social.path("login")).json(&body);
    browser.send(request).await.expect_error(StatusCode::TOO_MANY_REQUESTS, "rate_limited");
    assert_eq!((social.upstream.exchange_count(), social.counts().await), (2, (0, 0, 0)));

    // The rejected callback has used nothing up, and the limit does not apply to another client address.
    browser.client = social.test_app.client();
    AppRedirect::expect_session(&browser.callback(&social.path("callback"), &authorization, &code).await);
}

#[tokio::test]
async fn hostile_responses_cost_little_memory() {
    let social = SocialTest::start().await;
    social.log_in_by_token(&grace()).await.expect(StatusCode::OK);
    let ada = Person::verified("2", "ada@example.com");
    let before = peak_memory_kib(social.test_app.stack.server());
    let document_of_kib = |size: usize| format!("[{}0]", "{\"\":{}},".repeat(size * 1024 / 8 - 1));
    // One response is far larger than the limit. The other response is a few bytes smaller than the limit, so it is
    // parsed.
    let (one_mebibyte, below_limit) = (document_of_kib(1024), document_of_kib(64));
    // The server calls `/introspect` before `/userinfo`. So `/userinfo` is scripted first, while `/introspect` still
    // sends valid responses.
    for path in ["/userinfo", "/introspect"] {
        for body in [&one_mebibyte, &below_limit] {
            social.upstream.set_response(path, body.clone());
            let responses = stream::iter(0..20).map(|_| social.log_in_by_token(&ada));
            let responses: Vec<_> = responses.buffer_unordered(4).collect().await;
            for response in responses {
                response.expect_error(StatusCode::BAD_GATEWAY, "provider_error");
            }
        }
    }
    let growth = peak_memory_kib(social.test_app.stack.server()).saturating_sub(before);
    assert!(growth < 16 * 1024, "{growth} KiB for 80 hostile responses, four at a time");
}
