//! Agreement of the simulator and a CUDA device: values that are not rounded differently have equal bits.

use crate::example::{Params, scale};
use crate::hosts::{Host, compiler, gpu};
use crate::intrinsics::{self, patterns};
use flashtile_kernel::cuda::Program;
use flashtile_kernel::prelude::*;
use flashtile_kernel::{Argument, Instance, Limits, Simulator, Target};

/// Sums of rows: each SIMD group sums, then the first one sums the results.
#[kernel(
    threads <= 256,
    requires(x.len() >= groups[0] as usize * n as usize, "x holds a row of n numbers a group"),
    requires(out.len() >= groups[0] as usize, "out holds a number a group"),
)]
pub fn sums(x: &Buffer<f32>, out: &mut Buffer<f32>, n: u32) {
    let mut parts: Shared<f32> = shared(8);
    let row = group_x() * n;
    let mut sum = 0.0f32;
    for i in (thread_index()..n).step_by(threads() as usize) {
        sum += x[row + i];
    }
    let of_group = simd_sum(sum);
    if simd_lane() == 0 {
        parts[simd_index()] = of_group;
    }
    barrier();
    if thread_index() == 0 {
        let mut all = 0.0f32;
        for i in 0..simd_groups() {
            all += parts[i];
        }
        out[group_x()] = all;
    }
}

fn run_sums<D: Host>(device: &D, threads: u32) -> Vec<f32> {
    let x: Vec<f32> = (0..5 * 77u32).map(|i| (i * 37 % 101) as f32 - 50.0).collect();
    let (x, mut out) = (device.memory(&x), device.memory(&[0.0f32; 5]));
    sums::Call::<D> { x: D::view(&x), out: D::view_mut(&mut out), n: 77, groups: [5, 1, 1], threads }
        .launch(device)
        .unwrap();
    D::values(&out)
}

/// Words after shifts, products, permutations and exchanges between lanes.
#[kernel(threads = 64, requires(x.len() >= 64 && out.len() >= 64, "64 words"))]
pub fn words(x: &Buffer<u32>, out: &mut Buffer<u32>) {
    let i = thread_index();
    let word = x[i];
    let mut hash = word.wrapping_mul(0x9e37_79b9u32) ^ (word >> 13u32);
    hash = hash.rotate_left(i % 32) + (word & 0xffu32);
    hash ^= simd_shuffle_xor(word, 5u32);
    hash ^= byte_permute(word, hash, 0x5140u32);
    hash = hash.wrapping_add(dot4(word, hash, -7) as u32);
    hash ^= simd_ballot(word % 3 == 0);
    hash = hash.wrapping_add(simd_prefix_sum(word % 1000));
    hash ^= word.leading_zeros() + word.count_ones() * 64u32;
    hash = hash.wrapping_add(simd_max(word % 977).pow(2u32));
    out[i] = hash.reverse_bits();
}

fn run_words<D: Host>(device: &D) -> Vec<u32> {
    let x: Vec<u32> = (0..64u32).map(|i| i.wrapping_mul(2_654_435_761).wrapping_add(12345)).collect();
    let (x, mut out) = (device.memory(&x), device.memory(&[0u32; 64]));
    words::Call::<D> { x: D::view(&x), out: D::view_mut(&mut out), groups: [1, 1, 1] }
        .launch(device)
        .unwrap();
    D::values(&out)
}

/// Half of a value, as its type stores it.
#[device]
pub fn halved<T: Element>(x: T) -> T {
    T::from_f32(x.to_f32() * 0.5)
}

/// Rounded values, by vectors of four.
#[kernel(exact, threads = 32, requires(x.len() >= 128 && out.len() >= 128, "128 numbers"))]
pub fn rounded<T: Element>(x: &Buffer<f32>, out: &mut Buffer<T>) {
    let i = thread_index() * 4;
    let four = x.load::<4>(i);
    let mut kept = [T::from_f32(0.0); 4];
    for n in 0..4u32 {
        kept[n] = halved(T::from_f32(four[n] * 3.0 + four[n] * 0.1));
    }
    out.store(i, kept);
}

fn run_rounded<D: Host, T: Element>(device: &D) -> Vec<T> {
    // Powers of two around 1, so that halves overflow and lose bits.
    let power = |i: i32| f32::from_bits(((127 + (i - 64) / 2) as u32) << 23);
    let x: Vec<f32> = (0..128).map(|i| (i as f32 - 60.0) * power(i)).collect();
    let (x, mut out) = (device.memory(&x), device.memory(&[T::from_f32(9.0); 128]));
    rounded::Call::<D> { x: D::view(&x), out: D::view_mut(&mut out), groups: [1, 1, 1] }
        .launch::<T>(device)
        .unwrap();
    D::values(&out)
}

