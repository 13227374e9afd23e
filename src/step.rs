//! A step of a batch over a KV cache: every layer writes its rows and attends.

use crate::attention::{Attention, SequencesRef};
use crate::error::{Error, Result};
use crate::runner::Runner;
use flashtile_core::block_tables::BlockTables;
use flashtile_core::cache::{
    CacheError, CacheLayout, GroupLayer, HostStore, HybridCache, KEPT_STEP, KeepError, KeptTables, KvCache,
    PageStore, SeqId, name_layer, total_tokens,
};
use flashtile_core::dtype::Dtype;
use flashtile_core::inputs::{Outputs, RunError};
use flashtile_core::problem::{ProblemDesc, QOffset, SeqLens};
use flashtile_core::tensor::{TensorView, TensorViewMut};
use std::fmt;
use std::ops::Range;

/// Memory of a cache over which steps attend: main memory, or the memory of a device.
pub trait StepStore: PageStore<Error: Into<Error>> {
    /// Options of a layer: [`Attention`], or on a device `gpu::GpuAttention`, whose tensors lie where the rows do.
    type Options<'a>: From<Attention<'a>>;
    /// Tensors that a layer fills.
    type Outputs<'a>;

    /// True if its runners read a prefix that sequences share once.
    #[doc(hidden)]
    const READS_PREFIXES_ONCE: bool;

    /// Query heads and dtype.
    #[doc(hidden)]
    fn query(q: &Self::Rows<'_>) -> Result<(usize, Dtype)>;

    /// Refuses options that a step does not take.
    #[doc(hidden)]
    fn check_options(options: &Self::Options<'_>) -> Result<()>;

    /// Sets everything but the sequences of a description.
    #[doc(hidden)]
    fn set(options: &Self::Options<'_>, desc: &mut ProblemDesc);

    /// Outputs without logsumexp.
    #[doc(hidden)]
    fn outputs<'a>(out: &'a mut Self::RowsMut<'_>) -> Self::Outputs<'a>;

    /// Some rows of every head.
    #[doc(hidden)]
    fn rows<'a>(of: &Self::Rows<'a>, rows: Range<usize>) -> Result<Self::Rows<'a>>;

    /// Outputs of some rows; their logsumexp is left out.
    #[doc(hidden)]
    fn rows_of_outputs<'a>(of: &'a mut Self::Outputs<'_>, rows: Range<usize>) -> Result<Self::Outputs<'a>>;

    /// The shape of the output.
    #[doc(hidden)]
    fn out_shape(of: &Self::Outputs<'_>) -> [usize; 4];

    /// Names an option or an output that steps of more than [`KEPT_STEP`] tokens over kept tokens do not take.
    #[doc(hidden)]
    fn not_in_windows(options: &Self::Options<'_>, outputs: &Self::Outputs<'_>) -> Option<&'static str>;
}

/// Computes the layers of a step: a [`Runner`] over a cache in main memory, a session of a device over a cache there.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not compute over a cache in `{S}`",
    note = "a step over the memory of a device takes a session of the device: `cache.step(&batch)?.on(&mut session)`"
)]
pub trait StepRunner<S: StepStore> {
    /// Attends to one layer of a cache.
    ///
    /// # Errors
    /// The errors of [`Step::attend`].
    #[doc(hidden)]
    fn attend(
        &mut self,
        layer: StepLayer<'_, S>,
        q: S::Rows<'_>,
        options: &S::Options<'_>,
        outputs: &mut S::Outputs<'_>,
    ) -> Result<()>;
}

/// One layer of a step, with the problem that it is.
#[derive(Debug)]
#[doc(hidden)]
pub struct StepLayer<'a, S: PageStore> {
    pub(crate) cache: &'a KvCache<S>,
    pub(crate) index: usize,
    pub(crate) desc: &'a ProblemDesc,
    pub(crate) tables: &'a BlockTables,
    pub(crate) kept: Option<&'a KeptTables>,
}

/// The runner that a step has from the start: the [`Runner`] of the calling thread, or on CUDA the session that the thread keeps for the
/// stream of the cache.
#[derive(Debug, Clone, Copy, Default)]
#[allow(clippy::exhaustive_structs)]
pub struct CurrentRunner;

impl StepStore for HostStore {
    type Options<'a> = Attention<'a>;
    type Outputs<'a> = Outputs<'a>;

