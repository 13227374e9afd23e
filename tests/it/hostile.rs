//! Inputs that no model or encoder produces: snapshots that are cut or changed; rows of zeros, NaN and infinities
//! wherever a cache takes rows; tables and descriptions of any numbers.

use flashtile::cache::{BlockTables, CsrTables, KeyTransformError, NO_PAGE, Snapshot};
use flashtile::codec::{CodePages, EncodeError, MAX_NORM, Side};
use flashtile::plan::known_machines;
use flashtile::problem::MAX_LEN;
use flashtile::{
    CacheDesc, CacheError, CacheLayout, CacheShape, Codec, Cpu, Dims, Dtype, HeadShape, KvCache, Outputs,
    PlanOptions, ProblemDesc, QOffset, SeqId, SeqLens, Sequences, SharedPrefix, TensorView, Visibility,
    reference,
};
use flashtile_testkit::{Guarded, Layout, Rng};

const HEADS: usize = 2;
/// Dimensions whose products are integers if the machine supports them.
const DIMS: [usize; 2] = [64, 128];
const LAYERS: usize = 2;
const TOKENS: usize = 7;

const LAYOUTS: [CacheLayout; 3] = [
    CacheLayout::Contiguous { slots: 2, capacity: 20 },
    CacheLayout::Ring { slots: 2, capacity: 5 },
    CacheLayout::Paged { pages: 12, page_size: 4 },
];

/// Codecs that support these dimensions.
fn codecs() -> impl Iterator<Item = Codec> {
    let fits = |codec: &Codec| DIMS.into_iter().all(|dim| codec.supports(dim));
    Codec::ALL.into_iter().filter(fits)
}

fn desc(layout: CacheLayout, k: Codec, v: Codec) -> CacheDesc {
    let mut desc = CacheDesc::new(
        layout,
        CacheShape { layers: LAYERS, kv_heads: HEADS, head_dim: DIMS[0], value_dim: DIMS[1] },
        k,
    );
    desc.v = v;
    desc
}

fn rows(seed: u64, tokens: usize, dim: usize) -> Vec<f32> {
    let mut rng = Rng::new(seed);
    (0..tokens * HEADS * dim).map(|_| rng.normal()).collect()
}

fn append(cache: &mut KvCache, seq: SeqId, k: &[f32], v: &[f32]) -> Result<(), CacheError> {
    let n = k.len() / HEADS / DIMS[0];
    let view = |x, dim| TensorView::packed::<f32>(x, [n, HEADS, dim]).unwrap();
    let pair = (view(k, DIMS[0]), view(v, DIMS[1]));
    cache.append(&[(seq, n)], &[pair; LAYERS])
}

/// An empty cache with a mean of the keys of every layer, if they are quantized, and factors, if the codec takes them.
fn centered(desc: CacheDesc) -> KvCache {
    let mut cache = KvCache::new(desc).unwrap();
    for layer in 0..LAYERS {
        if desc.k.dtype().is_none() {
            cache.set_key_mean(layer, &rows(7 + layer as u64, 1, DIMS[0])).unwrap();
        }
        if desc.k.supports_key_factors() {
            cache.set_key_factors(layer, &rows(17 + layer as u64, 1, DIMS[0])).unwrap();
        }
    }
    cache
}

/// A cache with one sequence of random tokens.
fn filled(desc: CacheDesc) -> (KvCache, SeqId) {
    filled_in(KvCache::new(desc).unwrap())
}

/// Like [`filled`], with centered keys.
fn filled_centered(desc: CacheDesc) -> (KvCache, SeqId) {
    filled_in(centered(desc))
}

fn filled_in(mut cache: KvCache) -> (KvCache, SeqId) {
    let seq = cache.create().unwrap();
    append(&mut cache, seq, &rows(1, TOKENS, DIMS[0]), &rows(2, TOKENS, DIMS[1])).unwrap();
    (cache, seq)
}

