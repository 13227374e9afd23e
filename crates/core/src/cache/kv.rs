//! A KV cache, on the host or on a device.

use super::desc::CacheDesc;
use super::error::CacheError;
use super::kept_tables::KeptTables;
use super::key_error::KeyTransformError;
use super::page_store::PageStore;
use super::seq_id::SeqId;
use super::snapshot::Snapshot;
use super::store::HostStore;
use super::table::{PageCopy, RowRun, SequenceTable, reserve, total_tokens};
use crate::block_tables::BlockTables;
use crate::codec::key_transform::IDENTITY;
use crate::codec::{CodePages, KeyTransform, KvView, Side};
use crate::inputs::{Inputs, KeptInputs, KeptPages};
use crate::tensor::TensorView;
use std::ops::Range;

/// Keys and values of many sequences: in main memory, or in the memory of a device by another [`PageStore`].
///
/// An operation that is refused changes nothing. Sequences never see each other's tokens: pages shared by
/// [`KvCache::fork`] are copied before one of the sequences writes to them. A batch lists a sequence at most once.
///
/// Operations return the error type of the store, [`PageStore::Error`]: [`CacheError`] in main memory; on a
/// device it also has the failures of the device.
#[derive(Debug)]
pub struct KvCache<S: PageStore = HostStore> {
    desc: CacheDesc,
    table: SequenceTable,
    store: S,
    /// Slots of the tokens that are kept in 16 bits.
    kept: Kept<S>,
    /// `[layers]`: whether rows have been stored, which fixes the transform of the layer's keys.
    written: Vec<bool>,
    /// Scratch memory, empty between operations.
    copies: Vec<PageCopy>,
    runs: Vec<RowRun>,
}

/// The slots of the kept tokens of a cache: [`kept`](super::kept) has their operations.
#[derive(Debug)]
pub(super) struct Kept<S: PageStore> {
    /// Tokens that the slot of the first ones holds.
    pub(super) keep_first: usize,
    pub(super) keep_last: usize,
    pub(super) first: Option<Box<KvCache<S>>>,
    pub(super) last: Option<Box<KvCache<S>>>,
}

/// Memory use of a cache. Bookkeeping, a few bytes per page, is not counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct CacheMemory {
    /// Bytes of all pools. The system provides them on first write.
    pub bytes_reserved: usize,
    /// Bytes of the pages in use.
    pub bytes_used: usize,
    /// Pages of the cache. A slot is a page.
    pub pages: usize,
    /// Free pages.
    pub pages_free: usize,
    /// Pages with several holders.
    pub pages_shared: usize,
    /// Sequences.
    pub sequences: usize,
    /// Kept tokens, summed over sequences: shared ones count once for each.
    pub tokens: usize,
}

impl CacheMemory {
    /// Memory use of a cache with this description and table.
    #[must_use]
    pub fn of(desc: &CacheDesc, table: &SequenceTable) -> Self {
        let usage = table.usage();
        let (pages, page) = desc.layout.pages();
        let page_bytes = page * desc.token_bytes();
        Self {
            bytes_reserved: pages * page_bytes,
            bytes_used: (pages - usage.free) * page_bytes,
            pages,
            pages_free: usage.free,
            pages_shared: usage.shared,
            sequences: usage.sequences,
            tokens: usage.tokens,
        }
    }
}

impl KvCache {
    /// An empty cache in main memory. Its pools start on cache lines and are zero; untouched pages take address space only.
    ///
    /// # Errors
    /// [`CacheError::Dimension`], [`CacheError::CodecDim`], [`CacheError::KeyColumns`], [`CacheError::Keep`], [`CacheError::SizeOverflow`]
    /// or [`CacheError::Memory`].
    pub fn new(desc: CacheDesc) -> Result<Self, CacheError> {
        desc.validate()?;
        Self::with_store(HostStore::new(&desc)?)
    }

