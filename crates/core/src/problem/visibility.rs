//! Which keys a query position sees.

use std::num::NonZeroUsize;
use std::ops::Range;

/// A band around the query position: key `j` is visible to position `p` if `p - left <= j <= p + right`. A side that
/// is `None` is unbounded. Sides are counted in keys, the position itself not included.
///
/// Causal attention is the band with `right = 0`; a causal sliding window of `w` keys including the query's own is
/// `left = w - 1, right = 0`.
///
/// With chunks of `n` keys, a position also sees only keys of its own chunk: those with `j / n == p / n`, rounded down. A position before
/// key 0 then sees none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
pub struct Visibility {
    #[cfg_attr(feature = "serde", serde(default))]
    left: Option<usize>,
    #[cfg_attr(feature = "serde", serde(default))]
    right: Option<usize>,
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
    chunk: Option<NonZeroUsize>,
}

impl Visibility {
    /// Every key is visible.
    #[must_use]
    pub const fn full() -> Self {
        Self { left: None, right: None, chunk: None }
    }

    /// Keys at or before the query position.
    #[must_use]
    pub const fn causal() -> Self {
        Self { left: None, right: Some(0), chunk: None }
    }

    /// Keys at most `left` before and at most `right` after the query position; `None` is unbounded.
    #[must_use]
    pub const fn window(left: Option<usize>, right: Option<usize>) -> Self {
        Self { left, right, chunk: None }
    }

    /// Hides keys outside the position's chunk of `chunk` keys, counted from key 0, as the chunked layers of Llama 4 do. 0 is no chunks.
    #[must_use]
    pub const fn chunked(mut self, chunk: usize) -> Self {
        self.chunk = NonZeroUsize::new(chunk);
        self
    }

    /// Keys visible under both bands, within the chunks of `other`, or of `self` where `other` has none.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        let tighter = |a: Option<usize>, b: Option<usize>| match (a, b) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        let chunk = other.chunk.or(self.chunk);
        Self { left: tighter(self.left, other.left), right: tighter(self.right, other.right), chunk }
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

    /// Keys of a chunk; `None` where there are no chunks.
    #[must_use]
    pub const fn chunk(self) -> Option<usize> {
        match self.chunk {
            Some(chunk) => Some(chunk.get()),
            None => None,
        }
    }

    /// The most keys that a position sees, however many there are; `None` is unbounded.
    #[must_use]
    pub fn span(self) -> Option<usize> {
        let band =
            self.left.zip(self.right).map(|(left, right)| left.saturating_add(right).saturating_add(1));
        [band, self.chunk()].into_iter().flatten().min()
    }

    /// Returns true if every key is visible from every position.
    #[must_use]
    pub const fn is_full(self) -> bool {
        self.left.is_none() && self.right.is_none() && self.chunk.is_none()
    }

    /// Returns true if a position sees the keys up to its own and nothing else hides keys.
    #[must_use]
    pub const fn is_causal(self) -> bool {
        self.left.is_none() && matches!(self.right, Some(0)) && self.chunk.is_none()
    }

    /// The first position that sees a key, if positions before it do not.
    #[must_use]
    pub fn first_position(self) -> Option<i64> {
        let before = self.right.map(|right| i64::try_from(right).unwrap_or(i64::MAX).saturating_neg());
        before.max(self.chunk.map(|_| 0))
    }

    /// The interval of keys in `0..kv_len` visible from position `p`. Empty intervals are `n..n`.
    #[must_use]
    pub fn keys(self, p: i64, kv_len: usize) -> Range<usize> {
        let clamp = |x: i64| usize::try_from(x).unwrap_or(0).min(kv_len);
        let reach = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        let start = self.left.map_or(0, |left| clamp(p.saturating_sub(reach(left))));
        let end = self.right.map_or(kv_len, |right| clamp(p.saturating_add(reach(right)).saturating_add(1)));
        let (start, end) = match self.chunk() {
            Some(_) if p < 0 => (0, 0),
            Some(chunk) => {
                let first = p - p % reach(chunk);
                (start.max(clamp(first)), end.min(clamp(first.saturating_add(reach(chunk)))))
            }
            None => (start, end),
        };
        start..end.max(start)
    }

    /// Keys in `0..kv_len` that positions `p` to `p + rows - 1` see, added up. Cost: constant.
    pub(super) fn pairs(self, p: i64, rows: usize, kv_len: usize) -> u128 {
        let Some(chunk) = self.chunk else { return self.band_pairs(p, rows, kv_len) };
        let (chunk, band) = (chunk.get() as u128, Self { chunk: None, ..self });
        // Positions from 0 on. A position in chunk `n` sees keys of chunk `n`.
        let end = u128::try_from(i128::from(p) + rows as i128).unwrap_or(0);
        let begin = u128::try_from(p).unwrap_or(0).min(end);
        let keys = kv_len as u128;
        let of_chunk = |n: u128| {
            let first = n * chunk;
            let (from, to) = (begin.max(first), end.min(first + chunk));
            let keys = keys.saturating_sub(first).min(chunk);
            band.band_pairs((from - first) as i64, to.saturating_sub(from) as usize, keys as usize)
        };
        // Chunks with all their positions and all their keys are alike.
        let (first, last) = (begin / chunk, end.min(keys.next_multiple_of(chunk)).div_ceil(chunk));
        let whole = begin.div_ceil(chunk)..(end.min(keys) / chunk).max(begin.div_ceil(chunk));
        let alike = if whole.is_empty() { 0 } else { (whole.end - whole.start) * of_chunk(whole.start) };
        let before = (first..whole.start.min(last)).map(of_chunk);
        before.chain((whole.end..last.max(whole.end)).map(of_chunk)).sum::<u128>() + alike
    }

    /// [`Visibility::pairs`] without chunks.
    fn band_pairs(self, p: i64, rows: usize, kv_len: usize) -> u128 {
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
        }?;
        self.chunk.map_or(Ok(()), |chunk| write!(f, ", chunks of {chunk}"))
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
        for (left, right) in sides.into_iter().flat_map(|left| sides.map(|right| (left, right))) {
            for (chunk, kv_len) in
                [0, 1, 2, 3, 5, 64].into_iter().flat_map(|n| (0..7usize).map(move |len| (n, len)))
            {
                let visibility = Visibility::window(left, right).chunked(chunk);
                for p in -5i64..12 {
                    let seen = |j: i64| {
                        let chunk_of = |x: i64| x.div_euclid(chunk as i64);
                        left.is_none_or(|l: usize| j as i128 >= p as i128 - l as i128)
                            && right.is_none_or(|r: usize| j as i128 <= p as i128 + r as i128)
                            && (chunk == 0 || chunk_of(j) == chunk_of(p))
                    };
                    let want: Vec<usize> = (0..kv_len).filter(|&j| seen(j as i64)).collect();
                    let got: Vec<usize> = visibility.keys(p, kv_len).collect();
                    assert_eq!(got, want, "{visibility} kv_len {kv_len} p {p}");
                    assert!(visibility.span().is_none_or(|span| got.len() <= span));
                    assert!(got.is_empty() || visibility.first_position().is_none_or(|first| p >= first));
                    for rows in [0, 1, 4, 15] {
                        let want: usize = (0..rows).map(|i| visibility.keys(p + i, kv_len).len()).sum();
                        let got = visibility.pairs(p, rows as usize, kv_len);
                        assert_eq!(got, want as u128, "{visibility} kv_len {kv_len} p {p} rows {rows}");
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
