//! The rows of one table.

use super::measure::Measured;
use super::rows::Kind;
use crate::machine::{Bound, Excess};
use flashtile::plan::AnyFacts;
use flashtile::{Rate, Unit};

/// Rows of one kind and one unit, with the limit that was measured around them.
pub(super) struct Group {
    pub(super) kind: Kind,
    pub(super) unit: Unit,
    pub(super) bound: Bound,
    /// Facts of the device.
    pub(super) facts: AnyFacts,
    pub(super) rows: Vec<Measured>,
}

impl Group {
    /// Why a row exceeds the limit, if it does.
    pub(super) fn excess(&self, measured: &Measured) -> Option<Excess> {
        let (seconds, unit) = (measured.seconds(), &measured.unit);
        let why = self.bound.excess(&self.facts, &measured.work, seconds, measured.copies)?;
        match self.bound.rate {
            Rate::Arithmetic if *unit != self.unit => {
                Some(Excess::Unit { unit: unit.name.clone(), of: self.unit.name.clone() })
            }
            Rate::Arithmetic | Rate::Bandwidth => Some(why),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::options::BenchArgs;
    use crate::bench::peers::Peers;
    use crate::bench::{plot, row_json, rows, table};
    use crate::command_line::{Cli, Command};
    use crate::machine::Work;
    use clap::Parser;
    use flashtile::plan::machines;
    use flashtile::{Limit, Unit};

    fn args(line: &[&str]) -> BenchArgs {
        match Cli::parse_from([&["flashtile", "bench"], line].concat()).command {
            Command::Bench(args) => args,
            other => panic!("{other:?}"),
        }
    }

    fn group(rate: Rate, of: &str) -> Group {
        let args = args(&["decode", "--seq", "64", "--dtype", "f32", "--head-dim", "64"]);
        let problem = rows::rows(&args, Kind::Decode).unwrap().remove(0);
        let unit =
            |name: &str| Unit { name: name.to_owned(), threads: Some(2), dtype: None, max_intensity: 64.0 };
        let row = |seconds| Measured {
            row: problem.clone(),
            kernel: String::new(),
            unit: unit("avx512"),
            work: Work { flops: 1e6, bytes: 1e6 },
            quartiles: [seconds; 3],
            repetitions: 3,
            apart: None,
            copies: 4,
            nrmse: 0.0,
            host: None,
            prepare: None,
        };
        Group {
            kind: Kind::Decode,
            unit: unit(of),
            bound: Bound { rate, limit: Limit { per_second: 1e9, by: "read" } },
            facts: AnyFacts::new(machines::AVX2_8),
            rows: vec![row(2e-3), row(0.9e-3), row(0.8e-3)],
        }
    }

    #[test]
    fn rows_above_the_limit_say_why() {
        let shown = |rate, of| table(&group(rate, of), &Peers::default());
        let cached = shown(Rate::Bandwidth, "avx512");
        assert!(cached.contains("  50.0%\n") && cached.contains("  111.1% [1]\n"), "{cached}");
        assert!(
            cached.contains(
                "  125.0% [1]\n[1] above the limit: 3.81 MiB of K and V stay in caches of 36.0 MiB"
            ),
            "{cached}"
        );
        assert!(cached.ends_with("the memory of the limit\n"), "{cached}");
        let other = shown(Rate::Arithmetic, "avx2");
        assert!(
            other.ends_with("[1] above the limit: computed by avx512, the limit is for avx2\n"),
            "{other}"
        );
        let busy = shown(Rate::Arithmetic, "avx512");
        assert!(busy.contains("[1] above the limit: the machine was faster than while"), "{busy}");
        let drawn = plot::picture(&[group(Rate::Bandwidth, "avx512")]);
        assert!(drawn.contains(">in cache</text>"), "{drawn}");
        let json = |at: usize| {
            let group = group(Rate::Bandwidth, "avx512");
            row_json(&group.rows[at], &group, &Peers::default())["fraction_note"].clone()
        };
        assert!(json(0).is_null() && json(1).as_str().unwrap().contains("caches of 36.0 MiB"));
    }
}
