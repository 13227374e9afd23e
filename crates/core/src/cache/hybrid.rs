//! Caches of models whose layers differ.

use super::desc::CacheDesc;
use super::error::CacheError;
use super::kv::{CacheMemory, KvCache};
use super::page_store::PageStore;
use super::seq_id::SeqId;
use super::snapshot::Snapshot;
use super::store::HostStore;
use super::table::{reserve, total_tokens};
use crate::limits::MAX_LEN;

/// A KV cache whose layers differ in layout, heads, dimensions or codecs: windows in rings beside full layers in pages, as gpt-oss and
/// Gemma have them.
///
/// Layers with equal descriptions form a group, which is a [`KvCache`] with a table of its own. All groups hold the same sequences, named by
/// the same [`SeqId`]s, with the same lengths; which of their tokens are kept depends on the layout of the group.
///
/// An operation that is refused changes no sequence. As in a [`KvCache`], a batch lists a sequence at most once, and operations return the
/// error type of the store.
///
/// ```
/// use flashtile::cache::{CacheDesc, CacheLayout, CacheShape, Codec, HybridCache};
/// let shape = CacheShape { layers: 1, kv_heads: 8, head_dim: 64, value_dim: 64 };
/// // Layers alternate between a window of 128 keys and all keys; steps have at most 64 tokens.
/// let window = CacheDesc::new(CacheLayout::Ring { slots: 4, capacity: 128 + 64 }, shape, Codec::BF16);
/// let full = CacheDesc::new(CacheLayout::Paged { pages: 1024, page_size: 16 }, shape, Codec::Int8);
/// let layers: Vec<CacheDesc> = (0..24).map(|layer| if layer % 2 == 0 { window } else { full }).collect();
/// let mut cache = HybridCache::new(&layers)?;
/// let sequence = cache.create()?;
/// cache.extend(&[(sequence, 40)])?;
/// let (group, layer) = cache.layer(5)?; // the third of the full layers
/// assert_eq!((group.desc().k, layer, group.len(sequence)?), (Codec::Int8, 2, 40));
/// # Ok::<(), flashtile::CacheError>(())
/// ```
#[derive(Debug)]
pub struct HybridCache<S: PageStore = HostStore> {
    groups: Vec<KvCache<S>>,
    layers: Vec<GroupLayer>,
}

/// Where a [`HybridCache`] has a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)]
pub struct GroupLayer {
    /// Index of the group.
    pub group: usize,
    /// Layer of the group.
    pub layer: usize,
}

impl HybridCache {
    /// An empty cache in main memory. Descriptions come in the order of the layers; one with `layers: n` stands for `n` layers that follow
    /// each other.
    ///
    /// # Errors
    /// As [`KvCache::new`], also where there is no layer.
    pub fn new(layers: &[CacheDesc]) -> Result<Self, CacheError> {
        Self::with_stores(layers, |desc| {
            desc.validate()?;
            HostStore::new(desc)
        })
    }
}

impl<S: PageStore> HybridCache<S> {
    /// An empty cache whose rows are in stores, one for each group, that `store` makes. Descriptions are as in [`HybridCache::new`].
    ///
    /// # Errors
    /// As [`KvCache::new`], also where there is no layer, and the errors of `store`.
    pub fn with_stores(
        layers: &[CacheDesc],
        mut store: impl FnMut(&CacheDesc) -> Result<S, S::Error>,
    ) -> Result<Self, S::Error> {
        let (descs, layers) = groups_of(layers)?;
        let mut groups: Vec<KvCache<S>> = Vec::new();
        for desc in descs {
            let mut group = KvCache::with_store(store(&desc)?)?;
            if let Some(first) = groups.first() {
                group.name_sequences_as(first);
            }
            groups.push(group);
        }
        Ok(Self { groups, layers })
    }

    /// Number of layers.
    #[must_use]
    pub const fn layers(&self) -> usize {
        self.layers.len()
    }

