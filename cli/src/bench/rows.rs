//! What is measured.

use crate::args::{BenchArgs, Group};
use crate::failure::{Failure, Result};
use flashtile::{Dims, Dtype, Problem, ProblemDesc, QOffset, Visibility};

/// Group of rows that share a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Prefill,
    Decode,
}

impl Kind {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// One problem to measure.
#[derive(Debug, Clone)]
pub(super) struct Row {
    pub(super) kind: Kind,
    pub(super) problem: Problem,
}

impl Row {
    fn new(kind: Kind, dims: Dims, dtype: Dtype, visibility: Visibility) -> Result<Self> {
        let mut desc = ProblemDesc::new(dims, dtype);
        desc.visibility = visibility;
        desc.q_offset = Some(QOffset::BottomRight);
        Ok(Self { kind, problem: desc.validate().map_err(Failure::new)? })
    }

    /// Keys, which is the sequence length of prefill.
    pub(super) fn length(&self) -> usize {
        self.problem.dims().kv_len
    }

    pub(super) fn causal(&self) -> bool {
        self.problem.desc().visibility.right() == Some(0)
    }

    /// Keys to the left and right, where there is a window beside causality.
    pub(super) fn window(&self) -> Option<(Option<usize>, Option<usize>)> {
        let band = self.problem.desc().visibility;
        let right = band.right().filter(|&right| right > 0);
        (band.left().is_some() || right.is_some()).then_some((band.left(), right))
    }
}

/// A pair of rows whose times are compared with their visible areas.
#[derive(Debug, Clone)]
pub(super) struct Pair {
    pub(super) name: &'static str,
    pub(super) part: Row,
    pub(super) whole: Row,
}

/// What lists and numbers of the command line mean where they were given.
fn or<T: Clone>(given: &[T], default: &[T]) -> Vec<T> {
    if given.is_empty() { default.to_vec() } else { given.to_vec() }
}

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];

fn head_dims(args: &BenchArgs, default: &[usize]) -> Vec<usize> {
    let usual = match (args.full, args.quick) {
        (true, _) => &[32, 64, 128, 256],
        (_, true) => &[128][..],
        _ => default,
    };
    or(&args.head_dim, usual)
}

fn dtypes(args: &BenchArgs) -> Vec<Dtype> {
    or(&args.dtype, if args.quick { &[Dtype::F32, Dtype::BF16] } else { &DTYPES })
}

/// Rows of one kind.
pub(super) fn rows(args: &BenchArgs, kind: Kind) -> Result<Vec<Row>> {
    match kind {
        Kind::Prefill => prefill(args),
        Kind::Decode => decode(args),
    }
}

fn prefill(args: &BenchArgs) -> Result<Vec<Row>> {
    let lengths = or(&args.seq, if args.quick { &[512, 2048] } else { &[512, 1024, 2048, 4096] });
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
                for &length in &lengths {
                    let dims = dims(args, (8, 8), length, (length, head_dim));
                    rows.push(Row::new(Kind::Prefill, dims, dtype, visibility)?);
                }
            }
        }
    }
    Ok(rows)
}

fn decode(args: &BenchArgs) -> Result<Vec<Row>> {
    let lengths = or(&args.seq, if args.quick { &[1024, 8192] } else { &[1024, 4096, 8192, 32768] });
    let band = args.window.unwrap_or_default();
    let visibility = if args.causal { band.and(Visibility::causal()) } else { band };
    let mut rows = Vec::new();
    for dtype in dtypes(args) {
        for head_dim in head_dims(args, &[64, 128, 256]) {
            for &length in &lengths {
                let heads = if head_dim >= 256 { (16, 2) } else { (32, 8) };
                let dims = dims(args, heads, 1, (length, head_dim));
                rows.push(Row::new(Kind::Decode, dims, dtype, visibility)?);
            }
        }
    }
    Ok(rows)
}

fn dims(args: &BenchArgs, heads: (usize, usize), q_len: usize, (kv_len, head_dim): (usize, usize)) -> Dims {
    let q_heads = args.heads.unwrap_or(heads.0);
    // Query heads alone mean as many key/value heads; a default group needs both defaults.
    let kv_heads = args.kv_heads.unwrap_or(if args.heads.is_some() { q_heads } else { heads.1 });
    Dims { batch: args.batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim: head_dim }
}

/// Pairs that differ in their visible area alone.
pub(super) fn pairs(args: &BenchArgs) -> Result<Vec<Pair>> {
    /// Keys that a windowed query sees, its own counted.
    const WINDOW: usize = 256;
    let lengths: [usize; 2] = if args.quick { [1024, 2048] } else { [4096, 8192] };
    let causal = Visibility::causal();
    let window = Visibility::window(Some(WINDOW - 1), Some(0));
    let mut pairs = Vec::new();
    for dtype in or(&args.dtype, &[Dtype::F32]) {
        for head_dim in or(&args.head_dim, &[64]) {
            let row = |length: usize, visibility| {
                let dims = dims(args, (8, 8), length, (length, head_dim));
                Row::new(Kind::Prefill, dims, dtype, visibility)
            };
            let [short, long] = lengths;
            pairs.push(Pair {
                name: "causal / full",
                part: row(short, causal)?,
                whole: row(short, Visibility::full())?,
            });
            pairs.push(Pair {
                name: "window 256 / causal",
                part: row(long, window)?,
                whole: row(long, causal)?,
            });
        }
    }
    Ok(pairs)
}

/// Options that the rows of a group have no use for.
pub(super) fn check_options(args: &BenchArgs) -> Result<()> {
    if args.group != Group::Visibility {
        return Ok(());
    }
    let given = [
        ("--seq", !args.seq.is_empty()),
        ("--causal", args.causal),
        ("--window", args.window.is_some()),
        ("--full", args.full),
        ("--vs", args.vs.is_some()),
        ("--svg", args.svg.is_some()),
    ];
    match given.into_iter().find(|(_, given)| *given) {
        None => Ok(()),
        Some((option, _)) => {
            Err(Failure::at(option, "has no meaning for visibility, whose lengths and masks are fixed"))
        }
    }
}
