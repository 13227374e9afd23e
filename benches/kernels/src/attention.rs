//! Workloads of attention: sessions of the library over seeded tensors, and the oracle's answer.

use super::data::{Find, Stored, Want, elements, size};
use super::device::values;
use flashtile_core::block_tables::BlockTables;
use flashtile_core::codec::{Codec, KvView};
use flashtile_core::dtype::Dtype;
use flashtile_core::inputs::{Inputs, Outputs};
use flashtile_core::problem::{Dims, HeadShape, Problem, ProblemDesc, SeqLens};
use flashtile_core::reference;
use flashtile_core::tensor::{TensorView, TensorViewMut, dense};
use flashtile_gpu::codecs::format_id;
use flashtile_gpu::engine::{Engine, PortableEngine};
use flashtile_gpu::session::Session;
use flashtile_gpu::tile::{PortableTile, Tiling};
use flashtile_gpu::uploaded_run::{Repeated, UploadedRun};
use flashtile_kernel::HostAccess;
use flashtile_kernel::source::Shape;
use std::ops::Range;

/// The tile of prefill that the simulator has native code for.
const PREFILL_TILE: PortableTile = PortableTile::prefill(32, 16, 2, 1);

fn message(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// A problem with its tensors.
pub(super) struct Work {
    problem: Problem,
    tiling: Tiling,
    q: Vec<u8>,
    k: Stored,
    v: Stored,
    tables: Option<BlockTables>,
}

/// A [`Work`] whose tensors lie in the memory of a device.
pub(super) struct Placed<D: HostAccess> {
    run: UploadedRun<PortableEngine<D>>,
}

impl Work {
    pub(super) fn place<D: HostAccess>(&self, device: D, find: Option<Find>) -> Result<Placed<D>, String> {
        let (dtype, dims) = (self.problem.dtype(), self.problem.dims());
        let (q_shape, shape) = (dims.q_shape(), dims.out_shape());
        let q = TensorView::from_bytes(dtype, &self.q, q_shape, dense(q_shape)).map_err(message)?;
        let inputs = match (&self.tables, self.k.view()?, self.v.view()?) {
            (Some(tables), k, v) => Inputs::paged_kv(q, k, v, tables),
            (None, KvView::Elements(k), KvView::Elements(v)) => Inputs::new(q, k, v),
            (None, ..) => return Err("codes without pages".to_owned()),
        };
        let mut out = vec![0u8; shape.iter().product::<usize>() * dtype.bytes()];
        let mut lse = vec![0.0; dims.lse_shape().iter().product()];
        let view = TensorViewMut::from_bytes(dtype, &mut out, shape, dense(shape)).map_err(message)?;
        let mut outputs = Outputs::new(view);
        outputs.lse = Some(&mut lse);
        let engine = PortableEngine::with_tiling(self.tiling);
        let engine = match find {
            Some(find) => engine.with_native(find, |_| "no native code of the shape".to_owned()),
            None => engine,
        };
        let plan = engine.plan(&self.problem).map_err(message)?;
        let run = UploadedRun::new(Session::new(device, engine), plan, &inputs, &outputs);
        Ok(Placed { run: run.map_err(message)? })
    }
}

impl<D: HostAccess> Placed<D> {
    pub(super) fn launch(&mut self) -> Result<(), String> {
        self.run.launch().map_err(message)
    }

    pub(super) fn answer(&self) -> Result<Vec<f64>, String> {
        values(self.run.device(), self.run.results().memories().0)
    }
}

/// One query per sequence over all of its keys, one page per sequence.
#[derive(Clone, Copy)]
struct Decoded {
    batch: usize,
    keys: usize,
    heads: HeadShape,
    codec: Codec,
    tiling: Tiling,
}

impl Decoded {
    fn dtype(&self) -> Dtype {
        self.codec.dtype().unwrap_or(Dtype::BF16)
    }

    fn problem(&self, sequences: usize) -> Result<Problem, String> {
        let lengths = vec![SeqLens::decode(self.keys); sequences];
        let mut desc = ProblemDesc::cached(self.heads, self.dtype(), &lengths);
        (desc.k_codec, desc.v_codec) = (Some(self.codec), Some(self.codec));
        desc.validate().map_err(message)
    }

    fn tables(&self, pages: Range<usize>) -> BlockTables {
        BlockTables {
            table: pages.clone().map(|page| page as u32).collect(),
            width: 1,
            page_size: self.keys,
            wraps: false,
            lens: vec![self.keys; pages.len()],
            first: vec![0; pages.len()],
        }
    }

    fn job(&self) -> Result<(Want, Work), String> {
        let (Self { batch, keys, heads, codec, tiling }, dtype) = (*self, self.dtype());
        let HeadShape { q_heads, kv_heads, head_dim: dim, .. } = heads;
        let mut q = vec![0u8; batch * q_heads * dim * dtype.bytes()];
        elements(&mut q, dtype, 1);
        let stored = |seed| Stored::new(codec, dtype, [batch, kv_heads, keys, dim], seed);
        let (k, v) = (stored(2)?, stored(3)?);
        // Queries are stored as [heads, sequences, dim]; one sequence is a view with the strides of all.
        let strides = [batch * q_heads * dim, batch * dim, dim, 1];
        // The oracle computes the first and the last sequence.
        let mut want = Vec::new();
        for sequence in [0, batch - 1] {
            let tables = self.tables(sequence..sequence + 1);
            let q = &q[sequence * dim * dtype.bytes()..];
            let q = TensorView::from_bytes(dtype, q, [1, q_heads, 1, dim], strides).map_err(message)?;
            let inputs = Inputs::paged_kv(q, k.view()?, v.view()?, &tables);
            let answer = reference::attention(&self.problem(1)?, &inputs).map_err(message)?;
            let rows = answer.out.chunks_exact(dim).enumerate();
            want.extend(rows.map(|(head, row)| ((head * batch + sequence) * dim, row.to_vec())));
        }
        let (problem, tables) = (self.problem(batch)?, Some(self.tables(0..batch)));
        Ok((want, Work { problem, tiling, q, k, v, tables }))
    }
}

/// Attention of one query per sequence: [`decode()`](flashtile_gpu::kernels::decode::decode()), then
/// [`merge()`](flashtile_gpu::kernels::merge::merge()).
pub(super) fn decode(shape: &Shape, find: Option<Find>) -> Result<(Want, Work), String> {
    let [batch, keys, q_heads, kv_heads, dim, splits] =
        ["batch", "keys", "q_heads", "kv_heads", "dim", "splits"].map(|name| size(shape, name));
    let (batch, keys, dim, splits) = (batch?, keys?, dim?, splits?);
    let codec = Codec::ALL.into_iter().find(|&codec| u64::from(format_id(codec)) == shape.get("format"));
    let codec = codec.ok_or("a shape without a format")?;
    if codec.row_bytes(dim) as u64 != shape.get("row") {
        return Err(format!("a row of {codec} has {} bytes", codec.row_bytes(dim)));
    }
    let heads = HeadShape { q_heads: q_heads?, kv_heads: kv_heads?, head_dim: dim, value_dim: dim };
    let tile = match find {
        Some(_) => PortableTile::new(8, 16, 2, 1),
        None => PortableTile::default_decode(codec, dim),
    };
    Decoded { batch, keys, heads, codec, tiling: tile.with_splits(splits) }.job()
}

/// Heads of the rows to merge.
const MERGED_HEADS: usize = 32;

/// Rows with this many partial results, each of one block of keys, which all heads share.
pub(super) fn merge(shape: &Shape, find: Option<Find>) -> Result<(Want, Work), String> {
    let (rows, splits, dim) = (size(shape, "rows")?, size(shape, "splits")?, size(shape, "dim")?);
    // One query, or a batch if there are more rows than heads.
    let q_heads = rows.min(MERGED_HEADS);
    if !rows.is_multiple_of(q_heads) {
        return Err(format!("{rows} rows are not a multiple of {q_heads} heads"));
    }
    let heads = HeadShape { q_heads, kv_heads: 1, head_dim: dim, value_dim: dim };
    let tile = PortableTile::new(8, 16, if find.is_some() { 2 } else { 1 }, 1);
    let (keys, tiling) = (tile.keys() * splits, tile.with_splits(splits));
    Decoded { batch: rows / q_heads, keys, heads, codec: Codec::BF16, tiling }.job()
}

/// Attention of all rows of dense sequences over all of their keys:
/// [`prefill()`](flashtile_gpu::kernels::prefill::prefill()).
pub(super) fn prefill(shape: &Shape, find: Option<Find>) -> Result<(Want, Work), String> {
    let [batch, length, heads, dim] = ["batch", "length", "heads", "dim"].map(|name| size(shape, name));
    let (batch, length, heads, dim) = (batch?, length?, heads?, dim?);
    let dtype = Dtype::BF16;
    let problem = |batch: usize, heads: usize| {
        let (kv_heads, q_len, kv_len) = (heads, length, length);
        let dims = Dims { batch, q_heads: heads, kv_heads, q_len, kv_len, head_dim: dim, value_dim: dim };
        ProblemDesc::new(dims, dtype).validate().map_err(message)
    };
    let head = length * dim;
    let [q, k, v] = [1, 2, 3].map(|seed| {
        let mut bytes = vec![0u8; dtype.bytes() * batch * heads * head];
        elements(&mut bytes, dtype, seed);
        bytes
    });
    // The oracle computes the first and the last head.
    let mut want = Vec::new();
    for at in [0, batch * heads - 1] {
        let one = [1, 1, length, dim];
        let [q, k, v] = [&q, &k, &v].map(|bytes| {
            let bytes = &bytes[dtype.bytes() * at * head..];
            TensorView::from_bytes(dtype, bytes, one, dense(one)).map_err(message)
        });
        let inputs = Inputs::new(q?, k?, v?);
        want.push((at * head, reference::attention(&problem(1, 1)?, &inputs).map_err(message)?.out));
    }
    let tile = if find.is_some() { PREFILL_TILE } else { PortableTile::default_prefill(dim) };
    let stored = |bytes| Stored::Elements(bytes, dtype, [batch, heads, length, dim]);
    let (problem, k, v) = (problem(batch, heads)?, stored(k), stored(v));
    Ok((want, Work { problem, tiling: tile.into(), q, k, v, tables: None }))
}
