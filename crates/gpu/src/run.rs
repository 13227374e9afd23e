//! Runs of a problem, on every device: the one place that gives the kernels of attention their arguments.
//!
//! A device has memory and launches kernels ([`flashtile_kernel::Device`]). [`Workspace`] is the memory that runs of a plan need there
//! beside their tensors, and [`Runs`] launches.

use crate::codecs::head_factors_len;
use crate::error::SessionError;
use crate::kernels::attend::SEQUENCE_WORDS;
use crate::kernels::decode::decode;
use crate::kernels::merge::{Merge, merge};
use crate::kernels::prefill::prefill;
use crate::launches::{Attending, Features, Launches, Placed, Strides};
use crate::plan::Plan;
use crate::tensors::{GpuInputs, GpuOutputs, mask_kind};
use flashtile_core::inputs::{RunError, alibi_stride};
use flashtile_core::problem::KeyPart;
use flashtile_kernel::{Device, DeviceMemory, HostAccess, Instance, LaunchError, ScalarType, Span, View};

/// Memory of runs of a plan, which follow each other in it.
#[derive(Debug)]
pub struct Workspace<M> {
    /// Numbers of the [sequences](crate::launches::sequences).
    sequences: M,
    factors: [M; 2],
    codebooks: M,
    /// An element of f32, u32 and u8, in the place of tensors that a problem lacks.
    absent: [M; 3],
    partial_out: M,
    partial_max_sum: M,
    /// A logsumexp that nobody wants.
    unwanted: M,
}

impl<M> Workspace<M> {
    /// The memory of a plan, region by region: `region` is given where a region starts in
    /// [`Plan::regions`], and the type and number of its elements.
    ///
    /// # Errors
    /// The errors of `region`.
    pub fn new<E>(
        plan: &Plan,
        mut region: impl FnMut(usize, ScalarType, usize) -> Result<M, E>,
    ) -> Result<Self, E> {
        let (at, [partial_out, partial_max_sum]) = (plan.regions(), plan.launches().scratch());
        let [k, v] = &plan.tables().factors;
        let launches = 1 + plan.launches().kept().len();
        let sequences = (SEQUENCE_WORDS * plan.launches().shape().groups[2]) as usize * launches;
        let mut f32s = |at, len| region(at, ScalarType::F32, len);
        Ok(Self {
            factors: [f32s(at.factors[0], k.len())?, f32s(at.factors[1], v.len())?],
            codebooks: f32s(at.codebooks, plan.tables().codebooks.len())?,
            partial_out: f32s(at.partial_out, partial_out)?,
            partial_max_sum: f32s(at.partial_max_sum, partial_max_sum)?,
            unwanted: f32s(at.unwanted, 1)?,
            absent: [
                region(at.zeros, ScalarType::F32, 1)?,
                region(at.zeros, ScalarType::U32, 1)?,
                region(at.zeros, ScalarType::U8, 1)?,
            ],
            sequences: region(at.sequences, ScalarType::I32, sequences)?,
        })
    }
}

impl<M: DeviceMemory> Workspace<M> {
    /// New memory of a device for a plan, with its tables. The numbers of the sequences are not written yet.
    pub(crate) fn allocate<D: HostAccess<Memory = M>>(device: &D, plan: &Plan) -> Result<Self, D::Error> {
        let mut new = Self::new(plan, |_, element, len| device.uninit(element, len.max(1)))?;
        let (tables, [k, v], [f32s, u32s, u8s]) = (plan.tables(), &mut new.factors, &mut new.absent);
        let lists = [
            (k, &tables.factors[0][..]),
            (v, &tables.factors[1]),
            (&mut new.codebooks, &tables.codebooks),
            (f32s, &[0.0]),
            (u32s, &[0.0]),
        ];
        for (memory, list) in lists {
            let bytes: Vec<u8> = list.iter().flat_map(|x| x.to_ne_bytes()).collect();
            device.write(memory, 0, &bytes)?;
        }
        device.write(u8s, 0, &[0])?;
        Ok(new)
    }
}

/// Runs of a plan on a device.
#[derive(Debug)]
pub struct Runs<M> {
    workspace: Workspace<M>,
    /// Of each launch, the layout of the last run's tensors, which the next layer's tensors have too, whether keys were centered, and the
    /// parameters for them.
    last: Vec<Option<(Strides, bool, Placed)>>,
}

