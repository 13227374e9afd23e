//! Checks and descriptions of calls whose tensors are on a device.

use crate::options::{Mask, Options};
use crate::storage::{Qkv, check_no_gradient};
use candle_core::{DType, Device, Layout, Result, Tensor, bail};
use flashtile::{Dims, Dtype, ProblemDesc};

/// Checks that all tensors of a call are on its device and need no gradient that it does not give, and makes its lists dense.
pub(crate) fn prepare(tensors: Qkv<&Tensor>, options: &mut Options, device: &Device) -> Result<()> {
    tensors.each(|name, tensor| check_same_device(name, tensor, device))?;
    let list = |name, of: Option<Tensor>| of.map(|tensor| dense_list(name, &tensor, device)).transpose();
    options.alibi_slopes = list("alibi_slopes", options.alibi_slopes.take())?;
    options.sinks = list("sinks", options.sinks.take())?;
    match &options.mask {
        None => {}
        Some(Mask::Visible(mask)) => check_same_device("mask", mask, device)?,
        Some(Mask::Additive(mask)) => {
            check_no_gradient("mask", mask)?;
            check_same_device("mask", mask, device)?;
        }
    }
    if options.lse {
        tensors.each(check_no_gradient)?;
    }
    Ok(())
}

fn check_same_device(name: &str, tensor: &Tensor, device: &Device) -> Result<()> {
    if tensor.device().same_device(device) {
        return Ok(());
    }
    // Two candle devices may be of one GPU, and have streams or queues of their own.
    let (got, expected) = (tensor.device(), device.location());
    if got.location() == expected {
        bail!("{name} is on another candle device of {expected:?} than q, k or v: make all tensors on one")
    }
    bail!("{name} is on {:?}, and q, k or v on {expected:?}: move it with to_device", got.location())
}

/// A list of f32 on the device whose elements are contiguous.
fn dense_list(name: &str, tensor: &Tensor, device: &Device) -> Result<Tensor> {
    check_same_device(name, tensor, device)?;
    check_no_gradient(name, tensor)?;
    match (tensor.dtype(), tensor.rank()) {
        (DType::F32, 1) => tensor.contiguous(),
        (dtype, _) => bail!("{name} is {dtype:?} of shape {:?}, expected F32 of one axis", tensor.dims()),
    }
}

/// Checks that every element of a layout, which has some, lies in memory of `len` elements.
pub(crate) fn check_inside(name: &str, layout: &Layout, len: usize) -> Result<()> {
    let mut axes = layout.dims().iter().zip(layout.stride());
    let last = axes.try_fold(layout.start_offset(), |last, (&n, &stride)| {
        last.checked_add((n - 1).checked_mul(stride)?)
    });
    if last.is_none_or(|last| last >= len) {
        bail!("{name} lies outside its memory")
    }
    Ok(())
}

/// The problem of tensors `[batch, heads, rows, dim]`, without a mask.
pub(crate) fn desc(options: &Options, dtype: Dtype, shapes: Qkv<[usize; 4]>) -> ProblemDesc {
    let ([batch, q_heads, q_len, head_dim], [_, kv_heads, kv_len, _]) = (shapes.q, shapes.k);
    let value_dim = shapes.v[3];
    let dims = Dims { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim };
    let mut desc = ProblemDesc::new(dims, dtype);
    desc.visibility = options.visibility;
    desc.q_offset = options.q_offset;
    desc.scale = options.scale;
    desc.softcap = options.softcap;
    desc.alibi = options.alibi_slopes.is_some();
    desc.sinks = options.sinks.is_some();
    options.set_sequences(&mut desc);
    desc
}
