//! The test vectors of Wycheproof, by the keys and the verifiers that judge tokens: of providers and of the cluster. The
//! service's own tokens are verified by a key of the same construction.

#![expect(clippy::unwrap_used, reason = "what fails to unwrap is a finding, or a fault of the target")]

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use latchkey_server::{callers, providers};
use serde_json::{Value, json};
use wycheproof::{TestResult, ecdsa, eddsa, rsa_pkcs1_verify as pkcs1, rsa_pss_verify as pss};

/// One vector.
struct Vector<'a> {
    /// For a failure: the set and the number in it.
    name: String,
    /// As a token's header names it.
    algorithm: &'static str,
    jwk: Value,
    message: &'a [u8],
    signature: &'a [u8],
    /// Whether it must be accepted.
    is_good: bool,
}

/// How many vectors of a set were accepted and refused, as all of them should have been.
#[derive(Debug, Default, PartialEq, Eq)]
struct Count {
    good: usize,
    bad: usize,
}

/// What a set is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Set {
    OfJws,
    /// A scheme that is none of JWS: another hash, encoding or length of salt. Its valid vectors must be refused. Among the
    /// invalid ones are some that are right by the scheme of JWS, so they say nothing.
    Foreign,
}

fn text(bytes: &[u8]) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

/// The bytes of a whole number: a JWK has no leading zeros (RFC 7518, 6.3.1.1).
fn number(bytes: &[u8]) -> String {
    let zeros = bytes.iter().take_while(|byte| **byte == 0).count();
    text(&bytes[zeros..])
}

impl Count {
    fn judge(&mut self, vector: &Vector<'_>) {
        let Vector { name, algorithm, jwk, message, signature, is_good } = vector;
        let body = json!({ "keys": [jwk] }).to_string();
        let by_provider = providers::fuzzing::KeySet::parse(body.as_bytes())
            .is_some_and(|keys| keys.verifies(algorithm, message, signature));
        assert_eq!(by_provider, *is_good, "{name}, as a provider's");
        // The cluster never signs by PSS, and servers take no key that is for it.
        let by_cluster = callers::KeySet::parse(body.as_bytes(), None)
            .is_ok_and(|keys| callers::fuzzing::verifies(&keys, "k", message, &text(signature)));
        assert_eq!(by_cluster, *is_good && !algorithm.starts_with("PS"), "{name}, as the cluster's");
        if *is_good { self.good += 1 } else { self.bad += 1 }
    }
}

/// Whether a vector must be accepted; none if it says nothing.
fn is_good(set: Set, result: TestResult) -> Option<bool> {
    match (set, result) {
        (Set::OfJws, TestResult::Valid) => Some(true),
        // Acceptable of these sets is only `MissingNull`: RFC 8017, 9.2 wants the NULL, and A.2.4 lets a verifier take a
        // signature without it. Nobody signs tokens in that way; they are refused.
        (Set::OfJws, TestResult::Invalid | TestResult::Acceptable) | (Set::Foreign, TestResult::Valid) => Some(false),
        (Set::Foreign, TestResult::Invalid | TestResult::Acceptable) => None,
    }
}

fn ecdsa(test: ecdsa::TestName, algorithm: &'static str, curve: &str, length: usize, set: Set) -> Count {
    let mut count = Count::default();
    let vectors = ecdsa::TestSet::load(test).unwrap();
    for group in &vectors.test_groups {
        let point = &group.key.key;
        let (x, y) = point[1..].split_at(length);
        let jwk = json!({ "kty": "EC", "crv": curve, "x": text(x), "y": text(y), "kid": "k", "alg": algorithm, "use": "sig" });
        for test in &group.tests {
            let (name, jwk) = (format!("{:?} {}", vectors.algorithm, test.tc_id), jwk.clone());
            let Some(is_good) = is_good(set, test.result) else { continue };
            count.judge(&Vector { name, algorithm, jwk, message: &test.msg, signature: &test.sig, is_good });
        }
    }
    count
}

fn pkcs1(test: pkcs1::TestName, algorithm: &'static str, set: Set) -> Count {
    let mut count = Count::default();
    for group in &pkcs1::TestSet::load(test).unwrap().test_groups {
        let jwk = rsa(&group.key.n, &group.key.e, algorithm);
        for test in &group.tests {
            assert!(test.result != TestResult::Acceptable || test.flags == [pkcs1::TestFlag::MissingNull]);
            let (name, jwk) = (format!("{algorithm} {}", test.tc_id), jwk.clone());
            let Some(is_good) = is_good(set, test.result) else { continue };
            count.judge(&Vector { name, algorithm, jwk, message: &test.msg, signature: &test.sig, is_good });
        }
    }
    count
}

fn pss(test: pss::TestName, algorithm: &'static str, set: Set) -> Count {
    let mut count = Count::default();
    for group in &pss::TestSet::load(test).unwrap().test_groups {
        let jwk = rsa(&group.key.n, &group.key.e, algorithm);
        for test in &group.tests {
            assert!(test.result != TestResult::Acceptable);
            let (name, jwk) = (format!("{algorithm} {}", test.tc_id), jwk.clone());
            let Some(is_good) = is_good(set, test.result) else { continue };
            count.judge(&Vector { name, algorithm, jwk, message: &test.msg, signature: &test.sig, is_good });
        }
    }
    count
}

fn rsa(n: &[u8], e: &[u8], algorithm: &str) -> Value {
    json!({ "kty": "RSA", "n": number(n), "e": number(e), "kid": "k", "alg": algorithm, "use": "sig" })
}

