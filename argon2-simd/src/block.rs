//! The memory block of Argon2.

use bytemuck::{Pod, Zeroable};

/// Words in a block.
pub(crate) const WORDS: usize = 128;
/// Bytes in a block (RFC 9106, 3.2).
pub(crate) const BYTES: usize = 8 * WORDS;

/// 1 KiB of Argon2's memory. A block starts at a cache line, so none of its vectors crosses a cache line.
///
/// The order of the words in a block depends on the kernel ([`crate::Kernel`]), except for word 0, which is always
/// first. Blocks of two kernels must not be mixed.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
pub(crate) struct Block(pub(crate) [u64; WORDS]);

// === impl Block ===

impl Block {
    pub(crate) const ZERO: Self = Self([0; WORDS]);
}
