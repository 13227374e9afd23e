//! Plans in device memory, and their runs.

#![allow(unsafe_code)]

use super::cudarc::driver::sys::CUstreamCaptureStatus;
use super::cudarc::driver::{CudaSlice, CudaStream, DevicePtr, result};
use super::device::Cuda;
use super::error::{CudaError, DeviceError};
use super::params::{Divisor, ForwardParams, MaskTileParams, PrefillParams, Tensor, dtype_id};
use super::portable::Runs;
use super::sources::{Access, Source};
use super::tensor::{DeviceCodes, DeviceInputs, DeviceKv, DeviceOutputs, RawTensor};
use super::tma::Boxes;
use crate::plan::{
    CudaPlan, Engine, MASK_TILE_ROWS, MaskTileTable, NativeKernel, NativePlan, Sm90Kernel, WARPGROUP_ROWS,
    WorkTile,
};
use flashtile_core::dtype::MaskKind;
use flashtile_core::inputs::{self, InputShapes, RunError};
use flashtile_core::problem::Problem;
use flashtile_kernel::cuda::{Function, Grid};
use std::f32::consts::LOG2_E;
use std::sync::Arc;

/// Device memory of the caller.
#[derive(Debug)]
pub struct DeviceMemory {
    at: u64,
    bytes: usize,
}

impl DeviceMemory {
    /// Memory at a device address that is a multiple of 256.
    ///
    /// # Safety
    /// One allocation of the device has `bytes` bytes there, and nothing else accesses them until the [`Prepared`] that is given them is
    /// dropped and the work that it launched has ended.
    #[must_use]
    pub const unsafe fn from_raw_parts(at: u64, bytes: usize) -> Self {
        Self { at, bytes }
    }
}

/// A plan in device memory, and the stream on which it runs: runs and updates follow each other there without waiting, and
/// share its memory. It must outlive graphs that have captured its runs.
#[derive(Debug)]
pub struct Prepared {
    cuda: Cuda,
    stream: Arc<CudaStream>,
    plan: CudaPlan,
    loaded: Loaded,
    at: u64,
    /// The scratch memory, where the caller does not own it.
    _memory: Option<CudaSlice<u8>>,
}

/// The kernels of a plan on the device.
#[derive(Debug)]
enum Loaded {
    Native(NativeFunctions),
    Portable(Box<Runs>),
}

#[derive(Debug)]
struct NativeFunctions {
    /// The functions of each launch: by the fastest access, and by others once they were needed.
    forward: Vec<Vec<(Access, Arc<Function>)>>,
    /// The pre-pass over a materialised mask, where there is one.
    mask_tiles: Option<Arc<Function>>,
}

impl NativeFunctions {
    fn new(cuda: &Cuda, plan: &NativePlan) -> Result<Self, CudaError> {
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
        let function = cuda.function(Source::native(kernel, access), "forward", kernel.shared_bytes())?;
        self.forward[n].push((access, Arc::clone(&function)));
        Ok(function)
    }
}

