//! KV caches for candle tensors.

#[cfg(feature = "cuda")]
use crate::cuda_cache::{CudaCache, CudaStep};
use crate::options::Options;
use crate::storage::{
    Axes, CallAxes, Op, Qkv, Stored, TensorLayout, check_device, refused, refused_shape, write_new, zeros,
};
use candle_core::{CpuStorage, Device, Result, Shape, Tensor, bail};
use flashtile::cache::CacheMemory;
use flashtile::{CacheDesc, HybridCache, KvCacheExt, Outputs, SeqId, SeqLens, Sequences, StepTensors};
use std::cell::RefCell;

/// Keys and values of many sequences, for all layers of a model: in pages, slots or rings, as plain elements or quantized. On the CPU, or
/// with the feature `cuda` in the memory of a CUDA device.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use flashtile_candle::flashtile::{CacheDesc, CacheLayout, CacheShape, Codec};
/// use flashtile_candle::KvCache;
/// let shape = CacheShape { layers: 1, kv_heads: 2, head_dim: 64, value_dim: 64 };
/// let mut cache = KvCache::new(CacheDesc::new(CacheLayout::Paged { pages: 64, page_size: 16 }, shape, Codec::Int8))?;
/// let (a, b) = (cache.create()?, cache.create()?);
/// // 40 tokens of a prompt, and one token of another sequence: (tokens, heads, dim)
/// let q = Tensor::rand(-1f32, 1.0, (41, 8, 64), &Device::Cpu)?;
/// let kv = Tensor::rand(-1f32, 1.0, (41, 2, 64), &Device::Cpu)?;
/// let mut step = cache.step(&[(a, 40), (b, 1)])?;
/// let out = step.attend(0, &q, &kv, &kv)?;
/// step.finish()?;
/// assert_eq!((out.dims(), cache.len(a)?, cache.len(b)?), ([41, 8, 64].as_slice(), 40, 1));
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// Caches are for inference: results of a step have no gradient.
#[derive(Debug)]
pub struct KvCache {
    inner: Inner,
}

#[derive(Debug)]
enum Inner {
    Host(HybridCache),
    #[cfg(feature = "cuda")]
    Cuda(Box<CudaCache>),
}

/// An expression over the [`HybridCache`] of a [`KvCache`], wherever it lies.
macro_rules! with {
    ($self:ident, $cache:ident => $result:expr) => {
        match &$self.inner {
            Inner::Host($cache) => $result.map_err(refused),
            #[cfg(feature = "cuda")]
            Inner::Cuda(of) => {
                let $cache = &of.cache;
                $result.map_err(refused)
            }
        }
    };
    ($self:ident, mut $cache:ident => $result:expr) => {
        match &mut $self.inner {
            Inner::Host($cache) => $result.map_err(refused),
            #[cfg(feature = "cuda")]
            Inner::Cuda(of) => {
                let $cache = &mut of.cache;
                $result.map_err(refused)
            }
        }
    };
}

impl KvCache {
    /// An empty cache in main memory.
    ///
    /// # Errors
    /// If the description is wrong, or there is no memory.
    pub fn new(desc: CacheDesc) -> Result<Self> {
        Self::of_layers(&[desc], &Device::Cpu)
    }

    /// An empty cache on a device, of layers that may differ: descriptions come in the order of the layers, and one with `layers: n` stands
    /// for `n` layers that follow each other. Tensors of its steps lie on the same device.
    ///
    /// # Errors
    /// If a description is wrong, there is no memory, or the device is of Metal.
    pub fn of_layers(layers: &[CacheDesc], device: &Device) -> Result<Self> {
        match device {
            Device::Cpu => Ok(Self { inner: Inner::Host(HybridCache::new(layers).map_err(refused)?) }),
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => Ok(Self { inner: Inner::Cuda(Box::new(CudaCache::new(layers, device)?)) }),
            other => bail!(
                "a KvCache is on the CPU, or with the feature cuda on a CUDA device, and not on {:?}",
                other.location()
            ),
        }
    }

    /// A new, empty sequence.
    ///
    /// # Errors
    /// If all slots are taken.
    pub fn create(&mut self) -> Result<SeqId> {
        with!(self, mut cache => cache.create())
    }

