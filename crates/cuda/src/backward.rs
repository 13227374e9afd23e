//! Runs of the backward pass on CUDA devices.

#![allow(unsafe_code)]

use super::device::Cuda;
use super::error::CudaError;
use super::params::{BackwardParams, PrepareParams, Sm80BackwardParams, Sm90BackwardParams, Tensor};
use super::sources::Source;
use super::tma::{Boxes, RaggedMap, TensorMap};
use crate::plan::{CudaBackwardPlan, NativeBackward, UnitShape};
use flashtile_core::dtype::Dtype;
use flashtile_core::inputs::alibi_stride;
use flashtile_core::problem::ProblemDesc;
use flashtile_core::scoring::log2_factors;
use flashtile_gpu::backward::tensors::{GpuBackwardInputs, GpuGradients};
use flashtile_gpu::engine::PreparedPortableBackward;
use flashtile_gpu::tensors::{GpuTensor, GpuTensorMut};
use flashtile_kernel::cuda::{Function, Gpu, Grid, Memory};
use flashtile_kernel::{HostAccess, ScalarType, View, ViewMut};
use std::f32::consts::LOG2_E;
use std::sync::Arc;

/// Threads of a block of the kernels that compute terms of rows.
const PREPARE_THREADS: usize = 256;

/// Rows of a store of `d_k` and `d_v` on compute capability 9.0.
const STORED_KEYS: usize = 64;

/// A backward plan on a device.
#[derive(Debug)]
pub struct PreparedCudaBackward {
    plan: CudaBackwardPlan,
    native: Option<Native>,
    /// The portable kernels, once a run needs them.
    portable: Option<PreparedPortableBackward<Memory>>,
}

/// Native kernels and their scratch memory.
#[derive(Debug)]
struct Native {
    prepare: Arc<Function>,
    /// Sums for gradients that only some problems have.
    sum_sinks: Option<Arc<Function>>,
    sum_slopes: Option<Arc<Function>>,
    backward: Arc<Function>,
    scratch: Memory,
    /// True if the plan's lists have reached the device, as far as is known.
    is_written: bool,
}

