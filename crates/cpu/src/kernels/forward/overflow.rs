//! The non-finite fallback: rows whose sums overflow where their means do not.
//!
//! Kernels add up products with unnormalised probabilities and divide by the sum of the probabilities at the end, so that a few values near the
//! largest f32 overflow; and an infinite value makes them NaN where its probability underflows. Columns of a row that came out infinite or
//! NaN, though its probabilities are finite, are recomputed: from the infinite and NaN values that the row sees or, without any, one key after
//! another in f64.

#![allow(unsafe_code)]

use super::state::Part;
use crate::kernels::shared::score_task::{Query, RunInputs, SeenKeys};
use flashtile_core::codec::KvView;
use flashtile_core::dtype::Dtype;
use flashtile_core::limits::MAX_HEAD_DIM;
use flashtile_core::scoring::{RowIndex, ScoreRow, masked};
use flashtile_core::tensor::{MaskView, TensorView};
use half::{bf16, f16};

/// A row of q of one head.
pub(crate) struct Row<'a> {
    parts: &'a [Part<'a>],
    /// The first part, for what parts have in common.
    run: &'a RunInputs<'a>,
    query: Query<'a>,
    seen: SeenKeys<'a>,
    terms: ScoreRow<f64, i64>,
}

/// Where a key or value is.
#[derive(Clone, Copy)]
struct Place {
    head: usize,
    /// Batch entry, or page.
    entry: usize,
    /// Row of the entry.
    row: usize,
}

impl<'a> Row<'a> {
    pub(crate) fn new(parts: &'a [Part<'a>], query: Query<'a>) -> Self {
        let run = &parts[0].run;
        let at = RowIndex { batch: query.index, head: query.head, query: query.own_key() };
        Self { parts, run, seen: query.seen_keys(run), terms: run.scoring.row(at), query }
    }

    /// Calls `found` with each column whose sum is not finite, and with its mean.
    #[cold]
    #[inline(never)]
    pub(crate) fn means(&self, sums: &[f32], mut found: impl FnMut(usize, f64)) {
        let q = self.elements();
        let mut max_sum = None;
        let mut prob = |j: usize| {
            let (max, total) = *max_sum.get_or_insert_with(|| self.max_sum(&q));
            let score = self.score(&q, j);
            let p = (score - max).exp() / total;
            // The probability of a finite score is positive, however small.
            if p == 0.0 && score.is_finite() { f64::MIN_POSITIVE } else { p }
        };
        let columns = || (0..sums.len()).filter(|&c| !sums[c].is_finite());
        // An infinity or a NaN decides a column alone.
        let mut means = [0.0f64; MAX_HEAD_DIM];
        for j in self.seen.iter().filter(|&j| self.has_nonfinite_value(j)) {
            let (value, mut p) = (self.value(j), None);
            for c in columns() {
                let x = value[c];
                if x.is_infinite() && !means[c].is_nan() {
                    means[c] += *p.get_or_insert_with(|| prob(j)) * x;
                } else if x.is_nan() {
                    means[c] = x;
                }
            }
        }
        let mut finite = [false; MAX_HEAD_DIM];
        columns().for_each(|c| finite[c] = means[c] == 0.0);
        if finite.contains(&true) {
            for j in self.seen.iter() {
                let (p, value) = (prob(j), self.value(j));
                columns().filter(|&c| finite[c]).for_each(|c| means[c] += p * value[c]);
            }
        }
        columns().for_each(|c| found(c, means[c]));
    }

    /// The greatest score, sink included, and the sum of the probabilities relative to it.
    fn max_sum(&self, q: &[f64]) -> (f64, f64) {
        let scores = || self.seen.iter().map(|j| self.score(q, j));
        let sink = self.run.inputs.sinks.map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[self.query.head]));
        let max = scores().fold(sink, f64::max);
        (max, (sink - max).exp() + scores().map(|score| (score - max).exp()).sum::<f64>())
    }

    /// The storage of a key that the row sees.
    fn part(&self, j: usize) -> &'a RunInputs<'a> {
        let Query { sequence, position, .. } = self.query;
        let has_key = |part: &&Part<'_>| part.run.problem.visible(sequence, position).contains(&j);
        self.parts.iter().find(has_key).map_or(self.run, |part| &part.run)
    }

    fn place(&self, j: usize) -> Place {
        let Query { index, sequence, head, .. } = self.query;
        let kv_head = head / self.run.problem.dims().gqa_group();
        match self.part(j).inputs.tables {
            None => Place { head: kv_head, entry: sequence.batch, row: sequence.kv_start + j },
            Some(t) => {
                let page = t.table[index * t.width + (j / t.page_size) % t.width];
                Place { head: kv_head, entry: page as usize, row: j % t.page_size }
            }
        }
    }

    /// The value of a key, filled up with zeros.
    fn value(&self, j: usize) -> [f64; MAX_HEAD_DIM] {
        row_of(&self.part(j).inputs.v, self.place(j))
    }

    /// True where the value of a key may have an infinity or a NaN.
    fn has_nonfinite_value(&self, j: usize) -> bool {
        match &self.part(j).inputs.v {
            KvView::Elements(view) => has_nonfinite(view, self.place(j)),
            // Only bytes that no encoder writes decode to one.
            KvView::Codes(_) => true,
        }
    }

    /// Elements of the row.
    fn elements(&self) -> [f64; MAX_HEAD_DIM] {
        let mut q = [0.0; MAX_HEAD_DIM];
        let (view, s) = (&self.run.inputs.q, self.query.sequence);
        for (d, q) in q.iter_mut().enumerate().take(view.shape()[3]) {
            *q = f64::from(view.get([s.batch, self.query.head, s.q_start + self.query.position, d]));
        }
        q
    }

    /// The score of a key that is not hidden, in natural units.
    fn score(&self, q: &[f64], j: usize) -> f64 {
        let key = row_of(&self.part(j).inputs.k, self.place(j));
        let product: f64 = q.iter().zip(key).map(|(q, k)| q * k).sum();
        let score = self.terms.score(j as i64, product);
        let Query { index, position, head, .. } = self.query;
        let bias = |mask: MaskView<'_>| f64::from(mask.bias([index, head, position, j]));
        self.run.scoring.mask.map_or(score, |mask| masked(score, bias(mask)))
    }
}

