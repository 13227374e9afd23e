//! A host that breaks a rule while it encodes is told at once.

use std::ptr::NonNull;

use flashtile_metal_standin::Profile;
use objc2::rc::autoreleasepool;
use objc2_foundation::NSRange;
use objc2_metal::*;

use crate::host::{Commands, Encoder, Host, bind, encode, finish, options, refused, says, set, size, string};

/// The message for a host that encodes this.
fn encoding(what: impl FnOnce(&Host, &Encoder)) -> String {
    let host = Host::new();
    refused(|| what(&host, &host.commands().computeCommandEncoder().unwrap()))
}

/// The message for a host that does this with a command buffer.
fn commanding(what: impl FnOnce(&Host, &Commands)) -> String {
    let host = Host::new();
    refused(|| what(&host, &host.commands()))
}

/// The message for a host that does this with a device.
fn using(what: impl FnOnce(&Host)) -> String {
    let host = Host::new();
    refused(|| what(&host))
}

fn dispatch(encoder: &Encoder, threads: usize) {
    encoder.dispatchThreadgroups_threadsPerThreadgroup(size(1), size(threads));
}

#[test]
fn arguments() {
    let e = encoding(|h, e| unsafe { e.setBuffer_offset_atIndex(Some(&h.zeros(8)), 8, 0) });
    says(&e, "Metal API validation: offset 8 of buffer of 8 bytes");
    let e = encoding(|h, e| unsafe { e.setBuffer_offset_atIndex(Some(&h.zeros(8)), 0, 31) });
    says(&e, "index 31 of the buffer argument table, at most 30");
    says(&encoding(|_, e| unsafe { e.setBufferOffset_atIndex(0, 3) }), "index 3, where no buffer is bound");
    says(&encoding(|_, e| set(e, &[0u8; 4097], 0)), "setBytes of 4097 bytes");
    let e = encoding(|_, e| unsafe { e.setBytes_length_atIndex(NonNull::dangling(), 0, 0) });
    says(&e, "setBytes of 0 bytes");
    says(&encoding(|_, e| unsafe { e.setThreadgroupMemoryLength_atIndex(24, 0) }), "24 is no multiple of 16");
    says(&encoding(|_, e| unsafe { e.setThreadgroupMemoryLength_atIndex(32784, 0) }), "at most 32768");
    says(
        &encoding(|_, e| unsafe { e.setThreadgroupMemoryLength_atIndex(16, 31) }),
        "index 31 of the threadgroup",
    );
    let e = encoding(|_, e| unsafe {
        e.setThreadgroupMemoryLength_atIndex(32768, 0);
        e.setThreadgroupMemoryLength_atIndex(16, 1);
    });
    says(&e, "32784 bytes of threadgroup memory");
}

