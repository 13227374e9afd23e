//! Threads and instruction set of the CPU, options of plans, and measured limits of any backend.

use crate::failure::{Failure, Result};
use crate::options::{CpuArgs, Kernels};
use crate::report;
use flashtile::{AnyPlan, Backend, Cpu, Limit, PlanOptions, Rate, Unit};

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

/// Minimum work of a plan.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Work {
    pub(crate) flops: f64,
    /// The K and V bytes of each visible key, counted once; a shared prefix counts once for all of its sequences.
    pub(crate) bytes: f64,
}

impl Work {
    pub(crate) fn of(plan: &AnyPlan) -> Self {
        Self { flops: plan.problem().flops(), bytes: plan.kv_bytes() }
    }
}

/// A measured limit of the hardware, and the rate that it limits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bound {
    pub(crate) rate: Rate,
    pub(crate) limit: Limit,
}

/// Name of a rate in JSON.
pub(crate) const fn rate_name(rate: Rate) -> &'static str {
    match rate {
        Rate::Arithmetic => "fma",
        Rate::Bandwidth => "bandwidth",
    }
}

impl Bound {
    /// Measures a rate.
    pub(crate) fn measure(backend: &dyn Backend, rate: Rate, unit: &Unit) -> Result<Self> {
        Ok(Self { rate, limit: backend.limit(rate, unit)? })
    }

    /// Measures the rate that bounds the time of the work.
    pub(crate) fn of(backend: &dyn Backend, unit: &Unit, work: &Work) -> Result<Self> {
        let arithmetic = Self::measure(backend, Rate::Arithmetic, unit)?;
        if work.flops >= work.bytes * unit.max_intensity {
            return Ok(arithmetic);
        }
        let bandwidth = Self::measure(backend, Rate::Bandwidth, unit)?;
        Ok(if arithmetic.seconds(work) > bandwidth.seconds(work) { arithmetic } else { bandwidth })
    }

    /// The larger of two measurements of one rate, since noise only lowers a measurement.
    pub(crate) fn max(self, other: Self) -> Self {
        if other.limit.per_second > self.limit.per_second { other } else { self }
    }

    /// Minimum time for the work.
    fn seconds(&self, work: &Work) -> f64 {
        match self.rate {
            Rate::Arithmetic => work.flops / self.limit.per_second,
            Rate::Bandwidth => work.bytes / self.limit.per_second,
        }
    }

    /// Fraction of the limit that the work reaches if it takes this many seconds.
    pub(crate) fn fraction(&self, work: &Work, seconds: f64) -> f64 {
        self.seconds(work) / seconds
    }
}

impl std::fmt::Display for Bound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Limit { per_second, by } = self.limit;
        match self.rate {
            Rate::Arithmetic => write!(f, "{by} peak {}", report::flop_rate(per_second)),
            Rate::Bandwidth => write!(f, "{by} bandwidth {}", report::byte_rate(per_second)),
        }
    }
}
