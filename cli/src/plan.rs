//! `flashtile plan`: what would run for a problem, and why.

use crate::cached::Stored;
use crate::failure::{Failure, Result};
use crate::input::Mapped;
use crate::machine::{self, Work};
use crate::metal;
use crate::names;
use crate::nearest;
use crate::operands::{Operands, Order};
use crate::options::{AUTO, Backend, CpuArgs, KernelsArg, Reading, Semantics, Shape, Storage, backend};
use crate::output::Destination;
use crate::parse::count;
use crate::picture::{Counts, Tiles};
use crate::report;
use crate::run::{dims_json, shapes};
use crate::select::{Selected, select, unplanned};
use clap::Args;
use flashtile::plan::{
    AnyFacts, CpuFacts, CudaFacts, CudaKernel, MetalFacts, NATIVE_CAPABILITY, PlannedPrefix,
};
use flashtile::{
    AnyPlan, CpuPlan, CudaPlan, Dims, Dtype, HeadShape, KernelChoice, MetalPlan, PlanOptions, Problem,
    ProblemDesc, SeqLens, Sequences, SharedPrefix,
};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

/// Show what would run for a problem, why, and which tiles it visits
///
/// The problem comes from a file or is described by options. Nothing is computed, so that problems and machines may
/// be larger than this one.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  flashtile plan --q-len 4096 --head-dim 128 --causal --window 1023\n  \
    flashtile plan qkv.safetensors --causal --device avx512-64core --svg tiles.svg\n  \
    flashtile plan --cached 1:8192x64 --heads 32 --kv-heads 8 --head-dim 128 --dtype bf16 --causal --device h200")]
pub(crate) struct PlanArgs {
    /// Safetensors file, .npz archive or folder of .npy files whose problem is planned, instead of a described one
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
    /// Machine to plan for, instead of this one: a CPU or a CUDA device
    #[arg(long, value_name = "NAME", conflicts_with_all = ["isa", "threads", "backend"])]
    pub(crate) device: Option<String>,
    /// Backend to plan for; the plan says why it was chosen
    #[arg(long, value_parser = backend(AUTO, &[Backend::Auto, Backend::Cpu, Backend::Cuda(0), Backend::Metal]), default_value = "auto")]
    pub(crate) backend: Backend,
    #[command(flatten)]
    pub(crate) kernels: KernelsArg,
    #[command(flatten)]
    pub(crate) cpu: CpuArgs,
    /// Splits of at least one block of keys into which the keys are divided for parallel work
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) splits: Option<usize>,
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
        let target = Target::new(args, &problem, options)?;
        let plan = target.plan(args, &problem, options)?;
        let sequence = problem.sequences().get(args.sequence).ok_or_else(|| {
            let count = report::counted(problem.sequences().len(), "sequence");
            let what = format_args!(
                "{} is out of range, there is a total of {count}, counted from 0",
                args.sequence
            );
            Failure::at("--sequence", what)
        });
        let shown = Shown { target: &target, plan: &plan, order, stored };
        match sequence {
            // A problem without sequences has no tiles to draw, so that any --sequence is out of range.
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

/// Text in which many equal lines after each other are one line with their number: `  ████ x 32`. Two equal lines stay,
/// so that diagonals keep their shape.
fn collapsed(text: &str) -> String {
    const MIN_EQUAL: usize = 3;
    let lines: Vec<&str> = text.lines().collect();
    let of_equal = |lines: &[&str]| match lines.len() {
        0..MIN_EQUAL => lines.iter().map(|line| format!("{line}\n")).collect(),
        n => format!("{} x {n}\n", lines[0]),
    };
    lines.chunk_by(|a, b| a == b).map(of_equal).collect()
}

/// The problem, and the layout in which its shapes are shown.
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

/// The machine to plan for, and why its backend was taken.
struct Target {
    device: String,
    facts: AnyFacts,
    reason: String,
    /// The backend of this machine, unless --device names another machine.
    selected: Option<Selected>,
}

impl Target {
    fn new(args: &PlanArgs, problem: &Problem, options: PlanOptions) -> Result<Self> {
        if let Some(name) = &args.device {
            let facts = known(name)?;
            return Ok(Self {
                device: name.clone(),
                facts,
                reason: "--device asks for it".to_owned(),
                selected: None,
            });
        }
        if let Some(gpu) = args.backend.gpu()
            && (args.cpu.isa.is_some() || args.cpu.threads.is_some())
        {
            return Err(Failure::at("--backend", format_args!("{gpu} has neither --isa nor --threads")));
        }
        let selected = select(args.backend, args.cpu, problem, options)?;
        let mut device = "this machine".to_owned();
        if let flashtile::Backend::Cuda(cuda) = &selected.backend {
            cuda.name().clone_into(&mut device);
        }
        if let Some(metal) = metal::of(&selected.backend) {
            metal::name(metal).clone_into(&mut device);
        }
        let (facts, reason) = (selected.backend.facts(), selected.reason.clone());
        Ok(Self { device, facts, reason, selected: Some(selected) })
    }

    fn plan(&self, args: &PlanArgs, problem: &Problem, options: PlanOptions) -> Result<AnyPlan> {
        AnyPlan::new(problem, &self.facts, options).map_err(|error| match &self.selected {
            Some(selected) => selected.unplanned(problem, args.backend, &error),
            None => unplanned(problem, &self.facts, &error),
        })
    }
}

/// Facts of a machine that --device names.
fn known(name: &str) -> Result<AnyFacts> {
    let all = AnyFacts::known();
    all.iter().find(|(known, _)| *known == name).map(|(_, facts)| *facts).ok_or_else(|| {
        let names = all.iter().map(|(name, _)| *name);
        Failure::at("--device", format_args!("{name} is not known, {}", nearest::expected(name, names)))
    })
}

/// A plan and the machine that it is for.
struct Shown<'a> {
    target: &'a Target,
    plan: &'a AnyPlan,
    order: Order,
    /// The codecs of a cache, if keys and values are not stored as they are.
    stored: Option<Stored>,
}