/// A product of 8x8 matrices of small integers, exact in any order.
#[kernel(threads = 32, requires(a.len() >= 64 && b.len() >= 64 && out.len() >= 64, "8x8 numbers"))]
pub fn product<T: Element>(a: &Buffer<T>, b: &Buffer<T>, out: &mut Buffer<f32>) {
    let left = Fragment::<T>::load(a, 0u32, 8u32);
    let right = Fragment::<T>::load_transposed(b, 0u32, 8u32);
    let one = Fragment::<f32>::filled(1.0);
    let sum = Fragment::multiply_accumulate(&left, &right, &one);
    sum.store(out, 0u32, 8u32);
}

fn run_product<D: Host, T: Element>(device: &D) -> Vec<f32> {
    let matrix = |by: u32| (0..64u32).map(|i| T::from_f32((i * by % 13) as f32 - 6.0)).collect::<Vec<_>>();
    let (a, b) = (device.memory(&matrix(5)), device.memory(&matrix(7)));
    let mut out = device.memory(&[0.0f32; 64]);
    product::Call::<D> { a: D::view(&a), b: D::view(&b), out: D::view_mut(&mut out), groups: [1, 1, 1] }
        .launch::<T>(device)
        .unwrap();
    D::values(&out)
}

/// A histogram of remainders, counted by all threads of all groups.
#[kernel(threads = 64, requires(counts.len() >= 8, "8 counts"))]
pub fn counted(counts: &mut Buffer<u32>) {
    let mut here: Shared<u32> = shared(8);
    if thread_index() < 8 {
        here[thread_index()] = 0u32;
    }
    barrier();
    atomic_add(&mut here, thread_position() * 5 % 8, 1u32);
    barrier();
    if thread_index() < 8 {
        atomic_add(counts, thread_index(), here[thread_index()]);
    }
}

fn run_counted<D: Host>(device: &D) -> Vec<u32> {
    let mut counts = device.memory(&[100u32, 0, 0, 0, 0, 0, 0, 1]);
    counted::Call::<D> { counts: D::view_mut(&mut counts), groups: [7, 1, 1] }.launch(device).unwrap();
    D::values(&counts)
}

/// Every thread's value to its neighbour, through dynamic shared memory where N is large.
#[kernel(threads = 128, requires(x.len() >= N && out.len() >= N, "N numbers"))]
pub fn turned<T: Element, const N: usize>(x: &Buffer<T>, out: &mut Buffer<T>) {
    let mut edge: Shared<u32> = shared(3);
    let mut all: Shared<T> = shared(N);
    if thread_index() == 0 {
        edge[2u32] = N as u32 - 1;
    }
    for i in (thread_index()..N as u32).step_by(128) {
        all[i] = x[i];
    }
    barrier();
    for i in (thread_index()..N as u32).step_by(128) {
        out[i] = all[select(i == edge[2u32], 0u32, i + 1)];
    }
}

fn run_turned<D: Host, T: Element, const N: usize>(device: &D) -> Vec<T> {
    let x: Vec<T> = (0..N).map(|i| T::from_f32((i % 2000) as f32)).collect();
    let (x, mut out) = (device.memory(&x), device.memory(&[T::from_f32(-1.0); N]));
    turned::Call::<D> { x: D::view(&x), out: D::view_mut(&mut out), groups: [1, 1, 1] }
        .launch::<T, N>(device)
        .unwrap();
    D::values(&out)
}

/// 80 KiB of f32; compute capability 8.0 and later has 99 KiB.
const MANY: usize = 20 << 10;

fn run_scale<D: Host, T: Element, const N: usize>(device: &D, n: u32, wide: bool) -> Vec<T> {
    let x: Vec<T> = (0..n).map(|i| T::from_f32(i as f32 / 16.0 - 3.0)).collect();
    let (x, mut out) = (device.memory(&x), device.memory(&vec![T::from_f32(-1.0); n as usize + 5]));
    scale::Call::<D> {
        x: D::view(&x),
        out: D::view_mut(&mut out),
        params: Params { n, bias: 0.5 },
        factor: 1.5,
        wide,
        groups: [n.div_ceil(32 * N as u32), 1, 1],
    }
    .launch::<T, N>(device)
    .unwrap();
    D::values(&out)
}

/// A simulator of groups with as much shared memory as a GPU's.
fn large() -> Simulator {
    Simulator::new().with_limits(Limits { shared_bytes: 99 << 10, ..Limits::default() })
}

