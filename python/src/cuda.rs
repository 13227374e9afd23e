//! Attention over tensors of a CUDA device, on the stream of the caller.

#![allow(unsafe_code)]

use crate::attention::{Call, Made, Results};
use crate::failure::refused;
use crate::memory::Stream;
use flashtile::cuda::cudarc::driver::{CudaStream, sys::CUstream};
use flashtile::cuda::{Cuda, CudaError, DeviceInputs, Session};
use flashtile::{Dims, ProblemDesc};
use pyo3::prelude::*;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// A call whose tensors are on the device of a stream. Returns before the work has ended.
pub(crate) fn attention(
    Call { options, q, k, v }: &Call,
    out: &Bound<'_, PyAny>,
    make: &Bound<'_, PyAny>,
    stream: Stream,
) -> PyResult<Results> {
    let py = make.py();
    let axes = options.axes();
    let (q_view, k_view) = (q.device_view(axes, stream)?, k.device_view(axes, stream)?);
    let v_view = v.device_view(axes, stream)?;
    let ([batch, q_heads, q_len, head_dim], [_, kv_heads, kv_len, _]) = (q_view.shape, k_view.shape);
    let value_dim = v_view.shape[3];
    let dims = Dims { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim };
    let mut desc = ProblemDesc::new(dims, q_view.dtype);
    options.set(&mut desc);
    let mut inputs = DeviceInputs::new(q_view.tensor, k_view.tensor, v_view.tensor);
    if let Some(mask) = options.mask() {
        let (mask, kind) = mask.device_mask(stream)?;
        (inputs.mask, desc.mask) = (Some(mask), Some(kind));
    }
    inputs.alibi_slopes = options.slopes_on(stream)?;
    inputs.sinks = options.sinks_on(stream)?;
    let stream_of_call = borrowed(stream).map_err(refused)?;
    // A wrong problem is refused before there is memory for its result. Kernels are compiled here.
    let shape = |session: &mut Session| -> Result<[usize; 4], CudaError> {
        Ok(session.plan(&desc)?.problem().dims().out_shape())
    };
    let shape = py.detach(|| Session::with_current(&stream_of_call, shape)?).map_err(refused)?;
    let mut made = Made::new(out, options, (axes, shape), make)?;
    let mut others = vec![q, k, v];
    others.extend(options.mask());
    let mut outputs = made.device_outputs(axes, &others, stream)?;
    let run = |session: &mut Session| session.run(&desc, &inputs, &mut outputs);
    py.detach(|| Session::with_current(&stream_of_call, run)?).map_err(refused)?;
    Ok(made.results())
}

/// A stream of the caller, in the primary context of its device.
fn borrowed(stream: Stream) -> Result<Arc<CudaStream>, CudaError> {
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
    Ok(unsafe { cuda.context().wrap_borrowed_stream(stream.handle as CUstream) })
}
