//! `flashtile run`: attention over the tensors of a file.

use crate::answers::{Answers, Compared, Computed};
use crate::buffer::{Buffer, store};
use crate::cached::{Cached, Stored, unpack};
use crate::failure::{Failure, Result};
use crate::input::Mapped;
use crate::machine::{self, Limit, Unit, Work};
use crate::metal::{self, Metal};
use crate::names;
use crate::operands::{Operands, Order};
use crate::options::{AUTO, Backend, CpuArgs, Kernels, KernelsArg, Reading, Semantics, Storage, backend};
use crate::output::{self, Destination};
use crate::parse;
use crate::report;
use crate::select::{Selected, select};
use crate::simulator;
use clap::Args;
use flashtile::cuda::Cuda;
use flashtile::cuda::TimedRun;
use flashtile::{AnyPlan, Codec, Cpu, Dims, Inputs, Outputs, Problem, Sequences, TensorViewMut, reference};
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

/// What `run --help` says about files. Not a doc comment: brackets and line breaks are literal.
const RUN_HELP: &str = "\
Compute attention of the tensors in a safetensors file

Reads
  q, k, v        F32, F16 or BF16, [batch, heads, rows, dim] or as --layout says; with
                 cu_seqlens packed as [total, heads, dim]
and, if present,
  mask           [queries, keys], [batch, queries, keys] or [batch, heads, queries, keys],
                 where an axis of 1 is broadcast; BOOL, where true means visible, or a float
                 type, added to the scores
  alibi_slopes   F32 [heads]; adds - slope[h] * |p - j| to the score of key j, p being the
                 key position of the query (--q-offset)
  sinks          F32 [heads]; logits that join the denominator of the softmax only
  kv_lens        I64 or I32 [batch]; keys of each batch entry, later rows are not read
  cu_seqlens_q, cu_seqlens_k
                 I64 or I32 [sequences + 1]; first row of each packed sequence, then the end
  out            the expected answer, F32, F16 or BF16, in the shape that is written
  lse            the expected logsumexp, F32, in the shape that is written

q, k and v may be called query, key and value (or queries, keys, values), mask attn_mask or
attention_mask. A file with two names for a tensor is refused.

With --prefix NAME these are the tensors of one layer: NAME.q, NAME.k, NAME.v. The tensors may
also be arrays of numpy: an .npz archive, or a folder with q.npy, k.npy and v.npy.

With --backend simulator, in builds with the cargo feature simulator, the portable GPU kernels run
on this machine with every access checked: ten to a hundred thousand scores (query heads * queries
* keys) per second, at most 600000, with head dimension 64 or 128, the same for v. Keys and values
are plain or in the codecs int8, tq4, or int8 for keys with tq5 for values.

Writes out (dtype and layout of q) and lse (F32 [batch, heads, queries], packed [heads, total]).
If IN has out or lse, the answer is compared with them. The line says how far it is; beyond the
limit, which is twice that of docs/numerics.md because both answers may err, the exit status is 1.
OUT is written in any case. No limit applies if --dtype or a codec rounds q, k or v.
Tensors with unknown names are noted and not read, or refused with --strict; names that look
misspelt are refused. Gradients d_q, d_k and d_v are known and not compared.";

/// Compute attention of the tensors in a safetensors file
#[derive(Debug, Args)]
#[command(
    long_about = RUN_HELP,
    after_help = "Examples:\n  flashtile run qkv.safetensors -o out.safetensors --causal --q-offset bottom-right\n  \
        flashtile run examples/data/small_f16.safetensors -o out.safetensors --backend simulator"
)]
pub(crate) struct RunArgs {
    /// Safetensors file, .npz archive or folder of .npy files to read
    #[arg(value_name = "IN")]
    pub(crate) input: PathBuf,
    /// Safetensors file to write, whole or not at all
    #[arg(short, long, value_name = "OUT")]
    pub(crate) output: PathBuf,
    /// Backend
    #[arg(long, value_parser = backend(AUTO, &[Backend::Auto, Backend::Cpu, Backend::Cuda(0), Backend::Metal, Backend::Reference, Backend::Simulator]), default_value = "auto")]
    pub(crate) backend: Backend,
    #[command(flatten)]
    pub(crate) kernels: KernelsArg,
    #[command(flatten)]
    pub(crate) reading: Reading,
    #[command(flatten)]
    pub(crate) semantics: Semantics,
    /// Refuse a file with tensors that are not recognised, instead of noting them; out and lse are recognised, and
    /// compared with or without this
    #[arg(long)]
    pub(crate) strict: bool,
    #[command(flatten)]
    pub(crate) storage: Storage,
    /// Splits of at least one block of keys into which the keys are divided for parallel work; the result does not
    /// depend on it
    #[arg(long, value_name = "N", value_parser = parse::count)]
    pub(crate) splits: Option<usize>,
    /// Compute gradients, which this build does not support
    #[arg(long, hide = true)]
    pub(crate) grad: bool,
    #[command(flatten)]
    pub(crate) cpu: CpuArgs,
    /// Print one JSON object instead of a line
    #[arg(long)]
    pub(crate) json: bool,
}

