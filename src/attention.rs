//! Attention in one call.

use crate::error::Result;
use crate::runner::Runner;
use flashtile_core::codec::KvView;
use flashtile_core::dtype::Element;
use flashtile_core::gradients::{BackwardInputs, Gradients};
use flashtile_core::inputs::{Inputs, Outputs};
use flashtile_core::owned::filled;
use flashtile_core::plan::Unsupported;
use flashtile_core::problem::{ProblemDesc, QOffset, Sequences, Visibility};
use flashtile_core::reference;
use flashtile_core::tensor::{MaskView, TensorView, TensorViewMut, dense, reach};
use flashtile_cpu::plan::CpuPlan;

/// How the tensors of a call divide into sequences: [`Sequences`], borrowed.
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub enum SequencesRef<'a> {
    /// Each batch entry is one sequence.
    #[default]
    Dense,
    /// Each batch entry is one sequence with its own number of keys. Rows past it are padding, and never read.
    Padded {
        /// Keys of each batch entry, `[batch]`.
        kv_lens: &'a [usize],
    },
    /// Sequences lie one after another in one batch entry.
    Packed {
        /// First query row of each sequence, then the total.
        cu_seqlens_q: &'a [usize],
        /// First key row of each sequence, then the total.
        cu_seqlens_k: &'a [usize],
    },
}

impl SequencesRef<'_> {
    fn to_sequences(self) -> Sequences {
        match self {
            Self::Dense => Sequences::Dense,
            Self::Padded { kv_lens } => Sequences::Padded { kv_lens: kv_lens.to_vec() },
            Self::Packed { cu_seqlens_q, cu_seqlens_k } => {
                Sequences::Packed { cu_seqlens_q: cu_seqlens_q.to_vec(), cu_seqlens_k: cu_seqlens_k.to_vec() }
            }
        }
    }

    /// Returns true if [`SequencesRef::to_sequences`] would return `sequences`, without allocating.
    fn are(self, sequences: &Sequences) -> bool {
        match (self, sequences) {
            (Self::Dense, Sequences::Dense) => true,
            (Self::Padded { kv_lens }, Sequences::Padded { kv_lens: of }) => kv_lens == of.as_slice(),
            (
                Self::Packed { cu_seqlens_q, cu_seqlens_k },
                Sequences::Packed { cu_seqlens_q: q, cu_seqlens_k: k },
            ) => cu_seqlens_q == q.as_slice() && cu_seqlens_k == k.as_slice(),
            (Self::Dense | Self::Padded { .. } | Self::Packed { .. }, _) => false,
        }
    }
}

/// The options of [`attention`]. The default is attention to all keys, with the scale `1 / sqrt(head_dim)`.
///
/// ```text
/// out = softmax(softcap(scale * q . k) + bias) . v        over the visible keys
/// ```
///
/// ```
/// use flashtile::Attention;
/// let bert = Attention::full();
/// let llama = Attention::causal();
/// let gemma_2 = Attention::causal().window(4095, 0).softcap(50.0).scale(1.0 / 16.0);
/// let next_token = Attention::decode();
/// ```
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct Attention<'a> {
    /// Which keys a query sees by its position.
    pub visibility: Visibility,
    /// Key position of query row 0. Must be given where visibility or ALiBi depend on positions and there are more or
    /// fewer keys than queries, or `kv_lens`: [`QOffset::TopLeft`] is PyTorch's convention, [`QOffset::BottomRight`] that of
    /// FlashAttention. Prompts that are padded on the right are [`QOffset::TopLeft`].
    pub q_offset: Option<QOffset>,
    /// Multiplier of `q . k`; `None` is `1 / sqrt(head_dim)`.
    pub scale: Option<f32>,
    /// `c` of `softcap(x) = c * tanh(x / c)`.
    pub softcap: Option<f32>,
    /// A boolean mask (`true` is visible) or an additive one, broadcastable to `[batch, q_heads, q_len, kv_len]`; of packed
    /// sequences and of steps of a cache, to `[sequences, q_heads, longest q_len, longest kv_len]`.
    pub mask: Option<MaskView<'a>>,
    /// ALiBi slopes `[q_heads]`, or `[sequences, q_heads]` for slopes of each batch entry or packed sequence: the bias of key `j` for a query
    /// at position `p` is `-slope * |p - j|`.
    pub alibi_slopes: Option<&'a [f32]>,
    /// Logits `[q_heads]` that join the denominator of the softmax.
    pub sinks: Option<&'a [f32]>,
    /// How the tensors divide into sequences.
    pub sequences: SequencesRef<'a>,
}