/// The bytes of a list of structs that the device reads.
fn bytes_of<T>(values: &[T]) -> &[u8] {
    // SAFETY: `device_struct` has integers without gaps.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

impl PreparedCudaBackward {
    pub(super) fn new(cuda: &Cuda, gpu: &Gpu, plan: CudaBackwardPlan) -> Result<Self, CudaError> {
        let native = plan.native().map(|native| Native::new(cuda, gpu, plan.problem().desc(), native));
        let native = native.transpose()?;
        let mut new = Self { plan, native, portable: None };
        if new.native.is_none() {
            new.portable(gpu)?;
        }
        Ok(new)
    }

    /// The plan.
    #[must_use]
    pub const fn plan(&self) -> &CudaBackwardPlan {
        &self.plan
    }

    fn portable(&mut self, gpu: &Gpu) -> Result<&mut PreparedPortableBackward<Memory>, CudaError> {
        match &mut self.portable {
            Some(portable) => Ok(portable),
            none => {
                let plan = self.plan.portable().portable().clone();
                Ok(none.insert(PreparedPortableBackward::new(gpu, plan)?))
            }
        }
    }

    /// Launches the backward pass over tensors that were checked against the problem.
    pub(super) fn run(
        &mut self,
        gpu: &Gpu,
        inputs: &GpuBackwardInputs<'_, Memory>,
        gradients: &mut GpuGradients<'_, Memory>,
    ) -> Result<(), CudaError> {
        if let (Some(plan), Some(native)) = (self.plan.native(), &mut self.native)
            && let Some(params) = native.params(gpu, &self.plan, plan, inputs, gradients)?
        {
            return native.launch(gpu, plan, &params);
        }
        Ok(self.portable(gpu)?.run(gpu, inputs, gradients)?)
    }

    /// Forgets what was written to the device, as it may not have arrived there.
    pub(super) fn forget_written(&mut self) {
        self.native.iter_mut().for_each(|native| native.is_written = false);
        self.portable.iter_mut().for_each(PreparedPortableBackward::forget_written);
    }
}

/// A tensor as kernels address it, and its boxes.
struct Strided {
    tensor: Tensor,
    shape: [usize; 4],
    dtype: Dtype,
}

impl Strided {
    fn new(at: u64, shape: [usize; 4], strides: [usize; 4], dtype: Dtype) -> Self {
        let [batch, head, row, _] = strides.map(|stride| (stride * dtype.bytes()) as i64);
        Self { tensor: Tensor { at, batch, head, row }, shape, dtype }
    }

    /// True if every row starts on 16 bytes.
    fn is_vector(&self) -> bool {
        let Tensor { at, batch, head, row } = self.tensor;
        // Steps along an axis of one index are never taken.
        let steps = [batch, head, row].into_iter().zip(self.shape).filter(|&(_, len)| len > 1);
        at.is_multiple_of(16) && steps.into_iter().all(|(step, _)| step % 16 == 0)
    }

    fn map(&self, box_rows: usize) -> Option<RaggedMap> {
        // No tile of a tensor without elements is copied.
        if self.shape.contains(&0) {
            return Some(RaggedMap { map: TensorMap::default(), batch_rows: 0 });
        }
        let ([batch, heads, rows, columns], Tensor { at, batch: batch_step, head, row }) =
            (self.shape, self.tensor);
        let steps = [batch_step, head, row];
        let boxes = Boxes {
            at,
            steps,
            dtype: self.dtype,
            batch,
            heads,
            rows,
            columns,
            box_heads: 1,
            box_rows: box_rows as u32,
        };
        boxes.ragged_map()
    }
}

/// The tensors of a run.
struct Tensors {
    q: Strided,
    k: Strided,
    v: Strided,
    out: Strided,
    d_out: Strided,
    d_q: Strided,
    d_k: Strided,
    d_v: Strided,
}

impl Tensors {
    fn new(
        gpu: &Gpu,
        dtype: Dtype,
        inputs: &GpuBackwardInputs<'_, Memory>,
        gradients: &GpuGradients<'_, Memory>,
    ) -> Result<Self, CudaError> {
        let read = |name, tensor: &GpuTensor<'_, Memory>| {
            let at = gpu.address("backward", name, tensor.view.memory(), tensor.view.span())?;
            Ok::<_, CudaError>(Strided::new(at, tensor.shape, tensor.strides, dtype))
        };
        let written = |name, tensor: &GpuTensorMut<'_, Memory>| {
            let at = gpu.address("backward", name, tensor.view.memory(), tensor.view.span())?;
            Ok::<_, CudaError>(Strided::new(at, tensor.shape, tensor.strides, dtype))
        };
        Ok(Self {
            q: read("q", &inputs.q)?,
            k: read("k", &inputs.k)?,
            v: read("v", &inputs.v)?,
            out: read("out", &inputs.out)?,
            d_out: read("d_out", &inputs.d_out)?,
            d_q: written("d_q", &gradients.d_q)?,
            d_k: written("d_k", &gradients.d_k)?,
            d_v: written("d_v", &gradients.d_v)?,
        })
    }
}

impl Tensors {
    /// The parameters of the kernel for compute capability 9.0, where TMA can copy the tensors. Each block of a cluster copies half of its rows.
    fn sm90(&self, backward: BackwardParams, shape: UnitShape) -> Option<Sm90BackwardParams> {
        let (half, keys) = (shape.rows / 2, shape.keys / 2);
        let Self { q, k, v, out, d_out, d_q, d_k, d_v } = self;
        let (q, d_out) = (q.map(half)?, d_out.map(half)?);
        let (k, v) = (k.map(keys)?, v.map(keys)?);
        let (d_k, d_v) = (d_k.map(STORED_KEYS)?, d_v.map(STORED_KEYS)?);
        if !out.is_vector() || !d_q.is_vector() {
            return None;
        }
        Some(Sm90BackwardParams {
            q: q.map,
            k: k.map,
            v: v.map,
            d_out: d_out.map,
            d_k: d_k.map,
            d_v: d_v.map,
            backward,
            q_batch_rows: q.batch_rows,
            k_batch_rows: k.batch_rows,
            v_batch_rows: v.batch_rows,
            d_out_batch_rows: d_out.batch_rows,
            d_k_batch_rows: d_k.batch_rows,
            d_v_batch_rows: d_v.batch_rows,
            unused: [0; 2],
        })
    }

