//! The command line as types.

use crate::failure::Failure;
use crate::nearest;
use Backend::{Auto, Cpu, Cuda, Reference, Simulator};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::error::{ContextKind, ContextValue};
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use flashtile::kernels::{Variant, VariantOption};
use flashtile::plan::Isa;
use flashtile::{Codec, Dtype, KernelChoice, QOffset, Visibility};
use std::ffi::OsStr;
use std::num::NonZero;
use std::ops::Range;
use std::path::PathBuf;

/// Fused attention on safetensors files, and what this machine makes of it
#[derive(Debug, Parser)]
#[command(name = "flashtile", version, arg_required_else_help = false, max_term_width = 110)]
#[command(after_help = "Example:\n  flashtile run qkv.safetensors -o out.safetensors --causal\n\n\
    Exit status: 0, 1 where a check or a benchmark's answer fails, 2 for bad input.")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Run(RunArgs),
    Check(CheckArgs),
    Plan(PlanArgs),
    Kv(KvArgs),
    Info(InfoArgs),
    Bench(BenchArgs),
    /// List the kernels of the kernel language, and print them as Metal, CUDA or Rust
    #[command(subcommand)]
    Kernels(KernelsCommand),
}

/// What `run --help` says of files. Not a doc comment: brackets and line breaks are meant as they are.
const RUN_HELP: &str = "\
Compute attention of the tensors in a safetensors file

Reads
  q, k, v        F32, F16 or BF16, [batch, heads, rows, dim] or as --layout says; with
                 cu_seqlens packed as [total, heads, dim]
and, where present,
  mask           rank 4, broadcastable to [batch, heads, queries, keys]; BOOL, where true
                 means visible, or a float type, added to the scores
  alibi_slopes   F32 [heads]; adds - slope[h] * |p - j| to the score of key j, p being the
                 key position of the query (--q-offset)
  sinks          F32 [heads]; logits that join the denominator of the softmax only
  kv_lens        I64 or I32 [batch]; keys of each batch entry, later rows are not read
  cu_seqlens_q, cu_seqlens_k
                 I64 or I32 [sequences + 1]; first row of each packed sequence, then the end

With --prefix NAME these are the tensors of one layer: NAME.q, NAME.k, NAME.v.

With --backend simulator, which builds with the cargo feature simulator have, the kernels of the
kernel language run on this machine, every access checked: ten to a hundred thousand scores a second (query heads * queries * keys), 600000 at
most, of head dimension 64 or 128, the same for v, keys and values as they are or in codecs:
int8, tq4, or int8 keys with tq5 values.

Writes out (dtype and layout of q) and lse (F32 [batch, heads, queries], packed [heads, total]).
Names that are not understood are noted and not read; names that look like misspelt ones are refused.";

/// Compute attention of the tensors in a safetensors file
#[derive(Debug, Args)]
#[command(
    long_about = RUN_HELP,
    after_help = "Examples:\n  flashtile run qkv.safetensors -o out.safetensors --causal --q-offset bottom-right\n  \
        flashtile run examples/data/small_f16.safetensors -o out.safetensors --backend simulator"
)]
pub(crate) struct RunArgs {
    /// Safetensors file to read
    #[arg(value_name = "IN")]
    pub(crate) input: PathBuf,
    /// Safetensors file to write; it appears whole or not at all
    #[arg(short, long, value_name = "OUT")]
    pub(crate) output: PathBuf,
    /// What computes
    #[arg(long, value_parser = backend(&[Auto, Cpu, Cuda, Reference, Simulator]), default_value = "auto")]
    pub(crate) backend: Backend,
    /// Kernels of a CUDA device; auto is those written for it, and the portable ones on devices before compute capability 8.0
    #[arg(long, value_enum, default_value_t = Kernels::Auto)]
    pub(crate) kernels: Kernels,
    #[command(flatten)]
    pub(crate) reading: Reading,
    #[command(flatten)]
    pub(crate) semantics: Semantics,
    /// Refuse a file with tensors that are not understood, instead of noting them
    #[arg(long)]
    pub(crate) strict: bool,
    #[command(flatten)]
    pub(crate) storage: Storage,
    /// Pieces of at least one block of keys into which the keys are divided for parallel work; the result does not
    /// depend on it
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) splits: Option<usize>,
    /// Gradients, which this build does not compute
    #[arg(long, hide = true)]
    pub(crate) grad: bool,
    #[command(flatten)]
    pub(crate) cpu: CpuArgs,
    /// Print one JSON object instead of a line
    #[arg(long)]
    pub(crate) json: bool,
}

