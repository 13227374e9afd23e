//! Attention by definition.

use crate::codec::KvView;
use crate::inputs;
use crate::inputs::{Inputs, RunError};
use crate::isa::FloatEnv;
use crate::problem::{KeyPart, Problem, Sequence};
use crate::tensor::TensorView;
use std::ops::Range;

/// Output of [`attention`], dense.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Attention {
    /// `[batch, q_heads, q_len, value_dim]`.
    pub out: Vec<f64>,
    /// `[batch, q_heads, q_len]`.
    pub lse: Vec<f64>,
}

/// Attention as [`crate::problem`] defines it, in f64. Cost: `O(visible pairs * (head_dim + value_dim))` on one
/// thread, and memory for the keys and values of one head in f64.
///
/// # Errors
/// [`RunError`] if the inputs do not match the problem.
pub fn attention(problem: &Problem, inputs: &Inputs<'_>) -> Result<Attention, RunError> {
    inputs::check_inputs(problem, inputs)?;
    let dims = problem.dims();
    let rows = dims.batch * dims.q_heads * dims.q_len;
    let mut result = Attention { out: vec![0.0; rows * dims.value_dim], lse: vec![f64::NEG_INFINITY; rows] };
    for_each_row(problem, inputs, |at, row| {
        result.lse[at] = attend(row, &mut result.out[at * dims.value_dim..][..dims.value_dim]);
    });
    Ok(result)
}

/// Calls a function with every probability by which [`attention`] weighs a value: the index of the query row in
/// `[batch, q_heads, q_len]`, the row of the key in k (of a cached sequence, the token), and the probability. Hidden keys
/// are left out. With sinks, the probabilities of a row sum to less than 1. The function is called in the default floating-point
/// environment. Cost: as [`attention`].
///
/// # Errors
/// As [`attention`].
pub fn for_each_prob(
    problem: &Problem,
    inputs: &Inputs<'_>,
    mut visit: impl FnMut(usize, usize, f64),
) -> Result<(), RunError> {
    inputs::check_inputs(problem, inputs)?;
    for_each_row(problem, inputs, |at, row| {
        for (j, p) in softmax(row).0 {
            visit(at, row.sequence.kv_start + j, p);
        }
    });
    Ok(())
}

/// Calls a function for every query row with its index in `[batch, q_heads, q_len]`, in the default floating-point environment. The inputs
/// have been checked.
pub(crate) fn for_each_row(problem: &Problem, inputs: &Inputs<'_>, mut visit: impl FnMut(usize, &Row<'_>)) {
    let _env = FloatEnv::ieee();
    let dims = problem.dims();
    let parts = parts(problem, inputs);
    for (index, sequence) in problem.sequences().iter().enumerate() {
        for kv_head in 0..dims.kv_heads {
            let parts: Vec<_> =
                parts.iter().map(|part| PartRows::new(part, sequence, index, kv_head)).collect();
            for (h, i) in (0..dims.gqa_group()).flat_map(|g| (0..sequence.q_len).map(move |i| (g, i))) {
                let h = kv_head * dims.gqa_group() + h;
                let q: Vec<f64> = elements(&inputs.q, [sequence.batch, h, sequence.q_start + i]).collect();
                let row = Row { problem, inputs, sequence, index, h, i, q: &q, parts: &parts };
                let at = (sequence.batch * dims.q_heads + h) * dims.q_len + sequence.q_start + i;
                visit(at, &row);
            }
        }
    }
}

/// The problem over each storage of its keys, with the inputs that lie there.
fn parts<'a>(problem: &Problem, inputs: &Inputs<'a>) -> Vec<(Problem, Inputs<'a>)> {
    let parts: &[KeyPart] = match problem.desc().kept {
        Some(_) => &[KeyPart::Codes, KeyPart::First, KeyPart::Last],
        None => &[KeyPart::All],
    };
    parts.iter().filter_map(|&part| Some((problem.part(part), inputs.part(part)?))).collect()
}

