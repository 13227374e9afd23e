//! Attention and KV caches on a queue, or in an encoder of the caller's.

#![allow(unsafe_code)]

use crate::error::MetalError;
use flashtile_core::cache::KvCache;
use flashtile_gpu::SessionError;
use flashtile_gpu::cache::{GpuStore, StoreError};
use flashtile_gpu::engine::PortableEngine;
use flashtile_kernel::LaunchError;
use flashtile_kernel::metal::{CommandBuffer, ComputeEncoder, DispatchType, Error, ForeignEncoder, Gpu};

/// Computes attention on the queue of a device, made by [`Metal::session`](crate::Metal::session): see
/// [`Session`](flashtile_gpu::session::Session).
///
/// Every run is committed; results are there when the queue has completed. Runs of a session follow each other in its memory: they must be
/// on one queue. Where a pipeline takes fewer threads a threadgroup than its plan has, as may be on devices of the families Apple7 and
/// Apple8, the problem is planned anew for the pipeline's number.
///
/// ```no_run
/// # #[cfg(target_vendor = "apple")] {
/// use flashtile::metal::{DispatchType, Encode, GpuInputs, GpuOutputs, Memory, Metal, objc2_metal::MTLCommandQueue};
/// # use flashtile::metal::CommandQueue;
/// use flashtile::{Dims, Dtype, ProblemDesc};
/// # fn tensors<'a>() -> (GpuInputs<'a, Memory>, GpuOutputs<'a, Memory>) { unimplemented!() }
/// # fn queue() -> CommandQueue { unimplemented!() }
/// let queue = queue(); // of the engine
/// let metal = Metal::with_queue(queue.clone())?;
/// let mut session = metal.session();
/// let dims = Dims { batch: 1, q_heads: 32, kv_heads: 8, q_len: 1, kv_len: 4096, head_dim: 128, value_dim: 128 };
/// let desc = ProblemDesc::new(dims, Dtype::F16);
/// let commands = queue.commandBuffer().ok_or("no command buffer")?;
/// for _layer in 0..32 {
///     let (inputs, mut outputs) = tensors();
///     session.encode(&commands, DispatchType::Serial, |session| session.run(&desc, &inputs, &mut outputs))?;
/// }
/// // The engine commits.
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub type Session = flashtile_gpu::session::Session<PortableEngine<Gpu>>;

/// A KV cache in the memory of a device, made by [`Metal::kv_cache`](crate::Metal::kv_cache): the operations of [`KvCache`], in every layout
/// and codec.
///
/// Rows are tensors on the device. They are encoded there, to the bytes that a cache in main memory has. Operations that move rows enqueue
/// work on the device's queue and return. Rows that are not finite, or whose norm is too large for their codec, are not refused but stored
/// as NaN: [`KvCache::check_stored`] says whether there were any. Operations that read on the host are refused while launches go to an
/// encoder of the caller's ([`Encode`]): checks of stored rows, and snapshots.
pub type MetalKvCache = KvCache<MetalStore>;

/// The rows of a [`MetalKvCache`]. [`GpuStore::kv`] gives keys and values of a layer, as inputs of attention.
pub type MetalStore = GpuStore<Gpu>;

/// [`Session`]s and [`MetalKvCache`]s, whose launches may go to command buffers and encoders of the caller's instead of the queue.
pub trait Encode: Sized {
    /// Why work fails.
    type Error;

    /// The device, and where launches go.
    fn gpu(&self) -> &Gpu;

    /// Sends launches elsewhere, and returns where they went before.
    fn replace_gpu(&mut self, gpu: Gpu) -> Gpu;

    /// An error of the device.
    fn failed(error: Error) -> Self::Error;

