//! Command queues.

use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use objc2::rc::Retained;
use objc2::runtime::{NSObject, NSObjectProtocol, ProtocolObject};
use objc2::{DefinedClass, define_class};
use objc2_foundation::NSString;
use objc2_metal::{
    MTLCommandBuffer, MTLCommandBufferDescriptor, MTLCommandBufferErrorOption, MTLCommandQueue,
    MTLResidencySet,
};

use crate::command_buffer::{
    CommandBufferDescriptor, CommandBufferIvars, QueueResidency, new_command_buffer,
};
use crate::commands::{Commands, Place, Room};
use crate::completion;
use crate::library::Device;
use crate::machine::{Demand, Label, Machine, lock, unique};
use crate::object::{Protocol, object, ours, retained, settings, text_of, thread_safe};
use crate::residency::residency_state;
use crate::rules;
use crate::scheduler::{Scheduler, TICK};

/// Command buffers that a queue may have which are not complete. "MTLDevice, makeCommandQueue()": 64.
const MAX_OPEN: usize = 64;

settings! {
    /// Settings of a new queue.
    "MTLCommandQueueDescriptor" as QueueDescriptor of QueueSettings;
    values {
        maxCommandBufferCount/setMaxCommandBufferCount: usize = MAX_OPEN;
    }
    objects {}
    also {}
}

pub(crate) struct QueueIvars {
    id: u64,
    machine: Arc<Machine>,
    scheduler: Arc<Scheduler>,
    device: Device,
    label: Label,
    residency: QueueResidency,
    most: usize,
    room: Arc<Mutex<Room>>,
}

impl Drop for QueueIvars {
    fn drop(&mut self) {
        self.scheduler.remove_queue(self.id);
    }
}

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
    #[unsafe(super(NSObject))]
    #[name = "StandinCommandQueue"]
    #[ivars = QueueIvars]
    pub(crate) struct Queue;

    // SAFETY: the protocol asks nothing more.
    unsafe impl NSObjectProtocol for Queue {}

    // SAFETY: methods have the types of the protocol's.
    unsafe impl MTLCommandQueue for Queue {
        #[unsafe(method_id(label))]
        fn label(&self) -> Option<Retained<NSString>> {
            self.ivars().label.get().map(|l| NSString::from_str(&l))
        }

        #[unsafe(method(setLabel:))]
        fn set_label(&self, label: Option<&NSString>) {
            self.ivars().label.set(&self.ivars().machine, "queue", text_of(label));
        }

        #[unsafe(method_id(device))]
        fn device(&self) -> Device {
            self.ivars().device.clone()
        }

        #[unsafe(method_id(commandBuffer))]
        fn command_buffer(&self) -> Option<Protocol<dyn MTLCommandBuffer>> {
            Some(self.make(true, MTLCommandBufferErrorOption::None))
        }

        #[unsafe(method_id(commandBufferWithUnretainedReferences))]
        fn unretained(&self) -> Option<Protocol<dyn MTLCommandBuffer>> {
            Some(self.make(false, MTLCommandBufferErrorOption::None))
        }

        #[unsafe(method_id(commandBufferWithDescriptor:))]
        fn described(
            &self,
            descriptor: &MTLCommandBufferDescriptor,
        ) -> Option<Protocol<dyn MTLCommandBuffer>> {
            let settings = ours::<CommandBufferDescriptor, _>(descriptor).ivars();
            Some(self.make(settings.retainedReferences.get(), settings.errorOptions.get()))
        }

        #[unsafe(method(insertDebugCaptureBoundary))]
        fn boundary(&self) {}

        #[unsafe(method(addResidencySet:))]
        fn add_set(&self, set: &ProtocolObject<dyn MTLResidencySet>) {
            self.add_residency(set);
        }

        #[unsafe(method(addResidencySets:count:))]
        fn add_sets(&self, sets: NonNull<NonNull<ProtocolObject<dyn MTLResidencySet>>>, count: usize) {
            for i in 0..count {
                // SAFETY: the caller passes that many sets.
                self.add_residency(unsafe { sets.add(i).read().as_ref() });
            }
        }

        #[unsafe(method(removeResidencySet:))]
        fn remove_set(&self, set: &ProtocolObject<dyn MTLResidencySet>) {
            self.remove_residency(set);
        }

        #[unsafe(method(removeResidencySets:count:))]
        fn remove_sets(&self, sets: NonNull<NonNull<ProtocolObject<dyn MTLResidencySet>>>, count: usize) {
            for i in 0..count {
                // SAFETY: the caller passes that many sets.
                self.remove_residency(unsafe { sets.add(i).read().as_ref() });
            }
        }
    }
);

thread_safe!(Queue);

impl Queue {
    fn add_residency(&self, set: &ProtocolObject<dyn MTLResidencySet>) {
        let set = residency_state(set);
        rules::same_device(set.machine.id, self.ivars().machine.id, "a residency set");
        lock(&self.ivars().residency).push(set.clone());
    }

    fn remove_residency(&self, set: &ProtocolObject<dyn MTLResidencySet>) {
        let set = residency_state(set);
        lock(&self.ivars().residency).retain(|s| !Arc::ptr_eq(s, set));
    }

    fn make(
        &self,
        retains: bool,
        error_options: MTLCommandBufferErrorOption,
    ) -> Protocol<dyn MTLCommandBuffer> {
        let ivars = self.ivars();
        self.wait_for_room();
        let place = Place::take(&ivars.room);
        new_command_buffer(CommandBufferIvars {
            commands: Arc::new(Commands::new(ivars.id, ivars.machine.clone(), retains, place)),
            scheduler: ivars.scheduler.clone(),
            device: ivars.device.clone(),
            queue: ProtocolObject::from_retained(retained(self)),
            residency: ivars.residency.clone(),
            error_options,
            label: Label::default(),
        })
    }

    /// Waits until a command buffer completes, where the queue has as many as it may.
    fn wait_for_room(&self) {
        let ivars = self.ivars();
        let (room, most) = (ivars.room.clone(), ivars.most);
        let has_room = move || lock(&room).open < most;
        if has_room() {
            return;
        }
        let demand = Demand { queue: Some(ivars.id), is_met: Arc::new(has_room.clone()) };
        ivars.machine.demanded(demand, || {
            loop {
                let seen = ivars.machine.changes();
                if has_room() {
                    return;
                }
                let (open, committed) = {
                    let room = lock(&ivars.room);
                    (room.open, room.committed)
                };
                rules::queue_is_full(open, committed, most);
                ivars.machine.wait_for_change(seen, Some(TICK));
            }
        });
    }
}

/// A queue of a device that may have this many command buffers at once.
pub(crate) fn new_queue(
    machine: &Arc<Machine>,
    scheduler: &Arc<Scheduler>,
    device: Device,
    most: usize,
) -> Protocol<dyn MTLCommandQueue> {
    let id = unique();
    scheduler.add_queue(id, completion::thread(id));
    let this: Retained<Queue> = object(QueueIvars {
        id,
        machine: machine.clone(),
        scheduler: scheduler.clone(),
        device,
        label: Label::default(),
        residency: Arc::default(),
        most,
        room: Arc::default(),
    });
    ProtocolObject::from_retained(this)
}

/// The number of command buffers that a queue has without another number.
pub(crate) fn default_count() -> usize {
    MAX_OPEN
}
