//! [`Plan`] and [`Facts`] of the CPU: rates that it reaches, and its plans in words.

use super::backward_plan::CpuBackwardPlan;
use super::cpu_plan::{CpuPlan, isa_for};
use super::facts::CpuFacts;
use super::schedule::PlannedPrefix;
use flashtile_core::human::{bytes, counted, percent};
use flashtile_core::isa::Isa;
use flashtile_core::plan::{
    AnyBackwardPlan, BackwardPlan, Explanation, Facts, Field, Plan, PlanOptions, Rates, TileSize, Unsupported,
};
use flashtile_core::problem::{Problem, Sequence};
use flashtile_core::quality::Accumulation;
use std::collections::BTreeMap;
use std::ops::Range;

impl Plan for CpuPlan {
    fn problem(&self) -> &Problem {
        self.problem()
    }

    fn options(&self) -> PlanOptions {
        self.options()
    }

    fn kernel(&self) -> String {
        self.kernel()
    }

    fn workspace_bytes(&self) -> usize {
        self.workspace_bytes()
    }

    fn splits(&self) -> usize {
        self.splits()
    }

    fn task_count(&self) -> usize {
        self.task_count()
    }

    fn tile(&self, _: &Sequence) -> TileSize {
        TileSize { rows: self.tile_rows(), keys: self.block_k() }
    }

    fn accumulation(&self) -> Accumulation {
        self.accumulation()
    }

    fn kv_bytes(&self) -> f64 {
        let problem = self.problem();
        let shared = shared_keys(self) * problem.dims().kv_heads * problem.kv_row_bytes();
        problem.kv_bytes() - shared as f64
    }
}

impl BackwardPlan for CpuBackwardPlan {
    fn problem(&self) -> &Problem {
        self.problem()
    }

    fn options(&self) -> PlanOptions {
        self.options()
    }

    fn kernel(&self) -> String {
        self.kernel()
    }

    fn workspace_bytes(&self) -> usize {
        self.workspace_bytes()
    }

    fn task_count(&self) -> usize {
        self.task_count()
    }

    fn words(&self) -> String {
        format!(
            "{} in tiles of {} rows by {} keys, {}, {}",
            counted(self.task_count(), "task"),
            self.tile_rows(),
            self.block_k(),
            counted(self.level_count(), "level"),
            counted(self.workers(), "worker"),
        )
    }

    fn fields(&self) -> Vec<(&'static str, Field)> {
        vec![
            ("levels", self.level_count().into()),
            ("threads", self.workers().into()),
            ("tile_rows", self.tile_rows().into()),
            ("block_k", self.block_k().into()),
        ]
    }
}

/// Keys of planned prefixes that both a sequence and one before it see.
fn shared_keys(plan: &CpuPlan) -> usize {
    let problem = plan.problem();
    let of_prefix = |prefix: &PlannedPrefix| {
        let seen = problem.sequences()[prefix.sequences.clone()].iter().map(|s| {
            let seen = problem.visible_union(s, 0..s.q_len);
            seen.start.max(prefix.tokens.start)..seen.end.min(prefix.tokens.end)
        });
        let mut seen: Vec<Range<usize>> = seen.filter(|keys| !keys.is_empty()).collect();
        seen.sort_by_key(|keys| keys.start);
        // A key is new if no previous sequence has seen it.
        let (mut again, mut end) = (0, 0);
        for keys in seen {
            again += keys.end.min(end).saturating_sub(keys.start);
            end = end.max(keys.end);
        }
        again
    };
    plan.prefixes().iter().map(of_prefix).sum()
}

/// Seconds between a call and the first product of its threads.
const START: f64 = 5e-6;

/// Bytes per second that a thread reads from memory.
const THREAD_BANDWIDTH: f64 = 12e9;

/// Threads that saturate the memory of a processor.
const MEMORY_THREADS: usize = 16;

/// Floating-point operations per second of one thread in prefill.
const fn thread_flops(isa: Isa) -> f64 {
    match isa {
        Isa::Portable => 12e9,
        Isa::Avx2 => 75e9,
        Isa::Avx512 | Isa::Avx512Vnni => 130e9,
        Isa::Avx512Bf16 => 250e9,
        Isa::Amx => 500e9,
    }
}

impl CpuFacts {
    /// The rates that the processor reaches for a problem, which take no plan to estimate.
    #[must_use]
    pub fn rates_for(&self, problem: &Problem) -> Rates {
        let threads = self.threads.max(1);
        Rates {
            start: START,
            copy: f64::INFINITY,
            flops: threads as f64 * thread_flops(isa_for(self.isa, problem)),
            bandwidth: threads.min(MEMORY_THREADS) as f64 * THREAD_BANDWIDTH,
        }
    }
}

impl Facts for CpuFacts {
    type Plan = CpuPlan;

    const BACKEND: &'static str = "cpu";

    fn plan(&self, problem: &Problem, options: PlanOptions) -> Result<CpuPlan, Unsupported> {
        CpuPlan::new(problem, self, options)
    }

    fn plan_backward(&self, problem: &Problem, options: PlanOptions) -> Result<AnyBackwardPlan, Unsupported> {
        CpuBackwardPlan::new(problem, self, options).map(AnyBackwardPlan::new)
    }

    fn rates(&self, plan: &CpuPlan) -> Rates {
        self.rates_for(plan.problem())
    }

