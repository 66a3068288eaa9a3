//! Who calls: holding one of these proves the check.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use http::{HeaderMap, HeaderValue, header::AUTHORIZATION};
use latchkey_crds::rendered::AdministratorRole;

use super::{
    Ports,
    error::{ErrorCode, Problem},
};
use crate::{
    callers::{ServiceAccount, Unknown},
    domain::{
        app::App,
        session::LiveSession,
        signed_in::{NotSignedIn, SignedIn},
    },
    state::State,
};

/// How long to wait for the keys of the cluster.
const KEYS_AWAY: Duration = Duration::from_secs(5);

/// What `Authorization` holds (RFC 6750, 2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bearer<'a> {
    /// No token was sent; credentials of another scheme are none.
    None,
    Token(&'a str),
    /// More than one field, or one that cannot be read: as good as a wrong token.
    Unreadable,
}

/// The proof that a request is that of a ServiceAccount which the App lists.
#[derive(Clone, Debug)]
pub struct Administrator {
    pub account: ServiceAccount,
    /// What it may do. Every role may introspect.
    pub role: AdministratorRole,
}

/// A caller that is known, and not to the App; told in the log alone.
#[derive(Debug, thiserror::Error)]
#[error("the App does not list {0} among its administrators")]
struct NotListed(ServiceAccount);

// === impl Bearer ===

impl<'a> Bearer<'a> {
    pub fn of(request: &'a HeaderMap) -> Self {
        let mut fields = request.get_all(AUTHORIZATION).iter();
        let only = match (fields.next(), fields.next()) {
            (None, _) => return Self::None,
            (Some(only), None) => only,
            (Some(_), Some(_)) => return Self::Unreadable,
        };
        let Ok(text) = only.to_str() else { return Self::Unreadable };
        match text.split_once(' ') {
            Some((scheme, token)) if scheme.eq_ignore_ascii_case("bearer") => Self::Token(token.trim()),
            None if text.eq_ignore_ascii_case("bearer") => Self::Unreadable,
            Some(_) | None => Self::None,
        }
    }

    /// For calls that need no session: what cannot be read is as good as none.
    pub fn optional(self) -> Option<&'a str> {
        match self {
            Self::Token(token) => Some(token),
            Self::None | Self::Unreadable => None,
        }
    }
}

/// The user of the session that the request's token belongs to. A call that has a body asks before it reads the body, so that
/// no body is read without a valid token, and calls [`signed_in_still`] after it.
pub async fn signed_in<S: Ports>(state: &State<S>, app: &App, request: &HeaderMap) -> Result<SignedIn, Problem> {
    let token = token(app, request)?;
    SignedIn::prove(&state.stores, &state.env, app, token).await.map_err(|error| not_signed_in(app, error))
}

/// The same after the body was read: that can take up to 30 s, and the session can have ended meanwhile.
pub async fn signed_in_still<S: Ports>(state: &State<S>, app: &App, request: &HeaderMap) -> Result<SignedIn, Problem> {
    signed_in(state, app, request).await
}

/// The same for the gate, which remembers for a moment (see [`crate::domain::gate`]).
pub async fn at_gate<S: Ports>(state: &State<S>, app: &App, request: &HeaderMap) -> Result<Arc<LiveSession>, Problem> {
    let token = token(app, request)?;
    let look = |user, session| state.stores.session(app.id(), user, session);
    let admitted = state.gate.admit(&state.env, app, token, Instant::now(), look).await;
    admitted.map_err(|error| not_signed_in(app, error))
}

fn token<'a>(app: &App, request: &'a HeaderMap) -> Result<&'a str, Problem> {
    match Bearer::of(request) {
        Bearer::None => Err(invalid_token(app, false)),
        Bearer::Unreadable => Err(invalid_token(app, true)),
        Bearer::Token(token) => Ok(token),
    }
}

fn not_signed_in(app: &App, error: NotSignedIn) -> Problem {
    match error {
        NotSignedIn::InvalidToken => invalid_token(app, true),
        NotSignedIn::Store(error) => error.into(),
    }
}

