//! Compute encoders.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use flashtile_msl_standin::AddressSpace;
use objc2::rc::Retained;
use objc2::runtime::{NSObjectProtocol, ProtocolObject};
use objc2::{ClassType, DefinedClass};
use objc2_foundation::NSRange;
use objc2_metal::{
    MTLBarrierScope, MTLBuffer, MTLCommandEncoder, MTLComputeCommandEncoder, MTLComputePipelineState,
    MTLCounterSampleBuffer, MTLDispatchType, MTLFence, MTLHeap, MTLResource, MTLResourceUsage, MTLSize,
};

use crate::buffer::{Buffer, buffer_of};
use crate::commands::{Bound, Dispatch, Grid, Step};
use crate::encoder::{Encoding, encoder_class};
use crate::heap::heap_of;
use crate::machine::{Entry, invalid, lock};
use crate::memory::{BufferState, Kind, Storage};
use crate::object::{Protocol, object, ours};
use crate::pipeline::{PipelineState, pipeline_state};
use crate::rules::{self, MAX_BUFFERS};

/// The pipeline and the bindings of the next dispatch.
struct Arguments {
    pipeline: Option<Arc<PipelineState>>,
    bound: Vec<Option<Bound>>,
    threadgroup: Vec<usize>,
    indirect: Vec<(Arc<BufferState>, bool)>,
}

pub(crate) struct ComputeIvars {
    encoding: Encoding,
    is_concurrent: bool,
    arguments: Mutex<Arguments>,
}

