//! The source of native kernels, and the constants that they are compiled with.
//!
//! A program is one string without headers: types, the structs that host and device have in common, its constants, and then its files, each
//! after those that it uses.

use crate::params::{
    BackwardParams, Divisor, ForwardParams, MaskTileParams, PrefillParams, PrepareParams, ProductParams,
    ReadParams, Sm80BackwardParams, Sm90BackwardParams, Tensor, dtype_name,
};
use crate::plan::{
    BackwardSequence, BackwardTileUnits, BackwardUnit, CudaKernel, MASK_TILE_ROWS, MAX_RECOMPUTED,
    MERGE_GROUP, NativeBackward, NativeKernel, NativeTile, NativeVariant, ScoreMod, Sm80Tile, Sm90Tile,
    UnitShape, WorkTile, column_warps,
};
use crate::tma::TensorMap;
use crate::wgmma;
use flashtile_core::dtype::Dtype;
use flashtile_kernel::cuda::Program;

pub(crate) const TYPES: &str = include_str!("kernels/common/types.cuh");
pub(crate) const COPY: &str = include_str!("kernels/common/copy.cuh");
const MMA: &str = include_str!("kernels/common/mma.cuh");
const TILE: &str = include_str!("kernels/common/tile.cuh");
const SCHEDULE: &str = include_str!("kernels/common/schedule.cuh");
const TANH: &str = include_str!("kernels/common/tanh.cuh");
const SCORING: &str = include_str!("kernels/common/scoring.cuh");
const MASK: &str = include_str!("kernels/common/mask.cuh");
const SOFTMAX: &str = include_str!("kernels/common/softmax.cuh");
const EPILOGUE: &str = include_str!("kernels/common/epilogue.cuh");
const MERGE: &str = include_str!("kernels/common/merge.cuh");
const COPY_TILE: &str = include_str!("kernels/common/copy_tile.cuh");
const STORE: &str = include_str!("kernels/common/store.cuh");
const SM80_TILES: &str = include_str!("kernels/sm80/tiles.cuh");
const SM80_GEMM: &str = include_str!("kernels/sm80/gemm.cuh");
const SM80_PREFILL: &str = include_str!("kernels/sm80/prefill.cu");
const SM80_DECODE: &str = include_str!("kernels/sm80/decode.cu");
pub(crate) const WGMMA: &str = include_str!("kernels/sm90/wgmma.cuh");
pub(crate) const BARRIER: &str = include_str!("kernels/sm90/barrier.cuh");
pub(crate) const TMA: &str = include_str!("kernels/sm90/tma.cuh");
const SM90_SPLIT_F32: &str = include_str!("kernels/sm90/split_f32.cuh");
const SM90_TILES: &str = include_str!("kernels/sm90/tiles.cuh");
const SM90_RECOMPUTE: &str = include_str!("kernels/sm90/recompute.cuh");
const SM90_SHARED_MERGE: &str = include_str!("kernels/sm90/shared_merge.cuh");
const SM90_SHARED_MEMORY: &str = include_str!("kernels/sm90/shared_memory.cuh");
const SM90_TILE_SCHEDULER: &str = include_str!("kernels/sm90/tile_scheduler.cuh");
const SM90_PRODUCER: &str = include_str!("kernels/sm90/producer.cuh");
const SM90_CONSUMER: &str = include_str!("kernels/sm90/consumer.cuh");
const SM90_EPILOGUE: &str = include_str!("kernels/sm90/epilogue.cuh");
const SM90_FORWARD: &str = include_str!("kernels/sm90/forward.cuh");
const SM90_PREFILL: &str = include_str!("kernels/sm90/prefill.cu");
const SM90_PREFILL_WIDE: &str = include_str!("kernels/sm90/prefill_wide.cu");
const SM90_PREFILL_F32: &str = include_str!("kernels/sm90/prefill_f32.cu");
const SM90_LIMITS: &str = include_str!("kernels/sm90/limits.cu");
const SM90_CLUSTER: &str = include_str!("kernels/sm90/backward/cluster.cuh");
const SM90_BACKWARD_MEMORY: &str = include_str!("kernels/sm90/backward/memory.cuh");
const BACKWARD_STEPS: &str = include_str!("kernels/backward/steps.cuh");
const SM90_BACKWARD_COPIES: &str = include_str!("kernels/sm90/backward/copies.cuh");
const SM90_BACKWARD_D_Q: &str = include_str!("kernels/sm90/backward/d_q.cuh");
const BACKWARD_SEQUENCE: &str = include_str!("kernels/backward/sequence.cuh");
const BACKWARD_LANES: &str = include_str!("kernels/backward/lanes.cuh");
const BACKWARD_SCORES: &str = include_str!("kernels/backward/scores.cuh");
const SM90_BACKWARD_KEYS: &str = include_str!("kernels/sm90/backward/keys.cuh");
const SM80_BACKWARD: &str = include_str!("kernels/sm80/backward.cu");
const SM90_BACKWARD: &str = include_str!("kernels/sm90/backward.cu");
const BACKWARD_PREPARE: &str = include_str!("kernels/backward/prepare.cu");
const MASK_TILES: &str = include_str!("kernels/mask_tiles.cu");
const LIMITS: &str = include_str!("kernels/limits.cu");

