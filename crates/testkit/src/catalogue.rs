//! The named case catalogue: every forward feature, every edge of a tile, every dtype.
//!
//! Cases are small: the oracle takes milliseconds for each. Sizes straddle the planner's blocks of 256 keys, its
//! tiles of query rows, and the register tiles of every instruction set.
//!
//! Cases are rows of constant tables and loops over them: a case costs data, not code.

use super::cases::{Case, Keep, MaskFill, Tree};
use super::poison::Layout;
use Codec::{
    BF16, F16, F32, Fp8, Int8, MlxTq4, MlxTq5, MlxTq6, MlxTq8, MlxTq8Plain, Rot16, Tq2, Tq3, Tq4, Tq5, Tq6,
};
use QOffset::{At, BottomRight, TopLeft};
use With::{
    Alibi, AlibiPerSequence, Bias, Cached, Causal, Centered, Chunks, Equalized, Gain, KvLens, Mask, Offset,
    Packed, Scale, Shared, Sinks, Softcap, Stored, TreeMask, Window,
};
use flashtile_core::codec::Codec;
use flashtile_core::dtype::{Dtype, MaskKind};
use flashtile_core::limits::MAX_LEN;
use flashtile_core::problem::{QOffset, Visibility};
use std::ops::Range;

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];

/// Dimensions in the order of [`Case::new`].
type Dims = [usize; 7];

/// Query and key rows of each sequence.
type Lengths<'a> = &'a [(usize, usize)];

