//! Caches that keep the first and the last tokens of a sequence in 16 bits beside their codes: random operations against lists of tokens,
//! attention against the oracle however tokens came to be stored, and refusals.

use flashtile::cache::{KEPT_STEP, Snapshot};
use flashtile::gpu::{GpuArray, GpuStore};
use flashtile::plan::Isa;
use flashtile::simulator::{DECODE_TILE, Simulator, find, session};
use flashtile::tensor::MaskView;
use flashtile::{
    Attention, CacheDesc, CacheError, CacheLayout, CacheShape, Codec, Cpu, HybridCache, KvCache,
    KvCacheExt as _, Outputs, QOffset, Runner, SeqId, StepTensors, TensorView, TensorViewMut, reference,
};
use flashtile_testkit::Rng;
use half::bf16;
use std::collections::HashMap;
use std::ops::Range;

const SMALL: CacheShape = CacheShape { layers: 2, kv_heads: 1, head_dim: 24, value_dim: 16 };

/// Rows of a token, which are the same in every test: `[layers]` of K and V.
fn rows_of(token: u64, shape: CacheShape) -> Vec<[Vec<f32>; 2]> {
    let mut rng = Rng::new(token);
    let mut row = |dim: usize| (0..shape.kv_heads * dim).map(|_| rng.normal()).collect::<Vec<f32>>();
    (0..shape.layers).map(|_| [row(shape.head_dim), row(shape.value_dim)]).collect()
}

/// Rows of tokens in a layer, as tensors of packed tokens.
fn tensors(tokens: &[u64], shape: CacheShape, layer: usize) -> [Vec<f32>; 2] {
    let mut tensors = [Vec::new(), Vec::new()];
    for token in tokens {
        let rows = &rows_of(*token, shape)[layer];
        tensors.iter_mut().zip(rows).for_each(|(tensor, row)| tensor.extend(row));
    }
    tensors
}

/// Appends tokens, and stores their rows in every layer.
fn append(cache: &mut KvCache, batch: &[(SeqId, &[u64])]) -> Result<(), CacheError> {
    let desc = *cache.desc();
    let shape = CacheShape {
        layers: desc.layers,
        kv_heads: desc.kv_heads,
        head_dim: desc.head_dim,
        value_dim: desc.value_dim,
    };
    let tokens: Vec<u64> = batch.iter().flat_map(|(_, tokens)| tokens.iter().copied()).collect();
    let rows: Vec<[Vec<f32>; 2]> = (0..shape.layers).map(|layer| tensors(&tokens, shape, layer)).collect();
    let views = rows.iter().map(|[k, v]| {
        let view = |rows, dim| TensorView::packed(rows, [tokens.len(), shape.kv_heads, dim]).unwrap();
        (view(k, shape.head_dim), view(v, shape.value_dim))
    });
    let lens: Vec<(SeqId, usize)> = batch.iter().map(|(seq, tokens)| (*seq, tokens.len())).collect();
    cache.append(&lens, &views.collect::<Vec<_>>())
}

/// The bytes of single tokens in a plain cache: what encoding a token alone gives.
struct Encoder {
    cache: KvCache,
    known: HashMap<u64, Vec<u8>>,
}

impl Encoder {
    fn new(desc: &CacheDesc) -> Self {
        let layout = CacheLayout::Contiguous { slots: 1, capacity: 1 };
        let shape = CacheShape {
            layers: desc.layers,
            kv_heads: desc.kv_heads,
            head_dim: desc.head_dim,
            value_dim: desc.value_dim,
        };
        let desc = CacheDesc::new(layout, shape, desc.k).with_codecs(desc.k, desc.v);
        Self { cache: KvCache::new(desc).unwrap(), known: HashMap::new() }
    }

    fn token(&mut self, token: u64) -> &[u8] {
        self.known.entry(token).or_insert_with(|| {
            let seq = self.cache.create().unwrap();
            append(&mut self.cache, &[(seq, &[token])]).unwrap();
            let bytes = self.cache.snapshot(seq).unwrap().as_bytes().to_vec();
            self.cache.remove(seq).unwrap();
            bytes
        })
    }

