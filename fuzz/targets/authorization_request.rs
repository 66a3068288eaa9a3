//! Authorization requests: an error goes only to a URL that the client has registered, an accepted request follows the
//! rules of its client, and a request does not change on its way through the login.

use latchkey_crds::client::ClientScope;
use latchkey_server::{
    domain::{
        openid::authorization_request::{
            AuthorizationError, AuthorizationErrorCode, AuthorizationRequest, Delivery, Prompts, ReplyTo, RequestError,
            RequestParameters, UnsafeRequest, find_client,
        },
        pages::{BrowserId, CarriedRequest, MAX_TRANSACTION_CHARS, Target, Transaction},
        redirect::ParameterLocation,
        user::UserId,
    },
    http::parameters::Parameters,
};
use serde_json::json;
use url::Url;
use uuid::Uuid;

use crate::{
    app::{NOW, env_at},
    draw::{Draw, texts},
    harness,
    openid_app::{CLI, CLI_URLS, CLIENTS, STRICT, UNRESOLVED, WEB, WEB_URLS, WITHOUT_KEY, id_token, openid_app},
    redirect,
};

/// The parameters that can occur once, with valid, invalid and borderline values.
const VALUES: [(&str, &[&str]); 20] = [
    ("client_id", &["web", "cli", "strict", "shop", "WEB", "web ", ""]),
    ("redirect_uri", &["https://evil.example/", "http://127.0.0.1:8000/done", "com.example.cli:/done#x", "/done", ""]),
    ("response_type", &["code", "token", "code id_token", "Code", ""]),
    ("response_mode", &["query", "form_post", "fragment", ""]),
    ("scope", &["openid", "openid profile offline_access x", "profile", "openid\u{a0}email", " ", ""]),
    ("state", &["s", "a b&c=d#e", "\r\n", "é", ""]),
    ("nonce", &["n", "é", ""]),
    ("prompt", &["none", "login", "none login", "consent select_account", "create", "Login", " ", ""]),
    ("max_age", &["0", "3600", "-1", "+1", "1.5", "99999999999999999999", "999999999999999999999", "٣", ""]),
    ("login_hint", &["ada@example.com", "x", ""]),
    ("id_token_hint", &["x", "a.b.c", ""]),
    ("acr_values", &["urn:latchkey:aal:1", "urn:other", ""]),
    ("ui_locales", &["de en", "x", ""]),
    (
        "claims",
        &[
            "{}",
            "[]",
            "{\"id_token\":{\"email\":null}}",
            "{\"id_token\":{\"acr\":{\"essential\":true,\"value\":\"urn:other\"}}}",
            "",
        ],
    ),
    ("code_challenge", &["E9Melhoa2OwvFrEMTJguCHaoeK1t8URWbuGJSstw-cM", "short", ""]),
    ("code_challenge_method", &["S256", "plain", "s256", ""]),
    ("request", &["eyJhbGciOiJub25lIn0.e30.", ""]),
    ("request_uri", &["https://web.example.com/request", "urn:ietf:params:oauth:request_uri:x", ""]),
    ("registration", &["{}", ""]),
    ("post_logout_redirect_uri", &["https://web.example.com/bye", ""]),
];
const FRAGMENTS: [&str; 40] = [
    "&",
    "&",
    "=",
    "client_id=web&",
    "client_id=cli&",
    "client_id=",
    "&redirect_uri=https%3A%2F%2Fweb.example.com%2Fdone%3Ffrom%3Dlogin&",
    "&redirect_uri=http%3A%2F%2F127.0.0.1%3A65535%2Fdone&",
    "redirect_uri=http%3A%2F%2F127.0.0.1",
    "redirect_uri=https://web.example.com",
    "%3A65536",
    ":0",
    "/done",
    "%2Fdone",
    "%3Ffrom%3Dlogin",
    "@evil.example",
    "%40evil.example",
    "%5Cevil.example",
    "%23",
    "%00",
    "%0D%0A",
    "%FF",
    "&response_type=code&",
    "&response_mode=form_post&",
    "&scope=openid&",
    "&state=",
    "&nonce=",
    "&prompt=none&",
    "&max_age=",
    "&claims=%7B%22id_token%22%3A",
    "%7B%7D",
    "&code_challenge=E9Melhoa2OwvFrEMTJguCHaoeK1t8URWbuGJSstw-cM&",
    "&code_challenge_method=S256&",
    "&id_token_hint=eyJhbGciOiJub25lIn0.e30.&",
    "&request_uri=urn:ietf:params:oauth:request_uri:",
    "&unknown=",
    "+",
    "x",
    "7",
    "é",
];
/// The errors of the checks that need no user.
const ERRORS: [AuthorizationErrorCode; 8] = [
    AuthorizationErrorCode::InvalidRequest,
    AuthorizationErrorCode::UnsupportedResponseType,
    AuthorizationErrorCode::InvalidScope,
    AuthorizationErrorCode::TemporarilyUnavailable,
    AuthorizationErrorCode::RequestNotSupported,
    AuthorizationErrorCode::RequestUriNotSupported,
    AuthorizationErrorCode::RegistrationNotSupported,
    AuthorizationErrorCode::UnmetAuthenticationRequirements,
];

