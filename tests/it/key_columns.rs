//! Values that are the first columns of the key rows: one stored row, the answers of two.

use flashtile::cache::Snapshot;
use flashtile::codec::{CodePages, Side};
use flashtile::plan::{CpuFacts, machines};
use flashtile::problem::KeyColumnsError;
use flashtile::{
    BlockTables, CacheDesc, CacheError, CacheLayout, CacheShape, Codec, Cpu, CpuPlan, CudaPlan, Dims, Dtype,
    HeadShape, Inputs, KvCache, KvCacheExt as _, KvStorage, KvView, Outputs, PlanOptions, Problem,
    ProblemDesc, ProblemError, RunError, SeqId, SeqLens, TensorView, TensorViewMut, Unsupported, Visibility,
    reference,
};
use flashtile_testkit::Rng;

const Q_HEADS: usize = 6;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 40;
const VALUE_DIM: usize = 24;

const LAYOUTS: [CacheLayout; 3] = [
    CacheLayout::Contiguous { slots: 3, capacity: 80 },
    CacheLayout::Ring { slots: 3, capacity: 80 },
    CacheLayout::Paged { pages: 20, page_size: 8 },
];

fn desc(layout: CacheLayout, codec: Codec, kv_storage: KvStorage) -> CacheDesc {
    let shape = CacheShape { layers: 1, kv_heads: KV_HEADS, head_dim: HEAD_DIM, value_dim: VALUE_DIM };
    let mut desc = CacheDesc::new(layout, shape, codec);
    desc.kv_storage = kv_storage;
    desc
}

fn random(rng: &mut Rng, len: usize) -> Vec<f32> {
    (0..len).map(|_| rng.normal()).collect()
}

/// Attends tokens to a sequence of a cache, whose keys and values they join, and returns the bits of the output.
fn step(cache: &mut KvCache, seq: SeqId, tokens: usize, rng: &mut Rng) -> Vec<u32> {
    let q = random(rng, tokens * Q_HEADS * HEAD_DIM);
    let k = random(rng, tokens * KV_HEADS * HEAD_DIM);
    let mut out = vec![0.0f32; tokens * Q_HEADS * VALUE_DIM];
    let q = TensorView::packed(&q, [tokens, Q_HEADS, HEAD_DIM]).unwrap();
    let k = TensorView::packed(&k, [tokens, KV_HEADS, HEAD_DIM]).unwrap();
    let mut into = TensorViewMut::packed(&mut out, [tokens, Q_HEADS, VALUE_DIM]).unwrap();
    let mut step = cache.step(&[(seq, tokens)]).unwrap();
    step.attend(0, q, k, k.first_columns(VALUE_DIM).unwrap(), &mut into).unwrap();
    step.finish().unwrap();
    out.iter().map(|x| x.to_bits()).collect()
}

/// Keys and values of a sequence.
fn stored(cache: &KvCache, seq: SeqId) -> [Vec<f32>; 2] {
    let len = cache.len(seq).unwrap();
    let (mut k, mut v) = (vec![0.0; len * KV_HEADS * HEAD_DIM], vec![0.0; len * KV_HEADS * VALUE_DIM]);
    let mut k_rows = TensorViewMut::packed(&mut k, [len, KV_HEADS, HEAD_DIM]).unwrap();
    let mut v_rows = TensorViewMut::packed(&mut v, [len, KV_HEADS, VALUE_DIM]).unwrap();
    cache.linearize(seq, 0, &mut k_rows, &mut v_rows).unwrap();
    [k, v]
}

#[test]
fn one_row_has_the_bits_of_two() {
    for (layout, codec) in LAYOUTS
        .into_iter()
        .flat_map(|layout| [Codec::F32, Codec::F16, Codec::BF16].map(|codec| (layout, codec)))
    {
        let [columns, separate] = [KvStorage::KeyColumns, KvStorage::Separate].map(|kv_storage| {
            let (mut rng, mut bits) = (Rng::new(7), Vec::new());
            let mut cache = KvCache::new(desc(layout, codec, kv_storage)).unwrap();
            let seq = cache.create().unwrap();
            for tokens in [37, 1, 1, 5] {
                bits.push(step(&mut cache, seq, tokens, &mut rng));
            }
            let fork = matches!(layout, CacheLayout::Paged { .. }).then(|| cache.fork(seq).unwrap());
            bits.push(step(&mut cache, fork.unwrap_or(seq), 2, &mut rng));
            cache.truncate(seq, 41).unwrap();
            bits.push(step(&mut cache, seq, 1, &mut rng));
            let snapshot = Snapshot::from_bytes(&cache.snapshot(seq).unwrap().to_bytes()).unwrap();
            let restored = cache.restore(&snapshot).unwrap();
            bits.push(step(&mut cache, restored, 3, &mut rng));
            (bits, stored(&cache, restored), cache.desc().token_bytes())
        });
        assert_eq!(columns.0, separate.0, "{layout:?} {codec}");
        assert_eq!(columns.1, separate.1, "{layout:?} {codec}");
        let row = |dim| KV_HEADS * codec.row_bytes(dim);
        assert_eq!(columns.2, row(HEAD_DIM));
        assert_eq!(separate.2, row(HEAD_DIM) + row(VALUE_DIM));
    }
}

