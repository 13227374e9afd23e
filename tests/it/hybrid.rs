//! Caches whose layers differ: the layer lists of two models, refusals, and random operations against lists of tokens.

use flashtile::cache::KeyTransformError;
use flashtile::{
    Attention, CacheDesc, CacheError, CacheLayout, CacheShape, Codec, Dtype, HybridCache, KvCache,
    KvCacheExt, Outputs, OwnedTensor, SeqId, StepTensors, TensorView,
};
use flashtile_testkit::Rng;
use half::bf16;
use std::collections::BTreeMap;

/// A model whose layers attend to a window, or to all keys.
struct Model {
    q_heads: usize,
    shape: CacheShape,
    layers: usize,
    window: usize,
    /// Every `full`-th layer attends to all keys.
    full: usize,
    sinks: bool,
}

/// gpt-oss-20b: every second layer has a window of 128 keys, and heads have sinks.
const GPT_OSS: Model = Model {
    q_heads: 64,
    shape: CacheShape { layers: 1, kv_heads: 8, head_dim: 64, value_dim: 64 },
    layers: 24,
    window: 128,
    full: 2,
    sinks: true,
};

/// Gemma 3 1B: five layers with a window of 512 keys, then one that sees all.
const GEMMA_3: Model = Model {
    q_heads: 4,
    shape: CacheShape { layers: 1, kv_heads: 1, head_dim: 256, value_dim: 256 },
    layers: 26,
    window: 512,
    full: 6,
    sinks: false,
};

/// Tokens of a step at most.
const STEP: usize = 64;
const SLOTS: usize = 2;
const PAGES: usize = 128;
const PAGE_SIZE: usize = 16;

impl Model {
    fn is_full(&self, layer: usize) -> bool {
        layer % self.full == self.full - 1
    }

    /// A ring with room for the window and a step; quantized pages.
    fn kinds(&self) -> [CacheDesc; 2] {
        let ring = CacheLayout::Ring { slots: SLOTS, capacity: self.window + STEP };
        let paged = CacheLayout::Paged { pages: PAGES, page_size: PAGE_SIZE };
        [CacheDesc::new(ring, self.shape, Codec::BF16), CacheDesc::new(paged, self.shape, Codec::Int8)]
    }

    fn descs(&self) -> Vec<CacheDesc> {
        let kinds = self.kinds();
        (0..self.layers).map(|layer| kinds[usize::from(self.is_full(layer))]).collect()
    }

    fn options<'a>(&self, layer: usize, sinks: &'a [f32]) -> Attention<'a> {
        let options = Attention::decode();
        let options = if self.is_full(layer) { options } else { options.window(self.window - 1, 0) };
        if self.sinks { options.sinks(sinks) } else { options }
    }

    /// q, k and v of a layer.
    fn rows(&self, layer: usize, tokens: usize, seed: usize) -> [OwnedTensor; 3] {
        let heads = [self.q_heads, self.shape.kv_heads, self.shape.kv_heads];
        std::array::from_fn(|which| {
            let mut rng = Rng::new((seed * 100 + layer * 3 + which) as u64);
            let count = heads[which] * tokens * self.shape.head_dim;
            let values = (0..count).map(|_| bf16::from_f32(rng.uniform(-2.0, 2.0))).collect();
            OwnedTensor::from_vec(values, [1, heads[which], tokens, self.shape.head_dim]).unwrap()
        })
    }

    fn attend<S: KvCacheExt>(
        &self,
        cache: &mut S,
        layers: &[(usize, &[OwnedTensor; 3])],
        batch: &[(SeqId, usize)],
    ) -> Vec<Vec<bf16>> {
        let sinks: Vec<f32> = (0..self.q_heads).map(|head| head as f32 / 16.0 - 1.0).collect();
        let mut step = cache.step(batch).unwrap();
        let mut answers = Vec::new();
        for (index, (layer, [q, k, v])) in layers.iter().enumerate() {
            let mut out = OwnedTensor::zeros(Dtype::BF16, q.view().shape()).unwrap();
            let tensors = StepTensors { q: q.view(), k: k.view(), v: v.view() };
            let options = self.options(*layer, &sinks);
            step.attend_with(index, tensors, &options, &mut Outputs::new(out.view_mut())).unwrap();
            answers.push(out.into_vec().unwrap());
        }
        step.finish().unwrap();
        answers
    }
}

