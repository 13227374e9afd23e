//! Encoder and decoder compiled for several instruction sets. The source is the same, and so are the bytes: its products are integers, and its
//! sums of f32 have a fixed order.

#![allow(unsafe_code, reason = "functions of an instruction set that the machine was asked for")]

use super::{Coder, ScaleRule};
use std::sync::OnceLock;

/// Bytes of a page, its tokens, and a row.
pub(super) type Place<'a> = (&'a mut [u8], usize, usize);
pub(super) type Source<'a> = (&'a [u8], usize, usize);

/// The functions of one instruction set.
#[derive(Clone, Copy)]
struct Version {
    encode: unsafe fn(&Coder, &mut [f32], ScaleRule, Place<'_>),
    decode: unsafe fn(&Coder, Source<'_>, &mut [f32]),
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

macro_rules! version {
    ($name:ident $(, $features:literal)?) => {
        mod $name {
            use super::{Coder, Place, ScaleRule, Source};

            pub(super) const VERSION: super::Version = super::Version { encode, decode };

            $(#[target_feature(enable = $features)])?
            fn encode(coder: &Coder, x: &mut [f32], rule: ScaleRule, place: Place<'_>) {
                coder.encode(x, rule, place);
            }

            $(#[target_feature(enable = $features)])?
            fn decode(coder: &Coder, source: Source<'_>, x: &mut [f32]) {
                coder.decode_rotated(source, x);
            }
        }
    };
}

version!(portable);
#[cfg(target_arch = "x86_64")]
version!(avx2, "avx2");
#[cfg(target_arch = "x86_64")]
version!(avx512, "avx512f,avx512bw,avx512dq,avx512vl");

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
                    }
                }
            }
        }
    }
}
