//! Tiles of the portable kernel, and which one a problem gets.

use crate::codecs::format_id;
use crate::facts::GpuFacts;
use crate::kernels::formats::padded;
use crate::kernels::prefill::ROW_PADDING;
use crate::kernels::rows::{larger, nibble_bytes};
use flashtile_core::codec::Codec;
use flashtile_core::dtype::Dtype;
use flashtile_core::plan::Unsupported;
use flashtile_core::problem::{Problem, Sequences};

/// Registers of a thread that has as many as NVRTC gives one, rounded up as they are allocated.
const MAX_REGISTERS: usize = 256;

/// Copies of the table of `tq4` where shared memory is scarce, over rows of up to `dim` elements: a threadgroup stays within 32 KiB.
#[must_use]
pub const fn min_copies(dim: usize) -> usize {
    if dim > 256 { 8 } else { 16 }
}

/// The most splits of the keys of a row: merging more takes longer than their threadgroups gain.
const MAX_SPLITS: usize = 128;

/// Up to this many rows of a key/value head, decode loads its keys twice at most.
const MAX_DECODE_ROWS: usize = 32;

/// The longest rows whose queries and outputs registers hold beside the scores of a block.
pub(crate) const MAX_PREFILL_DIM: usize = 128;

/// Whether prefill takes the rows of a problem: elements of the type of q, no more than registers hold.
pub(crate) fn takes_prefill(problem: &Problem) -> bool {
    let elements = [problem.k_codec(), problem.v_codec()] == [Codec::of(problem.dtype()); 2];
    let of_16 = row_dims(problem).into_iter().all(|dim| dim.is_multiple_of(16));
    elements && of_16 && dim(problem) <= MAX_PREFILL_DIM
}

/// How a threadgroup of the portable kernels divides its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PortableTile {
    /// Query rows.
    rows: usize,
    /// Keys that a SIMD group multiplies at a time.
    simd_keys: usize,
    /// SIMD groups, each with keys of its own, or, of prefill, with rows of its own.
    simds: usize,
    /// Threadgroups that a core holds at a time.
    resident: usize,
    /// Copies of the table by which decode reads `tq4`; 0 where they are as few as need be.
    copies: usize,
    /// Whether the kernel keeps its rows and streams all their keys.
    is_prefill: bool,
}

/// A tile, and the splits of the keys of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(clippy::exhaustive_structs)]
pub struct Tiling {
    /// The tile.
    pub tile: PortableTile,
    /// The splits; 1 for prefill.
    pub splits: usize,
}

impl From<PortableTile> for Tiling {
    /// Without splits.
    fn from(tile: PortableTile) -> Self {
        tile.with_splits(1)
    }
}

impl PortableTile {
    /// A tile of decode: `rows` query rows (8, 16 or 32) and `simds` SIMD groups (1, 2, 4 or 8) with `simd_keys` keys each (16 or 32),
    /// for `resident` threadgroups a core. A plan refuses tiles that the kernel cannot have.
    #[must_use]
    pub const fn new(rows: usize, simd_keys: usize, simds: usize, resident: usize) -> Self {
        Self { rows, simd_keys, simds, resident, copies: 0, is_prefill: false }
    }

    /// A tile of prefill: `simds` SIMD groups (1, 2, 4 or 8) share `rows` query rows (16 or 32 each), and copy `keys` keys (16, 32, 64
    /// or 128) at a time, for `resident` threadgroups a core. A plan refuses tiles that the kernel cannot have.
    #[must_use]
    pub const fn prefill(rows: usize, keys: usize, simds: usize, resident: usize) -> Self {
        Self { rows, simd_keys: keys, simds, resident, copies: 0, is_prefill: true }
    }

    /// The fastest tile of decode where tiles were measured: 32 keys at a time over `int8`. Others have more SIMD groups a core with 16.
    #[must_use]
    pub const fn default_decode(k: Codec, head_dim: usize) -> Self {
        let fit = matches!(k, Codec::Int8) && head_dim <= 128;
        Self::new(8, if fit { 32 } else { 16 }, 4, 1)
    }

