//! The backward pass: lays out the workspace of a plan and hands its tasks to threads.

#![allow(unsafe_code)]

use crate::isa;
use crate::kernels::backward::bias::{BiasGradient, bias};
use crate::kernels::backward::state::{Context, RowTerms};
use crate::kernels::backward::task::{reduce, task};
use crate::kernels::shared::mask;
use crate::kernels::shared::score_task::{Query, RunInputs};
use crate::kernels::shared::threads::{Scratch, for_each};
use crate::plan::CpuBackwardPlan;
use crate::workspace::Workspace;
use flashtile_core::gradients::{BackwardInputs, Gradients, bias_shape};
use flashtile_core::isa::{FloatEnv, IsaToken};
use flashtile_core::scoring::Scoring;

/// Runs `plan` on inputs and gradients that were checked against its problem, in a workspace of at least its size, on a machine that has its
/// instruction set.
pub(crate) fn run(
    plan: &CpuBackwardPlan,
    inputs: &BackwardInputs<'_>,
    gradients: &mut Gradients<'_>,
    workspace: &mut Workspace,
) {
    let (workers, parts, problem) = (plan.workers(), plan.workspace_parts(), plan.problem());
    let floats = parts.floats().unwrap_or_else(|| unreachable!("a plan's workspace is addressable"));
    let (floats, mask_tiles) = workspace.bytes_mut().split_at_mut(4 * floats);
    let base: *mut f32 = floats.as_mut_ptr().cast();
    let scratch = Scratch::new(base, plan.layout().len);
    let neg_lse = base.wrapping_add(parts.scratch);
    let slope_sums = neg_lse.wrapping_add(parts.rows);
    let rows = RowTerms {
        neg_lse,
        delta: neg_lse.wrapping_add(plan.row_count()),
        slope_sums: if gradients.d_alibi_slopes.is_some() { slope_sums } else { std::ptr::null_mut() },
    };
    let mask = match (&inputs.forward.mask, plan.mask_tile_shape()) {
        (Some(view), Some(sizes)) => {
            Some(mask::mask_tiles(*view, sizes, plan.block_k(), mask_tiles, workers == 1))
        }
        _ => None,
    };
    // The machine has the plan's instruction set, except in tests, which emulate it.
    let token = IsaToken::at_most(plan.isa());
    token.count();
    let cx = Context {
        plan,
        kernels: isa::backward_kernels(plan.isa(), problem.dtype()),
        run: RunInputs {
            problem,
            skip_tiles: plan.options().skip_tiles,
            block_k: plan.block_k(),
            token,
            inputs: &inputs.forward,
            scoring: Scoring::new(problem, &inputs.forward),
            mask,
        },
        inputs,
        d_q: &gradients.d_q,
        d_k: &gradients.d_k,
        d_v: &gradients.d_v,
        rows,
        partials: slope_sums.wrapping_add(parts.slope_sums),
    };
    if !rows.slope_sums.is_null() {
        // SAFETY: the region of the workspace.
        unsafe { rows.slope_sums.write_bytes(0, parts.slope_sums) }
    }
    // SAFETY: the machine has the instruction set.
    let enter = || unsafe { (cx.kernels.configure)() };
    // SAFETY: the machine has the instruction set, and the thread's matrix unit is configured; each worker has its own scratch memory of the
    // plan's size; a range of rows, a task and a reduction run once, and write disjoint rows and partials; each phase reads what earlier ones
    // have written.
    unsafe {
        for_each(plan.row_ranges(), plan.threads(), enter, |range, _| (cx.kernels.row_terms)(&cx, *range));
        for level in plan.levels() {
            for_each(&level.tasks, workers, enter, |unit, worker| task(&cx, unit, scratch.of(worker)));
            for_each(&level.reductions, workers, enter, |unit, _| reduce(&cx, unit));
        }
    }
    if let (Some(d_bias), Some(shape)) = (gradients.d_bias.as_deref_mut(), bias_shape(&inputs.forward)) {
        d_bias.fill(0.0);
        let to = BiasGradient { data: d_bias.as_mut_ptr(), shape };
        // SAFETY: as above; tasks own disjoint elements.
        for_each(&plan.bias_tasks(shape), workers, enter, |unit, worker| unsafe {
            bias(&cx, to, unit, scratch.of(worker));
        });
    }
    let _env = FloatEnv::ieee();
    if let Some(d_sinks) = gradients.d_sinks.as_deref_mut() {
        // SAFETY: the row terms are filled.
        unsafe { sum_sinks(&cx, d_sinks) }
    }
    if let Some(d_slopes) = gradients.d_alibi_slopes.as_deref_mut() {
        // SAFETY: the sums of every chunk are stored.
        unsafe { sum_slopes(&cx, d_slopes) }
    }
}

