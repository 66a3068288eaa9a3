//! The kernel for NEON. A vector has two words: the same half of two neighboring columns, in one row.
//!
//! A quarter of a row has two vectors, one for each half. Two columns have 16 vectors. The words within these vectors
//! never move.

use std::{
    arch::aarch64::{
        uint64x2_t, vaddq_u64, veorq_u64, vextq_u64, vgetq_lane_u64, vmovn_u64, vmull_u32, vreinterpretq_u32_u64,
        vreinterpretq_u64_u32, vrev64q_u32, vshlq_n_u64, vsriq_n_u64,
    },
    array,
};

use super::{NextReference, fill_run};
use crate::{block::Block, segment::Run};

type Vector = uint64x2_t;
/// The vectors of a block: for each row, four quarters of two vectors.
type Vectors = [[[Vector; 2]; 4]; 8];

pub(super) const fn position(row: usize, column: usize, half: usize) -> usize {
    2 * (8 * row + 2 * (column / 2) + half) + column % 2
}

#[target_feature(enable = "neon")]
pub(super) fn fill(memory: &mut [Block], run: &Run<'_>) {
    fill_run(memory, run, |previous, reference, old, next| compress(previous, reference, old, next));
}

#[inline]
#[target_feature(enable = "neon")]
fn compress(previous: Vectors, reference: &Vectors, old: Option<&Vectors>, next: &mut NextReference<'_>) -> Vectors {
    let mut block = xor(&previous, reference);
    let summand = old.map_or(block, |old| xor(&block, old));
    for row in &mut block {
        permute_row(row);
    }
    for pair in 0..4 {
        permute_columns(&mut block, pair);
        if pair == 0 {
            next.find(vgetq_lane_u64::<0>(veorq_u64(block[0][0][0], summand[0][0][0])));
        }
    }
    xor(&block, &summand)
}

#[inline]
#[target_feature(enable = "neon")]
fn xor(x: &Vectors, y: &Vectors) -> Vectors {
    array::from_fn(|row| {
        array::from_fn(|quarter| array::from_fn(|half| veorq_u64(x[row][quarter][half], y[row][quarter][half])))
    })
}

/// Applies P to one row.
#[inline]
#[target_feature(enable = "neon")]
fn permute_row(row: &mut [[Vector; 2]; 4]) {
    mix(row);
    let [a, b, c, d] = *row;
    *row = [a, [b[1], swap(b[0])], [swap(c[0]), swap(c[1])], [swap(d[1]), d[0]]];
    mix(row);
    let [a, b, c, d] = *row;
    *row = [a, [swap(b[1]), b[0]], [swap(c[0]), swap(c[1])], [d[1], swap(d[0])]];
}

/// Applies P to two columns. Word i of a column is half i % 2 of row i / 2.
#[inline]
#[target_feature(enable = "neon")]
fn permute_columns(block: &mut Vectors, pair: usize) {
    let mut words: [[Vector; 4]; 4] =
        array::from_fn(|quarter| array::from_fn(|i| block[2 * quarter + i / 2][pair][i % 2]));
    mix(&mut words);
    let [a, [b0, b1, b2, b3], [c0, c1, c2, c3], [d0, d1, d2, d3]] = words;
    words = [a, [b1, b2, b3, b0], [c2, c3, c0, c1], [d3, d0, d1, d2]];
    mix(&mut words);
    let [a, [b1, b2, b3, b0], [c2, c3, c0, c1], [d3, d0, d1, d2]] = words;
    words = [a, [b0, b1, b2, b3], [c0, c1, c2, c3], [d0, d1, d2, d3]];
    for (quarter, words) in words.into_iter().enumerate() {
        for (i, word) in words.into_iter().enumerate() {
            block[2 * quarter + i / 2][pair][i % 2] = word;
        }
    }
}

/// The function GB (RFC 9106, 3.6), applied to each vector element; the vectors of a quarter advance in lockstep.
#[inline]
#[target_feature(enable = "neon")]
fn mix<const N: usize>(quarters: &mut [[Vector; N]; 4]) {
    let [a, b, c, d] = quarters;
    *a = array::from_fn(|i| multiply_add(a[i], b[i]));
    *d = array::from_fn(|i| rotate_right_32(veorq_u64(d[i], a[i])));
    *c = array::from_fn(|i| multiply_add(c[i], d[i]));
    *b = array::from_fn(|i| rotate_right::<24, 40>(veorq_u64(b[i], c[i])));
    *a = array::from_fn(|i| multiply_add(a[i], b[i]));
    *d = array::from_fn(|i| rotate_right::<16, 48>(veorq_u64(d[i], a[i])));
    *c = array::from_fn(|i| multiply_add(c[i], d[i]));
    *b = array::from_fn(|i| rotate_right::<63, 1>(veorq_u64(b[i], c[i])));
}

/// x + y + 2 × low(x) × low(y), where `low` is the lower 32 bits.
#[inline]
#[target_feature(enable = "neon")]
fn multiply_add(x: Vector, y: Vector) -> Vector {
    let product = vmull_u32(vmovn_u64(x), vmovn_u64(y));
    vaddq_u64(vaddq_u64(x, y), vaddq_u64(product, product))
}

#[inline]
#[target_feature(enable = "neon")]
fn rotate_right_32(x: Vector) -> Vector {
    vreinterpretq_u64_u32(vrev64q_u32(vreinterpretq_u32_u64(x)))
}

/// Rotates by `RIGHT`. `LEFT` is 64 − `RIGHT`.
#[inline]
#[target_feature(enable = "neon")]
fn rotate_right<const RIGHT: i32, const LEFT: i32>(x: Vector) -> Vector {
    vsriq_n_u64::<RIGHT>(vshlq_n_u64::<LEFT>(x), x)
}

/// Exchanges the two words.
#[inline]
#[target_feature(enable = "neon")]
fn swap(x: Vector) -> Vector {
    vextq_u64::<1>(x, x)
}
