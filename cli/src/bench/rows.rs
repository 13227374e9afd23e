//! The rows to measure.

use super::options::{BenchArgs, CacheKind, Group, Lengths};
use crate::failure::{Failure, Result};
use flashtile::{
    Codec, Dims, Dtype, HeadShape, Problem, ProblemDesc, QOffset, SeqLens, Sequences, SharedPrefix,
    Visibility,
};
use serde_json::{Value, json};

/// Tokens per page by default.
const PAGE: usize = 16;

/// A group of rows, which form a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Prefill,
    Decode,
    Backward,
}

impl Kind {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Backward => "backward",
        }
    }
}

/// One problem to measure.
#[derive(Debug, Clone)]
pub(super) struct Row {
    pub(super) kind: Kind,
    pub(super) problem: Problem,
    pub(super) cache: CacheKind,
    /// Tokens per page of a paged cache; in other caches, a slot is a page.
    pub(super) page: usize,
}

impl Row {
    fn new(kind: Kind, dims: Dims, dtype: Dtype, visibility: Visibility) -> Result<Self> {
        let mut desc = ProblemDesc::new(dims, dtype);
        desc.visibility = visibility;
        desc.q_offset = Some(QOffset::BottomRight);
        Self::without_cache(kind, desc)
    }

    fn without_cache(kind: Kind, desc: ProblemDesc) -> Result<Self> {
        let problem = desc.validate().map_err(Failure::new)?;
        Ok(Self { kind, problem, cache: CacheKind::Dense, page: 0 })
    }

    /// Whole sequences of several lengths, one after another in one tensor.
    fn packed(
        kind: Kind,
        dims: Dims,
        dtype: Dtype,
        visibility: Visibility,
        lengths: Lengths,
    ) -> Result<Self> {
        let ends = lengths.of(dims.batch)?.into_iter().scan(0usize, |total, len| {
            *total = total.saturating_add(len);
            Some(*total)
        });
        let cu_seqlens: Vec<usize> = std::iter::once(0).chain(ends).collect();
        let total = cu_seqlens[dims.batch];
        let mut desc = ProblemDesc::new(Dims { batch: 1, q_len: total, kv_len: total, ..dims }, dtype);
        desc.visibility = visibility;
        desc.sequences = Sequences::Packed { cu_seqlens_q: cu_seqlens.clone(), cu_seqlens_k: cu_seqlens };
        Self::without_cache(kind, desc)
    }

    /// One query, or a chunk of them, for each of several cached sequences.
    fn cached(
        args: &BenchArgs,
        cache: CacheKind,
        dims: Dims,
        (dtype, [k, v]): (Dtype, [Codec; 2]),
        lengths: Lengths,
    ) -> Result<Self> {
        let Lengths { low, high } = lengths;
        let mut lens = lengths.of(dims.batch)?;
        let q_len = args.queries.unwrap_or(1);
        if q_len > low {
            return Err(Failure::at(
                format_args!("--queries {q_len}"),
                format_args!("a sequence has {low} tokens"),
            ));
        }
        let mut visibility = args.window.unwrap_or_default().and(Visibility::causal());
        let page = match cache {
            CacheKind::Dense | CacheKind::Contiguous => high,
            CacheKind::Paged => args.page.unwrap_or(PAGE),
            CacheKind::Ring => {
                // The first query of a chunk sees the oldest key that is kept.
                visibility = visibility.and(Visibility::window(Some(high - q_len), None));
                lens.iter_mut().for_each(|len| *len += *len / 2);
                high
            }
        };
        let steps: Vec<SeqLens> = lens.iter().map(|&len| SeqLens { q_len, kv_len: len }).collect();
        let Dims { q_heads, kv_heads, head_dim, value_dim, .. } = dims;
        let shape = HeadShape { q_heads, kv_heads, head_dim, value_dim };
        let mut desc = ProblemDesc::cached(shape, dtype, &steps);
        desc.visibility = visibility;
        (desc.k_codec, desc.v_codec) = (Some(k), Some(v));
        if let Some(shared) = args.shared {
            let len = shared / page * page;
            if len == 0 {
                let text = format_args!("{shared} is less than a page of {page} tokens");
                return Err(Failure::at("--shared", text));
            }
            desc.prefixes = vec![SharedPrefix { sequences: 0..dims.batch, len }];
        }
        let problem = desc.validate().map_err(|e| match args.shared {
            Some(shared) => Failure::at(format_args!("--shared {shared}"), e),
            None => Failure::new(e),
        })?;
        Ok(Self { kind: Kind::Decode, problem, cache, page })
    }

