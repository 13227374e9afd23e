//! Encoded work, and the state of a command buffer that its object, its encoders and the device's thread have in common.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex};

use block2::RcBlock;
use objc2::runtime::ProtocolObject;
use objc2_metal::{
    MTLCommandBuffer, MTLCommandBufferError, MTLCommandBufferStatus, MTLCommandEncoderErrorState,
};

use crate::counters::SampleState;
use crate::machine::{Machine, lock, unique};
use crate::memory::{BufferState, Storage};
use crate::object::{Kept, Sent};
use crate::pipeline::PipelineState;
use crate::residency::ResidencyState;
use crate::sync::{EventState, FenceState};

/// Bytes of a buffer that a command uses.
#[derive(Clone)]
pub(crate) struct Use {
    pub(crate) buffer: Arc<BufferState>,
    /// The object, where the command buffer retains its references.
    pub(crate) _kept: Option<Kept>,
    /// Bytes of the buffer.
    pub(crate) range: Range<usize>,
}

impl Use {
    /// Its bytes in the storage.
    pub(crate) fn in_storage(&self) -> Range<usize> {
        self.buffer.range(self.range.start, self.range.len())
    }
}

/// Memory that is bound to a kernel's argument.
#[derive(Clone)]
pub(crate) enum Bound {
    Buffer { buffer: Arc<BufferState>, kept: Option<Kept>, offset: usize },
    Bytes(Arc<Storage>),
}

/// How many threadgroups a dispatch has.
pub(crate) enum Grid {
    Groups([u32; 3]),
    Indirect(Use),
}

pub(crate) struct Dispatch {
    pub(crate) pipeline: Arc<PipelineState>,
    pub(crate) bound: Vec<(usize, Bound)>,
    pub(crate) threadgroup: Vec<usize>,
    pub(crate) grid: Grid,
    pub(crate) threads: [u32; 3],
    /// Buffers that `useResource` names, and whether the kernel may write them.
    pub(crate) indirect: Vec<(Arc<BufferState>, bool)>,
}

/// A command of an encoder.
pub(crate) enum Step {
    Dispatch(Box<Dispatch>),
    Copy {
        from: Use,
        to: Use,
    },
    Fill {
        to: Use,
        value: u8,
    },
    /// Of all buffers, or of these storages.
    Barrier(Option<Vec<u64>>),
    Update(Arc<FenceState>),
    Wait(Arc<FenceState>),
    /// Times that were sampled go to a buffer.
    Resolve {
        samples: Arc<SampleState>,
        range: Range<usize>,
        to: Use,
    },
}

/// An encoder's commands.
pub(crate) struct Pass {
    pub(crate) id: u64,
    pub(crate) kind: &'static str,
    pub(crate) label: Option<String>,
    pub(crate) is_concurrent: bool,
    pub(crate) steps: Vec<Step>,
    pub(crate) signposts: Vec<String>,
    /// Where its times go: at its start and at its end.
    pub(crate) samples: Vec<(Arc<SampleState>, [usize; 2])>,
}

impl Pass {
    pub(crate) fn new(kind: &'static str, is_concurrent: bool) -> Self {
        Self {
            id: unique(),
            kind,
            label: None,
            is_concurrent,
            steps: Vec::new(),
            signposts: Vec::new(),
            samples: Vec::new(),
        }
    }

    /// `compute encoder "label"`.
    pub(crate) fn shown(&self) -> String {
        let label = self.label.as_ref().map_or_else(String::new, |l| format!(" {l:?}"));
        format!("{}{label}", self.kind)
    }

    /// The storages of its commands, and the buffers that may not go before they have run.
    pub(crate) fn uses(&self) -> Vec<Arc<BufferState>> {
        let mut uses = Vec::new();
        for step in &self.steps {
            match step {
                Step::Dispatch(d) => {
                    uses.extend(d.bound.iter().filter_map(|(_, b)| match b {
                        Bound::Buffer { buffer, .. } => Some(buffer.clone()),
                        Bound::Bytes(_) => None,
                    }));
                    uses.extend(d.indirect.iter().map(|(b, _)| b.clone()));
                    if let Grid::Indirect(u) = &d.grid {
                        uses.push(u.buffer.clone());
                    }
                }
                Step::Copy { from, to } => uses.extend([from.buffer.clone(), to.buffer.clone()]),
                Step::Fill { to, .. } | Step::Resolve { to, .. } => uses.push(to.buffer.clone()),
                Step::Barrier(_) | Step::Update(_) | Step::Wait(_) => {}
            }
        }
        uses
    }
}

