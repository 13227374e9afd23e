//! Rules that the order of work decides: they fail the command buffer.

use flashtile_metal_standin::{Order, Timing};
use objc2::rc::autoreleasepool;
use objc2::runtime::ProtocolObject;
use objc2_foundation::NSRange;
use objc2_metal::*;
use std::ptr::NonNull;

use crate::host::{Host, bind, encode, finish, read, says, size, string, wait, write};

const CONCURRENT: MTLDispatchType = MTLDispatchType::Concurrent;
const SERIAL: MTLDispatchType = MTLDispatchType::Serial;

#[test]
fn concurrent_dispatches_need_barriers() {
    let host = Host::new();
    let (x, y, z) = (host.zeros(256), host.zeros(256), host.zeros(256));
    let chained = |kind, barrier: u8| {
        host.run_as(kind, |e| {
            host.put(e, &x, 0, 5);
            let of = |buffer: &ProtocolObject<dyn MTLBuffer>| {
                let resource: &ProtocolObject<dyn MTLResource> = ProtocolObject::from_ref(buffer);
                let mut all = [NonNull::from(resource)];
                unsafe { e.memoryBarrierWithResources_count(NonNull::from(&mut all).cast(), 1) };
            };
            match barrier {
                0 => {}
                1 => e.memoryBarrierWithScope(MTLBarrierScope::Buffers),
                2 => of(&x),
                _ => of(&z),
            }
            host.copy(e, &x, &y);
        })
    };
    assert_eq!(chained(SERIAL, 0), Ok(()));
    assert_eq!((chained(CONCURRENT, 1), chained(CONCURRENT, 2)), (Ok(()), Ok(())));
    assert_eq!(read::<u32>(&y), vec![5; 64]);
    for barrier in [0, 3] {
        let e = chained(CONCURRENT, barrier).unwrap_err();
        says(
            &e,
            "two dispatches of compute encoder use bytes 0..256 of a resource, one of them writes, and no barrier",
        );
    }
    assert_eq!(host.control.take_violations().len(), 2);
    assert_eq!(host.control.take_violations().len(), 0);
}

/// Writing what was there already is a write, and bytes beside each other are no conflict.
#[test]
fn conflicts_are_exact() {
    let host = Host::new();
    let (x, y) = (host.zeros(512), host.zeros(256));
    let beside = host.run_as(CONCURRENT, |e| {
        host.put(e, &x, 0, 1);
        host.put(e, &x, 256, 2);
    });
    assert_eq!(beside, Ok(()));
    let same = host.run_as(CONCURRENT, |e| {
        host.put(e, &x, 0, 1);
        host.put(e, &x, 252, 2);
    });
    says(&same.unwrap_err(), "bytes 252..256");
    let unchanged = host.run_as(CONCURRENT, |e| {
        host.put(e, &y, 0, 0);
        host.put(e, &y, 0, 0);
    });
    says(&unchanged.unwrap_err(), "no barrier lies between");
    let reads = host.run_as(CONCURRENT, |e| {
        host.copy(e, &y, &host.zeros(256));
        host.copy(e, &y, &host.zeros(256));
    });
    assert_eq!(reads, Ok(()));
}

/// Two encoders of one queue, the second reading what the first has written.
fn two_encoders(host: &Host, untracked: bool, fence: bool, buffers: usize) -> Result<(), String> {
    autoreleasepool(|_| {
        let x = if untracked { host.untracked(256) } else { host.zeros(256) };
        let y = host.zeros(256);
        let f = host.device.newFence().unwrap();
        let commands: Vec<_> = (0..buffers).map(|_| host.commands()).collect();
        encode(&commands[0], |e| {
            host.put(e, &x, 0, 9);
            if fence {
                e.updateFence(&f);
            }
        });
        encode(&commands[buffers - 1], |e| {
            if fence {
                e.waitForFence(&f);
            }
            host.copy(e, &x, &y);
        });
        commands.iter().for_each(|c| c.commit());
        commands.iter().try_for_each(|c| wait(c))?;
        assert_eq!(read::<u32>(&y), vec![9; 64]);
        Ok(())
    })
}

#[test]
fn untracked_resources_need_fences() {
    let host = Host::new();
    for buffers in [1, 2] {
        assert_eq!(two_encoders(&host, false, false, buffers), Ok(()));
        assert_eq!(two_encoders(&host, true, true, buffers), Ok(()));
        let e = two_encoders(&host, true, false, buffers).unwrap_err();
        says(
            &e,
            "use bytes 0..256 of an untracked resource, one of them writes, and no fence or event orders them",
        );
    }
}

