//! Kernels: implementations of Argon2's compression function G (RFC 9106, 3.5) for different instruction sets.
//!
//! G reads a block as a matrix of 8 rows and 8 columns of word pairs; a *half* is one word of a pair. It applies the
//! permutation P to each row and then to each column. P reads the 8 pairs of a row or column as 16 words v0 to v15, and
//! mixes first the columns and then the diagonals of the 4 × 4 matrix of these words.
//!
//! Each kernel has its own order of the words in a block. In kernels with vectors, a vector contains words that P
//! treats alike, from several rows and columns. The order is chosen so that words rarely move within a vector: the
//! number of a vector determines to which quarter of a row, and to which quarter of a column, its words belong. All
//! blocks in memory have this order, so only the first two blocks and the last block of each lane are converted.
//!
//! Two facts shape these kernels. First, a single P is a long chain of dependent instructions, so several permutations
//! run in lockstep. Second, the reference block is usually not in a cache. With data-dependent addressing, its index
//! follows from word 0 of the previous block. So the columns with word 0 are computed first, and the reference block is
//! prefetched while the other columns are computed.

use bytemuck::Pod;

use crate::{
    block::{Block, WORDS},
    segment::Run,
};

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod neon;
mod portable;

/// An implementation of the compression function that this CPU supports. All kernels have the same results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel(InstructionSet);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InstructionSet {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
    Neon,
    Portable,
}

/// Finds and prefetches the reference block of the next block of a [`Run`] (consecutive blocks that a kernel fills).
struct NextReference<'a> {
    memory: &'a [Block],
    run: &'a Run<'a>,
    /// The number of the next block in the [`Run`].
    number: usize,
    /// The index of the reference block of this next block. It is set when it is known.
    index: usize,
}

// === impl Kernel ===

impl Kernel {
    /// All kernels that this CPU supports. The fastest comes first.
    pub fn supported() -> Vec<Self> {
        let mut kernels = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") {
                kernels.push(InstructionSet::Avx512);
            }
            if is_x86_feature_detected!("avx2") {
                kernels.push(InstructionSet::Avx2);
            }
        }
        #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
        if std::arch::is_aarch64_feature_detected!("neon") {
            kernels.push(InstructionSet::Neon);
        }
        kernels.push(InstructionSet::Portable);
        kernels.into_iter().map(Self).collect()
    }

    /// The fastest kernel that this CPU supports.
    pub fn fastest() -> Self {
        Self::supported()[0]
    }

    /// Returns the name: `avx512`, `avx2`, `neon` or `portable`.
    pub const fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => "avx2",
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            InstructionSet::Neon => "neon",
            InstructionSet::Portable => "portable",
        }
    }

    /// The position of each word in a block of this kernel.
    pub(crate) fn positions(self) -> [usize; WORDS] {
        let position = match self.0 {
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => avx512::position,
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => avx2::position,
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            InstructionSet::Neon => neon::position,
            InstructionSet::Portable => portable::position,
        };
        std::array::from_fn(|word| position(word / 16, word / 2 % 8, word % 2))
    }

    /// Fills consecutive blocks.
    pub(crate) fn fill(self, memory: &mut [Block], run: &Run<'_>) {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            #[expect(unsafe_code, reason = "a function with a target feature is called from one without")]
            // SAFETY: only `supported` makes a `Kernel`, and it makes this one only if the CPU has AVX-512F.
            InstructionSet::Avx512 => unsafe { avx512::fill(memory, run) },
            #[cfg(target_arch = "x86_64")]
            #[expect(unsafe_code, reason = "a function with a target feature is called from one without")]
            // SAFETY: only `supported` makes a `Kernel`, and it makes this one only if the CPU has AVX2.
            InstructionSet::Avx2 => unsafe { avx2::fill(memory, run) },
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            #[expect(unsafe_code, reason = "a function with a target feature is called from one without")]
            // SAFETY: only `supported` makes a `Kernel`, and it makes this one only if the CPU has NEON.
            InstructionSet::Neon => unsafe { neon::fill(memory, run) },
            InstructionSet::Portable => portable::fill(memory, run),
        }
    }
}

/// Fills the consecutive blocks of a [`Run`]. `V` is an array of the vectors of a block.
///
/// `compress` gets the previous block and the reference block. If the result is combined with the old block, `compress`
/// also gets the old block. `compress` calls `NextReference::find` as soon as it has word 0 of the result.
#[inline(always)]
fn fill_run<V: Pod>(
    memory: &mut [Block],
    run: &Run<'_>,
    compress: impl Fn(V, &V, Option<&V>, &mut NextReference<'_>) -> V,
) {
    if run.count == 0 {
        return;
    }
    #[cfg(test)]
    crate::tests::record(crate::tests::Event::Run);
    let mut block: V = bytemuck::must_cast(memory[run.previous]);
    let mut reference = run.reference(0, memory[run.previous].0[0]);
    for number in 0..run.count {
        let destination = run.destination + number;
        let mut next = NextReference::new(memory, run, number + 1);
        let old = (!run.overwrite).then(|| bytemuck::must_cast_ref(&memory[destination]));
        block = compress(block, bytemuck::must_cast_ref(&memory[reference]), old, &mut next);
        reference = next.index;
        *bytemuck::must_cast_mut(&mut memory[destination]) = block;
    }
}

/// Loads a block into the cache nearest to the CPU.
#[inline(always)]
fn prefetch(block: &Block) {
    #[cfg(test)]
    crate::tests::record(crate::tests::Event::Prefetch);
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        for line in block.0.as_chunks::<8>().0 {
            #[expect(unsafe_code, reason = "the intrinsic takes a pointer")]
            // SAFETY: the pointer comes from a reference. A prefetch changes no memory.
            unsafe {
                _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast());
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = block;
}

// === impl NextReference ===

impl<'a> NextReference<'a> {
    /// Starts to look for a reference block. With data-independent addressing, its index is already known, so the block
    /// is prefetched during a whole compression.
    #[inline(always)]
    fn new(memory: &'a [Block], run: &'a Run<'a>, number: usize) -> Self {
        let mut next = Self { memory, run, number, index: 0 };
        if run.is_data_independent() {
            next.set(0);
        }
        next
    }

    /// Finds the reference block from word 0 of the previous block, if the addressing is data-dependent.
    #[inline(always)]
    fn find(&mut self, word: u64) {
        if !self.run.is_data_independent() {
            self.set(word);
        }
    }

    #[inline(always)]
    fn set(&mut self, word: u64) {
        if self.number < self.run.count {
            self.index = self.run.reference(self.number, word);
            prefetch(&self.memory[self.index]);
        }
    }
}
