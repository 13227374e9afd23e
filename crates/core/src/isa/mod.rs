//! Instruction sets of codecs and CPU kernels, tokens that prove that the machine has one, and the floating-point environment.

mod float_env;
mod token;

pub use float_env::FloatEnv;
pub use token::IsaToken;
#[cfg(feature = "counters")]
pub use token::counts;

use crate::dtype::Dtype;

/// Instruction set of a CPU kernel: a set of capabilities of one architecture. Sets have no order across architectures; [`Isa::contains`]
/// says which kernels a machine runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Isa {
    /// Plain Rust that the compiler vectorises.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// AVX-512 with VNNI and VBMI: products of quantized keys and values are integers.
    Avx512Vnni,
    /// AVX-512 with VNNI, VBMI and BF16: bf16 problems multiply pairs of bf16 and accumulate in f32.
    Avx512Bf16,
    /// AVX-512 with VNNI, VBMI, BF16 and AMX: bf16 problems multiply bf16 tiles and accumulate in f32.
    Amx,
}

impl Isa {
    /// Every instruction set, the more capable ones of an architecture last.
    pub const ALL: [Self; 6] =
        [Self::Portable, Self::Avx2, Self::Avx512, Self::Avx512Vnni, Self::Avx512Bf16, Self::Amx];

    /// The instruction set whose kernels compute a dtype on a machine that has this one.
    #[must_use]
    pub fn for_dtype(self, dtype: Dtype) -> Self {
        match self {
            Self::Portable | Self::Avx2 => self,
            Self::Avx512 | Self::Avx512Vnni => Self::Avx512,
            Self::Avx512Bf16 | Self::Amx if dtype == Dtype::BF16 => self,
            Self::Avx512Bf16 | Self::Amx => Self::Avx512,
        }
    }

    /// The instruction set whose kernels multiply codes on a machine that has this one: in integers where it has such products.
    #[must_use]
    pub const fn for_codes(self) -> Self {
        match self {
            Self::Portable | Self::Avx2 | Self::Avx512 => self,
            Self::Avx512Vnni | Self::Avx512Bf16 | Self::Amx => Self::Avx512Vnni,
        }
    }

    /// Returns true if a machine that has this instruction set runs the kernels of `other`.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        other.capabilities() & !self.capabilities() == 0
    }

    /// Groups of instructions as bits. Plain Rust needs none; each architecture has bits of its own, here x86-64: AVX2 with FMA and F16C,
    /// AVX-512, VNNI with VBMI, BF16, AMX.
    const fn capabilities(self) -> u32 {
        match self {
            Self::Portable => 0,
            Self::Avx2 => 0b1,
            Self::Avx512 => 0b11,
            Self::Avx512Vnni => 0b111,
            Self::Avx512Bf16 => 0b1111,
            Self::Amx => 0b1_1111,
        }
    }

    /// Name as used in kernel names and on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Vnni => "avx512vnni",
            Self::Avx512Bf16 => "avx512bf16",
            Self::Amx => "amx",
        }
    }

    /// f32 lanes of a vector register.
    #[must_use]
    pub const fn lanes(self) -> usize {
        match self {
            Self::Portable => 4,
            Self::Avx2 => 8,
            Self::Avx512 | Self::Avx512Vnni | Self::Avx512Bf16 | Self::Amx => 16,
        }
    }

    /// Returns true if bf16 problems multiply pairs of bf16, with `p` rounded to bf16.
    #[must_use]
    pub const fn multiplies_pairs(self) -> bool {
        matches!(self, Self::Avx512Bf16 | Self::Amx)
    }
}

impl std::fmt::Display for Isa {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_of_x86_contain_the_smaller_ones() {
        for (n, isa) in Isa::ALL.into_iter().enumerate() {
            for (m, other) in Isa::ALL.into_iter().enumerate() {
                assert_eq!(isa.contains(other), m <= n, "{isa} and {other}");
            }
            for kernels in [isa.for_codes(), isa.for_dtype(Dtype::F32), isa.for_dtype(Dtype::BF16)] {
                assert!(isa.contains(kernels), "{kernels} on {isa}");
            }
        }
    }
}
