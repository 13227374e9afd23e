//! A step of a batch over a KV cache: every layer writes its rows and attends.

use crate::attention::{Attention, SequencesRef};
use crate::error::Result;
use crate::runner::Runner;
use flashtile_core::block_tables::BlockTables;
use flashtile_core::cache::{CacheError, CacheLayout, KvCache, SeqId};
use flashtile_core::dtype::Dtype;
use flashtile_core::inputs::{Outputs, RunError};
use flashtile_core::problem::{ProblemDesc, QOffset, SeqLens};
use flashtile_core::tensor::{TensorView, TensorViewMut};

/// Steps over a [`KvCache`].
pub trait KvCacheExt {
    /// Begins a step: adds this many tokens to each listed sequence, for every layer to fill in and attend to.
    ///
    /// ```
    /// use flashtile::{CacheDesc, CacheLayout, CacheShape, Codec, KvCache, KvCacheExt, TensorView, TensorViewMut};
    /// let shape = CacheShape { layers: 2, kv_heads: 2, head_dim: 64, value_dim: 64 };
    /// let mut cache = KvCache::new(CacheDesc::new(CacheLayout::Paged { pages: 64, page_size: 16 }, shape, Codec::Int8))?;
    /// let (a, b) = (cache.create()?, cache.create()?);
    /// let (q, kv) = (vec![0.1f32; 41 * 8 * 64], vec![0.2f32; 41 * 2 * 64]);
    /// let mut out = vec![0.0f32; 41 * 8 * 64];
    ///
    /// let mut step = cache.step(&[(a, 40), (b, 1)])?; // 40 tokens of a prompt, and one token of another sequence
    /// for layer in 0..2 {
    ///     let (q, kv) = (TensorView::packed(&q, [41, 8, 64])?, TensorView::packed(&kv, [41, 2, 64])?);
    ///     step.attend(layer, q, kv, kv, &mut TensorViewMut::packed(&mut out, [41, 8, 64])?)?;
    /// }
    /// step.finish()?;
    /// assert_eq!((cache.len(a)?, cache.len(b)?), (40, 1));
    /// # Ok::<(), flashtile::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Cache`](crate::Error::Cache), as [`KvCache::extend`], and where a sequence gets more tokens than a ring holds; the cache is
    /// unchanged then.
    fn step(&mut self, batch: &[(SeqId, usize)]) -> Result<Step<'_>>;
}

impl KvCacheExt for KvCache {
    fn step(&mut self, batch: &[(SeqId, usize)]) -> Result<Step<'_>> {
        Step::new(self, batch)
    }
}

/// The tensors of one layer in a step: q `[1, q_heads, new tokens, head_dim]`, k `[1, kv_heads, new tokens,
/// head_dim]` and v `[1, kv_heads, new tokens, value_dim]`. Tokens lie sequence by sequence, as the step
/// listed them. [`TensorView::packed`] makes such views.
#[derive(Debug, Clone, Copy)]
#[allow(clippy::exhaustive_structs)]
pub struct StepTensors<'a> {
    /// Queries.
    pub q: TensorView<'a>,
    /// Keys of the new tokens.
    pub k: TensorView<'a>,
    /// Values of the new tokens.
    pub v: TensorView<'a>,
}

/// A step of a batch over a cache, begun by [`KvCacheExt::step`]. Dropped without [`Step::finish`], as by an
/// error in a layer, it takes its tokens back: sequences have the lengths from before the step. Two effects
/// of the step remain: tokens that a ring gave up for it, and the copy of a page that a fork began to write.
#[derive(Debug)]
#[must_use = "a step that is dropped takes its tokens back"]
pub struct Step<'c> {
    cache: &'c mut KvCache,
    batch: Vec<(SeqId, usize)>,
    lens: Vec<SeqLens>,
    tables: BlockTables,
    /// The problem of the last layer.
    desc: Option<ProblemDesc>,
    /// True for each layer in which the rows of this step are stored.
    written: Vec<bool>,
    /// The runner that computes, in place of the runner of the thread.
    runner: Option<&'c mut Runner>,
}

impl<'c> Step<'c> {
    fn new(cache: &'c mut KvCache, batch: &[(SeqId, usize)]) -> Result<Self> {
        if let CacheLayout::Ring { capacity, .. } = cache.desc().layout
            && let Some(&(_, len)) = batch.iter().find(|(_, tokens)| *tokens > capacity)
        {
            // The first tokens of the step would be overwritten by its last ones.
            return Err(CacheError::Capacity { len, capacity }.into());
        }
        let seqs: Vec<SeqId> = batch.iter().map(|&(seq, _)| seq).collect();
        cache.extend(batch)?;
        // From here on, an error drops the step, which takes the tokens back.
        let mut step = Self {
            batch: batch.to_vec(),
            lens: Vec::new(),
            tables: BlockTables::default(),
            desc: None,
            written: vec![false; cache.desc().layers],
            runner: None,
            cache,
        };
        // Pages of the new tokens belong to their sequence alone, so that no later write moves them.
        step.tables = step.cache.tables(&seqs)?;
        let lens = step.batch.iter().zip(&step.tables.lens);
        step.lens = lens.map(|(&(_, q_len), &kv_len)| SeqLens { q_len, kv_len }).collect();
        Ok(step)
    }

