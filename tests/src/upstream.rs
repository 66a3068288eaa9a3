//! A social provider whose every answer a test may script: it listens under the names of the real one, with a
//! certificate of its own authority, speaks as that one does, and remembers what it was asked.

pub mod shapes;

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

use crate::tls::{self, Authority, Tls};

pub use shapes::{PRESETS, Shape};

/// What a provider is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Place {
    Discovery,
    Keys,
    Token,
    UserInfo,
    Emails,
    TokenCheck,
    /// Nothing that this provider has.
    Elsewhere,
}

/// Who logs in there.
#[derive(Clone, Debug)]
pub struct Person {
    pub subject: String,
    /// The address, and whether the provider has verified it.
    pub email: Option<(String, bool)>,
    pub name: Option<String>,
}

/// The client as the provider knows it.
#[derive(Clone, Debug)]
pub struct Client {
    pub id: String,
    pub secret: Secret,
}

#[derive(Clone, Debug)]
pub enum Secret {
    Shared(String),
    /// Apple: the team, the key's id and the key in PEM.
    Key {
        team: String,
        id: String,
        pem: String,
    },
}

/// A request as it came.
#[derive(Clone, Debug)]
pub struct Seen {
    pub place: Place,
    pub method: Method,
    pub host: String,
    pub path: String,
    pub query: BTreeMap<String, String>,
    pub headers: HeaderMap,
    pub body: Bytes,
}

/// What is answered.
#[derive(Clone, Debug)]
pub struct Reply {
    pub status: StatusCode,
    pub headers: Vec<(&'static str, String)>,
    pub body: Body,
}

#[derive(Clone, Debug)]
pub enum Body {
    Whole(Bytes),
    /// So many octets of nothing.
    Endless(usize),
    /// The head, and then silence.
    Stalled,
    /// Not even a head.
    Silent,
}

/// What the browser brings back.
#[derive(Clone, Debug)]
pub struct Approved {
    pub code: String,
    pub state: String,
    pub redirect_uri: String,
}

/// A running provider.
pub struct Upstream {
    shape: &'static Shape,
    addr: SocketAddr,
    ca: String,
    state: Arc<Mutex<State>>,
    task: JoinHandle<()>,
}

/// A key of the provider.
#[derive(Clone)]
pub struct Signer {
    pub kid: String,
    key: EncodingKey,
    pub jwk: Value,
}

type Tweak = Arc<dyn Fn(&mut Value) + Send + Sync>;

struct State {
    shape: &'static Shape,
    client: Client,
    person: Person,
    scripted: HashMap<Place, Reply>,
    seen: Vec<Seen>,
    signer: Signer,
    published: Vec<Value>,
    tweak: Option<Tweak>,
    grants: HashMap<String, Granted>,
    tokens: HashMap<String, Issued>,
    /// Seconds since 1970, by which its tokens are dated; none: the machine's clock.
    now: Option<i64>,
}

/// What a code stands for.
#[derive(Clone)]
struct Granted {
    redirect_uri: String,
    challenge: Option<String>,
    nonce: Option<String>,
}

/// What an access token stands for.
#[derive(Clone)]
struct Issued {
    client: String,
    person: Person,
}

/// Flags by which a server finds nobody at the hosts of any provider: no test asks one that the public uses. Those of
/// [`Upstream::server_args`], which come later, win.
pub fn nobody_args() -> Vec<String> {
    let nobody = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
    PRESETS.iter().flat_map(Shape::hosts).map(|host| provider_host(host, nobody)).collect()
}

fn provider_host(host: &str, addr: SocketAddr) -> String {
    format!("--provider-host={host}={addr}")
}

// === impl Place ===

impl Place {
    pub const ALL: [Self; 7] =
        [Self::Discovery, Self::Keys, Self::Token, Self::UserInfo, Self::Emails, Self::TokenCheck, Self::Elsewhere];
}

// === impl Person ===

impl Person {
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

// === impl Seen ===

impl Seen {
    /// The body as a form.
    pub fn form(&self) -> BTreeMap<String, String> {
        form_urlencoded::parse(&self.body).into_owned().collect()
    }

    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }

    /// The token of `Authorization`, whatever its scheme is.
    fn credential(&self) -> &str {
        self.header("authorization").split_once(' ').map_or("", |(_, credential)| credential)
    }
}

// === impl Reply ===

impl Reply {
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
            body: Body::Whole(body.into()),
        }
    }

    pub fn redirect(to: &str) -> Self {
        Self { headers: vec![("location", to.to_owned())], ..Self::text(302, "text/html", "") }
    }

    pub fn html() -> Self {
        Self::text(200, "text/html; charset=utf-8", "<!doctype html><title>Sign in</title>")
    }

    pub fn huge(octets: usize) -> Self {
        Self { body: Body::Endless(octets), ..Self::text(200, "application/json", "") }
    }

    pub fn stalled() -> Self {
        Self { body: Body::Stalled, ..Self::text(200, "application/json", "") }
    }

    pub fn silent() -> Self {
        Self { body: Body::Silent, ..Self::text(200, "application/json", "") }
    }
}

// === impl Signer ===

impl Signer {
    /// A new ES256 key.
    pub fn new(kid: &str) -> Self {
        let pem = KeyPair::generate().expect("a key is made").serialize_pem();
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

// === impl Upstream ===

impl Upstream {
    /// Speaks as the preset's provider does, and knows one client.
    pub async fn start(preset: &str, client: Client) -> Result<Self> {
        let shape = PRESETS.iter().find(|shape| shape.preset == preset).context("a preset that is known here")?;
        let authority = Authority::new()?;
        let names: Vec<&str> = shape.hosts();
        let identity = authority.server(&names)?;
        let tls = Tls { ca: authority.certificate().to_owned(), certificate: identity.certificate, key: identity.key };
        tls::install_crypto_provider();
        let acceptor = TlsAcceptor::from(tls.server_config()?);
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let addr = listener.local_addr()?;
        let signer = Signer::new("k1");
        let state = Arc::new(Mutex::new(State {
            shape,
            client,
            person: Person::new("1").verified("ada@example.com").named("Ada Lovelace"),
            scripted: HashMap::new(),
            seen: Vec::new(),
            published: vec![signer.jwk.clone()],
            signer,
            tweak: None,
            grants: HashMap::new(),
            tokens: HashMap::new(),
            now: None,
        }));
        let task = tokio::spawn(serve(listener, acceptor, Arc::clone(&state)));
        Ok(Self { shape, addr, ca: tls.ca, state, task })
    }

    pub fn shape(&self) -> &'static Shape {
        self.shape
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Its authority's certificate, PEM.
    pub fn ca(&self) -> &str {
        &self.ca
    }

    /// Under which names it is asked, and where it stands.
    pub fn hosts(&self) -> HashMap<String, SocketAddr> {
        self.shape.hosts().into_iter().map(|host| (host.to_owned(), self.addr)).collect()
    }

    /// Flags by which a server finds it; its authority must be trusted as well.
    pub fn server_args(&self) -> Vec<String> {
        self.shape.hosts().into_iter().map(|host| provider_host(host, self.addr)).collect()
    }

    /// Who logs in from now on.
    pub fn person(&self, person: Person) {
        self.state().person = person;
    }

    /// The client as it is known there now.
    pub fn known_client(&self) -> Client {
        self.state().client.clone()
    }

    /// Another client, or another secret.
    pub fn client(&self, client: Client) {
        self.state().client = client;
    }

    /// Answers this, whatever it is asked there.
    pub fn script(&self, place: Place, reply: Reply) {
        self.state().scripted.insert(place, reply);
    }

    /// Speaks as its provider again.
    pub fn unscript(&self) {
        let mut state = self.state();
        state.scripted.clear();
        state.tweak = None;
    }

    /// Changes the claims of every ID token before it is signed.
    pub fn tweak(&self, tweak: impl Fn(&mut Value) + Send + Sync + 'static) {
        self.state().tweak = Some(Arc::new(tweak));
    }

    /// The clock that its tokens are dated by.
    pub fn at(&self, seconds: i64) {
        self.state().now = Some(seconds);
    }

    /// Signs with another key from now on, and publishes both or, where not, the old one alone.
    pub fn rotate(&self, kid: &str, publish: bool) {
        let signer = Signer::new(kid);
        let mut state = self.state();
        if publish {
            state.published.push(signer.jwk.clone());
        }
        state.signer = signer;
    }

    /// Publishes the key that it signs with.
    pub fn publish(&self) {
        let mut state = self.state();
        let jwk = state.signer.jwk.clone();
        state.published.push(jwk);
    }

    pub fn signer(&self) -> Signer {
        self.state().signer.clone()
    }

    /// What it was asked so far.
    pub fn seen(&self) -> Vec<Seen> {
        self.state().seen.clone()
    }

    /// What it was asked at one place.
    pub fn seen_at(&self, place: Place) -> Vec<Seen> {
        self.seen().into_iter().filter(|seen| seen.place == place).collect()
    }

    pub fn forget(&self) {
        self.state().seen.clear();
    }

    /// The person agrees to what this authorization address asks for; what they bring back is for its `redirect_uri`.
    pub fn approve(&self, authorization: &str) -> Approved {
        let url = Url::parse(authorization).expect("an authorization address");
        let query: HashMap<String, String> = url.query_pairs().into_owned().collect();
        let value = |name: &str| query.get(name).cloned();
        let expected = Url::parse(self.shape.authorization).expect("an address");
        assert_eq!((url.host_str(), url.path()), (expected.host_str(), expected.path()), "{authorization}");
        // Facebook drops the challenge of who does not ask for an ID token too.
        let scopes = value("scope").unwrap_or_default();
        let keeps_challenge =
            self.shape.pkce && (self.shape.preset != "facebook" || scopes.split(' ').any(|scope| scope == "openid"));
        let mut state = self.state();
        assert_eq!(value("client_id").as_deref(), Some(state.client.id.as_str()));
        assert_eq!(value("response_type").as_deref(), Some("code"));
        let granted = Granted {
            redirect_uri: value("redirect_uri").expect("a redirect_uri"),
            challenge: value("code_challenge").filter(|_| keeps_challenge),
            nonce: value("nonce"),
        };
        let code = format!("code-{:032x}", rand::random::<u128>());
        let approved = Approved {
            code: code.clone(),
            state: value("state").expect("a state"),
            redirect_uri: granted.redirect_uri.clone(),
        };
        state.grants.insert(code, granted);
        approved
    }

    /// An access token of the person, issued for that client.
    pub fn access_token(&self, client: &str) -> String {
        self.state().issue(client)
    }

    /// An ID token of the person, issued for that client; none where the provider has no such thing.
    pub fn id_token(&self, client: &str, nonce: Option<&str>) -> Option<String> {
        self.state().id_token(client, nonce, None)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl Drop for Upstream {
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

    fn issue(&mut self, client: &str) -> String {
        let token = format!("token-{:032x}", rand::random::<u128>());
        self.tokens.insert(token.clone(), Issued { client: client.to_owned(), person: self.person.clone() });
        token
    }

    fn id_token(&self, client: &str, nonce: Option<&str>, access_token: Option<&str>) -> Option<String> {
        let issuer = self.shape.issuer?;
        let now = self.now();
        let mut claims = json!({ "iss": issuer, "aud": client, "iat": now, "exp": now + 300 });
        shapes::add_claims(self.shape, &self.person, &mut claims);
        if let Some(nonce) = nonce.filter(|_| self.shape.nonce) {
            claims["nonce"] = json!(nonce);
        }
        if let Some(token) = access_token {
            let hash = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, token.as_bytes());
            claims["at_hash"] = json!(URL_SAFE_NO_PAD.encode(&hash.as_ref()[..16]));
        }
        if let Some(tweak) = &self.tweak {
            tweak(&mut claims);
        }
        Some(self.signer.sign(&claims))
    }

    fn reply(&mut self, seen: &Seen) -> Reply {
        if let Some(scripted) = self.scripted.get(&seen.place) {
            return scripted.clone();
        }
        match seen.place {
            Place::Discovery => Reply::json(&self.shape.discovery()),
            Place::Keys => Reply::json(&json!({ "keys": self.published })),
            Place::Token => self.token(seen),
            Place::UserInfo => match self.owner(seen) {
                Some(issued) => Reply::json(&shapes::user_info(self.shape, &issued.person)),
                None => Reply::status(401, &json!({ "error": "invalid_token" })),
            },
            Place::Emails => match self.owner(seen) {
                Some(issued) => Reply::json(&shapes::emails(self.shape, &issued.person)),
                None => Reply::status(401, &json!({ "message": "Bad credentials" })),
            },
            Place::TokenCheck => shapes::token_check(self, seen),
            Place::Elsewhere => Reply::status(404, &json!({ "error": "not_found" })),
        }
    }

    fn owner(&self, seen: &Seen) -> Option<&Issued> {
        self.tokens.get(seen.credential())
    }

    /// RFC 6749, 4.1.3 and 5, in the provider's own words.
    fn token(&mut self, seen: &Seen) -> Reply {
        let form = seen.form();
        let value = |name: &str| form.get(name).map(String::as_str).unwrap_or_default();
        if !self.is_client(seen) {
            return shapes::refuse(self.shape, shapes::Refusal::Client);
        }
        let granted = self.grants.remove(value("code"));
        let Some(granted) = granted.filter(|granted| {
            value("grant_type") == "authorization_code" && value("redirect_uri") == granted.redirect_uri
        }) else {
            return shapes::refuse(self.shape, shapes::Refusal::Code);
        };
        let proven = match (&granted.challenge, form.get("code_verifier")) {
            (None, None) => true,
            (Some(challenge), Some(verifier)) => {
                let hash = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, verifier.as_bytes());
                *challenge == URL_SAFE_NO_PAD.encode(hash.as_ref())
            }
            (None, Some(_)) | (Some(_), None) => false,
        };
        if !proven {
            return shapes::refuse(self.shape, shapes::Refusal::Code);
        }
        let client = self.client.id.clone();
        let access_token = self.issue(&client);
        let id_token = self.id_token(&client, granted.nonce.as_deref(), Some(&access_token));
        Reply::json(&shapes::tokens(self.shape, &access_token, id_token.as_deref()))
    }

    /// Whether the client showed itself the way that this provider wants, and with its secret.
    fn is_client(&self, seen: &Seen) -> bool {
        let form = seen.form();
        let (id, secret) = match self.shape.authentication {
            shapes::Authentication::Basic => match shapes::basic(seen) {
                Some(pair) => pair,
                None => return false,
            },
            shapes::Authentication::Post => {
                let value = |name: &str| form.get(name).cloned().unwrap_or_default();
                (value("client_id"), value("client_secret"))
            }
        };
        id == self.client.id && self.client.secret.is(&id, &secret, self.now())
    }
}

// === impl Secret ===

impl Secret {
    fn is(&self, client: &str, shown: &str, now: i64) -> bool {
        match self {
            Self::Shared(secret) => secret == shown,
            Self::Key { team, id, pem } => {
                let key = EncodingKey::from_ec_pem(pem.as_bytes()).expect("a key in PEM");
                let jwk = Jwk::from_encoding_key(&key, Algorithm::ES256).expect("a public key");
                let key = jsonwebtoken::DecodingKey::from_jwk(&jwk).expect("a public key");
                let mut validation = jsonwebtoken::Validation::new(Algorithm::ES256);
                validation.set_audience(&["https://appleid.apple.com"]);
                validation.set_issuer(&[team]);
                validation.sub = Some(client.to_owned());
                validation.validate_exp = false;
                jsonwebtoken::decode::<Value>(shown, &key, &validation).is_ok_and(|token| {
                    let time = |name: &str| token.claims[name].as_i64().unwrap_or_default();
                    let (from, until) = (time("iat"), time("exp"));
                    token.header.kid.as_ref() == Some(id)
                        && (from - 60..until).contains(&now)
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
            let service = service_fn(|request| answer(&state, request));
            let connection = hyper::server::conn::http1::Builder::new();
            // A client that goes away in the middle is what some tests are about.
            drop(connection.serve_connection(TokioIo::new(stream), service).await);
        });
    }
}

async fn answer(
    state: &Mutex<State>,
    request: Request<Incoming>,
) -> Result<Response<UnsyncBoxBody<Bytes, Infallible>>, hyper::Error> {
    let (head, body) = request.into_parts();
    let body = body.collect().await?.to_bytes();
    let host = head.headers.get("host").and_then(|host| host.to_str().ok()).unwrap_or_default();
    let host = host.split(':').next().unwrap_or_default().to_owned();
    let query = head.uri.query().unwrap_or_default();
    let mut seen = Seen {
        place: Place::Elsewhere,
        method: head.method,
        path: head.uri.path().to_owned(),
        query: form_urlencoded::parse(query.as_bytes()).into_owned().collect(),
        headers: head.headers,
        body,
        host,
    };
    let reply = {
        let mut state = lock(state);
        seen.place = state.shape.place(&seen.host, &seen.path, &state.client.id);
        let reply = state.reply(&seen);
        state.seen.push(seen);
        reply
    };
    let body = match reply.body {
        Body::Whole(bytes) => Full::new(bytes).boxed_unsync(),
        Body::Endless(octets) => {
            const PIECE: usize = 64 * 1024;
            let pieces = (0..octets.div_ceil(PIECE)).map(|_| Ok(Frame::data(Bytes::from_static(&[b' '; PIECE]))));
            StreamBody::new(stream::iter(pieces)).boxed_unsync()
        }
        Body::Stalled => StreamBody::new(stream::pending()).boxed_unsync(),
        Body::Silent => {
            tokio::time::sleep(Duration::from_secs(600)).await;
            Full::default().boxed_unsync()
        }
    };
    let mut response = Response::new(body);
    *response.status_mut() = reply.status;
    for (name, value) in reply.headers {
        response.headers_mut().insert(name, value.parse().expect("a header"));
    }
    Ok(response)
}
