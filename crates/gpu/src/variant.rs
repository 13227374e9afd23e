//! Instances by dtype, dimensions and codecs, instead of by their generics.

use crate::codecs::{hadamard_order, scalar_type};
use crate::kernels::merge::merge;
use flashtile_core::codec::Codec;
use flashtile_core::dtype::Dtype;
use flashtile_core::limits::MAX_HEAD_DIM;
use flashtile_core::problem::Problem;
use flashtile_kernel::source::GenericsError;
use flashtile_kernel::{Generic, Instance, Kernel};

/// Head dimensions that instances are listed for.
pub const HEAD_DIMS: [usize; 7] = [64, 80, 96, 128, 192, 256, 512];

/// The options that an instance of a kernel is compiled for. A kernel depends on some of them:
/// [`VariantOption::of`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Variant {
    /// Of q and out.
    pub dtype: Dtype,
    /// Elements of a q or k vector.
    pub head_dim: usize,
    /// Elements of a v vector.
    pub value_dim: usize,
    /// How keys are stored.
    pub k_codec: Codec,
    /// How values are stored.
    pub v_codec: Codec,
}

/// A field of [`Variant`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum VariantOption {
    /// [`Variant::dtype`].
    Dtype,
    /// [`Variant::head_dim`].
    HeadDim,
    /// [`Variant::value_dim`].
    ValueDim,
    /// [`Variant::k_codec`].
    KCodec,
    /// [`Variant::v_codec`].
    VCodec,
}

impl VariantOption {
    /// The options by which the instances of a kernel differ.
    #[must_use]
    pub fn of(kernel: &Kernel) -> &'static [Self] {
        use VariantOption::{Dtype, HeadDim, KCodec, VCodec, ValueDim};
        match kernel.name {
            "decode" | "prefill" => &[Dtype, HeadDim, ValueDim, KCodec, VCodec],
            "merge" => &[Dtype, ValueDim, VCodec],
            "encode" | "read_codes" => &[Dtype, HeadDim, KCodec],
            "append" | "read_elements" => &[Dtype, KCodec],
            "hadamard" => &[HeadDim],
            _ => &[],
        }
    }

    /// Its name with a hyphen between words.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Dtype => "dtype",
            Self::HeadDim => "head-dim",
            Self::ValueDim => "value-dim",
            Self::KCodec => "k-codec",
            Self::VCodec => "v-codec",
        }
    }
}

/// Why a kernel has no instance for a [`Variant`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum VariantError {
    /// The dimension is not one that kernels are made for.
    Dim {
        /// `head_dim` or `value_dim`.
        name: &'static str,
        /// Its value.
        got: usize,
    },
    /// The codec does not store vectors of this length, or kernels do not rotate them.
    Codec {
        /// The codec.
        codec: Codec,
        /// Elements of a vector.
        got: usize,
    },
    /// Rows of the kernel are codes, and the codec has elements; or the other way round.
    Stored {
        /// The codec.
        codec: Codec,
        /// True if rows of the kernel are codes.
        codes: bool,
    },
    /// The kernel is not of this library.
    Kernel {
        /// Its name.
        name: &'static str,
    },
    /// No tile of `prefill` has the registers and the threadgroup memory of Apple's GPUs.
    Tile,
    /// The kernel's own reason.
    Generics(GenericsError),
}