/// Keys and values of one head of a sequence that lie in one storage.
struct PartRows<'a> {
    problem: &'a Problem,
    k: Rows,
    v: Rows,
}

impl<'a> PartRows<'a> {
    fn new(part: &'a (Problem, Inputs<'_>), sequence: &Sequence, index: usize, kv_head: usize) -> Self {
        let (problem, inputs) = part;
        let end = if problem.key_part() == KeyPart::First { sequence.first_len } else { sequence.kv_len };
        let seen = problem.first_visible(sequence).map_or(0..0, |(_, first)| first..end);
        let place = |j| place(inputs, sequence, index, j);
        let k = Rows::new(&inputs.k, problem.dims().head_dim, kv_head, seen.clone(), place);
        let v = Rows::new(&inputs.v, problem.dims().value_dim, kv_head, seen, place);
        Self { problem, k, v }
    }
}

/// A query row with the keys and values of its head.
pub(crate) struct Row<'a> {
    pub(super) problem: &'a Problem,
    pub(super) inputs: &'a Inputs<'a>,
    pub(super) sequence: &'a Sequence,
    /// Index of the sequence.
    pub(super) index: usize,
    /// Query head.
    pub(super) h: usize,
    /// Query row of the sequence.
    pub(super) i: usize,
    pub(super) q: &'a [f64],
    parts: &'a [PartRows<'a>],
}

/// Where the visible key `j` lies: batch entry or page, and row in it.
fn place(inputs: &Inputs<'_>, sequence: &Sequence, index: usize, j: usize) -> [usize; 2] {
    match inputs.tables {
        None => [sequence.batch, sequence.kv_start + j],
        Some(t) => [t.table[index * t.width + (j / t.page_size) % t.width] as usize, j % t.page_size],
    }
}

/// A row of a tensor: batch entry or page, head, and row in it.
pub(super) fn elements<'a>(
    of: &'a TensorView<'a>,
    [entry, head, row]: [usize; 3],
) -> impl Iterator<Item = f64> + 'a {
    (0..of.shape()[3]).map(move |d| f64::from(of.get([entry, head, row, d])))
}

/// Keys or values `[first.., dim]` of one head of a sequence.
struct Rows {
    first: usize,
    dim: usize,
    elements: Vec<f64>,
}

impl Rows {
    fn new(
        of: &KvView<'_>,
        dim: usize,
        head: usize,
        keys: Range<usize>,
        place: impl Fn(usize) -> [usize; 2],
    ) -> Self {
        let mut rows = Self { first: keys.start, dim, elements: Vec::with_capacity(keys.len() * dim) };
        for [entry, row] in keys.map(place) {
            match of {
                KvView::Elements(view) => rows.elements.extend(elements(view, [entry, head, row])),
                KvView::Codes(codes) => rows.elements.extend(codes.read_f64(entry, head, row)),
            }
        }
        rows
    }

    /// Row `j`, which must be visible.
    fn row(&self, j: usize) -> &[f64] {
        &self.elements[(j - self.first) * self.dim..][..self.dim]
    }
}

