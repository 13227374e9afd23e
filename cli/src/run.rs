//! `flashtile run`: attention over the tensors of a file.

use crate::answers::{Answers, Compared, Computed};
use crate::backward;
use crate::buffer::Buffer;
use crate::cached::{Cached, Stored, unpack};
use crate::failure::{Failure, Result};
use crate::gradients::{self, Backward, BackwardJob, Distance, Upstream};
use crate::input::Mapped;
use crate::machine::{self, Work};
use crate::names;
use crate::nonfinite;
use crate::operands::{Operands, Order};
use crate::options::{AUTO, CpuArgs, Kernels, KernelsArg, Reading, Semantics, Storage, backend};
use crate::output::{self, Destination};
use crate::parse;
use crate::progress::spinner;
use crate::report;
use crate::select::{planned, select};
use crate::timing::Timing;
use clap::Args;
use flashtile::{
    AnyPlan, BackendName, Choice, Codec, Dims, Inputs, Outputs, Problem, Sequences, TensorViewMut,
};
use indicatif::ProgressBar;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::ExitCode;

/// The long help of `run`. It is not a doc comment, so that brackets and line breaks stay literal.
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
with --grad
  d_out          gradient of a loss with respect to out, in the shape of out, of the dtype of q
                 unless --dtype converts both
and, if present,
  d_lse          gradient of the loss with respect to lse, F32, in the shape of lse
  d_q, d_k, d_v, d_sinks, d_bias, d_alibi_slopes
                 the expected gradients, in the shapes that are written

q, k and v may be called query, key and value (or queries, keys, values), mask attn_mask or
attention_mask. A file with two names for a tensor is refused.

With --prefix NAME these are the tensors of one layer: NAME.q, NAME.k, NAME.v. The tensors may
also be arrays of numpy: an .npz archive, or a folder with q.npy, k.npy and v.npy.

With --backend simulator, in builds with the cargo feature simulator, the portable GPU kernels run
on this machine with every access checked: ten to a hundred thousand scores (query heads * queries
* keys) per second, at most 600000, with head dimension 64 or 128, the same for v. Keys and values
are plain or in the codecs int8, tq4, or int8 for keys with tq5 for values.

Writes a safetensors file with out (dtype and layout of q) and lse (F32 [batch, heads, queries], packed [heads, total]).
If IN has out or lse, the answer is compared with them. The report says how far it is; beyond the
limit, which is twice that of docs/numerics.md because both answers may err, the exit status is 1.
OUT is written in any case. No limit applies if --dtype or a codec rounds q, k or v.

With --grad also computes the gradients of the loss, and writes d_q, d_k and d_v (in dtype and layout
of q, k, v) and, where IN has those inputs, d_sinks, d_bias (of an additive mask, in its shape) and
d_alibi_slopes (F32). Caches have no gradients. The report has the error of each gradient that IN has
too, without a limit.

Tensors with unknown names are noted and not read, or refused with --strict; names that look
misspelt are refused.";

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
    #[arg(long, value_parser = backend(AUTO, &[]), default_value = "auto")]
    pub(crate) backend: BackendName,
    #[command(flatten)]
    pub(crate) kernels: KernelsArg,
    #[command(flatten)]
    pub(crate) reading: Reading,
    #[command(flatten)]
    pub(crate) semantics: Semantics,
    /// Refuse a file with tensors that are not recognised, instead of noting them; out and lse are recognised, and
    /// compared either way
    #[arg(long)]
    pub(crate) strict: bool,
    #[command(flatten)]
    pub(crate) storage: Storage,
    /// Number of splits of the keys for parallel work, each at least one block of keys; the result does not depend on
    /// it
    #[arg(long, value_name = "N", value_parser = parse::count)]
    pub(crate) splits: Option<usize>,
    /// Also compute the gradients of a loss, from its gradient d_out with respect to out
    #[arg(long)]
    pub(crate) grad: bool,
    #[command(flatten)]
    pub(crate) cpu: CpuArgs,
    /// Print one JSON object instead of a report
    #[arg(long)]
    pub(crate) json: bool,
}

pub(crate) fn run(args: &RunArgs) -> Result<ExitCode> {
    refuse_what_does_not_apply(args)?;
    machine::on_threads(args.cpu.threads, || {
        let (done, Comparison { compared, gradients, failure }) = compute(args)?;
        if args.json {
            let mut json = done.json(args.reading.prefix.as_deref());
            json["compared"] = compared.as_ref().map(Compared::json).into();
            json["backward"] = done.backward.as_ref().map(Backward::json).into();
            json["gradients_compared"] = gradients.as_deref().map(Distance::json).into();
            report::json(&json)?;
        } else {
            let mut lines = done.lines();
            // Why a device was left out is a matter of `plan`: nobody asked for one here.
            if args.backend.is_auto() && done.plan.backend() != "cpu" {
                lines.insert(1, ("backend", done.choice.to_string()));
            }
            lines.extend(compared.map(|compared| ("answer", compared.words())));
            lines.extend(done.backward.iter().flat_map(Backward::lines));
            let gradients = gradients.as_deref().and_then(Distance::words);
            lines.extend(gradients.map(|gradients| ("gradients", gradients)));
            report::text(report::facts(&lines))?;
        }
        failure.map_or(Ok(ExitCode::SUCCESS), Err)
    })
}