/// Keys and values of a layer as bits, so that NaN compares equal.
fn contents(cache: &KvCache, seq: SeqId, layer: usize) -> [Vec<u32>; 2] {
    let kept = cache.len(seq).unwrap() - cache.first(seq).unwrap();
    let [mut k, mut v] = DIMS.map(|dim| Guarded::new(Dtype::F32, [1, HEADS, kept, dim], Layout::Bhsd));
    cache.linearize(seq, layer, &mut k.view_mut(), &mut v.view_mut()).unwrap();
    [k, v].map(|x| x.values().into_iter().map(f32::to_bits).collect())
}

/// Attention of one query over a layer, by the kernels and by the oracle.
fn attend(cache: &KvCache, seq: SeqId, layer: usize) -> (Vec<f32>, Vec<f64>) {
    let kept = cache.len(seq).unwrap();
    let mut desc = ProblemDesc::cached(
        HeadShape { q_heads: 2 * HEADS, kv_heads: HEADS, head_dim: DIMS[0], value_dim: DIMS[1] },
        Dtype::F32,
        &[SeqLens::decode(kept)],
    );
    (desc.k_codec, desc.v_codec) = (Some(cache.desc().k), Some(cache.desc().v));
    desc.visibility = flashtile::Visibility::window(Some(3), Some(0));
    let problem = desc.validate().unwrap();
    let tables = cache.tables(&[seq]).unwrap();
    let q = rows(9, 2, DIMS[0]);
    let q = TensorView::packed::<f32>(&q, [1, 2 * HEADS, DIMS[0]]).unwrap();
    let inputs = cache.inputs(layer, q, &tables).unwrap();
    let mut out = Guarded::new(Dtype::F32, [1, 2 * HEADS, 1, DIMS[1]], Layout::Bhsd);
    let cpu = Cpu::new();
    let plan = cpu.plan(&problem, PlanOptions::default()).unwrap();
    cpu.run(&plan, &inputs, &mut Outputs::new(out.view_mut()), &mut plan.workspace()).unwrap();
    (out.values(), reference::attention(&problem, &inputs).unwrap().out)
}

#[test]
fn snapshots_as_bytes_are_the_snapshots() {
    for layout in LAYOUTS {
        for (k, v) in codecs().zip(codecs().collect::<Vec<_>>().into_iter().rev()) {
            let (mut cache, seq) = filled_centered(desc(layout, k, v));
            cache.forget(seq, 3).unwrap();
            let snapshot = cache.snapshot(seq).unwrap();
            let bytes = snapshot.to_bytes();
            let read = Snapshot::from_bytes(&bytes).unwrap();
            assert_eq!((read.first(), read.len(), read.as_bytes()), (3, TOKENS, snapshot.as_bytes()));
            assert_eq!(read.to_bytes(), bytes);
            let mut other = centered(desc(LAYOUTS[2], k, v));
            let restored = other.restore(&read).unwrap();
            other.poison_unused();
            for layer in 0..LAYERS {
                assert_eq!(contents(&other, restored, layer), contents(&cache, seq, layer), "{k} {v}");
                assert_eq!(read.key_mean(layer).unwrap(), cache.key_mean(layer).unwrap());
                assert_eq!(read.key_mean(layer).unwrap().is_some(), k.dtype().is_none());
                assert_eq!(read.key_factors(layer).unwrap(), cache.key_factors(layer).unwrap());
                assert_eq!(read.key_factors(layer).unwrap().is_some(), k.supports_key_factors());
            }
            assert_eq!(read.key_mean(LAYERS), Err(CacheError::Layer { got: LAYERS, layers: LAYERS }));
            // Also of an empty sequence.
            let empty = cache.create().unwrap();
            let empty = cache.snapshot(empty).unwrap();
            assert!(Snapshot::from_bytes(&empty.to_bytes()).unwrap().is_empty());
        }
    }
}

