//! The response body of every error, and the closed set of error codes.

use std::{borrow::Cow, error::Error, fmt, sync::Arc, time::Duration};

use http::{
    HeaderName, HeaderValue, StatusCode,
    header::{ALLOW, RETRY_AFTER, WWW_AUTHENTICATE},
};
use latchkey_crds::rendered::Window;
use schemars::JsonSchema;
use serde::Serialize;
use uuid::Uuid;

use crate::domain::{
    error::CommonError,
    password::WeakPassword,
    ports::StoreError,
    rate_limits::RateLimited,
    sessions::{RefreshError, UNKNOWN_KEY_RETRY},
    user::UserId,
};

/// Declares the codes, each with its status, its text, and its meaning for the documentation.
macro_rules! error_codes {
    ($($name:ident = $status:ident, $text:literal, $meaning:literal;)*) => {
        /// The values of `error`: a closed set.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, JsonSchema)]
        #[serde(rename_all = "snake_case")]
        pub enum ErrorCode {
            $($name,)*
        }

        impl ErrorCode {
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// The value in responses, documentation and the OpenAPI document.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }

            /// The status of the code. There are two exceptions: `invalid_request` is also sent with 408, and
            /// `invalid_client` with 400 (see `client_not_found`).
            pub const fn status(self) -> StatusCode {
                match self {
                    $(Self::$name => StatusCode::$status,)*
                }
            }

            /// The code with this text.
            pub fn from_name(text: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|code| code.as_str() == text)
            }

            /// Whether the error always names the user that the request conflicts with. `email_taken` names the user
            /// only on the administration listener.
            pub const fn names_user(self) -> bool {
                matches!(self, Self::ExternalIdTaken | Self::IdentityTaken)
            }

            /// When the code is returned, for the documentation.
            pub const fn meaning(self) -> &'static str {
                match self {
                    $(Self::$name => $meaning,)*
                }
            }
        }
    };
}

