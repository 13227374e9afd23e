//! KV caches: each operation and each refusal, sharing between sequences, and random operations against a naive
//! cache.

use flashtile::cache::{CacheMemory, NO_PAGE, Snapshot, TableError};
use flashtile::problem::{MAX_LEN, MAX_SEQUENCES};
use flashtile::{
    BlockTables, CacheDesc, CacheError, CacheLayout, CacheShape, Codec, Dtype, KvCache, SeqId, TensorView,
    TensorViewMut,
};
use flashtile_testkit::{Guarded, Layout, Rng};
use half::{bf16, f16};
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

const LAYERS: usize = 2;
const HEADS: usize = 2;
const DIMS: [usize; 2] = [3, 5];
const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];

const CONTIGUOUS: CacheLayout = CacheLayout::Contiguous { slots: 3, capacity: 9 };
const RING: CacheLayout = CacheLayout::Ring { slots: 3, capacity: 5 };
const PAGED: CacheLayout = CacheLayout::Paged { pages: 6, page_size: 4 };

fn desc(layout: CacheLayout, k: Codec, v: Codec) -> CacheDesc {
    let mut desc = CacheDesc::new(
        layout,
        CacheShape { layers: LAYERS, kv_heads: HEADS, head_dim: DIMS[0], value_dim: DIMS[1] },
        k,
    );
    desc.v = v;
    desc
}

fn cache(layout: CacheLayout) -> KvCache {
    KvCache::new(desc(layout, Codec::F32, Codec::F16)).unwrap()
}

/// The contents of a token: a number for each layer, which determines its elements. `None` is unspecified.
type Token = [Option<u32>; LAYERS];

