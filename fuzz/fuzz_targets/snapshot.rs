//! Any bytes as a snapshot of a cache: refused, or taken by a cache that then reads its rows; nothing panics.

#![no_main]

use flashtile::cache::Snapshot;
use flashtile::{CacheDesc, CacheLayout, Codec, Dtype, KvCache, TensorViewMut};
use libfuzzer_sys::fuzz_target;

const LAYOUTS: [CacheLayout; 3] = [
    CacheLayout::Contiguous { slots: 1, capacity: 8 },
    CacheLayout::Ring { slots: 1, capacity: 3 },
    CacheLayout::Paged { pages: 4, page: 2 },
];

fuzz_target!(|data: &[u8]| {
    let Ok(snapshot) = Snapshot::from_bytes(data) else { return };
    assert_eq!(snapshot.to_bytes(), data);
    for layout in LAYOUTS {
        for codec in [Codec::F16, Codec::Int8, Codec::Tq5] {
            let Ok(mut cache) = KvCache::new(CacheDesc::new(layout, [1, 1, 4], codec)) else { continue };
            let Ok(seq) = cache.restore(&snapshot) else { continue };
            let (Ok(len), Ok(first)) = (cache.len(seq), cache.first(seq)) else { unreachable!("restored") };
            let mut rows = [vec![0f32; (len - first) * 4], vec![0f32; (len - first) * 4]];
            let [k, v] = rows.each_mut().map(|rows| TensorViewMut::bhsd::<f32>(rows, [1, 1, len - first, 4]));
            let (Ok(mut k), Ok(mut v)) = (k, v) else { unreachable!("{:?} rows", Dtype::F32) };
            cache.linearise(seq, 0, &mut k, &mut v).unwrap_or_else(|e| panic!("{e}"));
        }
    }
});
