//! The CUDA backend on this machine's device. Without one, the tests print so and pass.

#![allow(unsafe_code, reason = "device addresses are made views")]

use crate::support::{answer, build, cuda, cuda_runners, options};
use flashtile::cuda::cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use flashtile::cuda::{Cuda, CudaError, DeviceError, DeviceKvCache, DeviceTensor, DeviceTensorMut};
use flashtile::plan::{Sm80Tile, machines};
use flashtile::{
    CacheDesc, CacheError, CacheLayout, CacheShape, Codec, CudaPlan, Dtype, KvCache, Outputs, PlanOptions,
    QOffset, SeqId, TensorView, TensorViewMut,
};
use flashtile_testkit::{
    Case, CudaRunner, DevicePlacement, DeviceRun, Failure, Guarded, Keep, Prepared, Rng, Runner, catalogue,
    conformance, random_case,
};
use rayon::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

#[test]
fn the_catalogue_and_random_cases_pass() {
    let runners = cuda_runners();
    let runners: Vec<&dyn Runner> = runners.iter().map(|r| r as &dyn Runner).collect();
    let random = (0..400).map(|seed| {
        let mut rng = Rng::new(seed);
        random_case(format!("seed {seed}"), &mut |n| rng.below(n))
    });
    let cases: Vec<Case> = catalogue().into_iter().chain(random).collect();
    let (mut passed, mut failed) = (0, Vec::new());
    if !runners.is_empty() {
        conformance(&cases, &runners, |result| match &result.result {
            Ok(_) => passed += 1,
            Err(Failure::Skipped(_)) => println!("{result}"),
            Err(_) => failed.push(result.to_string()),
        });
    }
    println!("{passed} passed");
    assert!(failed.is_empty(), "{} failed:\n{}", failed.len(), failed.join("\n"));
}

/// Cases with several splits, and others; every dtype.
fn some_cases() -> Vec<Case> {
    catalogue().into_iter().step_by(3).collect()
}

#[test]
fn two_runs_have_the_same_bits() {
    for runner in cuda_runners() {
        for case in some_cases() {
            let built = build(&case);
            let (a, b) = (answer(&built, &runner), answer(&built, &runner));
            assert!(a.bits() == b.bits(), "{} on {}", case.name, runner.name());
        }
    }
}

#[test]
fn bits_do_not_depend_on_skipping_tiles_or_on_where_tensors_lie() {
    let Some(cuda) = cuda() else { return };
    for case in some_cases() {
        let built = build(&case);
        // One split per tile: where keys are cut depends on how many there are to compute.
        let runner = CudaRunner::new(cuda.clone()).with(options(Some(1), true));
        let want = answer(&built, &runner).bits();
        for other in [runner.clone().odd(), runner.clone().with(options(Some(1), false))] {
            assert!(answer(&built, &other).bits() == want, "{} on {}", case.name, other.name());
        }
    }
}

#[test]
fn any_number_of_splits_is_within_the_limits() {
    let Some(cuda) = cuda() else { return };
    for case in some_cases() {
        let prepared = Prepared::new(&case).unwrap();
        for splits in [1, 2, 3, 7] {
            let runner = CudaRunner::new(cuda.clone()).with(options(Some(splits), true));
            match prepared.run(&runner) {
                Ok(_) | Err(Failure::Skipped(_)) => {}
                Err(failure) => panic!("{} in {splits} splits: {failure}", case.name),
            }
        }
    }
}

#[test]
fn every_tile_is_within_the_limits() {
    let Some(cuda) = cuda() else { return };
    let mut tiles = vec![];
    for keys in [16, 32, 64, 128] {
        for (warps_q, fragments) in [(8, 2), (8, 1), (4, 2), (4, 1), (2, 1)] {
            tiles.push(Sm80Tile::new(warps_q, 1, fragments, keys, 2));
        }
        tiles.push(Sm80Tile::new(1, 4, 1, keys, 3));
    }
    tiles.extend([Sm80Tile::new(4, 1, 1, 32, 4), Sm80Tile::new(1, 8, 1, 16, 2)]);
    tiles.extend([Sm80Tile::new(4, 1, 1, 48, 2), Sm80Tile::new(8, 1, 1, 16, 2)]);
    tiles.push(Sm80Tile::new(4, 1, 1, 64, 2).with_q_in_registers(true));
    let mut cases: Vec<Case> = catalogue().into_iter().step_by(40).collect();
    cases.push(Case::new("aligned".to_owned(), [1, 2, 1, 100, 300, 32, 32], Dtype::BF16));
    let passed = AtomicUsize::new(0);
    // For most cases each tile is another kernel: as many are compiled in parallel as there are cores.
    tiles.into_par_iter().for_each(|tile| {
        for case in &cases {
            let prepared = Prepared::new(case).unwrap();
            let runner = CudaRunner::new(cuda.clone()).tiled(tile);
            for runner in [runner.clone(), runner.narrow()] {
                match prepared.run(&runner) {
                    Ok(_) => _ = passed.fetch_add(1, Ordering::Relaxed),
                    Err(Failure::Skipped(_)) => {}
                    Err(failure) => panic!("{} in {tile:?}: {failure}", case.name),
                }
            }
        }
    });
    let passed = passed.into_inner();
    assert!(passed > 500, "{passed}");
}

