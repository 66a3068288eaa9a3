//! Flows (social logins between redirect and callback): only valid states, challenges and one-time codes parse. A
//! sealed flow opens only in the context in which it was sealed. A browser returns the cookies of flows as the server
//! set them.

use aws_lc_rs::digest::{SHA256, digest};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use http::{
    HeaderMap, HeaderValue,
    header::{COOKIE, HeaderName},
};
use latchkey_crds::types::ProviderName;
use latchkey_server::{
    domain::flow::{CodeChallenge, FLOW_SECONDS, Flow, FlowBinding, FlowState, LoginCode},
    http::cookies::CookieScheme,
};
use time::Duration;

use crate::{
    app::{NOW, app, env_at},
    draw::{Draw, texts},
    harness,
};

const FRAGMENTS: [&str; 24] = [
    "__Host-",
    "latchkey-flow.",
    "__Host-latchkey-flow.",
    "1769938200000",
    "18446744073709551616",
    "0",
    ".",
    ".",
    "=",
    "=",
    ";",
    "; ",
    "a",
    "A-_z",
    "AAAAAAAAAAAAAAAAAAAAAA",
    ",",
    "\"",
    " ",
    "\t",
    "lkc_",
    "__Host-latchkey-flow.1.a=b; ",
    "é",
    "Path=/",
    "x",
];

#[test]
fn flow() {
    harness::run("flow", 3_000, |input| {
        for text in texts(input, &FRAGMENTS) {
            check_random_values(&text);
            check_cookies(&text);
        }
        check_challenge(&mut Draw::new(input));
        check_sealed(&mut Draw::new(input));
        check_browser(&mut Draw::new(input));
    });
}

/// A state or a challenge parses only if it is 32 bytes in base64url; a one-time code needs the prefix `lkc_`, too. All
/// three are printed unchanged.
fn check_random_values(text: &str) {
    let is_32_bytes = |text: &str| URL_SAFE_NO_PAD.decode(text).is_ok_and(|bytes| bytes.len() == 32);
    let max_heap = 16 * 1024 + 4 * text.len() as u64;
    let state = harness::assert_bounded(1, max_heap, || FlowState::parse(text));
    assert_eq!(state.is_some(), is_32_bytes(text), "{text}");
    if let Some(state) = state {
        assert_eq!(state.as_str(), text);
    }
    let code = harness::assert_bounded(1, max_heap, || LoginCode::parse(text));
    assert_eq!(code.is_some(), text.strip_prefix("lkc_").is_some_and(is_32_bytes), "{text}");
    if let Some(code) = code {
        assert_eq!(code.expose(), text);
    }
    assert_eq!(CodeChallenge::parse(text).is_ok(), is_32_bytes(text), "{text}");
}

/// RFC 7636, section 4.6: a challenge accepts only the verifier that hashes to it.
fn check_challenge(draw: &mut Draw<'_>) {
    let verifier =
        if draw.flag() { draw.text(&["a", "Z", "0", "-._~", "é", "+", "abcdefghij"]) } else { draw.any_text(140) };
    let hash = URL_SAFE_NO_PAD.encode(digest(&SHA256, verifier.as_bytes()));
    let is_verifier = (43..=128).contains(&verifier.len())
        && verifier.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_' | '~'));
    let challenge = CodeChallenge::parse(&hash).unwrap();
    assert_eq!(challenge.is_satisfied_by(&verifier), is_verifier, "{verifier}");
    assert!(!challenge.is_satisfied_by(&format!("{verifier}a")));
    let other = CodeChallenge::parse(&URL_SAFE_NO_PAD.encode(draw.array::<32>())).unwrap();
    assert!(!other.is_satisfied_by(&verifier));
}

