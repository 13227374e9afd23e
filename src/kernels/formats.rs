//! Formats of rows, as numbers that kernels are specialised by.

use flashtile_kernel::prelude::*;

/// Elements.
#[constant]
pub(super) const F32: u32 = 0;
#[constant]
pub(super) const F16: u32 = 1;
#[constant]
pub(super) const BF16: u32 = 2;
/// Codes of [`Codec::Int8`] and so on: numbers above those of elements.
#[constant]
pub(super) const INT8: u32 = 3;
#[constant]
pub(super) const FP8: u32 = 4;
#[constant]
pub(super) const TQ2: u32 = 5;
#[constant]
pub(super) const TQ3: u32 = 6;
#[constant]
pub(super) const TQ4: u32 = 7;
#[constant]
pub(super) const TQ5: u32 = 8;
#[constant]
pub(super) const TQ6: u32 = 9;
/// Nibbles of mlx-native.
#[constant]
pub(super) const MLX4: u32 = 10;
/// Bytes of mlx-native, of 5, 6 or 8 bits: their codebooks are the caller's.
#[constant]
pub(super) const MLX8: u32 = 11;

/// Whether rows are codes with levels in bit planes.
#[device]
pub(super) fn in_planes(format: u32) -> bool {
    format >= TQ2 && format <= TQ6
}

/// Bytes of a row in the first plane, or of its elements or codes.
#[device]
pub(super) fn first_bytes(format: u32, dim: u32) -> u32 {
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
pub(super) fn second_bytes(format: u32, dim: u32) -> u32 {
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
pub(super) fn scale_bytes(format: u32, dim: u32) -> u32 {
    if format >= MLX4 {
        return dim / 64;
    }
    if format >= INT8 {
        return 2;
    }
    0
}