    /// Replaces a sequence's rows in one layer by rows that were stored elsewhere, byte for byte. `k` and `v` are
    /// slots `[1, kv_heads, capacity, dim]` in the codecs of the cache, such as [`CodePages::from_mlx`] makes: each
    /// kept token `j` becomes row `j % capacity`. Add tokens to a new sequence by [`KvCache::extend`] first. Pages
    /// shared with another sequence are copied first, in all layers. Keys must have been stored with the layer's mean
    /// and factors ([`KvCache::set_key_mean`], [`KvCache::set_key_factors`]), or both without.
    ///
    /// # Errors
    /// [`CacheError::Layer`], [`CacheError::Shape`] (also if a slot has fewer rows than there are kept tokens),
    /// [`CacheError::Codec`], [`CacheError::NotKeyColumns`], [`CacheError::KeyTransform`], [`CacheError::OutOfPages`], [`CacheError::ForeignSequence`],
    /// [`CacheError::RemovedSequence`] or [`CacheError::Memory`].
    pub fn load(
        &mut self,
        layer: usize,
        seq: SeqId,
        k: &KvView<'_>,
        v: &KvView<'_>,
    ) -> Result<(), CacheError> {
        self.desc.check_layer(layer)?;
        let kept = self.table.kept(seq)?;
        let CacheDesc { k: k_codec, v: v_codec, head_dim, value_dim, kv_storage, .. } = self.desc;
        let [k_shape, v_shape] = kv_storage.shapes([k, v]);
        let slots = [("k", k, k_shape, k_codec, head_dim), ("v", v, v_shape, v_codec, value_dim)];
        for (tensor, slot, got, expected, dim) in slots {
            if slot.codec() != expected {
                return Err(CacheError::Codec { tensor, expected, got: slot.codec() });
            }
            let expected = [1, self.desc.kv_heads, got[2].max(kept.len()).max(1), dim];
            if got != expected {
                return Err(CacheError::Shape { tensor, expected, got });
            }
        }
        let of = &self.store.layers[layer];
        if of.v.is_none() && !v.is_first_columns_of(k) {
            return Err(CacheError::NotKeyColumns);
        }
        let v_transform = if of.v.is_some() { v.key_transform() } else { &IDENTITY };
        let differs = self.store.key_transform(layer).difference(k.key_transform());
        if let Some(part) = differs.or(IDENTITY.difference(v_transform)) {
            return Err(KeyTransformError::Rows { layer, part }.into());
        }
        self.table.prepare_write(&[(seq, kept.len())], &mut self.copies)?;
        self.copy_pages()?;
        let of = &mut self.store.layers[layer];
        self.written[layer] |= !kept.is_empty();
        for run in self.table.runs(seq, kept.clone())? {
            of.k.load(run, kept.start + run.at, k);
            if let Some(pool) = &mut of.v {
                pool.load(run, kept.start + run.at, v);
            }
        }
        self.kept.drop_rows(seq)
    }

    /// A sequence's rows in one layer as a slot, byte for byte: pages `[1, kv_heads, capacity, dim]` of keys or
    /// values whose row `j % capacity` is kept token `j`; the other rows are zero. The inverse of [`KvCache::load`].
    ///
    /// # Errors
    /// [`CacheError::Layer`], [`CacheError::NotCodes`], [`CacheError::Capacity`] if more tokens are kept than the
    /// slot has rows, [`CacheError::NoValueRows`], [`CacheError::ForeignSequence`], [`CacheError::RemovedSequence`] or
    /// [`CacheError::Memory`].
    pub fn slot(
        &self,
        layer: usize,
        seq: SeqId,
        side: Side,
        capacity: usize,
    ) -> Result<CodePages, CacheError> {
        self.desc.check_layer(layer)?;
        let kept = self.table.kept(seq)?;
        let of = &self.store.layers[layer];
        let (tensor, pool, codec, dim) = match side {
            Side::Keys => ("k", &of.k, self.desc.k, self.desc.head_dim),
            Side::Values => {
                let pool = of.v.as_ref().ok_or(CacheError::NoValueRows)?;
                ("v", pool, self.desc.v, self.desc.value_dim)
            }
        };
        let codes = pool.codes().ok_or(CacheError::NotCodes { tensor, codec })?;
        if capacity < kept.len().max(1) {
            return Err(CacheError::Capacity { len: kept.len().max(1), capacity });
        }
        let heads = self.desc.kv_heads;
        let mut bytes = vec![0u8; codec.row_bytes(dim)];
        let size = capacity.saturating_mul(heads).saturating_mul(bytes.len());
        let mut slot = CodePages::new(codec, side, [1, heads, capacity, dim])
            .map_err(|_| CacheError::Memory { bytes: size })?;
        slot.set_key_transform(codes.key_transform().clone());
        for run in self.table.runs(seq, kept.clone())? {
            for (head, token) in (0..heads).flat_map(|head| (0..run.tokens).map(move |token| (head, token))) {
                codes.export(run.page, head, run.row + token, &mut bytes);
                slot.import(0, head, (kept.start + run.at + token) % capacity, &bytes);
            }
        }
        Ok(slot)
    }

    /// The pools of a layer: K `[pages, kv_heads, page_size, head_dim]` and V `[pages, kv_heads, page_size, value_dim]`. Both are dense,
    /// except that V is a view of K where values are columns of the keys. Rows without a token must not be read.
    ///
    /// # Errors
    /// [`CacheError::Layer`] or [`CacheError::NotElements`].
    pub fn pages(&self, layer: usize) -> Result<(TensorView<'_>, TensorView<'_>), CacheError> {
        self.desc.check_layer(layer)?;
        let (k, v) = self.store.layers[layer].kv_views();
        let (k_codec, v_codec) = (self.desc.k, self.desc.v);
        let k = k.elements().ok_or(CacheError::NotElements { tensor: "k", codec: k_codec })?;
        let v = v.elements().ok_or(CacheError::NotElements { tensor: "v", codec: v_codec })?;
        Ok((*k, *v))
    }

    /// The pools of a layer in any codec, as inputs of attention.
    ///
    /// # Errors
    /// [`CacheError::Layer`].
    pub fn kv_pages(&self, layer: usize) -> Result<(KvView<'_>, KvView<'_>), CacheError> {
        self.desc.check_layer(layer)?;
        Ok(self.store.layers[layer].kv_views())
    }

