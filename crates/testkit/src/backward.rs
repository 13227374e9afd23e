//! Cases of the backward pass: random gradients of the results of a case, the oracle's gradients of its inputs, and how far from them a
//! backend may be.

use super::cases::{Case, CaseData};
use super::poison::{Guarded, GuardedList};
use super::rng::Rng;
use super::run::Failure;
use flashtile_core::dtype::Dtype;
use flashtile_core::gradients::{BackwardInputs, Gradients, bias_shape};
use flashtile_core::inputs::RunError;
use flashtile_core::plan::PlanOptions;
use flashtile_core::problem::{Problem, Sequence};
use flashtile_core::quality::{Report, compare_within, score_errors};
use flashtile_core::reference::{self, AttentionGradients};
use flashtile_cpu::cpu::Cpu;

/// A case with gradients of its results: made once, run on many backends.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct BackwardCase {
    /// The tensors of the forward pass.
    pub data: CaseData,
    /// The oracle's output, rounded to the dtype.
    pub out: Guarded,
    /// The oracle's logsumexp.
    pub lse: GuardedList,
    /// Normal numbers.
    pub d_out: Guarded,
    /// Normal numbers, in half of the cases.
    pub d_lse: Option<GuardedList>,
    /// The oracle's gradients.
    pub want: AttentionGradients,
    /// Largest differences from them.
    pub limits: AttentionGradients,
    /// True if probabilities and gradients of scores are rounded to the dtype before they are multiplied, as GPUs do.
    rounds_scores: bool,
}

/// Gradients in guarded memory, as a backend left them.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct GradientAnswer {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub d_q: Guarded,
    /// `[batch, kv_heads, kv_len, head_dim]`.
    pub d_k: Guarded,
    /// `[batch, kv_heads, kv_len, value_dim]`.
    pub d_v: Guarded,
    /// `[q_heads]`; empty without sinks.
    pub d_sinks: GuardedList,
    /// The shape of the mask; empty unless the mask is additive.
    pub d_bias: GuardedList,
    /// One for each slope; empty without ALiBi.
    pub d_alibi_slopes: GuardedList,
}

impl GradientAnswer {
    /// The bits of all gradients.
    #[must_use]
    pub fn bits(&self) -> Vec<u32> {
        let lists = [&self.d_sinks, &self.d_bias, &self.d_alibi_slopes];
        let tensors = [&self.d_q, &self.d_k, &self.d_v].into_iter().flat_map(Guarded::bits);
        tensors.chain(lists.into_iter().flat_map(|list| list.slice().iter().map(|x| x.to_bits()))).collect()
    }
}

impl BackwardCase {
    /// Makes the tensors and computes the oracle's gradients.
    ///
    /// # Errors
    /// [`Failure::Error`] if the case is not a valid problem.
    pub fn new(case: &Case) -> Result<Self, Failure> {
        let built = case.build().map_err(|e| Failure::Error(e.to_string()))?;
        let mut rng = Rng::named(&format!("{} backward", case.name));
        let dims = *built.problem.dims();
        let mut d_out =
            Guarded::placed(built.problem.dtype(), dims.out_shape(), built.layout, built.placement);
        for index in d_out.indices() {
            d_out.set(index, rng.normal());
        }
        let rows = dims.lse_shape().iter().product();
        let mut d_lse = (rng.below(2) == 0).then(|| GuardedList::new(rows));
        if let Some(d_lse) = &mut d_lse {
            d_lse.slice_mut().fill_with(|| rng.normal());
        }
        let out = Guarded::placed(built.problem.dtype(), dims.out_shape(), built.layout, built.placement);
        let none = AttentionGradients::default();
        let mut case = Self {
            data: built,
            out,
            lse: GuardedList::new(rows),
            d_out,
            d_lse,
            want: none.clone(),
            limits: none,
            rounds_scores: false,
        };
        case.recompute_oracle().map_err(|e| Failure::Error(e.to_string()))?;
        Ok(case)
    }

    /// The case for a backend that rounds probabilities and gradients of scores to the dtype before it multiplies them.
    ///
    /// # Errors
    /// The errors of [`BackwardCase::recompute_oracle`].
    pub fn rounding_scores(mut self) -> Result<Self, RunError> {
        self.rounds_scores = true;
        self.recompute_oracle().map(|()| self)
    }