/// Stores element `c` of a row.
///
/// # Safety
/// The row that starts at `dst` has the element, which no other thread accesses.
pub(crate) unsafe fn store(dtype: Dtype, dst: *mut u8, c: usize, x: f64) {
    // SAFETY: the caller's contract; rows are aligned to their dtype.
    unsafe {
        match dtype {
            Dtype::F32 => *dst.cast::<f32>().add(c) = x as f32,
            Dtype::F16 => *dst.cast::<f16>().add(c) = f16::from_f64(x),
            Dtype::BF16 => *dst.cast::<bf16>().add(c) = bf16::from_f64(x),
        }
    }
}

/// A row of keys or values, filled up with zeros.
fn row_of(of: &KvView<'_>, Place { head, entry, row }: Place) -> [f64; MAX_HEAD_DIM] {
    let mut x = [0.0; MAX_HEAD_DIM];
    let dim = of.shape()[3];
    match of {
        KvView::Elements(view) => {
            x[..dim]
                .iter_mut()
                .enumerate()
                .for_each(|(d, x)| *x = f64::from(view.get([entry, head, row, d])));
        }
        KvView::Codes(codes) => {
            let mut decoded = [0.0f32; MAX_HEAD_DIM];
            codes.read(entry, head, row, &mut decoded[..dim]);
            x.iter_mut().zip(decoded).for_each(|(x, decoded)| *x = f64::from(decoded));
        }
    }
    x
}

/// True where a row of elements has an infinity or a NaN.
fn has_nonfinite(view: &TensorView<'_>, Place { head, entry, row }: Place) -> bool {
    let bytes = view.row_bytes([entry, head, row]);
    // Exponents of all ones.
    let any = |mask: u16| bytes.as_chunks().0.iter().any(|x| u16::from_ne_bytes(*x) & mask == mask);
    match view.dtype() {
        Dtype::F32 => bytes.as_chunks().0.iter().any(|x| u32::from_ne_bytes(*x) & 0x7f80_0000 == 0x7f80_0000),
        Dtype::F16 => any(0x7c00),
        Dtype::BF16 => any(0x7f80),
    }
}
