//! Argon2 with memory that is reused.

use std::time::Instant;

use argon2_simd::{Algorithm, Error, Function, Hasher, Kernel, Params, Version};
use aws_lc_rs::constant_time::verify_slices_are_equal;

use super::foreign;
use crate::domain::{
    foreign_hash::{Argon2Class, Argon2Variant, Argon2Version, FirebaseScrypt, HashClass, ParsedHash},
    password::{Password, PasswordHash},
};

/// Computes password hashes for one thread. Keeps as much memory as a new hash needs. Checks that need more memory run
/// one at a time and release it afterwards.
pub(super) struct Argon2Engine {
    hasher: Hasher,
    /// The parameters of new hashes.
    native: Argon2Class,
    /// When the engine computed the last hash. `None` if it keeps no memory.
    last_hash: Option<Instant>,
}

// === impl Argon2Engine ===

impl Argon2Engine {
    pub(super) fn new(kernel: Kernel, native: Argon2Class) -> Self {
        Self { hasher: Hasher::with_kernel(kernel), native, last_hash: None }
    }

    /// The memory that the engine keeps, in bytes. The memory contains values that depend on the last password.
    pub(super) fn memory_bytes(&self) -> i64 {
        i64::try_from(self.hasher.memory_bytes()).unwrap_or(i64::MAX)
    }

    /// When the engine computed the last hash. `None` if it keeps no memory.
    pub(super) fn last_hash(&self) -> Option<Instant> {
        self.last_hash
    }

    /// Returns its memory to the system. The next hash allocates it again.
    pub(super) fn release_memory(&mut self) {
        self.hasher.release();
        self.last_hash = None;
    }

    /// Computes a hash of the password with the parameters of new hashes.
    pub(super) fn hash(&mut self, password: &Password, salt: &[u8; 16]) -> PasswordHash {
        let mut output = [0; Params::DEFAULT_OUTPUT_LEN];
        self.argon2(self.native, password.expose(), salt, &mut output);
        PasswordHash::new(HashClass::Argon2(self.native).hash(salt, &output).to_text().as_str())
    }

    /// Whether the password matches the hash. A hash that is malformed, or costs more than the ceilings of foreign
    /// hashes allow, matches no password.
    pub(super) fn verify(
        &mut self,
        password: &Password,
        hash: &PasswordHash,
        firebase: Option<&FirebaseScrypt>,
    ) -> bool {
        hash.parse().is_some_and(|hash| self.verify_parsed(password, &hash, firebase))
    }

    /// Like `verify`, for a parsed hash. The work depends on the class of the hash and on the password, not on the
    /// outcome.
    pub(super) fn verify_parsed(
        &mut self,
        password: &Password,
        hash: &ParsedHash,
        firebase: Option<&FirebaseScrypt>,
    ) -> bool {
        let HashClass::Argon2(class) = hash.class() else {
            return foreign::verify(password.expose_as_sent(), hash, firebase);
        };
        // Latchkey hashes a password in NFC; other services hash it as the client sends it. If a hash does not have the
        // current parameters, but other parameters that Latchkey can use, it may come from Latchkey or from another
        // service, so both forms are tried.
        let texts = [password.expose(), password.expose_as_sent()];
        let texts = if class == self.native || texts[0] == texts[1] {
            &texts[..1]
        } else if class.can_be_native() {
            &texts[..]
        } else {
            &texts[1..]
        };
        let mut is_match = false;
        for text in texts {
            let mut output = zeroize::Zeroizing::new(vec![0; hash.output().len()]);
            self.argon2(class, text, hash.salt(), &mut output);
            is_match |= verify_slices_are_equal(&output, hash.output()).is_ok();
        }
        is_match
    }

