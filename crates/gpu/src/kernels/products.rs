//! Products of matrices and nothing else, with which prefill is compared.

use flashtile_kernel::prelude::*;

/// Products of a SIMD group in a round.
pub const PRODUCTS: u32 = 4;

/// Multiplies 8x8 matrices of `T`, [`PRODUCTS`] a round that do not depend on each other, and adds them in f32. Every SIMD group stores the
/// 64 elements of its sum, so that the compiler leaves nothing out.
#[kernel(
    threads = 256,
    requires(out.len() as u64 >= u64::from(groups[0]) * 512, "out holds an 8x8 matrix for each SIMD group"),
)]
pub fn products<T: Element>(out: &mut Buffer<f32>, rounds: u32) {
    // Lanes differ, and the sums stay finite.
    let left = Fragment::<T>::filled(T::from_f32(simd_lane() as f32 * 0.001));
    let right = Fragment::<T>::filled(T::from_f32(0.5 - simd_lane() as f32 * 0.01));
    let mut a = Fragment::<f32>::zero();
    let mut b = Fragment::<f32>::filled(1.0);
    let mut c = Fragment::<f32>::filled(2.0);
    let mut d = Fragment::<f32>::filled(3.0);
    for _ in 0..rounds {
        a = Fragment::multiply_accumulate(&left, &right, &a);
        b = Fragment::multiply_accumulate(&left, &right, &b);
        c = Fragment::multiply_accumulate(&left, &right, &c);
        d = Fragment::multiply_accumulate(&left, &right, &d);
    }
    for n in 0..2u32 {
        a.set_element(n, (a.element(n) + b.element(n)) + (c.element(n) + d.element(n)));
    }
    a.store(out, (group_x() * 8 + simd_index()) * 64, 8);
}