impl Row<'_> {
    /// The storage of key `j`, which must be visible.
    fn part(&self, j: usize) -> &PartRows<'_> {
        let has_key = |part: &&PartRows<'_>| part.problem.visible(self.sequence, self.i).contains(&j);
        let part = if let [part] = self.parts { Some(part) } else { self.parts.iter().find(has_key) };
        part.unwrap_or_else(|| unreachable!("every visible key lies in one part"))
    }

    /// Key `j`, which must be visible.
    pub(super) fn key(&self, j: usize) -> &[f64] {
        self.part(j).k.row(j)
    }

    /// The value of key `j`, which must be visible.
    pub(super) fn value(&self, j: usize) -> &[f64] {
        self.part(j).v.row(j)
    }

    /// The largest Euclidean norm, over the visible keys with a finite score, of the products `q[d] * k[d]` whose sum
    /// is `q . k`; 0 without such keys.
    pub(crate) fn max_products_norm(&self) -> f64 {
        let is_finite = |&j: &usize| self.score(j).is_some_and(f64::is_finite);
        let visible = self.problem.visible(self.sequence, self.i).filter(is_finite);
        let squares = |j| self.q.iter().zip(self.key(j)).map(|(q, k)| (q * k).powi(2)).sum::<f64>();
        visible.map(squares).fold(0.0, f64::max).sqrt()
    }

    /// Returns true if the tree mask shows key `j`, or if there is no tree mask.
    fn tree_shows(&self, j: usize) -> bool {
        let s = self.sequence;
        match (&self.inputs.tree, (j + s.q_len).checked_sub(s.kv_len)) {
            (Some(tree), Some(column)) => tree.bias([0, 0, s.q_start + self.i, column]) == 0.0,
            _ => true,
        }
    }

    /// `scale * q . k`.
    pub(super) fn scaled_product(&self, j: usize) -> f64 {
        let mut product = 0.0;
        for (q, k) in self.q.iter().zip(self.key(j)) {
            product += q * k;
        }
        product * f64::from(self.problem.scale())
    }

    /// Distance of the query from key `j`, in keys.
    pub(super) const fn distance(&self, j: usize) -> u64 {
        (self.i as i64 + self.sequence.q_offset - j as i64).unsigned_abs()
    }

    /// Index of the row's ALiBi slope in a list of `len`.
    pub(super) fn slope_index(&self, len: usize) -> usize {
        let (heads, sequences) = (self.problem.dims().q_heads, self.problem.sequences().len());
        let sequence = if len == sequences * heads { self.index } else { 0 };
        sequence * heads + self.h
    }

    /// The score, or `None` if key `j` is hidden.
    fn score(&self, j: usize) -> Option<f64> {
        let desc = self.problem.desc();
        if !self.tree_shows(j) {
            return None;
        }
        let mut score = self.scaled_product(j);
        if let Some(c) = desc.softcap {
            score = f64::from(c) * (score / f64::from(c)).tanh();
        }
        if let Some(slopes) = self.inputs.alibi_slopes {
            score -= f64::from(slopes[self.slope_index(slopes.len())]) * self.distance(j) as f64;
        }
        if let Some(mask) = &self.inputs.mask {
            let bias = mask.bias([self.index, self.h, self.i, j]);
            if bias == f32::NEG_INFINITY {
                return None;
            }
            score += f64::from(bias);
        }
        Some(score)
    }
}

/// Softmax of one row: the visible keys with their probabilities, and the logsumexp.
pub(super) fn softmax(row: &Row<'_>) -> (Vec<(usize, f64)>, f64) {
    let keys = row.problem.visible(row.sequence, row.i);
    let mut scores: Vec<(usize, f64)> = keys.filter_map(|j| Some((j, row.score(j)?))).collect();
    let sink = row.inputs.sinks.map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[row.h]));

    // f64::max ignores NaN, but a NaN score still reaches the sum.
    let max = scores.iter().fold(sink, |m, &(_, s)| m.max(s));
    if max == f64::NEG_INFINITY && scores.iter().all(|&(_, s)| s == max) && sink == max {
        return (Vec::new(), max);
    }
    let sum: f64 = (sink - max).exp() + scores.iter().map(|&(_, s)| (s - max).exp()).sum::<f64>();
    for (_, score) in &mut scores {
        *score = (*score - max).exp() / sum;
    }
    (scores, max + sum.ln())
}

/// Writes one row of out and returns its logsumexp.
fn attend(row: &Row<'_>, out: &mut [f64]) -> f64 {
    let (probs, lse) = softmax(row);
    for (j, p) in probs {
        for (o, v) in out.iter_mut().zip(row.value(j)) {
            // The probability of a finite score is positive, also where it underflows: an infinite value stays infinite.
            let underflows = p == 0.0 && v.is_infinite() && row.score(j).is_some_and(f64::is_finite);
            *o += if underflows { *v } else { p * v };
        }
    }
    lse
}