    /// Computes the oracle's answers again, after tensors were changed.
    ///
    /// # Errors
    /// [`RunError`] if they do not match the problem.
    pub fn recompute_oracle(&mut self) -> Result<(), RunError> {
        let (problem, inputs) = (&self.data.problem, self.data.inputs());
        let attention = reference::attention(problem, &inputs)?;
        for (index, &x) in self.out.indices().zip(&attention.out) {
            self.out.set(index, x as f32);
        }
        self.lse.slice_mut().iter_mut().zip(&attention.lse).for_each(|(to, &x)| *to = x as f32);
        let d_lse = self.d_lse.as_ref().map(GuardedList::slice);
        self.want = reference::backward(problem, &inputs, &self.d_out.view(), d_lse)?;
        // Half of the spacing of subnormal f16; that of bf16 is negligible.
        let is_f16 = problem.dtype() == Dtype::F16;
        let rounding = if self.rounds_scores && is_f16 { 2f64.powi(-25) } else { 0.0 };
        self.limits = limits(&self.data, &attention.lse, &self.d_out, d_lse, (&self.want, rounding))?;
        Ok(())
    }

    /// Takes the rows of a sequence from a case that has it among others; this case has it alone.
    pub fn copy_sequence(&mut self, from: &Self, s: &Sequence) {
        let copy = |to: &mut Guarded, from: &Guarded, start: usize| {
            for [b, h, row, d] in to.indices() {
                to.set([b, h, row, d], from.get([b, h, start + row, d]));
            }
        };
        copy(&mut self.data.q, &from.data.q, s.q_start);
        copy(&mut self.data.k, &from.data.k, s.kv_start);
        copy(&mut self.data.v, &from.data.v, s.kv_start);
        copy(&mut self.out, &from.out, s.q_start);
        copy(&mut self.d_out, &from.d_out, s.q_start);
        let (dims, all) = (*self.problem().dims(), from.problem().dims().q_len);
        let list = |from: &GuardedList| {
            let mut to = GuardedList::new(dims.lse_shape().iter().product());
            for (at, x) in to.slice_mut().iter_mut().enumerate() {
                *x = from.slice()[at / dims.q_len * all + s.q_start + at % dims.q_len];
            }
            to
        };
        self.d_lse = from.d_lse.as_ref().map(&list);
        self.lse = list(&from.lse);
    }

    /// The problem.
    #[must_use]
    pub const fn problem(&self) -> &Problem {
        &self.data.problem
    }

