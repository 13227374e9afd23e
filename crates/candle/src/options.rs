//! Attention with every option.

use crate::storage::{
    Axes, CallAxes, Qkv, Stored, TensorLayout, check_device, check_no_gradient, list_f32, read, refused,
    refused_shape, write_new, zeros,
};
use candle_core::{CpuStorage, Result, Shape, Tensor, bail};
use flashtile::{
    Attention, BlockTables, Inputs, MaskView, Outputs, ProblemDesc, QOffset, Runner, Sequences, Visibility,
};
use std::sync::{Mutex, PoisonError};

/// A mask `(queries, keys)` or `(batch, heads, queries, keys)`. For packed tensors and pages, `batch` is the number of sequences, and
/// `queries` and `keys` are the largest numbers in any sequence. Axes of size 1 are broadcast, and so are axes of stride 0, which `expand`
/// makes. The last axis has stride 1 or 0.
///
/// Models in candle often build masks for `where_cond`, with 1 where a key is *hidden*: `mask.eq(0u8)` makes a [`Mask::Visible`] of one.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Mask {
    /// U8: a key is visible where the element is not 0.
    Visible(Tensor),
    /// F32, F16 or BF16, independent of the dtype of q: added to the score in f32. `-inf` hides a key.
    Additive(Tensor),
}