encoder_class! {
    ComputeEncoder of ComputeIvars, "StandinComputeCommandEncoder";

    // SAFETY: methods have the types of the protocol's.
    unsafe impl MTLComputeCommandEncoder for ComputeEncoder {
        #[unsafe(method(dispatchType))]
        fn dispatch_type(&self) -> MTLDispatchType {
            if self.ivars().is_concurrent { MTLDispatchType::Concurrent } else { MTLDispatchType::Serial }
        }

        #[unsafe(method(setComputePipelineState:))]
        fn set_pipeline(&self, pipeline: &ProtocolObject<dyn MTLComputePipelineState>) {
            self.encoding().check();
            let state = pipeline_state(pipeline);
            rules::same_device(state.machine.id, self.machine().id, "a pipeline");
            lock(&self.ivars().arguments).pipeline = Some(state.clone());
        }

        #[unsafe(method(setBuffer:offset:atIndex:))]
        fn set_buffer(&self, buffer: Option<&ProtocolObject<dyn MTLBuffer>>, offset: usize, index: usize) {
            self.bind(buffer, offset, index);
        }

        #[unsafe(method(setBuffers:offsets:withRange:))]
        fn set_buffers(
            &self,
            buffers: NonNull<*const ProtocolObject<dyn MTLBuffer>>,
            offsets: NonNull<usize>,
            range: NSRange,
        ) {
            for i in 0..range.length {
                // SAFETY: the caller passes a buffer, or nil, and an offset for each index of the range.
                let (buffer, offset) = unsafe { (buffers.add(i).read().as_ref(), offsets.add(i).read()) };
                self.bind(buffer, offset, range.location + i);
            }
        }

        #[unsafe(method(setBufferOffset:atIndex:))]
        fn set_offset(&self, new: usize, index: usize) {
            self.encoding().check();
            rules::buffer_index(index);
            let bound = lock(&self.ivars().arguments).bound[index].clone();
            let Some(Bound::Buffer { buffer, kept, .. }) = bound else { rules::offset_of_nothing(index) };
            rules::offset(new, &buffer);
            lock(&self.ivars().arguments).bound[index] = Some(Bound::Buffer { buffer, kept, offset: new });
        }

        #[unsafe(method(setBytes:length:atIndex:))]
        fn set_bytes(&self, bytes: NonNull<c_void>, length: usize, index: usize) {
            self.encoding().check();
            rules::buffer_index(index);
            rules::set_bytes(length);
            // SAFETY: the caller passes that many bytes.
            let bytes = unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast::<u8>(), length) };
            let kind = Kind { is_tracked: true, is_visible: false, is_counted: false };
            let storage = Storage::own(self.machine(), length, kind, 0);
            storage.write(0, bytes);
            lock(&self.ivars().arguments).bound[index] = Some(Bound::Bytes(storage));
        }

        #[unsafe(method(setThreadgroupMemoryLength:atIndex:))]
        fn set_memory(&self, length: usize, index: usize) {
            self.encoding().check();
            rules::threadgroup_memory(length, index);
            let sum: usize = {
                let mut arguments = lock(&self.ivars().arguments);
                arguments.threadgroup[index] = length;
                arguments.threadgroup.iter().sum()
            };
            rules::threadgroup_memory_sum(sum, 0, &self.machine().profile);
        }

        #[unsafe(method(dispatchThreadgroups:threadsPerThreadgroup:))]
        fn dispatch(&self, groups: MTLSize, threads: MTLSize) {
            rules::grid(groups);
            self.encode(Grid::Groups(three(groups)), threads);
        }

        /// Threadgroups are all whole: what the kernels of the stand-in can be run with.
        #[unsafe(method(dispatchThreads:threadsPerThreadgroup:))]
        fn dispatch_threads(&self, grid: MTLSize, threads: MTLSize) {
            rules::grid(grid);
            let (grid, per_group) = (three(grid), three(threads));
            if (0..3).any(|d| per_group[d] == 0 || grid[d] % per_group[d] != 0) {
                panic!("the stand-in runs whole threadgroups only: {grid:?} threads in threadgroups of {per_group:?}");
            }
            self.encode(Grid::Groups([0, 1, 2].map(|d| grid[d] / per_group[d])), threads);
        }

        #[unsafe(method(dispatchThreadgroupsWithIndirectBuffer:indirectBufferOffset:threadsPerThreadgroup:))]
        fn dispatch_indirect(&self, buffer: &ProtocolObject<dyn MTLBuffer>, offset: usize, threads: MTLSize) {
            rules::indirect(offset, buffer_of(buffer).state());
            self.encode(Grid::Indirect(self.encoding().used(buffer, offset..offset + 12)), threads);
        }

        #[unsafe(method(memoryBarrierWithScope:))]
        fn barrier(&self, scope: MTLBarrierScope) {
            self.encoding().check();
            rules::barrier_scope(scope.contains(MTLBarrierScope::Buffers));
            self.machine().count(|c| c.barriers += 1);
            self.encoding().step(Step::Barrier(None));
        }

        #[unsafe(method(memoryBarrierWithResources:count:))]
        fn barrier_of(&self, resources: NonNull<NonNull<ProtocolObject<dyn MTLResource>>>, count: usize) {
            self.encoding().check();
            // SAFETY: the caller passes that many resources.
            let all = (0..count).map(|i| resource(unsafe { resources.add(i).read().as_ref() }).state().storage.id);
            let ids = all.collect();
            self.machine().count(|c| c.barriers += 1);
            self.encoding().step(Step::Barrier(Some(ids)));
        }

        #[unsafe(method(updateFence:))]
        fn update_fence(&self, fence: &ProtocolObject<dyn MTLFence>) {
            self.encoding().update_fence(fence);
        }

        #[unsafe(method(waitForFence:))]
        fn wait_for_fence(&self, fence: &ProtocolObject<dyn MTLFence>) {
            self.encoding().wait_for_fence(fence);
        }

        #[unsafe(method(useResource:usage:))]
        fn use_resource(&self, used: &ProtocolObject<dyn MTLResource>, usage: MTLResourceUsage) {
            self.reach(used, usage);
        }

        #[unsafe(method(useResources:count:usage:))]
        fn use_resources(
            &self,
            resources: NonNull<NonNull<ProtocolObject<dyn MTLResource>>>,
            count: usize,
            usage: MTLResourceUsage,
        ) {
            for i in 0..count {
                // SAFETY: the caller passes that many resources.
                self.reach(unsafe { resources.add(i).read().as_ref() }, usage);
            }
        }

        /// "MTLComputeCommandEncoder, useHeap(_:)": kernels may read what a heap holds, not write it.
        #[unsafe(method(useHeap:))]
        fn use_heap(&self, heap: &ProtocolObject<dyn MTLHeap>) {
            self.reach_heap(heap);
        }

        #[unsafe(method(useHeaps:count:))]
        fn use_heaps(&self, heaps: NonNull<NonNull<ProtocolObject<dyn MTLHeap>>>, count: usize) {
            for i in 0..count {
                // SAFETY: the caller passes that many heaps.
                self.reach_heap(unsafe { heaps.add(i).read().as_ref() });
            }
        }

        #[unsafe(method(sampleCountersInBuffer:atSampleIndex:withBarrier:))]
        fn sample(&self, _samples: &ProtocolObject<dyn MTLCounterSampleBuffer>, _index: usize, _barrier: bool) {
            rules::samples_dispatch();
        }
    }
}

fn three(size: MTLSize) -> [u32; 3] {
    [size.width, size.height, size.depth]
        .map(|n| u32::try_from(n).unwrap_or_else(|_| invalid!("a grid of {n}")))
}

/// The buffer behind a resource.
fn resource(resource: &ProtocolObject<dyn MTLResource>) -> &Buffer {
    ours(resource)
}

impl ComputeEncoder {
    pub(crate) fn encoding(&self) -> &Encoding {
        &self.ivars().encoding
    }

    fn machine(&self) -> &Arc<crate::machine::Machine> {
        &self.encoding().commands.machine
    }

    fn bind(&self, buffer: Option<&ProtocolObject<dyn MTLBuffer>>, offset: usize, index: usize) {
        self.encoding().check();
        rules::buffer_index(index);
        let bound = buffer.map(|b| {
            let state = buffer_of(b).state().clone();
            rules::same_device(state.machine.id, self.machine().id, "a buffer");
            rules::offset(offset, &state);
            Bound::Buffer { buffer: state, kept: self.encoding().kept(b), offset }
        });
        lock(&self.ivars().arguments).bound[index] = bound;
    }

