//! Left operands of a SIMD group's query rows, which stay in registers: `[m][i]` has rows from `16 m` and from `16 m + 8` on, and
//! columns of its part from `8 i` on.

use super::block::{column_coordinate, is_copied};
use super::pass::{first_column, lane_row, part_index, team_index};
use crate::kernels::attend::Attend;
use crate::kernels::formats::is_codes;
use crate::kernels::query::{QueryMemory, RowTile, head_of, prepare_query};
use flashtile_kernel::prelude::*;

/// Queries of a SIMD group, and the terms that make scores of their products.
#[device]
pub struct Queries<KOperand: Element, const K_PAIRS: usize, const ROW_TILES: usize> {
    /// The queries, rounded to `KOperand`.
    pub rounded: [[[Left<KOperand>; 2]; K_PAIRS]; ROW_TILES],
    /// Rounding residuals of the queries when keys are codes: they make scores as exact as with f32 queries.
    pub residual: [[[Left<KOperand>; 2]; K_PAIRS]; ROW_TILES],
    /// Factor of the products of a row, not negative: the sign of the scale is the queries'.
    pub scale: [[f32; 2]; ROW_TILES],
    /// Bias added to the scaled products of a row.
    pub bias: [[f32; 2]; ROW_TILES],
}

/// Returns true if queries are multiplied as they are in memory.
#[device]
#[inline]
fn is_direct<const K_FORMAT: u32, const HEAD_DIM: usize, const K_PAIR_WORDS: usize>(centered: bool) -> bool {
    is_copied(K_FORMAT, HEAD_DIM as u32, K_PAIR_WORDS as u32) && !is_codes(K_FORMAT) && !centered
}

/// The first element of a row of a tensor with these strides over batch entry, head and query, in elements.
#[device]
pub fn row_start(tile: RowTile, params: &Attend, strides: [u64; 3], row: u32) -> u64 {
    tile.sequence.batch as u64 * strides[0]
        + head_of(tile, params, row) as u64 * strides[1]
        + (tile.sequence.q_start + row / params.group) as u64 * strides[2]
}

/// No queries: products with them are 0.
#[device]
fn no_queries<KOperand: Element, const K_PAIRS: usize, const ROW_TILES: usize>(
    scale: f32,
) -> Queries<KOperand, K_PAIRS, ROW_TILES> {
    let none = Queries::<KOperand, K_PAIRS, ROW_TILES> {
        rounded: [[[left_from::<KOperand>(0.0, 0.0); 2]; K_PAIRS]; ROW_TILES],
        residual: [[[left_from::<KOperand>(0.0, 0.0); 2]; K_PAIRS]; ROW_TILES],
        scale: [[scale; 2]; ROW_TILES],
        bias: [[0.0; 2]; ROW_TILES],
    };
    none
}

/// A lane's pairs of the columns of its SIMD group, of the row from element `start` on, times `sign`; zeros beyond the row.
#[device]
#[inline(always)]
pub fn lefts_of_row<
    T: Element,
    Operand: Element,
    const DIM: usize,
    const COLUMNS: usize,
    const PAIRS: usize,
    const TEAM_SIMDS: usize,
>(
    memory: &Buffer<T>,
    start: u64,
    sign: f32,
) -> [Left<Operand>; PAIRS] {
    let mut lefts = [left_from::<Operand>(0.0, 0.0); PAIRS];
    let first = first_column::<COLUMNS, TEAM_SIMDS>() + 2 * matrix_pair();
    for i in 0..PAIRS {
        let c = first + 8 * i as u32;
        let mut pair = [0.0; 2];
        for n in 0..2usize {
            if COLUMNS == DIM || c + (n as u32) < DIM as u32 {
                pair[n] = memory[start + (c + n as u32) as u64].to_f32() * sign;
            }
        }
        lefts[i] = left_from::<Operand>(pair[0], pair[1]);
    }
    lefts
}

/// Left operands of rows as they are in memory, times `sign`; rows beyond the last are zeros.
#[device]
pub fn row_lefts<
    T: Element,
    Operand: Element,
    const DIM: usize,
    const COLUMNS: usize,
    const PAIRS: usize,
    const ROW_TILES: usize,
    const TEAM_SIMDS: usize,
