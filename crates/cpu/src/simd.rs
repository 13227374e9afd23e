//! The vectors of f32 that kernels are written in. This module defines only the lanes; `kernels/products` makes products of them.
//!
//! Every method is `#[inline(always)]` in its implementation: kernels are generic over [`Simd`], and the phases of an ISA file,
//! which are compiled with its target features, instantiate them.

#![allow(unsafe_code)]

use flashtile_core::dtype::Dtype;

/// Lines of a transpose: few enough to stay in registers beside the sums that they go into.
pub(crate) const LINES: usize = 8;

/// A vector of f32 of one instruction set.
///
/// # Safety
/// For every method: the machine has the instruction set, and pointers are valid for the lanes read or written. Pointers are aligned to
/// their element type, except in loads of f32.
pub(crate) trait Simd: Copy + 'static {
    /// f32 lanes.
    const LANES: usize;
    /// Vector registers.
    const REGISTERS: usize;
    /// Rows of the tile of `C` that fits the registers.
    const ROWS: usize;
    /// Vectors of a row of that tile.
    const VECTORS: usize;
    /// A vector of `LANES` f32.
    type V: Copy;

    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(p: *const f32) -> Self::V;
    unsafe fn store(p: *mut f32, v: Self::V);
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, fused where the machine fuses.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `a > b ? a : b`: `b` if either is NaN.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn abs(a: Self::V) -> Self::V;
    /// `a < b ? x : y`; `y` if `a` or `b` is NaN.
    unsafe fn select_lt(a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V;
    /// `a == b ? x : y`; `y` if `a` or `b` is NaN.
    unsafe fn select_eq(a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V;
    /// The bits of every lane that are set in `bits`.
    unsafe fn and(a: Self::V, bits: u32) -> Self::V;
    /// The bits of every lane moved up by 16.
    unsafe fn shift_up_16(a: Self::V) -> Self::V;
    /// Nearest integer, ties to even.
    unsafe fn round(a: Self::V) -> Self::V;
    /// `a * 2^n`, for `n` = [`Simd::round`] of `x`, which the caller passes; 0 if `x < -126`, NaN if `x` (and so `a`) is NaN.
    unsafe fn scale2(a: Self::V, n: Self::V, x: Self::V) -> Self::V;
    /// Sum of the lanes, in a fixed order.
    unsafe fn reduce_add(a: Self::V) -> f32;
    /// Largest lane; NaN lanes are ignored.
    unsafe fn reduce_max(a: Self::V) -> f32;

    unsafe fn load_f16(p: *const u16) -> Self::V;
    unsafe fn load_bf16(p: *const u16) -> Self::V;
    /// `-inf` if the byte is 0, else 0.
    unsafe fn load_bool(p: *const u8) -> Self::V;
    /// Rounds to nearest, ties to even; NaN stays NaN.
    unsafe fn store_f16(p: *mut u16, v: Self::V);
    /// Rounds to nearest, ties to even; NaN stays NaN.
    unsafe fn store_bf16(p: *mut u16, v: Self::V);

    /// Prefetches the cache line at `p`, which may be any address, into the second-level cache: a fill from memory would occupy the first
    /// level for too long.
    unsafe fn prefetch(p: *const u8);

    /// Loads [`LINES`] elements of the first `LANES` rows and transposes them: lane `r` of line `c` is element `c` of row `r`.
    unsafe fn transpose<E: Elem>(rows: [*const E; 16]) -> [Self::V; LINES];
}

/// Storage of one element, as kernels load and store it.
pub(crate) trait Elem: Copy + 'static {
    unsafe fn load<S: Simd>(p: *const Self) -> S::V;
    unsafe fn store<S: Simd>(p: *mut Self, v: S::V);
    /// A value for the lanes past the end of a row.
    const ZERO: Self;
    /// True if this is f32.
    const IS_F32: bool = false;
}

/// f16 as bits.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct F16(u16);

/// bf16 as bits.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Bf16(u16);

