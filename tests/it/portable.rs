//! The portable kernels on this machine's CUDA device. Without one, the tests print so and pass.

use crate::support::{answer, build, cuda};
use flashtile::cuda::{Cuda, CudaError};
use flashtile::plan::{PortableTile, machines};
use flashtile::{Codec, CudaPlan, Dtype, KernelChoice, Outputs, PlanOptions, QOffset, Unsupported};
use flashtile_testkit::{
    Case, CudaRunner, DevicePlacement, Failure, Guarded, GuardedRun, Keep, Prepared, Rng, Runner, catalogue,
    conformance, quantized, random_case,
};

fn options(splits: Option<usize>) -> PlanOptions {
    let mut options = crate::support::options(splits, true);
    options.kernels = KernelChoice::Portable;
    options
}

fn runner(cuda: Cuda) -> CudaRunner {
    CudaRunner::new(cuda).with(options(None))
}

/// Returns true if kernels support the positions of a case.
fn is_supported(case: &Case) -> bool {
    let problem = case.desc.clone().validate().unwrap();
    let plan = CudaPlan::new(&problem, &machines::T4, options(None));
    !matches!(plan, Err(Unsupported::Position { .. }))
}

#[test]
fn the_catalogue_and_random_cases_pass() {
    let Some(cuda) = cuda() else { return };
    let runner = runner(cuda);
    let runners = [runner.clone(), runner.clone().odd(), runner.narrow()];
    let runners: Vec<&dyn Runner> = runners.iter().map(|r| r as &dyn Runner).collect();
    let random = (0..200).map(|seed| {
        let mut rng = Rng::new(seed);
        random_case(format!("seed {seed}"), &mut |n| rng.below(n))
    });
    let cases: Vec<Case> = catalogue().into_iter().chain(random).collect();
    let (mut passed, mut skipped, mut failed) = (0, 0, Vec::new());
    conformance(&cases, &runners, |result| match &result.result {
        Ok(_) => passed += 1,
        Err(Failure::Skipped(_)) if !is_supported(result.case) => skipped += 1,
        Err(_) => failed.push(result.to_string()),
    });
    println!("{passed} passed, {skipped} of positions that there are no kernels for");
    assert!(failed.is_empty(), "{} failed:\n{}", failed.len(), failed.join("\n"));
    assert!(passed > 500, "{passed}");
}

/// Returns true if a device of one multiprocessor runs prefill: a few rows fill it.
fn is_prefill(case: &Case) -> bool {
    let mut facts = machines::H200;
    facts.multiprocessors = 1;
    let plan = CudaPlan::new(&case.desc.clone().validate().unwrap(), &facts, options(None));
    plan.is_ok_and(|plan| plan.kernel().contains("prefill"))
}

#[test]
fn prefill_passes_cases_of_every_feature() {
    let Some(cuda) = cuda() else { return };
    let runner = runner(cuda).narrow();
    // Dtypes and shapes of masks follow each other in twos and fours.
    let cases: Vec<Case> = catalogue().into_iter().chain(quantized()).filter(is_prefill).step_by(7).collect();
    let (mut passed, mut failed) = (0, Vec::new());
    conformance(&cases, &[&runner as &dyn Runner], |result| match &result.result {
        Ok(_) => passed += 1,
        Err(_) => failed.push(result.to_string()),
    });
    println!("{passed} of {} passed", cases.len());
    assert!(failed.is_empty() && passed == cases.len(), "{} failed:\n{}", failed.len(), failed.join("\n"));
}

/// A tile of prefill for a case, where the matrix unit multiplies its elements.
fn prefill_tile(case: &Case) -> Option<PortableTile> {
    let problem = case.desc.clone().validate().unwrap();
    let is_f32 = |codec: Codec| codec.dtype().is_some_and(|of| of == Dtype::F32 || of != problem.dtype());
    if is_f32(problem.k_codec()) || is_f32(problem.v_codec()) {
        return None;
    }
    Some(match problem.dims().head_dim.max(problem.dims().value_dim) {
        ..=128 => PortableTile::prefill(32, 32, 2, 1),
        129..=256 => PortableTile::prefill(32, 16, 4, 1).with_team(2),
        257.. => PortableTile::prefill(16, 16, 4, 1).with_team(4),
    })
}

#[test]
fn prefill_passes_cases_that_plans_give_to_decode() {
    let Some(cuda) = cuda() else { return };
    let cases =
        catalogue().into_iter().chain(quantized()).filter(|case| !is_prefill(case) && is_supported(case));
    let tiled = cases.filter_map(|case| prefill_tile(&case).map(|tile| (case, tile)));
    let (mut passed, mut failed) = (0, Vec::new());
    for (case, tile) in tiled.step_by(5) {
        let runner = runner(cuda.clone()).tiled(tile);
        conformance(std::slice::from_ref(&case), &[&runner as &dyn Runner], |result| match &result.result {
            Ok(_) => passed += 1,
            Err(_) => failed.push(result.to_string()),
        });
    }
    println!("{passed} passed");
    assert!(failed.is_empty(), "{} failed:\n{}", failed.len(), failed.join("\n"));
    assert!(passed > 50, "{passed}");
}

