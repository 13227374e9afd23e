//! Attention over keys and values of any format, split along the keys. [`decode()`] leaves a partial result for every query row and
//! split, and [`merge`](super::merge::merge()) adds them up.
//!
//! ```text
//! score_j     = cap(scale q . k_j) - slope |p - j| + mask_j                   in units of log2
//! row_max     = a number within 2^SLACK of the largest score_j + log2(scale of v_j)
//! row_sum     = sum over keys of 2^(score_j - row_max)
//! partial_out = sum over keys of 2^(score_j - row_max) v_j
//! ```
//!
//! A SIMD group computes 16 keys at a time as two stacked left operands of 8 rows. Queries, eight rows of one key/value head, are the right
//! operand, so that a lane ends up with the scores of two keys and two queries. The same layout, transposed, is the right operand of the
//! product with the values, whose rows are coordinates: partial outputs stay in registers, and the query rows share every byte that is read.
//! The words of the next keys and values are loaded before the current ones are used.
//!
//! Over codes, queries are first rotated and scaled to at most 2, and multiplied as two f16 each; accumulation is in f32. The scale of a
//! value row is folded into its probability, so that the largest product is near 1 whatever the scales are.

use super::formats::{BF16, F16, F32, FP8, INT8, MLX4, TQ4};
use super::rotation::rotate;
use super::rows::{Levels, Row, Source, coordinate, fetch, gather, pairs, row_at, source_at};
use flashtile_kernel::prelude::*;

#[constant]
const LOG2E: f32 = std::f32::consts::LOG2_E;
/// `ln 2`.
#[constant]
pub const LN2: f32 = std::f32::consts::LN_2;

/// The largest magnitude of an ALiBi slope, `2^86`, as the host has it.
#[constant]
const MAX_ALIBI_SLOPE: f32 = 7.737_125_2e25;

/// `row_max` follows the largest score of a row only when it falls behind by more than this many powers of 2: rescaling is rare.
#[constant]
const SLACK: f32 = 8.0;

/// A power of two that makes the partial output of more keys than there can be, of probabilities up to `2^SLACK`, as small as one value.
#[constant]
pub const SHRINK: f32 = 9.094_947e-13;

/// Set in the bits of a row that was recomputed with smaller sums.
#[constant]
const SECOND_PASS: u32 = 0x8000_0000;

/// The smallest scale of a value row that `row_max` takes into account, in units of log2.
#[constant]
const MIN_SCALE: f32 = -60.0;

/// Of a bias of a greater magnitude, `2^126`, what is above it counts [`HUGE_RATE`] instead of `log2 e`: in units of log2 the largest
/// of f32 would be infinite. Differences as large as the spacing of such numbers decide a softmax at any rate.
#[constant]
const HUGE_BIAS: f32 = 8.507_059e37;
#[constant]
const HUGE_RATE: f32 = 0.5;
/// `HUGE_BIAS` in units of log2.
#[constant]
pub const HUGE_SCORE: f32 = 1.227_309_2e38;

/// What is between a row of the problem and memory. Strides of q, mask and tree are in elements, of keys and values in bytes; bounds
/// that are not there are the greatest `i32`.
#[params]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Attend {
    /// Strides of q over batch entry, head and row, in elements.
    pub q: [u64; 3],
    /// Strides of keys over batch entry or page, head and row, in bytes; the last is not read for codes.
    pub k: [u64; 3],
    /// Strides of values, as those of keys.
    pub v: [u64; 3],
    /// Strides of the mask over sequence, head and query, in elements.
    pub mask: [u64; 3],
    /// Stride of the tree mask over queries, in elements.
    pub tree: u64,
    /// Stride of the mask over keys, in elements: 0 where it is broadcast.
    pub mask_step: u32,
    /// Stride of the tree mask over keys, in elements.
    pub tree_step: u32,
    /// Element of the mask: 0 f32, 1 f16, 2 bf16, 3 bool.
    pub mask_kind: u32,
    /// Query heads.
    pub q_heads: u32,
    /// Query heads of a key/value head.
    pub group: u32,
    /// Tokens of a page.
    pub page: u32,
    /// Entries of a sequence in the block table.
    pub width: u32,
    /// Tiles of query rows of a key/value head.
    pub tiles: u32,
    /// Splits of the keys of a row.
    pub splits: u32,
    /// Query rows of a batch entry.
    pub queries: u32,
    /// Batch entries.
    pub batches: u32,
    /// Keys to the left that the window shows; `i32::MAX` where it has no left bound.
    pub left: i32,
    /// Keys to the right that the window shows; `i32::MAX` where it has no right bound.
    pub right: i32,
    /// Padding: 0.
    pub unused: u32,
    /// Multiplier of scores: in units of log2, or divided by the softcap.
    pub scale: f32,
    /// Softcap in units of log2; 0 where there is none.
    pub cap: f32,
    /// First entries of the codebooks of mlx-native for keys and values: 256 f16, then what f16 leaves of each.
    pub codebooks: [u32; 2],
    /// Magnitudes of the levels of keys, as [`Levels`] has them.
    pub k_levels: [u32; 16],
    /// Magnitudes of the levels of values.
    pub v_levels: [u32; 16],
}

