//! Properties on which the bits of an answer must not depend, and rows that a NaN must not reach.

use crate::support::{
    Row, all_runners, answer, build, copy, cuda_with_wgmma, fill, options, quantizing, row_bits, rows,
    runners, seers,
};
use flashtile::codec::key_mean;
use flashtile::plan::{CudaTile, Sm80Tile, Sm90Tile};
use flashtile::{
    AttentionState, CacheDesc, CacheLayout, CacheShape, Codec, CudaPlan, Dims, Dtype, KvCache, MaskKind,
    Outputs, Problem, ProblemDesc, QOffset, Sequence, Sequences, TensorView, Visibility, merge, reference,
};
use flashtile_testkit::{
    Answer, Case, CaseData, CpuRunner, CudaRunner, Guarded, GuardedMask, HostileFloats, Keep, Layout,
    MaskFill, Prepared, Rng, Runner, Tree, catalogue,
};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

fn pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap()
}

fn with_threads(runner: CpuRunner, threads: usize) -> CpuRunner {
    CpuRunner::new(runner.cpu.with_threads(threads)).with(runner.options)
}

/// Other plans for the same problem, and the number of threads that run them.
fn other_plans(runner: CpuRunner, built: &CaseData) -> Vec<(usize, CpuRunner)> {
    // The last has fewer threads than it was planned for.
    let threads = [(2, 2), (5, 5), (1, 5)].map(|(pool, planned)| (pool, with_threads(runner, planned)));
    let longest = built.problem.sequences().iter().map(|s| s.kv_len).max().unwrap_or(0);
    let block = runner.cpu.plan(&built.problem, runner.options).unwrap().block_k();
    let blocks = longest.div_ceil(block).max(1);
    let splits = (1..=blocks).filter(|&splits| splits <= 3 || splits == blocks).map(|splits| {
        let threads = if splits % 2 == 1 { 3 } else { 1 };
        (3, with_threads(runner.with(options(Some(splits), true)), threads))
    });
    let all_tiles = runner.with(options(None, false));
    threads.into_iter().chain(splits).chain([(2, all_tiles), (2, with_threads(all_tiles, 2))]).collect()
}

#[test]
fn bits_do_not_depend_on_threads_splits_skipped_tiles_or_memory() {
    bits_do_not_depend_on_plans(|n, runners| vec![runners[n % runners.len()]]);
}

#[test]
#[ignore = "takes minutes: every case by every instruction set"]
fn bits_do_not_depend_on_threads_splits_skipped_tiles_or_memory_on_every_instruction_set() {
    bits_do_not_depend_on_plans(|_, runners| runners);
}

/// `take` chooses the runners of a case by its number.
fn bits_do_not_depend_on_plans(take: impl Fn(usize, Vec<CpuRunner>) -> Vec<CpuRunner> + Sync) {
    let pools = [1, 2, 3, 5].map(|threads| (threads, pool(threads)));
    let same_bits = |n: usize, case: &Case| {
        let built = build(case);
        for runner in take(n, runners()) {
            let want = answer(&built, &runner);
            for (threads, other) in other_plans(runner, &built) {
                let (_, pool) = pools.iter().find(|(size, _)| *size == threads).unwrap();
                let got = pool.install(|| answer(&built, &other));
                assert!(got.bits() == want.bits(), "{} on {other:?}: other bits", case.name);
            }
            whatever_memory_held(case, &built, &runner, &want);
            without_the_logsumexp(case, &built, &runner, &want);
        }
    };
    // Not on pool threads, which would take on another case while they wait for one of these pools.
    let (cases, next) = (catalogue(), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let n = next.fetch_add(1, Ordering::Relaxed);
                    let Some(case) = cases.get(n) else { break };
                    same_bits(n, case);
                }
            });
        }
    });
}

fn whatever_memory_held(case: &Case, built: &CaseData, runner: &CpuRunner, want: &Answer) {
    let plan = runner.cpu.plan(&built.problem, runner.options).unwrap();
    let mut workspace = plan.workspace();
    for garbage in [0x00, 0x3F, 0x7F] {
        // One workspace, reused: with the contents that the previous run left, then with garbage.
        let mut got = want.clone();
        fill(&mut got.out, |_| f32::from(garbage));
        got.lse.slice_mut().fill(f32::from_bits(u32::from_ne_bytes([garbage; 4])));
        let mut outputs = Outputs::new(got.out.view_mut());
        outputs.lse = Some(got.lse.slice_mut());
        runner.cpu.run(&plan, &built.inputs(), &mut outputs, &mut workspace).unwrap();
        assert_eq!(got.bits(), want.bits(), "{} {garbage}", case.name);
        workspace.bytes_mut().fill(garbage);
    }
}

