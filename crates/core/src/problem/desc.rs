//! Descriptions: plain data, nothing checked.

use super::dims::{Dims, HeadShape};
use super::kept::KeptTokens;
use super::kv_storage::KvStorage;
use super::prefix::SharedPrefix;
use super::sequence::{SeqLens, Sequences};
use super::visibility::{QOffset, Visibility};
use crate::codec::Codec;
use crate::dtype::{Dtype, MaskKind};
use crate::tensor::TensorView;

/// Description of an attention problem: plain data, nothing checked yet.
///
/// Required facts are arguments of [`ProblemDesc::new`], optional ones are public fields.
///
/// ```
/// use flashtile::{Dims, Dtype, ProblemDesc, QOffset, Visibility};
/// let dims = Dims { batch: 1, q_heads: 32, kv_heads: 8, q_len: 40, kv_len: 48, head_dim: 128, value_dim: 128 };
/// let mut desc = ProblemDesc::new(dims, Dtype::BF16);
/// desc.visibility = Visibility::causal();
/// assert!(desc.clone().validate().is_err()); // q_len != kv_len: where do the queries sit?
/// desc.q_offset = Some(QOffset::BottomRight);
/// assert_eq!(desc.validate()?.sequences()[0].q_offset, 8);
/// # Ok::<(), flashtile::ProblemError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
#[non_exhaustive]
pub struct ProblemDesc {
    /// Logical dimensions.
    pub dims: Dims,
    /// Element type of q, k, v and out.
    pub dtype: Dtype,
    /// Which keys a query position sees. Default: all.
    #[cfg_attr(feature = "serde", serde(default))]
    pub visibility: Visibility,
    /// Key position of query row 0. May be `None` if nothing depends on positions, or if `q_len == kv_len` and there
    /// are no `kv_lens` (padded or cached); it is then 0.
    #[cfg_attr(feature = "serde", serde(default))]
    pub q_offset: Option<QOffset>,
    /// Multiplier of `q . k`; `None` means `1 / sqrt(head_dim)`.
    #[cfg_attr(feature = "serde", serde(default, serialize_with = "crate::named::finite"))]
    pub scale: Option<f32>,
    /// `c` of `softcap(x) = c * tanh(x / c)`, applied to the scaled score before any bias.
    #[cfg_attr(feature = "serde", serde(default, serialize_with = "crate::named::finite"))]
    pub softcap: Option<f32>,
    /// True if the inputs include ALiBi slopes, one f32 per query head, or one per query head of each sequence.
    #[cfg_attr(feature = "serde", serde(default))]
    pub alibi: bool,
    /// True if the inputs include attention sinks, one f32 logit per query head.
    #[cfg_attr(feature = "serde", serde(default))]
    pub sinks: bool,
    /// Kind of the mask among the inputs.
    #[cfg_attr(feature = "serde", serde(default))]
    pub mask: Option<MaskKind>,
    /// True if the inputs include a tree mask of cached sequences: bool `[1, 1, q_len, longest q_len of a
    /// sequence]`. Row `r` is packed query row `r`. Column `c` is key `kv_len - q_len + c` of its sequence,
    /// one of the keys of this step; `true` is visible. Earlier keys are not affected. A key is visible if
    /// the tree, causality, window and mask all allow it.
    #[cfg_attr(feature = "serde", serde(default))]
    pub tree: bool,
    /// Codec of the keys. `None` means elements of `dtype`; cached sequences may have any codec that
    /// [supports](Codec::supports) the dimension.
    #[cfg_attr(feature = "serde", serde(default))]
    pub k_codec: Option<Codec>,
    /// Codec of the values, like `k_codec`.
    #[cfg_attr(feature = "serde", serde(default))]
    pub v_codec: Option<Codec>,
    /// Tokens of cached sequences that are kept in 16 bits beside their codes; `None` where there are none.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
    pub kept: Option<KeptTokens>,
    /// Where values lie. [`KvStorage::KeyColumns`] needs `value_dim <= head_dim`, and values have the codec of the keys.
    #[cfg_attr(feature = "serde", serde(default))]
    pub kv_storage: KvStorage,
    /// How batch entries divide into sequences.
    #[cfg_attr(feature = "serde", serde(default))]
    pub sequences: Sequences,
    /// Prefixes that cached sequences share, as
    /// [`BlockTables::shared_prefixes`](crate::block_tables::BlockTables::shared_prefixes) finds them. Outer ones
    /// come before those inside them: each lies inside the one before it or after it, and is at least as long as any
    /// that contains it.
    #[cfg_attr(feature = "serde", serde(default))]
    pub prefixes: Vec<SharedPrefix>,
}

