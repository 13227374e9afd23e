//! Golden plans: what realistic problems would run on machines, most of which are absent.
//!
//! `FLASHTILE_BLESS=1` rewrites the table; review the difference before committing it.

use flashtile::plan::{
    CudaFacts, NATIVE_CAPABILITY, PortableTile, Sm80Tile, isa_for, known_machines, machines,
};
use flashtile::{
    Codec, CpuPlan, CudaPlan, Dtype, HeadShape, KernelChoice, MaskKind, PlanOptions, ProblemDesc, QOffset,
    SeqLens, Unsupported, Visibility,
};
use flashtile_gpu::facts::GpuFacts;
use flashtile_gpu::launches::{Launches, Strides};
use flashtile_gpu::machines::{ALL_APPLE, M1, M1_PIPELINE_448, M3_MAX};
use flashtile_gpu::plan::Plan;
use flashtile_gpu::portable_kernel::PortableKernel;
use flashtile_testkit::{Case, Keep, MaskFill};
use std::fmt::Write;
use std::path::Path;

fn problems() -> Vec<Case> {
    let bf16 = |name: &str, dims| Case::new(name, dims, Dtype::BF16);
    let many: Vec<(usize, usize)> = (0..32).map(|n| (17 + 61 * n % 400, 17 + 61 * n % 400)).collect();
    let decode: Vec<(usize, usize)> = (0..16).map(|n| (1, 100 + 997 * n % 4000)).collect();
    let tq4 = |name: &str, steps: &[(usize, usize)]| {
        bf16(name, [1, 32, 8, 0, 0, 128, 128]).stored(Codec::Tq4, Codec::Tq4).cached(steps, 16, Keep::All)
    };
    vec![
        tq4("tq4-chunk-256-after-7936", &[(256, 8192)]).causal(QOffset::BottomRight),
        tq4("tq4-one-chunk-7-steps", &[&[(256, 8192)][..], &[(1, 4000); 7]].concat())
            .causal(QOffset::BottomRight),
        bf16("d512-prefill-2048", [1, 8, 8, 2048, 2048, 512, 512]).causal(QOffset::TopLeft),
        bf16("llama-prefill-512", [1, 32, 8, 512, 512, 128, 128]).causal(QOffset::TopLeft),
        bf16("llama-prefill-4096", [1, 32, 8, 4096, 4096, 128, 128]).causal(QOffset::TopLeft),
        bf16("llama-chunk-512-after-7680", [1, 32, 8, 512, 8192, 128, 128]).causal(QOffset::BottomRight),
        bf16("llama-decode-4096", [1, 32, 8, 1, 4096, 128, 128]).causal(QOffset::BottomRight),
        bf16("llama-decode-131072", [1, 32, 8, 1, 131_072, 128, 128]).causal(QOffset::BottomRight),
        bf16("llama-decode-batch-16", [16, 32, 8, 1, 4096, 128, 128]).causal(QOffset::BottomRight),
        bf16("llama-decode-packed", [1, 32, 8, 0, 0, 128, 128]).packed(&decode).causal(QOffset::BottomRight),
        bf16("llama-decode-one-long-15-short", [1, 32, 8, 0, 0, 128, 128])
            .cached(&[&[(1, 131_072)][..], &[(1, 1024); 15]].concat(), 16, Keep::All)
            .causal(QOffset::BottomRight),
        bf16("llama-decode-32-after-8192-shared", [1, 32, 8, 0, 0, 128, 128])
            .cached(&[(1, 8700); 32], 16, Keep::All)
            .causal(QOffset::BottomRight)
            .shared(&[(0..32, 8192)]),
        bf16("chunks-and-steps", [1, 32, 8, 0, 0, 128, 128])
            .cached(&[&[(512, 2048)][..], &[(1, 3000); 24]].concat(), 16, Keep::All)
            .causal(QOffset::BottomRight),
        bf16("speculative-8", [1, 32, 8, 8, 4096, 128, 128]).causal(QOffset::BottomRight),
        bf16("tree-mask-64", [1, 32, 8, 64, 2048, 128, 128]).mask(MaskKind::Bool, "bh", MaskFill::Random),
        Case::new("minilm-batch-32", [32, 12, 12, 256, 256, 32, 32], Dtype::F32).kv_lens(&[200; 32]),
        Case::new("embedding-packed", [1, 12, 12, 0, 0, 64, 64], Dtype::F16).packed(&many),
        bf16("gemma-window-4096", [1, 8, 4, 4096, 4096, 256, 256])
            .softcap(50.0)
            .causal(QOffset::TopLeft)
            .seeing(Visibility::window(Some(1023), None)),
        bf16("gpt-oss-window-128", [1, 64, 8, 2048, 2048, 64, 64])
            .sinks()
            .causal(QOffset::TopLeft)
            .seeing(Visibility::window(Some(127), None)),
        bf16("mla-prefill", [1, 16, 16, 1024, 1024, 192, 128]).causal(QOffset::TopLeft),
        bf16("llama-decode-tq4", [1, 32, 8, 0, 0, 128, 128])
            .cached(&[(1, 8192); 16], 16, Keep::All)
            .causal(QOffset::BottomRight)
            .stored(Codec::Tq4, Codec::Tq4),
        bf16("llama-decode-int8-tq5", [1, 32, 8, 0, 0, 128, 128])
            .cached(&[(1, 32_768)], 16, Keep::All)
            .causal(QOffset::BottomRight)
            .stored(Codec::Int8, Codec::Tq5),
        Case::new("gpt-oss-chunk-fp8", [1, 64, 8, 0, 0, 64, 64], Dtype::F16)
            .cached(&[(256, 4096); 2], 16, Keep::All)
            .causal(QOffset::BottomRight)
            .stored(Codec::Fp8, Codec::Fp8),
        Case::new("d512-mqa-decode", [1, 64, 1, 1, 8192, 512, 512], Dtype::F16),
        Case::new("bloom-alibi", [2, 16, 16, 1024, 1024, 64, 64], Dtype::F32)
            .alibi()
            .causal(QOffset::TopLeft),
        Case::new("no-keys", [1, 8, 8, 16, 0, 64, 64], Dtype::F32),
    ]
}

