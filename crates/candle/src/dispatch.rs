//! Attention on the device of the tensors.

use crate::gradient::AttentionOp;
use crate::options::Options;
use crate::storage::{Qkv, check_device, check_no_gradient, lse_dims};
use candle_core::{Device, Result, Tensor};
use std::sync::{Arc, Mutex, PoisonError};

/// Attention with any options. Returns out, and the logsumexp if [`Options::lse`] is set.
///
/// Shapes are for [`TensorLayout::Bhsd`](crate::TensorLayout::Bhsd): q `(batch, q_heads, q_len, dim)`, k `(batch, kv_heads, kv_len, dim)`
/// and v `(batch, kv_heads, kv_len, value_dim)` give out `(batch, q_heads, q_len, value_dim)` and a logsumexp `(batch, q_heads, q_len)` in
/// F32; packed tensors give `(total, q_heads, value_dim)` and `(q_heads, total)`. `q_heads` is a multiple of `kv_heads`.
/// All three have one dtype, F32, F16 or BF16, and are read in place. Any strides are accepted, but the last axis must have stride 1.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use flashtile_candle::{Options, attention};
/// let q = Tensor::rand(-1f32, 1.0, (1, 8, 5, 64), &Device::Cpu)?;
/// let kv = Tensor::rand(-1f32, 1.0, (1, 2, 100, 64), &Device::Cpu)?;
/// let (out, lse) = attention(&q, &kv, &kv, &Options::decode().window(31, 0).softcap(50.0).lse())?;
/// assert_eq!(out.dims(), [1, 8, 5, 64]);
/// assert_eq!(lse.map(|lse| lse.dims().to_vec()), Some(vec![1, 8, 5]));
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// If a tensor is not on the CPU (or, with the features `cuda` and `metal`, not on the device of the others), has another dtype, rank or
/// shape, or a last axis whose stride is not 1, and if options contradict each other.
///
/// `backward()` through out gives the gradients of q, k and v, and is an error over pages. A variable, or a tensor computed from one, is an error
/// as an additive mask, slopes or sinks, and also as q, k or v if the logsumexp is asked for: an operator of candle has one result.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, options: &Options) -> Result<(Tensor, Option<Tensor>)> {
    apply("attention", Qkv { q, k, v }, options.clone())
}

/// [`attention`] under the name of another operator.
pub(crate) fn apply(
    name: &'static str,
    tensors: Qkv<&Tensor>,
    options: Options,
) -> Result<(Tensor, Option<Tensor>)> {
    let Qkv { q, k, v } = tensors;
    #[cfg(feature = "cuda")]
    if let Some(tensor) = [q, k, v].into_iter().find(|tensor| tensor.device().is_cuda()) {
        return crate::gpu_operator::apply(name, tensors, options, tensor.device());
    }
    #[cfg(feature = "metal")]
    if let Some(tensor) = [q, k, v].into_iter().find(|tensor| tensor.device().is_metal()) {
        return crate::gpu_operator::apply(name, tensors, options, tensor.device());
    }
    tensors.each(check_device)?;
    if options.lse {
        tensors.each(check_no_gradient)?;
    }
    let is_tracked = [q, k, v].into_iter().any(Tensor::track_op);
    let lse = (options.lse || is_tracked).then(|| Arc::new(Mutex::new(Vec::new())));
    let (wanted, axes) = (lse.clone().filter(|_| options.lse), options.axes());
    let out = q.apply_op3(k, v, AttentionOp { name, options, lse })?;
    let Some(lse) = wanted else { return Ok((out, None)) };
    let lse = std::mem::take(&mut *lse.lock().unwrap_or_else(PoisonError::into_inner));
    Ok((out, Some(Tensor::from_vec(lse, lse_dims(axes.q, q)?, &Device::Cpu)?)))
}