/// An element of a token: an integer that every codec stores exactly.
fn element(id: u32, [layer, which, head, d]: [usize; 4]) -> f32 {
    let place = ((layer * 2 + which) * HEADS + head) * 8 + d;
    let mixed = (u64::from(id) * 1021 + place as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
    (mixed % 513) as f32 - 256.0
}

/// K and V of tokens in a layer, packed.
fn rows(ids: &[u32], layer: usize, dtype: Dtype, layout: Layout) -> [Guarded; 2] {
    [0, 1].map(|which| {
        let mut tensor = Guarded::new(dtype, [1, HEADS, ids.len(), DIMS[which]], layout);
        for index in tensor.indices() {
            let [_, head, row, d] = index;
            tensor.set(index, element(ids[row], [layer, which, head, d]));
        }
        tensor
    })
}

fn views([k, v]: &[Guarded; 2]) -> (TensorView<'_>, TensorView<'_>) {
    (k.view(), v.view())
}

fn append(cache: &mut KvCache, batch: &[(SeqId, usize)], ids: &[u32]) -> Result<(), CacheError> {
    let layers: Vec<_> = (0..LAYERS).map(|layer| rows(ids, layer, Dtype::F32, Layout::Bshd)).collect();
    cache.append(batch, &layers.iter().map(views).collect::<Vec<_>>())
}

fn write(cache: &mut KvCache, layer: usize, batch: &[(SeqId, usize)], ids: &[u32]) -> Result<(), CacheError> {
    let [k, v] = rows(ids, layer, Dtype::F32, Layout::Bshd);
    cache.write(layer, batch, &k.view(), &v.view())
}

/// A new sequence of tokens.
fn sequence(cache: &mut KvCache, ids: impl IntoIterator<Item = u32>) -> SeqId {
    let ids: Vec<u32> = ids.into_iter().collect();
    let seq = cache.create().unwrap();
    append(cache, &[(seq, ids.len())], &ids).unwrap();
    seq
}

/// K and V of the kept tokens of a sequence in a layer.
fn linearize(cache: &KvCache, seq: SeqId, layer: usize, dtype: Dtype, layout: Layout) -> [Guarded; 2] {
    let kept = cache.len(seq).unwrap() - cache.first(seq).unwrap();
    let [mut k, mut v] = DIMS.map(|dim| Guarded::new(dtype, [1, HEADS, kept, dim], layout));
    cache.linearize(seq, layer, &mut k.view_mut(), &mut v.view_mut()).unwrap();
    assert_eq!([k.touched(), v.touched()], [None, None]);
    [k, v]
}

/// Checks which tokens a sequence keeps and their contents, by `linearize` and by tables and pools.
fn check(cache: &KvCache, seq: SeqId, first: usize, tokens: &[Token], dtype: Dtype, layout: Layout) {
    assert_eq!((cache.first(seq).unwrap(), cache.len(seq).unwrap()), (first, first + tokens.len()));
    let tables = cache.tables(&[seq]).unwrap();
    tables.validate(cache.memory().pages).unwrap();
    for layer in 0..LAYERS {
        let linear = linearize(cache, seq, layer, dtype, layout);
        let (k, v) = cache.pages(layer).unwrap();
        for (which, (linear, pool)) in linear.iter().zip([k, v]).enumerate() {
            for index in linear.indices() {
                let [_, head, token, d] = index;
                let (page, row) = tables.locate(0, first + token).unwrap();
                let Some(id) = tokens[token][layer] else { continue };
                let expected = element(id, [layer, which, head, d]);
                let at = format!("{seq}, token {}, layer {layer}, {which}", first + token);
                assert_eq!(linear.get(index), expected, "{at}");
                assert_eq!(pool.get([page, head, row, d]), expected, "{at}, page {page}, row {row}");
            }
        }
    }
    assert_eq!(tables.locate(0, first + tokens.len()), None);
    assert_eq!(first.checked_sub(1).and_then(|before| tables.locate(0, before)), None);
}

/// [`check`] for tokens with the same number in every layer.
fn holds(cache: &KvCache, seq: SeqId, first: usize, ids: impl IntoIterator<Item = u32>) {
    let tokens: Vec<Token> = ids.into_iter().map(|id| [Some(id); LAYERS]).collect();
    check(cache, seq, first, &tokens, Dtype::F32, Layout::Bhsd);
}

/// Everything that can be observed of a cache and these sequences.
fn state(cache: &KvCache, seqs: &[SeqId]) -> (CacheMemory, BlockTables, Vec<Vec<u32>>) {
    let bits = |(seq, layer)| linearize(cache, seq, layer, Dtype::F32, Layout::Bhsd).map(|t| t.bits());
    let content = seqs.iter().flat_map(|&seq| (0..LAYERS).map(move |layer| (seq, layer)));
    (cache.memory(), cache.tables(seqs).unwrap(), content.flat_map(bits).collect())
}

/// Checks the message of a refusal, and that it changed nothing.
fn refused<T: std::fmt::Debug>(
    cache: &mut KvCache,
    seqs: &[SeqId],
    operation: impl FnOnce(&mut KvCache) -> Result<T, CacheError>,
    message: &str,
) {
    let before = state(cache, seqs);
    assert_eq!(operation(cache).unwrap_err().to_string(), message);
    assert_eq!(state(cache, seqs), before, "{message}");
}

#[test]
fn every_layout_holds_what_was_appended() {
    let ids = [7, 8, 9, 10];
    for layout in [CONTIGUOUS, RING, PAGED] {
        for codec in DTYPES.map(Codec::from) {
            for dtype in DTYPES {
                for tensors in Layout::ALL {
                    let mut cache = KvCache::new(desc(layout, codec, Codec::BF16)).unwrap();
                    let [a, b] = [0; 2].map(|_| cache.create().unwrap());
                    let layers: Vec<_> = (0..LAYERS).map(|layer| rows(&ids, layer, dtype, tensors)).collect();
                    let layers: Vec<_> = layers.iter().map(views).collect();
                    cache.append(&[(b, 3), (a, 1)], &layers).unwrap();
                    let held = |ids: &[u32]| ids.iter().map(|&id| [Some(id); LAYERS]).collect::<Vec<_>>();
                    check(&cache, a, 0, &held(&[10]), dtype, tensors);
                    check(&cache, b, 0, &held(&[7, 8, 9]), dtype, tensors);
                }
            }
        }
    }
}

#[test]
fn extending_and_writing_by_layer_is_appending() {
    for layout in [CONTIGUOUS, RING, PAGED] {
        let mut cache = cache(layout);
        let a = sequence(&mut cache, 0..3);
        let b = cache.create().unwrap();
        cache.extend(&[(a, 1), (b, 2)]).unwrap();
        for layer in (0..LAYERS).rev() {
            write(&mut cache, layer, &[(b, 2), (a, 1)], &[20, 21, 3]).unwrap();
        }
        holds(&cache, a, 0, 0..4);
        holds(&cache, b, 0, 20..22);
        // Tokens can be written again without affecting those in between.
        write(&mut cache, 1, &[(a, 2)], &[30, 31]).unwrap();
        let tokens = [[Some(0); 2], [Some(1); 2], [Some(2), Some(30)], [Some(3), Some(31)]];
        check(&cache, a, 0, &tokens, Dtype::F32, Layout::Bhsd);
        append(&mut cache, &[], &[]).unwrap();
        append(&mut cache, &[(a, 0), (b, 0)], &[]).unwrap();
        check(&cache, a, 0, &tokens, Dtype::F32, Layout::Bhsd);
    }
}

/// Values that a conversion could get wrong: ties, the limits of f16 and bf16, infinities and NaNs.
fn awkward() -> Vec<f32> {
    let mut values = vec![0.0, -0.0, 1.0, -1.5, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN];
    values.extend([0x7F80_0001u32, 0xFFC0_1234, 0x7FBF_FFFF, 0x0000_0001, 0x007F_FFFF].map(f32::from_bits));
    values.extend([65504.0, 65519.99, 65520.0, 1e6, 5.96e-8, 2.98e-8, 2.9e-8, 6.1e-5, f32::MAX, f32::MIN]);
    // Ties between neighbours in f16 and in bf16, whose upper neighbour is odd or even.
    values.extend([0x3F80_1000u32, 0x3F80_3000, 0x3F80_8000, 0x3F81_8000].map(f32::from_bits));
    let mut rng = Rng::new(1);
    values.extend((0..173).map(|_| rng.normal()));
    values
}

fn stored(codec: Codec, tensor: &TensorView<'_>) -> KvCache {
    let [_, heads, tokens, dim] = tensor.shape();
    let layout = CacheLayout::Paged { pages: 2, page_size: tokens };
    let mut cache = KvCache::new(CacheDesc::new(
        layout,
        CacheShape { layers: 1, kv_heads: heads, head_dim: dim, value_dim: dim },
        codec,
    ))
    .unwrap();
    let seq = cache.create().unwrap();
    cache.append(&[(seq, tokens)], &[(*tensor, *tensor)]).unwrap();
    cache
}

#[test]
fn conversion_rounds_to_nearest_even_and_keeps_nan() {
    let values = awkward();
    let f16s: Vec<f16> = values.iter().map(|&x| f16::from_f32(x)).collect();
    let bf16s: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
    let n = values.len();
    let tensors = [
        TensorView::packed(&values, [1, 1, n]).unwrap(),
        TensorView::packed(&f16s, [1, 1, n]).unwrap(),
        TensorView::packed(&bf16s, [1, 1, n]).unwrap(),
    ];
    let same =
        |got: f32, expected: f32| got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan();
    let rounded = |dtype: Dtype, x: f32| match dtype {
        Dtype::F32 => x,
        Dtype::F16 => f16::from_f32(x).to_f32(),
        Dtype::BF16 => bf16::from_f32(x).to_f32(),
    };
    for tensor in tensors {
        for to in DTYPES {
            let cache = stored(Codec::from(to), &tensor);
            let (pool, _) = cache.pages(0).unwrap();
            assert_eq!(pool.dtype(), to);
            for i in 0..n {
                let (got, x) = (pool.get([0, 0, 0, i]), tensor.get([0, 0, 0, i]));
                assert!(same(got, rounded(to, x)), "{x:e} as {to} is {got:e}");
            }
        }
    }
    // Reading rounds in the same way as storing.
    let mut cache = KvCache::new(CacheDesc::new(
        PAGED,
        CacheShape { layers: 1, kv_heads: 1, head_dim: n, value_dim: n },
        Codec::F32,
    ))
    .unwrap();
    let seq = cache.create().unwrap();
    cache.append(&[(seq, 1)], &[(tensors[0], tensors[0])]).unwrap();
    for to in DTYPES {
        let [mut k, mut v] = [0; 2].map(|_| Guarded::new(to, [1, 1, 1, n], Layout::Bhsd));
        cache.linearize(seq, 0, &mut k.view_mut(), &mut v.view_mut()).unwrap();
        for i in 0..n {
            let x = values[i];
            assert!(same(k.get([0, 0, 0, i]), rounded(to, x)), "{x:e} to {to}");
        }
        assert_eq!(k.bits(), v.bits());
    }
}

#[test]
fn equal_types_are_copied_bit_by_bit() {
    let every: Vec<u16> = (0..=u16::MAX).collect();
    let f16s: Vec<f16> = every.iter().map(|&x| f16::from_bits(x)).collect();
    let bf16s: Vec<bf16> = every.iter().map(|&x| bf16::from_bits(x)).collect();
    let f32s = awkward();
    for (tensor, codec) in [
        (TensorView::packed(&f16s, [128, 1, 512]).unwrap(), Codec::F16),
        (TensorView::packed(&bf16s, [128, 1, 512]).unwrap(), Codec::BF16),
        (TensorView::packed(&f32s, [2, 1, f32s.len() / 2]).unwrap(), Codec::F32),
    ] {
        let mut cache = stored(codec, &tensor);
        let [_, _, tokens, dim] = tensor.shape();
        // A second sequence with a known id.
        let seq = cache.create().unwrap();
        cache.append(&[(seq, tokens)], &[(tensor, tensor)]).unwrap();
        let mut k = vec![0u8; tokens * dim * tensor.dtype().bytes() + 4];
        let at = k.as_ptr().align_offset(4);
        let mut v = Guarded::new(tensor.dtype(), tensor.shape(), Layout::Bhsd);
        let strides = [tokens * dim, tokens * dim, dim, 1];
        let mut view =
            TensorViewMut::from_bytes(tensor.dtype(), &mut k[at..], tensor.shape(), strides).unwrap();
        cache.linearize(seq, 0, &mut view, &mut v.view_mut()).unwrap();
        let bits: Vec<u32> = match tensor.dtype() {
            Dtype::F32 => f32s.iter().map(|x| x.to_bits()).collect(),
            Dtype::F16 | Dtype::BF16 => every.iter().map(|&x| u32::from(x)).collect(),
        };
        assert_eq!(v.bits(), bits);
        let bytes: Vec<u8> = match tensor.dtype() {
            Dtype::F32 => bits.iter().flat_map(|x| x.to_ne_bytes()).collect(),
            Dtype::F16 | Dtype::BF16 => every.iter().flat_map(|x| x.to_ne_bytes()).collect(),
        };
        assert_eq!(k[at..at + bytes.len()], bytes);
    }
}

#[test]
fn a_ring_keeps_the_last_tokens() {
    let mut cache = cache(RING);
    let seq = cache.create().unwrap();
    for id in 0..17 {
        append(&mut cache, &[(seq, 1)], &[id]).unwrap();
        cache.poison_unused();
        let first = (id + 1).saturating_sub(5);
        holds(&cache, seq, first as usize, first..id + 1);
    }
    // More than the ring holds at once: across its end and back over the rows just written.
    append(&mut cache, &[(seq, 13)], &(17..30).collect::<Vec<_>>()).unwrap();
    holds(&cache, seq, 25, 25..30);
    // Overwritten tokens do not come back.
    cache.truncate(seq, 27).unwrap();
    cache.poison_unused();
    holds(&cache, seq, 25, 25..27);
    append(&mut cache, &[(seq, 2)], &[40, 41]).unwrap();
    holds(&cache, seq, 25, [25, 26, 40, 41]);
    append(&mut cache, &[(seq, 2)], &[42, 43]).unwrap();
    holds(&cache, seq, 26, [26, 40, 41, 42, 43]);
    let message = format!("position 25 of {seq} is outside 26..=31");
    refused(&mut cache, &[seq], |c| c.truncate(seq, 25), &message);
    // Rewriting more tokens than are kept writes the kept ones.
    write(&mut cache, 0, &[(seq, 7)], &[50, 51, 52, 53, 54, 55, 56]).unwrap();
    write(&mut cache, 1, &[(seq, 7)], &[50, 51, 52, 53, 54, 55, 56]).unwrap();
    holds(&cache, seq, 26, 52..57);
    let fork = cache.fork(seq).unwrap();
    append(&mut cache, &[(fork, 1)], &[57]).unwrap();
    holds(&cache, seq, 26, 52..57);
    holds(&cache, fork, 27, 53..58);
    cache.truncate(seq, 26).unwrap();
    holds(&cache, seq, 26, []);
    let tables = cache.tables(&[seq, fork]).unwrap();
    assert_eq!((tables.width, tables.page_size, tables.wraps), (1, 5, true));
    assert_eq!((tables.table, tables.first, tables.lens), (vec![0, 1], vec![26, 27], vec![26, 32]));
}

#[test]
fn a_contiguous_cache_is_full_at_its_capacity() {
    let mut cache = cache(CONTIGUOUS);
    let [a, b] = [sequence(&mut cache, 0..8), sequence(&mut cache, 20..21)];
    let full = "the sequence would have 10 tokens, expected at most 9";
    refused(&mut cache, &[a, b], |c| append(c, &[(b, 1), (a, 2)], &[0, 0, 0]), full);
    append(&mut cache, &[(b, 1), (a, 1)], &[21, 8]).unwrap();
    let full = format!("the sequence would have {} tokens, expected at most 9", usize::MAX);
    refused(&mut cache, &[a, b], |c| c.extend(&[(b, 1), (a, usize::MAX)]), &full);
    // Dropped tokens leave positions as they are, and so make no room.
    cache.forget(a, 4).unwrap();
    cache.poison_unused();
    holds(&cache, a, 4, 4..9);
    let full = "the sequence would have 10 tokens, expected at most 9";
    refused(&mut cache, &[a, b], |c| c.extend(&[(a, 1)]), full);
    cache.truncate(a, 5).unwrap();
    append(&mut cache, &[(a, 3)], &[30, 31, 32]).unwrap();
    cache.poison_unused();
    holds(&cache, a, 4, [4, 30, 31, 32]);
    let fork = cache.fork(a).unwrap();
    append(&mut cache, &[(a, 1)], &[33]).unwrap();
    append(&mut cache, &[(fork, 1)], &[34]).unwrap();
    holds(&cache, a, 4, [4, 30, 31, 32, 33]);
    holds(&cache, fork, 4, [4, 30, 31, 32, 34]);
    holds(&cache, b, 0, 20..22);
    let tables = cache.tables(&[b, fork]).unwrap();
    assert_eq!((tables.table, tables.width, tables.wraps), (vec![1, 2], 1, false));
}

#[test]
fn slots_run_out_and_come_back() {
    for layout in [CONTIGUOUS, RING] {
        let mut cache = cache(layout);
        let seqs = [0; 3].map(|n| sequence(&mut cache, n..n + 4));
        let message = "all 3 slots are taken";
        refused(&mut cache, &seqs, |c| c.create(), message);
        refused(&mut cache, &seqs, |c| c.fork(seqs[1]), message);
        let snapshot = cache.snapshot(seqs[1]).unwrap();
        refused(&mut cache, &seqs, |c| c.restore(&snapshot), message);
        cache.remove(seqs[1]).unwrap();
        assert_eq!(cache.memory().pages_free, 1);
        let seq = cache.restore(&snapshot).unwrap();
        holds(&cache, seq, 0, 0..4);
    }
}

#[test]
fn pages_run_out_for_a_batch_as_a_whole() {
    let mut cache = cache(PAGED);
    let [a, b] = [sequence(&mut cache, 0..5), sequence(&mut cache, 20..28)];
    let message = "3 pages are needed, 2 are free";
    refused(&mut cache, &[a, b], |c| append(c, &[(a, 8), (b, 1)], &[0; 9]), message);
    append(&mut cache, &[(a, 7), (b, 4)], &[5, 6, 7, 8, 9, 10, 11, 28, 29, 30, 31]).unwrap();
    holds(&cache, a, 0, 0..12);
    holds(&cache, b, 0, 20..32);
    refused(&mut cache, &[a, b], |c| append(c, &[(a, 1)], &[0]), "1 page is needed, 0 are free");
    let message = format!("{} pages are needed, 0 are free", MAX_LEN.div_ceil(4) - 3);
    refused(&mut cache, &[a, b], |c| c.extend(&[(a, MAX_LEN - 12)]), &message);
    let message = format!("the sequence would have {} tokens, expected at most {MAX_LEN}", MAX_LEN + 1);
    refused(&mut cache, &[a, b], |c| c.extend(&[(a, MAX_LEN - 11)]), &message);
    // A sequence without tokens has no page.
    let empty = cache.create().unwrap();
    holds(&cache, empty, 0, []);
    cache.truncate(b, 8).unwrap();
    assert_eq!(cache.memory().pages_free, 1);
    cache.truncate(b, 4).unwrap();
    cache.truncate(b, 1).unwrap();
    assert_eq!(cache.memory().pages_free, 2);
    cache.truncate(b, 0).unwrap();
    assert_eq!(cache.memory().pages_free, 3);
    append(&mut cache, &[(empty, 12)], &(40..52).collect::<Vec<_>>()).unwrap();
    holds(&cache, empty, 0, 40..52);
    let snapshot = cache.snapshot(empty).unwrap();
    let message = "3 pages are needed, 0 are free";
    refused(&mut cache, &[a, b, empty], |c| c.restore(&snapshot), message);
}

#[test]
fn forks_share_pages_until_one_writes() {
    let mut cache = cache(PAGED);
    let a = sequence(&mut cache, 0..6);
    let b = cache.fork(a).unwrap();
    let memory = cache.memory();
    assert_eq!((memory.pages_free, memory.pages_shared, memory.tokens), (4, 2, 12));
    assert_eq!(cache.tables(&[a, b]).unwrap().table, [0, 1, 0, 1]);
    // The page with room is copied for the first sequence that appends; then the other holds it exclusively.
    append(&mut cache, &[(a, 1)], &[10]).unwrap();
    cache.poison_unused();
    holds(&cache, a, 0, [0, 1, 2, 3, 4, 5, 10]);
    holds(&cache, b, 0, 0..6);
    let memory = cache.memory();
    assert_eq!((memory.pages_free, memory.pages_shared), (3, 1));
    append(&mut cache, &[(b, 1)], &[20]).unwrap();
    holds(&cache, a, 0, [0, 1, 2, 3, 4, 5, 10]);
    holds(&cache, b, 0, [0, 1, 2, 3, 4, 5, 20]);
    assert_eq!(cache.memory().pages_free, 3);
    // Writing shared tokens copies every page that is written, for all layers at once.
    write(&mut cache, 1, &[(b, 4)], &[30, 31, 32, 33]).unwrap();
    holds(&cache, a, 0, [0, 1, 2, 3, 4, 5, 10]);
    let mut tokens = [0, 1, 2, 3, 4, 5, 20].map(|id| [Some(id); LAYERS]);
    for (token, id) in tokens[3..].iter_mut().zip(30..) {
        token[1] = Some(id);
    }
    check(&cache, b, 0, &tokens, Dtype::F32, Layout::Bhsd);
    let memory = cache.memory();
    assert_eq!((memory.pages_free, memory.pages_shared), (2, 0));
    // When a holder is removed, its pages stay with the others.
    let c = cache.fork(a).unwrap();
    cache.remove(a).unwrap();
    cache.poison_unused();
    assert_eq!((cache.memory().pages_free, cache.memory().pages_shared), (2, 0));
    append(&mut cache, &[(c, 1)], &[11]).unwrap();
    holds(&cache, c, 0, [0, 1, 2, 3, 4, 5, 10, 11]);
    assert_eq!(cache.memory().pages_free, 2);
}

#[test]
fn the_last_holder_of_a_batch_keeps_the_page() {
    let mut cache = cache(CacheLayout::Paged { pages: 3, page_size: 4 });
    let a = sequence(&mut cache, 0..2);
    let [b, c] = [cache.fork(a).unwrap(), cache.fork(a).unwrap()];
    let all = [a, b, c];
    // Three holders need two copies, whether they append or write.
    let d = cache.create().unwrap();
    cache.extend(&[(d, 1)]).unwrap();
    let message = "2 pages are needed, 1 is free";
    refused(&mut cache, &all, |cache| append(cache, &[(b, 1), (a, 1), (c, 1)], &[0; 3]), message);
    refused(&mut cache, &all, |cache| write(cache, 0, &[(b, 1), (a, 1), (c, 1)], &[0; 3]), message);
    append(&mut cache, &[(b, 1)], &[10]).unwrap();
    let message = "1 page is needed, 0 are free";
    refused(&mut cache, &all, |cache| write(cache, 1, &[(a, 1)], &[0]), message);
    cache.remove(d).unwrap();
    append(&mut cache, &[(c, 1), (b, 1), (a, 1)], &[20, 11, 30]).unwrap();
    cache.poison_unused();
    holds(&cache, a, 0, [0, 1, 30]);
    holds(&cache, b, 0, [0, 1, 10, 11]);
    holds(&cache, c, 0, [0, 1, 20]);
    assert_eq!(cache.memory().pages_free, 0);
}

#[test]
fn a_shortened_fork_does_not_write_over_the_other() {
    let mut cache = cache(PAGED);
    let a = sequence(&mut cache, 0..8);
    let b = cache.fork(a).unwrap();
    cache.truncate(b, 5).unwrap();
    append(&mut cache, &[(b, 2)], &[20, 21]).unwrap();
    holds(&cache, a, 0, 0..8);
    holds(&cache, b, 0, [0, 1, 2, 3, 4, 20, 21]);
    // At a page boundary nothing is copied.
    cache.truncate(b, 4).unwrap();
    assert_eq!((cache.memory().pages_free, cache.memory().pages_shared), (4, 1));
    append(&mut cache, &[(b, 1)], &[30]).unwrap();
    assert_eq!((cache.memory().pages_free, cache.memory().pages_shared), (3, 1));
    cache.forget(b, 2).unwrap();
    assert_eq!(cache.memory().pages_shared, 1);
    // The dropped part of a shared page is not copied.
    write(&mut cache, 0, &[(b, 5)], &[40, 41, 42, 43, 44]).unwrap();
    write(&mut cache, 1, &[(b, 5)], &[40, 41, 42, 43, 44]).unwrap();
    cache.poison_unused();
    holds(&cache, a, 0, 0..8);
    holds(&cache, b, 2, 42..45);
}

#[test]
fn forgetting_frees_whole_pages_and_tables_wrap() {
    let mut cache = cache(PAGED);
    let a = sequence(&mut cache, 0..10);
    let b = sequence(&mut cache, 50..52);
    cache.forget(a, 3).unwrap();
    assert_eq!(cache.memory().pages_free, 2);
    cache.forget(a, 4).unwrap();
    cache.forget(a, 1).unwrap();
    assert_eq!(cache.memory().pages_free, 3);
    cache.poison_unused();
    holds(&cache, a, 4, 4..10);
    // A window of six tokens can continue for ever in three pages.
    for id in 10..40 {
        append(&mut cache, &[(a, 1)], &[id]).unwrap();
        cache.forget(a, id as usize - 5).unwrap();
        cache.poison_unused();
        holds(&cache, a, id as usize - 5, id - 5..id + 1);
        assert!(cache.memory().pages_free >= 2);
        let tables = cache.tables(&[b, a]).unwrap();
        tables.validate(6).unwrap();
        assert!(tables.width <= 3 && tables.wraps, "{tables:?}");
        assert_eq!(tables.table[1..tables.width], [NO_PAGE, NO_PAGE][..tables.width - 1]);
    }
    // A sequence without tokens holds no pages, also if its position is inside a page.
    let message = format!("position 41 of {a} is outside 0..=40");
    refused(&mut cache, &[a, b], |c| c.forget(a, 41), &message);
    cache.forget(a, 38).unwrap();
    let message = format!("position 37 of {a} is outside 38..=40");
    refused(&mut cache, &[a, b], |c| c.truncate(a, 37), &message);
    let message = format!("position 41 of {a} is outside 38..=40");
    refused(&mut cache, &[a, b], |c| c.truncate(a, 41), &message);
    cache.truncate(a, 38).unwrap();
    assert_eq!(cache.memory().pages_free, 5);
    holds(&cache, a, 38, []);
    append(&mut cache, &[(a, 3)], &[60, 61, 62]).unwrap();
    cache.poison_unused();
    holds(&cache, a, 38, 60..63);
    assert_eq!(cache.tables(&[a]).unwrap().table, cache.tables(&[a, b]).unwrap().table[..2]);
    cache.forget(a, 41).unwrap();
    assert_eq!(cache.memory().pages_free, 5);
}

#[test]
fn snapshots_move_between_layouts() {
    let layouts = [CONTIGUOUS, RING, PAGED, CacheLayout::Paged { pages: 9, page_size: 1 }];
    for from in layouts {
        for to in layouts {
            let (mut from, mut to) = (cache(from), cache(to));
            let seq = sequence(&mut from, 0..4);
            append(&mut from, &[(seq, 4)], &[4, 5, 6, 7]).unwrap();
            from.forget(seq, 2).unwrap();
            let first = from.first(seq).unwrap();
            let snapshot = from.snapshot(seq).unwrap();
            assert_eq!((snapshot.first(), snapshot.len(), snapshot.is_empty()), (first, 8, false));
            assert_eq!(snapshot.bytes(), (8 - first) * from.desc().token_bytes());
            // It is a copy.
            write(&mut from, 0, &[(seq, 3)], &[9, 9, 9]).unwrap();
            let other = sequence(&mut to, 60..61);
            let seq = to.restore(&snapshot).unwrap();
            to.poison_unused();
            let first = if matches!(to.desc().layout, CacheLayout::Ring { .. }) { 3 } else { first };
            holds(&to, seq, first, first as u32..8);
            append(&mut to, &[(seq, 1)], &[8]).unwrap();
            let first = to.first(seq).unwrap();
            holds(&to, seq, first, first as u32..9);
            holds(&to, other, 0, 60..61);
            let empty = from.create().unwrap();
            let snapshot = from.snapshot(empty).unwrap();
            assert!(snapshot.is_empty());
            let empty = to.restore(&snapshot).unwrap();
            holds(&to, empty, 0, []);
        }
    }
}

#[test]
fn snapshots_fit_caches_with_the_same_rows() {
    let mut from = cache(PAGED);
    let seq = sequence(&mut from, 0..10);
    let snapshot = from.snapshot(seq).unwrap();
    let refuse = |change: fn(&mut CacheDesc), message: &str| {
        let mut desc = *from.desc();
        change(&mut desc);
        let mut cache = KvCache::new(desc).unwrap();
        assert_eq!(cache.restore(&snapshot).unwrap_err().to_string(), message);
        assert_eq!(cache.memory().sequences, 0);
    };
    refuse(|d| d.layers = 3, "snapshot has layers 2, expected 3");
    refuse(|d| d.kv_heads = 1, "snapshot has kv_heads 2, expected 1");
    refuse(|d| d.head_dim = 4, "snapshot has head_dim 3, expected 4");
    refuse(|d| d.value_dim = 6, "snapshot has value_dim 5, expected 6");
    refuse(|d| d.k = Codec::BF16, "snapshot has k as f32, expected bf16");
    refuse(|d| d.v = Codec::F32, "snapshot has v as f16, expected f32");
    refuse(|d| d.layout = CONTIGUOUS, "the sequence would have 10 tokens, expected at most 9");
    let pages = |d: &mut CacheDesc| d.layout = CacheLayout::Paged { pages: 3, page_size: 3 };
    refuse(pages, "4 pages are needed, 3 are free");
}

#[test]
fn ids_name_one_sequence_for_ever() {
    for layout in [CONTIGUOUS, RING, PAGED] {
        let mut cache = cache(layout);
        let kept = sequence(&mut cache, 0..2);
        let removed = sequence(&mut cache, 2..4);
        cache.remove(removed).unwrap();
        // At the same index.
        let newer = sequence(&mut cache, 4..6);
        let mut other = KvCache::new(*cache.desc()).unwrap();
        let foreign = sequence(&mut other, 0..2);
        assert_eq!((kept.to_string(), newer.to_string()), ("sequence 0".into(), "sequence 2".into()));
        let snapshot = |c: &mut KvCache, seq| c.snapshot(seq).map(|s: Snapshot| s.len());
        for (seq, message) in
            [(removed, "sequence 1 was removed"), (foreign, "sequence 0 belongs to another cache")]
        {
            let all = [kept, newer];
            refused(&mut cache, &all, |c| c.remove(seq), message);
            refused(&mut cache, &all, |c| c.len(seq), message);
            refused(&mut cache, &all, |c| c.first(seq), message);
            refused(&mut cache, &all, |c| c.extend(&[(kept, 1), (seq, 1)]), message);
            refused(&mut cache, &all, |c| write(c, 0, &[(kept, 1), (seq, 1)], &[0; 2]), message);
            refused(&mut cache, &all, |c| append(c, &[(newer, 1), (seq, 1)], &[0; 2]), message);
            refused(&mut cache, &all, |c| c.truncate(seq, 1), message);
            refused(&mut cache, &all, |c| c.forget(seq, 1), message);
            refused(&mut cache, &all, |c| c.fork(seq), message);
            refused(&mut cache, &all, |c| snapshot(c, seq), message);
            refused(&mut cache, &all, |c| c.tables(&[kept, seq]), message);
            let [mut k, mut v] = DIMS.map(|dim| Guarded::new(Dtype::F32, [1, HEADS, 2, dim], Layout::Bhsd));
            refused(&mut cache, &all, |c| c.linearize(seq, 0, &mut k.view_mut(), &mut v.view_mut()), message);
            let mut tables = cache.tables(&[kept]).unwrap();
            let before = tables.clone();
            assert!(cache.refill_tables(&[newer, seq], &mut tables).is_err());
            assert_eq!(tables, before);
        }
        let twice = "sequence 0 is listed twice";
        let all = [kept, newer];
        refused(&mut cache, &all, |c| c.extend(&[(kept, 1), (newer, 1), (kept, 1)]), twice);
        refused(&mut cache, &all, |c| write(c, 0, &[(kept, 1), (kept, 0)], &[0]), twice);
        refused(&mut cache, &all, |c| append(c, &[(kept, 0), (kept, 1)], &[0]), twice);
        // A refused batch does not count as a batch.
        cache.extend(&[(kept, 1), (newer, 1)]).unwrap();
    }
}

#[test]
fn tensors_have_the_shapes_of_the_batch() {
    let mut cache = cache(PAGED);
    let seq = sequence(&mut cache, 0..3);
    let all = [seq];
    let [k, v] = rows(&[0, 0], 0, Dtype::F32, Layout::Bshd);
    let (k, v) = (k.view(), v.view());
    refused(&mut cache, &all, |c| c.write(2, &[(seq, 2)], &k, &v), "layer 2 asked for, the cache has 2");
    let message = "k has shape [1, 2, 2, 3], expected [1, 2, 1, 3]";
    refused(&mut cache, &all, |c| c.write(0, &[(seq, 1)], &k, &v), message);
    let message = "k has shape [1, 2, 2, 5], expected [1, 2, 2, 3]";
    refused(&mut cache, &all, |c| c.write(0, &[(seq, 2)], &v, &k), message);
    let message = "v has shape [1, 2, 2, 3], expected [1, 2, 2, 5]";
    refused(&mut cache, &all, |c| c.append(&[(seq, 2)], &[(k, v), (k, k)]), message);
    let message = "1 pairs of k and v, expected one for each of 2 layers";
    refused(&mut cache, &all, |c| c.append(&[(seq, 2)], &[(k, v)]), message);
    refused(
        &mut cache,
        &all,
        |c| write(c, 0, &[(seq, 4)], &[0; 4]),
        "write of 4 tokens to sequence 0, which has 3",
    );
    let huge = [(seq, usize::MAX), (seq, usize::MAX)];
    let message = format!("k has shape [1, 2, 2, 3], expected [1, 2, {}, 3]", usize::MAX);
    refused(&mut cache, &all, |c| c.append(&huge, &[(k, v), (k, v)]), &message);
    let out = |dims: [[usize; 4]; 2]| dims.map(|dims| Guarded::new(Dtype::F32, dims, Layout::Bhsd));
    for (layer, dims, message) in [
        (2, [[1, 2, 3, 3], [1, 2, 3, 5]], "layer 2 asked for, the cache has 2"),
        (0, [[1, 2, 4, 3], [1, 2, 3, 5]], "k has shape [1, 2, 4, 3], expected [1, 2, 3, 3]"),
        (0, [[1, 2, 3, 3], [2, 2, 3, 5]], "v has shape [2, 2, 3, 5], expected [1, 2, 3, 5]"),
    ] {
        let [mut k, mut v] = out(dims);
        let before = [k.bits(), v.bits()];
        refused(&mut cache, &all, |c| c.linearize(seq, layer, &mut k.view_mut(), &mut v.view_mut()), message);
        assert_eq!([k.bits(), v.bits()], before);
    }
    assert_eq!(cache.pages(2).unwrap_err().to_string(), "layer 2 asked for, the cache has 2");
    // Every codec of this version stores elements, so that only the message can be tested.
    let error = CacheError::NotElements { tensor: "k", codec: Codec::F16 };
    assert_eq!(error.to_string(), "k is stored as f16, which is not a tensor of elements");
}

#[test]
fn descriptions_are_refused_with_their_numbers() {
    let refuse = |change: fn(&mut CacheDesc), message: &str| {
        let mut desc = desc(PAGED, Codec::F16, Codec::F16);
        change(&mut desc);
        assert_eq!(KvCache::new(desc).unwrap_err().to_string(), message);
    };
    let long = format!("is outside 1..={MAX_LEN}");
    refuse(|d| d.layers = 0, &format!("layers 0 {long}"));
    refuse(|d| d.kv_heads = MAX_LEN + 1, &format!("kv_heads {} {long}", MAX_LEN + 1));
    refuse(|d| d.head_dim = 513, "head_dim 513 is outside 1..=512");
    refuse(|d| d.value_dim = 0, "value_dim 0 is outside 1..=512");
    refuse(|d| d.layout = CacheLayout::Paged { pages: 0, page_size: 4 }, &format!("pages 0 {long}"));
    refuse(|d| d.layout = CacheLayout::Paged { pages: 4, page_size: 0 }, &format!("page_size 0 {long}"));
    refuse(|d| d.layout = CacheLayout::Ring { slots: 4, capacity: 0 }, &format!("capacity 0 {long}"));
    refuse(
        |d| d.layout = CacheLayout::Contiguous { slots: MAX_SEQUENCES + 1, capacity: 1 },
        "slots 4194305 is outside 1..=4194304",
    );
    refuse(
        |d| d.layout = CacheLayout::Paged { pages: MAX_LEN, page_size: MAX_LEN },
        "a cache of 2 layers with pools [2147483647, 2, 2147483647, 5] is not addressable",
    );
    refuse(
        |d| (d.layers, d.kv_heads, d.layout) = (MAX_LEN, MAX_LEN, PAGED),
        "a cache of 2147483647 layers with pools [6, 2147483647, 4, 5] is not addressable",
    );
    // Addressable, but more than any machine has.
    refuse(
        |d| {
            d.layout = CacheLayout::Paged { pages: 1, page_size: MAX_LEN };
            (d.layers, d.kv_heads, d.head_dim) = (1, 1 << 18, 512);
        },
        "no memory for 576460752034988032 bytes",
    );
}

#[test]
fn the_memory_report_counts_pages_once() {
    let mut cache = cache(PAGED);
    let token = LAYERS * HEADS * (3 * 4 + 5 * 2);
    assert_eq!(cache.desc().token_bytes(), token);
    let a = sequence(&mut cache, 0..9);
    let b = cache.fork(a).unwrap();
    append(&mut cache, &[(b, 1)], &[9]).unwrap();
    let memory = cache.memory();
    assert_eq!((memory.bytes_reserved, memory.bytes_used), (24 * token, 16 * token));
    assert_eq!((memory.pages, memory.pages_free, memory.pages_shared), (6, 2, 2));
    assert_eq!((memory.sequences, memory.tokens), (2, 19));
    let mut cache = self::cache(RING);
    sequence(&mut cache, 0..9);
    let memory = cache.memory();
    assert_eq!((memory.bytes_reserved, memory.bytes_used), (15 * token, 5 * token));
    assert_eq!((memory.pages, memory.pages_free, memory.sequences, memory.tokens), (3, 2, 1, 5));
}

#[test]
fn pools_start_on_a_cache_line_and_are_zero() {
    for layout in [CONTIGUOUS, RING, PAGED] {
        let cache = cache(layout);
        for layer in 0..LAYERS {
            let (k, v) = cache.pages(layer).unwrap();
            let (pages, page) = layout.pages();
            assert_eq!((k.dtype(), k.shape()), (Dtype::F32, [pages, HEADS, page, DIMS[0]]));
            assert_eq!((v.dtype(), v.shape()), (Dtype::F16, [pages, HEADS, page, DIMS[1]]));
            assert_eq!(k.strides(), [HEADS * page * DIMS[0], page * DIMS[0], DIMS[0], 1]);
            assert_eq!(k.get([pages - 1, HEADS - 1, page - 1, DIMS[0] - 1]), 0.0);
        }
    }
}

#[test]
fn unused_rows_can_be_poisoned() {
    let mut cache = cache(PAGED);
    let a = sequence(&mut cache, 0..6);
    cache.poison_unused();
    holds(&cache, a, 0, 0..6);
    let rows = |cache: &KvCache, poisoned: bool| -> BTreeSet<(usize, usize)> {
        let (k, v) = cache.pages(1).unwrap();
        let all = (0..6).flat_map(|page| (0..4).map(move |row| (page, row)));
        all.filter(|&(page, row)| {
            (0..HEADS).all(|head| {
                (0..3).all(|d| k.get([page, head, row, d]).is_nan() == poisoned)
                    && (0..5).all(|d| v.get([page, head, row, d]).is_nan() == poisoned)
            })
        })
        .collect()
    };
    let held: BTreeSet<_> = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)].into();
    assert_eq!(rows(&cache, false), held);
    assert_eq!(rows(&cache, true).len(), 18);
    cache.remove(a).unwrap();
    cache.poison_unused();
    assert_eq!(rows(&cache, true).len(), 24);
}

