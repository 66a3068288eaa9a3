//! Cookies: those of social logins, and those of pages.

use http::{
    HeaderMap, HeaderValue,
    header::{COOKIE, HeaderName, SET_COOKIE},
};

mod flows;
mod pages;
mod timed;

pub use flows::FlowCookies;
pub use pages::{PageCookies, SentPageCookies};
pub use timed::{TimedCookie, TimedCookies};

/// With the prefix `__Host-`, a browser accepts the cookie only from this host, over TLS, and for all paths (RFC
/// 6265bis, 4.1.3.2).
const HOST_PREFIX: &str = "__Host-";

/// The names and values of the cookies of a request. Fields that are not ASCII are ignored.
fn name_value_pairs(headers: &HeaderMap) -> impl Iterator<Item = (&str, &str)> {
    let fields = headers.get_all(COOKIE).iter().filter_map(|field| field.to_str().ok());
    fields.flat_map(|field| field.split(';')).filter_map(|pair| pair.trim().split_once('='))
}

fn set_cookie(text: String) -> (HeaderName, HeaderValue) {
    (SET_COOKIE, HeaderValue::try_from(text).expect("our cookies consist of base64, digits and DNS labels"))
}