    /// Bytes of a snapshot of tokens: rows of one head, tokens after each other in each pool.
    fn tokens(&mut self, tokens: &[u64]) -> Vec<u8> {
        let desc = *self.cache.desc();
        let rows = [desc.k.row_bytes(desc.head_dim), desc.v.row_bytes(desc.value_dim)];
        let (mut bytes, mut at) = (Vec::new(), 0);
        for row in (0..desc.layers).flat_map(|_| rows) {
            for token in tokens {
                bytes.extend_from_slice(&self.token(*token)[at..at + row]);
            }
            at += row;
        }
        bytes
    }
}

/// A sequence as the model has it.
#[derive(Clone, Default)]
struct Tokens {
    all: Vec<u64>,
    /// The first that is not forgotten or overwritten.
    first: usize,
    /// Tokens in the slot of the first ones.
    kept_first: Range<usize>,
    /// The first token in the slot of the last ones.
    last_from: usize,
}

/// The sequences of a cache as lists of tokens.
struct Model {
    desc: CacheDesc,
    cache: KvCache,
    sequences: Vec<(SeqId, Tokens)>,
    codes: Encoder,
    kept: Encoder,
    next: u64,
}

impl Model {
    fn new(desc: CacheDesc) -> Self {
        let kept = desc.with_codecs(desc.k.kept(), desc.v.kept());
        let cache = KvCache::new(desc).unwrap();
        Self {
            desc,
            cache,
            sequences: Vec::new(),
            codes: Encoder::new(&desc),
            kept: Encoder::new(&kept),
            next: 0,
        }
    }

    fn window(&self) -> usize {
        match self.desc.layout {
            CacheLayout::Ring { capacity, .. } => capacity,
            _ => usize::MAX,
        }
    }

    fn grow(&mut self, at: usize, new: &[u64]) {
        let (desc, window) = (self.desc, self.window());
        let of = &mut self.sequences[at].1;
        of.all.extend(new);
        let len = of.all.len();
        of.first = of.first.max(len.saturating_sub(window));
        if of.kept_first.end == (len - new.len()).min(desc.keep_first) {
            of.kept_first.end = len.min(desc.keep_first);
        }
        of.last_from = of.last_from.max(len.saturating_sub(desc.keep_last + KEPT_STEP));
    }

    fn shorten(&mut self, at: usize, len: usize) {
        let keep = len.min(self.desc.keep_first);
        let of = &mut self.sequences[at].1;
        of.all.truncate(len);
        of.kept_first = of.kept_first.start.min(keep)..keep;
        if of.kept_first.start > keep {
            of.kept_first = keep..keep;
        }
        of.last_from = of.last_from.min(len);
    }

    /// One random operation on both.
    fn operate(&mut self, rng: &mut Rng) {
        let at = rng.below(self.sequences.len().max(1));
        let kind = if self.sequences.is_empty() { 0 } else { rng.below(24) };
        match kind {
            0 | 1 => {
                if let Ok(seq) = self.cache.create() {
                    self.sequences.push((seq, Tokens::default()));
                }
            }
            2 => {
                let (seq, _) = self.sequences.swap_remove(at);
                self.cache.remove(seq).unwrap();
            }
            3 => {
                let (seq, of) = self.sequences[at].clone();
                if let Ok(fork) = self.cache.fork(seq) {
                    self.sequences.push((fork, of));
                }
            }
            4..=6 => {
                let (seq, of) = &self.sequences[at];
                let len = of.first + rng.below(of.all.len() - of.first + 1);
                self.cache.truncate(*seq, len).unwrap();
                self.shorten(at, len);
            }
            7 => self.forget(at, rng),
            8 => self.restore(at),
            _ => {
                let count = [1, 1, 1, 2, 5, 17, 40, 90][rng.below(8)];
                let new: Vec<u64> = (0..count).map(|n| self.next + n).collect();
                self.next += count;
                let seq = self.sequences[at].0;
                if append(&mut self.cache, &[(seq, &new)]).is_ok() {
                    self.grow(at, &new);
                }
            }
        }
    }

