//! `/v1/{APPID}/authorize`, with any method and any suffix: forward auth for ingresses.

use std::fmt::Display;

use http::{HeaderName, HeaderValue, StatusCode};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use crate::{
    domain::{app::App, session::LiveSession},
    http::{
        Ports, authentication,
        error::Problem,
        openapi::operation::Operation,
        request::InboundRequest,
        response::{self, Response},
    },
    state::State,
};

/// Everything except the unreserved characters of RFC 3986, 2.3.
const PERCENT_ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// The headers that an ingress passes to the application. A header without a value is sent empty, not left out.
/// Otherwise some ingresses (Envoy) would pass on a header of this name that the client sent.
pub const HEADERS: [HeaderName; 5] = [
    HeaderName::from_static("x-auth-user-id"),
    HeaderName::from_static("x-auth-email"),
    HeaderName::from_static("x-auth-email-verified"),
    HeaderName::from_static("x-auth-name"),
    HeaderName::from_static("x-auth-session-id"),
];

pub fn operation() -> Operation {
    Operation::new(
        "Forward auth for ingresses: whether the token belongs to a live session",
        "Accepts any method and ignores the body. Responses have no CORS headers, and OPTIONS needs a token too. A session that ends is \
         refused within a second.",
    )
    .requires_access_token()
    .response_headers(&[
        "X-Auth-User-Id",
        "X-Auth-Email",
        "X-Auth-Email-Verified",
        "X-Auth-Name",
        "X-Auth-Session-Id",
    ])
}

/// Handles a call from an ingress. Ignores the body.
pub async fn handle<S: Ports>(state: &State<S>, app: &App, request: InboundRequest) -> Result<Response, Problem> {
    let live = authentication::forward_auth_session(state, app, &request).await?;
    let mut response = response::private_empty(StatusCode::OK);
    for (name, value) in HEADERS.into_iter().zip(header_values(&live)?) {
        response.headers_mut().insert(name, value);
    }
    Ok(response)
}

fn header_values(live: &LiveSession) -> Result<[HeaderValue; 5], Problem> {
    let LiveSession { session, profile } = live;
    Ok([
        header_value(session.user)?,
        header_value(profile.verified_email().unwrap_or_default())?,
        header_value(profile.email_verified)?,
        header_value(utf8_percent_encode(&profile.name, PERCENT_ENCODED))?,
        header_value(session.id)?,
    ])
}

/// Makes a header value. Fails only if the text contains a control character, which ids, email addresses and
/// percent-encoded names never do.
fn header_value(text: impl Display) -> Result<HeaderValue, Problem> {
    HeaderValue::try_from(text.to_string()).map_err(|error| Problem::server_error().with_cause(error))
}