#[test]
fn tables_are_refilled_in_place() {
    let mut cache = cache(PAGED);
    let seqs = [sequence(&mut cache, 0..9), sequence(&mut cache, 10..11), cache.create().unwrap()];
    let mut tables = cache.tables(&seqs).unwrap();
    assert_eq!(
        tables,
        BlockTables {
            table: vec![0, 1, 2, 3, NO_PAGE, NO_PAGE, NO_PAGE, NO_PAGE, NO_PAGE],
            width: 3,
            page_size: 4,
            wraps: false,
            lens: vec![9, 1, 0],
            first: vec![0, 0, 0],
        }
    );
    let places = (tables.table.as_ptr(), tables.lens.as_ptr(), tables.first.as_ptr());
    cache.forget(seqs[0], 5).unwrap();
    cache.refill_tables(&[seqs[1], seqs[0], seqs[1]], &mut tables).unwrap();
    assert_eq!((tables.table.as_slice(), tables.width), (&[3, NO_PAGE, 2, 1, 3, NO_PAGE][..], 2));
    assert_eq!(
        (tables.wraps, tables.lens.as_slice(), tables.first.as_slice()),
        (true, &[1, 9, 1][..], &[0, 5, 0][..])
    );
    assert_eq!(
        (tables.locate(1, 4), tables.locate(1, 5), tables.locate(1, 8)),
        (None, Some((1, 1)), Some((2, 0)))
    );
    assert_eq!((tables.locate(1, 9), tables.locate(3, 0), tables.sequences()), (None, None, 3));
    cache.refill_tables(&[], &mut tables).unwrap();
    tables.validate(6).unwrap();
    assert_eq!((tables.table.as_ptr(), tables.lens.as_ptr(), tables.first.as_ptr()), places);
}

