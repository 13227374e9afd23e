//! Command buffers.

use std::ptr::NonNull;
use std::sync::atomic::AtomicPtr;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use block2::DynBlock;
use objc2::rc::Retained;
use objc2::runtime::{NSObject, NSObjectProtocol, ProtocolObject};
use objc2::{ClassType, DefinedClass, define_class};
use objc2_foundation::{NSArray, NSError, NSString};
use objc2_metal::{
    MTLBlitCommandEncoder, MTLBlitPassDescriptor, MTLCommandBuffer, MTLCommandBufferEncoderInfo,
    MTLCommandBufferErrorOption, MTLCommandBufferStatus, MTLCommandEncoderErrorState, MTLCommandQueue,
    MTLComputeCommandEncoder, MTLComputePassDescriptor, MTLDispatchType, MTLEvent, MTLResidencySet,
};

use crate::blit_encoder;
use crate::commands::{CommandState, Commands, Handler, Info, Op, Pass, Place};
use crate::completion::is_thread_of;
use crate::compute_encoder;
use crate::encoder::Encoding;
use crate::foundation::{array, constant, error};
use crate::library::Device;
use crate::machine::{Demand, Entry, Label, invalid, lock};
use crate::memory::BufferState;
use crate::object::{Protocol, Sent, any, object, retained, settings, text_of, thread_safe};
use crate::passes::{Samples, blit_pass, compute_pass};
use crate::residency::{ResidencyState, residency_state};
use crate::rules;
use crate::scheduler::Scheduler;
use crate::sync::event_state;

/// Symbols that the bindings link to.
#[unsafe(no_mangle)]
static MTLCommandBufferErrorDomain: AtomicPtr<NSString> = AtomicPtr::new(std::ptr::null_mut());
#[unsafe(no_mangle)]
static MTLCommandBufferEncoderInfoErrorKey: AtomicPtr<NSString> = AtomicPtr::new(std::ptr::null_mut());

const DOMAIN: &str = "MTLCommandBufferErrorDomain";
const INFO_KEY: &str = "MTLCommandBufferEncoderInfoErrorKey";

type HandlerBlock = *mut DynBlock<dyn Fn(NonNull<ProtocolObject<dyn MTLCommandBuffer>>)>;

settings! {
    /// Settings of a new command buffer.
    "MTLCommandBufferDescriptor" as CommandBufferDescriptor of CommandBufferSettings;
    values {
        retainedReferences/setRetainedReferences: bool = true;
        errorOptions/setErrorOptions: MTLCommandBufferErrorOption = MTLCommandBufferErrorOption::None;
    }
    objects {}
    also {}
}

/// Buffers that are resident for all command buffers of a queue.
pub(crate) type QueueResidency = Arc<std::sync::Mutex<Vec<Arc<ResidencyState>>>>;

