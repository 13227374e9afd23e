//! KV caches in device memory.

#![allow(unsafe_code)]

use super::cudarc::driver::CudaStream;
use super::device::Cuda;
use super::error::CudaError;
use super::portable::{reach, scalar};
use super::tensor::{DeviceKv, DeviceTensor, DeviceTensorMut, RawTensor};
use super::views;
use flashtile_core::cache::{CacheDesc, KvCache, PageCopy, PageStore, RowRun};
use flashtile_gpu::cache::{GpuRows, GpuRowsMut, GpuStore, StoreError};
use flashtile_kernel::cuda::{Gpu, Memory};
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
/// use flashtile::cuda::{Cuda, DeviceInputs, DeviceOutputs, DeviceTensor, DeviceTensorMut, Session};
/// use flashtile::{CacheDesc, CacheLayout, CacheShape, Codec, Dtype, HeadShape, ProblemDesc, SeqLens, Visibility};
/// # fn rows<'a>(_: usize) -> (DeviceTensor<'a>, DeviceTensor<'a>, DeviceTensor<'a>, DeviceTensorMut<'a>) { unimplemented!() }
/// let cuda = Cuda::new(0)?;
/// let stream = cuda.context().new_stream()?;
/// let shape = CacheShape { layers: 1, kv_heads: 8, head_dim: 128, value_dim: 128 };
/// let layout = CacheLayout::Paged { pages: 4096, page_size: 16 };
/// let mut cache = cuda.kv_cache(CacheDesc::new(layout, shape, Codec::Int8), &stream)?;
/// let mut session = Session::new(&cuda, &stream);
/// let sequence = cache.create()?;
/// for tokens in [512, 1, 1] {
///     let (q, k, v, out) = rows(tokens); // of this step's tokens, on the device
///     cache.append(&[(sequence, tokens)], &[(k, v)])?;
///     let heads = HeadShape { q_heads: 32, kv_heads: 8, head_dim: 128, value_dim: 128 };
///     let lens = SeqLens { q_len: tokens, kv_len: cache.len(sequence)? };
///     let mut desc = ProblemDesc::cached(heads, Dtype::BF16, &[lens]);
///     desc.visibility = Visibility::causal();
///     (desc.k_codec, desc.v_codec) = (Some(Codec::Int8), Some(Codec::Int8));
///     let (k, v) = cache.store().kv(0)?;
///     let inputs = DeviceInputs::new(q, k, v);
///     session.run_paged(&desc, &inputs, &cache.tables(&[sequence])?, &mut DeviceOutputs::new(out))?;
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub type DeviceKvCache = KvCache<CudaStore>;

/// The rows of a [`DeviceKvCache`].
#[derive(Debug)]
pub struct CudaStore {
    inner: GpuStore<Gpu>,
}

impl Cuda {
    /// An empty cache, whose pools are zero. Its operations follow each other on the stream.
    ///
    /// # Errors
    /// [`CudaError::KvCache`] where the description is refused; [`CudaError::Device`], also where the device lacks the memory.
    pub fn kv_cache(&self, desc: CacheDesc, stream: &Arc<CudaStream>) -> Result<DeviceKvCache, CudaError> {
        let inner = GpuStore::new(self.gpu().on(stream), &desc)?;
        Ok(KvCache::with_store(CudaStore { inner })?)
    }
}

impl CudaStore {
    /// Keys and values of a layer, as inputs of attention. The views are of memory of the cache: work that is given them must end
    /// before the cache is dropped, and be on the stream of the cache or ordered with it.
    ///
    /// # Errors
    /// [`CudaError::KvCache`] where there is no such layer.
    pub fn kv(&self, layer: usize) -> Result<(DeviceKv<'_>, DeviceKv<'_>), CudaError> {
        self.inner.desc().check_layer(layer)?;
        // No operation replaces a mean while the views borrow the cache; one that does later waits for the device before it frees the
        // memory.
        let [k, v] = self.inner.kv(layer);
        Ok((views::kv(&k)?, views::kv(&v)?))
    }

