//! The encoder, decoder and rotation, compiled for each instruction set. All give the same bytes: products are integers, and f32 sums have
//! a fixed order.

#![allow(unsafe_code, reason = "a token proves that the machine has the instructions")]

use super::coder::{self, Coder, Destination, RowSteps, Source};
use super::encode::{EncodeJob, SourceRows};
use super::mlx::Mlx;
use super::ops::Portable;
#[cfg(target_arch = "x86_64")]
use super::ops::avx2::Avx2;
#[cfg(target_arch = "x86_64")]
use super::ops::avx512::{Avx512, Vbmi};
use super::rotation::{Rotate, Rotation};
use super::row_layout::RowLayout;
use crate::isa::{FloatEnv, Isa, IsaToken};
use half::f16;

/// The functions of one instruction set.
#[derive(Clone, Copy)]
struct Functions {
    store: unsafe fn(&mut EncodeJob<'_>),
    first_refused: unsafe fn(&SourceRows<'_>) -> Option<[usize; 2]>,
    decode: unsafe fn(&Coder, Source<'_>, &mut [f32], usize),
    rotate: unsafe fn(&Rotation, &mut [f32]),
    unrotate: unsafe fn(&Rotation, &mut [f32]),
}

/// Stores rows that have been checked.
pub(super) fn store(token: IsaToken, job: &mut EncodeJob<'_>) {
    let _env = FloatEnv::ieee();
    // SAFETY: the token proves that the machine has the instruction set.
    unsafe { (functions(token).store)(job) }
}

/// Head and row of the first token that cannot be stored, in the lowest head that has such a token.
pub(super) fn first_refused(token: IsaToken, rows: &SourceRows<'_>) -> Option<[usize; 2]> {
    let _env = FloatEnv::ieee();
    // SAFETY: as above.
    unsafe { (functions(token).first_refused)(rows) }
}

/// Decodes rows of a page: values of codes times the scale, in the rotated domain if the codec rotates. `x` is
/// `[rows, stride]`.
pub fn decode_rotated(token: IsaToken, coder: &Coder, source: Source<'_>, x: &mut [f32], stride: usize) {
    let _env = FloatEnv::ieee();
    // SAFETY: as above.
    unsafe { (functions(token).decode)(coder, source, x, stride) }
}

/// Decodes one row of a page and rotates it back.
pub(super) fn decode(token: IsaToken, coder: &Coder, source: Source<'_>, x: &mut [f32]) {
    decode_rotated(token, coder, source, x, x.len());
    if let Some(rotation) = coder.rotation() {
        unrotate(token, rotation, x);
    }
}

/// Rotates a vector.
pub fn rotate(token: IsaToken, rotation: &Rotation, x: &mut [f32]) {
    let _env = FloatEnv::ieee();
    // SAFETY: as above.
    unsafe { (functions(token).rotate)(rotation, x) }
}

/// The inverse of [`rotate`], up to rounding.
pub fn unrotate(token: IsaToken, rotation: &Rotation, y: &mut [f32]) {
    let _env = FloatEnv::ieee();
    // SAFETY: as above.
    unsafe { (functions(token).unrotate)(rotation, y) }
}

/// The functions of the most capable compiled instruction set that the token's instruction set contains.
#[inline]
fn functions(token: IsaToken) -> &'static Functions {
    token.count();
    match token.isa() {
        Isa::Portable => &portable::FUNCTIONS,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => &avx2::FUNCTIONS,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => &avx512::FUNCTIONS,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Vnni | Isa::Avx512Bf16 | Isa::Amx => &vbmi::FUNCTIONS,
        #[cfg(not(target_arch = "x86_64"))]
        Isa::Avx2 | Isa::Avx512 | Isa::Avx512Vnni | Isa::Avx512Bf16 | Isa::Amx => &portable::FUNCTIONS,
    }
}

/// Compiles functions for an instruction set. They are not inlined, because the code is large.
macro_rules! compiled {
    (@one [$($features:literal)?] $function:item) => {
        $(#[target_feature(enable = $features)])?
        #[inline(never)]
        $function
    };
    ($features:tt $($function:item)*) => { $( compiled! { @one $features $function } )* };
}

/// Implements the row steps of lanes `$ops` with the functions of module `$from`.
macro_rules! row_steps {
    ($ops:ty, $from:ident) => {
        #[allow(unused_unsafe, reason = "portable functions are safe")]
        impl Rotate for $ops {
            #[inline(always)]
            fn rotate(rotation: &Rotation, x: &mut [f32]) {
                // SAFETY: steps are called by functions that are compiled for the instruction set.
                unsafe { $from::rotate(rotation, x) }
            }
        }

        #[allow(unused_unsafe, reason = "portable functions are safe")]
        impl RowSteps for $ops {
            #[inline(always)]
            fn encode_mlx(mlx: &Mlx, x: &mut [f32], codes: &mut [u8], norms: &mut [u8]) {
                // SAFETY: as above.
                unsafe { $from::encode_mlx(mlx, x, codes, norms) }
            }

            #[inline(always)]
            fn encode_fp8(x: &[f32], codes: &mut [u8]) -> f16 {
                // SAFETY: as above.
                unsafe { $from::encode_fp8(x, codes) }
            }

            #[inline(always)]
            fn write(format: &RowLayout, codes: &[u8], scale: f16, to: Destination<'_>) {
                // SAFETY: as above.
                unsafe { $from::write(format, codes, scale, to) }
            }

            #[inline(always)]
            fn read(format: &RowLayout, page: &[u8], tokens: usize, row: usize, codes: &mut [u8]) -> f16 {
                // SAFETY: as above.
                unsafe { $from::read(format, page, tokens, row, codes) }
            }
        }
    };
}

/// Compiles the functions of lanes `$ops`, and the steps of a row, for an instruction set.
macro_rules! functions {
    ($name:ident, $ops:ty, $features:tt) => {
        mod $name {
            #[allow(clippy::wildcard_imports, reason = "names of the functions' types")]
            use super::*;

            pub(super) const FUNCTIONS: Functions =
                Functions { store, first_refused, decode, rotate, unrotate };

            compiled! { $features
                pub(super) fn store(job: &mut EncodeJob<'_>) {
                    job.run::<$ops>();
                }
                pub(super) fn first_refused(rows: &SourceRows<'_>) -> Option<[usize; 2]> {
                    rows.first_refused::<$ops>()
                }
                pub(super) fn decode(coder: &Coder, source: Source<'_>, x: &mut [f32], stride: usize) {
                    coder.decode_rotated::<$ops>(source, x, stride);
                }
                pub(super) fn rotate(rotation: &Rotation, x: &mut [f32]) {
                    rotation.apply::<$ops>(x);
                }
                pub(super) fn unrotate(rotation: &Rotation, x: &mut [f32]) {
                    rotation.undo::<f32, $ops>(x);
                }
                pub(super) fn encode_mlx(mlx: &Mlx, x: &mut [f32], codes: &mut [u8], norms: &mut [u8]) {
                    mlx.encode::<$ops>(x, codes, norms);
                }
                pub(super) fn encode_fp8(x: &[f32], codes: &mut [u8]) -> f16 {
                    coder::encode_fp8(x, codes)
                }
                pub(super) fn write(format: &RowLayout, codes: &[u8], scale: f16, (page, tokens, row): Destination<'_>) {
                    format.write(codes, scale, page, tokens, row);
                }
                pub(super) fn read(format: &RowLayout, page: &[u8], tokens: usize, row: usize, codes: &mut [u8]) -> f16 {
                    format.read(page, tokens, row, codes)
                }
            }
        }
        row_steps!($ops, $name);
    };
}

functions!(portable, Portable, []);
#[cfg(target_arch = "x86_64")]
functions!(avx2, Avx2, ["avx2"]);
#[cfg(target_arch = "x86_64")]
functions!(avx512, Avx512, ["avx512f,avx512bw,avx512dq,avx512vl"]);

/// Only the encoder and the decoder are compiled for VBMI, which looks up their tables.
#[cfg(target_arch = "x86_64")]
mod vbmi {
    #[allow(clippy::wildcard_imports, reason = "names of the functions' types")]
    use super::*;

    pub(super) const FUNCTIONS: Functions = Functions { store, decode, ..avx512::FUNCTIONS };

    compiled! { ["avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni"]
        pub(super) fn store(job: &mut EncodeJob<'_>) {
            job.run::<Vbmi>();
        }
        pub(super) fn decode(coder: &Coder, source: Source<'_>, x: &mut [f32], stride: usize) {
            coder.decode_rotated::<Vbmi>(source, x, stride);
        }
    }
}
#[cfg(target_arch = "x86_64")]
row_steps!(Vbmi, avx512);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::Codec;
    use crate::codec::convert;
    use crate::codec::encode::{MAX_ENERGY, PageRows};
    use crate::codec::key_transform::KeyTransform;
    use crate::codec::quantizer::ScaleRule;
    use crate::dtype::Dtype;
    use crate::tensor::TensorView;
    use flashtile_testkit::Rng;

    /// A token for every instruction set of this machine.
    fn tokens() -> impl Iterator<Item = IsaToken> {
        Isa::ALL.into_iter().filter_map(IsaToken::new)
    }

    const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];

    /// Heads and rows of the test tensor.
    const HEADS: usize = 2;
    const ROWS: usize = 24;

    /// Elements `[ROWS, HEADS, dim]` of a dtype, from f32.
    fn elements(dtype: Dtype, x: &[f32]) -> Vec<u8> {
        let mut bytes = vec![0u8; x.len() * dtype.bytes()];
        convert::from_f32(x, dtype, &mut bytes);
        bytes
    }

    fn tensor(dtype: Dtype, bytes: &[u8], dim: usize) -> TensorView<'_> {
        let strides = [0, dim, HEADS * dim, 1];
        TensorView::from_bytes(dtype, bytes, [1, HEADS, ROWS, dim], strides).unwrap()
    }

