//! Products by a matrix unit: 16 x 16 tiles of f32 over pairs of bf16.
//!
//! Operands are packed as [`Bf16Pairs`](super::bf16_pairs::Bf16Pairs) packs them: a packed row of queries or probabilities is a row of a
//! tile of `A`, a panel of keys or a row of values one of `B`. Depth and keys are whole steps of a tile.

#![allow(unsafe_code)]

use super::Products;
use super::bf16_pairs::{PairLanes, copy_query, exp_row_to_pairs, interleave_values};
use crate::kernels::shared::mat::{Mat, MatMut};
use crate::kernels::shared::matrix_unit::MatrixUnitGuard;
use crate::kernels::shared::operands::Operands;
use crate::kernels::shared::pack::{HeadRows, KeyVector};
use crate::kernels::shared::stream::Scores;
use crate::simd::{Elem, LINES, LaneFormat, Simd};
use flashtile_core::dtype::Dtype;
use std::ops::Range;

/// Rows and columns of a tile of `C`, and pairs of bf16 of one step of its product.
pub(crate) const TILE: usize = 16;

/// Independent products in a round of [`MatrixUnit::product_loop`].
pub(crate) const TILE_CHAINS: usize = 4;

/// Keys of a step of `p . v`.
pub(crate) const KEYS: usize = 2 * TILE;

/// Row-major matrices of a product of tiles: `A` and `B` of pairs of bf16 along the depth, `C` of f32; leading dimensions in bytes.
#[derive(Clone, Copy)]
pub(crate) struct TileOperands {
    /// The first row of each row of tiles; there may be only one.
    pub(crate) a: [*const u8; 2],
    pub(crate) lda: usize,
    pub(crate) b: *const u8,
    pub(crate) ldb: usize,
    pub(crate) c: *mut f32,
    pub(crate) ldc: usize,
    /// True if the sums continue from the contents of `c`.
    pub(crate) resume: bool,
}

/// Vectors of [`TILE`] lanes, with a matrix unit.
///
/// # Safety
/// For every method: as [`Simd`]. Between [`MatrixUnit::configure`] and [`MatrixUnit::release`] of a thread, nothing
/// else configures its unit.
pub(crate) trait MatrixUnit: PairLanes {
    /// Lets the thread use its matrix unit.
    unsafe fn configure();
    /// Releases the state of the matrix unit.
    unsafe fn release();
    /// `C[16 * M, 16 * N] = A * B` over `steps` times [`TILE`] pairs, `M` and `N` 1 or 2. Each element of `C` adds one sum for each step:
    /// the chain over the first elements of the step's pairs, plus the chain over the second.
    ///
    /// # Safety
    /// - The unit is configured.
    /// - `steps` is not 0.
    /// - Each of the first `M` rows of tiles `a` is valid for 16 rows of `64 * steps` bytes.
    /// - `b` is valid for `16 * steps` rows of `64 * N` bytes, `c` for `16 * M` rows of `64 * N` bytes.
    unsafe fn product<const M: usize, const N: usize>(steps: usize, tiles: TileOperands);
    /// `rounds` times [`TILE_CHAINS`] independent products of tiles in registers. The unit is configured.
    unsafe fn product_loop(rounds: u64);
}

/// Tiles of pairs of bf16.
#[derive(Clone, Copy)]
pub(crate) struct Amx;

/// The sum of one vector of `p . v` in the order of [`MatrixUnit::product`].
#[derive(Clone, Copy)]
pub(crate) struct TileChain<V> {
    /// The sum over whole steps.
    sum: V,
    /// The chains over the first and over the second elements of the pairs of the step that is not whole yet.
    halves: [V; 2],
}

impl<S: MatrixUnit> Products<S> for Amx {
    const PER_F32: usize = 2;
    const DEPTH_STEP: usize = TILE;
    const KEY_STEP: usize = KEYS;
    const SCALES_QUERIES: bool = false;
    const PEAK_ROUND: usize = TILE_CHAINS * TILE * TILE * 2 * TILE;
    type Chain = TileChain<S::V>;

