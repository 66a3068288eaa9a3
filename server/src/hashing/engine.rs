//! Argon2id with memory that is allocated once and reused.

use argon2::{
    Algorithm, Argon2, Block, Params, Version,
    password_hash::phc::{Ident, Output, PasswordHash as Phc, Salt},
};
use aws_lc_rs::constant_time::verify_slices_are_equal;

use crate::domain::password::{Password, PasswordHash};

/// m = 19 MiB, t = 2, p = 1: the minimum that the OWASP Password Storage Cheat Sheet recommends.
const PARAMS: Params = Params::DEFAULT;
const OUTPUT_BYTES: usize = Params::DEFAULT_OUTPUT_LEN;
/// The most memory that a stored hash can require, in KiB. A hash that requires more matches no password.
const MAX_MEMORY_KIB: u32 = 64 * 1024;
/// The most iterations that a stored hash can require. A hash that requires more matches no password.
const MAX_ITERATIONS: u32 = 16;

/// The argon2 of one thread. It allocates its memory at the first use.
#[derive(Default)]
pub(super) struct Argon2Engine {
    memory: Vec<Block>,
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
        let blocks = params.block_count();
        if self.memory.len() < blocks {
            self.memory.resize(blocks, Block::new());
        }
        let mut output = vec![0; length];
        Argon2::new(algorithm, version, params.clone())
            .hash_password_into_with_memory(password.expose().as_bytes(), salt, &mut output, &mut self.memory[..blocks])
            .ok()?;
        // If a hash with other parameters needed more memory, the surplus is freed.
        let usual = PARAMS.block_count();
        if self.memory.len() > usual {
            self.memory.truncate(usual);
            self.memory.shrink_to_fit();
        }
        Some(output)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_matches_only_its_password() {
        let mut engine = Argon2Engine::default();
        let hash = engine.hash(&Password::new("correct horse"), &[7; 16]);
        assert!(hash.expose().starts_with("$argon2id$v=19$m=19456,t=2,p=1$"));
        assert!(engine.verify(&Password::new("correct horse"), &hash));
        assert!(!engine.verify(&Password::new("Correct horse"), &hash));
        assert!(!engine.verify(&Password::new(""), &hash));
    }

    #[test]
    fn a_hash_with_other_parameters_is_outdated() {
        let hash = Argon2Engine::default().hash(&Password::new("x"), &[7; 16]);
        assert!(!is_outdated(&hash));
        for (from, to) in [("t=2", "t=1"), ("m=19456", "m=8192"), ("argon2id", "argon2i"), ("v=19", "v=16")] {
            assert!(is_outdated(&PasswordHash::new(hash.expose().replace(from, to))), "{to}");
        }
    }

    #[test]
    fn the_verifier_of_the_argon2_crate_accepts_a_hash() {
        use argon2::{PasswordVerifier, password_hash::phc};
        let hash = Argon2Engine::default().hash(&Password::new("correct horse"), &[9; 16]);
        let phc = phc::PasswordHash::new(hash.expose()).unwrap();
        assert!(Argon2::default().verify_password(b"correct horse", &phc).is_ok());
    }

    #[test]
    fn an_expensive_or_malformed_hash_matches_no_password() {
        let mut engine = Argon2Engine::default();
        for bad in ["", "x", "$argon2id$v=19$m=9999999,t=2,p=1$BwcHBwcHBwc$AAAA", "$2b$10$abcdefghijklmnopqrstuv"] {
            assert!(!engine.verify(&Password::new("x"), &PasswordHash::new(bad)), "{bad}");
        }
    }
}
