//! Data, checks and times of one row.

use super::options::CacheKind;
use super::rows::{Kind, Row};
use super::tile;
use crate::backward;
use crate::buffer::{Buffer, load};
use crate::failure::{Failure, Result};
use crate::machine::Work;
use crate::operands::Order;
use flashtile::cache::NO_PAGE;
use flashtile::codec::{CodePages, Side};
use flashtile::plan::CudaTile;
use flashtile::quality::{Accumulation, Tolerance, compare_out};
use flashtile::reference::{self, Attention};
use flashtile::{
    AnyBackwardPlan, AnyPlan, Backend, BlockTables, Codec, Dims, Dtype, Inputs, KvView, Outputs, PlanOptions,
    Problem, ProblemDesc, QOffset, TensorView, TensorViewMut, TimedRun, Unit,
};
use flashtile_bench::seeded::{Rng, fill_normal};
use rayon::prelude::*;
use std::sync::Arc;
use std::time::Instant;

/// Number of query rows that are checked against the oracle.
pub(super) const CHECKED_ROWS: usize = 4;

/// Number of distinct rows of codes. They repeat, since drawing random values takes longer than encoding them. It is
/// not a power of two, so that heads and pages begin with different rows.
const DISTINCT_ROWS: usize = 4099;

/// A measured row.
#[derive(Debug, Clone)]
pub(super) struct Measured {
    pub(super) row: Row,
    pub(super) kernel: String,
    pub(super) unit: Unit,
    pub(super) work: Work,
    /// Quartiles of the times in seconds; the second is the median.
    pub(super) quartiles: [f64; 3],
    pub(super) repetitions: usize,
    /// Median without shared prefixes, for a row that has them.
    pub(super) apart: Option<f64>,
    /// Copies of the inputs that the runs cycle through.
    pub(super) copies: usize,
    /// Error of the query rows that were checked.
    pub(super) nrmse: f64,
    /// On a device: host seconds per launch, and seconds of the first preparation, including compilation.
    pub(super) host: Option<f64>,
    pub(super) prepare: Option<f64>,
}

impl Measured {
    pub(super) const fn seconds(&self) -> f64 {
        self.quartiles[1]
    }

    /// Interquartile range relative to the median.
    pub(super) fn spread(&self) -> f64 {
        (self.quartiles[2] - self.quartiles[0]) / self.quartiles[1]
    }
}

/// Stored keys or values.
pub(super) enum Stored {
    Elements(Buffer, Dtype),
    Codes(Box<CodePages>),
}

impl Stored {
    fn random(codec: Codec, side: Side, shape: [usize; 4], cached: bool, seed: u64) -> Result<Self> {
        let size: usize = shape.iter().product();
        if let Some(dtype) = codec.dtype() {
            let mut buffer = if cached { Buffer::pool(dtype, size)? } else { Buffer::elements(dtype, size)? };
            fill(&mut buffer, dtype, seed);
            return Ok(Self::Elements(buffer, dtype));
        }
        let pages = CodePages::new(codec, side, shape);
        let mut pages = pages.map_err(|why| Failure::new(format_args!("pages {shape:?}: {why}")))?;
        let mut rng = Rng::new(seed);
        let rows: Vec<f32> = (0..size.min(DISTINCT_ROWS * shape[3])).map(|_| rng.normal()).collect();
        for (at, row) in rows.chunks_exact(shape[3]).cycle().take(size / shape[3]).enumerate() {
            let place = [at / shape[2] / shape[1], at / shape[2] % shape[1], at % shape[2]];
            pages.store(place, row).map_err(|why| Failure::new(format_args!("a row {why}")))?;
        }
        Ok(Self::Codes(Box::new(pages)))
    }

    /// A copy in newly allocated memory.
    fn copy(&self) -> Result<Self> {
        Ok(match self {
            Self::Elements(buffer, dtype) => Self::Elements(buffer.copy()?, *dtype),
            Self::Codes(pages) => Self::Codes(Box::new(pages.try_clone().map_err(Failure::new)?)),
        })
    }

