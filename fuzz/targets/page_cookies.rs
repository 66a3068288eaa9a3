//! The cookies of pages. Whatever a request contains, the server sends well-formed `Set-Cookie` headers, and a browser
//! returns the values that the server set.

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use http::{
    HeaderMap, HeaderValue,
    header::{COOKIE, HeaderName},
};
use latchkey_server::{
    domain::{
        flow::FlowId,
        pages::{BrowserId, SessionCookie},
        session::SessionId,
        user::UserId,
    },
    http::cookies::CookieScheme,
};
use time::Duration;
use uuid::Uuid;

use crate::{
    app::{NOW, app, app_id, env_at},
    draw::{Draw, texts},
    harness,
};

const FRAGMENTS: [&str; 24] = [
    "__Host-",
    "latchkey-",
    "session.",
    "browser=AAAAAAAAAAAAAAAAAAAAAA",
    "lang=",
    "tx.1769938200000.",
    "18446744073709551616",
    "shop",
    ".",
    "=",
    "=",
    ";",
    "; ",
    "a",
    "A-_z",
    "de-DE",
    ",",
    "\"",
    " ",
    "\t",
    "__Host-latchkey-session.shop=a; ",
    "__Host-latchkey-tx.1.a=b; ",
    "é",
    "Path=/",
];

#[test]
fn page_cookies() {
    harness::run("page_cookies", 3_000, |input| {
        for text in texts(input, &FRAGMENTS) {
            check_cookies(&text);
        }
        check_browser(&mut Draw::new(input));
    });
}

fn a_cookie(draw: &mut Draw<'_>) -> SessionCookie {
    SessionCookie {
        issued_ms: draw.number(),
        user: UserId(Uuid::from_bytes(draw.array())),
        session: SessionId(Uuid::from_bytes(draw.array())),
    }
}

/// Whatever the `Cookie` header of a request contains, the server's `Set-Cookie` headers are valid.
fn check_cookies(text: &str) {
    let Ok(value) = HeaderValue::from_str(text) else { return };
    let request = HeaderMap::from_iter([(COOKIE, value)]);
    let cookie = a_cookie(&mut Draw::new(text.as_bytes()));
    for cookies in [CookieScheme::Secure, CookieScheme::Plain] {
        let max_heap = 32 * 1024 + 256 * text.len() as u64;
        let mut headers = harness::assert_bounded(1, max_heap, || {
            cookies.set_session(&cookies.sent_to_pages(&request), app("shop"), &cookie)
        });
        let sent = cookies.sent_to_pages(&request);
        assert!(sent.newest_transactions().count() <= 4);
        if let Some(language) = sent.language() {
            headers.push(cookies.set_language(language).unwrap());
        }
        headers.extend(sent.browser().map(|browser| cookies.set_browser(browser)));
        let id = FlowId::generate(&env_at(NOW));
        headers.extend(cookies.transactions().add(sent.transactions(), &id, NOW, "sealed", 600));
        headers.push(cookies.clear_session(&app_id("shop")));
        headers.extend(cookies.set_language(text));
        for (_, header) in headers {
            let header = header.to_str().unwrap();
            let (name, value_and_attributes) = header.split_once('=').unwrap();
            let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
            assert!(name.bytes().all(is_token), "{header}");
            let (value, attributes) = value_and_attributes.split_once("; ").unwrap();
            assert!(value.bytes().all(is_token), "{header}");
            let attributes = attributes.rsplit_once("Path=/").unwrap().1;
            let is_secure = cookies == CookieScheme::Secure;
            assert_eq!(
                attributes,
                if is_secure { "; Secure; HttpOnly; SameSite=Lax" } else { "; HttpOnly; SameSite=Lax" }
            );
            assert_eq!(name.starts_with("__Host-"), is_secure, "{header}");
        }
    }
}

/// A browser that logs in to many Apps has at most 20 session cookies and four transaction cookies, and returns each of
/// them as the server set it.
fn check_browser(draw: &mut Draw<'_>) {
    let cookies = draw.pick(&[CookieScheme::Secure, CookieScheme::Plain]);
    let env = env_at(NOW);
    let browser = BrowserId::generate(&env);
    let mut jar: Vec<(String, String)> = vec![("theirs".to_owned(), "1".to_owned())];
    store_cookies(&mut jar, vec![cookies.set_browser(&browser)]);
    // Session cookies of other Apps. Only their names and times matter.
    let name = |number: usize| match cookies {
        CookieScheme::Secure => format!("__Host-latchkey-session.app-{number}"),
        CookieScheme::Plain => format!("latchkey-session.app-{number}"),
    };
    for number in 0..usize::from(draw.byte() & 31) {
        jar.push((name(number), a_cookie(draw).encode(app("other"))));
    }
    for step in 0..draw.byte() & 7 {
        let request = request_of(&jar);
        let sent = cookies.sent_to_pages(&request);
        assert_eq!(sent.browser(), Some(&browser));
        let cookie = a_cookie(draw);
        let session_headers = cookies.set_session(&sent, app("shop"), &cookie);
        let id = FlowId::generate(&env);
        let now = NOW + Duration::seconds(i64::from(step));
        let sealed = URL_SAFE_NO_PAD.encode(draw.array::<8>());
        let transaction_headers = cookies.transactions().add(sent.transactions(), &id, now, &sealed, 600);
        store_cookies(&mut jar, session_headers);
        store_cookies(&mut jar, transaction_headers);

        let request = request_of(&jar);
        let sent = cookies.sent_to_pages(&request);
        let value = sent.session(&app_id("shop")).unwrap();
        assert_eq!(SessionCookie::decode(app("shop"), value, NOW), Ok(cookie));
        assert_eq!(sent.newest_transactions().next().map(|cookie| cookie.value), Some(sealed.as_str()));
        assert!(sent.transactions().len() <= 4);
        assert!(jar.iter().filter(|(name, _)| name.contains("latchkey-session.")).count() <= 20, "{jar:?}");
        if draw.flag() {
            let before = jar.len();
            let headers = cookies.transactions().remove(sent.transactions(), &id);
            store_cookies(&mut jar, headers);
            assert_eq!(jar.len(), before - 1);
        }
    }
}

/// The request headers of a browser with these cookies.
fn request_of(jar: &[(String, String)]) -> HeaderMap {
    let pairs: Vec<_> = jar.iter().map(|(name, value)| format!("{name}={value}")).collect();
    HeaderMap::from_iter([(COOKIE, HeaderValue::try_from(pairs.join("; ")).unwrap())])
}

/// Changes the jar as a browser does when it receives these `Set-Cookie` headers.
fn store_cookies(jar: &mut Vec<(String, String)>, headers: Vec<(HeaderName, HeaderValue)>) {
    for (_, header) in headers {
        let header = header.to_str().unwrap();
        let (name, value_and_attributes) = header.split_once('=').unwrap();
        let (value, attributes) = value_and_attributes.split_once(';').unwrap();
        jar.retain(|(other, _)| other != name);
        if !attributes.contains("Max-Age=0") {
            jar.push((name.to_owned(), value.to_owned()));
        }
    }
}
