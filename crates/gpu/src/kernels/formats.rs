//! Formats of rows, as numbers that kernels are specialised by.

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
/// [`Codec::Int8`](flashtile_core::codec::Codec::Int8). Formats of codes have higher numbers than those of elements.
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
/// Nibbles of mlx-native.
#[constant]
pub const MLX4: u32 = 10;
/// Bytes of mlx-native, of 5, 6 or 8 bits: their codebooks are the caller's.
#[constant]
pub const MLX8: u32 = 11;

/// Whether rows are codes with levels in bit planes.
#[device]
pub fn in_planes(format: u32) -> bool {
    format >= TQ2 && format <= TQ6
}

/// Bytes of a row in the first plane, or of its elements or codes.
#[device]
pub fn first_bytes(format: u32, dim: u32) -> u32 {
    if format == F32 {
        return dim * 4;
    }
    if format == F16 || format == BF16 {
        return dim * 2;
    }
    if format == TQ2 || format == TQ3 {
        return dim / 4;
    }
    if format == TQ4 || format == TQ5 || format == TQ6 || format == MLX4 {
        return dim / 2;
    }
    dim
}

/// Bytes of a row in the second plane.
#[device]
pub fn second_bytes(format: u32, dim: u32) -> u32 {
    if format == TQ3 || format == TQ5 {
        return dim / 8;
    }
    if format == TQ6 {
        return dim / 4;
    }
    0
}

/// Bytes of a row in the last plane: its scale, or its norms.
#[device]
pub fn scale_bytes(format: u32, dim: u32) -> u32 {
    if format >= MLX4 {
        return dim / 64;
    }
    if format >= INT8 {
        return 2;
    }
    0
}
