//! Responses: private JSON that must not be cached, public documents that can be cached, and the response of an error.

use std::convert::Infallible;

use aws_lc_rs::digest::{SHA256, digest};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use bytes::Bytes;
use http::{
    HeaderMap, HeaderName, HeaderValue, StatusCode,
    header::{CACHE_CONTROL, CONTENT_TYPE, ETAG, IF_NONE_MATCH, LOCATION, REFERRER_POLICY},
};
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use serde::Serialize;

use super::error::{ErrorBody, Problem};

/// The body of every response.
pub type Body = UnsyncBoxBody<Bytes, Infallible>;

/// The type of every response.
pub type Response = http::Response<Body>;

pub const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The media type of lines of JSON.
pub const NDJSON: &str = "application/x-ndjson";

const JSON: HeaderValue = HeaderValue::from_static("application/json");
const NO_STORE: HeaderValue = HeaderValue::from_static("no-store");
/// Initial size of the buffer for a JSON body, in bytes: enough for the response of *login* or *token*.
const JSON_CAPACITY: usize = 1024;
/// Clients can use a public document for five minutes before they validate it. In that time they do not see a new key
/// (specification: Sessions and tokens, Discovery and JWKS).
const PUBLIC_CACHE_CONTROL: HeaderValue = HeaderValue::from_static("public, max-age=300");

pub fn full_body(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).boxed_unsync()
}

/// JSON that can contain a token, a code or user data: it must not be cached.
pub fn json<T: Serialize>(body: &T) -> Result<Response, Problem> {
    let mut bytes = Vec::with_capacity(JSON_CAPACITY);
    serde_json::to_writer(&mut bytes, body).map_err(|error| Problem::server_error().with_cause(error))?;
    Ok(private_json(StatusCode::OK, bytes))
}

/// The response `{}` of a call that returns no data.
pub fn empty_object() -> Result<Response, Problem> {
    Ok(private_json(StatusCode::OK, b"{}".to_vec()))
}

fn private_json(status: StatusCode, json: Vec<u8>) -> Response {
    let mut response = Response::new(full_body(json));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, JSON);
    response.headers_mut().insert(CACHE_CONTROL, NO_STORE);
    response
}

/// A response without a body.
pub fn empty(status: StatusCode) -> Response {
    let mut response = Response::new(full_body(Bytes::new()));
    *response.status_mut() = status;
    response
}

/// A response without a body. The response must not be cached.
pub fn private_empty(status: StatusCode) -> Response {
    let mut response = empty(status);
    response.headers_mut().insert(CACHE_CONTROL, NO_STORE);
    response
}

/// A redirect that must not be cached. Its URL must not leak in a `Referer`.
pub fn redirect(status: StatusCode, url: &str) -> Result<Response, Problem> {
    let location = HeaderValue::try_from(url).map_err(|error| Problem::server_error().with_cause(error))?;
    let mut response = private_empty(status);
    response.headers_mut().insert(LOCATION, location);
    response.headers_mut().insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    Ok(response)
}

/// A public document. Clients can use it for five minutes and then validate it by its ETag (RFC 9110, 13.1.2).
pub fn public_document(bytes: impl Into<Bytes>, request_headers: &HeaderMap) -> Response {
    let bytes = bytes.into();
    let tag = entity_tag(&bytes);
    let mut response = if matches_etag(request_headers, &tag) {
        empty(StatusCode::NOT_MODIFIED)
    } else {
        let mut response = Response::new(full_body(bytes));
        response.headers_mut().insert(CONTENT_TYPE, JSON);
        response
    };
    let tag = HeaderValue::try_from(tag).expect("base64 in quotes is a header value");
    response.headers_mut().insert(ETAG, tag);
    response.headers_mut().insert(CACHE_CONTROL, PUBLIC_CACHE_CONTROL);
    response
}

/// A strong ETag: a hash of the bytes.
fn entity_tag(bytes: &[u8]) -> String {
    format!("\"{}\"", URL_SAFE_NO_PAD.encode(&digest(&SHA256, bytes).as_ref()[..18]))
}

/// Whether `If-None-Match` contains the ETag. The comparison is weak, as RFC 9110, 13.1.2 requires. The list can be
/// split at commas, because our ETags contain none.
fn matches_etag(request_headers: &HeaderMap, tag: &str) -> bool {
    let mut listed = request_headers
        .get_all(IF_NONE_MATCH)
        .iter()
        .filter_map(|field| field.to_str().ok())
        .flat_map(|field| field.split(','));
    listed.any(|candidate| {
        let candidate = candidate.trim();
        candidate == "*" || candidate.strip_prefix("W/").unwrap_or(candidate) == tag
    })
}

impl Problem {
    /// Returns the error response. It must not be cached.
    pub fn to_response(&self, request_id: &str) -> Response {
        let mut response = private_json(self.status, self.to_json(request_id));
        for (name, value) in &self.headers {
            response.headers_mut().append(name, value.clone());
        }
        response
    }

    pub fn to_json(&self, request_id: &str) -> Vec<u8> {
        let body = ErrorBody {
            error: self.code,
            error_description: &self.description,
            fields: &self.fields,
            user_id: self.user_id.as_ref().map(|user| user.0),
            request_id,
        };
        serde_json::to_vec(&body).expect("the body of an error consists of strings")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn if_none_match(tag: &str) -> HeaderMap {
        HeaderMap::from_iter([(IF_NONE_MATCH, HeaderValue::try_from(tag).unwrap())])
    }

    #[test]
    fn a_cached_document_is_not_sent_again() {
        let first = public_document("{}", &HeaderMap::new());
        assert_eq!(first.status(), StatusCode::OK);
        assert_eq!(first.headers()[CACHE_CONTROL], "public, max-age=300");
        let tag = first.headers()[ETAG].to_str().unwrap().to_owned();
        assert!(tag.starts_with('"') && tag.ends_with('"'), "a strong tag");
        for sent_tag in [tag.clone(), format!("W/{tag}"), format!("\"other\", {tag}"), "*".to_owned()] {
            let again = public_document("{}", &if_none_match(&sent_tag));
            assert_eq!(again.status(), StatusCode::NOT_MODIFIED, "{sent_tag}");
            assert_eq!(again.headers()[ETAG], tag.as_str());
            assert_eq!(again.headers()[CACHE_CONTROL], "public, max-age=300");
            assert!(!again.headers().contains_key(CONTENT_TYPE));
        }
        assert_eq!(public_document("[]", &if_none_match(&tag)).status(), StatusCode::OK);
        assert_eq!(public_document("{}", &if_none_match("\"other\"")).status(), StatusCode::OK);
    }
}
