//! Execution of commands.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use flashtile_msl_standin::{Accesses, Allocation, Binding, Order as GroupOrder, RunError};
use objc2_metal::MTLCommandBufferError;

use crate::commands::{Bound, Dispatch, Fault, Grid, Step, Use};
use crate::hazards::Touched;
use crate::machine::Machine;
use crate::memory::{BufferState, Storage, addressed};
use crate::profile::Order;
use crate::rules::MAX_BUFFERS;

fn fault(code: MTLCommandBufferError, text: impl Into<String>) -> Fault {
    Fault { code, text: text.into() }
}

/// A rule that work has broken.
pub(crate) fn broken(text: &str) -> Fault {
    fault(MTLCommandBufferError::InvalidResource, format!("Metal API validation: {text}"))
}

/// "MTLCommandQueue, makeCommandBufferWithUnretainedReferences()": the host keeps what the command buffer uses until it has completed.
fn alive(buffer: &BufferState) -> Result<(), Fault> {
    if buffer.is_gone() {
        return Err(broken(&format!(
            "{} was freed before the command buffer that uses it has completed",
            buffer.shown()
        )));
    }
    Ok(())
}

/// Runs a command; what it has touched.
pub(crate) fn run(machine: &Machine, step: &Step, resident: &[Arc<BufferState>]) -> Result<Touched, Fault> {
    let mut touched = Touched::default();
    match step {
        Step::Dispatch(dispatch) => return dispatched(machine, dispatch, resident),
        Step::Copy { from, to } => {
            alive(&from.buffer)?;
            alive(&to.buffer)?;
            let bytes = from.buffer.storage.read(from.in_storage());
            to.buffer.storage.write(to.in_storage().start, &bytes);
            touched.read(from.buffer.storage.id, [from.in_storage()]);
            touched.written(to.buffer.storage.id, [to.in_storage()]);
        }
        Step::Fill { to, value } => write(&mut touched, to, &vec![*value; to.range.len()])?,
        Step::Resolve { samples, range, to } => write(&mut touched, to, &samples.bytes(range.clone()))?,
        Step::Barrier(_) | Step::Update(_) | Step::Wait(_) => {}
    }
    Ok(touched)
}

fn write(touched: &mut Touched, to: &Use, bytes: &[u8]) -> Result<(), Fault> {
    alive(&to.buffer)?;
    to.buffer.storage.write(to.in_storage().start, bytes);
    touched.written(to.buffer.storage.id, [to.in_storage()]);
    Ok(())
}

/// The memory of a run: by the id of its allocation, the storage and where the allocation starts in it.
#[derive(Default)]
struct Bindings {
    bindings: Vec<Binding>,
    places: BTreeMap<u64, (Arc<Storage>, usize)>,
}

impl Bindings {
    fn buffer(&mut self, index: usize, buffer: &BufferState, offset: usize, writable: bool) {
        let allocation = Allocation { id: buffer.id, start: buffer.start(), bytes: buffer.length };
        self.bindings.push(Binding { index, allocation, offset, writable });
        self.places.insert(buffer.id, (buffer.storage.clone(), buffer.base));
    }

    fn bytes(&mut self, index: usize, storage: &Arc<Storage>) {
        let allocation = Allocation { id: storage.id, start: storage.start(), bytes: storage.bytes };
        self.bindings.push(Binding { index, allocation, offset: 0, writable: false });
    }

    /// Adds a buffer that the kernel reaches by its address, at an index that it has no argument for.
    fn indirect(&mut self, buffer: &BufferState, writable: bool) -> Result<(), Fault> {
        if let Some(bound) = self.bindings.iter_mut().find(|b| b.allocation.id == buffer.id) {
            (bound.writable, bound.offset) = (bound.writable || writable, bound.offset);
            return Ok(());
        }
        let free = (0..MAX_BUFFERS).rev().find(|i| self.bindings.iter().all(|b| b.index != *i));
        let Some(index) = free else {
            return Err(fault(
                MTLCommandBufferError::Internal,
                "the stand-in reaches at most 31 buffers, those that are resident included",
            ));
        };
        self.buffer(index, buffer, 0, writable);
        Ok(())
    }
}

