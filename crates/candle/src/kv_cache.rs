//! KV caches for candle tensors.

use crate::options::Options;
use crate::storage::{
    Axes, CallAxes, Op, Qkv, Stored, TensorLayout, check_device, refused, refused_shape, write_new, zeros,
};
use candle_core::{CpuStorage, Result, Shape, Tensor, bail};
use flashtile::{CacheDesc, KvCacheExt, Outputs, SeqId, SeqLens, Sequences, StepTensors};
use std::cell::RefCell;

/// Keys and values of many sequences, for all layers of a model: in pages, slots or rings, as plain elements or quantized.
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
    inner: flashtile::KvCache,
}

impl KvCache {
    /// An empty cache in main memory.
    ///
    /// # Errors
    /// If the description is wrong, or there is no memory.
    pub fn new(desc: CacheDesc) -> Result<Self> {
        Ok(Self { inner: flashtile::KvCache::new(desc).map_err(refused)? })
    }

    /// A new, empty sequence.
    ///
    /// # Errors
    /// If all slots are taken.
    pub fn create(&mut self) -> Result<SeqId> {
        self.inner.create().map_err(refused)
    }

    /// A second sequence of the same tokens. In a paged cache, both use the same pages.
    ///
    /// # Errors
    /// If the sequence does not exist, or there is no room.
    pub fn fork(&mut self, seq: SeqId) -> Result<SeqId> {
        self.inner.fork(seq).map_err(refused)
    }

    /// Ends a sequence and frees the pages that only it holds.
    ///
    /// # Errors
    /// If the sequence does not exist.
    pub fn remove(&mut self, seq: SeqId) -> Result<()> {
        self.inner.remove(seq).map_err(refused)
    }

    /// Number of tokens of a sequence.
    ///
    /// # Errors
    /// If the sequence does not exist.
    pub fn len(&self, seq: SeqId) -> Result<usize> {
        self.inner.len(seq).map_err(refused)
    }

    /// Keeps the first `len` tokens of a sequence.
    ///
    /// # Errors
    /// If the sequence does not exist, or has fewer tokens.
    pub fn truncate(&mut self, seq: SeqId, len: usize) -> Result<()> {
        self.inner.truncate(seq, len).map_err(refused)
    }

    /// The cache itself, with all of its other methods.
    #[must_use]
    pub const fn inner(&self) -> &flashtile::KvCache {
        &self.inner
    }

    /// The cache itself, mutable: to snapshot and restore sequences, or to set the mean of quantized keys
    /// ([`set_key_mean`](flashtile::KvCache::set_key_mean)).
    pub const fn inner_mut(&mut self) -> &mut flashtile::KvCache {
        &mut self.inner
    }

    /// Begins a step: adds the given number of tokens to each listed sequence, which every layer then stores and attends to.
    ///
    /// # Errors
    /// If there is no room for the tokens; the cache is unchanged then.
    pub fn step(&mut self, batch: &[(SeqId, usize)]) -> Result<Step<'_>> {
        Ok(Step { inner: self.inner.step(batch).map_err(refused)? })
    }
}

/// A step of a batch over a cache, begun by [`KvCache::step`]. If it is dropped without [`Step::finish`], it removes its tokens.
#[derive(Debug)]
#[must_use = "a step that is dropped takes its tokens back"]
pub struct Step<'c> {
    inner: flashtile::Step<'c>,
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
        tensors.each(check_device)?;
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
        let lens = self.inner.lens();
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
        let lse = options.lse.then(|| RefCell::new(Vec::new()));
        let step = RefCell::new(&mut self.inner);
        let run =
            |tensors: Qkv<Stored<'_>>| attend(&mut step.borrow_mut(), layer, tensors, options, lse.as_ref());
        let out = q.apply_op3_no_bwd(k, v, &Op { name: "attend", run })?;
        let lse = lse.map(|lse| Tensor::from_vec(lse.into_inner(), (q.dims()[1], q.dims()[0]), q.device()));
        Ok((out, lse.transpose()?))
    }

    /// Keeps the tokens of the step.
    ///
    /// # Errors
    /// If the rows of a layer were not stored; the step removes its tokens then.
    pub fn finish(self) -> Result<()> {
        self.inner.finish().map_err(refused)
    }

    /// Lengths of the sequences in this step, in the order of the batch.
    #[must_use]
    pub fn lens(&self) -> &[SeqLens] {
        self.inner.lens()
    }
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