/// Run the conformance catalogue on every backend and instruction set of this machine
///
/// Every case is compared with the f64 oracle. The table shows the worst errors, each as the part of its own case's limit
/// that it takes: limits widen with large scores and many keys. Exit status 1 where a case fails.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  flashtile check --isa avx2\n  flashtile check --backend cuda --filter decode\n  \
    flashtile check --backend cuda --kernels portable"
)]
pub(crate) struct CheckArgs {
    /// Run this backend alone; auto is every one of this machine but the simulator
    #[arg(long, value_parser = backend(&[Auto, Cpu, Cuda, Simulator]), default_value = "auto")]
    pub(crate) backend: Backend,
    /// Kernels of a CUDA device; auto is those written for it, and the portable ones on devices before compute capability 8.0
    #[arg(long, value_enum, default_value_t = Kernels::Auto)]
    pub(crate) kernels: Kernels,
    /// Run this instruction set alone: portable, avx2, avx512, avx512vnni, avx512bf16 or amx; default every one of this machine
    #[arg(long, value_name = "ISA", value_parser = isa)]
    pub(crate) isa: Option<Isa>,
    /// Threads of the cpu backend, at most those of this machine; default all
    #[arg(long, value_name = "N", value_parser = threads)]
    pub(crate) threads: Option<usize>,
    /// Only cases whose name contains one of these
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub(crate) filter: Vec<String>,
    /// The random cases of these seeds as well
    #[arg(long, value_name = "FIRST..END", value_parser = seeds)]
    pub(crate) seeds: Option<Range<u64>>,
    /// Only this of N equal shares of the cases, for as many processes at once: 0/N to N-1/N
    #[arg(long, value_name = "I/N", value_parser = shard)]
    pub(crate) shard: Option<Shard>,
    /// End each tensor's allocation with the tensor, so that a memory checker sees a read past it; default between guard
    /// bands
    #[arg(long)]
    pub(crate) exact_memory: bool,
    /// Print JSON lines, one for each case and instruction set
    #[arg(long)]
    pub(crate) json: bool,
}

/// Show what would run for a problem, why, and which tiles it visits
///
/// The problem is that of a file, or one described by options. Nothing is computed, so problems and machines may be larger
/// than this one.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  flashtile plan --q-len 4096 --head-dim 128 --causal --window 1023\n  \
    flashtile plan qkv.safetensors --causal --device avx512-64core --svg tiles.svg\n  \
    flashtile plan --cached 1:8192x64 --heads 32 --kv-heads 8 --head-dim 128 --dtype bf16 --causal --device h200")]
pub(crate) struct PlanArgs {
    /// Safetensors file whose problem to plan, instead of a shape
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
    /// Refuse a file with tensors that are not understood, instead of noting them
    #[arg(long)]
    pub(crate) strict: bool,
    /// Machine to plan for, instead of this one: a CPU or a CUDA device
    #[arg(long, value_name = "NAME", conflicts_with_all = ["isa", "threads", "backend"])]
    pub(crate) device: Option<String>,
    /// What would compute; auto is the cpu
    #[arg(long, value_parser = backend(&[Auto, Cpu, Cuda]), default_value = "auto")]
    pub(crate) backend: Backend,
    /// Kernels of a CUDA device; auto is those written for it, and the portable ones on devices before compute capability 8.0
    #[arg(long, value_enum, default_value_t = Kernels::Auto)]
    pub(crate) kernels: Kernels,
    #[command(flatten)]
    pub(crate) cpu: CpuArgs,
    /// Pieces of at least one block of keys into which the keys are divided for parallel work
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) splits: Option<usize>,
    /// Sequence whose tiles to draw, counted from 0
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) sequence: usize,
    /// Write the picture of the tiles to this file as well
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// What `kv --help` says of files.
const KV_HELP: &str = "\
Report what the codecs of KV caches would do to keys and values, and recommend a pair of them

Reads every pair of tensors whose names differ in their last component alone, k and v (or key and
value): layer.0.k and layer.0.v, k and v. Of F32, F16 or BF16, [batch, heads, rows, dim] or as
--layout says. And, where present beside them,
  q              queries, [batch, query heads, rows, dim]; a multiple of the heads of k
  kv_lens        I64 or I32 [batch]; keys of each batch entry, later rows are not read

For each codec, with and without the mean of the keys taken out (centred; the mean is that of the
first 256 keys, as a cache learns it):
  bits           of an element, scales included
  k error, v error
                 mean square error over mean square
  logit rmse     root mean square error of the logits, without what all keys of a query share
  kl             mean divergence of the weights from those of the file, in nats; worst kl is that
                 of the worst head
  nrmse          root mean square error of the output over its root mean square
The last three need queries. The recommendation is the cheapest pair of codecs, one of keys and
one of values, whose kl and nrmse are within the gate in every pair of tensors.