    /// Calls `work` while launches go to a new encoder of a command buffer of the device's queue. The caller commits it before a later run or
    /// operation that is on the queue, or gives it up and calls [`Session::clear`].
    ///
    /// # Errors
    /// The errors of `work`, [`Error::OtherQueue`] and [`Error::NoObject`].
    fn encode<T>(
        &mut self,
        commands: &CommandBuffer,
        dispatch: DispatchType,
        work: impl FnOnce(&mut Self) -> Result<T, Self::Error>,
    ) -> Result<T, Self::Error> {
        let gpu = self.gpu().clone();
        let worked = gpu.encode(commands, dispatch, |gpu| with_gpu(self, gpu.clone(), work));
        worked.map_err(Self::failed)?
    }

    /// Calls `work` while launches go to an encoder of the caller's, of a command buffer of the device's queue. In a concurrent encoder
    /// barriers lie between launches of this call that depend on each other; the caller orders them with its own commands, and calls of
    /// this function with each other where they use the same tensors or the same description.
    ///
    /// # Errors
    /// The errors of `work`.
    ///
    /// # Safety
    /// - The encoder is open, and no other thread uses it meanwhile.
    /// - Its command buffer retains its resources; otherwise the session or cache and all tensors live until
    ///   it has completed.
    unsafe fn encode_in<T>(
        &mut self,
        encoder: &ComputeEncoder,
        work: impl FnOnce(&mut Self) -> Result<T, Self::Error>,
    ) -> Result<T, Self::Error> {
        self.gpu().commit();
        // SAFETY: the caller's contract; the device is replaced when `work` has ended.
        let gpu = unsafe { self.gpu().in_encoder(encoder.clone()) };
        with_gpu(self, gpu, work)
    }

    /// Calls `work` while launches go to an encoder of the device that another library wraps, and that orders them.
    ///
    /// # Errors
    /// The errors of `work`.
    ///
    /// # Safety
    /// - The encoder is open, and no other thread uses it meanwhile.
    /// - Its command buffer retains its resources; otherwise the session or cache and all tensors live until
    ///   it has completed.
    unsafe fn encode_in_foreign<T>(
        &mut self,
        encoder: Box<dyn ForeignEncoder>,
        work: impl FnOnce(&mut Self) -> Result<T, Self::Error>,
    ) -> Result<T, Self::Error> {
        self.gpu().commit();
        // SAFETY: as above.
        let gpu = unsafe { self.gpu().in_foreign_encoder(encoder) };
        with_gpu(self, gpu, work)
    }
}

impl Encode for Session {
    type Error = MetalError;

    fn gpu(&self) -> &Gpu {
        self.device()
    }

    fn replace_gpu(&mut self, gpu: Gpu) -> Gpu {
        self.replace_device(gpu)
    }

    fn failed(error: Error) -> MetalError {
        SessionError::device(error)
    }
}

impl Encode for MetalKvCache {
    type Error = StoreError<Error>;

    fn gpu(&self) -> &Gpu {
        self.store().device()
    }

    fn replace_gpu(&mut self, gpu: Gpu) -> Gpu {
        for store in self.stores_mut().skip(1) {
            store.replace_device(gpu.clone());
        }
        self.store_mut().replace_device(gpu)
    }

    fn failed(error: Error) -> StoreError<Error> {
        StoreError::Launch(LaunchError::Device(error))
    }
}

/// Calls `work` while launches go elsewhere.
fn with_gpu<S: Encode, T>(of: &mut S, gpu: Gpu, work: impl FnOnce(&mut S) -> T) -> T {
    let before = of.replace_gpu(gpu);
    let restoring = Restoring { of, before: Some(before) };
    work(&mut *restoring.of)
}

/// Sends launches where they went before, also where the encoding work panics.
struct Restoring<'a, S: Encode> {
    of: &'a mut S,
    before: Option<Gpu>,
}

impl<S: Encode> Drop for Restoring<'_, S> {
    fn drop(&mut self) {
        if let Some(before) = self.before.take() {
            self.of.replace_gpu(before);
        }
    }
}