impl std::fmt::Display for VariantError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Dim { name, got } => {
                write!(f, "{name} is {got}, expected 1 to {MAX_HEAD_DIM}")
            }
            Self::Codec { codec, got } => {
                let dims = HEAD_DIMS.into_iter().filter(|&dim| codec.supports(dim));
                let dims: Vec<String> = dims.map(|dim| dim.to_string()).collect();
                write!(
                    f,
                    "{codec} does not store {got} elements, expected a dimension such as {}",
                    dims.join(", ")
                )
            }
            Self::Stored { codec, codes: true } => {
                write!(f, "its rows are codes and {codec} has none, expected a k-codec such as tq4")
            }
            Self::Stored { codec, .. } => {
                write!(
                    f,
                    "its rows are elements and {codec} has codes, expected the k-codec f32, f16 or bf16"
                )
            }
            Self::Kernel { name } => write!(f, "{name} is no kernel of flashtile"),
            Self::Tile => {
                f.write_str("no tile of prefill fits Apple's GPUs, where decode computes such problems")
            }
            Self::Generics(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for VariantError {}

impl Variant {
    /// The variant of the kernels of a problem.
    #[must_use]
    pub fn of(problem: &Problem) -> Self {
        let dims = problem.dims();
        Self {
            dtype: problem.dtype(),
            head_dim: dims.head_dim,
            value_dim: dims.value_dim,
            k_codec: problem.k_codec(),
            v_codec: problem.v_codec(),
        }
    }

    /// The instance of [`merge()`](crate::kernels::merge::merge()).
    ///
    /// # Errors
    /// [`GenericsError`].
    pub fn merge(&self) -> Result<Instance, GenericsError> {
        merge::specialise(&[
            Generic::Type(scalar_type(self.dtype)),
            Generic::Usize(self.value_dim),
            Generic::U32(hadamard_order(self.v_codec, self.value_dim)),
        ])
    }
}

/// The instance of [`decode()`](crate::kernels::decode::decode()) with native code: the type of q and the types of both
/// products; formats and dimensions of keys and values; the tile's `T`, `U` and `S`.
///
/// Rust computes no generics from others: the derived ones are written here.
#[macro_export]
macro_rules! native_decode {
    ([$q:ty, $k:ty, $v:ty] [$kf:expr, $vf:expr, $d:expr, $dv:expr] [$t:expr, $u:expr, $s:expr]) => {{
        use $crate::kernels::formats::padded;
        use $crate::kernels::nibbles::{min_copies, nibble_bytes};
        use $crate::kernels::rows::{lane_pairs, lane_words, larger, pair_words};
        $crate::kernels::decode::decode::instance::<
            $q,
            { $kf },
            { $vf },
            { $d },
            { $dv },
            { $t },
            { $u },
            { $s },
            { min_copies(larger($d, $dv)) },
            $k,
            $v,
            { lane_pairs($d, 4) },
            { lane_pairs($dv, 8) },
            { lane_words($kf, $d, 4) },
            { lane_words($vf, $dv, 8) },
            { pair_words(<$k as ::flashtile_kernel::Scalar>::TYPE, $d, 4) },
            { pair_words(<$v as ::flashtile_kernel::Scalar>::TYPE, $dv, 8) },
            { $crate::kernels::formats::hadamard_order($kf, $d) },
            { nibble_bytes($kf, $d, $vf, $dv, min_copies(larger($d, $dv))) },
            { padded(larger($d, $dv) as u32) as usize },
        >()
    }};
}

/// The instance of [`prefill()`](crate::kernels::prefill::prefill()) with native code: the type of q and the types of both products;
/// formats and dimensions of keys and values; the tile's `M`, `U`, `S` and `W`, for one threadgroup a core.
#[macro_export]
macro_rules! native_prefill {
    ([$q:ty, $k:ty, $v:ty] $row:tt [$m:expr, $u:expr, $s:expr, $w:expr]) => {
        $crate::native_prefill!([$q, $k, $v] $row [$m, $u, $s, $w, 2])
    };
    ([$q:ty, $k:ty, $v:ty] [$kf:expr, $vf:expr, $d:expr, $dv:expr] [$m:expr, $u:expr, $s:expr, $w:expr, $b:expr]) => {{
        use ::flashtile_kernel::{Scalar, ScalarType};
        use $crate::kernels::formats::hadamard_order;
        use $crate::kernels::nibbles::{MIN_COPIES as COPIES, nibble_bytes};
        use $crate::kernels::prefill::block::{
            block_columns, block_scales, key_blocks, row_turns, row_words, scratch_len, staged_rows, values_len,
        };
        use $crate::kernels::rows::{larger, pair_words};
        const K: ScalarType = <$k as Scalar>::TYPE;
        const V: ScalarType = <$v as Scalar>::TYPE;
        $crate::kernels::prefill::prefill::instance::<
            $q,
            { $kf },
            { $vf },
            { $d },
            { $dv },
            { $m },
            { $u },
            { $s },
            { $w },
            { COPIES },
            1,
            { $b },
            $k,
            $v,
            { block_columns($d, $w) },
            { block_columns($dv, $w) },
            { block_columns($d, $w) / (8 * $w) },
            { block_columns($dv, $w) / (8 * $w) },
            { row_words(K, $kf, $d) },
            { row_words(V, $vf, $dv) },
            { row_turns(K, $kf, $d, $u, $s) },
            { row_turns(V, $vf, $dv, $u, $s) },
            { pair_words(K, $d, 8) },
            { pair_words(V, $dv, 8) },
            { hadamard_order($kf, $d) },
            { hadamard_order($vf, $dv) },
            { key_blocks($kf) },
            { block_scales($kf, $d, $u) },
            { 2 * $u },
            { values_len($dv, $u, $w, $b) },
            { larger($d, $dv) + 2 },
            { larger(block_scales($kf, $d, $u) + block_scales($vf, $dv, $u), 1) },
            { staged_rows($w, $b) },
            { scratch_len($m, $u, $s, $w, staged_rows($w, $b), larger($d, $dv) + 2) },
            { nibble_bytes($kf, $d, $vf, $dv, COPIES) },
        >()
    }};
}

/// The instance of [`encode()`](crate::kernels::encode::encode()) with native code: the type of its rows, the format
/// and the dimension.
#[macro_export]
macro_rules! native_encode {
    ($t:ty, $format:expr, $d:expr) => {
        $crate::kernels::encode::encode::instance::<
            $t,
            { $format },
            { $d },
            { $crate::kernels::formats::hadamard_order($format, $d) },
            { $crate::kernels::quantize::scheme_of($format) },
            { $crate::kernels::encode::held_numbers($format, $d) },
            { $crate::kernels::octet::octet_coordinates($format, $d) },
            { $crate::kernels::octet::octet_coordinates($format, $d) / 4 },
        >()
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codecs::format_id;
    use crate::kernels::formats;
    use flashtile_core::codec::Coder;

    #[test]
    fn rows_are_as_long_as_the_codecs() {
        for codec in Codec::ALL {
            for dim in HEAD_DIMS.into_iter().filter(|&dim| codec.supports(dim)) {
                let (format, n) = (format_id(codec), dim as u32);
                let bytes = formats::first_bytes(format, n)
                    + formats::second_bytes(format, n)
                    + formats::scale_bytes(format, n);
                assert_eq!(bytes as usize, codec.row_bytes(dim), "{codec} of {dim}");
                let is_rotated = Coder::new(codec, dim).is_some_and(|coder| coder.rotation().is_some());
                assert_eq!(hadamard_order(codec, dim) > 0, is_rotated, "{codec} of {dim}");
            }
        }
    }
}
