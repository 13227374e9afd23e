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
            "row_terms" => &[Dtype, ValueDim],
            "backward_q" | "backward_kv" | "backward_bias" => &[Dtype, HeadDim, ValueDim],
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
    /// No tile of the kernel keeps the registers and the threadgroup memory of the GPUs that instances are for.
    Tile {
        /// Its name.
        kernel: &'static str,
    },
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
            Self::Tile { kernel: "prefill" } => {
                f.write_str("no tile of prefill fits Apple's GPUs, where decode computes such problems")
            }
            Self::Tile { kernel } => write!(f, "no tile of {kernel} fits the GPUs that it is printed for"),
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

/// The instance of a kernel in scope with native code: its chosen generics and the types that follow from them; the arguments of the
/// kernel's `derived`, and the names of its results, in their order. Rust computes no generics from others.
#[doc(hidden)]
#[macro_export]
macro_rules! native_instance {
    ($kernel:ident [$($chosen:tt)*] [$($type:ty),*] ($($argument:tt)*) [$($number:ident)*]) => {{
        const DERIVED: $kernel::Derived = $kernel::derived($($argument)*);
        $kernel::instance::<$($chosen)*, $($type,)* $({ DERIVED.$number }),*>()
    }};
}

/// The instance of [`decode()`](crate::kernels::decode::decode()) with native code: the type of q and the types of both
/// products; formats and dimensions of keys and values; the tile's `ROW_TILES`, `KEY_TILES` and `SIMD_GROUPS`.
#[macro_export]
macro_rules! native_decode {
    ([$q:ty, $k:ty, $v:ty] [$kf:expr, $vf:expr, $d:expr, $dv:expr] [$rows:expr, $keys:expr, $simds:expr]) => {{
        use ::flashtile_kernel::Scalar;
        use $crate::kernels::decode::decode;
        use $crate::kernels::nibbles::min_copies;
        use $crate::kernels::rows::larger;
        const COPIES: usize = min_copies(larger($d, $dv));
        $crate::native_instance!(
            decode [$q, { $kf }, { $vf }, { $d }, { $dv }, { $rows }, { $keys }, { $simds }, COPIES] [$k, $v]
            ($kf, $vf, $d, $dv, COPIES, <$k as Scalar>::TYPE, <$v as Scalar>::TYPE)
            [K_PAIRS V_PAIRS K_WORDS V_WORDS K_PAIR_WORDS V_PAIR_WORDS K_ORDER TABLE_BYTES PADDED_DIM]
        )
    }};
}

/// The instance of [`prefill()`](crate::kernels::prefill::prefill()) with native code: the type of q and the types of both products;
/// formats and dimensions of keys and values; the tile's `ROW_TILES`, `KEY_TILES`, `SIMD_GROUPS` and `TEAM_SIMDS`, and `KV_BUFFERS` unless
/// it is 2, for one threadgroup a core.
#[macro_export]
macro_rules! native_prefill {
    ($types:tt $row:tt [$rows:expr, $keys:expr, $simds:expr, $team:expr]) => {
        $crate::native_prefill!($types $row [$rows, $keys, $simds, $team, 2])
    };
    ([$q:ty, $k:ty, $v:ty] [$kf:expr, $vf:expr, $d:expr, $dv:expr]
     [$rows:expr, $keys:expr, $simds:expr, $team:expr, $buffers:expr]) => {{
        use ::flashtile_kernel::Scalar;
        use $crate::kernels::nibbles::MIN_COPIES;
        use $crate::kernels::prefill::prefill;
        $crate::native_instance!(
            prefill
            [$q, { $kf }, { $vf }, { $d }, { $dv }, { $rows }, { $keys }, { $simds }, { $team }, MIN_COPIES, 1, { $buffers }]
            [$k, $v]
            ($kf, $vf, $d, $dv, $rows, $keys, $simds, $team, MIN_COPIES, $buffers, <$k as Scalar>::TYPE, <$v as Scalar>::TYPE)
            [K_COLUMNS V_COLUMNS K_PAIRS V_PAIRS K_WORDS V_WORDS K_LOADS V_LOADS K_PAIR_WORDS V_PAIR_WORDS K_ORDER V_ORDER
             K_BLOCKS K_SCALES SCORE_TILES V_MEMORY_LEN STAGED_LEN BLOCK_SCALES STAGED_ROWS SCRATCH_LEN TABLE_BYTES]
        )
    }};
}

