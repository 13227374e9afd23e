//! Inputs and outputs of a run, checked against the problem once, for every backend.

use crate::block_tables::BlockTables;
use crate::block_tables::TableError;
use crate::codec::{Codec, KvView};
use crate::dtype::{Dtype, MaskKind};
use crate::limits::MAX_ALIBI_SLOPE;
use crate::problem::{KeyPart, KvStorage, Problem, Sequences};
use crate::tensor::{MaskView, TensorView, TensorViewMut, ViewError};

/// Tensors that a forward run reads.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Inputs<'a> {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub q: TensorView<'a>,
    /// `[batch, kv_heads, kv_len, head_dim]`; for cached sequences the pages `[pages, kv_heads, page_size, head_dim]`.
    pub k: KvView<'a>,
    /// `[batch, kv_heads, kv_len, value_dim]`; for cached sequences the pages `[pages, kv_heads, page_size, value_dim]`. With
    /// [`KvStorage::KeyColumns`] these are the [first columns](KvView::first_columns) of `k`.
    pub v: KvView<'a>,
    /// Which page holds which token. Present if and only if the problem's sequences are cached; `lens` equal its
    /// `kv_lens`. Rows of the pages without a visible token may hold anything, NaN included.
    pub tables: Option<&'a BlockTables>,
    /// Pages of the tokens that are kept in 16 bits. Present if and only if the problem has [kept
    /// tokens](crate::problem::ProblemDesc::kept); a part without tokens may be missing.
    pub kept: Option<KeptInputs<'a>>,
    /// Boolean, with the shape [`Problem::tree_shape`]. Present if and only if the problem has a tree mask. Columns
    /// past a sequence's own number of queries are not read.
    pub tree: Option<MaskView<'a>>,
    /// Broadcastable to [`Problem::mask_shape`]. Present if and only if the problem has a mask.
    pub mask: Option<MaskView<'a>>,
    /// `[q_heads]`, or `[sequences, q_heads]`, with magnitudes up to [`MAX_ALIBI_SLOPE`]. Present if and only if the problem has ALiBi.
    pub alibi_slopes: Option<&'a [f32]>,
    /// `[q_heads]` logits. Present if and only if the problem has sinks.
    pub sinks: Option<&'a [f32]>,
}

/// Pages of the tokens that a cache keeps in 16 bits beside its codes, in the [codec](Codec::kept) of kept rows.
#[derive(Debug, Clone, Copy, Default)]
#[allow(clippy::exhaustive_structs)]
pub struct KeptInputs<'a> {
    /// The first tokens.
    pub first: Option<KeptPages<'a>>,
    /// The last tokens.
    pub last: Option<KeptPages<'a>>,
}

/// Pages of keys and values, and which page holds which token.
#[derive(Debug, Clone, Copy)]
#[allow(clippy::exhaustive_structs)]
pub struct KeptPages<'a> {
    /// `[pages, kv_heads, page_size, head_dim]`.
    pub k: KvView<'a>,
    /// `[pages, kv_heads, page_size, value_dim]`.
    pub v: KvView<'a>,
    /// Tables of the problem's sequences in these pages.
    pub tables: &'a BlockTables,
}

impl<'a> Inputs<'a> {
    /// The inputs of a [part](Problem::part) of the problem; `None` where the part has no pages.
    #[must_use]
    pub const fn part(&self, part: KeyPart) -> Option<Self> {
        let pages = match (part, self.kept) {
            (KeyPart::All, _) => return Some(*self),
            (KeyPart::Codes, _) => return Some(Self { kept: None, ..*self }),
            (KeyPart::First, Some(kept)) => kept.first,
            (KeyPart::Last, Some(kept)) => kept.last,
            (KeyPart::First | KeyPart::Last, None) => None,
        };
        match pages {
            Some(KeptPages { k, v, tables }) => {
                Some(Self { k, v, tables: Some(tables), kept: None, ..*self })
            }
            None => None,
        }
    }

