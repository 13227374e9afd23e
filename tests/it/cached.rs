//! Attention over caches: every way to store the tokens of a sequence gives the same bits for each of its rows.

use crate::support::{answer, build, options, row_bits, rows, runners, seers_of, threaded};
use flashtile::plan::{CpuFacts, machines};
use flashtile::problem::MAX_LEN;
use flashtile::{
    BlockTables, CacheDesc, CacheLayout, CacheShape, Cpu, CpuPlan, Dims, Dtype, HeadShape, Inputs, KvCache,
    MaskKind, Outputs, PlanOptions, ProblemDesc, QOffset, SeqId, SeqLens, SharedPrefix, Visibility,
};
use flashtile_testkit::{
    Answer, Case, CaseData, CpuRunner, Guarded, GuardedList, GuardedMask, Keep, Layout, MaskFill, Rng, Tree,
    seeded_case,
};
use std::collections::BTreeSet;
use std::ops::Range;

/// An attention layer: everything except the tokens.
struct Model {
    name: &'static str,
    heads: [usize; 2],
    dims: [usize; 2],
    dtype: Dtype,
    visibility: Visibility,
    softcap: Option<f32>,
    slopes: Option<Vec<f32>>,
    sinks: Option<Vec<f32>>,
}

impl Model {
    fn new(name: &'static str, heads: [usize; 2], dims: [usize; 2], dtype: Dtype) -> Self {
        let visibility = Visibility::causal();
        Self { name, heads, dims, dtype, visibility, softcap: None, slopes: None, sinks: None }
    }

    fn window(mut self, left: usize) -> Self {
        self.visibility = Visibility::window(Some(left), Some(0));
        self
    }

    /// With every feature that changes scores.
    fn biased(mut self) -> Self {
        self.softcap = Some(7.0);
        self.slopes = Some((0..self.heads[0]).map(|h| 0.5 / (h + 1) as f32).collect());
        self.sinks = Some((0..self.heads[0]).map(|h| h as f32 - 1.0).collect());
        self
    }

    fn shape(&self) -> HeadShape {
        let ([q_heads, kv_heads], [head_dim, value_dim]) = (self.heads, self.dims);
        HeadShape { q_heads, kv_heads, head_dim, value_dim }
    }

    fn finish(&self, mut desc: ProblemDesc) -> ProblemDesc {
        desc.visibility = self.visibility;
        desc.softcap = self.softcap;
        desc.alibi = self.slopes.is_some();
        desc.sinks = self.sinks.is_some();
        desc
    }

    fn inputs<'a>(&'a self, mut inputs: Inputs<'a>) -> Inputs<'a> {
        inputs.alibi_slopes = self.slopes.as_deref();
        inputs.sinks = self.sinks.as_deref();
        inputs
    }

    fn cache(&self, layout: CacheLayout) -> KvCache {
        let desc = CacheDesc::new(
            layout,
            CacheShape {
                layers: 1,
                kv_heads: self.heads[1],
                head_dim: self.dims[0],
                value_dim: self.dims[1],
            },
            self.dtype.into(),
        );
        KvCache::new(desc).unwrap()
    }
}

fn models() -> Vec<Model> {
    vec![
        Model::new("f32", [4, 2], [64, 64], Dtype::F32),
        Model::new("bf16 mqa", [8, 1], [64, 32], Dtype::BF16),
        Model::new("f16 odd", [3, 3], [40, 33], Dtype::F16),
        Model::new("biased", [4, 1], [32, 48], Dtype::F32).biased(),
        Model::new("bf16 biased", [6, 2], [128, 128], Dtype::BF16).biased(),
    ]
}

fn windowed() -> Vec<Model> {
    vec![
        Model::new("window f32", [4, 2], [32, 32], Dtype::F32).window(40),
        Model::new("window bf16", [8, 1], [64, 64], Dtype::BF16).window(63),
        Model::new("window biased", [4, 1], [32, 48], Dtype::F16).window(17).biased(),
    ]
}

/// Query, key and value of each position of a sequence: `[1, heads, tokens, dim]`.
struct Text {
    q: Guarded,
    k: Guarded,
    v: Guarded,
}

impl Text {
    fn new(model: &Model, seed: u64, tokens: usize) -> Self {
        let mut rng = Rng::new(seed);
        let mut tensor = |heads, dim| {
            let mut tensor = Guarded::new(model.dtype, [1, heads, tokens, dim], Layout::Bshd);
            // In token order, so that a text is a prefix of a longer one with the same seed.
            for token in 0..tokens {
                for head in 0..heads {
                    for d in 0..dim {
                        tensor.set([0, head, token, d], rng.normal());
                    }
                }
            }
            tensor
        };
        let [heads, kv_heads] = model.heads;
        let [dim, value_dim] = model.dims;
        Self { q: tensor(heads, dim), k: tensor(kv_heads, dim), v: tensor(kv_heads, value_dim) }
    }