#[test]
fn enough_cases_are_cases_of_prefill() {
    let count = |cases: Vec<Case>| cases.iter().filter(|case| is_prefill(case)).count();
    let (elements, codes) = (count(catalogue()), count(quantized()));
    assert!(elements > 100 && codes > 20, "{elements} cases of elements, {codes} of codes");
}

#[test]
fn quantized_cases_pass() {
    let Some(cuda) = cuda() else { return };
    // The kernels that plans choose for codes; then at odd addresses; then with all work in one threadgroup's
    // turn.
    let runner = CudaRunner::new(cuda);
    let runners = [runner.clone(), runner.clone().odd(), runner.narrow()];
    let runners: Vec<&dyn Runner> = runners.iter().map(|r| r as &dyn Runner).collect();
    let (mut passed, mut failed) = (0, Vec::new());
    conformance(&quantized(), &runners, |result| match &result.result {
        Ok(_) => passed += 1,
        Err(Failure::Skipped(_)) if !is_supported(result.case) => {}
        Err(_) => failed.push(result.to_string()),
    });
    println!("{passed} passed");
    assert!(failed.is_empty(), "{} failed:\n{}", failed.len(), failed.join("\n"));
    assert!(passed > 300, "{passed}");
}

/// Cases with several splits, and others; every dtype.
fn some_cases() -> Vec<Case> {
    catalogue().into_iter().filter(is_supported).step_by(3).collect()
}

#[test]
fn two_runs_have_the_same_bits_wherever_tensors_lie() {
    let Some(cuda) = cuda() else { return };
    let runner = runner(cuda);
    for case in some_cases() {
        let built = build(&case);
        let want = answer(&built, &runner).bits();
        for other in [runner.clone(), runner.clone().odd()] {
            assert!(answer(&built, &other).bits() == want, "{} on {}", case.name, other.name());
        }
    }
}

#[test]
fn any_number_of_splits_is_within_the_limits() {
    let Some(cuda) = cuda() else { return };
    let late = catalogue().into_iter().filter(|case| case.name.ends_with("_late") && is_supported(case));
    for case in some_cases().into_iter().chain(late) {
        let prepared = Prepared::new(&case).unwrap();
        for splits in [1, 2, 3, 7, 16] {
            match prepared.run(&CudaRunner::new(cuda.clone()).with(options(Some(splits)))) {
                Ok(_) | Err(Failure::Skipped(_)) => {}
                Err(failure) => panic!("{} in {splits} splits: {failure}", case.name),
            }
        }
    }
}

/// Decode steps over sequences with these numbers of keys, each in one page of an equally large pool.
fn steps(lens: &[usize]) -> Case {
    let steps: Vec<(usize, usize)> = lens.iter().map(|&len| (1, len)).collect();
    // An equal name gives equal queries.
    Case::new("update", [1, 8, 2, 0, 0, 64, 64], Dtype::F16)
        .cached(&steps, 4096, Keep::All)
        .causal(QOffset::BottomRight)
}

#[test]
fn a_captured_graph_computes_the_plan_of_an_update() {
    let Some(cuda) = cuda() else { return };
    let plan = |built: &flashtile_testkit::CaseData| {
        CudaPlan::new(&built.problem, cuda.facts(), options(None)).unwrap()
    };
    let (first, second) = (build(&steps(&[900, 20, 4000, 1])), build(&steps(&[3000, 1500, 7, 4096])));
    let mut out = Guarded::new(Dtype::F16, first.problem.dims().out_shape(), first.layout);
    let outputs = Outputs::new(out.view_mut());
    // The pools of the longer sequences; the first plan sees fewer of their keys.
    let mut inputs = second.inputs();
    inputs.tables = first.tables.as_ref();
    let placement = DevicePlacement::default();
    let mut run = GuardedRun::new(&cuda, &plan(&first), &inputs, &outputs, placement).unwrap();
    run.seconds().unwrap();
    run.update(&plan(&second), second.tables.as_ref().unwrap()).unwrap();
    run.seconds().unwrap();
    let bits = |run: &GuardedRun| {
        let mut got = out.clone();
        run.read(&mut Outputs::new(got.view_mut())).unwrap();
        got.bits()
    };
    let got = bits(&run);
    assert!(got == answer(&second, &runner(cuda.clone())).out.bits());
    run.seconds().unwrap();
    assert!(bits(&run) == got);
    let native = cuda.plan(&second.problem, crate::support::options(None, true)).unwrap();
    if !native.kernels().any(|kernel| kernel.is_portable) {
        let refusal = run.update(&native, second.tables.as_ref().unwrap()).unwrap_err();
        assert!(matches!(refusal, CudaError::Update { .. }), "{refusal}");
    }
}

#[test]
fn kernels_are_compiled_ahead() {
    let Some(cuda) = cuda() else { return };
    let plans: Vec<CudaPlan> = [steps(&[5]), Case::new("dense", [1, 2, 2, 5, 9, 64, 64], Dtype::F32)]
        .iter()
        .map(|case| cuda.plan(&build(case).problem, options(None)).unwrap())
        .collect();
    cuda.prewarm(&plans).unwrap();
}
