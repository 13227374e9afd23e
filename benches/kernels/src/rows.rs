//! Workloads of the kernels that fill, copy and read caches: page stores of the library over seeded rows, and what a cache in main memory has.

use super::data::{Find, Want, elements, size};
use super::device::{filled, values};
use flashtile_core::cache::{CacheDesc, CacheLayout, CacheShape, PageCopy, PageStore, RowRun};
use flashtile_core::codec::{CodePages, Codec, KeyTransform, Side};
use flashtile_core::dtype::Dtype;
use flashtile_core::tensor::TensorView;
use flashtile_gpu::cache::GpuStore;
use flashtile_gpu::tensors::{GpuTensor, GpuTensorMut};
use flashtile_kernel::source::Shape;
use flashtile_kernel::{DeviceMemory, HostAccess, ScalarType, bf16};

/// Heads of the rows.
const HEADS: usize = 8;

/// How keys are stored; values are stored as they are, bf16.
const KEYS: Codec = Codec::Tq4;

fn message(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// The operation of a kernel on rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    /// Keys are encoded.
    Encode,
    /// Values are copied to the cache.
    Append,
    /// A page of keys and one of values are copied to others.
    Copy,
    /// Keys are decoded.
    ReadCodes,
    /// Values are copied from the cache.
    ReadElements,
}

/// Rows of bf16 `[tokens, heads, dim]`, and an operation on them.
pub(super) struct Work {
    operation: Operation,
    x: Vec<u8>,
    tokens: usize,
    dim: usize,
}

/// A [`Work`] whose rows and cache lie in the memory of a device.
pub(super) struct Placed<D: HostAccess + Clone>
where
    D::Memory: 'static,
{
    operation: Operation,
    store: GpuStore<D>,
    x: D::Memory,
    k: D::Memory,
    v: D::Memory,
    tokens: usize,
    dim: usize,
}

/// Strides of rows `[1, heads, tokens, dim]` that lie as `[tokens, heads, dim]`.
const fn strides(tokens: usize, dim: usize) -> [usize; 4] {
    [tokens * HEADS * dim, dim, HEADS * dim, 1]
}

/// All rows of the first page.
const fn run(tokens: usize) -> RowRun {
    RowRun { page: 0, row: 0, tokens, at: 0 }
}

/// Rows that are appended to one page of a cache, or copied or read from it.
pub(super) fn job(shape: &Shape, operation: Operation) -> Result<(Want, Work), String> {
    let (rows, dim) = (size(shape, "rows")?, size(shape, "dim")?);
    let tokens = rows / HEADS;
    if tokens * HEADS != rows {
        return Err(format!("{rows} rows are not a multiple of {HEADS} heads"));
    }
    let (dtype, of_heads) = (Dtype::BF16, [1, HEADS, tokens, dim]);
    let mut x = vec![0u8; rows * dim * dtype.bytes()];
    elements(&mut x, dtype, 1);
    let view = TensorView::from_bytes(dtype, &x, of_heads, strides(tokens, dim)).map_err(message)?;
    let mut pages = CodePages::new(KEYS, Side::Keys, of_heads).map_err(message)?;
    CodePages::check(&view, &KeyTransform::default()).map_err(|(why, _)| message(why))?;
    pages.write(0, 0..tokens, &view, 0);
    let codes = || (0..HEADS).flat_map(|head| pages.view().page(0, head).to_vec()).map(f64::from);
    let values =
        || (0..rows).flat_map(|row| view.row_bytes([0, row / tokens, row % tokens])).map(|x| f64::from(*x));
    let want = match operation {
        Operation::Encode => vec![(0, codes().collect())],
        Operation::Append => vec![(0, values().collect())],
        Operation::Copy => {
            // Both pages of keys, then both of values.
            let (k, v): (Vec<f64>, Vec<f64>) = (codes().collect(), values().collect());
            let after = 2 * k.len();
            vec![(k.len(), k), (after + v.len(), v)]
        }
        Operation::ReadElements => {
            let all = x.as_chunks().0.iter().map(|x| bf16::from_ne_bytes(*x).to_f64());
            vec![(0, all.collect())]
        }
        Operation::ReadCodes => {
            let mut all = vec![0.0f32; rows * dim];
            for (n, row) in all.chunks_exact_mut(dim).enumerate() {
                pages.view().read(0, n % HEADS, n / HEADS, row);
            }
            vec![(0, all.into_iter().map(f64::from).collect())]
        }
    };
    Ok((want, Work { operation, x, tokens, dim }))
}

impl Work {
    pub(super) fn place<D: HostAccess<Memory: 'static> + Clone>(
        &self,
        device: D,
        find: Option<Find>,
    ) -> Result<Placed<D>, String> {
        let Self { operation, tokens, dim, .. } = *self;
        let slots = if operation == Operation::Copy { 2 } else { 1 };
        let layout = CacheLayout::Contiguous { slots, capacity: tokens };
        let shape = CacheShape { layers: 1, kv_heads: HEADS, head_dim: dim, value_dim: dim };
        let mut desc = CacheDesc::new(layout, shape, KEYS);
        desc.v = Codec::BF16;
        let x = filled(&device, ScalarType::Bf16, &self.x)?;
        let blank = || device.uninit(ScalarType::Bf16, HEADS * tokens * dim).map_err(message);
        let (k, v) = (blank()?, blank()?);
        let store = GpuStore::with_native(device, &desc, find).map_err(message)?;
        let mut placed = Placed { operation, store, x, k, v, tokens, dim };
        placed.write()?;
        Ok(placed)
    }
}

impl<D: HostAccess<Memory: 'static> + Clone> Placed<D> {
    fn write(&mut self) -> Result<(), String> {
        let (shape, strides) = ([1, HEADS, self.tokens, self.dim], strides(self.tokens, self.dim));
        let x = GpuTensor { view: self.x.view(), shape, strides };
        self.store.write(0, &[run(self.tokens)], &x, &x).map_err(message)
    }

    pub(super) fn launch(&mut self) -> Result<(), String> {
        let (tokens, shape) = (self.tokens, [1, HEADS, self.tokens, self.dim]);
        match self.operation {
            Operation::Encode | Operation::Append => self.write(),
            Operation::Copy => {
                self.store.copy(&[PageCopy { from: 0, to: 1, rows: 0..tokens }]).map_err(message)
            }
            Operation::ReadCodes | Operation::ReadElements => {
                let strides = strides(tokens, self.dim);
                let mut k = GpuTensorMut { view: self.k.view_mut(), shape, strides };
                let mut v = GpuTensorMut { view: self.v.view_mut(), shape, strides };
                self.store.read(0, &[run(tokens)], &mut k, &mut v).map_err(message)
            }
        }
    }

    pub(super) fn answer(&self) -> Result<Vec<f64>, String> {
        let ([k, v], device) = (self.store.pages(0), self.store.device());
        match self.operation {
            Operation::Encode => values(device, k),
            Operation::Append => values(device, v),
            Operation::Copy => Ok([values(device, k)?, values(device, v)?].concat()),
            Operation::ReadCodes => values(device, &self.k),
            Operation::ReadElements => values(device, &self.v),
        }
    }
}
