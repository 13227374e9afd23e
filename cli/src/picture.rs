//! A picture of the tiles of a problem: skipped, full or partial.

use crate::failure::Result;
use crate::output::Destination;
use crate::svg::{self, AXIS, Anchor, MUTED, Point, Rect, Svg, Words};
use flashtile::{Problem, Sequence};
use std::ops::Range;

/// The kind of a tile of query rows and keys, which decides what a kernel does with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TileKind {
    /// No row sees a key of the block.
    Skip,
    /// Some rows see some keys.
    Partial,
    /// Every row sees every key.
    Full,
}

impl TileKind {
    const ALL: [Self; 3] = [Self::Skip, Self::Partial, Self::Full];

    const fn name(self) -> &'static str {
        match self {
            Self::Skip => "skipped",
            Self::Partial => "partial",
            Self::Full => "full",
        }
    }

    const fn glyph(self) -> char {
        match self {
            Self::Skip => '·',
            Self::Partial => '▒',
            Self::Full => '█',
        }
    }

    const fn colour(self) -> &'static str {
        match self {
            Self::Skip => svg::GRID,
            Self::Partial => "#f5b041",
            Self::Full => "#1f618d",
        }
    }
}

/// Counts of tiles by kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) skip: u64,
    pub(crate) partial: u64,
    pub(crate) full: u64,
}

impl Counts {
    pub(crate) fn add(self, other: Self) -> Self {
        Self {
            skip: self.skip + other.skip,
            partial: self.partial + other.partial,
            full: self.full + other.full,
        }
    }

    const fn of(self, kind: TileKind) -> u64 {
        match kind {
            TileKind::Skip => self.skip,
            TileKind::Partial => self.partial,
            TileKind::Full => self.full,
        }
    }

    /// The kind of the area that these tiles cover together; `None` without tiles.
    fn kind(self) -> Option<TileKind> {
        match (self.skip, self.partial, self.full) {
            (0, 0, 0) => None,
            (_, 0, 0) => Some(TileKind::Skip),
            (0, 0, _) => Some(TileKind::Full),
            _ => Some(TileKind::Partial),
        }
    }
}

/// Tiles of one sequence and one key/value head. Rows are packed: (position, head of the GQA group) pairs, ordered by
/// position.
pub(crate) struct Tiles<'a> {
    pub(crate) problem: &'a Problem,
    pub(crate) sequence: &'a Sequence,
    /// Rows per tile.
    pub(crate) rows: usize,
    /// Keys per block.
    pub(crate) keys: usize,
}

