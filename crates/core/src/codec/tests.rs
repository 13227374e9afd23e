use super::coder::Coder;
use super::dispatch;
use super::encode::{EncodeJob, PageRows, SourceRows};
use super::error::MAX_NORM;
use super::key_transform::{ChannelTransform, KeyTransform};
use super::kind::{Codec, RowKind};
use super::quantizer::ScaleRule;
use crate::isa::IsaToken;
use crate::tensor::TensorView;
use flashtile_testkit::Rng;
use half::f16;

fn normal(rng: &mut Rng, dim: usize) -> Vec<f32> {
    (0..dim).map(|_| rng.normal()).collect()
}

/// Stores a vector as the only row of a page.
fn store(coder: &Coder, x: &[f32], rule: ScaleRule, page: &mut [u8]) {
    let tensor = TensorView::bhsd(x, [1, 1, 1, x.len()]).unwrap();
    let rows = SourceRows { tensor: &tensor, transform: ChannelTransform::default() };
    let pages = PageRows { bytes: page, tokens: 1, rows: 0..1 };
    dispatch::store(IsaToken::best(), &mut EncodeJob { coder, rule, rows, from: 0, pages });
}

/// A vector after encoding and decoding.
fn there_and_back(coder: &Coder, x: &[f32], rule: ScaleRule) -> Vec<f32> {
    let mut page = vec![0u8; coder.format().row_bytes()];
    store(coder, x, rule, &mut page);
    let mut back = vec![f32::NAN; x.len()];
    dispatch::decode(IsaToken::best(), coder, (&page, 1, 0..1), &mut back);
    back
}

fn relative_error(codec: Codec, dim: usize, rule: ScaleRule, vectors: usize) -> f64 {
    let coder = Coder::new(codec, dim).unwrap();
    let mut rng = Rng::new(7);
    let (mut error, mut energy) = (0.0f64, 0.0f64);
    for _ in 0..vectors {
        let x = normal(&mut rng, dim);
        for (x, y) in x.iter().zip(there_and_back(&coder, &x, rule)) {
            error += f64::from(x - y).powi(2);
            energy += f64::from(*x).powi(2);
        }
    }
    error / energy
}

#[test]
fn errors_of_normal_vectors_are_those_of_the_format() {
    use Codec::{Fp8, Int8, Rot16, Tq2, Tq3, Tq4, Tq5, Tq6};
    // Bounds for values, then for keys.
    for (codec, wanted) in [
        (Tq2, [0.114, 0.129]),
        (Tq3, [3.18e-2, 3.3e-2]),
        (Tq4, [7.9e-3, 8.0e-3]),
        (Tq5, [1.96e-3, 1.96e-3]),
        (Tq6, [5.0e-4, 5.0e-4]),
        (Int8, [4.15e-5, 4.15e-5]),
        (Fp8, [6.6e-4, 6.6e-4]),
        (Rot16, [4.3e-8, 4.3e-8]),
    ] {
        for (rule, want) in [ScaleRule::LeastSquares, ScaleRule::Unbiased].into_iter().zip(wanted) {
            let got = relative_error(codec, 128, rule, 4000);
            assert!((got / want - 1.0).abs() < 0.05, "{codec}, {rule:?}: {got:.3e}, not {want:.3e}");
            // Other dimensions have about the same error.
            for dim in [64, 80, 96, 112, 192, 256, 512] {
                let got = relative_error(codec, dim, rule, 400);
                assert!((0.7..1.35).contains(&(got / want)), "{codec} of {dim}, {rule:?}: {got:.3e}");
            }
        }
    }
}

