//! The named case catalogue: every forward feature, every edge of a tile, every dtype.
//!
//! Cases are small: the oracle takes milliseconds. Sizes straddle the planner's block of 256 keys, its tiles of query rows
//! and the register tiles of every instruction set.

use super::cases::{Case, Keep, MaskFill, Tree};
use super::poison::Layout;
use crate::problem::MAX_LEN;
use crate::{Codec, Dtype, MaskKind, QOffset, Visibility};
use QOffset::{At, BottomRight, TopLeft};

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];

/// Every case of plain elements.
#[must_use]
pub fn catalogue() -> Vec<Case> {
    let parts = [
        dims(),
        causal(),
        windows(),
        scores(),
        masks(),
        lengths(),
        packed(),
        cached(),
        prefixes(),
        trees(),
        degenerate(),
        decode(),
        mixed(),
    ];
    parts.into_iter().flatten().collect()
}

/// The case of a name.
#[must_use]
pub fn find(name: &str) -> Option<Case> {
    catalogue().into_iter().find(|case| case.name == name)
}

fn window(left: Option<usize>, right: Option<usize>) -> Visibility {
    Visibility::window(left, right)
}

/// The n-th of the dtypes and layouts in turn, so that neighbours differ in both.
fn dtype(n: usize) -> Dtype {
    DTYPES[n % DTYPES.len()]
}

fn layout(n: usize) -> Layout {
    Layout::ALL[n % Layout::ALL.len()]
}

/// Head dimensions, head groups, layouts, lengths around tile edges.
fn dims() -> Vec<Case> {
    let mut cases = Vec::new();
    let head_dims =
        [1, 3, 8, 16, 31, 32, 33, 63, 64, 65, 80, 96, 127, 128, 129, 192, 255, 256, 257, 320, 512];
    for (n, d) in head_dims.into_iter().enumerate() {
        for dtype in DTYPES {
            let case = Case::new(format!("head_dim_{d}_{dtype}"), [1, 2, 1, 19, 37, d, d], dtype);
            cases.push(case.layout(layout(n)));
        }
    }
    let unequal = [(192, 128), (128, 192), (1, 64), (64, 1), (576 - 64, 31), (33, 257), (65, 63), (8, 512)];
    for (n, (d, dv)) in unequal.into_iter().enumerate() {
        let case = Case::new(format!("value_dim_{d}_{dv}"), [2, 2, 2, 13, 29, d, dv], dtype(n));
        cases.push(case.layout(layout(n)));
    }
    for (n, (h, hkv)) in
        [(1, 1), (3, 3), (4, 2), (6, 2), (5, 1), (8, 1), (16, 1), (16, 8), (14, 2)].into_iter().enumerate()
    {
        let name = match (h / hkv, hkv) {
            (1, _) => format!("mha_{h}"),
            (_, 1) => format!("mqa_{h}"),
            (group, _) => format!("gqa_{group}_of_{h}"),
        };
        for layout in Layout::ALL {
            let name = format!("{name}_{layout:?}").to_lowercase();
            cases.push(Case::new(name, [2, h, hkv, 9, 21, 16, 16], dtype(n)).layout(layout));
        }
    }
    for (n, dtype) in DTYPES.into_iter().enumerate() {
        let case = Case::new(format!("batch_7_{dtype}"), [7, 4, 2, 5, 11, 24, 24], dtype);
        cases.push(case.layout(layout(n + 1)));
    }
    for (n, kv_len) in [1, 2, 15, 16, 17, 63, 64, 65, 127, 255, 256, 257, 511, 512, 513, 767, 769, 1000]
        .into_iter()
        .enumerate()
    {
        let case = Case::new(format!("keys_{kv_len}"), [1, 2, 1, 7, kv_len, 40, 24], dtype(n));
        cases.push(case.layout(layout(n)));
    }
    for (n, q_len) in
        [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 15, 16, 17, 18, 23, 24, 25, 31, 32, 33, 47, 48, 49, 97]
            .into_iter()
            .enumerate()
    {
        let case = Case::new(format!("queries_{q_len}"), [1, 3, 3, q_len, 70, 20, 20], dtype(n));
        cases.push(case.layout(layout(n)));
    }
    cases
}

