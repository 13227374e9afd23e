//! Classification of a materialised mask by tile, so that tiles it hides are skipped and tiles it leaves alone are not read
//! again.

#![allow(unsafe_code)]

use crate::plan::MaskClasses;
use flashtile_core::dtype::{Dtype, MaskKind};
use flashtile_core::tensor::MaskRow;
use flashtile_core::tensor::MaskView;
use rayon::prelude::*;
use std::ops::Range;

/// What a mask does to a tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Class {
    /// Hides every key.
    Hidden,
    /// Leaves every score as it is.
    Neutral,
    /// Anything else.
    Mixed,
}

impl Class {
    pub(crate) fn and(self, other: Self) -> Self {
        if self == other { self } else { Self::Mixed }
    }
}

/// A mask and the class of each of its tiles: `[planes][query tiles][key blocks]`, of the mask's own axes.
#[derive(Clone, Copy)]
pub(crate) struct MaskTable<'a> {
    pub(crate) view: MaskView<'a>,
    classes: &'a [Class],
    tile_q: usize,
    q_tiles: usize,
    k_blocks: usize,
}

impl MaskTable<'_> {
    /// Class of a tile: query positions and heads of one sequence, one key block.
    pub(crate) fn class(
        &self,
        sequence: usize,
        heads: Range<usize>,
        positions: Range<usize>,
        block: usize,
    ) -> Class {
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
        all.map(|at| self.classes[at]).reduce(Class::and).unwrap_or(Class::Mixed)
    }
}

/// Which of the mask's elements hide their key, and which are neutral, told by their bits.
fn row_class<T: Copy>(row: &[T], hides: impl Fn(T) -> bool, neutral: impl Fn(T) -> bool) -> Class {
    // Counted rather than searched: the loop vectorises.
    let hidden = row.iter().filter(|&&x| hides(x)).count();
    let plain = row.iter().filter(|&&x| neutral(x)).count();
    match row.len() {
        n if hidden == n => Class::Hidden,
        n if plain == n => Class::Neutral,
        _ => Class::Mixed,
    }
}

/// # Safety
/// Elements `keys` of the row exist.
unsafe fn span_class(row: MaskRow, keys: Range<usize>) -> Class {
    // SAFETY: the caller's promise; MaskRow holds pointers aligned to their element type.
    unsafe {
        match row.kind {
            MaskKind::Bool => {
                let span = std::slice::from_raw_parts(row.ptr.add(keys.start), keys.len());
                row_class(span, |x| x == 0, |x| x != 0)
            }
            MaskKind::Additive(Dtype::F32) => {
                let span = std::slice::from_raw_parts(row.ptr.cast::<u32>().add(keys.start), keys.len());
                row_class(span, |x| x == 0xff80_0000, |x| x & 0x7fff_ffff == 0)
            }
            MaskKind::Additive(dtype) => {
                let minus_infinity = if dtype == Dtype::F16 { 0xfc00 } else { 0xff80 };
                let span = std::slice::from_raw_parts(row.ptr.cast::<u16>().add(keys.start), keys.len());
                row_class(span, |x| x == minus_infinity, |x| x & 0x7fff == 0)
            }
        }
    }
}

/// Reads the whole mask once, on the threads of the pool or, if `alone`, on this one.
pub(crate) fn classify<'a>(
    view: MaskView<'a>,
    sizes: &MaskClasses,
    block_k: usize,
    memory: &'a mut [u8],
    alone: bool,
) -> MaskTable<'a> {
    let [batches, heads, queries, keys] = view.shape();
    let (q_tiles, k_blocks) = (queries.div_ceil(sizes.tile_q), keys.div_ceil(block_k));
    let memory = &mut memory[..batches * heads * q_tiles * k_blocks];
    if k_blocks > 0 && q_tiles > 0 {
        let classify_tile = |(index, classes): (usize, &mut [u8])| {
            let (plane, tile) = (index / q_tiles, index % q_tiles);
            let rows = tile * sizes.tile_q..((tile + 1) * sizes.tile_q).min(queries);
            for (block, class) in classes.iter_mut().enumerate() {
                let span = block * block_k..((block + 1) * block_k).min(keys);
                let of_row = |i: usize| {
                    // SAFETY: plane, row and keys are inside the mask's own axes, which the view's constructor checked.
                    unsafe { span_class(view.row(plane / heads, plane % heads, i), span.clone()) }
                };
                *class = rows.clone().map(of_row).reduce(Class::and).unwrap_or(Class::Mixed) as u8;
            }
        };
        if alone {
            memory.chunks_mut(k_blocks).enumerate().for_each(classify_tile);
        } else {
            memory.par_chunks_mut(k_blocks).enumerate().for_each(classify_tile);
        }
    }
    // SAFETY: every byte was just written from a Class, which is one byte.
    let classes = unsafe { std::slice::from_raw_parts(memory.as_ptr().cast(), memory.len()) };
    MaskTable { view, classes, tile_q: sizes.tile_q, q_tiles, k_blocks }
}
