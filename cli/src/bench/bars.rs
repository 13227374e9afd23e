//! Bars of speed as SVG: a panel for each kind and dtype, a group of bars for each problem.

use super::peers::Key;
use crate::report;
use crate::svg::{self, AXIS, Anchor, GRID, INK, MUTED, Point, Rect, Svg, Words};

/// The speed of one implementation.
pub(super) struct Speed {
    pub(super) name: String,
    /// Flop/s of prefill, bytes/s of decode.
    pub(super) rate: f64,
}

/// One problem.
pub(super) struct Case {
    pub(super) key: Key,
    /// The instruction set or the device of flashtile.
    pub(super) unit: String,
    pub(super) threads: Option<u64>,
    /// The measured limit in units of the rates.
    pub(super) limit: f64,
    /// The speed of flashtile, then the speeds of the peers.
    pub(super) speeds: Vec<Speed>,
}

/// Colours of flashtile and of peers, the latter in the order in which they appear.
const OURS: &str = "#d4611c";
const PEERS: [&str; 9] =
    ["#7f93a8", "#aebbc8", "#5f7388", "#c9a86a", "#8fb39a", "#b08fb3", "#b3a28f", "#6fa3a0", "#9fae7a"];

/// Left and right margin of words.
const MARGIN: f64 = 20.0;
/// Distance of lines of words.
const LINE: f64 = 18.0;
/// Height of the title's words.
const TITLE: f64 = 17.0;

const BAR: f64 = 14.0;
const GAP: f64 = 2.0;
const BETWEEN_GROUPS: f64 = 13.0;

/// Place of the speeds that stand beside bars.
const VALUES: f64 = 112.0;

/// Largest width of the words beside a group of bars; longer ones are smaller.
const LABELS: f64 = 330.0;

/// Limits up to this factor beyond the fastest bar are drawn; a farther one would leave no room for the bars.
const FAR: f64 = 1.7;

const DTYPES: [&str; 3] = ["f32", "f16", "bf16"];

/// The picture of all cases.
pub(super) fn document(title: Option<&str>, mut cases: Vec<Case>) -> String {
    let dtype = |key: &Key| DTYPES.iter().position(|dtype| *dtype == key.dtype);
    // Prefill comes before decode.
    let panel = |case: &Case| (case.key.kind == "decode", dtype(&case.key), case.key.dtype.clone());
    cases.sort_by_key(|case| {
        let key = &case.key;
        (panel(case), (key.d, key.dv, key.h, key.hkv), (key.b, key.s, key.causal))
    });
    let mut names: Vec<String> = Vec::new();
    for speed in cases.iter().flat_map(|case| &case.speeds) {
        if !names.contains(&speed.name) {
            names.push(speed.name.clone());
        }
    }
    for case in &mut cases {
        case.speeds.sort_by_key(|speed| names.iter().position(|name| *name == speed.name));
    }
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let all = names.iter().map(|name| shown(name)).collect::<Vec<_>>();
    let named = format!("Speed of attention: {}", all.join(", "));
    let fits = svg::width(&named, TITLE) <= svg::WIDTH - 2.0 * MARGIN;
    let title = title.unwrap_or(if fits { &named } else { "Speed of attention" }).to_owned();
    let panels: Vec<Panel<'_>> =
        cases.chunk_by(|a, b| panel(a) == panel(b)).map(|cases| Panel::new(cases, &names)).collect();
    let labels = panels.iter().flat_map(|panel| &panel.labels);
    let longest = labels.map(|label| svg::width(label, svg::SIZE)).fold(0.0, f64::max);
    let mut svg = Svg::new(&title, &description(&cases));
    svg.words(&Words::new(&title, MARGIN, 30.0).sized(TITLE).bold());
    let mut top = legend(&mut svg, &names, panels.iter().any(Panel::has_limit));
    for panel in &panels {
        top = panel.draw(&mut svg, top, longest);
    }
    svg.document(top)
}