fn check_sealed(draw: &mut Draw<'_>) {
    let (app, env) = (app("shop"), env_at(NOW));
    let state = FlowState::parse(&URL_SAFE_NO_PAD.encode(draw.array::<32>())).unwrap();
    let provider: ProviderName = "github".parse().unwrap();
    let (binding, other_binding) = match draw.flag() {
        true => (FlowBinding::Browser, FlowBinding::Unbound),
        false => (FlowBinding::Unbound, FlowBinding::Browser),
    };
    let flow = Flow {
        // The state of the application contains no control characters, because the server rejects them when a flow
        // starts.
        app_state: draw.flag().then(|| draw.any_text(512).replace(char::is_control, "\u{10ffff}")),
        code_challenge: draw.flag().then(|| CodeChallenge::parse(&URL_SAFE_NO_PAD.encode(draw.array::<32>())).unwrap()),
        ..Flow::start(&env)
    };
    let sealed = flow.seal(&env, app, &provider, &state, binding);
    // RFC 6265, section 6.1: browsers accept at least 4096 bytes for name, value and attributes of a cookie together.
    // The sealed flow is the value, so it must leave room for the rest.
    assert!(sealed.len() < 3500, "{}", sealed.len());
    let open = |binding, sealed: &str, seconds| {
        Flow::open(app, &provider, &state, binding, sealed, NOW + Duration::seconds(seconds))
    };
    assert_eq!(open(binding, &sealed, FLOW_SECONDS - 1), Some(flow));
    assert_eq!(open(binding, &sealed, FLOW_SECONDS), None);
    assert_eq!(open(other_binding, &sealed, 0), None);
    let for_other_app = Flow::open(crate::app::app("other"), &provider, &state, binding, &sealed, NOW);
    assert_eq!(for_other_app, None);
    let for_other_provider = Flow::open(app, &"google".parse().unwrap(), &state, binding, &sealed, NOW);
    assert_eq!(for_other_provider, None);
    // Flips one bit of the sealed flow.
    let mut bytes = URL_SAFE_NO_PAD.decode(&sealed).unwrap();
    let at = draw.below(bytes.len());
    bytes[at] ^= 1 << (draw.byte() & 7);
    assert_eq!(open(binding, &URL_SAFE_NO_PAD.encode(bytes), 0), None);
    let random_text = draw.any_text(200);
    assert_eq!(open(binding, &random_text, 0), None);
    assert_eq!(open(binding, &URL_SAFE_NO_PAD.encode(random_text), 0), None);
}

/// When the server adds or removes the cookie of a flow, its `Set-Cookie` headers are valid, whatever the `Cookie`
/// header of the request contains.
fn check_cookies(text: &str) {
    let Ok(value) = HeaderValue::from_str(text) else { return };
    let request = HeaderMap::from_iter([(COOKIE, value)]);
    for scheme in [CookieScheme::Secure, CookieScheme::Plain] {
        let cookies = scheme.flows();
        let max_heap = 16 * 1024 + 128 * text.len() as u64;
        let count = harness::assert_bounded(1, max_heap, || cookies.from_request(&request).len());
        assert!(count <= text.split(';').count());
        let sent = cookies.from_request(&request);
        let id = FlowState::generate(&env_at(NOW)).id();
        for (_, header) in cookies.add(&sent, &id, NOW, "sealed", 600).into_iter().chain(cookies.remove(&sent, &id)) {
            let header = header.to_str().unwrap();
            let (name, value_and_attributes) = header.split_once('=').unwrap();
            let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
            assert!(name.bytes().all(is_token) && value_and_attributes.split(';').count() >= 4, "{header}");
            assert_eq!(name.starts_with("__Host-"), scheme == CookieScheme::Secure, "{header}");
        }
    }
}

/// A browser that starts and ends flows has at most four flow cookies, and returns each of them as the server set it.
fn check_browser(draw: &mut Draw<'_>) {
    let cookies = draw.pick(&[CookieScheme::Secure, CookieScheme::Plain]).flows();
    let mut jar: Vec<(String, String)> = Vec::new();
    for step in 0..draw.byte() & 7 {
        let request = {
            let mut fields = jar.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>();
            fields.push("theirs=1".to_owned());
            HeaderMap::from_iter([(COOKIE, HeaderValue::try_from(fields.join("; ")).unwrap())])
        };
        let sent = cookies.from_request(&request);
        assert_eq!(sent.len(), jar.len());
        let id = FlowState::generate(&env_at(NOW)).id();
        let now = NOW + Duration::seconds(i64::from(draw.byte()) + 256 * i64::from(step));
        let sealed = URL_SAFE_NO_PAD.encode(draw.array::<8>());
        store_cookies(&mut jar, cookies.add(&sent, &id, now, &sealed, 600));
        assert!(jar.len() <= 4, "{jar:?}");
        let newest = jar.last().expect("the new flow");
        assert!(newest.0.ends_with(id.as_str()) && newest.1 == sealed);
        if draw.flag() {
            let fields: Vec<_> = jar.iter().map(|(name, value)| format!("{name}={value}")).collect();
            let request = HeaderMap::from_iter([(COOKIE, HeaderValue::try_from(fields.join("; ")).unwrap())]);
            let before = jar.len();
            store_cookies(&mut jar, cookies.remove(&cookies.from_request(&request), &id));
            assert_eq!(jar.len(), before - 1);
        }
    }
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
