//! Results of other implementations, read from a file of JSON lines.

use super::rows::Row;
use crate::failure::{Failure, Result};
use crate::input::open;
use crate::report::counted;
use serde_json::{Value, json};
use std::io::Read;
use std::path::{Path, PathBuf};

/// The fields of a row that identify its problem. A peer's row is compared with ours if all of them are equal.
type Key = [Value; 13];

/// The key of a row, with usual values for fields that it lacks.
fn key(row: &Value) -> Key {
    let or = |name: &str, usual: &Value| if row[name].is_null() { usual.clone() } else { row[name].clone() };
    let [kind, dtype, s, window] = ["kind", "dtype", "s", "window"].map(|name| row[name].clone());
    let [d, h, dv, hkv] = [("d", "d"), ("h", "h"), ("dv", "d"), ("hkv", "h")].map(|(n, of)| or(n, &row[of]));
    let [b, shared] = [or("b", &json!(1)), or("shared", &json!(0))];
    let [causal, layout] = [or("causal", &json!(false)), or("layout", &json!("dense"))];
    // Lengths of sequences count only if they differ.
    let uneven = |lens: &&Vec<Value>| lens.windows(2).any(|pair| pair[0] != pair[1]);
    let lens = row["lens"].as_array().filter(uneven).map_or(Value::Null, |lens| json!(lens));
    [kind, dtype, d, dv, h, hkv, b, s, causal, window, layout, shared, lens]
}

#[derive(Debug)]
struct Entry {
    peer: String,
    key: Key,
    seconds: f64,
}

impl Entry {
    /// Reads a row, or says what it was expected to have.
    fn new(row: &Value) -> std::result::Result<Self, String> {
        let is = |names: &[&str], what: &str, holds: fn(&Value) -> bool| {
            let wrong = names.iter().find(|name| !holds(&row[**name]));
            wrong.map_or(Ok(()), |name| Err(format!("expected {what} {name}")))
        };
        is(&["kind", "dtype", "peer"], "a text", Value::is_string)?;
        is(&["layout"], "a text", |layout| layout.is_null() || layout.is_string())?;
        is(&["d", "h", "s"], "a whole number", Value::is_u64)?;
        is(&["dv", "hkv", "b", "shared"], "a whole number", |n| n.is_null() || n.is_u64())?;
        is(&["causal"], "true or false", |causal| causal.is_null() || causal.is_boolean())?;
        let seconds = row["seconds"].as_f64().filter(|s| *s > 0.0 && s.is_finite());
        let seconds = seconds.ok_or("expected a positive number seconds")?;
        Ok(Self { peer: row["peer"].as_str().unwrap_or_default().to_owned(), key: key(row), seconds })
    }
}

/// Peer rows in the order of the file.
#[derive(Debug, Default)]
pub(super) struct Peers {
    /// The file, if one was given.
    path: Option<PathBuf>,
    entries: Vec<Entry>,
}

impl Peers {
    /// Reads the rows of a file, except rows that compare visibilities, which have no speed.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let mut text = String::new();
        let mut file = open(path, "a file of JSON lines")?;
        file.read_to_string(&mut text).map_err(|e| Failure::at(path.display(), e))?;
        let mut entries = Vec::new();
        for (line, text) in (1..).zip(text.lines()).filter(|(_, text)| !text.trim().is_empty()) {
            let refuse = |what: String| Failure::at(format_args!("{} line {line}", path.display()), what);
            let row: Value = serde_json::from_str(text).map_err(|e| refuse(e.to_string()))?;
            if row["kind"] != "visibility" {
                entries.push(Entry::new(&row).map_err(refuse)?);
            }
        }
        Ok(Self { path: Some(path.to_owned()), entries })
    }

    /// Names of the peers, without repetition.
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
        let key = key(&row.json());
        let same = |entry: &&Entry| entry.peer == peer && entry.key == key;
        self.entries.iter().rev().find(same).map(|entry| entry.seconds)
    }

    /// Refuses a file if none of its rows can be compared with a row of ours.
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
        let keys: Vec<Key> = rows.map(|row| key(&row.json())).collect();
        self.entries.iter().filter(|entry| !keys.contains(&entry.key)).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> Value {
        json!({ "peer": "x", "kind": "prefill", "dtype": "f32", "d": 64, "h": 8, "s": 128, "seconds": 0.5 })
    }

    #[test]
    fn fields_that_a_row_lacks_have_their_usual_values() {
        let mut whole = row();
        let usual = json!({ "dv": 64, "hkv": 8, "b": 1, "causal": false, "window": null, "layout": "dense", "shared": 0 });
        whole.as_object_mut().unwrap().extend(usual.as_object().unwrap().clone());
        assert_eq!(key(&row()), key(&whole));
        whole["lens"] = json!([128, 128]);
        assert_eq!(key(&row()), key(&whole));
        for (name, value) in [("lens", json!([128, 64])), ("hkv", json!(2)), ("window", json!([3, null]))] {
            let mut other = row();
            other[name] = value;
            assert_ne!(key(&row()), key(&other), "{name}");
        }
    }

    #[test]
    fn rows_that_are_not_understood_are_refused() {
        let cases = [
            ("peer", json!(null), "expected a text peer"),
            ("kind", json!(1), "expected a text kind"),
            ("d", json!(-1), "expected a whole number d"),
            ("b", json!("two"), "expected a whole number b"),
            ("causal", json!("yes"), "expected true or false causal"),
            ("layout", json!(7), "expected a text layout"),
            ("seconds", json!(0), "expected a positive number seconds"),
        ];
        assert!(Entry::new(&row()).is_ok());
        for (name, value, why) in cases {
            let mut wrong = row();
            wrong[name] = value;
            assert_eq!(Entry::new(&wrong).unwrap_err(), why);
        }
        assert_eq!(Entry::new(&json!([1])).unwrap_err(), "expected a text kind");
    }
}