Exit status 2 where tensors have no answer: a NaN, an infinity, a norm above 8192, shapes that do
not fit. The others are reported.";

/// Report what the codecs of KV caches would do to keys and values, and recommend a pair of them
#[derive(Debug, Args)]
#[command(
    long_about = KV_HELP,
    after_help = "Examples:\n  flashtile kv examples/data/minilm_all_layers_f16.safetensors\n  \
    flashtile kv kv.safetensors --causal --max-kl 1e-3 --svg kv.svg --per-layer"
)]
pub(crate) struct KvArgs {
    /// Safetensors file to read
    #[arg(value_name = "FILE")]
    pub(crate) input: PathBuf,
    /// Axes of the tensors in the file; default bhsd
    #[arg(long, value_enum)]
    pub(crate) layout: Option<Layout>,
    #[command(flatten)]
    pub(crate) semantics: Semantics,
    /// Query rows of each query head and sequence to look at, evenly spaced
    #[arg(long, value_name = "N", value_parser = count, default_value_t = 64)]
    pub(crate) rows: usize,
    /// Take keys for the queries where the file has none
    #[arg(long)]
    pub(crate) keys_as_queries: bool,
    /// Codecs to compare; default all of any head dimension but f32
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub(crate) codecs: Vec<Codec>,
    /// Largest mean divergence of the weights of a recommended pair, in nats
    #[arg(long, value_name = "X", value_parser = positive, default_value_t = 1e-4, allow_hyphen_values = true)]
    pub(crate) max_kl: f64,
    /// Largest error of the output of a recommended pair
    #[arg(long, value_name = "X", value_parser = positive, default_value_t = 0.055, allow_hyphen_values = true)]
    pub(crate) max_nrmse: f64,
    /// Show every codec for each pair of tensors
    #[arg(long)]
    pub(crate) per_layer: bool,
    /// Refuse a file with tensors that are not understood, instead of noting them
    #[arg(long)]
    pub(crate) strict: bool,
    /// Threads, at most those of this machine; default all
    #[arg(long, value_name = "N", value_parser = threads)]
    pub(crate) threads: Option<usize>,
    /// Write a plot of KL and NRMSE against bits to this file
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// Show version, instruction sets, caches, measured limits and backends
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  flashtile info --json")]
pub(crate) struct InfoArgs {
    /// Threads whose limits to measure, at most those of this machine; default all
    #[arg(long, value_name = "N", value_parser = threads)]
    pub(crate) threads: Option<usize>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// Measure attention against the limits of this machine
///
/// Limits (FMA peak, read bandwidth) are measured before and after the kernels, and the larger is used. Every row first
/// checks its answer on a few query rows against the f64 oracle. Times are medians.
///
/// Kernels (the group kernels) are run on the simulator first, where the build has it, which counts what they read and write, in small;
/// on CUDA they are then measured against a copy. Their answers are those of computations in f64. simd/thread, per_thread.simd_operations in JSON, is the
/// number of SIMD operations that each thread takes part in.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  flashtile bench prefill --dtype f32,bf16 --head-dim 128 --seq 2048,8192 --causal\n  \
    flashtile bench all --quick --json-lines rows.jsonl --svg rows.svg\n  \
    flashtile bench kernels --kernel decode --backend cuda"
)]
pub(crate) struct BenchArgs {
    /// Rows to measure
    #[arg(value_enum, default_value_t = Group::All)]
    pub(crate) group: Group,
    /// What computes; auto is the cpu, for kernels the simulator, which is of kernels alone
    #[arg(long, value_parser = backend(&[Auto, Cpu, Cuda, Simulator]), default_value = "auto")]
    pub(crate) backend: Backend,
    /// Of the group kernels, this kernel alone: a name of `flashtile kernels list`
    #[arg(long, value_name = "NAME")]
    pub(crate) kernel: Option<String>,
    /// Kernels of a CUDA device; auto is those written for it, and the portable ones on devices before compute capability 8.0
    #[arg(long, value_enum, default_value_t = Kernels::Auto)]
    pub(crate) kernels: Kernels,
    /// Tile of every CUDA kernel, to try another than the planner's: WARPS_Q,WARPS_K,FRAGMENTS,KEYS,STAGES,RESIDENT,Q_IN_REGISTERS; of
    /// portable ones ROWS,KEYS,SIMDS,RESIDENT
    #[arg(long, value_name = "NUMBERS", value_parser = crate::gpu::tile, hide = true)]
    pub(crate) tile: Option<crate::gpu::Tile>,
    #[command(flatten)]
    pub(crate) cpu: CpuArgs,
    /// Dtypes; default f32,f16,bf16
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = dtype)]
    pub(crate) dtype: Vec<Dtype>,
    /// Head dimensions; default 64,128 (decode also 256)
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = count)]
    pub(crate) head_dim: Vec<usize>,
    /// Sequence lengths (decode: numbers of cached keys); default 512 to 4096 (decode 1024 to 32768); visibility has its own.
    /// LOW..HIGH spreads those of a batch with a --cache over the range
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = lengths)]
    pub(crate) seq: Vec<Lengths>,
    /// Elements of a v vector; default as many as of k
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) value_dim: Option<usize>,
    /// Query heads; default 8 (decode 32, 16 at head dimension 256)
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) heads: Option<usize>,
    /// Key/value heads; default as many as query heads (decode 8, 2 at head dimension 256)
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = count)]
    pub(crate) kv_heads: Vec<usize>,
    /// Batch entries
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = count, default_value = "1")]
    pub(crate) batch: Vec<usize>,
    /// Where decode rows have their keys and values; a ring keeps as many as it has keys, of sequences half as long again
    #[arg(long, value_name = "LIST", value_enum, value_delimiter = ',', default_value = "dense")]
    pub(crate) cache: Vec<CacheKind>,
    /// Tokens of a page of a paged cache, whose pages lie in random order; default 16
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) page: Option<usize>,
    /// How keys and values of a --cache are stored, each CODEC or K_CODEC+V_CODEC (f32, f16, bf16, fp8, int8, tq6 to tq2; of 256 or 512
    /// elements mlx-tq8, -tq6, -tq5 and -tq4, all but the last also with -plain behind); rows take turns, so that their ratio is of one
    /// time; default the dtype
    #[arg(long, value_name = "LIST", value_parser = codecs, value_delimiter = ',')]
    pub(crate) codec: Vec<[Codec; 2]>,
    /// Tokens that the sequences of a paged batch have in common, in whole pages; whole blocks of 256 are read once, and for
    /// comparison by each
    #[arg(long, value_name = "TOKENS", value_parser = count)]
    pub(crate) shared: Option<usize>,
    /// Causal rows only; default with and without for prefill
    #[arg(long)]
    pub(crate) causal: bool,
    /// Keys visible to the left and right of each query
    #[arg(long, value_name = "LEFT[,RIGHT]", value_parser = window, allow_hyphen_values = true)]
    pub(crate) window: Option<Visibility>,
    /// Seconds to measure each row for; default 0.3, with --quick 0.05
    #[arg(long, value_name = "SECONDS", value_parser = duration)]
    pub(crate) min_time: Option<f64>,
    /// Few rows, short measurements
    #[arg(long, conflicts_with = "full")]
    pub(crate) quick: bool,
    /// Head dimensions 32 and 256 as well
    #[arg(long)]
    pub(crate) full: bool,
    /// Print JSON lines instead of tables
    #[arg(long)]
    pub(crate) json: bool,
    /// Write JSON lines to this file
    #[arg(long, value_name = "FILE")]
    pub(crate) json_lines: Option<PathBuf>,
    /// Write a plot of the fraction of the limit against the length to this file
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
    /// Compare with the rows of this file: JSON lines {peer, kind, dtype, d, h, hkv, b, s, causal, seconds}
    #[arg(long, value_name = "FILE")]
    pub(crate) vs: Option<PathBuf>,
}