#[test]
fn snapshots_that_are_cut_or_longer_are_refused() {
    for (k, v) in [(Codec::F16, Codec::F32), (Codec::Int8, Codec::Tq5)] {
        let (cache, seq) = filled_centered(desc(LAYOUTS[0], k, v));
        let bytes = cache.snapshot(seq).unwrap().to_bytes();
        for cut in 0..bytes.len() {
            let refusal = Snapshot::from_bytes(&bytes[..cut]).unwrap_err();
            assert!(
                matches!(refusal, CacheError::SnapshotLength { got, .. } if got == cut),
                "{cut}: {refusal}"
            );
        }
        let got = bytes.len() - 1;
        let refusal = Snapshot::from_bytes(&bytes[..got]).unwrap_err().to_string();
        assert_eq!(refusal, format!("snapshot has {got} bytes, expected {}", got + 1));
        let longer = [&bytes[..], &[0]].concat();
        let refusal = Snapshot::from_bytes(&longer).unwrap_err().to_string();
        assert_eq!(refusal, format!("snapshot has {} bytes, expected {}", bytes.len() + 1, bytes.len()));
    }
}

/// Bytes of the header before the numbers, and before the names of codecs.
const NUMBERS: usize = 16;
const NAMES: usize = NUMBERS + 6 * 8;

#[test]
fn headers_that_say_something_else_are_refused() {
    let (cache, seq) = filled(desc(LAYOUTS[0], Codec::Int8, Codec::Tq5));
    let bytes = cache.snapshot(seq).unwrap().to_bytes();
    let refuse = |at: usize, with: &[u8], why: &str| {
        let mut changed = bytes.clone();
        changed[at..at + with.len()].copy_from_slice(with);
        assert_eq!(Snapshot::from_bytes(&changed).unwrap_err().to_string(), why);
    };
    refuse(0, b"safetens", "snapshot has another magic than this version reads");
    refuse(8, &3u32.to_ne_bytes(), "snapshot has another version than this version reads");
    refuse(
        12,
        &0x0102_0304u32.swap_bytes().to_ne_bytes(),
        "snapshot has another byte order than this version reads",
    );
    let number = |index: usize, x: u64, why: &str| refuse(NUMBERS + 8 * index, &x.to_ne_bytes(), why);
    number(0, 0, &format!("layers 0 is outside 1..={MAX_LEN}"));
    number(0, u64::MAX, &format!("layers {} is outside 1..={MAX_LEN}", usize::MAX));
    number(1, 1 << 40, &format!("kv_heads {} is outside 1..={MAX_LEN}", 1u64 << 40));
    number(2, 513, "head_dim 513 is outside 1..=512");
    number(3, 0, "value_dim 0 is outside 1..=512");
    number(4, 8, &format!("snapshot keeps tokens 8..7, expected a range that ends by {MAX_LEN}"));
    let far = MAX_LEN as u64 + 1;
    number(5, far, &format!("snapshot keeps tokens 0..{far}, expected a range that ends by {MAX_LEN}"));
    let name = |name: &[u8]| [name, &vec![0; 16 - name.len()]].concat();
    refuse(NAMES, &name(b"int9"), "snapshot has another codec of k than this version reads");
    refuse(NAMES + 16, &name(b""), "snapshot has another codec of v than this version reads");
    refuse(NAMES, &name(b"\0int8"), "snapshot has another codec of k than this version reads");
    let why = format!("k is mlx-tq8 with {} elements a row, expected 256 or 512", DIMS[0]);
    refuse(NAMES, &name(b"mlx-tq8"), &why);
    refuse(NAMES + 32, &[4], "snapshot has another flag of a mean or of factors than this version reads");
    // Another codec or dimension has another number of bytes.
    let (k, v) = (Codec::Int8.row_bytes(DIMS[0]), Codec::Tq5.row_bytes(DIMS[1]));
    let other = Codec::Tq2.row_bytes(DIMS[1]);
    let per_token = LAYERS * HEADS * TOKENS;
    assert_eq!(bytes.len(), NAMES + 32 + LAYERS + per_token * (k + v));
    let expected = bytes.len() - per_token * (v - other);
    refuse(NAMES + 16, &name(b"tq2"), &format!("snapshot has {} bytes, expected {expected}", bytes.len()));
    let expected = bytes.len() + HEADS * DIMS[0] * 4;
    refuse(NAMES + 32, &[1], &format!("snapshot has {} bytes, expected {expected}", bytes.len()));
    number(
        0,
        MAX_LEN as u64,
        &format!("snapshot has {} bytes, expected {}", bytes.len(), NAMES + 32 + MAX_LEN),
    );

    // Means that no cache can have.
    let (cache, seq) = filled_centered(desc(LAYOUTS[0], Codec::Int8, Codec::Tq5));
    let mut bytes = cache.snapshot(seq).unwrap().to_bytes();
    let at = NAMES + 32 + LAYERS + 4 * 5;
    bytes[at..at + 4].copy_from_slice(&f32::NAN.to_ne_bytes());
    assert_eq!(Snapshot::from_bytes(&bytes).unwrap_err(), KeyTransformError::MeanNotFinite.into());
    bytes[NAMES..NAMES + 16].copy_from_slice(&name(b"f32"));
    assert_eq!(
        Snapshot::from_bytes(&bytes).unwrap_err(),
        KeyTransformError::MeanOfElements { codec: Codec::F32 }.into()
    );
}

