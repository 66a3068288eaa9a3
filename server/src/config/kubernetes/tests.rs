//! Tests of the watch against a scripted API server in this process. A call that the script does not expect fails the
//! test.

use std::{collections::VecDeque, convert::Infallible, future, net::SocketAddr, sync::Mutex};

use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use futures::{
    StreamExt,
    stream::{self, BoxStream},
};
use http::{Request, Response};
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::{body::Frame, body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use latchkey_crds::{names::rendered_app_secret, rendered::RevisionChange};
use serde_json::{Value, json};
use tokio::{
    net::TcpListener,
    sync::{broadcast, mpsc},
};

use super::*;
use crate::{config::cache::Cache, fixtures};

const WAIT_TIMEOUT: Duration = Duration::from_secs(20);

/// A call that the script expects, and the response to this call.
enum ExpectedCall {
    /// A call for one page of the list, with this `continue` token. The response has the Secrets and the token of the
    /// next page.
    List {
        continue_token: Option<&'static str>,
        secrets: Vec<Value>,
        next_token: Option<&'static str>,
    },
    /// A watch from this resourceVersion. The response consists of `lines`. If `stays_open` is set, the response does
    /// not end.
    Watch {
        resource_version: &'static str,
        lines: Vec<Value>,
        stays_open: bool,
    },
    Fail {
        status: u16,
        message: &'static str,
    },
    /// The call gets no response.
    Hang,
}

struct ExpectedCalls {
    calls: Mutex<VecDeque<ExpectedCall>>,
    unexpected: mpsc::UnboundedSender<String>,
}

struct TestApiServer {
    address: SocketAddr,
    unexpected: mpsc::UnboundedReceiver<String>,
}

type Body = UnsyncBoxBody<Bytes, Infallible>;

impl ExpectedCalls {
    fn respond(&self, request: &Request<Incoming>) -> Option<Response<Body>> {
        let query = |name: &str| {
            let pairs = url::form_urlencoded::parse(request.uri().query().unwrap_or_default().as_bytes());
            pairs.into_owned().find(|(key, _)| key == name).map(|(_, value)| value)
        };
        let expected = self.calls.lock().unwrap().pop_front();
        let mut is_expected = request.uri().path() == "/api/v1/namespaces/latchkey/secrets"
            && query("fieldSelector").as_deref() == Some("type=latchkey.dev/rendered-app");
        let response = match expected {
            Some(ExpectedCall::List { continue_token, secrets, next_token }) => {
                is_expected &= query("watch").is_none()
                    && query("limit").as_deref() == Some("25")
                    && query("continue").as_deref() == continue_token;
                json_response(
                    200,
                    &json!({
                        "kind": "SecretList", "apiVersion": "v1", "items": secrets,
                        "metadata": { "resourceVersion": "10", "continue": next_token },
                    }),
                )
            }
            Some(ExpectedCall::Watch { resource_version, lines, stays_open }) => {
                is_expected &= query("watch").is_some()
                    && query("timeoutSeconds").as_deref() == Some("30")
                    && query("resourceVersion").as_deref() == Some(resource_version);
                let lines = lines.into_iter().map(|line| Ok(Frame::data(Bytes::from(format!("{line}\n")))));
                let end: BoxStream<'static, _> =
                    if stays_open { stream::once(future::pending()).boxed() } else { stream::empty().boxed() };
                Response::new(StreamBody::new(stream::iter(lines).chain(end)).boxed_unsync())
            }
            Some(ExpectedCall::Fail { status, message }) => json_response(
                status,
                &json!({
                    "kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "reason": "Forbidden",
                    "code": status,
                }),
            ),
            Some(ExpectedCall::Hang) => return None,
            None => {
                is_expected &= query("watch").is_some();
                json_response(500, &json!({}))
            }
        };
        if !is_expected {
            self.unexpected.send(request.uri().to_string()).unwrap();
        }
        Some(response)
    }
}

fn json_response(status: u16, body: &Value) -> Response<Body> {
    let body = Full::new(Bytes::from(body.to_string())).boxed_unsync();
    Response::builder().status(status).header("content-type", "application/json").body(body).unwrap()
}

impl TestApiServer {
    async fn new(calls: impl IntoIterator<Item = ExpectedCall>) -> Self {
        let (sender, unexpected) = mpsc::unbounded_channel();
        let expected = Arc::new(ExpectedCalls { calls: Mutex::new(calls.into_iter().collect()), unexpected: sender });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((connection, _)) = listener.accept().await {
                let expected = Arc::clone(&expected);
                let service = service_fn(move |request| {
                    let response = expected.respond(&request);
                    async move {
                        match response {
                            Some(response) => Ok::<_, Infallible>(response),
                            None => future::pending().await,
                        }
                    }
                });
                tokio::spawn(
                    hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(connection), service),
                );
            }
        });
        Self { address, unexpected }
    }

    fn watch(&self, apps: &Arc<Apps>) -> (WatchGuard, mpsc::UnboundedReceiver<Result<(), String>>) {
        // `install_default` fails if another test has already installed a crypto provider. That provider works, too.
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let (sender, results) = mpsc::unbounded_channel();
        let config = kube::Config::new(format!("http://{}", self.address).parse().unwrap());
        let on_result = move |result| {
            let _ = sender.send(result);
        };
        (watch(config, "latchkey", Arc::clone(apps), on_result).unwrap(), results)
    }
}