/// Steps of two sequences over one cache, whose answers have the bits of one cache for each kind of layer.
fn answers_are_those_of_two_caches(model: &Model, steps: &[[usize; 2]]) {
    let mut hybrid = HybridCache::new(&model.descs()).unwrap();
    assert_eq!((hybrid.layers(), hybrid.groups().len()), (model.layers, 2));
    let mut apart = [false, true].map(|is_full| {
        let layers = (0..model.layers).filter(|layer| model.is_full(*layer) == is_full).count();
        let mut desc = model.kinds()[usize::from(is_full)];
        desc.layers = layers;
        KvCache::new(desc).unwrap()
    });
    let seqs = [hybrid.create().unwrap(), hybrid.create().unwrap()];
    let seqs_apart = apart.each_mut().map(|cache| [cache.create().unwrap(), cache.create().unwrap()]);
    for (seed, tokens) in steps.iter().enumerate() {
        let count = tokens.iter().sum();
        let rows: Vec<_> = (0..model.layers).map(|layer| model.rows(layer, count, seed)).collect();
        let layers: Vec<_> = rows.iter().enumerate().collect();
        let batch: Vec<_> = seqs.into_iter().zip(*tokens).collect();
        let mut got = model.attend(&mut hybrid, &layers, &batch);
        for is_full in [true, false] {
            let kept: Vec<_> =
                layers.iter().copied().filter(|(layer, _)| model.is_full(*layer) == is_full).collect();
            let batch: Vec<_> = seqs_apart[usize::from(is_full)].into_iter().zip(*tokens).collect();
            let want = model.attend(&mut apart[usize::from(is_full)], &kept, &batch);
            for ((layer, _), want) in kept.iter().zip(want) {
                assert!(std::mem::take(&mut got[*layer]) == want, "step {seed}, layer {layer}");
            }
        }
    }
}

/// Bytes of the pools, by hand.
fn bytes(model: &Model) -> usize {
    let (elements, full) = (model.shape.kv_heads * 2 * model.shape.head_dim, model.layers / model.full);
    let ring = SLOTS * (model.window + STEP) * elements * 2;
    // An int8 row has a scale of two bytes.
    let paged = PAGES * PAGE_SIZE * (elements + model.shape.kv_heads * 2 * 2);
    (model.layers - full) * ring + full * paged
}

#[test]
fn layers_of_gpt_oss_and_gemma_3_are_in_one_cache() {
    for model in [&GPT_OSS, &GEMMA_3] {
        let memory = HybridCache::new(&model.descs()).unwrap().memory();
        assert_eq!(memory.bytes_reserved, bytes(model));
    }
    answers_are_those_of_two_caches(&GPT_OSS, &[[64, 20], [64, 1], [30, 2], [1, 1]]);
    let mut steps = vec![[64, 3]; 9];
    steps.push([1, 1]);
    answers_are_those_of_two_caches(&GEMMA_3, &steps);
}

