//! A device that records what is asked of it and computes nothing: what a step of decoding costs beside its launches.

use flashtile_core::block_tables::BlockTables;
use flashtile_core::cache::{CacheDesc, CacheLayout, CacheShape, KvCache};
use flashtile_core::codec::Codec;
use flashtile_core::dtype::Dtype;
use flashtile_core::problem::{Dims, HeadShape, ProblemDesc, QOffset, SeqLens, Visibility};
use flashtile_core::tensor::dense;
use flashtile_gpu::SessionError;
use flashtile_gpu::cache::{GpuRows, GpuStore};
use flashtile_gpu::engine::PortableEngine;
use flashtile_gpu::machines;
use flashtile_gpu::session::Session;
use flashtile_gpu::tensors::{GpuInputs, GpuKv, GpuOutputs, GpuTensor, GpuTensorMut};
use flashtile_kernel::{Device, DeviceMemory, HostAccess, Launch, ScalarType, Span, View, ViewMut};
use std::cell::{Cell, RefCell};
use std::convert::Infallible;

/// Calls that the device has recorded.
#[derive(Debug, Default, Clone, PartialEq)]
struct Record {
    launches: Vec<(String, [u32; 3])>,
    allocations: usize,
    writes: usize,
    reads: usize,
}

#[derive(Debug, Default)]
struct Recorder(RefCell<Record>, Cell<bool>);

/// Memory that has no contents.
#[derive(Debug)]
struct Nothing(Span);

impl DeviceMemory for Nothing {
    fn view(&self) -> View<'_, Self> {
        View::new(self, self.0)
    }

    fn view_mut(&mut self) -> ViewMut<'_, Self> {
        let span = self.0;
        ViewMut::new(self, span)
    }
}

impl Device for &Recorder {
    type Memory = Nothing;
    type Error = Infallible;

    fn captures(&self) -> Result<bool, Infallible> {
        Ok(self.1.get())
    }

    fn launch(&self, launch: Launch<'_, Nothing>) -> Result<(), Infallible> {
        let launched = (launch.instance().kernel().name.to_owned(), launch.groups());
        self.0.borrow_mut().launches.push(launched);
        Ok(())
    }
}

impl HostAccess for &Recorder {
    fn zeroed(&self, element: ScalarType, len: usize) -> Result<Nothing, Infallible> {
        self.0.borrow_mut().allocations += 1;
        Ok(Nothing(Span { element, offset: 0, len }))
    }

    fn write(&self, memory: &mut Nothing, at: usize, bytes: &[u8]) -> Result<(), Infallible> {
        assert!(at + bytes.len() <= memory.0.len * memory.0.element.bytes());
        self.0.borrow_mut().writes += 1;
        Ok(())
    }

    fn read(&self, _: &Nothing, _: usize, _: &mut [u8]) -> Result<(), Infallible> {
        self.0.borrow_mut().reads += 1;
        Ok(())
    }
}

fn memory(element: ScalarType, len: usize) -> Nothing {
    Nothing(Span { element, offset: 0, len })
}

#[test]
fn a_step_over_a_cache_takes_no_memory_and_does_not_wait() {
    let layout = CacheLayout::Paged { pages: 64, page_size: 16 };
    let shape = CacheShape { layers: 2, kv_heads: 2, head_dim: 64, value_dim: 64 };
    let mut desc = CacheDesc::new(layout, shape, Codec::Int8);
    desc.v = Codec::BF16;
    let recorder = Recorder::default();
    let mut cache = KvCache::with_store(GpuStore::new(&recorder, &desc).unwrap()).unwrap();
    let (a, b) = (cache.create().unwrap(), cache.create().unwrap());
    let mut append = |batch: &[_]| {
        let tokens: usize = batch.iter().map(|(_, tokens)| tokens).sum();
        let x = memory(ScalarType::Bf16, tokens * 2 * 64);
        let rows = || GpuRows { view: x.view(), shape: [1, 2, tokens, 64], strides: [0, 64, 128, 1] };
        cache.append(batch, &[(rows(), rows()), (rows(), rows())]).unwrap();
        std::mem::take(&mut *recorder.0.borrow_mut())
    };
    append(&[(a, 100), (b, 7)]);
    for _ in 0..40 {
        let step = append(&[(a, 1), (b, 1)]);
        // A list of pages and one of runs for all layers, and a launch for keys and one for values of each.
        let launch = |name: &str| (name.to_owned(), [1, 2, 1]);
        let launches = ["encode", "append", "encode", "append"].map(launch).to_vec();
        assert_eq!(step, Record { launches, allocations: 0, writes: 2, reads: 0 });
    }
}

