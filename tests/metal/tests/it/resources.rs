//! Heaps, blits, indirect dispatches, residency, counters and buffers that are reached by their address.

use std::ptr::NonNull;

use flashtile_metal_standin::Profile;
use objc2::rc::autoreleasepool;
use objc2::runtime::ProtocolObject;
use objc2_foundation::NSRange;
use objc2_metal::*;

use crate::host::{Host, bind, encode, finish, read, refused, says, set, size, string, write};

#[test]
fn blits_copy_and_fill() {
    let host = Host::new();
    autoreleasepool(|_| {
        let x = host.buffer(&(0..64u32).collect::<Vec<_>>());
        let y = host.device.newBufferWithLength_options(256, MTLResourceOptions::StorageModePrivate).unwrap();
        let z = host.zeros(256);
        let commands = host.commands();
        let blit = commands.blitCommandEncoder().unwrap();
        unsafe {
            blit.copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size(&x, 0, &y, 0, 256);
            blit.copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size(&y, 128, &z, 0, 128);
        }
        blit.fillBuffer_range_value(&z, NSRange::new(128, 128), 0x11);
        let managed =
            host.device.newBufferWithLength_options(256, MTLResourceOptions::StorageModeManaged).unwrap();
        blit.synchronizeResource(ProtocolObject::from_ref(&*managed));
        says(
            &refused(|| blit.synchronizeResource(ProtocolObject::from_ref(&*z))),
            "whose storage is not managed",
        );
        blit.endEncoding();
        assert_eq!(finish(&commands), Ok(()));
        let expected: Vec<u32> = (32..64).chain(std::iter::repeat_n(0x1111_1111, 32)).collect();
        assert_eq!(read::<u32>(&z), expected);
    });
}

#[test]
fn grids_of_a_buffer() {
    let host = Host::new();
    let (x, grid) = (host.zeros(512), host.buffer(&[9u32, 2, 1, 1]));
    let ran = host.run(|e| {
        e.setComputePipelineState(&host.pipeline("put"));
        bind(e, &[&x]);
        set(e, &3u32, 1);
        unsafe {
            e.dispatchThreadgroupsWithIndirectBuffer_indirectBufferOffset_threadsPerThreadgroup(
                &grid,
                4,
                size(64),
            );
        }
    });
    assert_eq!((ran, read::<u32>(&x)), (Ok(()), vec![3; 128]));
}

fn heap(
    host: &Host,
    size: usize,
    kind: MTLHeapType,
    tracking: MTLHazardTrackingMode,
) -> crate::host::Object<dyn MTLHeap> {
    let descriptor = MTLHeapDescriptor::new();
    descriptor.setSize(size);
    descriptor.setStorageMode(MTLStorageMode::Shared);
    descriptor.setType(kind);
    descriptor.setHazardTrackingMode(tracking);
    host.device.newHeapWithDescriptor(&descriptor).unwrap()
}

#[test]
fn heaps_hold_buffers() {
    let host = Host::new();
    autoreleasepool(|_| {
        let options = MTLResourceOptions::StorageModeShared;
        let needs = host.device.heapBufferSizeAndAlignWithLength_options(256, options).size;
        let heap = heap(&host, 2 * needs, MTLHeapType::Automatic, MTLHazardTrackingMode::Tracked);
        let (x, y) =
            (heap.newBufferWithLength_options(256, options), heap.newBufferWithLength_options(256, options));
        let (x, y) = (x.unwrap(), y.unwrap());
        assert!(heap.newBufferWithLength_options(4, options).is_none(), "the heap is full");
        assert_eq!((heap.usedSize(), heap.maxAvailableSizeWithAlignment(16)), (2 * needs, 0));
        assert_eq!((x.heapOffset(), y.heapOffset()), (0, needs));
        let ran = host.run(|e| {
            host.put(e, &x, 0, 1);
            host.copy(e, &x, &y);
        });
        assert_eq!((ran, read::<u32>(&y)), (Ok(()), vec![1; 64]));
        // The heap gives out memory again once it is aliasable.
        unsafe { x.makeAliasable() };
        assert!(x.isAliasable());
        let z = heap.newBufferWithLength_options(256, options).unwrap();
        assert_eq!(z.heapOffset(), 0);
        drop(y);
        assert_eq!(heap.usedSize(), needs);
        let private = MTLResourceOptions::StorageModePrivate;
        says(&refused(|| drop(heap.newBufferWithLength_options(4, private))), "storage mode");
    });
}

