//! Residency sets.

use std::sync::{Arc, Mutex};

use objc2::rc::Retained;
use objc2::runtime::{AnyObject, NSObject, NSObjectProtocol, ProtocolObject};
use objc2::{ClassType, DefinedClass, define_class};
use objc2_foundation::{NSArray, NSString};
use objc2_metal::{MTLAllocation, MTLResidencySet};
use std::ptr::NonNull;

use crate::buffer::Buffer;
use crate::foundation::array;
use crate::heap::Heap;
use crate::library::Device;
use crate::machine::{Label, Machine, lock};
use crate::memory::BufferState;
use crate::object::{Kept, Protocol, kept, object, ours, settings, thread_safe};
use crate::rules;

settings! {
    /// Settings of a new residency set.
    "MTLResidencySetDescriptor" as ResidencySetDescriptor of ResidencySettings;
    values {
        initialCapacity/setInitialCapacity: usize = 0;
    }
    objects {
        label/setLabel: NSString;
    }
    also {}
}

#[derive(Default)]
struct Members {
    /// With changes that are not committed.
    pending: Vec<Kept>,
    /// The allocations that are resident.
    committed: Vec<Kept>,
}

pub(crate) struct ResidencyState {
    pub(crate) machine: Arc<Machine>,
    device: Device,
    label: Label,
    members: Mutex<Members>,
}

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
    #[unsafe(super(NSObject))]
    #[name = "StandinResidencySet"]
    #[ivars = Arc<ResidencyState>]
    pub(crate) struct ResidencySet;

    // SAFETY: the protocol asks nothing more.
    unsafe impl NSObjectProtocol for ResidencySet {}

    // SAFETY: methods have the types of the protocol's.
    unsafe impl MTLResidencySet for ResidencySet {
        #[unsafe(method_id(device))]
        fn device(&self) -> Device {
            self.ivars().device.clone()
        }

        #[unsafe(method_id(label))]
        fn label(&self) -> Option<Retained<NSString>> {
            self.ivars().label.get().map(|l| NSString::from_str(&l))
        }

        #[unsafe(method(allocatedSize))]
        fn allocated_size(&self) -> u64 {
            let members = lock(&self.ivars().members);
            let sizes = members.committed.iter().map(|m| {
                // SAFETY: every allocation answers.
                let size: usize = unsafe { objc2::msg_send![&***m, allocatedSize] };
                size as u64
            });
            sizes.sum()
        }

        #[unsafe(method(requestResidency))]
        fn request(&self) {}

        #[unsafe(method(endResidency))]
        fn end(&self) {}

        #[unsafe(method(addAllocation:))]
        fn add(&self, allocation: &ProtocolObject<dyn MTLAllocation>) {
            self.insert(allocation);
        }

        #[unsafe(method(addAllocations:count:))]
        fn add_all(&self, allocations: NonNull<NonNull<ProtocolObject<dyn MTLAllocation>>>, count: usize) {
            for i in 0..count {
                // SAFETY: the caller passes that many allocations.
                self.insert(unsafe { allocations.add(i).read().as_ref() });
            }
        }

        #[unsafe(method(removeAllocation:))]
        fn remove(&self, allocation: &ProtocolObject<dyn MTLAllocation>) {
            self.take(allocation);
        }

        #[unsafe(method(removeAllocations:count:))]
        fn remove_all_of(&self, allocations: NonNull<NonNull<ProtocolObject<dyn MTLAllocation>>>, count: usize) {
            for i in 0..count {
                // SAFETY: the caller passes that many allocations.
                self.take(unsafe { allocations.add(i).read().as_ref() });
            }
        }

        #[unsafe(method(removeAllAllocations))]
        fn remove_all(&self) {
            lock(&self.ivars().members).pending.clear();
        }

        /// "MTLResidencySet, containsAllocation(_:)": changes count before they are committed.
        #[unsafe(method(containsAllocation:))]
        fn contains(&self, allocation: &ProtocolObject<dyn MTLAllocation>) -> bool {
            let allocation = self.member(allocation);
            lock(&self.ivars().members).pending.iter().any(|m| is_same(m, &allocation))
        }

        #[unsafe(method(allocationCount))]
        fn count(&self) -> usize {
            lock(&self.ivars().members).pending.len()
        }

        #[unsafe(method_id(allAllocations))]
        fn all(&self) -> Retained<NSArray<ProtocolObject<dyn MTLAllocation>>> {
            let members = lock(&self.ivars().members);
            // SAFETY: only allocations are members.
            array(members.pending.iter().map(|m| unsafe { Retained::cast_unchecked((**m).clone()) }).collect())
        }

        /// "MTLResidencySet, commit()": changes take effect.
        #[unsafe(method(commit))]
        fn commit(&self) {
            let mut members = lock(&self.ivars().members);
            members.committed = members.pending.clone();
        }
    }
);

thread_safe!(ResidencySet);

fn is_same(a: &Kept, b: &Kept) -> bool {
    Retained::as_ptr(a) == Retained::as_ptr(b)
}

impl ResidencySet {
    fn insert(&self, allocation: &ProtocolObject<dyn MTLAllocation>) {
        let allocation = self.member(allocation);
        let mut members = lock(&self.ivars().members);
        if !members.pending.iter().any(|m| is_same(m, &allocation)) {
            members.pending.push(allocation);
        }
    }

    fn take(&self, allocation: &ProtocolObject<dyn MTLAllocation>) {
        let allocation = self.member(allocation);
        lock(&self.ivars().members).pending.retain(|m| !is_same(m, &allocation));
    }

    /// A buffer or a heap of this device.
    fn member(&self, allocation: &ProtocolObject<dyn MTLAllocation>) -> Kept {
        // SAFETY: every object of a protocol is an object.
        let any: &AnyObject = unsafe { &*std::ptr::from_ref(allocation).cast::<AnyObject>() };
        if any.class() == Heap::class() {
            let heap: &Heap = ours(allocation);
            rules::same_device(heap.ivars().machine.id, self.ivars().machine.id, "a heap");
            return kept(heap);
        }
        let buffer: &Buffer = ours(allocation);
        rules::same_device(buffer.state().machine.id, self.ivars().machine.id, "a buffer");
        kept(buffer)
    }
}

impl ResidencyState {
    /// The buffers that are resident, heaps' with them.
    pub(crate) fn buffers(&self) -> Vec<Arc<BufferState>> {
        let members = lock(&self.members).committed.clone();
        members
            .iter()
            .flat_map(|m| {
                if m.class() == Heap::class() {
                    ours::<Heap, _>(&***m).buffers()
                } else {
                    vec![ours::<Buffer, _>(&***m).state().clone()]
                }
            })
            .collect()
    }
}

/// The state behind a residency set.
pub(crate) fn residency_state(set: &ProtocolObject<dyn MTLResidencySet>) -> &Arc<ResidencyState> {
    ours::<ResidencySet, _>(set).ivars()
}

/// A residency set.
pub(crate) fn new_set(
    machine: &Arc<Machine>,
    device: Device,
    settings: &ResidencySettings,
) -> Protocol<dyn MTLResidencySet> {
    let label = Label::default();
    label.set(machine, "residency set", settings.label.borrow().as_ref().map(ToString::to_string));
    let state = ResidencyState { machine: machine.clone(), device, label, members: Mutex::default() };
    let this: Retained<ResidencySet> = object(Arc::new(state));
    ProtocolObject::from_retained(this)
}
