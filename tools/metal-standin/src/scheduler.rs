//! The thread of a device: which command buffer runs next, and what its work may not do.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, Once};
use std::time::{Duration, Instant};

use objc2::rc::autoreleasepool;
use objc2_metal::{
    MTLCommandBuffer, MTLCommandBufferError, MTLCommandBufferStatus, MTLCommandEncoderErrorState,
};

use crate::commands::{Commands, Fault, Info, Op, Pass, Step, seconds};
use crate::completion::{Call, panic_text};
use crate::cpu_writes::Watch;
use crate::execute::{broken, run};
use crate::hazards::{Before, History, Node, Touched};
use crate::machine::{Machine, lock, unique};
use crate::memory::{BufferState, Storage};
use crate::object::{Protocol, Sent};
use crate::profile::{Order, Timing};

/// A command buffer's object, which lives until its handlers have been called.
pub(crate) type Object = Sent<Protocol<dyn MTLCommandBuffer>>;

/// A command buffer in its queue.
struct Job {
    commands: Arc<Commands>,
    /// None until it is committed.
    object: Option<Object>,
    ops: VecDeque<Op>,
    /// The order in which command buffers were committed.
    number: u64,
    committed: Instant,
    /// How many command buffers were complete when it was committed.
    seen: u64,
    is_started: bool,
    blocked: Option<Instant>,
    before: Before,
    nodes: BTreeSet<u64>,
    touched: Touched,
    storages: Vec<Arc<Storage>>,
    resident: Vec<Arc<BufferState>>,
    infos: Vec<Info>,
    fault: Option<Fault>,
}

impl Job {
    fn new(commands: Arc<Commands>) -> Self {
        Self {
            commands,
            object: None,
            ops: VecDeque::new(),
            number: 0,
            committed: Instant::now(),
            seen: 0,
            is_started: false,
            blocked: None,
            before: Before::default(),
            nodes: BTreeSet::new(),
            touched: Touched::default(),
            storages: Vec::new(),
            resident: Vec::new(),
            infos: Vec::new(),
            fault: None,
        }
    }

    /// Returns true if it waits for an event.
    fn is_blocked(&self) -> bool {
        matches!(self.ops.front(), Some(Op::Wait(event, value)) if event.value() < *value)
    }
}

/// The command buffers of a queue, and who calls their handlers.
struct Lane {
    jobs: VecDeque<Job>,
    calls: Sender<Call>,
}

#[derive(Default)]
struct State {
    lanes: BTreeMap<u64, Lane>,
    history: History,
    watch: Watch,
    is_stopped: bool,
    committed: u64,
}

pub(crate) struct Scheduler {
    machine: Arc<Machine>,
    state: Mutex<State>,
    /// Held while a command runs, and taken before `state`.
    running: Mutex<()>,
    start: Once,
}

/// How long the thread sleeps while something may become due by itself.
pub(crate) const TICK: Duration = Duration::from_millis(5);

impl Scheduler {
    pub(crate) fn new(machine: Arc<Machine>) -> Arc<Self> {
        Arc::new(Self { machine, state: Mutex::default(), running: Mutex::default(), start: Once::new() })
    }

    /// Ends the thread: the device is gone, and with it everything that could be committed.
    pub(crate) fn stop(&self) {
        lock(&self.state).is_stopped = true;
        self.machine.ring();
    }

    pub(crate) fn add_queue(&self, queue: u64, calls: Sender<Call>) {
        lock(&self.state).lanes.insert(queue, Lane { jobs: VecDeque::new(), calls });
    }

    pub(crate) fn remove_queue(&self, queue: u64) {
        lock(&self.state).lanes.remove(&queue);
    }

    /// Reserves the next place of the queue.
    pub(crate) fn enqueue(&self, commands: &Arc<Commands>) {
        let mut state = lock(&self.state);
        if let Some(lane) = state.lanes.get_mut(&commands.queue) {
            lane.jobs.push_back(Job::new(commands.clone()));
        }
    }