#[test]
fn every_call_gives_the_same_on_both() {
    fn elements<T: Element>(gpu: &impl Host, simulator: &Simulator) {
        assert_eq!(run_rounded::<_, T>(gpu), run_rounded::<_, T>(simulator), "{}", T::TYPE);
        assert_eq!(run_product::<_, T>(gpu), run_product::<_, T>(simulator), "{}", T::TYPE);
        for (n, wide) in [(1, false), (31, true), (64, false), (300, true)] {
            assert_eq!(run_scale::<_, T, 1>(gpu, n, wide), run_scale::<_, T, 1>(simulator, n, wide));
            assert_eq!(run_scale::<_, T, 4>(gpu, n, wide), run_scale::<_, T, 4>(simulator, n, wide));
        }
    }
    let Some(gpu) = gpu() else { return };
    let simulator = Simulator::new();
    for threads in [32, 64, 256] {
        assert_eq!(run_sums(&gpu, threads), run_sums(&simulator, threads));
    }
    assert_eq!(run_turned::<_, f16, 1000>(&gpu), run_turned::<_, f16, 1000>(&simulator));
    assert_eq!(run_turned::<_, f32, MANY>(&gpu), run_turned::<_, f32, MANY>(&large()));
    assert_eq!(run_words(&gpu), run_words(&simulator));
    assert_eq!(run_counted(&gpu), run_counted(&simulator));
    elements::<f32>(&gpu, &simulator);
    elements::<f16>(&gpu, &simulator);
    elements::<bf16>(&gpu, &simulator);
}

/// The output of a kernel of `intrinsics` for an input on a device.
macro_rules! on {
    ($device:expr, $kernel:ident $(::<$T:ty>)?, $input:expr, $Out:ty) => {{
        let (x, mut out) = ($device.memory($input), $device.memory(&vec![<$Out>::default(); 128 * 32]));
        let call = intrinsics::$kernel::Call { x: x.view(), out: out.view_mut(), groups: [2, 1, 1] };
        call.launch $(::<$T>)? ($device).unwrap();
        out.to_vec::<$Out>().unwrap()
    }};
}

/// Returns true if floats are equal, or both NaN, or within the error of the languages' functions.
fn near(a: f32, b: f32) -> bool {
    let steps = (a.to_bits() as i32).abs_diff(b.to_bits() as i32);
    let tiny = |x: f32| x.abs() < f32::MIN_POSITIVE;
    a == b || (a.is_nan() && b.is_nan()) || steps <= 8 || (tiny(a) && tiny(b))
}

#[test]
fn floats_are_near_or_equal_on_both() {
    const NEAR: [usize; 11] = [0, 1, 2, 3, 5, 11, 12, 15, 16, 17, 18];
    const REMAINDER: usize = 21;
    const HALVES: [usize; 2] = [22, 23];
    let Some(gpu) = gpu() else { return };
    let simulator = Simulator::new();
    let input = patterns(129);
    let found = on!(&gpu, floats, &input, u32);
    let expected = on!(&simulator, floats, &input, u32);
    for (n, (found, expected)) in found.into_iter().zip(expected).enumerate() {
        let (thread, column) = (n / 32, n % 32);
        let float = f32::from_bits;
        let agree = match column {
            // A product and a difference that a device may fuse.
            REMAINDER => true,
            // The bits of a NaN are the device's own.
            _ if HALVES.contains(&column) && float(input[thread]).is_nan() => true,
            _ if NEAR.contains(&column) => near(float(found), float(expected)),
            0..=19 | 31 => found == expected || (float(found).is_nan() && float(expected).is_nan()),
            _ => found == expected,
        };
        assert!(agree, "column {column} of {:#x}: {found:#x}, not {expected:#x}", input[thread]);
    }
}

#[test]
fn words_and_lanes_are_the_same_on_both() {
    const HALVES: [usize; 2] = [3, 4];
    const SUMS: [usize; 2] = [18, 19];
    let Some(gpu) = gpu() else { return };
    let simulator = Simulator::new();
    let input = patterns(129);
    let found = on!(&gpu, words, &input, u32);
    let expected = on!(&simulator, words, &input, u32);
    for (n, (found, expected)) in found.into_iter().zip(expected).enumerate() {
        let column = n % 32;
        let (a, b) = (f32::from_bits(found), f32::from_bits(expected));
        let agree = match column {
            _ if HALVES.contains(&column) => found == expected || (a.is_nan() && b.is_nan()),
            // The order of the sum over lanes is the device's own.
            _ if SUMS.contains(&column) => (a - b).abs() <= 1e-5 * b.abs(),
            _ => found == expected,
        };
        assert!(agree, "column {column} of {:#x}: {found:#x}, not {expected:#x}", input[n / 32]);
    }
}

