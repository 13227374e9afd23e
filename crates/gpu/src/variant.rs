//! Instances by what they are for, instead of by their generics.

use crate::codecs::hadamard_order;
use crate::encoding;
use crate::kernels::encode;
use crate::kernels::mask_tiles::mask_tiles;
use crate::kernels::rotation::hadamard;
use crate::plan::{DIM_STEP, MAX_DIM, Tile, decode_instance, merge_instance};
use flashtile_core::codec::Codec;
use flashtile_core::dtype::Dtype;
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
    /// Whether keys and values are found through a table of pages.
    pub paged: bool,
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
    /// [`Variant::paged`].
    Paged,
}

impl VariantOption {
    /// What tells the instances of a kernel apart.
    #[must_use]
    pub fn of(kernel: &Kernel) -> &'static [Self] {
        use VariantOption::{Dtype, HeadDim, KCodec, Paged, VCodec, ValueDim};
        match kernel.name {
            "decode" => &[Dtype, HeadDim, ValueDim, KCodec, VCodec, Paged],
            "merge" => &[Dtype, ValueDim, VCodec],
            "encode" => &[Dtype, HeadDim, KCodec],
            "append" => &[Dtype, KCodec],
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
            Self::Paged => "paged",
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
    /// The kernel stores codes, and the codec has elements; or the other way round.
    Stored {
        /// The codec.
        codec: Codec,
        /// Whether the kernel stores codes.
        codes: bool,
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
                write!(f, "{name} is {got}, expected a multiple of {DIM_STEP} up to {MAX_DIM}")
            }
            Self::Codec { codec, got } => {
                let dims = crate::registry::HEAD_DIMS.into_iter().filter(|&dim| supports(*codec, dim));
                let dims: Vec<String> = dims.map(|dim| dim.to_string()).collect();
                write!(
                    f,
                    "{codec} does not store {got} elements, expected a dimension such as {}",
                    dims.join(", ")
                )
            }
            Self::Stored { codec, codes: true } => {
                write!(f, "it stores codes and {codec} has none, expected a k-codec such as tq4")
            }
            Self::Stored { codec, .. } => {
                write!(f, "it stores elements and {codec} has codes, expected the k-codec f32, f16 or bf16")
            }
            Self::Kernel { name } => write!(f, "{name} is no kernel of flashtile"),
            Self::Generics(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for VariantError {}

/// Whether rows of a codec are stored, and rotated by kernels where the codec rotates.
fn supports(codec: Codec, dim: usize) -> bool {
    let order = hadamard_order(codec, dim) as usize;
    codec.supports(dim) && (order == 0 || rotates(dim, order))
}

fn rotates(dim: usize, order: usize) -> bool {
    dim.is_multiple_of(order) && (dim / order).is_power_of_two()
}

impl Variant {
    /// The instance of a kernel of this library, as text: for rows that are at multiples of 16 bytes and, where the kernel has one, the
    /// tile that plans take.
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
            if concerns.contains(&dim) && (!got.is_multiple_of(DIM_STEP) || got > MAX_DIM || got == 0) {
                return Err(VariantError::Dim { name, got });
            }
            if concerns.contains(&codec) && !supports(codecs[n], got) {
                return Err(VariantError::Codec { codec: codecs[n], got });
            }
        }
        let made = match kernel.name {
            "decode" => {
                let (dims, tile) = ([self.head_dim, self.value_dim], Tile::of(self.k_codec, self.head_dim));
                decode_instance(self.dtype, codecs, dims, [16; 2], tile, self.paged)
            }
            "encode" | "append" => {
                let codes = self.k_codec.dtype().is_none();
                if codes != (kernel.name == "encode") {
                    return Err(VariantError::Stored { codec: self.k_codec, codes: !codes });
                }
                let generics = encoding::encode_generics(self.k_codec, self.dtype, self.head_dim);
                if codes {
                    encode::encode::specialise(&generics)
                } else {
                    encode::append::specialise(&generics)
                }
            }
            "merge" => merge_instance(self.dtype, self.v_codec, self.value_dim),
            "hadamard" => {
                if !supports(Codec::Int8, self.head_dim) {
                    return Err(VariantError::Codec { codec: Codec::Int8, got: self.head_dim });
                }
                let order = hadamard_order(Codec::Int8, self.head_dim);
                hadamard::specialise(&[Generic::Usize(self.head_dim), Generic::U32(order)])
            }
            "mask_tiles" => mask_tiles::specialise(&[]),
            _ => return Err(VariantError::Kernel { name: kernel.name }),
        };
        made.map_err(VariantError::Generics)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::KERNELS;

    const PLAIN: Variant = Variant {
        dtype: Dtype::BF16,
        head_dim: 128,
        value_dim: 128,
        k_codec: Codec::BF16,
        v_codec: Codec::BF16,
        paged: false,
    };

    #[test]
    fn every_kernel_has_an_instance_of_a_plain_problem() {
        let listed: Vec<String> = crate::registry::instances().iter().map(Instance::entry).collect();
        for kernel in KERNELS {
            let codec = if kernel.name == "encode" { Codec::Tq4 } else { PLAIN.k_codec };
            let entry = Variant { k_codec: codec, ..PLAIN }.instance(kernel).unwrap().entry();
            assert!(listed.contains(&entry), "{entry}");
        }
    }

    #[test]
    fn what_kernels_are_not_made_for_is_said() {
        let why = |variant: Variant, kernel: &Kernel| variant.instance(kernel).unwrap_err().to_string();
        let odd = Variant { head_dim: 72, ..PLAIN };
        assert_eq!(why(odd, KERNELS[0]), "head_dim is 72, expected a multiple of 16 up to 512");
        let text = why(Variant { v_codec: Codec::MlxTq4, ..PLAIN }, KERNELS[1]);
        let encode = KERNELS.iter().find(|kernel| kernel.name == "encode").unwrap();
        let stored = why(PLAIN, encode);
        assert_eq!(stored, "it stores codes and bf16 has none, expected a k-codec such as tq4");
        assert!(text.contains("does not store 128 elements") && text.contains("256"), "{text}");
    }
}
