//! Runs of the kernels of the kernel language.

#![allow(unsafe_code)]

use super::cudarc::driver::CudaStream;
use super::device::Cuda;
use super::error::{CudaError, DeviceError};
use super::sources::Access;
use super::tensor::{DeviceInputs, DeviceList, DeviceMask, DeviceOutputs, RawTensor};
use crate::plan::{CudaPlan, Portable};
use flashtile_core::dtype::{Dtype, MaskKind};
use flashtile_core::problem::{Problem, Sequences};
use flashtile_core::tensor;
use flashtile_gpu::launches::{Placed, Strides, Tensors, sequences};
use flashtile_kernel::cuda::{Gpu, Memory};
use flashtile_kernel::{Constant, Instance, LaunchError, ScalarType};
use std::sync::Arc;

/// What runs of a plan keep.
#[derive(Debug)]
pub(super) struct Runs {
    gpu: Gpu,
    /// The layout of the last run's tensors, which the next layer's tensors have too, and the parameters for it.
    last: Option<(Strides, Placed)>,
}

/// What is loaded for a plan: kernels, the values of their constants.
pub(super) type Loads = Vec<(Instance, Vec<Constant>)>;

/// Kernels of runs whose keys and values lie so, with a logsumexp and without.
pub(super) fn loads(plan: &CudaPlan, portable: &Portable, access: Access) -> Result<Loads, CudaError> {
    let problem = plan.problem();
    let aligned = match access {
        Access::Vector => 16,
        Access::Element => problem.dtype().bytes(),
    };
    let places = Strides {
        aligned,
        // Of which size is no matter for the kernel.
        pages: portable.kernel.paged.then_some([1, 1]),
        ..Strides::default()
    };
    let gpu = portable.plan.launches();
    let placed = gpu.place(&places, false)?;
    let ([decode, merge], [constants, with_lse]) = (gpu.instances(), gpu.constants(&placed, true));
    let [_, without_lse] = gpu.constants(&placed, false);
    Ok(vec![(decode.clone(), constants), (merge.clone(), with_lse), (merge.clone(), without_lse)])
}

/// The bytes at the beginning of scratch memory: numbers of the sequences, then zeros.
pub(super) fn written(problem: &Problem, portable: &Portable) -> Vec<u8> {
    let mut bytes = vec![0u8; portable.plan.regions().written];
    let numbers = sequences(problem, |index| problem.sequences()[index].batch);
    for (to, number) in bytes[portable.plan.regions().sequences..].as_chunks_mut().0.iter_mut().zip(numbers) {
        *to = number.to_ne_bytes();
    }
    bytes
}

impl Runs {
    /// On a stream.
    pub(super) fn new(
        cuda: &Cuda,
        stream: &Arc<CudaStream>,
        plan: &CudaPlan,
        portable: &Portable,
    ) -> Result<Self, CudaError> {
        let gpu = cuda.gpu().on(stream);
        for (instance, constants) in loads(plan, portable, Access::Vector)? {
            gpu.function(&instance, &constants)?;
        }
        Ok(Self { gpu, last: None })
    }

