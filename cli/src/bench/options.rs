//! The options of `flashtile bench`.

use crate::failure::Failure;
use crate::options::{CpuArgs, KernelsArg, backend};
use crate::parse::{codec_pair, count, dtype, window};
use clap::{Args, ValueEnum};
use flashtile::{BackendName, Codec, Dtype, Visibility};
use std::path::PathBuf;

/// Measure attention against the limits of this machine
///
/// Limits (FMA peak, read bandwidth) are measured before and after the kernels, and the larger is used. Every row
/// first checks a few query rows of its answer against the f64 oracle, and a backward row also a few rows of each gradient. Times are
/// medians.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  flashtile bench prefill --dtype f32,bf16 --head-dim 128 --seq 2048,8192 --causal\n  \
    flashtile bench all --quick --json-lines rows.jsonl --svg rows.svg"
)]
pub(crate) struct BenchArgs {
    /// Rows to measure
    #[arg(value_enum, default_value_t = Group::All)]
    pub(crate) group: Group,
    /// Backend to measure
    #[arg(long, value_parser = backend("The cpu", &["reference", "simulator"]), default_value = "auto")]
    pub(crate) backend: BackendName,
    #[command(flatten)]
    pub(crate) kernels: KernelsArg,
    /// Tile of every CUDA kernel instead of the planner's choice:
    /// WARPS_Q,WARPS_K,FRAGMENTS,KEYS,STAGES,RESIDENT,Q_IN_REGISTERS, or wgmma:WARPGROUPS,KEYS,STAGES,PING_PONG; for
    /// portable kernels ROWS,KEYS,SIMDS,RESIDENT
    #[arg(long, value_name = "NUMBERS", value_parser = super::tile::tile, hide = true)]
    pub(crate) tile: Option<flashtile::plan::CudaTile>,
    #[command(flatten)]
    pub(crate) cpu: CpuArgs,
    /// Dtypes; default f32,f16,bf16
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = dtype())]
    pub(crate) dtype: Vec<Dtype>,
    /// Head dimensions; default 64,128 (decode also 256)
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = count)]
    pub(crate) head_dim: Vec<usize>,
    /// Sequence lengths (decode: numbers of cached keys); default 512 to 4096 (decode 1024 to 32768, backward 2048).
    /// LOW..HIGH spreads the lengths of a batch over the range: lengths of cached sequences, or in prefill and backward
    /// of packed sequences, each computed as a whole
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = lengths)]
    pub(crate) seq: Vec<Lengths>,
    /// Elements of a v vector; default as many as of k
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) value_dim: Option<usize>,
    /// Query heads; default 8 (decode 32, or 16 at head dimension 256)
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) heads: Option<usize>,
    /// Key/value heads; default as many as query heads (decode 8, or 2 at head dimension 256)
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = count)]
    pub(crate) kv_heads: Vec<usize>,
    /// Batch entries; default 1
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = count)]
    pub(crate) batch: Vec<usize>,
    /// Layout of the keys and values of decode rows; a ring holds the last keys of sequences that are 1.5 times as long
    #[arg(long, value_name = "LIST", value_enum, value_delimiter = ',', default_value = "dense")]
    pub(crate) cache: Vec<CacheKind>,
    /// Tokens per page of a paged cache, whose pages are in random order; default 16
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) page: Option<usize>,
    /// Codecs of the keys and values of a --cache, each CODEC or K_CODEC+V_CODEC; default the dtype. Codecs with mlx in
    /// their names are for 256 or 512 elements. Codecs are measured in turns, so that their times can be compared
    #[arg(long, value_name = "LIST", value_parser = codec_pair(), value_delimiter = ',')]
    pub(crate) codec: Vec<[Codec; 2]>,
    /// Query tokens of each sequence of a --cache, the last of its tokens: a chunk of a prompt; default 1
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) queries: Option<usize>,
    /// Tokens that the sequences of a paged batch share, in whole pages; whole blocks of 256 are read once, and for
    /// comparison once per sequence
    #[arg(long, value_name = "TOKENS", value_parser = count)]
    pub(crate) shared: Option<usize>,
    /// Only causal rows; default with and without for prefill and backward
    #[arg(long)]
    pub(crate) causal: bool,
    /// Keys visible to the left and right of each query
    #[arg(long, value_name = "LEFT[,RIGHT]", value_parser = window, allow_hyphen_values = true)]
    pub(crate) window: Option<Visibility>,
    /// Seconds to measure each row for; default 0.3, with --quick 0.05
    #[arg(long, value_name = "SECONDS", value_parser = duration)]
    pub(crate) min_time: Option<f64>,
    /// Few rows, short measurements
    #[arg(long)]
    pub(crate) quick: bool,
    /// Print JSON lines instead of tables
    #[arg(long)]
    pub(crate) json: bool,
    /// Write JSON lines to this file
    #[arg(long, value_name = "FILE")]
    pub(crate) json_lines: Option<PathBuf>,
    /// Write a plot of the fraction of the limit against the length to this file, which ends in .svg
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
    /// Compare with the rows of this file: JSON lines {peer, kind, dtype, d, h, hkv, b, s, causal, seconds}
    #[arg(long, value_name = "FILE")]
    pub(crate) vs: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Group {
    /// As many queries as keys
    Prefill,
    /// One query, many cached keys
    Decode,
    /// Gradients of q, k and v, with as many queries as keys; the time of the backward pass alone
    Backward,
    /// All groups that the backend has
    All,
}

/// The layout of the keys and values of a decode row.
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

impl Lengths {
    /// The length of each of `batch` sequences: `low` for the first, `high` for the last, equal steps between them.
    /// Refuses several lengths for one sequence.
    pub(super) fn of(self, batch: usize) -> Result<Vec<usize>, Failure> {
        let Self { low, high } = self;
        if batch < 2 && low < high {
            return Err(Failure::at("--seq", format_args!("{low}..{high} needs a --batch of 2 or more")));
        }
        let last = batch.saturating_sub(1).max(1);
        Ok((0..batch).map(|n| low + (high - low) * n / last).collect())
    }
}

fn lengths(text: &str) -> Result<Lengths, String> {
    let (low, high) = text.split_once("..").unwrap_or((text, text));
    match (count(low), count(high)) {
        (Ok(low), Ok(high)) if low <= high => Ok(Lengths { low, high }),
        _ => Err("expected a whole number, 1 or more, or LOW..HIGH".to_owned()),
    }
}

/// Longest time to measure a row, in seconds.
const MAX_TIME: f64 = 3600.0;

fn duration(text: &str) -> Result<f64, String> {
    let inside = |x: &f64| *x > 0.0 && *x <= MAX_TIME;
    text.parse()
        .ok()
        .filter(inside)
        .ok_or_else(|| format!("expected seconds, more than 0 and at most {MAX_TIME}"))
}
