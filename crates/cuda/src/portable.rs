//! Runs of the kernels of the kernel language.

#![allow(unsafe_code)]

use super::cudarc::driver::CudaStream;
use super::device::Cuda;
use super::error::{CudaError, DeviceError};
use super::sources::Access;
use super::tensor::{DeviceInputs, DeviceKv, DeviceList, DeviceMask, DeviceOutputs, RawTensor};
use crate::plan::{CudaPlan, Portable};
use flashtile_core::dtype::{Dtype, MaskKind};
use flashtile_core::problem::{Problem, Sequences};
use flashtile_core::tensor;
use flashtile_gpu::launches::{Placed, Strides};
use flashtile_gpu::plan::Plan;
use flashtile_gpu::run::{Operands, Workspace, run};
use flashtile_kernel::cuda::{Gpu, Memory};
use flashtile_kernel::{Constant, Instance, LaunchError, ScalarType};
use std::sync::Arc;

/// What runs of a plan keep.
#[derive(Debug)]
pub(super) struct Runs {
    gpu: Gpu,
    scratch: Scratch,
    /// The layout of the last run's tensors, which the next layer's tensors have too, whether keys were centered, and the parameters for
    /// them.
    last: Option<(Strides, bool, Placed)>,
}

/// Pages whose size is a multiple of this have faster kernels, which are loaded before the first run.
pub(super) const USUAL_PAGE_SIZE: usize = 16;

/// What is loaded for a plan: kernels, the values of their constants.
pub(super) type Loads = Vec<(Instance, Vec<Constant>)>;

/// The kernels of runs with such access to keys and values, with and without a logsumexp. Cached keys lie in pages of `page_size` tokens.
pub(super) fn loads(
    plan: &CudaPlan,
    portable: &Portable,
    access: Access,
    page_size: usize,
) -> Result<Loads, CudaError> {
    let dtypes = [plan.problem().k_codec(), plan.problem().v_codec()].map(|codec| codec.dtype());
    let aligned = match access {
        Access::Vector => 16,
        // For codes, the alignment of their scales.
        Access::Element => dtypes.iter().map(|dtype| dtype.map_or(2, Dtype::bytes)).min().unwrap_or(2),
    };
    let places = Strides {
        aligned,
        pages: portable.kernel.is_paged().then_some([page_size, 1]),
        ..Strides::default()
    };
    let gpu = portable.plan.launches();
    let placed = gpu.place(&places, false)?;
    // The last kernel writes the logsumexp.
    let without_lse = gpu.constants(&placed, false).pop();
    let all = gpu.constants(&placed, true).into_iter().chain(without_lse);
    Ok(all.map(|(instance, constants)| (instance.clone(), constants)).collect())
}

impl Runs {
    /// On a stream, with scratch memory at an address.
    pub(super) fn new(
        cuda: &Cuda,
        stream: &Arc<CudaStream>,
        plan: &CudaPlan,
        portable: &Portable,
        at: u64,
    ) -> Result<Self, CudaError> {
        let gpu = cuda.gpu().on(stream);
        for (instance, constants) in loads(plan, portable, Access::Vector, USUAL_PAGE_SIZE)? {
            gpu.function(&instance, &constants)?;
        }
        let scratch = Scratch::new(&gpu, plan.problem(), &portable.plan, at);
        Ok(Self { gpu, scratch, last: None })
    }

