//! Fraction of the limit by sequence length, as SVG.

use super::group::Group;
use crate::chart::{self, Area, Drawn, Line};
use crate::failure::Result;
use crate::output::Destination;
use plotters::prelude::{ChartBuilder, IntoLogRange, SeriesLabelPosition, WHITE};

/// Lines that have axes in common: points (length, fraction).
struct Panel {
    title: String,
    lines: Vec<Line>,
}

/// Draws a panel for each kind of row and visibility, with a line for each dtype and head dimension.
pub(super) fn plot(groups: &[Group], destination: &Destination) -> Result<()> {
    chart::write(&panels(groups), destination, draw_panel)
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
            let mut name = format!("{} d{}", row.problem.dtype(), row.problem.dims().head_dim);
            if row.lens().is_some() {
                name += &format!(" {}", row.layout());
            }
            let point = (row.length() as f64, group.limit.fraction(&measured.work, measured.seconds()));
            let panel = find_or_push(
                &mut panels,
                |p| p.title == title,
                || Panel { title: title.clone(), lines: vec![] },
            );
            let line = find_or_push(&mut panel.lines, |l| l.name == name, || Line::named(&name));
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

fn draw_panel(panel: &Panel, area: &Area<'_>) -> Drawn {
    let points = || panel.lines.iter().flat_map(|line| &line.points);
    let min = points().map(|p| p.0).fold(f64::INFINITY, f64::min);
    let max = points().map(|p| p.0).fold(0.0, f64::max);
    let ceiling = points().map(|p| p.1).fold(1.0, f64::max) * 1.05;
    // Margins, so that the range of a single length is not empty.
    let mut chart = ChartBuilder::on(area)
        .caption(&panel.title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(56)
        .build_cartesian_2d((min * 0.9..max * 1.1).log_scale().base(2.0), 0.0..ceiling)?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_desc("keys")
        .y_desc("fraction of the limit")
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| format!("{:.0}%", y * 100.0))
        .draw()?;
    chart::lines(&mut chart, &panel.lines, SeriesLabelPosition::LowerRight)
}