    /// The memory of a tensor.
    fn borrow(&self, raw: &RawTensor) -> Memory {
        // SAFETY: the constructors of tensors have the caller's word for the memory that their shape reaches.
        unsafe { self.inner.device().borrow(scalar(raw.dtype), raw.at, reach(raw)) }
    }
}

fn rows<'m>(memory: &'m Memory, raw: &RawTensor) -> GpuRows<'m, Memory> {
    GpuRows { view: memory.view(), shape: raw.shape, strides: raw.strides }
}

fn rows_mut<'m>(memory: &'m mut Memory, raw: &RawTensor) -> GpuRowsMut<'m, Memory> {
    GpuRowsMut { view: memory.view_mut(), shape: raw.shape, strides: raw.strides }
}

impl PageStore for CudaStore {
    type Error = CudaError;
    type Rows<'a> = DeviceTensor<'a>;
    type RowsMut<'a> = DeviceTensorMut<'a>;

    fn desc(&self) -> &CacheDesc {
        self.inner.desc()
    }

    fn shape(rows: &DeviceTensor<'_>) -> [usize; 4] {
        rows.raw.shape
    }

    fn shape_mut(rows: &DeviceTensorMut<'_>) -> [usize; 4] {
        rows.raw.shape
    }

    fn check(&self, layer: usize, k: &DeviceTensor<'_>, v: &DeviceTensor<'_>) -> Result<(), CudaError> {
        let (k_memory, v_memory) = (self.borrow(&k.raw), self.borrow(&v.raw));
        Ok(self.inner.check(layer, &rows(&k_memory, &k.raw), &rows(&v_memory, &v.raw))?)
    }

    fn key_mean(&self, layer: usize) -> Option<&[f32]> {
        self.inner.key_mean(layer)
    }

    fn set_key_mean(&mut self, layer: usize, mean: Vec<f32>) -> Result<(), CudaError> {
        Ok(self.inner.set_key_mean(layer, mean)?)
    }

    fn check_stored(&mut self) -> Result<(), CudaError> {
        Ok(self.inner.check_stored()?)
    }

    fn copy(&mut self, copies: &[PageCopy]) -> Result<(), CudaError> {
        Ok(self.inner.copy(copies)?)
    }

    fn write(
        &mut self,
        layer: usize,
        runs: &[RowRun],
        k: &DeviceTensor<'_>,
        v: &DeviceTensor<'_>,
    ) -> Result<(), CudaError> {
        let (k_memory, v_memory) = (self.borrow(&k.raw), self.borrow(&v.raw));
        Ok(self.inner.write(layer, runs, &rows(&k_memory, &k.raw), &rows(&v_memory, &v.raw))?)
    }

    fn read(
        &self,
        layer: usize,
        runs: &[RowRun],
        k: &mut DeviceTensorMut<'_>,
        v: &mut DeviceTensorMut<'_>,
    ) -> Result<(), CudaError> {
        let (mut k_memory, mut v_memory) = (self.borrow(&k.raw), self.borrow(&v.raw));
        let (mut k, mut v) = (rows_mut(&mut k_memory, &k.raw), rows_mut(&mut v_memory, &v.raw));
        Ok(self.inner.read(layer, runs, &mut k, &mut v)?)
    }

    fn export(&self, runs: &[RowRun], tokens: usize, bytes: &mut [u8]) -> Result<(), CudaError> {
        Ok(self.inner.export(runs, tokens, bytes)?)
    }

    fn import(&mut self, runs: &[RowRun], tokens: usize, bytes: &[u8]) -> Result<(), CudaError> {
        Ok(self.inner.import(runs, tokens, bytes)?)
    }
}

impl From<StoreError<super::error::DeviceError>> for CudaError {
    fn from(error: StoreError<super::error::DeviceError>) -> Self {
        match error {
            StoreError::Cache(error) => Self::KvCache(error),
            StoreError::Unsupported(error) => Self::Unsupported(error),
            StoreError::Launch(error) => error.into(),
            other => Self::Contract { what: other.to_string() },
        }
    }
}
