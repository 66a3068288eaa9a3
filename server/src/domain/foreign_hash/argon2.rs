//! Argon2: `$argon2id$v=19$m=65536,t=3,p=4$salt$hash`. Native hashes have this form, too.

use std::fmt::Display;

use super::{
    HashError,
    text::{self, Secret},
};

const MAX_MEMORY_KIB: u32 = 131_072;
const MAX_PASSES: u32 = 16;
const MAX_LANES: u32 = 16;
/// The blocks that a native hash fills: m = 19,456 KiB in t = 2 passes.
const NATIVE_BLOCKS: f64 = 38_912.0;
/// The shortest salt, in bytes (RFC 9106, 3.1, and the reference implementation).
const MIN_SALT_BYTES: usize = 8;

/// The cost of an Argon2 hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Argon2Class {
    pub(super) variant: Argon2Variant,
    pub(super) version: Argon2Version,
    memory_kib: u32,
    passes: u32,
    lanes: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Argon2Variant {
    Argon2d,
    Argon2i,
    Argon2id,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Argon2Version {
    /// Version 1.0, of 2015.
    V16,
    /// Version 1.3, of RFC 9106.
    V19,
}

pub(super) fn salt_and_output(salt: &str, output: &str) -> Result<(Secret, Secret), HashError> {
    let (salt, output) = text::salt_and_output(salt, output)?;
    if salt.len() < MIN_SALT_BYTES { Err(HashError::NotSupported) } else { Ok((salt, output)) }
}

// === impl Argon2Variant ===

impl Argon2Variant {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Argon2d => "argon2d",
            Self::Argon2i => "argon2i",
            Self::Argon2id => "argon2id",
        }
    }

    pub(super) fn from_name(name: &str) -> Option<Self> {
        [Self::Argon2d, Self::Argon2i, Self::Argon2id].into_iter().find(|variant| variant.name() == name)
    }
}

// === impl Argon2Version ===

impl Argon2Version {
    pub(super) const fn number(self) -> u32 {
        match self {
            Self::V16 => 16,
            Self::V19 => 19,
        }
    }

    pub(super) fn parse(text: &str) -> Result<Self, HashError> {
        match text {
            "v=16" => Ok(Self::V16),
            "v=19" => Ok(Self::V19),
            _ => Err(HashError::NotSupported),
        }
    }
}

// === impl Argon2Class ===

impl Argon2Class {
    /// The parameters of new hashes: the minimum that the OWASP Password Storage Cheat Sheet recommends.
    pub const NATIVE: Self =
        Self { variant: Argon2Variant::Argon2id, version: Argon2Version::V19, memory_kib: 19_456, passes: 2, lanes: 1 };

    pub(super) fn from_params(variant: Argon2Variant, version: Argon2Version, params: &str) -> Result<Self, HashError> {
        let [memory_kib, passes, lanes] = text::params(params, ["m", "t", "p"])?;
        if memory_kib > MAX_MEMORY_KIB || passes > MAX_PASSES || lanes > MAX_LANES {
            return Err(HashError::TooCostly);
        }
        // RFC 9106, 3.1.
        if passes == 0 || lanes == 0 || memory_kib < 8 * lanes {
            return Err(HashError::NotSupported);
        }
        Ok(Self { variant, version, memory_kib, passes, lanes })
    }

    pub const fn variant(self) -> Argon2Variant {
        self.variant
    }

    pub const fn version(self) -> Argon2Version {
        self.version
    }

    pub const fn memory_kib(self) -> u32 {
        self.memory_kib
    }

    pub const fn passes(self) -> u32 {
        self.passes
    }

    pub const fn lanes(self) -> u32 {
        self.lanes
    }

    pub(super) fn params(self) -> impl Display {
        format!("m={},t={},p={}", self.memory_kib, self.passes, self.lanes)
    }

    pub(super) fn weight(self) -> f64 {
        f64::from(self.memory_kib) * f64::from(self.passes) / NATIVE_BLOCKS
    }

    pub(super) const fn memory_bytes(self) -> u64 {
        self.memory_kib as u64 * 1024
    }
}
