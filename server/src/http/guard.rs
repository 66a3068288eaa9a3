//! Who calls: holding one of these proves the check.

use http::{HeaderMap, HeaderValue, header::AUTHORIZATION};

use super::{
    Ports,
    error::{ErrorCode, Problem},
};
use crate::{
    domain::{
        app::App,
        signed_in::{NotSignedIn, SignedIn},
    },
    state::State,
};

/// What `Authorization` holds (RFC 6750, 2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bearer<'a> {
    /// No token was sent; credentials of another scheme are none.
    None,
    Token(&'a str),
    /// More than one field, or one that cannot be read: as good as a wrong token.
    Unreadable,
}

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

/// The user of the session that the request's token belongs to.
pub async fn signed_in<S: Ports>(state: &State<S>, app: &App, request: &HeaderMap) -> Result<SignedIn, Problem> {
    let bearer = match Bearer::of(request) {
        Bearer::None => return Err(invalid_token(app, false)),
        Bearer::Unreadable => return Err(invalid_token(app, true)),
        Bearer::Token(token) => token,
    };
    SignedIn::prove(&state.stores, &state.env, app, bearer).await.map_err(|error| match error {
        NotSignedIn::InvalidToken => invalid_token(app, true),
        NotSignedIn::Store(error) => error.into(),
    })
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
    use super::*;

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
}