    fn view(&self, shape: [usize; 4]) -> Result<KvView<'_>> {
        Ok(match self {
            Self::Elements(buffer, dtype) => view(buffer, *dtype, shape)?.into(),
            Self::Codes(pages) => KvView::Codes(pages.view()),
        })
    }

    /// A row as f32.
    pub(super) fn row(&self, [entry, head, at]: [usize; 3], [_, heads, page, dim]: [usize; 4]) -> Vec<f32> {
        match self {
            Self::Elements(buffer, dtype) => {
                let from = ((entry * heads + head) * page + at) * dim;
                (from..from + dim).map(|index| load(buffer.bytes(), *dtype, index)).collect()
            }
            Self::Codes(pages) => {
                let mut row = vec![0.0; dim];
                pages.view().read(entry, head, at, &mut row);
                row
            }
        }
    }
}

/// Operands in head-major order; for a cache, its pages and block tables.
pub(super) struct Operands {
    pub(super) q: Buffer,
    pub(super) k: Stored,
    pub(super) v: Stored,
    k_shape: [usize; 4],
    v_shape: [usize; 4],
    tables: Option<BlockTables>,
}

/// Block tables of a row's sequences, and the number of pages of the pool. The pages are in random order.
fn tables(row: &Row) -> (BlockTables, usize) {
    let (page, shared) = (row.page, row.shared() / row.page);
    let sequences = row.problem.sequences();
    let lens: Vec<usize> = sequences.iter().map(|s| s.kv_len).collect();
    let ring = row.cache == CacheKind::Ring;
    let width = if ring { 1 } else { lens.iter().map(|len| len.div_ceil(page)).max().unwrap_or(0) };
    let first = |&len: &usize| if ring { len.saturating_sub(page) } else { 0 };
    let mut table = vec![NO_PAGE; lens.len() * width];
    let mut pages = 0;
    for (sequence, len) in lens.iter().enumerate() {
        for block in 0..len.div_ceil(page).min(width) {
            table[sequence * width + block] = match block {
                _ if sequence > 0 && block < shared => table[block],
                _ => {
                    pages += 1;
                    pages - 1
                }
            };
        }
    }
    let mut order: Vec<u32> = (0..pages).collect();
    Rng::new(u64::from(pages)).shuffle(&mut order);
    for entry in table.iter_mut().filter(|entry| **entry != NO_PAGE) {
        *entry = order[*entry as usize];
    }
    let first = lens.iter().map(first).collect();
    (BlockTables { table, width, page_size: page, wraps: ring, lens, first }, order.len())
}

impl Operands {
    pub(super) fn random(row: &Row, seed: u64) -> Result<Self> {
        let problem = &row.problem;
        let (dims, dtype) = (problem.dims(), problem.dtype());
        let (k_shape, v_shape, tables) = match row.cache {
            CacheKind::Dense => (dims.k_shape(), dims.v_shape(), None),
            _ => {
                let (tables, pages) = tables(row);
                let pool = |dim| [pages, dims.kv_heads, row.page, dim];
                (pool(dims.head_dim), pool(dims.value_dim), Some(tables))
            }
        };
        let cached = tables.is_some();
        let size = dims.q_shape().iter().product();
        let mut q = if cached { Buffer::pool(dtype, size)? } else { Buffer::elements(dtype, size)? };
        fill(&mut q, dtype, seed);
        let k = Stored::random(problem.k_codec(), Side::Keys, k_shape, cached, seed + 1)?;
        let v = Stored::random(problem.v_codec(), Side::Values, v_shape, cached, seed + 2)?;
        Ok(Self { q, k, v, k_shape, v_shape, tables })
    }

    /// A copy in newly allocated memory, which is much faster than generating the data again.
    fn copy(&self) -> Result<Self> {
        let Self { k_shape, v_shape, .. } = *self;
        let (q, k, v) = (self.q.copy()?, self.k.copy()?, self.v.copy()?);
        Ok(Self { q, k, v, k_shape, v_shape, tables: self.tables.clone() })
    }

    pub(super) fn inputs(&self, problem: &Problem) -> Result<Inputs<'_>> {
        let dtype = problem.dtype();
        let q = view(&self.q, dtype, problem.dims().q_shape())?;
        let (k, v) = (self.k.view(self.k_shape)?, self.v.view(self.v_shape)?);
        Ok(match (&self.tables, k, v) {
            (Some(tables), ..) => Inputs::paged_kv(q, k, v, tables),
            (None, KvView::Elements(k), KvView::Elements(v)) => Inputs::new(q, k, v),
            (None, ..) => return Err(Failure::new("only cached sequences are quantized")),
        })
    }
}