/// A decode step over one sequence of a cache.
fn problem(cache: &KvCache, seq: SeqId) -> (Problem, BlockTables) {
    let lens = [SeqLens::decode(cache.len(seq).unwrap())];
    let mut desc = ProblemDesc::over(cache.desc(), Q_HEADS, Dtype::F32, &lens);
    desc.visibility = Visibility::causal();
    (desc.validate().unwrap(), cache.tables(&[seq]).unwrap())
}

#[test]
fn values_of_codes_are_columns_of_the_decoded_keys() {
    for codec in [Codec::Int8, Codec::Tq4, Codec::Fp8] {
        let shape = CacheShape { layers: 1, kv_heads: KV_HEADS, head_dim: 64, value_dim: 32 };
        let mut desc = CacheDesc::new(LAYOUTS[2], shape, codec);
        desc.kv_storage = KvStorage::KeyColumns;
        let mut cache = KvCache::new(desc).unwrap();
        cache.set_key_mean(0, &[0.5; KV_HEADS * 64]).unwrap();
        let seq = cache.create().unwrap();
        let mut rng = Rng::new(3);
        let (rows, q) = (random(&mut rng, 30 * KV_HEADS * 64), random(&mut rng, Q_HEADS * 64));
        let k = TensorView::packed(&rows, [30, KV_HEADS, 64]).unwrap();
        cache.append(&[(seq, 30)], &[(k, k.first_columns(32).unwrap())]).unwrap();

        let (problem, tables) = problem(&cache, seq);
        let q = TensorView::packed(&q, [1, Q_HEADS, 64]).unwrap();
        let got = reference::attention(&problem, &cache.inputs(0, q, &tables).unwrap()).unwrap();

        // The decoded keys and their columns, as dense tensors of f32.
        let (mut k, mut v) = (vec![0.0f32; 30 * KV_HEADS * 64], vec![0.0f32; 30 * KV_HEADS * 32]);
        let mut k_rows = TensorViewMut::packed(&mut k, [30, KV_HEADS, 64]).unwrap();
        let mut v_rows = TensorViewMut::packed(&mut v, [30, KV_HEADS, 32]).unwrap();
        cache.linearize(seq, 0, &mut k_rows, &mut v_rows).unwrap();
        let k = TensorView::packed(&k, [30, KV_HEADS, 64]).unwrap();
        let v = TensorView::packed(&v, [30, KV_HEADS, 32]).unwrap();
        let dense = ProblemDesc::of(&q, &k, &v).validate().unwrap();
        let want = reference::attention(&dense, &Inputs::new(q, k, v)).unwrap();
        let error = got.out.iter().zip(&want.out).map(|(got, want)| (got - want).abs()).fold(0.0, f64::max);
        // Decoded keys are rounded to f32 there, and not here.
        assert!(error < 1e-5, "{codec}: {error}");

        let refused = Unsupported::KeyColumns { codec };
        let options = PlanOptions::default();
        assert_eq!(CpuPlan::new(&problem, &machines::AVX512_2, options).unwrap_err(), refused);
        assert_eq!(
            refused.to_string(),
            format!("the backend reads no values that are columns of {codec} keys")
        );
        assert_eq!(CudaPlan::new(&problem, &machines::H200, options).unwrap_err(), refused);
    }
}

#[test]
fn devices_refuse_until_their_kernels_read_one_row() {
    let mut cache = KvCache::new(desc(LAYOUTS[2], Codec::F32, KvStorage::KeyColumns)).unwrap();
    let seq = cache.create().unwrap();
    step(&mut cache, seq, 9, &mut Rng::new(1));
    let (problem, _) = problem(&cache, seq);
    let refused = Unsupported::KeyColumns { codec: Codec::F32 };
    let options = PlanOptions::default();
    assert_eq!(CudaPlan::new(&problem, &machines::H200, options).unwrap_err(), refused);
    assert!(CpuPlan::new(&problem, &CpuFacts { threads: 1, ..machines::AVX2_8 }, options).is_ok());
}

