//! How a problem runs on the kernels of the kernel language: instances, parameters, scratch.

use crate::codecs::{codebooks, format_id, is_rotatable, magnitudes};
use crate::kernels::attend::Attend;
use crate::kernels::decode::decode;
use crate::kernels::merge::{Merge, merge};
use crate::kernels::rows::kv_align;
use crate::shape::{Shape, Tile, count};
use crate::variant::Variant;
use flashtile_core::codec::Codec;
use flashtile_core::plan::Unsupported;
use flashtile_core::problem::{Problem, Visibility};
use flashtile_kernel::source::GenericsError;
use flashtile_kernel::{Constant, Device, Instance, LaunchError, View, ViewMut};

/// Why a problem does not run on these kernels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PlanError {
    /// The problem itself is unsupported.
    Unsupported(Unsupported),
    /// The rotation of a codec has no kernel at this dimension.
    Rotation {
        /// How keys or values are stored.
        codec: Codec,
        /// Elements of a row.
        got: usize,
    },
    /// No instance of a kernel takes the problem.
    Instance {
        /// What the contract of the kernel says.
        why: String,
    },
}

impl std::fmt::Display for PlanError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unsupported(why) => why.fmt(f),
            Self::Rotation { codec, got } => {
                write!(f, "{codec} of {got}: kernels rotate 2^k, 12 * 2^k or 20 * 2^k coordinates")
            }
            Self::Instance { why } => f.write_str(why),
        }
    }
}

impl std::error::Error for PlanError {}

impl From<Unsupported> for PlanError {
    fn from(why: Unsupported) -> Self {
        Self::Unsupported(why)
    }
}

/// Where tensors lie: strides in elements (q, out, masks), or in bytes (keys and values).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Strides {
    /// Strides of q over batch entry, head and row, in elements.
    pub q: [usize; 3],
    /// Strides of out over batch entry, head and row, in elements.
    pub out: [usize; 3],
    /// Strides of keys over batch entry or page, head and row, in bytes; the last is not read for codes.
    pub k: [usize; 3],
    /// Strides of values, likewise.
    pub v: [usize; 3],
    /// A power of two that the addresses of all rows of keys and values are multiples of, in bytes: at most 16.
    pub aligned: usize,
    /// Tokens of a page and entries of a sequence in the table; of keys that lie in no pages, or a sequence to a page, none.
    pub pages: Option<[usize; 2]>,
    /// Tokens of a page, where rows of codes lie in pages that no table is needed for.
    pub rows: usize,
    /// Sequence, head, query and key; 0 what a mask does not divide.
    pub mask: [usize; 4],
    /// 0 f32, 1 f16, 2 bf16, 3 bool.
    pub mask_kind: u32,
    /// Query and key.
    pub tree: [usize; 2],
}

/// Numbers of the sequences, as [`decode()`] takes them. `page` is the batch entry of a
/// sequence's keys, or its only page.
pub fn sequences(problem: &Problem, page: impl Fn(usize) -> usize) -> Vec<i32> {
    let one = |(index, s): (usize, &flashtile_core::problem::Sequence)| {
        let [batch, q_start, q_len, page] = [s.batch, s.q_start, s.q_len, page(index)].map(|n| n as i32);
        [batch, q_start, q_len, page, s.kv_start as i32, s.kv_len as i32, s.q_offset as i32, 0]
    };
    problem.sequences().iter().enumerate().flat_map(one).collect()
}

/// What a problem launches.
#[derive(Debug, Clone)]
pub struct Plan {
    decode: Instance,
    merge: Instance,
    attend: Attend,
    merged: Merge,
    shape: Shape,
    constants: Constants,
}

/// The `#[constant]` parameters of the kernels: where rows lie, and the features of the problem.
#[derive(Debug, Clone, Copy)]
struct Constants {
    paged: bool,
    row_align: u32,
    has_softcap: bool,
    has_alibi: bool,
    has_mask: bool,
    has_tree_mask: bool,
    has_k_mean: bool,
    has_sinks: bool,
}