/// Refuses options that do not apply to the backend.
fn refuse_what_does_not_apply(args: &RunArgs) -> Result<()> {
    let name = args.backend.backend();
    let is_cpu = args.backend.is_auto() || name == "cpu";
    let of_cpu = args.cpu.given();
    let given = [
        ("--isa", "auto or cpu", !is_cpu && of_cpu.contains(&"--isa")),
        ("--threads", "auto or cpu", !is_cpu && of_cpu.contains(&"--threads")),
        ("--kernels", "auto or cuda", !is_cpu && name != "cuda" && args.kernels.choice != Kernels::Auto),
    ];
    if let Some((option, expected, _)) = given.into_iter().find(|(.., given)| *given) {
        let text = format_args!("does not apply to the {name} backend, expected --backend {expected}");
        return Err(Failure::at(option, text));
    }
    Ok(())
}

/// The plan that ran, and its time.
struct Done {
    choice: Choice,
    plan: AnyPlan,
    problem: Problem,
    order: Order,
    /// The codecs of the cache and its bytes, if there was one.
    stored: Option<(Stored, usize)>,
    timing: Timing,
    non_finite: nonfinite::Results,
    /// The backward pass, if it was asked for.
    backward: Option<Backward>,
}

/// The comparison with the answers of the file, if it has any.
struct Comparison {
    compared: Option<Compared>,
    gradients: Option<Vec<Distance>>,
    /// Set if a limit is exceeded.
    failure: Option<Failure>,
}

fn compute(args: &RunArgs) -> Result<(Done, Comparison)> {
    let mapped = Mapped::open(&args.input)?;
    let archive = names::archive(&mapped, args.reading.prefix.as_deref())?;
    let operands = Operands::read(&archive, &args.reading, &args.semantics)?;
    let answers = Answers::read(&archive, &operands)?;
    let stored = Stored::asked(&args.storage, &operands.problem)?;
    if let Some(stored) = stored.filter(|_| args.grad) {
        let what =
            format_args!("keys and values in a cache ({stored}) have no gradients, expected no codecs");
        return Err(Failure::at("--grad", what));
    }
    let upstream = || Upstream::read(&archive, &operands, &args.reading);
    let upstream = args.grad.then(upstream).transpose()?;
    let destination = Destination::safetensors(&args.output)?;
    destination.differs_from(&args.input)?;
    let unread = gradients::remark(&archive).filter(|_| !args.grad);
    operands.remark(&archive, args.strict)?.into_iter().chain(unread).for_each(report::note);

    let dims = *operands.problem.dims();
    let dtype = operands.problem.dtype();
    let refuse = |failure: Failure| archive.refuse(failure);
    let progress = spinner();
    progress.set_message(if stored.is_some() { "storing keys and values" } else { "planning" });
    let cached = stored.map(|stored| Cached::fill(&operands, stored)).transpose().map_err(refuse)?;
    let job = match &cached {
        Some(cached) => Job { operands: &operands, cached: Some(cached), problem: &cached.problem },
        None => Job { operands: &operands, cached: None, problem: &operands.problem },
    };
    let mut out = Buffer::elements(dtype, count(dims.out_shape())?)?;
    let mut lse = Buffer::elements(flashtile::Dtype::F32, dims.batch * dims.q_heads * dims.q_len)?;
    let results = Results { out: &mut out, lse: &mut lse };
    let options = machine::options(args.splits, args.kernels.choice);
    let choice = select(args.backend, args.cpu, args.grad, job.problem, options)?;
    let plan = planned(&choice, args.backend, job.problem).map_err(refuse)?;
    // A problem without a backward pass is refused before the forward pass takes its time.
    let backward = upstream.as_ref().map(|_| backward::plan("--grad", &plan)).transpose()?;
    let mut done = timed(choice, plan, &job, results, &progress).map_err(refuse)?;
    if let (Some(plan), Some(upstream)) = (backward, &upstream) {
        progress.set_message(plan.kernel().to_owned());
        let (backend, forward) = (&*done.choice.backend, &done.plan);
        let job = BackwardJob { backend, forward, operands: &operands, upstream, out: &out, lse: &lse };
        done.backward = Some(Backward::run(plan, &job).map_err(refuse)?);
    }
    progress.set_message("writing");
    if cached.is_some() && operands.order != Order::Packed {
        (out, lse) = by_sequence(&operands, &out, &mut lse)?;
    }

    let is_rounded = cached.is_some() || operands.is_rounded();
    let compared = answers.compare(&operands, &Computed { out: &out, lse: &lse, is_rounded })?;
    let gradients = done.backward.as_ref().map(|backward| backward.compare(&archive)).transpose()?;
    let failure = compared.as_ref().and_then(|compared| compared.failure(&archive));
    let lse_shape = operands.order.stored_lse(dims.lse_shape());
    let mut tensors = vec![
        ("out", output::tensor(dtype, &operands.order.stored(dims.out_shape()), out.bytes())?),
        ("lse", output::tensor(flashtile::Dtype::F32, &lse_shape, lse.bytes())?),
    ];
    tensors.extend(done.backward.as_ref().map(Backward::outputs).transpose()?.unwrap_or_default());
    destination.tensors(tensors)?;
    progress.finish_and_clear();
    Ok((done, Comparison { compared, gradients, failure }))
}