#[test]
fn splits_that_a_mask_hides_add_nothing() {
    let Some(cuda) = cuda() else { return };
    for case in catalogue().into_iter().filter(|case| case.name.ends_with("_late")) {
        let prepared = Prepared::new(&case).unwrap();
        for splits in [1, 2, 4, 16] {
            let runner = CudaRunner::new(cuda.clone()).with(options(Some(splits), true));
            for runner in [runner.clone(), runner.narrow()] {
                prepared
                    .run(&runner)
                    .unwrap_or_else(|failure| panic!("{} in {splits}: {failure}", case.name));
            }
        }
    }
}

/// The answer of a run made for a case, after another launch of it.
fn read(run: &DeviceRun, like: &Guarded) -> Vec<u32> {
    let mut out = like.clone();
    run.read(&mut Outputs::new(out.view_mut())).unwrap();
    out.bits()
}

#[test]
fn a_captured_graph_computes_the_plan_of_an_update() {
    let Some(cuda) = cuda() else { return };
    let case = |lens: &[usize]| {
        let steps: Vec<(usize, usize)> = lens.iter().map(|&len| (1, len)).collect();
        // The same name, and so the same queries.
        Case::new("update", [1, 8, 2, 0, 0, 64, 64], Dtype::F16)
            .cached(&steps, 4096, Keep::All)
            .causal(QOffset::BottomRight)
    };
    let plan = |built: &flashtile_testkit::CaseData| {
        CudaPlan::new(&built.problem, cuda.facts(), PlanOptions::default()).unwrap()
    };
    // All sequences in one page each, so that pools and tables have equal sizes.
    let (first, second) = (build(&case(&[900, 20, 4000, 1])), build(&case(&[3000, 1500, 7, 4096])));
    let mut out = Guarded::new(Dtype::F16, first.problem.dims().out_shape(), first.layout);
    let mut outputs = Outputs::new(out.view_mut());
    // The pools of the longer sequences; the first plan sees fewer of their keys.
    let mut inputs = second.inputs();
    inputs.tables = first.tables.as_ref();
    let placement = DevicePlacement::default();
    let mut run = DeviceRun::new(&cuda, &plan(&first), &inputs, &mut outputs, placement).unwrap();
    run.seconds().unwrap();
    run.update(&plan(&second), second.tables.as_ref().unwrap()).unwrap();
    run.seconds().unwrap();
    let got = read(&run, &out);
    let want = answer(&second, &CudaRunner::new(cuda.clone()));
    assert!(got == want.out.bits());
    // Twice, since counters must be reset.
    run.seconds().unwrap();
    assert!(read(&run, &out) == got);

    // What a captured graph contains cannot change.
    let mut window = second.problem.desc().clone();
    window.visibility = flashtile::Visibility::window(Some(9), Some(0));
    let window = cuda.plan(&window.validate().unwrap(), PlanOptions::default()).unwrap();
    let refusal = run.update(&window, second.tables.as_ref().unwrap()).unwrap_err();
    assert!(matches!(refusal, CudaError::Update { .. }), "{refusal}");
    let more = build(&case(&[5, 5, 5, 5, 5]));
    let refusal = run.update(&plan(&more), more.tables.as_ref().unwrap()).unwrap_err();
    assert!(matches!(refusal, CudaError::Update { .. }), "{refusal}");
}