/// Problems of training.
fn backward_problems() -> Vec<Case> {
    let bf16 = |name: &str, dims| Case::new(name, dims, Dtype::BF16);
    vec![
        bf16("llama-train-4096", [1, 32, 8, 4096, 4096, 128, 128]).causal(QOffset::TopLeft),
        bf16("gemma-train-4096", [1, 8, 4, 4096, 4096, 256, 256])
            .softcap(50.0)
            .causal(QOffset::TopLeft)
            .seeing(Visibility::window(Some(1023), None)),
        bf16("mla-train", [1, 16, 16, 1024, 1024, 192, 128]).causal(QOffset::TopLeft),
        Case::new("bert-train-packed", [1, 12, 12, 0, 0, 64, 64], Dtype::F16)
            .packed(&[(100, 100), (500, 500)]),
        Case::new("t5-train-bias", [4, 12, 12, 512, 512, 64, 64], Dtype::F32).mask(
            MaskKind::Additive(Dtype::F32),
            "b",
            MaskFill::Random,
        ),
        Case::new("d512-train", [1, 4, 4, 1024, 1024, 512, 512], Dtype::F32),
    ]
}

/// Plans of the backward pass for every known machine.
fn backward_table(text: &mut String) {
    for case in backward_problems() {
        let problem = case.desc.validate().unwrap();
        writeln!(text, "{} backward", case.name).unwrap();
        for (machine, facts) in known_machines() {
            let plan = facts.plan_backward(&problem, PlanOptions::default());
            let plan = plan.map_or_else(|refusal| format!("refused, {refusal}"), |plan| plan.to_string());
            writeln!(text, "  {machine}: {plan}").unwrap();
        }
    }
}

