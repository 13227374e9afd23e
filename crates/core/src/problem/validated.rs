//! Validated problems.

use super::desc::ProblemDesc;
use super::dims::Dims;
use super::error::ProblemError;
use super::kept::{self, KeyPart};
use super::kv_storage::KvStorage;
use super::rules;
use super::sequence::{Sequence, Sequences};
use crate::codec::Codec;
use crate::dtype::Dtype;
use crate::isa::FloatEnv;
use crate::limits::{MAX_HEAD_DIM, MAX_LEN, MAX_SCALE, MAX_SEQUENCES, MAX_SOFTCAP};
use std::hint::black_box;
use std::ops::Range;

impl ProblemDesc {
    /// Checks every rule and resolves defaults.
    ///
    /// # Errors
    /// The first rule that is broken, with the values that break it; see [`ProblemError`].
    pub fn validate(self) -> Result<Problem, ProblemError> {
        Problem::new(self)
    }
}

/// A validated problem. Cost of validation: `O(sequences)`.
#[derive(Debug, Clone, PartialEq)]
pub struct Problem {
    desc: ProblemDesc,
    scale: f32,
    sequences: Vec<Sequence>,
    /// The keys that it is over.
    part: KeyPart,
}

impl Problem {
    fn new(desc: ProblemDesc) -> Result<Self, ProblemError> {
        let d = desc.dims;
        if d.q_heads == 0 || d.kv_heads == 0 || !d.q_heads.is_multiple_of(d.kv_heads) {
            return Err(ProblemError::HeadsNotDivisible { q_heads: d.q_heads, kv_heads: d.kv_heads });
        }
        for (name, got) in [("head_dim", d.head_dim), ("value_dim", d.value_dim)] {
            if got == 0 || got > MAX_HEAD_DIM {
                return Err(ProblemError::HeadDim { name, got, max: MAX_HEAD_DIM });
            }
        }
        let limits = [
            ("batch", d.batch, MAX_SEQUENCES),
            ("q_heads", d.q_heads, MAX_LEN),
            ("q_len", d.q_len, MAX_LEN),
            ("kv_len", d.kv_len, MAX_LEN),
        ];
        if let Some((name, got, max)) = limits.into_iter().find(|&(_, got, max)| got > max) {
            return Err(ProblemError::TooLong { name, got, max });
        }
        for (tensor, shape) in
            [("q", d.q_shape()), ("k", d.k_shape()), ("v", d.v_shape()), ("out", d.out_shape())]
        {
            // Sizes in bytes of f32, the widest dtype, must be addressable.
            let bytes = shape.iter().try_fold(4usize, |n, &x| n.checked_mul(x));
            if bytes.is_none_or(|n| isize::try_from(n).is_err()) {
                return Err(ProblemError::SizeOverflow { tensor, shape });
            }
        }
        let scale = match desc.scale {
            None => default_scale(d.head_dim),
            Some(s) if s.is_finite() => s,
            Some(s) => return Err(ProblemError::Scale { scale: s }),
        };
        if let Some(softcap) = desc.softcap
            && !(softcap.is_finite() && softcap > 0.0)
        {
            return Err(ProblemError::Softcap { softcap });
        }
        if let Some(softcap) = desc.softcap
            && softcap > MAX_SOFTCAP
        {
            return Err(ProblemError::SoftcapRange { softcap, max: MAX_SOFTCAP });
        }
        if (scale / desc.softcap.unwrap_or(1.0)).abs() > MAX_SCALE {
            return Err(ProblemError::ScaleRange { scale, softcap: desc.softcap, max: MAX_SCALE });
        }
        check_codecs(&desc)?;
        let mut sequences = rules::resolve(&desc)?;
        rules::check_prefixes(&desc)?;
        if let Some(kept) = &desc.kept {
            let cached = matches!(desc.sequences, Sequences::Cached { .. });
            kept::resolve(kept, &mut sequences, cached).map_err(ProblemError::Kept)?;
        }
        Ok(Self { desc, scale, sequences, part: KeyPart::All })
    }

    /// The description this problem was made from.
    #[must_use]
    pub const fn desc(&self) -> &ProblemDesc {
        &self.desc
    }

    /// Logical dimensions.
    #[must_use]
    pub const fn dims(&self) -> &Dims {
        &self.desc.dims
    }

    /// Element type of q, k, v and out.
    #[must_use]
    pub const fn dtype(&self) -> Dtype {
        self.desc.dtype
    }

    /// Returns true if keys or values have a quantizing codec.
    pub fn is_quantized(&self) -> bool {
        [self.k_codec(), self.v_codec()].iter().any(|codec| codec.dtype().is_none())
    }

    /// Codec of the keys.
    #[must_use]
    pub fn k_codec(&self) -> Codec {
        self.desc.k_codec.unwrap_or(Codec::of(self.dtype()))
    }

