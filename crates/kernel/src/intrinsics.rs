//! The functions of the kernel language that Rust does not have. In C++ each is called `ft_` and its name here.
//!
//! An intrinsic that needs the current thread works in a simulated kernel only, and panics elsewhere. Operations of a SIMD group
//! (`simd_*`) are convergent: its 32 lanes reach them together, at one place of the source, in the same iterations of loops and by
//! the same calls of device functions. So is [`barrier`] for all threads of the threadgroup. Lanes and threads that do not, diverge.
//!
//! # How exact floats are
//!
//! `+ - * /`, `sqrt`, `mul_add`, `floor` and its kind, and conversions are rounded correctly everywhere, except that Metal
//! may take subnormals as zero, and that a product and a sum may become one `mul_add` where the kernel is not `exact`.
//! Sums over lanes are added in the order of the simulator on CUDA, in an order of its own on Metal. The others, in units
//! in the last place:
//!
//! | | simulator | CUDA | Metal |
//! |---|---|---|---|
//! | `exp2` | Rust's, 1 | 2, below 2^-126 zero; 2 where `exact` | `fast::exp2`; 4 where `exact` |
//! | `exp` | Rust's, 1 | 2 | 4 |
//! | `log2`, `ln` | Rust's, 1 | 1 | 4 |
//! | `rsqrt` | 1 | 2 | 2 |
//! | `tanh` | Rust's, 1 | 2 | 5 |
//! | `sin`, `cos` | Rust's, 1 | 2 | 4 |
//! | `powf` | Rust's, 1 | 4 | 16 |
//!
//! (CUDA C++ Programming Guide, mathematical functions; PTX ISA, `ex2`; Metal Shading Language Specification, relative
//! errors of precise math. Rust's functions are the host's math library.)

use crate::memory::{Atomic, AtomicInteger, Memory, Shared};
use crate::scalar::{Index, Number, Scalar, Value};
use crate::simulator as machine;
use half::{bf16, f16};