    /// Inputs without masks, ALiBi slopes or sinks, which are public fields.
    #[must_use]
    pub const fn new(q: TensorView<'a>, k: TensorView<'a>, v: TensorView<'a>) -> Self {
        let (k, v) = (KvView::Elements(k), KvView::Elements(v));
        Self { q, k, v, tables: None, kept: None, tree: None, mask: None, alibi_slopes: None, sinks: None }
    }

    /// Inputs over pages that an engine owns: q `[1, q_heads, total queries, head_dim]`, k `[pages, kv_heads, page_size,
    /// head_dim]`, v `[pages, kv_heads, page_size, value_dim]`, with any strides. A contiguous cache is the case of one
    /// page per sequence.
    #[must_use]
    pub const fn paged(
        q: TensorView<'a>,
        k: TensorView<'a>,
        v: TensorView<'a>,
        tables: &'a BlockTables,
    ) -> Self {
        Self { tables: Some(tables), ..Self::new(q, k, v) }
    }

    /// Like [`Inputs::paged`], with pages in any codec.
    #[must_use]
    pub const fn paged_kv(q: TensorView<'a>, k: KvView<'a>, v: KvView<'a>, tables: &'a BlockTables) -> Self {
        Self {
            q,
            k,
            v,
            tables: Some(tables),
            kept: None,
            tree: None,
            mask: None,
            alibi_slopes: None,
            sinks: None,
        }
    }
}

/// Tensors that a forward run writes. Contents before the run are never read.
#[derive(Debug)]
#[non_exhaustive]
pub struct Outputs<'a> {
    /// `[batch, q_heads, q_len, value_dim]`.
    pub out: TensorViewMut<'a>,
    /// Logsumexp, dense `[batch, q_heads, q_len]`, if wanted.
    pub lse: Option<&'a mut [f32]>,
}

impl<'a> Outputs<'a> {
    /// Outputs without logsumexp, which is a public field.
    #[must_use]
    pub const fn new(out: TensorViewMut<'a>) -> Self {
        Self { out, lse: None }
    }
}