/// The caller in the cluster. Whatever is wrong with the token, and an account that is not listed: one answer, so that
/// nobody learns whom an App lists.
pub async fn administrator<S: Ports>(
    state: &State<S>,
    app: &App,
    request: &HeaderMap,
) -> Result<Administrator, Problem> {
    let token = match Bearer::of(request) {
        Bearer::None => return Err(invalid_client(app, false)),
        Bearer::Unreadable => return Err(invalid_client(app, true)),
        Bearer::Token(token) => token,
    };
    let account = state.callers.prove(&state.env, token).await.map_err(|error| match error {
        Unknown::Refused(refusal) => invalid_client(app, true).because(refusal),
        Unknown::KeysAway => Problem::unavailable(KEYS_AWAY).because(error),
    })?;
    match role(app, &account) {
        Some(role) => Ok(Administrator { account, role }),
        None => Err(invalid_client(app, true).because(NotListed(account))),
    }
}

/// The strongest of those that the App gives it.
fn role(app: &App, account: &ServiceAccount) -> Option<AdministratorRole> {
    let strength = |role: &AdministratorRole| match role {
        AdministratorRole::Introspector => 0,
        AdministratorRole::Reader => 1,
        AdministratorRole::UserAdmin => 2,
    };
    let listed = app.doc.administrators.iter();
    let roles = listed
        .filter(|listed| listed.namespace == account.namespace() && listed.service_account == account.name())
        .map(|listed| listed.role);
    roles.max_by_key(strength)
}

/// 401. Its challenge is that of a bearer token (RFC 7662, 2.3), so it names the error of RFC 6750.
fn invalid_client(app: &App, sent: bool) -> Problem {
    let error = if sent { Some(ErrorCode::InvalidToken) } else { None };
    Problem::unauthorized(
        ErrorCode::InvalidClient,
        "show the token of a ServiceAccount that the App lists as an administrator",
        challenge(app, error),
    )
}

/// 401; the challenge names the error only where a token was sent (RFC 6750, 3.1).
pub fn invalid_token(app: &App, sent: bool) -> Problem {
    let error = if sent { Some(ErrorCode::InvalidToken) } else { None };
    Problem::unauthorized(
        ErrorCode::InvalidToken,
        "send Authorization: Bearer with a valid access token of a live session",
        challenge(app, error),
    )
}

/// The challenge that every 401 carries (RFC 9110, 15.5.2); the realm is there because RFC 6750, 3 demands a parameter.
pub fn challenge(app: &App, error: Option<ErrorCode>) -> HeaderValue {
    let realm = app.id();
    let text = match error {
        None => format!("Bearer realm=\"{realm}\""),
        Some(error) => format!("Bearer realm=\"{realm}\", error=\"{}\"", error.as_str()),
    };
    HeaderValue::try_from(text).expect("an appID and a code are ASCII")
}

#[cfg(test)]
mod tests {
    use latchkey_crds::rendered::Administrator as Listed;

    use super::*;
    use crate::fixtures;

    fn of(fields: &[&'static str]) -> String {
        let headers: HeaderMap = fields.iter().map(|field| (AUTHORIZATION, HeaderValue::from_static(field))).collect();
        format!("{:?}", Bearer::of(&headers))
    }

    #[test]
    fn a_token_comes_in_one_field_whatever_the_case_of_the_scheme() {
        assert_eq!(of(&["Bearer abc"]), "Token(\"abc\")");
        assert_eq!(of(&["bearer abc"]), "Token(\"abc\")");
        assert_eq!(of(&["BEARER  abc "]), "Token(\"abc\")");
        assert_eq!(of(&[]), "None");
        assert_eq!(of(&["Basic YTpi"]), "None");
        assert_eq!(of(&["Bearer"]), "Unreadable");
        assert_eq!(of(&["Bearer abc", "Bearer abc"]), "Unreadable");
    }
    #[test]
    fn an_account_has_the_strongest_role_that_the_app_gives_it() {
        let account = |namespace: &str, name: &str| ServiceAccount::named(namespace, name);
        let mut doc = fixtures::rendered("shop");
        for (namespace, name, role) in [
            ("shop", "one", AdministratorRole::Reader),
            ("shop", "one", AdministratorRole::UserAdmin),
            ("shop", "one", AdministratorRole::Introspector),
            ("blog", "two", AdministratorRole::Introspector),
        ] {
            doc.administrators.push(Listed { namespace: namespace.to_owned(), service_account: name.to_owned(), role });
        }
        let app = fixtures::app(doc);
        assert_eq!(role(&app, &account("shop", "one")), Some(AdministratorRole::UserAdmin));
        assert_eq!(role(&app, &account("blog", "two")), Some(AdministratorRole::Introspector));
        for (namespace, name) in [("blog", "one"), ("shop", "two"), ("shop", "On"), ("", "one")] {
            assert_eq!(role(&app, &account(namespace, name)), None, "{namespace}/{name}");
        }
    }
}
