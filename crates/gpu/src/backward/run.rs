//! Runs of the backward pass: the one place that gives its kernels their arguments.

use super::plan::{PortableBackwardPlan, Step};
use super::tensors::{GpuBackwardInputs, GpuGradients};
use crate::error::SessionError;
use crate::kernels::attend::{Attend, SEQUENCE_WORDS};
use crate::kernels::backward::d_bias::{MaskGradient, backward_bias};
use crate::kernels::backward::d_kv::backward_kv;
use crate::kernels::backward::d_q::backward_q;
use crate::kernels::backward::params::Backward;
use crate::kernels::backward::row_terms::row_terms;
use crate::kernels::backward::sum_rows::sum_rows;
use crate::launches::sequences;
use crate::shape::count;
use crate::tensors::{GpuMask, mask_kind};
use flashtile_core::inputs::alibi_stride;
use flashtile_core::plan::Unsupported;
use flashtile_kernel::{Device, DeviceMemory, HostAccess, LaunchError, ScalarType};

/// Memory that runs of a plan need beside their tensors. Runs follow each other in it.
#[derive(Debug)]
pub struct BackwardWorkspace<M> {
    sequences: M,
    neg_lse: M,
    delta: M,
    distance_sums: M,
    /// An element of f32 and u8, in the place of tensors that a problem lacks.
    absent: [M; 2],
}

impl<M: DeviceMemory> BackwardWorkspace<M> {
    /// New memory of a device for a plan, with the numbers of its sequences.
    ///
    /// # Errors
    /// The error that the device reports.
    pub fn new<D: HostAccess<Memory = M>>(device: &D, plan: &PortableBackwardPlan) -> Result<Self, D::Error> {
        let rows = plan.row_count();
        let f32s = |len: usize| device.uninit(ScalarType::F32, len.max(1));
        let words = SEQUENCE_WORDS as usize * plan.sequence_count().max(1);
        let mut new = Self {
            sequences: device.uninit(ScalarType::I32, words)?,
            neg_lse: f32s(rows)?,
            delta: f32s(rows)?,
            distance_sums: f32s(if plan.has.has_alibi { rows } else { 1 })?,
            absent: [f32s(1)?, device.uninit(ScalarType::U8, 1)?],
        };
        new.write(device, plan)?;
        Ok(new)
    }

    /// Writes all that runs read and no kernel writes.
    pub(crate) fn write<D: HostAccess<Memory = M>>(
        &mut self,
        device: &D,
        plan: &PortableBackwardPlan,
    ) -> Result<(), D::Error> {
        let numbers = sequences(plan.problem(), |_| 0);
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_ne_bytes()).collect();
        device.write(&mut self.sequences, 0, &bytes)?;
        let [zero, byte] = &mut self.absent;
        device.write(zero, 0, &0f32.to_ne_bytes())?;
        device.write(byte, 0, &[0])
    }
}

/// Strides as kernels take them.
fn wide([batch, head, row, _]: [usize; 4]) -> [u64; 3] {
    [batch, head, row].map(|n| n as u64)
}

/// The parameters of a run over tensors.
fn params<M: DeviceMemory>(
    plan: &PortableBackwardPlan,
    inputs: &GpuBackwardInputs<'_, M>,
    gradients: &GpuGradients<'_, M>,
) -> Result<(Attend, Backward), Unsupported> {
    let steps = |mask: Option<GpuMask<'_, M>>| mask.map_or([0; 4], |mask| mask.steps());
    let (mask, tree) = (steps(inputs.mask), steps(inputs.tree));
    let slopes = inputs.alibi_slopes.map_or(0, |list| list.len());
    let attend = Attend {
        q: wide(inputs.q.strides),
        mask: [mask[0], mask[1], mask[2]].map(|n| n as u64),
        mask_step: count("a mask's stride", mask[3])?,
        mask_kind: inputs.mask.map_or(0, |mask| mask_kind(mask.kind)),
        tree: tree[2] as u64,
        tree_step: count("a tree's stride", tree[3])?,
        alibi_stride: count("query heads", alibi_stride(slopes, inputs.q.shape[1]))?,
        ..plan.attend
    };
    let backward = Backward {
        k: wide(inputs.k.strides),
        v: wide(inputs.v.strides),
        out: wide(inputs.out.strides),
        d_out: wide(inputs.d_out.strides),
        d_q: wide(gradients.d_q.strides),
        d_k: wide(gradients.d_k.strides),
        d_v: wide(gradients.d_v.strides),
        kv_rows: plan.kv_rows,
        sequences: count("sequences", plan.sequence_count())?,
        scale: plan.problem().scale(),
        unused: 0,
    };
    Ok((attend, backward))
}