fn count(shape: [usize; 4]) -> Result<usize> {
    let count = shape.iter().try_fold(1usize, |n, &x| n.checked_mul(x));
    count.ok_or_else(|| Failure::new(format_args!("out {shape:?} is not addressable")))
}

/// Reorders out and lse of attention over a cache, where the rows of all sequences lie one after another, to the order
/// of the operands: out to that of q, lse from `[heads, batch * rows]` to `[batch, heads, rows]`.
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
    /// The problem of the operands, or that of the cache, where the rows of all sequences lie one after another.
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

/// Memory of the results. Out has the layout of q, and lse is `[batch, heads, queries]`; over a cache, out is `[total,
/// heads, dim]`, and lse `[heads, total]`.
struct Results<'a> {
    out: &'a mut Buffer,
    lse: &'a mut Buffer,
}

impl Results<'_> {
    fn outputs(&mut self, job: &Job<'_>) -> Result<Outputs<'_>> {
        let shape = job.problem.dims().out_shape();
        let out = TensorViewMut::from_bytes(job.problem.dtype(), self.out.bytes_mut(), shape, job.strides());
        let mut outputs = Outputs::new(out.map_err(Failure::new)?);
        outputs.lse = Some(self.lse.floats_mut());
        Ok(outputs)
    }
}

/// Runs and times the plan on the chosen backend. The time is that of kernels, without copies between host and device.
fn timed(
    choice: Choice,
    plan: AnyPlan,
    job: &Job<'_>,
    mut results: Results<'_>,
    progress: &ProgressBar,
) -> Result<Done> {
    let estimate = report::seconds(plan.rates().seconds(job.problem));
    progress.set_message(format!("{}, an estimated {estimate} a run", plan.kernel()));
    let backend = &*choice.backend;
    let inputs = job.inputs()?;
    let mut outputs = results.outputs(job)?;
    let mut run = backend.timed(&plan, &[inputs], &outputs)?;
    let seconds = || Ok(run.seconds(&mut outputs)?);
    let timing = Timing::measure(backend, backend.unit(&plan), Work::of(&plan), seconds)?;
    run.download(&mut outputs)?;
    drop((run, outputs));
    let Job { operands, .. } = job;
    let non_finite = nonfinite::Results::count(operands, results.out.bytes(), results.lse.bytes());
    let (problem, order, stored) = (operands.problem.clone(), operands.order, job.stored());
    Ok(Done { plan, problem, order, stored, timing, non_finite, backward: None, choice })
}

impl Done {
    /// The report, one fact on each line: headings and texts.
    fn lines(&self) -> Vec<(&'static str, String)> {
        let Timing { work, seconds, .. } = &self.timing;
        let read = report::byte_rate(work.bytes / seconds);
        let mut lines = vec![("kernel", self.plan.kernel()), ("problem", shapes(&self.problem, self.order))];
        lines.extend(
            self.stored
                .map(|(stored, bytes)| ("cache", format!("{stored}, {}", report::bytes(bytes as f64)))),
        );
        lines.push(("time", self.timing.words()));
        lines.push(("rate", format!("{}, {read} of K and V", self.timing.flop_rate())));
        lines.push(("limit", self.timing.reached()));
        lines.extend(self.non_finite.words().map(|words| ("non-finite", words)));
        lines
    }

    fn json(&self, prefix: Option<&str>) -> serde_json::Value {
        let d = self.problem.dims();
        let plain = Codec::of(self.problem.dtype());
        let (k, v) = self.stored.map_or((plain, plain), |(stored, _)| (stored.k, stored.v));
        let unit = self.timing.unit.as_ref();
        let mut json = json!({
            "kernel": self.plan.kernel(),
            "backend": self.plan.backend(),
            "backend_reason": self.choice.reason,
            "unit": unit.map(|unit| &unit.name),
            "threads": unit.map_or(Some(1), |unit| unit.threads),
            "splits": self.plan.splits(),
            "workspace_bytes": self.plan.workspace_bytes(),
            "prefix": prefix,
            "dims": dims_json(d),
            "layout": self.order.name(),
            "dtype": self.problem.dtype().name(),
            "k_codec": k.name(),
            "v_codec": v.name(),
            "centered": self.stored.is_some_and(|(stored, _)| stored.centered),
            "equalized": self.stored.and_then(|(stored, _)| stored.equalized),
            "cache_bytes": self.stored.map(|(_, bytes)| bytes),
            "visibility": self.problem.desc().visibility.to_string(),
        });
        if let (Some(all), Value::Object(timing)) = (json.as_object_mut(), self.timing.json()) {
            all.extend(timing);
            all.insert("non_finite".to_owned(), self.non_finite.json());
        }
        json
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