/// The name of an implementation as its authors write it.
fn shown(name: &str) -> String {
    const NAMES: [(&str, &str); 5] = [
        ("torch", "PyTorch"),
        ("onnxruntime", "ONNX Runtime"),
        ("fa2", "FlashAttention-2"),
        ("fa4", "FlashAttention-4"),
        ("cudnn", "cuDNN"),
    ];
    let (first, rest) = name.split_once(' ').map_or((name, None), |(first, rest)| (first, Some(rest)));
    let first = NAMES.iter().find(|(known, _)| *known == first).map_or(first, |(_, shown)| shown);
    rest.map_or_else(|| first.to_owned(), |rest| format!("{first} {rest}"))
}

fn colour(names: &[&str], name: &str) -> &'static str {
    match names.iter().filter(|of| **of != "flashtile").position(|of| *of == name) {
        None => OURS,
        Some(at) => PEERS[at % PEERS.len()],
    }
}

/// What the bars say, in words.
fn description(cases: &[Case]) -> String {
    let of_case = |case: &Case| {
        let rates = case.speeds.iter().map(|s| format!("{} {}", shown(&s.name), rate(&case.key, s.rate)));
        let facts = facts(case);
        let facts = facts.iter().filter(|fact| !fact.is_empty()).map(String::as_str).collect::<Vec<_>>();
        let rates = rates.collect::<Vec<_>>().join(", ");
        format!("{} {}, {}: {rates}", case.key.kind, case.key.dtype, facts.join(", "))
    };
    cases.iter().map(of_case).collect::<Vec<_>>().join("; ")
}

fn rate(key: &Key, rate: f64) -> String {
    if key.kind == "prefill" { report::flop_rate(rate) } else { report::byte_rate(rate) }
}

/// Draws the names of the colours; returns where panels may begin.
fn legend(svg: &mut Svg, names: &[&str], has_limit: bool) -> f64 {
    let (mut x, mut y) = (MARGIN, 54.0);
    let mut entry = |colour: &str, label: &str| {
        let width = 29.0 + svg::width(label, svg::SIZE);
        if x > MARGIN && x + width > svg::WIDTH - MARGIN {
            (x, y) = (MARGIN, y + LINE);
        }
        svg.rectangles(colour, &[Rect { left: x, top: y - 11.0, width: 22.0, height: 13.0 }]);
        svg.words(&Words::new(label, x + 29.0, y));
        x += width + 14.0;
    };
    for name in names {
        entry(colour(names, name), &shown(name));
    }
    if has_limit {
        entry(GRID, "measured limit of the instructions of flashtile");
    }
    if names.len() == 1 {
        return y + 12.0;
    }
    let ratio = "Longer bars are faster. In brackets: how many times as fast as the fastest peer.";
    svg.words(&Words::new(ratio, MARGIN, y + 22.0).coloured(MUTED));
    y + 32.0
}

/// Facts about a case, which stand beside its bars where cases differ in them, and otherwise above all bars.
fn facts(case: &Case) -> [String; 8] {
    let key = &case.key;
    let unless = |is_usual: bool, text: String| if is_usual { String::new() } else { text };
    let heads = if key.h == key.hkv { key.h.to_string() } else { format!("{}/{}", key.h, key.hkv) };
    let side = |n: Option<&serde_json::Value>| match n.and_then(serde_json::Value::as_u64) {
        None => "all".to_owned(),
        Some(n) => n.to_string(),
    };
    let window = || format!("window {} left, {} right", side(key.window.get(0)), side(key.window.get(1)));
    let visibility = match (key.causal, key.window.is_null()) {
        (true, true) => "causal".to_owned(),
        (true, false) => format!("causal, window {}", side(key.window.get(0))),
        (false, false) => window(),
        (false, true) => unless(key.kind == "decode", "full".to_owned()),
    };
    let longest = if key.lens.is_some() { "at most " } else { "" };
    [
        if key.d == key.dv {
            format!("head dim {}", key.d)
        } else {
            format!("head dim {}/{}", key.d, key.dv)
        },
        visibility,
        format!("{longest}{} keys", key.s),
        unless(key.b == 1, format!("batch {}", key.b)),
        format!("{heads} heads"),
        unless(key.layout == "dense", key.layout.clone()),
        unless(key.shared == 0, format!("{} tokens shared", key.shared)),
        match case.threads {
            None => case.unit.clone(),
            Some(n) => format!("{}, {}", case.unit, report::counted(n as usize, "thread")),
        },
    ]
}