/// Features that a case has in addition to dimensions and dtype.
#[derive(Clone, Copy)]
enum With<'a> {
    In(Layout),
    Gain(f32),
    Offset(QOffset),
    /// Keys visible to the left and to the right.
    Window(Option<usize>, Option<usize>),
    /// Keys of a chunk.
    Chunks(usize),
    Causal(QOffset),
    Softcap(f32),
    Scale(f32),
    Alibi,
    AlibiPerSequence,
    Sinks,
    Mask(MaskKind, &'a str, MaskFill),
    /// An additive mask of the case's dtype.
    Bias(&'a str, MaskFill),
    KvLens(&'a [usize]),
    Packed(Lengths<'a>),
    Cached(Lengths<'a>, usize, Keep),
    Shared(&'a [(Range<usize>, usize)]),
    TreeMask(Tree),
    Stored(Codec, Codec),
    Centered,
    Equalized,
}

impl With<'_> {
    fn apply(self, case: Case) -> Case {
        match self {
            Self::In(layout) => case.layout(layout),
            Gain(gain) => case.gain(gain),
            Offset(offset) => case.at(offset),
            Window(left, right) => case.seeing(Visibility::window(left, right)),
            Chunks(chunk) => case.seeing(Visibility::full().chunked(chunk)),
            Causal(offset) => case.causal(offset),
            Softcap(softcap) => case.softcap(softcap),
            Scale(scale) => case.scale(scale),
            Alibi => case.alibi(),
            AlibiPerSequence => case.alibi_per_sequence(),
            Sinks => case.sinks(),
            Mask(kind, broadcast, fill) => case.mask(kind, broadcast, fill),
            Bias(broadcast, fill) => {
                let kind = MaskKind::Additive(case.desc.dtype);
                case.mask(kind, broadcast, fill)
            }
            KvLens(kv_lens) => case.kv_lens(kv_lens),
            Packed(lengths) => case.packed(lengths),
            Cached(lengths, page, keep) => case.cached(lengths, page, keep),
            Shared(prefixes) => case.shared(prefixes),
            TreeMask(tree) => case.tree(tree),
            Stored(k, v) => case.stored(k, v),
            Centered => case.centered(),
            Equalized => case.equalized(),
        }
    }
}

/// One case for each dtype.
struct Row {
    name: &'static str,
    dims: Dims,
    with: &'static [With<'static>],
}

const fn row(name: &'static str, dims: Dims, with: &'static [With<'static>]) -> Row {
    Row { name, dims, with }
}

/// The cases so far.
#[derive(Default)]
struct Cases(Vec<Case>);

impl Cases {
    /// Adds a case. Features are applied in order; packed and cached sequences change the layout that they find.
    fn add(&mut self, name: String, dims: Dims, dtype: Dtype, with: &[With<'_>]) {
        let case = Case::new(name, dims, dtype);
        self.0.push(with.iter().fold(case, |case, with| with.apply(case)));
    }

    /// Adds the cases of a dtype, named `prefix`, row, dtype; the features `common` come first.
    fn rows(&mut self, prefix: &str, dtype: Dtype, rows: &[Row], common: &[With<'_>]) {
        for row in rows {
            let with = [common, row.with].concat();
            self.add(format!("{prefix}{}_{dtype}", row.name), row.dims, dtype, &with);
        }
    }

    /// Adds the rows for each dtype in turn.
    fn of_each_dtype(&mut self, prefix: &str, rows: &[Row]) {
        for dtype in DTYPES {
            self.rows(prefix, dtype, rows, &[]);
        }
    }
}

/// Every case of plain elements.
#[must_use]
pub fn catalogue() -> Vec<Case> {
    let mut cases = Cases::default();
    let groups = [
        dims, causal, windows, scores, masks, lengths, packed, cached, prefixes, trees, degenerate, decode,
        mixed,
    ];
    groups.iter().for_each(|add| add(&mut cases));
    cases.0.extend(super::edges::edges());
    cases.0
}

/// The case of a name.
#[must_use]
pub fn find(name: &str) -> Option<Case> {
    catalogue().into_iter().find(|case| case.name == name)
}

/// Cycles through dtypes and layouts, so that neighbouring cases differ in both.
fn dtype(n: usize) -> Dtype {
    DTYPES[n % DTYPES.len()]
}

fn layout(n: usize) -> With<'static> {
    With::In(Layout::ALL[n % Layout::ALL.len()])
}

const BSHD: With<'static> = With::In(Layout::Bshd);
const PADDED: With<'static> = With::In(Layout::Padded);
const FUSED: With<'static> = With::In(Layout::Fused);

const HEAD_DIMS: [usize; 21] =
    [1, 3, 8, 16, 31, 32, 33, 63, 64, 65, 80, 96, 127, 128, 129, 192, 255, 256, 257, 320, 512];

const VALUE_DIMS: [(usize, usize); 8] =
    [(192, 128), (128, 192), (1, 64), (64, 1), (512, 31), (33, 257), (65, 63), (8, 512)];

/// Query heads and key/value heads.
const HEADS: [(usize, usize); 9] =
    [(1, 1), (3, 3), (4, 2), (6, 2), (5, 1), (8, 1), (16, 1), (16, 8), (14, 2)];

const KEYS: [usize; 18] = [1, 2, 15, 16, 17, 63, 64, 65, 127, 255, 256, 257, 511, 512, 513, 767, 769, 1000];

const QUERIES: [usize; 25] =
    [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 15, 16, 17, 18, 23, 24, 25, 31, 32, 33, 47, 48, 49, 97];

/// Head dimensions, GQA groups, layouts, and lengths around tile edges.
fn dims(cases: &mut Cases) {
    for (n, d) in HEAD_DIMS.into_iter().enumerate() {
        for dtype in DTYPES {
            cases.add(format!("head_dim_{d}_{dtype}"), [1, 2, 1, 19, 37, d, d], dtype, &[layout(n)]);
        }
    }
    for (n, (d, dv)) in VALUE_DIMS.into_iter().enumerate() {
        cases.add(format!("value_dim_{d}_{dv}"), [2, 2, 2, 13, 29, d, dv], dtype(n), &[layout(n)]);
    }
    for (n, (h, hkv)) in HEADS.into_iter().enumerate() {
        let name = match (h / hkv, hkv) {
            (1, _) => format!("mha_{h}"),
            (_, 1) => format!("mqa_{h}"),
            (group, _) => format!("gqa_{group}_of_{h}"),
        };
        for layout in Layout::ALL {
            let name = format!("{name}_{layout:?}").to_lowercase();
            cases.add(name, [2, h, hkv, 9, 21, 16, 16], dtype(n), &[With::In(layout)]);
        }
    }
    for (n, dtype) in DTYPES.into_iter().enumerate() {
        cases.add(format!("batch_7_{dtype}"), [7, 4, 2, 5, 11, 24, 24], dtype, &[layout(n + 1)]);
    }
    for (n, kv_len) in KEYS.into_iter().enumerate() {
        cases.add(format!("keys_{kv_len}"), [1, 2, 1, 7, kv_len, 40, 24], dtype(n), &[layout(n)]);
    }
    for (n, q_len) in QUERIES.into_iter().enumerate() {
        cases.add(format!("queries_{q_len}"), [1, 3, 3, q_len, 70, 20, 20], dtype(n), &[layout(n)]);
    }
}

/// Query rows, key rows, position of query row 0.
const CAUSAL: [(usize, usize, QOffset, &str); 21] = [
    (40, 40, TopLeft, "square"),
    (40, 48, TopLeft, "top_left"),
    (40, 48, BottomRight, "bottom_right"),
    (40, 48, At(8), "offset_8_unaligned"),
    (40, 48, At(3), "offset_3"),
    (40, 48, At(-5), "offset_negative"),
    (40, 48, At(-40), "offset_before_all_keys"),
    (40, 48, At(47), "offset_last_key"),
    (40, 48, At(1000), "offset_past_all_keys"),
    (48, 40, TopLeft, "more_queries_top_left"),
    (48, 40, BottomRight, "more_queries_bottom_right"),
    (300, 17, BottomRight, "many_more_queries"),
    (300, 17, TopLeft, "many_more_queries_top_left"),
    (255, 255, TopLeft, "255"),
    (257, 257, TopLeft, "257"),
    (100, 356, BottomRight, "chunk_100_after_256"),
    (33, 514, At(481), "chunk_33_after_481"),
    (64, 600, At(250), "diagonal_across_a_block_edge"),
    (1, 300, BottomRight, "one_query"),
    (40, 48, At(MAX_LEN as i64), "offset_largest"),
    (40, 48, At(-(MAX_LEN as i64)), "offset_smallest"),
];

/// Causal visibility under every alignment.
fn causal(cases: &mut Cases) {
    for (n, (q_len, kv_len, offset, name)) in CAUSAL.into_iter().enumerate() {
        for dtype in DTYPES {
            let name = format!("causal_{name}_{dtype}");
            cases.add(name, [1, 2, 1, q_len, kv_len, 32, 32], dtype, &[Causal(offset), layout(n)]);
        }
    }
    for (n, (h, hkv)) in [(4, 1), (6, 2), (7, 1), (2, 1)].into_iter().enumerate() {
        let name = format!("gqa_{}_causal", h / hkv);
        cases.add(name, [2, h, hkv, 35, 61, 48, 48], dtype(n), &[Causal(BottomRight), layout(n)]);
    }
    // Every combination of offset and length around the register tiles.
    for q_len in [5, 13, 34] {
        for offset in [1, 7, 8, 15, 31] {
            let (name, dims) =
                (format!("causal_chunk_{q_len}_after_{offset}"), [1, 1, 1, q_len, q_len + offset, 16, 16]);
            cases.add(name, dims, dtype(q_len + offset), &[Causal(At(offset as i64))]);
        }
    }
}

const BANDS: [(Option<usize>, Option<usize>, &str); 8] = [
    (Some(0), Some(0), "self_only"),
    (Some(7), Some(0), "causal_8"),
    (Some(16), Some(0), "causal_17"),
    (Some(3), Some(5), "both"),
    (None, Some(4), "right"),
    (Some(9), None, "left"),
    (Some(0), None, "forward"),
    (Some(usize::MAX), Some(usize::MAX), "unbounded_in_effect"),
];

/// Query rows, key rows, position of query row 0.
const BANDED: [(usize, usize, QOffset, &str); 4] = [
    (45, 45, TopLeft, "square"),
    (21, 80, BottomRight, "chunk"),
    (80, 21, TopLeft, "more_queries"),
    (30, 50, At(-7), "negative"),
];

/// Windows to the left, to the right, to both sides.
fn windows(cases: &mut Cases) {
    for (n, (left, right, name)) in BANDS.into_iter().enumerate() {
        for (q_len, kv_len, offset, place) in BANDED {
            let (name, dims) = (format!("window_{name}_{place}"), [1, 2, 2, q_len, kv_len, 24, 24]);
            cases.add(name, dims, dtype(n + q_len), &[Window(left, right), Offset(offset), layout(n)]);
        }
    }
    for (n, width) in [1, 64, 255, 256, 257, 300].into_iter().enumerate() {
        let with = [Window(Some(width), Some(0)), Offset(At(500)), layout(n)];
        cases.add(format!("window_{width}_across_blocks"), [1, 2, 1, 70, 640, 32, 32], dtype(n), &with);
    }
    for (n, chunk) in [1, 13, 64].into_iter().enumerate() {
        for (q_len, kv_len, offset, place) in BANDED {
            let with = [Chunks(chunk), if n == 0 { Offset(offset) } else { Causal(offset) }, layout(n)];
            let name = format!("chunks_of_{chunk}_{place}");
            cases.add(name, [1, 2, 2, q_len, kv_len, 24, 24], dtype(n + q_len), &with);
        }
    }
    let long = [Chunks(256), Causal(At(500))];
    cases.add("chunks_across_blocks".into(), [1, 4, 1, 140, 640, 64, 64], Dtype::BF16, &long);
    let misses = &[Window(Some(4), Some(4)), Offset(At(80))];
    cases.add("window_misses_all_keys".into(), [1, 2, 1, 30, 50, 16, 16], Dtype::F32, misses);
    let leaves = &[Window(Some(4), Some(0)), Offset(At(20))];
    cases.add("window_leaves_keys_behind".into(), [1, 2, 1, 60, 50, 16, 16], Dtype::F16, leaves);
}

const SCORED: Dims = [2, 4, 2, 23, 270, 64, 64];

const SCORES: [Row; 16] = [
    row("softcap_0.5", SCORED, &[Softcap(0.5)]),
    row("softcap_50", SCORED, &[Softcap(50.0), Gain(20.0)]),
    row("softcap_saturated", SCORED, &[Softcap(30.0), Gain(300.0)]),
    row("softcap_tiny_scores", SCORED, &[Softcap(50.0), Gain(1e-3)]),
    row("alibi", SCORED, &[Alibi, Offset(TopLeft)]),
    row("alibi_per_sequence", SCORED, &[AlibiPerSequence, Causal(BottomRight)]),
    row("alibi_causal", SCORED, &[Alibi, Causal(BottomRight)]),
    row("alibi_negative_offset", SCORED, &[Alibi, Offset(At(-90))]),
    row("sinks", SCORED, &[Sinks]),
    row("sinks_causal_no_keys", SCORED, &[Sinks, Causal(At(-9))]),
    row("sinks_softcap_alibi", SCORED, &[Sinks, Softcap(20.0), Alibi, Offset(BottomRight)]),
    row("large_scores", SCORED, &[Gain(30.0)]),
    row("very_large_scores", SCORED, &[Gain(150.0)]),
    row("large_scores_causal", SCORED, &[Gain(30.0), Causal(BottomRight)]),
    row("tiny_scores", SCORED, &[Gain(1e-4)]),
    row("zero_queries", SCORED, &[Gain(0.0)]),
];

/// Changes of the score: scale, softcap, ALiBi, sinks, magnitude.
fn scores(cases: &mut Cases) {
    for (n, scale) in [0.0, 1.0, 0.01, -0.3].into_iter().enumerate() {
        let with = [layout(n), Scale(scale)];
        cases.add(format!("scale_{scale}"), [2, 4, 2, 23, 300, 64, 64], dtype(n), &with);
    }
    cases.of_each_dtype("", &SCORES);
    cases.add("large_scores_d512".into(), [1, 1, 1, 30, 300, 512, 512], Dtype::F32, &[Gain(25.0)]);
    cases.add("large_scores_sinks".into(), [1, 3, 3, 30, 520, 64, 64], Dtype::F32, &[Gain(40.0), Sinks]);
    let far = &[Alibi, Offset(At(5000))];
    cases.add("alibi_far_away".into(), [1, 4, 4, 20, 60, 32, 32], Dtype::F32, far);
    // The largest positions of the portable kernels.
    for (name, at) in [("before", -(1 << 30)), ("after", (1 << 30) - 20)] {
        cases.add(format!("far_{name}"), [1, 4, 4, 20, 41, 64, 64], Dtype::F32, &[Offset(At(at))]);
    }
}

const MASK_KINDS: [(MaskKind, &str); 4] = [
    (MaskKind::Bool, "bool"),
    (MaskKind::Additive(Dtype::F32), "f32"),
    (MaskKind::Additive(Dtype::F16), "f16"),
    (MaskKind::Additive(Dtype::BF16), "bf16"),
];

const BROADCASTS: [&str; 16] =
    ["", "b", "h", "q", "k", "bh", "bq", "bk", "hq", "hk", "qk", "bhq", "bhk", "bqk", "hqk", "bhqk"];

const FILLS: [(MaskFill, &str); 4] = [
    (MaskFill::HiddenRows, "hidden_rows"),
    (MaskFill::Open, "open"),
    (MaskFill::Closed, "closed"),
    (MaskFill::Blocks, "blocks"),
];

/// A mask with its broadcast axes, its elements, and further features.
const MASKED: [(&str, &str, MaskFill, &[With<'_>]); 7] = [
    ("causal", "bh", MaskFill::Random, &[Causal(BottomRight)]),
    ("causal_blocks", "", MaskFill::Blocks, &[Causal(At(300))]),
    ("window_softcap", "h", MaskFill::Blocks, &[Softcap(5.0), Window(Some(200), Some(30)), Offset(At(400))]),
    ("sinks_hidden_rows", "b", MaskFill::HiddenRows, &[Sinks]),
    ("kv_lens", "", MaskFill::Random, &[KvLens(&[257, 13])]),
    ("kv_lens_broadcast", "bhq", MaskFill::Random, &[KvLens(&[0, 300])]),
    ("decode", "hq", MaskFill::Random, &[Scale(0.4)]),
];

/// Materialised masks: kinds, broadcast axes, mask tiles, magnitudes.
fn masks(cases: &mut Cases) {
    let named = |broadcast: &'static str| if broadcast.is_empty() { "full" } else { broadcast };
    for (n, broadcast) in BROADCASTS.into_iter().enumerate() {
        for (kind, kind_name) in MASK_KINDS {
            let name = format!("mask_{kind_name}_broadcast_{}", named(broadcast));
            let with = [layout(n), Mask(kind, broadcast, MaskFill::Random)];
            cases.add(name, [2, 4, 2, 22, 45, 16, 16], dtype(n), &with);
        }
    }
    for (n, (kind, kind_name)) in MASK_KINDS.into_iter().enumerate() {
        for (fill, fill_name) in FILLS {
            for broadcast in ["", "bh", "b", "h"] {
                let name = format!("mask_{kind_name}_{fill_name}_{}", named(broadcast));
                let with = [layout(n), Mask(kind, broadcast, fill)];
                cases.add(name, [2, 3, 3, 90, 640, 8, 8], dtype(n), &with);
            }
        }
        for (name, broadcast, fill, rest) in MASKED {
            let with = [&[Mask(kind, broadcast, fill)], rest].concat();
            cases.add(format!("mask_{kind_name}_{name}"), [2, 4, 2, 50, 560, 24, 24], dtype(n), &with);
        }
        let late = &[Mask(kind, "h", MaskFill::Late)];
        cases.add(format!("mask_{kind_name}_late"), [1, 2, 1, 20, 2048, 16, 16], dtype(n), late);
    }
    for (kind, kind_name) in &MASK_KINDS[1..3] {
        for dtype in [Dtype::F32, Dtype::F16] {
            let name = format!("mask_{kind_name}_extreme_d512_{dtype}");
            cases.add(name, [1, 2, 1, 21, 301, 512, 512], dtype, &[Mask(*kind, "b", MaskFill::Extreme)]);
        }
    }
    // An odd number of keys puts every other row of a 16-bit mask at an odd address.
    for kv_len in [33, 257] {
        let (name, dims) = (format!("mask_f16_odd_rows_{kv_len}"), [1, 1, 1, 17, kv_len, 64, 64]);
        cases.add(name, dims, Dtype::F16, &[Bias("", MaskFill::Random)]);
    }
}

const BATCH: Dims = [4, 4, 2, 21, 530, 32, 32];
const BATCH_LENS: With<'_> = KvLens(&[530, 1, 0, 259]);

/// Padded batches.
const LENGTHS: [Row; 7] = [
    row("kv_lens", BATCH, &[BATCH_LENS]),
    row("kv_lens_bottom_right", BATCH, &[BATCH_LENS, Causal(BottomRight)]),
    row("kv_lens_top_left", BATCH, &[KvLens(&[3, 256, 257, 20]), Causal(TopLeft), BSHD]),
    row("kv_lens_offset", BATCH, &[KvLens(&[50, 256, 511, 29]), Causal(At(29)), PADDED]),
    row("kv_lens_window", BATCH, &[BATCH_LENS, Window(Some(40), Some(2)), Offset(BottomRight), FUSED]),
    row("kv_lens_alibi_sinks", BATCH, &[BATCH_LENS, Alibi, Sinks, Offset(BottomRight)]),
    row("kv_lens_all_empty", BATCH, &[KvLens(&[0, 0, 0, 0])]),
];

fn lengths(cases: &mut Cases) {
    cases.of_each_dtype("", &LENGTHS);
}

const PACK: Dims = [1, 4, 2, 0, 0, 32, 32];
const SQUARE: With<'_> = Packed(&[(5, 5), (1, 1), (70, 70), (0, 0), (33, 33), (259, 259)]);
const UNEVEN: With<'_> = Packed(&[(5, 9), (0, 4), (7, 0), (1, 300), (40, 12), (0, 0), (13, 513)]);

/// Packed sequences.
const PACKED: [Row; 13] = [
    row("square", PACK, &[SQUARE]),
    row("uneven", PACK, &[UNEVEN]),
    row("square_causal", PACK, &[SQUARE, Window(None, Some(0))]),
    row("uneven_causal", PACK, &[UNEVEN, Causal(BottomRight), PADDED]),
    row("uneven_top_left", PACK, &[UNEVEN, Causal(TopLeft), FUSED]),
    row("uneven_offset", PACK, &[UNEVEN, Causal(At(3))]),
    row("window", PACK, &[UNEVEN, Window(Some(20), Some(3)), Offset(BottomRight)]),
    row("alibi_per_sequence", PACK, &[UNEVEN, AlibiPerSequence, Causal(BottomRight)]),
    row("chunks", PACK, &[UNEVEN, Chunks(30), Causal(BottomRight)]),
    row("alibi_sinks_softcap", PACK, &[UNEVEN, Alibi, Sinks, Softcap(9.0), Offset(BottomRight)]),
    row("mask", PACK, &[UNEVEN, Bias("", MaskFill::Random)]),
    row("mask_bool", PACK, &[UNEVEN, Mask(MaskKind::Bool, "h", MaskFill::HiddenRows)]),
    row("mask_shared", PACK, &[UNEVEN, Mask(MaskKind::Bool, "bhq", MaskFill::Random)]),
];

fn packed(cases: &mut Cases) {
    cases.of_each_dtype("packed_", &PACKED);
    cases.add("packed_none".into(), PACK, Dtype::F32, &[Packed(&[])]);
    cases.add("packed_one".into(), [1, 4, 2, 0, 0, 65, 33], Dtype::F16, &[Packed(&[(31, 45)])]);
    let many: Vec<(usize, usize)> = (0..40).map(|n| (n % 7, (n * 5) % 23)).collect();
    let with = [Packed(&many), Causal(BottomRight)];
    cases.add("packed_forty".into(), [1, 6, 2, 0, 0, 16, 16], Dtype::F32, &with);
}

const STEPS: Lengths<'_> = &[(1, 300), (1, 1), (1, 513), (1, 17)];
const MIXED: Lengths<'_> = &[(40, 70), (1, 300), (0, 9), (13, 13), (0, 0), (3, 600), (1, 1), (33, 289)];
/// More queries than keys, as in cross-attention.
const CROSSED: Lengths<'_> = &[(5, 9), (0, 4), (7, 0), (1, 300), (40, 12), (13, 513)];

const POOL: Dims = [1, 4, 2, 0, 0, 32, 32];
const STEPS_16: With<'_> = Cached(STEPS, 16, Keep::All);
const MIXED_16: With<'_> = Cached(MIXED, 16, Keep::All);
const MIXED_32: With<'_> = Cached(MIXED, 32, Keep::All);
const CROSSED_16: With<'_> = Cached(CROSSED, 16, Keep::All);
const MIXED_SEEN: With<'_> = Cached(MIXED, 16, Keep::Seen);
const NO_SEQUENCES: With<'_> = Cached(&[], 16, Keep::All);
const HIDDEN_ROWS: With<'_> = Mask(MaskKind::Bool, "h", MaskFill::HiddenRows);

const CACHED: [Row; 20] = [
    row("full", POOL, &[MIXED_16]),
    row("crossed", POOL, &[CROSSED_16, PADDED]),
    row("crossed_causal", POOL, &[CROSSED_16, Causal(BottomRight)]),
    row("top_left", POOL, &[MIXED_32, Causal(TopLeft), FUSED]),
    row("offset", POOL, &[MIXED_32, Causal(At(5))]),
    row("window", POOL, &[MIXED_SEEN, Window(Some(20), Some(3)), Offset(BottomRight)]),
    row("alibi_per_sequence", POOL, &[MIXED_16, AlibiPerSequence, Causal(BottomRight)]),
    row("chunks", POOL, &[MIXED_SEEN, Chunks(48), Causal(BottomRight)]),
    row("alibi_sinks_softcap", POOL, &[MIXED_16, Alibi, Sinks, Softcap(9.0), Causal(BottomRight)]),
    row("mask", POOL, &[MIXED_16, HIDDEN_ROWS, Causal(BottomRight)]),
    row("mask_additive", POOL, &[Cached(MIXED, 48, Keep::All), Bias("", MaskFill::Random)]),
    row("slots", POOL, &[Cached(MIXED, 640, Keep::All), PADDED, Causal(BottomRight)]),
    // One row of many heads, rows that do not fill vectors, and the widest rows.
    row("mqa_16", [1, 16, 1, 0, 0, 128, 128], &[STEPS_16, Causal(BottomRight)]),
    row("d80x33", [1, 6, 2, 0, 0, 80, 33], &[MIXED_16, Causal(BottomRight)]),
    row("d3", [1, 2, 2, 0, 0, 3, 3], &[MIXED_16, Causal(BottomRight)]),
    row("d512", [1, 2, 1, 0, 0, 512, 512], &[STEPS_16, Causal(BottomRight)]),
    row("like_mla", [1, 4, 4, 0, 0, 192, 128], &[Cached(MIXED, 64, Keep::All), Causal(BottomRight)]),
    row(
        "like_gpt_oss",
        [1, 8, 1, 0, 0, 64, 64],
        &[MIXED_SEEN, Sinks, Causal(BottomRight), Window(Some(127), None)],
    ),
    row("none", POOL, &[NO_SEQUENCES, Causal(BottomRight)]),
    row("empty", POOL, &[Cached(&[(0, 0), (0, 5), (2, 0)], 16, Keep::All), Causal(BottomRight)]),
];

/// Cached sequences: pages of every size, prefill chunks and decode steps in one batch.
fn cached(cases: &mut Cases) {
    for (n, page) in [1, 2, 7, 8, 16, 24, 64, 100, 256, 1024].into_iter().enumerate() {
        for (name, lengths) in [("steps", STEPS), ("mixed", MIXED)] {
            let name = format!("cached_{name}_pages_of_{page}");
            let with = [layout(n), Cached(lengths, page, Keep::All), Causal(BottomRight)];
            cases.add(name, [1, 8, 2, 0, 0, 64, 64], dtype(n), &with);
        }
        let ring = Cached(MIXED, page, Keep::Wrapped);
        let with = [layout(n + 1), ring, Causal(BottomRight), Window(Some(50), None)];
        let name = format!("cached_ring_of_pages_of_{page}");
        cases.add(name, [1, 4, 1, 0, 0, 32, 48], dtype(n + 1), &with);
    }
    for (n, capacity) in [41, 50, 64, 73, 200].into_iter().enumerate() {
        // As large as the longest step and the window require.
        let steps = &[(1, 1000), (1, 300), (7, 513), (1, 5), (1, 0), (0, 70)];
        let ring = Cached(steps, capacity, Keep::Wrapped);
        let with = [layout(n), ring, Causal(BottomRight), Window(Some(capacity - 7), None)];
        cases.add(format!("cached_ring_{capacity}"), [1, 4, 2, 0, 0, 64, 64], dtype(n), &with);
    }
    cases.of_each_dtype("cached_", &CACHED);
}

const PREFIXED_STEPS: Lengths<'_> = &[(1, 600), (1, 530), (1, 513), (1, 900), (0, 700), (1, 512)];

const NEST: Dims = [1, 4, 2, 0, 0, 64, 64];
const NESTED: [With<'_>; 2] = [
    Cached(
        &[(1, 1025), (40, 1100), (3, 900), (0, 800), (1, 770), (90, 860), (1, 256), (2, 5)],
        16,
        Keep::All,
    ),
    Shared(&[(0..6, 520), (0..2, 900), (2..6, 600), (2..4, 790), (6..7, 200)]),
];

const PREFIXES: [Row; 8] = [
    row("nested", NEST, &[Causal(BottomRight)]),
    row("nested_full", NEST, &[]),
    row("nested_top_left", NEST, &[Causal(TopLeft)]),
    row("nested_window", NEST, &[Window(Some(500), Some(0)), Offset(BottomRight)]),
    row("nested_scores", NEST, &[Causal(BottomRight), Alibi, Sinks, Softcap(9.0)]),
    row("nested_mask", NEST, &[Mask(MaskKind::Bool, "h", MaskFill::Blocks), Causal(BottomRight)]),
    row("nested_hidden_rows", NEST, &[HIDDEN_ROWS]),
    row("nested_bias", NEST, &[Bias("bq", MaskFill::Random)]),
];

const PREFIXED_TREE: [Row; 1] = [row(
    "tree",
    NEST,
    &[
        Cached(&[(9, 600), (5, 517), (1, 530), (30, 530)], 16, Keep::All),
        Shared(&[(0..4, 517)]),
        TreeMask(Tree::Branches),
        Causal(BottomRight),
    ],
)];

/// Shared prefixes of cached sequences: whole blocks and parts of them, nested, with everything that may differ
/// between the sequences.
fn prefixes(cases: &mut Cases) {
    for (n, (page, shared)) in [(1, 512), (7, 300), (16, 511), (256, 512), (48, 255)].into_iter().enumerate()
    {
        let steps = Cached(PREFIXED_STEPS, page, Keep::All);
        for (name, dims, sequences) in
            [("steps", [1, 8, 2, 0, 0, 64, 64], 0..6), ("mqa", [1, 16, 1, 0, 0, 32, 48], 1..5)]
        {
            let prefix = [(sequences, shared)];
            let with = [layout(n), steps, Causal(BottomRight), Shared(&prefix)];
            cases.add(format!("prefix_{name}_{shared}_pages_of_{page}"), dims, dtype(n), &with);
        }
    }
    for dtype in DTYPES {
        cases.rows("prefix_", dtype, &PREFIXES, &NESTED);
        cases.rows("prefix_", dtype, &PREFIXED_TREE, &[]);
    }
}

const VERIFY: Lengths<'_> = &[(13, 533), (1, 40), (0, 7), (5, 5), (7, 258), (9, 260)];
const VERIFY_16: With<'_> = Cached(VERIFY, 16, Keep::All);

const EVERY_TREE: [Row; 4] = [
    row("verify", NEST, &[VERIFY_16]),
    row("verify_causal", NEST, &[Cached(VERIFY, 64, Keep::All), Causal(BottomRight)]),
    row("wide", NEST, &[Cached(&[(70, 300), (1, 1), (270, 270), (33, 512)], 32, Keep::All), PADDED]),
    row("window", NEST, &[Cached(VERIFY, 16, Keep::Wrapped), Causal(BottomRight), Window(Some(6), None)]),
];

const TREE: Dims = [1, 8, 1, 0, 0, 32, 24];

const RANDOM_TREE: [Row; 4] = [
    row("scores", TREE, &[VERIFY_16, Softcap(4.0), Sinks, Alibi, Offset(BottomRight)]),
    row("mask", TREE, &[VERIFY_16, Mask(MaskKind::Bool, "h", MaskFill::Random), Causal(BottomRight)]),
    row("offset", TREE, &[VERIFY_16, Causal(At(3))]),
    row("single", POOL, &[Cached(&[(1, 20), (1, 300)], 16, Keep::All)]),
];

/// Tree masks over the last tokens of cached sequences.
fn trees(cases: &mut Cases) {
    for dtype in DTYPES {
        for (prefix, tree) in [
            ("tree_causal_", Tree::Causal),
            ("tree_branches_", Tree::Branches),
            ("tree_random_", Tree::Random),
        ] {
            cases.rows(prefix, dtype, &EVERY_TREE, &[TreeMask(tree)]);
        }
        cases.rows("tree_", dtype, &RANDOM_TREE, &[TreeMask(Tree::Random)]);
    }
}

const DEGENERATE: [(&str, Dims); 5] = [
    ("no_keys", [2, 4, 2, 9, 0, 16, 16]),
    ("no_queries", [2, 4, 2, 0, 9, 16, 16]),
    ("no_batch", [0, 4, 2, 9, 9, 16, 16]),
    ("no_keys_no_queries", [2, 4, 2, 0, 0, 16, 16]),
    ("one_of_everything", [1, 1, 1, 1, 1, 1, 1]),
];

const DEGENERATE_WITH: [(&str, &[With<'_>]); 4] = [
    ("", &[]),
    ("_sinks", &[Sinks]),
    ("_causal", &[Causal(BottomRight), PADDED]),
    ("_mask", &[Mask(MaskKind::Bool, "bh", MaskFill::Random)]),
];

/// Empty inputs and outputs.
fn degenerate(cases: &mut Cases) {
    for (n, (name, dims)) in DEGENERATE.into_iter().enumerate() {
        for (suffix, with) in DEGENERATE_WITH {
            cases.add(format!("{name}{suffix}"), dims, dtype(n), with);
        }
    }
}

/// Query heads and key/value heads.
const DECODE_HEADS: [(usize, usize); 10] =
    [(2, 2), (2, 1), (3, 1), (8, 2), (5, 1), (6, 1), (7, 1), (8, 1), (12, 1), (16, 1)];

const fn decode_dims(kv_len: usize) -> Dims {
    [1, 4, 1, 1, kv_len, 128, 128]
}

const DECODE: [Row; 8] = [
    row("long", decode_dims(3001), &[]),
    row("long_sinks_softcap", decode_dims(2049), &[Sinks, Softcap(30.0)]),
    row("long_alibi", decode_dims(2049), &[Alibi, Offset(BottomRight)]),
    row("window", decode_dims(3001), &[Window(Some(511), Some(0)), Offset(BottomRight)]),
    row("mask", decode_dims(1500), &[Bias("bh", MaskFill::Random)]),
    row("batch", [5, 4, 2, 1, 700, 96, 80], &[KvLens(&[700, 1, 0, 256, 257]), Causal(BottomRight), BSHD]),
    row("d512", [1, 8, 1, 3, 600, 512, 512], &[Causal(BottomRight)]),
    row(
        "packed",
        [1, 8, 2, 0, 0, 64, 64],
        &[Packed(&[(1, 300), (1, 1), (1, 513), (1, 0)]), Causal(BottomRight)],
    ),
];

/// Few queries, many keys.
fn decode(cases: &mut Cases) {
    for (n, (h, hkv)) in DECODE_HEADS.into_iter().enumerate() {
        for q_len in [1, 2, 5, 16] {
            let name = format!("decode_{q_len}_group_{}_of_{h}", h / hkv);
            let dims = [1, h, hkv, q_len, 517 + 64 * n, 64, 64];
            cases.add(name, dims, dtype(n + q_len), &[Causal(BottomRight), layout(n)]);
        }
    }
    cases.of_each_dtype("decode_", &DECODE);
}

/// Shapes and features of real models, scaled down.
const MODELS: [Row; 10] = [
    row("like_llama_prefill", [1, 8, 2, 70, 70, 128, 128], &[Causal(TopLeft), BSHD]),
    row("like_llama_chunk", [1, 8, 2, 40, 340, 128, 128], &[Causal(At(300)), BSHD]),
    row(
        "like_gemma_2",
        [1, 4, 2, 60, 300, 256, 256],
        &[Softcap(50.0), Gain(8.0), Causal(BottomRight), Window(Some(127), None)],
    ),
    row("like_gemma_prefill", [1, 1, 1, 70, 450, 256, 256], &[Causal(BottomRight)]),
    row("like_gpt_oss", [1, 8, 1, 50, 290, 64, 64], &[Sinks, Causal(BottomRight), Window(Some(127), None)]),
    row("like_bloom", [2, 4, 4, 65, 65, 64, 64], &[Alibi, Causal(TopLeft)]),
    row("like_minilm", [3, 12, 12, 40, 64, 32, 32], &[KvLens(&[64, 64, 21]), FUSED]),
    row("like_mla", [1, 4, 4, 33, 290, 192, 128], &[Causal(BottomRight)]),
    row(
        "like_tree_decoding",
        [1, 8, 2, 13, 533, 128, 128],
        &[Mask(MaskKind::Bool, "bh", MaskFill::Random), Causal(BottomRight)],
    ),
    row("like_vision_packed", [1, 4, 4, 0, 0, 80, 80], &[Packed(&[(64, 64), (100, 100), (36, 36)]), BSHD]),
];

fn mixed(cases: &mut Cases) {
    cases.of_each_dtype("", &MODELS);
}

const CODECS: [Codec; 13] =
    [Fp8, Int8, Tq2, Tq3, Tq4, Tq5, Tq6, MlxTq4, MlxTq5, MlxTq6, MlxTq8, MlxTq8Plain, Rot16];

const CODED_STEPS: Lengths<'_> = &[(1, 300), (1, 1), (2, 513), (1, 17)];
const CODED_MIXED: Lengths<'_> = &[(40, 70), (1, 300), (0, 9), (13, 13), (0, 0), (3, 600), (1, 1)];
const CODED_STEPS_16: With<'_> = Cached(CODED_STEPS, 16, Keep::All);
const CODED_MIXED_16: With<'_> = Cached(CODED_MIXED, 16, Keep::All);

/// Head dimension and page.
const STEP_SIZES: [(usize, usize); 5] = [(64, 16), (128, 64), (192, 7), (256, 1), (512, 24)];

/// Head dimension and value dimension.
const SINGLE_SIZES: [(usize, usize); 3] = [(64, 192), (128, 128), (320, 64)];

/// For each codec: heads, the head dimension if it is not 256, and features.
const CODED: [(&str, [usize; 2], usize, &[With<'_>]); 4] = [
    ("mixed", [4, 2], 128, &[Cached(CODED_MIXED, 100, Keep::All), Causal(BottomRight)]),
    (
        "ring",
        [4, 1],
        64,
        &[Cached(CODED_MIXED, 73, Keep::Wrapped), Causal(BottomRight), Window(Some(50), None)],
    ),
    ("centered", [4, 2], 64, &[CODED_MIXED_16, Causal(BottomRight), Centered, Sinks]),
    (
        "centered_softcap",
        [4, 2],
        128,
        &[CODED_STEPS_16, Causal(BottomRight), Centered, Softcap(20.0), Alibi, Sinks],
    ),
];

const PAIRS: [(Codec, Codec); 10] = [
    (F16, Tq4),
    (Int8, Tq5),
    (Tq6, BF16),
    (Fp8, Int8),
    (Tq5, Fp8),
    (F32, Tq3),
    (BF16, F16),
    (F16, F32),
    (Rot16, Tq4),
    (Int8, Rot16),
];

/// Rows in mlx-native's format combined with others, in both of its dimensions.
const MLX_PAIRS: [(Codec, Codec); 4] = [(F16, MlxTq8Plain), (MlxTq8, Tq5), (Int8, MlxTq4), (MlxTq6, MlxTq5)];

/// Keys that are divided by factors, in every kind of rotation: one block, Paley's matrices, and several blocks.
const EQUALIZED: [(Codec, usize); 6] = [(Int8, 128), (Tq6, 64), (Tq5, 96), (Tq4, 128), (Tq3, 80), (Tq2, 112)];
const CENTERED_SOFTCAP: &[With<'_>] = &[Equalized, Centered, Softcap(20.0), Sinks];

const QUANTIZED: [Row; 8] = [
    row("mask", NEST, &[CODED_MIXED_16, HIDDEN_ROWS, Causal(BottomRight)]),
    row("mask_additive", NEST, &[Cached(CODED_STEPS, 48, Keep::All), Bias("", MaskFill::Random)]),
    row("tree", NEST, &[Cached(&[(6, 70), (8, 300), (5, 5)], 16, Keep::All), TreeMask(Tree::Branches)]),
    row("slots", NEST, &[Cached(CODED_MIXED, 640, Keep::All), Causal(BottomRight)]),
    row("large", NEST, &[CODED_STEPS_16, Causal(BottomRight), Gain(6.0)]),
    row(
        "shared",
        NEST,
        &[
            Cached(&[(1, 600), (1, 550), (3, 700)], 16, Keep::All),
            Causal(BottomRight),
            Shared(&[(0..3, 512)]),
        ],
    ),
    row("chunks", NEST, &[CODED_MIXED_16, Chunks(40), Causal(BottomRight)]),
    row("none", NEST, &[NO_SEQUENCES, Causal(BottomRight)]),
];

/// The cases of a codec for both keys and values.
fn coded(cases: &mut Cases, codec: Codec, n: usize) {
    let mut add = |name: &str, [heads, kv_heads]: [usize; 2], [d, dv]: [usize; 2], with: &[With<'_>]| {
        let name = format!("quantized_{name}_{codec}");
        let with = [&[layout(n), Stored(codec, codec)], with].concat();
        cases.add(name, [1, heads, kv_heads, 0, 0, d, dv], dtype(n), &with);
    };
    // Few rows per key/value head, and many.
    for (dim, page) in STEP_SIZES.into_iter().filter(|(dim, _)| codec.supports(*dim)) {
        let with = [Cached(CODED_STEPS, page, Keep::All), Causal(BottomRight)];
        add(&format!("steps_d{dim}"), [8, 2], [dim; 2], &with);
    }
    // One row per key/value head: a single query without GQA.
    for (dim, value_dim) in SINGLE_SIZES.into_iter().filter(|(dim, _)| codec.supports(*dim)) {
        let with = [Cached(&[(1, 300), (1, 1), (1, 17)], 40, Keep::All), Causal(BottomRight)];
        add(&format!("single_d{dim}"), [3, 3], [dim, value_dim], &with);
    }
    for (name, heads, dim, with) in CODED {
        let dim = if codec.supports(dim) { dim } else { 256 };
        add(name, heads, [dim; 2], with);
    }
}

/// Every case of quantized keys and values: codecs and pairs of codecs, layouts, dimensions and features. The oracle
/// attends over the decoded rows.
#[must_use]
pub fn quantized() -> Vec<Case> {
    let mut cases = Cases::default();
    for (n, codec) in CODECS.into_iter().enumerate() {
        coded(&mut cases, codec, n);
    }
    for (n, (k, v)) in PAIRS.into_iter().enumerate() {
        for (rows, lengths) in [("steps", CODED_STEPS), ("mixed", CODED_MIXED)] {
            let with = [Stored(k, v), Cached(lengths, 16, Keep::All), Causal(BottomRight)];
            let name = format!("quantized_pair_{rows}_{k}_{v}");
            cases.add(name, [1, 8, 4, 0, 0, 128, 64], dtype(n), &with);
        }
    }
    for (n, (k, v)) in MLX_PAIRS.into_iter().enumerate() {
        let with = [Stored(k, v), CODED_MIXED_16, Causal(BottomRight)];
        cases.add(format!("quantized_pair_{k}_{v}"), [1, 8, 4, 0, 0, 512, 256], dtype(n), &with);
    }
    for (n, (h, hkv)) in [(16, 1), (12, 4), (5, 5), (7, 1), (18, 2)].into_iter().enumerate() {
        let steps = Cached(&[(1, 700), (1, 33)], 64, Keep::All);
        let with = [Stored(Int8, Tq4), steps, Causal(BottomRight)];
        cases.add(format!("quantized_heads_{h}_{hkv}"), [1, h, hkv, 0, 0, 64, 128], dtype(n), &with);
    }
    // Dimensions whose rows do not fill blocks or vectors.
    for (n, (d, dv)) in [(80, 33), (96, 96), (112, 80), (3, 1), (320, 40)].into_iter().enumerate() {
        let with = [Stored(Tq5, Tq3), Cached(CODED_MIXED, 24, Keep::All), Causal(BottomRight)];
        cases.add(format!("quantized_d{d}x{dv}"), [1, 4, 2, 0, 0, d, dv], dtype(n), &with);
    }
    for dtype in DTYPES {
        cases.rows("quantized_", dtype, &QUANTIZED, &[Stored(Tq6, Tq5)]);
    }
    for (n, (codec, dim)) in EQUALIZED.into_iter().enumerate() {
        for (rows, lengths, more) in
            [("mixed", CODED_MIXED_16, &[Equalized][..]), ("centered", CODED_STEPS_16, CENTERED_SOFTCAP)]
        {
            let with = [&[Stored(codec, codec), lengths, Causal(BottomRight)], more].concat();
            let name = format!("quantized_equalized_{rows}_{codec}");
            cases.add(name, [1, 4, 2, 0, 0, dim, dim], dtype(n), &with);
        }
    }
    let kept = kept(&cases.0);
    cases.0.into_iter().chain(kept).collect()
}

/// Cases of codes with first and last tokens kept in 16 bits: each of the given ones whose codecs keep tokens, but for the cases of many
/// sizes.
fn kept(quantized: &[Case]) -> Vec<Case> {
    let is_of_sizes = |case: &Case| {
        ["steps_d", "single_d", "heads_", "d"].iter().any(|of| {
            let rest = case.name.strip_prefix("quantized_").and_then(|name| name.strip_prefix(of));
            rest.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
        })
    };
    let keeps = |case: &&Case| {
        let codecs =
            [case.desc.k_codec, case.desc.v_codec].map(|codec| codec.unwrap_or(case.desc.dtype.into()));
        codecs.iter().all(|codec| codec.dtype().is_some() || codec.kept() != *codec)
            && codecs.iter().any(|codec| codec.dtype().is_none())
    };
    let cases = quantized.iter().filter(|case| !is_of_sizes(case)).filter(keeps).enumerate();
    let keep = |(n, case): (usize, &Case)| {
        let (first, last) = [(4, 32), (0, 20), (3, 0)][n % 3];
        let name = case.name.replace("quantized_", "quantized_kept_");
        Case { name, ..case.clone() }.kept(first, last)
    };
    cases.map(keep).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CpuRunner, Guarded};
    use flashtile_cpu::cpu::Cpu;
    use std::collections::HashSet;

    #[test]
    fn names_are_unique_and_every_case_is_a_problem() {
        let mut names = HashSet::new();
        for case in catalogue() {
            assert!(names.insert(case.name.clone()), "{} twice", case.name);
            let built = case.build().unwrap();
            assert_eq!(built.problem.desc().mask.is_some(), built.mask.is_some(), "{}", case.name);
        }
        assert_eq!(find("no_keys").map(|case| case.desc.dims.kv_len), Some(0));
        assert_eq!(find("no such case"), None);
    }

    /// FNV-1a of the `Debug` output of every case, one per line.
    fn digest(cases: &[Case]) -> u64 {
        let lines = cases.iter().flat_map(|case| format!("{case:?}\n").into_bytes());
        lines.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
    }

    /// Data depends on names, and tests select cases by name and index, so that a change of the catalogue has to be
    /// made here too.
    #[test]
    fn no_case_changes_unnoticed() {
        let (plain, coded) = (catalogue(), quantized());
        // The numeric edge cases come last.
        let of_tables = &plain[..plain.len() - super::super::edges::edges().len()];
        assert_eq!((of_tables.len(), digest(of_tables)), (868, 0x2ab5_5564_202a_c59f), "of plain elements");
        assert_eq!(
            (coded.len(), digest(&coded)),
            (264, 0xb65e_c059_e14b_9023),
            "of quantized keys and values"
        );
    }

    #[test]
    fn data_depends_on_the_name_alone() {
        let case = find("mask_f16_blocks_full").unwrap();
        let (a, b) = (case.build().unwrap(), case.build().unwrap());
        assert_eq!(a.q.bits(), b.q.bits());
        let other = Case { name: "other".to_owned(), ..case }.build().unwrap();
        assert_ne!(a.q.bits(), other.q.bits());
    }

    #[test]
    fn placement_changes_neither_data_nor_answers() {
        for name in
            ["mask_f16_blocks_full", "packed_mask_bool_f32", "sinks_softcap_alibi_bf16", "no_keys_mask"]
        {
            let case = find(name).unwrap();
            let exact = case.clone().exact();
            let (a, b) = (case.build().unwrap(), exact.build().unwrap());
            assert_eq!(
                [&a.q, &a.k, &a.v].map(Guarded::bits),
                [&b.q, &b.k, &b.v].map(Guarded::bits),
                "{name}"
            );
            let answers = [a, b].map(|built| built.run(&CpuRunner::new(Cpu::new())).unwrap());
            assert_eq!(answers[0].bits(), answers[1].bits(), "{name}");
        }
    }

    #[test]
    fn padding_is_poison() {
        let built = find("kv_lens_f32").unwrap().build().unwrap();
        assert!(built.k.get([1, 0, 0, 0]).is_finite());
        assert!(built.k.get([1, 0, 1, 0]).is_nan());
        assert!(built.v.get([2, 0, 0, 0]).is_nan());
    }
}