    /// Returns true if the next command buffer of a queue is enqueued and not committed, so that no later one
    /// runs.
    pub(crate) fn is_held(&self, queue: u64) -> bool {
        let state = lock(&self.state);
        state.lanes.get(&queue).and_then(|l| l.jobs.front()).is_some_and(|j| j.object.is_none())
    }

    /// Takes work over.
    pub(crate) fn commit(
        self: &Arc<Self>,
        commands: &Arc<Commands>,
        object: Object,
        work: (Vec<Op>, Vec<Arc<BufferState>>),
    ) {
        let (ops, resident) = work;
        let mut storages: Vec<Arc<Storage>> = Vec::new();
        let passes = ops.iter().filter_map(|op| if let Op::Pass(p) = op { Some(p) } else { None });
        for buffer in passes.flat_map(Pass::uses).chain(resident.iter().cloned()) {
            if !storages.iter().any(|s| s.id == buffer.storage.id) {
                storages.push(buffer.storage.clone());
            }
        }
        {
            // Bytes that the GPU is writing at this moment are not writes of the CPU.
            let _nothing_runs = lock(&self.running);
            let mut state = lock(&self.state);
            let state = &mut *state;
            state.watch.commit(commands.id, &storages);
            state.committed += 1;
            let Some(lane) = state.lanes.get_mut(&commands.queue) else { return };
            let at = lane.jobs.iter().position(|j| j.commands.id == commands.id).unwrap_or_else(|| {
                lane.jobs.push_back(Job::new(commands.clone()));
                lane.jobs.len() - 1
            });
            let job = &mut lane.jobs[at];
            job.seen = self.machine.completed();
            job.before = Before::completed(job.seen);
            (job.number, job.committed) = (state.committed, Instant::now());
            (job.object, job.ops, job.storages, job.resident) =
                (Some(object), ops.into(), storages, resident);
        }
        self.machine.ring();
        self.start.call_once(|| {
            let this = self.clone();
            std::thread::Builder::new()
                .name("software GPU".into())
                .spawn(move || this.work())
                .expect("a thread for the device");
        });
    }

    /// Schedules a command buffer, and what comes before it in its queue, without running it.
    pub(crate) fn schedule(&self, commands: &Arc<Commands>) {
        let mut state = lock(&self.state);
        let Some(lane) = state.lanes.get_mut(&commands.queue) else { return };
        for job in &mut lane.jobs {
            let Some(object) = &job.object else { return };
            scheduled(&job.commands, object, &lane.calls);
            if job.commands.id == commands.id {
                return;
            }
        }
    }

    fn work(&self) {
        loop {
            let seen = self.machine.changes();
            let chosen = {
                let mut state = lock(&self.state);
                if state.is_stopped {
                    return;
                }
                self.choose(&mut state)
            };
            match chosen {
                Some(queue) => autoreleasepool(|_| self.step(queue)),
                None => {
                    let is_idle = lock(&self.state).lanes.values().all(|l| l.jobs.is_empty());
                    self.machine.wait_for_change(seen, (!is_idle).then_some(TICK));
                }
            }
        }
    }