#[test]
fn values_that_are_no_columns_are_refused() {
    let mut rng = Rng::new(5);
    let (rows, other) = (random(&mut rng, 4 * HEAD_DIM), random(&mut rng, 4 * VALUE_DIM));
    let k = TensorView::bhsd(&rows, [1, 1, 4, HEAD_DIM]).unwrap();
    let copy = TensorView::bhsd(&other, [1, 1, 4, VALUE_DIM]).unwrap();
    let columns = k.first_columns(VALUE_DIM).unwrap();
    let mut desc = ProblemDesc::of(&k, &k, &columns);
    desc.kv_storage = KvStorage::KeyColumns;
    let problem = desc.clone().validate().unwrap();
    assert_eq!(problem.kv_row_bytes(), 4 * HEAD_DIM);
    let cpu = Cpu::new();
    let plan = cpu.plan(&problem, PlanOptions::default()).unwrap();
    let run = |v| {
        let mut out = vec![0.0f32; 4 * VALUE_DIM];
        let mut outputs = Outputs::new(TensorViewMut::bhsd(&mut out, [1, 1, 4, VALUE_DIM]).unwrap());
        let mut workspace = plan.workspace();
        cpu.run(&plan, &Inputs::new(k, k, v), &mut outputs, &mut workspace)
    };
    assert_eq!(run(columns), Ok(()));
    assert_eq!(run(copy), Err(RunError::NotKeyColumns));

    let mut cache = KvCache::new(self::desc(LAYOUTS[0], Codec::F32, KvStorage::KeyColumns)).unwrap();
    let seq = cache.create().unwrap();
    let rows = random(&mut rng, KV_HEADS * HEAD_DIM);
    let k = TensorView::packed(&rows, [1, KV_HEADS, HEAD_DIM]).unwrap();
    let values = random(&mut rng, KV_HEADS * VALUE_DIM);
    let v = TensorView::packed(&values, [1, KV_HEADS, VALUE_DIM]).unwrap();
    assert_eq!(cache.append(&[(seq, 1)], &[(k, v)]), Err(CacheError::NotKeyColumns));
    assert_eq!(cache.len(seq), Ok(0));

    let Dims { head_dim, .. } = desc.dims;
    desc.dims.value_dim = head_dim + 1;
    let error = ProblemError::KeyColumns(KeyColumnsError::Width { value_dim: head_dim + 1, head_dim });
    assert_eq!(desc.clone().validate().unwrap_err(), error);
    let mut mixed = self::desc(LAYOUTS[0], Codec::F32, KvStorage::KeyColumns);
    mixed.v = Codec::F16;
    let error = CacheError::KeyColumns(KeyColumnsError::Codec { k: Codec::F32, v: Codec::F16 });
    assert_eq!(KvCache::new(mixed).unwrap_err(), error);

    let separate = KvCache::new(self::desc(LAYOUTS[0], Codec::F32, KvStorage::Separate)).unwrap();
    let mut other = separate;
    let seq = cache.create().unwrap();
    let snapshot = cache.snapshot(seq).unwrap();
    assert_eq!(other.restore(&snapshot).unwrap_err(), CacheError::SnapshotStorage);
}

/// Kernels decode whole rows: columns of codes are refused wherever rows are expected.
#[test]
fn columns_of_codes_are_no_rows() {
    let layout = CacheLayout::Paged { pages: 8, page_size: 4 };
    let shape = CacheShape { layers: 1, kv_heads: 1, head_dim: 512, value_dim: 512 };
    let mut cache = KvCache::new(CacheDesc::new(layout, shape, Codec::Int8)).unwrap();
    let seq = cache.create().unwrap();
    let rows = random(&mut Rng::new(2), 20 * 512);
    let k = TensorView::packed(&rows, [20, 1, 512]).unwrap();
    cache.append(&[(seq, 20)], &[(k, k)]).unwrap();
    let tables = cache.tables(&[seq]).unwrap();
    let (k, v) = cache.kv_pages(0).unwrap();
    assert!(v.first_columns(513).is_err());
    let narrow = v.first_columns(64).unwrap();
    let cpu = Cpu::new();
    for (k, v, tensor) in [(k, narrow, "v"), (narrow, v, "k")] {
        let [head_dim, value_dim] = [k, v].map(|rows| rows.shape()[3]);
        let heads = HeadShape { q_heads: 1, kv_heads: 1, head_dim, value_dim };
        let mut desc = ProblemDesc::cached(heads, Dtype::F32, &[SeqLens::decode(20)]);
        (desc.k_codec, desc.v_codec) = (Some(Codec::Int8), Some(Codec::Int8));
        let problem = desc.validate().unwrap();
        let q = TensorView::packed(&rows[..head_dim], [1, 1, head_dim]).unwrap();
        let inputs = Inputs::paged_kv(q, k, v, &tables);
        let plan = cpu.plan(&problem, PlanOptions::default()).unwrap();
        let mut out = vec![0.0f32; value_dim];
        let mut outputs = Outputs::new(TensorViewMut::packed(&mut out, [1, 1, value_dim]).unwrap());
        let expected = narrow.shape();
        let refused = RunError::Shape { tensor, expected, got: [8, 1, 4, 512] };
        assert_eq!(cpu.run(&plan, &inputs, &mut outputs, &mut plan.workspace()), Err(refused.clone()));
        assert_eq!(reference::attention(&problem, &inputs).unwrap_err(), refused);
    }

    let shape = CacheShape { layers: 1, kv_heads: 1, head_dim: 64, value_dim: 64 };
    let mut small = KvCache::new(CacheDesc::new(layout, shape, Codec::Int8)).unwrap();
    let seq = small.create().unwrap();
    let slot = CodePages::new(Codec::Int8, Side::Keys, [1, 1, 4, 512]).unwrap();
    let narrow = KvView::Codes(slot.view()).first_columns(64).unwrap();
    let expected = [1, 1, 4, 64];
    let refused = CacheError::Shape { tensor: "k", expected, got: [1, 1, 4, 512] };
    assert_eq!(small.load(0, seq, &narrow, &narrow), Err(refused));
}
