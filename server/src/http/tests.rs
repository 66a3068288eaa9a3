//! The listeners over connections in memory: what the door does with good and bad HTTP. The stores behind it only fail,
//! each in its own way; what they do when they work is tested with real ones.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::FutureExt;
use http::Method;
use latchkey_crds::{
    conditions::Reason,
    rendered::{LimitName, RenderedApp, RenderedProvider, SignUp, Window},
    types::AppId,
};
use prometheus_client::{encoding::text, registry::Registry};
use serde_json::{Value, json};
use time::OffsetDateTime;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex},
    sync::Notify,
    time::timeout,
};
use uuid::Uuid;

use super::{
    Budgets, Drain, HttpMetrics, Readiness, Service, admin_service,
    door::{Endpoints, Lookup},
    error::Problem,
    openapi, ops_service,
    patience::Times,
    public_service,
    request::Inbound,
    response::{self, Response},
    routes::{Route, Verb},
    serve::{builder, connection},
};
use crate::{
    callers::Callers,
    config::Apps,
    domain::{
        app::App,
        audit::{Activity, Event, Refusal},
        client::ClientAddress,
        clock::Env,
        code::{CodeKey, CodeRecord},
        email::{AccountKey, Email},
        flow::{Binding, FlowId, FoundLogin, LoginCodeKey, PendingLogin},
        gate::Gate,
        identity::{Authorization, Away, Grant, Identity, Operation, ProviderError, ProviderTraits, Vouched},
        limits::{Check, Limited},
        mail::{EpochNews, Mail},
        password::{Busy, Password, PasswordHash},
        ports::{
            Accounts, AddressChange, AddressChanged, AddressRequest, Audit, Backlog, Carried, Changed, Claimed, Codes,
            Confirmation, Creation, FederatedUser, Flows, Hasher, Identities, KeepError, Limits, Linked, Linking,
            NewIdentity, NewPassword, NewUser, Outbox, Outcome, PasswordReset, Providers, Removal, Rename, Renamed,
            Sessions, StoreError, TakeError, TakeOver, Taken, Unlinked, Unlinking, Users,
        },
        session::{
            Amr, LiveSession, NewSession, Opening, Profile, RefreshRules, Refreshed, Session, SessionId, SessionInfo,
        },
        token::{self, RefreshToken},
        user::{Epoch, User, UserId},
    },
    fixtures,
    providers::Reports,
    settings::Settings,
    state::State,
};

/// How the stores fail.
#[derive(Clone, Copy)]
enum Failing {
    Away,
    Broken,
    Limited,
    Busy,
    Panicking,
}

impl Failing {
    fn answer<T>(self) -> Result<T, StoreError> {
        let source = "secret-host:5432 refused".into();
        match self {
            Self::Away | Self::Limited | Self::Busy => Err(StoreError::Unavailable { store: "postgres", source }),
            Self::Broken => Err(StoreError::Unexpected { store: "postgres", source }),
            Self::Panicking => panic!("a store panics"),
        }
    }
}

const BUSY: Busy = Busy { retry_after: Duration::from_millis(2_500) };

impl Users for Failing {
    async fn user(&self, _: &AppId, _: UserId) -> Result<Option<User>, StoreError> {
        self.answer()
    }
    async fn user_by_email(&self, _: &AppId, _: &Email) -> Result<Option<User>, StoreError> {
        match self {
            Self::Busy => Ok(None),
            other => other.answer(),
        }
    }
    async fn create_user(&self, _: &AppId, _: NewUser, _: Option<Mail>) -> Result<Creation, StoreError> {
        self.answer()
    }
    async fn registered_again(
        &self,
        _: &AppId,
        _: UserId,
        _: Epoch,
        _: bool,
        _: Option<Mail>,
        _: Event,
    ) -> Result<(), StoreError> {
        self.answer()
    }
    async fn renew_hash(&self, _: &AppId, _: UserId, _: &PasswordHash, _: PasswordHash) -> Result<(), StoreError> {
        self.answer()
    }
    async fn confirm_address(&self, _: &AppId, _: Confirmation) -> Result<Option<Changed>, StoreError> {
        self.answer()
    }
    async fn reset_password(&self, _: &AppId, _: PasswordReset) -> Result<Option<Changed>, StoreError> {
        self.answer()
    }
}

impl Accounts for Failing {
    async fn user_of_session(&self, _: &AppId, _: &Session) -> Result<Option<User>, StoreError> {
        self.answer()
    }
    async fn rename(&self, _: &AppId, _: Rename) -> Result<Option<Renamed>, StoreError> {
        self.answer()
    }
    async fn profile_carried(&self, _: &AppId, _: Uuid) -> Result<(), StoreError> {
        self.answer()
    }
    async fn set_password(&self, _: &AppId, _: NewPassword) -> Result<Option<User>, StoreError> {
        self.answer()
    }
    async fn ask_for_address(&self, _: &AppId, _: AddressRequest) -> Result<Option<User>, StoreError> {
        self.answer()
    }
    async fn change_address(&self, _: &AppId, _: AddressChange) -> Result<Option<AddressChanged>, StoreError> {
        self.answer()
    }
    async fn delete_user(&self, _: &AppId, _: Removal) -> Result<Option<Epoch>, StoreError> {
        self.answer()
    }
}

impl Outbox for Failing {
    async fn enqueue(&self, _: &AppId, _: Mail) -> Result<(), StoreError> {
        self.answer()
    }
    async fn claim(&self, _: usize, _: usize, _: Duration) -> Result<Vec<Claimed>, StoreError> {
        self.answer()
    }
    async fn settle(&self, _: &Claimed, _: Outcome) -> Result<(), StoreError> {
        self.answer()
    }
    async fn epoch_carried(&self, _: &AppId, _: &EpochNews) -> Result<(), StoreError> {
        self.answer()
    }
    async fn notified(&self) {}
    async fn backlog(&self) -> Result<Backlog, StoreError> {
        self.answer()
    }
}

impl Codes for Failing {
    async fn put_code(&self, _: &AppId, _: &CodeKey, _: &CodeRecord) -> Result<(), StoreError> {
        self.answer()
    }
    async fn find_code(&self, _: &AppId, _: &[CodeKey]) -> Result<Option<(CodeKey, CodeRecord)>, StoreError> {
        self.answer()
    }
    async fn take_code(&self, _: &AppId, _: &CodeKey) -> Result<Option<CodeRecord>, StoreError> {
        self.answer()
    }
}

impl Sessions for Failing {
    async fn open_session(&self, _: &AppId, _: &NewSession) -> Result<Opening, StoreError> {
        self.answer()
    }
    async fn session(&self, _: &AppId, _: UserId, _: SessionId) -> Result<Option<LiveSession>, StoreError> {
        self.answer()
    }
    async fn sessions(&self, _: &AppId, _: UserId) -> Result<Vec<SessionInfo>, StoreError> {
        self.answer()
    }
    async fn refresh(&self, _: &AppId, _: &RefreshToken, _: &RefreshRules) -> Result<Refreshed, StoreError> {
        self.answer()
    }
    async fn end_session(&self, _: &AppId, _: UserId, _: SessionId) -> Result<bool, StoreError> {
        self.answer()
    }
    async fn end_other_sessions(&self, _: &AppId, _: UserId, _: SessionId) -> Result<Vec<SessionId>, StoreError> {
        self.answer()
    }
    async fn raise_epoch(&self, _: &AppId, _: &EpochNews, _: Option<&Profile>) -> Result<Carried, StoreError> {
        self.answer()
    }
    async fn put_profile(&self, _: &AppId, _: UserId, _: &Profile) -> Result<(), StoreError> {
        self.answer()
    }
}

impl Identities for Failing {
    async fn user_by_identity(&self, _: &AppId, _: &str, _: &str) -> Result<Option<User>, StoreError> {
        self.answer()
    }
    async fn create_federated(
        &self,
        _: &AppId,
        _: FederatedUser,
        _: NewIdentity,
        _: Option<Mail>,
    ) -> Result<bool, StoreError> {
        self.answer()
    }
    async fn link_identity(&self, _: &AppId, _: Linking) -> Result<Linked, StoreError> {
        self.answer()
    }
    async fn take_over(&self, _: &AppId, _: TakeOver) -> Result<Option<User>, StoreError> {
        self.answer()
    }
    async fn identities(&self, _: &AppId, _: UserId) -> Result<Vec<Identity>, StoreError> {
        self.answer()
    }
    async fn unlink_identity(&self, _: &AppId, _: Unlinking) -> Result<Unlinked, StoreError> {
        self.answer()
    }
}

