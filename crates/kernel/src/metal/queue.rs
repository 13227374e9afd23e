//! Launches on a queue: an open command buffer, and those that are committed and not known to have completed.

#![allow(unsafe_code)]

use super::encoder::{DispatchType, Recorder};
use super::error::Error;
use super::memory::Ticket;
use super::object::{CommandBuffer, CommandQueue, Shared, SharedEvent};
use block2::RcBlock;
use objc2::rc::{Retained, Weak, autoreleasepool};
use objc2::runtime::ProtocolObject;
use objc2_foundation::NSString;
use objc2_metal::{
    MTLCommandBuffer, MTLCommandBufferStatus, MTLCommandQueue, MTLDevice, MTLEvent, MTLSharedEvent,
};
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Launches of one command buffer, after which it is committed: enough to hide the cost of a commit, few enough to start early.
const MAX_LAUNCHES: usize = 64;

/// A queue, and the command buffers that launches go to.
#[derive(Debug)]
pub(super) struct Queue {
    queue: CommandQueue,
    dispatch: DispatchType,
    /// Its value is the number of command buffers that have completed.
    completed: Option<Event>,
    state: Mutex<State>,
}

/// An event of the device.
type Event = Retained<ProtocolObject<dyn MTLEvent>>;

#[derive(Debug, Default)]
struct State {
    open: Option<Open>,
    /// In order.
    committed: VecDeque<Committed>,
    /// Command buffers of the caller's, whose commit is not seen yet.
    lent: Vec<LentBuffer>,
    /// The first failure that was not reported yet.
    failure: Option<Error>,
    /// Command buffers that failed, or that their caller did not commit.
    failures: u64,
    /// Command buffers that were committed, which the value of [`Queue::completed`] counts.
    count: u64,
    /// Events that launches wait for. Every command buffer waits, as a wait in one of them does not hold up
    /// the next.
    waits: Vec<(SharedEvent, u64)>,
    /// Start and end on the GPU of each command buffer that has completed, in seconds, while times are wanted.
    times: Option<Vec<[f64; 2]>>,
}

/// A command buffer that is not committed yet.
#[derive(Debug)]
struct Open {
    commands: Shared<CommandBuffer>,
    recorder: Option<Recorder>,
    ticket: Arc<Ticket>,
    launches: usize,
}

/// A command buffer that is committed.
#[derive(Debug)]
struct Committed {
    commands: Shared<CommandBuffer>,
    ticket: Arc<Ticket>,
}

/// A command buffer of the caller's, who keeps it until it is committed or given up.
#[derive(Debug)]
struct LentBuffer {
    commands: Shared<Weak<ProtocolObject<dyn MTLCommandBuffer>>>,
    ticket: Arc<Ticket>,
}

/// Lives as long as a command buffer keeps its handlers: one that goes without a call was not committed.
#[derive(Debug)]
struct Fate(Arc<Ticket>);

impl Drop for Fate {
    fn drop(&mut self) {
        self.0.complete(Err(Error::NotCommitted));
    }
}

impl Queue {
    pub(super) fn new(queue: CommandQueue, dispatch: DispatchType) -> Self {
        let completed = autoreleasepool(|_| queue.device().newEvent());
        Self { queue, dispatch, completed, state: Mutex::default() }
    }

    pub(super) const fn queue(&self) -> &CommandQueue {
        &self.queue
    }