/// No repetition begins that would not end within this many seconds after the first began.
const MEASURE_SECONDS: f64 = 0.3;

/// Largest number of repetitions: more do not make the median steadier.
const MAX_REPETITIONS: usize = 31;

/// Largest number of scores on the simulator, about a minute's work for single queries.
pub(crate) const MAX_SIMULATED: u64 = 600_000;

/// Operations and seconds below which a fraction of the limit means nothing: calls dominate the time, not kernels.
const MIN_FLOPS: f64 = 1e8;
const MIN_SECONDS: f64 = 200e-6;

pub(crate) fn run(args: &RunArgs) -> Result<ExitCode> {
    refuse_what_is_not_built(args)?;
    machine::on_threads(args.cpu.threads, || {
        let (done, Comparison { compared, failure }) = compute(args)?;
        if args.json {
            let mut json = done.json(args.reading.prefix.as_deref());
            json["compared"] = compared.as_ref().map(Compared::json).into();
            report::json(&json)?;
        } else {
            let compared = compared.map_or_else(String::new, |compared| format!("  {}", compared.words()));
            // Options that restrict the cpu are a reason that the user knows.
            let chosen =
                args.backend == Backend::Auto && args.cpu.isa.is_none() && args.cpu.threads.is_none();
            let auto = chosen.then(|| format!("  auto takes {}: {}", done.backend, done.backend_reason));
            report::line(format_args!("{}{}{compared}", done.line(), auto.unwrap_or_default()))?;
        }
        failure.map_or(Ok(ExitCode::SUCCESS), Err)
    })
}

/// Features that the command line has and this build does not.
fn refuse_what_is_not_built(args: &RunArgs) -> Result<()> {
    match args.backend {
        Backend::Auto | Backend::Cpu => {}
        Backend::Cuda(_) | Backend::Metal | Backend::Reference | Backend::Simulator => {
            if args.backend == Backend::Simulator {
                simulator::require()?;
            }
            let gpu = args.backend.gpu();
            let given = [
                ("--isa", "auto or cpu", args.cpu.isa.is_some()),
                ("--threads", "auto or cpu", args.cpu.threads.is_some()),
                ("--splits", "auto, cpu, cuda or metal", args.splits.is_some() && gpu.is_none()),
                (
                    "--kernels",
                    "auto or cuda",
                    args.kernels.choice != Kernels::Auto && !args.backend.is_cuda(),
                ),
            ];
            if let Some((option, expected, _)) = given.into_iter().find(|(.., given)| *given) {
                let other = if args.backend == Backend::Simulator { "simulator" } else { "reference" };
                let name = gpu.unwrap_or(other);
                let text =
                    format_args!("does not apply to the {name} backend, expected --backend {expected}");
                return Err(Failure::at(option, text));
            }
        }
    }
    if args.grad {
        return Err(Failure::at("--grad", "this build computes the forward pass only"));
    }
    Ok(())
}

/// What ran, and how long it took.
struct Done {
    backend: &'static str,
    backend_reason: String,
    kernel: String,
    /// The processor or device whose limits apply, if a kernel ran.
    unit: Option<Unit>,
    splits: usize,
    workspace_bytes: usize,
    problem: Problem,
    order: Order,
    /// The codecs of the cache and its bytes, if there was one.
    stored: Option<(Stored, usize)>,
    work: Work,
    seconds: f64,
    /// Number of timed runs, whose median is `seconds`.
    repetitions: usize,
    /// The measured limit, if the problem is large enough for a comparison.
    limit: Option<Limit>,
}

/// The comparison with the answers of the file, if it has any.
struct Comparison {
    compared: Option<Compared>,
    /// Set if a limit is exceeded.
    failure: Option<Failure>,
}

