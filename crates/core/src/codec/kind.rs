//! Codecs and their names.

use super::mlx;
use super::row_layout::RowLayout;
use crate::dtype::Dtype;
use crate::limits::MAX_HEAD_DIM;

/// How the row of one token and one head is stored. Keys and values of a cache may have different codecs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Codec {
    /// Elements as f32.
    F32,
    /// Elements as f16, rounded to nearest even; values out of range become infinite.
    F16,
    /// Elements as bf16, rounded to nearest even.
    BF16,
    /// e4m3 values and a scale: `dim + 2` bytes.
    Fp8,
    /// Rotated, elements as f16, rounded to nearest even, without a scale: `2 * dim` bytes. The form in which a cache of codes
    /// keeps its first and last tokens in 16 bits: in the domain of [`Codec::Int8`] and `tq`, rotated and without the mean of keys,
    /// so that outputs over both add up and are rotated back once.
    Rot16,
    /// Rotated, 8-bit integers and a scale: `dim + 2` bytes.
    Int8,
    /// Rotated, 2-bit codebook and a scale: 34 bytes for 128 elements.
    Tq2,
    /// Rotated, 3-bit codebook and a scale: 50 bytes for 128 elements.
    Tq3,
    /// Rotated, 4-bit codebook and a scale: 66 bytes for 128 elements.
    Tq4,
    /// Rotated, 5-bit codebook and a scale: 82 bytes for 128 elements.
    Tq5,
    /// Rotated, 6-bit codebook and a scale: 98 bytes for 128 elements.
    Tq6,
    /// The format of mlx-native with 4 bits as nibbles: rotated, 132 bytes for 256 elements. This and the following
    /// codecs store rows of 256 or 512 elements.
    MlxTq4,
    /// The format of mlx-native with 5 bits in a byte: rotated, 260 bytes for 256 elements.
    MlxTq5,
    /// The format of mlx-native with 6 bits in a byte: rotated, 260 bytes for 256 elements.
    MlxTq6,
    /// The format of mlx-native with 8 bits: rotated, 260 bytes for 256 elements.
    MlxTq8,
    /// Like [`Codec::MlxTq5`], not rotated: values of mlx-native's hybrid caches, whose keys are [`Codec::F16`].
    MlxTq5Plain,
    /// Like [`Codec::MlxTq6`], not rotated.
    MlxTq6Plain,
    /// Like [`Codec::MlxTq8`], not rotated.
    MlxTq8Plain,
}

/// The kind of a codec's rows: plain elements, rotated elements, or codes and scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RowKind {
    /// Plain elements, without a scale.
    Elements(Dtype),
    /// One e4m3 value per byte, and an f16 scale.
    Fp8,
    /// Rotated: elements as f16, without a scale.
    RotatedHalves,
    /// Rotated: codes of `bits` bits in bit planes, or whole bytes, and an f16 scale.
    Integers {
        /// Bits of a code: 2 to 6, or 8 for whole bytes.
        bits: usize,
    },
    /// The format of mlx-native: codes in nibbles or bytes, and an f32 norm for each 256 elements.
    Mlx {
        /// Bits of a code: 4 in a nibble; 5, 6 or 8 in a byte.
        bits: usize,
        /// True if rows are rotated.
        rotated: bool,
    },
}

impl Codec {
    /// The kind of the codec's rows. Every other fact about the format of rows derives from this table.
    #[must_use]
    pub const fn row_kind(self) -> RowKind {
        match self {
            Self::F32 => RowKind::Elements(Dtype::F32),
            Self::F16 => RowKind::Elements(Dtype::F16),
            Self::BF16 => RowKind::Elements(Dtype::BF16),
            Self::Fp8 => RowKind::Fp8,
            Self::Rot16 => RowKind::RotatedHalves,
            Self::Int8 => RowKind::Integers { bits: 8 },
            Self::Tq2 => RowKind::Integers { bits: 2 },
            Self::Tq3 => RowKind::Integers { bits: 3 },
            Self::Tq4 => RowKind::Integers { bits: 4 },
            Self::Tq5 => RowKind::Integers { bits: 5 },
            Self::Tq6 => RowKind::Integers { bits: 6 },
            Self::MlxTq4 => RowKind::Mlx { bits: 4, rotated: true },
            Self::MlxTq5 => RowKind::Mlx { bits: 5, rotated: true },
            Self::MlxTq6 => RowKind::Mlx { bits: 6, rotated: true },
            Self::MlxTq8 => RowKind::Mlx { bits: 8, rotated: true },
            Self::MlxTq5Plain => RowKind::Mlx { bits: 5, rotated: false },
            Self::MlxTq6Plain => RowKind::Mlx { bits: 6, rotated: false },
            Self::MlxTq8Plain => RowKind::Mlx { bits: 8, rotated: false },
        }
    }

