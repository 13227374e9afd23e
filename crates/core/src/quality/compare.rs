//! Attention of one head over keys and values in several codecs, compared with attention over the originals.

use super::error::QualityError;
use super::head::Head;
use crate::codec::convert::{convert, to_f32};
use crate::codec::{
    CodePages, Codec, EncodeError, KEY_FACTOR_RANGE, KeyTransform, Side, key_factors, key_mean,
};
use crate::dtype::Dtype;
use crate::limits::MAX_HEAD_DIM;
use crate::scoring::{RowIndex, ScoreRow, Scoring};
use crate::tensor::TensorView;
use std::ops::Range;

/// First keys of a sequence whose mean `flashtile kv` and `flashtile run --center-keys` subtract. The mean of 256 independent keys is
/// within a sixteenth of their spread of the model's, which adds 1/256 to the energy that codes hold.
pub const MEAN_ROWS: usize = 256;

/// The power of the deviations of channels for factors of keys, unless another is given. For queries whose channels are equal it gives
/// scores the smallest error: `(average deviation)^2` in the place of the average square.
pub const EQUALIZE_POWER: f32 = 0.5;

/// One head to compare: its rows, their visibility, and how scores are computed.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct HeadAttention<'a> {
    /// Keys, values and queries.
    pub head: Head<'a>,
    /// The keys that each query sees; `None`: all.
    pub seen: Option<&'a [Range<usize>]>,
    /// `c` of `softcap(x) = c * tanh(x / c)`, applied to scaled scores.
    pub softcap: Option<f32>,
    /// The row `[head_dim]` that is subtracted from centered keys; `None`: the mean of all keys.
    pub key_mean: Option<&'a [f32]>,
    /// The factors `[head_dim]` that equalized keys are divided by; `None`: [`key_factors`] of all keys around that mean, with a
    /// power of [`EQUALIZE_POWER`].
    pub key_factors: Option<&'a [f32]>,
    /// Keys below this position are kept in 16 bits: they and their values count as exact.
    pub keep_first: usize,
    /// The number of last keys, of the ones that a query sees, that are kept in 16 bits as well.
    pub keep_last: usize,
}

impl<'a> HeadAttention<'a> {
    /// Every query sees every key, there is no softcap, centered keys are relative to their mean, and no keys are kept in 16 bits.
    #[must_use]
    pub const fn new(head: Head<'a>) -> Self {
        Self {
            head,
            seen: None,
            softcap: None,
            key_mean: None,
            key_factors: None,
            keep_first: 0,
            keep_last: 0,
        }
    }

    /// Checks that slices, dimensions and ranges agree with each other.
    fn check(&self) -> Result<(), QualityError> {
        let Head { k, v, q, head_dim, value_dim, .. } = self.head;
        for (name, got) in [("head_dim", head_dim), ("value_dim", value_dim)] {
            if got == 0 || got > MAX_HEAD_DIM {
                return Err(QualityError::Dimension { name, got });
            }
        }
        for (tensor, len, dim) in
            [("k", k.len(), head_dim), ("v", v.len(), value_dim), ("q", q.len(), head_dim)]
        {
            if !len.is_multiple_of(dim) {
                return Err(QualityError::Rows { tensor, len, dim });
            }
        }
        for (tensor, row) in [("key_mean", self.key_mean), ("key_factors", self.key_factors)] {
            if let Some(len) = row.map(<[f32]>::len).filter(|len| *len != head_dim) {
                return Err(QualityError::Rows { tensor, len, dim: head_dim });
            }
        }
        let in_range = |factor: &f32| KEY_FACTOR_RANGE.contains(&factor.abs());
        if let Some(channel) = self.key_factors.and_then(|factors| factors.iter().position(|x| !in_range(x)))
        {
            return Err(QualityError::Factor { channel });
        }
        let (tokens, queries) = (k.len() / head_dim, q.len() / head_dim);
        if tokens == 0 || v.len() / value_dim != tokens {
            return Err(QualityError::Tokens { k: tokens, v: v.len() / value_dim });
        }
        let Some(seen) = self.seen else { return Ok(()) };
        if seen.len() != queries {
            return Err(QualityError::Queries { got: seen.len(), expected: queries });
        }
        match seen.iter().position(|range| range.end > tokens) {
            Some(query) => Err(QualityError::Visible { query, range: seen[query].clone(), tokens }),
            None => Ok(()),
        }
    }

