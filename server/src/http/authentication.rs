//! Authentication of users and callers. An [`AuthenticatedSession`] proves that a user is authenticated. A [`Caller`]
//! proves that a caller in the cluster is authenticated.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use http::{HeaderMap, HeaderValue, header::AUTHORIZATION};

use super::{
    Ports,
    error::{ErrorCode, Problem},
    request::InboundRequest,
};
use crate::{
    callers::{CallerError, ServiceAccount},
    domain::{
        app::App,
        authentication::{AuthenticatedSession, AuthenticationError},
        openid::{
            claims::disclosed_profile,
            client_session::{SessionUse, find_client_session},
        },
        rights::{Right, Rights},
        session::LiveSession,
    },
    state::State,
    token_cache::TokenSession,
};

/// `Retry-After` while the keys for ServiceAccount tokens are unavailable.
const KEYS_RETRY_AFTER: Duration = Duration::from_secs(5);

/// The content of `Authorization` (RFC 6750, 2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bearer<'a> {
    /// No bearer token was sent. Credentials of another scheme are ignored.
    None,
    Token(&'a str),
    /// More than one `Authorization` field, or a field that cannot be parsed. Treated as a wrong token, except by
    /// [`Bearer::token`].
    Malformed,
}

/// The proof that a request comes from a ServiceAccount that the App lists.
#[derive(Clone, Debug)]
pub struct Caller {
    pub account: ServiceAccount,
    pub rights: Rights,
}

/// The caller is authenticated, but the App does not list it. Only the log contains this reason.
#[derive(Debug, thiserror::Error)]
#[error("the App does not list {0} among its administrators")]
struct NotListed(ServiceAccount);

/// The App lists the caller, but no role of the caller allows the call.
#[derive(Debug, thiserror::Error)]
#[error("no role of {account} includes the right to {right}")]
struct MissingRight {
    account: ServiceAccount,
    right: Right,
}

// === impl Caller ===

impl Caller {
    /// Returns 403 if no role of the caller includes the right.
    pub fn require(&self, right: Right) -> Result<(), Problem> {
        if self.rights.contains(right) {
            return Ok(());
        }
        let problem = Problem::new(ErrorCode::AccessDenied, "the App gives this ServiceAccount no role for this call");
        Err(problem.with_cause(MissingRight { account: self.account.clone(), right }))
    }
}

// === impl Bearer ===

impl<'a> Bearer<'a> {
    pub fn from_headers(headers: &'a HeaderMap) -> Self {
        let mut fields = headers.get_all(AUTHORIZATION).iter();
        let only = match (fields.next(), fields.next()) {
            (None, _) => return Self::None,
            (Some(only), None) => only,
            (Some(_), Some(_)) => return Self::Malformed,
        };
        let Ok(text) = only.to_str() else { return Self::Malformed };
        match text.split_once(' ') {
            Some((scheme, token)) if scheme.eq_ignore_ascii_case("bearer") => Self::Token(token.trim()),
            None if text.eq_ignore_ascii_case("bearer") => Self::Malformed,
            Some(_) | None => Self::None,
        }
    }

    /// The token, for calls in which a token is optional. A header that cannot be parsed is treated as a missing
    /// header.
    pub fn token(self) -> Option<&'a str> {
        match self {
            Self::Token(token) => Some(token),
            Self::None | Self::Malformed => None,
        }
    }
}

/// Authenticates the user by the access token of the request. A handler calls this before it reads a body, so that no
/// body is read without a valid token. After the body is read, the handler calls [`authenticate_again`].
pub async fn authenticate<S: Ports>(
    state: &State<S>,
    app: &App,
    request: &InboundRequest,
) -> Result<AuthenticatedSession, Problem> {
    authenticate_token(state, app, request, bearer_token(app, &request.headers)?).await
}

/// Like [`authenticate`], for a token that was not sent in the header.
pub async fn authenticate_token<S: Ports>(
    state: &State<S>,
    app: &App,
    request: &InboundRequest,
    token: &str,
) -> Result<AuthenticatedSession, Problem> {
    let authenticated = AuthenticatedSession::authenticate(state.call(app, &request.client), token).await;
    authenticated.map_err(|error| session_problem(app, error))
}

/// Repeats [`authenticate`] after the body was read. Reading a body can take up to 30 s, and the session can end in the
/// meantime.
pub async fn authenticate_again<S: Ports>(
    state: &State<S>,
    app: &App,
    request: &InboundRequest,
) -> Result<AuthenticatedSession, Problem> {
    authenticate(state, app, request).await
}

/// Returns the session of the request's access token, for forward auth. Forward auth also accepts a token of an OpenID
/// Connect client, if an audience of the token is an audience of the App. The issuer does not count here, because every
/// token of a client has it as an audience. The profile in such a session contains only what the token's scopes
/// disclose. Forward auth caches sessions for up to a second.
pub async fn forward_auth_session<S: Ports>(
    state: &State<S>,
    app: &App,
    request: &InboundRequest,
) -> Result<Arc<LiveSession>, Problem> {
    let token = bearer_token(app, &request.headers)?;
    let call = state.call(app, &request.client);
    let find_session = |token: TokenSession| async move {
        let Some(scopes) = token.client_scopes else {
            return call.stores.session(call.app_id(), token.user, token.session).await;
        };
        let found = find_client_session(call, token.user, token.session, SessionUse::Counted).await?;
        Ok(found.map(|(client, found)| LiveSession {
            session: found.session,
            profile: disclosed_profile(found.profile, scopes.intersection(client.scopes)),
        }))
    };
    let authenticated = state.token_cache.authenticate(&state.env, app, token, Instant::now(), find_session).await;
    authenticated.map_err(|error| session_problem(app, error))
}