    /// The queue whose first command buffer goes on.
    fn choose(&self, state: &mut State) -> Option<u64> {
        let mut ready: Vec<(u64, u64, Instant)> = Vec::new();
        for (&queue, lane) in &mut state.lanes {
            let Some(job) = lane.jobs.front_mut().filter(|j| j.object.is_some()) else { continue };
            if job.is_blocked() {
                let since = *job.blocked.get_or_insert_with(Instant::now);
                if since.elapsed() < self.machine.profile.event_timeout {
                    continue;
                }
                job.fault = Some(Fault {
                    code: MTLCommandBufferError::Timeout,
                    text: "Caused GPU Timeout Error: nothing signals the event that it waits for".into(),
                });
            }
            job.blocked = None;
            ready.push((queue, job.number, job.committed));
        }
        let behavior = self.machine.behavior();
        if let Timing::Late(most) = behavior.timing {
            let demands = self.machine.demands();
            if demands.is_empty() {
                ready.retain(|(_, _, committed)| committed.elapsed() >= most);
            } else if ready.iter().any(|r| demands.iter().any(|d| d.queue == Some(r.0))) {
                // Other queues run where the one that is waited for waits for them.
                ready.retain(|r| demands.iter().any(|d| d.queue == Some(r.0)));
            }
        }
        match behavior.order {
            Order::Encoded => ready.iter().min_by_key(|r| r.1).map(|r| r.0),
            Order::Random(_) => {
                let n = ready.len() as u64;
                (n > 0).then(|| ready[(self.machine.random() % n.max(1)) as usize].0)
            }
        }
    }

    /// Runs the next operation of the first command buffer of a queue.
    fn step(&self, queue: u64) {
        let taken = {
            let mut state = lock(&self.state);
            let lane = state.lanes.get_mut(&queue);
            lane.and_then(|l| l.jobs.pop_front().map(|job| (job, l.calls.clone())))
        };
        let Some((mut job, calls)) = taken else { return };
        if !job.is_started {
            self.begin(&mut job, &calls);
        }
        let op = if job.fault.is_none() { job.ops.pop_front() } else { None };
        if let Some(op) = op {
            let result = catch_unwind(AssertUnwindSafe(|| self.operate(&mut job, op)));
            let result = result.unwrap_or_else(|p| {
                let text = format!("the device panicked: {}", panic_text(&*p));
                Err(Fault { code: MTLCommandBufferError::Internal, text })
            });
            job.fault = result.err();
        }
        if job.fault.is_some() || job.ops.is_empty() {
            self.finish(job, &calls);
        } else if let Some(lane) = lock(&self.state).lanes.get_mut(&queue) {
            lane.jobs.push_front(job);
        }
    }

    fn begin(&self, job: &mut Job, calls: &Sender<Call>) {
        job.is_started = true;
        if let Some(object) = &job.object {
            scheduled(&job.commands, object, calls);
        }
        job.commands.change(|s| s.times[2] = seconds());
        job.infos =
            job.ops.iter().filter_map(|op| if let Op::Pass(p) = op { Some(info(p)) } else { None }).collect();
        // A command buffer that a test wants to fail.
        if let Some((code, text)) = lock(&self.machine.faults).command_buffers.pop_front() {
            job.fault = Some(Fault { code, text: text.unwrap_or_else(|| described(code)).into() });
            if let Some(first) = job.infos.first_mut() {
                first.state = MTLCommandEncoderErrorState::Faulted;
            }
        }
    }

    fn operate(&self, job: &mut Job, op: Op) -> Result<(), Fault> {
        match op {
            Op::Wait(event, value) => job.before.add(&event.before(value)),
            Op::Signal(event, value) => {
                let mut before = job.before.clone();
                job.nodes.iter().for_each(|&n| before.add_node(n));
                if !event.signal(value, before) {
                    // "MTLCommandBuffer, encodeSignalEvent(_:value:)": the value is greater than the event's.
                    let now = event.value();
                    return Err(broken(&format!(
                        "value {value} is signaled for an event whose value is {now}: values only grow"
                    )));
                }
            }
            Op::Pass(pass) => {
                let done =
                    job.infos.iter().filter(|i| i.state == MTLCommandEncoderErrorState::Completed).count();
                let result = self.pass(job, pass);
                job.infos[done].state = match &result {
                    Ok(()) => MTLCommandEncoderErrorState::Completed,
                    Err(_) => MTLCommandEncoderErrorState::Faulted,
                };
                return result;
            }
        }
        Ok(())
    }