fn table() -> String {
    let mut text = String::new();
    for case in problems() {
        let problem = case.desc.validate().unwrap();
        writeln!(text, "{}", case.name).unwrap();
        let mut line = |machine: &str, plan: Result<String, Unsupported>| {
            let plan = plan.unwrap_or_else(|refusal| format!("refused, {refusal}"));
            writeln!(text, "  {machine}: {plan}").unwrap();
        };
        for (machine, facts) in machines::ALL {
            let plan = CpuPlan::new(&problem, &facts, PlanOptions::default());
            line(machine, plan.map(|plan| plan.to_string()));
        }
        for (machine, facts) in machines::ALL_CUDA {
            let plan = CudaPlan::new(&problem, &facts, PlanOptions::default());
            line(machine, plan.map(|plan| plan.to_string()));
        }
        // Of other devices these are the plans above.
        for (machine, facts) in machines::ALL_CUDA.into_iter().filter(|(_, facts)| has_native(facts)) {
            let plan = CudaPlan::new(&problem, &facts, kernels(KernelChoice::Portable));
            line(&format!("{machine} portable"), plan.map(|plan| plan.to_string()));
        }
        for (machine, facts) in ALL_APPLE {
            let plan = Plan::new(&problem, &facts, PlanOptions::default(), None);
            let kernel = |plan: &Plan| PortableKernel::new("metal", &problem, *plan.tile());
            line(machine, plan.map(|plan| format!("{} {plan}", kernel(&plan))));
        }
    }
    backward_table(&mut text);
    text
}

fn has_native(facts: &CudaFacts) -> bool {
    facts.capability >= NATIVE_CAPABILITY
}

#[test]
fn plans_are_the_golden_ones() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/plans.txt");
    let got = table();
    if std::env::var_os("FLASHTILE_BLESS").is_some() {
        std::fs::write(&path, &got).unwrap();
    }
    let want = std::fs::read_to_string(&path).unwrap_or_default();
    for (n, (got, want)) in got.lines().zip(want.lines()).enumerate() {
        assert_eq!(got, want, "line {} of {}", n + 1, path.display());
    }
    assert_eq!(got.lines().count(), want.lines().count(), "lines of {}", path.display());
}

#[test]
fn cuda_plans_fit_their_devices() {
    let cases = problems().into_iter().chain(flashtile_testkit::catalogue());
    for case in cases {
        let problem = case.desc.validate().unwrap();
        for (machine, facts) in machines::ALL_CUDA {
            let portable = machine == "t4" || problem.is_quantized();
            for skip_tiles in [true, false] {
                let plan = CudaPlan::new(&problem, &facts, crate::support::options(None, skip_tiles));
                let plan = match plan {
                    // Portable kernels always skip tiles.
                    Err(Unsupported::SkipTiles) if portable && !skip_tiles => continue,
                    Err(Unsupported::Position { got, .. }) if portable && got.abs() > 1 << 30 => continue,
                    // Rows of 2 KiB: 16 rows of q and two tiles of 16 keys exceed a thread block's shared memory
                    // there.
                    Err(Unsupported::SharedMemory { .. })
                        if problem.dtype() == Dtype::F32
                            && problem.dims().head_dim > 384
                            && machine == "rtx4090" =>
                    {
                        continue;
                    }
                    plan => plan.unwrap_or_else(|e| panic!("{} on {machine}: {e}", case.name)),
                };
                assert_eq!(plan.kernels().any(|k| k.is_portable), portable, "{machine}: {plan}");
                for kernel in plan.kernels() {
                    assert_eq!(kernel.is_portable, portable, "{machine}: {plan}");
                    let shared = kernel.shared_bytes;
                    assert!(shared <= facts.shared_per_block, "{machine}: {plan}");
                    // Including the shared memory that the driver reserves for each block.
                    let all = (shared + 1024) * kernel.resident;
                    assert!(all <= facts.shared_per_multiprocessor, "{machine}: {plan}");
                    assert!(kernel.head_dim >= problem.dims().head_dim);
                    // Two warpgroups of `wgmma` kernels have 256 columns each.
                    let columns = if kernel.uses_wgmma { 512 } else { 256 };
                    assert!(kernel.is_portable || kernel.value_dim <= columns, "{plan}");
                }
            }
        }
    }
}