/// What is written to scratch memory before the first run: work tiles, and counters of zero.
fn schedule_bytes(plan: &NativePlan) -> Vec<u8> {
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

impl Cuda {
    /// What runs of a plan need: its kernels loaded, its schedule in device memory, room for partial results. Allocates
    /// [`CudaPlan::workspace_bytes`] on the device and copies the schedule there on the stream.
    ///
    /// # Errors
    /// [`CudaError::OtherDevice`] or [`CudaError::Device`].
    pub fn prepare(&self, plan: &CudaPlan, stream: &Arc<CudaStream>) -> Result<Prepared, CudaError> {
        Prepared::new(self, plan, stream, None)
    }

    /// [`Cuda::prepare`] in memory that the caller owns, of [`CudaPlan::workspace_bytes`] at least.
    ///
    /// # Errors
    /// As [`Cuda::prepare`], [`CudaError::Scratch`] or [`CudaError::ScratchAlignment`].
    pub fn prepare_in(
        &self,
        plan: &CudaPlan,
        stream: &Arc<CudaStream>,
        memory: DeviceMemory,
    ) -> Result<Prepared, CudaError> {
        Prepared::new(self, plan, stream, Some(memory))
    }
}

impl Prepared {
    pub(super) fn new(
        cuda: &Cuda,
        plan: &CudaPlan,
        stream: &Arc<CudaStream>,
        memory: Option<DeviceMemory>,
    ) -> Result<Self, CudaError> {
        let facts = cuda.facts();
        let shared = plan.kernels().map(|kernel| kernel.shared_bytes()).max().unwrap_or(0);
        let runs = plan.native().is_none_or(|native| native.runs_on(facts));
        if shared > facts.shared_per_block || !runs {
            return Err(CudaError::OtherDevice { kernel: plan.kernel() });
        }
        let needed = plan.workspace_bytes();
        let (at, memory) = match memory {
            Some(DeviceMemory { bytes, .. }) if bytes < needed => {
                return Err(CudaError::Scratch { needed, got: bytes });
            }
            Some(DeviceMemory { at, .. }) if !at.is_multiple_of(256) => {
                return Err(CudaError::ScratchAlignment { at });
            }
            Some(DeviceMemory { at, .. }) => (at, None),
            None => {
                // SAFETY: what is read of it is written before: the schedule by `write`, partial results by the runs.
                let memory = unsafe { stream.alloc::<u8>(needed.max(1)) };
                let memory =
                    memory.map_err(CudaError::driver(format!("{needed} bytes of scratch memory")))?;
                let at = memory.device_ptr(stream).0;
                (at, Some(memory))
            }
        };
        let loaded = match plan.engine() {
            Engine::Native(native) => Loaded::Native(NativeFunctions::new(cuda, native)?),
            Engine::Portable(portable) => {
                Loaded::Portable(Box::new(Runs::new(cuda, stream, plan, portable, at)?))
            }
        };
        let plan = plan.clone();
        let (cuda, stream) = (cuda.clone(), stream.clone());
        let prepared = Self { cuda, stream, plan, loaded, at, _memory: memory };
        prepared.write(false)?;
        Ok(prepared)
    }

    pub(super) const fn cuda(&self) -> &Cuda {
        &self.cuda
    }

    /// The stream of the runs.
    #[must_use]
    pub const fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// The plan that runs compute.
    #[must_use]
    pub const fn plan(&self) -> &CudaPlan {
        &self.plan
    }

    /// Writes another plan over this one, on the stream: that of the same problem with other numbers of keys (`kv_lens`), at the
    /// next step of decoding, say. Kernels, launches and addresses stay, so that a graph that has captured runs computes the new
    /// plan when it is launched after this; the tensors, and the width of the tables, are those that it has captured.
    ///
    /// # Errors
    /// [`CudaError::Update`] where the problem differs in anything else, or where kernels or what is reserved differ; steps of
    /// decoding of the same sequences agree. [`CudaError::Device`], also while the stream captures.
    pub fn update(&mut self, plan: &CudaPlan) -> Result<(), CudaError> {
        let refused = |what: String| Err(CudaError::Update { what });
        if !self.plan.problem().is_step_of(plan.problem()) || self.plan.options() != plan.options() {
            return refused("the problems differ in more than their numbers of keys".to_owned());
        }
        if !self.plan.kernels().eq(plan.kernels()) || self.plan.portable() != plan.portable() {
            return refused(format!("launches are of {}, not {}", self.plan, plan));
        }
        if let (Some(old), Some(new)) = (self.plan.native(), plan.native()) {
            if old.regions() != new.regions() {
                let (old, new) = (self.plan.workspace_bytes(), plan.workspace_bytes());
                return refused(format!(
                    "scratch memory is laid out for other sizes ({old} and {new} bytes)"
                ));
            }
            let capacities =
                |plan: &NativePlan| plan.launches().iter().map(|l| l.capacity).collect::<Vec<_>>();
            if capacities(old) != capacities(new) {
                return refused("launches are of other sizes".to_owned());
            }
        }
        self.plan = plan.clone();
        self.write(true)
    }

    /// Copies to the device what runs read of the plan; `again` what an update changes of it.
    fn write(&self, again: bool) -> Result<(), CudaError> {
        let bytes = match self.plan.engine() {
            Engine::Native(native) => schedule_bytes(native),
            Engine::Portable(portable) if again => portable.plan.updated(self.plan.problem()),
            Engine::Portable(portable) => portable.plan.written(self.plan.problem()),
        };
        if bytes.is_empty() {
            return Ok(());
        }
        let failed = || CudaError::driver("copy of the schedule");
        self.cuda.context().bind_to_thread().map_err(failed())?;
        // A graph would copy again from memory that is gone by then.
        let status = self.stream.capture_status().map_err(failed())?;
        if status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            let error = "the stream captures a graph, which cannot hold it".to_owned();
            return Err(DeviceError::Driver { what: "copy of the schedule".to_owned(), error }.into());
        }
        // SAFETY: the region lies in the scratch memory, whose size was checked; the driver has read pageable memory when it
        // returns.
        unsafe { result::memcpy_htod_async(self.at, &bytes, self.stream.cu_stream()) }.map_err(failed())
    }

    /// Launches the computation of `out` and, where given, `lse` on the stream. Returns before it has ended; allocates and waits
    /// for nothing, but for the first run with rows that do not start on 16 bytes, whose kernels [`Cuda::prewarm`] may have
    /// compiled.
    ///
    /// # Errors
    /// [`CudaError::Inputs`] where the tensors do not fit the plan's problem, and [`CudaError::Device`].
    pub fn run(
        &mut self,
        inputs: &DeviceInputs<'_>,
        outputs: &mut DeviceOutputs<'_>,
    ) -> Result<(), CudaError> {
        check(self.plan.problem(), inputs, outputs)?;
        match (self.plan.engine(), &mut self.loaded) {
            (Engine::Portable(portable), Loaded::Portable(runs)) => {
                runs.run(self.plan.problem(), portable, inputs, outputs)
            }
            (Engine::Native(native), Loaded::Native(functions)) => {
                let (Some(k), Some(v)) = (inputs.k.elements(), inputs.v.elements()) else {
                    return Err(CudaError::OtherDevice { kernel: self.plan.kernel() });
                };
                let mut params = params(self.plan.problem(), (inputs, k, v), outputs);
                params.mask_every_tile = u32::from(!self.plan.options().skip_tiles);
                let regions = native.regions();
                params.work_tiles = self.at + regions.work_tiles as u64;
                params.counters = self.at + regions.counters as u64;
                params.mask_tiles = self.at + regions.mask_tiles as u64;
                params.partials = self.at + regions.partials as u64;
                let tensors = Tensors { q: &inputs.q.raw, k, v, out: &outputs.out.raw };
                let launches = Launches { cuda: &self.cuda, stream: &self.stream, plan: native, functions };
                launches.run(tensors, inputs, params)
            }
            // `update` keeps the kind of kernels.
            (Engine::Native(_), Loaded::Portable(_)) | (Engine::Portable(_), Loaded::Native(_)) => {
                Err(CudaError::OtherDevice { kernel: self.plan.kernel() })
            }
        }
    }
}