impl<'a> Attention<'a> {
    /// Every query sees every key.
    #[must_use]
    pub fn full() -> Self {
        Self::default()
    }

    /// A query sees the keys up to its own position. With as many keys as queries, query `i` sits at key `i`; otherwise, and
    /// with [`Attention::kv_lens`], [`Attention::q_offset`] has to say where.
    #[must_use]
    pub fn causal() -> Self {
        Self { visibility: Visibility::causal(), ..Self::default() }
    }

    /// Causal attention of the last tokens of a sequence, one in a step of decoding or several in a chunk of a prompt, to all of
    /// its keys: the last query sits at the last key.
    #[must_use]
    pub fn decode() -> Self {
        Self::causal().q_offset(QOffset::BottomRight)
    }

    /// Hides keys more than `left` before or more than `right` after the position of a query, whose own key does not count:
    /// a causal window of 1024 keys is `window(1023, 0)`. A side of `None` is unbounded.
    #[must_use]
    pub fn window(mut self, left: impl Into<Option<usize>>, right: impl Into<Option<usize>>) -> Self {
        self.visibility = self.visibility.and(Visibility::window(left.into(), right.into()));
        self
    }

    /// Hides keys outside the query's chunk of `chunk` keys, counted from key 0: the chunked layers of Llama 4 are
    /// `causal().chunked(8192)`. 0 is no chunks.
    #[must_use]
    pub const fn chunked(mut self, chunk: usize) -> Self {
        self.visibility = self.visibility.chunked(chunk);
        self
    }

    /// Sets the key position of query row 0.
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
    pub const fn mask(mut self, mask: MaskView<'a>) -> Self {
        self.mask = Some(mask);
        self
    }

    /// Adds ALiBi, with a slope for each query head, or for each query head of each sequence.
    #[must_use]
    pub const fn alibi(mut self, slopes: &'a [f32]) -> Self {
        self.alibi_slopes = Some(slopes);
        self
    }

    /// Adds attention sinks, with a logit for each query head.
    #[must_use]
    pub const fn sinks(mut self, logits: &'a [f32]) -> Self {
        self.sinks = Some(logits);
        self
    }

    /// Gives each batch entry its own number of keys; rows of k and v past it are padding, and never read.
    /// Replaces [`Attention::cu_seqlens`].
    #[must_use]
    pub const fn kv_lens(mut self, kv_lens: &'a [usize]) -> Self {
        self.sequences = SequencesRef::Padded { kv_lens };
        self
    }

    /// Says where packed sequences start: cumulative lengths from 0 to the total, for the rows of q, and for the rows of k and v.
    /// Tensors are [`TensorView::packed`]. Replaces [`Attention::kv_lens`].
    #[must_use]
    pub const fn cu_seqlens(mut self, q: &'a [usize], k: &'a [usize]) -> Self {
        self.sequences = SequencesRef::Packed { cu_seqlens_q: q, cu_seqlens_k: k };
        self
    }

    /// The problem of these options over dense tensors: for a planner, or for a [`Runner`].
    #[must_use]
    pub fn desc(&self, q: &TensorView<'_>, k: &TensorView<'_>, v: &TensorView<'_>) -> ProblemDesc {
        self.desc_of(ProblemDesc::of(q, k, v))
    }