/// The decoded parameters of a request, in the order in which they are sent.
struct SentRequest(Vec<(String, String)>);

#[test]
fn authorization_request() {
    harness::run("authorization_request", 2_000, |input| {
        for text in texts(input, &FRAGMENTS) {
            let Ok(parameters) = Parameters::parse(&text) else { continue };
            let pairs = parameters.pairs().map(|(name, value)| (name.to_owned(), value.to_owned()));
            SentRequest(pairs.collect()).check(None);
        }
        let mut draw = Draw::new(input);
        let user = UserId(Uuid::from_bytes(draw.array()));
        SentRequest::draw(&mut draw, user).check(Some(user));
    });
}

// === impl SentRequest ===

impl SentRequest {
    /// A valid request with up to three changes.
    fn draw(draw: &mut Draw<'_>, user: UserId) -> Self {
        let client = draw.pick(&[WEB, WEB, CLI, STRICT, WITHOUT_KEY, UNRESOLVED]);
        let url = draw.pick(urls(client));
        let mut pairs = vec![("client_id", client.to_owned()), ("redirect_uri", url.to_owned())];
        pairs.extend([("response_type", "code".to_owned()), ("scope", "openid email".to_owned())]);
        if draw.flag() {
            pairs.push(("code_challenge", "E9Melhoa2OwvFrEMTJguCHaoeK1t8URWbuGJSstw-cM".to_owned()));
            pairs.push(("code_challenge_method", "S256".to_owned()));
        }
        for _ in 0..draw.byte() & 3 {
            let (name, values) = draw.pick(&VALUES);
            let value = match (draw.byte(), name) {
                (0..32, _) => draw.any_text(80),
                // Lengths around the limits of 254, 256, 2,048 and 4,096 bytes.
                (32..64, _) => {
                    "x".repeat(draw.pick(&[253, 254, 255, 256, 257, 2_047, 2_048, 2_049, 4_096, 4_097, 8_000]))
                }
                (64..160, "id_token_hint") => {
                    let aud = draw.pick(&[client, client, CLI]);
                    let issuer = openid_app().doc.issuer.as_str();
                    id_token(&json!({ "iss": issuer, "aud": aud, "sub": user, "sid": Uuid::nil() }))
                }
                _ => draw.pick(values).to_owned(),
            };
            // One in four changed values is sent in addition to the previous value. The others replace the previous
            // value.
            if draw.byte() & 3 != 0 {
                pairs.retain(|(known, _)| *known != name);
            }
            pairs.push((name, value));
        }
        Self(pairs.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
    }

    /// All values of the parameter `name` that are not empty.
    fn values(&self, name: &str) -> Vec<&str> {
        let named = self.0.iter().filter(|(sent, value)| sent == name && !value.is_empty());
        named.map(|(_, value)| value.as_str()).collect()
    }

    /// The value of a parameter that is sent once.
    fn only(&self, name: &str) -> Option<&str> {
        match self.values(name)[..] {
            [only] => Some(only),
            _ => None,
        }
    }

    /// Checks the server's result for this request. If the request contains valid hints, they identify `user`.
    fn check(&self, user: Option<UserId>) {
        let app = openid_app();
        let parameters = RequestParameters::new(self.0.iter().map(|(name, value)| (name.as_str(), value.as_str())));
        let bytes: usize = self.0.iter().map(|(name, value)| name.len() + value.len()).sum();
        let outcomes = [Delivery::Browser, Delivery::Pushed].map(|delivery| {
            harness::assert_bounded(1, 1024 * 1024 + 64 * bytes as u64, || {
                let client = find_client(app, &parameters)?;
                AuthorizationRequest::check(app, client, &parameters, delivery)
            })
        });
        let client = self.only("client_id").filter(|id| CLIENTS.contains(id));
        for outcome in &outcomes {
            match (client, outcome) {
                (None, outcome) => {
                    let expected = RequestError::Page(UnsafeRequest::InvalidClient);
                    assert_eq!(outcome.as_ref().err(), Some(&expected), "{:?}", self.0);
                }
                (Some(client), Err(RequestError::Page(error))) => {
                    assert_eq!(*error, UnsafeRequest::RedirectUrlNotAllowed);
                    assert!(!self.has_registered_url(client), "{:?}", self.0);
                }
                (Some(client), Err(RequestError::Reply { error, to })) => {
                    assert!(self.has_registered_url(client), "an error goes to a URL of others: {:?}", self.0);
                    self.check_reply(to, error);
                }
                (Some(client), Ok(request)) => {
                    assert!(self.has_registered_url(client), "a code goes to a URL of others: {:?}", self.0);
                    self.check_accepted(client, request, user);
                }
            }
        }
        let [in_browser, pushed] = outcomes.map(|outcome| outcome.is_ok());
        assert_eq!(in_browser, pushed && client != Some(STRICT), "{:?}", self.0);
        check_transaction(&parameters);
    }

    fn has_registered_url(&self, client: &str) -> bool {
        self.only("redirect_uri").is_some_and(|url| urls(client).iter().any(|entry| redirect::matches(entry, url)))
    }

    /// Checks to which URL an error is sent, and with which parameters.
    fn check_reply(&self, to: &ReplyTo, error: &AuthorizationError) {
        assert!(ERRORS.contains(&error.code), "{error}");
        let requested = self.only("redirect_uri").expect("it was sent once");
        assert_eq!(to.target.as_str(), requested);
        let state = self.only("state").filter(|state| state.len() <= 2_048);
        assert_eq!(to.state.as_deref(), state);
        let parameters = to.error_parameters(openid_app(), error);
        let location = to.target.with_parameters(ParameterLocation::Query, parameters.iter().copied());
        assert!(location.bytes().all(|byte| byte.is_ascii_graphic()), "{location} is no header");
        let (location, requested) = (Url::parse(&location).unwrap(), Url::parse(requested).unwrap());
        let place =
            |url: &Url| (url.scheme().to_owned(), url.host_str().map(str::to_owned), url.port(), url.path().to_owned());
        assert_eq!(place(&location), place(&requested));
        let sent: Vec<_> = location.query_pairs().into_owned().collect();
        let before = requested.query_pairs().count();
        let expected: Vec<_> = [
            ("error", Some(error.code.as_str())),
            ("error_description", Some(error.description)),
            ("state", state),
            ("iss", Some(openid_app().doc.issuer.as_str())),
        ]
        .into_iter()
        .filter_map(|(name, value)| Some((name.to_owned(), value?.to_owned())))
        .collect();
        assert_eq!(sent[before..], expected[..]);
    }

    fn check_accepted(&self, client: &str, request: &AuthorizationRequest, user: Option<UserId>) {
        assert_eq!(request.client.client_id.as_str(), client);
        assert!(client != WITHOUT_KEY && client != UNRESOLVED, "{client} gets no tokens");
        for (name, _) in VALUES.iter().filter(|(name, _)| *name != "post_logout_redirect_uri") {
            assert!(self.values(name).len() <= 1, "{name} is sent twice");
        }
        assert_eq!(Some(request.reply.target.as_str()), self.only("redirect_uri"));
        assert_eq!(request.reply.state.as_deref(), self.only("state"));
        assert_eq!(self.only("response_type"), Some("code"));
        for unsupported in ["request", "request_uri", "registration"] {
            assert_eq!(self.only(unsupported), None);
        }
        let asked = |scope: &str| self.only("scope").is_some_and(|scopes| scopes.split(' ').any(|sent| sent == scope));
        assert!(asked("openid") && request.scopes.contains(ClientScope::OpenId));
        assert_eq!(asked("offline_access"), request.scopes.contains(ClientScope::OfflineAccess));
        assert!(request.scopes.is_subset_of(request.client.scopes));
        assert!(request.scopes_for_client().is_subset_of(request.client.scopes));
        let has_challenge = self.only("code_challenge").is_some() && self.only("code_challenge_method") == Some("S256");
        assert_eq!(request.code_challenge.is_some(), has_challenge);
        assert!(has_challenge || client == WEB, "{client} needs PKCE");
        let only_none = Prompts { none: true, ..Prompts::default() };
        assert!(!request.prompts.none || request.prompts == only_none);
        assert_eq!(request.nonce.as_deref(), self.only("nonce"));
        assert_eq!(request.login_hint.as_deref(), self.only("login_hint"));
        assert_eq!(request.max_age.is_some(), self.only("max_age").is_some());
        assert!(request.nonce.as_ref().is_none_or(|nonce| nonce.len() <= 256));
        assert!(request.login_hint.as_ref().is_none_or(|hint| hint.len() <= 254));
        if let Some(hinted) = request.hinted_subject {
            assert_eq!(Some(hinted), user, "a hint that the App has not signed");
            assert!(request.allows_subject(hinted) || !request.claims.subjects.is_empty());
            assert!(!request.allows_subject(UserId(Uuid::max())) || hinted == UserId(Uuid::max()));
        }
    }
}

fn urls(client: &str) -> &'static [&'static str] {
    if client == CLI { &CLI_URLS } else { &WEB_URLS }
}

/// Checks that a request that fits into the parameter `tx` is unchanged after the login. `tx` carries the request
/// through the login.
fn check_transaction(parameters: &RequestParameters) {
    let (app, env) = (openid_app(), env_at(NOW));
    let browser = BrowserId::generate(&env);
    let carried = CarriedRequest {
        parameters: parameters.clone(),
        request_uri: None,
        shown: None,
        login: None,
        client: String::new(),
    };
    let transaction = Transaction { target: Target::Authorize(Box::new(carried)), issued_at: NOW.unix_timestamp() };
    let fits = transaction.fits();
    match transaction.seal(&env, app, &browser) {
        Ok(text) => {
            assert!(fits && text.len() <= MAX_TRANSACTION_CHARS);
            assert_eq!(Transaction::open(app, &browser, &text, NOW), Some(transaction));
        }
        Err(_) => assert!(!fits),
    }
}
