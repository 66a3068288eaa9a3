//! Requests from OpenID Connect clients: the form in the body, the authentication of the client, and the errors of both
//! (RFC 6749, 2.3 and 5.2).

use std::{borrow::Cow, time::Duration};

use base64::{Engine, engine::general_purpose::STANDARD};
use http::{HeaderMap, HeaderValue, header::AUTHORIZATION};
use latchkey_crds::types::IssuerUrl;
use percent_encoding::percent_decode_str;
use serde_json::{Map, Value};

use super::{
    Ports, authentication,
    error::{ErrorCode, Problem},
    request::{InboundRequest, SentBody},
    routes::{Route, RouteTable},
};
use crate::{
    client_metrics::ClientOutcome,
    domain::{
        app::App,
        error::CommonError,
        openid::{
            authenticate::{
                ClientAuthenticationError, PresentedClient, PresentedCredentials, RequestCount, authenticate_client,
            },
            client::OpenIdClient,
            code::CODE_PREFIX,
            id_token::IdTokenError,
        },
        token::CLIENT_REFRESH_PREFIX,
    },
    state::State,
};

#[doc(hidden)]
pub mod fuzzing;

/// `Retry-After` while a client's Secret, ConfigMap or key is missing. Somebody must create the missing object first.
/// Then the operator publishes a new document within seconds.
const MISSING_KEY_RETRY: Duration = Duration::from_secs(60);
/// `Retry-After` while no key for the algorithm of the ID token is Active yet.
const FIRST_KEY_RETRY: Duration = Duration::from_secs(5);

/// The form that a client sent. Each parameter occurs at most once. An empty parameter counts as missing.
pub struct ClientForm(Map<String, Value>);

/// The content of `Authorization` with the scheme Basic.
enum Basic {
    Credentials { client_id: String, secret: String },
    Malformed,
}

/// The decoded credentials of a request.
struct RequestCredentials {
    basic: Option<Basic>,
    form: ClientForm,
}

// === impl ClientForm ===

impl ClientForm {
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).and_then(Value::as_str)
    }

    /// The value of a parameter that the endpoint needs.
    pub fn require(&self, name: &'static str) -> Result<&str, Problem> {
        self.get(name).ok_or_else(|| Problem::invalid_request(format!("{name} is missing")))
    }

    /// All parameters except those that authenticate the client.
    pub fn without_credentials(&self) -> impl Iterator<Item = (&str, &str)> {
        let texts = self.0.iter().filter_map(|(name, value)| Some((name.as_str(), value.as_str()?)));
        texts.filter(|(name, _)| !matches!(*name, "client_secret" | "client_assertion" | "client_assertion_type"))
    }
}

// === impl Basic ===

impl Basic {
    /// Returns `None` if the request has no Basic credentials. The client ID and the secret are form-encoded (RFC 6749,
    /// 2.3.1).
    fn from_headers(headers: &HeaderMap) -> Option<Self> {
        let mut fields = headers.get_all(AUTHORIZATION).iter().filter_map(basic_credentials);
        let encoded = fields.next()?;
        if fields.next().is_some() {
            return Some(Self::Malformed);
        }
        Some(Self::decode(encoded).unwrap_or(Self::Malformed))
    }

    fn decode(encoded: &str) -> Option<Self> {
        let bytes = STANDARD.decode(encoded).ok()?;
        let text = str::from_utf8(&bytes).ok()?;
        let (client_id, secret) = text.split_once(':')?;
        Some(Self::Credentials { client_id: form_decode(client_id)?, secret: form_decode(secret)? })
    }
}

/// The text after `Basic`, if the header has this scheme. For a header that is not ASCII, returns an empty text, which
/// is malformed.
fn basic_credentials(field: &HeaderValue) -> Option<&str> {
    let scheme = field.as_bytes().get(..5)?;
    if !scheme.eq_ignore_ascii_case(b"basic") {
        return None;
    }
    match field.as_bytes().get(5) {
        None => Some(""),
        Some(b' ') => Some(field.to_str().map_or("", |text| text[6..].trim())),
        Some(_) => None,
    }
}

