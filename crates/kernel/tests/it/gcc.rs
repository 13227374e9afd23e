//! Printed CUDA on the host: a C++ compiler, given definitions of the words of CUDA that the printed source uses, makes a program
//! of it. `FLASHTILE_CXX` is the compiler; without it the tests say that they did not run.

use flashtile_kernel::{Instance, Target};
use std::path::PathBuf;
use std::process::Command;

/// The declarations that NVRTC has built in. Instructions are left out, except conversions of halves.
const CUDA: &str = r#"
#include <cmath>
#include <cstdint>
#include <cstdio>
#define __device__
#define __constant__ static
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __align__(n) alignas(n)
#define __launch_bounds__(n)
#define FT_ROUND_F16(y, x) { const _Float16 ft_half = _Float16(x); __builtin_memcpy(&(y), &ft_half, 2); }
#define FT_WIDEN_F16(y, x) { _Float16 ft_half; __builtin_memcpy(&ft_half, &(x), 2); y = float(ft_half); }
struct Place { unsigned x, y, z; };
static Place threadIdx, blockIdx, blockDim, gridDim;
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
inline void __syncthreads() {}
inline void __syncwarp() {}
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }
inline unsigned __brev(unsigned x) {
    unsigned y = 0;
    for (int n = 0; n < 32; n++) { y = (y << 1) | ((x >> n) & 1); }
    return y;
}
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
template <typename T> T __shfl_sync(unsigned, T x, int) { return x; }
template <typename T> T __shfl_xor_sync(unsigned, T x, int) { return x; }
inline unsigned __ballot_sync(unsigned, bool x) { return x; }
inline int __any_sync(unsigned, bool x) { return x; }
inline int __all_sync(unsigned, bool x) { return x; }
"#;

/// Runs threads one after another; `setup` declares the arguments, and the words of `out` are returned. Says so, and
/// returns nothing, where there is no compiler.
pub(crate) fn run(instance: &Instance, setup: &str, call: &str, groups: u32, out: usize) -> Option<Vec<u32>> {
    let Some(compiler) = std::env::var_os("FLASHTILE_CXX") else {
        eprintln!("SKIPPED: printed CUDA is not run on the host, FLASHTILE_CXX is not set");
        return None;
    };
    let source = instance.source(Target::Cuda);
    let source: Vec<&str> = source
        .lines()
        .map(|line| match line.trim_start() {
            line if line.starts_with("asm(\"cvt.rn.f16.f32") => "FT_ROUND_F16(y.bits, x)",
            line if line.starts_with("asm(\"cvt.f32.f16") => "FT_WIDEN_F16(y, x.bits)",
            line if line.starts_with("asm(") => "",
            _ => line,
        })
        .collect();
    let source = source.join("\n");
    let (entry, threads) = (instance.entry(), instance.threads().most());
    let program = format!(
        "{CUDA}{source}\n{setup}\nstatic uint ft_out[{out}];\nint main() {{\n\
         blockDim = {{{threads}, 1, 1}};\ngridDim = {{{groups}, 1, 1}};\n\
         for (blockIdx.x = 0; blockIdx.x < {groups}; ++blockIdx.x) {{\n\
         for (threadIdx.x = 0; threadIdx.x < {threads}; ++threadIdx.x) {{\n{entry}({call});\n}}\n}}\n\
         for (uint x : ft_out) {{ printf(\"%u\\n\", x); }}\n}}\n"
    );
    let folder = std::env::temp_dir();
    let name = |extension: &str| folder.join(format!("flashtile-{entry}-{}{extension}", std::process::id()));
    let (source, binary): (PathBuf, PathBuf) = (name(".cpp"), name(""));
    std::fs::write(&source, program).unwrap();
    // Undefined behaviour of C++ stops the program.
    let compiled = Command::new(compiler)
        .args([
            "-std=c++17",
            "-O1",
            "-ffp-contract=off",
            "-fsanitize=undefined",
            "-fsanitize-undefined-trap-on-error",
        ])
        .args(["-Wno-unknown-pragmas", "-o"])
        .args([&binary, &source])
        .output()
        .unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let ran = Command::new(&binary).output().unwrap();
    assert!(ran.status.success(), "{}: {}", binary.display(), ran.status);
    std::fs::remove_file(source).unwrap();
    std::fs::remove_file(binary).unwrap();
    Some(String::from_utf8(ran.stdout).unwrap().lines().map(|line| line.parse().unwrap()).collect())
}
