//! Options that several commands have.

use crate::parse::{codec, dtype, isa, power, prefix, q_offset, threads, window};
use crate::report::counted;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Arg, Args, Command, ValueEnum};
use flashtile::plan::Isa;
use flashtile::{BackendName, BackendNameError, Codec, Dtype, KernelChoice, QOffset, Visibility};
use std::ffi::OsStr;
use std::num::NonZeroUsize;

/// How tensors are read from a file.
#[derive(Debug, Args)]
pub(crate) struct Reading {
    /// Axes of q, k and v in the file; default bhsd
    #[arg(long, value_enum)]
    pub(crate) layout: Option<Layout>,
    /// Layer of the file to read, given by the part of its names before q, k and v (or query, key and value): layer.3
    /// for layer.3.q; default the tensors without a prefix. Its other tensors have the same prefix (layer.3.mask), or
    /// none if they apply to all layers
    #[arg(long, value_name = "NAME", value_parser = prefix)]
    pub(crate) prefix: Option<String>,
    /// Element type of the problem; tensors of a file are converted to it first
    #[arg(long, value_name = "DTYPE", value_parser = dtype())]
    pub(crate) dtype: Option<Dtype>,
}

/// The computation, except for what the tensors determine.
#[derive(Debug, Args)]
pub(crate) struct Semantics {
    /// Each query sees keys at or before its own position
    #[arg(long)]
    pub(crate) causal: bool,
    /// Key position of the first query: top-left is 0, bottom-right puts the last query at the last key
    #[arg(long, value_name = "top-left|bottom-right|N", value_parser = q_offset(), hide_possible_values = true, allow_hyphen_values = true)]
    pub(crate) q_offset: Option<QOffset>,
    /// Keys visible to the left and right of each query, itself not counted; -1 or absent is unbounded
    #[arg(long, value_name = "LEFT[,RIGHT]", value_parser = window, allow_hyphen_values = true)]
    pub(crate) window: Option<Visibility>,
    /// Keys of a chunk: a query sees its own chunk only, as in the chunked layers of Llama 4
    #[arg(long, value_name = "KEYS")]
    pub(crate) chunk: Option<NonZeroUsize>,
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
        let band = if self.causal { band.and(Visibility::causal()) } else { band };
        band.chunked(self.chunk.map_or(0, NonZeroUsize::get))
    }
}

/// How a cache stores keys and values.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct Storage {
    /// Codec of the keys in a cache, which attention then reads; default no cache. Codecs with mlx in their names store
    /// what mlx-native stores. The backends cpu, cuda and reference support all of them, the simulator some
    #[arg(long, value_name = "CODEC", value_parser = codec())]
    pub(crate) k_codec: Option<Codec>,
    /// Codec of the values, like --k-codec
    #[arg(long, value_name = "CODEC", value_parser = codec())]
    pub(crate) v_codec: Option<Codec>,
    /// Subtract the mean of the first 256 keys before keys are quantized: exact up to rounding, and needed if keys have
    /// a large constant component. Plans do not depend on it
    #[arg(long = "center-keys", visible_alias = "center", aliases = ["centre", "centre-keys"])]
    pub(crate) center: bool,
    /// Divide each channel of the keys by this power of its deviation in the first 256 keys, such as 0.5, before keys are quantized:
    /// exact up to rounding, and better at few bits if channels differ in magnitude. Plans do not depend on it
    #[arg(long = "equalize-keys", visible_alias = "equalize", aliases = ["equalise", "equalise-keys"])]
    #[arg(value_name = "POWER", value_parser = power, allow_hyphen_values = true)]
    pub(crate) equalize: Option<f32>,
}

/// A problem described by options.
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
    /// Sequences of a cache instead of a batch, each QUERIES:LENGTH, or QUERIES:LENGTHxTIMES for several; the length
    /// includes the queries of this step
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = cached,
          conflicts_with_all = ["batch", "q_len", "kv_len", "kv_lens"])]
    pub(crate) cached: Vec<Cached>,
    /// Tokens that all sequences of the cache share, in the same pages; whole blocks of 256 are read once
    #[arg(long, value_name = "TOKENS", requires = "cached")]
    pub(crate) shared: Option<usize>,
}