fn without_the_logsumexp(case: &Case, built: &CaseData, runner: &CpuRunner, want: &Answer) {
    let cpu = runner.cpu.with_threads(2);
    let plan = cpu.plan(&built.problem, runner.options).unwrap();
    let mut out = want.out.clone();
    fill(&mut out, |_| f32::NAN);
    let mut outputs = Outputs::new(out.view_mut());
    cpu.run(&plan, &built.inputs(), &mut outputs, &mut plan.workspace()).unwrap();
    assert_eq!(out.bits(), want.out.bits(), "{}", case.name);
}

/// One sequence of a batch as a problem of its own. Both have only features whose per-batch inputs are masks and slopes.
fn alone(whole: &CaseData, case: &Case, n: usize) -> CaseData {
    let s = whole.problem.sequences()[n];
    let mut desc = case.desc.clone();
    desc.dims.batch = 1;
    desc.dims.q_len = s.q_len;
    desc.dims.kv_len = s.kv_len;
    desc.sequences = Sequences::Dense;
    desc.q_offset = Some(QOffset::At(s.q_offset));
    let mut single = case.clone();
    single.desc = desc;
    let mut built = build(&single);
    copy(&whole.q, &mut built.q, |[_, h, row, d]| [s.batch, h, s.q_start + row, d]);
    copy(&whole.k, &mut built.k, |[_, h, row, d]| [s.batch, h, s.kv_start + row, d]);
    copy(&whole.v, &mut built.v, |[_, h, row, d]| [s.batch, h, s.kv_start + row, d]);
    if let (Some(from), Some(slopes), true) =
        (&whole.alibi_slopes, &mut built.alibi_slopes, case.alibi_per_sequence)
    {
        let heads = slopes.slice().len();
        slopes.slice_mut().copy_from_slice(&from.slice()[n * heads..][..heads]);
    }
    if let Some(sinks) = &mut built.sinks {
        let from = whole.sinks.as_ref().unwrap();
        sinks.slice_mut().copy_from_slice(from.slice());
    }
    built
}

#[test]
fn bits_do_not_depend_on_the_neighbours_of_a_batch() {
    let cases = catalogue().into_iter().filter(|case| {
        let several = case.desc.dims.batch > 1 || matches!(case.desc.sequences, Sequences::Packed { .. });
        several && case.mask.is_none()
    });
    let mut compared = 0;
    for case in cases {
        let whole = build(&case);
        for n in 0..whole.problem.sequences().len() {
            let s = whole.problem.sequences()[n];
            let single = alone(&whole, &case, n);
            for runner in runners() {
                let (all, one) = (answer(&whole, &runner), answer(&single, &runner));
                for [_, h, i] in rows(&single.problem) {
                    let want = row_bits(&single.problem, &one, [0, h, i]);
                    let got = row_bits(&whole.problem, &all, [s.batch, h, s.q_start + i]);
                    assert_eq!(got, want, "{} sequence {n} head {h} row {i}", case.name);
                    compared += 1;
                }
            }
        }
    }
    assert!(compared > 10_000, "{compared}");
}