/// Devices of the portable kernels, with pipelines of fewer threads than tiles have.
fn gpus() -> Vec<(String, GpuFacts)> {
    let cuda = machines::ALL_CUDA.into_iter().map(|(name, facts)| (name, GpuFacts::from(&facts)));
    let whole = cuda.chain(ALL_APPLE).map(|(name, facts)| (name.to_owned(), facts));
    let of_threads = |n: usize| (format!("m1 of {n} threads"), M1.with_threads_per_group(n));
    whole.chain([704, 255, 128].map(of_threads)).collect()
}

#[test]
fn portable_plans_fit_every_device() {
    for case in problems().into_iter().chain(flashtile_testkit::catalogue()) {
        let problem = case.desc.validate().unwrap();
        for (machine, facts) in gpus() {
            let plan = match Plan::new(&problem, &facts, PlanOptions::default(), None) {
                Err(Unsupported::Position { got, .. }) if got.abs() > 1 << 30 => continue,
                plan => plan.unwrap_or_else(|e| panic!("{} on {machine}: {e}", case.name)),
            };
            let at = || format!("{} on {machine}: {plan}", case.name);
            let (tile, launches) = (plan.tile(), plan.launches());
            for instance in launches.instances() {
                assert!(instance.threads().most() as usize <= facts.threads_per_group, "{}", at());
                assert!(instance.shared_bytes() <= facts.shared_per_group, "{}", at());
            }
            let shared = launches.instances()[0].shared_bytes();
            assert_eq!(launches.instances()[0].threads().most() as usize, tile.threads(), "{}", at());
            let (resident, registers) = (tile.resident(), plan.registers(&facts));
            assert!((shared + facts.reserved_shared) * resident <= facts.shared_per_core, "{}", at());
            assert!(tile.threads() * resident <= 32 * facts.simds_per_core, "{}", at());
            assert!((1..=facts.registers_per_thread).contains(&registers), "{}", at());
            assert!(registers * tile.threads() * resident <= facts.registers_per_core, "{}", at());
        }
    }
}

/// Tiles have at most 256 threads: a pipeline of 448 has room for all of them.
#[test]
fn pipelines_of_448_threads_have_the_tiles_of_whole_devices() {
    for case in problems().into_iter().chain(flashtile_testkit::catalogue()) {
        let problem = case.desc.validate().unwrap();
        let plan = |facts| Plan::new(&problem, facts, PlanOptions::default(), None);
        assert_eq!(plan(&M1_PIPELINE_448), plan(&M1), "{}", case.name);
    }
}

#[test]
fn pipelines_of_few_threads_have_smaller_tiles_or_none() {
    let find = |name: &str| problems().into_iter().find(|case| case.name == name).unwrap();
    let [prefill, decode] =
        ["gpt-oss-window-128", "llama-decode-4096"].map(|name| find(name).desc.validate().unwrap());
    let plan = |problem, threads| {
        Plan::new(problem, &M3_MAX.with_threads_per_group(threads), PlanOptions::default(), None)
    };
    for (threads, of_prefill, of_decode) in
        [(1024, 128, 256), (256, 128, 256), (255, 128, 128), (128, 128, 128)]
    {
        assert_eq!(plan(&prefill, threads).unwrap().tile().threads(), of_prefill, "{threads}");
        assert_eq!(plan(&decode, threads).unwrap().tile().threads(), of_decode, "{threads}");
    }
    // Prefill is one launch; decode is followed by a merge of 128 threads.
    for threads in [96, 64, 32] {
        assert_eq!(plan(&prefill, threads).unwrap().tile().threads(), threads.min(64), "{threads}");
        let refusal = plan(&decode, threads).unwrap_err().to_string();
        let want = format!("a threadgroup takes 128 threads, the device allows {threads}");
        assert!(refusal.starts_with("merge_") && refusal.ends_with(&want), "{refusal}");
    }
    assert!(matches!(plan(&prefill, 31), Err(Unsupported::Threads { needed: 32, available: 31, .. })));
    // Short rows, whose blocks of 64 keys registers would hold.
    let short = Case::new("short", [1, 8, 8, 100, 100, 32, 32], Dtype::F16).desc.validate().unwrap();
    for threads in [64, 32] {
        let plan =
            Plan::new(&short, &M1.with_threads_per_group(threads), PlanOptions::default(), None).unwrap();
        assert!(plan.tile().is_prefill() && plan.tile().threads() <= threads, "{plan}");
    }
    // A tile of the caller's is taken or refused.
    let tile = PortableTile::new(8, 16, 8, 1);
    let facts = M1.with_threads_per_group(255);
    let refusal = Plan::new(&decode, &facts, PlanOptions::default(), Some(tile)).unwrap_err();
    assert!(matches!(refusal, Unsupported::Threads { needed: 256, available: 255, .. }), "{refusal}");
}

