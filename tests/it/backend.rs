//! Names of backends, and the choice between them for machines that are absent.

use flashtile::plan::{
    AnyFacts, CpuFacts, CudaFacts, Machine, Presence, TileSize, choose, known_machines, machines,
};
use flashtile::quality::{Tolerance, compare_out};
use flashtile::{
    BackendName, Choice, Codec, CpuPlan, CudaPlan, Dims, Dtype, Error, HeadShape, Inputs, KernelChoice,
    MetalPlan, Outputs, OwnedTensor, PlanOptions, Problem, ProblemDesc, QOffset, SeqLens, Visibility,
    reference,
};

const NO_DRIVER: &str = "no NVIDIA driver on this machine: tried libcuda.so, libcuda.so.1";

/// Causal attention of the rows of one sequence to themselves, 32/8 heads of 128.
fn prefill(q_len: usize, dtype: Dtype) -> Problem {
    let dims =
        Dims { batch: 1, q_heads: 32, kv_heads: 8, q_len, kv_len: q_len, head_dim: 128, value_dim: 128 };
    let mut desc = ProblemDesc::new(dims, dtype);
    desc.visibility = Visibility::causal();
    desc.validate().unwrap()
}

/// The next token of sequences in a cache, 32/8 heads of 128.
fn decode(kv_len: usize, sequences: usize, codecs: Option<[Codec; 2]>) -> Problem {
    let shape = HeadShape { q_heads: 32, kv_heads: 8, head_dim: 128, value_dim: 128 };
    let mut desc = ProblemDesc::cached(shape, Dtype::BF16, &vec![SeqLens::decode(kv_len); sequences]);
    (desc.k_codec, desc.v_codec) = codecs.map_or((None, None), |[k, v]| (Some(k), Some(v)));
    desc.validate().unwrap()
}

/// A decode step over dense tensors, which a device has to be given.
fn dense_decode(kv_len: usize) -> Problem {
    let dims = Dims { batch: 1, q_heads: 32, kv_heads: 8, q_len: 1, kv_len, head_dim: 128, value_dim: 128 };
    ProblemDesc::new(dims, Dtype::BF16).validate().unwrap()
}

fn with(cpu: CpuFacts, name: &str, facts: CudaFacts) -> Machine {
    Machine::new(cpu).with(Presence::Present { name: name.to_owned(), facts: AnyFacts::new(facts) })
}

fn chosen(problem: &Problem, machine: &Machine) -> String {
    choose(problem, PlanOptions::default(), machine).to_string()
}

