//! The one shape of errors, and the closed set of what `error` may say.

use std::{borrow::Cow, error::Error, fmt, sync::Arc, time::Duration};

use http::{
    HeaderName, HeaderValue, StatusCode,
    header::{ALLOW, RETRY_AFTER, WWW_AUTHENTICATE},
};
use latchkey_crds::rendered::Window;
use schemars::JsonSchema;
use serde::Serialize;

use crate::domain::{
    accounts::Trouble,
    limits::Limited,
    password::Weak,
    ports::StoreError,
    refresh::{RefreshError, UNKNOWN_KEY_RETRY},
};

/// Declares the codes, each with its status and its line in the docs.
macro_rules! error_codes {
    ($($name:ident = $status:ident, $text:literal, $meaning:literal;)*) => {
        /// What `error` may say: a closed set.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, JsonSchema)]
        #[serde(rename_all = "snake_case")]
        pub enum ErrorCode {
            $($name,)*
        }

        impl ErrorCode {
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// As it stands in answers, docs and the OpenAPI document.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }

            /// The status that goes with it; `invalid_request` goes with 408 and 431 too.
            pub const fn status(self) -> StatusCode {
                match self {
                    $(Self::$name => StatusCode::$status,)*
                }
            }

            /// When it is answered, for the docs.
            pub const fn meaning(self) -> &'static str {
                match self {
                    $(Self::$name => $meaning,)*
                }
            }
        }
    };
}

error_codes! {
    InvalidRequest = BAD_REQUEST, "invalid_request", "The request is malformed, or `fields` names what is wrong with it. Also with 408 (headers or body did not come in time) and 431 (headers too large).";
    InvalidCode = BAD_REQUEST, "invalid_code", "The mailed code is wrong, used or expired; which of them is not told.";
    WeakPassword = BAD_REQUEST, "weak_password", "The password may not be set; `fields` says whether it is too short, too long or too easy to guess.";
    RedirectUrlNotAllowed = BAD_REQUEST, "redirect_url_not_allowed", "The redirect address is not on the App's list.";
    InvalidState = BAD_REQUEST, "invalid_state", "The `state` of a social login is missing, used, expired or another browser's.";
    UnsupportedGrantType = BAD_REQUEST, "unsupported_grant_type", "The grant type is not one that is served.";
    InvalidGrant = BAD_REQUEST, "invalid_grant", "The refresh token or authorization code is unknown, expired, revoked or used, or its verifier is wrong.";
    InvalidCredentials = UNAUTHORIZED, "invalid_credentials", "The address is unknown, or the password is wrong; which of them is not told.";
    InvalidToken = UNAUTHORIZED, "invalid_token", "There is no valid access token of a live session.";
    ReauthenticationRequired = UNAUTHORIZED, "reauthentication_required", "The call needs the password, or a login in the last five minutes.";
    InvalidClient = UNAUTHORIZED, "invalid_client", "The caller did not show who it is (introspection, administration).";
    InvalidProviderToken = UNAUTHORIZED, "invalid_provider_token", "The provider's token is not valid, or was issued for another client.";
    EmailNotVerified = FORBIDDEN, "email_not_verified", "The address must be verified first.";
    RegistrationDisabled = FORBIDDEN, "registration_disabled", "The App takes no registrations.";
    UserDisabled = FORBIDDEN, "user_disabled", "The user is disabled; told only after the right password.";
    AccessDenied = FORBIDDEN, "access_denied", "The user or the provider said no, or the App does not take such a user.";
    OriginNotAllowed = FORBIDDEN, "origin_not_allowed", "The call comes from an origin that is not on the App's list, and a cookie takes part.";
    NotFound = NOT_FOUND, "not_found", "There is nothing under this path.";
    AppNotFound = NOT_FOUND, "app_not_found", "There is no App under this appID.";
    ProviderNotFound = NOT_FOUND, "provider_not_found", "The App has no provider of this name.";
    MethodNotAllowed = METHOD_NOT_ALLOWED, "method_not_allowed", "The path does not take this method; `Allow` names those it takes.";
    EmailTaken = CONFLICT, "email_taken", "The address has an account (only without enumeration protection, and for administrators).";
    AccountLinkRequired = CONFLICT, "account_link_required", "The address has an account that this provider may not be linked to by address (only without enumeration protection).";
    LastIdentity = CONFLICT, "last_identity", "It is the last way into the account.";
    PayloadTooLarge = PAYLOAD_TOO_LARGE, "payload_too_large", "The body is over 64 KiB.";
    UnsupportedMediaType = UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", "The body is not `application/json` in UTF-8, or it is compressed.";
    RateLimited = TOO_MANY_REQUESTS, "rate_limited", "A limit is reached; `Retry-After` says when to come again. The call consumed nothing.";
    ServerError = INTERNAL_SERVER_ERROR, "server_error", "The fault is the service's; its log has the request id.";
    ProviderError = BAD_GATEWAY, "provider_error", "The provider did not answer, or answered what it must not.";
    TemporarilyUnavailable = SERVICE_UNAVAILABLE, "temporarily_unavailable", "A part of the service is away or at capacity; `Retry-After` says when to come again.";
}