    #[inline(always)]
    unsafe fn configure() -> MatrixUnitGuard {
        unsafe fn release<S: MatrixUnit>() {
            // SAFETY: the unit is configured until its guard is dropped.
            unsafe { S::release() }
        }
        // SAFETY: the caller's contract.
        unsafe {
            S::configure();
            MatrixUnitGuard::new(release::<S>)
        }
    }
    #[inline(always)]
    fn scale_of_scores(scale: f32) -> f32 {
        scale
    }
    #[inline(always)]
    unsafe fn pack_query(_: Dtype, src: *const u8, head_dim: usize, _: f32, dst: *mut f32) {
        // SAFETY: the caller's contract.
        unsafe { copy_query(src, head_dim, 2 * TILE, dst) }
    }
    #[inline(always)]
    unsafe fn set_stream_queries(q: Mat, memory: *mut f32) {
        // SAFETY: the caller's contract.
        unsafe { StreamMemory::new(memory, q.cols()).set_queries::<S>(q) }
    }
    /// The memory of `A` and `C` has whole tiles of rows, and the depth is a multiple of [`TILE`].
    #[inline(always)]
    unsafe fn multiply(operands: Operands<Mat>) {
        // SAFETY: the caller's contract.
        unsafe { multiply::<S>(operands) }
    }
    /// The rows of `C` are whole tiles.
    #[inline(always)]
    unsafe fn multiply_transposed(operands: Operands<Mat>) {
        // SAFETY: the caller's contract.
        unsafe { multiply_transposed::<S>(operands) }
    }
    #[inline(always)]
    unsafe fn stream_scores<R: LaneFormat>(
        keys: HeadRows<'_>,
        first: usize,
        columns: &Range<usize>,
        scores: Scores,
        memory: *mut f32,
    ) {
        // SAFETY: the caller's contract.
        unsafe { StreamMemory::new(memory, scores.q.cols()).scores::<S>(keys, first, columns, scores) }
    }
    #[inline(always)]
    unsafe fn pack_values<E: Elem>(src: HeadRows<'_>, first: usize, keys: Range<usize>, dst: MatMut) {
        // SAFETY: the caller's contract.
        unsafe { interleave_values::<S>(src, first, keys, KEYS, dst) }
    }
    #[inline(always)]
    unsafe fn exp_row(row: *mut f32, columns: Range<usize>, scale: f32, neg_max: S::V) -> S::V {
        // SAFETY: the caller's contract.
        unsafe { exp_row_to_pairs::<S>(row, columns, scale, neg_max) }
    }
    #[inline(always)]
    unsafe fn chain_from(start: S::V) -> TileChain<S::V> {
        // SAFETY: the caller's contract.
        let zero = unsafe { S::splat(0.0) };
        TileChain { sum: start, halves: [zero; 2] }
    }
    #[inline(always)]
    unsafe fn add_to_chain(chain: &mut TileChain<S::V>, at: usize, probs: S::V, values: S::V) {
        // SAFETY: the caller's contract.
        unsafe {
            let halves = &mut chain.halves;
            halves[0] = S::fma(S::shift_up_16(probs), S::shift_up_16(values), halves[0]);
            let (probs, values) = (S::and(probs, 0xffff_0000), S::and(values, 0xffff_0000));
            halves[1] = S::fma(probs, values, halves[1]);
            if (at + 1).is_multiple_of(TILE) {
                chain.sum = S::add(chain.sum, S::add(halves[0], halves[1]));
                *halves = [S::splat(0.0); 2];
            }
        }
    }
    #[inline(always)]
    unsafe fn chain_sum(chain: TileChain<S::V>) -> S::V {
        chain.sum
    }
    #[inline(always)]
    unsafe fn peak_loop(rounds: u64) -> f32 {
        // SAFETY: the caller's contract.
        unsafe {
            let _unit = <Self as Products<S>>::configure();
            S::product_loop(rounds);
        }
        0.0
    }
}

