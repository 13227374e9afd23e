//! Data, checks and times of one row of the backward pass.

use super::measure::{
    CHECKED_ROWS, Measured, OneRow, Operands, Planned, check, fill, outputs, quartiles, turns, view,
};
use crate::backward;
use crate::buffer::{Buffer, load};
use crate::failure::{Failure, Result};
use crate::operands::Order;
use flashtile::quality::Tolerance;
use flashtile::{
    AnyBackwardPlan, Backend, BackwardInputs, Dtype, Gradients, Problem, TensorView, TensorViewMut,
    TimedBackward, reference,
};
use flashtile_bench::seeded::Rng;

/// The limit of a gradient's error, relative to that of the forward pass: one more product of rounded factors.
const LIMIT: f64 = 2.0;

/// The inputs of a backward pass, in head-major order.
struct Subject<'a> {
    problem: &'a Problem,
    operands: Operands,
    d_out: Buffer,
    /// Results of the forward pass.
    out: Buffer,
    lse: Buffer,
}

/// Gradients of q, k and v, in head-major order.
struct Computed<'a> {
    problem: &'a Problem,
    d_q: Buffer,
    d_k: Buffer,
    d_v: Buffer,
}

impl<'a> Computed<'a> {
    fn new(problem: &'a Problem) -> Result<Self> {
        let dims = problem.dims();
        let elements = |shape: [usize; 4]| Buffer::elements(problem.dtype(), shape.iter().product());
        let (d_q, d_k) = (elements(dims.q_shape())?, elements(dims.k_shape())?);
        Ok(Self { problem, d_q, d_k, d_v: elements(dims.v_shape())? })
    }

    fn gradients(&mut self) -> Result<Gradients<'_>> {
        let (dims, dtype) = (self.problem.dims(), self.problem.dtype());
        Ok(Gradients::new(
            view_mut(&mut self.d_q, dtype, dims.q_shape())?,
            view_mut(&mut self.d_k, dtype, dims.k_shape())?,
            view_mut(&mut self.d_v, dtype, dims.v_shape())?,
        ))
    }

    /// Runs once and fetches the results.
    fn fill(&mut self, run: &mut dyn TimedBackward) -> Result<()> {
        let mut gradients = self.gradients()?;
        run.launch(&mut gradients)?;
        Ok(run.download(&mut gradients)?)
    }
}

impl<'a> Subject<'a> {
    /// Generates the data of a row, and computes and checks its forward pass.
    fn new(backend: &dyn Backend, planned: &'a Planned) -> Result<Self> {
        let Planned { row, plan, .. } = planned;
        let (problem, dims, dtype) = (&row.problem, row.problem.dims(), row.problem.dtype());
        let elements = |shape: [usize; 4]| Buffer::elements(dtype, shape.iter().product());
        let mut subject = Self {
            problem,
            operands: Operands::random(row, 1)?,
            d_out: elements(dims.out_shape())?,
            out: elements(dims.out_shape())?,
            lse: Buffer::elements(Dtype::F32, dims.lse_shape().iter().product())?,
        };
        fill(&mut subject.d_out, dtype, 4);
        let mut out = outputs(problem, &mut subject.out)?;
        out.lse = Some(subject.lse.floats_mut());
        backend.run(plan, &subject.operands.inputs(problem)?, &mut out)?;
        check(problem, plan.accumulation(), &subject.operands, &subject.out)?;
        Ok(subject)
    }

