//! Attention over tensors on GPUs as an operator of candle, with its gradients.

use crate::gpu::{DeviceOf, GpuStorage, NewTensor, Tensors, first, of, prepare, uninit, with_options};
use crate::gpu_gradient::gradients;
use crate::gradient::Results;
use crate::options::Options;
use crate::storage::{Qkv, refused, refused_shape};
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
#[cfg(feature = "metal")]
use candle_core::MetalStorage;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CustomOp3, Device, Layout, Result, Shape, Tensor, bail};
use flashtile::Dtype;
use flashtile::gpu::{GpuOutputs, Session};
use std::sync::{Arc, Mutex, PoisonError};

/// Attention over tensors of a device, and the logsumexp if the options ask for it.
pub(crate) fn apply(
    name: &'static str,
    tensors: Qkv<&Tensor>,
    mut options: Options,
    device: &Device,
) -> Result<(Tensor, Option<Tensor>)> {
    prepare(tensors, &mut options, device)?;
    let Qkv { q, k, v } = tensors;
    let (lse, wanted) = (Arc::new(Mutex::new(None)), options.lse);
    options.lse |= [q, k, v].into_iter().any(Tensor::track_op);
    let out = q.apply_op3(k, v, Op { name, options, lse: Arc::clone(&lse) })?;
    if !wanted {
        return Ok((out, None));
    }
    let lse = lse.lock().unwrap_or_else(PoisonError::into_inner).take();
    let Some(lse) = lse else { bail!("{name} did not compute the logsumexp") };
    Ok((out, Some(lse)))
}

/// Attention as an operator of candle. While it runs, the tensors are locked for reading.
struct Op {
    name: &'static str,
    options: Options,
    /// Receives the logsumexp, if the options ask for it: 4 bytes for each query row and head, which stay for the backward pass.
    lse: Arc<Mutex<Option<Tensor>>>,
}

impl CustomOp3 for Op {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        bail!("{} was made for tensors on a GPU", self.name)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        s1: &CudaStorage,
        l1: &Layout,
        s2: &CudaStorage,
        l2: &Layout,
        s3: &CudaStorage,
        l3: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.forward(Qkv { q: (s1, l1), k: (s2, l2), v: (s3, l3) })
    }

    #[cfg(feature = "metal")]
    fn metal_fwd(
        &self,
        s1: &MetalStorage,
        l1: &Layout,
        s2: &MetalStorage,
        l2: &Layout,
        s3: &MetalStorage,
        l3: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        self.forward(Qkv { q: (s1, l1), k: (s2, l2), v: (s3, l3) })
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
        let lse = self.lse.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(lse) = lse else { bail!("{} kept no logsumexp", self.name) };
        let results = Results { out, lse: &lse, d_out: &d_out };
        let Qkv { q, k, v } = gradients(&self.options, Qkv { q, k, v }, &results)?;
        Ok((Some(q), Some(k), Some(v)))
    }
}

impl Op {
    fn forward<S: GpuStorage>(&self, tensors: Qkv<(&S, &Layout)>) -> Result<(S, Shape)> {
        with_options(&self.options, tensors.stored(), |tensors| {
            let device = tensors.qkv.q.storage.device();
            S::with_session(device, |session, on| self.run(session, on, tensors))
        })
    }

    /// Launches the kernels of the problem, which write new tensors.
    fn run<S: GpuStorage>(
        &self,
        session: &mut Session<S::Engine>,
        on: &DeviceOf<S>,
        tensors: &Tensors<'_, S>,
    ) -> Result<(S, Shape)> {
        let (axes, device) = (self.options.axes(), tensors.qkv.q.storage.device());
        let given = tensors.lend(on, axes, &self.options)?;
        let (desc, inputs) = (given.desc(&self.options)?, given.inputs()?);
        // An invalid problem is refused before memory is allocated for its result.
        session.plan(&desc).map_err(refused)?;
        let shape = desc.dims.out_shape();
        let rows = shape[0] * shape[1] * shape[2];
        let mut out = NewTensor::<S>::new(device, shape, axes.q, desc.dtype)?;
        let lse = self.options.lse.then(|| uninit::<S>(device, &rows.into(), Dtype::F32));
        let mut lse = lse.transpose()?;
        {
            let mut lent = out.lend(on)?;
            let mut lent_lse = lse.as_mut().map(|lse| lse.lend_mut(on)).transpose()?;
            let mut outputs = GpuOutputs::new(lent.tensor().map_err(|error| of("out", error))?);
            outputs.lse = lent_lse.as_mut().map(|(memory, _)| first(memory, Dtype::F32, rows));
            S::launch(session, device, |session| {
                let done = match &self.options.tables {
                    None => session.run(&desc, &inputs, &mut outputs),
                    Some(tables) => session.run_paged(&desc, &inputs, tables, &mut outputs),
                };
                done.map_err(|error| refused_shape(error, axes))
            })?;
        }
        if let Some(lse) = lse {
            let dims = axes.q.lse_dims(shape);
            let lse = Tensor::from_storage(lse.into_storage(), dims, BackpropOp::none(), false);
            *self.lse.lock().unwrap_or_else(PoisonError::into_inner) = Some(lse);
        }
        Ok(out.into_parts())
    }
}