fn compute(args: &RunArgs) -> Result<(Done, Comparison)> {
    let mapped = Mapped::open(&args.input)?;
    let archive = names::archive(&mapped, args.reading.prefix.as_deref())?;
    let operands = Operands::read(&archive, &args.reading, &args.semantics)?;
    let answers = Answers::read(&archive, &operands)?;
    let stored = Stored::asked(&args.storage, &operands.problem)?;
    let destination = Destination::new(&args.output)?;
    destination.differs_from(&args.input)?;
    if let Some(note) = operands.remark(&archive, args.strict)? {
        report::note(note);
    }

    let dims = *operands.problem.dims();
    let dtype = operands.problem.dtype();
    let refuse = |failure: Failure| archive.refuse(failure);
    let cached = stored.map(|stored| Cached::fill(&operands, stored)).transpose().map_err(refuse)?;
    let job = match &cached {
        Some(cached) => Job { operands: &operands, cached: Some(cached), problem: &cached.problem },
        None => Job { operands: &operands, cached: None, problem: &operands.problem },
    };
    let mut out = Buffer::elements(dtype, count(dims.out_shape())?)?;
    let mut lse = Buffer::elements(flashtile::Dtype::F32, dims.batch * dims.q_heads * dims.q_len)?;
    let results = Results { out: &mut out, lse: &mut lse };
    let done = on_backend(args, &job, results)?.map_err(refuse)?;
    if cached.is_some() && operands.order != Order::Packed {
        (out, lse) = by_sequence(&operands, &out, &mut lse)?;
    }

    let is_rounded = cached.is_some() || operands.is_rounded();
    let compared = answers.compare(&operands, &Computed { out: &out, lse: &lse, is_rounded })?;
    let failure = compared.as_ref().and_then(|compared| compared.failure(&archive));
    let lse_shape = operands.order.stored_lse(dims.lse_shape());
    destination.tensors(vec![
        ("out", output::tensor(dtype, &operands.order.stored(dims.out_shape()), out.bytes())?),
        ("lse", output::tensor(flashtile::Dtype::F32, &lse_shape, lse.bytes())?),
    ])?;
    Ok((done, Comparison { compared, failure }))
}

fn count(shape: [usize; 4]) -> Result<usize> {
    let count = shape.iter().try_fold(1usize, |n, &x| n.checked_mul(x));
    count.ok_or_else(|| Failure::new(format_args!("out {shape:?} is not addressable")))
}

/// Runs on the chosen backend. The inner failure is the problem's, the outer one that of a device.
fn on_backend(args: &RunArgs, job: &Job<'_>, results: Results<'_>) -> Result<Result<Done>> {
    let selected = match args.backend {
        Backend::Reference => return Ok(by_definition(job, results)),
        Backend::Simulator => return Ok(on_simulator(job, results)),
        Backend::Auto | Backend::Cpu | Backend::Cuda(_) | Backend::Metal => {
            let options = machine::options(args.splits, args.kernels.choice);
            select(args.backend, args.cpu, job.problem, options)?
        }
    };
    Ok(match &selected.backend {
        flashtile::Backend::Cpu(cpu) => on_cpu(args, *cpu, &selected, job, results),
        flashtile::Backend::Cuda(cuda) => on_cuda(args, cuda, &selected, job, results),
        other => match metal::of(other) {
            Some(metal) => on_metal(args, metal, &selected, job, results),
            None => Err(Failure::at("--backend", format_args!("{} does not run here", other.kind()))),
        },
    })
}

/// Out and lse of attention over a cache, whose rows of all sequences lie one after another, in the order of the
/// operands: out as q, lse `[batch, heads, rows]` from `[heads, batch * rows]`.
fn by_sequence(operands: &Operands<'_>, out: &Buffer, lse: &mut Buffer) -> Result<(Buffer, Buffer)> {
    let dims = operands.problem.dims();
    let [batch, heads, rows] = dims.lse_shape();
    let mut ordered = Buffer::copy_of(out.bytes())?;
    if operands.order == Order::Bhsd {
        let row_bytes = dims.value_dim * operands.problem.dtype().bytes();
        unpack(out.bytes(), ordered.bytes_mut(), [batch, heads, rows], row_bytes);
    }
    let mut ordered_lse = Buffer::zeroed(lse.bytes().len())?;
    let (from, into) = (lse.floats_mut(), ordered_lse.floats_mut());
    for b in 0..batch {
        for h in 0..heads {
            let (at, to) = ((h * batch + b) * rows, (b * heads + h) * rows);
            into[to..to + rows].copy_from_slice(&from[at..at + rows]);
        }
    }
    Ok((ordered, ordered_lse))
}

