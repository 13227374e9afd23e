//! A KV cache in device memory.

#![allow(unsafe_code)]

use super::cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use super::device::Cuda;
use super::error::CudaError;
use super::params::{MAX_RUNS, MoveParams, Run, Side, dtype_id};
use super::sources::Source;
use super::tensor::{DeviceTensor, DeviceTensorMut};
use crate::plan::MAX_GRID;
use flashtile_core::block_tables::BlockTables;
use flashtile_core::cache::{CacheDesc, CacheError, SeqId};
use flashtile_core::cache::{CacheMemory, PageCopy, SequenceTable, total_tokens};
use flashtile_core::dtype::Dtype;
use flashtile_core::tensor::dense;
use flashtile_kernel::cuda::{Function, Grid};
use std::sync::Arc;

/// Keys and values of many sequences in device memory: what [`KvCache`](flashtile_core::cache::KvCache) is in main memory, with the same
/// bookkeeping. Element codecs only.
///
/// Operations that move rows launch one kernel for every 194 runs of tokens on the stream that the cache was made with,
/// allocate nothing on the device and return before it has ended; later work on that stream sees their result. Bookkeeping is
/// the host's and changes at once.
#[derive(Debug)]
pub struct DeviceKvCache {
    desc: CacheDesc,
    table: SequenceTable,
    copies: Vec<PageCopy>,
    function: Arc<Function>,
    stream: Arc<CudaStream>,
    dtypes: [Dtype; 2],
    at: u64,
    /// Bytes of K of a layer, and of V.
    bytes: [usize; 2],
    _memory: CudaSlice<u8>,
}

/// Tokens that move to `page` and `row` from another page and row.
#[derive(Debug, Clone, Copy)]
struct Move {
    to: (usize, usize),
    from: (usize, usize),
    tokens: usize,
}

impl DeviceKvCache {
    /// An empty cache, whose pools are zero.
    ///
    /// # Errors
    /// [`CudaError::KvCache`] with [`CacheError::Dimension`], [`CacheError::SizeOverflow`] or [`CacheError::NotElements`];
    /// [`CudaError::Device`], also where the device lacks the memory.
    pub fn new(cuda: &Cuda, desc: CacheDesc, stream: &Arc<CudaStream>) -> Result<Self, CudaError> {
        desc.validate()?;
        if desc.kv_heads > MAX_GRID {
            return Err(CacheError::Dimension { name: "kv_heads", got: desc.kv_heads, max: MAX_GRID }.into());
        }
        let elements = |tensor, codec: flashtile_core::codec::Codec| {
            codec.dtype().ok_or(CacheError::NotElements { tensor, codec })
        };
        let dtypes = [elements("k", desc.k)?, elements("v", desc.v)?];
        let [k, v] = desc.pools();
        // The description is validated: this does not overflow.
        let size = |shape: [usize; 4], dtype: Dtype| shape.iter().product::<usize>() * dtype.bytes();
        let bytes = [size(k, dtypes[0]), size(v, dtypes[1])].map(|n: usize| n.next_multiple_of(256));
        let all = (bytes[0] + bytes[1]) * desc.layers;
        let failed = CudaError::driver(format!("{all} bytes for a cache"));
        let memory = stream.alloc_zeros::<u8>(all).map_err(failed)?;
        let function = cuda.function(Source::move_rows(), "move_rows", 0)?;
        let at = memory.device_ptr(stream).0;
        let table = SequenceTable::new(desc.layout)?;
        let (copies, stream) = (Vec::new(), stream.clone());
        Ok(Self { desc, table, copies, function, stream, dtypes, at, bytes, _memory: memory })
    }

    /// The description this cache was made from.
    #[must_use]
    pub const fn desc(&self) -> &CacheDesc {
        &self.desc
    }

    /// As [`KvCache::create`](flashtile_core::cache::KvCache::create).
    ///
    /// # Errors
    /// [`CudaError::KvCache`].
    pub fn create(&mut self) -> Result<SeqId, CudaError> {
        Ok(self.table.create()?)
    }

    /// As [`KvCache::remove`](flashtile_core::cache::KvCache::remove). Work that reads the sequence's pages should have been launched before
    /// work that writes tokens of others.
    ///
    /// # Errors
    /// [`CudaError::KvCache`].
    pub fn remove(&mut self, seq: SeqId) -> Result<(), CudaError> {
        Ok(self.table.remove(seq)?)
    }

    /// As [`KvCache::len`](flashtile_core::cache::KvCache::len).
    ///
    /// # Errors
    /// [`CudaError::KvCache`].
    pub fn len(&self, seq: SeqId) -> Result<usize, CudaError> {
        Ok(self.table.kept(seq)?.end)
    }

