//! Random problems, for property tests and fuzzing.

use super::cases::{Case, Keep, MaskFill, Tree};
use super::poison::Layout;
use super::rng::Rng;
use flashtile_core::dtype::{Dtype, MaskKind};
use flashtile_core::problem::{QOffset, Sequences, Visibility};

/// Sizes next to the ends of tiles, registers or cache lines.
const EDGES: [usize; 10] = [1, 4, 6, 8, 16, 24, 32, 48, 64, 128];

/// A small random case, made of choices: `choose(n)` gives an integer below `n`. With a seeded generator this is a
/// property test's case, with a fuzzer's bytes a fuzz case. The problem is always valid.
///
/// The oracle computes at most about a million products for it.
pub fn random_case(name: impl Into<String>, choose: &mut dyn FnMut(usize) -> usize) -> Case {
    let dtype = [Dtype::F32, Dtype::F16, Dtype::BF16][choose(3)];
    let kv_heads = 1 + choose(3);
    let group = [1, 1, 2, 3, 4, 5, 8, 16][choose(8)];
    let head_dim = near_edge(choose, 10);
    let value_dim = if choose(3) == 0 { near_edge(choose, 10) } else { head_dim };
    let (q_len, kv_len) = match choose(4) {
        // Decode, prefill, chunk, anything.
        0 => (choose(4), near_edge(choose, 10) * (1 + choose(8))),
        1 => (near_edge(choose, 9), 0),
        2 => (near_edge(choose, 7), near_edge(choose, 10) + 250 * choose(3)),
        _ => (near_edge(choose, 10), choose(80)),
    };
    let kv_len = if kv_len == 0 && choose(8) > 0 { q_len } else { kv_len };
    let batch = 1 + choose(3);
    // The oracle's work is bounded by giving up heads first.
    let pairs = batch * q_len * kv_len * (head_dim + value_dim);
    let (kv_heads, group) =
        if pairs * kv_heads * group > 2_000_000 { (1, 1 + choose(2)) } else { (kv_heads, group) };
    let dims = [batch, kv_heads * group, kv_heads, q_len, kv_len, head_dim, value_dim];
    let mut case = Case::new(name, dims, dtype).layout(Layout::ALL[choose(4)]);
    case = sequences(case, choose);
    case = visibility(case, choose);
    if let Sequences::Cached { .. } = case.desc.sequences {
        case.paging.page = [1, 2, 7, 8, 16, 20, 64, 256, 1000][choose(9)];
        let keep = [Keep::All, Keep::Seen, Keep::Wrapped][choose(3)];
        case.paging.keep = if case.desc.prefixes.is_empty() { keep } else { Keep::All };
        if trees(&case) && choose(3) == 0 {
            case = case.tree([Tree::Causal, Tree::Branches, Tree::Random][choose(3)]);
        }
    }
    if choose(3) == 0 {
        case = case.softcap([0.3, 5.0, 50.0][choose(3)]);
    }
    if choose(4) == 0 {
        case = case.sinks();
    }
    if choose(4) == 0 {
        case = case.scale([0.0, 0.05, 0.5, -0.2][choose(4)]);
    }
    case = case.gain([1.0, 1.0, 1.0, 0.01, 6.0][choose(5)]);
    if choose(3) == 0 {
        let kinds = [Dtype::F32, Dtype::F16, Dtype::BF16].map(MaskKind::Additive);
        let kind = if choose(2) == 0 { MaskKind::Bool } else { kinds[choose(3)] };
        let axes = choose(16);
        let broadcast: String = "bhqk"
            .chars()
            .enumerate()
            .filter(|(bit, _)| axes >> bit & 1 == 1)
            .map(|(_, axis)| axis)
            .collect();
        let fills = [
            MaskFill::Random,
            MaskFill::Random,
            MaskFill::HiddenRows,
            MaskFill::Open,
            MaskFill::Blocks,
            MaskFill::Closed,
        ];
        case = case.mask(kind, &broadcast, fills[choose(6)]);
    }
    case
}

/// The random case of a seed, under the name that tests report.
pub fn seeded_case(seed: u64) -> Case {
    let mut rng = Rng::new(seed);
    random_case(format!("seed {seed}"), &mut |n| rng.below(n))
}

/// A size near one of the first `edges` edges.
fn near_edge(choose: &mut dyn FnMut(usize) -> usize, edges: usize) -> usize {
    (EDGES[choose(edges.min(EDGES.len()))] + choose(3)).saturating_sub(1).max(1)
}

