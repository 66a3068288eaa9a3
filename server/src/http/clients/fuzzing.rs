//! The entry point of a fuzz target: the credentials that a request shows.

use http::HeaderMap;
use serde_json::{Map, Value};

use super::{Basic, ClientForm, ShownCredentials};
use crate::domain::openid::authenticate::PresentedClient;

/// Calls `check` with what a request with these headers and this form shows. Returns `None` if the request is refused
/// before its client is looked up, because it uses two methods or names two clients.
pub fn with_presented<T>(
    headers: &HeaderMap,
    form: Map<String, Value>,
    check: impl FnOnce(PresentedClient<'_>) -> T,
) -> Option<T> {
    let shown = ShownCredentials { basic: Basic::from_headers(headers), form: ClientForm(form) };
    shown.presented().ok().map(check)
}
