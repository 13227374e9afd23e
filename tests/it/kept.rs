//! Caches that keep the first and the last tokens of a sequence in 16 bits beside their codes: random operations against lists of tokens,
//! attention against the oracle however tokens came to be stored, and refusals.

use flashtile::cache::{KEPT_STEP, Snapshot};
use flashtile::plan::Isa;
use flashtile::{
    Attention, CacheDesc, CacheError, CacheLayout, CacheShape, Codec, Cpu, KvCache, KvCacheExt as _, Outputs,
    QOffset, Runner, SeqId, StepTensors, TensorView, TensorViewMut, reference,
};
use flashtile_testkit::Rng;
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
