//! Keys that are divided by a factor for each channel before they are quantized.

use flashtile::cache::{KeyTransformError, Snapshot};
use flashtile::codec::{KEY_FACTOR_RANGE, Side, key_factors, key_mean};
use flashtile::{
    Attention, CacheDesc, CacheLayout, CacheShape, Codec, Dtype, KvCache, KvCacheExt, KvView, SeqId,
    TensorView, TensorViewMut,
};
use flashtile_testkit::{Guarded, Layout, Rng};

const HEADS: usize = 2;
const DIM: usize = 96;
const ROW: usize = HEADS * DIM;
const TOKENS: usize = 200;

/// The codecs that take factors.
fn codecs() -> impl Iterator<Item = Codec> {
    Codec::ALL.into_iter().filter(|codec| codec.supports_key_factors())
}

fn desc(codec: Codec) -> CacheDesc {
    let shape = CacheShape { layers: 1, kv_heads: HEADS, head_dim: DIM, value_dim: DIM };
    CacheDesc::new(CacheLayout::Paged { pages: 40, page_size: 16 }, shape, codec)
}

/// An empty cache with a mean and factors, where there are some.
fn cache(codec: Codec, mean: Option<&[f32]>, factors: Option<&[f32]>) -> KvCache {
    let mut cache = KvCache::new(desc(codec)).unwrap();
    mean.map_or(Ok(()), |mean| cache.set_key_mean(0, mean)).unwrap();
    factors.map_or(Ok(()), |factors| cache.set_key_factors(0, factors)).unwrap();
    cache
}

/// Deviations of the channels of all heads: log-normal.
fn deviations() -> Vec<f32> {
    let mut rng = Rng::new(5);
    (0..ROW).map(|_| rng.normal().exp()).collect()
}

/// Rows `[tokens, heads, dim]` with these deviations of the channels.
fn rows(seed: u64, tokens: usize, deviations: &[f32]) -> Vec<f32> {
    let mut rng = Rng::new(seed);
    (0..tokens * ROW).map(|at| deviations[at % ROW] * rng.normal()).collect()
}

fn view(rows: &[f32]) -> TensorView<'_> {
    TensorView::packed(rows, [rows.len() / ROW, HEADS, DIM]).unwrap()
}

fn append(cache: &mut KvCache, seq: SeqId, k: &[f32]) {
    let v = rows(9, k.len() / ROW, &[1.0; ROW]);
    cache.append(&[(seq, k.len() / ROW)], &[(view(k), view(&v))]).unwrap();
}

fn filled(mut cache: KvCache, k: &[f32]) -> (KvCache, SeqId) {
    let seq = cache.create().unwrap();
    append(&mut cache, seq, k);
    (cache, seq)
}

/// The decoded keys `[tokens, heads, dim]` of a sequence.
fn decoded(cache: &KvCache, seq: SeqId) -> Vec<f32> {
    let len = cache.len(seq).unwrap();
    let (mut k, mut v) = (vec![0.0f32; len * ROW], vec![0.0f32; len * ROW]);
    let [mut k_view, mut v_view] =
        [&mut k, &mut v].map(|rows| TensorViewMut::packed(rows, [len, HEADS, DIM]).unwrap());
    cache.linearize(seq, 0, &mut k_view, &mut v_view).unwrap();
    k
}

/// Mean square error of the scores of queries with independent, equal channels.
fn score_error(k: &[f32], decoded: &[f32]) -> f64 {
    let (mut rng, queries) = (Rng::new(31), 8);
    let mut sum = 0.0;
    for _ in 0..queries {
        let q: Vec<f32> = (0..DIM).map(|_| rng.normal()).collect();
        for (k, decoded) in k.chunks_exact(DIM).zip(decoded.chunks_exact(DIM)) {
            let errors =
                q.iter().zip(k.iter().zip(decoded)).map(|(q, (k, d))| f64::from(*q) * f64::from(k - d));
            sum += errors.sum::<f64>().powi(2);
        }
    }
    sum / (queries * k.len() / DIM) as f64
}

