//! Tile sizes that the catalogue does not cover, and dimensions that are not powers of two.

use crate::support::{all_pass, runner};
use Codec::{F32, Fp8, Int8, Rot16, Tq2, Tq3, Tq4, Tq5, Tq6};
use QOffset::{At, BottomRight};
use flashtile::{Codec, Dtype, MaskKind, QOffset, Visibility};
use flashtile_gpu::tile::{PortableTile, Tiling};
use flashtile_testkit::{Case, Keep, MaskFill, Tree};

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];

/// Features that change scores and hide keys, and sizes that straddle tiles of rows and of keys.
fn features(stored: &str, of: impl Fn(String, &[(usize, usize)]) -> Case) -> Vec<Case> {
    let of = |name: &str, lengths: &[(usize, usize)]| of(format!("tile_{name}_{stored}"), lengths);
    let straddling = &[(1, 1), (3, 31), (31, 33), (33, 129), (9, 65), (0, 3), (2, 0)][..];
    let banded = of("band", &[(33, 90)]).seeing(Visibility::window(Some(20), Some(5))).at(At(30));
    vec![
        of("all", &[(3, 33), (11, 47)]),
        of("causal", straddling).causal(BottomRight),
        of("scores", &[(5, 70), (12, 33)]).causal(BottomRight).alibi().softcap(9.0).sinks(),
        banded,
        of("mask", &[(13, 70)]).mask(MaskKind::Additive(Dtype::F32), "b", MaskFill::Random),
        of("hidden", &[(13, 70)]).mask(MaskKind::Bool, "h", MaskFill::HiddenRows).sinks(),
        of("tree", &[(9, 70), (5, 5)]).tree(Tree::Branches).causal(BottomRight),
    ]
}

fn tile(tiling: Tiling) {
    let runner = runner(tiling).padded();
    let elements = DTYPES.map(|dtype| (dtype, [Codec::of(dtype); 2]));
    let codes = [(Dtype::F32, [Int8; 2]), (Dtype::BF16, [Tq4; 2])];
    for (dtype, [k, v]) in elements.into_iter().chain(codes) {
        let cases = features(&format!("{dtype}_{k}"), |name, lengths| {
            let case = Case::new(name, [1, 3, 1, 0, 0, 64, 64], dtype).stored(k, v);
            case.cached(lengths, 130, Keep::All)
        });
        all_pass(&cases, &runner);
    }
    for [k, v] in [[Codec::F16, F32], [Fp8, Tq6]] {
        let cases = features(&format!("paged_{k}_{v}"), |name, lengths| {
            let case = Case::new(name, [1, 6, 2, 0, 0, 64, 64], Dtype::F16).stored(k, v);
            case.cached(lengths, 3, Keep::All)
        });
        all_pass(&cases, &runner);
    }
}

fn prefill(tile: PortableTile, dtypes: &[Dtype]) {
    let runner = runner(tile).padded();
    for &dtype in dtypes {
        // One page, pages of any size, pages that hold 16 keys at a time.
        for page in [130, 3, 48] {
            let cases = features(&format!("prefill_{dtype}_{page}"), |name, lengths| {
                Case::new(name, [1, 3, 1, 0, 0, 64, 64], dtype).cached(lengths, page, Keep::All)
            });
            all_pass(&cases, &runner);
        }
    }
}

#[test]
fn of_prefill_with_four_simd_groups() {
    prefill(PortableTile::prefill(64, 64, 4, 1), &[Dtype::F16, Dtype::BF16]);
}

#[test]
fn of_prefill_with_eight_simd_groups() {
    prefill(PortableTile::prefill(128, 32, 8, 1), &DTYPES);
}

#[test]
fn of_prefill_with_thirty_two_rows_a_simd_group() {
    prefill(PortableTile::prefill(32, 32, 1, 1), &DTYPES);
}

#[test]
fn of_prefill_with_teams() {
    prefill(PortableTile::prefill(16, 16, 2, 1).with_team(2), &DTYPES);
}

#[test]
fn of_prefill_with_splits() {
    for tile in [PortableTile::prefill(32, 16, 2, 1), PortableTile::prefill(16, 16, 2, 1).with_team(2)] {
        let runner = runner(tile.with_splits(3)).padded();
        for dtype in DTYPES {
            let cases = features(&format!("split_{dtype}"), |name, lengths| {
                Case::new(name, [1, 3, 1, 0, 0, 64, 64], dtype).cached(lengths, 48, Keep::All)
            });
            all_pass(&cases, &runner);
        }
    }
}

