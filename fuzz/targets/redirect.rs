//! Redirect URLs: the check of the allow-list agrees with a simple implementation of the rule, and with a URL parser
//! that follows the URL standard of browsers.

use latchkey_crds::types::RedirectUrl;
use latchkey_server::domain::redirect::{ParameterLocation, choose_target, find_target};
use url::{Host, Url};

use crate::{
    draw::{Draw, texts},
    harness,
};

const URL_PIECES: [&str; 40] = [
    "https://",
    "http://",
    "com.example.shop:",
    "//",
    "/",
    "127.0.0.1",
    "127.1",
    "[::1]",
    "localhost",
    "shop.example.com",
    "evil.example",
    ":",
    ":0",
    ":80",
    ":3000",
    ":65535",
    ":65536",
    ":080",
    ":+1",
    "@",
    "?",
    "#",
    "&",
    "=",
    "done",
    "a",
    "%2F",
    "\\",
    ".",
    "..",
    "[",
    "]",
    "LOCALHOST",
    " ",
    "\t",
    "é",
    "0x7f.1",
    "http:",
    "[0:0:0:0:0:0:0:1]",
    "\n",
];

#[test]
fn redirect() {
    harness::run("redirect", 8_000, |input| {
        for text in texts(input, &URL_PIECES) {
            check_entry(&text);
        }
        let mut draw = Draw::new(input);
        let mut list: Vec<RedirectUrl> = Vec::new();
        for _ in 0..draw.byte() & 3 {
            let prefix = draw.pick(&[
                "http://127.0.0.1",
                "http://localhost",
                "http://[::1]",
                "https://shop.example.com",
                "",
                "com.example.shop:",
            ]);
            list.extend(format!("{prefix}{}", draw.text(&URL_PIECES)).parse());
        }
        for _ in 0..4 {
            let requested = match list.get(draw.below(4)) {
                // A variation of an entry, because unrelated URLs would never be accepted.
                Some(entry) => vary_entry(draw.byte(), entry.as_str(), draw.pick(&URL_PIECES), draw.below(80)),
                None => draw.text(&URL_PIECES),
            };
            check_input(&list, &requested, &mut draw);
        }
    });
}

/// Returns a variation of the entry. `how` selects it: unchanged, with `token` inserted at `at`, cut at `at`, or with
/// `token` inserted after the host.
fn vary_entry(how: u8, entry: &str, token: &str, at: usize) -> String {
    let mut requested = entry.to_owned();
    let at = (0..=at.min(requested.len())).rev().find(|at| requested.is_char_boundary(*at)).unwrap_or_default();
    match how & 3 {
        0 => {}
        1 => requested.insert_str(at, token),
        2 => requested.truncate(at),
        _ => {
            let host = ["http://127.0.0.1", "http://localhost", "http://[::1]"]
                .into_iter()
                .find(|host| entry.starts_with(host));
            requested.insert_str(host.map_or(at, str::len), token);
        }
    }
    requested
}

/// Checks that an accepted entry is a URL with `https`, with `http` for loopback, or with a private-use scheme.
fn check_entry(text: &str) {
    let parsed = harness::assert_bounded(1, 64 * 1024 + 32 * text.len() as u64, || text.parse::<RedirectUrl>());
    let Ok(entry) = parsed else { return };
    assert_eq!(entry.as_str(), text);
    let url = Url::parse(text).expect("an entry is a URL");
    assert!(url.username().is_empty() && url.password().is_none() && url.fragment().is_none(), "{text}");
    assert!(text.bytes().all(|byte| byte.is_ascii_graphic()), "{text}");
    let allowed = match url.scheme() {
        "https" => url.host().is_some(),
        "http" => match url.host() {
            Some(Host::Domain(name)) => name == "localhost",
            Some(Host::Ipv4(address)) => address.is_loopback(),
            Some(Host::Ipv6(address)) => address.is_loopback(),
            None => false,
        },
        scheme => scheme.contains('.'),
    };
    assert!(allowed, "{text} is {url:?}");
}

