//! Line charts as SVG: panels one below another, each with axes, a legend above its lines, and labels beside points.

use crate::svg::{self, AXIS, Anchor, GRID, INK, MUTED, PAGE, Point, Rect, SIZE, Svg, Words};

/// Margins of the area where lines are drawn, and its height.
const LEFT: f64 = 76.0;
const RIGHT: f64 = 20.0;
const HEIGHT: f64 = 290.0;

/// Height of a row of the legend.
const ROW: f64 = 20.0;

/// Colours of a panel's lines, in order. They stand out from light and dark pages.
const COLOURS: [&str; 12] = [
    "#2a7fbf", "#e07b00", "#1f9d6b", "#c2455c", "#8b6fc0", "#8a6d4f", "#d065a8", "#7a8288", "#9a9a1f",
    "#1fa5b5", "#5b6ad0", "#5f8a1f",
];

/// Maps values to positions, linearly or by their logarithms.
pub(crate) struct Axis {
    pub(crate) name: &'static str,
    pub(crate) low: f64,
    pub(crate) high: f64,
    pub(crate) is_logarithmic: bool,
    /// Values that have a label.
    pub(crate) ticks: Vec<(f64, String)>,
}

impl Axis {
    /// Position of a value: 0 at the low end, 1 at the high end.
    fn position(&self, value: f64) -> f64 {
        let scale = |x: f64| if self.is_logarithmic { x.ln() } else { x };
        (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low))
    }
}

/// Ticks of a logarithmic axis: powers of ten, with 2 and 5 times each if these are few.
pub(crate) fn powers(low: f64, high: f64) -> Vec<(f64, String)> {
    let decades = low.log10().floor() as i32..=high.log10().ceil() as i32;
    let steps: &[f64] = if high / low > 1e3 { &[1.0] } else { &[1.0, 2.0, 5.0] };
    let all =
        decades.flat_map(|power| steps.iter().map(move |n| (n * 10f64.powi(power), format!("{n}e{power}"))));
    all.filter(|(value, _)| (low..=high).contains(value)).collect()
}

/// A line in a panel.
pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
    /// Further points in its colour that the line does not connect.
    pub(crate) apart: Vec<(f64, f64)>,
    /// Draw points as rings; otherwise as discs.
    pub(crate) rings: bool,
}

impl Line {
    pub(crate) fn named(name: impl Into<String>) -> Self {
        Self { name: name.into(), points: Vec::new(), apart: Vec::new(), rings: false }
    }
}

/// A point with a label.
pub(crate) struct Mark {
    pub(crate) at: (f64, f64),
    pub(crate) label: String,
}

/// A chart with its title and axes.
pub(crate) struct Panel {
    pub(crate) title: String,
    pub(crate) x: Axis,
    pub(crate) y: Axis,
    pub(crate) lines: Vec<Line>,
    /// A value of the y axis that is marked by a line and a label.
    pub(crate) level: Option<(f64, String)>,
    /// Highlighted points, connected with each other; the legend has their labels.
    pub(crate) chosen: Vec<Mark>,
    /// Points of lines that have labels beside them.
    pub(crate) names: Vec<Mark>,
}

/// Draws panels one below another.
pub(crate) fn document(title: &str, panels: &[Panel]) -> String {
    let titles: Vec<&str> = panels.iter().map(|panel| panel.title.as_str()).collect();
    let mut svg = Svg::new(title, &titles.join("; "));
    let mut top = 0.0;
    for panel in panels {
        top = panel.draw(&mut svg, top);
    }
    svg.document(top)
}

impl Panel {
    /// Draws the panel below `top`, and returns where it ends.
    fn draw(&self, svg: &mut Svg, top: f64) -> f64 {
        svg.words(&Words::new(&self.title, LEFT, top + 28.0).sized(15.0).bold());
        let legend_end = self.draw_legend(svg, top + 50.0);
        let area = Rect { left: LEFT, top: legend_end, width: svg::WIDTH - LEFT - RIGHT, height: HEIGHT };
        self.draw_axes(svg, area);
        if let Some((level, _)) = &self.level {
            let y = place(self, area, (self.x.low, *level)).y;
            svg.path(MUTED, 1.5, &[Point { x: area.left, y }, Point { x: area.right(), y }]);
        }
        for (line, colour) in self.lines.iter().zip(COLOURS.iter().cycle()) {
            self.draw_line(svg, line, colour, area);
        }
        let chosen: Vec<Point> = self.chosen.iter().map(|mark| place(self, area, mark.at)).collect();
        svg.path(INK, 1.0, &chosen);
        for (nth, at) in chosen.iter().enumerate() {
            chosen_dot(svg, nth, *at);
        }
        if let Some((level, label)) = &self.level {
            let at = place(self, area, (self.x.low, *level));
            draw_label(svg, area, at, Words::new(label, at.x, at.y).coloured(MUTED));
        }
        for mark in &self.names {
            let at = place(self, area, mark.at);
            draw_label(svg, area, at, Words::new(&mark.label, at.x, at.y));
        }
        area.bottom() + 56.0
    }