    /// The first tokens of one text, followed by tokens of another from the same position on.
    fn splice(model: &Model, first: &Self, at: usize, rest: &Self) -> Self {
        let tokens = rest.q.shape()[2];
        let mut text = Self::new(model, 0, tokens);
        for (to, [a, b]) in [
            (&mut text.q, [&first.q, &rest.q]),
            (&mut text.k, [&first.k, &rest.k]),
            (&mut text.v, [&first.v, &rest.v]),
        ] {
            for index in to.indices() {
                to.set(index, if index[2] < at { a } else { b }.get(index));
            }
        }
        text
    }

    /// Some rows of a tensor.
    fn rows(tensor: &Guarded, tokens: Range<usize>) -> Guarded {
        let [_, heads, _, dim] = tensor.shape();
        let mut part = Guarded::new(tensor.dtype(), [1, heads, tokens.len(), dim], Layout::Bshd);
        for index in part.indices() {
            let [_, h, row, d] = index;
            part.set(index, tensor.get([0, h, tokens.start + row, d]));
        }
        part
    }

    fn append(&self, cache: &mut KvCache, seq: SeqId, tokens: Range<usize>) {
        let (k, v) = (Self::rows(&self.k, tokens.clone()), Self::rows(&self.v, tokens.clone()));
        cache.append(&[(seq, tokens.len())], &[(k.view(), v.view())]).unwrap();
    }
}

type Bits = Vec<u32>;

/// Bits of out and of the logsumexp for row `row` of every head.
fn bits(out: &Guarded, lse: &GuardedList, row: usize) -> Bits {
    let [_, heads, rows, dim] = out.shape();
    let of_head = |h: usize| {
        let element = move |d: usize| out.get([0, h, row, d]).to_bits();
        (0..dim).map(element).chain([lse.slice()[h * rows + row].to_bits()])
    };
    (0..heads).flat_map(of_head).collect()
}

/// Runs a problem on poisoned memory; the bits of each row.
fn run(runner: &CpuRunner, desc: ProblemDesc, inputs: &Inputs<'_>) -> Vec<Bits> {
    let problem = desc.validate().unwrap();
    let dims = problem.dims();
    let plan = runner.cpu.plan(&problem, runner.options).unwrap();
    let mut out = Guarded::new(problem.dtype(), dims.out_shape(), Layout::Bshd);
    let mut lse = GuardedList::new(dims.lse_shape().iter().product());
    let mut workspace = plan.workspace();
    workspace.bytes_mut().fill(0xFF);
    let mut outputs = Outputs::new(out.view_mut());
    outputs.lse = Some(lse.slice_mut());
    runner.cpu.run(&plan, inputs, &mut outputs, &mut workspace).unwrap();
    assert_eq!([out.touched(), lse.touched()], [None, None]);
    (0..dims.q_len).map(|row| bits(&out, &lse, row)).collect()
}

/// The rows of a text in one run over plain tensors.
fn whole(model: &Model, text: &Text, runner: &CpuRunner) -> Vec<Bits> {
    let [_, _, tokens, head_dim] = text.q.shape();
    let dims = Dims {
        batch: 1,
        q_heads: model.heads[0],
        kv_heads: model.heads[1],
        q_len: tokens,
        kv_len: tokens,
        head_dim,
        value_dim: model.dims[1],
    };
    let desc = model.finish(ProblemDesc::new(dims, model.dtype));
    run(runner, desc, &model.inputs(Inputs::new(text.q.view(), text.k.view(), text.v.view())))
}

/// The rows of a step over a cache, for each sequence given its text and the query positions.
fn step(
    model: &Model,
    runner: &CpuRunner,
    cache: &KvCache,
    batch: &[(SeqId, &Text, Range<usize>)],
) -> Vec<Vec<Bits>> {
    let seqs: Vec<SeqId> = batch.iter().map(|part| part.0).collect();
    let tables = cache.tables(&seqs).unwrap();
    let lens = batch.iter().zip(&tables.lens);
    let lengths: Vec<SeqLens> =
        lens.map(|((_, _, rows), &kv_len)| SeqLens { q_len: rows.len(), kv_len }).collect();
    let desc = model.finish(ProblemDesc::cached(model.shape(), model.dtype, &lengths));
    let mut q = Guarded::new(model.dtype, desc.dims.q_shape(), Layout::Bshd);
    let mut at = 0;
    for (_, text, rows) in batch {
        for row in rows.clone() {
            for h in 0..model.heads[0] {
                for d in 0..model.dims[0] {
                    q.set([0, h, at, d], text.q.get([0, h, row, d]));
                }
            }
            at += 1;
        }
    }
    let inputs = model.inputs(cache.inputs(0, q.view(), &tables).unwrap());
    let mut rows = run(runner, desc, &inputs).into_iter();
    batch.iter().map(|(_, _, part)| rows.by_ref().take(part.len()).collect()).collect()
}

fn runners_of_tests() -> Vec<CpuRunner> {
    runners().into_iter().chain(threaded(2)).collect()
}

/// A layout with room for several sequences of `tokens` tokens.
fn layouts(tokens: usize) -> Vec<CacheLayout> {
    let mut layouts = vec![CacheLayout::Contiguous { slots: 4, capacity: tokens + 3 }];
    for page in [1, 7, 16, 64, 256] {
        layouts.push(CacheLayout::Paged { pages: 4 * (tokens.div_ceil(page) + 1), page_size: page });
    }
    layouts
}

