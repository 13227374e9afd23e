//! The decode loop of README.md, once for caches in main memory and on any device, and its answers against the oracle.

use flashtile::gpu::{GpuArray, GpuStore, HostAccess};
use flashtile::quality::{Accumulation, Tolerance, compare_out};
use flashtile::{
    Attention, CacheDesc, CacheLayout, CacheShape, Codec, Dtype, HybridCache, KvCache, KvCacheExt,
    OwnedTensor, ProblemDesc, SeqId, SeqLens, StepRunner, StepStore, StepTensors, reference,
};
use std::error::Error;

/// Where the tensors of a step lie.
pub(crate) trait Place<S: StepStore> {
    /// A tensor there.
    type Tensor;

    /// Copies a tensor there.
    fn upload(&self, of: &OwnedTensor) -> Self::Tensor;

    /// Copies a tensor back.
    fn download(&self, of: &Self::Tensor, into: &mut OwnedTensor);

    /// Rows to read.
    fn rows(of: &Self::Tensor) -> S::Rows<'_>;

    /// Rows to fill.
    fn rows_mut(of: &mut Self::Tensor) -> S::RowsMut<'_>;
}

/// The memory of a device.
pub(crate) struct OnDevice<D>(pub(crate) D);

impl<D> Place<GpuStore<D>> for OnDevice<D>
where
    D: HostAccess<Memory: 'static, Error: Error + Send + Sync + 'static> + Clone,
{
    type Tensor = GpuArray<D::Memory>;

    fn upload(&self, of: &OwnedTensor) -> Self::Tensor {
        GpuArray::upload(&self.0, &of.view()).unwrap_or_else(|error| panic!("{error}"))
    }

    fn download(&self, of: &Self::Tensor, into: &mut OwnedTensor) {
        of.download(&self.0, &mut into.view_mut()).unwrap_or_else(|error| panic!("{error}"));
    }

    fn rows(of: &Self::Tensor) -> flashtile::gpu::GpuTensor<'_, D::Memory> {
        of.view()
    }

    fn rows_mut(of: &mut Self::Tensor) -> flashtile::gpu::GpuTensorMut<'_, D::Memory> {
        of.view_mut()
    }
}

const Q_HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 64;
const LAYERS: usize = 2;

/// The cache of the loop, in which rows are elements or codes.
pub(crate) fn cache_desc(codec: Codec) -> CacheDesc {
    let layout = CacheLayout::Paged { pages: 16, page_size: 16 };
    CacheDesc::new(
        layout,
        CacheShape { layers: LAYERS, kv_heads: KV_HEADS, head_dim: DIM, value_dim: DIM },
        codec,
    )
}

/// Elements that differ between steps and tensors.
fn tensor(dtype: Dtype, heads: usize, tokens: usize, seed: usize) -> OwnedTensor {
    let values = (0..heads * tokens * DIM).map(|i| ((i * 37 + seed * 101) % 61) as f32 / 24.0 - 1.2);
    let shape = [1, heads, tokens, DIM];
    match dtype {
        Dtype::F32 => OwnedTensor::from_vec(values.collect::<Vec<f32>>(), shape),
        Dtype::F16 => OwnedTensor::from_vec(values.map(half::f16::from_f32).collect(), shape),
        Dtype::BF16 => OwnedTensor::from_vec(values.map(half::bf16::from_f32).collect(), shape),
    }
    .unwrap()
}

/// The layers of a cache that differ: pages for all keys, and a ring for the window, as wide as it and a step.
pub(crate) fn hybrid_descs(full: Codec, window: Codec) -> [CacheDesc; LAYERS] {
    [(cache_desc(full).layout, full), (CacheLayout::Ring { slots: 2, capacity: 24 }, window)].map(
        |(layout, codec)| {
            let mut desc = cache_desc(codec);
            (desc.layout, desc.layers) = (layout, 1);
            desc
        },
    )
}

/// A cache that begins sequences and says how its layers are.
pub(crate) trait Cache<S: StepStore>: KvCacheExt<S> {
    fn begin(&mut self) -> SeqId;
    fn descs(&self) -> Vec<CacheDesc>;
}

impl<S: StepStore> Cache<S> for KvCache<S> {
    fn begin(&mut self) -> SeqId {
        self.create().unwrap_or_else(|error| panic!("{}", error.into()))
    }

    fn descs(&self) -> Vec<CacheDesc> {
        vec![*self.desc()]
    }
}

