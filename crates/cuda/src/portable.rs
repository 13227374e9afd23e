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
use flashtile_gpu::SessionError;
use flashtile_gpu::launches::Strides;
use flashtile_gpu::plan::Plan;
use flashtile_gpu::run::Workspace;
use flashtile_gpu::tensors::{GpuInputs, GpuKv, GpuMask, GpuOutputs, GpuTables, GpuTensor, GpuTensorMut};
use flashtile_kernel::cuda::{Gpu, Memory};
use flashtile_kernel::{Constant, Instance, LaunchError, ScalarType};
use std::convert::Infallible;
use std::sync::Arc;

/// Runs of a plan, in its scratch memory.
#[derive(Debug)]
pub(super) struct Runs {
    gpu: Gpu,
    runs: flashtile_gpu::run::Runs<Memory>,
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
        Access::Tma | Access::Vector => 16,
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
        let workspace = workspace(&gpu, &portable.plan, at);
        Ok(Self { gpu, runs: flashtile_gpu::run::Runs::new(workspace) })
    }

    /// Launches a run whose tensors were checked.
    pub(super) fn run(
        &mut self,
        problem: &Problem,
        portable: &Portable,
        inputs: &DeviceInputs<'_>,
        outputs: &DeviceOutputs<'_>,
    ) -> Result<(), CudaError> {
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
        let bytes =
            |mask: DeviceMask<'_>| borrow(ScalarType::U8, mask.at, mask_reach(&mask) * mask_bytes(&mask));
        // Only sequences of a cache have tables.
        let is_cached = matches!(problem.desc().sequences, Sequences::Cached { .. });
        let tables = inputs.tables.filter(|_| is_cached);
        let (q, k, v) = (elements(&inputs.q.raw), rows(&inputs.k), rows(&inputs.v));
        let table = tables.map(|tables| borrow(ScalarType::U32, tables.at, tables.entries));
        let (means, slopes) = (means(&inputs.k).map(list), inputs.alibi_slopes.map(list));
        let (sinks, tree, mask) = (inputs.sinks.map(list), inputs.tree.map(bytes), inputs.mask.map(bytes));
        let mut out = elements(&outputs.out.raw);
        let mut lse = outputs.lse.as_ref().map(|lse| borrow(ScalarType::F32, lse.at, lse.len));
        let of_mask = |(bytes, mask)| of_mask(bytes, mask);
        let inputs = GpuInputs {
            q: GpuTensor { view: q.view(), shape: inputs.q.raw.shape, strides: inputs.q.raw.strides },
            k: of_kv(&k, &inputs.k, means.as_ref()),
            v: of_kv(&v, &inputs.v, None),
            tables: table.as_ref().zip(tables).map(|(table, of)| GpuTables {
                table: table.view(),
                width: of.width,
                page_size: of.page_size,
                wraps: of.wraps,
            }),
            tree: tree.as_ref().zip(inputs.tree).map(of_mask),
            mask: mask.as_ref().zip(inputs.mask).map(of_mask),
            alibi_slopes: slopes.as_ref().map(Memory::view),
            sinks: sinks.as_ref().map(Memory::view),
        };
        let RawTensor { shape, strides, .. } = outputs.out.raw;
        let mut outputs = GpuOutputs {
            out: GpuTensorMut { view: out.view_mut(), shape, strides },
            lse: lse.as_mut().map(Memory::view_mut),
        };
        Ok(self.runs.run(&self.gpu, portable.plan.launches(), &inputs, &mut outputs)?)
    }
}

/// The regions of scratch memory at an address.
fn workspace(gpu: &Gpu, plan: &Plan, at: u64) -> Workspace<Memory> {
    let region = |region: usize, element, len| {
        // SAFETY: regions lie in the scratch memory and do not overlap; nothing but runs, which follow each other on the stream, accesses
        // them.
        Ok::<_, Infallible>(unsafe { gpu.borrow(element, at + region as u64, len) })
    };
    match Workspace::new(plan, region) {
        Ok(workspace) => workspace,
        Err(never) => match never {},
    }
}

/// Keys or values whose bytes are borrowed.
fn of_kv<'m>(bytes: &'m Memory, kv: &DeviceKv<'_>, means: Option<&'m Memory>) -> GpuKv<'m, Memory> {
    let strides = match kv {
        DeviceKv::Elements(tensor) => {
            // The stride of an axis of a single index may be anything.
            let size = tensor.raw.dtype.bytes();
            let [batch, head, row, _] = tensor.raw.strides.map(|stride| stride.saturating_mul(size));
            [batch, head, row]
        }
        DeviceKv::Codes(codes) => [codes.strides[0], codes.strides[1], 0],
    };
    GpuKv {
        bytes: bytes.view(),
        codec: kv.codec(),
        shape: kv.shape(),
        strides,
        aligned: alignment(kv),
        means: means.map(Memory::view),
    }
}

/// A mask whose bytes are borrowed.
fn of_mask<'m>(bytes: &'m Memory, mask: DeviceMask<'_>) -> GpuMask<'m, Memory> {
    GpuMask { bytes: bytes.view(), kind: mask.kind, shape: mask.shape, strides: mask.strides }
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

impl From<LaunchError<DeviceError>> for CudaError {
    fn from(error: LaunchError<DeviceError>) -> Self {
        match error {
            LaunchError::Device(error) => error.into(),
            other => Self::Contract { what: other.to_string() },
        }
    }
}

impl From<SessionError<DeviceError>> for CudaError {
    fn from(error: SessionError<DeviceError>) -> Self {
        match error {
            SessionError::Problem(error) => error.into(),
            SessionError::Unsupported(error) => error.into(),
            SessionError::Inputs(error) => error.into(),
            SessionError::Launch(error) => error.into(),
            other => Self::Contract { what: other.to_string() },
        }
    }
}
