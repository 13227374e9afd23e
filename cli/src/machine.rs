//! The CPU for commands: pool, instruction set, measured limits.

use crate::failure::{Failure, Result};
use crate::metal::{self, Metal};
use crate::options::{CpuArgs, Kernels};
use crate::report;
use flashtile::cpu::limits;
use flashtile::cuda::limits::ProductUnit;
use flashtile::cuda::{self, Cuda};
use flashtile::plan::{CpuFacts, Isa, PlannedPrefix};
use flashtile::{Cpu, CpuPlan, Dtype, PlanOptions, Problem, Sequence, Unsupported, Workspace};
use std::ops::Range;

/// Runs work on a pool of `threads` threads, or on the default pool.
pub(crate) fn on_threads<R: Send>(
    threads: Option<usize>,
    work: impl FnOnce() -> Result<R> + Send,
) -> Result<R> {
    match threads {
        None => work(),
        Some(n) => {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(n).build();
            pool.map_err(|e| Failure::at(format_args!("--threads {n}"), e))?.install(work)
        }
    }
}

/// The CPU with the threads of the current pool.
pub(crate) fn cpu(args: CpuArgs) -> Result<Cpu> {
    match args.isa {
        None => Ok(Cpu::new()),
        Some(isa) => Cpu::with_isa(isa).map_err(|e| Failure::at("--isa", e)),
    }
}

/// Options of a plan.
pub(crate) fn options(splits: Option<usize>, kernels: Kernels) -> PlanOptions {
    let mut options = PlanOptions::default();
    options.splits = splits;
    options.kernels = kernels.into();
    options
}

/// Why there is no plan, with advice about the number of splits.
pub(crate) fn unplanned(problem: &Problem, facts: &CpuFacts, error: &Unsupported) -> Failure {
    match (error, CpuPlan::new(problem, facts, PlanOptions::default())) {
        (Unsupported::Splits { .. }, Ok(plan)) => {
            let keys = plan.block_k();
            Failure::new(format_args!("{error}: a split holds at least one block of {keys} keys"))
        }
        (Unsupported::Kernels { .. }, _) => Failure::at("--kernels", "applies to the cuda backend only"),
        _ => Failure::new(error),
    }
}

/// The workspace of a plan.
pub(crate) fn workspace(plan: &CpuPlan) -> Result<Workspace> {
    plan.try_workspace().map_err(Failure::new)
}

/// Minimum work of a problem.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Work {
    pub(crate) flops: f64,
    /// The K and V bytes of each visible key, counted once.
    pub(crate) bytes: f64,
}

impl Work {
    pub(crate) fn of(problem: &Problem) -> Self {
        let dims = problem.dims();
        let keys: usize = problem.sequences().iter().map(|s| seen(problem, s).len()).sum();
        let row = row_bytes(problem);
        Self { flops: problem.flops(), bytes: keys as f64 * (dims.kv_heads * row) as f64 }
    }

    /// Minimum work of a plan, which reads shared prefixes once.
    pub(crate) fn planned(plan: &CpuPlan) -> Self {
        let (work, dims) = (Self::of(plan.problem()), plan.problem().dims());
        let row = row_bytes(plan.problem());
        let shared = shared_keys(plan) as f64 * (dims.kv_heads * row) as f64;
        Self { bytes: work.bytes - shared, ..work }
    }
}

/// Keys of planned prefixes that both a sequence and one before it see.
fn shared_keys(plan: &CpuPlan) -> usize {
    let problem = plan.problem();
    let of_prefix = |prefix: &PlannedPrefix| {
        let seen = problem.sequences()[prefix.sequences.clone()].iter().map(|s| {
            let seen = seen(problem, s);
            seen.start.max(prefix.tokens.start)..seen.end.min(prefix.tokens.end)
        });
        let mut seen: Vec<Range<usize>> = seen.filter(|keys| !keys.is_empty()).collect();
        seen.sort_by_key(|keys| keys.start);
        // Only what extends beyond all previous sequences is new.
        let (mut again, mut end) = (0, 0);
        for keys in seen {
            again += keys.end.min(end).saturating_sub(keys.start);
            end = end.max(keys.end);
        }
        again
    };
    plan.prefixes().iter().map(of_prefix).sum()
}

/// Keys that any query row of the sequence sees. The keys of successive rows form one interval whose ends never move
/// back.
fn seen(problem: &Problem, s: &Sequence) -> Range<usize> {
    if s.q_len == 0 {
        return 0..0;
    }
    problem.visible(s, 0).start..problem.visible(s, s.q_len - 1).end
}

/// The processor or device whose limits apply.
#[derive(Debug, Clone)]
pub(crate) enum Unit {
    Cpu { isa: Isa, threads: usize },
    Cuda(Cuda, Dtype),
    Metal(Metal, Dtype),
}

impl Unit {
    /// The unit that computes a dtype on a CPU.
    pub(crate) fn of_plan(plan: &CpuPlan) -> Self {
        Self::Cpu { isa: plan.isa(), threads: plan.threads() }
    }

