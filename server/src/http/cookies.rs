//! The cookies in which browsers keep their social logins: one for each flow, so that two tabs do not meet.

use http::{
    HeaderMap, HeaderValue,
    header::{COOKIE, HeaderName, SET_COOKIE},
};
use latchkey_crds::types::IssuerUrl;
use time::OffsetDateTime;

use crate::domain::flow::FlowId;

/// Flows that one browser may have under way (contract, 5).
const MOST_ALIVE: usize = 4;
/// What the names begin with; behind it come when the flow began, in milliseconds, and its id.
const NAME: &str = "latchkey-flow.";
/// `__Host-`: from this very host, over TLS, for all paths, and nothing else can set it (RFC 6265bis, 4.1.3.2).
const HOST_PREFIX: &str = "__Host-";

/// How cookies are written under a base URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowCookies {
    /// `SameSite=None`, because some providers come back by POST from their own site.
    Secure,
    /// Over `http`, in development, where browsers take neither the prefix nor `SameSite=None`.
    Plain,
}

/// A flow's cookie as a browser sent it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowCookie<'a> {
    name: &'a str,
    began: u64,
    id: &'a str,
    pub value: &'a str,
}

// === impl FlowCookies ===

impl FlowCookies {
    pub fn of(base: &IssuerUrl) -> Self {
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

    /// The flows that the browser has under way.
    pub fn sent(self, request: &HeaderMap) -> Vec<FlowCookie<'_>> {
        let fields = request.get_all(COOKIE).iter().filter_map(|field| field.to_str().ok());
        fields.flat_map(|field| field.split(';')).filter_map(|pair| self.read(pair)).collect()
    }

