//! A device that records what is asked of it and computes nothing: what a step of decoding costs beside its launches.

use flashtile_core::cache::{CacheDesc, CacheLayout, CacheShape, KvCache};
use flashtile_core::codec::Codec;
use flashtile_core::dtype::Dtype;
use flashtile_core::plan::PlanOptions;
use flashtile_core::problem::{HeadShape, ProblemDesc, SeqLens};
use flashtile_gpu::cache::{GpuRows, GpuStore};
use flashtile_gpu::launches::Strides;
use flashtile_gpu::machines;
use flashtile_gpu::plan::Plan;
use flashtile_gpu::run::{Operands, Workspace, run};
use flashtile_kernel::{Device, DeviceMemory, HostAccess, Launch, ScalarType, Span, View, ViewMut};
use std::cell::RefCell;
use std::convert::Infallible;

/// What was asked of the device.
#[derive(Debug, Default, Clone, PartialEq)]
struct Record {
    launches: Vec<(String, [u32; 3])>,
    allocations: usize,
    writes: usize,
    reads: usize,
}

#[derive(Debug, Default)]
struct Recorder(RefCell<Record>);

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
fn a_run_is_two_launches_and_nothing_else() {
    let heads = HeadShape { q_heads: 8, kv_heads: 2, head_dim: 64, value_dim: 64 };
    let desc = ProblemDesc::cached(heads, Dtype::BF16, &[SeqLens { q_len: 1, kv_len: 5000 }; 3]);
    let problem = desc.validate().unwrap();
    let plan = Plan::new(&problem, &machines::M5, PlanOptions::default(), None).unwrap();
    let strides = Strides {
        q: [512, 64, 64],
        out: [512, 64, 64],
        aligned: 16,
        pages: Some([16, 320]),
        ..Strides::default()
    };
    let placed = plan.launches().place(&strides, false).unwrap();
    let recorder = Recorder::default();
    let ([partial_out, partial_max_sum], tables) = (plan.launches().scratch(), plan.tables());
    let f32s = |len| memory(ScalarType::F32, len);
    let [mut partial_out, mut partial_max_sum] = [f32s(partial_out), f32s(partial_max_sum)];
    let (factors, codebooks) =
        (tables.factors.each_ref().map(|list| f32s(list.len())), f32s(tables.codebooks.len()));
    let (sequences, table, bytes) =
        (memory(ScalarType::I32, 24), memory(ScalarType::U32, 960), memory(ScalarType::U8, 1 << 20));
    let (q, mut out, mut lse) = (memory(ScalarType::Bf16, 1536), memory(ScalarType::Bf16, 1536), f32s(24));
    let workspace = Workspace {
        sequences: sequences.view(),
        factors: factors.each_ref().map(Nothing::view),
        codebooks: codebooks.view(),
        absent: [codebooks.view(), table.view(), bytes.view()],
        partial_out: &mut partial_out,
        partial_max_sum: &mut partial_max_sum,
    };
    let operands = Operands {
        q: q.view(),
        k: bytes.view(),
        v: bytes.view(),
        table: Some(table.view()),
        means: None,
        slopes: None,
        mask: None,
        tree: None,
        sinks: None,
        out: out.view_mut(),
        lse: lse.view_mut(),
        with_lse: true,
    };
    run(&&recorder, plan.launches(), &placed, workspace, operands).unwrap();
    let splits = plan.splits() as u32;
    let launches = vec![("decode".to_owned(), [2, splits, 3]), ("merge".to_owned(), [3, 8, 1])];
    assert_eq!(*recorder.0.borrow(), Record { launches, ..Record::default() });
}