    fn seen(&self, row: usize, tokens: usize) -> Range<usize> {
        self.seen.map_or(0..tokens, |seen| seen[row].clone())
    }

    /// The first and the last keys of `seen` that the cache keeps in 16 bits.
    fn kept(&self, seen: &Range<usize>) -> [Range<usize>; 2] {
        let first = seen.start..seen.end.min(self.keep_first).max(seen.start);
        let last_from = seen.end.saturating_sub(self.keep_last).max(first.end);
        [first, last_from..seen.end]
    }

    /// Terms of the scores of a row of q. Its index stands for its position, on which no term depends here.
    fn score_row(&self, query: usize) -> ScoreRow<f64, i64> {
        let scoring = Scoring {
            scale: self.head.scale,
            softcap: self.softcap,
            alibi_slopes: None,
            alibi_stride: 0,
            mask: None,
            tree: None,
        };
        scoring.row(RowIndex { batch: 0, head: 0, query: query as i64 })
    }
}

/// How keys are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(clippy::exhaustive_structs)]
pub struct KeyCodec {
    /// The codec.
    pub codec: Codec,
    /// True if `k_mean` is subtracted first, which has no effect on plain elements.
    pub centered: bool,
    /// True if keys are then divided by factors, which has no effect on codecs that [take none](Codec::supports_key_factors).
    pub equalized: bool,
}

impl KeyCodec {
    /// Keys as they are.
    #[must_use]
    pub const fn plain(codec: Codec) -> Self {
        Self { codec, centered: false, equalized: false }
    }

    /// Without the mean.
    #[must_use]
    pub const fn centered(codec: Codec) -> Self {
        Self { codec, centered: true, equalized: false }
    }

    /// Without the mean, divided by factors.
    #[must_use]
    pub const fn equalized(codec: Codec) -> Self {
        Self { codec, centered: true, equalized: true }
    }

    /// The transform of the keys in words: nothing, ` centered`, ` equalized` or ` centered and equalized`.
    #[must_use]
    pub const fn words(&self) -> &'static str {
        match (self.centered, self.equalized) {
            (false, false) => "",
            (true, false) => " centered",
            (false, true) => " equalized",
            (true, true) => " centered and equalized",
        }
    }
}

/// A sum of squared errors with the energy that they are relative to. Sums of several heads can be added.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[allow(clippy::exhaustive_structs)]
pub struct Deviation {
    /// Sum of squared errors.
    pub error: f64,
    /// Sum of squares of the exact values.
    pub energy: f64,
}

impl Deviation {
    /// Error over energy: the relative mean square error. 0 where there is no error.
    #[must_use]
    pub fn relative(self) -> f64 {
        if self.error == 0.0 { 0.0 } else { self.error / self.energy }
    }

    /// Adds another sum.
    pub fn add(&mut self, other: Self) {
        self.error += other.error;
        self.energy += other.energy;
    }
}

/// Errors of keys that a codec has stored, summed over queries. Sums of several heads can be added.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[allow(clippy::exhaustive_structs)]
pub struct KeyErrors {
    /// Errors of the rows.
    pub rows: Deviation,
    /// Sum over queries of the mean square error of their logits, up to a constant per query.
    pub logits: f64,
    /// Sum over queries of the Kullback-Leibler divergence of the probabilities, in nats.
    pub kl: f64,
}

impl KeyErrors {
    /// Adds another sum.
    pub fn add(&mut self, other: &Self) {
        self.rows.add(other.rows);
        self.logits += other.logits;
        self.kl += other.kl;
    }
}

/// A row that a codec cannot store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RefusedRow {
    /// Its index.
    pub row: usize,
    /// Why.
    pub why: EncodeError,
}

/// The result of [`compare`].
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Comparison {
    /// Queries that see a key.
    pub queries: usize,
    /// For each codec of the keys.
    pub keys: Vec<Result<KeyErrors, RefusedRow>>,
    /// For each codec of the values.
    pub values: Vec<Result<Deviation, RefusedRow>>,
    /// Errors of the output, `[codecs of the keys][codecs of the values]`; `None` if a codec cannot store all rows.
    pub out: Vec<Vec<Option<Deviation>>>,
}

/// Query rows whose outputs are accumulated together, so that values are read once for all of them.
const BLOCK: usize = 8;