impl Drop for TestApiServer {
    /// Fails the test if there was an unexpected call. After the last call of the script, further watches are allowed:
    /// they get status 500.
    fn drop(&mut self) {
        while let Ok(call) = self.unexpected.try_recv() {
            assert!(std::thread::panicking(), "unexpected: {call}");
        }
    }
}

fn secret(id: &str, version: &str) -> Value {
    named_secret(&rendered_app_secret(&id.parse().unwrap()), id, version)
}

fn named_secret(name: &str, id: &str, version: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Secret", "type": "latchkey.dev/rendered-app",
        "metadata": { "name": name, "namespace": "latchkey", "resourceVersion": version },
        "data": { "app.json": STANDARD.encode(fixtures::rendered(id).to_bytes()) },
    })
}

fn event(kind: &str, object: Value) -> Value {
    json!({ "type": kind, "object": object })
}

async fn receive<T>(receiver: &mut mpsc::UnboundedReceiver<T>) -> T {
    timeout(WAIT_TIMEOUT, receiver.recv()).await.expect("nothing was reported in time").unwrap()
}

async fn wait_for(
    changes: &mut broadcast::Receiver<RevisionChange>,
    fits: impl Fn(&RevisionChange) -> bool,
) -> RevisionChange {
    let fitting = async {
        loop {
            let change = changes.recv().await.unwrap();
            if fits(&change) {
                return change;
            }
        }
    };
    timeout(WAIT_TIMEOUT, fitting).await.expect("the change was not reported in time")
}

fn ids(apps: &Apps) -> Vec<String> {
    let mut ids: Vec<_> = apps.all().iter().map(|app| app.id().to_string()).collect();
    ids.sort();
    ids
}

#[tokio::test]
async fn the_secrets_are_listed_in_pages_and_then_watched() {
    let mut broken = secret("broken", "13");
    broken["data"] = json!({});
    let server = TestApiServer::new([
        ExpectedCall::List {
            continue_token: None,
            secrets: vec![secret("one", "1"), secret("two", "2")],
            next_token: Some("more"),
        },
        ExpectedCall::List { continue_token: Some("more"), secrets: vec![secret("three", "3")], next_token: None },
        ExpectedCall::Watch {
            resource_version: "10",
            lines: vec![
                event("ADDED", secret("four", "11")),
                event("DELETED", secret("one", "12")),
                event("ADDED", broken),
            ],
            stays_open: false,
        },
        ExpectedCall::Watch {
            resource_version: "13",
            lines: vec![event("ADDED", secret("five", "14"))],
            stays_open: true,
        },
    ])
    .await;
    let apps = Arc::new(Apps::default());
    let mut changes = apps.subscribe_changes();
    let (_watching, mut results) = server.watch(&apps);
    assert_eq!(receive(&mut results).await, Ok(()));
    let rejected = wait_for(&mut changes, |change| change.refused.is_some()).await;
    assert_eq!((rejected.app.as_str(), rejected.revision), ("broken", None));
    wait_for(&mut changes, |change| change.app.as_str() == "five").await;
    assert_eq!(ids(&apps), ["five", "four", "three", "two"]);
}