/// `exp(sink - lse)` of a row, the probability of its sink; 0 without one.
fn sink_prob(cx: &Context<'_>, head: usize, index: usize) -> f64 {
    let lse = f64::from(cx.inputs.lse[index]);
    let sink = cx.run.inputs.sinks.map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[head]));
    if lse == f64::NEG_INFINITY { 0.0 } else { (sink - lse).exp() }
}

/// `-sum(exp(sink - lse) * delta)` over the rows of each head.
///
/// # Safety
/// The row terms are filled.
unsafe fn sum_sinks(cx: &Context<'_>, d_sinks: &mut [f32]) {
    for (head, to) in d_sinks.iter_mut().enumerate() {
        // SAFETY: the caller's contract.
        let delta = |index: usize| f64::from(unsafe { *cx.rows.delta.add(index) });
        let term = |index: usize| {
            let p = sink_prob(cx, head, index);
            if p == 0.0 { 0.0 } else { p * delta(index) }
        };
        *to = -rows_of(cx, head).map(term).sum::<f64>() as f32;
    }
}

/// Indices in lse of the rows of a head that belong to a sequence.
fn rows_of(cx: &Context<'_>, head: usize) -> impl Iterator<Item = usize> {
    let dims = cx.run.problem.dims();
    let of = move |s: &flashtile_core::problem::Sequence| {
        let first = (s.batch * dims.q_heads + head) * dims.q_len + s.q_start;
        first..first + s.q_len
    };
    cx.run.problem.sequences().iter().flat_map(of)
}

/// `-sum(d_score * distance)` of each slope: [`RowTerms::slope_sums`] over rows and chunks, whose distances are from the nearest visible key,
/// and what the distance of the query from that key adds.
///
/// # Safety
/// The row terms are filled, and the sums of every chunk are stored.
unsafe fn sum_slopes(cx: &Context<'_>, d_slopes: &mut [f32]) {
    let dims = cx.run.problem.dims();
    let is_shared = cx.run.scoring.alibi_stride == 0;
    let mut sums = vec![0.0f64; d_slopes.len()];
    for (index, sequence) in cx.run.problem.sequences().iter().enumerate() {
        for head in 0..dims.q_heads {
            let slope = if is_shared { head } else { index * dims.q_heads + head };
            for position in 0..sequence.q_len {
                let query = Query { index, sequence, position, head };
                // SAFETY: the caller's contract.
                sums[slope] -= unsafe { slope_sum(cx, &query) };
            }
        }
    }
    d_slopes.iter_mut().zip(sums).for_each(|(to, sum)| *to = sum as f32);
}

/// `sum(d_score * distance)` of a row.
///
/// # Safety
/// As [`sum_slopes`].
unsafe fn slope_sum(cx: &Context<'_>, query: &Query<'_>) -> f64 {
    let (plan, index) = (cx.plan, cx.row_index(query));
    let of_chunk = |chunk: usize| {
        // SAFETY: the caller's contract.
        f64::from(unsafe { *cx.rows.slope_sums.add(chunk * plan.row_count() + index) })
    };
    let sum: f64 = (0..plan.num_chunks(query.sequence)).map(of_chunk).sum();
    let shift = query.own_key().abs_diff(query.nearest(cx.run.problem));
    if shift == 0 || cx.inputs.lse[index] == f32::NEG_INFINITY {
        return sum;
    }
    // The sum of d_score over all keys of a row, whose p add up to 1 less that of the sink.
    // SAFETY: the caller's contract.
    let delta = f64::from(unsafe { *cx.rows.delta.add(index) });
    let d_lse = cx.inputs.d_lse.map_or(0.0, |d_lse| f64::from(d_lse[index]));
    let p = sink_prob(cx, query.head, index);
    let all = d_lse + if p == 0.0 { 0.0 } else { p * delta };
    sum + shift as f64 * all
}