impl Attend {
    /// Rows of all heads.
    pub fn rows(&self) -> u64 {
        [self.batches, self.queries, self.q_heads].into_iter().map(u64::from).fold(1, u64::saturating_mul)
    }

    /// Partial results of all rows, of `simds` SIMD groups.
    pub fn results(&self, simds: usize) -> u64 {
        [self.splits, simds as u32].into_iter().map(u64::from).fold(self.rows(), u64::saturating_mul)
    }
}

/// Numbers of a sequence in `sequences`, which has 8 for each: batch entry of the queries, first query, queries, batch entry or only
/// page of the keys, first key, keys, and the position of the first query.
#[device]
pub struct Sequence {
    /// Batch entry of the queries.
    pub batch: u32,
    /// First query row.
    pub q_start: u32,
    /// Query rows.
    pub q_len: u32,
    /// Batch entry of the keys, or their only page.
    pub page: u32,
    /// First key row.
    pub kv_start: u32,
    /// Keys.
    pub kv_len: i32,
    /// Key position of the first query row.
    pub offset: i32,
}

/// Reads one of `sequences`: eight words each.
#[device]
pub fn sequence_of(sequences: &Buffer<i32>, index: u32) -> Sequence {
    let at = 8 * index;
    let sequence = Sequence {
        batch: sequences[at] as u32,
        q_start: sequences[at + 1] as u32,
        q_len: sequences[at + 2] as u32,
        page: sequences[at + 3] as u32,
        kv_start: sequences[at + 4] as u32,
        kv_len: sequences[at + 5],
        offset: sequences[at + 6],
    };
    sequence
}

/// Where the row of a key is.
#[device]
pub fn find<const FORMAT: u32, const D: usize, const PAGED: bool>(
    table: &Buffer<u32>,
    params: &Attend,
    sequence: Sequence,
    index: u32,
    source: Source,
    key: u32,
) -> Row {
    let mut page = 0u64;
    let mut row = sequence.kv_start + key;
    if PAGED {
        let block = key / params.page;
        page = table[index * params.width + block % params.width] as u64;
        row = key - block * params.page;
    }
    row_at::<FORMAT, D>(source, page, row)
}

/// What numbers of codes are multiplied with beside the scale of their row.
#[device]
pub fn unit_of(format: u32, dim: u32) -> f32 {
    if format >= MLX4 {
        return select(dim == 512, 1.0, 0.0625);
    }
    select(format == FP8, 0.003_906_25, 0.007_812_5)
}

/// The scale of a row, and of its two halves relative to it where each has a norm of its own.
#[device]
pub struct Scale {
    /// The scale of the row.
    pub whole: f32,
    /// The norms of its halves over `whole`, in the format that has two.
    pub halves: [f32; 2],
}

/// The scale of elements: 1.
#[device]
pub fn no_scale() -> Scale {
    let scale = Scale { whole: 1.0, halves: [1.0, 1.0] };
    scale
}

/// The scale of a stored row.
#[device]
pub fn scale_of<const FORMAT: u32, const D: usize>(memory: &Buffer<u8>, row: Row) -> Scale {
    let mut scale = Scale { whole: 1.0, halves: [1.0, 1.0] };
    if FORMAT >= MLX4 {
        let first = memory.load_as::<f32, 1>(row.scale);
        scale.whole = first[0];
        if D == 512 {
            let second = memory.load_as::<f32, 1>(row.scale + 4);
            scale.whole = first[0].max(second[0]);
            let inverse = select(scale.whole > 0.0, 1.0 / scale.whole, 0.0);
            scale.halves[0] = first[0] * inverse;
            scale.halves[1] = second[0] * inverse;
        }
        scale.whole *= unit_of(FORMAT, D as u32);
    } else if FORMAT >= INT8 {
        let bits = memory.load_as::<u16, 1>(row.scale);
        // A scale has no sign.
        let number = pair_f16(bits[0] as u32 & 0x7fff);
        scale.whole = number[0] * unit_of(FORMAT, D as u32);
    }
    scale
}

/// Pairs of a row whose halves have norms of their own.
#[device]
pub fn with_norms<
    const FORMAT: u32,
    const D: usize,
    const LANES: usize,
    const PIECE: usize,
    const PE: usize,
>(
    from: [u32; PE],
    lane: u32,
    parts: [f32; 2],
) -> [u32; PE] {
    let mut result = from;
    if FORMAT >= MLX4 && D == 512 {
        let first = f16x2_from(parts[0], parts[0]);
        let second = f16x2_from(parts[1], parts[1]);
        for i in 0..PE {
            let above = coordinate::<FORMAT, D, LANES, PIECE>(lane, 2 * i as u32) >= 256;
            result[i] = f16x2_mul_add(from[i], select(above, second, first), 0u32);
        }
    }
    result
}