#[test]
fn a_snapshot_of_other_rows_is_refused_by_the_cache() {
    let (cache, seq) = filled(desc(LAYOUTS[0], Codec::Int8, Codec::Tq5));
    let read = Snapshot::from_bytes(&cache.snapshot(seq).unwrap().to_bytes()).unwrap();
    let refuse = |change: fn(&mut CacheDesc), why: &str| {
        let mut other = desc(LAYOUTS[2], Codec::Int8, Codec::Tq5);
        change(&mut other);
        let mut other = KvCache::new(other).unwrap();
        assert_eq!(other.restore(&read).unwrap_err().to_string(), why);
        assert_eq!(other.memory().sequences, 0);
    };
    refuse(|d| d.k = Codec::Fp8, "snapshot has k as int8, expected fp8");
    refuse(|d| d.v = Codec::Tq4, "snapshot has v as tq5, expected tq4");
    refuse(|d| d.layers = 1, "snapshot has layers 2, expected 1");
    refuse(|d| d.kv_heads = 3, "snapshot has kv_heads 2, expected 3");
    refuse(|d| d.head_dim = 40, "snapshot has head_dim 64, expected 40");
    refuse(|d| d.value_dim = 24, "snapshot has value_dim 128, expected 24");
    let small = |d: &mut CacheDesc| d.layout = CacheLayout::Contiguous { slots: 1, capacity: 6 };
    refuse(small, "the sequence would have 7 tokens, expected at most 6");
}

/// Flips every bit of a header: the snapshot is refused, or a cache refuses or restores it.
#[test]
fn changed_bits_of_headers_do_no_harm() {
    for (k, v) in [(Codec::BF16, Codec::F16), (Codec::Tq4, Codec::Int8)] {
        let (cache, seq) = filled_centered(desc(LAYOUTS[0], k, v));
        let bytes = cache.snapshot(seq).unwrap().to_bytes();
        let (mut refused, mut taken) = (0, 0);
        for bit in 0..8 * (NAMES + 32 + LAYERS) {
            let mut changed = bytes.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            let Ok(snapshot) = Snapshot::from_bytes(&changed) else {
                refused += 1;
                continue;
            };
            taken += 1;
            for layout in LAYOUTS {
                let mut other = centered(desc(layout, k, v));
                if let Ok(seq) = other.restore(&snapshot) {
                    contents(&other, seq, 0);
                }
            }
        }
        // The only field that may change undetected is the first token of a sequence.
        assert!(refused > 8 * (NAMES + 32) - 100 && taken < 100, "{refused} refused, {taken} taken");
    }
}