/// What is done with the kernels of the kernel language.
#[derive(Debug, Subcommand)]
#[command(after_help = "Examples:\n  flashtile kernels list\n  \
    flashtile kernels print decode --target msl --head-dim 64 --dtype bf16")]
pub(crate) enum KernelsCommand {
    List(ListArgs),
    Print(PrintArgs),
}

/// List the kernels: where they are, what they do, what they take
///
/// Threads and bytes of shared memory are those of a group, over the instances of --instances.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  flashtile kernels list\n  flashtile kernels list merge\n  \
    flashtile kernels list hadamard --instances")]
pub(crate) struct ListArgs {
    /// Everything that is known of this kernel alone
    #[arg(value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// List instances, kernels whose generics are fixed, instead of kernels
    #[arg(long)]
    pub(crate) instances: bool,
    /// Print JSON lines
    #[arg(long)]
    pub(crate) json: bool,
}

/// Print the whole text of an instance: all that a compiler has to be given
///
/// An instance is chosen by its name, of `flashtile kernels list --instances` or as `bench kernels` and `check --json` say it, or by
/// its kernel and options. Options that are not given have the values of a bf16 problem of head dimension 128 whose keys and values are stored as they are.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  flashtile kernels print decode --target cuda --dtype bf16 --k-codec int8 --v-codec tq5\n  \
    flashtile kernels print classify --target msl\n  \
    flashtile kernels print --all --target msl -o texts"
)]
pub(crate) struct PrintArgs {
    /// Kernel or instance
    #[arg(value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Language
    #[arg(long, value_enum)]
    pub(crate) target: TextTarget,
    #[command(flatten)]
    pub(crate) variant: VariantArgs,
    /// Every listed instance, of the kernel NAME where one is given
    #[arg(long)]
    pub(crate) all: bool,
    /// File to write instead of standard output, with --all a folder for a file an instance; files appear whole or not at all
    #[arg(short, long, value_name = "PATH")]
    pub(crate) output: Option<PathBuf>,
}

