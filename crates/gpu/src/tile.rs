//! Tiles of the portable kernel, and which one a problem gets.

use crate::facts::GpuFacts;
use crate::shape::Tile;
use flashtile_core::codec::Codec;
use flashtile_core::dtype::Dtype;
use flashtile_core::plan::Unsupported;
use flashtile_core::problem::{Problem, Sequences};

/// Registers that a thread can have, rounded up as they are allocated.
const MAX_REGISTERS: usize = 256;

/// The most splits of the keys of a row: merging more takes longer than their threadgroups gain.
const MAX_SPLITS: usize = 128;

/// How a threadgroup of the portable kernel divides its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PortableTile {
    /// Query rows: 8, 16 or 32.
    rows: usize,
    /// Keys that a SIMD group multiplies at a time: 16 or 32.
    simd_keys: usize,
    /// SIMD groups, each with keys of its own: 1, 2, 4 or 8.
    simds: usize,
    /// Threadgroups that a core holds at a time.
    resident: usize,
}

impl PortableTile {
    /// A tile of `rows` query rows and of `simds` SIMD groups with `simd_keys` keys each, for `resident` threadgroups a core. A
    /// plan refuses tiles that the kernel cannot have.
    #[must_use]
    pub const fn new(rows: usize, simd_keys: usize, simds: usize, resident: usize) -> Self {
        Self { rows, simd_keys, simds, resident }
    }

    pub(crate) fn check(&self) -> Result<(), Unsupported> {
        let refused = |why| Err(Unsupported::Tile { why });
        if ![8, 16, 32].contains(&self.rows) || ![16, 32].contains(&self.simd_keys) {
            return refused("portable tiles have 8, 16 or 32 rows, and 16 or 32 keys a SIMD group");
        }
        if ![1, 2, 4, 8].contains(&self.simds) || !(1..=16).contains(&self.resident) {
            return refused(
                "portable tiles have 1, 2, 4 or 8 SIMD groups, and 1 to 16 groups a multiprocessor",
            );
        }
        Ok(())
    }

    /// Query rows of a tile.
    #[must_use]
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Threadgroups that a core holds at a time.
    #[must_use]
    pub const fn resident(&self) -> usize {
        self.resident
    }

    /// Keys that the SIMD groups multiply at a time.
    #[must_use]
    pub const fn keys(&self) -> usize {
        self.simd_keys * self.simds
    }

    /// Threads of a threadgroup.
    #[must_use]
    pub const fn threads(&self) -> usize {
        32 * self.simds
    }

    pub(crate) const fn with_splits(&self, splits: usize) -> Tile {
        Tile { rows: self.rows / 8, keys: self.simd_keys / 16, simds: self.simds, splits }
    }

    /// Bytes of shared memory of a threadgroup, for the larger head dimension `dim`: its queries or its outputs in f32, the factor
    /// and the addend of the scores, and the row maximum and row sum of each SIMD group.
    #[must_use]
    pub const fn shared_bytes(&self, dim: usize) -> usize {
        self.rows * (dim + 2 + 2 * self.simds) * 4
    }

    /// The tile of a problem on a device: 16 rows share what is read where there are more than 8 and registers hold them.
    pub(crate) fn of(problem: &Problem, facts: &GpuFacts) -> Self {
        let gqa_group = problem.dims().gqa_group();
        let max_rows = problem.sequences().iter().map(|s| s.q_len * gqa_group).max().unwrap_or(0);
        let rows = if max_rows > 8 && fits_16_rows(problem) { 16 } else { 8 };
        let keys = Tile::of(problem.k_codec(), problem.dims().head_dim).keys;
        let mut tile = Self::new(rows, if rows == 8 { 16 * keys } else { 16 }, 4, 1);
        let registers = tile.registers(problem, facts) * tile.threads();
        tile.resident = facts.resident(tile.shared_bytes(dim(problem)), registers).clamp(1, 16);
        tile
    }

    /// Registers of a thread, at least as many as NVRTC 13 gives the kernel for rows that start on 16 bytes.
    pub(crate) fn registers(&self, problem: &Problem, facts: &GpuFacts) -> usize {
        if problem.is_quantized() {
            return self.registers_of_codes(problem);
        }
        let shuffled = problem.dtype() == Dtype::BF16 && !facts.multiplies_bf16;
        match (self.rows, words(problem)) {
            (8, 0..=32) => 96,
            (8, 33..=64) if !shuffled => 128,
            (8, 33..=64) | (16, 0..=32) => 168,
            (8, 65..=128) | (16, 33..=64) if !shuffled => 168,
            _ => MAX_REGISTERS,
        }
    }

    /// The same where keys or values are codes, which become f16 in registers.
    fn registers_of_codes(&self, problem: &Problem) -> usize {
        let simple = [problem.k_codec(), problem.v_codec()]
            .into_iter()
            .all(|codec| matches!(codec, Codec::Int8 | Codec::Fp8 | Codec::Tq2 | Codec::Tq3 | Codec::Tq4));
        match (self.rows, self.simd_keys, dim(problem)) {
            (8, 16, ..=64) if simple => 128,
            (8 | 16, 16, ..=64) => 168,
            (8, 32, ..=64) | (8, 16, ..=128) if simple => 168,
            _ => MAX_REGISTERS,
        }
    }

    /// The splits of a row's keys: as many as a caller asks for; otherwise as many as fill a device on which `groups` threadgroups run
    /// without.
    pub(crate) fn splits(
        &self,
        problem: &Problem,
        facts: &GpuFacts,
        asked: Option<usize>,
        groups: usize,
    ) -> Result<usize, Unsupported> {
        if let Some(got) = asked {
            let blocks = |s| problem.visible_union(s, 0..s.q_len).len().div_ceil(self.keys());
            let max = problem.sequences().iter().map(blocks).max().unwrap_or(0).max(1);
            return if got == 0 || got > max { Err(Unsupported::Splits { got, max }) } else { Ok(got) };
        }
        Ok((facts.cores * self.resident / groups.max(1)).clamp(1, self.max_splits(problem)))
    }

    /// The most splits that the keys of a tile are worth, whatever lengths an update may bring.
    fn max_splits(&self, problem: &Problem) -> usize {
        let (dims, visibility) = (problem.dims(), problem.desc().visibility);
        let longest = || problem.sequences().iter().map(|s| s.kv_len).max().unwrap_or(0);
        let held = match problem.desc().sequences {
            Sequences::Cached { .. } => usize::MAX,
            Sequences::Padded { .. } => dims.kv_len,
            Sequences::Dense | Sequences::Packed { .. } => longest(),
        };
        let band = match (visibility.left(), visibility.right()) {
            // Of the positions of a tile's rows.
            (Some(left), Some(right)) => {
                left.saturating_add(right).saturating_add(self.rows.div_ceil(dims.gqa_group()) + 1)
            }
            _ => usize::MAX,
        };
        held.min(band).div_ceil(self.keys()).clamp(1, MAX_SPLITS)
    }
}

/// The larger head dimension.
pub(crate) fn dim(problem: &Problem) -> usize {
    problem.dims().head_dim.max(problem.dims().value_dim)
}

/// Pairs of bytes of a row of elements.
fn words(problem: &Problem) -> usize {
    dim(problem) * problem.dtype().bytes() / 2
}

/// Whether registers hold what 16 rows share.
fn fits_16_rows(problem: &Problem) -> bool {
    if problem.is_quantized() { dim(problem) <= 64 } else { words(problem) <= 128 }
}
