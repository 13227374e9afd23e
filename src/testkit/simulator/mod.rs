//! Attention by the kernels of the kernel language on their simulator.

mod natives;

use super::machine::{Machine, Values, blank};
use super::{Accumulation, NotRun, Ran, Runner};
use crate::kernels::plan::{Places, Plan, Refused, Tensors, Tile, codebooks, factors, sequences};
use crate::problem::Sequence;
use crate::{Dtype, Inputs, KvView, MaskKind, MaskView, Outputs, Problem, TensorView};
use flashtile_kernel::simulator::{Memory, Simulator};
use flashtile_kernel::{Device, Instance, LaunchError, ScalarType, bf16, f16};
pub(crate) use natives::find;
use natives::{CODECS, DIMS};
use std::collections::HashSet;
use std::ops::Range;

/// What rows of pages are padded to, in bytes.
const ALIGNED: usize = 16;

/// Runs problems on the simulator, with scratch memory that nothing was written to and padding of keys and values that cannot be read
/// without a fault.
///
/// The simulator runs native code, of which there is some for dimensions 64 and 128, elements of the dtype of q and a few codecs;
/// other problems are unsupported.
#[derive(Debug, Clone, Copy)]
pub struct SimulatorRunner {
    pub(crate) tile: Tile,
    /// What rows are said to be aligned to, at most.
    pub(crate) aligned: usize,
    /// Whether pages of codes start at multiples of [`ALIGNED`] bytes, whatever their size.
    pub(crate) padded: bool,
    /// The instance with native code.
    pub(crate) find: fn(&Instance) -> Option<Instance>,
    most_scores: u64,
}

impl Default for SimulatorRunner {
    fn default() -> Self {
        Self::new()
    }
}

impl SimulatorRunner {
    /// Two SIMD groups of a group of threads and two parts of the keys, so that both merges take place.
    #[must_use]
    pub fn new() -> Self {
        let tile = Tile { rows: 1, keys: 1, simds: 2, parts: 2 };
        Self { tile, aligned: ALIGNED, padded: true, find, most_scores: u64::MAX }
    }

    /// With a tile and native code of the caller's, for rows and pages as they lie.
    #[doc(hidden)]
    #[must_use]
    pub const fn of(tile: Tile, find: fn(&Instance) -> Option<Instance>) -> Self {
        Self { tile, aligned: ALIGNED, padded: false, find, most_scores: u64::MAX }
    }

    /// The same, with pages of codes that start at multiples of 16 bytes, whatever their size.
    #[doc(hidden)]
    #[must_use]
    pub const fn padded(mut self) -> Self {
        self.padded = true;
        self
    }

    /// The same, taking no problem of more scores: the simulator computes ten to a hundred thousand a second.
    #[must_use]
    pub const fn at_most(mut self, scores: u64) -> Self {
        self.most_scores = scores;
        self
    }
}

/// Why there is no native code for a problem.
fn no_native(problem: &Problem, paged: bool) -> String {
    let dims = problem.dims();
    let codecs = CODECS.map(|[k, v]| if k == v { k.to_string() } else { format!("{k}+{v}") });
    format!(
        "the simulator has no native code: q {}, keys {} of {} and values {} of {}{}, expected elements of the dtype of q or {}, of {}{}",
        problem.dtype(),
        problem.k_codec(),
        dims.head_dim,
        problem.v_codec(),
        dims.value_dim,
        if paged { " in pages" } else { "" },
        codecs.join(", "),
        DIMS.map(|dim| dim.to_string()).join(" or "),
        if paged { ", a sequence to a page" } else { "" },
    )
}

/// Rows of a tensor, one after another in the order batch entry, head, row.
fn bytes_of(view: &TensorView<'_>) -> Vec<u8> {
    let [batch, heads, rows, dim] = view.shape();
    let mut bytes = Vec::with_capacity(batch * heads * rows * dim * view.dtype().bytes());
    for place in 0..batch * heads * rows {
        bytes.extend_from_slice(view.row_bytes([place / rows / heads, place / rows % heads, place % rows]));
    }
    bytes
}

