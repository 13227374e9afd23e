//! Output of commands: lines, tables, numbers with units.

use crate::escape::escaped;
use crate::failure::{Failure, Result};
use flashtile::human::scaled;
pub(crate) use flashtile::human::{bytes, counted, noun, percent};
use flashtile::plan::Field;
use serde_json::Value;
use std::fmt::Display;
use std::io::{ErrorKind, Write};

/// Writes text to standard output. Characters that could disturb a terminal are [`escaped`], which keeps the value of
/// JSON. It is not a failure if the reader has gone away (`flashtile bench | head`).
pub(crate) fn text(text: impl Display) -> Result<()> {
    let text = text.to_string();
    let mut out = std::io::stdout().lock();
    match out.write_all(escaped(&text, &['\n', '\t']).as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => Err(Failure::at("standard output", e)),
        _ => Ok(()),
    }
}

/// Headings and texts in two columns, one fact on each line.
pub(crate) fn facts(lines: &[(impl Display, String)]) -> String {
    lines.iter().map(|(name, text)| format!("{:<10} {text}\n", name.to_string())).collect()
}

/// Writes one line to standard output.
pub(crate) fn line(line: impl Display) -> Result<()> {
    text(format_args!("{line}\n"))
}

/// The version of all JSON objects (docs/cli.md): it grows when a field changes its meaning or goes away.
const SCHEMA: u32 = 1;

/// A JSON object as one line, which begins with the version of its fields.
pub(crate) fn versioned(object: &Value) -> String {
    let fields = object.as_object().into_iter().flatten().map(|(name, value)| (name.clone(), value.clone()));
    let schema = ("schema".to_owned(), SCHEMA.into());
    Value::Object(std::iter::once(schema).chain(fields).collect()).to_string()
}

/// Writes a JSON object to standard output, on one line.
pub(crate) fn json(object: &Value) -> Result<()> {
    line(versioned(object))
}

/// JSON objects as the text of a file, one on each line.
pub(crate) fn json_lines(objects: &[Value]) -> String {
    objects.iter().map(|object| versioned(object) + "\n").collect()
}