    /// The description of tensors alone, as [`ProblemDesc::new`] and [`ProblemDesc::of`] make it, with these options: to plan before there
    /// are tensors.
    ///
    /// ```
    /// use flashtile::{Attention, Dims, Dtype, ProblemDesc, Visibility};
    /// let dims = Dims { batch: 1, q_heads: 8, kv_heads: 2, q_len: 64, kv_len: 64, head_dim: 64, value_dim: 64 };
    /// let desc = Attention::causal().desc_of(ProblemDesc::new(dims, Dtype::BF16));
    /// assert_eq!(desc.visibility, Visibility::causal());
    /// ```
    #[must_use]
    pub fn desc_of(&self, mut tensors: ProblemDesc) -> ProblemDesc {
        self.set(&mut tensors);
        tensors.sequences = self.sequences.to_sequences();
        tensors
    }

    /// Sets everything but the sequences of a description.
    pub(crate) fn set(&self, desc: &mut ProblemDesc) {
        desc.visibility = self.visibility;
        desc.q_offset = self.q_offset;
        desc.scale = self.scale;
        desc.softcap = self.softcap;
        desc.alibi = self.alibi_slopes.is_some();
        desc.sinks = self.sinks.is_some();
        desc.mask = self.mask.map(|mask| mask.kind());
    }

    /// Returns true if [`Attention::desc`] would return `desc`, without copying the lists of its sequences.
    /// `of` is the description of the tensors alone.
    pub(crate) fn describes(&self, desc: &ProblemDesc, of: &ProblemDesc) -> bool {
        desc.eq_but_sequences(of) && self.sequences.are(&desc.sequences)
    }

    /// The inputs of a run with these options.
    #[must_use]
    pub const fn inputs(&self, q: TensorView<'a>, k: TensorView<'a>, v: TensorView<'a>) -> Inputs<'a> {
        let mut inputs = Inputs::new(q, k, v);
        self.set_inputs(&mut inputs);
        inputs
    }

    pub(crate) const fn set_inputs(&self, inputs: &mut Inputs<'a>) {
        inputs.mask = self.mask;
        inputs.alibi_slopes = self.alibi_slopes;
        inputs.sinks = self.sinks;
    }
}

/// Attention on this machine's CPU: q `[batch, q_heads, q_len, head_dim]`, k `[batch, kv_heads, kv_len, head_dim]` and
/// v `[batch, kv_heads, kv_len, value_dim]` give out `[batch, q_heads, q_len, value_dim]`, all of one dtype. `q_heads` is a
/// multiple of `kv_heads`; strides are free, so that head-major and sequence-major tensors are read in place.
///
/// ```
/// use flashtile::{Attention, TensorView, TensorViewMut, attention};
///
/// let (q, kv) = (vec![0.1f32; 32 * 128 * 64], vec![0.2f32; 8 * 128 * 64]);
/// let mut out = vec![0.0f32; 32 * 128 * 64];
/// let q = TensorView::bhsd(&q, [1, 32, 128, 64])?;
/// let kv = TensorView::bhsd(&kv, [1, 8, 128, 64])?; // grouped queries: 4 query heads to a key/value head
/// attention(q, kv, kv, &mut TensorViewMut::bhsd(&mut out, [1, 32, 128, 64])?, &Attention::causal())?;
/// assert!(out.iter().all(|x| (x - 0.2).abs() < 1e-6));
/// # Ok::<(), flashtile::Error>(())
/// ```
///
/// The work runs on the current rayon pool. Each calling thread keeps the plans of its last problems and the workspace of its
/// largest one; [`Runner`] holds them where the caller wants, and gives the logsumexp too. For CUDA devices see the feature `cuda`.
///
/// # Errors
/// [`Error::Problem`](crate::Error::Problem) where options contradict the shapes, [`Error::Run`](crate::Error::Run) where tensors do not fit
/// each other, [`Error::Unsupported`](crate::Error::Unsupported) where the problem has too many tasks for a plan, and
/// [`Error::Memory`](crate::Error::Memory) where there is no memory for the workspace. Nothing is written then.
pub fn attention<'a>(
    q: TensorView<'a>,
    k: TensorView<'a>,
    v: TensorView<'a>,
    out: &mut TensorViewMut<'_>,
    options: &Attention<'a>,
) -> Result<()> {
    Runner::with_current(|runner| runner.attention(q, k, v, out, options))
}