#[tokio::test]
async fn a_secret_must_have_the_name_of_its_app() {
    let server = TestApiServer::new([
        ExpectedCall::List {
            continue_token: None,
            secrets: vec![
                named_secret("latchkey-app-victim", "mine", "1"),
                named_secret("something-else", "other", "2"),
                secret("good", "3"),
                secret("latchkey-app-x", "4"),
            ],
            next_token: None,
        },
        ExpectedCall::Watch { resource_version: "10", lines: vec![], stays_open: true },
    ])
    .await;
    let apps = Arc::new(Apps::default());
    let (_watching, mut results) = server.watch(&apps);
    assert_eq!(receive(&mut results).await, Ok(()));
    assert_eq!(ids(&apps), ["good", "latchkey-app-x"]);
    let (hello, _) = apps.subscribe(String::new());
    assert_eq!(hello.refused.keys().map(AppId::as_str).collect::<Vec<_>>(), ["victim"]);
}

#[tokio::test]
async fn apps_missing_from_a_new_list_are_removed() {
    let expired =
        json!({ "kind": "Status", "status": "Failure", "code": 410, "reason": "Expired", "message": "too old" });
    let server = TestApiServer::new([
        ExpectedCall::List {
            continue_token: None,
            secrets: vec![secret("goes", "1"), secret("stays", "2")],
            next_token: None,
        },
        ExpectedCall::Watch { resource_version: "10", lines: vec![event("ERROR", expired)], stays_open: false },
        ExpectedCall::List { continue_token: None, secrets: vec![secret("stays", "2")], next_token: None },
        ExpectedCall::Watch { resource_version: "10", lines: vec![], stays_open: true },
    ])
    .await;
    let apps = Arc::new(Apps::default());
    let mut changes = apps.subscribe_changes();
    let (_watching, _results) = server.watch(&apps);
    let change = wait_for(&mut changes, |change| change.revision.is_none()).await;
    assert_eq!(change.app.as_str(), "goes");
    assert_eq!(ids(&apps), ["stays"]);
}

#[tokio::test]
async fn an_interrupted_list_removes_nothing() {
    let server = TestApiServer::new([
        ExpectedCall::List {
            continue_token: None,
            secrets: vec![secret("one", "1"), secret("two", "2")],
            next_token: None,
        },
        ExpectedCall::Fail { status: 410, message: "too old" },
        ExpectedCall::List { continue_token: None, secrets: vec![secret("two", "2")], next_token: Some("more") },
        ExpectedCall::Fail { status: 500, message: "etcd is unavailable" },
        ExpectedCall::List {
            continue_token: None,
            secrets: vec![secret("one", "1"), secret("two", "2")],
            next_token: None,
        },
        ExpectedCall::Watch {
            resource_version: "10",
            lines: vec![event("ADDED", secret("three", "11"))],
            stays_open: true,
        },
    ])
    .await;
    let apps = Arc::new(Apps::default());
    let mut changes = apps.subscribe_changes();
    let (_watching, _results) = server.watch(&apps);
    let mut received = Vec::new();
    loop {
        let change = wait_for(&mut changes, |_| true).await;
        received.push((change.app.to_string(), change.revision.is_some()));
        if change.app.as_str() == "three" {
            break;
        }
    }
    assert!(received.iter().all(|(_, serves)| *serves), "{received:?}");
    assert_eq!(ids(&apps), ["one", "three", "two"]);
}

#[tokio::test]
async fn a_missing_permission_is_reported_with_the_message_of_the_api_server() {
    let message = "secrets is forbidden: User \"latchkey\" cannot list resource \"secrets\"";
    let server = TestApiServer::new([
        ExpectedCall::Fail { status: 403, message },
        ExpectedCall::List { continue_token: None, secrets: vec![], next_token: None },
        ExpectedCall::Watch { resource_version: "10", lines: vec![], stays_open: true },
    ])
    .await;
    let (_watching, mut results) = server.watch(&Arc::new(Apps::default()));
    assert_eq!(receive(&mut results).await, Err(format!("the API server refused the request: {message}")));
    assert_eq!(receive(&mut results).await, Ok(()));
}

