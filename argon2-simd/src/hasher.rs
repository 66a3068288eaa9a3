//! Argon2 for one thread.

use std::fmt;

use argon2::{Algorithm, Error, MAX_PWD_LEN, MAX_SALT_LEN, MAX_SECRET_LEN, MIN_SALT_LEN, Params, Version};
use blake2::{Blake2b512, Digest};
use zeroize::Zeroizing;

use crate::{
    Kernel,
    blake2b::hash_long,
    block::{BYTES, Block, WORDS},
    memory::BlockMemory,
    segment::{Geometry, References, Run, SLICES, Segment},
};

/// The function that a [`Hasher`] computes.
#[derive(Clone)]
pub struct Function<'a> {
    /// The variant of Argon2.
    pub algorithm: Algorithm,
    /// The version of Argon2.
    pub version: Version,
    /// The costs, the associated data, and the length of the output if it is fixed.
    pub params: &'a Params,
    /// A secret key that is hashed together with the password (RFC 9106, 3.1). Empty: no key.
    pub secret: &'a [u8],
}

/// Computes Argon2 with memory that it keeps from one hash to the next.
///
/// The memory belongs to one thread: use one hasher for each thread. The system provides the memory at the first hash.
///
/// After a hash, the memory contains values that depend on the password. [`Hasher::release`] or dropping the hasher
/// removes these values. Until then, somebody who reads the memory of this process can check guesses of the last
/// password. If the hash had at least two passes, the check of a guess takes at least as long as one pass over the
/// memory. If it had one pass, the check takes much less time.
pub struct Hasher {
    kernel: Kernel,
    /// The position of each word in a block of the kernel.
    positions: [usize; WORDS],
    memory: Option<BlockMemory>,
}

// === impl Hasher ===

impl Hasher {
    /// A hasher with the fastest kernel of this CPU.
    pub fn new() -> Self {
        Self::with_kernel(Kernel::fastest())
    }

    /// A hasher with this kernel.
    pub fn with_kernel(kernel: Kernel) -> Self {
        Self { kernel, positions: kernel.positions(), memory: None }
    }

    /// The kernel of this hasher.
    pub const fn kernel(&self) -> Kernel {
        self.kernel
    }

    /// The memory that this hasher keeps, in bytes.
    pub fn memory_bytes(&self) -> usize {
        self.memory.as_ref().map_or(0, |memory| memory.len() * BYTES)
    }

    /// Returns the memory to the system. The next hash reserves it again.
    pub fn release(&mut self) {
        self.memory = None;
    }

    /// Fills `output` with the hash of the password.
    ///
    /// # Errors
    ///
    /// The same errors as `argon2::Argon2::hash_password_into`: the password, the salt, the secret or the output is too
    /// short or too long, or there is not enough memory.
    pub fn hash(
        &mut self,
        function: &Function<'_>,
        password: &[u8],
        salt: &[u8],
        output: &mut [u8],
    ) -> Result<(), Error> {
        check_lengths(function, password, salt, output)?;
        let geometry = Geometry::new(function.params);
        let count = geometry.block_count();
        let mut memory = match self.memory.take() {
            Some(memory) if memory.len() >= count => memory,
            smaller => {
                drop(smaller);
                BlockMemory::new(count).ok_or(Error::OutOfMemory)?
            }
        };
        let blocks = memory.blocks(count);
        self.write_first_blocks(blocks, geometry, &initial_hash(function, password, salt, output.len()));
        for pass in 0..function.params.t_cost() as usize {
            for slice in 0..SLICES {
                for lane in 0..geometry.lanes {
                    self.fill_segment(blocks, function, &Segment { geometry, pass, slice, lane });
                }
            }
        }
        self.write_output(blocks, geometry, output);
        self.memory = Some(memory);
        Ok(())
    }

    /// Writes the first two blocks of each lane (RFC 9106, 3.2, steps 3 and 4).
    fn write_first_blocks(&self, blocks: &mut [Block], geometry: Geometry, initial_hash: &[u8; 64]) {
        let mut bytes = Zeroizing::new([0; BYTES]);
        for (lane, blocks) in (0_u32..).zip(blocks.chunks_exact_mut(geometry.lane_length())) {
            for (column, block) in (0_u32..).zip(&mut blocks[..2]) {
                hash_long(&[initial_hash, &column.to_le_bytes(), &lane.to_le_bytes()], &mut bytes[..]);
                for (&position, word) in self.positions.iter().zip(bytes.as_chunks().0) {
                    block.0[position] = u64::from_le_bytes(*word);
                }
            }
        }
    }

