//! The work of native backward kernels, and the order in which it adds to a tile of `d_q`.
//!
//! A unit has keys of a key/value head. It goes through the tiles of query rows that see them, from the last to the first, and units add to a tile in
//! the order of their keys. Units of a head are launched in that order too, so that each waits only for units that were launched before it: any
//! number of multiprocessors ends, and gives the same bits.

use crate::device_struct::device_struct;
use flashtile_core::plan::Unsupported;
use flashtile_core::problem::{Problem, Sequence, Sequences};
use std::ops::Range;
use std::rc::Rc;

/// The largest magnitude of a position, and the bound of a window that hides nothing: sums of them are integers of 32 bits.
pub(super) const MAX_POSITION: usize = 1 << 29;
const NO_BOUND: i32 = 1 << 30;

/// Bytes of the query rows, `d_out` and sums of `d_q` of heads whose units are launched together: they share the second-level cache.
const SECTION_BYTES: usize = 32 << 20;

/// Tiles whose sums of `d_q` are addressed.
const MAX_TILES: usize = 1 << 30;

device_struct! {
    /// Keys of a head, and the tiles of query rows that see them.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(crate) struct BackwardUnit {
        pub(crate) sequence: u32,
        pub(crate) kv_head: u32,
        /// Its number among the units of the head.
        pub(crate) block: u32,
        pub(crate) first_tile: u32,
        /// The first tile behind the last.
        pub(crate) end_tile: u32,
    }
}

device_struct! {
    /// A sequence.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(crate) struct BackwardSequence {
        pub(crate) batch: u32,
        pub(crate) q_start: u32,
        pub(crate) q_len: u32,
        pub(crate) kv_start: u32,
        pub(crate) kv_len: u32,
        /// Rows of `d_k` and `d_v`, padding included.
        pub(crate) kv_rows: u32,
        /// Key position of the first query row.
        pub(crate) offset: i32,
        /// Tiles of a head in the sequences before.
        pub(crate) tiles_before: u32,
    }
}

device_struct! {
    /// The units that add to a tile of every head of a sequence.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(crate) struct BackwardTileUnits {
        pub(crate) first: u32,
        pub(crate) count: u32,
    }
}

/// Changes that a kernel makes to scores, besides scaling them and hiding those outside of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ScoreMod {
    pub(crate) softcap: bool,
    pub(crate) alibi: bool,
    pub(crate) chunks: bool,
}

impl ScoreMod {
    /// The end of a kernel's name.
    pub(super) fn suffix(self) -> String {
        let named = [(self.softcap, "-softcap"), (self.alibi, "-alibi"), (self.chunks, "-chunks")];
        named.into_iter().filter_map(|(has, name)| has.then_some(name)).collect()
    }
}

/// Sizes of a kernel's unit and tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct UnitShape {
    /// Keys of a unit.
    pub(crate) keys: usize,
    /// Query rows of a tile.
    pub(crate) rows: usize,
    /// Columns of a tile of `d_q`.
    pub(crate) columns: usize,
    /// Warps of a unit that have keys.
    pub(crate) warps: usize,
}

/// The units of a problem, and what they share.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct BackwardSchedule {
    pub(crate) shape: UnitShape,
    pub(crate) score_mod: ScoreMod,
    /// Units in launch order.
    pub(crate) units: Vec<BackwardUnit>,
    pub(crate) sequences: Vec<BackwardSequence>,
    /// The units that add to each tile of a head, sequence by sequence.
    pub(crate) tile_units: Vec<BackwardTileUnits>,
    /// Tiles of all heads.
    pub(crate) tiles: usize,
    /// Tiles of the longest sequence.
    pub(crate) most_tiles: usize,
    /// Query heads of a key/value head.
    pub(crate) gqa_group: usize,
    /// True if all heads of a GQA group take a tile before the next.
    pub(crate) heads_inner: bool,
    /// Keys to the left and to the right of a position that its window shows.
    pub(crate) window: [i32; 2],
}