#[test]
fn refusals_say_what_is_wrong() {
    let Some(cuda) = cuda() else {
        // The message on a machine without a device.
        let refusal = flashtile::cuda::Cuda::new(0).unwrap_err();
        let said = refusal.to_string();
        assert!(said.contains("NVIDIA") || said.contains("CUDA"), "{said}");
        return;
    };
    let count = flashtile::cuda::Cuda::count().unwrap();
    let refusal = flashtile::cuda::Cuda::new(count).unwrap_err();
    assert!(
        matches!(refusal, CudaError::Device(DeviceError::NoDevice { ordinal, .. }) if ordinal == count),
        "{refusal}"
    );
    let built = build(&Case::new("refused", [1, 2, 2, 5, 9, 64, 64], Dtype::F32));
    let other = build(&Case::new("other", [1, 2, 2, 5, 8, 64, 64], Dtype::F32));
    let plan = cuda.plan(&built.problem, PlanOptions::default()).unwrap();
    let mut out = Guarded::new(Dtype::F32, built.problem.dims().out_shape(), built.layout);
    let mut outputs = Outputs::new(out.view_mut());
    let refusal = DeviceRun::new(&cuda, &plan, &other.inputs(), &mut outputs, DevicePlacement::default());
    assert!(matches!(refusal.unwrap_err(), CudaError::Inputs(_)));
    // A plan for a device with more shared memory than this one has.
    let wide = build(&Case::new("wide", [1, 2, 2, 200, 900, 512, 512], Dtype::F32));
    let large = CudaPlan::new(&wide.problem, &machines::H200, PlanOptions::default()).unwrap();
    if cuda.facts().shared_per_block < machines::H200.shared_per_block {
        let stream = cuda.context().new_stream().unwrap();
        let refusal = cuda.prepare(&large, &stream).unwrap_err();
        assert!(matches!(refusal, CudaError::OtherDevice { .. }), "{refusal}");
    }
}

/// f32 rows `[tokens, heads, dim]` on the device.
struct Rows {
    memory: CudaSlice<f32>,
    shape: [usize; 3],
    stream: Arc<CudaStream>,
}

impl Rows {
    fn new(stream: &Arc<CudaStream>, data: &[f32], shape: [usize; 3]) -> Self {
        Self { memory: stream.clone_htod(data).unwrap(), shape, stream: stream.clone() }
    }

    fn shape(&self) -> ([usize; 4], [usize; 4]) {
        let [tokens, heads, dim] = self.shape;
        ([1, heads, tokens, dim], [tokens * heads * dim, dim, heads * dim, 1])
    }

    fn view(&self) -> DeviceTensor<'_> {
        let (shape, strides) = self.shape();
        let at = self.memory.device_ptr(&self.stream).0;
        // SAFETY: the memory holds the rows, and lives until the stream has been waited for.
        unsafe { DeviceTensor::from_raw_parts(Dtype::F32, at, shape, strides).unwrap() }
    }

    fn view_mut(&mut self) -> DeviceTensorMut<'_> {
        let (shape, strides) = self.shape();
        let at = self.memory.device_ptr(&self.stream).0;
        // SAFETY: as above; nothing else accesses it.
        unsafe { DeviceTensorMut::from_raw_parts(Dtype::F32, at, shape, strides).unwrap() }
    }

    fn read(&self) -> Vec<f32> {
        self.stream.clone_dtoh(&self.memory).unwrap()
    }
}

/// The same operations on a host cache and on a device cache.
struct Twins {
    stream: Arc<CudaStream>,
    host: KvCache,
    device: DeviceKvCache,
    sequences: Vec<(SeqId, SeqId)>,
    rng: Rng,
}

impl Twins {
    const LAYERS: usize = 2;

    fn new(cuda: &Cuda, layout: CacheLayout, codec: Codec) -> Self {
        let desc = CacheDesc::new(
            layout,
            CacheShape { layers: Self::LAYERS, kv_heads: 3, head_dim: 40, value_dim: 17 },
            codec,
        );
        let stream = cuda.context().new_stream().unwrap();
        let device = DeviceKvCache::new(cuda, desc, &stream).unwrap();
        Self { stream, host: KvCache::new(desc).unwrap(), device, sequences: Vec::new(), rng: Rng::new(7) }
    }