>(
    memory: &Buffer<T>,
    strides: [u64; 3],
    tile: RowTile,
    params: &Attend,
    sign: f32,
) -> [[[Left<Operand>; 2]; PAIRS]; ROW_TILES] {
    let mut lefts = [[[left_from::<Operand>(0.0, 0.0); 2]; PAIRS]; ROW_TILES];
    for m in 0..ROW_TILES {
        for h in 0..2usize {
            let row = lane_row::<ROW_TILES, TEAM_SIMDS>(tile, m, h);
            if row < tile.rows {
                let start = row_start(tile, params, strides, row);
                let row_lefts =
                    lefts_of_row::<T, Operand, DIM, COLUMNS, PAIRS, TEAM_SIMDS>(memory, start, sign);
                for i in 0..PAIRS {
                    lefts[m][i][h] = row_lefts[i];
                }
            }
        }
    }
    lefts
}

/// Queries as they are in memory; rows beyond the last are zeros.
#[device]
fn direct_queries<
    QElement: Element,
    KOperand: Element,
    const HEAD_DIM: usize,
    const K_COLUMNS: usize,
    const K_PAIRS: usize,
    const ROW_TILES: usize,
    const TEAM_SIMDS: usize,
>(
    q: &Buffer<QElement>,
    tile: RowTile,
    params: &Attend,
) -> Queries<KOperand, K_PAIRS, ROW_TILES> {
    let mut queries = no_queries::<KOperand, K_PAIRS, ROW_TILES>(params.scale.abs());
    let sign = select(params.scale < 0.0, -1.0, 1.0);
    queries.rounded = row_lefts::<QElement, KOperand, HEAD_DIM, K_COLUMNS, K_PAIRS, ROW_TILES, TEAM_SIMDS>(
        q, params.q, tile, params, sign,
    );
    queries
}

/// A lane's coordinates of a query row, every 32nd; zeros beyond the last row.
#[device]
fn fetch_query<QElement: Element, const HEAD_DIM: usize>(
    q: &Buffer<QElement>,
    tile: RowTile,
    params: &Attend,
    row: u32,
) -> [f32; 16] {
    let mut query = [0.0; 16];
    if row < tile.rows {
        let start = row_start(tile, params, params.q, row);
        for i in 0..(HEAD_DIM + 31) / 32 {
            let c = 32 * i as u32 + simd_lane();
            if c < HEAD_DIM as u32 {
                query[i] = q[start + c as u64].to_f32();
            }
        }
    }
    query
}

/// The first number of the row that SIMD group `part` of the team prepares, or rotates back.
#[device]
pub fn staged_start<const TEAM_SIMDS: usize, const STAGED_ROWS: usize, const STAGED_LEN: usize>(
    part: u32,
) -> u32 {
    (STAGED_ROWS as u32 * team_index::<TEAM_SIMDS>() + part) * STAGED_LEN as u32
}

/// Takes the lane's columns of a row that is staged from element `from` on.
#[device]
#[inline(always)]
fn take_query<
    KOperand: Element,
    const K_FORMAT: u32,
    const HEAD_DIM: usize,
    const K_COLUMNS: usize,
    const K_PAIR_WORDS: usize,
    const K_PAIRS: usize,
    const ROW_TILES: usize,
    const TEAM_SIMDS: usize,
>(
    queries: &mut Queries<KOperand, K_PAIRS, ROW_TILES>,
    staged: &Shared<f32>,
    from: u32,
    m: usize,
    h: usize,
) {
    let first = first_column::<K_COLUMNS, TEAM_SIMDS>() + 2 * matrix_pair();
    for i in 0..K_PAIRS {
        let mut pair = [0.0; 2];
        for n in 0..2usize {
            let c = column_coordinate::<K_FORMAT, HEAD_DIM, K_PAIR_WORDS>(first + (8 * i + n) as u32);
            if c < HEAD_DIM as u32 {
                pair[n] = staged[from + c];
            }
        }
        queries.rounded[m][i][h] = left_from::<KOperand>(pair[0], pair[1]);
        if is_codes(K_FORMAT) {
            let x = pair[0] - KOperand::from_f32(pair[0]).to_f32();
            let y = pair[1] - KOperand::from_f32(pair[1]).to_f32();
            queries.residual[m][i][h] = left_from::<KOperand>(x, y);
        }
    }
}

/// Queries that are rotated and scaled as their keys ask for. The first `STAGED_ROWS` SIMD groups of a team prepare a row each at a time, in
/// threadgroup memory: `staged` has `STAGED_LEN` numbers for each of them, of which the last two are the factor and the bias of the row.
#[device]
fn prepared_queries<
    QElement: Element,
    KOperand: Element,
    const K_FORMAT: u32,
    const HEAD_DIM: usize,
    const K_COLUMNS: usize,
    const K_PAIR_WORDS: usize,
    const K_ORDER: u32,
    const K_PAIRS: usize,
    const ROW_TILES: usize,
    const TEAM_SIMDS: usize,
    const STAGED_ROWS: usize,
    const STAGED_LEN: usize,
