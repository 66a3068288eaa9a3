//! Checks of foreign hashes, except Argon2 hashes.

use std::num::NonZeroU32;

use aws_lc_rs::{
    cipher::{AES_256, EncryptingKey, EncryptionContext, UnboundCipherKey},
    constant_time::verify_slices_are_equal,
    iv::FixedLength,
    pbkdf2,
};
use scrypt::Params as ScryptParams;
use zeroize::Zeroizing;

use crate::domain::foreign_hash::{
    BcryptClass, FirebaseScrypt, HashClass, ParsedHash, Pbkdf2Class, Pbkdf2Digest, ScryptClass,
};

/// bcrypt uses at most this many bytes of a password, including the zero byte at its end.
const MAX_BCRYPT_BYTES: usize = 72;

/// Whether the password matches the hash. Compares in constant time. Without the values of the Firebase project
/// (`firebase`), the check of a Firebase hash does the same work but returns false.
///
/// # Panics
///
/// If the hash is an Argon2 hash. The engine checks such hashes with the memory of its thread.
pub(super) fn verify(password: &str, hash: &ParsedHash, firebase: Option<&FirebaseScrypt>) -> bool {
    let password = password.as_bytes();
    let (salt, expected) = (hash.salt(), hash.output());
    let mut output = Zeroizing::new(vec![0; expected.len()]);
    match hash.class() {
        HashClass::Argon2(_) => panic!("the engine checks this hash"),
        HashClass::Bcrypt(class) => compute_bcrypt(class, password, salt, &mut output),
        HashClass::Pbkdf2(class) => compute_pbkdf2(class, password, salt, &mut output),
        HashClass::Scrypt(class) => compute_scrypt(class, password, salt, &mut output),
        HashClass::FirebaseScrypt(class) => {
            let computed = compute_firebase(class, password, salt, firebase);
            return computed.is_some_and(|computed| verify_slices_are_equal(&computed, expected).is_ok());
        }
    }
    verify_slices_are_equal(&output, expected).is_ok()
}

fn compute_bcrypt(class: BcryptClass, password: &[u8], salt: &[u8], output: &mut [u8]) {
    let mut key = Zeroizing::new(Vec::with_capacity(MAX_BCRYPT_BYTES));
    key.extend_from_slice(&password[..password.len().min(MAX_BCRYPT_BYTES)]);
    if key.len() < MAX_BCRYPT_BYTES {
        key.push(0);
    }
    let salt = salt.try_into().expect("the parser has checked the length");
    let computed = Zeroizing::new(bcrypt::bcrypt(class.cost(), salt, &key));
    // The last computed byte is not part of a bcrypt hash.
    output.copy_from_slice(&computed[..output.len()]);
}

fn compute_pbkdf2(class: Pbkdf2Class, password: &[u8], salt: &[u8], output: &mut [u8]) {
    let algorithm = match class.digest() {
        Pbkdf2Digest::Sha1 => pbkdf2::PBKDF2_HMAC_SHA1,
        Pbkdf2Digest::Sha256 => pbkdf2::PBKDF2_HMAC_SHA256,
        Pbkdf2Digest::Sha512 => pbkdf2::PBKDF2_HMAC_SHA512,
    };
    let iterations = NonZeroU32::new(class.iterations()).expect("the parser has checked the number");
    pbkdf2::derive(algorithm, iterations, salt, password, output);
}

fn compute_scrypt(class: ScryptClass, password: &[u8], salt: &[u8], output: &mut [u8]) {
    let params = ScryptParams::new(class.log_n(), class.r(), class.p()).expect("the class has valid parameters");
    scrypt::scrypt(password, salt, &params, output).expect("the output has a valid length");
}