#[test]
fn reasons_of_absent_machines() {
    let h200 = with(machines::AVX512_2, "NVIDIA H200", machines::H200);
    let large = with(machines::AMX_64, "NVIDIA H200", machines::H200);
    let t4 = with(machines::AVX2_8, "Tesla T4", machines::T4);
    let none = Machine::new(machines::AVX2_8).with(Presence::Absent { why: NO_DRIVER.to_owned() });
    let not_built = Machine::new(machines::AVX2_8).with(Presence::NotBuilt { feature: "cuda" });
    let codes = Some([Codec::Int8, Codec::Tq4]);
    let cases = [
        (
            prefill(4096, Dtype::BF16),
            &h200,
            "cuda: NVIDIA H200; native prefill, about 9.5 ms with start and copies, 530 ms on the cpu",
        ),
        (
            prefill(4096, Dtype::F32),
            &h200,
            "cuda: NVIDIA H200; native prefill, about 24 ms with start and copies, 530 ms on the cpu",
        ),
        (
            prefill(16, Dtype::BF16),
            &h200,
            "cpu: about 14 us, on NVIDIA H200 83 us, of which start and copies take 83 us",
        ),
        (
            prefill(4096, Dtype::BF16),
            &large,
            "cpu: about 4.3 ms, on NVIDIA H200 9.5 ms, of which start and copies take 8.4 ms",
        ),
        (
            prefill(4096, Dtype::F16),
            &t4,
            "cuda: Tesla T4; portable prefill, about 20 ms with start and copies, 230 ms on the cpu",
        ),
        (
            decode(8192, 16, None),
            &h200,
            "cuda: NVIDIA H200; native decode, about 590 us with start and copies, 22 ms on the cpu",
        ),
        (
            decode(8192, 16, codes),
            &h200,
            "cuda: NVIDIA H200; portable decode, about 270 us with start and copies, 8.6 ms on the cpu",
        ),
        (
            decode(64, 1, None),
            &h200,
            "cpu: about 16 us, on NVIDIA H200 52 us, of which start and copies take 52 us",
        ),
        (
            dense_decode(8192),
            &h200,
            "cpu: about 1.4 ms, on NVIDIA H200 3.4 ms, of which start and copies take 3.4 ms",
        ),
        (
            decode(8192, 16, None),
            &t4,
            "cuda: Tesla T4; portable decode, about 1.8 ms with start and copies, 5.6 ms on the cpu",
        ),
        (
            prefill(4096, Dtype::BF16),
            &none,
            "cpu: no NVIDIA driver on this machine: tried libcuda.so, libcuda.so.1",
        ),
        (prefill(4096, Dtype::BF16), &not_built, "cpu: this build lacks the cargo feature cuda"),
    ];
    for (problem, machine, want) in cases {
        assert_eq!(chosen(&problem, machine), want);
        let choice = choose(&problem, PlanOptions::default(), machine);
        assert_eq!(choice.plan.unwrap().backend(), choice.backend);
    }
}

#[test]
fn metal_is_the_device_of_apples_systems() {
    let apple = |metal: Presence| Machine::new(machines::PORTABLE_4).with(metal);
    let known = |wanted: &str| machines::ALL_APPLE.iter().find(|(name, _)| *name == wanted).unwrap().1;
    let present =
        |name: &str, facts| Presence::Present { name: name.to_owned(), facts: AnyFacts::new(facts) };
    let (m1, max) = (present("Apple M1", known("m1")), present("Apple M3 Max", known("m3-max")));
    let failed = "Apple M1 computes prefill wrongly: nrmse 1 of 0.001";
    let cases = [
        (
            prefill(4096, Dtype::F16),
            apple(m1.clone()),
            "metal: Apple M1; prefill, about 120 ms with start and copies, 2.9 s on the cpu",
        ),
        (
            prefill(4096, Dtype::F32),
            apple(max.clone()),
            "metal: Apple M3 Max; prefill, about 43 ms with start and copies, 2.9 s on the cpu",
        ),
        (
            decode(8192, 16, Some([Codec::Int8, Codec::Tq4])),
            apple(max.clone()),
            "metal: Apple M3 Max; decode, about 860 us with start and copies, 45 ms on the cpu",
        ),
        (
            decode(64, 1, None),
            apple(max),
            "cpu: about 27 us, on Apple M3 Max 200 us, of which start and copies take 200 us",
        ),
        (
            prefill(4096, Dtype::F16),
            apple(Presence::Absent { why: failed.to_owned() }),
            "cpu: Apple M1 computes prefill wrongly: nrmse 1 of 0.001",
        ),
        (
            prefill(4096, Dtype::F16),
            apple(Presence::NotBuilt { feature: "metal" }),
            "cpu: this build lacks the cargo feature metal",
        ),
    ];
    for (problem, machine, want) in cases {
        assert_eq!(chosen(&problem, &machine), want);
    }
    // A plan of native kernels is none of Metal's.
    let mut native = PlanOptions::default();
    native.kernels = KernelChoice::Native;
    let refused = choose(&prefill(16, Dtype::F16), native, &apple(m1));
    assert_eq!(
        refused.reason,
        "Apple M1 has no plan: no plan for this device: on Metal all kernels are portable ones"
    );
}