    /// A second sequence of the same tokens. In a paged cache, both use the same pages.
    ///
    /// # Errors
    /// If the sequence does not exist, or there is no room.
    pub fn fork(&mut self, seq: SeqId) -> Result<SeqId> {
        with!(self, mut cache => cache.fork(seq))
    }

    /// Ends a sequence and frees the pages that only it holds.
    ///
    /// # Errors
    /// If the sequence does not exist.
    pub fn remove(&mut self, seq: SeqId) -> Result<()> {
        with!(self, mut cache => cache.remove(seq))
    }

    /// Number of tokens of a sequence.
    ///
    /// # Errors
    /// If the sequence does not exist.
    pub fn len(&self, seq: SeqId) -> Result<usize> {
        with!(self, cache => cache.len(seq))
    }

    /// Keeps the first `len` tokens of a sequence.
    ///
    /// # Errors
    /// If the sequence does not exist, or has fewer tokens.
    pub fn truncate(&mut self, seq: SeqId, len: usize) -> Result<()> {
        with!(self, mut cache => cache.truncate(seq, len))
    }

    /// Drops the tokens of a sequence before a position, such as those that no window reaches any more.
    ///
    /// # Errors
    /// If the sequence does not exist, or has fewer tokens.
    pub fn forget(&mut self, seq: SeqId, before: usize) -> Result<()> {
        with!(self, mut cache => cache.forget(seq, before))
    }

    /// Sets the mean `(kv_heads, dim)` that is subtracted from the quantized keys of a layer before they are stored.
    ///
    /// # Errors
    /// As [`HybridCache::set_key_mean`].
    pub fn set_key_mean(&mut self, layer: usize, mean: &[f32]) -> Result<()> {
        with!(self, mut cache => cache.set_key_mean(layer, mean))
    }

    /// Sets the factors `(kv_heads, dim)` that the keys of a layer are divided by after the mean is subtracted, for codecs that rotate keys.
    ///
    /// # Errors
    /// As [`HybridCache::set_key_factors`].
    pub fn set_key_factors(&mut self, layer: usize, factors: &[f32]) -> Result<()> {
        with!(self, mut cache => cache.set_key_factors(layer, factors))
    }

    /// Checks that every row written since the last call was stored. Rows that are not finite, or too large for their codec, are refused on
    /// the CPU when they are written; a CUDA device stores them as NaN, and this waits for it.
    ///
    /// # Errors
    /// The first of the rows that were not stored, with its layer, counted among the layers of one description.
    pub fn check_stored(&mut self) -> Result<()> {
        with!(self, mut cache => cache.check_stored())
    }

    /// Memory use.
    #[must_use]
    pub fn memory(&self) -> CacheMemory {
        match &self.inner {
            Inner::Host(cache) => cache.memory(),
            #[cfg(feature = "cuda")]
            Inner::Cuda(of) => of.cache.memory(),
        }
    }

    /// The cache itself, where it is in main memory: to snapshot and restore sequences, and to read its pages.
    pub const fn host_mut(&mut self) -> Option<&mut HybridCache> {
        match &mut self.inner {
            Inner::Host(cache) => Some(cache),
            #[cfg(feature = "cuda")]
            Inner::Cuda(_) => None,
        }
    }

    /// Begins a step: adds the given number of tokens to each listed sequence, which every layer then stores and attends to.
    ///
    /// # Errors
    /// If there is no room for the tokens; the cache is unchanged then.
    pub fn step(&mut self, batch: &[(SeqId, usize)]) -> Result<Step<'_>> {
        let inner = match &mut self.inner {
            Inner::Host(cache) => StepInner::Host(cache.step(batch).map_err(refused)?),
            #[cfg(feature = "cuda")]
            Inner::Cuda(cache) => StepInner::Cuda(cache.step(batch)?),
        };
        Ok(Step { inner })
    }
}

/// A step of a batch over a cache, begun by [`KvCache::step`]. If it is dropped without [`Step::finish`], it removes its tokens.
#[derive(Debug)]
#[must_use = "a step that is dropped takes its tokens back"]
pub struct Step<'c> {
    inner: StepInner<'c>,
}

