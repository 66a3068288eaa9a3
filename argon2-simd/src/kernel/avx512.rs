//! The kernel for AVX-512. A vector has eight words: both halves of two neighboring columns, in two neighboring rows.
//!
//! Four vectors contain two rows or two columns. So each vector contains the same quarter of two permutations P. For
//! two rows, these are elements 0 to 3 and elements 4 to 7. For two columns, these are elements 0, 1, 4, 5 and elements
//! 2, 3, 6, 7.

use std::{
    arch::x86_64::{
        __m512i, _mm_cvtsi128_si64, _mm512_add_epi64, _mm512_castsi512_si128, _mm512_mul_epu32, _mm512_permutex_epi64,
        _mm512_permutexvar_epi64, _mm512_ror_epi64, _mm512_setr_epi64, _mm512_xor_si512,
    },
    array,
};

use super::{NextReference, fill_run};
use crate::{block::Block, segment::Run};

type Vector = __m512i;
/// The vectors of a block: first the quarters of rows 0 and 1, then those of rows 2 and 3, and so on.
type Vectors = [Vector; 16];
/// The quarters a, b, c and d of two rows or two columns.
type Quarters = [Vector; 4];

pub(super) const fn position(row: usize, column: usize, half: usize) -> usize {
    8 * (4 * (row / 2) + column / 2) + 4 * (row % 2) + 2 * (column % 2) + half
}

#[target_feature(enable = "avx512f")]
pub(super) fn fill(memory: &mut [Block], run: &Run<'_>) {
    fill_run(memory, run, |previous, reference, old, next| compress(previous, reference, old, next));
}

#[inline]
#[target_feature(enable = "avx512f")]
fn compress(previous: Vectors, reference: &Vectors, old: Option<&Vectors>, next: &mut NextReference<'_>) -> Vectors {
    let input: Vectors = array::from_fn(|i| _mm512_xor_si512(previous[i], reference[i]));
    let summand = old.map_or(input, |old| array::from_fn(|i| _mm512_xor_si512(input[i], old[i])));
    let mut rows: [Quarters; 4] = array::from_fn(|row| array::from_fn(|column| input[4 * row + column]));
    permute_rows(&mut rows);
    let mut block = previous;
    permute_column_pairs::<0>(&rows, &summand, &mut block);
    next.find(_mm_cvtsi128_si64(_mm512_castsi512_si128(block[0])).cast_unsigned());
    permute_column_pairs::<2>(&rows, &summand, &mut block);
    block
}

/// Computes half of the columns of the result. `FIRST` is the number of the first pair of columns.
#[inline]
#[target_feature(enable = "avx512f")]
fn permute_column_pairs<const FIRST: usize>(rows: &[Quarters; 4], summand: &Vectors, result: &mut Vectors) {
    let mut columns: [Quarters; 2] = array::from_fn(|column| array::from_fn(|row| rows[row][FIRST + column]));
    permute_columns(&mut columns);
    for (column, quarters) in columns.iter().enumerate() {
        for (row, quarter) in quarters.iter().enumerate() {
            let i = 4 * row + FIRST + column;
            result[i] = _mm512_xor_si512(*quarter, summand[i]);
        }
    }
}

/// Applies P to eight rows.
#[inline]
#[target_feature(enable = "avx512f")]
fn permute_rows(rows: &mut [Quarters; 4]) {
    mix(rows);
    for [_, b, c, d] in rows.iter_mut() {
        *b = _mm512_permutex_epi64::<0b00_11_10_01>(*b);
        *c = _mm512_permutex_epi64::<0b01_00_11_10>(*c);
        *d = _mm512_permutex_epi64::<0b10_01_00_11>(*d);
    }
    mix(rows);
    for [_, b, c, d] in rows.iter_mut() {
        *b = _mm512_permutex_epi64::<0b10_01_00_11>(*b);
        *c = _mm512_permutex_epi64::<0b01_00_11_10>(*c);
        *d = _mm512_permutex_epi64::<0b00_11_10_01>(*d);
    }
}

/// Applies P to four columns.
#[inline]
#[target_feature(enable = "avx512f")]
fn permute_columns(columns: &mut [Quarters; 2]) {
    let rotate_by_1 = _mm512_setr_epi64(1, 4, 3, 6, 5, 0, 7, 2);
    let rotate_by_2 = _mm512_setr_epi64(4, 5, 6, 7, 0, 1, 2, 3);
    let rotate_by_3 = _mm512_setr_epi64(5, 0, 7, 2, 1, 4, 3, 6);
    mix(columns);
    for [_, b, c, d] in columns.iter_mut() {
        *b = _mm512_permutexvar_epi64(rotate_by_1, *b);
        *c = _mm512_permutexvar_epi64(rotate_by_2, *c);
        *d = _mm512_permutexvar_epi64(rotate_by_3, *d);
    }
    mix(columns);
    for [_, b, c, d] in columns.iter_mut() {
        *b = _mm512_permutexvar_epi64(rotate_by_3, *b);
        *c = _mm512_permutexvar_epi64(rotate_by_2, *c);
        *d = _mm512_permutexvar_epi64(rotate_by_1, *d);
    }
}

/// The function GB (RFC 9106, 3.6), applied to each vector element; all `quarters` advance in lockstep.
#[inline]
#[target_feature(enable = "avx512f")]
fn mix<const N: usize>(quarters: &mut [Quarters; N]) {
    for [a, b, _, _] in quarters.iter_mut() {
        *a = multiply_add(*a, *b);
    }
    for [a, _, _, d] in quarters.iter_mut() {
        *d = _mm512_ror_epi64::<32>(_mm512_xor_si512(*d, *a));
    }
    for [_, _, c, d] in quarters.iter_mut() {
        *c = multiply_add(*c, *d);
    }
    for [_, b, c, _] in quarters.iter_mut() {
        *b = _mm512_ror_epi64::<24>(_mm512_xor_si512(*b, *c));
    }
    for [a, b, _, _] in quarters.iter_mut() {
        *a = multiply_add(*a, *b);
    }
    for [a, _, _, d] in quarters.iter_mut() {
        *d = _mm512_ror_epi64::<16>(_mm512_xor_si512(*d, *a));
    }
    for [_, _, c, d] in quarters.iter_mut() {
        *c = multiply_add(*c, *d);
    }
    for [_, b, c, _] in quarters.iter_mut() {
        *b = _mm512_ror_epi64::<63>(_mm512_xor_si512(*b, *c));
    }
}

/// x + y + 2 × low(x) × low(y), where `low` is the lower 32 bits.
#[inline]
#[target_feature(enable = "avx512f")]
fn multiply_add(x: Vector, y: Vector) -> Vector {
    let product = _mm512_mul_epu32(x, y);
    _mm512_add_epi64(_mm512_add_epi64(x, y), _mm512_add_epi64(product, product))
}