/// A buffer as a dense tensor.
pub(super) fn view(buffer: &Buffer, dtype: Dtype, shape: [usize; 4]) -> Result<TensorView<'_>> {
    TensorView::from_bytes(dtype, buffer.bytes(), shape, Order::Bhsd.strides(shape)).map_err(Failure::new)
}

/// The output of a problem in head-major order.
pub(super) fn outputs<'a>(problem: &Problem, out: &'a mut Buffer) -> Result<Outputs<'a>> {
    let shape = problem.dims().out_shape();
    let strides = Order::Bhsd.strides(shape);
    let out = TensorViewMut::from_bytes(problem.dtype(), out.bytes_mut(), shape, strides);
    Ok(Outputs::new(out.map_err(Failure::new)?))
}

/// Quartiles of times.
pub(super) fn quartiles(times: &mut [f64]) -> [f64; 3] {
    times.sort_by(f64::total_cmp);
    let last = times.len() - 1;
    [times[last / 4], times[times.len() / 2], times[last - last / 4]]
}

/// Fills a tensor with normal elements, which depend only on the seed, not on the number of threads.
pub(super) fn fill(buffer: &mut Buffer, dtype: Dtype, seed: u64) {
    const CHUNK: usize = 1 << 16;
    buffer.bytes_mut().par_chunks_mut(CHUNK).enumerate().for_each(|(index, chunk)| {
        let mut rng = Rng::new(seed << 32 | index as u64);
        fill_normal(&mut rng, dtype, chunk);
    });
}

/// A backend, and how it plans rows.
pub(super) struct Planner {
    pub(super) backend: Arc<dyn Backend>,
    pub(super) options: PlanOptions,
    /// A tile of CUDA kernels that the planner would not choose.
    pub(super) tile: Option<CudaTile>,
}

/// A row with its plans.
pub(super) struct Planned {
    pub(super) row: Row,
    pub(super) plan: AnyPlan,
    /// The plan of the backward pass, if that is what is measured.
    pub(super) backward: Option<AnyBackwardPlan>,
    /// The plan without shared prefixes, where the first reads them once for all sequences.
    apart: Option<AnyPlan>,
    pub(super) unit: Unit,
}

impl Planner {
    /// Plans a row, and finds the unit that computes it.
    ///
    /// # Errors
    /// If there is no plan, or the backend is not compared with the hardware.
    pub(super) fn plan(&self, row: Row) -> Result<Planned> {
        let plan = self.plan_problem(&row.problem)?;
        let backward = (row.kind == Kind::Backward).then(|| backward::plan(row.kind.name(), &plan));
        let backward = backward.transpose()?;
        let unit = match &backward {
            Some(backward) => self.backend.backward_unit(backward),
            None => self.backend.unit(&plan),
        };
        let unit = unit.ok_or_else(|| {
            let what = "expected auto, cpu, cuda or metal: other backends are not measured";
            Failure::at("--backend", what)
        })?;
        let reads_once = plan.kv_bytes() < plan.problem().kv_bytes();
        let apart = without_prefixes(&row.problem)?.filter(|_| reads_once);
        let apart = apart.map(|problem| self.plan_problem(&problem)).transpose()?;
        Ok(Planned { row, plan, backward, apart, unit })
    }

    fn plan_problem(&self, problem: &Problem) -> Result<AnyPlan> {
        match self.tile {
            Some(tile) => tile::plan(problem, &self.backend.facts(), self.options, tile),
            None => self.backend.plan(problem, self.options).map_err(Failure::new),
        }
    }
}

/// A row with its data.
struct Subject<'a> {
    planned: &'a Planned,
    copies: Vec<Operands>,
    /// Seconds to compile and load the kernels, where that was not done before.
    prepare: f64,
}