#[test]
#[cfg(not(target_vendor = "apple"))]
fn metal_is_refused_elsewhere() {
    let error =
        "metal".parse::<BackendName>().unwrap().choose(&prefill(16, Dtype::F16), PlanOptions::default());
    let error = error.unwrap_err();
    assert!(matches!(error, Error::System { .. }), "{error:?}");
    assert!(error.to_string().starts_with("metal needs a system of Apple's, this is "), "{error}");
}

#[test]
fn a_refusal_is_the_reason() {
    let t4 = with(machines::AVX2_8, "Tesla T4", machines::T4);
    let dims =
        Dims { batch: 1, q_heads: 8, kv_heads: 8, q_len: 512, kv_len: 512, head_dim: 72, value_dim: 72 };
    let mut far = ProblemDesc::new(dims, Dtype::F16);
    far.visibility = Visibility::causal();
    far.q_offset = Some(QOffset::At((1 << 31) - 1));
    assert_eq!(
        chosen(&far.validate().unwrap(), &t4),
        "cpu: Tesla T4 has no plan: a query or key is at position 2147483647, expected at most 1073741824 from the first key"
    );
    let old = CudaFacts { capability: (7, 0), ..machines::T4 };
    let old = with(machines::AVX2_8, "Tesla V100", old);
    assert_eq!(
        chosen(&prefill(64, Dtype::F16), &old),
        "cpu: Tesla V100 has no plan: compute capability 7.0, expected at least 7.5"
    );
}

#[test]
fn options_that_one_backend_refuses_choose_the_other() {
    let mut options = PlanOptions::default();
    options.kernels = KernelChoice::Native;
    let problem = decode(64, 1, None);
    let h200 = with(machines::AVX512_2, "NVIDIA H200", machines::H200);
    assert_eq!(
        choose(&problem, options, &h200).to_string(),
        "cuda: NVIDIA H200; native decode, as the cpu has no plan: native kernels asked for, the backend has only one kind"
    );
    // Where neither has a plan, the reason and the refusal are both there.
    let t4 = with(machines::AVX512_2, "Tesla T4", machines::T4);
    let neither = choose(&problem, options, &t4);
    assert_eq!(
        neither.to_string(),
        "cpu: Tesla T4 has no plan: compute capability 7.5, expected at least 8.0"
    );
    assert_eq!(neither.backend, "cpu");
    assert!(neither.plan.unwrap_err().to_string().contains("native kernels asked for"));
}

#[test]
fn extreme_problems_are_chosen_for() {
    let h200 = with(machines::AVX512_2, "NVIDIA H200", machines::H200);
    let empty = ProblemDesc::cached(
        HeadShape { q_heads: 32, kv_heads: 8, head_dim: 128, value_dim: 128 },
        Dtype::BF16,
        &[],
    );
    assert_eq!(choose(&empty.validate().unwrap(), PlanOptions::default(), &h200).backend, "cpu");
    let no_threads = with(CpuFacts { threads: 0, ..machines::AVX2_8 }, "?", machines::H200);
    assert!(chosen(&prefill(64, Dtype::F32), &no_threads).contains("about"));
}

#[test]
fn backends_have_names() {
    for name in ["auto", "cpu", "cuda", "cuda:1", "cuda:12", "metal", "reference", "simulator"] {
        assert_eq!(name.parse::<BackendName>().unwrap().to_string(), name);
    }
    let second: BackendName = "cuda:1".parse().unwrap();
    assert_eq!((second.backend(), second.device(), second.is_auto()), ("cuda", 1, false));
    assert_eq!("cuda:0".parse::<BackendName>(), "cuda".parse());
    assert_eq!(BackendName::default(), BackendName::AUTO);
    assert!(matches!(BackendName::AUTO.open(), Err(Error::BackendName(_))));
    for name in ["", "CPU", "cuda1", "tpu", "cpu:0", " cuda"] {
        let want = format!(
            "no backend is called '{name}', expected auto, cpu, cuda, cuda:N, metal, reference or simulator"
        );
        assert_eq!(name.parse::<BackendName>().unwrap_err().to_string(), want);
    }
    for name in ["cuda:", "cuda:x", "cuda:+1", "cuda:-1", "cuda:1.0", "cuda:99999999999999999999999"] {
        let want = format!("'{name}', expected cuda:N, where N is the number of a device, counted from 0");
        assert_eq!(name.parse::<BackendName>().unwrap_err().to_string(), want);
    }
}