fn form_decode(text: &str) -> Option<String> {
    let spaced: Cow<'_, str> = if text.contains('+') { text.replace('+', " ").into() } else { text.into() };
    percent_decode_str(&spaced).decode_utf8().ok().map(Cow::into_owned)
}

/// Whether a request comes from a client, and not from a front end of the App (specification: OpenID provider, Token
/// endpoint). An App without clients has no such requests.
pub fn is_from_client(app: &App, headers: &HeaderMap, body: &Map<String, Value>) -> bool {
    if !app.has_clients() {
        return false;
    }
    let text = |name: &str| body.get(name).and_then(Value::as_str);
    let has_prefix = |name: &str, prefix: &str| text(name).is_some_and(|text| text.starts_with(prefix));
    has_basic(headers)
        || body.contains_key("client_secret")
        || body.contains_key("client_assertion")
        || text("client_id").is_some_and(|client_id| client_id != app.id().as_str())
        || has_prefix("code", CODE_PREFIX)
        || has_prefix("refresh_token", CLIENT_REFRESH_PREFIX)
        || has_prefix("token", CLIENT_REFRESH_PREFIX)
}

/// Whether a request has Basic credentials, valid or not.
pub fn has_basic(headers: &HeaderMap) -> bool {
    headers.get_all(AUTHORIZATION).iter().any(|field| basic_credentials(field).is_some())
}

/// Authenticates the client of a request to `route`. Returns the client and its form.
///
/// # Errors
///
/// 415 if the body is not a form; 400 if the request uses two methods of authentication or names two clients; 429 after
/// too many failures; 401 `invalid_client` if the credentials are wrong; 503 if the secret or the keys of the client
/// cannot be read, or a store is unavailable.
pub async fn authenticate<'a, S: Ports>(
    state: &'a State<S>,
    app: &'a App,
    request: &'a InboundRequest,
    body: SentBody,
    route: Route,
    count: RequestCount,
) -> Result<(&'a OpenIdClient, ClientForm), Problem> {
    let SentBody { fields, is_form } = body;
    if !is_form {
        let why = "send one Content-Type: application/x-www-form-urlencoded";
        return Err(Problem::new(ErrorCode::UnsupportedMediaType, why));
    }
    let sent = RequestCredentials { basic: Basic::from_headers(&request.headers), form: ClientForm(fields) };
    let presented = sent.presented_client()?;
    let base = &state.settings.base_url;
    let audiences = audiences(base, app, route);
    let audiences: Vec<&str> = audiences.iter().map(String::as_str).collect();
    let call = state.call(app, &request.client);
    let authenticated = authenticate_client(call, presented, &audiences, count).await;
    let outcome = match &authenticated {
        Ok(_) => ClientOutcome::Succeeded,
        Err(ClientAuthenticationError::InvalidClient) => ClientOutcome::Refused,
        Err(ClientAuthenticationError::Common(CommonError::RateLimited(_))) => ClientOutcome::Limited,
        Err(ClientAuthenticationError::Unresolved(_) | ClientAuthenticationError::Common(_)) => ClientOutcome::Failed,
    };
    state.client_metrics.count_authentication(presented.credentials.method(), outcome);
    let client = authenticated.map_err(|error| match error {
        ClientAuthenticationError::InvalidClient => invalid_client(app, sent.basic.is_some()),
        ClientAuthenticationError::Unresolved(_) => Problem::unavailable(MISSING_KEY_RETRY).with_cause(error),
        ClientAuthenticationError::Common(error) => error.into(),
    })?;
    Ok((client, sent.form))
}

/// The URLs that an assertion can have as `aud`: the issuer, the token endpoint, and the called URL.
fn audiences(base: &IssuerUrl, app: &App, route: Route) -> [String; 3] {
    [app.doc.issuer.as_str().to_owned(), Route::Token.url(base, app.id()), route.url(base, app.id())]
}

/// The response to every client that fails to authenticate (RFC 6749, 5.2). The challenge names the scheme that the
/// client used.
pub fn invalid_client(app: &App, used_basic: bool) -> Problem {
    let challenge = if used_basic {
        HeaderValue::try_from(format!("Basic realm=\"{}\"", app.id())).expect("an appID is ASCII")
    } else {
        authentication::challenge(app, None)
    };
    Problem::unauthorized(ErrorCode::InvalidClient, "the client did not authenticate", challenge)
}

