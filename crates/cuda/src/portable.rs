//! The kernels of the kernel language on a CUDA device.

#![allow(unsafe_code)]

use flashtile_core::problem::Problem;
use flashtile_gpu::plan::Plan;
use flashtile_gpu::run::Workspace;
use flashtile_kernel::cuda::{Gpu, Memory};
use std::convert::Infallible;

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