/// [`attention`] into new memory, dense `[batch, q_heads, q_len, value_dim]` whatever the strides of q.
///
/// ```
/// use flashtile::{Attention, TensorView, attention_vec};
/// let rows: Vec<f32> = (0..3 * 16).map(|x| x as f32 / 48.0).collect();
/// let x = TensorView::bhsd(&rows, [1, 1, 3, 16])?;
/// let out: Vec<f32> = attention_vec(x, x, x, &Attention::causal())?;
/// assert_eq!(out[..16], rows[..16]); // the first query sees the first key alone
/// # Ok::<(), flashtile::Error>(())
/// ```
///
/// # Errors
/// As [`attention`]; [`Error::Run`](crate::Error::Run) where `T` is not the dtype of q, and [`Error::View`](crate::Error::View) where the
/// result is too large to be addressed.
pub fn attention_vec<'a, T: Element>(
    q: TensorView<'a>,
    k: TensorView<'a>,
    v: TensorView<'a>,
    options: &Attention<'a>,
) -> Result<Vec<T>> {
    Runner::with_current(|runner| {
        // A wrong problem is refused before there is memory for its result.
        let shape = runner.find_options(q, k, v, options)?.problem().dims().out_shape();
        let mut out = filled(reach(shape, dense(shape))?, T::from_f32(0.0))?;
        let view = TensorViewMut::bhsd(&mut out, shape)?;
        runner.run_found(&options.inputs(q, k, v), &mut Outputs::new(view))?;
        Ok(out)
    })
}

/// The gradients of a loss with respect to q, k and v, and on request to the sinks, an additive mask and the ALiBi slopes, on this machine's
/// CPU: from `d_out`, its gradient with respect to the output of [`attention`] with these options, and what that call has computed. `inputs`
/// takes masks, slopes and sinks from the options.
///
/// ```
/// use flashtile::{
///     Attention, BackwardInputs, Gradients, Outputs, Runner, TensorView, TensorViewMut, attention_backward,
/// };
/// let shape = [1, 2, 16, 32];
/// let x: Vec<f32> = (0..2 * 16 * 32).map(|n| (n % 37) as f32 / 37.0).collect();
/// let x = TensorView::bhsd(&x, shape)?;
/// let (mut out, mut lse) = (vec![0.0f32; 2 * 16 * 32], vec![0.0f32; 2 * 16]);
/// // The forward pass, which keeps its logsumexp.
/// let options = Attention::causal();
/// let mut outputs = Outputs::new(TensorViewMut::bhsd(&mut out, shape)?);
/// outputs.lse = Some(&mut lse);
/// Runner::new().run(&options.desc(&x, &x, &x), &options.inputs(x, x, x), &mut outputs)?;
/// // The loss is the sum of the output.
/// let (out, d_out) = (TensorView::bhsd(&out, shape)?, vec![1.0f32; 2 * 16 * 32]);
/// let inputs = BackwardInputs::new([x, x, x], out, &lse, TensorView::bhsd(&d_out, shape)?);
/// let [mut d_q, mut d_k, mut d_v] = std::array::from_fn(|_| vec![0.0f32; 2 * 16 * 32]);
/// let mut gradients = Gradients::new(
///     TensorViewMut::bhsd(&mut d_q, shape)?,
///     TensorViewMut::bhsd(&mut d_k, shape)?,
///     TensorViewMut::bhsd(&mut d_v, shape)?,
/// );
/// attention_backward(&inputs, &mut gradients, &options)?;
/// // Every query gives all of its probability to values: per head and column, the gradients of the 16 values add up to 16.
/// let sum: f32 = (0..16).map(|row| d_v[row * 32]).sum();
/// assert!((sum - 16.0).abs() < 1e-4);
/// # Ok::<(), flashtile::Error>(())
/// ```
///
/// The equations are in [`gradients`](crate::gradients). Equal inputs give equal bits. Cost: 2.5 times the operations of the forward pass, and the
/// gradient of a mask as many as that pass again.
///
/// # Errors
/// As [`attention`].
pub fn attention_backward<'a>(
    inputs: &BackwardInputs<'a>,
    gradients: &mut Gradients<'_>,
    options: &Attention<'a>,
) -> Result<()> {
    let mut inputs = *inputs;
    options.set_inputs(&mut inputs.forward);
    let (KvView::Elements(k), KvView::Elements(v)) = (&inputs.forward.k, &inputs.forward.v) else {
        return Err(Unsupported::Backward { why: "keys and values are codes" }.into());
    };
    let desc = options.desc(&inputs.forward.q, k, v);
    Runner::with_current(|runner| runner.run_backward(&desc, &inputs, gradients))
}

