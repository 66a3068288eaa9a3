//! Tests of the listeners over in-memory connections: how the request pipeline handles good and bad HTTP. The stores
//! behind it always fail, each in its own way; working stores are tested with real ones.

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
    error::Problem,
    openapi, ops_service,
    pipeline::{Endpoints, Lookup},
    public_service,
    request::InboundRequest,
    response::{self, Response},
    routes::{Route, Verb},
    serve::{connection_builder, serve_connection},
    timeouts::Timeouts,
};
use crate::{
    callers::Callers,
    config::Apps,
    domain::{
        app::App,
        audit::{ActivityEntry, Event, Refusal},
        client::ClientAddress,
        clock::Env,
        code::{CodeKey, CodeRecord},
        email::{AccountKey, Email},
        flow::{FlowBinding, FlowId, LoginCodeKey, PendingLogin, StoredLogin},
        identity::{
            AuthorizationCodeGrant, AuthorizationRequest, Identity, ProviderCapabilities, ProviderError,
            ProviderOperation, UnavailableReason, VerifiedIdentity,
        },
        mail::{EpochChange, Mail},
        password::{Overloaded, Password, PasswordHash},
        ports::{
            AccountTransfer, AcquireError, AddressChange, AddressChangeRequest, AddressChanged, AuditLog, ChangedUser,
            ClaimedRow, Codes, Confirmation, CreateUserOutcome, DeliveryOutcome, Flows, Identities, LinkOutcome,
            LinkRequest, NewFederatedUser, NewIdentity, NewUser, Outbox, OutboxBacklog, OwnAccounts, PasswordChange,
            PasswordHasher, PasswordReset, Providers, RateLimitPermit, RateLimits, Rename, Renamed, Replication,
            Sessions, StoreError, StoreFlowError, UnlinkOutcome, UnlinkRequest, UserDeletion, Users,
        },
        rate_limits::{RateLimitCheck, RateLimited},
        session::{
            Amr, LiveSession, NewSession, OpenOutcome, Profile, RefreshOutcome, RefreshRules, Session, SessionId,
            SessionInfo,
        },
        token::{self, RefreshToken},
        user::{Epoch, User, UserId},
    },
    fixtures,
    providers::ProviderReports,
    settings::Settings,
    state::State,
    token_cache::TokenCache,
};

/// How the stores fail.
#[derive(Clone, Copy)]
enum FailingStores {
    Unavailable,
    Broken,
    Limited,
    Overloaded,
    Panicking,
}

impl FailingStores {
    fn fail<T>(self) -> Result<T, StoreError> {
        let source = "secret-host:5432 refused".into();
        match self {
            Self::Unavailable | Self::Limited | Self::Overloaded => {
                Err(StoreError::Unavailable { store: "postgres", source })
            }
            Self::Broken => Err(StoreError::Unexpected { store: "postgres", source }),
            Self::Panicking => panic!("a store panics"),
        }
    }
}

const OVERLOADED: Overloaded = Overloaded { retry_after: Duration::from_millis(2_500) };

impl Users for FailingStores {
    async fn user(&self, _: &AppId, _: UserId) -> Result<Option<User>, StoreError> {
        self.fail()
    }
    async fn user_by_email(&self, _: &AppId, _: &Email) -> Result<Option<User>, StoreError> {
        match self {
            Self::Overloaded => Ok(None),
            other => other.fail(),
        }
    }
    async fn create_user(&self, _: &AppId, _: NewUser, _: Option<Mail>) -> Result<CreateUserOutcome, StoreError> {
        self.fail()
    }
    async fn record_repeated_registration(
        &self,
        _: &AppId,
        _: UserId,
        _: Epoch,
        _: bool,
        _: Option<Mail>,
        _: Event,
    ) -> Result<(), StoreError> {
        self.fail()
    }
    async fn replace_hash(&self, _: &AppId, _: UserId, _: &PasswordHash, _: PasswordHash) -> Result<(), StoreError> {
        self.fail()
    }
    async fn confirm_address(&self, _: &AppId, _: Confirmation) -> Result<Option<ChangedUser>, StoreError> {
        self.fail()
    }
    async fn reset_password(&self, _: &AppId, _: PasswordReset) -> Result<Option<ChangedUser>, StoreError> {
        self.fail()
    }
}

impl OwnAccounts for FailingStores {
    async fn user_of_session(&self, _: &AppId, _: &Session) -> Result<Option<User>, StoreError> {
        self.fail()
    }
    async fn rename(&self, _: &AppId, _: Rename) -> Result<Option<Renamed>, StoreError> {
        self.fail()
    }
    async fn remove_profile_row(&self, _: &AppId, _: Uuid) -> Result<(), StoreError> {
        self.fail()
    }
    async fn set_password(&self, _: &AppId, _: PasswordChange) -> Result<Option<User>, StoreError> {
        self.fail()
    }
    async fn request_address_change(&self, _: &AppId, _: AddressChangeRequest) -> Result<Option<User>, StoreError> {
        self.fail()
    }
    async fn change_address(&self, _: &AppId, _: AddressChange) -> Result<Option<AddressChanged>, StoreError> {
        self.fail()
    }
    async fn delete_user(&self, _: &AppId, _: UserDeletion) -> Result<Option<Epoch>, StoreError> {
        self.fail()
    }
}

impl Outbox for FailingStores {
    async fn enqueue(&self, _: &AppId, _: Mail) -> Result<(), StoreError> {
        self.fail()
    }
    async fn claim(&self, _: usize, _: usize, _: Duration) -> Result<Vec<ClaimedRow>, StoreError> {
        self.fail()
    }
    async fn finish(&self, _: &ClaimedRow, _: DeliveryOutcome) -> Result<(), StoreError> {
        self.fail()
    }
    async fn remove_epoch_row(&self, _: &AppId, _: &EpochChange) -> Result<(), StoreError> {
        self.fail()
    }
    async fn wait_for_notification(&self) {}
    async fn backlog(&self) -> Result<OutboxBacklog, StoreError> {
        self.fail()
    }
}

impl Codes for FailingStores {
    async fn store_code(&self, _: &AppId, _: &CodeKey, _: &CodeRecord) -> Result<(), StoreError> {
        self.fail()
    }
    async fn find_code(&self, _: &AppId, _: &[CodeKey]) -> Result<Option<(CodeKey, CodeRecord)>, StoreError> {
        self.fail()
    }
    async fn consume_code(&self, _: &AppId, _: &CodeKey) -> Result<Option<CodeRecord>, StoreError> {
        self.fail()
    }
}

impl Sessions for FailingStores {
    async fn open_session(&self, _: &AppId, _: &NewSession) -> Result<OpenOutcome, StoreError> {
        self.fail()
    }
    async fn session(&self, _: &AppId, _: UserId, _: SessionId) -> Result<Option<LiveSession>, StoreError> {
        self.fail()
    }
    async fn sessions(&self, _: &AppId, _: UserId) -> Result<Vec<SessionInfo>, StoreError> {
        self.fail()
    }
    async fn refresh(&self, _: &AppId, _: &RefreshToken, _: &RefreshRules) -> Result<RefreshOutcome, StoreError> {
        self.fail()
    }
    async fn end_session(&self, _: &AppId, _: UserId, _: SessionId) -> Result<bool, StoreError> {
        self.fail()
    }
    async fn end_other_sessions(&self, _: &AppId, _: UserId, _: SessionId) -> Result<Vec<SessionId>, StoreError> {
        self.fail()
    }
    async fn raise_epoch(&self, _: &AppId, _: &EpochChange, _: Option<&Profile>) -> Result<Replication, StoreError> {
        self.fail()
    }
    async fn store_profile(&self, _: &AppId, _: UserId, _: &Profile) -> Result<(), StoreError> {
        self.fail()
    }
}

