//! Quantized keys and values: attention, and caches that store them.

use crate::support::{all_pass, answer, build, options, quantizing};
use flashtile::cache::KeyTransformError;
use flashtile::codec::{CodePages, MAX_NORM, Side, key_mean};
use flashtile::plan::{Isa, machines};
use flashtile::quality::{Head, Quality, quality};
use flashtile::{
    CacheDesc, CacheError, CacheLayout, CacheShape, Codec, Cpu, CudaPlan, Dtype, HeadShape, KernelChoice,
    KvCache, Outputs, PlanOptions, ProblemDesc, QOffset, SeqId, SeqLens, TensorView, TensorViewMut,
    Visibility,
};
use flashtile_testkit::{AttentionSet, Case, CpuRunner, Guarded, Keep, Layout, Rng, Runner, quantized};

/// The quantizing codecs.
fn codecs() -> Vec<Codec> {
    Codec::ALL.into_iter().filter(|codec| codec.dtype().is_none()).collect()
}

#[test]
fn every_case_passes_with_one_thread_and_with_two() {
    let runners: Vec<CpuRunner> = quantizing(1).into_iter().chain(quantizing(2)).collect();
    all_pass(&quantized(), &runners);
}

#[test]
fn bits_do_not_depend_on_threads_splits_or_skipping() {
    for case in quantized().into_iter().step_by(3) {
        let built = build(&case);
        for runner in quantizing(1) {
            let want = answer(&built, &runner).bits();
            for other in [
                CpuRunner::new(runner.cpu.with_threads(2)),
                runner.with(options(None, false)),
                runner.with(options(Some(1), true)),
            ] {
                assert!(answer(&built, &other).bits() == want, "{} on {}", case.name, runner.name());
            }
        }
    }
}

#[test]
fn plans_name_the_codecs() {
    let mut desc = ProblemDesc::cached(
        HeadShape { q_heads: 8, kv_heads: 2, head_dim: 128, value_dim: 128 },
        Dtype::BF16,
        &[SeqLens::decode(4096)],
    );
    desc.k_codec = Some(Codec::Int8);
    desc.v_codec = Some(Codec::Tq5);
    let problem = desc.clone().validate().unwrap();
    let plan = Cpu::new().plan(&problem, PlanOptions::default()).unwrap();
    assert!(plan.kernel().starts_with("cpu-decode-bf16-d128-int8+tq5-"), "{}", plan.kernel());
    let plan = CudaPlan::new(&problem, &machines::H100, PlanOptions::default()).unwrap();
    assert_eq!(plan.kernel(), "cuda-decode-bf16-d128-int8+tq5-portable-paged");
    let mut native = PlanOptions::default();
    native.kernels = KernelChoice::Native;
    let refusal = CudaPlan::new(&problem, &machines::H100, native).unwrap_err();
    assert_eq!(refusal.to_string(), "k is int8, expected bf16");
    desc.k_codec = Some(Codec::Tq5);
    let plan = Cpu::new().plan(&desc.clone().validate().unwrap(), PlanOptions::default()).unwrap();
    assert!(plan.kernel().starts_with("cpu-decode-bf16-d128-tq5-"), "{}", plan.kernel());
    let mut dense = ProblemDesc::new(desc.dims, Dtype::BF16);
    dense.v_codec = Some(Codec::Tq4);
    dense.q_offset = Some(QOffset::BottomRight);
    let refusal = dense.validate().unwrap_err().to_string();
    assert_eq!(refusal, "v is tq4, expected bf16: only cached sequences have other codecs");
}

/// Rows `[rows, heads, dim]` with normal elements.
fn rows(seed: u64, shape: [usize; 3]) -> Vec<f32> {
    let mut rng = Rng::new(seed);
    (0..shape.iter().product()).map(|_| rng.normal()).collect()
}

/// Keys of 96 elements and values of 64, or other sizes that their codecs support.
fn desc(layout: CacheLayout, k: Codec, v: Codec) -> CacheDesc {
    let mut desc = CacheDesc::new(
        layout,
        CacheShape {
            layers: 1,
            kv_heads: 2,
            head_dim: if k.supports(96) { 96 } else { 512 },
            value_dim: if v.supports(64) { 64 } else { 256 },
        },
        k,
    );
    desc.v = v;
    desc
}