/// Leaves the free pages of a cache in random order and with arbitrary contents.
fn shuffle(cache: &mut KvCache, model: &Model, rng: &mut Rng) {
    let CacheLayout::Paged { pages, page_size: page } = cache.desc().layout else { return };
    let text = Text::new(model, 99, page);
    let mut seqs = Vec::new();
    for _ in 0..pages {
        let seq = cache.create().unwrap();
        text.append(cache, seq, 0..page);
        seqs.push(seq);
    }
    while !seqs.is_empty() {
        let seq = seqs.swap_remove(rng.below(seqs.len()));
        cache.remove(seq).unwrap();
    }
}

/// Cuts `0..tokens` into chunks of random lengths, mostly short.
fn chunks(rng: &mut Rng, tokens: usize, max: usize) -> Vec<Range<usize>> {
    let mut cuts = Vec::new();
    let mut at = 0;
    while at < tokens {
        let len = match rng.below(3) {
            0 => 1,
            1 => 1 + rng.below(max.min(17)),
            _ => 1 + rng.below(max),
        };
        cuts.push(at..(at + len).min(tokens));
        at += len;
    }
    cuts
}

#[test]
fn every_chunking_over_every_layout_gives_the_bits_of_the_whole() {
    let tokens = 290;
    for model in models() {
        let text = Text::new(&model, 1, tokens);
        for runner in runners_of_tests() {
            let want = whole(&model, &text, &runner);
            for (n, layout) in layouts(tokens).into_iter().enumerate() {
                let mut rng = Rng::new(n as u64);
                let mut cache = model.cache(layout);
                shuffle(&mut cache, &model, &mut rng);
                let mut cuts = chunks(&mut rng, tokens, [1, 40, 300][n % 3]);
                if n % 3 == 0 {
                    // The last ones token by token, after a long chunk.
                    cuts = std::iter::once(0..250).chain((250..tokens).map(|at| at..at + 1)).collect();
                }
                let seq = cache.create().unwrap();
                for cut in cuts {
                    text.append(&mut cache, seq, cut.clone());
                    cache.poison_unused();
                    let got = step(&model, &runner, &cache, &[(seq, &text, cut.clone())]);
                    assert!(got[0] == want[cut.clone()], "{} {layout:?} {cut:?} {runner:?}", model.name);
                }
            }
        }
    }
}

#[test]
fn single_tokens_give_the_bits_of_the_whole() {
    for model in models() {
        let text = Text::new(&model, 2, 40);
        for runner in runners() {
            let want = whole(&model, &text, &runner);
            let mut cache = model.cache(CacheLayout::Paged { pages: 9, page_size: 16 });
            let seq = cache.create().unwrap();
            for at in 0..40 {
                text.append(&mut cache, seq, at..at + 1);
                let got = step(&model, &runner, &cache, &[(seq, &text, at..at + 1)]);
                assert!(got[0][0] == want[at], "{} {at} {runner:?}", model.name);
            }
        }
    }
}

#[test]
fn a_ring_gives_the_bits_of_a_window_after_many_wraps() {
    let tokens = 1100;
    for model in windowed() {
        let text = Text::new(&model, 3, tokens);
        let left = model.visibility.left().unwrap();
        for runner in runners() {
            let want = whole(&model, &text, &runner);
            for (n, max) in [1, 9, 40].into_iter().enumerate() {
                let ring = CacheLayout::Ring { slots: 2, capacity: left + max };
                let pages = CacheLayout::Paged { pages: 30, page_size: [1, 16, 8][n].max(left / 8) };
                for layout in [ring, pages] {
                    let mut rng = Rng::new(n as u64);
                    let mut cache = model.cache(layout);
                    let seq = cache.create().unwrap();
                    for cut in chunks(&mut rng, tokens, max) {
                        text.append(&mut cache, seq, cut.clone());
                        if matches!(layout, CacheLayout::Paged { .. }) {
                            cache.forget(seq, cut.start.saturating_sub(left)).unwrap();
                        }
                        cache.poison_unused();
                        let got = step(&model, &runner, &cache, &[(seq, &text, cut.clone())]);
                        assert!(got[0] == want[cut.clone()], "{} {layout:?} {cut:?}", model.name);
                    }
                }
            }
        }
    }
}

