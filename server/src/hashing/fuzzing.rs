//! For the fuzz targets: a check of a foreign hash.

use argon2_simd::Kernel;

use super::engine::Argon2Engine;
use crate::domain::{
    foreign_hash::{Argon2Class, ParsedHash},
    password::Password,
};

/// Whether the password matches the hash. A hash of Firebase matches no password.
pub fn verify(password: &str, hash: &ParsedHash) -> bool {
    Argon2Engine::new(Kernel::fastest(), Argon2Class::DEFAULT_NATIVE).verify_parsed(
        &Password::new(password),
        hash,
        None,
    )
}
