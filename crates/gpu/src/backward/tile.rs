//! Tiles of the backward kernels.

use crate::codecs::scalar_type;
use crate::facts::GpuFacts;
use crate::kernels::backward::d_bias::backward_bias;
use crate::kernels::backward::d_kv::backward_kv;
use crate::kernels::backward::d_q::backward_q;
use crate::kernels::backward::row_block::chunk_loads;
use crate::kernels::backward::row_terms::row_terms;
use crate::kernels::prefill::block::block_columns;
use flashtile_core::dtype::Dtype;
use flashtile_core::plan::Unsupported;
use flashtile_core::problem::Problem;
use flashtile_kernel::source::GenericsError;
use flashtile_kernel::{Generic, Instance};

/// Registers of a thread beside operands, sums and the words on their way: addresses, masks, loop counters.
const OTHER_REGISTERS: usize = 32;

/// How the threadgroups of a backward kernel divide its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(clippy::exhaustive_structs)]
pub struct TileShape {
    /// Tiles of 16 rows that a block of the streamed rows has.
    pub block_tiles: usize,
    /// SIMD groups, each team of which keeps 16 rows.
    pub simds: usize,
    /// SIMD groups of a team, which divide the columns of its rows.
    pub team: usize,
    /// True if the kept rows lie in registers, otherwise in shared memory. Those of `backward_q` always do.
    pub in_registers: bool,
}

impl TileShape {
    /// Rows that a threadgroup keeps.
    #[must_use]
    pub const fn rows(&self) -> usize {
        16 * self.simds / self.team
    }

    /// Rows of a block, which a threadgroup streams.
    #[must_use]
    pub const fn block_rows(&self) -> usize {
        16 * self.block_tiles
    }
}

/// The tiles of the kernels that multiply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(clippy::exhaustive_structs)]
pub struct BackwardTile {
    /// The tile of `backward_q`, which keeps query rows and streams keys.
    pub q: TileShape,
    /// The tile of `backward_kv`, which keeps keys and streams query rows.
    pub kv: TileShape,
    /// The tile of `backward_bias`, where an additive mask has a gradient: query rows by keys, of which the block is one.
    pub bias: Option<TileShape>,
}

/// Tiles of two SIMD groups and short blocks for rows of up to `dim` elements: with kept keys in registers beyond 64, every device holds
/// them up to 128.
#[must_use]
pub const fn small_tile(dim: usize) -> BackwardTile {
    let q = TileShape { block_tiles: 1, simds: 2, team: 1, in_registers: true };
    BackwardTile { q, kv: TileShape { in_registers: dim > 64, ..q }, bias: Some(q) }
}

/// Limits that GPUs of NVIDIA have from compute capability 8.0 on.
const AMPERE: GpuFacts = GpuFacts {
    cores: 1,
    simds_per_core: 48,
    threads_per_group: 1024,
    shared_per_group: 99 * 1024,
    shared_per_core: 100 * 1024,
    reserved_shared: 1024,
    registers_per_core: 65536,
    registers_per_thread: 256,
    multiplies_f32: false,
    multiplies_bf16: true,
    rereads_in_cache: true,
    max_groups: 65535,
};

/// Types and dimensions that the instances are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BackwardVariant {
    pub(crate) dtype: Dtype,
    pub(crate) head_dim: usize,
    pub(crate) value_dim: usize,
}

/// The kernels whose tiles are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tiled {
    Q,
    Kv,
    Bias,
}

impl BackwardVariant {
    /// The types and dimensions of a problem.
    pub(crate) const fn of(problem: &Problem) -> Self {
        let dims = problem.dims();
        Self { dtype: problem.dtype(), head_dim: dims.head_dim, value_dim: dims.value_dim }
    }

    fn generics(&self) -> Vec<Generic> {
        vec![
            Generic::Type(scalar_type(self.dtype)),
            Generic::Usize(self.head_dim),
            Generic::Usize(self.value_dim),
        ]
    }