/// Compares attention over keys and values in every pair of codecs with attention over the originals. Logits and
/// probabilities are f64, weighted sums f32.
///
/// Cost: `O(queries * tokens * keys.len() * (head_dim + values.len() * value_dim))` on one thread, and memory for
/// `tokens * (4 * (2 * values.len() + 1) * value_dim + 4 * head_dim + 16 * queries)` bytes.
///
/// # Errors
/// [`QualityError`] except [`QualityError::Encode`]: rows that a codec cannot store are reported in the result.
pub fn compare(
    attention: &HeadAttention<'_>,
    keys: &[KeyCodec],
    values: &[Codec],
) -> Result<Comparison, QualityError> {
    attention.check()?;
    let head = attention.head;
    let mean = attention.key_mean.map_or_else(|| mean_of_head(&head), <[f32]>::to_vec);
    let factors = attention.key_factors.map_or_else(|| factors_of_head(&head, &mean), <[f32]>::to_vec);

    let stored_values: Vec<Result<Vec<f32>, RefusedRow>> = values
        .iter()
        .map(|&codec| stored(head.v, head.value_dim, (codec, Side::Values), KeyTransform::default()))
        .collect();
    let stack = Stack::new(head.v, head.value_dim, &stored_values);
    let exact = Exact::new(attention, &stack);

    let of_keys = |key: &KeyCodec| {
        let equalized = key.equalized && key.codec.supports_key_factors();
        let transform =
            KeyTransform::new(key.centered.then(|| mean.clone()), equalized.then(|| factors.clone()));
        let k = stored(head.k, head.head_dim, (key.codec, Side::Keys), transform)?;
        let (mut errors, out) = exact.against(&k, &stack);
        errors.rows = deviation(head.k, &k);
        Ok((errors, out))
    };
    let found: Vec<Result<(KeyErrors, Vec<Deviation>), RefusedRow>> = keys.iter().map(of_keys).collect();
    // Columns of the stack are the values that could be stored, in order.
    let by_codec = |out: &[Deviation]| {
        let mut columns = out.iter();
        stored_values.iter().map(|v| v.as_ref().ok().and_then(|_| columns.next().copied())).collect()
    };
    Ok(Comparison {
        queries: exact.rows.len(),
        out: found
            .iter()
            .map(|of| of.as_ref().map_or_else(|_| vec![None; values.len()], |(_, out)| by_codec(out)))
            .collect(),
        keys: found.into_iter().map(|of| of.map(|(errors, _)| errors)).collect(),
        values: stored_values
            .iter()
            .map(|of| of.as_ref().map(|v| deviation(head.v, v)).map_err(|e| *e))
            .collect(),
    })
}

/// Original values and decoded ones of each codec, side by side for each token.
struct Stack {
    rows: Vec<f32>,
    dim: usize,
    /// Elements per token.
    width: usize,
}

impl Stack {
    fn new(v: &[f32], dim: usize, stored: &[Result<Vec<f32>, RefusedRow>]) -> Self {
        let all: Vec<&[f32]> = std::iter::once(v).chain(stored.iter().flatten().map(Vec::as_slice)).collect();
        let width = all.len() * dim;
        let mut rows = Vec::with_capacity(v.len() * all.len());
        for token in 0..v.len() / dim {
            all.iter().for_each(|v| rows.extend_from_slice(&v[token * dim..][..dim]));
        }
        Self { rows, dim, width }
    }

    /// The original value of a token.
    fn original(&self, token: usize) -> &[f32] {
        &self.rows[token * self.width..][..self.dim]
    }

    /// Adds the values of tokens `from..`, weighted by `probs` of several rows `[rows][tokens]`, to `out`,
    /// `[rows][width]`.
    fn add(&self, probs: &[&[f32]], from: usize, out: &mut [f32]) {
        /// Tokens per step, which saves loads and stores of `out`.
        const TOKENS: usize = 4;
        let tokens = probs.first().map_or(0, |row| row.len());
        for at in (0..tokens).step_by(TOKENS) {
            let here = TOKENS.min(tokens - at);
            let rows = &self.rows[(from + at) * self.width..][..here * self.width];
            for (probs, out) in probs.iter().zip(out.chunks_exact_mut(self.width)) {
                let probs = &probs[at..at + here];
                match (probs, rows.len() == TOKENS * self.width) {
                    (&[a, b, c, d], true) => {
                        let (first, second) = rows.split_at(2 * self.width);
                        let ((va, vb), (vc, vd)) = (first.split_at(self.width), second.split_at(self.width));
                        for ((((out, va), vb), vc), vd) in out.iter_mut().zip(va).zip(vb).zip(vc).zip(vd) {
                            *out += (a * va + b * vb) + (c * vc + d * vd);
                        }
                    }
                    _ => {
                        for (p, row) in probs.iter().zip(rows.chunks_exact(self.width)) {
                            out.iter_mut().zip(row).for_each(|(out, v)| *out += p * v);
                        }
                    }
                }
            }
        }
    }
}

