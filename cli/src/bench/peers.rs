//! Results of other implementations, read from a file of JSON lines.

use super::options::BenchArgs;
use super::rows::Row;
use crate::failure::{Failure, Result};
use crate::input::open;
use crate::report::counted;
use serde_json::Value;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The problem of a row: a peer's row is compared with ours where the keys are equal.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Key {
    pub(super) kind: String,
    pub(super) dtype: String,
    pub(super) d: u64,
    pub(super) dv: u64,
    pub(super) h: u64,
    pub(super) hkv: u64,
    pub(super) b: u64,
    pub(super) s: u64,
    pub(super) causal: bool,
    pub(super) window: Value,
    pub(super) layout: String,
    pub(super) shared: u64,
    /// If the sequences differ in length.
    pub(super) lens: Option<Vec<u64>>,
}

/// Lengths of sequences, if they differ.
fn uneven(lens: Vec<u64>) -> Option<Vec<u64>> {
    let uneven = lens.windows(2).any(|pair| pair[0] != pair[1]);
    uneven.then_some(lens)
}

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) peer: String,
    pub(super) key: Key,
    pub(super) seconds: f64,
}

/// The numbered rows of a file of JSON lines, without rows that compare visibilities, which have no speed.
pub(super) fn lines(path: &Path) -> Result<Vec<(usize, Value)>> {
    let mut text = String::new();
    let mut file = open(path, "a file of JSON lines")?;
    file.read_to_string(&mut text).map_err(|e| Failure::at(path.display(), e))?;
    let mut rows = Vec::new();
    for (line, text) in (1..).zip(text.lines()).filter(|(_, text)| !text.trim().is_empty()) {
        let value: Value = serde_json::from_str(text).map_err(|e| Failure::at(place(path, line), e))?;
        if value.get("kind").and_then(Value::as_str) != Some("visibility") {
            rows.push((line, value));
        }
    }
    Ok(rows)
}

/// A line of a file, in messages.
pub(super) fn place(path: &Path, line: usize) -> String {
    format!("{} line {line}", path.display())
}

/// Peer rows in the order of the file.
#[derive(Debug, Default)]
pub(super) struct Peers {
    /// The file, if one was given.
    path: Option<PathBuf>,
    entries: Vec<Entry>,
}

impl Peers {
    /// The rows of a file whose peers are selected.
    pub(super) fn read(path: &Path, args: &BenchArgs) -> Result<Self> {
        let entry = |(line, value): (usize, Value)| {
            entry(&value).map_err(|what| Failure::at(place(path, line), what))
        };
        let mut entries = lines(path)?.into_iter().map(entry).collect::<Result<Vec<_>>>()?;
        args.check_peers(path, &entries.iter().map(|entry| entry.peer.as_str()).collect::<Vec<_>>())?;
        entries.retain(|entry| args.selects_peer(&entry.peer));
        Ok(Self { path: Some(path.to_owned()), entries })
    }

    /// Names without repetition.
    pub(super) fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for entry in &self.entries {
            if !names.contains(&entry.peer.as_str()) {
                names.push(&entry.peer);
            }
        }
        names
    }

    /// Seconds of a peer for a row; the last of several measurements.
    pub(super) fn seconds(&self, peer: &str, row: &Row) -> Option<f64> {
        let key = key_of(row);
        let same = |entry: &&Entry| entry.peer == peer && entry.key == key;
        self.entries.iter().rev().find(same).map(|entry| entry.seconds)
    }

    /// Refuses a file none of whose rows can be compared with a row of ours.
    pub(super) fn check_match<'a>(&self, rows: impl Iterator<Item = &'a Row>) -> Result<()> {
        let entries = self.entries.len();
        let Some(path) = self.path.as_deref().filter(|_| self.unmatched(rows) == entries) else {
            return Ok(());
        };
        let what = format!(
            "no row matches a row of this run ({} in the file), expected equal kind, dtype, d, h, hkv, b, s and causal",
            counted(entries, "row")
        );
        Err(Failure::at(format_args!("--vs {}", path.display()), what))
    }

    /// Number of peer rows that no row of ours matches.
    pub(super) fn unmatched<'a>(&self, rows: impl Iterator<Item = &'a Row>) -> usize {
        let keys: Vec<Key> = rows.map(key_of).collect();
        self.entries.iter().filter(|entry| !keys.contains(&entry.key)).count()
    }
}

fn key_of(row: &Row) -> Key {
    let d = row.problem.dims();
    Key {
        kind: row.kind.name().to_owned(),
        dtype: row.problem.dtype().name().to_owned(),
        d: d.head_dim as u64,
        dv: d.value_dim as u64,
        h: d.q_heads as u64,
        hkv: d.kv_heads as u64,
        b: row.batch() as u64,
        s: row.length() as u64,
        causal: row.causal(),
        window: window_json(row),
        layout: row.layout(),
        shared: row.shared() as u64,
        lens: row.lens().and_then(|lens| uneven(lens.into_iter().map(|len| len as u64).collect())),
    }
}

/// `[left, right]`, with null for an unbounded side; null without a window.
pub(super) fn window_json(row: &Row) -> Value {
    row.window().map_or(Value::Null, |(left, right)| serde_json::json!([left, right]))
}

pub(super) fn entry(value: &Value) -> std::result::Result<Entry, String> {
    let text = |name: &str| {
        let found = value.get(name).and_then(Value::as_str).map(str::to_owned);
        found.ok_or_else(|| format!("expected a text {name}"))
    };
    let optional = |name: &str, default: u64| match value.get(name) {
        None | Some(Value::Null) => Ok(default),
        Some(number) => number.as_u64().ok_or_else(|| format!("expected a whole number {name}")),
    };
    let number = |name: &str| {
        let found = value.get(name).and_then(Value::as_u64);
        found.ok_or_else(|| format!("expected a whole number {name}"))
    };
    let seconds = value.get("seconds").and_then(Value::as_f64).filter(|s| *s > 0.0 && s.is_finite());
    let (d, h) = (number("d")?, number("h")?);
    let key = Key {
        kind: text("kind")?,
        dtype: text("dtype")?,
        d,
        dv: optional("dv", d)?,
        h,
        hkv: optional("hkv", h)?,
        b: optional("b", 1)?,
        s: number("s")?,
        causal: match value.get("causal") {
            None | Some(Value::Null) => false,
            Some(causal) => causal.as_bool().ok_or("expected true or false causal")?,
        },
        window: value.get("window").cloned().unwrap_or(Value::Null),
        layout: match value.get("layout") {
            None | Some(Value::Null) => "dense".to_owned(),
            Some(layout) => layout.as_str().ok_or("expected a text layout")?.to_owned(),
        },
        shared: optional("shared", 0)?,
        lens: value
            .get("lens")
            .and_then(Value::as_array)
            .and_then(|lens| uneven(lens.iter().map(|len| len.as_u64().unwrap_or(0)).collect())),
    };
    let seconds = seconds.ok_or("expected a positive number seconds")?;
    Ok(Entry { peer: text("peer")?, key, seconds })
}
