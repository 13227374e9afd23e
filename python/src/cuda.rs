//! Attention over tensors of a CUDA device, on the stream of the caller.

#![allow(unsafe_code)]

use crate::attention::{Call, Made, Results, Shapes};
use crate::backward::{Call as BackwardCall, Made as MadeGradients, Results as GradientObjects, Wanted};
use crate::failure::refused;
use crate::memory::{Axes, DeviceList, DeviceMask, DeviceTensor, OnDevice, Stream};
use crate::options::Options;
use crate::with_cache::{Action, Work};
use flashtile::cuda::cudarc::driver::sys::{CUcontext, CUstream};
use flashtile::cuda::cudarc::driver::{CudaStream, result};
use flashtile::cuda::{Cuda, CudaError, GpuInputs, GpuKv, Memory, Session, with_session};
use flashtile::gpu::GpuBackwardInputs;
use flashtile::tensor::ViewError;
use flashtile::{Dims, ProblemDesc};
use pyo3::prelude::*;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Inputs of a call in the memory of its device.
struct DeviceInputs<'a> {
    q: DeviceTensor<'a>,
    k: DeviceTensor<'a>,
    v: DeviceTensor<'a>,
    mask: Option<DeviceMask<'a>>,
    alibi_slopes: Option<DeviceList<'a>>,
    sinks: Option<DeviceList<'a>>,
}

impl<'a> DeviceInputs<'a> {
    /// The inputs of a call whose q has these axes.
    fn of(Call { options, q, k, v }: &'a Call, q_axes: Axes, on: OnDevice<'_>) -> PyResult<Self> {
        let axes = options.axes();
        Ok(Self {
            q: q.device_tensor(q_axes, on)?,
            k: k.device_tensor(axes, on)?,
            v: v.device_tensor(axes, on)?,
            mask: options.mask().map(|mask| mask.device_mask(on)).transpose()?,
            alibi_slopes: options.slopes_on(on)?,
            sinks: options.sinks_on(on)?,
        })
    }

    /// The problem of a call that is not over a cache.
    fn desc(&self, options: &Options) -> PyResult<ProblemDesc> {
        let ([batch, q_heads, q_len, head_dim], [_, kv_heads, kv_len, _]) = (self.q.shape, self.k.shape);
        let value_dim = self.v.shape[3];
        options.check_slopes(batch, q_heads)?;
        options.check_masks(batch, q_len, kv_len)?;
        let dims = Dims { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim };
        let mut desc = ProblemDesc::new(dims, self.q.dtype);
        options.set(&mut desc);
        desc.mask = self.mask.as_ref().map(|mask| mask.kind);
        Ok(desc)
    }

    /// The inputs of a forward run.
    fn forward(&self) -> Result<GpuInputs<'_, Memory>, ViewError> {
        let (k, v) = (GpuKv::elements(self.k.view()?)?, GpuKv::elements(self.v.view()?)?);
        let mut inputs = GpuInputs::new(self.q.view()?, k, v);
        inputs.mask = self.mask.as_ref().map(DeviceMask::view).transpose()?;
        inputs.alibi_slopes = self.alibi_slopes.as_ref().map(DeviceList::view);
        inputs.sinks = self.sinks.as_ref().map(DeviceList::view);
        Ok(inputs)
    }
}

/// A call whose tensors are on the device of a stream. Returns before the work has ended.
pub(crate) fn attention(
    call: &Call,
    out: &Bound<'_, PyAny>,
    make: &Bound<'_, PyAny>,
    stream: Stream,
) -> PyResult<Results> {
    let (py, options, axes) = (make.py(), &call.options, call.options.axes());
    let (cuda, stream_of_call) = borrowed(stream).map_err(refused)?;
    let on = OnDevice { gpu: cuda.gpu(), stream };
    let given = DeviceInputs::of(call, axes, on)?;
    let desc = given.desc(options)?;
    let inputs = given.forward().map_err(refused)?;
    // A wrong problem is refused before there is memory for its result. Kernels are compiled here.
    let shape = |session: &mut Session| -> Result<[usize; 4], CudaError> {
        Ok(session.plan(&desc)?.problem().dims().out_shape())
    };
    let shape = py.detach(|| with_session(&stream_of_call, shape)?).map_err(refused)?;
    let mut made = Made::new(out, options, Shapes::of(axes, shape), make)?;
    made.on_device(axes, &call.memory(), on, |outputs| {
        let run = |session: &mut Session| session.run(&desc, &inputs, outputs);
        py.detach(|| with_session(&stream_of_call, run)?).map_err(refused)
    })?;
    Ok(made.results())
}