impl<S: StepStore> Cache<S> for HybridCache<S> {
    fn begin(&mut self) -> SeqId {
        self.create().unwrap_or_else(|error| panic!("{}", error.into()))
    }

    fn descs(&self) -> Vec<CacheDesc> {
        self.groups().iter().map(|group| *group.desc()).collect()
    }
}

/// Runs steps of two sequences over a cache: prompts of several tokens, then single tokens, the second layer with a window.
/// Each layer of each step is compared with the oracle over a cache in main memory.
pub(crate) fn decode<S, R, P>(cache: &mut impl Cache<S>, mut runner: R, place: &P, dtype: Dtype)
where
    S: StepStore,
    R: StepRunner<S>,
    P: Place<S>,
{
    let sequences = [cache.begin(), cache.begin()];
    let mut host = HybridCache::new(&cache.descs()).unwrap();
    let on_host = [host.create().unwrap(), host.create().unwrap()];
    let window = Attention::decode().window(9, 0);
    for (n, tokens) in [[11, 3], [1, 1], [1, 2], [1, 1]].into_iter().enumerate() {
        let count: usize = tokens.iter().sum();
        let batch: Vec<_> = sequences.into_iter().zip(tokens).collect();
        let of_layer =
            |layer| [Q_HEADS, KV_HEADS, KV_HEADS].map(|heads| tensor(dtype, heads, count, 10 * n + layer));
        let layers: [_; LAYERS] = std::array::from_fn(of_layer);
        let mut got = layers.each_ref().map(|[q, ..]| place.upload(q));

        let mut step = cache.step(&batch).unwrap().on(&mut runner);
        assert_eq!(step.positions().last(), Some(step.lens()[1].kv_len - 1));
        for (layer, ([q, k, v], out)) in layers.iter().zip(&mut got).enumerate() {
            let [q, k, v] = [q, k, v].map(|tensor| place.upload(tensor));
            let [q, k, v] = [&q, &k, &v].map(P::rows);
            if layer == 0 {
                step.attend(layer, q, k, v, &mut P::rows_mut(out)).unwrap();
            } else {
                let (options, mut out) = (S::Options::from(window), P::rows_mut(out));
                let mut outputs = S::outputs(&mut out);
                step.attend_with(layer, StepTensors { q, k, v }, &options, &mut outputs).unwrap();
            }
        }
        step.finish().unwrap();

        let rows: Vec<_> = layers.iter().map(|[_, k, v]| (k.view(), v.view())).collect();
        host.append(&on_host.into_iter().zip(tokens).collect::<Vec<_>>(), &rows).unwrap();
        for (layer, ([q, ..], out)) in layers.iter().zip(&got).enumerate() {
            let mut answer = OwnedTensor::zeros(dtype, [1, Q_HEADS, count, DIM]).unwrap();
            place.download(out, &mut answer);
            let options = if layer == 0 { Attention::decode() } else { window };
            check(&host, on_host, tokens, layer, (q, &answer), &options);
        }
    }
}

/// Compares the answer of a layer with the oracle's.
fn check(
    host: &HybridCache,
    sequences: [SeqId; 2],
    tokens: [usize; 2],
    layer: usize,
    (q, answer): (&OwnedTensor, &OwnedTensor),
    options: &Attention<'_>,
) {
    let q = q.view();
    let lens = [0, 1].map(|n| SeqLens { q_len: tokens[n], kv_len: host.len(sequences[n]).unwrap() });
    let (host, layer) = host.layer(layer).unwrap();
    let mut desc = ProblemDesc::over(host.desc(), Q_HEADS, q.dtype(), &lens);
    desc.visibility = options.visibility;
    let (problem, tables) = (desc.validate().unwrap(), host.tables(&sequences).unwrap());
    let want = reference::attention(&problem, &host.inputs(layer, q, &tables).unwrap()).unwrap();
    let answer = answer.view();
    let [_, heads, rows, dim] = answer.shape();
    let got: Vec<f32> =
        (0..heads * rows * dim).map(|n| answer.get([0, n / dim / rows, n / dim % rows, n % dim])).collect();
    let tolerance = Tolerance::of(q.dtype(), 32, Accumulation::Operands);
    let report = compare_out(&got, &want, q.dtype(), &tolerance);
    assert!(report.within(), "layer {layer}, {lens:?}: {report}");
}
