//! The cookies of social logins, and the cookies of the hosted pages.

use http::{
    HeaderMap, HeaderValue,
    header::{COOKIE, HeaderName, SET_COOKIE},
};
use latchkey_crds::types::IssuerUrl;

mod flows;
mod pages;
mod timed;

pub use pages::SentPageCookies;
pub use timed::{TimedCookie, TimedCookies};

/// With the prefix `__Host-`, a browser accepts the cookie only from this host, over TLS, and for all paths (RFC
/// 6265bis, 4.1.3.2).
const HOST_PREFIX: &str = "__Host-";

/// How cookies are written, which depends on the scheme of the base URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CookieScheme {
    /// Over `https`.
    Secure,
    /// Over `http`, for development. Over `http`, browsers accept neither the prefix `__Host-` nor `SameSite=None`.
    Plain,
}

// === impl CookieScheme ===

impl CookieScheme {
    pub fn for_base_url(base: &IssuerUrl) -> Self {
        if base.as_str().starts_with("https://") { Self::Secure } else { Self::Plain }
    }

    const fn host_prefix(self) -> &'static str {
        match self {
            Self::Secure => HOST_PREFIX,
            Self::Plain => "",
        }
    }
}

/// The names and values of the cookies in a request. A cookie that is not ASCII is ignored. It must not affect the
/// other cookies, because any site of the same domain can set such a cookie.
fn name_value_pairs(headers: &HeaderMap) -> impl Iterator<Item = (&str, &str)> {
    let pairs = headers.get_all(COOKIE).iter().flat_map(|field| field.as_bytes().split(|byte| *byte == b';'));
    pairs.filter_map(parse_pair)
}

fn parse_pair(pair: &[u8]) -> Option<(&str, &str)> {
    let text = str::from_utf8(pair).ok().filter(|text| text.is_ascii())?;
    text.trim_matches([' ', '\t']).split_once('=')
}

fn set_cookie(text: String) -> (HeaderName, HeaderValue) {
    (SET_COOKIE, HeaderValue::try_from(text).expect("our cookies consist of base64, digits and DNS labels"))
}
