//! The responses of pages, with their security headers (specification: Hosted pages, Protection).

use bytes::Bytes;
use http::{
    HeaderMap, HeaderValue, StatusCode,
    header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, X_FRAME_OPTIONS},
};

use crate::http::{
    error::Problem,
    response::{self, Response, full_body},
};

/// The Content-Security-Policy of pages. It has no `form-action`: browsers would also apply it to the redirect after a
/// POST, and block the redirect to a client.
const PAGE_POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'none'; style-src 'self'; img-src 'self'; base-uri 'none'; frame-ancestors 'none'",
);
/// The Content-Security-Policy of a page with a script.
const SCRIPT_POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; base-uri 'none'; frame-ancestors 'none'",
);
/// The logo is content of a tenant. Because of `sandbox`, a browser that opens the logo as a document gives it an
/// origin of its own.
const LOGO_POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'none'; style-src 'self'; img-src 'self'; base-uri 'none'; frame-ancestors 'none'; sandbox",
);
const NO_STORE: HeaderValue = HeaderValue::from_static("no-store");
const IMMUTABLE: HeaderValue = HeaderValue::from_static("public, max-age=31536000, immutable");

/// A page. `has_script`: the page loads a script, which is a file of our own. Without `has_script`, the page can run no
/// script.
pub(super) fn html(status: StatusCode, html: String, has_script: bool) -> Response {
    let mut response = Response::new(full_body(html));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"));
    headers.insert(CACHE_CONTROL, NO_STORE);
    let policy = if has_script { SCRIPT_POLICY } else { PAGE_POLICY };
    // With the referrer policy `no-referrer`, browsers would send `Origin: null` with our own forms.
    insert_protection(headers, policy, HeaderValue::from_static("same-origin"));
    response
}

/// A file. If its URL has the hash of its content (`is_current`), browsers keep it forever.
pub(super) fn file(content_type: &'static str, content: Bytes, is_current: bool) -> Response {
    let mut response = Response::new(full_body(content));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(CACHE_CONTROL, if is_current { IMMUTABLE } else { NO_STORE });
    insert_protection(headers, PAGE_POLICY, HeaderValue::from_static("same-origin"));
    response
}

/// Like [`file`], for the logo.
pub(super) fn logo(content_type: &'static str, content: Bytes, is_current: bool) -> Response {
    let mut response = file(content_type, content, is_current);
    response.headers_mut().insert(CONTENT_SECURITY_POLICY, LOGO_POLICY);
    response
}

/// A redirect, with the security headers of a page.
pub(super) fn redirect(status: StatusCode, url: &str) -> Result<Response, Problem> {
    let mut response = response::redirect(status, url)?;
    insert_protection(response.headers_mut(), PAGE_POLICY, HeaderValue::from_static("no-referrer"));
    Ok(response)
}

fn insert_protection(headers: &mut HeaderMap, policy: HeaderValue, referrer: HeaderValue) {
    headers.insert(CONTENT_SECURITY_POLICY, policy);
    headers.insert(X_FRAME_OPTIONS, HeaderValue::from_static("DENY"));
    headers.insert(REFERRER_POLICY, referrer);
}
