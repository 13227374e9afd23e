//! Instances by what they are for, instead of by their generics.

use crate::codecs::{format_id, hadamard_order, scalar_type};
use crate::encoding;
use crate::kernels::decode::decode;
use crate::kernels::mask_tiles::mask_tiles;
use crate::kernels::merge::merge;
use crate::kernels::prefill::prefill;
use crate::kernels::rotation::hadamard;
use crate::kernels::{cache, encode};
use crate::shape::HEAD_DIMS;
use crate::tile::PortableTile;
use flashtile_core::codec::Codec;
use flashtile_core::dtype::Dtype;
use flashtile_core::limits::MAX_HEAD_DIM;
use flashtile_kernel::source::GenericsError;
use flashtile_kernel::{Generic, Instance, Kernel};

/// What an instance of a kernel is for. Kernels look at what concerns them: [`VariantOption::of`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
    /// What tells the instances of a kernel apart.
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
        /// Whether rows of the kernel are codes.
        codes: bool,
    },
    /// The kernel multiplies elements of the type of q, and the codec is another.
    Rows {
        /// The codec.
        codec: Codec,
        /// Type of q.
        dtype: Dtype,
    },
    /// The kernel is not of this library.
    Kernel {
        /// Its name.
        name: &'static str,
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
            Self::Rows { codec, dtype } => {
                write!(f, "it multiplies elements of the dtype of q: the codec is {codec}, expected {dtype}")
            }
            Self::Kernel { name } => write!(f, "{name} is no kernel of flashtile"),
            Self::Generics(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for VariantError {}

impl Variant {
    /// The instance of [`decode()`](crate::kernels::decode::decode()) or [`prefill()`](crate::kernels::prefill::prefill()) with a
    /// tile, whichever the tile is of.
    ///
    /// # Errors
    /// [`GenericsError`].
    pub fn attend(&self, tile: PortableTile) -> Result<Instance, GenericsError> {
        let (rows, keys, simds) = (tile.rows(), tile.simd_keys() / 16, tile.simds());
        let mut generics = vec![
            Generic::Type(scalar_type(self.dtype)),
            Generic::U32(format_id(self.k_codec)),
            Generic::U32(format_id(self.v_codec)),
            Generic::Usize(self.head_dim),
            Generic::Usize(self.value_dim),
        ];
        if tile.is_prefill() {
            generics.extend([rows / (16 * simds), keys, simds, tile.resident()].map(Generic::Usize));
            return prefill::specialise(&generics);
        }
        generics.extend(
            [rows / 8, keys, simds, tile.copies(self.head_dim.max(self.value_dim))].map(Generic::Usize),
        );
        decode::specialise(&generics)
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

    /// The instance of a kernel of this library, with the tile that plans take where the kernel has one.
    ///
    /// # Errors
    /// [`VariantError`].
    pub fn instance(&self, kernel: &Kernel) -> Result<Instance, VariantError> {
        let concerns = VariantOption::of(kernel);
        let dims = [("head_dim", self.head_dim), ("value_dim", self.value_dim)];
        let codecs = [self.k_codec, self.v_codec];
        for (n, (dim, codec)) in [VariantOption::HeadDim, VariantOption::ValueDim]
            .into_iter()
            .zip([VariantOption::KCodec, VariantOption::VCodec])
            .enumerate()
        {
            let (name, got) = dims[n];
            if concerns.contains(&dim) && !(1..=MAX_HEAD_DIM).contains(&got) {
                return Err(VariantError::Dim { name, got });
            }
            if concerns.contains(&codec) && !codecs[n].supports(got) {
                return Err(VariantError::Codec { codec: codecs[n], got });
            }
        }
        let made = match kernel.name {
            "decode" => self.attend(PortableTile::default_decode(self.k_codec, self.head_dim)),
            "prefill" => {
                if let Some(codec) = codecs.into_iter().find(|&codec| codec != Codec::of(self.dtype)) {
                    return Err(VariantError::Rows { codec, dtype: self.dtype });
                }
                self.attend(PortableTile::default_prefill(self.head_dim.max(self.value_dim)))
            }
            "encode" | "append" | "read_codes" | "read_elements" => {
                let codes = self.k_codec.dtype().is_none();
                if codes != matches!(kernel.name, "encode" | "read_codes") {
                    return Err(VariantError::Stored { codec: self.k_codec, codes: !codes });
                }
                let generics = encoding::encode_generics(self.k_codec, self.dtype, self.head_dim);
                match kernel.name {
                    "encode" => encode::encode::specialise(&generics),
                    "append" => encode::append::specialise(&generics),
                    "read_codes" => cache::read_codes::specialise(&generics),
                    _ => cache::read_elements::specialise(&generics),
                }
            }
            "copy_rows" => cache::copy_rows::specialise(&[]),
            "merge" => self.merge(),
            "hadamard" => hadamard::specialise(&[Generic::Usize(self.head_dim)]),
            "mask_tiles" => mask_tiles::specialise(&[]),
            _ => return Err(VariantError::Kernel { name: kernel.name }),
        };
        made.map_err(VariantError::Generics)
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
        use $crate::kernels::rows::{lane_pairs, lane_words, larger, nibble_bytes, pair_words};
        $crate::kernels::decode::decode::instance::<
            $q,
            { $kf },
            { $vf },
            { $d },
            { $dv },
            { $t },
            { $u },
            { $s },
            { $crate::tile::min_copies(larger($d, $dv)) },
            $k,
            $v,
            { lane_pairs($d, 4) },
            { lane_pairs($dv, 8) },
            { lane_words($kf, $d, 4) },
            { lane_words($vf, $dv, 8) },
            { pair_words(<$k as ::flashtile_kernel::Scalar>::TYPE, $d, 4) },
            { pair_words(<$v as ::flashtile_kernel::Scalar>::TYPE, $dv, 8) },
            { $crate::kernels::formats::hadamard_order($kf, $d) },
            { nibble_bytes($kf, $d, $vf, $dv, $crate::tile::min_copies(larger($d, $dv))) },
            { padded(larger($d, $dv) as u32) as usize },
        >()
    }};
}

/// The instance of [`prefill()`](crate::kernels::prefill::prefill()) with native code: the type of q, keys and values;
/// their format and dimensions; the tile's `M`, `U` and `S`, for one threadgroup a core.
#[macro_export]
macro_rules! native_prefill {
    ([$q:ty] [$format:expr, $d:expr, $dv:expr] [$m:expr, $u:expr, $s:expr]) => {{
        use $crate::kernels::prefill::block_words;
        $crate::kernels::prefill::prefill::instance::<
            $q,
            { $format },
            { $format },
            { $d },
            { $dv },
            { $m },
            { $u },
            { $s },
            1,
            $q,
            $q,
            { $d / 8 },
            { $dv / 8 },
            { block_words($format, $d, $u, $s) },
            { block_words($format, $dv, $u, $s) },
            { 2 * $u },
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
    use crate::kernels::formats;
    use crate::registry::KERNELS;
    use flashtile_core::codec::Coder;

    const PLAIN: Variant = Variant {
        dtype: Dtype::BF16,
        head_dim: 128,
        value_dim: 128,
        k_codec: Codec::BF16,
        v_codec: Codec::BF16,
    };

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

    #[test]
    fn every_kernel_has_an_instance_of_a_plain_problem() {
        let listed: Vec<String> = crate::registry::instances().iter().map(Instance::entry).collect();
        for kernel in KERNELS {
            let codec = match kernel.name {
                "encode" | "read_codes" => Codec::Tq4,
                _ => PLAIN.k_codec,
            };
            let entry = Variant { k_codec: codec, ..PLAIN }.instance(kernel).unwrap().entry();
            assert!(listed.contains(&entry), "{entry}");
        }
    }

    #[test]
    fn registers_are_bounded_for_the_threadgroups_of_a_core() {
        let instance = PLAIN.attend(PortableTile::prefill(128, 32, 8, 2)).unwrap();
        assert_eq!(instance.resident(), 2);
        assert!(instance.source(flashtile_kernel::Target::Cuda).contains("__launch_bounds__(256, 2)"));
    }

    #[test]
    fn what_kernels_are_not_made_for_is_said() {
        let why = |variant: Variant, kernel: &Kernel| variant.instance(kernel).unwrap_err().to_string();
        let long = Variant { head_dim: 513, ..PLAIN };
        assert_eq!(why(long, KERNELS[0]), "head_dim is 513, expected 1 to 512");
        let text = why(Variant { v_codec: Codec::MlxTq4, ..PLAIN }, KERNELS[1]);
        let encode = KERNELS.iter().find(|kernel| kernel.name == "encode").unwrap();
        let stored = why(PLAIN, encode);
        assert_eq!(stored, "its rows are codes and bf16 has none, expected a k-codec such as tq4");
        assert!(text.contains("does not store 128 elements") && text.contains("256"), "{text}");
    }
}
