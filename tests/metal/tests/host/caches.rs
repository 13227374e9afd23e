//! KV caches in the memory of the device: random operations, byte for byte as on the host, and attention over them.

use crate::decode_loop::{OnDevice, cache_desc, decode, hybrid_descs};
use crate::support::{control_of, metal, view};
use flashtile::cache::{CacheDesc, CacheLayout, CacheShape};
use flashtile::{
    BlockTables, Codec, Dtype, HeadShape, KvCache, ProblemDesc, SeqId, SeqLens, TensorView, Visibility,
    reference,
};
use flashtile_metal::objc2::rc::autoreleasepool;
use flashtile_metal::objc2_metal::{MTLCommandBuffer, MTLCommandQueue};
use flashtile_metal::{DispatchType, Encode, GpuInputs, GpuOutputs, GpuTensorMut, ScalarType};
use flashtile_metal_standin::{Order, Profile, Timing};
use flashtile_testkit::CacheTwins;

const SHAPE: CacheShape = CacheShape { layers: 2, kv_heads: 2, head_dim: 64, value_dim: 64 };

fn desc(layout: CacheLayout, k: Codec, v: Codec) -> CacheDesc {
    let mut desc = CacheDesc::new(layout, SHAPE, k);
    desc.v = v;
    desc
}

#[test]
fn operations_are_byte_for_byte_as_on_the_host() {
    let layouts = [
        CacheLayout::Paged { pages: 24, page_size: 16 },
        CacheLayout::Contiguous { slots: 3, capacity: 96 },
        CacheLayout::Ring { slots: 3, capacity: 40 },
    ];
    let codecs = [
        [Codec::F16, Codec::BF16],
        [Codec::Int8, Codec::Fp8],
        [Codec::Tq2, Codec::Tq3],
        [Codec::Tq4, Codec::Tq5],
        [Codec::Tq6, Codec::F32],
        [Codec::Rot16, Codec::Rot16],
    ];
    for (n, [k, v]) in codecs.into_iter().enumerate() {
        let metal = metal(Profile::m3_max());
        let control = control_of(&metal);
        if n % 2 == 1 {
            control.set_timing(Timing::Immediate);
            control.set_order(Order::Random(n as u64));
        }
        let element = if n % 2 == 0 { ScalarType::F32 } else { ScalarType::Bf16 };
        let desc = desc(layouts[n % layouts.len()], k, v);
        let mut twins = CacheTwins::new(metal.gpu().clone(), desc, element, None).unwrap();
        if [Codec::Tq4, Codec::Rot16].contains(&k) {
            twins.center().unwrap();
        }
        if k.supports_key_factors() && n > 2 {
            twins.equalize().unwrap();
        }
        twins.run(60, 20).unwrap();
        assert_eq!(control.take_violations(), [""; 0], "{k} {v}");
    }
}

#[test]
fn the_decode_loop_runs() {
    for (dtype, codec) in [(Dtype::F32, Codec::F32), (Dtype::BF16, Codec::Int8), (Dtype::F16, Codec::Tq4)] {
        let metal = metal(Profile::m3_max());
        let control = control_of(&metal);
        let mut cache = metal.kv_cache(cache_desc(codec)).unwrap();
        decode(&mut cache, metal.session(), &OnDevice(metal.gpu().clone()), dtype);
        assert_eq!(control.take_violations(), [""; 0], "{codec}");
    }
    let metal = metal(Profile::m3_max());
    let mut cache = metal.hybrid_cache(&hybrid_descs(Codec::Int8, Codec::BF16)).unwrap();
    decode(&mut cache, metal.session(), &OnDevice(metal.gpu().clone()), Dtype::BF16);
    assert_eq!(control_of(&metal).take_violations(), [""; 0]);
}

/// A step of a sequence that has its tokens already.
fn desc_of(cache: &KvCache, sequence: SeqId, tokens: usize) -> ProblemDesc {
    let heads = HeadShape { q_heads: 4, kv_heads: 2, head_dim: 64, value_dim: 64 };
    let lens = SeqLens { q_len: tokens, kv_len: cache.len(sequence).unwrap() };
    let mut desc = ProblemDesc::cached(heads, Dtype::F32, &[lens]);
    desc.visibility = Visibility::causal();
    (desc.k_codec, desc.v_codec) = (Some(Codec::Int8), Some(Codec::Int8));
    desc
}

