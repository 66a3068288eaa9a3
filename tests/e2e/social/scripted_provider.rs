//! A small scripted OAuth 2.0 provider. The test decides who logs in.

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

/// A person with an account at the provider.
#[derive(Clone, Debug)]
pub(crate) struct Person {
    pub(crate) subject: String,
    pub(crate) email: Option<String>,
    pub(crate) verified: bool,
    pub(crate) name: Option<String>,
    /// The member `groups` of the user info.
    pub(crate) groups: Option<Value>,
}

/// The provider. It ends when this value is dropped.
pub(crate) struct ScriptedProvider {
    addr: SocketAddr,
    script: Arc<Mutex<Script>>,
    /// The token endpoint delays responses for this subject.
    delayed_subject: watch::Sender<Option<String>>,
    task: JoinHandle<()>,
}

#[derive(Default)]
struct Script {
    /// The approved logins, by authorization code. The exchange of the code removes the login.
    logins_by_code: HashMap<String, PendingLogin>,
    /// Persons by access token.
    persons_by_token: HashMap<String, Person>,
    /// Whether the provider responds 500 to every request.
    is_broken: bool,
    /// The number of token requests with a code that begins with `code-`, including failed requests.
    exchanges: usize,
    /// Scripted responses by path.
    fixed_responses: HashMap<&'static str, Bytes>,
}

struct PendingLogin {
    person: Person,
    code_challenge: String,
    redirect_uri: String,
}

/// The authorization request: the URL of the provider to which *redirect* sends the browser.
pub(crate) struct AuthorizationRequest {
    pub(crate) url: Url,
    parameters: HashMap<String, String>,
}

// === impl Person ===

impl Person {
    /// A person with an email address that the provider has verified.
    pub(crate) fn verified(subject: &str, email: &str) -> Self {
        Self {
            subject: subject.to_owned(),
            email: Some(email.to_owned()),
            verified: true,
            name: Some("Grace Hopper".to_owned()),
            groups: None,
        }
    }

    /// A person with an email address that the provider has not verified.
    pub(crate) fn unverified(subject: &str, email: &str) -> Self {
        Self { verified: false, ..Self::verified(subject, email) }
    }

    pub(crate) fn without_email(subject: &str) -> Self {
        Self { email: None, verified: false, ..Self::verified(subject, "") }
    }

    /// Sets the groups that the provider reports for this person.
    pub(crate) fn with_groups(self, groups: Value) -> Self {
        Self { groups: Some(groups), ..self }
    }

    fn user_info(&self) -> Value {
        let mut info = json!({ "id": self.subject, "name": self.name });
        if let Some(email) = &self.email {
            info["email"] = json!(email);
            info["email_verified"] = json!(self.verified);
        }
        if let Some(groups) = &self.groups {
            info["groups"] = groups.clone();
        }
        info
    }
}

// === impl AuthorizationRequest ===

impl AuthorizationRequest {
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

// === impl ScriptedProvider ===

impl ScriptedProvider {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("it is bound");
        let script = Arc::new(Mutex::new(Script::default()));
        let delayed_subject = watch::Sender::new(None);
        let task = tokio::spawn(serve(listener, Arc::clone(&script), delayed_subject.subscribe()));
        Self { addr, script, delayed_subject, task }
    }

    /// The manifest of a Provider that names this scripted provider.
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

    /// Logs the person in and consents. Returns the code for *callback*.
    pub(crate) fn approve(&self, authorization: &AuthorizationRequest, person: &Person) -> String {
        assert_eq!(authorization.url.path(), "/authorize");
        assert_eq!(authorization.parameter("response_type"), "code");
        assert_eq!(authorization.parameter("code_challenge_method"), "S256");
        let code = format!("code-{:032x}", rand::random::<u128>());
        let login = PendingLogin {
            person: person.clone(),
            code_challenge: authorization.parameter("code_challenge").to_owned(),
            redirect_uri: authorization.parameter("redirect_uri").to_owned(),
        };
        self.lock().logins_by_code.insert(code.clone(), login);
        code
    }

