//! The front door: one call gives what describing, planning and running gives, bit for bit.

use flashtile::{
    Attention, BlockTables, CacheDesc, CacheLayout, CacheShape, Codec, Cpu, Dtype, Error, HeadShape, Inputs,
    KvCache, KvCacheExt, MaskView, Outputs, OwnedTensor, PlanOptions, ProblemDesc, QOffset, Runner, SeqId,
    SeqLens, StepTensors, TensorView, TensorViewMut, attention, attention_probs, attention_vec,
};
use flashtile_testkit::Rng;

/// `count` numbers of about N(0, 1).
fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut rng = Rng::new(seed);
    (0..count).map(|_| rng.normal()).collect()
}

/// The outputs of a plan and its run.
fn by_hand(desc: ProblemDesc, inputs: &Inputs<'_>) -> (Vec<f32>, Vec<f32>) {
    let cpu = Cpu::new();
    let plan = cpu.plan(&desc.validate().unwrap(), PlanOptions::default()).unwrap();
    let dims = *plan.problem().dims();
    let mut out = vec![f32::NAN; dims.out_shape().iter().product()];
    let mut lse = vec![f32::NAN; dims.lse_shape().iter().product()];
    let mut outputs = Outputs::new(TensorViewMut::bhsd(&mut out, dims.out_shape()).unwrap());
    outputs.lse = Some(&mut lse);
    cpu.run(&plan, inputs, &mut outputs, &mut plan.workspace()).unwrap();
    (out, lse)
}

#[test]
fn one_call_is_plan_and_run() {
    let (q, kv) = (numbers(2 * 4 * 24 * 32, 1), numbers(2 * 2 * 40 * 32, 2));
    let (q, kv) =
        (TensorView::bhsd(&q, [2, 4, 24, 32]).unwrap(), TensorView::bhsd(&kv, [2, 2, 40, 32]).unwrap());
    let packed = |view: TensorView<'_>| view.shape();
    assert_eq!(packed(q), [2, 4, 24, 32]);
    let bias = numbers(24 * 40, 3);
    let mask = MaskView::dense_additive(&bias, [24, 40]).unwrap();
    let (slopes, logits, lens) = ([0.5, 0.25, 0.125, 0.0625], [0.1, -0.2, 0.3, 0.4], [40, 17]);
    let options = [
        Attention::full(),
        Attention::decode(),
        Attention::decode().window(7, 0).softcap(20.0).scale(0.2),
        Attention::causal().q_offset(QOffset::At(3)).alibi(&slopes).sinks(&logits),
        Attention::full().mask(mask).kv_lens(&lens),
    ];
    for (n, options) in options.iter().enumerate() {
        let (want, want_lse) = by_hand(options.desc(&q, &kv, &kv), &options.inputs(q, kv, kv));
        // The second time with the plan of the first one.
        for _ in 0..2 {
            let mut out = vec![f32::NAN; want.len()];
            let mut view = TensorViewMut::bhsd(&mut out, [2, 4, 24, 32]).unwrap();
            attention(q, kv, kv, &mut view, options).unwrap();
            assert_eq!(out, want, "options {n}");
        }
        assert_eq!(attention_vec::<f32>(q, kv, kv, options).unwrap(), want, "options {n}");
        let mut out = OwnedTensor::zeros(Dtype::F32, [2, 4, 24, 32]).unwrap();
        let mut lse = vec![f32::NAN; want_lse.len()];
        let mut outputs = Outputs::new(out.view_mut());
        outputs.lse = Some(&mut lse);
        let inputs = options.inputs(q, kv, kv);
        Runner::new().run(&options.desc(&q, &kv, &kv), &inputs, &mut outputs).unwrap();
        assert_eq!((out.into_vec::<f32>().unwrap(), lse), (want, want_lse), "options {n}");
    }
}

#[test]
fn packed_sequences() {
    let (q, kv) = (numbers(30 * 2 * 16, 4), numbers(41 * 16, 5));
    let q = TensorView::packed(&q, [30, 2, 16]).unwrap();
    let kv = TensorView::packed(&kv, [41, 1, 16]).unwrap();
    let (cu_q, cu_k) = ([0, 9, 30], [0, 20, 41]);
    let options = Attention::decode().cu_seqlens(&cu_q, &cu_k);
    let (want, _) = by_hand(options.desc(&q, &kv, &kv), &options.inputs(q, kv, kv));
    assert_eq!(attention_vec::<f32>(q, kv, kv, &options).unwrap(), want);
    // Other lengths are another problem, not the plan that is kept.
    let other = Attention::decode().cu_seqlens(&[0, 10, 30], &cu_k);
    assert_ne!(attention_vec::<f32>(q, kv, kv, &other).unwrap(), want);
}

