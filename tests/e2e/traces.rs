//! Spans: what a collector receives about a request and a reconcile, and that nothing depends on the collector.

use std::time::{Duration, Instant};

use http::{Method, StatusCode};
use latchkey_tests::{
    builders::App,
    client::{ApiClient, ApiResponse},
    cluster::TestCluster,
    otlp::{Collector, ReceivedSpan},
    passwords::{PASSWORD, WRONG_PASSWORD},
    process,
    stack::{Builder, Stack},
    tls::ServerTls,
};
use serde_json::{Value, json};

use crate::support::{NAME, TestApp, WRONG_CODE, app};

const EMAIL: &str = "Ada.Lovelace@example.com";
/// The trace id in the example of W3C Trace Context, section 3.2.
const TRACE_ID: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
/// The span id in the same example.
const CALLER_SPAN: &str = "00f067aa0ba902b7";
/// Time limit for calls while the collector is unavailable. Programs that waited for the collector would take much
/// longer.
const OUTAGE_LIMIT: Duration = Duration::from_secs(20);

fn span_kind(span: &ReceivedSpan) -> &'static str {
    // The numbers of `SpanKind` in OTLP.
    match span.span.kind {
        1 => "internal",
        2 => "server",
        3 => "client",
        4 => "producer",
        5 => "consumer",
        _ => "unspecified",
    }
}

/// A service that exports its spans to this collector every 50 ms.
fn builder_with_collector(app: &App, endpoint: &str) -> Builder {
    Stack::builder()
        .app(app)
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        .env("OTEL_EXPORTER_OTLP_HEADERS", "x-collector-key=of-the-collector")
        .env("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=tests")
        .env("OTEL_BSP_SCHEDULE_DELAY", "50")
}

async fn start_app(collector: &Collector) -> TestApp {
    let app = app();
    TestApp { stack: builder_with_collector(&app, &collector.endpoint()).start().await, app }
}

async fn log_in(test_app: &TestApp, client: &ApiClient, password: &str, traceparent: &str) -> ApiResponse {
    let body: Value = json!({ "email": EMAIL, "password": password });
    let request = client.request(Method::POST, &format!("{}?state=secretInTheQuery", test_app.email_path("login")));
    client.send(request.json(&body).header("traceparent", traceparent).header("tracestate", "vendor=value")).await
}

fn is_server_span(span: &ReceivedSpan) -> bool {
    span_kind(span) == "server"
}

#[tokio::test]
async fn a_login_is_a_span_of_the_callers_trace_with_store_calls_and_hashing_as_children() {
    let collector = Collector::start().await.unwrap();
    let test_app = start_app(&collector).await;
    let client = test_app.register_and_confirm(EMAIL).await;
    log_in(&test_app, &client, PASSWORD, &format!("00-{TRACE_ID}-{CALLER_SPAN}-01")).await.expect(StatusCode::OK);

    let server =
        collector.wait_for("the span of the login", |span| span.trace_id() == TRACE_ID && is_server_span(span)).await;
    assert_eq!(server.parent(), CALLER_SPAN);
    assert_eq!(server.name(), "POST /v1/{APPID}/email/login");
    assert_eq!(server.span.trace_state, "vendor=value");
    let attribute = |key| server.attribute(key).unwrap_or_else(|| panic!("no {key} in {server:?}"));
    assert_eq!(attribute("http.request.method"), "POST");
    assert_eq!(attribute("http.route"), "/v1/{APPID}/email/login");
    assert_eq!(attribute("url.path"), "/v1/{APPID}/email/login");
    assert_eq!(attribute("http.response.status_code"), "200");
    assert_eq!(attribute("latchkey.app"), test_app.id());
    assert_eq!(server.resource["service.name"], "latchkey-server");
    assert_eq!(server.resource["deployment.environment.name"], "tests");
    assert_eq!(collector.headers()[0]["x-collector-key"], "of-the-collector");

    let children = collector.trace(TRACE_ID);
    let child = |kind: &str, key: &str, value: &str| {
        let fits = |span: &&ReceivedSpan| {
            span_kind(span) == kind && (span.name() == value || span.attribute(key).as_deref() == Some(value))
        };
        let found = children.iter().find(fits).unwrap_or_else(|| panic!("no {value} in {children:#?}"));
        assert_eq!(found.parent(), server.id(), "{found:?}");
        assert!(found.span.start_time_unix_nano >= server.span.start_time_unix_nano);
        assert!(found.span.end_time_unix_nano <= server.span.end_time_unix_nano, "{found:?}");
        found.clone()
    };
    let postgres = child("client", "db.system.name", "postgresql");
    assert_eq!(postgres.attribute("db.operation.name").as_deref(), Some("user_by_email"));
    child("client", "db.system.name", "redis");
    let hashing = child("internal", "", "verify password");
    assert!(hashing.attribute("latchkey.hashing.wait_ms").is_some());

    let log = test_app.stack.server().read_log();
    let line = log.lines().find(|line| line.contains("\"access\"") && line.contains(TRACE_ID));
    assert!(line.is_some(), "the request's log line has the trace id:\n{log}");
}