    fn append(&mut self, which: &[(usize, usize)]) {
        let batch = |side: fn(&(SeqId, SeqId)) -> SeqId, all: &[(SeqId, SeqId)]| {
            which.iter().map(|&(n, tokens)| (side(&all[n]), tokens)).collect::<Vec<_>>()
        };
        let (host, device) = (batch(|s| s.0, &self.sequences), batch(|s| s.1, &self.sequences));
        let tokens: usize = which.iter().map(|w| w.1).sum();
        let mut data = |dim: usize| (0..tokens * 3 * dim).map(|_| self.rng.normal()).collect::<Vec<f32>>();
        let rows: Vec<_> = (0..Self::LAYERS).map(|_| (data(40), data(17))).collect();
        let view = |data, dim| TensorView::packed::<f32>(data, [tokens, 3, dim]).unwrap();
        let layers: Vec<_> = rows.iter().map(|(k, v)| (view(k, 40), view(v, 17))).collect();
        let on_host = self.host.append(&host, &layers);
        let copied: Vec<_> = rows
            .iter()
            .map(|(k, v)| {
                (Rows::new(&self.stream, k, [tokens, 3, 40]), Rows::new(&self.stream, v, [tokens, 3, 17]))
            })
            .collect();
        let layers: Vec<_> = copied.iter().map(|(k, v)| (k.view(), v.view())).collect();
        match (on_host, self.device.append(&device, &layers)) {
            (Ok(()), Ok(())) => {}
            (Err(_), Err(CudaError::KvCache(_))) => {}
            other => panic!("{other:?}"),
        }
    }

    fn compare(&self) {
        for &(host, device) in &self.sequences {
            let (first, len) = (self.host.first(host).unwrap(), self.host.len(host).unwrap());
            assert_eq!((first, len), (self.device.first(device).unwrap(), self.device.len(device).unwrap()));
            let tokens = len - first;
            for layer in 0..Self::LAYERS {
                let (mut k, mut v) = (vec![0.0f32; tokens * 3 * 40], vec![0.0f32; tokens * 3 * 17]);
                let view = |data, dim| TensorViewMut::packed::<f32>(data, [tokens, 3, dim]).unwrap();
                self.host.linearise(host, layer, &mut view(&mut k, 40), &mut view(&mut v, 17)).unwrap();
                if tokens == 0 {
                    continue;
                }
                let mut k_rows = Rows::new(&self.stream, &vec![9.0; k.len()], [tokens, 3, 40]);
                let mut v_rows = Rows::new(&self.stream, &vec![9.0; v.len()], [tokens, 3, 17]);
                let views = (&mut k_rows.view_mut(), &mut v_rows.view_mut());
                self.device.linearise(device, layer, views).unwrap();
                assert!(k_rows.read() == k && v_rows.read() == v, "{:?} layer {layer}", self.host.desc());
            }
        }
    }
}

#[test]
fn a_device_cache_holds_what_one_in_main_memory_does() {
    let Some(cuda) = cuda() else { return };
    let layouts = [
        CacheLayout::Contiguous { slots: 5, capacity: 90 },
        CacheLayout::Ring { slots: 5, capacity: 50 },
        CacheLayout::Paged { pages: 40, page_size: 7 },
    ];
    for (layout, codec) in
        layouts.into_iter().flat_map(|l| [Codec::F32, Codec::F16, Codec::BF16].map(|c| (l, c)))
    {
        let mut twins = Twins::new(&cuda, layout, codec);
        for _ in 0..2 {
            let pair = (twins.host.create().unwrap(), twins.device.create().unwrap());
            twins.sequences.push(pair);
        }
        twins.append(&[(0, 33), (1, 12)]);
        twins.compare();
        let (host, device) = twins.sequences[0];
        let fork = (twins.host.fork(host).unwrap(), twins.device.fork(device).unwrap());
        twins.sequences.push(fork);
        // Both continue in a page that they share; then one is truncated and continues elsewhere.
        twins.append(&[(0, 1), (2, 5), (1, 20)]);
        twins.compare();
        let (host, device) = twins.sequences[2];
        twins.host.truncate(host, 20).unwrap_or(());
        twins.device.truncate(device, 20).unwrap_or(());
        for _ in 0..30 {
            let (n, tokens) = (twins.rng.below(3), 1 + twins.rng.below(9));
            twins.append(&[(n, tokens)]);
        }
        twins.compare();
        assert_eq!(twins.host.memory(), twins.device.memory());
    }
    let stream = cuda.context().new_stream().unwrap();
    let none = CacheDesc::new(
        CacheLayout::Paged { pages: 0, page_size: 7 },
        CacheShape { layers: 1, kv_heads: 1, head_dim: 8, value_dim: 8 },
        Codec::F32,
    );
    let refusal = DeviceKvCache::new(&cuda, none, &stream).unwrap_err();
    assert!(matches!(refusal, CudaError::KvCache(CacheError::Dimension { .. })), "{refusal}");
}
