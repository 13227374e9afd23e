//! Which keys a query position sees.

use std::ops::Range;

/// A band around the query position: key `j` is visible to position `p` if `p - left <= j <= p + right`. A side that
/// is `None` is unbounded. Sides are counted in keys, the position itself not included.
///
/// Causal attention is the band with `right = 0`; a causal sliding window of `w` keys including the query's own is
/// `left = w - 1, right = 0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
pub struct Visibility {
    #[cfg_attr(feature = "serde", serde(default))]
    left: Option<usize>,
    #[cfg_attr(feature = "serde", serde(default))]
    right: Option<usize>,
}

impl Visibility {
    /// Every key is visible.
    #[must_use]
    pub const fn full() -> Self {
        Self { left: None, right: None }
    }

    /// Keys at or before the query position.
    #[must_use]
    pub const fn causal() -> Self {
        Self { left: None, right: Some(0) }
    }

    /// Keys at most `left` before and at most `right` after the query position; `None` is unbounded.
    #[must_use]
    pub const fn window(left: Option<usize>, right: Option<usize>) -> Self {
        Self { left, right }
    }

    /// Keys visible under both.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        let tighter = |a: Option<usize>, b: Option<usize>| match (a, b) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        Self { left: tighter(self.left, other.left), right: tighter(self.right, other.right) }
    }

    /// Keys visible before the position; `None` is unbounded.
    #[must_use]
    pub const fn left(self) -> Option<usize> {
        self.left
    }

    /// Keys visible after the position; `None` is unbounded.
    #[must_use]
    pub const fn right(self) -> Option<usize> {
        self.right
    }

    /// Returns true if every key is visible from every position.
    #[must_use]
    pub const fn is_full(self) -> bool {
        self.left.is_none() && self.right.is_none()
    }

    /// The interval of keys in `0..kv_len` visible from position `p`. Empty intervals are `n..n`.
    #[must_use]
    pub fn keys(self, p: i64, kv_len: usize) -> Range<usize> {
        let clamp = |x: i64| usize::try_from(x).unwrap_or(0).min(kv_len);
        let reach = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        let start = self.left.map_or(0, |left| clamp(p.saturating_sub(reach(left))));
        let end = self.right.map_or(kv_len, |right| clamp(p.saturating_add(reach(right)).saturating_add(1)));
        start..end.max(start)
    }

    /// Keys in `0..kv_len` that positions `p` to `p + rows - 1` see, added up. Cost: constant.
    pub(super) fn pairs(self, p: i64, rows: usize, kv_len: usize) -> u128 {
        let (p, rows, keys) = (i128::from(p), rows as i128, kv_len as i128);
        // Keys of `0..kv_len` before `end + i`, added up over the rows `i`: none, then one more from row to row, then all.
        let before = |end: i128| {
            let (some, all) = ((-end).clamp(0, rows), (keys - end).clamp(0, rows));
            let growing = (some + all - 1) * (all - some) / 2 + (all - some) * end;
            growing + (rows - all) * keys
        };
        let start = self.left.map_or(0, |left| before(p - left as i128));
        let end = self.right.map_or(rows * keys, |right| before(p + right as i128 + 1));
        (end - start).unsigned_abs()
    }
}

impl std::fmt::Display for Visibility {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.left, self.right) {
            (None, None) => f.write_str("full"),
            (None, Some(0)) => f.write_str("causal"),
            (Some(left), Some(0)) => write!(f, "causal, window {left}"),
            (left, right) => {
                let side = |n: Option<usize>| n.map_or_else(|| "all".to_owned(), |n| n.to_string());
                write!(f, "window {} left, {} right", side(left), side(right))
            }
        }
    }
}

/// Key position of query row 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum QOffset {
    /// Row 0 sits at key 0.
    TopLeft,
    /// The last row sits at the sequence's last key: `kv_len - q_len`, with the sequence's own length as `kv_len`.
    /// May be negative; rows at negative positions see no key of a causal problem.
    BottomRight,
    /// Row 0 sits at this key: the number of keys already cached, in chunked prefill.
    At(i64),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn band_is_the_rule_for_every_small_case() {
        let sides = [None, Some(0), Some(1), Some(3), Some(usize::MAX)];
        for left in sides {
            for right in sides {
                for kv_len in 0..7usize {
                    for p in -5i64..12 {
                        let seen = |j: i64| {
                            left.is_none_or(|l: usize| j as i128 >= p as i128 - l as i128)
                                && right.is_none_or(|r: usize| j as i128 <= p as i128 + r as i128)
                        };
                        let want: Vec<usize> = (0..kv_len).filter(|&j| seen(j as i64)).collect();
                        let got: Vec<usize> = Visibility::window(left, right).keys(p, kv_len).collect();
                        assert_eq!(got, want, "left {left:?} right {right:?} kv_len {kv_len} p {p}");
                        for rows in [0, 1, 4, 15] {
                            let window = Visibility::window(left, right);
                            let want: usize = (0..rows).map(|i| window.keys(p + i, kv_len).len()).sum();
                            let got = window.pairs(p, rows as usize, kv_len);
                            assert_eq!(got, want as u128, "{window} kv_len {kv_len} p {p} rows {rows}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn intersection_takes_the_tighter_side() {
        let both = Visibility::causal().and(Visibility::window(Some(4), Some(9)));
        assert_eq!((both.left(), both.right()), (Some(4), Some(0)));
        assert_eq!(Visibility::full().and(Visibility::causal()), Visibility::causal());
    }
}
