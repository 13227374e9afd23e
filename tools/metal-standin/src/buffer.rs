//! Buffers.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

use objc2::rc::Retained;
use objc2::runtime::{NSObject, NSObjectProtocol, ProtocolObject};
use objc2::{DefinedClass, define_class};
use objc2_foundation::{NSRange, NSString};
use objc2_metal::{
    MTLAllocation, MTLBuffer, MTLCPUCacheMode, MTLHazardTrackingMode, MTLHeap, MTLPurgeableState,
    MTLResource, MTLResourceOptions, MTLStorageMode,
};

use crate::library::Device;
use crate::machine::{Label, Machine, unique};
use crate::memory::{BufferState, Deallocator, Kind, Storage, address, is_untracked, storage_mode};
use crate::object::{Protocol, Sent, object, ours, text_of, thread_safe};
use crate::rules;

pub(crate) struct BufferIvars {
    pub(crate) state: Arc<BufferState>,
    device: Device,
    /// The heap that has made it.
    heap: Option<Sent<Protocol<dyn MTLHeap>>>,
}

impl Drop for BufferIvars {
    fn drop(&mut self) {
        self.state.is_alive.store(false, SeqCst);
    }
}

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
    #[unsafe(super(NSObject))]
    #[name = "StandinBuffer"]
    #[ivars = BufferIvars]
    pub(crate) struct Buffer;

    // SAFETY: the protocol asks nothing more.
    unsafe impl NSObjectProtocol for Buffer {}

    // SAFETY: methods have the types of the protocol's.
    unsafe impl MTLAllocation for Buffer {
        #[unsafe(method(allocatedSize))]
        fn allocated_size(&self) -> usize {
            self.state().length.next_multiple_of(crate::memory::PAGE)
        }
    }

    // SAFETY: methods have the types of the protocol's.
    unsafe impl MTLResource for Buffer {
        #[unsafe(method_id(label))]
        fn label(&self) -> Option<Retained<NSString>> {
            self.state().label.get().map(|l| NSString::from_str(&l))
        }

        #[unsafe(method(setLabel:))]
        fn set_label(&self, label: Option<&NSString>) {
            self.state().label.set(&self.state().machine, "buffer", text_of(label));
        }

        #[unsafe(method_id(device))]
        fn device(&self) -> Device {
            self.ivars().device.clone()
        }

        #[unsafe(method(cpuCacheMode))]
        fn cache_mode(&self) -> MTLCPUCacheMode {
            MTLCPUCacheMode(self.state().options.0 & 15)
        }

        #[unsafe(method(storageMode))]
        fn storage_mode(&self) -> MTLStorageMode {
            storage_mode(self.state().options)
        }

        #[unsafe(method(hazardTrackingMode))]
        fn tracking(&self) -> MTLHazardTrackingMode {
            if self.state().storage.is_tracked {
                MTLHazardTrackingMode::Tracked
            } else {
                MTLHazardTrackingMode::Untracked
            }
        }

        #[unsafe(method(resourceOptions))]
        fn options(&self) -> MTLResourceOptions {
            self.state().options
        }

        #[unsafe(method(setPurgeableState:))]
        fn set_purgeable(&self, state: MTLPurgeableState) -> MTLPurgeableState {
            if state == MTLPurgeableState::KeepCurrent {
                return MTLPurgeableState(self.state().purgeable.load(SeqCst));
            }
            if state == MTLPurgeableState::Empty {
                // Its content is lost.
                let s = self.state();
                s.storage.write(s.base, &vec![0xa5; s.length]);
            }
            MTLPurgeableState(self.state().purgeable.swap(state.0, SeqCst))
        }

        #[unsafe(method_id(heap))]
        fn heap(&self) -> Option<Protocol<dyn MTLHeap>> {
            self.ivars().heap.as_ref().map(|h| (**h).clone())
        }

        #[unsafe(method(heapOffset))]
        fn heap_offset(&self) -> usize {
            self.state().base
        }

        #[unsafe(method(makeAliasable))]
        fn make_aliasable(&self) {
            rules::aliasable(self.ivars().heap.is_some());
            self.state().is_aliasable.store(true, SeqCst);
        }

        #[unsafe(method(isAliasable))]
        fn is_aliasable(&self) -> bool {
            self.state().is_aliasable.load(SeqCst)
        }
    }

    // SAFETY: methods have the types of the protocol's.
    unsafe impl MTLBuffer for Buffer {
        #[unsafe(method(length))]
        fn length(&self) -> usize {
            self.state().length
        }

        #[unsafe(method(contents))]
        fn contents(&self) -> *mut c_void {
            rules::contents(self.state());
            self.state().start().cast()
        }

        #[unsafe(method(didModifyRange:))]
        fn did_modify(&self, range: NSRange) {
            rules::managed(self.state(), "didModifyRange");
            rules::buffer_range(range.end(), self.state());
        }

        #[unsafe(method(addDebugMarker:range:))]
        fn add_marker(&self, _marker: &NSString, range: NSRange) {
            rules::buffer_range(range.end(), self.state());
        }

        #[unsafe(method(removeAllDebugMarkers))]
        fn remove_markers(&self) {}

        /// The address of the memory, which is the same for the kernels of this device.
        #[unsafe(method(gpuAddress))]
        fn gpu_address(&self) -> u64 {
            address(self.state())
        }
    }
);