/// Changes bits of rows: the affected tokens have other values, all others are unchanged.
#[test]
fn changed_bits_of_rows_stay_in_their_token() {
    let mut rng = Rng::new(5);
    for codec in codecs() {
        let (cache, seq) = filled(desc(LAYOUTS[2], codec, codec));
        let bytes = cache.snapshot(seq).unwrap().to_bytes();
        let want = contents(&cache, seq, 0);
        let rows = DIMS.map(|dim| codec.row_bytes(dim));
        let mut changes = 0;
        for n in 0..80 {
            // Keys or values of layer 0, [heads, tokens, row].
            let side = n % 2;
            let at = side * 8 * HEADS * TOKENS * rows[0] + rng.below(8 * HEADS * TOKENS * rows[side]);
            let mut changed = bytes.clone();
            changed[NAMES + 32 + LAYERS + at / 8] ^= 1 << (at % 8);
            let mut other = KvCache::new(desc(LAYOUTS[2], codec, codec)).unwrap();
            let seq = other.restore(&Snapshot::from_bytes(&changed).unwrap()).unwrap();
            let got = contents(&other, seq, 0);
            let row = (at / 8 - side * HEADS * TOKENS * rows[0]) / rows[side];
            let of_row = row * DIMS[side]..(row + 1) * DIMS[side];
            for (index, (got, want)) in got[side].iter().zip(&want[side]).enumerate() {
                assert!(got == want || of_row.contains(&index), "{codec}: bit {at} reached element {index}");
            }
            changes += usize::from(got[side] != want[side]);
            assert_eq!(got[1 - side], want[1 - side]);
            // Whatever the values are, kernels and oracle read the same ones, including NaN.
            let (out, exact) = attend(&other, seq, 0);
            let max = exact.iter().map(|x| x.abs()).fold(0.0, f64::max);
            for (got, want) in out.iter().zip(exact) {
                assert_eq!(got.is_nan(), want.is_nan(), "{codec}: bit {at}: {got} {want}");
                if got.is_nan() {
                    continue;
                }
                // Large keys may change probabilities by their last bit; values may not.
                let near = (f64::from(*got) - want).abs() <= 1e-3 * max;
                assert!(side == 0 || near || !max.is_finite(), "{codec}: bit {at}: {got} {want}");
            }
        }
        assert!(changes > 10, "{codec}: {changes} changes were seen");
    }
}

#[test]
fn bytes_of_anything_are_refused() {
    let (cache, seq) = filled(desc(LAYOUTS[0], Codec::Int8, Codec::Tq5));
    let bytes = cache.snapshot(seq).unwrap().to_bytes();
    let mut rng = Rng::new(8);
    for n in 0..20_000 {
        let mut noise: Vec<u8> = (0..rng.below(200)).map(|_| rng.below(256) as u8).collect();
        if n % 2 == 0 {
            // After a valid start.
            let right = rng.below(NAMES + 32).min(noise.len());
            noise[..right].copy_from_slice(&bytes[..right]);
        }
        let refusal = Snapshot::from_bytes(&noise).unwrap_err().to_string();
        assert!(!refusal.is_empty() && !refusal.contains('\n'));
    }
}

/// An empty cache whose keys have a mean of one number.
fn constant(codec: Codec, mean: Option<f32>) -> KvCache {
    let mut cache = KvCache::new(desc(LAYOUTS[2], codec, codec)).unwrap();
    for (layer, mean) in (0..LAYERS).flat_map(|layer| mean.map(|mean| (layer, mean))) {
        cache.set_key_mean(layer, &[mean; HEADS * DIMS[0]]).unwrap();
    }
    cache
}

#[test]
fn zeros_are_zeros_in_every_codec() {
    for codec in codecs() {
        for mean in [None, Some(0.0)] {
            if mean.is_some() && codec.dtype().is_some() {
                continue;
            }
            let mut cache = constant(codec, mean);
            let seq = cache.create().unwrap();
            let (k, v) = (vec![0.0; TOKENS * HEADS * DIMS[0]], vec![-0.0; TOKENS * HEADS * DIMS[1]]);
            append(&mut cache, seq, &k, &v).unwrap();
            cache.poison_unused();
            let zero = |bits: &u32| f32::from_bits(*bits) == 0.0;
            for layer in 0..LAYERS {
                let [k, v] = contents(&cache, seq, layer);
                assert!(k.iter().all(zero) && v.iter().all(zero), "{codec}");
                let (out, exact) = attend(&cache, seq, layer);
                assert!(out.iter().all(|x| *x == 0.0) && exact.iter().all(|x| *x == 0.0), "{codec}: {out:?}");
            }
        }
        // All keys equal: centering leaves zeros.
        if codec.dtype().is_none() {
            let mut cache = constant(codec, Some(2.5));
            let seq = cache.create().unwrap();
            append(&mut cache, seq, &[2.5; TOKENS * HEADS * DIMS[0]], &rows(2, TOKENS, DIMS[1])).unwrap();
            let [k, _] = contents(&cache, seq, 1);
            assert!(k.iter().all(|bits| f32::from_bits(*bits) == 2.5), "{codec}");
        }
    }
}

