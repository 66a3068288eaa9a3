//! The kernel for every CPU, in plain Rust. The words of a block have their usual order.

use super::{NextReference, fill_run};
use crate::{
    block::{Block, WORDS},
    segment::Run,
};

type Words = [u64; WORDS];

pub(super) const fn position(row: usize, column: usize, half: usize) -> usize {
    16 * row + 2 * column + half
}

pub(super) fn fill(memory: &mut [Block], run: &Run<'_>) {
    fill_run(memory, run, compress);
}

#[inline(always)]
fn compress(previous: Words, reference: &Words, old: Option<&Words>, next: &mut NextReference<'_>) -> Words {
    let mut block = previous;
    xor(&mut block, reference);
    let mut summand = block;
    if let Some(old) = old {
        xor(&mut summand, old);
    }
    for row in 0..8 {
        permute(&mut block, |i| position(row, i / 2, i % 2));
    }
    for column in 0..8 {
        permute(&mut block, |i| position(i / 2, column, i % 2));
    }
    xor(&mut block, &summand);
    next.find(block[0]);
    block
}

#[inline(always)]
fn xor(block: &mut Words, other: &Words) {
    for (word, other) in block.iter_mut().zip(other) {
        *word ^= other;
    }
}

/// Applies P to the 16 words of one row or column. `index` maps the number of a word to its position in the block.
#[inline(always)]
fn permute(block: &mut Words, index: impl Fn(usize) -> usize) {
    let mut v: [u64; 16] = std::array::from_fn(|i| block[index(i)]);
    for [a, b, c, d] in [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]] {
        (v[a], v[b], v[c], v[d]) = mix(v[a], v[b], v[c], v[d]);
    }
    for [a, b, c, d] in [[0, 5, 10, 15], [1, 6, 11, 12], [2, 7, 8, 13], [3, 4, 9, 14]] {
        (v[a], v[b], v[c], v[d]) = mix(v[a], v[b], v[c], v[d]);
    }
    for (i, word) in v.into_iter().enumerate() {
        block[index(i)] = word;
    }
}

/// The function GB (RFC 9106, 3.6).
#[inline(always)]
const fn mix(mut a: u64, mut b: u64, mut c: u64, mut d: u64) -> (u64, u64, u64, u64) {
    a = multiply_add(a, b);
    d = (d ^ a).rotate_right(32);
    c = multiply_add(c, d);
    b = (b ^ c).rotate_right(24);
    a = multiply_add(a, b);
    d = (d ^ a).rotate_right(16);
    c = multiply_add(c, d);
    b = (b ^ c).rotate_right(63);
    (a, b, c, d)
}

/// x + y + 2 × low(x) × low(y), where `low` is the lower 32 bits.
#[inline(always)]
const fn multiply_add(x: u64, y: u64) -> u64 {
    let product = (x & 0xFFFF_FFFF) * (y & 0xFFFF_FFFF);
    x.wrapping_add(y).wrapping_add(product.wrapping_mul(2))
}