/// The kinds of programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Family {
    Sm80Prefill,
    Sm80Decode,
    Sm90Prefill,
    Sm90PrefillWide,
    Sm90PrefillF32,
    Sm80Backward,
    Sm90Backward,
    BackwardPrepare,
    MaskTiles,
    Limits,
    Sm90Limits,
}

impl Family {
    /// The files of a program behind its constants.
    fn files(self) -> Vec<&'static str> {
        let common = [COPY, MMA, TILE, SCHEDULE, TANH, SCORING, MASK, SOFTMAX, EPILOGUE, MERGE];
        let sm80 =
            |kernel| common.into_iter().chain([SM80_TILES, COPY_TILE, STORE, SM80_GEMM, kernel]).collect();
        let sm90 = |kernel| {
            let tiles = [WGMMA, BARRIER, TMA, SM90_TILES, COPY_TILE, SM90_SPLIT_F32, STORE];
            let merge = [SM90_RECOMPUTE, SM90_SHARED_MERGE];
            let roles =
                [SM90_SHARED_MEMORY, SM90_TILE_SCHEDULER, SM90_PRODUCER, SM90_CONSUMER, SM90_EPILOGUE];
            let ends = [SM90_FORWARD, kernel];
            common.into_iter().chain(tiles).chain(merge).chain(roles).chain(ends).collect()
        };
        match self {
            Self::Sm80Prefill => sm80(SM80_PREFILL),
            Self::Sm80Decode => sm80(SM80_DECODE),
            Self::Sm90Prefill => sm90(SM90_PREFILL),
            Self::Sm90PrefillWide => sm90(SM90_PREFILL_WIDE),
            Self::Sm90PrefillF32 => sm90(SM90_PREFILL_F32),
            Self::Sm80Backward => {
                vec![
                    COPY,
                    MMA,
                    BACKWARD_SEQUENCE,
                    BACKWARD_STEPS,
                    BACKWARD_LANES,
                    TANH,
                    BACKWARD_SCORES,
                    SM80_BACKWARD,
                ]
            }
            Self::Sm90Backward => vec![
                COPY,
                WGMMA,
                BARRIER,
                TMA,
                SM90_CLUSTER,
                SM90_BACKWARD_MEMORY,
                BACKWARD_SEQUENCE,
                BACKWARD_STEPS,
                BACKWARD_LANES,
                TANH,
                BACKWARD_SCORES,
                SM90_BACKWARD_COPIES,
                SM90_BACKWARD_D_Q,
                SM90_BACKWARD_KEYS,
                SM90_BACKWARD,
            ],
            Self::BackwardPrepare => vec![BACKWARD_SEQUENCE, BACKWARD_PREPARE],
            Self::MaskTiles => vec![MASK_TILES],
            Self::Limits => vec![MMA, LIMITS],
            Self::Sm90Limits => vec![COPY, WGMMA, SM90_LIMITS],
        }
    }

    /// The structs that a program and the host share, each after those that it contains.
    fn structs(self) -> String {
        let sources = match self {
            Self::Sm80Prefill | Self::Sm80Decode => vec![
                WorkTile::device_source(),
                Tensor::device_source(),
                Divisor::device_source(),
                ForwardParams::device_source(),
            ],
            Self::Sm90Prefill | Self::Sm90PrefillWide | Self::Sm90PrefillF32 => vec![
                TensorMap::device_source(),
                WorkTile::device_source(),
                Tensor::device_source(),
                Divisor::device_source(),
                ForwardParams::device_source(),
                PrefillParams::device_source(),
            ],
            Self::Sm80Backward | Self::Sm90Backward | Self::BackwardPrepare => vec![
                TensorMap::device_source(),
                Tensor::device_source(),
                BackwardUnit::device_source(),
                BackwardSequence::device_source(),
                BackwardTileUnits::device_source(),
                BackwardParams::device_source(),
                match self {
                    Self::Sm80Backward => Sm80BackwardParams::device_source(),
                    Self::Sm90Backward => Sm90BackwardParams::device_source(),
                    _ => PrepareParams::device_source(),
                },
            ],
            Self::MaskTiles => vec![MaskTileParams::device_source()],
            Self::Limits => vec![ReadParams::device_source(), ProductParams::device_source()],
            Self::Sm90Limits => vec![ProductParams::device_source()],
        };
        sources.join("\n")
    }
}

/// A kernel: its name in errors, its program and its constants.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Source {
    pub(super) name: String,
    family: Family,
    /// Declarations in C++.
    constants: String,
}