/// Rows that a quantizing codec refuses, with the reason.
const BAD: [(f32, EncodeError); 5] = [
    (f32::NAN, EncodeError::NotFinite),
    (f32::INFINITY, EncodeError::NotFinite),
    (f32::NEG_INFINITY, EncodeError::NotFinite),
    (2.0 * MAX_NORM, EncodeError::Norm),
    (f32::MAX, EncodeError::Norm),
];

#[test]
fn a_write_of_rows_that_cannot_be_stored_changes_nothing() {
    for codec in codecs().filter(|codec| codec.dtype().is_none()) {
        for (bad, why) in BAD {
            let (mut cache, seq) = filled(desc(LAYOUTS[2], codec, codec));
            let before: Vec<_> = (0..LAYERS).map(|layer| contents(&cache, seq, layer)).collect();
            for (tensor, dim) in [("k", DIMS[0]), ("v", DIMS[1])] {
                let (mut k, mut v) = (rows(3, 2, DIMS[0]), rows(4, 2, DIMS[1]));
                let x = if tensor == "k" { &mut k } else { &mut v };
                x[HEADS * dim + dim + 3] = bad;
                let view = |x, dim| TensorView::packed::<f32>(x, [2, HEADS, dim]).unwrap();
                let refusal =
                    cache.write(1, &[(seq, 2)], &view(&k, DIMS[0]), &view(&v, DIMS[1])).unwrap_err();
                let want = if tensor == "k" { "k" } else { "v" };
                assert_eq!(
                    refusal,
                    CacheError::Row { layer: 1, tensor: want, head: 1, row: 1, why },
                    "{codec}"
                );
                let refusal = append(&mut cache, seq, &k, &v).unwrap_err();
                assert_eq!(
                    refusal,
                    CacheError::Row { layer: 0, tensor: want, head: 1, row: 1, why },
                    "{codec}"
                );
            }
            let after: Vec<_> = (0..LAYERS).map(|layer| contents(&cache, seq, layer)).collect();
            assert_eq!(after, before, "{codec}");
            // Nor through pages without a cache.
            for side in [Side::Keys, Side::Values] {
                let mut pages = CodePages::new(codec, side, [1, 1, 2, 40]).unwrap();
                let mut row = vec![1.0; 40];
                pages.store([0, 0, 1], &row).unwrap();
                row[39] = bad;
                assert_eq!(pages.store([0, 0, 1], &row), Err(why), "{codec}");
                let mut back = vec![0.0; 40];
                pages.view().read(0, 0, 1, &mut back);
                assert!(back.iter().all(|x| (x - 1.0).abs() < 0.9), "{codec}: {back:?}");
            }
        }
    }
}

/// Plain elements are stored unchanged, and a NaN reaches the heads that see it.
#[test]
fn elements_hold_what_they_are_given() {
    for codec in codecs().filter(|codec| codec.dtype().is_some()) {
        let (mut cache, seq) = filled(desc(LAYOUTS[0], codec, codec));
        let (mut k, v) = (rows(3, 1, DIMS[0]), rows(4, 1, DIMS[1]));
        k[DIMS[0]] = f32::NAN;
        append(&mut cache, seq, &k, &v).unwrap();
        let (out, exact) = attend(&cache, seq, 0);
        // Two query heads per key/value head; the second key/value head has the NaN.
        for (head, (out, exact)) in out.chunks(DIMS[1]).zip(exact.chunks(DIMS[1])).enumerate() {
            assert!(out.iter().all(|x| x.is_nan() == (head >= 2)), "{codec}: {out:?}");
            assert!(exact.iter().all(|x| x.is_nan() == (head >= 2)), "{codec}");
        }
    }
}