impl Identities for FailingStores {
    async fn user_by_identity(&self, _: &AppId, _: &str, _: &str) -> Result<Option<User>, StoreError> {
        self.fail()
    }
    async fn create_federated_user(
        &self,
        _: &AppId,
        _: NewFederatedUser,
        _: NewIdentity,
        _: Option<Mail>,
    ) -> Result<bool, StoreError> {
        self.fail()
    }
    async fn link_identity(&self, _: &AppId, _: LinkRequest) -> Result<LinkOutcome, StoreError> {
        self.fail()
    }
    async fn transfer_account(&self, _: &AppId, _: AccountTransfer) -> Result<Option<User>, StoreError> {
        self.fail()
    }
    async fn identities(&self, _: &AppId, _: UserId) -> Result<Vec<Identity>, StoreError> {
        self.fail()
    }
    async fn unlink_identity(&self, _: &AppId, _: UnlinkRequest) -> Result<UnlinkOutcome, StoreError> {
        self.fail()
    }
}

impl Flows for FailingStores {
    async fn store_flow(&self, _: &AppId, _: &FlowId, _: &str, _: ClientAddress) -> Result<(), StoreFlowError> {
        self.fail().map_err(StoreFlowError::Store)
    }
    async fn find_flow(&self, _: &AppId, _: &FlowId) -> Result<Option<String>, StoreError> {
        self.fail()
    }
    async fn consume_flow(&self, _: &AppId, _: &FlowId, _: FlowBinding) -> Result<bool, StoreError> {
        self.fail()
    }
    async fn store_login(&self, _: &AppId, _: &LoginCodeKey, _: &PendingLogin) -> Result<(), StoreError> {
        self.fail()
    }
    async fn find_login(&self, _: &AppId, _: &LoginCodeKey) -> Result<Option<StoredLogin>, StoreError> {
        self.fail()
    }
    async fn redeem_login(&self, _: &AppId, _: &LoginCodeKey, _: SessionId) -> Result<Option<SessionId>, StoreError> {
        self.fail()
    }
}

impl Providers for FailingStores {
    type Permit = ();

    fn capabilities(&self, _: &RenderedProvider) -> ProviderCapabilities {
        ProviderCapabilities { has_nonce: true, uses_form_post: false }
    }
    fn try_acquire(
        &self,
        _: ProviderOperation,
        _: &App,
        _: &RenderedProvider,
        _: ClientAddress,
    ) -> Result<(), ProviderError> {
        Ok(())
    }
    async fn authorization_url(
        &self,
        (): &(),
        _: &RenderedProvider,
        request: &AuthorizationRequest<'_>,
    ) -> Result<String, ProviderError> {
        Ok(format!("https://provider.example/authorize?state={}", request.state))
    }
    async fn validate_issuer(&self, (): &(), _: &RenderedProvider, _: Option<&str>) -> Result<(), ProviderError> {
        Ok(())
    }
    async fn exchange_code(
        &self,
        (): &(),
        _: &RenderedProvider,
        _: &AuthorizationCodeGrant<'_>,
    ) -> Result<VerifiedIdentity, ProviderError> {
        Err(ProviderError::Unavailable(UnavailableReason::Timeout))
    }
    async fn validate_token(
        &self,
        (): &(),
        _: &RenderedProvider,
        _: &str,
        _: Option<&str>,
    ) -> Result<VerifiedIdentity, ProviderError> {
        Err(ProviderError::NoTokenCheck)
    }
}

impl RateLimits for FailingStores {
    async fn acquire(&self, _: &AppId, checks: Vec<RateLimitCheck>) -> Result<RateLimitPermit, AcquireError> {
        match self {
            Self::Overloaded => Ok(RateLimitPermit(checks.into_iter().map(|check| (check, 0)).collect())),
            Self::Limited => Err(AcquireError::RateLimited(RateLimited {
                limit: LimitName::LoginsPerClient,
                window: Window { count: 60, window_seconds: 60 },
                retry_after: Duration::from_secs(9),
            })),
            other => other.fail().map_err(AcquireError::Store),
        }
    }
    async fn release(&self, _: &AppId, _: RateLimitPermit) {}
    async fn is_known_client(&self, _: &AppId, _: &AccountKey, _: ClientAddress) -> Result<bool, StoreError> {
        match self {
            Self::Limited | Self::Overloaded => Ok(false),
            other => other.fail(),
        }
    }
    async fn remember_client(&self, _: &AppId, _: &AccountKey, _: ClientAddress) {}
}

impl PasswordHasher for FailingStores {
    fn check_capacity(&self, _: &App, _: ClientAddress) -> Result<(), Overloaded> {
        Ok(())
    }
    async fn hash(&self, _: &App, _: ClientAddress, _: &Password) -> Result<PasswordHash, Overloaded> {
        Err(OVERLOADED)
    }
    async fn verify(
        &self,
        _: &App,
        _: ClientAddress,
        _: &Password,
        _: Option<&PasswordHash>,
    ) -> Result<bool, Overloaded> {
        Err(OVERLOADED)
    }
    fn is_outdated(&self, _: &PasswordHash) -> bool {
        false
    }
    async fn is_strong_enough(
        &self,
        _: &App,
        _: ClientAddress,
        _: &Password,
        _: Vec<String>,
    ) -> Result<bool, Overloaded> {
        Err(OVERLOADED)
    }
}