    /// As [`KvCache::first`](flashtile_core::cache::KvCache::first).
    ///
    /// # Errors
    /// [`CudaError::KvCache`].
    pub fn first(&self, seq: SeqId) -> Result<usize, CudaError> {
        Ok(self.table.kept(seq)?.start)
    }

    /// As [`KvCache::truncate`](flashtile_core::cache::KvCache::truncate).
    ///
    /// # Errors
    /// [`CudaError::KvCache`].
    pub fn truncate(&mut self, seq: SeqId, len: usize) -> Result<(), CudaError> {
        Ok(self.table.truncate(seq, len)?)
    }

    /// As [`KvCache::forget`](flashtile_core::cache::KvCache::forget).
    ///
    /// # Errors
    /// [`CudaError::KvCache`].
    pub fn forget(&mut self, seq: SeqId, before: usize) -> Result<(), CudaError> {
        Ok(self.table.forget(seq, before)?)
    }

    /// As [`KvCache::tables`](flashtile_core::cache::KvCache::tables); the table itself is for the caller to copy to the device.
    ///
    /// # Errors
    /// [`CudaError::KvCache`].
    pub fn tables(&self, batch: &[SeqId]) -> Result<BlockTables, CudaError> {
        let mut tables = BlockTables::default();
        self.table.tables(batch, &mut tables)?;
        Ok(tables)
    }

    /// As [`KvCache::memory`](flashtile_core::cache::KvCache::memory).
    #[must_use]
    pub fn memory(&self) -> CacheMemory {
        CacheMemory::of(&self.desc, &self.table)
    }

    /// As [`KvCache::extend`](flashtile_core::cache::KvCache::extend). Pages that are shared no longer are copied on the stream.
    ///
    /// # Errors
    /// [`CudaError::KvCache`], or [`CudaError::Device`] after which the cache is not usable.
    pub fn extend(&mut self, batch: &[(SeqId, usize)]) -> Result<(), CudaError> {
        self.table.extend(batch, &mut self.copies)?;
        self.copy_pages()
    }

    /// As [`KvCache::write`](flashtile_core::cache::KvCache::write), on the stream.
    ///
    /// # Errors
    /// [`CudaError::KvCache`], or [`CudaError::Device`] after which the cache is not usable.
    pub fn write(
        &mut self,
        layer: usize,
        batch: &[(SeqId, usize)],
        (k, v): (&DeviceTensor<'_>, &DeviceTensor<'_>),
    ) -> Result<(), CudaError> {
        self.desc.check_layer(layer)?;
        self.desc.check_rows(total_tokens(batch), (k.raw.shape, v.raw.shape))?;
        self.table.prepare_write(batch, &mut self.copies)?;
        self.copy_pages()?;
        self.write_rows(layer, batch, (k, v))
    }

    /// As [`KvCache::append`](flashtile_core::cache::KvCache::append), on the stream.
    ///
    /// # Errors
    /// [`CudaError::KvCache`], or [`CudaError::Device`] after which the cache is not usable.
    pub fn append(
        &mut self,
        batch: &[(SeqId, usize)],
        layers: &[(DeviceTensor<'_>, DeviceTensor<'_>)],
    ) -> Result<(), CudaError> {
        if layers.len() != self.desc.layers {
            return Err(CacheError::LayerCount { got: layers.len(), layers: self.desc.layers }.into());
        }
        for (k, v) in layers {
            self.desc.check_rows(total_tokens(batch), (k.raw.shape, v.raw.shape))?;
        }
        self.extend(batch)?;
        layers.iter().enumerate().try_for_each(|(layer, (k, v))| self.write_rows(layer, batch, (k, v)))
    }

    /// As [`KvCache::fork`](flashtile_core::cache::KvCache::fork); the tokens of a contiguous or ring cache are copied on the stream.
    ///
    /// # Errors
    /// [`CudaError::KvCache`], or [`CudaError::Device`] after which the cache is not usable.
    pub fn fork(&mut self, seq: SeqId) -> Result<SeqId, CudaError> {
        let fork = self.table.fork(seq, &mut self.copies)?;
        self.copy_pages()?;
        Ok(fork)
    }

    /// As [`KvCache::linearise`](flashtile_core::cache::KvCache::linearise), on the stream.
    ///
    /// # Errors
    /// [`CudaError::KvCache`] or [`CudaError::Device`].
    pub fn linearise(
        &self,
        seq: SeqId,
        layer: usize,
        (k, v): (&mut DeviceTensorMut<'_>, &mut DeviceTensorMut<'_>),
    ) -> Result<(), CudaError> {
        let kept = self.table.kept(seq)?;
        self.desc.check_layer(layer)?;
        self.desc.check_rows(kept.len(), (k.raw.shape, v.raw.shape))?;
        let runs = self.table.runs(seq, kept)?;
        let moves: Vec<Move> =
            runs.map(|run| Move { to: (0, run.at), from: (run.page, run.row), tokens: run.tokens }).collect();
        self.launch(self.sides(layer), [Side::of(&k.raw), Side::of(&v.raw)], &moves)
    }

