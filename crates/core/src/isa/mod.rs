//! Instruction sets of codecs and CPU kernels, tokens that prove that the machine has one, and the floating-point environment.

mod float_env;
mod token;

pub use float_env::FloatEnv;
pub use token::IsaToken;
#[cfg(feature = "counters")]
pub use token::counts;

use crate::dtype::Dtype;

/// Instruction set of a CPU kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
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
    /// Every instruction set. On one architecture, each is a superset of those before it.
    pub const ALL: [Self; 6] =
        [Self::Portable, Self::Avx2, Self::Avx512, Self::Avx512Vnni, Self::Avx512Bf16, Self::Amx];

    /// The instruction set whose kernels compute a dtype on a machine that has this one.
    #[must_use]
    pub fn for_dtype(self, dtype: Dtype) -> Self {
        if self.multiplies_pairs() && dtype == Dtype::BF16 { self } else { self.min(Self::Avx512) }
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