/// Causal visibility under every alignment.
fn causal() -> Vec<Case> {
    let mut cases = Vec::new();
    for (n, (q_len, kv_len, offset, name)) in [
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
    ]
    .into_iter()
    .enumerate()
    {
        for dtype in DTYPES {
            let case = Case::new(format!("causal_{name}_{dtype}"), [1, 2, 1, q_len, kv_len, 32, 32], dtype);
            cases.push(case.causal(offset).layout(layout(n)));
        }
    }
    for (n, (h, hkv)) in [(4, 1), (6, 2), (7, 1), (2, 1)].into_iter().enumerate() {
        let case = Case::new(format!("gqa_{}_causal", h / hkv), [2, h, hkv, 35, 61, 48, 48], dtype(n));
        cases.push(case.causal(BottomRight).layout(layout(n)));
    }
    // Every combination of offset and length around the register tiles.
    for q_len in [5, 13, 34] {
        for offset in [1, 7, 8, 15, 31] {
            let kv_len = q_len + offset;
            let case = Case::new(
                format!("causal_chunk_{q_len}_after_{offset}"),
                [1, 1, 1, q_len, kv_len, 16, 16],
                dtype(q_len + offset),
            );
            cases.push(case.causal(At(offset as i64)));
        }
    }
    cases
}

/// Windows to the left, to the right, to both sides.
fn windows() -> Vec<Case> {
    let mut cases = Vec::new();
    let bands = [
        (Some(0), Some(0), "self_only"),
        (Some(7), Some(0), "causal_8"),
        (Some(16), Some(0), "causal_17"),
        (Some(3), Some(5), "both"),
        (None, Some(4), "right"),
        (Some(9), None, "left"),
        (Some(0), None, "forward"),
        (Some(usize::MAX), Some(usize::MAX), "unbounded_in_effect"),
    ];
    for (n, (left, right, name)) in bands.into_iter().enumerate() {
        for (q_len, kv_len, offset, place) in [
            (45, 45, TopLeft, "square"),
            (21, 80, BottomRight, "chunk"),
            (80, 21, TopLeft, "more_queries"),
            (30, 50, At(-7), "negative"),
        ] {
            let case = Case::new(
                format!("window_{name}_{place}"),
                [1, 2, 2, q_len, kv_len, 24, 24],
                dtype(n + q_len),
            );
            cases.push(case.seeing(window(left, right)).at(offset).layout(layout(n)));
        }
    }
    for (n, width) in [1, 64, 255, 256, 257, 300].into_iter().enumerate() {
        let case = Case::new(format!("window_{width}_across_blocks"), [1, 2, 1, 70, 640, 32, 32], dtype(n));
        cases.push(case.seeing(window(Some(width), Some(0))).at(At(500)).layout(layout(n)));
    }
    let bands = Case::new("window_misses_all_keys", [1, 2, 1, 30, 50, 16, 16], Dtype::F32);
    cases.push(bands.seeing(window(Some(4), Some(4))).at(At(80)));
    let partly = Case::new("window_leaves_keys_behind", [1, 2, 1, 60, 50, 16, 16], Dtype::F16);
    cases.push(partly.seeing(window(Some(4), Some(0))).at(At(20)));
    cases
}

/// What changes the score: scale, softcap, ALiBi, sinks, magnitude.
fn scores() -> Vec<Case> {
    let mut cases = Vec::new();
    let base =
        |name: String, n: usize| Case::new(name, [2, 4, 2, 23, 300, 64, 64], dtype(n)).layout(layout(n));
    for (n, scale) in [0.0, 1.0, 0.01, -0.3].into_iter().enumerate() {
        cases.push(base(format!("scale_{scale}"), n).scale(scale));
    }
    for dtype in DTYPES {
        let of = |name: &str| Case::new(format!("{name}_{dtype}"), [2, 4, 2, 23, 270, 64, 64], dtype);
        cases.push(of("softcap_0.5").softcap(0.5));
        cases.push(of("softcap_50").softcap(50.0).gain(20.0));
        cases.push(of("softcap_saturated").softcap(30.0).gain(300.0));
        cases.push(of("softcap_tiny_scores").softcap(50.0).gain(1e-3));
        cases.push(of("alibi").alibi().at(TopLeft));
        cases.push(of("alibi_causal").alibi().causal(BottomRight));
        cases.push(of("alibi_negative_offset").alibi().at(At(-90)));
        cases.push(of("sinks").sinks());
        cases.push(of("sinks_causal_no_keys").sinks().causal(At(-9)));
        cases.push(of("sinks_softcap_alibi").sinks().softcap(20.0).alibi().at(BottomRight));
        cases.push(of("large_scores").gain(30.0));
        cases.push(of("very_large_scores").gain(150.0));
        cases.push(of("large_scores_causal").gain(30.0).causal(BottomRight));
        cases.push(of("tiny_scores").gain(1e-4));
        cases.push(of("zero_queries").gain(0.0));
    }
    cases.push(Case::new("large_scores_d512", [1, 1, 1, 30, 300, 512, 512], Dtype::F32).gain(25.0));
    cases.push(Case::new("large_scores_sinks", [1, 3, 3, 30, 520, 64, 64], Dtype::F32).gain(40.0).sinks());
    let far = Case::new("alibi_far_away", [1, 4, 4, 20, 60, 32, 32], Dtype::F32);
    cases.push(far.alibi().at(At(5000)));
    // Where the portable kernels' positions end.
    for (name, at) in [("before", -(1 << 30)), ("after", (1 << 30) - 20)] {
        let far = Case::new(format!("far_{name}"), [1, 4, 4, 20, 41, 64, 64], Dtype::F32);
        cases.push(far.at(At(at)));
    }
    cases
}

