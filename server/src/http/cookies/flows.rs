//! The cookies that bind social logins to a browser. Each flow has its own cookie, so that two tabs do not interfere.

use http::{HeaderMap, HeaderValue, header::HeaderName};
use latchkey_crds::types::IssuerUrl;
use time::OffsetDateTime;

use super::{
    HOST_PREFIX,
    timed::{TimedCookie, TimedCookies},
};
use crate::domain::flow::FlowId;

/// How cookies are written, which depends on the scheme of the base URL. A browser has at most four of them at a time
/// (specification: Social login, Redirect).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowCookies {
    /// Over `https`. The cookies have `SameSite=None`, because some providers send the user back by a POST from their
    /// own site.
    Secure,
    /// Over `http`, for development. Over `http`, browsers accept neither the prefix `__Host-` nor `SameSite=None`.
    Plain,
}

// === impl FlowCookies ===

impl FlowCookies {
    pub fn for_base_url(base: &IssuerUrl) -> Self {
        if base.as_str().starts_with("https://") { Self::Secure } else { Self::Plain }
    }

    const fn timed(self) -> TimedCookies {
        let (host_prefix, attributes) = match self {
            Self::Secure => (HOST_PREFIX, "Path=/; Secure; HttpOnly; SameSite=None"),
            Self::Plain => ("", "Path=/; HttpOnly; SameSite=Lax"),
        };
        TimedCookies { host_prefix, name_prefix: "latchkey-flow.", attributes }
    }

    /// The cookies of the browser's current flows.
    pub fn from_request(self, headers: &HeaderMap) -> Vec<TimedCookie<'_>> {
        self.timed().from_request(headers)
    }

    /// The headers that store the cookie of a flow in the browser, and clear the cookies of the oldest flows beyond the
    /// maximum.
    pub fn add(
        self,
        sent: &[TimedCookie<'_>],
        id: &FlowId,
        now: OffsetDateTime,
        sealed: &str,
        lifetime_seconds: i64,
    ) -> Vec<(HeaderName, HeaderValue)> {
        self.timed().add(sent, id, now, sealed, lifetime_seconds)
    }

    /// The headers that clear the cookie of a flow.
    pub fn remove(self, sent: &[TimedCookie<'_>], id: &FlowId) -> Vec<(HeaderName, HeaderValue)> {
        self.timed().remove(sent, id)
    }
}

#[cfg(test)]
mod tests {
    use http::header::COOKIE;
    use time::{Duration, macros::datetime};

    use super::*;
    use crate::domain::{clock::Env, flow::FlowState};

    const NOW: OffsetDateTime = datetime!(2026-02-01 09:30 UTC);

    fn id() -> FlowId {
        FlowState::generate(&Env::system()).id()
    }

    /// The request headers of a browser that received these response headers.
    fn cookie_header(headers: &[(HeaderName, HeaderValue)]) -> HeaderMap {
        let pairs: Vec<&str> =
            headers.iter().map(|(_, value)| value.to_str().unwrap().split(';').next().unwrap()).collect();
        HeaderMap::from_iter([(COOKIE, HeaderValue::try_from(format!("a=b; {}", pairs.join("; "))).unwrap())])
    }

    fn text(headers: &[(HeaderName, HeaderValue)]) -> Vec<&str> {
        headers.iter().map(|(_, value)| value.to_str().unwrap()).collect()
    }

    #[test]
    fn a_cookie_is_bound_to_the_host_over_tls() {
        let id = id();
        let cookies = FlowCookies::for_base_url(&"https://auth.example.com".parse().unwrap());
        let headers = cookies.add(&[], &id, NOW, "sealed", 600);
        let name = format!("__Host-latchkey-flow.{}000.{}", NOW.unix_timestamp(), id.as_str());
        assert_eq!(text(&headers), [format!("{name}=sealed; Max-Age=600; Path=/; Secure; HttpOnly; SameSite=None")]);
        let request = cookie_header(&headers);
        let sent = cookies.from_request(&request);
        assert_eq!(sent.len(), 1);
        assert!(sent[0].belongs_to(&id) && sent[0].value == "sealed");
        assert_eq!(
            text(&cookies.remove(&sent, &id)),
            [format!("{name}=; Max-Age=0; Path=/; Secure; HttpOnly; SameSite=None")]
        );
        assert!(cookies.remove(&sent, &super::tests::id()).is_empty());
        assert!(FlowCookies::Plain.from_request(&request).is_empty(), "a name with the prefix is a different name");
    }

    #[test]
    fn over_http_a_cookie_has_no_prefix() {
        let cookies = FlowCookies::for_base_url(&"http://127.0.0.1:8080".parse().unwrap());
        let headers = cookies.add(&[], &id(), NOW, "sealed", 600);
        assert!(text(&headers)[0].starts_with("latchkey-flow."));
        assert!(text(&headers)[0].ends_with("; Max-Age=600; Path=/; HttpOnly; SameSite=Lax"));
        let request = cookie_header(&headers);
        assert_eq!(cookies.from_request(&request).len(), 1);
        assert!(FlowCookies::Secure.from_request(&request).is_empty(), "any page of the domain can set this name");
    }

    #[test]
    fn at_most_four_flows_are_kept_and_the_oldest_is_cleared() {
        let cookies = FlowCookies::Secure;
        let begin =
            |sent: &[TimedCookie<'_>], minute| cookies.add(sent, &id(), NOW + Duration::minutes(minute), "sealed", 600);
        let mut stored_cookies: Vec<_> = [3, 0, 2].into_iter().flat_map(|minute| begin(&[], minute)).collect();
        let request = cookie_header(&stored_cookies);
        assert_eq!(begin(&cookies.from_request(&request), 4).len(), 1);
        stored_cookies.extend(begin(&[], 4));
        let request = cookie_header(&stored_cookies);
        let headers = begin(&cookies.from_request(&request), 5);
        assert_eq!(headers.len(), 2);
        let oldest = text(&stored_cookies)[1].split('=').next().unwrap().to_owned();
        assert!(text(&headers)[1].starts_with(&format!("{oldest}=; Max-Age=0;")), "{headers:?}");
    }

    #[test]
    fn other_cookies_are_ignored() {
        for other in ["", "=", "a", "__Host-latchkey-flow", "__Host-latchkey-flow.x.y=z", "__Host-latchkey-flow.1=z"] {
            let request = HeaderMap::from_iter([(COOKIE, HeaderValue::try_from(other).unwrap())]);
            assert!(FlowCookies::Secure.from_request(&request).is_empty(), "{other}");
        }
        let request = HeaderMap::from_iter([
            (COOKIE, HeaderValue::from_static("__Host-latchkey-flow.1.a,b=z")),
            (COOKIE, HeaderValue::from_bytes(b"__Host-latchkey-flow.1.a=\xff").unwrap()),
        ]);
        assert!(FlowCookies::Secure.from_request(&request).is_empty());
    }
}
