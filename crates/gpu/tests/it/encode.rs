//! Rows are encoded as the CPU encodes them, byte for byte.

use flashtile_core::codec::Codec;
use flashtile_core::codec::{CodePages, Coder, EncodeError, KeyTransform, MAX_NORM, Side, level_factor};
use flashtile_core::dtype::Dtype;
use flashtile_core::isa::IsaToken;
use flashtile_gpu::encoding::{self, Appended};
use flashtile_gpu::kernels::encode;
use flashtile_gpu::kernels::encode::Rows;
use flashtile_gpu::kernels::{octet, quantize};
use flashtile_gpu::native_encode;
use flashtile_kernel::simulator::{Memory, Simulator};
use flashtile_kernel::{Device, Generic, Instance, Scalar, bf16, f16};
use flashtile_testkit::Rng;
use half::slice::HalfFloatSliceExt;

const DIMS: [usize; 14] = [1, 16, 33, 48, 64, 72, 80, 96, 128, 130, 192, 256, 300, 512];

/// Native code of the instances that the tests need.
fn find(generics: &[Generic]) -> Instance {
    macro_rules! instances {
        ($($dim:literal)*) => {
            [$(
                native_encode!(f32, 3, $dim),
                native_encode!(f32, 4, $dim),
                native_encode!(f32, 5, $dim),
                native_encode!(f32, 6, $dim),
                native_encode!(f32, 7, $dim),
                native_encode!(f32, 8, $dim),
                native_encode!(f32, 9, $dim),
                native_encode!(f32, 13, $dim),
            )*]
        };
    }
    let rotated = instances!(1 16 33 48 64 72 80 96 128 130 192 256 300 512);
    let others = [
        native_encode!(f32, 10, 256),
        native_encode!(f32, 10, 512),
        native_encode!(f32, 11, 256),
        native_encode!(f32, 11, 512),
        native_encode!(f32, 12, 256),
        native_encode!(f32, 12, 512),
        native_encode!(f16, 7, 128),
        native_encode!(bf16, 8, 80),
        native_encode!(bf16, 4, 64),
        native_encode!(bf16, 13, 64),
    ];
    rotated.into_iter().chain(others).find(|instance| instance.generics() == generics).unwrap()
}

/// Rows that are appended to pages.
#[derive(Debug, Clone)]
pub(super) struct Case {
    codec: Codec,
    side: Side,
    dtype: Dtype,
    dim: usize,
    heads: usize,
    /// Rows of a page; pages of the pool; the table, `width` to a sequence.
    page: usize,
    pages: usize,
    width: usize,
    table: Vec<u32>,
    runs: Vec<Appended>,
    centered: bool,
    equalized: bool,
    head_major: bool,
}

impl Case {
    /// Three sequences that have scattered pages of 5 rows, a ring of 35 rows and a contiguous slot, the last two as one page each.
    pub(super) fn new(codec: Codec, side: Side, dim: usize) -> Self {
        let run =
            |batch, first, rows, sequence, position| Appended { batch, first, rows, sequence, position };
        Self {
            codec,
            side,
            dtype: Dtype::F32,
            dim,
            heads: 2,
            page: 5,
            pages: 16,
            width: 4,
            table: vec![9, 2, 14, 7, 1, 4, 0, 11],
            // Positions 13.. of a table that starts again at 20, and 2.. of another.
            runs: vec![run(0, 1, 10, 0, 13), run(1, 0, 3, 1, 2)],
            centered: side == Side::Keys,
            equalized: false,
            head_major: false,
        }
    }

    fn place(&self, run: &Appended, row: u32) -> [usize; 2] {
        let position = (run.position + row) as usize;
        let block = position / self.page % self.width;
        [self.table[run.sequence as usize * self.width + block] as usize, position % self.page]
    }

    /// Rows of a batch entry.
    fn rows(&self) -> usize {
        self.runs.iter().map(|run| run.first + run.rows).max().unwrap_or(0) as usize
    }

