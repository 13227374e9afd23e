//! The forward pass: lays out the workspace of a plan and hands its tasks to threads.

#![allow(unsafe_code)]

use crate::isa;
use crate::kernels::forward::state::{Context, Part, Partials, Storage};
use crate::kernels::forward::task::{reduce, task};
use crate::kernels::shared::mask;
use crate::kernels::shared::mat::{MatMut, RowMaxSum};
use crate::kernels::shared::score_task::RunInputs;
use crate::kernels::shared::threads::{Scratch, for_each};
use crate::plan::CpuPlan;
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
    // A part without pages has no keys to read.
    let inputs: Vec<Inputs<'_>> =
        plan.parts().iter().map(|part| inputs.part(part.key_part()).unwrap_or(*inputs)).collect();
    let parts = plan.parts().iter().zip(&inputs).map(|(problem, inputs)| Part {
        kernels: isa::kernels(plan.isa(), storage(&inputs.k), storage(&inputs.v)),
        run: RunInputs {
            problem,
            skip_tiles: plan.options().skip_tiles,
            block_k: plan.block_k(),
            token,
            inputs,
            scoring: Scoring::new(problem, inputs),
            mask,
        },
    });
    let cx = Context { plan, parts: parts.collect(), out: &outputs.out, lse, partials };

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
