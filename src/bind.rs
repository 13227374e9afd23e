//! Inputs and outputs of a run, checked against the problem once, for every backend.

use crate::{Dtype, MaskKind, MaskView, Problem, TensorView, TensorViewMut};

/// Tensors that a forward run reads.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Inputs<'a> {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub q: TensorView<'a>,
    /// `[batch, kv_heads, kv_len, head_dim]`.
    pub k: TensorView<'a>,
    /// `[batch, kv_heads, kv_len, value_dim]`.
    pub v: TensorView<'a>,
    /// Broadcastable to [`Problem::mask_shape`]; present exactly when the problem has a mask.
    pub mask: Option<MaskView<'a>>,
    /// `[q_heads]`; present exactly when the problem has ALiBi.
    pub alibi_slopes: Option<&'a [f32]>,
    /// `[q_heads]` logits; present exactly when the problem has sinks.
    pub sinks: Option<&'a [f32]>,
}

impl<'a> Inputs<'a> {
    /// Inputs without mask, ALiBi slopes or sinks; add them through the fields.
    #[must_use]
    pub const fn new(q: TensorView<'a>, k: TensorView<'a>, v: TensorView<'a>) -> Self {
        Self { q, k, v, mask: None, alibi_slopes: None, sinks: None }
    }
}

/// Tensors that a forward run writes. Contents before the run are never read.
#[derive(Debug)]
#[non_exhaustive]
pub struct Outputs<'a> {
    /// `[batch, q_heads, q_len, value_dim]`.
    pub out: TensorViewMut<'a>,
    /// Logsumexp, dense `[batch, q_heads, q_len]`, where wanted.
    pub lse: Option<&'a mut [f32]>,
}

impl<'a> Outputs<'a> {
    /// Outputs without logsumexp; add it through the field.
    #[must_use]
    pub const fn new(out: TensorViewMut<'a>) -> Self {
        Self { out, lse: None }
    }
}

/// Why a run did not start. Nothing was written.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum RunError {
    /// A tensor's shape is not the problem's.
    Shape {
        /// Name of the tensor.
        tensor: &'static str,
        /// The problem's shape.
        expected: [usize; 4],
        /// The tensor's shape.
        got: [usize; 4],
    },
    /// A tensor's dtype is not the problem's.
    Dtype {
        /// Name of the tensor.
        tensor: &'static str,
        /// The problem's dtype.
        expected: Dtype,
        /// The tensor's dtype.
        got: Dtype,
    },
    /// A list has not the length that the problem demands.
    Length {
        /// Name of the list.
        tensor: &'static str,
        /// Elements expected.
        expected: usize,
        /// Elements given.
        got: usize,
    },
    /// The problem has an input that was not given.
    Missing {
        /// Name of the input.
        tensor: &'static str,
    },
    /// An input was given that the problem does not have.
    Unexpected {
        /// Name of the input.
        tensor: &'static str,
    },
    /// The mask is of another kind than the problem's.
    MaskKind {
        /// The problem's kind.
        expected: MaskKind,
        /// The mask's kind.
        got: MaskKind,
    },
    /// A mask that does not broadcast to the problem.
    MaskShape {
        /// `[sequences, q_heads, queries, keys]`; each axis may also be 1.
        expected: [usize; 4],
        /// The mask's shape.
        got: [usize; 4],
    },
    /// The workspace is smaller than the plan's.
    Workspace {
        /// Bytes that the plan needs.
        needed: usize,
        /// Bytes given.
        got: usize,
    },
    /// The plan was made for instructions beyond those of the `Cpu`.
    Machine {
        /// Kernel of the plan.
        kernel: String,
    },
}

