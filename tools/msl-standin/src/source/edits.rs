//! Changes to a program that keep the number of every line.

use std::ops::Range;

use super::reader::Reader;

#[derive(Debug)]
struct Edit {
    /// Bytes of the program.
    range: Range<usize>,
    replacement: String,
}

/// Edits of one program. Where two overlap, the one that starts first counts, and then the one that was made first.
#[derive(Debug, Default)]
pub(super) struct Edits(Vec<Edit>);

impl Edits {
    /// Replaces tokens; the line ends between them are kept.
    pub(super) fn replace(&mut self, reader: &Reader<'_>, tokens: Range<usize>, with: impl Into<String>) {
        let range = reader.tokens[tokens.start].at..reader.tokens[tokens.end - 1].end();
        let mut replacement = with.into();
        replacement.extend(reader.source[range.clone()].chars().filter(|&c| c == '\n'));
        self.0.push(Edit { range, replacement });
    }

    pub(super) fn insert_before(&mut self, reader: &Reader<'_>, token: usize, text: &str) {
        let at = reader.tokens[token].at;
        self.0.push(Edit { range: at..at, replacement: text.into() });
    }

    /// Drops the edits that touch these tokens.
    pub(super) fn discard(&mut self, reader: &Reader<'_>, tokens: Range<usize>) {
        let (start, end) = (reader.tokens[tokens.start].at, reader.tokens[tokens.end - 1].end());
        self.0.retain(|edit| edit.range.end <= start || edit.range.start >= end);
    }

    /// The edited program.
    pub(super) fn apply(mut self, source: &str) -> String {
        self.0.sort_by_key(|edit| (edit.range.start, edit.range.end));
        let mut out = String::with_capacity(source.len() * 2);
        let mut at = 0;
        for Edit { range, replacement } in &self.0 {
            if range.start < at {
                continue;
            }
            out.push_str(&source[at..range.start]);
            out.push_str(replacement);
            at = range.end;
        }
        out.push_str(&source[at..]);
        out
    }
}
