//! The options of `flashtile kv`.

use crate::options::{Layout, Semantics};
use crate::parse::{codec, count, positive, power, threads};
use clap::Args;
use flashtile::Codec;
use std::path::PathBuf;

/// The long help of `kv`.
const KV_HELP: &str = "\
Report what the codecs of KV caches would do to keys and values, and recommend a pair of them

Reads every pair of tensors whose names differ only in their last component, k and v (or key and
value): layer.0.k and layer.0.v, k and v. They are F32, F16 or BF16, [batch, heads, rows, dim] or
as --layout says. Also reads, if present,
  q              queries, [batch, query heads, rows, dim]; a multiple of the heads of k
  kv_lens        I64 or I32 [batch]; keys of each batch entry, later rows are not read

For each codec, with and without subtracting the mean of the keys (centered; the mean is that of
the first 256 keys, as run --center-keys gives it to a cache); with --equalize also with centered
keys divided by a factor for each channel, a power of its deviation in those 256 keys:
  bits           per element, including scales, and with --keep-first and --keep-last the rows in 16 bits
                 of a cache that holds the tokens of the file
  k error, v error
                 mean square error relative to the mean square
  logit rmse     root mean square error of the logits, up to a constant per query
  kl             mean divergence of the probabilities from the exact ones, in nats; worst kl is
                 that of the worst head
  nrmse          root mean square error of the output relative to its root mean square
The last three need queries. The recommendation is the cheapest pair of codecs, one for keys and
one for values, whose kl and nrmse are within the gate in every pair of tensors.

Exit status 2 if some tensors have no result: a NaN, an infinity, a norm above 8192, shapes that
do not match. The others are reported.";

/// Report what codecs of KV caches would do to keys and values, and recommend a pair of codecs
#[derive(Debug, Args)]
#[command(
    long_about = KV_HELP,
    after_help = "Examples:\n  flashtile kv examples/data/minilm_all_layers_f16.safetensors\n  \
    flashtile kv kv.safetensors --causal --max-kl 1e-3 --svg kv.svg --per-layer"
)]
pub(crate) struct KvArgs {
    /// Safetensors file, .npz archive or folder of .npy files to read
    #[arg(value_name = "FILE")]
    pub(crate) input: PathBuf,
    /// Axes of the tensors in the file; default bhsd
    #[arg(long, value_enum)]
    pub(crate) layout: Option<Layout>,
    #[command(flatten)]
    pub(crate) semantics: Semantics,
    /// Query rows to measure of each query head and sequence, evenly spaced
    #[arg(long, value_name = "N", value_parser = count, default_value_t = 64)]
    pub(crate) rows: usize,
    /// Use the keys as queries if the file has no queries
    #[arg(long)]
    pub(crate) keys_as_queries: bool,
    /// Also store keys equalized: centered, and each channel divided by this power of its deviation, such as 0.5
    #[arg(long, alias = "equalise", value_name = "POWER", value_parser = power, allow_hyphen_values = true)]
    pub(crate) equalize: Option<f32>,
    /// Tokens at the start of each sequence whose keys and values stay in 16 bits beside their codes
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) keep_first: usize,
    /// Last tokens that each query sees whose keys and values stay in 16 bits beside their codes
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) keep_last: usize,
    /// Codecs to compare; default all that support any head dimension, except f32
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = codec())]
    pub(crate) codecs: Vec<Codec>,
    /// Largest mean divergence of the probabilities for a recommended pair, in nats
    #[arg(long, value_name = "X", value_parser = positive, default_value_t = 1e-4, allow_hyphen_values = true)]
    pub(crate) max_kl: f64,
    /// Largest relative error of the output for a recommended pair
    #[arg(long, value_name = "X", value_parser = positive, default_value_t = 0.055, allow_hyphen_values = true)]
    pub(crate) max_nrmse: f64,
    /// Show every codec for each pair of tensors
    #[arg(long)]
    pub(crate) per_layer: bool,
    /// Refuse a file with tensors that are not recognised, instead of noting them
    #[arg(long)]
    pub(crate) strict: bool,
    /// Threads, at most as many as the machine has; default all
    #[arg(long, value_name = "N", value_parser = threads)]
    pub(crate) threads: Option<usize>,
    /// Write a plot of KL and NRMSE against bits per element to this file, which ends in .svg
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}