#[test]
fn masks_of_fewer_axes_and_of_stride_0_are_those_written_out() {
    let x = numbers(2 * 2 * 9 * 16, 6);
    let x = TensorView::bhsd(&x, [2, 2, 9, 16]).unwrap();
    let by = |mask: MaskView<'_>| attention_vec::<f32>(x, x, x, &Attention::full().mask(mask)).unwrap();
    let bias = numbers(2 * 9 * 9, 7);
    // The mask written out: `at` is the index into `bias` of each of its elements.
    let written_out = |at: &dyn Fn([usize; 4]) -> usize| -> Vec<f32> {
        let place = |n: usize| [n / 162, n / 81 % 2, n / 9 % 9, n % 9];
        (0..2 * 2 * 81).map(|n| bias[at(place(n))]).collect()
    };
    type At<'a> = &'a dyn Fn([usize; 4]) -> usize;
    let full = [2, 2, 9, 9];
    let cases: [(MaskView<'_>, At<'_>); 6] = [
        (MaskView::dense_additive(&bias[..81], [9, 9]).unwrap(), &|[_, _, i, j]| 9 * i + j),
        (MaskView::dense_additive(&bias, [2, 9, 9]).unwrap(), &|[b, _, i, j]| 81 * b + 9 * i + j),
        (MaskView::dense_additive(&bias, [1, 2, 9, 9]).unwrap(), &|[_, h, i, j]| 81 * h + 9 * i + j),
        (MaskView::additive_strided(&bias, full, [81, 0, 9, 1]).unwrap(), &|[b, _, i, j]| 81 * b + 9 * i + j),
        (MaskView::additive_strided(&bias, full, [0, 0, 0, 1]).unwrap(), &|[_, _, _, j]| j),
        (MaskView::additive_strided(&bias, full, [9, 0, 1, 0]).unwrap(), &|[b, _, i, _]| 9 * b + i),
    ];
    for (n, (mask, at)) in cases.into_iter().enumerate() {
        let dense = written_out(at);
        assert_eq!(by(mask), by(MaskView::dense_additive(&dense, full).unwrap()), "case {n}");
    }
    // Blocks of keys that are hidden, plain or mixed, told from one element a query. No other element may be read.
    let (rows, keys) = (5, 600);
    let q = numbers(rows * 16, 11);
    let kv = numbers(keys * 16, 12);
    let q = TensorView::bhsd(&q, [1, 1, rows, 16]).unwrap();
    let kv = TensorView::bhsd(&kv, [1, 1, keys, 16]).unwrap();
    let shown = [0.0, f32::NEG_INFINITY, 1.5, 0.0, f32::NEG_INFINITY];
    let wide: Vec<f32> = (0..rows * keys).map(|n| shown[n / keys]).collect();
    let by_row = MaskView::additive_strided(&shown, [1, 1, rows, keys], [0, 0, 1, 0]).unwrap();
    let dense = MaskView::dense_additive(&wide, [rows, keys]).unwrap();
    let [got, want] =
        [by_row, dense].map(|mask| attention_vec::<f32>(q, kv, kv, &Attention::full().mask(mask)).unwrap());
    assert_eq!(got, want);
    assert!(want[16..32].iter().all(|&x| x == 0.0) && want[..16].iter().any(|&x| x != 0.0));
    let exact = Box::new([true, false, true, true, false]);
    let by_row = MaskView::bool(&exact[..], [1, 1, rows, keys], [0, 0, 1, 0]).unwrap();
    let wide: Vec<bool> = (0..rows * keys).map(|n| exact[n / keys]).collect();
    let dense = MaskView::dense_bool(&wide, [rows, keys]).unwrap();
    let [got, want] =
        [by_row, dense].map(|mask| attention_vec::<f32>(q, kv, kv, &Attention::full().mask(mask)).unwrap());
    assert_eq!(got, want);

    let visible: Vec<bool> = (0..18).map(|n| n % 3 != 1).collect();
    let rows = MaskView::bool(&visible, full, [9, 0, 1, 0]).unwrap();
    let dense: Vec<bool> = (0..324).map(|n| visible[9 * (n / 162) + n / 9 % 9]).collect();
    assert_eq!(by(rows), by(MaskView::dense_bool(&dense, full).unwrap()));
}