/// Features over keys and values of some types and dimensions, in one page and in pages.
fn stored(tile: impl Into<Tiling>, dtype: Dtype, codecs: [Codec; 2], [head_dim, value_dim]: [usize; 2]) {
    let ([k, v], runner) = (codecs, runner(tile).padded().with_shared_bytes(99 << 10));
    for page in [130, 3] {
        let name = format!("{dtype}_{k}_{v}_{head_dim}x{value_dim}_{page}");
        let cases = features(&name, |name, lengths| {
            let case = Case::new(name, [1, 3, 1, 0, 0, head_dim, value_dim], dtype).stored(k, v);
            case.cached(lengths, page, Keep::All)
        });
        all_pass(&cases, &runner);
    }
}

#[test]
fn of_prefill_with_one_block() {
    let tile = PortableTile::prefill(32, 16, 2, 1).with_one_block();
    let team = PortableTile::prefill(16, 16, 2, 1).with_team(2).with_one_block();
    prefill(tile, &DTYPES);
    prefill(team, &DTYPES);
    for dtype in DTYPES {
        stored(team, dtype, [Codec::of(dtype); 2], [20, 20]);
    }
    stored(tile, Dtype::BF16, [Int8; 2], [64, 64]);
    stored(team.with_splits(2), Dtype::F16, [Tq4; 2], [64, 64]);
    // Half of the SIMD groups of a team prepare and rotate rows.
    let four = PortableTile::prefill(16, 16, 4, 1).with_team(4).with_one_block();
    stored(four, Dtype::BF16, [Tq2; 2], [80, 80]);
    stored(four, Dtype::F16, [Int8; 2], [80, 80]);
    let long = PortableTile::prefill(32, 16, 8, 1).with_team(4).with_one_block();
    stored(long, Dtype::F16, [Codec::F16; 2], [512, 512]);
    stored(long.with_splits(2), Dtype::BF16, [Codec::BF16; 2], [512, 512]);
}

#[test]
fn of_prefill_over_rows_of_any_length() {
    for dtype in DTYPES {
        let codecs = [Codec::of(dtype); 2];
        stored(PortableTile::prefill(32, 16, 2, 1), dtype, codecs, [1, 1]);
        stored(PortableTile::prefill(16, 16, 2, 1).with_team(2), dtype, codecs, [20, 65]);
        stored(PortableTile::prefill(16, 16, 2, 1).with_team(2).with_splits(2), dtype, codecs, [200, 144]);
        stored(PortableTile::prefill(32, 16, 4, 1).with_team(2), dtype, codecs, [192, 128]);
        stored(PortableTile::prefill(16, 16, 4, 1).with_team(4), dtype, codecs, [512, 512]);
    }
}

#[test]
fn of_prefill_over_codes() {
    let tile = PortableTile::prefill(32, 16, 2, 1);
    for (dtype, codec) in [
        (Dtype::F16, Int8),
        (Dtype::F32, Fp8),
        (Dtype::BF16, Tq2),
        (Dtype::BF16, Tq3),
        (Dtype::F16, Tq4),
        (Dtype::BF16, Tq5),
        (Dtype::BF16, Tq6),
        (Dtype::F16, Rot16),
    ] {
        stored(tile, dtype, [codec; 2], [64, 64]);
        stored(tile.with_splits(2), dtype, [codec; 2], [64, 64]);
    }
    stored(tile, Dtype::BF16, [Int8; 2], [128, 128]);
    stored(tile, Dtype::F32, [Tq4; 2], [128, 128]);
    stored(tile, Dtype::F16, [Codec::F16, F32], [64, 64]);
    stored(tile, Dtype::BF16, [Codec::BF16, Int8], [64, 64]);
    stored(tile, Dtype::F16, [Tq4, Codec::F16], [33, 64]);
    stored(tile, Dtype::BF16, [Rot16, Tq4], [64, 64]);
    stored(tile, Dtype::F32, [Tq4, Rot16], [33, 64]);
}

#[test]
fn of_prefill_over_codes_with_teams() {
    let tile = PortableTile::prefill(32, 32, 4, 1).with_team(2);
    for codecs in [[Int8; 2], [Tq4; 2], [Fp8, Tq6]] {
        stored(tile, Dtype::BF16, codecs, [80, 96]);
    }
    stored(tile, Dtype::BF16, [Tq4; 2], [192, 192]);
}