    /// Computes on this runner instead of the one that the calling thread keeps: with its instruction set, number of threads, plans
    /// and workspace.
    ///
    /// ```
    /// # use flashtile::{CacheDesc, CacheLayout, CacheShape, Codec, KvCache, KvCacheExt, Runner, TensorView, TensorViewMut};
    /// # let shape = CacheShape { layers: 1, kv_heads: 1, head_dim: 16, value_dim: 16 };
    /// # let mut cache = KvCache::new(CacheDesc::new(CacheLayout::Contiguous { slots: 1, capacity: 8 }, shape, Codec::F32))?;
    /// # let (seq, rows, mut out) = (cache.create()?, [0.5f32; 16], [0.0f32; 16]);
    /// # let row = TensorView::packed(&rows, [1, 1, 16])?;
    /// # let mut out = TensorViewMut::packed(&mut out, [1, 1, 16])?;
    /// let mut runner = Runner::new();
    /// let mut step = cache.step(&[(seq, 1)])?.on(&mut runner);
    /// step.attend(0, row, row, row, &mut out)?;
    /// step.finish()?;
    /// # Ok::<(), flashtile::Error>(())
    /// ```
    pub fn on(mut self, runner: &'c mut Runner) -> Self {
        self.runner = Some(runner);
        self
    }

    /// Stores the rows of a layer, and attends causally to them and to the rows that the cache holds:
    /// [`StepTensors`] give out `[1, q_heads, new tokens, value_dim]`.
    ///
    /// Prefixes that neighbours of the batch have in common are read once where rows are elements. Over codes this could change
    /// bits: use [`ProblemDesc::prefixes`] and [`Runner::run`](crate::Runner::run) there.
    ///
    /// # Errors
    /// [`Error::Cache`](crate::Error::Cache) as [`KvCache::write`], and the errors of [`attention`](crate::attention), by when the rows of the
    /// layer are stored.
    pub fn attend(
        &mut self,
        layer: usize,
        q: TensorView<'_>,
        k: TensorView<'_>,
        v: TensorView<'_>,
        out: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        let outputs = &mut Outputs::new(out.reborrow());
        self.attend_with(layer, StepTensors { q, k, v }, &Attention::decode(), outputs)
    }

    /// [`Step::attend`] with options of the layer, such as a window, a softcap, sinks or a mask, and with the logsumexp where
    /// [`Outputs`] ask for it. Without an offset, each token sits at its place in its sequence.
    ///
    /// # Errors
    /// As [`Step::attend`]; [`Error::Run`](crate::Error::Run) where the options have lengths of their own.
    pub fn attend_with<'a>(
        &mut self,
        layer: usize,
        tensors: StepTensors<'a>,
        options: &Attention<'a>,
        outputs: &mut Outputs<'_>,
    ) -> Result<()> {
        match options.sequences {
            SequencesRef::Dense => {}
            SequencesRef::Padded { .. } => return Err(RunError::Unexpected { tensor: "kv_lens" }.into()),
            SequencesRef::Packed { .. } => return Err(RunError::Unexpected { tensor: "cu_seqlens" }.into()),
        }
        let StepTensors { q, k, v } = tensors;
        self.cache.write(layer, &self.batch, &k, &v)?;
        self.written[layer] = true;
        let [_, q_heads, _, _] = q.shape();
        let is = |desc: &ProblemDesc| (desc.dims.q_heads, desc.dtype) == (q_heads, q.dtype());
        let mut desc = self.desc.take().filter(is).unwrap_or_else(|| self.describe(q_heads, q.dtype()));
        options.set(&mut desc);
        desc.q_offset = options.q_offset.or(Some(QOffset::BottomRight));
        let desc = self.desc.insert(desc);
        let mut inputs = self.cache.inputs(layer, q, &self.tables)?;
        (*options).set_inputs(&mut inputs);
        match &mut self.runner {
            Some(runner) => runner.run(desc, &inputs, outputs),
            None => Runner::with_current(|runner| runner.run(desc, &inputs, outputs)),
        }
    }

    /// The step without options.
    fn describe(&self, q_heads: usize, dtype: Dtype) -> ProblemDesc {
        let cache = self.cache.desc();
        let mut desc = ProblemDesc::over(cache, q_heads, dtype, &self.lens);
        if [cache.k, cache.v].iter().all(|codec| codec.dtype().is_some()) {
            desc.prefixes = self.tables.shared_prefixes(1);
        }
        desc
    }

    /// Keeps the tokens of the step.
    ///
    /// # Errors
    /// [`Error::Cache`](crate::Error::Cache) with [`CacheError::LayerNotWritten`] where the rows of a layer were not stored; the step takes its
    /// tokens back then.
    pub fn finish(mut self) -> Result<()> {
        let has_tokens = self.batch.iter().any(|&(_, tokens)| tokens > 0);
        if let Some(layer) = self.written.iter().position(|written| !written)
            && has_tokens
        {
            return Err(CacheError::LayerNotWritten { layer }.into());
        }
        self.batch.clear();
        Ok(())
    }

    /// Lengths of the sequences in this step, in the order of the batch.
    #[must_use]
    pub fn lens(&self) -> &[SeqLens] {
        &self.lens
    }
}

impl Drop for Step<'_> {
    fn drop(&mut self) {
        for &(seq, tokens) in &self.batch {
            if let Ok(len) = self.cache.len(seq) {
                let back = self.cache.truncate(seq, len - tokens);
                debug_assert!(back.is_ok(), "{back:?}");
            }
        }
    }
}
