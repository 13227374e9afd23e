//! Format ids: how a stored row is laid out, as constants that kernels are specialised by.
//!
//! The functions here are the one table of formats: kernels, the values of their derived generics and the host all call them.

use flashtile_kernel::prelude::*;

/// f32 elements.
#[constant]
pub const F32: u32 = 0;
/// f16 elements.
#[constant]
pub const F16: u32 = 1;
/// bf16 elements.
#[constant]
pub const BF16: u32 = 2;
/// [`Codec::Int8`](flashtile_core::codec::Codec::Int8). Ids of codes are greater than ids of elements: see [`is_codes`].
#[constant]
pub const INT8: u32 = 3;
/// [`Codec::Fp8`](flashtile_core::codec::Codec::Fp8).
#[constant]
pub const FP8: u32 = 4;
/// [`Codec::Tq2`](flashtile_core::codec::Codec::Tq2).
#[constant]
pub const TQ2: u32 = 5;
/// [`Codec::Tq3`](flashtile_core::codec::Codec::Tq3).
#[constant]
pub const TQ3: u32 = 6;
/// [`Codec::Tq4`](flashtile_core::codec::Codec::Tq4).
#[constant]
pub const TQ4: u32 = 7;
/// [`Codec::Tq5`](flashtile_core::codec::Codec::Tq5).
#[constant]
pub const TQ5: u32 = 8;
/// [`Codec::Tq6`](flashtile_core::codec::Codec::Tq6).
#[constant]
pub const TQ6: u32 = 9;
/// mlx-native, 4 bits: two codes to a byte.
#[constant]
pub const MLX4: u32 = 10;
/// mlx-native, 5, 6 or 8 bits: one code to a byte. The three differ in their codebooks, which launches pass.
#[constant]
pub const MLX8: u32 = 11;
/// [`MLX8`] of rows that are not rotated.
#[constant]
pub const MLX8_PLAIN: u32 = 12;
/// [`Codec::Rot16`](flashtile_core::codec::Codec::Rot16): codes that are f16 themselves, without a scale.
#[constant]
pub const ROT16: u32 = 13;

/// Returns true if rows are codes, which are multiplied as f16, in packed pages, rather than elements.
#[device]
#[inline]
pub const fn is_codes(format: u32) -> bool {
    format >= INT8
}

/// Returns true if rows have scales: an f16 each, or norms in the format of mlx-native.
#[device]
#[inline]
pub const fn is_scaled(format: u32) -> bool {
    is_codes(format) && format != ROT16
}

/// Returns true if rows are codes of mlx-native, whose codebooks are f32.
#[device]
#[inline]
pub const fn is_mlx(format: u32) -> bool {
    format >= MLX4 && format <= MLX8_PLAIN
}

/// Returns true if rows are codes of `tq2` to `tq6`, which lie in bit planes.
#[device]
#[inline]
pub const fn in_planes(format: u32) -> bool {
    format >= TQ2 && format <= TQ6
}

/// Returns true if rows are f16 or bf16 as they are stored.
#[device]
#[inline]
pub const fn is_half(format: u32) -> bool {
    format == F16 || format == BF16 || format == ROT16
}

/// Returns true if a row may hold a NaN or an infinity beside its scale: elements, e4m3 and f16 may, other codes stand for
/// finite values. A refused row of these is all NaN.
#[device]
#[inline]
pub const fn may_be_nonfinite(format: u32) -> bool {
    !is_codes(format) || format == FP8 || format == ROT16
}

/// Returns true if rows are rotated before they are stored.
pub const fn is_rotated(format: u32) -> bool {
    is_codes(format) && format != FP8 && format != MLX8_PLAIN
}

/// The Hadamard order of a rotation of `dim` coordinates: 12 or 20 where `dim` is a power of two times that, otherwise 1.
pub const fn rotation_order(dim: usize) -> u32 {
    if dim.is_multiple_of(12) && (dim / 12).is_power_of_two() {
        12
    } else if dim.is_multiple_of(20) && (dim / 20).is_power_of_two() {
        20
    } else {
        1
    }
}

/// The Hadamard order of the rotation of rows; 0 where rows are not rotated.
pub const fn hadamard_order(format: u32, dim: usize) -> u32 {
    if is_rotated(format) { rotation_order(dim) } else { 0 }
}

/// Returns true if each half of a row has a norm of its own: mlx-native at 512 coordinates.
#[device]
#[inline]
pub const fn has_half_norms(format: u32, dim: u32) -> bool {
    is_mlx(format) && dim == 512
}

/// Bits of an element, or of the part of a code, in a plane of the row; 0 where the format has no such plane.
#[device]
#[inline]
pub const fn plane_bits(format: u32, plane: u32) -> u32 {
    if plane == 1 {
        if format == TQ3 || format == TQ5 {
            return 1;
        }
        if format == TQ6 {
            return 2;
        }
        return 0;
    }
    if format == F32 {
        return 32;
    }
    if is_half(format) {
        return 16;
    }
    if format == TQ2 || format == TQ3 {
        return 2;
    }
    if format == TQ4 || format == TQ5 || format == TQ6 || format == MLX4 {
        return 4;
    }
    8
}

/// Coordinates of a row in matrix products: a multiple of 16, of which those beyond the row are zeros.
#[device]
#[inline]
pub const fn padded(dim: u32) -> u32 {
    dim.div_ceil(16) * 16
}

/// Bytes of a row's elements, or of its codes in the first plane.
#[device]
#[inline]
pub const fn first_bytes(format: u32, dim: u32) -> u32 {
    (dim * plane_bits(format, 0)).div_ceil(8)
}

/// Bytes of a row's codes in the second plane.
#[device]
#[inline]
pub const fn second_bytes(format: u32, dim: u32) -> u32 {
    (dim * plane_bits(format, 1)).div_ceil(8)
}

/// Bytes of a row's scale, or of its norms.
#[device]
#[inline]
pub const fn scale_bytes(format: u32, dim: u32) -> u32 {
    if is_mlx(format) {
        return dim / 64;
    }
    if is_scaled(format) {
        return 2;
    }
    0
}