    /// Launches a run whose tensors were checked.
    pub(super) fn run(
        &mut self,
        problem: &Problem,
        portable: &Portable,
        inputs: &DeviceInputs<'_>,
        outputs: &DeviceOutputs<'_>,
    ) -> Result<(), CudaError> {
        let (places, centered) = (places(problem, inputs, outputs), means(&inputs.k).is_some());
        // An update changes the lengths of sequences alone, which are in scratch memory.
        if self.last.as_ref().is_none_or(|(last, of, _)| *last != places || *of != centered) {
            self.last = None;
        }
        let launches = portable.plan.launches();
        let (_, _, placed) = match &mut self.last {
            Some(last) => last,
            none => none.insert((places, centered, launches.place(&places, centered)?)),
        };
        // SAFETY: views, lists, masks and tables are valid memory of the shapes that were checked against the problem, by their
        // constructors' contracts, until the work on the stream has ended.
        let borrow = |element, at, len| unsafe { self.gpu.borrow(element, at, len) };
        let elements = |raw: &RawTensor| borrow(scalar(raw.dtype), raw.at, reach(raw));
        let rows = |kv: &DeviceKv<'_>| match kv {
            DeviceKv::Elements(tensor) => {
                borrow(ScalarType::U8, tensor.raw.at, reach(&tensor.raw) * tensor.raw.dtype.bytes())
            }
            DeviceKv::Codes(codes) => borrow(ScalarType::U8, codes.at, codes.reach().unwrap_or(0)),
        };
        let list = |list: DeviceList<'_>| borrow(ScalarType::F32, list.at, list.len);
        let mask =
            |mask: DeviceMask<'_>| borrow(ScalarType::U8, mask.at, mask_reach(&mask) * mask_bytes(&mask));
        let (q, k, v) = (elements(&inputs.q.raw), rows(&inputs.k), rows(&inputs.v));
        let table = inputs.tables.map(|tables| borrow(ScalarType::U32, tables.at, tables.entries));
        let (means, slopes) = (means(&inputs.k).map(list), inputs.alibi_slopes.map(list));
        let (sinks, tree, mask) = (inputs.sinks.map(list), inputs.tree.map(mask), inputs.mask.map(mask));
        let mut out = elements(&outputs.out.raw);
        let (workspace, unwanted) = self.scratch.workspace();
        let mut lse = outputs.lse.as_ref().map(|lse| borrow(ScalarType::F32, lse.at, lse.len));
        let operands = Operands {
            q: q.view(),
            k: k.view(),
            v: v.view(),
            table: table.as_ref().map(Memory::view),
            means: means.as_ref().map(Memory::view),
            slopes: slopes.as_ref().map(Memory::view),
            mask: mask.as_ref().map(Memory::view),
            tree: tree.as_ref().map(Memory::view),
            sinks: sinks.as_ref().map(Memory::view),
            out: out.view_mut(),
            with_lse: lse.is_some(),
            lse: lse.as_mut().unwrap_or(unwanted).view_mut(),
        };
        Ok(run(&self.gpu, launches, placed, workspace, operands)?)
    }
}

/// The regions of scratch memory.
#[derive(Debug)]
struct Scratch {
    sequences: Memory,
    factors: [Memory; 2],
    codebooks: Memory,
    /// Zeros of f32, u32 and u8.
    absent: [Memory; 3],
    partial_out: Memory,
    partial_max_sum: Memory,
    unwanted: Memory,
}

impl Scratch {
    fn new(gpu: &Gpu, problem: &Problem, plan: &Plan, at: u64) -> Self {
        let regions = plan.regions();
        // SAFETY: regions lie in the scratch memory and do not overlap; nothing but runs, which follow each other on the stream, accesses
        // them.
        let borrow = |element, region: usize, len| unsafe { gpu.borrow(element, at + region as u64, len) };
        let f32s = |region, len| borrow(ScalarType::F32, region, len);
        let ([k, v], [partial_out, partial_max_sum]) = (&plan.tables().factors, plan.launches().scratch());
        Self {
            sequences: borrow(ScalarType::I32, regions.sequences, 8 * problem.sequences().len()),
            factors: [f32s(regions.factors[0], k.len()), f32s(regions.factors[1], v.len())],
            codebooks: f32s(regions.codebooks, plan.tables().codebooks.len()),
            absent: [ScalarType::F32, ScalarType::U32, ScalarType::U8]
                .map(|element| borrow(element, regions.zeros, 1)),
            partial_out: f32s(regions.partial_out, partial_out),
            partial_max_sum: f32s(regions.partial_max_sum, partial_max_sum),
            unwanted: f32s(regions.unwanted, 1),
        }
    }

    /// The memory of a run, and of a logsumexp that nobody wants.
    fn workspace(&mut self) -> (Workspace<'_, Memory>, &mut Memory) {
        let workspace = Workspace {
            sequences: self.sequences.view(),
            factors: self.factors.each_ref().map(Memory::view),
            codebooks: self.codebooks.view(),
            absent: self.absent.each_ref().map(Memory::view),
            partial_out: &mut self.partial_out,
            partial_max_sum: &mut self.partial_max_sum,
        };
        (workspace, &mut self.unwanted)
    }
}