impl AuditLog for FailingStores {
    async fn record(&self, _: &AppId, _: Event) {}
    fn record_later(&self, _: &AppId, _: Event) {}
    fn count_refusal(&self, _: &AppId, _: Refusal) {}
    async fn activity(&self, _: &AppId, _: UserId, _: OffsetDateTime) -> Result<Vec<ActivityEntry>, StoreError> {
        self.fail()
    }
}

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
        let mut registry = Registry::default();
        let metrics = HttpMetrics::register(&mut registry);
        Self {
            state: Arc::new(State {
                apps: Arc::new(apps),
                stores,
                env: Env::system(),
                settings,
                callers: Callers::Disabled,
                token_cache: TokenCache::default(),
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

    /// The same from the client address 192.0.2.`last`.
    fn connect_from(&self, service: Service, last: u8) -> DuplexStream {
        let (client, server) = duplex(1 << 20);
        let peer = IpAddr::from([192, 0, 2, last]);
        let drain = self.drain.clone();
        tokio::spawn(async move {
            let place = service.admit(service.acquire_slot().await, peer).expect("a slot for the connection");
            serve_connection(connection_builder(), server, peer, place, service, drain).await;
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
async fn unknown_paths_and_unknown_apps_have_different_errors() {
    let house = TestServer::new(FailingStores::Panicking);
    for path in ["/", "/nothing", "/v1/shop/email/login/", "/v1/shop/nothing", "/shop/nothing"] {
        house.send_request(get(path, "")).await.assert_refused(404, "not_found");
    }
    house.post("/v1/nobody/email/login", "", "{}").await.assert_refused(404, "app_not_found");
    house.post("/v1/sh%6Fp/email/login", "", "{}").await.assert_refused(404, "app_not_found");
    house.send_request(get("/nobody/.well-known/jwks.json", "")).await.assert_refused(404, "app_not_found");
    let admin = admin_service(Arc::clone(&house.state), house.metrics.clone(), Arc::clone(&house.budgets));
    exchange(house.connect(admin), get("/users", "").as_bytes()).await.assert_refused(404, "not_found");
}

#[tokio::test]
async fn a_wrong_method_gets_the_allowed_ones() {
    let house = TestServer::new(FailingStores::Panicking);
    let reply = house.send_request(get("/v1/shop/email/login", "")).await;
    reply.assert_refused(405, "method_not_allowed");
    assert_eq!(reply.header("allow"), Some("POST, OPTIONS"));
    let reply = house.post("/shop/.well-known/jwks.json", "", "{}").await;
    reply.assert_refused(405, "method_not_allowed");
    assert_eq!(reply.header("allow"), Some("GET, HEAD, OPTIONS"));
}

#[tokio::test]
async fn head_is_get_without_the_body() {
    let house = TestServer::new(FailingStores::Panicking);
    let got = house.send_request(get("/shop/.well-known/jwks.json", "")).await;
    let head = house.send_request(get("/shop/.well-known/jwks.json", "").replacen("GET", "HEAD", 1)).await;
    assert_eq!((head.status, head.body.as_str()), (200, ""));
    for same in ["content-length", "etag", "content-type", "cache-control"] {
        assert_eq!(head.header(same), got.header(same), "{same}");
    }
    assert_eq!(got.header("content-length"), Some(got.body.len().to_string().as_str()));
}

#[tokio::test]
async fn public_documents_can_be_cached_and_revalidated() {
    let house = TestServer::new(FailingStores::Panicking);
    for path in [
        "/shop/.well-known/jwks.json",
        "/shop/.well-known/openid-configuration",
        "/.well-known/oauth-authorization-server/shop",
        "/shop/.well-known/oauth-authorization-server",
        "/openapi.json",
    ] {
        let reply = house.send_request(get(path, "")).await;
        assert_eq!(reply.status, 200, "{path}");
        assert_eq!(reply.header("cache-control"), Some("public, max-age=300"));
        assert_eq!(reply.header("x-content-type-options"), Some("nosniff"));
        let again =
            house.send_request(get(path, &format!("If-None-Match: {}\r\n", reply.header("etag").unwrap()))).await;
        assert_eq!((again.status, again.body.as_str()), (304, ""), "{path}");
        assert_eq!(again.header("etag"), reply.header("etag"));
    }
    let keys = house.send_request(get("/shop/.well-known/jwks.json", "")).await.json();
    assert_eq!(keys["keys"][0]["kid"], "s1");
    assert_eq!(keys["keys"][0]["alg"], "ES256");
    assert!(keys["keys"][0].get("d").is_none(), "the private part stays");
    assert_eq!(
        house.send_request(get("/shop/.well-known/openid-configuration", "")).await.json(),
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
async fn bad_bodies_are_refused_before_any_store_is_called() {
    let house = TestServer::new(FailingStores::Panicking);
    let login = "/v1/shop/email/login";
    let typed = |kind: &str| {
        format!("POST {login} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{kind}Content-Length: 2\r\n\r\n{{}}")
    };
    house.send_request(typed("")).await.assert_refused(415, "unsupported_media_type");
    house.send_request(typed("Content-Type: text/plain\r\n")).await.assert_refused(415, "unsupported_media_type");
    house
        .send_request(typed("Content-Type: application/json\r\nContent-Encoding: gzip\r\n"))
        .await
        .assert_refused(415, "unsupported_media_type");
    house.post(login, "", "").await.assert_refused(400, "invalid_request");
    house.post(login, "", "{").await.assert_refused(400, "invalid_request");
    let body = house.post(login, "", r#"{"email": "ada", "name": 1}"#).await.assert_refused(400, "invalid_request");
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
    let house = TestServer::new(FailingStores::Panicking);
    let head = "POST /v1/shop/email/login HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n";
    // Refused at once: the body never arrives.
    let reply = house.send_request(format!("{head}Content-Length: 65537\r\n\r\n")).await;
    reply.assert_refused(413, "payload_too_large");
    assert_eq!(reply.header("connection"), Some("close"));
    let chunk = format!("8000\r\n{}\r\n", " ".repeat(0x8000));
    house
        .send_request(format!("{head}Transfer-Encoding: chunked\r\n\r\n{chunk}{chunk}{chunk}0\r\n\r\n"))
        .await
        .assert_refused(413, "payload_too_large");
    // At the limit, the body is read and is not JSON.
    let reply = house.post("/v1/shop/email/login", "", &" ".repeat(65_536)).await;
    reply.assert_refused(400, "invalid_request");
}

/// Waits until the condition is true.
async fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let soon = async {
        while !condition() {
            tokio::task::yield_now().await;
        }
    };
    timeout(Duration::from_secs(20), soon).await.unwrap_or_else(|_| panic!("timed out: {what}"));
}

/// Sends an incomplete request until the server holds memory for it or refuses it. Returns whether it was refused.
async fn is_refused(house: &TestServer, client: &mut DuplexStream, bytes: &[u8]) -> bool {
    let before = house.budgets.request_bytes().used();
    client.write_all(bytes).await.unwrap();
    let mut reply = vec![0; 4096];
    let held = wait_until("memory is held", || house.budgets.request_bytes().used() != before);
    tokio::select! {
        biased;
        read = client.read(&mut reply) => {
            let reply = Reply::parse(&reply[..read.unwrap()]);
            reply.assert_refused(503, "temporarily_unavailable");
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
    let mut house = TestServer::new(FailingStores::Overloaded);
    house.timeouts.body = Duration::from_secs(600);
    let service = house.public();
    let mut refused = 0;
    let mut stalled = Vec::new();
    // Twelve clients; their bodies do not fit the budget of 16 MiB.
    for number in 0..700_u32 {
        let mut client = house.connect_from(service.clone(), (number % 12) as u8 + 10);
        refused += usize::from(is_refused(&house, &mut client, STALLED_BODY).await);
        stalled.push(client);
    }
    // 56 KiB and the head of each body count; the connection pays for 8 KiB.
    let held = house.budgets.request_bytes().used();
    assert!((15 << 20..=16 << 20).contains(&held), "{held} bytes");
    assert_eq!(refused, 700 - 291);

    // An ordinary login still works, from any of the addresses.
    for last in [1, 10] {
        let reply = exchange(house.connect_from(house.public(), last), login().as_bytes()).await;
        assert_eq!(reply.header("retry-after"), Some("3"), "the login reaches the hashing queue: {}", reply.body);
        let document = exchange(house.connect_from(house.public(), last), get("/openapi.json", "").as_bytes()).await;
        assert_eq!(document.status, 200);
    }
    // A client that disconnects releases what it held.
    drop(stalled);
    wait_until("the memory is released", || house.budgets.request_bytes().used() == 0).await;
}

#[tokio::test]
async fn one_client_cannot_exhaust_the_budget() {
    let mut house = TestServer::new(FailingStores::Broken);
    house.timeouts.body = Duration::from_secs(600);
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
    exchange(house.connect_from(house.public(), 2), request.as_bytes()).await.assert_refused(400, "invalid_request");
}

#[tokio::test]
async fn a_body_of_unknown_length_is_counted_as_it_arrives() {
    let house = TestServer::new(FailingStores::Broken);
    let head = "POST /v1/shop/email/login HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n\
                Transfer-Encoding: chunked\r\n\r\n";
    let chunk = format!("2000\r\n{}\r\n", " ".repeat(0x2000));
    let mut client = house.connect(house.public());
    client.write_all(head.as_bytes()).await.unwrap();
    let used = || house.budgets.request_bytes().used();
    for step in [0, 4 << 10, 20 << 10, 20 << 10, 52 << 10, 52 << 10, 52 << 10] {
        client.write_all(chunk.as_bytes()).await.unwrap();
        wait_until("the body counts against the budget", || used() > step).await;
        assert!(used() <= 64 << 10);
    }
    // Nothing is left for the rest of another body.
    let _all = house.budgets.request_bytes().try_acquire(None, (16 << 20) - used()).unwrap();
    let mut other = house.connect_from(house.public(), 2);
    other.write_all(format!("{head}{chunk}{chunk}").as_bytes()).await.unwrap();
    let mut reply = Vec::new();
    timeout(Duration::from_secs(20), other.read_to_end(&mut reply)).await.expect("closed in time").unwrap();
    Reply::parse(&reply).assert_refused(503, "temporarily_unavailable");
}

#[tokio::test]
async fn large_heads_that_do_not_fit_the_budget_are_refused_while_they_arrive() {
    let mut house = TestServer::new(FailingStores::Panicking);
    house.timeouts.head = Duration::from_secs(600);
    let half = format!("GET /openapi.json HTTP/1.1\r\nX-Filler: {}", "x".repeat(20_000));
    let service = house.public();
    let mut clients = Vec::new();
    let mut refused = 0;
    for number in 0..700_u32 {
        let mut client = house.connect_from(service.clone(), (number % 250) as u8 + 1);
        refused += usize::from(is_refused(&house, &mut client, half.as_bytes()).await);
        clients.push(client);
    }
    // 56 KiB for each: the buffer grows to twice the limit of a head, minus what every connection has.
    assert_eq!(refused, 700 - 292);
    assert!(house.budgets.request_bytes().used() <= 16 << 20);
    // A small head is read.
    assert_eq!(house.send_request(get("/openapi.json", "")).await.status, 200);
    drop(clients);
    wait_until("the memory is released", || house.budgets.request_bytes().used() == 0).await;
}

#[tokio::test]
async fn a_body_that_does_not_arrive_times_out() {
    let mut house = TestServer::new(FailingStores::Panicking);
    house.timeouts.body = Duration::from_millis(30);
    let reply = house
        .send_request(
            "POST /v1/shop/email/login HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n\
             Content-Length: 100\r\n\r\n{\"email\"",
        )
        .await;
    reply.assert_refused(408, "invalid_request");
    assert_eq!(reply.header("connection"), Some("close"));
}

#[tokio::test]
async fn headers_that_do_not_arrive_time_out() {
    let mut house = TestServer::new(FailingStores::Panicking);
    house.timeouts.head = Duration::from_millis(30);
    let reply = house.send_request("GET /openapi.json HTTP/1.1\r\nHost: a\r\n").await;
    reply.assert_refused(408, "invalid_request");
    assert_eq!(reply.header("connection"), Some("close"));

    // The same for a further request, after the response to the first.
    let mut client = house.connect(house.public());
    client.write_all(b"GET /v1 HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    let mut first = [0; 16];
    client.read_exact(&mut first).await.unwrap();
    client.write_all(b"GET /v1 HTTP/1.1\r\n").await.unwrap();
    let mut rest = String::new();
    timeout(Duration::from_secs(20), client.read_to_string(&mut rest)).await.unwrap().unwrap();
    assert!(first.starts_with(b"HTTP/1.1 404"));
    assert!(rest.contains("HTTP/1.1 408"), "{rest}");

    // A client that sends nothing, or does not get past the HTTP/2 preface, gets no response.
    for silent in ["", "PRI * HTTP/2.0\r\n"] {
        let mut client = house.connect(house.public());
        client.write_all(silent.as_bytes()).await.unwrap();
        let mut reply = Vec::new();
        timeout(Duration::from_secs(20), client.read_to_end(&mut reply)).await.unwrap().unwrap();
        assert!(reply.is_empty(), "{silent:?}");
    }
}

#[tokio::test]
async fn an_idle_connection_is_closed_without_a_response() {
    let mut house = TestServer::new(FailingStores::Panicking);
    house.timeouts.idle = Duration::from_millis(50);
    let began = std::time::Instant::now();
    let reply = exchange(house.connect(house.public()), b"GET /v1 HTTP/1.1\r\nHost: a\r\n\r\n").await;
    assert_eq!(reply.status, 404);
    assert_eq!(reply.header("connection"), None);
    assert!(reply.body.ends_with('}'), "one response, then the end");
    assert!(began.elapsed() >= Duration::from_millis(50));
}

#[tokio::test]
async fn headers_are_bounded() {
    let house = TestServer::new(FailingStores::Panicking);
    let with = |size: usize| get("/openapi.json", &format!("X-Filler: {}\r\n", "x".repeat(size)));
    assert_eq!(house.send_request(with(30 * 1024)).await.status, 200);
    assert_eq!(house.send_request(with(33 * 1024)).await.status, 431);
    let many: String = (0..150).map(|n| format!("X-{n}: y\r\n")).collect();
    assert_eq!(house.send_request(get("/openapi.json", &many)).await.status, 431);
    // A large flood gets a response too, not a reset.
    assert_eq!(house.send_request(with(200 * 1024)).await.status, 431);
    assert_eq!(house.send_request("nonsense\r\n\r\n").await.status, 400);
}

/// Types and a flag of HTTP/2 frames (RFC 9113, 6).
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const ACK: u8 = 1;

/// The preface and empty SETTINGS (RFC 9113, 3.4 and 6.5).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// HEADERS of a complete request: GET, http, /openapi.json, authority `a` (RFC 7541, 6.1 and 6.2.2).
fn openapi_request_frame(stream: u8) -> Vec<u8> {
    let mut block = vec![0x82, 0x86, 0x04, 13];
    block.extend_from_slice(b"/openapi.json");
    block.extend_from_slice(&[0x01, 1, b'a']);
    // END_STREAM and END_HEADERS.
    [&[0, 0, block.len() as u8, HEADERS, 0x05, 0, 0, 0, stream][..], &block].concat()
}

/// Reads the next frame; `None` at the end of the connection. Has no timeout.
async fn frame_or_end(client: &mut DuplexStream) -> Option<(u8, u8, Vec<u8>)> {
    let mut head = [0; 9];
    client.read_exact(&mut head).await.ok()?;
    let mut payload = vec![0; usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2])];
    client.read_exact(&mut payload).await.ok()?;
    Some((head[3], head[4], payload))
}

/// Reads a frame of HTTP/2 (RFC 9113, 4.1): type, flags and payload.
async fn frame(client: &mut DuplexStream) -> (u8, u8, Vec<u8>) {
    let mut head = [0; 9];
    timeout(Duration::from_secs(20), client.read_exact(&mut head)).await.expect("a frame in time").unwrap();
    let mut payload = vec![0; usize::from(head[1]) << 8 | usize::from(head[2])];
    client.read_exact(&mut payload).await.unwrap();
    (head[3], head[4], payload)
}

#[tokio::test]
async fn http_2_gets_a_response_and_a_goaway_on_drain() {
    let house = TestServer::new(FailingStores::Panicking);
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

/// Shortens the idle and GOAWAY timeouts.
fn shorten_timeouts(house: &mut TestServer) {
    house.timeouts.idle = Duration::from_millis(500);
    house.timeouts.goaway = Duration::from_millis(200);
}

/// Answers pings until the connection ends. Returns the types of the received frames.
async fn answer_pings(client: &mut DuplexStream) -> Vec<u8> {
    let mut kinds = Vec::new();
    let answering = async {
        while let Some((kind, flags, payload)) = frame_or_end(client).await {
            kinds.push(kind);
            if kind == PING && flags & ACK == 0 {
                drop(client.write_all(&[&[0, 0, 8, PING, ACK, 0, 0, 0, 0][..], &payload].concat()).await);
            }
        }
    };
    timeout(Duration::from_secs(20), answering).await.expect("closed in time");
    kinds
}

#[tokio::test]
async fn an_idle_http_2_connection_ends_even_if_its_client_answers_pings() {
    let mut house = TestServer::new(FailingStores::Panicking);
    shorten_timeouts(&mut house);
    for first_asks in [false, true] {
        let mut client = house.connect(house.public());
        let began = std::time::Instant::now();
        client.write_all(PREFACE).await.unwrap();
        if first_asks {
            client.write_all(&openapi_request_frame(1)).await.unwrap();
        }
        let kinds = answer_pings(&mut client).await;
        assert_eq!(kinds.contains(&HEADERS), first_asks, "{kinds:?}");
        assert!(kinds.contains(&PING) && kinds.contains(&GOAWAY), "{kinds:?}");
        assert!(began.elapsed() >= Duration::from_millis(500));
    }
}

#[tokio::test]
async fn an_idle_http_2_connection_ends_even_if_its_client_ignores_the_goaway() {
    let mut house = TestServer::new(FailingStores::Panicking);
    shorten_timeouts(&mut house);
    let mut client = house.connect(house.public());
    client.write_all(PREFACE).await.unwrap();
    // The client answers nothing, not even pings.
    let mut all = Vec::new();
    timeout(Duration::from_secs(20), client.read_to_end(&mut all)).await.expect("closed in time").unwrap();
}

#[tokio::test]
async fn an_http_2_client_that_reads_no_response_is_disconnected() {
    let mut house = TestServer::new(FailingStores::Panicking);
    shorten_timeouts(&mut house);
    let mut client = house.connect(house.public());
    client.write_all(PREFACE).await.unwrap();
    // SETTINGS_INITIAL_WINDOW_SIZE is 0: no byte of a body can be sent.
    client.write_all(&[0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0]).await.unwrap();
    client.write_all(&openapi_request_frame(1)).await.unwrap();
    let kinds = answer_pings(&mut client).await;
    assert!(kinds.contains(&HEADERS) && !kinds.contains(&DATA), "{kinds:?}");
}

#[tokio::test(start_paused = true)]
async fn an_http_2_connection_stays_open_while_a_request_runs() {
    let mut house = TestServer::new(FailingStores::Panicking);
    shorten_timeouts(&mut house);
    let slow = SlowEndpoint::default();
    let mut client = house.connect(house.service_for(slow.clone()));
    client.write_all(PREFACE).await.unwrap();
    client.write_all(&openapi_request_frame(1)).await.unwrap();
    wait_for(&slow.began).await;
    // Longer than the idle timeout.
    tokio::time::sleep(Duration::from_millis(1200)).await;
    slow.may_end.notify_one();
    let kinds = answer_pings(&mut client).await;
    let answered = kinds.iter().position(|kind| *kind == HEADERS).expect("a response");
    let goaway = kinds.iter().position(|kind| *kind == GOAWAY).expect("a GOAWAY");
    assert!(answered < goaway, "{kinds:?}");
}

#[tokio::test]
async fn http_2_works_without_tls() {
    let house = TestServer::new(FailingStores::Panicking);
    let mut client = house.connect(house.public());
    // The preface and empty SETTINGS (RFC 9113, 3.4 and 6.5).
    client.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
    let mut frame = [0; 9];
    timeout(Duration::from_secs(20), client.read_exact(&mut frame)).await.unwrap().unwrap();
    assert_eq!(frame[3], 4, "SETTINGS");
}

#[tokio::test]
async fn a_well_formed_request_id_is_kept() {
    let house = TestServer::new(FailingStores::Panicking);
    let id = async |sent: &str| house.send_request(get("/", sent)).await.header("x-request-id").unwrap().to_owned();
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
async fn a_store_outage_is_503_everywhere() {
    let house = TestServer::new(FailingStores::Unavailable);
    for (operation, body) in EMAIL_ENDPOINTS {
        let reply = house.post(&format!("/v1/shop/email/{operation}"), "", body).await;
        reply.assert_refused(503, "temporarily_unavailable");
        assert_eq!(reply.header("retry-after"), Some("5"), "{operation}");
        assert!(!reply.body.contains("secret-host"), "{operation}");
    }
}

#[tokio::test]
async fn internal_errors_are_500_and_reveal_nothing() {
    for stores in [FailingStores::Broken, FailingStores::Panicking] {
        let house = TestServer::new(stores);
        for (operation, body) in EMAIL_ENDPOINTS {
            let reply = house.post(&format!("/v1/shop/email/{operation}"), "", body).await;
            reply.assert_refused(500, "server_error");
            assert!(!reply.body.contains("secret-host") && !reply.body.contains("panics"), "{operation}");
        }
    }
}

#[tokio::test]
async fn a_reached_limit_says_when_to_retry() {
    let house = TestServer::new(FailingStores::Limited);
    for (operation, body) in EMAIL_ENDPOINTS {
        if operation == "forgot-password" {
            // Only its email is limited, which the response does not reveal.
            continue;
        }
        let reply = house.post(&format!("/v1/shop/email/{operation}"), "", body).await;
        reply.assert_refused(429, "rate_limited");
        assert_eq!(reply.header("retry-after"), Some("9"), "{operation}");
        assert_eq!(reply.header("ratelimit-policy"), Some("\"loginsPerClient\";q=60;w=60"));
        assert_eq!(reply.header("ratelimit"), Some("\"loginsPerClient\";r=0;t=9"));
    }
}

#[tokio::test]
async fn hashing_at_capacity_is_503() {
    let house = TestServer::new(FailingStores::Overloaded);
    for (operation, body) in [EMAIL_ENDPOINTS[0], EMAIL_ENDPOINTS[1], EMAIL_ENDPOINTS[4]] {
        let reply = house.post(&format!("/v1/shop/email/{operation}"), "", body).await;
        reply.assert_refused(503, "temporarily_unavailable");
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

/// Sends a login that must be refused. Returns how long the refusal takes.
async fn refused_login(house: &TestServer, last: u8) -> Duration {
    let began = tokio::time::Instant::now();
    let reply = exchange(house.connect_from(house.public(), last), login().as_bytes()).await;
    assert!(matches!(reply.status, 429 | 503), "{}", reply.status);
    assert!(reply.header("retry-after").is_some());
    began.elapsed()
}

/// Makes the client 192.0.2.`last` one that has returned early this often.
fn return_early(house: &TestServer, last: u8, returns: u32) {
    let client = ClientAddress::from_ip([192, 0, 2, last].into());
    let mut now = tokio::time::Instant::now();
    for _ in 0..=returns {
        house.budgets.refusals().hold(client, now, now, Duration::from_secs(5));
        now += Duration::from_secs(4);
    }
}

#[tokio::test]
async fn a_client_that_ignores_retry_after_waits_for_its_refusals() {
    for stores in [FailingStores::Overloaded, FailingStores::Limited, FailingStores::Unavailable] {
        let house = TestServer::new(stores);
        for _ in 0..4 {
            refused_login(&house, 1).await;
        }
        assert_eq!(house.budgets.refusals().held_count(), 0);
        return_early(&house, 2, 5);
        assert!(refused_login(&house, 2).await >= Duration::from_secs(1));
        // A held refusal occupies its slot only while it is held.
        assert_eq!(house.budgets.refusals().held_count(), 0);
    }
}

/// Configures an App that has GitHub logins and its own redirect address.
fn with_github(document: &mut RenderedApp) {
    document.redirect_urls = vec!["https://shop.example.com/done".parse().unwrap()];
    let settings = json!({ "preset": "github", "clientID": "x", "secret": "s" });
    let provider = json!({ "name": "github", "resource": "github", "linkByEmail": false, "settings": settings });
    document.providers = vec![serde_json::from_value(provider).unwrap()];
}

/// A callback request of a flow that has begun.
async fn github_callback() -> String {
    let begun = TestServer::with_app(FailingStores::Overloaded, with_github)
        .send_request(get("/shop/github/redirect", ""))
        .await;
    assert_eq!(begun.status, 302, "{}", begun.body);
    let (_, state) = begun.header("location").unwrap().split_once("state=").unwrap();
    let (cookie, _) = begun.header("set-cookie").unwrap().split_once(';').unwrap();
    get(&format!("/shop/github/callback?state={state}&code=c"), &format!("Cookie: {cookie}\r\n"))
}

#[tokio::test]
async fn a_callback_that_is_refused_before_its_state_is_used_is_held_like_other_refusals() {
    let callback = github_callback().await;
    for (stores, error) in
        [(FailingStores::Limited, "rate_limited"), (FailingStores::Unavailable, "temporarily_unavailable")]
    {
        let house = TestServer::with_app(stores, with_github);
        let refused = async |last| {
            let began = tokio::time::Instant::now();
            let reply = exchange(house.connect_from(house.public(), last), callback.as_bytes()).await;
            assert_eq!((reply.status, reply.header("set-cookie")), (302, None));
            let location = reply.header("location").unwrap();
            assert!(location.starts_with(&format!("https://shop.example.com/done?error={error}&")), "{location}");
            began.elapsed()
        };
        let before = tokio::time::Instant::now();
        refused(1).await;
        let is_logged = |_: &usize| house.budgets.refusals().is_logged("callback", http::StatusCode::FOUND, before);
        assert_eq!((0..20).filter(is_logged).count(), 9, "ten refusals are logged in this second, and one was before");
        return_early(&house, 2, 5);
        assert!(refused(2).await >= Duration::from_secs(1));
    }
}

#[tokio::test(start_paused = true)]
async fn a_refusal_of_the_gate_is_sent_at_once() {
    let house = TestServer::new(FailingStores::Unavailable);
    return_early(&house, 1, 10);
    assert!(refused_login(&house, 1).await >= Duration::from_secs(4));
    let token = access_token(&house);
    for path in ["/v1/shop/authorize", "/v1/shop/authorize/page"] {
        let began = tokio::time::Instant::now();
        let request = get(path, &format!("Authorization: Bearer {token}\r\n"));
        let reply = exchange(house.connect_from(house.public(), 1), request.as_bytes()).await;
        reply.assert_refused(503, "temporarily_unavailable");
        assert!(began.elapsed() < Duration::from_millis(500), "{path}: {:?}", began.elapsed());
    }
}

#[tokio::test]
async fn a_drain_ends_held_refusals() {
    let house = TestServer::new(FailingStores::Overloaded);
    return_early(&house, 1, 10);
    let refused = refused_login(&house, 1);
    let drained = async {
        wait_until("the refusal is held", || house.budgets.refusals().held_count() == 1).await;
        house.drain.begin();
    };
    let (waited, ()) = tokio::join!(refused, drained);
    assert!(waited < Duration::from_secs(4), "{waited:?}");
    assert_eq!(house.budgets.refusals().held_count(), 0);
}

#[tokio::test]
async fn verify_accepts_no_data_and_requires_a_token() {
    let house = TestServer::new(FailingStores::Panicking);
    let verify = "/v1/shop/email/verify";
    let bare = format!("POST {verify} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    let reply = house.send_request(bare.clone()).await;
    reply.assert_refused(401, "invalid_token");
    assert_eq!(reply.header("www-authenticate"), Some("Bearer realm=\"shop\""));
    house.post(verify, "", "").await.assert_refused(401, "invalid_token");
    house.post(verify, "", " { } ").await.assert_refused(401, "invalid_token");
    for data in [r#"{"email": "ada@example.com"}"#, "[]", "null", "{", " "] {
        house.post(verify, "", data).await.assert_refused(401, "invalid_token");
    }
    let reply = house.post(verify, "Authorization: Bearer nonsense\r\n", "{}").await;
    reply.assert_refused(401, "invalid_token");
    assert_eq!(reply.header("www-authenticate"), Some("Bearer realm=\"shop\", error=\"invalid_token\""));
}

#[tokio::test]
async fn what_the_app_forbids_is_reported() {
    let closed = TestServer::with_app(FailingStores::Panicking, |app| app.sign_up = SignUp::Closed);
    let (_, body) = EMAIL_ENDPOINTS[1];
    closed.post("/v1/shop/email/register", "", body).await.assert_refused(403, "registration_disabled");
    let narrow = TestServer::with_app(FailingStores::Panicking, |app| {
        app.allowed_email_domains = vec!["example.org".parse().unwrap()]
    });
    let refused = narrow.post("/v1/shop/email/register", "", body).await.assert_refused(400, "invalid_request");
    assert_eq!(refused["fields"][0]["field"], "email");
    assert_eq!(refused["fields"][0]["code"], "domain_not_allowed");
    let house = TestServer::new(FailingStores::Overloaded);
    let short = r#"{"name": "Ada", "email": "ada@example.com", "password": "1234567"}"#;
    let refused = house.post("/v1/shop/email/register", "", short).await.assert_refused(400, "weak_password");
    assert_eq!(refused["fields"][0]["field"], "password");
    assert_eq!(refused["fields"][0]["code"], "too_short");
}

fn access_token(house: &TestServer) -> String {
    let app = house.state.apps.get("shop").unwrap();
    let id = Uuid::from_u128(7);
    let (user, epoch) = (UserId(id), Epoch(1));
    let auth_time = house.state.env.now();
    let session = Session { id: SessionId(id), user, epoch, generation: 1, amr: Amr::Password, auth_time };
    let profile = Profile { version: 1, email: None, email_verified: false, name: "Ada".to_owned() };
    token::issue_tokens(&app, &house.state.env, &profile, &session).unwrap().access_token
}

#[tokio::test]
async fn forward_auth_requires_a_token_with_any_method_and_sends_no_cors_headers() {
    let house = TestServer::new(FailingStores::Unavailable);
    let token = access_token(&house);
    for method in ["GET", "OPTIONS", "POST", "PROPFIND"] {
        for suffix in ["", "/", "/a//b/../c"] {
            let ask = |headers: &str| {
                format!(
                    "{method} /v1/shop/authorize{suffix} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\
                     Origin: https://shop.example.com\r\nAccess-Control-Request-Method: GET\r\n{headers}\r\n"
                )
            };
            let reply = house.send_request(ask("")).await;
            reply.assert_refused(401, "invalid_token");
            assert_eq!(reply.header("www-authenticate"), Some("Bearer realm=\"shop\""));
            assert!(!reply.headers.keys().any(|name| name.starts_with("access-control") || name == "vary"));
            let reply = house.send_request(ask("Authorization: Bearer a.b.c\r\n")).await;
            reply.assert_refused(401, "invalid_token");
            let reply = house.send_request(ask(&format!("Authorization: Bearer {token}\r\n"))).await;
            reply.assert_refused(503, "temporarily_unavailable");
            assert_eq!(reply.header("retry-after"), Some("5"));
        }
    }
    house.send_request(get("/v1/nobody/authorize", "")).await.assert_refused(404, "app_not_found");
}

/// Whether a call needs a token, according to the OpenAPI document.
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

/// Headers and bodies that are refused when a call reads them. The last two are never complete.
const INVALID_BODIES: [&str; 7] = [
    "Content-Type: application/json\r\nContent-Length: 1\r\n\r\n{",
    "Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
    "Content-Type: application/json\r\nContent-Length: 10\r\n\r\n{\"name\": 5}",
    "Content-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}",
    "Content-Length: 0\r\n\r\n",
    "Content-Type: application/json\r\nContent-Length: 65537\r\n\r\n{",
    "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n8\r\n{\"name\":\r\n",
];

/// The stores panic, so the test fails if a call asks them. It also fails if a call waits for a body: the body timeout
/// is longer than the test waits.
#[tokio::test]
async fn a_call_that_needs_a_token_is_401_without_one_whatever_its_body_and_parameters() {
    let mut house = TestServer::new(FailingStores::Panicking);
    house.timeouts.body = Duration::from_secs(600);
    house.timeouts.linger = Duration::from_millis(5);
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
            let reply = house.send_request(format!("{head}Content-Length: 0\r\n\r\n")).await;
            assert_ne!(reply.status, 401, "{} needs a token, but the OpenAPI document does not say so", route.name());
            continue;
        }
        seen += 1;
        let code = if route == Route::Introspect { "invalid_client" } else { "invalid_token" };
        for (token, challenge) in [
            ("", "Bearer realm=\"shop\""),
            ("Authorization: Basic YTpi\r\n", "Bearer realm=\"shop\""),
            ("Authorization: Bearer a.b.c\r\n", "Bearer realm=\"shop\", error=\"invalid_token\""),
        ] {
            for body in INVALID_BODIES {
                let reply = house.send_request(format!("{head}{token}{body}")).await;
                reply.assert_refused(401, code);
                assert_eq!(reply.header("www-authenticate"), Some(challenge), "{} {body:?}", route.name());
            }
        }
    }
    assert!(seen >= 15, "only {seen} calls need a token");
}

#[tokio::test]
async fn introspection_authenticates_the_caller_first() {
    let house = TestServer::new(FailingStores::Panicking);
    for authorization in ["", "Authorization: Bearer a.b.c\r\n", "Authorization: Basic YTpi\r\n"] {
        for body in ["", "nonsense", r#"{"token": "a.b.c"}"#] {
            let reply = house.post("/v1/shop/introspect", authorization, body).await;
            reply.assert_refused(401, "invalid_client");
            assert!(reply.header("www-authenticate").unwrap().starts_with("Bearer realm=\"shop\""));
        }
    }
}

#[tokio::test]
async fn cors_follows_the_apps_list() {
    let house = TestServer::new(FailingStores::Unavailable);
    let preflight = |origin: &str, path: &str| {
        format!(
            "OPTIONS {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nOrigin: {origin}\r\n\
             Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: content-type\r\n\r\n"
        )
    };
    let login = "/v1/shop/email/login";
    let reply = house.send_request(preflight("https://shop.example.com", login)).await;
    assert_eq!(reply.status, 204);
    assert_eq!(reply.header("access-control-allow-origin"), Some("https://shop.example.com"));
    assert_eq!(reply.header("access-control-allow-credentials"), Some("true"));
    assert_eq!(reply.header("access-control-allow-methods"), Some("POST, OPTIONS"));
    let reply = house.send_request(preflight("https://evil.example", login)).await;
    assert_eq!(reply.status, 204);
    assert!(!reply.headers.keys().any(|name| name.starts_with("access-control")), "{:?}", reply.headers);
    house
        .send_request(preflight("https://shop.example.com", "/v1/nobody/email/login"))
        .await
        .assert_refused(404, "app_not_found");

    // Errors too: the App's page must be able to read them.
    let (_, body) = EMAIL_ENDPOINTS[0];
    for (body, status) in [(body, 503), ("{}", 400)] {
        let reply = house.post(login, "Origin: https://shop.example.com\r\n", body).await;
        assert_eq!(reply.status, status);
        assert_eq!(reply.header("access-control-allow-origin"), Some("https://shop.example.com"));
        assert_eq!(reply.header("vary"), Some("Origin"));
        // An origin that is not listed is no reason to refuse: no cookie is used.
        let reply = house.post(login, "Origin: https://evil.example\r\n", body).await;
        assert_eq!(reply.status, status);
        assert_eq!(reply.header("access-control-allow-origin"), None);
        assert_eq!(reply.header("vary"), Some("Origin"));
    }
    let reply = house.send_request(get("/openapi.json", "Origin: https://shop.example.com\r\n")).await;
    assert_eq!(reply.header("access-control-allow-origin"), None);
}

#[tokio::test]
async fn metrics_name_routes_and_never_paths() {
    let house = TestServer::new(FailingStores::Unavailable);
    house.send_request(get("/secret-path?code=ABCDE", "")).await;
    house.send_request(get("/shop/.well-known/jwks.json", "")).await;
    house.send_request(get("/shop/.well-known/jwks.json", "").replacen("GET", "MADEUP", 1)).await;
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
async fn readyz_lists_what_is_missing() {
    let mut house = TestServer::new(FailingStores::Panicking);
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
    let asked = async |path: &str| exchange(house.connect(ops.clone()), get(path, "").as_bytes()).await;
    assert_eq!(asked("/livez").await.status, 200);
    let reply = asked("/readyz").await;
    assert_eq!(reply.status, 503);
    assert_eq!(reply.json()["missing"].as_array().unwrap().len(), 2);
    readiness.set_configuration_loaded();
    readiness.set_schema_error("the schema is at 3, this server needs 4: run `latchkey-server migrate`");
    let reply = asked("/readyz").await;
    assert_eq!(
        reply.json(),
        json!({
            "ready": false,
            "missing": ["schema: the schema is at 3, this server needs 4: run `latchkey-server migrate`"],
        })
    );
    readiness.set_schema_ready();
    assert_eq!(asked("/readyz").await.status, 200);
    readiness.set_draining();
    assert_eq!(asked("/readyz").await.status, 503);
    assert!(asked("/metrics").await.body.ends_with("# EOF\n"));
    exchange(house.connect(ops.clone()), get("/livez", "").replacen("GET", "POST", 1).as_bytes())
        .await
        .assert_refused(405, "method_not_allowed");
}

#[tokio::test]
async fn revisions_are_streamed_as_they_change() {
    let mut house = TestServer::new(FailingStores::Panicking);
    let registry = Arc::new(std::mem::take(&mut house.registry));
    let reports = Arc::new(ProviderReports::default());
    let provider = ("shop".to_owned(), "github".to_owned());
    reports.record(&provider, Reason::Reachable);
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
    read_until(&mut client, &mut output, r#"{"hello":{"podUID":"pod-1","format":1,"revisions":{"shop":""#).await;
    read_until(&mut client, &mut output, r#"{"provider":{"namespace":"shop","name":"github","reason":"Reachable"}}"#)
        .await;
    reports.record(&provider, Reason::ClientRefused);
    read_until(&mut client, &mut output, r#""reason":"ClientRefused"}}"#).await;
    house.state.apps.remove(&"shop".parse().unwrap());
    read_until(&mut client, &mut output, r#"{"app":"shop","revision":null}"#).await;
    read_until(&mut client, &mut output, r#"{"heartbeat":1}"#).await;
    // The stream has no end of its own; a drain ends it.
    house.drain.closing().cancel();
    timeout(Duration::from_secs(20), client.read_to_string(&mut output))
        .await
        .expect("the stream ends in time")
        .unwrap();
    assert!(output.ends_with("0\r\n\r\n"), "the stream ends cleanly: {output}");
}

#[tokio::test]
async fn a_drain_finishes_running_requests_and_closes_the_rest() {
    let house = TestServer::new(FailingStores::Panicking);
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
    // A connection from before the drain and a new one: both get a response that closes them.
    let fresh = tokio::net::TcpStream::connect(address).await.unwrap();
    for mut stream in [kept, fresh] {
        stream.write_all(b"GET /v1 HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
        let mut reply = Vec::new();
        timeout(Duration::from_secs(20), stream.read_to_end(&mut reply)).await.expect("closed in time").unwrap();
        let reply = Reply::parse(&reply);
        assert_eq!((reply.status, reply.header("connection")), (404, Some("close")));
    }
    timeout(Duration::from_secs(20), serving).await.expect("the drain ends in time").unwrap();
    assert!(tokio::net::TcpStream::connect(address).await.is_err());
}

/// Collects what is logged on this thread.
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
async fn the_log_has_the_request_id_and_nothing_that_was_sent() {
    let lines = LogLines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt()
        .json()
        .flatten_event(true)
        .with_max_level(tracing::Level::TRACE)
        .with_writer(move || writer.clone())
        .finish();
    let _log = tracing::subscriber::set_default(subscriber);
    let house = TestServer::new(FailingStores::Broken);
    let headers = "Authorization: Bearer tell-tale\r\nCookie: tell-tale\r\nX-Request-Id: the-request\r\n";
    let body = r#"{"email": "tell-tale@example.com", "password": "tell-tale", "code": "tell-tale", "x": "tell-tale"}"#;
    let requests = async || {
        for operation in ["login", "confirm", "confirm-password", "forgot-password", "verify", "register"] {
            house.post(&format!("/v1/shop/email/{operation}?code=tell-tale"), headers, body).await;
        }
        house.post("/v1/shop/email/login", headers, r#"{"tell-tale": tell-tale"#).await;
        house.post("/tell-tale", headers, "tell-tale").await;
    };
    // `tracing` caches that nobody wants a log statement if another test reached it first, while this subscriber was
    // being set. So all statements are reached once, then the cache is rebuilt, and only then the lines count.
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
    // The cause of a 500 is logged once, with the request ID.
    let causes: Vec<_> = ours.iter().filter(|line| line["level"] == "ERROR" && line["cause"].is_string()).collect();
    assert_eq!(causes.len(), 4, "{causes:?}");
    assert_eq!(causes[0]["cause"], "postgres answered something unexpected: secret-host:5432 refused");
    assert_eq!(causes[0]["span"]["request_id"], "the-request");
}

/// A listener with one endpoint, which waits until it is notified.
#[derive(Clone, Default)]
struct SlowEndpoint {
    began: Arc<Notify>,
    may_end: Arc<Notify>,
    ended: Arc<Notify>,
}

impl Endpoints for SlowEndpoint {
    type Route = ();

    const LISTENER: &'static str = "slow";

    fn find(&self, _: &Method, _: &str) -> Lookup<()> {
        Lookup::Route { route: (), app: None, path_parameter: None }
    }

    fn name(_: ()) -> &'static str {
        "slow"
    }

    fn is_logged_at_debug(_: ()) -> bool {
        false
    }

    async fn call(&self, _: (), _: Option<Arc<App>>, _: InboundRequest) -> Result<Response, Problem> {
        self.began.notify_one();
        self.may_end.notified().await;
        self.ended.notify_one();
        response::json(&json!({}))
    }
}

async fn wait_for(what: &Notify) {
    timeout(Duration::from_secs(20), what.notified()).await.expect("the event happens in time");
}

#[tokio::test]
async fn a_request_finishes_even_if_its_client_disconnects() {
    let house = TestServer::new(FailingStores::Panicking);
    let slow = SlowEndpoint::default();
    let mut client = house.connect(house.service_for(slow.clone()));
    client.write_all(get("/", "").as_bytes()).await.unwrap();
    wait_for(&slow.began).await;
    drop(client);
    slow.may_end.notify_one();
    wait_for(&slow.ended).await;
}

#[tokio::test]
async fn a_client_that_disconnects_keeps_its_slot_while_its_requests_run() {
    let mut house = TestServer::new(FailingStores::Panicking);
    house.budgets = Budgets::new(256 << 20, 5);
    let slow = SlowEndpoint::default();
    let service = house.service_for(slow.clone());
    let mut client = house.connect(service.clone());
    client.write_all(&[PREFACE, &openapi_request_frame(1)].concat()).await.unwrap();
    wait_for(&slow.began).await;
    // How many more connections its address can open.
    let free_slots = || {
        let admit = || service.admit(service.acquire_slot().now_or_never()?, [192, 0, 2, 1].into()).ok();
        std::iter::from_fn(admit).collect::<Vec<_>>().len()
    };
    assert_eq!(free_slots(), 0, "HTTP/2 costs five slots");
    drop(client);
    wait_until("the connection has ended", || free_slots() > 0).await;
    for _ in 0..100 {
        tokio::task::yield_now().await;
        assert_eq!(free_slots(), 4, "its request still runs");
    }
    slow.may_end.notify_one();
    wait_until("its slot is free", || free_slots() == 5).await;
}

#[tokio::test]
async fn a_client_that_half_closed_gets_its_response() {
    let house = TestServer::new(FailingStores::Panicking);
    let slow = SlowEndpoint::default();
    let mut client = house.connect(house.service_for(slow.clone()));
    client.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    client.shutdown().await.unwrap();
    wait_for(&slow.began).await;
    slow.may_end.notify_one();
    let mut reply = Vec::new();
    timeout(Duration::from_secs(20), client.read_to_end(&mut reply)).await.expect("closed in time").unwrap();
    assert_eq!(Reply::parse(&reply).status, 200);
}

#[tokio::test]
async fn a_drain_waits_for_running_requests_up_to_its_limit() {
    let house = TestServer::new(FailingStores::Panicking);
    for answers in [true, false] {
        let slow = SlowEndpoint::default();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let limit = if answers { Duration::from_secs(20) } else { Duration::from_millis(50) };
        let drain = Drain::new(Duration::ZERO, limit);
        let service = house.service_for(slow.clone());
        let serving = tokio::spawn(super::serve(listener, service, drain.clone()));
        let mut client = tokio::net::TcpStream::connect(address).await.unwrap();
        client.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
        wait_for(&slow.began).await;
        drain.begin();
        drain.closing().cancelled().await;
        assert!(!serving.is_finished());
        if answers {
            slow.may_end.notify_one();
        }
        let mut reply = Vec::new();
        timeout(Duration::from_secs(20), client.read_to_end(&mut reply)).await.expect("closed in time").unwrap();
        assert_eq!(!reply.is_empty(), answers);
        if answers {
            assert_eq!(Reply::parse(&reply).header("connection"), Some("close"));
        }
        timeout(Duration::from_secs(20), serving).await.expect("the drain ends in time").unwrap();
    }
}

#[tokio::test]
async fn one_client_has_a_maximum_of_connections_and_others_are_served() {
    let mut house = TestServer::new(FailingStores::Panicking);
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
        let read = timeout(Duration::from_secs(20), stream.read(&mut reply)).await.expect("a response in time");
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
    // A connection that ends frees its slot.
    held.clear();
    timeout(Duration::from_secs(20), async { while !is_served(&mut connect(2).await).await {} }).await.unwrap();
}

#[tokio::test]
async fn http_2_needs_additional_slots() {
    let mut house = TestServer::new(FailingStores::Panicking);
    // HTTP/1 costs one slot, HTTP/2 five.
    house.budgets = Budgets::new(256 << 20, 9);
    let service = house.public();
    let mut first = house.connect(service.clone());
    let mut second = house.connect(service);
    first.write_all(PREFACE).await.unwrap();
    assert_eq!(frame(&mut first).await.0, 4, "SETTINGS");
    second.write_all(PREFACE).await.unwrap();
    let end = timeout(Duration::from_secs(20), frame_or_end(&mut second));
    assert_eq!(end.await.expect("closed in time"), None);
}

#[tokio::test]
async fn a_refusal_arrives_while_the_body_is_still_being_sent() {
    let house = TestServer::new(FailingStores::Panicking);
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
    timeout(Duration::from_secs(20), client.read_to_end(&mut reply)).await.expect("closed in time").unwrap();
    Reply::parse(&reply).assert_refused(413, "payload_too_large");
}