/// What chooses an instance of a kernel.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct VariantArgs {
    /// Elements of a q or k vector
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) head_dim: Option<usize>,
    /// Elements of a v vector; default as many as of k
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) value_dim: Option<usize>,
    /// Element type of q and out: f32, f16 or bf16
    #[arg(long, value_name = "DTYPE", value_parser = dtype)]
    pub(crate) dtype: Option<Dtype>,
    /// How keys are stored: one of the codecs of `flashtile run`; default the dtype
    #[arg(long, value_name = "CODEC")]
    pub(crate) k_codec: Option<Codec>,
    /// How values are stored; default the dtype
    #[arg(long, value_name = "CODEC")]
    pub(crate) v_codec: Option<Codec>,
    /// Keys and values are found through a table of pages
    #[arg(long)]
    pub(crate) paged: bool,
}

impl VariantArgs {
    /// The options that were given.
    pub(crate) fn given(&self) -> Vec<VariantOption> {
        let given = [
            (VariantOption::HeadDim, self.head_dim.is_some()),
            (VariantOption::ValueDim, self.value_dim.is_some()),
            (VariantOption::Dtype, self.dtype.is_some()),
            (VariantOption::KCodec, self.k_codec.is_some()),
            (VariantOption::VCodec, self.v_codec.is_some()),
            (VariantOption::Paged, self.paged),
        ];
        given.into_iter().filter(|(_, given)| *given).map(|(option, _)| option).collect()
    }

    /// What they choose, with what they leave out.
    pub(crate) fn variant(&self) -> Variant {
        let dtype = self.dtype.unwrap_or(Dtype::BF16);
        let head_dim = self.head_dim.unwrap_or(128);
        Variant {
            dtype,
            head_dim,
            value_dim: self.value_dim.unwrap_or(head_dim),
            k_codec: self.k_codec.unwrap_or(Codec::of(dtype)),
            v_codec: self.v_codec.unwrap_or(Codec::of(dtype)),
            paged: self.paged,
        }
    }
}

/// A language that kernels are printed in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TextTarget {
    /// Metal Shading Language
    #[value(alias = "metal")]
    Msl,
    /// CUDA C++
    Cuda,
    /// Rust, as it was written
    Rust,
}

/// How tensors are read from a file.
#[derive(Debug, Args)]
pub(crate) struct Reading {
    /// Axes of q, k and v in the file; default bhsd
    #[arg(long, value_enum)]
    pub(crate) layout: Option<Layout>,
    /// Layer of the file whose tensors to read, by what their names have before q, k and v (or query, key and value): layer.3 for
    /// layer.3.q; default the tensors without a prefix. Others of its tensors have the prefix too (layer.3.mask), or are of all layers
    /// without one
    #[arg(long, value_name = "NAME", value_parser = prefix)]
    pub(crate) prefix: Option<String>,
    /// Element type of the problem; tensors of a file are converted to it first
    #[arg(long, value_name = "DTYPE", value_parser = dtype)]
    pub(crate) dtype: Option<Dtype>,
}

/// What is computed, beside what the tensors say.
#[derive(Debug, Args)]
pub(crate) struct Semantics {
    /// Each query sees keys at or before its own position
    #[arg(long)]
    pub(crate) causal: bool,
    /// Key position of the first query: top-left is 0, bottom-right puts the last query at the last key
    #[arg(long, value_name = "top-left|bottom-right|N", value_parser = q_offset, allow_hyphen_values = true)]
    pub(crate) q_offset: Option<QOffset>,
    /// Keys visible to the left and right of each query, itself not counted; -1 or absent is unbounded
    #[arg(long, value_name = "LEFT[,RIGHT]", value_parser = window, allow_hyphen_values = true)]
    pub(crate) window: Option<Visibility>,
    /// Multiplier of q . k; default 1 / sqrt(head_dim)
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    pub(crate) scale: Option<f32>,
    /// Cap of the scaled scores: c * tanh(x / c)
    #[arg(long, value_name = "C", allow_hyphen_values = true)]
    pub(crate) softcap: Option<f32>,
}

impl Semantics {
    pub(crate) fn visibility(&self) -> Visibility {
        let band = self.window.unwrap_or_default();
        if self.causal { band.and(Visibility::causal()) } else { band }
    }
}

