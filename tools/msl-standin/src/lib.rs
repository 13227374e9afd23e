//! Checks printed Metal Shading Language where there is no Apple machine: a text is compiled by clang against a strict
//! stand-in for `<metal_stdlib>`, and its kernels are run on the CPU, with threadgroups, barriers, SIMD-groups of 32
//! lanes and 8x8 matrices.
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
//! # What is checked
//!
//! The text is read as C++ for OpenCL, clang's language with address spaces in its types, after a pass over its tokens:
//!
//! - Address spaces: `device`, `constant`, `threadgroup` and `thread` do not convert to each other, by casts either, and
//!   `*` or `&` after the name of a type without one of them is refused. `constant` memory is read-only.
//! - Attributes: every parameter of a kernel has one attribute that is known, of the right type and not used twice;
//!   positions and sizes are all scalars or all vectors; unknown attributes are refused everywhere.
//! - Types: no `double` (a literal without a suffix is a float, as in Metal), no `long long`, no implicit conversion
//!   between vectors, no C-style cast of vectors; `as_type` checks sizes. `half` and `bfloat` round after each operation.
//! - Matrices: `thread_elements()` refers to a type of Apple's own, of which the elements 0 and 1 may be set, one at a time.
//! - Functions of the library are templates over the types that the specification gives them, so that `exp(1)`,
//!   `min(1, 2u)`, `exp(bfloat)` and `simd_sum(bfloat)` fail.
//! - No `goto`, `new`, exceptions, lambdas, strings, `std::`, recursion of a function with one definition, variables at
//!   program scope outside of `constant`, and threadgroup variables outside of kernels.
//! - Function constants: those that a kernel reaches have to be set, with the type they are declared with, unless the
//!   text asks `is_function_constant_defined`.
//! - All warnings of `-Wall -Wextra` but those about unused names are errors.
//!
//! A run checks each access to memory: inside of a buffer or of threadgroup memory, aligned, and no write to a buffer that
//! is given for reading. Barriers and SIMD-group operations have to be reached by all threads of the group (lanes that have
//! returned are inactive, as in Metal: they may not be read, and matrices need all 32). Threadgroup memory starts as
//! NaN and has 32 KiB. Two accesses to a byte by different threads, one of them a write and not both atomic, are a race
//! if no `threadgroup_barrier` (or `simdgroup_barrier` within a SIMD-group) whose flags name the memory lies between;
//! the groups of a grid are never ordered. SIMD-group operations order no memory.
//!
//! # What is not
//!
//! - Apple's compiler is older and newer than clang in places: that a text passes here is no proof that it passes there.
//! - Comparisons of vectors are vectors of integers, and there is no `bool4`; `half4 * 2.0f` is refused, which Metal may
//!   accept. There are no matrices (`float4x4`), textures, argument buffers, quad-group functions and lambdas.
//! - A member function for objects in `constant` memory may be called with one in `device` memory too.
//! - Pointers in names that the text makes itself (`using P = float*` is found, a macro of a template is not).
//! - Threads that meet at one line and column in different iterations of a loop, or by different calls of the function it is
//!   in: the text is compiled as it is, without marks of these.
//! - A SIMD-group operation in code that not all live lanes reach is refused, though Metal lets the active lanes go on.
//! - Fast-math: every function is as exact as the host's, and nothing is contracted or reordered.
//! - Threads run one at a time, from one meeting to the next: a thread that waits for another's store in a loop is
//!   stopped after a great many accesses, and one that accesses no memory in a loop without end is not stopped.
//! - Accesses of more than 16 bytes that the compiler makes of one value (`long4`), and values of `thread` memory.
//!   Registers, occupancy and speed are not modelled.
//!
//! It runs on x86-64 Linux with AVX2, F16C and FMA; elsewhere [`Compiler::find`] says that it cannot.

mod compiler;
mod error;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
#[path = "fiber.rs"]
mod fiber;
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
#[path = "fiber_none.rs"]
mod fiber;
mod library;
mod memory;
mod run;
mod text;

pub use compiler::{CLANG_VARIABLE, Compiler};
pub use error::{CompileError, Error, Missing, Place, RunError};
pub use library::{Buffer, FunctionConstant, Kernel, Library, Value};