    /// The tensors as inputs of a run.
    #[must_use]
    pub fn inputs(&self) -> BackwardInputs<'_> {
        BackwardInputs {
            forward: self.data.inputs(),
            out: self.out.view(),
            lse: self.lse.slice(),
            d_out: self.d_out.view(),
            d_lse: self.d_lse.as_ref().map(GuardedList::slice),
        }
    }

    /// Runs on a CPU with a workspace of NaN and poisoned gradients, all of which are asked for.
    ///
    /// # Errors
    /// [`Failure::Skipped`] if the problem has no plan, [`Failure::Error`], and [`Failure::Outside`].
    pub fn run(&self, cpu: &Cpu, options: PlanOptions) -> Result<GradientAnswer, Failure> {
        let plan =
            cpu.plan_backward(self.problem(), options).map_err(|why| Failure::Skipped(why.to_string()))?;
        let mut workspace = plan.try_workspace().map_err(|e| Failure::Error(e.to_string()))?;
        workspace.bytes_mut().fill(0xFF);
        let run = |inputs: &BackwardInputs<'_>, gradients: &mut Gradients<'_>| {
            cpu.run_backward(&plan, inputs, gradients, &mut workspace).map_err(|e| e.to_string())
        };
        self.run_by(&plan.to_string(), run)
    }

    /// Runs by a function, with poisoned gradients, all of which are asked for.
    ///
    /// # Errors
    /// [`Failure::Error`] with the function's, and [`Failure::Outside`].
    pub fn run_by(
        &self,
        plan: &str,
        run: impl FnOnce(&BackwardInputs<'_>, &mut Gradients<'_>) -> Result<(), String>,
    ) -> Result<GradientAnswer, Failure> {
        let (dims, dtype) = (self.problem().dims(), self.problem().dtype());
        let tensor = |shape| Guarded::placed(dtype, shape, self.data.layout, self.data.placement);
        let mut answer = GradientAnswer {
            d_q: tensor(dims.q_shape()),
            d_k: tensor(dims.k_shape()),
            d_v: tensor(dims.v_shape()),
            d_sinks: GuardedList::new(self.want.d_sinks.len()),
            d_bias: GuardedList::new(self.want.d_bias.len()),
            d_alibi_slopes: GuardedList::new(self.want.d_alibi_slopes.len()),
        };
        let inputs = self.inputs();
        let mut gradients =
            Gradients::new(answer.d_q.view_mut(), answer.d_k.view_mut(), answer.d_v.view_mut());
        gradients.d_sinks = inputs.forward.sinks.map(|_| answer.d_sinks.slice_mut());
        gradients.d_bias = bias_shape(&inputs.forward).map(|_| answer.d_bias.slice_mut());
        gradients.d_alibi_slopes = inputs.forward.alibi_slopes.map(|_| answer.d_alibi_slopes.slice_mut());
        run(&inputs, &mut gradients).map_err(Failure::Error)?;
        let touched = [
            ("d_q", answer.d_q.touched()),
            ("d_k", answer.d_k.touched()),
            ("d_v", answer.d_v.touched()),
            ("d_sinks", answer.d_sinks.touched()),
            ("d_bias", answer.d_bias.touched()),
            ("d_alibi_slopes", answer.d_alibi_slopes.touched()),
        ];
        match touched.into_iter().find_map(|(tensor, at)| Some((tensor, at?))) {
            Some((tensor, at)) => Err(Failure::Outside { tensor, at, plan: plan.to_owned() }),
            None => Ok(answer),
        }
    }

    /// Compares gradients with the oracle's, each by name.
    #[must_use]
    pub fn reports(&self, answer: &GradientAnswer) -> Vec<(&'static str, Report)> {
        let (want, limits, dtype) = (&self.want, &self.limits, self.problem().dtype());
        vec![
            ("d_q", compare_within(&answer.d_q.values(), &want.d_q, &limits.d_q, dtype)),
            ("d_k", compare_within(&answer.d_k.values(), &want.d_k, &limits.d_k, dtype)),
            ("d_v", compare_within(&answer.d_v.values(), &want.d_v, &limits.d_v, dtype)),
            ("d_sinks", compare_within(answer.d_sinks.slice(), &want.d_sinks, &limits.d_sinks, Dtype::F32)),
            ("d_bias", compare_within(answer.d_bias.slice(), &want.d_bias, &limits.d_bias, Dtype::F32)),
            (
                "d_alibi_slopes",
                compare_within(
                    answer.d_alibi_slopes.slice(),
                    &want.d_alibi_slopes,
                    &limits.d_alibi_slopes,
                    Dtype::F32,
                ),
            ),
        ]
    }

    /// Compares gradients with the oracle's.
    ///
    /// # Errors
    /// [`Failure::Wrong`].
    pub fn check(&self, answer: &GradientAnswer) -> Result<(), Failure> {
        match self.reports(answer).into_iter().find(|(_, report)| !report.within()) {
            Some((tensor, report)) => Err(Failure::Wrong { tensor, report, plan: "backward".to_owned() }),
            None => Ok(()),
        }
    }
}

/// Unit roundoffs of f32 and of the dtype.
fn roundoffs(dtype: Dtype) -> [f64; 2] {
    let own = match dtype {
        Dtype::F32 => 24,
        Dtype::F16 => 11,
        Dtype::BF16 => 8,
    };
    [2f64.powi(-24), 2f64.powi(-own)]
}

/// Four deviations of the rounding of a score that is far from 0, relative to its unit roundoff. The partial sums of its products grow
/// to the score, a third of whose square is their mean square; [`score_errors`] knows the spread of the products alone.
fn growth(q: &[f32], k: &[f32], scale: f32) -> f64 {
    let score: f64 = q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
    let growth = 4.0 / 3.0 * (q.len() as f64).sqrt() * (score * f64::from(scale)).abs();
    if growth.is_finite() { growth } else { 0.0 }
}

