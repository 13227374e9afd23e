//! Errors against bits, as SVG.

use super::Report;
use crate::chart::{self, Area, Drawn, Line};
use crate::failure::Result;
use crate::output::Destination;
use plotters::prelude::{
    BLACK, ChartBuilder, Circle, Color, IntoFont, IntoLogRange, PathElement, RGBColor, SeriesLabelPosition,
    Text, WHITE,
};

/// Colour of the gate.
const GREY: RGBColor = RGBColor(110, 110, 110);

/// Times the largest and the smallest number that is left free above and below what is drawn.
const MARGIN: f64 = 2.0;

/// One error of every codec.
struct Panel {
    title: String,
    error: &'static str,
    lines: Vec<Line>,
    /// Names of codecs at their places.
    names: Vec<((f64, f64), String)>,
    gate: f64,
    /// The pair that is recommended.
    chosen: Option<((f64, f64), String)>,
}

/// Draws a panel of divergences and one of errors of the output; a line with keys as they are, one with keys centred.
pub(super) fn draw(report: &Report<'_>, destination: &Destination) -> Result<()> {
    let kl = |[key, _]: [usize; 2]| report.all.kl(key);
    let nrmse = |[key, value]: [usize; 2]| report.all.nrmse(key, value);
    let panels = [
        panel(report, ("divergence of the weights", "KL, nats"), report.gate.kl, &kl),
        panel(report, ("error of the output", "NRMSE"), report.gate.nrmse, &nrmse),
    ];
    chart::write(&panels, destination, draw_panel)
}

fn panel(
    report: &Report<'_>,
    (title, error): (&str, &'static str),
    gate: f64,
    of: &dyn Fn([usize; 2]) -> Option<f64>,
) -> Panel {
    let point = |[key, value]: [usize; 2]| {
        let y = of([key, value]).filter(|y| *y > 0.0 && y.is_finite())?;
        Some((report.bits(key, value), y))
    };
    let mut lines = Vec::new();
    let mut names: Vec<((f64, f64), String)> = Vec::new();
    for centred in [false, true] {
        let keys = report.codecs.keys.iter().enumerate();
        let keys = keys.filter(|(_, key)| key.centred == centred && key.codec.dtype().is_none());
        let points: Vec<((f64, f64), String)> = keys
            .filter_map(|(key, of)| Some((point([key, report.same(key)])?, of.codec.to_string())))
            .collect();
        let mut line = Line::named(if centred { "keys centred" } else { "keys as they are" });
        for ((place, name), at) in points.iter().zip(0..) {
            // A codec that another beats is no step on the way from few bits to small errors.
            let beats = |(other, _): &((f64, f64), String)| other.0 <= place.0 && other.1 < place.1;
            let beaten = points.iter().enumerate().any(|(other, of)| other != at && beats(of));
            if beaten {
                line.apart.push(*place)
            } else {
                line.points.push(*place)
            }
            if !names.iter().any(|(_, known)| known == name) {
                names.push((*place, name.clone()));
            }
        }
        line.points.sort_by(|a, b| a.0.total_cmp(&b.0));
        lines.push(line);
    }
    let chosen = report.choice.and_then(|choice| {
        let (key, value) = (choice.best.key, choice.best.value);
        let codec = report.codecs.keys[key].codec;
        let what = if choice.meets { "recommended" } else { "nearest" };
        Some((point([key, value])?, format!("{what}: {codec} + {}", report.codecs.values[value])))
    });
    let title = format!("{title} by bits, keys and values in one codec, {}", report.pairs_words());
    Panel { title, error, lines, names, gate, chosen }
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
        lines.chain(panel.chosen.iter().map(|(point, _)| *point))
    };
    let least = drawn().map(|p| p.1).fold(panel.gate, f64::min) / MARGIN;
    let most = drawn().map(|p| p.1).fold(panel.gate, f64::max) * MARGIN;
    let right = drawn().map(|p| p.0).fold(8.0, f64::max) + 1.0;
    let mut chart = ChartBuilder::on(area)
        .caption(&panel.title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(64)
        .build_cartesian_2d(1.5..right, (least..most).log_scale())?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_desc("bits an element, scales included")
        .y_desc(panel.error)
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| format!("{y:.0e}"))
        .draw()?;
    // Logarithms have the height of the panel: a part of it is a power.
    let lift = (most / least).powf(0.05);
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
    if let Some((point, name)) = &panel.chosen {
        chart.draw_series([Circle::new(*point, 6, BLACK.stroke_width(2))])?;
        let below = (point.0 + 0.12, point.1 / lift.powf(0.4));
        chart.draw_series([Text::new(name.clone(), below, ("sans-serif", 13).into_font().color(&BLACK))])?;
    }
    Ok(())
}