    /// Inputs of attention over one layer. `tables` come from [`KvCache::tables`] for the sequences of the batch.
    ///
    /// # Errors
    /// The errors of [`KvCache::kv_pages`].
    pub fn inputs<'a>(
        &'a self,
        layer: usize,
        q: TensorView<'a>,
        tables: &'a BlockTables,
    ) -> Result<Inputs<'a>, CacheError> {
        let (k, v) = self.kv_pages(layer)?;
        Ok(Inputs::paged_kv(q, k, v, tables))
    }

    /// Inputs of attention over the tokens of a layer that are kept in 16 bits, for [`Inputs::kept`]. `tables` come from
    /// [`KvCache::kept_tables`] for the sequences of the batch.
    ///
    /// # Errors
    /// The errors of [`KvCache::kv_pages`].
    pub fn kept_inputs<'a>(
        &'a self,
        layer: usize,
        tables: &'a KeptTables,
    ) -> Result<KeptInputs<'a>, CacheError> {
        let pages = |cache: Option<&'a Self>, tables: &'a Option<BlockTables>| -> Result<_, CacheError> {
            let (Some(cache), Some(tables)) = (cache, tables) else { return Ok(None) };
            let (k, v) = cache.kv_pages(layer)?;
            Ok(Some(KeptPages { k, v, tables }))
        };
        let [first, last] = self.kept_caches();
        Ok(KeptInputs { first: pages(first, &tables.first)?, last: pages(last, &tables.last)? })
    }

    /// Fills every row without a token with bytes 0xFF, a NaN in every codec, so that reading it shows.
    #[cfg(feature = "testkit")]
    pub fn poison_unused(&mut self) {
        self.store.poison(&self.table.rows_held());
        self.kept.caches_mut().for_each(Self::poison_unused);
    }
}

impl<S: PageStore> KvCache<S> {
    /// An empty cache whose rows are in a store.
    ///
    /// # Errors
    /// As [`KvCache::new`].
    pub fn with_store(store: S) -> Result<Self, S::Error> {
        let desc = *store.desc();
        desc.validate()?;
        let table = SequenceTable::new(desc.layout)?;
        let mut written = Vec::new();
        reserve(&mut written, desc.layers)?;
        written.resize(desc.layers, false);
        let kept = Kept::new(&desc, &store)?;
        let mut cache = Self { desc, table, store, kept, written, copies: Vec::new(), runs: Vec::new() };
        cache.name_kept_sequences();
        Ok(cache)
    }

    /// The memory of the rows.
    #[must_use]
    pub const fn store(&self) -> &S {
        &self.store
    }

    /// The memory of the rows, to change how it is reached: a device's queue, not its contents.
    pub const fn store_mut(&mut self) -> &mut S {
        &mut self.store
    }

    /// [`KvCache::store_mut`] of all rows: of codes or elements, and of the tokens that are kept in 16 bits.
    pub fn stores_mut(&mut self) -> impl Iterator<Item = &mut S> {
        std::iter::once(&mut self.store).chain(self.kept.caches_mut().map(|cache| &mut cache.store))
    }

    /// Checks that every row written since the last call was stored. A cache in main memory refuses rows when they are written; one
    /// on a device finds out as it encodes them, and this waits for it.
    ///
    /// # Errors
    /// [`CacheError::Row`]: the first of the rows that were not stored in the first layer that has any, in keys before values.
    pub fn check_stored(&mut self) -> Result<(), S::Error> {
        self.store.check_stored()?;
        self.kept.caches_mut().try_for_each(Self::check_stored)
    }

    /// The description this cache was made from.
    #[must_use]
    pub const fn desc(&self) -> &CacheDesc {
        &self.desc
    }

    /// A new, empty sequence. It takes a slot in a contiguous or ring cache, and no page in a paged one.
    ///
    /// # Errors
    /// [`CacheError::OutOfSlots`] or [`CacheError::Memory`].
    pub fn create(&mut self) -> Result<SeqId, S::Error> {
        let seq = self.table.create()?;
        let kept = self.kept.create();
        self.begun(seq, kept)
    }

    /// Ends a sequence and frees the pages that only it holds. Cost: `O(its pages)`, without touching their memory.
    ///
    /// # Errors
    /// [`CacheError::ForeignSequence`], or [`CacheError::RemovedSequence`] the second time.
    pub fn remove(&mut self, seq: SeqId) -> Result<(), S::Error> {
        self.table.remove(seq)?;
        self.kept.caches_mut().try_for_each(|cache| cache.remove(seq))
    }

    /// Length of a sequence, including tokens that are no longer kept: the position of its next token.
    ///
    /// # Errors
    /// [`CacheError::ForeignSequence`] or [`CacheError::RemovedSequence`].
    pub fn len(&self, seq: SeqId) -> Result<usize, S::Error> {
        Ok(self.table.kept(seq)?.end)
    }

