//! The one micro-kernel of both products: `C[rows, columns] = A[rows, depth] * B[depth, columns]` with `C` in registers.
//!
//! With [`Simd::PAIRS`], elements of `A` and `B` are pairs of bf16 along the depth. Each element of `C` is a single chain of
//! multiply-adds over `depth` in order, whatever the tile it is computed in, so its bits depend on its own row of `A` and
//! column of `B` alone.

#![allow(unsafe_code)]

use super::operands::{Operands, Source};
use super::tiles;
use crate::simd::{Elem, Simd};

#[inline(always)]
unsafe fn micro<S: Simd, E: Elem, const STREAM: bool, const R: usize, const N: usize>(
    depth: usize,
    m: Operands<'_, E>,
) {
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
        let mut a = m.a;
        let runs = match m.b {
            Source::Stream(runs, _) => runs.len(),
            Source::Packed(_) => 1,
        };
        for n in 0..if STREAM { runs } else { 1 } {
            let (mut b, rows, ahead) = match m.b {
                Source::Stream(runs, column) if STREAM => {
                    let run = runs.get_unchecked(n);
                    (run.start.cast::<E>().add(column), run.rows, run.ahead)
                }
                Source::Stream(..) => return,
                Source::Packed(b) => (b, depth, 0),
            };
            for _ in 0..rows {
                let mut row = [S::splat(0.0); N];
                for n in 0..N {
                    row[n] = E::load::<S>(b.add(n * S::LANES));
                }
                for r in 0..R {
                    let x = S::splat(*a.add(r * m.lda));
                    for n in 0..N {
                        acc[r][n] = S::mac(x, row[n], acc[r][n]);
                    }
                }
                if STREAM {
                    for line in 0..(N * S::LANES * size_of::<E>()).div_ceil(64) {
                        S::prefetch(b.cast::<u8>().wrapping_add(ahead + 64 * line));
                    }
                }
                a = a.add(1);
                b = b.wrapping_add(m.ldb);
            }
        }
        for r in 0..R {
            for n in 0..N {
                S::store(m.c.add(r * m.ldc + n * S::LANES), acc[r][n]);
            }
        }
    }
}

#[inline(always)]
unsafe fn rows<S: Simd, E: Elem, const STREAM: bool, const N: usize>(
    mut rows: usize,
    depth: usize,
    mut m: Operands<'_, E>,
) {
    const { assert!(S::ROWS == 6 || S::ROWS == 4) };
    // SAFETY: the promise of `gemm`, for N vectors.
    unsafe {
        // Two vectors leave registers for two rows more, which share the conversion of `B`.
        while STREAM && S::REGISTERS == 32 && N <= 2 && rows >= 8 {
            micro::<S, E, STREAM, 8, N>(depth, m);
            m.a = m.a.add(8 * m.lda);
            m.c = m.c.add(8 * m.ldc);
            rows -= 8;
        }
        while rows >= S::ROWS {
            match S::ROWS {
                6 => micro::<S, E, STREAM, 6, N>(depth, m),
                _ => micro::<S, E, STREAM, 4, N>(depth, m),
            }
            m.a = m.a.add(S::ROWS * m.lda);
            m.c = m.c.add(S::ROWS * m.ldc);
            rows -= S::ROWS;
        }
        match rows {
            5 if S::ROWS > 5 => micro::<S, E, STREAM, 5, N>(depth, m),
            4 if S::ROWS > 4 => micro::<S, E, STREAM, 4, N>(depth, m),
            3 => micro::<S, E, STREAM, 3, N>(depth, m),
            2 => micro::<S, E, STREAM, 2, N>(depth, m),
            1 => micro::<S, E, STREAM, 1, N>(depth, m),
            _ => {}
        }
    }
}

#[inline(always)]
unsafe fn columns<S: Simd, E: Elem, const STREAM: bool>(
    shape: (usize, usize),
    depth: usize,
    m: Operands<'_, E>,
) {
    // SAFETY: the promise of `gemm`.
    unsafe {
        match shape.1 {
            4 if S::VECTORS == 4 => rows::<S, E, STREAM, 4>(shape.0, depth, m),
            3 if S::VECTORS == 4 => rows::<S, E, STREAM, 3>(shape.0, depth, m),
            2 => rows::<S, E, STREAM, 2>(shape.0, depth, m),
            1 => rows::<S, E, STREAM, 1>(shape.0, depth, m),
            _ => {}
        }
    }
}

/// Computes `rows x (vectors * LANES)` elements of `C`; `vectors <= VECTORS`. The runs of a stream have `depth` rows together.
///
/// # Safety
/// As [`Simd`]; `a` is valid for `rows x depth`, `b` for `depth x vectors * LANES`, `c` for `rows x vectors * LANES`. With
/// tiles, `depth` is a multiple of [`TILE`](crate::simd::TILE), and so are the rows for which `a` and `c` are valid.
#[inline(always)]
pub(super) unsafe fn gemm<S: Simd, E: Elem>(shape: (usize, usize), depth: usize, m: Operands<'_, E>) {
    debug_assert!(shape.1 <= S::VECTORS);
    // SAFETY: the caller's promise.
    unsafe {
        if S::TILES {
            return tiles::product::<S, E>(shape, depth, m);
        }
        // The loop that asks for nothing is a loop of its own: the requests would cost it a tenth of its rate.
        match m.b {
            Source::Stream(..) => columns::<S, E, true>(shape, depth, m),
            Source::Packed(_) if E::IS_F32 => columns::<S, E, false>(shape, depth, m),
            Source::Packed(_) => {}
        }
    }
}
