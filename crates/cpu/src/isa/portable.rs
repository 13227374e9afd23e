//! Plain Rust over small arrays, which the compiler turns into the vectors of the target (SSE2, NEON).

#![allow(unsafe_code)]

use super::super::simd::{Elem, LINES, Simd};
use crate::kernels::shared::products::f32_fma::F32;
use flashtile_core::isa::Isa;
use half::{bf16, f16};

/// Arrays of `N` lanes: 4, or 16 in tests, where they emulate vectors of bf16 pairs and matrix units.
#[derive(Clone, Copy)]
pub(crate) struct Array<const N: usize>;

pub(crate) type Portable = Array<4>;

/// An array of `f(0)`, `f(1)` and so on. It is a plain loop because `std::array::from_fn` is a call for each element if codegen units
/// are not optimised together.
#[inline(always)]
fn from_fn<T: Copy + Default, const N: usize>(f: impl Fn(usize) -> T) -> [T; N] {
    let mut all = [T::default(); N];
    for i in 0..N {
        all[i] = f(i);
    }
    all
}

#[inline(always)]
fn map<const N: usize>(a: [f32; N], f: impl Fn(f32) -> f32) -> [f32; N] {
    from_fn(|i| f(a[i]))
}

#[inline(always)]
fn zip<const N: usize>(a: [f32; N], b: [f32; N], f: impl Fn(f32, f32) -> f32) -> [f32; N] {
    from_fn(|i| f(a[i], b[i]))
}

// In unit tests, the compiler decides about inlining: they compute with arrays of 16 lanes, whose kernels take minutes to compile
// if every call is inlined.
impl<const N: usize> Simd for Array<N> {
    const LANES: usize = N;
    const REGISTERS: usize = 16;
    const ROWS: usize = crate::plan::register_tile(isa_of_lanes(N)).rows;
    const VECTORS: usize = crate::plan::register_tile(isa_of_lanes(N)).vectors;
    type V = [f32; N];