#[test]
fn tables_made_by_hand_are_checked() {
    // A ring of two pages in a pool of five, beside a sequence that is shorter than its table.
    let good = BlockTables {
        table: vec![4, 2, 0, NO_PAGE],
        width: 2,
        page_size: 16,
        wraps: true,
        lens: vec![100, 16],
        first: vec![70, 0],
    };
    good.validate(5).unwrap();
    assert_eq!((good.locate(0, 70), good.locate(0, 99)), (Some((4, 6)), Some((4, 3))));
    assert_eq!((good.locate(0, 80), good.locate(1, 15)), (Some((2, 0)), Some((0, 15))));
    let refuse = |change: fn(&mut BlockTables), message: &str| {
        let mut tables = good.clone();
        change(&mut tables);
        assert_eq!(tables.validate(5).unwrap_err().to_string(), message);
    };
    refuse(|t| t.first.truncate(1), "first has 1 entries, expected 2");
    refuse(|t| t.table.push(0), "table has 5 entries, expected 4");
    refuse(|t| t.width = 3, "table has 4 entries, expected 6");
    refuse(|t| t.width = usize::MAX, &format!("table has 4 entries, expected {}", usize::MAX));
    refuse(|t| t.first[1] = 17, "sequence 1 keeps tokens from 17, its length is 16");
    refuse(|t| t.first[0] = 67, "sequence 0 keeps 33 tokens, its pages hold 32");
    refuse(|t| t.page_size = 0, "sequence 0 keeps 30 tokens, its pages hold 0");
    refuse(|t| t.wraps = false, "sequence 0 has length 100, a table that does not wrap reaches 32");
    refuse(|t| t.table[1] = 5, "block 5 of sequence 0 is page 5, the pool has 5");
    refuse(|t| t.lens[1] = 17, "block 1 of sequence 1 has no page");
    // Entries that no kept token needs are not checked.
    for (first, pages) in [(16, 5), (0, 5)] {
        let mut tables = good.clone();
        tables.first[1] = first;
        tables.table[3] = 1000;
        tables.validate(pages).unwrap();
    }
    assert!(matches!(good.validate(4), Err(TableError::Page { sequence: 0, block: 4, page: 4, pages: 4 })));
    let empty = BlockTables { lens: vec![7], first: vec![7], ..BlockTables::default() };
    empty.validate(0).unwrap();
    assert_eq!(empty.locate(0, 7), None);
    let width = BlockTables { lens: vec![1], first: vec![0], ..BlockTables::default() };
    assert_eq!((width.locate(0, 0), width.validate(1).is_err()), (None, true));
}

