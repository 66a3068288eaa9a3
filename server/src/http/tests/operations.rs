//! Metrics, readiness, revisions and the log.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use latchkey_crds::{conditions::Reason, rendered::FORMAT};
use prometheus_client::encoding::text;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, DuplexStream},
    time::timeout,
};

use super::{FailingStores, TestServer, exchange, get_request};
use crate::{
    http::{Readiness, ops_service},
    providers::ProviderReports,
};

#[tokio::test]
async fn metrics_contain_the_names_of_routes_and_never_paths() {
    let server = TestServer::new(FailingStores::Unavailable);
    server.send_request(get_request("/secret-path?code=ABCDE", "")).await;
    server.send_request(get_request("/shop/.well-known/jwks.json", "")).await;
    server.send_request(get_request("/shop/.well-known/jwks.json", "").replacen("GET", "MADEUP", 1)).await;
    let mut page = String::new();
    text::encode(&mut page, &server.registry).unwrap();
    for line in [
        r#"http_requests_total{listener="public",route="none",method="GET",status="404"} 1"#,
        r#"http_requests_total{listener="public",route="jwks",method="GET",status="200"} 1"#,
        r#"http_requests_total{listener="public",route="jwks",method="other",status="405"} 1"#,
        r#"http_request_duration_seconds_count{listener="public",route="jwks"} 2"#,
        r#"http_requests_in_flight{listener="public"} 0"#,
    ] {
        assert!(page.contains(line), "{line} in {page}");
    }
    assert!(!page.contains("secret-path") && !page.contains("MADEUP") && !page.contains("shop"), "{page}");
}

#[tokio::test]
async fn readyz_lists_what_is_missing() {
    let mut server = TestServer::new(FailingStores::Panicking);
    let readiness = Arc::new(Readiness::default());
    let registry = Arc::new(std::mem::take(&mut server.registry));
    let ops = ops_service(
        Arc::clone(&server.state),
        server.metrics.clone(),
        Arc::clone(&server.budgets),
        registry,
        Arc::clone(&readiness),
        Arc::default(),
        &server.drain,
    );
    let get = async |path: &str| exchange(server.connect(ops.clone()), get_request(path, "").as_bytes()).await;
    assert_eq!(get("/livez").await.status, 200);
    let reply = get("/readyz").await;
    assert_eq!(reply.status, 503);
    assert_eq!(reply.json()["missing"].as_array().unwrap().len(), 2);
    readiness.set_configuration_loaded();
    readiness.set_schema_error("the schema is at 3, this server needs 4: run `latchkey-server migrate`");
    let reply = get("/readyz").await;
    assert_eq!(
        reply.json(),
        json!({
            "ready": false,
            "missing": ["schema: the schema is at 3, this server needs 4: run `latchkey-server migrate`"],
        })
    );
    readiness.set_schema_ready();
    assert_eq!(get("/readyz").await.status, 200);
    readiness.set_draining();
    assert_eq!(get("/readyz").await.status, 503);
    assert!(get("/metrics").await.body.ends_with("# EOF\n"));
    exchange(server.connect(ops.clone()), get_request("/livez", "").replacen("GET", "POST", 1).as_bytes())
        .await
        .assert_refused(405, "method_not_allowed");
}