    /// Launches a run whose tensors were checked, with scratch memory at an address.
    pub(super) fn run(
        &mut self,
        problem: &Problem,
        portable: &Portable,
        at: u64,
        inputs: &DeviceInputs<'_>,
        outputs: &DeviceOutputs<'_>,
    ) -> Result<(), CudaError> {
        let places = places(problem, inputs, outputs);
        // An update changes the lengths of sequences alone, which are in scratch memory.
        if self.last.as_ref().is_none_or(|(last, _)| *last != places) {
            self.last = None;
        }
        let launches = portable.plan.launches();
        let (_, placed) = match &mut self.last {
            Some(last) => last,
            none => none.insert((places, launches.place(&places, false)?)),
        };
        let regions = portable.plan.regions();
        // SAFETY: views, lists, masks and tables are valid memory of the shapes that were checked against the problem, by their
        // constructors' contracts, until the work on the stream has ended; regions lie in the scratch memory, do not overlap, and
        // nothing but runs, which follow each other on the stream, accesses them.
        let borrow = |element, at, len| unsafe { self.gpu.borrow(element, at, len) };
        let zeros = |element| borrow(element, at + regions.zeros as u64, 1);
        let bytes = |raw: &RawTensor| borrow(ScalarType::U8, raw.at, reach(raw) * raw.dtype.bytes());
        let elements = |raw: &RawTensor| borrow(scalar(raw.dtype), raw.at, reach(raw));
        let list = |list: Option<DeviceList<'_>>| {
            list.map_or_else(|| zeros(ScalarType::F32), |list| borrow(ScalarType::F32, list.at, list.len))
        };
        let mask = |mask: Option<DeviceMask<'_>>| {
            mask.map_or_else(
                || zeros(ScalarType::U8),
                |mask| borrow(ScalarType::U8, mask.at, mask_reach(&mask) * mask_bytes(&mask)),
            )
        };
        let [partial_out, partial_max_sum] = launches.scratch();
        let mut partial_out = borrow(ScalarType::F32, at + regions.partial_out as u64, partial_out);
        let mut partial_max_sum =
            borrow(ScalarType::F32, at + regions.partial_max_sum as u64, partial_max_sum);
        let mut out = elements(&outputs.out.raw);
        let mut lse = match &outputs.lse {
            Some(lse) => borrow(ScalarType::F32, lse.at, lse.len),
            None => borrow(ScalarType::F32, at + regions.unwanted as u64, 1),
        };
        let (q, k, v) = (elements(&inputs.q.raw), bytes(&inputs.k.raw), bytes(&inputs.v.raw));
        let table = match &inputs.tables {
            Some(tables) => borrow(ScalarType::U32, tables.at, tables.entries),
            None => zeros(ScalarType::U32),
        };
        let count = 8 * problem.sequences().len();
        let sequences = borrow(ScalarType::I32, at + regions.sequences as u64, count);
        let none = zeros(ScalarType::F32);
        let (slopes, sinks) = (list(inputs.alibi_slopes), list(inputs.sinks));
        let (mask, tree) = (mask(inputs.mask), mask(inputs.tree));
        let tensors = Tensors {
            q: q.view(),
            k: k.view(),
            v: v.view(),
            table: table.view(),
            sequences: sequences.view(),
            factors: [none.view(); 2],
            codebooks: none.view(),
            means: none.view(),
            slopes: slopes.view(),
            mask: mask.view(),
            tree: tree.view(),
            sinks: sinks.view(),
            partial_out: &mut partial_out,
            partial_max_sum: &mut partial_max_sum,
            out: out.view_mut(),
            lse: lse.view_mut(),
            with_lse: outputs.lse.is_some(),
        };
        Ok(launches.launch(&self.gpu, placed, tensors, Memory::view_mut, Memory::view)?)
    }
}

/// Elements that a view reaches over, which its constructor has counted; none otherwise.
fn reach(raw: &RawTensor) -> usize {
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

const fn scalar(dtype: Dtype) -> ScalarType {
    match dtype {
        Dtype::F32 => ScalarType::F32,
        Dtype::F16 => ScalarType::F16,
        Dtype::BF16 => ScalarType::Bf16,
    }
}

fn places(problem: &Problem, inputs: &DeviceInputs<'_>, outputs: &DeviceOutputs<'_>) -> Strides {
    let rows = |raw: &RawTensor| [raw.strides[0], raw.strides[1], raw.strides[2]];
    let bytes = |raw: &RawTensor| rows(raw).map(|stride| stride * raw.dtype.bytes());
    let vectors = inputs.k.raw.in_vectors() && inputs.v.raw.in_vectors();
    let aligned = if vectors { 16 } else { problem.dtype().bytes() };
    let mut places = Strides {
        q: rows(&inputs.q.raw),
        out: rows(&outputs.out.raw),
        k: bytes(&inputs.k.raw),
        v: bytes(&inputs.v.raw),
        aligned,
        rows: inputs.k.raw.shape[2],
        ..Strides::default()
    };
    if let Some(tables) = &inputs.tables
        && matches!(problem.desc().sequences, Sequences::Cached { .. })
    {
        // A batch without tokens has tables without entries.
        places.pages = Some([tables.page_size.max(1), tables.width.max(1)]);
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