    /// Codec of the values: that of the keys, where the values are columns of the keys.
    #[must_use]
    pub fn v_codec(&self) -> Codec {
        match self.desc.kv_storage {
            KvStorage::Separate => self.desc.v_codec.unwrap_or(Codec::of(self.dtype())),
            KvStorage::KeyColumns => self.k_codec(),
        }
    }

    /// Where values lie.
    #[must_use]
    pub const fn kv_storage(&self) -> KvStorage {
        self.desc.kv_storage
    }

    /// Multiplier of `q . k`: finite, and the default if none was given.
    #[must_use]
    pub const fn scale(&self) -> f32 {
        self.scale
    }

    /// Every sequence: its rows, its length and the position of its queries. One per batch entry, or one per pair of
    /// neighbours in `cu_seqlens`.
    #[must_use]
    pub fn sequences(&self) -> &[Sequence] {
        &self.sequences
    }

    /// The keys that the problem is over: all, or the keys of one storage, by [`Problem::part`].
    #[must_use]
    pub const fn key_part(&self) -> KeyPart {
        self.part
    }

    /// This problem over the keys of one storage only: keys that are read as codes, or keys that are kept in 16 bits, in the
    /// [codec](Codec::kept) of kept rows. The parts of a problem are disjoint, and merged they are the whole.
    #[must_use]
    pub fn part(&self, part: KeyPart) -> Self {
        let mut problem = Self { part, ..self.clone() };
        if matches!(part, KeyPart::First | KeyPart::Last) {
            (problem.desc.k_codec, problem.desc.v_codec) =
                (Some(self.k_codec().kept()), Some(self.v_codec().kept()));
            problem.desc.prefixes.clear();
        }
        problem
    }

    /// Keys of `sequence` that query row `i` sees by causality, window and length (masks and tree masks aside), among the keys that the
    /// problem is over: always one interval.
    #[must_use]
    pub fn visible(&self, sequence: &Sequence, i: usize) -> Range<usize> {
        let (p, kept) = (sequence.q_offset + i as i64, &self.desc.kept);
        let seen = self.seen(sequence, i);
        kept.as_ref().map_or(seen.clone(), |kept| self.part.keys(kept.last, sequence, p, seen))
    }

    /// Keys of `sequence` whose rows lie in the storage that the problem is over. Rings and forgotten tokens aside, they exist whether a row
    /// sees them or not.
    #[must_use]
    pub const fn stored(&self, sequence: &Sequence) -> Range<usize> {
        match self.part {
            KeyPart::All | KeyPart::Codes => 0..sequence.kv_len,
            KeyPart::First => 0..sequence.first_len,
            KeyPart::Last => sequence.last_from..sequence.kv_len,
        }
    }

    /// [`Problem::visible`] over all keys, whatever the part.
    #[must_use]
    pub fn seen(&self, sequence: &Sequence, i: usize) -> Range<usize> {
        self.desc.visibility.keys(sequence.q_offset + i as i64, sequence.kv_len)
    }

    /// Returns true if keys and values lie in the pages of a cache.
    #[must_use]
    pub const fn is_cached(&self) -> bool {
        matches!(self.desc.sequences, Sequences::Cached { .. })
    }

    /// Returns true if two problems differ only in their numbers of keys (`kv_lens`, shared prefixes, and which tokens are kept in 16 bits), as
    /// two decoding steps of the same sequences do. Cost: `O(sequences)`.
    #[must_use]
    pub fn is_step_of(&self, other: &Self) -> bool {
        (self.scale(), self.part) == (other.scale(), other.part)
            && without_lens(&self.desc) == without_lens(&other.desc)
    }

    /// Keys that the sequences have more than in `before`, if this is a later step of the same ones: nothing else differs, and no
    /// sequence has fewer. Cost: `O(sequences)`.
    #[must_use]
    pub fn growth_since(&self, before: &Self) -> Option<usize> {
        if !self.is_step_of(before) {
            return None;
        }
        let growth = |(now, then): (&Sequence, &Sequence)| now.kv_len.checked_sub(then.kv_len);
        self.sequences.iter().zip(&before.sequences).map(growth).sum()
    }

    /// The smallest interval that contains every key that one of the query rows sees. Cost: `O(rows that see no
    /// key)`.
    #[must_use]
    pub fn visible_union(&self, sequence: &Sequence, rows: Range<usize>) -> Range<usize> {
        // Both ends of the interval increase with the row, but an empty interval may lie anywhere.
        let first = rows.clone().map(|i| self.visible(sequence, i)).find(|keys| !keys.is_empty());
        let last = rows.rev().map(|i| self.visible(sequence, i)).find(|keys| !keys.is_empty());
        match (first, last) {
            (Some(first), Some(last)) => first.start..last.end,
            _ => 0..0,
        }
    }

