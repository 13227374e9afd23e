//! Fences and events.

use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use block2::{DynBlock, RcBlock};
use objc2::rc::{Allocated, Retained, autoreleasepool};
use objc2::runtime::{NSObject, NSObjectProtocol, ProtocolObject};
use objc2::{DefinedClass, define_class};
use objc2_foundation::NSString;
use objc2_metal::{MTLEvent, MTLFence, MTLSharedEvent, MTLSharedEventHandle, MTLSharedEventListener};
use std::ptr::NonNull;

use crate::hazards::Before;
use crate::library::Device;
use crate::machine::{Demand, Label, Machine, lock, unique};
use crate::object::{Protocol, Sent, initialized, object, ours, retained, text_of, thread_safe};
use crate::rules;

pub(crate) struct FenceState {
    pub(crate) id: u64,
    pub(crate) machine: Arc<Machine>,
    device: Device,
    label: Label,
    /// The queue that uses it, and what its last update orders.
    pub(crate) update: Mutex<(Option<u64>, Before)>,
}

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
    #[unsafe(super(NSObject))]
    #[name = "StandinFence"]
    #[ivars = Arc<FenceState>]
    pub(crate) struct Fence;

    // SAFETY: the protocol asks nothing more.
    unsafe impl NSObjectProtocol for Fence {}

    // SAFETY: methods have the types of the protocol's.
    unsafe impl MTLFence for Fence {
        #[unsafe(method_id(device))]
        fn device(&self) -> Device {
            self.ivars().device.clone()
        }

        #[unsafe(method_id(label))]
        fn label(&self) -> Option<Retained<NSString>> {
            self.ivars().label.get().map(|l| NSString::from_str(&l))
        }

        #[unsafe(method(setLabel:))]
        fn set_label(&self, label: Option<&NSString>) {
            self.ivars().label.set(&self.ivars().machine, "fence", text_of(label));
        }
    }
);

/// A fence.
pub(crate) fn new_fence(machine: &Arc<Machine>, device: Device) -> Protocol<dyn MTLFence> {
    let this: Retained<Fence> = object(Arc::new(FenceState {
        id: unique(),
        machine: machine.clone(),
        device,
        label: Label::default(),
        update: Mutex::default(),
    }));
    ProtocolObject::from_retained(this)
}

/// The state behind a fence.
pub(crate) fn fence_state(fence: &ProtocolObject<dyn MTLFence>) -> &Arc<FenceState> {
    ours::<Fence, _>(fence).ivars()
}

/// A block that waits for a value of an event.
type Notification = Sent<RcBlock<dyn Fn(NonNull<ProtocolObject<dyn MTLSharedEvent>>, u64)>>;

#[derive(Default)]
struct Value {
    value: u64,
    /// Each value that was signaled, and what its signal orders.
    signals: Vec<(u64, Before)>,
    notifications: Vec<(u64, Notification, Sent<Retained<SharedEvent>>)>,
}

pub(crate) struct EventState {
    pub(crate) machine: Arc<Machine>,
    device: Device,
    label: Label,
    /// True if other devices may use it.
    pub(crate) is_shared: bool,
    value: Mutex<Value>,
    changed: Condvar,
}

impl EventState {
    pub(crate) fn value(&self) -> u64 {
        lock(&self.value).value
    }

    /// Signals a value that orders work; false where the value does not grow.
    pub(crate) fn signal(&self, value: u64, before: Before) -> bool {
        let due = {
            let mut now = lock(&self.value);
            if value <= now.value {
                return false;
            }
            now.value = value;
            now.signals.push((value, before));
            let (due, later) = std::mem::take(&mut now.notifications).into_iter().partition(|n| n.0 <= value);
            now.notifications = later;
            due
        };
        self.changed.notify_all();
        self.machine.ring();
        notify(due, value);
        true
    }

    /// The work that is ordered before a wait for a value.
    pub(crate) fn before(&self, value: u64) -> Before {
        let now = lock(&self.value);
        let mut before = Before::default();
        for (signaled, what) in &now.signals {
            before.add(what);
            if *signaled >= value {
                break;
            }
        }
        before
    }

    fn wait(&self, value: u64, most: Duration) -> bool {
        let now = lock(&self.value);
        let (now, _) = self
            .changed
            .wait_timeout_while(now, most, |n| n.value < value)
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        now.value >= value
    }
}

/// Calls blocks on a thread that is not the host's, as a dispatch queue does.
fn notify(due: Vec<(u64, Notification, Sent<Retained<SharedEvent>>)>, value: u64) {
    if due.is_empty() {
        return;
    }
    std::thread::spawn(move || {
        autoreleasepool(|_| {
            for (_, block, event) in due {
                let event: &ProtocolObject<dyn MTLSharedEvent> = ProtocolObject::from_ref(&**event);
                block.call((NonNull::from(event), value));
            }
        });
    });
}

macro_rules! event_class {
    ($class:ident, $name:literal, $($more:tt)*) => {
        define_class!(
            // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
            #[unsafe(super(NSObject))]
            #[name = $name]
            #[ivars = Arc<EventState>]
            pub(crate) struct $class;

            // SAFETY: the protocol asks nothing more.
            unsafe impl NSObjectProtocol for $class {}

            // SAFETY: methods have the types of the protocol's.
            unsafe impl MTLEvent for $class {
                #[unsafe(method_id(device))]
                fn device(&self) -> Option<Device> {
                    Some(self.ivars().device.clone())
                }

                #[unsafe(method_id(label))]
                fn label(&self) -> Option<Retained<NSString>> {
                    self.ivars().label.get().map(|l| NSString::from_str(&l))
                }

                #[unsafe(method(setLabel:))]
                fn set_label(&self, label: Option<&NSString>) {
                    self.ivars().label.set(&self.ivars().machine, "event", text_of(label));
                }
            }

            $($more)*
        );
    };
}

