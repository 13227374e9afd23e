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
pub struct Queries<K: Element, const N: usize, const M: usize> {
    /// The queries, rounded to `K`.
    pub rounded: [[[Left<K>; 2]; N]; M],
    /// Rounding residuals of the queries when keys are codes: they make scores as exact as with f32 queries.
    pub residual: [[[Left<K>; 2]; N]; M],
    /// Factor of the products of a row, not negative: the sign of the scale is the queries'.
    pub scale: [[f32; 2]; M],
    /// Bias added to the scaled products of a row.
    pub bias: [[f32; 2]; M],
}

/// Returns true if queries are multiplied as they are in memory.
#[device]
#[inline]
fn is_direct<const FORMAT: u32, const D: usize, const P: usize>(centered: bool) -> bool {
    is_copied(FORMAT, D as u32, P as u32) && !centered
}

/// The first element of a query row.
#[device]
fn query_start(tile: RowTile, params: &Attend, row: u32) -> u64 {
    tile.sequence.batch as u64 * params.q[0]
        + head_of(tile, params, row) as u64 * params.q[1]
        + (tile.sequence.q_start + row / params.group) as u64 * params.q[2]
}

/// No queries: products with them are 0.
#[device]
fn no_queries<K: Element, const N: usize, const M: usize>(scale: f32) -> Queries<K, N, M> {
    let none = Queries::<K, N, M> {
        rounded: [[[left_from::<K>(0.0, 0.0); 2]; N]; M],
        residual: [[[left_from::<K>(0.0, 0.0); 2]; N]; M],
        scale: [[scale; 2]; M],
        bias: [[0.0; 2]; M],
    };
    none
}

/// Queries as they are in memory; rows beyond the last are zeros.
#[device]
fn direct_queries<
    Q: Element,
    K: Element,
    const D: usize,
    const C: usize,
    const N: usize,
    const M: usize,
    const W: usize,
>(
    q: &Buffer<Q>,
    tile: RowTile,
    params: &Attend,
) -> Queries<K, N, M> {
    let mut queries = no_queries::<K, N, M>(params.scale.abs());
    let sign = select(params.scale < 0.0, -1.0, 1.0);
    let first = first_column::<C, W>() + 2 * matrix_pair();
    for m in 0..M {
        for h in 0..2usize {
            let row = lane_row::<M, W>(tile, m, h);
            if row < tile.rows {
                let start = query_start(tile, params, row);
                for i in 0..N {
                    let c = first + 8 * i as u32;
                    if C == D || c < D as u32 {
                        let x = q[start + c as u64].to_f32() * sign;
                        let y = q[start + c as u64 + 1].to_f32() * sign;
                        queries.rounded[m][i][h] = left_from::<K>(x, y);
                    }
                }
            }
        }
    }
    queries
}

/// A lane's coordinates of a query row, every 32nd; zeros beyond the last row.
#[device]
fn fetch_query<Q: Element, const D: usize>(
    q: &Buffer<Q>,
    tile: RowTile,
    params: &Attend,
    row: u32,
) -> [f32; 16] {
    let mut query = [0.0; 16];
    if row < tile.rows {
        let start = query_start(tile, params, row);
        for i in 0..(D + 31) / 32 {
            let c = 32 * i as u32 + simd_lane();
            if c < D as u32 {
                query[i] = q[start + c as u64].to_f32();
            }
        }
    }
    query
}

/// The first number of the row that SIMD group `part` of the team prepares, or rotates back.
#[device]
pub fn staged_start<const W: usize, const SR: usize, const LEN: usize>(part: u32) -> u32 {
    (SR as u32 * team_index::<W>() + part) * LEN as u32
}

/// Takes the lane's columns of a row that is staged from element `from` on.
#[device]
#[inline(always)]
fn take_query<
    K: Element,
    const FORMAT: u32,
    const D: usize,
    const C: usize,
    const P: usize,
    const N: usize,
    const M: usize,
    const W: usize,