    fn forget(&mut self, at: usize, rng: &mut Rng) {
        let (seq, of) = &mut self.sequences[at];
        let before = rng.below(of.all.len() + 1) / 3;
        self.cache.forget(*seq, before).unwrap();
        of.first = of.first.max(before);
        of.last_from = of.last_from.max(before);
        of.kept_first.start = of.kept_first.start.max(before.min(of.kept_first.end));
    }

    fn restore(&mut self, at: usize) {
        let (seq, mut of) = self.sequences[at].clone();
        let bytes = self.cache.snapshot(seq).unwrap().to_bytes();
        if let Ok(restored) = self.cache.restore(&Snapshot::from_bytes(&bytes).unwrap()) {
            let whole = of.all.len().min(self.desc.keep_first);
            if of.kept_first != (0..whole) {
                of.kept_first = whole..whole;
            }
            self.sequences.push((restored, of));
        }
    }

    /// Checks one sequence: lengths, the bytes of codes and of kept rows, and which tokens are said to be kept.
    fn check(&mut self, at: usize) {
        let (seq, of) = self.sequences[at].clone();
        let len = of.all.len();
        assert_eq!((self.cache.first(seq).unwrap(), self.cache.len(seq).unwrap()), (of.first, len));
        let snapshot = self.cache.snapshot(seq).unwrap();
        assert!(snapshot.as_bytes() == self.codes.tokens(&of.all[of.first..]), "codes");
        let tables = self.cache.kept_tables(&[seq]).unwrap().unwrap();
        let [first, last] = self.cache.kept_caches();
        if let Some(first) = first {
            let kept = if of.kept_first.start == 0 { of.kept_first.end } else { 0 };
            assert_eq!(tables.tokens.first_lens, [kept]);
            let snapshot = first.snapshot(seq).unwrap();
            assert_eq!((snapshot.first(), snapshot.len()), (of.kept_first.start, of.kept_first.end));
            assert!(snapshot.as_bytes() == self.kept.tokens(&of.all[of.kept_first.clone()]), "first tokens");
        }
        if let Some(last) = last {
            assert_eq!(tables.tokens.last_from, [of.last_from]);
            let snapshot = last.snapshot(seq).unwrap();
            assert_eq!((snapshot.first(), snapshot.len()), (of.last_from, len));
            assert!(snapshot.as_bytes() == self.kept.tokens(&of.all[of.last_from..]), "last tokens");
        }
    }
}

#[test]
fn tokens_have_the_bytes_of_encoding_them_alone_after_any_operations() {
    let layouts = [
        (CacheLayout::Contiguous { slots: 4, capacity: 300 }, 3, 5, 0),
        (CacheLayout::Paged { pages: 40, page_size: 16 }, 4, 20, 5),
        (CacheLayout::Ring { slots: 3, capacity: 90 }, 0, 7, 0),
        (CacheLayout::Paged { pages: 40, page_size: 8 }, 2, 0, 3),
    ];
    for (index, (layout, first, last, slots)) in layouts.into_iter().enumerate() {
        let codecs = [(Codec::Int8, Codec::Tq4), (Codec::Tq3, Codec::Tq2), (Codec::Tq4, Codec::BF16)];
        let (k, v) = codecs[index % codecs.len()];
        let mut desc = CacheDesc::new(layout, SMALL, k).with_codecs(k, v).with_kept(first, last);
        desc.keep_slots = slots;
        let (mut model, mut rng) = (Model::new(desc), Rng::new(index as u64));
        for step in 0..2500 {
            model.operate(&mut rng);
            let all = step % 50 == 49;
            for at in 0..model.sequences.len() {
                if all || rng.below(4) == 0 {
                    model.check(at);
                }
            }
        }
        assert!(model.next > 5000, "{} tokens", model.next);
    }
}

/// Heads and dimensions of the problems of attention.
const SHAPE: CacheShape = CacheShape { layers: 1, kv_heads: 2, head_dim: 64, value_dim: 32 };
const Q_HEADS: usize = 6;
/// The mean of the keys, which kept rows lack as codes do.
const MEAN: [f32; 128] = [0.75; 128];

/// q of tokens.
fn queries(tokens: &[u64]) -> Vec<f32> {
    let row = |token: &u64| {
        let mut rng = Rng::new(token ^ 0x5EED);
        (0..Q_HEADS * SHAPE.head_dim).map(|_| rng.normal()).collect::<Vec<f32>>()
    };
    tokens.iter().flat_map(row).collect()
}

