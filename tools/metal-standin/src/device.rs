//! Devices.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, OnceLock};

use block2::DynBlock;
use objc2::rc::Retained;
use objc2::runtime::{NSObject, NSObjectProtocol, ProtocolObject, Sel};
use objc2::{ClassType, DefinedClass, define_class, sel};
use objc2_foundation::{NSArray, NSError, NSString, NSURL};
use objc2_metal::{
    MTLArchitecture, MTLArgumentBuffersTier, MTLBinaryArchive, MTLBinaryArchiveDescriptor, MTLBuffer,
    MTLCommandQueue, MTLCommandQueueDescriptor, MTLCompileOptions, MTLComputePipelineDescriptor,
    MTLComputePipelineReflection, MTLComputePipelineState, MTLCounterSampleBuffer,
    MTLCounterSampleBufferDescriptor, MTLCounterSamplingPoint, MTLCounterSet, MTLDevice, MTLDeviceLocation,
    MTLEvent, MTLFence, MTLFunction, MTLGPUFamily, MTLHeap, MTLHeapDescriptor, MTLLibrary, MTLPipelineOption,
    MTLReadWriteTextureTier, MTLResidencySet, MTLResidencySetDescriptor, MTLResourceOptions, MTLSharedEvent,
    MTLSharedEventHandle, MTLSize, MTLSizeAndAlign,
};

use crate::answer::answer;
use crate::archive::{ArchiveDescriptor, archive};
use crate::buffer::{buffer_of, new_buffer, no_copy};
use crate::counters::{SampleDescriptor, new_samples, sets};
use crate::foundation::{System, array, path_of, refuse, set_system};
use crate::heap::{HeapDescriptor, new_heap, size_and_align};
use crate::library::{Device, from_file, from_source, function_state};
use crate::machine::{Machine, invalid, lock};
use crate::object::{Protocol, Sent, object, ours, retained, thread_safe};
use crate::pipeline::{of_descriptor, of_function, pipeline_state, reflection};
use crate::pipeline_descriptor::PipelineDescriptor;
use crate::profile::Profile;
use crate::queue::{QueueDescriptor, default_count, new_queue};
use crate::residency::{ResidencySetDescriptor, new_set};
use crate::scheduler::Scheduler;
use crate::sync::{event_of_handle, new_event, new_fence, new_shared_event};

pub(crate) struct DeviceIvars {
    machine: Arc<Machine>,
    scheduler: Arc<Scheduler>,
}

impl Drop for DeviceIvars {
    fn drop(&mut self) {
        self.scheduler.stop();
    }
}