#[test]
fn dispatches() {
    says(&encoding(|_, e| dispatch(e, 1)), "a dispatch without a pipeline");
    let with = |name: &'static str, f: fn(&Host, &Encoder)| {
        encoding(move |h, e| {
            e.setComputePipelineState(&h.pipeline(name));
            f(h, e);
        })
    };
    says(&with("put", |_, e| dispatch(e, 64)), "kernel put has no buffer at index 0 (x)");
    let e = with("put", |h, e| {
        bind(e, &[&h.zeros(256)]);
        set(e, &1u8, 1);
        dispatch(e, 64);
    });
    says(&e, "kernel put has 1 bytes at index 1 (v), which is of 4");
    let e = with("put", |h, e| {
        bind(e, &[&h.zeros(256)]);
        unsafe { e.setBuffer_offset_atIndex(Some(&h.zeros(256)), 2, 1) };
        dispatch(e, 64);
    });
    says(&e, "offset 2 of a constant buffer at index 1 (v) is no multiple of 4");
    let e = with("sum", |h, e| {
        bind(e, &[&h.zeros(256), &h.zeros(4)]);
        dispatch(e, 64);
    });
    says(&e, "no length for threadgroup memory 0 (t)");
    says(&with("put", |_, e| dispatch(e, 1025)), "1025 threads in a threadgroup, at most 1024");
    says(
        &with("limited", |_, e| dispatch(e, 65)),
        "65 threads in a threadgroup, at most 64 of this pipeline",
    );
    says(&with("put", |_, e| dispatch(e, 0)), "a threadgroup of 0 x 1 x 1 threads");
    let e = with("put", |_, e| e.dispatchThreadgroups_threadsPerThreadgroup(size(0), size(1)));
    says(&e, "a grid of 0 x 1 x 1");
    let e = with("put", |_, e| e.dispatchThreads_threadsPerThreadgroup(size(65), size(64)));
    says(&e, "whole threadgroups only");
    let e = with("put", |h, e| unsafe {
        let buffer = h.zeros(16);
        e.dispatchThreadgroupsWithIndirectBuffer_indirectBufferOffset_threadsPerThreadgroup(
            &buffer,
            8,
            size(1),
        );
    });
    says(&e, "indirect arguments at byte 8 of buffer of 16 bytes");
    says(&with("put", |_, e| e.memoryBarrierWithScope(MTLBarrierScope::Textures)), "without buffers");
    let e = with("put", |h, e| e.useResource_usage(ours(&h.zeros(16)), MTLResourceUsage(0)));
    says(&e, "useResource with usage 0x0");
}

/// A buffer as a resource.
fn ours(
    buffer: &objc2::runtime::ProtocolObject<dyn MTLBuffer>,
) -> &objc2::runtime::ProtocolObject<dyn MTLResource> {
    objc2::runtime::ProtocolObject::from_ref(buffer)
}

#[test]
fn a_device_that_answers_448() {
    let mut profile = Profile::m1();
    profile.pipeline_threads = 448;
    let host = Host::with(profile);
    assert_eq!(host.pipeline("put").maxTotalThreadsPerThreadgroup(), 448);
    assert_eq!(host.pipeline("limited").maxTotalThreadsPerThreadgroup(), 64);
    let e = refused(|| {
        drop(host.run(|e| {
            e.setComputePipelineState(&host.pipeline("put"));
            dispatch(e, 512);
        }));
    });
    says(&e, "512 threads in a threadgroup, at most 448 of this pipeline");
}

#[test]
fn pipelines_that_promise() {
    let host = Host::new();
    let described = |f: fn(&MTLComputePipelineDescriptor)| {
        autoreleasepool(|_| {
            let descriptor = MTLComputePipelineDescriptor::new();
            descriptor.setComputeFunction(Some(&host.function("put", 1)));
            descriptor.setLabel(Some(&string("promise")));
            f(&descriptor);
            let options = MTLPipelineOption::None;
            host.device
                .newComputePipelineStateWithDescriptor_options_reflection_error(&descriptor, options, None)
                .unwrap()
        })
    };
    let multiple = described(|d| unsafe { d.setThreadGroupSizeIsMultipleOfThreadExecutionWidth(true) });
    autoreleasepool(|_| assert_eq!(multiple.label().unwrap().to_string(), "promise"));
    let encoded = |pipeline: &objc2::runtime::ProtocolObject<dyn MTLComputePipelineState>, threads| {
        refused(|| {
            drop(host.run(|e| {
                e.setComputePipelineState(pipeline);
                dispatch(e, threads);
            }));
        })
    };
    says(
        &encoded(&multiple, 48),
        "48 threads in a threadgroup of a pipeline whose descriptor promises multiples of 32",
    );
    let limited = described(|d| d.setMaxTotalThreadsPerThreadgroup(128));
    assert_eq!(limited.maxTotalThreadsPerThreadgroup(), 128);
    says(&encoded(&limited, 129), "at most 128 of this pipeline");
}