    fn pass(&self, job: &mut Job, mut pass: Pass) -> Result<(), Fault> {
        lock(&self.state).watch.before(&job.storages);
        for (samples, [start, _]) in &pass.samples {
            samples.sample(*start, seconds());
        }
        if pass.is_concurrent {
            // Dispatches between barriers and fences have no order.
            let is_dispatch = |s: &Step| matches!(s, Step::Dispatch(_));
            pass.steps
                .chunk_by_mut(|a, b| is_dispatch(a) && is_dispatch(b))
                .for_each(|c| self.machine.shuffle(c));
        }
        let shown = pass.shown();
        let declared: BTreeSet<u64> = pass.uses().iter().map(|b| b.storage.id).collect();
        let node = |before: Before| Node {
            id: unique(),
            queue: job.commands.queue,
            pass: pass.id,
            shown: shown.clone(),
            touched: Touched::default(),
            declared: declared.clone(),
            before,
            completed: None,
        };
        let mut now = node(job.before.clone());
        let mut own = Vec::new();
        // Bytes that dispatches have touched since the last barrier.
        let mut open: Vec<Touched> = Vec::new();
        let (storages, resident) = (job.storages.clone(), job.resident.clone());
        let mut nodes = Vec::new();
        let result = pass.steps.iter().try_for_each(|step| {
            match step {
                Step::Update(fence) => {
                    let mut before = now.before.clone();
                    own.push(now.id);
                    own.iter().for_each(|&n| before.add_node(n));
                    *lock(&fence.update) = (Some(job.commands.queue), before);
                    let next = node(now.before.clone());
                    nodes.push(std::mem::replace(&mut now, next));
                }
                Step::Wait(fence) => {
                    let (queue, before) = lock(&fence.update).clone();
                    if queue.is_some_and(|q| q != job.commands.queue) {
                        // "MTLFence": it orders passes of one queue.
                        return Err(broken("a fence that another queue has updated: events order queues"));
                    }
                    let mut next = node(now.before.clone());
                    next.before.add(&before);
                    own.push(now.id);
                    nodes.push(std::mem::replace(&mut now, next));
                }
                Step::Barrier(None) => open.clear(),
                Step::Barrier(Some(ids)) => {
                    open.iter_mut().for_each(|t| ids.iter().for_each(|&i| t.forget(i)))
                }
                Step::Dispatch(_) | Step::Copy { .. } | Step::Fill { .. } | Step::Resolve { .. } => {
                    let touched = self.command(step, &resident)?;
                    if pass.is_concurrent {
                        concurrent(&open, &touched, &shown)?;
                        open.push(touched.clone());
                    }
                    now.touched.add(&touched);
                }
            }
            Ok(())
        });
        nodes.push(now);
        let ordered = self.remember(job, nodes, &storages);
        for (samples, [_, end]) in &pass.samples {
            samples.sample(*end, seconds());
        }
        result.and(ordered)
    }

    fn command(&self, step: &Step, resident: &[Arc<BufferState>]) -> Result<Touched, Fault> {
        let _is_running = lock(&self.running);
        let touched = run(&self.machine, step, resident)?;
        lock(&self.state).watch.after(&touched);
        Ok(touched)
    }

    /// Adds what has run to the history.
    fn remember(&self, job: &mut Job, nodes: Vec<Node>, storages: &[Arc<Storage>]) -> Result<(), Fault> {
        let is_tracked = |id: u64| storages.iter().any(|s| s.id == id && s.is_tracked);
        let mut state = lock(&self.state);
        let mut first = None;
        for node in nodes {
            job.nodes.insert(node.id);
            job.touched.add(&node.touched);
            let broken = state.history.add(node, is_tracked);
            first = first.or(broken);
        }
        first.map_or(Ok(()), |text| Err(broken(&text)))
    }