    /// Rows of many magnitudes: some with one large coordinate, some zero, some at the limits of f16.
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
                let transforms = transforms(&mut rng, dim);
                for (n, dtype) in DTYPES.into_iter().enumerate() {
                    let elements = elements(dtype, &x);
                    let tensor = tensor(dtype, &elements, dim);
                    let transform = transforms[(n + dim) % 4].view();
                    for rule in [ScaleRule::Unbiased, ScaleRule::LeastSquares] {
                        let stored_by = |token: IsaToken| {
                            let row_bytes = coder.format().row_bytes();
                            let mut bytes = vec![0xa5u8; HEADS * (ROWS + 2) * row_bytes];
                            let pages = PageRows { bytes: &mut bytes, tokens: ROWS + 2, rows: 2..ROWS + 1 };
                            let rows = SourceRows { tensor: &tensor, transform };
                            store(token, &mut EncodeJob { coder: &coder, rule, rows, from: 1, pages });
                            bytes
                        };
                        let stored: Vec<Vec<u8>> = tokens().map(stored_by).collect();
                        assert!(stored.iter().all(|of| *of == stored[0]), "{codec} of {dim}, {dtype}");
                        rows_around_are_as_they_were(&coder, &stored[0]);
                        same_numbers_come_back(&coder, &stored[0]);
                    }
                }
            }
        }
    }

    /// No transform, a mean, factors of both signs, and both.
    fn transforms(rng: &mut Rng, dim: usize) -> [KeyTransform; 4] {
        let mean: Vec<f32> = (0..HEADS * dim).map(|_| rng.normal()).collect();
        let factors: Vec<f32> = (0..HEADS * dim).map(|_| rng.normal() + 0.001).collect();
        let (mean, factors) = (Some(mean), Some(factors));
        [(None, None), (mean.clone(), None), (None, factors.clone()), (mean, factors)]
            .map(|(mean, factors)| KeyTransform::new(mean, factors))
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
        let tokens_of_page = ROWS + 2;
        let dim = coder.format().dim();
        for page in bytes.chunks_exact(tokens_of_page * coder.format().row_bytes()) {
            let (rows, stride) = (2..tokens_of_page - 1, dim + 3);
            let decode = |token: IsaToken| {
                let mut back = vec![7.0f32; rows.len() * stride];
                decode_rotated(token, coder, (page, tokens_of_page, rows.clone()), &mut back, stride);
                for back in back.chunks_exact_mut(stride) {
                    assert_eq!(back[dim..], [7.0; 3]);
                    if let Some(rotation) = coder.rotation() {
                        unrotate(token, rotation, &mut back[..dim]);
                    }
                }
                back.into_iter().map(f32::to_bits).collect()
            };
            let back: Vec<Vec<u32>> = tokens().map(decode).collect();
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
                            // Energies just below and just above the largest that is stored, in steps of a few
                            // ulps, and others further away.
                            let energy: f64 = row.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
                            let step = if kind == 2 { 0.1 } else { 6e-8 };
                            let wanted = f64::from(MAX_ENERGY) * (1.0 + step * (n as f64 / 10.0 - 3.0));
                            row.iter_mut().for_each(|x| *x *= (wanted / energy).sqrt() as f32);
                        }
                    }
                    let elements = elements(dtype, &x);
                    let tensor = tensor(dtype, &elements, dim);
                    let mean: Vec<f32> = (0..HEADS * dim).map(|_| 1e-3 * rng.normal()).collect();
                    let factors =
                        (0..HEADS * dim).map(|c| if c % 3 == 1 { -1.0 } else { 1.0 + 1e-7 }).collect();
                    let transforms = [(None, None), (Some(mean), None), (None, Some(factors))];
                    for transform in transforms.map(|(mean, factors)| KeyTransform::new(mean, factors)) {
                        let rows = SourceRows { tensor: &tensor, transform: transform.view() };
                        let refused = tokens().map(|token| first_refused(token, &rows));
                        let refused: Vec<Option<[usize; 2]>> = refused.collect();
                        assert!(refused.iter().all(|of| *of == refused[0]), "{dtype} {dim} {n}: {refused:?}");
                        assert!(refused[0].is_none_or(|place| place == [at % HEADS, at / HEADS]));
                        assert!(n % 6 > 1 || refused[0].is_some());
                        refusals += usize::from(refused[0].is_some());
                    }
                }
                assert!((68..172).contains(&refusals), "{dtype} {dim}: {refusals}");
            }
        }
    }
}