>(
    q: &Buffer<QElement>,
    tile: RowTile,
    params: &Attend,
    memory: QueryMemory,
    staged: &mut Shared<f32>,
) -> Queries<KOperand, K_PAIRS, ROW_TILES> {
    let mut queries = no_queries::<KOperand, K_PAIRS, ROW_TILES>(0.0);
    let sign = select(params.scale < 0.0, -1.0, 1.0);
    let start = staged_start::<TEAM_SIMDS, STAGED_ROWS, STAGED_LEN>(part_index::<TEAM_SIMDS>());
    let own_row =
        tile.first + (16 * ROW_TILES) as u32 * team_index::<TEAM_SIMDS>() + part_index::<TEAM_SIMDS>();
    let mut next = fetch_query::<QElement, HEAD_DIM>(q, tile, params, own_row);
    for m in 0..ROW_TILES {
        for h in 0..2usize {
            // To compilers the number of turns is unknown: unrolled, the preparation would be most of the kernel.
            let mut turn = 0u32;
            while turn < 8 / STAGED_ROWS as u32 {
                if STAGED_ROWS == TEAM_SIMDS || part_index::<TEAM_SIMDS>() < STAGED_ROWS as u32 {
                    for i in 0..(HEAD_DIM + 31) / 32 {
                        let c = 32 * i as u32 + simd_lane();
                        if c < HEAD_DIM as u32 {
                            staged[start + c] = next[i] * sign;
                        }
                    }
                    simd_barrier();
                    let following = (16 * m + 8 * h) as u32 + STAGED_ROWS as u32 * (turn + 1);
                    next = fetch_query::<QElement, HEAD_DIM>(q, tile, params, own_row + following);
                    let query =
                        prepare_query::<K_FORMAT, HEAD_DIM, K_ORDER>(staged, start, memory, tile.kv_head);
                    if simd_lane() == 0 {
                        staged[start + STAGED_LEN as u32 - 2] = query.unit * params.scale.abs();
                        staged[start + STAGED_LEN as u32 - 1] = query.bias * params.scale.abs();
                    }
                }
                barrier();
                for part in 0..STAGED_ROWS as u32 {
                    if matrix_row() == STAGED_ROWS as u32 * turn + part {
                        let from = staged_start::<TEAM_SIMDS, STAGED_ROWS, STAGED_LEN>(part);
                        take_query::<
                            KOperand,
                            K_FORMAT,
                            HEAD_DIM,
                            K_COLUMNS,
                            K_PAIR_WORDS,
                            K_PAIRS,
                            ROW_TILES,
                            TEAM_SIMDS,
                        >(&mut queries, staged, from, m, h);
                        queries.scale[m][h] = staged[from + STAGED_LEN as u32 - 2];
                        queries.bias[m][h] = staged[from + STAGED_LEN as u32 - 1];
                    }
                }
                barrier();
                turn += 1;
            }
        }
    }
    queries
}

/// The queries of a SIMD group: as they are where keys are, otherwise prepared in threadgroup memory.
#[device]
pub fn queries_of<
    QElement: Element,
    KOperand: Element,
    const K_FORMAT: u32,
    const HEAD_DIM: usize,
    const K_COLUMNS: usize,
    const K_PAIR_WORDS: usize,
    const K_ORDER: u32,
    const K_PAIRS: usize,
    const ROW_TILES: usize,
    const TEAM_SIMDS: usize,
    const STAGED_ROWS: usize,
    const STAGED_LEN: usize,
>(
    q: &Buffer<QElement>,
    tile: RowTile,
    params: &Attend,
    memory: QueryMemory,
    staged: &mut Shared<f32>,
) -> Queries<KOperand, K_PAIRS, ROW_TILES> {
    if is_direct::<K_FORMAT, HEAD_DIM, K_PAIR_WORDS>(memory.centered) {
        return direct_queries::<QElement, KOperand, HEAD_DIM, K_COLUMNS, K_PAIRS, ROW_TILES, TEAM_SIMDS>(
            q, tile, params,
        );
    }
    prepared_queries::<
        QElement,
        KOperand,
        K_FORMAT,
        HEAD_DIM,
        K_COLUMNS,
        K_PAIR_WORDS,
        K_ORDER,
        K_PAIRS,
        ROW_TILES,
        TEAM_SIMDS,
        STAGED_ROWS,
        STAGED_LEN,
    >(q, tile, params, memory, staged)
}