impl Tiles<'_> {
    fn row_tiles(&self) -> usize {
        (self.sequence.q_len * self.problem.dims().gqa_group()).div_ceil(self.rows)
    }

    fn key_blocks(&self) -> usize {
        self.sequence.kv_len.div_ceil(self.keys)
    }

    /// Blocks that any row of tile `t` sees, and the blocks among them that every row sees completely.
    ///
    /// The first and the last row of a tile decide, because the ends of the visible interval never move back from row
    /// to row, and the intervals of neighbouring rows touch.
    fn blocks(&self, t: usize) -> (Range<usize>, Range<usize>) {
        let gqa_group = self.problem.dims().gqa_group();
        let total = self.sequence.q_len * gqa_group;
        let visible = |row: usize| self.problem.visible(self.sequence, row / gqa_group);
        let (first, last) = (visible(t * self.rows), visible(((t + 1) * self.rows).min(total) - 1));
        if first.start >= last.end {
            return (0..0, 0..0);
        }
        let seen = first.start / self.keys..last.end.div_ceil(self.keys);
        let whole = last.start.div_ceil(self.keys)..self.whole_blocks_before(first.end);
        (seen, whole.start..whole.end.max(whole.start))
    }

    /// Number of blocks that end at or before a key; the last block of the sequence may be short.
    fn whole_blocks_before(&self, end: usize) -> usize {
        if end == self.sequence.kv_len { self.key_blocks() } else { end / self.keys }
    }

    /// Counts by kind among row tiles and key blocks.
    fn count_in(&self, tiles: Range<usize>, blocks: &Range<usize>) -> Counts {
        let inside =
            |r: &Range<usize>| r.end.min(blocks.end).saturating_sub(r.start.max(blocks.start)) as u64;
        tiles.fold(Counts::default(), |counts, t| {
            let (seen, whole) = self.blocks(t);
            let (seen, full) = (inside(&seen), inside(&whole));
            counts.add(Counts { skip: blocks.len() as u64 - seen, partial: seen - full, full })
        })
    }

    pub(crate) fn counts(&self) -> Counts {
        self.count_in(0..self.row_tiles(), &(0..self.key_blocks()))
    }

    /// Kinds of at most `height x width` cells, each covering whole tiles.
    fn cells(&self, height: usize, width: usize) -> Vec<Vec<TileKind>> {
        let (tiles, blocks) = (self.row_tiles(), self.key_blocks());
        let part = |n: usize, of: usize, total: usize| total * n / of..total * (n + 1) / of;
        let (height, width) = (height.min(tiles), width.min(blocks));
        let row = |y| {
            let cell = |x| self.count_in(part(y, height, tiles), &part(x, width, blocks)).kind();
            (0..width).filter_map(cell).collect()
        };
        (0..height).map(row).collect()
    }

    /// The tiles as block characters, queries downwards and keys to the right.
    pub(crate) fn text(&self) -> String {
        // A character is about twice as high as wide.
        const HEIGHT: usize = 32;
        const WIDTH: usize = 64;
        let cells = self.cells(HEIGHT, WIDTH);
        let (height, width) = (cells.len(), cells.first().map_or(0, Vec::len));
        // Cells are wide if there are few blocks, and narrow if there are many.
        let columns = WIDTH / width.max(1);
        let mut text = String::new();
        for row in &cells {
            text.push_str("  ");
            text.extend(row.iter().flat_map(|kind| std::iter::repeat_n(kind.glyph(), columns)));
            text.push('\n');
        }
        let counts = self.counts();
        let legend =
            TileKind::ALL.map(|kind| format!("{} {} {}", kind.glyph(), kind.name(), counts.of(kind)));
        text.push_str(&format!("  {}\n", legend.join("   ")));
        if let Some(reduced) = self.reduced(height, width) {
            text.push_str(&format!("  {reduced}\n"));
        }
        text
    }

    /// A note that tiles share cells, if there are fewer cells than tiles.
    fn reduced(&self, height: usize, width: usize) -> Option<String> {
        let (tiles, blocks) = (self.row_tiles(), self.key_blocks());
        let is_reduced = tiles > height || blocks > width;
        is_reduced.then(|| format!("{tiles} x {blocks} tiles drawn in {height} x {width} cells"))
    }

    /// Writes the picture as SVG; `kernel` is the kernel that would compute the tiles.
    pub(crate) fn svg(&self, kernel: &str, destination: &Destination) -> Result<()> {
        destination.text(&self.document(kernel))
    }

    fn document(&self, kernel: &str) -> String {
        const WIDTH: f64 = 640.0;
        let (q_len, kv_len) = (self.sequence.q_len, self.sequence.kv_len);
        // To scale, unless there are far more keys than queries, or the other way round.
        let scaled = WIDTH * q_len as f64 / kv_len.max(1) as f64;
        let area = Rect { left: 92.0, top: 72.0, width: WIDTH, height: scaled.clamp(48.0, WIDTH) };
        let title = format!("{}, {q_len} x {kv_len}", self.problem.desc().visibility);
        let counts = self.counts();
        let counted = TileKind::ALL.map(|kind| format!("{} {}", counts.of(kind), kind.name()));
        let tiles = format!("tiles of {} rows x {} keys: {}", self.rows, self.keys, counted.join(", "));
        let description =
            format!("{q_len} queries downwards and {kv_len} keys to the right, in {tiles}; kernel {kernel}");
        let mut svg = Svg::new(&title, &description);
        svg.words(&Words::new(&title, area.left, 26.0).sized(17.0).bold());
        let cells = self.cells(CELLS, CELLS);
        let (height, width) = (cells.len(), cells.first().map_or(0, Vec::len));
        let reduced = self.reduced(height, width).map_or_else(String::new, |reduced| format!("; {reduced}"));
        let about = format!("queries x keys; {kernel}{reduced}");
        svg.words(&Words::new(&about, area.left, 46.0).coloured(MUTED));
        self.draw_axes(&mut svg, area);
        svg.rectangles(TileKind::Skip.colour(), &[area]);
        for kind in [TileKind::Partial, TileKind::Full] {
            svg.rectangles(kind.colour(), &self.runs(kind, area));
        }
        svg.outline(AXIS, area);
        let mut x = area.left;
        let y = area.bottom() + 66.0;
        for (kind, label) in TileKind::ALL.into_iter().zip(&counted) {
            let swatch = Rect { left: x, top: y - 11.0, width: 13.0, height: 13.0 };
            svg.rectangles(kind.colour(), &[swatch]);
            svg.outline(AXIS, swatch);
            svg.words(&Words::new(label, x + 20.0, y));
            x += 44.0 + svg::width(label, svg::SIZE);
        }
        let size = format!("tiles of {} rows x {} keys", self.rows, self.keys);
        svg.words(&Words::new(&size, area.right(), y).anchored(Anchor::End).coloured(MUTED));
        svg.document(y + 18.0)
    }

    /// Draws ticks at token positions, and the names of both axes.
    fn draw_axes(&self, svg: &mut Svg, area: Rect) {
        /// Least distance of ticks in pixels.
        const APART: f64 = 40.0;
        let (q_len, kv_len) = (self.sequence.q_len, self.sequence.kv_len);
        for key in svg::token_ticks(kv_len, 8) {
            let x = area.left + area.width * key as f64 / kv_len.max(1) as f64;
            let bottom = area.bottom();
            svg.path(AXIS, 1.0, &[Point { x, y: bottom }, Point { x, y: bottom + 5.0 }]);
            svg.words(&Words::new(&key.to_string(), x, bottom + 19.0).anchored(Anchor::Middle));
        }
        let rows = (area.height / APART).clamp(1.0, 8.0) as usize;
        for query in svg::token_ticks(q_len, rows) {
            let y = area.top + area.height * query as f64 / q_len.max(1) as f64;
            svg.path(AXIS, 1.0, &[Point { x: area.left - 5.0, y }, Point { x: area.left, y }]);
            svg.words(&Words::new(&query.to_string(), area.left - 9.0, y + 4.5).anchored(Anchor::End));
        }
        let (x, y) = (area.left + area.width / 2.0, area.bottom() + 38.0);
        svg.words(&Words::new("key", x, y).anchored(Anchor::Middle).coloured(MUTED));
        svg.upwards("query", Point { x: 24.0, y: area.top + area.height / 2.0 });
    }

    /// Rectangles that cover the cells of a kind: runs within a row of cells, with equal runs of successive rows
    /// merged.
    fn runs(&self, kind: TileKind, area: Rect) -> Vec<Rect> {
        let cells = self.cells(CELLS, CELLS);
        let (tiles, blocks) = (self.row_tiles(), self.key_blocks());
        let (height, width) = (cells.len(), cells.first().map_or(0, Vec::len));
        let rows = (self.sequence.q_len * self.problem.dims().gqa_group()).max(1) as f64;
        let keys = self.sequence.kv_len.max(1) as f64;
        // Cells end where their tiles do, at whole pixels, so that no line shows between neighbours. The last tiles may
        // be short.
        let x = |cell: usize| {
            let key = (blocks * cell / width.max(1) * self.keys).min(self.sequence.kv_len);
            (area.left + area.width * key as f64 / keys).round()
        };
        let y = |cell: usize| {
            let row = (tiles * cell / height.max(1) * self.rows) as f64;
            (area.top + area.height * row.min(rows) / rows).round()
        };
        let mut done: Vec<Rect> = Vec::new();
        // Runs of the row above, which this row may continue.
        let mut above: Vec<(Range<usize>, usize)> = Vec::new();
        for row in 0..=height {
            let here = cells.get(row).map_or_else(Vec::new, |cells| runs_of(kind, cells));
            let next: Vec<(Range<usize>, usize)> = here
                .into_iter()
                .map(|run| {
                    let first =
                        above.iter().find(|(other, _)| *other == run).map_or(row, |(_, first)| *first);
                    (run, first)
                })
                .collect();
            for (run, first) in above.iter().filter(|of| !next.contains(of)) {
                let (left, top) = (x(run.start), y(*first));
                done.push(Rect { left, top, width: x(run.end) - left, height: y(row) - top });
            }
            above = next;
        }
        done
    }
}

