//! Checks Metal Shading Language without an Apple machine: clang compiles a program against a strict stand-in for
//! `<metal_stdlib>`, and its kernels run on the CPU, with threadgroups, barriers, SIMD-groups of 32 lanes and 8x8 matrices.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use flashtile_msl_standin::{Buffer, Compiler};
//!
//! let library = Compiler::find()?.compile(
//!     "#include <metal_stdlib>
//!      using namespace metal;
//!      kernel void twice(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] *= 2; }",
//! )?;
//! let mut x: Vec<u8> = [1.0f32, 2.0].iter().flat_map(|v| v.to_ne_bytes()).collect();
//! library.kernel("twice", &[])?.run([1, 1, 1], [2, 1, 1], &mut [Buffer::write(0, &mut x)], &[])?;
//! # Ok(())
//! # }
//! ```
//!
//! # Checks
//!
//! The tokens of a program are checked first. Clang then compiles it as C++ for OpenCL, whose types have address spaces.
//!
//! - Address spaces: `device`, `constant`, `threadgroup` and `thread` do not convert to each other, not even by casts, and
//!   `*` or `&` after the name of a type needs one of them. `constant` memory is read-only.
//! - Attributes: every parameter of a kernel has exactly one attribute that gives its value, of the right type and different from
//!   the others; positions and sizes are all scalars or all vectors; unknown attributes are refused everywhere.
//! - Types: no `double` (a literal without a suffix is a float, as in Metal), no `long long`, no implicit conversion
//!   between vectors, no C-style cast of vectors; `as_type` checks sizes. `half` and `bfloat` round after each operation.
//! - Matrices: `thread_elements()` returns a type of Apple's own, whose elements 0 and 1 can be assigned one at a time.
//! - Functions of the library take exactly the types that the specification lists, so that `exp(1)`,
//!   `min(1, 2u)`, `exp(bfloat)` and `simd_sum(bfloat)` fail.
//! - No `goto`, `new`, exceptions, lambdas, strings, `std::`, recursion of a function with one definition, variables at
//!   program scope outside of `constant`, and threadgroup variables outside of kernels.
//! - Function constants that a kernel uses have to be set, with their declared type, unless the program asks
//!   `is_function_constant_defined`.
//! - All warnings of `-Wall -Wextra` are errors, except for unused names.
//!
//! A run checks each access to memory: it must be inside a buffer or threadgroup memory, aligned, and no write to a buffer that
//! is bound for reading. Barriers must be reached by all threads of the threadgroup, and SIMD-group operations by all lanes
//! (lanes that have returned are inactive, as in Metal: their values may not be read, and matrices need all 32 lanes). Threadgroup
//! memory is limited to 32 KiB and starts as NaN. Two accesses to a byte by different threads, at least one of them a write and
//! not both atomic, are a race unless a `threadgroup_barrier` (or a `simdgroup_barrier` within a SIMD-group) whose flags name
//! the memory lies between them. The threadgroups of a grid are never ordered, and SIMD-group operations order no memory.
//!
//! # Runs on memory of the host
//!
//! [`Kernel::run`] copies its buffers. [`Kernel::run_on`] binds [`Allocation`]s, which have an identity, and is what a software
//! Metal device needs:
//!
//! - Buffers bound to one allocation are one memory: a write through one of them races with a read through another, and a kernel
//!   may go from one into the other. It may access an allocation from the smallest bound offset on, up to the allocation's end,
//!   and write from the smallest writable offset on.
//! - It returns the bytes that the run read and wrote ([`Accesses`]), by address and not by change; [`Accesses::conflicts`]
//!   tells whether two dispatches need a barrier between them.
//! - Threadgroups run in the order of the grid or in a random one ([`Order`]), since Metal promises none.
//! - Time and memory follow what a kernel touches, not what is bound. Races are found with 12 KiB beside each 1024 bytes that are
//!   touched (48 KiB, where a kernel accesses less than 4 bytes at a time), and 4 bytes beside the others.
//!
//! [`Kernel::arguments`], [`Kernel::max_threads`], [`Kernel::static_threadgroup_bytes`] and [`Library::constants`] are the
//! reflection that a device and its hosts ask for. [`Compiler`], [`Library`] and [`Kernel`] are [`Send`] and [`Sync`]; runs of one
//! library wait for each other.
//!
//! # Limits
//!
//! - Apple's compiler differs from clang: a program that passes here may still be refused there.
//! - Vector comparisons give vectors of integers, and there is no `bool4`; `half4 * 2.0f` is refused, though Metal may
//!   accept it. Matrices (`float4x4`), textures, argument buffers, quad-group functions and lambdas are missing.
//! - A `constant` member function accepts objects in `device` memory too.
//! - Address spaces of pointers whose type is spelled by a template argument (`using P = float*` is checked).
//! - Threads that wait at the same line and column in different iterations of a loop, or in different calls of a function: they
//!   count as being at the same barrier or operation.
//! - A SIMD-group operation that not all live lanes reach is refused, though Metal runs it with the active lanes.
//! - Fast-math: every function is as exact as the host's, and nothing is contracted or reordered.
//! - Threads run one at a time, each up to its next barrier or SIMD-group operation: a thread that spins on another's store is
//!   stopped after 2^27 accesses, and an endless loop without memory accesses is not stopped.
//! - Accesses of more than 16 bytes to one value (`long4`), and `thread` memory.
//! - An access out of the bounds of one allocation and inside another one of the run.
//! - Races between dispatches, as such: each run starts without a past. Compare the accesses of the two.
//! - Registers, occupancy and speed.
//!
//! Needs x86-64 Linux with AVX2, F16C, FMA and BMI2; [`Compiler::find`] refuses other machines.

mod accesses;
mod compiler;
mod error;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
#[path = "fiber.rs"]
mod fiber;
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
#[path = "fiber_none.rs"]
mod fiber;
mod kernel;
mod library;
mod loaded;
mod memory;
mod reflection;
mod run;
mod shadow;
mod source;

pub use accesses::Accesses;
pub use compiler::{CLANG_VARIABLE, Compiler};
pub use error::{CompileError, Error, FindError, RunError, ThreadId};
pub use kernel::{Allocation, Binding, Buffer, Kernel, Order};
pub use library::{FunctionConstant, Library, Value};
pub use reflection::{AddressSpace, ArgumentInfo, ConstantInfo};