    /// Number of keys: the longest sequence of prefill and backward, or the most that a decode row sees.
    pub(super) fn length(&self) -> usize {
        match self.cache {
            CacheKind::Ring => self.page,
            _ if self.is_packed() => self.problem.sequences().iter().map(|s| s.kv_len).max().unwrap_or(0),
            _ => self.problem.dims().kv_len,
        }
    }

    fn is_packed(&self) -> bool {
        matches!(self.problem.desc().sequences, Sequences::Packed { .. })
    }

    /// True if two rows have the same problem, but differ in the layout or the codecs of their caches.
    pub(super) fn differs_in_cache(&self, other: &Self) -> bool {
        let (a, b) = (self.problem.dims(), other.problem.dims());
        let same = |of: fn(&Dims) -> usize| of(a) == of(b);
        (self.kind, self.problem.dtype()) == (other.kind, other.problem.dtype())
            && (self.cache != other.cache || self.codecs() != other.codecs())
            && (self.batch(), self.length()) == (other.batch(), other.length())
            && same(|d| d.q_heads)
            && same(|d| d.kv_heads)
            && same(|d| d.head_dim)
            && same(|d| d.value_dim)
    }

    /// Number of sequences.
    pub(super) fn batch(&self) -> usize {
        self.problem.sequences().len()
    }

    /// Codecs of keys and values.
    fn codecs(&self) -> [Codec; 2] {
        [self.problem.k_codec(), self.problem.v_codec()]
    }

    /// Name of the cache's layout, with the codecs if they are not the dtype.
    pub(super) fn layout(&self) -> String {
        let place = match self.cache {
            CacheKind::Dense => if self.is_packed() { "packed" } else { "dense" }.to_owned(),
            CacheKind::Contiguous => "contiguous".to_owned(),
            CacheKind::Paged => format!("paged({})", self.page),
            CacheKind::Ring => "ring".to_owned(),
        };
        match self.codecs() {
            [k, v] if [k, v] == [Codec::from(self.problem.dtype()); 2] => place,
            [k, v] if k == v => format!("{place} {k}"),
            [k, v] => format!("{place} {k}+{v}"),
        }
    }

    /// Length of each cached or packed sequence in tokens.
    pub(super) fn lens(&self) -> Option<Vec<usize>> {
        let lens = || self.problem.sequences().iter().map(|s| s.kv_len).collect();
        (self.cache != CacheKind::Dense || self.is_packed()).then(lens)
    }

    /// Tokens that the sequences share.
    pub(super) fn shared(&self) -> usize {
        self.problem.desc().prefixes.first().map_or(0, |prefix| prefix.len)
    }

    /// The fields that identify the problem, as rows of peers have them.
    pub(super) fn json(&self) -> Value {
        let dims = self.problem.dims();
        json!({
            "kind": self.kind.name(),
            "dtype": self.problem.dtype().name(),
            "d": dims.head_dim,
            "dv": dims.value_dim,
            "h": dims.q_heads,
            "hkv": dims.kv_heads,
            "b": self.batch(),
            "s": self.length(),
            "lens": self.lens(),
            "causal": self.problem.desc().visibility.right() == Some(0),
            "window": self.window(),
            "layout": self.layout(),
            "shared": self.shared(),
        })
    }

    /// The window in addition to causality, if there is one: keys to the left and right, `null` for an unbounded side.
    fn window(&self) -> Option<[Option<usize>; 2]> {
        let band = self.problem.desc().visibility;
        let right = band.right().filter(|&right| right > 0);
        (band.left().is_some() || right.is_some()).then_some([band.left(), right])
    }
}

/// Values of options that were given, or the defaults.
fn or<T: Clone>(given: &[T], default: &[T]) -> Vec<T> {
    if given.is_empty() { default.to_vec() } else { given.to_vec() }
}

fn head_dims(args: &BenchArgs, default: &[usize]) -> Vec<usize> {
    or(&args.head_dim, if args.quick { &[128] } else { default })
}

fn dtypes(args: &BenchArgs) -> Vec<Dtype> {
    or(&args.dtype, if args.quick { &[Dtype::F32, Dtype::BF16] } else { &Dtype::ALL })
}

/// Rows of one kind.
pub(super) fn rows(args: &BenchArgs, kind: Kind) -> Result<Vec<Row>> {
    match kind {
        Kind::Prefill => square(args, kind, if args.quick { &[512, 2048] } else { &[512, 1024, 2048, 4096] }),
        Kind::Backward => square(args, kind, if args.quick { &[512] } else { &[2048] }),
        Kind::Decode => decode(args),
    }
}

/// The lengths given, or the defaults.
fn lengths(args: &BenchArgs, default: &[usize]) -> Vec<Lengths> {
    let default: Vec<Lengths> = default.iter().map(|&n| Lengths { low: n, high: n }).collect();
    or(&args.seq, &default)
}

