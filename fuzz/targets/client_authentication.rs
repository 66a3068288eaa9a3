//! Client authentication: the server decodes Basic credentials that another library has encoded, and refuses a request
//! that uses two methods or names two clients.

use base64::{Engine, engine::general_purpose::STANDARD};
use http::{HeaderMap, HeaderValue, header::AUTHORIZATION};
use latchkey_server::{
    domain::openid::{
        authenticate::{PresentedClient, PresentedCredentials},
        client::ClientAuthentication,
    },
    http::clients::fuzzing::with_presented,
};
use serde_json::{Map, Value};
use url::form_urlencoded;

use crate::{
    app::NOW,
    draw::{Draw, texts},
    harness,
    openid_app::{WEB, openid_app},
};

/// The secret that the operator's code gives to every client in fuzz targets.
const SECRET: &str = "lks_fuzzing";
const FRAGMENTS: [&str; 28] = [
    "Basic ",
    "basic",
    "BASIC ",
    "Basically ",
    "Bearer ",
    " ",
    "\t",
    ",",
    "OnNlY3JldA==",
    "d2ViOnNlY3JldA==",
    "d2ViOnNlY3JldA",
    "d2Vi",
    "Og==",
    "OjpiOg==",
    "JTNBOiUyQg==",
    "JUZGOmE=",
    "JTpA",
    "Kzor",
    "/w==",
    "w6k6w6k=",
    "A",
    "AAAA",
    "=",
    "_-",
    "+/",
    "%",
    "é",
    "\u{7f}",
];

/// The client ID and the credentials that the server has found in a request, with owned values.
#[derive(Debug, PartialEq, Eq)]
struct FoundClient {
    client_id: Option<String>,
    credentials: Credentials,
}

#[derive(Debug, PartialEq, Eq)]
enum Credentials {
    None,
    Basic(String),
    Post(String),
    Malformed,
    Assertion { assertion: String, kind: Option<String> },
}

#[test]
fn client_authentication() {
    harness::run("client_authentication", 8_000, |input| {
        check_header(input);
        for text in texts(input, &FRAGMENTS) {
            check_header(text.as_bytes());
            check_header(format!("Basic {}", STANDARD.encode(text.as_bytes())).as_bytes());
            check_secret(&text);
        }
        check_round_trip(&mut Draw::new(input));
        check_form(&mut Draw::new(input));
    });
}

fn find_client(fields: &[HeaderValue], form: &Map<String, Value>) -> Option<FoundClient> {
    let headers: HeaderMap = fields.iter().map(|field| (AUTHORIZATION, field.clone())).collect();
    let bytes: usize = fields.iter().map(HeaderValue::len).sum();
    let owned = |presented: PresentedClient<'_>| FoundClient {
        client_id: presented.client_id.map(str::to_owned),
        credentials: match presented.credentials {
            PresentedCredentials::None => Credentials::None,
            PresentedCredentials::Secret { secret, is_basic: true } => Credentials::Basic(secret.to_owned()),
            PresentedCredentials::Secret { secret, is_basic: false } => Credentials::Post(secret.to_owned()),
            PresentedCredentials::MalformedBasic => Credentials::Malformed,
            PresentedCredentials::Assertion { assertion, assertion_type } => {
                Credentials::Assertion { assertion: assertion.to_owned(), kind: assertion_type.map(str::to_owned) }
            }
        },
    };
    harness::assert_bounded(1, 16 * 1024 + 16 * bytes as u64, || with_presented(&headers, form.clone(), owned))
}

/// Checks a request with one `Authorization` header and without a form.
fn check_header(field: &[u8]) {
    let Ok(value) = HeaderValue::from_bytes(field) else { return };
    let found = find_client(std::slice::from_ref(&value), &Map::new()).expect("there is only one method");
    let scheme = field.split(|byte| *byte == b' ').next().unwrap_or_default();
    let is_basic = scheme.eq_ignore_ascii_case(b"basic");
    if !is_basic {
        assert_eq!(found, FoundClient { client_id: None, credentials: Credentials::None });
        return;
    }
    match (decode(&value), found) {
        (_, FoundClient { client_id: None, credentials: Credentials::Malformed }) if decode(&value).is_none() => {}
        (
            Some((client_id, secret)),
            FoundClient { client_id: Some(found_id), credentials: Credentials::Basic(found_secret) },
        ) => {
            assert_eq!((found_id, found_secret), (client_id, secret));
        }
        (expected, found) => {
            // The simple decoder replaces bytes that are not UTF-8. The server rejects the credentials.
            let is_replaced = |text: &String| text.contains(char::REPLACEMENT_CHARACTER);
            let is_not_utf8 =
                expected.is_some_and(|(client_id, secret)| is_replaced(&client_id) || is_replaced(&secret));
            assert!(is_not_utf8 && found.credentials == Credentials::Malformed, "{value:?}: {found:?}");
        }
    }
}