    pub(super) const fn dispatch(&self) -> DispatchType {
        self.dispatch
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `work` with an encoder of the open command buffer.
    pub(super) fn encode(&self, work: impl FnOnce(&mut Recorder, &Arc<Ticket>)) -> Result<(), Error> {
        autoreleasepool(|_| {
            let mut state = self.state();
            let open = state.open(&self.queue)?;
            let recorder = match &mut open.recorder {
                Some(recorder) => recorder,
                none => {
                    let encoder = open.commands.computeCommandEncoderWithDispatchType(self.dispatch.into());
                    let encoder = encoder.ok_or(Error::NoObject { what: "compute encoder" })?;
                    none.insert(Recorder::new(encoder))
                }
            };
            work(recorder, &open.ticket);
            open.launches += 1;
            if open.launches >= MAX_LAUNCHES {
                state.commit(self.completed.as_ref());
            }
            Ok(())
        })
    }

    /// Commits the open command buffer, if there is one.
    pub(super) fn commit(&self) {
        autoreleasepool(|_| self.state().commit(self.completed.as_ref()));
    }

    /// Notes which command buffers have completed.
    pub(super) fn poll(&self) {
        autoreleasepool(|_| self.state().poll());
    }

    /// Commits, and waits until everything has completed.
    pub(super) fn synchronize(&self) -> Result<(), Error> {
        autoreleasepool(|_| {
            let all: Vec<_> = {
                let mut state = self.state();
                if !state.waits.is_empty() {
                    // Nothing may have been launched since: the wait itself is work.
                    state.open(&self.queue)?;
                }
                state.commit(self.completed.as_ref());
                state.committed.iter().map(|of| of.commands.clone()).collect()
            };
            // Not under the lock: other threads may encode meanwhile.
            all.iter().for_each(|commands| commands.waitUntilCompleted());
            let mut state = self.state();
            state.poll();
            state.failure.take().map_or(Ok(()), Err)
        })
    }

    /// Notes a command buffer of the caller's that launches go to, with the waits that they have; the ticket of its launches.
    pub(super) fn lend(&self, commands: &CommandBuffer) -> Arc<Ticket> {
        let mut state = self.state();
        state.commit(self.completed.as_ref());
        state.waits.iter().for_each(|(event, value)| wait(commands, event, *value));
        let ticket: Arc<Ticket> = Arc::default();
        let fate = Fate(Arc::clone(&ticket));
        let completed = RcBlock::new(move |commands: NonNull<ProtocolObject<dyn MTLCommandBuffer>>| {
            // SAFETY: Metal passes the command buffer.
            let failure = unsafe { commands.as_ref() }.error().map(|error| Error::execution(&error));
            fate.0.complete(failure.map_or(Ok(()), Err));
        });
        // SAFETY: the block has the handler's type, and may be called on any thread.
        unsafe { commands.addCompletedHandler(RcBlock::as_ptr(&completed)) };
        let lent = LentBuffer {
            commands: Shared::locked(Weak::from_retained(commands)),
            ticket: Arc::clone(&ticket),
        };
        state.lent.push(lent);
        ticket
    }

    /// Command buffers that failed, or that their caller did not commit.
    pub(super) fn failures(&self) -> u64 {
        self.poll();
        self.state().failures
    }

    /// Makes all commands that are encoded from now on wait until an event has a value.
    pub(super) fn wait_for(&self, event: &SharedEvent, value: u64) -> Result<(), Error> {
        autoreleasepool(|_| {
            let mut state = self.state();
            state.poll();
            state.waits.push((event.clone(), value));
            if let Some(open) = &mut state.open {
                open.end_encoder();
                wait(&open.commands, event, value);
            }
            Ok(())
        })
    }

    /// Gives an event a value when everything that was encoded up to now has completed, and commits.
    ///
    /// A signal follows the commands before it in its own command buffer, as Apple says of `encodeSignalEvent(_:value:)`: this one first waits
    /// for those in command buffers that are committed already.
    pub(super) fn signal(&self, event: &SharedEvent, value: u64) -> Result<(), Error> {
        autoreleasepool(|_| {
            let completed = self.completed.as_ref().ok_or(Error::NoObject { what: "event" })?;
            let mut state = self.state();
            state.poll();
            let (count, is_idle) = (state.count, state.committed.is_empty());
            let open = state.open(&self.queue)?;
            open.end_encoder();
            if !is_idle {
                open.commands.encodeWaitForEvent_value(completed, count);
            }
            open.commands.encodeSignalEvent_value(ProtocolObject::from_ref(&**event), value);
            state.commit(Some(completed));
            Ok(())
        })
    }

    /// While it runs no other thread launches on the queue. Seconds on the GPU of each of `runs` runs of `work`, after one that is not measured.
    pub(super) fn time<E: From<Error>>(
        &self,
        runs: usize,
        mut work: impl FnMut() -> Result<(), E>,
    ) -> Result<Vec<f64>, E> {
        work()?;
        self.synchronize()?;
        let mut seconds = Vec::with_capacity(runs);
        for _ in 0..runs {
            self.state().times = Some(Vec::new());
            let worked = work();
            let completed = self.synchronize();
            let times = self.state().times.take().unwrap_or_default();
            worked?;
            completed?;
            // A run may have several command buffers.
            let start = times.iter().map(|[start, _]| *start).fold(f64::INFINITY, f64::min);
            let end = times.iter().map(|[_, end]| *end).fold(f64::NEG_INFINITY, f64::max);
            seconds.push((end - start).max(0.0));
        }
        Ok(seconds)
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // Earlier launches still run, and an encoder must not be freed before it has ended.
        self.commit();
    }
}

impl Open {
    fn end_encoder(&mut self) {
        if let Some(recorder) = self.recorder.take() {
            recorder.end();
        }
    }
}

fn wait(commands: &CommandBuffer, event: &SharedEvent, value: u64) {
    commands.encodeWaitForEvent_value(ProtocolObject::from_ref(&**event), value);
}

impl State {
    fn open(&mut self, queue: &CommandQueue) -> Result<&mut Open, Error> {
        match &mut self.open {
            Some(_) => {}
            none => {
                let commands = queue.commandBuffer().ok_or(Error::NoObject { what: "command buffer" })?;
                commands.setLabel(Some(&NSString::from_str("flashtile")));
                let (commands, ticket) = (Shared::locked(commands), Arc::default());
                let open = Open { commands, recorder: None, ticket, launches: 0 };
                self.waits.iter().for_each(|(event, value)| wait(&open.commands, event, *value));
                *none = Some(open);
            }
        }
        self.open.as_mut().ok_or(Error::NoObject { what: "command buffer" })
    }