#[test]
fn a_batch_of_prompts_and_single_steps_gives_each_sequence_its_own_bits() {
    let lens = [300, 40, 90, 1];
    for model in models() {
        let texts: Vec<Text> = (0..4).map(|n| Text::new(&model, 10 + n as u64, lens[n])).collect();
        for runner in runners_of_tests() {
            let want: Vec<_> = texts.iter().map(|text| whole(&model, text, &runner)).collect();
            for (n, layout) in layouts(300).into_iter().enumerate() {
                let mut rng = Rng::new(n as u64);
                let mut cache = model.cache(layout);
                shuffle(&mut cache, &model, &mut rng);
                let seqs: Vec<SeqId> = texts.iter().map(|_| cache.create().unwrap()).collect();
                let mut at = [0; 4];
                while at != lens {
                    let mut batch = Vec::new();
                    for s in 0..4 {
                        let new = match rng.below(3) {
                            0 => 0,
                            1 => 1,
                            _ => rng.below(120),
                        };
                        let rows = at[s]..(at[s] + new).min(lens[s]);
                        texts[s].append(&mut cache, seqs[s], rows.clone());
                        at[s] = rows.end;
                        batch.push((seqs[s], &texts[s], rows));
                    }
                    cache.poison_unused();
                    let got = step(&model, &runner, &cache, &batch);
                    for (s, (_, _, rows)) in batch.iter().enumerate() {
                        assert!(got[s] == want[s][rows.clone()], "{} {layout:?} {s}", model.name);
                    }
                }
            }
        }
    }
}

#[test]
fn forks_rollbacks_and_evictions_leave_no_trace() {
    for model in models() {
        let a = Text::new(&model, 20, 200);
        // Another answer to an equal prompt.
        let b = Text::splice(&model, &a, 130, &Text::new(&model, 21, 180));
        for runner in runners() {
            let (want_a, want_b) = (whole(&model, &a, &runner), whole(&model, &b, &runner));
            for layout in layouts(200) {
                let mut cache = model.cache(layout);
                let first = cache.create().unwrap();
                a.append(&mut cache, first, 0..130);
                let second = cache.fork(first).unwrap();
                // A draft that is not accepted.
                b.append(&mut cache, first, 130..150);
                cache.truncate(first, 135).unwrap();
                cache.truncate(first, 130).unwrap();
                for at in (130..180).step_by(5) {
                    a.append(&mut cache, first, at..at + 5);
                    b.append(&mut cache, second, at..at + 5);
                    cache.poison_unused();
                    let rows = at..at + 5;
                    let batch = [(first, &a, rows.clone()), (second, &b, rows.clone())];
                    let got = step(&model, &runner, &cache, &batch);
                    assert!(got[0] == want_a[rows.clone()], "{} {layout:?} {at}", model.name);
                    assert!(got[1] == want_b[rows.clone()], "{} {layout:?} {at}", model.name);
                    // A sequence listed twice: the second entry computes its last row again.
                    let batch = [(first, &a, rows.clone()), (first, &a, at + 4..at + 5)];
                    let got = step(&model, &runner, &cache, &batch);
                    assert!(got[1][0] == got[0][4], "{} {layout:?} {at}", model.name);
                }
                let kept = cache.snapshot(second).unwrap();
                cache.remove(second).unwrap();
                a.append(&mut cache, first, 180..200);
                cache.poison_unused();
                let got = step(&model, &runner, &cache, &[(first, &a, 180..200)]);
                assert!(got[0] == want_a[180..200], "{} {layout:?}", model.name);
                let again = cache.restore(&kept).unwrap();
                let got = step(&model, &runner, &cache, &[(again, &b, 100..180)]);
                assert!(got[0] == want_b[100..180], "{} {layout:?}", model.name);
            }
        }
    }
}

const MIXED: [(usize, usize); 7] = [(40, 70), (1, 300), (0, 9), (13, 13), (3, 600), (1, 1), (33, 289)];

/// Bits of every row.
fn all_bits(built: &CaseData, answer: &Answer) -> Vec<Bits> {
    rows(&built.problem).map(|row| row_bits(&built.problem, answer, row)).collect()
}

#[test]
fn pages_give_the_bits_of_packed_sequences() {
    let bases = [
        Case::new("packed or paged", [1, 8, 2, 0, 0, 64, 64], Dtype::F32).causal(QOffset::BottomRight),
        Case::new("packed or paged, full", [1, 4, 4, 0, 0, 48, 31], Dtype::F16),
        Case::new("packed or paged, scores", [1, 16, 1, 0, 0, 128, 128], Dtype::BF16)
            .causal(QOffset::BottomRight)
            .softcap(5.0)
            .alibi()
            .sinks(),
        Case::new("packed or paged, window", [1, 4, 1, 0, 0, 80, 64], Dtype::BF16)
            .seeing(Visibility::window(Some(100), Some(3)))
            .at(QOffset::BottomRight),
        Case::new("packed or paged, mask", [1, 4, 2, 0, 0, 32, 32], Dtype::F32)
            .mask(MaskKind::Bool, "h", MaskFill::Random)
            .causal(QOffset::BottomRight),
    ];
    for base in bases {
        // Data depends only on the name: both cases hold the same tokens.
        let packed = build(&base.clone().packed(&MIXED));
        for runner in runners_of_tests() {
            let want = all_bits(&packed, &answer(&packed, &runner));
            for (n, page) in [1, 2, 7, 16, 33, 64, 128, 256, 300, 600, 1000].into_iter().enumerate() {
                let layout = Layout::ALL[n % Layout::ALL.len()];
                let built = build(&base.clone().cached(&MIXED, page, Keep::All).layout(layout));
                let got = all_bits(&built, &answer(&built, &runner));
                assert!(got == want, "{} in pages of {page}, {layout:?} {runner:?}", base.name);
            }
        }
    }
}