    fn argon2(&mut self, class: Argon2Class, password: &str, salt: &[u8], output: &mut [u8]) {
        let params = Params::new(class.memory_kib(), class.passes(), class.lanes(), Some(output.len()))
            .expect("the class has valid parameters");
        let function = Function {
            algorithm: match class.variant() {
                Argon2Variant::Argon2d => Algorithm::Argon2d,
                Argon2Variant::Argon2i => Algorithm::Argon2i,
                Argon2Variant::Argon2id => Algorithm::Argon2id,
            },
            version: match class.version() {
                Argon2Version::V16 => Version::V0x10,
                Argon2Version::V19 => Version::V0x13,
            },
            params: &params,
            secret: b"",
        };
        // A check that needs more memory uses a separate hasher, so that the memory for new hashes stays as it is.
        let is_large = class.memory_kib() > self.native.memory_kib();
        let hashed = if is_large {
            Hasher::with_kernel(self.hasher.kernel()).hash(&function, password.as_bytes(), salt, output)
        } else {
            self.hasher.hash(&function, password.as_bytes(), salt, output)
        };
        // The response must not be the same as for a wrong password, so this panics: the pool turns a panic into a 503.
        hashed.unwrap_or_else(|error| match error {
            Error::OutOfMemory => panic!("the system has no memory for a hash"),
            _ => panic!("the parser has checked the lengths"),
        });
        if !is_large {
            self.last_hash = Some(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn engine() -> Argon2Engine {
        engine_with(Argon2Class::DEFAULT_NATIVE)
    }

    fn engine_with(native: Argon2Class) -> Argon2Engine {
        Argon2Engine::new(Kernel::fastest(), native)
    }

    fn verify(engine: &mut Argon2Engine, password: &str, hash: &PasswordHash) -> bool {
        engine.verify(&Password::new(password), hash, None)
    }

    #[test]
    fn a_hash_matches_only_its_password() {
        let mut engine = engine();
        let hash = engine.hash(&Password::new("correct horse"), &[7; 16]);
        assert!(hash.expose().starts_with("$argon2id$v=19$m=19456,t=2,p=1$"));
        assert!(verify(&mut engine, "correct horse", &hash));
        assert!(!verify(&mut engine, "Correct horse", &hash));
        assert!(!verify(&mut engine, "", &hash));
    }

    #[test]
    fn a_hash_with_other_parameters_is_not_native() {
        let hash = engine().hash(&Password::new("x"), &[7; 16]);
        let native = HashClass::DEFAULT_NATIVE;
        assert!(hash.is_native(native));
        for (from, to) in [("t=2", "t=1"), ("m=19456", "m=8192"), ("argon2id", "argon2i"), ("v=19", "v=16")] {
            assert!(!PasswordHash::new(hash.expose().replace(from, to)).is_native(native), "{to}");
        }
    }

    #[test]
    fn the_verifier_of_the_argon2_crate_accepts_a_hash() {
        use argon2::{Argon2, PasswordVerifier, password_hash::phc};
        let hash = engine().hash(&Password::new("correct horse"), &[9; 16]);
        let phc = phc::PasswordHash::new(hash.expose()).unwrap();
        assert!(Argon2::default().verify_password(b"correct horse", &phc).is_ok());
    }

    #[test]
    fn an_expensive_or_malformed_hash_matches_no_password() {
        let mut engine = engine();
        let hash = engine.hash(&Password::new("x"), &[7; 16]);
        let expensive = [("m=19456", "m=9999999"), ("t=2", "t=17")].map(|(from, to)| hash.expose().replace(from, to));
        assert_eq!(engine.memory_bytes(), 19 << 20);
        for bad in ["", "x", "$2b$10$abcdefghijklmnopqrstuv", &expensive[0], &expensive[1]] {
            assert!(!verify(&mut engine, "x", &PasswordHash::new(bad)), "{bad}");
        }
    }

    #[test]
    fn a_hash_of_the_argon2_crate_matches_its_password_with_every_kernel() {
        use argon2::{Argon2, PasswordHasher};
        let hash = Argon2::default().hash_password_with_salt(b"correct horse", &[9; 16]).unwrap().to_string();
        for kernel in Kernel::supported() {
            let mut engine = Argon2Engine::new(kernel, Argon2Class::DEFAULT_NATIVE);
            assert!(verify(&mut engine, "correct horse", &PasswordHash::new(hash.as_str())), "{kernel:?}");
            assert!(!verify(&mut engine, "incorrect horse", &PasswordHash::new(hash.as_str())), "{kernel:?}");
        }
    }

    #[test]
    fn a_check_with_more_memory_does_not_change_the_kept_memory() {
        let mut engine = engine();
        let hash = engine.hash(&Password::new("x"), &[7; 16]);
        assert_eq!(engine.memory_bytes(), 19 << 20);
        let larger = PasswordHash::new(hash.expose().replace("m=19456", "m=32768"));
        assert!(!verify(&mut engine, "x", &larger));
        assert_eq!(engine.memory_bytes(), 19 << 20);
        assert!(verify(&mut engine, "x", &hash));
    }

    #[test]
    fn engines_with_different_parameters_check_each_others_hashes() {
        use argon2::{Algorithm, Argon2, Params, PasswordVerifier, Version, password_hash::phc};
        let stronger = [(20, 2), (19, 3)].map(|(memory, iterations)| Argon2Class::native(memory, iterations).unwrap());
        let mut default = engine();
        let old = default.hash(&Password::new("correct horse"), &[7; 16]);
        for (class, prefix, memory) in [
            (stronger[0], "$argon2id$v=19$m=20480,t=2,p=1$", 20 << 20),
            (stronger[1], "$argon2id$v=19$m=19456,t=3,p=1$", 19 << 20),
        ] {
            let mut engine = engine_with(class);
            let new = engine.hash(&Password::new("correct horse"), &[7; 16]);
            assert!(new.expose().starts_with(prefix), "{prefix}");
            assert_eq!(engine.memory_bytes(), memory, "the memory follows from the parameters");
            assert!(new.is_native(HashClass::Argon2(class)) && !old.is_native(HashClass::Argon2(class)));
            let params = Params::new(class.memory_kib(), class.passes(), 1, None).unwrap();
            let reference = Argon2::new(Algorithm::Argon2id, Version::V0x13, params);
            let phc = phc::PasswordHash::new(new.expose()).unwrap();
            assert!(reference.verify_password(b"correct horse", &phc).is_ok(), "{prefix}");
            for hash in [&old, &new] {
                for engine in [&mut engine, &mut default] {
                    assert!(verify(engine, "correct horse", hash), "{prefix}");
                    assert!(!verify(engine, "incorrect horse", hash), "{prefix}");
                }
            }
            assert_eq!(engine.memory_bytes(), memory, "a check with less memory does not change the kept memory");
            assert_eq!(default.memory_bytes(), 19 << 20, "nor does a check with more");
        }
    }

    #[test]
    fn a_password_matches_a_hash_with_earlier_parameters_whatever_form_the_client_sends() {
        let mut engine = engine_with(Argon2Class::native(19, 3).unwrap());
        let old = self::engine().hash(&Password::new("e\u{301}"), &[7; 16]);
        assert!(verify(&mut engine, "e\u{301}", &old), "a server made it, of the password in NFC");
        assert!(verify(&mut engine, "é", &old));
        // Another service made this hash from the password as the client sent it.
        let mut output = [0; 32];
        engine.argon2(Argon2Class::DEFAULT_NATIVE, "e\u{301}", &[7; 16], &mut output);
        let foreign = HashClass::DEFAULT_NATIVE.hash(&[7; 16], &output).to_text();
        let foreign = PasswordHash::new(foreign.as_str());
        assert!(verify(&mut engine, "e\u{301}", &foreign));
        assert!(!verify(&mut engine, "é", &foreign));
    }
}
