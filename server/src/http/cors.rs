//! CORS for the origins on an App's list of allowed origins, and for the web pages of its clients. Origins are compared
//! exactly (Fetch standard, 3.2), except for the port of a loopback host.

use super::response::{self, Response};
use crate::domain::app::App;
use http::{
    HeaderMap, HeaderValue, StatusCode,
    header::{
        ACCESS_CONTROL_ALLOW_CREDENTIALS, ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS,
        ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE,
        ACCESS_CONTROL_REQUEST_METHOD, ALLOW, ORIGIN, VARY,
    },
};

const ALLOWED_HEADERS: HeaderValue = HeaderValue::from_static("content-type, authorization, x-request-id");
const EXPOSED_HEADERS: HeaderValue = HeaderValue::from_static("X-Request-Id, Retry-After, RateLimit, RateLimit-Policy");
/// Browsers can use the response to a preflight for ten minutes, even if the origin is removed from the list in that
/// time.
const MAX_AGE: HeaderValue = HeaderValue::from_static("600");
const TRUE: HeaderValue = HeaderValue::from_static("true");
const VARY_PREFLIGHT: HeaderValue =
    HeaderValue::from_static("Origin, Access-Control-Request-Method, Access-Control-Request-Headers");

/// Which CORS headers a response gets. This depends on the origin of the request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cors {
    /// The path belongs to no App, or its route has no CORS headers.
    NoApp,
    /// The request has no origin, several origins, or an origin that is not listed. The response has no CORS headers
    /// except `Vary`.
    Unlisted,
    Listed(HeaderValue),
    /// The origin of a client's redirect URL, at an endpoint that web pages of clients call. A web page of a client
    /// sends its token or code itself and needs no cookies, so the response does not allow cookies.
    OfClient(HeaderValue),
}

// === impl Cors ===

impl Cors {
    /// Returns the CORS headers for a request. `is_for_clients`: whether web pages of OpenID Connect clients call the
    /// endpoint.
    pub fn from_request(headers: &HeaderMap, app: &App, is_for_clients: bool) -> Self {
        let mut origins = headers.get_all(ORIGIN).iter();
        let (Some(origin), None) = (origins.next(), origins.next()) else { return Self::Unlisted };
        if app.doc.allowed_origins.iter().any(|allowed| allowed.as_str().as_bytes() == origin.as_bytes()) {
            Self::Listed(copy(origin))
        } else if is_for_clients && origin.to_str().is_ok_and(|origin| app.is_client_origin(origin)) {
            Self::OfClient(copy(origin))
        } else {
            Self::Unlisted
        }
    }

    /// Adds `Vary` and, if the origin is accepted, the CORS headers to a response of an App.
    pub fn apply(&self, headers: &mut HeaderMap) {
        match self {
            Self::NoApp => return,
            Self::Unlisted => {}
            Self::Listed(origin) => {
                headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
                headers.insert(ACCESS_CONTROL_ALLOW_CREDENTIALS, TRUE);
                headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED_HEADERS);
            }
            Self::OfClient(origin) => {
                headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
                headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED_HEADERS);
            }
        }
        if !headers.contains_key(VARY) {
            headers.insert(VARY, HeaderValue::from_static("Origin"));
        }
    }

    /// The response to OPTIONS.
    pub fn options(&self, request_headers: &HeaderMap, allow: &'static str) -> Response {
        let mut response = response::empty(StatusCode::NO_CONTENT);
        let headers = response.headers_mut();
        headers.insert(ALLOW, HeaderValue::from_static(allow));
        headers.insert(VARY, VARY_PREFLIGHT);
        if matches!(self, Self::Listed(_) | Self::OfClient(_))
            && request_headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD)
        {
            headers.insert(ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static(allow));
            headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, ALLOWED_HEADERS);
            headers.insert(ACCESS_CONTROL_MAX_AGE, MAX_AGE);
        }
        response
    }
}