pub(crate) struct CommandBufferIvars {
    pub(crate) commands: Arc<Commands>,
    pub(crate) scheduler: Arc<Scheduler>,
    pub(crate) device: Device,
    pub(crate) queue: Protocol<dyn MTLCommandQueue>,
    pub(crate) residency: QueueResidency,
    pub(crate) error_options: MTLCommandBufferErrorOption,
    pub(crate) label: Label,
}

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
    #[unsafe(super(NSObject))]
    #[name = "StandinCommandBuffer"]
    #[ivars = CommandBufferIvars]
    pub(crate) struct CommandBuffer;

    // SAFETY: the protocol asks nothing more.
    unsafe impl NSObjectProtocol for CommandBuffer {}

    // SAFETY: methods have the types of the protocol's.
    unsafe impl MTLCommandBuffer for CommandBuffer {
        #[unsafe(method_id(device))]
        fn device(&self) -> Device {
            self.ivars().device.clone()
        }

        #[unsafe(method_id(commandQueue))]
        fn queue(&self) -> Protocol<dyn MTLCommandQueue> {
            self.ivars().queue.clone()
        }

        #[unsafe(method(retainedReferences))]
        fn retains(&self) -> bool {
            self.commands().retains
        }

        #[unsafe(method(errorOptions))]
        fn error_options(&self) -> MTLCommandBufferErrorOption {
            self.ivars().error_options
        }

        #[unsafe(method_id(label))]
        fn label(&self) -> Option<Retained<NSString>> {
            self.ivars().label.get().map(|l| NSString::from_str(&l))
        }

        #[unsafe(method(setLabel:))]
        fn set_label(&self, label: Option<&NSString>) {
            self.ivars().label.set(&self.commands().machine, "command buffer", text_of(label));
        }

        #[unsafe(method(kernelStartTime))]
        fn kernel_start(&self) -> f64 {
            self.time(0)
        }

        #[unsafe(method(kernelEndTime))]
        fn kernel_end(&self) -> f64 {
            self.time(1)
        }

        #[unsafe(method(GPUStartTime))]
        fn gpu_start(&self) -> f64 {
            self.time(2)
        }

        #[unsafe(method(GPUEndTime))]
        fn gpu_end(&self) -> f64 {
            self.time(3)
        }

        #[unsafe(method(enqueue))]
        fn enqueue(&self) {
            let status = self.commands().status();
            rules::enqueue(self.commands().is_committed(), status == MTLCommandBufferStatus::Enqueued);
            self.commands().change(|s| s.status = MTLCommandBufferStatus::Enqueued);
            self.ivars().scheduler.enqueue(self.commands());
        }

        #[unsafe(method(commit))]
        fn commit(&self) {
            self.committed();
        }

        #[unsafe(method(addScheduledHandler:))]
        fn on_scheduled(&self, block: HandlerBlock) {
            self.add(block, |s, h| s.on_scheduled.push(h));
        }

        #[unsafe(method(addCompletedHandler:))]
        fn on_completed(&self, block: HandlerBlock) {
            self.add(block, |s, h| s.on_completed.push(h));
        }

        #[unsafe(method(waitUntilScheduled))]
        fn wait_scheduled(&self) {
            rules::wait(self.commands().is_committed(), "waitUntilScheduled");
            self.ivars().scheduler.schedule(self.commands());
            self.wait("waitUntilScheduled", |s| s.is_scheduled);
        }

        #[unsafe(method(waitUntilCompleted))]
        fn wait_completed(&self) {
            rules::wait(self.commands().is_committed(), "waitUntilCompleted");
            let commands = self.commands().clone();
            let demand = Demand {
                queue: Some(commands.queue),
                is_met: Arc::new(move || commands.status() >= MTLCommandBufferStatus::Completed),
            };
            self.commands().machine.demanded(demand, || self.wait("waitUntilCompleted", |s| s.is_completed));
        }

        #[unsafe(method(status))]
        fn status(&self) -> MTLCommandBufferStatus {
            self.commands().status()
        }

        #[unsafe(method_id(error))]
        fn error(&self) -> Option<Retained<NSError>> {
            self.failure()
        }

        #[unsafe(method_id(computeCommandEncoder))]
        fn compute(&self) -> Option<Protocol<dyn MTLComputeCommandEncoder>> {
            Some(self.compute_encoder(false, Vec::new()))
        }

        #[unsafe(method_id(computeCommandEncoderWithDispatchType:))]
        fn compute_of(&self, kind: MTLDispatchType) -> Option<Protocol<dyn MTLComputeCommandEncoder>> {
            Some(self.compute_encoder(kind == MTLDispatchType::Concurrent, Vec::new()))
        }

        #[unsafe(method_id(computeCommandEncoderWithDescriptor:))]
        fn compute_with(
            &self,
            descriptor: &MTLComputePassDescriptor,
        ) -> Option<Protocol<dyn MTLComputeCommandEncoder>> {
            let (is_concurrent, samples) = compute_pass(descriptor);
            Some(self.compute_encoder(is_concurrent, samples))
        }

        #[unsafe(method_id(blitCommandEncoder))]
        fn blit(&self) -> Option<Protocol<dyn MTLBlitCommandEncoder>> {
            Some(blit_encoder::new_encoder(self.encoding(Pass::new("blit encoder", false), Vec::new())))
        }

        #[unsafe(method_id(blitCommandEncoderWithDescriptor:))]
        fn blit_with(
            &self,
            descriptor: &MTLBlitPassDescriptor,
        ) -> Option<Protocol<dyn MTLBlitCommandEncoder>> {
            let samples = blit_pass(descriptor);
            Some(blit_encoder::new_encoder(self.encoding(Pass::new("blit encoder", false), samples)))
        }

        #[unsafe(method(encodeWaitForEvent:value:))]
        fn wait_event(&self, event: &ProtocolObject<dyn MTLEvent>, value: u64) {
            self.event(event, |event| Op::Wait(event, value));
        }

        #[unsafe(method(encodeSignalEvent:value:))]
        fn signal_event(&self, event: &ProtocolObject<dyn MTLEvent>, value: u64) {
            self.event(event, |event| Op::Signal(event, value));
        }

        #[unsafe(method(pushDebugGroup:))]
        fn push_group(&self, name: &NSString) {
            self.commands().change(|s| s.groups += 1);
            self.commands().machine.write(Entry::Push(name.to_string()));
        }

        #[unsafe(method(popDebugGroup))]
        fn pop_group(&self) {
            let open = self.commands().change(|s| {
                s.groups -= 1;
                s.groups
            });
            rules::debug_groups(open, false);
            self.commands().machine.write(Entry::Pop);
        }

        #[unsafe(method(useResidencySet:))]
        fn use_set(&self, set: &ProtocolObject<dyn MTLResidencySet>) {
            self.resident(set);
        }

        #[unsafe(method(useResidencySets:count:))]
        fn use_sets(&self, sets: NonNull<NonNull<ProtocolObject<dyn MTLResidencySet>>>, count: usize) {
            for i in 0..count {
                // SAFETY: the caller passes that many sets.
                self.resident(unsafe { sets.add(i).read().as_ref() });
            }
        }
    }
);

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
    #[unsafe(super(NSObject))]
    #[name = "StandinCommandBufferEncoderInfo"]
    #[ivars = Info]
    pub(crate) struct EncoderInfo;

    // SAFETY: the protocol asks nothing more.
    unsafe impl NSObjectProtocol for EncoderInfo {}

    // SAFETY: methods have the types of the protocol's.
    unsafe impl MTLCommandBufferEncoderInfo for EncoderInfo {
        #[unsafe(method_id(label))]
        fn label(&self) -> Retained<NSString> {
            NSString::from_str(&self.ivars().label)
        }

        #[unsafe(method_id(debugSignposts))]
        fn signposts(&self) -> Retained<NSArray<NSString>> {
            array(self.ivars().signposts.iter().map(|s| NSString::from_str(s)).collect())
        }

        #[unsafe(method(errorState))]
        fn state(&self) -> MTLCommandEncoderErrorState {
            self.ivars().state
        }
    }
);

