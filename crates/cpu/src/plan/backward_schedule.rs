//! The units of work of a backward plan, and the order in which they run.
//!
//! A task owns the gradients of some chunks of keys of one head. If whole heads keep all threads busy, a task has all chunks of its head and
//! adds up their partial `d_q` itself. Otherwise each chunk is a task that leaves a partial sum in the workspace, and reductions add the partial
//! sums of a level up in the order of the chunks.

use super::schedule::{Rows, split_cost};
use flashtile_core::plan::PlanOptions;
use flashtile_core::problem::{Problem, Sequence};
use std::cmp::Reverse;
use std::ops::Range;

/// Where a task leaves its partial `d_q`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DqTarget {
    /// It has all chunks of its head, and stores the gradient.
    Out,
    /// As the partial sum of this index.
    Partial(usize),
}

/// One unit of work: some chunks of the keys of a head, with all of its query rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BackwardTask {
    pub(crate) rows: Rows,
    pub(crate) chunks: Range<usize>,
    pub(crate) d_q: DqTarget,
    /// Estimate of the time it takes, in pairs of a key and a row.
    pub(crate) cost: u64,
}

/// The sum of the partial sums of `d_q` over neighbouring chunks of a head, for some rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BackwardReduction {
    pub(crate) rows: Rows,
    pub(crate) partials: Range<usize>,
    /// The partial sum over all earlier chunks; `None` if these chunks are the first.
    pub(crate) from: Option<usize>,
    /// Where the result goes that later chunks continue; `None` if these chunks are the last: the gradient is stored.
    pub(crate) to: Option<usize>,
}

/// Tasks that do not depend on each other, longest first, and the reductions after them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct BackwardLevel {
    pub(crate) tasks: Vec<BackwardTask>,
    pub(crate) reductions: Vec<BackwardReduction>,
}

/// The schedule of a backward plan.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct BackwardSchedule {
    pub(super) levels: Vec<BackwardLevel>,
    /// Partial sums of `d_q` in the workspace.
    pub(super) num_partials: usize,
    /// True if some task adds up the chunks of its head.
    pub(super) sums_heads: bool,
}

/// The heads of a problem, and the choices that their schedule follows.
pub(super) struct Heads<'a> {
    pub(super) problem: &'a Problem,
    pub(super) options: PlanOptions,
    pub(super) threads: usize,
    /// Upper bound of the parts of `d_q` of a level.
    pub(super) max_partials: usize,
}

/// Upper bound of the positions from which the cost of a chunk is estimated.
const MAX_SAMPLES: usize = 256;

/// Query rows that a reduction adds up.
const REDUCED_ROWS: usize = 1024;