/// Whether one of a lane's numbers is no finite number.
#[device]
pub fn not_finite<const FORMAT: u32, const W: usize>(words: [u32; W]) -> bool {
    let mut found = false;
    for i in 0..W {
        if FORMAT == F32 {
            found = found || words[i] & 0x7f80_0000 == 0x7f80_0000;
        } else if FORMAT == F16 {
            found = found || words[i] & 0x7c00 == 0x7c00 || words[i] & 0x7c00_0000 == 0x7c00_0000;
        } else if FORMAT == BF16 {
            found = found || words[i] & 0x7f80 == 0x7f80 || words[i] & 0x7f80_0000 == 0x7f80_0000;
        } else if FORMAT == FP8 {
            found = found || ((words[i] & 0x7f7f_7f7f) + 0x0101_0101) & 0x8080_8080 != 0;
        }
    }
    found
}

/// Sums of two times eight keys, each times the part of its scale that this half of a row has.
#[device]
pub fn of_half(sums: [[f32; 2]; 2], scales: [Scale; 2], half: usize) -> [[f32; 2]; 2] {
    let mut result = sums;
    for h in 0..2usize {
        for n in 0..2usize {
            result[h][n] *= scales[h].halves[half];
        }
    }
    result
}

/// Sum of two fragments, element by element.
#[device]
pub fn added(a: [[f32; 2]; 2], b: [[f32; 2]; 2]) -> [[f32; 2]; 2] {
    let mut sum = a;
    for h in 0..2usize {
        for n in 0..2usize {
            sum[h][n] += b[h][n];
        }
    }
    sum
}

/// The factor by which the partial outputs of a recomputed row are smaller.
#[device]
pub fn shrink_of(lifted: u32, row: usize) -> f32 {
    select(lifted >> row as u32 & 1 != 0, SHRINK, 1.0)
}

/// A score in units of log2.
#[device]
pub fn to_log2(score: f32) -> f32 {
    let core = score.max(-HUGE_BIAS).min(HUGE_BIAS);
    // Of infinities and NaN the rest is what they are.
    core * LOG2E + (score - core) * HUGE_RATE
}

/// The score of a number in units of log2 that [`to_log2`] made.
#[device]
pub fn from_log2(x: f32) -> f32 {
    if x.abs() <= HUGE_SCORE || x.abs() == f32::INFINITY {
        return x * LN2;
    }
    // The sum that it is of was rounded.
    let magnitude = (HUGE_BIAS + (x.abs() - HUGE_SCORE) / HUGE_RATE).min(3.402_823_5e38);
    select(x < 0.0, -magnitude, magnitude)
}

/// What a mask adds at an element, in its own units.
#[device]
pub fn bias_at(mask: &Buffer<u8>, kind: u32, element: u64) -> f32 {
    if kind == 0 {
        let number = mask.load_as::<f32, 1>(4 * element);
        return number[0];
    }
    if kind == 3 {
        return select(mask[element] as u32 != 0, 0.0, f32::NEG_INFINITY);
    }
    let bits = mask.load_as::<u16, 1>(2 * element);
    let mut number = pair_f16(bits[0] as u32);
    if kind == 2 {
        number = pair_bf16(bits[0] as u32);
    }
    number[0]
}

/// Partial results of attention of the rows of a key/value head: see the module. With ALiBi, distances are from the nearest key that a
/// row sees; the shift of each row, in units of the score, follows the pairs.
///
/// Groups are (key/value heads times tiles of `8 * T` rows, parts, sequences). `Q` is the type of q; `K` and `V` are those of products with
/// keys and with values: that of their elements, f16 for codes, f32 where q is f32 or of another type than they.
#[kernel(
    threads = (32 * S) as u32,
    requires(KN * 8 == D && VN * 16 == DV, "KN is an eighth of D, VN a sixteenth of DV"),
    requires(KP == KN * KE && VP == VN * VE, "a pair takes KE or VE words"),
    requires(groups[0].is_multiple_of(params.tiles), "tiles of every key/value head"),
    requires(groups[1] == params.splits, "a threadgroup for each split"),
    requires(params.page > 0 && params.width > 0 && params.group > 0, "pages have rows"),
    requires(sequences.len() >= 8 * groups[2] as usize, "eight numbers of every sequence"),
    requires(partial_max_sum.len() as u64 >= params.results(S).saturating_mul(2), "partial_max_sum of every partial result"),
    requires(!has_alibi || partial_max_sum.len() as u64 >= params.results(S).saturating_mul(2).saturating_add(params.rows()), "a shift of every row"),
    requires(partial_out.len() as u64 >= params.results(S).saturating_mul(DV as u64), "partial outputs of every partial result"),
    requires(ORDER == 0 || factors.len() > D, "a factor for each coordinate, and the root"),
    bench(
        shape(batch = [16, 16], keys = [8192, 8192], q_heads = [32, 32], kv_heads = [8, 8], dim = [128, 128],
              format = [BF16, TQ4], row = [256, 66], splits = [4, 4]),
        bytes = batch * (2 * kv_heads * keys * row + 4 * q_heads * dim),
        flops = 4 * batch * q_heads * keys * dim,
        tolerance = 0.02,
    ),
)]
#[allow(clippy::too_many_arguments)]
pub fn decode<
    Q: Element,
    K: Element,
    V: Element,
    const KF: u32,
    const VF: u32,
    const D: usize,
    const DV: usize,
    const KN: usize,
    const VN: usize,
    const KW: usize,
    const VW: usize,
    const KE: usize,
    const VE: usize,
    const KP: usize,
    const VP: usize,
    const KPIECE: usize,
    const VPIECE: usize,
    const KALIGN: usize,
    const VALIGN: usize,
    const T: usize,
    const U: usize,
    const S: usize,
    const ORDER: u32,
    const PAGED: bool,