/// Gradients of a call whose tensors are on the device of a stream. Returns before the work has ended.
pub(crate) fn attention_backward(
    call: &BackwardCall,
    wanted: Wanted,
    make: &Bound<'_, PyAny>,
    stream: Stream,
) -> PyResult<GradientObjects> {
    let (py, options, axes) = (make.py(), &call.forward.options, call.forward.options.axes());
    let (cuda, stream_of_call) = borrowed(stream).map_err(refused)?;
    let on = OnDevice { gpu: cuda.gpu(), stream };
    let given = DeviceInputs::of(&call.forward, axes, on)?;
    let desc = given.desc(options)?;
    // A wrong problem is refused before there is memory for its result.
    let shape = |session: &mut Session| -> Result<[usize; 4], CudaError> {
        Ok(session.plan_backward(&desc)?.problem().dims().out_shape())
    };
    let shape = py.detach(|| with_session(&stream_of_call, shape)?).map_err(refused)?;
    let lse_shape = axes.lse_shape(shape);
    let (out, d_out) = (call.out.device_tensor(axes, on)?, call.d_out.device_tensor(axes, on)?);
    let lse = call.lse.device_list_of(&lse_shape, on)?;
    let d_lse = call.d_lse.as_ref().map(|d_lse| d_lse.device_list_of(&lse_shape, on)).transpose()?;
    let inputs = GpuBackwardInputs {
        q: given.q.view().map_err(refused)?,
        k: given.k.view().map_err(refused)?,
        v: given.v.view().map_err(refused)?,
        out: out.view().map_err(refused)?,
        lse: lse.view(),
        d_out: d_out.view().map_err(refused)?,
        d_lse: d_lse.as_ref().map(DeviceList::view),
        tree: None,
        mask: given.mask.as_ref().map(DeviceMask::view).transpose().map_err(refused)?,
        alibi_slopes: given.alibi_slopes.as_ref().map(DeviceList::view),
        sinks: given.sinks.as_ref().map(DeviceList::view),
    };
    let mut made = MadeGradients::new(call, wanted, make)?;
    made.on_device(axes, &call.memory(), on, |gradients| {
        let run = |session: &mut Session| session.run_backward(&desc, &inputs, gradients);
        py.detach(|| with_session(&stream_of_call, run)?).map_err(refused)
    })?;
    Ok(made.results())
}

/// Checks, or computes, a call over caches on the device of a stream. Returns before the work has ended.
pub(crate) fn with_cache(
    work: &Work<'_>,
    action: Action,
    made: &mut Made<'_>,
    (py, stream): (Python<'_>, Stream),
) -> PyResult<()> {
    let Work { call, paged, others } = work;
    let (cuda, stream_of_call) = borrowed(stream).map_err(refused)?;
    let on = OnDevice { gpu: cuda.gpu(), stream };
    let given = DeviceInputs::of(call, Axes::Packed, on)?;
    let inputs = given.forward().map_err(refused)?;
    made.on_device(Axes::Packed, others, on, |outputs| {
        let act = |session: &mut Session| match action {
            Action::Check => session.check_paged(&paged.desc, &inputs, &paged.tables, outputs),
            Action::Run => session.run_paged(&paged.desc, &inputs, &paged.tables, outputs),
        };
        py.detach(|| with_session(&stream_of_call, act)?).map_err(refused)
    })
}

/// A device, and a stream of the caller in its primary context.
pub(crate) fn borrowed(stream: Stream) -> Result<(Cuda, Arc<CudaStream>), CudaError> {
    static DEVICES: Mutex<Option<HashMap<i32, Cuda>>> = Mutex::new(None);
    let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let devices = devices.get_or_insert_default();
    let cuda = match devices.get(&stream.device) {
        Some(cuda) => cuda,
        None => {
            let cuda = Cuda::new(usize::try_from(stream.device).unwrap_or(usize::MAX))?;
            devices.entry(stream.device).or_insert(cuda)
        }
    };
    // SAFETY: the stream is one of the device, in its primary context, which all users of the runtime share. Its library keeps it alive
    // during the call, and what outlives the call does not use it.
    let borrowed = unsafe { cuda.context().wrap_borrowed_stream(stream.handle as CUstream) };
    Ok((cuda.clone(), borrowed))
}

/// The context that was a thread's before it dropped memory of a device, whose context that makes the thread's. The last field of what has
/// the memory: fields are dropped in order, and this makes the context the thread's again.
#[derive(Default)]
pub(crate) struct ContextBefore(Option<usize>);

impl ContextBefore {
    /// Keeps the context of this thread, which has none where the address is 0.
    pub(crate) fn keep(&mut self) {
        let current = result::ctx::get_current().ok();
        self.0 = current.map(|context| context.map_or(0, |context| context as usize));
    }
}

impl Drop for ContextBefore {
    fn drop(&mut self) {
        if let Some(context) = self.0 {
            // SAFETY: the context was this thread's when the drop began, or there was none, which null says.
            let _ = unsafe { result::ctx::set_current(context as CUcontext) };
        }
    }
}