/// Keys or values as bytes, and the strides of their entries, heads and rows.
fn side(view: &KvView<'_>, padded: bool) -> (Values, [usize; 3]) {
    let [entries, heads, rows, dim] = view.shape();
    match view {
        KvView::Elements(view) => {
            let row = dim * view.dtype().bytes();
            (Values::U8(bytes_of(view)), [heads * rows * row, rows * row, row])
        }
        KvView::Codes(codes) => {
            let bytes = if entries * heads > 0 { codes.page(0, 0).len() } else { 0 };
            let page = if padded { bytes.next_multiple_of(ALIGNED) } else { bytes };
            let mut pages = Vec::with_capacity(entries * heads * page);
            for place in 0..entries * heads {
                pages.extend_from_slice(codes.page(place / heads, place % heads));
                pages.resize((place + 1) * page, 0xFF);
            }
            (Values::U8(pages), [heads * page, page, 0])
        }
    }
}

/// Batch entries or pages, and rows of them, that hold a token.
fn held(problem: &Problem, inputs: &Inputs<'_>) -> HashSet<(usize, usize)> {
    let place = |index: usize, s: &Sequence, position: usize| match inputs.tables {
        Some(tables) => tables.locate(index, position),
        None => Some((s.batch, s.kv_start + position)),
    };
    let sequences = problem.sequences().iter().enumerate();
    sequences.flat_map(|(index, s)| (0..s.kv_len).filter_map(move |at| place(index, s, at))).collect()
}

/// The bytes of keys or values at these strides that are no token's.
fn padding(view: &KvView<'_>, strides: [usize; 3], held: &HashSet<(usize, usize)>) -> Vec<Range<usize>> {
    let [entries, heads, rows, _] = view.shape();
    let mut bytes = Vec::new();
    for (entry, head) in (0..entries).flat_map(|entry| (0..heads).map(move |head| (entry, head))) {
        let start = entry * strides[0] + head * strides[1];
        let unused = (0..rows).filter(|row| !held.contains(&(entry, *row)));
        match view {
            KvView::Elements(_) => bytes.extend(unused.map(|row| {
                let at = start + row * strides[2];
                at..at + strides[2]
            })),
            KvView::Codes(codes) => {
                for place in unused.flat_map(|row| codes.coder().format().places(rows, row..row + 1)) {
                    bytes.push(start + place.start..start + place.end);
                }
                bytes.push(start + codes.page(entry, head).len()..start + strides[1]);
            }
        }
    }
    bytes
}

/// A mask as bytes, its strides in elements and its kind.
fn mask_of(mask: &MaskView<'_>) -> (Vec<u8>, [usize; 4], u32) {
    let shape = mask.shape();
    let [batch, heads, rows, keys] = shape;
    let mut bytes = Vec::new();
    for at in 0..batch * heads * rows * keys {
        let place = [at / keys / rows / heads, at / keys / rows % heads, at / keys % rows, at % keys];
        let bias = mask.bias(place);
        match mask.kind() {
            MaskKind::Bool => bytes.push(u8::from(bias == 0.0)),
            MaskKind::Additive(Dtype::F32) => bytes.extend(bias.to_le_bytes()),
            MaskKind::Additive(Dtype::F16) => bytes.extend(f16::from_f32(bias).to_le_bytes()),
            MaskKind::Additive(Dtype::BF16) => bytes.extend(bf16::from_f32(bias).to_le_bytes()),
        }
    }
    let kind = match mask.kind() {
        MaskKind::Additive(Dtype::F32) => 0,
        MaskKind::Additive(Dtype::F16) => 1,
        MaskKind::Additive(Dtype::BF16) => 2,
        MaskKind::Bool => 3,
    };
    let dense = [heads * rows * keys, rows * keys, keys, 1];
    let strides = std::array::from_fn(|n| if shape[n] == 1 { 0 } else { dense[n] });
    (bytes, strides, kind)
}

/// The largest power of two up to `most` that divides all of them.
fn alignment(most: usize, strides: &[usize]) -> usize {
    let mut align = most;
    while strides.iter().any(|stride| !stride.is_multiple_of(align)) {
        align /= 2;
    }
    align
}

/// A problem laid out in memories of a device that are still to be made.
#[derive(Debug)]
pub(crate) struct Laid {
    pub(crate) plan: Plan,
    /// Whether keys are found through a table of pages.
    paged: bool,
    /// From entry to entry, head to head and row to row of keys and of values, in bytes.
    strides: [[usize; 3]; 2],
    /// q, k, v, table, sequences, factors of keys and of values, codebooks, means, slopes, mask, tree, sinks.
    pub(crate) inputs: [Values; 13],
    /// Type and elements of sums, tops, out, lse.
    pub(crate) outputs: [(ScalarType, usize); 4],
}

