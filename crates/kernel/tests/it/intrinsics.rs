//! Every intrinsic and method, from Rust through the attributes: results on the simulator, and printed CUDA that compiles.

use crate::nvrtc::compiles;
use flashtile_kernel::Instance;
use flashtile_kernel::prelude::*;
use flashtile_kernel::simulator::{Memory, Simulator};

/// Functions of floats.
#[kernel(threads = 64)]
pub fn floats(x: &Buffer<u32>, out: &mut Buffer<u32>) {
    let i = thread_position();
    let a = f32::from_bits(x[i]);
    let b = f32::from_bits(x[i + 1]);
    let o = i * 32;
    out[o] = a.exp2().to_bits();
    out[o + 1] = a.exp().to_bits();
    out[o + 2] = a.log2().to_bits();
    out[o + 3] = a.ln().to_bits();
    out[o + 4] = a.sqrt().to_bits();
    out[o + 5] = a.rsqrt().to_bits();
    out[o + 6] = a.abs().to_bits();
    out[o + 7] = a.floor().to_bits();
    out[o + 8] = a.ceil().to_bits();
    out[o + 9] = a.trunc().to_bits();
    out[o + 10] = a.round_ties_even().to_bits();
    out[o + 11] = a.min(b).to_bits();
    out[o + 12] = a.max(b).to_bits();
    out[o + 13] = a.clamp(-1.0, 1.0).to_bits();
    out[o + 14] = a.mul_add(b, 1.0).to_bits();
    out[o + 15] = a.tanh().to_bits();
    out[o + 16] = a.sin().to_bits();
    out[o + 17] = a.cos().to_bits();
    out[o + 18] = a.abs().powf(0.3).to_bits();
    out[o + 19] = a.copysign(b).to_bits();
    out[o + 20] =
        select(a.is_nan(), 1u32, 0) | select(a.is_finite(), 2u32, 0) | select(a.is_infinite(), 4u32, 0);
    out[o + 21] = (a - (a / b).trunc() * b).to_bits();
    out[o + 22] = f16::from_f32(a).to_bits() as u32;
    out[o + 23] = bf16::from_f32(a).to_bits() as u32;
    out[o + 24] = a as u32;
    out[o + 25] = a as i32 as u32;
    out[o + 26] = (a as u64 >> 20) as u32;
    out[o + 27] = (a as i64 >> 20) as u32;
    out[o + 28] = a as u8 as u32;
    out[o + 29] = a as i8 as u32;
    out[o + 30] = a as i16 as u32;
    out[o + 31] = (a / b).to_bits();
}

/// Words and lanes.
#[kernel(threads = 64)]
pub fn words(x: &Buffer<u32>, out: &mut Buffer<u32>) {
    let i = thread_position();
    let a = x[i];
    let b = x[i + 1];
    let o = i * 32;
    out[o] = dot4(a, b, 5) as u32;
    out[o + 1] = dot4_unsigned(a, b, -5) as u32;
    out[o + 2] = byte_permute(a, b, 0x7351);
    out[o + 3] = pair_f16(a)[0].to_bits();
    out[o + 4] = pair_bf16(a)[1].to_bits();
    out[o + 5] = f16x2_mul_add(a & 0x3fff_3fff, b & 0x3fff_3fff, 0x3c00_bc00);
    out[o + 6] = f16x2_from(a as f32 * 0.001, b as f32 * -0.00001);
    out[o + 7] = simd_ballot(a > b);
    out[o + 8] = select(simd_any(a > b), 1, 0u32) + select(simd_all(a > b), 2, 0u32);
    out[o + 9] = simd_sum(a & 0xffff);
    out[o + 10] = simd_max(a as i32) as u32;
    out[o + 11] = simd_min(a);
    out[o + 12] = simd_prefix_sum(a & 0xffff);
    out[o + 13] = simd_prefix_sum_inclusive(b & 0xffff);
    out[o + 14] = simd_shuffle(a, b % 32);
    out[o + 15] = simd_shuffle_xor(a, 9);
    out[o + 16] = simd_broadcast(a, 30);
    let wide = simd_sum(a as u64 * b as u64 >> 8);
    out[o + 17] = (wide ^ (wide >> 32)) as u32;
    out[o + 18] = simd_sum((a % 1000) as f32 * 0.37).to_bits();
    out[o + 19] = simd_prefix_sum((a % 1000) as f32 * 0.37).to_bits();
    out[o + 20] = simd_max(a as f32).to_bits();
    out[o + 21] = simd_prefix_sum_inclusive(a as i64 >> 4) as u32;
    out[o + 22] = thread_index() + threads() * 1000;
    out[o + 23] = simd_lane() + 100 * simd_index() + 10000 * simd_groups();
    out[o + 24] = group_x() + 10 * groups_x() + 100 * groups_y() + 1000 * group_z();
    out[o + 25] = u32::MAX ^ a.rotate_left(i) ^ f32::MAX.to_bits() ^ f32::INFINITY.to_bits();
    out[o + 26] = f16x2_from_e4m3(a);
    out[o + 27] = f16x2_from_e4m3(i * 0x0101);
    for k in 28u32..32 {
        out[o + k] = k;
    }
}

