//! The CUDA device as commands use it.

use crate::failure::{Failure, Result};
use flashtile::cuda::Cuda;
use flashtile::plan::CudaTile;
use flashtile::testkit::{CudaRunner, Runner};

/// The first device of this machine.
pub(crate) fn device() -> Result<Cuda> {
    Ok(Cuda::new(0)?)
}

/// The device with tensors on whole vectors, and at odd addresses.
pub(crate) fn runners(cuda: Cuda, exact: bool) -> Vec<Box<dyn Runner>> {
    let runner = CudaRunner::new(cuda).exact(exact);
    vec![Box::new(runner.clone()), Box::new(runner.odd())]
}

/// The compiler, and where its kernels are kept.
pub(crate) fn compiler(cuda: &Cuda) -> Result<String> {
    let ((major, minor), place) = cuda.compiler()?;
    let kept = match cuda.cache_folder() {
        Some(folder) => format!("kernels are kept in {}", folder.display()),
        None => "kernels are not kept".to_owned(),
    };
    Ok(format!("NVRTC {major}.{minor} ({place}); {kept}"))
}

/// A tile as `WARPS_Q,WARPS_K,FRAGMENTS,KEYS,STAGES,RESIDENT,Q_IN_REGISTERS`.
pub(crate) fn tile(text: &str) -> std::result::Result<CudaTile, String> {
    let numbers: Option<Vec<usize>> = text.split(',').map(|n| n.parse().ok()).collect();
    let numbers = numbers.and_then(|n| <[usize; 7]>::try_from(n).ok());
    let [q, k, fragments, keys, stages, resident, in_registers] = numbers.ok_or(
        "expected seven whole numbers: warps of rows and of keys, fragments, keys, stages, resident, q in registers",
    )?;
    let mut tile = CudaTile::new([q, k], fragments, keys, stages);
    tile.resident = resident;
    tile.q_in_registers = in_registers != 0;
    Ok(tile)
}

impl From<flashtile::cuda::CudaError> for Failure {
    fn from(error: flashtile::cuda::CudaError) -> Self {
        Self::new(error)
    }
}