#[test]
fn one_error_for_all_refusals() {
    let data = vec![0.0f32; 64];
    let view = TensorView::bhsd(&data, [1, 2, 2, 16]).unwrap();
    let short = TensorView::bhsd(&data, [1, 2, 1, 16]).unwrap();
    let run = |options: &Attention<'_>| attention_vec::<f32>(view, view, view, options).unwrap_err();
    let said = |error: Error| (error.to_string(), error.is_unsupported());
    let mask = [true; 3];
    let wrong = MaskView::dense_bool(&mask, [1, 3]).unwrap();
    assert!(matches!(run(&Attention::full().mask(wrong)), Error::Run(_)));
    let offset = attention_vec::<f32>(short, view, view, &Attention::causal()).unwrap_err();
    assert!(matches!(offset, Error::Problem(_)), "{offset}");
    let dtype = attention_vec::<half::f16>(view, view, view, &Attention::full()).unwrap_err();
    assert_eq!(said(dtype), ("out is f16, expected f32".to_owned(), false));
    let mut runner = Runner::new();
    let mut options = PlanOptions::default();
    options.splits = Some(100);
    runner = runner.with_options(options);
    let splits = runner.plan(&Attention::full().desc(&view, &view, &view)).unwrap_err();
    assert!(splits.is_unsupported() && std::error::Error::source(&splits).is_none());
    let view_error: Error = TensorView::bhsd(&data, [9, 9, 9, 9]).unwrap_err().into();
    assert_eq!(view_error.to_string(), "view reaches 6561 elements, memory holds 64");
}

/// [`Runner::prepare`] refuses what a run refuses, and writes nothing.
#[test]
fn what_is_prepared_runs() {
    let pages = numbers(3 * 2 * 4 * 16, 5);
    let pages = TensorView::bhsd(&pages, [3, 2, 4, 16]).unwrap();
    let q = numbers(2 * 2 * 16, 6);
    let q = TensorView::packed::<f32>(&q, [2, 2, 16]).unwrap();
    let heads = HeadShape { q_heads: 2, kv_heads: 2, head_dim: 16, value_dim: 16 };
    let desc = ProblemDesc::cached(heads, Dtype::F32, &[SeqLens::decode(7), SeqLens::decode(4)]);
    let mut runner = Runner::new();
    let mut out = vec![f32::NAN; 2 * 2 * 16];
    for (table, refused) in
        [([2, 0, 1, 9], false), ([2, 3, 1, 9], true), ([2, 0, 1, 9], false), ([9, 0, 1, 9], true)]
    {
        out.fill(f32::NAN);
        let tables = BlockTables::from_rows(&table, &[7, 4], 4).unwrap();
        let inputs = Inputs::paged(q, pages, pages, &tables);
        let mut outputs = Outputs::new(TensorViewMut::packed::<f32>(&mut out, [2, 2, 16]).unwrap());
        let prepared = runner.prepare(&desc, &inputs, &outputs).map_err(|error| error.to_string());
        assert_eq!(prepared.is_err(), refused, "{prepared:?}");
        let ran = runner.run(&desc, &inputs, &mut outputs).map_err(|error| error.to_string());
        assert_eq!(prepared, ran);
        assert_eq!(out.iter().all(|x| x.is_nan()), refused);
        assert_eq!(out.iter().any(|x| x.is_nan()), refused);
    }
    let tables = BlockTables::from_rows(&[2, 0, 1, 9], &[7, 4], 4).unwrap();
    let mut outputs = Outputs::new(TensorViewMut::packed::<f32>(&mut out, [2, 2, 16]).unwrap());
    outputs.lse = Some(&mut []);
    runner.prepare(&desc, &Inputs::paged(q, pages, pages, &tables), &outputs).unwrap_err();
}

/// A runner plans again where the pool of a call has another number of threads.
#[test]
fn runners_follow_the_pool() {
    let mut runner = Runner::new();
    let data = vec![0.5f32; 8 * 64 * 16];
    let view = TensorView::bhsd(&data, [1, 8, 64, 16]).unwrap();
    let desc = Attention::full().desc(&view, &view, &view);
    for threads in [1, 2, 1] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let plan = pool.install(|| runner.plan(&desc).unwrap().clone());
        assert_eq!(
            plan,
            Cpu::new().with_threads(threads).plan(plan.problem(), PlanOptions::default()).unwrap()
        );
    }
}

