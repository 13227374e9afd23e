//! The options of `flashtile kv`.

use crate::options::{Layout, Semantics};
use crate::parse::{count, positive, threads};
use clap::Args;
use flashtile::Codec;
use std::path::PathBuf;

/// What `kv --help` says of files.
const KV_HELP: &str = "\
Report what the codecs of KV caches would do to keys and values, and recommend a pair of them

Reads every pair of tensors whose names differ in their last component alone, k and v (or key and
value): layer.0.k and layer.0.v, k and v. Of F32, F16 or BF16, [batch, heads, rows, dim] or as
--layout says. And, where present beside them,
  q              queries, [batch, query heads, rows, dim]; a multiple of the heads of k
  kv_lens        I64 or I32 [batch]; keys of each batch entry, later rows are not read

For each codec, with and without the mean of the keys taken out (centered; the mean is that of the
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