/// Returns true if every cached sequence has at least as many keys as queries, which a tree mask needs.
fn trees(case: &Case) -> bool {
    let Sequences::Cached { cu_seqlens_q, kv_lens } = &case.desc.sequences else { return false };
    cu_seqlens_q.windows(2).zip(kv_lens).all(|(w, &kv_len)| w[1] - w[0] <= kv_len)
}

fn sequences(case: Case, choose: &mut dyn FnMut(usize) -> usize) -> Case {
    let dims = case.desc.dims;
    match choose(6) {
        0 => {
            let lens: Vec<usize> = (0..dims.batch)
                .map(|_| match choose(4) {
                    0 => dims.kv_len,
                    1 => choose(3).min(dims.kv_len),
                    _ => choose(dims.kv_len + 1),
                })
                .collect();
            case.kv_lens(&lens)
        }
        form @ (1 | 2) => {
            let lengths: Vec<(usize, usize)> = (0..dims.batch)
                .map(|_| match choose(4) {
                    0 => (dims.q_len, dims.kv_len),
                    1 => (choose(3).min(dims.q_len), choose(dims.kv_len + 1)),
                    2 => (choose(dims.q_len + 1), choose(3).min(dims.kv_len)),
                    _ => (choose(dims.q_len + 1), choose(dims.kv_len + 1)),
                })
                .collect();
            let mut case = case;
            case.desc.dims.batch = 1;
            if form == 1 { case.packed(&lengths) } else { case.cached(&lengths, 16, Keep::All) }
        }
        // Few queries and heads, so that the oracle is fast for prefixes of whole blocks.
        3 if dims.q_heads * (dims.head_dim + dims.value_dim) <= 800 => {
            let prefix = 200 + choose(400);
            let lengths: Vec<(usize, usize)> =
                (0..2 + choose(2)).map(|_| (choose(5), prefix + choose(80))).collect();
            let first = choose(lengths.len());
            let mut case = case;
            case.desc.dims.batch = 1;
            case.cached(&lengths, 16, Keep::All).shared(&[(first..lengths.len(), prefix)])
        }
        _ => case,
    }
}

fn visibility(case: Case, choose: &mut dyn FnMut(usize) -> usize) -> Case {
    let (q_len, kv_len) = (case.desc.dims.q_len, case.desc.dims.kv_len);
    let offset = match choose(4) {
        0 => QOffset::TopLeft,
        1 | 2 => QOffset::BottomRight,
        _ => QOffset::At(choose(q_len + kv_len + 3) as i64 - q_len as i64),
    };
    let side = |choose: &mut dyn FnMut(usize) -> usize| match choose(3) {
        0 => None,
        1 => Some(choose(6)),
        _ => Some(choose(kv_len + 2)),
    };
    let case = match choose(6) {
        0 | 1 => case.causal(offset),
        2 => {
            let (left, right) = (side(choose), side(choose));
            case.seeing(Visibility::window(left, right)).at(offset)
        }
        3 => {
            let left = side(choose);
            case.causal(offset).seeing(Visibility::window(left, None))
        }
        4 => {
            let chunk = 1 + choose(kv_len + 1);
            let case = if choose(3) == 0 { case.at(offset) } else { case.causal(offset) };
            case.seeing(Visibility::full().chunked(chunk))
        }
        _ => case,
    };
    match choose(8) {
        0 => case.alibi().at(offset),
        1 => case.alibi_per_sequence().at(offset),
        _ => case,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_random_case_is_a_problem_and_every_feature_occurs() {
        let (mut masks, mut packed, mut cached, mut trees, mut prefixes, mut empty) = (0, 0, 0, 0, 0, 0);
        for seed in 0..2000 {
            let mut rng = Rng::new(seed);
            let case = random_case(seed.to_string(), &mut |n| rng.below(n));
            let problem = case.desc.clone().validate().unwrap();
            masks += usize::from(case.mask.is_some());
            packed += usize::from(matches!(case.desc.sequences, Sequences::Packed { .. }));
            cached += usize::from(matches!(case.desc.sequences, Sequences::Cached { .. }));
            trees += usize::from(case.desc.tree);
            let plan = flashtile_cpu::cpu::Cpu::new()
                .plan(&problem, flashtile_core::plan::PlanOptions::default())
                .unwrap();
            prefixes += plan.prefixes().len();
            empty += usize::from(problem.visible_pairs() == 0);
        }
        assert!(
            masks > 300 && packed > 200 && cached > 200 && trees > 20 && prefixes > 20,
            "{masks} {packed} {cached} {trees} {prefixes}"
        );
        assert!(empty > 10 && empty < 400, "{empty}");
    }

    #[test]
    fn a_source_of_zeros_is_a_case() {
        random_case("zeros", &mut |_| 0).build().unwrap();
    }
}