    fn fill_segment(&self, blocks: &mut [Block], function: &Function<'_>, segment: &Segment) {
        let length = segment.geometry.segment_length;
        let first = segment.first();
        let overwrite = segment.pass == 0 || function.version == Version::V0x10;
        let is_data_independent = match function.algorithm {
            Algorithm::Argon2d => false,
            Algorithm::Argon2i => true,
            Algorithm::Argon2id => segment.pass == 0 && segment.slice < SLICES / 2,
        };
        if !is_data_independent {
            let run = Run {
                previous: segment.previous(first),
                destination: segment.block(first),
                count: length - first,
                references: References::Dependent { segment, first },
                overwrite,
            };
            self.kernel.fill(blocks, &run);
            return;
        }
        for (number, start) in (1..).zip((0..length).step_by(WORDS)) {
            let addresses = self.address_block(function, segment, number);
            let positions = start.max(first)..length.min(start + WORDS);
            let mut references = [0; WORDS];
            for position in positions.clone() {
                let value = addresses.0[self.positions[position - start]];
                references[position - positions.start] = segment.reference(position, value);
            }
            let run = Run {
                previous: segment.previous(positions.start),
                destination: segment.block(positions.start),
                count: positions.len(),
                references: References::Known(&references[..positions.len()]),
                overwrite,
            };
            self.kernel.fill(blocks, &run);
        }
    }

    /// Returns the pseudo-random values for 128 blocks of a segment (RFC 9106, 3.4.1.2). `number` is the number of the
    /// address block in the segment, from 1.
    fn address_block(&self, function: &Function<'_>, segment: &Segment, number: u64) -> Block {
        // Zeros, the input, and the results of the first and the second compression.
        let mut blocks = [Block::ZERO; 4];
        let input = [
            segment.pass as u64,
            segment.lane as u64,
            segment.slice as u64,
            segment.geometry.block_count() as u64,
            function.params.t_cost().into(),
            function.algorithm as u64,
            number,
        ];
        for (position, value) in self.positions.iter().zip(input) {
            blocks[1].0[*position] = value;
        }
        for destination in [2, 3] {
            let references = References::Known(&[destination - 1]);
            let run = Run { previous: 0, destination, count: 1, references, overwrite: true };
            self.kernel.fill(&mut blocks, &run);
        }
        blocks[3]
    }

    /// Hashes the XOR of the last blocks of all lanes (RFC 9106, 3.2, steps 7 and 8).
    fn write_output(&self, blocks: &[Block], geometry: Geometry, output: &mut [u8]) {
        let mut bytes = Zeroizing::new([0; BYTES]);
        for (&position, bytes) in self.positions.iter().zip(bytes.as_chunks_mut().0) {
            let lanes = blocks.chunks_exact(geometry.lane_length());
            let word = lanes.fold(0, |word, lane| word ^ lane[lane.len() - 1].0[position]);
            *bytes = word.to_le_bytes();
        }
        hash_long(&[&bytes[..]], output);
    }
}

impl fmt::Debug for Function<'_> {
    /// Does not show the secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Function")
            .field("algorithm", &self.algorithm)
            .field("version", &self.version)
            .field("params", &self.params)
            .finish_non_exhaustive()
    }
}

impl Default for Hasher {
    fn default() -> Self {
        Self::new()
    }
}

fn check_lengths(function: &Function<'_>, password: &[u8], salt: &[u8], output: &[u8]) -> Result<(), Error> {
    let fixed = function.params.output_len();
    if output.len() < fixed.unwrap_or(Params::MIN_OUTPUT_LEN) {
        return Err(Error::OutputTooShort);
    }
    if output.len() > fixed.unwrap_or(Params::MAX_OUTPUT_LEN) {
        return Err(Error::OutputTooLong);
    }
    if password.len() > MAX_PWD_LEN {
        return Err(Error::PwdTooLong);
    }
    if salt.len() < MIN_SALT_LEN {
        return Err(Error::SaltTooShort);
    }
    if salt.len() > MAX_SALT_LEN {
        return Err(Error::SaltTooLong);
    }
    if function.secret.len() > MAX_SECRET_LEN {
        return Err(Error::SecretTooLong);
    }
    Ok(())
}

/// Computes the initial hash H0 (RFC 9106, 3.2, step 1).
fn initial_hash(function: &Function<'_>, password: &[u8], salt: &[u8], output_length: usize) -> Zeroizing<[u8; 64]> {
    let length = |bytes: usize| u32::try_from(bytes).expect("the lengths were checked").to_le_bytes();
    let Function { algorithm, version, params, secret } = function;
    let mut digest = Blake2b512::new();
    digest.update(params.p_cost().to_le_bytes());
    digest.update(length(output_length));
    digest.update(params.m_cost().to_le_bytes());
    digest.update(params.t_cost().to_le_bytes());
    digest.update(u32::from(*version).to_le_bytes());
    digest.update((*algorithm as u32).to_le_bytes());
    for part in [password, salt, secret, params.data()] {
        digest.update(length(part.len()));
        digest.update(part);
    }
    Zeroizing::new(digest.finalize().into())
}