/// Why a run did not start. Nothing was written.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum RunError {
    /// A tensor does not have the shape that the problem says.
    Shape {
        /// Name of the tensor.
        tensor: &'static str,
        /// The problem's shape.
        expected: [usize; 4],
        /// The shape of the tensor.
        got: [usize; 4],
    },
    /// A tensor does not have the dtype that the problem says.
    Dtype {
        /// Name of the tensor.
        tensor: &'static str,
        /// The problem's dtype.
        expected: Dtype,
        /// The dtype of the tensor.
        got: Dtype,
    },
    /// Keys or values are not stored in the problem's codec.
    Codec {
        /// `k` or `v`.
        tensor: &'static str,
        /// The problem's codec.
        expected: Codec,
        /// The codec of the keys or values.
        got: Codec,
    },
    /// Values are columns of the keys by the problem, and `v` is not the first columns of `k`.
    NotKeyColumns,
    /// A tensor lies in main memory and the call reads tensors of a device.
    HostMemory {
        /// Name of the tensor.
        tensor: &'static str,
    },
    /// A list does not have the length that the problem says.
    Length {
        /// Name of the list.
        tensor: &'static str,
        /// Elements expected.
        expected: usize,
        /// Elements found.
        got: usize,
    },
    /// The problem has an input that is missing.
    Missing {
        /// Name of the input.
        tensor: &'static str,
    },
    /// An input was given that the problem does not have.
    Unexpected {
        /// Name of the input.
        tensor: &'static str,
    },
    /// The magnitude of an ALiBi slope is above the maximum, so that biases would overflow f32, or the slope is NaN.
    AlibiSlope {
        /// Its index in the list.
        index: usize,
        /// The slope given.
        slope: f32,
        /// The largest magnitude supported.
        max: f32,
    },
    /// The mask has another kind than the problem's.
    MaskKind {
        /// The problem's kind.
        expected: MaskKind,
        /// The kind of the mask.
        got: MaskKind,
    },
    /// The mask does not broadcast to the problem.
    MaskShape {
        /// `[sequences, q_heads, queries, keys]`; each axis may also be 1.
        expected: [usize; 4],
        /// The shape of the mask.
        got: [usize; 4],
    },
    /// The tree mask is not boolean.
    TreeKind {
        /// The mask's kind.
        got: MaskKind,
    },
    /// The tables do not describe sequences in the pages.
    Tables(TableError),
    /// The length of a sequence in the tables is not the problem's.
    CachedLen {
        /// Index of the sequence.
        sequence: usize,
        /// The problem's length.
        expected: usize,
        /// The length in the tables.
        got: usize,
    },
    /// The sequences of a shared prefix have different pages.
    Prefix {
        /// Index of the prefix.
        index: usize,
        /// The sequence whose pages differ from the first one's.
        sequence: usize,
        /// The first token that has another page.
        token: usize,
    },
    /// A query row sees a token that the cache no longer keeps.
    NotKept {
        /// Index of the sequence.
        sequence: usize,
        /// Query row of the sequence.
        row: usize,
        /// The first key that it sees by causality, window and length, though it is not kept.
        key: usize,
        /// The first token that is kept.
        first: usize,
    },
    /// The memory of a tensor is smaller than its shape and strides need.
    Memory {
        /// Name of the tensor.
        tensor: &'static str,
        /// The reason.
        error: ViewError,
    },
    /// Rows of keys or values do not lie at multiples of the size of an element, or of the alignment that their tensor claims.
    Alignment {
        /// `k` or `v`.
        tensor: &'static str,
        /// The alignment expected, in bytes.
        aligned: usize,
        /// Where the first row starts in its memory, or a stride, in bytes.
        got: usize,
    },
    /// The problem has no backward pass.
    NoGradients {
        /// The reason.
        why: &'static str,
    },
    /// The workspace is smaller than the plan's.
    Workspace {
        /// Bytes that the plan needs.
        needed: usize,
        /// Bytes given.
        got: usize,
    },
    /// The plan was made for an instruction set that the `Cpu` does not use.
    Machine {
        /// Kernel of the plan.
        kernel: String,
    },
    /// The plan was made for another backend.
    OtherBackend {
        /// Kernel of the plan.
        kernel: String,
    },
    /// The threads that compute cannot start.
    Threads {
        /// The error of the operating system.
        reason: String,
    },
}

impl std::fmt::Display for RunError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Shape { tensor, expected, got } => {
                write!(f, "{tensor} has shape {got:?}, expected {expected:?}")
            }
            Self::Dtype { tensor, expected, got } => write!(f, "{tensor} is {got}, expected {expected}"),
            Self::Codec { tensor, expected, got } => write!(f, "{tensor} is {got}, expected {expected}"),
            Self::HostMemory { tensor } => {
                write!(f, "{tensor} lies in main memory, expected memory of the device")
            }
            Self::NotKeyColumns => f.write_str("v is not the first columns of k, as the problem says"),
            Self::Length { tensor, expected, got } => {
                write!(f, "{tensor} has {got} elements, expected {expected}")
            }
            Self::Missing { tensor } => write!(f, "{tensor} is missing: the problem has it"),
            Self::Unexpected { tensor } => write!(f, "{tensor} was given but the problem does not have it"),
            Self::AlibiSlope { index, slope, max } => {
                write!(
                    f,
                    "alibi_slopes[{index}] is {slope:e}, expected -{max:e}..={max:e}: biases would overflow f32"
                )
            }
            Self::MaskKind { expected, got } => write!(f, "mask is {got}, expected {expected}"),
            Self::MaskShape { expected, got } => {
                write!(f, "mask has shape {got:?}, expected {expected:?} with any axis 1")
            }
            Self::TreeKind { got } => write!(f, "tree is {got}, expected bool"),
            Self::Tables(error) => write!(f, "tables: {error}"),
            Self::CachedLen { sequence, expected, got } => {
                write!(
                    f,
                    "tables: sequence {sequence} has length {got}, the problem's kv_lens say {expected}"
                )
            }
            Self::Prefix { index, sequence, token } => write!(
                f,
                "tables: token {token} of sequence {sequence} is not where prefixes[{index}] has it"
            ),
            Self::NotKept { sequence, row, key, first } => {
                write!(
                    f,
                    "query row {row} of sequence {sequence} sees key {key}, the first kept is {first}: expected a window \
                     that hides keys before {first}, a ring with a capacity of window + query rows, or fewer tokens forgotten"
                )
            }
            Self::Memory { tensor, error } => write!(f, "{tensor}: {error}"),
            Self::Alignment { tensor, aligned, got } => {
                write!(
                    f,
                    "{tensor} has an offset or a stride of {got} bytes, expected a multiple of {aligned}"
                )
            }
            Self::NoGradients { why } => write!(f, "no backward pass: {why}"),
            Self::Workspace { needed, got } => {
                write!(f, "workspace has {got} bytes, the plan needs {needed}")
            }
            Self::Machine { kernel } => {
                write!(f, "{kernel} needs instructions that this Cpu does not use")
            }
            Self::OtherBackend { kernel } => write!(f, "{kernel} is a kernel of another backend"),
            Self::Threads { reason } => write!(f, "the threads of the pool cannot start: {reason}"),
        }
    }
}

