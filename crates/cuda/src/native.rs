//! Launches of native kernels.

#![allow(unsafe_code)]

use super::device::Cuda;
use super::error::CudaError;
use super::params::{Divisor, ForwardParams, MaskTileParams, PrefillParams, Tensor, dtype_id};
use super::sources::{Access, Source};
use super::tma::Boxes;
use crate::plan::{
    CudaPlan, MASK_TILE_ROWS, MaskTileTable, NativeKernel, NativePlan, NativeVariant, WARPGROUP_ROWS,
    WorkTile,
};
use flashtile_core::dtype::MaskKind;
use flashtile_core::inputs::{RunError, alibi_stride};
use flashtile_core::problem::Problem;
use flashtile_core::scoring::log2_factors;
use flashtile_core::tensor;
use flashtile_gpu::tensors::{GpuInputs, GpuKv, GpuMask, GpuOutputs};
use flashtile_kernel::Span;
use flashtile_kernel::cuda::cudarc::driver::CudaStream;
use flashtile_kernel::cuda::{Function, Gpu, Grid, Memory};
use std::sync::Arc;

/// The functions of a plan's kernels on the device.
#[derive(Debug, Default)]
pub(super) struct NativeFunctions {
    /// The functions of each launch: by the fastest access, and by others once they were needed.
    forward: Vec<Vec<(Access, Arc<Function>)>>,
    /// The pre-pass over a materialised mask, where there is one.
    mask_tiles: Option<Arc<Function>>,
}

impl NativeFunctions {
    pub(super) fn new(cuda: &Cuda, plan: &NativePlan) -> Result<Self, CudaError> {
        let mut functions = Self { forward: vec![Vec::new(); plan.launches().len()], mask_tiles: None };
        for (n, launch) in plan.launches().iter().enumerate() {
            functions.forward(cuda, n, &launch.kernel, Access::all(&launch.kernel)[0])?;
        }
        if !plan.mask_tile_tables().is_empty() {
            functions.mask_tiles = Some(cuda.function(Source::mask_tiles(), "mask_tiles", 0)?);
        }
        Ok(functions)
    }

    /// The function of launch `n`.
    fn forward(
        &mut self,
        cuda: &Cuda,
        n: usize,
        kernel: &NativeKernel,
        access: Access,
    ) -> Result<Arc<Function>, CudaError> {
        if let Some((_, function)) = self.forward[n].iter().find(|(of, _)| *of == access) {
            return Ok(Arc::clone(function));
        }
        let function =
            cuda.function(Source::native(kernel, access), "forward", kernel.public.shared_bytes)?;
        self.forward[n].push((access, Arc::clone(&function)));
        Ok(function)
    }
}

/// The bytes that are written to scratch memory before the first run: work tiles, and counters of zero.
pub(super) fn schedule_bytes(plan: &NativePlan) -> Vec<u8> {
    let regions = plan.regions();
    let mut bytes = vec![0u8; regions.written];
    let mut at = regions.work_tiles;
    for launch in plan.launches() {
        let work_tiles = bytes_of(&launch.work_tiles);
        bytes[at..][..work_tiles.len()].copy_from_slice(work_tiles);
        at += launch.capacity.work_tiles * size_of::<WorkTile>();
    }
    bytes
}

