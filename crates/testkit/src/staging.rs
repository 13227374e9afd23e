//! Staging of problems for the portable kernels, on any device that runs them.

use super::machine::Values;
use flashtile_core::block_tables::BlockTables;
use flashtile_core::codec::KvView;
use flashtile_core::dtype::{Dtype, MaskKind};
use flashtile_core::inputs::Inputs;
use flashtile_core::plan::Unsupported;
use flashtile_core::problem::Problem;
use flashtile_core::quality::Accumulation;
use flashtile_core::tensor::{MaskView, TensorView};
use flashtile_gpu::launches::{Launches, Placed, Strides, sequences};
use flashtile_gpu::run::{Operands, Tables, Workspace, run};
use flashtile_gpu::tile::Tiling;
use flashtile_kernel::{Device, DeviceMemory, LaunchError, ScalarType, bf16, f16};

/// Alignment of page rows, in bytes.
pub(super) const ALIGNED: usize = 16;

/// Rows of a tensor in the order batch entry, head, row.
fn bytes_of(view: &TensorView<'_>) -> Vec<u8> {
    let [batch, heads, rows, dim] = view.shape();
    let mut bytes = Vec::with_capacity(batch * heads * rows * dim * view.dtype().bytes());
    for place in 0..batch * heads * rows {
        bytes.extend_from_slice(view.row_bytes([place / rows / heads, place / rows % heads, place % rows]));
    }
    bytes
}

/// Keys or values as bytes, with the strides of batch entries, heads and rows.
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

/// A mask as bytes, with its strides in elements and its kind.
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
fn alignment(max: usize, strides: &[usize]) -> usize {
    let mut align = max;
    while strides.iter().any(|stride| !stride.is_multiple_of(align)) {
        align /= 2;
    }
    align
}

/// A staged problem: the contents of device memory, before any is allocated.
#[derive(Debug)]
pub(crate) struct StagedInputs {
    pub(crate) launches: Launches,
    pub(crate) placed: Placed,
    /// Strides of keys and of values, in bytes: from entry to entry, head to head and row to row.
    #[cfg(feature = "simulator")]
    pub(super) strides: [[usize; 3]; 2],
    /// q, k, v, table, sequences, factors of keys and of values, codebooks, means, slopes, mask, tree, sinks.
    pub(crate) inputs: [Values; 13],
    /// Type and number of elements of partial_out, row_max and row_sum, out, lse.
    pub(crate) outputs: [(ScalarType, usize); 4],
}

/// How a problem is staged.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    pub(crate) tiling: Tiling,
    pub(crate) aligned: usize,
    pub(crate) padded: bool,
}

impl StagedInputs {
    /// Stages inputs that match the problem.
    ///
    /// # Errors
    /// [`Unsupported`].
    pub(crate) fn new(problem: &Problem, inputs: &Inputs<'_>, layout: Layout) -> Result<Self, Unsupported> {
        let dims = problem.dims();
        let ((k, k_strides), (v, v_strides)) =
            (side(&inputs.k, layout.padded), side(&inputs.v, layout.padded));
        let [_, heads, rows, _] = inputs.q.shape();
        let mut strides = Strides {
            q: [heads * rows * dims.head_dim, rows * dims.head_dim, dims.head_dim],
            out: [heads * rows * dims.value_dim, rows * dims.value_dim, dims.value_dim],
            k: k_strides,
            v: v_strides,
            aligned: alignment(alignment(layout.aligned, &k_strides), &v_strides),
            rows: inputs.k.shape()[2],
            ..Strides::default()
        };
        let (table, only) = table_of(inputs.tables, &mut strides);
        let mut mask = vec![0];
        if let Some(view) = &inputs.mask {
            (mask, strides.mask, strides.mask_kind) = mask_of(view);
        }
        let mut tree = vec![0];
        if let Some(view) = &inputs.tree {
            let (bytes, tree_strides, _) = mask_of(view);
            (tree, strides.tree) = (bytes, [tree_strides[2], tree_strides[3]]);
        }
        let means = match &inputs.k {
            KvView::Codes(codes) => codes.means().map(<[f32]>::to_vec),
            KvView::Elements(_) => None,
        };
        let launches = Launches::new(problem, layout.tiling)?;
        let placed = launches.place(&strides, means.is_some())?;
        let page =
            |index: usize| only.get(index).map_or(problem.sequences()[index].batch, |page| *page as usize);
        let tables = Tables::of(problem);
        let [k_factors, v_factors] = tables.factors;
        let [partial_out, partial_max_sum] = launches.scratch();
        let count = dims.batch * dims.q_heads * dims.q_len;
        let or_zero = |list: Option<&[f32]>| Values::F32(list.unwrap_or(&[0.0]).to_vec());
        let inputs = [
            Values::elements(problem.dtype(), &bytes_of(&inputs.q)),
            k,
            v,
            Values::U32(table),
            Values::I32(sequences(problem, page)),
            Values::F32(k_factors),
            Values::F32(v_factors),
            Values::F32(tables.codebooks),
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
        let outputs = [
            (f32, partial_out.max(1)),
            (f32, partial_max_sum.max(1)),
            (element, count * dims.value_dim),
            (f32, count),
        ];
        Ok(Self {
            launches,
            placed,
            #[cfg(feature = "simulator")]
            strides: [k_strides, v_strides],
            inputs,
            outputs,
        })
    }

    /// Launches the kernels on a device whose memory holds `inputs` and `outputs`.
    ///
    /// # Errors
    /// [`LaunchError`].
    pub(crate) fn launch<D: Device<Memory: DeviceMemory>>(
        launches: &Launches,
        placed: &Placed,
        device: &D,
        inputs: &[D::Memory; 13],
        outputs: &mut [D::Memory; 4],
    ) -> Result<(), LaunchError<D::Error>> {
        let [q, k, v, table, sequences, k_factors, v_factors, codebooks, means, slopes, mask, tree, sinks] =
            inputs.each_ref().map(DeviceMemory::view);
        let [partial_out, partial_max_sum, out, lse] = outputs;
        let workspace = Workspace {
            sequences,
            factors: [k_factors, v_factors],
            codebooks,
            absent: [k_factors, table, mask],
            partial_out,
            partial_max_sum,
        };
        let operands = Operands {
            q,
            k,
            v,
            table: Some(table),
            means: Some(means),
            slopes: Some(slopes),
            mask: Some(mask),
            tree: Some(tree),
            sinks: Some(sinks),
            out: out.view_mut(),
            lse: lse.view_mut(),
            with_lse: true,
        };
        run(device, launches, placed, workspace, operands)
    }
}

/// The block table that kernels read; or, where each sequence has one page that is no ring, the pages instead of a table.
fn table_of(tables: Option<&BlockTables>, strides: &mut Strides) -> (Vec<u32>, Vec<u32>) {
    match tables {
        None => (vec![0], Vec::new()),
        Some(tables) if tables.width == 1 && !tables.wraps => (vec![0], tables.table.clone()),
        Some(tables) => {
            strides.pages = Some([tables.page_size, tables.width]);
            strides.ring = tables.wraps;
            (tables.table.clone(), Vec::new())
        }
    }
}

/// How the kernels accumulate for a problem.
pub(crate) fn accumulation(problem: &Problem) -> Accumulation {
    if problem.is_quantized() {
        Accumulation::Operands
    } else if problem.dtype() == Dtype::F32 {
        Accumulation::F32
    } else {
        Accumulation::Probs
    }
}
