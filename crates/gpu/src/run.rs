//! Runs of a problem, on every device: the one place that gives the kernels of attention their arguments.
//!
//! A device has memory and launches kernels ([`flashtile_kernel::Device`]). [`Tables`] and [`Launches::scratch`] say what a run needs there
//! beside its tensors, [`Workspace`] is that memory, and [`run`] launches.

use crate::codecs::{codebooks, factors};
use crate::kernels::decode::decode;
use crate::kernels::merge::merge;
use crate::kernels::prefill::prefill;
use crate::launches::{DecodeKernels, Kernels, Launches, Placed};
use flashtile_core::problem::Problem;
use flashtile_kernel::{Device, DeviceMemory, Instance, LaunchError, View, ViewMut};

/// What kernels look up for the codecs of a problem. Each list has a number at least.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Tables {
    /// Signs and root of the rotation of keys, and of that of values.
    pub factors: [Vec<f32>; 2],
    /// Codebooks of mlx-native.
    pub codebooks: Vec<f32>,
}

impl Tables {
    /// The tables of a problem.
    #[must_use]
    pub fn of(problem: &Problem) -> Self {
        let (dims, k, v) = (problem.dims(), problem.k_codec(), problem.v_codec());
        Self {
            factors: [factors(k, dims.head_dim), factors(v, dims.value_dim)],
            codebooks: codebooks(k, v).0,
        }
    }
}

/// Memory of runs, which follow each other in it.
#[derive(Debug)]
#[allow(clippy::exhaustive_structs)]
pub struct Workspace<'a, M> {
    /// Numbers of the [sequences](crate::launches::sequences), i32.
    pub sequences: View<'a, M>,
    /// [`Tables::factors`].
    pub factors: [View<'a, M>; 2],
    /// [`Tables::codebooks`].
    pub codebooks: View<'a, M>,
    /// Any element at least of f32, u32 and u8, in the place of tensors that a problem lacks.
    pub absent: [View<'a, M>; 3],
    /// f32, as many as the first of [`Launches::scratch`].
    pub partial_out: &'a mut M,
    /// f32, as many as the second.
    pub partial_max_sum: &'a mut M,
}

/// The tensors of a run.
#[derive(Debug)]
#[allow(clippy::exhaustive_structs)]
pub struct Operands<'a, M> {
    /// Query.
    pub q: View<'a, M>,
    /// Bytes of keys, or of pages of keys.
    pub k: View<'a, M>,
    /// Bytes of values, or of pages of values.
    pub v: View<'a, M>,
    /// Block table, u32; of keys in pages.
    pub table: Option<View<'a, M>>,
    /// Means `[kv_heads, head_dim]` of centered keys, f32.
    pub means: Option<View<'a, M>>,
    /// ALiBi slopes, f32.
    pub slopes: Option<View<'a, M>>,
    /// Bytes of the mask.
    pub mask: Option<View<'a, M>>,
    /// Bytes of the tree mask.
    pub tree: Option<View<'a, M>>,
    /// Sinks, f32.
    pub sinks: Option<View<'a, M>>,
    /// Output.
    pub out: ViewMut<'a, M>,
    /// Logsumexp, f32; any element where it is not wanted.
    pub lse: ViewMut<'a, M>,
    /// Whether the logsumexp is written.
    pub with_lse: bool,
}

/// Launches the kernels of a problem over tensors that lie as `placed` says.
///
/// # Errors
/// [`LaunchError`].
pub fn run<D: Device>(
    device: &D,
    launches: &Launches,
    placed: &Placed,
    workspace: Workspace<'_, D::Memory>,
    operands: Operands<'_, D::Memory>,
) -> Result<(), LaunchError<D::Error>>
where
    D::Memory: DeviceMemory,
{
    let shape = launches.shape();
    if shape.rows.contains(&0) || shape.groups.contains(&0) {
        return Ok(());
    }
    match launches.kernels() {
        Kernels::Prefill(instance) => run_prefill(device, launches, instance, placed, workspace, operands),
        Kernels::Decode(kernels) => run_decode(device, launches, kernels, placed, workspace, operands),
    }
}

fn run_prefill<D: Device>(
    device: &D,
    launches: &Launches,
    instance: &Instance,
    placed: &Placed,
    workspace: Workspace<'_, D::Memory>,
    operands: Operands<'_, D::Memory>,
) -> Result<(), LaunchError<D::Error>>
where
    D::Memory: DeviceMemory,
{
    let (has, [f32s, u32s, bytes]) = (launches.features(), workspace.absent);
    prefill::Call {
        q: operands.q,
        k: operands.k,
        v: operands.v,
        table: operands.table.unwrap_or(u32s),
        sequences: workspace.sequences,
        slopes: operands.slopes.unwrap_or(f32s),
        mask: operands.mask.unwrap_or(bytes),
        tree: operands.tree.unwrap_or(bytes),
        sinks: operands.sinks.unwrap_or(f32s),
        params: placed.attend,
        output: placed.merge,
        out: operands.out,
        lse: operands.lse,
        paging: placed.paging,
        row_align: placed.row_align,
        has_softcap: has.has_softcap,
        has_alibi: has.has_alibi,
        has_mask: has.has_mask,
        has_tree_mask: has.has_tree_mask,
        has_sinks: has.has_sinks,
        with_lse: operands.with_lse,
        groups: launches.shape().groups,
    }
    .launch_instance(device, instance)
}

fn run_decode<D: Device>(
    device: &D,
    launches: &Launches,
    kernels: &DecodeKernels,
    placed: &Placed,
    workspace: Workspace<'_, D::Memory>,
    operands: Operands<'_, D::Memory>,
) -> Result<(), LaunchError<D::Error>>
where
    D::Memory: DeviceMemory,
{
    let (has, shape) = (launches.features(), launches.shape());
    let Workspace { partial_out, partial_max_sum, absent: [f32s, u32s, bytes], .. } = workspace;
    let [k_factors, v_factors] = workspace.factors;
    decode::Call {
        q: operands.q,
        k: operands.k,
        v: operands.v,
        table: operands.table.unwrap_or(u32s),
        sequences: workspace.sequences,
        factors: k_factors,
        codebooks: workspace.codebooks,
        means: operands.means.unwrap_or(f32s),
        slopes: operands.slopes.unwrap_or(f32s),
        mask: operands.mask.unwrap_or(bytes),
        tree: operands.tree.unwrap_or(bytes),
        params: placed.attend,
        partial_out: partial_out.view_mut(),
        partial_max_sum: partial_max_sum.view_mut(),
        paging: placed.paging,
        row_align: placed.row_align,
        has_softcap: has.has_softcap,
        has_alibi: has.has_alibi,
        has_mask: has.has_mask,
        has_tree_mask: has.has_tree_mask,
        has_k_mean: placed.has_k_mean,
        groups: shape.groups,
    }
    .launch_instance(device, &kernels.decode)?;
    merge::Call {
        partial_out: partial_out.view(),
        partial_max_sum: partial_max_sum.view(),
        factors: v_factors,
        sinks: operands.sinks.unwrap_or(f32s),
        params: placed.merge,
        out: operands.out,
        lse: operands.lse,
        has_sinks: has.has_sinks,
        with_lse: operands.with_lse,
        has_shift: has.has_alibi,
        groups: shape.rows,
    }
    .launch_instance(device, &kernels.merge)
}