    /// First kept token of a sequence: 0 unless a ring has overwritten it or [`KvCache::forget`] has dropped it.
    ///
    /// # Errors
    /// [`CacheError::ForeignSequence`] or [`CacheError::RemovedSequence`].
    pub fn first(&self, seq: SeqId) -> Result<usize, S::Error> {
        Ok(self.table.kept(seq)?.start)
    }

    /// Adds tokens to each listed sequence, in all layers. Their contents are unspecified until [`KvCache::write`]
    /// stores them. Takes the pages of the new tokens, and one more for a sequence whose last page is shared and not
    /// full. Rings give up their oldest tokens.
    ///
    /// # Errors
    /// [`CacheError::OutOfPages`], [`CacheError::Capacity`], [`CacheError::ForeignSequence`],
    /// [`CacheError::RemovedSequence`], [`CacheError::DuplicateSequence`] or [`CacheError::Memory`].
    pub fn extend(&mut self, batch: &[(SeqId, usize)]) -> Result<(), S::Error> {
        self.table.extend(batch, &mut self.copies)?;
        if let Err(error) = self.copy_pages().and_then(|()| self.extend_kept(batch)) {
            self.take_back(batch)?;
            return Err(error);
        }
        Ok(())
    }

    /// [`KvCache::extend`] of the tokens that are kept in 16 bits.
    fn extend_kept(&mut self, batch: &[(SeqId, usize)]) -> Result<(), S::Error> {
        let lens = batch.iter().map(|&(seq, _)| Ok(self.table.kept(seq)?.end));
        let lens = lens.collect::<Result<Vec<_>, CacheError>>()?;
        self.kept.extend(batch, &lens)
    }

    /// Takes the last tokens of each listed sequence back, which [`KvCache::extend`] has added.
    ///
    /// # Errors
    /// As [`KvCache::truncate`].
    #[doc(hidden)]
    pub fn take_back(&mut self, batch: &[(SeqId, usize)]) -> Result<(), S::Error> {
        batch.iter().try_for_each(|&(seq, tokens)| {
            let len = self.table.kept(seq)?.end.saturating_sub(tokens);
            self.truncate(seq, len)
        })
    }

    /// Stores K and V of the last tokens of each listed sequence in one layer. `k` is `[1, kv_heads, total,
    /// head_dim]` and `v` `[1, kv_heads, total, value_dim]`, of any dtype: the rows of the sequences one after
    /// another, as many as listed; [`TensorView::packed`] makes such views. Where values are columns of the keys, `v` is
    /// [`k.first_columns(value_dim)`](TensorView::first_columns). Rows of tokens that are no longer kept are skipped.
    ///
    /// Elements are converted to the codec, rounded to nearest even; equal types are copied bit by bit. Quantized
    /// rows are encoded independently, so that their bytes do not depend on how many are written at once. Pages
    /// shared with another sequence are copied before they are written, in all layers.
    ///
    /// # Errors
    /// [`CacheError::Layer`], [`CacheError::Shape`], [`CacheError::NotKeyColumns`], [`CacheError::Row`], [`CacheError::Tokens`],
    /// [`CacheError::OutOfPages`], [`CacheError::ForeignSequence`], [`CacheError::RemovedSequence`],
    /// [`CacheError::DuplicateSequence`] or [`CacheError::Memory`].
    pub fn write(
        &mut self,
        layer: usize,
        batch: &[(SeqId, usize)],
        k: &S::Rows<'_>,
        v: &S::Rows<'_>,
    ) -> Result<(), S::Error> {
        self.desc.check_layer(layer)?;
        self.check_write(layer, total_tokens(batch), k, v)?;
        self.table.prepare_write(batch, &mut self.copies)?;
        self.copy_pages()?;
        self.write_rows(layer, batch, k, v)
    }

    /// [`KvCache::extend`], then [`KvCache::write`] with a pair `(k, v)` for each layer. If any of it is refused,
    /// nothing changes.
    ///
    /// # Errors
    /// [`CacheError::LayerCount`], and the errors of [`KvCache::extend`] and [`KvCache::write`].
    pub fn append(
        &mut self,
        batch: &[(SeqId, usize)],
        layers: &[(S::Rows<'_>, S::Rows<'_>)],
    ) -> Result<(), S::Error> {
        if layers.len() != self.desc.layers {
            return Err(CacheError::LayerCount { got: layers.len(), layers: self.desc.layers }.into());
        }
        for (layer, (k, v)) in layers.iter().enumerate() {
            self.check_write(layer, total_tokens(batch), k, v)?;
        }
        self.extend(batch)?;
        for (layer, (k, v)) in layers.iter().enumerate() {
            self.write_rows(layer, batch, k, v)?;
        }
        Ok(())
    }