/// The bytes of work tiles.
fn bytes_of(values: &[WorkTile]) -> &[u8] {
    // SAFETY: the fields of a work tile are integers without gaps.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// A tensor of elements, as kernels address it, and its shape.
#[derive(Debug, Clone, Copy)]
struct Strided {
    tensor: Tensor,
    shape: [usize; 4],
}

/// The tensors of elements of a run.
#[derive(Debug, Clone, Copy)]
struct Tensors {
    q: Strided,
    k: Strided,
    v: Strided,
    out: Strided,
}

impl Tensors {
    /// Parameters of a kernel for compute capability 9.0 that copies by TMA; `None` where the tensors do not
    /// allow TMA.
    fn prefill_params(
        &self,
        kernel: &NativeKernel,
        gqa_group: usize,
        forward: ForwardParams,
    ) -> Option<PrefillParams> {
        let (keys, NativeVariant { dtype, paged, .. }) = (kernel.public.keys, kernel.variant);
        let boxes = |of: &Strided, box_heads: usize, box_rows: usize| {
            let [batch, heads, rows, columns] = of.shape;
            let (box_heads, box_rows) = (box_heads as u32, box_rows as u32);
            let Tensor { at, batch: batch_step, head, row } = of.tensor;
            let steps = [batch_step, head, row];
            Boxes { at, steps, dtype, batch, heads, rows, columns, box_heads, box_rows }.ragged_map()
        };
        // The largest power of two that divides a page and a tile.
        let page_box = 1 << self.k.shape[2].trailing_zeros().min(keys.trailing_zeros());
        let kv_box_rows = if paged { page_box } else { keys };
        if paged && kv_box_rows < MIN_PAGE_BOX {
            return None;
        }
        let (k, v) = (boxes(&self.k, 1, kv_box_rows)?, boxes(&self.v, 1, kv_box_rows)?);
        // Rows of q are pairs of a position and a head of the GQA group; a box has whole positions.
        let positions = WARPGROUP_ROWS / gqa_group;
        let q =
            if positions * gqa_group == WARPGROUP_ROWS { boxes(&self.q, gqa_group, positions) } else { None };
        let q_box_positions = if q.is_some() { positions as u32 } else { 0 };
        let q = q.unwrap_or_default();
        Some(PrefillParams {
            q: q.map,
            k: k.map,
            v: v.map,
            forward,
            q_batch_rows: q.batch_rows,
            k_batch_rows: k.batch_rows,
            v_batch_rows: v.batch_rows,
            kv_box_rows: kv_box_rows as u32,
            q_box_positions,
            // `NativeRun::launch` sets it.
            queued: 0,
        })
    }
}

/// The least rows of a box of a page: 8 rows of 128 bytes are the pattern in which TMA swizzles, and fewer rows take more copies than
/// threads copy as fast.
const MIN_PAGE_BOX: usize = 16;

/// The context of one run, borrowed from a [`Prepared`](super::prepared::Prepared): a plan of native kernels, their functions and its
/// scratch memory.
#[derive(Debug)]
pub(super) struct NativeRun<'a> {
    pub(super) cuda: &'a Cuda,
    /// Where launches go.
    pub(super) gpu: &'a Gpu,
    pub(super) plan: &'a CudaPlan,
    pub(super) native: &'a NativePlan,
    pub(super) functions: &'a mut NativeFunctions,
    /// Address of the scratch memory.
    pub(super) scratch: u64,
}

