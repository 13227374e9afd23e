//! Runs of the backward pass on CUDA devices.

#![allow(unsafe_code)]

use super::device::Cuda;
use super::error::CudaError;
use super::params::{BackwardParams, PrepareParams, Tensor};
use super::sources::Source;
use super::tma::{Boxes, RaggedMap, TensorMap};
use crate::plan::{CudaBackwardPlan, Sm90Backward};
use flashtile_core::dtype::Dtype;
use flashtile_core::inputs::alibi_stride;
use flashtile_core::scoring::log2_factors;
use flashtile_gpu::backward::tensors::{GpuBackwardInputs, GpuGradients};
use flashtile_gpu::engine::PreparedPortableBackward;
use flashtile_gpu::tensors::{GpuTensor, GpuTensorMut};
use flashtile_kernel::cuda::{Function, Gpu, Grid, Memory};
use flashtile_kernel::{HostAccess, ScalarType, View, ViewMut};
use std::f32::consts::LOG2_E;
use std::sync::Arc;

/// Threads of a block of the kernels.
const THREADS: usize = 512;
const PREPARE_THREADS: usize = 256;

/// Keys of a block, and rows of a store of `d_k` and `d_v`.
const BLOCK_KEYS: usize = 128;
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
    sum_sinks: Arc<Function>,
    sum_slopes: Arc<Function>,
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
        let native = plan.native().map(|native| Native::new(cuda, gpu, native)).transpose()?;
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

impl Native {
    fn new(cuda: &Cuda, gpu: &Gpu, plan: &Sm90Backward) -> Result<Self, CudaError> {
        let backward = cuda.function(Source::sm90_backward(plan), "backward", plan.shared_bytes())?;
        let rows = |name| cuda.function(Source::sm90_backward_prepare(plan), name, 0);
        let scratch = Memory::uninit(gpu.context(), ScalarType::U8, plan.regions().len.max(256))?;
        Ok(Self {
            prepare: rows("prepare")?,
            sum_sinks: rows("sum_sinks")?,
            sum_slopes: rows("sum_slopes")?,
            backward,
            scratch,
            is_written: false,
        })
    }

    /// Copies the plan's lists to the device.
    fn write(&mut self, gpu: &Gpu, plan: &Sm90Backward) -> Result<(), CudaError> {
        let regions = plan.regions();
        let lists = [
            (regions.units, bytes_of(&plan.units)),
            (regions.sequences, bytes_of(&plan.sequences)),
            (regions.tile_units, bytes_of(&plan.tile_units)),
        ];
        for (at, bytes) in lists.into_iter().filter(|(_, bytes)| !bytes.is_empty()) {
            gpu.write(&mut self.scratch, at, bytes)?;
        }
        self.is_written = true;
        Ok(())
    }