/// Largest number of cells of a picture along each axis.
const CELLS: usize = 64;

/// Runs of successive cells of a kind.
fn runs_of(kind: TileKind, cells: &[TileKind]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (at, _) in cells.iter().enumerate().filter(|(_, of)| **of == kind) {
        match runs.last_mut() {
            Some(run) if run.end == at => run.end += 1,
            _ => runs.push(at..at + 1),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashtile::{Dims, Dtype, ProblemDesc, QOffset, Visibility};

    fn problem(q_len: usize, kv_len: usize, visibility: Visibility, offset: i64) -> Problem {
        let dims = Dims { batch: 1, q_heads: 6, kv_heads: 2, q_len, kv_len, head_dim: 8, value_dim: 8 };
        let mut desc = ProblemDesc::new(dims, Dtype::F32);
        desc.visibility = visibility;
        desc.q_offset = Some(QOffset::At(offset));
        desc.validate().unwrap()
    }

    /// Counts by examining every row and every key.
    fn by_definition(tiles: &Tiles<'_>) -> Counts {
        let gqa_group = tiles.problem.dims().gqa_group();
        let s = tiles.sequence;
        let mut counts = Counts::default();
        for t in 0..tiles.row_tiles() {
            for k in 0..tiles.key_blocks() {
                let rows = t * tiles.rows..((t + 1) * tiles.rows).min(s.q_len * gqa_group);
                let keys = k * tiles.keys..((k + 1) * tiles.keys).min(s.kv_len);
                let pairs = rows.len() * keys.len();
                let sees = |row: usize| {
                    let visible = tiles.problem.visible(s, row / gqa_group);
                    keys.clone().filter(|j| visible.contains(j)).count()
                };
                match rows.map(sees).sum::<usize>() {
                    0 => counts.skip += 1,
                    n if n == pairs => counts.full += 1,
                    _ => counts.partial += 1,
                }
            }
        }
        counts
    }

    #[test]
    fn kinds_agree_with_the_definition() {
        let windows = [None, Some(0), Some(3), Some(9)];
        for (q_len, kv_len) in [(1, 1), (7, 7), (5, 23), (23, 5), (1, 40), (12, 0)] {
            for left in windows {
                for right in windows {
                    for offset in [-30i64, -4, 0, 3, 18, 60] {
                        let problem = problem(q_len, kv_len, Visibility::window(left, right), offset);
                        for (rows, keys) in [(1, 1), (4, 4), (6, 8), (7, 3)] {
                            let sequence = &problem.sequences()[0];
                            let tiles = Tiles { problem: &problem, sequence, rows, keys };
                            let case = (q_len, kv_len, left, right, offset, rows, keys);
                            assert_eq!(tiles.counts(), by_definition(&tiles), "{case:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn pictures_stay_small() {
        let problem = problem(5000, 5000, Visibility::causal(), 0);
        let tiles = Tiles { problem: &problem, sequence: &problem.sequences()[0], rows: 16, keys: 16 };
        let text = tiles.text();
        assert!(text.lines().count() <= 34 && text.lines().take(32).all(|line| line.chars().count() == 66));
        let svg = tiles.document("kernel");
        assert!(svg.contains("<title>causal, 5000 x 5000</title>") && svg.contains(">2048<"), "{svg}");
        assert!(svg.len() < 20_000, "{} bytes", svg.len());
    }

    #[test]
    fn rectangles_cover_the_tiles_of_their_kind() {
        let area = Rect { left: 0.0, top: 0.0, width: 640.0, height: 640.0 };
        for (visibility, offset) in [(Visibility::causal(), 0), (Visibility::window(Some(9), Some(3)), -4)] {
            let problem = problem(64, 64, visibility, offset);
            let tiles = Tiles { problem: &problem, sequence: &problem.sequences()[0], rows: 6, keys: 4 };
            let counts = tiles.counts();
            for (kind, count) in [(TileKind::Partial, counts.partial), (TileKind::Full, counts.full)] {
                let runs = tiles.runs(kind, area);
                // A tile of 6 rows, 3 heads of 2 queries, is 20 x 40 pixels.
                let covered: f64 = runs.iter().map(|r| r.width * r.height).sum();
                assert!((covered - 800.0 * count as f64).abs() < 1e-6, "{covered} of {count} tiles");
                assert!(runs.len() < 64, "{}", runs.len());
                let overlap = |a: &Rect, b: &Rect| {
                    let across = a.left < b.right() && b.left < a.right();
                    across && a.top < b.bottom() && b.top < a.bottom()
                };
                let apart = |a: usize| runs[a + 1..].iter().all(|other| !overlap(&runs[a], other));
                assert!((0..runs.len()).all(apart));
            }
        }
    }
}
