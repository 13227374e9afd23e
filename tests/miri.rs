//! Cases small enough for Miri, which interprets them and stops at undefined behaviour: an access outside an
//! allocation, to uninitialised memory or through an invalidated reference, a misaligned access, a data race.
//!
//! `docs/testing.md` says how to run them. In a normal test run they are ordinary tests with the same checks.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use flashtile::plan::Isa;
use flashtile::{Cpu, PlanOptions};
use flashtile_testkit::{Case, CpuRunner, Rng, run_case};

/// Makes the test's thread the only one of its pool: rayon's threads run `crossbeam-epoch`, which violates Stacked
/// Borrows.
fn alone() {
    if rayon::current_thread_index().is_none() {
        rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build().unwrap();
    }
}

/// The portable kernels on the test's thread; Miri runs no others.
fn portable() -> CpuRunner {
    alone();
    CpuRunner::new(Cpu::with_isa(Isa::Portable).unwrap().with_threads(1))
}

/// Runs a case against the oracle, every tensor in an allocation of exactly its size.
fn passes(case: Case, runner: &CpuRunner) {
    let case = case.exact();
    let outcome = run_case(&case, runner);
    assert!(outcome.is_ok(), "{}: {outcome:?}", case.name);
}

/// Plan options with this number of splits.
fn splits(splits: usize) -> PlanOptions {
    let mut options = PlanOptions::default();
    options.splits = Some(splits);
    options
}

/// Normal values from a seed.
fn normal(seed: u64, count: usize) -> Vec<f32> {
    let mut rng = Rng::new(seed);
    (0..count).map(|_| rng.normal()).collect()
}

mod views {
    //! Views of borrowed memory.

    use flashtile::{Dtype, MaskView, TensorView};
    use half::f16;

    /// `[2, 2, 2, 2]` with strides that are not products of the sizes, and no element after the last.
    const SHAPE: [usize; 4] = [2, 2, 2, 2];
    const STRIDES: [usize; 4] = [23, 11, 3, 1];
    const REACH: usize = 23 + 11 + 3 + 1 + 1;

    fn indices() -> impl Iterator<Item = [usize; 4]> {
        (0..16).map(|n| [n >> 3 & 1, n >> 2 & 1, n >> 1 & 1, n & 1])
    }

    fn place(index: [usize; 4]) -> usize {
        index.iter().zip(STRIDES).map(|(i, stride)| i * stride).sum()
    }

    #[test]
    fn every_element_is_read_where_it_lies() {
        let elements: Vec<f32> = (0..REACH).map(|n| n as f32).collect();
        let halves: Vec<f16> = elements.iter().copied().map(f16::from_f32).collect();
        let bytes: Vec<u8> = elements.iter().flat_map(|x| x.to_ne_bytes()).collect();
        let views = [
            TensorView::strided(&elements, SHAPE, STRIDES).ok(),
            TensorView::strided(&halves, SHAPE, STRIDES).ok(),
            // Bytes may be misaligned for f32, and are refused then.
            TensorView::from_bytes(Dtype::F32, &bytes, SHAPE, STRIDES).ok(),
        ];
        assert!(views[0].is_some() && views[1].is_some());
        for view in views.into_iter().flatten() {
            for index in indices() {
                assert_eq!(view.get(index), place(index) as f32);
            }
        }
    }

    #[test]
    fn masks_are_read_where_they_lie() {
        let shows: Vec<bool> = (0..REACH).map(|n| n % 3 > 0).collect();
        let bytes: Vec<u8> = shows.iter().map(|&x| 2 * u8::from(x)).collect();
        let biases: Vec<f16> = shows.iter().map(|&x| if x { f16::ZERO } else { f16::NEG_INFINITY }).collect();
        let masks = [
            MaskView::bool(&shows, SHAPE, STRIDES).unwrap(),
            MaskView::bool_bytes(&bytes, SHAPE, STRIDES).unwrap(),
            MaskView::additive(TensorView::strided(&biases, SHAPE, STRIDES).unwrap()),
        ];
        for (mask, index) in masks.iter().flat_map(|mask| indices().map(move |index| (mask, index))) {
            assert_eq!(mask.bias(index) == 0.0, shows[place(index)]);
        }
        let row = MaskView::bool(&shows, [1, 1, 1, REACH], [1, 1, 1, 1]).unwrap();
        assert_eq!(row.bias([1, 1, 1, REACH - 1]) == 0.0, shows[REACH - 1]);
    }