#[test]
fn cuda_plans_refuse() {
    let dims = flashtile::Dims {
        batch: 1,
        q_heads: 8,
        kv_heads: 8,
        q_len: 64,
        kv_len: 640,
        head_dim: 64,
        value_dim: 64,
    };
    let problem = flashtile::ProblemDesc::new(dims, Dtype::BF16).validate().unwrap();
    let volta = CudaFacts { capability: (7, 0), ..machines::A100 };
    assert_eq!(
        CudaPlan::new(&problem, &volta, PlanOptions::default()).unwrap_err(),
        Unsupported::Capability { got: (7, 0), min: (7, 5) }
    );
    let none = CudaFacts { multiprocessors: 0, ..machines::A100 };
    for choice in [KernelChoice::Native, KernelChoice::Portable] {
        let refusal = CudaPlan::new(&problem, &none, kernels(choice)).unwrap_err();
        assert_eq!(refusal, Unsupported::Device { why: "it has no multiprocessors" }, "{choice}");
    }
    let small = CudaFacts { shared_per_block: 8 << 10, ..machines::A100 };
    let refusal = CudaPlan::new(&problem, &small, PlanOptions::default()).unwrap_err();
    assert!(
        matches!(refusal, Unsupported::SharedMemory { needed, available: 8192 } if needed > 8192),
        "{refusal}"
    );
    for (warps_q, warps_k, fragments, keys, stages) in
        [(0, 1, 1, 16, 2), (4, 4, 1, 16, 2), (4, 1, 3, 16, 2), (4, 1, 1, 24, 2), (1, 4, 1, 16, 1)]
    {
        let tile = Sm80Tile::new(warps_q, warps_k, fragments, keys, stages);
        let refusal = CudaPlan::with_tile(&problem, &machines::H100, PlanOptions::default(), tile.into());
        assert!(matches!(refusal, Err(Unsupported::Tile { .. })), "{tile:?}");
    }
    // As many splits as the longest tile of all launches has blocks; the others have fewer.
    let steps = ProblemDesc::cached(
        HeadShape { q_heads: 8, kv_heads: 8, head_dim: 64, value_dim: 64 },
        Dtype::BF16,
        &[SeqLens::decode(10), SeqLens { q_len: 100, kv_len: 5000 }],
    );
    let steps = steps.validate().unwrap();
    let options = crate::support::options(Some(2), true);
    assert_eq!(CudaPlan::new(&steps, &machines::H100, options).unwrap().splits(), 2);
    let mut masked = problem.desc().clone();
    (masked.dims.batch, masked.mask) = (8192, Some(MaskKind::Bool));
    let refusal = CudaPlan::new(&masked.validate().unwrap(), &machines::H100, PlanOptions::default());
    assert_eq!(refusal.unwrap_err(), Unsupported::Tasks { got: 65_536, max: 65_535 });
    for splits in [0, 11] {
        let options = crate::support::options(Some(splits), true);
        let refusal = CudaPlan::new(&problem, &machines::H100, options).unwrap_err();
        assert_eq!(refusal, Unsupported::Splits { got: splits, max: 10 });
    }
}

fn kernels(choice: KernelChoice) -> PlanOptions {
    let mut options = PlanOptions::default();
    options.kernels = choice;
    options
}

