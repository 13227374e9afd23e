//! How a problem runs on the kernels of the kernel language: instances, parameters, scratch.

use crate::codecs::{codebooks, format_id, hadamard_order, magnitudes, scalar_type};
use crate::kernels::attend::Attend;
use crate::kernels::decode::decode;
use crate::kernels::formats::{BF16, F16, F32, INT8, MLX4, TQ2, TQ3, TQ4, TQ5, TQ6};
use crate::kernels::merge::{Merge, merge};
pub use crate::shape::Tile;
pub(crate) use crate::shape::{DIM_STEP, MAX_DIM};
use crate::shape::{Shape, count};
use flashtile_core::codec::Codec;
use flashtile_core::dtype::Dtype;
use flashtile_core::plan::Unsupported;
use flashtile_core::problem::{Problem, Visibility};
use flashtile_kernel::source::GenericsError;
use flashtile_kernel::{Constant, Device, Generic, Instance, LaunchError, ScalarType, View, ViewMut};

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
    /// Strides of values, as those of keys.
    pub v: [usize; 3],
    /// A power of two that every row of keys, and of values, starts at a multiple of, in bytes: at most 16.
    pub aligned: [usize; 2],
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

impl Tile {
    /// The quickest where it was measured: two sixteens of keys at a time where their words and operands fit in registers.
    pub const fn of(k: Codec, head_dim: usize) -> Self {
        let keys = match k {
            Codec::Tq4 | Codec::Int8 if head_dim <= 128 => 2,
            _ => 1,
        };
        Self { rows: 1, keys, simds: 4, splits: 1 }
    }
}

/// Keys or values as a kernel is specialised by them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Side {
    /// Format of a row: a constant of [`formats`](crate::kernels::formats).
    pub format: u32,
    /// Elements of a row.
    pub dim: usize,
    /// Lanes of a row.
    pub lanes: usize,
    /// Words of a number pair: 2 where products are in f32.
    pub words_of_pair: usize,
}

/// Bytes of a row in the first plane.
const fn first_bytes(format: u32, dim: usize) -> usize {
    match format {
        F32 => 4 * dim,
        F16 | BF16 => 2 * dim,
        TQ2 | TQ3 => dim / 4,
        TQ4 | TQ5 | TQ6 | MLX4 => dim / 2,
        _ => dim,
    }
}

/// Bytes of a row in the second plane.
const fn second_bytes(format: u32, dim: usize) -> usize {
    match format {
        TQ3 | TQ5 => dim / 8,
        TQ6 => dim / 4,
        _ => 0,
    }
}

impl Side {
    /// Keys or values of a format.
    pub const fn new(format: u32, dim: usize, lanes: usize, words_of_pair: usize) -> Self {
        Self { format, dim, lanes, words_of_pair }
    }

    const fn in_planes(self) -> bool {
        self.format >= TQ2 && self.format <= TQ6
    }

    const fn gathered(self) -> bool {
        if self.in_planes() {
            !self.dim.is_multiple_of(64)
        } else {
            !first_bytes(self.format, self.dim).is_multiple_of(4 * self.lanes)
        }
    }

    /// Pairs of numbers of a lane.
    pub const fn pairs(self) -> usize {
        self.dim / self.lanes / 2
    }

    /// Words of the pairs.
    pub const fn pair_words(self) -> usize {
        self.pairs() * self.words_of_pair
    }

    /// Words of a lane, as they are read.
    pub const fn words(self) -> usize {
        if self.gathered() {
            self.pairs()
        } else if self.in_planes() {
            let planes = if second_bytes(self.format, self.dim) > 0 { 2 } else { 1 };
            planes * self.dim / (8 * self.lanes)
        } else {
            first_bytes(self.format, self.dim) / self.lanes / 4
        }
    }