    fn strides(&self) -> [usize; 3] {
        let (rows, heads, dim) = (self.rows(), self.heads, self.dim);
        if self.head_major {
            [rows * heads * dim, dim, rows * dim]
        } else {
            [rows * heads * dim, heads * dim, dim]
        }
    }
}

fn memory<T: Scalar>(numbers: &[f32], from: fn(f32) -> T) -> Memory {
    Memory::from_slice(&numbers.iter().map(|x| from(*x)).collect::<Vec<T>>())
}

/// The elements of a dtype that are nearest.
fn elements(dtype: Dtype, numbers: &mut [f32]) -> Memory {
    match dtype {
        Dtype::F32 => memory(numbers, |x| x),
        Dtype::F16 => {
            numbers.iter_mut().for_each(|x| *x = f16::from_f32(*x).to_f32());
            memory(numbers, f16::from_f32)
        }
        Dtype::BF16 => {
            numbers.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
            memory(numbers, bf16::from_f32)
        }
    }
}

/// Runs a case in the simulator.
fn run(case: &Case, seed: u64, number: &mut dyn FnMut(usize) -> Vec<f32>) -> u32 {
    let instance = find(&encoding::encode_generics(case.codec, case.dtype, case.dim));
    run_on(&Simulator::new().seed(seed), &instance, case, number)
}

/// Runs a case on numbers `[batch, .., dim]` in the order of its strides; compares all of the pool. Returns the status.
pub(super) fn run_on(
    device: &impl Device<Memory = Memory>,
    instance: &Instance,
    case: &Case,
    number: &mut dyn FnMut(usize) -> Vec<f32>,
) -> u32 {
    let Case { codec, dim, heads, page, .. } = *case;
    let batches = case.runs.iter().map(|run| run.batch + 1).max().unwrap_or(0) as usize;
    let count = batches * case.rows() * heads;
    let mut x: Vec<f32> = (0..count).flat_map(number).collect();
    let held = elements(case.dtype, &mut x);
    let mut rng = Rng::new(99);
    let mean: Vec<f32> = (0..heads * dim).map(|_| rng.normal()).collect();
    let sign = |n: usize| if n % 3 == 1 { -1.0 } else { 1.0 };
    let key_factors: Vec<f32> = (0..heads * dim).map(|n| sign(n) * rng.normal().exp()).collect();
    let transform =
        KeyTransform::new(case.centered.then(|| mean.clone()), case.equalized.then(|| key_factors.clone()));

    let mut wanted = CodePages::new(codec, case.side, [case.pages, heads, page, dim]).unwrap();
    wanted.set_key_transform(transform.clone());
    let strides = case.strides();
    let (mut refused, mut before) = (u32::MAX, 0);
    for run in &case.runs {
        for row in 0..run.rows {
            for head in 0..heads {
                let at = run.batch as usize * strides[0]
                    + (run.first + row) as usize * strides[1]
                    + head * strides[2];
                let [to_page, to_row] = case.place(run, row);
                if let Err(why) = wanted.store([to_page, head, to_row], &x[at..at + dim]) {
                    wanted.import(to_page, head, to_row, &vec![0xFF; codec.row_bytes(dim)]);
                    let number = (before + row) * heads as u32 + head as u32;
                    refused = refused.min(2 * number + u32::from(why == EncodeError::Norm));
                }
            }
        }
        before += run.rows;
    }
    let page_bytes = page * codec.row_bytes(dim);
    let mut pool = Memory::from_slice(&vec![0u8; case.pages * heads * page_bytes]);
    let mut status = Memory::from_slice(&[u32::MAX]);
    let params = Rows {
        x: strides.map(|n| n as u64),
        pages: [(heads * page_bytes) as u64, page_bytes as u64, 0],
        heads: heads as u32,
        dim: dim as u32,
        page: page as u32,
        width: case.width as u32,
        factor_stride: 0,
    };
    let runs = encoding::runs(&case.runs, heads as u32).unwrap();
    let (means, factors) = (Memory::from_slice(&mean), flashtile_gpu::codecs::factors(codec, dim));
    let inverses = Memory::from_slice(transform.inverses().unwrap_or(&[0.0]));
    let (factors, numbers) =
        (Memory::from_slice(&factors), Memory::from_slice(&encoding::encode_table(codec, dim)));
    let (table, runs) = (Memory::from_slice(&case.table), Memory::from_slice(&runs));
    encode::encode::Call {
        x: held.view(),
        means: means.view(),
        inverses: inverses.view(),
        factors: factors.view(),
        numbers: numbers.view(),
        table: table.view(),
        runs: runs.view(),
        params,
        pages: pool.view_mut(),
        status: status.view_mut(),
        centered: case.centered,
        equalized: case.equalized,
        unbiased: case.side == Side::Keys,
        groups: [2, case.runs.len() as u32, 1],
    }
    .launch_instance(device, instance)
    .unwrap();

    let pool = pool.to_vec::<u8>().unwrap();
    let status = status.to_vec::<u32>().unwrap()[0];
    assert_eq!(status, refused, "{case:?}");
    for (n, got) in pool.chunks_exact(page_bytes).enumerate() {
        let want = wanted.view().page(n / heads, n % heads);
        let different = got.iter().zip(want).position(|(a, b)| a != b);
        assert_eq!(different, None, "page {n} of {case:?}: {got:?}, not {want:?}");
    }
    status
}