    /// The parameters of the kernel by `mma.sync`, where every row starts on 16 bytes.
    fn sm80(&self, backward: BackwardParams, value_dim: usize) -> Option<Sm80BackwardParams> {
        let Self { q, k, v, out, d_out, d_q, d_k, d_v } = self;
        let all = [q, k, v, out, d_out, d_q, d_k, d_v];
        if !all.iter().all(|tensor| tensor.is_vector()) {
            return None;
        }
        Some(Sm80BackwardParams {
            backward,
            q: q.tensor,
            k: k.tensor,
            v: v.tensor,
            d_out: d_out.tensor,
            d_k: d_k.tensor,
            d_v: d_v.tensor,
            value_dim: value_dim as u32,
            unused: 0,
        })
    }
}

/// The parameters of the main kernel.
enum MainParams {
    Sm80(Box<Sm80BackwardParams>),
    Sm90(Box<Sm90BackwardParams>),
}

/// The parameters of a run.
struct Params {
    prepare: PrepareParams,
    main: MainParams,
}

impl Native {
    fn new(cuda: &Cuda, gpu: &Gpu, desc: &ProblemDesc, plan: &NativeBackward) -> Result<Self, CudaError> {
        let rows = |name| cuda.function(Source::backward_prepare(plan), name, 0);
        Ok(Self {
            prepare: rows("prepare")?,
            sum_sinks: desc.sinks.then(|| rows("sum_sinks")).transpose()?,
            sum_slopes: desc.alibi.then(|| rows("sum_slopes")).transpose()?,
            backward: cuda.function(Source::backward(plan), "backward", plan.shared_bytes())?,
            scratch: Memory::uninit(gpu.context(), ScalarType::U8, plan.schedule().regions().len.max(256))?,
            is_written: false,
        })
    }

    /// Copies the plan's lists to the device.
    fn write(&mut self, gpu: &Gpu, plan: &NativeBackward) -> Result<(), CudaError> {
        let schedule = plan.schedule();
        let regions = schedule.regions();
        let lists = [
            (regions.units, bytes_of(&schedule.units)),
            (regions.sequences, bytes_of(&schedule.sequences)),
            (regions.tile_units, bytes_of(&schedule.tile_units)),
        ];
        for (at, bytes) in lists.into_iter().filter(|(_, bytes)| !bytes.is_empty()) {
            gpu.write(&mut self.scratch, at, bytes)?;
        }
        self.is_written = true;
        Ok(())
    }