#[test]
fn a_snapshot_is_a_few_transfers() {
    let layout = CacheLayout::Paged { pages: 64, page_size: 16 };
    let shape = CacheShape { layers: 2, kv_heads: 2, head_dim: 64, value_dim: 64 };
    let recorder = Recorder::default();
    let store = GpuStore::new(&recorder, &CacheDesc::new(layout, shape, Codec::Int8)).unwrap();
    let mut cache = KvCache::with_store(store).unwrap();
    let [a, b] = [cache.create().unwrap(), cache.create().unwrap()];
    // Pages of the sequences take turns.
    for _ in 0..10 {
        for seq in [a, b] {
            cache.extend(&[(seq, 16)]).unwrap();
        }
    }
    let taken = || std::mem::take(&mut *recorder.0.borrow_mut());
    taken();
    let snapshot = cache.snapshot(a).unwrap();
    // Keys and values of two layers.
    assert_eq!(taken(), Record { reads: 4, ..Record::default() });
    // Whole pages are not read before they are written.
    cache.restore(&snapshot).unwrap();
    assert_eq!(taken(), Record { writes: 4, ..Record::default() });
    cache.extend(&[(a, 3)]).unwrap();
    let snapshot = cache.snapshot(a).unwrap();
    taken();
    cache.restore(&snapshot).unwrap();
    assert_eq!(taken(), Record { reads: 4, writes: 4, ..Record::default() });
}

#[test]
fn a_step_of_decoding_takes_no_memory_and_does_not_wait() {
    const LAYERS: usize = 3;
    let layout = CacheLayout::Paged { pages: 1024, page_size: 16 };
    let shape = CacheShape { layers: LAYERS, kv_heads: 2, head_dim: 64, value_dim: 64 };
    let heads = HeadShape { q_heads: 8, kv_heads: 2, head_dim: 64, value_dim: 64 };
    let mut desc = CacheDesc::new(layout, shape, Codec::Int8);
    desc.v = Codec::BF16;
    let recorder = Recorder::default();
    let mut cache = KvCache::with_store(GpuStore::new(&recorder, &desc).unwrap()).unwrap();
    let mut session = Session::new(&recorder, PortableEngine::new(machines::M5));
    let sequences = [cache.create().unwrap(), cache.create().unwrap()];
    let x = memory(ScalarType::Bf16, 600 * 8 * 64);
    let mut out = memory(ScalarType::Bf16, 600 * 8 * 64);
    let mut step = |tokens: [usize; 2]| {
        let batch = [(sequences[0], tokens[0]), (sequences[1], tokens[1])];
        let count = tokens.iter().sum();
        let rows = || GpuRows { view: x.view(), shape: [1, 2, count, 64], strides: [0, 64, 128, 1] };
        cache.append(&batch, &std::array::from_fn::<_, LAYERS, _>(|_| (rows(), rows()))).unwrap();
        let lens: Vec<SeqLens> = batch
            .iter()
            .map(|(sequence, tokens)| SeqLens { q_len: *tokens, kv_len: cache.len(*sequence).unwrap() })
            .collect();
        let mut problem = ProblemDesc::cached(heads, Dtype::BF16, &lens);
        problem.visibility = Visibility::causal();
        (problem.k_codec, problem.v_codec) = (Some(Codec::Int8), Some(Codec::BF16));
        let tables: BlockTables = cache.tables(&sequences).unwrap();
        for layer in 0..LAYERS {
            let (shape, strides) = ([1, 8, count, 64], [0, 64, 8 * 64, 1]);
            let [k, v] = cache.store().kv(layer);
            let q = GpuTensor { view: x.view(), shape, strides };
            let inputs = GpuInputs::new(q, k, v);
            let out = GpuTensorMut { view: out.view_mut(), shape, strides };
            session.run_paged(&problem, &inputs, &tables, &mut GpuOutputs { out, lse: None }).unwrap();
        }
        std::mem::take(&mut *recorder.0.borrow_mut())
    };
    step([500, 70]);
    let first = step([1, 1]);
    assert!(first.allocations > 0);
    let names = |record: &Record| record.launches.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    let of_layer = ["encode", "append"].repeat(LAYERS).into_iter().chain(["decode", "merge"].repeat(LAYERS));
    let of_layer: Vec<String> = of_layer.map(str::to_owned).collect();
    assert_eq!(names(&first), of_layer);
    // Sequences cross pages, and tables get wider, meanwhile.
    for n in 0..300 {
        let step = step([1, 1]);
        // The lists of the cache, and the numbers of the sequences; the table where a page was taken.
        assert!((3..=4).contains(&step.writes), "step {n}: {step:?}");
        assert_eq!((names(&step), step.allocations, step.reads), (of_layer.clone(), 0, 0), "step {n}");
    }
}

