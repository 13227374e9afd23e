//! Pictures as SVG text: shapes, words and colours for light and dark pages.

use std::fmt::Write;

/// Width of every picture in pixels, about that of a column of text.
pub(crate) const WIDTH: f64 = 800.0;

/// Colours on a light page. [`DARK`] replaces the ones that would not stand out from a dark page.
pub(crate) const PAGE: &str = "#ffffff";
pub(crate) const INK: &str = "#1f2328";
pub(crate) const MUTED: &str = "#59636e";
pub(crate) const GRID: &str = "#e7eaed";
pub(crate) const AXIS: &str = "#8c959f";

/// Colours on a dark page, by the colour on a light one. The selectors match attributes, so that viewers without style
/// sheets show the light picture.
const DARK: [(&str, &str); 6] = [
    (PAGE, "#0d1117"),
    (INK, "#e6edf3"),
    (MUTED, "#9da7b1"),
    (GRID, "#262c34"),
    (AXIS, "#6e7681"),
    // Full tiles.
    ("#1f618d", "#3f93cc"),
];

/// Height of words in pixels.
pub(crate) const SIZE: f64 = 13.0;

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Point {
    pub(crate) x: f64,
    pub(crate) y: f64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Rect {
    pub(crate) left: f64,
    pub(crate) top: f64,
    pub(crate) width: f64,
    pub(crate) height: f64,
}

impl Rect {
    pub(crate) fn right(&self) -> f64 {
        self.left + self.width
    }

    pub(crate) fn bottom(&self) -> f64 {
        self.top + self.height
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Anchor {
    Start,
    Middle,
    End,
}

/// Words on one line.
#[derive(Debug, Clone)]
pub(crate) struct Words<'a> {
    pub(crate) text: &'a str,
    /// On the baseline: the start, middle or end of the words.
    pub(crate) at: Point,
    pub(crate) anchor: Anchor,
    pub(crate) size: f64,
    pub(crate) colour: &'a str,
    pub(crate) is_bold: bool,
    /// True if the page's colour surrounds the words, because lines would cross them.
    pub(crate) has_halo: bool,
}

impl<'a> Words<'a> {
    pub(crate) const fn new(text: &'a str, x: f64, y: f64) -> Self {
        let at = Point { x, y };
        Self { text, at, anchor: Anchor::Start, size: SIZE, colour: INK, is_bold: false, has_halo: false }
    }

    pub(crate) const fn anchored(self, anchor: Anchor) -> Self {
        Self { anchor, ..self }
    }

    pub(crate) const fn sized(self, size: f64) -> Self {
        Self { size, ..self }
    }

    pub(crate) const fn coloured(self, colour: &'a str) -> Self {
        Self { colour, ..self }
    }

    pub(crate) const fn bold(self) -> Self {
        Self { is_bold: true, ..self }
    }

    pub(crate) const fn on_page(self) -> Self {
        Self { has_halo: true, ..self }
    }
}

/// An upper estimate of the width of words. Their font is the viewer's.
pub(crate) fn width(text: &str, size: f64) -> f64 {
    text.chars().count() as f64 * size * 0.6
}

/// A picture that grows downwards.
pub(crate) struct Svg {
    title: String,
    description: String,
    body: String,
}

impl Svg {
    /// An empty picture with a title, and a description for readers who do not see it.
    pub(crate) fn new(title: &str, description: &str) -> Self {
        Self { title: title.to_owned(), description: description.to_owned(), body: String::new() }
    }

    fn add(&mut self, line: std::fmt::Arguments<'_>) {
        // Writing to a string does not fail.
        let _ = self.body.write_fmt(line);
        self.body.push('\n');
    }

    pub(crate) fn words(&mut self, words: &Words<'_>) {
        let (x, y, size) = (Px(words.at.x), Px(words.at.y), Px(words.size));
        let anchor = match words.anchor {
            Anchor::Start => "",
            Anchor::Middle => " text-anchor=\"middle\"",
            Anchor::End => " text-anchor=\"end\"",
        };
        let weight = if words.is_bold { " font-weight=\"600\"" } else { "" };
        let (colour, text) = (words.colour, Escaped(words.text));
        let place = format_args!("x=\"{x}\" y=\"{y}\" font-size=\"{size}\"");
        if words.has_halo {
            // A stroked copy beneath the words: viewers that do not know `paint-order` would draw a stroke over them.
            self.add(format_args!(
                "<text {place} fill=\"{PAGE}\"{anchor}{weight} stroke=\"{PAGE}\" stroke-width=\"4\" \
                 stroke-linejoin=\"round\" aria-hidden=\"true\">{text}</text>"
            ));
        }
        self.add(format_args!("<text {place} fill=\"{colour}\"{anchor}{weight}>{text}</text>"));
    }

    /// Draws words that are read upwards, with their middle at a point.
    pub(crate) fn upwards(&mut self, text: &str, at: Point) {
        let (x, y, text) = (Px(at.x), Px(at.y), Escaped(text));
        self.add(format_args!(
            "<text transform=\"translate({x} {y}) rotate(-90)\" font-size=\"{SIZE}\" fill=\"{MUTED}\" \
             text-anchor=\"middle\">{text}</text>"
        ));
    }

    /// Draws rectangles of one colour. Their edges lie on whole pixels of the screen, so that neighbours leave no gap.
    pub(crate) fn rectangles(&mut self, colour: &str, rectangles: &[Rect]) {
        self.add(format_args!("<g fill=\"{colour}\" shape-rendering=\"crispEdges\">"));
        for Rect { left, top, width, height } in rectangles {
            let (x, y, width, height) = (Px(*left), Px(*top), Px(*width), Px(*height));
            self.add(format_args!("<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\"/>"));
        }
        self.add(format_args!("</g>"));
    }

    pub(crate) fn outline(&mut self, colour: &str, of: Rect) {
        let (x, y, width, height) = (Px(of.left), Px(of.top), Px(of.width), Px(of.height));
        self.add(format_args!(
            "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" fill=\"none\" stroke=\"{colour}\"/>"
        ));
    }

    /// Draws a line through points.
    pub(crate) fn path(&mut self, colour: &str, thickness: f64, points: &[Point]) {
        let mut path = String::new();
        for (n, Point { x, y }) in points.iter().enumerate() {
            let _ = write!(path, "{}{} {}", if n == 0 { "M" } else { "L" }, Px(*x), Px(*y));
        }
        let thickness = Px(thickness);
        self.add(format_args!(
            "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"{thickness}\"/>"
        ));
    }

    pub(crate) fn disc(&mut self, colour: &str, radius: f64, at: Point) {
        let (x, y, radius) = (Px(at.x), Px(at.y), Px(radius));
        self.add(format_args!("<circle cx=\"{x}\" cy=\"{y}\" r=\"{radius}\" fill=\"{colour}\"/>"));
    }

    /// Draws a ring. Its inside has the page's colour if it must stand out from lines.
    pub(crate) fn ring(&mut self, colour: &str, inside: &str, radius: f64, at: Point) {
        let (x, y, radius) = (Px(at.x), Px(at.y), Px(radius));
        self.add(format_args!(
            "<circle cx=\"{x}\" cy=\"{y}\" r=\"{radius}\" fill=\"{inside}\" stroke=\"{colour}\" stroke-width=\"2\"/>"
        ));
    }

    /// The document, with a page behind the picture.
    pub(crate) fn document(&self, height: f64) -> String {
        let (width, height) = (Px(WIDTH), Px(height.ceil()));
        let mut dark = String::new();
        for (light, colour) in DARK {
            for paint in ["fill", "stroke"] {
                let _ = write!(dark, "[{paint}=\"{light}\"]{{{paint}:{colour}}}");
            }
        }
        let (title, description, body) = (Escaped(&self.title), Escaped(&self.description), &self.body);
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
             viewBox=\"0 0 {width} {height}\" role=\"img\" \
             font-family=\"system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif\">\n\
             <title>{title}</title>\n<desc>{description}</desc>\n\
             <style>@media(prefers-color-scheme:dark){{{dark}}}</style>\n\
             <rect width=\"{width}\" height=\"{height}\" fill=\"{PAGE}\"/>\n{body}</svg>\n"
        )
    }
}

/// A number of pixels, printed to a tenth.
struct Px(f64);

impl std::fmt::Display for Px {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = format!("{:.1}", self.0);
        f.write_str(text.strip_suffix(".0").unwrap_or(&text))
    }
}