/// The rows of a sequence in a layer, decoded.
fn contents(cache: &KvCache, seq: SeqId) -> (Vec<f32>, Vec<f32>) {
    let (desc, len) = (cache.desc(), cache.len(seq).unwrap() - cache.first(seq).unwrap());
    let tensor = |dim| Guarded::new(Dtype::F32, [1, desc.kv_heads, len, dim], Layout::Bhsd);
    let (mut k, mut v) = (tensor(desc.head_dim), tensor(desc.value_dim));
    cache.linearize(seq, 0, &mut k.view_mut(), &mut v.view_mut()).unwrap();
    (k.values(), v.values())
}

fn append(cache: &mut KvCache, seq: SeqId, k: &[f32], v: &[f32]) -> Result<(), CacheError> {
    let desc = *cache.desc();
    let n = k.len() / desc.kv_heads / desc.head_dim;
    let view = |x, dim| TensorView::packed::<f32>(x, [n, desc.kv_heads, dim]).unwrap();
    cache.append(&[(seq, n)], &[(view(k, desc.head_dim), view(v, desc.value_dim))])
}

const LAYOUTS: [CacheLayout; 3] = [
    CacheLayout::Contiguous { slots: 3, capacity: 80 },
    CacheLayout::Ring { slots: 3, capacity: 33 },
    CacheLayout::Paged { pages: 40, page_size: 7 },
];

#[test]
fn tokens_one_by_one_are_the_bytes_of_all_at_once() {
    for layout in LAYOUTS {
        for (k_codec, v_codec) in codecs().into_iter().zip(codecs().into_iter().rev()) {
            let desc = desc(layout, k_codec, v_codec);
            let (dim, value_dim) = (desc.head_dim, desc.value_dim);
            let (k, v) = (rows(1, [70, 2, dim]), rows(2, [70, 2, value_dim]));
            let mut caches = [KvCache::new(desc).unwrap(), KvCache::new(desc).unwrap()];
            let seqs = caches.each_mut().map(|cache| cache.create().unwrap());
            append(&mut caches[0], seqs[0], &k, &v).unwrap();
            for (k, v) in k.chunks(2 * dim).zip(v.chunks(2 * value_dim)) {
                append(&mut caches[1], seqs[1], k, v).unwrap();
            }
            let [a, b] = [0, 1].map(|n| caches[n].snapshot(seqs[n]).unwrap());
            assert_eq!(a.as_bytes(), b.as_bytes(), "{k_codec} {v_codec} {layout:?}");
            // Decoded rows are as close to the originals as the codec allows.
            let (got, _) = contents(&caches[0], seqs[0]);
            let first = caches[0].first(seqs[0]).unwrap();
            let (mut error, mut energy) = (0.0, 0.0);
            for (at, got) in got.iter().enumerate() {
                let (head, token, d) = (at / dim / (70 - first), at / dim % (70 - first), at % dim);
                let want = k[((first + token) * 2 + head) * dim + d];
                error += f64::from(got - want).powi(2);
                energy += f64::from(want).powi(2);
            }
            let limit = if k_codec == Codec::Tq2 { 0.14 } else { 0.04 };
            assert!(error / energy < limit, "{k_codec}: {}", error / energy);
        }
    }
}

#[test]
fn forks_cuts_and_snapshots_keep_rows() {
    for (k, v) in [
        (Codec::Tq5, Codec::Tq3),
        (Codec::Rot16, Codec::Tq2),
        (Codec::MlxTq4, Codec::MlxTq8),
        (Codec::Int8, Codec::MlxTq5Plain),
    ] {
        forks_cuts_and_snapshots(k, v);
    }
}