impl<'a> Subject<'a> {
    /// Generates the data of a row, and compiles its kernels.
    fn new(backend: &dyn Backend, planned: &'a Planned) -> Result<Self> {
        let Planned { row, plan, .. } = planned;
        let started = Instant::now();
        backend.prepare(plan)?;
        let prepare = started.elapsed().as_secs_f64();
        let mut copies = vec![Operands::random(row, 1)?];
        if row.kind == Kind::Decode {
            // A cache under decode was not read a moment ago.
            for _ in 1..backend.cold_copies(plan.kv_bytes()) {
                copies.push(copies[0].copy()?);
            }
        }
        Ok(Self { planned, copies, prepare })
    }

    fn timer<'s>(&'s self, backend: &'s dyn Backend) -> Result<Timer<'s>> {
        let Planned { row, plan, apart, .. } = self.planned;
        let problem = &row.problem;
        let inputs = self.copies.iter().map(|copy| copy.inputs(problem));
        let mut inputs = inputs.collect::<Result<Vec<_>>>()?;
        let mut out = Buffer::elements(problem.dtype(), problem.dims().out_shape().iter().product())?;
        let mut run = backend.timed(plan, &inputs, &outputs(problem, &mut out)?)?;
        run.compute(&mut outputs(problem, &mut out)?)?;
        let nrmse = check(problem, plan.accumulation(), &self.copies[0], &out)?;
        // The run without prefixes starts with other copies than the ones that were just read.
        inputs.rotate_left(self.copies.len() / 2);
        let apart = match apart {
            None => None,
            Some(plan) => Some(backend.timed(plan, &inputs, &outputs(problem, &mut out)?)?),
        };
        let mut timer =
            Timer { subject: self, run, apart, out, nrmse, times: Vec::new(), times_apart: Vec::new() };
        // Every copy is read once before any is timed.
        for _ in 0..self.copies.len() {
            timer.turn()?;
        }
        (timer.times, timer.times_apart) = (Vec::new(), Vec::new());
        Ok(timer)
    }
}

/// A row that is being measured.
struct Timer<'s> {
    subject: &'s Subject<'s>,
    run: Box<dyn TimedRun + 's>,
    apart: Option<Box<dyn TimedRun + 's>>,
    out: Buffer,
    nrmse: f64,
    times: Vec<f64>,
    times_apart: Vec<f64>,
}

impl Timer<'_> {
    fn turn(&mut self) -> Result<()> {
        let mut outputs = outputs(&self.subject.planned.row.problem, &mut self.out)?;
        self.times.push(self.run.seconds(&mut outputs)?);
        if let Some(run) = &mut self.apart {
            self.times_apart.push(run.seconds(&mut outputs)?);
        }
        Ok(())
    }

    /// Measures the host time per launch, and returns all results. [`measure`] calls this when all its rows have their
    /// times, because a device computes these launches back to back and lowers its clock meanwhile.
    fn measured(mut self) -> Result<Measured> {
        let host = self.run.host_seconds()?;
        let Subject { planned: Planned { row, plan, unit, .. }, copies, prepare } = self.subject;
        self.times_apart.sort_by(f64::total_cmp);
        Ok(Measured {
            row: row.clone(),
            kernel: plan.kernel(),
            unit: unit.clone(),
            work: Work::of(plan),
            quartiles: quartiles(&mut self.times),
            repetitions: self.times.len(),
            apart: self.times_apart.get(self.times_apart.len() / 2).copied(),
            copies: copies.len(),
            nrmse: self.nrmse,
            host,
            prepare: host.map(|_| *prepare),
        })
    }
}

/// Checks and measures rows for `min_time` seconds each on average. Rows take turns, so that changes of the machine's
/// load affect all of them and their ratios stay meaningful.
pub(super) fn measure(planner: &Planner, rows: &[Planned], min_time: f64) -> Result<Vec<Measured>> {
    let backend = &*planner.backend;
    let subjects = rows.iter().map(|row| Subject::new(backend, row)).collect::<Result<Vec<_>>>()?;
    let timers = subjects.iter().map(|subject| subject.timer(backend));
    let mut timers = timers.collect::<Result<Vec<_>>>()?;
    // A run on a processor may take long.
    let min = if rows.iter().any(|row| row.unit.threads.is_some()) { 3 } else { 10 };
    turns(min, min_time * rows.len() as f64, || timers.iter_mut().try_for_each(Timer::turn))?;
    timers.into_iter().map(Timer::measured).collect()
}