/// Appends tokens by one step, and returns the answers of a runner.
fn step(
    cache: &mut KvCache,
    runner: &mut Runner,
    (seq, tokens): (SeqId, &[u64]),
    options: &Attention<'_>,
) -> Vec<f32> {
    let n = tokens.len();
    let ([k, v], q) = (tensors(tokens, SHAPE, 0), queries(tokens));
    let mut out = vec![f32::NAN; n * Q_HEADS * SHAPE.value_dim];
    let tensors = StepTensors {
        q: TensorView::packed(&q, [n, Q_HEADS, SHAPE.head_dim]).unwrap(),
        k: TensorView::packed(&k, [n, SHAPE.kv_heads, SHAPE.head_dim]).unwrap(),
        v: TensorView::packed(&v, [n, SHAPE.kv_heads, SHAPE.value_dim]).unwrap(),
    };
    let view = TensorViewMut::packed(&mut out, [n, Q_HEADS, SHAPE.value_dim]).unwrap();
    let mut step = cache.step(&[(seq, n)]).unwrap().on(runner);
    step.attend_with(0, tensors, options, &mut Outputs::new(view)).unwrap();
    step.finish().unwrap();
    out
}

/// Attention in f64 over the rows that each query should read: of a cache of codes, and of a cache of kept rows.
fn expected(desc: &CacheDesc, tokens: &[u64], options: &Attention<'_>) -> Vec<f64> {
    let plain = |k, v| {
        let layout = CacheLayout::Contiguous { slots: 1, capacity: tokens.len() };
        let mut cache = KvCache::new(CacheDesc::new(layout, SHAPE, k).with_codecs(k, v)).unwrap();
        cache.set_key_mean(0, &MEAN).unwrap();
        let seq = cache.create().unwrap();
        append(&mut cache, &[(seq, tokens)]).unwrap();
        let mut read =
            [SHAPE.head_dim, SHAPE.value_dim].map(|dim| vec![0.0f32; tokens.len() * SHAPE.kv_heads * dim]);
        let [k, v] = &mut read;
        let mut k = TensorViewMut::bhsd(k, [1, SHAPE.kv_heads, tokens.len(), SHAPE.head_dim]).unwrap();
        let mut v = TensorViewMut::bhsd(v, [1, SHAPE.kv_heads, tokens.len(), SHAPE.value_dim]).unwrap();
        cache.linearize(seq, 0, &mut k, &mut v).unwrap();
        read
    };
    let (codes, kept) = (plain(desc.k, desc.v), plain(desc.k.kept(), desc.v.kept()));
    let q = queries(tokens);
    let mut out = Vec::new();
    for p in 0..tokens.len() {
        // The row's own keys and values.
        let is_kept = |j: usize| j < desc.keep_first || j + desc.keep_last > p && desc.keep_last > 0;
        let choose = |side: usize, dim: usize| {
            let mut rows = codes[side].clone();
            for (at, x) in rows.iter_mut().enumerate() {
                if is_kept(at / dim % tokens.len()) {
                    *x = kept[side][at];
                }
            }
            rows
        };
        let (k, v) = (choose(0, SHAPE.head_dim), choose(1, SHAPE.value_dim));
        let k = TensorView::bhsd(&k, [1, SHAPE.kv_heads, tokens.len(), SHAPE.head_dim]).unwrap();
        let v = TensorView::bhsd(&v, [1, SHAPE.kv_heads, tokens.len(), SHAPE.value_dim]).unwrap();
        let q = &q[p * Q_HEADS * SHAPE.head_dim..][..Q_HEADS * SHAPE.head_dim];
        let q = TensorView::packed(q, [1, Q_HEADS, SHAPE.head_dim]).unwrap();
        let options = options.q_offset(QOffset::At(p as i64));
        let problem = options.desc(&q, &k, &v).validate().unwrap();
        out.extend(reference::attention(&problem, &options.inputs(q, k, v)).unwrap().out);
    }
    out
}

