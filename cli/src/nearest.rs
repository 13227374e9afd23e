//! Suggestions for misspelt names.

use crate::report;
use strsim::osa_distance;

/// Names, ordered by distance from `given`.
fn sorted<'a>(given: &str, names: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let mut names: Vec<&str> = names.into_iter().collect();
    // If one text begins with the other, the rest may be missing on purpose.
    names.sort_by_cached_key(|name| {
        let begins = name.starts_with(given) || given.starts_with(name);
        (!begins, osa_distance(given, name))
    });
    names
}

/// `expected a, b, c`: all names, of which there are few, the nearest to `given` first.
pub(crate) fn expected<'a>(given: &str, names: impl IntoIterator<Item = &'a str>) -> String {
    format!("expected {}", sorted(given, names).join(", "))
}

/// `expected a, b, c`: the nearest of many names.
pub(crate) fn expected_some<'a>(given: &str, names: impl IntoIterator<Item = &'a str>) -> String {
    format!("expected {}", report::some(&sorted(given, names)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_comes_first() {
        assert_eq!(
            expected("decod", ["mask_tiles", "merge", "decode"]),
            "expected decode, merge, mask_tiles"
        );
        let many = ["a", "b", "c", "d", "e", "f"];
        assert_eq!(expected("f", many), "expected f, a, b, c, d, e");
        assert_eq!(expected_some("f", many), "expected f, a, b, c and 2 more");
        assert_eq!(expected("dec_f16", ["dec_f32_1", "dec_f16_1"]), "expected dec_f16_1, dec_f32_1");
        assert_eq!(expected("it8n", ["tq8", "int8"]), "expected int8, tq8");
    }
}
