//! KV caches in device memory.

use super::device::Cuda;
use super::error::DeviceError;
use flashtile_core::cache::{CacheDesc, HybridCache, KvCache};
use flashtile_gpu::cache::{GpuStore, StoreError};
use flashtile_kernel::cuda::Gpu;
use flashtile_kernel::cuda::cudarc::driver::CudaStream;
use std::sync::Arc;

/// A KV cache in device memory, made by [`Cuda::kv_cache`]: the operations of [`KvCache`], in every layout and codec.
///
/// Rows are tensors on the device. They are encoded there, to the bytes that a cache in main memory has. Operations that move rows
/// enqueue work on the stream of the cache and return; later work on that stream sees their result. After the first step, a step of the
/// same size allocates no device memory and does not wait for the device. Rows that are not finite, or whose norm is too large for
/// their codec, are not refused but stored as NaN: [`KvCache::check_stored`] says whether there were any. Operations that move rows are refused
/// while the stream captures a graph, which would copy their lists from memory that is gone.
///
/// ```no_run
/// use flashtile::cuda::{Cuda, GpuArray};
/// use flashtile::{CacheDesc, CacheLayout, CacheShape, Codec, Dtype, KvCacheExt};
/// let cuda = Cuda::new(0)?;
/// let stream = cuda.context().new_stream()?;
/// let gpu = cuda.gpu().on(&stream);
/// let shape = CacheShape { layers: 1, kv_heads: 8, head_dim: 128, value_dim: 128 };
/// let layout = CacheLayout::Paged { pages: 4096, page_size: 16 };
/// let mut cache = cuda.kv_cache(CacheDesc::new(layout, shape, Codec::Int8), &stream)?;
/// let sequence = cache.create()?;
/// for tokens in [512, 1, 1] {
///     // In a program of yours these come from the model: `Gpu::borrow` takes memory of other libraries.
///     let q = GpuArray::zeros(&gpu, Dtype::BF16, [1, 32, tokens, 128])?; // [1, heads, tokens, dim]
///     let kv = GpuArray::zeros(&gpu, Dtype::BF16, [1, 8, tokens, 128])?;
///     let mut out = GpuArray::zeros(&gpu, Dtype::BF16, [1, 32, tokens, 128])?;
///     let mut step = cache.step(&[(sequence, tokens)])?;
///     step.attend(0, q.view(), kv.view(), kv.view(), &mut out.view_mut())?; // enqueued on the stream
///     step.finish()?;
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub type CudaKvCache = KvCache<CudaStore>;

/// The rows of a [`CudaKvCache`]. [`GpuStore::kv`] gives keys and values of a layer, as inputs of attention. The views are of memory of the
/// cache: work that is given them must end before the cache is dropped, and be on the stream of the cache or ordered with it.
pub type CudaStore = GpuStore<Gpu>;

impl Cuda {
    /// An empty cache, whose pools are zero. Its operations follow each other on the stream.
    ///
    /// # Errors
    /// [`StoreError::Cache`] where the description is refused, [`StoreError::Unsupported`] where no kernel stores such rows,
    /// [`StoreError::Launch`] where the device lacks the memory.
    pub fn kv_cache(
        &self,
        desc: CacheDesc,
        stream: &Arc<CudaStream>,
    ) -> Result<CudaKvCache, StoreError<DeviceError>> {
        KvCache::with_store(CudaStore::new(self.gpu().on(stream), &desc)?)
    }

    /// An empty cache of layers that differ, described as [`HybridCache::new`] takes them. Its operations follow each other on the stream.
    ///
    /// # Errors
    /// As [`Cuda::kv_cache`].
    pub fn hybrid_cache(
        &self,
        layers: &[CacheDesc],
        stream: &Arc<CudaStream>,
    ) -> Result<HybridCache<CudaStore>, StoreError<DeviceError>> {
        HybridCache::with_stores(layers, |desc| CudaStore::new(self.gpu().on(stream), desc))
    }
}