/// The means of centered keys.
const fn means<'a>(k: &DeviceKv<'a>) -> Option<DeviceList<'a>> {
    match k {
        DeviceKv::Elements(_) => None,
        DeviceKv::Codes(codes) => codes.means,
    }
}

/// Elements that a view reaches over, which its constructor has counted; none otherwise.
pub(super) fn reach(raw: &RawTensor) -> usize {
    tensor::reach(raw.shape, raw.strides).unwrap_or(0)
}

fn mask_reach(mask: &DeviceMask<'_>) -> usize {
    tensor::reach(mask.shape, mask.strides).unwrap_or(0)
}

const fn mask_bytes(mask: &DeviceMask<'_>) -> usize {
    match mask.kind {
        MaskKind::Bool => 1,
        MaskKind::Additive(dtype) => dtype.bytes(),
    }
}

pub(super) const fn scalar(dtype: Dtype) -> ScalarType {
    match dtype {
        Dtype::F32 => ScalarType::F32,
        Dtype::F16 => ScalarType::F16,
        Dtype::BF16 => ScalarType::Bf16,
    }
}

/// A power of two, at most 16, that the addresses of all rows, or of all pages of codes, are multiples of; vectors of fewer bytes are read
/// element by element.
fn alignment(kv: &DeviceKv<'_>) -> usize {
    match kv {
        DeviceKv::Elements(tensor) if tensor.raw.in_vectors() => 16,
        DeviceKv::Elements(tensor) => tensor.raw.dtype.bytes(),
        DeviceKv::Codes(codes) => {
            let [pages, heads, ..] = codes.shape;
            let strides = [(pages, codes.strides[0]), (heads, codes.strides[1])];
            let used = strides.into_iter().filter(|(n, _)| *n > 1).map(|(_, stride)| stride as u64);
            let lowest = used.fold(codes.at | 16, |bits, stride| bits | stride).trailing_zeros();
            1 << lowest
        }
    }
}

fn places(problem: &Problem, inputs: &DeviceInputs<'_>, outputs: &DeviceOutputs<'_>) -> Strides {
    let rows = |raw: &RawTensor| [raw.strides[0], raw.strides[1], raw.strides[2]];
    let bytes = |kv: &DeviceKv<'_>| match kv {
        DeviceKv::Elements(tensor) => rows(&tensor.raw).map(|stride| stride * tensor.raw.dtype.bytes()),
        DeviceKv::Codes(codes) => [codes.strides[0], codes.strides[1], 0],
    };
    let mut places = Strides {
        q: rows(&inputs.q.raw),
        out: rows(&outputs.out.raw),
        k: bytes(&inputs.k),
        v: bytes(&inputs.v),
        aligned: alignment(&inputs.k).min(alignment(&inputs.v)),
        rows: inputs.k.shape()[2],
        ..Strides::default()
    };
    if let Some(tables) = &inputs.tables
        && matches!(problem.desc().sequences, Sequences::Cached { .. })
    {
        // A batch without tokens has tables without entries.
        places.pages = Some([tables.page_size.max(1), tables.width.max(1)]);
        places.ring = tables.wraps;
    }
    let steps = |mask: &DeviceMask<'_>| {
        let bytes = mask_bytes(mask);
        mask.steps().map(|step| usize::try_from(step).unwrap_or(0) / bytes)
    };
    if let Some(mask) = &inputs.mask {
        places.mask = steps(mask);
        places.mask_kind = match mask.kind {
            MaskKind::Additive(Dtype::F32) => 0,
            MaskKind::Additive(Dtype::F16) => 1,
            MaskKind::Additive(Dtype::BF16) => 2,
            MaskKind::Bool => 3,
        };
    }
    if let Some(tree) = &inputs.tree {
        let [_, _, row, step] = steps(tree);
        places.tree = [row, step];
    }
    places
}

impl From<LaunchError<DeviceError>> for CudaError {
    fn from(error: LaunchError<DeviceError>) -> Self {
        match error {
            LaunchError::Device(error) => error.into(),
            other => Self::Contract { what: other.to_string() },
        }
    }
}