/// The computation: over the operands themselves, or over a cache of their keys and values.
struct Job<'a> {
    operands: &'a Operands<'a>,
    cached: Option<&'a Cached>,
    /// The operands, or the cache's, with the rows of all sequences one after another.
    problem: &'a Problem,
}

impl Job<'_> {
    fn inputs(&self) -> Result<Inputs<'_>> {
        self.cached.map_or_else(|| self.operands.inputs(), |cached| cached.inputs(self.operands))
    }

    /// Strides of out.
    fn strides(&self) -> [usize; 4] {
        let order = if self.cached.is_some() { Order::Packed } else { self.operands.order };
        order.strides(self.problem.dims().out_shape())
    }

    /// The codecs of the cache, and its bytes.
    fn stored(&self) -> Option<(Stored, usize)> {
        self.cached.map(|cached| (cached.stored, cached.bytes()))
    }
}

/// Memory of the results: out in the layout of q, lse `[batch, heads, queries]`; over a cache, out `[total, heads,
/// dim]` and lse `[heads, total]`.
struct Results<'a> {
    out: &'a mut Buffer,
    lse: &'a mut Buffer,
}

impl<'a> Results<'a> {
    fn outputs(self, job: &Job<'_>) -> Result<Outputs<'a>> {
        let shape = job.problem.dims().out_shape();
        let out = TensorViewMut::from_bytes(job.problem.dtype(), self.out.bytes_mut(), shape, job.strides());
        let mut outputs = Outputs::new(out.map_err(Failure::new)?);
        outputs.lse = Some(self.lse.floats_mut());
        Ok(outputs)
    }
}

/// Runs on a CUDA device; the time is that of the kernels without host-device copies.
fn on_cuda(
    args: &RunArgs,
    cuda: &Cuda,
    selected: &Selected,
    job: &Job<'_>,
    results: Results<'_>,
) -> Result<Done> {
    let problem = job.problem;
    let options = machine::options(args.splits, args.kernels.choice);
    let plan = cuda.plan(problem, options);
    let plan = plan.map_err(|e| selected.unplanned(problem, args.backend, &e))?;
    let inputs = job.inputs()?;
    let mut outputs = results.outputs(job)?;
    let mut run = TimedRun::new(cuda, &plan, &inputs, &outputs)?;
    run.compute(&mut outputs)?;
    let work = Work::of(problem);
    let (seconds, repetitions) = median(|| Ok(run.seconds()?))?;
    let unit = Unit::Cuda(cuda.clone(), problem.dtype());
    let limit = (work.flops >= MIN_FLOPS).then(|| Limit::of(&work, &unit)).transpose()?;
    Ok(Done {
        backend: "cuda",
        backend_reason: selected.reason.clone(),
        kernel: plan.kernel(),
        unit: Some(unit),
        splits: plan.splits(),
        workspace_bytes: plan.workspace_bytes(),
        problem: job.operands.problem.clone(),
        order: job.operands.order,
        stored: job.stored(),
        work,
        seconds,
        repetitions,
        limit,
    })
}

/// Runs on the Metal device; the time is that of the kernels.
fn on_metal(
    args: &RunArgs,
    metal: &Metal,
    selected: &Selected,
    job: &Job<'_>,
    results: Results<'_>,
) -> Result<Done> {
    let problem = job.problem;
    let options = machine::options(args.splits, args.kernels.choice);
    let plan = AnyPlan::new(problem, &selected.backend.facts(), options);
    let plan = plan.map_err(|e| selected.unplanned(problem, args.backend, &e))?;
    let inputs = job.inputs()?;
    let mut outputs = results.outputs(job)?;
    let mut run = metal::timed(metal, problem, options, &inputs, &outputs)?;
    run.compute(&mut outputs)?;
    let work = Work::of(problem);
    let (seconds, repetitions) = median(|| Ok(run.seconds()?))?;
    let unit = Unit::Metal(metal.clone(), problem.dtype());
    let limit = (work.flops >= MIN_FLOPS).then(|| Limit::of(&work, &unit)).transpose()?;
    Ok(Done {
        backend: "metal",
        backend_reason: selected.reason.clone(),
        kernel: plan.kernel(),
        unit: Some(unit),
        splits: plan.splits(),
        workspace_bytes: plan.workspace_bytes(),
        problem: job.operands.problem.clone(),
        order: job.operands.order,
        stored: job.stored(),
        work,
        seconds,
        repetitions,
        limit,
    })
}

/// Runs on the CPU.
fn on_cpu(
    args: &RunArgs,
    cpu: Cpu,
    selected: &Selected,
    job: &Job<'_>,
    results: Results<'_>,
) -> Result<Done> {
    let problem = job.problem;
    let options = machine::options(args.splits, args.kernels.choice);
    let plan = cpu.plan(problem, options);
    let plan = plan.map_err(|e| selected.unplanned(problem, args.backend, &e))?;
    let inputs = job.inputs()?;
    let mut outputs = results.outputs(job)?;
    let mut workspace = machine::workspace(&plan)?;
    let work = Work::of(problem);
    let unit = Unit::of_plan(&plan);
    let before = (work.flops >= MIN_FLOPS).then(|| Limit::of(&work, &unit)).transpose()?;
    let (seconds, repetitions) = median(|| {
        let started = Instant::now();
        cpu.run(&plan, &inputs, &mut outputs, &mut workspace).map_err(Failure::new)?;
        Ok(started.elapsed().as_secs_f64())
    })?;
    // The machine may have been busy at one of the two times.
    let again = |limit: Limit| Ok::<Limit, Failure>(limit.max(Limit::measure(limit.kind, &unit)?));
    let limit = before.filter(|_| seconds >= MIN_SECONDS).map(again).transpose()?;
    Ok(Done {
        backend: "cpu",
        backend_reason: selected.reason.clone(),
        kernel: plan.kernel(),
        unit: Some(unit),
        splits: plan.splits(),
        workspace_bytes: plan.workspace_bytes(),
        problem: job.operands.problem.clone(),
        order: job.operands.order,
        stored: job.stored(),
        work,
        seconds,
        repetitions,
        limit,
    })
}

/// Median time of warm runs and their number, or the time of the first run if there is no time for another.
fn median(mut run: impl FnMut() -> Result<f64>) -> Result<(f64, usize)> {
    let first = run()?;
    let (mut spent, mut last) = (first, first);
    let mut times = Vec::new();
    while times.len() < MAX_REPETITIONS && spent + last <= MEASURE_SECONDS {
        last = run()?;
        spent += last;
        times.push(last);
    }
    times.sort_by(f64::total_cmp);
    Ok(times.get(times.len() / 2).map_or((first, 1), |&median| (median, times.len())))
}

fn by_definition(job: &Job<'_>, results: Results<'_>) -> Result<Done> {
    let problem = job.problem;
    let started = Instant::now();
    let answer = reference::attention(problem, &job.inputs()?).map_err(Failure::new)?;
    let seconds = started.elapsed().as_secs_f64();
    let Dims { q_heads, q_len, value_dim, .. } = *problem.dims();
    let size = problem.dtype().bytes();
    let [sb, sh, ss, _] = job.strides();
    let out = results.out.bytes_mut();
    for (row, values) in answer.out.chunks_exact(value_dim).enumerate() {
        let (b, h, i) = (row / q_len / q_heads, row / q_len % q_heads, row % q_len);
        let slots = out[(b * sb + h * sh + i * ss) * size..].chunks_exact_mut(size);
        for (&x, slot) in values.iter().zip(slots) {
            store(x, problem.dtype(), slot);
        }
    }
    for (&x, slot) in answer.lse.iter().zip(results.lse.floats_mut()) {
        *slot = x as f32;
    }
    Ok(unplanned(job, "reference", plain_name("reference", problem), seconds))
}

/// Runs the portable kernels on their simulator, which checks every access.
fn on_simulator(job: &Job<'_>, results: Results<'_>) -> Result<Done> {
    let problem = job.problem;
    let inputs = job.inputs()?;
    let mut outputs = results.outputs(job)?;
    let started = Instant::now();
    simulator::compute(MAX_SIMULATED, problem, &inputs, &mut outputs)?;
    let seconds = started.elapsed().as_secs_f64();
    Ok(unplanned(job, "simulator", plain_name("simulator-decode", problem), seconds))
}

/// A single run that has no plan.
fn unplanned(job: &Job<'_>, backend: &'static str, kernel: String, seconds: f64) -> Done {
    Done {
        backend,
        backend_reason: "asked for".to_owned(),
        kernel,
        unit: None,
        splits: 1,
        workspace_bytes: 0,
        problem: job.operands.problem.clone(),
        order: job.operands.order,
        stored: job.stored(),
        work: Work::of(job.problem),
        seconds,
        repetitions: 1,
        limit: None,
    }
}

/// The name of an implementation that is the same everywhere, in the style of kernel names.
fn plain_name(what: &str, problem: &Problem) -> String {
    let Dims { head_dim, value_dim, .. } = *problem.dims();
    let value = if value_dim == head_dim { String::new() } else { format!("x{value_dim}") };
    format!("{what}-{}-d{head_dim}{value}", problem.dtype())
}

impl Done {
    fn line(&self) -> String {
        let shapes = shapes(&self.problem, self.order);
        let rate = report::flop_rate(self.work.flops / self.seconds);
        let reached = match self.limit {
            Some(limit) => {
                let fraction = report::percent(limit.fraction(&self.work, self.seconds));
                let threads = self.unit.as_ref().and_then(Unit::threads);
                let threads = threads.map(|n| format!(" ({})", report::counted(n, "thread")));
                format!("{fraction} of {limit}{}", threads.unwrap_or_default())
            }
            None if self.unit.is_some() => "too small to compare with a limit".to_owned(),
            None => "no limit applies".to_owned(),
        };
        let stored = self.stored.map_or_else(String::new, |(stored, _)| format!("  cached as {stored}"));
        format!("{}  {shapes}{stored}  {}  {rate}  {reached}", self.kernel, report::seconds(self.seconds))
    }