#[test]
fn a_call_of_the_same_description_only_launches() {
    let heads = HeadShape { q_heads: 8, kv_heads: 2, head_dim: 64, value_dim: 64 };
    let desc = ProblemDesc::cached(heads, Dtype::BF16, &[SeqLens { q_len: 1, kv_len: 5000 }; 3]);
    let recorder = Recorder::default();
    let mut session = Session::new(&recorder, PortableEngine::new(machines::M5));
    let splits = session.plan(&desc).unwrap().splits() as u32;
    let codes = CacheDesc::new(
        CacheLayout::Contiguous { slots: 3, capacity: 5000 },
        CacheShape { layers: 1, kv_heads: 2, head_dim: 64, value_dim: 64 },
        Codec::BF16,
    );
    let store = GpuStore::new(&recorder, &codes).unwrap();
    let tables = BlockTables {
        table: vec![2, 0, 1],
        width: 1,
        page_size: 5000,
        wraps: false,
        lens: vec![5000; 3],
        first: vec![0; 3],
    };
    let (q, mut out, mut lse) =
        (memory(ScalarType::Bf16, 1536), memory(ScalarType::Bf16, 1536), memory(ScalarType::F32, 24));
    let (shape, strides, [k, v]) = ([1, 8, 3, 64], [0, 64, 512, 1], store.kv(0));
    let q = GpuTensor { view: q.view(), shape, strides };
    let inputs = GpuInputs::new(q, k, v);
    let mut call = || {
        *recorder.0.borrow_mut() = Record::default();
        let out = GpuTensorMut { view: out.view_mut(), shape, strides };
        let mut outputs = GpuOutputs { out, lse: Some(lse.view_mut()) };
        session.run_paged(&desc, &inputs, &tables, &mut outputs).unwrap();
        recorder.0.borrow().clone()
    };
    // The numbers of the sequences say which page each has.
    let launches = vec![("decode".to_owned(), [2, splits, 3]), ("merge".to_owned(), [3, 8, 1])];
    assert_eq!(call(), Record { launches: launches.clone(), writes: 1, ..Record::default() });
    assert_eq!(call(), Record { launches, ..Record::default() });
}

/// Layers of a decoder attend in turns to its own tokens and to an encoder's, whose number stays: neither takes the plan of the other.
#[test]
fn descriptions_in_turns_keep_their_plans() {
    let heads = HeadShape { q_heads: 8, kv_heads: 2, head_dim: 64, value_dim: 64 };
    let desc = |kv_len| ProblemDesc::cached(heads, Dtype::BF16, &[SeqLens { q_len: 1, kv_len }]);
    let recorder = Recorder::default();
    let mut session = Session::new(&recorder, PortableEngine::new(machines::M5));
    for len in 480..540 {
        for _layer in 0..3 {
            session.plan(&desc(len)).unwrap();
            session.plan(&desc(500)).unwrap();
        }
        let record = std::mem::take(&mut *recorder.0.borrow_mut());
        assert!(record.allocations == 0 || len == 480, "{len}: {record:?}");
    }
}

