//! Tiles of the portable kernel, and which one a problem gets.

use crate::codecs::{format_id, scalar_type};
use crate::facts::GpuFacts;
use crate::kernels::decode::decode;
use crate::kernels::formats::{has_half_norms, is_codes, padded};
use crate::kernels::nibbles::{MIN_COPIES, min_copies};
use crate::kernels::prefill::block::{block_columns, key_blocks, row_turns, row_words};
use crate::kernels::prefill::prefill;
use crate::kernels::rows::product_type;
use crate::variant::Variant;
use flashtile_core::codec::Codec;
use flashtile_core::dtype::Dtype;
use flashtile_core::plan::Unsupported;
use flashtile_core::problem::{Problem, Sequences};
use flashtile_kernel::source::GenericsError;
use flashtile_kernel::{Generic, Instance, ScalarType};

/// Registers of a thread that has as many as NVRTC gives one, rounded up as they are allocated.
const MAX_REGISTERS: usize = 256;

/// The most splits of the keys of a row: merging more takes longer than their threadgroups gain.
pub(crate) const MAX_SPLITS: usize = 128;

/// Up to this many rows of a key/value head, decode loads its keys twice at most.
const MAX_DECODE_ROWS: usize = 32;

/// Coordinates of keys that a split of prefill has at least, 1024 keys of 128: with fewer, merging takes
/// longer than splits save.
const MIN_SPLIT_COORDINATES: usize = 1024 * 128;

/// Threads of a threadgroup that merges the splits of a row.
const MERGE_THREADS: usize = 128;

/// How a threadgroup of the portable kernels divides its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PortableTile {
    /// Query rows.
    rows: usize,
    /// Keys that a SIMD group multiplies at a time.
    simd_keys: usize,
    /// SIMD groups, each with keys of its own, or, of prefill, in teams with rows of their own.
    simds: usize,
    /// SIMD groups of a team of prefill, which divide the columns of its rows; 1 of decode.
    team: usize,
    /// Threadgroups that a core holds at a time.
    resident: usize,
    /// Copies of the table by which `tq4` is decoded; 0 where they are as few as need be.
    copies: usize,
    /// True if the kernel is `prefill`, which keeps its rows and streams their keys.
    is_prefill: bool,
    /// True if keys and values of prefill take the same shared memory in turn.
    one_block: bool,
}