#[test]
fn chunks_of_queries_give_the_bits_of_the_whole() {
    let bases = [
        Case::new("chunks causal", [1, 4, 2, 150, 150, 64, 64], Dtype::F32).causal(QOffset::TopLeft),
        Case::new("chunks after a prefix", [2, 2, 1, 90, 400, 40, 40], Dtype::BF16)
            .causal(QOffset::BottomRight),
        Case::new("chunks softcap sinks", [1, 3, 1, 70, 300, 128, 96], Dtype::F16)
            .causal(QOffset::BottomRight)
            .softcap(10.0)
            .sinks(),
        Case::new("chunks window", [1, 2, 2, 130, 560, 32, 32], Dtype::F32)
            .seeing(Visibility::window(Some(100), Some(3)))
            .at(QOffset::At(420)),
        Case::new("chunks alibi", [1, 4, 1, 66, 280, 64, 64], Dtype::F32)
            .alibi()
            .causal(QOffset::BottomRight),
        Case::new("chunks full", [1, 2, 1, 77, 513, 48, 48], Dtype::F16),
    ];
    for base in bases {
        let whole = build(&base);
        let offset = whole.problem.sequences()[0].q_offset;
        let q_len = base.desc.dims.q_len;
        for chunk in [1, 7, 16, 33, 64] {
            for start in (0..q_len).step_by(chunk) {
                let mut case = base.clone().at(QOffset::At(offset + start as i64));
                case.desc.dims.q_len = chunk.min(q_len - start);
                let mut part = build(&case);
                copy(&whole.q, &mut part.q, |[b, h, row, d]| [b, h, start + row, d]);
                copy(&whole.k, &mut part.k, |index| index);
                copy(&whole.v, &mut part.v, |index| index);
                if let (Some(to), Some(from)) = (&mut part.sinks, &whole.sinks) {
                    to.slice_mut().copy_from_slice(from.slice());
                }
                for runner in runners() {
                    let (all, some) = (answer(&whole, &runner), answer(&part, &runner));
                    for [b, h, i] in rows(&part.problem) {
                        assert_eq!(
                            row_bits(&part.problem, &some, [b, h, i]),
                            row_bits(&whole.problem, &all, [b, h, start + i]),
                            "{} chunk {chunk} row {}",
                            base.name,
                            start + i
                        );
                    }
                }
            }
        }
    }
}

/// Problems in which some rows see a key and others do not, within every kind of tile.
fn reach_cases() -> Vec<Case> {
    let of = |name: &str, dims, dtype| Case::new(format!("reach {name}"), dims, dtype);
    let random = MaskFill::Random;
    vec![
        of("causal", [1, 2, 1, 40, 48, 24, 24], Dtype::F32).causal(QOffset::At(8)),
        of("full", [1, 4, 2, 9, 30, 16, 16], Dtype::F32),
        of("f16", [1, 1, 1, 50, 50, 64, 64], Dtype::F16).causal(QOffset::TopLeft),
        of("bf16 window", [1, 1, 1, 40, 60, 16, 16], Dtype::BF16)
            .seeing(Visibility::window(Some(5), Some(2)))
            .at(QOffset::At(9)),
        of("wide", [1, 1, 1, 9, 40, 8, 260], Dtype::F16).causal(QOffset::At(20)),
        of("across blocks", [1, 1, 1, 30, 300, 8, 8], Dtype::F32).causal(QOffset::At(240)),
        of("bool mask", [1, 2, 2, 20, 33, 8, 8], Dtype::F32).mask(MaskKind::Bool, "h", random),
        of("additive mask", [1, 2, 1, 20, 33, 8, 8], Dtype::F16).mask(
            MaskKind::Additive(Dtype::F32),
            "",
            random,
        ),
        of("mask blocks", [1, 1, 1, 90, 310, 4, 4], Dtype::F32).mask(MaskKind::Bool, "bh", MaskFill::Blocks),
        of("mask hidden rows causal", [1, 1, 1, 30, 40, 8, 8], Dtype::F32)
            .mask(MaskKind::Bool, "bh", MaskFill::HiddenRows)
            .causal(QOffset::BottomRight),
        of("kv_lens", [3, 1, 1, 5, 40, 8, 8], Dtype::F32).kv_lens(&[40, 0, 17]).causal(QOffset::BottomRight),
        of("packed", [1, 2, 1, 0, 0, 8, 8], Dtype::F32).packed(&[(5, 9), (3, 0), (20, 33)]),
        of("decode", [1, 4, 1, 1, 40, 16, 16], Dtype::F32)
            .seeing(Visibility::window(Some(20), Some(0)))
            .at(QOffset::BottomRight),
        of("decode group", [1, 4, 2, 3, 70, 16, 16], Dtype::BF16).causal(QOffset::BottomRight),
        of("softcap sinks alibi", [1, 2, 1, 20, 24, 8, 8], Dtype::F32)
            .softcap(3.0)
            .sinks()
            .alibi()
            .causal(QOffset::At(2)),
    ]
}

/// The tensor whose rows a test overwrites.
#[derive(Clone, Copy, PartialEq)]
enum Operand {
    Keys,
    Values,
}