/// Where a method leaves the reflection of a pipeline.
type ReflectionOut = *mut *mut MTLComputePipelineReflection;

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
    #[unsafe(super(NSObject))]
    #[name = "StandinDevice"]
    #[ivars = DeviceIvars]
    pub(crate) struct StandinDevice;

    // SAFETY: methods have the types of the protocol's.
    unsafe impl NSObjectProtocol for StandinDevice {
        /// Methods that the device's system lacks are missing.
        #[unsafe(method(respondsToSelector:))]
        fn responds(&self, sel: Sel) -> bool {
            let profile = &self.machine().profile;
            match sel {
                s if s == sel!(newResidencySetWithDescriptor:error:) => profile.has_residency_sets,
                s if s == sel!(architecture) => profile.architecture.is_some(),
                s => Self::class().responds_to(s),
            }
        }
    }

    // SAFETY: methods have the types of the protocol's.
    unsafe impl MTLDevice for StandinDevice {
        #[unsafe(method_id(name))]
        fn name(&self) -> Retained<NSString> {
            NSString::from_str(&self.machine().profile.name)
        }

        #[unsafe(method(registryID))]
        fn registry_id(&self) -> u64 {
            self.machine().id
        }

        #[unsafe(method_id(architecture))]
        fn architecture(&self) -> Retained<MTLArchitecture> {
            let Some(name) = self.machine().profile.architecture.clone() else {
                panic!(
                    "unrecognized selector: -[StandinDevice architecture], which is of macOS 14 and iOS 17"
                );
            };
            let this: Retained<Architecture> = object(name);
            // SAFETY: the class is MTLArchitecture.
            unsafe { Retained::cast_unchecked(this) }
        }

        #[unsafe(method(maxThreadsPerThreadgroup))]
        fn max_threads(&self) -> MTLSize {
            let n = self.machine().profile.max_threads;
            MTLSize { width: n, height: n, depth: n }
        }

        #[unsafe(method(maxThreadgroupMemoryLength))]
        fn threadgroup_memory(&self) -> usize {
            self.machine().profile.max_threadgroup_memory
        }

        #[unsafe(method(maxBufferLength))]
        fn max_buffer(&self) -> usize {
            self.machine().profile.max_buffer_length
        }

        #[unsafe(method(recommendedMaxWorkingSetSize))]
        fn working_set(&self) -> u64 {
            self.machine().profile.working_set
        }

        #[unsafe(method(currentAllocatedSize))]
        fn allocated(&self) -> usize {
            self.machine().counters().bytes
        }

        #[unsafe(method(hasUnifiedMemory))]
        fn is_unified(&self) -> bool {
            true
        }

        #[unsafe(method(isLowPower))]
        fn is_low_power(&self) -> bool {
            false
        }

        #[unsafe(method(isHeadless))]
        fn is_headless(&self) -> bool {
            false
        }

        #[unsafe(method(isRemovable))]
        fn is_removable(&self) -> bool {
            false
        }

        #[unsafe(method(location))]
        fn location(&self) -> MTLDeviceLocation {
            MTLDeviceLocation::BuiltIn
        }

        #[unsafe(method(locationNumber))]
        fn location_number(&self) -> usize {
            0
        }

        #[unsafe(method(maxTransferRate))]
        fn max_transfer_rate(&self) -> u64 {
            0
        }

        #[unsafe(method(readWriteTextureSupport))]
        fn texture_tier(&self) -> MTLReadWriteTextureTier {
            MTLReadWriteTextureTier::Tier2
        }

        #[unsafe(method(argumentBuffersSupport))]
        fn argument_buffers(&self) -> MTLArgumentBuffersTier {
            MTLArgumentBuffersTier::Tier2
        }

        #[unsafe(method(supportsFamily:))]
        fn supports_family(&self, family: MTLGPUFamily) -> bool {
            self.machine().profile.families.contains(&family)
        }

        #[unsafe(method_id(newCommandQueue))]
        fn queue(&self) -> Option<Protocol<dyn MTLCommandQueue>> {
            Some(self.make_queue(default_count()))
        }

        #[unsafe(method_id(newCommandQueueWithMaxCommandBufferCount:))]
        fn queue_of(&self, most: usize) -> Option<Protocol<dyn MTLCommandQueue>> {
            if most == 0 {
                invalid!("a queue of at most 0 command buffers");
            }
            Some(self.make_queue(most))
        }

        #[unsafe(method_id(newCommandQueueWithDescriptor:))]
        fn queue_with(
            &self,
            descriptor: &MTLCommandQueueDescriptor,
        ) -> Option<Protocol<dyn MTLCommandQueue>> {
            Some(self.make_queue(ours::<QueueDescriptor, _>(descriptor).ivars().maxCommandBufferCount.get()))
        }

        #[unsafe(method_id(newBufferWithLength:options:))]
        fn buffer(&self, length: usize, options: MTLResourceOptions) -> Option<Protocol<dyn MTLBuffer>> {
            new_buffer(self.machine(), self.itself(), length, options)
        }

        #[unsafe(method_id(newBufferWithBytes:length:options:))]
        fn buffer_of(
            &self,
            bytes: NonNull<c_void>,
            length: usize,
            options: MTLResourceOptions,
        ) -> Option<Protocol<dyn MTLBuffer>> {
            let buffer = new_buffer(self.machine(), self.itself(), length, options);
            if let Some(buffer) = &buffer {
                // SAFETY: the caller passes that many bytes.
                let bytes = unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast::<u8>(), length) };
                buffer_of(buffer).state().storage.write(0, bytes);
            }
            buffer
        }

        #[unsafe(method_id(newBufferWithBytesNoCopy:length:options:deallocator:))]
        fn no_copy(
            &self,
            at: NonNull<c_void>,
            length: usize,
            options: MTLResourceOptions,
            free: Option<&DynBlock<dyn Fn(NonNull<c_void>, usize)>>,
        ) -> Option<Protocol<dyn MTLBuffer>> {
            // SAFETY: the deallocator may be called on another thread, as Metal's is.
            let free = free.map(|f| unsafe { Sent::new(f.copy()) });
            no_copy(self.machine(), self.itself(), (at.as_ptr().cast(), length), options, free)
        }

        #[unsafe(method_id(newLibraryWithSource:options:error:))]
        fn library(
            &self,
            source: &NSString,
            options: Option<&MTLCompileOptions>,
            out: *mut *mut NSError,
        ) -> Option<Protocol<dyn MTLLibrary>> {
            from_source(self.machine(), self.itself(), source, options).map_or_else(|e| refuse(out, e), Some)
        }

        #[unsafe(method(newLibraryWithSource:options:completionHandler:))]
        fn library_later(
            &self,
            source: &NSString,
            options: Option<&MTLCompileOptions>,
            block: &DynBlock<dyn Fn(*mut ProtocolObject<dyn MTLLibrary>, *mut NSError)>,
        ) {
            answer(from_source(self.machine(), self.itself(), source, options), block);
        }

        #[unsafe(method_id(newLibraryWithURL:error:))]
        fn library_of(&self, url: &NSURL, out: *mut *mut NSError) -> Option<Protocol<dyn MTLLibrary>> {
            from_file(self.machine(), self.itself(), &path_of(url)).map_or_else(|e| refuse(out, e), Some)
        }

        #[unsafe(method_id(newComputePipelineStateWithFunction:error:))]
        fn pipeline(
            &self,
            function: &ProtocolObject<dyn MTLFunction>,
            out: *mut *mut NSError,
        ) -> Option<Protocol<dyn MTLComputePipelineState>> {
            let function = function_state(function);
            of_function(self.machine(), self.itself(), &function, MTLPipelineOption::None)
                .map_or_else(|e| refuse(out, e), Some)
        }

        #[unsafe(method(newComputePipelineStateWithFunction:completionHandler:))]
        fn pipeline_later(
            &self,
            function: &ProtocolObject<dyn MTLFunction>,
            block: &DynBlock<dyn Fn(*mut ProtocolObject<dyn MTLComputePipelineState>, *mut NSError)>,
        ) {
            let function = function_state(function);
            answer(of_function(self.machine(), self.itself(), &function, MTLPipelineOption::None), block);
        }

        #[unsafe(method_id(newComputePipelineStateWithFunction:options:reflection:error:))]
        fn pipeline_reflected(
            &self,
            function: &ProtocolObject<dyn MTLFunction>,
            options: MTLPipelineOption,
            reflected: ReflectionOut,
            out: *mut *mut NSError,
        ) -> Option<Protocol<dyn MTLComputePipelineState>> {
            let made = of_function(self.machine(), self.itself(), &function_state(function), options);
            reflect(made, options, reflected, out)
        }

        #[unsafe(method_id(newComputePipelineStateWithDescriptor:options:reflection:error:))]
        fn pipeline_described(
            &self,
            descriptor: &MTLComputePipelineDescriptor,
            options: MTLPipelineOption,
            reflected: ReflectionOut,
            out: *mut *mut NSError,
        ) -> Option<Protocol<dyn MTLComputePipelineState>> {
            let settings = ours::<PipelineDescriptor, _>(descriptor).ivars();
            reflect(of_descriptor(self.machine(), self.itself(), settings, options), options, reflected, out)
        }

        #[unsafe(method_id(newBinaryArchiveWithDescriptor:error:))]
        fn archive(
            &self,
            descriptor: &MTLBinaryArchiveDescriptor,
            out: *mut *mut NSError,
        ) -> Option<Protocol<dyn MTLBinaryArchive>> {
            let settings = ours::<ArchiveDescriptor, _>(descriptor).ivars();
            archive(self.machine(), self.itself(), settings).map_or_else(|e| refuse(out, e), Some)
        }

        #[unsafe(method_id(newFence))]
        fn fence(&self) -> Option<Protocol<dyn MTLFence>> {
            Some(new_fence(self.machine(), self.itself()))
        }

        #[unsafe(method_id(newEvent))]
        fn event(&self) -> Option<Protocol<dyn MTLEvent>> {
            Some(new_event(self.machine(), self.itself()))
        }

        #[unsafe(method_id(newSharedEvent))]
        fn shared_event(&self) -> Option<Protocol<dyn MTLSharedEvent>> {
            Some(new_shared_event(self.machine(), self.itself()))
        }

        #[unsafe(method_id(newSharedEventWithHandle:))]
        fn event_of(&self, handle: &MTLSharedEventHandle) -> Option<Protocol<dyn MTLSharedEvent>> {
            Some(event_of_handle(handle))
        }

        #[unsafe(method(heapBufferSizeAndAlignWithLength:options:))]
        fn heap_size(&self, length: usize, _options: MTLResourceOptions) -> MTLSizeAndAlign {
            size_and_align(length)
        }

        #[unsafe(method_id(newHeapWithDescriptor:))]
        fn heap(&self, descriptor: &MTLHeapDescriptor) -> Option<Protocol<dyn MTLHeap>> {
            new_heap(self.machine(), self.itself(), ours::<HeapDescriptor, _>(descriptor).ivars())
        }

        #[unsafe(method_id(newResidencySetWithDescriptor:error:))]
        fn residency_set(
            &self,
            descriptor: &MTLResidencySetDescriptor,
            _out: *mut *mut NSError,
        ) -> Option<Protocol<dyn MTLResidencySet>> {
            if !self.machine().profile.has_residency_sets {
                panic!(
                    "unrecognized selector: -[StandinDevice newResidencySetWithDescriptor:error:], which is of macOS 15 and iOS 18"
                );
            }
            Some(new_set(
                self.machine(),
                self.itself(),
                ours::<ResidencySetDescriptor, _>(descriptor).ivars(),
            ))
        }

        #[unsafe(method_id(counterSets))]
        fn counter_sets(&self) -> Option<Retained<NSArray<ProtocolObject<dyn MTLCounterSet>>>> {
            Some(sets())
        }

        #[unsafe(method(supportsCounterSampling:))]
        fn supports_sampling(&self, point: MTLCounterSamplingPoint) -> bool {
            point == MTLCounterSamplingPoint::AtStageBoundary
        }

        #[unsafe(method_id(newCounterSampleBufferWithDescriptor:error:))]
        fn samples(
            &self,
            descriptor: &MTLCounterSampleBufferDescriptor,
            out: *mut *mut NSError,
        ) -> Option<Protocol<dyn MTLCounterSampleBuffer>> {
            let settings = ours::<SampleDescriptor, _>(descriptor).ivars();
            new_samples(self.machine(), self.itself(), settings).map_or_else(|e| refuse(out, e), Some)
        }

        #[unsafe(method(sampleTimestamps:gpuTimestamp:))]
        fn timestamps(&self, cpu: NonNull<u64>, gpu: NonNull<u64>) {
            let now = (crate::commands::seconds() * 1e9) as u64;
            // SAFETY: the caller passes room for both.
            unsafe {
                cpu.write(now);
                gpu.write(now);
            }
        }
    }
);

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
    #[unsafe(super(NSObject))]
    #[name = "MTLArchitecture"]
    #[ivars = String]
    pub(crate) struct Architecture;

    impl Architecture {
        #[unsafe(method_id(name))]
        fn name(&self) -> Retained<NSString> {
            NSString::from_str(self.ivars())
        }
    }
);