#[test]
fn a_step_that_does_not_fit_a_group_changes_nothing() {
    let shape = CacheShape { layers: 1, kv_heads: 1, head_dim: 4, value_dim: 4 };
    let kinds = [
        CacheLayout::Ring { slots: 2, capacity: 6 },
        CacheLayout::Paged { pages: 8, page_size: 4 },
        CacheLayout::Contiguous { slots: 2, capacity: 5 },
    ];
    let mut cache = HybridCache::new(&kinds.map(|layout| CacheDesc::new(layout, shape, Codec::F32))).unwrap();
    let seq = cache.create().unwrap();
    cache.extend(&[(seq, 3)]).unwrap();
    let before = cache.memory();
    // The paged group has room for them, the contiguous one does not.
    let refused: Result<(), CacheError> = cache.extend(&[(seq, 4)]);
    assert_eq!(refused, Err(CacheError::Capacity { len: 7, capacity: 5 }));
    assert!(cache.step(&[(seq, 3)]).is_err());
    assert_eq!((cache.len(seq), cache.memory()), (Ok(3), before));
    // A third sequence finds no slot; the sequence after it has a name that was never used.
    let second = cache.create().unwrap();
    assert_eq!(cache.create(), Err(CacheError::OutOfSlots { slots: 2 }));
    cache.remove(seq).unwrap();
    let third = cache.create().unwrap();
    assert_eq!(cache.len(third), Ok(0));
    assert_eq!(cache.len(seq), Err(CacheError::RemovedSequence { seq }));
    assert!(cache.groups().iter().all(|group| group.len(second) == Ok(0)));
    // Names of one cache mean nothing to another.
    let mut other = HybridCache::new(&[CacheDesc::new(kinds[1], shape, Codec::F32)]).unwrap();
    assert_eq!(other.remove(third), Err(CacheError::ForeignSequence { seq: third }));
    let row = rows(&[], 0, other.groups()[0].desc());
    let refused = other.write(1, &[], &row.view(), &row.view());
    assert_eq!(refused, Err(CacheError::Layer { got: 1, layers: 1 }));
    let none = HybridCache::new(&[]).map(|_| ());
    assert!(matches!(none, Err(CacheError::Dimension { name: "layers", got: 0, .. })));
    let snapshots = cache.snapshot(third).unwrap();
    let refused = cache.restore(&snapshots[..2]);
    assert_eq!(refused, Err(CacheError::SnapshotDimension { name: "groups", expected: 3, got: 2 }));
}

#[test]
fn errors_name_layers_as_the_model_does() {
    let [ring, paged] =
        [CacheLayout::Ring { slots: 2, capacity: 6 }, CacheLayout::Paged { pages: 8, page_size: 4 }];
    let mut codes = HybridCache::new(&[paged, ring, paged].map(|layout| {
        let codec = if layout == ring { Codec::F32 } else { Codec::Int8 };
        let shape = CacheShape { layers: 1, kv_heads: 1, head_dim: 64, value_dim: 64 };
        CacheDesc::new(layout, shape, codec)
    }))
    .unwrap();
    let seq = codes.create().unwrap();
    let (good, bad) = ([1.0f32; 64], [f32::NAN; 64]);
    let [good, bad] = [&good, &bad].map(|row| TensorView::packed(row, [1, 1, 64]).unwrap());
    codes.extend(&[(seq, 1)]).unwrap();
    let refused = codes.write(2, &[(seq, 1)], &bad, &good).unwrap_err();
    assert!(matches!(refused, CacheError::Row { layer: 2, tensor: "k", .. }), "{refused}");
    codes.write(2, &[(seq, 1)], &good, &good).unwrap();
    assert_eq!(codes.set_key_mean(2, &[0.0; 64]), Err(KeyTransformError::Fixed { layer: 2 }.into()));
    assert_eq!(codes.set_key_factors(2, &[1.0; 64]), Err(KeyTransformError::Fixed { layer: 2 }.into()));
    let mut step = codes.step(&[(seq, 1)]).unwrap();
    let mut out = OwnedTensor::zeros(Dtype::F32, [1, 1, 1, 64]).unwrap();
    let refused = step.attend(2, good, bad, good, &mut out.view_mut()).unwrap_err().to_string();
    assert!(refused.starts_with("layer 2: row 0 of head 0 of k"), "{refused}");
    drop(step);
    assert_eq!(codes.len(seq), Ok(1));
}