    fn commit(&mut self, completed: Option<&Event>) {
        self.poll();
        let Some(mut open) = self.open.take() else { return };
        open.end_encoder();
        let Open { commands, ticket, .. } = open;
        self.count += 1;
        if let Some(completed) = completed {
            commands.encodeSignalEvent_value(completed, self.count);
        }
        commands.commit();
        self.committed.push_back(Committed { commands, ticket });
    }

    /// Takes the command buffers that have completed off the list, and the events off theirs that have the values that are waited for.
    fn poll(&mut self) {
        self.waits.retain(|(event, value)| event.signaledValue() < *value);
        let (mut lent, committed) = (std::mem::take(&mut self.lent), &mut self.committed);
        let failures = &mut self.failures;
        lent.retain(|LentBuffer { commands, ticket }| {
            if let Some(result) = ticket.result() {
                *failures += u64::from(result.is_err());
                return false;
            }
            match commands.load() {
                Some(commands) if commands.status().0 >= MTLCommandBufferStatus::Committed.0 => {
                    let (commands, ticket) = (Shared::locked(commands), Arc::clone(ticket));
                    committed.push_back(Committed { commands, ticket });
                    false
                }
                // Not committed yet; or gone, and its handlers with it in a moment.
                _ => true,
            }
        });
        self.lent = lent;
        let has_ended = |of: &Committed| of.commands.status().0 >= MTLCommandBufferStatus::Completed.0;
        let (ended, rest) = std::mem::take(&mut self.committed).into_iter().partition::<Vec<_>, _>(has_ended);
        self.committed = rest.into();
        for Committed { commands, ticket } in ended {
            if let Some(times) = &mut self.times {
                times.push([commands.GPUStartTime(), commands.GPUEndTime()]);
            }
            let failure = commands.error().map(|error| Error::execution(&error));
            if let Some(error) = &failure {
                self.failures += 1;
                self.failure.get_or_insert_with(|| error.clone());
            }
            ticket.complete(failure.map_or(Ok(()), Err));
        }
    }
}