impl std::error::Error for RunError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Tables(error) => Some(error),
            Self::Memory { error, .. } => Some(error),
            _ => None,
        }
    }
}

fn shape(tensor: &'static str, expected: [usize; 4], got: [usize; 4]) -> Result<(), RunError> {
    if got == expected { Ok(()) } else { Err(RunError::Shape { tensor, expected, got }) }
}

/// Checks shape and dtype of a tensor.
pub(crate) fn tensor(
    tensor: &'static str,
    (expected, of): (Dtype, [usize; 4]),
    (got, given): (Dtype, [usize; 4]),
) -> Result<(), RunError> {
    shape(tensor, of, given)?;
    if got == expected { Ok(()) } else { Err(RunError::Dtype { tensor, expected, got }) }
}

fn kv(
    tensor: &'static str,
    (expected, of): (Codec, [usize; 4]),
    (got, given): (Codec, [usize; 4]),
) -> Result<(), RunError> {
    shape(tensor, of, given)?;
    if got == expected { Ok(()) } else { Err(RunError::Codec { tensor, expected, got }) }
}

fn per_head(tensor: &'static str, wanted: bool, given: Option<usize>, heads: usize) -> Result<(), RunError> {
    match (wanted, given) {
        (true, None) => Err(RunError::Missing { tensor }),
        (false, Some(_)) => Err(RunError::Unexpected { tensor }),
        (true, Some(got)) if got != heads => Err(RunError::Length { tensor, expected: heads, got }),
        _ => Ok(()),
    }
}

/// Dtypes and shapes of inputs in the memory of any device.
#[derive(Debug, Clone, Copy)]
#[allow(clippy::exhaustive_structs)]
pub struct InputShapes {
    /// Query.
    pub q: (Dtype, [usize; 4]),
    /// Keys, or pages of keys.
    pub k: (Codec, [usize; 4]),
    /// Values, or pages of values.
    pub v: (Codec, [usize; 4]),
    /// Tokens per page, if there are block tables.
    pub page: Option<usize>,
    /// Tree mask.
    pub tree: Option<(MaskKind, [usize; 4])>,
    /// Mask.
    pub mask: Option<(MaskKind, [usize; 4])>,
    /// Number of ALiBi slopes.
    pub alibi_slopes: Option<usize>,
    /// Number of sinks.
    pub sinks: Option<usize>,
}

impl InputShapes {
    fn of(inputs: &Inputs<'_>, kv_storage: KvStorage) -> Self {
        let [k, v] = kv_storage.shapes([&inputs.k, &inputs.v]);
        let of = |v: &TensorView<'_>| (v.dtype(), v.shape());
        let mask = |mask: &MaskView<'_>| (mask.kind(), mask.shape());
        Self {
            q: of(&inputs.q),
            k: (inputs.k.codec(), k),
            v: (inputs.v.codec(), v),
            page: inputs.tables.map(|tables| tables.page_size),
            tree: inputs.tree.as_ref().map(mask),
            mask: inputs.mask.as_ref().map(mask),
            alibi_slopes: inputs.alibi_slopes.map(<[f32]>::len),
            sinks: inputs.sinks.map(<[f32]>::len),
        }
    }

