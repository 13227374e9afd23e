//! Runs a plan: lays out the workspace and hands tasks to threads.

#![allow(unsafe_code)]

use super::isa;
use super::kernels::{Context, Partials, classify};
use super::workspace::Workspace;
use crate::plan::{CpuPlan, Task};
use crate::{Inputs, Outputs};
use rayon::prelude::*;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Start of each thread's scratch memory.
#[derive(Clone, Copy)]
struct Scratch {
    base: *mut f32,
    len: usize,
}

// SAFETY: threads use disjoint parts, one each.
unsafe impl Sync for Scratch {}

impl Scratch {
    fn of(&self, worker: usize) -> *mut f32 {
        self.base.wrapping_add(worker * self.len)
    }
}

/// Runs `plan` on inputs and outputs that were checked against its problem, in a workspace of at least its size, on a
/// machine that has its instruction set.
pub(super) fn run(plan: &CpuPlan, inputs: &Inputs<'_>, outputs: &mut Outputs<'_>, workspace: &mut Workspace) {
    let workers = plan.workers();
    let slots = plan.partial_slots();
    let memory = workspace.bytes_mut();
    let (floats, classes) = memory.split_at_mut(plan.float_bytes());
    let base: *mut f32 = floats.as_mut_ptr().cast();
    let scratch = Scratch { base, len: plan.scratch().len };
    let values = base.wrapping_add(workers * scratch.len);
    let max = values.wrapping_add(slots * plan.value_stride());
    let partials = Partials { values, max, sum: max.wrapping_add(slots) };
    let mask = match (&inputs.mask, plan.mask_classes()) {
        (Some(view), Some(sizes)) => Some(classify(*view, sizes, plan.block_k(), classes, workers == 1)),
        _ => None,
    };
    let lse = outputs.lse.as_deref_mut().map_or(std::ptr::null_mut(), <[f32]>::as_mut_ptr);
    let cx = Context { plan, inputs, out: &outputs.out, lse, partials, mask };
    let kernels = isa::kernels(plan.isa());

    // SAFETY: the machine has the instruction set; each worker has its own scratch memory of the plan's size; a task runs
    // once, and tasks write disjoint rows and partials.
    for_each_task(plan.tasks(), workers, |task, worker| unsafe {
        (kernels.task)(&cx, task, scratch.of(worker));
    });
    if slots > 0 {
        // SAFETY: as above, and every partial was stored by now. The first piece of a row range reduces all of it.
        for_each_task(plan.tasks(), workers, |task, worker| unsafe {
            if task.partial.is_some_and(|slot| slot.first_block == task.blocks.0) {
                (kernels.reduce)(&cx, task, scratch.of(worker));
            }
        });
    }
}

/// Calls `f(task, worker)` for every task, each worker on one thread, tasks handed out in order.
fn for_each_task(tasks: &[Task], workers: usize, f: impl Fn(&Task, usize) + Sync) {
    if workers == 1 {
        tasks.iter().for_each(|task| f(task, 0));
        return;
    }
    let next = AtomicUsize::new(0);
    (0..workers).into_par_iter().with_max_len(1).for_each(|worker| {
        while let Some(task) = tasks.get(next.fetch_add(1, Ordering::Relaxed)) {
            f(task, worker);
        }
    });
}
