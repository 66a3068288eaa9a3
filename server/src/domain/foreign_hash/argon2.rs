//! Argon2: `$argon2id$v=19$m=65536,t=3,p=4$salt$hash`. The hashes that the servers make (native hashes) have this form,
//! too.

use std::fmt::Display;

use super::{
    HashError, MAX_WEIGHT,
    text::{self, Secret},
};

const MAX_MEMORY_KIB: u32 = 131_072;
const MAX_PASSES: u32 = 16;
const MAX_LANES: u32 = 16;
/// The number of blocks of 1 KiB that a hash with the default parameters fills: 19,456 blocks (m) in each of 2 passes
/// (t).
const DEFAULT_BLOCKS: f64 = 38_912.0;
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
    /// The default parameters of new hashes: the minimum that the OWASP Password Storage Cheat Sheet recommends.
    pub const DEFAULT_NATIVE: Self =
        Self { variant: Argon2Variant::Argon2id, version: Argon2Version::V19, memory_kib: 19_456, passes: 2, lanes: 1 };

    /// Returns parameters with which an installation can make new hashes. `None` if they are weaker than the default,
    /// above a ceiling, or of a weight greater than [`MAX_WEIGHT`].
    pub fn native(memory_mib: u32, iterations: u32) -> Option<Self> {
        let memory_kib = memory_mib.checked_mul(1024)?;
        let class = Self { memory_kib, passes: iterations, ..Self::DEFAULT_NATIVE };
        let is_allowed = class.can_be_native()
            && memory_kib <= MAX_MEMORY_KIB
            && iterations <= MAX_PASSES
            && class.weight() <= MAX_WEIGHT;
        is_allowed.then_some(class)
    }

    /// Whether an installation can choose these parameters for new hashes. A hash with such parameters may come from
    /// another server of this installation, even if this server uses other parameters now.
    pub fn can_be_native(self) -> bool {
        let Self { variant, version, memory_kib, passes, lanes } = Self::DEFAULT_NATIVE;
        (self.variant, self.version, self.lanes) == (variant, version, lanes)
            && self.memory_kib >= memory_kib
            && self.memory_kib.is_multiple_of(1024)
            && self.passes >= passes
    }

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
        f64::from(self.memory_kib) * f64::from(self.passes) / DEFAULT_BLOCKS
    }

    pub(super) const fn memory_bytes(self) -> u64 {
        self.memory_kib as u64 * 1024
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_hashes_have_at_least_the_default_costs_and_at_most_the_maximum_weight() {
        assert_eq!(Argon2Class::native(19, 2), Some(Argon2Class::DEFAULT_NATIVE));
        for (memory_mib, iterations) in [(19, 3), (20, 2), (64, 3), (128, 9), (76, 16)] {
            let class = Argon2Class::native(memory_mib, iterations).unwrap();
            assert_eq!((class.memory_kib(), class.passes(), class.lanes()), (memory_mib * 1024, iterations, 1));
            assert!(class.can_be_native());
        }
        for (memory_mib, iterations) in
            [(18, 2), (18, 16), (46, 1), (64, 0), (129, 2), (19, 17), (128, 10), (77, 16), (u32::MAX, 2)]
        {
            assert_eq!(Argon2Class::native(memory_mib, iterations), None, "{memory_mib} MiB, {iterations} iterations");
        }
    }

    #[test]
    fn a_hash_that_no_installation_makes_cannot_be_native() {
        let class = |variant, version, params| Argon2Class::from_params(variant, version, params).unwrap();
        let (id, v19) = (Argon2Variant::Argon2id, Argon2Version::V19);
        assert!(class(id, v19, "m=19456,t=2,p=1").can_be_native());
        assert!(class(id, v19, "m=65536,t=3,p=1").can_be_native());
        for other in [
            class(Argon2Variant::Argon2i, v19, "m=65536,t=3,p=1"),
            class(id, Argon2Version::V16, "m=65536,t=3,p=1"),
            class(id, v19, "m=65536,t=3,p=4"),
            class(id, v19, "m=47104,t=1,p=1"),
            class(id, v19, "m=18432,t=3,p=1"),
            class(id, v19, "m=65537,t=3,p=1"),
        ] {
            assert!(!other.can_be_native(), "{other:?}");
        }
    }
}
