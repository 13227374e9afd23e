//! Any number of partial results, some or all of which saw no key.

use crate::support::{all_pass, runner};
use QOffset::BottomRight;
use flashtile::{Codec, Dtype, MaskKind, QOffset, Visibility};
use flashtile_gpu::tile::PortableTile;
use flashtile_testkit::{Case, Keep, MaskFill};

/// Near the number of lanes of a SIMD group, which reads that many partial results at once, and near twice that.
const SPLITS: [usize; 7] = [1, 2, 3, 31, 32, 33, 65];

/// Types of q, and codecs of keys and values.
const STORED: [(Dtype, Codec); 6] = [
    (Dtype::F32, Codec::F32),
    (Dtype::F16, Codec::F16),
    (Dtype::BF16, Codec::BF16),
    (Dtype::F32, Codec::Int8),
    (Dtype::F16, Codec::Tq4),
    (Dtype::BF16, Codec::Tq5),
];

fn all_splits_pass(cases: impl Fn(usize) -> Vec<Case>) {
    for splits in SPLITS {
        all_pass(&cases(splits), &runner(PortableTile::new(8, 16, 1, 1).with_splits(splits)).padded());
    }
}

/// Cached sequences of these lengths with this number of splits, in one page each.
fn cached(name: &str, lengths: &[(usize, usize)], (dtype, codec): (Dtype, Codec), splits: usize) -> Case {
    let longest = lengths.iter().map(|&(_, keys)| keys).max().unwrap_or(0);
    let case = Case::new(format!("{name}_{dtype}_{codec}_{splits}_parts"), [1, 2, 1, 0, 0, 64, 64], dtype);
    case.cached(lengths, longest + 3, Keep::All).stored(codec, codec)
}

#[test]
fn every_split_counts() {
    // The last split has five keys.
    all_splits_pass(|splits| {
        let of = |stored| cached("whole", &[(1, 16 * splits - 11)], stored, splits);
        let mut cases: Vec<Case> = STORED.into_iter().map(of).collect();
        cases.extend(STORED.map(|stored| of(stored).sinks()));
        cases
    });
}

#[test]
fn splits_may_see_no_key() {
    all_splits_pass(|splits| {
        let mut cases = Vec::new();
        for (n, stored) in STORED.into_iter().enumerate() {
            // A sequence without keys, sequences with fewer keys than splits, and queries before every key.
            let few = cached("few", &[(1, 0), (2, 1), (1, 17), (5, 3)], stored, splits).causal(BottomRight);
            // Each row of a tile sees a few of the tile's keys, in one split or two.
            let band = cached("band", &[(11, 90)], stored, splits).causal(BottomRight);
            let band = band.seeing(Visibility::window(Some(4), None));
            // Sinks join where a row ends, whatever the number of splits: every type has them with some of these.
            let with_sinks = (n + splits) % 3 == 0;
            cases.extend([few, band].map(|case| if with_sinks { case.sinks() } else { case }));
        }
        // Splits that a mask hides: all splits of some rows, and all but the last.
        for (n, fill) in [MaskFill::HiddenRows, MaskFill::Closed, MaskFill::Late].into_iter().enumerate() {
            let keys = if fill == MaskFill::Late { 1029 } else { 40 };
            let masked = cached("masked", &[(4, keys)], STORED[n], splits).mask(MaskKind::Bool, "h", fill);
            cases.extend([masked.clone(), masked.sinks()]);
        }
        cases
    });
}

#[test]
fn splits_of_rings_may_see_no_key() {
    all_splits_pass(|splits| {
        let mut cases = Vec::new();
        for (dtype, codec) in [(Dtype::F32, Codec::F32), (Dtype::F16, Codec::Tq4)] {
            let name = format!("ring_{dtype}_{codec}_{splits}_parts");
            let ring = Case::new(name, [1, 2, 1, 0, 0, 64, 64], dtype).stored(codec, codec);
            let ring = ring.cached(&[(1, 90), (3, 61), (2, 5), (1, 0)], 7, Keep::Wrapped);
            let ring = ring.causal(BottomRight).seeing(Visibility::window(Some(19), None));
            cases.extend([ring.clone(), ring.sinks()]);
        }
        cases
    });
}