fn forks_cuts_and_snapshots(k: Codec, v: Codec) {
    for layout in LAYOUTS {
        let mut cache = KvCache::new(desc(layout, k, v)).unwrap();
        let (dim, value_dim) = (cache.desc().head_dim, cache.desc().value_dim);
        let seq = cache.create().unwrap();
        append(&mut cache, seq, &rows(3, [31, 2, dim]), &rows(4, [31, 2, value_dim])).unwrap();
        cache.poison_unused();
        let before = contents(&cache, seq);
        assert!(before.0.iter().chain(&before.1).all(|x| x.is_finite()));
        let fork = cache.fork(seq).unwrap();
        append(&mut cache, fork, &rows(5, [1, 2, dim]), &rows(6, [1, 2, value_dim])).unwrap();
        cache.poison_unused();
        assert_eq!(contents(&cache, seq), before);
        cache.truncate(fork, 31).unwrap();
        assert_eq!(contents(&cache, fork), before);
        let snapshot = cache.snapshot(seq).unwrap();
        for other in LAYOUTS {
            let mut cache = KvCache::new(desc(other, k, v)).unwrap();
            let seq = cache.restore(&snapshot).unwrap();
            cache.poison_unused();
            assert_eq!(contents(&cache, seq), before);
        }
        let mut other = cache.desc().to_owned();
        other.v = if value_dim == 64 { Codec::Tq4 } else { Codec::MlxTq6 };
        let refusal = KvCache::new(other).unwrap().restore(&snapshot).unwrap_err().to_string();
        assert_eq!(refusal, format!("snapshot has v as {v}, expected {}", other.v));
    }
}

#[test]
fn sizes_are_those_of_the_codes() {
    assert_eq!([256, 512].map(|dim| Codec::MlxTq4.row_bytes(dim)), [132, 264]);
    for codec in [Codec::MlxTq5, Codec::MlxTq6, Codec::MlxTq8, Codec::MlxTq8Plain] {
        assert_eq!([256, 512].map(|dim| codec.row_bytes(dim)), [260, 520]);
    }
    for (codec, bytes) in [
        (Codec::Rot16, 256),
        (Codec::Int8, 130),
        (Codec::Fp8, 130),
        (Codec::Tq6, 98),
        (Codec::Tq5, 82),
        (Codec::Tq4, 66),
        (Codec::Tq3, 50),
        (Codec::Tq2, 34),
    ] {
        assert_eq!(codec.row_bytes(128), bytes);
        let cache = KvCache::new(CacheDesc::new(
            CacheLayout::Paged { pages: 10, page_size: 64 },
            CacheShape { layers: 3, kv_heads: 8, head_dim: 128, value_dim: 128 },
            codec,
        ))
        .unwrap();
        assert_eq!(cache.memory().bytes_reserved, 10 * 64 * 3 * 8 * 2 * bytes);
    }
}

#[test]
fn cloned_pages_have_the_rows_in_memory_of_their_own() {
    let mut pages = CodePages::new(Codec::Tq5, Side::Keys, [2, 2, 3, 64]).unwrap();
    let (first, second) = (rows(1, [1, 1, 64]), rows(2, [1, 1, 64]));
    let read = |pages: &CodePages| {
        let mut row = vec![0.0f32; 64];
        pages.view().read(1, 1, 2, &mut row);
        row
    };
    pages.store([1, 1, 2], &first).unwrap();
    let (clone, before) = (pages.try_clone().unwrap(), read(&pages));
    assert_eq!((clone.codec(), clone.shape(), read(&clone)), (Codec::Tq5, [2, 2, 3, 64], before.clone()));
    pages.store([1, 1, 2], &second).unwrap();
    assert!(read(&clone) == before && read(&pages) != before);
}

