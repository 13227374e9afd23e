//! Metal's rules of use, as functions of plain values. Each says what Apple's document states and where; documents are under
//! developer.apple.com/documentation/metal, the tables are "Metal Feature Set Tables".
//!
//! A host that breaks a rule while it encodes is told at once by a panic. Rules that only the order of work decides are in
//! [`hazards`](crate::hazards) and [`cpu_writes`](crate::cpu_writes).

use objc2_metal::{MTLGPUFamily, MTLLanguageVersion, MTLResourceOptions, MTLSize, MTLStorageMode};

use crate::machine::invalid;
use crate::memory::{BufferState, PAGE, storage_mode};
use crate::profile::Profile;

/// Buffers that a kernel may have. Feature Set Tables, "Maximum number of entries in the buffer argument table, per graphics or kernel
/// function": 31.
pub(crate) const MAX_BUFFERS: usize = 31;

/// "MTLComputeCommandEncoder, setBuffer(_:offset:index:)": an index in the buffer argument table, which has 31 entries.
pub(crate) fn buffer_index(index: usize) {
    if index >= MAX_BUFFERS {
        invalid!("index {index} of the buffer argument table, at most {}", MAX_BUFFERS - 1);
    }
}

/// "MTLComputeCommandEncoder, setBuffer(_:offset:index:)": the offset is where the data begins, in bytes from the start of the buffer, and
/// so lies inside it.
pub(crate) fn offset(offset: usize, buffer: &BufferState) {
    if offset >= buffer.length {
        invalid!("offset {offset} of {} of {} bytes", buffer.shown(), buffer.length);
    }
}

/// "MTLComputeCommandEncoder, setBufferOffset(_:index:)": it updates the offset of a buffer that is bound at the index.
pub(crate) fn offset_of_nothing(index: usize) -> ! {
    invalid!("setBufferOffset at index {index}, where no buffer is bound")
}

/// "MTLComputeCommandEncoder, setBytes(_:length:index:)": for data of less than 4 KB that is used once; longer data needs a buffer.
pub(crate) fn set_bytes(length: usize) {
    if length == 0 || length > 4096 {
        invalid!("setBytes of {length} bytes, between 1 and 4096 are allowed");
    }
}

/// "MTLComputeCommandEncoder, setThreadgroupMemoryLength(_:index:)": the length is a multiple of 16 bytes. Feature Set Tables, "Maximum
/// total threadgroup memory allocation": 32 KB, and "Maximum number of entries in the threadgroup memory argument table": 31.
pub(crate) fn threadgroup_memory(length: usize, index: usize) {
    if index >= 31 {
        invalid!("index {index} of the threadgroup memory argument table, at most 30");
    }
    if !length.is_multiple_of(16) {
        invalid!("setThreadgroupMemoryLength: {length} is no multiple of 16");
    }
}

/// "MTLDevice, maxThreadgroupMemoryLength": the most threadgroup memory that a kernel may use, with `staticThreadgroupMemoryLength` of
/// its pipeline.
pub(crate) fn threadgroup_memory_sum(dynamic: usize, of_kernel: usize, profile: &Profile) {
    let most = profile.max_threadgroup_memory;
    if dynamic + of_kernel > most {
        invalid!("{dynamic} bytes of threadgroup memory and {of_kernel} of the kernel's own, at most {most}");
    }
}

/// "MTLComputePipelineState, maxTotalThreadsPerThreadgroup": the most threads that a threadgroup of this pipeline may have; a dispatch of
/// more is an error. Registers of the kernel may make it less than the device's limit.
pub(crate) fn threads(threads: MTLSize, of_pipeline: usize, profile: &Profile) {
    let MTLSize { width, height, depth } = threads;
    let count = width.saturating_mul(height).saturating_mul(depth);
    if count == 0 {
        invalid!("a threadgroup of {width} x {height} x {depth} threads");
    }
    if count > profile.max_threads {
        invalid!("{count} threads in a threadgroup, at most {}", profile.max_threads);
    }
    if count > of_pipeline {
        invalid!("{count} threads in a threadgroup, at most {of_pipeline} of this pipeline");
    }
}

