//! The oracle: attention in scalar f64, straight from the definition. It knows neither plans nor tiles nor backends, and
//! every kernel is tested against it.

use crate::{Inputs, KvView, Problem, RunError, Sequence, TensorView, bind};
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

/// Attention of [`crate::problem`] in f64. Cost: `O(visible pairs * (head_dim + value_dim))` on one thread.
///
/// # Errors
/// [`RunError`] where the inputs are not the problem's.
pub fn attention(problem: &Problem, inputs: &Inputs<'_>) -> Result<Attention, RunError> {
    bind::check_inputs(problem, inputs)?;
    let dims = problem.dims();
    let rows = dims.batch * dims.q_heads * dims.q_len;
    let mut result = Attention { out: vec![0.0; rows * dims.value_dim], lse: vec![f64::NEG_INFINITY; rows] };
    for (index, sequence) in problem.sequences().iter().enumerate() {
        for kv_head in 0..dims.kv_heads {
            let key = |j: usize| place(inputs, sequence, index, j);
            let seen = problem.first_visible(sequence).map_or(0..0, |(_, first)| first..sequence.kv_len);
            let rows = |of| Rows::new(of, kv_head, seen.clone(), &key);
            let (k, v) = (rows(&inputs.k), rows(&inputs.v));
            for (h, i) in (0..dims.group()).flat_map(|g| (0..sequence.q_len).map(move |i| (g, i))) {
                let h = kv_head * dims.group() + h;
                let row = (sequence.batch * dims.q_heads + h) * dims.q_len + sequence.q_start + i;
                let out = &mut result.out[row * dims.value_dim..][..dims.value_dim];
                result.lse[row] = attend(&Row { problem, inputs, sequence, index, h, i, k: &k, v: &v }, out);
            }
        }
    }
    Ok(result)
}

struct Row<'a> {
    problem: &'a Problem,
    inputs: &'a Inputs<'a>,
    sequence: &'a Sequence,
    index: usize,
    h: usize,
    i: usize,
    k: &'a Rows<'a>,
    v: &'a Rows<'a>,
}

/// Where key `j`, which is visible, lies: batch entry or page, and row in it.
fn place(inputs: &Inputs<'_>, sequence: &Sequence, index: usize, j: usize) -> (usize, usize) {
    match inputs.tables {
        None => (sequence.batch, sequence.kv_start + j),
        Some(t) => (t.table[index * t.width + (j / t.page) % t.width] as usize, j % t.page),
    }
}

/// Keys or values of one head of a sequence.
enum Rows<'a> {
    Elements(&'a TensorView<'a>, usize, &'a dyn Fn(usize) -> (usize, usize)),
    /// Decoded, from a first one on.
    Decoded(usize, Vec<Vec<f64>>),
}

impl<'a> Rows<'a> {
    fn new(
        of: &'a KvView<'a>,
        head: usize,
        seen: Range<usize>,
        place: &'a dyn Fn(usize) -> (usize, usize),
    ) -> Self {
        match of {
            KvView::Elements(view) => Self::Elements(view, head, place),
            KvView::Codes(codes) => {
                let row = |j: usize| {
                    let (page, row) = place(j);
                    codes.read_f64(page, head, row)
                };
                Self::Decoded(seen.start, seen.map(row).collect())
            }
        }
    }

    /// Element `d` of row `j`, which is visible.
    fn get(&self, j: usize, d: usize) -> f64 {
        match self {
            Self::Elements(view, head, place) => {
                let (entry, row) = place(j);
                f64::from(view.get([entry, *head, row, d]))
            }
            Self::Decoded(first, rows) => rows[j - first][d],
        }
    }
}

impl Row<'_> {
    /// Whether a tree mask, if there is one, shows key `j`.
    fn tree_shows(&self, j: usize) -> bool {
        let s = self.sequence;
        match (&self.inputs.tree, (j + s.q_len).checked_sub(s.kv_len)) {
            (Some(tree), Some(column)) => tree.bias([0, 0, s.q_start + self.i, column]) == 0.0,
            _ => true,
        }
    }

    /// `None` where key `j` is hidden.
    fn score(&self, j: usize) -> Option<f64> {
        let (dims, desc, s) = (self.problem.dims(), self.problem.desc(), self.sequence);
        if !self.tree_shows(j) {
            return None;
        }
        let mut score = 0.0;
        for d in 0..dims.head_dim {
            let q = self.inputs.q.get([s.batch, self.h, s.q_start + self.i, d]);
            score += f64::from(q) * self.k.get(j, d);
        }
        score *= f64::from(self.problem.scale());
        if let Some(c) = desc.softcap {
            score = f64::from(c) * (score / f64::from(c)).tanh();
        }
        if let Some(slopes) = self.inputs.alibi_slopes {
            let distance = (self.i as i64 + s.q_offset - j as i64).unsigned_abs();
            score -= f64::from(slopes[self.h]) * distance as f64;
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

/// Writes one row of out and returns its logsumexp.
fn attend(row: &Row<'_>, out: &mut [f64]) -> f64 {
    let keys = row.problem.visible(row.sequence, row.i);
    let scores: Vec<(usize, f64)> = keys.filter_map(|j| Some((j, row.score(j)?))).collect();
    let sink = row.inputs.sinks.map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[row.h]));

    // f64::max ignores NaN; a NaN score still reaches the sum.
    let max = scores.iter().fold(sink, |m, &(_, s)| m.max(s));
    if max == f64::NEG_INFINITY && scores.iter().all(|&(_, s)| s == max) && sink == max {
        return max;
    }
    let sum: f64 = (sink - max).exp() + scores.iter().map(|&(_, s)| (s - max).exp()).sum::<f64>();
    for (j, score) in scores {
        let p = (score - max).exp() / sum;
        for (d, o) in out.iter_mut().enumerate() {
            *o += p * row.v.get(j, d);
        }
    }
    max + sum.ln()
}