thread_safe!(StandinDevice);

impl StandinDevice {
    fn machine(&self) -> &Arc<Machine> {
        &self.ivars().machine
    }

    fn itself(&self) -> Device {
        ProtocolObject::from_retained(retained(self))
    }

    fn make_queue(&self, most: usize) -> Protocol<dyn MTLCommandQueue> {
        new_queue(self.machine(), &self.ivars().scheduler, self.itself(), most)
    }
}

/// A new pipeline, and where the caller wants it, its reflection.
fn reflect(
    made: Result<Protocol<dyn MTLComputePipelineState>, Retained<NSError>>,
    options: MTLPipelineOption,
    reflected: ReflectionOut,
    out: *mut *mut NSError,
) -> Option<Protocol<dyn MTLComputePipelineState>> {
    let pipeline = match made {
        Ok(pipeline) => pipeline,
        Err(e) => return refuse(out, e),
    };
    if !reflected.is_null() && options.contains(MTLPipelineOption::BindingInfo) {
        // SAFETY: the caller passes room for a reflection, which is autoreleased.
        unsafe { *reflected = Retained::autorelease_ptr(reflection(pipeline_state(&pipeline))) };
    }
    Some(pipeline)
}

/// The state that all objects of a device share.
pub(crate) fn machine_of(device: &ProtocolObject<dyn MTLDevice>) -> &Arc<Machine> {
    ours::<StandinDevice, _>(device).machine()
}