/// All runners. On a device with wgmma also runners with tiles that the planner does not choose for problems this small, those that have a kernel for
/// the problem.
fn reach_runners(problem: &Problem) -> Vec<Box<dyn Runner>> {
    let mut all: Vec<_> =
        [options(None, true), options(None, false)].into_iter().flat_map(all_runners).collect();
    if let Some(cuda) = cuda_with_wgmma() {
        let tiles: [(CudaTile, _); 5] = [
            (Sm80Tile::new(4, 1, 1, 32, 2).into(), None),
            (Sm90Tile::new(2, 64, 2).into(), None),
            (Sm90Tile::new(2, 16, 4).into(), Some(2)),
            (Sm90Tile::new(4, 64, 4).into(), None),
            (Sm90Tile::wide(1).into(), None),
        ];
        for (tile, splits) in tiles {
            let options = options(splits, true);
            if CudaPlan::with_tile(problem, cuda.facts(), options, tile).is_ok() {
                all.push(Box::new(CudaRunner::new(cuda.clone()).tiled(tile).with(options)));
            }
        }
    }
    all
}

/// One row of the keys and values: batch entry, key/value head, row of the tensor.
type KvRow = [usize; 3];

/// Every row of the keys that belongs to a sequence, in one head each.
fn kv_rows(problem: &Problem) -> impl Iterator<Item = KvRow> {
    let heads = problem.dims().kv_heads;
    let rows = |s: &Sequence| (s.batch, s.kv_start..s.kv_start + s.kv_len);
    let all = problem.sequences().iter().map(rows);
    all.flat_map(move |(batch, rows)| rows.map(move |row| [batch, row % heads, row]))
}

/// The tensors of `clean`, with some columns of a row overwritten by `value`.
fn spoil(
    clean: &CaseData,
    operand: Operand,
    [b, h, row]: KvRow,
    columns: Range<usize>,
    value: f32,
) -> CaseData {
    let mut spoiled = clean.clone();
    let target = match operand {
        Operand::Keys => &mut spoiled.k,
        Operand::Values => &mut spoiled.v,
    };
    for d in columns {
        target.set([b, h, row, d], value);
    }
    spoiled
}

/// The query rows whose bits differ between two answers.
fn changed_rows(problem: &Problem, before: &Answer, after: &Answer) -> BTreeSet<Row> {
    rows(problem).filter(|&row| row_bits(problem, before, row) != row_bits(problem, after, row)).collect()
}

/// Tensors with the oracle's answer.
fn with_oracle(built: CaseData) -> Prepared {
    let expected = reference::attention(&built.problem, &built.inputs()).unwrap();
    Prepared::of(built, expected)
}

/// Overwrites each row of the keys or values in turn, and compares the query rows that change with those that see it.
///
/// A row that does not see it keeps its bits, except with values and wgmma, which passes a value's NaN to all rows of a tile: there, rows that do not
/// see it are recomputed in another order, and must be within the limits. A row that sees an infinity in a key may keep its bits: a score of
/// `-inf` hides the key, as a score far below the others does.
fn reach(value: f32, operand: Operand) {
    let (mut by_bits, mut by_limits, mut of_16_bits) = (0, 0, 0);
    for case in reach_cases() {
        let clean = build(&case);
        let dims = *clean.problem.dims();
        let width = if operand == Operand::Keys { dims.head_dim } else { dims.value_dim };
        for runner in reach_runners(&clean.problem) {
            let before = answer(&clean, &*runner);
            let wgmma = before.ran.plan.contains("wgmma");
            of_16_bits += usize::from(wgmma && clean.problem.dtype() != Dtype::F32);
            // An infinite value is recomputed in f64, row by row: every third key has one.
            let step = if operand == Operand::Values && value.is_infinite() { 3 } else { 1 };
            for at in kv_rows(&clean.problem).step_by(step) {
                let name = format!("{}: {value} in {at:?}, {}", case.name, runner.name());
                let spoiled = spoil(&clean, operand, at, 0..width, value);
                let after = answer(&spoiled, &*runner);
                let changed = changed_rows(&clean.problem, &before, &after);
                let expected = seers(&clean, at);
                if operand == Operand::Values && wgmma {
                    assert!(changed.is_superset(&expected), "{name}: {changed:?}, not {expected:?}");
                    let checked = with_oracle(spoiled).check(&after);
                    checked.unwrap_or_else(|failure| panic!("{name}: {failure}"));
                    let column = at[2] % width;
                    let after = answer(&spoil(&clean, operand, at, column..column + 1, value), &*runner);
                    other_columns_keep_their_bits(&before, &after, column, &expected, &name);
                    by_limits += 1;
                } else if operand == Operand::Keys && value.is_infinite() {
                    assert!(changed.is_subset(&expected), "{name}: {changed:?}, not {expected:?}");
                    by_bits += 1;
                } else {
                    assert_eq!(changed, expected, "{name}");
                    by_bits += 1;
                }
                if value.is_nan() {
                    for &[b, h, i] in &expected {
                        let nan = (0..dims.value_dim).all(|d| after.out.get([b, h, i, d]).is_nan());
                        assert!(nan, "{name} is lost in {:?}", [b, h, i]);
                    }
                }
            }
        }
    }
    println!("{by_bits} answers by their bits, {by_limits} by their limits");
    if cuda_with_wgmma().is_some() {
        assert!(
            of_16_bits >= 10 && (by_limits > 0) == (operand == Operand::Values),
            "{of_16_bits}, {by_limits}"
        );
    }
}