impl Shown<'_> {
    fn work(&self) -> Work {
        self.plan.as_cpu().map_or_else(|| Work::of(self.plan.problem()), Work::planned)
    }

    /// The plan, if it is for a CPU.
    fn cpu(&self) -> Option<CpuShown<'_>> {
        let (facts, plan) = (self.target.facts.as_cpu()?, self.plan.as_cpu()?);
        Some(CpuShown { device: &self.target.device, facts, plan })
    }

    /// The plan, if it is for a CUDA device.
    fn cuda(&self) -> Option<CudaShown<'_>> {
        let (facts, plan) = (self.target.facts.as_cuda()?, self.plan.as_cuda()?);
        Some(CudaShown { device: &self.target.device, facts, plan })
    }

    /// The plan, if it is for one of Apple's GPUs.
    fn metal(&self) -> Option<MetalShown<'_>> {
        let (facts, plan) = (self.target.facts.as_metal()?, self.plan.as_metal()?);
        Some(MetalShown { device: &self.target.device, facts, plan })
    }

    fn text(&self) -> String {
        let Self { plan, order, .. } = self;
        let problem = plan.problem();
        let desc = problem.desc();
        let work = self.work();
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
            ("backend", format!("{}: {}", plan.kind(), self.target.reason)),
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
        let middle = self.cpu().map(|cpu| cpu.lines()).or_else(|| self.cuda().map(|cuda| cuda.lines()));
        let middle = middle.or_else(|| self.metal().map(|metal| metal.lines()));
        let middle = middle.unwrap_or_default();
        let (prefixes, middle): (Vec<_>, Vec<_>) =
            middle.into_iter().partition(|(name, _)| *name == "prefix");
        let lines = lines.into_iter().chain(middle).chain(ends).chain(prefixes);
        lines.map(|(name, text)| format!("{name:<10} {text}\n")).collect()
    }

    fn json(&self, drawn: Option<(usize, Counts)>) -> serde_json::Value {
        let problem = self.plan.problem();
        let work = self.work();
        let json = self.cpu().map(|cpu| cpu.json()).or_else(|| self.cuda().map(|cuda| cuda.json()));
        let json = json.or_else(|| self.metal().map(|metal| metal.json()));
        let mut json = json.unwrap_or_else(|| json!({}));
        let common = json!({
            "kernel": self.plan.kernel(),
            "backend": self.plan.kind().name(),
            "backend_reason": self.target.reason,
            "device": self.target.device,
            "dims": dims_json(problem.dims()),
            "layout": self.order.name(),
            "dtype": problem.dtype().name(),
            "k_codec": problem.k_codec().name(),
            "v_codec": problem.v_codec().name(),
            "centered": self.stored.is_some_and(|stored| stored.centered),
            "visibility": problem.desc().visibility.to_string(),
            "sequences": problem.sequences().len(),
            "workspace_bytes": self.plan.workspace_bytes(),
            "flops": work.flops,
            "kv_bytes": work.bytes,
            "visible_fraction": visible_fraction(problem),
            "tiles": drawn.map(|(sequence, counts)| json!({
                "sequence": sequence,
                "skip": counts.skip,
                "partial": counts.partial,
                "full": counts.full,
            })),
        });
        if let (Some(json), serde_json::Value::Object(common)) = (json.as_object_mut(), common) {
            json.extend(common);
        }
        json
    }
}