macro_rules! integers {
    ($($name:ident $T:ident;)*) => {$(
        /// Methods of integers.
        #[kernel(threads = 64)]
        pub fn $name(x: &Buffer<$T>, out: &mut Buffer<$T>) {
            let i = thread_position();
            let a = x[i];
            let b = x[i + 1];
            let o = i * 32;
            out[o] = a.wrapping_add(b);
            out[o + 1] = a.wrapping_sub(b);
            out[o + 2] = a.wrapping_mul(b);
            out[o + 3] = a.wrapping_neg();
            out[o + 4] = a.wrapping_shl(i);
            out[o + 5] = a.wrapping_shr(i);
            out[o + 6] = a.saturating_add(b);
            out[o + 7] = a.saturating_sub(b);
            out[o + 8] = a.count_ones() as $T;
            out[o + 9] = a.leading_zeros() as $T;
            out[o + 10] = a.trailing_zeros() as $T;
            out[o + 11] = a.rotate_left(i);
            out[o + 12] = a.rotate_right(i * 3);
            out[o + 13] = a.reverse_bits();
            out[o + 14] = (a % 7).pow(3);
            out[o + 15] = a.min(b);
            out[o + 16] = a.max(b);
            out[o + 17] = a.clamp(3, 1000);
            out[o + 18] = a.abs_diff(b) as $T;
            out[o + 19] = a / (b | 1);
            out[o + 20] = a % (b | 1);
            out[o + 21] = !a & b ^ a | 1;
            out[o + 22] = a as f32 as $T;
            out[o + 23] = a as u8 as $T;
            out[o + 24] = a as i16 as $T;
            out[o + 25] = a as u64 as $T;
            out[o + 26] = a as i32 as $T;
            out[o + 27] = (a >> 3) << 2;
            out[o + 28] = $T::MAX;
            out[o + 29] = $T::MIN;
            out[o + 30] = $T::BITS as $T;
            out[o + 31] = select(a < b, a, b);
        }
    )*};
}
integers! {
    integers_u32 u32;
    integers_i32 i32;
    integers_u64 u64;
    integers_i64 i64;
    integers_usize usize;
}

/// Methods of some integers only.
#[kernel(threads = 64)]
pub fn signs(x: &Buffer<i32>, out: &mut Buffer<i32>) {
    let i = thread_position();
    let a = x[i];
    let o = i * 32;
    out[o] = (a / 2).abs();
    out[o + 1] = a.unsigned_abs() as i32;
    out[o + 2] = (a as u32).div_ceil(10) as i32;
    out[o + 3] = -(a / 2);
    out[o + 4] = (a as i64).unsigned_abs() as i32;
    for k in 5u32..32 {
        out[o + k] = a;
    }
}

/// Vectors, shared memory and matrices of stored floats.
#[kernel(threads = 64)]
pub fn stored<T: Element>(x: &Buffer<T>, out: &mut Buffer<f32>) {
    let mut tile: Shared<T> = shared(512);
    let mut sums: Shared<f32> = shared(128);
    let i = thread_index();
    tile.store(i * 8, x.load::<8>(thread_position() * 8));
    barrier();
    let mut c = Fragment::<f32>::zero();
    for k in 0..4u32 {
        let a = Fragment::<T>::load(&tile, simd_index() * 256 + k * 8, 32);
        let b = Fragment::<T>::load_transposed(&tile, k * 64, 8);
        c = Fragment::multiply_accumulate(&a, &b, &c);
    }
    c.set_element(1, c.element(1) + 0.5);
    c.store(&mut sums, simd_index() * 64, 8);
    barrier();
    let o = thread_position() * 32;
    out[o] = sums[i * 2];
    out[o + 1] = sums[i * 2 + 1];
    let words = x.load_as::<u32, 4>(thread_position() * 8);
    for k in 2u32..32 {
        out[o + k] = words[k % 4] as f32;
    }
}

