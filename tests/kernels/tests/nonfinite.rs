//! A NaN or an infinity in a key or a value reaches the rows that see it, and no others.

use crate::support::{PREFILL, TILE, runner};
use flashtile::{Codec, Dtype, QOffset, Visibility, reference};
use flashtile_gpu::tile::{PortableTile, Tiling};
use flashtile_testkit::{Case, Keep, Prepared};
use std::sync::Arc;

/// Keys around the first row's, at the boundaries of their tiles, and the last one.
const SPOILED: [usize; 7] = [0, 1, 15, 16, 31, 33, 40];

/// Rows that see one key or a few, in one split or two.
fn cases(name: &str, dtype: Dtype, keep: impl Fn(Case) -> Case) -> [Case; 3] {
    let of = |kind: &str| keep(Case::new(format!("{kind}_{name}"), [1, 2, 1, 41, 41, 64, 64], dtype));
    [
        of("causal").causal(QOffset::TopLeft),
        of("self").seeing(Visibility::window(Some(0), Some(0))).at(QOffset::TopLeft),
        of("window").seeing(Visibility::window(Some(9), Some(2))).at(QOffset::TopLeft),
    ]
}

/// Decode, and prefill alone, with splits and with teams.
fn tilings() -> [Tiling; 4] {
    let team = PortableTile::prefill(16, 16, 2, 1).with_team(2);
    [TILE, PREFILL.into(), PREFILL.with_splits(2), team.with_splits(2)]
}

/// Runs a case with changed tensors.
fn pass(case: &Case, mut prepared: Prepared, tilings: &[Tiling], what: &str) {
    let built = &prepared.built;
    prepared.expected = reference::attention(&built.problem, &built.inputs()).unwrap();
    for tiling in tilings {
        let outcome = prepared.run(&runner(*tiling).padded());
        assert!(outcome.is_ok(), "{}, {what}: {} by {tiling:?}", case.name, outcome.unwrap_err());
    }
}

/// Which tilings a case is run by.
#[derive(Clone, Copy)]
enum By {
    /// Decode, and one of the others: `n` says which, so that cases take turns.
    Turns,
    All,
}

impl By {
    fn tilings(self, n: usize) -> Vec<Tiling> {
        let all = tilings();
        match self {
            Self::Turns => vec![all[0], all[1 + n % (all.len() - 1)]],
            Self::All => all.to_vec(),
        }
    }
}

#[test]
fn of_elements() {
    elements(By::Turns);
}

#[test]
#[ignore = "takes minutes"]
fn of_elements_by_every_tiling() {
    elements(By::All);
}

fn elements(by: By) {
    let all = tilings();
    for (turn, dtype) in [Dtype::F32, Dtype::F16, Dtype::BF16].into_iter().enumerate() {
        for case in cases(&dtype.to_string(), dtype, |case| case) {
            let clean = Prepared::new(&case).unwrap();
            for (n, key) in SPOILED.into_iter().enumerate() {
                for (values, nonfinite) in
                    [(false, f32::NAN), (true, f32::NAN), (false, f32::INFINITY), (true, f32::INFINITY)]
                {
                    let mut prepared = clean.clone();
                    let side = if values { &mut prepared.built.v } else { &mut prepared.built.k };
                    side.set([0, 0, key, 9 * n], nonfinite);
                    // An infinity takes the paths of NaN: tilings take turns at it.
                    let tilings = if nonfinite.is_nan() {
                        by.tilings(turn + n + usize::from(values))
                    } else {
                        vec![all[n % all.len()]]
                    };
                    let what = format!("{nonfinite} in key {key}, of its value: {values}");
                    pass(&case, prepared, &tilings, &what);
                }
            }
        }
    }
}

#[test]
fn of_codes() {
    codes(By::Turns);
}

#[test]
#[ignore = "takes minutes"]
fn of_codes_by_every_tiling() {
    codes(By::All);
}

fn codes(by: By) {
    for (turn, codec) in [Codec::Int8, Codec::Tq4, Codec::Rot16].into_iter().enumerate() {
        let keep = |case: Case| case.stored(codec, codec).cached(&[(41, 41)], 50, Keep::All);
        for case in cases(codec.name(), Dtype::F16, keep) {
            for (n, key) in SPOILED.into_iter().enumerate() {
                for values in [false, true] {
                    let mut prepared = Prepared::new(&case).unwrap();
                    let built = &mut prepared.built;
                    let (page, row) = built.tables.as_ref().unwrap().locate(0, key).unwrap();
                    let codes = if values { &mut built.v_codes } else { &mut built.k_codes };
                    Arc::get_mut(codes.as_mut().unwrap()).unwrap().poison(page, row);
                    pass(
                        &case,
                        prepared,
                        &by.tilings(turn + n + usize::from(values)),
                        &format!("the scale, or row, of key {key} is NaN, of its value: {values}"),
                    );
                }
            }
        }
    }
}