#[tokio::test]
async fn an_unreachable_api_server_is_reported() {
    let mut server = TestApiServer::new([]).await;
    server.address = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let (_watching, mut results) = server.watch(&Arc::new(Apps::default()));
    assert_eq!(receive(&mut results).await, Err("the API server cannot be reached".to_owned()));
}

#[tokio::test]
async fn cached_documents_are_corrected_by_the_list() {
    let folder = tempfile::tempdir().unwrap();
    let open_cache = || Arc::new(Apps::default().with_cache(Cache::open(folder.path().to_owned()).unwrap()));
    let before = open_cache();
    let mut full_sync = before.start_full_sync();
    for id in ["goes", "stays"] {
        full_sync.put(&id.parse().unwrap(), &fixtures::rendered(id).to_bytes());
    }
    full_sync.commit();

    let apps = open_cache();
    assert!(apps.restore_from_cache());
    assert_eq!(ids(&apps), ["goes", "stays"]);
    let server = TestApiServer::new([
        ExpectedCall::List {
            continue_token: None,
            secrets: vec![secret("stays", "2"), secret("comes", "3")],
            next_token: None,
        },
        ExpectedCall::Watch { resource_version: "10", lines: vec![], stays_open: true },
    ])
    .await;
    let (_watching, mut results) = server.watch(&apps);
    assert_eq!(receive(&mut results).await, Ok(()));
    assert_eq!(ids(&apps), ["comes", "stays"]);
    let reopened = open_cache();
    assert!(reopened.restore_from_cache());
    assert_eq!(ids(&reopened), ["comes", "stays"]);
}

#[test]
fn documents_are_current_again_within_40_seconds_after_a_watch_was_silently_dropped() {
    assert!(TIMEOUTS.read > Duration::from_secs(u64::from(WATCH_SECONDS)), "no working watch is interrupted");
    assert!(TIMEOUTS.read + backoff_delay(0, 1.0) + CONNECT_TIMEOUT < Duration::from_secs(40));
}

#[tokio::test]
async fn a_silent_list_and_a_silent_watch_are_restarted() {
    let server = TestApiServer::new([
        ExpectedCall::Hang,
        ExpectedCall::List { continue_token: None, secrets: vec![secret("one", "1")], next_token: None },
        ExpectedCall::Hang,
        ExpectedCall::Watch {
            resource_version: "10",
            lines: vec![event("ADDED", secret("two", "11"))],
            stays_open: true,
        },
        ExpectedCall::Watch {
            resource_version: "11",
            lines: vec![event("ADDED", secret("three", "12"))],
            stays_open: true,
        },
    ])
    .await;
    let timeouts = Timeouts { read: Duration::from_millis(600), list: Duration::from_millis(300) };
    // `install_default` fails if another test has already installed a crypto provider. That provider works, too.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let (sender, mut results) = mpsc::unbounded_channel();
    let config = kube::Config::new(format!("http://{}", server.address).parse().unwrap());
    let apps = Arc::new(Apps::default());
    let mut changes = apps.subscribe_changes();
    let on_result = move |result| {
        let _ = sender.send(result);
    };
    let source = SecretWatcher::new(api(config, "latchkey", timeouts).unwrap(), apps, on_result, timeouts);
    let running = tokio::spawn(source.run()).abort_handle();
    wait_for(&mut changes, |change| change.app.as_str() == "three").await;
    running.abort();
    assert_eq!(receive(&mut results).await, Err("the API server does not answer".to_owned()));
    assert_eq!(receive(&mut results).await, Ok(()));
}

#[test]
fn the_backoff_grows_to_five_seconds() {
    let waits: Vec<_> =
        [0, 1, 2, 3, 4, 5, 40, u32::MAX].map(|failures| backoff_delay(failures, 1.0).as_millis()).into();
    assert_eq!(waits, [250, 500, 1000, 2000, 4000, 5000, 5000, 5000]);
    assert_eq!(backoff_delay(0, 0.0), Duration::from_millis(125));
}