/// "MTLComputePipelineDescriptor, threadGroupSizeIsMultipleOfThreadExecutionWidth": a promise that threads per threadgroup are a multiple of
/// `threadExecutionWidth`.
pub(crate) fn multiple_of_width(threads: MTLSize, is_promised: bool) {
    let count = threads.width * threads.height * threads.depth;
    if is_promised && !count.is_multiple_of(32) {
        invalid!("{count} threads in a threadgroup of a pipeline whose descriptor promises multiples of 32");
    }
}

/// "MTLComputeCommandEncoder, dispatchThreadgroups(_:threadsPerThreadgroup:)": the grid is counted in threadgroups, and is not empty.
pub(crate) fn grid(size: MTLSize) {
    if size.width == 0 || size.height == 0 || size.depth == 0 {
        invalid!("a grid of {} x {} x {}", size.width, size.height, size.depth);
    }
}

/// "MTLComputeCommandEncoder, dispatchThreadgroups(indirectBuffer:indirectBufferOffset:threadsPerThreadgroup:)": the buffer holds
/// `MTLDispatchThreadgroupsIndirectArguments`, three 32-bit integers, at an offset that is a multiple of 4.
pub(crate) fn indirect(offset: usize, buffer: &BufferState) {
    if !offset.is_multiple_of(4) || offset + 12 > buffer.length {
        invalid!("indirect arguments at byte {offset} of {} of {} bytes", buffer.shown(), buffer.length);
    }
}

/// "MTLDevice, makeBuffer(length:options:)" and "maxBufferLength": a buffer has between 1 and that many bytes.
pub(crate) fn buffer_length(length: usize, profile: &Profile) {
    if length == 0 {
        invalid!("a buffer of 0 bytes");
    }
    if length > profile.max_buffer_length {
        invalid!("a buffer of {length} bytes, at most {}", profile.max_buffer_length);
    }
}

/// "MTLDevice, makeBuffer(bytesNoCopy:length:options:deallocator:)": a page-aligned address, and a length that is a multiple of the page
/// size. Pages have 16 KB on Apple silicon. Storage mode private is not allowed: the memory is the host's.
pub(crate) fn no_copy(address: usize, length: usize, is_private: bool) {
    if !address.is_multiple_of(PAGE) || !length.is_multiple_of(PAGE) {
        invalid!("newBufferWithBytesNoCopy: {length} bytes at {address:#x} are not whole pages of {PAGE}");
    }
    if is_private {
        invalid!("newBufferWithBytesNoCopy: memory of the host cannot be private");
    }
}

/// "MTLBuffer, contents()": the CPU has no access to a buffer in private storage.
pub(crate) fn contents(buffer: &BufferState) {
    if buffer.is_private() {
        invalid!("contents of {}, which is private", buffer.shown());
    }
}

/// "MTLBuffer, didModifyRange(_:)" and "MTLBlitCommandEncoder, synchronize(resource:)": for resources in managed storage.
pub(crate) fn managed(buffer: &BufferState, what: &str) {
    if storage_mode(buffer.options) != MTLStorageMode::Managed {
        invalid!("{what} of {}, whose storage is not managed", buffer.shown());
    }
}

/// "MTLStorageMode, managed": of macOS alone; "memoryless": of textures.
pub(crate) fn buffer_storage(options: MTLResourceOptions, profile: &Profile) {
    let mode = storage_mode(options);
    let is_mac = profile.families.contains(&MTLGPUFamily::Mac2);
    if mode == MTLStorageMode::Memoryless || mode == MTLStorageMode::Managed && !is_mac {
        invalid!("a buffer of storage mode {}, which this device has for no buffer", mode.0);
    }
}

/// "MTLBuffer, didModifyRange(_:)" and "addDebugMarker(_:range:)": the range is inside the buffer.
pub(crate) fn buffer_range(end: usize, buffer: &BufferState) {
    if end > buffer.length {
        invalid!("a range up to byte {end} of {} of {} bytes", buffer.shown(), buffer.length);
    }
}

