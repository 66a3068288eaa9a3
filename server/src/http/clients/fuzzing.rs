//! The entry point of a fuzz target: the credentials of a request.

use http::HeaderMap;
use serde_json::{Map, Value};

use super::{Basic, ClientForm, RequestCredentials};
use crate::domain::openid::authenticate::PresentedClient;

/// Calls `check` with the credentials of a request with these headers and this form. Returns `None` if the request is
/// refused before its client is looked up, because it uses two methods or names two clients.
pub fn with_presented<T>(
    headers: &HeaderMap,
    form: Map<String, Value>,
    check: impl FnOnce(PresentedClient<'_>) -> T,
) -> Option<T> {
    let sent = RequestCredentials { basic: Basic::from_headers(headers), form: ClientForm(form) };
    sent.presented_client().ok().map(check)
}