#[test]
fn ecdsa_is_verified_as_jws_has_it() {
    use ecdsa::TestName::{
        EcdsaSecp256k1Sha256P1363, EcdsaSecp256r1Sha256, EcdsaSecp256r1Sha256P1363, EcdsaSecp256r1Sha512P1363,
        EcdsaSecp384r1Sha384, EcdsaSecp384r1Sha384P1363, EcdsaSecp384r1Sha512P1363,
    };
    let es256 = ecdsa(EcdsaSecp256r1Sha256P1363, "ES256", "P-256", 32, Set::OfJws);
    assert_eq!(es256, Count { good: 173, bad: 89 });
    let es384 = ecdsa(EcdsaSecp384r1Sha384P1363, "ES384", "P-384", 48, Set::OfJws);
    assert_eq!(es384, Count { good: 193, bad: 87 });
    // Another curve or hash, and signatures in ASN.1 (RFC 7518, 3.4 has R and S side by side).
    for (test, algorithm, curve, length) in [
        (EcdsaSecp256k1Sha256P1363, "ES256", "P-256", 32),
        (EcdsaSecp256r1Sha512P1363, "ES256", "P-256", 32),
        (EcdsaSecp256r1Sha256, "ES256", "P-256", 32),
        (EcdsaSecp384r1Sha512P1363, "ES384", "P-384", 48),
        (EcdsaSecp384r1Sha384, "ES384", "P-384", 48),
    ] {
        let count = ecdsa(test, algorithm, curve, length, Set::Foreign);
        assert!(count.good == 0 && count.bad > 100, "{count:?}");
    }
}

#[test]
fn ed25519_is_verified() {
    let mut count = Count::default();
    for group in &eddsa::TestSet::load(eddsa::TestName::Ed25519).unwrap().test_groups {
        let jwk = json!({ "kty": "OKP", "crv": "Ed25519", "x": text(&group.key.pk), "kid": "k", "alg": "EdDSA" });
        for test in &group.tests {
            let (name, jwk) = (format!("Ed25519 {}", test.tc_id), jwk.clone());
            let Some(is_good) = is_good(Set::OfJws, test.result) else { continue };
            count.judge(&Vector { name, algorithm: "EdDSA", jwk, message: &test.msg, signature: &test.sig, is_good });
        }
    }
    assert_eq!(count, Count { good: 88, bad: 63 });
}

#[test]
fn rsa_with_pkcs1_padding_is_verified() {
    use pkcs1::TestName::{
        Rsa2048Sha256, Rsa2048Sha384, Rsa2048Sha512, Rsa2048Sha512_256, Rsa3072Sha256, Rsa3072Sha384, Rsa3072Sha512,
        Rsa4096Sha256, Rsa4096Sha384, Rsa4096Sha512, Rsa8192Sha256, Rsa8192Sha384, Rsa8192Sha512,
    };
    for (test, algorithm) in [
        (Rsa2048Sha256, "RS256"),
        (Rsa3072Sha256, "RS256"),
        (Rsa4096Sha256, "RS256"),
        (Rsa8192Sha256, "RS256"),
        (Rsa2048Sha384, "RS384"),
        (Rsa3072Sha384, "RS384"),
        (Rsa4096Sha384, "RS384"),
        (Rsa8192Sha384, "RS384"),
        (Rsa2048Sha512, "RS512"),
        (Rsa3072Sha512, "RS512"),
        (Rsa4096Sha512, "RS512"),
        (Rsa8192Sha512, "RS512"),
    ] {
        let count = pkcs1(test, algorithm, Set::OfJws);
        assert!(count.good >= 5 && count.bad >= 200, "{algorithm}: {count:?}");
    }
    let count = pkcs1(Rsa2048Sha512_256, "RS512", Set::Foreign);
    assert!(count.good == 0 && count.bad >= 5, "{count:?}");
}

#[test]
fn rsa_pss_is_verified_with_the_salt_of_jws_alone() {
    use pss::TestName::{
        RsaPss2048Sha256Mgf1SaltLen0, RsaPss2048Sha256Mgf1SaltLen32, RsaPss2048Sha256Mgf1Sha1_20,
        RsaPss2048Sha384Mgf1SaltLen48, RsaPss3072Sha256Mgf1SaltLen32, RsaPss4096Sha256Mgf1SaltLen32,
        RsaPss4096Sha384Mgf1SaltLen48, RsaPss4096Sha512Mgf1SaltLen32, RsaPss4096Sha512Mgf1SaltLen64,
    };
    for (test, algorithm) in [
        (RsaPss2048Sha256Mgf1SaltLen32, "PS256"),
        (RsaPss3072Sha256Mgf1SaltLen32, "PS256"),
        (RsaPss4096Sha256Mgf1SaltLen32, "PS256"),
        (RsaPss2048Sha384Mgf1SaltLen48, "PS384"),
        (RsaPss4096Sha384Mgf1SaltLen48, "PS384"),
        (RsaPss4096Sha512Mgf1SaltLen64, "PS512"),
    ] {
        let count = pss(test, algorithm, Set::OfJws);
        assert!(count.good >= 50 && count.bad >= 40, "{algorithm}: {count:?}");
    }
    // RFC 7518, 3.5: the salt is as long as the hash, and MGF1 uses the same hash.
    for (test, algorithm) in [
        (RsaPss2048Sha256Mgf1SaltLen0, "PS256"),
        (RsaPss2048Sha256Mgf1Sha1_20, "PS256"),
        (RsaPss4096Sha512Mgf1SaltLen32, "PS512"),
    ] {
        let count = pss(test, algorithm, Set::Foreign);
        assert!(count.good == 0 && count.bad >= 50, "{algorithm}: {count:?}");
    }
}