    /// The first query row of `sequence` that sees a key by causality, window and length, and the first key that it
    /// sees, which is the first that any row sees. Cost: constant, or `O(rows)` over a [part](Problem::part) of the keys.
    #[must_use]
    pub fn first_visible(&self, sequence: &Sequence) -> Option<(usize, usize)> {
        if self.part != KeyPart::All {
            let mut seen = (0..sequence.q_len).map(|i| (i, self.visible(sequence, i)));
            return seen.find(|(_, keys)| !keys.is_empty()).map(|(i, keys)| (i, keys.start));
        }
        // Rows before this one see no key. Since both ends of the intervals increase with the row, this row is the first to see a key if
        // any does.
        let first = self.desc.visibility.first_position();
        let before = first.map_or(0, |first| first.saturating_sub(sequence.q_offset).max(0));
        let row = usize::try_from(before).ok().filter(|&row| row < sequence.q_len)?;
        let keys = self.visible(sequence, row);
        (!keys.is_empty()).then_some((row, keys.start))
    }

    /// Number of visible (query row, key) pairs of one head, summed over sequences; masks and tree masks are not
    /// counted. A pair costs `2 * (head_dim + value_dim)` operations. Cost: `O(sequences)`, or `O(rows)` over a [part](Problem::part) of the
    /// keys.
    ///
    /// A sequence has fewer than `2^62` pairs. A batch of more than `u64::MAX`, which would take years, counts as `u64::MAX`.
    #[must_use]
    pub fn visible_pairs(&self) -> u64 {
        u64::try_from(self.all_pairs()).unwrap_or(u64::MAX)
    }

    /// [`Problem::visible_pairs`], below `2^92`: tensors are addressable, so that a batch has fewer than `2^61` query rows.
    fn all_pairs(&self) -> u128 {
        let pairs = |s: &Sequence| match self.part {
            KeyPart::All => self.desc.visibility.pairs(s.q_offset, s.q_len, s.kv_len),
            KeyPart::Codes | KeyPart::First | KeyPart::Last => {
                (0..s.q_len).map(|i| self.visible(s, i).len() as u128).sum()
            }
        };
        self.sequences.iter().map(pairs).sum()
    }

    /// Floating-point operations: `2 * (head_dim + value_dim)` for each visible pair of each query head.
    #[must_use]
    pub fn flops(&self) -> f64 {
        let d = self.dims();
        2.0 * (d.head_dim + d.value_dim) as f64 * self.all_pairs() as f64 * d.q_heads as f64
    }

    /// Why the problem has no backward pass, if it has none: keys and values in the pages of a cache, with all that only they have (codecs,
    /// kept tokens, tree masks, shared prefixes), and values that are columns of the keys.
    #[must_use]
    pub const fn no_gradients(&self) -> Option<&'static str> {
        match (&self.desc.sequences, self.desc.kv_storage) {
            (Sequences::Cached { .. }, _) => {
                Some("keys and values in the pages of a cache have no gradients")
            }
            (_, KvStorage::KeyColumns) => {
                Some("values that are columns of the keys have no gradient of their own")
            }
            (Sequences::Dense | Sequences::Padded { .. } | Sequences::Packed { .. }, KvStorage::Separate) => {
                None
            }
        }
    }

    /// Floating-point operations of the backward pass: five products for each visible pair of each query head, `q . k`, `d_out . v` and the
    /// three that make `d_q`, `d_k` and `d_v`.
    #[must_use]
    pub fn backward_flops(&self) -> f64 {
        let d = self.dims();
        2.0 * (3 * d.head_dim + 2 * d.value_dim) as f64 * self.all_pairs() as f64 * d.q_heads as f64
    }

    /// Bytes of a key and a value of one head, as they are stored.
    #[must_use]
    pub fn kv_row_bytes(&self) -> usize {
        let dims = self.dims();
        let key = self.k_codec().row_bytes(dims.head_dim);
        match self.kv_storage() {
            KvStorage::Separate => key + self.v_codec().row_bytes(dims.value_dim),
            KvStorage::KeyColumns => key,
        }
    }

    /// Bytes of the keys and values that some query row sees, as it reads them, each once. Cost: `O(sequences + rows that see no key)`, or
    /// `O(rows)` where tokens are kept in 16 bits.
    #[must_use]
    pub fn kv_bytes(&self) -> f64 {
        if self.desc.kept.is_some() && self.part == KeyPart::All {
            let parts = [KeyPart::Codes, KeyPart::First, KeyPart::Last];
            return parts.into_iter().map(|part| self.part(part).kv_bytes()).sum();
        }
        let keys = self.sequences.iter().map(|s| self.visible_union(s, 0..s.q_len).len() as f64);
        keys.sum::<f64>() * (self.dims().kv_heads * self.kv_row_bytes()) as f64
    }

    /// Shape to which a mask must broadcast: `[sequences, q_heads, longest q_len, longest kv_len]`. For dense problems
    /// this is `[batch, q_heads, q_len, kv_len]`.
    #[must_use]
    pub fn mask_shape(&self) -> [usize; 4] {
        let d = self.dims();
        let (q_len, kv_len) = match self.desc.sequences {
            Sequences::Dense | Sequences::Padded { .. } => (d.q_len, d.kv_len),
            Sequences::Packed { .. } | Sequences::Cached { .. } => {
                (self.longest_q_len(), self.sequences.iter().map(|s| s.kv_len).max().unwrap_or(0))
            }
        };
        [self.sequences.len(), d.q_heads, q_len, kv_len]
    }

    /// Shape of a tree mask: `[1, 1, q_len, longest q_len of a sequence]`.
    #[must_use]
    pub fn tree_shape(&self) -> [usize; 4] {
        [1, 1, self.desc.dims.q_len, self.longest_q_len()]
    }

    fn longest_q_len(&self) -> usize {
        self.sequences.iter().map(|s| s.q_len).max().unwrap_or(0)
    }
}