impl Constants {
    fn of(problem: &Problem, places: &Strides, centered: bool) -> Self {
        let (dims, desc) = (problem.dims(), problem.desc());
        let (k_format, v_format) = (format_id(problem.k_codec()), format_id(problem.v_codec()));
        Self {
            paged: places.pages.is_some(),
            row_align: kv_align(k_format, dims.head_dim, v_format, dims.value_dim, places.aligned),
            has_softcap: desc.softcap.is_some(),
            has_alibi: desc.alibi,
            has_mask: desc.mask.is_some(),
            has_tree_mask: desc.tree,
            has_k_mean: centered,
            has_sinks: desc.sinks,
        }
    }
}

/// Strides as kernels take them.
fn wide(strides: [usize; 3]) -> [u64; 3] {
    strides.map(|n| n as u64)
}

/// The parameters of [`decode()`].
fn attend_params(problem: &Problem, places: &Strides, shape: &Shape) -> Result<Attend, Unsupported> {
    let (dims, desc) = (problem.dims(), problem.desc());
    let (k_codec, v_codec) = (problem.k_codec(), problem.v_codec());
    let [page, width] = places.pages.unwrap_or([places.rows.max(1), 1]);
    let visibility: Visibility = desc.visibility;
    let reach = |side: Option<usize>| side.map_or(i32::MAX, |n| i32::try_from(n).unwrap_or(i32::MAX));
    let log2e = std::f32::consts::LOG2_E;
    let (scale, cap) = match desc.softcap {
        Some(cap) => (problem.scale() / cap, cap * log2e),
        None => (problem.scale() * log2e, 0.0),
    };
    Ok(Attend {
        q: wide(places.q),
        k: wide(places.k),
        v: wide(places.v),
        mask: [places.mask[0], places.mask[1], places.mask[2]].map(|n| n as u64),
        tree: places.tree[0] as u64,
        mask_step: count("a mask's stride", places.mask[3])?,
        tree_step: count("a tree's stride", places.tree[1])?,
        mask_kind: places.mask_kind,
        q_heads: shape.rows[1],
        group: count("query heads of a key/value head", dims.gqa_group())?,
        page: count("tokens of a page", page)?,
        width: count("pages of a sequence", width)?,
        tiles: shape.tiles,
        splits: shape.groups[1],
        queries: shape.rows[0],
        batches: shape.rows[2],
        unused: 0,
        left: reach(visibility.left()),
        right: reach(visibility.right()),
        scale,
        cap,
        codebooks: codebooks(k_codec, v_codec).1,
        k_levels: magnitudes(k_codec, dims.head_dim),
        v_levels: magnitudes(v_codec, dims.value_dim),
    })
}

/// The memory of a launch. An input that the problem does without may be any memory of the type.
#[derive(Debug)]
pub struct Tensors<'a, M> {
    /// Query.
    pub q: View<'a, M>,
    /// Keys, or pages of keys.
    pub k: View<'a, M>,
    /// Values, or pages of values.
    pub v: View<'a, M>,
    /// Block table.
    pub table: View<'a, M>,
    /// Eight words for each sequence.
    pub sequences: View<'a, M>,
    /// Of the rotation of keys, and of that of values.
    pub factors: [View<'a, M>; 2],
    /// Codebooks of mlx-native.
    pub codebooks: View<'a, M>,
    /// Means of centered keys.
    pub means: View<'a, M>,
    /// ALiBi slopes.
    pub slopes: View<'a, M>,
    /// Mask.
    pub mask: View<'a, M>,
    /// Tree mask.
    pub tree: View<'a, M>,
    /// Sinks.
    pub sinks: View<'a, M>,
    /// Scratch of partial outputs.
    pub partial_out: &'a mut M,
    /// Scratch of row maxima and row sums.
    pub partial_max_sum: &'a mut M,
    /// Output.
    pub out: ViewMut<'a, M>,
    /// Logsumexp.
    pub lse: ViewMut<'a, M>,
    /// Whether the logsumexp is written.
    pub with_lse: bool,
}