/// How a kernel reads rows of tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Access {
    /// By TMA: kernels for compute capability 9.0.
    Tma,
    /// In vectors: every row starts on 16 bytes.
    Vector,
    /// Element by element.
    Element,
}

impl Access {
    /// How a kernel can read rows, the fastest first.
    pub(super) fn all(kernel: &NativeKernel) -> &'static [Self] {
        let all = &[Self::Tma, Self::Vector, Self::Element];
        if kernel.uses_tma() { all } else { &all[1..] }
    }
}

/// The C++ struct `Scoring`, which says how a kernel changes scores.
fn scoring(has_bias: bool, has_mask: bool) -> String {
    format!(
        "struct Scoring {{\n    static constexpr bool HAS_BIAS = {has_bias}, HAS_MASK = {has_mask};\n}};\n"
    )
}

impl Source {
    /// The source of a kernel of any architecture.
    pub(super) fn native(kernel: &NativeKernel, access: Access) -> Self {
        match &kernel.tile {
            NativeTile::Sm80(tile) => Self::sm80(kernel, tile, access),
            NativeTile::Sm90(tile) => Self::sm90(kernel, tile, access),
        }
    }

    fn sm90(kernel: &NativeKernel, tile: &Sm90Tile, access: Access) -> Self {
        let NativeVariant { dtype, head_dim, value_dim, paged, has_bias, has_mask } = kernel.variant;
        let CudaKernel { name, key_stages, shared_bytes, .. } = &kernel.public;
        let Sm90Tile { keys, stages, ping_pong, shares_rows, .. } = *tile;
        let value_consumers = tile.value_consumers();
        let (consumer_keys, consumer_columns) = (keys / value_consumers, value_dim / value_consumers);
        let mut columns = vec![consumer_keys, consumer_columns];
        columns.sort_unstable();
        columns.dedup();
        let constants = [
            format!("constexpr Dtype DTYPE = {};", dtype_name(dtype)),
            format!("constexpr int HEAD_DIM = {head_dim}, VALUE_DIM = {consumer_columns};"),
            format!("constexpr int WARPS_Q = {}, WARPS_K = {value_consumers}, MMA_M = 1;", tile.rows() / 16),
            format!("constexpr int VALUE_CONSUMERS = {value_consumers};"),
            format!("constexpr int WARP_KEYS = {consumer_keys}, STAGES = {stages};"),
            format!("constexpr int Q_STAGES = {};", tile.q_stages(&kernel.variant)),
            format!("constexpr int EXTRA_K_STAGES = {};", key_stages - stages),
            format!("constexpr int SHARED_BYTES = {shared_bytes};"),
            format!("constexpr int MASK_TILE_ROWS = {MASK_TILE_ROWS}, MERGE_GROUP = {MERGE_GROUP};"),
            format!("constexpr bool PING_PONG = {ping_pong}, PAGED = {paged};"),
            format!("constexpr bool TMA = {};", access == Access::Tma),
            format!("constexpr bool VECTOR_ROWS = {};", access != Access::Element),
            scoring(has_bias, has_mask),
            wgmma::sources(&columns),
        ];
        let suffix = match access {
            Access::Vector if kernel.uses_tma() => "-vectors",
            Access::Tma | Access::Vector => "",
            Access::Element => "-elements",
        };
        let name = format!("{name}{suffix}");
        let family = match dtype {
            Dtype::F32 => Family::Sm90PrefillF32,
            Dtype::F16 | Dtype::BF16 if shares_rows => Family::Sm90PrefillWide,
            Dtype::F16 | Dtype::BF16 => Family::Sm90Prefill,
        };
        Self { name, family, constants: constants.join("\n") }
    }

    fn sm80(kernel: &NativeKernel, tile: &Sm80Tile, access: Access) -> Self {
        let NativeVariant { dtype, head_dim, value_dim, paged, has_bias, has_mask } = kernel.variant;
        let CudaKernel { name, shared_bytes, .. } = &kernel.public;
        let Sm80Tile { warps_q, warps_k, fragments, warp_keys, stages, resident, q_in_registers } = *tile;
        let constants = [
            format!("constexpr Dtype DTYPE = {};", dtype_name(dtype)),
            format!("constexpr int HEAD_DIM = {head_dim}, VALUE_DIM = {value_dim};"),
            format!("constexpr int WARPS_Q = {warps_q}, WARPS_K = {warps_k}, VALUE_CONSUMERS = 1;"),
            format!("constexpr int MMA_M = {fragments}, WARP_KEYS = {warp_keys}, STAGES = {stages};"),
            format!("constexpr int BLOCKS_PER_SM = {resident}, SHARED_BYTES = {shared_bytes};"),
            format!("constexpr int MASK_TILE_ROWS = {MASK_TILE_ROWS};"),
            format!("constexpr int MERGE_GROUP = {MERGE_GROUP}, MAX_RECOMPUTED = {MAX_RECOMPUTED};"),
            format!("constexpr bool Q_IN_REGISTERS = {q_in_registers}, PAGED = {paged};"),
            format!("constexpr bool VECTOR_ROWS = {};", access != Access::Element),
            scoring(has_bias, has_mask),
        ];
        let suffix = if access == Access::Element { "-elements" } else { "" };
        let family = if tile.warps_split_keys() { Family::Sm80Decode } else { Family::Sm80Prefill };
        Self { name: format!("{name}{suffix}"), family, constants: constants.join("\n") }
    }