/// The length of every sequence of a dense batch.
fn one_length(lengths: Lengths) -> Result<usize> {
    let Lengths { low, high } = lengths;
    if low != high {
        let text = format_args!("{low}..{high} needs a --cache, whose sequences may differ in length");
        return Err(Failure::at("--seq", text));
    }
    Ok(low)
}

/// Rows with as many queries as keys.
fn square(args: &BenchArgs, kind: Kind, default: &[usize]) -> Result<Vec<Row>> {
    let lengths = lengths(args, default);
    let band = args.window.unwrap_or_default();
    let visibilities = if args.causal || band.right() == Some(0) {
        vec![band.and(Visibility::causal())]
    } else {
        vec![band, band.and(Visibility::causal())]
    };
    let mut rows = Vec::new();
    for dtype in dtypes(args) {
        for head_dim in head_dims(args, &[64, 128]) {
            for &visibility in &visibilities {
                for &lengths in &lengths {
                    let Lengths { low, high } = lengths;
                    for dims in dims(args, (8, 8), high, (high, head_dim)) {
                        rows.push(match low == high {
                            true => Row::new(kind, dims, dtype, visibility)?,
                            false => Row::packed(kind, dims, dtype, visibility, lengths)?,
                        });
                    }
                }
            }
        }
    }
    Ok(rows)
}

fn decode(args: &BenchArgs) -> Result<Vec<Row>> {
    let lengths = lengths(args, if args.quick { &[1024, 8192] } else { &[1024, 4096, 8192, 32768] });
    let band = args.window.unwrap_or_default();
    let visibility = if args.causal { band.and(Visibility::causal()) } else { band };
    let mut rows = Vec::new();
    for dtype in dtypes(args) {
        for head_dim in head_dims(args, &[64, 128, 256]) {
            for &length in &lengths {
                let heads = if head_dim >= 256 { (16, 2) } else { (32, 8) };
                for dims in dims(args, heads, 1, (length.high, head_dim)) {
                    let plain = [[Codec::from(dtype); 2]];
                    let turns = or(&args.codec, &plain).into_iter();
                    for (&cache, codec) in
                        turns.flat_map(|codec| args.cache.iter().map(move |cache| (cache, codec)))
                    {
                        rows.push(match cache {
                            CacheKind::Dense => {
                                one_length(length)?;
                                Row::new(Kind::Decode, dims, dtype, visibility)?
                            }
                            _ => Row::cached(args, cache, dims, (dtype, codec), length)?,
                        });
                    }
                }
            }
        }
    }
    Ok(rows)
}

/// Dimensions for each batch size and number of key/value heads.
fn dims(
    args: &BenchArgs,
    heads: (usize, usize),
    q_len: usize,
    (kv_len, head_dim): (usize, usize),
) -> Vec<Dims> {
    let q_heads = args.heads.unwrap_or(heads.0);
    // With --heads alone, there are as many key/value heads: the default GQA group needs both defaults.
    let kv_heads = or(&args.kv_heads, &[if args.heads.is_some() { q_heads } else { heads.1 }]);
    let of = |&batch: &usize| {
        let with = move |&kv_heads: &usize| Dims {
            batch,
            q_heads,
            kv_heads,
            q_len,
            kv_len,
            head_dim,
            value_dim: args.value_dim.unwrap_or(head_dim),
        };
        kv_heads.iter().map(with).collect::<Vec<Dims>>()
    };
    or(&args.batch, &[1]).iter().flat_map(of).collect()
}

/// Refuses options that have no effect on the rows of a group.
pub(super) fn check_options(args: &BenchArgs) -> Result<()> {
    if args.cache != [CacheKind::Dense] && args.group != Group::Decode {
        return Err(Failure::at("--cache", "needs the group decode"));
    }
    if !args.codec.is_empty() && args.cache.contains(&CacheKind::Dense) {
        return Err(Failure::at(
            "--codec",
            "needs --cache contiguous, paged or ring: dense rows have elements of the dtype",
        ));
    }
    if args.tile.is_some() && args.group == Group::Backward {
        return Err(Failure::at("--tile", "is of kernels of the groups prefill and decode"));
    }
    if args.page.is_some() && !args.cache.contains(&CacheKind::Paged) {
        return Err(Failure::at("--page", "needs --cache paged: no other cache has pages"));
    }
    if args.queries.is_some() && args.cache.contains(&CacheKind::Dense) {
        return Err(Failure::at("--queries", "needs --cache contiguous, paged or ring"));
    }
    if args.shared.is_some() && args.cache != [CacheKind::Paged] {
        return Err(Failure::at("--shared", "needs --cache paged: pages are what sequences share"));
    }
    Ok(())
}