    const READS_PREFIXES_ONCE: bool = true;

    fn query(q: &TensorView<'_>) -> Result<(usize, Dtype)> {
        Ok((q.shape()[1], q.dtype()))
    }

    fn check_options(options: &Attention<'_>) -> Result<()> {
        match options.sequences {
            SequencesRef::Dense => Ok(()),
            SequencesRef::Padded { .. } => Err(RunError::Unexpected { tensor: "kv_lens" }.into()),
            SequencesRef::Packed { .. } => Err(RunError::Unexpected { tensor: "cu_seqlens" }.into()),
        }
    }

    fn set(options: &Attention<'_>, desc: &mut ProblemDesc) {
        options.set(desc);
    }

    fn outputs<'a>(out: &'a mut TensorViewMut<'_>) -> Outputs<'a> {
        Outputs::new(out.reborrow())
    }

    fn rows<'a>(of: &Self::Rows<'a>, rows: Range<usize>) -> Result<Self::Rows<'a>> {
        Ok(of.rows(rows)?)
    }

    fn rows_of_outputs<'a>(of: &'a mut Outputs<'_>, rows: Range<usize>) -> Result<Outputs<'a>> {
        Ok(Outputs::new(of.out.rows_mut(rows)?))
    }

    fn out_shape(of: &Outputs<'_>) -> [usize; 4] {
        of.out.shape()
    }

    fn not_in_windows(options: &Attention<'_>, outputs: &Outputs<'_>) -> Option<&'static str> {
        let Attention { mask, alibi_slopes, .. } = options;
        let heads = outputs.out.shape()[1];
        let each = alibi_slopes.is_some_and(|slopes| slopes.len() > heads);
        let refused = [
            (mask.is_some(), "a mask"),
            (each, "alibi_slopes of each sequence"),
            (outputs.lse.is_some(), "a logsumexp"),
        ];
        refused.into_iter().find_map(|(is_some, what)| is_some.then_some(what))
    }
}

impl StepRunner<HostStore> for Runner {
    fn attend(
        &mut self,
        layer: StepLayer<'_, HostStore>,
        q: TensorView<'_>,
        options: &Attention<'_>,
        outputs: &mut Outputs<'_>,
    ) -> Result<()> {
        let mut inputs = layer.cache.inputs(layer.index, q, layer.tables)?;
        inputs.kept = layer.kept.map(|tables| layer.cache.kept_inputs(layer.index, tables)).transpose()?;
        (*options).set_inputs(&mut inputs);
        self.run(layer.desc, &inputs, outputs)
    }
}

impl StepRunner<HostStore> for CurrentRunner {
    fn attend(
        &mut self,
        layer: StepLayer<'_, HostStore>,
        q: TensorView<'_>,
        options: &Attention<'_>,
        outputs: &mut Outputs<'_>,
    ) -> Result<()> {
        Runner::with_current(|runner| runner.attend(layer, q, options, outputs))
    }
}

impl<S: StepStore, R: StepRunner<S>> StepRunner<S> for &mut R {
    fn attend(
        &mut self,
        layer: StepLayer<'_, S>,
        q: S::Rows<'_>,
        options: &S::Options<'_>,
        outputs: &mut S::Outputs<'_>,
    ) -> Result<()> {
        (**self).attend(layer, q, options, outputs)
    }
}

/// Steps over a [`KvCache`] or a [`HybridCache`].
pub trait KvCacheExt<S: StepStore = HostStore> {
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
    fn step(&mut self, batch: &[(SeqId, usize)]) -> Result<Step<'_, S>>;
}

impl<S: StepStore> KvCacheExt<S> for KvCache<S> {
    fn step(&mut self, batch: &[(SeqId, usize)]) -> Result<Step<'_, S>> {
        Step::new(Groups { caches: std::slice::from_mut(self), layers: None }, batch)
    }
}

impl<S: StepStore> KvCacheExt<S> for HybridCache<S> {
    fn step(&mut self, batch: &[(SeqId, usize)]) -> Result<Step<'_, S>> {
        let (caches, layers) = self.parts_mut();
        Step::new(Groups { caches, layers: Some(layers) }, batch)
    }
}

/// The caches of a step, which hold the same sequences, and where they have each layer.
struct Groups<'c, S: StepStore> {
    caches: &'c mut [KvCache<S>],
    /// `None`: one cache, with its own layers.
    layers: Option<&'c [GroupLayer]>,
}