#[test]
fn rows_that_cannot_be_stored_are_refused_and_nothing_changes() {
    let layout = CacheLayout::Paged { pages: 10, page_size: 8 };
    for (codec, bad, why) in [
        (Codec::Int8, f32::NAN, "holds a NaN or an infinity"),
        (Codec::Tq4, f32::INFINITY, "holds a NaN or an infinity"),
        (Codec::Tq5, f32::NEG_INFINITY, "holds a NaN or an infinity"),
        (Codec::Fp8, 2.0 * MAX_NORM, "has a norm above 8192"),
        (Codec::Tq2, 1e38, "has a norm above 8192"),
        (Codec::Rot16, f32::NAN, "holds a NaN or an infinity"),
        (Codec::Rot16, 1e4, "has a norm above 8192"),
        (Codec::MlxTq4, f32::NAN, "holds a NaN or an infinity"),
        (Codec::MlxTq8Plain, 1e5, "has a norm above 8192"),
    ] {
        let mut cache = KvCache::new(desc(layout, codec, codec)).unwrap();
        let (dim, value_dim) = (cache.desc().head_dim, cache.desc().value_dim);
        let seq = cache.create().unwrap();
        append(&mut cache, seq, &rows(1, [5, 2, dim]), &rows(2, [5, 2, value_dim])).unwrap();
        let before = (contents(&cache, seq), cache.memory());
        let (mut k, mut v) = (rows(3, [4, 2, dim]), rows(4, [4, 2, value_dim]));
        v[(3 * 2 + 1) * value_dim + 7] = bad;
        let refusal = append(&mut cache, seq, &k, &v).unwrap_err();
        assert_eq!(refusal.to_string(), format!("layer 0: row 3 of head 1 of v {why}"));
        k[(2 * 2) * dim] = bad;
        let refusal = append(&mut cache, seq, &k, &v).unwrap_err();
        assert_eq!(refusal.to_string(), format!("layer 0: row 2 of head 0 of k {why}"));
        assert_eq!((contents(&cache, seq), cache.memory()), before);
        // Zeros are decoded as zeros.
        append(&mut cache, seq, &vec![0.0; 2 * dim], &vec![0.0; 2 * value_dim]).unwrap();
        let (k, _) = contents(&cache, seq);
        assert!(k[5 * dim..6 * dim].iter().all(|x| *x == 0.0), "{codec}");
    }
}

/// Keys with a constant component of some times their own magnitude.
fn biased(seed: u64, tokens: usize, gain: f32) -> Vec<f32> {
    let mut rng = Rng::new(77);
    let bias: Vec<f32> = (0..192).map(|_| gain * rng.normal()).collect();
    rows(seed, [tokens, 2, 96]).iter().enumerate().map(|(at, x)| x + bias[at % 192]).collect()
}

/// An empty cache with a mean of its keys, if there is one.
fn cache_with(desc: CacheDesc, mean: Option<&[f32]>) -> KvCache {
    let mut cache = KvCache::new(desc).unwrap();
    if let Some(mean) = mean {
        cache.set_key_mean(0, mean).unwrap();
    }
    cache
}