>(
    q: &Buffer<Q>,
    k: &Buffer<u8>,
    v: &Buffer<u8>,
    table: &Buffer<u32>,
    sequences: &Buffer<i32>,
    factors: &Buffer<f32>,
    codebooks: &Buffer<f32>,
    means: &Buffer<f32>,
    slopes: &Buffer<f32>,
    mask: &Buffer<u8>,
    tree: &Buffer<u8>,
    params: &Attend,
    partial_out: &mut Buffer<f32>,
    partial_max_sum: &mut Buffer<f32>,
    #[constant] has_softcap: bool,
    #[constant] has_alibi: bool,
    #[constant] has_mask: bool,
    #[constant] has_tree_mask: bool,
    #[constant] has_k_mean: bool,
) {
    let mut queries: Shared<f32> = shared(8 * T * D);
    // Of each row: what its products are multiplied with, and what its scores have added.
    let mut units: Shared<f32> = shared(8 * T);
    let mut biases: Shared<f32> = shared(8 * T);

    let index = group_z();
    let kv_head = group_x() / params.tiles;
    let first_row = group_x() % params.tiles * (8 * T) as u32;
    let sequence = sequence_of(sequences, index);
    let rows = sequence.q_len * params.group;
    if first_row >= rows {
        return;
    }

    let lane_row = matrix_row();
    let pair = matrix_pair();
    let mut slope = [[0.0; 2]; T];
    let mut position = [[0i32; 2]; T];
    let mut begin = [[0i32; 2]; T];
    let mut end = [[0i32; 2]; T];
    let mut mask_row = [[0u64; 2]; T];
    let mut tree_row = [[0u64; 2]; T];
    // Keys that some row sees, and those that every row sees.
    let mut low = i32::MAX;
    let mut high = 0i32;
    let mut full_low = 0i32;
    let mut full_high = i32::MAX;
    for t in 0..T {
        for n in 0..2usize {
            let row = first_row + 8 * t as u32 + 2 * pair + n as u32;
            if row < rows {
                let query = row / params.group;
                let head = kv_head * params.group + row % params.group;
                let at = sequence.offset + query as i32;
                position[t][n] = at;
                begin[t][n] = at.saturating_sub(params.left).clamp(0, sequence.kv_len);
                end[t][n] = at.saturating_add(params.right).saturating_add(1).clamp(0, sequence.kv_len);
                if begin[t][n] < end[t][n] {
                    // What lies between a row and the nearest key that it sees changes no weight, and leaves f32 no digits for what does:
                    // it is added to the logsumexp.
                    position[t][n] = at.clamp(begin[t][n], end[t][n] - 1);
                }
                if has_alibi {
                    let own = slopes[head];
                    // The host cannot refuse a slope in the memory of a device: its rows are NaN.
                    slope[t][n] = select(own.abs() <= MAX_ALIBI_SLOPE, own * LOG2E, f32::NAN);
                    if group_y() == 0 && simd_index() == 0 && lane_row == 0 {
                        let result = (sequence.batch * params.queries + sequence.q_start + query)
                            * params.q_heads
                            + head;
                        let results =
                            params.batches * params.queries * params.q_heads * params.splits * S as u32;
                        partial_max_sum[2 * results + result] = -own * at.abs_diff(position[t][n]) as f32;
                    }
                }
                if has_mask {
                    mask_row[t][n] = index as u64 * params.mask[0]
                        + head as u64 * params.mask[1]
                        + query as u64 * params.mask[2];
                }
                if has_tree_mask {
                    tree_row[t][n] = (sequence.q_start + query) as u64 * params.tree;
                }
                if begin[t][n] < end[t][n] {
                    low = low.min(begin[t][n]);
                    high = high.max(end[t][n]);
                }
                full_low = full_low.max(begin[t][n]);
                full_high = full_high.min(end[t][n]);
            }
        }
    }
    low = simd_min(low);
    high = simd_max(high);
    full_low = simd_max(full_low);
    full_high = simd_min(full_high);
    let tree_key = sequence.kv_len - sequence.q_len as i32;
    if has_tree_mask {
        full_high = full_high.min(tree_key);
    }

    let k_levels = Levels { magnitudes: params.k_levels, codebook: params.codebooks[0] };
    let v_levels = Levels { magnitudes: params.v_levels, codebook: params.codebooks[1] };
    let k_rests = Levels { magnitudes: params.k_levels, codebook: params.codebooks[0] + 256 };
    // What lies in no pages has an entry of its own; pages of a sequence are found by key.
    let mut entry = sequence.page as u64;
    if PAGED {
        entry = 0;
    }
    let k_start = entry * params.k[0] + kv_head as u64 * params.k[1];
    let v_start = entry * params.v[0] + kv_head as u64 * params.v[1];
    let k_source = source_at::<KF, D>(k_start, params.k[0], params.k[2], params.page);
    let v_source = source_at::<VF, DV>(v_start, params.v[0], params.v[2], params.page);

    // Tiles of keys of this SIMD group: those of a part are neighbours, which its SIMD groups take in turns.
    let keys = 16 * U as i32;
    let mut tile = 0i32;
    let mut tiles = 0i32;
    if low < high {
        let all = (high - low + keys - 1) / keys;
        let share =
            (all + (params.splits as i32 * S as i32) - 1) / (params.splits as i32 * S as i32) * S as i32;
        tile = share * group_y() as i32 + simd_index() as i32;
        tiles = (share * (group_y() as i32 + 1)).min(all);
    }
    let last = (high - 1).max(0) as u32;
    let step = keys as u32 * S as u32;
    let mut base = low.max(0) as u32 + tile as u32 * keys as u32;
    let end_base = low.max(0) as u32 + tiles as u32 * keys as u32;

    // Words of the tile that is next.
    let mut k_words = [[[0u32; KW]; 2]; U];
    let mut v_words = [[[0u32; VW]; 4]; U];
    let mut k_scales = [[no_scale(); 2]; U];
    let mut v_scales = [[no_scale(); 2]; U];
    let mut v_halves = [[[1.0; 2]; 4]; U];
    if base < end_base {
        for u in 0..U {
            for h in 0..2usize {
                let key = (base + 16 * u as u32 + 8 * h as u32 + lane_row).min(last);
                let row = find::<KF, D, PAGED>(table, params, sequence, index, k_source, key);
                k_words[u][h] = fetch::<KF, D, 4, KW, KPIECE, KALIGN>(k, row, pair, k_levels, codebooks);
                k_scales[u][h] = scale_of::<KF, D>(k, row);
                if VF >= INT8 {
                    let row = find::<VF, DV, PAGED>(table, params, sequence, index, v_source, key);
                    v_scales[u][h] = scale_of::<VF, DV>(v, row);
                }
            }
            for n in 0..4usize {
                let key = (base + 16 * u as u32 + 8 * (n / 2) as u32 + 2 * pair + (n % 2) as u32).min(last);
                let row = find::<VF, DV, PAGED>(table, params, sequence, index, v_source, key);
                v_words[u][n] = fetch::<VF, DV, 8, VW, VPIECE, VALIGN>(v, row, lane_row, v_levels, codebooks);
                if VF >= MLX4 {
                    let scale = scale_of::<VF, DV>(v, row);
                    v_halves[u][n] = scale.halves;
                }
            }
        }
    }

    // Queries, while the first keys and values are on their way.
    for at in (thread_index()..(8 * T * D) as u32).step_by(32 * S) {
        let row = first_row + at / D as u32;
        let mut x = 0.0;
        if row < rows {
            let head = kv_head * params.group + row % params.group;
            let query = sequence.q_start + row / params.group;
            let start =
                sequence.batch as u64 * params.q[0] + head as u64 * params.q[1] + query as u64 * params.q[2];
            x = q[start + (at % D as u32) as u64].to_f32();
        }
        queries[at] = x;
    }
    barrier();
    for row in (simd_index()..(8 * T) as u32).step_by(S) {
        let start = row * D as u32;
        let mut bias = 0.0;
        if has_k_mean {
            for c in (simd_lane()..D as u32).step_by(32) {
                bias += queries[start + c] * means[kv_head * D as u32 + c];
            }
            bias = simd_sum(bias);
        }
        if ORDER > 0 {
            rotate::<D, ORDER>(&mut queries, start, factors);
        }
        let mut unit = 1.0;
        if KF >= INT8 {
            let mut greatest = 0.0;
            for c in (simd_lane()..D as u32).step_by(32) {
                greatest = greatest.max(queries[start + c].abs());
            }
            // A power of two near the greatest: numbers stay as they are but for their exponent.
            unit =
                f32::from_bits((simd_max(greatest).to_bits() & 0x7f80_0000).clamp(0x2000_0000, 0x6000_0000));
            let inverse = 1.0 / unit;
            for c in (simd_lane()..D as u32).step_by(32) {
                queries[start + c] *= inverse;
            }
        }
        if simd_lane() == 0 {
            units[row] = unit * params.scale;
            biases[row] = bias * params.scale;
        }
    }
    barrier();

    // With codes what f16 leaves of a query is a second operand: scores are those of f32 queries.
    let mut right_q = [[right_zero::<K>(); KN]; T];
    let mut right_rest = [[right_zero::<K>(); KN]; T];
    let mut unit = [[0.0; 2]; T];
    let mut bias = [[0.0; 2]; T];
    for t in 0..T {
        for i in 0..KN {
            let start = (8 * t as u32 + lane_row) * D as u32;
            let first = coordinate::<KF, D, 4, KPIECE>(pair, 2 * i as u32);
            let second = coordinate::<KF, D, 4, KPIECE>(pair, 2 * i as u32 + 1);
            let x = queries[start + first];
            let y = queries[start + second];
            right_q[t][i] = right_transposed::<K>(x, y);
            if KF >= INT8 {
                let x_rest = x - K::from_f32(x).to_f32();
                let y_rest = y - K::from_f32(y).to_f32();
                right_rest[t][i] = right_transposed::<K>(x_rest, y_rest);
            }
        }
        for n in 0..2usize {
            unit[t][n] = units[8 * t as u32 + 2 * pair + n as u32];
            bias[t][n] = biases[8 * t as u32 + 2 * pair + n as u32];
        }
    }
    let mut acc = [[[[0.0; 2]; 2]; VN]; T];
    let mut row_max = [[f32::NEG_INFINITY; 2]; T];
    let mut row_sum = [[0.0; 2]; T];
    // A row whose sums overflow, though its weights do not, is computed again with sums that are smaller by SHRINK.
    // Bits of `lifted` say which, and SECOND_PASS that it is that: one register for all of it.
    let first_base = base;
    let mut lifted = 0u32;
    let mut passes = true;
    while passes {
        let mut more = base < end_base;
        while more {
            // What comes after the last tile is the first one, if there is a second pass.
            more = base + step < end_base;
            let next = select(more, base + step, first_base);
            let mut scores = [[[[0.0; 2]; 2]; T]; U];
            let mut v_scale = [[no_scale(); 2]; U];
            for u in 0..U {
                let mut whole = [[[0.0; 2]; 2]; T];
                let low_keys = pairs::<KF, D, 4, KW, KP, KE>(k_words[u][0], pair, k_levels, codebooks);
                let high_keys = pairs::<KF, D, 4, KW, KP, KE>(k_words[u][1], pair, k_levels, codebooks);
                // Numbers of codebooks are no f16, as those of other codes are.
                let mut low_rests = low_keys;
                let mut high_rests = high_keys;
                if KF >= MLX4 {
                    low_rests = pairs::<KF, D, 4, KW, KP, KE>(k_words[u][0], pair, k_rests, codebooks);
                    high_rests = pairs::<KF, D, 4, KW, KP, KE>(k_words[u][1], pair, k_rests, codebooks);
                }
                for i in 0..KN {
                    let first = left::<K>(low_keys[KE * i], low_keys[KE * i + KE - 1]);
                    let second = left::<K>(high_keys[KE * i], high_keys[KE * i + KE - 1]);
                    for t in 0..T {
                        let mut part = scores[u][t];
                        // In f32 sums of 64 products are summed: their error is that of fewer additions.
                        if KE == 2 && i % 8 == 0 {
                            part = [[0.0; 2]; 2];
                            whole[t] = added(whole[t], scores[u][t]);
                        }
                        if KF >= MLX4 && D == 512 && i == KN / 2 {
                            part = [[0.0; 2]; 2];
                            whole[t] = of_half(scores[u][t], k_scales[u], 0);
                        }
                        scores[u][t] = multiply_add::<K>([first, second], right_q[t][i], part);
                        if KF >= INT8 {
                            scores[u][t] = multiply_add::<K>([first, second], right_rest[t][i], scores[u][t]);
                        }
                        if KF >= MLX4 {
                            let first_rest = left::<K>(low_rests[KE * i], low_rests[KE * i + KE - 1]);
                            let second_rest = left::<K>(high_rests[KE * i], high_rests[KE * i + KE - 1]);
                            scores[u][t] =
                                multiply_add::<K>([first_rest, second_rest], right_q[t][i], scores[u][t]);
                        }
                    }
                }
                for t in 0..T {
                    if KE == 2 {
                        scores[u][t] = added(whole[t], scores[u][t]);
                    }
                    if KF >= MLX4 && D == 512 {
                        scores[u][t] = added(whole[t], of_half(scores[u][t], k_scales[u], 1));
                    }
                }
                for h in 0..2usize {
                    for t in 0..T {
                        for n in 0..2usize {
                            scores[u][t][h][n] =
                                scores[u][t][h][n] * (unit[t][n] * k_scales[u][h].whole) + bias[t][n];
                        }
                    }
                    v_scale[u][h] = v_scales[u][h];
                    let key = (next + 16 * u as u32 + 8 * h as u32 + lane_row).min(last);
                    let row = find::<KF, D, PAGED>(table, params, sequence, index, k_source, key);
                    k_words[u][h] = fetch::<KF, D, 4, KW, KPIECE, KALIGN>(k, row, pair, k_levels, codebooks);
                    k_scales[u][h] = scale_of::<KF, D>(k, row);
                    if VF >= INT8 {
                        let row = find::<VF, DV, PAGED>(table, params, sequence, index, v_source, key);
                        v_scales[u][h] = scale_of::<VF, DV>(v, row);
                    }
                }
            }

            // What hides and changes scores; the greatest of them with the scale of the value.
            let partial = has_mask || (base as i32) < full_low || base as i32 + keys > full_high;
            let mut grown = false;
            let mut greatest = [[f32::NEG_INFINITY; 2]; T];
            for u in 0..U {
                for h in 0..2usize {
                    let key = base as i32 + 16 * u as i32 + 8 * h as i32 + lane_row as i32;
                    let mut scale = 0.0;
                    if VF >= INT8 {
                        scale = v_scale[u][h].whole.log2().max(MIN_SCALE);
                    }
                    for t in 0..T {
                        for n in 0..2usize {
                            let mut score = scores[u][t][h][n];
                            if has_softcap {
                                score = params.cap * score.tanh();
                            }
                            if has_alibi {
                                score -= slope[t][n] * position[t][n].abs_diff(key) as f32;
                            }
                            if partial {
                                let mut seen = key >= begin[t][n] && key < end[t][n];
                                if has_tree_mask && seen && key >= tree_key {
                                    let column = (key - tree_key) as u64 * params.tree_step as u64;
                                    seen = tree[tree_row[t][n] + column] as u32 != 0;
                                }
                                if has_mask && seen {
                                    let column = key as u64 * params.mask_step as u64;
                                    let bias = bias_at(mask, params.mask_kind, mask_row[t][n] + column);
                                    seen = bias != f32::NEG_INFINITY;
                                    let core = bias.max(-HUGE_BIAS).min(HUGE_BIAS);
                                    score += core * LOG2E;
                                    score += (bias - core) * HUGE_RATE;
                                    if bias.is_nan() {
                                        score = f32::NAN;
                                    }
                                }
                                score = select(seen, score, f32::NEG_INFINITY);
                            }
                            scores[u][t][h][n] = score;
                            greatest[t][n] = greatest[t][n].max(score + scale);
                            grown = grown || score + scale > row_max[t][n] + SLACK;
                        }
                    }
                }
            }
            if simd_any(grown) {
                for t in 0..T {
                    for n in 0..2usize {
                        let new = row_max[t][n].max(matrix_column_max(greatest[t][n]));
                        let by = select(new == f32::NEG_INFINITY, 1.0, (row_max[t][n] - new).exp2());
                        row_max[t][n] = new;
                        row_sum[t][n] *= by;
                        for i in 0..VN {
                            for h in 0..2usize {
                                acc[t][i][h][n] *= by;
                            }
                        }
                    }
                }
            }

            for u in 0..U {
                // Weights, as right operands of eight keys.
                let mut p = [[[0.0; 2]; 2]; T];
                for t in 0..T {
                    for h in 0..2usize {
                        for n in 0..2usize {
                            let score = scores[u][t][h][n];
                            let w = select(score == f32::NEG_INFINITY, 0.0, (score - row_max[t][n]).exp2());
                            row_sum[t][n] += w;
                            p[t][h][n] = w;
                            if VF >= INT8 {
                                p[t][h][n] = select(w == 0.0, 0.0, w * v_scale[u][h].whole);
                            }
                        }
                    }
                }
                if lifted != 0 {
                    for t in 0..T {
                        for h in 0..2usize {
                            for n in 0..2usize {
                                p[t][h][n] *= shrink_of(lifted, 2 * t + n);
                            }
                        }
                    }
                }
                // Codes are finite numbers but for those of e4m3.
                let mut careful = false;
                if partial && (VF < INT8 || VF == FP8) {
                    for n in 0..4usize {
                        careful = careful || not_finite::<VF, VW>(v_words[u][n]);
                    }
                    careful = simd_any(careful);
                }
                if careful {
                    // Products with hidden keys would not be 0: key by key, of those that a row sees. How many there are is not
                    // known to compilers: written out, this path would be most of the kernel.
                    let first = base + 16 * u as u32;
                    for n in 0..(last + 1).saturating_sub(first).min(16) {
                        let row = find::<VF, DV, PAGED>(table, params, sequence, index, v_source, first + n);
                        let from = matrix_lane(n % 8, pair);
                        let mut seen = [[false; 2]; T];
                        let mut w = [[0.0; 2]; T];
                        for t in 0..T {
                            for m in 0..2usize {
                                let score = select(n < 8, scores[u][t][0][m], scores[u][t][1][m]);
                                seen[t][m] = simd_shuffle(score, from) != f32::NEG_INFINITY;
                                w[t][m] = simd_shuffle(select(n < 8, p[t][0][m], p[t][1][m]), from);
                            }
                        }
                        for i in 0..VN {
                            for half in 0..2usize {
                                let c = coordinate::<VF, DV, 8, VPIECE>(lane_row, (2 * i + half) as u32);
                                let x = gather::<VF, DV>(v, row, c, v_levels, codebooks);
                                for t in 0..T {
                                    for m in 0..2usize {
                                        acc[t][i][half][m] += select(seen[t][m], w[t][m] * x, 0.0);
                                    }
                                }
                            }
                        }
                    }
                } else {
                    for h in 0..2usize {
                        let a = with_norms::<VF, DV, 8, VPIECE, VP>(
                            pairs::<VF, DV, 8, VW, VP, VE>(v_words[u][2 * h], lane_row, v_levels, codebooks),
                            lane_row,
                            v_halves[u][2 * h],
                        );
                        let b = with_norms::<VF, DV, 8, VPIECE, VP>(
                            pairs::<VF, DV, 8, VW, VP, VE>(
                                v_words[u][2 * h + 1],
                                lane_row,
                                v_levels,
                                codebooks,
                            ),
                            lane_row,
                            v_halves[u][2 * h + 1],
                        );
                        for t in 0..T {
                            let right_w = right::<V>(p[t][h][0], p[t][h][1]);
                            for i in 0..VN {
                                let mut first = left::<V>(a[VE * i], b[VE * i]);
                                let mut second = left::<V>(a[VE * i + VE - 1], b[VE * i + VE - 1]);
                                if VE == 1 {
                                    // Words of two coordinates of one key become words of two keys of one coordinate.
                                    let even = byte_permute(a[i], b[i], 0x5410);
                                    let odd = byte_permute(a[i], b[i], 0x7632);
                                    first = left::<V>(even, even);
                                    second = left::<V>(odd, odd);
                                }
                                acc[t][i] = multiply_add::<V>([first, second], right_w, acc[t][i]);
                            }
                        }
                    }
                }
                for n in 0..4usize {
                    let key =
                        (next + 16 * u as u32 + 8 * (n / 2) as u32 + 2 * pair + (n % 2) as u32).min(last);
                    let row = find::<VF, DV, PAGED>(table, params, sequence, index, v_source, key);
                    v_words[u][n] =
                        fetch::<VF, DV, 8, VW, VPIECE, VALIGN>(v, row, lane_row, v_levels, codebooks);
                    if VF >= MLX4 {
                        let scale = scale_of::<VF, DV>(v, row);
                        v_halves[u][n] = scale.halves;
                    }
                }
            }
            base = next;
        }
        passes = false;
        // Of f16 and of codes the largest sums are numbers.
        if lifted == 0 && (VF == F32 || VF == BF16) {
            for t in 0..T {
                for n in 0..2usize {
                    let mut found = 0.0;
                    for i in 0..VN {
                        for h in 0..2usize {
                            found = select(acc[t][i][h][n].abs() < f32::INFINITY, found, 1.0);
                        }
                    }
                    let any = matrix_column_max(found);
                    let sum = matrix_column_sum(row_sum[t][n]);
                    lifted |= select(any > 0.0 && sum < f32::INFINITY, 1u32 << (2 * t + n) as u32, 0u32);
                }
            }
            passes = simd_any(lifted != 0);
            if passes {
                lifted |= SECOND_PASS;
                acc = [[[[0.0; 2]; 2]; VN]; T];
                row_max = [[f32::NEG_INFINITY; 2]; T];
                row_sum = [[0.0; 2]; T];
            }
        }
    }

    for t in 0..T {
        for n in 0..2usize {
            let row = first_row + 8 * t as u32 + 2 * pair + n as u32;
            let shrink = shrink_of(lifted, 2 * t + n);
            let sum = matrix_column_sum(row_sum[t][n]) * shrink;
            if row < rows {
                let head = kv_head * params.group + row % params.group;
                let query = sequence.q_start + row / params.group;
                let result = (sequence.batch * params.queries + query) * params.q_heads + head;
                let slot = (result * params.splits + group_y()) * S as u32 + simd_index();
                for i in 0..VN {
                    for h in 0..2usize {
                        let c = coordinate::<VF, DV, 8, VPIECE>(lane_row, (2 * i + h) as u32);
                        partial_out[slot as u64 * DV as u64 + c as u64] = acc[t][i][h][n];
                    }
                }
                if lane_row == 0 {
                    // A part without a reference counts as one of no key; where weights are NaN any number will do.
                    partial_max_sum[2 * slot] = select(sum.is_nan(), 0.0, row_max[t][n] - shrink.log2());
                    partial_max_sum[2 * slot + 1] = sum;
                }
            }
        }
    }
}