pub fn bearer_token<'a>(app: &App, headers: &'a HeaderMap) -> Result<&'a str, Problem> {
    match Bearer::from_headers(headers) {
        Bearer::None => Err(invalid_token(app, false)),
        Bearer::Malformed => Err(invalid_token(app, true)),
        Bearer::Token(token) => Ok(token),
    }
}

fn session_problem(app: &App, error: AuthenticationError) -> Problem {
    match error {
        AuthenticationError::InvalidToken => invalid_token(app, true),
        AuthenticationError::Store(error) => error.into(),
    }
}

/// Authenticates a caller in the cluster. A wrong token and a ServiceAccount that is not listed get the same response,
/// so that nobody learns which ServiceAccounts an App lists.
pub async fn authenticate_caller<S: Ports>(
    state: &State<S>,
    app: &App,
    headers: &HeaderMap,
) -> Result<Caller, Problem> {
    let token = match Bearer::from_headers(headers) {
        Bearer::None => return Err(invalid_client(app, false)),
        Bearer::Malformed => return Err(invalid_client(app, true)),
        Bearer::Token(token) => token,
    };
    let account = state.callers.authenticate(&state.env, token).await.map_err(|error| match error {
        CallerError::InvalidToken(reason) => invalid_client(app, true).with_cause(reason),
        CallerError::KeysUnavailable => Problem::unavailable(KEYS_RETRY_AFTER).with_cause(error),
    })?;
    match app.rights_of(account.namespace(), account.name()) {
        Some(rights) => Ok(Caller { account, rights }),
        None => Err(invalid_client(app, true).with_cause(NotListed(account))),
    }
}

/// Returns a 401 with the challenge for a bearer token (RFC 7662, 2.3). If a token was sent, the challenge contains the
/// error `invalid_token` of RFC 6750, although the error in the body is `invalid_client`.
fn invalid_client(app: &App, has_token: bool) -> Problem {
    let error = if has_token { Some(ErrorCode::InvalidToken) } else { None };
    Problem::unauthorized(
        ErrorCode::InvalidClient,
        "show the token of a ServiceAccount that the App lists as an administrator",
        challenge(app, error),
    )
}

/// Returns a 401. The challenge names the error only if a token was sent (RFC 6750, 3.1).
pub fn invalid_token(app: &App, has_token: bool) -> Problem {
    let error = if has_token { Some(ErrorCode::InvalidToken) } else { None };
    Problem::unauthorized(
        ErrorCode::InvalidToken,
        "send Authorization: Bearer with a valid access token of a live session",
        challenge(app, error),
    )
}

/// The challenge of a 401 with the scheme Bearer. Every 401 has a challenge (RFC 9110, 15.5.2). RFC 6750, 3 requires at
/// least one parameter, so each challenge contains the realm.
pub fn challenge(app: &App, error: Option<ErrorCode>) -> HeaderValue {
    let realm = app.id();
    let text = match error {
        None => format!("Bearer realm=\"{realm}\""),
        Some(error) => format!("Bearer realm=\"{realm}\", error=\"{}\"", error.as_str()),
    };
    HeaderValue::try_from(text).expect("an appID and an error code are ASCII")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(fields: &[&'static str]) -> String {
        let headers: HeaderMap = fields.iter().map(|field| (AUTHORIZATION, HeaderValue::from_static(field))).collect();
        format!("{:?}", Bearer::from_headers(&headers))
    }

    #[test]
    fn a_token_is_in_one_field_and_the_case_of_its_scheme_is_ignored() {
        assert_eq!(parse(&["Bearer abc"]), "Token(\"abc\")");
        assert_eq!(parse(&["bearer abc"]), "Token(\"abc\")");
        assert_eq!(parse(&["BEARER  abc "]), "Token(\"abc\")");
        assert_eq!(parse(&[]), "None");
        assert_eq!(parse(&["Basic YTpi"]), "None");
        assert_eq!(parse(&["Bearer"]), "Malformed");
        assert_eq!(parse(&["Bearer abc", "Bearer abc"]), "Malformed");
    }

    #[test]
    fn a_caller_without_the_right_gets_403_and_only_the_log_names_the_account() {
        let account = ServiceAccount::named("shop", "imports");
        let caller = Caller { account, rights: Rights::IMPORTER };
        assert!(caller.require(Right::Import).is_ok());
        for right in [Right::Introspect, Right::Read, Right::ManageUsers] {
            let problem = caller.require(right).unwrap_err();
            assert_eq!((problem.code, problem.status.as_u16()), (ErrorCode::AccessDenied, 403));
            assert!(!problem.description.contains("imports"), "{}", problem.description);
            assert_eq!(
                problem.cause.unwrap().to_string(),
                format!("no role of shop/imports includes the right to {right}")
            );
        }
    }
}
