//! Codes of dimensions that fill no vector and, rotated, are several blocks: the rest of each matrix product is zeros.

use crate::support::{TILE, all_pass, runner};
use flashtile::Codec::{self, *};
use flashtile::Dtype;
use flashtile::QOffset::BottomRight;
use flashtile_testkit::{Case, Keep, Prepared};

const CODES: [(Dtype, Codec, Codec, [usize; 2]); 11] = [
    (Dtype::F16, Int8, Int8, [5, 24]),
    (Dtype::BF16, Tq4, Tq5, [72, 33]),
    (Dtype::F32, Tq2, Tq6, [20, 112]),
    (Dtype::F16, Fp8, Fp8, [24, 40]),
    (Dtype::BF16, Tq3, Tq4, [3, 1]),
    (Dtype::F32, Tq5, Tq3, [80, 33]),
    (Dtype::F16, Tq4, Int8, [200, 130]),
    (Dtype::F32, Rot16, Tq3, [80, 33]),
    (Dtype::BF16, Tq4, Rot16, [72, 33]),
    (Dtype::F32, F16, Tq4, [24, 24]),
    (Dtype::F16, F32, F32, [24, 24]),
];

fn cases(lengths: &[(usize, usize)], page: usize) -> Vec<Case> {
    let case = |(dtype, k, v, [head_dim, value_dim]): (Dtype, Codec, Codec, [usize; 2])| {
        let name = format!("{k}_{v}_{head_dim}x{value_dim}");
        let case = Case::new(name, [1, 4, 2, 0, 0, head_dim, value_dim], dtype);
        case.stored(k, v).cached(lengths, page, Keep::All).causal(BottomRight)
    };
    CODES.into_iter().map(case).collect()
}

#[test]
fn rows_of_any_length() {
    all_pass(&cases(&[(1, 41), (3, 70)], 16), &runner(TILE));
    all_pass(&cases(&[(2, 37), (1, 9)], 7), &runner(TILE).padded());
}

/// A key whose codes are NaN spoils the rows that see it, and no others.
#[test]
fn codes_that_are_nan() {
    let case = Case::new("fp8_80", [1, 2, 1, 41, 41, 80, 80], Dtype::F16);
    let case = case.stored(Fp8, Fp8).cached(&[(41, 41)], 50, Keep::All).causal(BottomRight);
    for key in [0, 15, 40] {
        let mut prepared = Prepared::new(&case).unwrap();
        let built = &mut prepared.built;
        let (page, row) = built.tables.as_ref().unwrap().locate(0, key).unwrap();
        let codes = built.v_codes.as_mut().unwrap();
        std::sync::Arc::get_mut(codes).unwrap().poison(page, row);
        prepared.expected = flashtile::reference::attention(&built.problem, &built.inputs()).unwrap();
        let outcome = prepared.run(&runner(TILE).padded());
        assert!(outcome.is_ok(), "key {key}: {}", outcome.unwrap_err());
    }
}