/// A device of a profile.
pub(crate) fn new_device(profile: Profile) -> Device {
    set_system(System { version: profile.system, has_math_mode: profile.has_math_mode });
    let machine = Machine::new(profile);
    let scheduler = Scheduler::new(machine.clone());
    let this: Retained<StandinDevice> = object(DeviceIvars { machine, scheduler });
    ProtocolObject::from_retained(this)
}

/// The profile of the default device.
static DEFAULT_PROFILE: Mutex<Option<Profile>> = Mutex::new(None);
static DEFAULT: OnceLock<Option<Device>> = OnceLock::new();

/// Sets the profile of the device that `MTLCreateSystemDefaultDevice` returns, or that there is none.
pub(crate) fn set_default(profile: Option<Profile>) {
    assert!(DEFAULT.get().is_none(), "the default device has been used");
    *lock(&DEFAULT_PROFILE) = profile.clone();
    if profile.is_none() {
        let _ = DEFAULT.set(None);
    }
}

/// The symbol that the bindings link to.
#[unsafe(no_mangle)]
extern "C-unwind" fn MTLCreateSystemDefaultDevice() -> *mut ProtocolObject<dyn MTLDevice> {
    let device = DEFAULT.get_or_init(|| Some(new_device(lock(&DEFAULT_PROFILE).clone().unwrap_or_default())));
    device.clone().map_or(std::ptr::null_mut(), Retained::into_raw)
}

/// The symbol that the bindings link to: the default device is the system's only one.
#[unsafe(no_mangle)]
extern "C-unwind" fn MTLCopyAllDevices() -> *mut NSArray<ProtocolObject<dyn MTLDevice>> {
    let device = DEFAULT.get_or_init(|| Some(new_device(lock(&DEFAULT_PROFILE).clone().unwrap_or_default())));
    Retained::into_raw(array(device.clone().into_iter().collect()))
}