/// What is wrong with one field: a closed set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FieldCode {
    /// It is not there.
    Missing,
    /// It is there, with nothing in it.
    Empty,
    /// It has the wrong type or form.
    Invalid,
    TooShort,
    TooLong,
    /// A password that is too easy to guess.
    Guessable,
    /// The App takes no addresses of this domain.
    DomainNotAllowed,
}

/// One bad field of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct FieldProblem {
    /// The field's name in the request.
    pub field: &'static str,
    pub code: FieldCode,
    /// What to change, for people. Never quotes the input.
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
    /// Every bad field of the request, where fields are what is wrong.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    pub fields: &'a [FieldProblem],
    /// That of `X-Request-Id`; the log has it too.
    pub request_id: &'a str,
}

/// An answer that is an error.
#[derive(Debug)]
pub struct Problem {
    pub code: ErrorCode,
    pub status: StatusCode,
    pub description: Cow<'static, str>,
    pub fields: Vec<FieldProblem>,
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// Set for refusals by a limit, for lack of capacity, or because something is away, which come in floods: the time in
    /// `Retry-After`.
    pub refused_for: Option<Duration>,
    /// The body is not read, and the connection ends.
    pub closes: bool,
    /// What led to it, for the log alone.
    pub cause: Option<Box<dyn Error + Send + Sync>>,
}

/// How long to wait for other requests to give memory back: most take less than a second, a slow body up to 30.
const NO_MEMORY: Duration = Duration::from_secs(5);
/// How long to wait for a store that is away.
const STORE_AWAY: Duration = Duration::from_secs(5);

/// In the extensions of a redirect that reports an error to the browser: the error, which is logged, and held if it is a
/// refusal, like one that is answered directly.
#[derive(Clone, Debug)]
pub struct RedirectedProblem(pub Arc<Problem>);

/// An error and what led to it, in one line.
pub struct Chain<'a>(pub &'a (dyn Error + 'a));

// === impl Problem ===

impl Problem {
    pub fn new(code: ErrorCode, description: impl Into<Cow<'static, str>>) -> Self {
        Self {
            code,
            status: code.status(),
            description: description.into(),
            fields: Vec::new(),
            headers: Vec::new(),
            refused_for: None,
            closes: false,
            cause: None,
        }
    }

    pub fn invalid_request(description: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorCode::InvalidRequest, description)
    }

    /// `invalid_request` with the fields that are bad; there is at least one.
    pub fn invalid_fields(fields: Vec<FieldProblem>) -> Self {
        Self::with_fields(ErrorCode::InvalidRequest, fields)
    }

    fn with_fields(code: ErrorCode, fields: Vec<FieldProblem>) -> Self {
        let description = fields.iter().map(|bad| format!("{} {}", bad.field, bad.message)).collect::<Vec<_>>();
        Self { fields, ..Self::new(code, description.join("; ")) }
    }

    pub fn weak_password(weak: Weak) -> Self {
        let code = match weak {
            Weak::TooShort { .. } => FieldCode::TooShort,
            Weak::TooLong => FieldCode::TooLong,
            Weak::Guessable => FieldCode::Guessable,
        };
        let message = weak.to_string().into();
        Self::with_fields(ErrorCode::WeakPassword, vec![FieldProblem { field: "password", code, message }])
    }

    pub fn not_found() -> Self {
        Self::new(ErrorCode::NotFound, "there is nothing under this path")
    }

    pub fn provider_not_found() -> Self {
        Self::new(ErrorCode::ProviderNotFound, "the App has no provider of this name")
    }

    pub fn app_not_found() -> Self {
        Self::new(ErrorCode::AppNotFound, "there is no App under this appID")
    }

    pub fn method_not_allowed(allow: &'static str) -> Self {
        Self::new(ErrorCode::MethodNotAllowed, format!("this path takes {allow}"))
            .header(ALLOW, HeaderValue::from_static(allow))
    }

    /// 401 with its challenge (RFC 9110, 15.5.2; RFC 6750, 3).
    pub fn unauthorized(code: ErrorCode, description: &'static str, challenge: HeaderValue) -> Self {
        Self::new(code, description).header(WWW_AUTHENTICATE, challenge)
    }

    pub fn limited(limited: Limited) -> Self {
        Self::rate_limited(limited.limit.as_str(), limited.window, limited.retry_after)
    }

    /// 429 by a limit of that name.
    pub fn rate_limited(name: &'static str, window: Window, retry_after: Duration) -> Self {
        let seconds = whole_seconds(retry_after);
        let (policy, now) = rate_limit_fields(name, window, seconds);
        let problem = Self::new(ErrorCode::RateLimited, "too many requests; come again after the time in Retry-After")
            .header(RETRY_AFTER, seconds.into())
            .header(HeaderName::from_static("ratelimit-policy"), policy)
            .header(HeaderName::from_static("ratelimit"), now);
        Self { refused_for: Some(retry_after), ..problem }
    }

    pub fn unavailable(retry_after: Duration) -> Self {
        let problem = Self::new(
            ErrorCode::TemporarilyUnavailable,
            "the service is away or at capacity; come again after the time in Retry-After",
        )
        .header(RETRY_AFTER, whole_seconds(retry_after).into());
        Self { refused_for: Some(retry_after), ..problem }
    }

    /// 503 before the request is read: what it would hold does not fit the budget.
    pub fn over_budget() -> Self {
        Self { closes: true, ..Self::unavailable(NO_MEMORY) }
    }

    pub fn server_error() -> Self {
        Self::new(ErrorCode::ServerError, "the service failed; its log has the request id")
    }

    pub fn header(mut self, name: HeaderName, value: HeaderValue) -> Self {
        self.headers.push((name, value));
        self
    }

    pub fn because(mut self, cause: impl Error + Send + Sync + 'static) -> Self {
        self.cause = Some(Box::new(cause));
        self
    }

    pub fn with_status(mut self, status: StatusCode) -> Self {
        self.status = status;
        self
    }
}

