//! Checks the public keys of a Client: a JWK Set (RFC 7517, section 5).

use std::{borrow::Cow, collections::BTreeSet};

use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_FIXED, ED25519, ParsedPublicKey, RSA_PKCS1_2048_8192_SHA256, RsaPublicKeyComponents,
};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use serde_json::{Map, Value, json};

/// The maximum size of a key set, in bytes.
const MAX_BYTES: usize = 16 * 1024;
/// The maximum number of keys in a set.
const MAX_KEYS: usize = 8;
/// The maximum length of a key ID, in bytes.
const MAX_KEY_ID_LENGTH: usize = 256;
/// The members of private and symmetric keys (RFC 7518, sections 6.2.2, 6.3.2 and 6.4.1; RFC 8037, section 2).
const PRIVATE_MEMBERS: [&str; 8] = ["d", "p", "q", "dp", "dq", "qi", "oth", "k"];

/// Why a key set cannot be used. The text never quotes the key set, which may contain a private key by mistake.
pub(crate) type InvalidKeySet = Cow<'static, str>;

/// Checks a key set. Returns the set with only those members of each key that servers read, so without certificates and
/// unknown members.
pub(crate) fn normalize(text: &str) -> Result<String, InvalidKeySet> {
    if text.len() > MAX_BYTES {
        return Err("is over 16 KiB".into());
    }
    // The parser's error is dropped, because it may quote the input.
    let set: Value = serde_json::from_str(text).map_err(|_| "is not JSON")?;
    let keys = set.get("keys").and_then(Value::as_array).ok_or("is not a JWK Set: it has no list of keys")?;
    if keys.is_empty() || keys.len() > MAX_KEYS {
        return Err("must have 1 to 8 keys".into());
    }
    let mut ids = BTreeSet::new();
    let mut normalized = Vec::new();
    for (index, key) in keys.iter().enumerate() {
        let key = normalize_key(key).map_err(|what| format!("key {}: {what}", index + 1))?;
        if let Some(id) = key.get("kid").and_then(Value::as_str)
            && !ids.insert(id.to_owned())
        {
            return Err(format!("key {}: its kid is also that of an earlier key", index + 1).into());
        }
        normalized.push(Value::Object(key));
    }
    Ok(json!({ "keys": normalized }).to_string())
}

fn normalize_key(key: &Value) -> Result<Map<String, Value>, &'static str> {
    let members = key.as_object().ok_or("is not an object")?;
    if PRIVATE_MEMBERS.iter().any(|member| members.contains_key(*member)) {
        return Err("has parts of a private or symmetric key; publish only public keys, and replace this key");
    }
    let text = |member: &str| members.get(member).and_then(Value::as_str);
    if members.get("use").is_some_and(|purpose| purpose != "sig") {
        return Err("its use is not sig");
    }
    if let Some(operations) = members.get("key_ops")
        && !operations.as_array().is_some_and(|operations| operations.iter().any(|operation| operation == "verify"))
    {
        return Err("its key_ops do not contain verify");
    }
    if members.get("kid").is_some_and(|id| id.as_str().is_none_or(|id| id.len() > MAX_KEY_ID_LENGTH)) {
        return Err("its kid is not a string of at most 256 bytes");
    }
    let (algorithms, numbers): (&[&str], &[&str]) = match (text("kty"), text("crv")) {
        (Some("RSA"), _) => (&["RS256", "PS256"], &["n", "e"]),
        (Some("EC"), Some("P-256")) => (&["ES256"], &["crv", "x", "y"]),
        (Some("OKP"), Some("Ed25519")) => (&["EdDSA"], &["crv", "x"]),
        _ => return Err("is neither RSA nor P-256 nor Ed25519"),
    };
    if members.get("alg").is_some_and(|algorithm| !algorithms.iter().any(|allowed| algorithm == allowed)) {
        return Err("its alg is not RS256, PS256, ES256 or EdDSA, or not one of this type of key");
    }
    let number = |member: &str| {
        text(member).and_then(|text| URL_SAFE_NO_PAD.decode(text).ok()).ok_or("has a number that is not base64url")
    };
    let is_valid = match text("kty") {
        Some("RSA") => is_rsa_key(&number("n")?, &number("e")?),
        Some("EC") => is_p256_key(&number("x")?, &number("y")?),
        _ => ParsedPublicKey::new(&ED25519, number("x")?).is_ok(),
    };
    if !is_valid {
        return Err("is not a valid public key (RSA needs 2048 to 8192 bits)");
    }
    let kept = ["kty", "kid", "alg", "use"].iter().chain(numbers);
    Ok(kept.filter_map(|member| Some(((*member).to_owned(), members.get(*member)?.clone()))).collect())
}