impl Heads<'_> {
    /// Schedules the chunks of every head, whose number and keys the functions give.
    pub(super) fn schedule(
        &self,
        num_chunks: fn(&Sequence) -> usize,
        chunk_keys: fn(&Sequence, usize) -> Range<usize>,
    ) -> BackwardSchedule {
        let dims = self.problem.dims();
        let heads = |(sequence, s): (usize, &Sequence)| {
            let count = s.q_len * dims.gqa_group();
            let costs: Vec<u64> =
                (0..num_chunks(s)).map(|chunk| self.cost(s, &chunk_keys(s, chunk))).collect();
            (0..dims.kv_heads)
                .map(move |kv_head| (Rows { sequence, kv_head, first: 0, count }, costs.clone()))
        };
        let heads: Vec<(Rows, Vec<u64>)> =
            self.problem.sequences().iter().enumerate().flat_map(heads).collect();
        let whole = heads.iter().map(|(_, costs)| costs.iter().sum());
        let splits = match self.options.splits {
            Some(splits) => splits > 1,
            None => split_cost(whole, self.threads).is_some(),
        };
        if splits && heads.iter().any(|(_, costs)| costs.len() > 1) {
            self.by_chunks(heads)
        } else {
            Self::whole(heads)
        }
    }

    /// A task for each head.
    fn whole(heads: Vec<(Rows, Vec<u64>)>) -> BackwardSchedule {
        let sums_heads = heads.iter().any(|(_, costs)| costs.len() > 1);
        let task = |(rows, costs): (Rows, Vec<u64>)| BackwardTask {
            rows,
            chunks: 0..costs.len(),
            d_q: DqTarget::Out,
            cost: costs.iter().sum(),
        };
        let mut tasks: Vec<BackwardTask> = heads.into_iter().map(task).collect();
        // The sort is stable: tasks of equal cost keep their order.
        tasks.sort_by_key(|task| Reverse(task.cost));
        BackwardSchedule {
            levels: vec![BackwardLevel { tasks, reductions: Vec::new() }],
            num_partials: 0,
            sums_heads,
        }
    }

    /// A task for each chunk, as many in a level as there is memory for. A head that continues in the next level has its sum in partial sums
    /// 0 and 1 in turn: one is read where the other is written.
    fn by_chunks(&self, heads: Vec<(Rows, Vec<u64>)>) -> BackwardSchedule {
        let mut levels = vec![BackwardLevel::default()];
        let (first_partial, mut used) = (2, 2);
        let mut num_partials = first_partial;
        for (rows, costs) in heads {
            let (count, mut first) = (costs.len(), 0);
            if let ([cost], Some(level)) = (costs.as_slice(), levels.last_mut()) {
                level.tasks.push(BackwardTask { rows, chunks: 0..1, d_q: DqTarget::Out, cost: *cost });
                continue;
            }
            while first < count {
                if used == first_partial + self.max_partials {
                    levels.push(BackwardLevel::default());
                    used = first_partial;
                }
                let end = count.min(first + first_partial + self.max_partials - used);
                let turn = levels.len() % 2;
                let level = levels.last_mut().unwrap_or_else(|| unreachable!("there is a first level"));
                for chunk in first..end {
                    let d_q = DqTarget::Partial(used + chunk - first);
                    level.tasks.push(BackwardTask {
                        rows,
                        chunks: chunk..chunk + 1,
                        d_q,
                        cost: costs[chunk],
                    });
                }
                for row in (0..rows.count).step_by(REDUCED_ROWS) {
                    level.reductions.push(BackwardReduction {
                        rows: Rows { first: row, count: REDUCED_ROWS.min(rows.count - row), ..rows },
                        partials: used..used + end - first,
                        from: (first > 0).then_some(turn),
                        to: (end < count).then_some(1 - turn),
                    });
                }
                used += end - first;
                num_partials = num_partials.max(used);
                first = end;
            }
        }
        for level in &mut levels {
            level.tasks.sort_by_key(|task| Reverse(task.cost));
        }
        BackwardSchedule { levels, num_partials, sums_heads: false }
    }

    /// Pairs of the keys of a chunk with the rows that see them, and the keys themselves.
    fn cost(&self, s: &Sequence, keys: &Range<usize>) -> u64 {
        // Some positions stand for their neighbors.
        let step = s.q_len.div_ceil(MAX_SAMPLES).max(16);
        let pairs = |i: usize| {
            let seen =
                if self.options.skip_tiles { self.problem.visible(s, i) } else { self.problem.stored(s) };
            let inside = seen.end.min(keys.end).saturating_sub(seen.start.max(keys.start));
            inside as u64 * step.min(s.q_len - i) as u64
        };
        let pairs: u64 = (0..s.q_len).step_by(step).map(pairs).sum();
        pairs.saturating_mul(self.problem.dims().gqa_group() as u64).saturating_add(keys.len() as u64 * 8)
    }
}

/// Elements of the gradient of a mask that one task owns, as the queries and keys that add to them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BiasTask {
    pub(crate) sequences: Range<usize>,
    pub(crate) kv_heads: Range<usize>,
    /// Positions of queries.
    pub(crate) positions: Range<usize>,
    pub(crate) chunks: Range<usize>,
}

/// Query positions of a task.
const BIAS_POSITIONS: usize = 512;

impl BiasTask {
    /// Tasks of a mask of some shape: an axis that the mask broadcasts is not cut.
    pub(super) fn of_mask(problem: &Problem, shape: [usize; 4], chunks: usize) -> Vec<Self> {
        let (dims, [batches, heads, queries, keys]) = (problem.dims(), shape);
        let cut = |is_broadcast: bool, len: usize, step: usize| -> Vec<Range<usize>> {
            let step = if is_broadcast { len.max(1) } else { step };
            (0..len).step_by(step).map(|start| start..(start + step).min(len)).collect()
        };
        let max_q_len = problem.sequences().iter().map(|s| s.q_len).max().unwrap_or(0);
        let sequences = cut(batches == 1, problem.sequences().len(), 1);
        let kv_heads = cut(heads == 1, dims.kv_heads, 1);
        let positions = cut(queries == 1, max_q_len, BIAS_POSITIONS);
        let chunks = cut(keys == 1, chunks, 1);
        let mut tasks = Vec::new();
        for sequences in &sequences {
            for kv_heads in &kv_heads {
                for positions in &positions {
                    tasks.extend(chunks.iter().map(|chunks| Self {
                        sequences: sequences.clone(),
                        kv_heads: kv_heads.clone(),
                        positions: positions.clone(),
                        chunks: chunks.clone(),
                    }));
                }
            }
        }
        tasks
    }
}