    /// Name of an instruction set, or of a device.
    pub(crate) fn name(&self) -> &str {
        match self {
            Self::Cpu { isa, .. } => isa.name(),
            Self::Cuda(cuda, _) => cuda.name(),
            Self::Metal(metal, _) => metal::name(metal),
        }
    }

    /// Threads of a CPU.
    pub(crate) const fn threads(&self) -> Option<usize> {
        match self {
            Self::Cpu { threads, .. } => Some(*threads),
            Self::Cuda(..) | Self::Metal(..) => None,
        }
    }

    /// Whether both have the same limits.
    pub(crate) fn limits_as(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Cpu { isa: a, threads: m }, Self::Cpu { isa: b, threads: n }) => (a, m) == (b, n),
            (Self::Cuda(_, a), Self::Cuda(_, b)) | (Self::Metal(_, a), Self::Metal(_, b)) => a == b,
            _ => false,
        }
    }

    /// Operations per byte of K and V from which memory bandwidth is not the limit.
    const fn most_intensity(&self) -> f64 {
        match self {
            Self::Cpu { .. } => 64.0,
            Self::Cuda(..) => 1000.0,
            Self::Metal(..) => 100.0,
        }
    }
}

/// The rate of the machine that bounds the time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LimitKind {
    Arithmetic,
    Bandwidth,
}

impl LimitKind {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Arithmetic => "fma",
            Self::Bandwidth => "bandwidth",
        }
    }
}

/// A measured rate of the machine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limit {
    pub(crate) kind: LimitKind,
    /// Flop/s or bytes/s.
    pub(crate) rate: f64,
    /// The instructions that multiply, or how memory is accessed.
    by: &'static str,
}

impl Limit {
    /// Measures a rate: multiply-adds, or reads from memory.
    pub(crate) fn measure(kind: LimitKind, unit: &Unit) -> Result<Self> {
        let (rate, by) = match (unit, kind) {
            (&Unit::Cpu { isa, threads }, LimitKind::Arithmetic) => (limits::fma_peak(isa, threads), "FMA"),
            (&Unit::Cpu { threads, .. }, LimitKind::Bandwidth) => (limits::read_bandwidth(threads), "read"),
            (Unit::Cuda(cuda, dtype), LimitKind::Arithmetic) => {
                let peak = cuda::limits::matrix_peak(cuda, *dtype)?;
                let by = match peak.unit {
                    ProductUnit::Wgmma => "wgmma",
                    ProductUnit::MmaSync => "mma.sync",
                    _ => "FMA",
                };
                (peak.rate, by)
            }
            (Unit::Cuda(cuda, _), LimitKind::Bandwidth) => (cuda::limits::read_bandwidth(cuda)?, "read"),
            (Unit::Metal(metal, dtype), LimitKind::Arithmetic) => {
                (metal::matrix_peak(metal, *dtype)?, "simdgroup matrix")
            }
            (Unit::Metal(metal, _), LimitKind::Bandwidth) => (metal::copy_bandwidth(metal)?, "copy"),
        };
        Ok(Self { kind, rate, by })
    }

    /// Measures the rate that bounds the time of the work.
    pub(crate) fn of(work: &Work, unit: &Unit) -> Result<Self> {
        let arithmetic = Self::measure(LimitKind::Arithmetic, unit)?;
        if work.flops >= work.bytes * unit.most_intensity() {
            return Ok(arithmetic);
        }
        let bandwidth = Self::measure(LimitKind::Bandwidth, unit)?;
        Ok(if arithmetic.seconds(work) > bandwidth.seconds(work) { arithmetic } else { bandwidth })
    }

    /// The larger of two measurements of the same rate, since noise only lowers it.
    pub(crate) fn max(self, other: Self) -> Self {
        Self { rate: self.rate.max(other.rate), ..self }
    }

    /// Minimum time for the work.
    fn seconds(&self, work: &Work) -> f64 {
        match self.kind {
            LimitKind::Arithmetic => work.flops / self.rate,
            LimitKind::Bandwidth => work.bytes / self.rate,
        }
    }

    /// Fraction of the rate that is reached if the work takes this many seconds.
    pub(crate) fn fraction(&self, work: &Work, seconds: f64) -> f64 {
        self.seconds(work) / seconds
    }
}

impl std::fmt::Display for Limit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.kind {
            LimitKind::Arithmetic => write!(f, "{} peak {}", self.by, report::flop_rate(self.rate)),
            LimitKind::Bandwidth => write!(f, "{} bandwidth {}", self.by, report::byte_rate(self.rate)),
        }
    }
}

/// Bytes of a key and a value of one head.
fn row_bytes(problem: &Problem) -> usize {
    let dims = problem.dims();
    problem.k_codec().row_bytes(dims.head_dim) + problem.v_codec().row_bytes(dims.value_dim)
}
