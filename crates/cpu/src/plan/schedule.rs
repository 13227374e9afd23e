//! The units of work of a plan, and the order in which they run.
//!
//! A segment is the key blocks that one task may hold for some rows: the blocks of a prefix that several sequences share, with
//! the rows of all of them, or the other blocks of one sequence. A row passes through its segments in key order. Its state after a
//! segment is kept in partials of the workspace for the next one. Segments at the same depth of prefixes form a level; a level
//! starts when the one before has ended.
//!
//! If the tasks of a level would leave threads idle, the long ones are split along the keys. The first split continues
//! the state, the others keep a partial result for each block, and a reduction folds these into the state in key order.

use super::sizes::BLOCK_K;
use flashtile_core::plan::PlanOptions;
use flashtile_core::problem::{Problem, Sequence};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

/// Query rows of one key/value head, in (position, group head) order. Rows of several cached sequences follow one another,
/// as the packed queries do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rows {
    /// Rows are counted from the first row of this sequence, and keys are found in its pages.
    pub(crate) sequence: usize,
    pub(crate) kv_head: usize,
    pub(crate) first: usize,
    pub(crate) count: usize,
}

/// The destination of a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Target {
    /// To the outputs of the problem.
    Out,
    /// To the state of the rows, in partials from this one on.
    State(usize),
    /// To a partial result for each block. Row `row` of block `block`, counted from the task's first, is partial
    /// `base + block * rows + row`.
    Blocks(usize),
}

/// Neighbouring key blocks, from `start` to before `end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Blocks {
    pub(crate) start: usize,
    pub(crate) end: usize,
}

/// Upper bound of the storages that the keys of a problem lie in: codes, and the first and the last tokens in 16 bits.
pub(crate) const MAX_PARTS: usize = 3;

/// Key blocks of each part of a plan, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct KeyBlocks {
    pub(crate) parts: [Blocks; MAX_PARTS],
}

impl KeyBlocks {
    /// Number of blocks.
    pub(crate) fn len(&self) -> usize {
        self.parts.iter().map(|blocks| blocks.end - blocks.start).sum()
    }

    /// The blocks whose places in the order are in a range.
    fn slice(&self, places: &Range<usize>) -> Self {
        let mut first = 0;
        let parts = self.parts.map(|Blocks { start, end }| {
            let place = |place: usize| start + place.clamp(first, first + end - start) - first;
            let blocks = Blocks { start: place(places.start), end: place(places.end) };
            first += end - start;
            blocks
        });
        Self { parts }
    }
}

/// One unit of work: some rows and some of the key blocks that they see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Task {
    pub(crate) rows: Rows,
    /// Whole key blocks; the visible ones are computed.
    pub(crate) blocks: KeyBlocks,
    /// Index of the partial of the first row's state before these blocks; `None` before the first block.
    pub(crate) from: Option<usize>,
    pub(crate) target: Target,
    /// Estimate of the time it takes, in multiply-adds of a key with a row.
    pub(crate) cost: u64,
}

/// The fold of partial results into the state of their rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Reduction {
    pub(crate) rows: Rows,
    /// Index of the partial of the first row's state.
    pub(crate) from: usize,
    /// Index of the first row's partial result of the first block.
    pub(crate) partials: usize,
    pub(crate) blocks: usize,
    pub(crate) target: Target,
}

/// The tasks at one depth of prefixes, longest first, which do not depend on each other, and the reductions after them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Level {
    pub(crate) tasks: Vec<Task>,
    pub(crate) reductions: Vec<Reduction>,
}

impl Level {
    fn costs(&self) -> impl Iterator<Item = u64> {
        self.tasks.iter().map(|task| task.cost)
    }
}

/// A prefix that several sequences share, as planned.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlannedPrefix {
    /// Indices of the sequences.
    pub sequences: Range<usize>,
    /// Tokens that are read once for all of them, in whole blocks, without the tokens of enclosing prefixes.
    pub tokens: Range<usize>,
    /// Query rows of each key/value head that share them.
    pub rows: usize,
    /// Upper bound of the splits of the tokens for parallel work.
    pub splits: usize,
}