    /// Sets the mean `[kv_heads, head_dim]` that is subtracted from the keys of a layer before they are quantized.
    /// Attention adds its effect to the scores in f32. Keys with a constant component, such as projections with a
    /// bias produce, need it: codes then resolve the rest.
    ///
    /// The mean is a constant of the model, measured once, from the keys of a representative prompt, by
    /// [`codec::key_mean`](crate::codec::key_mean). It cannot change once rows are stored in the layer, also where their
    /// sequences have ended. A cache never derives one from the rows that it stores.
    ///
    /// ```
    /// use flashtile::codec::key_mean;
    /// use flashtile::{CacheDesc, CacheLayout, CacheShape, Codec, KvCache, TensorView};
    /// let shape = CacheShape { layers: 1, kv_heads: 2, head_dim: 64, value_dim: 64 };
    /// let layout = CacheLayout::Paged { pages: 64, page_size: 16 };
    /// let mut cache = KvCache::new(CacheDesc::new(layout, shape, Codec::Int8))?;
    /// let keys = vec![3.0f32; 200 * 2 * 64]; // of layer 0, of a prompt of 200 tokens: [tokens, heads, dim]
    /// cache.set_key_mean(0, &key_mean(&TensorView::packed(&keys, [200, 2, 64])?))?;
    /// assert_eq!(cache.key_mean(0)?, Some(&[3.0; 2 * 64][..]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`CacheError::Layer`], or [`CacheError::KeyTransform`] with [`KeyTransformError::Length`], [`KeyTransformError::MeanNotFinite`],
    /// [`KeyTransformError::Fixed`], or [`KeyTransformError::MeanOfElements`] if keys are not quantized.
    pub fn set_key_mean(&mut self, layer: usize, mean: &[f32]) -> Result<(), S::Error> {
        self.desc.check_layer(layer)?;
        self.desc.check_key_mean(mean).map_err(CacheError::from)?;
        let transform = self.open_key_transform(layer)?;
        self.set_key_transform(layer, &transform.with_mean(mean.to_vec()))
    }

    /// Sets the factors `[kv_heads, head_dim]` that the keys of a layer are divided by, after the mean is subtracted and before they are
    /// rotated and quantized. Queries are multiplied by them, so that scores change by rounding only ([`KeyTransform`]). Keys with a few
    /// channels that are much larger than the others need it at 2 to 4 bits: a rotation spreads the error of the large channels over all.
    /// A factor may be negative, which gives the channel the opposite sign in the random signs of the rotation.
    ///
    /// The factors are constants of the model, measured once, from the keys of a representative prompt, by
    /// [`codec::key_factors`](crate::codec::key_factors). Like the mean, they cannot change once rows are stored in the layer.
    ///
    /// ```
    /// use flashtile::codec::{key_factors, key_mean};
    /// use flashtile::{CacheDesc, CacheLayout, CacheShape, Codec, KvCache, TensorView};
    /// let shape = CacheShape { layers: 1, kv_heads: 1, head_dim: 64, value_dim: 64 };
    /// let layout = CacheLayout::Paged { pages: 64, page_size: 16 };
    /// let mut cache = KvCache::new(CacheDesc::new(layout, shape, Codec::Tq3))?;
    /// let keys: Vec<f32> = (0..200 * 64).map(|n| (n % 64 + 1) as f32 * ((n * n % 7) as f32 - 3.0)).collect();
    /// let keys = TensorView::packed(&keys, [200, 1, 64])?; // of layer 0, of a prompt of 200 tokens
    /// let mean = key_mean(&keys);
    /// cache.set_key_mean(0, &mean)?;
    /// cache.set_key_factors(0, &key_factors(&keys, &mean, 0.5))?;
    /// let factors = cache.key_factors(0)?.unwrap();
    /// assert!(factors[60] > 5.0 * factors[0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`CacheError::Layer`], or [`CacheError::KeyTransform`] with [`KeyTransformError::Length`], [`KeyTransformError::FactorRange`],
    /// [`KeyTransformError::Fixed`], or [`KeyTransformError::FactorsOfCodec`] unless the codec of the keys
    /// [takes factors](crate::codec::Codec::supports_key_factors).
    pub fn set_key_factors(&mut self, layer: usize, factors: &[f32]) -> Result<(), S::Error> {
        self.desc.check_layer(layer)?;
        self.desc.check_key_factors(factors).map_err(CacheError::from)?;
        let transform = self.open_key_transform(layer)?;
        self.set_key_transform(layer, &transform.with_factors(factors.to_vec()))
    }

    /// Sets the transform of a layer's keys, also of those that are kept in 16 bits.
    fn set_key_transform(&mut self, layer: usize, transform: &KeyTransform) -> Result<(), S::Error> {
        self.stores_mut().try_for_each(|store| store.set_key_transform(layer, transform.clone()))
    }

    /// The transform of a layer's keys, which may still change.
    fn open_key_transform(&self, layer: usize) -> Result<KeyTransform, CacheError> {
        if self.written[layer] {
            return Err(KeyTransformError::Fixed { layer }.into());
        }
        Ok(self.store.key_transform(layer).clone())
    }

    /// The mean `[kv_heads, head_dim]` that is subtracted from the keys of a layer, if one is set.
    ///
    /// # Errors
    /// [`CacheError::Layer`].
    pub fn key_mean(&self, layer: usize) -> Result<Option<&[f32]>, S::Error> {
        Ok(self.key_transform(layer)?.mean())
    }

