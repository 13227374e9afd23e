//! Runs a plan: lays out the workspace and hands tasks to threads.

#![allow(unsafe_code)]

use crate::isa;
use crate::kernels::mask;
use crate::kernels::mat::{MatMut, RowMaxSum};
use crate::kernels::state::Storage;
use crate::kernels::state::{Context, Partials};
use crate::kernels::task::{reduce, task};
use crate::plan::CpuPlan;
use crate::workspace::Workspace;
use flashtile_core::codec::KvView;
use flashtile_core::inputs::{Inputs, Outputs};
use flashtile_core::isa::{FloatEnv, IsaToken};
use flashtile_core::scoring::Scoring;
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
    let stride = plan.value_stride();
    let memory = workspace.bytes_mut();
    let (floats, mask_tiles) = memory.split_at_mut(plan.float_bytes());
    let base: *mut f32 = floats.as_mut_ptr().cast();
    let scratch = Scratch { base, len: plan.scratch().len };
    let partial_out = base.wrapping_add(workers * scratch.len);
    let (count, max) = (plan.num_partials(), partial_out.wrapping_add(plan.num_partials() * stride));
    // SAFETY: in the plan's layout, the partials follow the scratch memory: outputs, then maxima, then sums.
    let partial_out = unsafe { MatMut::new(partial_out, stride, count, stride) };
    let partials = Partials { partial_out, max_sum: RowMaxSum { max, sum: max.wrapping_add(count) } };
    let mask = match (&inputs.mask, plan.mask_tile_shape()) {
        (Some(view), Some(sizes)) => {
            Some(mask::mask_tiles(*view, sizes, plan.block_k(), mask_tiles, workers == 1))
        }
        _ => None,
    };
    let lse = outputs.lse.as_deref_mut().map_or(std::ptr::null_mut(), <[f32]>::as_mut_ptr);
    // The machine has the plan's instruction set, except in tests, which emulate it.
    let token = IsaToken::at_most(plan.isa());
    token.count();
    let kernels = isa::kernels(plan.isa(), storage(&inputs.k), storage(&inputs.v));
    let scoring = Scoring::new(plan.problem(), inputs);
    let cx = Context { plan, kernels, token, inputs, scoring, out: &outputs.out, lse, partials, mask };

    // SAFETY: the machine has the instruction set.
    let enter = || unsafe { (cx.kernels.configure)() };
    for level in plan.levels() {
        // SAFETY: the machine has the instruction set, and the thread's matrix unit is configured; each worker has its own
        // scratch memory of the plan's size; a task runs once; tasks of a level write disjoint rows and partials, and only read
        // partials of earlier levels.
        for_each(&level.tasks, workers, enter, |unit, worker| unsafe { task(&cx, unit, scratch.of(worker)) });
        // SAFETY: as above, and every partial result of the level was stored by now.
        for_each(&level.reductions, workers, enter, |unit, worker| unsafe {
            reduce(&cx, unit, scratch.of(worker));
        });
    }
}

fn storage(of: &KvView<'_>) -> Storage {
    match of {
        KvView::Elements(view) => Storage::Elements(view.dtype()),
        KvView::Codes(_) => Storage::Codes,
    }
}

/// Calls `f(unit, worker)` for every unit of work. Each worker runs on one thread, which has called `enter` and is in the default
/// floating-point environment. Units are handed out in order.
fn for_each<T: Sync, G>(
    units: &[T],
    workers: usize,
    enter: impl Fn() -> G + Sync,
    f: impl Fn(&T, usize) + Sync,
) {
    let workers = workers.min(units.len());
    if workers <= 1 {
        let _entered = (FloatEnv::ieee(), enter());
        units.iter().for_each(|unit| f(unit, 0));
        return;
    }
    let next = AtomicUsize::new(0);
    (0..workers).into_par_iter().with_max_len(1).for_each(|worker| {
        // This is not around the parallel loop: a thread that waits for the loop may run work that others have queued.
        let _entered = (FloatEnv::ieee(), enter());
        while let Some(unit) = units.get(next.fetch_add(1, Ordering::Relaxed)) {
            f(unit, worker);
        }
    });
}
