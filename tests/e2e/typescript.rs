//! The TypeScript client (`clients/typescript`): its own tests in Node, with a real server, and tabs that race in
//! Chromium.

use std::{fs, net::SocketAddr, path::PathBuf, time::Duration};

use bytes::Bytes;
use http::StatusCode;
use http_body_util::Full;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use latchkey_tests::{
    browser::Browser,
    builders::{App, Provider},
    inbox::Inbox,
    passwords::PASSWORD,
    process::{self, Program},
    service_account::{AUDIENCE, ServiceAccountIssuer},
    stack::Stack,
};
use serde_json::{Value, json};
use url::Url;

use crate::{fault_support::unlimited_app, support::TestApp};

/// Time limit for a run of Node. A run takes a few seconds.
const NODE_LIMIT: Duration = Duration::from_secs(180);
const EMAIL: &str = "ada@example.com";
const TABS: u64 = 8;
const REFRESHES_PER_TAB: u64 = 200;
/// A tab logs its progress after this number of refreshes.
const REFRESHES_PER_LINE: u64 = 20;

fn package() -> PathBuf {
    process::root().join("clients/typescript")
}

/// An App with limits that these tests do not reach.
fn app() -> App {
    unlimited_app("typescript").limit("refreshesPerSession", &[(100_000, 60)])
}

/// Runs the tests of a folder of the package with Node.
async fn run_tests(folder: &str, variables: &[(&str, &str)]) {
    let built = fs::read_dir(package().join("build").join(folder)).expect("the package is built: run `make test`");
    let files = built.map(|entry| entry.unwrap().path().display().to_string());
    let tests: Vec<String> = files.filter(|file| file.ends_with(".test.js")).collect();
    assert!(!tests.is_empty());
    let node = process::find_program(["node", "/usr/bin/node"]).expect("Node is installed: run `make tools`");
    let log = process::fresh_dir("node").join("node.log");
    let program = Program::new("node", node, &log).arg("--test").args(&tests);
    let program = variables.iter().fold(program, |program, (name, value)| program.env(name, value));
    let node = program.start().expect("Node starts");
    let status = tokio::time::timeout(NODE_LIMIT, node.wait_for_exit()).await;
    let output = fs::read_to_string(&log).expect("the log exists");
    assert!(status.is_ok_and(|status| status.success()), "{output}");
    println!("{output}");
}

#[tokio::test]
async fn the_unit_tests_of_the_typescript_client_pass() {
    run_tests("unit", &[]).await;
}

#[tokio::test]
async fn the_typescript_client_calls_every_endpoint() {
    let provider_port = process::free_port();
    let provider_url = |path: &str| format!("http://127.0.0.1:{provider_port}/{path}");
    let provider = Provider::new("local", "oauth2")
        .set("authorizationURL", provider_url("authorize"))
        .set("tokenURL", provider_url("token"))
        .set("userInfoURL", provider_url("userinfo"))
        .set("introspectionURL", provider_url("introspect"))
        .set("claims", json!({ "subject": "id", "email": "email", "emailVerified": "email_verified", "name": "name" }));
    let introspector = json!({ "serviceAccount": { "namespace": "shop", "name": "asks" }, "role": "Introspector" });
    let app = app()
        .set("/redirectURLs", json!(["http://127.0.0.1/done"]))
        .set("/providerRefs", json!([{ "name": "local", "linkByEmail": true }]))
        .set("/administrators", json!([introspector]));
    let issuer = ServiceAccountIssuer::new().unwrap();
    let keys = process::fresh_dir("keys").join("keys.json");
    fs::write(&keys, issuer.jwks().unwrap().to_string()).unwrap();
    let builder = Stack::builder().provider(&provider).args(["--service-account-keys", &keys.display().to_string()]);
    let test_app = TestApp::from_builder(app, builder).await;
    let inbox = Inbox::start(process::free_addr(), test_app.stack.mails().clone()).unwrap();
    let caller = issuer.token("shop", "asks", AUDIENCE, Duration::from_secs(3600)).unwrap();
    let variables = [
        ("LATCHKEY_URL", test_app.stack.base_url()),
        ("LATCHKEY_APP", test_app.id()),
        ("LATCHKEY_INBOX", &format!("http://{}", inbox.addr())),
        ("LATCHKEY_PROVIDER", &provider_port.to_string()),
        ("LATCHKEY_CALLER", &caller),
    ];
    run_tests("server", &variables).await;
}

