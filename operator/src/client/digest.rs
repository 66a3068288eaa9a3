//! Short hashes, which the operator stores for every Client instead of longer values. They are compared only with
//! hashes of the same process.

use std::{
    hash::{BuildHasher, Hash, RandomState},
    sync::LazyLock,
};

/// Returns a hash that only this process can compute, so nobody can find another value with the same hash.
pub(crate) fn digest(value: impl Hash) -> u64 {
    static HASHER: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    HASHER.hash_one(value)
}