    #[test]
    fn a_view_is_read_on_another_thread() {
        let elements = [1.0f32, 2.0, 3.0];
        let view = TensorView::bhsd(&elements, [1, 1, 3, 1]).unwrap();
        let sum = std::thread::scope(|scope| {
            let last = scope.spawn(|| view.get([0, 0, 2, 0]));
            view.get([0, 0, 0, 0]) + last.join().unwrap()
        });
        assert_eq!(sum, 4.0);
    }
}

mod kernels {
    //! The portable kernels of the CPU, on one thread and on two.

    use super::{passes, portable, splits};
    use flashtile::{
        Attention, Codec, Dtype, MaskKind, MaskView, QOffset, TensorView, TensorViewMut, Visibility,
    };
    use flashtile_testkit::{Case, Keep, Layout, MaskFill, Tree};

    /// `[batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim]`: more rows of a GQA group than are streamed,
    /// so that keys and values are packed.
    const PREFILL: [usize; 7] = [1, 2, 1, 9, 7, 5, 6];
    /// Rows that are streamed.
    const DECODE: [usize; 7] = [2, 2, 1, 1, 5, 4, 6];

    #[test]
    fn prefill() {
        for (dtype, layout) in
            [(Dtype::F32, Layout::Padded), (Dtype::F16, Layout::Fused), (Dtype::BF16, Layout::Bhsd)]
        {
            let case = Case::new(format!("prefill {dtype}"), PREFILL, dtype).layout(layout);
            passes(case, &portable());
        }
    }

    #[test]
    fn prefill_causal_with_every_bias() {
        let case = Case::new("causal", PREFILL, Dtype::F32).causal(QOffset::BottomRight);
        passes(case.softcap(3.0).alibi().sinks(), &portable());
    }

    #[test]
    fn prefill_window() {
        let case = Case::new("window", PREFILL, Dtype::BF16).at(QOffset::At(3));
        passes(case.seeing(Visibility::window(Some(2), Some(1))), &portable());
    }

    #[test]
    fn prefill_masked() {
        for (kind, broadcast) in
            [(MaskKind::Bool, ""), (MaskKind::Additive(Dtype::F16), "bh"), (MaskKind::Bool, "bhk")]
        {
            let name = format!("masked {kind:?} {broadcast}");
            let case = Case::new(name, PREFILL, Dtype::F16).layout(Layout::Padded);
            passes(case.mask(kind, broadcast, MaskFill::HiddenRows), &portable());
        }
    }

    /// One element of the mask a query, in memory that ends behind the last one.
    #[test]
    fn prefill_masked_by_rows() {
        let (shown, x) = (Box::new([true, false, true]), [0.5f32; 3 * 4]);
        let x = TensorView::bhsd(&x, [1, 1, 3, 4]).unwrap();
        let mask = MaskView::bool(&shown[..], [1, 1, 3, 3], [0, 0, 1, 0]).unwrap();
        let mut out = [f32::NAN; 3 * 4];
        let mut view = TensorViewMut::bhsd(&mut out, [1, 1, 3, 4]).unwrap();
        let mut runner = flashtile::Runner::with_cpu(portable().cpu);
        runner.attention(x, x, x, &mut view, &Attention::full().mask(mask)).unwrap();
        assert_eq!(out, [0.5, 0.5, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.5, 0.5, 0.5, 0.5]);
    }

    #[test]
    fn prefill_padded_and_packed() {
        let padded = Case::new("padded", [2, 2, 1, 3, 5, 4, 4], Dtype::F32).kv_lens(&[4, 0]);
        passes(padded.causal(QOffset::BottomRight), &portable());
        let packed = Case::new("packed", PREFILL, Dtype::F16).packed(&[(2, 3), (0, 2), (9, 5)]);
        passes(packed.causal(QOffset::TopLeft), &portable());
    }