    /// Checks dtypes, shapes and presence of the inputs; the contents of tables are not checked.
    pub fn check(&self, problem: &Problem) -> Result<(), RunError> {
        let (dims, desc, dtype) = (problem.dims(), problem.desc(), problem.dtype());
        tensor("q", (dtype, dims.q_shape()), self.q)?;
        let (k, v) = match (&desc.sequences, self.page) {
            (Sequences::Cached { .. }, None) => return Err(RunError::Missing { tensor: "tables" }),
            (Sequences::Cached { .. }, Some(page)) => {
                let pool = |dim: usize| [self.k.1[0], dims.kv_heads, page, dim];
                (pool(dims.head_dim), pool(dims.value_dim))
            }
            (_, None) => (dims.k_shape(), dims.v_shape()),
            (_, Some(_)) => return Err(RunError::Unexpected { tensor: "tables" }),
        };
        kv("k", (problem.k_codec(), k), self.k)?;
        kv("v", (problem.v_codec(), v), self.v)?;
        match (desc.tree, self.tree) {
            (true, None) => return Err(RunError::Missing { tensor: "tree" }),
            (false, Some(_)) => return Err(RunError::Unexpected { tensor: "tree" }),
            (true, Some((got, _))) if got != MaskKind::Bool => return Err(RunError::TreeKind { got }),
            (true, Some((_, got))) if got != problem.tree_shape() => {
                return Err(RunError::Shape { tensor: "tree", expected: problem.tree_shape(), got });
            }
            _ => {}
        }
        let sequences = problem.sequences().len();
        // A list of another length than either is refused as one for all sequences.
        let each = self.alibi_slopes.filter(|got| *got == sequences * dims.q_heads);
        per_head("alibi_slopes", desc.alibi, self.alibi_slopes, each.unwrap_or(dims.q_heads))?;
        per_head("sinks", desc.sinks, self.sinks, dims.q_heads)?;
        match (desc.mask, self.mask) {
            (None, None) => Ok(()),
            (Some(_), None) => Err(RunError::Missing { tensor: "mask" }),
            (None, Some(_)) => Err(RunError::Unexpected { tensor: "mask" }),
            (Some(expected), Some((got, _))) if got != expected => Err(RunError::MaskKind { expected, got }),
            (Some(_), Some((_, got))) => {
                let expected = problem.mask_shape();
                if got.iter().zip(expected).any(|(&g, e)| g != e && g != 1) {
                    return Err(RunError::MaskShape { expected, got });
                }
                Ok(())
            }
        }
    }
}

/// Checks that tables describe the problem's sequences in a pool of `pages` pages, and that all visible tokens are
/// kept. Runs on the host check their tables by it; a caller that copies tables to a device checks them before.
///
/// # Errors
/// [`RunError::Length`], [`RunError::CachedLen`], [`RunError::Tables`], [`RunError::NotKept`] or [`RunError::Prefix`].
pub fn check_tables(problem: &Problem, tables: &BlockTables, pages: usize) -> Result<(), RunError> {
    let sequences = problem.sequences();
    if tables.lens.len() != sequences.len() {
        let (expected, got) = (sequences.len(), tables.lens.len());
        return Err(RunError::Length { tensor: "tables.lens", expected, got });
    }
    for (sequence, (s, &got)) in sequences.iter().zip(&tables.lens).enumerate() {
        let (expected, is_right) = match problem.key_part() {
            KeyPart::First => (s.first_len, got >= s.first_len),
            KeyPart::All | KeyPart::Codes | KeyPart::Last => (s.kv_len, got == s.kv_len),
        };
        if !is_right {
            return Err(RunError::CachedLen { sequence, expected, got });
        }
    }
    tables.validate(pages).map_err(RunError::Tables)?;
    for (sequence, (s, &first)) in sequences.iter().zip(&tables.first).enumerate() {
        match problem.first_visible(s) {
            Some((row, key)) if key < first => {
                return Err(RunError::NotKept { sequence, row, key, first });
            }
            _ => {}
        }
    }
    for (index, prefix) in problem.desc().prefixes.iter().enumerate() {
        let leader = prefix.sequences.start;
        for sequence in prefix.sequences.clone() {
            let shared = tables.shared(leader, sequence, prefix.len);
            if shared < prefix.len {
                return Err(RunError::Prefix { index, sequence, token: shared });
            }
        }
    }
    Ok(())
}