    /// The backward pass of a plan.
    pub(super) fn backward(plan: &NativeBackward) -> Self {
        let UnitShape { columns, .. } = plan.schedule().shape;
        let shared = format!("constexpr int SHARED_BYTES = {};", plan.shared_bytes());
        let (family, more) = match plan {
            NativeBackward::Sm80(plan) => {
                let dims = format!("constexpr int HEAD_DIM = {columns}, VALUE_DIM = {};", plan.value_dim);
                (Family::Sm80Backward, dims)
            }
            NativeBackward::Sm90(_) => {
                let products = wgmma::sources(&[64, 128]);
                (Family::Sm90Backward, format!("constexpr int COLUMNS = {columns};\n{products}"))
            }
        };
        let constants = [Self::backward_constants(plan), shared, more];
        Self { name: plan.kernel(), family, constants: constants.join("\n") }
    }

    /// The terms of query rows that [`Source::backward`] reads, and sums over rows.
    pub(super) fn backward_prepare(plan: &NativeBackward) -> Self {
        // The wider of q and out decides how many lanes read a row.
        let columns = match plan {
            NativeBackward::Sm80(plan) => plan.schedule.shape.columns.max(plan.value_dim),
            NativeBackward::Sm90(plan) => plan.schedule.shape.columns,
        };
        let constants = [Self::backward_constants(plan), format!("constexpr int COLUMNS = {columns};")];
        let name = format!("{}-prepare", plan.kernel());
        Self { name, family: Family::BackwardPrepare, constants: constants.join("\n") }
    }

    fn backward_constants(plan: &NativeBackward) -> String {
        let schedule = plan.schedule();
        let (UnitShape { keys, rows, warps, .. }, ScoreMod { softcap, alibi, chunks }) =
            (schedule.shape, schedule.score_mod);
        let (dtype, blocks) = (dtype_name(plan.dtype()), plan.unit_blocks());
        format!(
            "constexpr Dtype DTYPE = {dtype};\n\
             constexpr int BLOCK_M = {rows}, BLOCK_N = {}, UNIT_BLOCKS = {blocks}, UNIT_WARPS = {warps}, COLUMN_WARPS = {};\n\
             constexpr bool HAS_SOFTCAP = {softcap}, HAS_ALIBI = {alibi}, HAS_CHUNKS = {chunks};",
            keys / blocks,
            column_warps(schedule.shape),
        )
    }

    pub(super) fn mask_tiles() -> Self {
        let constants = format!("constexpr int MASK_TILE_ROWS = {MASK_TILE_ROWS};\n");
        Self { name: "cuda-mask_tiles-mask".to_owned(), family: Family::MaskTiles, constants }
    }

    pub(super) fn limits() -> Self {
        Self { name: "cuda-limits".to_owned(), family: Family::Limits, constants: String::new() }
    }

    /// The limit of products of warpgroups, for compute capability 9.0.
    pub(super) fn sm90_limits() -> Self {
        // The columns of `PEAK_N`.
        let products = wgmma::sources(&[wgmma::MAX_COLUMNS]);
        Self { name: "cuda-sm90-limits".to_owned(), family: Family::Sm90Limits, constants: products }
    }

    /// The program for the compiler.
    pub(super) fn program(&self) -> Program {
        let structs = self.family.structs();
        let sources: Vec<&str> =
            [TYPES, &structs, &self.constants].into_iter().chain(self.family.files()).collect();
        Program { name: self.name.clone(), source: sources.join("\n"), options: Vec::new() }
    }
}

#[cfg(test)]
#[allow(clippy::print_stdout, reason = "a test that does not run says so")]
mod tests {
    use super::*;
    use crate::plan::{CudaBackwardPlan, CudaPlan, machines};
    use flashtile_core::codec::Codec;
    use flashtile_core::dtype::MaskKind;
    use flashtile_core::plan::{KernelChoice, PlanOptions};
    use flashtile_core::problem::{Dims, HeadShape, ProblemDesc, QOffset, SeqLens, Visibility};
    use flashtile_kernel::cuda::{Architecture, Compiler, Error};
    use rayon::prelude::*;
    use std::collections::HashSet;

    /// The compiler, if there is one; says so where there is none.
    fn compiler() -> Option<Compiler> {
        Compiler::load().map_err(|why| println!("SKIPPED, no kernel was compiled: {why}")).ok()
    }