/// Materialised masks: kind, broadcast, classes of tiles, magnitudes.
fn masks() -> Vec<Case> {
    let mut cases = Vec::new();
    let kinds = [
        (MaskKind::Bool, "bool"),
        (MaskKind::Additive(Dtype::F32), "f32"),
        (MaskKind::Additive(Dtype::F16), "f16"),
        (MaskKind::Additive(Dtype::BF16), "bf16"),
    ];
    let named = |broadcast: &str| if broadcast.is_empty() { "full".to_owned() } else { broadcast.to_owned() };
    let every =
        ["", "b", "h", "q", "k", "bh", "bq", "bk", "hq", "hk", "qk", "bhq", "bhk", "bqk", "hqk", "bhqk"];
    for (n, broadcast) in every.into_iter().enumerate() {
        for (kind, kind_name) in kinds {
            let name = format!("mask_{kind_name}_broadcast_{}", named(broadcast));
            let case = Case::new(name, [2, 4, 2, 22, 45, 16, 16], dtype(n)).layout(layout(n));
            cases.push(case.mask(kind, broadcast, MaskFill::Random));
        }
    }
    for (n, (kind, kind_name)) in kinds.into_iter().enumerate() {
        for (fill, fill_name) in [
            (MaskFill::HiddenRows, "hidden_rows"),
            (MaskFill::Open, "open"),
            (MaskFill::Closed, "closed"),
            (MaskFill::Blocks, "blocks"),
        ] {
            for broadcast in ["", "bh", "b", "h"] {
                let name = format!("mask_{kind_name}_{fill_name}_{}", named(broadcast));
                let case = Case::new(name, [2, 3, 3, 90, 640, 8, 8], dtype(n)).layout(layout(n));
                cases.push(case.mask(kind, broadcast, fill));
            }
        }
        let with =
            |name: &str| Case::new(format!("mask_{kind_name}_{name}"), [2, 4, 2, 50, 560, 24, 24], dtype(n));
        cases.push(with("causal").mask(kind, "bh", MaskFill::Random).causal(BottomRight));
        cases.push(with("causal_blocks").mask(kind, "", MaskFill::Blocks).causal(At(300)));
        let banded = with("window_softcap").mask(kind, "h", MaskFill::Blocks).softcap(5.0);
        cases.push(banded.seeing(window(Some(200), Some(30))).at(At(400)));
        cases.push(with("sinks_hidden_rows").mask(kind, "b", MaskFill::HiddenRows).sinks());
        cases.push(with("kv_lens").mask(kind, "", MaskFill::Random).kv_lens(&[257, 13]));
        cases.push(with("kv_lens_broadcast").mask(kind, "bhq", MaskFill::Random).kv_lens(&[0, 300]));
        cases.push(with("decode").mask(kind, "hq", MaskFill::Random).scale(0.4));
        let late = Case::new(format!("mask_{kind_name}_late"), [1, 2, 1, 20, 2048, 16, 16], dtype(n));
        cases.push(late.mask(kind, "h", MaskFill::Late));
    }
    for (kind, kind_name) in [kinds[1], kinds[2]] {
        for dtype in [Dtype::F32, Dtype::F16] {
            let name = format!("mask_{kind_name}_extreme_d512_{dtype}");
            let case = Case::new(name, [1, 2, 1, 21, 301, 512, 512], dtype);
            cases.push(case.mask(kind, "b", MaskFill::Extreme));
        }
    }
    // An odd number of keys puts every other row of a 16-bit mask at an odd address.
    for kv_len in [33, 257] {
        let name = format!("mask_f16_odd_rows_{kv_len}");
        let case = Case::new(name, [1, 1, 1, 17, kv_len, 64, 64], Dtype::F16);
        cases.push(case.mask(MaskKind::Additive(Dtype::F16), "", MaskFill::Random));
    }
    cases
}

