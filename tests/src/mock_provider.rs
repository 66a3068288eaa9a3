//! A social provider with the host names of a real provider, and with a certificate of its own CA. It responds like the
//! real provider unless a test scripts its responses, and it records the requests.

pub mod profiles;

use std::{
    collections::{BTreeMap, HashMap},
    convert::Infallible,
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyhow::{Context, Result};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use bytes::Bytes;
use futures::stream;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::{
    body::{Frame, Incoming},
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use jsonwebtoken::{Algorithm, EncodingKey, Header, jwk::Jwk};
use rcgen::KeyPair;
use serde_json::{Value, json};
use tokio::{net::TcpListener, task::JoinHandle};
use tokio_rustls::TlsAcceptor;
use url::{Url, form_urlencoded};

use crate::tls::{self, CertificateAuthority, ServerTls};

pub use profiles::{PRESETS, ProviderProfile};

/// The endpoints of a provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ProviderEndpoint {
    Discovery,
    Keys,
    Token,
    UserInfo,
    Emails,
    TokenCheck,
    /// The request is for no endpoint of this provider.
    Unknown,
}

/// The user who logs in.
#[derive(Clone, Debug)]
pub struct ProviderUser {
    pub subject: String,
    /// The email address, and whether the provider has verified it.
    pub email: Option<(String, bool)>,
    pub name: Option<String>,
}

/// The client as it is registered at the provider.
#[derive(Clone, Debug)]
pub struct RegisteredClient {
    pub id: String,
    pub secret: ClientSecret,
}

#[derive(Clone, Debug)]
pub enum ClientSecret {
    Shared(String),
    /// Apple: team id, key id, and the private key in PEM.
    Key {
        team: String,
        id: String,
        pem: String,
    },
}

/// A recorded request.
#[derive(Clone, Debug)]
pub struct RecordedRequest {
    pub endpoint: ProviderEndpoint,
    pub method: Method,
    pub host: String,
    pub path: String,
    pub query: BTreeMap<String, String>,
    pub headers: HeaderMap,
    pub body: Bytes,
}

/// A response of the provider.
#[derive(Clone, Debug)]
pub struct ScriptedResponse {
    pub status: StatusCode,
    pub headers: Vec<(&'static str, String)>,
    pub body: ResponseBody,
}

#[derive(Clone, Debug)]
pub enum ResponseBody {
    Complete(Bytes),
    /// A body of at least this number of spaces, in chunks of 64 KiB.
    Filler(usize),
    /// Sends the head of the response, and then nothing.
    Stalled,
    /// No response for ten minutes, which is longer than any test waits.
    Silent,
}

/// The parameters with which the provider redirects the browser back.
#[derive(Clone, Debug)]
pub struct AuthorizationResponse {
    pub code: String,
    pub state: String,
    pub redirect_uri: String,
}

/// A running provider.
pub struct MockProvider {
    profile: &'static ProviderProfile,
    addr: SocketAddr,
    ca: String,
    state: Arc<Mutex<State>>,
    task: JoinHandle<()>,
}

/// A signing key of the provider.
#[derive(Clone)]
pub struct SigningKey {
    pub kid: String,
    key: EncodingKey,
    pub jwk: Value,
}

type ClaimsEdit = Arc<dyn Fn(&mut Value) + Send + Sync>;

struct State {
    profile: &'static ProviderProfile,
    client: RegisteredClient,
    user: ProviderUser,
    scripted: HashMap<ProviderEndpoint, ScriptedResponse>,
    requests: Vec<RecordedRequest>,
    signer: SigningKey,
    published_keys: Vec<Value>,
    edit_claims: Option<ClaimsEdit>,
    grants: HashMap<String, GrantedCode>,
    tokens: HashMap<String, IssuedToken>,
    /// The provider's time, as Unix time in seconds; `None` uses the machine's clock.
    now: Option<i64>,
}

/// The authorization request for which a code was issued.
#[derive(Clone)]
struct GrantedCode {
    redirect_uri: String,
    challenge: Option<String>,
    nonce: Option<String>,
}

/// The client and user for which an access token was issued.
#[derive(Clone)]
struct IssuedToken {
    client: String,
    person: ProviderUser,
}

/// Server flags that resolve the host names of all providers to a closed port, so that no test reaches a real provider.
/// Later flags, from [`MockProvider::server_args`], override these.
pub fn unreachable_provider_args() -> Vec<String> {
    let closed_port = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
    PRESETS.iter().flat_map(ProviderProfile::hosts).map(|host| provider_host_flag(host, closed_port)).collect()
}

fn provider_host_flag(host: &str, addr: SocketAddr) -> String {
    format!("--provider-host={host}={addr}")
}

// === impl ProviderEndpoint ===

impl ProviderEndpoint {
    pub const ALL: [Self; 7] =
        [Self::Discovery, Self::Keys, Self::Token, Self::UserInfo, Self::Emails, Self::TokenCheck, Self::Unknown];
}

// === impl ProviderUser ===

impl ProviderUser {
    pub fn new(subject: &str) -> Self {
        Self { subject: subject.to_owned(), email: None, name: None }
    }

    pub fn verified(mut self, email: &str) -> Self {
        self.email = Some((email.to_owned(), true));
        self
    }

    pub fn unverified(mut self, email: &str) -> Self {
        self.email = Some((email.to_owned(), false));
        self
    }

    pub fn named(mut self, name: &str) -> Self {
        self.name = Some(name.to_owned());
        self
    }
}

// === impl RecordedRequest ===

impl RecordedRequest {
    /// The body, parsed as a form.
    pub fn form(&self) -> BTreeMap<String, String> {
        form_urlencoded::parse(&self.body).into_owned().collect()
    }

    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }

    /// The credentials of the `Authorization` header, of any scheme.
    fn credential(&self) -> &str {
        self.header("authorization").split_once(' ').map_or("", |(_, credential)| credential)
    }
}

// === impl ScriptedResponse ===

impl ScriptedResponse {
    pub fn json(value: &Value) -> Self {
        Self::status(200, value)
    }

    pub fn status(status: u16, value: &Value) -> Self {
        Self::text(status, "application/json", value.to_string())
    }

    pub fn text(status: u16, kind: &str, body: impl Into<Bytes>) -> Self {
        Self {
            status: StatusCode::from_u16(status).expect("a status"),
            headers: vec![("content-type", kind.to_owned())],
            body: ResponseBody::Complete(body.into()),
        }
    }

    pub fn redirect(to: &str) -> Self {
        Self { headers: vec![("location", to.to_owned())], ..Self::text(302, "text/html", "") }
    }

    pub fn html() -> Self {
        Self::text(200, "text/html; charset=utf-8", "<!doctype html><title>Sign in</title>")
    }

    pub fn huge(bytes: usize) -> Self {
        Self { body: ResponseBody::Filler(bytes), ..Self::text(200, "application/json", "") }
    }

    pub fn stalled() -> Self {
        Self { body: ResponseBody::Stalled, ..Self::text(200, "application/json", "") }
    }

    pub fn silent() -> Self {
        Self { body: ResponseBody::Silent, ..Self::text(200, "application/json", "") }
    }
}

// === impl SigningKey ===

impl SigningKey {
    /// A new ES256 key.
    pub fn new(kid: &str) -> Self {
        let pem = KeyPair::generate().expect("a key is generated").serialize_pem();
        let key = EncodingKey::from_ec_pem(pem.as_bytes()).expect("a key in PEM");
        let jwk = Jwk::from_encoding_key(&key, Algorithm::ES256).expect("a public key");
        let mut jwk = serde_json::to_value(jwk).expect("a key is JSON");
        jwk["kid"] = json!(kid);
        jwk["use"] = json!("sig");
        jwk["alg"] = json!("ES256");
        Self { kid: kid.to_owned(), key, jwk }
    }

    pub fn sign(&self, claims: &Value) -> String {
        let header = Header { kid: Some(self.kid.clone()), ..Header::new(Algorithm::ES256) };
        jsonwebtoken::encode(&header, claims, &self.key).expect("a token is signed")
    }
}

// === impl MockProvider ===

impl MockProvider {
    /// Starts the provider of a preset, with one registered client.
    pub async fn start(preset: &str, client: RegisteredClient) -> Result<Self> {
        let profile = PRESETS.iter().find(|profile| profile.preset == preset).context("a known preset")?;
        let authority = CertificateAuthority::new()?;
        let names: Vec<&str> = profile.hosts();
        let identity = authority.server(&names)?;
        let tls =
            ServerTls { ca: authority.certificate().to_owned(), certificate: identity.certificate, key: identity.key };
        tls::install_crypto_provider();
        let acceptor = TlsAcceptor::from(tls.server_config()?);
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let addr = listener.local_addr()?;
        let signer = SigningKey::new("k1");
        let state = Arc::new(Mutex::new(State {
            profile,
            client,
            user: ProviderUser::new("1").verified("ada@example.com").named("Ada Lovelace"),
            scripted: HashMap::new(),
            requests: Vec::new(),
            published_keys: vec![signer.jwk.clone()],
            signer,
            edit_claims: None,
            grants: HashMap::new(),
            tokens: HashMap::new(),
            now: None,
        }));
        let task = tokio::spawn(serve(listener, acceptor, Arc::clone(&state)));
        Ok(Self { profile, addr, ca: tls.ca, state, task })
    }

    pub fn profile(&self) -> &'static ProviderProfile {
        self.profile
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The CA certificate, PEM.
    pub fn ca(&self) -> &str {
        &self.ca
    }

    /// The provider's host names, each with the socket address of this process.
    pub fn hosts(&self) -> HashMap<String, SocketAddr> {
        self.profile.hosts().into_iter().map(|host| (host.to_owned(), self.addr)).collect()
    }

    /// Server flags that resolve the provider's host names to this process. The server must also trust the CA.
    pub fn server_args(&self) -> Vec<String> {
        self.profile.hosts().into_iter().map(|host| provider_host_flag(host, self.addr)).collect()
    }

    /// Sets the user who logs in.
    pub fn set_user(&self, person: ProviderUser) {
        self.state().user = person;
    }

    /// The registered client.
    pub fn known_client(&self) -> RegisteredClient {
        self.state().client.clone()
    }

    /// Replaces the registered client or its secret.
    pub fn set_client(&self, client: RegisteredClient) {
        self.state().client = client;
    }

    /// Sends this response to every request to this endpoint from now on.
    pub fn script(&self, endpoint: ProviderEndpoint, response: ScriptedResponse) {
        self.state().scripted.insert(endpoint, response);
    }

    /// Removes all scripted responses and claim changes.
    pub fn clear_scripts(&self) {
        let mut state = self.state();
        state.scripted.clear();
        state.edit_claims = None;
    }

    /// Changes the claims of every ID token before it is signed.
    pub fn edit_claims(&self, edit: impl Fn(&mut Value) + Send + Sync + 'static) {
        self.state().edit_claims = Some(Arc::new(edit));
    }

    /// Stops the provider's clock at this Unix time.
    pub fn set_time(&self, seconds: i64) {
        self.state().now = Some(seconds);
    }

    /// Signs with a new key from now on. Publishes the key if `publish` is set.
    pub fn rotate_key(&self, kid: &str, publish: bool) {
        let signer = SigningKey::new(kid);
        let mut state = self.state();
        if publish {
            state.published_keys.push(signer.jwk.clone());
        }
        state.signer = signer;
    }

    /// Publishes the current signing key.
    pub fn publish_key(&self) {
        let mut state = self.state();
        let jwk = state.signer.jwk.clone();
        state.published_keys.push(jwk);
    }

    pub fn signing_key(&self) -> SigningKey {
        self.state().signer.clone()
    }

    /// The requests so far.
    pub fn requests(&self) -> Vec<RecordedRequest> {
        self.state().requests.clone()
    }

    /// The requests to one endpoint so far.
    pub fn requests_to(&self, endpoint: ProviderEndpoint) -> Vec<RecordedRequest> {
        self.requests().into_iter().filter(|request| request.endpoint == endpoint).collect()
    }

    pub fn clear_requests(&self) {
        self.state().requests.clear();
    }

    /// Grants this authorization request as the user. Returns the parameters that the browser takes to the
    /// `redirect_uri`.
    pub fn authorize(&self, authorization: &str) -> AuthorizationResponse {
        let url = Url::parse(authorization).expect("an authorization address");
        let query: HashMap<String, String> = url.query_pairs().into_owned().collect();
        let value = |name: &str| query.get(name).cloned();
        let expected = Url::parse(self.profile.authorization).expect("an address");
        assert_eq!((url.host_str(), url.path()), (expected.host_str(), expected.path()), "{authorization}");
        // Facebook ignores the PKCE challenge unless the request also asks for an ID token.
        let scopes = value("scope").unwrap_or_default();
        let keeps_challenge = self.profile.pkce
            && (self.profile.preset != "facebook" || scopes.split(' ').any(|scope| scope == "openid"));
        let mut state = self.state();
        assert_eq!(value("client_id").as_deref(), Some(state.client.id.as_str()));
        assert_eq!(value("response_type").as_deref(), Some("code"));
        let granted = GrantedCode {
            redirect_uri: value("redirect_uri").expect("a redirect_uri"),
            challenge: value("code_challenge").filter(|_| keeps_challenge),
            nonce: value("nonce"),
        };
        let code = format!("code-{:032x}", rand::random::<u128>());
        let approved = AuthorizationResponse {
            code: code.clone(),
            state: value("state").expect("a state"),
            redirect_uri: granted.redirect_uri.clone(),
        };
        state.grants.insert(code, granted);
        approved
    }

    /// An access token of the user, issued to this client.
    pub fn access_token(&self, client: &str) -> String {
        self.state().issue_token(client)
    }

    /// An ID token of the user, issued to this client; `None` if the provider has no ID tokens.
    pub fn id_token(&self, client: &str, nonce: Option<&str>) -> Option<String> {
        self.state().id_token(client, nonce, None)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl Drop for MockProvider {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

// === impl State ===

impl State {
    fn now(&self) -> i64 {
        self.now.unwrap_or_else(|| i64::try_from(jsonwebtoken::get_current_timestamp()).expect("seconds since 1970"))
    }

    fn issue_token(&mut self, client: &str) -> String {
        let token = format!("token-{:032x}", rand::random::<u128>());
        self.tokens.insert(token.clone(), IssuedToken { client: client.to_owned(), person: self.user.clone() });
        token
    }

    fn id_token(&self, client: &str, nonce: Option<&str>, access_token: Option<&str>) -> Option<String> {
        let issuer = self.profile.issuer?;
        let now = self.now();
        let mut claims = json!({ "iss": issuer, "aud": client, "iat": now, "exp": now + 300 });
        profiles::add_claims(self.profile, &self.user, &mut claims);
        if let Some(nonce) = nonce.filter(|_| self.profile.nonce) {
            claims["nonce"] = json!(nonce);
        }
        if let Some(token) = access_token {
            let hash = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, token.as_bytes());
            claims["at_hash"] = json!(URL_SAFE_NO_PAD.encode(&hash.as_ref()[..16]));
        }
        if let Some(edit) = &self.edit_claims {
            edit(&mut claims);
        }
        Some(self.signer.sign(&claims))
    }

    fn respond(&mut self, request: &RecordedRequest) -> ScriptedResponse {
        if let Some(scripted) = self.scripted.get(&request.endpoint) {
            return scripted.clone();
        }
        match request.endpoint {
            ProviderEndpoint::Discovery => ScriptedResponse::json(&self.profile.discovery()),
            ProviderEndpoint::Keys => ScriptedResponse::json(&json!({ "keys": self.published_keys })),
            ProviderEndpoint::Token => self.token_endpoint(request),
            ProviderEndpoint::UserInfo => match self.token_owner(request) {
                Some(issued) => ScriptedResponse::json(&profiles::user_info(self.profile, &issued.person)),
                None => ScriptedResponse::status(401, &json!({ "error": "invalid_token" })),
            },
            ProviderEndpoint::Emails => match self.token_owner(request) {
                Some(issued) => ScriptedResponse::json(&profiles::emails(self.profile, &issued.person)),
                None => ScriptedResponse::status(401, &json!({ "message": "Bad credentials" })),
            },
            ProviderEndpoint::TokenCheck => profiles::token_check_response(self, request),
            ProviderEndpoint::Unknown => ScriptedResponse::status(404, &json!({ "error": "not_found" })),
        }
    }

    fn token_owner(&self, request: &RecordedRequest) -> Option<&IssuedToken> {
        self.tokens.get(request.credential())
    }

    /// The token endpoint (RFC 6749, 4.1.3 and 5), with the provider's own errors.
    fn token_endpoint(&mut self, request: &RecordedRequest) -> ScriptedResponse {
        let form = request.form();
        let value = |name: &str| form.get(name).map(String::as_str).unwrap_or_default();
        if !self.is_client(request) {
            return profiles::token_error(self.profile, profiles::TokenError::Client);
        }
        let granted = self.grants.remove(value("code"));
        let Some(granted) = granted.filter(|granted| {
            value("grant_type") == "authorization_code" && value("redirect_uri") == granted.redirect_uri
        }) else {
            return profiles::token_error(self.profile, profiles::TokenError::Code);
        };
        let has_right_verifier = match (&granted.challenge, form.get("code_verifier")) {
            (None, None) => true,
            (Some(challenge), Some(verifier)) => {
                let hash = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, verifier.as_bytes());
                *challenge == URL_SAFE_NO_PAD.encode(hash.as_ref())
            }
            (None, Some(_)) | (Some(_), None) => false,
        };
        if !has_right_verifier {
            return profiles::token_error(self.profile, profiles::TokenError::Code);
        }
        let client = self.client.id.clone();
        let access_token = self.issue_token(&client);
        let id_token = self.id_token(&client, granted.nonce.as_deref(), Some(&access_token));
        ScriptedResponse::json(&profiles::token_response(self.profile, &access_token, id_token.as_deref()))
    }

    /// Whether the client authenticated with the right secret, by the method that this provider requires.
    fn is_client(&self, request: &RecordedRequest) -> bool {
        let form = request.form();
        let (id, secret) = match self.profile.authentication {
            profiles::Authentication::Basic => match profiles::basic_credentials(request) {
                Some(pair) => pair,
                None => return false,
            },
            profiles::Authentication::Post => {
                let value = |name: &str| form.get(name).cloned().unwrap_or_default();
                (value("client_id"), value("client_secret"))
            }
        };
        id == self.client.id && self.client.secret.matches(&id, &secret, self.now())
    }
}

// === impl ClientSecret ===

impl ClientSecret {
    fn matches(&self, client: &str, presented: &str, now: i64) -> bool {
        match self {
            Self::Shared(secret) => secret == presented,
            Self::Key { team, id, pem } => {
                let key = EncodingKey::from_ec_pem(pem.as_bytes()).expect("a key in PEM");
                let jwk = Jwk::from_encoding_key(&key, Algorithm::ES256).expect("a public key");
                let key = jsonwebtoken::DecodingKey::from_jwk(&jwk).expect("a public key");
                let mut validation = jsonwebtoken::Validation::new(Algorithm::ES256);
                validation.set_audience(&["https://appleid.apple.com"]);
                validation.set_issuer(&[team]);
                validation.sub = Some(client.to_owned());
                validation.validate_exp = false;
                jsonwebtoken::decode::<Value>(presented, &key, &validation).is_ok_and(|token| {
                    let time = |name: &str| token.claims[name].as_i64().unwrap_or_default();
                    let (from, until) = (time("iat"), time("exp"));
                    token.header.kid.as_ref() == Some(id)
                        // Tolerates clocks that differ by a minute.
                        && (from - 60..until).contains(&now)
                        // Apple's maximum lifetime of a client secret, six months.
                        && until - from <= 15_777_000
                })
            }
        }
    }
}

async fn serve(listener: TcpListener, acceptor: TlsAcceptor, state: Arc<Mutex<State>>) {
    while let Ok((stream, _)) = listener.accept().await {
        let (acceptor, state) = (acceptor.clone(), Arc::clone(&state));
        tokio::spawn(async move {
            let Ok(stream) = acceptor.accept(stream).await else { return };
            let service = service_fn(|request| handle(&state, request));
            let connection = hyper::server::conn::http1::Builder::new();
            // A closed connection is not an error, because some tests make the client disconnect.
            drop(connection.serve_connection(TokioIo::new(stream), service).await);
        });
    }
}

async fn handle(
    state: &Mutex<State>,
    request: Request<Incoming>,
) -> Result<Response<UnsyncBoxBody<Bytes, Infallible>>, hyper::Error> {
    let (head, body) = request.into_parts();
    let body = body.collect().await?.to_bytes();
    let host = head.headers.get("host").and_then(|host| host.to_str().ok()).unwrap_or_default();
    let host = host.split(':').next().unwrap_or_default().to_owned();
    let query = head.uri.query().unwrap_or_default();
    let mut recorded = RecordedRequest {
        endpoint: ProviderEndpoint::Unknown,
        method: head.method,
        path: head.uri.path().to_owned(),
        query: form_urlencoded::parse(query.as_bytes()).into_owned().collect(),
        headers: head.headers,
        body,
        host,
    };
    let scripted = {
        let mut state = lock(state);
        recorded.endpoint = state.profile.endpoint(&recorded.host, &recorded.path, &state.client.id);
        let scripted = state.respond(&recorded);
        state.requests.push(recorded);
        scripted
    };
    let body = match scripted.body {
        ResponseBody::Complete(bytes) => Full::new(bytes).boxed_unsync(),
        ResponseBody::Filler(bytes) => {
            const PIECE: usize = 64 * 1024;
            let pieces = (0..bytes.div_ceil(PIECE)).map(|_| Ok(Frame::data(Bytes::from_static(&[b' '; PIECE]))));
            StreamBody::new(stream::iter(pieces)).boxed_unsync()
        }
        ResponseBody::Stalled => StreamBody::new(stream::pending()).boxed_unsync(),
        ResponseBody::Silent => {
            tokio::time::sleep(Duration::from_secs(600)).await;
            Full::default().boxed_unsync()
        }
    };
    let mut response = Response::new(body);
    *response.status_mut() = scripted.status;
    for (name, value) in scripted.headers {
        response.headers_mut().insert(name, value.parse().expect("a header"));
    }
    Ok(response)
}