/// The bytes of stored rows never change: caches are kept in files.
#[test]
fn bytes_of_the_formats() {
    let digests = [
        (Codec::Rot16, 0xc66f_eedc_3afc_d7ad),
        (Codec::Fp8, 0x736b_dd33_46a1_e7bb),
        (Codec::Int8, 0x9371_ed04_3dc1_20e4),
        (Codec::Tq6, 0x2f15_111f_5290_cba3),
        (Codec::Tq5, 0x8ff2_2bed_aa6e_1700),
        (Codec::Tq4, 0xc5a0_b3e1_2b99_6cea),
        (Codec::Tq3, 0x5947_2984_8dae_df47),
        (Codec::Tq2, 0x1946_4c80_19ea_fb0b),
    ];
    for (codec, want) in digests {
        let mut rng = Rng::new(5);
        // FNV-1a.
        let mut digest = 0xcbf2_9ce4_8422_2325u64;
        for dim in [1, 33, 64, 80, 96, 112, 128, 192, 256, 300, 512] {
            let coder = Coder::new(codec, dim).unwrap();
            for n in 0..60 {
                // Sums of integers and a power of two, which are exact on every machine.
                let gain = 1.0 / (1u64 << (10 + 3 * (n % 9))) as f32;
                let mut x = vec![0.0f32; dim];
                for x in &mut x {
                    *x = gain * (0..6).map(|_| rng.below(1 << 16) as f32 - 32767.5).sum::<f32>();
                }
                if n % 7 == 0 {
                    x[dim / 2] = 3.0;
                }
                for rule in [ScaleRule::Unbiased, ScaleRule::LeastSquares] {
                    let mut page = vec![0u8; coder.format().row_bytes()];
                    store(&coder, &x, rule, &mut page);
                    for byte in page {
                        digest = (digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
                    }
                }
            }
        }
        assert_eq!(digest, want, "{codec}: {digest:#018x}");
    }
}

#[test]
fn rotated_halves_are_the_rotated_row_of_integers_in_f16() {
    let mut rng = Rng::new(9);
    for dim in [1, 33, 80, 96, 128, 512] {
        let coder = Coder::new(Codec::Rot16, dim).unwrap();
        let (x, mean) = (normal(&mut rng, dim), normal(&mut rng, dim));
        let tensor = TensorView::bhsd(&x, [1, 1, 1, dim]).unwrap();
        let transform = KeyTransform::new(Some(mean.clone()), None);
        let rows = SourceRows { tensor: &tensor, transform: transform.view() };
        let mut page = vec![0xa5u8; 3 * 2 * dim];
        let pages = PageRows { bytes: &mut page, tokens: 3, rows: 1..2 };
        let mut job = EncodeJob { coder: &coder, rule: ScaleRule::Unbiased, rows, from: 0, pages };
        dispatch::store(IsaToken::best(), &mut job);

        let mut rotated: Vec<f32> = x.iter().zip(&mean).map(|(x, mean)| x - mean).collect();
        let integers = Coder::new(Codec::Int8, dim).unwrap();
        dispatch::rotate(IsaToken::best(), integers.rotation().unwrap(), &mut rotated);
        let halves: Vec<u8> = rotated.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect();
        assert_eq!(page[2 * dim..4 * dim], halves, "rows of {dim}");
        assert!(page[..2 * dim].iter().chain(&page[4 * dim..]).all(|byte| *byte == 0xa5));
    }
}

#[test]
fn inner_products_with_the_vector_itself_are_exact_where_scales_are_unbiased() {
    let mut rng = Rng::new(3);
    for codec in [Codec::Tq2, Codec::Tq3, Codec::Tq4, Codec::Tq5, Codec::Tq6, Codec::Int8] {
        let coder = Coder::new(codec, 96).unwrap();
        for _ in 0..50 {
            let x = normal(&mut rng, 96);
            let back = there_and_back(&coder, &x, ScaleRule::Unbiased);
            let product =
                |a: &[f32], b: &[f32]| -> f64 { a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum() };
            let ratio = product(&x, &back) / product(&x, &x);
            // The scale is rounded to f16.
            assert!((ratio - 1.0).abs() < 1e-3, "{codec}: {ratio}");
        }
    }
}

#[test]
fn zeros_spikes_and_extremes() {
    for codec in Codec::ALL.into_iter().filter(|codec| codec.dtype().is_none()) {
        for dim in [1, 7, 64, 80, 256, 512].into_iter().filter(|&dim| codec.supports(dim)) {
            let coder = Coder::new(codec, dim).unwrap();
            for zeros in [0.0, 1e-30, f32::MIN_POSITIVE / 4.0] {
                let back = there_and_back(&coder, &vec![zeros; dim], ScaleRule::Unbiased);
                assert!(back.iter().all(|x| *x == 0.0), "{codec} of {dim}");
            }
            // The whole norm lies in one coordinate. After rotation, all magnitudes are equal if the dimension is one block.
            for size in [3.0, MAX_NORM] {
                for rule in [ScaleRule::Unbiased, ScaleRule::LeastSquares] {
                    let mut spike = vec![0.0f32; dim];
                    spike[dim / 2] = size;
                    let back = there_and_back(&coder, &spike, rule);
                    assert!(back.iter().all(|x| x.is_finite()), "{codec} of {dim}");
                    // In the format of mlx-native, equal magnitudes are not at the middle of a cell.
                    if dim != 7 && !matches!(codec.row_kind(), RowKind::Mlx { .. }) {
                        assert!(
                            (back[dim / 2] / size - 1.0).abs() < 1e-3,
                            "{codec} of {dim}: {}",
                            back[dim / 2]
                        );
                    }
                    // Inputs that the rotation maps to one coordinate are a codebook's worst case.
                    let Some(rotation) = coder.rotation() else { continue };
                    dispatch::unrotate(IsaToken::best(), rotation, &mut spike);
                    let back = there_and_back(&coder, &spike, rule);
                    assert!(back.iter().all(|x| x.is_finite()));
                }
            }
        }
    }
}

#[test]
fn names_are_read_back() {
    for codec in Codec::ALL {
        assert_eq!(codec.name().parse(), Ok(codec));
    }
    let refusal = "q4_0".parse::<Codec>().unwrap_err();
    assert_eq!(
        refusal,
        "q4_0 is not a codec, expected one of f32, f16, bf16, rot16, fp8, int8, tq6, tq5, tq4, tq3, tq2, mlx-tq8, mlx-tq6, mlx-tq5, \
         mlx-tq4, mlx-tq8-plain, mlx-tq6-plain, mlx-tq5-plain"
    );
}