/// Returns true if all rows that kernels copy are multiples of 16 bytes at multiples of 16 bytes.
fn in_chunks<M: DeviceMemory>(inputs: &GpuBackwardInputs<'_, M>) -> bool {
    [&inputs.q, &inputs.k, &inputs.v, &inputs.d_out].into_iter().all(|tensor| {
        let bytes = tensor.shape[3] * tensor.view.element().bytes();
        bytes.is_multiple_of(16) && tensor.alignment() == 16
    })
}

/// A run: its parameters and tensors.
struct Run<'a, 'm, M> {
    plan: &'a PortableBackwardPlan,
    inputs: &'a GpuBackwardInputs<'m, M>,
    attend: Attend,
    backward: Backward,
    in_chunks: bool,
}

impl<'a, 'm, M: DeviceMemory> Run<'a, 'm, M> {
    fn new(
        plan: &'a PortableBackwardPlan,
        inputs: &'a GpuBackwardInputs<'m, M>,
        gradients: &GpuGradients<'_, M>,
    ) -> Result<Self, Unsupported> {
        let (attend, backward) = params(plan, inputs, gradients)?;
        Ok(Self { plan, inputs, attend, backward, in_chunks: in_chunks(inputs) })
    }

    /// Returns true if there are query rows.
    fn has_rows(&self) -> bool {
        let dims = self.plan.problem().dims();
        dims.batch * dims.q_heads > 0 && self.plan.sequence_count() > 0
    }

    /// The parameters of a step.
    fn attend(&self, step: &Step) -> Attend {
        Attend { tiles: step.tiles, ..self.attend }
    }
}

/// Launches the kernels of a plan over tensors that were checked against its problem.
///
/// # Errors
/// [`SessionError::Unsupported`] where a tensor's strides are too large, and [`SessionError::Launch`].
pub fn run<M: DeviceMemory, D: Device<Memory = M>>(
    device: &D,
    plan: &PortableBackwardPlan,
    inputs: &GpuBackwardInputs<'_, M>,
    gradients: &mut GpuGradients<'_, M>,
    workspace: &mut BackwardWorkspace<M>,
) -> Result<(), SessionError<D::Error>> {
    let run = Run::new(plan, inputs, gradients)?;
    if run.has_rows() {
        launch_terms(device, &run, workspace)?;
        launch_q(device, &run, gradients, workspace)?;
        launch_kv(device, &run, gradients, workspace)?;
    }
    launch_bias(device, &run, gradients, workspace)?;
    Ok(launch_sums(device, &run, gradients, workspace)?)
}

fn launch_terms<M: DeviceMemory, D: Device<Memory = M>>(
    device: &D,
    run: &Run<'_, '_, M>,
    workspace: &mut BackwardWorkspace<M>,
) -> Result<(), LaunchError<D::Error>> {
    let step = &run.plan.terms;
    let BackwardWorkspace { sequences, neg_lse, delta, absent: [f32s, _], .. } = workspace;
    row_terms::Call {
        out: run.inputs.out.view,
        d_out: run.inputs.d_out.view,
        lse: run.inputs.lse,
        d_lse: run.inputs.d_lse.unwrap_or_else(|| f32s.view()),
        sequences: sequences.view(),
        slopes: run.inputs.alibi_slopes.unwrap_or_else(|| f32s.view()),
        params: run.attend(step),
        backward: run.backward,
        neg_lse: neg_lse.view_mut(),
        delta: delta.view_mut(),
        has_alibi: run.plan.has.has_alibi,
        has_d_lse: run.inputs.d_lse.is_some(),
        groups: step.groups,
    }
    .launch_instance(device, &step.instance)
}

/// A call of a kernel that multiplies: the arguments that all of them have, and more.
macro_rules! backward_call {
    ($kernel:ident, $run:expr, $attend:expr, $groups:expr, $workspace:expr, { $($more:tt)* }) => {{
        let (run, inputs, has) = ($run, $run.inputs, $run.plan.has);
        let BackwardWorkspace { sequences, neg_lse, delta, absent: [f32s, bytes], .. } = $workspace;
        $kernel::Call {
            q: inputs.q.view,
            k: inputs.k.view,
            v: inputs.v.view,
            d_out: inputs.d_out.view,
            sequences: sequences.view(),
            slopes: inputs.alibi_slopes.unwrap_or_else(|| f32s.view()),
            mask: inputs.mask.map_or_else(|| bytes.view(), |mask| mask.bytes),
            tree: inputs.tree.map_or_else(|| bytes.view(), |tree| tree.bytes),
            neg_lse: neg_lse.view(),
            delta: delta.view(),
            params: $attend,
            backward: run.backward,
            in_chunks: run.in_chunks,
            has_softcap: has.has_softcap,
            has_alibi: has.has_alibi,
            has_mask: has.has_mask,
            has_tree_mask: has.has_tree_mask,
            groups: $groups,
            $($more)*
        }
    }};
}