#[test]
fn slots_of_any_strides_are_pages() {
    // An engine's tensor `[slots, capacity, heads, dim]`, borrowed without copying, with its slots in any order.
    let model = Model::new("slots", [4, 2], [32, 32], Dtype::F32);
    let (capacity, order) = (50, [2u32, 0]);
    let texts = [Text::new(&model, 30, 41), Text::new(&model, 31, 9)];
    for layout in Layout::ALL {
        let [mut k, mut v] = [0, 1].map(|_| Guarded::new(Dtype::F32, [3, 2, capacity, 32], layout));
        for (text, &slot) in texts.iter().zip(&order) {
            for [_, h, row, d] in text.k.indices() {
                k.set([slot as usize, h, row, d], text.k.get([0, h, row, d]));
                v.set([slot as usize, h, row, d], text.v.get([0, h, row, d]));
            }
        }
        let tables = BlockTables {
            table: order.to_vec(),
            width: 1,
            page_size: capacity,
            wraps: false,
            lens: vec![41, 9],
            first: vec![0, 0],
        };
        let desc = model.finish(ProblemDesc::cached(
            model.shape(),
            model.dtype,
            &[SeqLens::decode(41), SeqLens::decode(9)],
        ));
        let mut q = Guarded::new(Dtype::F32, [1, 4, 2, 32], Layout::Bshd);
        for [_, h, row, d] in q.indices() {
            q.set([0, h, row, d], texts[row].q.get([0, h, [40, 8][row], d]));
        }
        for runner in runners() {
            let got = run(&runner, desc.clone(), &Inputs::paged(q.view(), k.view(), v.view(), &tables));
            for (row, text) in texts.iter().enumerate() {
                assert!(got[row] == whole(&model, text, &runner)[[40, 8][row]], "{layout:?} {row}");
            }
        }
    }
}

#[test]
fn a_tree_that_is_causal_gives_the_bits_of_causality() {
    for (n, page) in [1, 16, 64, 300].into_iter().enumerate() {
        let dtype = [Dtype::F32, Dtype::F16, Dtype::BF16][n % 3];
        let base =
            Case::new("causal or tree", [1, 6, 2, 0, 0, 64, 64], dtype).cached(&MIXED, page, Keep::All);
        let causal = build(&base.clone().causal(QOffset::BottomRight));
        let tree = build(&base.clone().tree(Tree::Causal));
        let both = build(&base.causal(QOffset::BottomRight).tree(Tree::Causal));
        for runner in runners_of_tests() {
            let want = all_bits(&causal, &answer(&causal, &runner));
            assert!(all_bits(&tree, &answer(&tree, &runner)) == want, "pages of {page} {runner:?}");
            assert!(all_bits(&both, &answer(&both, &runner)) == want, "pages of {page} {runner:?}");
        }
    }
}

#[test]
fn a_tree_gives_the_bits_of_the_mask_that_it_stands_for() {
    for (n, visibility) in [Visibility::full(), Visibility::window(Some(30), Some(2))].into_iter().enumerate()
    {
        let dtype = [Dtype::F32, Dtype::BF16][n];
        let base = Case::new("mask or tree", [1, 6, 2, 0, 0, 64, 64], dtype)
            .seeing(visibility)
            .at(QOffset::BottomRight);
        let tree = build(&base.clone().cached(&MIXED, 16, Keep::All).tree(Tree::Random));
        let mut packed = build(&base.packed(&MIXED).mask(MaskKind::Bool, "h", MaskFill::Open));
        let shows = tree.tree.as_ref().unwrap().view();
        let sequences = packed.problem.sequences().to_vec();
        let [n, _, queries, keys] = packed.problem.mask_shape();
        let mask = GuardedMask::new(MaskKind::Bool, [n, 1, queries, keys], Layout::Padded, |[n, _, i, j]| {
            let s = &sequences[n];
            if i >= s.q_len || j >= s.kv_len || j + s.q_len < s.kv_len {
                return 0.0;
            }
            shows.bias([0, 0, s.q_start + i, j + s.q_len - s.kv_len])
        });
        packed.mask = Some(mask);
        for runner in runners_of_tests() {
            let want = all_bits(&packed, &answer(&packed, &runner));
            assert!(all_bits(&tree, &answer(&tree, &runner)) == want, "{visibility} {runner:?}");
        }
    }
}