/// Padded batches.
fn lengths() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in DTYPES {
        let of = |name: &str| Case::new(format!("{name}_{dtype}"), [4, 4, 2, 21, 530, 32, 32], dtype);
        let lens = &[530, 1, 0, 259];
        cases.push(of("kv_lens").kv_lens(lens));
        cases.push(of("kv_lens_bottom_right").kv_lens(lens).causal(BottomRight));
        cases.push(of("kv_lens_top_left").kv_lens(&[3, 256, 257, 20]).causal(TopLeft).layout(Layout::Bshd));
        cases.push(of("kv_lens_offset").kv_lens(&[50, 256, 511, 29]).causal(At(29)).layout(Layout::Padded));
        let banded = of("kv_lens_window").kv_lens(lens).seeing(window(Some(40), Some(2)));
        cases.push(banded.at(BottomRight).layout(Layout::Fused));
        cases.push(of("kv_lens_alibi_sinks").kv_lens(lens).alibi().sinks().at(BottomRight));
        cases.push(of("kv_lens_all_empty").kv_lens(&[0, 0, 0, 0]));
    }
    cases
}

/// Packed sequences.
fn packed() -> Vec<Case> {
    let mut cases = Vec::new();
    let square = &[(5, 5), (1, 1), (70, 70), (0, 0), (33, 33), (259, 259)][..];
    let uneven = &[(5, 9), (0, 4), (7, 0), (1, 300), (40, 12), (0, 0), (13, 513)][..];
    for dtype in DTYPES {
        let of = |name: &str, lengths: &[(usize, usize)]| {
            Case::new(format!("packed_{name}_{dtype}"), [1, 4, 2, 0, 0, 32, 32], dtype).packed(lengths)
        };
        cases.push(of("square", square));
        cases.push(of("uneven", uneven));
        cases.push(of("square_causal", square).seeing(Visibility::causal()));
        cases.push(of("uneven_causal", uneven).causal(BottomRight).layout(Layout::Padded));
        cases.push(of("uneven_top_left", uneven).causal(TopLeft).layout(Layout::Fused));
        cases.push(of("uneven_offset", uneven).causal(At(3)));
        cases.push(of("window", uneven).seeing(window(Some(20), Some(3))).at(BottomRight));
        cases.push(of("alibi_sinks_softcap", uneven).alibi().sinks().softcap(9.0).at(BottomRight));
        cases.push(of("mask", uneven).mask(MaskKind::Additive(dtype), "", MaskFill::Random));
        cases.push(of("mask_bool", uneven).mask(MaskKind::Bool, "h", MaskFill::HiddenRows));
        cases.push(of("mask_shared", uneven).mask(MaskKind::Bool, "bhq", MaskFill::Random));
    }
    cases.push(Case::new("packed_none", [1, 4, 2, 0, 0, 32, 32], Dtype::F32).packed(&[]));
    cases.push(Case::new("packed_one", [1, 4, 2, 0, 0, 65, 33], Dtype::F16).packed(&[(31, 45)]));
    let many: Vec<(usize, usize)> = (0..40).map(|n| (n % 7, (n * 5) % 23)).collect();
    let many = Case::new("packed_forty", [1, 6, 2, 0, 0, 16, 16], Dtype::F32).packed(&many);
    cases.push(many.causal(BottomRight));
    cases
}