/// Atomics, each on its own element.
#[kernel(threads = 64)]
pub fn atomics(x: &Buffer<u32>, out: &mut Buffer<u32>) {
    let mut counts: Shared<u32> = shared(8);
    let mut signed: Shared<i32> = shared(4);
    let mut sums: Shared<f32> = shared(1);
    let i = thread_index();
    if i < 8 {
        counts[i] = 5u32;
    }
    if i < 4 {
        signed[i] = -5;
    }
    if i == 0 {
        sums[i] = 0.5;
    }
    barrier();
    let a = x[thread_position()];
    atomic_add(&mut counts, 0u32, a);
    atomic_max(&mut counts, 1u32, a);
    atomic_min(&mut counts, 2u32, a);
    atomic_and(&mut counts, 3u32, a | 0xff);
    atomic_or(&mut counts, 4u32, a & 0xff00);
    atomic_xor(&mut counts, 5u32, a);
    atomic_exchange(&mut counts, 6u32, 77);
    atomic_compare_exchange(&mut counts, 7u32, 5, 9);
    atomic_add(&mut signed, 0u32, a as i32 >> 20);
    atomic_max(&mut signed, 1u32, a as i32);
    atomic_min(&mut signed, 2u32, a as i32);
    atomic_add(&mut sums, 0u32, (i % 4) as f32);
    barrier();
    let o = group_x() * 2048;
    for k in (i..2048u32).step_by(64) {
        out[o + k] = 0u32;
    }
    barrier();
    if i < 8 {
        out[o + i] = counts[i];
    }
    if i < 4 {
        out[o + 8 + i] = signed[i] as u32;
    }
    if i == 0 {
        out[o + 12] = sums[i].to_bits();
    }
    barrier();
    atomic_add(out, o + 13, 3u32);
    let most = atomic_max(out, o + 14, i);
    if most > 63 {
        atomic_xor(out, o + 15, 1u32);
    }
}

/// Bit patterns among which are all kinds of floats: many sizes, both signs, infinities, NaN, subnormals.
pub(crate) fn patterns(count: usize) -> Vec<u32> {
    let special =
        [0, 0x8000_0000, 0x7f80_0000, 0xff80_0000, 0x7fc0_0000, 1, 0x007f_ffff, 0x4f00_0000, 0xcf00_0000];
    let simple = [
        1.0f32,
        -1.0,
        0.5,
        1.5,
        2.5,
        -2.5,
        65504.0,
        65520.0,
        1e-7,
        3.3e38,
        4294967300.0,
        1.8446744e19,
        -129.0,
    ];
    let mut state = 12345u32;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state
    };
    let fixed = special.into_iter().chain(simple.map(f32::to_bits));
    // The others: magnitudes between 2^-8 and 2^8.
    let others = std::iter::repeat_with(|| {
        let r = random();
        (r & 0x807f_ffff) | (119 + r % 17) << 23
    });
    fixed.chain(others).take(count).collect()
}

/// The output of a kernel of two buffers for `input`: 32 values for each thread of two groups of 64.
macro_rules! run {
    ($kernel:ident $(::<$G:ty>)?, $input:expr, $Out:ty) => {{
        let x = Memory::from_slice(&$input);
        let mut out = Memory::uninit::<$Out>(128 * 32);
        let call = $kernel::Call { x: x.view(), out: out.view_mut(), groups: [2, 1, 1] };
        call.launch $(::<$G>)? (&Simulator::new()).unwrap();
        out.to_vec::<$Out>().unwrap()
    }};
}