thread_safe!(Buffer);

impl Buffer {
    pub(crate) fn state(&self) -> &Arc<BufferState> {
        &self.ivars().state
    }
}

/// The object behind a buffer.
pub(crate) fn buffer_of(buffer: &ProtocolObject<dyn MTLBuffer>) -> &Buffer {
    ours(buffer)
}

fn kind(options: MTLResourceOptions) -> Kind {
    Kind {
        is_tracked: !is_untracked(options),
        is_visible: storage_mode(options) != MTLStorageMode::Private,
        is_counted: true,
    }
}

/// Where a buffer lies in memory that is there.
pub(crate) struct Region {
    pub(crate) storage: Arc<Storage>,
    pub(crate) base: usize,
    pub(crate) length: usize,
    pub(crate) heap: Option<Sent<Protocol<dyn MTLHeap>>>,
}

/// A buffer of memory that is there.
pub(crate) fn buffer_in(
    machine: &Arc<Machine>,
    device: Device,
    region: Region,
    options: MTLResourceOptions,
) -> Protocol<dyn MTLBuffer> {
    machine.count(|c| c.buffers += 1);
    let Region { storage, base, length, heap } = region;
    let state = BufferState {
        id: unique(),
        machine: machine.clone(),
        storage,
        base,
        length,
        options,
        label: Label::default(),
        is_alive: AtomicBool::new(true),
        is_aliasable: AtomicBool::new(false),
        has_address: AtomicBool::new(false),
        purgeable: AtomicUsize::new(MTLPurgeableState::NonVolatile.0),
    };
    let this: Retained<Buffer> = object(BufferIvars { state: Arc::new(state), device, heap });
    ProtocolObject::from_retained(this)
}

/// A buffer of its own memory, None where the memory of the device does not hold it. "MTLDevice, makeBuffer(length:options:)": its bytes
/// are zero.
pub(crate) fn new_buffer(
    machine: &Arc<Machine>,
    device: Device,
    length: usize,
    options: MTLResourceOptions,
) -> Option<Protocol<dyn MTLBuffer>> {
    rules::buffer_length(length, &machine.profile);
    rules::buffer_storage(options, &machine.profile);
    if machine.fails_buffer() || !machine.allocate(length) {
        return None;
    }
    let storage = Storage::own(machine, length, kind(options), 0);
    Some(buffer_in(machine, device, Region { storage, base: 0, length, heap: None }, options))
}

/// A buffer of the host's memory.
pub(crate) fn no_copy(
    machine: &Arc<Machine>,
    device: Device,
    memory: (*mut u8, usize),
    options: MTLResourceOptions,
    free: Option<Deallocator>,
) -> Option<Protocol<dyn MTLBuffer>> {
    rules::no_copy(memory.0.addr(), memory.1, storage_mode(options) == MTLStorageMode::Private);
    rules::buffer_length(memory.1, &machine.profile);
    rules::buffer_storage(options, &machine.profile);
    if machine.fails_buffer() {
        return None;
    }
    let storage = Storage::host(machine, memory, kind(options), free);
    Some(buffer_in(machine, device, Region { storage, base: 0, length: memory.1, heap: None }, options))
}
