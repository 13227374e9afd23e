//! Caches on the simulator hold what caches in main memory do, byte for byte, after any operations.

use flashtile_core::cache::{
    CacheDesc, CacheError, CacheLayout, CacheShape, KeyTransformError, KvCache, PageCopy, PageStore, SeqId,
};
use flashtile_core::codec::{Codec, EncodeError};
use flashtile_gpu::cache::{GpuRows, GpuRowsMut, GpuStore, StoreError};
use flashtile_gpu::codecs::format_id;
use flashtile_gpu::kernels::cache::{copy_rows, read_codes, read_elements};
use flashtile_gpu::kernels::encode::append;
use flashtile_gpu::native_encode;
use flashtile_kernel::simulator::{Memory, Simulator};
use flashtile_kernel::{Instance, ScalarType, bf16};
use flashtile_testkit::{CacheTwins, Rng};

/// Encoder and decoder of f32 rows.
macro_rules! codes {
    ($($codec:ident $dim:literal;)*) => {
        vec![$(
            native_encode!(f32, format_id(Codec::$codec), $dim),
            read_codes::instance::<
                f32,
                { format_id(Codec::$codec) },
                $dim,
                { read_codes::derived(format_id(Codec::$codec), $dim).ORDER },
            >(),
        )*]
    };
}