#[test]
fn rows_read_the_last_tokens_before_them_however_they_were_stored() {
    let tokens: Vec<u64> = (0..330).collect();
    let slopes: Vec<f32> = (0..Q_HEADS).map(|h| 0.01 * (h + 1) as f32).collect();
    let options = [
        Attention::causal(),
        Attention::causal().window(150, 0).softcap(8.0),
        Attention::causal().alibi(&slopes),
    ];
    let pairs = [(Codec::Int8, Codec::Tq4), (Codec::Tq3, Codec::Tq3), (Codec::Tq2, Codec::Int8)];
    for (layout, slots) in [
        (CacheLayout::Contiguous { slots: 2, capacity: 400 }, 0),
        (CacheLayout::Paged { pages: 60, page_size: 16 }, 2),
        (CacheLayout::Ring { slots: 2, capacity: 320 }, 0),
    ] {
        for ((k, v), options) in pairs.into_iter().zip(&options) {
            let ring = layout.is_ring();
            if ring && options.visibility.left().is_none() {
                continue;
            }
            let mut desc =
                CacheDesc::new(layout, SHAPE, k).with_codecs(k, v).with_kept(if ring { 0 } else { 4 }, 30);
            desc.keep_slots = slots;
            let want = expected(&desc, &tokens, options);
            for (isa, limit) in [(Isa::Portable, 2e-6), (Cpu::new().facts().isa, 5e-3)] {
                for chunks in
                    [vec![tokens.len() - 170, 170], vec![1; tokens.len()], vec![64, 63, 65, 1, 1, 136]]
                {
                    let mut runner = Runner::with_cpu(Cpu::with_isa(isa).unwrap());
                    let mut cache = KvCache::new(desc).unwrap();
                    cache.set_key_mean(0, &MEAN).unwrap();
                    let (mut seq, mut at, mut got) = (cache.create().unwrap(), 0, Vec::new());
                    for n in chunks {
                        got.extend(step(&mut cache, &mut runner, (seq, &tokens[at..at + n]), options));
                        at += n;
                        let fork = cache.fork(seq).unwrap();
                        cache.remove(std::mem::replace(&mut seq, fork)).unwrap();
                        cache.poison_unused();
                    }
                    let squares = |of: &mut dyn Iterator<Item = f64>| of.map(|x| x * x).sum::<f64>();
                    let off = squares(&mut got.iter().zip(&want).map(|(got, want)| f64::from(*got) - want));
                    let nrmse = (off / squares(&mut want.iter().copied())).sqrt();
                    assert!(nrmse < limit, "{k} {v} {layout:?} {isa}: {nrmse:.2e}");
                }
            }
        }
    }
}

/// A cache of one layer with kept tokens.
fn kept_desc(
    layout: CacheLayout,
    (k, v): (Codec, Codec),
    (first, last, slots): (usize, usize, usize),
) -> CacheDesc {
    let mut desc = CacheDesc::new(layout, SHAPE, k).with_codecs(k, v).with_kept(first, last);
    desc.keep_slots = slots;
    desc
}

#[test]
fn descriptions_that_keep_nothing_are_refused() {
    let paged = CacheLayout::Paged { pages: 4, page_size: 16 };
    let slots = CacheLayout::Contiguous { slots: 2, capacity: 64 };
    let ring = CacheLayout::Ring { slots: 2, capacity: 64 };
    let tq4 = (Codec::Tq4, Codec::Tq4);
    for (layout, codecs, keep, why) in [
        (paged, tq4, (4, 16, 0), "keep_slots is 0, expected 1 to"),
        (paged, tq4, (0, 0, 2), "keep_slots is 2, expected 0"),
        (slots, tq4, (4, 16, 2), "keep_slots is 2, expected 0"),
        (ring, tq4, (4, 0, 0), "a ring gives them up"),
        (slots, (Codec::F16, Codec::F16), (0, 16, 0), "need keys or values of int8"),
        (slots, (Codec::Fp8, Codec::Tq4), (0, 16, 0), "k is fp8, v is tq4"),
        (slots, (Codec::Int8, Codec::Rot16), (0, 16, 0), "v is rot16"),
        (slots, tq4, (0, usize::MAX, 0), "keep_last 18446744073709551615 is outside"),
    ] {
        let got = KvCache::new(kept_desc(layout, codecs, keep)).unwrap_err().to_string();
        assert!(got.contains(why), "{keep:?}: {got}");
    }
    // Elements beside codes are kept as they are.
    assert!(KvCache::new(kept_desc(slots, (Codec::F16, Codec::Tq4), (4, 16, 0))).is_ok());
}

