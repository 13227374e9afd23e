//! Fraction of the limit by sequence length, as SVG.

use super::group::Group;
use crate::chart::{self, Axis, Line, Mark, Panel};
use crate::failure::Result;
use crate::output::Destination;

/// Draws a panel for each kind of row and visibility, with a line for each dtype and head dimension.
pub(super) fn plot(groups: &[Group], destination: &Destination) -> Result<()> {
    destination.text(&picture(groups))
}

/// The text of the picture.
pub(super) fn picture(groups: &[Group]) -> String {
    let mut panels: Vec<(String, Vec<Line>, Vec<Mark>)> = Vec::new();
    for group in groups {
        for measured in &group.rows {
            let row = &measured.row;
            let visibility = row.problem.desc().visibility;
            let (kind, unit, bound) = (row.kind.name(), &group.unit.name, group.bound);
            let title = format!("{kind} on {unit}, {visibility}: fraction of {bound}");
            let mut name = format!("{} d{}", row.problem.dtype(), row.problem.dims().head_dim);
            if row.lens().is_some() {
                name += &format!(" {}", row.layout());
            }
            let point = (row.length() as f64, bound.fraction(&measured.work, measured.seconds()));
            let new = || (title.clone(), vec![], vec![]);
            let (_, lines, marks) = find_or_push(&mut panels, |p| p.0 == title, new);
            marks.extend(group.excess(measured).map(|why| Mark { at: point, label: why.name().to_owned() }));
            let line = find_or_push(lines, |l| l.name == name, || Line::named(&name));
            line.points.push(point);
        }
    }
    let panels: Vec<Panel> =
        panels.into_iter().map(|(title, lines, marks)| panel(title, lines, marks)).collect();
    chart::document("Fraction of the limit of the machine by number of keys", &panels)
}

fn find_or_push<T>(list: &mut Vec<T>, is: impl Fn(&T) -> bool, new: impl FnOnce() -> T) -> &mut T {
    let index = list.iter().position(is).unwrap_or_else(|| {
        list.push(new());
        list.len() - 1
    });
    &mut list[index]
}

/// Largest number of lengths that all have a label.
const MAX_LABELS: usize = 8;

/// `names` say why points are above the limit.
fn panel(title: String, lines: Vec<Line>, names: Vec<Mark>) -> Panel {
    let points = || lines.iter().flat_map(|line| &line.points);
    let high = points().map(|p| p.1).fold(1.0, f64::max);
    let mut lengths: Vec<f64> = points().map(|p| p.0).collect();
    lengths.sort_by(f64::total_cmp);
    lengths.dedup();
    let (min, max) = (lengths.first().copied().unwrap_or(1.0), lengths.last().copied().unwrap_or(1.0));
    let every = lengths.len().div_ceil(MAX_LABELS).max(1);
    let percent = |tick: i32| (0.2 * f64::from(tick), format!("{} %", 20 * tick));
    Panel {
        title,
        // Margins keep the range of a single length from being empty.
        x: Axis {
            name: "keys",
            low: min * 0.9,
            high: max * 1.1,
            is_logarithmic: true,
            ticks: lengths.iter().step_by(every).map(|keys| (*keys, format!("{keys:.0}"))).collect(),
        },
        y: Axis {
            name: "fraction of the limit",
            low: 0.0,
            high: high * 1.05,
            is_logarithmic: false,
            ticks: (0..=(high / 0.2) as i32).map(percent).collect(),
        },
        lines,
        level: Some((1.0, "limit".to_owned())),
        chosen: Vec::new(),
        names,
    }
}