/// Lengths beyond their tables, which validation refuses: helpers that come before it neither walk nor believe them.
#[test]
fn tables_of_any_lengths_are_looked_up_at_once() {
    for len in [2, 3, 1 << 40, usize::MAX] {
        let tables = BlockTables::from_rows(&[3, 3], &[len, len], 1).unwrap();
        assert!(tables.validate(8).is_err());
        // The table has one token.
        assert_eq!(tables.shared_prefixes(1), [SharedPrefix { sequences: 0..2, len: 1 }], "{len}");
        assert_eq!([0, 1, len - 1].map(|at| tables.locate(0, at).is_some()), [true, false, false], "{len}");
        let ring = BlockTables { wraps: true, ..tables };
        assert!(ring.validate(8).is_err());
        assert!(ring.shared_prefixes(1).len() < 2);
    }
    // A ring that dropped a part of its first page has its entries in common with its fork.
    let tables = BlockTables {
        table: vec![4, 5, 4, 5],
        width: 2,
        page_size: 4,
        wraps: true,
        lens: vec![21, 21],
        first: vec![14, 14],
    };
    tables.validate(6).unwrap();
    assert_eq!(tables.shared_prefixes(1), [SharedPrefix { sequences: 0..2, len: 21 }]);
    let mut rng = Rng::new(3);
    for _ in 0..3000 {
        let numbers = [0, 1, 2, 3, 7, 1 << 31, 1 << 40, usize::MAX - 1, usize::MAX];
        let mut number = || numbers[rng.below(numbers.len())];
        let mut tables = BlockTables {
            table: Vec::new(),
            width: number(),
            page_size: number(),
            wraps: number() % 2 == 0,
            lens: vec![number(), number(), number()],
            first: vec![number(), number()],
        };
        tables.table = (0..rng.below(8)).map(|n| [n as u32 % 2, NO_PAGE, u32::MAX - 1][n % 3]).collect();
        tables.first.extend((0..rng.below(3)).map(|_| 0));
        let prefixes = tables.shared_prefixes(rng.below(3));
        assert!(prefixes.iter().all(|prefix| prefix.sequences.end <= 3));
        for sequence in [0, 2, 3, usize::MAX] {
            for at in numbers {
                let _ = tables.locate(sequence, at);
            }
        }
        let _ = tables.validate(numbers[rng.below(numbers.len())]);
        let csr = CsrTables {
            indptr: &tables.lens,
            indices: &tables.table,
            last_page_len: &tables.first,
            page_size: tables.page_size,
        };
        let _ = BlockTables::from_csr(csr);
        let _ = BlockTables::from_rows(&tables.table, &tables.lens, tables.page_size);
    }
}

#[test]
fn pairs_of_the_largest_problems_are_counted() {
    let longest = (1usize << 31) - 1;
    let of = |batch, visibility| {
        let dims = Dims {
            batch,
            q_heads: 1,
            kv_heads: 1,
            q_len: longest,
            kv_len: longest,
            head_dim: 1,
            value_dim: 1,
        };
        let mut desc = ProblemDesc::new(dims, Dtype::F16);
        desc.visibility = visibility;
        desc.validate().unwrap()
    };
    let (pairs, exact) = (longest as u64 * longest as u64, (longest as f64).powi(2));
    assert_eq!(of(1, Visibility::full()).visible_pairs(), pairs);
    assert_eq!(of(4, Visibility::causal()).visible_pairs(), 2 * longest as u64 * (longest as u64 + 1));
    for batch in [5, 1 << 22] {
        let problem = of(batch, Visibility::full());
        // More than 64 bits count.
        assert_eq!(problem.visible_pairs(), u64::MAX);
        assert!((problem.flops() / (4.0 * batch as f64 * exact) - 1.0).abs() < 1e-9, "{}", problem.flops());
    }
}