    #[test]
    fn decode() {
        for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
            let case = Case::new(format!("decode {dtype}"), DECODE, dtype).layout(Layout::Bshd);
            passes(case.sinks(), &portable());
        }
    }

    /// Several blocks of keys, whose partial results are merged.
    #[test]
    fn decode_split() {
        let case = Case::new("split", [1, 1, 1, 1, 258, 1, 2], Dtype::F32);
        passes(case.mask(MaskKind::Bool, "h", MaskFill::Random), &portable().with(splits(2)));
    }

    #[test]
    fn two_threads() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let mut runner = portable().with(splits(2));
        runner.cpu = runner.cpu.with_threads(2);
        pool.install(|| {
            let case = Case::new("two threads", [1, 1, 1, 1, 259, 1, 2], Dtype::F32);
            passes(case.mask(MaskKind::Bool, "h", MaskFill::Random), &runner);
        });
    }

    #[test]
    fn pages_and_rings() {
        let lengths = &[(1, 6), (0, 2), (0, 0), (9, 9)];
        let paged = Case::new("paged", [1, 2, 1, 0, 0, 5, 6], Dtype::F16).cached(lengths, 4, Keep::All);
        passes(paged.clone().causal(QOffset::BottomRight), &portable());
        passes(paged.tree(Tree::Branches), &portable());
        let ring =
            Case::new("ring", [1, 2, 1, 0, 0, 4, 4], Dtype::F32).cached(&[(1, 7), (2, 9)], 4, Keep::Wrapped);
        let ring = ring.causal(QOffset::BottomRight).seeing(Visibility::window(Some(2), None));
        passes(ring, &portable());
    }

    #[test]
    fn a_prefix_that_sequences_share() {
        let case = Case::new("prefix", [1, 2, 1, 0, 0, 4, 4], Dtype::F32);
        let case = case.cached(&[(1, 9), (1, 11), (2, 8)], 4, Keep::All).causal(QOffset::BottomRight);
        passes(case.shared(&[(0..3, 4), (0..2, 8)]), &portable());
    }

    #[test]
    fn quantized_pages() {
        let codecs = [
            ((Codec::Tq5, 8), (Codec::Int8, 8)),
            ((Codec::Fp8, 6), (Codec::Tq2, 12)),
            ((Codec::F16, 4), (Codec::MlxTq5, 256)),
        ];
        for ((k, head_dim), (v, value_dim)) in codecs {
            let dims = [1, 2, 1, 0, 0, head_dim, value_dim];
            let case = Case::new(format!("quantized {k} {v}"), dims, Dtype::BF16).stored(k, v);
            let case = case.cached(&[(1, 4), (1, 1)], 3, Keep::All).causal(QOffset::BottomRight);
            passes(case.centered(), &portable());
        }
    }

    /// More rows than are streamed: codes are decoded a block at a time.
    #[test]
    fn quantized_pages_prefill() {
        let case = Case::new("quantized prefill", [1, 2, 1, 0, 0, 8, 8], Dtype::F32);
        let case = case.stored(Codec::Tq3, Codec::Tq6).cached(&[(9, 5)], 4, Keep::All);
        passes(case.causal(QOffset::BottomRight), &portable());
    }
}

mod gradients {
    //! The backward pass, on one thread.

    use super::alone;
    use flashtile::plan::Isa;
    use flashtile::{Cpu, Dtype, MaskKind, PlanOptions, QOffset};
    use flashtile_testkit::{BackwardCase, Case, MaskFill};

    fn passes(case: Case) {
        alone();
        let case = BackwardCase::new(&case.exact()).unwrap();
        let answer = case.run(&Cpu::with_isa(Isa::Portable).unwrap().with_threads(1), PlanOptions::default());
        let checked = answer.and_then(|answer| case.check(&answer));
        assert!(checked.is_ok(), "{checked:?}");
    }

    #[test]
    fn gradients_causal_with_every_bias() {
        let case = Case::new("causal", [1, 2, 1, 3, 5, 5, 6], Dtype::F32).causal(QOffset::BottomRight);
        let case = case.mask(MaskKind::Additive(Dtype::F32), "h", MaskFill::Random);
        passes(case.softcap(3.0).alibi().sinks());
    }

    #[test]
    fn gradients_packed() {
        for dtype in [Dtype::F16, Dtype::BF16] {
            passes(Case::new("packed", [1, 2, 1, 0, 0, 6, 4], dtype).packed(&[
                (2, 3),
                (0, 2),
                (3, 0),
                (1, 1),
            ]));
        }
    }
}

mod merging {
    //! Partial results over disjoint keys.

    use super::{alone, normal};
    use flashtile::{AttentionState, Outputs, TensorView, TensorViewMut, merge};
    use half::{bf16, f16};