/// Text inside an element. Control characters, which names from files may contain and XML does not allow, are
/// replaced.
struct Escaped<'a>(&'a str);

impl std::fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for c in self.0.chars() {
            match c {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => f.write_char('\u{fffd}')?,
                c => f.write_char(c)?,
            }
        }
        Ok(())
    }
}

/// Token positions of ticks: from 0 to `end`, which is one, in at most `count` steps of a power of two. The last step
/// may be up to half a step longer.
pub(crate) fn token_ticks(end: usize, count: usize) -> Vec<usize> {
    let step = end.div_ceil(count.max(1)).max(1).next_power_of_two();
    let mut ticks: Vec<usize> = (0..=end / step).map(|n| n * step).collect();
    let last = end / step * step;
    if last > 0 && 2 * (end - last) <= step {
        ticks.pop();
    }
    if ticks.last() != Some(&end) {
        ticks.push(end);
    }
    ticks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_from_files_are_escaped() {
        let mut svg = Svg::new("a<b", "c & d");
        svg.words(&Words::new("\u{0}\n>", 1.25, 2.0));
        let text = svg.document(10.2);
        assert!(text.contains("<title>a&lt;b</title>\n<desc>c &amp; d</desc>"), "{text}");
        assert!(text.contains(">\u{fffd}\u{fffd}&gt;</text>") && text.contains("height=\"11\""), "{text}");
        assert!(text.contains("y=\"2\"") && text.starts_with("<svg") && text.ends_with("</svg>\n"), "{text}");
        // Every colour of a dark page replaces one that shapes can have.
        assert!(text.contains("[fill=\"#ffffff\"]{fill:#0d1117}"), "{text}");
    }

    /// Every renderer draws elements in their order, and not every one knows `paint-order`.
    #[test]
    fn the_page_around_words_is_an_element_beneath_them() {
        let mut svg = Svg::new("", "");
        svg.words(&Words::new("plain", 1.0, 2.0));
        svg.words(&Words::new("ringed", 1.0, 2.0).on_page());
        let text = svg.document(10.0);
        let lines: Vec<&str> = text.lines().filter(|line| line.contains("</text>")).collect();
        assert_eq!((lines.len(), text.contains("paint-order")), (3, false), "{text}");
        assert!(!lines[0].contains("stroke") && !lines[2].contains("stroke"), "{text}");
        assert!(
            lines[1].contains(&format!("stroke=\"{PAGE}\"")) && lines[1].contains("aria-hidden"),
            "{text}"
        );
        assert!(
            lines[1].ends_with(">ringed</text>")
                && lines[2].ends_with(&format!("fill=\"{INK}\">ringed</text>"))
        );
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!(token_ticks(4096, 4), [0, 1024, 2048, 3072, 4096]);
        assert_eq!(token_ticks(700, 4), [0, 256, 512, 700]);
        assert_eq!(token_ticks(700, 8), [0, 128, 256, 384, 512, 700]);
        assert_eq!((token_ticks(1, 4), token_ticks(0, 4)), (vec![0, 1], vec![0]));
        assert_eq!(token_ticks(usize::MAX, 4).last(), Some(&usize::MAX));
    }
}
