//! The part that compute and blit encoders share.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use objc2::runtime::ProtocolObject;
use objc2_foundation::NSString;
use objc2_metal::{MTLBuffer, MTLCommandBuffer, MTLFence};

use crate::buffer::buffer_of;
use crate::commands::{Commands, Op, Pass, Step, Use};
use crate::library::Device;
use crate::machine::{Entry, Label, lock};
use crate::object::{Kept, Protocol, Sent, kept};
use crate::rules;
use crate::sync::fence_state;

/// The commands that have been encoded.
struct Encoded {
    /// None after `endEncoding`.
    pass: Option<Pass>,
    groups: isize,
    /// Fences that were updated.
    updated: BTreeSet<u64>,
}

pub(crate) struct Encoding {
    pub(crate) commands: Arc<Commands>,
    pub(crate) device: Device,
    pub(crate) label: Label,
    /// The command buffer stays as long as its encoder.
    _buffer: Sent<Protocol<dyn MTLCommandBuffer>>,
    kind: &'static str,
    encoded: Mutex<Encoded>,
}

/// "MTLCommandEncoder, endEncoding()": an encoder ends before it is released.
impl Drop for Encoding {
    fn drop(&mut self) {
        let is_open = lock(&self.encoded).pass.is_some();
        if is_open && !std::thread::panicking() {
            rules::released_open(self.kind);
        }
    }
}

impl Encoding {
    pub(crate) fn new(
        commands: Arc<Commands>,
        device: Device,
        buffer: Sent<Protocol<dyn MTLCommandBuffer>>,
        pass: Pass,
    ) -> Self {
        commands.machine.count(|c| c.encoders += 1);
        let kind = pass.kind;
        let encoded = Mutex::new(Encoded { pass: Some(pass), groups: 0, updated: BTreeSet::new() });
        Self { commands, device, label: Label::default(), _buffer: buffer, kind, encoded }
    }

    fn change<T>(&self, f: impl FnOnce(&mut Encoded) -> T) -> T {
        let mut encoded = lock(&self.encoded);
        if encoded.pass.is_none() {
            drop(encoded);
            rules::ended();
        }
        f(&mut encoded)
    }

    /// Refuses what comes after `endEncoding`.
    pub(crate) fn check(&self) {
        self.change(|_| ());
    }

    /// Adds to the pass.
    pub(crate) fn add(&self, f: impl FnOnce(&mut Pass)) {
        self.change(|e| {
            if let Some(pass) = &mut e.pass {
                f(pass);
            }
        });
    }

    pub(crate) fn step(&self, step: Step) {
        self.add(|pass| pass.steps.push(step));
    }

    pub(crate) fn set_label(&self, label: Option<String>) {
        self.check();
        self.label.set(&self.commands.machine, self.kind, label.clone());
        let open = format!("{}{}", self.kind, self.label.shown());
        lock(&self.commands.state).open = Some(open);
        self.add(|pass| pass.label = label);
    }

    pub(crate) fn end(&self) {
        let groups = self.change(|e| e.groups);
        rules::debug_groups(groups, true);
        let pass = lock(&self.encoded).pass.take();
        let mut state = lock(&self.commands.state);
        state.open = None;
        state.ops.extend(pass.map(Op::Pass));
    }

    pub(crate) fn push_group(&self, name: &NSString) {
        self.change(|e| e.groups += 1);
        self.commands.machine.write(Entry::Push(name.to_string()));
    }

    pub(crate) fn pop_group(&self) {
        let open = self.change(|e| {
            e.groups -= 1;
            e.groups
        });
        rules::debug_groups(open, false);
        self.commands.machine.write(Entry::Pop);
    }

    pub(crate) fn signpost(&self, name: &NSString) {
        self.add(|pass| pass.signposts.push(name.to_string()));
        self.commands.machine.write(Entry::Signpost(name.to_string()));
    }

    pub(crate) fn update_fence(&self, fence: &ProtocolObject<dyn MTLFence>) {
        let fence = fence_state(fence);
        rules::same_device(fence.machine.id, self.commands.machine.id, "a fence");
        self.commands.machine.count(|c| c.fences += 1);
        self.change(|e| e.updated.insert(fence.id));
        self.step(Step::Update(fence.clone()));
    }

    pub(crate) fn wait_for_fence(&self, fence: &ProtocolObject<dyn MTLFence>) {
        let fence = fence_state(fence);
        rules::same_device(fence.machine.id, self.commands.machine.id, "a fence");
        self.commands.machine.count(|c| c.fences += 1);
        let is_updated = self.change(|e| e.updated.contains(&fence.id));
        rules::fence_order(is_updated);
        self.step(Step::Wait(fence.clone()));
    }

    /// The object that a command keeps, where its command buffer retains references.
    pub(crate) fn kept(&self, buffer: &ProtocolObject<dyn MTLBuffer>) -> Option<Kept> {
        self.commands.retains.then(|| kept(buffer_of(buffer)))
    }

    /// Bytes of a buffer of this device.
    pub(crate) fn used(&self, buffer: &ProtocolObject<dyn MTLBuffer>, range: Range<usize>) -> Use {
        let state = buffer_of(buffer).state();
        rules::same_device(state.machine.id, self.commands.machine.id, "a buffer");
        Use { buffer: state.clone(), _kept: self.kept(buffer), range }
    }
}

/// Defines the class of an encoder, with the methods of MTLCommandEncoder.
macro_rules! encoder_class {
    ($class:ident of $ivars:ty, $name:literal; $($more:tt)*) => {
        objc2::define_class!(
            // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
            #[unsafe(super(objc2::runtime::NSObject))]
            #[name = $name]
            #[ivars = $ivars]
            pub(crate) struct $class;

            // SAFETY: the protocol asks nothing more.
            unsafe impl NSObjectProtocol for $class {}

            // SAFETY: methods have the types of the protocol's.
            unsafe impl MTLCommandEncoder for $class {
                #[unsafe(method_id(device))]
                fn device(&self) -> $crate::library::Device {
                    self.encoding().device.clone()
                }

                #[unsafe(method_id(label))]
                fn label(&self) -> Option<objc2::rc::Retained<objc2_foundation::NSString>> {
                    self.encoding().label.get().map(|l| objc2_foundation::NSString::from_str(&l))
                }

                #[unsafe(method(setLabel:))]
                fn set_label(&self, label: Option<&objc2_foundation::NSString>) {
                    self.encoding().set_label($crate::object::text_of(label));
                }

                #[unsafe(method(endEncoding))]
                fn end(&self) {
                    self.encoding().end();
                }

                #[unsafe(method(pushDebugGroup:))]
                fn push_group(&self, name: &objc2_foundation::NSString) {
                    self.encoding().push_group(name);
                }

                #[unsafe(method(popDebugGroup))]
                fn pop_group(&self) {
                    self.encoding().pop_group();
                }

                #[unsafe(method(insertDebugSignpost:))]
                fn signpost(&self, name: &objc2_foundation::NSString) {
                    self.encoding().signpost(name);
                }
            }

            $($more)*
        );
        $crate::object::thread_safe!($class);
    };
}
pub(crate) use encoder_class;
