//! One dispatch from source to result, errors, blocks and memory of the host.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use block2::RcBlock;
use objc2::rc::autoreleasepool;
use objc2::runtime::ProtocolObject;
use objc2_metal::*;

use crate::host::{Host, bind, read, says, set, size};

#[test]
fn end_to_end() {
    let host = Host::new();
    autoreleasepool(|_| {
        let a: Vec<f32> = (0..64).map(|i| i as f32).collect();
        let (x, y, z) = (host.buffer(&a), host.buffer(&a), host.zeros(256));
        let commands = host.commands();
        let encoder = commands.computeCommandEncoder().unwrap();
        encoder.setComputePipelineState(&host.pipeline("add"));
        bind(&encoder, &[&x, &y, &z]);
        set(&encoder, &0.5f32, 3);
        encoder.dispatchThreadgroups_threadsPerThreadgroup(size(2), size(32));
        encoder.endEncoding();
        let called = Arc::new(AtomicUsize::new(0));
        let seen = called.clone();
        let done = RcBlock::new(move |b: NonNull<ProtocolObject<dyn MTLCommandBuffer>>| {
            assert_eq!(unsafe { b.as_ref() }.status(), MTLCommandBufferStatus::Completed);
            assert_eq!(std::thread::current().name(), Some("completion queue"));
            seen.fetch_add(1, SeqCst);
        });
        unsafe { commands.addCompletedHandler(RcBlock::as_ptr(&done)) };
        drop(done);
        commands.commit();
        // Nothing is there before somebody waits.
        assert_eq!(read::<f32>(&z), vec![0.0; 64]);
        commands.waitUntilCompleted();
        assert_eq!(commands.error().map(|e| e.localizedDescription().to_string()), None);
        assert_eq!(read::<f32>(&z), a);
        assert_eq!(
            (called.load(SeqCst), Arc::strong_count(&called)),
            (1, 1),
            "the block is called once and freed"
        );
        let (from, to) = (commands.GPUStartTime(), commands.GPUEndTime());
        assert!(0.0 < commands.kernelStartTime() && commands.kernelStartTime() <= from && from < to);
    });
}

#[test]
fn threadgroup_memory_and_offsets() {
    let host = Host::new();
    let (x, z) = (host.buffer(&[1.5f32; 128]), host.zeros(64));
    let result = host.run(|e| {
        e.setComputePipelineState(&host.pipeline("sum"));
        unsafe {
            e.setBuffer_offset_atIndex(Some(&x), 0, 0);
            e.setBufferOffset_atIndex(256, 0);
            e.setBuffer_offset_atIndex(Some(&z), 16, 1);
            e.setThreadgroupMemoryLength_atIndex(256, 0);
        }
        e.dispatchThreads_threadsPerThreadgroup(size(64), size(64));
    });
    assert_eq!(result, Ok(()));
    assert_eq!(read::<f32>(&z)[4], 96.0);
}

#[test]
fn memory_of_the_host() {
    let host = Host::new();
    let layout = std::alloc::Layout::from_size_align(16384, 16384).unwrap();
    let at = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).unwrap();
    let freed = Arc::new(AtomicUsize::new(0));
    let seen = freed.clone();
    let free = RcBlock::new(move |p: NonNull<c_void>, n: usize| {
        unsafe { std::alloc::dealloc(p.as_ptr().cast(), layout) };
        seen.fetch_add(n, SeqCst);
    });
    let options = MTLResourceOptions::StorageModeShared;
    let buffer = unsafe {
        host.device.newBufferWithBytesNoCopy_length_options_deallocator(
            at.cast(),
            16384,
            options,
            Some(&free),
        )
    };
    let buffer = buffer.unwrap();
    assert_eq!(buffer.contents().as_ptr().cast(), at.as_ptr());
    assert_eq!(host.run(|e| host.put(e, &buffer, 0, 7)), Ok(()));
    assert_eq!(unsafe { at.cast::<u32>().read() }, 7);
    drop(buffer);
    assert_eq!(freed.load(SeqCst), 16384);
}

#[test]
fn errors_are_nserrors() {
    let host = Host::new();
    autoreleasepool(|_| {
        let e = host.library("kernel void f(device float* x) {}").unwrap_err();
        says(&e, "MTLLibraryErrorDomain 3: ");
        says(&e, "kernel.metal:1");
    });
}