>(
    queries: &mut Queries<K, N, M>,
    staged: &Shared<f32>,
    from: u32,
    m: usize,
    h: usize,
) {
    let first = first_column::<C, W>() + 2 * matrix_pair();
    for i in 0..N {
        let mut pair = [0.0; 2];
        for n in 0..2usize {
            let c = column_coordinate::<FORMAT, D, P>(first + (8 * i + n) as u32);
            if c < D as u32 {
                pair[n] = staged[from + c];
            }
        }
        queries.rounded[m][i][h] = left_from::<K>(pair[0], pair[1]);
        if is_codes(FORMAT) {
            let x = pair[0] - K::from_f32(pair[0]).to_f32();
            let y = pair[1] - K::from_f32(pair[1]).to_f32();
            queries.residual[m][i][h] = left_from::<K>(x, y);
        }
    }
}

/// Queries that are rotated and scaled as their keys ask for. The first `SR` SIMD groups of a team prepare a row each at a time, in
/// threadgroup memory: `staged` has `LEN` numbers for each of them, of which the last two are the factor and the bias of the row.
#[device]
fn prepared_queries<
    Q: Element,
    K: Element,
    const FORMAT: u32,
    const D: usize,
    const C: usize,
    const P: usize,
    const ORDER: u32,
    const N: usize,
    const M: usize,
    const W: usize,
    const SR: usize,
    const LEN: usize,
>(
    q: &Buffer<Q>,
    tile: RowTile,
    params: &Attend,
    memory: QueryMemory,
    staged: &mut Shared<f32>,
) -> Queries<K, N, M> {
    let mut queries = no_queries::<K, N, M>(0.0);
    let sign = select(params.scale < 0.0, -1.0, 1.0);
    let start = staged_start::<W, SR, LEN>(part_index::<W>());
    let own_row = tile.first + (16 * M) as u32 * team_index::<W>() + part_index::<W>();
    let mut next = fetch_query::<Q, D>(q, tile, params, own_row);
    for m in 0..M {
        for h in 0..2usize {
            // To compilers the number of turns is unknown: unrolled, the preparation would be most of the kernel.
            let mut turn = 0u32;
            while turn < 8 / SR as u32 {
                if SR == W || part_index::<W>() < SR as u32 {
                    for i in 0..(D + 31) / 32 {
                        let c = 32 * i as u32 + simd_lane();
                        if c < D as u32 {
                            staged[start + c] = next[i] * sign;
                        }
                    }
                    simd_barrier();
                    let following = (16 * m + 8 * h) as u32 + SR as u32 * (turn + 1);
                    next = fetch_query::<Q, D>(q, tile, params, own_row + following);
                    let query = prepare_query::<FORMAT, D, ORDER>(staged, start, memory, tile.kv_head);
                    if simd_lane() == 0 {
                        staged[start + LEN as u32 - 2] = query.unit * params.scale.abs();
                        staged[start + LEN as u32 - 1] = query.bias * params.scale.abs();
                    }
                }
                barrier();
                for part in 0..SR as u32 {
                    if matrix_row() == SR as u32 * turn + part {
                        let from = staged_start::<W, SR, LEN>(part);
                        take_query::<K, FORMAT, D, C, P, N, M, W>(&mut queries, staged, from, m, h);
                        queries.scale[m][h] = staged[from + LEN as u32 - 2];
                        queries.bias[m][h] = staged[from + LEN as u32 - 1];
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
    Q: Element,
    K: Element,
    const FORMAT: u32,
    const D: usize,
    const C: usize,
    const P: usize,
    const ORDER: u32,
    const N: usize,
    const M: usize,
    const W: usize,
    const SR: usize,
    const LEN: usize,
>(
    q: &Buffer<Q>,
    tile: RowTile,
    params: &Attend,
    memory: QueryMemory,
    staged: &mut Shared<f32>,
) -> Queries<K, N, M> {
    if is_direct::<FORMAT, D, P>(memory.centered) {
        return direct_queries::<Q, K, D, C, N, M, W>(q, tile, params);
    }
    prepared_queries::<Q, K, FORMAT, D, C, P, ORDER, N, M, W, SR, LEN>(q, tile, params, memory, staged)
}
