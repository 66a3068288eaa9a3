//! An authorization request (OpenID Connect Core 1.0, 3.1.2.1), and its checks (specification: Authorization, Checks).

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{
    claims_request::{MAX_CLAIMS_BYTES, RequestedClaims},
    client::OpenIdClient,
    id_token::{self, HintError},
    par::REQUEST_URI_PREFIX,
    scope::Scopes,
};
use crate::domain::{
    app::App,
    flow::CodeChallenge,
    redirect::{RedirectTarget, choose_target},
    user::UserId,
};

/// The longest `state`, in bytes.
pub const MAX_STATE_BYTES: usize = 2_048;
/// The longest `nonce`, in bytes.
const MAX_NONCE_BYTES: usize = 256;
/// The longest `login_hint`, in bytes: an email address fits.
const MAX_LOGIN_HINT_BYTES: usize = 254;

/// The parameters that are read. All others are ignored.
const KNOWN_PARAMETERS: [&str; 20] = [
    "acr_values",
    "claims",
    "client_id",
    "code_challenge",
    "code_challenge_method",
    "id_token_hint",
    "login_hint",
    "max_age",
    "nonce",
    "post_logout_redirect_uri",
    "prompt",
    "redirect_uri",
    "registration",
    "request",
    "request_uri",
    "response_mode",
    "response_type",
    "scope",
    "state",
    "ui_locales",
];

/// The known parameters of a request to `authorize` or `logout`, in the order in which they were sent. An empty
/// parameter is the same as a missing one (RFC 6749, 3.1). Never printed.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RequestParameters(Vec<(String, String)>);

/// A parameter occurs more than once (RFC 6749, 3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} is given more than once")]
pub struct RepeatedRequestParameter(pub &'static str);

/// How the parameters came to the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// In the query or the form of `authorize`.
    Browser,
    /// Through the PAR endpoint (RFC 9126).
    Pushed,
}

/// A request that passed all checks.
#[derive(Clone)]
pub struct AuthorizationRequest {
    pub client: Arc<OpenIdClient>,
    pub reply: ReplyTo,
    /// The requested scopes that the client has.
    pub scopes: Scopes,
    pub nonce: Option<String>,
    pub code_challenge: Option<CodeChallenge>,
    pub prompts: Prompts,
    /// The maximum time since the login, in seconds. After this time, the user must log in again.
    pub max_age: Option<u32>,
    pub login_hint: Option<String>,
    pub claims: RequestedClaims,
    /// The user in `id_token_hint`, if the hint was signed with a key that the App has.
    pub hinted_subject: Option<UserId>,
}

/// The redirect URL for the response to an authorization request, and how the response is sent there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplyTo {
    pub target: RedirectTarget,
    pub mode: ResponseMode,
    /// The `state` of the request, if it is valid.
    pub state: Option<String>,
}

/// How the response is sent to the client (OAuth 2.0 Multiple Response Types, 2.1; OAuth 2.0 Form Post Response Mode).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ResponseMode {
    #[default]
    Query,
    FormPost,
}

/// The values of `prompt`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prompts {
    pub none: bool,
    pub login: bool,
    pub consent: bool,
    pub select_account: bool,
    pub create: bool,
}

/// Why the response to an authorization request is an error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The error is shown on a page, because there is no URL to which it could be sent safely.
    #[error(transparent)]
    Page(#[from] UnsafeRequest),
    /// The error is sent to the redirect URL.
    #[error("{error}")]
    Reply { error: AuthorizationError, to: Box<ReplyTo> },
}

/// Why the client or the redirect URL of a request cannot be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnsafeRequest {
    #[error("client_id is missing, repeated or unknown")]
    InvalidClient,
    #[error("request_uri is unknown, used or expired, or belongs to another client")]
    InvalidRequestUri,
    #[error("redirect_uri is missing, repeated or not registered for the client")]
    RedirectUrlNotAllowed,
}

/// An error for the client (RFC 6749, 4.1.2.1; OpenID Connect Core 1.0, 3.1.2.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {description}", .code.as_str())]
pub struct AuthorizationError {
    pub code: AuthorizationErrorCode,
    /// For developers. Never quotes the request.
    pub description: &'static str,
}

/// The values of `error`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AuthorizationErrorCode {
    InvalidRequest,
    UnsupportedResponseType,
    InvalidScope,
    AccessDenied,
    TemporarilyUnavailable,
    LoginRequired,
    ConsentRequired,
    InteractionRequired,
    RequestNotSupported,
    RequestUriNotSupported,
    RegistrationNotSupported,
    /// Defined in "OpenID Connect Core Error Code unmet_authentication_requirements 1.0".
    UnmetAuthenticationRequirements,
}

