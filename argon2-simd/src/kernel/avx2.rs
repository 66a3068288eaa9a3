//! The kernel for AVX2. A vector has four words: the same half of two neighboring columns, in two neighboring rows.
//!
//! The same quarter of two rows is in two vectors, one for each half. Elements 0 and 1 of a vector are the two columns
//! of the first row. Elements 2 and 3 are the two columns of the second row.

use std::{
    arch::x86_64::{
        __m256i, _mm_cvtsi128_si64, _mm256_add_epi64, _mm256_castsi256_si128, _mm256_mul_epu32, _mm256_or_si256,
        _mm256_permute4x64_epi64, _mm256_setr_epi8, _mm256_shuffle_epi8, _mm256_shuffle_epi32, _mm256_srli_epi64,
        _mm256_xor_si256,
    },
    array,
};

use super::{NextReference, fill_run};
use crate::{block::Block, segment::Run};

type Vector = __m256i;
/// The vectors of a block: first the quarters of rows 0 and 1, then those of rows 2 and 3, and so on.
type Vectors = [[[Vector; 2]; 4]; 4];
/// The quarters a, b, c and d of two rows or two columns. A quarter is one vector for each half.
type Quarters = [[Vector; 2]; 4];

pub(super) const fn position(row: usize, column: usize, half: usize) -> usize {
    4 * (8 * (row / 2) + 2 * (column / 2) + half) + 2 * (row % 2) + column % 2
}

#[target_feature(enable = "avx2")]
pub(super) fn fill(memory: &mut [Block], run: &Run<'_>) {
    fill_run(memory, run, |previous, reference, old, next| compress(previous, reference, old, next));
}

#[inline]
#[target_feature(enable = "avx2")]
fn compress(previous: Vectors, reference: &Vectors, old: Option<&Vectors>, next: &mut NextReference<'_>) -> Vectors {
    let mut rows = xor(&previous, reference);
    let summand = old.map_or(rows, |old| xor(&rows, old));
    permute_row_pairs::<0>(&mut rows);
    permute_row_pairs::<2>(&mut rows);
    let mut block = previous;
    permute_column_pairs::<0>(&rows, &summand, &mut block);
    next.find(_mm_cvtsi128_si64(_mm256_castsi256_si128(block[0][0][0])).cast_unsigned());
    permute_column_pairs::<2>(&rows, &summand, &mut block);
    block
}

/// Applies P to half of the rows, because more vectors do not fit into the registers. `FIRST` is the number of the
/// first pair of rows.
#[inline]
#[target_feature(enable = "avx2")]
fn permute_row_pairs<const FIRST: usize>(rows: &mut [Quarters; 4]) {
    let mut pairs = [rows[FIRST], rows[FIRST + 1]];
    permute_rows(&mut pairs);
    [rows[FIRST], rows[FIRST + 1]] = pairs;
}

