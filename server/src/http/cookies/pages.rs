//! The cookies of the hosted pages: one for the browser session of each App, one for the browser itself, one for each
//! social login or registration that a page started (a transaction cookie), and one for the language (specification:
//! Browser sessions, Cookies).

use std::cmp::Reverse;

use http::{HeaderMap, HeaderValue, header::HeaderName};
use latchkey_crds::types::AppId;

use super::{
    CookieScheme, name_value_pairs, set_cookie,
    timed::{MAX_COOKIES, TimedCookie, TimedCookies},
};
use crate::domain::{
    app::App,
    pages::{BrowserId, SessionCookie},
};

/// The maximum number of session cookies that a browser has for one host. Each App that the browser uses sets one.
const MAX_SESSIONS: usize = 20;
/// The name of a session cookie consists of `__Host-` (only over TLS), this prefix and the appID.
const SESSION_PREFIX: &str = "latchkey-session.";
const BROWSER_NAME: &str = "latchkey-browser";
const LANGUAGE_NAME: &str = "latchkey-lang";
const TRANSACTION_PREFIX: &str = "latchkey-tx.";
/// The longest language tag that is accepted (RFC 5646, 4.4.1).
const MAX_LANGUAGE_BYTES: usize = 35;
const LANGUAGE_SECONDS: u32 = 365 * 24 * 60 * 60;

/// The page cookies that a browser sent. The server has not verified any of them, and has parsed only the value of the
/// browser cookie. The type has no `Debug`, so that logs never contain the values.
pub struct SentPageCookies<'a> {
    sessions: Vec<SentSession<'a>>,
    browser: Option<BrowserId>,
    language: Option<&'a str>,
    transactions: Vec<TimedCookie<'a>>,
}

#[derive(Clone, Copy)]
struct SentSession<'a> {
    app: &'a str,
    value: &'a str,
}

// === impl CookieScheme ===

impl CookieScheme {
    const fn attributes(self) -> &'static str {
        match self {
            Self::Secure => "Path=/; Secure; HttpOnly; SameSite=Lax",
            Self::Plain => "Path=/; HttpOnly; SameSite=Lax",
        }
    }

    /// The transaction cookies, one for each social login or registration that a page started.
    pub const fn transactions(self) -> TimedCookies {
        TimedCookies { host_prefix: self.host_prefix(), name_prefix: TRANSACTION_PREFIX, attributes: self.attributes() }
    }

    /// Reads the cookies of a request for a page. If a session cookie occurs twice, the first one counts. If the
    /// browser cookie or the language cookie occurs twice, the first one with a well-formed value counts.
    pub fn sent_to_pages(self, headers: &HeaderMap) -> SentPageCookies<'_> {
        let mut sent =
            SentPageCookies { sessions: Vec::new(), browser: None, language: None, transactions: Vec::new() };
        for (full_name, value) in name_value_pairs(headers) {
            let Some(name) = full_name.strip_prefix(self.host_prefix()) else { continue };
            if let Some(app) = name.strip_prefix(SESSION_PREFIX) {
                if is_label(app) {
                    sent.sessions.push(SentSession { app, value });
                }
            } else if name == BROWSER_NAME {
                sent.browser = sent.browser.or_else(|| BrowserId::parse(value));
            } else if name == LANGUAGE_NAME {
                sent.language = sent.language.or(Some(value).filter(|value| is_language(value)));
            } else {
                sent.transactions.extend(self.transactions().parse(full_name, value));
            }
        }
        sent
    }

    /// The headers that store the session cookie of an App. If the browser then has more session cookies than the
    /// maximum, the headers also clear the oldest cookies of other Apps. The browser keeps the cookie until the browser
    /// closes.
    pub fn set_session(
        self,
        sent: &SentPageCookies<'_>,
        app: &App,
        cookie: &SessionCookie,
    ) -> Vec<(HeaderName, HeaderValue)> {
        let name = self.session_name(app.id().as_str());
        let mut headers = vec![set_cookie(format!("{name}={}; {}", cookie.encode(app), self.attributes()))];
        let mut others: Vec<_> = sent.sessions.iter().filter(|other| other.app != app.id().as_str()).collect();
        // A cookie without a time counts as the oldest.
        others.sort_by_cached_key(|other| Reverse(SessionCookie::unverified_issued_ms(other.value)));
        let cleared = others.get(MAX_SESSIONS - 1..).unwrap_or_default();
        headers.extend(cleared.iter().map(|other| self.clear(&self.session_name(other.app))));
        headers
    }

    /// The header that clears the session cookie of an App.
    pub fn clear_session(self, app: &AppId) -> (HeaderName, HeaderValue) {
        self.clear(&self.session_name(app.as_str()))
    }

    /// The header that stores the browser cookie until the browser closes.
    pub fn set_browser(self, browser: &BrowserId) -> (HeaderName, HeaderValue) {
        set_cookie(format!("{}{BROWSER_NAME}={}; {}", self.host_prefix(), browser.encode(), self.attributes()))
    }

    /// The header that stores the language for a year. `None` if the text is not a language tag.
    pub fn set_language(self, language: &str) -> Option<(HeaderName, HeaderValue)> {
        let (prefix, attributes) = (self.host_prefix(), self.attributes());
        let text = format!("{prefix}{LANGUAGE_NAME}={language}; Max-Age={LANGUAGE_SECONDS}; {attributes}");
        is_language(language).then(|| set_cookie(text))
    }

    fn session_name(self, app: &str) -> String {
        format!("{}{SESSION_PREFIX}{app}", self.host_prefix())
    }

    fn clear(self, name: &str) -> (HeaderName, HeaderValue) {
        set_cookie(format!("{name}=; Max-Age=0; {}", self.attributes()))
    }
}