#[test]
fn scores_of_unequal_channels_err_less() {
    let deviations = deviations();
    let (first, k) = (rows(1, 400, &deviations), rows(2, TOKENS, &deviations));
    let mean = key_mean(&view(&first));
    // The error of equal queries is as (average of the deviations)^2 with a power of 0.5, and as the average of their squares without.
    let average = |power: i32| deviations.iter().map(|x| f64::from(*x).powi(power)).sum::<f64>() / ROW as f64;
    let expected = average(1).powi(2) / average(2);
    assert!(expected < 0.6, "{expected}");
    for codec in codecs() {
        let error = |power: Option<f32>| {
            let factors = power.map(|power| key_factors(&view(&first), &mean, power));
            let (cache, seq) = filled(cache(codec, Some(&mean), factors.as_deref()), &k);
            score_error(&k, &decoded(&cache, seq))
        };
        let (without, none, half) = (error(None), error(Some(0.0)), error(Some(0.5)));
        assert_eq!(without, none, "{codec}: a power of 0 gives factors of 1");
        let ratio = half / without;
        assert!((0.7..1.4).contains(&(ratio / expected)), "{codec}: {ratio}, expected {expected}");
    }
}

#[test]
fn a_common_factor_of_two_changes_no_decoded_bit() {
    let k = rows(1, TOKENS, &deviations());
    let mean = key_mean(&view(&k));
    for codec in codecs() {
        for mean in [None, Some(&mean[..])] {
            let [plain, twice] = [None, Some(&[2.0; ROW][..])].map(|factors| {
                let (cache, seq) = filled(cache(codec, mean, factors), &k);
                (decoded(&cache, seq), cache.snapshot(seq).unwrap().as_bytes().to_vec())
            });
            assert!(plain.0 == twice.0, "{codec}");
            // The scales are half.
            assert!(plain.1 != twice.1, "{codec}");
        }
    }
}

/// Attention over the cache, and over its decoded keys and values as tensors.
#[test]
fn attention_is_that_over_the_decoded_keys() {
    let deviations = deviations();
    let k = rows(1, TOKENS, &deviations);
    let mut rng = Rng::new(3);
    let mean: Vec<f32> = (0..ROW).map(|_| 3.0 * rng.normal()).collect();
    // Of both signs, and not the keys' own deviations.
    let factors: Vec<f32> = (0..ROW).map(|_| rng.normal() + 0.01).collect();
    let q: Vec<f32> = (0..4 * DIM).map(|_| 0.3 * rng.normal()).collect();
    let q = TensorView::packed(&q, [1, 4, DIM]).unwrap();
    for codec in codecs() {
        for mean in [None, Some(&mean[..])] {
            let (mut cache, seq) = filled(cache(codec, mean, Some(&factors)), &k);
            let token = rows(4, 1, &deviations);
            let (mut step, mut out) = (cache.step(&[(seq, 1)]).unwrap(), vec![0.0f32; 4 * DIM]);
            let mut view_mut = TensorViewMut::packed(&mut out, [1, 4, DIM]).unwrap();
            step.attend(0, q, view(&token), view(&token), &mut view_mut).unwrap();
            step.finish().unwrap();
            let len = cache.len(seq).unwrap();
            let tensor = || Guarded::new(Dtype::F32, [1, HEADS, len, DIM], Layout::Bhsd);
            let (mut k, mut v) = (tensor(), tensor());
            cache.linearize(seq, 0, &mut k.view_mut(), &mut v.view_mut()).unwrap();
            let want = flashtile::attention_vec::<f32>(q, k.view(), v.view(), &Attention::decode()).unwrap();
            let error = out.iter().zip(&want).map(|(got, want)| (got - want).abs()).fold(0.0, f32::max);
            assert!(error < 2e-3, "{codec}: {error}");
        }
    }
}