thread_safe!(CommandBuffer, EncoderInfo);

impl CommandBuffer {
    fn commands(&self) -> &Arc<Commands> {
        &self.ivars().commands
    }

    fn time(&self, which: usize) -> f64 {
        lock(&self.commands().state).times[which]
    }

    /// This object, for the device's thread.
    fn sent(&self) -> Sent<Protocol<dyn MTLCommandBuffer>> {
        // SAFETY: command buffers are used by any thread.
        unsafe { Sent::new(ProtocolObject::from_retained(retained(self))) }
    }

    fn committed(&self) {
        let commands = self.commands();
        let (groups, open) = {
            let state = lock(&commands.state);
            (state.groups, state.open.clone())
        };
        rules::commit(commands.is_committed(), open.as_deref());
        rules::debug_groups(groups, true);
        let (ops, mut sets) = commands.change(|s| {
            s.status = MTLCommandBufferStatus::Committed;
            s.times[0] = crate::commands::seconds();
            s.times[1] = s.times[0];
            s.place.iter_mut().for_each(Place::commit);
            (std::mem::take(&mut s.ops), std::mem::take(&mut s.residency))
        });
        sets.extend(lock(&self.ivars().residency).iter().cloned());
        let resident: Vec<Arc<BufferState>> = sets.iter().flat_map(|s| s.buffers()).collect();
        commands.machine.count(|c| c.command_buffers += 1);
        commands.machine.write(Entry::Commit(self.ivars().label.get()));
        self.ivars().scheduler.commit(commands, self.sent(), (ops, resident));
    }

