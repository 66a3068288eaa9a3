//! The cookies that bind social logins to a browser. Each flow (social login that is not finished) has its own cookie,
//! so that two tabs do not interfere.

use http::{
    HeaderMap, HeaderValue,
    header::{COOKIE, HeaderName, SET_COOKIE},
};
use latchkey_crds::types::IssuerUrl;
use time::OffsetDateTime;

use crate::domain::flow::FlowId;

/// The maximum number of flows that one browser can have at a time (specification: Social login, Redirect).
const MAX_FLOWS: usize = 4;
/// The name of a cookie consists of [`HOST_PREFIX`] (only over TLS), this prefix, the start time of the flow in Unix
/// milliseconds, a dot, and the flow's id.
const NAME_PREFIX: &str = "latchkey-flow.";
/// With the prefix `__Host-`, a browser accepts the cookie only from this host, over TLS, and for all paths (RFC
/// 6265bis, 4.1.3.2).
const HOST_PREFIX: &str = "__Host-";

/// How cookies are written, which depends on the scheme of the base URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowCookies {
    /// Over `https`. The cookies have `SameSite=None`, because some providers send the user back by a POST from their
    /// own site.
    Secure,
    /// Over `http`, for development. Over `http`, browsers accept neither the prefix `__Host-` nor `SameSite=None`.
    Plain,
}

/// The cookie of a flow, as a browser sent it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowCookie<'a> {
    name: &'a str,
    started_ms: u64,
    id: &'a str,
    pub value: &'a str,
}

// === impl FlowCookies ===

impl FlowCookies {
    pub fn for_base_url(base: &IssuerUrl) -> Self {
        if base.as_str().starts_with("https://") { Self::Secure } else { Self::Plain }
    }

    const fn prefix(self) -> &'static str {
        match self {
            Self::Secure => HOST_PREFIX,
            Self::Plain => "",
        }
    }

    const fn attributes(self) -> &'static str {
        match self {
            Self::Secure => "Path=/; Secure; HttpOnly; SameSite=None",
            Self::Plain => "Path=/; HttpOnly; SameSite=Lax",
        }
    }

    /// The cookies of the browser's current flows.
    pub fn from_request(self, headers: &HeaderMap) -> Vec<FlowCookie<'_>> {
        let fields = headers.get_all(COOKIE).iter().filter_map(|field| field.to_str().ok());
        fields.flat_map(|field| field.split(';')).filter_map(|pair| self.parse_pair(pair)).collect()
    }

    fn parse_pair(self, pair: &str) -> Option<FlowCookie<'_>> {
        let (name, value) = pair.trim().split_once('=')?;
        let (started_ms, id) = name.strip_prefix(self.prefix())?.strip_prefix(NAME_PREFIX)?.split_once('.')?;
        // Accept only what can be written back into a header unchanged.
        let is_header_safe = |text: &str| text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_');
        let started_ms = started_ms.parse().ok().filter(|_| is_header_safe(started_ms) && is_header_safe(id))?;
        Some(FlowCookie { name, started_ms, id, value })
    }

    /// The headers that store the cookie of a flow in the browser. If the browser then has more than `MAX_FLOWS` flows,
    /// the headers also clear the cookies of the oldest flows.
    pub fn add(
        self,
        sent: &[FlowCookie<'_>],
        id: &FlowId,
        now: OffsetDateTime,
        sealed: &str,
        lifetime_seconds: i64,
    ) -> Vec<(HeaderName, HeaderValue)> {
        let started_ms = now.unix_timestamp_nanos() / 1_000_000;
        let name = format!("{}{NAME_PREFIX}{started_ms}.{}", self.prefix(), id.as_str());
        let mut headers =
            vec![set_cookie(format!("{name}={sealed}; Max-Age={lifetime_seconds}; {}", self.attributes()))];
        let mut sent = sent.to_vec();
        sent.sort_by_key(|cookie| std::cmp::Reverse(cookie.started_ms));
        headers.extend(sent.get(MAX_FLOWS - 1..).unwrap_or_default().iter().map(|cookie| self.clear(cookie)));
        headers
    }

    /// The headers that clear the cookie of a flow.
    pub fn remove(self, sent: &[FlowCookie<'_>], id: &FlowId) -> Vec<(HeaderName, HeaderValue)> {
        sent.iter().filter(|cookie| cookie.belongs_to(id)).map(|cookie| self.clear(cookie)).collect()
    }

    fn clear(self, cookie: &FlowCookie<'_>) -> (HeaderName, HeaderValue) {
        set_cookie(format!("{}=; Max-Age=0; {}", cookie.name, self.attributes()))
    }
}

fn set_cookie(text: String) -> (HeaderName, HeaderValue) {
    (SET_COOKIE, HeaderValue::try_from(text).expect("our cookies consist of base64 and digits"))
}

// === impl FlowCookie ===

impl FlowCookie<'_> {
    pub fn belongs_to(&self, id: &FlowId) -> bool {
        self.id == id.as_str()
    }
}

#[cfg(test)]
mod tests {
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
    fn over_tls_a_cookie_is_bound_to_its_host() {
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
            |sent: &[FlowCookie<'_>], minute| cookies.add(sent, &id(), NOW + Duration::minutes(minute), "sealed", 600);
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