#[derive(Debug)]
enum StepInner<'c> {
    Host(flashtile::Step<'c>),
    #[cfg(feature = "cuda")]
    Cuda(CudaStep<'c>),
}

impl Step<'_> {
    /// Stores k and v of a layer, and attends causally to them and to the earlier tokens in the cache.
    ///
    /// q `(tokens, q_heads, dim)`, k `(tokens, kv_heads, dim)` and v `(tokens, kv_heads, value_dim)` hold the tokens sequence by sequence,
    /// as the step listed them, and give out `(tokens, q_heads, value_dim)`. If all sequences have the same number of tokens, they may also
    /// be `(sequences, heads, tokens, dim)`, and out has these axes then. Such tensors are copied unless they were made by transposing
    /// `(sequences, tokens, heads, dim)`, or one of `heads` and `tokens` is 1.
    ///
    /// # Errors
    /// The errors of [`attention`](crate::attention), and an error if the layer does not exist.
    pub fn attend(&mut self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        Ok(self.attend_with(layer, q, k, v, &Options::decode())?.0)
    }

    /// [`Step::attend`] with the options of a layer, such as a window, a softcap, sinks or a mask, and with the logsumexp
    /// `(q_heads, tokens)` if [`Options::lse`] asks for it. Without an offset, each token sits at its place in its sequence. With
    /// [`TensorLayout::Bshd`], tensors of four axes are `(sequences, tokens, heads, dim)`.
    ///
    /// # Errors
    /// The errors of [`Step::attend`], and an error if the options divide tensors into sequences: the step does that.
    pub fn attend_with(
        &mut self,
        layer: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        options: &Options,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let tensors = Qkv { q, k, v };
        if options.sequences != Sequences::Dense || options.tables.is_some() {
            bail!("options divide tensors into sequences: a step does that")
        }
        match (q.dims(), k.rank(), v.rank()) {
            ([_, _, _], 3, 3) => self.packed(layer, tensors, options),
            (&[sequences, ..], 4, 4) if q.rank() == 4 => {
                // Transposes to `(sequences, tokens, heads, dim)`, and back.
                let rows_first = |x: &Tensor| match options.layout {
                    TensorLayout::Bhsd => x.transpose(1, 2),
                    TensorLayout::Bshd => Ok(x.clone()),
                };
                let each = rows_first(q)?.dim(1)?;
                let packed = tensors.each(|name, tensor| {
                    let rows = rows_first(tensor)?;
                    self.check_sequences(name, rows.dim(0)?, rows.dim(1)?)?;
                    rows.flatten(0, 1)
                })?;
                let (out, lse) =
                    self.packed(layer, Qkv { q: &packed.q, k: &packed.k, v: &packed.v }, options)?;
                let (_, heads, value_dim) = out.dims3()?;
                Ok((rows_first(&out.reshape((sequences, each, heads, value_dim))?)?, lse))
            }
            _ => bail!(
                "q, k and v have shapes {:?}, {:?} and {:?}, expected (tokens, heads, dim) or (sequences, heads, tokens, dim)",
                q.dims(),
                k.dims(),
                v.dims()
            ),
        }
    }

    /// Checks that a tensor divides into sequences as the step does.
    fn check_sequences(&self, name: &str, sequences: usize, tokens: usize) -> Result<()> {
        let lens = self.lens();
        if lens.len() != sequences || lens.iter().any(|lens| lens.q_len != tokens) {
            let expected: Vec<usize> = lens.iter().map(|lens| lens.q_len).collect();
            bail!(
                "{name} has {sequences} sequences of {tokens} tokens, the step has sequences of {expected:?}"
            )
        }
        Ok(())
    }

    fn packed(
        &mut self,
        layer: usize,
        Qkv { q, k, v }: Qkv<&Tensor>,
        options: &Options,
    ) -> Result<(Tensor, Option<Tensor>)> {
        match &mut self.inner {
            StepInner::Host(step) => attend_on_host(step, layer, Qkv { q, k, v }, options),
            #[cfg(feature = "cuda")]
            StepInner::Cuda(step) => step.attend(layer, Qkv { q, k, v }, options),
        }
    }

    /// Keeps the tokens of the step.
    ///
    /// # Errors
    /// If the rows of a layer were not stored; the step removes its tokens then.
    pub fn finish(self) -> Result<()> {
        match self.inner {
            StepInner::Host(step) => step.finish().map_err(refused),
            #[cfg(feature = "cuda")]
            StepInner::Cuda(step) => step.step.finish().map_err(refused),
        }
    }

    /// Lengths of the sequences in this step, in the order of the batch.
    #[must_use]
    pub fn lens(&self) -> &[SeqLens] {
        match &self.inner {
            StepInner::Host(step) => step.lens(),
            #[cfg(feature = "cuda")]
            StepInner::Cuda(step) => step.lens(),
        }
    }

    /// The position of each new token in its sequence, in the order of the rows of q: what rotary embeddings need.
    ///
    /// ```
    /// # use flashtile_candle::{KvCache, flashtile::{CacheDesc, CacheLayout, CacheShape, Codec}};
    /// # let shape = CacheShape { layers: 1, kv_heads: 1, head_dim: 16, value_dim: 16 };
    /// # let mut cache = KvCache::new(CacheDesc::new(CacheLayout::Contiguous { slots: 2, capacity: 8 }, shape, Codec::F32))?;
    /// # let (a, b) = (cache.create()?, cache.create()?);
    /// let step = cache.step(&[(a, 2), (b, 3)])?;
    /// assert_eq!(step.positions().collect::<Vec<_>>(), [0, 1, 0, 1, 2]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn positions(&self) -> impl Iterator<Item = usize> + '_ {
        self.lens().iter().flat_map(|lens| lens.kv_len - lens.q_len..lens.kv_len)
    }
}