#[test]
fn a_mean_is_given_and_then_fixed() {
    let desc = desc(CacheLayout::Paged { pages: 20, page_size: 16 }, Codec::Tq4, Codec::Tq4);
    let error = |cache: &KvCache, seq, k: &[f32]| -> f64 {
        let (got, _) = contents(cache, seq);
        let tokens = k.len() / 192;
        let want = |at: usize| k[(at / 96 % tokens * 2 + at / 96 / tokens) * 96 + at % 96];
        got.iter().enumerate().map(|(at, x)| f64::from(x - want(at)).powi(2)).sum::<f64>() / got.len() as f64
    };
    let (k, v) = (biased(1, 64, 20.0), rows(2, [64, 2, 64]));
    let mean = key_mean(&TensorView::packed::<f32>(&k, [64, 2, 96]).unwrap());
    let (mut plain, mut centered) = (cache_with(desc, None), cache_with(desc, Some(&mean)));
    let seqs = [&mut plain, &mut centered].map(|cache| {
        let seq = cache.create().unwrap();
        append(cache, seq, &k, &v).unwrap();
        seq
    });
    let (without, with) = (error(&plain, seqs[0], &k), error(&centered, seqs[1], &k));
    assert!(with < 0.012 && without > 50.0 * with, "{with} with the mean, {without} without");
    assert_eq!((plain.key_mean(0).unwrap(), centered.key_mean(0).unwrap()), (None, Some(&mean[..])));

    let mut elements = desc;
    elements.k = Codec::F16;
    let refusals = [
        centered.set_key_mean(0, &mean),
        centered.set_key_mean(1, &mean),
        centered.set_key_mean(0, &mean[1..]),
        centered.set_key_mean(0, &[f32::NAN; 192]),
        // Of no rows.
        centered.set_key_mean(0, &key_mean(&TensorView::packed::<f32>(&[], [0, 2, 96]).unwrap())),
        cache_with(elements, None).set_key_mean(0, &mean),
    ];
    let want = [
        "layer 0 has rows: mean and factors of its keys are fixed",
        "layer 1 asked for, the cache has 1",
        "mean of 191 elements, expected 192: kv_heads * head_dim",
        "mean holds a NaN or an infinity",
        "mean holds a NaN or an infinity",
        "keys are stored as f16, expected a quantizing codec for a mean",
    ];
    for (refusal, want) in refusals.into_iter().zip(want) {
        assert_eq!(refusal.unwrap_err().to_string(), want);
    }
    // Until rows are stored, it can be replaced. It stays when their sequence has ended.
    let mut replaced = cache_with(desc, Some(&[1.0; 192]));
    replaced.set_key_mean(0, &mean).unwrap();
    let seq = replaced.create().unwrap();
    append(&mut replaced, seq, &k, &v).unwrap();
    assert!(replaced.snapshot(seq).unwrap().to_bytes() == centered.snapshot(seqs[1]).unwrap().to_bytes());
    replaced.remove(seq).unwrap();
    assert_eq!(replaced.set_key_mean(0, &[1.0; 192]), Err(KeyTransformError::Fixed { layer: 0 }.into()));
}

#[test]
fn a_snapshot_is_restored_over_its_own_mean_only() {
    let desc = desc(CacheLayout::Paged { pages: 20, page_size: 16 }, Codec::Tq4, Codec::Tq4);
    let (k, v) = (biased(1, 20, 20.0), rows(2, [20, 2, 64]));
    let mean = key_mean(&TensorView::packed::<f32>(&k, [20, 2, 96]).unwrap());
    let snapshot = |mean| {
        let mut cache = cache_with(desc, mean);
        let seq = cache.create().unwrap();
        append(&mut cache, seq, &k, &v).unwrap();
        (cache.snapshot(seq).unwrap(), contents(&cache, seq))
    };
    let (plain, (centered, rows)) = (snapshot(None).0, snapshot(Some(&mean)));
    assert_eq!((plain.key_mean(0), centered.key_mean(0)), (Ok(None), Ok(Some(&mean[..]))));
    let other = vec![1.0; 192];
    for (snapshot, mean) in [
        (&centered, None),
        (&centered, Some(&other[..])),
        (&plain, Some(&other[..])),
        (&plain, Some(&mean[..])),
    ] {
        for written in [false, true] {
            let mut cache = cache_with(desc, mean);
            if written {
                let seq = cache.create().unwrap();
                append(&mut cache, seq, &k, &v).unwrap();
            }
            let before = cache.memory();
            assert_eq!(
                cache.restore(snapshot).unwrap_err().to_string(),
                "snapshot and this cache differ in the mean of the keys of layer 0"
            );
            // A snapshot sets no mean, which would hold for all other sequences.
            assert_eq!((cache.key_mean(0).unwrap(), cache.memory()), (mean, before));
        }
    }
    let mut fresh = cache_with(desc, centered.key_mean(0).unwrap());
    let seq = fresh.restore(&centered).unwrap();
    assert_eq!(contents(&fresh, seq), rows);
}