    /// The group of a layer, and its index there. The group has the tables, pages and inputs of the layer.
    ///
    /// # Errors
    /// [`CacheError::Layer`].
    pub fn layer(&self, layer: usize) -> Result<(&KvCache<S>, usize), S::Error> {
        let GroupLayer { group, layer } = self.find(layer)?;
        Ok((&self.groups[group], layer))
    }

    /// The groups. Rings come last.
    #[must_use]
    pub fn groups(&self) -> &[KvCache<S>] {
        &self.groups
    }

    /// The groups and where they have each layer, for a step over all of them. Sequences must be created and removed by the
    /// [`HybridCache`].
    #[doc(hidden)]
    pub fn parts_mut(&mut self) -> (&mut [KvCache<S>], &[GroupLayer]) {
        (&mut self.groups, &self.layers)
    }

    /// The memory of the rows of each group, to change how it is reached: a device's queue, not its contents.
    pub fn stores_mut(&mut self) -> impl Iterator<Item = &mut S> {
        self.groups.iter_mut().flat_map(KvCache::stores_mut)
    }

    /// A new, empty sequence. It takes a slot in contiguous and ring groups.
    ///
    /// # Errors
    /// As [`KvCache::create`].
    pub fn create(&mut self) -> Result<SeqId, S::Error> {
        self.begin(|_, group| group.create())
    }

    /// Ends a sequence.
    ///
    /// # Errors
    /// As [`KvCache::remove`].
    pub fn remove(&mut self, seq: SeqId) -> Result<(), S::Error> {
        self.groups.iter_mut().try_for_each(|group| group.remove(seq))
    }

    /// Length of a sequence: the position of its next token.
    ///
    /// # Errors
    /// As [`KvCache::len`].
    pub fn len(&self, seq: SeqId) -> Result<usize, S::Error> {
        self.groups[0].len(seq)
    }

    /// First token that every layer keeps.
    ///
    /// # Errors
    /// As [`KvCache::first`].
    pub fn first(&self, seq: SeqId) -> Result<usize, S::Error> {
        self.groups.iter().try_fold(0, |first, group| Ok(group.first(seq)?.max(first)))
    }