/// Attends in a layer of a step over a cache in main memory.
fn attend_on_host(
    host: &mut flashtile::Step<'_>,
    layer: usize,
    Qkv { q, k, v }: Qkv<&Tensor>,
    options: &Options,
) -> Result<(Tensor, Option<Tensor>)> {
    Qkv { q, k, v }.each(check_device)?;
    let lse = options.lse.then(|| RefCell::new(Vec::new()));
    let step = RefCell::new(host);
    let run =
        |tensors: Qkv<Stored<'_>>| attend(&mut step.borrow_mut(), layer, tensors, options, lse.as_ref());
    let out = q.apply_op3_no_bwd(k, v, &Op { name: "attend", run })?;
    let lse = lse.map(|lse| Tensor::from_vec(lse.into_inner(), (q.dims()[1], q.dims()[0]), q.device()));
    Ok((out, lse.transpose()?))
}

/// Attends in a layer, and puts the logsumexp into `lse`, if there is one.
fn attend(
    step: &mut flashtile::Step<'_>,
    layer: usize,
    tensors: Qkv<Stored<'_>>,
    options: &Options,
    lse: Option<&RefCell<Vec<f32>>>,
) -> Result<(CpuStorage, Shape)> {
    let Qkv { q, k, v } = tensors.each(|_, tensor| tensor.view(Axes::Packed))?;
    let ([_, heads, tokens, _], [_, _, _, value_dim]) = (q.shape(), v.shape());
    options.check_slopes(heads)?;
    let expected: usize = step.lens().iter().map(|lens| lens.q_len).sum();
    if tokens != expected {
        bail!("q has {tokens} tokens, the step has {expected}")
    }
    options.with(|attention| {
        write_new(q.dtype(), [1, heads, tokens, value_dim], Axes::Packed, |out| {
            let mut outputs = Outputs::new(out);
            let mut lse = lse.map(RefCell::borrow_mut);
            if let Some(lse) = &mut lse {
                **lse = zeros(0.0, heads * tokens)?;
                outputs.lse = Some(lse.as_mut_slice());
            }
            let axes = CallAxes { q: Axes::Packed, kv: Axes::Packed };
            let done = step.attend_with(layer, StepTensors { q, k, v }, attention, &mut outputs);
            done.map_err(|error| refused_shape(error, axes))
        })
    })
}