/// Codes that are multiplied in integers where the machine has the instructions, and decoded elsewhere.
#[test]
fn a_row_over_codes_has_the_same_bits_among_any_number_of_rows() {
    let (heads, dim, tokens, most) = (4, 128, 300, 40);
    let (k, v) = (rows(1, [tokens, 2, dim]), rows(2, [tokens, 2, dim]));
    let q = rows(3, [most, heads, dim]);
    for codec in codecs().into_iter().filter(|codec| codec.is_integer()) {
        let shape = CacheShape { layers: 1, kv_heads: 2, head_dim: dim, value_dim: dim };
        let layout = CacheLayout::Paged { pages: 20, page_size: 16 };
        let mut cache = KvCache::new(CacheDesc::new(layout, shape, codec)).unwrap();
        let seq = cache.create().unwrap();
        append(&mut cache, seq, &k, &v).unwrap();
        let tables = cache.tables(&[seq]).unwrap();
        let last = |cpu: Cpu, count: usize| {
            let lens = SeqLens { q_len: count, kv_len: tokens };
            let mut desc = ProblemDesc::over(cache.desc(), heads, Dtype::F32, &[lens]);
            (desc.visibility, desc.q_offset) = (Visibility::causal(), Some(QOffset::BottomRight));
            let plan = cpu.plan(&desc.validate().unwrap(), PlanOptions::default()).unwrap();
            let q = TensorView::packed(&q[(most - count) * heads * dim..], [count, heads, dim]).unwrap();
            let mut out = vec![f32::NAN; count * heads * dim];
            let view = TensorViewMut::packed(&mut out, [count, heads, dim]).unwrap();
            let inputs = cache.inputs(0, q, &tables).unwrap();
            cpu.run(&plan, &inputs, &mut Outputs::new(view), &mut plan.workspace()).unwrap();
            out[(count - 1) * heads * dim..].iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        // Few rows multiply codes of a byte in f32 where AVX-512 has no integers, in another order than decoded codes.
        for isa in Cpu::isas().into_iter().filter(|isa| (*isa, codec) != (Isa::Avx512, Codec::Int8)) {
            let cpu = Cpu::with_isa(isa).unwrap();
            let alone = last(cpu, 1);
            for count in [2, 8, 9, 17, most] {
                assert!(last(cpu, count) == alone, "{codec}, {isa}, {count} rows");
            }
        }
    }
}

/// Attention of a query of four heads over each sequence of a batch; the bits of the last one.
fn answer_of(cache: &KvCache, batch: &[SeqId]) -> Vec<u32> {
    let &CacheDesc { head_dim, value_dim, .. } = cache.desc();
    let lens: Vec<_> = batch.iter().map(|&seq| SeqLens::decode(cache.len(seq).unwrap())).collect();
    let mut desc = ProblemDesc::over(cache.desc(), 4, Dtype::F32, &lens);
    desc.visibility = Visibility::causal();
    let problem = desc.validate().unwrap();
    let tables = cache.tables(batch).unwrap();
    let q = rows(9, [1, 4, head_dim]).repeat(batch.len());
    let q = TensorView::packed::<f32>(&q, [batch.len(), 4, head_dim]).unwrap();
    let mut out = vec![f32::NAN; batch.len() * 4 * value_dim];
    let view = TensorViewMut::packed(&mut out, [batch.len(), 4, value_dim]).unwrap();
    let cpu = Cpu::new();
    let plan = cpu.plan(&problem, PlanOptions::default()).unwrap();
    let inputs = cache.inputs(0, q, &tables).unwrap();
    cpu.run(&plan, &inputs, &mut Outputs::new(view), &mut plan.workspace()).unwrap();
    out[(batch.len() - 1) * 4 * value_dim..].iter().map(|x| x.to_bits()).collect()
}

/// Appends rows to a sequence in chunks, after a sequence of one large key that has ended, in writes of another sequence too,
/// and with a fork on the way. Gives the three sequences, the first one last.
fn append_beside_others(cache: &mut KvCache, k: &[f32], v: &[f32], chunk: usize) -> [SeqId; 3] {
    let &CacheDesc { head_dim, value_dim, kv_heads, .. } = &cache.desc().to_owned();
    let (k_row, v_row) = (kv_heads * head_dim, kv_heads * value_dim);
    let large: Vec<f32> = rows(5, [1, kv_heads, head_dim]).iter().map(|x| 8.0 * x).collect();
    let warm_up = cache.create().unwrap();
    append(cache, warm_up, &large, &v[..v_row]).unwrap();
    cache.remove(warm_up).unwrap();
    let [other, seq] = [(); 2].map(|()| cache.create().unwrap());
    let mut fork = None;
    for (k, v) in k.chunks(chunk * k_row).zip(v.chunks(chunk * v_row)) {
        let (both_k, both_v) = ([&large[..], k].concat(), [&v[..v_row], v].concat());
        let total = 1 + k.len() / k_row;
        let view = |x, dim| TensorView::packed::<f32>(x, [total, kv_heads, dim]).unwrap();
        let layer = (view(&both_k, head_dim), view(&both_v, value_dim));
        cache.append(&[(other, 1), (seq, total - 1)], &[layer]).unwrap();
        if fork.is_none() {
            let forked = cache.fork(seq).unwrap();
            append(cache, forked, &large, &v[..v_row]).unwrap();
            fork = Some(forked);
        }
    }
    [fork.unwrap(), other, seq]
}

#[test]
fn other_sequences_and_chunks_change_neither_bytes_nor_answers() {
    for layout in LAYOUTS {
        for (k_codec, v_codec) in Codec::ALL.into_iter().zip(Codec::ALL.into_iter().rev()) {
            let desc = desc(layout, k_codec, v_codec);
            let (k, v) = (rows(1, [30, 2, desc.head_dim]), rows(2, [30, 2, desc.value_dim]));
            let mean = rows(3, [1, 2, desc.head_dim]);
            for mean in [None, Some(&mean[..]).filter(|_| k_codec.dtype().is_none())] {
                let mut alone = cache_with(desc, mean);
                let seq = alone.create().unwrap();
                append(&mut alone, seq, &k, &v).unwrap();
                let (bytes, answer) = (alone.snapshot(seq).unwrap().to_bytes(), answer_of(&alone, &[seq]));
                for chunk in [1, 7, 30] {
                    let mut cache = cache_with(desc, mean);
                    let all = append_beside_others(&mut cache, &k, &v, chunk);
                    cache.poison_unused();
                    let what = format!("{k_codec} {v_codec} {layout:?} in chunks of {chunk}");
                    assert!(cache.snapshot(all[2]).unwrap().to_bytes() == bytes, "{what}");
                    assert_eq!(answer_of(&cache, &all[2..]), answer, "{what}");
                    assert_eq!(answer_of(&cache, &all), answer, "{what}, in a batch");
                }
            }
        }
    }
}

/// Attention of four query heads over a cache, and over its decoded tokens in f32.
#[test]
fn attention_over_a_cache_is_that_over_its_decoded_tokens() {
    for layout in LAYOUTS {
        for (k_codec, v_codec) in [
            (Codec::Int8, Codec::Tq4),
            (Codec::Tq5, Codec::F16),
            (Codec::BF16, Codec::Tq6),
            (Codec::MlxTq6, Codec::MlxTq4),
        ] {
            let shape = desc(layout, k_codec, v_codec);
            let (dim, value_dim) = (shape.head_dim, shape.value_dim);
            let mut cache = KvCache::new(shape).unwrap();
            let seq = cache.create().unwrap();
            append(&mut cache, seq, &rows(1, [30, 2, dim]), &rows(2, [30, 2, value_dim])).unwrap();
            cache.poison_unused();
            let q = rows(3, [1, 4, dim]);
            let attend = |cache: &KvCache, seq: SeqId| {
                let mut desc = ProblemDesc::cached(
                    HeadShape { q_heads: 4, kv_heads: 2, head_dim: dim, value_dim },
                    Dtype::F32,
                    &[SeqLens::decode(30)],
                );
                (desc.k_codec, desc.v_codec) = (Some(cache.desc().k), Some(cache.desc().v));
                desc.visibility = Visibility::causal();
                let problem = desc.validate().unwrap();
                let tables = cache.tables(&[seq]).unwrap();
                let q = TensorView::packed::<f32>(&q, [1, 4, dim]).unwrap();
                let inputs = cache.inputs(0, q, &tables).unwrap();
                let mut out = Guarded::new(Dtype::F32, [1, 4, 1, value_dim], Layout::Bhsd);
                let cpu = Cpu::new();
                let plan = cpu.plan(&problem, PlanOptions::default()).unwrap();
                cpu.run(&plan, &inputs, &mut Outputs::new(out.view_mut()), &mut plan.workspace()).unwrap();
                out.values()
            };
            let got = attend(&cache, seq);
            let (k, v) = contents(&cache, seq);
            let mut elements = shape;
            (elements.k, elements.v) = (Codec::F32, Codec::F32);
            let mut plain = KvCache::new(elements).unwrap();
            let copy = plain.create().unwrap();
            let view = |x, dim| TensorView::bhsd::<f32>(x, [1, 2, 30, dim]).unwrap();
            plain.append(&[(copy, 30)], &[(view(&k, dim), view(&v, value_dim))]).unwrap();
            let want = attend(&plain, copy);
            for (got, want) in got.iter().zip(&want) {
                assert!((got - want).abs() < 1e-3, "{k_codec} {v_codec} {layout:?}: {got}, not {want}");
            }
        }
    }
}

#[test]
fn a_codec_that_is_not_the_problems_is_refused() {
    let case = Case::new("other codec", [1, 2, 2, 0, 0, 64, 64], Dtype::F32)
        .cached(&[(1, 40)], 16, Keep::All)
        .causal(QOffset::BottomRight);
    let (five, four) =
        (build(&case.clone().stored(Codec::Tq5, Codec::Tq5)), build(&case.stored(Codec::Tq5, Codec::Tq4)));
    let mut inputs = five.inputs();
    inputs.v = four.inputs().v;
    let refusal = flashtile::reference::attention(&five.problem, &inputs).unwrap_err();
    assert_eq!(refusal.to_string(), "v is tq4, expected tq5");
}

/// Errors and divergences of attention over 4096 keys for each codec.
fn qualities(set: &AttentionSet, codecs: &[Codec], centered: bool) -> Vec<Quality> {
    let scale = 1.0 / (set.dim as f32).sqrt();
    let head = Head { k: &set.k, v: &set.v, q: &set.q, head_dim: set.dim, value_dim: set.dim, scale };
    codecs.iter().map(|&codec| quality(&head, [codec; 2], centered).unwrap()).collect()
}

#[test]
fn attention_over_normal_keys_is_as_near_as_the_codecs_promise() {
    let set = AttentionSet::normal([4096, 192, 128], 0.0, 5);
    let limits = [
        (Codec::Rot16, 3e-4, 2e-7),
        (Codec::Int8, 0.009, 3e-5),
        (Codec::Tq6, 0.032, 4e-4),
        (Codec::Tq5, 0.055, 9e-4),
        (Codec::Tq4, 0.115, 4e-3),
        (Codec::Tq3, 0.24, 2.3e-2),
    ];
    for (got, (codec, nrmse, kl)) in qualities(&set, &limits.map(|limit| limit.0), false).iter().zip(limits) {
        println!("{codec}: nrmse {:.4} of {nrmse}, kl {:.2e} of {kl:.1e}", got.nrmse, got.kl);
        assert!(got.nrmse <= nrmse && got.kl <= kl, "{codec}: {got:?}");
    }
}

#[test]
fn centering_makes_biased_keys_harmless() {
    // 23 times the signal, as biases of some models have it.
    let set = AttentionSet::normal([4096, 192, 128], 23.0, 6);
    let codecs = [Codec::Int8, Codec::Tq4];
    let (with, without) = (qualities(&set, &codecs, true), qualities(&set, &codecs, false));
    for (codec, (with, without)) in codecs.iter().zip(with.iter().zip(&without)) {
        println!("{codec}: kl {:.2e} centered, {:.2e} plain", with.kl, without.kl);
    }
    assert!(with[0].kl <= 4e-5 && with[1].kl <= 7e-3);
    assert!(without[0].kl > 100.0 * with[0].kl && without[1].kl > 100.0 * with[1].kl);
}