/// How a problem is laid out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    pub(crate) tile: Tile,
    pub(crate) aligned: usize,
    pub(crate) padded: bool,
}

impl Laid {
    /// Lays out inputs that are the problem's.
    ///
    /// # Errors
    /// [`Refused`].
    pub(crate) fn new(problem: &Problem, inputs: &Inputs<'_>, layout: Layout) -> Result<Self, Refused> {
        let dims = problem.dims();
        let ((k, k_strides), (v, v_strides)) =
            (side(&inputs.k, layout.padded), side(&inputs.v, layout.padded));
        let [_, heads, rows, _] = inputs.q.shape();
        let mut places = Places {
            q: [heads * rows * dims.head_dim, rows * dims.head_dim, dims.head_dim],
            out: [heads * rows * dims.value_dim, rows * dims.value_dim, dims.value_dim],
            k: k_strides,
            v: v_strides,
            aligned: [k_strides, v_strides].map(|strides| alignment(layout.aligned, &strides)),
            rows: inputs.k.shape()[2],
            ..Places::default()
        };
        let mut table = vec![0u32];
        let mut only = Vec::new();
        if let Some(tables) = inputs.tables {
            if tables.width == 1 && !tables.wraps {
                only.clone_from(&tables.table);
            } else {
                places.pages = Some([tables.page, tables.width]);
                table.clone_from(&tables.table);
            }
        }
        let mut mask = vec![0];
        if let Some(view) = &inputs.mask {
            (mask, places.mask, places.mask_kind) = mask_of(view);
        }
        let mut tree = vec![0];
        if let Some(view) = &inputs.tree {
            let (bytes, strides, _) = mask_of(view);
            (tree, places.tree) = (bytes, [strides[2], strides[3]]);
        }
        let means = match &inputs.k {
            KvView::Codes(codes) => codes.means().map(<[f32]>::to_vec),
            KvView::Elements(_) => None,
        };
        let plan = Plan::new(problem, &places, means.is_some(), layout.tile)?;
        let page =
            |index: usize| only.get(index).map_or(problem.sequences()[index].batch, |page| *page as usize);
        let [sums, tops] = plan.scratch();
        let count = dims.batch * dims.q_heads * dims.q_len;
        let or_zero = |list: Option<&[f32]>| Values::F32(list.unwrap_or(&[0.0]).to_vec());
        let inputs = [
            Values::elements(problem.dtype(), &bytes_of(&inputs.q)),
            k,
            v,
            Values::U32(table),
            Values::I32(sequences(problem, page)),
            Values::F32(factors(problem.k_codec(), dims.head_dim)),
            Values::F32(factors(problem.v_codec(), dims.value_dim)),
            Values::F32(codebooks(problem.k_codec(), problem.v_codec()).0),
            or_zero(means.as_deref()),
            or_zero(inputs.alibi_slopes),
            Values::U8(mask),
            Values::U8(tree),
            or_zero(inputs.sinks),
        ];
        let element = match problem.dtype() {
            Dtype::F32 => ScalarType::F32,
            Dtype::F16 => ScalarType::F16,
            Dtype::BF16 => ScalarType::Bf16,
        };
        let f32 = ScalarType::F32;
        let outputs =
            [(f32, sums.max(1)), (f32, tops.max(1)), (element, count * dims.value_dim), (f32, count)];
        Ok(Self { plan, paged: places.pages.is_some(), strides: [k_strides, v_strides], inputs, outputs })
    }

    /// Launches the kernels on a device with memories of `M` that were made of `inputs` and for `outputs`.
    ///
    /// # Errors
    /// [`LaunchError`].
    pub(crate) fn launch<M: Machine, D: Device<Memory = M::Memory>>(
        plan: &Plan,
        device: &D,
        inputs: &[M::Memory; 13],
        outputs: &mut [M::Memory; 4],
    ) -> Result<(), LaunchError<D::Error>> {
        let [q, k, v, table, sequences, k_factors, v_factors, codebooks, means, slopes, mask, tree, sinks] =
            inputs.each_ref().map(M::view);
        let [sums, tops, out, lse] = outputs;
        let tensors = Tensors {
            q,
            k,
            v,
            table,
            sequences,
            factors: [k_factors, v_factors],
            codebooks,
            means,
            slopes,
            mask,
            tree,
            sinks,
            sums,
            tops,
            out: M::view_mut(out),
            lse: M::view_mut(lse),
            with_lse: true,
        };
        plan.launch(device, tensors, M::view_mut, M::view)
    }
}