/// A plan for a CUDA device.
struct CudaShown<'a> {
    device: &'a str,
    facts: &'a CudaFacts,
    plan: &'a CudaPlan,
}

impl CudaShown<'_> {
    fn lines(&self) -> Vec<(&'static str, String)> {
        let Self { device, facts, plan } = self;
        let (major, minor) = facts.capability;
        let mut lines = vec![(
            "machine",
            format!(
                "{device}: compute capability {major}.{minor}, {} multiprocessors, {} of shared memory per block, L2 {}",
                facts.multiprocessors,
                report::bytes(facts.shared_per_block as f64),
                report::bytes(facts.l2 as f64)
            ),
        )];
        let gqa_group = plan.problem().dims().gqa_group();
        for kernel in plan.kernels() {
            let tile = kernel.tile();
            let reason = if kernel.is_portable() {
                if plan.options().kernels == KernelChoice::Portable {
                    "asked for".to_owned()
                } else if facts.capability < NATIVE_CAPABILITY {
                    "native kernels are for compute capability 8.0 and later".to_owned()
                } else {
                    format!("native kernels read {} only", plan.problem().dtype())
                }
            } else if tile.warps_split_keys() {
                format!(
                    "sequences with at most 16 rows ({} per GQA group)",
                    report::counted(gqa_group, "query head")
                )
            } else if matches!(kernel, CudaKernel::Sm90(_)) {
                "sequences with more than 16 rows, and some with more than the 64 of a warpgroup".to_owned()
            } else {
                "sequences with more rows than a fragment of the matrix unit has".to_owned()
            };
            lines.push(("kernel", format!("{kernel}: {reason}")));
            let bytes = report::bytes(kernel.shared_bytes() as f64);
            let shared = match tile.stages() {
                Some(stages) => match kernel {
                    CudaKernel::Sm90(kernel) if kernel.key_stages() != stages => {
                        format!(
                            "{} of keys and {stages} of values in shared memory at a time ({bytes})",
                            kernel.key_stages()
                        )
                    }
                    _ => format!("{stages} in shared memory at a time ({bytes})"),
                },
                None => format!("{bytes} of shared memory"),
            };
            let blocks =
                report::counted(tile.resident(), if kernel.is_portable() { "threadgroup" } else { "block" });
            lines.push((
                "tiles",
                format!(
                    "{} rows x {} keys, {shared}, {} threads, {blocks} per multiprocessor",
                    tile.rows(),
                    tile.keys(),
                    tile.threads(),
                ),
            ));
        }
        lines.push(("work tiles", plan.task_count().to_string()));
        let reason = if plan.options().splits.is_some() {
            "asked for"
        } else if plan.kernels().any(|kernel| kernel.is_portable()) && plan.splits() > 1 {
            "as many threadgroups as the device runs at once"
        } else if plan.splits() == 1 {
            "tiles fill the device without splits, or see one block of keys each"
        } else {
            "tiles, or the last ones of a queue, are cut along their keys so that no thread block waits long"
        };
        lines.push(("splits", format!("{} at most: {reason}", plan.splits())));
        lines
    }

    fn json(&self) -> serde_json::Value {
        let Self { facts, plan, .. } = self;
        let kernels = plan.kernels().map(|kernel| {
            let tile = kernel.tile();
            let mut json = json!({
                "kernel": kernel.to_string(),
                "tile_rows": tile.rows(),
                "block_k": tile.keys(),
                "threads": tile.threads(),
                "resident": tile.resident(),
                "shared_bytes": kernel.shared_bytes(),
            });
            if let Some(stages) = tile.stages() {
                json["stages"] = stages.into();
            }
            json
        });
        json!({
            "capability": [facts.capability.0, facts.capability.1],
            "multiprocessors": facts.multiprocessors,
            "l2": facts.l2,
            "kernels": kernels.collect::<Vec<_>>(),
            "tasks": plan.task_count(),
            "splits": plan.splits(),
        })
    }
}

