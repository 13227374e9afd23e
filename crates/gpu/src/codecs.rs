//! Codecs as kernels are specialised by them, and the tables that kernels read.

use crate::kernels::formats;
use crate::kernels::formats::{
    BF16, F16, F32, FP8, INT8, MLX4, MLX8, MLX8_PLAIN, ROT16, TQ2, TQ3, TQ4, TQ5, TQ6,
};
use crate::kernels::rotation::block_count;
use flashtile_core::codec::{Codec, Coder, Rotation, RowKind, mlx};
use flashtile_core::dtype::Dtype;
use flashtile_core::problem::Problem;
use flashtile_kernel::{ScalarType, f16};

/// The constant of [`formats`] by which kernels are specialised for a codec.
pub const fn format_id(codec: Codec) -> u32 {
    match codec {
        Codec::F32 => F32,
        Codec::F16 => F16,
        Codec::BF16 => BF16,
        Codec::Rot16 => ROT16,
        Codec::Int8 => INT8,
        Codec::Fp8 => FP8,
        Codec::Tq2 => TQ2,
        Codec::Tq3 => TQ3,
        Codec::Tq4 => TQ4,
        Codec::Tq5 => TQ5,
        Codec::Tq6 => TQ6,
        Codec::MlxTq4 => MLX4,
        Codec::MlxTq5 | Codec::MlxTq6 | Codec::MlxTq8 => MLX8,
        Codec::MlxTq5Plain | Codec::MlxTq6Plain | Codec::MlxTq8Plain => MLX8_PLAIN,
    }
}

/// The kernel language's type of an element.
pub const fn scalar_type(dtype: Dtype) -> ScalarType {
    match dtype {
        Dtype::F32 => ScalarType::F32,
        Dtype::F16 => ScalarType::F16,
        Dtype::BF16 => ScalarType::Bf16,
    }
}

/// The Hadamard order of a codec's rotation; 0 where rows are not rotated.
pub const fn hadamard_order(codec: Codec, dim: usize) -> u32 {
    formats::hadamard_order(format_id(codec), dim)
}

/// Signs and roots of the rotation of a codec, as kernels take them; one zero where there is none.
pub fn factors(codec: Codec, dim: usize) -> Vec<f32> {
    Coder::new(codec, dim)
        .and_then(|coder| coder.rotation().map(Rotation::factors))
        .unwrap_or_else(|| vec![0.0])
}

/// Signs and roots of the rotation of a codec for each head of equalized keys, as kernels take them: `[heads, dim + blocks]`, where the
/// signs are times the factors `[heads, dim]`. For [`GpuKv::equalized`](crate::tensors::GpuKv::equalized). Empty for a codec that
/// [takes no factors](Codec::supports_key_factors).
#[must_use]
pub fn head_factors(codec: Codec, dim: usize, key_factors: &[f32]) -> Vec<f32> {
    if !codec.supports_key_factors() || dim == 0 {
        return Vec::new();
    }
    let shared = factors(codec, dim);
    let of_head = |head: &[f32]| -> Vec<f32> {
        let factors = head.iter().copied().chain(std::iter::repeat(1.0));
        shared.iter().zip(factors).map(|(shared, factor)| shared * factor).collect()
    };
    key_factors.chunks_exact(dim).flat_map(of_head).collect()
}

/// Elements of a head in [`head_factors`].
pub(crate) const fn head_factors_len(codec: Codec, dim: usize) -> usize {
    dim + block_count(hadamard_order(codec, dim), dim)
}

/// The tables that kernels read for the codecs of a problem. No list is empty.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Tables {
    /// Signs and root of the rotation of keys, and of that of values.
    pub factors: [Vec<f32>; 2],
    /// Codebooks of mlx-native.
    pub codebooks: Vec<f32>,
}

impl Tables {
    /// The tables of a problem.
    #[must_use]
    pub fn of(problem: &Problem) -> Self {
        let (dims, k, v) = (problem.dims(), problem.k_codec(), problem.v_codec());
        Self {
            factors: [factors(k, dims.head_dim), factors(v, dims.value_dim)],
            codebooks: codebooks(k, v).0,
        }
    }
}

/// Bytes of the magnitudes of a codec's levels as f16: 32 low ones, then 32 high ones, four to a word.
pub(crate) fn magnitudes(codec: Codec, dim: usize) -> [u32; 16] {
    let mut words = [0; 16];
    let RowKind::Integers { bits } = codec.row_kind() else { return words };
    let coder = Coder::new(codec, dim);
    // Codes of 8 bits are their own levels.
    if let Some(levels) = coder.as_ref().and_then(Coder::levels) {
        for index in 0..1usize << (bits - 1) {
            let half = f16::from_f32(f32::from(levels[index])).to_bits();
            words[index / 4] |= u32::from(half & 0xff) << (8 * (index % 4));
            words[8 + index / 4] |= u32::from(half >> 8) << (8 * (index % 4));
        }
    }
    words
}

/// The codebooks of keys and values in the formats of mlx-native, one after another, each followed by the residuals of
/// its entries in f16; and where the codebook of keys and of values starts.
pub fn codebooks(k: Codec, v: Codec) -> (Vec<f32>, [u32; 2]) {
    let mut all = Vec::new();
    let mut push = |codec: Codec| {
        let start = all.len() as u32;
        if let RowKind::Mlx { bits, .. } = codec.row_kind() {
            let numbers = (0..=u8::MAX).map(|code| mlx::value(bits, code));
            all.extend(numbers.clone().chain(numbers.map(|x| x - f16::from_f32(x).to_f32())));
        }
        start
    };
    let starts = [push(k), push(v)];
    if all.is_empty() {
        all.push(0.0);
    }
    (all, starts)
}
