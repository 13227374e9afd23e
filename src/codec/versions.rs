//! Rotation, encoder and decoder compiled for several instruction sets. What they do in ways of their own is a
//! [`Machine`](super::machine::Machine)'s; the bytes are the same: products are integers, and sums of f32 have a fixed order.

#![allow(unsafe_code, reason = "functions of an instruction set that the machine was asked for")]

#[cfg(target_arch = "x86_64")]
use super::avx2::Avx2;
#[cfg(target_arch = "x86_64")]
use super::avx512::{Avx512, Vbmi};
use super::convert::widen;
use super::machine::Loops;
use super::{Coder, Rotation, ScaleRule, energy};
use crate::Dtype;
use std::sync::OnceLock;

/// Bytes of a page, its tokens, and a row.
pub(super) type Place<'a> = (&'a mut [u8], usize, usize);
pub(super) type Source<'a> = (&'a [u8], usize, usize);

/// Elements.
type Row<'a> = (Dtype, &'a [u8]);

/// The functions of one instruction set.
#[derive(Clone, Copy)]
struct Version {
    encode: unsafe fn(&Coder, &mut [f32], ScaleRule, Place<'_>),
    decode: unsafe fn(&Coder, Source<'_>, &mut [f32]),
    load: unsafe fn(Row<'_>, Option<&[f32]>, &mut [f32]) -> f32,
    rotate: unsafe fn(&Rotation, &mut [f32]),
    unrotate: unsafe fn(&Rotation, &mut [f32]),
}

/// Stores a vector as a row of a page. Changes the vector.
pub(crate) fn encode(coder: &Coder, x: &mut [f32], rule: ScaleRule, place: Place<'_>) {
    // SAFETY: the machine has the instruction set.
    unsafe { (best().encode)(coder, x, rule, place) }
}

/// A stored row of a page, in the rotated domain where the codec rotates: codes times the scale.
pub(crate) fn decode_rotated(coder: &Coder, source: Source<'_>, x: &mut [f32]) {
    // SAFETY: the machine has the instruction set.
    unsafe { (best().decode)(coder, source, x) }
}

/// A row as f32, without a mean, and the sum of its squares.
pub(super) fn load(row: Row<'_>, mean: Option<&[f32]>, x: &mut [f32]) -> f32 {
    // SAFETY: the machine has the instruction set.
    unsafe { (best().load)(row, mean, x) }
}

/// Rotates a vector.
pub(crate) fn rotate(rotation: &Rotation, x: &mut [f32]) {
    // SAFETY: the machine has the instruction set.
    unsafe { (best().rotate)(rotation, x) }
}

/// Undoes [`rotate`], up to rounding.
pub(crate) fn unrotate(rotation: &Rotation, y: &mut [f32]) {
    // SAFETY: the machine has the instruction set.
    unsafe { (best().unrotate)(rotation, y) }
}

macro_rules! version {
    ($name:ident, $machine:ty $(, $features:literal)?) => {
        mod $name {
            use super::{Coder, Place, Rotation, Row, ScaleRule, Source, energy, widen};

            pub(super) const VERSION: super::Version = super::Version { encode, decode, load, rotate, unrotate };

            $(#[target_feature(enable = $features)])?
            fn encode(coder: &Coder, x: &mut [f32], rule: ScaleRule, place: Place<'_>) {
                coder.encode::<$machine>(x, rule, place);
            }

            $(#[target_feature(enable = $features)])?
            fn decode(coder: &Coder, source: Source<'_>, x: &mut [f32]) {
                coder.decode_rotated::<$machine>(source, x);
            }

            $(#[target_feature(enable = $features)])?
            fn load((dtype, row): Row<'_>, mean: Option<&[f32]>, x: &mut [f32]) -> f32 {
                widen(dtype, row, x);
                if let Some(mean) = mean {
                    for (x, mean) in x.iter_mut().zip(mean) {
                        *x -= mean;
                    }
                }
                energy(x)
            }

            $(#[target_feature(enable = $features)])?
            fn rotate(rotation: &Rotation, x: &mut [f32]) {
                rotation.apply::<$machine>(x);
            }

            $(#[target_feature(enable = $features)])?
            fn unrotate(rotation: &Rotation, x: &mut [f32]) {
                rotation.undo::<f32, $machine>(x);
            }
        }
    };
}

version!(portable, super::Loops);
#[cfg(target_arch = "x86_64")]
version!(avx2, super::Avx2, "avx2");
#[cfg(target_arch = "x86_64")]
version!(avx512, super::Avx512, "avx512f,avx512bw,avx512dq,avx512vl");
#[cfg(target_arch = "x86_64")]
version!(vbmi, super::Vbmi, "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni");

/// Every version that this machine runs, the best first.
fn versions() -> Vec<Version> {
    let mut all = vec![portable::VERSION];
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx2") {
            all.insert(0, avx2::VERSION);
        }
        let has = [
            is_x86_feature_detected!("avx512f"),
            is_x86_feature_detected!("avx512bw"),
            is_x86_feature_detected!("avx512dq"),
            is_x86_feature_detected!("avx512vl"),
        ];
        if has.into_iter().all(|has| has) {
            all.insert(0, avx512::VERSION);
            if is_x86_feature_detected!("avx512vbmi") && is_x86_feature_detected!("avx512vnni") {
                all.insert(0, vbmi::VERSION);
            }
        }
    }
    all
}

#[inline]
fn best() -> &'static Version {
    static BEST: OnceLock<Version> = OnceLock::new();
    BEST.get_or_init(|| versions()[0])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Codec;
    use crate::testkit::Rng;

    #[test]
    fn every_instruction_set_loads_the_same_numbers() {
        let mut rng = Rng::new(12);
        for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
            for dim in [1, 7, 16, 33, 64, 80, 300, 512] {
                for n in 0..20 {
                    let gain = 10f32.powi(n % 9 - 4);
                    let mut x: Vec<f32> = (0..dim).map(|_| gain * rng.normal()).collect();
                    // Ends of the range of f16: a subnormal number, and one that it has not.
                    x[dim / 2] = [3e-7, 1e5, x[dim / 2]][n as usize % 3];
                    let mut row = vec![0u8; dim * dtype.bytes()];
                    crate::codec::from_f32(&x, dtype, &mut row);
                    let mean: Vec<f32> = (0..dim).map(|_| gain * rng.normal()).collect();
                    for mean in [None, Some(&mean[..])] {
                        let load = |version: Version| {
                            let mut x = vec![f32::NAN; dim];
                            // SAFETY: one of this machine's versions.
                            let energy = unsafe { (version.load)((dtype, &row), mean, &mut x) };
                            (energy.to_bits(), x.into_iter().map(f32::to_bits).collect::<Vec<u32>>())
                        };
                        let loaded: Vec<(u32, Vec<u32>)> = versions().into_iter().map(load).collect();
                        assert!(loaded.iter().all(|of| *of == loaded[0]), "{dtype} {dim}");
                        let (mut plain, mut energy) = (vec![0.0; dim], 0.0f64);
                        crate::codec::to_f32(dtype, &row, &mut plain);
                        for (at, x) in plain.iter_mut().enumerate() {
                            *x -= mean.map_or(0.0, |mean| mean[at]);
                            energy += f64::from(*x) * f64::from(*x);
                        }
                        let (got, x) = &loaded[0];
                        assert_eq!(x[..], plain.iter().map(|x| x.to_bits()).collect::<Vec<u32>>()[..]);
                        let got = f64::from(f32::from_bits(*got));
                        assert!(
                            got == energy || (got - energy).abs() <= 1e-5 * energy,
                            "{got}, not {energy}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn every_instruction_set_gives_the_same_bytes() {
        let mut rng = Rng::new(11);
        for codec in Codec::ALL.into_iter().filter(|codec| codec.dtype().is_none()) {
            let dims = [1, 7, 33, 64, 80, 96, 128, 192, 256, 300, 512];
            for dim in dims.into_iter().filter(|&dim| codec.supports(dim)) {
                let coder = Coder::new(codec, dim).unwrap();
                for n in 0..40 {
                    let gain = 10f32.powi(n % 7 - 3);
                    let mut x: Vec<f32> = (0..dim).map(|_| gain * rng.normal()).collect();
                    if n % 5 == 0 {
                        x[dim / 2] = 20.0;
                    }
                    for rule in [ScaleRule::Unbiased, ScaleRule::LeastSquares] {
                        let bytes: Vec<Vec<u8>> = versions()
                            .into_iter()
                            .map(|version| {
                                let mut page = vec![0u8; 3 * coder.format().row_bytes()];
                                // SAFETY: one of this machine's versions.
                                unsafe { (version.encode)(&coder, &mut x.clone(), rule, (&mut page, 3, 1)) };
                                page
                            })
                            .collect();
                        assert!(bytes.iter().all(|b| *b == bytes[0]), "{codec} of {dim}");
                        let back: Vec<Vec<u32>> = versions()
                            .into_iter()
                            .map(|version| {
                                let mut back = vec![f32::NAN; dim];
                                // SAFETY: one of this machine's versions.
                                unsafe { (version.decode)(&coder, (&bytes[0], 3, 1), &mut back) };
                                if let Some(rotation) = coder.rotation() {
                                    // SAFETY: as above.
                                    unsafe { (version.unrotate)(rotation, &mut back) };
                                }
                                back.into_iter().map(f32::to_bits).collect()
                            })
                            .collect();
                        assert!(back.iter().all(|b| *b == back[0]), "{codec} of {dim} comes back");
                    }
                }
            }
        }
    }
}