    /// Kernels of every kind: dtypes, widths, tiles, pages, masks.
    fn problems() -> Vec<ProblemDesc> {
        let dims = |q_len: usize, dim: usize, value_dim: usize| Dims {
            batch: 1,
            q_heads: 8,
            kv_heads: 8,
            q_len,
            kv_len: 4096,
            head_dim: dim,
            value_dim,
        };
        let mut all = Vec::new();
        for (dtype, q_len, dim, value_dim) in [
            (Dtype::BF16, 4096, 64, 64),
            (Dtype::BF16, 1, 128, 128),
            (Dtype::F16, 100, 96, 96),
            (Dtype::BF16, 8192, 128, 128),
            (Dtype::F16, 300, 256, 256),
            (Dtype::BF16, 200, 512, 512),
            (Dtype::F32, 50, 192, 128),
        ] {
            all.push(ProblemDesc::new(dims(q_len, dim, value_dim), dtype));
        }
        let mut masked = ProblemDesc::new(dims(70, 64, 64), Dtype::F16);
        masked.mask = Some(MaskKind::Bool);
        let mut cached = ProblemDesc::cached(
            HeadShape { q_heads: 8, kv_heads: 2, head_dim: 80, value_dim: 80 },
            Dtype::F32,
            &[SeqLens { q_len: 3, kv_len: 500 }, SeqLens { q_len: 90, kv_len: 900 }],
        );
        cached.tree = true;
        cached.visibility = Visibility::causal();
        let mut with_softcap = ProblemDesc::new(dims(1, 64, 64), Dtype::BF16);
        with_softcap.softcap = Some(30.0);
        for desc in [&mut masked, &mut with_softcap] {
            desc.q_offset = Some(QOffset::BottomRight);
        }
        all.extend([masked, cached, with_softcap]);
        all
    }

    /// Gradients of every type and head dimension, with each way to change scores.
    fn problems_of_training() -> Vec<ProblemDesc> {
        let mut all = Vec::new();
        for (dtype, dim) in
            [Dtype::BF16, Dtype::F16].into_iter().flat_map(|dtype| [(dtype, 64), (dtype, 128)])
        {
            let dims = Dims {
                batch: 1,
                q_heads: 2,
                kv_heads: 1,
                q_len: 512,
                kv_len: 512,
                head_dim: dim,
                value_dim: dim,
            };
            let plain = ProblemDesc::new(dims, dtype);
            let (mut softcap, mut alibi, mut chunks) = (plain.clone(), plain.clone(), plain.clone());
            (softcap.softcap, alibi.alibi) = (Some(30.0), true);
            chunks.visibility = Visibility::causal().chunked(100);
            all.extend([plain, softcap, alibi, chunks]);
        }
        for (dim, value_dim) in [(256, 256), (192, 128)] {
            let mut wide = all[0].clone();
            (wide.dims.head_dim, wide.dims.value_dim) = (dim, value_dim);
            all.push(wide);
        }
        all
    }

    /// Which problems are compiled for which of several devices.
    #[derive(Clone, Copy, PartialEq)]
    enum Devices {
        /// Each for one, in turn.
        InTurn,
        All,
    }

    impl Devices {
        fn take(self, problem: usize, device: usize, devices: usize) -> bool {
            self == Self::All || problem % devices == device
        }
    }

    #[test]
    fn kernels_compile() {
        compile_kernels(Devices::InTurn);
    }

    #[test]
    #[ignore = "takes minutes: NVRTC compiles one program at a time"]
    fn kernels_compile_for_every_capability() {
        compile_kernels(Devices::All);
    }

    fn compile_kernels(which: Devices) {
        let Some(compiler) = compiler() else { return };
        let mut wanted: HashSet<(Architecture, Source)> = HashSet::new();
        for (device, facts) in [machines::A100, machines::RTX_4090, machines::H100].into_iter().enumerate() {
            let target = compiler.target(facts.capability);
            let mut add = |source| wanted.insert((target.clone(), source));
            for (n, desc) in problems().into_iter().enumerate() {
                if !which.take(n, device, 3) {
                    continue;
                }
                let plan = CudaPlan::new(&desc.validate().unwrap(), &facts, PlanOptions::default()).unwrap();
                for launch in plan.native().unwrap().launches() {
                    let access = if n % 3 == 2 { Access::Element } else { Access::Vector };
                    add(Source::native(&launch.kernel, access));
                }
            }
            for source in [Source::mask_tiles(), Source::limits()] {
                add(source);
            }
            let has_wgmma = facts.capability == (9, 0) && compiler.version().0 >= 12;
            if has_wgmma {
                add(Source::sm90_limits());
            }
            for (n, desc) in problems_of_training().into_iter().enumerate() {
                // The compiler takes seconds for each: of one type and head dimension with each way to change scores, half of them by mma.sync.
                let is_wide = desc.dims.head_dim > 128;
                let is_taken =
                    if is_wide { device == 0 } else { n % 5 == 0 && (facts.wgmma || n / 5 % 2 != device) };
                if facts.wgmma && !has_wgmma || which == Devices::InTurn && !is_taken {
                    continue;
                }
                let plan = CudaBackwardPlan::new(&desc.validate().unwrap(), &facts, PlanOptions::default());
                // A device with less shared memory has none for wide rows.
                let plan = plan.unwrap();
                let Some(native) = plan.native() else { continue };
                add(Source::backward(native));
                add(Source::backward_prepare(native));
            }
        }
        println!("{} programs", wanted.len());
        let failed: Vec<String> = wanted
            .into_par_iter()
            .filter_map(|(target, source)| match compiler.compile(&source.program(), &target) {
                Ok(code) => spilled(&source, &code),
                Err(why) => Some(format!("{}: {why}", target.name)),
            })
            .collect();
        assert!(failed.is_empty(), "{}", failed.join("\n"));
    }