/// Cases whose tokens are examined individually.
fn small_cases() -> Vec<Case> {
    let lengths = &[(5, 9), (1, 40), (0, 3), (7, 21), (20, 20)];
    let of = |name: &str, dtype, page, keep| {
        Case::new(format!("reach cached {name}"), [1, 4, 2, 0, 0, 16, 16], dtype).cached(lengths, page, keep)
    };
    vec![
        of("causal", Dtype::F32, 4, Keep::All).causal(QOffset::BottomRight),
        of("full", Dtype::BF16, 16, Keep::All),
        of("singles", Dtype::F32, 1, Keep::All).causal(QOffset::BottomRight),
        of("ring", Dtype::F16, 32, Keep::Wrapped)
            .causal(QOffset::BottomRight)
            .seeing(Visibility::window(Some(6), None)),
        of("tree", Dtype::F32, 8, Keep::All).tree(Tree::Random),
        of("tree causal", Dtype::BF16, 8, Keep::All).causal(QOffset::BottomRight).tree(Tree::Branches),
        Case::new("reach cached wide", [1, 1, 1, 0, 0, 8, 8], Dtype::F32)
            .cached(&[(60, 290)], 32, Keep::All)
            .tree(Tree::Random),
    ]
}

#[test]
fn a_nan_in_a_token_reaches_the_rows_that_see_it_and_no_others() {
    for case in small_cases() {
        let clean = build(&case);
        let tables = clean.tables.clone().unwrap();
        let sets = [options(None, true), options(None, false)];
        for runner in sets.into_iter().flat_map(|o| runners().into_iter().map(move |r| r.with(o))) {
            let before = answer(&clean, &runner);
            for (index, s) in clean.problem.sequences().iter().enumerate() {
                for j in (tables.first[index]..s.kv_len).step_by(1 + s.kv_len / 40) {
                    let (page, row) = tables.locate(index, j).unwrap();
                    let kv_head = j % clean.problem.dims().kv_heads;
                    for which in 0..2 {
                        let mut spoiled = clean.clone();
                        let target = if which == 0 { &mut spoiled.k } else { &mut spoiled.v };
                        for d in 0..target.shape()[3] {
                            target.set([page, kv_head, row, d], f32::NAN);
                        }
                        let after = answer(&spoiled, &runner);
                        let changed: BTreeSet<_> = rows(&clean.problem)
                            .filter(|&r| {
                                row_bits(&clean.problem, &before, r) != row_bits(&clean.problem, &after, r)
                            })
                            .collect();
                        let expected = seers_of(&clean, index, kv_head, j);
                        assert_eq!(changed, expected, "{} token {j} of {index} {runner:?}", case.name);
                    }
                }
            }
        }
    }
}

#[test]
fn what_rows_without_a_token_hold_changes_no_bit() {
    let cases = flashtile_testkit::catalogue()
        .into_iter()
        .filter(|case| case.name.starts_with("cached_") || case.name.starts_with("tree_"));
    let mut compared = 0;
    for case in cases {
        let clean = build(&case);
        let tables = clean.tables.as_ref().unwrap();
        let mut held = BTreeSet::new();
        for (index, s) in clean.problem.sequences().iter().enumerate() {
            held.extend((0..s.kv_len).filter_map(|j| tables.locate(index, j)));
        }
        let mut other = clean.clone();
        for (n, tensor) in [&mut other.k, &mut other.v].into_iter().enumerate() {
            for index in tensor.indices() {
                if !held.contains(&(index[0], index[2])) {
                    tensor.set(index, if n == 0 { f32::INFINITY } else { 1e4 });
                }
            }
        }
        for runner in runners() {
            let all = runner.with(options(None, false));
            let want = answer(&clean, &runner).bits();
            assert!(answer(&other, &runner).bits() == want, "{} {runner:?}", case.name);
            assert!(answer(&other, &all).bits() == want, "{} {runner:?}", case.name);
            compared += 1;
        }
    }
    assert!(compared > 100, "{compared}");
}

#[test]
fn any_number_of_splits_gives_the_same_bits() {
    let case = Case::new("cached splits", [1, 4, 1, 0, 0, 16, 16], Dtype::BF16)
        .cached(&[(1, 64 * 256), (2, 5000), (1, 3), (1, 0)], 64, Keep::All)
        .causal(QOffset::BottomRight);
    let built = build(&case);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    for runner in threaded(3) {
        let one = CpuRunner::new(runner.cpu.with_threads(1));
        let want = answer(&built, &one.with(options(Some(1), true))).bits();
        for splits in 1..=64 {
            let got = pool.install(|| answer(&built, &runner.with(options(Some(splits), true))).bits());
            assert!(got == want, "{splits} splits {runner:?}");
        }
    }
}

#[test]
fn a_shared_prefix_changes_no_bit() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    let mut shared = 0;
    for case in flashtile_testkit::catalogue().into_iter().chain((0..3000).map(seeded_case)) {
        if case.desc.prefixes.is_empty() {
            continue;
        }
        let together = build(&case);
        let mut apart = together.clone();
        let mut desc = case.desc.clone();
        desc.prefixes.clear();
        apart.problem = desc.validate().unwrap();
        for runner in threaded(1) {
            let plan = runner.cpu.plan(&together.problem, runner.options).unwrap();
            shared += plan.prefixes().len();
            let want = answer(&apart, &runner).bits();
            assert!(answer(&together, &runner).bits() == want, "{} {runner:?}", case.name);
            // Small problems have enough tasks without splits; with splits, prefixes and the keys after them are
            // cut.
            let max = case.desc.dims.kv_len.div_ceil(256).clamp(1, 3);
            let split = CpuRunner::new(runner.cpu.with_threads(3)).with(options(Some(max), true));
            let got = pool.install(|| answer(&together, &split).bits());
            assert!(got == want, "{} {split:?}", case.name);
            let all = answer(&together, &runner.with(options(None, false))).bits();
            assert!(all == want, "{} {runner:?} without skipping", case.name);
        }
    }
    assert!(shared > 100, "{shared}");
}