/// Encrypts the signer key with AES-256-CTR (<https://github.com/firebase/scrypt>). The AES key is the output of
/// scrypt, and the first counter is zero. Returns `None` without the values of the Firebase project.
fn compute_firebase(
    class: ScryptClass,
    password: &[u8],
    salt: &[u8],
    firebase: Option<&FirebaseScrypt>,
) -> Option<Zeroizing<Vec<u8>>> {
    let separator = firebase.map_or(&[][..], FirebaseScrypt::salt_separator);
    let salt = Zeroizing::new([salt, separator].concat());
    let mut key = Zeroizing::new([0; 32]);
    compute_scrypt(class, password, &salt, &mut key[..]);
    let mut text = Zeroizing::new(firebase?.signer_key().to_vec());
    let key = UnboundCipherKey::new(&AES_256, &key[..]).and_then(EncryptingKey::ctr).expect("the key has 32 bytes");
    key.less_safe_encrypt(&mut text, EncryptionContext::Iv128(FixedLength::from([0; 16])))
        .expect("a counter of 16 bytes");
    Some(text)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use argon2_simd::Kernel;
    use serde::Deserialize;

    use super::*;
    use crate::{
        domain::{
            foreign_hash::Argon2Class,
            password::{Password, PasswordHash},
        },
        hashing::engine::Argon2Engine,
    };

    /// A hash that another implementation computed (tests/foreign-hashes).
    #[derive(Deserialize)]
    struct Vector {
        source: String,
        password: String,
        hash: String,
        class: String,
        firebase: Option<FirebaseValues>,
    }

    #[derive(Deserialize)]
    struct FirebaseValues {
        signer_key: String,
        salt_separator: String,
    }

    fn vectors() -> Vec<Vector> {
        serde_json::from_str(include_str!("../../../tests/foreign-hashes/vectors.json")).unwrap()
    }

    impl Vector {
        fn firebase(&self) -> Option<FirebaseScrypt> {
            let values = self.firebase.as_ref()?;
            Some(FirebaseScrypt::parse(&values.signer_key, &values.salt_separator).unwrap())
        }

        fn verify(&self, engine: &mut Argon2Engine, password: &str) -> bool {
            engine.verify(&Password::new(password), &PasswordHash::new(self.hash.as_str()), self.firebase().as_ref())
        }
    }

    fn engine() -> Argon2Engine {
        Argon2Engine::new(Kernel::fastest(), Argon2Class::DEFAULT_NATIVE)
    }

    #[test]
    fn hashes_of_other_implementations_match_only_their_password() {
        let mut engine = engine();
        let mut count = BTreeMap::<_, usize>::new();
        for vector in vectors() {
            let hash = ParsedHash::parse(&vector.hash).unwrap();
            assert_eq!(hash.class().to_string(), vector.class, "{}", vector.source);
            assert!(vector.verify(&mut engine, &vector.password), "{} {}", vector.source, vector.hash);
            let changed = format!("{}x", vector.password);
            // bcrypt uses only the first 72 bytes of a password.
            let is_cut = matches!(hash.class(), HashClass::Bcrypt(_)) && vector.password.len() >= MAX_BCRYPT_BYTES;
            assert_eq!(vector.verify(&mut engine, &changed), is_cut, "{} {}", vector.source, vector.hash);
            *count.entry(hash.class().algorithm()).or_default() += 1;
        }
        for algorithm in [
            "argon2id",
            "argon2i",
            "argon2d",
            "bcrypt",
            "pbkdf2-sha1",
            "pbkdf2-sha256",
            "pbkdf2-sha512",
            "scrypt",
            "firebase-scrypt",
        ] {
            assert!(count.get(algorithm).is_some_and(|count| *count >= 5), "{algorithm}: {count:?}");
        }
    }

    #[test]
    fn the_password_is_checked_as_it_was_sent() {
        let mut engine = engine();
        let decomposed: Vec<_> = vectors().into_iter().filter(|vector| vector.password.contains('\u{301}')).collect();
        assert!(decomposed.len() >= 10);
        for vector in decomposed {
            let composed = Password::new(&vector.password).expose().to_owned();
            assert_ne!(composed, vector.password);
            assert!(!vector.verify(&mut engine, &composed), "{}", vector.hash);
        }
    }

    #[test]
    fn passwords_match_their_published_hashes() {
        let mut engine = engine();
        let mut matches = |password: &str, hash: &str| {
            assert!(ParsedHash::parse(hash).is_ok(), "{hash}");
            engine.verify(&Password::new(password), &PasswordHash::new(hash), None)
        };
        for (password, hash) in [
            // jBCrypt, TestBCrypt.java.
            ("", "$2a$06$DCq7YPn5Rq63x1Lad4cll.TV4S6ytwfsfvkgY8jIucDrjc8deX1s."),
            ("abc", "$2a$06$If6bvum7DFjUnE9p2uDeDu0YHzrHM6tf.iqN8.yx.jNN1ILEf7h0i"),
            ("~!@#$%^&*()      ~!@#$%^&*()PNBFRD", "$2a$06$fPIsBO8qRqkjj273rfaOI.HtSV9jLDpTbZn782DC6/t7qT67P6FfO"),
            // RFC 6070, cases 1 and 2.
            ("password", "$pbkdf2-sha1$i=1,l=20$c2FsdA$DGDID5YfDnHzqbUkr2ASBi/gN6Y"),
            ("password", "$pbkdf2-sha1$i=2,l=20$c2FsdA$6mwBTcctb4zNHtkqzh1B8NjeiVc"),
            // RFC 7914, section 11, first case: PBKDF2 with the password "passwd" and the salt "salt".
            (
                "passwd",
                "$pbkdf2-sha256$i=1,l=64$c2FsdA$VawEblbjCJ/sFpHCJUS2BflBhSFt3gRl5oudV8INrLxJypzM8Xm2RZkWZLOdd+8xfHG4RbHjC9UJESBB06GXgw",
            ),
            // RFC 7914, section 12, third case.
            (
                "pleaseletmein",
                "$scrypt$ln=14,r=8,p=1$U29kaXVtQ2hsb3JpZGU$cCO9yzr9c0hGHAbNgf046/2o+7qQT44+qbVD9lRdofLVQylVYT8Pz2LUlwUkKpr55h6F3A1lHkDfzwF7RVdYhw",
            ),
        ] {
            assert!(matches(password, hash), "{hash}");
            assert!(!matches("other", hash), "{hash}");
        }
    }

    #[test]
    fn a_firebase_hash_matches_no_password_if_the_values_of_the_project_are_missing() {
        let mut engine = engine();
        let vector = vectors().into_iter().find(|vector| vector.firebase.is_some()).unwrap();
        let hash = PasswordHash::new(vector.hash.as_str());
        assert!(engine.verify(&Password::new(&vector.password), &hash, vector.firebase().as_ref()));
        assert!(!engine.verify(&Password::new(&vector.password), &hash, None));
    }

    #[test]
    fn a_dummy_hash_of_each_class_can_be_checked() {
        let mut engine = engine();
        for vector in vectors() {
            let class: HashClass = vector.class.parse().unwrap();
            let dummy = class.hash(&[1; 16], &[2; 32]);
            assert_eq!(ParsedHash::parse(&dummy.to_text()).as_ref(), Ok(&dummy), "{class}");
            assert!(!engine.verify_parsed(&Password::new(&vector.password), &dummy, None), "{class}");
        }
    }
}