/// Asserts that rows outside `expected` keep their bits in every column but `column`.
fn other_columns_keep_their_bits(
    before: &Answer,
    after: &Answer,
    column: usize,
    expected: &BTreeSet<Row>,
    name: &str,
) {
    for index @ [b, h, i, d] in before.out.indices() {
        if d != column && !expected.contains(&[b, h, i]) {
            let [before, after] = [before, after].map(|answer| answer.out.get(index));
            assert_eq!(before.to_bits(), after.to_bits(), "{name}: column {column} changes {index:?}");
        }
    }
}

#[test]
fn nan_in_a_key_reaches_the_rows_that_see_it_and_no_others() {
    reach(f32::NAN, Operand::Keys);
}

#[test]
fn nan_in_a_value_reaches_the_rows_that_see_it_and_no_others() {
    reach(f32::NAN, Operand::Values);
}

#[test]
fn infinity_in_a_key_reaches_no_row_that_does_not_see_it() {
    reach(f32::INFINITY, Operand::Keys);
}

#[test]
fn infinity_in_a_value_reaches_the_rows_that_see_it_and_no_others() {
    reach(f32::INFINITY, Operand::Values);
}

#[test]
fn infinity_anywhere_gives_what_the_oracle_gives() {
    // One element of a key or value at a time: a score of +inf makes its row NaN, a score of -inf hides the key.
    for case in reach_cases() {
        for (seed, value) in [(0, f32::INFINITY), (1, f32::NEG_INFINITY), (2, f32::NAN)] {
            for which in 0..3 {
                let mut built = build(&case);
                let s = *built.problem.sequences().iter().max_by_key(|s| s.kv_len).unwrap();
                let row = s.kv_start + (s.kv_len * (seed + 1)) / 4;
                match which {
                    0 => built.k.set([s.batch, 0, row, 1], value),
                    1 => built.v.set([s.batch, 0, row, 1], value),
                    _ => built.q.set([s.batch, 0, s.q_start, 1], value),
                }
                let prepared = with_oracle(built);
                for runner in reach_runners(&prepared.built.problem) {
                    if let Err(failure) = prepared.run(&*runner) {
                        panic!("{}, {value} in {}: {failure}", case.name, ["k", "v", "q"][which]);
                    }
                }
            }
        }
    }
}

#[test]
fn the_least_finite_bias_hides_nothing() {
    // The lowest finite bf16, which f32 masks can hold too: every third row has it at all keys and is their mean,
    // other rows have 0 at one key in seven.
    const LOWEST: f32 = f32::from_bits(0xff7f_0000);
    for (dtype, [q_len, kv_len]) in
        [(Dtype::F32, [40, 700]), (Dtype::BF16, [40, 700]), (Dtype::F32, [1, 5000]), (Dtype::BF16, [3, 5000])]
    {
        let case = Case::new("least", [1, 4, 2, q_len, kv_len, 64, 64], Dtype::F32).mask(
            MaskKind::Additive(dtype),
            "bh",
            MaskFill::Open,
        );
        let mut built = build(&case);
        let Some(GuardedMask::Additive(mask)) = &mut built.mask else {
            unreachable!("asked for an additive mask")
        };
        fill(mask, |[_, _, i, j]| if i % 3 != 0 && j % 7 == 0 { 0.0 } else { LOWEST });
        let want = reference::attention(&built.problem, &built.inputs()).unwrap().out;
        for runner in all_runners(options(None, true)) {
            let got = answer(&built, &*runner).out.values();
            for (at, (got, want)) in got.iter().zip(&want).enumerate() {
                let error = (f64::from(*got) - want).abs();
                assert!(error < 1e-5, "{dtype} mask, element {at}: {got}, not {want}, on {}", runner.name());
            }
        }
    }
}

