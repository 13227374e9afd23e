//! Data, answers and times of one row.

use super::rows::{Kind, Row};
use crate::buffer::{Buffer, load, store};
use crate::failure::{Failure, Result};
use crate::machine::{self, Work};
use crate::operands::Order;
use flashtile::plan::Isa;
use flashtile::reference::{self, Attention};
use flashtile::testkit::{Accumulation, Rng, Tolerance, compare_out};
use flashtile::{
    Cpu, CpuPlan, Dims, Dtype, Inputs, Outputs, Problem, ProblemDesc, QOffset, TensorView, TensorViewMut,
    Workspace,
};
use rayon::prelude::*;
use std::time::Instant;

/// Query rows that are computed again by the oracle.
const CHECKED_ROWS: usize = 4;

/// A measured row.
#[derive(Debug, Clone)]
pub(super) struct Measured {
    pub(super) row: Row,
    pub(super) kernel: String,
    pub(super) isa: Isa,
    pub(super) threads: usize,
    pub(super) work: Work,
    /// Quartiles of the times in seconds; the middle one is the median.
    pub(super) quartiles: [f64; 3],
    pub(super) repetitions: usize,
    /// Copies of the inputs that runs took turns with.
    pub(super) copies: usize,
    /// Error of the checked query rows.
    pub(super) nrmse: f64,
}

impl Measured {
    pub(super) const fn seconds(&self) -> f64 {
        self.quartiles[1]
    }

    /// Distance of the outer quartiles relative to the median.
    pub(super) fn spread(&self) -> f64 {
        (self.quartiles[2] - self.quartiles[0]) / self.quartiles[1]
    }
}

/// Operands in head-major order.
struct Operands {
    q: Buffer,
    k: Buffer,
    v: Buffer,
}

impl Operands {
    fn random(problem: &Problem, seed: u64) -> Result<Self> {
        let (dims, dtype) = (problem.dims(), problem.dtype());
        let tensor = |shape: [usize; 4], seed| {
            let mut buffer = Buffer::elements(dtype, shape.iter().product())?;
            fill(&mut buffer, dtype, seed);
            Ok(buffer)
        };
        Ok(Self {
            q: tensor(dims.q_shape(), seed)?,
            k: tensor(dims.k_shape(), seed + 1)?,
            v: tensor(dims.v_shape(), seed + 2)?,
        })
    }

    fn bytes(&self) -> usize {
        self.q.bytes().len() + self.k.bytes().len() + self.v.bytes().len()
    }

    fn inputs(&self, problem: &Problem) -> Result<Inputs<'_>> {
        let dims = problem.dims();
        let dtype = problem.dtype();
        Ok(Inputs::new(
            view(&self.q, dtype, 0, dims.q_shape())?,
            view(&self.k, dtype, 0, dims.k_shape())?,
            view(&self.v, dtype, 0, dims.v_shape())?,
        ))
    }
}

/// A dense tensor that starts at an element of a buffer.
fn view(buffer: &Buffer, dtype: Dtype, first: usize, shape: [usize; 4]) -> Result<TensorView<'_>> {
    let bytes = &buffer.bytes()[first * dtype.bytes()..];
    TensorView::from_bytes(dtype, bytes, shape, Order::Bhsd.strides(shape)).map_err(Failure::new)
}

/// Fills a tensor with normal elements; a seed gives the same ones whatever the number of threads.
fn fill(buffer: &mut Buffer, dtype: Dtype, seed: u64) {
    const CHUNK: usize = 1 << 16;
    buffer.bytes_mut().par_chunks_mut(CHUNK).enumerate().for_each(|(index, chunk)| {
        let mut rng = Rng::new(seed << 32 | index as u64);
        for slot in chunk.chunks_exact_mut(dtype.bytes()) {
            store(f64::from(rng.normal()), dtype, slot);
        }
    });
}

