//! Kernels compiled ahead of time.

use super::device::Cuda;
use super::error::CudaError;
use super::portable::least_alignment;
use super::sources::{Access, Source};
use crate::plan::CudaPlan;
use flashtile_gpu::plan::{Loads, USUAL_PAGE_SIZE};
use flashtile_kernel::{Constant, Instance};
use rayon::prelude::*;

impl Cuda {
    /// Compiles the kernels of plans, keeps them on disk and loads them, so that no later call waits for the compiler: those for rows that
    /// start on 16 bytes, and those for any others; of prefill in 16 bits on compute capability 9.0 a third form for aligned rows that TMA
    /// cannot copy ([`Prepared::run`](super::Prepared::run)); of portable kernels also those for rows on 8, 4 and 2 bytes, and for pages of
    /// a multiple of 16 tokens and any others. Several are compiled at a time.
    ///
    /// # Errors
    /// [`CudaError::Device`], with [`DeviceError::KernelFolder`](super::DeviceError::KernelFolder) where they could not be kept; they are
    /// loaded then.
    pub fn prewarm(&self, plans: &[CudaPlan]) -> Result<(), CudaError> {
        let mut wanted: Vec<(Source, &'static str, usize)> = Vec::new();
        for plan in plans {
            let Some(native) = plan.native() else { continue };
            for launch in native.launches() {
                for &access in Access::all(&launch.kernel) {
                    let source = Source::native(&launch.kernel, access);
                    wanted.push((source, "forward", launch.kernel.public.shared_bytes));
                }
            }
            if !native.mask_tile_tables().is_empty() {
                wanted.push((Source::mask_tiles(), "mask_tiles", 0));
            }
        }
        wanted.sort_by(|a, b| a.0.name.cmp(&b.0.name));
        wanted.dedup();
        let mut portables: Loads = Vec::new();
        for plan in plans {
            let Some(portable) = plan.portable() else { continue };
            let least = least_alignment(plan.problem());
            let alignments = [16, 8, 4, 2].into_iter().filter(|aligned| *aligned >= least);
            for (aligned, page_size) in
                alignments.flat_map(|aligned| [(aligned, USUAL_PAGE_SIZE), (aligned, 1)])
            {
                for load in portable.plan.loads(aligned, page_size)? {
                    let same = |(instance, constants): &(Instance, Vec<Constant>)| {
                        instance.entry() == load.0.entry() && *constants == load.1
                    };
                    if !portables.iter().any(same) {
                        portables.push(load);
                    }
                }
            }
        }
        let native = wanted
            .into_par_iter()
            .map(|(source, entry, shared)| self.load(source, entry, shared).map(|(_, kept)| kept));
        let portable = portables.into_par_iter().map(|(instance, constants)| {
            let (_, kept) = self.gpu().prewarm(&instance, &constants)?;
            Ok(kept.map_err(CudaError::from))
        });
        let kept: Vec<Result<(), CudaError>> = native.chain(portable).collect::<Result<_, _>>()?;
        kept.into_iter().collect()
    }
}
