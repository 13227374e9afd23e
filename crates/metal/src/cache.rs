//! KV caches in the memory of a device.

use flashtile_core::cache::KvCache;
use flashtile_gpu::cache::{GpuStore, StoreError};
use flashtile_kernel::LaunchError;
use flashtile_kernel::metal::{CommandBuffer, DispatchType, Error, Gpu};

/// A KV cache in the memory of a device, made by [`Metal::kv_cache`](crate::Metal::kv_cache): the operations of [`KvCache`], in every layout
/// and codec.
///
/// Rows are tensors on the device. They are encoded there, to the bytes that a cache in main memory has. Operations that move rows enqueue
/// work on the device's queue and return. Rows that are not finite, or whose norm is too large for their codec, are not refused but stored
/// as NaN: [`KvCache::check_stored`] says whether there were any.
pub type MetalKvCache = KvCache<MetalStore>;

/// The rows of a [`MetalKvCache`]. [`GpuStore::kv`] gives keys and values of a layer, as inputs of attention.
pub type MetalStore = GpuStore<Gpu>;

/// Calls `work` with a cache whose operations go to a new encoder of a command buffer of the device's queue, which the caller commits before
/// a later operation of the cache that is on the queue. Operations that read on the host are refused meanwhile: checks of stored rows, and
/// snapshots.
///
/// # Errors
/// The errors of `work`, [`Error::OtherQueue`] and [`Error::NoObject`].
pub fn encode_cache<T>(
    cache: &mut MetalKvCache,
    commands: &CommandBuffer,
    dispatch: DispatchType,
    work: impl FnOnce(&mut MetalKvCache) -> Result<T, StoreError<Error>>,
) -> Result<T, StoreError<Error>> {
    let gpu = cache.store().device().clone();
    let worked = gpu.encode(commands, dispatch, |gpu| {
        let before = cache.store_mut().replace_device(gpu.clone());
        let restoring = Restoring { cache, before: Some(before) };
        work(&mut *restoring.cache)
    });
    worked.map_err(|error| StoreError::Launch(LaunchError::Device(error)))?
}

/// Gives a cache its device back, also where what is encoded panics.
struct Restoring<'a> {
    cache: &'a mut MetalKvCache,
    before: Option<Gpu>,
}

impl Drop for Restoring<'_> {
    fn drop(&mut self) {
        if let Some(before) = self.before.take() {
            self.cache.store_mut().replace_device(before);
        }
    }
}
