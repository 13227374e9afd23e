//! Loops that measure the limits of an instruction set.

#![allow(unsafe_code)]

use super::gemm::MulAdd;
use crate::simd::Simd;

/// The loops that measure the limits of an instruction set.
#[derive(Clone, Copy)]
pub(crate) struct Loops {
    pub(crate) peak: unsafe fn(u64) -> f32,
    /// Multiply-adds of a round of `peak`.
    pub(crate) peak_round: usize,
    pub(crate) read: unsafe fn(*const f32, usize) -> f32,
}

/// Independent chains of multiply-adds: enough to hide a latency of 5 cycles at 2 per cycle, few enough for 16 registers.
pub(crate) const CHAINS: usize = 12;

/// `rounds` steps of a product on each of [`CHAINS`] registers.
///
/// # Safety
/// The contract of [`Simd`] holds.
#[inline(always)]
pub(crate) unsafe fn mul_add_loop<S: Simd, M: MulAdd<S>>(rounds: u64) -> f32 {
    // SAFETY: the caller's contract.
    unsafe {
        let (a, b) = (S::splat(std::hint::black_box(0.999)), S::splat(std::hint::black_box(0.001)));
        let mut acc = [S::splat(1.0); CHAINS];
        for _ in 0..rounds {
            for x in &mut acc {
                *x = M::measured_step(*x, a, b);
            }
        }
        let mut sum = acc[0];
        for x in &acc[1..] {
            sum = S::add(sum, *x);
        }
        S::reduce_add(sum)
    }
}

/// Reads `len` elements, a multiple of 64.
///
/// # Safety
/// The contract of [`Simd`] holds; `p` is valid for `len` elements.
#[inline(always)]
pub(crate) unsafe fn read_loop<S: Simd>(p: *const f32, len: usize) -> f32 {
    // SAFETY: the caller's contract; 64 elements are a whole number of groups of 4 vectors.
    unsafe {
        let mut acc = [S::splat(0.0); 4];
        let mut i = 0;
        while i < len {
            for (n, x) in acc.iter_mut().enumerate() {
                *x = S::add(*x, S::load(p.add(i + n * S::LANES)));
            }
            i += 4 * S::LANES;
        }
        S::reduce_add(S::add(S::add(acc[0], acc[1]), S::add(acc[2], acc[3])))
    }
}