    #[test]
    fn partials_of_every_dtype() {
        alone();
        let (shape, rows) = ([1, 2, 3, 5], 6);
        let elements = normal(1, rows * 5);
        let halves: Vec<f16> = elements.iter().copied().map(f16::from_f32).collect();
        let nothing = vec![f32::NAN; rows * 5];
        let (lse, none) = (normal(2, rows), vec![f32::NEG_INFINITY; rows]);
        let parts = [
            AttentionState { out: TensorView::bhsd(&elements, shape).unwrap(), lse: &lse },
            AttentionState { out: TensorView::bhsd(&halves, shape).unwrap(), lse: &lse },
            AttentionState { out: TensorView::bhsd(&nothing, shape).unwrap(), lse: &none },
        ];
        // Rows with an unused element between them, and none after the last.
        let strides = [0, 3 * 6 + 1, 6, 1];
        let (mut out, mut total) = (vec![bf16::NAN; 19 + 2 * 6 + 5], vec![f32::NAN; rows]);
        let mut outputs = Outputs::new(TensorViewMut::strided(&mut out, shape, strides).unwrap());
        outputs.lse = Some(&mut total);
        merge(&parts, &mut outputs).unwrap();
        for row in 0..rows {
            assert!((total[row] - lse[row] - 2f32.ln()).abs() < 1e-6);
            for d in 0..5 {
                let (got, want) = (out[row / 3 * 19 + row % 3 * 6 + d], elements[row * 5 + d]);
                assert!((got.to_f32() - want).abs() < 0.02 * want.abs().max(0.1), "{got} {want}");
            }
        }
        assert!(out[5].is_nan() && out[18].is_nan());
    }
}

mod caches {
    //! KV caches of elements and of codes: every operation, and attention afterwards.

    use super::{normal, portable};
    use flashtile::cache::Snapshot;
    use flashtile::{
        CacheDesc, CacheLayout, CacheShape, Codec, Dtype, HeadShape, KvCache, Outputs, PlanOptions,
        ProblemDesc, SeqId, SeqLens, TensorView, TensorViewMut, Visibility,
    };

    const HEADS: usize = 1;

    fn cache(layout: CacheLayout, codec: Codec) -> KvCache {
        let dim = if codec.supports(8) { 8 } else { 256 };
        KvCache::new(CacheDesc::new(
            layout,
            CacheShape { layers: 1, kv_heads: HEADS, head_dim: dim, value_dim: dim },
            codec,
        ))
        .unwrap()
    }

    fn paged(codec: Codec) -> KvCache {
        cache(CacheLayout::Paged { pages: 6, page_size: 3 }, codec)
    }

    fn append(cache: &mut KvCache, seq: SeqId, tokens: usize, seed: u64) {
        let dim = cache.desc().head_dim;
        let rows = normal(seed, tokens * HEADS * dim);
        let rows = TensorView::packed(&rows, [tokens, HEADS, dim]).unwrap();
        cache.append(&[(seq, tokens)], &[(rows, rows)]).unwrap();
    }

    /// Keys of a sequence, as elements.
    fn keys(cache: &KvCache, seq: SeqId) -> Vec<f32> {
        let tokens = cache.len(seq).unwrap() - cache.first(seq).unwrap();
        let shape = [tokens, HEADS, cache.desc().head_dim];
        let (mut k, mut v) = (vec![f32::NAN; shape.iter().product()], vec![f32::NAN; shape.iter().product()]);
        let mut views = [&mut k, &mut v].map(|x| TensorViewMut::packed(x.as_mut_slice(), shape).unwrap());
        let [k_view, v_view] = &mut views;
        cache.linearize(seq, 0, k_view, v_view).unwrap();
        assert!(v.iter().all(|x| x.is_finite()));
        k
    }

    /// One attention step for each sequence, whatever rows without a token hold.
    fn attend(cache: &mut KvCache, sequences: &[SeqId], visibility: Visibility) -> Vec<f32> {
        cache.poison_unused();
        let (dim, codec) = (cache.desc().head_dim, cache.desc().k);
        let lengths: Vec<_> = sequences.iter().map(|&seq| SeqLens::decode(cache.len(seq).unwrap())).collect();
        let mut desc = ProblemDesc::cached(
            HeadShape { q_heads: HEADS, kv_heads: HEADS, head_dim: dim, value_dim: dim },
            Dtype::F32,
            &lengths,
        );
        (desc.k_codec, desc.v_codec) = (Some(codec), Some(codec));
        desc.visibility = visibility;
        let cpu = portable().cpu;
        let plan = cpu.plan(&desc.validate().unwrap(), PlanOptions::default()).unwrap();
        let shape = [sequences.len(), HEADS, dim];
        let q = normal(7, shape.iter().product());
        let mut out = vec![f32::NAN; q.len()];
        let tables = cache.tables(sequences).unwrap();
        let inputs = cache.inputs(0, TensorView::packed(&q, shape).unwrap(), &tables).unwrap();
        let mut outputs = Outputs::new(TensorViewMut::packed(&mut out, shape).unwrap());
        cpu.run(&plan, &inputs, &mut outputs, &mut plan.workspace()).unwrap();
        assert!(out.iter().all(|x| x.is_finite()));
        out
    }

