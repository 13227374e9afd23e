//! Runs of the backward pass on CUDA devices.

#![allow(unsafe_code)]

use super::device::Cuda;
use super::error::CudaError;
use super::params::{BackwardParams, PrepareParams, Tensor};
use super::sources::Source;
use super::tma::{Boxes, RaggedMap};
use crate::plan::{CudaBackwardPlan, Sm90Backward};
use flashtile_core::dtype::Dtype;
use flashtile_gpu::backward::tensors::{GpuBackwardInputs, GpuGradients};
use flashtile_gpu::engine::PreparedPortableBackward;
use flashtile_gpu::tensors::{GpuTensor, GpuTensorMut};
use flashtile_kernel::cuda::{Function, Gpu, Grid, Memory};
use flashtile_kernel::{HostAccess, ScalarType};
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
        let params = match (self.plan.native(), &mut self.native) {
            (Some(plan), Some(native)) => native.params(gpu, &self.plan, plan, inputs, gradients)?,
            _ => None,
        };
        let Some(params) = params else { return Ok(self.portable(gpu)?.run(gpu, inputs, gradients)?) };
        if let (Some(plan), Some(native)) = (self.plan.native(), &mut self.native) {
            native.launch(gpu, plan, &params)?;
        }
        if gradients.d_sinks.is_some() {
            self.portable(gpu)?.run_sums(gpu, inputs, gradients)?;
        }
        Ok(())
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
        let prepare = cuda.function(Source::sm90_backward_prepare(plan), "prepare", 0)?;
        let scratch = Memory::uninit(gpu.context(), ScalarType::U8, plan.regions().len.max(256))?;
        Ok(Self { prepare, backward, scratch, is_written: false })
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
        let Some(backward) = self.backward_params(of, plan, &tensors) else { return Ok(None) };
        let list = |name, memory: &Memory, span| gpu.address("backward", name, memory, span);
        let dims = of.problem().dims();
        Ok(Some(PrepareParams {
            backward,
            out: tensors.out.tensor,
            d_out: tensors.d_out.tensor,
            lse: list("lse", inputs.lse.memory(), inputs.lse.span())?,
            d_lse: inputs.d_lse.map_or(Ok(0), |d_lse| list("d_lse", d_lse.memory(), d_lse.span()))?,
            q_len: dims.q_len as u32,
            value_dim: dims.value_dim as u32,
            unused: [0; 10],
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
        let (dims, scale) = (problem.dims(), problem.scale());
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
            scale,
            scale_log2: scale * std::f32::consts::LOG2_E,
            hidden: if scale < 0.0 { f32::INFINITY } else { f32::NEG_INFINITY },
            q_heads: dims.q_heads as u32,
            group: dims.gqa_group() as u32,
            head_dim: dims.head_dim as u32,
            heads_inner: u32::from(plan.heads_inner),
            left: plan.window[0],
            right: plan.window[1],
            q_batch_rows: q.batch_rows,
            k_batch_rows: k.batch_rows,
            v_batch_rows: v.batch_rows,
            d_out_batch_rows: d_out.batch_rows,
            d_k_batch_rows: d_k.batch_rows,
            d_v_batch_rows: d_v.batch_rows,
            unused: [0; 11],
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
        Ok(())
    }
}