    fn failure(&self) -> Option<Retained<NSError>> {
        let state = lock(&self.commands().state);
        let fault = state.fault.as_ref()?;
        let wants = self.ivars().error_options.contains(MTLCommandBufferErrorOption::EncoderExecutionStatus);
        let infos = state.infos.iter().map(|i| {
            let info: Retained<EncoderInfo> = object(i.clone());
            any(info)
        });
        let more = if wants { vec![(INFO_KEY, any(array(infos.collect())))] } else { Vec::new() };
        Some(error(DOMAIN, fault.code.0.cast_signed(), &fault.text, more))
    }

    fn resident(&self, set: &ProtocolObject<dyn MTLResidencySet>) {
        let set = residency_state(set);
        rules::same_device(set.machine.id, self.commands().machine.id, "a residency set");
        self.commands().change(|s| s.residency.push(set.clone()));
    }

    fn add(&self, block: HandlerBlock, to: impl FnOnce(&mut CommandState, Handler)) {
        rules::handler(self.commands().is_committed());
        // SAFETY: the caller passes a block that may be called on another thread, as handlers of Metal are.
        let handler = unsafe { Sent::new((*block).copy()) };
        self.commands().change(|s| to(s, handler));
    }

    fn wait(&self, what: &str, is_done: impl Fn(&CommandState) -> bool) {
        let commands = self.commands();
        let mut state = lock(&commands.state);
        if !is_done(&state) && is_thread_of(commands.queue) {
            drop(state);
            invalid!(
                "{what} in a handler of the same queue: handlers are called one after the other, so it never returns"
            );
        }
        let most = commands.machine.profile.event_timeout;
        let mut since = Instant::now();
        while !is_done(&state) {
            state = commands.changed.wait_timeout(state, most).unwrap_or_else(PoisonError::into_inner).0;
            if is_done(&state) {
                break;
            }
            drop(state);
            if !self.ivars().scheduler.is_held(commands.queue) {
                since = Instant::now();
            }
            rules::wait_behind(since.elapsed() >= most, what);
            state = lock(&commands.state);
        }
        if let Some(panic) = state.panic.take() {
            drop(state);
            panic!("{panic}");
        }
    }

    fn encoding(&self, mut pass: Pass, samples: Samples) -> Encoding {
        let commands = self.commands();
        let open = lock(&commands.state).open.clone();
        rules::new_encoder(commands.is_committed(), open.as_deref());
        for (state, _) in &samples {
            rules::same_device(state.machine.id, commands.machine.id, "a counter sample buffer");
        }
        pass.samples = samples;
        commands.change(|s| s.open = Some(pass.kind.to_owned()));
        Encoding::new(commands.clone(), self.ivars().device.clone(), self.sent(), pass)
    }

    fn compute_encoder(
        &self,
        is_concurrent: bool,
        samples: Samples,
    ) -> Protocol<dyn MTLComputeCommandEncoder> {
        let encoding = self.encoding(Pass::new("compute encoder", is_concurrent), samples);
        compute_encoder::new_encoder(encoding, is_concurrent)
    }

    fn event(
        &self,
        event: &ProtocolObject<dyn MTLEvent>,
        op: impl FnOnce(Arc<crate::sync::EventState>) -> Op,
    ) {
        let open = lock(&self.commands().state).open.clone();
        rules::event(self.commands().is_committed(), open.as_deref());
        let event = event_state(event);
        // An event that is shared may be of another device.
        if !event.is_shared {
            rules::same_device(event.machine.id, self.commands().machine.id, "an event");
        }
        self.commands().change(|s| s.ops.push(op(event)));
    }
}

/// A command buffer.
pub(crate) fn new_command_buffer(ivars: CommandBufferIvars) -> Protocol<dyn MTLCommandBuffer> {
    let this: Retained<CommandBuffer> = object(ivars);
    ProtocolObject::from_retained(this)
}

pub(crate) fn register() {
    constant(&MTLCommandBufferErrorDomain, DOMAIN);
    constant(&MTLCommandBufferEncoderInfoErrorKey, INFO_KEY);
    let _ = CommandBufferDescriptor::class();
}
