//! The stream of blocks of keys, with the scales of their values, which multiply probabilities before the values themselves arrive.

use super::block::{
    BlockMemory, BlockWords, Codes, ROW_PADDING, fetch_block, fetch_scales, no_words, store_block,
};
use super::pass::PrefillPass;
use crate::kernels::formats::is_mlx;
use crate::kernels::nibbles::{fill_nibbles, uses_nibbles};
use crate::kernels::rows::has_nonfinite;
use flashtile_kernel::prelude::*;

/// A block of keys, on its way from memory, with the scales of its values.
#[device]
pub struct NextBlock<const L: usize, const R: usize> {
    /// Words of the keys.
    pub keys: BlockWords<L, R>,
    /// Words of the scales of keys and of values.
    pub scales: [[u32; 2]; 2],
}

/// The keys from key `first` on, and the scales of their values.
#[device]
#[inline(always)]
pub fn fetch_next<
    const KF: u32,
    const VF: u32,
    const D: usize,
    const DV: usize,
    const L: usize,
    const R: usize,
    const P: usize,
    const U: usize,
    const S: usize,
    const M: usize,
>(
    k: BlockMemory,
    v: BlockMemory,
    pass: PrefillPass<M>,
    first: u32,
) -> NextBlock<L, R> {
    let next = NextBlock::<L, R> {
        keys: fetch_block::<KF, D, L, R, P, U, S>(k, pass.k, first),
        scales: [fetch_scales::<KF, D, U>(k, pass.k, first), fetch_scales::<VF, DV, U>(v, pass.v, first)],
    };
    next
}

/// No block.
#[device]
pub fn no_block<const L: usize, const R: usize>() -> NextBlock<L, R> {
    let none = NextBlock::<L, R> { keys: no_words::<L, R>(), scales: [[0u32; 2]; 2] };
    none
}

/// Stores the keys of a block; keys of mlx-native have a second block for their rounding residuals in f16.
#[device]
#[inline(always)]
pub fn store_keys<
    K: Element,
    const FORMAT: u32,
    const D: usize,
    const C: usize,
    const L: usize,
    const R: usize,
    const P: usize,
    const U: usize,
    const S: usize,
>(
    keys: &mut Shared<K>,
    from: NextBlock<L, R>,
    codes: Codes,
    nibbles: &Shared<u8>,
) {
    store_block::<K, FORMAT, D, C, L, R, P, U, S>(keys, 0, from.keys, codes, nibbles);
    if is_mlx(FORMAT) {
        let mut rest = codes;
        rest.levels.codebook += 256;
        let start = (16 * U * (C + ROW_PADDING)) as u32;
        store_block::<K, FORMAT, D, C, L, R, P, U, S>(keys, start, from.keys, rest, nibbles);
    }
}

/// A block of values that has arrived from memory.
#[device]
pub struct ValueBlock<'a, const L: usize, const R: usize> {
    /// Words of the values.
    pub words: BlockWords<L, R>,
    /// How they become values.
    pub codes: Codes<'a>,
    /// True if values that are not finite are flagged.
    pub finds_nonfinite: bool,
}

/// Stores the values of a block, and flags those that are not finite where that is wanted: in the memory of the keys where they have
/// none of their own, after every SIMD group has its products with these.
#[device]
#[inline(always)]
pub fn store_values<
    K: Element,
    V: Element,
    const FORMAT: u32,
    const D: usize,
    const C: usize,
    const L: usize,
    const R: usize,
    const P: usize,
    const U: usize,
    const S: usize,
    const W: usize,
    const B: usize,
>(
    keys: &mut Shared<K>,
    values: &mut Shared<V>,
    from: ValueBlock<L, R>,
    nibbles: &Shared<u8>,
    flags: &mut Shared<u32>,
) {
    if B == 1 {
        // Products of teams are exchanged, with a barrier, after the last key was read.
        if W == 1 {
            barrier();
        }
        store_block::<K, FORMAT, D, C, L, R, P, U, S>(keys, 0, from.words, from.codes, nibbles);
    } else {
        store_block::<V, FORMAT, D, C, L, R, P, U, S>(values, 0, from.words, from.codes, nibbles);
    }
    if from.finds_nonfinite {
        flag_nonfinite::<FORMAT, D, L, R>(flags, from.words);
    }
}

/// Fills the table of `tq4`, where keys or values are decoded by it. By all threads of the threadgroup.
#[device]
pub fn fill_table<const KF: u32, const VF: u32, const D: usize, const DV: usize, const S: usize>(
    k: Codes,
    v: Codes,
    nibbles: &mut Shared<u8>,
) {
    if uses_nibbles(KF, D as u32, 8) {
        fill_nibbles::<S>(k.levels, nibbles);
        barrier();
    } else if uses_nibbles(VF, DV as u32, 8) {
        fill_nibbles::<S>(v.levels, nibbles);
        barrier();
    }
}

/// Sets the first of the flags to 0: whether a value that was stored is not finite. SIMD groups tell each other by the others.
#[device]
pub fn clear_first(flags: &mut Shared<u32>) {
    if thread_index() == 0 {
        flags[0] = 0;
    }
}

/// Sets the first of the flags to 1 where some of a thread's words of values have a NaN or an infinity.
#[device]
#[inline(always)]
fn flag_nonfinite<const FORMAT: u32, const D: usize, const L: usize, const R: usize>(
    flags: &mut Shared<u32>,
    block: BlockWords<L, R>,
) {
    let mut found = false;
    for i in 0..R {
        found = found || has_nonfinite::<FORMAT, D, 8, L>(block.words[i]);
    }
    if found {
        atomic_or(flags, 0u32, 1);
    }
}
