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
pub struct NextBlock<const K_WORDS: usize, const K_LOADS: usize> {
    /// Words of the keys.
    pub keys: BlockWords<K_WORDS, K_LOADS>,
    /// Words of the scales of keys and of values.
    pub scales: [[u32; 2]; 2],
}

/// The keys from key `first` on, and the scales of their values.
#[device]
#[inline(always)]
pub fn fetch_next<
    const K_FORMAT: u32,
    const V_FORMAT: u32,
    const HEAD_DIM: usize,
    const VALUE_DIM: usize,
    const K_WORDS: usize,
    const K_LOADS: usize,
    const K_PAIR_WORDS: usize,
    const KEY_TILES: usize,
    const SIMD_GROUPS: usize,
    const ROW_TILES: usize,
>(
    k: BlockMemory,
    v: BlockMemory,
    pass: PrefillPass<ROW_TILES>,
    first: u32,
) -> NextBlock<K_WORDS, K_LOADS> {
    let next = NextBlock::<K_WORDS, K_LOADS> {
        keys: fetch_block::<K_FORMAT, HEAD_DIM, K_WORDS, K_LOADS, K_PAIR_WORDS, KEY_TILES, SIMD_GROUPS>(
            k, pass.k, first,
        ),
        scales: [
            fetch_scales::<K_FORMAT, HEAD_DIM, KEY_TILES>(k, pass.k, first),
            fetch_scales::<V_FORMAT, VALUE_DIM, KEY_TILES>(v, pass.v, first),
        ],
    };
    next
}

/// No block.
#[device]
pub fn no_block<const K_WORDS: usize, const K_LOADS: usize>() -> NextBlock<K_WORDS, K_LOADS> {
    let none = NextBlock::<K_WORDS, K_LOADS> { keys: no_words::<K_WORDS, K_LOADS>(), scales: [[0u32; 2]; 2] };
    none
}

/// Stores the keys of a block; keys of mlx-native have a second block for their rounding residuals in f16.
#[device]
#[inline(always)]
pub fn store_keys<
    KOperand: Element,
    const K_FORMAT: u32,
    const HEAD_DIM: usize,
    const K_COLUMNS: usize,
    const K_WORDS: usize,
    const K_LOADS: usize,
    const K_PAIR_WORDS: usize,
    const KEY_TILES: usize,
    const SIMD_GROUPS: usize,
>(
    keys: &mut Shared<KOperand>,
    from: NextBlock<K_WORDS, K_LOADS>,
    codes: Codes,
    nibbles: &Shared<u8>,
) {
    store_block::<
        KOperand,
        K_FORMAT,
        HEAD_DIM,
        K_COLUMNS,
        K_WORDS,
        K_LOADS,
        K_PAIR_WORDS,
        KEY_TILES,
        SIMD_GROUPS,
    >(keys, 0, from.keys, codes, nibbles);
    if is_mlx(K_FORMAT) {
        let mut rest = codes;
        rest.levels.codebook += 256;
        let start = (16 * KEY_TILES * (K_COLUMNS + ROW_PADDING)) as u32;
        store_block::<
            KOperand,
            K_FORMAT,
            HEAD_DIM,
            K_COLUMNS,
            K_WORDS,
            K_LOADS,
            K_PAIR_WORDS,
            KEY_TILES,
            SIMD_GROUPS,
        >(keys, start, from.keys, rest, nibbles);
    }
}

/// A block of values that has arrived from memory.
#[device]
pub struct ValueBlock<'a, const V_WORDS: usize, const V_LOADS: usize> {
    /// Words of the values.
    pub words: BlockWords<V_WORDS, V_LOADS>,
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
    KOperand: Element,
    VOperand: Element,
    const V_FORMAT: u32,
    const VALUE_DIM: usize,
    const V_COLUMNS: usize,
    const V_WORDS: usize,
    const V_LOADS: usize,
    const V_PAIR_WORDS: usize,
    const KEY_TILES: usize,
    const SIMD_GROUPS: usize,
    const TEAM_SIMDS: usize,
    const KV_BUFFERS: usize,
>(
    keys: &mut Shared<KOperand>,
    values: &mut Shared<VOperand>,
    from: ValueBlock<V_WORDS, V_LOADS>,
    nibbles: &Shared<u8>,
    flags: &mut Shared<u32>,
) {
    if KV_BUFFERS == 1 {
        // Products of teams are exchanged, with a barrier, after the last key was read.
        if TEAM_SIMDS == 1 {
            barrier();
        }
        store_block::<
            KOperand,
            V_FORMAT,
            VALUE_DIM,
            V_COLUMNS,
            V_WORDS,
            V_LOADS,
            V_PAIR_WORDS,
            KEY_TILES,
            SIMD_GROUPS,
        >(keys, 0, from.words, from.codes, nibbles);
    } else {
        store_block::<
            VOperand,
            V_FORMAT,
            VALUE_DIM,
            V_COLUMNS,
            V_WORDS,
            V_LOADS,
            V_PAIR_WORDS,
            KEY_TILES,
            SIMD_GROUPS,
        >(values, 0, from.words, from.codes, nibbles);
    }
    if from.finds_nonfinite {
        flag_nonfinite::<V_FORMAT, VALUE_DIM, V_WORDS, V_LOADS>(flags, from.words);
    }
}

/// Fills the table of `tq4`, where keys or values are decoded by it. By all threads of the threadgroup.
#[device]
pub fn fill_table<
    const K_FORMAT: u32,
    const V_FORMAT: u32,
    const HEAD_DIM: usize,
    const VALUE_DIM: usize,
    const SIMD_GROUPS: usize,
>(
    k: Codes,
    v: Codes,
    nibbles: &mut Shared<u8>,
) {
    if uses_nibbles(K_FORMAT, HEAD_DIM as u32, 8) {
        fill_nibbles::<SIMD_GROUPS>(k.levels, nibbles);
        barrier();
    } else if uses_nibbles(V_FORMAT, VALUE_DIM as u32, 8) {
        fill_nibbles::<SIMD_GROUPS>(v.levels, nibbles);
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
fn flag_nonfinite<const V_FORMAT: u32, const VALUE_DIM: usize, const V_WORDS: usize, const V_LOADS: usize>(
    flags: &mut Shared<u32>,
    block: BlockWords<V_WORDS, V_LOADS>,
) {
    let mut found = false;
    for i in 0..V_LOADS {
        found = found || has_nonfinite::<V_FORMAT, VALUE_DIM, 8, V_WORDS>(block.words[i]);
    }
    if found {
        atomic_or(flags, 0u32, 1);
    }
}