#[tokio::test]
async fn revisions_are_streamed_as_they_change() {
    let mut server = TestServer::new(FailingStores::Panicking);
    let registry = Arc::new(std::mem::take(&mut server.registry));
    let reports = Arc::new(ProviderReports::default());
    let provider = ("shop".to_owned(), "github".to_owned());
    reports.record(&provider, Reason::Reachable);
    let ops = ops_service(
        Arc::clone(&server.state),
        server.metrics.clone(),
        Arc::clone(&server.budgets),
        registry,
        Arc::new(Readiness::default()),
        Arc::clone(&reports),
        &server.drain,
    );
    let mut client = server.connect(ops);
    client.write_all(get_request("/revisions", "").as_bytes()).await.unwrap();
    let mut output = String::new();
    async fn read_until(client: &mut DuplexStream, output: &mut String, what: &str) {
        let mut buffer = [0; 4096];
        while !output.contains(what) {
            let read = timeout(Duration::from_secs(20), client.read(&mut buffer)).await.expect("a line in time");
            let read = read.unwrap();
            assert!(read > 0, "{what} in {output}");
            output.push_str(std::str::from_utf8(&buffer[..read]).unwrap());
        }
    }
    let hello = format!(r#"{{"hello":{{"podUID":"pod-1","format":{FORMAT},"revisions":{{"shop":""#);
    read_until(&mut client, &mut output, &hello).await;
    read_until(&mut client, &mut output, r#"{"provider":{"namespace":"shop","name":"github","reason":"Reachable"}}"#)
        .await;
    reports.record(&provider, Reason::ClientRefused);
    read_until(&mut client, &mut output, r#""reason":"ClientRefused"}}"#).await;
    server.state.apps.remove(&"shop".parse().unwrap());
    read_until(&mut client, &mut output, r#"{"app":"shop","revision":null}"#).await;
    read_until(&mut client, &mut output, r#"{"heartbeat":1}"#).await;
    // Only a drain ends the stream.
    server.drain.closing().cancel();
    timeout(Duration::from_secs(20), client.read_to_string(&mut output))
        .await
        .expect("the stream ends in time")
        .unwrap();
    assert!(output.ends_with("0\r\n\r\n"), "the stream ends cleanly: {output}");
}

/// Collects the log lines of this thread.
#[derive(Clone, Default)]
struct LogLines(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for LogLines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn the_log_has_the_request_id_but_no_secret_that_was_sent() {
    let lines = LogLines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt()
        .json()
        .flatten_event(true)
        .with_max_level(tracing::Level::TRACE)
        .with_writer(move || writer.clone())
        .finish();
    let _log = tracing::subscriber::set_default(subscriber);
    let server = TestServer::new(FailingStores::Broken);
    let headers = "Authorization: Bearer tell-tale\r\nCookie: tell-tale\r\nX-Request-Id: the-request\r\n";
    let body = r#"{"email": "tell-tale@example.com", "password": "tell-tale", "code": "tell-tale", "x": "tell-tale"}"#;
    let requests = async || {
        for operation in ["login", "confirm", "confirm-password", "forgot-password", "verify", "register"] {
            server.post(&format!("/v1/shop/email/{operation}?code=tell-tale"), headers, body).await;
        }
        server.post("/v1/shop/email/login", headers, r#"{"tell-tale": tell-tale"#).await;
        server.post("/tell-tale", headers, "tell-tale").await;
    };
    // If another test reaches a log statement while this subscriber is being set, `tracing` caches that no subscriber
    // wants the statement. Therefore this test reaches all statements once, rebuilds the cache, and then checks only
    // later lines.
    requests().await;
    tracing::callsite::rebuild_interest_cache();
    lines.0.lock().unwrap().clear();
    requests().await;

    let log = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
    let own_lines: Vec<Value> = log
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .filter(|line| {
            line["target"].as_str().is_some_and(|target| target == "access" || target.starts_with("latchkey"))
        })
        .collect();
    assert!(!own_lines.is_empty());
    for line in &own_lines {
        assert!(!line.to_string().contains("tell-tale"), "{line}");
    }
    let access: Vec<_> = own_lines.iter().filter(|line| line["target"] == "access").collect();
    assert_eq!(access.len(), 8);
    let first = access[0];
    assert_eq!(first["request_id"], "the-request");
    assert_eq!(first["route"], "login");
    assert_eq!(first["method"], "POST");
    assert_eq!(first["status"], 500);
    assert_eq!(first["app"], "shop");
    assert_eq!(first["client"], "192.0.2.1");
    assert!(first["duration_ms"].is_u64());
    assert_eq!(access[7]["route"], "none");
    // The cause of a 500 is logged once, with the request ID. *login*, *confirm*, *confirm-password* and
    // *forgot-password* get a 500.
    let causes: Vec<_> =
        own_lines.iter().filter(|line| line["level"] == "ERROR" && line["cause"].is_string()).collect();
    assert_eq!(causes.len(), 4, "{causes:?}");
    assert_eq!(causes[0]["cause"], "postgres returned an unexpected response: secret-host:5432 refused");
    assert_eq!(causes[0]["span"]["request_id"], "the-request");
}