/// The client that `client_id` names. The parameter must occur once, and the App must have the client.
pub fn find_client<'a>(app: &'a App, parameters: &RequestParameters) -> Result<&'a Arc<OpenIdClient>, UnsafeRequest> {
    let id = parameters.get("client_id").ok().flatten().ok_or(UnsafeRequest::InvalidClient)?;
    app.client(id).ok_or(UnsafeRequest::InvalidClient)
}

// === impl RequestParameters ===

impl RequestParameters {
    /// Keeps the known parameters that are not empty.
    pub fn new<N: AsRef<str>, V: AsRef<str>>(sent: impl IntoIterator<Item = (N, V)>) -> Self {
        let is_kept = |(name, value): &(N, V)| {
            KNOWN_PARAMETERS.binary_search(&name.as_ref()).is_ok() && !value.as_ref().is_empty()
        };
        let kept = sent.into_iter().filter(is_kept);
        Self(kept.map(|(name, value)| (name.as_ref().to_owned(), value.as_ref().to_owned())).collect())
    }

    /// The value of a parameter that can occur at most once.
    pub fn get(&self, name: &'static str) -> Result<Option<&str>, RepeatedRequestParameter> {
        debug_assert!(KNOWN_PARAMETERS.contains(&name), "{name} is not kept");
        let mut values = self.0.iter().filter(|(known, _)| known == name).map(|(_, value)| value.as_str());
        match (values.next(), values.next()) {
            (value, None) => Ok(value),
            (_, Some(_)) => Err(RepeatedRequestParameter(name)),
        }
    }

    /// The parameters, in the order in which they were sent.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn contains(&self, name: &str) -> bool {
        self.0.iter().any(|(known, _)| known == name)
    }

    /// Whether a parameter of an authorization request occurs more than once.
    fn has_repeated_parameter(&self) -> bool {
        let mut of_authorize = KNOWN_PARAMETERS.into_iter().filter(|name| *name != "post_logout_redirect_uri");
        of_authorize.any(|name| self.get(name).is_err())
    }

    /// The `request_uri`, if it has the prefix of the PAR endpoint. A `request_uri` with another prefix is refused
    /// later, after the check of `redirect_uri`.
    pub fn pushed_request_uri(&self) -> Option<&str> {
        self.get("request_uri").ok().flatten().filter(|uri| uri.starts_with(REQUEST_URI_PREFIX))
    }
}

// === impl AuthorizationRequest ===

impl AuthorizationRequest {
    /// Checks a request of this client. Before this call, the caller checks `client_id` with [`find_client`], and
    /// `request_uri` with [`RequestParameters::pushed_request_uri`].
    pub fn check(
        app: &App,
        client: &Arc<OpenIdClient>,
        parameters: &RequestParameters,
        delivery: Delivery,
    ) -> Result<Self, RequestError> {
        let requested = parameters.get("redirect_uri").ok().flatten();
        let target = requested.and_then(|url| choose_target(&client.redirect_urls, Some(url)).ok().flatten());
        let reply = ReplyTo {
            target: target.ok_or(UnsafeRequest::RedirectUrlNotAllowed)?,
            mode: parameters.get("response_mode").ok().flatten().and_then(ResponseMode::parse).unwrap_or_default(),
            state: parameters.get("state").ok().flatten().filter(|state| is_valid_state(state)).map(str::to_owned),
        };
        Self::check_rest(app, client, parameters, delivery, &reply)
            .map_err(|error| RequestError::Reply { error, to: Box::new(reply) })
    }

    /// The checks that follow the check of `redirect_uri`.
    fn check_rest(
        app: &App,
        client: &Arc<OpenIdClient>,
        parameters: &RequestParameters,
        delivery: Delivery,
        reply: &ReplyTo,
    ) -> Result<Self, AuthorizationError> {
        use AuthorizationErrorCode as Code;
        let once = |name: &'static str| {
            parameters.get(name).map_err(|_| AuthorizationError::invalid("a parameter is given more than once"))
        };