    /// The parameters of a run; `None` where the tensors do not allow TMA.
    fn params(
        &self,
        gpu: &Gpu,
        of: &CudaBackwardPlan,
        plan: &Sm90Backward,
        inputs: &GpuBackwardInputs<'_, Memory>,
        gradients: &GpuGradients<'_, Memory>,
    ) -> Result<Option<PrepareParams>, CudaError> {
        let tensors = Tensors::new(gpu, plan.dtype, inputs, gradients)?;
        let Some(mut backward) = self.backward_params(of, plan, &tensors) else { return Ok(None) };
        let list = |name, memory: &Memory, span| gpu.address("backward", name, memory, span);
        let optional = |name, view: Option<View<'_, Memory>>| {
            view.map_or(Ok(0), |view| list(name, view.memory(), view.span()))
        };
        let dims = of.problem().dims();
        backward.alibi_slopes = optional("alibi_slopes", inputs.alibi_slopes)?;
        backward.alibi_stride =
            alibi_stride(inputs.alibi_slopes.map_or(0, |list| list.len()), dims.q_heads) as u32;
        let written = |name, view: &Option<ViewMut<'_, Memory>>| {
            view.as_ref().map_or(Ok(0), |view| list(name, view.memory(), view.span()))
        };
        let d_alibi_slopes = written("d_alibi_slopes", &gradients.d_alibi_slopes)?;
        let (scratch, regions) = (self.scratch.address(), plan.regions());
        if d_alibi_slopes != 0 {
            backward.distance_sums = scratch + regions.distance_sums as u64;
        }
        Ok(Some(PrepareParams {
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
            sequences: plan.sequences.len() as u32,
            units: plan.units.len() as u32,
            unused: [0; 14],
        }))
    }

    fn backward_params(
        &self,
        of: &CudaBackwardPlan,
        plan: &Sm90Backward,
        tensors: &Tensors,
    ) -> Option<BackwardParams> {
        let Tensors { q, k, v, out, d_out, d_q, d_k, d_v } = tensors;
        let half = plan.tile_rows() / 2;
        let (q, d_out) = (q.map(half)?, d_out.map(half)?);
        let (k, v) = (k.map(BLOCK_KEYS)?, v.map(BLOCK_KEYS)?);
        let (d_k, d_v) = (d_k.map(STORED_KEYS)?, d_v.map(STORED_KEYS)?);
        // Rows of out and d_q are accessed by 16 and 4 bytes: what TMA allows is enough.
        out.map(half).and(d_q.map(half))?;
        let (problem, regions, scratch) = (of.problem(), plan.regions(), self.scratch.address());
        let (dims, desc, scale) = (problem.dims(), problem.desc(), problem.scale());
        let factors = log2_factors(scale, desc.softcap);
        let at = |region: usize| scratch + region as u64;
        Some(BackwardParams {
            q: q.map,
            k: k.map,
            v: v.map,
            d_out: d_out.map,
            d_k: d_k.map,
            d_v: d_v.map,
            d_q: d_q.tensor,
            units: at(regions.units),
            sequences: at(regions.sequences),
            tile_units: at(regions.tile_units),
            neg_lse: at(regions.neg_lse),
            delta: at(regions.delta),
            turns: at(regions.turns),
            d_q_sums: at(regions.d_q_sums),
            alibi_slopes: 0,
            distance_sums: 0,
            scale,
            scale_log2: scale * LOG2_E,
            softcap: factors.softcap.unwrap_or(0.0),
            softcap_scale: 2.0 * LOG2_E * factors.scale,
            hidden: if scale < 0.0 { f32::INFINITY } else { f32::NEG_INFINITY },
            q_heads: dims.q_heads as u32,
            group: dims.gqa_group() as u32,
            head_dim: dims.head_dim as u32,
            heads_inner: u32::from(plan.heads_inner),
            left: plan.window[0],
            right: plan.window[1],
            // A chunk that holds every position is as good as a longer one.
            chunk: desc.visibility.chunk().map_or(1, |chunk| chunk.min(1 << 30) as i32),
            alibi_stride: 0,
            q_batch_rows: q.batch_rows,
            k_batch_rows: k.batch_rows,
            v_batch_rows: v.batch_rows,
            d_out_batch_rows: d_out.batch_rows,
            d_k_batch_rows: d_k.batch_rows,
            d_v_batch_rows: d_v.batch_rows,
            unused: [0; 3],
        })
    }

    fn launch(&mut self, gpu: &Gpu, plan: &Sm90Backward, params: &PrepareParams) -> Result<(), CudaError> {
        if !self.is_written {
            self.write(gpu, plan)?;
        }
        let stream = gpu.stream();
        let blocks = [plan.most_tiles, params.backward.q_heads as usize, plan.sequences.len()];
        if !blocks.contains(&0) {
            let grid = Grid { blocks, threads: PREPARE_THREADS, shared: 0 };
            // SAFETY: the parameters are the kernel's, whose size it asserts. Views lie inside of memory of the device, as `Gpu::address` has
            // checked, and hold the shapes that were checked against the problem; the scratch memory has the plan's regions.
            unsafe { self.prepare.launch(stream, grid, params)? };
        }
        if !plan.units.is_empty() {
            let blocks = [2 * plan.units.len(), 1, 1];
            let grid = Grid { blocks, threads: THREADS, shared: plan.shared_bytes() };
            // SAFETY: as above; maps describe the views, and units cover rows and keys of the problem alone.
            unsafe { self.backward.launch(stream, grid, &params.backward)? };
        }
        let sum = |function: &Function, lists: usize| {
            let blocks = [params.backward.q_heads as usize, lists, 1];
            let grid = Grid { blocks, threads: PREPARE_THREADS, shared: 0 };
            // SAFETY: as above; the lists have an element for each block.
            if blocks.contains(&0) { Ok(()) } else { unsafe { function.launch(stream, grid, params) } }
        };
        if params.d_sinks != 0 {
            sum(&self.sum_sinks, 1)?;
        }
        if params.d_alibi_slopes != 0 {
            sum(&self.sum_slopes, if params.backward.alibi_stride == 0 { 1 } else { plan.sequences.len() })?;
        }
        Ok(())
    }
}