/// A copy that does not refer to the bytes of the request.
fn copy(value: &HeaderValue) -> HeaderValue {
    HeaderValue::from_bytes(value.as_bytes()).expect("the bytes of a header value are valid")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures;

    fn test_app() -> App {
        let mut app = fixtures::provider(vec![fixtures::client("grafana")]);
        app.doc.allowed_origins =
            vec!["https://shop.example.com".parse().unwrap(), "http://localhost:3000".parse().unwrap()];
        app
    }

    fn origin_headers(origins: &[&'static str]) -> HeaderMap {
        origins.iter().map(|origin| (ORIGIN, HeaderValue::from_static(origin))).collect()
    }

    #[test]
    fn an_origin_must_match_exactly() {
        let cors_for = |origins: &[&'static str]| Cors::from_request(&origin_headers(origins), &test_app(), true);
        assert_eq!(cors_for(&["https://shop.example.com"]), Cors::Listed("https://shop.example.com".parse().unwrap()));
        assert_eq!(cors_for(&["http://localhost:3000"]), Cors::Listed("http://localhost:3000".parse().unwrap()));
        for origins in [
            &[][..],
            &["null"],
            &["*"],
            &["https://shop.example.com:443"],
            &["https://shop.example.com/"],
            &["https://SHOP.example.com"],
            &["http://shop.example.com"],
            &["https://evil.shop.example.com"],
            &["https://shop.example.com.evil.example"],
            &["https://shop.example.com", "https://shop.example.com"],
        ] {
            assert_eq!(cors_for(origins), Cors::Unlisted, "{origins:?}");
        }
    }

    #[test]
    fn a_listed_origin_gets_all_cors_headers() {
        let mut headers = HeaderMap::new();
        Cors::from_request(&origin_headers(&["https://shop.example.com"]), &test_app(), false).apply(&mut headers);
        assert_eq!(headers[ACCESS_CONTROL_ALLOW_ORIGIN], "https://shop.example.com");
        assert_eq!(headers[ACCESS_CONTROL_ALLOW_CREDENTIALS], "true");
        assert_eq!(headers[VARY], "Origin");
        assert_eq!(headers[ACCESS_CONTROL_EXPOSE_HEADERS], "X-Request-Id, Retry-After, RateLimit, RateLimit-Policy");
    }

    #[test]
    fn an_unlisted_origin_gets_only_a_vary_header() {
        let mut headers = HeaderMap::new();
        Cors::from_request(&origin_headers(&["https://evil.example"]), &test_app(), true).apply(&mut headers);
        assert_eq!(headers.len(), 1);
        assert_eq!(headers[VARY], "Origin");
        let mut headers = HeaderMap::new();
        Cors::NoApp.apply(&mut headers);
        assert!(headers.is_empty());
    }

    #[test]
    fn a_client_page_gets_cors_headers_without_credentials_and_only_at_endpoints_for_clients() {
        let mut request = origin_headers(&["https://grafana.example.com"]);
        assert_eq!(Cors::from_request(&request, &test_app(), false), Cors::Unlisted);
        let cors = Cors::from_request(&request, &test_app(), true);
        let mut headers = HeaderMap::new();
        cors.apply(&mut headers);
        assert_eq!(headers[ACCESS_CONTROL_ALLOW_ORIGIN], "https://grafana.example.com");
        assert!(!headers.contains_key(ACCESS_CONTROL_ALLOW_CREDENTIALS));
        assert_eq!(headers[VARY], "Origin");
        request.insert(ACCESS_CONTROL_REQUEST_METHOD, HeaderValue::from_static("POST"));
        let response = cors.options(&request, "POST, OPTIONS");
        assert_eq!(response.headers()[ACCESS_CONTROL_ALLOW_METHODS], "POST, OPTIONS");
    }

    #[test]
    fn a_preflight_allows_methods_for_listed_origins_only() {
        let mut request = origin_headers(&["https://shop.example.com"]);
        request.insert(ACCESS_CONTROL_REQUEST_METHOD, HeaderValue::from_static("POST"));
        let response = Cors::from_request(&request, &test_app(), false).options(&request, "POST, OPTIONS");
        assert_eq!(response.status(), StatusCode::NO_CONTENT);
        assert_eq!(response.headers()[ACCESS_CONTROL_ALLOW_METHODS], "POST, OPTIONS");
        assert_eq!(response.headers()[ACCESS_CONTROL_ALLOW_HEADERS], "content-type, authorization, x-request-id");
        assert_eq!(response.headers()[ACCESS_CONTROL_MAX_AGE], "600");

        request.insert(ORIGIN, HeaderValue::from_static("https://evil.example"));
        let response = Cors::from_request(&request, &test_app(), true).options(&request, "POST, OPTIONS");
        assert_eq!(response.status(), StatusCode::NO_CONTENT);
        assert!(!response.headers().contains_key(ACCESS_CONTROL_ALLOW_METHODS));
    }
}