impl<M: DeviceMemory> Runs<M> {
    /// Runs in a workspace.
    #[must_use]
    pub const fn new(workspace: Workspace<M>) -> Self {
        Self { workspace, last: Vec::new() }
    }

    /// Writes the numbers of the sequences.
    pub(crate) fn write_sequences<D: HostAccess<Memory = M>>(
        &mut self,
        device: &D,
        numbers: &[i32],
    ) -> Result<(), D::Error> {
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_ne_bytes()).collect();
        device.write(&mut self.workspace.sequences, 0, &bytes)
    }

    /// Launches the kernels of a plan over tensors that fit its problem. Keys of cached sequences lie where `inputs.tables` says, or,
    /// without, each sequence has the one page that its numbers in the workspace say.
    ///
    /// # Errors
    /// [`SessionError::Unsupported`] where a tensor's strides are too large, and [`SessionError::Launch`].
    pub fn run<D: Device<Memory = M>>(
        &mut self,
        device: &D,
        launches: &Launches,
        inputs: &GpuInputs<'_, M>,
        outputs: &mut GpuOutputs<'_, M>,
    ) -> Result<(), SessionError<D::Error>> {
        let (has, shape) = (launches.features(), launches.shape());
        if shape.rows.contains(&0) || shape.groups.contains(&0) {
            return Ok(());
        }
        let kernels = launches.kernels();
        let all = std::iter::once((KeyPart::All, &kernels.attend));
        let all = all.chain(launches.kept().iter().map(|launch| (launch.part, &launch.kernel)));
        self.last.resize(1 + launches.kept().len(), None);
        for (index, (part, kernel)) in all.enumerate() {
            let Some(inputs) = inputs.part(part) else {
                return Err(RunError::Missing { tensor: "kept" }.into());
            };
            let placed = self.place(index, launches, &inputs, outputs)?;
            let launch = Launch { index, kernel, placed: &placed, is_split: kernels.merge.is_some() };
            attend(device, launches, &launch, &mut self.workspace, &inputs, outputs)?;
        }
        let Some((merge, (_, _, placed))) = kernels.merge.as_ref().zip(self.last[0].as_ref()) else {
            return Ok(());
        };
        let params = (placed.merge, has, shape.rows);
        Ok(merge_partials(device, merge, params, &mut self.workspace, inputs.sinks, outputs)?)
    }

    /// The parameters of a launch over tensors.
    fn place<E>(
        &mut self,
        index: usize,
        launches: &Launches,
        inputs: &GpuInputs<'_, M>,
        outputs: &GpuOutputs<'_, M>,
    ) -> Result<Placed, SessionError<E>> {
        let (strides, centered) = (strides(inputs, outputs), inputs.k.means.is_some());
        // Other lengths of sequences change nothing but their numbers in the workspace.
        match &self.last[index] {
            Some((last, of, placed)) if *last == strides && *of == centered => return Ok(*placed),
            _ => self.last[index] = None,
        }
        let placed = match index.checked_sub(1) {
            None => launches.place(&strides, centered)?,
            Some(kept) => launches.place_kept(kept, &strides, centered)?,
        };
        self.last[index] = Some((strides, centered, placed));
        Ok(placed)
    }
}

/// Where tensors lie.
fn strides<M: DeviceMemory>(inputs: &GpuInputs<'_, M>, outputs: &GpuOutputs<'_, M>) -> Strides {
    let rows = |[batch, head, row, _]: [usize; 4]| [batch, head, row];
    let mut strides = Strides {
        q: rows(inputs.q.strides),
        out: rows(outputs.out.strides),
        k: inputs.k.strides,
        v: inputs.v.strides,
        aligned: inputs.k.alignment().min(inputs.v.alignment()),
        rows: inputs.k.shape[2],
        k_factors: inputs.k.factors.map_or(0, |_| head_factors_len(inputs.k.codec, inputs.k.shape[3])),
        ..Strides::default()
    };
    if let Some(tables) = &inputs.tables {
        // A batch without tokens has tables without entries.
        strides.pages = Some([tables.page_size.max(1), tables.width.max(1)]);
        strides.ring = tables.wraps;
    }
    if let Some(mask) = &inputs.mask {
        strides.mask = mask.steps();
        strides.mask_kind = mask_kind(mask.kind);
    }
    let slopes = inputs.alibi_slopes.map_or(0, |list| list.len());
    strides.alibi = alibi_stride(slopes, inputs.q.shape[1]);
    if let Some(tree) = &inputs.tree {
        let [_, _, row, step] = tree.steps();
        strides.tree = [row, step];
    }
    strides
}