    /// The instance of `row_terms`.
    pub(crate) fn terms_instance(&self) -> Result<Instance, GenericsError> {
        row_terms::specialise(&[Generic::Type(scalar_type(self.dtype)), Generic::Usize(self.value_dim)])
    }

    /// The instance of `backward_q` with a tile.
    pub(crate) fn q_instance(&self, tile: TileShape) -> Result<Instance, GenericsError> {
        let mut generics = self.generics();
        generics.extend([1, tile.block_tiles, tile.simds, tile.team, 1].map(Generic::Usize));
        backward_q::specialise(&generics)
    }

    /// The instance of `backward_kv` with a tile.
    pub(crate) fn kv_instance(&self, tile: TileShape) -> Result<Instance, GenericsError> {
        let mut generics = self.generics();
        let in_registers = usize::from(tile.in_registers);
        generics.extend([1, tile.block_tiles, tile.simds, tile.team, in_registers, 1].map(Generic::Usize));
        backward_kv::specialise(&generics)
    }

    /// The instance of `backward_bias` with a tile.
    pub(crate) fn bias_instance(&self, tile: TileShape) -> Result<Instance, GenericsError> {
        let mut generics = self.generics();
        generics.extend([1, tile.block_tiles, tile.simds, tile.team].map(Generic::Usize));
        backward_bias::specialise(&generics)
    }

    /// The reason where every tile needs more registers than a thread has.
    fn too_wide(&self) -> String {
        let Self { dtype, head_dim, value_dim } = *self;
        let dims =
            if value_dim == head_dim { head_dim.to_string() } else { format!("{head_dim} and {value_dim}") };
        format!(
            "backward kernels of {dtype} with head dimension {dims} take more registers than a thread has"
        )
    }

    fn instance(&self, kernel: Tiled, tile: TileShape) -> Result<Instance, GenericsError> {
        match kernel {
            Tiled::Q => self.q_instance(tile),
            Tiled::Kv => self.kv_instance(tile),
            Tiled::Bias => self.bias_instance(tile),
        }
    }

    /// Columns of the sums that a thread's row has in registers.
    fn sum_columns(&self, kernel: Tiled, tile: TileShape) -> usize {
        let [of_q, of_v] = [self.head_dim, self.value_dim].map(|dim| dim.next_multiple_of(16));
        match kernel {
            Tiled::Q => of_q,
            Tiled::Kv => of_q + of_v,
            Tiled::Bias => tile.team * tile.block_rows(),
        }
    }

    /// Registers of a thread: kept operands, sums of `sum_columns` columns, both products of a block, and words on their way.
    fn registers(&self, tile: TileShape, sum_columns: usize) -> usize {
        let element = scalar_type(self.dtype);
        let columns = |dim| block_columns(dim, tile.team) / tile.team;
        let both = columns(self.head_dim) + columns(self.value_dim);
        let kept = if tile.in_registers { both * element.bytes() / 8 } else { 16 };
        let loads = |dim| 4 * chunk_loads(element, dim, tile.block_tiles, tile.simds);
        let words = loads(self.head_dim) + loads(self.value_dim);
        kept + sum_columns / tile.team / 2 + 16 * tile.block_tiles + words + OTHER_REGISTERS
    }
}

impl BackwardTile {
    /// Tiles for a problem on GPUs of NVIDIA from compute capability 8.0 on.
    ///
    /// # Errors
    /// [`Unsupported::SharedMemory`].
    pub fn default_for(problem: &Problem) -> Result<Self, Unsupported> {
        Self::default_of(&BackwardVariant::of(problem))
    }

    /// The tiles of all kernels that suit GPUs of NVIDIA.
    pub(crate) fn default_of(variant: &BackwardVariant) -> Result<Self, Unsupported> {
        Self::of(variant, true, &AMPERE)
    }

