//! A step of a batch over a KV cache: every layer writes its rows and attends.

use crate::attention::Attention;
use crate::error::Result;
use crate::runner::with_thread_runner;
use flashtile_core::block_tables::BlockTables;
use flashtile_core::cache::{KvCache, SeqId};
use flashtile_core::inputs::Outputs;
use flashtile_core::problem::{ProblemDesc, SeqLens};
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
    /// step.finish();
    /// assert_eq!((cache.len(a)?, cache.len(b)?), (40, 1));
    /// # Ok::<(), flashtile::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Cache`](crate::Error::Cache), as [`KvCache::extend`]; the cache is unchanged then.
    fn step(&mut self, batch: &[(SeqId, usize)]) -> Result<Step<'_>>;
}

impl KvCacheExt for KvCache {
    fn step(&mut self, batch: &[(SeqId, usize)]) -> Result<Step<'_>> {
        Step::new(self, batch)
    }
}

/// A step of a batch over a cache, begun by [`KvCacheExt::step`]. Dropped without [`Step::finish`], as by an error in a layer, it
/// takes its tokens back: sequences have the lengths from before the step. Tokens that a ring gave up for them stay lost.
#[derive(Debug)]
pub struct Step<'c> {
    cache: &'c mut KvCache,
    batch: Vec<(SeqId, usize)>,
    seqs: Vec<SeqId>,
    lens: Vec<SeqLens>,
    tables: BlockTables,
    options: Attention<'c>,
    /// The problem of the last call of [`Step::attend`].
    desc: Option<ProblemDesc>,
}

impl<'c> Step<'c> {
    fn new(cache: &'c mut KvCache, batch: &[(SeqId, usize)]) -> Result<Self> {
        let seqs: Vec<SeqId> = batch.iter().map(|&(seq, _)| seq).collect();
        cache.extend(batch)?;
        // From here on, an error drops the step, which takes the tokens back.
        let mut step = Self {
            cache,
            batch: batch.to_vec(),
            seqs,
            lens: Vec::new(),
            tables: BlockTables::default(),
            options: Attention::decode(),
            desc: None,
        };
        step.tables = step.cache.tables(&step.seqs)?;
        let lens = step.batch.iter().zip(&step.tables.lens);
        step.lens = lens.map(|(&(_, q_len), &kv_len)| SeqLens { q_len, kv_len }).collect();
        Ok(step)
    }

    /// Attention with these options instead of [`Attention::decode`]. Each new token sits at its place in its sequence,
    /// whatever [`Attention::q_offset`] and [`Attention::lens`] say.
    #[must_use]
    pub fn options(mut self, options: Attention<'c>) -> Self {
        self.options = options;
        self.desc = None;
        self
    }

    /// Stores the rows of a layer and attends to them and to what the cache holds: q `[1, q_heads, new tokens, head_dim]`, k `[1,
    /// kv_heads, new tokens, head_dim]` and v `[1, kv_heads, new tokens, value_dim]` give out `[1, q_heads, new tokens, value_dim]`,
    /// the tokens sequence by sequence as the step listed them; [`TensorView::packed`] makes such views.
    ///
    /// Prefixes that neighbours of the batch share are read once where rows are elements. Over codes this could change bits: to
    /// share them, use [`ProblemDesc::prefixes`] and [`Runner::run`](crate::Runner::run).
    ///
    /// # Errors
    /// [`Error::Cache`](crate::Error::Cache) as [`KvCache::write`], and the errors of [`attention`](crate::attention).
    pub fn attend(
        &mut self,
        layer: usize,
        q: TensorView<'_>,
        k: TensorView<'_>,
        v: TensorView<'_>,
        out: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        self.attend_into(layer, [q, k, v], &mut Outputs::new(out.reborrow()))
    }

    /// [`Step::attend`] of q, k and v with the logsumexp, or with whatever else [`Outputs`] ask for.
    ///
    /// # Errors
    /// As [`Step::attend`].
    pub fn attend_into(
        &mut self,
        layer: usize,
        [q, k, v]: [TensorView<'_>; 3],
        outputs: &mut Outputs<'_>,
    ) -> Result<()> {
        self.cache.write(layer, &self.batch, &k, &v)?;
        // Writing may have copied a page that another sequence holds too.
        self.cache.refill_tables(&self.seqs, &mut self.tables)?;
        let [_, q_heads, _, _] = q.shape();
        let is = |desc: &ProblemDesc| (desc.dims.q_heads, desc.dtype) == (q_heads, q.dtype());
        let desc = match self.desc.take().filter(is) {
            Some(desc) => desc,
            None => {
                let mut desc = ProblemDesc::over(self.cache.desc(), q_heads, q.dtype(), &self.lens);
                let offset = desc.q_offset;
                self.options.set(&mut desc);
                desc.q_offset = offset;
                if [self.cache.desc().k, self.cache.desc().v].iter().all(|codec| codec.dtype().is_some()) {
                    desc.prefixes = self.tables.shared_prefixes(1);
                }
                desc
            }
        };
        let desc = self.desc.insert(desc);
        let mut inputs = self.cache.inputs(layer, q, &self.tables)?;
        self.options.set_inputs(&mut inputs);
        with_thread_runner(|runner| runner.run(desc, &inputs, outputs))
    }

    /// Keeps the tokens of the step.
    pub fn finish(mut self) {
        self.batch.clear();
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
            // The sequence has these tokens; a ring smaller than the step keeps its newest ones only.
            if let (Ok(len), Ok(first)) = (self.cache.len(seq), self.cache.first(seq)) {
                let back = self.cache.truncate(seq, (len - tokens).max(first));
                debug_assert!(back.is_ok(), "{back:?}");
            }
        }
    }
}