/// One launch of the kernels that compute rows, or partial results of them.
struct Launch<'a> {
    /// Its place among these launches.
    index: usize,
    kernel: &'a Attending,
    placed: &'a Placed,
    /// True if `merge` follows.
    is_split: bool,
}

fn attend<M: DeviceMemory, D: Device<Memory = M>>(
    device: &D,
    launches: &Launches,
    launch: &Launch<'_>,
    workspace: &mut Workspace<M>,
    inputs: &GpuInputs<'_, M>,
    outputs: &mut GpuOutputs<'_, M>,
) -> Result<(), LaunchError<D::Error>> {
    let (has, shape, placed) = (launches.features(), launches.shape(), launch.placed);
    let Workspace { sequences, factors, codebooks, absent, partial_out, partial_max_sum, unwanted } =
        workspace;
    let ([f32s, u32s, bytes], [k_factors, v_factors]) =
        (absent.each_ref().map(M::view), factors.each_ref().map(M::view));
    let Span { element, offset, .. } = sequences.view().span();
    let len = (SEQUENCE_WORDS * shape.groups[2]) as usize;
    let sequences = View::new(&*sequences, Span { element, offset: offset + launch.index * len, len });
    // Launches over kept tokens have one split.
    let splits = if launch.index == 0 { shape.groups[1] } else { 1 };
    let groups = [shape.groups[0], splits, shape.groups[2]];
    let (mut out, with_lse) = (outputs.out.view.reborrow(), outputs.lse.is_some());
    let mut lse = outputs.lse.as_mut().map_or_else(|| unwanted.view_mut(), |lse| lse.reborrow());
    let (sinks, k_factors) = (inputs.sinks.unwrap_or(f32s), inputs.k.factors.unwrap_or(k_factors));
    // A call of `prefill` or `decode`: the arguments that both have, and more.
    macro_rules! attend {
        ($kernel:ident { $($more:tt)* }) => {
            $kernel::Call {
                q: inputs.q.view,
                k: inputs.k.bytes,
                v: inputs.v.bytes,
                table: inputs.tables.map_or(u32s, |tables| tables.table),
                sequences,
                slopes: inputs.alibi_slopes.unwrap_or(f32s),
                mask: inputs.mask.map_or(bytes, |mask| mask.bytes),
                tree: inputs.tree.map_or(bytes, |tree| tree.bytes),
                codebooks: codebooks.view(),
                means: inputs.k.means.unwrap_or(f32s),
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
                groups,
                $($more)*
            }
        };
    }
    let is_split = launch.is_split;
    match launch.kernel {
        Attending::Prefill(instance) => {
            let (output, out, lse) = (placed.merge, out.reborrow(), lse.reborrow());
            // With splits, `merge` adds the sinks and writes the logsumexps.
            let (has_sinks, with_lse) = (has.has_sinks && !is_split, with_lse && !is_split);
            attend!(prefill { k_factors, v_factors, sinks, output, out, lse, has_sinks, with_lse, is_split })
                .launch_instance(device, instance)
        }
        Attending::Decode(instance) => {
            attend!(decode { factors: k_factors }).launch_instance(device, instance)
        }
    }
}

fn merge_partials<M: DeviceMemory, D: Device<Memory = M>>(
    device: &D,
    instance: &Instance,
    (params, has, groups): (Merge, Features, [u32; 3]),
    workspace: &mut Workspace<M>,
    sinks: Option<View<'_, M>>,
    outputs: &mut GpuOutputs<'_, M>,
) -> Result<(), LaunchError<D::Error>> {
    let Workspace {
        factors: [_, factors], absent: [f32s, ..], partial_out, partial_max_sum, unwanted, ..
    } = workspace;
    let (out, with_lse) = (outputs.out.view.reborrow(), outputs.lse.is_some());
    let lse = outputs.lse.as_mut().map_or_else(|| unwanted.view_mut(), |lse| lse.reborrow());
    merge::Call {
        partial_out: partial_out.view(),
        partial_max_sum: partial_max_sum.view(),
        factors: factors.view(),
        sinks: sinks.unwrap_or_else(|| f32s.view()),
        params,
        out,
        lse,
        has_sinks: has.has_sinks,
        with_lse,
        has_shift: has.has_alibi,
        groups,
    }
    .launch_instance(device, instance)
}