impl Plan {
    /// Plans a problem whose tensors lie so.
    ///
    /// # Errors
    /// [`PlanError`].
    pub fn new(problem: &Problem, places: &Strides, centered: bool, tile: Tile) -> Result<Self, PlanError> {
        let dims = problem.dims();
        let shape = Shape::of(problem, tile)?;
        for (codec, got) in [(problem.k_codec(), dims.head_dim), (problem.v_codec(), dims.value_dim)] {
            if !is_rotatable(codec, got) {
                return Err(PlanError::Rotation { codec, got });
            }
        }
        let variant = Variant {
            dtype: problem.dtype(),
            head_dim: dims.head_dim,
            value_dim: dims.value_dim,
            k_codec: problem.k_codec(),
            v_codec: problem.v_codec(),
        };
        let internal = |e: GenericsError| PlanError::Instance { why: e.to_string() };
        let decode = variant.decode(tile).map_err(internal)?;
        let merge = variant.merge().map_err(internal)?;
        let attend = attend_params(problem, places, &shape)?;
        let merged = Merge {
            out: wide(places.out),
            q_heads: attend.q_heads,
            queries: attend.queries,
            splits: shape.results,
            unused: 0,
        };
        let constants = Constants::of(problem, places, centered);
        Ok(Self { decode, merge, attend, merged, shape, constants })
    }

    /// f32 that `partial_out` and `partial_max_sum` hold.
    pub const fn scratch(&self) -> [usize; 2] {
        self.shape.scratch
    }

    /// The kernels.
    pub const fn instances(&self) -> [&Instance; 2] {
        [&self.decode, &self.merge]
    }

    /// What launches give the `#[constant]` parameters of the kernels, in order.
    pub fn constants(&self, with_lse: bool) -> [Vec<Constant>; 2] {
        let c = self.constants;
        let has = [c.has_softcap, c.has_alibi, c.has_mask, c.has_tree_mask, c.has_k_mean];
        let mut decode = vec![Constant::of(c.paged), Constant::of(c.row_align)];
        decode.extend(has.map(Constant::of));
        [decode, [c.has_sinks, with_lse, c.has_alibi].map(Constant::of).to_vec()]
    }

    /// The same with native code, where `find` knows some.
    pub fn with_native(mut self, find: impl Fn(&Instance) -> Option<Instance>) -> Option<Self> {
        self.decode = find(&self.decode)?;
        self.merge = find(&self.merge)?;
        Some(self)
    }

    /// Launches the kernels; memory of `partial_out` and `partial_max_sum` is seen through `view`.
    ///
    /// # Errors
    /// [`LaunchError`].
    pub fn launch<D: Device>(
        &self,
        device: &D,
        tensors: Tensors<'_, D::Memory>,
        numbers: impl Fn(&mut D::Memory) -> ViewMut<'_, D::Memory>,
        read: impl Fn(&D::Memory) -> View<'_, D::Memory>,
    ) -> Result<(), LaunchError<D::Error>> {
        let constants = self.constants;
        let Tensors { partial_out, partial_max_sum, .. } = tensors;
        if self.shape.rows.contains(&0) || self.shape.groups.contains(&0) {
            return Ok(());
        }
        decode::Call {
            q: tensors.q,
            k: tensors.k,
            v: tensors.v,
            table: tensors.table,
            sequences: tensors.sequences,
            factors: tensors.factors[0],
            codebooks: tensors.codebooks,
            means: tensors.means,
            slopes: tensors.slopes,
            mask: tensors.mask,
            tree: tensors.tree,
            params: self.attend,
            partial_out: numbers(partial_out),
            partial_max_sum: numbers(partial_max_sum),
            paged: constants.paged,
            row_align: constants.row_align,
            has_softcap: constants.has_softcap,
            has_alibi: constants.has_alibi,
            has_mask: constants.has_mask,
            has_tree_mask: constants.has_tree_mask,
            has_k_mean: constants.has_k_mean,
            groups: self.shape.groups,
        }
        .launch_instance(device, &self.decode)?;
        let (partial_out, partial_max_sum) = (&*partial_out, &*partial_max_sum);
        merge::Call {
            partial_out: read(partial_out),
            partial_max_sum: read(partial_max_sum),
            factors: tensors.factors[1],
            sinks: tensors.sinks,
            params: self.merged,
            out: tensors.out,
            lse: tensors.lse,
            has_sinks: constants.has_sinks,
            with_lse: tensors.with_lse,
            has_shift: constants.has_alibi,
            groups: self.shape.rows,
        }
        .launch_instance(device, &self.merge)
    }
}
