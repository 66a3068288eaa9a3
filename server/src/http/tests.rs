//! Tests of the listeners over in-memory connections: how the request pipeline handles valid and invalid HTTP. The
//! stores fail in the way that the test chooses ([`FailingStores`]). The end-to-end tests use real stores.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc, time::Duration};

use latchkey_crds::rendered::RenderedApp;
use prometheus_client::registry::Registry;
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex},
    time::timeout,
};
use uuid::Uuid;

use self::failing_stores::FailingStores;
use super::{
    Budgets, Drain, HttpMetrics, Service,
    openapi::Documents,
    parked::finish,
    pipeline::Endpoints,
    public_service,
    serve::{connection_builder, serve_connection},
    timeouts::Timeouts,
};
use crate::{
    callers::Callers,
    client_metrics::ClientMetrics,
    config::Apps,
    domain::{
        clock::Env,
        session::{Amr, Profile, Session, SessionId},
        token,
        user::{Epoch, UserId},
    },
    fixtures,
    import_metrics::ImportMetrics,
    settings::Settings,
    state::State,
    token_cache::TokenCache,
};

mod administration;
mod authentication;
mod authorize;
mod bodies;
mod budgets;
mod clients;
mod connections;
mod errors;
mod failing_stores;
mod http2;
mod operations;
mod pages;
mod refusals;
mod routing;
mod slow_endpoint;
mod timeouts;

/// A server with failing stores.
struct TestServer {
    state: Arc<State<FailingStores>>,
    registry: Registry,
    metrics: HttpMetrics,
    budgets: Arc<Budgets>,
    drain: Drain,
    timeouts: Timeouts,
}

struct Reply {
    status: u16,
    headers: BTreeMap<String, String>,
    body: String,
}

impl TestServer {
    fn new(stores: FailingStores) -> Self {
        Self::with_app(stores, |_| {})
    }

    fn with_app(stores: FailingStores, edit: impl FnOnce(&mut RenderedApp)) -> Self {
        let mut document = fixtures::rendered("shop");
        edit(&mut document);
        let apps = Apps::default();
        let (_, mut changes) = apps.subscribe(String::new());
        apps.put(&"shop".parse().unwrap(), &document.to_bytes());
        assert_eq!(changes.try_recv().unwrap().refused, None);
        let settings = Settings {
            base_url: "https://auth.example.com".parse().unwrap(),
            trusted_proxies: Vec::new(),
            trusts_traceparent: false,
            pod_uid: "pod-1".to_owned(),
        };
        let openapi = Documents::render(&settings.base_url);
        let mut registry = Registry::default();
        let metrics = HttpMetrics::register(&mut registry);
        Self {
            state: Arc::new(State {
                apps: Arc::new(apps),
                stores,
                env: Env::system(),
                settings,
                openapi,
                callers: Callers::Disabled,
                token_cache: TokenCache::default(),
                import_metrics: ImportMetrics::default(),
                client_metrics: ClientMetrics::default(),
            }),
            registry,
            metrics,
            budgets: Budgets::new(256 << 20, 256),
            drain: Drain::new(Duration::ZERO, Duration::from_secs(5)),
            timeouts: Timeouts { linger: Duration::from_millis(200), ..Timeouts::DEFAULT },
        }
    }

    fn public(&self) -> Service {
        public_service(Arc::clone(&self.state), self.metrics.clone(), Arc::clone(&self.budgets))
            .with_timeouts(self.timeouts)
    }

    fn service_for<E: Endpoints>(&self, endpoints: E) -> Service {
        let (state, metrics) = (Arc::clone(&self.state), self.metrics.clone());
        Service::new(endpoints, state, metrics, Arc::clone(&self.budgets), self.budgets.public_connections())
            .with_timeouts(self.timeouts)
    }

    /// Opens a connection and returns the client's end.
    fn connect(&self, service: Service) -> DuplexStream {
        self.connect_from(service, 1)
    }