/// Key blocks that are computed together for some sequences.
struct Segment {
    sequences: Range<usize>,
    /// Query rows of each key/value head.
    rows: usize,
    /// Its key blocks. For a sequence's own segment, `end` is `usize::MAX`: the blocks run to the sequence's last.
    blocks: Range<usize>,
    /// The segment with the preceding blocks, if there are any.
    parent: Option<usize>,
    depth: usize,
    /// For prefixes, whose state later segments continue: index of the partial with the state of the first row and key/value head 0.
    first_partial: usize,
    splits: usize,
}

/// A problem in segments: one for each shared prefix, outer ones first, then one for each sequence.
pub(super) struct Segments<'a> {
    /// The problem over each storage of its keys. Prefixes are of the first.
    parts: &'a [Problem],
    prefixes: usize,
    list: Vec<Segment>,
}

/// The choices that the schedule follows.
pub(super) struct Choices {
    pub(super) options: PlanOptions,
    pub(super) threads: usize,
    pub(super) task_rows: usize,
    /// Bytes of a partial: a state or a partial result.
    pub(super) partial_bytes: usize,
}

/// The schedule of a plan.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Schedule {
    pub(super) levels: Vec<Level>,
    pub(super) prefixes: Vec<PlannedPrefix>,
    /// States and partial results.
    pub(super) num_partials: usize,
    /// Upper bound of the splits of the keys that a sequence does not share.
    pub(super) splits: Vec<usize>,
}

/// Reading a key costs as much as multiplying it with this many rows: it dominates tasks of few rows.
const STREAM_COST: u64 = 8;
/// Tasks per thread that even out differences in work.
pub(super) const TASKS_PER_THREAD: usize = 4;
/// Upper bound of the memory that partial results may take if the planner chooses to split, in bytes.
const MAX_PARTIAL_BYTES: usize = 64 << 20;

/// Sequences that have some of the rows, and their positions.
pub(crate) fn spans(
    problem: &Problem,
    sequence: usize,
    rows: Range<usize>,
) -> impl Iterator<Item = (usize, Range<usize>)> + use<'_> {
    let (all, gqa_group) = (problem.sequences(), problem.dims().gqa_group());
    let start = all[sequence].q_start;
    let (mut at, end) = (start + rows.start / gqa_group, start + rows.end.div_ceil(gqa_group));
    let mut index = sequence;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        index = sequence_of(problem, index, at);
        let s = &all[index];
        let positions = at - s.q_start..end.min(s.q_start + s.q_len) - s.q_start;
        at = s.q_start + positions.end;
        Some((index, positions))
    })
}

/// The sequence that has a row of q: `sequence` or, if queries are packed, a later one.
#[inline(always)]
pub(crate) fn sequence_of(problem: &Problem, sequence: usize, row: usize) -> usize {
    let all = problem.sequences();
    let s = &all[sequence];
    if row < s.q_start + s.q_len {
        return sequence;
    }
    // It is the last sequence that starts at or before the row: sequences without rows that start there come before it.
    sequence + all[sequence..].partition_point(|s| s.q_start <= row) - 1
}