impl From<IdTokenError> for Problem {
    fn from(error: IdTokenError) -> Self {
        match error {
            IdTokenError::NoKey(error) => Self::unavailable(FIRST_KEY_RETRY).with_cause(error),
            IdTokenError::Common(error) => error.into(),
        }
    }
}

// === impl RequestCredentials ===

impl RequestCredentials {
    /// Returns the credentials of the request. Fails with 400 if the request uses two methods or names two clients.
    fn presented_client(&self) -> Result<PresentedClient<'_>, Problem> {
        let form = &self.form;
        let (secret, assertion) = (form.get("client_secret"), form.get("client_assertion"));
        let methods = [self.basic.is_some(), secret.is_some(), assertion.is_some()];
        if methods.into_iter().filter(|is_used| *is_used).count() > 1 {
            return Err(Problem::invalid_request("authenticate the client in one way only"));
        }
        let client_id = form.get("client_id");
        let credentials = match (&self.basic, secret, assertion) {
            (Some(Basic::Credentials { client_id: in_basic, secret }), ..) => {
                if client_id.is_some_and(|in_body| in_body != in_basic) {
                    return Err(Problem::invalid_request("client_id differs from the one in Authorization"));
                }
                let credentials = PresentedCredentials::Secret { secret, is_basic: true };
                return Ok(PresentedClient { client_id: Some(in_basic), credentials });
            }
            (Some(Basic::Malformed), ..) => PresentedCredentials::MalformedBasic,
            (None, Some(secret), _) => PresentedCredentials::Secret { secret, is_basic: false },
            (None, None, Some(assertion)) => {
                PresentedCredentials::Assertion { assertion, assertion_type: form.get("client_assertion_type") }
            }
            (None, None, None) => PresentedCredentials::None,
        };
        Ok(PresentedClient { client_id, credentials })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fixtures;

    fn headers(fields: &[&str]) -> HeaderMap {
        fields.iter().map(|field| (AUTHORIZATION, HeaderValue::from_str(field).unwrap())).collect()
    }

    fn basic(text: &str) -> String {
        format!("Basic {}", STANDARD.encode(text))
    }

    fn decode(fields: &[&str]) -> Option<Option<(String, String)>> {
        Basic::from_headers(&headers(fields)).map(|basic| match basic {
            Basic::Credentials { client_id, secret } => Some((client_id, secret)),
            Basic::Malformed => None,
        })
    }

    #[test]
    fn basic_credentials_are_form_decoded() {
        let credentials = |client_id: &str, secret: &str| Some(Some((client_id.to_owned(), secret.to_owned())));
        assert_eq!(decode(&[&basic("grafana:lks_abc-_")]), credentials("grafana", "lks_abc-_"));
        assert_eq!(decode(&[&basic("a%3Ab:p%2Bq+r:s%25")]), credentials("a:b", "p+q r:s%"));
        assert_eq!(decode(&[&basic("grafana:")]), credentials("grafana", ""));
        assert_eq!(decode(&[&basic("grafana:%zz")]), credentials("grafana", "%zz"));
        let lower_case = basic("grafana:x").replace("Basic", "bASIC");
        assert_eq!(decode(&[&lower_case]), credentials("grafana", "x"));
        assert_eq!(decode(&["Bearer abc", &basic("grafana:x")]), credentials("grafana", "x"));
    }

    #[test]
    fn malformed_basic_credentials_are_recognized() {
        assert_eq!(decode(&[]), None);
        for other in ["Bearer abc", "Digest x", "Basically x", "Bas"] {
            assert_eq!(decode(&[other]), None, "{other}");
        }
        let (no_colon, not_utf8) = (basic("grafana"), format!("Basic {}", STANDARD.encode(b"graf\xffana:x")));
        let percent = basic("grafana:%FF");
        let unpadded = basic("grafana:ab").replace('=', "");
        let url_safe = "Basic Z3JhZmFuYTo_Pz8_".to_owned();
        for bad in ["Basic", "Basic ", "Basic %%%", &no_colon, &not_utf8, &percent, &unpadded, &url_safe, "Basic a b"] {
            assert_eq!(decode(&[bad]), Some(None), "{bad}");
            assert!(has_basic(&headers(&[bad])));
        }
        let twice = basic("grafana:x");
        assert_eq!(decode(&[&twice, &twice]), Some(None));
        let mut binary = HeaderMap::new();
        binary.insert(AUTHORIZATION, HeaderValue::from_bytes(b"Basic \xff").unwrap());
        assert!(matches!(Basic::from_headers(&binary), Some(Basic::Malformed)));
    }