/// A plan for one of Apple's GPUs.
struct MetalShown<'a> {
    device: &'a str,
    facts: &'a MetalFacts,
    plan: &'a MetalPlan,
}

impl MetalShown<'_> {
    fn lines(&self) -> Vec<(&'static str, String)> {
        let Self { device, facts, plan } = self;
        let bytes = |n: usize| report::bytes(n as f64);
        let tile = plan.tile();
        let reason = match (plan.options().splits, plan.splits()) {
            (Some(_), _) => "asked for",
            (None, 1) => "threadgroups fill the device without splits",
            (None, _) => "as many threadgroups as the device runs at once",
        };
        vec![
            (
                "machine",
                format!(
                    "{device}: {} GPU cores, {} threads and {} of memory a threadgroup",
                    facts.cores,
                    facts.threads_per_group,
                    bytes(facts.shared_per_group)
                ),
            ),
            ("kernel", plan.kernel()),
            (
                "tiles",
                format!(
                    "{} rows x {} keys, {} of threadgroup memory, {} threads",
                    tile.rows(),
                    tile.keys(),
                    bytes(plan.threadgroup_bytes()),
                    32 * tile.simds()
                ),
            ),
            ("groups", format!("{} threadgroups", plan.task_count())),
            ("splits", format!("{}: {reason}", plan.splits())),
        ]
    }

    fn json(&self) -> serde_json::Value {
        let Self { facts, plan, .. } = self;
        let tile = plan.tile();
        json!({
            "cores": facts.cores,
            "threads_per_group": facts.threads_per_group,
            "tile_rows": tile.rows(),
            "block_k": tile.keys(),
            "threads": 32 * tile.simds(),
            "shared_bytes": plan.threadgroup_bytes(),
            "tasks": plan.task_count(),
            "splits": plan.splits(),
        })
    }
}

/// A plan for a CPU.
struct CpuShown<'a> {
    device: &'a str,
    facts: &'a CpuFacts,
    plan: &'a CpuPlan,
}

