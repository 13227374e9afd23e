//! Rules about sequences and prefixes, which involve several fields of a description.

use super::desc::ProblemDesc;
use super::error::{Positional, ProblemError, Side};
use super::prefix::SharedPrefix;
use super::sequence::{Sequence, Sequences};
use super::visibility::QOffset;
use crate::limits::{MAX_LEN, MAX_SEQUENCES};
use std::ops::Range;

pub(super) fn resolve(desc: &ProblemDesc) -> Result<Vec<Sequence>, ProblemError> {
    let d = &desc.dims;
    if desc.tree && !matches!(desc.sequences, Sequences::Cached { .. }) {
        return Err(ProblemError::TreeNotCached);
    }
    let sequence = |batch, q: (usize, usize), kv: (usize, usize)| {
        let ((q_start, q_len), (kv_start, kv_len)) = (q, kv);
        let q_offset = offset(desc, q_len, kv_len)?;
        Ok(Sequence { batch, q_start, q_len, kv_start, kv_len, q_offset, first_len: 0, last_from: 0 })
    };
    match &desc.sequences {
        Sequences::Dense => (0..d.batch).map(|b| sequence(b, (0, d.q_len), (0, d.kv_len))).collect(),
        Sequences::Padded { kv_lens } => {
            if kv_lens.len() != d.batch {
                return Err(ProblemError::KvLensCount { got: kv_lens.len(), batch: d.batch });
            }
            let one = |(b, &n): (usize, &usize)| {
                if n > d.kv_len {
                    return Err(ProblemError::KvLen { index: b, got: n, kv_len: d.kv_len });
                }
                sequence(b, (0, d.q_len), (0, n))
            };
            kv_lens.iter().enumerate().map(one).collect()
        }
        Sequences::Packed { cu_seqlens_q, cu_seqlens_k } => {
            if d.batch != 1 {
                return Err(ProblemError::PackedBatch { batch: d.batch });
            }
            if cu_seqlens_q.len() != cu_seqlens_k.len() {
                return Err(ProblemError::CuSeqlensCount { q: cu_seqlens_q.len(), k: cu_seqlens_k.len() });
            }
            if cu_seqlens_q.len() > MAX_SEQUENCES + 1 {
                let got = cu_seqlens_q.len() - 1;
                return Err(ProblemError::TooLong { name: "sequences", got, max: MAX_SEQUENCES });
            }
            check_cumulative(Side::Q, cu_seqlens_q, d.q_len)?;
            check_cumulative(Side::K, cu_seqlens_k, d.kv_len)?;
            let span = |w: &[usize]| (w[0], w[1] - w[0]);
            let pairs = cu_seqlens_q.windows(2).zip(cu_seqlens_k.windows(2));
            pairs.map(|(q, k)| sequence(0, span(q), span(k))).collect()
        }
        Sequences::Cached { cu_seqlens_q, kv_lens } => {
            if d.batch != 1 {
                return Err(ProblemError::PackedBatch { batch: d.batch });
            }
            if cu_seqlens_q.len().checked_sub(1) != Some(kv_lens.len()) {
                return Err(ProblemError::CachedCount { q: cu_seqlens_q.len(), kv: kv_lens.len() });
            }
            if kv_lens.len() > MAX_SEQUENCES {
                let got = kv_lens.len();
                return Err(ProblemError::TooLong { name: "sequences", got, max: MAX_SEQUENCES });
            }
            check_cumulative(Side::Q, cu_seqlens_q, d.q_len)?;
            let one = |(index, (w, &n)): (usize, (&[usize], &usize))| {
                let q_len = w[1] - w[0];
                if n > d.kv_len {
                    return Err(ProblemError::CachedLen { index, got: n, kv_len: d.kv_len });
                }
                if desc.tree && q_len > n {
                    return Err(ProblemError::TreeLen { index, q_len, kv_len: n });
                }
                sequence(0, (w[0], q_len), (0, n))
            };
            cu_seqlens_q.windows(2).zip(kv_lens).enumerate().map(one).collect()
        }
    }
}

fn check_cumulative(side: Side, cu: &[usize], total: usize) -> Result<(), ProblemError> {
    match cu.first() {
        Some(0) => {}
        first => return Err(ProblemError::CuSeqlensStart { side, got: first.copied() }),
    }
    if let Some(i) = cu.windows(2).position(|w| w[1] < w[0]) {
        return Err(ProblemError::CuSeqlensDecrease { side, index: i + 1, from: cu[i], to: cu[i + 1] });
    }
    match cu.last() {
        Some(&last) if last == total => Ok(()),
        last => Err(ProblemError::CuSeqlensEnd { side, got: last.copied().unwrap_or(0), total }),
    }
}

fn offset(desc: &ProblemDesc, q_len: usize, kv_len: usize) -> Result<i64, ProblemError> {
    match desc.q_offset {
        Some(QOffset::TopLeft) => Ok(0),
        Some(QOffset::BottomRight) => Ok(kv_len as i64 - q_len as i64),
        Some(QOffset::At(n)) if n.unsigned_abs() <= MAX_LEN as u64 => Ok(n),
        Some(QOffset::At(n)) => Err(ProblemError::OffsetRange { got: n, max: MAX_LEN }),
        None => {
            let feature = if desc.alibi {
                Positional::Alibi
            } else if desc.visibility.is_full() {
                return Ok(0);
            } else if desc.visibility.is_causal() {
                Positional::Causal
            } else if desc.visibility.chunk().is_some() {
                Positional::Chunks
            } else {
                Positional::Window
            };
            match desc.sequences {
                Sequences::Padded { .. } | Sequences::Cached { .. } => {
                    Err(ProblemError::OffsetUnsaidPadded { feature })
                }
                Sequences::Dense | Sequences::Packed { .. } if q_len == kv_len => Ok(0),
                Sequences::Dense | Sequences::Packed { .. } => {
                    Err(ProblemError::OffsetUnsaid { feature, q_len, kv_len })
                }
            }
        }
    }
}

/// Checks that prefixes are nested, outer ones first.
pub(super) fn check_prefixes(desc: &ProblemDesc) -> Result<(), ProblemError> {
    let kv_lens = match &desc.sequences {
        Sequences::Cached { kv_lens, .. } => kv_lens,
        Sequences::Dense | Sequences::Padded { .. } | Sequences::Packed { .. } => {
            return if desc.prefixes.is_empty() { Ok(()) } else { Err(ProblemError::PrefixNotCached) };
        }
    };
    // The prefixes that may contain the next one, the outermost first.
    let mut outer: Vec<&SharedPrefix> = Vec::new();
    let mut last = 0;
    for (index, prefix) in desc.prefixes.iter().enumerate() {
        let Range { start, end } = prefix.sequences;
        if start >= end || end > kv_lens.len() {
            let (got, sequences) = (prefix.sequences.clone(), kv_lens.len());
            return Err(ProblemError::PrefixSequences { index, got, sequences });
        }
        if let Some(at) = kv_lens[start..end].iter().position(|&kv_len| kv_len < prefix.len) {
            let (sequence, len) = (start + at, prefix.len);
            return Err(ProblemError::PrefixLen { index, sequence, len, kv_len: kv_lens[sequence] });
        }
        while outer.pop_if(|o| o.sequences.end <= start).is_some() {}
        let inside = outer.last().is_none_or(|o| o.sequences.end >= end && o.len <= prefix.len);
        if start < last || !inside {
            return Err(ProblemError::PrefixOrder { index });
        }
        last = start;
        outer.push(prefix);
    }
    Ok(())
}