/// Vectors of every kind, and for the rotated domain.
pub(super) fn vector(rng: &mut Rng, coder: &Coder, dim: usize, n: usize) -> Vec<f32> {
    let mut x: Vec<f32> = (0..dim).map(|_| rng.normal()).collect();
    let gain = 10f32.powi(n as i32 / 18 % 7 - 3);
    let unrotated = |mut x: Vec<f32>| {
        if let Some(rotation) = coder.rotation() {
            flashtile_core::codec::unrotate(IsaToken::best(), rotation, &mut x);
        }
        x
    };
    let spike =
        |at: usize, size: f32| (0..dim).map(|i| if i == at { size } else { 0.0 }).collect::<Vec<f32>>();
    match n % 18 {
        0 => vec![0.0; dim],
        1 => vec![1.5 * gain; dim],
        2 => spike(n % dim, -3.0 * gain),
        3 => spike(dim - 1, MAX_NORM),
        4 => unrotated(spike(n % dim, gain)),
        5 => unrotated(spike(0, -8191.9)),
        6 => unrotated(
            (0..dim).map(|i| (0.5f32).powi(i as i32 % 11) * if i % 3 == 0 { -1.0 } else { 1.0 }).collect(),
        ),
        // Halves of a step of fixed point, and of steps of 127.
        7 => unrotated((0..dim).map(|i| if i == 0 { 32767.0 } else { i as f32 + 0.5 } / 1024.0).collect()),
        8 => {
            unrotated((0..dim).map(|i| if i == 3 { 127.0 } else { (i % 127) as f32 + 0.5 } / 64.0).collect())
        }
        9 => (0..dim).map(|i| if i % 2 == 0 { gain } else { -gain }).collect(),
        // Around the largest coordinate that counts as zero, and below the smallest f16 scale.
        10 => x.iter().map(|x| x * 6e-13).collect(),
        11 => x.iter().map(|x| x * 1e-7).collect(),
        12 => vec![f32::MIN_POSITIVE / 4.0; dim],
        13 => x.iter().map(|x| x * x * x * gain).collect(),
        14 => {
            let norm = x.iter().map(|x| x * x).sum::<f32>().sqrt();
            x.iter().map(|x| x * (0.9999 * MAX_NORM / norm)).collect()
        }
        15 => {
            x[dim / 3] = 20.0;
            x
        }
        16 => x.iter().map(|x| (x * 4.0).round() / 4.0).collect(),
        _ => x.iter().map(|x| x * gain).collect(),
    }
}

fn all_kinds(case: &Case, seed: u64) -> u32 {
    let (mut rng, coder) = (Rng::new(seed), Coder::new(case.codec, case.dim).unwrap());
    let mean_is_large = case.centered;
    run(case, seed, &mut |n| {
        let x = vector(&mut rng, &coder, case.dim, n + seed as usize);
        // With a mean the largest norm may be above what is stored; other tests are about that.
        if mean_is_large { x.iter().map(|x| x * 0.9).collect() } else { x }
    })
}