impl Flows for Failing {
    async fn keep_flow(&self, _: &AppId, _: &FlowId, _: &str, _: ClientAddress) -> Result<(), KeepError> {
        self.answer().map_err(KeepError::Store)
    }
    async fn find_flow(&self, _: &AppId, _: &FlowId) -> Result<Option<String>, StoreError> {
        self.answer()
    }
    async fn use_flow(&self, _: &AppId, _: &FlowId, _: Binding) -> Result<bool, StoreError> {
        self.answer()
    }
    async fn put_login(&self, _: &AppId, _: &LoginCodeKey, _: &PendingLogin) -> Result<(), StoreError> {
        self.answer()
    }
    async fn find_login(&self, _: &AppId, _: &LoginCodeKey) -> Result<Option<FoundLogin>, StoreError> {
        self.answer()
    }
    async fn take_login(&self, _: &AppId, _: &LoginCodeKey, _: SessionId) -> Result<Option<SessionId>, StoreError> {
        self.answer()
    }
}

impl Providers for Failing {
    type Permit = ();

    fn traits_of(&self, _: &RenderedProvider) -> ProviderTraits {
        ProviderTraits { nonce: true, form_post: false }
    }
    fn try_acquire(&self, _: Operation, _: &App, _: &RenderedProvider, _: ClientAddress) -> Result<(), ProviderError> {
        Ok(())
    }
    async fn authorization_url(
        &self,
        (): &(),
        _: &RenderedProvider,
        request: &Authorization<'_>,
    ) -> Result<String, ProviderError> {
        Ok(format!("https://provider.example/authorize?state={}", request.state))
    }
    async fn judge_issuer(&self, (): &(), _: &RenderedProvider, _: Option<&str>) -> Result<(), ProviderError> {
        Ok(())
    }
    async fn exchange(&self, (): &(), _: &RenderedProvider, _: &Grant<'_>) -> Result<Vouched, ProviderError> {
        Err(ProviderError::Away(Away::TooSlow))
    }
    async fn check_token(
        &self,
        (): &(),
        _: &RenderedProvider,
        _: &str,
        _: Option<&str>,
    ) -> Result<Vouched, ProviderError> {
        Err(ProviderError::NoTokenCheck)
    }
}

impl Limits for Failing {
    async fn take(&self, _: &AppId, checks: Vec<Check>) -> Result<Taken, TakeError> {
        match self {
            Self::Busy => Ok(Taken(checks.into_iter().map(|check| (check, 0)).collect())),
            Self::Limited => Err(TakeError::Limited(Limited {
                limit: LimitName::LoginsPerClient,
                window: Window { count: 60, window_seconds: 60 },
                retry_after: Duration::from_secs(9),
            })),
            other => other.answer().map_err(TakeError::Store),
        }
    }
    async fn give_back(&self, _: &AppId, _: Taken) {}
    async fn is_known(&self, _: &AppId, _: &AccountKey, _: ClientAddress) -> Result<bool, StoreError> {
        match self {
            Self::Limited | Self::Busy => Ok(false),
            other => other.answer(),
        }
    }
    async fn remember(&self, _: &AppId, _: &AccountKey, _: ClientAddress) {}
}

impl Hasher for Failing {
    fn admit(&self, _: &App, _: ClientAddress) -> Result<(), Busy> {
        Ok(())
    }
    async fn hash(&self, _: &App, _: ClientAddress, _: &Password) -> Result<PasswordHash, Busy> {
        Err(BUSY)
    }
    async fn verify(&self, _: &App, _: ClientAddress, _: &Password, _: Option<&PasswordHash>) -> Result<bool, Busy> {
        Err(BUSY)
    }
    fn is_outdated(&self, _: &PasswordHash) -> bool {
        false
    }
    async fn strong_enough(&self, _: &App, _: ClientAddress, _: &Password, _: Vec<String>) -> Result<bool, Busy> {
        Err(BUSY)
    }
}

impl Audit for Failing {
    async fn record(&self, _: &AppId, _: Event) {}
    fn record_later(&self, _: &AppId, _: Event) {}
    fn refuse(&self, _: &AppId, _: Refusal) {}
    async fn activity(&self, _: &AppId, _: UserId, _: OffsetDateTime) -> Result<Vec<Activity>, StoreError> {
        self.answer()
    }
}

/// Everything behind the listeners.
struct House {
    state: Arc<State<Failing>>,
    registry: Registry,
    metrics: HttpMetrics,
    budgets: Arc<Budgets>,
    drain: Drain,
    times: Times,
}

struct Reply {
    status: u16,
    headers: BTreeMap<String, String>,
    body: String,
}

impl House {
    fn new(stores: Failing) -> Self {
        Self::with(stores, |_| {})
    }

    fn with(stores: Failing, edit: impl FnOnce(&mut RenderedApp)) -> Self {
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
        let mut registry = Registry::default();
        let metrics = HttpMetrics::register(&mut registry);
        Self {
            state: Arc::new(State {
                apps: Arc::new(apps),
                stores,
                env: Env::system(),
                settings,
                callers: Callers::Nobody,
                gate: Gate::default(),
            }),
            registry,
            metrics,
            budgets: Budgets::new(256 << 20, 256),
            drain: Drain::new(Duration::ZERO, Duration::from_secs(5)),
            times: Times { linger: Duration::from_millis(200), ..Times::DEFAULT },
        }
    }

    fn public(&self) -> Service {
        public_service(Arc::clone(&self.state), self.metrics.clone(), Arc::clone(&self.budgets)).with_times(self.times)
    }

    fn serving<E: Endpoints>(&self, endpoints: E) -> Service {
        let (state, metrics) = (Arc::clone(&self.state), self.metrics.clone());
        Service::new(endpoints, state, metrics, Arc::clone(&self.budgets), self.budgets.public_connections())
            .with_times(self.times)
    }

    /// The client's end of a connection.
    fn connect(&self, service: Service) -> DuplexStream {
        self.connect_from(service, 1)
    }

    /// The same from the address 192.0.2.`last`.
    fn connect_from(&self, service: Service, last: u8) -> DuplexStream {
        let (client, server) = duplex(1 << 20);
        let peer = IpAddr::from([192, 0, 2, last]);
        let drain = self.drain.clone();
        tokio::spawn(async move {
            let place = service.admit(service.free_place().await, peer).expect("a place for one connection");
            connection(builder(), server, peer, place, service, drain).await;
        });
        client
    }

    async fn ask(&self, request: impl AsRef<[u8]>) -> Reply {
        ask(self.connect(self.public()), request.as_ref()).await
    }

    async fn post(&self, path: &str, headers: &str, body: &str) -> Reply {
        let length = body.len();
        self.ask(format!(
            "POST {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n\
             Content-Length: {length}\r\n{headers}\r\n{body}"
        ))
        .await
    }
}

/// Sends octets and reads until the server ends the connection.
async fn ask(mut client: DuplexStream, request: &[u8]) -> Reply {
    client.write_all(request).await.unwrap();
    let mut reply = Vec::new();
    timeout(Duration::from_secs(20), client.read_to_end(&mut reply)).await.expect("an end in time").unwrap();
    Reply::parse(&reply)
}