/// "MTLBlitCommandEncoder, copy(from:sourceOffset:to:destinationOffset:size:)" and "fill(buffer:range:value:)": ranges are inside their
/// buffers. On macOS, offsets and lengths are multiples of 4 bytes.
pub(crate) fn blit(offset: usize, length: usize, buffer: &BufferState) {
    if offset.checked_add(length).is_none_or(|end| end > buffer.length) {
        invalid!("a blit of {length} bytes at {offset} of {} of {} bytes", buffer.shown(), buffer.length);
    }
    if length == 0 {
        invalid!("a blit of 0 bytes");
    }
    if !offset.is_multiple_of(4) || !length.is_multiple_of(4) {
        invalid!("a blit of {length} bytes at {offset}, which are no multiples of 4");
    }
}

/// "MTLBlitCommandEncoder" too: the ranges of a copy inside one buffer do not overlap.
pub(crate) fn blit_inside(from: usize, to: usize, length: usize) {
    if from < to + length && to < from + length {
        invalid!("a copy of {length} bytes from {from} to {to} of one buffer: the ranges overlap");
    }
}

/// "MTLSharedEvent, signaledValue": the value only grows.
pub(crate) fn signaled_value(before: u64, value: u64) {
    if value < before {
        invalid!("signaledValue {value} of an event whose value is {before}: values only grow");
    }
}

/// "MTLCompileOptions, languageVersion": the default is the newest version that the system's compiler takes, which changes with it.
/// Versions belong to systems: 3.1 to macOS 14 and iOS 17, 3.2 to macOS 15 and iOS 18, 4.0 to 26.
pub(crate) fn language(explicit: Option<MTLLanguageVersion>, profile: &Profile) {
    if explicit.is_none() && profile.requires_language_version {
        invalid!("a library without an explicit languageVersion: its default changes with the system");
    }
}

/// "MTLCommandBuffer, commit()": a command buffer is committed once, after its encoders have ended.
pub(crate) fn commit(is_committed: bool, open_encoder: Option<&str>) {
    if is_committed {
        invalid!("commit of a command buffer that is committed already");
    }
    if let Some(encoder) = open_encoder {
        invalid!("commit of a command buffer with an open encoder: {encoder}");
    }
}

/// "MTLCommandBuffer, enqueue()": it reserves the place of a command buffer that is not committed, once.
pub(crate) fn enqueue(is_committed: bool, is_enqueued: bool) {
    if is_committed || is_enqueued {
        invalid!(
            "enqueue of a command buffer that is {}",
            if is_committed { "committed" } else { "enqueued" }
        );
    }
}

/// "MTLCommandBuffer, waitUntilCompleted()": it blocks until the work is done, so that without `commit` it never returns.
pub(crate) fn wait(is_committed: bool, what: &str) {
    if !is_committed {
        invalid!("{what} of a command buffer that is not committed: it never returns");
    }
}

/// "MTLCommandBuffer, enqueue()": a command buffer that is enqueued and not committed holds those behind it.
pub(crate) fn wait_behind(is_held: bool, what: &str) {
    if is_held {
        invalid!("{what} behind a command buffer that is enqueued and is not committed: it does not return");
    }
}

/// "MTLCommandBuffer, addCompletedHandler(_:)": handlers are added before `commit`.
pub(crate) fn handler(is_committed: bool) {
    if is_committed {
        invalid!("a handler is added to a command buffer that is committed");
    }
}

/// "MTLCommandBuffer, makeComputeCommandEncoder()": one encoder at a time, and none after `commit`.
pub(crate) fn new_encoder(is_committed: bool, open_encoder: Option<&str>) {
    if is_committed {
        invalid!("an encoder of a command buffer that is committed");
    }
    if let Some(encoder) = open_encoder {
        invalid!("a second encoder before endEncoding of the first: {encoder}");
    }
}

/// "MTLCommandBuffer, encodeWaitForEvent(_:value:)" and "encodeSignalEvent(_:value:)": between encoders, before `commit`.
pub(crate) fn event(is_committed: bool, open_encoder: Option<&str>) {
    if is_committed {
        invalid!("an event in a command buffer that is committed");
    }
    if let Some(encoder) = open_encoder {
        invalid!("an event while an encoder is open: {encoder}");
    }
}

