//! Launches on a queue: an open command buffer, and those that are committed and not known to have completed.

use super::encoder::{DispatchType, Recorder};
use super::error::Error;
use super::memory::Ticket;
use super::object::{CommandBuffer, CommandQueue, Shared, SharedEvent};
use objc2::rc::autoreleasepool;
use objc2::runtime::ProtocolObject;
use objc2_foundation::NSString;
use objc2_metal::{MTLCommandBuffer, MTLCommandBufferStatus, MTLCommandQueue, MTLEvent};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Launches of one command buffer, after which it is committed: enough to hide the cost of a commit, few enough to start early.
const MAX_LAUNCHES: usize = 64;

/// A queue, and the command buffers that launches go to.
#[derive(Debug)]
pub(super) struct Queue {
    queue: CommandQueue,
    dispatch: DispatchType,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    open: Option<Open>,
    /// In order.
    committed: VecDeque<Committed>,
    /// The first failure that was not reported yet.
    failure: Option<Error>,
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

#[derive(Debug)]
struct Committed {
    commands: Shared<CommandBuffer>,
    ticket: Arc<Ticket>,
}

impl Queue {
    pub(super) fn new(queue: CommandQueue, dispatch: DispatchType) -> Self {
        Self { queue, dispatch, state: Mutex::default() }
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
                    none.insert(Recorder::new(encoder, self.dispatch))
                }
            };
            work(recorder, &open.ticket);
            open.launches += 1;
            if open.launches >= MAX_LAUNCHES {
                state.commit();
            }
            Ok(())
        })
    }

    /// Commits the open command buffer, if there is one.
    pub(super) fn commit(&self) {
        autoreleasepool(|_| self.state().commit());
    }

    /// Notes which command buffers have completed.
    pub(super) fn poll(&self) {
        autoreleasepool(|_| self.state().poll());
    }

    /// Commits, and waits until everything has completed.
    pub(super) fn synchronize(&self) -> Result<(), Error> {
        autoreleasepool(|_| {
            self.commit();
            // Not under the lock: other threads may encode meanwhile.
            let last = self.state().committed.back().map(|last| last.commands.clone());
            if let Some(last) = last {
                last.waitUntilCompleted();
            }
            let mut state = self.state();
            state.poll();
            state.failure.take().map_or(Ok(()), Err)
        })
    }

    /// Makes what is encoded from now on wait until an event has a value.
    pub(super) fn wait_for(&self, event: &SharedEvent, value: u64) -> Result<(), Error> {
        self.between(|commands, event| commands.encodeWaitForEvent_value(event, value), event)
    }

    /// Gives an event a value when everything that was encoded up to now has completed, and commits.
    pub(super) fn signal(&self, event: &SharedEvent, value: u64) -> Result<(), Error> {
        self.between(|commands, event| commands.encodeSignalEvent_value(event, value), event)?;
        self.commit();
        Ok(())
    }

    /// Encodes a command between encoders.
    fn between(
        &self,
        command: impl FnOnce(&CommandBuffer, &ProtocolObject<dyn MTLEvent>),
        event: &SharedEvent,
    ) -> Result<(), Error> {
        autoreleasepool(|_| {
            let mut state = self.state();
            let open = state.open(&self.queue)?;
            if let Some(recorder) = open.recorder.take() {
                recorder.end();
            }
            command(&open.commands, ProtocolObject::from_ref(&**event));
            Ok(())
        })
    }

    /// Seconds on the GPU of each of `runs` runs of `work`, after one that is not measured.
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
        // What was launched runs, and an encoder must not be freed before it has ended.
        self.commit();
    }
}

impl State {
    fn open(&mut self, queue: &CommandQueue) -> Result<&mut Open, Error> {
        match &mut self.open {
            Some(_) => {}
            none => {
                let commands = queue.commandBuffer().ok_or(Error::NoObject { what: "command buffer" })?;
                commands.setLabel(Some(&NSString::from_str("flashtile")));
                let (commands, ticket) = (Shared::locked(commands), Arc::default());
                *none = Some(Open { commands, recorder: None, ticket, launches: 0 });
            }
        }
        self.open.as_mut().ok_or(Error::NoObject { what: "command buffer" })
    }

    fn commit(&mut self) {
        self.poll();
        let Some(Open { commands, recorder, ticket, .. }) = self.open.take() else { return };
        if let Some(recorder) = recorder {
            recorder.end();
        }
        commands.commit();
        self.committed.push_back(Committed { commands, ticket });
    }

    /// Takes the command buffers that have completed off the list.
    fn poll(&mut self) {
        let has_ended = |of: &Committed| of.commands.status().0 >= MTLCommandBufferStatus::Completed.0;
        let count = self.committed.iter().take_while(|first| has_ended(first)).count();
        for first in self.committed.drain(..count) {
            first.ticket.complete();
            if let Some(times) = &mut self.times {
                times.push([first.commands.GPUStartTime(), first.commands.GPUEndTime()]);
            }
            if let Some(error) = first.commands.error() {
                self.failure.get_or_insert(Error::execution(&error));
            }
        }
    }
}