#[test]
fn codes_and_scales_are_those_of_the_cpu() {
    for codec in Codec::ALL.into_iter().filter(|codec| codec.dtype().is_none()) {
        for dim in DIMS.into_iter().filter(|dim| codec.supports(*dim)) {
            for (side, seed) in [(Side::Keys, dim as u64), (Side::Values, 7 + dim as u64)] {
                all_kinds(&Case::new(codec, side, dim), seed);
            }
            if codec.supports_key_factors() {
                let centered = dim % 3 == 0;
                all_kinds(
                    &Case { equalized: true, centered, ..Case::new(codec, Side::Keys, dim) },
                    5 + dim as u64,
                );
            }
        }
    }
}

#[test]
fn any_number_of_rows_and_pages_of_any_size() {
    for (codec, dim, dtype) in [
        (Codec::Tq4, 128, Dtype::F16),
        (Codec::Tq5, 80, Dtype::BF16),
        (Codec::Fp8, 64, Dtype::BF16),
        (Codec::Rot16, 64, Dtype::BF16),
    ] {
        for (rows, page, width, head_major) in [
            (1, 1, 40, true),
            (33, 1, 40, false),
            (3, 7, 2, false),
            (33, 7, 5, true),
            (31, 33, 1, true),
            (33, 33, 1, false),
            (1, 33, 1, false),
        ] {
            let mut case = Case::new(codec, Side::Values, dim);
            (case.dtype, case.page, case.width, case.pages, case.head_major) =
                (dtype, page, width, width, head_major);
            case.table = (0..width as u32).map(|n| (n * 3 + 1) % width as u32).collect();
            let position = 2 * page as u32 * width as u32 - 1;
            case.runs = vec![Appended { batch: 0, first: 0, rows, sequence: 0, position }];
            all_kinds(&case, u64::from(rows));
        }
    }
}

/// Of each number of rows to a sequence, in pages of its own.
fn runs_of(rows: &[u32], page: usize) -> (Vec<Appended>, Vec<u32>, usize) {
    let longest = rows.iter().copied().max().unwrap_or(0) as usize;
    let width = longest.div_ceil(page) + 1;
    let run = |(n, &rows): (usize, &u32)| {
        let n = n as u32;
        Appended { batch: n % 2, first: 2 * n, rows, sequence: n, position: 5 + 9 * n }
    };
    let pages = rows.len() * width;
    let table = (0..pages as u32).map(|n| (n * 7 + 3) % pages as u32).collect();
    (rows.iter().enumerate().map(run).collect(), table, width)
}

/// Runs of one launch, one of them empty.
const ROWS: [u32; 5] = [1, 33, 0, 31, 3];

#[test]
fn runs_of_different_numbers_of_rows() {
    for (codec, dim, dtype) in [(Codec::Tq5, 80, Dtype::BF16), (Codec::Tq4, 128, Dtype::F16)] {
        for page in [1, 3, 8, 31, 33, 40] {
            let mut case = Case::new(codec, Side::Keys, dim);
            (case.dtype, case.page) = (dtype, page);
            (case.runs, case.table, case.width) = runs_of(&ROWS, page);
            case.pages = case.table.len();
            all_kinds(&case, page as u64);
        }
    }
}

#[test]
fn rows_that_are_not_stored_are_reported_and_not_numbers() {
    for (codec, dim) in [
        (Codec::Tq3, 64),
        (Codec::Int8, 80),
        (Codec::Fp8, 96),
        (Codec::Rot16, 64),
        (Codec::Rot16, 80),
        (Codec::MlxTq4, 256),
        (Codec::MlxTq6Plain, 512),
    ] {
        let case = Case::new(codec, Side::Keys, dim);
        for (bad, why) in [
            (f32::NAN, EncodeError::NotFinite),
            (f32::INFINITY, EncodeError::NotFinite),
            (8300.0, EncodeError::Norm),
            (f32::MAX, EncodeError::Norm),
        ] {
            let mut rng = Rng::new(5);
            let status = run(&case, 5, &mut |n| {
                let mut x: Vec<f32> = (0..dim).map(|_| rng.normal()).collect();
                // Row 0 is part of no run.
                if n == 0 || n == 9 || n == 6 {
                    x[n] = bad;
                }
                x
            });
            // Vector 6 is that of row 3 and head 0, the third of a run that starts at row 1.
            assert_eq!(encoding::refusal(status, 2), Some((why, [2, 0])));
        }
    }
    assert_eq!(encoding::refusal(u32::MAX, 2), None);
}

