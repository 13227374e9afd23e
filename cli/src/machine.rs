//! Threads and instruction set of the CPU, options of plans, and measured limits of any backend.

use crate::failure::{Failure, Result};
use crate::options::{CpuArgs, Kernels};
use crate::report;
use flashtile::plan::{AnyFacts, CpuFacts, CudaFacts};
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

    /// Why the work takes less time than the limit allows, if it does. Runs read `copies` copies of the keys and values in turn.
    pub(crate) fn excess(
        &self,
        facts: &AnyFacts,
        work: &Work,
        seconds: f64,
        copies: usize,
    ) -> Option<Excess> {
        // Percentages have one decimal: what is printed as 100.0% needs no reason.
        if self.fraction(work, seconds) < 1.0005 {
            return None;
        }
        let bytes = work.bytes * copies as f64;
        let cache = cache_bytes(facts).filter(|&cache| self.rate == Rate::Bandwidth && bytes < cache as f64);
        Some(cache.map_or(Excess::Faster, |cache| Excess::Cached { bytes, cache }))
    }

    /// Fraction of the limit that the work reaches if it takes this many seconds.
    pub(crate) fn fraction(&self, work: &Work, seconds: f64) -> f64 {
        self.seconds(work) / seconds
    }
}

/// Why work takes less time than a limit allows.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Excess {
    /// Keys and values of `bytes` bytes stay in caches of `cache` bytes.
    Cached { bytes: f64, cache: usize },
    /// A unit computes the products that is not the limit's.
    Unit { unit: String, of: String },
    /// The limit was measured while the machine was slower.
    Faster,
}

impl Excess {
    /// In two words, for pictures.
    pub(crate) const fn name(&self) -> &'static str {
        match self {
            Self::Cached { .. } => "in cache",
            Self::Unit { .. } => "other unit",
            Self::Faster => "faster clock",
        }
    }
}

impl std::fmt::Display for Excess {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cached { bytes, cache } => write!(
                f,
                "{} of K and V stay in caches of {}, which are faster than the memory of the limit",
                report::bytes(*bytes),
                report::bytes(*cache as f64)
            ),
            Self::Unit { unit, of } => write!(f, "computed by {unit}, the limit is for {of}"),
            Self::Faster => f.write_str(
                "the machine was faster than while the limit was measured: a higher clock, or less other load",
            ),
        }
    }
}

/// Bytes of the caches that all cores read through, if they are known.
fn cache_bytes(facts: &AnyFacts) -> Option<usize> {
    let cpu = facts.of::<CpuFacts>().map(|cpu| cpu.l3.saturating_add(cpu.threads.saturating_mul(cpu.l2)));
    cpu.or_else(|| facts.of::<CudaFacts>().map(|cuda| cuda.l2))
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

#[cfg(test)]
mod tests {
    use super::*;
    use flashtile::plan::machines;

    #[test]
    fn a_fraction_above_the_limit_has_a_cause() {
        let bound = |rate, per_second| Bound { rate, limit: Limit { per_second, by: "read" } };
        let work = |bytes| Work { flops: 1e9, bytes };
        let facts = AnyFacts::new(machines::H200);
        let memory = bound(Rate::Bandwidth, 1e12);
        assert_eq!(memory.excess(&facts, &work(1e6), 1e-6, 1), None);
        assert_eq!(memory.excess(&facts, &work(1e6), 1.5e-6, 1), None);
        let cached = memory.excess(&facts, &work(1e6), 0.5e-6, 1).unwrap().to_string();
        assert_eq!(
            cached,
            "977 KiB of K and V stay in caches of 60.0 MiB, which are faster than the memory of the limit"
        );
        assert_eq!(memory.excess(&facts, &work(1e6), 0.5e-6, 100), Some(Excess::Faster));
        let arithmetic = bound(Rate::Arithmetic, 1e12);
        assert_eq!(arithmetic.excess(&facts, &work(1.0), 0.9e-3, 1), Some(Excess::Faster));
        assert_eq!(arithmetic.excess(&facts, &work(1.0), 1e-3, 1), None);
        let cpu = AnyFacts::new(machines::AVX2_8);
        assert!(memory.excess(&cpu, &work(33e6), 0.5e-6, 1).unwrap().to_string().contains("36.0 MiB"));
    }
}
