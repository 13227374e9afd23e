//! The micro-kernel of vectors: `C[rows, columns] = A[rows, depth] * B[depth, columns]` with `C` in registers. `A` may be stored transposed,
//! `[depth, rows]`.
//!
//! [`F32`](super::products::f32_fma::F32) and [`Bf16Pairs`](super::products::bf16_pairs::Bf16Pairs) compute both products of packed operands
//! with it, and `F32` also `p . v` with values in place. Scores with keys in place repeat its chain ([`stream`](super::stream)). The matrix
//! unit ([`amx`](super::products::amx)) and products with codes in place
//! ([`CodeProducts`](crate::kernels::forward::products::code_block::CodeProducts)) have kernels of their own.
//!
//! Each element of `C` is a single chain of multiply-adds ([`MulAdd`]) over `depth` in order, in whichever tile it is computed, so that its
//! bits depend only on its row of `A` and its column of `B`.

#![allow(unsafe_code)]

use super::mat::Mat;
use super::operands::{Operands, RunOf, Source};
use crate::simd::Simd;
use std::hint::black_box;

/// One step of the chain of multiply-adds that makes an element of `C`.
pub(crate) trait MulAdd<S: Simd> {
    /// Elements of the depth in each f32 of `A` and `B`: 2 for pairs of bf16.
    const PER_F32: usize;

    /// `a . b + c` in each lane, over the [`MulAdd::PER_F32`] elements of the lane.
    ///
    /// # Safety
    /// The contract of [`Simd`] holds.
    unsafe fn mul_add(a: S::V, b: S::V, c: S::V) -> S::V;

    /// The next value of a chain that measures the rate of steps. Each value depends on the one before in a way that keeps compilers from
    /// hoisting a part of the step.
    ///
    /// # Safety
    /// The contract of [`Simd`] holds.
    unsafe fn measured_step(chain: S::V, a: S::V, b: S::V) -> S::V;
}

/// `R` rows of `N` vectors; `A` is transposed if `T`.
///
/// # Safety
/// As [`gemm`].
#[inline(always)]
unsafe fn micro<S: Simd, M: MulAdd<S>, B: Source, const T: bool, const R: usize, const N: usize>(
    m: Operands<B>,
) {
    // SAFETY: the contract of `gemm`, for R rows and N vectors.
    unsafe {
        let mut acc = [[S::splat(0.0); N]; R];
        if m.resume {
            for r in 0..R {
                for n in 0..N {
                    acc[r][n] = S::load(m.c.at(r, n * S::LANES));
                }
            }
        }
        // One opaque pointer per row, and one index: otherwise compilers go from row to row by adding the stride, at every step. Streams
        // step one pointer, because the conversion of `B` needs the registers.
        let mut rows_of_a = [m.a.at(0, 0); R];
        if !B::STREAMS && !T {
            for r in 1..R {
                rows_of_a[r] = black_box(m.a.at(r, 0));
            }
        }
        let (mut a, mut k) = (m.a.at(0, 0), 0);
        for n in 0..m.b.runs() {
            let RunOf { start: mut b, rows, ahead } = m.b.run(n);
            for _ in 0..rows {
                let mut row = [S::splat(0.0); N];
                for n in 0..N {
                    row[n] = B::load::<S>(b.add(n * S::LANES));
                }
                for r in 0..R {
                    let x = S::splat(*if T {
                        a.add(r)
                    } else if B::STREAMS {
                        a.add(r * m.a.ld())
                    } else {
                        rows_of_a[r].add(k)
                    });
                    for n in 0..N {
                        acc[r][n] = M::mul_add(x, row[n], acc[r][n]);
                    }
                }
                if B::STREAMS {
                    for line in 0..(N * S::LANES * size_of::<B::Elem>()).div_ceil(64) {
                        S::prefetch(b.cast::<u8>().wrapping_add(ahead + 64 * line));
                    }
                }
                (a, k) = (a.wrapping_add(if T { m.a.ld() } else { 1 }), k + 1);
                b = b.wrapping_add(m.b.ld());
            }
        }
        for r in 0..R {
            for n in 0..N {
                S::store(m.c.at(r, n * S::LANES), acc[r][n]);
            }
        }
    }
}