impl<'a> Segments<'a> {
    pub(super) fn of(parts: &'a [Problem]) -> Self {
        let problem = &parts[0];
        let mut list: Vec<Segment> = Vec::new();
        let gqa_group = problem.dims().gqa_group();
        // Keys whose visibility a tree mask decides are not shared.
        let shareable = |s: &Sequence| if problem.desc().tree { s.kv_len - s.q_len } else { s.kv_len };
        // The innermost prefix of each sequence. Outer prefixes come first; a prefix that has the first sequence of another
        // has all of its sequences.
        let mut innermost: Vec<Option<usize>> = vec![None; problem.sequences().len()];
        for prefix in &problem.desc().prefixes {
            let parent = innermost[prefix.sequences.start];
            let members = || problem.sequences()[prefix.sequences.clone()].iter().filter(|s| s.q_len > 0);
            let len = members().map(shareable).min().unwrap_or(0).min(prefix.len);
            let blocks = parent.map_or(0, |n| list[n].blocks.end)..len / BLOCK_K;
            // A prefix of a single sequence is no shared work.
            if members().nth(1).is_some() && !blocks.is_empty() {
                let rows = members().map(|s| s.q_len).sum::<usize>() * gqa_group;
                let depth = parent.map_or(0, |n| list[n].depth + 1);
                let sequences = prefix.sequences.clone();
                innermost[sequences.clone()].fill(Some(list.len()));
                list.push(Segment { sequences, rows, blocks, parent, depth, first_partial: 0, splits: 1 });
            }
        }
        let prefixes = list.len();
        for (index, s) in problem.sequences().iter().enumerate() {
            let parent = innermost[index];
            let (blocks, depth) = parent.map_or((0, 0), |n| (list[n].blocks.end, list[n].depth + 1));
            list.push(Segment {
                sequences: index..index + 1,
                rows: s.q_len * gqa_group,
                blocks: blocks..usize::MAX,
                parent,
                depth,
                first_partial: 0,
                splits: 1,
            });
        }
        Self { parts, prefixes, list }
    }

