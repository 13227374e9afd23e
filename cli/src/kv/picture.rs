//! A plot of errors against bits per element, as SVG.

use super::measure::Sums;
use super::report::Report;
use crate::chart::{self, Axis, Line, Mark, Panel};
use crate::failure::{Failure, Result};
use crate::output::Destination;
use flashtile::quality::KeyCodec;

/// Margin above and below the plotted values, as a factor.
const MARGIN: f64 = 2.0;

/// An error that is plotted against bits.
struct Error<'a> {
    title: &'static str,
    name: &'static str,
    gate: f64,
    /// The error with a codec for keys and one for values.
    of: &'a dyn Fn(&Sums, [usize; 2]) -> Option<f64>,
}

/// Ratio between the errors of a codec with plain and with centered keys. From this ratio on, both points are named.
const APART: f64 = 1.5;

/// Draws a panel of divergences and one of output errors, each with a line for plain keys and one for centered keys.
pub(super) fn draw(report: &Report<'_>, all: &Sums, destination: &Destination) -> Result<()> {
    let errors = [
        Error {
            title: "KL of attention probabilities vs bits per element",
            name: "mean KL divergence, nats",
            gate: report.gate.kl,
            of: &|of, [key, _]| of.kl(key),
        },
        Error {
            title: "NRMSE of the output vs bits per element",
            name: "NRMSE of the output",
            gate: report.gate.nrmse,
            of: &|of, [key, value]| of.nrmse(key, value),
        },
    ];
    // An error that is 0 or not finite cannot be drawn on a logarithmic axis.
    let panels: Vec<Panel> = errors.iter().filter_map(|error| panel(report, all, error)).collect();
    if panels.is_empty() {
        return Err(Failure::at("--svg", "nothing to draw: no codec has a finite, nonzero error"));
    }
    let title = format!("Errors of KV cache codecs vs bits per element, {}", report.pairs_words());
    destination.text(&chart::document(&title, &panels))
}

/// The panel of an error; `None` if no codec has one that can be drawn.
fn panel(report: &Report<'_>, all: &Sums, error: &Error<'_>) -> Option<Panel> {
    let place = |sums: &Sums, [key, value]: [usize; 2]| {
        let y = (error.of)(sums, [key, value]).filter(|y| *y > 0.0 && y.is_finite())?;
        Some((report.bits(key, value), y))
    };
    let (lines, names) = lines(report, &|codecs| place(all, codecs));
    let mut chosen = Vec::new();
    if let Some(choice) = report.choice {
        let codecs = [choice.best.key, choice.best.value];
        let key: KeyCodec = report.codecs.keys[codecs[0]];
        let what = if choice.meets { "recommended" } else { "nearest" };
        let values = report.codecs.values[codecs[1]];
        let label = format!("{what}: {}{} for keys, {values} for values", key.codec, key.words());
        chosen.extend(place(all, codecs).map(|at| Mark { at, label }));
        // The gate applies to the worst pair of tensors.
        if report.pairs.len() > 1 && !chosen.is_empty() {
            let of_pair = |(pair, of): &(&super::pairs::Pair<'_>, &super::measure::Measured)| {
                Some(Mark { at: place(&of.all, codecs)?, label: format!("its worst pair: {}", pair.name) })
            };
            let worst = report.pairs.iter().filter_map(of_pair).max_by(|a, b| a.at.1.total_cmp(&b.at.1));
            chosen.extend(worst);
        }
    }
    let drawn: Vec<(f64, f64)> = lines
        .iter()
        .flat_map(|line| line.points.iter().chain(&line.apart).copied())
        .chain(chosen.iter().map(|mark| mark.at))
        .collect();
    if drawn.is_empty() {
        return None;
    }
    let low = drawn.iter().map(|at| at.1).fold(error.gate, f64::min) / MARGIN;
    let high = drawn.iter().map(|at| at.1).fold(error.gate, f64::max) * MARGIN;
    let right = drawn.iter().map(|at| at.0).fold(8.0, f64::max) + 1.0;
    let bits = (2..=right as u32).map(|bits| (f64::from(bits), bits.to_string()));
    Some(Panel {
        title: format!("{}, {}", error.title, report.pairs_words()),
        x: Axis {
            name: "bits per element, scales included; keys and values in one codec",
            low: 1.5,
            high: right,
            is_logarithmic: false,
            ticks: bits.collect(),
        },
        y: Axis { name: error.name, low, high, is_logarithmic: true, ticks: chart::powers(low, high) },
        lines,
        level: Some((error.gate, format!("gate {:e}", error.gate))),
        chosen,
        names,
    })
}

/// A line for keys as they are, one for centered keys and one for equalized keys where there are some, and the names of codecs at their
/// points.
fn lines(report: &Report<'_>, place: &dyn Fn([usize; 2]) -> Option<(f64, f64)>) -> (Vec<Line>, Vec<Mark>) {
    let mut lines = Vec::new();
    let mut names: Vec<Mark> = Vec::new();
    let kinds: [(&str, &str); 3] = [
        ("", "keys as they are (discs)"),
        (" centered", "keys centered (rings)"),
        (" centered and equalized", "keys equalized (rings)"),
    ];
    for (words, name) in kinds.into_iter().take(if report.codecs.power.is_some() { 3 } else { 2 }) {
        let keys = report.codecs.keys.iter().enumerate();
        let keys = keys.filter(|(_, key)| key.words() == words && key.codec.dtype().is_none());
        let points: Vec<((f64, f64), String)> = keys
            .filter_map(|(key, of)| Some((place([key, report.same(key)])?, of.codec.to_string())))
            .collect();
        let mut line = Line::named(name);
        line.rings = !words.is_empty();
        for ((place, name), at) in points.iter().zip(0..) {
            // A codec that another one beats is not on the line from few bits to small errors.
            let beats = |(other, _): &((f64, f64), String)| other.0 <= place.0 && other.1 < place.1;
            let beaten = points.iter().enumerate().any(|(other, of)| other != at && beats(of));
            if beaten {
                line.apart.push(*place)
            } else {
                line.points.push(*place)
            }
            // A codec has two points. They share one name if they are close to each other.
            let near = |other: &Mark| {
                other.label == *name && other.at.1 < APART * place.1 && place.1 < APART * other.at.1
            };
            if !names.iter().any(near) {
                names.push(Mark { at: *place, label: format!("{name}{words}") });
            }
        }
        line.points.sort_by(|a, b| a.0.total_cmp(&b.0));
        lines.push(line);
    }
    (lines, names)
}

impl Report<'_> {
    fn pairs_words(&self) -> String {
        match &self.pairs[..] {
            [(pair, _)] => pair.name.clone(),
            pairs => format!("{} pairs of tensors", pairs.len()),
        }
    }
}
