//! A small OAuth 2.0 provider with a script: it vouches for whom the test says.

use std::{
    collections::HashMap,
    convert::Infallible,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use aws_lc_rs::digest::{SHA256, digest};
use base64::{
    Engine,
    engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD},
};
use bytes::Bytes;
use http::{Request, Response, StatusCode, header::AUTHORIZATION};
use http_body_util::{BodyExt, Full};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use latchkey_tests::builders::Provider;
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::watch, task::JoinHandle};
use url::Url;

/// Somebody with an account at the provider.
#[derive(Clone, Debug)]
pub(crate) struct Person {
    pub(crate) subject: String,
    pub(crate) email: Option<String>,
    pub(crate) verified: bool,
    pub(crate) name: Option<String>,
}

/// The provider. It ends when this value is dropped.
pub(crate) struct Upstream {
    addr: SocketAddr,
    script: Arc<Mutex<Script>>,
    /// The subject that waits at the token endpoint.
    held: watch::Sender<Option<String>>,
    serving: JoinHandle<()>,
}

#[derive(Default)]
struct Script {
    /// Who logged in, by the code that the browser carries.
    codes: HashMap<String, Login>,
    /// By access token.
    people: HashMap<String, Person>,
    /// Whether every answer is 500.
    broken: bool,
    /// How often a code of ours was exchanged, or tried to be.
    exchanges: usize,
    /// What is answered at a path, whatever is asked.
    answers: HashMap<&'static str, Bytes>,
}

struct Login {
    person: Person,
    code_challenge: String,
    redirect_uri: String,
}

/// What *redirect* asked of the provider.
pub(crate) struct Asked {
    pub(crate) url: Url,
    parameters: HashMap<String, String>,
}

// === impl Person ===

impl Person {
    /// With an address that the provider has verified.
    pub(crate) fn verified(subject: &str, email: &str) -> Self {
        Self {
            subject: subject.to_owned(),
            email: Some(email.to_owned()),
            verified: true,
            name: Some("Grace Hopper".to_owned()),
        }
    }

    /// With an address that it has not.
    pub(crate) fn unverified(subject: &str, email: &str) -> Self {
        Self { verified: false, ..Self::verified(subject, email) }
    }

    pub(crate) fn without_email(subject: &str) -> Self {
        Self { email: None, verified: false, ..Self::verified(subject, "") }
    }

    fn user_info(&self) -> Value {
        let mut info = json!({ "id": self.subject, "name": self.name });
        if let Some(email) = &self.email {
            info["email"] = json!(email);
            info["email_verified"] = json!(self.verified);
        }
        info
    }
}

// === impl Asked ===

impl Asked {
    pub(crate) fn of(location: &str) -> Self {
        let url: Url = location.parse().expect("an absolute URL");
        let parameters = url.query_pairs().into_owned().collect();
        Self { url, parameters }
    }

    #[track_caller]
    pub(crate) fn parameter(&self, name: &str) -> &str {
        self.parameters.get(name).unwrap_or_else(|| panic!("no {name} in {}", self.url))
    }

    pub(crate) fn state(&self) -> &str {
        self.parameter("state")
    }
}

// === impl Upstream ===

impl Upstream {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("it is bound");
        let script = Arc::new(Mutex::new(Script::default()));
        let held = watch::Sender::new(None);
        let serving = tokio::spawn(serve(listener, Arc::clone(&script), held.subscribe()));
        Self { addr, script, held, serving }
    }

    /// The manifest of a client of it.
    pub(crate) fn provider(&self, name: &str) -> Provider {
        let url = |path: &str| format!("http://{}/{path}", self.addr);
        Provider::new(name, "oauth2")
            .set("authorizationURL", url("authorize"))
            .set("tokenURL", url("token"))
            .set("userInfoURL", url("userinfo"))
            .set("introspectionURL", url("introspect"))
            .set(
                "claims",
                json!({ "subject": "id", "email": "email", "emailVerified": "email_verified", "name": "name" }),
            )
    }

    /// Somebody logs in at the page that *redirect* led to, and says yes: the code that the browser brings back.
    pub(crate) fn log_in(&self, asked: &Asked, person: &Person) -> String {
        assert_eq!(asked.url.path(), "/authorize");
        assert_eq!(asked.parameter("response_type"), "code");
        assert_eq!(asked.parameter("code_challenge_method"), "S256");
        let code = format!("code-{:032x}", rand::random::<u128>());
        let login = Login {
            person: person.clone(),
            code_challenge: asked.parameter("code_challenge").to_owned(),
            redirect_uri: asked.parameter("redirect_uri").to_owned(),
        };
        self.lock().codes.insert(code.clone(), login);
        code
    }

    /// An access token of that person, as an app on a phone has one.
    pub(crate) fn token(&self, person: &Person) -> String {
        let token = format!("token-{:032x}", rand::random::<u128>());
        self.lock().people.insert(token.clone(), person.clone());
        token
    }

    pub(crate) fn break_down(&self, broken: bool) {
        self.lock().broken = broken;
    }

    /// From now on every answer at that path is this.
    pub(crate) fn answer(&self, path: &'static str, body: impl Into<Bytes>) {
        self.lock().answers.insert(path, body.into());
    }

    /// Nobody who logs in as that subject is answered at the token endpoint; with `None` all who wait are.
    pub(crate) fn hold(&self, subject: Option<&str>) {
        self.held.send_replace(subject.map(str::to_owned));
    }

    pub(crate) fn exchanges(&self) -> usize {
        self.lock().exchanges
    }

    fn lock(&self) -> MutexGuard<'_, Script> {
        self.script.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

