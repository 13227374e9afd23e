//! Products by the matrix unit, in the layouts of pairs: what is `A` and `B` of the micro-kernel is that of a tile.

#![allow(unsafe_code)]

use super::operands::{Operands, Source};
use super::pack::{HeadRows, KeyVector};
use super::stream::Scores;
use crate::simd::{Elem, LINES, Simd, TILE, Tiles};
use std::ops::Range;

/// Keys of a step of weighted values.
pub(super) const KEYS: usize = 2 * TILE;

/// The contract of [`gemm`](super::gemm::gemm), for `B` of pairs.
///
/// # Safety
/// As there.
#[inline(always)]
pub(super) unsafe fn product<S: Simd, E: Elem>(
    (rows, vectors): (usize, usize),
    depth: usize,
    m: Operands<'_, E>,
) {
    const { assert!(!S::TILES || S::LANES == TILE) };
    debug_assert!(E::IS_F32 && depth.is_multiple_of(TILE));
    let steps = depth / TILE;
    let Source::Packed(b) = m.b else { return };
    let at = |r: usize, n: usize| Tiles {
        a: [m.a.wrapping_add(r * TILE * m.lda).cast(), m.a.wrapping_add((r + 1) * TILE * m.lda).cast()],
        lda: 4 * m.lda,
        b: b.wrapping_add(n * TILE).cast(),
        ldb: 4 * m.ldb,
        c: m.c.wrapping_add(r * TILE * m.ldc + n * TILE),
        ldc: 4 * m.ldc,
        resume: m.resume,
    };
    let rows = rows.div_ceil(TILE);
    // SAFETY: the caller's promise.
    unsafe {
        for r in (0..rows).step_by(2) {
            for n in (0..vectors).step_by(2) {
                match (rows - r, vectors - n) {
                    (1, 1) => S::tile_product::<1, 1>(steps, at(r, n)),
                    (1, _) => S::tile_product::<1, 2>(steps, at(r, n)),
                    (_, 1) => S::tile_product::<2, 1>(steps, at(r, n)),
                    _ => S::tile_product::<2, 2>(steps, at(r, n)),
                }
            }
        }
    }
}

/// Memory of a task with few rows, in f32: queries transposed, `[depth][TILE]`; scores of [`KEYS`] keys, `[KEYS][TILE]`;
/// rows of keys that cannot be used where they lie, `[KEYS][depth]`.
#[derive(Clone, Copy)]
pub(super) struct Stream {
    queries: *mut f32,
    scores: *mut f32,
    keys: *mut f32,
    depth: usize,
}

impl Stream {
    /// Takes `depth * (TILE + KEYS) + KEYS * TILE` elements from `memory`.
    pub(super) fn new(memory: *mut f32, depth: usize) -> Self {
        let queries = memory;
        let scores = queries.wrapping_add(depth * TILE);
        Self { queries, scores, keys: scores.wrapping_add(KEYS * TILE), depth }
    }

    /// Transposes the packed queries `[TILE, depth]`.
    ///
    /// # Safety
    /// As [`Simd`]; the memory and the queries are there.
    #[inline(always)]
    pub(super) unsafe fn set_queries<S: Simd>(&self, q: *const f32) {
        for d in (0..self.depth).step_by(LINES) {
            let mut rows = [q; TILE];
            for r in 0..TILE {
                rows[r] = q.wrapping_add(r * self.depth + d);
            }
            // SAFETY: the caller's promise; the depth is a multiple of the lines.
            unsafe {
                let lines = S::transpose::<f32>(rows);
                for c in 0..LINES {
                    S::store(self.queries.add((d + c) * TILE), lines[c]);
                }
            }
        }
    }

    /// Scores of at most [`TILE`] rows and keys `first + columns`, as [`stream::scores`](super::stream::scores): the product
    /// has keys for rows and queries for columns, so that keys are loaded into tiles from where they lie.
    ///
    /// # Safety
    /// As [`stream::scores`](super::stream::scores), after [`Stream::set_queries`].
    #[inline(always)]
    pub(super) unsafe fn scores<S: Simd>(
        &self,
        src: HeadRows<'_>,
        first: usize,
        columns: &Range<usize>,
        s: Scores,
    ) {
        let row_bytes = src.row_bytes();
        let steps = self.depth / TILE;
        for column in (columns.start / KEYS * KEYS..columns.end).step_by(KEYS) {
            // SAFETY: the caller's promise.
            unsafe {
                let halves = [column, column + TILE];
                let runs = [src.span(first + column, TILE), src.span(first + column + TILE, TILE)];
                let whole = columns.start <= column && column + KEYS <= columns.end;
                let in_place =
                    whole && row_bytes == 4 * self.depth && runs.iter().all(|run| run.rows >= TILE);
                if !in_place {
                    for (half, at) in halves.into_iter().enumerate() {
                        let keys = KeyVector::new::<S>(src, first, at, columns);
                        for (r, row) in keys.rows().iter().enumerate() {
                            let to = self.keys.add((half * TILE + r) * self.depth).cast::<u8>();
                            std::ptr::copy_nonoverlapping(*row, to, row_bytes);
                            std::ptr::write_bytes(to.add(row_bytes), 0, 4 * self.depth - row_bytes);
                        }
                    }
                }
                // Nothing is asked for while tiles are loaded: the memory itself follows long runs, requests in one go would
                // only delay it. It does not follow pages.
                for (run, at) in runs.into_iter().zip(halves) {
                    if (TILE..KEYS).contains(&run.rows) {
                        let next = first + at + src.distance();
                        src.request::<S>(next..next + TILE);
                    }
                }
                let copied =
                    [self.keys.cast_const().cast(), self.keys.add(TILE * self.depth).cast_const().cast()];
                let tiles = Tiles {
                    a: if in_place { [runs[0].start, runs[1].start] } else { copied },
                    lda: if in_place { src.step() } else { 4 * self.depth },
                    b: self.queries.cast_const().cast(),
                    ldb: 4 * TILE,
                    c: self.scores,
                    ldc: 4 * TILE,
                    resume: false,
                };
                S::tile_product::<2, 1>(steps, tiles);
                for half in 0..2 {
                    for row in (0..s.rows).step_by(LINES) {
                        let mut from = [self.scores.cast_const(); TILE];
                        for r in 0..TILE {
                            from[r] = self.scores.add((half * TILE + r) * TILE + row);
                        }
                        let lines = S::transpose::<f32>(from);
                        for c in 0..LINES {
                            S::store(s.c.add((row + c) * s.ldc + column + half * TILE), lines[c]);
                        }
                    }
                }
            }
        }
    }
}

/// Adds the products of a pair of probabilities and pairs of values to the two chains of a step, in the order of
/// [`Simd::tile_product`].
///
/// # Safety
/// As [`Simd`].
#[inline(always)]
pub(super) unsafe fn add_pair<S: Simd>(chains: &mut [S::V; 2], probs: S::V, values: S::V) {
    // SAFETY: the caller's promise.
    unsafe {
        chains[0] = S::fma(S::shift_up_16(probs), S::shift_up_16(values), chains[0]);
        let (probs, values) = (S::and(probs, 0xffff_0000), S::and(values, 0xffff_0000));
        chains[1] = S::fma(probs, values, chains[1]);
    }
}