/// Layers of the random test: all differ but the first and the last.
fn random_descs() -> Vec<CacheDesc> {
    let desc = |layout, kv_heads, head_dim, codec| {
        let shape = CacheShape { layers: 1, kv_heads, head_dim, value_dim: head_dim };
        CacheDesc::new(layout, shape, codec)
    };
    let paged = desc(CacheLayout::Paged { pages: 9, page_size: 3 }, 1, 4, Codec::F32);
    vec![
        paged,
        desc(CacheLayout::Ring { slots: 3, capacity: 6 }, 2, 3, Codec::F16),
        desc(CacheLayout::Contiguous { slots: 4, capacity: 11 }, 1, 2, Codec::BF16),
        paged,
    ]
}

/// An element of a token: an integer that every codec stores exactly.
fn element(id: u32, [layer, head, d]: [usize; 3]) -> f32 {
    (id as usize * 31 + layer * 7 + head * 3 + d) as f32 % 200.0
}

/// Rows `[1, kv_heads, tokens, head_dim]` of tokens in a layer.
fn rows(ids: &[u32], layer: usize, desc: &CacheDesc) -> OwnedTensor {
    let CacheDesc { kv_heads, head_dim, .. } = *desc;
    let at = |head| ids.iter().flat_map(move |id| (0..head_dim).map(move |d| element(*id, [layer, head, d])));
    OwnedTensor::from_vec(
        (0..kv_heads).flat_map(at).collect::<Vec<f32>>(),
        [1, kv_heads, ids.len(), head_dim],
    )
    .unwrap()
}

/// The tokens of a sequence, and the first that each group keeps.
#[derive(Clone)]
struct Tokens {
    ids: Vec<u32>,
    first: Vec<usize>,
}

/// The expected contents of a cache.
struct Naive {
    descs: Vec<CacheDesc>,
    sequences: BTreeMap<u64, (SeqId, Tokens)>,
}

impl Naive {
    fn grow(&mut self, cache: &HybridCache, seq: SeqId, ids: &[u32]) {
        let (_, tokens) = self.sequences.values_mut().find(|(id, _)| *id == seq).unwrap();
        tokens.ids.extend(ids);
        for (first, group) in tokens.first.iter_mut().zip(cache.groups()) {
            if let CacheLayout::Ring { capacity, .. } = group.desc().layout {
                *first = (*first).max(tokens.ids.len().saturating_sub(capacity));
            }
        }
    }

    /// Checks lengths and contents of every sequence in every layer.
    fn check(&self, cache: &HybridCache) {
        for (seq, tokens) in self.sequences.values() {
            assert_eq!(cache.len(*seq), Ok(tokens.ids.len()));
            assert_eq!(cache.first(*seq), Ok(*tokens.first.iter().max().unwrap()));
            let firsts: Vec<_> = cache.groups().iter().map(|group| group.first(*seq).unwrap()).collect();
            assert_eq!(firsts, tokens.first);
            for (layer, desc) in self.descs.iter().enumerate() {
                let (group, index) = cache.layer(layer).unwrap();
                let kept = &tokens.ids[group.first(*seq).unwrap()..];
                let shape = [1, desc.kv_heads, kept.len(), desc.head_dim];
                let [mut k, mut v] = [0; 2].map(|_| OwnedTensor::zeros(Dtype::F32, shape).unwrap());
                group.linearize(*seq, index, &mut k.view_mut(), &mut v.view_mut()).unwrap();
                let want = rows(kept, layer, desc);
                assert_eq!([values(&k), values(&v)], [values(&want), values(&want)], "{seq}, layer {layer}");
            }
        }
    }
}

fn values(of: &OwnedTensor) -> Vec<f32> {
    let ([_, heads, rows, dim], view) = (of.shape(), of.view());
    (0..heads * rows * dim).map(|n| view.get([0, n / dim / rows, n / dim % rows, n % dim])).collect()
}

fn append(
    cache: &mut HybridCache,
    descs: &[CacheDesc],
    batch: &[(SeqId, usize)],
    ids: &[u32],
) -> Result<(), CacheError> {
    let layers: Vec<_> = descs.iter().enumerate().map(|(layer, desc)| rows(ids, layer, desc)).collect();
    let pairs: Vec<_> = layers.iter().map(|rows| (rows.view(), rows.view())).collect();
    cache.append(batch, &pairs)
}

