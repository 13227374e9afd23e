//! Caches on the simulator hold what caches in main memory do, byte for byte, after any operations.

use flashtile_core::cache::{
    CacheDesc, CacheError, CacheLayout, CacheShape, KeyMean, KvCache, PageCopy, PageStore,
};
use flashtile_core::codec::{Codec, EncodeError};
use flashtile_gpu::cache::{GpuRows, GpuRowsMut, GpuStore, StoreError};
use flashtile_gpu::codecs::format_id;
use flashtile_gpu::kernels::cache::{copy_rows, read_codes, read_elements};
use flashtile_gpu::kernels::encode::append;
use flashtile_gpu::kernels::formats::hadamard_order;
use flashtile_gpu::native_encode;
use flashtile_kernel::simulator::{Memory, Simulator};
use flashtile_kernel::{DeviceMemory, Instance, ScalarType, bf16};
use flashtile_testkit::CacheTwins;

/// Encoder and decoder of f32 rows.
macro_rules! codes {
    ($($codec:ident $dim:literal;)*) => {
        vec![$(
            native_encode!(f32, format_id(Codec::$codec), $dim),
            read_codes::instance::<
                f32,
                { format_id(Codec::$codec) },
                $dim,
                { hadamard_order(format_id(Codec::$codec), $dim) },
            >(),
        )*]
    };
}

fn find(wanted: &Instance) -> Option<Instance> {
    let mut all = codes! {
        Int8 64;
        Tq5 64;
        Tq2 48;
        Fp8 48;
        Tq3 80;
        Tq4 128;
        Tq6 160;
        Tq5 72;
        Tq3 33;
        Int8 100;
        Fp8 7;
        MlxTq4 256;
        MlxTq8 256;
        MlxTq5Plain 512;
    };
    all.extend([
        copy_rows::instance(),
        append::instance::<f32, { format_id(Codec::F32) }>(),
        append::instance::<f32, { format_id(Codec::F16) }>(),
        append::instance::<bf16, { format_id(Codec::BF16) }>(),
        read_elements::instance::<f32, { format_id(Codec::F32) }>(),
        read_elements::instance::<f32, { format_id(Codec::F16) }>(),
        read_elements::instance::<f32, { format_id(Codec::BF16) }>(),
    ]);
    let same = |instance: &Instance| {
        instance.kernel().name == wanted.kernel().name && instance.generics() == wanted.generics()
    };
    all.into_iter().find(same)
}

const PAGED: CacheLayout = CacheLayout::Paged { pages: 14, page_size: 5 };
const RING: CacheLayout = CacheLayout::Ring { slots: 4, capacity: 9 };
const CONTIGUOUS: CacheLayout = CacheLayout::Contiguous { slots: 4, capacity: 13 };

fn desc(layout: CacheLayout, (k, head_dim): (Codec, usize), (v, value_dim): (Codec, usize)) -> CacheDesc {
    let mut desc = CacheDesc::new(layout, CacheShape { layers: 2, kv_heads: 2, head_dim, value_dim }, k);
    desc.v = v;
    desc
}

fn agree(desc: CacheDesc, element: ScalarType, operations: usize) {
    let mut twins = CacheTwins::new(Simulator::new(), desc, element, Some(find)).unwrap();
    if let Err(why) = twins.run(operations, 5) {
        panic!("{desc:?}: {why}");
    }
}

#[test]
fn codes_in_every_layout_are_those_of_the_host() {
    let mut learned = desc(PAGED, (Codec::Int8, 64), (Codec::Tq5, 64));
    learned.key_mean = KeyMean::Learned;
    agree(learned, ScalarType::F32, 40);
    agree(desc(RING, (Codec::Tq3, 80), (Codec::Fp8, 48)), ScalarType::F32, 40);
    agree(desc(CONTIGUOUS, (Codec::Tq4, 128), (Codec::Tq2, 48)), ScalarType::F32, 40);
    agree(desc(PAGED, (Codec::MlxTq4, 256), (Codec::MlxTq8, 256)), ScalarType::F32, 25);
    agree(desc(RING, (Codec::MlxTq5Plain, 512), (Codec::Tq6, 160)), ScalarType::F32, 25);
}

#[test]
fn codes_of_any_dimension_are_those_of_the_host() {
    let mut learned = desc(PAGED, (Codec::Tq5, 72), (Codec::Tq3, 33));
    learned.key_mean = KeyMean::Learned;
    agree(learned, ScalarType::F32, 40);
    agree(desc(CONTIGUOUS, (Codec::Int8, 100), (Codec::Fp8, 7)), ScalarType::F32, 40);
}

#[test]
fn elements_of_any_dimension_are_those_of_the_host() {
    agree(desc(PAGED, (Codec::F32, 17), (Codec::F16, 40)), ScalarType::F32, 60);
    agree(desc(RING, (Codec::BF16, 9), (Codec::BF16, 8)), ScalarType::Bf16, 60);
    agree(desc(CONTIGUOUS, (Codec::F16, 1), (Codec::F32, 3)), ScalarType::F32, 60);
}

