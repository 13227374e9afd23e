//! Printed CUDA, compiled by NVRTC without any header: every function of the preludes, for every type it takes.
//!
//! `FLASHTILE_NVRTC` is the path of libnvrtc; without it the tests say that they did not run.
#![allow(unsafe_code)]

use crate::natives::{buffer, generic, kernel};
use flashtile_kernel::source::{ElementType, GenericKind, Parameter, ParameterKind};
use flashtile_kernel::{Generic, Instance, Kernel, ScalarType, Target};
use std::ffi::{CString, c_char, c_int, c_void};
use std::path::PathBuf;
use std::ptr::{null, null_mut};

type Program = *mut c_void;

/// Compiles an instance's source for CUDA; a warning is an error. Says so where there is no compiler.
pub(crate) fn compiles(instance: &Instance, options: &[&str]) {
    let Some(nvrtc) = Nvrtc::find() else { return };
    let source = instance.source(Target::Cuda);
    let options = [&["--std=c++17", "--gpu-architecture=compute_80"], options].concat();
    if let Err(log) = nvrtc.compile(&source, &options) {
        panic!("{}:\n{}\n{log}", instance.entry(), numbered(&source));
    }
}

fn numbered(source: &str) -> String {
    source.lines().enumerate().map(|(n, line)| format!("{:4} {line}\n", n + 1)).collect()
}

/// The functions of NVRTC that compile a program.
pub(crate) struct Nvrtc {
    library: libloading::Library,
    /// The library that NVRTC opens by its bare name: the loader finds it because it is open already.
    _builtins: Vec<libloading::Library>,
}

impl Nvrtc {
    pub(crate) fn find() -> Option<Self> {
        let Some(path) = std::env::var_os("FLASHTILE_NVRTC") else {
            eprintln!("SKIPPED: printed CUDA is not compiled, FLASHTILE_NVRTC is not set");
            return None;
        };
        let path = PathBuf::from(path);
        let beside = path.parent().and_then(|folder| folder.read_dir().ok()).into_iter().flatten().flatten();
        let builtins = beside.map(|entry| entry.path()).filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("libnvrtc-builtins.so")
        });
        // SAFETY: the tester names NVIDIA's compiler, whose initialisers have no preconditions.
        let open =
            |path: PathBuf| unsafe { libloading::Library::new(path) }.expect("FLASHTILE_NVRTC is a library");
        Some(Self { _builtins: builtins.map(open).collect(), library: open(path) })
    }

    /// The PTX of `source`, or the compiler's log.
    pub(crate) fn compile(&self, source: &str, options: &[&str]) -> Result<String, String> {
        let source = CString::new(source).unwrap();
        let options: Vec<CString> = options.iter().map(|o| CString::new(*o).unwrap()).collect();
        let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        let mut program: Program = null_mut();
        // SAFETY: the signatures are as in nvrtc.h; every pointer outlives its call, sizes are asked for first.
        unsafe {
            type Create = unsafe extern "C" fn(
                *mut Program,
                *const c_char,
                *const c_char,
                c_int,
                *const *const c_char,
                *const *const c_char,
            ) -> c_int;
            type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
            type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
            type Get = unsafe extern "C" fn(Program, *mut c_char) -> c_int;
            let create = self.library.get::<Create>(b"nvrtcCreateProgram").unwrap();
            let compile = self.library.get::<Compile>(b"nvrtcCompileProgram").unwrap();
            assert_eq!(create(&mut program, source.as_ptr(), c"kernel.cu".as_ptr(), 0, null(), null()), 0);
            let code = compile(program, pointers.len() as c_int, pointers.as_ptr());
            let read = |size: &[u8], get: &[u8]| {
                let mut bytes = 0;
                assert_eq!(self.library.get::<Size>(size).unwrap()(program, &mut bytes), 0);
                let mut out = vec![0u8; bytes];
                assert_eq!(self.library.get::<Get>(get).unwrap()(program, out.as_mut_ptr().cast()), 0);
                String::from_utf8_lossy(&out).trim_end_matches('\0').to_owned()
            };
            let log = read(b"nvrtcGetProgramLogSize", b"nvrtcGetProgramLog");
            if code == 0 && log.is_empty() { Ok(read(b"nvrtcGetPTXSize", b"nvrtcGetPTX")) } else { Err(log) }
        }
    }

    /// The PTX of a kernel for an architecture; a warning is an error.
    fn ptx(&self, kernel: &'static Kernel, generics: &[Generic], arch: &str) -> String {
        let source = Instance::new(kernel, generics, None).unwrap().source(Target::Cuda);
        let mut options = vec!["--std=c++17", "-DFT_CONSTANT_wide=true", arch];
        if kernel.exact {
            options.push("--fmad=false");
        }
        self.compile(&source, &options)
            .unwrap_or_else(|log| panic!("{} for {generics:?}:\n{log}\n{}", kernel.name, numbered(&source)))
    }
}