#[test]
fn shared_prefixes_are_runs_of_the_same_pages() {
    let prefixes = |rows: &[&[u32]], lens: &[usize], first: &[usize]| {
        let width = rows.iter().map(|row| row.len()).max().unwrap_or(0);
        let padded = rows.iter().flat_map(|row| {
            let padding = std::iter::repeat_n(NO_PAGE, width - row.len());
            row.iter().copied().chain(padding).collect::<Vec<_>>()
        });
        let (lens, first) = (lens.to_vec(), first.to_vec());
        let tables = BlockTables { table: padded.collect(), width, page_size: 4, wraps: false, lens, first };
        tables.validate(100).unwrap();
        tables.shared_prefixes(1).into_iter().map(|p| (p.sequences, p.len)).collect::<Vec<_>>()
    };
    assert_eq!(prefixes(&[], &[], &[]), []);
    assert_eq!(prefixes(&[&[1, 2]], &[8], &[0]), []);
    assert_eq!(prefixes(&[&[1, 2], &[2, 1]], &[8, 8], &[0; 2]), []);
    // The last page may be shared up to where both have tokens.
    assert_eq!(prefixes(&[&[1, 2], &[1, 2, 3]], &[7, 9], &[0; 2]), [(0..2, 7)]);
    assert_eq!(prefixes(&[&[1, 2], &[1, 3], &[4], &[4]], &[8, 8, 3, 4], &[0; 4]), [(0..2, 4), (2..4, 3)]);
    // Inner prefixes at either end and in the middle, and nested ones.
    let rows: [&[u32]; 7] = [&[1, 2, 3], &[1, 2, 3], &[1, 2, 4], &[1, 5], &[1, 6, 7], &[1, 6, 8], &[9]];
    let found = prefixes(&rows, &[12, 12, 12, 8, 12, 12, 4], &[0; 7]);
    assert_eq!(found, [(0..6, 4), (0..3, 8), (0..2, 12), (4..6, 8)]);
    // Dropped tokens have no page: all sequences must have dropped them, and then they do not matter.
    let rows: [&[u32]; 3] = [&[NO_PAGE, 2], &[NO_PAGE, 2], &[1, 2]];
    assert_eq!(prefixes(&rows, &[8, 7, 8], &[4, 6, 0]), [(0..2, 7)]);
    let broken = BlockTables { width: 9, page_size: 0, lens: vec![5; 3], ..BlockTables::default() };
    assert_eq!(broken.shared_prefixes(1), []);
}

