//! The time of the runs of a plan, relative to a limit that is measured around them.

use crate::failure::Result;
use crate::machine::{Bound, Excess, Work, rate_name};
use crate::report;
use flashtile::{Backend, Unit};
use serde_json::{Value, json};

/// Seconds that all repetitions may take together: a repetition that would exceed them does not begin.
const MEASURE_SECONDS: f64 = 0.3;

/// Largest number of repetitions: more do not make the median steadier.
const MAX_REPETITIONS: usize = 31;

/// A fraction of the limit means nothing below this number of operations or seconds, because calls dominate the time,
/// not kernels.
const MIN_FLOPS: f64 = 1e8;
const MIN_SECONDS: f64 = 200e-6;

/// The time of a plan's runs.
pub(crate) struct Timing {
    /// The unit whose limits apply, if a kernel ran.
    pub(crate) unit: Option<Unit>,
    pub(crate) work: Work,
    pub(crate) seconds: f64,
    /// Number of timed runs, whose median is `seconds`.
    repetitions: usize,
    /// The measured limit, if the problem is large enough for a comparison.
    bound: Option<Bound>,
    /// The cause of a fraction of the limit above 1.
    excess: Option<Excess>,
}

impl Timing {
    /// Measures runs, each of which returns its seconds, and the limit of the unit that computes them.
    pub(crate) fn measure(
        backend: &dyn Backend,
        unit: Option<Unit>,
        work: Work,
        mut run: impl FnMut() -> Result<f64>,
    ) -> Result<Self> {
        let compared = unit.as_ref().filter(|_| work.flops >= MIN_FLOPS);
        let before = compared.map(|unit| Bound::of(backend, unit, &work)).transpose()?;
        let (seconds, repetitions) = match unit {
            Some(_) => median(run)?,
            // Backends without kernels of their own are slow, and their time measures nothing.
            None => (run()?, 1),
        };
        let bound = match (before, &unit) {
            (Some(before), Some(unit)) if unit.threads.is_some() && seconds >= MIN_SECONDS => {
                // The machine may have been busy during one of the two measurements.
                Some(before.max(Bound::measure(backend, before.rate, unit)?))
            }
            // Calls are no part of the times of a device's own clock.
            (before, Some(unit)) if unit.threads.is_none() => before,
            _ => None,
        };
        // Every run reads the same keys and values.
        let excess = bound.and_then(|bound| bound.excess(&backend.facts(), &work, seconds, 1));
        Ok(Self { unit, work, seconds, repetitions, bound, excess })
    }

    /// The time of a run: `1.23 ms, median of 7 runs`.
    pub(crate) fn words(&self) -> String {
        let repetitions = match self.repetitions {
            1 => "one run".to_owned(),
            n => format!("median of {n} runs"),
        };
        format!("{}, {repetitions}", report::seconds(self.seconds))
    }

    /// Operations per second.
    pub(crate) fn flop_rate(&self) -> String {
        report::flop_rate(self.work.flops / self.seconds)
    }

    /// The fraction of the limit, or why there is none.
    pub(crate) fn reached(&self) -> String {
        match self.bound {
            Some(bound) => {
                let fraction = report::percent(bound.fraction(&self.work, self.seconds));
                let threads = self.unit.as_ref().and_then(|unit| unit.threads);
                let threads = threads.map(|n| format!(" ({})", report::counted(n, "thread")));
                let why = self.excess.as_ref().map(|why| format!(": {why}"));
                format!("{fraction} of {bound}{}{}", threads.unwrap_or_default(), why.unwrap_or_default())
            }
            None if self.unit.is_some() => "too small to compare with a limit".to_owned(),
            None => "no limit applies".to_owned(),
        }
    }

    /// The fields of the time and of the limit.
    pub(crate) fn json(&self) -> Value {
        let bound = self.bound;
        json!({
            "seconds": self.seconds,
            "repetitions": self.repetitions,
            "flops": self.work.flops,
            "kv_bytes": self.work.bytes,
            "gflops": self.work.flops / self.seconds / 1e9,
            "gbytes_per_s": self.work.bytes / self.seconds / 1e9,
            "limit": bound.map(|b| rate_name(b.rate)),
            "limit_per_s": bound.map(|b| b.limit.per_second),
            "fraction": bound.map(|b| b.fraction(&self.work, self.seconds)),
            "fraction_note": self.excess.as_ref().map(Excess::to_string),
        })
    }
}

/// Median time and number of warm runs, or the time of the first run if there is no time for another.
fn median(mut run: impl FnMut() -> Result<f64>) -> Result<(f64, usize)> {
    let first = run()?;
    let (mut spent, mut last) = (first, first);
    let mut times = Vec::new();
    while times.len() < MAX_REPETITIONS && spent + last <= MEASURE_SECONDS {
        last = run()?;
        spent += last;
        times.push(last);
    }
    times.sort_by(f64::total_cmp);
    Ok(times.get(times.len() / 2).map_or((first, 1), |&median| (median, times.len())))
}
