//! Defects found in attention kernels that are in use on Metal, each with a test that detects it.

use crate::support::{answer, build, fill, runners};
use flashtile::{Dtype, MaskKind, QOffset, Visibility};
use flashtile_metal_standin::Profile;
use flashtile_testkit::{Case, Layout, MaskFill, MetalRunner, Prepared};

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];

fn all() -> Vec<MetalRunner> {
    runners(&Profile::m3_max())
}

/// Runs each case on one runner, by turns.
fn pass(cases: impl IntoIterator<Item = Case>) {
    let runners = all();
    for (n, case) in cases.into_iter().enumerate() {
        let prepared = Prepared::new(&case).unwrap();
        let runner = &runners[n % runners.len()];
        if let Err(failure) = prepared.run(runner) {
            panic!("{} {:?} on {runner:?}: {failure}", case.name, case.desc.dims);
        }
    }
}

#[test]
fn a_causal_offset_that_is_not_a_multiple_of_a_tile_leaks_no_pair() {
    let runner = &all()[0];
    for (q_len, kv_len, offset) in [(34, 48, 14), (20, 64, 13), (33, 48, -8)] {
        let case =
            Case::new("leak", [1, 1, 1, q_len, kv_len, 64, 64], Dtype::F16).causal(QOffset::At(offset));
        let clean = build(&case);
        for key in [0, 7, 12, 13, 14, 31, 32, kv_len - 1] {
            let mut spoiled = clean.clone();
            (0..64).for_each(|d| spoiled.v.set([0, 0, key, d], f32::NAN));
            let out = answer(&spoiled, runner).out;
            for row in 0..q_len {
                let sees = key as i64 <= row as i64 + offset;
                assert_eq!(out.get([0, 0, row, 0]).is_nan(), sees, "row {row}, key {key}, offset {offset}");
            }
        }
    }
}

#[test]
fn keys_past_the_length_are_never_read() {
    // Padding is NaN.
    pass(DTYPES.into_iter().flat_map(|dtype| {
        [1, 31, 33, 63, 255, 257].map(|kv_len| {
            Case::new("past", [2, 4, 2, 3, 320, 64, 64], dtype).kv_lens(&[kv_len, 320 - kv_len])
        })
    }));
}

#[test]
fn softcap_scale_and_biases_are_applied_by_every_kernel() {
    pass([1, 3, 40].into_iter().flat_map(|q_len| {
        let of = |name: &str, dim| Case::new(name, [1, 2, 1, q_len, 290, dim, dim], Dtype::F16);
        [
            of("softcap", 64).softcap(2.0),
            of("scale", 128).scale(0.25),
            of("f16 bias", 64).mask(MaskKind::Additive(Dtype::F16), "", MaskFill::Extreme),
            of("bool mask", 64).mask(MaskKind::Bool, "h", MaskFill::Random),
            of("sinks", 128).sinks().causal(QOffset::BottomRight),
            of("alibi", 64).alibi().at(QOffset::BottomRight),
        ]
    }));
}

#[test]
fn a_window_holds_the_same_number_of_keys_everywhere() {
    let runner = &all()[0];
    for (left, right, q_len, kv_len, offset) in [(0, 0, 5, 60, 40), (31, 0, 40, 100, 60), (5, 3, 64, 33, 0)] {
        let case = Case::new("window", [1, 2, 1, q_len, kv_len, 16, 16], Dtype::F32)
            .seeing(Visibility::window(Some(left), Some(right)))
            .at(QOffset::At(offset));
        let mut built = build(&case);
        fill(&mut built.q, |_| 0.0);
        for (row, lse) in answer(&built, runner).lse.slice().iter().enumerate() {
            let p = (row % q_len) as i64 + offset;
            let seen = (0..kv_len as i64).filter(|j| p - left as i64 <= *j && *j <= p + right as i64).count();
            let count = f64::from(*lse).exp();
            assert!((count - seen as f64).abs() < 1e-3 * seen as f64 + 1e-9, "row {row}: {count} for {seen}");
        }
    }
}

#[test]
fn a_row_that_sees_no_key_is_zero() {
    let runners = all();
    for (n, q_len) in [1, 2, 40].into_iter().enumerate() {
        for dtype in DTYPES {
            let case = Case::new("before", [1, 2, 1, q_len, 100, 24, 24], dtype).causal(QOffset::At(-40));
            let answer = answer(&build(&case), &runners[n]);
            assert!(answer.out.values().iter().all(|&x| x == 0.0), "{dtype} {q_len}");
            assert!(answer.lse.slice().iter().all(|&lse| lse == f32::NEG_INFINITY), "{dtype} {q_len}");
        }
    }
}

#[test]
fn every_dimension_layout_and_number_of_rows_is_computed() {
    let dims = [8, 32, 48, 64, 80, 96, 128, 192, 256, 384, 512];
    pass(dims.into_iter().enumerate().map(|(n, dim)| {
        let rows = [1, 2, 7, 9, 40][n % 5];
        let case = Case::new("rows", [2, 4, 2, rows, 50, dim, dim], DTYPES[n % 3]);
        case.layout(Layout::ALL[n % Layout::ALL.len()]).causal(QOffset::BottomRight)
    }));
    pass([(2, 1), (65, 64), (70, 17)].map(|(q_len, kv_len)| {
        Case::new("more queries", [1, 2, 1, q_len, kv_len, 32, 32], Dtype::F16).causal(QOffset::TopLeft)
    }));
}