/// [`Products::multiply`], two by two tiles at a time.
///
/// # Safety
/// The contract of [`Products::multiply`] holds, and the memory of `A` and `C` has whole tiles of rows.
#[inline(always)]
unsafe fn multiply<S: MatrixUnit>(m: Operands<Mat>) {
    const { assert!(S::LANES == TILE) };
    debug_assert!(m.a.cols().is_multiple_of(TILE) && m.c.cols().is_multiple_of(TILE));
    debug_assert!(m.c.rows().next_multiple_of(TILE) <= m.a.rows());
    let (steps, vectors) = (m.a.cols() / TILE, m.c.cols() / TILE);
    let at = |r: usize, n: usize| {
        // SAFETY: the caller's contract.
        let (a, b, c) = unsafe { (m.a.at(r * TILE, 0), m.b.at(0, n * TILE), m.c.at(0, n * TILE)) };
        TileOperands {
            a: [a.cast(), a.wrapping_add(TILE * m.a.ld()).cast()],
            lda: 4 * m.a.ld(),
            b: b.cast(),
            ldb: 4 * m.b.ld(),
            // The last tile of rows may begin past the rows that are asked for.
            c: c.wrapping_add(r * TILE * m.c.ld()),
            ldc: 4 * m.c.ld(),
            resume: m.resume,
        }
    };
    let rows = m.c.rows().div_ceil(TILE);
    // SAFETY: the caller's contract.
    unsafe {
        for r in (0..rows).step_by(2) {
            for n in (0..vectors).step_by(2) {
                match (rows - r, vectors - n) {
                    (1, 1) => S::product::<1, 1>(steps, at(r, n)),
                    (1, _) => S::product::<1, 2>(steps, at(r, n)),
                    (_, 1) => S::product::<2, 1>(steps, at(r, n)),
                    _ => S::product::<2, 2>(steps, at(r, n)),
                }
            }
        }
    }
}

/// Steps of the depth that [`multiply_transposed`] transposes at a time.
const TRANSPOSED_STEPS: usize = 4;

/// [`Products::multiply_transposed`]: rows of tiles of `A` are transposed to a buffer, a few steps of the depth at a time.
///
/// # Safety
/// The contract of [`Products::multiply_transposed`] holds, and `C` has whole tiles of rows.
#[inline(always)]
unsafe fn multiply_transposed<S: MatrixUnit>(m: Operands<Mat>) {
    const WIDTH: usize = TRANSPOSED_STEPS * TILE;
    debug_assert!(m.a.rows().is_multiple_of(TILE) && m.c.rows().is_multiple_of(TILE));
    let mut buffer = [0.0f32; 2 * TILE * WIDTH];
    for row in (0..m.c.rows()).step_by(2 * TILE) {
        let rows = (m.c.rows() - row).min(2 * TILE);
        for first in (0..m.a.rows()).step_by(WIDTH) {
            let depth = (m.a.rows() - first).min(WIDTH);
            // SAFETY: the caller's contract; the buffer holds two tiles of rows of WIDTH.
            unsafe {
                for (r, k) in
                    (0..rows).step_by(LINES).flat_map(|r| (0..depth).step_by(TILE).map(move |k| (r, k)))
                {
                    let mut from = [m.a.at(0, 0); TILE];
                    for i in 0..TILE {
                        from[i] = m.a.at(first + k + i, row + r);
                    }
                    let lines = S::transpose::<f32>(from);
                    for c in 0..LINES {
                        S::store(buffer.as_mut_ptr().add((r + c) * WIDTH + k), lines[c]);
                    }
                }
                multiply::<S>(Operands {
                    a: Mat::new(buffer.as_ptr(), WIDTH, 2 * TILE, depth),
                    b: m.b.from(first, 0).first(depth, m.b.cols()),
                    c: m.c.from(row, 0).first(rows, m.c.cols()),
                    resume: m.resume || first > 0,
                });
            }
        }
    }
}