        if parameters.contains("request") {
            return Err(Code::RequestNotSupported.because("request objects are not supported"));
        }
        if parameters.contains("request_uri") {
            return Err(Code::RequestUriNotSupported.because("only a request_uri of the PAR endpoint is supported"));
        }
        if parameters.contains("registration") {
            return Err(Code::RegistrationNotSupported.because("registration is not supported"));
        }
        if parameters.has_repeated_parameter() {
            return Err(AuthorizationError::invalid("a parameter is given more than once"));
        }
        let response_type = once("response_type")?;
        if response_type.is_some_and(|requested| requested != "code") {
            return Err(Code::UnsupportedResponseType.because("response_type must be code"));
        }
        let requested_scopes = once("scope")?.unwrap_or_default();
        if !requested_scopes.split(' ').any(|scope| scope == "openid") {
            return Err(Code::InvalidScope.because("scope must contain openid"));
        }
        let claims = once("claims")?.map(parse_claims);
        if matches!(&claims, Some(Ok(claims)) if claims.is_acr_unmet) {
            return Err(Code::UnmetAuthenticationRequirements.because("no login reaches the requested acr"));
        }
        if client.is_unresolved() || !id_token::has_key(app, client) {
            return Err(Code::TemporarilyUnavailable.because("the secret or the key of the client is not ready yet"));
        }
        if response_type.is_none() {
            return Err(AuthorizationError::invalid("response_type is missing"));
        }
        if once("response_mode")?.is_some_and(|mode| ResponseMode::parse(mode).is_none()) {
            return Err(AuthorizationError::invalid("response_mode must be query or form_post"));
        }
        if once("state")?.is_some_and(|state| !is_valid_state(state)) {
            return Err(AuthorizationError::invalid("state is longer than 2,048 bytes"));
        }
        let nonce = validate_length(once("nonce")?, MAX_NONCE_BYTES, "nonce is longer than 256 bytes")?;
        let login_hint =
            validate_length(once("login_hint")?, MAX_LOGIN_HINT_BYTES, "login_hint is longer than 254 bytes")?;
        let prompts = Prompts::parse(once("prompt")?.unwrap_or_default())?;
        let max_age = once("max_age")?.map(parse_max_age).transpose()?;
        let claims = claims.transpose()?.unwrap_or_default();
        if client.pushed_authorization_required && delivery != Delivery::Pushed {
            return Err(AuthorizationError::invalid("the client must push its requests to the PAR endpoint"));
        }
        let code_challenge =
            parse_challenge(once("code_challenge")?, once("code_challenge_method")?, client.pkce_required)?;
        let hint = once("id_token_hint")?.map(|hint| check_hint(app, client, hint)).transpose()?;
        Ok(Self {
            client: Arc::clone(client),
            reply: reply.clone(),
            scopes: Scopes::parse_known(requested_scopes).intersection(client.scopes),
            nonce,
            code_challenge,
            prompts,
            max_age,
            login_hint,
            claims,
            hinted_subject: hint.flatten(),
        })
    }

    /// Whether `id_token_hint` and `claims` each name this user or no user.
    pub fn allows_subject(&self, user: UserId) -> bool {
        self.hinted_subject.is_none_or(|hinted| hinted == user) && self.claims.allows_subject(&user.to_string())
    }

    /// The scopes that the client gets: the requested scopes, and the scopes of the single claims that it requests.
    pub fn scopes_for_client(&self) -> Scopes {
        let claims = self.claims.id_token.scopes().iter().chain(self.claims.userinfo.scopes().iter());
        let claims: Scopes = claims.collect();
        self.scopes.iter().chain(claims.intersection(self.client.scopes).iter()).collect()
    }

    /// The error response with this error.
    pub fn refuse(&self, error: AuthorizationError) -> RequestError {
        RequestError::Reply { error, to: Box::new(self.reply.clone()) }
    }
}

fn is_valid_state(state: &str) -> bool {
    state.len() <= MAX_STATE_BYTES
}

fn validate_length(
    value: Option<&str>,
    max_bytes: usize,
    description: &'static str,
) -> Result<Option<String>, AuthorizationError> {
    match value {
        Some(value) if value.len() > max_bytes => Err(AuthorizationError::invalid(description)),
        value => Ok(value.map(str::to_owned)),
    }
}

/// Parses a number of seconds without a sign. A number that does not fit into a `u32` has the same effect as no limit.
fn parse_max_age(text: &str) -> Result<u32, AuthorizationError> {
    let is_number = text.len() <= 20 && text.bytes().all(|byte| byte.is_ascii_digit());
    if !is_number {
        return Err(AuthorizationError::invalid("max_age must be a number of seconds"));
    }
    Ok(text.parse().unwrap_or(u32::MAX))
}

fn parse_claims(text: &str) -> Result<RequestedClaims, AuthorizationError> {
    let invalid = AuthorizationError::invalid("claims is not valid, or longer than 4 KiB");
    if text.len() > MAX_CLAIMS_BYTES {
        return Err(invalid);
    }
    RequestedClaims::parse(text).map_err(|_| invalid)
}

/// Only S256 is supported: a plain challenge in the authorization request reveals the verifier (RFC 9700, 2.1.1).
fn parse_challenge(
    challenge: Option<&str>,
    method: Option<&str>,
    is_required: bool,
) -> Result<Option<CodeChallenge>, AuthorizationError> {
    let invalid = AuthorizationError::invalid;
    match (challenge, method) {
        (None, None) if is_required => Err(invalid("code_challenge is missing")),
        (None, None) => Ok(None),
        (None, Some(_)) => Err(invalid("code_challenge is missing")),
        (Some(challenge), Some("S256")) => {
            let parsed = CodeChallenge::parse(challenge);
            parsed.map(Some).map_err(|_| invalid("code_challenge must be 43 characters of base64url"))
        }
        // Without a method, the challenge is plain (RFC 7636, 4.3).
        (Some(_), _) => Err(invalid("code_challenge_method must be S256")),
    }
}