impl Elem for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self) -> S::V {
        // SAFETY: the caller's contract.
        unsafe { S::load(p) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(p: *mut Self, v: S::V) {
        // SAFETY: the caller's contract.
        unsafe { S::store(p, v) }
    }
    const ZERO: Self = 0.0;
    const IS_F32: bool = true;
}

impl Elem for F16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self) -> S::V {
        // SAFETY: the caller's contract; F16 is a transparent u16.
        unsafe { S::load_f16(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(p: *mut Self, v: S::V) {
        // SAFETY: the caller's contract; F16 is a transparent u16.
        unsafe { S::store_f16(p.cast(), v) }
    }
    const ZERO: Self = Self(0);
}

impl Elem for Bf16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const Self) -> S::V {
        // SAFETY: the caller's contract; Bf16 is a transparent u16.
        unsafe { S::load_bf16(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(p: *mut Self, v: S::V) {
        // SAFETY: the caller's contract; Bf16 is a transparent u16.
        unsafe { S::store_bf16(p.cast(), v) }
    }
    const ZERO: Self = Self(0);
}

/// The way in which rows of one storage type are moved through a transpose.
pub(crate) trait LaneFormat: Copy + 'static {
    /// The content of a lane of the transpose.
    type Lane: Elem;
    /// Steps of a product's depth in a lane.
    const STEPS: usize;
    /// Step `n` of a line.
    unsafe fn step<S: Simd>(line: S::V, n: usize) -> S::V;
}

/// Elements converted as they are loaded, one to a lane.
#[derive(Clone, Copy)]
pub(crate) struct Single<E>(std::marker::PhantomData<E>);

impl<E: Elem> LaneFormat for Single<E> {
    type Lane = E;
    const STEPS: usize = 1;
    #[inline(always)]
    unsafe fn step<S: Simd>(line: S::V, _: usize) -> S::V {
        line
    }
}

/// Two bf16 to a lane, split after the transpose: half the shuffles.
#[derive(Clone, Copy)]
pub(crate) struct Double;

impl LaneFormat for Double {
    type Lane = f32;
    const STEPS: usize = 2;
    #[inline(always)]
    unsafe fn step<S: Simd>(line: S::V, n: usize) -> S::V {
        // SAFETY: the caller's contract.
        unsafe { if n == 0 { S::shift_up_16(line) } else { S::and(line, 0xffff_0000) } }
    }
}

/// Runs a generic call for the storage type of a dtype.
macro_rules! with_elem {
    ($dtype:expr, $E:ident => $body:expr) => {
        match $dtype {
            flashtile_core::dtype::Dtype::F32 => {
                type $E = f32;
                $body
            }
            flashtile_core::dtype::Dtype::F16 => {
                type $E = $crate::simd::F16;
                $body
            }
            flashtile_core::dtype::Dtype::BF16 => {
                type $E = $crate::simd::Bf16;
                $body
            }
        }
    };
}
pub(crate) use with_elem;

/// Loads `n < LANES` elements and fills the other lanes with zero.
///
/// # Safety
/// The contract of [`Simd`] holds, with `p` valid for `n` elements.
#[inline(always)]
pub(crate) unsafe fn load_head<S: Simd, E: Elem>(p: *const E, n: usize) -> S::V {
    debug_assert!(n <= S::LANES && S::LANES <= 16);
    let mut lanes = [E::ZERO; 16];
    // SAFETY: `p` is valid for `n` elements, and 16 lanes hold any vector.
    unsafe {
        std::ptr::copy_nonoverlapping(p, lanes.as_mut_ptr(), n);
        E::load::<S>(lanes.as_ptr())
    }
}

/// Stores the first `n` elements of a row of vectors that starts at `src`, plus `zero`, times `scale`. Returns true if all
/// lanes of the vectors are finite.
///
/// # Safety
/// The contract of [`Simd`] holds, with `dst` valid for `n` elements and `src` for `n` rounded up to whole vectors.
#[inline(always)]
pub(crate) unsafe fn store_row<S: Simd>(
    dtype: Dtype,
    dst: *mut u8,
    src: *const f32,
    (zero, scale): (f32, f32),
    n: usize,
) -> bool {
    // SAFETY: whole vectors are inside both rows; the tail goes through a buffer.
    unsafe {
        let (zero, scale, none) = (S::splat(zero), S::splat(scale), S::splat(0.0));
        let mut probe = none;
        with_elem!(dtype, E => {
            let dst = dst.cast::<E>();
            let whole = n / S::LANES * S::LANES;
            let mut i = 0;
            while i < whole {
                let x = S::load(src.add(i));
                probe = S::fma(x, none, probe);
                E::store::<S>(dst.add(i), S::mul(S::add(x, zero), scale));
                i += S::LANES;
            }
            if whole < n {
                let x = S::load(src.add(whole));
                probe = S::fma(x, none, probe);
                let mut lanes = [E::ZERO; 16];
                E::store::<S>(lanes.as_mut_ptr(), S::mul(S::add(x, zero), scale));
                std::ptr::copy_nonoverlapping(lanes.as_ptr(), dst.add(whole), n - whole);
            }
        });
        S::reduce_add(probe) == 0.0
    }
}

/// Returns true if every lane of the vectors that cover `n` elements is finite.
///
/// # Safety
/// The contract of [`Simd`] holds, with `values` valid for `n` elements.
#[inline(always)]
pub(crate) unsafe fn all_finite<S: Simd>(values: *const f32, n: usize) -> bool {
    // SAFETY: the caller's contract.
    unsafe {
        let mut probe = S::splat(0.0);
        for c in (0..n).step_by(S::LANES) {
            probe = S::fma(S::load(values.add(c)), S::splat(0.0), probe);
        }
        S::reduce_add(probe) == 0.0
    }
}

/// `2^x` for `x <= 0`, relative error below 2e-7; 0 if `x < -126`, `2^0 = 1` exactly, NaN gives NaN.
///
/// # Safety
/// The contract of [`Simd`] holds.
#[inline(always)]
pub(crate) unsafe fn exp2<S: Simd>(x: S::V) -> S::V {
    // Minimax of (2^r - 1) / r on [-1/2, 1/2] for the relative error of 2^r; the first coefficient is near ln 2, but differs from it.
    #[allow(clippy::approx_constant)]
    const C: [f32; 5] = [0.693_147, 0.240_222_42, 0.055_507_336, 0.009_671_513, 0.001_326_472_7];
    // SAFETY: the caller's contract.
    unsafe {
        let n = S::round(x);
        let r = S::sub(x, n);
        let mut p = S::splat(C[4]);
        p = S::fma(p, r, S::splat(C[3]));
        p = S::fma(p, r, S::splat(C[2]));
        p = S::fma(p, r, S::splat(C[1]));
        p = S::fma(p, r, S::splat(C[0]));
        p = S::fma(p, r, S::splat(1.0));
        S::scale2(p, n, x)
    }
}

/// `tanh(x)`, relative error below 1e-6; NaN gives NaN.
///
/// # Safety
/// The contract of [`Simd`] holds.
#[inline(always)]
pub(crate) unsafe fn tanh<S: Simd>(x: S::V) -> S::V {
    // Minimax of (tanh(x) - x) / x^3 in x^2 on |x| <= 0.625.
    const C: [f32; 5] = [-0.333_332_8, 0.133_314_42, -0.053_739_715, 0.020_639_01, -0.005_704_987];
    // SAFETY: the caller's contract.
    unsafe {
        let t = S::abs(x);
        let x2 = S::mul(x, x);
        let mut p = S::splat(C[4]);
        p = S::fma(p, x2, S::splat(C[3]));
        p = S::fma(p, x2, S::splat(C[2]));
        p = S::fma(p, x2, S::splat(C[1]));
        p = S::fma(p, x2, S::splat(C[0]));
        let small = S::fma(S::mul(p, x2), x, x);
        // (1 - e) / (1 + e) with e = exp(-2 |x|); no cancellation where it is used.
        let one = S::splat(1.0);
        let e = exp2::<S>(S::mul(t, S::splat(-2.0 * std::f32::consts::LOG2_E)));
        let large = S::div(S::sub(one, e), S::add(one, e));
        let signed = S::select_lt(x, S::splat(0.0), S::sub(S::splat(0.0), large), large);
        S::select_lt(t, S::splat(0.625), small, signed)
    }
}