#[test]
fn portable_plans_refuse() {
    let desc = |dims: [usize; 7]| {
        let [batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim] = dims;
        let dims = flashtile::Dims { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim };
        flashtile::ProblemDesc::new(dims, Dtype::BF16)
    };
    let with = |desc: &flashtile::ProblemDesc, options| {
        CudaPlan::new(&desc.clone().validate().unwrap(), &machines::T4, options).map(|plan| plan.kernel())
    };
    let plan = |desc: &flashtile::ProblemDesc| with(desc, PlanOptions::default());
    assert_eq!(plan(&desc([1, 8, 8, 1, 640, 64, 64])).unwrap(), "cuda-decode-bf16-d64-portable");
    assert_eq!(plan(&desc([1, 8, 8, 1, 640, 96, 64])).unwrap(), "cuda-decode-bf16-d96x64-portable");
    assert_eq!(plan(&desc([1, 8, 8, 1, 640, 40, 3])).unwrap(), "cuda-decode-bf16-d40x3-portable");
    let mut far = desc([1, 8, 8, 1, 640, 64, 64]);
    far.visibility = Visibility::causal();
    far.q_offset = Some(QOffset::At((1 << 30) + 1));
    assert_eq!(plan(&far).unwrap_err(), Unsupported::Position { got: (1 << 30) + 1, max: 1 << 30 });
    let many = desc([65_536, 1, 1, 1, 16, 64, 64]);
    assert_eq!(plan(&many).unwrap_err(), Unsupported::Tasks { got: 65_536, max: 65_535 });
    let one = desc([1, 8, 8, 1, 640, 64, 64]);
    let native = with(&one, kernels(KernelChoice::Native)).unwrap_err();
    assert_eq!(native, Unsupported::Capability { got: (7, 5), min: (8, 0) });
    let every = with(&one, crate::support::options(None, false)).unwrap_err();
    assert_eq!(every, Unsupported::SkipTiles);
    for splits in [0, 6] {
        let refusal = with(&one, crate::support::options(Some(splits), true)).unwrap_err();
        assert_eq!(refusal, Unsupported::Splits { got: splits, max: 5 });
    }
    // The other kind of kernels on a device that has both; a device with one kind; a tile of the other kind.
    let problem = one.validate().unwrap();
    let plan = CudaPlan::new(&problem, &machines::H200, kernels(KernelChoice::Portable)).unwrap();
    assert_eq!(plan.kernel(), "cuda-decode-bf16-d64-portable");
    let cpu = CpuPlan::new(&problem, &machines::PORTABLE_4, kernels(KernelChoice::Portable)).unwrap_err();
    assert_eq!(cpu, Unsupported::Kernels { asked: KernelChoice::Portable });
    let tile = Sm80Tile::new(4, 1, 1, 16, 2);
    let refusal = CudaPlan::with_tile(&problem, &machines::T4, PlanOptions::default(), tile.into());
    assert!(matches!(refusal, Err(Unsupported::Tile { .. })));
    for [rows, keys, simds, resident] in [[4, 16, 4, 1], [8, 8, 4, 1], [8, 16, 3, 1], [8, 16, 4, 17]] {
        let tile = PortableTile::new(rows, keys, simds, resident);
        let refusal = CudaPlan::with_tile(&problem, &machines::T4, PlanOptions::default(), tile.into());
        assert!(matches!(refusal, Err(Unsupported::Tile { .. })), "{tile:?}");
    }
    for [rows, keys, simds] in [[32, 64, 4], [64, 48, 4], [96, 64, 3], [128, 256, 8]] {
        let tile = PortableTile::prefill(rows, keys, simds, 1);
        let refusal = CudaPlan::with_tile(&problem, &machines::T4, PlanOptions::default(), tile.into());
        assert!(matches!(refusal, Err(Unsupported::Tile { .. })), "{tile:?}");
    }
    for (rows, simds, team) in [(64, 8, 3), (64, 2, 4), (64, 4, 0), (128, 4, 2), (32, 4, 1)] {
        let tile = PortableTile::prefill(rows, 64, simds, 1).with_team(team);
        let refusal = CudaPlan::with_tile(&problem, &machines::T4, PlanOptions::default(), tile.into());
        assert!(matches!(refusal, Err(Unsupported::Tile { .. })), "{tile:?}");
    }
}