#[test]
fn rows_that_are_not_stored_are_told() {
    let desc = desc(PAGED, (Codec::Int8, 64), (Codec::Tq5, 64));
    let store = GpuStore::with_native(Simulator::new(), &desc, Some(find)).unwrap();
    let mut cache = KvCache::with_store(store).unwrap();
    let seq = cache.create().unwrap();
    let mut rows = vec![0.5f32; 3 * 2 * 64];
    let good = Memory::from_slice(&rows);
    rows[(2 * 2 + 1) * 64 + 7] = f32::NAN;
    let bad = Memory::from_slice(&rows);
    let of = |memory| GpuRows { view: Memory::view(memory), shape: [1, 2, 3, 64], strides: [0, 64, 128, 1] };
    cache.append(&[(seq, 3)], &[(of(&good), of(&good)), (of(&good), of(&bad))]).unwrap();
    let refused = cache.check_stored().unwrap_err();
    let expected = CacheError::Row { layer: 1, tensor: "v", head: 1, row: 2, why: EncodeError::NotFinite };
    assert_eq!(refused, StoreError::Cache(expected));
    // It is told once.
    cache.check_stored().unwrap();
}

#[test]
fn a_row_that_is_not_stored_has_its_number_in_the_tensor() {
    let desc = desc(RING, (Codec::Int8, 64), (Codec::Tq5, 64));
    let store = GpuStore::with_native(Simulator::new(), &desc, Some(find)).unwrap();
    let mut cache = KvCache::with_store(store).unwrap();
    let seq = cache.create().unwrap();
    let good = vec![0.5f32; 20 * 2 * 64];
    let mut bad = good.clone();
    // A ring of 9 tokens keeps the last ones of 20.
    bad[15 * 2 * 64] = f32::INFINITY;
    let (good, bad) = (Memory::from_slice(&good), Memory::from_slice(&bad));
    let of = |memory| GpuRows { view: Memory::view(memory), shape: [1, 2, 20, 64], strides: [0, 64, 128, 1] };
    cache.append(&[(seq, 20)], &[(of(&bad), of(&good)), (of(&good), of(&good))]).unwrap();
    let refused = cache.check_stored().unwrap_err();
    let expected = CacheError::Row { layer: 0, tensor: "k", head: 0, row: 15, why: EncodeError::NotFinite };
    assert_eq!(refused, StoreError::Cache(expected));
}

#[test]
fn a_layer_does_not_lose_its_mean_to_rows_without_one() {
    let mut learned = desc(PAGED, (Codec::Int8, 64), (Codec::Tq5, 64));
    learned.key_mean = KeyMean::Learned;
    let store = GpuStore::with_native(Simulator::new(), &learned, Some(find)).unwrap();
    let mut cache = KvCache::with_store(store).unwrap();
    let seq = cache.create().unwrap();
    let rows = Memory::from_slice(&[f32::NAN; 2 * 64]);
    let of = || GpuRows { view: rows.view(), shape: [1, 2, 1, 64], strides: [0, 64, 128, 1] };
    let refused = cache.append(&[(seq, 1)], &[(of(), of()), (of(), of())]).unwrap_err();
    assert_eq!(refused, StoreError::Cache(CacheError::MeanNotFinite));
    assert_eq!(cache.len(seq).unwrap(), 0);
}

#[test]
fn rows_beyond_their_memory_are_refused() {
    let mut learned = desc(PAGED, (Codec::Int8, 64), (Codec::Tq5, 64));
    learned.key_mean = KeyMean::Learned;
    let store = GpuStore::with_native(Simulator::new(), &learned, Some(find)).unwrap();
    let mut cache = KvCache::with_store(store).unwrap();
    let seq = cache.create().unwrap();
    let mut rows = Memory::from_slice(&[0.5f32; 3 * 2 * 64]);
    for strides in [[0, 64, 129, 1], [0, usize::MAX, 128, 1], [0, 64, usize::MAX / 3, 1], [0, 64, 128, 2]] {
        let of = || GpuRows { view: rows.view(), shape: [1, 2, 3, 64], strides };
        let refused = cache.append(&[(seq, 3)], &[(of(), of()), (of(), of())]).unwrap_err();
        assert!(matches!(refused, StoreError::Memory(_)), "{refused}");
        assert_eq!(cache.len(seq).unwrap(), 0);
    }
    let of = || GpuRows { view: rows.view(), shape: [1, 2, 3, 64], strides: [usize::MAX, 64, 128, 1] };
    cache.append(&[(seq, 3)], &[(of(), of()), (of(), of())]).unwrap();
    let mut other = Memory::from_slice(&[0.0f32; 3 * 2 * 64]);
    let mut k = GpuRowsMut { view: rows.view_mut(), shape: [1, 2, 3, 64], strides: [0, 64, 128, 1] };
    let mut v = GpuRowsMut { view: other.view_mut(), shape: [1, 2, 3, 64], strides: [0, 65, 128, 1] };
    let refused = cache.linearize(seq, 0, &mut k, &mut v).unwrap_err();
    assert!(matches!(refused, StoreError::Memory(_)), "{refused}");
}

#[test]
#[should_panic(expected = "14 pages of 5 rows")]
fn rows_outside_the_pages_are_a_mistake() {
    let desc = desc(PAGED, (Codec::F32, 17), (Codec::F32, 17));
    let mut store = GpuStore::with_native(Simulator::new(), &desc, Some(find)).unwrap();
    let _ = store.copy(&[PageCopy { from: 14, to: 0, rows: 0..1 }]);
}