    /// The tiles of a device: as few SIMD groups to a team as its registers allow, then blocks as long as they and shared memory allow.
    /// With `has_bias`, an additive mask has a gradient.
    pub(crate) fn of(
        variant: &BackwardVariant,
        has_bias: bool,
        facts: &GpuFacts,
    ) -> Result<Self, Unsupported> {
        // Products that the matrix unit does not have are shuffles and multiply-adds: short blocks keep their code short.
        let is_multiplied = match variant.dtype {
            Dtype::F32 => facts.multiplies_f32,
            Dtype::BF16 => facts.multiplies_bf16,
            Dtype::F16 => true,
        };
        let longest = if is_multiplied { 4 } else { 1 };
        let shapes = |in_registers: bool| {
            let simds = [8, 4, 2, 1].into_iter().filter(|&simds| simds <= facts.max_simds());
            let shape = move |team, simds, block_tiles| TileShape { block_tiles, simds, team, in_registers };
            let of_team = move |team: usize| {
                let simds = simds.clone().filter(move |&simds| simds >= team);
                let blocks = [4, 2, 1].into_iter().filter(move |&tiles| tiles <= longest);
                simds.flat_map(move |simds| blocks.clone().map(move |tiles| shape(team, simds, tiles)))
            };
            [1, 2, 4, 8].into_iter().flat_map(of_team)
        };
        let choose = |kernel: Tiled, shapes: Vec<TileShape>| {
            let mut least = usize::MAX;
            let found = shapes.into_iter().find(|&shape| {
                let has_threads = kernel != Tiled::Kv || shape.block_tiles <= 2 * shape.simds;
                let registers = variant.registers(shape, variant.sum_columns(kernel, shape));
                if !has_threads || registers > facts.registers_per_thread {
                    return false;
                }
                let made = variant.instance(kernel, shape);
                let needed = made.map_or(usize::MAX, |instance| instance.shared_bytes());
                least = least.min(needed);
                needed <= facts.shared_per_group
            });
            let (needed, available) = (least, facts.shared_per_group);
            found.ok_or_else(|| match least {
                usize::MAX => Unsupported::Instance { why: variant.too_wide() },
                _ => Unsupported::SharedMemory { needed, available },
            })
        };
        let q = choose(Tiled::Q, shapes(true).collect())?;
        let kv = choose(Tiled::Kv, shapes(false).chain(shapes(true)).collect())?;
        let bias = has_bias.then(|| choose(Tiled::Bias, shapes(true).collect())).transpose()?;
        Ok(Self { q, kv, bias })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machines::ALL_APPLE;
    use crate::variant::HEAD_DIMS;

    /// Tiles keep the limits of their device, and where f32 is wide there is none.
    #[test]
    fn tiles_fit_their_devices() {
        let devices = ALL_APPLE.into_iter().chain([("ampere", AMPERE)]);
        for (name, facts) in devices {
            for (dtype, dim) in Dtype::ALL.into_iter().flat_map(|dtype| HEAD_DIMS.map(|dim| (dtype, dim))) {
                let variant = BackwardVariant { dtype, head_dim: dim, value_dim: dim };
                let tile = match BackwardTile::of(&variant, true, &facts) {
                    Ok(tile) => tile,
                    Err(why) => {
                        assert!(dim > 128, "{name} {dtype} {dim}: {why}");
                        continue;
                    }
                };
                let bias = tile.bias.unwrap();
                for (kernel, shape) in [(Tiled::Q, tile.q), (Tiled::Kv, tile.kv), (Tiled::Bias, bias)] {
                    let instance = variant.instance(kernel, shape).unwrap();
                    assert!(instance.shared_bytes() <= facts.shared_per_group, "{name} {kernel:?} {dim}");
                    assert!(32 * shape.simds <= facts.threads_per_group, "{name} {kernel:?} {dim}");
                }
            }
        }
    }
}