#[tokio::test]
async fn a_mail_has_its_own_trace_with_a_link_to_its_request() {
    let collector = Collector::start().await.unwrap();
    let test_app = start_app(&collector).await;
    test_app.register(EMAIL).await;
    test_app.code(EMAIL, 1).await;
    let register =
        collector.wait_for("the request", |span| is_server_span(span) && span.name().ends_with("/register")).await;
    let mail = collector.wait_for("the mail", |span| span_kind(span) == "consumer").await;
    assert_eq!((mail.name(), mail.parent()), ("deliver mail", String::new()));
    assert_ne!(mail.trace_id(), register.trace_id());
    let [link] = &mail.span.links[..] else { panic!("not one link: {mail:?}") };
    assert_eq!(link.trace_id, register.span.trace_id);
    assert_eq!(link.span_id, register.span.span_id);
    assert_eq!(mail.attribute("latchkey.mail").as_deref(), Some("confirm"));
    assert_eq!(mail.attribute("latchkey.outbox.outcome").as_deref(), Some("done"));
    let mail_trace = collector.trace(&mail.trace_id());
    let sent = mail_trace.iter().find(|span| span.name() == "send mail").unwrap_or_else(|| panic!("{mail_trace:#?}"));
    assert_eq!((span_kind(sent), sent.parent()), ("client", mail.id()));
    // Every second, the server looks for mails in the outbox. If it finds none, it exports no trace.
    assert!(!collector.spans().iter().any(|span| span.name() == "claim"));
}

#[tokio::test]
async fn no_secret_and_no_email_or_client_address_reaches_a_collector() {
    let collector = Collector::start().await.unwrap();
    let test_app = start_app(&collector).await;
    let (id, traceparent) = (test_app.id(), format!("00-{TRACE_ID}-{CALLER_SPAN}-01"));
    test_app.register(EMAIL).await;
    let code = test_app.code(EMAIL, 1).await;
    let client = test_app.client();
    let confirmed = client.confirm(id, &code).await.expect(StatusCode::OK);
    let login = log_in(&test_app, &client, PASSWORD, &traceparent).await.expect(StatusCode::OK);
    log_in(&test_app, &client, WRONG_PASSWORD, &traceparent).await.expect(StatusCode::UNAUTHORIZED);
    client.confirm(id, WRONG_CODE).await.expect(StatusCode::BAD_REQUEST);
    client.get(&format!("{id}/nobody/callback?code=secretInTheQuery&state=secretInTheQuery")).await;
    client.get("secretInThePath/at/all").await.expect(StatusCode::NOT_FOUND);
    client.with_token(id, "stolenTokenOfNobody").verify().await.expect(StatusCode::UNAUTHORIZED);
    let request = client.request(Method::GET, &format!("v1/{id}/user")).bearer_auth(login.string("token"));
    let request = request.header("cookie", "session=secretInTheCookie").header("user-agent", "secretInTheAgent");
    client.send(request).await.expect(StatusCode::OK);
    let refreshed = client.refresh(id, login.string("refresh_token")).await.expect(StatusCode::OK);
    let reset = test_app.request_reset_code(EMAIL, 2).await;
    test_app.settled_mail_count(EMAIL).await;
    // Causes an error, because the spans of failed requests contain the error and its causes.
    test_app.sql("ALTER TABLE users RENAME TO elsewhere").await;
    log_in(&test_app, &client, PASSWORD, &traceparent).await.expect(StatusCode::INTERNAL_SERVER_ERROR);
    let failed = |span: &ReceivedSpan| span.attribute("http.response.status_code").as_deref() == Some("500");
    let failed = collector.wait_for("the span of the failure", failed).await;
    // 2 is the `StatusCode` of an error in OTLP.
    assert_eq!(failed.span.status.as_ref().map(|status| status.code), Some(2));
    assert!(collector.spans().iter().any(|span| span.name() == "GET"), "a request without a route has a span too");

    let exported = String::from_utf8_lossy(&collector.bytes()).to_lowercase();
    let local_id = confirmed.string("local_id");
    let mut secrets = vec![
        EMAIL,
        NAME,
        PASSWORD,
        WRONG_PASSWORD,
        WRONG_CODE,
        &code,
        &reset,
        local_id,
        "stolenTokenOfNobody",
        "secretInTheQuery",
        "secretInThePath",
        "secretInTheCookie",
        "secretInTheAgent",
        "127.",
    ];
    let client_address = client.address().to_string();
    secrets.push(&client_address);
    for response in [&confirmed, &refreshed] {
        secrets.extend([
            response.string("access_token"),
            response.string("refresh_token"),
            response.string("session_id"),
        ]);
    }
    secrets.extend([login.string("token"), login.string("refresh_token")]);
    for secret in secrets {
        assert!(!exported.contains(&secret.to_lowercase()), "{secret:?} was exported");
    }
}

