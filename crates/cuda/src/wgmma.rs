//! The instruction `wgmma.mma_async`, printed: its text names every register of the accumulator, so that each number of columns has a text of
//! its own.

use crate::params::dtype_name;
use flashtile_core::dtype::Dtype;
use std::fmt::Write as _;

/// Columns of a product: multiples of 8 up to 256.
pub(crate) const MAX_COLUMNS: usize = 256;

/// `Wgmma<T, columns>` of the native kernels, for f16 and bf16.
///
/// Its functions add the product of 64 rows of `a` and `columns` columns of `b` to `c`, over 16 elements of the sum; without `accumulate`
/// they replace `c`. `shared` takes both operands from shared memory, where rows of both run along the sum, `shared_mn_major` with the
/// columns of `b` along the sum, and `shared_both_mn_major` with the columns of both. `registers` takes `a` from registers and `b` from shared memory, its columns along the sum.
pub(crate) fn source(columns: usize) -> String {
    assert!(columns.is_multiple_of(8) && (8..=MAX_COLUMNS).contains(&columns), "{columns} columns");
    let mut source = String::new();
    for (dtype, name) in [(Dtype::F16, "f16"), (Dtype::BF16, "bf16")] {
        let registers = columns / 2;
        let list = |from: usize, count: usize| {
            (from..from + count).map(|n| format!("%{n}")).collect::<Vec<_>>().join(", ")
        };
        let accumulator = list(0, registers);
        let bound = (0..registers).map(|n| format!("\"+f\"(c[{n}])")).collect::<Vec<_>>().join(", ");
        let text = |a: &str, b: usize, flags: &str| {
            let accumulate = b + 1;
            format!(
                "{{ .reg .pred p; setp.ne.b32 p, %{accumulate}, 0; wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{name}.{name} \
                 {{{accumulator}}}, {a}, %{b}, p, 1, 1{flags}; }}"
            )
        };
        let from_shared = text(&format!("%{registers}"), registers + 1, ", 0, 0");
        let from_shared_mn = text(&format!("%{registers}"), registers + 1, ", 0, 1");
        let from_shared_both_mn = text(&format!("%{registers}"), registers + 1, ", 1, 1");
        let from_registers = text(&format!("{{{}}}", list(registers, 4)), registers + 4, ", 1");
        let cpp = dtype_name(dtype);
        // Writing to a string does not fail.
        let _ = write!(
            source,
            "template <>
struct Wgmma<{cpp}, {columns}> {{
    DEVICE static void shared(float (&c)[{registers}], u64 a, u64 b, bool accumulate) {{
        asm volatile(\"{from_shared}\" : {bound} : \"l\"(a), \"l\"(b), \"r\"((u32)accumulate) : \"memory\");
    }}
    DEVICE static void shared_mn_major(float (&c)[{registers}], u64 a, u64 b, bool accumulate) {{
        asm volatile(\"{from_shared_mn}\" : {bound} : \"l\"(a), \"l\"(b), \"r\"((u32)accumulate) : \"memory\");
    }}
    DEVICE static void shared_both_mn_major(float (&c)[{registers}], u64 a, u64 b, bool accumulate) {{
        asm volatile(\"{from_shared_both_mn}\" : {bound} : \"l\"(a), \"l\"(b), \"r\"((u32)accumulate) : \"memory\");
    }}
    DEVICE static void registers(float (&c)[{registers}], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, bool accumulate) {{
        asm volatile(\"{from_registers}\" : {bound} : \"r\"(a0), \"r\"(a1), \"r\"(a2), \"r\"(a3), \"l\"(b), \"r\"((u32)accumulate) : \"memory\");
    }}
}};
"
        );
    }
    source
}

/// The declaration of `Wgmma`, and its definitions for some numbers of columns.
pub(crate) fn sources(columns: &[usize]) -> String {
    let declaration = "template <Dtype T, int N>\nstruct Wgmma;\n".to_owned();
    std::iter::once(declaration).chain(columns.iter().map(|&n| source(n))).collect()
}