const T: ElementType = ElementType::Generic(0);
static X: [Parameter; 4] = [
    buffer("x", T),
    buffer("bytes", ElementType::Scalar(ScalarType::U8)),
    buffer("words", ElementType::Scalar(ScalarType::U32)),
    buffer("floats", ElementType::Scalar(ScalarType::F32)),
];

static NUMBERS: Kernel = kernel(
    "numbers",
    &X,
    &[generic("T", GenericKind::Number)],
    "const auto i = ft_thread_position(ft);
T a = x[i];
T b = x[i + 1];
a = ft_simd_sum(ft, a) + ft_simd_max(ft, b) + ft_simd_min(ft, a);
a += ft_simd_shuffle(ft, a, i) + ft_simd_shuffle_xor(ft, a, 3) + ft_simd_broadcast(ft, a, 0);
a += ft_simd_prefix_sum(ft, a) + ft_simd_prefix_sum_inclusive(ft, a);
ft_barrier(ft);
ft_simd_barrier(ft);
a = ft_min(a, 1) + ft_max(a, b) + ft_clamp(a, 1, 3) + ft_rem(a, b) + ft_select(a < b, a, b);
a += ft_max_of<T>() + ft_min_of<T>();
a += ft_cast<T>(ft_cast<uint>(a)) + ft_cast<T>(ft_cast<int>(a)) + ft_cast<T>(ft_cast<ulong>(a));
a += ft_cast<T>(ft_cast<ft_i64>(a)) + ft_cast<T>(ft_cast<size_t>(a)) + ft_cast<T>(ft_cast<float>(a));
a += ft_cast<T>(ft_cast<uchar>(a)) + ft_cast<T>(ft_cast<ft_i8>(a)) + ft_cast<T>(ft_cast<ushort>(a));
a += ft_cast<T>(ft_cast<short>(a));
FT_SHARED_ARRAY(T, tile, 64);
tile[ft_thread_index(ft) % 64] = a;
ft_barrier(ft);
const auto four = ft_load<4>(tile, 4 * (i % 8));
ft_store(x, 4 * i, four);
ft_store_as(bytes, 16 * i, ft_load_as<uint, 4>(x, 4 * i));
ft_array<ft_array<T, 2>, 2> nested = {{{{a, b}}, {{b, a}}}};
nested[i % 2][1] = four[i % 4];
const auto pair = ft_array_of(nested[0][1], nested[1][i % 2]);
const auto same = ft_repeat<3>(pair[0]);
x[i] = a + same[2];
",
);