macro_rules! positions {
    ($($(#[$doc:meta])* $name:ident = |$place:ident| $value:expr;)*) => {$(
        $(#[$doc])*
        pub fn $name() -> u32 {
            let $place = machine::place();
            $value
        }
    )*};
}
positions! {
    /// The thread's number in its threadgroup.
    thread_index = |p| p.thread;
    /// Threads in a threadgroup.
    threads = |p| p.threads;
    /// The thread's lane in its SIMD group, below 32.
    simd_lane = |p| p.thread % 32;
    /// The number of the thread's SIMD group in its threadgroup.
    simd_index = |p| p.thread / 32;
    /// SIMD groups in a threadgroup.
    simd_groups = |p| p.threads / 32;
    /// The threadgroup's position, first coordinate.
    group_x = |p| p.group[0];
    /// The threadgroup's position, second coordinate.
    group_y = |p| p.group[1];
    /// The threadgroup's position, third coordinate.
    group_z = |p| p.group[2];
    /// Threadgroups along the first coordinate.
    groups_x = |p| p.groups[0];
    /// Threadgroups along the second coordinate.
    groups_y = |p| p.groups[1];
    /// Threadgroups along the third coordinate.
    groups_z = |p| p.groups[2];
    /// `group_x() * threads() + thread_index()`, modulo 2^32.
    thread_position = |p| p.group[0].wrapping_mul(p.threads).wrapping_add(p.thread);
}

/// Waits for all threads of the threadgroup, and orders their accesses to shared and device memory.
///
/// # Faults
/// Where the threads of the threadgroup diverge.
#[track_caller]
pub fn barrier() {
    machine::barrier();
}

/// Waits for the lanes of the SIMD group, and orders their accesses to shared and device memory.
///
/// # Faults
/// Where the lanes diverge.
#[track_caller]
pub fn simd_barrier() {
    machine::simd_barrier();
}

/// An array of `len` elements shared by the threads of a threadgroup: at the top level of a kernel's body, `len` constant.
///
/// # Faults
/// Where threads ask for different arrays.
#[track_caller]
#[cfg_attr(not(feature = "simulator"), allow(unreachable_code, reason = "there are no regions"))]
pub fn shared<T: Scalar>(len: usize) -> Shared<T> {
    Shared::new(machine::shared(T::TYPE, len))
}

/// The sum over the lanes, in the order of a butterfly; integers wrap.
///
/// # Faults
/// Where the lanes diverge.
#[track_caller]
pub fn simd_sum<T: Number>(x: T) -> T {
    butterfly("simd_sum", x, T::plus)
}

/// The greatest value of the lanes; a NaN counts only where all lanes have one.
///
/// # Faults
/// Where the lanes diverge.
#[track_caller]
pub fn simd_max<T: Number>(x: T) -> T {
    butterfly("simd_max", x, T::greater)
}

/// The least value of the lanes; a NaN counts only where all lanes have one.
///
/// # Faults
/// Where the lanes diverge.
#[track_caller]
pub fn simd_min<T: Number>(x: T) -> T {
    butterfly("simd_min", x, T::lesser)
}

/// The value of `x` in lane `lane`, which may differ from lane to lane.
///
/// # Faults
/// Where `lane` is not below 32, or the lanes diverge.
#[track_caller]
pub fn simd_shuffle<T: Number>(x: T, lane: u32) -> T {
    T::from_raw(machine::exchange("simd_shuffle", x.to_raw(), lane))
}

/// The value of `x` in the lane whose number is this lane's number xor `mask`.
///
/// # Faults
/// Where `mask` is not below 32, or the lanes diverge.
#[track_caller]
pub fn simd_shuffle_xor<T: Number>(x: T, mask: u32) -> T {
    let lane = if mask < 32 { simd_lane() ^ mask } else { mask };
    T::from_raw(machine::exchange("simd_shuffle_xor", x.to_raw(), lane))
}

/// The value of `x` in lane `lane`, the same for all lanes.
///
/// # Faults
/// Where `lane` is not below 32 or differs from lane to lane, or the lanes diverge.
#[track_caller]
pub fn simd_broadcast<T: Number>(x: T, lane: u32) -> T {
    T::from_raw(machine::broadcast(x.to_raw(), lane))
}

/// Bit `l` is `x` of lane `l`.
///
/// # Faults
/// Where the lanes diverge.
#[track_caller]
pub fn simd_ballot(x: bool) -> u32 {
    ballot("simd_ballot", x)
}

/// Returns true if `x` is true in any lane.
///
/// # Faults
/// Where the lanes diverge.
#[track_caller]
pub fn simd_any(x: bool) -> bool {
    ballot("simd_any", x) != 0
}

/// Returns true if `x` is true in all lanes.
///
/// # Faults
/// Where the lanes diverge.
#[track_caller]
pub fn simd_all(x: bool) -> bool {
    ballot("simd_all", x) == u32::MAX
}

/// The sum over the lanes before this one; 0 in lane 0. Integers wrap.
///
/// # Faults
/// Where the lanes diverge.
#[track_caller]
pub fn simd_prefix_sum<T: Number>(x: T) -> T {
    let lanes = machine::gather("simd_prefix_sum", x.to_raw());
    scan(lanes, simd_lane() as usize, T::default())
}

/// The sum over the lanes up to and with this one. Integers wrap.
///
/// # Faults
/// Where the lanes diverge.
#[track_caller]
pub fn simd_prefix_sum_inclusive<T: Number>(x: T) -> T {
    let lanes = machine::gather("simd_prefix_sum_inclusive", x.to_raw());
    scan(lanes, simd_lane() as usize + 1, T::default())
}

#[track_caller]
fn ballot(name: &'static str, x: bool) -> u32 {
    let lanes = machine::gather(name, u64::from(x));
    lanes.iter().enumerate().fold(0, |mask, (lane, &x)| mask | (x as u32) << lane)
}

/// Every lane combines with the lane at distance 16, 8, 4, 2 and 1: the order of the printed CUDA.
#[track_caller]
fn butterfly<T: Number>(name: &'static str, x: T, combine: impl Fn(T, T) -> T) -> T {
    let mut lanes = machine::gather(name, x.to_raw()).map(T::from_raw);
    for distance in [16, 8, 4, 2, 1] {
        let before = lanes;
        for lane in 0..32 {
            lanes[lane] = combine(before[lane], before[lane ^ distance]);
        }
    }
    lanes[simd_lane() as usize]
}

/// The sum of the first `count` lanes, in the order of the printed CUDA: by doubling distances.
fn scan<T: Number>(lanes: [u64; 32], count: usize, zero: T) -> T {
    let mut lanes = lanes.map(T::from_raw);
    for distance in [1, 2, 4, 8, 16] {
        let before = lanes;
        for lane in distance..32 {
            lanes[lane] = before[lane - distance].plus(before[lane]);
        }
    }
    if count == 0 { zero } else { lanes[count - 1] }
}

/// Adds `x` to `memory[index]` in one step and returns the old value; integers wrap.
///
/// # Faults
/// As reading and writing the element, except that atomics of several threads do not race.
#[track_caller]
pub fn atomic_add<M: Memory<Item: Atomic>>(memory: &mut M, index: impl Index, x: M::Item) -> M::Item {
    update(memory, index, |old| old.plus(x))
}

/// Replaces `memory[index]` by the greater of it and `x`, and returns the old value.
///
/// # Faults
/// As [`atomic_add`].
#[track_caller]
pub fn atomic_max<M: Memory<Item: AtomicInteger>>(memory: &mut M, index: impl Index, x: M::Item) -> M::Item {
    update(memory, index, |old| old.greater(x))
}

/// Replaces `memory[index]` by the lesser of it and `x`, and returns the old value.
///
/// # Faults
/// As [`atomic_add`].
#[track_caller]
pub fn atomic_min<M: Memory<Item: AtomicInteger>>(memory: &mut M, index: impl Index, x: M::Item) -> M::Item {
    update(memory, index, |old| old.lesser(x))
}

/// Replaces `memory[index]` by `memory[index] & x`, and returns the old value.
///
/// # Faults
/// As [`atomic_add`].
#[track_caller]
pub fn atomic_and<M: Memory<Item: AtomicInteger>>(memory: &mut M, index: impl Index, x: M::Item) -> M::Item {
    update(memory, index, |old| M::Item::from_raw(old.to_raw() & x.to_raw()))
}

/// Sets the bits of `x` in `memory[index]`, and returns the old value.
///
/// # Faults
/// As [`atomic_add`].
#[track_caller]
pub fn atomic_or<M: Memory<Item: AtomicInteger>>(memory: &mut M, index: impl Index, x: M::Item) -> M::Item {
    update(memory, index, |old| M::Item::from_raw(old.to_raw() | x.to_raw()))
}

/// Flips the bits of `x` in `memory[index]`, and returns the old value.
///
/// # Faults
/// As [`atomic_add`].
#[track_caller]
pub fn atomic_xor<M: Memory<Item: AtomicInteger>>(memory: &mut M, index: impl Index, x: M::Item) -> M::Item {
    update(memory, index, |old| M::Item::from_raw(old.to_raw() ^ x.to_raw()))
}

/// Replaces `memory[index]` by `x`, and returns the old value.
///
/// # Faults
/// As [`atomic_add`].
#[track_caller]
pub fn atomic_exchange<M: Memory<Item: AtomicInteger>>(
    memory: &mut M,
    index: impl Index,
    x: M::Item,
) -> M::Item {
    update(memory, index, |_| x)
}

/// Replaces `memory[index]` by `new` where it is `expected`, and returns the old value.
///
/// # Faults
/// As [`atomic_add`].
#[track_caller]
pub fn atomic_compare_exchange<M: Memory<Item: AtomicInteger>>(
    memory: &mut M,
    index: impl Index,
    expected: M::Item,
    new: M::Item,
) -> M::Item {
    update(memory, index, |old| if old == expected { new } else { old })
}

#[track_caller]
fn update<M: Memory>(memory: &mut M, index: impl Index, new: impl Fn(M::Item) -> M::Item) -> M::Item {
    let raw = memory.region().update(index.position(), &|raw| new(M::Item::from_raw(raw)).to_raw());
    M::Item::from_raw(raw)
}

/// `a` where `condition` holds, else `b`; both are evaluated.
pub fn select<T: Value>(condition: bool, a: T, b: T) -> T {
    if condition { a } else { b }
}

/// `c` plus the products of the signed bytes of `a` and `b`, modulo 2^32.
pub fn dot4(a: u32, b: u32, c: i32) -> i32 {
    let (a, b) = (a.to_le_bytes(), b.to_le_bytes());
    (0..4).fold(c, |sum, n| sum.wrapping_add(i32::from(a[n] as i8) * i32::from(b[n] as i8)))
}

/// `c` plus the products of the unsigned bytes of `a` and the signed bytes of `b`, modulo 2^32.
pub fn dot4_unsigned(a: u32, b: u32, c: i32) -> i32 {
    let (a, b) = (a.to_le_bytes(), b.to_le_bytes());
    (0..4).fold(c, |sum, n| sum.wrapping_add(i32::from(a[n]) * i32::from(b[n] as i8)))
}

/// Byte `n` of the result is the byte named by bits `4n..4n + 3` of `selector`: 0 to 3 of `a`, 4 to 7 of `b`.
///
/// # Faults
/// Where bit 3 of one of the four names is set.
#[track_caller]
pub fn byte_permute(a: u32, b: u32, selector: u32) -> u32 {
    if selector & 0x8888 != 0 {
        machine::fault_arithmetic(format_args!("byte_permute names a byte above 7: selector {selector:#x}"));
    }
    let bytes = u64::from(a) | u64::from(b) << 32;
    let byte = |n: u32| {
        let name = (selector >> (4 * n)) & 7;
        (bytes >> (8 * name)) as u32 & 0xff
    };
    (0..4).fold(0, |word, n| word | byte(n) << (8 * n))
}

/// The two `f16` of a word, the low half first.
pub fn pair_f16(word: u32) -> [f32; 2] {
    [f16::from_bits(word as u16).to_f32(), f16::from_bits((word >> 16) as u16).to_f32()]
}

/// The two `bf16` of a word, the low half first.
pub fn pair_bf16(word: u32) -> [f32; 2] {
    [bf16::from_bits(word as u16).to_f32(), bf16::from_bits((word >> 16) as u16).to_f32()]
}

/// `a * b + c` on both `f16` of the words, rounded once.
pub fn f16x2_mul_add(a: u32, b: u32, c: u32) -> u32 {
    let ([a0, a1], [b0, b1], [c0, c1]) = (pair_f16(a), pair_f16(b), pair_f16(c));
    // In f64 the product is exact. The sum is exact too, or so far from the middle of two f16 that rounding twice changes nothing.
    let fused = |a: f32, b: f32, c: f32| f16::from_f64(f64::from(a).mul_add(f64::from(b), f64::from(c)));
    u32::from(fused(a0, b0, c0).to_bits()) | u32::from(fused(a1, b1, c1).to_bits()) << 16
}

/// A word of two `f16`, `low` in its low half, each rounded to nearest even.
pub fn f16x2_from(low: f32, high: f32) -> u32 {
    u32::from(f16::from_f32(low).to_bits()) | u32::from(f16::from_f32(high).to_bits()) << 16
}

/// The two e4m3 numbers in the low half of a word as two `f16`, the lowest byte first: exact, and a NaN where the code is one.
pub fn f16x2_from_e4m3(codes: u32) -> u32 {
    let number = |code: u32| {
        let magnitude = (code & 127) << 7;
        // The exponent has four bits, that of f16 five: 2^8 makes up for the difference of their biases.
        let number = f16::from_f32(f16::from_bits(magnitude as u16).to_f32() * 256.0).to_bits();
        u32::from(if code & 127 == 127 { 0x7fff } else { number }) | (code & 128) << 8
    };
    number(codes & 255) | number(codes >> 8 & 255) << 16
}

/// Methods of `f32` that Rust does not have.
pub trait Float {
    /// `1 / sqrt(self)`: within 2 ulp.
    fn rsqrt(self) -> Self;
}

impl Float for f32 {
    fn rsqrt(self) -> Self {
        (1.0 / f64::from(self).sqrt()) as f32
    }
}