/// Cached sequences: pages of every kind, chunks of prompts and single steps in one batch.
fn cached() -> Vec<Case> {
    let mut cases = Vec::new();
    let steps = &[(1, 300), (1, 1), (1, 513), (1, 17)][..];
    let mixed = &[(40, 70), (1, 300), (0, 9), (13, 13), (0, 0), (3, 600), (1, 1), (33, 289)][..];
    // More queries than keys, as in attention to another sequence.
    let crossed = &[(5, 9), (0, 4), (7, 0), (1, 300), (40, 12), (13, 513)][..];
    for (n, page) in [1, 2, 7, 8, 16, 24, 64, 100, 256, 1024].into_iter().enumerate() {
        for (name, lengths) in [("steps", steps), ("mixed", mixed)] {
            let name = format!("cached_{name}_pages_of_{page}");
            let case = Case::new(name, [1, 8, 2, 0, 0, 64, 64], dtype(n)).layout(layout(n));
            cases.push(case.cached(lengths, page, Keep::All).causal(BottomRight));
        }
        let name = format!("cached_ring_of_pages_of_{page}");
        let case = Case::new(name, [1, 4, 1, 0, 0, 32, 48], dtype(n + 1)).layout(layout(n + 1));
        let case = case.cached(mixed, page, Keep::Wrapped).causal(BottomRight);
        cases.push(case.seeing(window(Some(50), None)));
    }
    for (n, capacity) in [41, 50, 64, 73, 200].into_iter().enumerate() {
        // As large as the longest step and the window need.
        let name = format!("cached_ring_{capacity}");
        let steps = &[(1, 1000), (1, 300), (7, 513), (1, 5), (1, 0), (0, 70)];
        let case = Case::new(name, [1, 4, 2, 0, 0, 64, 64], dtype(n)).layout(layout(n));
        let case = case.cached(steps, capacity, Keep::Wrapped).causal(BottomRight);
        cases.push(case.seeing(window(Some(capacity - 7), None)));
    }
    for dtype in DTYPES {
        let of = |name: &str, dims| Case::new(format!("cached_{name}_{dtype}"), dims, dtype);
        let base = |name: &str| of(name, [1, 4, 2, 0, 0, 32, 32]);
        cases.push(base("full").cached(mixed, 16, Keep::All));
        cases.push(base("crossed").cached(crossed, 16, Keep::All).layout(Layout::Padded));
        cases.push(base("crossed_causal").cached(crossed, 16, Keep::All).causal(BottomRight));
        cases.push(base("top_left").cached(mixed, 32, Keep::All).causal(TopLeft).layout(Layout::Fused));
        cases.push(base("offset").cached(mixed, 32, Keep::All).causal(At(5)));
        let banded = base("window").cached(mixed, 16, Keep::Seen).seeing(window(Some(20), Some(3)));
        cases.push(banded.at(BottomRight));
        let scores = base("alibi_sinks_softcap").cached(mixed, 16, Keep::All).alibi().sinks().softcap(9.0);
        cases.push(scores.causal(BottomRight));
        let mask = base("mask").cached(mixed, 16, Keep::All).mask(MaskKind::Bool, "h", MaskFill::HiddenRows);
        cases.push(mask.causal(BottomRight));
        let additive = base("mask_additive").cached(mixed, 48, Keep::All);
        cases.push(additive.mask(MaskKind::Additive(dtype), "", MaskFill::Random));
        let slots = base("slots").cached(mixed, 640, Keep::All).layout(Layout::Padded);
        cases.push(slots.causal(BottomRight));
        // One row of many heads, rows of no whole number of vectors, the widest rows.
        cases.push(of("mqa_16", [1, 16, 1, 0, 0, 128, 128]).cached(steps, 16, Keep::All).causal(BottomRight));
        cases.push(of("d80x33", [1, 6, 2, 0, 0, 80, 33]).cached(mixed, 16, Keep::All).causal(BottomRight));
        cases.push(of("d3", [1, 2, 2, 0, 0, 3, 3]).cached(mixed, 16, Keep::All).causal(BottomRight));
        cases.push(of("d512", [1, 2, 1, 0, 0, 512, 512]).cached(steps, 16, Keep::All).causal(BottomRight));
        cases
            .push(of("like_mla", [1, 4, 4, 0, 0, 192, 128]).cached(mixed, 64, Keep::All).causal(BottomRight));
        let oss = of("like_gpt_oss", [1, 8, 1, 0, 0, 64, 64]).cached(mixed, 16, Keep::Seen).sinks();
        cases.push(oss.causal(BottomRight).seeing(window(Some(127), None)));
        cases.push(base("none").cached(&[], 16, Keep::All).causal(BottomRight));
        cases.push(base("empty").cached(&[(0, 0), (0, 5), (2, 0)], 16, Keep::All).causal(BottomRight));
    }
    cases
}

/// Prefixes that sequences of a cache share: of whole blocks and not, inside one another, with all that may differ from one
/// sequence to the next.
fn prefixes() -> Vec<Case> {
    let mut cases = Vec::new();
    let steps = &[(1, 600), (1, 530), (1, 513), (1, 900), (0, 700), (1, 512)][..];
    let mixed = &[(1, 1025), (40, 1100), (3, 900), (0, 800), (1, 770), (90, 860), (1, 256), (2, 5)][..];
    for (n, (page, shared)) in [(1, 512), (7, 300), (16, 511), (256, 512), (48, 255)].into_iter().enumerate()
    {
        let of =
            |name: &str, dims| Case::new(format!("prefix_{name}_{shared}_pages_of_{page}"), dims, dtype(n));
        let of = |name: &str, dims| of(name, dims).layout(layout(n));
        let case = of("steps", [1, 8, 2, 0, 0, 64, 64]).cached(steps, page, Keep::All).causal(BottomRight);
        cases.push(case.shared(&[(0..6, shared)]));
        let case = of("mqa", [1, 16, 1, 0, 0, 32, 48]).cached(steps, page, Keep::All).causal(BottomRight);
        cases.push(case.shared(&[(1..5, shared)]));
    }
    let nested = &[(0..6, 520), (0..2, 900), (2..6, 600), (2..4, 790), (6..7, 200)][..];
    for dtype in DTYPES {
        let of = |name: &str| {
            let case = Case::new(format!("prefix_{name}_{dtype}"), [1, 4, 2, 0, 0, 64, 64], dtype);
            case.cached(mixed, 16, Keep::All).shared(nested)
        };
        cases.push(of("nested").causal(BottomRight));
        cases.push(of("nested_full"));
        cases.push(of("nested_top_left").causal(TopLeft));
        cases.push(of("nested_window").seeing(window(Some(500), Some(0))).at(BottomRight));
        cases.push(of("nested_scores").causal(BottomRight).alibi().sinks().softcap(9.0));
        cases.push(of("nested_mask").mask(MaskKind::Bool, "h", MaskFill::Blocks).causal(BottomRight));
        cases.push(of("nested_hidden_rows").mask(MaskKind::Bool, "h", MaskFill::HiddenRows));
        cases.push(of("nested_bias").mask(MaskKind::Additive(dtype), "bq", MaskFill::Random));
        let tree = Case::new(format!("prefix_tree_{dtype}"), [1, 4, 2, 0, 0, 64, 64], dtype);
        let verify = &[(9, 600), (5, 517), (1, 530), (30, 530)];
        let tree = tree.cached(verify, 16, Keep::All).shared(&[(0..4, 517)]);
        cases.push(tree.tree(Tree::Branches).causal(BottomRight));
    }
    cases
}