/// A sequence of the naive cache: all its tokens, and an id for the page of each block with a kept token.
#[derive(Clone)]
struct NaiveSequence {
    id: SeqId,
    first: usize,
    tokens: Vec<Token>,
    pages: BTreeMap<usize, u64>,
}

/// A cache that is a list of tokens per sequence. It applies an operation to a copy of itself and then checks whether
/// the layout allows the result.
#[derive(Clone)]
struct Naive {
    layout: CacheLayout,
    sequences: Vec<NaiveSequence>,
    /// Page ids used so far.
    names: u64,
}

/// A snapshot's tokens.
#[derive(Clone)]
struct NaiveSnapshot {
    first: usize,
    tokens: Vec<Token>,
}

type Answer<T> = Result<T, &'static str>;

impl Naive {
    fn name(&mut self) -> u64 {
        self.names += 1;
        self.names
    }

    fn position(&self, id: SeqId) -> Answer<usize> {
        self.sequences.iter().position(|s| s.id == id).ok_or("RemovedSequence")
    }

    fn holders(&self, name: u64) -> usize {
        self.sequences.iter().filter(|s| s.pages.values().any(|&page| page == name)).count()
    }

    fn names_held(&self) -> BTreeSet<u64> {
        self.sequences.iter().flat_map(|s| s.pages.values().copied()).collect()
    }

    /// Drops the tokens that the layout does not keep, and assigns ids to the pages of the others.
    fn settle(&mut self, at: usize) {
        let mut s = self.sequences[at].clone();
        let (_, page) = self.layout.pages();
        let needed: BTreeSet<usize> = match self.layout {
            CacheLayout::Paged { .. } => (s.first..s.tokens.len()).map(|j| j / page).collect(),
            CacheLayout::Ring { capacity, .. } => {
                s.first = s.first.max(s.tokens.len().saturating_sub(capacity));
                [0].into()
            }
            _ => [0].into(),
        };
        s.pages.retain(|block, _| needed.contains(block));
        for block in needed {
            let name = self.name();
            s.pages.entry(block).or_insert(name);
        }
        self.sequences[at] = s;
    }

    /// Gives a sequence exclusive pages for the blocks of tokens `from..to`.
    fn own(&mut self, at: usize, from: usize, to: usize) {
        let (_, page) = self.layout.pages();
        let blocks: BTreeSet<usize> = (from..to).map(|j| j / page).collect();
        for block in blocks {
            match self.sequences[at].pages.get(&block) {
                Some(&name) if self.holders(name) > 1 => {
                    let name = self.name();
                    self.sequences[at].pages.insert(block, name);
                }
                _ => {}
            }
        }
    }

    /// The result of an operation, if the layout has room for it.
    fn commit(&mut self, next: Self) -> Answer<()> {
        let (pages, _) = self.layout.pages();
        if next.names_held().len() > pages {
            let paged = matches!(self.layout, CacheLayout::Paged { .. });
            return Err(if paged { "OutOfPages" } else { "OutOfSlots" });
        }
        *self = next;
        Ok(())
    }

    fn check_len(&self, len: usize) -> Answer<()> {
        match self.layout {
            CacheLayout::Contiguous { capacity, .. } if len > capacity => Err("Capacity"),
            _ => Ok(()),
        }
    }

    /// A sequence with these tokens, whose id is not known yet.
    fn add(&mut self, id: SeqId, first: usize, tokens: Vec<Token>) -> Answer<()> {
        self.check_len(tokens.len())?;
        let mut next = self.clone();
        next.sequences.push(NaiveSequence { id, first, tokens, pages: BTreeMap::new() });
        next.settle(next.sequences.len() - 1);
        self.commit(next)
    }

    fn fork(&mut self, of: SeqId, id: SeqId) -> Answer<()> {
        let from = self.sequences[self.position(of)?].clone();
        if matches!(self.layout, CacheLayout::Paged { .. }) {
            self.sequences.push(NaiveSequence { id, ..from });
            return Ok(());
        }
        self.add(id, from.first, from.tokens)
    }

    fn remove(&mut self, id: SeqId) -> Answer<()> {
        let at = self.position(id)?;
        self.sequences.remove(at);
        Ok(())
    }

    fn batch(
        &self,
        batch: &[(SeqId, usize)],
        check: impl Fn(&NaiveSequence, usize) -> Answer<()>,
    ) -> Answer<()> {
        let mut seen = Vec::new();
        for &(id, tokens) in batch {
            let at = self.position(id)?;
            if seen.contains(&at) {
                return Err("DuplicateSequence");
            }
            seen.push(at);
            check(&self.sequences[at], tokens)?;
        }
        Ok(())
    }

    fn extend(&mut self, batch: &[(SeqId, usize)]) -> Answer<()> {
        self.batch(batch, |s, tokens| self.check_len(s.tokens.len() + tokens))?;
        let mut next = self.clone();
        for &(id, tokens) in batch {
            let at = next.position(id)?;
            let len = next.sequences[at].tokens.len();
            next.own(at, len, len + tokens);
            next.sequences[at].tokens.resize(len + tokens, [None; LAYERS]);
            next.settle(at);
        }
        self.commit(next)
    }

    fn write(&mut self, layer: usize, batch: &[(SeqId, usize)], ids: &[u32]) -> Answer<()> {
        self.batch(batch, |s, tokens| if tokens > s.tokens.len() { Err("Tokens") } else { Ok(()) })?;
        let mut next = self.clone();
        let mut ids = ids.iter();
        for &(id, tokens) in batch {
            let at = next.position(id)?;
            let (first, len) = (next.sequences[at].first, next.sequences[at].tokens.len());
            next.own(at, first.max(len - tokens), len);
            for token in &mut next.sequences[at].tokens[len - tokens..] {
                token[layer] = ids.next().copied();
            }
        }
        self.commit(next)
    }

    fn append(&mut self, batch: &[(SeqId, usize)], ids: &[u32]) -> Answer<()> {
        self.extend(batch)?;
        (0..LAYERS).try_for_each(|layer| self.write(layer, batch, ids))
    }

