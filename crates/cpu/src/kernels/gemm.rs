//! The one micro-kernel of both products: `C[rows, columns] = A[rows, depth] * B[depth, columns]` with `C` in registers.
//!
//! Each element of `C` is a single chain of multiply-adds ([`MulAdd`]) over `depth` in order, whatever the tile it is computed in, so that its
//! bits depend on its own row of `A` and column of `B` alone.

#![allow(unsafe_code)]

use super::operands::{Operands, Shape, Source};
use crate::simd::Simd;

/// One step of the chain of multiply-adds that makes an element of `C`.
pub(crate) trait MulAdd<S: Simd> {
    /// Elements of the depth in each f32 of `A` and `B`: 2 where they are pairs of bf16.
    const PER_F32: usize;

    /// `a . b + c` in each lane, over the [`MulAdd::PER_F32`] elements of the lane.
    ///
    /// # Safety
    /// As [`Simd`].
    unsafe fn mul_add(a: S::V, b: S::V, c: S::V) -> S::V;

    /// The next value of a chain that measures the rate of steps. Each depends on the one before such that no compiler hoists a part of it.
    ///
    /// # Safety
    /// As [`Simd`].
    unsafe fn measured_step(chain: S::V, a: S::V, b: S::V) -> S::V;
}

/// `R` rows of `N` vectors.
///
/// # Safety
/// As [`gemm`].
#[inline(always)]
unsafe fn micro<S: Simd, M: MulAdd<S>, B: Source, const R: usize, const N: usize>(
    depth: usize,
    m: Operands<B>,
) {
    // SAFETY: the contract of `gemm`, for R rows and N vectors.
    unsafe {
        let mut acc = [[S::splat(0.0); N]; R];
        if m.resume {
            for r in 0..R {
                for n in 0..N {
                    acc[r][n] = S::load(m.c.add(r * m.ldc + n * S::LANES));
                }
            }
        }
        let mut a = m.a;
        for n in 0..m.b.runs() {
            let (mut b, rows, ahead) = m.b.run(n, depth);
            for _ in 0..rows {
                let mut row = [S::splat(0.0); N];
                for n in 0..N {
                    row[n] = B::load::<S>(b.add(n * S::LANES));
                }
                for r in 0..R {
                    let x = S::splat(*a.add(r * m.lda));
                    for n in 0..N {
                        acc[r][n] = M::mul_add(x, row[n], acc[r][n]);
                    }
                }
                if B::STREAMS {
                    for line in 0..(N * S::LANES * size_of::<B::Elem>()).div_ceil(64) {
                        S::prefetch(b.cast::<u8>().wrapping_add(ahead + 64 * line));
                    }
                }
                a = a.add(1);
                b = b.wrapping_add(m.b.ld());
            }
        }
        for r in 0..R {
            for n in 0..N {
                S::store(m.c.add(r * m.ldc + n * S::LANES), acc[r][n]);
            }
        }
    }
}

/// All rows of `N` vectors.
///
/// # Safety
/// As [`gemm`].
#[inline(always)]
unsafe fn rows<S: Simd, M: MulAdd<S>, B: Source, const N: usize>(
    mut rows: usize,
    depth: usize,
    mut m: Operands<B>,
) {
    const { assert!(S::ROWS == 6 || S::ROWS == 4) };
    // SAFETY: the contract of `gemm`, for N vectors.
    unsafe {
        // Two vectors leave registers for two rows more, which share the conversion of `B`.
        while B::STREAMS && S::REGISTERS == 32 && N <= 2 && rows >= 8 {
            micro::<S, M, B, 8, N>(depth, m);
            m.a = m.a.add(8 * m.lda);
            m.c = m.c.add(8 * m.ldc);
            rows -= 8;
        }
        while rows >= S::ROWS {
            match S::ROWS {
                6 => micro::<S, M, B, 6, N>(depth, m),
                _ => micro::<S, M, B, 4, N>(depth, m),
            }
            m.a = m.a.add(S::ROWS * m.lda);
            m.c = m.c.add(S::ROWS * m.ldc);
            rows -= S::ROWS;
        }
        match rows {
            5 if S::ROWS > 5 => micro::<S, M, B, 5, N>(depth, m),
            4 if S::ROWS > 4 => micro::<S, M, B, 4, N>(depth, m),
            3 => micro::<S, M, B, 3, N>(depth, m),
            2 => micro::<S, M, B, 2, N>(depth, m),
            1 => micro::<S, M, B, 1, N>(depth, m),
            _ => {}
        }
    }
}

/// Computes `C` of a shape, whose vectors are at most `S::VECTORS`. The runs of a stream have `depth` rows together.
///
/// # Safety
/// As [`Simd`]; `a` is valid for `rows x depth`, `b` for `depth x vectors * LANES`, `c` for `rows x vectors * LANES`.
#[inline(always)]
pub(super) unsafe fn gemm<S: Simd, M: MulAdd<S>, B: Source>(shape: Shape, m: Operands<B>) {
    debug_assert!(shape.vectors <= S::VECTORS);
    let Shape { rows: count, vectors, depth } = shape;
    // SAFETY: the caller's contract.
    unsafe {
        match vectors {
            4 if S::VECTORS == 4 => rows::<S, M, B, 4>(count, depth, m),
            3 if S::VECTORS == 4 => rows::<S, M, B, 3>(count, depth, m),
            2 => rows::<S, M, B, 2>(count, depth, m),
            1 => rows::<S, M, B, 1>(count, depth, m),
            _ => {}
        }
    }
}