/// "MTLCommandEncoder, endEncoding()": after it the encoder takes no command.
pub(crate) fn ended() -> ! {
    invalid!("an encoder is used after endEncoding")
}

/// "MTLCommandEncoder, endEncoding()" too: an encoder ends before it is released.
pub(crate) fn released_open(kind: &str) -> ! {
    invalid!("a {kind} is released without endEncoding")
}

/// "MTLCommandEncoder, popDebugGroup()": each pop has a push before it, and each push a pop before the encoder ends or the command buffer
/// is committed.
pub(crate) fn debug_groups(open: isize, is_closed: bool) {
    if open < 0 {
        invalid!("popDebugGroup without pushDebugGroup");
    }
    if is_closed && open > 0 {
        invalid!("{open} debug groups are still open");
    }
}

/// "MTLDevice": resources, pipelines, fences and events are used by the device that has made them.
pub(crate) fn same_device(of_object: u64, of_user: u64, what: &str) {
    if of_object != of_user {
        invalid!("{what} of another device");
    }
}

/// "MTLComputeCommandEncoder, sampleCounters(sampleBuffer:sampleIndex:barrier:)" and "MTLDevice, supportsCounterSampling(_:)": GPUs of
/// Apple sample at the boundaries of stages only.
pub(crate) fn samples_dispatch() -> ! {
    invalid!("sampleCountersInBuffer: this device does not support counter sampling at dispatch boundaries")
}

/// "MTLFence": in one encoder, the wait for a fence is encoded before its update; the other order waits for itself.
pub(crate) fn fence_order(is_updated: bool) {
    if is_updated {
        invalid!("waitForFence after updateFence of the same fence in one encoder");
    }
}

/// "MTLHeap, makeBuffer(length:options:)": storage mode and hazard tracking of a heap's buffers are the heap's.
pub(crate) fn heap_options(are_same: bool) {
    if !are_same {
        invalid!("a heap's buffer with a storage mode or a CPU cache mode that is not the heap's");
    }
}

/// "MTLHeap, makeBuffer(length:options:offset:)": on placement heaps only, at a multiple of the alignment that
/// `heapBufferSizeAndAlign(length:options:)` gives, inside the heap.
pub(crate) fn placement(is_placement: bool, offset: usize, end: usize, (align, size): (usize, usize)) {
    if !is_placement {
        invalid!("newBufferWithLength:options:offset: on a heap that is no placement heap");
    }
    if !offset.is_multiple_of(align) || end > size {
        invalid!("a buffer from byte {offset} to {end} of a heap of {size}, whose alignment is {align}");
    }
}

/// "MTLResource, makeAliasable()": for resources of automatic heaps.
pub(crate) fn aliasable(is_of_heap: bool) {
    if !is_of_heap {
        invalid!("makeAliasable of a buffer that no heap has made");
    }
}

/// "MTLComputeCommandEncoder, useResource(_:usage:)": a usage is read, write, or both.
pub(crate) fn usage(bits: usize) {
    if bits == 0 || bits > 3 {
        invalid!("useResource with usage {bits:#x}, which is not read, write or both");
    }
}

/// "MTLComputeCommandEncoder, memoryBarrier(scope:)": the scope names buffers where buffers are shared between dispatches.
pub(crate) fn barrier_scope(names_buffers: bool) {
    if !names_buffers {
        invalid!("memoryBarrierWithScope without buffers, which are all that a kernel here writes");
    }
}

/// "MTLCommandQueue, makeCommandQueue(maxCommandBufferCount:)": that many command buffers may exist before they complete; the next one
/// blocks its maker, for ever where nobody else completes one.
pub(crate) fn queue_is_full(open: usize, committed: usize, most: usize) {
    if open >= most && committed == 0 {
        invalid!(
            "{open} command buffers of a queue of at most {most} are neither committed nor gone: the next one never comes"
        );
    }
}