error_codes! {
    InvalidRequest = BAD_REQUEST, "invalid_request", "The request is malformed, or `fields` names its invalid fields. Also with 408 (headers or body not received in time).";
    InvalidCode = BAD_REQUEST, "invalid_code", "The emailed code is wrong, used or expired; the response does not say which.";
    WeakPassword = BAD_REQUEST, "weak_password", "The password cannot be set; `fields` says whether it is too short, too long or too easy to guess.";
    RedirectUrlNotAllowed = BAD_REQUEST, "redirect_url_not_allowed", "The redirect URL is not on the App's list.";
    InvalidState = BAD_REQUEST, "invalid_state", "The `state` of a social login is missing, used, expired or from another browser.";
    InvalidRequestUri = BAD_REQUEST, "invalid_request_uri", "The `request_uri` of an authorization request is unknown, used or expired, or belongs to another client (only on pages).";
    UnsupportedGrantType = BAD_REQUEST, "unsupported_grant_type", "The grant type is not supported.";
    InvalidGrant = BAD_REQUEST, "invalid_grant", "The refresh token or authorization code is unknown, expired, revoked or used, or the code verifier is wrong.";
    InvalidScope = BAD_REQUEST, "invalid_scope", "A scope was not granted, or `openid` is missing (only clients).";
    UnsupportedResponseType = BAD_REQUEST, "unsupported_response_type", "The response type of an authorization request is not `code` (only clients).";
    RequestNotSupported = BAD_REQUEST, "request_not_supported", "An authorization request has a request object (only clients).";
    RequestUriNotSupported = BAD_REQUEST, "request_uri_not_supported", "An authorization request has a `request_uri` that is not from the PAR endpoint (only clients).";
    RegistrationNotSupported = BAD_REQUEST, "registration_not_supported", "An authorization request has `registration` (only clients).";
    UnmetAuthenticationRequirements = BAD_REQUEST, "unmet_authentication_requirements", "No login reaches the `acr` that an authorization request needs (only clients).";
    InvalidCredentials = UNAUTHORIZED, "invalid_credentials", "The email address is unknown or the password is wrong; the response does not say which.";
    InvalidToken = UNAUTHORIZED, "invalid_token", "The request has no valid access token of a live session.";
    ReauthenticationRequired = UNAUTHORIZED, "reauthentication_required", "The call needs the password or a login in the last five minutes.";
    InvalidClient = UNAUTHORIZED, "invalid_client", "The caller or the client did not authenticate (token, revocation, introspection, administration).";
    InvalidProviderToken = UNAUTHORIZED, "invalid_provider_token", "The provider's token is not valid, or was issued for another client.";
    EmailNotVerified = FORBIDDEN, "email_not_verified", "The email address must be verified first.";
    RegistrationDisabled = FORBIDDEN, "registration_disabled", "The App does not accept registrations.";
    UserDisabled = FORBIDDEN, "user_disabled", "The user is disabled; returned only after the right password, or after the provider authenticated the user.";
    AccessDenied = FORBIDDEN, "access_denied", "The user or the provider refused, the App does not accept this user, the identity belongs to another account, or no role of the caller allows the call.";
    OriginNotAllowed = FORBIDDEN, "origin_not_allowed", "The call would set a cookie, and comes from an origin that is not on the App's list.";
    NotFound = NOT_FOUND, "not_found", "There is nothing at this path, or the user has no such session or identity.";
    AppNotFound = NOT_FOUND, "app_not_found", "There is no App with this appID.";
    ProviderNotFound = NOT_FOUND, "provider_not_found", "The App has no provider of this name.";
    MethodNotAllowed = METHOD_NOT_ALLOWED, "method_not_allowed", "The path does not support this method; `Allow` lists those that it supports.";
    EmailTaken = CONFLICT, "email_taken", "The email address has an account (returned only if enumeration protection is `Disabled`).";
    AccountLinkRequired = CONFLICT, "account_link_required", "The email address has an account, and this provider cannot be linked to the account by address (only with enumeration protection `Disabled`).";
    LastIdentity = CONFLICT, "last_identity", "The identity is the last way to log in to the account.";
    ExternalIdTaken = CONFLICT, "external_id_taken", "Another user has this `external_id`; `user_id` names the user (administration only).";
    IdentityTaken = CONFLICT, "identity_taken", "Another user has this identity; `user_id` names the user (administration only).";
    TooManyGroups = CONFLICT, "too_many_groups", "The App has 10,000 groups, or the user is in 500 groups (administration only).";
    VersionConflict = PRECONDITION_FAILED, "version_conflict", "The version of the user is not the version in `If-Match` (administration only).";
    PayloadTooLarge = PAYLOAD_TOO_LARGE, "payload_too_large", "The body is larger than 64 KiB.";
    UnsupportedMediaType = UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", "The body is not `application/json` in UTF-8 (for clients: not a form), or it is compressed.";
    RateLimited = TOO_MANY_REQUESTS, "rate_limited", "A limit is reached; `Retry-After` says when to try again. The call consumed no code or token.";
    ServerError = INTERNAL_SERVER_ERROR, "server_error", "The service failed; its log has the request ID.";
    ProviderError = BAD_GATEWAY, "provider_error", "The provider returned an error, or its response is invalid.";
    TemporarilyUnavailable = SERVICE_UNAVAILABLE, "temporarily_unavailable", "A part of the service, or a provider, is unavailable or at capacity; `Retry-After` says when to try again.";
}

/// What is wrong with one field: a closed set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FieldCode {
    /// The field is missing.
    Missing,
    /// The field is there, but empty.
    Empty,
    /// The field has the wrong type or format.
    Invalid,
    TooShort,
    TooLong,
    /// A password that is too easy to guess.
    Guessable,
    /// The App does not accept email addresses of this domain.
    DomainNotAllowed,
    /// The App has no provider of this name.
    UnknownProvider,
    /// A password hash of a form that cannot be imported.
    HashNotSupported,
    /// A password hash whose check would take too long or need too much memory.
    HashTooCostly,
    /// The users of the App have password hashes of too many different forms or costs.
    TooManyHashKinds,
}

/// One invalid field of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct FieldProblem {
    /// The field's name in the request.
    pub field: Cow<'static, str>,
    pub code: FieldCode,
    /// What to change, for people. It never quotes the input.
    pub message: Cow<'static, str>,
}

