//! The source against a scripted API server in this process, which refuses every call that no test expects.

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
use latchkey_crds::{names::rendered_app_secret, rendered::Change};
use serde_json::{Value, json};
use tokio::{
    net::TcpListener,
    sync::{broadcast, mpsc},
};

use super::*;
use crate::{config::cache::Cache, fixtures};

const LIMIT: Duration = Duration::from_secs(20);

/// What the API server says to the next call, which must be that one.
enum Scene {
    /// A page of the list: its place, its Secrets, and the place of the next.
    List {
        from: Option<&'static str>,
        secrets: Vec<Value>,
        next: Option<&'static str>,
    },
    /// A watch from that version: its lines, and whether it then stays open.
    Watch {
        from: &'static str,
        lines: Vec<Value>,
        stays: bool,
    },
    Refuse {
        status: u16,
        message: &'static str,
    },
    /// The call is never answered.
    Hang,
}

struct Script {
    scenes: Mutex<VecDeque<Scene>>,
    unexpected: mpsc::UnboundedSender<String>,
}

struct Stage {
    address: SocketAddr,
    unexpected: mpsc::UnboundedReceiver<String>,
}

type Body = UnsyncBoxBody<Bytes, Infallible>;

impl Script {
    fn answer(&self, request: &Request<Incoming>) -> Option<Response<Body>> {
        let query = |name: &str| {
            let pairs = url::form_urlencoded::parse(request.uri().query().unwrap_or_default().as_bytes());
            pairs.into_owned().find(|(key, _)| key == name).map(|(_, value)| value)
        };
        let scene = self.scenes.lock().unwrap().pop_front();
        let mut fits = request.uri().path() == "/api/v1/namespaces/latchkey/secrets"
            && query("fieldSelector").as_deref() == Some("type=latchkey.dev/rendered-app");
        let answer = match scene {
            Some(Scene::List { from, secrets, next }) => {
                fits &= query("watch").is_none()
                    && query("limit").as_deref() == Some("25")
                    && query("continue").as_deref() == from;
                json_answer(
                    200,
                    &json!({
                        "kind": "SecretList", "apiVersion": "v1", "items": secrets,
                        "metadata": { "resourceVersion": "10", "continue": next },
                    }),
                )
            }
            Some(Scene::Watch { from, lines, stays }) => {
                fits &= query("watch").is_some()
                    && query("timeoutSeconds").as_deref() == Some("30")
                    && query("resourceVersion").as_deref() == Some(from);
                let lines = lines.into_iter().map(|line| Ok(Frame::data(Bytes::from(format!("{line}\n")))));
                let end: BoxStream<'static, _> =
                    if stays { stream::once(future::pending()).boxed() } else { stream::empty().boxed() };
                Response::new(StreamBody::new(stream::iter(lines).chain(end)).boxed_unsync())
            }
            Some(Scene::Refuse { status, message }) => json_answer(
                status,
                &json!({
                    "kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "reason": "Forbidden",
                    "code": status,
                }),
            ),
            Some(Scene::Hang) => return None,
            None => {
                fits &= query("watch").is_some();
                json_answer(500, &json!({}))
            }
        };
        if !fits {
            self.unexpected.send(request.uri().to_string()).unwrap();
        }
        Some(answer)
    }
}

fn json_answer(status: u16, body: &Value) -> Response<Body> {
    let body = Full::new(Bytes::from(body.to_string())).boxed_unsync();
    Response::builder().status(status).header("content-type", "application/json").body(body).unwrap()
}