/// An operation of a command buffer. A command buffer executes them in order.
pub(crate) enum Op {
    Pass(Pass),
    Wait(Arc<EventState>, u64),
    Signal(Arc<EventState>, u64),
}

/// Labels of an encoder, and how far it came.
#[derive(Clone, Debug)]
pub(crate) struct Info {
    pub(crate) label: String,
    pub(crate) signposts: Vec<String>,
    pub(crate) state: MTLCommandEncoderErrorState,
}

/// Why a command buffer fails.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    pub(crate) code: MTLCommandBufferError,
    pub(crate) text: String,
}

/// A block that is called with the command buffer.
pub(crate) type Handler = Sent<RcBlock<dyn Fn(NonNull<ProtocolObject<dyn MTLCommandBuffer>>)>>;

pub(crate) struct CommandState {
    pub(crate) status: MTLCommandBufferStatus,
    pub(crate) ops: Vec<Op>,
    /// The encoder that is open.
    pub(crate) open: Option<String>,
    pub(crate) on_scheduled: Vec<Handler>,
    pub(crate) on_completed: Vec<Handler>,
    /// True if the handlers have been called.
    pub(crate) is_scheduled: bool,
    pub(crate) is_completed: bool,
    pub(crate) fault: Option<Fault>,
    pub(crate) infos: Vec<Info>,
    /// Seconds: scheduled by the CPU from and to, run by the GPU from and to.
    pub(crate) times: [f64; 4],
    pub(crate) groups: isize,
    pub(crate) residency: Vec<Arc<ResidencyState>>,
    /// The panic of a handler, which would end the process on a Mac.
    pub(crate) panic: Option<String>,
    /// Its place among the command buffers of the queue.
    pub(crate) place: Option<Place>,
}

/// Command buffers of a queue that are not complete.
#[derive(Default)]
pub(crate) struct Room {
    pub(crate) open: usize,
    /// Command buffers among the open ones that are committed, and will complete.
    pub(crate) committed: usize,
}

/// One of the command buffers that a queue may have, until it completes or goes.
pub(crate) struct Place {
    of: Arc<Mutex<Room>>,
    is_committed: bool,
}

impl Place {
    pub(crate) fn take(of: &Arc<Mutex<Room>>) -> Self {
        lock(of).open += 1;
        Self { of: of.clone(), is_committed: false }
    }

    pub(crate) fn commit(&mut self) {
        lock(&self.of).committed += usize::from(!self.is_committed);
        self.is_committed = true;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut room = lock(&self.of);
        room.open -= 1;
        room.committed -= usize::from(self.is_committed);
    }
}

pub(crate) struct Commands {
    pub(crate) id: u64,
    pub(crate) queue: u64,
    pub(crate) machine: Arc<Machine>,
    pub(crate) retains: bool,
    pub(crate) state: Mutex<CommandState>,
    pub(crate) changed: Condvar,
}

impl Commands {
    pub(crate) fn new(queue: u64, machine: Arc<Machine>, retains: bool, place: Place) -> Self {
        let state = CommandState {
            status: MTLCommandBufferStatus::NotEnqueued,
            ops: Vec::new(),
            open: None,
            on_scheduled: Vec::new(),
            on_completed: Vec::new(),
            is_scheduled: false,
            is_completed: false,
            fault: None,
            infos: Vec::new(),
            times: [0.0; 4],
            groups: 0,
            residency: Vec::new(),
            panic: None,
            place: Some(place),
        };
        Self { id: unique(), queue, machine, retains, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Changes the state, and tells whoever waits.
    pub(crate) fn change<T>(&self, f: impl FnOnce(&mut CommandState) -> T) -> T {
        let result = f(&mut lock(&self.state));
        self.changed.notify_all();
        result
    }

    pub(crate) fn status(&self) -> MTLCommandBufferStatus {
        lock(&self.state).status
    }

    pub(crate) fn is_committed(&self) -> bool {
        self.status() >= MTLCommandBufferStatus::Committed
    }
}

/// Seconds since the process first asked, as `GPUStartTime` counts them since the system started.
pub(crate) fn seconds() -> f64 {
    static START: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    // No time is 0, which means that work is yet to run.
    1.0 + START.get_or_init(std::time::Instant::now).elapsed().as_secs_f64()
}