fn launch_q<M: DeviceMemory, D: Device<Memory = M>>(
    device: &D,
    run: &Run<'_, '_, M>,
    gradients: &mut GpuGradients<'_, M>,
    workspace: &mut BackwardWorkspace<M>,
) -> Result<(), LaunchError<D::Error>> {
    let (step, d_q) = (&run.plan.q, gradients.d_q.view.reborrow());
    let BackwardWorkspace { distance_sums, .. } = workspace;
    let distance_sums = distance_sums.view_mut();
    backward_call!(backward_q, run, run.attend(step), step.groups, workspace, { d_q, distance_sums })
        .launch_instance(device, &step.instance)
}

fn launch_kv<M: DeviceMemory, D: Device<Memory = M>>(
    device: &D,
    run: &Run<'_, '_, M>,
    gradients: &mut GpuGradients<'_, M>,
    workspace: &BackwardWorkspace<M>,
) -> Result<(), LaunchError<D::Error>> {
    let (step, d_k, d_v) = (&run.plan.kv, gradients.d_k.view.reborrow(), gradients.d_v.view.reborrow());
    backward_call!(backward_kv, run, run.attend(step), step.groups, workspace, { d_k, d_v })
        .launch_instance(device, &step.instance)
}

/// Launches the gradient of the mask, where it is asked for.
fn launch_bias<M: DeviceMemory, D: Device<Memory = M>>(
    device: &D,
    run: &Run<'_, '_, M>,
    gradients: &mut GpuGradients<'_, M>,
    workspace: &BackwardWorkspace<M>,
) -> Result<(), SessionError<D::Error>> {
    let plan = run.plan;
    let (Some(d_bias), Some(mask), Some(tile)) = (&mut gradients.d_bias, run.inputs.mask, plan.tile().bias)
    else {
        return Ok(());
    };
    let (Some(instance), false) = (&plan.bias, d_bias.is_empty()) else { return Ok(()) };
    let [sequences, heads, rows, keys] = mask.shape;
    let tiles = count("tiles of a mask", rows.div_ceil(tile.rows()))?;
    let all = rows.div_ceil(tile.rows()).saturating_mul(keys.div_ceil(tile.block_rows()));
    let groups = [count("tiles of a mask", all)?, count("heads", heads)?, count("sequences", sequences)?];
    let of_mask = MaskGradient {
        shape: [groups[2], groups[1], count("query rows", rows)?, count("keys", keys)?],
        group: run.attend.group,
    };
    let (attend, d_bias) = (Attend { tiles, group: 1, ..run.attend }, d_bias.reborrow());
    let call = backward_call!(backward_bias, run, attend, groups, workspace, { of_mask, d_bias });
    Ok(call.launch_instance(device, instance)?)
}

fn launch_sums<M: DeviceMemory, D: Device<Memory = M>>(
    device: &D,
    run: &Run<'_, '_, M>,
    gradients: &mut GpuGradients<'_, M>,
    workspace: &BackwardWorkspace<M>,
) -> Result<(), LaunchError<D::Error>> {
    let BackwardWorkspace { sequences, delta, distance_sums, absent: [f32s, _], .. } = workspace;
    let lists = [(false, &mut gradients.d_sinks), (true, &mut gradients.d_alibi_slopes)];
    for (of_slopes, list) in lists {
        let Some(sums) = list else { continue };
        let groups = [sums.len() as u32, 1, 1];
        sum_rows::Call {
            lse: run.inputs.lse,
            d_lse: run.inputs.d_lse.unwrap_or_else(|| f32s.view()),
            delta: delta.view(),
            distance_sums: distance_sums.view(),
            sinks: run.inputs.sinks.unwrap_or_else(|| f32s.view()),
            sequences: sequences.view(),
            params: run.attend,
            backward: run.backward,
            sums: sums.reborrow(),
            of_slopes,
            has_sinks: run.inputs.sinks.is_some(),
            has_d_lse: run.inputs.d_lse.is_some(),
            groups,
        }
        .launch_instance(device, &run.plan.sums)?;
    }
    Ok(())
}