/// More descriptions than a runner keeps: each still gets its own plan.
#[test]
fn plans_that_are_dropped_are_made_again() {
    let mut runner = Runner::new();
    let data = numbers(40 * 16, 8);
    for round in 0..2 {
        for rows in 1..40 {
            let view = TensorView::bhsd(&data, [1, 1, rows, 16]).unwrap();
            let mut out = vec![f32::NAN; rows * 16];
            let mut out_view = TensorViewMut::bhsd(&mut out, [1, 1, rows, 16]).unwrap();
            runner.attention(view, view, view, &mut out_view, &Attention::causal()).unwrap();
            let (want, _) =
                by_hand(Attention::causal().desc(&view, &view, &view), &Inputs::new(view, view, view));
            assert_eq!(out, want, "{rows} rows, round {round}");
        }
    }
}

#[test]
fn probabilities_weigh_the_values() {
    let (q, kv) = (numbers(2 * 6 * 16, 9), numbers(9 * 16, 10));
    let q = TensorView::bhsd(&q, [1, 2, 6, 16]).unwrap();
    let kv = TensorView::bhsd(&kv, [1, 1, 9, 16]).unwrap();
    let options = Attention::decode().window(4, 0).softcap(3.0);
    let probs = attention_probs(q, kv, &options).unwrap();
    let out: Vec<f32> = attention_vec(q, kv, kv, &options).unwrap();
    for (row, probs) in probs.chunks_exact(9).enumerate() {
        assert!((probs.iter().sum::<f32>() - 1.0).abs() < 1e-6, "row {row}");
        assert_eq!(probs.iter().filter(|&&p| p > 0.0).count(), 5.min(row % 6 + 4), "row {row}");
        for d in 0..16 {
            let sum: f32 = probs.iter().enumerate().map(|(j, p)| p * kv.get([0, 0, j, d])).sum();
            assert!((sum - out[16 * row + d]).abs() < 1e-5, "row {row}, coordinate {d}");
        }
    }
    let (halves, logits) = ([1.0f32; 16], [0.0; 1]);
    let one = TensorView::bhsd(&halves, [1, 1, 1, 16]).unwrap();
    let with_sink = attention_probs(one, one, &Attention::full().scale(0.0).sinks(&logits)).unwrap();
    assert_eq!(with_sink, [0.5]);
}

const HEADS: usize = 4;
const DIM: usize = 64;

fn cache(layout: CacheLayout, codec: Codec) -> KvCache {
    let shape = CacheShape { layers: 2, kv_heads: 2, head_dim: DIM, value_dim: DIM };
    let mut cache = KvCache::new(CacheDesc::new(layout, shape, codec)).unwrap();
    if codec == Codec::Int8 {
        (0..2).for_each(|layer| cache.set_key_mean(layer, &numbers(2 * DIM, 40)).unwrap());
    }
    cache
}

/// `q . mean` overflows here, which makes the maximum of a block infinite: rows whose task has one block come out as rows whose task has two.
#[test]
fn means_whose_products_overflow_give_the_same_rows_in_chunks() {
    const TOKENS: usize = 600;
    let shape = CacheShape { layers: 1, kv_heads: 1, head_dim: 16, value_dim: 16 };
    let (mean, values) = ([3e38f32; 16], numbers(TOKENS * 16, 50));
    for sign in [2.0f32, -2.0] {
        let run = |chunks: &[usize]| {
            let layout = CacheLayout::Contiguous { slots: 1, capacity: TOKENS };
            let mut cache = KvCache::new(CacheDesc::new(layout, shape, Codec::Int8)).unwrap();
            cache.set_key_mean(0, &mean).unwrap();
            let (seq, mut all, mut first) = (cache.create().unwrap(), Vec::new(), 0);
            for &n in chunks {
                let (q, k, mut out) = (vec![sign; n * 16], vec![3e38f32; n * 16], vec![0.0f32; n * 16]);
                let of = |x| TensorView::packed(x, [n, 1, 16]).unwrap();
                let v = of(&values[16 * first..][..16 * n]);
                let mut step = cache.step(&[(seq, n)]).unwrap();
                step.attend(0, of(&q), of(&k), v, &mut TensorViewMut::packed(&mut out, [n, 1, 16]).unwrap())
                    .unwrap();
                step.finish().unwrap();
                all.extend(out.into_iter().map(|x| if x.is_nan() { None } else { Some(x.to_bits()) }));
                first += n;
            }
            all
        };
        let (whole, chunks) = (run(&[TOKENS]), run(&[20, 1, 200, TOKENS - 221]));
        let differs = |row: &usize| whole[16 * row..][..16] != chunks[16 * row..][..16];
        assert_eq!((0..TOKENS).find(differs), None, "a row of queries of {sign}");
    }
}