/// How a cache stores keys and values.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct Storage {
    /// Codec of the keys, which are stored in a cache and attended to there: f32, f16, bf16, fp8, int8, tq6 to tq2, or one of
    /// mlx-native's, mlx-tq8 to mlx-tq4; default as they are. Of the cpu and reference backends, some also of the simulator
    #[arg(long, value_name = "CODEC")]
    pub(crate) k_codec: Option<Codec>,
    /// Codec of the values, as --k-codec
    #[arg(long, value_name = "CODEC")]
    pub(crate) v_codec: Option<Codec>,
    /// Take the mean of the first 256 keys out of keys that are quantized: exact but for rounding, and needed where keys have a large
    /// constant part. The plan is the same with and without
    #[arg(long)]
    pub(crate) centre: bool,
}

/// A problem given by options.
#[derive(Debug, Args)]
pub(crate) struct Shape {
    /// Batch entries
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) batch: usize,
    /// Query heads
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub(crate) heads: usize,
    /// Key/value heads; default as many as query heads
    #[arg(long, value_name = "N")]
    pub(crate) kv_heads: Option<usize>,
    /// Query rows
    #[arg(long, value_name = "N", default_value_t = 2048)]
    pub(crate) q_len: usize,
    /// Keys; default as many as query rows
    #[arg(long, value_name = "N")]
    pub(crate) kv_len: Option<usize>,
    /// Elements of a q or k vector
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub(crate) head_dim: usize,
    /// Elements of a v vector; default as many as of k
    #[arg(long, value_name = "N")]
    pub(crate) value_dim: Option<usize>,
    /// With ALiBi slopes
    #[arg(long)]
    pub(crate) alibi: bool,
    /// With attention sinks
    #[arg(long)]
    pub(crate) sinks: bool,
    /// Keys of each batch entry
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub(crate) kv_lens: Vec<usize>,
    /// Sequences of a cache instead of a batch, each QUERIES:LENGTH or so many of them, QUERIES:LENGTHxTIMES; the length
    /// counts the queries of this step
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = cached,
          conflicts_with_all = ["batch", "q_len", "kv_len", "kv_lens"])]
    pub(crate) cached: Vec<Cached>,
    /// Tokens that all sequences of the cache have in common, in the same pages; whole blocks of 256 are read once
    #[arg(long, value_name = "TOKENS", requires = "cached")]
    pub(crate) shared: Option<usize>,
}

/// Restrictions of the cpu backend.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct CpuArgs {
    /// Instruction set of the cpu backend: portable, avx2, avx512, avx512vnni, avx512bf16 or amx; default the best of this machine
    #[arg(long, value_name = "ISA", value_parser = isa)]
    pub(crate) isa: Option<Isa>,
    /// Threads of the cpu backend, at most those of this machine; default all
    #[arg(long, value_name = "N", value_parser = threads)]
    pub(crate) threads: Option<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Backend {
    /// The fastest of this machine for the problem
    Auto,
    /// Kernels of this processor
    Cpu,
    /// Kernels of the first CUDA device
    Cuda,
    /// Kernels of Apple's GPUs, which this build has not
    Metal,
    /// The definition in f64, one thread
    Reference,
    /// Kernels of the kernel language on the host, every access checked: small problems; of builds with the cargo feature simulator
    Simulator,
}