#[test]
fn a_wild_bias_of_a_key_that_a_tree_hides_reaches_no_row() {
    for (dtype, wild) in
        [Dtype::F32, Dtype::BF16].into_iter().flat_map(|d| [(d, f32::NAN), (d, f32::INFINITY)])
    {
        let case = Case::new("tree bias", [1, 4, 2, 0, 0, 64, 64], dtype)
            .cached(&[(13, 80), (1, 40), (9, 9)], 16, Keep::All)
            .at(QOffset::BottomRight)
            .tree(Tree::Random)
            .mask(MaskKind::Additive(dtype), "h", MaskFill::Open);
        let mut built = build(&case);
        let tree = built.inputs().tree.unwrap();
        let hidden = |[n, _, i, j]: [usize; 4]| {
            let s = built.problem.sequences()[n];
            let column = (j + s.q_len).checked_sub(s.kv_len).filter(|_| i < s.q_len && j < s.kv_len);
            column.is_some_and(|column| tree.bias([0, 0, s.q_start + i, column]) == f32::NEG_INFINITY)
        };
        let shape = built.problem.mask_shape();
        let indices = (0..shape[0])
            .flat_map(|n| (0..shape[2]).flat_map(move |i| (0..shape[3]).map(move |j| [n, 0, i, j])));
        let hidden: BTreeSet<[usize; 4]> = indices.filter(|&at| hidden(at)).collect();
        assert!(!hidden.is_empty());
        let Some(GuardedMask::Additive(mask)) = &mut built.mask else {
            unreachable!("asked for an additive mask")
        };
        fill(mask, |at| if hidden.contains(&at) { wild } else { 0.5 });
        let prepared = with_oracle(built);
        for runner in reach_runners(&prepared.built.problem) {
            if let Err(failure) = prepared.run(&*runner) {
                panic!("{dtype} {wild}: {failure}");
            }
        }
    }
}

/// Calls a function on a thread with a hostile floating-point environment, and checks that the function
/// leaves it so.
fn in_hostile_floats<T>(f: impl FnOnce() -> T) -> T {
    let _floats = HostileFloats::set();
    let result = f();
    assert!(HostileFloats::are_set(), "another environment was left behind");
    result
}

/// Pools whose threads, or the threads that call them, have hostile floats; and one without any.
fn pools_of_floats() -> [(bool, rayon::ThreadPool); 2] {
    [false, true].map(|hostile| {
        let start = move |_| {
            if hostile {
                std::mem::forget(HostileFloats::set())
            }
        };
        (hostile, rayon::ThreadPoolBuilder::new().num_threads(3).start_handler(start).build().unwrap())
    })
}

/// Cases of every kind, with values, biases and scores so small that they are subnormal.
fn subnormal_cases() -> Vec<CaseData> {
    let mut all = Vec::new();
    for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
        for (q_len, kv_len) in [(1, 300), (5, 700), (60, 600)] {
            let case =
                Case::new("subnormal", [1, 4, 2, q_len, kv_len, 64, 48], dtype).alibi().sinks().softcap(9.0);
            let mut built = build(&case.at(QOffset::BottomRight));
            let (v, q) = (built.v.clone(), built.q.clone());
            let tiny = if dtype == Dtype::F16 { 1e-7 } else { 1e-39 };
            fill(&mut built.v, |index| tiny * v.get(index));
            fill(&mut built.q, |index| if index[2] % 2 == 0 { q.get(index) } else { tiny * q.get(index) });
            all.push(built);
        }
    }
    for (k, v) in [
        (Codec::Int8, Codec::Tq4),
        (Codec::Fp8, Codec::Fp8),
        (Codec::Tq3, Codec::F16),
        (Codec::F32, Codec::Int8),
    ] {
        for q_len in [1, 20] {
            let case = Case::new("codes", [1, 4, 2, 0, 0, 64, 64], Dtype::F32).stored(k, v);
            all.push(build(
                &case.cached(&[(q_len, 300), (q_len, 77)], 16, Keep::All).at(QOffset::BottomRight),
            ));
        }
    }
    all
}