/// All rows of `N` vectors.
///
/// # Safety
/// As [`gemm`].
#[inline(always)]
unsafe fn rows<S: Simd, M: MulAdd<S>, B: Source, const T: bool, const N: usize>(mut m: Operands<B>) {
    const { assert!(S::ROWS == 6 || S::ROWS == 4) };
    // SAFETY: the contract of `gemm`, for N vectors.
    unsafe {
        let after = |m: &Operands<B>, rows: usize| {
            (if T { m.a.from(0, rows) } else { m.a.from(rows, 0) }, m.c.from(rows, 0))
        };
        // Two vectors leave registers for two more rows, which share the conversion of `B`.
        while B::STREAMS && S::REGISTERS == 32 && N <= 2 && m.c.rows() >= 8 {
            micro::<S, M, B, T, 8, N>(m);
            (m.a, m.c) = after(&m, 8);
        }
        while m.c.rows() >= S::ROWS {
            match S::ROWS {
                6 => micro::<S, M, B, T, 6, N>(m),
                _ => micro::<S, M, B, T, 4, N>(m),
            }
            (m.a, m.c) = after(&m, S::ROWS);
        }
        match m.c.rows() {
            5 if S::ROWS > 5 => micro::<S, M, B, T, 5, N>(m),
            4 if S::ROWS > 4 => micro::<S, M, B, T, 4, N>(m),
            3 => micro::<S, M, B, T, 3, N>(m),
            2 => micro::<S, M, B, T, 2, N>(m),
            1 => micro::<S, M, B, T, 1, N>(m),
            _ => {}
        }
    }
}

/// Computes `C`, of at most `S::VECTORS` vectors.
///
/// # Safety
/// The contracts of [`Simd`] and of the matrices hold. `A` has at least the rows of `C`. `B` has as many rows as `A` has columns (all runs of
/// a stream together), and the columns of `C`.
#[inline(always)]
pub(crate) unsafe fn gemm<S: Simd, M: MulAdd<S>, B: Source>(m: Operands<B>) {
    debug_assert!(m.c.rows() <= m.a.rows());
    // SAFETY: the caller's contract.
    unsafe { vectors::<S, M, B, false>(m) }
}

/// [`gemm`] of any number of vectors, with `A` stored transposed: element `(row, k)` is `m.a.at(k, row)`. `A` has at least as many columns as
/// `C` has rows, and `B` as many rows as `A`.
///
/// # Safety
/// As [`gemm`].
#[inline(always)]
pub(crate) unsafe fn gemm_transposed<S: Simd, M: MulAdd<S>>(m: Operands<Mat>) {
    debug_assert!(m.c.rows() <= m.a.cols() && m.a.rows() == m.b.rows());
    let width = S::VECTORS * S::LANES;
    for column in (0..m.c.cols()).step_by(width) {
        // SAFETY: the caller's contract.
        unsafe { vectors::<S, M, Mat, true>(m.columns(column, width)) }
    }
}

/// # Safety
/// As [`gemm`] or [`gemm_transposed`].
#[inline(always)]
unsafe fn vectors<S: Simd, M: MulAdd<S>, B: Source, const T: bool>(m: Operands<B>) {
    debug_assert!(m.c.cols().is_multiple_of(S::LANES) && m.c.cols() <= S::VECTORS * S::LANES);
    // SAFETY: the caller's contract.
    unsafe {
        match m.c.cols() / S::LANES {
            4 if S::VECTORS == 4 => rows::<S, M, B, T, 4>(m),
            3 if S::VECTORS == 4 => rows::<S, M, B, T, 3>(m),
            2 => rows::<S, M, B, T, 2>(m),
            1 => rows::<S, M, B, T, 1>(m),
            _ => {}
        }
    }
}