/// Whether the numbers are an RSA key of 2048 to 8192 bits with an odd exponent from 3 to 2³² − 1.
fn is_rsa_key(modulus: &[u8], exponent: &[u8]) -> bool {
    let is_odd = |number: &[u8]| number.last().is_some_and(|byte| byte % 2 == 1);
    let is_exponent = is_odd(exponent) && exponent.len() <= 4 && *exponent != [1] && exponent[0] != 0;
    let bits = modulus.first().map_or(0, |first| modulus.len() * 8 - first.leading_zeros() as usize);
    let has_no_leading_zero = modulus.first().is_some_and(|first| *first != 0);
    is_exponent
        && has_no_leading_zero
        && is_odd(modulus)
        && (2048..=8192).contains(&bits)
        && RsaPublicKeyComponents { n: modulus, e: exponent }.to_parsed_public_key(&RSA_PKCS1_2048_8192_SHA256).is_ok()
}

/// Whether the coordinates are a point of P-256 (SEC 1, section 2.3.3: the uncompressed form begins with 4).
fn is_p256_key(x: &[u8], y: &[u8]) -> bool {
    x.len() == 32 && y.len() == 32 && ParsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, [&[4][..], x, y].concat()).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    // The keys below are the public keys of RFC 7517, appendix A.1, and RFC 8037, appendix A.2.

    fn p256() -> Value {
        json!({
            "kty": "EC", "crv": "P-256", "kid": "1",
            "x": "MKBCTNIcKUSDii11ySs3526iDZ8AiTo7Tu6KPAqv7D4",
            "y": "4Etl6SRW2YiLUrN5vfvVHuhp7x8PxltmWWlbbM4IFyM",
        })
    }

    fn rsa() -> Value {
        json!({
            "kty": "RSA", "e": "AQAB", "alg": "RS256", "kid": "2011-04-29",
            "n": "0vx7agoebGcQSuuPiLJXZptN9nndrQmbXEps2aiAFbWhM78LhWx4cbbfAAtVT86zwu1RK7aPFFxuhDR1L6tSoc_BJECPebWKRXjBZCiFV4n3oknjhMstn64tZ_2W-5JsGY4Hc5n9yBXArwl93lqt7_RN5w6Cf0h4QyQ5v-65YGjQR0_FDW2QvzqY368QQMicAtaSqzs8KJZgnYb9c7d0zgdAZHzu6qMQvRL5hajrn1n91CbOpbISD08qNLyrdkt-bFTWhAI4vMQFh6WeZu0fM4lFd2NcRwr3XPksINHaQ-G_xBniIqbw0Ls1jF44-csFCur-kEgU8awapJzKnqDKgw",
        })
    }

    fn ed25519() -> Value {
        json!({ "kty": "OKP", "crv": "Ed25519", "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo" })
    }

    fn with(mut key: Value, member: &str, value: Value) -> Value {
        key[member] = value;
        key
    }

    fn check(keys: &[Value]) -> Result<Value, InvalidKeySet> {
        normalize(&json!({ "keys": keys }).to_string()).map(|text| serde_json::from_str(&text).unwrap())
    }

    #[track_caller]
    fn assert_refused(keys: &[Value], reason: &str) {
        let error = check(keys).expect_err(reason);
        assert!(error.contains(reason), "{error:?} does not contain {reason:?}");
    }

    #[test]
    fn public_keys_of_each_type_are_accepted() {
        let keys = [rsa(), p256(), ed25519()];
        assert_eq!(check(&keys).unwrap(), json!({ "keys": keys }));
        for (key, algorithms) in [(rsa(), &["RS256", "PS256"][..]), (p256(), &["ES256"]), (ed25519(), &["EdDSA"])] {
            for algorithm in algorithms {
                let key = with(with(key.clone(), "alg", json!(algorithm)), "use", json!("sig"));
                assert_eq!(check(std::slice::from_ref(&key)).unwrap(), json!({ "keys": [key] }));
            }
            for algorithm in [json!("RS512"), json!("HS256"), json!("none"), json!(1)] {
                assert_refused(&[with(key.clone(), "alg", algorithm)], "its alg is not");
            }
        }
        assert_refused(&[with(rsa(), "alg", json!("ES256"))], "its alg is not");
        assert_refused(&[with(p256(), "alg", json!("RS256"))], "its alg is not");
    }

    #[test]
    fn members_that_no_server_reads_are_left_out() {
        let key = with(with(p256(), "x5c", json!(["MIIB"])), "iat", json!(1));
        assert_eq!(check(&[with(key, "key_ops", json!(["verify"]))]).unwrap(), json!({ "keys": [p256()] }));
    }

    #[test]
    fn private_and_symmetric_keys_are_refused_and_not_quoted() {
        for member in PRIVATE_MEMBERS {
            let error = check(&[with(p256(), member, json!("hush"))]).unwrap_err();
            assert!(error.contains("publish only public keys") && !error.contains("hush"), "{error}");
        }
        assert_refused(&[json!({ "kty": "oct" })], "is neither RSA");
    }

    #[test]
    fn a_set_has_one_to_eight_keys_with_different_ids() {
        let numbered =
            |count: usize| (0..count).map(|id| with(p256(), "kid", json!(id.to_string()))).collect::<Vec<_>>();
        assert!(check(&numbered(8)).is_ok());
        assert_refused(&numbered(9), "1 to 8 keys");
        assert_refused(&[], "1 to 8 keys");
        assert_refused(&[p256(), rsa(), p256()], "key 3: its kid is also");
        assert!(check(&[ed25519(), ed25519()]).is_ok(), "keys without an ID can occur twice");
    }

    #[test]
    fn a_set_has_at_most_16_kib_and_a_list_of_keys() {
        let text = json!({ "keys": [p256()] }).to_string();
        assert!(normalize(&format!("{text}{}", " ".repeat(MAX_BYTES - text.len()))).is_ok());
        assert_eq!(
            normalize(&format!("{text}{}", " ".repeat(MAX_BYTES + 1 - text.len()))).unwrap_err(),
            "is over 16 KiB"
        );
        for text in ["", "{", "[]", "{}", "1", r#"{"keys":{}}"#, r#"{"keys":[1]}"#, &"[".repeat(MAX_BYTES)] {
            assert!(normalize(text).is_err(), "{text:.20}");
        }
    }

    #[test]
    fn keys_with_invalid_parameters_are_refused() {
        let zero = URL_SAFE_NO_PAD.encode([0_u8; 32]);
        assert_refused(&[with(p256(), "x", json!(zero))], "is not a valid public key");
        assert_refused(&[with(p256(), "x", json!("AQ"))], "is not a valid public key");
        assert_refused(&[with(p256(), "y", json!("4Etl6SRW2YiLUrN5vfvVHuhp7x8PxltmWWlbbM4IFyM="))], "not base64url");
        assert_refused(&[with(p256(), "crv", json!("P-384"))], "is neither RSA");
        assert_refused(&[with(ed25519(), "x", json!("AQ"))], "is not a valid public key");
        let exponents: [&[u8]; 6] = [&[], &[0], &[1], &[2], &[0, 3], &[1, 0, 0, 0, 1]];
        for exponent in exponents {
            let key = with(rsa(), "e", json!(URL_SAFE_NO_PAD.encode(exponent)));
            assert_refused(&[key], "is not a valid public key");
        }
        let modulus = |byte: u8, length: usize| vec![byte; length];
        let with_leading_zero = [modulus(0, 1), modulus(0xff, 256)].concat();
        for modulus in [modulus(0xff, 255), modulus(0xff, 1025), with_leading_zero, modulus(0xfe, 256)] {
            let key = with(rsa(), "n", json!(URL_SAFE_NO_PAD.encode(modulus)));
            assert_refused(&[key], "is not a valid public key");
        }
    }

    #[test]
    fn keys_for_other_purposes_are_refused() {
        assert_refused(&[with(rsa(), "use", json!("enc"))], "its use is not sig");
        assert_refused(&[with(rsa(), "key_ops", json!(["sign"]))], "key_ops");
        assert_refused(&[with(rsa(), "kid", json!(1))], "its kid");
        assert_refused(&[with(rsa(), "kid", json!("a".repeat(257)))], "its kid");
    }
}