#[test]
fn floats_are_rusts() {
    let input = patterns(129);
    let out = run!(floats, input, u32);
    for (i, out) in out.chunks(32).enumerate() {
        let (a, b) = (f32::from_bits(input[i]), f32::from_bits(input[i + 1]));
        assert_eq!(out[0], a.exp2().to_bits());
        assert_eq!(out[22], u32::from(f16::from_f32(a).to_bits()));
        assert_eq!(out[24..26], [a as u32, a as i32 as u32]);
        assert_eq!(f32::from_bits(out[31]).to_bits(), (a / b).to_bits());
    }
}

#[test]
fn words_are_exact() {
    let input = patterns(129);
    let out = run!(words, input, u32);
    assert_eq!(
        out[7],
        input[..32].iter().zip(&input[1..]).rev().fold(0, |m, (a, b)| m << 1 | u32::from(a > b))
    );
    assert_eq!(out[64 * 32 + 24], 1 + 20 + 100);
}

#[test]
fn atomics_are_in_no_order() {
    let input = patterns(128);
    let out = run!(atomics, input, u32);
    for (x, out) in input.chunks(64).zip(out.chunks(2048)) {
        let sum = x.iter().fold(5u32, |sum, &a| sum.wrapping_add(a));
        let all = x.iter().fold(5, |all, &a| all & (a | 0xff));
        assert_eq!(
            out[..4],
            [sum, x.iter().copied().fold(5, u32::max), x.iter().copied().fold(5, u32::min), all]
        );
        assert_eq!(out[5..8], [x.iter().fold(5, |odd, &a| odd ^ a), 77, 9]);
        assert_eq!(out[10], x.iter().map(|&a| a as i32).fold(-5, i32::min) as u32);
        assert_eq!(out[12..16], [96.5f32.to_bits(), 192, 63, 0]);
    }
}

#[test]
fn integers_are_rusts() {
    let input: Vec<i64> =
        patterns(130).windows(2).map(|w| (i64::from(w[0]) << 32 | i64::from(w[1])) >> (w[0] % 40)).collect();
    let out = run!(integers_i64, input, i64);
    for (i, out) in out.chunks(32).enumerate() {
        let (a, b) = (input[i], input[i + 1]);
        assert_eq!(out[..3], [a.wrapping_add(b), a.wrapping_sub(b), a.wrapping_mul(b)]);
        assert_eq!(out[14], (a % 7).pow(3));
    }
    let narrow: Vec<i32> = input.iter().map(|&x| x as i32).collect();
    run!(integers_i32, narrow, i32);
    run!(integers_u32, input.iter().map(|&x| x as u32).collect::<Vec<_>>(), u32);
    run!(integers_u64, input.iter().map(|&x| x as u64).collect::<Vec<_>>(), u64);
    run!(integers_usize, input.iter().map(|&x| x as usize).collect::<Vec<_>>(), usize);
    run!(signs, narrow, i32);
}

#[test]
fn matrices_of_stored_floats_are_products() {
    let input: Vec<f16> = (0..1024).map(|i| f16::from_f32(((i * 7) % 13) as f32 - 6.0)).collect();
    let out = run!(stored::<f16>, input, f32);
    for group in 0..2 {
        let tile = |i: usize| input[group * 512 + i].to_f32();
        for thread in 0..64 {
            for n in 0..2 {
                let (simd, at) = (thread / 32, (thread % 32) * 2 + n);
                let (r, c) = (at / 8, at % 8);
                // Row r of the SIMD group's 8 by 32 matrix with column c of four stored by columns.
                let product: f32 =
                    (0..32).map(|k| tile(simd * 256 + r * 32 + k) * tile(k / 8 * 64 + c * 8 + k % 8)).sum();
                let expected = product + if c % 2 == 1 { 0.5 } else { 0.0 };
                assert_eq!(out[(group * 64 + thread) * 32 + n], expected);
            }
        }
    }
}

#[test]
fn printed_cuda_compiles() {
    let instances: [Instance; 12] = [
        atomics::instance(),
        floats::instance(),
        words::instance(),
        integers_u32::instance(),
        integers_i32::instance(),
        integers_u64::instance(),
        integers_i64::instance(),
        integers_usize::instance(),
        signs::instance(),
        stored::instance::<f32>(),
        stored::instance::<f16>(),
        stored::instance::<bf16>(),
    ];
    for instance in instances {
        compiles(&instance, &[]);
    }
}
