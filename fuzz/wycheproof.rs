//! The test vectors of Wycheproof, for the code that verifies ID tokens of providers and ServiceAccount tokens of the
//! cluster.

#![expect(clippy::unwrap_used, reason = "an unwrap that fails is a finding, or a bug in the test")]

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use latchkey_server::{callers, providers};
use serde_json::{Value, json};
use wycheproof::{TestResult, ecdsa, eddsa, rsa_pkcs1_verify as pkcs1, rsa_pss_verify as pss};

/// A test vector.
struct Vector<'a> {
    /// The name of the set and the number of the vector, for error messages.
    name: String,
    /// The algorithm name in the header of a token.
    algorithm: &'static str,
    jwk: Value,
    message: &'a [u8],
    signature: &'a [u8],
    /// Whether the verifier must accept the vector.
    is_good: bool,
}

/// How many vectors of a set were correctly accepted (`good`), and how many were correctly rejected (`bad`).
#[derive(Debug, Default, PartialEq, Eq)]
struct Count {
    good: usize,
    bad: usize,
}

/// What a set of vectors tests.
#[derive(Clone, Copy, PartialEq, Eq)]
enum VectorKind {
    /// A scheme of JWS: the verifier must accept the valid vectors, and must reject the others.
    Jws,
    /// A scheme that JWS does not use: with another hash, encoding or salt length. The verifier must reject the valid
    /// vectors. The test does not use the invalid vectors, because some of them are valid in JWS.
    Foreign,
}

fn base64url(bytes: &[u8]) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

/// An integer in base64url, without leading zeros, as a JWK needs it (RFC 7518, section 6.3.1.1).
fn base64url_integer(bytes: &[u8]) -> String {
    let zeros = bytes.iter().take_while(|byte| **byte == 0).count();
    base64url(&bytes[zeros..])
}

impl Count {
    fn check(&mut self, vector: &Vector<'_>) {
        let Vector { name, algorithm, jwk, message, signature, is_good } = vector;
        let body = json!({ "keys": [jwk] }).to_string();
        let by_provider = providers::fuzzing::KeySet::parse(body.as_bytes())
            .is_some_and(|keys| keys.verifies(algorithm, message, signature));
        assert_eq!(by_provider, *is_good, "{name}, with a provider key");
        // The cluster never signs with PSS, so servers accept no PSS key of the cluster.
        let by_cluster = callers::KeySet::parse(body.as_bytes(), None)
            .is_ok_and(|keys| callers::fuzzing::verifies(&keys, "k", message, &base64url(signature)));
        assert_eq!(by_cluster, *is_good && !algorithm.starts_with("PS"), "{name}, with a cluster key");
        if *is_good { self.good += 1 } else { self.bad += 1 }
    }
}

/// Whether the verifier must accept a vector; `None` if the vector is not used.
fn is_good(kind: VectorKind, result: TestResult) -> Option<bool> {
    match (kind, result) {
        (VectorKind::Jws, TestResult::Valid) => Some(true),
        // All vectors of these sets with the result `Acceptable` have the flag `MissingNull`: the signature lacks the
        // NULL parameter of the hash algorithm. RFC 8017, section 9.2 requires the NULL, but section A.2.4 allows a
        // verifier to accept a signature without it. All signers of tokens include the NULL, so the verifier must
        // reject a signature without it.
        (VectorKind::Jws, TestResult::Invalid | TestResult::Acceptable) | (VectorKind::Foreign, TestResult::Valid) => {
            Some(false)
        }
        (VectorKind::Foreign, TestResult::Invalid | TestResult::Acceptable) => None,
    }
}

fn check_ecdsa(test: ecdsa::TestName, algorithm: &'static str, curve: &str, length: usize, kind: VectorKind) -> Count {
    let mut count = Count::default();
    let vectors = ecdsa::TestSet::load(test).unwrap();
    for group in &vectors.test_groups {
        let point = &group.key.key;
        let (x, y) = point[1..].split_at(length);
        let (x, y) = (base64url(x), base64url(y));
        let jwk = json!({ "kty": "EC", "crv": curve, "x": x, "y": y, "kid": "k", "alg": algorithm, "use": "sig" });
        for test in &group.tests {
            let (name, jwk) = (format!("{:?} {}", vectors.algorithm, test.tc_id), jwk.clone());
            let Some(is_good) = is_good(kind, test.result) else { continue };
            count.check(&Vector { name, algorithm, jwk, message: &test.msg, signature: &test.sig, is_good });
        }
    }
    count
}

fn check_pkcs1(test: pkcs1::TestName, algorithm: &'static str, kind: VectorKind) -> Count {
    let mut count = Count::default();
    for group in &pkcs1::TestSet::load(test).unwrap().test_groups {
        let jwk = rsa_jwk(&group.key.n, &group.key.e, algorithm);
        for test in &group.tests {
            assert!(test.result != TestResult::Acceptable || test.flags == [pkcs1::TestFlag::MissingNull]);
            let (name, jwk) = (format!("{algorithm} {}", test.tc_id), jwk.clone());
            let Some(is_good) = is_good(kind, test.result) else { continue };
            count.check(&Vector { name, algorithm, jwk, message: &test.msg, signature: &test.sig, is_good });
        }
    }
    count
}

