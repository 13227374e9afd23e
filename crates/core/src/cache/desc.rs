//! Descriptions of caches.

use super::error::CacheError;
use super::keep_error::KeepError;
use crate::codec::Codec;
use crate::dtype::Dtype;
use crate::limits::{MAX_HEAD_DIM, MAX_LEN, MAX_SEQUENCES};
use crate::problem::{HeadShape, KvStorage, ProblemDesc, SeqLens};

/// How tokens are laid out. Units are tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum CacheLayout {
    /// Each sequence has a slot for its first `capacity` tokens and cannot grow beyond it.
    Contiguous {
        /// Sequences at a time, at most [`MAX_SEQUENCES`].
        slots: usize,
        /// Tokens of a slot.
        capacity: usize,
    },
    /// Each sequence has a slot for its last `capacity` tokens. Attention with a window of `w` keys to the left and
    /// `n` query rows per step needs a capacity of `w + n`.
    Ring {
        /// Sequences at a time, at most [`MAX_SEQUENCES`].
        slots: usize,
        /// Tokens of a slot.
        capacity: usize,
    },
    /// Sequences take pages as they grow, and forked ones share them.
    Paged {
        /// Pages of the cache.
        pages: usize,
        /// Tokens per page.
        page_size: usize,
    },
}

impl CacheLayout {
    /// Number of pages, and tokens per page. A slot is a page.
    #[must_use]
    pub const fn pages(self) -> (usize, usize) {
        match self {
            Self::Contiguous { slots, capacity } | Self::Ring { slots, capacity } => (slots, capacity),
            Self::Paged { pages, page_size: page } => (pages, page),
        }
    }

    /// Returns true if a sequence gives up its oldest tokens for new ones.
    #[must_use]
    pub const fn is_ring(self) -> bool {
        matches!(self, Self::Ring { .. })
    }
}

/// Layers, heads and dimensions of a model, as its cache has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
#[allow(clippy::exhaustive_structs)]
pub struct CacheShape {
    /// Layers. All of them hold the same tokens.
    pub layers: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of a key.
    pub head_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
}

/// Description of a cache: plain data, checked by [`KvCache::new`](super::KvCache::new).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
#[non_exhaustive]
pub struct CacheDesc {
    /// Layout of the tokens.
    pub layout: CacheLayout,
    /// Layers of the model, which all hold the same tokens.
    pub layers: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of a key: 1 to [`MAX_HEAD_DIM`], and [supported](Codec::supports) by its codec.
    pub head_dim: usize,
    /// Elements of a value, like `head_dim`.
    pub value_dim: usize,
    /// Codec of the keys.
    pub k: Codec,
    /// Codec of the values.
    pub v: Codec,
    /// Where values lie. With [`KvStorage::KeyColumns`] the cache stores keys only, and `v` equals `k`.
    #[cfg_attr(feature = "serde", serde(default))]
    pub kv_storage: KvStorage,
    /// Tokens at the start of each sequence that are kept in 16 bits beside their codes, such as attention sinks. 0: none. A ring, which
    /// gives up its first tokens, keeps none.
    #[cfg_attr(feature = "serde", serde(default))]
    pub keep_first: usize,
    /// Tokens up to a query's own that it reads in 16 bits. 0: none. For each sequence the cache holds [`KEPT_STEP`] rows more: a
    /// step of up to that number of tokens has them for each of its queries, and that number of tokens can be taken back.
    #[cfg_attr(feature = "serde", serde(default))]
    pub keep_last: usize,
    /// Sequences at a time, in a paged cache that keeps tokens in 16 bits: such rows lie in slots. 0 in every other cache.
    #[cfg_attr(feature = "serde", serde(default))]
    pub keep_slots: usize,
}

/// Rows that a cache holds beside [`CacheDesc::keep_last`] for each sequence: the tokens of a step whose queries are computed at once.
pub const KEPT_STEP: usize = 64;

impl CacheDesc {
    /// A cache that stores keys and values with the same codec.
    #[must_use]
    pub const fn new(layout: CacheLayout, shape: CacheShape, codec: Codec) -> Self {
        let CacheShape { layers, kv_heads, head_dim, value_dim } = shape;
        Self {
            layout,
            layers,
            kv_heads,
            head_dim,
            value_dim,
            k: codec,
            v: codec,
            kv_storage: KvStorage::Separate,
            keep_first: 0,
            keep_last: 0,
            keep_slots: 0,
        }
    }