/// Checks and measures one row for at least so many seconds.
pub(super) fn measure(cpu: &Cpu, row: &Row, min_time: f64) -> Result<Measured> {
    let problem = &row.problem;
    let plan = cpu.plan(problem, flashtile::PlanOptions::default()).map_err(Failure::new)?;
    let mut workspace = machine::workspace(&plan)?;
    let mut copies = vec![Operands::random(problem, 1)?];
    if row.kind == Kind::Decode {
        // A cache that is decoded from was not read a moment ago: the copies together exceed the last-level cache.
        let count = (2 * cpu.facts().l3).div_ceil(copies[0].bytes().max(1)).clamp(1, MAX_COPIES);
        for copy in 1..count {
            copies.push(Operands::random(problem, 1 + 3 * copy as u64)?);
        }
    }
    let shape = problem.dims().out_shape();
    let mut out = Buffer::elements(problem.dtype(), shape.iter().product())?;
    let mut runner = Runner { cpu, plan: &plan, workspace: &mut workspace, shape };

    runner.run(&copies[0], &mut out)?;
    let nrmse = check(&plan, &copies[0], &out)?;
    for copy in &copies {
        runner.run(copy, &mut out)?;
    }
    let mut times = Vec::new();
    let started = Instant::now();
    while times.len() < 3 || (started.elapsed().as_secs_f64() < min_time && times.len() < MAX_TIMES) {
        times.push(runner.run(&copies[times.len() % copies.len()], &mut out)?);
    }
    times.sort_by(f64::total_cmp);
    let last = times.len() - 1;
    Ok(Measured {
        row: row.clone(),
        kernel: plan.kernel(),
        isa: plan.isa(),
        threads: plan.threads(),
        work: Work::of(problem),
        quartiles: [times[last / 4], times[times.len() / 2], times[last - last / 4]],
        repetitions: times.len(),
        copies: copies.len(),
        nrmse,
    })
}

const MAX_COPIES: usize = 256;
const MAX_TIMES: usize = 100_000;

/// A plan with everything that a run of it needs but the operands.
struct Runner<'a> {
    cpu: &'a Cpu,
    plan: &'a CpuPlan,
    workspace: &'a mut Workspace,
    shape: [usize; 4],
}

impl Runner<'_> {
    /// Seconds of one run.
    fn run(&mut self, operands: &Operands, out: &mut Buffer) -> Result<f64> {
        let problem = self.plan.problem();
        let inputs = operands.inputs(problem)?;
        let strides = Order::Bhsd.strides(self.shape);
        let out = TensorViewMut::from_bytes(problem.dtype(), out.bytes_mut(), self.shape, strides);
        let mut outputs = Outputs::new(out.map_err(Failure::new)?);
        let started = Instant::now();
        self.cpu.run(self.plan, &inputs, &mut outputs, self.workspace).map_err(Failure::new)?;
        Ok(started.elapsed().as_secs_f64())
    }
}

/// Computes a few query rows again by definition and returns their error.
fn check(plan: &CpuPlan, operands: &Operands, out: &Buffer) -> Result<f64> {
    let problem = plan.problem();
    let (dims, dtype) = (problem.dims(), problem.dtype());
    let mut rng = Rng::new(dims.kv_len as u64);
    let (mut got, mut want) = (Vec::new(), None::<Attention>);
    for _ in 0..CHECKED_ROWS {
        let at = [rng.below(dims.batch), rng.below(dims.q_heads), rng.below(dims.q_len)];
        let index = (at[0] * dims.q_heads + at[1]) * dims.q_len + at[2];
        got.extend((0..dims.value_dim).map(|d| load(out.bytes(), dtype, index * dims.value_dim + d)));
        let row = by_definition(problem, operands, at)?;
        match &mut want {
            None => want = Some(row),
            Some(want) => {
                want.out.extend(row.out);
                want.lse.extend(row.lse);
            }
        }
    }
    let want = want.ok_or_else(|| Failure::new("no row to check"))?;
    let accumulation = Accumulation::of(plan);
    let report = compare_out(&got, &want, dtype, &Tolerance::of(dtype, dims.kv_len, accumulation));
    if report.within() {
        Ok(report.nrmse)
    } else {
        Err(Failure::wrong(format_args!("wrong answer for q {:?} {dtype}: {report}", dims.q_shape())))
    }
}

/// One query row, as a problem of its own.
fn by_definition(problem: &Problem, operands: &Operands, [b, h, i]: [usize; 3]) -> Result<Attention> {
    let (dims, dtype) = (problem.dims(), problem.dtype());
    let one = Dims { batch: 1, q_heads: 1, kv_heads: 1, q_len: 1, ..*dims };
    let mut desc = ProblemDesc::new(one, dtype);
    desc.visibility = problem.desc().visibility;
    desc.q_offset = problem.sequences().get(b).map(|s| QOffset::At(s.q_offset + i as i64));
    let one_row = desc.validate().map_err(Failure::new)?;
    let kv_head = b * dims.kv_heads + h / dims.group();
    let inputs = Inputs::new(
        view(&operands.q, dtype, ((b * dims.q_heads + h) * dims.q_len + i) * dims.head_dim, one.q_shape())?,
        view(&operands.k, dtype, kv_head * dims.kv_len * dims.head_dim, one.k_shape())?,
        view(&operands.v, dtype, kv_head * dims.kv_len * dims.value_dim, one.v_shape())?,
    );
    reference::attention(&one_row, &inputs).map_err(Failure::new)
}