/// A simple decoder of Basic credentials.
fn decode(field: &HeaderValue) -> Option<(String, String)> {
    let (_, encoded) = field.to_str().ok()?.split_once(' ')?;
    let text = String::from_utf8(STANDARD.decode(encoded.trim()).ok()?).ok()?;
    let (client_id, secret) = text.split_once(':')?;
    let form_decode = |text: &str| {
        let pair = format!("x={}", text.replace('&', "%26"));
        form_urlencoded::parse(pair.as_bytes()).next().map(|(_, value)| value.into_owned())
    };
    Some((form_decode(client_id)?, form_decode(secret)?))
}

/// Checks that a client's secret is accepted at any time, and that no other text is accepted.
fn check_secret(text: &str) {
    let Some(ClientAuthentication::Secret(secrets)) = openid_app().client(WEB).map(|client| &client.authentication)
    else {
        panic!("the client has a secret")
    };
    for time in [0, NOW.unix_timestamp()] {
        assert_eq!(secrets.accept(text, time), text == SECRET, "{text}");
        assert!(secrets.accept(SECRET, time));
    }
}

fn check_round_trip(draw: &mut Draw<'_>) {
    let (client_id, secret) = (draw.any_text(40), draw.any_text(80));
    let encode = |text: &str| form_urlencoded::byte_serialize(text.as_bytes()).collect::<String>();
    let field = format!("Basic {}", STANDARD.encode(format!("{}:{}", encode(&client_id), encode(&secret))));
    let field = HeaderValue::from_str(&field).unwrap();
    let expected = FoundClient { client_id: Some(client_id), credentials: Credentials::Basic(secret) };
    let other = HeaderValue::from_static("Bearer abc");
    for fields in [vec![field.clone()], vec![other.clone(), field.clone()], vec![field.clone(), other]] {
        assert_eq!(find_client(&fields, &Map::new()).as_ref(), Some(&expected), "{fields:?}");
    }
    let twice = FoundClient { client_id: None, credentials: Credentials::Malformed };
    assert_eq!(find_client(&[field.clone(), field], &Map::new()), Some(twice));
}

/// Checks every combination of methods. The server refuses a request that uses two methods or names two clients.
fn check_form(draw: &mut Draw<'_>) {
    let mut form = Map::new();
    let mut add = |name: &str, value: Option<String>| {
        if let Some(value) = &value {
            form.insert(name.to_owned(), value.clone().into());
        }
        value
    };
    let client_id = draw.pick(&[None, Some("web"), Some("web"), Some("cli")]).map(str::to_owned);
    let client_id = add("client_id", client_id);
    let optional = |draw: &mut Draw<'_>| draw.flag().then(|| format!("{}x", draw.any_text(20)));
    let secret = add("client_secret", optional(draw));
    let assertion = add("client_assertion", optional(draw));
    let kind = add("client_assertion_type", optional(draw));
    let field =
        draw.pick(&[None, None, Some("Bearer x"), Some("Basic"), Some("Basic d2ViOngl"), Some("Basic d2ViOngx")]);
    let fields: Vec<_> = field.into_iter().map(HeaderValue::from_static).collect();
    let basic = field.filter(|field| field.starts_with("Basic"));

    let methods = usize::from(basic.is_some()) + usize::from(secret.is_some()) + usize::from(assertion.is_some());
    let is_of_basic = |credentials: &str| basic.filter(|basic| *basic == credentials);
    let expected = match (secret, assertion) {
        _ if methods > 1 => None,
        (Some(secret), _) => Some(FoundClient { client_id, credentials: Credentials::Post(secret) }),
        (_, Some(assertion)) => {
            Some(FoundClient { client_id, credentials: Credentials::Assertion { assertion, kind } })
        }
        (None, None) if is_of_basic("Basic").is_some() => {
            Some(FoundClient { client_id, credentials: Credentials::Malformed })
        }
        (None, None) if basic.is_some() && client_id.as_deref() == Some("cli") => None,
        (None, None) => Some(match is_of_basic("Basic d2ViOngl").map(|_| "x%").or(basic.map(|_| "x1")) {
            Some(secret) => {
                FoundClient { client_id: Some("web".to_owned()), credentials: Credentials::Basic(secret.to_owned()) }
            }
            None => FoundClient { client_id, credentials: Credentials::None },
        }),
    };
    assert_eq!(find_client(&fields, &form), expected, "{fields:?} {form:?}");
}