    /// Appends, forks, truncations, copies in and out.
    fn lives(codec: Codec) {
        let mut cache = paged(codec);
        let first = cache.create().unwrap();
        append(&mut cache, first, 5, 1);
        let before = keys(&cache, first);
        let fork = cache.fork(first).unwrap();
        // Shared pages are copied.
        append(&mut cache, fork, 2, 2);
        assert_eq!(keys(&cache, first), before);
        assert_eq!(keys(&cache, fork)[..before.len()], before);
        let snapshot = cache.snapshot(fork).unwrap();
        let bytes = snapshot.to_bytes();
        cache.truncate(fork, 4).unwrap();
        append(&mut cache, fork, 1, 3);
        let restored = cache.restore(&Snapshot::from_bytes(&bytes).unwrap()).unwrap();
        assert_eq!(keys(&cache, restored)[..before.len()], before);
        attend(&mut cache, &[first, fork, restored], Visibility::causal());
        cache.remove(first).unwrap();
        attend(&mut cache, &[restored, fork], Visibility::causal());
    }

    #[test]
    fn of_elements() {
        [Codec::F32, Codec::BF16].into_iter().for_each(lives);
    }

    #[test]
    fn of_codes() {
        [Codec::Int8, Codec::Tq5, Codec::Fp8].into_iter().for_each(lives);
    }

    /// Rows of 256 elements are slow, so that attention is left out.
    #[test]
    fn of_mlx() {
        let mut cache = paged(Codec::MlxTq4);
        let seq = cache.create().unwrap();
        append(&mut cache, seq, 2, 1);
        let fork = cache.fork(seq).unwrap();
        append(&mut cache, fork, 1, 2);
        let bytes = cache.snapshot(seq).unwrap().to_bytes();
        let restored = cache.restore(&Snapshot::from_bytes(&bytes).unwrap()).unwrap();
        assert_eq!(keys(&cache, restored), keys(&cache, seq));
    }

    #[test]
    fn rings() {
        let mut cache = cache(CacheLayout::Ring { slots: 2, capacity: 5 }, Codec::F16);
        let [one, other] = [1, 2].map(|seed| {
            let seq = cache.create().unwrap();
            append(&mut cache, seq, 4, seed);
            seq
        });
        append(&mut cache, one, 4, 3);
        assert_eq!(cache.first(one).unwrap(), 3);
        attend(&mut cache, &[one, other], Visibility::window(Some(3), Some(0)));
        let slots = cache.fork(one);
        assert!(slots.is_err(), "both slots are taken");
    }

    #[test]
    fn contiguous_slots() {
        let mut cache = cache(CacheLayout::Contiguous { slots: 2, capacity: 6 }, Codec::Tq4);
        let one = cache.create().unwrap();
        append(&mut cache, one, 4, 1);
        let other = cache.fork(one).unwrap();
        assert_eq!(keys(&cache, one), keys(&cache, other));
        attend(&mut cache, &[other, one], Visibility::causal());
    }
}

mod codecs {
    //! Rows of every codec, stored and read.

    use super::normal;
    use flashtile::Codec;
    use flashtile::codec::{CodePages, Side};
    use flashtile::quality::compare;
    use flashtile::quality::{Head, HeadAttention, KeyCodec};

    fn stores(codec: Codec, dim: usize, bound: f32) {
        let mut pages = CodePages::new(codec, Side::Keys, [2, 1, 3, dim]).unwrap();
        for row in 0..3 {
            pages.store([1, 0, row], &normal(row as u64, dim)).unwrap();
        }
        let mut back = vec![f32::NAN; dim];
        for row in 0..3 {
            pages.view().read(1, 0, row, &mut back);
            let x = normal(row as u64, dim);
            let energy: f32 = x.iter().map(|x| x * x).sum();
            let error: f32 = x.iter().zip(&back).map(|(a, b)| (a - b) * (a - b)).sum();
            assert!(error < bound * energy, "{codec} of {dim}: {error} of {energy}");
        }
    }