impl Runner for SimulatorRunner {
    fn name(&self) -> String {
        let Tile { rows, keys, simds, parts } = self.tile;
        format!("simulator {}x{} simds {simds} parts {parts}", 8 * rows, 16 * keys)
    }

    fn run(&self, problem: &Problem, inputs: &Inputs<'_>, outputs: &mut Outputs<'_>) -> Result<Ran, NotRun> {
        self.run_on(&Simulator::new(), problem, inputs, outputs)
    }
}

impl SimulatorRunner {
    /// Runs a problem on a device whose memory is the simulator's.
    pub(crate) fn run_on(
        &self,
        device: &impl Device<Memory = Memory>,
        problem: &Problem,
        inputs: &Inputs<'_>,
        outputs: &mut Outputs<'_>,
    ) -> Result<Ran, NotRun> {
        let invalid = |e: crate::RunError| NotRun::Error(e.to_string());
        crate::bind::check(problem, inputs, outputs).map_err(invalid)?;
        let dims = problem.dims();
        let scores = problem.sequences().iter().map(|s| s.q_len as u64 * s.kv_len as u64).sum::<u64>();
        let scores = scores.saturating_mul(dims.q_heads as u64);
        if scores > self.most_scores {
            let most = self.most_scores;
            return Err(NotRun::Unsupported(format!(
                "more scores than the {most} that the simulator is given: {scores}"
            )));
        }
        let layout = Layout { tile: self.tile, aligned: self.aligned, padded: self.padded };
        let refused = |why| NotRun::Unsupported(format!("no kernel takes the problem: {why}"));
        let laid = Laid::new(problem, inputs, layout).map_err(refused)?;
        let entry = laid.plan.instances()[0].entry();
        let paged = laid.paged;
        let native = laid.plan.with_native(self.find);
        let plan = native.ok_or_else(|| NotRun::Unsupported(no_native(problem, paged)))?;
        let mut read = laid.inputs.each_ref().map(Values::simulated);
        let held = held(problem, inputs);
        for (n, view) in [&inputs.k, &inputs.v].into_iter().enumerate() {
            for bytes in padding(view, laid.strides[n], &held) {
                read[1 + n].poison(bytes);
            }
        }
        let mut written = laid.outputs.map(|(element, len)| blank(element, len));
        Laid::launch::<Simulator, _>(&plan, device, &read, &mut written)
            .map_err(|e| NotRun::Error(e.to_string()))?;
        write::<Simulator>(outputs, problem, &written)?;
        Ok(Ran::new(entry).accumulated(accumulation(problem)))
    }
}

/// How the kernels round sums of a problem.
pub(crate) fn accumulation(problem: &Problem) -> Accumulation {
    if problem.is_quantized() {
        Accumulation::Operands
    } else if problem.dtype() == Dtype::F32 {
        Accumulation::F32
    } else {
        Accumulation::Weights
    }
}

/// Copies results out of sums, tops, out and lse.
pub(crate) fn write<M: Machine>(
    outputs: &mut Outputs<'_>,
    problem: &Problem,
    [_, _, out, lse]: &[M::Memory; 4],
) -> Result<(), NotRun> {
    let dims = problem.dims();
    let read = |memory| M::read(memory).map_err(NotRun::Error);
    let out = read(out)?;
    for (n, row) in out.chunks_exact(dims.value_dim).enumerate() {
        let place = [n / dims.q_len / dims.q_heads, n / dims.q_len % dims.q_heads, n % dims.q_len];
        let bytes: Vec<u8> = match problem.dtype() {
            Dtype::F32 => row.iter().flat_map(|&x| (x as f32).to_le_bytes()).collect(),
            Dtype::F16 => row.iter().flat_map(|&x| f16::from_f64(x).to_le_bytes()).collect(),
            Dtype::BF16 => row.iter().flat_map(|&x| bf16::from_f64(x).to_le_bytes()).collect(),
        };
        outputs.out.row_bytes_mut(place).copy_from_slice(&bytes);
    }
    if let Some(to) = &mut outputs.lse {
        for (to, from) in to.iter_mut().zip(read(lse)?) {
            *to = from as f32;
        }
    }
    Ok(())
}