impl BackwardSchedule {
    /// The schedule of a problem whose positions are below [`MAX_POSITION`].
    pub(crate) fn new(problem: &Problem, shape: UnitShape) -> Result<Self, Unsupported> {
        let (dims, desc) = (problem.dims(), problem.desc());
        let bound = |side: Option<usize>| side.map_or(NO_BOUND, |n| n.min(NO_BOUND as usize) as i32);
        let mut schedule = Self {
            shape,
            score_mod: ScoreMod {
                softcap: desc.softcap.is_some(),
                alibi: desc.alibi,
                chunks: desc.visibility.chunk().is_some(),
            },
            units: Vec::new(),
            sequences: Vec::new(),
            tile_units: Vec::new(),
            tiles: 0,
            most_tiles: 0,
            gqa_group: dims.gqa_group(),
            // Sums for gradients of slopes are of one head at a time.
            heads_inner: !desc.visibility.is_full() && !desc.alibi,
            window: [bound(desc.visibility.left()), bound(desc.visibility.right())],
        };
        let mut heads = Vec::new();
        for s in problem.sequences() {
            let ranges = schedule.add_sequence(problem, s)?;
            let number = schedule.sequences.len() as u32 - 1;
            heads.extend((0..dims.kv_heads as u32).map(|kv_head| Head {
                sequence: number,
                kv_head,
                ranges: ranges.clone(),
            }));
        }
        let tiles = schedule.tile_units.len().saturating_mul(dims.q_heads);
        if tiles > MAX_TILES {
            return Err(Unsupported::Tasks { got: tiles, max: MAX_TILES });
        }
        schedule.tiles = tiles;
        schedule.launch_order(&heads);
        Ok(schedule)
    }

    /// Where the regions of scratch memory begin.
    pub(crate) fn regions(&self) -> BackwardRegions {
        let mut len = 0;
        let mut region = |bytes: usize| {
            let at = len;
            len = (len + bytes).next_multiple_of(256);
            at
        };
        let UnitShape { rows, columns, warps, .. } = self.shape;
        let sums = 4 * rows * columns * self.tiles;
        let rows = 4 * self.tiles * rows;
        // A sum for each warp and query head of each unit.
        let distances = 4 * warps * self.gqa_group * self.units.len();
        BackwardRegions {
            units: region(size_of_val(&*self.units)),
            sequences: region(size_of_val(&*self.sequences)),
            tile_units: region(size_of_val(&*self.tile_units)),
            neg_lse: region(rows),
            delta: region(rows),
            turns: region(4 * self.tiles),
            d_q_sums: region(sums),
            sink_terms: region(4 * self.tiles),
            shift_terms: region(if self.score_mod.alibi { 4 * self.tiles } else { 0 }),
            distance_sums: region(if self.score_mod.alibi { distances } else { 0 }),
            len: region(0),
        }
    }

    /// Adds a sequence and the units of its tiles. Returns the tiles of each unit.
    fn add_sequence(&mut self, problem: &Problem, s: &Sequence) -> Result<Rc<[Range<u32>]>, Unsupported> {
        let (UnitShape { keys: unit_keys, rows, .. }, before) = (self.shape, self.tile_units.len());
        let kv_rows = match problem.desc().sequences {
            Sequences::Dense | Sequences::Padded { .. } => problem.dims().kv_len,
            Sequences::Packed { .. } | Sequences::Cached { .. } => s.kv_len,
        };
        let tiles = s.q_len.div_ceil(rows);
        let mut ranges = vec![0..0u32; kv_rows.div_ceil(unit_keys)];
        for tile in 0..tiles {
            let keys = problem.visible_union(s, tile * rows..s.q_len.min((tile + 1) * rows));
            let units =
                if keys.is_empty() { 0..0 } else { keys.start / unit_keys..keys.end.div_ceil(unit_keys) };
            for range in &mut ranges[units.clone()] {
                let first = if range.start < range.end { range.start } else { tile as u32 };
                *range = first..tile as u32 + 1;
            }
            self.tile_units.push(BackwardTileUnits { first: units.start as u32, count: units.len() as u32 });
        }
        let number = |what: &'static str, got: usize| {
            u32::try_from(got).map_err(|_| Unsupported::Size { what, got, max: u32::MAX as usize })
        };
        self.most_tiles = self.most_tiles.max(tiles);
        self.sequences.push(BackwardSequence {
            batch: number("batch entries", s.batch)?,
            q_start: number("query rows", s.q_start)?,
            q_len: number("query rows", s.q_len)?,
            kv_start: number("keys", s.kv_start)?,
            kv_len: number("keys", s.kv_len)?,
            kv_rows: number("keys", kv_rows)?,
            // Within `MAX_POSITION`.
            offset: s.q_offset as i32,
            tiles_before: number("tiles", before)?,
        });
        Ok(ranges.into())
    }

    /// Lists the units of heads in sections: of the heads of a section the first units, then the second, and so on. Heads between two units of
    /// one give the first of them time to add.
    fn launch_order(&mut self, heads: &[Head]) {
        let gqa_group = self.gqa_group;
        let bytes = |head: &Head| {
            // q, d_out and the sums of d_q.
            let rows = self.sequences[head.sequence as usize].q_len as usize;
            rows.saturating_mul(8 * self.shape.columns * gqa_group).max(1)
        };
        let mut rest = heads;
        while let Some(first) = rest.first() {
            let many = (SECTION_BYTES * gqa_group / bytes(first)).max(1);
            let (section, others) = rest.split_at(many.min(rest.len()));
            let most = section.iter().map(|head| head.ranges.len()).max().unwrap_or(0);
            for block in 0..most {
                for Head { sequence, kv_head, ranges } in section {
                    let Some(range) = ranges.get(block) else { continue };
                    let (sequence, kv_head) = (*sequence, *kv_head);
                    let (first_tile, end_tile) = (range.start, range.end);
                    self.units.push(BackwardUnit {
                        sequence,
                        kv_head,
                        block: block as u32,
                        first_tile,
                        end_tile,
                    });
                }
            }
            rest = others;
        }
    }
}