    /// Like `connect`, but from the client address 192.0.2.`last`.
    fn connect_from(&self, service: Service, last: u8) -> DuplexStream {
        let (client, server) = duplex(1 << 20);
        let peer = IpAddr::from([192, 0, 2, last]);
        let drain = self.drain.clone();
        tokio::spawn(async move {
            let permit = service.admit(service.acquire_slot().await, peer).expect("a slot for the connection");
            let begun = drain.begun();
            let connection = serve_connection(connection_builder(), server, peer, permit, service, drain);
            finish(Box::pin(connection), &begun).await;
        });
        client
    }

    async fn send_request(&self, request: impl AsRef<[u8]>) -> Reply {
        exchange(self.connect(self.public()), request.as_ref()).await
    }

    async fn post(&self, path: &str, headers: &str, body: &str) -> Reply {
        let length = body.len();
        self.send_request(format!(
            "POST {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n\
             Content-Length: {length}\r\n{headers}\r\n{body}"
        ))
        .await
    }
}

/// Sends bytes and reads until the server closes the connection.
async fn exchange(mut client: DuplexStream, request: &[u8]) -> Reply {
    client.write_all(request).await.unwrap();
    let mut reply = Vec::new();
    timeout(Duration::from_secs(20), client.read_to_end(&mut reply)).await.expect("closed in time").unwrap();
    Reply::parse(&reply)
}

impl Reply {
    fn parse(bytes: &[u8]) -> Self {
        let text = std::str::from_utf8(bytes).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("a head in {text:?}"));
        let mut lines = head.split("\r\n");
        let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let headers = lines
            .map(|line| line.split_once(": ").unwrap())
            .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
            .collect();
        Self { status, headers, body: body.to_owned() }
    }

    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|_| panic!("JSON in {:?}", self.body))
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }

    /// Asserts an error response with the headers that all errors carry.
    #[track_caller]
    fn assert_refused(&self, status: u16, code: &str) -> Value {
        assert_eq!((self.status, self.json()["error"].as_str().unwrap()), (status, code), "{}", self.body);
        assert_eq!(self.header("content-type"), Some("application/json"));
        assert_eq!(self.header("cache-control"), Some("no-store"));
        assert_eq!(self.header("x-content-type-options"), Some("nosniff"));
        let id = self.header("x-request-id").unwrap();
        assert_eq!(self.json()["request_id"], id);
        assert!(!self.json()["error_description"].as_str().unwrap().is_empty());
        self.json()
    }
}

/// The text of a GET request.
fn get_request(path: &str, headers: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{headers}\r\n")
}

/// The email endpoints that need no token, each with a valid body.
const EMAIL_ENDPOINTS: [(&str, &str); 5] = [
    ("login", r#"{"email": "ada@example.com", "password": "correct horse"}"#),
    ("register", r#"{"name": "Ada", "email": "ada@example.com", "password": "correct horse"}"#),
    ("confirm", r#"{"code": "ABCDE-FGHJK"}"#),
    ("forgot-password", r#"{"email": "ada@example.com"}"#),
    ("confirm-password", r#"{"email": "ada@example.com", "code": "ABCDE-FGHJK", "password": "correct horse"}"#),
];

/// Waits until the condition is true.
async fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let polling = async {
        while !condition() {
            tokio::task::yield_now().await;
        }
    };
    timeout(Duration::from_secs(20), polling).await.unwrap_or_else(|_| panic!("timed out: {what}"));
}

/// The text of a login request.
fn login_request() -> String {
    let (_, body) = EMAIL_ENDPOINTS[0];
    let length = body.len();
    format!(
        "POST /v1/shop/email/login HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {length}\r\n\r\n{body}"
    )
}

fn access_token(server: &TestServer) -> String {
    let app = server.state.apps.get("shop").unwrap();
    let id = Uuid::from_u128(7);
    let (user, epoch) = (UserId(id), Epoch(1));
    let auth_time = server.state.env.now();
    let session = Session { id: SessionId(id), user, epoch, generation: 1, amr: Amr::Password, auth_time };
    let profile = Profile { version: 1, email: None, email_verified: false, name: "Ada".to_owned() };
    token::issue_tokens(&app, &server.state.env, &profile, &session).unwrap().access_token
}
