//! `flashtile plan`: what would run for a problem, and why.

use crate::backward;
use crate::cached::Stored;
use crate::device::{self, Known};
use crate::failure::{Failure, Result};
use crate::input::Mapped;
use crate::machine::{self, Work};
use crate::names;
use crate::operands::{Operands, Order};
use crate::options::{AUTO, CpuArgs, KernelsArg, Reading, Semantics, Shape, Storage, backend};
use crate::output::Destination;
use crate::parse::count;
use crate::picture::{Counts, Tiles};
use crate::report;
use crate::run::{dims_json, shapes};
use crate::select::{planned, select, unplanned};
use clap::Args;
use flashtile::{
    AnyBackwardPlan, AnyPlan, BackendName, Dims, Dtype, HeadShape, PlanOptions, Problem, ProblemDesc,
    SeqLens, Sequences, SharedPrefix,
};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::ExitCode;

/// Show what would run for a problem, why, and which tiles it visits
///
/// The problem comes from a file or is described by options. Nothing is computed, so the problem or the machine to plan
/// for may be larger than this machine.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  flashtile plan --q-len 4096 --head-dim 128 --causal --window 1023\n  \
    flashtile plan qkv.safetensors --causal --device avx512-64core --svg tiles.svg\n  \
    flashtile plan --cached 1:8192x64 --heads 32 --kv-heads 8 --head-dim 128 --dtype bf16 --causal --device h200")]
pub(crate) struct PlanArgs {
    /// Safetensors file, .npz archive or folder of .npy files with the problem, instead of a described one
    #[arg(value_name = "FILE", conflicts_with = "Shape")]
    pub(crate) input: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) shape: Shape,
    #[command(flatten)]
    pub(crate) reading: Reading,
    #[command(flatten)]
    pub(crate) semantics: Semantics,
    #[command(flatten)]
    pub(crate) storage: Storage,
    /// Refuse a file with tensors that are not recognised, instead of noting them
    #[arg(long)]
    pub(crate) strict: bool,
    /// Machine to plan for, instead of this one, in upper or lower case: a CPU, or a GPU of NVIDIA or Apple
    #[arg(long, value_name = "NAME", value_parser = device::known(), conflicts_with_all = ["isa", "threads", "backend"])]
    pub(crate) device: Option<Known>,
    /// Machine to plan for, described by a JSON file as `flashtile info --device NAME` prints it
    #[arg(long, value_name = "FILE", conflicts_with_all = ["device", "isa", "threads", "backend"])]
    pub(crate) device_file: Option<PathBuf>,
    /// Backend to plan for; the plan says why it was chosen
    #[arg(long, value_parser = backend(AUTO, &[]), default_value = "auto")]
    pub(crate) backend: BackendName,
    #[command(flatten)]
    pub(crate) kernels: KernelsArg,
    #[command(flatten)]
    pub(crate) cpu: CpuArgs,
    /// Number of splits of the keys for parallel work, each at least one block of keys
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) splits: Option<usize>,
    /// Also plan the backward pass
    #[arg(long)]
    pub(crate) grad: bool,
    /// Sequence whose tiles to draw, counted from 0
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) sequence: usize,
    /// Leave out the map of the tiles
    #[arg(long)]
    pub(crate) no_tiles: bool,
    /// Also write the picture of the tiles to this file, which ends in .svg
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// Largest number of batch entries of a described problem.
const MAX_BATCH: usize = 1 << 20;