impl CpuShown<'_> {
    fn lines(&self) -> Vec<(&'static str, String)> {
        let Self { device, facts, plan } = self;
        let problem = plan.problem();
        // Tasks hold whole tiles, and so may have room for more rows than there are.
        let of_prefixes = plan.prefixes().iter().map(|prefix| prefix.rows).max().unwrap_or(0);
        let rows = plan.task_rows().min(self.max_rows().max(of_prefixes));
        let mut lines = vec![
            (
                "machine",
                format!(
                    "{device}: {}, {}, L1d {}, L2 {}, L3 {}",
                    facts.isa,
                    report::counted(facts.threads, "thread"),
                    report::bytes(facts.l1d as f64),
                    report::bytes(facts.l2 as f64),
                    report::bytes(facts.l3 as f64)
                ),
            ),
            ("kernel", format!("{}: {}", plan.kernel(), self.kernel_reason())),
            (
                "tiles",
                format!(
                    "{} rows x {} keys; {} ({} per GQA group) share each packed block",
                    plan.tile_rows(),
                    plan.block_k(),
                    report::counted(rows, "row"),
                    report::counted(problem.dims().gqa_group(), "query head")
                ),
            ),
            ("tasks", format!("{} for {}", plan.task_count(), report::counted(plan.threads(), "thread"))),
            ("splits", format!("{}: {}", self.splits_text(), self.splits_reason())),
        ];
        lines.extend(self.prefixes_text().into_iter().map(|line| ("prefix", line)));
        lines
    }

    /// A line for each prefix that is computed once.
    fn prefixes_text(&self) -> Vec<String> {
        let line = |prefix: &PlannedPrefix| {
            let PlannedPrefix { sequences, tokens, rows, splits, .. } = prefix;
            format!(
                "tokens {}..{} of sequences {}..{} read once, by {} of a GQA group; {}",
                tokens.start,
                tokens.end,
                sequences.start,
                sequences.end,
                report::counted(*rows, "row"),
                report::counted(*splits, "split"),
            )
        };
        if !self.plan.problem().desc().prefixes.is_empty() && self.plan.prefixes().is_empty() {
            let keys = self.plan.block_k();
            return vec![format!(
                "none: a prefix needs a whole block of {keys} keys, and two sequences with queries"
            )];
        }
        self.plan.prefixes().iter().map(line).collect()
    }

    /// Rows of a GQA group in the sequence with the most queries.
    fn max_rows(&self) -> usize {
        let problem = self.plan.problem();
        let gqa_group = problem.dims().gqa_group();
        problem.sequences().iter().map(|s| s.q_len * gqa_group).max().unwrap_or(0)
    }

    fn kernel_reason(&self) -> String {
        let (plan, problem) = (self.plan, self.plan.problem());
        let max = self.max_rows();
        let tile = plan.tile_rows();
        let rows = if max <= tile { format!("in one tile of {tile}") } else { format!("in tiles of {tile}") };
        format!(
            "at most {} of a GQA group, {rows}; {} for {} on {}",
            report::counted(max, "row"),
            plan.isa(),
            problem.dtype(),
            self.device
        )
    }

    /// Splits of the sequences' own keys: how many sequences have how many.
    fn splits_text(&self) -> String {
        let mut counts: BTreeMap<usize, usize> = BTreeMap::new();
        for &splits in self.plan.sequence_splits() {
            *counts.entry(splits).or_default() += 1;
        }
        match counts.len() {
            0 | 1 => counts.keys().next().copied().unwrap_or(1).to_string(),
            _ => {
                let part = |(splits, count): (&usize, &usize)| {
                    format!("{splits} of {}", report::counted(*count, "sequence"))
                };
                counts.iter().map(part).collect::<Vec<_>>().join(", ")
            }
        }
    }

    fn splits_reason(&self) -> String {
        let (plan, threads) = (self.plan, self.plan.threads());
        let longest = plan.problem().sequences().iter().map(|s| s.kv_len).max().unwrap_or(0);
        if plan.options().splits.is_some() {
            "asked for".to_owned()
        } else if threads == 1 {
            "one thread".to_owned()
        } else if plan.splits() == 1 && plan.task_count() == 0 {
            "no query rows".to_owned()
        } else if plan.splits() == 1 && longest <= plan.block_k() {
            format!("at most {}, one block of {}", report::counted(longest, "key"), plan.block_k())
        } else if plan.splits() == 1 && plan.idle() > 0.1 {
            format!(
                "threads wait for an estimated {} of the time: rows see one block each, or partial results would take \
                 too much memory",
                report::percent(plan.idle())
            )
        } else {
            format!("threads wait for an estimated {} of the time", report::percent(plan.idle()))
        }
    }

    fn json(&self) -> serde_json::Value {
        let (plan, facts) = (self.plan, &self.facts);
        json!({
            "kernel_reason": self.kernel_reason(),
            "isa": plan.isa().name(),
            "threads": plan.threads(),
            "l1d": facts.l1d,
            "l2": facts.l2,
            "l3": facts.l3,
            "tile_rows": plan.tile_rows(),
            "block_k": plan.block_k(),
            "task_rows": plan.task_rows(),
            "tasks": plan.task_count(),
            "splits": plan.splits(),
            "splits_reason": self.splits_reason(),
            "sequence_splits": plan.sequence_splits(),
            "prefixes": plan.prefixes().iter().map(|prefix| json!({
                "sequences": [prefix.sequences.start, prefix.sequences.end],
                "tokens": [prefix.tokens.start, prefix.tokens.end],
                "rows": prefix.rows,
                "splits": prefix.splits,
            })).collect::<Vec<_>>(),
            "idle": plan.idle(),
        })
    }
}

/// Visible pairs relative to all pairs of queries and keys; 0 if there are none.
fn visible_fraction(problem: &Problem) -> f64 {
    let all: f64 = problem.sequences().iter().map(|s| s.q_len as f64 * s.kv_len as f64).sum();
    if all == 0.0 { 0.0 } else { problem.visible_pairs() as f64 / all }
}