/// Integers of all sizes, and such that are nearly powers of two or halves.
fn integer(rng: &mut Rng, bits: u32) -> u64 {
    let x = u64::from(rng.bits() as u32) << 32 | u64::from(rng.bits() as u32);
    let x = match rng.below(4) {
        0 => x,
        1 => 1 << (x % 64),
        2 => (1 << (x % 64)) - 1,
        _ => x & !((1 << (x % 40)) - 1) | 1,
    };
    (x >> (64 - bits + rng.below(bits as usize) as u32)).max(1)
}

#[test]
fn f64_is_reproduced() {
    let mut rng = Rng::new(17);
    for _ in 0..1_000_000 {
        let (a, b, c) = (integer(&mut rng, 63), integer(&mut rng, 32) as u32, integer(&mut rng, 31) as u32);
        assert_eq!(quantize::rounded(a, false, 0), (a as f64).to_bits(), "{a}");
        let ratio = a as f64 / f64::from(b);
        assert_eq!(quantize::quotient((a as f64).to_bits(), b), ratio.to_bits(), "{a} / {b}");
        let factor = c as f32 * 1e-9;
        let product = ratio * f64::from(factor);
        assert_eq!(
            quantize::product(ratio.to_bits(), factor.to_bits()),
            product.to_bits(),
            "{ratio} * {factor}"
        );
        assert_eq!(quantize::narrowed(product.to_bits()), product as f32, "{product}");
        // Halves of an f32's last bit.
        let half = f64::from(factor) + f64::from(factor.next_up() - factor) / 2.0;
        for x in [half, half.next_down(), half.next_up()] {
            assert_eq!(quantize::narrowed(x.to_bits()), x as f32, "{x}");
        }
    }
}

#[test]
fn scales_are_those_of_f64() {
    let mut rng = Rng::new(18);
    for _ in 0..1_000_000 {
        let (energy, products, squares) =
            ((1 << 30) + integer(&mut rng, 39), 20_000 + integer(&mut rng, 30), 128 + integer(&mut rng, 23));
        let most = match rng.below(3) {
            0 => 2f32.powi(rng.below(50) as i32 - 38),
            1 => 1e-12 + rng.uniform(0.0, 1e-7),
            _ => rng.uniform(1e-5, 8192.0),
        };
        for unbiased in [false, true] {
            let ratio =
                if unbiased { energy as f64 / products as f64 } else { products as f64 / squares as f64 };
            let scale = f16::from_f32(
                (ratio * f64::from(most / 32767.0) * f64::from(flashtile_core::codec::SCALE_UNIT)) as f32,
            );
            let got = quantize::scale_of(energy, products as u32, squares as u32, most, unbiased);
            assert_eq!(got, u32::from(scale.to_bits()), "{energy} {products} {squares} {most} {unbiased}");
        }
    }
}

/// Levels of 2 to 6 bits.
const LEVELS: [Codec; 5] = [Codec::Tq2, Codec::Tq3, Codec::Tq4, Codec::Tq5, Codec::Tq6];