/// The instance of [`backward_q()`](crate::kernels::backward::d_q::backward_q()) with native code: the type of its tensors, the dimensions
/// of keys and values, and the tile's `ROW_TILES`, `KEY_TILES`, `SIMD_GROUPS` and `TEAM_SIMDS`.
#[macro_export]
macro_rules! native_backward_q {
    ($t:ty, [$d:expr, $dv:expr], [$rows:expr, $keys:expr, $simds:expr, $team:expr]) => {{
        use ::flashtile_kernel::Scalar;
        use $crate::kernels::backward::d_q::backward_q;
        $crate::native_instance!(
            backward_q [$t, { $d }, { $dv }, { $rows }, { $keys }, { $simds }, { $team }, 1] []
            (<$t as Scalar>::TYPE, $d, $dv, $rows, $keys, $simds, $team)
            [K_COLUMNS V_COLUMNS K_PAIRS V_PAIRS CHUNK K_LOADS V_LOADS SCORE_TILES K_LEN V_LEN SCRATCH_LEN]
        )
    }};
}

/// The instance of [`backward_kv()`](crate::kernels::backward::d_kv::backward_kv()) with native code, as [`native_backward_q!`] with
/// `ROW_TILES`, `QUERY_TILES`, `SIMD_GROUPS`, `TEAM_SIMDS` and `IN_REGISTERS`.
#[macro_export]
macro_rules! native_backward_kv {
    ($t:ty, [$d:expr, $dv:expr], [$rows:expr, $queries:expr, $simds:expr, $team:expr, $registers:expr]) => {{
        use ::flashtile_kernel::Scalar;
        use $crate::kernels::backward::d_kv::backward_kv;
        $crate::native_instance!(
            backward_kv [$t, { $d }, { $dv }, { $rows }, { $queries }, { $simds }, { $team }, { $registers }, 1] []
            (<$t as Scalar>::TYPE, $d, $dv, $rows, $queries, $simds, $team, $registers)
            [K_COLUMNS V_COLUMNS K_PAIRS V_PAIRS CHUNK Q_LOADS O_LOADS KEY_TILES K_LOADS V_LOADS SCORE_TILES ROWS
             K_LEN V_LEN Q_LEN O_LEN SCRATCH_LEN]
        )
    }};
}

/// The instance of [`backward_bias()`](crate::kernels::backward::d_bias::backward_bias()) with native code, as [`native_backward_q!`].
#[macro_export]
macro_rules! native_backward_bias {
    ($t:ty, [$d:expr, $dv:expr], [$rows:expr, $keys:expr, $simds:expr, $team:expr]) => {{
        use ::flashtile_kernel::Scalar;
        use $crate::kernels::backward::d_bias::backward_bias;
        $crate::native_instance!(
            backward_bias [$t, { $d }, { $dv }, { $rows }, { $keys }, { $simds }, { $team }] []
            (<$t as Scalar>::TYPE, $d, $dv, $rows, $keys, $simds, $team)
            [K_COLUMNS V_COLUMNS K_PAIRS V_PAIRS CHUNK K_LOADS V_LOADS SCORE_TILES ROWS KEYS K_LEN V_LEN SUMS_LEN SCRATCH_LEN]
        )
    }};
}

/// The instance of [`encode()`](crate::kernels::encode::encode()) with native code: the type of its rows, the format
/// and the dimension.
#[macro_export]
macro_rules! native_encode {
    ($t:ty, $format:expr, $d:expr) => {{
        use $crate::kernels::encode::encode;
        $crate::native_instance!(
            encode [$t, { $format }, { $d }] [] ($format, $d) [ORDER SCHEME HELD LANE_COORDINATES LANE_WORDS]
        )
    }};
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