/// A graph refers to the memory of a plan and of its block table: neither is taken over or freed.
#[test]
fn captured_calls_keep_their_plan_and_table() {
    let heads = HeadShape { q_heads: 8, kv_heads: 2, head_dim: 64, value_dim: 64 };
    let desc = |kv_len| ProblemDesc::cached(heads, Dtype::BF16, &[SeqLens { q_len: 1, kv_len }; 2]);
    let recorder = Recorder::default();
    let mut session = Session::new(&recorder, PortableEngine::new(machines::M5));
    let cache = CacheDesc::new(
        CacheLayout::Paged { pages: 16, page_size: 16 },
        CacheShape { layers: 1, kv_heads: 2, head_dim: 64, value_dim: 64 },
        Codec::BF16,
    );
    let store = GpuStore::new(&recorder, &cache).unwrap();
    let tables = |first: u32, kv_len: usize| BlockTables {
        table: (first..first + 6).collect(),
        width: 3,
        page_size: 16,
        wraps: false,
        lens: vec![kv_len; 2],
        first: vec![0; 2],
    };
    let (q, mut out) = (memory(ScalarType::Bf16, 1024), memory(ScalarType::Bf16, 1024));
    let (shape, strides, [k, v]) = ([1, 8, 2, 64], [0, 64, 512, 1], store.kv(0));
    let inputs = GpuInputs::new(GpuTensor { view: q.view(), shape, strides }, k, v);
    let mut call = |session: &mut Session<PortableEngine<_>>, kv_len, tables: &BlockTables| {
        let mut outputs = GpuOutputs::new(GpuTensorMut { view: out.view_mut(), shape, strides });
        *recorder.0.borrow_mut() = Record::default();
        session.run_paged(&desc(kv_len), &inputs, tables, &mut outputs).map(|()| recorder.0.borrow().clone())
    };
    call(&mut session, 40, &tables(0, 40)).unwrap();
    assert!(!session.is_captured());
    recorder.1.set(true);
    assert_eq!(call(&mut session, 40, &tables(0, 40)).unwrap().writes, 0);
    let refused = call(&mut session, 40, &tables(8, 40)).unwrap_err();
    assert_eq!(refused, SessionError::Captures { what: "copy of the block table" });
    let refused = call(&mut session, 41, &tables(0, 41)).unwrap_err();
    assert_eq!(refused, SessionError::Captures { what: "preparation of a plan" });
    recorder.1.set(false);
    assert!(session.is_captured());
    // Another table gets memory of its own, and the next step a plan of its own.
    assert_eq!(call(&mut session, 40, &tables(8, 40)).unwrap().allocations, 1);
    assert!(call(&mut session, 41, &tables(0, 41)).unwrap().allocations > 1);
    session.clear();
    let record = call(&mut session, 40, &tables(8, 40)).unwrap();
    assert_eq!((record.allocations, record.writes), (0, 0));
}

#[test]
fn elements_of_other_types_are_refused() {
    let dims = Dims { batch: 1, q_heads: 2, kv_heads: 2, q_len: 3, kv_len: 5, head_dim: 64, value_dim: 64 };
    let mut desc = ProblemDesc::new(dims, Dtype::F32);
    (desc.alibi, desc.q_offset) = (true, Some(QOffset::TopLeft));
    let recorder = Recorder::default();
    let mut session = Session::new(&recorder, PortableEngine::new(machines::M5));
    let elements = |shape: [usize; 4]| memory(ScalarType::F32, shape.iter().product());
    let (q, kv, mut out) = (elements(dims.q_shape()), elements(dims.k_shape()), elements(dims.out_shape()));
    let mut run = |slopes: ScalarType, lse: ScalarType| {
        let (slopes, mut lse) = (memory(slopes, 2), memory(lse, 6));
        let tensor = |of, shape| GpuTensor::new(DeviceMemory::view(of), shape, dense(shape)).unwrap();
        let kv = GpuKv::elements(tensor(&kv, dims.k_shape())).unwrap();
        let mut inputs = GpuInputs::new(tensor(&q, dims.q_shape()), kv, kv);
        inputs.alibi_slopes = Some(slopes.view());
        let shape = dims.out_shape();
        let mut outputs = GpuOutputs::new(GpuTensorMut::new(out.view_mut(), shape, dense(shape)).unwrap());
        outputs.lse = Some(lse.view_mut());
        session.run(&desc, &inputs, &mut outputs)
    };
    run(ScalarType::F32, ScalarType::F32).unwrap();
    let refused = |tensor, element| Err(SessionError::Element { tensor, expected: "f32", element });
    assert_eq!(run(ScalarType::U8, ScalarType::F32), refused("alibi_slopes", ScalarType::U8));
    assert_eq!(run(ScalarType::F32, ScalarType::U8), refused("lse", ScalarType::U8));
}
