//! Names that may have been meant.

use crate::report;

/// Letters to insert, remove or exchange until one text is the other.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let exchanged = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = exchanged.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

/// `expected a, b or c`, those first that are nearest to `given`.
pub(crate) fn expected<'a>(given: &str, names: impl IntoIterator<Item = &'a str>) -> String {
    let mut names: Vec<&str> = names.into_iter().collect();
    // Where one text is the beginning of the other, the rest of it may be left out on purpose.
    let key = |name: &str| {
        let begins = name.starts_with(given) || given.starts_with(name);
        (!begins, distance(given, name))
    };
    names.sort_by_key(|name| key(name));
    format!("expected {}", report::some(&names))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_comes_first() {
        assert_eq!((distance("", "ab"), distance("decode", "decoed"), distance("a", "a")), (2, 2, 0));
        assert_eq!(expected("decod", ["classify", "merge", "decode"]), "expected decode, merge, classify");
        assert_eq!(expected("dec_f16", ["dec_f32_1", "dec_f16_1"]), "expected dec_f16_1, dec_f32_1");
    }
}