/// Computes half of the columns of the result. `FIRST` is the number of the first pair of columns.
#[inline]
#[target_feature(enable = "avx2")]
fn permute_column_pairs<const FIRST: usize>(rows: &[Quarters; 4], summand: &Vectors, result: &mut Vectors) {
    let mut columns: [Quarters; 2] = array::from_fn(|column| array::from_fn(|row| rows[row][FIRST + column]));
    permute_columns(&mut columns);
    for (column, quarters) in columns.iter().enumerate() {
        for (row, quarter) in quarters.iter().enumerate() {
            let summand = summand[row][FIRST + column];
            result[row][FIRST + column] = array::from_fn(|half| _mm256_xor_si256(quarter[half], summand[half]));
        }
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn xor(x: &Vectors, y: &Vectors) -> Vectors {
    array::from_fn(|row| {
        array::from_fn(|column| array::from_fn(|half| _mm256_xor_si256(x[row][column][half], y[row][column][half])))
    })
}

/// Applies P to four rows. To rotate the four words of a quarter, its two vectors are exchanged, the two columns in a
/// vector are exchanged, or both.
#[inline]
#[target_feature(enable = "avx2")]
fn permute_rows(rows: &mut [Quarters; 2]) {
    mix(rows);
    for [_, b, c, d] in rows.iter_mut() {
        *b = [b[1], swap_columns(b[0])];
        *c = [swap_columns(c[0]), swap_columns(c[1])];
        *d = [swap_columns(d[1]), d[0]];
    }
    mix(rows);
    for [_, b, c, d] in rows.iter_mut() {
        *b = [swap_columns(b[1]), b[0]];
        *c = [swap_columns(c[0]), swap_columns(c[1])];
        *d = [d[1], swap_columns(d[0])];
    }
}

/// Applies P to four columns.
#[inline]
#[target_feature(enable = "avx2")]
fn permute_columns(columns: &mut [Quarters; 2]) {
    mix(columns);
    for [_, b, c, d] in columns.iter_mut() {
        *b = [b[1], swap_rows(b[0])];
        *c = [swap_rows(c[0]), swap_rows(c[1])];
        *d = [swap_rows(d[1]), d[0]];
    }
    mix(columns);
    for [_, b, c, d] in columns.iter_mut() {
        *b = [swap_rows(b[1]), b[0]];
        *c = [swap_rows(c[0]), swap_rows(c[1])];
        *d = [d[1], swap_rows(d[0])];
    }
}

/// The function GB (RFC 9106, 3.6), applied to each vector element; all `quarters` advance in lockstep.
#[inline]
#[target_feature(enable = "avx2")]
fn mix(quarters: &mut [Quarters; 2]) {
    for [a, b, _, _] in quarters.iter_mut() {
        *a = array::from_fn(|half| multiply_add(a[half], b[half]));
    }
    for [a, _, _, d] in quarters.iter_mut() {
        *d = array::from_fn(|half| rotate_right_32(_mm256_xor_si256(d[half], a[half])));
    }
    for [_, _, c, d] in quarters.iter_mut() {
        *c = array::from_fn(|half| multiply_add(c[half], d[half]));
    }
    for [_, b, c, _] in quarters.iter_mut() {
        *b = array::from_fn(|half| rotate_right_24(_mm256_xor_si256(b[half], c[half])));
    }
    for [a, b, _, _] in quarters.iter_mut() {
        *a = array::from_fn(|half| multiply_add(a[half], b[half]));
    }
    for [a, _, _, d] in quarters.iter_mut() {
        *d = array::from_fn(|half| rotate_right_16(_mm256_xor_si256(d[half], a[half])));
    }
    for [_, _, c, d] in quarters.iter_mut() {
        *c = array::from_fn(|half| multiply_add(c[half], d[half]));
    }
    for [_, b, c, _] in quarters.iter_mut() {
        *b = array::from_fn(|half| rotate_right_63(_mm256_xor_si256(b[half], c[half])));
    }
}

/// x + y + 2 × low(x) × low(y), where `low` is the lower 32 bits.
#[inline]
#[target_feature(enable = "avx2")]
fn multiply_add(x: Vector, y: Vector) -> Vector {
    let product = _mm256_mul_epu32(x, y);
    _mm256_add_epi64(_mm256_add_epi64(x, y), _mm256_add_epi64(product, product))
}

#[inline]
#[target_feature(enable = "avx2")]
fn swap_columns(x: Vector) -> Vector {
    _mm256_shuffle_epi32::<0b01_00_11_10>(x)
}

#[inline]
#[target_feature(enable = "avx2")]
fn swap_rows(x: Vector) -> Vector {
    _mm256_permute4x64_epi64::<0b01_00_11_10>(x)
}

#[inline]
#[target_feature(enable = "avx2")]
fn rotate_right_32(x: Vector) -> Vector {
    _mm256_shuffle_epi32::<0b10_11_00_01>(x)
}

#[inline]
#[target_feature(enable = "avx2")]
fn rotate_right_24(x: Vector) -> Vector {
    #[rustfmt::skip]
    let bytes = _mm256_setr_epi8(
        3, 4, 5, 6, 7, 0, 1, 2, 11, 12, 13, 14, 15, 8, 9, 10,
        3, 4, 5, 6, 7, 0, 1, 2, 11, 12, 13, 14, 15, 8, 9, 10,
    );
    _mm256_shuffle_epi8(x, bytes)
}

#[inline]
#[target_feature(enable = "avx2")]
fn rotate_right_16(x: Vector) -> Vector {
    #[rustfmt::skip]
    let bytes = _mm256_setr_epi8(
        2, 3, 4, 5, 6, 7, 0, 1, 10, 11, 12, 13, 14, 15, 8, 9,
        2, 3, 4, 5, 6, 7, 0, 1, 10, 11, 12, 13, 14, 15, 8, 9,
    );
    _mm256_shuffle_epi8(x, bytes)
}

#[inline]
#[target_feature(enable = "avx2")]
fn rotate_right_63(x: Vector) -> Vector {
    _mm256_or_si256(_mm256_add_epi64(x, x), _mm256_srli_epi64::<63>(x))
}
