//! Argon2id with memory that is reused.

use std::time::Instant;

use argon2::password_hash::phc::{Ident, Output, PasswordHash as Phc, Salt};
use argon2_simd::{Algorithm, Error, Function, Hasher, Kernel, Params, Version};
use aws_lc_rs::constant_time::verify_slices_are_equal;

use crate::domain::password::{Password, PasswordHash};

/// m = 19 MiB, t = 2, p = 1: the minimum that the OWASP Password Storage Cheat Sheet recommends.
const PARAMS: Params = Params::DEFAULT;
const OUTPUT_BYTES: usize = Params::DEFAULT_OUTPUT_LEN;
/// The memory of a new hash, in bytes.
const MEMORY_BYTES: usize = PARAMS.block_count() * 1024;
/// The most memory that a stored hash can require, in KiB. A hash that requires more matches no password.
const MAX_MEMORY_KIB: u32 = 64 * 1024;
/// The most iterations that a stored hash can require. A hash that requires more matches no password.
const MAX_ITERATIONS: u32 = 16;

/// Argon2 for one thread.
pub(super) struct Argon2Engine {
    hasher: Hasher,
    /// When it computed the last hash. `None` if it has no memory.
    last_hash: Option<Instant>,
}

/// Whether the hash has another function, version or other parameters than a new hash.
pub(super) fn is_outdated(hash: &PasswordHash) -> bool {
    let current = || {
        let phc = Phc::new(hash.expose()).ok()?;
        let params = Params::try_from(&phc.params).ok()?;
        let same = phc.algorithm.as_str() == "argon2id"
            && phc.version == Some(Version::V0x13.into())
            && (params.m_cost(), params.t_cost(), params.p_cost())
                == (PARAMS.m_cost(), PARAMS.t_cost(), PARAMS.p_cost());
        same.then_some(())
    };
    current().is_none()
}

// === impl Argon2Engine ===

impl Argon2Engine {
    pub(super) fn new(kernel: Kernel) -> Self {
        Self { hasher: Hasher::with_kernel(kernel), last_hash: None }
    }

    /// The memory that it keeps, in bytes. The memory contains values that depend on the last password.
    pub(super) fn memory_bytes(&self) -> i64 {
        i64::try_from(self.hasher.memory_bytes()).unwrap_or(i64::MAX)
    }

    /// When it computed the last hash. `None` if it has no memory.
    pub(super) fn last_hash(&self) -> Option<Instant> {
        self.last_hash
    }

    /// Returns its memory to the system. The next hash allocates it again.
    pub(super) fn release_memory(&mut self) {
        self.hasher.release();
        self.last_hash = None;
    }

    pub(super) fn hash(&mut self, password: &Password, salt: &[u8; 16]) -> PasswordHash {
        let output = self.run(Algorithm::Argon2id, Version::V0x13, &PARAMS, password, salt, OUTPUT_BYTES);
        let phc = output.and_then(|output| {
            Some(Phc {
                algorithm: Ident::new("argon2id").ok()?,
                version: Some(Version::V0x13.into()),
                params: (&PARAMS).try_into().ok()?,
                salt: Some(Salt::new(salt).ok()?),
                hash: Some(Output::new(&output).ok()?),
            })
        });
        PasswordHash::new(phc.expect("fixed parameters are valid").to_string())
    }

    /// Whether the password matches the hash. A hash that is malformed, or requires too much memory or too many
    /// iterations, matches no password.
    pub(super) fn verify(&mut self, password: &Password, hash: &PasswordHash) -> bool {
        let mut check = || -> Option<()> {
            let phc = Phc::new(hash.expose()).ok()?;
            let algorithm = Algorithm::try_from(phc.algorithm.as_str()).ok()?;
            let version = phc.version.map_or(Ok(Version::V0x13), Version::try_from).ok()?;
            let params = Params::try_from(&phc).ok()?;
            if params.m_cost() > MAX_MEMORY_KIB || params.t_cost() > MAX_ITERATIONS {
                return None;
            }
            let (salt, expected) = (phc.salt?, phc.hash?);
            let output = self.run(algorithm, version, &params, password, &salt, expected.len())?;
            verify_slices_are_equal(&output, expected.as_bytes()).ok()
        };
        check().is_some()
    }

    fn run(
        &mut self,
        algorithm: Algorithm,
        version: Version,
        params: &Params,
        password: &Password,
        salt: &[u8],
        length: usize,
    ) -> Option<Vec<u8>> {
        let mut output = vec![0; length];
        let function = Function { algorithm, version, params, secret: b"" };
        match self.hasher.hash(&function, password.expose().as_bytes(), salt, &mut output) {
            Ok(()) => self.last_hash = Some(Instant::now()),
            // The request must not be answered as if the password were wrong. The pool answers a panic with 503.
            Err(Error::OutOfMemory) => panic!("the system has no memory for a hash"),
            Err(_) => return None,
        }
        // If a hash with other parameters needed more memory, the memory is returned.
        if self.hasher.memory_bytes() > MEMORY_BYTES {
            self.release_memory();
        }
        Some(output)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn engine() -> Argon2Engine {
        Argon2Engine::new(Kernel::fastest())
    }

    #[test]
    fn a_hash_matches_only_its_password() {
        let mut engine = engine();
        let hash = engine.hash(&Password::new("correct horse"), &[7; 16]);
        assert!(hash.expose().starts_with("$argon2id$v=19$m=19456,t=2,p=1$"));
        assert!(engine.verify(&Password::new("correct horse"), &hash));
        assert!(!engine.verify(&Password::new("Correct horse"), &hash));
        assert!(!engine.verify(&Password::new(""), &hash));
    }

    #[test]
    fn a_hash_with_other_parameters_is_outdated() {
        let hash = engine().hash(&Password::new("x"), &[7; 16]);
        assert!(!is_outdated(&hash));
        for (from, to) in [("t=2", "t=1"), ("m=19456", "m=8192"), ("argon2id", "argon2i"), ("v=19", "v=16")] {
            assert!(is_outdated(&PasswordHash::new(hash.expose().replace(from, to))), "{to}");
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
            assert!(!engine.verify(&Password::new("x"), &PasswordHash::new(bad)), "{bad}");
        }
    }

    #[test]
    fn a_hash_of_the_argon2_crate_matches_its_password_with_every_kernel() {
        use argon2::{Argon2, PasswordHasher};
        let hash = Argon2::default().hash_password_with_salt(b"correct horse", &[9; 16]).unwrap().to_string();
        for kernel in Kernel::supported() {
            let mut engine = Argon2Engine::new(kernel);
            assert!(engine.verify(&Password::new("correct horse"), &PasswordHash::new(hash.as_str())), "{kernel:?}");
            assert!(!engine.verify(&Password::new("incorrect horse"), &PasswordHash::new(hash.as_str())), "{kernel:?}");
        }
    }

    #[test]
    fn memory_beyond_that_of_a_new_hash_is_returned() {
        let mut engine = engine();
        let hash = engine.hash(&Password::new("x"), &[7; 16]);
        assert_eq!(engine.hasher.memory_bytes(), MEMORY_BYTES);
        let larger = PasswordHash::new(hash.expose().replace("m=19456", "m=32768"));
        assert!(!engine.verify(&Password::new("x"), &larger));
        assert_eq!(engine.memory_bytes(), 0);
        assert!(engine.verify(&Password::new("x"), &hash));
    }
}