    #[test]
    fn rows_of_codes() {
        // A power of two, blocks of three sizes, and rows that end within a byte of a plane.
        for (codec, dims) in [
            (Codec::Int8, &[8, 7][..]),
            (Codec::Fp8, &[8, 7]),
            (Codec::Tq6, &[13]),
            (Codec::Tq5, &[3]),
            (Codec::Tq3, &[12]),
            (Codec::Tq2, &[16]),
        ] {
            dims.iter().for_each(|&dim| stores(codec, dim, 0.3));
        }
    }

    #[test]
    fn rows_of_mlx() {
        let bytes = |codec: Codec| if codec == Codec::MlxTq4 { 128 } else { 256 };
        for codec in [Codec::MlxTq4, Codec::MlxTq8Plain] {
            stores(codec, 256, 0.02);
            let mut pages = CodePages::new(codec, Side::Values, [1, 1, 1, 256]).unwrap();
            pages.store([0, 0, 0], &normal(1, 256)).unwrap();
            let (mut codes, mut norms) = (vec![0; bytes(codec)], vec![f32::NAN]);
            pages.to_mlx(&mut codes, &mut norms).unwrap();
            let again = CodePages::from_mlx(codec, pages.shape(), &codes, &norms).unwrap();
            let mut rows = [vec![0.0; 256], vec![0.0; 256]];
            pages.view().read(0, 0, 0, &mut rows[0]);
            again.view().read(0, 0, 0, &mut rows[1]);
            assert_eq!(rows[0], rows[1]);
        }
    }

    #[test]
    fn compared() {
        let (k, v, q) = (normal(1, 6 * 8), normal(2, 6 * 8), normal(3, 3 * 8));
        let head = Head { k: &k, v: &v, q: &q, head_dim: 8, value_dim: 8, scale: 0.35 };
        let keys = [Codec::Tq4, Codec::F16].map(|codec| KeyCodec { codec, centered: true, equalized: false });
        let found = compare(&HeadAttention::new(head), &keys, &[Codec::Int8]).unwrap();
        assert!(found.out.iter().flatten().all(|out| out.is_some_and(|out| out.relative() < 0.1)));
    }
}

/// Faults that Miri must find, one per test; the command that runs them expects each to fail. Other builds do not
/// contain them.
#[cfg(miri)]
#[allow(unsafe_code)]
mod planted {
    use super::{normal, portable};
    use flashtile::{Dims, Dtype, Inputs, Outputs, PlanOptions, ProblemDesc, TensorView, TensorViewMut};

    /// A view of rows of 4 elements that claims one row more than the memory holds.
    fn one_row_more(memory: &[f32]) -> TensorView<'_> {
        let rows = memory.len() / 4 + 1;
        let shape = [1, 1, rows, 4];
        // SAFETY: none; this is the fault.
        unsafe {
            TensorView::from_raw_parts(Dtype::F32, memory.as_ptr().cast(), shape, [rows * 4, rows * 4, 4, 1])
        }
        .unwrap()
    }

    #[test]
    #[ignore = "undefined behaviour, which Miri must find"]
    fn an_element_past_a_view() {
        let memory = normal(1, 8);
        assert!(one_row_more(&memory).get([0, 0, 2, 0]).is_finite());
    }

    #[test]
    #[ignore = "undefined behaviour, which Miri must find"]
    fn a_key_past_a_view_in_a_kernel() {
        let (q, memory, mut out) = (normal(1, 4), normal(2, 8), [f32::NAN; 4]);
        let kv = one_row_more(&memory);
        let dims = Dims { batch: 1, q_heads: 1, kv_heads: 1, q_len: 1, kv_len: 3, head_dim: 4, value_dim: 4 };
        let problem = ProblemDesc::new(dims, Dtype::F32).validate().unwrap();
        let cpu = portable().cpu;
        let plan = cpu.plan(&problem, PlanOptions::default()).unwrap();
        let inputs = Inputs::new(TensorView::bhsd(&q, dims.q_shape()).unwrap(), kv, kv);
        let mut outputs = Outputs::new(TensorViewMut::bhsd(&mut out, dims.out_shape()).unwrap());
        cpu.run(&plan, &inputs, &mut outputs, &mut plan.workspace()).unwrap();
    }
}