/// Returns the user that an `id_token_hint` names. `None` if the key of the hint is unknown: then nothing in the hint
/// can be trusted.
fn check_hint(app: &App, client: &OpenIdClient, text: &str) -> Result<Option<UserId>, AuthorizationError> {
    match id_token::verify_hint(app, text) {
        Ok(hint) if hint.client_id == client.client_id.as_str() => Ok(Some(hint.sub)),
        Err(HintError::UnknownKey) => Ok(None),
        Ok(_) | Err(HintError::Invalid) => {
            Err(AuthorizationError::invalid("id_token_hint is not an ID token of this client"))
        }
    }
}

// === impl ResponseMode ===

impl ResponseMode {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Query => "query",
            Self::FormPost => "form_post",
        }
    }

    fn parse(text: &str) -> Option<Self> {
        [Self::Query, Self::FormPost].into_iter().find(|mode| mode.as_str() == text)
    }
}

// === impl Prompts ===

impl Prompts {
    fn parse(text: &str) -> Result<Self, AuthorizationError> {
        let mut prompts = Self::default();
        for value in text.split(' ').filter(|value| !value.is_empty()) {
            match value {
                "none" => prompts.none = true,
                "login" => prompts.login = true,
                "consent" => prompts.consent = true,
                "select_account" => prompts.select_account = true,
                "create" => prompts.create = true,
                _ => return Err(AuthorizationError::invalid("prompt has an unknown value")),
            }
        }
        if prompts.none && prompts != (Self { none: true, ..Self::default() }) {
            return Err(AuthorizationError::invalid("prompt has none together with another value"));
        }
        Ok(prompts)
    }
}

// === impl ReplyTo ===

impl ReplyTo {
    /// The parameters of a successful response. `iss` prevents mix-up attacks (RFC 9207).
    pub fn success_parameters<'a>(&'a self, app: &'a App, code: &'a str) -> Vec<(&'static str, &'a str)> {
        self.with_state_and_issuer(app, vec![("code", code)])
    }

    /// The parameters of an error response.
    pub fn error_parameters<'a>(&'a self, app: &'a App, error: &AuthorizationError) -> Vec<(&'static str, &'a str)> {
        let error = vec![("error", error.code.as_str()), ("error_description", error.description)];
        self.with_state_and_issuer(app, error)
    }

    fn with_state_and_issuer<'a>(
        &'a self,
        app: &'a App,
        mut parameters: Vec<(&'static str, &'a str)>,
    ) -> Vec<(&'static str, &'a str)> {
        parameters.extend(self.state.as_deref().map(|state| ("state", state)));
        parameters.push(("iss", app.doc.issuer.as_str()));
        parameters
    }
}

// === impl AuthorizationError, AuthorizationErrorCode ===

impl AuthorizationError {
    pub const fn invalid(description: &'static str) -> Self {
        AuthorizationErrorCode::InvalidRequest.because(description)
    }
}

impl AuthorizationErrorCode {
    pub const ALL: [Self; 12] = [
        Self::InvalidRequest,
        Self::UnsupportedResponseType,
        Self::InvalidScope,
        Self::AccessDenied,
        Self::TemporarilyUnavailable,
        Self::LoginRequired,
        Self::ConsentRequired,
        Self::InteractionRequired,
        Self::RequestNotSupported,
        Self::RequestUriNotSupported,
        Self::RegistrationNotSupported,
        Self::UnmetAuthenticationRequirements,
    ];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::InvalidRequest => "invalid_request",
            Self::UnsupportedResponseType => "unsupported_response_type",
            Self::InvalidScope => "invalid_scope",
            Self::AccessDenied => "access_denied",
            Self::TemporarilyUnavailable => "temporarily_unavailable",
            Self::LoginRequired => "login_required",
            Self::ConsentRequired => "consent_required",
            Self::InteractionRequired => "interaction_required",
            Self::RequestNotSupported => "request_not_supported",
            Self::RequestUriNotSupported => "request_uri_not_supported",
            Self::RegistrationNotSupported => "registration_not_supported",
            Self::UnmetAuthenticationRequirements => "unmet_authentication_requirements",
        }
    }

    /// Builds an error with this code and this description.
    pub const fn because(self, description: &'static str) -> AuthorizationError {
        AuthorizationError { code: self, description }
    }
}

#[cfg(test)]
mod tests;