/// A tile, and the splits of the keys of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(clippy::exhaustive_structs)]
pub struct Tiling {
    /// The tile.
    pub tile: PortableTile,
    /// The splits.
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
        Self { rows, simd_keys, simds, team: 1, resident, copies: 0, is_prefill: false, one_block: false }
    }

    /// A tile of prefill: `simds` SIMD groups (1, 2, 4 or 8) share `rows` query rows (16 or 32 each), and copy `keys` keys (16, 32, 64
    /// or 128) at a time, for `resident` threadgroups a core. A plan refuses tiles that the kernel cannot have.
    /// [`with_team`](Self::with_team) gives several SIMD groups the same rows.
    #[must_use]
    pub const fn prefill(rows: usize, keys: usize, simds: usize, resident: usize) -> Self {
        Self {
            rows,
            simd_keys: keys,
            simds,
            team: 1,
            resident,
            copies: 0,
            is_prefill: true,
            one_block: false,
        }
    }

    /// The tile of prefill with teams of `team` SIMD groups (1, 2, 4 or 8): each team has 16 or 32 rows, whose columns its SIMD groups
    /// divide.
    #[must_use]
    pub const fn with_team(self, team: usize) -> Self {
        Self { team, ..self }
    }

    /// The tile of prefill whose keys and values take the same shared memory in turn: half as much, for one more barrier a block, or two
    /// without teams. A plan refuses it where keys and values are not alike: of one type and one number of columns.
    #[must_use]
    pub const fn with_one_block(self) -> Self {
        Self { one_block: true, ..self }
    }

    /// The fastest tile of decode where tiles were measured: 32 keys at a time over `int8`. Others have more SIMD groups a core with 16.
    #[must_use]
    pub const fn default_decode(k: Codec, head_dim: usize) -> Self {
        let fit = matches!(k, Codec::Int8) && head_dim <= 128;
        Self::new(8, if fit { 32 } else { 16 }, 4, 1)
    }

    /// The tile of prefill where a device has shared memory for it. 128 rows share the keys and values that
    /// are read. With rows of up to 64 elements a SIMD group has 32 rows, so that it reads half as much of
    /// shared memory for each product; with longer ones registers hold 16 rows of 128 columns.
    #[must_use]
    pub const fn default_prefill(dim: usize) -> Self {
        match dim {
            ..=64 => Self::prefill(128, 64, 4, 2),
            65..=128 => Self::prefill(128, 64, 8, 1),
            129..=256 => Self::prefill(64, 64, 8, 1).with_team(2),
            257.. => Self::prefill(32, 32, 8, 1).with_team(4),
        }
    }

    /// The tile on a device: with a copy of the table of `tq4` for every lane where a core has shared memory for sixteen SIMD groups.
    pub(crate) const fn on(self, facts: &GpuFacts) -> Self {
        let copies = if facts.shared_per_core >= 4 * (40 << 10) { 32 } else { 0 };
        Self { copies, ..self }
    }

    /// The tile with a number of splits of the keys of a row.
    #[must_use]
    pub const fn with_splits(self, splits: usize) -> Tiling {
        Tiling { tile: self, splits }
    }

    pub(crate) fn check(&self, problem: &Problem) -> Result<(), Unsupported> {
        let refused = |why| Err(Unsupported::Tile { why });
        if ![1, 2, 4, 8].contains(&self.simds) || !(1..=16).contains(&self.resident) {
            return refused(
                "portable tiles have 1, 2, 4 or 8 SIMD groups, and 1 to 16 groups a multiprocessor",
            );
        }
        if self.is_prefill {
            if ![1, 2, 4, 8].contains(&self.team) || self.team > self.simds {
                return refused("portable tiles of prefill have teams of 1, 2, 4 or 8 of their SIMD groups");
            }
            if ![16, 32].contains(&self.team_rows()) || self.team_rows() * self.simds != self.rows * self.team
            {
                return refused("portable tiles of prefill have 16 or 32 rows a team of SIMD groups");
            }
            if self.simd_keys > 32 * self.simds {
                return refused("portable tiles of prefill have up to 32 keys a SIMD group");
            }
            if self.team == 1 && has_halves(problem) {
                return refused(
                    "portable tiles of prefill have teams where halves of rows have norms of their own",
                );
            }
            if ![16, 32, 64, 128].contains(&self.simd_keys) {
                return refused("portable tiles of prefill have 16, 32, 64 or 128 keys");
            }
            if self.one_block && !are_alike(&Variant::of(problem)) {
                return refused(
                    "portable tiles of prefill have one block where keys and values have one type and length",
                );
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

    /// Copies of the table by which `tq4` is decoded, over rows of up to `dim` elements: a threadgroup of decode stays within the 48 KiB that
    /// every NVIDIA GPU gives a kernel unasked. Prefill decodes a block once for all its rows, and has few where shared memory is scarce.
    pub(crate) const fn copies(&self, dim: usize) -> usize {
        if self.is_prefill {
            return if self.copies > 0 { self.copies } else { MIN_COPIES };
        }
        if self.copies > 0 && dim <= 256 { self.copies } else { min_copies(dim) }
    }

    /// Threadgroups that a core holds at a time.
    #[must_use]
    pub const fn resident(&self) -> usize {
        self.resident
    }

    /// Returns true if the kernel is `prefill`, which keeps its rows and streams their keys. Otherwise it is
    /// `decode`, whose SIMD groups divide keys.
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

    /// Rows of a team of prefill.
    pub(crate) const fn team_rows(&self) -> usize {
        self.rows * self.team / self.simds
    }

    /// The instance of [`decode()`](crate::kernels::decode::decode()) or [`prefill()`](crate::kernels::prefill::prefill()) with this tile.
    ///
    /// # Errors
    /// [`GenericsError`].
    pub fn instance(&self, variant: &Variant) -> Result<Instance, GenericsError> {
        let mut generics = vec![
            Generic::Type(scalar_type(variant.dtype)),
            Generic::U32(format_id(variant.k_codec)),
            Generic::U32(format_id(variant.v_codec)),
            Generic::Usize(variant.head_dim),
            Generic::Usize(variant.value_dim),
        ];
        let (keys, simds) = (self.simd_keys / 16, self.simds);
        let copies = self.copies(variant.head_dim.max(variant.value_dim));
        if self.is_prefill {
            let blocks = if self.one_block { 1 } else { 2 };
            let team = [self.team_rows() / 16, keys, simds, self.team, copies, self.resident, blocks];
            generics.extend(team.map(Generic::Usize));
            return prefill::specialise(&generics);
        }
        generics.extend([self.rows / 8, keys, simds, copies].map(Generic::Usize));
        decode::specialise(&generics)
    }

    /// Bytes of shared memory of a threadgroup.
    fn shared_of(&self, variant: &Variant) -> usize {
        self.instance(variant).map_or(usize::MAX, |instance| instance.shared_bytes())
    }

    /// Registers in which a thread of prefill holds queries, outputs, the scores of a block, and the words of it that it copies. Addresses
    /// and operands of products come on top; where they are too many, a compiler moves a few values to memory.
    fn held_by_prefill(&self, variant: &Variant) -> usize {
        let Variant { head_dim, value_dim, .. } = *variant;
        let [k, v] = [variant.k_codec, variant.v_codec].map(format_id);
        let products = [k, v].map(|format| product_type(scalar_type(variant.dtype), format));
        // Queries have rounding residuals too where keys are codes.
        let query = products[0].bytes() * if is_codes(k) { 2 } else { 1 };
        let columns = |dim| block_columns(dim, self.team) / self.team;
        let of_row = columns(head_dim) * query / 4 + columns(value_dim) + self.simd_keys;
        let words = |product, format, dim| {
            row_words(product, format, dim) * row_turns(product, format, dim, self.simd_keys / 16, self.simds)
        };
        let block = words(products[0], k, head_dim).max(words(products[1], v, value_dim));
        self.team_rows() * of_row / 32 + block
    }

    /// The tile of a problem on a device.
    pub(crate) fn of(problem: &Problem, facts: &GpuFacts) -> Self {
        Self::of_prefill(problem, facts).unwrap_or_else(|| Self::of_decode(problem, facts))
    }

    /// 16 rows share the keys and values that are read where there are more than 8 rows and registers hold
    /// them. Over elements a threadgroup has eight SIMD groups where threadgroups without splits are at most
    /// a quarter of the cores: a core has as many SIMD groups with half as many partial results to merge.
    fn of_decode(problem: &Problem, facts: &GpuFacts) -> Self {
        let rows = if max_rows(problem) > 8 { decode_rows(problem) } else { 8 };
        let keys = Self::default_decode(problem.k_codec(), problem.dims().head_dim).simd_keys;
        let groups = problem.dims().kv_heads.saturating_mul(tile_count(problem, rows));
        let few = !problem.is_quantized() && groups.saturating_mul(4) <= facts.cores;
        let simds = if few { 8 } else { 4 };
        let tile = Self::new(rows, if rows == 8 { keys } else { 16 }, simds.min(facts.max_simds()), 1);
        tile.on(facts).with_resident(problem, facts)
    }

    /// The tile of prefill, where there are enough rows for it: the largest with a threadgroup for every core, otherwise the smaller
    /// one, whose keys are split.
    ///
    /// Decode takes about 2.5 times as long for the same rows on a full device, as every 16 rows load all keys. So prefill wins where its
    /// tiles have at most 2.5 times the rows that decode's have: most of a batch may be sequences of one row.
    ///
    /// Where a device has no cache to read keys again from, prefill takes over from the first row on that decode's tile does not hold, with
    /// the smallest tile that holds all rows.
    fn of_prefill(problem: &Problem, facts: &GpuFacts) -> Option<Self> {
        // Where the matrix unit does not multiply a type, products are shuffles and multiply-adds: too much code for a block of prefill.
        let multiplied = products(problem).into_iter().all(|product| match product {
            ScalarType::Bf16 => facts.multiplies_bf16,
            ScalarType::F32 => facts.multiplies_f32,
            _ => true,
        });
        let of_decode = if facts.rereads_in_cache { MAX_DECODE_ROWS } else { decode_rows(problem) };
        if !multiplied || max_rows(problem) <= of_decode {
            return None;
        }
        let variant = Variant::of(problem);
        let [more, fewer] =
            Self::prefill_tiles(&variant, facts)?.map(|tile| tile.with_resident(problem, facts));
        let is_filled =
            |tile: &Self| 2 * tile.rows * tile_count(problem, tile.rows) <= 5 * 16 * tile_count(problem, 16);
        if !facts.rereads_in_cache
            && let Some(tile) = Self::with_all_rows([more, fewer], problem, facts)
        {
            return Some(tile).filter(is_filled);
        }
        // Few rows by decode have splits for every core.
        if max_rows(problem) <= MAX_DECODE_ROWS {
            return None;
        }
        let groups = problem.dims().kv_heads.saturating_mul(tile_count(problem, more.rows));
        if more.is_held(&variant, facts) && is_filled(&more) && groups >= facts.cores {
            return Some(more);
        }
        Some(fewer).filter(is_filled)
    }

    /// The first pair of [`shapes`](Self::shapes) of which a device holds the smaller tile. Keys and values have memory of their own where
    /// it is enough for both.
    fn prefill_tiles(variant: &Variant, facts: &GpuFacts) -> Option<[Self; 2]> {
        let tile = Self::default_prefill(padded(variant.head_dim.max(variant.value_dim) as u32) as usize);
        let simds = tile.simds.min(facts.max_simds());
        let shapes = || {
            let teams = [tile.team, 2 * tile.team, 4 * tile.team];
            teams.into_iter().flat_map(move |team| tile.shapes(simds, team))
        };
        // The words of a block are many for half of the SIMD groups, where it is of the longest rows.
        let is_held = |tile: &Self| tile.on(facts).is_held(variant, facts);
        let whole = |[more, fewer]: [Self; 2]| if is_held(&fewer) { [more, fewer] } else { [more; 2] };
        let alike =
            shapes().filter(|_| are_alike(variant)).map(|pair| pair.map(Self::with_one_block)).map(whole);
        let pair = shapes().chain(alike).find(|[_, fewer]| is_held(fewer))?;
        Some(pair.map(|tile| tile.on(facts)))
    }

    /// The tile of prefill that plans take on a device for many rows; `None` where it holds no tile.
    pub(crate) fn prefill_on(variant: &Variant, facts: &GpuFacts) -> Option<Self> {
        let [more, fewer] = Self::prefill_tiles(variant, facts)?;
        Some(if more.is_held(variant, facts) { more } else { fewer })
    }

    /// The smallest tile of prefill that holds all rows of the longest sequence and so reads its keys once: of a pair of them, or half of
    /// the smaller one, whose SIMD groups are then in teams of twice as many. It must have threadgroups for half of the cores, splits
    /// included: to read keys twice takes as long.
    fn with_all_rows(pair: [Self; 2], problem: &Problem, facts: &GpuFacts) -> Option<Self> {
        let [more, fewer] = pair;
        let variant = Variant::of(problem);
        let half = Self { rows: fewer.rows / 2, ..fewer.with_team(2 * fewer.team) };
        let holds = |tile: &Self| {
            let groups = problem.dims().kv_heads.saturating_mul(tile_count(problem, tile.rows));
            let all = groups.saturating_mul(tile.max_splits(problem)).saturating_mul(2);
            max_rows(problem) <= tile.rows && tile.is_held(&variant, facts) && all >= facts.cores
        };
        let tile = [half, fewer, more].into_iter().find(holds)?;
        Some(tile.with_resident(problem, facts))
    }

    /// Pairs of tiles of prefill of at most `simds` SIMD groups in teams of `team`, the larger first, in the order in which they are
    /// preferred: with fewer rows a team, then smaller blocks, where registers or shared memory are fewer. The second tile of a pair has
    /// half as many SIMD groups, which leaves registers for twice as many threadgroups.
    fn shapes(self, simds: usize, team: usize) -> impl Iterator<Item = [Self; 2]> {
        let (rows, keys) = (self.team_rows(), self.simd_keys);
        let of = [(rows, keys), (16, keys), (rows, keys / 2), (16, keys / 2), (16, keys / 4)];
        of.into_iter().filter(|(_, keys)| *keys >= 16).map(move |(rows, keys)| {
            [(simds, self.resident), ((simds / 2).max(team), 2 * self.resident)].map(|(simds, resident)| {
                Self::prefill(rows * simds / team, keys, simds, resident).with_team(team)
            })
        })
    }

    /// Returns true if a device has the threads, the shared memory and the registers of a tile of prefill.
    fn is_held(&self, variant: &Variant, facts: &GpuFacts) -> bool {
        self.team <= self.simds
            && self.simds <= facts.max_simds()
            && self.simd_keys <= 32 * self.simds
            && self.held_by_prefill(variant) <= facts.registers_per_thread
            && self.shared_of(variant) <= facts.shared_per_group
    }

    /// Sets the threadgroups that a core holds at a time, from the registers and the shared memory of the
    /// tile.
    fn with_resident(mut self, problem: &Problem, facts: &GpuFacts) -> Self {
        let registers = self.registers(problem, facts) * self.threads();
        let shared = self.shared_of(&Variant::of(problem));
        self.resident = facts.resident(self.simds, shared, registers).clamp(1, 16);
        self
    }

    /// Registers of a thread, at least as many as NVRTC 13 gives the kernel for rows that start on 16 bytes;
    /// at most as many as the device gives a thread.
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

    /// [`Self::registers`] of decode where keys and values are elements, for at most four SIMD groups.
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

    /// [`Self::registers`] of decode where keys or values are codes, which become f16 in registers.
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

    /// [`Self::registers`] of prefill: the registers of a core over the threads of `resident` threadgroups,
    /// in steps of 8.
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
        if let Some(got) = asked {
            let blocks = |s| problem.visible_union(s, 0..s.q_len).len().div_ceil(self.keys());
            let max = problem.sequences().iter().map(blocks).max().unwrap_or(0).max(1);
            return if got == 0 || got > max { Err(Unsupported::Splits { got, max }) } else { Ok(got) };
        }
        // Tiles of prefill beyond the rows of a sequence end at once.
        let tiles = problem.dims().kv_heads.saturating_mul(tile_count(problem, self.rows));
        let groups = if self.is_prefill { tiles } else { groups };
        if self.is_prefill && (groups >= facts.cores || facts.threads_per_group < MERGE_THREADS) {
            return Ok(1);
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
        // Of the positions of a tile's rows.
        let rows = self.rows.div_ceil(dims.gqa_group());
        let band = visibility.span().map_or(usize::MAX, |span| span.saturating_add(rows));
        let least = if self.is_prefill { MIN_SPLIT_COORDINATES / dim(problem) } else { 0 };
        let keys = least.max(self.keys());
        held.min(band).div_ceil(keys).clamp(1, MAX_SPLITS)
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

/// Returns true if the halves of a key or a value have norms of their own.
fn has_halves(problem: &Problem) -> bool {
    let [head_dim, value_dim] = row_dims(problem).map(|dim| dim as u32);
    has_half_norms(format_id(problem.k_codec()), head_dim)
        || has_half_norms(format_id(problem.v_codec()), value_dim)
}

/// Returns true if keys and values can take the same shared memory in turn. Keys of mlx-native have a second
/// block.
fn are_alike(variant: &Variant) -> bool {
    let formats = [variant.k_codec, variant.v_codec].map(format_id);
    let [of_keys, of_values] = formats.map(|format| product_type(scalar_type(variant.dtype), format));
    let dims = [variant.head_dim, variant.value_dim].map(|dim| padded(dim as u32));
    key_blocks(formats[0]) == 1 && of_keys == of_values && dims[0] == dims[1]
}

/// The types of the products with keys and with values.
fn products(problem: &Problem) -> [ScalarType; 2] {
    let q = scalar_type(problem.dtype());
    [problem.k_codec(), problem.v_codec()].map(|codec| product_type(q, format_id(codec)))
}

/// Pairs of bytes of a row of elements.
fn words(problem: &Problem) -> usize {
    dim(problem) * problem.dtype().bytes() / 2
}

/// Rows of the largest tile of decode.
fn decode_rows(problem: &Problem) -> usize {
    if fits_16_rows(problem) { 16 } else { 8 }
}

/// Returns true if registers hold the operands that 16 rows share.
fn fits_16_rows(problem: &Problem) -> bool {
    if problem.is_quantized() { dim(problem) <= 64 } else { words(problem) <= 128 }
}
