//! A pre-pass over a materialised mask: tiles that it hides are skipped, and tiles that it leaves alone are not read again.

#![allow(unsafe_code)]

use crate::plan::MaskTileShape;
use flashtile_core::dtype::{Dtype, MaskKind};
use flashtile_core::tensor::MaskRow;
use flashtile_core::tensor::MaskView;
use rayon::prelude::*;
use std::ops::Range;

/// The effect of a mask on the scores of a tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum MaskTile {
    /// Hides every key: the tile is skipped.
    Skip,
    /// Leaves every score as it is: the tile is computed without the mask.
    Full,
    /// Anything else: the tile is computed with the mask.
    Partial,
}

/// Elements that are judged together: enough for whole vectors, few enough that a dense bias is told from the first of them.
const CHUNK: usize = 64;

impl MaskTile {
    pub(crate) fn and(self, other: Self) -> Self {
        if self == other { self } else { Self::Partial }
    }

    /// The effect of several masks together; stops at the first that decides it.
    fn of_all(mut tiles: impl Iterator<Item = Self>) -> Self {
        match tiles.next() {
            Some(first) if first != Self::Partial && tiles.all(|tile| tile == first) => first,
            _ => Self::Partial,
        }
    }
}

/// A mask and its tiles `[planes][query tiles][key blocks]`, over the axes of the mask itself: a broadcast axis has one.
#[derive(Clone, Copy)]
pub(crate) struct MaskTable<'a> {
    pub(crate) view: MaskView<'a>,
    mask_tiles: &'a [MaskTile],
    tile_q: usize,
    q_tiles: usize,
    k_blocks: usize,
}

impl MaskTable<'_> {
    /// The mask over some query positions and heads of one sequence and one block of keys.
    pub(crate) fn tile(
        &self,
        sequence: usize,
        heads: Range<usize>,
        positions: Range<usize>,
        block: usize,
    ) -> MaskTile {
        let [batches, mask_heads, queries, keys] = self.view.shape();
        let plane = if batches == 1 { 0 } else { sequence } * mask_heads;
        let heads = if mask_heads == 1 { 0..1 } else { heads };
        let tiles = if queries == 1 {
            0..1
        } else {
            positions.start / self.tile_q..positions.end.div_ceil(self.tile_q)
        };
        let block = if keys == 1 { 0 } else { block };
        let all = heads.flat_map(|h| {
            tiles.clone().map(move |t| ((plane + h) * self.q_tiles + t) * self.k_blocks + block)
        });
        MaskTile::of_all(all.map(|at| self.mask_tiles[at]))
    }
}

/// Requests the mask over some keys of a row into the second-level cache. Rows of a mask lie far apart, which hardware does not follow.
pub(crate) fn prefetch(row: MaskRow<'_>, keys: Range<usize>) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        const LINE: usize = 64;
        let bytes = match row.kind() {
            MaskKind::Bool => 1,
            MaskKind::Additive(dtype) => dtype.bytes(),
        };
        let (start, end) = (row.step() * keys.start * bytes, row.step() * keys.end * bytes);
        for at in (start..end).step_by(LINE) {
            // SAFETY: a prefetch reads no memory; every x86-64 processor has the instruction.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(row.ptr().wrapping_add(at).cast()) }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (row, keys);
}

/// The mask over one row of a tile; `hides` and `neutral` look at the bits of an element.
fn row_tile<T: Copy>(row: &[T], hides: impl Fn(T) -> bool, neutral: impl Fn(T) -> bool) -> MaskTile {
    // Counting vectorises, a search that stops at any element does not.
    MaskTile::of_all(row.chunks(CHUNK).map(|chunk| {
        let hidden = chunk.iter().filter(|&&x| hides(x)).count();
        let plain = chunk.iter().filter(|&&x| neutral(x)).count();
        match chunk.len() {
            n if hidden == n => MaskTile::Skip,
            n if plain == n => MaskTile::Full,
            _ => MaskTile::Partial,
        }
    }))
}

/// The mask over some keys of a row: one element says it where the keys are broadcast.
///
/// # Safety
/// The row has the element of each of the keys.
unsafe fn span_tile(row: MaskRow<'_>, keys: Range<usize>) -> MaskTile {
    let keys = if row.step() == 0 { 0..keys.len().min(1) } else { keys };
    // SAFETY: the caller's contract; MaskRow holds pointers aligned to their element type.
    unsafe {
        match row.kind() {
            MaskKind::Bool => {
                let span = std::slice::from_raw_parts(row.ptr().add(keys.start), keys.len());
                row_tile(span, |x| x == 0, |x| x != 0)
            }
            MaskKind::Additive(Dtype::F32) => {
                let span = std::slice::from_raw_parts(row.ptr().cast::<u32>().add(keys.start), keys.len());
                row_tile(span, |x| x == 0xff80_0000, |x| x & 0x7fff_ffff == 0)
            }
            MaskKind::Additive(dtype) => {
                let minus_infinity = if dtype == Dtype::F16 { 0xfc00 } else { 0xff80 };
                let span = std::slice::from_raw_parts(row.ptr().cast::<u16>().add(keys.start), keys.len());
                row_tile(span, |x| x == minus_infinity, |x| x & 0x7fff == 0)
            }
        }
    }
}

/// Fills `memory` with the tiles of a mask, on the threads of the pool or, if `alone`, on this one. Reads each tile as far as it takes to
/// judge it: whole where it is skipped or full, and its first elements where it is a dense bias.
pub(crate) fn mask_tiles<'a>(
    view: MaskView<'a>,
    sizes: &MaskTileShape,
    block_k: usize,
    memory: &'a mut [u8],
    alone: bool,
) -> MaskTable<'a> {
    let [batches, heads, queries, keys] = view.shape();
    let (q_tiles, k_blocks) = (queries.div_ceil(sizes.tile_q), keys.div_ceil(block_k));
    let memory = &mut memory[..batches * heads * q_tiles * k_blocks];
    if k_blocks > 0 && q_tiles > 0 {
        let fill_row = |(index, mask_tiles): (usize, &mut [u8])| {
            let (plane, tile) = (index / q_tiles, index % q_tiles);
            let rows = tile * sizes.tile_q..((tile + 1) * sizes.tile_q).min(queries);
            for (block, tile) in mask_tiles.iter_mut().enumerate() {
                let span = block * block_k..((block + 1) * block_k).min(keys);
                let of_row = |i: usize| {
                    // SAFETY: plane, row and keys are inside the mask's own axes, which the view's constructor checked.
                    unsafe { span_tile(view.row(plane / heads, plane % heads, i), span.clone()) }
                };
                *tile = MaskTile::of_all(rows.clone().map(of_row)) as u8;
            }
        };
        if alone {
            memory.chunks_mut(k_blocks).enumerate().for_each(fill_row);
        } else {
            memory.par_chunks_mut(k_blocks).enumerate().for_each(fill_row);
        }
    }
    // SAFETY: every byte was just written from a MaskTile, which is one byte.
    let mask_tiles = unsafe { std::slice::from_raw_parts(memory.as_ptr().cast(), memory.len()) };
    MaskTable { view, mask_tiles, tile_q: sizes.tile_q, q_tiles, k_blocks }
}