/// Work that had completed when other work was committed needs no fence.
#[test]
fn completion_orders() {
    let host = Host::new();
    let x = host.untracked(256);
    assert_eq!(host.run(|e| host.put(e, &x, 0, 1)), Ok(()));
    assert_eq!(host.run(|e| host.put(e, &x, 0, 2)), Ok(()));
}

#[test]
fn fences_order_what_lies_on_their_sides() {
    let host = Host::new();
    autoreleasepool(|_| {
        let (x, f) = (host.untracked(256), host.device.newFence().unwrap());
        let commands = host.commands();
        encode(&commands, |e| {
            e.updateFence(&f);
            host.put(e, &x, 0, 1);
        });
        encode(&commands, |e| {
            e.waitForFence(&f);
            host.put(e, &x, 0, 2);
        });
        says(&finish(&commands).unwrap_err(), "no fence or event orders them");
        let again = host.commands();
        let encoder = again.computeCommandEncoder().unwrap();
        encoder.updateFence(&f);
        let e = crate::host::refused(|| encoder.waitForFence(&f));
        encoder.endEncoding();
        says(&e, "waitForFence after updateFence of the same fence in one encoder");
        let other = host.device.newCommandQueue().unwrap().commandBuffer().unwrap();
        encode(&other, |e| e.waitForFence(&f));
        says(&finish(&other).unwrap_err(), "a fence that another queue has updated");
    });
}

#[test]
fn the_cpu_keeps_off_memory_in_flight() {
    let host = Host::new();
    autoreleasepool(|_| {
        let (x, y) = (host.buffer(&[1u32; 128]), host.zeros(256));
        let commands = host.commands();
        encode(&commands, |e| host.copy(e, &x, &y));
        commands.commit();
        write(&x, 0, 7u32);
        says(
            &wait(&commands).unwrap_err(),
            "the CPU has written bytes 0..1 of a buffer between commit and completion",
        );
        // Bytes that the kernel does not touch are the CPU's.
        let commands = host.commands();
        encode(&commands, |e| host.copy(e, &x, &y));
        commands.commit();
        write(&x, 256, 7u32);
        assert_eq!(wait(&commands), Ok(()));
        // A write of the GPU before the CPU looked is no write of the CPU.
        let (first, second) = (host.commands(), host.commands());
        encode(&first, |e| host.put(e, &x, 0, 3));
        encode(&second, |e| host.copy(e, &x, &y));
        first.commit();
        second.commit();
        assert_eq!((wait(&first), wait(&second)), (Ok(()), Ok(())));
        write(&x, 0, 8u32);
    });
}

/// A write before the second commit is no fault of the second command buffer.
#[test]
fn the_cpu_writes_between_commits() {
    let host = Host::new();
    autoreleasepool(|_| {
        let (x, y) = (host.buffer(&[1u32; 64]), host.zeros(256));
        let (first, second) = (host.commands(), host.commands());
        encode(&first, |e| host.put(e, &y, 0, 1));
        encode(&second, |e| host.copy(e, &x, &y));
        first.commit();
        write(&x, 0, 6u32);
        second.commit();
        assert_eq!((wait(&first), wait(&second)), (Ok(()), Ok(())));
        assert_eq!(read::<u32>(&y)[..2], [6, 1]);
    });
}

#[test]
fn buffers_outlive_unretained_command_buffers() {
    let host = Host::new();
    autoreleasepool(|_| {
        let freed = |retains: bool| {
            let x = host.zeros(256);
            let commands = if retains {
                host.commands()
            } else {
                host.queue.commandBufferWithUnretainedReferences().unwrap()
            };
            encode(&commands, |e| host.put(e, &x, 0, 1));
            commands.commit();
            drop(x);
            wait(&commands)
        };
        assert_eq!(freed(true), Ok(()));
        says(
            &freed(false).unwrap_err(),
            "buffer was freed before the command buffer that uses it has completed",
        );
    });
}