#[test]
fn backends_of_this_machine() {
    let problem = prefill(16, Dtype::F32);
    let cpu = Choice::named("cpu", &problem).unwrap();
    assert_eq!(cpu.to_string(), "cpu: asked for");
    assert_eq!(cpu.plan.unwrap().of::<CpuPlan>().unwrap().problem(), &problem);
    assert!(matches!(Choice::named("tpu", &problem), Err(Error::BackendName(_))));
    let auto = Choice::named("auto", &problem).unwrap();
    assert_eq!(auto.to_string(), Choice::auto(&problem).to_string());
    assert_eq!(auto.plan.unwrap(), auto.backend.plan(&problem, PlanOptions::default()).unwrap());
    // A device that no machine has, and with no driver none at all.
    let Err(error) = Choice::named("cuda:4096", &problem) else { panic!("4097 devices") };
    assert!(error.of_device::<flashtile::cuda::CudaError>().is_some(), "{error:?}");
    match flashtile::cuda::Cuda::count() {
        Ok(count) => {
            let want = format!("no CUDA device 4096: this machine has {count}, counted from 0");
            assert_eq!(error.to_string(), want);
        }
        Err(why) => {
            assert_eq!(error.to_string(), why.to_string());
            assert_eq!(auto.reason, why.to_string());
        }
    }
}

/// Every way to run a problem gives the oracle's answer, on every backend of this machine.
#[test]
fn every_backend_of_this_machine_runs() {
    let dims = Dims { batch: 1, q_heads: 4, kv_heads: 2, q_len: 3, kv_len: 70, head_dim: 64, value_dim: 64 };
    let tensor = |shape: [usize; 4], seed: usize| {
        let elements = (0..shape.iter().product()).map(|at: usize| ((at * seed % 37) as f32 - 18.0) / 16.0);
        OwnedTensor::from_vec(elements.collect::<Vec<f32>>(), shape).unwrap()
    };
    let (q, k, v) = (tensor(dims.q_shape(), 5), tensor(dims.k_shape(), 7), tensor(dims.v_shape(), 11));
    let mut desc = ProblemDesc::new(dims, Dtype::F32);
    (desc.visibility, desc.q_offset) = (Visibility::causal(), Some(QOffset::BottomRight));
    let problem = desc.clone().validate().unwrap();
    let inputs = Inputs::new(q.view(), k.view(), v.view());
    let want = reference::attention(&problem, &inputs).unwrap();
    let mut ran = Vec::new();
    for (name, backend) in BackendName::all() {
        let Ok(backend) = backend else { continue };
        let plan = backend.plan(&problem, PlanOptions::default()).unwrap();
        let tolerance = Tolerance::of(Dtype::F32, dims.kv_len, plan.accumulation());
        let checked = |how: &str, compute: &mut dyn FnMut(&mut Outputs<'_>) -> flashtile::Result<()>| {
            let mut out = OwnedTensor::zeros(Dtype::F32, dims.out_shape()).unwrap();
            let mut lse = vec![f32::NAN; dims.q_heads * dims.q_len];
            let mut outputs = Outputs::new(out.view_mut());
            outputs.lse = Some(&mut lse);
            compute(&mut outputs).unwrap_or_else(|error| panic!("{name} {how}: {error}"));
            let out = out.into_vec::<f32>().unwrap();
            let report = compare_out(&out, &want, Dtype::F32, &tolerance);
            assert!(report.within(), "{name} {how}: {report}");
            let close = |(got, want): (&f32, &f64)| (f64::from(*got) - want).abs() < 1e-4;
            assert!(lse.iter().zip(&want.lse).all(close), "{name} {how}: {lse:?}");
        };
        backend.prepare(&plan).unwrap();
        checked("compute", &mut |outputs| backend.compute(&desc, &inputs, outputs));
        checked("run", &mut |outputs| backend.run(&plan, &inputs, outputs));
        let mut session = backend.session(PlanOptions::default()).unwrap();
        checked("session", &mut |outputs| session.compute(&desc, &inputs, outputs));
        checked("session again", &mut |outputs| session.compute(&desc, &inputs, outputs));
        checked("timed", &mut |outputs| {
            let mut run = backend.timed(&plan, &[inputs, inputs], outputs)?;
            assert!(run.seconds(outputs)? > 0.0 && run.seconds(outputs)? > 0.0);
            run.download(outputs)
        });
        let mut out = OwnedTensor::zeros(Dtype::F32, dims.out_shape()).unwrap();
        assert!(backend.timed(&plan, &[], &Outputs::new(out.view_mut())).is_err(), "{name} without inputs");
        // A plan of another backend is refused.
        let other = known_machines()[0].1.plan(&problem, PlanOptions::default()).unwrap();
        let mut out = OwnedTensor::zeros(Dtype::F32, dims.out_shape()).unwrap();
        let refused = backend.run(&other, &inputs, &mut Outputs::new(out.view_mut()));
        let is_own = other.backend() == plan.backend();
        assert!(is_own || matches!(refused, Err(Error::Run(_))), "{name}: {refused:?}");
        ran.push(name.to_string());
    }
    assert!(ran.starts_with(&["cpu".to_owned()]) && ran.contains(&"reference".to_owned()), "{ran:?}");
}