/// Restrictions of the cpu backend.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct CpuArgs {
    /// Instruction set of the cpu backend; default the best of this machine
    #[arg(long, value_name = "ISA", value_parser = isa())]
    pub(crate) isa: Option<Isa>,
    /// Threads of the cpu backend, at most as many as the machine has; default all
    #[arg(long, value_name = "N", value_parser = threads)]
    pub(crate) threads: Option<usize>,
}

/// The help for `auto` of commands that compute or plan a problem.
pub(crate) const AUTO: &str = "The backend with the least estimated time for the problem, copies to a device included; the cpu \
                               if --isa or --threads is given";

/// A parser of names of backends; `auto` is the help for that name. Help lists the backends that the command supports;
/// `hidden` ones are refused with the reason.
pub(crate) fn backend(
    auto: &'static str,
    hidden: &'static [&'static str],
) -> impl TypedValueParser<Value = BackendName> {
    let named = |(name, about)| PossibleValue::new(name).help(about).hide(hidden.contains(&name));
    let auto = PossibleValue::new("auto").help(auto);
    BackendParser(PossibleValuesParser::new([auto].into_iter().chain(BackendName::list().map(named))))
}

/// Parses the names that help lists, and numbered devices: `cuda:1`.
#[derive(Clone)]
struct BackendParser(PossibleValuesParser);

impl TypedValueParser for BackendParser {
    type Value = BackendName;

    fn parse_ref(
        &self,
        command: &Command,
        arg: Option<&Arg>,
        text: &OsStr,
    ) -> Result<BackendName, clap::Error> {
        // If a name without a number is wrong, clap lists all names, and the closest one.
        if text.to_string_lossy().contains(':') {
            named.parse_ref(command, arg, text)
        } else {
            self.0.clone().try_map(|name| named(&name)).parse_ref(command, arg, text)
        }
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        self.0.possible_values()
    }
}

fn named(name: &str) -> Result<BackendName, String> {
    name.parse().map_err(|error: BackendNameError| error.to_string())
}

impl CpuArgs {
    /// Names of the given options, which apply to the cpu backend only.
    pub(crate) fn given(self) -> Vec<&'static str> {
        let all = [("--isa", self.isa.is_some()), ("--threads", self.threads.is_some())];
        all.into_iter().filter(|(_, given)| *given).map(|(name, _)| name).collect()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kernels {
    /// The fastest kernels of the device
    Auto,
    /// Kernels written for the device
    Native,
    /// Kernels of the kernel language
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

/// One sequence of a cache, or several equal ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cached {
    /// Queries of this step.
    pub(crate) queries: usize,
    /// Length in tokens, including this step's.
    pub(crate) len: usize,
    pub(crate) times: usize,
}

fn cached(text: &str) -> Result<Cached, String> {
    let parse = || {
        let (sequence, times) = text.split_once('x').unwrap_or((text, "1"));
        let (queries, len) = sequence.split_once(':')?;
        let [queries, len, times] = [queries, len, times].map(|n| n.parse().ok());
        Some(Cached { queries: queries?, len: len?, times: times? })
    };
    let expected = || "expected QUERIES:LENGTH or QUERIES:LENGTHxTIMES, whole numbers".to_owned();
    let cached: Cached = parse().ok_or_else(expected)?;
    if cached.queries > cached.len {
        let (queries, tokens) = (counted(cached.queries, "query"), counted(cached.len, "token"));
        return Err(format!(
            "{queries} in {tokens}, expected at most as many queries as tokens, which include them"
        ));
    }
    Ok(cached)
}

/// The kernels of a CUDA device to use.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct KernelsArg {
    /// Kernels of a CUDA device; auto takes native ones, or portable ones below compute capability 8.0 and over caches
    /// in codecs other than the dtype
    #[arg(long = "kernels", id = "kernels", value_enum, default_value_t = Kernels::Auto)]
    pub(crate) choice: Kernels,
}