/// Slopes from one sequence to the next: 0 where all sequences share them.
#[must_use]
pub const fn alibi_stride(slopes: usize, q_heads: usize) -> usize {
    if slopes > q_heads { q_heads } else { 0 }
}

/// Checks the magnitudes of ALiBi slopes.
pub(crate) fn check_slopes(slopes: Option<&[f32]>) -> Result<(), RunError> {
    let max = MAX_ALIBI_SLOPE;
    // No range contains a NaN.
    let refused = |(_, slope): &(usize, &f32)| !(-max..=max).contains(*slope);
    match slopes.unwrap_or_default().iter().enumerate().find(refused) {
        Some((index, &slope)) => Err(RunError::AlibiSlope { index, slope, max }),
        None => Ok(()),
    }
}

/// Checks that the inputs are the problem's. Cost: `O(entries of the tables)` for cached sequences, plus the entries
/// of each shared prefix.
pub(crate) fn check_inputs(problem: &Problem, inputs: &Inputs<'_>) -> Result<(), RunError> {
    let given = InputShapes::of(inputs, problem.kv_storage());
    given.check(problem)?;
    if problem.kv_storage() == KvStorage::KeyColumns && !inputs.v.is_first_columns_of(&inputs.k) {
        return Err(RunError::NotKeyColumns);
    }
    check_slopes(inputs.alibi_slopes)?;
    inputs.tables.map_or(Ok(()), |tables| check_tables(problem, tables, given.k.1[0]))?;
    check_kept(problem, inputs)
}

/// Checks that the tokens that the problem reads in 16 bits have pages.
fn check_kept(problem: &Problem, inputs: &Inputs<'_>) -> Result<(), RunError> {
    let tensor = "kept";
    match (problem.desc().kept.is_some() && problem.key_part() == KeyPart::All, inputs.kept.is_some()) {
        (false, false) => return Ok(()),
        (false, true) => return Err(RunError::Unexpected { tensor }),
        (true, false) => return Err(RunError::Missing { tensor }),
        (true, true) => {}
    }
    for (tensor, part) in [("kept.first", KeyPart::First), ("kept.last", KeyPart::Last)] {
        let problem = problem.part(part);
        match inputs.part(part) {
            Some(inputs) => check_inputs(&problem, &inputs)?,
            None if problem.sequences().iter().any(|s| problem.first_visible(s).is_some()) => {
                return Err(RunError::Missing { tensor });
            }
            None => {}
        }
    }
    Ok(())
}

/// Checks the dtype and shape of an output, and the length of a list of logsumexps.
pub fn check_outputs(
    problem: &Problem,
    out: (Dtype, [usize; 4]),
    lse: Option<usize>,
) -> Result<(), RunError> {
    let dims = problem.dims();
    tensor("out", (problem.dtype(), dims.out_shape()), out)?;
    let expected = dims.batch * dims.q_heads * dims.q_len;
    match lse {
        Some(got) if got != expected => Err(RunError::Length { tensor: "lse", expected, got }),
        _ => Ok(()),
    }
}

/// Checks inputs and outputs.
pub fn check(problem: &Problem, inputs: &Inputs<'_>, outputs: &Outputs<'_>) -> Result<(), RunError> {
    check_inputs(problem, inputs)?;
    let out = (outputs.out.dtype(), outputs.out.shape());
    check_outputs(problem, out, outputs.lse.as_ref().map(|lse| lse.len()))
}
