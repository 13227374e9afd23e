//! The matrix unit: products of 16 x 16 tiles of f32 over pairs of bf16.
//!
//! Each product is one block of assembly, because the toolchain has no stable intrinsics for tiles and nothing else knows their registers.

#![allow(unsafe_code)]

use super::avx512::Avx512;
use crate::kernels::shared::products::amx::{MatrixUnit, TILE, TILE_CHAINS, TileOperands};
use std::arch::asm;

/// Shape of the tile registers: palette 1, eight tiles of 16 rows of 64 bytes.
#[repr(C, align(64))]
struct Config([u8; 64]);

static CONFIG: Config = {
    let mut bytes = [0; 64];
    bytes[0] = 1;
    let mut tile = 0;
    while tile < 8 {
        bytes[16 + 2 * tile] = 64;
        bytes[48 + tile] = TILE as u8;
        tile += 1;
    }
    Config(bytes)
};

/// Assembly of a product of one shape: the instructions that its tiles need. Tiles 0 to 3 are `C`, 4 and 5 `A`, 6 and 7 `B`.
macro_rules! product_block {
    ($steps:ident, $t:ident, $zero:literal, $load:literal, $step:literal, $store:literal) => {
        asm!(
            "test {resume}, {resume}",
            "jnz 3f",
            $zero,
            "jmp 2f",
            "3:",
            $load,
            "2:",
            $step,
            "add {a}, 64",
            "add {a1}, 64",
            "add {b}, {next}",
            "dec {steps}",
            "jnz 2b",
            $store,
            // If a shape has one row of tiles, nothing else names these.
            "# {a1} {c1}",
            resume = in(reg) usize::from($t.resume),
            a = inout(reg) $t.a[0] => _,
            a1 = inout(reg) $t.a[1] => _,
            lda = in(reg) $t.lda,
            b = inout(reg) $t.b => _,
            ldb = in(reg) $t.ldb,
            next = in(reg) TILE * $t.ldb,
            c = in(reg) $t.c,
            c1 = in(reg) $t.c.wrapping_byte_add(TILE * $t.ldc),
            ldc = in(reg) $t.ldc,
            steps = inout(reg) $steps => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    };
}

// SAFETY of every block below: the trait's contract gives the matrix unit and the memory; every such processor supports the configuration.
#[allow(clippy::undocumented_unsafe_blocks)]
impl MatrixUnit for Avx512 {
    #[inline(always)]
    unsafe fn configure() {
        unsafe {
            asm!("ldtilecfg [{config}]", config = in(reg) &raw const CONFIG, options(nostack, readonly));
        }
    }
    #[inline(always)]
    unsafe fn release() {
        unsafe { asm!("tilerelease", options(nostack, nomem)) }
    }
    #[inline(always)]
    unsafe fn product<const M: usize, const N: usize>(steps: usize, t: TileOperands) {
        const { assert!(1 <= M && M <= 2 && 1 <= N && N <= 2) };
        debug_assert!(steps > 0);
        unsafe {
            match (M, N) {
                (2, 2) => product_block!(
                    steps,
                    t,
                    "tilezero tmm0
                     tilezero tmm1
                     tilezero tmm2
                     tilezero tmm3",
                    "tileloadd tmm0, [{c} + {ldc}]
                     tileloadd tmm1, [{c} + {ldc} + 64]
                     tileloadd tmm2, [{c1} + {ldc}]
                     tileloadd tmm3, [{c1} + {ldc} + 64]",
                    "tileloadd tmm4, [{a} + {lda}]
                     tileloadd tmm6, [{b} + {ldb}]
                     tileloadd tmm5, [{a1} + {lda}]
                     tileloadd tmm7, [{b} + {ldb} + 64]
                     tdpbf16ps tmm0, tmm4, tmm6
                     tdpbf16ps tmm2, tmm5, tmm6
                     tdpbf16ps tmm1, tmm4, tmm7
                     tdpbf16ps tmm3, tmm5, tmm7",
                    "tilestored [{c} + {ldc}], tmm0
                     tilestored [{c} + {ldc} + 64], tmm1
                     tilestored [{c1} + {ldc}], tmm2
                     tilestored [{c1} + {ldc} + 64], tmm3"
                ),
                (2, 1) => product_block!(
                    steps,
                    t,
                    "tilezero tmm0
                     tilezero tmm2",
                    "tileloadd tmm0, [{c} + {ldc}]
                     tileloadd tmm2, [{c1} + {ldc}]",
                    "tileloadd tmm4, [{a} + {lda}]
                     tileloadd tmm6, [{b} + {ldb}]
                     tileloadd tmm5, [{a1} + {lda}]
                     tdpbf16ps tmm0, tmm4, tmm6
                     tdpbf16ps tmm2, tmm5, tmm6",
                    "tilestored [{c} + {ldc}], tmm0
                     tilestored [{c1} + {ldc}], tmm2"
                ),
                (1, 2) => product_block!(
                    steps,
                    t,
                    "tilezero tmm0
                     tilezero tmm1",
                    "tileloadd tmm0, [{c} + {ldc}]
                     tileloadd tmm1, [{c} + {ldc} + 64]",
                    "tileloadd tmm4, [{a} + {lda}]
                     tileloadd tmm6, [{b} + {ldb}]
                     tileloadd tmm7, [{b} + {ldb} + 64]
                     tdpbf16ps tmm0, tmm4, tmm6
                     tdpbf16ps tmm1, tmm4, tmm7",
                    "tilestored [{c} + {ldc}], tmm0
                     tilestored [{c} + {ldc} + 64], tmm1"
                ),
                _ => product_block!(
                    steps,
                    t,
                    "tilezero tmm0",
                    "tileloadd tmm0, [{c} + {ldc}]",
                    "tileloadd tmm4, [{a} + {lda}]
                     tileloadd tmm6, [{b} + {ldb}]
                     tdpbf16ps tmm0, tmm4, tmm6",
                    "tilestored [{c} + {ldc}], tmm0"
                ),
            }
        }
    }
    #[inline(always)]
    unsafe fn product_loop(rounds: u64) {
        const { assert!(TILE_CHAINS == 4) };
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "tilezero tmm4",
                "tilezero tmm5",
                "tilezero tmm6",
                "tilezero tmm7",
                "2:",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "dec {rounds}",
                "jnz 2b",
                rounds = inout(reg) rounds.max(1) => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, nomem),
            );
        }
    }
}
