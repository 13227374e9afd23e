//! A picture of the tiles of a problem: skipped, full or partial.

use crate::failure::{Failure, Result};
use crate::output::Destination;
use flashtile::{Problem, Sequence};
use plotters::prelude::{
    BLACK, Color, IntoDrawingArea, IntoFont, PathElement, RGBColor, Rectangle, SVGBackend, ShapeStyle, Text,
    WHITE,
};
use std::ops::Range;

/// What a kernel does with a tile of query rows and keys.
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
            Self::Partial => "masked",
            Self::Full => "whole",
        }
    }

    const fn glyph(self) -> char {
        match self {
            Self::Skip => '·',
            Self::Partial => '▒',
            Self::Full => '█',
        }
    }

    const fn colour(self) -> RGBColor {
        match self {
            Self::Skip => RGBColor(236, 236, 236),
            Self::Partial => RGBColor(245, 176, 65),
            Self::Full => RGBColor(31, 97, 141),
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

/// Tiles of one sequence and one key/value head: rows are pairs (position, head of the GQA group), ordered by
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
    /// The ends of a row's visible interval never move back from row to row, and the intervals of neighbouring rows
    /// touch, so that the first and the last row of a tile decide.
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
        // Few blocks are drawn wide, many are drawn narrow.
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
        if self.row_tiles() > height || self.key_blocks() > width {
            let (tiles, blocks) = (self.row_tiles(), self.key_blocks());
            text.push_str(&format!("  {tiles} x {blocks} tiles drawn in {height} x {width} cells\n"));
        }
        text
    }

    /// The same picture as SVG.
    pub(crate) fn svg(&self, title: &str, destination: &Destination) -> Result<()> {
        let mut text = String::new();
        self.draw(title, &mut text).map_err(|e| Failure::new(format_args!("picture of the tiles: {e}")))?;
        destination.text(&text)
    }

    fn draw(&self, title: &str, text: &mut String) -> std::result::Result<(), Box<dyn std::error::Error>> {
        const CELLS: usize = 64;
        const SIDE: i32 = 640;
        const TALLEST: i32 = 80;
        const LEFT: i32 = 50;
        const TOP: i32 = 60;
        let cells = self.cells(CELLS, CELLS);
        let (height, width) = (cells.len() as i32, cells.first().map_or(0, Vec::len) as i32);
        let (cell_width, cell_height) = (SIDE / width.max(1), (SIDE / height.max(1)).min(TALLEST));
        let (right, bottom) = (LEFT + width.max(1) * cell_width, TOP + height.max(1) * cell_height);
        let root = SVGBackend::with_string(text, ((LEFT + SIDE + LEFT) as u32, bottom as u32 + 50))
            .into_drawing_area();
        root.fill(&WHITE)?;
        let font = ("sans-serif", 14).into_font().color(&BLACK);
        root.draw(&Text::new(title.to_owned(), (LEFT, 12), font.clone()))?;
        for (y, row) in (0..).zip(&cells) {
            for (x, kind) in (0..).zip(row) {
                let corner = (LEFT + x * cell_width, TOP + y * cell_height);
                let style: ShapeStyle = kind.colour().filled();
                root.draw(&Rectangle::new([corner, (corner.0 + cell_width, corner.1 + cell_height)], style))?;
            }
        }
        let outline = vec![(LEFT, TOP), (right, TOP), (right, bottom), (LEFT, bottom), (LEFT, TOP)];
        root.draw(&PathElement::new(outline, BLACK))?;
        let (q_len, kv_len) = (self.sequence.q_len, self.sequence.kv_len);
        let keys = format!("keys 0 to {kv_len}, queries 0 to {q_len} downwards");
        root.draw(&Text::new(keys, (LEFT, TOP - 18), font.clone()))?;
        let counts = self.counts();
        let mut x = LEFT;
        for kind in TileKind::ALL {
            let style: ShapeStyle = kind.colour().filled();
            root.draw(&Rectangle::new([(x, bottom + 16), (x + 10, bottom + 26)], style))?;
            let label = format!("{} {}", kind.name(), counts.of(kind));
            root.draw(&Text::new(label, (x + 16, bottom + 14), font.clone()))?;
            x += SIDE / 3;
        }
        root.present()?;
        drop(root);
        Ok(())
    }
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
    fn classes_are_those_of_the_definition() {
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
        let mut svg = String::new();
        tiles.draw("title", &mut svg).unwrap();
        assert!(svg.starts_with("<svg") && svg.contains("title") && svg.trim_end().ends_with("</svg>"));
    }
}