    /// An access token of the person, as a mobile app gets one from the provider.
    pub(crate) fn access_token(&self, person: &Person) -> String {
        let token = format!("token-{:032x}", rand::random::<u128>());
        self.lock().persons_by_token.insert(token.clone(), person.clone());
        token
    }

    pub(crate) fn set_broken(&self, is_broken: bool) {
        self.lock().is_broken = is_broken;
    }

    /// Sends this response at this path from now on.
    pub(crate) fn set_response(&self, path: &'static str, body: impl Into<Bytes>) {
        self.lock().fixed_responses.insert(path, body.into());
    }

    /// Delays the token responses for this subject, until this function is called with another subject or `None`.
    pub(crate) fn delay_subject(&self, subject: Option<&str>) {
        self.delayed_subject.send_replace(subject.map(str::to_owned));
    }

    pub(crate) fn exchange_count(&self) -> usize {
        self.lock().exchanges
    }

    fn lock(&self) -> MutexGuard<'_, Script> {
        self.script.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ScriptedProvider {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(listener: TcpListener, script: Arc<Mutex<Script>>, delayed_subject: watch::Receiver<Option<String>>) {
    while let Ok((stream, _)) = listener.accept().await {
        let (script, delayed_subject) = (Arc::clone(&script), delayed_subject.clone());
        tokio::spawn(async move {
            let service = service_fn(move |request| respond(Arc::clone(&script), delayed_subject.clone(), request));
            drop(hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await);
        });
    }
}

async fn respond(
    script: Arc<Mutex<Script>>,
    mut delayed_subject: watch::Receiver<Option<String>>,
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
        let subject = script.lock().unwrap_or_else(PoisonError::into_inner).count_exchange(&form);
        // An error means that the provider was dropped.
        drop(delayed_subject.wait_for(|delayed| delayed.is_none() || *delayed != subject).await);
    }
    let mut script = script.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(body) = script.fixed_responses.get(path.as_str()) {
        let response = Response::builder().header("content-type", "application/json").body(Full::new(body.clone()));
        return Ok(response.expect("a plain response"));
    }
    let (status, body) = if script.is_broken {
        (StatusCode::INTERNAL_SERVER_ERROR, json!({ "error": "tell-tale" }))
    } else {
        match path.as_str() {
            "/token" => script.exchange(&form),
            "/userinfo" => match bearer.and_then(|token| script.persons_by_token.get(&token)) {
                Some(person) => (StatusCode::OK, person.user_info()),
                None => (StatusCode::UNAUTHORIZED, json!({ "error": "invalid_token" })),
            },
            "/introspect" => match form.get("token").and_then(|token| script.persons_by_token.get(token)) {
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
    /// Counts a token request, and returns the subject of the code.
    fn count_exchange(&mut self, form: &HashMap<String, String>) -> Option<String> {
        let code = form.get("code").map(String::as_str).unwrap_or_default();
        // Does not count the invalid code with which servers check that the provider knows the client.
        if code.starts_with("code-") {
            self.exchanges += 1;
        }
        self.logins_by_code.get(code).map(|login| login.person.subject.clone())
    }

    fn exchange(&mut self, form: &HashMap<String, String>) -> (StatusCode, Value) {
        let field = |name: &str| form.get(name).map(String::as_str).unwrap_or_default();
        let challenge = URL_SAFE_NO_PAD.encode(digest(&SHA256, field("code_verifier").as_bytes()));
        // A code can be used once.
        let login = self.logins_by_code.remove(field("code")).filter(|login| {
            login.code_challenge == challenge
                && login.redirect_uri == field("redirect_uri")
                && field("grant_type") == "authorization_code"
        });
        let Some(login) = login else { return (StatusCode::BAD_REQUEST, json!({ "error": "invalid_grant" })) };
        let token = format!("token-{:032x}", rand::random::<u128>());
        self.persons_by_token.insert(token.clone(), login.person);
        (StatusCode::OK, json!({ "access_token": token, "token_type": "Bearer", "expires_in": 3600 }))
    }
}