/// A query that sees a key, and its exact attention.
struct ExactRow {
    /// Row of q.
    query: usize,
    seen: Range<usize>,
    /// Keys that the query sees.
    logits: Vec<f64>,
    probs: Vec<f64>,
    lse: f64,
    out: Vec<f32>,
}

/// Exact attention of the queries that see a key.
struct Exact<'a> {
    attention: &'a HeadAttention<'a>,
    rows: Vec<ExactRow>,
}

impl<'a> Exact<'a> {
    fn new(attention: &'a HeadAttention<'a>, stack: &Stack) -> Self {
        let head = attention.head;
        let tokens = head.k.len() / head.head_dim;
        let queries = 0..head.q.len() / head.head_dim;
        let seeing =
            queries.map(|query| (query, attention.seen(query, tokens))).filter(|(_, seen)| !seen.is_empty());
        let row = |(query, seen): (usize, Range<usize>)| {
            let logits = logits(attention, query, head.k, &seen);
            let (probs, lse) = softmax(&logits);
            ExactRow { query, seen, logits, probs, lse, out: Vec::new() }
        };
        let mut rows: Vec<ExactRow> = seeing.map(row).collect();
        for block in rows.chunks_mut(BLOCK) {
            let probs = block.iter().map(|row| row.probs.clone()).collect();
            let seen: Vec<Range<usize>> = block.iter().map(|row| row.seen.clone()).collect();
            let out = weighted(attention, stack, probs, &seen);
            for (row, out) in block.iter_mut().zip(out.chunks_exact(stack.width)) {
                // The first column has the original values.
                row.out = out[..stack.dim].to_vec();
            }
        }
        Self { attention, rows }
    }

    /// Errors of attention over decoded keys: all but the errors of the rows themselves, and the output errors for
    /// each column of stored values.
    fn against(&self, k: &[f32], stack: &Stack) -> (KeyErrors, Vec<Deviation>) {
        let mut errors = KeyErrors::default();
        let mut out = vec![Deviation::default(); stack.width / stack.dim - 1];
        for block in self.rows.chunks(BLOCK) {
            let mut probs = Vec::with_capacity(block.len());
            for row in block {
                let mut got = logits(self.attention, row.query, k, &row.seen);
                for key in self.attention.kept(&row.seen).into_iter().flatten() {
                    let at = key - row.seen.start;
                    got[at] = row.logits[at];
                }
                let keys = got.len() as f64;
                let shift = row.logits.iter().zip(&got).map(|(a, b)| a - b).sum::<f64>() / keys;
                let square = row.logits.iter().zip(&got).map(|(a, b)| (a - b - shift).powi(2)).sum::<f64>();
                errors.logits += square / keys;
                let (got_probs, lse) = softmax(&got);
                // sum p ((a - lse) - (b - lse')), with the shift removed from both sides.
                let moved = row.probs.iter().zip(row.logits.iter().zip(&got));
                let moved = moved.map(|(p, (a, b))| p * (a - b - shift)).sum::<f64>();
                // Rounding can make it negative near 0; a NaN stays.
                let kl = moved + shift - row.lse + lse;
                errors.kl += if kl < 0.0 { 0.0 } else { kl };
                probs.push(got_probs);
            }
            let seen: Vec<Range<usize>> = block.iter().map(|row| row.seen.clone()).collect();
            let got = weighted(self.attention, stack, probs, &seen);
            for (row, got) in block.iter().zip(got.chunks_exact(stack.width)) {
                for (out, got) in out.iter_mut().zip(got.chunks_exact(stack.dim).skip(1)) {
                    out.add(deviation(&row.out, got));
                }
            }
        }
        (errors, out)
    }
}