    fn json(&self, prefix: Option<&str>) -> serde_json::Value {
        let (d, limit) = (self.problem.dims(), self.limit);
        let plain = Codec::of(self.problem.dtype());
        let (k, v) = self.stored.map_or((plain, plain), |(stored, _)| (stored.k, stored.v));
        json!({
            "kernel": self.kernel,
            "backend": self.backend,
            "backend_reason": self.backend_reason,
            "unit": self.unit.as_ref().map(Unit::name),
            "threads": self.unit.as_ref().map_or(Some(1), Unit::threads),
            "splits": self.splits,
            "workspace_bytes": self.workspace_bytes,
            "prefix": prefix,
            "dims": dims_json(d),
            "layout": self.order.name(),
            "dtype": self.problem.dtype().name(),
            "k_codec": k.name(),
            "v_codec": v.name(),
            "centered": self.stored.is_some_and(|(stored, _)| stored.centered),
            "cache_bytes": self.stored.map(|(_, bytes)| bytes),
            "visibility": self.problem.desc().visibility.to_string(),
            "seconds": self.seconds,
            "repetitions": self.repetitions,
            "flops": self.work.flops,
            "kv_bytes": self.work.bytes,
            "gflops": self.work.flops / self.seconds / 1e9,
            "gbytes_per_s": self.work.bytes / self.seconds / 1e9,
            "limit": limit.map(|l| l.kind.name()),
            "limit_per_s": limit.map(|l| l.rate),
            "fraction": limit.map(|l| l.fraction(&self.work, self.seconds)),
        })
    }
}

/// Shapes of the operands in the layout of the file.
pub(crate) fn shapes(problem: &Problem, order: Order) -> String {
    let d = problem.dims();
    let [q, k, v] = [d.q_shape(), d.k_shape(), d.v_shape()].map(|shape| order.stored(shape));
    if let Sequences::Cached { kv_lens, .. } = &problem.desc().sequences {
        let (min, max) = (kv_lens.iter().min().unwrap_or(&0), kv_lens.iter().max().unwrap_or(&0));
        let (heads, dims) = (report::counted(d.kv_heads, "head"), [d.head_dim, d.value_dim]);
        let sequences = report::counted(kv_lens.len(), "sequence");
        let max = report::counted(*max, "token");
        return format!("q {q:?} over a cache of {heads} of {dims:?}, {sequences} of {min} to {max}");
    }
    format!("q {q:?} k {k:?} v {v:?}")
}

/// Dimensions with the field names of [`Dims`].
pub(crate) fn dims_json(d: &Dims) -> serde_json::Value {
    json!({
        "batch": d.batch,
        "q_heads": d.q_heads,
        "kv_heads": d.kv_heads,
        "q_len": d.q_len,
        "kv_len": d.kv_len,
        "head_dim": d.head_dim,
        "value_dim": d.value_dim,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_of_the_simulator_is_said() {
        assert!(RUN_HELP.contains(&format!("at most {MAX_SIMULATED},")));
    }
}