    /// The tile of prefill where a device has shared memory for it. 128 rows share what is read. Of rows of up to 64 elements a SIMD
    /// group has 32, which halves what it reads of shared memory for each product; of longer ones registers hold 16.
    #[must_use]
    pub const fn default_prefill(dim: usize) -> Self {
        if dim <= 64 { Self::prefill(128, 32, 4, 2) } else { Self::prefill(128, 64, 8, 1) }
    }

    /// The tile on a device: with a copy of the table of `tq4` for every lane where a core has shared memory for sixteen SIMD groups.
    pub(crate) const fn on(self, facts: &GpuFacts) -> Self {
        let copies = if facts.shared_per_core >= 4 * (40 << 10) { 32 } else { 0 };
        Self { copies, ..self }
    }

    /// The tile with a number of splits of the keys of a row, which is 1 for prefill.
    #[must_use]
    pub const fn with_splits(self, splits: usize) -> Tiling {
        Tiling { tile: self, splits }
    }

    pub(crate) fn check(&self) -> Result<(), Unsupported> {
        let refused = |why| Err(Unsupported::Tile { why });
        if ![1, 2, 4, 8].contains(&self.simds) || !(1..=16).contains(&self.resident) {
            return refused(
                "portable tiles have 1, 2, 4 or 8 SIMD groups, and 1 to 16 groups a multiprocessor",
            );
        }
        if self.is_prefill {
            let rows = self.rows / self.simds;
            if ![16, 32].contains(&rows) || !self.rows.is_multiple_of(self.simds) {
                return refused("portable tiles of prefill have 16 or 32 rows a SIMD group");
            }
            if ![16, 32, 64, 128].contains(&self.simd_keys) {
                return refused("portable tiles of prefill have 16, 32, 64 or 128 keys");
            }
        } else if ![8, 16, 32].contains(&self.rows) || ![16, 32].contains(&self.simd_keys) {
            return refused("portable tiles have 8, 16 or 32 rows, and 16 or 32 keys a SIMD group");
        }
        Ok(())
    }

    /// Query rows of a tile.
    #[must_use]
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Copies of the table by which decode reads `tq4`, over rows of up to `dim` elements: a threadgroup stays within the 48 KiB that
    /// every NVIDIA GPU gives a kernel unasked.
    pub(crate) const fn copies(&self, dim: usize) -> usize {
        if self.copies > 0 && dim <= 256 { self.copies } else { min_copies(dim) }
    }

    /// Threadgroups that a core holds at a time.
    #[must_use]
    pub const fn resident(&self) -> usize {
        self.resident
    }

    /// Whether the kernel keeps its rows and streams all their keys: `prefill`. Otherwise keys are split: `decode`.
    #[must_use]
    pub const fn is_prefill(&self) -> bool {
        self.is_prefill
    }

    /// Keys that the SIMD groups multiply at a time.
    #[must_use]
    pub const fn keys(&self) -> usize {
        if self.is_prefill { self.simd_keys } else { self.simd_keys * self.simds }
    }

    /// Threads of a threadgroup.
    #[must_use]
    pub const fn threads(&self) -> usize {
        32 * self.simds
    }

    /// SIMD groups of a threadgroup.
    #[must_use]
    pub const fn simds(&self) -> usize {
        self.simds
    }

    /// Keys that a SIMD group multiplies at a time.
    pub(crate) const fn simd_keys(&self) -> usize {
        self.simd_keys
    }

    /// Bytes of shared memory of a threadgroup over rows of `dims` elements of q, k and of v. Of decode: queries or outputs in f32, the
    /// factor and the addend of the scores, the row maximum and row sum of each SIMD group, and the table of `tq4`. Of prefill: a block
    /// of keys and one of values, and flags.
    #[must_use]
    pub const fn shared_bytes(&self, dims: [usize; 2], dtype: Dtype, codecs: [Codec; 2]) -> usize {
        let [head_dim, value_dim] = dims;
        if self.is_prefill {
            let row = (head_dim + value_dim + 2 * ROW_PADDING) * dtype.bytes();
            return self.simd_keys * row + (4 * (1 + self.simds)).next_multiple_of(16);
        }
        let dim = padded(larger(head_dim, value_dim) as u32) as usize;
        let [k, v] = [format_id(codecs[0]), format_id(codecs[1])];
        self.rows * (dim + 2 + 2 * self.simds) * 4 + nibble_bytes(k, head_dim, v, value_dim, self.copies(dim))
    }