    fn explain(&self, plan: &CpuPlan) -> Explanation {
        let caches = [("L1d", self.l1d), ("L2", self.l2), ("L3", self.l3)];
        let caches = caches.map(|(name, size)| format!("{name} {}", bytes(size as f64))).join(", ");
        Explanation {
            machine: format!("{}, {}, {caches}", self.isa, counted(self.threads, "thread")),
            lines: lines(plan),
            fields: fields(self, plan),
        }
    }
}

fn lines(plan: &CpuPlan) -> Vec<(&'static str, String)> {
    // Tasks hold whole tiles, and so may have room for more rows than there are.
    let of_prefixes = plan.prefixes().iter().map(|prefix| prefix.rows).max().unwrap_or(0);
    let rows = plan.task_rows().min(max_rows(plan).max(of_prefixes));
    let tiles = format!(
        "{} rows x {} keys; {} ({} per GQA group) share each packed block",
        plan.tile_rows(),
        plan.block_k(),
        counted(rows, "row"),
        counted(plan.problem().dims().gqa_group(), "query head")
    );
    let mut lines = vec![
        ("kernel", format!("{}: {}", plan.kernel(), kernel_reason(plan))),
        ("tiles", tiles),
        ("tasks", format!("{} for {}", plan.task_count(), counted(plan.threads(), "thread"))),
        ("splits", format!("{}: {}", splits_text(plan), splits_reason(plan))),
    ];
    lines.extend(prefixes_text(plan).into_iter().map(|line| ("prefix", line)));
    lines
}

/// A line for each prefix that is computed once.
fn prefixes_text(plan: &CpuPlan) -> Vec<String> {
    let line = |prefix: &PlannedPrefix| {
        let PlannedPrefix { sequences, tokens, rows, splits } = prefix;
        format!(
            "tokens {}..{} of sequences {}..{} read once, by {} of a GQA group; {}",
            tokens.start,
            tokens.end,
            sequences.start,
            sequences.end,
            counted(*rows, "row"),
            counted(*splits, "split"),
        )
    };
    if !plan.problem().desc().prefixes.is_empty() && plan.prefixes().is_empty() {
        let keys = plan.block_k();
        return vec![format!(
            "none: a prefix needs a whole block of {keys} keys, and two sequences with queries"
        )];
    }
    plan.prefixes().iter().map(line).collect()
}

/// Rows of a GQA group in the sequence with the most queries.
fn max_rows(plan: &CpuPlan) -> usize {
    let gqa_group = plan.problem().dims().gqa_group();
    plan.problem().sequences().iter().map(|s| s.q_len * gqa_group).max().unwrap_or(0)
}

fn kernel_reason(plan: &CpuPlan) -> String {
    let (max, tile) = (max_rows(plan), plan.tile_rows());
    let rows = if max <= tile { format!("in one tile of {tile}") } else { format!("in tiles of {tile}") };
    format!(
        "at most {} of a GQA group, {rows}; {} for {}",
        counted(max, "row"),
        plan.isa(),
        plan.problem().dtype()
    )
}

/// Splits of the sequences' own keys: how many sequences have how many.
fn splits_text(plan: &CpuPlan) -> String {
    let mut counts: BTreeMap<usize, usize> = BTreeMap::new();
    for &splits in plan.sequence_splits() {
        *counts.entry(splits).or_default() += 1;
    }
    match counts.len() {
        0 | 1 => counts.keys().next().copied().unwrap_or(1).to_string(),
        _ => {
            let part =
                |(splits, count): (&usize, &usize)| format!("{splits} of {}", counted(*count, "sequence"));
            counts.iter().map(part).collect::<Vec<_>>().join(", ")
        }
    }
}

fn splits_reason(plan: &CpuPlan) -> String {
    let longest = plan.problem().sequences().iter().map(|s| s.kv_len).max().unwrap_or(0);
    if plan.options().splits.is_some() {
        "asked for".to_owned()
    } else if plan.threads() == 1 {
        "one thread".to_owned()
    } else if plan.splits() == 1 && plan.task_count() == 0 {
        "no query rows".to_owned()
    } else if plan.splits() == 1 && longest <= plan.block_k() {
        format!("at most {}, one block of {}", counted(longest, "key"), plan.block_k())
    } else if plan.splits() == 1 && plan.idle() > 0.1 {
        format!(
            "threads wait for an estimated {} of the time: rows see one block each, or partial results would take too much memory",
            percent(plan.idle())
        )
    } else {
        format!("threads wait for an estimated {} of the time", percent(plan.idle()))
    }
}

fn fields(facts: &CpuFacts, plan: &CpuPlan) -> Vec<(&'static str, Field)> {
    let range = |range: &Range<usize>| Field::from_iter([range.start, range.end]);
    let prefix = |prefix: &PlannedPrefix| {
        Field::from(vec![
            ("sequences", range(&prefix.sequences)),
            ("tokens", range(&prefix.tokens)),
            ("rows", prefix.rows.into()),
            ("splits", prefix.splits.into()),
        ])
    };
    vec![
        ("kernel_reason", kernel_reason(plan).into()),
        ("isa", plan.isa().name().into()),
        ("threads", plan.threads().into()),
        ("l1d", facts.l1d.into()),
        ("l2", facts.l2.into()),
        ("l3", facts.l3.into()),
        ("tile_rows", plan.tile_rows().into()),
        ("block_k", plan.block_k().into()),
        ("task_rows", plan.task_rows().into()),
        ("splits_reason", splits_reason(plan).into()),
        ("sequence_splits", plan.sequence_splits().iter().copied().collect()),
        ("prefixes", plan.prefixes().iter().map(prefix).collect()),
        ("idle", plan.idle().into()),
    ]
}