    fn truncate(&mut self, id: SeqId, len: usize) -> Answer<()> {
        let at = self.position(id)?;
        let s = &mut self.sequences[at];
        if len < s.first || len > s.tokens.len() {
            return Err("Position");
        }
        s.tokens.truncate(len);
        self.settle(at);
        Ok(())
    }

    fn forget(&mut self, id: SeqId, before: usize) -> Answer<()> {
        let at = self.position(id)?;
        let s = &mut self.sequences[at];
        if before > s.tokens.len() {
            return Err("Position");
        }
        s.first = s.first.max(before);
        self.settle(at);
        Ok(())
    }

    /// Checks everything in the memory report.
    fn check_memory(&self, cache: &KvCache) {
        let memory = cache.memory();
        let names = self.names_held();
        let shared = names.iter().filter(|&&name| self.holders(name) > 1).count();
        let tokens: usize = self.sequences.iter().map(|s| s.tokens.len() - s.first).sum();
        assert_eq!((memory.pages - memory.pages_free, memory.pages_shared), (names.len(), shared));
        assert_eq!((memory.sequences, memory.tokens), (self.sequences.len(), tokens));
    }
}

/// Name of an error's variant.
fn variant(error: &CacheError) -> String {
    let text = format!("{error:?}");
    text.split([' ', '{']).next().unwrap().to_owned()
}

/// A cache and its model.
struct Pair {
    cache: KvCache,
    naive: Naive,
    removed: Option<SeqId>,
}

/// Checks that cache and model agree on whether an operation succeeds, and on the reason if not.
fn agree(got: Result<(), CacheError>, expected: Answer<()>) -> Answer<()> {
    assert_eq!(got.map_err(|e| variant(&e)), expected.map_err(str::to_owned));
    expected
}

impl Pair {
    fn new(desc: CacheDesc) -> Self {
        let naive = Naive { layout: desc.layout, sequences: Vec::new(), names: 0 };
        Self { cache: KvCache::new(desc).unwrap(), naive, removed: None }
    }

    /// A random sequence; rarely a removed one.
    fn any(&self, rng: &mut Rng) -> Option<SeqId> {
        let live = self.naive.sequences.get(rng.below(self.naive.sequences.len())).map(|s| s.id);
        if rng.below(25) == 0 { self.removed.or(live) } else { live }
    }

    fn len(&self, id: SeqId) -> usize {
        self.naive.position(id).map_or(0, |at| self.naive.sequences[at].tokens.len())
    }

    /// Random sequences, rarely one of them twice, each with a number of tokens.
    fn some(&self, rng: &mut Rng, tokens: impl Fn(&mut Rng, usize) -> usize) -> Vec<(SeqId, usize)> {
        let mut batch: Vec<(SeqId, usize)> = Vec::new();
        for _ in 0..1 + rng.below(4) {
            let Some(id) = self.any(rng) else { break };
            if rng.below(40) == 0 || batch.iter().all(|&(other, _)| other != id) {
                batch.push((id, tokens(rng, self.len(id))));
            }
        }
        batch
    }

    /// Adds the new sequence, whose id is known only now, to the model, or checks that the model refuses it.
    fn made(
        &mut self,
        (got, stand_in): (Result<SeqId, CacheError>, SeqId),
        affected: &mut Vec<SeqId>,
        add: impl FnOnce(&mut Naive, SeqId) -> Answer<()>,
    ) -> Answer<()> {
        affected.extend(got.as_ref().ok());
        let expected = add(&mut self.naive, *got.as_ref().unwrap_or(&stand_in));
        agree(got.map(drop), expected)
    }

    fn check(&self, id: SeqId, rng: &mut Rng) {
        let Ok(at) = self.naive.position(id) else { return };
        let s = &self.naive.sequences[at];
        let (dtype, layout) = (DTYPES[rng.below(3)], Layout::ALL[rng.below(4)]);
        check(&self.cache, id, s.first, &s.tokens[s.first..], dtype, layout);
    }

    fn check_all(&self, rng: &mut Rng) {
        self.naive.sequences.iter().for_each(|s| self.check(s.id, rng));
        let ids: Vec<SeqId> = self.naive.sequences.iter().map(|s| s.id).collect();
        self.cache.tables(&ids).unwrap().validate(self.cache.memory().pages).unwrap();
    }
}

/// Ten thousand random operations on caches of several layouts that exchange snapshots.
fn random_operations(seed: u64) {
    let mut rng = Rng::new(seed);
    let [k, v] = [0; 2].map(|_| Codec::from(DTYPES[rng.below(3)]));
    let layouts = [
        CacheLayout::Contiguous { slots: 4, capacity: 9 },
        CacheLayout::Ring { slots: 4, capacity: 1 + rng.below(7) },
        CacheLayout::Paged { pages: 9, page_size: 4 },
        CacheLayout::Paged { pages: 4 + rng.below(30), page_size: 1 + rng.below(5) },
    ];
    let mut pairs = layouts.map(|layout| Pair::new(desc(layout, k, v)));
    let stand_in = KvCache::new(desc(PAGED, k, v)).unwrap().create().unwrap();
    let mut snapshots: Vec<(Snapshot, NaiveSnapshot)> = Vec::new();
    let mut next_id = 0u32;
    let mut fresh = |n: usize| -> Vec<u32> {
        next_id += n as u32;
        (next_id - n as u32..next_id).collect()
    };
    let mut refusals: BTreeMap<&str, usize> = BTreeMap::new();
    for operation in 0..10_000 {
        let pair = &mut pairs[rng.below(layouts.len())];
        let (dtype, layout) = (DTYPES[rng.below(3)], Layout::ALL[rng.below(4)]);
        let total = |batch: &[(SeqId, usize)]| batch.iter().map(|&(_, n)| n).sum::<usize>();
        let few = |rng: &mut Rng, _: usize| if rng.below(12) == 0 { rng.below(14) } else { rng.below(4) };
        let before = pair.cache.memory();
        let mut affected: Vec<SeqId> = Vec::new();
        let choice = rng.below(32);
        let seq = pair.any(&mut rng);
        let outcome = match (choice, seq) {
            (0..3, _) => {
                let got = pair.cache.create();
                pair.made((got, stand_in), &mut affected, |naive, id| naive.add(id, 0, Vec::new()))
            }
            (3..15, _) => {
                let batch = pair.some(&mut rng, few);
                let ids = fresh(total(&batch));
                let layers: Vec<_> = (0..LAYERS).map(|layer| rows(&ids, layer, dtype, layout)).collect();
                let layers: Vec<_> = layers.iter().map(views).collect();
                affected.extend(batch.iter().map(|&(id, _)| id));
                agree(pair.cache.append(&batch, &layers), pair.naive.append(&batch, &ids))
            }
            (15..17, _) => {
                let batch = pair.some(&mut rng, few);
                affected.extend(batch.iter().map(|&(id, _)| id));
                agree(pair.cache.extend(&batch), pair.naive.extend(&batch))
            }
            (17..20, _) => {
                let batch =
                    pair.some(&mut rng, |rng, len| rng.below(len + 1) + usize::from(rng.below(30) == 0));
                let ids = fresh(total(&batch));
                let layer = rng.below(LAYERS);
                let [k, v] = rows(&ids, layer, dtype, layout);
                affected.extend(batch.iter().map(|&(id, _)| id));
                let got = pair.cache.write(layer, &batch, &k.view(), &v.view());
                agree(got, pair.naive.write(layer, &batch, &ids))
            }
            (20..22, Some(seq)) => {
                let len = pair.len(seq);
                let len = len.saturating_sub(rng.below(5)) + usize::from(rng.below(20) == 0) * 5;
                affected.push(seq);
                agree(pair.cache.truncate(seq, len), pair.naive.truncate(seq, len))
            }
            (22..24, Some(seq)) => {
                let before = rng.below(pair.len(seq) + 2);
                affected.push(seq);
                agree(pair.cache.forget(seq, before), pair.naive.forget(seq, before))
            }
            (24..27, Some(seq)) => {
                let got = pair.cache.fork(seq);
                affected.push(seq);
                pair.made((got, stand_in), &mut affected, |naive, id| naive.fork(seq, id))
            }
            (27..29, Some(seq)) => {
                let got = pair.cache.remove(seq);
                if got.is_ok() {
                    pair.removed = Some(seq);
                }
                agree(got, pair.naive.remove(seq))
            }
            (29, Some(seq)) => match (pair.cache.snapshot(seq), pair.naive.position(seq)) {
                (Ok(snapshot), Ok(at)) => {
                    let s = &pair.naive.sequences[at];
                    let tokens = NaiveSnapshot { first: s.first, tokens: s.tokens.clone() };
                    if snapshots.len() == 4 {
                        snapshots.swap_remove(rng.below(4));
                    }
                    snapshots.push((snapshot, tokens));
                    Ok(())
                }
                (got, expected) => agree(got.map(drop), expected.map(drop)),
            },
            (30..32, _) if !snapshots.is_empty() => {
                let (snapshot, tokens) = &snapshots[rng.below(snapshots.len())];
                let NaiveSnapshot { first, tokens } = tokens.clone();
                let got = pair.cache.restore(snapshot);
                pair.made((got, stand_in), &mut affected, |naive, id| naive.add(id, first, tokens))
            }
            _ => continue,
        };
        pair.cache.poison_unused();
        pair.naive.check_memory(&pair.cache);
        match outcome {
            Ok(()) => affected.iter().for_each(|&id| pair.check(id, &mut rng)),
            Err(refusal) => {
                *refusals.entry(refusal).or_insert(0) += 1;
                assert_eq!(pair.cache.memory(), before);
                pair.check_all(&mut rng);
            }
        }
        if operation % 50 == 0 {
            pairs.iter().for_each(|pair| pair.check_all(&mut rng));
        }
    }
    // Every refusal that can occur this way occurred often, and most operations were not refused.
    let kinds = [
        "Capacity",
        "DuplicateSequence",
        "OutOfPages",
        "OutOfSlots",
        "Position",
        "RemovedSequence",
        "Tokens",
    ];
    assert_eq!(refusals.keys().copied().collect::<Vec<_>>(), kinds);
    let refused: usize = refusals.values().sum();
    assert!(refusals.values().all(|&n| n > 20) && refused < 5_000, "{refusals:?}");
    for pair in &mut pairs {
        pair.check_all(&mut rng);
        for s in &pair.naive.sequences {
            pair.cache.remove(s.id).unwrap();
        }
        let memory = pair.cache.memory();
        assert_eq!((memory.pages_free, memory.bytes_used), (memory.pages, 0));
        assert_eq!((memory.pages_shared, memory.sequences, memory.tokens), (0, 0, 0));
    }
}