#[test]
fn every_plan_says_what_the_plan_inside_says() {
    for (name, facts) in known_machines() {
        for problem in [prefill(512, Dtype::BF16), decode(4096, 2, None)] {
            let plan = facts.plan(&problem, PlanOptions::default()).unwrap();
            assert_eq!((plan.backend(), plan.problem()), (facts.backend(), &problem), "{name}");
            assert_eq!(plan.facts(), facts, "{name}");
            assert!(plan.kernel().starts_with(plan.backend()), "{name}: {}", plan.kernel());
            let shown = plan.to_string();
            assert!(shown.ends_with(&format!("workspace {}", plan.workspace_bytes())), "{shown}");
            assert!(shown.contains(plan.kernel().split('+').next().unwrap()), "{shown}");
            assert_eq!(plan, facts.plan(&problem, PlanOptions::default()).unwrap(), "{name}");
            assert_ne!(facts.plan(&prefill(64, Dtype::F32), PlanOptions::default()).unwrap(), plan);
            let TileSize { rows, keys } = plan.tile(&problem.sequences()[0]);
            let inner = match (plan.of::<CpuPlan>(), plan.of::<CudaPlan>(), plan.of::<MetalPlan>()) {
                (Some(inner), None, None) => {
                    assert_eq!((rows, keys), (inner.tile_rows(), inner.block_k()));
                    (inner.splits(), inner.task_count())
                }
                (None, Some(inner), None) => {
                    assert!(inner.kernels().any(|k| (k.rows, k.keys) == (rows, keys)));
                    (inner.splits(), inner.task_count())
                }
                (None, None, Some(inner)) => {
                    assert_eq!((rows, keys), (inner.tile().rows(), inner.tile().keys()));
                    (inner.splits(), inner.task_count())
                }
                all => panic!("{all:?}"),
            };
            assert_eq!((plan.splits(), plan.task_count()), inner, "{name}");
            let explained = plan.explain();
            assert!(explained.lines.iter().any(|(heading, _)| *heading == "kernel"), "{explained:?}");
            assert!(!explained.machine.is_empty() && !explained.fields.is_empty());
            // The serialised form has these names beside the fields.
            let taken = ["backend", "kernel", "tasks", "splits", "workspace_bytes", "problem", "options"];
            assert!(explained.fields.iter().all(|(name, _)| !taken.contains(name)), "{:?}", explained.fields);
        }
    }
}