/// The body of every error.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Error")]
pub struct ErrorBody<'a> {
    /// What happened, for programs.
    pub error: ErrorCode,
    /// What happened, for people.
    pub error_description: &'a str,
    /// Every invalid field of the request, if fields are the reason for the error.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    pub fields: &'a [FieldProblem],
    /// The user with whom the request conflicts, if the caller is an administrator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_id: Option<Uuid>,
    /// The value of `X-Request-Id`; the log has it too.
    pub request_id: &'a str,
}

/// An error response.
#[derive(Debug)]
pub struct Problem {
    pub code: ErrorCode,
    pub status: StatusCode,
    pub description: Cow<'static, str>,
    pub fields: Vec<FieldProblem>,
    /// The user that the request conflicts with. Set only on the administration listener. Boxed to keep `Problem`
    /// small, because many functions return it.
    pub user_id: Option<Box<UserId>>,
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// The time in `Retry-After`, if the reason for the error is a limit, lack of capacity or an outage. Such errors
    /// can come in large numbers, so the pipeline limits their log lines and can hold (delay) the response.
    pub refusal_retry_after: Option<Duration>,
    /// Whether the connection closes, because the rest of the request is not read.
    pub closes_connection: bool,
    /// What caused the error, for the log only.
    pub cause: Option<Box<dyn Error + Send + Sync>>,
}

/// `Retry-After` if a request does not fit the memory budget. Most requests release their memory in less than a second.
/// A request with a slow body can hold it for up to 30 s.
pub const OVER_BUDGET_RETRY_AFTER: Duration = Duration::from_secs(5);
/// `Retry-After` during an outage of a store.
const STORE_RETRY_AFTER: Duration = Duration::from_secs(5);

/// The error of a response that is not JSON: a redirect reports the error in the parameters of its URL, a page in its
/// HTML. A handler adds this value to the extensions of the response, so that the pipeline logs and delays the response
/// like an error.
#[derive(Clone, Debug)]
pub struct ReportedProblem(pub Arc<Problem>);