/// Backends by their names. Help shows those that a command takes; the command refuses the others with its reason.
fn backend(shown: &'static [Backend]) -> impl TypedValueParser<Value = Backend> {
    let value =
        |backend: &Backend| backend.to_possible_value().map(|value| value.hide(!shown.contains(backend)));
    PossibleValuesParser::new(Backend::value_variants().iter().filter_map(value))
        .try_map(|name| Backend::from_str(&name, false))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kernels {
    /// The fastest of the device
    Auto,
    /// Those written for it
    Native,
    /// Those of the kernel language
    Portable,
}

impl From<Kernels> for KernelChoice {
    fn from(kernels: Kernels) -> Self {
        match kernels {
            Kernels::Auto => Self::Auto,
            Kernels::Native => Self::Native,
            Kernels::Portable => Self::Portable,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Layout {
    /// Batch, heads, rows, dim
    Bhsd,
    /// Batch, rows, heads, dim
    Bshd,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Group {
    /// As many queries as keys
    Prefill,
    /// One query, many cached keys
    Decode,
    /// Time against visible area: causal, window
    Visibility,
    /// Kernels of the kernel language, each by itself: what they move, and on CUDA their times
    Kernels,
    /// All of them but kernels
    All,
}

/// Where the keys and values of a decode row lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum CacheKind {
    /// Dense tensors
    Dense,
    /// A slot for each sequence
    Contiguous,
    /// Pages found through a block table
    Paged,
    /// A slot for the last tokens of each sequence
    Ring,
}

/// Lengths of the sequences of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Lengths {
    pub(crate) low: usize,
    pub(crate) high: usize,
}

/// One sequence of a cache, or several alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cached {
    /// Queries of this step.
    pub(crate) queries: usize,
    /// Tokens, those of this step included.
    pub(crate) len: usize,
    pub(crate) times: usize,
}

fn lengths(text: &str) -> Result<Lengths, String> {
    let (low, high) = text.split_once("..").unwrap_or((text, text));
    match (count(low), count(high)) {
        (Ok(low), Ok(high)) if low <= high => Ok(Lengths { low, high }),
        _ => Err("expected a whole number, 1 or more, or LOW..HIGH".to_owned()),
    }
}

fn cached(text: &str) -> Result<Cached, String> {
    let parse = || {
        let (sequence, times) = text.split_once('x').unwrap_or((text, "1"));
        let (queries, len) = sequence.split_once(':')?;
        let [queries, len, times] = [queries, len, times].map(|n| n.parse().ok());
        Some(Cached { queries: queries?, len: len?, times: times? })
    };
    parse().ok_or_else(|| "expected QUERIES:LENGTH or QUERIES:LENGTHxTIMES, whole numbers".to_owned())
}

fn prefix(text: &str) -> Result<String, String> {
    match text {
        "" => Err("expected what names have before q, k and v, such as layer.3".to_owned()),
        prefix => Ok(prefix.to_owned()),
    }
}

fn dtype(text: &str) -> Result<Dtype, String> {
    let all = [Dtype::F32, Dtype::F16, Dtype::BF16];
    all.into_iter().find(|d| d.name() == text).ok_or_else(|| "expected f32, f16 or bf16".to_owned())
}

fn isa(text: &str) -> Result<Isa, String> {
    let known = Isa::ALL.into_iter().find(|isa| isa.name() == text);
    known.ok_or_else(|| format!("expected one of {}", Isa::ALL.map(Isa::name).join(", ")))
}

fn q_offset(text: &str) -> Result<QOffset, String> {
    match text {
        "top-left" => Ok(QOffset::TopLeft),
        "bottom-right" => Ok(QOffset::BottomRight),
        number => number
            .parse()
            .map(QOffset::At)
            .map_err(|_| "expected top-left, bottom-right or a whole number".to_owned()),
    }
}

fn window(text: &str) -> Result<Visibility, String> {
    let side = |text: &str| match text.trim() {
        "-1" => Ok(None),
        number => number
            .parse::<usize>()
            .map(Some)
            .map_err(|_| "expected LEFT or LEFT,RIGHT, each a number of keys or -1 for unbounded".to_owned()),
    };
    match text.split_once(',') {
        None => Ok(Visibility::window(side(text)?, None)),
        Some((left, right)) => Ok(Visibility::window(side(left)?, side(right)?)),
    }
}

/// Most random cases of a run: they are described before the first of them runs.
const MAX_SEEDS: u64 = 100_000;

fn seeds(text: &str) -> Result<Range<u64>, String> {
    let range = text.split_once("..").and_then(|(first, end)| Some(first.parse().ok()?..end.parse().ok()?));
    range
        .filter(|r: &Range<u64>| r.start < r.end && r.end - r.start <= MAX_SEEDS)
        .ok_or_else(|| format!("expected FIRST..END, two whole numbers, at most {MAX_SEEDS} seeds"))
}

/// Every `of`-th case, from number `index` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shard {
    pub(crate) index: usize,
    pub(crate) of: usize,
}

fn shard(text: &str) -> Result<Shard, String> {
    let numbers = text.split_once('/').and_then(|(index, of)| Some((index.parse().ok()?, of.parse().ok()?)));
    let shard = numbers.map(|(index, of)| Shard { index, of }).filter(|shard| shard.index < shard.of);
    shard.ok_or_else(|| "expected I/N, two whole numbers, I less than N".to_owned())
}

fn count(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|&n| n > 0).ok_or_else(|| "expected a whole number, 1 or more".to_owned())
}

fn positive(text: &str) -> Result<f64, String> {
    let inside = |x: &f64| x.is_finite() && *x > 0.0;
    text.parse().ok().filter(inside).ok_or_else(|| "expected a finite number above 0".to_owned())
}

/// More threads than the machine runs at once only wait for each other, and no measurement means anything.
fn threads(text: &str) -> Result<usize, String> {
    let available = std::thread::available_parallelism().map_or(1, NonZero::get);
    let inside = |n: &usize| (1..=available).contains(n);
    let expected = || format!("expected a whole number, 1 to {available}, the threads of this machine");
    text.parse().ok().filter(inside).ok_or_else(expected)
}

