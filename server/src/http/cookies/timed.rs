//! Cookies of which a browser can have several, for example one for each tab. The name of a cookie contains an id and
//! the time at which the cookie was set. With this time, the oldest cookie can be found and cleared.

use http::{HeaderMap, HeaderValue, header::HeaderName};
use time::OffsetDateTime;

use super::{name_value_pairs, set_cookie};
use crate::domain::flow::FlowId;

/// The maximum number of cookies of one kind in one browser.
pub(super) const MAX_COOKIES: usize = 4;

/// One kind of cookies. The name of a cookie consists of both prefixes, the time in Unix milliseconds, a dot, and the
/// id.
#[derive(Clone, Copy, Debug)]
pub struct TimedCookies {
    pub(super) host_prefix: &'static str,
    pub(super) name_prefix: &'static str,
    pub(super) attributes: &'static str,
}

/// A cookie, as a browser sent it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimedCookie<'a> {
    name: &'a str,
    set_at_ms: u64,
    id: &'a str,
    pub value: &'a str,
}

// === impl TimedCookies ===

impl TimedCookies {
    pub fn from_request(self, headers: &HeaderMap) -> Vec<TimedCookie<'_>> {
        name_value_pairs(headers).filter_map(|(name, value)| self.parse(name, value)).collect()
    }

    pub(super) fn parse<'a>(self, name: &'a str, value: &'a str) -> Option<TimedCookie<'a>> {
        let (set_at_ms, id) = name.strip_prefix(self.host_prefix)?.strip_prefix(self.name_prefix)?.split_once('.')?;
        // Accept only what can be written back into a header unchanged.
        let is_header_safe = |text: &str| text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_');
        let set_at_ms = set_at_ms.parse().ok().filter(|_| is_header_safe(set_at_ms) && is_header_safe(id))?;
        Some(TimedCookie { name, set_at_ms, id, value })
    }

    /// The headers that store a cookie in the browser. If the browser then has more cookies than the maximum, the
    /// headers also clear the oldest ones.
    pub fn add(
        self,
        sent: &[TimedCookie<'_>],
        id: &FlowId,
        now: OffsetDateTime,
        sealed: &str,
        lifetime_seconds: i64,
    ) -> Vec<(HeaderName, HeaderValue)> {
        let set_at_ms = now.unix_timestamp_nanos() / 1_000_000;
        let name = format!("{}{}{set_at_ms}.{}", self.host_prefix, self.name_prefix, id.as_str());
        let mut headers = vec![set_cookie(format!("{name}={sealed}; Max-Age={lifetime_seconds}; {}", self.attributes))];
        let mut sent = sent.to_vec();
        sent.sort_by_key(|cookie| std::cmp::Reverse(cookie.set_at_ms));
        headers.extend(sent.get(MAX_COOKIES - 1..).unwrap_or_default().iter().map(|cookie| self.clear(cookie)));
        headers
    }

    /// The headers that clear the cookie with this id.
    pub fn remove(self, sent: &[TimedCookie<'_>], id: &FlowId) -> Vec<(HeaderName, HeaderValue)> {
        sent.iter().filter(|cookie| cookie.belongs_to(id)).map(|cookie| self.clear(cookie)).collect()
    }

    /// The header that clears a cookie.
    pub fn clear(self, cookie: &TimedCookie<'_>) -> (HeaderName, HeaderValue) {
        set_cookie(format!("{}=; Max-Age=0; {}", cookie.name, self.attributes))
    }
}

// === impl TimedCookie ===

impl TimedCookie<'_> {
    pub fn belongs_to(&self, id: &FlowId) -> bool {
        self.id == id.as_str()
    }

    pub(super) fn set_at_ms(&self) -> u64 {
        self.set_at_ms
    }
}
