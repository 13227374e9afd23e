//! Element types of tensors and masks.

use half::{bf16, f16};

/// Element type of a tensor. Accumulation is f32 or better for all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16: the upper half of a binary32.
    BF16,
}

impl Dtype {
    /// Every dtype.
    pub const ALL: [Self; 3] = [Self::F32, Self::F16, Self::BF16];

    /// Size of one element in bytes.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
        }
    }

    /// Name as used in kernel names and on the command line: `f32`, `f16`, `bf16`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
        }
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Parses a name of [`Dtype::name`].
impl std::str::FromStr for Dtype {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let known = Self::ALL.into_iter().find(|dtype| dtype.name() == name);
        known.ok_or_else(|| format!("{name} is not a dtype, expected f32, f16 or bf16"))
    }
}

/// Kind of a materialised mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum MaskKind {
    /// `true` where the key is visible.
    Bool,
    /// Added to the score. `-inf` hides the key; a NaN makes the row NaN.
    Additive(Dtype),
}

impl MaskKind {
    /// Bytes of an element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bool => 1,
            Self::Additive(dtype) => dtype.bytes(),
        }
    }
}

impl std::fmt::Display for MaskKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Bool => f.write_str("bool"),
            Self::Additive(dtype) => write!(f, "additive {dtype}"),
        }
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

/// A Rust type that stores one element of a [`Dtype`]. Sealed: `f32`, [`half::f16`], [`half::bf16`].
pub trait Element: sealed::Sealed + Copy + Send + Sync + 'static {
    /// The dtype this type stores.
    const DTYPE: Dtype;
    /// The nearest element to `x`, ties to even.
    fn from_f32(x: f32) -> Self;
    /// The exact value as f32.
    fn to_f32(self) -> f32;
}

impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;
    fn from_f32(x: f32) -> Self {
        x
    }
    fn to_f32(self) -> f32 {
        self
    }
}

impl Element for f16 {
    const DTYPE: Dtype = Dtype::F16;
    fn from_f32(x: f32) -> Self {
        Self::from_f32(x)
    }
    fn to_f32(self) -> f32 {
        Self::to_f32(self)
    }
}

impl Element for bf16 {
    const DTYPE: Dtype = Dtype::BF16;
    fn from_f32(x: f32) -> Self {
        Self::from_f32(x)
    }
    fn to_f32(self) -> f32 {
        Self::to_f32(self)
    }
}