#[test]
fn factors_are_given_and_then_fixed() {
    let k = rows(1, 20, &[1.0; ROW]);
    let factors = rows(2, 1, &[1.0; ROW]);
    let (mut filled, seq) = filled(cache(Codec::Tq4, None, Some(&factors)), &k);
    assert_eq!(filled.key_factors(0).unwrap(), Some(&factors[..]));
    assert_eq!(filled.key_mean(0).unwrap(), None);
    let refusal = |cache: &mut KvCache, layer, factors: &[f32]| {
        cache.set_key_factors(layer, factors).unwrap_err().to_string()
    };
    let fixed = "layer 0 has rows: mean and factors of its keys are fixed";
    assert_eq!(refusal(&mut filled, 0, &factors), fixed);
    assert_eq!(refusal(&mut filled, 1, &factors), "layer 1 asked for, the cache has 1");
    filled.remove(seq).unwrap();
    assert_eq!(filled.set_key_mean(0, &factors), Err(KeyTransformError::Fixed { layer: 0 }.into()));

    let mut empty = cache(Codec::Int8, None, None);
    let expected = "factors of 191 elements, expected 192: kv_heads * head_dim";
    assert_eq!(refusal(&mut empty, 0, &factors[1..]), expected);
    let (min, max) = (*KEY_FACTOR_RANGE.start(), *KEY_FACTOR_RANGE.end());
    for bad in [0.0, -0.0, f32::NAN, f32::INFINITY, -2.0 * max, 0.5 * min] {
        let mut changed = factors.clone();
        changed[DIM + 7] = bad;
        let expected =
            "factor of channel 7 of head 1: expected a magnitude from 2.3283064e-10 to 4.2949673e9";
        assert_eq!(refusal(&mut empty, 0, &changed), expected);
        assert_eq!(empty.key_factors(0).unwrap(), None);
    }
    for good in [min, -max] {
        empty.set_key_factors(0, &[good; ROW]).unwrap();
    }
    // They are replaced one by one until rows are stored.
    empty.set_key_mean(0, &factors).unwrap();
    empty.set_key_factors(0, &k[..ROW]).unwrap();
    let transform = empty.key_transform(0).unwrap();
    assert_eq!((transform.mean(), transform.factors()), (Some(&factors[..]), Some(&k[..ROW])));

    for codec in Codec::ALL.into_iter().filter(|codec| !codec.supports_key_factors()) {
        let mut desc = desc(codec);
        (desc.head_dim, desc.value_dim) = (256, 256);
        let refused = KvCache::new(desc).unwrap().set_key_factors(0, &[1.0; 512]).unwrap_err();
        assert_eq!(refused, KeyTransformError::FactorsOfCodec { codec }.into());
        let expected = format!(
            "keys are stored as {codec}, expected one of rot16, int8, tq6, tq5, tq4, tq3, tq2 for factors"
        );
        assert_eq!(refused.to_string(), expected);
    }
}

#[test]
fn forks_snapshots_and_slots_keep_the_factors() {
    let deviations = deviations();
    let k = rows(1, 37, &deviations);
    let mean = key_mean(&view(&k));
    let factors = key_factors(&view(&k), &mean, 0.5);
    let (mut full, seq) = filled(cache(Codec::Tq4, Some(&mean), Some(&factors)), &k);
    let fork = full.fork(seq).unwrap();
    append(&mut full, fork, &rows(2, 3, &deviations));
    assert_eq!(decoded(&full, fork)[..37 * ROW], decoded(&full, seq));

    let bytes = full.snapshot(fork).unwrap().to_bytes();
    let read = Snapshot::from_bytes(&bytes).unwrap();
    assert_eq!(read.to_bytes(), bytes);
    assert_eq!((read.key_mean(0), read.key_factors(0)), (Ok(Some(&mean[..])), Ok(Some(&factors[..]))));
    let mut fresh = cache(Codec::Tq4, read.key_mean(0).unwrap(), read.key_factors(0).unwrap());
    let restored = fresh.restore(&read).unwrap();
    assert_eq!(decoded(&fresh, restored), decoded(&full, fork));
    let other = vec![1.0; ROW];
    for (mean, factors, part) in [
        (Some(&mean[..]), None, "factors"),
        (Some(&mean[..]), Some(&other[..]), "factors"),
        (None, Some(&factors[..]), "mean"),
    ] {
        let refused = cache(Codec::Tq4, mean, factors).restore(&read).unwrap_err().to_string();
        assert_eq!(refused, format!("snapshot and this cache differ in the {part} of the keys of layer 0"));
    }

    let slot = |side| full.slot(0, seq, side, 64).unwrap();
    let (k_slot, v_slot) = (slot(Side::Keys), slot(Side::Values));
    let (k_slot, v_slot) = (KvView::Codes(k_slot.view()), KvView::Codes(v_slot.view()));
    let load = |cache: &mut KvCache| {
        let seq = cache.create().unwrap();
        cache.extend(&[(seq, 37)]).unwrap();
        cache.load(0, seq, &k_slot, &v_slot).map(|()| seq)
    };
    let mut same = cache(Codec::Tq4, Some(&mean), Some(&factors));
    let loaded = load(&mut same).unwrap();
    assert_eq!(decoded(&same, loaded), decoded(&full, seq));
    let refused = load(&mut cache(Codec::Tq4, Some(&mean), None)).unwrap_err();
    assert_eq!(refused, KeyTransformError::Rows { layer: 0, part: "factors" }.into());
    assert_eq!(refused.to_string(), "rows for layer 0 and this cache differ in the factors of their keys");
}