    fn finish(&self, mut job: Job, calls: &Sender<Call>) {
        {
            let mut state = lock(&self.state);
            let wrote = state.watch.complete(job.commands.id, &job.touched);
            if let (Some(bytes), None) = (wrote, &job.fault) {
                job.fault = Some(broken(&format!(
                    "the CPU has written bytes {}..{} of a buffer between commit and completion of work that uses them",
                    bytes.start, bytes.end
                )));
            }
            let count = self.machine.complete();
            state.history.complete(&job.nodes, count);
            let in_flight =
                state.lanes.values().flat_map(|l| &l.jobs).filter(|j| j.object.is_some()).map(|j| j.seen);
            let oldest = in_flight.min().unwrap_or(count);
            state.history.forget(oldest);
        }
        if let Some(fault) = job.fault.as_ref().filter(|f| f.text.starts_with("Metal API validation")) {
            self.machine.violation(fault.text.clone());
        }
        let Job { commands, object, ops, storages, resident, infos, fault, .. } = job;
        // References to buffers go before anybody hears of the completion.
        drop((ops, storages, resident));
        let handlers = commands.change(|s| {
            s.times[3] = seconds().max(s.times[2] + 1e-6);
            s.status = if fault.is_some() {
                MTLCommandBufferStatus::Error
            } else {
                MTLCommandBufferStatus::Completed
            };
            (s.fault, s.infos) = (fault, infos);
            s.place = None;
            std::mem::take(&mut s.on_completed)
        });
        self.machine.ring();
        if let Some(object) = object {
            // The thread of the queue is there as long as the command buffer retains the queue.
            let _ = calls.send(Call { commands, object, handlers, is_completion: true });
        }
    }
}

/// Dispatches of a concurrent encoder that touch common bytes without a barrier between.
fn concurrent(open: &[Touched], touched: &Touched, shown: &str) -> Result<(), Fault> {
    let Some((_, bytes)) = open.iter().find_map(|other| touched.conflict(other, |_| true)) else {
        return Ok(());
    };
    Err(broken(&format!(
        "two dispatches of {shown} use bytes {}..{} of a resource, one of them writes, and no barrier lies between",
        bytes.start, bytes.end
    )))
}

/// Marks a command buffer as scheduled, and has its handlers called.
fn scheduled(commands: &Arc<Commands>, object: &Object, calls: &Sender<Call>) {
    let handlers = commands.change(|s| {
        if s.status != MTLCommandBufferStatus::Committed {
            return None;
        }
        s.status = MTLCommandBufferStatus::Scheduled;
        s.times[1] = seconds();
        Some(std::mem::take(&mut s.on_scheduled))
    });
    if let Some(handlers) = handlers {
        let _ = calls.send(Call {
            commands: commands.clone(),
            object: object.clone(),
            handlers,
            is_completion: false,
        });
    }
}

fn info(pass: &Pass) -> Info {
    let label = pass.label.clone().unwrap_or_default();
    Info { label, signposts: pass.signposts.clone(), state: MTLCommandEncoderErrorState::Pending }
}

/// The descriptions of Apple's errors.
fn described(code: MTLCommandBufferError) -> &'static str {
    match code {
        MTLCommandBufferError::Internal => "Internal Error (0000000e:Internal Error)",
        MTLCommandBufferError::Timeout => {
            "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)"
        }
        MTLCommandBufferError::PageFault => {
            "Caused GPU Address Fault Error (0000000b:kIOGPUCommandBufferCallbackErrorPageFault)"
        }
        MTLCommandBufferError::AccessRevoked => {
            "Ignored (for causing prior/excessive GPU errors) (00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)"
        }
        MTLCommandBufferError::OutOfMemory => {
            "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"
        }
        MTLCommandBufferError::InvalidResource => {
            "Invalid Resource (00000009:kIOGPUCommandBufferCallbackErrorInvalidResource)"
        }
        MTLCommandBufferError::DeviceRemoved => "The device was removed",
        _ => "The command buffer failed",
    }
}