    fn reach(&self, used: &ProtocolObject<dyn MTLResource>, usage: MTLResourceUsage) {
        self.encoding().check();
        rules::usage(usage.0);
        let state = resource(used).state().clone();
        rules::same_device(state.machine.id, self.machine().id, "a resource");
        lock(&self.ivars().arguments).indirect.push((state, usage.contains(MTLResourceUsage::Write)));
    }

    fn reach_heap(&self, heap: &ProtocolObject<dyn MTLHeap>) {
        self.encoding().check();
        let heap = heap_of(heap);
        rules::same_device(heap.ivars().machine.id, self.machine().id, "a heap");
        lock(&self.ivars().arguments).indirect.extend(heap.buffers().into_iter().map(|b| (b, false)));
    }

    /// Checks a dispatch and adds it.
    fn encode(&self, grid: Grid, threads: MTLSize) {
        self.encoding().check();
        let (pipeline, bound, threadgroup, indirect) = {
            let a = lock(&self.ivars().arguments);
            let bound: Vec<_> =
                a.bound.iter().enumerate().filter_map(|(i, b)| Some((i, b.clone()?))).collect();
            (a.pipeline.clone(), bound, a.threadgroup.clone(), a.indirect.clone())
        };
        let Some(pipeline) = pipeline else { invalid!("a dispatch without a pipeline") };
        rules::threads(threads, pipeline.threads, &self.machine().profile);
        rules::multiple_of_width(threads, pipeline.is_multiple_of_width);
        let required = pipeline.required_threads;
        if required.width != 0 && three(required) != three(threads) {
            invalid!(
                "threadgroups of {:?} threads of a pipeline that requires {:?}",
                three(threads),
                three(required)
            );
        }
        arguments(&pipeline, &bound, &threadgroup);
        let sum = threadgroup.iter().sum();
        rules::threadgroup_memory_sum(
            sum,
            pipeline.kernel.static_threadgroup_bytes(),
            &self.machine().profile,
        );
        // A buffer that the kernel has no argument for stays bound and is of no use: it is not accessed.
        let has = |index: usize| {
            pipeline
                .arguments
                .iter()
                .any(|a| a.address_space != AddressSpace::Threadgroup && a.index == index)
        };
        let bound = bound.into_iter().filter(|(i, _)| has(*i)).collect();
        self.machine().write(Entry::Dispatch(pipeline.name.clone()));
        let threads = three(threads);
        let dispatch = Dispatch { pipeline, bound, threadgroup, grid, threads, indirect };
        self.encoding().step(Step::Dispatch(Box::new(dispatch)));
    }
}

/// "MTLComputeCommandEncoder": each argument of the kernel is bound, with as many bytes as a reference names; memory of its threadgroup
/// arguments has a length. An argument with a function constant may be absent.
fn arguments(pipeline: &PipelineState, bound: &[(usize, Bound)], threadgroup: &[usize]) {
    for argument in pipeline.arguments.iter().filter(|a| a.condition.is_none()) {
        let (index, name, kernel) = (argument.index, &argument.name, &pipeline.name);
        if argument.address_space == AddressSpace::Threadgroup {
            if threadgroup[index] == 0 {
                invalid!("kernel {kernel} has no length for threadgroup memory {index} ({name})");
            }
            continue;
        }
        let Some((_, memory)) = bound.iter().find(|b| b.0 == index) else {
            invalid!("kernel {kernel} has no buffer at index {index} ({name})");
        };
        let (bytes, offset) = match memory {
            Bound::Buffer { buffer, offset, .. } => (buffer.length - offset, *offset),
            Bound::Bytes(storage) => (storage.bytes, 0),
        };
        let needs = argument.bytes.filter(|_| argument.is_reference).unwrap_or(1);
        if bytes < needs {
            invalid!("kernel {kernel} has {bytes} bytes at index {index} ({name}), which is of {needs}");
        }
        // Feature Set Tables, "Minimum constant buffer offset alignment": 4 bytes on GPUs of Apple.
        if argument.address_space == AddressSpace::Constant && offset % 4 != 0 {
            invalid!("offset {offset} of a constant buffer at index {index} ({name}) is no multiple of 4");
        }
    }
}

/// An encoder.
pub(crate) fn new_encoder(encoding: Encoding, is_concurrent: bool) -> Protocol<dyn MTLComputeCommandEncoder> {
    let arguments = Arguments {
        pipeline: None,
        bound: vec![None; MAX_BUFFERS],
        threadgroup: vec![0; MAX_BUFFERS],
        indirect: Vec::new(),
    };
    let _ = ComputeEncoder::class();
    let this: Retained<ComputeEncoder> =
        object(ComputeIvars { encoding, is_concurrent, arguments: Mutex::new(arguments) });
    ProtocolObject::from_retained(this)
}
