//! Rotation, encoder and decoder compiled for several instruction sets. What they do in ways of their own is a
//! [`Machine`](super::machine::Machine)'s; the bytes are the same: products are integers, and sums of f32 have a fixed order.

#![allow(unsafe_code, reason = "functions of an instruction set that the machine was asked for")]

#[cfg(target_arch = "x86_64")]
use super::avx2::Avx2;
#[cfg(target_arch = "x86_64")]
use super::avx512::{Avx512, Vbmi};
use super::machine::Loops;
use super::rows::{Job, Rows};
use super::{Coder, Rotation};
use std::ops::Range;
use std::sync::OnceLock;

/// Bytes of a page, its tokens, and a row or several.
pub(super) type Place<'a> = (&'a mut [u8], usize, usize);
pub(super) type Source<'a> = (&'a [u8], usize, Range<usize>);

/// The functions of one instruction set.
#[derive(Clone, Copy)]
struct Version {
    store: unsafe fn(&mut Job<'_>),
    first_refused: unsafe fn(&Rows<'_>) -> Option<[usize; 2]>,
    decode: unsafe fn(&Coder, Source<'_>, &mut [f32], usize),
    rotate: unsafe fn(&Rotation, &mut [f32]),
    unrotate: unsafe fn(&Rotation, &mut [f32]),
}

/// Stores rows that can be stored.
pub(super) fn store(job: &mut Job<'_>) {
    // SAFETY: the machine has the instruction set.
    unsafe { (best().store)(job) }
}

/// Head and row of the first token that cannot be stored, of several heads the first.
pub(super) fn first_refused(rows: &Rows<'_>) -> Option<[usize; 2]> {
    // SAFETY: the machine has the instruction set.
    unsafe { (best().first_refused)(rows) }
}

/// Stored rows of a page, in the rotated domain where the codec rotates: codes times the scale. `x` is `[rows, stride]`.
pub fn decode_rotated(coder: &Coder, source: Source<'_>, x: &mut [f32], stride: usize) {
    // SAFETY: the machine has the instruction set.
    unsafe { (best().decode)(coder, source, x, stride) }
}

/// Rotates a vector.
pub fn rotate(rotation: &Rotation, x: &mut [f32]) {
    // SAFETY: the machine has the instruction set.
    unsafe { (best().rotate)(rotation, x) }
}

/// Undoes [`rotate`], up to rounding.
pub fn unrotate(rotation: &Rotation, y: &mut [f32]) {
    // SAFETY: the machine has the instruction set.
    unsafe { (best().unrotate)(rotation, y) }
}

macro_rules! version {
    ($name:ident, $machine:ty $(, $features:literal)?) => {
        mod $name {
            use super::{Coder, Job, Rotation, Rows, Source};

            pub(super) const VERSION: super::Version =
                super::Version { store, first_refused, decode, rotate, unrotate };

            $(#[target_feature(enable = $features)])?
            fn store(job: &mut Job<'_>) {
                job.run::<$machine>();
            }

            $(#[target_feature(enable = $features)])?
            fn first_refused(rows: &Rows<'_>) -> Option<[usize; 2]> {
                rows.first_refused::<$machine>()
            }

            $(#[target_feature(enable = $features)])?
            fn decode(coder: &Coder, source: Source<'_>, x: &mut [f32], stride: usize) {
                coder.decode_rotated::<$machine>(source, x, stride);
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

/// Versions for instructions that this machine has beyond those of its target, the best first.
#[cfg(target_arch = "x86_64")]
fn detected() -> Vec<Version> {
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    let mut all = Vec::new();
    if avx512 && is_x86_feature_detected!("avx512vbmi") && is_x86_feature_detected!("avx512vnni") {
        all.push(vbmi::VERSION);
    }
    if avx512 {
        all.push(avx512::VERSION);
    }
    if is_x86_feature_detected!("avx2") {
        all.push(avx2::VERSION);
    }
    all
}

#[cfg(not(target_arch = "x86_64"))]
fn detected() -> Vec<Version> {
    Vec::new()
}

/// Every version that this machine runs, the best first.
fn versions() -> Vec<Version> {
    let mut all = detected();
    all.push(portable::VERSION);
    all
}

#[inline]
fn best() -> &'static Version {
    static BEST: OnceLock<Version> = OnceLock::new();
    BEST.get_or_init(|| versions()[0])
}

#[cfg(test)]
mod tests {
    use super::super::rows::{MOST_ENERGY, Pages};
    use super::super::{ScaleRule, convert};
    use super::*;
    use crate::codec::Codec;
    use crate::dtype::Dtype;
    use crate::tensor::TensorView;
    use flashtile_testkit::Rng;

    const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];

    /// Heads and rows of a tensor.
    const HEADS: usize = 2;
    const ROWS: usize = 24;

    /// Elements `[ROWS, HEADS, dim]`, stored as such, from f32.
    fn elements(dtype: Dtype, x: &[f32]) -> Vec<u8> {
        let mut bytes = vec![0u8; x.len() * dtype.bytes()];
        convert::from_f32(x, dtype, &mut bytes);
        bytes
    }

    fn tensor(dtype: Dtype, bytes: &[u8], dim: usize) -> TensorView<'_> {
        let strides = [0, dim, HEADS * dim, 1];
        TensorView::from_bytes(dtype, bytes, [1, HEADS, ROWS, dim], strides).unwrap()
    }

    /// Rows of many sizes, some with a large coordinate, some zeros, and numbers at the ends of the range of f16.
    fn rows(rng: &mut Rng, dim: usize) -> Vec<f32> {
        let mut x = Vec::new();
        for n in 0..HEADS * ROWS {
            let gain = if n % 11 == 5 { 0.0 } else { 10f32.powi(n as i32 % 9 - 6) };
            x.extend((0..dim).map(|_| gain * rng.normal()));
            let middle = x.len() - dim.div_ceil(2);
            match n % 5 {
                0 => x[middle] = 20.0,
                1 => x[middle] = 3e-7,
                2 => x[middle] = -5e-8,
                _ => {}
            }
        }
        x
    }

    #[test]
    fn every_instruction_set_gives_the_same_bytes() {
        let mut rng = Rng::new(11);
        for codec in Codec::ALL.into_iter().filter(|codec| codec.dtype().is_none()) {
            let dims = [1, 7, 33, 64, 80, 96, 128, 192, 256, 300, 512];
            for dim in dims.into_iter().filter(|&dim| codec.supports(dim)) {
                let coder = Coder::new(codec, dim).unwrap();
                let x = rows(&mut rng, dim);
                let mean: Vec<f32> = (0..HEADS * dim).map(|_| rng.normal()).collect();
                for (n, dtype) in DTYPES.into_iter().enumerate() {
                    let elements = elements(dtype, &x);
                    let tensor = tensor(dtype, &elements, dim);
                    let mean = [None, Some(&mean[..])][(n + dim) % 2];
                    for rule in [ScaleRule::Unbiased, ScaleRule::LeastSquares] {
                        let store = |version: Version| {
                            let row_bytes = coder.format().row_bytes();
                            let mut bytes = vec![0xa5u8; HEADS * (ROWS + 2) * row_bytes];
                            let pages = Pages { bytes: &mut bytes, tokens: ROWS + 2, rows: 2..ROWS + 1 };
                            let rows = Rows { tensor: &tensor, mean };
                            // SAFETY: one of this machine's versions.
                            unsafe {
                                (version.store)(&mut Job { coder: &coder, rule, rows, from: 1, pages });
                            }
                            bytes
                        };
                        let stored: Vec<Vec<u8>> = versions().into_iter().map(store).collect();
                        assert!(stored.iter().all(|of| *of == stored[0]), "{codec} of {dim}, {dtype}");
                        rows_around_are_as_they_were(&coder, &stored[0]);
                        same_numbers_come_back(&coder, &stored[0]);
                    }
                }
            }
        }
    }

    fn rows_around_are_as_they_were(coder: &Coder, bytes: &[u8]) {
        let tokens = ROWS + 2;
        for page in bytes.chunks_exact(tokens * coder.format().row_bytes()) {
            for row in [0, 1, tokens - 1] {
                let mut places = coder.format().places(tokens, row..row + 1);
                assert!(places.all(|place| page[place].iter().all(|byte| *byte == 0xa5)), "row {row}");
            }
        }
    }

    fn same_numbers_come_back(coder: &Coder, bytes: &[u8]) {
        let tokens = ROWS + 2;
        let dim = coder.format().dim();
        for page in bytes.chunks_exact(tokens * coder.format().row_bytes()) {
            let (rows, stride) = (2..tokens - 1, dim + 3);
            let decode = |version: Version| {
                let mut back = vec![7.0f32; rows.len() * stride];
                // SAFETY: one of this machine's versions.
                unsafe { (version.decode)(coder, (page, tokens, rows.clone()), &mut back, stride) };
                for back in back.chunks_exact_mut(stride) {
                    assert_eq!(back[dim..], [7.0; 3]);
                    if let Some(rotation) = coder.rotation() {
                        // SAFETY: as above.
                        unsafe { (version.unrotate)(rotation, &mut back[..dim]) };
                    }
                }
                back.into_iter().map(f32::to_bits).collect()
            };
            let back: Vec<Vec<u32>> = versions().into_iter().map(decode).collect();
            assert!(back.iter().all(|of| *of == back[0]), "rows of {dim} come back");
        }
    }

    #[test]
    fn every_instruction_set_refuses_the_same_rows() {
        let mut rng = Rng::new(12);
        for dtype in DTYPES {
            for dim in [1, 7, 16, 33, 64, 80, 128, 300, 512] {
                let mut refusals = 0;
                for n in 0..60 {
                    let mut x: Vec<f32> = (0..HEADS * ROWS * dim).map(|_| rng.normal()).collect();
                    let at = (7 * n + 3) % (HEADS * ROWS);
                    let row = &mut x[at * dim..][..dim];
                    match n % 6 {
                        0 => row[n % dim] = f32::NAN,
                        1 => row[n % dim] = f32::NEG_INFINITY,
                        kind => {
                            // About the energy that is just stored, in few steps of its last bits, and well around it.
                            let energy: f64 = row.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
                            let step = if kind == 2 { 0.1 } else { 6e-8 };
                            let wanted = f64::from(MOST_ENERGY) * (1.0 + step * (n as f64 / 10.0 - 3.0));
                            row.iter_mut().for_each(|x| *x *= (wanted / energy).sqrt() as f32);
                        }
                    }
                    let elements = elements(dtype, &x);
                    let tensor = tensor(dtype, &elements, dim);
                    let mean: Vec<f32> = (0..HEADS * dim).map(|_| 1e-3 * rng.normal()).collect();
                    for mean in [None, Some(&mean[..])] {
                        let rows = Rows { tensor: &tensor, mean };
                        // SAFETY: versions of this machine.
                        let refused =
                            versions().into_iter().map(|version| unsafe { (version.first_refused)(&rows) });
                        let refused: Vec<Option<[usize; 2]>> = refused.collect();
                        assert!(refused.iter().all(|of| *of == refused[0]), "{dtype} {dim} {n}: {refused:?}");
                        assert!(refused[0].is_none_or(|place| place == [at % HEADS, at / HEADS]));
                        assert!(n % 6 > 1 || refused[0].is_some());
                        refusals += usize::from(refused[0].is_some());
                    }
                }
                assert!((45..115).contains(&refusals), "{dtype} {dim}: {refusals}");
            }
        }
    }
}
