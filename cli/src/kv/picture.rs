//! Errors by bits, as SVG.

use super::measure::Sums;
use super::report::Report;
use crate::chart::{self, Area, Drawn, Line};
use crate::failure::{Failure, Result};
use crate::output::Destination;
use flashtile::quality::KeyCodec;
use plotters::prelude::{
    BLACK, ChartBuilder, Circle, Color, IntoFont, IntoLogRange, PathElement, RGBColor, SeriesLabelPosition,
    Text, WHITE,
};

/// Colour of the gate.
const GREY: RGBColor = RGBColor(110, 110, 110);

/// Margin above and below the plotted values, as a factor.
const MARGIN: f64 = 2.0;

/// One kind of error for every codec.
struct Panel {
    title: String,
    error: &'static str,
    lines: Vec<Line>,
    /// Names of codecs, placed at their points.
    names: Vec<((f64, f64), String)>,
    gate: f64,
    /// The recommended codecs for all pairs of tensors.
    chosen: Option<((f64, f64), String)>,
    /// Their error in the worst pair of tensors, which the gate applies to, if there are several.
    worst: Option<((f64, f64), String)>,
}

impl Panel {
    fn is_empty(&self) -> bool {
        self.chosen.is_none() && self.lines.iter().all(|line| line.points.is_empty() && line.apart.is_empty())
    }
}

/// Ratio of a codec's errors with plain and with centered keys from which both points are named.
const APART: f64 = 1.5;

/// Draws a panel of divergences and one of output errors, each with a line for plain keys and one for centered keys.
pub(super) fn draw(report: &Report<'_>, all: &Sums, destination: &Destination) -> Result<()> {
    let kl = |of: &Sums, [key, _]: [usize; 2]| of.kl(key);
    let nrmse = |of: &Sums, [key, value]: [usize; 2]| of.nrmse(key, value);
    let kl = panel(report, all, ("divergence of the probabilities", "KL, nats", report.gate.kl), &kl);
    let nrmse = panel(report, all, ("error of the output", "NRMSE", report.gate.nrmse), &nrmse);
    // An error that is 0 or not finite cannot be drawn on a logarithmic axis.
    let panels: Vec<Panel> = [kl, nrmse].into_iter().filter(|panel| !panel.is_empty()).collect();
    if panels.is_empty() {
        return Err(Failure::at("--svg", "nothing to draw: no codec has a finite, nonzero error"));
    }
    chart::write(&panels, destination, draw_panel)
}

fn panel(
    report: &Report<'_>,
    all: &Sums,
    (title, error, gate): (&str, &'static str, f64),
    of: &dyn Fn(&Sums, [usize; 2]) -> Option<f64>,
) -> Panel {
    let place = |sums: &Sums, [key, value]: [usize; 2]| {
        let y = of(sums, [key, value]).filter(|y| *y > 0.0 && y.is_finite())?;
        Some((report.bits(key, value), y))
    };
    let point = |codecs: [usize; 2]| place(all, codecs);
    let mut lines = Vec::new();
    let mut names: Vec<((f64, f64), String)> = Vec::new();
    for centered in [false, true] {
        let keys = report.codecs.keys.iter().enumerate();
        let keys = keys.filter(|(_, key)| key.centered == centered && key.codec.dtype().is_none());
        let points: Vec<((f64, f64), String)> = keys
            .filter_map(|(key, of)| Some((point([key, report.same(key)])?, of.codec.to_string())))
            .collect();
        let mut line = Line::named(if centered { "keys centered (rings)" } else { "keys as they are" });
        line.rings = centered;
        for ((place, name), at) in points.iter().zip(0..) {
            // A codec that another one beats is not on the line from few bits to small errors.
            let beats = |(other, _): &((f64, f64), String)| other.0 <= place.0 && other.1 < place.1;
            let beaten = points.iter().enumerate().any(|(other, of)| other != at && beats(of));
            if beaten {
                line.apart.push(*place)
            } else {
                line.points.push(*place)
            }
            // Names at points close to each other would overlap.
            let near = |(other, known): &((f64, f64), String)| {
                known == name && other.1 < APART * place.1 && place.1 < APART * other.1
            };
            if !names.iter().any(near) {
                names.push((*place, if centered { format!("{name} centered") } else { name.clone() }));
            }
        }
        line.points.sort_by(|a, b| a.0.total_cmp(&b.0));
        lines.push(line);
    }
    let chosen = report.choice.and_then(|choice| {
        let (key, value) = (choice.best.key, choice.best.value);
        let KeyCodec { codec, centered } = report.codecs.keys[key];
        let what = if choice.meets { "recommended" } else { "nearest" };
        let centered = if centered { " centered" } else { "" };
        Some((point([key, value])?, format!("{what}: {codec}{centered} + {}", report.codecs.values[value])))
    });
    let worst = report.choice.filter(|_| report.pairs.len() > 1).and_then(|choice| {
        let codecs = [choice.best.key, choice.best.value];
        let places = report.pairs.iter().filter_map(|(pair, of)| Some((place(&of.all, codecs)?, &pair.name)));
        let (at, name) = places.max_by(|a, b| a.0.1.total_cmp(&b.0.1))?;
        Some((at, format!("worst pair: {name}")))
    });
    let title = format!("{title} by bits, keys and values in one codec, {}", report.pairs_words());
    Panel { title, error, lines, names, gate, chosen, worst }
}

impl Report<'_> {
    fn pairs_words(&self) -> String {
        match &self.pairs[..] {
            [(pair, _)] => pair.name.clone(),
            pairs => format!("{} pairs of tensors", pairs.len()),
        }
    }
}