impl ProblemDesc {
    /// A problem with every option at its default: all keys visible, scale `1 / sqrt(head_dim)`, no bias.
    #[must_use]
    pub const fn new(dims: Dims, dtype: Dtype) -> Self {
        Self {
            dims,
            dtype,
            visibility: Visibility::full(),
            q_offset: None,
            scale: None,
            softcap: None,
            alibi: false,
            sinks: false,
            mask: None,
            tree: false,
            k_codec: None,
            v_codec: None,
            kept: None,
            kv_storage: KvStorage::Separate,
            sequences: Sequences::Dense,
            prefixes: Vec::new(),
        }
    }

    /// The problem that dense tensors describe: q `[batch, q_heads, q_len, head_dim]`, k `[batch, kv_heads, kv_len,
    /// head_dim]` and v `[batch, kv_heads, kv_len, value_dim]`. Everything else is as in [`ProblemDesc::new`]. A run refuses
    /// k and v that do not fit q.
    ///
    /// ```
    /// # use flashtile::{ProblemDesc, TensorView};
    /// let (q, kv) = (vec![0.5f32; 8 * 3 * 16], vec![0.5f32; 2 * 5 * 16]);
    /// let (q, kv) = (TensorView::bhsd(&q, [1, 8, 3, 16])?, TensorView::bhsd(&kv, [1, 2, 5, 16])?);
    /// let dims = ProblemDesc::of(&q, &kv, &kv).dims;
    /// assert_eq!((dims.q_heads, dims.kv_heads, dims.q_len, dims.kv_len), (8, 2, 3, 5));
    /// # Ok::<(), flashtile::ViewError>(())
    /// ```
    #[must_use]
    pub const fn of(q: &TensorView<'_>, k: &TensorView<'_>, v: &TensorView<'_>) -> Self {
        let ([batch, q_heads, q_len, head_dim], [_, kv_heads, kv_len, _]) = (q.shape(), k.shape());
        let [_, _, _, value_dim] = v.shape();
        Self::new(Dims { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim }, q.dtype())
    }

    /// Returns true if the descriptions are equal in every field but `sequences`.
    #[must_use]
    pub fn eq_but_sequences(&self, other: &Self) -> bool {
        // Every field by name, so that a new one is not forgotten.
        let Self {
            dims,
            dtype,
            visibility,
            q_offset,
            scale,
            softcap,
            alibi,
            sinks,
            mask,
            tree,
            k_codec,
            v_codec,
            kept,
            kv_storage,
            sequences: _,
            prefixes,
        } = self;
        (dims, dtype, visibility) == (&other.dims, &other.dtype, &other.visibility)
            && (q_offset, scale, softcap) == (&other.q_offset, &other.scale, &other.softcap)
            && (alibi, sinks, mask, tree) == (&other.alibi, &other.sinks, &other.mask, &other.tree)
            && (k_codec, v_codec, kv_storage) == (&other.k_codec, &other.v_codec, &other.kv_storage)
            && (kept, prefixes) == (&other.kept, &other.prefixes)
    }

    /// A step over cached sequences of these lengths. Each query sits at the position of its token
    /// ([`QOffset::BottomRight`]). Everything else is as in [`ProblemDesc::new`]: a language model sets `visibility` to causal.
    #[must_use]
    pub fn cached(shape: HeadShape, dtype: Dtype, lens: &[SeqLens]) -> Self {
        let HeadShape { q_heads, kv_heads, head_dim, value_dim } = shape;
        let dims = Dims {
            batch: 1,
            q_heads,
            kv_heads,
            q_len: lens.iter().fold(0, |n, lens| n.saturating_add(lens.q_len)),
            kv_len: lens.iter().map(|lens| lens.kv_len).max().unwrap_or(0),
            head_dim,
            value_dim,
        };
        let mut desc = Self::new(dims, dtype);
        desc.q_offset = Some(QOffset::BottomRight);
        desc.sequences = Sequences::cached(lens);
        desc
    }
}