#[test]
fn snapshots_with_factors_that_no_cache_takes_are_refused() {
    let k = rows(1, 5, &[1.0; ROW]);
    let (full, seq) = filled(cache(Codec::Int8, None, Some(&k[..ROW])), &k);
    let bytes = full.snapshot(seq).unwrap().to_bytes();
    // The header of 96 bytes is followed by the flag of the layer and its factors.
    let header = 96 + 1;
    assert_eq!(bytes[96..header], [2]);
    let mut changed = bytes.clone();
    changed[header + 4 * (DIM + 3)..][..4].copy_from_slice(&0.0f32.to_ne_bytes());
    let refused = Snapshot::from_bytes(&changed).unwrap_err();
    assert_eq!(refused, KeyTransformError::FactorRange { head: 1, channel: 3 }.into());
    let mut changed = bytes;
    let k_name = 96 - 32;
    changed[k_name..k_name + 16].fill(0);
    changed[k_name..k_name + 3].copy_from_slice(b"fp8");
    let refused = Snapshot::from_bytes(&changed).unwrap_err();
    assert_eq!(refused, KeyTransformError::FactorsOfCodec { codec: Codec::Fp8 }.into());
}

#[test]
fn rows_are_refused_by_their_norm_after_the_division() {
    let mut cache = cache(Codec::Tq4, None, Some(&[1e-4; ROW]));
    let seq = cache.create().unwrap();
    let mut k = vec![0.05; ROW];
    append(&mut cache, seq, &k);
    k[DIM + 5] = 1.0;
    let v = view(&k);
    let refused = cache.append(&[(seq, 1)], &[(v, v)]).unwrap_err().to_string();
    assert_eq!(refused, "layer 0: row 0 of head 1 of k has a norm above 8192");
}

#[test]
fn factors_follow_their_equation() {
    // Two batch entries of 2 tokens of 2 heads of 3 channels: deviations 1, 4 and 0, and a head that is constant.
    let x = [[1.0f32, 10.0, 5.0], [-1.0, 2.0, 5.0]];
    let keys: Vec<f32> = [x, x].into_iter().flat_map(|x| [x[0], x[1], [7.0; 3], [7.0; 3]].concat()).collect();
    let keys = TensorView::bhsd(&keys, [2, 2, 2, 3]).unwrap();
    let mean = key_mean(&keys);
    assert_eq!(mean, [0.0, 6.0, 5.0, 7.0, 7.0, 7.0]);
    let rms = (17.0f64 / 3.0).sqrt();
    for power in [0.5f32, 1.0, -0.25] {
        let powers = [1.0, 4.0, rms / 256.0].map(|x: f64| x.powf(power.into()));
        let geometric = powers.iter().product::<f64>().cbrt();
        let factors = key_factors(&keys, &mean, power);
        for (factor, want) in factors.iter().zip(powers) {
            assert!((f64::from(*factor) / (want / geometric) - 1.0).abs() < 1e-6, "{factors:?}");
        }
        assert_eq!(factors[3..], [1.0; 3]);
    }
    // Around another mean, deviations are larger.
    assert!(key_factors(&keys, &[9.0, 6.0, 5.0, 7.0, 7.0, 7.0], 0.5)[0] > key_factors(&keys, &mean, 0.5)[0]);
    let none = TensorView::bhsd::<f32>(&[], [1, 1, 0, 2]).unwrap();
    assert!(key_factors(&none, &[0.0; 2], 0.5).iter().all(|x| x.is_nan()));
    let infinite = [1.0f32, f32::INFINITY];
    let infinite = TensorView::bhsd(&infinite, [1, 1, 1, 2]).unwrap();
    assert!(key_factors(&infinite, &[0.0; 2], 0.5).iter().any(|x| x.is_nan()));
}
