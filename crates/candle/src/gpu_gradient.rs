//! Gradients of attention over tensors on GPUs, by launches on the stream or in the encoder of candle's device.

use crate::gpu::{DeviceOf, GpuStorage, Lent, NewTensor, Tensors, of, with_options};
use crate::gradient::Results;
use crate::options::Options;
use crate::storage::{Qkv, Stored, read, read_qkv, refused, refused_shape};
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
#[cfg(feature = "metal")]
use candle_core::MetalStorage;
use candle_core::{Device, Result, Tensor, bail};
use flashtile::gpu::{GpuBackwardInputs, GpuGradients, Session};

/// Gradients of q, k and v, dense in the axes of the call. The host does not wait for them.
pub(crate) fn gradients(
    options: &Options,
    tensors: Qkv<&Tensor>,
    results: &Results<'_, &Tensor>,
) -> Result<Qkv<Tensor>> {
    match tensors.q.device() {
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => in_storage::<CudaStorage>(options, tensors, results),
        #[cfg(feature = "metal")]
        Device::Metal(_) => in_storage::<MetalStorage>(options, tensors, results),
        other => bail!("q is on {:?}, and the result was computed on a GPU", other.location()),
    }
}

/// The results of a forward pass, and the gradient of its output, locked for reading.
struct StoredResults<'a, S> {
    out: Stored<'a, S>,
    lse: Stored<'a, S>,
    d_out: Stored<'a, S>,
}

fn in_storage<S: GpuStorage>(
    options: &Options,
    tensors: Qkv<&Tensor>,
    Results { out, lse, d_out }: &Results<'_, &Tensor>,
) -> Result<Qkv<Tensor>> {
    read_qkv(tensors, |qkv: Qkv<Stored<'_, S>>| {
        read("out", out, |out| {
            read("lse", lse, |lse| {
                read("d_out", d_out, |d_out| {
                    with_options(options, qkv, |tensors| {
                        let results = StoredResults { out, lse, d_out };
                        let device = tensors.qkv.q.storage.device();
                        S::with_session(device, |session, on| run(session, on, tensors, &results, options))
                    })
                })
            })
        })
    })
}

/// Launches the kernels of the backward pass, which write new tensors.
fn run<S: GpuStorage>(
    session: &mut Session<S::Engine>,
    on: &DeviceOf<S>,
    tensors: &Tensors<'_, S>,
    results: &StoredResults<'_, S>,
    options: &Options,
) -> Result<Qkv<Tensor>> {
    let axes = options.axes();
    let given = tensors.lend(on, axes, options)?;
    let desc = given.desc(options)?;
    // An invalid problem is refused before memory is allocated for its gradients.
    session.plan_backward(&desc).map_err(refused)?;
    let (out, d_out) = (results.out.elements(on, axes.q)?, results.d_out.elements(on, axes.q)?);
    let lse = results.lse.list(on)?;
    let inputs = GpuBackwardInputs {
        q: given.q.tensor()?,
        k: given.k.tensor()?,
        v: given.v.tensor()?,
        out: out.tensor()?,
        lse: lse.view(),
        d_out: d_out.tensor()?,
        d_lse: None,
        tree: None,
        mask: given.mask()?,
        alibi_slopes: given.slopes.as_ref().map(Lent::view),
        sinks: given.sinks.as_ref().map(Lent::view),
    };
    let device = tensors.qkv.q.storage.device();
    let mut new = Qkv {
        q: NewTensor::<S>::new(device, given.q.shape, axes.q, desc.dtype)?,
        k: NewTensor::<S>::new(device, given.k.shape, axes.kv, desc.dtype)?,
        v: NewTensor::<S>::new(device, given.v.shape, axes.kv, desc.dtype)?,
    };
    {
        let (mut d_q, mut d_k, mut d_v) = (new.q.lend(on)?, new.k.lend(on)?, new.v.lend(on)?);
        let mut gradients = GpuGradients::new(
            d_q.tensor().map_err(|error| of("d_q", error))?,
            d_k.tensor().map_err(|error| of("d_k", error))?,
            d_v.tensor().map_err(|error| of("d_v", error))?,
        );
        S::launch(session, device, |session| {
            let done = session.run_backward(&desc, &inputs, &mut gradients);
            done.map_err(|error| refused_shape(error, axes))
        })?;
    }
    Ok(Qkv { q: new.q.into_tensor(), k: new.k.into_tensor(), v: new.v.into_tensor() })
}

/// The gradients of q, k and v from out, lse and d_out, on a GPU: without candle's additions, whose kernels the software device lacks.
///
/// # Errors
/// The errors of `backward()` through [`attention`](crate::attention).
#[cfg(metal_standin)]
pub fn gradients_of(
    [q, k, v]: [&Tensor; 3],
    [out, lse, d_out]: [&Tensor; 3],
    options: &Options,
) -> Result<[Tensor; 3]> {
    let Qkv { q, k, v } = gradients(options, Qkv { q, k, v }, &Results { out, lse, d_out })?;
    Ok([q, k, v])
}