    /// Adds tokens to each listed sequence, in all layers, as [`KvCache::extend`].
    ///
    /// # Errors
    /// As [`KvCache::extend`].
    pub fn extend(&mut self, batch: &[(SeqId, usize)]) -> Result<(), S::Error> {
        for index in 0..self.groups.len() {
            // Rings, which cannot take back the tokens that they give up, come last and have room for any batch that a group before them took.
            if let Err(error) = self.groups[index].extend(batch) {
                self.groups[..index].iter_mut().try_for_each(|group| group.take_back(batch))?;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Stores K and V of the last tokens of each listed sequence in one layer, as [`KvCache::write`].
    ///
    /// # Errors
    /// As [`KvCache::write`].
    pub fn write(
        &mut self,
        layer: usize,
        batch: &[(SeqId, usize)],
        k: &S::Rows<'_>,
        v: &S::Rows<'_>,
    ) -> Result<(), S::Error> {
        let GroupLayer { group, layer } = self.find(layer)?;
        let written = self.groups[group].write(layer, batch, k, v);
        written.map_err(|error| name_layer::<S>(error, &self.layers, group))
    }

    /// [`HybridCache::extend`], then [`HybridCache::write`] with a pair `(k, v)` for each layer. If any of it is refused, no sequence
    /// changes.
    ///
    /// # Errors
    /// As [`KvCache::append`].
    pub fn append(
        &mut self,
        batch: &[(SeqId, usize)],
        rows: &[(S::Rows<'_>, S::Rows<'_>)],
    ) -> Result<(), S::Error> {
        if rows.len() != self.layers() {
            return Err(CacheError::LayerCount { got: rows.len(), layers: self.layers() }.into());
        }
        for (at, (k, v)) in self.layers.iter().zip(rows) {
            let checked = self.groups[at.group].check_write(at.layer, total_tokens(batch), k, v);
            checked.map_err(|error| name_layer::<S>(error, &self.layers, at.group))?;
        }
        self.extend(batch)?;
        for (at, (k, v)) in self.layers.iter().zip(rows) {
            let written = self.groups[at.group].write_rows(at.layer, batch, k, v);
            written.map_err(|error| name_layer::<S>(error, &self.layers, at.group))?;
        }
        Ok(())
    }

    /// Sets the mean that is subtracted from the keys of a layer, as [`KvCache::set_key_mean`].
    ///
    /// # Errors
    /// As [`KvCache::set_key_mean`].
    pub fn set_key_mean(&mut self, layer: usize, mean: &[f32]) -> Result<(), S::Error> {
        let GroupLayer { group, layer } = self.find(layer)?;
        let set = self.groups[group].set_key_mean(layer, mean);
        set.map_err(|error| name_layer::<S>(error, &self.layers, group))
    }

    /// Sets the factors that the keys of a layer are divided by, as [`KvCache::set_key_factors`].
    ///
    /// # Errors
    /// As [`KvCache::set_key_factors`].
    pub fn set_key_factors(&mut self, layer: usize, factors: &[f32]) -> Result<(), S::Error> {
        let GroupLayer { group, layer } = self.find(layer)?;
        let set = self.groups[group].set_key_factors(layer, factors);
        set.map_err(|error| name_layer::<S>(error, &self.layers, group))
    }

    /// Shortens a sequence to `len` tokens in all layers.
    ///
    /// # Errors
    /// [`CacheError::Position`] unless [`HybridCache::first`] `<= len <=` the current length, [`CacheError::ForeignSequence`] or
    /// [`CacheError::RemovedSequence`].
    pub fn truncate(&mut self, seq: SeqId, len: usize) -> Result<(), S::Error> {
        let (min, max) = (self.first(seq)?, self.len(seq)?);
        if len < min || len > max {
            return Err(CacheError::Position { seq, got: len, min, max }.into());
        }
        self.groups.iter_mut().try_for_each(|group| group.truncate(seq, len))
    }

    /// Drops the tokens before a position in all layers, as [`KvCache::forget`].
    ///
    /// # Errors
    /// As [`KvCache::forget`].
    pub fn forget(&mut self, seq: SeqId, before: usize) -> Result<(), S::Error> {
        // Every group has the same length, so that the first refuses what any would.
        self.groups.iter_mut().try_for_each(|group| group.forget(seq, before))
    }

    /// A new sequence with the same tokens. Paged groups share their pages with it, the others copy their slots.
    ///
    /// # Errors
    /// As [`KvCache::fork`].
    pub fn fork(&mut self, seq: SeqId) -> Result<SeqId, S::Error> {
        self.begin(|_, group| group.fork(seq))
    }

    /// Copies the kept tokens of a sequence from the cache: a snapshot for each group.
    ///
    /// # Errors
    /// As [`KvCache::snapshot`].
    pub fn snapshot(&self, seq: SeqId) -> Result<Vec<Snapshot>, S::Error> {
        self.groups.iter().map(|group| group.snapshot(seq)).collect()
    }

    /// A new sequence with the tokens of the snapshots of one sequence, one for each group.
    ///
    /// # Errors
    /// As [`KvCache::restore`]; [`CacheError::SnapshotDimension`] also where the number of snapshots is not that of the groups, or they
    /// differ in length.
    pub fn restore(&mut self, snapshots: &[Snapshot]) -> Result<SeqId, S::Error> {
        let differ = |name, expected, got| Err(CacheError::SnapshotDimension { name, expected, got }.into());
        if snapshots.len() != self.groups.len() {
            return differ("groups", self.groups.len(), snapshots.len());
        }
        let len = snapshots[0].len();
        if let Some(other) = snapshots.iter().find(|snapshot| snapshot.len() != len) {
            return differ("length", len, other.len());
        }
        self.begin(|index, group| group.restore(&snapshots[index]))
    }

    /// Checks that every row written since the last call was stored, as [`KvCache::check_stored`].
    ///
    /// # Errors
    /// As [`KvCache::check_stored`].
    pub fn check_stored(&mut self) -> Result<(), S::Error> {
        self.groups.iter_mut().enumerate().try_for_each(|(group, cache)| {
            cache.check_stored().map_err(|error| name_layer::<S>(error, &self.layers, group))
        })
    }

    /// Memory use of all groups: bytes and pages added up, tokens of the group that keeps most.
    #[must_use]
    pub fn memory(&self) -> CacheMemory {
        let mut groups = self.groups.iter().map(KvCache::memory);
        let first = groups.next().unwrap_or_default();
        groups.fold(first, |sum, group| CacheMemory {
            bytes_reserved: sum.bytes_reserved + group.bytes_reserved,
            bytes_used: sum.bytes_used + group.bytes_used,
            pages: sum.pages + group.pages,
            pages_free: sum.pages_free + group.pages_free,
            pages_shared: sum.pages_shared + group.pages_shared,
            sequences: sum.sequences,
            tokens: sum.tokens.max(group.tokens),
        })
    }

    fn find(&self, layer: usize) -> Result<GroupLayer, CacheError> {
        let layers = self.layers();
        self.layers.get(layer).copied().ok_or(CacheError::Layer { got: layer, layers })
    }

    /// Begins a sequence in every group, or in none.
    fn begin(
        &mut self,
        mut begin: impl FnMut(usize, &mut KvCache<S>) -> Result<SeqId, S::Error>,
    ) -> Result<SeqId, S::Error> {
        let mut begun = Vec::new();
        for (index, group) in self.groups.iter_mut().enumerate() {
            match begin(index, group) {
                Ok(seq) => begun.push(seq),
                Err(error) => {
                    for (group, seq) in self.groups.iter_mut().zip(begun) {
                        group.remove(seq)?;
                    }
                    // The groups that began the sequence have used up its name.
                    let next = self.groups.iter().map(KvCache::next_serial).max().unwrap_or(0);
                    self.groups.iter_mut().for_each(|group| group.skip_to_serial(next));
                    return Err(error);
                }
            }
        }
        debug_assert!(begun.iter().all(|seq| *seq == begun[0]));
        Ok(begun[0])
    }
}

impl<S: PageStore> From<KvCache<S>> for HybridCache<S> {
    /// A cache of one group.
    fn from(cache: KvCache<S>) -> Self {
        let layers = (0..cache.desc().layers).map(|layer| GroupLayer { group: 0, layer }).collect();
        Self { groups: vec![cache], layers }
    }
}

/// An error of a group that names the layer as the model counts it.
#[doc(hidden)]
pub fn name_layer<S: PageStore>(error: S::Error, layers: &[GroupLayer], group: usize) -> S::Error {
    let of_model = |layer| layers.iter().position(|at| *at == GroupLayer { group, layer }).unwrap_or(layer);
    S::map_refusal(error, |refusal| refusal.map_layer(of_model))
}

/// The groups of equal descriptions, rings last, and where they have each layer.
fn groups_of(descs: &[CacheDesc]) -> Result<(Vec<CacheDesc>, Vec<GroupLayer>), CacheError> {
    let total = descs.iter().fold(0usize, |sum, desc| sum.saturating_add(desc.layers));
    if total == 0 || total > MAX_LEN {
        return Err(CacheError::Dimension { name: "layers", got: total, max: MAX_LEN });
    }
    let kind = |desc: &CacheDesc| CacheDesc { layers: 0, ..*desc };
    let mut groups: Vec<CacheDesc> = Vec::new();
    for is_ring in [false, true] {
        for desc in descs.iter().filter(|desc| desc.layout.is_ring() == is_ring).map(kind) {
            if !groups.contains(&desc) {
                groups.push(desc);
            }
        }
    }
    let mut layers = Vec::new();
    reserve(&mut layers, total)?;
    for desc in descs {
        let Some(group) = groups.iter().position(|group| kind(group) == kind(desc)) else {
            unreachable!("every description has its group")
        };
        let of = &mut groups[group].layers;
        layers.extend((*of..*of + desc.layers).map(|layer| GroupLayer { group, layer }));
        *of += desc.layers;
    }
    Ok((groups, layers))
}