/// Writes one line to standard error in a single write, and ignores errors.
pub(crate) fn note(line: impl Display) {
    let line = bounded(escaped(&line.to_string(), &[]).into_owned()) + "\n";
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Writes help to standard error, with an empty line after it, and ignores errors.
pub(crate) fn help(help: impl Display) {
    let _ = writeln!(std::io::stderr(), "{help}");
}

/// Number of characters kept at the start and at the end of a line on standard error. Names and numbers from a file may
/// have any length.
const MAX_START: usize = 1500;
const MAX_END: usize = 300;

/// The line, shortened in the middle if it is too long.
fn bounded(line: String) -> String {
    let left_out = line.chars().count().saturating_sub(MAX_START + MAX_END);
    if left_out == 0 {
        return line;
    }
    let at = |n: usize| line.char_indices().nth(n).map_or(line.len(), |(at, _)| at);
    let (start, end) = (&line[..at(MAX_START)], &line[at(MAX_START + left_out)..]);
    format!("{start} ... ({} left out) ... {end}", counted(left_out, "character"))
}

/// `1.23 ms` and similar: three significant digits.
pub(crate) fn seconds(s: f64) -> String {
    scaled(s, &[(1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")])
}

/// `1.23 GFLOP/s` and similar.
pub(crate) fn flop_rate(rate: f64) -> String {
    scaled(rate, &[(1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s")])
}

/// `1.23 GB/s` and similar.
pub(crate) fn byte_rate(rate: f64) -> String {
    scaled(rate, &[(1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s")])
}

/// `1.23 GFLOP` and similar.
pub(crate) fn flops(n: f64) -> String {
    scaled(n, &[(1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP")])
}

/// Largest number of names that a message lists.
const MAX_NAMES: usize = 4;

/// The first names, and the number of the others: `a, b, c, d and 3 more`.
pub(crate) fn some<T: ToString>(names: &[T]) -> String {
    first(names, MAX_NAMES)
}

/// Largest number of axes of a shape that a message lists. No tensor that is read has that many.
const MAX_AXES: usize = 8;

/// A shape: `[2, 3]`, or if no tensor may have so long a shape, its first axes: `[1, 1, 1, 1, 1, 1, 1, 1 and 5 more]`.
pub(crate) fn shape(shape: &[usize]) -> String {
    format!("[{}]", first(shape, MAX_AXES))
}

/// The first `max` items, and the number of the others.
fn first<T: ToString>(items: &[T], max: usize) -> String {
    let shown = items.iter().take(max).map(T::to_string).collect::<Vec<_>>().join(", ");
    match items.len().saturating_sub(max) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// Text in columns, all but the first aligned to the right.
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new<S: Into<String>>(head: impl IntoIterator<Item = S>) -> Self {
        Self { rows: vec![head.into_iter().map(Into::into).collect()] }
    }

    pub(crate) fn push(&mut self, row: Vec<String>) {
        self.rows.push(row);
    }
}

impl Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |c: usize| self.rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max();
        let widths: Vec<usize> = (0..columns).map(|c| width(c).unwrap_or(0)).collect();
        for row in &self.rows {
            let mut text = String::new();
            for (c, (cell, &width)) in row.iter().zip(&widths).enumerate() {
                let cell = if c == 0 { format!("{cell:<width$}") } else { format!("  {cell:>width$}") };
                text.push_str(&cell);
            }
            writeln!(f, "{}", text.trim_end())?;
        }
        Ok(())
    }
}

/// Fields of a plan as JSON.
pub(crate) fn fields(fields: &[(&'static str, Field)]) -> Value {
    let value = |(name, field): &(&'static str, Field)| ((*name).to_owned(), value(field));
    Value::Object(fields.iter().map(value).collect())
}

fn value(field: &Field) -> Value {
    match field {
        Field::Count(count) => Value::from(*count),
        Field::Number(number) => Value::from(*number),
        Field::Text(text) => Value::from(text.as_str()),
        Field::List(fields) => Value::Array(fields.iter().map(value).collect()),
        Field::Object(fields) => self::fields(&fields.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_three_digits() {
        assert_eq!(seconds(0.001_234), "1.23 ms");
        assert_eq!(seconds(12.345), "12.3 s");
        assert_eq!(seconds(0.0), "0.00 ns");
        assert_eq!(flop_rate(1.234e11), "123 GFLOP/s");
        assert_eq!(flop_rate(9.999e9), "10.0 GFLOP/s");
        assert_eq!(bytes(1023.0), "1023 B");
        assert_eq!(bytes(1536.0), "1.50 KiB");
        assert_eq!(percent(0.8731), "87.3%");
        assert_eq!((counted(1, "thread"), counted(2, "thread")), ("1 thread".into(), "2 threads".into()));
        assert_eq!((counted(0, "entry"), counted(1, "entry")), ("0 entries".into(), "1 entry".into()));
        assert_eq!(counted(3, "key"), "3 keys");
    }

    #[test]
    fn long_lists_say_how_much_they_leave_out() {
        assert_eq!(some::<&str>(&[]), "");
        assert_eq!(some(&["a", "b", "c", "d"]), "a, b, c, d");
        assert_eq!(some(&["a", "b", "c", "d", "e"]), "a, b, c, d and 1 more");
    }

    #[test]
    fn long_shapes_say_how_much_they_leave_out() {
        assert_eq!((shape(&[]), shape(&[2, 0, 3])), ("[]".into(), "[2, 0, 3]".into()));
        assert_eq!(shape(&[1; 8]), "[1, 1, 1, 1, 1, 1, 1, 1]");
        assert_eq!(shape(&[7; 13]), "[7, 7, 7, 7, 7, 7, 7, 7 and 5 more]");
    }

    #[test]
    fn long_lines_keep_their_ends() {
        let line = "ä".repeat(MAX_START) + &"b".repeat(MAX_END);
        assert_eq!(bounded(line.clone()), line);
        let longer = "ä".repeat(MAX_START) + "left" + &"b".repeat(MAX_END);
        let shown =
            format!("{} ... (4 characters left out) ... {}", "ä".repeat(MAX_START), "b".repeat(MAX_END));
        assert_eq!(bounded(longer), shown);
    }

    #[test]
    fn objects_begin_with_their_version() {
        let object = serde_json::json!({"b": [1], "a": null});
        assert_eq!(versioned(&object), r#"{"schema":1,"b":[1],"a":null}"#);
        assert_eq!(json_lines(&[object.clone(), object]).lines().count(), 2);
    }

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(["name", "n"]);
        table.push(vec!["a".into(), "100".into()]);
        assert_eq!(table.to_string(), "name    n\na     100\n");
    }
}