    /// The factors `[kv_heads, head_dim]` that the keys of a layer are divided by, if they are set.
    ///
    /// # Errors
    /// [`CacheError::Layer`].
    pub fn key_factors(&self, layer: usize) -> Result<Option<&[f32]>, S::Error> {
        Ok(self.key_transform(layer)?.factors())
    }

    /// The transform of the keys of a layer before they are encoded: mean and factors.
    ///
    /// # Errors
    /// [`CacheError::Layer`].
    pub fn key_transform(&self, layer: usize) -> Result<&KeyTransform, S::Error> {
        self.desc.check_layer(layer)?;
        Ok(self.store.key_transform(layer))
    }

    /// Shortens a sequence to `len` tokens and frees the pages that it no longer needs. Tokens that a ring has
    /// overwritten do not come back: [`KvCache::first`] stays as it is.
    ///
    /// # Errors
    /// [`CacheError::Position`] unless `first <= len <=` the current length, [`CacheError::ForeignSequence`] or
    /// [`CacheError::RemovedSequence`].
    pub fn truncate(&mut self, seq: SeqId, len: usize) -> Result<(), S::Error> {
        self.table.truncate(seq, len)?;
        self.kept.truncate(seq, len)
    }

    /// Drops the tokens before a position and frees the pages of a paged cache that held only those. The other tokens
    /// keep their positions, and a contiguous slot gains no room. No effect if the tokens are dropped already.
    ///
    /// # Errors
    /// [`CacheError::Position`] if `before` is past the end, [`CacheError::ForeignSequence`] or
    /// [`CacheError::RemovedSequence`].
    pub fn forget(&mut self, seq: SeqId, before: usize) -> Result<(), S::Error> {
        self.table.forget(seq, before)?;
        self.kept.forget(seq, before)
    }

    /// A new sequence with the same tokens. In a paged cache the two share all pages, and no memory is copied;
    /// otherwise the tokens are copied to a free slot. [`KvCache::truncate`] of the fork keeps a prefix, such as a
    /// system prompt. A shared page is copied when one of the sequences continues in it.
    ///
    /// # Errors
    /// [`CacheError::OutOfSlots`], [`CacheError::ForeignSequence`], [`CacheError::RemovedSequence`] or
    /// [`CacheError::Memory`].
    pub fn fork(&mut self, seq: SeqId) -> Result<SeqId, S::Error> {
        let fork = self.table.fork(seq, &mut self.copies)?;
        let kept = self.copy_pages().and_then(|()| self.kept.fork(seq));
        self.begun(fork, kept)
    }

    /// Ends a sequence that the table has begun, where the slots of its kept tokens could not be had.
    fn begun(&mut self, seq: SeqId, kept: Result<(), S::Error>) -> Result<SeqId, S::Error> {
        let Err(error) = kept else { return Ok(seq) };
        self.table.remove(seq)?;
        // Tables that began the sequence have used up its name.
        self.skip_to_serial(self.next_serial());
        Err(error)
    }

    /// Copies the kept tokens of a sequence from the cache.
    ///
    /// # Errors
    /// [`CacheError::ForeignSequence`], [`CacheError::RemovedSequence`] or [`CacheError::Memory`].
    pub fn snapshot(&self, seq: SeqId) -> Result<Snapshot, S::Error> {
        let kept = self.table.kept(seq)?;
        let size = kept.len() * self.desc.token_bytes();
        let mut bytes = Vec::new();
        reserve(&mut bytes, size)?;
        bytes.resize(size, 0);
        self.store.export(&self.runs(seq, kept.clone(), 0)?, kept.len(), &mut bytes)?;
        let transforms = (0..self.desc.layers).map(|layer| self.store.key_transform(layer).clone()).collect();
        let [first, last] =
            self.kept_caches().map(|cache| cache.map(|cache| cache.snapshot(seq)).transpose());
        let parts = [first?.map(Box::new), last?.map(Box::new)];
        Ok(Snapshot { desc: self.desc, kept, bytes, transforms, parts })
    }

    /// A new sequence with the tokens of a snapshot, which may come from a cache with another layout. Tokens keep
    /// their positions. A ring keeps as many of the last tokens as it has room for.
    ///
    /// Means and factors of the cache's layers must be the snapshot's, because its rows are relative to them, also where neither has rows
    /// yet: they hold for all sequences of the cache, so that a snapshot does not set them. [`Snapshot::key_mean`] and
    /// [`Snapshot::key_factors`] have the values to give to [`KvCache::set_key_mean`] and [`KvCache::set_key_factors`] of a new cache.
    ///
    /// # Errors
    /// [`CacheError::SnapshotDimension`], [`CacheError::SnapshotCodec`], [`CacheError::SnapshotStorage`], [`CacheError::KeyTransform`],
    /// [`CacheError::Capacity`], [`CacheError::OutOfSlots`], [`CacheError::OutOfPages`] or [`CacheError::Memory`].
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<SeqId, S::Error> {
        snapshot.check(&self.desc)?;
        for (layer, transform) in snapshot.transforms.iter().enumerate() {
            if let Some(part) = self.store.key_transform(layer).difference(transform) {
                return Err(CacheError::from(KeyTransformError::Snapshot { layer, part }).into());
            }
        }
        let seq = self.table.restore(snapshot.kept.clone())?;
        let filled = self.fill(seq, snapshot);
        let kept = filled.and_then(|()| self.kept.restore(snapshot.len(), snapshot.parts()));
        self.begun(seq, kept)
    }