#[tokio::test]
async fn eight_tabs_that_race_and_lose_responses_keep_the_session() {
    let pages = serve_package().await;
    let origin = format!("http://{pages}");
    let test_app = TestApp::start_with(app().set("/allowedOrigins", json!([origin]))).await;
    test_app.register_and_confirm(EMAIL).await;
    let browser = Browser::start().await.unwrap();
    let mut tabs = Vec::new();
    for number in 0..TABS {
        tabs.push(if number == 0 { browser.tab().await } else { browser.new_tab().await });
        let mut url: Url = format!("{origin}/race.html").parse().unwrap();
        url.query_pairs_mut()
            .append_pair("url", test_app.stack.base_url())
            .append_pair("app", test_app.id())
            .append_pair("tabs", &TABS.to_string())
            .append_pair("refreshes", &REFRESHES_PER_TAB.to_string());
        if number == 0 {
            url.query_pairs_mut().append_pair("email", EMAIL).append_pair("password", PASSWORD);
        }
        browser.open(url.as_str()).await;
        browser.wait_for_text("session ").await;
    }

    let mut totals = [("refreshes", 0), ("requests", 0), ("lost", 0), ("held", 0)];
    let mut generation = 0;
    for tab in &tabs {
        browser.switch_to(tab).await;
        // All refreshes of a tab take longer than `wait_for_text` waits, so the test waits for each line of progress.
        for line in 1..=REFRESHES_PER_TAB / REFRESHES_PER_LINE {
            let refreshes = line * REFRESHES_PER_LINE;
            browser.wait_for_text(&format!("{refreshes} refreshes")).await;
        }
        let text = browser.wait_for_text("the session is valid").await;
        let counts = text.lines().find_map(|line| serde_json::from_str::<Value>(line).ok()).expect("the tab's counts");
        for (name, total) in &mut totals {
            *total += counts[&**name].as_u64().expect("a count");
        }
        generation = generation.max(counts["generation"].as_u64().expect("a generation"));
    }
    println!("{TABS} tabs: {totals:?}, generation {generation}");
    let total = |name| totals.iter().find(|(own, _)| *own == name).expect("a total").1;
    assert_eq!(total("refreshes"), TABS * REFRESHES_PER_TAB);
    assert!(total("requests") >= total("refreshes"), "every tab sends a request in every round");
    assert!(total("lost") > total("refreshes") / 5, "responses are lost");
    assert!(total("held") > total("refreshes") / 50, "responses arrive late");
    // One session was opened by *confirm*; all tabs share the other.
    assert_eq!(test_app.session_count().await, 2);
}

/// Serves the page of the tabs and the files that it imports.
async fn serve_package() -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let service = service_fn(async |request| file(&request));
            tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
        }
    });
    addr
}

fn file(request: &http::Request<Incoming>) -> http::Result<http::Response<Full<Bytes>>> {
    let (path, content_type) = match request.uri().path() {
        "/race.html" => ("test/browser/race.html", "text/html"),
        "/dist/latchkey.js" => ("dist/latchkey.js", "text/javascript"),
        "/build/browser/race.js" => ("build/browser/race.js", "text/javascript"),
        "/build/browser/coordinator.js" => ("build/browser/coordinator.js", "text/javascript"),
        _ => return http::Response::builder().status(StatusCode::NOT_FOUND).body(Full::default()),
    };
    let content = fs::read(package().join(path)).expect("the package is built: run `make test`");
    http::Response::builder().header("content-type", content_type).body(Full::new(content.into()))
}