    fn inputs(&self) -> Result<BackwardInputs<'_>> {
        let (dims, dtype) = (self.problem.dims(), self.problem.dtype());
        Ok(BackwardInputs {
            forward: self.operands.inputs(self.problem)?,
            out: view(&self.out, dtype, dims.out_shape())?,
            lse: self.lse.floats(),
            d_out: view(&self.d_out, dtype, dims.out_shape())?,
            d_lse: None,
        })
    }

    /// Elements of a row of a tensor, counted in rows.
    fn row(&self, of: &Buffer, at: usize, dim: usize) -> Vec<f64> {
        let load = |index| f64::from(load(of.bytes(), self.problem.dtype(), index));
        (at * dim..(at + 1) * dim).map(load).collect()
    }

    /// Recomputes a few rows of each gradient by definition. Returns the largest error.
    fn check(&self, computed: &Computed<'_>, tolerance: &Tolerance) -> Result<f64> {
        let mut rng = Rng::new(self.problem.dims().kv_len as u64);
        let mut errors = [("d_q", Error::default()), ("d_k", Error::default()), ("d_v", Error::default())];
        let [(_, q), (_, k), (_, v)] = &mut errors;
        for _ in 0..CHECKED_ROWS {
            self.check_query(computed, &mut rng, q)?;
            self.check_key(computed, &mut rng, [&mut *k, &mut *v]);
        }
        let limit = LIMIT * tolerance.nrmse;
        let (shape, dtype) = (self.problem.dims().q_shape(), self.problem.dtype());
        let beyond = |error: &Error| error.nrmse() > limit || error.nrmse().is_nan();
        if let Some((name, error)) = errors.iter().find(|(_, error)| beyond(error)) {
            let nrmse = error.nrmse();
            let what =
                format_args!("wrong {name} for q {shape:?} {dtype}: nrmse {nrmse:.2e} (limit {limit:.1e})");
            return Err(Failure::wrong(what));
        }
        Ok(errors.iter().map(|(_, error)| error.nrmse()).fold(0.0, f64::max))
    }

    /// The gradient of a query, which depends on the keys that it sees alone: that of a problem with one query.
    fn check_query(&self, computed: &Computed<'_>, rng: &mut Rng, error: &mut Error) -> Result<()> {
        let dims = self.problem.dims();
        let at = [rng.below(dims.batch), rng.below(dims.q_heads), rng.below(dims.q_len)];
        let index = (at[0] * dims.q_heads + at[1]) * dims.q_len + at[2];
        let one = OneRow::new(self.problem, &self.operands, at)?;
        let d_out: Vec<f32> =
            self.row(&self.d_out, index, dims.value_dim).iter().map(|&x| x as f32).collect();
        let d_out = TensorView::bhsd(&d_out, one.problem.dims().out_shape()).map_err(Failure::new)?;
        let want = reference::backward(&one.problem, &one.inputs()?, &d_out, None).map_err(Failure::new)?;
        error.add(&self.row(&computed.d_q, index, dims.head_dim), &want.d_q);
        Ok(())
    }

    /// Gradients of a key and its value: sums over the rows that see it, with the probabilities that logsumexps give.
    fn check_key(&self, computed: &Computed<'_>, rng: &mut Rng, [k_error, v_error]: [&mut Error; 2]) {
        let (problem, dims) = (self.problem, self.problem.dims());
        let s = &problem.sequences()[rng.below(problem.sequences().len())];
        let (kv_head, j) = (rng.below(dims.kv_heads), rng.below(s.kv_len));
        let place = [s.batch, kv_head, s.kv_start + j];
        let wide = |row: Vec<f32>| row.into_iter().map(f64::from).collect::<Vec<f64>>();
        let k = wide(self.operands.k.row(place, dims.k_shape()));
        let v = wide(self.operands.v.row(place, dims.v_shape()));
        let (mut d_k, mut d_v) = (vec![0.0; dims.head_dim], vec![0.0; dims.value_dim]);
        let scale = f64::from(problem.scale());
        let heads = kv_head * dims.gqa_group()..(kv_head + 1) * dims.gqa_group();
        for (h, i) in heads.flat_map(|h| (0..s.q_len).map(move |i| (h, i))) {
            if !problem.visible(s, i).contains(&j) {
                continue;
            }
            let at = (s.batch * dims.q_heads + h) * dims.q_len + s.q_start + i;
            let q = self.row(&self.operands.q, at, dims.head_dim);
            let [d_out, out] = [&self.d_out, &self.out].map(|of| self.row(of, at, dims.value_dim));
            let p = (scale * dot(&q, &k) - f64::from(self.lse.floats()[at])).exp();
            let d_score = p * (dot(&d_out, &v) - dot(&d_out, &out));
            d_k.iter_mut().zip(&q).for_each(|(to, q)| *to += scale * d_score * q);
            d_v.iter_mut().zip(&d_out).for_each(|(to, d_out)| *to += p * d_out);
        }
        let at = (s.batch * dims.kv_heads + kv_head) * dims.kv_len + s.kv_start + j;
        k_error.add(&self.row(&computed.d_k, at, dims.head_dim), &d_k);
        v_error.add(&self.row(&computed.d_v, at, dims.value_dim), &d_v);
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// A buffer as a dense tensor.
fn view_mut(buffer: &mut Buffer, dtype: Dtype, shape: [usize; 4]) -> Result<TensorViewMut<'_>> {
    let strides = Order::Bhsd.strides(shape);
    TensorViewMut::from_bytes(dtype, buffer.bytes_mut(), shape, strides).map_err(Failure::new)
}