impl Mask {
    /// Calls a function with the mask of options, if any.
    fn with<T>(mask: Option<&Self>, run: impl FnOnce(Option<MaskView<'_>>) -> Result<T>) -> Result<T> {
        let (tensor, visible) = match mask {
            None => return run(None),
            Some(Self::Visible(tensor)) => (tensor, true),
            Some(Self::Additive(tensor)) => {
                check_no_gradient("mask", tensor)?;
                (tensor, false)
            }
        };
        check_device("mask", tensor)?;
        read("mask", tensor, |stored: Stored<'_>| run(Some(stored.mask(visible)?)))
    }
}

/// The options of [`attention`](crate::attention). The default is attention to all keys, with the scale `1 / sqrt(head_dim)`.
///
/// ```text
/// out = softmax(softcap(scale * q . k) + bias) . v        over the visible keys
/// ```
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Options {
    /// Order of the axes of q, k, v and out.
    pub layout: TensorLayout,
    /// The keys that a query sees by its position.
    pub visibility: Visibility,
    /// Key position of query row 0. It is required if visibility or ALiBi depend on positions, and the number of keys differs from the
    /// number of queries or [`Options::kv_lens`] are given.
    pub q_offset: Option<QOffset>,
    /// Multiplier of `q . k`; `None` is `1 / sqrt(head_dim)`.
    pub scale: Option<f32>,
    /// `c` of `softcap(x) = c * tanh(x / c)`.
    pub softcap: Option<f32>,
    /// The keys that each query sees, or terms that are added to scores.
    pub mask: Option<Mask>,
    /// Slopes `(heads of q)` or `(sequences, heads of q)` in F32: the bias of key `j` for a query at position `p` is `-slope * |p - j|`.
    pub alibi_slopes: Option<Tensor>,
    /// Logits `(heads of q)` in F32 that join the denominator of the softmax.
    pub sinks: Option<Tensor>,
    /// How the tensors divide into sequences.
    pub sequences: Sequences,
    /// The block tables of [`Sequences::Cached`], which name the page of each token.
    pub tables: Option<BlockTables>,
    /// True if [`attention`](crate::attention) also returns the logsumexp.
    pub lse: bool,
}

impl Options {
    /// Every query sees every key.
    #[must_use]
    pub fn full() -> Self {
        Self::default()
    }

    /// A query sees the keys up to its own position. With as many keys as queries, query `i` sits at key `i`; otherwise
    /// [`Options::q_offset`] must say where.
    #[must_use]
    pub fn causal() -> Self {
        Self { visibility: Visibility::causal(), ..Self::default() }
    }

    /// Causal attention of the last tokens of a sequence to all of its keys: the last query sits at the last key.
    #[must_use]
    pub fn decode() -> Self {
        Self::causal().q_offset(QOffset::BottomRight)
    }

    /// Sets the order of the axes of q, k, v and out.
    #[must_use]
    pub const fn layout(mut self, layout: TensorLayout) -> Self {
        self.layout = layout;
        self
    }

    /// Hides keys more than `left` before or more than `right` after the position of a query. The key at that position does not count. A
    /// side of `None` is unbounded.
    #[must_use]
    pub fn window(mut self, left: impl Into<Option<usize>>, right: impl Into<Option<usize>>) -> Self {
        self.visibility = self.visibility.and(Visibility::window(left.into(), right.into()));
        self
    }

    /// Hides keys outside the query's chunk of `chunk` keys, counted from key 0, as the chunked layers of Llama 4 do. 0 is no chunks.
    #[must_use]
    pub fn chunked(mut self, chunk: usize) -> Self {
        self.visibility = self.visibility.chunked(chunk);
        self
    }

    /// Sets the key position of query row 0: bottom-right is FlashAttention's convention, top-left is PyTorch's.
    #[must_use]
    pub const fn q_offset(mut self, offset: QOffset) -> Self {
        self.q_offset = Some(offset);
        self
    }

    /// Sets the multiplier of `q . k`.
    #[must_use]
    pub const fn scale(mut self, scale: f32) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Caps scores: `c * tanh(score / c)`.
    #[must_use]
    pub const fn softcap(mut self, c: f32) -> Self {
        self.softcap = Some(c);
        self
    }

    /// Adds a mask.
    #[must_use]
    pub fn mask(mut self, mask: Mask) -> Self {
        self.mask = Some(mask);
        self
    }

    /// Adds ALiBi, with slopes `[q_heads]` or `[sequences, q_heads]`.
    #[must_use]
    pub fn alibi(mut self, slopes: &Tensor) -> Self {
        self.alibi_slopes = Some(slopes.clone());
        self
    }

    /// Adds attention sinks.
    #[must_use]
    pub fn sinks(mut self, logits: &Tensor) -> Self {
        self.sinks = Some(logits.clone());
        self
    }

    /// Gives each batch entry its own number of keys. Rows of k and v past it are padding, and are never read.
    #[must_use]
    pub fn kv_lens(mut self, kv_lens: &[usize]) -> Self {
        self.sequences = Sequences::Padded { kv_lens: kv_lens.to_vec() };
        self.tables = None;
        self
    }

    /// Sets the starts of packed sequences: cumulative lengths from 0 to the total. The tensors are `(total, heads, dim)`.
    #[must_use]
    pub fn cu_seqlens(mut self, q: &[usize], k: &[usize]) -> Self {
        self.sequences = Sequences::Packed { cu_seqlens_q: q.to_vec(), cu_seqlens_k: k.to_vec() };
        self.tables = None;
        self
    }

    /// Attends to pages: q is packed, k and v are pools `(pages, heads, page_size, dim)`, or with [`TensorLayout::Bshd`]
    /// `(pages, page_size, heads, dim)`.
    #[must_use]
    pub fn paged(mut self, cu_seqlens_q: &[usize], tables: BlockTables) -> Self {
        self.sequences =
            Sequences::Cached { cu_seqlens_q: cu_seqlens_q.to_vec(), kv_lens: tables.lens.clone() };
        self.tables = Some(tables);
        self
    }

    /// Asks for the logsumexp.
    #[must_use]
    pub const fn lse(mut self) -> Self {
        self.lse = true;
        self
    }

    /// The options that are no tensors, as flashtile's, without sequences.
    pub(crate) fn numbers<'a>(&self) -> Attention<'a> {
        let mut options = Attention::full();
        options.visibility = self.visibility;
        options.q_offset = self.q_offset;
        options.scale = self.scale;
        options.softcap = self.softcap;
        options
    }

    /// Calls a function with these options as flashtile's, without sequences.
    pub(crate) fn with<T>(&self, run: impl FnOnce(&Attention<'_>) -> Result<T>) -> Result<T> {
        let slopes = self.alibi_slopes.as_ref().map(|of| list_f32("alibi_slopes", of, 2)).transpose()?;
        let sinks = self.sinks.as_ref().map(|of| list_f32("sinks", of, 1)).transpose()?;
        Mask::with(self.mask.as_ref(), |mask| {
            let mut options = self.numbers();
            options.mask = mask;
            options.alibi_slopes = slopes.as_deref();
            options.sinks = sinks.as_deref();
            run(&options)
        })
    }

    pub(crate) fn axes(&self) -> CallAxes {
        let dense = self.layout.into();
        match self.sequences {
            Sequences::Packed { .. } => CallAxes { q: Axes::Packed, kv: Axes::Packed },
            Sequences::Cached { .. } => CallAxes { q: Axes::Packed, kv: dense },
            Sequences::Dense | Sequences::Padded { .. } => CallAxes { q: dense, kv: dense },
        }
    }

    /// The problem of tensors `[batch, heads, rows, dim]`, without a mask.
    #[cfg(any(feature = "cuda", feature = "metal"))]
    pub(crate) fn desc(&self, dtype: flashtile::Dtype, shapes: Qkv<[usize; 4]>) -> ProblemDesc {
        let ([batch, q_heads, q_len, head_dim], [_, kv_heads, kv_len, _]) = (shapes.q, shapes.k);
        let value_dim = shapes.v[3];
        let dims = flashtile::Dims { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim };
        let mut desc = ProblemDesc::new(dims, dtype);
        desc.visibility = self.visibility;
        desc.q_offset = self.q_offset;
        desc.scale = self.scale;
        desc.softcap = self.softcap;
        desc.alibi = self.alibi_slopes.is_some();
        desc.sinks = self.sinks.is_some();
        self.set_sequences(&mut desc);
        desc
    }

    /// Refuses ALiBi slopes of another shape than `[q_heads]` and `[sequences, q_heads]`; the description knows the number of sequences.
    pub(crate) fn check_slopes(&self, q_heads: usize) -> Result<()> {
        match self.alibi_slopes.as_ref().map(Tensor::dims) {
            Some(dims) if dims.last() != Some(&q_heads) => {
                bail!("alibi_slopes has shape {dims:?}, expected [{q_heads}], or [sequences, {q_heads}]")
            }
            _ => Ok(()),
        }
    }

    /// Sets how a problem divides into sequences.
    pub(crate) fn set_sequences(&self, desc: &mut ProblemDesc) {
        desc.sequences = self.sequences.clone();
        if let Sequences::Cached { kv_lens, .. } = &self.sequences {
            // The shape of the pools does not tell the number of keys of a batch entry.
            desc.dims.kv_len = kv_lens.iter().copied().max().unwrap_or(0);
        }
    }

    /// Computes attention, and the logsumexp into `lse`.
    pub(crate) fn run(
        &self,
        tensors: Qkv<Stored<'_>>,
        lse: Option<&Mutex<Vec<f32>>>,
    ) -> Result<(CpuStorage, Shape)> {
        let axes = self.axes();
        let (q, k, v) = (tensors.q.view(axes.q)?, tensors.k.view(axes.kv)?, tensors.v.view(axes.kv)?);
        self.check_slopes(q.shape()[1])?;
        self.with(|options| {
            let mut desc = options.desc(&q, &k, &v);
            self.set_sequences(&mut desc);
            let mut inputs = options.inputs(q, k, v);
            inputs.tables = self.tables.as_ref();
            compute(&desc, &inputs, axes, lse)
        })
    }
}

/// Runs a problem into a new tensor.
fn compute(
    desc: &ProblemDesc,
    inputs: &Inputs<'_>,
    axes: CallAxes,
    lse: Option<&Mutex<Vec<f32>>>,
) -> Result<(CpuStorage, Shape)> {
    Runner::with_current(|runner| {
        // An invalid problem is refused before memory is allocated for its result.
        let shape = runner.plan(desc).map_err(refused)?.problem().dims().out_shape();
        write_new(inputs.q.dtype(), shape, axes.q, |out| {
            let mut outputs = Outputs::new(out);
            let mut lse = lse.map(|lse| lse.lock().unwrap_or_else(PoisonError::into_inner));
            if let Some(lse) = &mut lse {
                **lse = zeros(0.0, shape[0] * shape[1] * shape[2])?;
                outputs.lse = Some(lse.as_mut_slice());
            }
            runner.run(desc, inputs, &mut outputs).map_err(|error| refused_shape(error, axes))
        })
    })
}