/// Goes through the steps of both functions of the energy, f64 and exact: each falls, so that they are equal where they are
/// next to steps, and differ where the host says so.
fn same_factors<const FORMAT: u32, const D: usize>() {
    let codec = LEVELS[FORMAT as usize - 5];
    let hundredfold = u128::from(quantize::hundredfold(FORMAT));
    let square = (1u128 << 36) * hundredfold * hundredfold * D as u128;
    let (least, most) = (32767u64 * 32767, D as u64 * 32767 * 32767);
    for trial in 0..8 {
        let steps = encoding::f64_steps(codec, D, trial);
        assert!(
            steps.len() <= if octet::in_octets(FORMAT, D as u32) { 1 } else { 4 },
            "{codec} {D} {steps:?}"
        );
        let wanted = |energy| u32::from(level_factor(codec, D, energy, trial as usize).unwrap());
        let factor = |energy| {
            let at = steps.iter().fold(energy, |at, step| quantize::stepped(energy, *step, at));
            quantize::factor_of::<FORMAT, D>(at, trial)
        };
        let (low, high) = (wanted(most), wanted(least));
        assert!(low > 1 && high < 1 << 15);
        for energy in [least, most] {
            assert_eq!(factor(energy), wanted(energy));
        }
        for n in low..high {
            // The greatest energy for which the exact quotient is above n + 1/2.
            let root = u128::from((2 * n + 1) * (72 + 5 * trial));
            let last = (square / (root * root)) as u64;
            for energy in (last - 2..=last + 3).filter(|energy| (least..=most).contains(energy)) {
                assert_eq!(factor(energy), wanted(energy), "{codec} of {D}, trial {trial}, energy {energy}");
            }
            // Both are n + 1 up to their step, and n behind it.
            let next_to_step = [last - 2, last + 3].map(|energy| wanted(energy.clamp(least, most)));
            assert!(next_to_step[0] == n + 1 && next_to_step[1] == n || D == 1, "{codec} of {D}");
        }
    }
}

#[test]
fn factors_are_those_of_f64_for_every_energy() {
    macro_rules! dims {
        ($($dim:literal)*) => {$(
            same_factors::<5, $dim>();
            same_factors::<6, $dim>();
            same_factors::<7, $dim>();
            same_factors::<8, $dim>();
            same_factors::<9, $dim>();
        )*};
    }
    dims!(1 2 7 16 32 48 64 72 80 96 100 128 144 160 192 256 288 320 384 417 486 512);
}

#[test]
fn few_energies_have_other_factors_in_f64() {
    let steps =
        |codec, dim| (0..8).map(|trial| encoding::f64_steps(codec, dim, trial).len()).collect::<Vec<_>>();
    let all: Vec<usize> =
        LEVELS.into_iter().flat_map(|codec| (1..=512).flat_map(move |dim| steps(codec, dim))).collect();
    assert_eq!((all.iter().sum::<usize>(), all.iter().max()), (283, Some(&4)));
}

#[test]
fn half_levels_of_octets_are_the_products_of_integers() {
    for factor in 300..1u32 << 13 {
        let unit = octet::unit_of(factor);
        let half_levels = |x: u32| octet::half_levels_of(octet::entry_of(x as f32, unit));
        for n in 0..255u32 {
            // The first coordinate with more half levels.
            let x = ((n + 1) << 16).div_ceil(factor);
            let last = (n + 1).min(254);
            assert_eq!((half_levels(x - 1), half_levels(x)), (n.min(254), last), "{factor}: {x}");
        }
        assert_eq!((half_levels(0), half_levels(32767)), (0, ((32767 * factor) >> 16).min(254)), "{factor}");
    }
}

#[test]
fn numbers_of_e4m3_are_those_of_the_cpu() {
    // Every number of 20 bits, and what is next to it.
    for bits in (0..1u64 << 32).step_by(1 << 12).flat_map(|bits| [bits, bits + 1, bits + 0xfff]) {
        let x = f32::from_bits(bits as u32);
        if x.is_finite() {
            assert_eq!(quantize::e4m3_of(x), u32::from(flashtile_core::codec::e4m3(x)), "{x}");
        }
    }
}

#[test]
fn runs_that_have_no_numbers_are_none() {
    let run = Appended { batch: 0, first: 0, rows: 1 << 30, sequence: 0, position: 0 };
    assert!(
        encoding::runs(&[run], 1).is_some()
            && encoding::runs(&[run], 2).is_none()
            && encoding::runs(&[run; 5], 1).is_none()
    );
    assert!(encoding::runs(&[Appended { position: u32::MAX, ..run }], 1).is_none());
}