    /// A message if a backward kernel has more than 64 bytes of local memory.
    fn spilled(source: &Source, code: &[u8]) -> Option<String> {
        let bytes = local_bytes(code);
        (matches!(source.family, Family::Sm80Backward | Family::Sm90Backward)
            && bytes.is_none_or(|bytes| bytes > 64))
        .then(|| format!("{}: {bytes:?} bytes of local memory", source.name))
    }

    /// Bytes of local memory of a thread, as machine code says (`EIATTR_FRAME_SIZE`).
    fn local_bytes(code: &[u8]) -> Option<usize> {
        let at = code.windows(4).position(|bytes| bytes == [0x04, 0x11, 0x08, 0x00])?;
        let count = code.get(at + 8..at + 12)?.first_chunk()?;
        Some(u32::from_le_bytes(*count) as usize)
    }

    /// Kernels of every width, tile and way to read rows. `take` chooses among them by their number.
    fn sm90_sources(take: impl Fn(usize) -> bool) -> Vec<Source> {
        let mut sources = Vec::new();
        for (dtype, q_len, dim, value_dim, window) in [
            // Two warpgroups, four, and three with tiles of 96 and 112 keys.
            (Dtype::BF16, 128, 64, 64, None),
            (Dtype::BF16, 256, 64, 64, None),
            (Dtype::F16, 384, 64, 64, Some(1023)),
            (Dtype::F16, 9000, 64, 64, None),
            (Dtype::F16, 600, 96, 96, None),
            (Dtype::BF16, 600, 128, 128, None),
            // Three warpgroups with tiles of 64 and of 96 keys.
            (Dtype::F16, 384, 128, 128, Some(127)),
            (Dtype::BF16, 960, 128, 128, Some(1000)),
            (Dtype::F16, 600, 192, 128, None),
            (Dtype::BF16, 600, 192, 192, None),
            // Tiles of 64 keys and of 80.
            (Dtype::BF16, 600, 256, 256, Some(1023)),
            (Dtype::F16, 5000, 256, 256, None),
            // Rows of q of two work tiles where most of these widths have one.
            (Dtype::F16, 600, 192, 64, None),
            (Dtype::BF16, 600, 384, 384, None),
            (Dtype::BF16, 600, 512, 512, None),
            (Dtype::F32, 600, 64, 64, None),
            (Dtype::F32, 600, 128, 128, None),
            (Dtype::F32, 600, 192, 128, None),
            (Dtype::F32, 600, 256, 256, None),
        ] {
            // Heads enough for every multiprocessor.
            let shape = HeadShape { q_heads: 256, kv_heads: 256, head_dim: dim, value_dim };
            let paged = ProblemDesc::cached(shape, dtype, &[SeqLens { q_len, kv_len: 2 * q_len }]);
            let dense = ProblemDesc::new(Dims { kv_len: q_len, ..paged.dims }, dtype);
            let (mut with_softcap, mut masked) = (dense.clone(), dense.clone());
            (with_softcap.softcap, with_softcap.alibi) = (Some(30.0), true);
            masked.mask = Some(MaskKind::Additive(dtype));
            let mut paged_with_alibi = paged.clone();
            (paged_with_alibi.alibi, paged_with_alibi.tree) = (true, true);
            for mut desc in [dense, paged, with_softcap, masked, paged_with_alibi] {
                desc.q_offset = Some(QOffset::BottomRight);
                desc.visibility = Visibility::window(window, Some(0));
                let problem = desc.validate().unwrap();
                let plan = CudaPlan::new(&problem, &machines::H100, PlanOptions::default()).unwrap();
                let kernel = &plan.native().unwrap().launches()[0].kernel;
                assert!(kernel.public.uses_wgmma, "{plan}");
                for source in Access::all(kernel).iter().map(|&access| Source::native(kernel, access)) {
                    if !sources.contains(&source) {
                        sources.push(source);
                    }
                }
            }
        }
        sources.into_iter().enumerate().filter(|(n, _)| take(*n)).map(|(_, source)| source).collect()
    }

