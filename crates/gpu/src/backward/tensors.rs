//! Tensors of a backward run in the memory of a device.

use crate::error::SessionError;
use crate::tensors::{GpuMask, GpuTensor, GpuTensorMut, copies, dtype_of};
use flashtile_core::dtype::MaskKind;
use flashtile_core::gradients;
use flashtile_core::inputs::{self, InputShapes, RunError};
use flashtile_core::problem::Problem;
use flashtile_kernel::{DeviceMemory, ScalarType, View, ViewMut};

/// Tensors that a backward run reads, as [`BackwardInputs`](flashtile_core::gradients::BackwardInputs) in the memory of a device.
#[derive(Debug)]
#[allow(clippy::exhaustive_structs)]
pub struct GpuBackwardInputs<'a, M> {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub q: GpuTensor<'a, M>,
    /// `[batch, kv_heads, kv_len, head_dim]`.
    pub k: GpuTensor<'a, M>,
    /// `[batch, kv_heads, kv_len, value_dim]`.
    pub v: GpuTensor<'a, M>,
    /// Output of the forward run, `[batch, q_heads, q_len, value_dim]`.
    pub out: GpuTensor<'a, M>,
    /// Its logsumexp, dense `[batch, q_heads, q_len]`, f32.
    pub lse: View<'a, M>,
    /// Gradient of the loss with respect to `out`, `[batch, q_heads, q_len, value_dim]`.
    pub d_out: GpuTensor<'a, M>,
    /// Gradient of the loss with respect to `lse`, dense `[batch, q_heads, q_len]`, f32; `None` for zeros.
    pub d_lse: Option<View<'a, M>>,
    /// Boolean, of the shape [`Problem::tree_shape`].
    pub tree: Option<GpuMask<'a, M>>,
    /// Broadcastable to [`Problem::mask_shape`].
    pub mask: Option<GpuMask<'a, M>>,
    /// `[q_heads]` or `[sequences, q_heads]`, f32.
    pub alibi_slopes: Option<View<'a, M>>,
    /// `[q_heads]` logits, f32.
    pub sinks: Option<View<'a, M>>,
}

copies!(GpuBackwardInputs);

/// Tensors that a backward run writes, as [`Gradients`](flashtile_core::gradients::Gradients) in the memory of a device. Every element is
/// written.
#[derive(Debug)]
#[allow(clippy::exhaustive_structs)]
pub struct GpuGradients<'a, M> {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub d_q: GpuTensorMut<'a, M>,
    /// `[batch, kv_heads, kv_len, head_dim]`.
    pub d_k: GpuTensorMut<'a, M>,
    /// `[batch, kv_heads, kv_len, value_dim]`.
    pub d_v: GpuTensorMut<'a, M>,
    /// `[q_heads]`, f32, if wanted, where the problem has sinks.
    pub d_sinks: Option<ViewMut<'a, M>>,
    /// In the shape of the mask, dense, f32, if wanted, where the mask is additive: sums over the dimensions that the mask broadcasts.
    pub d_bias: Option<ViewMut<'a, M>>,
    /// One for each slope, f32, if wanted, where the problem has ALiBi.
    pub d_alibi_slopes: Option<ViewMut<'a, M>>,
}

impl<'a, M> GpuGradients<'a, M> {
    /// Gradients of q, k and v alone.
    #[must_use]
    pub const fn new(d_q: GpuTensorMut<'a, M>, d_k: GpuTensorMut<'a, M>, d_v: GpuTensorMut<'a, M>) -> Self {
        Self { d_q, d_k, d_v, d_sinks: None, d_bias: None, d_alibi_slopes: None }
    }
}

fn check_list<E>(
    tensor: &'static str,
    expected: usize,
    got: Option<(ScalarType, usize)>,
) -> Result<(), SessionError<E>> {
    match got {
        Some((element, _)) if element != ScalarType::F32 => {
            Err(SessionError::Element { tensor, expected: ScalarType::F32.name(), element })
        }
        Some((_, got)) if got != expected => Err(RunError::Length { tensor, expected, got }.into()),
        Some(_) | None => Ok(()),
    }
}

/// Checks that tensors are the problem's and inside of their memory.
///
/// # Errors
/// [`SessionError::Inputs`] or [`SessionError::Element`].
pub fn check<M: DeviceMemory, E>(
    problem: &Problem,
    inputs: &GpuBackwardInputs<'_, M>,
    gradients: &GpuGradients<'_, M>,
) -> Result<(), SessionError<E>> {
    let dtype = |tensor, element| {
        let expected = "f32, f16 or bf16";
        dtype_of(element).ok_or(SessionError::Element { tensor, expected, element })
    };
    let list = |list: View<'_, M>| (list.element(), list.len());
    let GpuBackwardInputs { q, k, v, out, lse, d_out, d_lse, tree, mask, alibi_slopes, sinks } = inputs;
    let mask_shape = |mask: &GpuMask<'_, M>| (mask.kind, mask.shape);
    let shapes = InputShapes {
        q: (dtype("q", q.view.element())?, q.shape),
        k: (dtype("k", k.view.element())?.into(), k.shape),
        v: (dtype("v", v.view.element())?.into(), v.shape),
        page: None,
        tree: tree.as_ref().map(mask_shape),
        mask: mask.as_ref().map(mask_shape),
        alibi_slopes: alibi_slopes.map(|list| list.len()),
        sinks: sinks.map(|list| list.len()),
    };
    shapes.check(problem)?;
    let dims = problem.dims();
    let rows: usize = dims.lse_shape().iter().product();
    inputs::check_outputs(problem, (dtype("out", out.view.element())?, out.shape), None)?;
    let GpuGradients { d_q, d_k, d_v, d_sinks, d_bias, d_alibi_slopes } = gradients;
    let bias = mask.filter(|mask| matches!(mask.kind, MaskKind::Additive(_)));
    let bias = bias.map_or(0, |mask| mask.shape.iter().product());
    let written = |list: &Option<ViewMut<'_, M>>| list.as_ref().map(|list| (list.element(), list.len()));
    let slopes = alibi_slopes.map_or(0, |list| list.len());
    let heads = sinks.map_or(0, |list| list.len());
    check_list("alibi_slopes", slopes, alibi_slopes.map(list))?;
    check_list("sinks", heads, sinks.map(list))?;
    check_list("lse", rows, Some(list(*lse)))?;
    check_list("d_lse", rows, d_lse.map(list))?;
    check_list("d_sinks", heads, written(d_sinks))?;
    check_list("d_bias", bias, written(d_bias))?;
    check_list("d_alibi_slopes", slopes, written(d_alibi_slopes))?;
    let d_out_dtype = dtype("d_out", d_out.view.element())?;
    gradients::check_tensor(problem, "d_out", (d_out_dtype, d_out.shape))?;
    for (name, tensor) in [("d_q", d_q), ("d_k", d_k), ("d_v", d_v)] {
        gradients::check_tensor(problem, name, (dtype(name, tensor.view.element())?, tensor.shape))?;
        tensor.check().map_err(|error| RunError::Memory { tensor: name, error })?;
    }
    for (name, tensor) in [("q", q), ("k", k), ("v", v), ("out", out), ("d_out", d_out)] {
        tensor.check().map_err(|error| RunError::Memory { tensor: name, error })?;
    }
    tree.map_or(Ok(()), |tree| tree.check("tree"))?;
    Ok(mask.map_or(Ok(()), |mask| mask.check("mask"))?)
}
