//! The forward pass: lays out the workspace of a plan and hands its tasks to threads.

#![allow(unsafe_code)]

use crate::isa;
use crate::kernels::forward::state::{Context, Part, Partials, Storage};
use crate::kernels::forward::task::{reduce, task};
use crate::kernels::shared::mask;
use crate::kernels::shared::mat::{MatMut, RowMaxSum};
use crate::kernels::shared::score_task::RunInputs;
use crate::kernels::shared::threads::{Scratch, for_each};
use crate::plan::{CpuPlan, MAX_PARTS};
use crate::workspace::Workspace;
use flashtile_core::codec::KvView;
use flashtile_core::inputs::{Inputs, Outputs};
use flashtile_core::isa::IsaToken;
use flashtile_core::scoring::Scoring;

/// Runs `plan` on inputs and outputs that were checked against its problem, in a workspace of at least its size, on a
/// machine that has its instruction set.
pub(crate) fn run(plan: &CpuPlan, inputs: &Inputs<'_>, outputs: &mut Outputs<'_>, workspace: &mut Workspace) {
    let workers = plan.workers();
    let stride = plan.value_stride();
    let memory = workspace.bytes_mut();
    let (floats, mask_tiles) = memory.split_at_mut(plan.float_bytes());
    let base: *mut f32 = floats.as_mut_ptr().cast();
    let scratch = Scratch::new(base, plan.scratch().len);
    let partial_out = base.wrapping_add(workers * plan.scratch().len);
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
    // In arrays, so that a run allocates nothing. A part without pages has no keys to read; those after the last are not read.
    let part_of = |n: usize| plan.parts().get(n).unwrap_or(&plan.parts()[0]);
    let inputs: [Inputs<'_>; MAX_PARTS] =
        std::array::from_fn(|n| inputs.part(part_of(n).key_part()).unwrap_or(*inputs));
    let parts: [Part<'_>; MAX_PARTS] = std::array::from_fn(|n| Part {
        kernels: isa::kernels(plan.isa(), storage(&inputs[n].k), storage(&inputs[n].v)),
        run: RunInputs {
            problem: part_of(n),
            skip_tiles: plan.options().skip_tiles,
            block_k: plan.block_k(),
            token,
            inputs: &inputs[n],
            scoring: Scoring::new(part_of(n), &inputs[n]),
            mask,
        },
    });
    let cx = Context { plan, parts: &parts[..plan.parts().len()], out: &outputs.out, lse, partials };

    // SAFETY: the machine has the instruction set.
    let enter = || unsafe { (cx.parts[0].kernels.configure)() };
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