/// Measures the rows in turns for `seconds`, and at least `min` times.
pub(super) fn turns(min: usize, seconds: f64, mut turn: impl FnMut() -> Result<()>) -> Result<()> {
    let started = Instant::now();
    for n in 0..MAX_TIMES {
        if n >= min && started.elapsed().as_secs_f64() >= seconds {
            break;
        }
        turn()?;
    }
    Ok(())
}

/// The problem without shared prefixes; `None` if it has no prefixes.
fn without_prefixes(problem: &Problem) -> Result<Option<Problem>> {
    let mut desc = problem.desc().clone();
    if desc.prefixes.is_empty() {
        return Ok(None);
    }
    desc.prefixes.clear();
    desc.validate().map(Some).map_err(Failure::new)
}

const MAX_TIMES: usize = 100_000;

/// Recomputes a few query rows by definition and returns the error.
pub(super) fn check(
    problem: &Problem,
    accumulation: Accumulation,
    operands: &Operands,
    out: &Buffer,
) -> Result<f64> {
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
    let report = compare_out(&got, &want, dtype, &Tolerance::of(dtype, dims.kv_len, accumulation));
    if report.within() {
        Ok(report.nrmse)
    } else {
        Err(Failure::wrong(format_args!("wrong answer for q {:?} {dtype}: {report}", dims.q_shape())))
    }
}

/// A query row as a problem of its own, in f32.
pub(super) struct OneRow {
    pub(super) problem: Problem,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl OneRow {
    pub(super) fn new(problem: &Problem, operands: &Operands, [b, h, i]: [usize; 3]) -> Result<Self> {
        let (dims, dtype) = (problem.dims(), problem.dtype());
        let q = ((b * dims.q_heads + h) * dims.q_len + i) * dims.head_dim;
        let sequence = sequence_of(problem, b, i);
        let s = &problem.sequences()[sequence];
        let row = i - s.q_start;
        let one = Dims { batch: 1, q_heads: 1, kv_heads: 1, q_len: 1, kv_len: s.kv_len, ..*dims };
        let mut desc = ProblemDesc::new(one, Dtype::F32);
        desc.visibility = problem.desc().visibility;
        desc.q_offset = Some(QOffset::At(s.q_offset + row as i64));
        let rows = |stored: &Stored, shape: [usize; 4]| -> Vec<f32> {
            let mut rows = Vec::with_capacity(s.kv_len * shape[3]);
            for j in 0..s.kv_len {
                let place = match &operands.tables {
                    None => Some((b, s.kv_start + j)),
                    // Tokens that the cache no longer keeps are not visible.
                    Some(tables) => tables.locate(sequence, j),
                };
                match place {
                    Some((entry, at)) => rows.extend(stored.row([entry, h / dims.gqa_group(), at], shape)),
                    None => rows.resize(rows.len() + shape[3], 0.0),
                }
            }
            rows
        };
        Ok(Self {
            problem: desc.validate().map_err(Failure::new)?,
            q: (q..q + dims.head_dim).map(|index| load(operands.q.bytes(), dtype, index)).collect(),
            k: rows(&operands.k, operands.k_shape),
            v: rows(&operands.v, operands.v_shape),
        })
    }

    pub(super) fn inputs(&self) -> Result<Inputs<'_>> {
        let dims = self.problem.dims();
        Ok(Inputs::new(
            TensorView::bhsd::<f32>(&self.q, dims.q_shape()).map_err(Failure::new)?,
            TensorView::bhsd::<f32>(&self.k, dims.k_shape()).map_err(Failure::new)?,
            TensorView::bhsd::<f32>(&self.v, dims.v_shape()).map_err(Failure::new)?,
        ))
    }
}

/// The sequence of a query. Queries of packed and cached sequences lie one after another, in one batch entry.
pub(super) fn sequence_of(problem: &Problem, b: usize, i: usize) -> usize {
    problem.sequences().partition_point(|s| (s.batch, s.q_start) <= (b, i)) - 1
}

/// Computes one query row as a problem of its own.
fn by_definition(problem: &Problem, operands: &Operands, at: [usize; 3]) -> Result<Attention> {
    let row = OneRow::new(problem, operands, at)?;
    reference::attention(&row.problem, &row.inputs()?).map_err(Failure::new)
}
