//! `/v1/{APPID}/authorize`, by any method and with any suffix: the gate for ingresses.

use std::fmt::Display;

use http::{HeaderName, HeaderValue, StatusCode};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use crate::{
    domain::{app::App, session::LiveSession},
    http::{
        Ports,
        error::Problem,
        guard,
        request::Inbound,
        response::{self, Response},
    },
    state::State,
};

/// Everything but what RFC 3986, 2.3 never encodes.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// What an ingress tells the application. All are there in every answer, empty where there is nothing to say: an ingress
/// may replace only those of a client's own headers that the answer has (Envoy does).
pub const HEADERS: [HeaderName; 5] = [
    HeaderName::from_static("x-auth-user-id"),
    HeaderName::from_static("x-auth-email"),
    HeaderName::from_static("x-auth-email-verified"),
    HeaderName::from_static("x-auth-name"),
    HeaderName::from_static("x-auth-session-id"),
];

/// The body is not looked at.
pub async fn handle<S: Ports>(state: &State<S>, app: &App, request: Inbound) -> Result<Response, Problem> {
    let live = guard::at_gate(state, app, &request.headers).await?;
    let mut response = response::private_empty(StatusCode::OK);
    for (name, value) in HEADERS.into_iter().zip(values(&live)?) {
        response.headers_mut().insert(name, value);
    }
    Ok(response)
}

fn values(live: &LiveSession) -> Result<[HeaderValue; 5], Problem> {
    let LiveSession { session, profile } = live;
    Ok([
        value(session.user)?,
        value(profile.verified_email().unwrap_or_default())?,
        value(profile.email_verified)?,
        value(utf8_percent_encode(&profile.name, ENCODED))?,
        value(session.id)?,
    ])
}

/// Ids, addresses and what is percent-encoded are ASCII.
fn value(text: impl Display) -> Result<HeaderValue, Problem> {
    HeaderValue::try_from(text.to_string()).map_err(|error| Problem::server_error().because(error))
}