    fn presented(authorization: &[&str], form: Value) -> Result<(Option<String>, &'static str), ErrorCode> {
        let Value::Object(form) = form else { panic!("an object") };
        let sent = RequestCredentials { basic: Basic::from_headers(&headers(authorization)), form: ClientForm(form) };
        let presented = sent.presented_client().map_err(|problem| problem.code)?;
        Ok((presented.client_id.map(str::to_owned), presented.credentials.method().as_str()))
    }

    #[test]
    fn a_request_with_two_authentication_methods_is_refused() {
        let basic = basic("grafana:x");
        let found = |id: &str, method| Ok((Some(id.to_owned()), method));
        assert_eq!(presented(&[&basic], json!({})), found("grafana", "client_secret_basic"));
        assert_eq!(presented(&[&basic], json!({ "client_id": "grafana" })), found("grafana", "client_secret_basic"));
        let post = json!({ "client_id": "grafana", "client_secret": "x" });
        assert_eq!(presented(&[], post), found("grafana", "client_secret_post"));
        assert_eq!(presented(&[], json!({ "client_assertion": "x" })), Ok((None, "private_key_jwt")));
        assert_eq!(presented(&[], json!({ "client_id": "spa" })), found("spa", "none"));
        for form in
            [json!({ "client_id": "argocd" }), json!({ "client_secret": "x" }), json!({ "client_assertion": "x" })]
        {
            assert_eq!(presented(&[&basic], form.clone()), Err(ErrorCode::InvalidRequest), "{form}");
        }
        let two = json!({ "client_secret": "x", "client_assertion": "x" });
        assert_eq!(presented(&[], two), Err(ErrorCode::InvalidRequest));
    }

    #[test]
    fn only_an_app_with_clients_gets_requests_from_clients() {
        let app = fixtures::provider(vec![fixtures::client("grafana")]);
        let without = fixtures::app(fixtures::rendered("shop"));
        let is_from = |app: &App, authorization: &[&str], body: &Value| {
            is_from_client(app, &headers(authorization), body.as_object().unwrap())
        };
        let basic = basic("grafana:x");
        for (authorization, body) in [
            (&[basic.as_str()][..], json!({})),
            (&["Basic"], json!({})),
            (&[], json!({ "client_secret": "x" })),
            (&[], json!({ "client_assertion": "x" })),
            (&[], json!({ "client_id": "grafana" })),
            (&[], json!({ "client_id": "unknown" })),
            (&[], json!({ "code": "lka_x" })),
            (&[], json!({ "refresh_token": "lkrc_x" })),
            (&[], json!({ "token": "lkrc_x" })),
        ] {
            assert!(is_from(&app, authorization, &body), "{authorization:?} {body}");
            assert!(!is_from(&without, authorization, &body), "{authorization:?} {body}");
        }
        for body in [
            json!({}),
            json!({ "client_id": "shop" }),
            json!({ "code": "lkc_x", "refresh_token": "lkr_x", "token": "lkr_x" }),
        ] {
            assert!(!is_from(&app, &["Bearer x"], &body), "{body}");
        }
    }

    #[test]
    fn credentials_are_not_among_the_parameters() {
        let Value::Object(form) = json!({
            "client_id": "grafana", "client_secret": "x", "client_assertion": "y", "client_assertion_type": "z",
            "scope": "openid",
        }) else {
            panic!("an object")
        };
        let form = ClientForm(form);
        let kept: Vec<_> = form.without_credentials().collect();
        assert_eq!(kept, [("client_id", "grafana"), ("scope", "openid")]);
        assert_eq!(form.require("redirect_uri").unwrap_err().code, ErrorCode::InvalidRequest);
    }
}