/// Sums of squares: of differences, and of expected elements.
#[derive(Default)]
struct Error {
    differences: f64,
    expected: f64,
}

impl Error {
    fn add(&mut self, got: &[f64], want: &[f64]) {
        self.differences += got.iter().zip(want).map(|(got, want)| (got - want).powi(2)).sum::<f64>();
        self.expected += want.iter().map(|want| want.powi(2)).sum::<f64>();
    }

    fn nrmse(&self) -> f64 {
        if self.differences == 0.0 { 0.0 } else { (self.differences / self.expected).sqrt() }
    }
}

/// Checks a row and measures it for `min_time` seconds.
pub(super) fn measure(
    backend: &dyn Backend,
    planned: &Planned,
    plan: &AnyBackwardPlan,
    min_time: f64,
) -> Result<Measured> {
    let Planned { row, plan: forward, unit, .. } = planned;
    let subject = Subject::new(backend, planned)?;
    let mut computed = Computed::new(&row.problem)?;
    let mut run = backend.timed_backward(plan, &subject.inputs()?, &computed.gradients()?)?;
    computed.fill(&mut *run)?;
    let dims = row.problem.dims();
    // Gradients of keys add up over queries.
    let terms = dims.kv_len.max(dims.q_len * dims.gqa_group());
    let nrmse =
        subject.check(&computed, &Tolerance::of(row.problem.dtype(), terms, forward.accumulation()))?;
    let mut times = Vec::new();
    let mut gradients = computed.gradients()?;
    turns(3, min_time, || {
        times.push(run.seconds(&mut gradients)?);
        Ok(())
    })?;
    Ok(Measured {
        row: row.clone(),
        kernel: plan.kernel(),
        unit: unit.clone(),
        work: backward::work(forward),
        quartiles: quartiles(&mut times),
        repetitions: times.len(),
        apart: None,
        copies: 1,
        nrmse,
        host: None,
        prepare: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::measure::Planner;
    use crate::bench::rows::{Kind, rows};
    use crate::command_line::{Cli, Command};
    use clap::Parser;
    use flashtile::quality::Accumulation;
    use flashtile::{Cpu, PlanOptions};
    use std::sync::Arc;

    fn gradient<'s>(computed: &'s mut Computed<'_>, name: &str) -> &'s mut Buffer {
        match name {
            "d_q" => &mut computed.d_q,
            "d_k" => &mut computed.d_k,
            _ => &mut computed.d_v,
        }
    }

    /// A fault in every row of one gradient is found.
    #[test]
    fn wrong_gradients_are_found() {
        let line = ["flashtile", "bench", "backward", "--seq", "70", "--head-dim", "16", "--dtype", "f32"];
        let Command::Bench(args) =
            Cli::parse_from([&line[..], &["--heads=4", "--kv-heads=2"]].concat()).command
        else {
            panic!("another command");
        };
        let planner = Planner { backend: Arc::new(Cpu::new()), options: PlanOptions::default(), tile: None };
        let tolerance = Tolerance::of(Dtype::F32, 70, Accumulation::F32);
        for row in rows(&args, Kind::Backward).unwrap() {
            let planned = planner.plan(row).unwrap();
            let subject = Subject::new(&*planner.backend, &planned).unwrap();
            let mut computed = Computed::new(&planned.row.problem).unwrap();
            let (plan, inputs) = (planned.backward.as_ref().unwrap(), subject.inputs().unwrap());
            let gradients = computed.gradients().unwrap();
            let mut run = planner.backend.timed_backward(plan, &inputs, &gradients).unwrap();
            computed.fill(&mut *run).unwrap();
            assert!(subject.check(&computed, &tolerance).unwrap() < 4e-6);
            for name in ["d_q", "d_k", "d_v"] {
                gradient(&mut computed, name).floats_mut().iter_mut().for_each(|x| *x *= 1.000_1);
                let failure = subject.check(&computed, &tolerance).unwrap_err().to_string();
                assert!(
                    failure.starts_with(&format!("wrong {name} for q [1, 4, 70, 16] f32: nrmse ")),
                    "{failure}"
                );
                gradient(&mut computed, name).floats_mut().fill(f32::NAN);
                assert!(subject.check(&computed, &tolerance).unwrap_err().to_string().contains("nrmse NaN"));
                computed.fill(&mut *run).unwrap();
            }
        }
    }
}