#[test]
fn of_prefill_over_codes_of_mlx_native() {
    let pair = PortableTile::prefill(16, 16, 2, 1).with_team(2);
    stored(pair, Dtype::BF16, [Codec::MlxTq4; 2], [256, 256]);
    stored(pair, Dtype::F16, [Codec::MlxTq8; 2], [256, 256]);
    let four = PortableTile::prefill(16, 16, 4, 1).with_team(4);
    stored(four, Dtype::BF16, [Codec::MlxTq4, Codec::MlxTq5], [512, 512]);
}

#[test]
fn of_prefill_over_centered_keys() {
    let tile = PortableTile::prefill(32, 16, 2, 1);
    for (dtype, codec) in
        [(Dtype::F16, Int8), (Dtype::F16, Tq4), (Dtype::F16, Rot16), (Dtype::BF16, Codec::BF16)]
    {
        for splits in [1, 2] {
            let case = Case::new(format!("centered_{codec}_{splits}"), [1, 2, 1, 0, 0, 64, 64], dtype);
            let case = case.stored(codec, codec).cached(&[(20, 83), (3, 3)], 48, Keep::All);
            let case = case.causal(BottomRight).centered().sinks();
            all_pass(&[case], &runner(tile.with_splits(splits)).padded());
        }
    }
}

#[test]
fn of_sixteen_rows() {
    tile(PortableTile::new(16, 16, 4, 1).into());
}

#[test]
fn of_two_sixteens_of_keys() {
    tile(PortableTile::new(8, 32, 4, 1).with_splits(2));
}

#[test]
fn of_both() {
    tile(PortableTile::new(16, 32, 1, 1).with_splits(3));
}

#[test]
fn of_thirty_two_rows() {
    tile(PortableTile::new(32, 16, 2, 1).with_splits(2));
}

#[test]
fn of_eight_simd_groups() {
    tile(PortableTile::new(8, 16, 8, 1).into());
}

/// A paged case and one that is not.
fn both(name: &str, dims: [usize; 2], dtype: Dtype, codecs: [Codec; 2]) -> [Case; 2] {
    let [k, v] = codecs;
    [7, 90].map(|page| {
        let name = format!("{name}_{dtype}_{k}_{v}_{}x{}_in_{page}", dims[0], dims[1]);
        let case = Case::new(name, [1, 2, 1, 0, 0, dims[0], dims[1]], dtype).stored(k, v);
        case.cached(&[(1, 33), (3, 83), (2, 1)], page, Keep::All).causal(BottomRight)
    })
}

#[test]
fn of_elements_of_80_and_96() {
    for dtype in DTYPES {
        for dim in [80, 96] {
            let codec = Codec::of(dtype);
            let tile = PortableTile::default_decode(codec, dim).with_splits(2);
            let cases = both("planned", [dim; 2], dtype, [codec; 2]);
            all_pass(&cases, &runner(tile));
            all_pass(
                &cases[usize::from(dim == 80)..][..1],
                &runner(PortableTile::new(16, 16, 4, 1).with_splits(2)),
            );
        }
    }
}

#[test]
fn of_codes_of_80_and_96() {
    for dtype in DTYPES {
        for codec in [Int8, Fp8, Tq2, Tq3, Tq4, Tq5, Tq6, Rot16] {
            for dim in [80, 96] {
                let planned = runner(PortableTile::default_decode(codec, dim).with_splits(2));
                let cases = both("planned", [dim; 2], dtype, [codec; 2]);
                all_pass(&cases, &planned.padded());
                // Levels are gathered from anywhere.
                if dtype == Dtype::F16 || ![Int8, Fp8].contains(&codec) {
                    all_pass(&cases, &planned);
                }
            }
        }
        for (dims, codecs) in [([96, 80], [Int8, Tq5]), ([80, 96], [Tq6, Fp8])] {
            let tile = PortableTile::default_decode(codecs[0], dims[0]).with_splits(2);
            let [paged, _] = both("planned", dims, dtype, codecs);
            all_pass(&[paged.centered().sinks()], &runner(tile).padded());
        }
    }
}

#[test]
fn of_codes_of_128_as_planned() {
    for dtype in DTYPES {
        for codec in [Int8, Tq4] {
            let tile = PortableTile::default_decode(codec, 128).with_splits(2);
            all_pass(&both("planned", [128; 2], dtype, [codec; 2]), &runner(tile).padded());
        }
    }
}
