//! Heaps.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, Weak};

use objc2::rc::Retained;
use objc2::runtime::{NSObject, NSObjectProtocol, ProtocolObject};
use objc2::{DefinedClass, define_class};
use objc2_foundation::NSString;
use objc2_metal::{
    MTLAllocation, MTLBuffer, MTLCPUCacheMode, MTLHazardTrackingMode, MTLHeap, MTLHeapType,
    MTLPurgeableState, MTLResourceOptions, MTLSizeAndAlign, MTLStorageMode,
};

use crate::buffer::{Region, buffer_in, buffer_of};
use crate::library::Device;
use crate::machine::{Label, Machine, lock};
use crate::memory::{BufferState, Kind, Storage};
use crate::object::{Protocol, Sent, object, ours, retained, settings, text_of, thread_safe};
use crate::rules;

/// Buffers of a heap start at multiples of this.
const ALIGN: usize = 256;

settings! {
    /// Settings of a new heap.
    "MTLHeapDescriptor" as HeapDescriptor of HeapSettings;
    values {
        size/setSize: usize = 0;
        storageMode/setStorageMode: MTLStorageMode = MTLStorageMode::Private;
        cpuCacheMode/setCpuCacheMode: MTLCPUCacheMode = MTLCPUCacheMode::DefaultCache;
        hazardTrackingMode/setHazardTrackingMode: MTLHazardTrackingMode = MTLHazardTrackingMode::Default;
        // `type` is no name in Rust: the selectors are below.
        heapType/setHeapType: MTLHeapType = MTLHeapType::Automatic;
    }
    objects {}
    also {
        #[unsafe(method(type))]
        fn kind(&self) -> MTLHeapType {
            objc2::DefinedClass::ivars(self).heapType.get()
        }

        #[unsafe(method(setType:))]
        fn set_kind(&self, kind: MTLHeapType) {
            objc2::DefinedClass::ivars(self).heapType.set(kind);
        }

        #[unsafe(method(resourceOptions))]
        fn resourceOptions(&self) -> MTLResourceOptions {
            options(objc2::DefinedClass::ivars(self))
        }

        #[unsafe(method(setResourceOptions:))]
        fn setResourceOptions(&self, options: MTLResourceOptions) {
            let ivars = objc2::DefinedClass::ivars(self);
            ivars.cpuCacheMode.set(MTLCPUCacheMode(options.0 & 15));
            ivars.storageMode.set(MTLStorageMode(options.0 >> 4 & 15));
            ivars.hazardTrackingMode.set(MTLHazardTrackingMode(options.0 >> 8 & 3));
        }
    }
}

/// "MTLHeapDescriptor, hazardTrackingMode": a heap is untracked by default, unlike a buffer.
fn is_tracked(settings: &HeapSettings) -> bool {
    settings.hazardTrackingMode.get() == MTLHazardTrackingMode::Tracked
}

fn options(settings: &HeapSettings) -> MTLResourceOptions {
    let tracking =
        if is_tracked(settings) { MTLHazardTrackingMode::Tracked } else { MTLHazardTrackingMode::Untracked };
    MTLResourceOptions(settings.cpuCacheMode.get().0 | settings.storageMode.get().0 << 4 | tracking.0 << 8)
}

pub(crate) struct HeapState {
    pub(crate) machine: Arc<Machine>,
    device: Device,
    pub(crate) storage: Arc<Storage>,
    options: MTLResourceOptions,
    kind: MTLHeapType,
    /// The buffers that it has made.
    buffers: Mutex<Vec<Weak<BufferState>>>,
    label: Label,
    purgeable: AtomicUsize,
}

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
    #[unsafe(super(NSObject))]
    #[name = "StandinHeap"]
    #[ivars = HeapState]
    pub(crate) struct Heap;

    // SAFETY: the protocol asks nothing more.
    unsafe impl NSObjectProtocol for Heap {}

    // SAFETY: methods have the types of the protocol's.
    unsafe impl MTLAllocation for Heap {
        #[unsafe(method(allocatedSize))]
        fn allocated_size(&self) -> usize {
            self.ivars().storage.bytes
        }
    }

    // SAFETY: methods have the types of the protocol's.
    unsafe impl MTLHeap for Heap {
        #[unsafe(method_id(label))]
        fn label(&self) -> Option<Retained<NSString>> {
            self.ivars().label.get().map(|l| NSString::from_str(&l))
        }

        #[unsafe(method(setLabel:))]
        fn set_label(&self, label: Option<&NSString>) {
            self.ivars().label.set(&self.ivars().machine, "heap", text_of(label));
        }

        #[unsafe(method_id(device))]
        fn device(&self) -> Device {
            self.ivars().device.clone()
        }

        #[unsafe(method(storageMode))]
        fn storage_mode(&self) -> MTLStorageMode {
            crate::memory::storage_mode(self.ivars().options)
        }

        #[unsafe(method(cpuCacheMode))]
        fn cache_mode(&self) -> MTLCPUCacheMode {
            MTLCPUCacheMode(self.ivars().options.0 & 15)
        }

        #[unsafe(method(hazardTrackingMode))]
        fn tracking(&self) -> MTLHazardTrackingMode {
            MTLHazardTrackingMode(self.ivars().options.0 >> 8 & 3)
        }

        #[unsafe(method(resourceOptions))]
        fn resource_options(&self) -> MTLResourceOptions {
            self.ivars().options
        }

        #[unsafe(method(type))]
        fn kind(&self) -> MTLHeapType {
            self.ivars().kind
        }

        #[unsafe(method(size))]
        fn size(&self) -> usize {
            self.ivars().storage.bytes
        }

        #[unsafe(method(usedSize))]
        fn used_size(&self) -> usize {
            self.occupied().iter().map(|(start, end)| end - start).sum()
        }

        #[unsafe(method(currentAllocatedSize))]
        fn current_size(&self) -> usize {
            self.ivars().storage.bytes
        }

        #[unsafe(method(maxAvailableSizeWithAlignment:))]
        fn available(&self, alignment: usize) -> usize {
            let align = alignment.max(ALIGN);
            self.gaps()
                .iter()
                .map(|(start, end)| end.saturating_sub(start.next_multiple_of(align)))
                .max()
                .unwrap_or(0)
        }

        #[unsafe(method_id(newBufferWithLength:options:))]
        fn buffer(&self, length: usize, options: MTLResourceOptions) -> Option<Protocol<dyn MTLBuffer>> {
            rules::buffer_length(length, &self.ivars().machine.profile);
            let gap = self.gaps().into_iter().find(|(start, end)| end - start >= padded(length));
            gap.filter(|_| !self.ivars().machine.fails_buffer())
                .map(|(start, _)| self.make(length, options, start))
        }

        #[unsafe(method_id(newBufferWithLength:options:offset:))]
        fn placed(
            &self,
            length: usize,
            options: MTLResourceOptions,
            offset: usize,
        ) -> Option<Protocol<dyn MTLBuffer>> {
            let ivars = self.ivars();
            rules::buffer_length(length, &ivars.machine.profile);
            let is_placement = ivars.kind == MTLHeapType::Placement;
            rules::placement(is_placement, offset, offset + length, (ALIGN, ivars.storage.bytes));
            (!ivars.machine.fails_buffer()).then(|| self.make(length, options, offset))
        }

        #[unsafe(method(setPurgeableState:))]
        fn set_purgeable(&self, state: MTLPurgeableState) -> MTLPurgeableState {
            if state == MTLPurgeableState::KeepCurrent {
                return MTLPurgeableState(self.ivars().purgeable.load(SeqCst));
            }
            MTLPurgeableState(self.ivars().purgeable.swap(state.0, SeqCst))
        }
    }
);

