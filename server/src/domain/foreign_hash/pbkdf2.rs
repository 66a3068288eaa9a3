//! PBKDF2: `$pbkdf2-sha256$i=27500,l=32$salt$hash`, with the number of iterations and the length of the output.

use std::fmt::Display;

use super::{HashError, text};

/// The hash function in PBKDF2's HMAC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pbkdf2Digest {
    Sha1,
    Sha256,
    Sha512,
}

/// The cost of a PBKDF2 hash: the number of iterations for each block of output, and the number of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Pbkdf2Class {
    pub(super) digest: Pbkdf2Digest,
    iterations: u32,
    blocks: u32,
}

// === impl Pbkdf2Digest ===

impl Pbkdf2Digest {
    pub(super) const fn algorithm(self) -> &'static str {
        match self {
            Self::Sha1 => "pbkdf2-sha1",
            Self::Sha256 => "pbkdf2-sha256",
            Self::Sha512 => "pbkdf2-sha512",
        }
    }

    pub(super) fn from_algorithm(name: &str) -> Option<Self> {
        [Self::Sha1, Self::Sha256, Self::Sha512].into_iter().find(|digest| digest.algorithm() == name)
    }

    /// Returns the length of a block of output, in bytes.
    const fn output_bytes(self) -> usize {
        match self {
            Self::Sha1 => 20,
            Self::Sha256 => 32,
            Self::Sha512 => 64,
        }
    }

    /// Returns the maximum total number of iterations for all blocks of an output.
    const fn max_iterations(self) -> u32 {
        match self {
            Self::Sha1 | Self::Sha256 => 2_000_000,
            Self::Sha512 => 1_000_000,
        }
    }

    /// Returns the number of iterations that take as long as a hash with the default parameters.
    const fn iterations_of_weight_1(self) -> u32 {
        match self {
            Self::Sha1 => 30_000,
            Self::Sha256 => 45_000,
            Self::Sha512 => 17_000,
        }
    }
}

// === impl Pbkdf2Class ===

impl Pbkdf2Class {
    pub(super) fn from_hash_params(digest: Pbkdf2Digest, params: &str, length: usize) -> Result<Self, HashError> {
        let [iterations, stated_length] = text::params(params, ["i", "l"])?;
        if usize::try_from(stated_length) != Ok(length) {
            return Err(HashError::NotSupported);
        }
        let blocks = u32::try_from(length.div_ceil(digest.output_bytes())).map_err(|_| HashError::NotSupported)?;
        Self::new(digest, iterations, blocks)
    }

    pub(super) fn from_class_params(digest: Pbkdf2Digest, params: &str) -> Result<Self, HashError> {
        let [iterations, blocks] = text::params(params, ["i", "b"])?;
        // An output has at most 64 bytes.
        if !(1..=64_usize.div_ceil(digest.output_bytes())).contains(&(blocks as usize)) {
            return Err(HashError::NotSupported);
        }
        Self::new(digest, iterations, blocks)
    }

    fn new(digest: Pbkdf2Digest, iterations: u32, blocks: u32) -> Result<Self, HashError> {
        if iterations == 0 {
            return Err(HashError::NotSupported);
        }
        if iterations.saturating_mul(blocks) > digest.max_iterations() {
            return Err(HashError::TooCostly);
        }
        Ok(Self { digest, iterations, blocks })
    }

    pub const fn digest(self) -> Pbkdf2Digest {
        self.digest
    }

    pub const fn iterations(self) -> u32 {
        self.iterations
    }

    pub(super) fn params(self) -> impl Display {
        format!("i={},b={}", self.iterations, self.blocks)
    }

    /// Returns the length of the longest output of this class, in bytes.
    pub(super) fn max_output_bytes(self) -> usize {
        (self.blocks as usize * self.digest.output_bytes()).min(64)
    }

    pub(super) fn weight(self) -> f64 {
        f64::from(self.iterations * self.blocks) / f64::from(self.digest.iterations_of_weight_1())
    }
}