    fn shared_of(&self, problem: &Problem) -> usize {
        self.shared_bytes(row_dims(problem), problem.dtype(), [problem.k_codec(), problem.v_codec()])
    }

    /// Registers in which a thread of prefill holds queries, outputs, the scores of a block, and the words of it that it copies. Addresses
    /// and operands of products come on top; where they are too many, a compiler moves a few values to memory.
    fn held_by_prefill(&self, problem: &Problem) -> usize {
        let ([head_dim, value_dim], bytes) = (row_dims(problem), problem.dtype().bytes());
        let of_row = head_dim * bytes / 4 + value_dim + self.simd_keys;
        let block = self.simd_keys * dim(problem) * bytes / 4;
        self.rows / self.simds * of_row / 32 + block.div_ceil(self.threads())
    }

    /// The tile of a problem on a device. `asked` splits of keys are a matter of decode.
    pub(crate) fn of(problem: &Problem, facts: &GpuFacts, asked: Option<usize>) -> Self {
        let decode = Self::of_decode(problem, facts);
        if asked.is_some_and(|splits| splits > 1) {
            return decode;
        }
        Self::of_prefill(problem, facts).unwrap_or(decode)
    }

    /// 16 rows share what is read where there are more than 8 and registers hold them. Over elements a threadgroup has eight SIMD groups
    /// where threadgroups without splits are at most a quarter of the cores: a core has as many SIMD groups with half as many partial
    /// results to merge.
    fn of_decode(problem: &Problem, facts: &GpuFacts) -> Self {
        let rows = if max_rows(problem) > 8 && fits_16_rows(problem) { 16 } else { 8 };
        let keys = Self::default_decode(problem.k_codec(), problem.dims().head_dim).simd_keys;
        let groups = problem.dims().kv_heads.saturating_mul(tile_count(problem, rows));
        let few = !problem.is_quantized() && groups.saturating_mul(4) <= facts.cores;
        let simds = if few { 8 } else { 4 };
        let tile = Self::new(rows, if rows == 8 { keys } else { 16 }, simds.min(facts.max_simds()), 1);
        tile.on(facts).with_resident(problem, facts)
    }

    /// The tile of prefill, where there are enough rows for it: the largest with a threadgroup for every core.
    ///
    /// Decode takes about 2.5 times as long for the same rows on a full device, as every 16 rows load all keys. So prefill wins from
    /// two fifths of the cores on (half of them are asked for), and where its tiles have at most 2.5 times the rows that decode's have: most of a batch may be
    /// sequences of one row. Other problems stay with decode, which splits keys.
    fn of_prefill(problem: &Problem, facts: &GpuFacts) -> Option<Self> {
        let kv_heads = problem.dims().kv_heads;
        // Products of shuffles: more code than a block of prefill can have.
        let multiplied = match problem.dtype() {
            Dtype::F16 => true,
            Dtype::BF16 => facts.multiplies_bf16,
            Dtype::F32 => facts.multiplies_f32,
        };
        if !multiplied || !takes_prefill(problem) || max_rows(problem) <= MAX_DECODE_ROWS {
            return None;
        }
        let Self { rows, simd_keys: keys, simds, resident, .. } = Self::default_prefill(dim(problem));
        let simd_rows = rows / simds;
        // Fewer threads where a device has fewer. Half as many SIMD groups leave registers for twice as many threadgroups.
        let simds = simds.min(facts.max_simds());
        let [more, fewer] = [(simds, resident), ((simds / 2).max(1), 2 * resident)];
        // Fewer rows a SIMD group, then smaller blocks where registers or shared memory are fewer. Threads of fewer SIMD groups hold more.
        let shapes = [(simd_rows, keys), (16, keys), (simd_rows, keys / 2), (16, keys / 2)];
        let tile = |(simd_rows, keys), simds| Self::prefill(simd_rows * simds, keys, simds, 1);
        let shape = shapes.into_iter().find(|&shape| {
            let tile = tile(shape, fewer.0);
            tile.shared_of(problem) <= facts.shared_per_group
                && tile.held_by_prefill(problem) <= facts.registers_per_thread
        })?;
        let tiles = [more, fewer]
            .map(|(simds, resident)| Self { resident, ..tile(shape, simds) }.with_resident(problem, facts));
        let tiles_of = |rows: usize| tile_count(problem, rows);
        let groups = |tile: &Self| kv_heads.saturating_mul(tiles_of(tile.rows));
        let is_filled = |tile: &&Self| 2 * tile.rows * tiles_of(tile.rows) <= 5 * 16 * tiles_of(16);
        let mut filled = tiles.iter().filter(is_filled);
        let full = filled.clone().find(|tile| groups(tile) >= facts.cores);
        let half = || filled.rfind(|tile| 2 * groups(tile) >= facts.cores);
        full.or_else(half).copied()
    }