    /// The problem over the first storage, which has the sequences of all of them.
    const fn problem(&self) -> &'a Problem {
        &self.parts[0]
    }

    /// Rows of the longest segment.
    pub(super) fn longest(&self) -> usize {
        self.list.iter().map(|segment| segment.rows).max().unwrap_or(0)
    }

    /// Rows of all key/value heads, each counted once.
    pub(super) fn rows(&self) -> usize {
        self.list[self.prefixes..].iter().map(|segment| segment.rows).sum::<usize>()
            * self.problem().dims().kv_heads
    }

    /// Number of tasks of at most `task_rows` rows.
    pub(super) fn tasks(&self, task_rows: usize) -> usize {
        let tasks = self.list.iter().map(|segment| segment.rows.div_ceil(task_rows));
        tasks.sum::<usize>().saturating_mul(self.problem().dims().kv_heads)
    }

    /// Cuts the segments into tasks. `None` if the number of partials overflows.
    pub(super) fn schedule(mut self, choices: &Choices) -> Option<Schedule> {
        let (heads, gqa_group) = (self.problem().dims().kv_heads, self.problem().dims().gqa_group());
        let mut num_partials = 0usize;
        let depth = self.list.iter().map(|segment| segment.depth + 1).max().unwrap_or(0);
        // Tasks of each level, each with the index of its segment.
        let mut levels: Vec<Vec<(Task, usize)>> = vec![Vec::new(); depth];
        for index in 0..self.list.len() {
            if index < self.prefixes {
                self.list[index].first_partial = num_partials;
                num_partials = num_partials.checked_add(self.list[index].rows.checked_mul(heads)?)?;
            }
            let segment = &self.list[index];
            let sequence = segment.sequences.start;
            let from = segment.parent.map(|parent| {
                let parent = &self.list[parent];
                let start = |sequence: usize| self.problem().sequences()[sequence].q_start;
                let offset = (start(sequence) - start(parent.sequences.start)) * gqa_group;
                (parent.first_partial + offset, parent.rows)
            });
            for first in (0..segment.rows).step_by(choices.task_rows) {
                let count = choices.task_rows.min(segment.rows - first);
                let (blocks, cost) = self.visible(segment, first..first + count, choices.options.skip_tiles);
                for kv_head in 0..heads {
                    let partial = |(base, rows): (usize, usize)| base + kv_head * rows + first;
                    let target = if index < self.prefixes {
                        Target::State(partial((segment.first_partial, segment.rows)))
                    } else {
                        Target::Out
                    };
                    let rows = Rows { sequence, kv_head, first, count };
                    levels[segment.depth]
                        .push((Task { rows, blocks, from: from.map(partial), target, cost }, index));
                }
            }
        }
        let levels = levels.into_iter().map(|tasks| self.split(tasks, choices, &mut num_partials));
        let levels = levels.collect::<Option<Vec<Level>>>()?;
        let (shared, own) = self.list.split_at(self.prefixes);
        let planned = |segment: &Segment| PlannedPrefix {
            sequences: segment.sequences.clone(),
            tokens: segment.blocks.start * BLOCK_K..segment.blocks.end * BLOCK_K,
            rows: segment.rows,
            splits: segment.splits,
        };
        Some(Schedule {
            levels,
            prefixes: shared.iter().map(planned).collect(),
            num_partials,
            splits: own.iter().map(|segment| segment.splits).collect(),
        })
    }

    /// Blocks of a segment that some of its rows see (all blocks if tiles are not skipped), and their cost.
    fn visible(&self, segment: &Segment, rows: Range<usize>, skip_tiles: bool) -> (KeyBlocks, u64) {
        let (mut blocks, mut cost) = (KeyBlocks::default(), 0);
        // Sequences share prefixes of the first part only.
        let is_prefix = segment.blocks.end != usize::MAX;
        let parts = if is_prefix { &self.parts[..1] } else { self.parts };
        for (part, problem) in parts.iter().enumerate() {
            let within = if part == 0 { segment.blocks.clone() } else { 0..usize::MAX };
            let of_part = visible_blocks(problem, segment.sequences.start, rows.clone(), within, skip_tiles);
            (blocks.parts[part], cost) = (of_part.0, cost + of_part.1);
        }
        (blocks, cost)
    }

    /// Splits the tasks of a level along the keys: as the option says, or if that shortens the level.
    fn split(
        &mut self,
        tasks: Vec<(Task, usize)>,
        choices: &Choices,
        num_partials: &mut usize,
    ) -> Option<Level> {
        let blocks = |task: &Task| task.blocks.len();
        let splits_of: Box<dyn Fn(&Task) -> usize> = match choices.options.splits {
            Some(splits) => Box::new(move |task| splits.min(blocks(task))),
            None => match split_cost(tasks.iter().map(|(task, _)| task.cost), choices.threads) {
                Some(cost) => Box::new(move |task| (task.cost.div_ceil(cost) as usize).min(blocks(task))),
                None => Box::new(|_| 1),
            },
        };
        let extra = |task: &Task| match splits_of(task) {
            0 | 1 => 0,
            n => task.rows.count.saturating_mul(1 + blocks(task) - blocks(task) / n),
        };
        let needed = tasks.iter().fold(0usize, |sum, (task, _)| sum.saturating_add(extra(task)));
        let splits = choices.options.splits.is_some()
            || needed.saturating_mul(choices.partial_bytes) <= MAX_PARTIAL_BYTES;
        let mut level = Level::default();
        for (task, segment) in tasks {
            let n = splits_of(&task);
            if !splits || n <= 1 {
                level.tasks.push(task);
                continue;
            }
            self.list[segment].splits = self.list[segment].splits.max(n);
            let (rows, count) = (task.rows, task.blocks.len());
            let at = |split: usize| count * split / n;
            let from = *num_partials;
            let partials = from.checked_add(rows.count)?;
            *num_partials = rows.count.checked_mul(count - at(1)).and_then(|n| partials.checked_add(n))?;
            for split in 0..n {
                let places = at(split)..at(split + 1);
                let target = match split {
                    0 => Target::State(from),
                    _ => Target::Blocks(partials + (places.start - at(1)) * rows.count),
                };
                let from = if split == 0 { task.from } else { None };
                let blocks = task.blocks.slice(&places);
                let fraction = places.len() as f64 / count as f64;
                let cost = (task.cost as f64 * fraction) as u64;
                level.tasks.push(Task { rows, blocks, from, target, cost });
            }
            let blocks = count - at(1);
            level.reductions.push(Reduction { rows, from, partials, blocks, target: task.target });
        }
        // The sort is stable: tasks of equal cost keep their order.
        level.tasks.sort_by_key(|task| Reverse(task.cost));
        Some(level)
    }
}

