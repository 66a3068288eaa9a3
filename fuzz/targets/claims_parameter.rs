//! The parameter `claims`: an accepted text is an object as in OpenID Connect Core 1.0, 5.5. The server finds the same
//! claims, users and `acr` in it as a simple implementation of the rules.

use latchkey_server::domain::openid::{
    ACR,
    claims_request::{ClaimSet, InvalidClaims, MAX_CLAIMS_BYTES, RequestedClaims, UserClaim},
};
use serde_json::{Map, Value, json};

use crate::{
    draw::{Draw, texts},
    harness,
};

const NAMES: [(&str, UserClaim); 4] = [
    ("name", UserClaim::Name),
    ("email", UserClaim::Email),
    ("email_verified", UserClaim::EmailVerified),
    ("groups", UserClaim::Groups),
];
const USERS: [&str; 3] = ["a", "b", "7"];
const FRAGMENTS: [&str; 36] = [
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    "{\"id_token\":{",
    "},\"userinfo\":{",
    "}}",
    "\"id_token\":",
    "\"userinfo\":",
    "\"email\":",
    "\"groups\":null",
    "\"name\":{}",
    "\"sub\":{\"value\":\"a\"}",
    "\"sub\":{\"values\":[\"a\",\"b\"]}",
    "\"sub\":{\"values\":[7]}",
    "\"acr\":{\"essential\":true,\"value\":\"urn:latchkey:aal:1\"}",
    "\"acr\":{\"essential\":true,\"values\":[\"urn:other\"]}",
    "\"essential\":true",
    "\"essential\":\"yes\"",
    "\"value\":",
    "\"values\":[]",
    "\"values\":[\"a\"]",
    "\"x\":[[[[[[[[",
    "\"x\":{\"x\":",
    "null",
    "true",
    "1e400",
    "\"\"",
    "\"\\u0061\"",
    "\"\\ud800\"",
    "\"",
    "\\",
    " ",
    "é",
];

#[test]
fn claims_parameter() {
    harness::run("claims_parameter", 8_000, |input| {
        for text in texts(input, &FRAGMENTS) {
            check_input(&text);
            check_input(&format!("{{\"id_token\":{{{text}}}}}"));
        }
        check_input(&a_document(&mut Draw::new(input)).to_string());
    });
}

fn a_document(draw: &mut Draw<'_>) -> Value {
    let requests = [
        Value::Null,
        json!({}),
        json!({ "essential": true }),
        json!({ "essential": false, "value": "a" }),
        json!({ "values": ["a", "b"] }),
        json!({ "value": "b", "values": ["a", 7] }),
        json!({ "essential": true, "value": ACR }),
        json!({ "essential": true, "values": ["urn:other", "urn:latchkey:aal:2"] }),
        json!({ "essential": 1 }),
        json!({ "values": [] }),
        json!({ "values": "a" }),
        json!(true),
    ];
    let mut document = json!({});
    for place in ["id_token", "userinfo"] {
        document[place] = match draw.byte() {
            0..16 => continue,
            16..24 => Value::Null,
            24..32 => json!([]),
            _ => json!({}),
        };
        for _ in 0..draw.byte() & 3 {
            let name = draw.pick(&["sub", "acr", "name", "email", "email_verified", "groups", "website"]);
            // The first eight of these requests are valid.
            let count = if draw.flag() { 8 } else { requests.len() };
            let request = requests[draw.below(count)].clone();
            if let Some(members) = document[place].as_object_mut() {
                members.insert(name.to_owned(), request);
            }
        }
    }
    document
}

fn check_input(text: &str) {
    let parsed = harness::assert_bounded(1, 1024 * 1024, || RequestedClaims::parse(text));
    let expected = parse(text).filter(|_| text.len() <= MAX_CLAIMS_BYTES);
    let (claims, [id_token, userinfo]) = match (parsed, expected) {
        (Ok(claims), Some(expected)) => (claims, expected),
        (Err(InvalidClaims), None) => return,
        (parsed, expected) => panic!("{text}: {parsed:?}, expected {expected:?}"),
    };
    for (members, found) in [(&id_token, claims.id_token), (&userinfo, claims.userinfo)] {
        let named = NAMES.iter().filter(|(name, _)| members.contains_key(*name));
        assert_eq!(named.fold(ClaimSet::NONE, |set, (_, claim)| set.with(*claim)), found, "{text}");
    }
    for user in USERS {
        let allows = |members: &Map<String, Value>| {
            let wanted = members.get("sub").map(values).unwrap_or_default();
            wanted.is_empty() || wanted.iter().any(|value| *value == user)
        };
        assert_eq!(claims.allows_subject(user), allows(&id_token) && allows(&userinfo), "{text} for {user}");
    }
    let is_unmet = id_token.get("acr").is_some_and(|acr| {
        let wanted = values(acr);
        acr["essential"] == true && !wanted.is_empty() && wanted.iter().all(|value| *value != ACR)
    });
    assert_eq!(claims.is_acr_unmet, is_unmet, "{text}");
    let stored: RequestedClaims = serde_json::from_str(&serde_json::to_string(&claims).unwrap()).unwrap();
    assert_eq!((stored.id_token, stored.userinfo), (claims.id_token, claims.userinfo), "{text}");
}

/// The members `id_token` and `userinfo` of the parameter. `None` if the text is not valid.
fn parse(text: &str) -> Option<[Map<String, Value>; 2]> {
    let document: Value = serde_json::from_str(text).ok()?;
    let document = document.as_object()?;
    let members = |place: &str| match document.get(place) {
        None | Some(Value::Null) => Some(Map::new()),
        Some(Value::Object(members)) => Some(members.clone()),
        Some(_) => None,
    };
    let both = [members("id_token")?, members("userinfo")?];
    let is_valid = |request: &Value| match request {
        Value::Null => true,
        Value::Object(request) => {
            request.get("essential").is_none_or(Value::is_boolean)
                && request.get("values").is_none_or(|values| values.as_array().is_some_and(|values| !values.is_empty()))
        }
        _ => false,
    };
    both.iter().flat_map(Map::values).all(is_valid).then_some(both)
}

/// The values in the request for one claim. A value that is not a text becomes null, so that it differs from every
/// text.
fn values(request: &Value) -> Vec<Value> {
    let several = request.get("values").and_then(Value::as_array).into_iter().flatten();
    request
        .get("value")
        .into_iter()
        .chain(several)
        .map(|value| if value.is_string() { value.clone() } else { Value::Null })
        .collect()
}
