//! Charts as SVG: panels one below another, each with lines.

use crate::failure::{Failure, Result};
use crate::output::Destination;
use plotters::chart::ChartContext;
use plotters::coord::Shift;
use plotters::coord::cartesian::Cartesian2d;
use plotters::coord::ranged1d::Ranged;
use plotters::prelude::{
    BLACK, Circle, Color, DrawingArea, IntoDrawingArea, LineSeries, PathElement, RGBColor, SVGBackend,
    SeriesLabelPosition, WHITE,
};

pub(crate) type Drawn = std::result::Result<(), Box<dyn std::error::Error>>;

/// A backend that a panel is drawn on.
pub(crate) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// A chart with numeric axes.
pub(crate) type Chart<'a, 'b, X, Y> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<X, Y>>;

/// Width of a panel and its height.
const WIDTH: u32 = 900;
const HEIGHT: u32 = 420;

/// A line in a panel.
pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
    /// Further points with its colour, which the line does not connect.
    pub(crate) apart: Vec<(f64, f64)>,
    /// Draw points as rings; otherwise as discs.
    pub(crate) rings: bool,
}

impl Line {
    pub(crate) fn named(name: impl Into<String>) -> Self {
        Self { name: name.into(), points: Vec::new(), apart: Vec::new(), rings: false }
    }
}

/// Colours of a panel's lines, in order.
pub(crate) const COLOURS: [RGBColor; 12] = [
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

/// Writes a picture whose panels are drawn one after another.
pub(crate) fn write<T>(
    panels: &[T],
    destination: &Destination,
    draw: impl Fn(&T, &Area<'_>) -> Drawn,
) -> Result<()> {
    let mut text = String::new();
    let all = |text: &mut String| -> Drawn {
        let count = panels.len().max(1);
        let root = SVGBackend::with_string(text, (WIDTH, HEIGHT * count as u32)).into_drawing_area();
        root.fill(&WHITE)?;
        for (panel, area) in panels.iter().zip(root.split_evenly((count, 1))) {
            draw(panel, &area)?;
        }
        root.present()?;
        Ok(())
    };
    all(&mut text).map_err(|e| Failure::new(format_args!("plot: {e}")))?;
    destination.text(&text)
}

/// Draws lines with their points, and a legend in a corner.
pub(crate) fn lines<'a, 'b: 'a, X, Y>(
    chart: &mut Chart<'a, 'b, X, Y>,
    lines: &[Line],
    corner: SeriesLabelPosition,
) -> Drawn
where
    X: Ranged<ValueType = f64>,
    Y: Ranged<ValueType = f64>,
{
    for (line, &colour) in lines.iter().zip(COLOURS.iter().cycle()) {
        let key = move |(x, y): (i32, i32)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2));
        let series = LineSeries::new(line.points.iter().copied(), colour.stroke_width(2));
        chart.draw_series(series)?.label(&line.name).legend(key);
        let points = line.points.iter().chain(&line.apart);
        let style = if line.rings { colour.stroke_width(2) } else { colour.filled() };
        let size = if line.rings { 4 } else { 3 };
        chart.draw_series(points.map(|&point| Circle::new(point, size, style)))?;
    }
    chart
        .configure_series_labels()
        .position(corner)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    Ok(())
}