    fn check_local_memory(sources: Vec<Source>) {
        let Some(compiler) = compiler().filter(|compiler| compiler.version() >= (12, 0)) else {
            return println!("SKIPPED, no kernel was compiled: NVRTC 12.0 knows wgmma");
        };
        let target = compiler.target((9, 0));
        let failed: Vec<String> = sources
            .into_par_iter()
            .filter_map(|source| match compiler.compile(&source.program(), &target) {
                Ok(code) => match local_bytes(&code) {
                    Some(0) => None,
                    bytes => Some(format!("{}: {bytes:?} bytes of local memory", source.name)),
                },
                Err(why) => Some(why.to_string()),
            })
            .collect();
        assert!(failed.is_empty(), "{}", failed.join("\n"));
    }

    #[test]
    fn wgmma_kernels_include_every_tile() {
        let sources = sm90_sources(|_| true);
        let of_d64 = ["128x128", "256x64", "192x96", "192x112"].map(|tile| format!("d64-wgmma{tile}"));
        let of_d128 = ["128x128", "192x64", "192x96"].map(|tile| format!("d128-wgmma{tile}"));
        let of_d256 = ["128x64", "128x80"].map(|tile| format!("d256-wgmma{tile}"));
        for tile in of_d64.into_iter().chain(of_d128).chain(of_d256) {
            for name in [tile.clone(), format!("{tile}-paged")] {
                assert!(sources.iter().any(|source| source.name.ends_with(&name)), "{name}");
            }
        }
    }

    #[test]
    fn wgmma_kernels_have_no_local_memory() {
        check_local_memory(sm90_sources(|n| n.is_multiple_of(29)));
    }

    #[test]
    #[ignore = "takes minutes: NVRTC compiles one program at a time"]
    fn every_wgmma_kernel_has_no_local_memory() {
        check_local_memory(sm90_sources(|_| true));
    }

    /// Registers of a thread, as machine code says (`EIATTR_REGCOUNT`).
    fn registers(code: &[u8]) -> Option<usize> {
        let at = code.windows(4).position(|bytes| bytes == [0x04, 0x2f, 0x08, 0x00])?;
        let count = code.get(at + 8..at + 12)?.first_chunk()?;
        Some(u32::from_le_bytes(*count) as usize)
    }

    #[test]
    fn portable_kernels_take_the_registers_that_plans_count_with() {
        compile_portable_kernels(Devices::InTurn);
    }

    #[test]
    #[ignore = "takes minutes: NVRTC compiles one program at a time"]
    fn portable_kernels_take_the_registers_that_plans_count_with_on_every_device() {
        compile_portable_kernels(Devices::All);
    }