    /// As [`KvCache::pages`](flashtile_core::cache::KvCache::pages). The views are of memory of the cache: they must not be used after it is
    /// dropped, nor while work on another stream writes it.
    ///
    /// # Errors
    /// [`CudaError::KvCache`].
    pub fn pages(&self, layer: usize) -> Result<(DeviceTensor<'_>, DeviceTensor<'_>), CudaError> {
        self.desc.check_layer(layer)?;
        let view = |which: usize, shape: [usize; 4]| {
            let (dtype, at) = (self.dtypes[which], self.pool(layer, which));
            // SAFETY: the pool lies there with this shape, dense, as long as the cache lives, which the views borrow.
            unsafe { DeviceTensor::from_raw_parts(dtype, at, shape, dense(shape)) }
        };
        let [k, v] = self.desc.pools();
        Ok((view(0, k)?, view(1, v)?))
    }

    /// Address of K (0) or V (1) of a layer.
    const fn pool(&self, layer: usize, which: usize) -> u64 {
        let [k, v] = self.bytes;
        self.at + (layer * (k + v) + if which == 0 { 0 } else { k }) as u64
    }

    fn sides(&self, layer: usize) -> [Side; 2] {
        let pools = self.desc.pools();
        [0, 1].map(|which| {
            let ([_, heads, rows, dim], dtype) = (pools[which], self.dtypes[which]);
            let row = dim * dtype.bytes();
            Side {
                at: self.pool(layer, which),
                page: (heads * rows * row) as i64,
                head: (rows * row) as i64,
                row: row as i64,
                dtype: dtype_id(dtype),
                unused: 0,
            }
        })
    }

    /// Does the copies that the bookkeeping has listed.
    fn copy_pages(&mut self) -> Result<(), CudaError> {
        let copies = std::mem::take(&mut self.copies);
        let moved = |copy: &PageCopy| Move {
            to: (copy.to, copy.rows.start),
            from: (copy.from, copy.rows.start),
            tokens: copy.rows.len(),
        };
        let moves: Vec<Move> = copies.iter().map(moved).collect();
        for layer in 0..self.desc.layers {
            self.launch(self.sides(layer), self.sides(layer), &moves)?;
        }
        self.copies = copies;
        self.copies.clear();
        Ok(())
    }

    fn write_rows(
        &self,
        layer: usize,
        batch: &[(SeqId, usize)],
        (k, v): (&DeviceTensor<'_>, &DeviceTensor<'_>),
    ) -> Result<(), CudaError> {
        let (mut row, mut moves) = (0, Vec::new());
        for &(seq, tokens) in batch {
            let tail = self.table.tail(seq, tokens)?;
            for run in self.table.runs(seq, tail.kept)? {
                let from = (0, row + tail.skipped + run.at);
                moves.push(Move { to: (run.page, run.row), from, tokens: run.tokens });
            }
            row += tokens;
        }
        self.launch([Side::of(&k.raw), Side::of(&v.raw)], self.sides(layer), &moves)
    }

    fn launch(&self, from: [Side; 2], to: [Side; 2], moves: &[Move]) -> Result<(), CudaError> {
        let CacheDesc { kv_heads, head_dim, value_dim, .. } = self.desc;
        for moves in moves.chunks(MAX_RUNS) {
            let dim = [head_dim as u32, value_dim as u32];
            let (heads, runs) = (kv_heads as u32, moves.len() as u32);
            let run = [Run::default(); MAX_RUNS];
            let mut params = MoveParams { from, to, dim, heads, rows: 0, runs, unused: 0, run };
            for (run, moved) in params.run.iter_mut().zip(moves) {
                *run = Run {
                    first: params.rows,
                    page: moved.to.0 as u32,
                    row: moved.to.1 as u32,
                    other_page: moved.from.0 as u32,
                    other_row: moved.from.1 as u32,
                };
                params.rows += moved.tokens as u32;
            }
            if params.rows == 0 {
                continue;
            }
            let grid =
                Grid { blocks: [(params.rows as usize).div_ceil(4), kv_heads, 2], threads: 128, shared: 0 };
            // SAFETY: rows of pages come from the bookkeeping and lie inside the pools; rows of tensors are inside their shapes,
            // which were checked, and readable or writable by their constructors' contracts.
            unsafe { self.function.launch(&self.stream, grid, &params)? };
        }
        Ok(())
    }
}