impl<S: StepStore> Groups<'_, S> {
    fn layers(&self) -> usize {
        self.layers.map_or_else(|| self.caches[0].desc().layers, <[GroupLayer]>::len)
    }

    fn find(&self, layer: usize) -> Result<GroupLayer> {
        let layers = self.layers();
        let at = match self.layers {
            Some(of) => of.get(layer).copied(),
            None => (layer < layers).then_some(GroupLayer { group: 0, layer }),
        };
        at.ok_or_else(|| CacheError::Layer { got: layer, layers }.into())
    }
}

/// The tensors of one layer in a step: q `[1, q_heads, new tokens, head_dim]`, k `[1, kv_heads, new tokens,
/// head_dim]` and v `[1, kv_heads, new tokens, value_dim]`. Tokens lie sequence by sequence, as the step
/// listed them. [`TensorView::packed`] makes such views.
#[derive(Debug, Clone, Copy)]
#[allow(clippy::exhaustive_structs)]
pub struct StepTensors<T> {
    /// Queries.
    pub q: T,
    /// Keys of the new tokens.
    pub k: T,
    /// Values of the new tokens.
    pub v: T,
}

/// A step of a batch over a cache, begun by [`KvCacheExt::step`]. Dropped without [`Step::finish`], as by an
/// error in a layer, it takes its tokens back: sequences have the lengths from before the step. Two effects
/// of the step remain: tokens that a ring gave up for it, and the copy of a page that a fork began to write.
///
/// The cache lies in main memory, or on a device. There the tensors lie too, and work is enqueued: the step does not wait for it. One
/// loop serves both:
///
/// ```
/// use flashtile::cache::PageStore;
/// use flashtile::{KvCache, KvCacheExt, SeqId, Step, StepRunner, StepStore, StepTensors};
///
/// fn token<S: StepStore>(
///     cache: &mut KvCache<S>,
///     runner: &mut impl StepRunner<S>, // a Runner, or a session of the device
///     sequence: SeqId,
///     layers: Vec<(StepTensors<S::Rows<'_>>, S::RowsMut<'_>)>,
/// ) -> flashtile::Result<()> {
///     let mut step = cache.step(&[(sequence, 1)])?.on(runner);
///     for (layer, (StepTensors { q, k, v }, mut out)) in layers.into_iter().enumerate() {
///         step.attend(layer, q, k, v, &mut out)?;
///     }
///     step.finish()
/// }
/// ```
#[must_use = "a step that is dropped takes its tokens back"]
pub struct Step<'c, S: StepStore = HostStore, R = CurrentRunner> {
    tokens: NewTokens<'c, S>,
    lens: Vec<SeqLens>,
    groups: Vec<StepGroup>,
    /// True for each layer in which the rows of this step are stored.
    written: Vec<bool>,
    runner: R,
}

/// Tables and problem that the layers of a group share in a step.
struct StepGroup {
    tables: BlockTables,
    /// Tokens that are kept in 16 bits.
    kept: Option<KeptTables>,
    /// The first of the last kept tokens of each sequence before the step, where its layers are computed [`KEPT_STEP`] tokens at a time.
    last_from: Option<Vec<usize>>,
    /// The problem of the last layer.
    desc: Option<ProblemDesc>,
}

impl<S: StepStore, R> fmt::Debug for Step<'_, S, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tokens, written, .. } = self;
        f.debug_struct("Step").field("batch", &tokens.batch).field("written", written).finish_non_exhaustive()
    }
}

/// The tokens that a step adds to sequences, which lose them again when it is dropped.
struct NewTokens<'c, S: StepStore> {
    groups: Groups<'c, S>,
    /// The number of caches that have them.
    extended: usize,
    batch: Vec<(SeqId, usize)>,
}

impl<S: StepStore> Drop for NewTokens<'_, S> {
    fn drop(&mut self) {
        for cache in &mut self.groups.caches[..self.extended] {
            let back = cache.take_back(&self.batch);
            debug_assert!(back.is_ok());
        }
    }
}