#[tokio::test]
async fn the_sampled_flag_of_a_public_caller_does_not_decide_what_is_exported() {
    let collector = Collector::start().await.unwrap();
    let app = app();
    // The clients are trusted proxies, but only `--trust-traceparent` would let them decide what is exported.
    let builder_with_sampler = |sampler| {
        let proxies = ["--trusted-proxies", "127.0.0.0/8"];
        builder_with_collector(&app, &collector.endpoint()).env("OTEL_TRACES_SAMPLER", sampler).args(proxies)
    };
    let unsampling_app =
        TestApp { stack: builder_with_sampler("parentbased_always_off").start().await, app: app.clone() };
    let sampled = format!("00-{TRACE_ID}-{CALLER_SPAN}-01");
    log_in(&unsampling_app, &unsampling_app.client(), PASSWORD, &sampled).await.expect(StatusCode::UNAUTHORIZED);
    // When a server ends, it exports its remaining spans.
    assert!(unsampling_app.stack.server().terminate().await.is_some_and(|status| status.success()));
    assert!(collector.spans().is_empty(), "{:#?}", collector.spans());

    let sampling_app = TestApp { stack: builder_with_sampler("parentbased_always_on").start().await, app: app.clone() };
    let unsampled = format!("00-{TRACE_ID}-{CALLER_SPAN}-00");
    log_in(&sampling_app, &sampling_app.client(), PASSWORD, &unsampled).await.expect(StatusCode::UNAUTHORIZED);
    let span = collector.wait_for("the login", |span| span.trace_id() == TRACE_ID && is_server_span(span)).await;
    assert_eq!(span.parent(), CALLER_SPAN, "the trace is the caller's");
}

#[tokio::test]
async fn unsampled_traces_are_not_exported_and_malformed_headers_are_ignored() {
    let collector = Collector::start().await.unwrap();
    let app = app();
    let flags = ["--trusted-proxies", "127.0.0.0/8", "--trust-traceparent"];
    let test_app =
        TestApp { stack: builder_with_collector(&app, &collector.endpoint()).args(flags).start().await, app };
    let client = test_app.client();
    let unsampled = format!("00-{TRACE_ID}-{CALLER_SPAN}-00");
    log_in(&test_app, &client, PASSWORD, &unsampled).await.expect(StatusCode::UNAUTHORIZED);
    for malformed in
        ["no-trace", &format!("ff-{TRACE_ID}-{CALLER_SPAN}-01"), &format!("00-{TRACE_ID}-0000000000000000-01")]
    {
        log_in(&test_app, &client, PASSWORD, malformed).await.expect(StatusCode::UNAUTHORIZED);
    }
    // When the span of this request has arrived, all earlier spans have arrived, too.
    client.get("the/last/one").await.expect(StatusCode::NOT_FOUND);
    collector.wait_for("the last span", |span| span.name() == "GET").await;
    let spans = collector.spans();
    assert!(!spans.iter().any(|span| span.trace_id() == TRACE_ID), "{spans:#?}");
    let logins = spans.iter().filter(|span| span.name().ends_with("/email/login"));
    let parents: Vec<String> = logins.map(ReceivedSpan::parent).collect();
    assert_eq!(parents, ["", "", ""], "each malformed header starts a new trace");
}

