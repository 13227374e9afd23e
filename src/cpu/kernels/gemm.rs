//! The one micro-kernel of both products: `C[rows, columns] = A[rows, depth] * B[depth, columns]` with `C` in registers.
//!
//! With [`Simd::PAIRS`], elements of `A` and `B` are pairs of bf16 along the depth. Each element of `C` is a single chain of
//! multiply-adds over `depth` in order, whatever the tile it is computed in,
//! so its bits depend on its own row of `A` and column of `B` alone.

#![allow(unsafe_code)]

use super::super::simd::Simd;

/// Row-major matrices, leading strides in elements.
#[derive(Clone, Copy)]
pub(super) struct Operands {
    pub(super) a: *const f32,
    pub(super) lda: usize,
    pub(super) b: *const f32,
    pub(super) ldb: usize,
    pub(super) c: *mut f32,
    pub(super) ldc: usize,
    /// Whether the chains go on from what `c` holds: a product cut along its depth has the bits of the whole.
    pub(super) resume: bool,
    /// Memory that is asked for meanwhile: a line at this address, and then one every so many bytes, at each step of the
    /// depth. It need not exist.
    pub(super) ahead: (*const u8, usize),
}

#[inline(always)]
unsafe fn micro<S: Simd, const R: usize, const N: usize>(depth: usize, m: Operands) {
    // SAFETY: the promise of `gemm`, for R rows and N vectors.
    unsafe {
        let mut acc = [[S::splat(0.0); N]; R];
        if m.resume {
            for r in 0..R {
                for n in 0..N {
                    acc[r][n] = S::load(m.c.add(r * m.ldc + n * S::LANES));
                }
            }
        }
        let (mut a, mut b, mut ahead) = (m.a, m.b, m.ahead.0);
        for _ in 0..depth {
            let mut row = [S::splat(0.0); N];
            for n in 0..N {
                row[n] = S::load(b.add(n * S::LANES));
            }
            for r in 0..R {
                let x = S::splat(*a.add(r * m.lda));
                for n in 0..N {
                    acc[r][n] = S::mac(x, row[n], acc[r][n]);
                }
            }
            S::prefetch(ahead);
            ahead = ahead.wrapping_add(m.ahead.1);
            a = a.add(1);
            b = b.add(m.ldb);
        }
        for r in 0..R {
            for n in 0..N {
                S::store(m.c.add(r * m.ldc + n * S::LANES), acc[r][n]);
            }
        }
    }
}

#[inline(always)]
unsafe fn rows<S: Simd, const N: usize>(mut rows: usize, depth: usize, mut m: Operands) {
    // SAFETY: the promise of `gemm`, for N vectors.
    unsafe {
        while rows >= S::ROWS {
            if S::ROWS == 6 {
                micro::<S, 6, N>(depth, m)
            } else {
                micro::<S, 4, N>(depth, m)
            }
            m.a = m.a.add(S::ROWS * m.lda);
            m.c = m.c.add(S::ROWS * m.ldc);
            rows -= S::ROWS;
        }
        match rows {
            5 => micro::<S, 5, N>(depth, m),
            4 => micro::<S, 4, N>(depth, m),
            3 => micro::<S, 3, N>(depth, m),
            2 => micro::<S, 2, N>(depth, m),
            1 => micro::<S, 1, N>(depth, m),
            _ => {}
        }
    }
}

/// Computes `rows x (vectors * LANES)` elements of `C`; `vectors <= VECTORS`.
///
/// # Safety
/// As [`Simd`]; `a` is valid for `rows x depth`, `b` for `depth x vectors * LANES`, `c` for `rows x vectors * LANES`.
#[inline(always)]
pub(super) unsafe fn gemm<S: Simd>(shape: (usize, usize), depth: usize, m: Operands) {
    debug_assert!(shape.1 <= S::VECTORS);
    // SAFETY: the caller's promise.
    unsafe {
        match shape.1 {
            4 if S::VECTORS == 4 => rows::<S, 4>(shape.0, depth, m),
            3 if S::VECTORS == 4 => rows::<S, 3>(shape.0, depth, m),
            2 => rows::<S, 2>(shape.0, depth, m),
            1 => rows::<S, 1>(shape.0, depth, m),
            _ => {}
        }
    }
}