thread_safe!(Heap);

/// The bytes that a buffer takes up in a heap: some are left free, so that an access past its end is in no other buffer.
fn padded(length: usize) -> usize {
    length.next_multiple_of(ALIGN) + ALIGN
}

/// The answer of `heapBufferSizeAndAlignWithLength:options:`.
pub(crate) fn size_and_align(length: usize) -> MTLSizeAndAlign {
    MTLSizeAndAlign { size: padded(length), align: ALIGN }
}

impl Heap {
    /// Start and end of the memory that buffers hold which are alive and not aliasable, in order.
    fn occupied(&self) -> Vec<(usize, usize)> {
        let mut buffers = lock(&self.ivars().buffers);
        buffers.retain(|b| b.upgrade().is_some_and(|b| !b.is_gone()));
        let alive = buffers.iter().filter_map(Weak::upgrade).filter(|b| !b.is_aliasable.load(SeqCst));
        let mut held: Vec<_> = alive.map(|b| (b.base, b.base + padded(b.length))).collect();
        held.sort_unstable();
        held
    }

    fn gaps(&self) -> Vec<(usize, usize)> {
        let (mut gaps, mut at) = (Vec::new(), 0);
        for (start, end) in self.occupied() {
            if start > at {
                gaps.push((at, start));
            }
            at = at.max(end);
        }
        let end = self.ivars().storage.bytes;
        if end > at {
            gaps.push((at, end));
        }
        gaps
    }

    fn make(&self, length: usize, options: MTLResourceOptions, base: usize) -> Protocol<dyn MTLBuffer> {
        let ivars = self.ivars();
        rules::heap_options(options.0 & 0xff == ivars.options.0 & 0xff);
        let heap: Protocol<dyn MTLHeap> = ProtocolObject::from_retained(retained(self));
        // SAFETY: heaps are used by any thread.
        let heap = Some(unsafe { Sent::new(heap) });
        let region = Region { storage: ivars.storage.clone(), base, length, heap };
        let buffer = buffer_in(&ivars.machine, ivars.device.clone(), region, ivars.options);
        lock(&ivars.buffers).push(Arc::downgrade(buffer_of(&buffer).state()));
        buffer
    }

    /// Its buffers that are alive.
    pub(crate) fn buffers(&self) -> Vec<Arc<BufferState>> {
        lock(&self.ivars().buffers).iter().filter_map(Weak::upgrade).filter(|b| !b.is_gone()).collect()
    }
}

/// The object behind a heap.
pub(crate) fn heap_of(heap: &ProtocolObject<dyn MTLHeap>) -> &Heap {
    ours(heap)
}

/// A heap, None where the memory of the device does not hold it. Memory of a heap is not cleared.
pub(crate) fn new_heap(
    machine: &Arc<Machine>,
    device: Device,
    settings: &HeapSettings,
) -> Option<Protocol<dyn MTLHeap>> {
    let bytes = settings.size.get();
    rules::buffer_length(bytes, &machine.profile);
    if machine.fails_buffer() || !machine.allocate(bytes) {
        return None;
    }
    let is_visible = settings.storageMode.get() != MTLStorageMode::Private;
    let storage = Storage::own(
        machine,
        bytes,
        Kind { is_tracked: is_tracked(settings), is_visible, is_counted: true },
        0xa5,
    );
    let this: Retained<Heap> = object(HeapState {
        machine: machine.clone(),
        device,
        storage,
        options: options(settings),
        kind: settings.heapType.get(),
        buffers: Mutex::default(),
        label: Label::default(),
        purgeable: AtomicUsize::new(MTLPurgeableState::NonVolatile.0),
    });
    Some(ProtocolObject::from_retained(this))
}