/// Displays an error and its sources in one line.
pub struct ErrorChain<'a>(pub &'a (dyn Error + 'a));

// === impl Problem ===

impl Problem {
    pub fn new(code: ErrorCode, description: impl Into<Cow<'static, str>>) -> Self {
        Self {
            code,
            status: code.status(),
            description: description.into(),
            fields: Vec::new(),
            user_id: None,
            headers: Vec::new(),
            refusal_retry_after: None,
            closes_connection: false,
            cause: None,
        }
    }

    pub fn invalid_request(description: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorCode::InvalidRequest, description)
    }

    /// `invalid_request` with the invalid fields. `fields` must not be empty.
    pub fn invalid_fields(fields: Vec<FieldProblem>) -> Self {
        Self::from_fields(ErrorCode::InvalidRequest, fields)
    }

    fn from_fields(code: ErrorCode, fields: Vec<FieldProblem>) -> Self {
        let description = fields.iter().map(|bad| format!("{} {}", bad.field, bad.message)).collect::<Vec<_>>();
        Self { fields, ..Self::new(code, description.join("; ")) }
    }

    pub fn weak_password(weak: WeakPassword) -> Self {
        let code = match weak {
            WeakPassword::TooShort { .. } => FieldCode::TooShort,
            WeakPassword::TooLong => FieldCode::TooLong,
            WeakPassword::Guessable => FieldCode::Guessable,
        };
        let message = weak.to_string().into();
        Self::from_fields(ErrorCode::WeakPassword, vec![FieldProblem { field: "password".into(), code, message }])
    }

    pub fn not_found() -> Self {
        Self::new(ErrorCode::NotFound, "there is nothing at this path")
    }

    pub fn invalid_state() -> Self {
        Self::new(ErrorCode::InvalidState, "the state is missing, used, expired or from another browser; start again")
    }

    pub fn provider_not_found() -> Self {
        Self::new(ErrorCode::ProviderNotFound, "the App has no provider of this name")
    }

    /// The 400 for a browser that sends the ID of an unknown client. A client that fails to authenticate itself gets a
    /// 401 with the same code.
    pub fn client_not_found() -> Self {
        Self::new(ErrorCode::InvalidClient, "the App has no such client")
            .with_status(ErrorCode::InvalidRequest.status())
    }

    pub fn client_redirect_url_not_allowed() -> Self {
        Self::new(ErrorCode::RedirectUrlNotAllowed, "the redirect URL is not registered for the client")
    }

    pub fn app_not_found() -> Self {
        Self::new(ErrorCode::AppNotFound, "there is no App with this appID")
    }

    pub fn method_not_allowed(allow: &'static str) -> Self {
        Self::new(ErrorCode::MethodNotAllowed, format!("this path supports {allow}"))
            .with_header(ALLOW, HeaderValue::from_static(allow))
    }

    /// 401 with its challenge (RFC 9110, 15.5.2; RFC 6750, 3).
    pub fn unauthorized(code: ErrorCode, description: &'static str, challenge: HeaderValue) -> Self {
        Self::new(code, description).with_header(WWW_AUTHENTICATE, challenge)
    }

    /// 429 because the limit `name` is reached.
    pub fn rate_limited(name: &'static str, window: Window, retry_after: Duration) -> Self {
        let seconds = round_up_seconds(retry_after);
        let (policy, rate_limit) = rate_limit_fields(name, window, seconds);
        let problem = Self::new(ErrorCode::RateLimited, "too many requests; try again after the time in Retry-After")
            .with_header(RETRY_AFTER, seconds.into())
            .with_header(HeaderName::from_static("ratelimit-policy"), policy)
            .with_header(HeaderName::from_static("ratelimit"), rate_limit);
        Self { refusal_retry_after: Some(retry_after), ..problem }
    }

    pub fn unavailable(retry_after: Duration) -> Self {
        let problem = Self::new(
            ErrorCode::TemporarilyUnavailable,
            "the service is unavailable or at capacity; try again after the time in Retry-After",
        )
        .with_header(RETRY_AFTER, round_up_seconds(retry_after).into());
        Self { refusal_retry_after: Some(retry_after), ..problem }
    }

    /// 503 because the memory that the request needs does not fit the budget. The rest of the request is not read.
    pub fn over_budget() -> Self {
        Self { closes_connection: true, ..Self::unavailable(OVER_BUDGET_RETRY_AFTER) }
    }

    pub fn server_error() -> Self {
        Self::new(ErrorCode::ServerError, "the service failed; its log has the request ID")
    }

    pub fn with_header(mut self, name: HeaderName, value: HeaderValue) -> Self {
        self.headers.push((name, value));
        self
    }

    pub fn with_cause(mut self, cause: impl Error + Send + Sync + 'static) -> Self {
        self.cause = Some(Box::new(cause));
        self
    }

    pub fn with_status(mut self, status: StatusCode) -> Self {
        self.status = status;
        self
    }
}

impl From<CommonError> for Problem {
    fn from(error: CommonError) -> Self {
        match error {
            CommonError::RateLimited(limited) => limited.into(),
            CommonError::Overloaded(overloaded) => Self::unavailable(overloaded.retry_after).with_cause(overloaded),
            CommonError::Store(error) => error.into(),
            CommonError::Signing(error) => Self::server_error().with_cause(error),
        }
    }
}

impl From<RateLimited> for Problem {
    fn from(limited: RateLimited) -> Self {
        Self::rate_limited(limited.limit.as_str(), limited.window, limited.retry_after)
    }
}

impl From<RefreshError> for Problem {
    fn from(error: RefreshError) -> Self {
        match error {
            RefreshError::InvalidGrant => Self::new(
                ErrorCode::InvalidGrant,
                "the refresh token is unknown, expired, revoked or used; log in again",
            ),
            RefreshError::UnknownKey => Self::unavailable(UNKNOWN_KEY_RETRY).with_cause(error),
            RefreshError::Common(error) => error.into(),
        }
    }
}

impl From<StoreError> for Problem {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Unavailable { .. } => Self::unavailable(STORE_RETRY_AFTER).with_cause(error),
            StoreError::Unexpected { .. } => Self::server_error().with_cause(error),
        }
    }
}

