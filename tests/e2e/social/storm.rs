//! Clients and providers that want all of a server: what each of them gets, and what is left for others.

use std::{fs, time::Duration};

use futures::{StreamExt, stream, stream::FuturesUnordered};
use http::{Method, StatusCode};
use latchkey_tests::{eventually, stack::Server};
use serde_json::json;

use super::{Browser, Landed, Person, Social, app};

const LIMIT: Duration = Duration::from_secs(30);
/// What one client address may have in flight at one Provider (docs/decisions/0024).
const OF_ONE_CLIENT: usize = 4;
const HOUR: u32 = 3600;

fn grace() -> Person {
    Person::verified("1", "grace@example.com")
}

/// `VmHWM` of proc(5), the most that was ever resident, in KiB.
fn peak(server: &Server) -> u64 {
    let pid = server.pid().expect("the server runs");
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("the server runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("it has memory");
    line.trim().trim_end_matches("kB").trim().parse().expect("a number")
}

#[tokio::test]
async fn a_storm_of_callbacks_by_one_client_leaves_others_signing_in() {
    let social = Social::open().await;
    // Each flow has a cookie jar of its own: a browser holds four at most.
    let client = social.shop.client();
    let mut flows = Vec::new();
    for _ in 0..32 {
        let mut browser = Browser { client: client.clone(), ..social.browser() };
        let asked = browser.begin(&social.path("redirect")).await;
        let code = social.upstream.log_in(&asked, &Person::verified("storm", "storm@example.com"));
        flows.push((browser, asked, code));
    }
    social.upstream.hold(Some("storm"));
    let callback = social.path("callback");
    let mut storm: FuturesUnordered<_> = flows
        .into_iter()
        .map(|(mut browser, asked, code)| {
            let callback = &callback;
            async move {
                let answer = browser.come_back(callback, &asked, &code).await;
                (answer, browser, asked, code)
            }
        })
        .collect();
    let mut refused = Vec::new();
    while refused.len() < 32 - OF_ONE_CLIENT {
        let one = tokio::time::timeout(LIMIT, storm.next()).await.expect("a refusal comes at once").expect("more");
        Landed::error(&one.0, "temporarily_unavailable");
        refused.push(one);
    }
    eventually("the others wait for the provider", LIMIT, || async {
        (social.upstream.exchanges() == OF_ONE_CLIENT).then_some(())
    })
    .await;
    assert_eq!(social.made().await, (0, 0, 0));
    Landed::session(&social.sign_in(&grace()).await);

    // A call that found no room has used nothing: the same callback leads on later.
    social.upstream.hold(None);
    while let Some((answer, ..)) = storm.next().await {
        Landed::session(&answer);
    }
    let (_, mut browser, asked, code) = refused.swap_remove(0);
    Landed::session(&browser.come_back(&callback, &asked, &code).await);
    assert!(browser.cookies.is_empty());
    assert_eq!(social.made().await, (2, 2, 1 + OF_ONE_CLIENT + 1));
    assert_eq!(social.upstream.exchanges(), 1 + OF_ONE_CLIENT + 1);
}

#[tokio::test]
async fn callbacks_count_as_logins() {
    let social = Social::with(app().limit("loginsPerClient", &[(2, HOUR)])).await;
    let mut browser = social.browser();
    for _ in 0..2 {
        // A code that was made up costs the provider an answer too.
        let asked = browser.begin(&social.path("redirect")).await;
        let answer = browser.come_back(&social.path("callback"), &asked, "code-of-nobody").await;
        Landed::error(&answer, "provider_error");
    }
    let asked = browser.begin(&format!("{}?state=mine", social.path("redirect"))).await;
    let code = social.upstream.log_in(&asked, &grace());
    let answer = browser.come_back(&social.path("callback"), &asked, &code).await;
    assert_eq!(Landed::error(&answer, "rate_limited").get("state"), "mine");
    let body = json!({ "token": social.upstream.token(&grace()) });
    let request = browser.request(Method::POST, &social.path("login")).json(&body);
    browser.send(request).await.expect_error(StatusCode::TOO_MANY_REQUESTS, "rate_limited");
    assert_eq!((social.upstream.exchanges(), social.made().await), (2, (0, 0, 0)));

    // The refusal has used nothing, and another client address is not limited.
    browser.client = social.shop.client();
    Landed::session(&browser.come_back(&social.path("callback"), &asked, &code).await);
}

#[tokio::test]
async fn hostile_answers_cost_little_memory() {
    let social = Social::open().await;
    social.login(&grace()).await.expect(StatusCode::OK);
    let ada = Person::verified("2", "ada@example.com");
    let before = peak(social.shop.stack.server());
    let of_kibibytes = |size: usize| format!("[{}0]", "{\"\":{}},".repeat(size * 1024 / 8 - 1));
    // Far more than is read, and the most that is.
    let (one_mebibyte, readable) = (of_kibibytes(1024), of_kibibytes(64));
    // The introspection comes first, so it answers as it should while the profile does not.
    for path in ["/userinfo", "/introspect"] {
        for body in [&one_mebibyte, &readable] {
            social.upstream.answer(path, body.clone());
            let answers = stream::iter(0..20).map(|_| social.login(&ada));
            let answers: Vec<_> = answers.buffer_unordered(4).collect().await;
            for answer in answers {
                answer.expect_error(StatusCode::BAD_GATEWAY, "provider_error");
            }
        }
    }
    let grown = peak(social.shop.stack.server()).saturating_sub(before);
    assert!(grown < 16 * 1024, "{grown} KiB for 80 hostile answers, four at a time");
}
