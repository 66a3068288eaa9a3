//! Answers: JSON that nobody keeps, public documents that everybody may keep, and the headers that all carry.

use std::convert::Infallible;

use aws_lc_rs::digest::{SHA256, digest};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use bytes::Bytes;
use http::{
    HeaderMap, HeaderName, HeaderValue, StatusCode,
    header::{CACHE_CONTROL, CONTENT_TYPE, ETAG, IF_NONE_MATCH},
};
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use serde::Serialize;

use super::error::{ErrorBody, Problem};

/// The body of any answer.
pub type Body = UnsyncBoxBody<Bytes, Infallible>;

/// Any answer.
pub type Response = http::Response<Body>;

pub const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

const JSON: HeaderValue = HeaderValue::from_static("application/json");
const NO_STORE: HeaderValue = HeaderValue::from_static("no-store");
/// Room for the answer of a log-in or a refresh, in octets.
const USUAL_JSON: usize = 1024;
/// Five minutes: how long a new key or address may go unseen (contract, 4).
const PUBLIC: HeaderValue = HeaderValue::from_static("public, max-age=300");

pub fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).boxed_unsync()
}

/// JSON that may hold a token, a code or user data: nobody keeps it.
pub fn json<T: Serialize>(body: &T) -> Result<Response, Problem> {
    let mut bytes = Vec::with_capacity(USUAL_JSON);
    serde_json::to_writer(&mut bytes, body).map_err(|error| Problem::server_error().because(error))?;
    Ok(private(StatusCode::OK, bytes))
}

/// A call with nothing to say answers `{}`.
pub fn nothing() -> Result<Response, Problem> {
    Ok(private(StatusCode::OK, b"{}".to_vec()))
}

fn private(status: StatusCode, json: Vec<u8>) -> Response {
    let mut response = Response::new(full(json));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, JSON);
    response.headers_mut().insert(CACHE_CONTROL, NO_STORE);
    response
}

/// Nothing but a status.
pub fn empty(status: StatusCode) -> Response {
    let mut response = Response::new(full(Bytes::new()));
    *response.status_mut() = status;
    response
}

/// The same for an answer that nobody may keep.
pub fn private_empty(status: StatusCode) -> Response {
    let mut response = empty(status);
    response.headers_mut().insert(CACHE_CONTROL, NO_STORE);
    response
}

/// A public document: kept for five minutes, then asked for again by its ETag (RFC 9110, 13.1.2).
pub fn document(bytes: impl Into<Bytes>, request: &HeaderMap) -> Response {
    let bytes = bytes.into();
    let tag = entity_tag(&bytes);
    let mut response = if matches(request, &tag) {
        empty(StatusCode::NOT_MODIFIED)
    } else {
        let mut response = Response::new(full(bytes));
        response.headers_mut().insert(CONTENT_TYPE, JSON);
        response
    };
    let tag = HeaderValue::try_from(tag).expect("base64 in quotes is a header value");
    response.headers_mut().insert(ETAG, tag);
    response.headers_mut().insert(CACHE_CONTROL, PUBLIC);
    response
}

/// A strong tag: the same octets, the same tag.
fn entity_tag(bytes: &[u8]) -> String {
    format!("\"{}\"", URL_SAFE_NO_PAD.encode(&digest(&SHA256, bytes).as_ref()[..18]))
}

/// Whether `If-None-Match` names the tag; compared weakly, as the field demands. Our tags hold no comma.
fn matches(request: &HeaderMap, tag: &str) -> bool {
    let mut listed = request
        .get_all(IF_NONE_MATCH)
        .iter()
        .filter_map(|field| field.to_str().ok())
        .flat_map(|field| field.split(','));
    listed.any(|listed| {
        let listed = listed.trim();
        listed == "*" || listed.strip_prefix("W/").unwrap_or(listed) == tag
    })
}

impl Problem {
    /// The one shape of errors; never kept.
    pub fn respond(&self, request_id: &str) -> Response {
        let mut response = private(self.status, self.json(request_id));
        for (name, value) in &self.headers {
            response.headers_mut().append(name, value.clone());
        }
        response
    }

    pub fn json(&self, request_id: &str) -> Vec<u8> {
        let body =
            ErrorBody { error: self.code, error_description: &self.description, fields: &self.fields, request_id };
        serde_json::to_vec(&body).expect("an error's body is strings")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asking(tag: &str) -> HeaderMap {
        HeaderMap::from_iter([(IF_NONE_MATCH, HeaderValue::try_from(tag).unwrap())])
    }

    #[test]
    fn a_document_that_is_known_is_not_sent_again() {
        let first = document("{}", &HeaderMap::new());
        assert_eq!(first.status(), StatusCode::OK);
        assert_eq!(first.headers()[CACHE_CONTROL], "public, max-age=300");
        let tag = first.headers()[ETAG].to_str().unwrap().to_owned();
        assert!(tag.starts_with('"') && tag.ends_with('"'), "a strong tag");
        for known in [tag.clone(), format!("W/{tag}"), format!("\"other\", {tag}"), "*".to_owned()] {
            let again = document("{}", &asking(&known));
            assert_eq!(again.status(), StatusCode::NOT_MODIFIED, "{known}");
            assert_eq!(again.headers()[ETAG], tag.as_str());
            assert_eq!(again.headers()[CACHE_CONTROL], "public, max-age=300");
            assert!(!again.headers().contains_key(CONTENT_TYPE));
        }
        assert_eq!(document("[]", &asking(&tag)).status(), StatusCode::OK);
        assert_eq!(document("{}", &asking("\"other\"")).status(), StatusCode::OK);
    }
}