    #[cfg_attr(not(test), inline(always))]
    unsafe fn splat(x: f32) -> Self::V {
        [x; N]
    }
    #[cfg_attr(not(test), inline(always))]
    unsafe fn load(p: *const f32) -> Self::V {
        // SAFETY: the caller's contract.
        unsafe { p.cast::<Self::V>().read_unaligned() }
    }
    #[cfg_attr(not(test), inline(always))]
    unsafe fn store(p: *mut f32, v: Self::V) {
        // SAFETY: the caller's contract; an array of f32 has the alignment of f32.
        unsafe { p.cast::<Self::V>().write(v) }
    }
    #[cfg_attr(not(test), inline(always))]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a + b)
    }
    #[cfg_attr(not(test), inline(always))]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a - b)
    }
    #[cfg_attr(not(test), inline(always))]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a * b)
    }
    #[cfg_attr(not(test), inline(always))]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a / b)
    }
    #[cfg_attr(not(test), inline(always))]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // Without the instruction, a fused multiply-add is a library call.
        if cfg!(any(target_arch = "aarch64", target_feature = "fma")) {
            from_fn(|i| a[i].mul_add(b[i], c[i]))
        } else {
            from_fn(|i| a[i] * b[i] + c[i])
        }
    }
    #[cfg_attr(not(test), inline(always))]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[cfg_attr(not(test), inline(always))]
    unsafe fn abs(a: Self::V) -> Self::V {
        map(a, f32::abs)
    }
    #[cfg_attr(not(test), inline(always))]
    unsafe fn select_lt(a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V {
        from_fn(|i| if a[i] < b[i] { x[i] } else { y[i] })
    }
    #[cfg_attr(not(test), inline(always))]
    unsafe fn select_eq(a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V {
        from_fn(|i| if a[i] == b[i] { x[i] } else { y[i] })
    }
    #[cfg_attr(not(test), inline(always))]
    unsafe fn and(a: Self::V, bits: u32) -> Self::V {
        map(a, |a| f32::from_bits(a.to_bits() & bits))
    }
    #[cfg_attr(not(test), inline(always))]
    unsafe fn shift_up_16(a: Self::V) -> Self::V {
        map(a, |a| f32::from_bits(a.to_bits() << 16))
    }
    #[cfg_attr(not(test), inline(always))]
    unsafe fn round(a: Self::V) -> Self::V {
        // Adding and subtracting 1.5 * 2^23 leaves the nearest integer for |x| < 2^22, which is where `scale2` uses it;
        // `f32::round_ties_even` is a library call without SSE4.1.
        const MAGIC: f32 = 12_582_912.0;
        map(a, |a| (a + MAGIC) - MAGIC)
    }
    #[cfg_attr(not(test), inline(always))]
    unsafe fn scale2(a: Self::V, n: Self::V, x: Self::V) -> Self::V {
        // The sum holds n + 127 in its low bits, which the shift makes the exponent.
        const MAGIC: f32 = 12_582_912.0 + 127.0;
        let scaled = zip(a, n, |a, n| a * f32::from_bits((n + MAGIC).to_bits() << 23));
        zip(scaled, x, |y, x| if x < -126.0 { 0.0 } else { y })
    }
    #[cfg_attr(not(test), inline(always))]
    unsafe fn reduce_add(a: Self::V) -> f32 {
        let (mut a, mut n) = (a, N);
        while n > 1 {
            n /= 2;
            for i in 0..n {
                a[i] += a[i + n];
            }
        }
        a[0]
    }
    #[cfg_attr(not(test), inline(always))]
    unsafe fn reduce_max(a: Self::V) -> f32 {
        a.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
    #[cfg_attr(not(test), inline(always))]
    unsafe fn load_f16(p: *const u16) -> Self::V {
        // SAFETY: the caller's contract.
        let bits = unsafe { p.cast::<[u16; N]>().read() };
        from_fn(|i| {
            // Exponent and mantissa moved into place and rescaled by 2^112; infinities and NaN get the largest exponent.
            let magnitude = u32::from(bits[i] & 0x7fff) << 13;
            let scaled = f32::from_bits(magnitude) * f32::from_bits(0x7780_0000);
            let special = if scaled >= 65536.0 { 0x7f80_0000 } else { 0 };
            f32::from_bits(scaled.to_bits() | special | (u32::from(bits[i] & 0x8000) << 16))
        })
    }
    #[cfg_attr(not(test), inline(always))]
    unsafe fn load_bf16(p: *const u16) -> Self::V {
        // Elements are read one by one, so that the compiler makes vectors: it treats an array that is read whole as one
        // integer, and splits it by shifts.
        // SAFETY: the caller's contract.
        from_fn(|i| f32::from_bits(u32::from(unsafe { p.add(i).read() }) << 16))
    }
    #[cfg_attr(not(test), inline(always))]
    unsafe fn load_bool(p: *const u8) -> Self::V {
        // SAFETY: the caller's contract.
        let bytes = unsafe { p.cast::<[u8; N]>().read() };
        from_fn(|i| if bytes[i] != 0 { 0.0 } else { f32::NEG_INFINITY })
    }
    #[cfg_attr(not(test), inline(always))]
    unsafe fn store_f16(p: *mut u16, v: Self::V) {
        // SAFETY: the caller's contract.
        unsafe { p.cast::<[u16; N]>().write(from_fn(|i| f16::from_f32(v[i]).to_bits())) }
    }
    #[cfg_attr(not(test), inline(always))]
    unsafe fn store_bf16(p: *mut u16, v: Self::V) {
        // SAFETY: the caller's contract.
        unsafe { p.cast::<[u16; N]>().write(from_fn(|i| bf16::from_f32(v[i]).to_bits())) }
    }
    #[cfg_attr(not(test), inline(always))]
    unsafe fn prefetch(_: *const u8) {}
    #[cfg_attr(not(test), inline(always))]
    unsafe fn transpose<E: Elem>(rows: [*const E; 16]) -> [Self::V; LINES] {
        let mut lines = [[0.0; N]; LINES];
        if !E::IS_F32 && N <= LINES {
            // Whole vectors are loaded, so that their conversion is one of registers.
            for r in 0..N {
                for c in (0..LINES).step_by(N) {
                    // SAFETY: the caller's contract: N rows of LINES elements.
                    let row = unsafe { E::load::<Self>(rows[r].add(c)) };
                    for i in 0..N {
                        lines[c + i][r] = row[i];
                    }
                }
            }
            return lines;
        }
        for r in 0..N {
            // The buffer has room for whole vectors: the row itself may end after the lines.
            let mut row = [E::ZERO; 16];
            // SAFETY: the caller's contract: N rows of LINES elements.
            unsafe {
                // The copy is of bytes because pairs of bf16 that stand in for f32 are aligned as bf16.
                let (from, to) = (rows[r].cast::<u8>(), row.as_mut_ptr().cast::<u8>());
                std::ptr::copy_nonoverlapping(from, to, LINES * size_of::<E>());
                for c in 0..LINES {
                    lines[c][r] = E::load::<Self>(row.as_ptr().add(c / N * N))[c % N];
                }
            }
        }
        lines
    }
}

/// The instruction set whose register tile arrays of `n` lanes use.
const fn isa_of_lanes(n: usize) -> Isa {
    if n == 16 { Isa::Avx512Bf16 } else { Isa::Portable }
}

crate::isa::entry::entry_points!(any, Portable, F32);

/// Pairs of bf16 and a matrix unit in arrays of 16 lanes.
#[cfg(test)]
mod emulated {
    use super::{Array, from_fn};
    use crate::kernels::shared::products::amx::{MatrixUnit, TILE, TileOperands};
    use crate::kernels::shared::products::bf16_pairs::PairLanes;
    use half::bf16;

    /// Both bf16 of a pair.
    fn halves(pair: u32) -> [f32; 2] {
        [f32::from_bits(pair << 16), f32::from_bits(pair & 0xffff_0000)]
    }

    impl PairLanes for Array<16> {
        unsafe fn dot(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
            from_fn(|i| {
                let (a, b) = (halves(a[i].to_bits()), halves(b[i].to_bits()));
                c[i] + a[1] * b[1] + a[0] * b[0]
            })
        }
        unsafe fn to_pairs(low: Self::V, high: Self::V) -> Self::V {
            let at = |i: usize| bf16::from_f32(if i < 16 { low[i] } else { high[i - 16] }).to_bits();
            from_fn(|i| f32::from_bits(u32::from(at(2 * i)) | u32::from(at(2 * i + 1)) << 16))
        }
        unsafe fn row_pairs(even: Self::V, odd: Self::V) -> Self::V {
            let bits = |x| u32::from(bf16::from_f32(x).to_bits());
            from_fn(|i| f32::from_bits(bits(even[i]) | bits(odd[i]) << 16))
        }
        unsafe fn interleave(even: *const u16, odd: *const u16, dst: *mut f32) {
            for i in 0..16 {
                // SAFETY: the caller's contract.
                unsafe {
                    *dst.add(i) = f32::from_bits(u32::from(*even.add(i)) | u32::from(*odd.add(i)) << 16);
                }
            }
        }
    }

    impl MatrixUnit for Array<16> {
        unsafe fn configure() {}
        unsafe fn release() {}
        unsafe fn product<const M: usize, const N: usize>(steps: usize, t: TileOperands) {
            for r in 0..M * TILE {
                for n in 0..N * TILE {
                    // SAFETY: the caller's contract.
                    unsafe {
                        let c = t.c.byte_add(r * t.ldc).add(n);
                        let mut total = if t.resume { *c } else { 0.0 };
                        for step in 0..steps {
                            let mut sums = [0.0f32; 2];
                            for k in step * TILE..(step + 1) * TILE {
                                let a = t.a[r / TILE].add(r % TILE * t.lda).cast::<u32>().add(k);
                                let b = t.b.add(k * t.ldb).cast::<u32>().add(n);
                                let (a, b) = (halves(a.read_unaligned()), halves(b.read_unaligned()));
                                // Products are exact, so there is one rounding, as in a fused multiply-add.
                                sums = [sums[0] + a[0] * b[0], sums[1] + a[1] * b[1]];
                            }
                            total += sums[0] + sums[1];
                        }
                        *c = total;
                    }
                }
            }
        }
        unsafe fn product_loop(_: u64) {}
    }
}

/// Kernels of pairs that run anywhere.
#[cfg(test)]
pub(crate) mod emulated_pairs {
    use crate::kernels::shared::products::bf16_pairs::Bf16Pairs;
    type Emulated = super::Array<16>;
    crate::isa::entry::entry_points!(pairs, Emulated, Bf16Pairs);
}

/// Kernels of tiles that run anywhere.
#[cfg(test)]
pub(crate) mod emulated_tiles {
    use crate::kernels::shared::products::amx::Amx;
    type Emulated = super::Array<16>;
    crate::isa::entry::entry_points!(pairs, Emulated, Amx);
}