    /// Bytes of a piece: neighbouring ones of a lane.
    pub const fn piece(self) -> usize {
        if self.gathered() || self.in_planes() {
            return 4;
        }
        let bytes = first_bytes(self.format, self.dim) / self.lanes;
        if bytes.is_multiple_of(16) {
            16
        } else if bytes.is_multiple_of(8) {
            8
        } else {
            4
        }
    }

    /// The power of two that words are read at a multiple of, where rows are at one of `aligned`.
    pub const fn align(self, aligned: usize) -> usize {
        if self.gathered() {
            return 1;
        }
        let (first, second) = (first_bytes(self.format, self.dim), second_bytes(self.format, self.dim));
        let mut align = aligned;
        while align > 1
            && (self.format >= INT8 && !first.is_multiple_of(align)
                || !second.is_multiple_of(align)
                || !self.in_planes() && align > self.piece())
        {
            align /= 2;
        }
        align
    }
}

/// The type that products are computed in: that of elements of the query's own type, f16 for codes, otherwise f32.
const fn product(q: Dtype, codec: Codec) -> ScalarType {
    match (codec.dtype(), q) {
        (None, _) | (Some(Dtype::F16), Dtype::F16) => ScalarType::F16,
        (Some(Dtype::BF16), Dtype::BF16) => ScalarType::Bf16,
        _ => ScalarType::F32,
    }
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

/// The instance of [`decode()`] for a type of q, codecs and dimensions of keys and values, rows that are at multiples of so many
/// bytes, a tile, and whether keys are found through a table of pages.
pub fn decode_instance(
    q: Dtype,
    codecs: [Codec; 2],
    [head_dim, value_dim]: [usize; 2],
    aligned: [usize; 2],
    tile: Tile,
    paged: bool,
) -> Result<Instance, GenericsError> {
    let products = codecs.map(|codec| product(q, codec));
    let words = |product: ScalarType| if product == ScalarType::F32 { 2 } else { 1 };
    let k = Side::new(format_id(codecs[0]), head_dim, 4, words(products[0]));
    let v = Side::new(format_id(codecs[1]), value_dim, 8, words(products[1]));
    decode::specialise(&[
        Generic::Type(scalar_type(q)),
        Generic::Type(products[0]),
        Generic::Type(products[1]),
        Generic::U32(k.format),
        Generic::U32(v.format),
        Generic::Usize(k.dim),
        Generic::Usize(v.dim),
        Generic::Usize(k.pairs()),
        Generic::Usize(v.pairs()),
        Generic::Usize(k.words()),
        Generic::Usize(v.words()),
        Generic::Usize(k.pair_words()),
        Generic::Usize(v.pair_words()),
        Generic::Usize(k.align(aligned[0])),
        Generic::Usize(v.align(aligned[1])),
        Generic::Usize(tile.rows),
        Generic::Usize(tile.keys),
        Generic::Usize(tile.simds),
        Generic::U32(hadamard_order(codecs[0], head_dim)),
        Generic::Bool(paged),
    ])
}

/// The instance of [`merge()`] for a type of the output, and the codec and dimension of values.
pub fn merge_instance(q: Dtype, codec: Codec, value_dim: usize) -> Result<Instance, GenericsError> {
    merge::specialise(&[
        Generic::Type(scalar_type(q)),
        Generic::Usize(value_dim),
        Generic::U32(hadamard_order(codec, value_dim)),
    ])
}

/// What a problem launches.
#[derive(Debug, Clone)]
pub struct Plan {
    decode: Instance,
    merge: Instance,
    attend: Attend,
    merged: Merge,
    shape: Shape,
    features: Features,
}

/// The features of a problem for which kernels are specialised.
#[derive(Debug, Clone, Copy)]
struct Features {
    softcap: bool,
    alibi: bool,
    mask: bool,
    tree_mask: bool,
    k_mean: bool,
    sinks: bool,
}

/// What a launch reads and writes. Inputs that the problem has not may be any memory of the type.
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
        let (dims, desc) = (problem.dims(), problem.desc());
        let shape = Shape::of(problem, tile)?;
        for (codec, got) in [(problem.k_codec(), dims.head_dim), (problem.v_codec(), dims.value_dim)] {
            let order = hadamard_order(codec, got) as usize;
            if order > 0 && !(got.is_multiple_of(order) && (got / order).is_power_of_two()) {
                return Err(PlanError::Rotation { codec, got });
            }
        }
        let (k_codec, v_codec, q) = (problem.k_codec(), problem.v_codec(), problem.dtype());
        let dims_of = [dims.head_dim, dims.value_dim];
        let decode =
            decode_instance(q, [k_codec, v_codec], dims_of, places.aligned, tile, places.pages.is_some());
        let merge = merge_instance(q, v_codec, dims.value_dim);
        let internal = |e: GenericsError| PlanError::Instance { why: e.to_string() };
        let (decode, merge) = (decode.map_err(internal)?, merge.map_err(internal)?);

        let wide = |strides: [usize; 3]| strides.map(|n| n as u64);
        let [page, width] = places.pages.unwrap_or([places.rows.max(1), 1]);
        let visibility: Visibility = desc.visibility;
        let reach = |side: Option<usize>| side.map_or(i32::MAX, |n| i32::try_from(n).unwrap_or(i32::MAX));
        let log2e = std::f32::consts::LOG2_E;
        let (scale, cap) = match desc.softcap {
            Some(cap) => (problem.scale() / cap, cap * log2e),
            None => (problem.scale() * log2e, 0.0),
        };
        let attend = Attend {
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
        };
        let merged = Merge {
            out: wide(places.out),
            q_heads: attend.q_heads,
            queries: attend.queries,
            splits: shape.results,
            unused: 0,
        };
        let features = Features {
            softcap: desc.softcap.is_some(),
            alibi: desc.alibi,
            mask: desc.mask.is_some(),
            tree_mask: desc.tree,
            k_mean: centered,
            sinks: desc.sinks,
        };
        Ok(Self { decode, merge, attend, merged, shape, features })
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
        let Features { softcap, alibi, mask, tree_mask, k_mean, sinks } = self.features;
        let of = |constants: &[bool]| constants.iter().map(|&constant| Constant::of(constant)).collect();
        [of(&[softcap, alibi, mask, tree_mask, k_mean]), of(&[sinks, with_lse, alibi])]
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
        let has = self.features;
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
            has_softcap: has.softcap,
            has_alibi: has.alibi,
            has_mask: has.mask,
            has_tree_mask: has.tree_mask,
            has_k_mean: has.k_mean,
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
            has_sinks: has.sinks,
            with_lse: tensors.with_lse,
            has_shift: has.alibi,
            groups: self.shape.rows,
        }
        .launch_instance(device, &self.merge)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::formats::{FP8, MLX8};
    use crate::kernels::{formats, rows};

    #[test]
    fn rows_lie_for_kernels_as_they_do_for_plans() {
        for format in [F32, F16, BF16, FP8, INT8, MLX4, MLX8, TQ2, TQ3, TQ4, TQ5, TQ6] {
            for dim in (DIM_STEP..=MAX_DIM).step_by(DIM_STEP) {
                let n = dim as u32;
                assert_eq!(formats::first_bytes(format, n) as usize, first_bytes(format, dim));
                assert_eq!(formats::second_bytes(format, n) as usize, second_bytes(format, dim));
                for lanes in [4, 8] {
                    let side = Side::new(format, dim, lanes, 1);
                    assert_eq!(formats::in_planes(format), side.in_planes());
                    assert_eq!(rows::gathered(format, n, lanes as u32), side.gathered());
                    if !side.gathered() && !side.in_planes() {
                        assert_eq!(rows::piece_bytes(format, n, lanes as u32) as usize, side.piece());
                    }
                }
            }
        }
    }
}