pub(crate) fn run(args: &PlanArgs) -> Result<ExitCode> {
    machine::on_threads(args.cpu.threads, || {
        let (problem, order) = problem(args)?;
        let stored = Stored::asked(&args.storage, &problem)?;
        let problem = match stored {
            Some(stored) => stored.problem(&problem)?,
            None => problem,
        };
        let options = machine::options(args.splits, args.kernels.choice);
        let Target { device, reason, plan } = Target::new(args, &problem, options)?;
        let backward = args.grad.then(|| backward::plan("--grad", &plan)).transpose()?;
        let sequence = problem.sequences().get(args.sequence).ok_or_else(|| {
            let count = report::counted(problem.sequences().len(), "sequence");
            let what = format_args!(
                "{} is out of range, there is a total of {count}, counted from 0",
                args.sequence
            );
            Failure::at("--sequence", what)
        });
        let backward = backward.as_ref();
        let shown = Shown { device: &device, reason: &reason, plan: &plan, backward, order, stored };
        match sequence {
            // A problem without sequences has no tiles to draw, so --sequence is out of range unless it is the default.
            Err(_) if problem.sequences().is_empty() && args.sequence == 0 && args.svg.is_none() => {
                if args.json { report::json(&shown.json(None)) } else { report::text(shown.text()) }
            }
            Err(failure) => Err(failure),
            Ok(sequence) => {
                let tile = plan.tile(sequence);
                let tiles = Tiles { problem: &problem, sequence, rows: tile.rows, keys: tile.keys };
                if let Some(path) = &args.svg {
                    let picture = Destination::svg(path)?;
                    args.input.as_deref().map_or(Ok(()), |input| picture.differs_from(input))?;
                    tiles.svg(&plan.kernel(), &picture)?;
                }
                if args.json {
                    report::json(&shown.json(Some((args.sequence, tiles.counts()))))
                } else if args.no_tiles {
                    report::text(shown.text())
                } else {
                    let heading = format!("tiles of sequence {}, each key/value head:", args.sequence);
                    let tiles = collapsed(&tiles.text());
                    report::text(format_args!("{}\n{heading}\n{tiles}", shown.text()))
                }
            }
        }
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Replaces three or more successive equal lines by one with their number: `  ████ x 32`. Two equal lines stay, so that
/// diagonals keep their shape.
fn collapsed(text: &str) -> String {
    const MIN_EQUAL: usize = 3;
    let lines: Vec<&str> = text.lines().collect();
    let of_equal = |lines: &[&str]| match lines.len() {
        0..MIN_EQUAL => lines.iter().map(|line| format!("{line}\n")).collect(),
        n => format!("{} x {n}\n", lines[0]),
    };
    lines.chunk_by(|a, b| a == b).map(of_equal).collect()
}

/// The problem, and the layout that shows its shapes.
fn problem(args: &PlanArgs) -> Result<(Problem, Order)> {
    match &args.input {
        Some(path) => {
            let mapped = Mapped::open(path)?;
            let archive = names::archive(&mapped, args.reading.prefix.as_deref())?;
            let operands = Operands::read(&archive, &args.reading, &args.semantics)?;
            if let Some(note) = operands.remark(&archive, args.strict)? {
                report::note(note);
            }
            Ok((operands.problem, operands.order))
        }
        None => Ok((described(args)?, Order::Bhsd)),
    }
}

fn described(args: &PlanArgs) -> Result<Problem> {
    let given = [
        ("--layout", args.reading.layout.is_some()),
        ("--prefix", args.reading.prefix.is_some()),
        ("--strict", args.strict),
    ];
    for (option, given) in given {
        if given {
            return Err(Failure::at(option, "does not apply to a shape, expected a file"));
        }
    }
    let Shape { batch, heads, q_len, head_dim, ref kv_lens, .. } = args.shape;
    if !args.shape.cached.is_empty() {
        return steps(args);
    }
    let dims = Dims {
        batch,
        q_heads: heads,
        kv_heads: args.shape.kv_heads.unwrap_or(heads),
        q_len,
        kv_len: args.shape.kv_len.unwrap_or(q_len),
        head_dim,
        value_dim: args.shape.value_dim.unwrap_or(head_dim),
    };
    if batch > MAX_BATCH {
        return Err(Failure::at("--batch", format_args!("{batch}, expected at most {MAX_BATCH}")));
    }
    let mut desc = ProblemDesc::new(dims, args.reading.dtype.unwrap_or(Dtype::F32));
    desc.q_offset = args.semantics.q_offset;
    if !kv_lens.is_empty() {
        desc.sequences = Sequences::Padded { kv_lens: kv_lens.clone() };
    }
    with_semantics(desc, args).validate().map_err(Failure::new)
}

fn with_semantics(mut desc: ProblemDesc, args: &PlanArgs) -> ProblemDesc {
    desc.visibility = args.semantics.visibility();
    desc.scale = args.semantics.scale;
    desc.softcap = args.semantics.softcap;
    desc.alibi = args.shape.alibi;
    desc.sinks = args.shape.sinks;
    desc
}

/// A step over sequences in a cache.
fn steps(args: &PlanArgs) -> Result<Problem> {
    let Shape { heads, kv_heads, head_dim, value_dim, shared, .. } = args.shape;
    let count = args.shape.cached.iter().fold(0usize, |n, c| n.saturating_add(c.times));
    if count > MAX_BATCH {
        return Err(Failure::at("--cached", format_args!("{count} sequences, expected at most {MAX_BATCH}")));
    }
    let steps = args
        .shape
        .cached
        .iter()
        .flat_map(|c| std::iter::repeat_n(SeqLens { q_len: c.queries, kv_len: c.len }, c.times));
    let steps: Vec<SeqLens> = steps.collect();
    let shape = HeadShape {
        q_heads: heads,
        kv_heads: kv_heads.unwrap_or(heads),
        head_dim,
        value_dim: value_dim.unwrap_or(head_dim),
    };
    let mut desc = ProblemDesc::cached(shape, args.reading.dtype.unwrap_or(Dtype::F32), &steps);
    desc.q_offset = args.semantics.q_offset.or(desc.q_offset);
    if let Some(len) = shared {
        desc.prefixes = vec![SharedPrefix { sequences: 0..steps.len(), len }];
    }
    with_semantics(desc, args).validate().map_err(|e| match shared {
        Some(shared) => Failure::at(format_args!("--shared {shared}"), e),
        None => Failure::new(e),
    })
}

/// The machine to plan for, the reason for its backend, and the plan.
struct Target {
    device: String,
    reason: String,
    plan: AnyPlan,
}

impl Target {
    fn new(args: &PlanArgs, problem: &Problem, options: PlanOptions) -> Result<Self> {
        let asked = match (&args.device, &args.device_file) {
            (Some(known), _) => Some((known.name.to_owned(), known.facts.clone(), "--device")),
            (None, Some(path)) => Some((path.display().to_string(), device::read(path)?, "--device-file")),
            (None, None) => None,
        };
        if let Some((device, facts, option)) = asked {
            let plan = |options| facts.plan(problem, options);
            let plan = plan(options).map_err(|error| unplanned(problem, plan, &error))?;
            return Ok(Self { device, reason: format!("{option} asks for it"), plan });
        }
        let choice = select(args.backend, args.cpu, args.grad, problem, options)?;
        let plan = planned(&choice, args.backend, problem)?;
        Ok(Self { device: choice.backend.device(), reason: choice.reason, plan })
    }
}

/// The time that a plan takes at the rates by which backends are chosen.
struct Estimate {
    /// Seconds of the kernels: of arithmetic or of reading, whichever takes longer.
    seconds: f64,
    /// Seconds to start, and to copy tensors of the host to the device and back.
    overhead: f64,
    words: String,
}

impl Estimate {
    fn of(plan: &AnyPlan) -> Self {
        let (rates, work) = (plan.rates(), Work::of(plan));
        let (arithmetic, reading) = (work.flops / rates.flops, work.bytes / rates.bandwidth);
        let (seconds, overhead) = (arithmetic.max(reading), rates.overhead(plan.problem()));
        let by = if arithmetic >= reading {
            format!("{} at {}", report::flops(work.flops), report::flop_rate(rates.flops))
        } else {
            format!("{} of K and V at {}", report::bytes(work.bytes), report::byte_rate(rates.bandwidth))
        };
        let words = format!(
            "{}: {by}, the rate by which auto compares machines, not a measurement or a promise; {} more to start and \
             to copy tensors of the host",
            report::seconds(seconds),
            report::seconds(overhead)
        );
        Self { seconds, overhead, words }
    }
}

/// A plan and the machine that it is for.
struct Shown<'a> {
    device: &'a str,
    reason: &'a str,
    plan: &'a AnyPlan,
    /// The plan of the backward pass, if it was asked for.
    backward: Option<&'a AnyBackwardPlan>,
    order: Order,
    /// The codecs of a cache; `None` if attention reads the tensors directly.
    stored: Option<Stored>,
}

impl Shown<'_> {
    fn text(&self) -> String {
        let Self { plan, order, .. } = self;
        let problem = plan.problem();
        let desc = problem.desc();
        let work = Work::of(plan);
        let extras = [
            self.stored.map(|stored| format!("cached as {stored}")),
            desc.softcap.map(|c| format!("softcap {c}")),
            desc.alibi.then(|| "ALiBi".to_owned()),
            desc.sinks.then(|| "sinks".to_owned()),
            desc.mask.map(|kind| format!("{kind} mask")),
        ];
        let extras: String = extras.into_iter().flatten().map(|extra| format!(", {extra}")).collect();
        let lines = [
            (
                "problem",
                format!(
                    "{} {}, {}, scale {}{extras}",
                    problem.dtype(),
                    shapes(problem, *order),
                    desc.visibility,
                    problem.scale()
                ),
            ),
            ("backend", format!("{}: {}", plan.backend(), self.reason)),
        ];
        let ends = [
            ("workspace", report::bytes(plan.workspace_bytes() as f64)),
            (
                "work",
                format!(
                    "{}, {} of K and V, {} of all pairs visible",
                    report::flops(work.flops),
                    report::bytes(work.bytes),
                    report::percent(visible_fraction(problem))
                ),
            ),
        ];
        let estimate = ("estimate", Estimate::of(plan).words);
        let explained = plan.explain();
        let machine = ("machine", format!("{}: {}", self.device, explained.machine));
        let (prefixes, middle): (Vec<_>, Vec<_>) =
            explained.lines.into_iter().partition(|(name, _)| *name == "prefix");
        let lines =
            lines.into_iter().chain([machine]).chain(middle).chain(ends).chain([estimate]).chain(prefixes);
        let backward = self.backward.map(|plan| ("backward", backward::words(plan)));
        report::facts(&lines.chain(backward).collect::<Vec<_>>())
    }

    fn json(&self, drawn: Option<(usize, Counts)>) -> Value {
        let (problem, work) = (self.plan.problem(), Work::of(self.plan));
        let estimate = Estimate::of(self.plan);
        let mut json = report::fields(&self.plan.explain().fields);
        let common = json!({
            "kernel": self.plan.kernel(),
            "backend": self.plan.backend(),
            "backend_reason": self.reason,
            "device": self.device,
            "tasks": self.plan.task_count(),
            "splits": self.plan.splits(),
            "dims": dims_json(problem.dims()),
            "layout": self.order.name(),
            "dtype": problem.dtype().name(),
            "k_codec": problem.k_codec().name(),
            "v_codec": problem.v_codec().name(),
            "centered": self.stored.is_some_and(|stored| stored.centered),
            "equalized": self.stored.and_then(|stored| stored.equalized),
            "visibility": problem.desc().visibility.to_string(),
            "sequences": problem.sequences().len(),
            "workspace_bytes": self.plan.workspace_bytes(),
            "flops": work.flops,
            "kv_bytes": work.bytes,
            "estimated_seconds": estimate.seconds,
            "estimated_overhead_seconds": estimate.overhead,
            "visible_fraction": visible_fraction(problem),
            "backward": self.backward.map(backward::json),
            "tiles": drawn.map(|(sequence, counts)| json!({
                "sequence": sequence,
                "skip": counts.skip,
                "partial": counts.partial,
                "full": counts.full,
            })),
        });
        if let (Some(json), Value::Object(common)) = (json.as_object_mut(), common) {
            json.extend(common);
        }
        json
    }
}

/// Fraction of all pairs of queries and keys that are visible; 0 if there are no pairs.
fn visible_fraction(problem: &Problem) -> f64 {
    let all: f64 = problem.sequences().iter().map(|s| s.q_len as f64 * s.kv_len as f64).sum();
    if all == 0.0 { 0.0 } else { problem.visible_pairs() as f64 / all }
}