impl NativeRun<'_> {
    /// Launches a run over tensors that were checked against the problem.
    pub(super) fn run(
        self,
        inputs: &GpuInputs<'_, Memory>,
        outputs: &GpuOutputs<'_, Memory>,
    ) -> Result<(), CudaError> {
        let tensors = self.tensors(inputs, outputs)?;
        let mut params = self.params(&tensors, inputs, outputs)?;
        params.mask_every_tile = u32::from(!self.plan.options().skip_tiles);
        let regions = self.native.regions();
        params.work_tiles = self.scratch + regions.work_tiles as u64;
        params.counters = self.scratch + regions.counters as u64;
        params.mask_tiles = self.scratch + regions.mask_tiles as u64;
        params.partials = self.scratch + regions.partials as u64;
        let alignments =
            [inputs.q.alignment(), inputs.k.alignment(), inputs.v.alignment(), outputs.out.alignment()];
        let access = if alignments == [16; 4] { Access::Vector } else { Access::Element };
        self.launch(&tensors, access, inputs.mask.as_ref(), params)
    }

    /// The address of a view, which lies inside of memory of the device.
    fn at(&self, name: &'static str, memory: &Memory, span: Span) -> Result<u64, CudaError> {
        Ok(self.gpu.address("forward", name, memory, span)?)
    }

    fn tensors(
        &self,
        inputs: &GpuInputs<'_, Memory>,
        outputs: &GpuOutputs<'_, Memory>,
    ) -> Result<Tensors, CudaError> {
        let size = self.plan.problem().dtype().bytes();
        let elements = |at, shape, strides: [usize; 4]| {
            let [batch, head, row, _] = strides.map(|stride| bytes(stride, size));
            Strided { tensor: Tensor { at, batch, head, row }, shape }
        };
        let kv = |name, kv: &GpuKv<'_, Memory>| {
            let at = self.at(name, kv.bytes.memory(), kv.bytes.span())?;
            let [batch, head, row] = kv.strides.map(|stride| bytes(stride, 1));
            Ok::<_, CudaError>(Strided { tensor: Tensor { at, batch, head, row }, shape: kv.shape })
        };
        let (q, out) = (&inputs.q, &outputs.out);
        Ok(Tensors {
            q: elements(self.at("q", q.view.memory(), q.view.span())?, q.shape, q.strides),
            k: kv("k", &inputs.k)?,
            v: kv("v", &inputs.v)?,
            out: elements(self.at("out", out.view.memory(), out.view.span())?, out.shape, out.strides),
        })
    }

    /// A mask, and the bytes between its keys. Kernels read neighbouring elements, or one for all keys.
    fn mask(&self, name: &'static str, mask: &GpuMask<'_, Memory>) -> Result<(Tensor, u32), CudaError> {
        tensor::check_mask_strides(mask.shape, mask.strides)
            .map_err(|error| RunError::Memory { tensor: name, error })?;
        let at = self.at(name, mask.bytes.memory(), mask.bytes.span())?;
        let [batch, head, row, step] = mask.steps().map(|step| bytes(step, mask.kind.bytes()));
        Ok((Tensor { at, batch, head, row }, step as u32))
    }

    /// The parameters without the addresses in scratch memory.
    fn params(
        &self,
        tensors: &Tensors,
        inputs: &GpuInputs<'_, Memory>,
        outputs: &GpuOutputs<'_, Memory>,
    ) -> Result<ForwardParams, CudaError> {
        let list = |name, list: Option<(&Memory, Span)>| {
            list.map_or(Ok(0), |(memory, span)| self.at(name, memory, span))
        };
        let slopes = inputs.alibi_slopes.map_or(0, |list| list.len());
        let mut params = ForwardParams {
            q: tensors.q.tensor,
            k: tensors.k.tensor,
            v: tensors.v.tensor,
            out: tensors.out.tensor,
            lse: list("lse", outputs.lse.as_ref().map(|lse| (lse.memory(), lse.span())))?,
            alibi_slopes: list("alibi_slopes", inputs.alibi_slopes.map(|of| (of.memory(), of.span())))?,
            alibi_stride: alibi_stride(slopes, self.plan.problem().dims().q_heads) as u32,
            sinks: list("sinks", inputs.sinks.map(|of| (of.memory(), of.span())))?,
            ..scoring(self.plan.problem())
        };
        if let Some(tables) = &inputs.tables {
            params.block_table = self.at("table", tables.table.memory(), tables.table.span())?;
            params.page_size = Divisor::new(tables.page_size);
            params.block_table_width = tables.width as u32;
            if tables.wraps {
                params.ring_blocks = Divisor::new(tables.width);
            }
        }
        if let Some(tree) = &inputs.tree {
            let (Tensor { at, row, .. }, step) = self.mask("tree", tree)?;
            (params.tree_mask, params.tree_row, params.tree_step) = (at, row, step);
        }
        if let Some(mask) = &inputs.mask {
            let (tensor, step) = self.mask("mask", mask)?;
            params.mask = tensor;
            params.mask_step = u32::from(step != 0);
            params.mask_kind = match mask.kind {
                MaskKind::Bool => 3,
                MaskKind::Additive(dtype) => dtype_id(dtype),
            };
        }
        Ok(params)
    }

    /// Launches the kernels one after another; `params` are the first one's.
    fn launch(
        self,
        tensors: &Tensors,
        access: Access,
        mask: Option<&GpuMask<'_, Memory>>,
        mut params: ForwardParams,
    ) -> Result<(), CudaError> {
        let Self { cuda, gpu, native: plan, functions, .. } = self;
        let stream = gpu.stream();
        for (n, launch) in plan.launches().iter().enumerate() {
            let table = plan.mask_tile_tables().get(n);
            if let (Some(function), Some(table), Some(mask)) = (&functions.mask_tiles, table, mask) {
                launch_mask_tiles(stream, function, table, mask, &mut params)?;
            }
            let kernel = &launch.kernel;
            let grid = Grid {
                blocks: [launch.capacity.grid, 1, 1],
                threads: kernel.public.threads,
                shared: kernel.public.shared_bytes,
            };
            if kernel.public.uses_wgmma {
                let gqa_group = params.gqa_group.value as usize;
                let by_tma = (access == Access::Vector && kernel.uses_tma())
                    .then(|| tensors.prefill_params(kernel, gqa_group, params))
                    .flatten();
                let access = if by_tma.is_some() { Access::Tma } else { access };
                let copied = PrefillParams { forward: params, ..PrefillParams::default() };
                let params = PrefillParams { queued: launch.queued(), ..by_tma.unwrap_or(copied) };
                let function = functions.forward(cuda, n, kernel, access)?;
                // SAFETY: the parameters are the kernel's, whose size it asserts. Views lie inside of memory of the device, as
                // `Gpu::address` has checked, and hold the shapes that were checked against the problem; maps describe the views. The
                // schedule covers rows and keys of the problem alone, and its regions lie in the scratch memory.
                unsafe { function.launch(stream, grid, &params)? };
            } else {
                let function = functions.forward(cuda, n, kernel, access)?;
                // SAFETY: as above.
                unsafe { function.launch(stream, grid, &params)? };
            }
            params.work_tiles += (launch.capacity.work_tiles * size_of::<WorkTile>()) as u64;
            params.counters += launch.capacity.counters as u64 * 4;
            params.partials += (launch.capacity.partials * kernel.partial_floats * 4) as u64;
            if let Some(table) = table {
                params.mask_tiles += (table.planes * table.q_tiles * table.k_blocks) as u64;
            }
        }
        Ok(())
    }
}