/// The tensors of elements of a run.
#[derive(Debug, Clone, Copy)]
struct Tensors<'a> {
    q: &'a RawTensor,
    k: &'a RawTensor,
    v: &'a RawTensor,
    out: &'a RawTensor,
}

impl Tensors<'_> {
    /// What a kernel for compute capability 9.0 copies by TMA; none where the tensors do not allow it.
    fn prefill_params(
        &self,
        kernel: &Sm90Kernel,
        gqa_group: usize,
        forward: ForwardParams,
    ) -> Option<PrefillParams> {
        let Sm90Kernel { dtype, tile, paged, .. } = *kernel;
        let boxes = |raw: &RawTensor, box_heads: usize, box_rows: usize| {
            let [batch, heads, rows, columns] = raw.shape;
            let (box_heads, box_rows) = (box_heads as u32, box_rows as u32);
            let Tensor { at, batch: batch_step, head, row } = Tensor::of(raw);
            let steps = [batch_step, head, row];
            Boxes { at, steps, dtype, batch, heads, rows, columns, box_heads, box_rows }.ragged_map()
        };
        // The largest power of two that divides a page and a tile.
        let page_box = 1 << self.k.shape[2].trailing_zeros().min(tile.keys().trailing_zeros());
        let kv_box_rows = if paged { page_box } else { tile.keys() };
        if paged && kv_box_rows < MIN_PAGE_BOX {
            return None;
        }
        let (k, v) = (boxes(self.k, 1, kv_box_rows)?, boxes(self.v, 1, kv_box_rows)?);
        // Rows of q are pairs of a position and a head of the GQA group; a box has whole positions.
        let positions = WARPGROUP_ROWS / gqa_group;
        let q =
            if positions * gqa_group == WARPGROUP_ROWS { boxes(self.q, gqa_group, positions) } else { None };
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
            queued: 0,
        })
    }
}

