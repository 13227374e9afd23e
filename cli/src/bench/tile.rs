//! Tiles of CUDA kernels as text, for `bench --tile`.

use crate::failure::{Failure, Result};
use flashtile::plan::{AnyFacts, AnyPlan, CudaFacts, CudaTile, NativeTile, PortableTile, Sm80Tile, Sm90Tile};
use flashtile::{CudaPlan, PlanOptions, Problem};

/// A plan with a tile that the planner does not choose. With a tile of `mma.sync` its backward pass, too, has kernels without `wgmma`.
///
/// # Errors
/// If the facts are not a CUDA device's, or no kernel has the tile.
pub(super) fn plan(
    problem: &Problem,
    facts: &AnyFacts,
    options: PlanOptions,
    tile: CudaTile,
) -> Result<AnyPlan> {
    let only = || Failure::at("--tile", "applies to the cuda backend only");
    let mut facts: CudaFacts = *facts.of().ok_or_else(only)?;
    facts.wgmma &= !matches!(tile, CudaTile::Native(NativeTile::Sm80(_)));
    let plan = CudaPlan::with_tile(problem, &facts, options, tile).map_err(Failure::new)?;
    Ok(AnyPlan::new(facts, plan))
}

/// Parses a tile:
///
/// - `WARPS_Q,WARPS_K,FRAGMENTS,KEYS,STAGES,RESIDENT,Q_IN_REGISTERS`;
/// - `wgmma:WARPGROUPS,KEYS,STAGES,PING_PONG`;
/// - `ROWS,KEYS,SIMDS,RESIDENT` of portable kernels, optionally followed by the number of SIMD groups of a team, and by
///   1 for one block of keys and values. Tiles of 64 rows or more, which decode does not have, and tiles with a team
///   are tiles of prefill.
pub(super) fn tile(text: &str) -> std::result::Result<CudaTile, String> {
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