async fn serve(listener: TcpListener, script: Arc<Mutex<Script>>, held: watch::Receiver<Option<String>>) {
    while let Ok((stream, _)) = listener.accept().await {
        let (script, held) = (Arc::clone(&script), held.clone());
        tokio::spawn(async move {
            let answering = service_fn(move |request| answer(Arc::clone(&script), held.clone(), request));
            drop(hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), answering).await);
        });
    }
}

async fn answer(
    script: Arc<Mutex<Script>>,
    mut held: watch::Receiver<Option<String>>,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let path = request.uri().path().to_owned();
    let bearer = request.headers().get(AUTHORIZATION).and_then(|field| field.to_str().ok());
    let client = bearer.and_then(|field| field.strip_prefix("Basic ")).and_then(|basic| STANDARD.decode(basic).ok());
    let client = client.and_then(|client| String::from_utf8(client).ok());
    let client = client.and_then(|client| client.split_once(':').map(|(id, _)| id.to_owned())).unwrap_or_default();
    let bearer = bearer.and_then(|field| field.strip_prefix("Bearer ")).map(str::to_owned);
    let body = request.into_body().collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let form: HashMap<String, String> = url::form_urlencoded::parse(&body).into_owned().collect();
    if path == "/token" {
        let subject = script.lock().unwrap_or_else(PoisonError::into_inner).arrived(&form);
        // Nobody holds once the provider is gone.
        drop(held.wait_for(|held| held.is_none() || *held != subject).await);
    }
    let mut script = script.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(body) = script.answers.get(path.as_str()) {
        let response = Response::builder().header("content-type", "application/json").body(Full::new(body.clone()));
        return Ok(response.expect("a plain response"));
    }
    let (status, body) = if script.broken {
        (StatusCode::INTERNAL_SERVER_ERROR, json!({ "error": "tell-tale" }))
    } else {
        match path.as_str() {
            "/token" => script.exchange(&form),
            "/userinfo" => match bearer.and_then(|token| script.people.get(&token)) {
                Some(person) => (StatusCode::OK, person.user_info()),
                None => (StatusCode::UNAUTHORIZED, json!({ "error": "invalid_token" })),
            },
            "/introspect" => match form.get("token").and_then(|token| script.people.get(token)) {
                Some(person) => (StatusCode::OK, json!({ "active": true, "client_id": client, "sub": person.subject })),
                None => (StatusCode::OK, json!({ "active": false })),
            },
            _ => (StatusCode::NOT_FOUND, json!({})),
        }
    };
    let response = Response::builder().status(status).header("content-type", "application/json");
    Ok(response.body(Full::new(body.to_string().into())).expect("a plain response"))
}

// === impl Script ===

impl Script {
    /// Counts an exchange; who logs in by its code.
    fn arrived(&mut self, form: &HashMap<String, String>) -> Option<String> {
        let code = form.get("code").map(String::as_str).unwrap_or_default();
        // A made-up code, by which servers learn whether the client is known, is none of a login.
        if code.starts_with("code-") {
            self.exchanges += 1;
        }
        self.codes.get(code).map(|login| login.person.subject.clone())
    }

    fn exchange(&mut self, form: &HashMap<String, String>) -> (StatusCode, Value) {
        let field = |name: &str| form.get(name).map(String::as_str).unwrap_or_default();
        let challenge = URL_SAFE_NO_PAD.encode(digest(&SHA256, field("code_verifier").as_bytes()));
        // Once, as every provider does.
        let login = self.codes.remove(field("code")).filter(|login| {
            login.code_challenge == challenge
                && login.redirect_uri == field("redirect_uri")
                && field("grant_type") == "authorization_code"
        });
        let Some(login) = login else { return (StatusCode::BAD_REQUEST, json!({ "error": "invalid_grant" })) };
        let token = format!("token-{:032x}", rand::random::<u128>());
        self.people.insert(token.clone(), login.person);
        (StatusCode::OK, json!({ "access_token": token, "token_type": "Bearer", "expires_in": 3600 }))
    }
}
