//! Any bytes as a snapshot of a cache: refused, or restored into a cache that then reads its rows, forks, appends and
//! attends. Nothing panics, and changes of the fork do not affect the sequence.

#![no_main]

use flashtile::cache::Snapshot;
use flashtile::{
    CacheDesc, CacheError, CacheLayout, CacheShape, Codec, Cpu, Dtype, HeadShape, KvCache, Outputs,
    PlanOptions, ProblemDesc, SeqId, SeqLens, TensorView, TensorViewMut, Visibility, reference,
};
use libfuzzer_sys::fuzz_target;

const LAYOUTS: [CacheLayout; 3] = [
    CacheLayout::Contiguous { slots: 2, capacity: 8 },
    CacheLayout::Ring { slots: 2, capacity: 3 },
    CacheLayout::Paged { pages: 8, page_size: 2 },
];

/// The shortest snapshots, and rows whose products can be integers.
const DIMS: [usize; 2] = [4, 64];

/// Kept keys and values of a sequence, as bits.
fn rows(cache: &KvCache, seq: SeqId) -> [Vec<u32>; 2] {
    let dim = cache.desc().head_dim;
    let (Ok(len), Ok(first)) = (cache.len(seq), cache.first(seq)) else { unreachable!("there is one") };
    let mut rows = [vec![0f32; (len - first) * dim], vec![0f32; (len - first) * dim]];
    let [k, v] = rows.each_mut().map(|rows| TensorViewMut::bhsd::<f32>(rows, [1, 1, len - first, dim]));
    let (Ok(mut k), Ok(mut v)) = (k, v) else { unreachable!("{:?} rows", Dtype::F32) };
    cache.linearize(seq, 0, &mut k, &mut v).unwrap_or_else(|e| panic!("{e}"));
    rows.map(|rows| rows.into_iter().map(f32::to_bits).collect())
}

/// Attention of one query over the kept tokens, by the kernels and by the oracle.
fn attend(cache: &KvCache, seq: SeqId) {
    let (dim, codec) = (cache.desc().head_dim, cache.desc().k);
    let (Ok(len), Ok(first)) = (cache.len(seq), cache.first(seq)) else { unreachable!("there is one") };
    if first == len {
        return;
    }
    let mut desc = ProblemDesc::cached(
        HeadShape { q_heads: 1, kv_heads: 1, head_dim: dim, value_dim: dim },
        Dtype::F32,
        &[SeqLens::decode(len)],
    );
    (desc.k_codec, desc.v_codec) = (Some(codec), Some(codec));
    desc.visibility = Visibility::window(Some(len - first - 1), Some(0));
    let problem = desc.validate().unwrap_or_else(|e| panic!("{e}"));
    let tables = cache.tables(&[seq]).unwrap_or_else(|e| panic!("{e}"));
    let q = vec![0.5f32; dim];
    let q = TensorView::packed::<f32>(&q, [1, 1, dim]).unwrap_or_else(|e| panic!("{e}"));
    let inputs = cache.inputs(0, q, &tables).unwrap_or_else(|e| panic!("{e}"));
    let mut out = vec![0f32; dim];
    let cpu = Cpu::new();
    let plan = cpu.plan(&problem, PlanOptions::default()).unwrap_or_else(|e| panic!("{e}"));
    let view = TensorViewMut::bhsd::<f32>(&mut out, [1, 1, 1, dim]).unwrap_or_else(|e| panic!("{e}"));
    let ran = cpu.run(&plan, &inputs, &mut Outputs::new(view), &mut plan.workspace());
    ran.unwrap_or_else(|e| panic!("{e}"));
    reference::attention(&problem, &inputs).unwrap_or_else(|e| panic!("{e}"));
}

/// Exercises a cache with a snapshot.
fn restore(snapshot: &Snapshot, desc: CacheDesc) -> Result<(), CacheError> {
    let mut cache = KvCache::new(desc)?;
    if let Some(mean) = snapshot.key_mean(0)? {
        cache.set_key_mean(0, mean)?;
    }
    if let Some(factors) = snapshot.key_factors(0)? {
        cache.set_key_factors(0, factors)?;
    }
    let seq = cache.restore(snapshot)?;
    let before = rows(&cache, seq);
    attend(&cache, seq);
    let fork = cache.fork(seq)?;
    assert_eq!(rows(&cache, fork), before);
    let token = vec![1f32; desc.head_dim];
    let view = || TensorView::packed::<f32>(&token, [1, 1, desc.head_dim]).unwrap_or_else(|e| panic!("{e}"));
    // All slots may be taken.
    cache.append(&[(fork, 1)], &[(view(), view())])?;
    attend(&cache, fork);
    assert_eq!(rows(&cache, seq), before);
    Ok(())
}

fuzz_target!(|data: &[u8]| {
    let Ok(snapshot) = Snapshot::from_bytes(data) else { return };
    assert_eq!(snapshot.to_bytes(), data);
    for layout in LAYOUTS {
        for codec in [Codec::F16, Codec::Int8, Codec::Tq5] {
            for dim in DIMS {
                // A refusal is a valid outcome.
                let _ = restore(
                    &snapshot,
                    CacheDesc::new(
                        layout,
                        CacheShape { layers: 1, kv_heads: 1, head_dim: dim, value_dim: dim },
                        codec,
                    ),
                );
            }
        }
    }
});