    fn compile_portable_kernels(which: Devices) {
        use crate::portable::least_alignment;
        use flashtile_gpu::plan::USUAL_PAGE_SIZE;
        use flashtile_kernel::cuda::Program;
        let Some(compiler) = compiler() else { return };
        let mut all = Vec::new();
        for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
            for (q_len, dim) in [(1, 16), (9, 32), (1, 64), (9, 64), (1, 128), (9, 128)] {
                // Many heads have threadgroups of four SIMD groups, few have eight.
                let shape =
                    |heads| HeadShape { q_heads: heads, kv_heads: heads, head_dim: dim, value_dim: dim };
                let step =
                    |heads| ProblemDesc::cached(shape(heads), dtype, &[SeqLens { q_len, kv_len: 500 }]);
                let mut dense = ProblemDesc::new(step(2).dims, dtype);
                let step = step(128);
                (dense.alibi, dense.sinks) = (dim == 64, true);
                dense.q_offset = Some(QOffset::BottomRight);
                all.extend([(step, Access::Vector), (dense, Access::Vector)]);
            }
        }
        for (k, v) in [
            (Codec::Int8, Codec::Int8),
            (Codec::Fp8, Codec::Fp8),
            (Codec::Tq4, Codec::Tq4),
            (Codec::Int8, Codec::Tq5),
            (Codec::Tq6, Codec::Tq2),
        ] {
            for (q_len, dim, heads) in [(1, 64, 2), (9, 64, 128), (1, 128, 128), (1, 128, 2)] {
                let mut step = ProblemDesc::cached(
                    HeadShape { q_heads: heads, kv_heads: heads, head_dim: dim, value_dim: dim },
                    Dtype::BF16,
                    &[SeqLens { q_len, kv_len: 500 }],
                );
                (step.k_codec, step.v_codec) = (Some(k), Some(v));
                all.push((step, Access::Vector));
            }
        }
        for (dtype, dim) in [Dtype::F16, Dtype::BF16].into_iter().flat_map(|d| [32, 64, 128].map(|n| (d, n)))
        {
            let shape = HeadShape { q_heads: 32, kv_heads: 32, head_dim: dim, value_dim: dim };
            let chunks = ProblemDesc::cached(shape, dtype, &[SeqLens { q_len: 600, kv_len: 900 }; 4]);
            let mut dense = ProblemDesc::new(Dims { kv_len: 600, ..chunks.dims }, dtype);
            (dense.alibi, dense.sinks, dense.softcap) = (dim != 64, true, (dim == 64).then_some(30.0));
            dense.q_offset = Some(QOffset::BottomRight);
            all.extend([(chunks, Access::Vector), (dense, Access::Vector)]);
        }
        for (dtype, dim, codec) in [
            (Dtype::BF16, 128, Codec::Tq4),
            (Dtype::BF16, 64, Codec::Fp8),
            (Dtype::F16, 256, Codec::F16),
            (Dtype::F16, 100, Codec::F16),
            (Dtype::F16, 512, Codec::MlxTq4),
        ] {
            let shape = HeadShape { q_heads: 32, kv_heads: 32, head_dim: dim, value_dim: dim };
            let mut chunks = ProblemDesc::cached(shape, dtype, &[SeqLens { q_len: 600, kv_len: 900 }; 4]);
            (chunks.k_codec, chunks.v_codec) = (Some(codec), Some(codec));
            all.push((chunks, Access::Vector));
        }
        let masked = |desc: &ProblemDesc| desc.mask.is_some() || desc.tree || desc.softcap.is_some();
        all.extend(problems().into_iter().filter(masked).map(|desc| (desc, Access::Element)));
        let mut options = PlanOptions::default();
        options.kernels = KernelChoice::Portable;
        let mut wanted: Vec<(Architecture, Program, usize)> = Vec::new();
        // A program takes seconds: each device has the first of each kernel, and of the others one in ten.
        let (mut kernels, mut count) = (HashSet::new(), 0);
        for (device, facts) in [machines::T4, machines::H100].into_iter().enumerate() {
            let target = compiler.target(facts.capability);
            let mut seen = HashSet::new();
            for (n, (desc, access)) in all.iter().enumerate() {
                // A step and a dense problem follow each other: each device gets both.
                if !which.take(n + n / 2, device, 2) {
                    continue;
                }
                let plan = CudaPlan::new(&desc.clone().validate().unwrap(), &facts, options).unwrap();
                let portable = plan.portable().unwrap();
                let aligned = match access {
                    Access::Tma | Access::Vector => 16,
                    Access::Element => least_alignment(plan.problem()),
                };
                let page_sizes = if plan.problem().is_cached() { &[1, USUAL_PAGE_SIZE][..] } else { &[1] };
                let all = page_sizes.iter().map(|&size| portable.plan.loads(aligned, size).unwrap());
                for (n, (instance, constants)) in all.flat_map(|loads| loads.into_iter().enumerate()) {
                    let program = Program::of(&instance, &constants);
                    // Waves are counted in groups of the first kernel, of rows in vectors.
                    let counted = n == 0 && *access == Access::Vector;
                    let most = if counted { portable.plan.registers(&(&facts).into()) } else { 255 };
                    if seen.insert(program.clone()) {
                        count += 1;
                        let first = kernels.insert((device, instance.kernel().name));
                        if which == Devices::All || first || count % 10 == 0 {
                            wanted.push((target.clone(), program, most));
                        }
                    }
                }
            }
            // Measurements on such a device need this program.
            wanted.push((target.clone(), Source::limits().program(), 255));
        }
        println!("{} programs", wanted.len());
        let failed: Vec<String> = wanted
            .into_par_iter()
            .filter_map(|(target, program, most)| match compiler.compile(&program, &target) {
                Ok(code) => match registers(&code) {
                    Some(count) if (1..=most).contains(&count) => None,
                    count => Some(format!(
                        "{}: {} takes {count:?} registers, not {most}",
                        target.name, program.name
                    )),
                },
                Err(why) => Some(format!("{}: {why}", target.name)),
            })
            .collect();
        assert!(failed.is_empty(), "{}", failed.join("\n"));
    }

    #[test]
    fn another_layout_of_parameters_does_not_compile() {
        let Some(compiler) = compiler() else { return };
        let mut program = Source::mask_tiles().program();
        let size = |bytes: usize| format!("static_assert(sizeof(MaskTileParams) == {bytes});");
        let bytes = size_of::<MaskTileParams>();
        assert!(program.source.contains(&size(bytes)));
        program.source = program.source.replace(&size(bytes), &size(bytes + 8));
        match compiler.compile(&program, &compiler.target((8, 0))) {
            Err(Error::Compile { log, .. }) => assert!(log.contains("static assertion failed"), "{log}"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_kernel_that_does_not_compile_is_named_with_the_log() {
        let Some(compiler) = compiler() else { return };
        let mut source = Source::mask_tiles();
        source.constants = "constexpr int MASK_TILE_ROWS = undeclared;".to_owned();
        match compiler.compile(&source.program(), &compiler.target((8, 0))) {
            Err(Error::Compile { kernel, log }) => {
                assert_eq!(kernel, "cuda-mask_tiles-mask");
                assert!(log.contains("identifier \"undeclared\" is undefined"), "{log}");
            }
            other => panic!("{other:?}"),
        }
    }
}