impl Stage {
    async fn new(scenes: impl IntoIterator<Item = Scene>) -> Self {
        let (told, unexpected) = mpsc::unbounded_channel();
        let script = Arc::new(Script { scenes: Mutex::new(scenes.into_iter().collect()), unexpected: told });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((connection, _)) = listener.accept().await {
                let script = Arc::clone(&script);
                let service = service_fn(move |request| {
                    let answer = script.answer(&request);
                    async move {
                        match answer {
                            Some(answer) => Ok::<_, Infallible>(answer),
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

    fn watch(&self, apps: &Arc<Apps>) -> (Watching, mpsc::UnboundedReceiver<Result<(), String>>) {
        // Another test may have been first.
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let (tell, told) = mpsc::unbounded_channel();
        let config = kube::Config::new(format!("http://{}", self.address).parse().unwrap());
        let told_by = move |news| {
            let _ = tell.send(news);
        };
        (watch(config, "latchkey", Arc::clone(apps), told_by).unwrap(), told)
    }
}

impl Drop for Stage {
    /// Fails where a call came that the script does not have; one after its end is the watch that follows.
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

async fn next<T>(receiver: &mut mpsc::UnboundedReceiver<T>) -> T {
    timeout(LIMIT, receiver.recv()).await.expect("nothing was told in time").unwrap()
}

async fn until(changes: &mut broadcast::Receiver<Change>, fits: impl Fn(&Change) -> bool) -> Change {
    let fitting = async {
        loop {
            let told = changes.recv().await.unwrap();
            if fits(&told) {
                return told;
            }
        }
    };
    timeout(LIMIT, fitting).await.expect("the change was not told in time")
}

fn ids(apps: &Apps) -> Vec<String> {
    let mut ids: Vec<_> = apps.all().iter().map(|app| app.id().to_string()).collect();
    ids.sort();
    ids
}

#[tokio::test]
async fn the_set_comes_by_pages_and_then_each_change() {
    let mut broken = secret("broken", "13");
    broken["data"] = json!({});
    let stage = Stage::new([
        Scene::List { from: None, secrets: vec![secret("one", "1"), secret("two", "2")], next: Some("more") },
        Scene::List { from: Some("more"), secrets: vec![secret("three", "3")], next: None },
        Scene::Watch {
            from: "10",
            lines: vec![
                event("ADDED", secret("four", "11")),
                event("DELETED", secret("one", "12")),
                event("ADDED", broken),
            ],
            stays: false,
        },
        Scene::Watch { from: "13", lines: vec![event("ADDED", secret("five", "14"))], stays: true },
    ])
    .await;
    let apps = Arc::new(Apps::default());
    let mut changes = apps.changes();
    let (_watching, mut told) = stage.watch(&apps);
    assert_eq!(next(&mut told).await, Ok(()));
    let refused = until(&mut changes, |change| change.refused.is_some()).await;
    assert_eq!((refused.app.as_str(), refused.revision), ("broken", None));
    until(&mut changes, |change| change.app.as_str() == "five").await;
    assert_eq!(ids(&apps), ["five", "four", "three", "two"]);
}

#[tokio::test]
async fn a_secret_must_be_named_as_its_app_is() {
    let stage = Stage::new([
        Scene::List {
            from: None,
            secrets: vec![
                named_secret("latchkey-app-victim", "mine", "1"),
                named_secret("something-else", "other", "2"),
                secret("good", "3"),
                secret("latchkey-app-x", "4"),
            ],
            next: None,
        },
        Scene::Watch { from: "10", lines: vec![], stays: true },
    ])
    .await;
    let apps = Arc::new(Apps::default());
    let (_watching, mut told) = stage.watch(&apps);
    assert_eq!(next(&mut told).await, Ok(()));
    assert_eq!(ids(&apps), ["good", "latchkey-app-x"]);
    let (hello, _) = apps.subscribe(String::new());
    assert_eq!(hello.refused.keys().map(AppId::as_str).collect::<Vec<_>>(), ["victim"]);
}

#[tokio::test]
async fn what_is_missing_after_a_new_list_goes() {
    let gone = json!({ "kind": "Status", "status": "Failure", "code": 410, "reason": "Expired", "message": "too old" });
    let stage = Stage::new([
        Scene::List { from: None, secrets: vec![secret("goes", "1"), secret("stays", "2")], next: None },
        Scene::Watch { from: "10", lines: vec![event("ERROR", gone)], stays: false },
        Scene::List { from: None, secrets: vec![secret("stays", "2")], next: None },
        Scene::Watch { from: "10", lines: vec![], stays: true },
    ])
    .await;
    let apps = Arc::new(Apps::default());
    let mut changes = apps.changes();
    let (_watching, _told) = stage.watch(&apps);
    let told = until(&mut changes, |change| change.revision.is_none()).await;
    assert_eq!(told.app.as_str(), "goes");
    assert_eq!(ids(&apps), ["stays"]);
}

#[tokio::test]
async fn a_list_that_breaks_off_takes_nothing_away() {
    let stage = Stage::new([
        Scene::List { from: None, secrets: vec![secret("one", "1"), secret("two", "2")], next: None },
        Scene::Refuse { status: 410, message: "too old" },
        Scene::List { from: None, secrets: vec![secret("two", "2")], next: Some("more") },
        Scene::Refuse { status: 500, message: "etcd is away" },
        Scene::List { from: None, secrets: vec![secret("one", "1"), secret("two", "2")], next: None },
        Scene::Watch { from: "10", lines: vec![event("ADDED", secret("three", "11"))], stays: true },
    ])
    .await;
    let apps = Arc::new(Apps::default());
    let mut changes = apps.changes();
    let (_watching, _told) = stage.watch(&apps);
    let mut seen = Vec::new();
    loop {
        let told = until(&mut changes, |_| true).await;
        seen.push((told.app.to_string(), told.revision.is_some()));
        if told.app.as_str() == "three" {
            break;
        }
    }
    assert!(seen.iter().all(|(_, serves)| *serves), "{seen:?}");
    assert_eq!(ids(&apps), ["one", "three", "two"]);
}

#[tokio::test]
async fn a_missing_permission_is_told_in_the_api_servers_own_words() {
    let message = "secrets is forbidden: User \"latchkey\" cannot list resource \"secrets\"";
    let stage = Stage::new([
        Scene::Refuse { status: 403, message },
        Scene::List { from: None, secrets: vec![], next: None },
        Scene::Watch { from: "10", lines: vec![], stays: true },
    ])
    .await;
    let (_watching, mut told) = stage.watch(&Arc::new(Apps::default()));
    assert_eq!(next(&mut told).await, Err(format!("the API server refuses: {message}")));
    assert_eq!(next(&mut told).await, Ok(()));
}

#[tokio::test]
async fn an_api_server_that_is_not_there_is_told() {
    let mut stage = Stage::new([]).await;
    stage.address = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let (_watching, mut told) = stage.watch(&Arc::new(Apps::default()));
    assert_eq!(next(&mut told).await, Err("the API server cannot be reached".to_owned()));
}

#[tokio::test]
async fn what_was_kept_is_corrected_by_the_list() {
    let folder = tempfile::tempdir().unwrap();
    let cached = || Arc::new(Apps::default().kept_in(Cache::open(folder.path().to_owned()).unwrap()));
    let before = cached();
    let mut whole = before.whole();
    for id in ["goes", "stays"] {
        whole.put(&id.parse().unwrap(), &fixtures::rendered(id).to_bytes());
    }
    whole.commit();

    let apps = cached();
    assert!(apps.restore());
    assert_eq!(ids(&apps), ["goes", "stays"]);
    let stage = Stage::new([
        Scene::List { from: None, secrets: vec![secret("stays", "2"), secret("comes", "3")], next: None },
        Scene::Watch { from: "10", lines: vec![], stays: true },
    ])
    .await;
    let (_watching, mut told) = stage.watch(&apps);
    assert_eq!(next(&mut told).await, Ok(()));
    assert_eq!(ids(&apps), ["comes", "stays"]);
    let again = cached();
    assert!(again.restore());
    assert_eq!(ids(&again), ["comes", "stays"]);
}

#[test]
fn a_watch_that_was_dropped_silently_is_current_again_within_40_seconds() {
    assert!(LIMITS.silence > Duration::from_secs(u64::from(WATCH_SECONDS)), "no watch in order is cut");
    assert!(LIMITS.silence + delay(0, 1.0) + CONNECT < Duration::from_secs(40));
}

#[tokio::test]
async fn a_silent_list_and_a_silent_watch_are_begun_again() {
    let stage = Stage::new([
        Scene::Hang,
        Scene::List { from: None, secrets: vec![secret("one", "1")], next: None },
        Scene::Hang,
        Scene::Watch { from: "10", lines: vec![event("ADDED", secret("two", "11"))], stays: true },
        Scene::Watch { from: "11", lines: vec![event("ADDED", secret("three", "12"))], stays: true },
    ])
    .await;
    let limits = Limits { silence: Duration::from_millis(600), list: Duration::from_millis(300) };
    // Another test may have been first.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let (tell, mut told) = mpsc::unbounded_channel();
    let config = kube::Config::new(format!("http://{}", stage.address).parse().unwrap());
    let apps = Arc::new(Apps::default());
    let mut changes = apps.changes();
    let told_by = move |news| {
        let _ = tell.send(news);
    };
    let source = Source::new(api(config, "latchkey", limits).unwrap(), apps, told_by, limits);
    let running = tokio::spawn(source.run()).abort_handle();
    until(&mut changes, |change| change.app.as_str() == "three").await;
    running.abort();
    assert_eq!(next(&mut told).await, Err("the API server does not answer".to_owned()));
    assert_eq!(next(&mut told).await, Ok(()));
}

#[test]
fn waits_grow_to_five_seconds() {
    let waits: Vec<_> = [0, 1, 2, 3, 4, 5, 40, u32::MAX].map(|failures| delay(failures, 1.0).as_millis()).into();
    assert_eq!(waits, [250, 500, 1000, 2000, 4000, 5000, 5000, 5000]);
    assert_eq!(delay(0, 0.0), Duration::from_millis(125));
}