#[test]
fn launches_of_splits_are_compiled_once_for_any_outputs() {
    let problem =
        Case::new("chunk", [1, 8, 1, 64, 4096, 128, 128], Dtype::BF16).sinks().desc.validate().unwrap();
    let tile = PortableTile::prefill(64, 64, 4, 2);
    for (splits, differ) in [(1, vec![true]), (4, vec![false, true])] {
        let launches = Launches::new(&problem, tile.with_splits(splits)).unwrap();
        let placed = launches.place(&Strides::default(), false).unwrap();
        let [with, without] = [true, false].map(|lse| launches.constants(&placed, &[], lse));
        let differing: Vec<bool> = with.iter().zip(&without).map(|(a, b)| a.1 != b.1).collect();
        assert_eq!(differing, differ, "{splits} splits");
    }
}

#[test]
fn launches_refuse_what_kernels_refuse() {
    let shape = HeadShape { q_heads: 1, kv_heads: 1, head_dim: 512, value_dim: 512 };
    let mut desc = ProblemDesc::cached(shape, Dtype::BF16, &[SeqLens { q_len: 40, kv_len: 40 }]);
    (desc.k_codec, desc.v_codec) = (Some(Codec::MlxTq4), Some(Codec::MlxTq4));
    let problem = desc.validate().unwrap();
    let tile = PortableTile::prefill(32, 16, 2, 1);
    let why = Launches::new(&problem, tile).unwrap_err();
    assert!(matches!(why, Unsupported::Tile { why } if why.contains("halves")), "{why:?}");
    assert!(Launches::new(&problem, PortableTile::prefill(32, 16, 4, 1).with_team(2)).is_ok());
    let none = Launches::new(&problem, PortableTile::prefill(16, 16, 2, 1).with_team(2).with_splits(0));
    assert!(matches!(none.unwrap_err(), Unsupported::Splits { got: 0, .. }));
}

/// Plans of the same sequences at other lengths have the same launches and the same layout of scratch memory.
#[test]
fn cuda_plans_of_other_lengths_take_the_same_room() {
    for choice in [KernelChoice::Native, KernelChoice::Portable] {
        let plan = |lens: &[usize]| {
            let steps: Vec<SeqLens> = lens.iter().map(|&len| SeqLens::decode(len)).collect();
            let mut desc = ProblemDesc::cached(
                HeadShape { q_heads: 32, kv_heads: 8, head_dim: 128, value_dim: 128 },
                Dtype::BF16,
                &steps,
            );
            desc.visibility = Visibility::causal();
            CudaPlan::new(&desc.validate().unwrap(), &machines::H200, kernels(choice)).unwrap()
        };
        let first = plan(&[1; 16]);
        for lens in [[100; 16], [9000; 16], std::array::from_fn(|n| 1 + n * n * 70)] {
            let other = plan(&lens);
            assert!(first.kernels().eq(other.kernels()));
            assert_eq!(first.workspace_bytes(), other.workspace_bytes());
            if choice == KernelChoice::Portable {
                assert_eq!((first.task_count(), first.splits()), (other.task_count(), other.splits()));
            }
        }
    }
}

#[test]
fn every_catalogue_case_has_a_plan_on_every_machine() {
    for case in flashtile_testkit::catalogue() {
        let problem = case.desc.validate().unwrap();
        for (machine, facts) in machines::ALL {
            for skip_tiles in [true, false] {
                let plan = CpuPlan::new(&problem, &facts, crate::support::options(None, skip_tiles))
                    .unwrap_or_else(|e| panic!("{} on {machine}: {e}", case.name));
                assert_eq!(plan.isa(), isa_for(facts.isa, &problem));
                assert!(plan.threads() <= facts.threads && plan.splits() >= 1, "{plan}");
                assert!(plan.workspace_bytes() < 64 << 20, "{} on {machine}: {plan}", case.name);
            }
        }
    }
}