    /// This cache with one codec for the keys and one for the values.
    ///
    /// ```
    /// # use flashtile_core::cache::{CacheDesc, CacheLayout, CacheShape};
    /// # use flashtile_core::codec::Codec;
    /// let shape = CacheShape { layers: 1, kv_heads: 8, head_dim: 128, value_dim: 128 };
    /// let layout = CacheLayout::Paged { pages: 64, page_size: 16 };
    /// let desc = CacheDesc::new(layout, shape, Codec::Int8).with_codecs(Codec::Int8, Codec::Tq5);
    /// assert_eq!((desc.k, desc.v), (Codec::Int8, Codec::Tq5));
    /// ```
    #[must_use]
    pub const fn with_codecs(mut self, k: Codec, v: Codec) -> Self {
        self.k = k;
        self.v = v;
        self
    }

    /// This cache with the first `first` and the last `last` tokens of each sequence in 16 bits, beside their codes. In a paged cache,
    /// [`CacheDesc::keep_slots`] must be set too.
    ///
    /// ```
    /// # use flashtile_core::cache::{CacheDesc, CacheLayout, CacheShape};
    /// # use flashtile_core::codec::Codec;
    /// let shape = CacheShape { layers: 32, kv_heads: 8, head_dim: 128, value_dim: 128 };
    /// let layout = CacheLayout::Contiguous { slots: 1, capacity: 32768 };
    /// let desc = CacheDesc::new(layout, shape, Codec::Tq3).with_kept(4, 128);
    /// // 3 bits for each element and a scale, and 196 rows in 16 bits: a fifth of the bytes of f16.
    /// let f16 = CacheDesc::new(layout, shape, Codec::F16);
    /// assert_eq!((desc.token_bytes(), desc.kept_bytes()), (25_600, 25_690_112));
    /// assert_eq!((32768 * desc.token_bytes() + desc.kept_bytes()) * 100 / (32768 * f16.token_bytes()), 20);
    /// ```
    #[must_use]
    pub const fn with_kept(mut self, first: usize, last: usize) -> Self {
        (self.keep_first, self.keep_last) = (first, last);
        self
    }

    /// Bytes of one token in all layers, as codes; saturating.
    #[must_use]
    pub const fn token_bytes(&self) -> usize {
        let value_bytes = match self.kv_storage {
            KvStorage::Separate => self.v.row_bytes(self.value_dim),
            KvStorage::KeyColumns => 0,
        };
        let row = self.k.row_bytes(self.head_dim).saturating_add(value_bytes);
        self.layers.saturating_mul(self.kv_heads).saturating_mul(row)
    }

    /// Bytes of the rows in 16 bits of all sequences that the cache has room for, in all layers; saturating.
    #[must_use]
    pub fn kept_bytes(&self) -> usize {
        let bytes = |desc: &Self| {
            let (pages, rows) = desc.layout.pages();
            pages.saturating_mul(rows).saturating_mul(desc.token_bytes())
        };
        self.kept_descs().iter().flatten().map(bytes).fold(0, usize::saturating_add)
    }

    /// The caches of the first and of the last tokens that are kept in 16 bits, where there are any.
    pub(super) fn kept_descs(&self) -> [Option<Self>; 2] {
        let slots = match self.layout {
            CacheLayout::Contiguous { slots, .. } | CacheLayout::Ring { slots, .. } => slots,
            CacheLayout::Paged { .. } => self.keep_slots,
        };
        let (k, v) = (self.k.kept(), self.v.kept());
        let of = |layout| Self { layout, k, v, keep_first: 0, keep_last: 0, keep_slots: 0, ..*self };
        let (first, last) = (self.keep_first, self.keep_last.saturating_add(KEPT_STEP));
        [
            (self.keep_first > 0).then(|| of(CacheLayout::Contiguous { slots, capacity: first })),
            (self.keep_last > 0).then(|| of(CacheLayout::Ring { slots, capacity: last })),
        ]
    }

    /// Checks which tokens are kept in 16 bits.
    fn check_kept(&self) -> Result<(), CacheError> {
        let is_paged = matches!(self.layout, CacheLayout::Paged { .. });
        let keeps = self.keep_first > 0 || self.keep_last > 0;
        let max = if keeps && is_paged { MAX_SEQUENCES } else { 0 };
        if self.keep_slots > max || (self.keep_slots == 0) != (max == 0) {
            return Err(KeepError::Slots { got: self.keep_slots, max }.into());
        }
        if self.keep_first > 0 && self.layout.is_ring() {
            return Err(KeepError::FirstOfRing.into());
        }
        let (k, v) = (self.k, self.v);
        let takes = |codec: Codec| codec.dtype().is_some() || codec.kept() != codec;
        if keeps && !(takes(k) && takes(v) && (k.dtype().is_none() || v.dtype().is_none())) {
            return Err(KeepError::Codecs { k, v }.into());
        }
        for (name, got) in [("keep_first", self.keep_first), ("keep_last", self.keep_last)] {
            let max = MAX_LEN - KEPT_STEP;
            if got > max {
                return Err(CacheError::Dimension { name, got, max });
            }
        }
        // The slots of kept tokens are checked like any other cache.
        self.kept_descs().iter().flatten().try_for_each(Self::validate)
    }