#[test]
fn sequences_of_a_prefix_may_keep_more_of_its_first_page_than_others() {
    // The first row of the first sequence sees tokens from 5 on, that of the second from 0 on.
    for (isa, runner) in threaded(1).into_iter().enumerate() {
        let case = Case::new(format!("kept {isa}"), [1, 4, 2, 0, 0, 32, 32], Dtype::F32)
            .cached(&[(1, 600), (1, 590)], 16, Keep::All)
            .seeing(Visibility::window(Some(594), Some(0)))
            .at(QOffset::BottomRight);
        let shared = build(&case.clone().shared(&[(0..2, 512)]));
        let mut tables = shared.tables.clone().unwrap();
        tables.first = vec![5, 0];
        assert_eq!(tables.shared_prefixes(1)[0].sequences, 0..2);
        let mut with = shared.clone();
        with.tables = Some(tables);
        let mut apart = with.clone();
        apart.problem = case.desc.validate().unwrap();
        let want = answer(&apart, &runner).bits();
        for skip in [true, false] {
            let got = answer(&with, &runner.with(options(None, skip))).bits();
            assert!(got == want, "{runner:?} skip {skip}");
        }
    }
}

#[test]
fn forks_of_forks_share_what_they_have_in_common() {
    let model = Model::new("forks", [4, 2], [32, 32], Dtype::F32);
    let mut cache = model.cache(CacheLayout::Paged { pages: 400, page_size: 16 });
    let text = |seed| Text::new(&model, seed, 1400);
    let grow = |cache: &mut KvCache, seq, seed, to| {
        let from = cache.len(seq).unwrap();
        text(seed).append(cache, seq, from..to);
    };
    // A system prompt, two conversations that begin with it, two answers to each, and an unrelated sequence.
    let system = cache.create().unwrap();
    grow(&mut cache, system, 1, 530);
    let talks = [2, 3].map(|seed| {
        let talk = cache.fork(system).unwrap();
        grow(&mut cache, talk, seed, 800 + 100 * seed as usize);
        talk
    });
    let stranger = cache.create().unwrap();
    grow(&mut cache, stranger, 4, 700);
    let mut batch = vec![stranger];
    for (n, talk) in talks.into_iter().enumerate() {
        for answer in 0..2 {
            let fork = cache.fork(talk).unwrap();
            grow(&mut cache, fork, 10 + 2 * n as u64 + answer, 1050 + 100 * n + 7 * answer as usize);
            batch.push(fork);
        }
    }
    let tables = cache.tables(&batch).unwrap();
    let prefixes = tables.shared_prefixes(1);
    // Whole pages: a fork continues in a page of its own.
    let want = [(1..5, 528), (1..3, 992), (3..5, 1088)];
    let want = want.map(|(sequences, len)| SharedPrefix { sequences, len });
    assert_eq!(prefixes, want);
    assert_eq!(tables.shared_prefixes(529), want[1..]);
    assert_eq!(tables.shared_prefixes(2000), []);

    let lens: Vec<SeqLens> = tables.lens.iter().map(|&kv_len| SeqLens { q_len: 3, kv_len }).collect();
    let desc = model.finish(ProblemDesc::cached(model.shape(), model.dtype, &lens));
    let q = Text::new(&model, 5, 3 * batch.len()).q;
    let inputs = cache.inputs(0, q.view(), &tables).unwrap();
    for runner in runners_of_tests() {
        let want = run(&runner, desc.clone(), &inputs);
        let mut shared = desc.clone();
        shared.prefixes.clone_from(&prefixes);
        let plan = runner.cpu.plan(&shared.clone().validate().unwrap(), runner.options).unwrap();
        let planned: Vec<_> =
            plan.prefixes().iter().map(|p| (p.sequences.clone(), p.tokens.clone())).collect();
        assert_eq!(planned, [(1..5, 0..512), (1..3, 512..768), (3..5, 512..1024)]);
        assert!(run(&runner, shared, &inputs) == want, "{runner:?}");
    }
}

#[test]
fn one_long_sequence_among_short_ones_is_split_alone() {
    let lens = [&[SeqLens::decode(1 << 17)][..], &[SeqLens::decode(1024); 15]].concat();
    let problem = ProblemDesc::cached(
        HeadShape { q_heads: 8, kv_heads: 2, head_dim: 128, value_dim: 128 },
        Dtype::BF16,
        &lens,
    )
    .validate()
    .unwrap();
    let facts = CpuFacts { threads: 16, ..machines::AVX2_8 };
    let plan = CpuPlan::new(&problem, &facts, PlanOptions::default()).unwrap();
    let splits = plan.sequence_splits();
    assert!(splits[0] >= 16 && splits[1..].iter().all(|&n| n <= 1), "{splits:?}");
    assert!(plan.idle() < 0.1, "{}", plan.idle());
    // Without prefixes the sequences need no more than a split per thread, and a few more for balance.
    assert!(plan.task_count() <= 2 * 15 + 2 * 64, "{}", plan.task_count());
}