event_class!(Event, "StandinEvent",);

event_class!(
    SharedEvent,
    "StandinSharedEvent",
    // SAFETY: methods have the types of the protocol's.
    unsafe impl MTLSharedEvent for SharedEvent {
        #[unsafe(method(signaledValue))]
        fn signaled_value(&self) -> u64 {
            self.ivars().value()
        }

        #[unsafe(method(setSignaledValue:))]
        fn set_signaled_value(&self, value: u64) {
            let before = self.ivars().value();
            rules::signaled_value(before, value);
            if value != before {
                // Work that the CPU has seen complete is ordered before.
                let completed = self.ivars().machine.completed();
                self.ivars().signal(value, Before::completed(completed));
            }
        }

        #[unsafe(method(waitUntilSignaledValue:timeoutMS:))]
        fn wait(&self, value: u64, milliseconds: u64) -> bool {
            let state = self.ivars().clone();
            let most = Duration::from_millis(milliseconds.min(1 << 40));
            let demand = Demand {
                queue: None,
                is_met: {
                    let s = state.clone();
                    Arc::new(move || s.value() >= value)
                },
            };
            let started = Instant::now();
            state.machine.demanded(demand, || state.wait(value, most.saturating_sub(started.elapsed())))
        }

        #[unsafe(method(notifyListener:atValue:block:))]
        fn notify(
            &self,
            _listener: &MTLSharedEventListener,
            value: u64,
            block: *mut DynBlock<dyn Fn(NonNull<ProtocolObject<dyn MTLSharedEvent>>, u64)>,
        ) {
            // SAFETY: the caller passes a block, which may be called by any thread.
            let block = unsafe { Sent::new((*block).copy()) };
            // SAFETY: events are used by any thread.
            let this = unsafe { Sent::new(retained(self)) };
            let mut now = lock(&self.ivars().value);
            now.notifications.push((value, block, this));
            if now.value >= value {
                let due = now.notifications.pop().into_iter().collect();
                let value = now.value;
                drop(now);
                notify(due, value);
            }
        }

        #[unsafe(method_id(newSharedEventHandle))]
        fn handle(&self) -> Retained<MTLSharedEventHandle> {
            let this: Retained<Handle> = object(self.ivars().clone());
            // SAFETY: the class is MTLSharedEventHandle.
            unsafe { Retained::cast_unchecked(this) }
        }
    }
);

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
    #[unsafe(super(NSObject))]
    #[name = "MTLSharedEventHandle"]
    #[ivars = Arc<EventState>]
    pub(crate) struct Handle;

    impl Handle {
        #[unsafe(method_id(label))]
        fn label(&self) -> Option<Retained<NSString>> {
            self.ivars().label.get().map(|l| NSString::from_str(&l))
        }
    }
);

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
    #[unsafe(super(NSObject))]
    #[name = "MTLSharedEventListener"]
    #[ivars = ()]
    pub(crate) struct Listener;

    impl Listener {
        #[unsafe(method_id(init))]
        fn init(this: Allocated<Self>) -> Retained<Self> {
            initialized(this, ())
        }

        #[unsafe(method_id(sharedListener))]
        fn shared() -> Retained<Self> {
            object(())
        }
    }
);

thread_safe!(Fence, Event, SharedEvent, Handle);

fn state(machine: &Arc<Machine>, device: Device, is_shared: bool) -> Arc<EventState> {
    Arc::new(EventState {
        machine: machine.clone(),
        device,
        label: Label::default(),
        is_shared,
        value: Mutex::default(),
        changed: Condvar::new(),
    })
}

/// An event of one device.
pub(crate) fn new_event(machine: &Arc<Machine>, device: Device) -> Protocol<dyn MTLEvent> {
    let this: Retained<Event> = object(state(machine, device, false));
    ProtocolObject::from_retained(this)
}

/// An event that the CPU uses too.
pub(crate) fn new_shared_event(machine: &Arc<Machine>, device: Device) -> Protocol<dyn MTLSharedEvent> {
    let this: Retained<SharedEvent> = object(state(machine, device, true));
    ProtocolObject::from_retained(this)
}

/// The event that a handle stands for.
pub(crate) fn event_of_handle(handle: &MTLSharedEventHandle) -> Protocol<dyn MTLSharedEvent> {
    let this: Retained<SharedEvent> = object(ours::<Handle, _>(handle).ivars().clone());
    ProtocolObject::from_retained(this)
}

/// The state behind an event.
pub(crate) fn event_state(event: &ProtocolObject<dyn MTLEvent>) -> Arc<EventState> {
    use objc2::ClassType;
    use objc2::runtime::AnyObject;
    // SAFETY: every object of a protocol is an object.
    let any: &AnyObject = unsafe { &*std::ptr::from_ref(event).cast::<AnyObject>() };
    if any.class() == Event::class() {
        ours::<Event, _>(event).ivars().clone()
    } else {
        ours::<SharedEvent, _>(event).ivars().clone()
    }
}