fn find(wanted: &Instance) -> Option<Instance> {
    let mut all = codes! {
        Rot16 64;
        Rot16 33;
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
        MlxTq5 256;
        MlxTq6 256;
        MlxTq6Plain 256;
        MlxTq8Plain 256;
        MlxTq5Plain 512;
    };
    all.extend([
        copy_rows::instance(),
        append::instance::<f32, { format_id(Codec::F32) }>(),
        append::instance::<f32, { format_id(Codec::F16) }>(),
        append::instance::<f32, { format_id(Codec::BF16) }>(),
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
    agree_transformed(desc, element, operations, [false; 2]);
}

fn agree_transformed(
    desc: CacheDesc,
    element: ScalarType,
    operations: usize,
    [centered, equalized]: [bool; 2],
) {
    let mut twins = CacheTwins::new(Simulator::new(), desc, element, Some(find)).unwrap();
    if centered {
        twins.center().unwrap();
    }
    if equalized {
        twins.equalize().unwrap();
    }
    if let Err(why) = twins.run(operations, 5) {
        panic!("{desc:?}: {why}");
    }
}

#[test]
fn codes_in_every_layout_are_those_of_the_host() {
    let of_int8 = desc(PAGED, (Codec::Int8, 64), (Codec::Tq5, 64));
    agree_transformed(of_int8, ScalarType::F32, 40, [true, false]);
    agree_transformed(of_int8, ScalarType::F32, 40, [true; 2]);
    let of_tq4 = desc(CONTIGUOUS, (Codec::Tq4, 128), (Codec::Tq2, 48));
    agree_transformed(of_tq4, ScalarType::F32, 40, [false, true]);
    agree(desc(RING, (Codec::Tq3, 80), (Codec::Fp8, 48)), ScalarType::F32, 40);
    agree_transformed(desc(RING, (Codec::Rot16, 64), (Codec::Rot16, 33)), ScalarType::F32, 40, [true; 2]);
    agree(desc(CONTIGUOUS, (Codec::Tq4, 128), (Codec::Tq2, 48)), ScalarType::F32, 40);
    agree(desc(PAGED, (Codec::MlxTq4, 256), (Codec::MlxTq8, 256)), ScalarType::F32, 25);
    agree(desc(RING, (Codec::MlxTq5Plain, 512), (Codec::Tq6, 160)), ScalarType::F32, 25);
}

#[test]
fn codes_of_any_dimension_are_those_of_the_host() {
    let of_tq5 = desc(PAGED, (Codec::Tq5, 72), (Codec::Tq3, 33));
    agree_transformed(of_tq5, ScalarType::F32, 40, [true, false]);
    agree_transformed(of_tq5, ScalarType::F32, 40, [true; 2]);
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

/// A cache on the simulator with means or without.
fn cache_of(desc: &CacheDesc, mean: Option<&[f32]>) -> KvCache<GpuStore<Simulator>> {
    let store = GpuStore::with_native(Simulator::new(), desc, Some(find)).unwrap();
    let mut cache = KvCache::with_store(store).unwrap();
    for (layer, mean) in (0..desc.layers).flat_map(|layer| mean.map(|mean| (layer, mean))) {
        cache.set_key_mean(layer, mean).unwrap();
    }
    cache
}

/// Appends rows `[rows, heads, dim]` to sequences, one after another, in both layers.
fn append_rows(cache: &mut KvCache<GpuStore<Simulator>>, batch: &[(SeqId, usize)], rows: [&[f32]; 2]) {
    let desc = *cache.desc();
    let total: usize = batch.iter().map(|(_, tokens)| tokens).sum();
    let memories = rows.map(Memory::from_slice);
    let of = |n: usize, dim: usize| GpuRows {
        view: memories[n].view(),
        shape: [1, desc.kv_heads, total, dim],
        strides: [0, dim, desc.kv_heads * dim, 1],
    };
    let layer = || (of(0, desc.head_dim), of(1, desc.value_dim));
    cache.append(batch, &[layer(), layer()]).unwrap();
}

/// The bytes of a sequence alone in a cache, and after and beside others that have written large and even non-finite rows.
#[test]
fn other_sequences_and_chunks_change_no_byte() {
    let layout = CacheLayout::Paged { pages: 24, page_size: 5 };
    let pairs = [
        ((Codec::Int8, 64), (Codec::Tq5, 64)),
        ((Codec::Rot16, 33), (Codec::Rot16, 64)),
        ((Codec::Fp8, 48), (Codec::Tq2, 48)),
        ((Codec::Tq3, 80), (Codec::Int8, 100)),
        ((Codec::Tq4, 128), (Codec::Tq4, 128)),
        ((Codec::Tq5, 72), (Codec::Tq3, 33)),
        ((Codec::Tq6, 160), (Codec::Tq6, 160)),
        ((Codec::MlxTq4, 256), (Codec::MlxTq8, 256)),
        ((Codec::MlxTq5, 256), (Codec::MlxTq6, 256)),
        ((Codec::MlxTq6Plain, 256), (Codec::MlxTq8Plain, 256)),
        ((Codec::MlxTq5Plain, 512), (Codec::F16, 40)),
        ((Codec::F32, 17), (Codec::BF16, 40)),
    ];
    for (k, v) in pairs {
        let desc = desc(layout, k, v);
        let mut rng = Rng::new(3);
        let mut normal = |n: usize| (0..n).map(|_| rng.normal()).collect::<Vec<f32>>();
        let (k_row, v_row) = (2 * k.1, 2 * v.1);
        let (keys, values, mean) = (normal(15 * k_row), normal(15 * v_row), normal(k_row));
        let large: Vec<f32> = normal(k_row).iter().map(|x| 8.0 * x).collect();
        let mean = Some(&mean[..]).filter(|_| k.0.dtype().is_none());
        for mean in [None, mean] {
            let mut alone = cache_of(&desc, mean);
            let seq = alone.create().unwrap();
            append_rows(&mut alone, &[(seq, 15)], [&keys, &values]);
            let want = alone.snapshot(seq).unwrap().to_bytes();
            for chunk in [1, 7, 15] {
                let mut cache = cache_of(&desc, mean);
                let warm_up = cache.create().unwrap();
                append_rows(&mut cache, &[(warm_up, 1)], [&large, &values[..v_row]]);
                cache.remove(warm_up).unwrap();
                let [seq, other] = [0, 1].map(|_| cache.create().unwrap());
                for (n, (k, v)) in keys.chunks(chunk * k_row).zip(values.chunks(chunk * v_row)).enumerate() {
                    // One launch encodes a row of the other sequence, and then the chunk.
                    let (mut k_rows, v_rows) = (large.clone(), [&values[..v_row], v].concat());
                    if n == 1 {
                        k_rows[3] = f32::NAN;
                    }
                    k_rows.extend(k);
                    append_rows(&mut cache, &[(other, 1), (seq, v.len() / v_row)], [&k_rows, &v_rows]);
                    if n == 0 {
                        // Its fork continues in the page that they share.
                        let fork = cache.fork(seq).unwrap();
                        append_rows(&mut cache, &[(fork, 1)], [&large, &values[..v_row]]);
                    }
                }
                assert!(cache.snapshot(seq).unwrap().to_bytes() == want, "{k:?} {v:?} in chunks of {chunk}");
            }
        }
    }
}

#[test]
fn a_snapshot_sets_no_transform() {
    let desc = desc(PAGED, (Codec::Int8, 64), (Codec::Tq5, 64));
    let (mean, factors) = (vec![0.5; 2 * 64], vec![-0.75; 2 * 64]);
    let mut centered = cache_of(&desc, Some(&mean));
    (0..2).for_each(|layer| centered.set_key_factors(layer, &factors).unwrap());
    let seq = centered.create().unwrap();
    let rows = vec![0.25; 3 * 2 * 64];
    append_rows(&mut centered, &[(seq, 3)], [&rows, &rows]);
    let snapshot = centered.snapshot(seq).unwrap();
    let mut fresh = cache_of(&desc, None);
    let refused = |part| StoreError::Cache(KeyTransformError::Snapshot { layer: 0, part }.into());
    assert_eq!(fresh.restore(&snapshot).unwrap_err(), refused("mean"));
    assert_eq!((fresh.key_mean(0).unwrap(), fresh.memory().sequences), (None, 0));
    for layer in 0..2 {
        fresh.set_key_mean(layer, snapshot.key_mean(layer).unwrap().unwrap()).unwrap();
    }
    assert_eq!(fresh.restore(&snapshot).unwrap_err(), refused("factors"));
    for layer in 0..2 {
        fresh.set_key_factors(layer, snapshot.key_factors(layer).unwrap().unwrap()).unwrap();
    }
    let restored = fresh.restore(&snapshot).unwrap();
    assert_eq!(fresh.snapshot(restored).unwrap().to_bytes(), snapshot.to_bytes());
}

#[test]
fn rows_beyond_their_memory_are_refused() {
    let mut cache = cache_of(&desc(PAGED, (Codec::Int8, 64), (Codec::Tq5, 64)), None);
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