#[test]
fn integers_atomics_and_vectors_are_the_same_on_both() {
    let Some(gpu) = gpu() else { return };
    let simulator = Simulator::new();
    let wide: Vec<u64> = patterns(130)
        .windows(2)
        .map(|w| ((i64::from(w[0]) << 32 | i64::from(w[1])) >> (w[0] % 40)) as u64)
        .collect();
    macro_rules! agree {
        ($($kernel:ident $(::<$G:ty>)?, $input:expr, $Out:ty;)*) => {$(
            let (found, expected) =
                (on!(&gpu, $kernel $(::<$G>)?, $input, $Out), on!(&simulator, $kernel $(::<$G>)?, $input, $Out));
            let differs = (0..found.len()).find(|&n| found[n] != expected[n]);
            if let Some(n) = differs {
                let name = stringify!($kernel);
                panic!("{name}: column {} of thread {}: {:?}, not {:?}", n % 32, n / 32, found[n], expected[n]);
            }
        )*};
    }
    macro_rules! stored {
        ($($T:ty),*) => {$(
            let numbers: Vec<$T> =
                (0..1024).map(|i| <$T as Element>::from_f32(((i * 7) % 13) as f32 - 6.0)).collect();
            agree!(stored::<$T>, &numbers, f32;);
        )*};
    }
    agree! {
        atomics, &patterns(128), u32;
        integers_u32, &wide.iter().map(|&x| x as u32).collect::<Vec<_>>(), u32;
        integers_i32, &wide.iter().map(|&x| x as i32).collect::<Vec<_>>(), i32;
        integers_u64, &wide, u64;
        integers_i64, &wide.iter().map(|&x| x as i64).collect::<Vec<_>>(), i64;
        integers_usize, &wide.iter().map(|&x| x as usize).collect::<Vec<_>>(), usize;
        signs, &wide.iter().map(|&x| x as i32).collect::<Vec<_>>(), i32;
    }
    stored!(f32, f16, bf16);
}

#[test]
fn calls_on_the_simulator_are_right() {
    let simulator = Simulator::new();
    let expected: Vec<f32> =
        (0..5).map(|row| (row * 77..(row + 1) * 77).map(|i| (i * 37 % 101) as f32 - 50.0).sum()).collect();
    assert_eq!(run_sums(&simulator, 64), expected);
    assert_eq!(run_counted(&simulator), [156, 56, 56, 56, 56, 56, 56, 57]);
    let turned = run_turned::<_, f32, MANY>(&large());
    assert!((0..MANY).all(|i| turned[i] == ((i + 1) % MANY % 2000) as f32));
    assert_eq!(run_turned::<_, bf16, 1000>(&simulator).len(), 1000);
    assert!(run_words(&simulator).iter().collect::<std::collections::HashSet<_>>().len() > 60);
    assert_eq!(run_rounded::<_, f32>(&simulator)[61], (0.5f32 * 3.0 + 0.5 * 0.1) * 0.5);
    assert_eq!(run_scale::<_, f16, 4>(&simulator, 100, true)[0], f16::from_f32((-4.5 + 0.5) * 2.0 + 1.0));
    let product = run_product::<_, f16>(&simulator);
    let matrix = |by: u32, i: u32| (i * by % 13) as f32 - 6.0;
    for (n, found) in product.iter().enumerate() {
        let (row, col) = (n as u32 / 8, n as u32 % 8);
        let sum: f32 = (0..8).map(|k| matrix(5, row * 8 + k) * matrix(7, col * 8 + k)).sum();
        assert_eq!(*found, sum + 1.0);
    }
}

#[test]
fn every_text_compiles() {
    let Some(compiler) = compiler() else { return };
    let Argument::<()>::Constant(wide) = Argument::constant(true) else { panic!() };
    let instances: Vec<(Instance, bool)> = vec![
        (sums::instance(), false),
        (words::instance(), false),
        (counted::instance(), false),
        (rounded::instance::<f32>(), false),
        (rounded::instance::<f16>(), false),
        (rounded::instance::<bf16>(), false),
        (product::instance::<f32>(), false),
        (product::instance::<f16>(), false),
        (product::instance::<bf16>(), false),
        (turned::instance::<f16, 1000>(), false),
        (turned::instance::<f32, MANY>(), false),
        (scale::instance::<f32, 1>(), true),
        (scale::instance::<bf16, 4>(), true),
    ];
    for (instance, constant) in &instances {
        let constants = if *constant { vec![wide] } else { Vec::new() };
        let program = Program::of(instance, &constants);
        for capability in [(8, 0), (9, 0)] {
            let code = compiler.compile(&program, &compiler.target(capability));
            assert!(code.is_ok(), "{}\n{}", code.unwrap_err(), instance.source(Target::Cuda));
        }
    }
}