impl std::fmt::Display for RunError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Shape { tensor, expected, got } => {
                write!(f, "{tensor} has shape {got:?}, expected {expected:?}")
            }
            Self::Dtype { tensor, expected, got } => write!(f, "{tensor} is {got}, expected {expected}"),
            Self::Length { tensor, expected, got } => {
                write!(f, "{tensor} has {got} elements, expected {expected}")
            }
            Self::Missing { tensor } => write!(f, "{tensor} is missing: the problem has it"),
            Self::Unexpected { tensor } => write!(f, "{tensor} was given but the problem does not have it"),
            Self::MaskKind { expected, got } => write!(f, "mask is {got}, expected {expected}"),
            Self::MaskShape { expected, got } => {
                write!(f, "mask has shape {got:?}, expected {expected:?} with any axis 1")
            }
            Self::Workspace { needed, got } => {
                write!(f, "workspace has {got} bytes, the plan needs {needed}")
            }
            Self::Machine { kernel } => {
                write!(f, "{kernel} needs instructions beyond those of this Cpu")
            }
        }
    }
}

impl std::error::Error for RunError {}

fn tensor(
    tensor: &'static str,
    (dtype, shape): (Dtype, [usize; 4]),
    got: (Dtype, [usize; 4]),
) -> Result<(), RunError> {
    if got.1 != shape {
        return Err(RunError::Shape { tensor, expected: shape, got: got.1 });
    }
    if got.0 != dtype {
        return Err(RunError::Dtype { tensor, expected: dtype, got: got.0 });
    }
    Ok(())
}

fn per_head(tensor: &'static str, wanted: bool, given: Option<&[f32]>, heads: usize) -> Result<(), RunError> {
    match (wanted, given) {
        (true, None) => Err(RunError::Missing { tensor }),
        (false, Some(_)) => Err(RunError::Unexpected { tensor }),
        (true, Some(list)) if list.len() != heads => {
            Err(RunError::Length { tensor, expected: heads, got: list.len() })
        }
        _ => Ok(()),
    }
}

/// Checks that the inputs are the problem's.
pub(crate) fn check_inputs(problem: &Problem, inputs: &Inputs<'_>) -> Result<(), RunError> {
    let dims = problem.dims();
    let dtype = problem.dtype();
    let of = |v: &TensorView<'_>| (v.dtype(), v.shape());
    tensor("q", (dtype, dims.q_shape()), of(&inputs.q))?;
    tensor("k", (dtype, dims.k_shape()), of(&inputs.k))?;
    tensor("v", (dtype, dims.v_shape()), of(&inputs.v))?;
    per_head("alibi_slopes", problem.desc().alibi, inputs.alibi_slopes, dims.q_heads)?;
    per_head("sinks", problem.desc().sinks, inputs.sinks, dims.q_heads)?;
    match (problem.desc().mask, &inputs.mask) {
        (None, None) => Ok(()),
        (Some(_), None) => Err(RunError::Missing { tensor: "mask" }),
        (None, Some(_)) => Err(RunError::Unexpected { tensor: "mask" }),
        (Some(expected), Some(mask)) => {
            if mask.kind() != expected {
                return Err(RunError::MaskKind { expected, got: mask.kind() });
            }
            let (expected, got) = (problem.mask_shape(), mask.shape());
            if got.iter().zip(expected).any(|(&g, e)| g != e && g != 1) {
                return Err(RunError::MaskShape { expected, got });
            }
            Ok(())
        }
    }
}

/// Checks that inputs and outputs are the problem's.
pub(crate) fn check(problem: &Problem, inputs: &Inputs<'_>, outputs: &Outputs<'_>) -> Result<(), RunError> {
    check_inputs(problem, inputs)?;
    let dims = problem.dims();
    let out = &outputs.out;
    tensor("out", (problem.dtype(), dims.out_shape()), (out.dtype(), out.shape()))?;
    if let Some(lse) = &outputs.lse {
        let expected = dims.batch * dims.q_heads * dims.q_len;
        if lse.len() != expected {
            return Err(RunError::Length { tensor: "lse", expected, got: lse.len() });
        }
    }
    Ok(())
}