/// Cases of one kind and dtype.
struct Panel<'a> {
    cases: &'a [Case],
    /// Names of all implementations of the picture.
    names: &'a [&'a str],
    /// The facts that cases have in common.
    common: String,
    /// Other facts about each case.
    labels: Vec<String>,
}

impl<'a> Panel<'a> {
    fn new(cases: &'a [Case], names: &'a [&'a str]) -> Self {
        let all: Vec<[String; 8]> = cases.iter().map(facts).collect();
        let is_common = |fact: &usize| all.iter().all(|facts| facts[*fact] == all[0][*fact]);
        let (common, differing): (Vec<usize>, Vec<usize>) = (0..8).partition(is_common);
        let of = |facts: &[String; 8], which: &[usize]| {
            let facts = which.iter().map(|at| facts[*at].as_str()).filter(|fact| !fact.is_empty());
            facts.collect::<Vec<_>>().join(", ")
        };
        let labels = all.iter().map(|facts| of(facts, &differing)).collect();
        let common = all.first().map_or_else(String::new, |facts| of(facts, &common));
        Self { cases, names, common, labels }
    }

    fn fastest(&self) -> f64 {
        self.cases.iter().flat_map(|case| &case.speeds).map(|speed| speed.rate).fold(0.0, f64::max)
    }

    /// The smallest and the largest limit.
    fn limits(&self) -> (f64, f64) {
        let limits = || self.cases.iter().map(|case| case.limit);
        (limits().fold(f64::INFINITY, f64::min), limits().fold(0.0, f64::max))
    }

    fn has_limit(&self) -> bool {
        self.limits().1 <= FAR * self.fastest()
    }

    /// Draws the panel below `top`, and returns where it ends. Labels of the picture are at most `longest` wide.
    fn draw(&self, svg: &mut Svg, top: f64, longest: f64) -> f64 {
        let Some(first) = self.cases.first() else { return top };
        let key = &first.key;
        svg.words(
            &Words::new(&format!("{}, {}", key.kind, key.dtype), MARGIN, top + 26.0).sized(15.0).bold(),
        );
        let about = format!("{}; {}", self.common, self.limit_words());
        let mut top = top + 26.0;
        for line in svg::lines(&about, svg::SIZE, svg::WIDTH - 2.0 * MARGIN) {
            top += LINE;
            svg.words(&Words::new(&line, MARGIN, top).coloured(MUTED));
        }

        let left = MARGIN + longest.clamp(40.0, LABELS) + 10.0;
        let size = svg::SIZE * (LABELS / longest).min(1.0);
        let height: f64 = self.cases.iter().map(group_height).sum();
        let area = Rect { left, top: top + 12.0, width: svg::WIDTH - left - VALUES, height };
        let limit = if self.has_limit() { self.limits().1 } else { 0.0 };
        let axis = Axis::of(&key.kind, self.fastest().max(limit));
        axis.draw(svg, area);
        let mut y = area.top;
        for (case, label) in self.cases.iter().zip(&self.labels) {
            self.draw_group(svg, case, &axis, Rect { top: y, height: group_height(case), ..area });
            let middle = y + group_height(case) / 2.0 + 4.5;
            svg.words(&Words::new(label, area.left - 10.0, middle).anchored(Anchor::End).sized(size));
            y += group_height(case);
        }
        svg.path(AXIS, 1.0, &[Point { x: left, y: area.top }, Point { x: left, y: area.bottom() }]);
        area.bottom() + 48.0
    }

    fn limit_words(&self) -> String {
        let (low, high) = self.limits();
        let key = &self.cases[0].key;
        let (low, high) = (rate(key, low), rate(key, high));
        let name = if key.kind == "prefill" { "arithmetic limit" } else { "read bandwidth" };
        let limits = if low == high { high } else { format!("{low} to {high}") };
        let beyond = if self.has_limit() { "" } else { ", beyond the axis" };
        format!("{name} {limits}{beyond}")
    }

    /// Bars of one case, on a bar that reaches to the limit.
    fn draw_group(&self, svg: &mut Svg, case: &Case, axis: &Axis, area: Rect) {
        let bars = case.speeds.len() as f64 * (BAR + GAP) - GAP;
        let mut top = area.top + (area.height - bars) / 2.0;
        if self.has_limit() {
            let width = area.width * axis.position(case.limit);
            svg.rectangles(GRID, &[Rect { top: top - 3.0, width, height: bars + 6.0, ..area }]);
        }
        let peers = || case.speeds[1..].iter().map(|speed| speed.rate);
        for (at, speed) in case.speeds.iter().enumerate() {
            let bar =
                Rect { left: area.left, top, width: area.width * axis.position(speed.rate), height: BAR };
            svg.rectangles(colour(self.names, &speed.name), &[bar]);
            let value = digits(speed.rate / axis.scale);
            let words = match peers().reduce(f64::max) {
                Some(fastest) if at == 0 => format!("{value} ({:.2}x)", speed.rate / fastest),
                _ => value,
            };
            let words = Words::new(&words, bar.right() + 6.0, top + 11.5);
            let words = if at == 0 { words.bold().coloured(INK) } else { words.coloured(MUTED) };
            svg.words(&words);
            top += BAR + GAP;
        }
    }
}

fn group_height(case: &Case) -> f64 {
    case.speeds.len() as f64 * (BAR + GAP) - GAP + BETWEEN_GROUPS
}

/// Three significant digits.
fn digits(x: f64) -> String {
    let decimals = if x >= 99.95 {
        0
    } else if x >= 9.995 {
        1
    } else {
        2
    };
    format!("{x:.decimals$}")
}

/// The axis of speed, from 0.
struct Axis {
    unit: &'static str,
    scale: f64,
    /// The end, in units.
    end: f64,
}

impl Axis {
    /// An axis that reaches to a rate.
    fn of(kind: &str, rate: f64) -> Self {
        let (unit, scale) = match (kind == "prefill", rate >= 2e12) {
            (true, true) => ("TFLOP/s", 1e12),
            (true, false) => ("GFLOP/s", 1e9),
            (false, true) => ("TB/s", 1e12),
            (false, false) => ("GB/s", 1e9),
        };
        Self { unit, scale, end: rate / scale }
    }

    fn position(&self, rate: f64) -> f64 {
        rate / self.scale / self.end
    }

    fn draw(&self, svg: &mut Svg, area: Rect) {
        for tick in svg::decimal_ticks(self.end, 6) {
            let x = area.left + area.width * tick / self.end;
            svg.path(GRID, 1.0, &[Point { x, y: area.top }, Point { x, y: area.bottom() + 4.0 }]);
            let label = format!("{}", (tick * 1e6).round() / 1e6);
            svg.words(&Words::new(&label, x, area.bottom() + 18.0).anchored(Anchor::Middle));
        }
        let x = area.left + area.width / 2.0;
        svg.words(&Words::new(self.unit, x, area.bottom() + 36.0).anchored(Anchor::Middle).coloured(MUTED));
    }
}