/// Sums of every column of a stack for each row, weighted by probabilities of the keys that it sees: `[rows][width]`. Every column has
/// the original values of kept tokens.
fn weighted(
    attention: &HeadAttention<'_>,
    stack: &Stack,
    mut probs: Vec<Vec<f64>>,
    seen: &[Range<usize>],
) -> Vec<f32> {
    let mut of_kept = vec![0.0f32; probs.len() * stack.dim];
    for ((probs, seen), out) in probs.iter_mut().zip(seen).zip(of_kept.chunks_exact_mut(stack.dim)) {
        for key in attention.kept(seen).into_iter().flatten() {
            let p = std::mem::take(&mut probs[key - seen.start]) as f32;
            out.iter_mut().zip(stack.original(key)).for_each(|(out, v)| *out += p * v);
        }
    }
    let start = seen.iter().map(|seen| seen.start).min().unwrap_or(0);
    let end = seen.iter().map(|seen| seen.end).max().unwrap_or(0);
    let mut wide = vec![vec![0.0f32; end - start]; probs.len()];
    for ((wide, probs), seen) in wide.iter_mut().zip(&probs).zip(seen) {
        let into = &mut wide[seen.start - start..seen.end - start];
        into.iter_mut().zip(probs).for_each(|(into, p)| *into = *p as f32);
    }
    let wide: Vec<&[f32]> = wide.iter().map(Vec::as_slice).collect();
    let mut out = vec![0.0f32; probs.len() * stack.width];
    stack.add(&wide, start, &mut out);
    for (out, of_kept) in out.chunks_exact_mut(stack.width).zip(of_kept.chunks_exact(stack.dim)) {
        for column in out.chunks_exact_mut(stack.dim) {
            column.iter_mut().zip(of_kept).for_each(|(out, of_kept)| *out += of_kept);
        }
    }
    out
}

/// Logits of a row of q for the keys that it sees.
fn logits(attention: &HeadAttention<'_>, query: usize, k: &[f32], seen: &Range<usize>) -> Vec<f64> {
    let Head { q, head_dim, .. } = attention.head;
    let q = &q[query * head_dim..][..head_dim];
    let row = attention.score_row(query);
    let keys = k[seen.start * head_dim..seen.end * head_dim].chunks_exact(head_dim);
    keys.zip(seen.clone()).map(|(k, j)| row.score(j as i64, product(q, k))).collect()
}

/// Inner product in f64, with several independent partial sums.
fn product(a: &[f32], b: &[f32]) -> f64 {
    const LANES: usize = 8;
    let mut sums = [0.0f64; LANES];
    let (a_blocks, a_rest) = a.as_chunks::<LANES>();
    let (b_blocks, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a_blocks.iter().zip(b_blocks) {
        for lane in 0..LANES {
            sums[lane] += f64::from(a[lane]) * f64::from(b[lane]);
        }
    }
    let rest: f64 = a_rest.iter().zip(b_rest).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
    sums.into_iter().sum::<f64>() + rest
}

/// The softmax of logits, and their logsumexp.
fn softmax(logits: &[f64]) -> (Vec<f64>, f64) {
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut probs: Vec<f64> = logits.iter().map(|x| (x - max).exp()).collect();
    let sum: f64 = probs.iter().sum();
    probs.iter_mut().for_each(|x| *x /= sum);
    (probs, max + sum.ln())
}

/// Rows after encoding and decoding.
fn stored(
    rows: &[f32],
    dim: usize,
    (codec, side): (Codec, Side),
    transform: KeyTransform,
) -> Result<Vec<f32>, RefusedRow> {
    let mut back = vec![0.0; rows.len()];
    if let Some(dtype) = codec.dtype() {
        let bytes: Vec<u8> = rows.iter().flat_map(|x| x.to_ne_bytes()).collect();
        let mut narrow = vec![0u8; rows.len() * dtype.bytes()];
        convert(Dtype::F32, &bytes, dtype, &mut narrow);
        to_f32(dtype, &narrow, &mut back);
        return Ok(back);
    }
    // A page of one row, overwritten for each.
    let page = CodePages::new(codec, side, [1, 1, 1, dim]);
    let mut page = page.map_err(|_| RefusedRow { row: 0, why: EncodeError::Dim { codec, dim } })?;
    page.set_key_transform(transform);
    for (row, (x, back)) in rows.chunks_exact(dim).zip(back.chunks_exact_mut(dim)).enumerate() {
        page.store([0, 0, 0], x).map_err(|why| RefusedRow { row, why })?;
        page.read(0, 0, 0, back);
    }
    Ok(back)
}

/// The mean of all keys of a head that has been checked.
fn mean_of_head(head: &Head<'_>) -> Vec<f32> {
    key_mean(&keys_of(head))
}

/// The factors of all keys of a head that has been checked; 1 where keys are not finite, whose rows are refused.
fn factors_of_head(head: &Head<'_>, mean: &[f32]) -> Vec<f32> {
    let factors = key_factors(&keys_of(head), mean, EQUALIZE_POWER);
    let in_range = factors.iter().all(|factor| KEY_FACTOR_RANGE.contains(&factor.abs()));
    if in_range { factors } else { vec![1.0; head.head_dim] }
}

/// The keys of a head that has been checked.
fn keys_of<'a>(head: &Head<'a>) -> TensorView<'a> {
    let keys = TensorView::bhsd(head.k, [1, 1, head.k.len() / head.head_dim, head.head_dim]);
    keys.unwrap_or_else(|_| unreachable!("keys are whole rows"))
}