/// Tree masks over the last tokens of cached sequences.
fn trees() -> Vec<Case> {
    let mut cases = Vec::new();
    let verify = &[(13, 533), (1, 40), (0, 7), (5, 5), (7, 258), (9, 260)][..];
    let wide = &[(70, 300), (1, 1), (270, 270), (33, 512)][..];
    for dtype in DTYPES {
        for (name, tree) in [("causal", Tree::Causal), ("branches", Tree::Branches), ("random", Tree::Random)]
        {
            let of = |part: &str, lengths, page, keep| {
                Case::new(format!("tree_{name}_{part}_{dtype}"), [1, 4, 2, 0, 0, 64, 64], dtype)
                    .cached(lengths, page, keep)
                    .tree(tree)
            };
            cases.push(of("verify", verify, 16, Keep::All));
            cases.push(of("verify_causal", verify, 64, Keep::All).causal(BottomRight));
            cases.push(of("wide", wide, 32, Keep::All).layout(Layout::Padded));
            let banded = of("window", verify, 16, Keep::Wrapped).causal(BottomRight);
            cases.push(banded.seeing(window(Some(6), None)));
        }
        let of = |part: &str| {
            Case::new(format!("tree_{part}_{dtype}"), [1, 8, 1, 0, 0, 32, 24], dtype)
                .cached(verify, 16, Keep::All)
                .tree(Tree::Random)
        };
        cases.push(of("scores").softcap(4.0).sinks().alibi().at(BottomRight));
        cases.push(of("mask").mask(MaskKind::Bool, "h", MaskFill::Random).causal(BottomRight));
        cases.push(of("offset").causal(At(3)));
        let single = Case::new(format!("tree_single_{dtype}"), [1, 4, 2, 0, 0, 32, 32], dtype);
        cases.push(single.cached(&[(1, 20), (1, 300)], 16, Keep::All).tree(Tree::Random));
    }
    cases
}

/// Nothing to read, nothing to write.
fn degenerate() -> Vec<Case> {
    let mut cases = Vec::new();
    for (n, (name, dims)) in [
        ("no_keys", [2, 4, 2, 9, 0, 16, 16]),
        ("no_queries", [2, 4, 2, 0, 9, 16, 16]),
        ("no_batch", [0, 4, 2, 9, 9, 16, 16]),
        ("no_keys_no_queries", [2, 4, 2, 0, 0, 16, 16]),
        ("one_of_everything", [1, 1, 1, 1, 1, 1, 1]),
    ]
    .into_iter()
    .enumerate()
    {
        let case = |suffix: &str| Case::new(format!("{name}{suffix}"), dims, dtype(n));
        cases.push(case(""));
        cases.push(case("_sinks").sinks());
        cases.push(case("_causal").causal(BottomRight).layout(Layout::Padded));
        cases.push(case("_mask").mask(MaskKind::Bool, "bh", MaskFill::Random));
    }
    cases
}