/// Buffers of a placement heap that lie over each other are one memory, which an untracked heap leaves to the host.
#[test]
fn aliasing_buffers_are_one_memory() {
    let host = Host::new();
    autoreleasepool(|_| {
        let options = MTLResourceOptions::StorageModeShared;
        let heap = heap(&host, 4096, MTLHeapType::Placement, MTLHazardTrackingMode::Default);
        let placed =
            |offset| unsafe { heap.newBufferWithLength_options_offset(512, options, offset) }.unwrap();
        let (x, y) = (placed(0), placed(256));
        assert_eq!(x.hazardTrackingMode(), MTLHazardTrackingMode::Untracked);
        let commands = host.commands();
        encode(&commands, |e| host.put(e, &x, 256, 1));
        encode(&commands, |e| host.put(e, &y, 0, 2));
        says(&finish(&commands).unwrap_err(), "use bytes 256..512 of an untracked resource");
        says(&refused(|| drop(placed(100))), "whose alignment is 256");
        says(&refused(|| drop(placed(3840))), "from byte 3840 to 4352 of a heap of 4096");
    });
}

/// Reads the word whose address is in a buffer.
const INDIRECT: &str = "#include <metal_stdlib>
using namespace metal;
struct Table { device const uint* row; };
kernel void follow(device const Table* t [[buffer(0)]], device uint* out [[buffer(1)]]) { out[0] = t[0].row[1]; }
";

/// How a host makes a buffer resident that a kernel reaches by its address.
#[derive(Clone, Copy, PartialEq)]
enum Resident {
    Not,
    Use,
    Heap,
    Queue,
    Uncommitted,
    CommandBuffer,
}

fn follow(host: &Host, how: Resident) -> Result<u32, String> {
    autoreleasepool(|_| {
        let library = host.library(INDIRECT)?;
        let function = library.newFunctionWithName(&string("follow")).unwrap();
        let pipeline = host.device.newComputePipelineStateWithFunction_error(&function).unwrap();
        let heap = heap(host, 4096, MTLHeapType::Automatic, MTLHazardTrackingMode::Tracked);
        let row = match how {
            Resident::Heap => {
                let row = heap.newBufferWithLength_options(8, MTLResourceOptions::StorageModeShared).unwrap();
                write(&row, 4, 6u32);
                row
            }
            _ => host.buffer(&[5u32, 6]),
        };
        let (table, out) = (host.buffer(&[row.gpuAddress()]), host.zeros(4));
        let queue = host.device.newCommandQueue().unwrap();
        let set = host.device.newResidencySetWithDescriptor_error(&MTLResidencySetDescriptor::new()).unwrap();
        set.addAllocation(ProtocolObject::from_ref(&*row));
        assert!(set.containsAllocation(ProtocolObject::from_ref(&*row)));
        if how != Resident::Uncommitted {
            set.commit();
            set.requestResidency();
            assert_eq!((set.allocationCount(), set.allocatedSize()), (1, 16384));
        }
        if matches!(how, Resident::Queue | Resident::Uncommitted) {
            queue.addResidencySet(&set);
        }
        let commands = queue.commandBuffer().unwrap();
        if how == Resident::CommandBuffer {
            commands.useResidencySet(&set);
        }
        encode(&commands, |e| {
            e.setComputePipelineState(&pipeline);
            bind(e, &[&table, &out]);
            if how == Resident::Use {
                e.useResource_usage(ProtocolObject::from_ref(&*row), MTLResourceUsage::Read);
            }
            if how == Resident::Heap {
                e.useHeap(&heap);
            }
            e.dispatchThreadgroups_threadsPerThreadgroup(size(1), size(1));
        });
        finish(&commands)?;
        Ok(read::<u32>(&out)[0])
    })
}

#[test]
fn what_is_reached_by_its_address_is_resident() {
    let host = Host::new();
    for how in [Resident::Use, Resident::Heap, Resident::Queue, Resident::CommandBuffer] {
        assert_eq!(follow(&host, how), Ok(6));
    }
    for how in [Resident::Not, Resident::Uncommitted] {
        let e = follow(&host, how).unwrap_err();
        says(&e, "kernel follow: thread 0");
        says(&e, "not resident");
    }
}

/// Of what is merely resident Metal does not know which encoder uses it.
#[test]
fn what_is_not_declared_is_not_tracked() {
    let host = Host::new();
    let ordered = |is_declared: bool| {
        autoreleasepool(|_| {
            let library = host.library(INDIRECT)?;
            let function = library.newFunctionWithName(&string("follow")).unwrap();
            let pipeline = host.device.newComputePipelineStateWithFunction_error(&function).unwrap();
            let (row, out) = (host.zeros(256), host.zeros(4));
            let table = host.buffer(&[row.gpuAddress()]);
            let set =
                host.device.newResidencySetWithDescriptor_error(&MTLResidencySetDescriptor::new()).unwrap();
            set.addAllocation(ProtocolObject::from_ref(&*row));
            set.commit();
            let commands = host.commands();
            commands.useResidencySet(&set);
            encode(&commands, |e| host.put(e, &row, 0, 3));
            encode(&commands, |e| {
                e.setComputePipelineState(&pipeline);
                bind(e, &[&table, &out]);
                if is_declared {
                    e.useResource_usage(ProtocolObject::from_ref(&*row), MTLResourceUsage::Read);
                }
                e.dispatchThreadgroups_threadsPerThreadgroup(size(1), size(1));
            });
            finish(&commands)?;
            Ok::<_, String>(read::<u32>(&out)[0])
        })
    };
    assert_eq!(ordered(true), Ok(3));
    says(&ordered(false).unwrap_err(), "use bytes 4..8 of a resource that one of them does not declare");
}