/// Numbers at which sums and products overflow.
const EXTREMES: [usize; 12] =
    [0, 1, 2, 3, 64, 512, 513, MAX_LEN, MAX_LEN + 1, 1 << 40, usize::MAX / 2, usize::MAX];

/// Helpers of plain data answer, and validation refuses or accepts: nothing panics. Accepted descriptions are
/// planned or refused.
#[test]
fn descriptions_of_any_numbers_do_no_harm() {
    let mut rng = Rng::new(4);
    let (machines, mut accepted) = (known_machines(), 0);
    for round in 0..6000 {
        let large = round % 2 == 0;
        let mut number =
            || if large { EXTREMES[rng.below(EXTREMES.len())] } else { [1, 2, 4, 64, MAX_LEN][rng.below(5)] };
        let dims = Dims {
            batch: number(),
            q_heads: number(),
            kv_heads: number(),
            q_len: number(),
            kv_len: number(),
            head_dim: number().min(if large { usize::MAX } else { 64 }),
            value_dim: number().min(if large { usize::MAX } else { 64 }),
        };
        let _ = (
            dims.gqa_group(),
            dims.q_shape(),
            dims.k_shape(),
            dims.v_shape(),
            dims.out_shape(),
            dims.lse_shape(),
        );
        let lens: Vec<SeqLens> = (0..3).map(|_| SeqLens { q_len: number(), kv_len: number() }).collect();
        let Dims { q_heads, kv_heads, head_dim, value_dim, .. } = dims;
        let cached =
            ProblemDesc::cached(HeadShape { q_heads, kv_heads, head_dim, value_dim }, Dtype::F16, &lens);
        let shape = CacheShape { layers: number(), kv_heads, head_dim, value_dim };
        let layouts = [
            CacheLayout::Contiguous { slots: number(), capacity: number() },
            CacheLayout::Ring { slots: number(), capacity: number() },
            CacheLayout::Paged { pages: number(), page_size: number() },
        ];
        for (layout, codec) in layouts.into_iter().zip([Codec::Tq5, Codec::MlxTq8, Codec::F32]) {
            let cache = CacheDesc::new(layout, shape, codec);
            let _ = (cache.token_bytes(), cache.pools(), cache.layout.pages(), cache.validate().is_ok());
            let _ =
                (cache.check_layer(number()), cache.check_rows(number(), (dims.k_shape(), dims.v_shape())));
            let _ = ProblemDesc::over(&cache, q_heads, Dtype::F32, &lens).validate();
        }
        for codec in Codec::ALL {
            let _ = (codec.row_bytes(head_dim), codec.supports(value_dim));
        }
        let mut dense = ProblemDesc::new(dims, Dtype::BF16);
        dense.visibility = Visibility::window(Some(number()), [None, Some(number())][round % 2]);
        dense.q_offset =
            [QOffset::TopLeft, QOffset::BottomRight, QOffset::At(number() as i64)].get(round % 4).copied();
        let mut padded = dense.clone();
        padded.sequences = Sequences::Padded { kv_lens: vec![number(); 2] };
        let mut packed = dense.clone();
        packed.sequences = Sequences::Packed {
            cu_seqlens_q: vec![0, number(), number()],
            cu_seqlens_k: vec![0, number(), number()],
        };
        let mut prefixed = cached.clone();
        prefixed.prefixes = vec![SharedPrefix { sequences: number()..number(), len: number() }; 2];
        for desc in [dense, padded, packed, cached, prefixed] {
            let _ = desc.visibility.keys(number() as i64, number());
            // Millions of sequences take their time.
            let few = desc.dims.batch < 1000;
            if let Some(problem) = few.then(|| desc.validate().ok()).flatten() {
                let _ =
                    (problem.visible_pairs(), problem.flops(), problem.mask_shape(), problem.tree_shape());
                problem.sequences().iter().for_each(|s| {
                    let _ = problem.first_visible(s);
                });
                accepted += 1;
                let (_, facts) = &machines[accepted % machines.len()];
                let _ = facts.plan(&problem, PlanOptions::default()).map(|plan| plan.to_string());
            }
        }
    }
    assert!(accepted > 100, "{accepted}");
}