    /// The parameters of a run; `None` where rows do not start on 16 bytes, or tensors do not allow TMA.
    fn params(
        &self,
        gpu: &Gpu,
        of: &CudaBackwardPlan,
        plan: &NativeBackward,
        inputs: &GpuBackwardInputs<'_, Memory>,
        gradients: &GpuGradients<'_, Memory>,
    ) -> Result<Option<Params>, CudaError> {
        let tensors = Tensors::new(gpu, plan.dtype(), inputs, gradients)?;
        let list = |name, memory: &Memory, span| gpu.address("backward", name, memory, span);
        let optional = |name, view: Option<View<'_, Memory>>| {
            view.map_or(Ok(0), |view| list(name, view.memory(), view.span()))
        };
        let written = |name, view: &Option<ViewMut<'_, Memory>>| {
            let view = view.as_ref().filter(|view| !view.is_empty());
            view.map_or(Ok(0), |view| list(name, view.memory(), view.span()))
        };
        let (schedule, dims) = (plan.schedule(), of.problem().dims());
        let (scratch, regions) = (self.scratch.address(), schedule.regions());
        let d_alibi_slopes = written("d_alibi_slopes", &gradients.d_alibi_slopes)?;
        let slopes = inputs.alibi_slopes.map_or(0, |list| list.len());
        let backward = BackwardParams {
            alibi_slopes: optional("alibi_slopes", inputs.alibi_slopes)?,
            alibi_stride: alibi_stride(slopes, dims.q_heads) as u32,
            distance_sums: if d_alibi_slopes == 0 { 0 } else { scratch + regions.distance_sums as u64 },
            ..self.backward_params(of, plan, &tensors)
        };
        let main = match plan {
            NativeBackward::Sm80(_) => {
                tensors.sm80(backward, dims.value_dim).map(|params| MainParams::Sm80(Box::new(params)))
            }
            NativeBackward::Sm90(_) => {
                tensors.sm90(backward, schedule.shape).map(|params| MainParams::Sm90(Box::new(params)))
            }
        };
        let Some(main) = main else { return Ok(None) };
        let prepare = PrepareParams {
            backward,
            out: tensors.out.tensor,
            d_out: tensors.d_out.tensor,
            lse: list("lse", inputs.lse.memory(), inputs.lse.span())?,
            d_lse: optional("d_lse", inputs.d_lse)?,
            sinks: optional("sinks", inputs.sinks)?,
            d_sinks: written("d_sinks", &gradients.d_sinks)?,
            d_alibi_slopes,
            sink_terms: scratch + regions.sink_terms as u64,
            shift_terms: scratch + regions.shift_terms as u64,
            q_len: dims.q_len as u32,
            value_dim: dims.value_dim as u32,
            sequences: schedule.sequences.len() as u32,
            units: schedule.units.len() as u32,
        };
        Ok(Some(Params { prepare, main }))
    }

    fn backward_params(
        &self,
        of: &CudaBackwardPlan,
        plan: &NativeBackward,
        tensors: &Tensors,
    ) -> BackwardParams {
        let schedule = plan.schedule();
        let (problem, regions, scratch) = (of.problem(), schedule.regions(), self.scratch.address());
        let (dims, desc, scale) = (problem.dims(), problem.desc(), problem.scale());
        let factors = log2_factors(scale, desc.softcap);
        let at = |region: usize| scratch + region as u64;
        BackwardParams {
            d_q: tensors.d_q.tensor,
            units: at(regions.units),
            sequences: at(regions.sequences),
            tile_units: at(regions.tile_units),
            neg_lse: at(regions.neg_lse),
            delta: at(regions.delta),
            turns: at(regions.turns),
            d_q_sums: at(regions.d_q_sums),
            scale,
            scale_log2: scale * LOG2_E,
            hidden: if scale < 0.0 { f32::INFINITY } else { f32::NEG_INFINITY },
            softcap: factors.softcap.unwrap_or(0.0),
            softcap_scale: factors.scale,
            q_heads: dims.q_heads as u32,
            group: dims.gqa_group() as u32,
            head_dim: dims.head_dim as u32,
            heads_inner: u32::from(schedule.heads_inner),
            left: schedule.window[0],
            right: schedule.window[1],
            // A chunk that holds every position is as good as a longer one.
            chunk: desc.visibility.chunk().map_or(1, |chunk| chunk.min(1 << 30) as i32),
            // ALiBi is the run's.
            ..BackwardParams::default()
        }
    }

    fn launch(&mut self, gpu: &Gpu, plan: &NativeBackward, params: &Params) -> Result<(), CudaError> {
        if !self.is_written {
            self.write(gpu, plan)?;
        }
        let (stream, schedule, prepare) = (gpu.stream(), plan.schedule(), &params.prepare);
        let heads = prepare.backward.q_heads as usize;
        let rows = |function: &Function, blocks: [usize; 3]| {
            let grid = Grid { blocks, threads: PREPARE_THREADS, shared: 0 };
            // SAFETY: the parameters are the kernel's, whose size it asserts. Views lie inside of memory of the device, as `Gpu::address` has
            // checked, and hold the shapes that were checked against the problem; the scratch memory has the schedule's regions.
            if blocks.contains(&0) { Ok(()) } else { unsafe { function.launch(stream, grid, prepare) } }
        };
        rows(&self.prepare, [schedule.most_tiles, heads, schedule.sequences.len()])?;
        if !schedule.units.is_empty() {
            let grid = Grid {
                blocks: [plan.unit_blocks() * schedule.units.len(), 1, 1],
                threads: plan.threads(),
                shared: plan.shared_bytes(),
            };
            // SAFETY: as above; maps describe the views, and units cover rows and keys of the problem alone.
            unsafe {
                match &params.main {
                    MainParams::Sm80(params) => self.backward.launch(stream, grid, &**params)?,
                    MainParams::Sm90(params) => self.backward.launch(stream, grid, &**params)?,
                }
            }
        }
        if let (Some(sum_sinks), true) = (&self.sum_sinks, prepare.d_sinks != 0) {
            rows(sum_sinks, [heads, 1, 1])?;
        }
        if let (Some(sum_slopes), true) = (&self.sum_slopes, prepare.d_alibi_slopes != 0) {
            let per_sequence = prepare.backward.alibi_stride != 0;
            rows(sum_slopes, [heads, if per_sequence { schedule.sequences.len() } else { 1 }, 1])?;
        }
        Ok(())
    }
}