/// Few queries, many keys.
fn decode() -> Vec<Case> {
    let mut cases = Vec::new();
    for (n, (h, hkv)) in [(2, 2), (2, 1), (3, 1), (8, 2), (5, 1), (6, 1), (7, 1), (8, 1), (12, 1), (16, 1)]
        .into_iter()
        .enumerate()
    {
        for q_len in [1, 2, 5, 16] {
            let name = format!("decode_{q_len}_group_{}_of_{h}", h / hkv);
            let case = Case::new(name, [1, h, hkv, q_len, 517 + 64 * n, 64, 64], dtype(n + q_len));
            cases.push(case.causal(BottomRight).layout(layout(n)));
        }
    }
    for dtype in DTYPES {
        let of = |name: &str, kv_len| {
            Case::new(format!("decode_{name}_{dtype}"), [1, 4, 1, 1, kv_len, 128, 128], dtype)
        };
        cases.push(of("long", 3001));
        cases.push(of("long_sinks_softcap", 2049).sinks().softcap(30.0));
        cases.push(of("long_alibi", 2049).alibi().at(BottomRight));
        cases.push(of("window", 3001).seeing(window(Some(511), Some(0))).at(BottomRight));
        cases.push(of("mask", 1500).mask(MaskKind::Additive(dtype), "bh", MaskFill::Random));
        let batch = Case::new(format!("decode_batch_{dtype}"), [5, 4, 2, 1, 700, 96, 80], dtype);
        cases.push(batch.kv_lens(&[700, 1, 0, 256, 257]).causal(BottomRight).layout(Layout::Bshd));
        let wide = Case::new(format!("decode_d512_{dtype}"), [1, 8, 1, 3, 600, 512, 512], dtype);
        cases.push(wide.causal(BottomRight));
        let packed = Case::new(format!("decode_packed_{dtype}"), [1, 8, 2, 0, 0, 64, 64], dtype);
        cases.push(packed.packed(&[(1, 300), (1, 1), (1, 513), (1, 0)]).causal(BottomRight));
    }
    cases
}

/// Shapes and features of real models, scaled down.
fn mixed() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in DTYPES {
        let of = |name: &str, dims| Case::new(format!("{name}_{dtype}"), dims, dtype);
        cases
            .push(of("like_llama_prefill", [1, 8, 2, 70, 70, 128, 128]).causal(TopLeft).layout(Layout::Bshd));
        cases.push(of("like_llama_chunk", [1, 8, 2, 40, 340, 128, 128]).causal(At(300)).layout(Layout::Bshd));
        let gemma = of("like_gemma_2", [1, 4, 2, 60, 300, 256, 256]).softcap(50.0).gain(8.0);
        cases.push(gemma.causal(BottomRight).seeing(window(Some(127), None)));
        let oss = of("like_gpt_oss", [1, 8, 1, 50, 290, 64, 64]).sinks().causal(BottomRight);
        cases.push(oss.seeing(window(Some(127), None)));
        cases.push(of("like_bloom", [2, 4, 4, 65, 65, 64, 64]).alibi().causal(TopLeft));
        cases.push(
            of("like_minilm", [3, 12, 12, 40, 64, 32, 32]).kv_lens(&[64, 64, 21]).layout(Layout::Fused),
        );
        cases.push(of("like_mla", [1, 4, 4, 33, 290, 192, 128]).causal(BottomRight));
        let tree = of("like_tree_decoding", [1, 8, 2, 13, 533, 128, 128]);
        cases.push(tree.mask(MaskKind::Bool, "bh", MaskFill::Random).causal(BottomRight));
        let vision = of("like_vision_packed", [1, 4, 4, 0, 0, 80, 80]);
        cases.push(vision.packed(&[(64, 64), (100, 100), (36, 36)]).layout(Layout::Bshd));
    }
    cases
}