impl<'c, S: StepStore> Step<'c, S> {
    fn new(groups: Groups<'c, S>, batch: &[(SeqId, usize)]) -> Result<Self> {
        for cache in &*groups.caches {
            if let CacheLayout::Ring { capacity, .. } = cache.desc().layout
                && let Some(&(_, len)) = batch.iter().find(|(_, tokens)| *tokens > capacity)
            {
                // The first tokens of the step would be overwritten by its last ones.
                return Err(CacheError::Capacity { len, capacity }.into());
            }
        }
        let seqs: Vec<SeqId> = batch.iter().map(|&(seq, _)| seq).collect();
        let layers = groups.layers();
        // An error takes back the tokens of the caches before it.
        let mut tokens = NewTokens { batch: batch.to_vec(), groups, extended: 0 };
        let last_from = tokens.groups.caches.iter().map(|cache| last_from(cache, batch, &seqs));
        let last_from = last_from.collect::<Result<Vec<_>>>()?;
        for cache in &mut *tokens.groups.caches {
            cache.extend(batch).map_err(Into::into)?;
            tokens.extended += 1;
        }
        // Pages of the new tokens belong to their sequence alone, so that no later write moves them.
        let groups = tokens.groups.caches.iter().zip(last_from).map(|(cache, last_from)| {
            let tables = cache.tables(&seqs).map_err(Into::into)?;
            let kept = cache.kept_tables(&seqs).map_err(Into::into)?;
            Ok(StepGroup { tables, kept, last_from, desc: None })
        });
        let groups = groups.collect::<Result<Vec<_>>>()?;
        let lens = batch.iter().zip(&groups[0].tables.lens);
        let lens = lens.map(|(&(_, q_len), &kv_len)| SeqLens { q_len, kv_len }).collect();
        Ok(Self { tokens, lens, groups, written: vec![false; layers], runner: CurrentRunner })
    }
}

impl<'c, S: StepStore, R> Step<'c, S, R> {
    /// Computes on this runner instead of the one that the calling thread keeps: a [`Runner`], with its instruction set, number of threads,
    /// plans and workspace, or a session of the device of the cache, on the stream or queue of the cache.
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
    pub fn on<T: StepRunner<S>>(self, runner: &'c mut T) -> Step<'c, S, &'c mut T> {
        let Self { tokens, lens, groups, written, .. } = self;
        Step { tokens, lens, groups, written, runner }
    }

    /// Stores the rows of a layer, and attends causally to them and to the rows that the cache holds:
    /// [`StepTensors`] give out `[1, q_heads, new tokens, value_dim]`. In a cache whose values are columns of the keys, v is
    /// [`k.first_columns(value_dim)`](TensorView::first_columns).
    ///
    /// Prefixes that neighbours of the batch have in common are read once where rows are elements in main memory. Over codes this could
    /// change bits: use [`ProblemDesc::prefixes`] and [`Runner::run`](crate::Runner::run) there.
    ///
    /// # Errors
    /// [`Error::Cache`](crate::Error::Cache) as [`KvCache::write`], and the errors of [`attention`](crate::attention), by when the rows of the
    /// layer are stored. Over a cache with `keep_last`, a step of more than [`KEPT_STEP`] tokens of a sequence is computed as many tokens at a
    /// time, and refuses masks, slopes of each sequence, a logsumexp, an offset, and visibility of later keys, with
    /// [`CacheError::Keep`], before it stores anything.
    pub fn attend(
        &mut self,
        layer: usize,
        q: S::Rows<'_>,
        k: S::Rows<'_>,
        v: S::Rows<'_>,
        out: &mut S::RowsMut<'_>,
    ) -> Result<()>
    where
        R: StepRunner<S>,
    {
        self.layer(layer, q, (&k, &v), &Attention::decode().into(), &mut S::outputs(out))
    }

