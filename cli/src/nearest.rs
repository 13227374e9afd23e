//! Suggestions for misspelt names.

use crate::report;

/// Largest edit distance of a misspelt name.
const MAX_SLIPS: usize = 2;

/// Number of letters to insert, remove or exchange to turn one text into the other.
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

/// Names, ordered by distance from `given`.
fn sorted<'a>(given: &str, names: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let mut names: Vec<&str> = names.into_iter().collect();
    // If one text begins with the other, the rest may have been left out on purpose.
    let key = |name: &str| {
        let begins = name.starts_with(given) || given.starts_with(name);
        (!begins, distance(given, name))
    };
    names.sort_by_key(|name| key(name));
    names
}

/// `expected a, b, c`: all of a few names, the nearest to `given` first.
pub(crate) fn expected<'a>(given: &str, names: impl IntoIterator<Item = &'a str>) -> String {
    format!("expected {}", sorted(given, names).join(", "))
}

/// `expected a, b, c`: the nearest of many names.
pub(crate) fn expected_some<'a>(given: &str, names: impl IntoIterator<Item = &'a str>) -> String {
    format!("expected {}", report::some(&sorted(given, names)))
}

/// `did you mean a` if a name is near `given`, otherwise all names.
pub(crate) fn meant<'a>(given: &str, names: impl IntoIterator<Item = &'a str>) -> String {
    let names = sorted(given, names);
    match names.first() {
        Some(name) if distance(given, name) <= MAX_SLIPS => format!("did you mean {name}"),
        _ => format!("expected {}", names.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_comes_first() {
        assert_eq!((distance("", "ab"), distance("decode", "decoed"), distance("a", "a")), (2, 2, 0));
        assert_eq!(
            expected("decod", ["mask_tiles", "merge", "decode"]),
            "expected decode, merge, mask_tiles"
        );
        let many = ["a", "b", "c", "d", "e", "f"];
        assert_eq!(expected("f", many), "expected f, a, b, c, d, e");
        assert_eq!(expected_some("f", many), "expected f, a, b, c and 2 more");
        assert_eq!(meant("kernel", ["kv", "kernels"]), "did you mean kernels");
        assert_eq!(meant("jump", ["plan", "list"]), "expected plan, list");
        assert_eq!(expected("dec_f16", ["dec_f32_1", "dec_f16_1"]), "expected dec_f16_1, dec_f32_1");
    }
}
