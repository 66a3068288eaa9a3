//! Key sets of Clients: an accepted set has only public keys that a server can load.

use jsonwebtoken::{DecodingKey, jwk::Jwk};
use latchkey_operator::fuzzing::client_key_set;
use serde_json::Value;

use crate::{draw::texts, harness};

const FRAGMENTS: [&str; 40] = [
    "{\"keys\":[",
    "]}",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "\"",
    "null",
    "1",
    "\"keys\":[",
    "\"kty\":\"RSA\",",
    "\"kty\":\"EC\",",
    "\"kty\":\"OKP\",",
    "\"kty\":\"oct\",",
    "\"crv\":\"P-256\",",
    "\"crv\":\"Ed25519\",",
    "\"crv\":\"P-384\",",
    "\"x\":\"11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo\"",
    "\"x\":\"MKBCTNIcKUSDii11ySs3526iDZ8AiTo7Tu6KPAqv7D4\",",
    "\"y\":\"4Etl6SRW2YiLUrN5vfvVHuhp7x8PxltmWWlbbM4IFyM\"",
    "\"y\":\"AQ\"",
    "\"e\":\"AQAB\",",
    "\"e\":\"AQ\",",
    "\"n\":\"0vx7agoebGcQSuuPiLJXZptN9nndrQmbXEps2aiAFbWhM78LhWx4cbbfAAtVT86zwu1RK7aPFFxuhDR1L6tSoc_BJECPebWKRXjBZCiFV4n3oknjhMstn64tZ_2W-5JsGY4Hc5n9yBXArwl93lqt7_RN5w6Cf0h4QyQ5v-65YGjQR0_FDW2QvzqY368QQMicAtaSqzs8KJZgnYb9c7d0zgdAZHzu6qMQvRL5hajrn1n91CbOpbISD08qNLyrdkt-bFTWhAI4vMQFh6WeZu0fM4lFd2NcRwr3XPksINHaQ-G_xBniIqbw0Ls1jF44-csFCur-kEgU8awapJzKnqDKgw\"",
    "\"n\":\"AQAB\"",
    "\"d\":\"AQ\",",
    "\"k\":\"AQ\",",
    "\"kid\":\"1\",",
    "\"kid\":\"2\",",
    "\"kid\":1,",
    "\"alg\":\"RS256\",",
    "\"alg\":\"PS256\",",
    "\"alg\":\"ES256\",",
    "\"alg\":\"EdDSA\",",
    "\"alg\":\"HS256\",",
    "\"use\":\"sig\",",
    "\"use\":\"enc\",",
    "\"key_ops\":[\"verify\"],",
];

#[test]
fn client_keys() {
    harness::run("client_keys", 1000, |input| {
        for text in texts(input, &FRAGMENTS) {
            check_set(&text);
            check_set(&format!("{{\"keys\":[{{{text}}}]}}"));
        }
    });
}

fn check_set(text: &str) {
    let Some(set) = harness::assert_bounded(2, 4 * 1024 * 1024, || client_key_set(text)) else { return };
    assert!(text.len() <= 16 * 1024 && set.len() <= 16 * 1024);
    assert_eq!(client_key_set(&set).as_ref(), Some(&set), "a set that servers read is accepted unchanged");
    let set: Value = serde_json::from_str(&set).expect("a set is JSON");
    let keys = set["keys"].as_array().expect("a set has a list of keys");
    assert!((1..=8).contains(&keys.len()));
    for key in keys {
        for member in key.as_object().expect("a key is an object").keys() {
            assert!(["kty", "kid", "alg", "use", "crv", "x", "y", "n", "e"].contains(&member.as_str()), "{member}");
        }
        let jwk: Jwk = serde_json::from_value(key.clone()).expect("a server can parse each key");
        assert!(DecodingKey::from_jwk(&jwk).is_ok(), "a server cannot use {key}");
    }
}