/// The least rows of a box of a page: 8 rows of 128 bytes are the pattern in which TMA swizzles, and fewer rows take more copies than
/// threads copy as fast.
const MIN_PAGE_BOX: usize = 16;

/// The launches of a plan of native kernels.
struct Launches<'a> {
    cuda: &'a Cuda,
    stream: &'a CudaStream,
    plan: &'a NativePlan,
    functions: &'a mut NativeFunctions,
}

impl Launches<'_> {
    /// Launches the kernels one after another; `params` are the first one's.
    fn run(
        self,
        tensors: Tensors<'_>,
        inputs: &DeviceInputs<'_>,
        mut params: ForwardParams,
    ) -> Result<(), CudaError> {
        let Self { cuda, stream, plan, functions } = self;
        let all = [tensors.q, tensors.k, tensors.v, tensors.out];
        let access =
            if all.into_iter().all(RawTensor::in_vectors) { Access::Vector } else { Access::Element };
        for (n, launch) in plan.launches().iter().enumerate() {
            let table = plan.mask_tile_tables().get(n);
            if let (Some(function), Some(table)) = (&functions.mask_tiles, table) {
                launch_mask_tiles(stream, function, table, inputs, &mut params)?;
            }
            let kernel = &launch.kernel;
            let grid = Grid {
                blocks: [launch.capacity.grid, 1, 1],
                threads: kernel.tile().threads(),
                shared: kernel.shared_bytes(),
            };
            match kernel {
                NativeKernel::Sm80(_) => {
                    let function = functions.forward(cuda, n, kernel, access)?;
                    // SAFETY: the parameters are the kernel's, whose size it asserts. Views and lists are valid memory of the shapes
                    // that were checked against the problem, by their constructors' contracts; the schedule covers rows and keys of the
                    // problem alone, and its regions lie in the scratch memory.
                    unsafe { function.launch(stream, grid, &params)? };
                }
                NativeKernel::Sm90(sm90) => {
                    let gqa_group = params.gqa_group.value as usize;
                    let by_tma = (access == Access::Vector && sm90.uses_tma())
                        .then(|| tensors.prefill_params(sm90, gqa_group, params))
                        .flatten();
                    let access = if by_tma.is_some() { Access::Tma } else { access };
                    let copied = PrefillParams { forward: params, ..PrefillParams::default() };
                    let params = PrefillParams { queued: launch.queued(), ..by_tma.unwrap_or(copied) };
                    let function = functions.forward(cuda, n, kernel, access)?;
                    // SAFETY: as above; maps describe the views.
                    unsafe { function.launch(stream, grid, &params)? };
                }
            }
            params.work_tiles += (launch.capacity.work_tiles * size_of::<WorkTile>()) as u64;
            params.counters += launch.capacity.counters as u64 * 4;
            params.partials += (launch.capacity.partials * kernel.partial_floats() * 4) as u64;
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
    inputs: &DeviceInputs<'_>,
    params: &mut ForwardParams,
) -> Result<(), CudaError> {
    let Some(mask) = &inputs.mask else { return Ok(()) };
    // An axis of stride 0 is one index, whatever its size.
    let steps = mask.steps();
    let mut shape = mask.shape;
    for (n, step) in shape.iter_mut().zip(steps) {
        *n = if step == 0 { (*n).min(1) } else { *n };
    }
    let [planes, heads, rows, keys] = shape;
    let (q_tiles, k_blocks) = (rows.div_ceil(MASK_TILE_ROWS), keys.div_ceil(table.block_k));
    params.mask_q_tiles = q_tiles as u32;
    params.mask_k_blocks = k_blocks as u32;
    if [planes, heads, rows, keys].contains(&0) {
        return Ok(());
    }
    let [sequence, head, row, _] = steps;
    let mask_tiles = MaskTileParams {
        mask: mask.at,
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
    // SAFETY: the parameters are the kernel's; the mask is readable by its constructor's contract, and the table was sized
    // for a mask with every axis of the problem's size.
    unsafe { Ok(function.launch(stream, grid, &mask_tiles)?) }
}

fn check(problem: &Problem, inputs: &DeviceInputs<'_>, outputs: &DeviceOutputs<'_>) -> Result<(), CudaError> {
    let of = |raw: &RawTensor| (raw.dtype, raw.shape);
    let given = InputShapes {
        q: of(&inputs.q.raw),
        k: (inputs.k.codec(), inputs.k.shape()),
        v: (inputs.v.codec(), inputs.v.shape()),
        page: inputs.tables.map(|tables| tables.page_size),
        tree: inputs.tree.map(|tree| (tree.kind, tree.shape)),
        mask: inputs.mask.map(|mask| (mask.kind, mask.shape)),
        alibi_slopes: inputs.alibi_slopes.map(|list| list.len),
        sinks: inputs.sinks.map(|list| list.len),
    };
    given.check(problem)?;
    if let DeviceKv::Codes(DeviceCodes { means: Some(means), .. }) = &inputs.v {
        return Err(RunError::Length { tensor: "v.means", expected: 0, got: means.len }.into());
    }
    inputs::check_outputs(problem, of(&outputs.out.raw), outputs.lse.as_ref().map(|lse| lse.len))?;
    if let Some(tables) = &inputs.tables {
        let expected = problem.sequences().len().saturating_mul(tables.width);
        if tables.entries != expected {
            let got = tables.entries;
            return Err(RunError::Length { tensor: "tables.table", expected, got }.into());
        }
    }
    Ok(())
}

/// The parameters without the addresses in scratch memory.
fn params(
    problem: &Problem,
    (inputs, k, v): (&DeviceInputs<'_>, &RawTensor, &RawTensor),
    outputs: &DeviceOutputs<'_>,
) -> ForwardParams {
    let (dims, desc) = (problem.dims(), problem.desc());
    let bound =
        |side: Option<usize>| side.map_or(-1, |n| i64::try_from(n).unwrap_or(i64::MAX / 2).min(i64::MAX / 2));
    let (scale, softcap) = match desc.softcap {
        None => (problem.scale() * LOG2_E, 0.0),
        Some(cap) => (problem.scale() / cap, cap * LOG2_E),
    };
    let mut params = ForwardParams {
        q: Tensor::of(&inputs.q.raw),
        k: Tensor::of(k),
        v: Tensor::of(v),
        out: Tensor::of(&outputs.out.raw),
        lse: outputs.lse.as_ref().map_or(0, |lse| lse.at),
        alibi_slopes: inputs.alibi_slopes.map_or(0, |list| list.at),
        sinks: inputs.sinks.map_or(0, |list| list.at),
        window_left: bound(desc.visibility.left()),
        window_right: bound(desc.visibility.right()),
        gqa_group: Divisor::new(dims.gqa_group()),
        q_heads: dims.q_heads as u32,
        q_len: dims.q_len as u32,
        head_dim: dims.head_dim as u32,
        value_dim: dims.value_dim as u32,
        scale,
        softcap,
        ..ForwardParams::default()
    };
    if let Some(tables) = &inputs.tables {
        params.block_table = tables.at;
        params.page_size = Divisor::new(tables.page_size);
        params.block_table_width = tables.width as u32;
        if tables.wraps {
            params.ring_blocks = Divisor::new(tables.width);
        }
    }
    if let Some(tree) = &inputs.tree {
        let [_, _, row, step] = tree.steps();
        (params.tree_mask, params.tree_row, params.tree_step) = (tree.at, row, step as u32);
    }
    if let Some(mask) = &inputs.mask {
        let [batch, head, row, step] = mask.steps();
        params.mask = Tensor { at: mask.at, batch, head, row };
        params.mask_step = u32::from(step != 0);
        params.mask_kind = match mask.kind {
            MaskKind::Bool => 3,
            MaskKind::Additive(dtype) => dtype_id(dtype),
        };
    }
    params
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