#[test]
fn long_steps_refuse_what_is_not_computed_a_few_tokens_at_a_time() {
    let slots = CacheLayout::Contiguous { slots: 1, capacity: 200 };
    let mut cache = KvCache::new(kept_desc(slots, (Codec::Int8, Codec::Tq4), (0, 16, 0))).unwrap();
    let (seq, n) = (cache.create().unwrap(), 70);
    let tokens: Vec<u64> = (0..n as u64).collect();
    let ([k, v], q) = (tensors(&tokens, SHAPE, 0), queries(&tokens));
    let mut out = vec![f32::NAN; n * Q_HEADS * SHAPE.value_dim];
    let mut lse = vec![0.0f32; n * Q_HEADS];
    let view = |rows, heads, dim| TensorView::packed(rows, [n, heads, dim]).unwrap();
    let (k, v) = (view(&k, SHAPE.kv_heads, SHAPE.head_dim), view(&v, SHAPE.kv_heads, SHAPE.value_dim));
    let q = view(&q, Q_HEADS, SHAPE.head_dim);
    let hides = [true];
    let mask = MaskView::bool(&hides, [1; 4], [0; 4]).unwrap();
    let mut refused = |options: &Attention<'_>, q: TensorView<'_>, with_lse: bool| {
        let shape = [q.shape()[2], Q_HEADS, SHAPE.value_dim];
        let view = TensorViewMut::packed(&mut out[..shape.iter().product()], shape).unwrap();
        let mut outputs = Outputs::new(view);
        outputs.lse = with_lse.then_some(&mut lse[..]);
        let mut step = cache.step(&[(seq, n)]).unwrap();
        step.attend_with(0, StepTensors { q, k, v }, options, &mut outputs).unwrap_err().to_string()
    };
    let causal = Attention::causal();
    for (got, why) in [
        (refused(&causal.mask(mask), q, false), "a mask in a step of 70 tokens over a cache with keep_last"),
        (refused(&causal, q, true), "a logsumexp in a step of 70 tokens"),
        (refused(&Attention::full(), q, false), "visibility of later keys"),
        (refused(&causal.q_offset(QOffset::At(3)), q, false), "a q_offset"),
        (
            refused(&causal, q.rows(0..69).unwrap(), false),
            "q has shape [1, 6, 69, 64], expected [1, 6, 70, 64]",
        ),
    ] {
        assert!(got.contains(why), "{got}");
    }
    assert_eq!(
        (cache.len(seq).unwrap(), cache.kept_tables(&[seq]).unwrap().unwrap().tokens.last_from),
        (0, vec![0])
    );
}