    /// Writes the kept tokens of a sequence in one layer to `k` `[1, kv_heads, len - first, head_dim]` and `v`
    /// `[1, kv_heads, len - first, value_dim]`, of any dtype; rounded to nearest even.
    ///
    /// # Errors
    /// [`CacheError::Layer`], [`CacheError::Shape`], [`CacheError::ForeignSequence`] or
    /// [`CacheError::RemovedSequence`]; nothing is written then.
    pub fn linearize(
        &self,
        seq: SeqId,
        layer: usize,
        k: &mut S::RowsMut<'_>,
        v: &mut S::RowsMut<'_>,
    ) -> Result<(), S::Error> {
        let kept = self.table.kept(seq)?;
        self.desc.check_layer(layer)?;
        self.desc.check_rows(kept.len(), (S::shape_mut(k), S::shape_mut(v)))?;
        self.store.read(layer, &self.runs(seq, kept, 0)?, k, v)
    }

    /// Memory use. Cost: `O(pages + sequences)`.
    #[must_use]
    pub fn memory(&self) -> CacheMemory {
        let codes = CacheMemory::of(&self.desc, &self.table);
        let kept = self.kept.caches().map(Self::memory);
        kept.fold(codes, |sum, kept| CacheMemory {
            bytes_reserved: sum.bytes_reserved + kept.bytes_reserved,
            bytes_used: sum.bytes_used + kept.bytes_used,
            ..sum
        })
    }

    /// Where the tokens of these sequences lie in the pools of every layer. A sequence may be listed more than once.
    /// Valid until an operation changes one of them, such as a [`KvCache::write`] that copies a shared page.
    ///
    /// # Errors
    /// [`CacheError::ForeignSequence`], [`CacheError::RemovedSequence`] or [`CacheError::Memory`].
    pub fn tables(&self, batch: &[SeqId]) -> Result<BlockTables, S::Error> {
        let mut tables = BlockTables::default();
        self.refill_tables(batch, &mut tables)?;
        Ok(tables)
    }

    /// [`KvCache::tables`] into existing tables, whose contents are replaced; allocates only if they are too small.
    ///
    /// # Errors
    /// The errors of [`KvCache::tables`]; `tables` is unchanged then.
    pub fn refill_tables(&self, batch: &[SeqId], tables: &mut BlockTables) -> Result<(), S::Error> {
        Ok(self.table.tables(batch, tables)?)
    }

    /// Which tokens of these sequences are kept in 16 bits, and where they lie; `None` in a cache that keeps none. The problem of attention
    /// needs [`KeptTables::tokens`], and its inputs [`KvCache::kept_inputs`].
    ///
    /// # Errors
    /// The errors of [`KvCache::tables`].
    pub fn kept_tables(&self, batch: &[SeqId]) -> Result<Option<KeptTables>, S::Error> {
        if self.kept.caches().next().is_none() {
            return Ok(None);
        }
        let lens = batch.iter().map(|&seq| Ok(self.table.kept(seq)?.end));
        let lens = lens.collect::<Result<Vec<_>, CacheError>>()?;
        self.kept.tables(batch, &lens).map(Some)
    }

    /// The tables of a sequence as they were when it ended at token `end` of a step, before which the first of the last tokens kept was
    /// `last_from`. Rows of later tokens must not be stored in the layer yet.
    ///
    /// # Errors
    /// The errors of [`KvCache::tables`].
    #[doc(hidden)]
    pub fn tables_at(
        &self,
        seq: SeqId,
        end: usize,
        last_from: usize,
    ) -> Result<(BlockTables, KeptTables), S::Error> {
        let mut tables = self.tables(&[seq])?;
        tables.lens[0] = end;
        let mut kept = self.kept_tables(&[seq])?.unwrap_or_default();
        if let Some(first) = &mut kept.first {
            first.lens[0] = first.lens[0].min(end);
        }
        if let Some(last) = &mut kept.last {
            last.lens[0] = end;
            last.first[0] = last_from.max(end.saturating_sub(last.width * last.page_size)).min(end);
            kept.tokens.last_from[0] = last.first[0];
        }
        for first in &mut kept.tokens.first_lens {
            *first = end.min(*first);
        }
        Ok((tables, kept))
    }

    /// Stores K and V of some of the last tokens of a sequence in one layer, as [`KvCache::write`] does of all of them. The pages of these
    /// tokens must not be shared.
    ///
    /// # Errors
    /// As [`KvCache::write`].
    #[doc(hidden)]
    pub fn write_piece(
        &mut self,
        layer: usize,
        (seq, tokens): (SeqId, Range<usize>),
        k: &S::Rows<'_>,
        v: &S::Rows<'_>,
    ) -> Result<(), S::Error> {
        self.desc.check_layer(layer)?;
        self.check_write(layer, tokens.len(), k, v)?;
        self.write_tokens(layer, &[(seq, tokens)], k, v)
    }