fn dispatched(
    machine: &Machine,
    dispatch: &Dispatch,
    resident: &[Arc<BufferState>],
) -> Result<Touched, Fault> {
    let mut touched = Touched::default();
    let groups = match &dispatch.grid {
        Grid::Groups(groups) => *groups,
        Grid::Indirect(from) => indirect_groups(&mut touched, from)?,
    };
    machine.count(|c| c.dispatches += 1);
    if groups.contains(&0) {
        // Indirect arguments of 0 run nothing.
        return Ok(touched);
    }
    let mut run = Bindings::default();
    for (index, bound) in &dispatch.bound {
        match bound {
            Bound::Buffer { buffer, offset, .. } => {
                alive(buffer)?;
                run.buffer(*index, buffer, *offset, true);
            }
            Bound::Bytes(storage) => run.bytes(*index, storage),
        }
    }
    for (buffer, writable) in &dispatch.indirect {
        alive(buffer)?;
        run.indirect(buffer, *writable)?;
    }
    for buffer in resident.iter().filter(|b| !b.is_gone()) {
        run.indirect(buffer, true)?;
    }
    let order = match machine.behavior().order {
        Order::Encoded => GroupOrder::Forward,
        Order::Random(_) => GroupOrder::Random(machine.random()),
    };
    let last = dispatch.threadgroup.iter().rposition(|&n| n != 0).map_or(0, |i| i + 1);
    let memory = &dispatch.threadgroup[..last];
    let kernel = &dispatch.pipeline.kernel;
    // SAFETY: the storages of all buffers are kept by the dispatch; different buffers are disjoint unless they alias in a heap, which
    // `run_on` refuses as allocations that overlap. A host that touches the memory meanwhile breaks a rule that the watch reports.
    let result = unsafe { kernel.run_on(groups, dispatch.threads, &run.bindings, memory, order) };
    let accesses = result.map_err(|e| failed(machine, &dispatch.pipeline.name, &e, &run))?;
    add(&mut touched, &run, &accesses);
    Ok(touched)
}

fn indirect_groups(touched: &mut Touched, from: &Use) -> Result<[u32; 3], Fault> {
    alive(&from.buffer)?;
    let bytes = from.buffer.storage.read(from.in_storage());
    touched.read(from.buffer.storage.id, [from.in_storage()]);
    let word =
        |i: usize| u32::from_ne_bytes([bytes[4 * i], bytes[4 * i + 1], bytes[4 * i + 2], bytes[4 * i + 3]]);
    Ok([word(0), word(1), word(2)])
}

/// Accesses of buffers as accesses of their storages. Memory of `setBytes` is no other dispatch's.
fn add(touched: &mut Touched, run: &Bindings, accesses: &Accesses) {
    for id in accesses.touched() {
        let Some((storage, base)) = run.places.get(&id) else { continue };
        let moved = |r: &Range<usize>| r.start + base..r.end + base;
        touched.read(storage.id, accesses.read(id).iter().map(moved));
        touched.written(storage.id, accesses.written(id).iter().map(moved));
    }
}

/// A buffer whose address a kernel has in one of its buffers, and which it must not reach.
fn unreachable(machine: &Machine, run: &Bindings) -> Option<Arc<BufferState>> {
    let is_bound = |id| run.bindings.iter().any(|b| b.allocation.id == id);
    run.places.values().find_map(|(storage, _)| {
        let bytes = storage.read(0..storage.bytes);
        let words: Vec<u64> = bytes
            .chunks_exact(8)
            .map(|c| u64::from_ne_bytes([c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7]]))
            .collect();
        addressed(machine.id, &words, is_bound)
    })
}

/// The fault of a device for an error of a run.
fn failed(machine: &Machine, kernel: &str, e: &RunError, run: &Bindings) -> Fault {
    let code = match e {
        RunError::Access { .. } => MTLCommandBufferError::PageFault,
        RunError::Endless { .. } => MTLCommandBufferError::Timeout,
        _ => MTLCommandBufferError::Internal,
    };
    let mut text = format!("kernel {kernel}: {e}");
    if let (RunError::Access { .. }, Some(buffer)) = (e, unreachable(machine, run)) {
        // "MTLComputeCommandEncoder, useResource(_:usage:)" and "MTLResidencySet": a buffer that a kernel reaches by its address is
        // named by one of them.
        text.push_str(&format!(
            "; the address of {} is in a buffer of this dispatch, and it is not resident: neither useResource, useHeap nor a committed \
             residency set names it",
            buffer.shown()
        ));
    }
    fault(code, text)
}