/// Whether the text has the form of an appID, so that it can be written back into a header unchanged.
fn is_label(text: &str) -> bool {
    (1..=63).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
}

fn is_language(text: &str) -> bool {
    (1..=MAX_LANGUAGE_BYTES).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
}

// === impl SentPageCookies ===

impl<'a> SentPageCookies<'a> {
    /// The value of the App's session cookie, for [`SessionCookie::decode`].
    pub fn session(&self, app: &AppId) -> Option<&'a str> {
        self.sessions.iter().find(|sent| sent.app == app.as_str()).map(|sent| sent.value)
    }

    pub fn browser(&self) -> Option<&BrowserId> {
        self.browser.as_ref()
    }

    /// The language tag of the language cookie.
    pub fn language(&self) -> Option<&'a str> {
        self.language
    }

    /// All transaction cookies, for [`TimedCookies::add`] and [`TimedCookies::remove`].
    pub fn transactions(&self) -> &[TimedCookie<'a>] {
        &self.transactions
    }

    /// The newest transaction cookies, at most [`MAX_COOKIES`], because pages never set more. A client can send more,
    /// but each cookie costs the server an attempt to decrypt it.
    pub fn newest_transactions(&self) -> impl Iterator<Item = TimedCookie<'a>> {
        let mut newest = self.transactions.clone();
        newest.sort_by_key(|cookie| Reverse(cookie.set_at_ms()));
        newest.into_iter().take(MAX_COOKIES)
    }
}

#[cfg(test)]
mod tests {
    use http::header::COOKIE;
    use time::{Duration, OffsetDateTime, macros::datetime};
    use uuid::Uuid;

    use super::*;
    use crate::{
        domain::{clock::Env, flow::FlowId, session::SessionId, user::UserId},
        fixtures,
    };

    const NOW: OffsetDateTime = datetime!(2026-02-01 09:30 UTC);

    fn cookie(issued_ms: u64) -> SessionCookie {
        SessionCookie { issued_ms, user: UserId(Uuid::from_u128(7)), session: SessionId(Uuid::from_u128(9)) }
    }

    fn app(id: &str) -> App {
        fixtures::app(fixtures::rendered(id))
    }

    fn text(header: &(HeaderName, HeaderValue)) -> &str {
        header.1.to_str().unwrap()
    }