/// Every case of quantized keys and values: codecs and pairs of them, layouts, dimensions and features. The oracle attends to what
/// the codes stand for.
#[must_use]
pub fn quantized() -> Vec<Case> {
    use Codec::{
        BF16, F16, F32, Fp8, Int8, MlxTq4, MlxTq5, MlxTq6, MlxTq8, MlxTq8Plain, Tq2, Tq3, Tq4, Tq5, Tq6,
    };
    let mut cases = Vec::new();
    let steps = &[(1, 300), (1, 1), (2, 513), (1, 17)][..];
    let mixed = &[(40, 70), (1, 300), (0, 9), (13, 13), (0, 0), (3, 600), (1, 1)][..];
    let codecs = [Fp8, Int8, Tq2, Tq3, Tq4, Tq5, Tq6, MlxTq4, MlxTq5, MlxTq6, MlxTq8, MlxTq8Plain];
    for (n, codec) in codecs.into_iter().enumerate() {
        // The nearest that the codec has.
        let d = |dim: usize| if codec.supports(dim) { dim } else { 256 };
        let of = |name: &str, dims| {
            Case::new(format!("quantized_{name}_{codec}"), dims, dtype(n))
                .layout(layout(n))
                .stored(codec, codec)
        };
        // Few rows, and many.
        let sizes = [(64, 16), (128, 64), (192, 7), (256, 1), (512, 24)];
        for (dim, page) in sizes.into_iter().filter(|(dim, _)| codec.supports(*dim)) {
            let case = of(&format!("steps_d{dim}"), [1, 8, 2, 0, 0, dim, dim]);
            cases.push(case.cached(steps, page, Keep::All).causal(BottomRight));
        }
        // One row for each key/value head: a query, of a group of one.
        let sizes = [(64, 192), (128, 128), (320, 64)];
        for (dim, value_dim) in sizes.into_iter().filter(|(dim, _)| codec.supports(*dim)) {
            let case = of(&format!("single_d{dim}"), [1, 3, 3, 0, 0, dim, value_dim]);
            let steps = &[(1, 300), (1, 1), (1, 17)];
            cases.push(case.cached(steps, 40, Keep::All).causal(BottomRight));
        }
        let case = of("mixed", [1, 4, 2, 0, 0, d(128), d(128)]);
        cases.push(case.cached(mixed, 100, Keep::All).causal(BottomRight));
        let ring =
            of("ring", [1, 4, 1, 0, 0, d(64), d(64)]).cached(mixed, 73, Keep::Wrapped).causal(BottomRight);
        cases.push(ring.seeing(window(Some(50), None)));
        let centred = of("centred", [1, 4, 2, 0, 0, d(64), d(64)]).cached(mixed, 16, Keep::All);
        cases.push(centred.causal(BottomRight).centred().sinks());
        let capped = of("centred_softcap", [1, 4, 2, 0, 0, d(128), d(128)]).cached(steps, 16, Keep::All);
        cases.push(capped.causal(BottomRight).centred().softcap(20.0).alibi().sinks());
    }
    let pairs =
        [(F16, Tq4), (Int8, Tq5), (Tq6, BF16), (Fp8, Int8), (Tq5, Fp8), (F32, Tq3), (BF16, F16), (F16, F32)];
    for (n, (k, v)) in pairs.into_iter().enumerate() {
        for (rows, lengths) in [("steps", steps), ("mixed", mixed)] {
            let name = format!("quantized_pair_{rows}_{k}_{v}");
            let case = Case::new(name, [1, 8, 4, 0, 0, 128, 64], dtype(n)).stored(k, v);
            cases.push(case.cached(lengths, 16, Keep::All).causal(BottomRight));
        }
    }
    // Rows of mlx-native's format beside others, of both of its dimensions.
    for (n, (k, v)) in
        [(F16, MlxTq8Plain), (MlxTq8, Tq5), (Int8, MlxTq4), (MlxTq6, MlxTq5)].into_iter().enumerate()
    {
        let case = Case::new(format!("quantized_pair_{k}_{v}"), [1, 8, 4, 0, 0, 512, 256], dtype(n));
        cases.push(case.stored(k, v).cached(mixed, 16, Keep::All).causal(BottomRight));
    }
    for (n, heads) in [[16, 1], [12, 4], [5, 5], [7, 1], [18, 2]].into_iter().enumerate() {
        let name = format!("quantized_heads_{}_{}", heads[0], heads[1]);
        let case = Case::new(name, [1, heads[0], heads[1], 0, 0, 64, 128], dtype(n)).stored(Int8, Tq4);
        cases.push(case.cached(&[(1, 700), (1, 33)], 64, Keep::All).causal(BottomRight));
    }
    // Dimensions whose rows are no whole number of blocks or vectors.
    for (n, (dim, value_dim)) in [(80, 33), (96, 96), (112, 80), (3, 1), (320, 40)].into_iter().enumerate() {
        let name = format!("quantized_d{dim}x{value_dim}");
        let case = Case::new(name, [1, 4, 2, 0, 0, dim, value_dim], dtype(n)).stored(Tq5, Tq3);
        cases.push(case.cached(mixed, 24, Keep::All).causal(BottomRight));
    }
    for dtype in DTYPES {
        let of = |name: &str| {
            Case::new(format!("quantized_{name}_{dtype}"), [1, 4, 2, 0, 0, 64, 64], dtype).stored(Tq6, Tq5)
        };
        let masked = of("mask").cached(mixed, 16, Keep::All).mask(MaskKind::Bool, "h", MaskFill::HiddenRows);
        cases.push(masked.causal(BottomRight));
        let additive = of("mask_additive").cached(steps, 48, Keep::All);
        cases.push(additive.mask(MaskKind::Additive(dtype), "", MaskFill::Random));
        cases.push(of("tree").cached(&[(6, 70), (8, 300), (5, 5)], 16, Keep::All).tree(Tree::Branches));
        cases.push(of("slots").cached(mixed, 640, Keep::All).causal(BottomRight));
        cases.push(of("large").cached(steps, 16, Keep::All).causal(BottomRight).gain(6.0));
        let shared = of("shared").cached(&[(1, 600), (1, 550), (3, 700)], 16, Keep::All);
        cases.push(shared.causal(BottomRight).shared(&[(0..3, 512)]));
        cases.push(of("none").cached(&[], 16, Keep::All).causal(BottomRight));
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cpu;
    use crate::testkit::{CpuRunner, Guarded};
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