static INTEGERS: Kernel = kernel(
    "integers",
    &X,
    &[generic("T", GenericKind::Number)],
    "const auto i = ft_thread_position(ft);
T a = x[i];
T b = x[i + 1];
a = ft_wrapping_add(a, 1) ^ ft_wrapping_sub(a, b) ^ ft_wrapping_mul(a, b) ^ ft_wrapping_neg(b);
a ^= ft_wrapping_shl(a, 40u) ^ ft_wrapping_shr(b, i) ^ ft_saturating_add(a, b) ^ ft_saturating_sub(a, 2);
a ^= ft_rotate_left(a, i) ^ ft_rotate_right(b, 3u) ^ ft_reverse_bits(a) ^ ft_pow(b, 3u) ^ ft_not(a);
a ^= T(ft_abs_diff(a, b)) ^ ft_div_ceil(a, b) ^ T(ft_unsigned_abs(a)) ^ T(ft_is_multiple_of(a, 3));
const uint n = ft_count_ones(a) + ft_leading_zeros(b) + ft_trailing_zeros(a) + ft_bits_of<T>();
x[i] = a ^ T(n);
",
);

static ELEMENTS: Kernel = kernel(
    "elements",
    &X,
    &[generic("T", GenericKind::Element)],
    "const auto i = ft_thread_position(ft);
const float a = ft_to_f32(x[i]);
x[i + 1] = ft_from_f32<T>(a * 2.0f);
x[i + 2] = ft_from_bits<T>(ft_to_bits(x[i]));
FT_SHARED_ARRAY(T, tile, 64 * 4);
ft_store(tile, 8 * (i % 8), ft_load<8>(x, 8 * i));
ft_barrier(ft);
auto f = ft_fragment_load<T>(ft, tile, 0u, 8u);
auto g = ft_fragment_load_transposed<T>(ft, x, i, 8u);
ft_fragment_set_element(f, 0, ft_fragment_element(g, 1));
auto c = ft_fragment_zero<float>();
c = ft_fragment_multiply_accumulate(ft, f, g, c);
c = ft_fragment_multiply_accumulate(ft, ft_fragment_filled<T>(x[0]), g, c);
ft_fragment_store(ft, c, floats, 0u, 8u);
ft_fragment_store(ft, f, x, 64u, 8u);
const auto w = ft_load_as<uint, 2>(bytes, 8 * i);
ft_store_as(x, 4 * i, w);
",
);

static FLOATS: Kernel = kernel("floats_of", &X, &[generic("T", GenericKind::Number)], FLOAT_BODY);
static EXACT: Kernel =
    Kernel { exact: true, ..kernel("exact", &X, &[generic("T", GenericKind::Number)], FLOAT_BODY) };
const FLOAT_BODY: &str = "const auto i = ft_thread_position(ft);
float a = floats[i];
a += ft_exp2(a) + ft_exp(a) + ft_log2(a) + ft_ln(a) + ft_sqrt(a) + ft_rsqrt(a) + ft_abs(a) + ft_floor(a);
a += ft_ceil(a) + ft_trunc(a) + ft_round_ties_even(a) + ft_mul_add(a, a, 1) + ft_tanh(a) + ft_sin(a) + ft_cos(a);
a += ft_powf(a, 2) + ft_copysign(a, -1) + ft_from_bits<float>(ft_to_bits(a));
a += ft_infinity + -ft_infinity + ft_nan + ft_min_positive + ft_epsilon;
if (ft_is_nan(a) || ft_is_finite(a) && !ft_is_infinite(a)) {
    a = a * a + 1.0f;
}
floats[i] = a;
";