/// The probabilities by which values are weighed, dense `[batch, q_heads, q_len, kv_len]`: to look at, not to compute with.
/// They come from the f64 reference, on one thread, rounded to f32. Hidden keys have 0; with sinks, rows sum to less than 1.
///
/// ```
/// use flashtile::{Attention, TensorView, attention_probs};
/// let x = [1.0f32; 2 * 16];
/// let x = TensorView::bhsd(&x, [1, 1, 2, 16])?;
/// assert_eq!(attention_probs(x, x, &Attention::causal())?, [1.0, 0.0, 0.5, 0.5]);
/// # Ok::<(), flashtile::Error>(())
/// ```
///
/// # Errors
/// As [`attention`], and [`Error::View`](crate::Error::View) where the result is too large to be addressed.
pub fn attention_probs<'a>(
    q: TensorView<'a>,
    k: TensorView<'a>,
    options: &Attention<'a>,
) -> Result<Vec<f32>> {
    // Values have no influence on probabilities: keys stand for them.
    let problem = options.desc(&q, &k, &k).validate()?;
    let dims = problem.dims();
    let shape = [dims.batch, dims.q_heads, dims.q_len, dims.kv_len];
    let mut probs = filled(reach(shape, dense(shape))?, 0.0f32)?;
    reference::for_each_prob(&problem, &options.inputs(q, k, k), |row, key, p| {
        probs[row * dims.kv_len + key] = p as f32;
    })?;
    Ok(probs)
}

impl Runner {
    /// [`attention`] with the plans and the workspace of this runner.
    ///
    /// # Errors
    /// As [`attention`].
    pub fn attention<'a>(
        &mut self,
        q: TensorView<'a>,
        k: TensorView<'a>,
        v: TensorView<'a>,
        out: &mut TensorViewMut<'_>,
        options: &Attention<'a>,
    ) -> Result<()> {
        self.find_options(q, k, v, options)?;
        self.run_found(&options.inputs(q, k, v), &mut Outputs::new(out.reborrow()))
    }
    /// Finds or makes the plan of these options over dense tensors.
    fn find_options(
        &mut self,
        q: TensorView<'_>,
        k: TensorView<'_>,
        v: TensorView<'_>,
        options: &Attention<'_>,
    ) -> Result<&CpuPlan> {
        let mut of = ProblemDesc::of(&q, &k, &v);
        options.set(&mut of);
        self.find(|desc| options.describes(desc, &of), || options.desc(&q, &k, &v))
    }
}