/// RFC 8252, section 7.3: an `http` entry matches a URL with any port or none. Replaces the port of the entry with each
/// number in `requested`, and compares the result with `requested`.
pub(crate) fn matches(entry: &str, requested: &str) -> bool {
    if entry == requested {
        return true;
    }
    // An entry with `http` is always a loopback URL, because the allow-list accepts no other `http` URL.
    let Some(without_scheme) = entry.strip_prefix("http://") else { return false };
    let authority_end = without_scheme.find(['/', '?', '#']).unwrap_or(without_scheme.len());
    let authority = &without_scheme[..authority_end];
    let host_end = if authority.starts_with('[') {
        authority.find(']').unwrap() + 1
    } else {
        authority.find(':').unwrap_or(authority.len())
    };
    let (host, path_and_query) = (&without_scheme[..host_end], &without_scheme[authority_end..]);
    // A valid port has no leading zeros. An entry with an invalid or empty port matches only itself.
    let port = &authority[host_end..];
    let is_port = |digits: &str| digits.parse::<u16>().is_ok_and(|port| port > 0 && port.to_string() == digits);
    if !port.is_empty() && !port.strip_prefix(':').is_some_and(is_port) {
        return false;
    }
    let ports = requested.split(|c: char| !c.is_ascii_digit()).filter_map(|digits| digits.parse::<u16>().ok());
    requested == format!("http://{host}{path_and_query}")
        || ports.filter(|port| *port != 0).any(|port| requested == format!("http://{host}:{port}{path_and_query}"))
}

fn check_input(list: &[RedirectUrl], requested: &str, draw: &mut Draw<'_>) {
    let max_heap = 64 * 1024 + 8 * requested.len() as u64;
    let chosen = harness::assert_bounded(1, max_heap, || choose_target(list, Some(requested)));
    let expected = list.iter().find(|entry| matches(entry.as_str(), requested));
    assert_eq!(chosen.is_ok(), expected.is_some(), "{requested:?} of {list:?}");
    let (Ok(Some(target)), Some(entry)) = (chosen, expected) else { return };
    assert_eq!(target.as_str(), requested);
    assert_eq!(find_target(list, target.reference()).as_ref(), Ok(&target), "{requested:?} is not found again");

    // For a browser, the requested URL and the entry differ at most in the port.
    let (url, entry_url) = (Url::parse(requested).unwrap(), Url::parse(entry.as_str()).unwrap());
    assert_eq!(
        (url.scheme(), url.host(), url.path(), url.query()),
        (entry_url.scheme(), entry_url.host(), entry_url.path(), entry_url.query())
    );
    assert!(url.username().is_empty() && url.password().is_none() && url.fragment().is_none());
    assert!(url.port() == entry_url.port() || url.scheme() == "http", "{requested:?}");

    let parameters = [("code", draw.any_text(20)), ("state", draw.any_text(40))];
    let given = || parameters.iter().map(|(name, value)| (*name, value.as_str()));
    let in_query = Url::parse(&target.with_parameters(ParameterLocation::Query, given())).unwrap();
    assert_eq!((without_query(&in_query), in_query.fragment()), (without_query(&url), None));
    let pairs: Vec<_> =
        in_query.query_pairs().into_iter().map(|(name, value)| (name.into_owned(), value.into_owned())).collect();
    let expected: Vec<_> = given().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    assert!(pairs.ends_with(&expected), "{in_query}");
    let in_fragment = Url::parse(&target.with_parameters(ParameterLocation::Fragment, given())).unwrap();
    assert_eq!((without_query(&in_fragment), in_fragment.query()), (without_query(&url), url.query()));
    let fragment: Vec<_> =
        url::form_urlencoded::parse(in_fragment.fragment().unwrap().as_bytes()).into_owned().collect();
    assert_eq!(fragment, expected, "{in_fragment}");
}

/// The URL without its query and fragment.
fn without_query(url: &Url) -> (&str, Option<Host<&str>>, Option<u16>, &str) {
    (url.scheme(), url.host(), url.port(), url.path())
}