static WORDS: Kernel = kernel(
    "words_of",
    &[
        buffer("words", ElementType::Scalar(ScalarType::U32)),
        buffer("floats", ElementType::Scalar(ScalarType::F32)),
        buffer("ints", ElementType::Scalar(ScalarType::I32)),
        Parameter { name: "wide", cpp: "wide", kind: ParameterKind::Constant(ScalarType::Bool) },
    ],
    &[
        generic("N", GenericKind::Const(ScalarType::Usize)),
        generic("M", GenericKind::Const(ScalarType::I32)),
        generic("B", GenericKind::Const(ScalarType::Bool)),
    ],
    "const auto i = ft_thread_position(ft);
uint w = words[i];
int n = ft_dot4(w, w, 1);
n = ft_dot4_unsigned(w, w, n);
w = ft_byte_permute(w, w + 1, 0x5410u);
w = ft_f16x2_mul_add(w, w, w) ^ ft_f16x2_from(1.0f, 2) ^ ft_f16x2_from_e4m3(w);
floats[i] = ft_pair_f16(w)[0] + ft_pair_bf16(w)[1];
w ^= ft_simd_ballot(ft, w > 3);
if (ft_simd_any(ft, w == 1) || ft_simd_all(ft, w == 1) || wide || B) {
    n += M;
}
FT_SHARED_ARRAY(uint, counts, N);
FT_SHARED_ARRAY(float, sums, N);
n += ft_atomic_add(ints, i, 1) + ft_atomic_max(ints, i, n) + ft_atomic_min(ints, i, n) + ft_atomic_exchange(ints, i, 7);
w ^= ft_atomic_add(words, i, 1) ^ ft_atomic_and(counts, 0, w) ^ ft_atomic_or(words, i, 1) ^ ft_atomic_xor(words, i, w);
w ^= ft_atomic_compare_exchange(counts, 0, w, 2) ^ ft_atomic_max(counts, 0, 3) ^ ft_atomic_min(words, 0, 3);
floats[i] += ft_atomic_add(sums, 0, 1) + ft_atomic_add(floats, 0, 1.5f);
w += ft_simd_lane(ft) + ft_simd_index(ft) + ft_simd_groups(ft) + ft_threads(ft);
w += ft_group_x(ft) + ft_group_y(ft) + ft_group_z(ft) + ft_groups_x(ft) + ft_groups_y(ft) + ft_groups_z(ft);
FT_UNROLL
for (uint k = 0; k < N; k++) {
    w += words[k];
}
words[i] = w ^ uint(n) ^ uint(ft_not(wide));
",
);

const ARCHITECTURES: [&str; 3] =
    ["--gpu-architecture=compute_75", "--gpu-architecture=compute_80", "--gpu-architecture=sm_90a"];

#[test]
fn every_function_compiles_for_every_type() {
    let Some(nvrtc) = Nvrtc::find() else { return };
    use ScalarType::*;
    for arch in ARCHITECTURES {
        for scalar in [U32, I32, U64, I64, Usize, F32] {
            nvrtc.ptx(&NUMBERS, &[Generic::Type(scalar)], arch);
        }
        for scalar in [U32, I32, U64, I64, Usize] {
            nvrtc.ptx(&INTEGERS, &[Generic::Type(scalar)], arch);
        }
        for scalar in [F32, F16, Bf16] {
            nvrtc.ptx(&ELEMENTS, &[Generic::Type(scalar)], arch);
        }
        nvrtc.ptx(&WORDS, &[Generic::Usize(8), Generic::I32(-3), Generic::Bool(true)], arch);
    }
}

#[test]
fn an_exact_kernel_neither_contracts_nor_approximates() {
    let Some(nvrtc) = Nvrtc::find() else { return };
    let generics = [Generic::Type(ScalarType::F32)];
    let fast = nvrtc.ptx(&FLOATS, &generics, ARCHITECTURES[1]);
    let exact = nvrtc.ptx(&EXACT, &generics, ARCHITECTURES[1]);
    let fused = |ptx: &str| ptx.matches("fma.rn.f32").count();
    assert!(fast.contains("ex2.approx.ftz.f32"));
    assert!(fused(&exact) < fused(&fast), "{} and {}", fused(&exact), fused(&fast));
}

#[test]
fn vectors_are_single_instructions() {
    let Some(nvrtc) = Nvrtc::find() else { return };
    let ptx = nvrtc.ptx(&ELEMENTS, &[Generic::Type(ScalarType::Bf16)], ARCHITECTURES[1]);
    for instruction in ["ld.global.v4", "st.shared.v4", "ld.global.nc.v2"] {
        assert!(ptx.contains(instruction), "{instruction}\n{ptx}");
    }
}