/// Runs a step with random rows, and returns the output of both layers.
fn step(cache: &mut KvCache, batch: &[(SeqId, usize)], options: Attention<'_>) -> Vec<f32> {
    let total: usize = batch.iter().map(|&(_, n)| n).sum();
    let mut all = Vec::new();
    let mut step = cache.step(batch).unwrap();
    for layer in 0..2 {
        let (q, kv) = (numbers(total * HEADS * DIM, 20 + layer), numbers(total * 2 * DIM, 30 + layer));
        let mut out = vec![f32::NAN; total * HEADS * DIM];
        let view = TensorViewMut::packed(&mut out, [total, HEADS, DIM]).unwrap();
        let q = TensorView::packed(&q, [total, HEADS, DIM]).unwrap();
        let kv = TensorView::packed(&kv, [total, 2, DIM]).unwrap();
        let tensors = StepTensors { q, k: kv, v: kv };
        step.attend_with(layer as usize, tensors, &options, &mut Outputs::new(view)).unwrap();
        all.extend(out);
    }
    step.finish().unwrap();
    all
}

/// [`step`] by the calls that a step consists of.
fn step_by_hand(cache: &mut KvCache, batch: &[(SeqId, usize)], options: Attention<'_>) -> Vec<f32> {
    let total: usize = batch.iter().map(|&(_, n)| n).sum();
    let seqs: Vec<SeqId> = batch.iter().map(|&(seq, _)| seq).collect();
    let mut all = Vec::new();
    cache.extend(batch).unwrap();
    for layer in 0..2 {
        let (q, kv) = (numbers(total * HEADS * DIM, 20 + layer), numbers(total * 2 * DIM, 30 + layer));
        let q = TensorView::packed(&q, [total, HEADS, DIM]).unwrap();
        let kv = TensorView::packed(&kv, [total, 2, DIM]).unwrap();
        cache.write(layer as usize, batch, &kv, &kv).unwrap();
        let tables = cache.tables(&seqs).unwrap();
        let lens: Vec<SeqLens> =
            batch.iter().zip(&tables.lens).map(|(&(_, q_len), &kv_len)| SeqLens { q_len, kv_len }).collect();
        let mut desc = ProblemDesc::over(cache.desc(), HEADS, Dtype::F32, &lens);
        desc.visibility = options.visibility;
        desc.softcap = options.softcap;
        let inputs = cache.inputs(layer as usize, q, &tables).unwrap();
        let (out, _) = by_hand(desc, &inputs);
        // `by_hand` has heads first.
        let at = |row: usize, h: usize| &out[(h * total + row) * DIM..][..DIM];
        all.extend((0..total).flat_map(|row| (0..HEADS).flat_map(move |h| at(row, h).to_vec())));
    }
    all
}

#[test]
fn steps_are_extend_write_and_run() {
    let layouts = [
        CacheLayout::Paged { pages: 64, page_size: 16 },
        CacheLayout::Paged { pages: 64, page_size: 16 },
        CacheLayout::Contiguous { slots: 3, capacity: 400 },
        CacheLayout::Ring { slots: 3, capacity: 400 },
    ];
    for (layout, codec) in layouts.into_iter().zip([Codec::Int8, Codec::F32, Codec::Tq4, Codec::F32]) {
        let caches = [cache(layout, codec), cache(layout, codec)];
        let [got, want] = caches.map(|mut cache| (cache.create().unwrap(), cache.create().unwrap(), cache));
        let ((a, b, mut got), (x, y, mut want)) = (got, want);
        let options = Attention::decode().window(299, 0).softcap(30.0);
        for (i, j) in [(290, 1), (1, 40), (1, 1)] {
            let expected = step_by_hand(&mut want, &[(x, i), (y, j)], options);
            assert!(step(&mut got, &[(a, i), (b, j)], options) == expected, "{layout:?} {codec}");
        }
        // Forks share a prefix, which steps find by themselves; its length makes no bit different.
        let (c, z) = (got.fork(a).unwrap(), want.fork(x).unwrap());
        let options = Attention::decode();
        let expected = step_by_hand(&mut want, &[(x, 2), (z, 1)], options);
        assert!(step(&mut got, &[(a, 2), (c, 1)], options) == expected, "{layout:?} {codec}, forked");
    }
}