fn check_pss(test: pss::TestName, algorithm: &'static str, kind: VectorKind) -> Count {
    let mut count = Count::default();
    for group in &pss::TestSet::load(test).unwrap().test_groups {
        let jwk = rsa_jwk(&group.key.n, &group.key.e, algorithm);
        for test in &group.tests {
            assert!(test.result != TestResult::Acceptable);
            let (name, jwk) = (format!("{algorithm} {}", test.tc_id), jwk.clone());
            let Some(is_good) = is_good(kind, test.result) else { continue };
            count.check(&Vector { name, algorithm, jwk, message: &test.msg, signature: &test.sig, is_good });
        }
    }
    count
}

fn rsa_jwk(n: &[u8], e: &[u8], algorithm: &str) -> Value {
    let (n, e) = (base64url_integer(n), base64url_integer(e));
    json!({ "kty": "RSA", "n": n, "e": e, "kid": "k", "alg": algorithm, "use": "sig" })
}

#[test]
fn ecdsa_is_verified_in_the_format_of_jws() {
    use ecdsa::TestName::{
        EcdsaSecp256k1Sha256P1363, EcdsaSecp256r1Sha256, EcdsaSecp256r1Sha256P1363, EcdsaSecp256r1Sha512P1363,
        EcdsaSecp384r1Sha384, EcdsaSecp384r1Sha384P1363, EcdsaSecp384r1Sha512P1363,
    };
    let es256 = check_ecdsa(EcdsaSecp256r1Sha256P1363, "ES256", "P-256", 32, VectorKind::Jws);
    assert_eq!(es256, Count { good: 173, bad: 89 });
    let es384 = check_ecdsa(EcdsaSecp384r1Sha384P1363, "ES384", "P-384", 48, VectorKind::Jws);
    assert_eq!(es384, Count { good: 193, bad: 87 });
    // These vectors have another curve, another hash, or signatures in ASN.1. RFC 7518, section 3.4 requires R followed
    // by S, without ASN.1.
    for (test, algorithm, curve, length) in [
        (EcdsaSecp256k1Sha256P1363, "ES256", "P-256", 32),
        (EcdsaSecp256r1Sha512P1363, "ES256", "P-256", 32),
        (EcdsaSecp256r1Sha256, "ES256", "P-256", 32),
        (EcdsaSecp384r1Sha512P1363, "ES384", "P-384", 48),
        (EcdsaSecp384r1Sha384, "ES384", "P-384", 48),
    ] {
        let count = check_ecdsa(test, algorithm, curve, length, VectorKind::Foreign);
        assert!(count.good == 0 && count.bad > 100, "{count:?}");
    }
}

#[test]
fn ed25519_is_verified() {
    let mut count = Count::default();
    for group in &eddsa::TestSet::load(eddsa::TestName::Ed25519).unwrap().test_groups {
        let jwk = json!({ "kty": "OKP", "crv": "Ed25519", "x": base64url(&group.key.pk), "kid": "k", "alg": "EdDSA" });
        for test in &group.tests {
            let (name, jwk) = (format!("Ed25519 {}", test.tc_id), jwk.clone());
            let Some(is_good) = is_good(VectorKind::Jws, test.result) else { continue };
            count.check(&Vector { name, algorithm: "EdDSA", jwk, message: &test.msg, signature: &test.sig, is_good });
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
        let count = check_pkcs1(test, algorithm, VectorKind::Jws);
        assert!(count.good >= 5 && count.bad >= 200, "{algorithm}: {count:?}");
    }
    let count = check_pkcs1(Rsa2048Sha512_256, "RS512", VectorKind::Foreign);
    assert!(count.good == 0 && count.bad >= 5, "{count:?}");
}

#[test]
fn rsa_pss_is_verified_only_with_the_salt_length_and_hash_of_jws() {
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
        let count = check_pss(test, algorithm, VectorKind::Jws);
        assert!(count.good >= 50 && count.bad >= 40, "{algorithm}: {count:?}");
    }
    // These vectors violate RFC 7518, section 3.5: the salt must be as long as the hash, and MGF1 must use the same
    // hash.
    for (test, algorithm) in [
        (RsaPss2048Sha256Mgf1SaltLen0, "PS256"),
        (RsaPss2048Sha256Mgf1Sha1_20, "PS256"),
        (RsaPss4096Sha512Mgf1SaltLen32, "PS512"),
    ] {
        let count = check_pss(test, algorithm, VectorKind::Foreign);
        assert!(count.good == 0 && count.bad >= 50, "{algorithm}: {count:?}");
    }
}