#[test]
fn random_operations_match_a_naive_cache() {
    (0..2).into_par_iter().for_each(random_operations);
}

/// Time to append a token to each of 256 sequences, compared with copying the same rows to the same places. A
/// measurement, not part of a normal run: `cargo test --release --test it append_cost -- --ignored --nocapture`.
#[test]
#[ignore = "measures time"]
fn append_cost() {
    const SEQUENCES: usize = 256;
    const STEPS: usize = 200;
    println!("layers heads dim codec   append us   copies us   difference us   bookkeeping us");
    for (layers, heads, dim) in [(1, 1, 64), (1, 8, 128), (4, 8, 128)] {
        let pages = SEQUENCES * (STEPS / 16 + 2);
        let layout = CacheLayout::Paged { pages, page_size: 16 };
        let mut cache = KvCache::new(CacheDesc::new(
            layout,
            CacheShape { layers, kv_heads: heads, head_dim: dim, value_dim: dim },
            Codec::BF16,
        ))
        .unwrap();
        let batch: Vec<(SeqId, usize)> = (0..SEQUENCES).map(|_| (cache.create().unwrap(), 1)).collect();
        let ids: Vec<SeqId> = batch.iter().map(|&(id, _)| id).collect();
        let data = vec![bf16::from_f32(1.5); SEQUENCES * heads * dim];
        let kv = TensorView::packed(&data, [SEQUENCES, heads, dim]).unwrap();
        let kv = vec![(kv, kv); layers];
        // Plain memory, written with equal rows at equal offsets, as the baseline.
        let mut plain = vec![vec![bf16::ZERO; pages * heads * 16 * dim]; 2 * layers];
        for memory in &mut plain {
            memory.fill(bf16::ONE);
        }
        // The pools are touched before the measurement too.
        cache.poison_unused();
        let mut tables = BlockTables::default();
        let mut places = Vec::new();
        let (mut appends, mut copies, mut books) = (Vec::new(), Vec::new(), Vec::new());
        for step in 0..STEPS {
            let start = Instant::now();
            cache.append(&batch, &kv).unwrap();
            appends.push(start.elapsed());
            cache.refill_tables(&ids, &mut tables).unwrap();
            places.clear();
            for sequence in 0..SEQUENCES {
                let (page, row) = tables.locate(sequence, step).unwrap();
                places.extend((0..heads).map(|head| ((page * heads + head) * 16 + row) * dim));
            }
            let start = Instant::now();
            for memory in plain.chunks_exact_mut(2) {
                let [k, v] = memory else { unreachable!("two pools a layer") };
                for (row, &at) in data.chunks_exact(dim).zip(&places) {
                    k[at..at + dim].copy_from_slice(row);
                    v[at..at + dim].copy_from_slice(row);
                }
            }
            copies.push(start.elapsed());
            std::hint::black_box(&plain);
        }
        let mut cache = KvCache::new(*cache.desc()).unwrap();
        let batch: Vec<(SeqId, usize)> = (0..SEQUENCES).map(|_| (cache.create().unwrap(), 1)).collect();
        for _ in 0..STEPS {
            let start = Instant::now();
            cache.extend(&batch).unwrap();
            books.push(start.elapsed());
        }
        let [append, copy, book] = [appends, copies, books].map(|mut times| {
            times.sort();
            times[times.len() / 2].as_secs_f64() * 1e6
        });
        println!(
            "{layers:6} {heads:5} {dim:3} bf16 {append:12.1} {copy:11.1} {:15.1} {book:16.1}",
            append - copy
        );
    }
}

/// Encoding rate: bytes of input per second that one thread stores in each codec, keys and values in turns, with the
/// checks of every append. A measurement, not part of a normal run: `cargo test --release --test it encoding_rate --
/// --ignored --nocapture`.
#[test]
#[ignore = "measures time"]
fn encoding_rate() {
    const HEADS: usize = 8;
    const TOKENS: usize = 2048;
    println!("codec           dim  GB/s: f16   bf16    f32   ns a vector of f16  spread");
    for dim in [64, 128, 256] {
        let mut rng = Rng::new(5);
        let x: Vec<f32> = (0..TOKENS * HEADS * dim).map(|_| rng.normal()).collect();
        let (half, brain): (Vec<f16>, Vec<bf16>) =
            x.iter().map(|x| (f16::from_f32(*x), bf16::from_f32(*x))).unzip();
        let shape = [TOKENS, HEADS, dim];
        let inputs = [
            TensorView::packed(&half, shape).unwrap(),
            TensorView::packed(&brain, shape).unwrap(),
            TensorView::packed(&x, shape).unwrap(),
        ];
        for codec in Codec::ALL.into_iter().filter(|codec| codec.supports(dim)) {
            let of = inputs.map(|input| rate(codec, &input));
            let [rates, times, spreads] = [0, 1, 2].map(|n| of.map(|of| of[n]));
            println!(
                "{codec:14} {dim:4} {:10.2} {:6.2} {:6.2} {:20.0} {:6.1}%",
                rates[0], rates[1], rates[2], times[0], spreads[0]
            );
        }
    }
}

/// GB/s, ns per vector, and half the interquartile range in percent of the median, after checking the decoded rows.
fn rate(codec: Codec, rows: &TensorView<'_>) -> [f64; 3] {
    let [_, heads, tokens, dim] = rows.shape();
    let layout = CacheLayout::Contiguous { slots: 1, capacity: tokens };
    let mut cache = KvCache::new(CacheDesc::new(
        layout,
        CacheShape { layers: 1, kv_heads: heads, head_dim: dim, value_dim: dim },
        codec,
    ))
    .unwrap();
    // The first pass touches the pages and is checked.
    let seq = cache.create().unwrap();
    cache.append(&[(seq, tokens)], &[(*rows, *rows)]).unwrap();
    let tensor = || Guarded::new(Dtype::F32, [1, heads, tokens, dim], Layout::Bhsd);
    let (mut k, mut v) = (tensor(), tensor());
    cache.linearize(seq, 0, &mut k.view_mut(), &mut v.view_mut()).unwrap();
    // Relative to the energy of rows of 128 elements; for elements and the format of mlx-native, a few times their
    // rounding error.
    let limit = match codec {
        Codec::Tq2 => 0.14,
        Codec::Tq3 => 0.036,
        Codec::Tq4 => 8.8e-3,
        Codec::Tq5 => 2.2e-3,
        Codec::Tq6 => 5.5e-4,
        Codec::Fp8 => 7.3e-4,
        Codec::Int8 => 4.6e-5,
        Codec::Rot16 => 1e-7,
        _ if codec.dtype().is_some() => 1e-5,
        _ => 1.2e-2,
    };
    // Longer rows have larger maxima, and steps are fractions of the maximum.
    let limit = if dim > 128 { 1.5 * limit } else { limit };
    for back in [k.values(), v.values()] {
        let (mut error, mut energy) = (0.0, 0.0);
        for (at, back) in back.into_iter().enumerate() {
            let want = f64::from(rows.get([0, at / dim / tokens, at / dim % tokens, at % dim]));
            error += (f64::from(back) - want).powi(2);
            energy += want.powi(2);
        }
        assert!(error <= limit * energy, "{codec} of {dim}: {}", error / energy);
    }
    cache.remove(seq).unwrap();
    let mut times = Vec::new();
    let start = Instant::now();
    while times.len() < 9 || start.elapsed().as_secs_f64() < 0.1 {
        let seq = cache.create().unwrap();
        let start = Instant::now();
        cache.append(&[(seq, tokens)], &[(*rows, *rows)]).unwrap();
        times.push(start.elapsed().as_secs_f64());
        cache.remove(seq).unwrap();
    }
    times.sort_by(f64::total_cmp);
    let [low, middle, high] = [1, 2, 3].map(|n| times[n * times.len() / 4] / (2 * tokens * heads) as f64);
    [(dim * rows.dtype().bytes()) as f64 / middle / 1e9, middle * 1e9, 50.0 * (high - low) / middle]
}