fn draw_panel(panel: &Panel, area: &Area<'_>) -> Drawn {
    let drawn = || {
        let lines = panel.lines.iter().flat_map(|line| line.points.iter().chain(&line.apart)).copied();
        lines.chain(panel.chosen.iter().chain(&panel.worst).map(|(point, _)| *point))
    };
    let min = drawn().map(|p| p.1).fold(panel.gate, f64::min) / MARGIN;
    let max = drawn().map(|p| p.1).fold(panel.gate, f64::max) * MARGIN;
    let right = drawn().map(|p| p.0).fold(8.0, f64::max) + 1.0;
    let mut chart = ChartBuilder::on(area)
        .caption(&panel.title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(64)
        .build_cartesian_2d(1.5..right, (min..max).log_scale())?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_desc("bits per element, scales included")
        .y_desc(panel.error)
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| format!("{y:.0e}"))
        .draw()?;
    // The axis is logarithmic: a fraction of the panel's height is a power.
    let lift = (max / min).powf(0.05);
    let font = ("sans-serif", 12).into_font();
    let gate = [(1.5, panel.gate), (right, panel.gate)];
    chart.draw_series([PathElement::new(gate, GREY.stroke_width(1))])?;
    chart.draw_series([Text::new("gate", (1.55, panel.gate * lift), font.clone().color(&GREY))])?;
    chart::lines(&mut chart, &panel.lines, SeriesLabelPosition::UpperRight)?;
    let names = panel
        .names
        .iter()
        .map(|(point, name)| Text::new(name.clone(), (point.0 + 0.04, point.1 * lift), font.clone()));
    chart.draw_series(names)?;
    let font = ("sans-serif", 13).into_font().color(&BLACK);
    if let (Some((from, _)), Some((to, name))) = (&panel.chosen, &panel.worst) {
        chart.draw_series([PathElement::new([*from, *to], BLACK.stroke_width(1))])?;
        chart.draw_series([Circle::new(*to, 3, BLACK.filled())])?;
        chart.draw_series([Text::new(name.clone(), (to.0 + 0.12, to.1 * lift.powf(0.8)), font.clone())])?;
    }
    if let Some((point, name)) = &panel.chosen {
        chart.draw_series([Circle::new(*point, 6, BLACK.stroke_width(2))])?;
        let below = (point.0 + 0.12, point.1 / lift.powf(0.4));
        chart.draw_series([Text::new(name.clone(), below, font)])?;
    }
    Ok(())
}