#[test]
fn bits_do_not_depend_on_the_floats_of_any_thread() {
    let pools = pools_of_floats();
    for built in subnormal_cases() {
        let oracle = reference::attention(&built.problem, &built.inputs()).unwrap();
        let in_hostile = in_hostile_floats(|| reference::attention(&built.problem, &built.inputs()).unwrap());
        assert!(oracle == in_hostile, "the oracle on {:?}", built.problem.desc());
        for runner in quantizing(1) {
            let want = answer(&built, &runner);
            let alone = in_hostile_floats(|| answer(&built, &runner));
            assert!(alone.bits() == want.bits(), "{runner:?} on {:?}", built.problem.desc());
            for (hostile, pool) in &pools {
                let shared = with_threads(runner, 3);
                let got = pool.install(|| {
                    let got = answer(&built, &shared);
                    assert_eq!(HostileFloats::are_set(), *hostile, "another environment was left behind");
                    got
                });
                assert!(got.bits() == want.bits(), "{runner:?}, {hostile}, on {:?}", built.problem.desc());
            }
        }
    }
}

#[test]
fn codes_means_and_merges_do_not_depend_on_floats() {
    let mut rng = Rng::new(6);
    let rows: Vec<f32> =
        (0..40 * 2 * 256).map(|n| rng.normal() * [1.0, 1e-3, 1e-7, 3e-39][n / 256 % 4]).collect();
    let view = TensorView::packed(&rows, [40, 2, 256]).unwrap();
    let shape = CacheShape { layers: 1, kv_heads: 2, head_dim: 256, value_dim: 256 };
    for codec in Codec::ALL {
        let work = || {
            let desc = CacheDesc::new(CacheLayout::Paged { pages: 8, page_size: 8 }, shape, codec);
            let mut cache = KvCache::new(desc).unwrap();
            if codec.dtype().is_none() {
                cache.set_key_mean(0, &key_mean(&view)).unwrap();
            }
            let seq = cache.create().unwrap();
            cache.append(&[(seq, 40)], &[(view, view)]).unwrap();
            let mut back = [
                Guarded::new(Dtype::F32, [1, 2, 40, 256], Layout::Bhsd),
                Guarded::new(Dtype::F16, [1, 2, 40, 256], Layout::Bhsd),
            ];
            let [k, v] = &mut back;
            cache.linearize(seq, 0, &mut k.view_mut(), &mut v.view_mut()).unwrap();
            (cache.snapshot(seq).unwrap().to_bytes(), back.map(|x| x.bits()))
        };
        assert!(work() == in_hostile_floats(work), "{codec}");
    }
    let states: Vec<Vec<f32>> =
        (0..3).map(|_| (0..2 * 200 * 16).map(|_| 1e-39 * rng.normal()).collect()).collect();
    let lse: Vec<Vec<f32>> = (0..3).map(|_| (0..400).map(|_| rng.normal()).collect()).collect();
    for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
        let work = || {
            let views: Vec<_> = states
                .iter()
                .zip(&lse)
                .map(|(out, lse)| AttentionState {
                    out: TensorView::bhsd(out, [1, 2, 200, 16]).unwrap(),
                    lse,
                })
                .collect();
            let (mut out, mut of_all) =
                (Guarded::new(dtype, [1, 2, 200, 16], Layout::Bhsd), vec![0.0f32; 400]);
            let mut outputs = Outputs::new(out.view_mut());
            outputs.lse = Some(&mut of_all);
            merge(&views, &mut outputs).unwrap();
            (out.bits(), of_all.into_iter().map(f32::to_bits).collect::<Vec<_>>())
        };
        let want = pools_of_floats()[0].1.install(work);
        for (hostile, pool) in pools_of_floats() {
            assert!(pool.install(work) == want, "{dtype}, {hostile}");
        }
    }
}

#[test]
fn the_default_scale_does_not_depend_on_floats() {
    let scales = || -> Vec<u32> {
        let dims = |head_dim| Dims {
            batch: 1,
            q_heads: 1,
            kv_heads: 1,
            q_len: 1,
            kv_len: 1,
            head_dim,
            value_dim: 1,
        };
        (1..=512)
            .map(|d| ProblemDesc::new(dims(d), Dtype::F32).validate().unwrap().scale().to_bits())
            .collect()
    };
    assert_eq!(scales(), in_hostile_floats(scales));
}