#[test]
fn a_step_that_is_dropped_takes_its_tokens_back() {
    let mut cache = cache(CacheLayout::Paged { pages: 8, page_size: 16 }, Codec::Int8);
    let (a, b) = (cache.create().unwrap(), cache.create().unwrap());
    step(&mut cache, &[(a, 20), (b, 3)], Attention::decode());
    let before = cache.memory();
    let data = vec![0.5f32; 40 * HEADS * DIM];
    let mut out = vec![0.0f32; 40 * HEADS * DIM];
    let q = TensorView::packed(&data, [40, HEADS, DIM]).unwrap();
    let mut view = TensorViewMut::packed(&mut out, [40, HEADS, DIM]).unwrap();
    let mut step = cache.step(&[(a, 30), (b, 10)]).unwrap();
    assert_eq!(step.lens(), [SeqLens { q_len: 30, kv_len: 50 }, SeqLens { q_len: 10, kv_len: 13 }]);
    // As many key/value heads as query heads: not the cache's.
    let refused = step.attend(0, q, q, q, &mut view).unwrap_err();
    assert!(matches!(refused, Error::Cache(_)), "{refused}");
    drop(step);
    assert_eq!((cache.len(a), cache.len(b), cache.memory()), (Ok(20), Ok(3), before));
    // Nor does one whose attention is refused, with a layer written.
    let kv = TensorView::packed(&data[..40 * 2 * DIM], [40, 2, DIM]).unwrap();
    let lens = [40];
    let options = Attention::decode().kv_lens(&lens);
    let mut step = cache.step(&[(a, 30), (b, 10)]).unwrap();
    step.attend(0, q, kv, kv, &mut view).unwrap();
    let tensors = StepTensors { q, k: kv, v: kv };
    let refused = step.attend_with(1, tensors, &options, &mut Outputs::new(view.reborrow())).unwrap_err();
    assert_eq!(refused.to_string(), "kv_lens was given but the problem does not have it");
    drop(step);
    assert_eq!((cache.len(a), cache.len(b), cache.memory()), (Ok(20), Ok(3), before));
    // A step that is refused changes nothing either.
    assert!(matches!(cache.step(&[(a, 1000)]), Err(Error::Cache(_))));
    assert_eq!((cache.len(a), cache.memory()), (Ok(20), before));
}

#[test]
fn a_step_is_refused_at_its_end_where_a_layer_has_not_attended() {
    let mut cache = cache(CacheLayout::Paged { pages: 8, page_size: 16 }, Codec::F32);
    let seq = cache.create().unwrap();
    let rows = [0.5f32; HEADS * DIM];
    let q = TensorView::packed(&rows, [1, HEADS, DIM]).unwrap();
    let kv = TensorView::packed(&rows[..2 * DIM], [1, 2, DIM]).unwrap();
    let mut out = [0.0f32; HEADS * DIM];
    let mut out = TensorViewMut::packed(&mut out, [1, HEADS, DIM]).unwrap();
    let mut runner = Runner::with_cpu(Cpu::new().with_threads(1));
    let mut step = cache.step(&[(seq, 1)]).unwrap().on(&mut runner);
    step.attend(0, q, kv, kv, &mut out).unwrap();
    let refused = step.finish().unwrap_err();
    assert_eq!(refused.to_string(), "layer 1 has no rows of this step's tokens");
    assert_eq!(cache.len(seq), Ok(0));
    // The layer was computed on the runner that was given.
    assert!(format!("{runner:?}").contains("plans: 1"), "{runner:?}");
    // Without tokens there is nothing to write.
    cache.step(&[(seq, 0)]).unwrap().finish().unwrap();
    cache.step(&[]).unwrap().finish().unwrap();
}

/// A ring gives up tokens for a step that is dropped, but not its length.
#[test]
fn rings_keep_their_length() {
    let mut cache = cache(CacheLayout::Ring { slots: 1, capacity: 32 }, Codec::F32);
    let seq = cache.create().unwrap();
    step(&mut cache, &[(seq, 30)], Attention::decode());
    drop(cache.step(&[(seq, 20)]).unwrap());
    assert_eq!((cache.len(seq), cache.first(seq)), (Ok(30), Ok(18)));
    let refused = cache.step(&[(seq, 33)]).unwrap_err();
    assert_eq!(refused.to_string(), "the sequence would have 33 tokens, expected at most 32");
    assert_eq!((cache.len(seq), cache.first(seq)), (Ok(30), Ok(18)));
}