    /// Checks that a layer exists.
    ///
    /// # Errors
    /// [`CacheError::Layer`].
    pub fn check_layer(&self, layer: usize) -> Result<(), CacheError> {
        let layers = self.layers;
        if layer >= layers { Err(CacheError::Layer { got: layer, layers }) } else { Ok(()) }
    }

    /// Checks the shapes of K `[1, kv_heads, tokens, head_dim]` and V `[1, kv_heads, tokens, value_dim]`.
    ///
    /// # Errors
    /// [`CacheError::Shape`].
    pub fn check_rows(&self, tokens: usize, (k, v): ([usize; 4], [usize; 4])) -> Result<(), CacheError> {
        for (tensor, got, dim) in [("k", k, self.head_dim), ("v", v, self.value_dim)] {
            let expected = [1, self.kv_heads, tokens, dim];
            if got != expected {
                return Err(CacheError::Shape { tensor, expected, got });
            }
        }
        Ok(())
    }

    /// Shapes of a layer's pools: K `[pages, kv_heads, page_size, head_dim]`, V `[pages, kv_heads, page_size, value_dim]`.
    pub const fn pools(&self) -> [[usize; 4]; 2] {
        let (pages, page) = self.layout.pages();
        [[pages, self.kv_heads, page, self.head_dim], [pages, self.kv_heads, page, self.value_dim]]
    }

    /// Checks the description by itself: dimensions, codecs, and that a pool of all pages is addressable.
    ///
    /// # Errors
    /// The errors of [`KvCache::new`](super::KvCache::new).
    pub fn validate(&self) -> Result<(), CacheError> {
        let pages = match self.layout {
            CacheLayout::Contiguous { slots, capacity } | CacheLayout::Ring { slots, capacity } => {
                [("slots", slots, MAX_SEQUENCES), ("capacity", capacity, MAX_LEN)]
            }
            CacheLayout::Paged { pages, page_size } => {
                [("pages", pages, MAX_LEN), ("page_size", page_size, MAX_LEN)]
            }
        };
        let rows = [
            ("layers", self.layers, MAX_LEN),
            ("kv_heads", self.kv_heads, MAX_LEN),
            ("head_dim", self.head_dim, MAX_HEAD_DIM),
            ("value_dim", self.value_dim, MAX_HEAD_DIM),
        ];
        if let Some((name, got, max)) =
            pages.into_iter().chain(rows).find(|&(_, got, max)| got == 0 || got > max)
        {
            return Err(CacheError::Dimension { name, got, max });
        }
        let rows = self.kv_storage.rows((self.k, self.head_dim), (self.v, self.value_dim));
        for (tensor, codec, dim) in rows.map_err(CacheError::KeyColumns)? {
            if !codec.supports(dim) {
                return Err(CacheError::CodecDim { tensor, codec, dim });
            }
        }
        // Pools are viewed as tensors, whose size in bytes of f32, the widest dtype, must be addressable.
        let [k, v] = self.pools();
        let pool = [k[0], k[1], k[2], k[3].max(v[3])];
        let bytes = pool.into_iter().chain([self.layers, 2]).try_fold(4usize, |n, x| n.checked_mul(x));
        if bytes.is_none_or(|n| isize::try_from(n).is_err()) {
            return Err(CacheError::SizeOverflow { layers: self.layers, pool });
        }
        self.check_kept()
    }
}

impl ProblemDesc {
    /// A step over sequences of a cache, with the cache's heads, dimensions and codecs; see [`ProblemDesc::cached`].
    ///
    /// ```
    /// # use flashtile::{CacheDesc, CacheLayout, CacheShape, Codec, Dtype, ProblemDesc, SeqLens};
    /// let shape = CacheShape { layers: 1, kv_heads: 8, head_dim: 128, value_dim: 128 };
    /// let cache = CacheDesc::new(CacheLayout::Paged { pages: 64, page_size: 16 }, shape, Codec::Int8);
    /// let desc = ProblemDesc::over(&cache, 32, Dtype::BF16, &[SeqLens::decode(601)]);
    /// assert_eq!((desc.dims.kv_heads, desc.k_codec), (8, Some(Codec::Int8)));
    /// ```
    #[must_use]
    pub fn over(cache: &CacheDesc, q_heads: usize, dtype: Dtype, lens: &[SeqLens]) -> Self {
        let CacheDesc { kv_heads, head_dim, value_dim, .. } = *cache;
        let mut desc = Self::cached(HeadShape { q_heads, kv_heads, head_dim, value_dim }, dtype, lens);
        (desc.k_codec, desc.v_codec) = (Some(cache.k), Some(cache.v));
        desc.kv_storage = cache.kv_storage;
        desc
    }
}