    /// Every codec.
    pub const ALL: [Self; 18] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Rot16,
        Self::Fp8,
        Self::Int8,
        Self::Tq6,
        Self::Tq5,
        Self::Tq4,
        Self::Tq3,
        Self::Tq2,
        Self::MlxTq8,
        Self::MlxTq6,
        Self::MlxTq5,
        Self::MlxTq4,
        Self::MlxTq8Plain,
        Self::MlxTq6Plain,
        Self::MlxTq5Plain,
    ];

    /// Returns true if rows of `dim` elements can be stored: 256 or 512 in the format of mlx-native, 1 to [`MAX_HEAD_DIM`] in others.
    #[must_use]
    pub const fn supports(self, dim: usize) -> bool {
        match self.row_kind() {
            RowKind::Mlx { .. } => dim == 256 || dim == 512,
            RowKind::Elements(_) | RowKind::Fp8 | RowKind::RotatedHalves | RowKind::Integers { .. } => {
                dim >= 1 && dim <= MAX_HEAD_DIM
            }
        }
    }

    /// The dimensions of [`Codec::supports`], in words.
    pub(crate) const fn dims(self) -> &'static str {
        match self.row_kind() {
            RowKind::Mlx { .. } => "256 or 512",
            RowKind::Elements(_) | RowKind::Fp8 | RowKind::RotatedHalves | RowKind::Integers { .. } => {
                "1 to 512"
            }
        }
    }

    /// Bytes of a row of `dim` elements, which the codec must [support](Codec::supports); saturating.
    #[must_use]
    pub const fn row_bytes(self, dim: usize) -> usize {
        match self.row_kind() {
            RowKind::Elements(dtype) => dim.saturating_mul(dtype.bytes()),
            RowKind::Fp8 => RowLayout::bytes(dim, 8),
            RowKind::RotatedHalves => dim.saturating_mul(Dtype::F16.bytes()),
            RowKind::Integers { bits } => RowLayout::bytes(dim, bits),
            RowKind::Mlx { bits, .. } => mlx::code_bytes(dim, bits).saturating_add(mlx::norm_bytes(dim)),
        }
    }

    /// Minimum alignment, in bytes, of rows of elements or of pages of codes: the size of an element or of a scale.
    #[must_use]
    pub const fn alignment(self) -> usize {
        match self.row_kind() {
            RowKind::Elements(dtype) => dtype.bytes(),
            RowKind::Fp8 | RowKind::RotatedHalves | RowKind::Integers { .. } => 2,
            RowKind::Mlx { .. } => 4,
        }
    }

    /// The element type, if rows are plain elements.
    #[must_use]
    pub const fn dtype(self) -> Option<Dtype> {
        match self.row_kind() {
            RowKind::Elements(dtype) => Some(dtype),
            RowKind::Fp8 | RowKind::RotatedHalves | RowKind::Integers { .. } | RowKind::Mlx { .. } => None,
        }
    }

    /// The codec that stores plain elements of a dtype.
    #[must_use]
    pub const fn of(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32,
            Dtype::F16 => Self::F16,
            Dtype::BF16 => Self::BF16,
        }
    }

    /// The name used in messages and on the command line: `f32`, `f16`, `bf16`, `rot16`, `fp8`, `int8`, `tq6` to `tq2`, `mlx-tq8`,
    /// `mlx-tq6`, `mlx-tq5`, `mlx-tq4`, and `mlx-tq8-plain`, `mlx-tq6-plain`, `mlx-tq5-plain`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => Dtype::F32.name(),
            Self::F16 => Dtype::F16.name(),
            Self::BF16 => Dtype::BF16.name(),
            Self::Rot16 => "rot16",
            Self::Fp8 => "fp8",
            Self::Int8 => "int8",
            Self::Tq2 => "tq2",
            Self::Tq3 => "tq3",
            Self::Tq4 => "tq4",
            Self::Tq5 => "tq5",
            Self::Tq6 => "tq6",
            Self::MlxTq4 => "mlx-tq4",
            Self::MlxTq5 => "mlx-tq5",
            Self::MlxTq6 => "mlx-tq6",
            Self::MlxTq8 => "mlx-tq8",
            Self::MlxTq5Plain => "mlx-tq5-plain",
            Self::MlxTq6Plain => "mlx-tq6-plain",
            Self::MlxTq8Plain => "mlx-tq8-plain",
        }
    }

    /// The codec of rows that a cache keeps beside its codes ([`CacheDesc::keep_first`](crate::cache::CacheDesc::keep_first)): rotated f16
    /// where codes are rotated, and elements as they are.
    #[must_use]
    pub const fn kept(self) -> Self {
        match self.row_kind() {
            RowKind::Integers { .. } => Self::Rot16,
            RowKind::Elements(_) | RowKind::RotatedHalves | RowKind::Fp8 | RowKind::Mlx { .. } => self,
        }
    }

    /// Returns true if keys can be divided by [factors](super::KeyTransform) before they are stored: the codec rotates them, and its format
    /// is no other library's.
    #[must_use]
    pub const fn supports_key_factors(self) -> bool {
        match self.row_kind() {
            RowKind::Integers { .. } | RowKind::RotatedHalves => true,
            RowKind::Elements(_) | RowKind::Fp8 | RowKind::Mlx { .. } => false,
        }
    }

    /// Returns true if codes stand for integers times a scale.
    pub const fn is_integer(self) -> bool {
        matches!(self.row_kind(), RowKind::Integers { .. })
    }
}

impl std::fmt::Display for Codec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Parses a name of [`Codec::name`].
impl std::str::FromStr for Codec {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|codec| codec.name() == name).ok_or_else(|| {
            let known = Self::ALL.map(Self::name).join(", ");
            format!("{name} is not a codec, expected one of {known}")
        })
    }
}

/// The codec that stores plain elements of a dtype.
impl From<Dtype> for Codec {
    fn from(dtype: Dtype) -> Self {
        Self::of(dtype)
    }
}