#[test]
fn steps_of_decoding_in_command_buffers_of_the_caller() {
    let metal = metal(Profile::m3_max());
    let control = control_of(&metal);
    let layout = CacheLayout::Paged { pages: 8, page_size: 16 };
    let mut of_cache = desc(layout, Codec::Int8, Codec::Int8);
    of_cache.layers = 1;
    let mut cache = metal.kv_cache(of_cache).unwrap();
    let mut session = metal.session();
    let sequence = cache.create().unwrap();
    // A cache on the host with equal contents, over which the reference computes.
    let mut host = KvCache::new(of_cache).unwrap();
    let on_host = host.create().unwrap();
    for step in 0..6 {
        let tokens = if step == 0 { 30 } else { 1 };
        let (of_q, of_kv) = ([1, 4, tokens, 64], [1, 2, tokens, 64]);
        let strides = |heads: usize| [0, 64, heads * 64, 1];
        let values = |n: usize, seed: usize| -> Vec<f32> {
            (0..n).map(|i| ((i * 13 + seed * 7 + step) % 31) as f32 / 16.0 - 1.0).collect()
        };
        let of = [values(4 * tokens * 64, 1), values(2 * tokens * 64, 2), values(2 * tokens * 64, 3)];
        let [q, k, v] = of.each_ref().map(|values| metal.gpu().buffer_from(values).unwrap());
        let want = {
            let view = |n: usize, heads| TensorView::packed(&of[n], [tokens, heads, 64]).unwrap();
            host.append(&[(on_host, tokens)], &[(view(1, 2), view(2, 2))]).unwrap();
            let (problem, tables) =
                (desc_of(&host, on_host, tokens).validate().unwrap(), host.tables(&[on_host]).unwrap());
            let inputs = host.inputs(0, view(0, 4), &tables).unwrap();
            // [heads, tokens, dim], where the device has [tokens, heads, dim].
            reference::attention(&problem, &inputs).unwrap().out
        };
        let mut out = metal.zeros(ScalarType::F32, [1, tokens, 4, 64]).unwrap();
        let made = control.counters().buffers;
        autoreleasepool(|_| {
            let commands = metal.gpu().queue().unwrap().commandBuffer().unwrap();
            let appended = cache.encode(&commands, DispatchType::Concurrent, |cache| {
                let [k, v] = [&k, &v].map(|memory| view(memory, of_kv, strides(2)));
                cache.append(&[(sequence, tokens)], &[(k, v)])
            });
            appended.unwrap();
            let desc = desc_of(&host, on_host, tokens);
            let tables: BlockTables = cache.tables(&[sequence]).unwrap();
            let [k, v] = cache.store().kv(0);
            let inputs = GpuInputs::new(view(&q, of_q, strides(4)), k, v);
            let out = GpuTensorMut::new(out.view_mut(), of_q, strides(4)).unwrap();
            let mut outputs = GpuOutputs::new(out);
            session
                .encode(&commands, DispatchType::Concurrent, |session| {
                    session.run_paged(&desc, &inputs, &tables, &mut outputs)
                })
                .unwrap();
            commands.commit();
            commands.waitUntilCompleted();
            assert!(commands.error().is_none());
        });
        let computed: Vec<f32> = metal.gpu().to_vec(&out).unwrap();
        for (at, got) in computed.iter().enumerate() {
            let (token, head, d) = (at / 256, at / 64 % 4, at % 64);
            let want = want[(head * tokens + token) * 64 + d];
            assert!((f64::from(*got) - want).abs() < 5e-3, "step {step}, {at}: {got} for {want}");
        }
        // A step of the same size takes no new memory.
        if step > 2 {
            assert_eq!(control.counters().buffers - made, 0, "step {step}");
        }
    }
    cache.check_stored().unwrap();
    assert_eq!(control.take_violations(), [""; 0]);
}