fn deviation(rows: &[f32], back: &[f32]) -> Deviation {
    let error = rows.iter().zip(back).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum();
    Deviation { error, energy: rows.iter().map(|x| f64::from(*x).powi(2)).sum() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashtile_testkit::Rng;

    const KEYS: [KeyCodec; 6] = [
        KeyCodec::plain(Codec::F32),
        KeyCodec::plain(Codec::Int8),
        KeyCodec::plain(Codec::Tq4),
        KeyCodec::centered(Codec::Tq4),
        KeyCodec::plain(Codec::F16),
        KeyCodec::equalized(Codec::Tq4),
    ];
    const VALUES: [Codec; 3] = [Codec::F32, Codec::Tq5, Codec::Tq2];

    fn rows(seed: u64, count: usize, dim: usize) -> Vec<f32> {
        let mut rng = Rng::new(seed);
        (0..count * dim).map(|_| rng.normal()).collect()
    }

    /// By definition: one pair of codecs and one query at a time.
    fn naive(attention: &HeadAttention<'_>, k: &[f32], v: &[f32]) -> (f64, f64, Deviation) {
        let Head { head_dim, value_dim, scale, .. } = attention.head;
        let (mut logit, mut kl, mut out) = (0.0, 0.0, Deviation::default());
        for (row, q) in attention.head.q.chunks_exact(head_dim).enumerate() {
            let seen = attention.seen(row, k.len() / head_dim);
            if seen.is_empty() {
                continue;
            }
            let Head { k: exact_k, v: exact_v, .. } = attention.head;
            let is_kept = |j: usize| j < attention.keep_first || j + attention.keep_last >= seen.end;
            let of = |k: &[f32], v: &[f32]| {
                let (k_of, v_of) =
                    (|j| if is_kept(j) { exact_k } else { k }, |j| if is_kept(j) { exact_v } else { v });
                let score = |j: usize| {
                    let k = k_of(j);
                    let dot: f64 =
                        (0..head_dim).map(|d| f64::from(q[d]) * f64::from(k[j * head_dim + d])).sum();
                    let x = dot * f64::from(scale);
                    attention.softcap.map_or(x, |c| f64::from(c) * (x / f64::from(c)).tanh())
                };
                let scores: Vec<f64> = seen.clone().map(score).collect();
                let sum: f64 = scores.iter().map(|s| s.exp()).sum();
                let p: Vec<f64> = scores.iter().map(|s| s.exp() / sum).collect();
                let out: Vec<f64> = (0..value_dim)
                    .map(|d| {
                        let term = |(j, p): (usize, &f64)| p * f64::from(v_of(j)[j * value_dim + d]);
                        seen.clone().zip(&p).map(term).sum()
                    })
                    .collect();
                (scores, p, out)
            };
            let ((a, p, want), (b, r, got)) = (of(attention.head.k, attention.head.v), of(k, v));
            let shift = a.iter().zip(&b).map(|(a, b)| a - b).sum::<f64>() / a.len() as f64;
            logit += a.iter().zip(&b).map(|(a, b)| (a - b - shift).powi(2)).sum::<f64>() / a.len() as f64;
            kl += p.iter().zip(&r).map(|(p, r)| p * (p / r).ln()).sum::<f64>();
            out.error += want.iter().zip(&got).map(|(a, b)| (a - b).powi(2)).sum::<f64>();
            out.energy += want.iter().map(|x| x * x).sum::<f64>();
        }
        (logit, kl, out)
    }

    fn near(got: f64, want: f64) -> bool {
        (got - want).abs() <= 1e-4 * want.abs() + 1e-11
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let (k, v, q) = ([0.5f32; 12], [0.5f32; 6], [0.5f32; 8]);
        let head = Head { k: &k, v: &v, q: &q, head_dim: 4, value_dim: 2, scale: 1.0 };
        let refusal = |attention: HeadAttention<'_>| {
            compare(&attention, &[], &[]).map(|found| found.queries).map_err(|e| e.to_string())
        };
        let of = |head| refusal(HeadAttention::new(head));
        assert_eq!(of(head), Ok(2));
        assert_eq!(of(Head { head_dim: 0, ..head }), Err("head_dim is 0, expected 1 to 512".into()));
        assert_eq!(of(Head { value_dim: 513, ..head }), Err("value_dim is 513, expected 1 to 512".into()));
        assert_eq!(of(Head { q: &q[1..], ..head }), Err("q has 7 elements, expected whole rows of 4".into()));
        assert_eq!(
            of(Head { v: &v[2..], ..head }),
            Err("k has 3 rows and v has 2, expected the same number, at least 1".into())
        );
        assert_eq!(
            of(Head { k: &[], v: &[], ..head }),
            Err("k has 0 rows and v has 0, expected the same number, at least 1".into())
        );
        let mut attention = HeadAttention::new(head);
        attention.key_mean = Some(&q[..3]);
        assert_eq!(refusal(attention), Err("key_mean has 3 elements, expected whole rows of 4".into()));
        let mut attention = HeadAttention::new(head);
        attention.key_factors = Some(&q[..5]);
        assert_eq!(refusal(attention), Err("key_factors has 5 elements, expected whole rows of 4".into()));
        attention.key_factors = Some(&[1.0, 2.0, 0.0, 1.0]);
        let expected = "key_factors has channel 2 outside 2.3283064e-10 to 4.2949673e9 in magnitude";
        assert_eq!(refusal(attention), Err(expected.into()));
        let mut attention = HeadAttention::new(head);
        let ranges = [0..3, 1..4];
        attention.seen = Some(&ranges[..1]);
        assert_eq!(
            refusal(attention),
            Err("1 ranges of visible keys, expected 2, one for each query".into())
        );
        attention.seen = Some(&ranges);
        assert_eq!(refusal(attention), Err("query 1 sees keys 1..4, there are 3".into()));
    }

    #[test]
    fn every_pair_is_that_of_the_definition() {
        let (tokens, queries, head_dim, value_dim) = (37, 19, 24, 20);
        let (k, v, q) = (rows(1, tokens, head_dim), rows(2, tokens, value_dim), rows(3, queries, head_dim));
        let head = Head { k: &k, v: &v, q: &q, head_dim, value_dim, scale: 0.3 };
        let causal: Vec<Range<usize>> = (0..queries).map(|i| i.saturating_sub(9)..i * 2).collect();
        let plain = HeadAttention::new(head);
        let causal_softcap = HeadAttention { seen: Some(&causal), softcap: Some(1.5), ..plain };
        let kept = HeadAttention { keep_first: 11, keep_last: 5, ..plain };
        let kept_causal = HeadAttention { keep_first: 3, keep_last: 6, ..causal_softcap };
        for attention in [plain, causal_softcap, kept, kept_causal] {
            let found = compare(&attention, &KEYS, &VALUES).unwrap();
            assert_eq!(found.queries, if attention.seen.is_some() { queries - 1 } else { queries });
            for (key, codec) in KEYS.iter().enumerate() {
                let mean = mean_of_head(&head);
                let factors = codec.equalized.then(|| key_factors(&keys_of(&head), &mean, 0.5));
                let transform = KeyTransform::new(codec.centered.then_some(mean), factors);
                let stored_k = stored(&k, head_dim, (codec.codec, Side::Keys), transform).unwrap();
                for (value, codec) in VALUES.iter().enumerate() {
                    let stored_v =
                        stored(&v, value_dim, (*codec, Side::Values), KeyTransform::default()).unwrap();
                    let (logit, kl, out) = naive(&attention, &stored_k, &stored_v);
                    let of_key = found.keys[key].unwrap();
                    let got = found.out[key][value].unwrap();
                    assert!(near(of_key.logits, logit) && near(of_key.kl, kl), "{of_key:?} {logit} {kl}");
                    assert!(near(got.relative(), out.relative()), "{got:?} {out:?}");
                }
            }
            // Without quantization, the errors are exactly 0.
            assert_eq!((found.keys[0].unwrap().kl, found.out[0][0].unwrap().error), (0.0, 0.0));
            assert!(found.keys[2].unwrap().kl > 1e-3 && found.out[2][2].unwrap().relative() > 1e-3);
        }
    }

    #[test]
    fn a_divergence_that_is_none_is_not_0() {
        let (mut k, v, q) = (rows(1, 5, 16), rows(2, 5, 16), rows(3, 2, 16));
        // Infinite in f16.
        k[20] = 70_000.0;
        let head = Head { k: &k, v: &v, q: &q, head_dim: 16, value_dim: 16, scale: 1.0 };
        let found = compare(&HeadAttention::new(head), &KEYS[4..5], &VALUES).unwrap();
        assert!(found.keys[0].unwrap().kl.is_nan());
    }

    #[test]
    fn unequal_channels_err_less_when_equalized() {
        let (tokens, dim) = (200, 32);
        let (mut k, v, q) = (rows(1, tokens, dim), rows(2, tokens, dim), rows(3, 16, dim));
        k.iter_mut().enumerate().for_each(|(at, x)| *x *= if at % dim == 7 { 20.0 } else { 1.0 });
        let head = Head { k: &k, v: &v, q: &q, head_dim: dim, value_dim: dim, scale: 0.05 };
        let keys = [KeyCodec::centered(Codec::Tq3), KeyCodec::equalized(Codec::Tq3)];
        let found = compare(&HeadAttention::new(head), &keys, &VALUES).unwrap();
        let [centered, equalized] = [0, 1].map(|at: usize| found.keys[at].unwrap());
        assert!(equalized.logits < 0.3 * centered.logits, "{equalized:?} {centered:?}");
        // Factors of 1 change nothing; codecs without a rotation ignore factors.
        let ones = HeadAttention { key_factors: Some(&[1.0; 32]), ..HeadAttention::new(head) };
        let found = compare(&ones, &keys, &[]).unwrap();
        assert_eq!(found.keys[0], found.keys[1]);
        let fp8 = [KeyCodec::centered(Codec::Fp8), KeyCodec::equalized(Codec::Fp8)];
        let found = compare(&HeadAttention::new(head), &fp8, &[]).unwrap();
        assert_eq!(found.keys[0], found.keys[1]);
    }

    #[test]
    fn rows_that_a_codec_refuses_leave_the_others() {
        let (tokens, dim) = (6, 16);
        let (mut k, mut v, q) = (rows(1, tokens, dim), rows(2, tokens, dim), rows(3, 2, dim));
        // A constant component that is too large to store; without it, the rows are zero.
        k.iter_mut().for_each(|x| *x += 4000.0);
        let found = |k: &[f32], v: &[f32]| {
            let head = Head { k, v, q: &q, head_dim: dim, value_dim: dim, scale: 1e-4 };
            compare(&HeadAttention::new(head), &KEYS, &VALUES).unwrap()
        };
        let first = found(&k, &v);
        let refused = RefusedRow { row: 0, why: EncodeError::Norm };
        assert_eq!((first.keys[1], first.keys[2]), (Err(refused), Err(refused)));
        assert!(first.keys[0].is_ok() && first.keys[3].is_ok());
        assert_eq!(first.out[2], [None; 3]);
        assert!([3, 5].iter().all(|key| first.out[*key].iter().all(Option::is_some)));
        let refused = RefusedRow { row: 0, why: EncodeError::Dim { codec: Codec::MlxTq8, dim } };
        let head = Head { k: &k, v: &v, q: &q, head_dim: dim, value_dim: dim, scale: 1e-4 };
        assert_eq!(compare(&HeadAttention::new(head), &[], &[Codec::MlxTq8]).unwrap().values, [Err(refused)]);
        v[3 * dim] = 9000.0;
        let second = found(&k, &v);
        assert_eq!(second.values[1], Err(RefusedRow { row: 3, why: EncodeError::Norm }));
        assert_eq!(second.out[3].iter().map(Option::is_some).collect::<Vec<_>>(), [true, false, false]);
    }
}
