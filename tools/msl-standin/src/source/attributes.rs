//! Takes attributes out of a program: clang would not know them.

use std::collections::BTreeMap;
use std::ops::Range;

use super::diagnostic::Checked;
use super::edits::Edits;
use super::reader::{Attribute, Reader};
use super::words;

/// The program without its `[[...]]`, which are kept beside the tokens that they stood before.
///
/// # Errors
/// For an attribute that Metal or the stand-in does not have.
pub(super) fn take<'a>(reader: Reader<'a>, edits: &mut Edits) -> Checked<Reader<'a>> {
    let mut kept = Vec::with_capacity(reader.tokens.len());
    let mut attributes: BTreeMap<usize, Vec<Attribute>> = BTreeMap::new();
    let mut i = 0;
    while i < reader.tokens.len() {
        if !reader.is(i, "[[") {
            kept.push(reader.tokens[i]);
            i += 1;
            continue;
        }
        let end = reader.closed(i)?;
        for range in reader.split(i + 1..end - 2)? {
            attributes.entry(kept.len()).or_default().push(attribute(&reader, range)?);
        }
        edits.replace(&reader, i..end, "");
        i = end;
    }
    Ok(reader.with_attributes(kept, attributes))
}

/// One attribute: a name, perhaps with a namespace before it, perhaps with an argument in parentheses.
fn attribute(reader: &Reader<'_>, range: Range<usize>) -> Checked<Attribute> {
    let Some(mut name) = reader.word(range.start) else {
        return reader.fail(range.start, "an attribute needs a name");
    };
    let unknown = |name: &str| reader.fail(range.start, format!("`[[{name}]]`: unknown attribute"));
    let mut name_at = range.start;
    if matches!(name, "clang" | "metal" | "gnu") {
        if !reader.is(range.start + 1, "::") {
            return unknown(name);
        }
        name_at += 2;
        name = reader.word(name_at).unwrap_or_default();
    }
    if !words::is_attribute(name) {
        return unknown(name);
    }
    let has_argument = reader.is(name_at + 1, "(") && range.end > name_at + 3;
    let argument = has_argument.then(|| reader.text(name_at + 2..range.end - 1));
    Ok(Attribute { name: name.into(), argument, at: reader.tokens[range.start].at })
}