impl From<Trouble> for Problem {
    fn from(trouble: Trouble) -> Self {
        match trouble {
            Trouble::Limited(limited) => Self::limited(limited),
            Trouble::Busy(busy) => Self::unavailable(busy.retry_after).because(busy),
            Trouble::Store(error) => error.into(),
            Trouble::Signing(error) => Self::server_error().because(error),
        }
    }
}

impl From<RefreshError> for Problem {
    fn from(error: RefreshError) -> Self {
        match error {
            RefreshError::InvalidGrant => Self::new(
                ErrorCode::InvalidGrant,
                "the refresh token is unknown, expired, revoked or used; log in again",
            ),
            RefreshError::UnknownKey => Self::unavailable(UNKNOWN_KEY_RETRY).because(error),
            RefreshError::Trouble(trouble) => trouble.into(),
        }
    }
}

impl From<StoreError> for Problem {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Unavailable { .. } => Self::unavailable(STORE_AWAY).because(error),
            StoreError::Unexpected { .. } => Self::server_error().because(error),
        }
    }
}

/// Rounded up, and at least one: 0 would invite a loop.
fn whole_seconds(duration: Duration) -> u64 {
    (duration.as_secs() + u64::from(duration.subsec_nanos() > 0)).max(1)
}

/// `RateLimit-Policy` and `RateLimit` (draft-ietf-httpapi-ratelimit-headers-10, sections 3 and 4).
fn rate_limit_fields(name: &str, window: Window, seconds: u64) -> (HeaderValue, HeaderValue) {
    let policy = format!("\"{name}\";q={};w={}", window.count, window.window_seconds);
    let now = format!("\"{name}\";r=0;t={seconds}");
    let value = |text: String| HeaderValue::try_from(text).expect("a limit's name and numbers are ASCII");
    (value(policy), value(now))
}

// === impl Chain ===

impl fmt::Display for Chain<'_> {
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
    fn codes_are_named_as_they_are_written() {
        for code in ErrorCode::ALL {
            assert_eq!(serde_json::to_value(code).unwrap(), code.as_str());
            assert!(code.status().is_client_error() || code.status().is_server_error());
        }
    }

    #[test]
    fn the_table_in_the_docs_is_the_code() {
        let mut page = String::from(
            "# Errors\n\n\
             Every error has one body: `error` and `error_description`, `fields` where fields of the request are what is\n\
             wrong, and `request_id`. `error` is one of these; more may be added, none is renamed.\n\n\
             | status | error | when |\n|---|---|---|\n",
        );
        for code in ErrorCode::ALL {
            writeln!(page, "| {} | `{}` | {} |", code.status().as_u16(), code.as_str(), code.meaning()).unwrap();
        }
        page.push_str(
            "\nEach of `fields` is `{\"field\", \"code\", \"message\"}`; `code` is one of `missing`, `empty`, `invalid`,\n\
             `too_short`, `too_long`, `guessable`, `domain_not_allowed`.\n\n\
             What the HTTP library answers before there is a request (malformed HTTP: 400, headers over 32 KiB or more than\n\
             100: 431) has no body and no `X-Request-Id`.\n",
        );
        crate::http::docs::assert_kept("errors.md", &page);
    }

    #[test]
    fn a_limit_says_which_it_is_and_when_to_come_again() {
        let problem = Problem::limited(Limited {
            limit: LimitName::LoginsPerClient,
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
        assert_eq!(whole_seconds(Duration::ZERO), 1);
        assert_eq!(whole_seconds(Duration::from_secs(7)), 7);
    }

    #[test]
    fn what_led_to_an_error_is_not_in_its_body() {
        let source = std::io::Error::other("connection to 10.0.0.7 refused");
        let problem = Problem::from(StoreError::Unexpected { store: "postgres", source: Box::new(source) });
        let body = String::from_utf8(problem.json("id")).unwrap();
        assert!(!body.contains("postgres") && !body.contains("10.0.0.7"), "{body}");
        let chain = Chain(problem.cause.as_deref().unwrap()).to_string();
        assert_eq!(chain, "postgres answered something unexpected: connection to 10.0.0.7 refused");
    }
}