/// Blocks of a range that some rows see in a part of the keys (all blocks if tiles are not skipped), and their cost. Rows are counted from
/// the first one of a sequence.
fn visible_blocks(
    problem: &Problem,
    sequence: usize,
    rows: Range<usize>,
    within: Range<usize>,
    skip_tiles: bool,
) -> (Blocks, u64) {
    let (mut keys, mut pairs, mut queries, count) = (0..0, 0, 0, rows.len());
    let inside = |keys: Range<usize>| {
        let end = within.end.saturating_mul(BLOCK_K);
        keys.end.min(end).saturating_sub(keys.start.max(within.start * BLOCK_K)) as u64
    };
    for (index, positions) in spans(problem, sequence, rows) {
        let s = &problem.sequences()[index];
        let seen = if skip_tiles { problem.visible_union(s, positions.clone()) } else { problem.stored(s) };
        let ends = [positions.start, positions.end - 1].map(|i| inside(problem.visible(s, i)));
        pairs += (ends[0] + ends[1]) * positions.len() as u64 / 2;
        queries += positions.len();
        if keys.is_empty() {
            keys = seen;
        } else if !seen.is_empty() {
            keys = keys.start.min(seen.start)..keys.end.max(seen.end);
        }
    }
    // The task may have only some heads of its first and last position.
    let pairs = pairs as f64 / queries.max(1) as f64 * count as f64;
    let cost = pairs as u64 + inside(keys.clone()) * STREAM_COST;
    let (first, last) = (keys.start / BLOCK_K, keys.end.div_ceil(BLOCK_K));
    let (first, last) = (first.max(within.start), last.min(within.end));
    let none = keys.is_empty() || last <= first;
    (if none { Blocks { start: 0, end: 0 } } else { Blocks { start: first, end: last } }, cost)
}

/// Time until the last thread is done, if each thread takes the next task when it is done with one. Tasks are handed out in order.
fn makespan(costs: impl Iterator<Item = u64>, threads: usize) -> u64 {
    let mut loads: BinaryHeap<Reverse<u64>> = vec![Reverse(0); threads].into();
    for cost in costs {
        if let Some(mut load) = loads.peek_mut() {
            load.0 += cost;
        }
    }
    loads.into_iter().map(|load| load.0).max().unwrap_or(0)
}

/// The cost of a split if whole tasks would keep threads waiting for more than a tenth of the time, or are too few to even out other load
/// on the machine; `None` if tasks stay whole.
pub(super) fn split_cost(costs: impl Iterator<Item = u64> + Clone, threads: usize) -> Option<u64> {
    let (mut total, mut max, mut count) = (0u64, 0u64, 0);
    for cost in costs.clone() {
        (total, max, count) = (total + cost, max.max(cost), count + 1);
    }
    let even_time = total as f64 / threads as f64;
    let waits = || {
        let mut costs: Vec<u64> = costs.collect();
        costs.sort_unstable_by_key(|&cost| Reverse(cost));
        makespan(costs.into_iter(), threads) as f64 * 0.9 > even_time
    };
    // No schedule is longer than an even one plus the longest task.
    let even = max as f64 <= 0.1 * even_time;
    let splits = threads > 1 && !even && (count < 2 * threads || waits());
    splits.then(|| total.div_ceil((threads * TASKS_PER_THREAD) as u64).max(1))
}

impl Schedule {
    /// Fraction of the time that threads wait for others.
    pub(super) fn idle(&self, threads: usize) -> f64 {
        let time = |level: &Level| makespan(level.costs(), threads) as f64 * threads as f64;
        let all: f64 = self.levels.iter().map(time).sum();
        let busy = self.levels.iter().flat_map(Level::costs).sum::<u64>() as f64;
        if all == 0.0 { 0.0 } else { 1.0 - busy / all }
    }
}
