//! Attention on the CPU as an operator of candle, with its gradients.

use crate::options::Options;
use crate::storage::{Qkv, Stored, read, read_qkv, refused_shape, write_new};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp3, Device, Layout, Result, Shape, Tensor, bail};
use flashtile::{BackwardInputs, Gradients, Runner};
use std::sync::{Arc, Mutex, PoisonError};

/// Attention to keys and values in rows of their own. candle hands no logsumexp to the backward pass: the operator keeps it, 4 bytes for each
/// query row and head.
pub(crate) struct AttentionOp {
    pub(crate) name: &'static str,
    pub(crate) options: Options,
    /// Written by the forward pass, if it is wanted, or gradients may be.
    pub(crate) lse: Option<Arc<Mutex<Vec<f32>>>>,
}

impl CustomOp3 for AttentionOp {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
        s3: &CpuStorage,
        l3: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let tensors = Qkv { q: (s1, l1), k: (s2, l2), v: (s3, l3) };
        self.options.run(tensors.stored(), self.lse.as_deref())
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        out: &Tensor,
        d_out: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        // The gradient of a sum is one element, expanded.
        let d_out = d_out.contiguous()?;
        let Some(lse) = &self.lse else { bail!("{} kept no logsumexp", self.name) };
        let lse = lse.lock().unwrap_or_else(PoisonError::into_inner);
        let results = Results { out, lse: lse.as_slice(), d_out: &d_out };
        let Qkv { q, k, v } = gradients(&self.options, Qkv { q, k, v }, &results)?;
        Ok((Some(q), Some(k), Some(v)))
    }
}

/// The results of a forward pass, and the gradient of its output.
pub(crate) struct Results<'a, L> {
    pub(crate) out: &'a Tensor,
    pub(crate) lse: L,
    pub(crate) d_out: &'a Tensor,
}

/// Gradients of q, k and v, dense in the axes of the call.
fn gradients(options: &Options, tensors: Qkv<&Tensor>, results: &Results<'_, &[f32]>) -> Result<Qkv<Tensor>> {
    // Each tensor is locked for reading until the gradients are computed.
    read_qkv(tensors, |qkv: Qkv<Stored<'_>>| {
        read("out", results.out, |out: Stored<'_>| {
            read("d_out", results.d_out, |d_out: Stored<'_>| compute(options, qkv, (out, d_out), results.lse))
        })
    })
}

fn compute(
    options: &Options,
    tensors: Qkv<Stored<'_>>,
    (out, d_out): (Stored<'_>, Stored<'_>),
    lse: &[f32],
) -> Result<Qkv<Tensor>> {
    let axes = options.axes();
    let (q, k, v) = (tensors.q.view(axes.q)?, tensors.k.view(axes.kv)?, tensors.v.view(axes.kv)?);
    let (out, d_out) = (out.view(axes.q)?, d_out.view(axes.q)?);
    options.with(|options_of_call| {
        let mut desc = options_of_call.desc(&q, &k, &v);
        options.set_sequences(&mut desc);
        let forward = options_of_call.inputs(q, k, v);
        let inputs = BackwardInputs { forward, out, lse, d_out, d_lse: None };
        let (mut d_k, mut d_v) = (None, None);
        let d_q = write_new(q.dtype(), q.shape(), axes.q, |d_q| {
            d_k = Some(write_new(k.dtype(), k.shape(), axes.kv, |d_k| {
                d_v = Some(write_new(v.dtype(), v.shape(), axes.kv, |d_v| {
                    let mut gradients = Gradients::new(d_q, d_k, d_v);
                    Runner::with_current(|runner| runner.run_backward(&desc, &inputs, &mut gradients))
                        .map_err(|error| refused_shape(error, axes))
                })?);
                Ok(())
            })?);
            Ok(())
        })?;
        let (Some(d_k), Some(d_v)) = (d_k, d_v) else { bail!("gradients were not written") };
        Ok(Qkv { q: tensor_of(d_q)?, k: tensor_of(d_k)?, v: tensor_of(d_v)? })
    })
}

/// A tensor of memory on the CPU.
fn tensor_of((storage, shape): (CpuStorage, Shape)) -> Result<Tensor> {
    match storage {
        CpuStorage::F32(data) => Tensor::from_vec(data, shape, &Device::Cpu),
        CpuStorage::F16(data) => Tensor::from_vec(data, shape, &Device::Cpu),
        CpuStorage::BF16(data) => Tensor::from_vec(data, shape, &Device::Cpu),
        other => bail!("a gradient is {:?}, expected F32, F16 or BF16", other.dtype()),
    }
}