/// Memory of a task of few rows, in f32: transposed queries `[depth][TILE]`; scores of [`KEYS`] keys `[KEYS][TILE]`; rows of keys that
/// cannot be used in place, `[KEYS][depth]`.
#[derive(Clone, Copy)]
struct StreamMemory {
    queries: *mut f32,
    scores: *mut f32,
    keys: *mut f32,
    depth: usize,
}

impl StreamMemory {
    /// Takes `depth * (TILE + KEYS) + KEYS * TILE` elements from `memory`.
    fn new(memory: *mut f32, depth: usize) -> Self {
        let queries = memory;
        let scores = queries.wrapping_add(depth * TILE);
        Self { queries, scores, keys: scores.wrapping_add(KEYS * TILE), depth }
    }

    /// Transposes the first [`TILE`] packed queries.
    ///
    /// # Safety
    /// The contract of [`Simd`] holds, the memory is valid, and the queries are packed.
    #[inline(always)]
    unsafe fn set_queries<S: Simd>(&self, q: Mat) {
        for d in (0..self.depth).step_by(LINES) {
            // SAFETY: the caller's contract; the depth is a multiple of the lines.
            unsafe {
                let mut rows = [q.at(0, 0); TILE];
                for r in 0..TILE {
                    rows[r] = q.at(r, d);
                }
                let lines = S::transpose::<f32>(rows);
                for c in 0..LINES {
                    S::store(self.queries.add((d + c) * TILE), lines[c]);
                }
            }
        }
    }

    /// Scores of at most [`TILE`] rows and keys `first + columns`, as [`Products::stream_scores`]: the product has keys for rows and
    /// queries for columns, so that keys are loaded into tiles without a copy.
    ///
    /// # Safety
    /// As [`Products::stream_scores`], after [`StreamMemory::set_queries`].
    #[inline(always)]
    unsafe fn scores<S: MatrixUnit>(
        &self,
        src: HeadRows<'_>,
        first: usize,
        columns: &Range<usize>,
        s: Scores,
    ) {
        let row_bytes = src.row_bytes();
        let steps = self.depth / TILE;
        for column in (columns.start / KEYS * KEYS..columns.end).step_by(KEYS) {
            // SAFETY: the caller's contract.
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
                // Long runs are not prefetched while tiles are loaded from them: the hardware follows them by itself, and a burst of
                // requests would only delay it. It does not follow pages.
                for (run, at) in runs.into_iter().zip(halves) {
                    if (TILE..KEYS).contains(&run.rows) {
                        let next = first + at + src.distance();
                        src.request::<S>(next..next + TILE);
                    }
                }
                let copied =
                    [self.keys.cast_const().cast(), self.keys.add(TILE * self.depth).cast_const().cast()];
                let tiles = TileOperands {
                    a: if in_place { [runs[0].start, runs[1].start] } else { copied },
                    lda: if in_place { src.row_stride() } else { 4 * self.depth },
                    b: self.queries.cast_const().cast(),
                    ldb: 4 * TILE,
                    c: self.scores,
                    ldc: 4 * TILE,
                    resume: false,
                };
                S::product::<2, 1>(steps, tiles);
                for half in 0..2 {
                    for row in (0..s.rows).step_by(LINES) {
                        let mut from = [self.scores.cast_const(); TILE];
                        for r in 0..TILE {
                            from[r] = self.scores.add((half * TILE + r) * TILE + row);
                        }
                        let lines = S::transpose::<f32>(from);
                        for c in 0..LINES {
                            S::store(s.c.at(row + c, column + half * TILE), lines[c]);
                        }
                    }
                }
            }
        }
    }
}