/// Where the regions of scratch memory begin, and its bytes. The first three are written with the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BackwardRegions {
    pub(crate) units: usize,
    pub(crate) sequences: usize,
    pub(crate) tile_units: usize,
    pub(crate) neg_lse: usize,
    pub(crate) delta: usize,
    pub(crate) turns: usize,
    pub(crate) d_q_sums: usize,
    pub(crate) sink_terms: usize,
    pub(crate) shift_terms: usize,
    pub(crate) distance_sums: usize,
    pub(crate) len: usize,
}

/// A key/value head of a sequence, and the tiles of each of its units.
struct Head {
    sequence: u32,
    kv_head: u32,
    ranges: Rc<[Range<u32>]>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashtile_core::dtype::Dtype;
    use flashtile_core::problem::{Dims, ProblemDesc, QOffset, Visibility};
    use std::collections::{HashMap, HashSet};

    fn problems() -> Vec<Problem> {
        let dims = |batch, q_heads, kv_heads, q_len, kv_len, dim| Dims {
            batch,
            q_heads,
            kv_heads,
            q_len,
            kv_len,
            head_dim: dim,
            value_dim: dim,
        };
        let desc = |dims, visibility, offset| {
            let mut desc = ProblemDesc::new(dims, Dtype::BF16);
            (desc.visibility, desc.q_offset) = (visibility, Some(offset));
            desc
        };
        let mut packed = desc(dims(1, 4, 2, 1300, 1300, 128), Visibility::causal(), QOffset::BottomRight);
        packed.sequences = Sequences::Packed {
            cu_seqlens_q: vec![0, 700, 700, 701, 1300],
            cu_seqlens_k: vec![0, 700, 700, 1300, 1300],
        };
        [
            desc(dims(2, 4, 2, 1000, 2000, 128), Visibility::full(), QOffset::TopLeft),
            desc(dims(1, 16, 16, 4096, 4096, 64), Visibility::causal(), QOffset::TopLeft),
            desc(dims(1, 4, 1, 4096, 4096, 128), Visibility::window(Some(1023), Some(0)), QOffset::TopLeft),
            desc(dims(1, 2, 2, 500, 3000, 128), Visibility::window(Some(100), Some(300)), QOffset::At(700)),
            // Rows that see no key, at either end.
            desc(dims(1, 1, 1, 900, 300, 64), Visibility::window(Some(10), Some(10)), QOffset::At(-200)),
            desc(dims(1, 2, 1, 1500, 1500, 128), Visibility::causal().chunked(700), QOffset::TopLeft),
            packed,
        ]
        .map(|desc| desc.validate().unwrap())
        .into()
    }

    /// Units of Hopper's kernels, and of those by `mma.sync`.
    fn shapes() -> impl Iterator<Item = UnitShape> {
        let shapes =
            [(256, 64, 128, 16), (256, 128, 64, 16), (128, 128, 64, 8), (128, 32, 128, 8), (64, 64, 256, 8)];
        shapes.into_iter().map(|(keys, rows, columns, warps)| UnitShape { keys, rows, columns, warps })
    }