impl Reply {
    fn parse(octets: &[u8]) -> Self {
        let text = std::str::from_utf8(octets).unwrap();
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

    /// An error in its one shape, with the headers that all errors carry.
    #[track_caller]
    fn refused(&self, status: u16, code: &str) -> Value {
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

fn get(path: &str, headers: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{headers}\r\n")
}

const EMAIL_ENDPOINTS: [(&str, &str); 5] = [
    ("login", r#"{"email": "ada@example.com", "password": "correct horse"}"#),
    ("register", r#"{"name": "Ada", "email": "ada@example.com", "password": "correct horse"}"#),
    ("confirm", r#"{"code": "ABCDE-FGHJK"}"#),
    ("forgot-password", r#"{"email": "ada@example.com"}"#),
    ("confirm-password", r#"{"email": "ada@example.com", "code": "ABCDE-FGHJK", "password": "correct horse"}"#),
];

#[tokio::test]
async fn what_is_not_there_is_told_apart() {
    let house = House::new(Failing::Panicking);
    for path in ["/", "/nothing", "/v1/shop/email/login/", "/v1/shop/nothing", "/shop/nothing"] {
        house.ask(get(path, "")).await.refused(404, "not_found");
    }
    house.post("/v1/nobody/email/login", "", "{}").await.refused(404, "app_not_found");
    house.post("/v1/sh%6Fp/email/login", "", "{}").await.refused(404, "app_not_found");
    house.ask(get("/nobody/.well-known/jwks.json", "")).await.refused(404, "app_not_found");
    let admin = admin_service(Arc::clone(&house.state), house.metrics.clone(), Arc::clone(&house.budgets));
    ask(house.connect(admin), get("/users", "").as_bytes()).await.refused(404, "not_found");
}

#[tokio::test]
async fn a_wrong_method_is_told_the_right_ones() {
    let house = House::new(Failing::Panicking);
    let reply = house.ask(get("/v1/shop/email/login", "")).await;
    reply.refused(405, "method_not_allowed");
    assert_eq!(reply.header("allow"), Some("POST, OPTIONS"));
    let reply = house.post("/shop/.well-known/jwks.json", "", "{}").await;
    reply.refused(405, "method_not_allowed");
    assert_eq!(reply.header("allow"), Some("GET, HEAD, OPTIONS"));
}

#[tokio::test]
async fn head_is_get_without_the_body() {
    let house = House::new(Failing::Panicking);
    let got = house.ask(get("/shop/.well-known/jwks.json", "")).await;
    let head = house.ask(get("/shop/.well-known/jwks.json", "").replacen("GET", "HEAD", 1)).await;
    assert_eq!((head.status, head.body.as_str()), (200, ""));
    for same in ["content-length", "etag", "content-type", "cache-control"] {
        assert_eq!(head.header(same), got.header(same), "{same}");
    }
    assert_eq!(got.header("content-length"), Some(got.body.len().to_string().as_str()));
}

#[tokio::test]
async fn public_documents_may_be_kept_and_asked_for_again() {
    let house = House::new(Failing::Panicking);
    for path in [
        "/shop/.well-known/jwks.json",
        "/shop/.well-known/openid-configuration",
        "/.well-known/oauth-authorization-server/shop",
        "/shop/.well-known/oauth-authorization-server",
        "/openapi.json",
    ] {
        let reply = house.ask(get(path, "")).await;
        assert_eq!(reply.status, 200, "{path}");
        assert_eq!(reply.header("cache-control"), Some("public, max-age=300"));
        assert_eq!(reply.header("x-content-type-options"), Some("nosniff"));
        let again = house.ask(get(path, &format!("If-None-Match: {}\r\n", reply.header("etag").unwrap()))).await;
        assert_eq!((again.status, again.body.as_str()), (304, ""), "{path}");
        assert_eq!(again.header("etag"), reply.header("etag"));
    }
    let keys = house.ask(get("/shop/.well-known/jwks.json", "")).await.json();
    assert_eq!(keys["keys"][0]["kid"], "s1");
    assert_eq!(keys["keys"][0]["alg"], "ES256");
    assert!(keys["keys"][0].get("d").is_none(), "the private part stays");
    assert_eq!(
        house.ask(get("/shop/.well-known/openid-configuration", "")).await.json(),
        json!({
            "issuer": "https://auth.example.com/shop",
            "jwks_uri": "https://auth.example.com/shop/.well-known/jwks.json",
            "token_endpoint": "https://auth.example.com/v1/shop/token",
            "revocation_endpoint": "https://auth.example.com/v1/shop/revoke",
            "introspection_endpoint": "https://auth.example.com/v1/shop/introspect",
            "userinfo_endpoint": "https://auth.example.com/v1/shop/userinfo",
            "response_types_supported": ["none"],
            "grant_types_supported": ["authorization_code", "refresh_token"],
            "code_challenge_methods_supported": ["S256"],
            "token_endpoint_auth_methods_supported": ["none"],
            "revocation_endpoint_auth_methods_supported": ["none"],
            "introspection_endpoint_auth_methods_supported": ["Bearer"],
            "subject_types_supported": ["public"],
            "id_token_signing_alg_values_supported": ["ES256"],
            "claims_supported": [
                "iss", "aud", "sub", "client_id", "iat", "exp", "jti", "sid", "auth_time", "amr", "email",
                "email_verified", "name", "updated_at",
            ],
        })
    );
}

#[tokio::test]
async fn bad_bodies_are_refused_before_anything_is_asked() {
    let house = House::new(Failing::Panicking);
    let login = "/v1/shop/email/login";
    let typed = |kind: &str| {
        format!("POST {login} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{kind}Content-Length: 2\r\n\r\n{{}}")
    };
    house.ask(typed("")).await.refused(415, "unsupported_media_type");
    house.ask(typed("Content-Type: text/plain\r\n")).await.refused(415, "unsupported_media_type");
    house
        .ask(typed("Content-Type: application/json\r\nContent-Encoding: gzip\r\n"))
        .await
        .refused(415, "unsupported_media_type");
    house.post(login, "", "").await.refused(400, "invalid_request");
    house.post(login, "", "{").await.refused(400, "invalid_request");
    let body = house.post(login, "", r#"{"email": "ada", "name": 1}"#).await.refused(400, "invalid_request");
    assert_eq!(
        body["fields"],
        json!([
            { "field": "email", "code": "invalid", "message": "is not an email address" },
            { "field": "password", "code": "missing", "message": "is missing" },
        ])
    );
    assert_eq!(body["error_description"], "email is not an email address; password is missing");
}

#[tokio::test]
async fn a_body_is_bounded_as_declared_and_as_sent() {
    let house = House::new(Failing::Panicking);
    let head = "POST /v1/shop/email/login HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n";
    // Refused at once: the body never comes.
    let reply = house.ask(format!("{head}Content-Length: 65537\r\n\r\n")).await;
    reply.refused(413, "payload_too_large");
    assert_eq!(reply.header("connection"), Some("close"));
    let chunk = format!("8000\r\n{}\r\n", " ".repeat(0x8000));
    house
        .ask(format!("{head}Transfer-Encoding: chunked\r\n\r\n{chunk}{chunk}{chunk}0\r\n\r\n"))
        .await
        .refused(413, "payload_too_large");
    // At the bound it is read, and is no JSON.
    let reply = house.post("/v1/shop/email/login", "", &" ".repeat(65_536)).await;
    reply.refused(400, "invalid_request");
}

/// Waits until something is so.
async fn until(what: &str, is_so: impl Fn() -> bool) {
    let soon = async {
        while !is_so() {
            tokio::task::yield_now().await;
        }
    };
    timeout(Duration::from_secs(20), soon).await.unwrap_or_else(|_| panic!("{what}, in time"));
}

/// Sends what is not a whole request, until the server holds memory for it, or refuses it. Returns which.
async fn is_refused(house: &House, client: &mut DuplexStream, octets: &[u8]) -> bool {
    let before = house.budgets.request_bytes().used();
    client.write_all(octets).await.unwrap();
    let mut reply = vec![0; 4096];
    let held = until("it is held", || house.budgets.request_bytes().used() != before);
    tokio::select! {
        biased;
        read = client.read(&mut reply) => {
            let reply = Reply::parse(&reply[..read.unwrap()]);
            reply.refused(503, "temporarily_unavailable");
            assert_eq!((reply.header("connection"), reply.header("retry-after")), (Some("close"), Some("5")));
            true
        }
        () = held => false,
    }
}

const STALLED_BODY: &[u8] = b"POST /v1/shop/email/login HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n\
                              Content-Length: 65536\r\n\r\n{";

#[tokio::test]
async fn bodies_that_do_not_fit_the_budget_are_refused_before_they_are_read() {
    let mut house = House::new(Failing::Busy);
    house.times.body = Duration::from_secs(600);
    let service = house.public();
    let mut refused = 0;
    let mut stalled = Vec::new();
    // Twelve clients, whose bodies do not fit the budget of 16 MiB.
    for number in 0..700_u32 {
        let mut client = house.connect_from(service.clone(), (number % 12) as u8 + 10);
        refused += usize::from(is_refused(&house, &mut client, STALLED_BODY).await);
        stalled.push(client);
    }
    // 56 KiB and the head of each are counted; 8 KiB are paid for by the connection.
    let held = house.budgets.request_bytes().used();
    assert!((15 << 20..=16 << 20).contains(&held), "{held} bytes");
    assert_eq!(refused, 700 - 291);

    // An ordinary login goes on, from any of the addresses.
    for last in [1, 10] {
        let reply = ask(house.connect_from(house.public(), last), login().as_bytes()).await;
        assert_eq!(reply.header("retry-after"), Some("3"), "as far as the hashing queue: {}", reply.body);
        let document = ask(house.connect_from(house.public(), last), get("/openapi.json", "").as_bytes()).await;
        assert_eq!(document.status, 200);
    }
    // Who hangs up gives back what was held.
    drop(stalled);
    until("nothing is held", || house.budgets.request_bytes().used() == 0).await;
}

#[tokio::test]
async fn one_client_cannot_use_the_budget_up() {
    let mut house = House::new(Failing::Broken);
    house.times.body = Duration::from_secs(600);
    let service = house.public();
    let mut stalled = Vec::new();
    let mut refused = 0;
    for _ in 0..100 {
        let mut client = house.connect(service.clone());
        refused += usize::from(is_refused(&house, &mut client, STALLED_BODY).await);
        stalled.push(client);
    }
    let held = house.budgets.request_bytes().used();
    assert!(held <= 2 << 20, "an eighth of 16 MiB: {held}");
    assert_eq!(refused, 100 - 36);
    let large = " ".repeat(65_536);
    let request = format!(
        "POST /v1/shop/email/login HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: 65536\r\n\r\n{large}"
    );
    ask(house.connect_from(house.public(), 2), request.as_bytes()).await.refused(400, "invalid_request");
}

#[tokio::test]
async fn a_body_of_unknown_length_is_counted_as_it_comes() {
    let house = House::new(Failing::Broken);
    let head = "POST /v1/shop/email/login HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n\
                Transfer-Encoding: chunked\r\n\r\n";
    let chunk = format!("2000\r\n{}\r\n", " ".repeat(0x2000));
    let mut client = house.connect(house.public());
    client.write_all(head.as_bytes()).await.unwrap();
    let used = || house.budgets.request_bytes().used();
    for step in [0, 4 << 10, 20 << 10, 20 << 10, 52 << 10, 52 << 10, 52 << 10] {
        client.write_all(chunk.as_bytes()).await.unwrap();
        until("the body is counted", || used() > step).await;
        assert!(used() <= 64 << 10);
    }
    // Nothing is left for the rest of another one.
    let _all = house.budgets.request_bytes().try_acquire(None, (16 << 20) - used()).unwrap();
    let mut other = house.connect_from(house.public(), 2);
    other.write_all(format!("{head}{chunk}{chunk}").as_bytes()).await.unwrap();
    let mut reply = Vec::new();
    timeout(Duration::from_secs(20), other.read_to_end(&mut reply)).await.expect("an end in time").unwrap();
    Reply::parse(&reply).refused(503, "temporarily_unavailable");
}

#[tokio::test]
async fn large_heads_that_do_not_fit_the_budget_are_refused_while_they_come() {
    let mut house = House::new(Failing::Panicking);
    house.times.head = Duration::from_secs(600);
    let half = format!("GET /openapi.json HTTP/1.1\r\nX-Filler: {}", "x".repeat(20_000));
    let service = house.public();
    let mut clients = Vec::new();
    let mut refused = 0;
    for number in 0..700_u32 {
        let mut client = house.connect_from(service.clone(), (number % 250) as u8 + 1);
        refused += usize::from(is_refused(&house, &mut client, half.as_bytes()).await);
        clients.push(client);
    }
    // 56 KiB for each: the buffer grows to twice the bound of a head, less what every connection has.
    assert_eq!(refused, 700 - 292);
    assert!(house.budgets.request_bytes().used() <= 16 << 20);
    // A small one is read.
    assert_eq!(house.ask(get("/openapi.json", "")).await.status, 200);
    drop(clients);
    until("nothing is held", || house.budgets.request_bytes().used() == 0).await;
}

#[tokio::test]
async fn a_body_that_does_not_come_is_given_up() {
    let mut house = House::new(Failing::Panicking);
    house.times.body = Duration::from_millis(30);
    let reply = house
        .ask(
            "POST /v1/shop/email/login HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n\
             Content-Length: 100\r\n\r\n{\"email\"",
        )
        .await;
    reply.refused(408, "invalid_request");
    assert_eq!(reply.header("connection"), Some("close"));
}

#[tokio::test]
async fn headers_that_do_not_come_are_given_up() {
    let mut house = House::new(Failing::Panicking);
    house.times.head = Duration::from_millis(30);
    let reply = house.ask("GET /openapi.json HTTP/1.1\r\nHost: a\r\n").await;
    reply.refused(408, "invalid_request");
    assert_eq!(reply.header("connection"), Some("close"));

    // The same for a further request, after an answer to the first.
    let mut client = house.connect(house.public());
    client.write_all(b"GET /v1 HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    let mut first = [0; 16];
    client.read_exact(&mut first).await.unwrap();
    client.write_all(b"GET /v1 HTTP/1.1\r\n").await.unwrap();
    let mut rest = String::new();
    timeout(Duration::from_secs(20), client.read_to_string(&mut rest)).await.unwrap().unwrap();
    assert!(first.starts_with(b"HTTP/1.1 404"));
    assert!(rest.contains("HTTP/1.1 408"), "{rest}");

    // Who says nothing, or does not get past the preface of HTTP/2, is told nothing.
    for silent in ["", "PRI * HTTP/2.0\r\n"] {
        let mut client = house.connect(house.public());
        client.write_all(silent.as_bytes()).await.unwrap();
        let mut reply = Vec::new();
        timeout(Duration::from_secs(20), client.read_to_end(&mut reply)).await.unwrap().unwrap();
        assert!(reply.is_empty(), "{silent:?}");
    }
}

#[tokio::test]
async fn a_connection_without_requests_is_closed_quietly() {
    let mut house = House::new(Failing::Panicking);
    house.times.idle = Duration::from_millis(50);
    let began = std::time::Instant::now();
    let reply = ask(house.connect(house.public()), b"GET /v1 HTTP/1.1\r\nHost: a\r\n\r\n").await;
    assert_eq!(reply.status, 404);
    assert_eq!(reply.header("connection"), None);
    assert!(reply.body.ends_with('}'), "one answer, then the end");
    assert!(began.elapsed() >= Duration::from_millis(50));
}

#[tokio::test]
async fn headers_are_bounded() {
    let house = House::new(Failing::Panicking);
    let with = |size: usize| get("/openapi.json", &format!("X-Filler: {}\r\n", "x".repeat(size)));
    assert_eq!(house.ask(with(30 * 1024)).await.status, 200);
    assert_eq!(house.ask(with(33 * 1024)).await.status, 431);
    let many: String = (0..150).map(|n| format!("X-{n}: y\r\n")).collect();
    assert_eq!(house.ask(get("/openapi.json", &many)).await.status, 431);
    // A flood is answered too, and not reset.
    assert_eq!(house.ask(with(200 * 1024)).await.status, 431);
    assert_eq!(house.ask("nonsense\r\n\r\n").await.status, 400);
}

/// Types and a flag of frames of HTTP/2 (RFC 9113, 6).
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const ACK: u8 = 1;

/// The preface and empty SETTINGS (RFC 9113, 3.4 and 6.5).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// HEADERS of a whole request: GET, http, /openapi.json, authority `a` (RFC 7541, 6.1 and 6.2.2).
fn asking_for_documents(stream: u8) -> Vec<u8> {
    let mut block = vec![0x82, 0x86, 0x04, 13];
    block.extend_from_slice(b"/openapi.json");
    block.extend_from_slice(&[0x01, 1, b'a']);
    // END_STREAM and END_HEADERS.
    [&[0, 0, block.len() as u8, HEADERS, 0x05, 0, 0, 0, stream][..], &block].concat()
}

/// The next frame; nothing at the end of the connection. Without a limit in time.
async fn frame_or_end(client: &mut DuplexStream) -> Option<(u8, u8, Vec<u8>)> {
    let mut head = [0; 9];
    client.read_exact(&mut head).await.ok()?;
    let mut payload = vec![0; usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2])];
    client.read_exact(&mut payload).await.ok()?;
    Some((head[3], head[4], payload))
}

/// A frame of HTTP/2 (RFC 9113, 4.1): its type, its flags and what it carries.
async fn frame(client: &mut DuplexStream) -> (u8, u8, Vec<u8>) {
    let mut head = [0; 9];
    timeout(Duration::from_secs(20), client.read_exact(&mut head)).await.expect("a frame in time").unwrap();
    let mut payload = vec![0; usize::from(head[1]) << 8 | usize::from(head[2])];
    client.read_exact(&mut payload).await.unwrap();
    (head[3], head[4], payload)
}

#[tokio::test]
async fn http_2_is_answered_and_told_of_the_drain() {
    let house = House::new(Failing::Panicking);
    let mut client = house.connect(house.public());
    client.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
    // GET, http, /openapi.json, authority `a` (RFC 7541, 6.1 and 6.2.2); END_STREAM and END_HEADERS on stream 1.
    let mut block = vec![0x82, 0x86, 0x04, 13];
    block.extend_from_slice(b"/openapi.json");
    block.extend_from_slice(&[0x01, 1, b'a']);
    client.write_all(&[0, 0, block.len() as u8, HEADERS, 0x05, 0, 0, 0, 1]).await.unwrap();
    client.write_all(&block).await.unwrap();
    let answer = loop {
        let (kind, _, payload) = frame(&mut client).await;
        if kind == HEADERS {
            break payload;
        }
    };
    // An index into the static table: `:status: 200`.
    assert!(answer.contains(&0x88), "{answer:?}");
    house.drain.begin();
    while frame(&mut client).await.0 != GOAWAY {}
}

/// A service that pings often and waits shortly.
fn quick(house: &mut House) {
    house.times.idle = Duration::from_millis(500);
    house.times.goaway = Duration::from_millis(200);
}

/// Answers pings until the connection ends. Returns the frames that came.
async fn pings_answered(client: &mut DuplexStream) -> Vec<u8> {
    let mut kinds = Vec::new();
    let answering = async {
        while let Some((kind, flags, payload)) = frame_or_end(client).await {
            kinds.push(kind);
            if kind == PING && flags & ACK == 0 {
                drop(client.write_all(&[&[0, 0, 8, PING, ACK, 0, 0, 0, 0][..], &payload].concat()).await);
            }
        }
    };
    timeout(Duration::from_secs(20), answering).await.expect("an end in time");
    kinds
}

#[tokio::test]
async fn an_idle_http_2_connection_ends_though_its_client_answers_pings() {
    let mut house = House::new(Failing::Panicking);
    quick(&mut house);
    for first_asks in [false, true] {
        let mut client = house.connect(house.public());
        let began = std::time::Instant::now();
        client.write_all(PREFACE).await.unwrap();
        if first_asks {
            client.write_all(&asking_for_documents(1)).await.unwrap();
        }
        let kinds = pings_answered(&mut client).await;
        assert_eq!(kinds.contains(&HEADERS), first_asks, "{kinds:?}");
        assert!(kinds.contains(&PING) && kinds.contains(&GOAWAY), "{kinds:?}");
        assert!(began.elapsed() >= Duration::from_millis(500));
    }
}

#[tokio::test]
async fn an_idle_http_2_connection_ends_though_its_client_does_not_heed_the_goaway() {
    let mut house = House::new(Failing::Panicking);
    quick(&mut house);
    let mut client = house.connect(house.public());
    client.write_all(PREFACE).await.unwrap();
    // Nothing is answered, no ping either.
    let mut all = Vec::new();
    timeout(Duration::from_secs(20), client.read_to_end(&mut all)).await.expect("an end in time").unwrap();
}

#[tokio::test]
async fn an_http_2_client_that_takes_no_answer_does_not_stay() {
    let mut house = House::new(Failing::Panicking);
    quick(&mut house);
    let mut client = house.connect(house.public());
    client.write_all(PREFACE).await.unwrap();
    // SETTINGS_INITIAL_WINDOW_SIZE is 0: no byte of a body can be sent.
    client.write_all(&[0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0]).await.unwrap();
    client.write_all(&asking_for_documents(1)).await.unwrap();
    let kinds = pings_answered(&mut client).await;
    assert!(kinds.contains(&HEADERS) && !kinds.contains(&DATA), "{kinds:?}");
}

#[tokio::test(start_paused = true)]
async fn an_http_2_connection_stays_while_a_request_is_answered() {
    let mut house = House::new(Failing::Panicking);
    quick(&mut house);
    let slow = Slow::default();
    let mut client = house.connect(house.serving(slow.clone()));
    client.write_all(PREFACE).await.unwrap();
    client.write_all(&asking_for_documents(1)).await.unwrap();
    soon(&slow.began).await;
    // Longer than an idle connection stays.
    tokio::time::sleep(Duration::from_millis(1200)).await;
    slow.may_end.notify_one();
    let kinds = pings_answered(&mut client).await;
    let answered = kinds.iter().position(|kind| *kind == HEADERS).expect("an answer");
    let goaway = kinds.iter().position(|kind| *kind == GOAWAY).expect("an end");
    assert!(answered < goaway, "{kinds:?}");
}

#[tokio::test]
async fn http_2_is_spoken_in_clear() {
    let house = House::new(Failing::Panicking);
    let mut client = house.connect(house.public());
    // The preface and empty SETTINGS (RFC 9113, 3.4 and 6.5).
    client.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
    let mut frame = [0; 9];
    timeout(Duration::from_secs(20), client.read_exact(&mut frame)).await.unwrap().unwrap();
    assert_eq!(frame[3], 4, "SETTINGS");
}

#[tokio::test]
async fn a_request_id_is_kept_where_it_has_the_form_of_one() {
    let house = House::new(Failing::Panicking);
    let id = async |sent: &str| house.ask(get("/", sent)).await.header("x-request-id").unwrap().to_owned();
    assert_eq!(id("X-Request-Id: Trace.1_2-3\r\n").await, "Trace.1_2-3");
    assert_eq!(id(&format!("X-Request-Id: {}\r\n", "a".repeat(128))).await, "a".repeat(128));
    let too_long = format!("X-Request-Id: {}\r\n", "a".repeat(129));
    for bad in ["", "X-Request-Id: a b\r\n", "X-Request-Id: \r\n", "X-Request-Id: a\r\nX-Request-Id: b\r\n", &too_long]
    {
        let made = Uuid::parse_str(&id(bad).await).unwrap();
        assert_eq!(made.get_version_num(), 7, "{bad}");
    }
}

#[tokio::test]
async fn a_store_that_is_away_is_503_everywhere() {
    let house = House::new(Failing::Away);
    for (operation, body) in EMAIL_ENDPOINTS {
        let reply = house.post(&format!("/v1/shop/email/{operation}"), "", body).await;
        reply.refused(503, "temporarily_unavailable");
        assert_eq!(reply.header("retry-after"), Some("5"), "{operation}");
        assert!(!reply.body.contains("secret-host"), "{operation}");
    }
}

#[tokio::test]
async fn our_own_faults_are_500_and_tell_nothing() {
    for stores in [Failing::Broken, Failing::Panicking] {
        let house = House::new(stores);
        for (operation, body) in EMAIL_ENDPOINTS {
            let reply = house.post(&format!("/v1/shop/email/{operation}"), "", body).await;
            reply.refused(500, "server_error");
            assert!(!reply.body.contains("secret-host") && !reply.body.contains("panics"), "{operation}");
        }
    }
}

#[tokio::test]
async fn a_limit_that_is_reached_says_when_to_come_again() {
    let house = House::new(Failing::Limited);
    for (operation, body) in EMAIL_ENDPOINTS {
        if operation == "forgot-password" {
            // Only its mail is limited, which the answer does not tell.
            continue;
        }
        let reply = house.post(&format!("/v1/shop/email/{operation}"), "", body).await;
        reply.refused(429, "rate_limited");
        assert_eq!(reply.header("retry-after"), Some("9"), "{operation}");
        assert_eq!(reply.header("ratelimit-policy"), Some("\"loginsPerClient\";q=60;w=60"));
        assert_eq!(reply.header("ratelimit"), Some("\"loginsPerClient\";r=0;t=9"));
    }
}

#[tokio::test]
async fn hashing_at_capacity_is_503() {
    let house = House::new(Failing::Busy);
    for (operation, body) in [EMAIL_ENDPOINTS[0], EMAIL_ENDPOINTS[1], EMAIL_ENDPOINTS[4]] {
        let reply = house.post(&format!("/v1/shop/email/{operation}"), "", body).await;
        reply.refused(503, "temporarily_unavailable");
        assert_eq!(reply.header("retry-after"), Some("3"), "{operation}");
    }
}

fn login() -> String {
    let (_, body) = EMAIL_ENDPOINTS[0];
    let length = body.len();
    format!(
        "POST /v1/shop/email/login HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {length}\r\n\r\n{body}"
    )
}

/// How long a login waits for its refusal.
async fn refused_login(house: &House, last: u8) -> Duration {
    let began = tokio::time::Instant::now();
    let reply = ask(house.connect_from(house.public(), last), login().as_bytes()).await;
    assert!(matches!(reply.status, 429 | 503), "{}", reply.status);
    assert!(reply.header("retry-after").is_some());
    began.elapsed()
}

/// As if the client 192.0.2.`last` had come back early so often.
fn came_back_early(house: &House, last: u8, returns: u32) {
    let client = ClientAddress::of([192, 0, 2, last].into());
    let mut now = tokio::time::Instant::now();
    for _ in 0..=returns {
        house.budgets.refusals().hold(client, now, now, Duration::from_secs(5));
        now += Duration::from_secs(4);
    }
}

#[tokio::test]
async fn a_client_that_ignores_retry_after_waits_for_its_refusals() {
    for stores in [Failing::Busy, Failing::Limited, Failing::Away] {
        let house = House::new(stores);
        for _ in 0..4 {
            refused_login(&house, 1).await;
        }
        assert_eq!(house.budgets.refusals().held(), 0);
        came_back_early(&house, 2, 5);
        assert!(refused_login(&house, 2).await >= Duration::from_secs(1));
        // What is held costs a place for as long.
        assert_eq!(house.budgets.refusals().held(), 0);
    }
}

/// An App whose logins with GitHub lead to its own page.
fn with_github(document: &mut RenderedApp) {
    document.redirect_urls = vec!["https://shop.example.com/done".parse().unwrap()];
    let settings = json!({ "preset": "github", "clientID": "x", "secret": "s" });
    let provider = json!({ "name": "github", "resource": "github", "linkByEmail": false, "settings": settings });
    document.providers = vec![serde_json::from_value(provider).unwrap()];
}

/// A callback of a flow that has begun.
async fn github_callback() -> String {
    let begun = House::with(Failing::Busy, with_github).ask(get("/shop/github/redirect", "")).await;
    assert_eq!(begun.status, 302, "{}", begun.body);
    let (_, state) = begun.header("location").unwrap().split_once("state=").unwrap();
    let (cookie, _) = begun.header("set-cookie").unwrap().split_once(';').unwrap();
    get(&format!("/shop/github/callback?state={state}&code=c"), &format!("Cookie: {cookie}\r\n"))
}

#[tokio::test]
async fn a_callback_that_is_refused_before_its_state_is_used_waits_like_other_refusals() {
    let callback = github_callback().await;
    for (stores, error) in [(Failing::Limited, "rate_limited"), (Failing::Away, "temporarily_unavailable")] {
        let house = House::with(stores, with_github);
        let refused = async |last| {
            let began = tokio::time::Instant::now();
            let reply = ask(house.connect_from(house.public(), last), callback.as_bytes()).await;
            assert_eq!((reply.status, reply.header("set-cookie")), (302, None));
            let location = reply.header("location").unwrap();
            assert!(location.starts_with(&format!("https://shop.example.com/done?error={error}&")), "{location}");
            began.elapsed()
        };
        let before = tokio::time::Instant::now();
        refused(1).await;
        let is_logged = |_: &usize| house.budgets.refusals().is_logged("callback", http::StatusCode::FOUND, before);
        assert_eq!((0..20).filter(is_logged).count(), 9, "of ten refusals that are logged in this second");
        came_back_early(&house, 2, 5);
        assert!(refused(2).await >= Duration::from_secs(1));
    }
}

#[tokio::test(start_paused = true)]
async fn a_refusal_of_the_gate_is_sent_at_once() {
    let house = House::new(Failing::Away);
    came_back_early(&house, 1, 10);
    assert!(refused_login(&house, 1).await >= Duration::from_secs(4));
    let token = access_token(&house);
    for path in ["/v1/shop/authorize", "/v1/shop/authorize/page"] {
        let began = tokio::time::Instant::now();
        let request = get(path, &format!("Authorization: Bearer {token}\r\n"));
        let reply = ask(house.connect_from(house.public(), 1), request.as_bytes()).await;
        reply.refused(503, "temporarily_unavailable");
        assert!(began.elapsed() < Duration::from_millis(500), "{path}: {:?}", began.elapsed());
    }
}

#[tokio::test]
async fn a_drain_ends_held_refusals() {
    let house = House::new(Failing::Busy);
    came_back_early(&house, 1, 10);
    let refused = refused_login(&house, 1);
    let drained = async {
        until("it is held", || house.budgets.refusals().held() == 1).await;
        house.drain.begin();
    };
    let (waited, ()) = tokio::join!(refused, drained);
    assert!(waited < Duration::from_secs(4), "{waited:?}");
    assert_eq!(house.budgets.refusals().held(), 0);
}

#[tokio::test]
async fn verify_takes_no_data_and_wants_a_token() {
    let house = House::new(Failing::Panicking);
    let verify = "/v1/shop/email/verify";
    let bare = format!("POST {verify} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    let reply = house.ask(bare.clone()).await;
    reply.refused(401, "invalid_token");
    assert_eq!(reply.header("www-authenticate"), Some("Bearer realm=\"shop\""));
    house.post(verify, "", "").await.refused(401, "invalid_token");
    house.post(verify, "", " { } ").await.refused(401, "invalid_token");
    for data in [r#"{"email": "ada@example.com"}"#, "[]", "null", "{", " "] {
        house.post(verify, "", data).await.refused(401, "invalid_token");
    }
    let reply = house.post(verify, "Authorization: Bearer nonsense\r\n", "{}").await;
    reply.refused(401, "invalid_token");
    assert_eq!(reply.header("www-authenticate"), Some("Bearer realm=\"shop\", error=\"invalid_token\""));
}

#[tokio::test]
async fn what_the_app_forbids_is_told() {
    let closed = House::with(Failing::Panicking, |app| app.sign_up = SignUp::Closed);
    let (_, body) = EMAIL_ENDPOINTS[1];
    closed.post("/v1/shop/email/register", "", body).await.refused(403, "registration_disabled");
    let narrow =
        House::with(Failing::Panicking, |app| app.allowed_email_domains = vec!["example.org".parse().unwrap()]);
    let refused = narrow.post("/v1/shop/email/register", "", body).await.refused(400, "invalid_request");
    assert_eq!(refused["fields"][0]["field"], "email");
    assert_eq!(refused["fields"][0]["code"], "domain_not_allowed");
    let house = House::new(Failing::Busy);
    let short = r#"{"name": "Ada", "email": "ada@example.com", "password": "1234567"}"#;
    let refused = house.post("/v1/shop/email/register", "", short).await.refused(400, "weak_password");
    assert_eq!(refused["fields"][0]["field"], "password");
    assert_eq!(refused["fields"][0]["code"], "too_short");
}

fn access_token(house: &House) -> String {
    let app = house.state.apps.get("shop").unwrap();
    let id = Uuid::from_u128(7);
    let (user, epoch) = (UserId(id), Epoch(1));
    let auth_time = house.state.env.now();
    let session = Session { id: SessionId(id), user, epoch, generation: 1, amr: Amr::Password, auth_time };
    let profile = Profile { version: 1, email: None, email_verified: false, name: "Ada".to_owned() };
    token::issue(&app, &house.state.env, &profile, &session).unwrap().access_token
}

#[tokio::test]
async fn the_gate_asks_for_a_token_by_any_method_and_says_nothing_of_origins() {
    let house = House::new(Failing::Away);
    let token = access_token(&house);
    for method in ["GET", "OPTIONS", "POST", "PROPFIND"] {
        for suffix in ["", "/", "/a//b/../c"] {
            let ask = |headers: &str| {
                format!(
                    "{method} /v1/shop/authorize{suffix} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\
                     Origin: https://shop.example.com\r\nAccess-Control-Request-Method: GET\r\n{headers}\r\n"
                )
            };
            let reply = house.ask(ask("")).await;
            reply.refused(401, "invalid_token");
            assert_eq!(reply.header("www-authenticate"), Some("Bearer realm=\"shop\""));
            assert!(!reply.headers.keys().any(|name| name.starts_with("access-control") || name == "vary"));
            let reply = house.ask(ask("Authorization: Bearer a.b.c\r\n")).await;
            reply.refused(401, "invalid_token");
            let reply = house.ask(ask(&format!("Authorization: Bearer {token}\r\n"))).await;
            reply.refused(503, "temporarily_unavailable");
            assert_eq!(reply.header("retry-after"), Some("5"));
        }
    }
    house.ask(get("/v1/nobody/authorize", "")).await.refused(404, "app_not_found");
}

/// Whether a call needs a token, as the OpenAPI document says.
fn needs_token(document: &Value, route: Route) -> bool {
    let method = match route.verb() {
        Verb::Get | Verb::GetOnly | Verb::Any => "get",
        Verb::Post => "post",
        Verb::Patch => "patch",
        Verb::Delete => "delete",
    };
    let security = document["paths"][route.template()][method]["security"].as_array();
    let ways = security.unwrap_or_else(|| panic!("{} has no `security`", route.name()));
    !ways.is_empty() && ways.iter().all(|way| way.as_object().is_some_and(|way| !way.is_empty()))
}

/// Bodies and headers that are refused where a call reads them; the last two never become whole.
const UNREADABLE_BODIES: [&str; 7] = [
    "Content-Type: application/json\r\nContent-Length: 1\r\n\r\n{",
    "Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
    "Content-Type: application/json\r\nContent-Length: 10\r\n\r\n{\"name\": 5}",
    "Content-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}",
    "Content-Length: 0\r\n\r\n",
    "Content-Type: application/json\r\nContent-Length: 65537\r\n\r\n{",
    "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n8\r\n{\"name\":\r\n",
];

/// The stores panic, so nothing was asked of them. No body is waited for: its time is longer than the test waits.
#[tokio::test]
async fn a_call_that_needs_a_token_is_401_without_one_whatever_its_body_and_parameters() {
    let mut house = House::new(Failing::Panicking);
    house.times.body = Duration::from_secs(600);
    house.times.linger = Duration::from_millis(5);
    let document = openapi::document(&house.state.settings.base_url);
    let mut seen = 0;
    for route in Route::ALL.iter().copied() {
        let path = route.template().replace("{APPID}", "shop").replace("{PROVIDER}", "nobody");
        let path = path.replace("{SESSION}", "%00not-an-id").replace("{SUFFIX}", "a/b");
        let method = match route.verb() {
            Verb::Get | Verb::GetOnly => "GET",
            Verb::Post | Verb::Any => "POST",
            Verb::Patch => "PATCH",
            Verb::Delete => "DELETE",
        };
        let head = format!("{method} {path}?x=%ff HTTP/1.1\r\nHost: a\r\nConnection: close\r\n");
        if !needs_token(&document, route) {
            let reply = house.ask(format!("{head}Content-Length: 0\r\n\r\n")).await;
            assert_ne!(reply.status, 401, "{} needs a token, and its document does not say so", route.name());
            continue;
        }
        seen += 1;
        let code = if route == Route::Introspect { "invalid_client" } else { "invalid_token" };
        for (token, challenge) in [
            ("", "Bearer realm=\"shop\""),
            ("Authorization: Basic YTpi\r\n", "Bearer realm=\"shop\""),
            ("Authorization: Bearer a.b.c\r\n", "Bearer realm=\"shop\", error=\"invalid_token\""),
        ] {
            for body in UNREADABLE_BODIES {
                let reply = house.ask(format!("{head}{token}{body}")).await;
                reply.refused(401, code);
                assert_eq!(reply.header("www-authenticate"), Some(challenge), "{} {body:?}", route.name());
            }
        }
    }
    assert!(seen >= 15, "only {seen} calls need a token");
}

#[tokio::test]
async fn introspection_asks_who_calls_before_anything_else() {
    let house = House::new(Failing::Panicking);
    for authorization in ["", "Authorization: Bearer a.b.c\r\n", "Authorization: Basic YTpi\r\n"] {
        for body in ["", "nonsense", r#"{"token": "a.b.c"}"#] {
            let reply = house.post("/v1/shop/introspect", authorization, body).await;
            reply.refused(401, "invalid_client");
            assert!(reply.header("www-authenticate").unwrap().starts_with("Bearer realm=\"shop\""));
        }
    }
}

#[tokio::test]
async fn cors_follows_the_apps_list() {
    let house = House::new(Failing::Away);
    let preflight = |origin: &str, path: &str| {
        format!(
            "OPTIONS {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nOrigin: {origin}\r\n\
             Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: content-type\r\n\r\n"
        )
    };
    let login = "/v1/shop/email/login";
    let reply = house.ask(preflight("https://shop.example.com", login)).await;
    assert_eq!(reply.status, 204);
    assert_eq!(reply.header("access-control-allow-origin"), Some("https://shop.example.com"));
    assert_eq!(reply.header("access-control-allow-credentials"), Some("true"));
    assert_eq!(reply.header("access-control-allow-methods"), Some("POST, OPTIONS"));
    let reply = house.ask(preflight("https://evil.example", login)).await;
    assert_eq!(reply.status, 204);
    assert!(!reply.headers.keys().any(|name| name.starts_with("access-control")), "{:?}", reply.headers);
    house.ask(preflight("https://shop.example.com", "/v1/nobody/email/login")).await.refused(404, "app_not_found");

    // Errors too: the app's page must be able to read them.
    let (_, body) = EMAIL_ENDPOINTS[0];
    for (body, status) in [(body, 503), ("{}", 400)] {
        let reply = house.post(login, "Origin: https://shop.example.com\r\n", body).await;
        assert_eq!(reply.status, status);
        assert_eq!(reply.header("access-control-allow-origin"), Some("https://shop.example.com"));
        assert_eq!(reply.header("vary"), Some("Origin"));
        // An origin that is not listed is no reason to refuse: no cookie takes part.
        let reply = house.post(login, "Origin: https://evil.example\r\n", body).await;
        assert_eq!(reply.status, status);
        assert_eq!(reply.header("access-control-allow-origin"), None);
        assert_eq!(reply.header("vary"), Some("Origin"));
    }
    let reply = house.ask(get("/openapi.json", "Origin: https://shop.example.com\r\n")).await;
    assert_eq!(reply.header("access-control-allow-origin"), None);
}

#[tokio::test]
async fn metrics_name_routes_and_never_paths() {
    let house = House::new(Failing::Away);
    house.ask(get("/secret-path?code=ABCDE", "")).await;
    house.ask(get("/shop/.well-known/jwks.json", "")).await;
    house.ask(get("/shop/.well-known/jwks.json", "").replacen("GET", "MADEUP", 1)).await;
    let mut page = String::new();
    text::encode(&mut page, &house.registry).unwrap();
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
async fn operations_are_told_what_is_missing() {
    let mut house = House::new(Failing::Panicking);
    let readiness = Arc::new(Readiness::default());
    let registry = Arc::new(std::mem::take(&mut house.registry));
    let ops = ops_service(
        Arc::clone(&house.state),
        house.metrics.clone(),
        Arc::clone(&house.budgets),
        registry,
        Arc::clone(&readiness),
        Arc::default(),
        &house.drain,
    );
    let asked = async |path: &str| ask(house.connect(ops.clone()), get(path, "").as_bytes()).await;
    assert_eq!(asked("/livez").await.status, 200);
    let reply = asked("/readyz").await;
    assert_eq!(reply.status, 503);
    assert_eq!(reply.json()["missing"].as_array().unwrap().len(), 2);
    readiness.configuration_loaded();
    readiness.schema_refused("the schema is at 3, this server needs 4: run `latchkey-server migrate`");
    let reply = asked("/readyz").await;
    assert_eq!(
        reply.json(),
        json!({
            "ready": false,
            "missing": ["schema: the schema is at 3, this server needs 4: run `latchkey-server migrate`"],
        })
    );
    readiness.schema_seen();
    assert_eq!(asked("/readyz").await.status, 200);
    readiness.drain();
    assert_eq!(asked("/readyz").await.status, 503);
    assert!(asked("/metrics").await.body.ends_with("# EOF\n"));
    ask(house.connect(ops.clone()), get("/livez", "").replacen("GET", "POST", 1).as_bytes())
        .await
        .refused(405, "method_not_allowed");
}

#[tokio::test]
async fn revisions_are_told_as_they_change() {
    let mut house = House::new(Failing::Panicking);
    let registry = Arc::new(std::mem::take(&mut house.registry));
    let reports = Arc::new(Reports::default());
    let provider = ("shop".to_owned(), "github".to_owned());
    reports.tell(&provider, Reason::Reachable);
    let ops = ops_service(
        Arc::clone(&house.state),
        house.metrics.clone(),
        Arc::clone(&house.budgets),
        registry,
        Arc::new(Readiness::default()),
        Arc::clone(&reports),
        &house.drain,
    );
    let mut client = house.connect(ops);
    client.write_all(get("/revisions", "").as_bytes()).await.unwrap();
    let mut told = String::new();
    async fn read_until(client: &mut DuplexStream, told: &mut String, what: &str) {
        let mut buffer = [0; 4096];
        while !told.contains(what) {
            let read = timeout(Duration::from_secs(20), client.read(&mut buffer)).await.expect("a line in time");
            let read = read.unwrap();
            assert!(read > 0, "{what} in {told}");
            told.push_str(std::str::from_utf8(&buffer[..read]).unwrap());
        }
    }
    read_until(&mut client, &mut told, r#"{"hello":{"podUID":"pod-1","format":1,"revisions":{"shop":""#).await;
    read_until(&mut client, &mut told, r#"{"provider":{"namespace":"shop","name":"github","reason":"Reachable"}}"#)
        .await;
    reports.tell(&provider, Reason::ClientRefused);
    read_until(&mut client, &mut told, r#""reason":"ClientRefused"}}"#).await;
    house.state.apps.remove(&"shop".parse().unwrap());
    read_until(&mut client, &mut told, r#"{"app":"shop","revision":null}"#).await;
    read_until(&mut client, &mut told, r#"{"heartbeat":1}"#).await;
    // It has no end of its own; a drain ends it.
    house.drain.closing().cancel();
    timeout(Duration::from_secs(20), client.read_to_string(&mut told)).await.expect("an end in time").unwrap();
    assert!(told.ends_with("0\r\n\r\n"), "ended in order: {told}");
}

#[tokio::test]
async fn a_drain_finishes_what_runs_and_closes_the_rest() {
    let house = House::new(Failing::Panicking);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let drain = Drain::new(Duration::from_millis(300), Duration::from_secs(10));
    let serving = tokio::spawn(super::serve(listener, house.public(), drain.clone()));
    let mut kept = tokio::net::TcpStream::connect(address).await.unwrap();
    let mut buffer = vec![0; 4096];
    kept.write_all(b"GET /v1 HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    let read = kept.read(&mut buffer).await.unwrap();
    assert_eq!(Reply::parse(&buffer[..read]).header("connection"), None);

    drain.begin();
    // A connection from before, and a new one: both are answered, and told to go.
    let fresh = tokio::net::TcpStream::connect(address).await.unwrap();
    for mut stream in [kept, fresh] {
        stream.write_all(b"GET /v1 HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
        let mut reply = Vec::new();
        timeout(Duration::from_secs(20), stream.read_to_end(&mut reply)).await.expect("an end in time").unwrap();
        let reply = Reply::parse(&reply);
        assert_eq!((reply.status, reply.header("connection")), (404, Some("close")));
    }
    timeout(Duration::from_secs(20), serving).await.expect("an end in time").unwrap();
    assert!(tokio::net::TcpStream::connect(address).await.is_err());
}

/// What is logged while it lives, on this thread.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Lines {
    fn write(&mut self, octets: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(octets);
        Ok(octets.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn the_log_names_the_request_and_nothing_that_was_sent() {
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt()
        .json()
        .flatten_event(true)
        .with_max_level(tracing::Level::TRACE)
        .with_writer(move || writer.clone())
        .finish();
    let _log = tracing::subscriber::set_default(subscriber);
    let house = House::new(Failing::Broken);
    let headers = "Authorization: Bearer tell-tale\r\nCookie: tell-tale\r\nX-Request-Id: the-request\r\n";
    let body = r#"{"email": "tell-tale@example.com", "password": "tell-tale", "code": "tell-tale", "x": "tell-tale"}"#;
    let requests = async || {
        for operation in ["login", "confirm", "confirm-password", "forgot-password", "verify", "register"] {
            house.post(&format!("/v1/shop/email/{operation}?code=tell-tale"), headers, body).await;
        }
        house.post("/v1/shop/email/login", headers, r#"{"tell-tale": tell-tale"#).await;
        house.post("/tell-tale", headers, "tell-tale").await;
    };
    // A log statement that another test reached first, while this subscriber was being set, is kept as one that nobody
    // wants. So all are reached once, then asked about again, and then it counts.
    requests().await;
    tracing::callsite::rebuild_interest_cache();
    lines.0.lock().unwrap().clear();
    requests().await;

    let log = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
    let ours: Vec<Value> = log
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .filter(|line| line["target"].as_str().is_some_and(|t| t == "access" || t.starts_with("latchkey")))
        .collect();
    assert!(!ours.is_empty());
    for line in &ours {
        assert!(!line.to_string().contains("tell-tale"), "{line}");
    }
    let access: Vec<_> = ours.iter().filter(|line| line["target"] == "access").collect();
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
    // The cause of a 500 stands in the log once, with the id of its request.
    let causes: Vec<_> = ours.iter().filter(|line| line["level"] == "ERROR" && line["cause"].is_string()).collect();
    assert_eq!(causes.len(), 4, "{causes:?}");
    assert_eq!(causes[0]["cause"], "postgres answered something unexpected: secret-host:5432 refused");
    assert_eq!(causes[0]["span"]["request_id"], "the-request");
}

/// A listener whose one endpoint waits until it may go on.
#[derive(Clone, Default)]
struct Slow {
    began: Arc<Notify>,
    may_end: Arc<Notify>,
    ended: Arc<Notify>,
}

impl Endpoints for Slow {
    type Route = ();

    const LISTENER: &'static str = "slow";

    fn find(&self, _: &Method, _: &str) -> Lookup<()> {
        Lookup::Route { route: (), app: None, item: None }
    }

    fn name(_: ()) -> &'static str {
        "slow"
    }

    fn is_noise(_: ()) -> bool {
        false
    }

    async fn call(&self, _: (), _: Option<Arc<App>>, _: Inbound) -> Result<Response, Problem> {
        self.began.notify_one();
        self.may_end.notified().await;
        self.ended.notify_one();
        response::json(&json!({}))
    }
}

async fn soon(what: &Notify) {
    timeout(Duration::from_secs(20), what.notified()).await.expect("it happens in time");
}

#[tokio::test]
async fn a_request_that_began_is_finished_though_its_client_hangs_up() {
    let house = House::new(Failing::Panicking);
    let slow = Slow::default();
    let mut client = house.connect(house.serving(slow.clone()));
    client.write_all(get("/", "").as_bytes()).await.unwrap();
    soon(&slow.began).await;
    drop(client);
    slow.may_end.notify_one();
    soon(&slow.ended).await;
}

#[tokio::test]
async fn a_client_that_hangs_up_keeps_its_place_while_its_requests_run() {
    let mut house = House::new(Failing::Panicking);
    house.budgets = Budgets::new(256 << 20, 5);
    let slow = Slow::default();
    let service = house.serving(slow.clone());
    let mut client = house.connect(service.clone());
    client.write_all(&[PREFACE, &asking_for_documents(1)].concat()).await.unwrap();
    soon(&slow.began).await;
    // How many more connections its address can have.
    let places = || {
        let admit = || service.admit(service.free_place().now_or_never()?, [192, 0, 2, 1].into()).ok();
        std::iter::from_fn(admit).collect::<Vec<_>>().len()
    };
    assert_eq!(places(), 0, "HTTP/2 costs five");
    drop(client);
    until("the connection is gone", || places() > 0).await;
    for _ in 0..100 {
        tokio::task::yield_now().await;
        assert_eq!(places(), 4, "its request is not");
    }
    slow.may_end.notify_one();
    until("its place is free", || places() == 5).await;
}

#[tokio::test]
async fn a_client_that_closed_its_half_gets_its_answer() {
    let house = House::new(Failing::Panicking);
    let slow = Slow::default();
    let mut client = house.connect(house.serving(slow.clone()));
    client.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    client.shutdown().await.unwrap();
    soon(&slow.began).await;
    slow.may_end.notify_one();
    let mut reply = Vec::new();
    timeout(Duration::from_secs(20), client.read_to_end(&mut reply)).await.expect("an end in time").unwrap();
    assert_eq!(Reply::parse(&reply).status, 200);
}

#[tokio::test]
async fn a_drain_waits_for_what_runs_but_not_for_ever() {
    let house = House::new(Failing::Panicking);
    for answers in [true, false] {
        let slow = Slow::default();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let limit = if answers { Duration::from_secs(20) } else { Duration::from_millis(50) };
        let drain = Drain::new(Duration::ZERO, limit);
        let service = house.serving(slow.clone());
        let serving = tokio::spawn(super::serve(listener, service, drain.clone()));
        let mut client = tokio::net::TcpStream::connect(address).await.unwrap();
        client.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
        soon(&slow.began).await;
        drain.begin();
        drain.closing().cancelled().await;
        assert!(!serving.is_finished());
        if answers {
            slow.may_end.notify_one();
        }
        let mut reply = Vec::new();
        timeout(Duration::from_secs(20), client.read_to_end(&mut reply)).await.expect("an end in time").unwrap();
        assert_eq!(!reply.is_empty(), answers);
        if answers {
            assert_eq!(Reply::parse(&reply).header("connection"), Some("close"));
        }
        timeout(Duration::from_secs(20), serving).await.expect("an end in time").unwrap();
    }
}

#[tokio::test]
async fn one_client_has_its_number_of_connections_and_others_are_served() {
    let mut house = House::new(Failing::Panicking);
    house.budgets = Budgets::new(256 << 20, 3);
    let listener = tokio::net::TcpListener::bind("0.0.0.0:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(super::serve(listener, house.public(), house.drain.clone()));
    let connect = async |last: u8| {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind((IpAddr::from([127, 0, 0, last]), 0).into()).unwrap();
        socket.connect(([127, 0, 0, 1], port).into()).await.unwrap()
    };
    let is_served = async |stream: &mut tokio::net::TcpStream| {
        drop(stream.write_all(b"GET /v1 HTTP/1.1\r\nHost: a\r\n\r\n").await);
        let mut reply = [0; 1024];
        let read = timeout(Duration::from_secs(20), stream.read(&mut reply)).await.expect("an end in time");
        read.is_ok_and(|read| reply[..read].starts_with(b"HTTP/1.1 404"))
    };
    let mut held = Vec::new();
    for _ in 0..3 {
        let mut stream = connect(2).await;
        assert!(is_served(&mut stream).await);
        held.push(stream);
    }
    assert!(!is_served(&mut connect(2).await).await, "the fourth is closed");
    assert!(is_served(&mut connect(3).await).await, "another client is served");
    let mut page = String::new();
    text::encode(&mut page, &house.registry).unwrap();
    assert!(page.contains(r#"http_connections_refused_total{listener="public",reason="client"} 1"#), "{page}");
    // One that ends makes room.
    held.clear();
    timeout(Duration::from_secs(20), async { while !is_served(&mut connect(2).await).await {} }).await.unwrap();
}

#[tokio::test]
async fn http_2_needs_places_of_its_own() {
    let mut house = House::new(Failing::Panicking);
    // HTTP/1 costs one place, HTTP/2 five.
    house.budgets = Budgets::new(256 << 20, 9);
    let service = house.public();
    let mut first = house.connect(service.clone());
    let mut second = house.connect(service);
    first.write_all(PREFACE).await.unwrap();
    assert_eq!(frame(&mut first).await.0, 4, "SETTINGS");
    second.write_all(PREFACE).await.unwrap();
    let end = timeout(Duration::from_secs(20), frame_or_end(&mut second));
    assert_eq!(end.await.expect("an end in time"), None);
}

#[tokio::test]
async fn a_refusal_arrives_though_the_body_is_still_being_sent() {
    let house = House::new(Failing::Panicking);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(super::serve(listener, house.public(), house.drain.clone()));
    let body = "x".repeat(200 * 1024);
    let request = format!(
        "POST /v1/shop/email/login HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut client = tokio::net::TcpStream::connect(address).await.unwrap();
    client.write_all(request.as_bytes()).await.unwrap();
    let mut reply = Vec::new();
    timeout(Duration::from_secs(20), client.read_to_end(&mut reply)).await.expect("an end in time").unwrap();
    Reply::parse(&reply).refused(413, "payload_too_large");
}