/// Rounds up to whole seconds, at least one: with 0, clients would try again in a loop.
fn round_up_seconds(duration: Duration) -> u64 {
    (duration.as_secs() + u64::from(duration.subsec_nanos() > 0)).max(1)
}

/// Values of `RateLimit-Policy` and `RateLimit` (draft-ietf-httpapi-ratelimit-headers-10, sections 3 and 4).
fn rate_limit_fields(name: &str, window: Window, seconds: u64) -> (HeaderValue, HeaderValue) {
    let policy = format!("\"{name}\";q={};w={}", window.count, window.window_seconds);
    let rate_limit = format!("\"{name}\";r=0;t={seconds}");
    let value = |text: String| HeaderValue::try_from(text).expect("the name and the numbers of a limit are ASCII");
    (value(policy), value(rate_limit))
}

// === impl ErrorChain ===

impl fmt::Display for ErrorChain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)?;
        let mut source = self.0.source();
        while let Some(error) = source {
            write!(f, ": {error}")?;
            source = error.source();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;

    use latchkey_crds::rendered::{LimitName, Window};

    use super::*;

    #[test]
    fn codes_serialize_as_their_text() {
        for code in ErrorCode::ALL {
            assert_eq!(serde_json::to_value(code).unwrap(), code.as_str());
            assert!(code.status().is_client_error() || code.status().is_server_error());
        }
    }

    #[test]
    fn the_table_in_the_docs_is_up_to_date() {
        let mut page = String::from(
            "# Errors\n\n\
             Every error has one body: `error` and `error_description`, `fields` if fields of the request are\n\
             invalid, and `request_id`. `error` is one of these; codes can be added, but are never renamed.\n\n\
             | status | error | when |\n|---|---|---|\n",
        );
        for code in ErrorCode::ALL {
            writeln!(page, "| {} | `{}` | {} |", code.status().as_u16(), code.as_str(), code.meaning()).unwrap();
        }
        page.push_str(
            "\nEach of `fields` is `{\"field\", \"code\", \"message\"}`; `code` is one of `missing`, `empty`, `invalid`,\n\
             `too_short`, `too_long`, `guessable`, `domain_not_allowed`, `unknown_provider`,\n\
             `hash_not_supported`, `hash_too_costly`, `too_many_hash_kinds`.\n\n\
             Responses of the HTTP library before there is a request (malformed HTTP: 400, headers over 32 KiB or more than\n\
             100 header fields: 431) have no body and no `X-Request-Id`.\n",
        );
        crate::http::docs::assert_up_to_date("errors.md", &page);
    }

    #[test]
    fn a_429_has_the_name_of_the_limit_and_the_time_to_retry() {
        let problem = Problem::from(RateLimited {
            limit: LimitName::LoginsPerClient.into(),
            window: Window { count: 60, window_seconds: 60 },
            retry_after: Duration::from_millis(12_001),
        });
        assert_eq!(problem.status, StatusCode::TOO_MANY_REQUESTS);
        let headers: Vec<_> =
            problem.headers.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
        assert_eq!(
            headers,
            [
                ("retry-after", "13"),
                ("ratelimit-policy", "\"loginsPerClient\";q=60;w=60"),
                ("ratelimit", "\"loginsPerClient\";r=0;t=13"),
            ]
        );
        assert_eq!(round_up_seconds(Duration::ZERO), 1);
        assert_eq!(round_up_seconds(Duration::from_secs(7)), 7);
    }

    #[test]
    fn the_cause_of_an_error_is_not_in_its_body() {
        let source = std::io::Error::other("connection to 10.0.0.7 refused");
        let problem = Problem::from(StoreError::Unexpected { store: "postgres", source: Box::new(source) });
        let body = String::from_utf8(problem.to_json("id")).unwrap();
        assert!(!body.contains("postgres") && !body.contains("10.0.0.7"), "{body}");
        let chain = ErrorChain(problem.cause.as_deref().unwrap()).to_string();
        assert_eq!(chain, "postgres returned an unexpected response: connection to 10.0.0.7 refused");
    }
}
