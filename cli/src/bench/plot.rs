//! Fraction of the limit against the sequence length, as SVG.

use super::Group;
use crate::failure::{Failure, Result};
use crate::output::Destination;
use plotters::coord::Shift;
use plotters::prelude::{
    BLACK, ChartBuilder, Circle, Color, DrawingArea, IntoDrawingArea, IntoLogRange, LineSeries, PathElement,
    RGBColor, SVGBackend, SeriesLabelPosition, WHITE,
};

type Drawn = std::result::Result<(), Box<dyn std::error::Error>>;

/// A line of a panel: points (length, fraction).
struct Line {
    name: String,
    points: Vec<(f64, f64)>,
}

/// Lines that share axes.
struct Panel {
    title: String,
    lines: Vec<Line>,
}

const COLOURS: [RGBColor; 12] = [
    RGBColor(31, 119, 180),
    RGBColor(255, 127, 14),
    RGBColor(44, 160, 44),
    RGBColor(214, 39, 40),
    RGBColor(148, 103, 189),
    RGBColor(140, 86, 75),
    RGBColor(227, 119, 194),
    RGBColor(127, 127, 127),
    RGBColor(188, 189, 34),
    RGBColor(23, 190, 207),
    RGBColor(0, 0, 128),
    RGBColor(128, 128, 0),
];

/// Draws a panel for each kind of row and visibility, a line for each dtype and head dimension.
pub(super) fn plot(groups: &[Group], destination: &Destination) -> Result<()> {
    let mut text = String::new();
    draw(&panels(groups), &mut text).map_err(|e| Failure::new(format_args!("plot: {e}")))?;
    destination.text(&text)
}

fn panels(groups: &[Group]) -> Vec<Panel> {
    let mut panels: Vec<Panel> = Vec::new();
    for group in groups {
        for measured in &group.rows {
            let row = &measured.row;
            let visibility = row.problem.desc().visibility;
            let title = format!(
                "{}, {}, {visibility}: fraction of {}",
                row.kind.name(),
                group.unit.name(),
                group.limit
            );
            let name = format!("{} d{}", row.problem.dtype(), row.problem.dims().head_dim);
            let point = (row.length() as f64, group.limit.fraction(&measured.work, measured.seconds()));
            let panel = find_or_push(
                &mut panels,
                |p| p.title == title,
                || Panel { title: title.clone(), lines: vec![] },
            );
            let line = find_or_push(
                &mut panel.lines,
                |l| l.name == name,
                || Line { name: name.clone(), points: vec![] },
            );
            line.points.push(point);
        }
    }
    panels
}

fn find_or_push<T>(list: &mut Vec<T>, is: impl Fn(&T) -> bool, new: impl FnOnce() -> T) -> &mut T {
    let index = list.iter().position(is).unwrap_or_else(|| {
        list.push(new());
        list.len() - 1
    });
    &mut list[index]
}

fn draw(panels: &[Panel], text: &mut String) -> Drawn {
    const WIDTH: u32 = 900;
    const HEIGHT: u32 = 420;
    let count = panels.len().max(1);
    let root = SVGBackend::with_string(text, (WIDTH, HEIGHT * count as u32)).into_drawing_area();
    root.fill(&WHITE)?;
    for (panel, area) in panels.iter().zip(root.split_evenly((count, 1))) {
        draw_panel(panel, &area)?;
    }
    root.present()?;
    Ok(())
}

fn draw_panel(panel: &Panel, area: &DrawingArea<SVGBackend<'_>, Shift>) -> Drawn {
    let points = || panel.lines.iter().flat_map(|line| &line.points);
    let least = points().map(|p| p.0).fold(f64::INFINITY, f64::min);
    let most = points().map(|p| p.0).fold(0.0, f64::max);
    let top = points().map(|p| p.1).fold(1.0, f64::max) * 1.05;
    // Margins keep the range of a single length from being empty.
    let mut chart = ChartBuilder::on(area)
        .caption(&panel.title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(56)
        .build_cartesian_2d((least * 0.9..most * 1.1).log_scale().base(2.0), 0.0..top)?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_desc("keys")
        .y_desc("fraction of the limit")
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| format!("{:.0}%", y * 100.0))
        .draw()?;
    for (line, &colour) in panel.lines.iter().zip(COLOURS.iter().cycle()) {
        let key = move |(x, y): (i32, i32)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2));
        let series = LineSeries::new(line.points.iter().copied(), colour.stroke_width(2));
        chart.draw_series(series)?.label(&line.name).legend(key);
        chart.draw_series(line.points.iter().map(|&point| Circle::new(point, 3, colour.filled())))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    Ok(())
}