    /// The same, with as many threadgroups a core as it holds.
    fn with_resident(mut self, problem: &Problem, facts: &GpuFacts) -> Self {
        let registers = self.registers(problem, facts) * self.threads();
        let shared = self.shared_of(problem);
        self.resident = facts.resident(self.simds, shared, registers).clamp(1, 16);
        self
    }

    /// Registers of a thread, at least as many as NVRTC 13 gives the kernel for rows that start on 16 bytes; where a device has fewer, all
    /// that a thread can have.
    pub(crate) fn registers(&self, problem: &Problem, facts: &GpuFacts) -> usize {
        if self.is_prefill {
            return self.registers_of_prefill(facts);
        }
        let of_four = if problem.is_quantized() {
            self.registers_of_codes(problem)
        } else {
            self.registers_of_elements(problem, facts)
        };
        let registers = match of_four {
            // With eight SIMD groups the compiler takes a few more, where they cost no threadgroup.
            ..=128 if self.simds > 4 => 128,
            _ if self.simds > 4 => MAX_REGISTERS,
            registers => registers,
        };
        registers.min(facts.registers_per_thread)
    }

    /// The same where keys and values are elements, for at most four SIMD groups.
    fn registers_of_elements(&self, problem: &Problem, facts: &GpuFacts) -> usize {
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

    /// The same of prefill: as many as `resident` threadgroups leave, in steps of 8.
    fn registers_of_prefill(&self, facts: &GpuFacts) -> usize {
        (facts.registers_per_core / (self.threads() * self.resident) / 8 * 8).min(facts.registers_per_thread)
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
        if self.is_prefill {
            return match asked {
                None | Some(1) => Ok(1),
                Some(got) => Err(Unsupported::Splits { got, max: 1 }),
            };
        }
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

/// Tiles of `rows` rows of a key/value head, of all sequences.
fn tile_count(problem: &Problem, rows: usize) -> usize {
    let gqa_group = problem.dims().gqa_group();
    problem.sequences().iter().map(|s| s.q_len.saturating_mul(gqa_group).div_ceil(rows)).sum()
}

/// Rows of a key/value head of the longest sequence.
fn max_rows(problem: &Problem) -> usize {
    let rows = |q_len: usize| q_len.saturating_mul(problem.dims().gqa_group());
    problem.sequences().iter().map(|s| rows(s.q_len)).max().unwrap_or(0)
}

/// Elements of a row of q or k, and of v.
fn row_dims(problem: &Problem) -> [usize; 2] {
    [problem.dims().head_dim, problem.dims().value_dim]
}

/// Elements of the longer row, as products have them.
fn dim(problem: &Problem) -> usize {
    padded(problem.dims().head_dim.max(problem.dims().value_dim) as u32) as usize
}

/// Pairs of bytes of a row of elements.
fn words(problem: &Problem) -> usize {
    dim(problem) * problem.dtype().bytes() / 2
}

/// Whether registers hold what 16 rows share.
fn fits_16_rows(problem: &Problem) -> bool {
    if problem.is_quantized() { dim(problem) <= 64 } else { words(problem) <= 128 }
}