#[test]
fn the_first_visible_key_is_the_smallest_that_a_row_sees() {
    let sides = [None, Some(0), Some(1), Some(4), Some(usize::MAX)];
    for (left, right) in sides.iter().flat_map(|&l| sides.iter().map(move |&r| (l, r))) {
        for offset in [-(MAX_LEN as i64), -9, -2, 0, 3, 8, MAX_LEN as i64] {
            for (q_len, kv_len) in [(0, 4), (1, 0), (1, 5), (6, 4), (12, 9)] {
                let mut desc = ProblemDesc::cached(
                    HeadShape { q_heads: 1, kv_heads: 1, head_dim: 8, value_dim: 8 },
                    Dtype::F32,
                    &[SeqLens { q_len, kv_len }],
                );
                desc.visibility = Visibility::window(left, right);
                desc.q_offset = Some(QOffset::At(offset));
                let problem = desc.validate().unwrap();
                let s = &problem.sequences()[0];
                let seen = (0..q_len).map(|i| (i, problem.visible(s, i))).find(|(_, keys)| !keys.is_empty());
                let smallest = (0..q_len).flat_map(|i| problem.visible(s, i)).min();
                let first = problem.first_visible(s);
                assert_eq!(first, seen.map(|(i, keys)| (i, keys.start)), "{left:?} {right:?} {offset}");
                assert_eq!(first.map(|(_, key)| key), smallest);
            }
        }
    }
}

#[test]
fn a_plan_serves_any_tables_of_its_lengths() {
    // Lengths belong to the problem, page tables to the run: a plan outlives copies of pages.
    let model = Model::new("plan", [4, 2], [32, 32], Dtype::F32);
    let text = Text::new(&model, 40, 50);
    let desc = model.finish(ProblemDesc::cached(model.shape(), model.dtype, &[SeqLens::decode(50)]));
    let cpu = Cpu::new();
    let plan = cpu.plan(&desc.clone().validate().unwrap(), PlanOptions::default()).unwrap();
    assert!(plan.kernel().starts_with("cpu-decode-f32-d32"));
    let q = Text::rows(&text.q, 49..50);
    let mut answers = BTreeSet::new();
    for page in [1, 16, 50] {
        let mut cache = model.cache(CacheLayout::Paged { pages: 60, page_size: page });
        let seq = cache.create().unwrap();
        text.append(&mut cache, seq, 0..50);
        let tables = cache.tables(&[seq]).unwrap();
        let mut out = Guarded::new(Dtype::F32, [1, 4, 1, 32], Layout::Bshd);
        let inputs = cache.inputs(0, q.view(), &tables).unwrap();
        cpu.run(&plan, &inputs, &mut Outputs::new(out.view_mut()), &mut plan.workspace()).unwrap();
        answers.insert(out.bits());
    }
    assert_eq!(answers.len(), 1);
}

/// Time of a decode step over pages of each size, compared with plain tensors. A measurement, not part of a normal
/// run: `cargo test --release --test it page_cost -- --ignored --nocapture`.
#[test]
#[ignore = "measures time"]
fn page_cost() {
    const ROUNDS: usize = 15;
    for (tokens, dtype) in
        [(1024, Dtype::F32), (1024, Dtype::BF16), (16384, Dtype::F32), (16384, Dtype::BF16)]
    {
        let base = |name: &str| Case::new(name, [1, 32, 8, 0, 0, 128, 128], dtype);
        let mut cases = vec![("plain".to_owned(), base("plain").packed(&[(1, tokens)]))];
        for page in [tokens, 256, 64, 16, 8, 4, 1] {
            cases.push((format!("pages of {page}"), base("plain").cached(&[(1, tokens)], page, Keep::All)));
        }
        let mut steps: Vec<_> = cases
            .into_iter()
            .map(|(name, case)| (name, build(&case.layout(Layout::Bhsd)), Vec::new()))
            .collect();
        let cpu = Cpu::new().with_threads(1);
        for _ in 0..ROUNDS {
            for (_, built, times) in &mut steps {
                let plan = cpu.plan(&built.problem, PlanOptions::default()).unwrap();
                let mut workspace = plan.workspace();
                let mut out = Guarded::new(dtype, built.problem.dims().out_shape(), Layout::Bshd);
                let mut outputs = Outputs::new(out.view_mut());
                let start = std::time::Instant::now();
                cpu.run(&plan, &built.inputs(), &mut outputs, &mut workspace).unwrap();
                times.push(start.elapsed().as_secs_f64());
            }
        }
        for (name, _, times) in &mut steps {
            times.sort_by(f64::total_cmp);
            let (best, median) = (times[0] * 1e6, times[ROUNDS / 2] * 1e6);
            println!("{dtype} {tokens} tokens, {name}: {best:.0} us, median {median:.0} us");
        }
    }
}