#[tokio::test]
async fn spans_are_exported_over_grpc_if_configured() {
    let collector = Collector::start().await.unwrap();
    let app = app();
    let stack = builder_with_collector(&app, &collector.endpoint())
        .env("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
        .env("OTEL_SERVICE_NAME", "login")
        .start()
        .await;
    stack.client().get(&format!("{}/.well-known/jwks.json", app.id())).await.expect(StatusCode::OK);
    let span = collector.wait_for("the span", is_server_span).await;
    assert_eq!(span.name(), "GET /{APPID}/.well-known/jwks.json");
    assert_eq!(span.resource["service.name"], "login");
    let headers = &collector.headers()[0];
    assert_eq!(headers["content-type"], "application/grpc");
    assert_eq!(headers["x-collector-key"], "of-the-collector");
}

#[tokio::test]
async fn a_collector_is_verified_with_the_configured_certificate_authority() {
    let tls = ServerTls::new().unwrap();
    let ca_file = process::fresh_dir("authority").join("ca.pem");
    std::fs::write(&ca_file, &tls.ca).unwrap();
    let collector = Collector::start_at(process::free_addr(), Some(tls)).await.unwrap();
    let app = app();
    for protocol in ["http/protobuf", "grpc"] {
        let stack = builder_with_collector(&app, &collector.endpoint())
            .env("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
            .env("OTEL_EXPORTER_OTLP_CERTIFICATE", &ca_file.display().to_string())
            .env("OTEL_SERVICE_NAME", protocol)
            .start()
            .await;
        stack.client().get(&format!("{}/.well-known/jwks.json", app.id())).await.expect(StatusCode::OK);
        collector.wait_for("the span", |span| span.resource["service.name"] == protocol).await;
    }
    // A server that does not trust the collector's CA exports nothing.
    let stack =
        builder_with_collector(&app, &collector.endpoint()).env("OTEL_SERVICE_NAME", "untrusting").start().await;
    stack.client().get(&format!("{}/.well-known/jwks.json", app.id())).await.expect(StatusCode::OK);
    latchkey_tests::eventually("the log reports lost spans", OUTAGE_LIMIT, || async {
        stack.server().read_log().contains("spans cannot be exported").then_some(())
    })
    .await;
    assert!(!collector.spans().iter().any(|span| span.resource["service.name"] == "untrusting"));
}

#[tokio::test]
async fn the_last_spans_are_exported_when_a_server_ends() {
    let collector = Collector::start().await.unwrap();
    let app = app();
    // With this delay, the next scheduled export is after the end of the test.
    let stack =
        builder_with_collector(&app, &collector.endpoint()).env("OTEL_BSP_SCHEDULE_DELAY", "3600000").start().await;
    stack.client().get(&format!("{}/.well-known/jwks.json", app.id())).await.expect(StatusCode::OK);
    assert!(stack.server().terminate().await.is_some_and(|status| status.success()));
    assert_eq!(collector.spans().iter().filter(|span| is_server_span(span)).count(), 1);
}

#[tokio::test]
async fn an_unavailable_collector_delays_nothing_and_does_not_fill_the_log() {
    let addr = process::free_addr();
    let app = app();
    // Two unavailable collectors: one refuses connections, the other one accepts them and never responds.
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoints = [format!("http://{addr}"), format!("http://{}", silent.local_addr().unwrap())];
    for (endpoint, protocol) in endpoints.iter().zip(["http/protobuf", "grpc"]) {
        let stack = builder_with_collector(&app, endpoint)
            .env("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
            .env("OTEL_BSP_MAX_QUEUE_SIZE", "64")
            .env("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "16")
            .start()
            .await;
        let began = Instant::now();
        let client = stack.client();
        for _ in 0..200 {
            client.get(&format!("{}/.well-known/jwks.json", app.id())).await.expect(StatusCode::OK);
        }
        client.login(app.id(), EMAIL, PASSWORD).await.expect(StatusCode::UNAUTHORIZED);
        assert!(began.elapsed() < OUTAGE_LIMIT, "200 requests took {:?}", began.elapsed());
        let began = Instant::now();
        assert!(stack.server().terminate().await.is_some_and(|status| status.success()));
        assert!(began.elapsed() < OUTAGE_LIMIT, "it took {:?} to end", began.elapsed());
        let log = stack.server().read_log();
        let lines = log.lines().filter(|line| line.contains("spans")).count();
        assert!((1..=3).contains(&lines), "{lines} lines of spans:\n{log}");
    }
}

#[tokio::test]
async fn a_recovered_collector_receives_spans_again() {
    let addr = process::free_addr();
    let app = app();
    let stack = builder_with_collector(&app, &format!("http://{addr}")).start().await;
    let path = format!("{}/.well-known/jwks.json", app.id());
    stack.client().get(&path).await.expect(StatusCode::OK);
    latchkey_tests::eventually("the log reports lost spans", OUTAGE_LIMIT, || async {
        stack.server().read_log().contains("spans cannot be exported").then_some(())
    })
    .await;
    let collector = Collector::start_at(addr, None).await.unwrap();
    stack.client().get(&path).await.expect(StatusCode::OK);
    collector.wait_for("a span", is_server_span).await;
    latchkey_tests::eventually("the log reports exported spans", OUTAGE_LIMIT, || async {
        stack.server().read_log().contains("spans are exported again").then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_server_does_not_start_with_an_invalid_collector_url() {
    let started =
        Stack::builder().app(&app()).env("OTEL_EXPORTER_OTLP_ENDPOINT", "collector.example:4318").try_start().await;
    let error = format!("{:#}", started.err().expect("it does not start"));
    assert!(error.contains("OTEL_EXPORTER_OTLP_ENDPOINT is not a URL such as http://collector:4318"), "{error}");
}

#[tokio::test]
async fn a_reconcile_is_a_span_with_its_requests_as_children() {
    let collector = Collector::start().await.unwrap();
    let install = TestCluster::shared()
        .await
        .builder()
        .operator_env("OTEL_EXPORTER_OTLP_ENDPOINT", &collector.endpoint())
        .operator_env("OTEL_BSP_SCHEDULE_DELAY", "50")
        .install()
        .await;
    let _operator = install.start_operator().await;
    let app = App::new("shop");
    install.apply(&app).await.unwrap();
    let _servers = install.start_servers(1).await;
    install.wait_until_ready(&app).await;

    let published = |span: &ReceivedSpan| span.name() == "PATCH secrets" && span_kind(span) == "client";
    let published = collector.wait_for("the request that publishes", published).await;
    assert_eq!(published.attribute("k8s.namespace.name").as_deref(), Some(install.namespace()));
    assert!(matches!(published.attribute("http.response.status_code").as_deref(), Some("200" | "201")));
    let is_parent = |span: &ReceivedSpan| span.id() == published.parent();
    let reconcile = collector.wait_for("the reconcile", is_parent).await;
    assert_eq!(
        (reconcile.name(), span_kind(&reconcile), reconcile.parent()),
        ("reconcile App", "internal", String::new())
    );
    assert_eq!(reconcile.attribute("k8s.namespace.name").as_deref(), Some(install.tenant()));
    assert_eq!(reconcile.attribute("latchkey.object.name").as_deref(), Some(app.id()));
    assert_eq!(reconcile.attribute("latchkey.outcome").as_deref(), Some("success"));
    assert_eq!(reconcile.resource["service.name"], "latchkey-operator");
    collector
        .wait_for("the status", |span| span.name() == "PATCH apps/status" || span.name() == "PUT apps/status")
        .await;
    // Requests of watches have no span, because they do not belong to a reconcile.
    assert!(collector.spans().iter().all(|span| span_kind(span) == "internal" || !span.parent().is_empty()));
}
