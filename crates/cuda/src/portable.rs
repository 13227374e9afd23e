//! The kernels of the kernel language on a CUDA device.

#![allow(unsafe_code)]

use crate::plan::Portable;
use flashtile_core::plan::Unsupported;
use flashtile_core::problem::Problem;
use flashtile_gpu::launches::Strides;
use flashtile_gpu::plan::Plan;
use flashtile_gpu::run::Workspace;
use flashtile_kernel::cuda::{Gpu, Memory};
use flashtile_kernel::{Constant, Instance};
use std::convert::Infallible;

/// Pages whose size is a multiple of this have faster kernels, which are loaded before the first run.
pub(super) const USUAL_PAGE_SIZE: usize = 16;

/// Kernels, and the values of their constants.
pub(super) type Loads = Vec<(Instance, Vec<Constant>)>;

/// The kernels of runs whose rows start at multiples of `aligned` bytes, with and without a logsumexp. Cached keys lie in pages of `page_size`
/// tokens.
pub(super) fn loads(portable: &Portable, aligned: usize, page_size: usize) -> Result<Loads, Unsupported> {
    let strides = Strides {
        aligned,
        pages: portable.kernel.is_paged().then_some([page_size, 1]),
        ..Strides::default()
    };
    let launches = portable.plan.launches();
    let placed = launches.place(&strides, false)?;
    // The last kernel writes the logsumexp.
    let without_lse = launches.constants(&placed, false).pop();
    let all = launches.constants(&placed, true).into_iter().chain(without_lse);
    Ok(all.map(|(instance, constants)| (instance.clone(), constants)).collect())
}

/// The alignment that rows of keys and values have at least, in bytes: that of elements, or of the scales of codes.
pub(super) fn least_alignment(problem: &Problem) -> usize {
    problem.k_codec().alignment().min(problem.v_codec().alignment())
}

/// The regions of scratch memory at an address.
pub(super) fn workspace(gpu: &Gpu, plan: &Plan, at: u64) -> Workspace<Memory> {
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