/// Checks the codecs of keys and values, and where values lie.
fn check_codecs(desc: &ProblemDesc) -> Result<(), ProblemError> {
    let plain = Codec::of(desc.dtype);
    let k_codec = desc.k_codec.unwrap_or(plain);
    let v_codec = desc.v_codec.unwrap_or(match desc.kv_storage {
        KvStorage::Separate => plain,
        KvStorage::KeyColumns => k_codec,
    });
    let Dims { head_dim, value_dim, .. } = desc.dims;
    let rows = desc.kv_storage.rows((k_codec, head_dim), (v_codec, value_dim));
    let is_cached = matches!(desc.sequences, Sequences::Cached { .. });
    for (tensor, codec, dim) in rows.map_err(ProblemError::KeyColumns)? {
        if !is_cached && codec != plain {
            return Err(ProblemError::Codec { tensor, codec, dtype: desc.dtype });
        }
        if !codec.supports(dim) {
            return Err(ProblemError::CodecDim { tensor, codec, dim });
        }
    }
    Ok(())
}

/// `1 / sqrt(head_dim)`, whatever floating-point environment the caller has.
fn default_scale(head_dim: usize) -> f32 {
    let _env = FloatEnv::ieee();
    // Opaque, so that the compiler does not move the arithmetic out of the environment.
    black_box((1.0 / (black_box(head_dim) as f64).sqrt()) as f32)
}

/// A description without its numbers of keys.
fn without_lens(desc: &ProblemDesc) -> ProblemDesc {
    let mut desc = desc.clone();
    match &mut desc.sequences {
        Sequences::Cached { kv_lens, .. } => {
            kv_lens.iter_mut().for_each(|len| *len = 0);
            // A bound of the lengths, which shapes no tensor.
            desc.dims.kv_len = 0;
        }
        Sequences::Padded { kv_lens } => kv_lens.iter_mut().for_each(|len| *len = 0),
        Sequences::Dense | Sequences::Packed { .. } => {}
    }
    desc.prefixes.clear();
    if let Some(kept) = &mut desc.kept {
        kept.first_lens.iter_mut().chain(&mut kept.last_from).for_each(|len| *len = 0);
    }
    desc
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;
    use crate::problem::{HeadShape, SeqLens, Visibility};

    fn cached(lens: &[usize]) -> ProblemDesc {
        let heads = HeadShape { q_heads: 2, kv_heads: 1, head_dim: 64, value_dim: 64 };
        let lens: Vec<SeqLens> = lens.iter().map(|&kv_len| SeqLens { q_len: 1, kv_len }).collect();
        ProblemDesc::cached(heads, Dtype::F16, &lens)
    }

    #[test]
    fn a_later_step_has_more_keys_and_nothing_else() {
        let problem = |desc: ProblemDesc| desc.validate().unwrap();
        let first = problem(cached(&[5, 70]));
        assert_eq!(problem(cached(&[6, 71])).growth_since(&first), Some(2));
        assert_eq!(first.growth_since(&first), Some(0));
        for lens in [&[4, 71][..], &[6], &[6, 71, 1]] {
            assert_eq!(problem(cached(lens)).growth_since(&first), None, "{lens:?}");
        }
        assert!(problem(cached(&[4, 71])).is_step_of(&first));
        let mut causal = cached(&[6, 71]);
        causal.visibility = Visibility::causal();
        assert!(!problem(causal).is_step_of(&first));
        let mut scaled = cached(&[6, 71]);
        scaled.scale = Some(0.25);
        assert!(!problem(scaled).is_step_of(&first));
    }
}