#[test]
fn late_and_immediate() {
    let host = Host::new();
    autoreleasepool(|_| {
        let x = host.zeros(256);
        let commands = host.commands();
        encode(&commands, |e| host.put(e, &x, 0, 1));
        commands.commit();
        std::thread::sleep(std::time::Duration::from_millis(30));
        assert_eq!((commands.status(), read::<u32>(&x)[0]), (MTLCommandBufferStatus::Committed, 0));
        commands.waitUntilScheduled();
        assert_eq!((commands.status(), read::<u32>(&x)[0]), (MTLCommandBufferStatus::Scheduled, 0));
        assert_eq!(wait(&commands), Ok(()));
        host.control.set_timing(Timing::Immediate);
        let commands = host.commands();
        encode(&commands, |e| host.put(e, &x, 0, 2));
        commands.commit();
        // Nobody waits.
        let started = std::time::Instant::now();
        while commands.status() < MTLCommandBufferStatus::Completed {
            assert!(started.elapsed().as_secs() < 20, "immediate work does not run");
            std::thread::yield_now();
        }
        assert_eq!(read::<u32>(&x)[0], 2);
        // Late work runs at last.
        host.control.set_timing(Timing::Late(std::time::Duration::from_millis(10)));
        let commands = host.commands();
        commands.commit();
        let started = std::time::Instant::now();
        while commands.status() < MTLCommandBufferStatus::Completed {
            assert!(started.elapsed().as_secs() < 20, "late work does not run");
            std::thread::yield_now();
        }
    });
}

/// Dispatches of a concurrent encoder run in different orders, and only as barriers allow.
#[test]
fn random_order() {
    let host = Host::new();
    let mut last = Vec::new();
    for seed in 0..8 {
        host.control.set_order(Order::Random(seed));
        let x = host.zeros(1024);
        let e = host.run_as(CONCURRENT, |e| {
            for value in 1..=3 {
                host.put(e, &x, 0, value);
            }
        });
        // The conflict stops the second dispatch's successor: the first two that ran have written.
        assert!(e.is_err());
        last.push(read::<u32>(&x)[0]);
        let ordered = host.run_as(CONCURRENT, |e| {
            for value in 1..=3 {
                host.put(e, &x, 256, value);
                e.memoryBarrierWithScope(MTLBarrierScope::Buffers);
            }
        });
        assert_eq!((ordered, read::<u32>(&x)[64]), (Ok(()), 3));
    }
    last.sort_unstable();
    last.dedup();
    assert!(last.len() > 1, "every seed gave the same order");
}

/// Each threadgroup takes the next number.
const NUMBERS: &str = "#include <metal_stdlib>
using namespace metal;
kernel void number(device atomic_uint* next [[buffer(0)]], device uint* out [[buffer(1)]], uint g [[threadgroup_position_in_grid]]) {
    out[g] = atomic_fetch_add_explicit(next, 1u, memory_order_relaxed);
}
";

#[test]
fn threadgroups_in_random_order() {
    let host = Host::new();
    autoreleasepool(|_| {
        let function = host.library(NUMBERS).unwrap().newFunctionWithName(&string("number")).unwrap();
        let pipeline = host.device.newComputePipelineStateWithFunction_error(&function).unwrap();
        let numbers = || {
            let (next, out) = (host.zeros(4), host.zeros(128));
            let ran = host.run(|e| {
                e.setComputePipelineState(&pipeline);
                bind(e, &[&next, &out]);
                e.dispatchThreadgroups_threadsPerThreadgroup(size(32), size(1));
            });
            assert_eq!(ran, Ok(()));
            read::<u32>(&out)
        };
        let forward: Vec<u32> = (0..32).collect();
        assert_eq!(numbers(), forward);
        host.control.set_order(Order::Random(3));
        let (first, second) = (numbers(), numbers());
        assert!(first != forward && second != first);
        let mut sorted = first;
        sorted.sort_unstable();
        assert_eq!(sorted, forward);
    });
}

/// Blits are ordered as dispatches are.
#[test]
fn blits_are_ordered() {
    let host = Host::new();
    autoreleasepool(|_| {
        let (x, y) = (host.untracked(256), host.zeros(256));
        let commands = host.commands();
        encode(&commands, |e| host.put(e, &x, 0, 0x0101_0101));
        let blit = commands.blitCommandEncoder().unwrap();
        unsafe { blit.copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size(&x, 0, &y, 0, 128) };
        blit.fillBuffer_range_value(&y, NSRange::new(128, 128), 2);
        blit.endEncoding();
        says(
            &finish(&commands).unwrap_err(),
            "compute encoder and blit encoder use bytes 0..128 of an untracked resource",
        );
    });
}