/// How far gradients may be from the oracle's. Each is a sum of terms, and each term may err by its magnitude times what its factors err by:
/// a score by the rounding of its product and of lse, `delta` by the rounding of out, `p` and `d_score` by the rounding of operands; and a
/// gradient by its own rounding.
fn limits(
    built: &CaseData,
    lse: &[f64],
    d_out: &Guarded,
    d_lse: Option<&[f32]>,
    (want, rounding): (&AttentionGradients, f64),
) -> Result<AttentionGradients, RunError> {
    let (problem, inputs, dims) = (&built.problem, built.inputs(), built.problem.dims());
    let [unit, own] = roundoffs(problem.dtype());
    let mut probs: Vec<Vec<(usize, f64)>> = vec![Vec::new(); lse.len()];
    reference::for_each_prob(problem, &inputs, |at, key, p| probs[at].push((key, p)))?;
    let off = score_errors(problem, &inputs);
    let mut limits = want.clone();
    // The spacing of subnormal numbers does not shrink with the number.
    let smallest = if problem.dtype() == Dtype::F16 { 2f64.powi(-25) } else { 2f64.powi(-126) };
    for of in [&mut limits.d_q, &mut limits.d_k, &mut limits.d_v] {
        of.iter_mut().for_each(|x| *x = x.abs() * own + smallest);
    }
    for of in [&mut limits.d_sinks, &mut limits.d_bias, &mut limits.d_alibi_slopes] {
        of.iter_mut().for_each(|x| *x = x.abs() * unit + smallest);
    }
    let (q_all, k, v) = (built.q.values(), built.k.values(), built.v.values());
    let d_out = d_out.values();
    let row = |of: &[f32], at: usize, dim: usize| -> Vec<f64> {
        of[at * dim..][..dim].iter().map(|x| f64::from(x.abs())).collect()
    };
    let bias = bias_shape(&inputs);
    for (index, s) in problem.sequences().iter().enumerate() {
        for (h, i) in (0..dims.q_heads).flat_map(|h| (0..s.q_len).map(move |i| (h, i))) {
            let at = (s.batch * dims.q_heads + h) * dims.q_len + s.q_start + i;
            let kv_row = |key: usize| (s.batch * dims.kv_heads + h / dims.gqa_group()) * dims.kv_len + key;
            let (d_out, q) = (row(&d_out, at, dims.value_dim), row(&q_all, at, dims.head_dim));
            let d_p = |key: usize| -> f64 {
                row(&v, kv_row(key), dims.value_dim).iter().zip(&d_out).map(|(v, d)| v * d).sum()
            };
            let d_probs: Vec<f64> = probs[at].iter().map(|&(key, _)| d_p(key)).collect();
            let d_lse = d_lse.map_or(0.0, |d_lse| f64::from(d_lse[at].abs()));
            let delta = probs[at].iter().zip(&d_probs).map(|((_, p), d_p)| p * d_p).sum::<f64>() + d_lse;
            // Scores, lse, and sums of products.
            let sums = (dims.head_dim.max(dims.value_dim) as f64).sqrt() + 16.0;
            let row_error = off[at] + unit * (2.0 * lse[at].abs() + 8.0 + sums) + 2.0 * own;
            let row_error = if row_error.is_finite() { row_error } else { 0.0 };
            for (&(key, p), d_p) in probs[at].iter().zip(&d_probs) {
                // The score of a small p is large, and below the normal numbers p is 0.
                let smallest = f64::from(f32::MIN_POSITIVE);
                let k_at = kv_row(key) * dims.head_dim;
                let [q_row, k_row] =
                    [&q_all[at * dims.head_dim..], &k[k_at..]].map(|of| &of[..dims.head_dim]);
                let score_error = unit * growth(q_row, k_row, problem.scale());
                let p_error =
                    p * (row_error + score_error + unit * 3.0 * p.max(smallest).ln().abs()) + smallest;
                let m = p_error * (d_p + delta);
                let product = (m + rounding) * f64::from(problem.scale().abs());
                let add = |to: &mut [f64], at: usize, by: f64, of: &[f64]| {
                    to[at * of.len()..][..of.len()].iter_mut().zip(of).for_each(|(to, x)| *to += by * x);
                };
                add(&mut limits.d_q, at, product, &row(&k, kv_row(key), dims.head_dim));
                add(&mut limits.d_k, kv_row(key), product, &q);
                add(&mut limits.d_v, kv_row(key), p_error + rounding, &d_out);
                let j = key - s.kv_start;
                if let Some(shape) = bias {
                    let index = shape.iter().zip([index, h, i, j]);
                    let index = index.fold(0, |index, (&n, at)| index * n + if n == 1 { 0 } else { at });
                    limits.d_bias[index] += m;
                }
                if let Some(slopes) = inputs.alibi_slopes {
                    let slope = if slopes.len() > dims.q_heads { index * dims.q_heads + h } else { h };
                    let distance = (i as i64 + s.q_offset).abs_diff(j as i64) as f64;
                    limits.d_alibi_slopes[slope] += m * distance;
                }
            }
            if let Some(sinks) = inputs.sinks {
                let p = (f64::from(sinks[h]) - lse[at]).exp();
                limits.d_sinks[h] += if p.is_finite() { p * delta * row_error } else { 0.0 };
            }
        }
    }
    Ok(limits)
}
