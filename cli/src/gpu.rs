//! The CUDA device for commands.

use crate::failure::{Failure, Result};
use crate::machine;
use crate::options::Kernels;
use flashtile::cuda::Cuda;
use flashtile::plan::{CudaTile, PortableTile, Sm80Tile, Sm90Tile};
use flashtile::{CudaPlan, Problem, Unsupported};
#[cfg(feature = "check")]
use flashtile_testkit::{CudaRunner, Runner};

/// The device of a number.
pub(crate) fn device(ordinal: usize) -> Result<Cuda> {
    Ok(Cuda::new(ordinal)?)
}

/// Every device of this machine, or why it cannot be used, in the order of their numbers.
pub(crate) fn devices() -> Result<Vec<Result<Cuda>>> {
    Ok((0..Cuda::count()?).map(device).collect())
}

/// The device with aligned tensors, and with tensors at odd addresses.
#[cfg(feature = "check")]
pub(crate) fn runners(cuda: Cuda, exact: bool, kernels: Kernels) -> Vec<Box<dyn Runner>> {
    let runner = CudaRunner::new(cuda).exact(exact).with(machine::options(None, kernels));
    vec![Box::new(runner.clone()), Box::new(runner.odd())]
}

/// The compiler, and the folder of compiled kernels.
pub(crate) fn compiler(cuda: &Cuda) -> Result<String> {
    let ((major, minor), place) = cuda.compiler()?;
    let kept = match cuda.cache_folder() {
        Some(folder) => format!("kernels are kept in {}", folder.display()),
        None => "kernels are not kept".to_owned(),
    };
    Ok(format!("NVRTC {major}.{minor} ({place}); {kept}"))
}

/// A tile as `WARPS_Q,WARPS_K,FRAGMENTS,KEYS,STAGES,RESIDENT,Q_IN_REGISTERS`; or `wgmma:WARPGROUPS,KEYS,STAGES,PING_PONG`; or
/// `ROWS,KEYS,SIMDS,RESIDENT` of portable kernels: of prefill from 64 rows on, which decode does not have, or where the SIMD groups of a
/// team follow, and 1 for one block of keys and values.
pub(crate) fn tile(text: &str) -> std::result::Result<CudaTile, String> {
    if let Some(numbers) = text.strip_prefix("wgmma:") {
        return wgmma_tile(numbers);
    }
    let numbers: Option<Vec<usize>> = text.split(',').map(|n| n.parse().ok()).collect();
    match numbers.as_deref() {
        Some(&[q, k, fragments, keys, stages, resident, in_registers]) => {
            let tile = Sm80Tile::new(q, k, fragments, keys, stages);
            Ok(tile.with_resident(resident).with_q_in_registers(in_registers != 0).into())
        }
        Some(&[rows, keys, simds, resident, team]) => {
            Ok(PortableTile::prefill(rows, keys, simds, resident).with_team(team).into())
        }
        Some(&[rows, keys, simds, resident, team, 1]) => {
            Ok(PortableTile::prefill(rows, keys, simds, resident).with_team(team).with_one_block().into())
        }
        Some(&[rows, keys, simds, resident]) if rows >= 64 => {
            Ok(PortableTile::prefill(rows, keys, simds, resident).into())
        }
        Some(&[rows, keys, simds, resident]) => {
            Ok(PortableTile::new(rows, keys, simds, resident).into())
        }
        _ => Err("expected seven whole numbers: warps of rows and of keys, fragments, keys, stages, resident, q in registers; or \
                  wgmma: and four: warpgroups, keys, stages, ping-pong; or four of portable kernels: rows, keys, SIMD groups, resident; or five of portable prefill, with the SIMD groups of \
                  a team, and a sixth, 1, where keys and values take one block of memory in turn"
            .to_owned()),
    }
}

fn wgmma_tile(numbers: &str) -> std::result::Result<CudaTile, String> {
    let numbers: Option<Vec<usize>> = numbers.split(',').map(|n| n.parse().ok()).collect();
    match numbers.as_deref() {
        Some(&[warpgroups, keys, stages, ping_pong]) => {
            Ok(Sm90Tile::new(warpgroups, keys, stages).with_ping_pong(ping_pong != 0).into())
        }
        _ => Err("expected four whole numbers after wgmma: warpgroups, keys, stages and ping-pong (0 or 1), as in wgmma:2,128,2,1".to_owned()),
    }
}

/// How plans are made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tuning {
    pub(crate) kernels: Kernels,
    pub(crate) tile: Option<CudaTile>,
}

impl Tuning {
    pub(crate) fn plan(self, problem: &Problem, cuda: &Cuda) -> std::result::Result<CudaPlan, Unsupported> {
        let options = machine::options(None, self.kernels);
        match self.tile {
            Some(tile) => CudaPlan::with_tile(problem, cuda.facts(), options, tile),
            None => CudaPlan::new(problem, cuda.facts(), options),
        }
    }
}

impl From<flashtile::cuda::CudaError> for Failure {
    fn from(error: flashtile::cuda::CudaError) -> Self {
        Self::new(error)
    }
}