    /// The slots of the first and of the last tokens that are kept in 16 bits, as caches of their own.
    #[doc(hidden)]
    pub fn kept_caches(&self) -> [Option<&Self>; 2] {
        [self.kept.first.as_deref(), self.kept.last.as_deref()]
    }

    /// Where kept tokens of a sequence lie; the first is row `at` of a tensor.
    fn runs(&self, seq: SeqId, tokens: Range<usize>, at: usize) -> Result<Vec<RowRun>, CacheError> {
        Ok(self.table.runs(seq, tokens)?.map(|run| run.from(at)).collect())
    }

    /// Fills a new sequence with the rows of a snapshot.
    fn fill(&mut self, seq: SeqId, snapshot: &Snapshot) -> Result<(), S::Error> {
        let kept = self.table.kept(seq)?;
        let runs = self.runs(seq, kept.clone(), kept.start - snapshot.kept.start)?;
        self.store.import(&runs, snapshot.kept.len(), &snapshot.bytes)?;
        self.written.iter_mut().for_each(|written| *written |= !kept.is_empty());
        Ok(())
    }

    /// Performs the copies listed by the bookkeeping.
    fn copy_pages(&mut self) -> Result<(), S::Error> {
        let copied = if self.copies.is_empty() { Ok(()) } else { self.store.copy(&self.copies) };
        self.copies.clear();
        copied
    }

    /// Checks rows of a layer that exists, before anything changes.
    pub(super) fn check_write(
        &self,
        layer: usize,
        tokens: usize,
        k: &S::Rows<'_>,
        v: &S::Rows<'_>,
    ) -> Result<(), S::Error> {
        self.desc.check_rows(tokens, (S::shape(k), S::shape(v)))?;
        self.store.check(layer, k, v)?;
        self.kept.caches().try_for_each(|cache| cache.store.check(layer, k, v))
    }

    /// Names sequences as another cache does: both give the same identifier to a sequence that is created in both.
    pub(super) fn name_sequences_as(&mut self, other: &Self) {
        self.table.name_sequences_as(&other.table);
        self.name_kept_sequences();
    }

    fn name_kept_sequences(&mut self) {
        let table = &self.table;
        self.kept.caches_mut().for_each(|cache| cache.table.name_sequences_as(table));
    }

    /// Serial of the next sequence.
    pub(super) fn next_serial(&self) -> u64 {
        let kept = self.kept.caches().map(|cache| cache.table.next_serial());
        kept.fold(self.table.next_serial(), u64::max)
    }

    /// Gives the next sequence this serial, which no sequence has had.
    pub(super) fn skip_to_serial(&mut self, serial: u64) {
        self.table.skip_to_serial(serial);
        self.kept.caches_mut().for_each(|cache| cache.table.skip_to_serial(serial));
    }

    /// A sequence of `len` tokens, none of which are kept.
    pub(super) fn create_without_rows(&mut self, len: usize) -> Result<SeqId, S::Error> {
        Ok(self.table.restore(len..len)?)
    }

    /// Drops all tokens of a sequence, which has `len` of them after it.
    pub(super) fn drop_rows(&mut self, seq: SeqId, len: usize) -> Result<(), S::Error> {
        Ok(self.table.clear(seq, len)?)
    }

    /// Stores rows of a batch that has been checked, in pages that are not shared.
    pub(super) fn write_rows(
        &mut self,
        layer: usize,
        batch: &[(SeqId, usize)],
        k: &S::Rows<'_>,
        v: &S::Rows<'_>,
    ) -> Result<(), S::Error> {
        let tokens = batch.iter().map(|&(seq, tokens)| {
            let end = self.table.kept(seq)?.end;
            Ok((seq, end - tokens..end))
        });
        let tokens = tokens.collect::<Result<Vec<_>, CacheError>>()?;
        self.write_tokens(layer, &tokens, k, v)
    }

    /// Stores rows of tokens that sequences have, one sequence after another, in pages that are not shared. Of a ring, rows of the last
    /// tokens that it would keep if the sequence ended with them are stored.
    pub(super) fn write_tokens(
        &mut self,
        layer: usize,
        tokens: &[(SeqId, Range<usize>)],
        k: &S::Rows<'_>,
        v: &S::Rows<'_>,
    ) -> Result<(), S::Error> {
        self.runs.clear();
        let mut row = 0;
        for (seq, tokens) in tokens {
            let kept = self.table.kept_of(*seq, tokens)?;
            let at = row + (kept.start - tokens.start);
            self.runs.extend(self.table.runs(*seq, kept)?.map(|run| run.from(at)));
            row += tokens.len();
        }
        self.written[layer] |= row > 0;
        self.store.write(layer, &self.runs, k, v)?;
        self.kept.write(layer, tokens, k, v)
    }
}