    /// Draws the names of the lines and of the chosen points in rows. Returns where the chart may begin.
    fn draw_legend(&self, svg: &mut Svg, top: f64) -> f64 {
        let (mut x, mut y) = (LEFT, top);
        let mut next = |name: &str| {
            let width = 34.0 + svg::width(name, SIZE) + 14.0;
            if x + width > svg::WIDTH && x > LEFT {
                (x, y) = (LEFT, y + ROW);
            }
            x += width;
            Point { x: x - width, y }
        };
        for (line, colour) in self.lines.iter().zip(COLOURS.iter().cycle()) {
            let Point { x, y } = next(&line.name);
            svg.path(colour, 2.0, &[Point { x, y: y - 4.5 }, Point { x: x + 26.0, y: y - 4.5 }]);
            dot(svg, line, colour, Point { x: x + 13.0, y: y - 4.5 });
            svg.words(&Words::new(&line.name, x + 34.0, y));
        }
        for (nth, mark) in self.chosen.iter().enumerate() {
            let Point { x, y } = next(&mark.label);
            chosen_dot(svg, nth, Point { x: x + 13.0, y: y - 4.5 });
            svg.words(&Words::new(&mark.label, x + 34.0, y));
        }
        y + 14.0
    }

    fn draw_axes(&self, svg: &mut Svg, area: Rect) {
        for (value, label) in &self.x.ticks {
            let x = place(self, area, (*value, self.y.low)).x;
            svg.path(GRID, 1.0, &[Point { x, y: area.top }, Point { x, y: area.bottom() }]);
            svg.words(&Words::new(label, x, area.bottom() + 18.0).anchored(Anchor::Middle));
        }
        for (value, label) in &self.y.ticks {
            let y = place(self, area, (self.x.low, *value)).y;
            svg.path(GRID, 1.0, &[Point { x: area.left, y }, Point { x: area.right(), y }]);
            svg.words(&Words::new(label, area.left - 8.0, y + 4.5).anchored(Anchor::End));
        }
        svg.outline(AXIS, area);
        let (x, y) = (area.left + area.width / 2.0, area.bottom() + 38.0);
        svg.words(&Words::new(self.x.name, x, y).anchored(Anchor::Middle).coloured(MUTED));
        svg.upwards(self.y.name, Point { x: 20.0, y: area.top + area.height / 2.0 });
    }

    fn draw_line(&self, svg: &mut Svg, line: &Line, colour: &str, area: Rect) {
        let points: Vec<Point> = line.points.iter().map(|of| place(self, area, *of)).collect();
        svg.path(colour, 2.0, &points);
        let apart = line.apart.iter().map(|of| place(self, area, *of));
        points.iter().copied().chain(apart).for_each(|at| dot(svg, line, colour, at));
    }
}

/// The point of a pair of values.
fn place(panel: &Panel, area: Rect, (x, y): (f64, f64)) -> Point {
    Point {
        x: area.left + area.width * panel.x.position(x),
        y: area.bottom() - area.height * panel.y.position(y),
    }
}

/// Draws a point of a line.
fn dot(svg: &mut Svg, line: &Line, colour: &str, at: Point) {
    if line.rings {
        svg.ring(colour, PAGE, 3.5, at);
    } else {
        svg.disc(colour, 4.0, at);
    }
}

/// Draws a highlighted point: the first as a ring, others as discs.
fn chosen_dot(svg: &mut Svg, nth: usize, at: Point) {
    if nth == 0 {
        svg.ring(INK, "none", 6.0, at);
    } else {
        svg.disc(INK, 3.5, at);
    }
}

/// Distance of a label from its point.
const APART: f64 = 8.0;

/// Draws words above a point and to its right, or to its left where the area ends. Lines of errors and of speed leave
/// that place free.
fn draw_label(svg: &mut Svg, area: Rect, at: Point, words: Words<'_>) {
    let is_inside = at.x + APART + svg::width(words.text, words.size) <= area.right();
    let (x, anchor) = if is_inside { (at.x + APART, Anchor::Start) } else { (at.x - APART, Anchor::End) };
    let at = Point { x, y: at.y - APART };
    svg.words(&Words { at, anchor, ..words }.on_page());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_of_logarithms() {
        let labels = |low, high| powers(low, high).into_iter().map(|(_, label)| label).collect::<Vec<_>>();
        assert_eq!(labels(3e-6, 2e-2), ["1e-5", "1e-4", "1e-3", "1e-2"]);
        assert_eq!(labels(1.5e-3, 3e-2), ["2e-3", "5e-3", "1e-2", "2e-2"]);
    }
}
