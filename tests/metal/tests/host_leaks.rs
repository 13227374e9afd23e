//! A process of its own, whose objects are counted: flashtile's host leaves none behind.
#![cfg(metal_standin)]
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]
#![allow(unsafe_code, reason = "buffers are lent")]

#[path = "host/support.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod support;

use flashtile::cache::{CacheDesc, CacheLayout, CacheShape};
use flashtile::{Codec, Dtype};
use flashtile_metal::objc2::rc::autoreleasepool;
use flashtile_metal::objc2_metal::{MTLCommandBuffer, MTLCommandQueue};
use flashtile_metal::{DispatchType, Encode, HostPages, ScalarType, dense};
use flashtile_metal_standin::{Profile, Timing, all_live};
use support::{Tensors, control_of, metal, view};

/// The calls of an engine on a device, failures included.
fn session(timing: Timing) {
    let metal = metal(Profile::m3_max());
    let control = control_of(&metal);
    control.set_timing(timing);
    metal.self_check().unwrap();
    let mut tensors = Tensors::new(&metal, 1, 300);
    let desc = tensors.desc();
    let mut session = metal.session();
    {
        let (inputs, mut outputs) = tensors.tensors();
        session.run(&desc, &inputs, &mut outputs).unwrap();
        autoreleasepool(|_| {
            let commands = metal.gpu().queue().unwrap().commandBuffer().unwrap();
            let encoded = session.encode(&commands, DispatchType::Concurrent, |session| {
                session.run(&desc, &inputs, &mut outputs)
            });
            encoded.unwrap();
            commands.commit();
            commands.waitUntilCompleted();
            // One that is never committed.
            let unused = metal.gpu().queue().unwrap().commandBuffer().unwrap();
            session.encode(&unused, DispatchType::Serial, |_| Ok(())).unwrap();
        });
    }
    let event = metal.gpu().shared_event().unwrap();
    metal.gpu().signal(&event, 1).unwrap();
    metal.gpu().wait_for(&event, 1).unwrap();
    let pages = metal.gpu().adopt(HostPages::zeroed(1).unwrap(), ScalarType::F32).unwrap();
    assert_eq!(metal.gpu().to_vec::<f32>(&pages).unwrap()[0], 0.0);
    let shape = CacheShape { layers: 1, kv_heads: 2, head_dim: 64, value_dim: 64 };
    let layout = CacheLayout::Paged { pages: 4, page_size: 16 };
    let mut cache = metal.kv_cache(CacheDesc::new(layout, shape, Codec::of(Dtype::F32))).unwrap();
    let sequence = cache.create().unwrap();
    let of_rows = [1, 2, 20, 64];
    let rows = metal.gpu().buffer_from(&vec![0.5f32; 2 * 20 * 64]).unwrap();
    let rows = view(&rows, of_rows, dense(of_rows));
    cache.append(&[(sequence, 20)], &[(rows, rows)]).unwrap();
    cache.check_stored().unwrap();
    control.fail_library("no program");
    let mut wide = tensors.desc();
    wide.softcap = Some(3.0);
    let (inputs, mut outputs) = tensors.tensors();
    assert!(session.run(&wide, &inputs, &mut outputs).is_err());
    // Launched and not waited for.
    session.run(&desc, &inputs, &mut outputs).unwrap();
    assert_eq!(control.take_violations(), [""; 0]);
}

#[test]
fn nothing_leaks() {
    for timing in [Timing::LATE, Timing::Immediate] {
        session(timing);
    }
    // Threads of queues end on their own.
    for _ in 0..500 {
        if all_live().is_empty() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert_eq!(all_live(), []);
}