/// Longest time for which a row is measured, in seconds.
const MAX_TIME: f64 = 3600.0;

fn duration(text: &str) -> Result<f64, String> {
    let inside = |x: &f64| *x > 0.0 && *x <= MAX_TIME;
    text.parse()
        .ok()
        .filter(inside)
        .ok_or_else(|| format!("expected seconds, more than 0 and at most {MAX_TIME}"))
}

/// The parser's message of a command line without usage: one line.
pub(crate) fn one_line<S: AsRef<OsStr>>(error: &clap::Error, line: &[S]) -> Failure {
    let text = error.to_string();
    let lines: Vec<&str> = text.lines().take_while(|line| !line.trim().is_empty()).map(str::trim).collect();
    let message = lines.join(" ");
    let message = message.strip_prefix("error: ").unwrap_or(&message);
    match error.get(ContextKind::InvalidSubcommand) {
        Some(ContextValue::String(given)) => {
            Failure::new(format_args!("{message}, {}; see --help", subcommand(given, line)))
        }
        _ => Failure::new(format_args!("{message}; see --help")),
    }
}

/// Which subcommand may have been meant by `given`, after those that a command line begins with.
fn subcommand<S: AsRef<OsStr>>(given: &str, line: &[S]) -> String {
    let root = Cli::command();
    let mut command = &root;
    for name in line.iter().skip(1) {
        let Some(next) = command.find_subcommand(name) else { break };
        command = next;
    }
    nearest::meant(given, command.get_subcommands().map(clap::Command::get_name))
}

/// How keys and values are stored: one codec for both, or two.
fn codecs(text: &str) -> Result<[Codec; 2], String> {
    let (k, v) = text.split_once('+').unwrap_or((text, text));
    Ok([k.parse()?, v.parse()?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn misspelt_subcommands() {
        let cases = [
            (vec!["flashtile", "kernel", "list"], "did you mean kernels; see --help"),
            (vec!["flashtile", "kernels", "lst"], "did you mean list; see --help"),
            (vec!["flashtile", "jump"], "expected "),
        ];
        for (line, why) in cases {
            let shown = one_line(&Cli::try_parse_from(&line).unwrap_err(), &line).to_string();
            assert!(shown.starts_with("unrecognized subcommand ") && shown.contains(why), "{shown}");
        }
    }

    #[test]
    fn windows_and_offsets() {
        assert_eq!(window("4").unwrap(), Visibility::window(Some(4), None));
        assert_eq!(window("-1,0").unwrap(), Visibility::causal());
        assert_eq!(window("4,5").unwrap(), Visibility::window(Some(4), Some(5)));
        assert!(["", "a", "1,2,3", "-2", "1,", "1.5"].iter().all(|text| window(text).is_err()));
        assert_eq!(q_offset("-7").unwrap(), QOffset::At(-7));
        assert_eq!(q_offset("bottom-right").unwrap(), QOffset::BottomRight);
        assert!(q_offset("bottom").is_err());
    }

    #[test]
    fn the_limit_of_the_simulator_is_said() {
        assert!(RUN_HELP.contains(&format!(" {} ", crate::run::MOST_SIMULATED)));
    }

    #[test]
    fn ranges_of_seeds() {
        assert_eq!(seeds("3..8").unwrap(), 3..8);
        assert!(
            ["", "3", "3..", "..3", "8..3", "3..3", "-1..3", "0..100001"].iter().all(|t| seeds(t).is_err())
        );
    }

    #[test]
    fn shards() {
        assert_eq!(shard("0/1").unwrap(), Shard { index: 0, of: 1 });
        assert_eq!(shard("2/3").unwrap(), Shard { index: 2, of: 3 });
        assert!(["", "1", "1/", "/2", "1/1", "3/2", "0/0", "-1/2"].iter().all(|t| shard(t).is_err()));
    }

    #[test]
    fn errors_are_one_line() {
        let lines = [
            vec!["flashtile"],
            vec!["flashtile", "jump"],
            vec!["flashtile", "run"],
            vec!["flashtile", "run", "a", "-o", "b", "--layout", "x\n\ny"],
            vec!["flashtile", "run", "a", "-o", "b", "--dtype", "f64"],
            vec!["flashtile", "plan", "a", "--batch", "2"],
        ];
        for line in lines {
            let shown = one_line(&Cli::try_parse_from(&line).unwrap_err(), &line).to_string();
            assert!(
                !shown.contains('\n') && shown.ends_with("; see --help") && shown.len() > 20,
                "{line:?}: {shown}"
            );
        }
    }
}