    /// Every problem in units of every shape.
    fn schedules() -> Vec<(Problem, BackwardSchedule)> {
        let all =
            problems().into_iter().flat_map(|problem| shapes().map(move |shape| (problem.clone(), shape)));
        all.map(|(problem, shape)| {
            let schedule = BackwardSchedule::new(&problem, shape).unwrap();
            (problem, schedule)
        })
        .collect()
    }

    /// The tiles of a unit in the order of its steps, as the kernel takes them (`Step`), with one head of the group.
    fn steps(unit: &BackwardUnit) -> impl Iterator<Item = u32> {
        (unit.first_tile..unit.end_tile).rev()
    }

    /// The units that added to each tile of a sequence and head, in order.
    type Added = HashMap<(u32, u32, u32), Vec<u32>>;

    /// Runs units as a device with `resident` clusters does: the next is launched where one ends, and each adds when it is its turn. Returns the
    /// order in which units added to each tile, or the units that wait forever.
    fn simulated(plan: &BackwardSchedule, resident: usize) -> Result<Added, Vec<BackwardUnit>> {
        let mut added = Added::new();
        let mut waiting = plan.units.iter();
        let mut running: Vec<(BackwardUnit, Vec<u32>)> = Vec::new();
        loop {
            running.retain(|(_, rest)| !rest.is_empty());
            while running.len() < resident {
                let Some(unit) = waiting.next() else { break };
                let mut rest: Vec<u32> = steps(unit).collect();
                rest.reverse();
                if !rest.is_empty() {
                    running.push((*unit, rest));
                }
            }
            if running.is_empty() {
                return Ok(added);
            }
            let mut moved = false;
            for (unit, rest) in &mut running {
                let tile = rest[rest.len() - 1];
                let sequence = &plan.sequences[unit.sequence as usize];
                let units = plan.tile_units[(sequence.tiles_before + tile) as usize];
                let before = added.entry((unit.sequence, unit.kv_head, tile)).or_default();
                if before.len() as u32 == unit.block - units.first {
                    before.push(unit.block);
                    rest.pop();
                    moved = true;
                }
            }
            if !moved {
                return Err(running.into_iter().map(|(unit, _)| unit).collect());
            }
        }
    }

    #[test]
    fn units_end_and_add_in_one_order_on_any_number_of_multiprocessors() {
        for (problem, plan) in schedules() {
            let want = simulated(&plan, 1).unwrap_or_else(|stuck| panic!("{problem:?}: {stuck:?}"));
            for resident in [2, 7, 57, 66, 10_000] {
                assert!(simulated(&plan, resident).is_ok_and(|got| got == want), "{resident} of {problem:?}");
            }
            for ((sequence, _, tile), units) in want {
                let of = &plan.sequences[sequence as usize];
                let expected = plan.tile_units[(of.tiles_before + tile) as usize];
                let expected: Vec<u32> = (expected.first..expected.first + expected.count).collect();
                assert_eq!(units, expected, "tile {tile}");
            }
        }
    }

    #[test]
    fn an_order_that_never_ends_is_found() {
        let mut plan = BackwardSchedule::new(&problems()[1], shapes().next().unwrap()).unwrap();
        plan.units.reverse();
        assert!(simulated(&plan, 4).is_err_and(|stuck| stuck.len() == 4));
    }

    /// Every visible pair has a step, and every key row that is stored has a unit.
    #[test]
    fn steps_cover_what_is_visible() {
        for (problem, plan) in schedules() {
            let UnitShape { keys, rows, .. } = plan.shape;
            let mut covered = HashSet::new();
            for unit in plan.units.iter().filter(|unit| unit.kv_head == 0) {
                covered.extend(steps(unit).map(|tile| (unit.sequence, unit.block, tile)));
            }
            for (n, s) in problem.sequences().iter().enumerate() {
                for i in 0..s.q_len {
                    for j in problem.visible(s, i) {
                        let pair = (n as u32, (j / keys) as u32, (i / rows) as u32);
                        assert!(covered.contains(&pair), "{pair:?}");
                    }
                }
                let stored = plan.sequences[n].kv_rows as usize;
                let blocks =
                    plan.units.iter().filter(|of| of.sequence == n as u32 && of.kv_head == 0).count();
                assert_eq!(blocks, stored.div_ceil(keys));
            }
        }
    }
}