#[test]
fn residency_sets_are_of_new_systems() {
    let host = Host::with(Profile::m1());
    let e =
        refused(|| drop(host.device.newResidencySetWithDescriptor_error(&MTLResidencySetDescriptor::new())));
    says(&e, "newResidencySetWithDescriptor:error:], which is of macOS 15");
}

#[test]
fn residency_sets_change_on_commit() {
    let host = Host::new();
    autoreleasepool(|_| {
        let set = host.device.newResidencySetWithDescriptor_error(&MTLResidencySetDescriptor::new()).unwrap();
        let (x, y) = (host.zeros(16), host.zeros(16));
        set.addAllocation(ProtocolObject::from_ref(&*x));
        set.addAllocation(ProtocolObject::from_ref(&*x));
        set.addAllocation(ProtocolObject::from_ref(&*y));
        assert_eq!((set.allocationCount(), set.allocatedSize()), (2, 0));
        set.commit();
        set.removeAllocation(ProtocolObject::from_ref(&*x));
        assert!(!set.containsAllocation(ProtocolObject::from_ref(&*x)));
        assert_eq!((set.allAllocations().count(), set.allocatedSize()), (1, 32768));
        let other = Host::new();
        let e = refused(|| set.addAllocation(ProtocolObject::from_ref(&*other.zeros(16))));
        says(&e, "a buffer of another device");
    });
}

#[test]
fn times_of_encoders() {
    let host = Host::new();
    autoreleasepool(|_| {
        let sets = host.device.counterSets().unwrap();
        assert_eq!(&*sets.objectAtIndex(0).name(), unsafe { MTLCommonCounterSetTimestamp });
        let descriptor = MTLCounterSampleBufferDescriptor::new();
        descriptor.setCounterSet(Some(&sets.objectAtIndex(0)));
        unsafe { descriptor.setSampleCount(3) };
        let samples = host.device.newCounterSampleBufferWithDescriptor_error(&descriptor).unwrap();
        let pass = MTLComputePassDescriptor::computePassDescriptor();
        let attachment = unsafe { pass.sampleBufferAttachments().objectAtIndexedSubscript(0) };
        attachment.setSampleBuffer(Some(&samples));
        unsafe {
            attachment.setStartOfEncoderSampleIndex(0);
            attachment.setEndOfEncoderSampleIndex(1);
        }
        let (x, out) = (host.zeros(256), host.zeros(16));
        let commands = host.commands();
        let encoder = commands.computeCommandEncoderWithDescriptor(&pass).unwrap();
        host.put(&encoder, &x, 0, 1);
        encoder.endEncoding();
        let blit = commands.blitCommandEncoder().unwrap();
        unsafe {
            blit.resolveCounters_inRange_destinationBuffer_destinationOffset(
                &samples,
                NSRange::new(0, 2),
                &out,
                0,
            );
        }
        blit.endEncoding();
        finish(&commands).unwrap();
        let bytes = unsafe { samples.resolveCounterRange(NSRange::new(0, 3)) }.unwrap().to_vec();
        let times: Vec<u64> = bytes.chunks(8).map(|c| u64::from_ne_bytes(c.try_into().unwrap())).collect();
        assert!(times[0] < times[1] && times[2] == u64::MAX);
        assert_eq!(read::<u64>(&out), times[..2]);
        unsafe { attachment.setEndOfEncoderSampleIndex(3) };
        let e = refused(|| drop(host.commands().computeCommandEncoderWithDescriptor(&pass)));
        says(&e, "sample 3 of a counter sample buffer of 3");
        unsafe { descriptor.setSampleCount(4097) };
        assert!(host.device.newCounterSampleBufferWithDescriptor_error(&descriptor).is_err());
    });
}

#[test]
fn several_buffers_at_once() {
    let host = Host::new();
    let (x, y) = (host.buffer(&[1u32; 128]), host.zeros(256));
    let ran = host.run(|e| {
        e.setComputePipelineState(&host.pipeline("copy"));
        let mut buffers = [&raw const *x, &raw const *y];
        let mut offsets = [256usize, 0];
        unsafe {
            e.setBuffers_offsets_withRange(
                NonNull::from(&mut buffers).cast(),
                NonNull::from(&mut offsets).cast(),
                NSRange::new(0, 2),
            );
        }
        e.dispatchThreadgroups_threadsPerThreadgroup(size(1), size(64));
    });
    assert_eq!((ran, read::<u32>(&y)), (Ok(()), vec![1; 64]));
    assert_eq!(x.setPurgeableState(MTLPurgeableState::Volatile), MTLPurgeableState::NonVolatile);
    assert_eq!(x.setPurgeableState(MTLPurgeableState::KeepCurrent), MTLPurgeableState::Volatile);
    write(&x, 0, 1u32);
}