    fn read(self, pair: &str) -> Option<FlowCookie<'_>> {
        let (name, value) = pair.trim().split_once('=')?;
        let (began, id) = name.strip_prefix(self.prefix())?.strip_prefix(NAME)?.split_once('.')?;
        // Only what can be written back into a header as it came.
        let plain = |text: &str| text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_');
        let began = began.parse().ok().filter(|_| plain(began) && plain(id))?;
        Some(FlowCookie { name, began, id, value })
    }

    /// The headers that give a browser one more flow, and take away the oldest of those that are too many.
    pub fn begin(
        self,
        sent: &[FlowCookie<'_>],
        id: &FlowId,
        now: OffsetDateTime,
        sealed: &str,
        seconds: i64,
    ) -> Vec<(HeaderName, HeaderValue)> {
        let began = now.unix_timestamp_nanos() / 1_000_000;
        let name = format!("{}{NAME}{began}.{}", self.prefix(), id.as_str());
        let mut headers = vec![header(format!("{name}={sealed}; Max-Age={seconds}; {}", self.attributes()))];
        let mut sent = sent.to_vec();
        sent.sort_by_key(|cookie| std::cmp::Reverse(cookie.began));
        headers.extend(sent.get(MOST_ALIVE - 1..).unwrap_or_default().iter().map(|cookie| self.clear(cookie)));
        headers
    }

    /// The headers that end a flow in the browser.
    pub fn end(self, sent: &[FlowCookie<'_>], id: &FlowId) -> Vec<(HeaderName, HeaderValue)> {
        sent.iter().filter(|cookie| cookie.is_of(id)).map(|cookie| self.clear(cookie)).collect()
    }

    fn clear(self, cookie: &FlowCookie<'_>) -> (HeaderName, HeaderValue) {
        header(format!("{}=; Max-Age=0; {}", cookie.name, self.attributes()))
    }
}

fn header(text: String) -> (HeaderName, HeaderValue) {
    (SET_COOKIE, HeaderValue::try_from(text).expect("a cookie of ours is base64 and digits"))
}

// === impl FlowCookie ===

impl FlowCookie<'_> {
    pub fn is_of(&self, id: &FlowId) -> bool {
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

    /// What a browser sends back of what it was given.
    fn sent_back(headers: &[(HeaderName, HeaderValue)]) -> HeaderMap {
        let pairs: Vec<&str> =
            headers.iter().map(|(_, value)| value.to_str().unwrap().split(';').next().unwrap()).collect();
        HeaderMap::from_iter([(COOKIE, HeaderValue::try_from(format!("a=b; {}", pairs.join("; "))).unwrap())])
    }

    fn text(headers: &[(HeaderName, HeaderValue)]) -> Vec<&str> {
        headers.iter().map(|(_, value)| value.to_str().unwrap()).collect()
    }

    #[test]
    fn a_cookie_is_bound_to_the_host_where_there_is_tls() {
        let id = id();
        let cookies = FlowCookies::of(&"https://auth.example.com".parse().unwrap());
        let headers = cookies.begin(&[], &id, NOW, "sealed", 600);
        let name = format!("__Host-latchkey-flow.{}000.{}", NOW.unix_timestamp(), id.as_str());
        assert_eq!(
            text(&headers),
            [format!("{name}=sealed; Max-Age=600; Path=/; Secure; HttpOnly; SameSite=None")]
        );
        let request = sent_back(&headers);
        let sent = cookies.sent(&request);
        assert_eq!(sent.len(), 1);
        assert!(sent[0].is_of(&id) && sent[0].value == "sealed");
        assert_eq!(
            text(&cookies.end(&sent, &id)),
            [format!("{name}=; Max-Age=0; Path=/; Secure; HttpOnly; SameSite=None")]
        );
        assert!(cookies.end(&sent, &super::tests::id()).is_empty());
        assert!(FlowCookies::Plain.sent(&request).is_empty(), "a name with the prefix is another");
    }

    #[test]
    fn over_http_a_cookie_has_no_prefix() {
        let cookies = FlowCookies::of(&"http://127.0.0.1:8080".parse().unwrap());
        let headers = cookies.begin(&[], &id(), NOW, "sealed", 600);
        assert!(text(&headers)[0].starts_with("latchkey-flow."));
        assert!(text(&headers)[0].ends_with("; Max-Age=600; Path=/; HttpOnly; SameSite=Lax"));
        let request = sent_back(&headers);
        assert_eq!(cookies.sent(&request).len(), 1);
        assert!(FlowCookies::Secure.sent(&request).is_empty(), "what any page of the domain may set does not count");
    }

    #[test]
    fn at_most_four_flows_are_alive_and_the_oldest_goes() {
        let cookies = FlowCookies::Secure;
        let begin = |sent: &[FlowCookie<'_>], minute| {
            cookies.begin(sent, &id(), NOW + Duration::minutes(minute), "sealed", 600)
        };
        let mut alive: Vec<_> = [3, 0, 2].into_iter().flat_map(|minute| begin(&[], minute)).collect();
        let request = sent_back(&alive);
        assert_eq!(begin(&cookies.sent(&request), 4).len(), 1);
        alive.extend(begin(&[], 4));
        let request = sent_back(&alive);
        let headers = begin(&cookies.sent(&request), 5);
        assert_eq!(headers.len(), 2);
        let oldest = text(&alive)[1].split('=').next().unwrap().to_owned();
        assert!(text(&headers)[1].starts_with(&format!("{oldest}=; Max-Age=0;")), "{headers:?}");
    }

    #[test]
    fn what_is_no_cookie_of_ours_is_passed_over() {
        for other in ["", "=", "a", "__Host-latchkey-flow", "__Host-latchkey-flow.x.y=z", "__Host-latchkey-flow.1=z"] {
            let request = HeaderMap::from_iter([(COOKIE, HeaderValue::try_from(other).unwrap())]);
            assert!(FlowCookies::Secure.sent(&request).is_empty(), "{other}");
        }
        let request = HeaderMap::from_iter([
            (COOKIE, HeaderValue::from_static("__Host-latchkey-flow.1.a,b=z")),
            (COOKIE, HeaderValue::from_bytes(b"__Host-latchkey-flow.1.a=\xff").unwrap()),
        ]);
        assert!(FlowCookies::Secure.sent(&request).is_empty());
    }
}