#[test]
fn random_operations_match_lists_of_tokens() {
    let descs = random_descs();
    let mut cache = HybridCache::new(&descs).unwrap();
    assert_eq!(cache.groups().len(), 3);
    let mut naive = Naive { descs: descs.clone(), sequences: BTreeMap::new() };
    let mut rng = Rng::new(11);
    let (mut next, mut begun, mut refused) = (0u32, 0u64, BTreeMap::<String, usize>::new());
    for _ in 0..4_000 {
        let held: Vec<SeqId> = naive.sequences.values().map(|(seq, _)| *seq).collect();
        let any = (!held.is_empty()).then(|| held[rng.below(held.len())]);
        let key =
            any.and_then(|any| naive.sequences.iter().find(|(_, (seq, _))| *seq == any).map(|(key, _)| *key));
        let mut add = |naive: &mut Naive, made: Result<SeqId, CacheError>, tokens: Tokens| {
            made.map(|seq| {
                begun += 1;
                naive.sequences.insert(begun, (seq, tokens));
            })
        };
        let outcome = match (rng.below(12), any.zip(key)) {
            (0 | 1, _) => {
                let made = cache.create();
                add(&mut naive, made, Tokens { ids: Vec::new(), first: vec![0; 3] })
            }
            (2..6, Some(_)) => {
                let batch: Vec<_> = held.iter().map(|seq| (*seq, rng.below(4))).collect();
                let count: usize = batch.iter().map(|(_, tokens)| tokens).sum();
                let ids: Vec<u32> = (next..next + count as u32).collect();
                next += count as u32;
                append(&mut cache, &descs, &batch, &ids).map(|()| {
                    let mut rest = &ids[..];
                    for (seq, tokens) in &batch {
                        let (first, after) = rest.split_at(*tokens);
                        naive.grow(&cache, *seq, first);
                        rest = after;
                    }
                })
            }
            (6 | 7, Some((seq, key))) => {
                let tokens = naive.sequences[&key].1.clone();
                let made = cache.fork(seq);
                add(&mut naive, made, tokens)
            }
            (8, Some((seq, key))) => cache.remove(seq).map(|()| drop(naive.sequences.remove(&key))),
            (9, Some((seq, key))) => {
                let tokens = &mut naive.sequences.get_mut(&key).unwrap().1;
                let len = tokens.ids.len().saturating_sub(rng.below(4));
                cache.truncate(seq, len).map(|()| tokens.ids.truncate(len))
            }
            (10, Some((seq, key))) => {
                let tokens = &mut naive.sequences.get_mut(&key).unwrap().1;
                let before = rng.below(tokens.ids.len() + 2);
                cache
                    .forget(seq, before)
                    .map(|()| tokens.first.iter_mut().for_each(|first| *first = before.max(*first)))
            }
            (11, Some((seq, key))) => {
                let tokens = naive.sequences[&key].1.clone();
                let snapshots = cache.snapshot(seq).unwrap();
                let made = cache.restore(&snapshots);
                add(&mut naive, made, tokens)
            }
            _ => continue,
        };
        if let Err(error) = outcome {
            let kind = format!("{error:?}");
            *refused.entry(kind.split([' ', '(']).next().unwrap().to_owned()).or_default() += 1;
        }
        naive.check(&cache);
    }
    let kinds: Vec<&str> = refused.keys().map(String::as_str).collect();
    assert_eq!(kinds, ["Capacity", "OutOfPages", "OutOfSlots", "Position"]);
    assert!(
        refused.values().all(|count| *count > 20) && refused.values().sum::<usize>() < 3_000,
        "{refused:?}"
    );
    for (seq, _) in naive.sequences.values() {
        cache.remove(*seq).unwrap();
    }
    assert_eq!((cache.memory().bytes_used, cache.memory().tokens), (0, 0));
}