/// Launches the pre-pass over the mask for one launch, and gives the parameters the table's shape.
fn launch_mask_tiles(
    stream: &CudaStream,
    function: &Function,
    table: &MaskTileTable,
    mask: &GpuMask<'_, Memory>,
    params: &mut ForwardParams,
) -> Result<(), CudaError> {
    // An axis of stride 0 is one index, whatever its size.
    let steps = mask.steps();
    let [planes, heads, rows, keys] =
        std::array::from_fn(|axis| if steps[axis] == 0 { mask.shape[axis].min(1) } else { mask.shape[axis] });
    let (q_tiles, k_blocks) = (rows.div_ceil(MASK_TILE_ROWS), keys.div_ceil(table.block_k));
    params.mask_q_tiles = q_tiles as u32;
    params.mask_k_blocks = k_blocks as u32;
    if [planes, heads, rows, keys].contains(&0) {
        return Ok(());
    }
    let Tensor { at, batch: sequence, head, row } = params.mask;
    let mask_tiles = MaskTileParams {
        mask: at,
        mask_tiles: params.mask_tiles,
        sequence,
        head,
        row,
        kind: params.mask_kind,
        step: params.mask_step,
        heads: heads as u32,
        rows: rows as u32,
        keys: keys as u32,
        block: table.block_k as u32,
        q_tiles: params.mask_q_tiles,
        k_blocks: params.mask_k_blocks,
    };
    let grid = Grid { blocks: [k_blocks, q_tiles, planes * heads], threads: 128, shared: 0 };
    // SAFETY: the parameters are the kernel's; the mask lies inside of memory of the device, and the table was sized
    // for a mask with every axis of the problem's size.
    unsafe { Ok(function.launch(stream, grid, &mask_tiles)?) }
}

/// Bytes of a stride; that of an axis of a single index may be anything.
fn bytes(stride: usize, size: usize) -> i64 {
    i64::try_from(stride.saturating_mul(size)).unwrap_or(i64::MAX)
}

/// The parameters that follow from the problem alone.
fn scoring(problem: &Problem) -> ForwardParams {
    let (dims, desc) = (problem.dims(), problem.desc());
    let bound =
        |side: Option<usize>| side.map_or(-1, |n| i64::try_from(n).unwrap_or(i64::MAX / 2).min(i64::MAX / 2));
    let factors = log2_factors(problem.scale(), desc.softcap);
    ForwardParams {
        window_left: bound(desc.visibility.left()),
        window_right: bound(desc.visibility.right()),
        chunk: desc.visibility.chunk().map_or(0, |chunk| u32::try_from(chunk).unwrap_or(u32::MAX)),
        gqa_group: Divisor::new(dims.gqa_group()),
        q_heads: dims.q_heads as u32,
        q_len: dims.q_len as u32,
        head_dim: dims.head_dim as u32,
        value_dim: dims.value_dim as u32,
        scale: factors.scale,
        softcap: factors.softcap.unwrap_or(0.0),
        ..ForwardParams::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divisors_divide() {
        let most = (1u32 << 31) - 1;
        for value in [1usize, 2, 3, 5, 7, 12, 16, 100, 255, 4096, 65_537, 1 << 30, (1 << 31) - 1] {
            let d = Divisor::new(value);
            let quotient = |x: u32| ((u64::from(x) * u64::from(d.multiplier)) >> d.shift) as u32;
            let near = |x: u32| [x.saturating_sub(1), x, x.saturating_add(1).min(most)];
            let multiples = (1..200u64).map(|n| (n * value as u64 * 7919 % u64::from(most)) as u32);
            let edges = multiples.chain([0, value as u32, most, most / value as u32 * value as u32]);
            for x in edges.flat_map(near) {
                assert_eq!(quotient(x), x / value as u32, "{x} / {value}");
            }
        }
    }
}