#[test]
fn a_long_and_a_short_step_of_a_batch_are_those_of_single_sequences() {
    let layout = CacheLayout::Paged { pages: 60, page_size: 16 };
    let kept = kept_desc(layout, (Codec::Tq3, Codec::Tq4), (3, 20, 4));
    let plain = CacheDesc::new(CacheLayout::Ring { slots: 4, capacity: 300 }, SHAPE, Codec::F16);
    let mut cache = HybridCache::new(&[kept, plain, kept]).unwrap();
    let seqs = [cache.create().unwrap(), cache.create().unwrap(), cache.create().unwrap()];
    let before: Vec<u64> = (0..90).collect();
    for seq in seqs {
        let rows: Vec<_> = (0..3).map(|_| tensors(&before, SHAPE, 0)).collect();
        let view = |rows, dim| TensorView::packed(rows, [before.len(), SHAPE.kv_heads, dim]).unwrap();
        let rows: Vec<_> =
            rows.iter().map(|[k, v]| (view(k, SHAPE.head_dim), view(v, SHAPE.value_dim))).collect();
        cache.append(&[(seq, before.len())], &rows).unwrap();
    }
    let lens = [100, 0, 1];
    let new: Vec<u64> = (1000..1101).collect();
    let ([k, v], q) = (tensors(&new, SHAPE, 0), queries(&new));
    let view = |rows, heads, dim| TensorView::packed(rows, [new.len(), heads, dim]).unwrap();
    let (k, v) = (view(&k, SHAPE.kv_heads, SHAPE.head_dim), view(&v, SHAPE.kv_heads, SHAPE.value_dim));
    let q = view(&q, Q_HEADS, SHAPE.head_dim);
    let batch: Vec<_> = seqs.into_iter().zip(lens).collect();
    let attend = |cache: &mut HybridCache, batch: &[(SeqId, usize)], rows: Range<usize>, finish: bool| {
        let mut out = vec![f32::NAN; rows.len() * Q_HEADS * SHAPE.value_dim];
        let mut step = cache.step(batch).unwrap();
        for layer in 0..3 {
            let [q, k, v] = [q, k, v].map(|x| x.rows(rows.clone()).unwrap());
            let mut out = TensorViewMut::packed(&mut out, [rows.len(), Q_HEADS, SHAPE.value_dim]).unwrap();
            step.attend(layer, q, k, v, &mut out).unwrap();
        }
        if finish {
            step.finish().unwrap();
        }
        out
    };
    // A step that is dropped takes its tokens back: rows that the ring gave up for it are read as codes.
    attend(&mut cache, &batch, 0..101, false);
    assert_eq!(seqs.map(|seq| cache.len(seq).unwrap()), [90; 3]);
    let kept_from =
        |cache: &HybridCache, seq| cache.groups()[0].kept_tables(&[seq]).unwrap().unwrap().tokens.last_from;
    assert_eq!(kept_from(&cache, seqs[0]), [90], "the ring held tokens 106 to 190");
    assert_eq!(kept_from(&cache, seqs[2]), [90 + 1 - 84], "the ring held tokens 7 to 91");
    let fork = cache.fork(seqs[0]).unwrap();
    cache.remove(seqs[1]).unwrap();
    let alone = attend(&mut cache, &[(fork, 100)], 0..100, true);
    cache.remove(fork).unwrap();
    let batch = [(seqs[0], 100), (seqs[2], 1)];
    let together = attend(&mut cache, &batch, 0..101, true);
    assert!(together[..alone.len()] == alone, "another sequence of the batch changes bits");
    assert!(together.iter().all(|x| x.is_finite()));
}

#[test]
fn changed_snapshots_are_refused_or_change_rows() {
    let layout = CacheLayout::Contiguous { slots: 3, capacity: 120 };
    let desc = kept_desc(layout, (Codec::Tq4, Codec::Int8), (4, 16, 0));
    let mut cache = KvCache::new(desc).unwrap();
    let seq = cache.create().unwrap();
    append(&mut cache, &[(seq, &(0..100).collect::<Vec<_>>())]).unwrap();
    let bytes = cache.snapshot(seq).unwrap().to_bytes();
    for len in (0..bytes.len()).step_by(7) {
        assert!(Snapshot::from_bytes(&bytes[..len]).is_err(), "{len} of {} bytes", bytes.len());
    }
    let mut longer = bytes.clone();
    longer.push(0);
    assert!(Snapshot::from_bytes(&longer).is_err());
    let mut rng = Rng::new(3);
    for _ in 0..3000 {
        let mut changed = bytes.clone();
        let at = rng.below(bytes.len());
        changed[at] ^= 1 << rng.below(8);
        if let Ok(snapshot) = Snapshot::from_bytes(&changed)
            && let Ok(restored) = cache.restore(&snapshot)
        {
            let tables = cache.kept_tables(&[restored]).unwrap().unwrap();
            assert!(
                tables.tokens.first_lens[0] <= 4
                    && tables.tokens.last_from[0] <= cache.len(restored).unwrap()
            );
            cache.truncate(restored, cache.first(restored).unwrap()).unwrap();
            cache.remove(restored).unwrap();
        }
    }
}