    /// [`Step::attend`] with options of the layer, such as a window, a softcap, sinks or a mask, and with the logsumexp where
    /// the outputs ask for it. Without an offset, each token sits at its place in its sequence.
    ///
    /// # Errors
    /// As [`Step::attend`]; [`Error::Run`](crate::Error::Run) where the options have lengths of their own.
    pub fn attend_with<'a>(
        &mut self,
        layer: usize,
        tensors: StepTensors<S::Rows<'a>>,
        options: &S::Options<'a>,
        outputs: &mut S::Outputs<'_>,
    ) -> Result<()>
    where
        R: StepRunner<S>,
    {
        let StepTensors { q, k, v } = tensors;
        S::check_options(options)?;
        self.layer(layer, q, (&k, &v), options, outputs)
    }

    /// Stores the rows of a layer and attends to them: at once, or a few tokens at a time.
    fn layer(
        &mut self,
        layer: usize,
        q: S::Rows<'_>,
        (k, v): (&S::Rows<'_>, &S::Rows<'_>),
        options: &S::Options<'_>,
        outputs: &mut S::Outputs<'_>,
    ) -> Result<()>
    where
        R: StepRunner<S>,
    {
        let at = self.tokens.groups.find(layer)?;
        if self.groups[at.group].last_from.is_some() {
            return self.attend_in_windows(layer, &q, (k, v), options, outputs);
        }
        self.write(layer, k, v)?;
        self.attend_to(layer, q, options, outputs)
    }

    /// Stores the rows of a layer, [`KEPT_STEP`] tokens of a sequence at a time, and attends to them before the next ones take the places of
    /// tokens that these still see in 16 bits.
    fn attend_in_windows(
        &mut self,
        layer: usize,
        q: &S::Rows<'_>,
        (k, v): (&S::Rows<'_>, &S::Rows<'_>),
        options: &S::Options<'_>,
        outputs: &mut S::Outputs<'_>,
    ) -> Result<()>
    where
        R: StepRunner<S>,
    {
        let (q_heads, dtype) = S::query(q)?;
        let NewTokens { groups, batch, .. } = &mut self.tokens;
        let at = groups.find(layer)?;
        let last_from = self.groups[at.group].last_from.as_deref().unwrap_or_default();
        let longest = batch.iter().map(|&(_, tokens)| tokens).max().unwrap_or(0);
        let refused = |what| CacheError::Keep(KeepError::Step { what, tokens: longest, max: KEPT_STEP });
        if let Some(what) = S::not_in_windows(options, outputs) {
            return Err(refused(what).into());
        }
        let total = total_tokens(batch);
        let (cache, named) = (&mut groups.caches[at.group], groups.layers.unwrap_or_default());
        let name = |error| name_layer::<S>(error, named, at.group).into();
        cache.desc().check_rows(total, (S::shape(k), S::shape(v)))?;
        for (tensor, got) in [("q", S::shape(q)), ("out", S::out_shape(outputs))] {
            let expected = [got[0], got[1], total, got[3]];
            if got != expected {
                return Err(RunError::Shape { tensor, expected, got }.into());
            }
        }
        let mut desc = ProblemDesc::over(cache.desc(), q_heads, dtype, &[]);
        S::set(options, &mut desc);
        if desc.visibility.right() != Some(0) {
            return Err(refused("visibility of later keys").into());
        }
        if !matches!(desc.q_offset, None | Some(QOffset::BottomRight)) {
            return Err(refused("a q_offset").into());
        }
        let mut row = 0;
        for (index, &(seq, tokens)) in batch.iter().enumerate() {
            let start = self.lens[index].kv_len - tokens;
            for first in (0..tokens).step_by(KEPT_STEP) {
                let q_len = KEPT_STEP.min(tokens - first);
                let (rows, end) = (row + first..row + first + q_len, start + first + q_len);
                let (k, v) = (S::rows(k, rows.clone())?, S::rows(v, rows.clone())?);
                cache.write_piece(at.layer, (seq, end - q_len..end), &k, &v).map_err(name)?;
                let (tables, kept) = cache.tables_at(seq, end, last_from[index]).map_err(Into::into)?;
                let lens = [SeqLens { q_len, kv_len: end }];
                let mut desc = describe(cache, (&tables, Some(&kept)), &lens, q_heads, dtype);
                S::set(options, &mut desc);
                desc.q_offset = Some(QOffset::BottomRight);
                let of =
                    StepLayer { cache, index: at.layer, desc: &desc, tables: &tables, kept: Some(&kept) };
                let mut outputs = S::rows_of_outputs(outputs, rows.clone())?;
                self.runner.attend(of, S::rows(q, rows)?, options, &mut outputs)?;
            }
            row += tokens;
        }
        self.written[layer] = true;
        Ok(())
    }

    fn write(&mut self, layer: usize, k: &S::Rows<'_>, v: &S::Rows<'_>) -> Result<()> {
        let NewTokens { groups, batch, .. } = &mut self.tokens;
        let at = groups.find(layer)?;
        let written = groups.caches[at.group].write(at.layer, batch, k, v);
        let named = |error| name_layer::<S>(error, groups.layers.unwrap_or_default(), at.group);
        written.map_err(|error| named(error).into())?;
        self.written[layer] = true;
        Ok(())
    }

    fn attend_to(
        &mut self,
        layer: usize,
        q: S::Rows<'_>,
        options: &S::Options<'_>,
        outputs: &mut S::Outputs<'_>,
    ) -> Result<()>
    where
        R: StepRunner<S>,
    {
        let (q_heads, dtype) = S::query(&q)?;
        let at = self.tokens.groups.find(layer)?;
        let (cache, group) = (&self.tokens.groups.caches[at.group], &mut self.groups[at.group]);
        let is = |desc: &ProblemDesc| (desc.dims.q_heads, desc.dtype) == (q_heads, dtype);
        let desc = group.desc.take().filter(is);
        let tables = (&group.tables, group.kept.as_ref());
        let mut desc = desc.unwrap_or_else(|| describe(cache, tables, &self.lens, q_heads, dtype));
        S::set(options, &mut desc);
        desc.q_offset = desc.q_offset.or(Some(QOffset::BottomRight));
        let desc = &*group.desc.insert(desc);
        self.runner.attend(
            StepLayer { cache, index: at.layer, desc, tables: &group.tables, kept: group.kept.as_ref() },
            q,
            options,
            outputs,
        )
    }

    /// Keeps the tokens of the step.
    ///
    /// # Errors
    /// [`Error::Cache`](crate::Error::Cache) with [`CacheError::LayerNotWritten`] where the rows of a layer were not stored; the step takes its
    /// tokens back then.
    pub fn finish(mut self) -> Result<()> {
        let has_tokens = self.tokens.batch.iter().any(|&(_, tokens)| tokens > 0);
        if let Some(layer) = self.written.iter().position(|written| !written)
            && has_tokens
        {
            return Err(CacheError::LayerNotWritten { layer }.into());
        }
        self.tokens.batch.clear();
        Ok(())
    }

    /// Lengths of the sequences in this step, in the order of the batch.
    #[must_use]
    pub fn lens(&self) -> &[SeqLens] {
        &self.lens
    }

    /// The position of each new token in its sequence, in the order of the rows of q: what rotary embeddings need.
    ///
    /// ```
    /// # use flashtile::{CacheDesc, CacheLayout, CacheShape, Codec, KvCache, KvCacheExt};
    /// # let shape = CacheShape { layers: 1, kv_heads: 1, head_dim: 16, value_dim: 16 };
    /// # let mut cache = KvCache::new(CacheDesc::new(CacheLayout::Contiguous { slots: 2, capacity: 8 }, shape, Codec::F32))?;
    /// # let (a, b) = (cache.create()?, cache.create()?);
    /// cache.extend(&[(a, 5)])?;
    /// let step = cache.step(&[(a, 1), (b, 3)])?;
    /// assert_eq!(step.positions().collect::<Vec<_>>(), [5, 0, 1, 2]);
    /// # Ok::<(), flashtile::Error>(())
    /// ```
    pub fn positions(&self) -> impl Iterator<Item = usize> + '_ {
        self.lens.iter().flat_map(|lens| lens.kv_len - lens.q_len..lens.kv_len)
    }
}

/// The first of the last kept tokens of each sequence, where a step of this batch is computed [`KEPT_STEP`] tokens at a time.
fn last_from<S: StepStore>(
    cache: &KvCache<S>,
    batch: &[(SeqId, usize)],
    seqs: &[SeqId],
) -> Result<Option<Vec<usize>>> {
    if cache.desc().keep_last == 0 || batch.iter().all(|&(_, tokens)| tokens <= KEPT_STEP) {
        return Ok(None);
    }
    Ok(cache.kept_tables(seqs).map_err(Into::into)?.map(|kept| kept.tokens.last_from))
}

/// A layer of a step without options.
fn describe<S: StepStore>(
    cache: &KvCache<S>,
    (tables, kept): (&BlockTables, Option<&KeptTables>),
    lens: &[SeqLens],
    q_heads: usize,
    dtype: Dtype,
) -> ProblemDesc {
    let cache = cache.desc();
    let mut desc = ProblemDesc::over(cache, q_heads, dtype, lens);
    desc.kept = kept.map(|kept| kept.tokens.clone());
    if S::READS_PREFIXES_ONCE && [cache.k, cache.v].iter().all(|codec| codec.dtype().is_some()) {
        desc.prefixes = tables.shared_prefixes(1);
    }
    desc
}