#[test]
fn encoders_and_command_buffers() {
    let e = encoding(|_, e| {
        e.endEncoding();
        e.memoryBarrierWithScope(MTLBarrierScope::Buffers);
    });
    says(&e, "an encoder is used after endEncoding");
    let e = encoding(|_, e| {
        e.endEncoding();
        e.endEncoding();
    });
    says(&e, "an encoder is used after endEncoding");
    let e = commanding(|_, c| drop(c.computeCommandEncoder()));
    says(&e, "a compute encoder is released without endEncoding");
    says(
        &commanding(|_, c| c.waitUntilCompleted()),
        "waitUntilCompleted of a command buffer that is not committed",
    );
    says(
        &commanding(|_, c| c.waitUntilScheduled()),
        "waitUntilScheduled of a command buffer that is not committed",
    );
    let e = commanding(|_, c| {
        c.commit();
        c.commit();
    });
    says(&e, "commit of a command buffer that is committed already");
    let e = commanding(|_, c| {
        let _encoder = c.computeCommandEncoder().unwrap();
        c.commit();
    });
    says(&e, "with an open encoder: compute encoder");
    let e = commanding(|_, c| {
        let _first = c.blitCommandEncoder().unwrap();
        let _second = c.computeCommandEncoder();
    });
    says(&e, "a second encoder before endEncoding of the first: blit encoder");
    let e = commanding(|_, c| {
        c.commit();
        let _late = c.computeCommandEncoder();
    });
    says(&e, "an encoder of a command buffer that is committed");
    let e = commanding(|_, c| {
        c.commit();
        unsafe { c.addCompletedHandler(block2::RcBlock::as_ptr(&block2::RcBlock::new(|_| {}))) };
    });
    says(&e, "a handler is added to a command buffer that is committed");
    let e = commanding(|_, c| {
        c.enqueue();
        c.enqueue();
    });
    says(&e, "enqueue of a command buffer that is enqueued");
    let e = commanding(|h, c| {
        let _encoder = c.computeCommandEncoder().unwrap();
        c.encodeSignalEvent_value(&h.device.newEvent().unwrap(), 1);
    });
    says(&e, "an event while an encoder is open");
}

#[test]
fn debug_groups_are_closed() {
    says(&encoding(|_, e| e.popDebugGroup()), "popDebugGroup without pushDebugGroup");
    let e = encoding(|_, e| {
        e.pushDebugGroup(&string("open"));
        e.endEncoding();
    });
    says(&e, "1 debug groups are still open");
    let e = commanding(|_, c| {
        c.pushDebugGroup(&string("open"));
        c.commit();
    });
    says(&e, "1 debug groups are still open");
}

#[test]
fn a_full_queue() {
    let host = Host::new();
    let e = refused(|| {
        let queue = host.device.newCommandQueueWithMaxCommandBufferCount(2).unwrap();
        let _open: Vec<_> = (0..3).map(|_| queue.commandBuffer().unwrap()).collect();
    });
    says(&e, "2 command buffers of a queue of at most 2");
}

#[test]
fn buffers() {
    says(&using(|h| drop(h.zeros(0))), "a buffer of 0 bytes");
    says(&using(|h| drop(h.zeros((1 << 35) + 1))), "a buffer of 34359738369 bytes, at most 34359738368");
    let at = NonNull::<u8>::dangling().cast();
    let e = using(|h| {
        let options = MTLResourceOptions::StorageModeShared;
        drop(unsafe {
            h.device.newBufferWithBytesNoCopy_length_options_deallocator(at, 16384, options, None)
        });
    });
    says(&e, "not whole pages of 16384");
    let e = using(|h| {
        let buffer =
            h.device.newBufferWithLength_options(16, MTLResourceOptions::StorageModePrivate).unwrap();
        buffer.setLabel(Some(&string("cache")));
        let _ = buffer.contents();
    });
    says(&e, "contents of buffer \"cache\", which is private");
    let managed =
        |h: &Host| h.device.newBufferWithLength_options(16, MTLResourceOptions::StorageModeManaged).unwrap();
    says(&using(|h| managed(h).didModifyRange(NSRange::new(8, 16))), "a range up to byte 24 of buffer of 16");
    says(&using(|h| h.zeros(16).didModifyRange(NSRange::new(0, 4))), "whose storage is not managed");
    let phone = Host::with(Profile::a17_pro());
    says(&refused(|| drop(managed(&phone))), "a buffer of storage mode 1");
    says(
        &using(|h| unsafe { h.zeros(16).makeAliasable() }),
        "makeAliasable of a buffer that no heap has made",
    );
}