#[test]
fn a_snapshot_without_kept_tokens_leaves_their_codes() {
    let layout = CacheLayout::Contiguous { slots: 2, capacity: 120 };
    let mut plain = KvCache::new(CacheDesc::new(layout, SHAPE, Codec::Tq4)).unwrap();
    let mut cache = KvCache::new(kept_desc(layout, (Codec::Tq4, Codec::Tq4), (4, 16, 0))).unwrap();
    let tokens: Vec<u64> = (0..100).collect();
    let seq = plain.create().unwrap();
    append(&mut plain, &[(seq, &tokens)]).unwrap();
    let restored = cache.restore(&plain.snapshot(seq).unwrap()).unwrap();
    let kept = |cache: &KvCache, seq| cache.kept_tables(&[seq]).unwrap().unwrap().tokens;
    assert_eq!((kept(&cache, restored).first_lens, kept(&cache, restored).last_from), (vec![0], vec![100]));
    // Slots are of one slot a sequence, and lent again.
    cache.remove(restored).unwrap();
    let seq = cache.create().unwrap();
    append(&mut cache, &[(seq, &tokens)]).unwrap();
    assert_eq!((kept(&cache, seq).first_lens, kept(&cache, seq).last_from), (vec![4], vec![20]));
    assert!(plain.restore(&cache.snapshot(seq).unwrap()).is_ok(), "kept rows are left out");
}

#[test]
fn the_simulator_reads_the_same_tokens() {
    let shape = CacheShape { layers: 1, kv_heads: 1, head_dim: 128, value_dim: 128 };
    let layout = CacheLayout::Contiguous { slots: 2, capacity: 160 };
    let desc = CacheDesc::new(layout, shape, Codec::Tq4).with_kept(3, 9);
    let tokens = 150;
    let mut rng = Rng::new(8);
    let mut row = |n: usize| (0..n * 128).map(|_| bf16::from_f32(rng.normal())).collect::<Vec<bf16>>();
    let (q, k, v) = (row(tokens * 2), row(tokens), row(tokens));
    let mut host = KvCache::new(desc).unwrap();
    let store = GpuStore::with_native(Simulator::new(), &desc, Some(find)).unwrap();
    let (mut device, mut session, gpu) =
        (KvCache::with_store(store).unwrap(), session(DECODE_TILE), Simulator::new());
    let (on_host, on_device) = (host.create().unwrap(), device.create().unwrap());
    let mut at = 0;
    // A long step, single tokens, and a step whose first tokens are back after a truncation.
    for (n, back) in [(70, 0), (1, 0), (2, 5), (75, 0)] {
        at -= back;
        host.truncate(on_host, at).unwrap();
        device.truncate(on_device, at).unwrap();
        let of = |rows: &[bf16], heads: usize| rows[at * heads * 128..][..n * heads * 128].to_vec();
        let (q, k, v) = (of(&q, 2), of(&k, 1), of(&v, 1));
        let view = |rows, heads| TensorView::packed(rows, [n, heads, 128]).unwrap();
        let mut want = vec![bf16::ZERO; n * 2 * 128];
        let mut step = host.step(&[(on_host, n)]).unwrap();
        let mut out = TensorViewMut::packed(&mut want, [n, 2, 128]).unwrap();
        step.attend(0, view(&q, 2), view(&k, 1), view(&v, 1), &mut out).unwrap();
        step.finish().unwrap();

        let mut got = vec![bf16::NAN; n * 2 * 128];
        let [q, k, v] =
            [view(&q, 2), view(&k, 1), view(&v, 1)].map(|view| GpuArray::upload(&gpu, &view).unwrap());
        let mut out = GpuArray::upload(&gpu, &view(&got, 2)).unwrap();
        let mut step = device.step(&[(on_device, n)]).unwrap().on(&mut session);
        step.attend(0, q.view(), k.view(), v.view(), &mut out.view_mut()).unwrap();
        step.finish().unwrap();
        out.download(&gpu, &mut TensorViewMut::packed(&mut got, [n, 2, 128]).unwrap()).unwrap();
        let squares = |of: &mut dyn Iterator<Item = f64>| of.map(|x| x * x).sum::<f64>();
        let off = squares(&mut got.iter().zip(&want).map(|(got, want)| got.to_f64() - want.to_f64()));
        let nrmse = (off / squares(&mut want.iter().map(|x| x.to_f64()))).sqrt();
        assert!(nrmse < 8e-3, "{n} tokens at {at}: {nrmse:.2e}");
        at += n;
    }
}