    fn newest<'a>(sent: &SentPageCookies<'a>) -> Vec<&'a str> {
        sent.newest_transactions().map(|cookie| cookie.value).collect()
    }

    /// The request headers of a browser that received these response headers.
    fn cookie_header(headers: &[(HeaderName, HeaderValue)]) -> HeaderMap {
        let pairs: Vec<&str> = headers.iter().map(|header| text(header).split(';').next().unwrap()).collect();
        HeaderMap::from_iter([(COOKIE, HeaderValue::try_from(format!("a=b; {}", pairs.join("; "))).unwrap())])
    }

    #[test]
    fn cookies_over_tls_are_bound_to_the_host() {
        let cookies = CookieScheme::for_base_url(&"https://auth.example.com".parse().unwrap());
        let (app, browser) = (app("shop"), BrowserId::generate(&Env::system()));
        let nothing = HeaderMap::new();
        let mut headers = cookies.set_session(&cookies.sent_to_pages(&nothing), &app, &cookie(1));
        headers.push(cookies.set_browser(&browser));
        headers.push(cookies.set_language("de").unwrap());
        headers.extend(cookies.transactions().add(&[], &FlowId::generate(&Env::system()), NOW, "sealed", 600));
        let attributes = "Path=/; Secure; HttpOnly; SameSite=Lax";
        let value = cookie(1).encode(&app);
        assert_eq!(text(&headers[0]), format!("__Host-latchkey-session.shop={value}; {attributes}"));
        assert_eq!(text(&headers[1]), format!("__Host-latchkey-browser={}; {attributes}", browser.encode()));
        assert_eq!(text(&headers[2]), format!("__Host-latchkey-lang=de; Max-Age=31536000; {attributes}"));
        assert!(text(&headers[3]).starts_with(&format!("__Host-latchkey-tx.{}000.", NOW.unix_timestamp())));
        assert!(text(&headers[3]).ends_with(&format!("=sealed; Max-Age=600; {attributes}")));

        let request = cookie_header(&headers);
        let sent = cookies.sent_to_pages(&request);
        assert_eq!(sent.session(app.id()), Some(value.as_str()));
        assert_eq!(sent.session(&"blog".parse().unwrap()), None);
        assert_eq!(sent.browser(), Some(&browser));
        assert_eq!(sent.language(), Some("de"));
        assert_eq!(newest(&sent), ["sealed"]);
        assert_eq!(
            text(&cookies.clear_session(app.id())),
            format!("__Host-latchkey-session.shop=; Max-Age=0; {attributes}")
        );

        let plain = CookieScheme::Plain.sent_to_pages(&request);
        assert!(plain.session(app.id()).is_none(), "a name with the prefix is a different name");
        assert!(plain.browser().is_none() && plain.language().is_none() && plain.transactions().is_empty());
    }

    #[test]
    fn cookies_over_http_have_no_prefix() {
        let cookies = CookieScheme::for_base_url(&"http://127.0.0.1:8080".parse().unwrap());
        let browser = BrowserId::generate(&Env::system());
        let header = cookies.set_browser(&browser);
        assert_eq!(text(&header), format!("latchkey-browser={}; Path=/; HttpOnly; SameSite=Lax", browser.encode()));
        let request = cookie_header(&[header]);
        assert_eq!(cookies.sent_to_pages(&request).browser(), Some(&browser));
        assert!(CookieScheme::Secure.sent_to_pages(&request).browser().is_none(), "any page of the domain can set it");
    }

    #[test]
    fn a_host_has_at_most_20_session_cookies_and_the_oldest_is_cleared() {
        let cookies = CookieScheme::Secure;
        let nothing = HeaderMap::new();
        let none = cookies.sent_to_pages(&nothing);
        let stored: Vec<_> = (0..20_u64)
            .flat_map(|number| {
                // The cookie of app-7 is the oldest.
                let issued_ms = if number == 7 { 1 } else { 1_000 + number };
                cookies.set_session(&none, &app(&format!("app-{number}")), &cookie(issued_ms))
            })
            .collect();
        let request = cookie_header(&stored);
        let sent = cookies.sent_to_pages(&request);
        assert_eq!(cookies.set_session(&sent, &app("app-3"), &cookie(5_000)).len(), 1, "replaces its own cookie");
        let headers = cookies.set_session(&sent, &app("shop"), &cookie(5_000));
        assert_eq!(headers.len(), 2);
        assert!(text(&headers[1]).starts_with("__Host-latchkey-session.app-7=; Max-Age=0;"), "{headers:?}");

        let mut with_invalid = stored;
        with_invalid[4] = set_cookie("__Host-latchkey-session.app-4=invalid".to_owned());
        let request = cookie_header(&with_invalid);
        let headers = cookies.set_session(&cookies.sent_to_pages(&request), &app("shop"), &cookie(5_000));
        assert!(text(&headers[1]).starts_with("__Host-latchkey-session.app-4=;"), "without a time: {headers:?}");
    }

    #[test]
    fn a_non_ascii_cookie_of_another_site_hides_no_other_cookie() {
        let browser = BrowserId::generate(&Env::system());
        let own = format!("__Host-latchkey-browser={}", browser.encode());
        for field in [
            format!("n=J\u{f6}rg; {own}; __Host-latchkey-lang=de").into_bytes(),
            format!("{own};\t__Host-latchkey-lang=de \t;n=J\u{f6}rg").into_bytes(),
            [&b"n=\xff; "[..], own.as_bytes(), b"; \xc3=x;;=; __Host-latchkey-lang=de"].concat(),
        ] {
            let request = HeaderMap::from_iter([(COOKIE, HeaderValue::from_bytes(&field).unwrap())]);
            let sent = CookieScheme::Secure.sent_to_pages(&request);
            assert_eq!((sent.browser(), sent.language()), (Some(&browser), Some("de")), "{request:?}");
        }
        // Only space and tab are white space around a cookie.
        let field = format!("\u{a0}{own}; \u{3000}__Host-latchkey-lang=de").into_bytes();
        let request = HeaderMap::from_iter([(COOKIE, HeaderValue::from_bytes(&field).unwrap())]);
        let sent = CookieScheme::Secure.sent_to_pages(&request);
        assert!(sent.browser().is_none() && sent.language().is_none());
    }

    #[test]
    fn the_first_well_formed_copy_of_a_repeated_cookie_counts() {
        let browser = BrowserId::generate(&Env::system());
        let text = format!(
            "__Host-latchkey-session.shop=a; __Host-latchkey-session.shop=b; __Host-latchkey-browser=x; \
             __Host-latchkey-browser={}; __Host-latchkey-lang=; __Host-latchkey-lang=de; __Host-latchkey-lang=en",
            browser.encode()
        );
        let request = HeaderMap::from_iter([(COOKIE, HeaderValue::try_from(text).unwrap())]);
        let sent = CookieScheme::Secure.sent_to_pages(&request);
        assert_eq!(sent.session(&"shop".parse().unwrap()), Some("a"));
        assert_eq!((sent.browser(), sent.language()), (Some(&browser), Some("de")));
    }

    #[test]
    fn only_the_newest_four_transaction_cookies_are_used() {
        let cookies = CookieScheme::Secure;
        let stored: Vec<_> = [3, 0, 5, 2, 4, 1]
            .into_iter()
            .flat_map(|minute| {
                let id = FlowId::generate(&Env::system());
                cookies.transactions().add(&[], &id, NOW + Duration::minutes(minute), &format!("sealed{minute}"), 600)
            })
            .collect();
        let request = cookie_header(&stored);
        let sent = cookies.sent_to_pages(&request);
        assert_eq!(sent.transactions().len(), 6);
        assert_eq!(newest(&sent), ["sealed5", "sealed4", "sealed3", "sealed2"]);
    }

    #[test]
    fn other_cookies_are_ignored() {
        for other in [
            "",
            "=",
            "a",
            "latchkey-browser=AAAAAAAAAAAAAAAAAAAAAA",
            "__Host-latchkey-browser=x",
            "__Host-latchkey-lang=d\"e",
            "__Host-latchkey-lang=",
            "__Host-latchkey-session.=x",
            "__Host-latchkey-session.Shop=x",
            "__Host-latchkey-session.a.b=x",
            "__Host-latchkey-tx.x.y=z",
            "__Host-latchkey-tx.1.a,b=z",
        ] {
            let request = HeaderMap::from_iter([(COOKIE, HeaderValue::try_from(other).unwrap())]);
            let sent = CookieScheme::Secure.sent_to_pages(&request);
            assert!(sent.browser().is_none() && sent.language().is_none(), "{other}");
            assert!(sent.sessions.is_empty() && sent.transactions().is_empty(), "{other}");
        }
        assert!(CookieScheme::Secure.set_language("de; Domain=example.com").is_none());
    }
}
