//! BLAKE2b with an output of any length: the function H' (RFC 9106, 3.3).

use blake2::{
    Blake2b512, Blake2bVarCore,
    digest::{
        Digest,
        block_api::{Buffer, UpdateCore, VariableOutputCore},
    },
};
use zeroize::{Zeroize, Zeroizing};

/// Fills the output with H' of the concatenated input.
pub(crate) fn hash_long(input: &[&[u8]], output: &mut [u8]) {
    let length = u32::try_from(output.len()).expect("the length of the output fits into a u32").to_le_bytes();
    if output.len() <= 64 {
        hash(std::iter::once(&length[..]).chain(input.iter().copied()), output);
        return;
    }
    let mut digest = Blake2b512::new();
    digest.update(length);
    for part in input {
        digest.update(part);
    }
    let mut link = Zeroizing::new(<[u8; 64]>::from(digest.finalize()));
    // Each hash of the chain contributes its first half. Only the last hash, which has 33 to 64 bytes, is used
    // completely.
    let mut rest = output;
    while rest.len() > 64 {
        let (half, tail) = rest.split_at_mut(32);
        half.copy_from_slice(&link[..32]);
        rest = tail;
        if rest.len() > 64 {
            *link = Blake2b512::digest(&link[..]).into();
        }
    }
    hash(std::iter::once(&link[..]), rest);
}

/// BLAKE2b with an output of 1 to 64 bytes. The length of the output is a parameter of the function.
fn hash<'a>(input: impl Iterator<Item = &'a [u8]>, output: &mut [u8]) {
    let mut core = Blake2bVarCore::new(output.len()).expect("the output has 1 to 64 bytes");
    let mut buffer = Buffer::<Blake2bVarCore>::default();
    for part in input {
        buffer.digest_blocks(part, |blocks| core.update_blocks(blocks));
    }
    let mut full = Default::default();
    core.finalize_variable_core(&mut buffer, &mut full);
    output.copy_from_slice(&full[..output.len()]);
    full.as_mut_slice().zeroize();
}