#[test]
fn blits() {
    let blit = |f: fn(&Host, &objc2::runtime::ProtocolObject<dyn MTLBlitCommandEncoder>)| {
        commanding(move |h, c| f(h, &c.blitCommandEncoder().unwrap()))
    };
    let e = blit(|h, b| b.fillBuffer_range_value(&h.zeros(16), NSRange::new(8, 12), 0));
    says(&e, "a blit of 12 bytes at 8 of buffer of 16 bytes");
    says(&blit(|h, b| b.fillBuffer_range_value(&h.zeros(16), NSRange::new(2, 4), 0)), "no multiples of 4");
    let e = blit(|h, b| {
        let x = h.zeros(64);
        unsafe { b.copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size(&x, 0, &x, 16, 32) };
    });
    says(&e, "the ranges overlap");
    says(&blit(|h, b| b.fillBuffer_range_value(&h.zeros(16), NSRange::new(0, 0), 0)), "a blit of 0 bytes");
}

#[test]
fn objects_of_another_device() {
    let (host, other) = (Host::new(), Host::new());
    let e = refused(|| drop(host.run(|e| e.setComputePipelineState(&other.pipeline("put")))));
    says(&e, "a pipeline of another device");
    says(&refused(|| drop(host.run(|e| bind(e, &[&other.zeros(16)])))), "a buffer of another device");
    let e = refused(|| drop(host.run(|e| e.updateFence(&other.device.newFence().unwrap()))));
    says(&e, "a fence of another device");
    let e = refused(|| host.commands().encodeSignalEvent_value(&other.device.newEvent().unwrap(), 1));
    says(&e, "an event of another device");
    let e = refused(|| {
        let _ = host.device.newComputePipelineStateWithFunction_error(&other.function("put", 1));
    });
    says(&e, "a function of another device");
}

#[test]
fn counters_are_sampled_where_stages_end() {
    let host = Host::new();
    assert!(host.device.supportsCounterSampling(MTLCounterSamplingPoint::AtStageBoundary));
    assert!(!host.device.supportsCounterSampling(MTLCounterSamplingPoint::AtDispatchBoundary));
    let e = refused(|| {
        let descriptor = MTLCounterSampleBufferDescriptor::new();
        descriptor.setCounterSet(Some(&host.device.counterSets().unwrap().objectAtIndex(0)));
        unsafe { descriptor.setSampleCount(2) };
        let samples = host.device.newCounterSampleBufferWithDescriptor_error(&descriptor).unwrap();
        let commands = host.commands();
        encode(&commands, |e| unsafe {
            e.sampleCountersInBuffer_atSampleIndex_withBarrier(&samples, 0, false)
        });
        let _ = finish(&commands);
    });
    says(&e, "does not support counter sampling at dispatch boundaries");
}

#[test]
fn a_language_version_is_explicit() {
    let host = Host::new();
    let compile = |options: Option<&MTLCompileOptions>| {
        let _ = host.device.newLibraryWithSource_options_error(&string("kernel void f() {}"), options);
    };
    says(&refused(|| compile(None)), "a library without an explicit languageVersion");
    says(
        &refused(|| compile(Some(&MTLCompileOptions::new()))),
        "a library without an explicit languageVersion",
    );
    autoreleasepool(|_| compile(Some(&options())));
    let old = Host::with(Profile::m1());
    let e = refused(|| {
        let options = options();
        options.setMathMode(MTLMathMode::Safe);
        let _ = old.device.newLibraryWithSource_options_error(&string("kernel void f() {}"), Some(&options));
    });
    says(&e, "setMathMode:], which is of macOS 15");
}