/// Appends rows of elements, in pages of every size.
fn appended<T: Scalar>(from: Dtype, instance: &Instance, to: Dtype, held: &[T], numbers: &[f32]) {
    assert_eq!(instance.generics(), encoding::encode_generics(Codec::of(to), from, 80));
    for page in [1, 4, 31, 33, 40] {
        appended_to(page, [from, to], instance, held, numbers);
    }
}

fn appended_to<T: Scalar>(
    page: usize,
    [from, to]: [Dtype; 2],
    instance: &Instance,
    held: &[T],
    numbers: &[f32],
) {
    let (dim, heads) = (80, 3);
    let (runs, table, width) = runs_of(&ROWS, page);
    let rows = runs.iter().map(|run| run.first + run.rows).max().unwrap_or(0) as usize;
    let stride = dim + 6;
    let x: Vec<T> = held.iter().copied().cycle().take(2 * heads * rows * stride).collect();
    let numbers: Vec<f32> = numbers.iter().copied().cycle().take(x.len()).collect();
    let row_bytes = dim * to.bytes();
    let pool = vec![7u8; table.len() * heads * page * row_bytes];
    let (mut pool, mut wanted) = (Memory::from_slice(&pool), pool);
    let params = Rows {
        x: [heads * rows * stride, stride, rows * stride].map(|n| n as u64),
        pages: [heads * page * row_bytes, page * row_bytes, row_bytes].map(|n| n as u64),
        heads: heads as u32,
        dim: dim as u32,
        page: page as u32,
        width: width as u32,
        factor_stride: 0,
    };
    for run in &runs {
        for (row, head) in (0..run.rows as usize).flat_map(|row| (0..heads).map(move |head| (row, head))) {
            let at = ((run.batch as usize * heads + head) * rows + run.first as usize + row) * stride;
            let mut bytes = vec![0u8; dim * from.bytes()];
            flashtile_core::codec::convert::from_f32(&numbers[at..at + dim], from, &mut bytes);
            let position = run.position as usize + row;
            let to_page = table[run.sequence as usize * width + position / page % width] as usize;
            let start = ((to_page * heads + head) * page + position % page) * row_bytes;
            flashtile_core::codec::convert::convert(from, &bytes, to, &mut wanted[start..start + row_bytes]);
        }
    }
    let groups = [2, runs.len() as u32, 1];
    let runs = Memory::from_slice(&encoding::runs(&runs, heads as u32).unwrap());
    let (x, table) = (Memory::from_slice(&x), Memory::from_slice(&table));
    encode::append::Call {
        x: x.view(),
        table: table.view(),
        runs: runs.view(),
        params,
        pages: pool.view_mut(),
        same: from == to,
        groups,
    }
    .launch_instance(&Simulator::new(), instance)
    .unwrap();
    assert!(pool.to_vec::<u8>().unwrap() == wanted, "{from} to {to}, pages of {page}");
}

#[test]
fn elements_are_copied_and_converted() {
    let mut rng = Rng::new(3);
    let mut numbers: Vec<f32> = (0..997).map(|n| rng.normal() * 10f32.powi(n % 15 - 8)).collect();
    numbers.extend([f32::INFINITY, -0.0, 65519.9, 65520.0, 3e-8, 2.9e-8, 1e-40, f32::MAX]);
    let mut halves = vec![f16::ZERO; numbers.len()];
    halves.convert_from_f32_slice(&numbers);
    let mut brains = vec![bf16::ZERO; numbers.len()];
    brains.convert_from_f32_slice(&numbers);
    macro_rules! all {
        ($($format:literal $to:ident)*) => {$(
            appended(Dtype::F32, &encode::append::instance::<f32, $format>(), Dtype::$to, &numbers, &numbers);
            appended(Dtype::F16, &encode::append::instance::<f16, $format>(), Dtype::$to, &halves, &numbers);
            appended(Dtype::BF16, &encode::append::instance::<bf16, $format>(), Dtype::$to, &brains, &numbers);
        )*};
    }
    all!(0 F32  1 F16  2 BF16);
}
