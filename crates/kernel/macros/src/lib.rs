//! The attributes of flashtile-kernel: from one function, native code for rustc and the simulator, and C++ for GPUs.
//!
//! An attribute walks its item once (`lower`) into a small tree (`ir`) that holds only what has the same meaning in
//! Rust, Metal and CUDA; everything else is refused at its span, with the reason and the replacement. From the tree C++ is
//! printed (`print`); from the tokens the native function is made (`native`), with operators through which rustc refuses
//! types that the language does not have.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod arguments;
mod convergence;
mod depends;
mod errors;
mod expand;
mod intrinsics;
mod ir;
mod kernel;
mod lower;
mod names;
mod native;
mod node;
mod print;
mod signature;
mod source;
mod syntax;
#[cfg(test)]
mod tests;
mod types;

use proc_macro::TokenStream;

/// A kernel: a function that every thread of a launch runs.
///
/// ```ignore
/// #[kernel(
///     threads = 256,                 // or `threads <= EXPR`
///     derive(WORDS: usize = N / 32), // optional: generics that follow from the others
///     requires(x.len() >= n as usize, "x holds n elements"),
///     exact,                         // optional: no contraction, approximation or reassociation
/// )]
/// pub fn scale<T: Element, const N: usize>(x: &Buffer<T>, out: &mut Buffer<T>, n: u32, #[constant] twice: bool) { .. }
/// ```
///
/// Beside the function stands a module of its name with `KERNEL` (the kernel as data), `instance::<T, N, WORDS>()`,
/// `specialise(..)`, which takes the generics that are not derived, and `Call`, whose fields are the parameters. Paths of the body are read from inside that module: a kernel is an item
/// of a module, not of a function.
#[proc_macro_attribute]
pub fn kernel(arguments: TokenStream, item: TokenStream) -> TokenStream {
    kernel::kernel(arguments.into(), item.into()).into()
}

/// A function that kernels and other device functions call, or a struct of their values and of buffers that they read.
#[proc_macro_attribute]
pub fn device(arguments: TokenStream, item: TokenStream) -> TokenStream {
    expand::device(&arguments.into(), item.into()).into()
}

/// A struct of scalars that a launch copies to its kernel.
#[proc_macro_attribute]
pub fn params(arguments: TokenStream, item: TokenStream) -> TokenStream {
    expand::params(&arguments.into(), item.into()).into()
}

/// A constant that kernels use: a scalar, or a table `[T; N]` of scalars in constant memory.
#[proc_macro_attribute]
pub fn constant(arguments: TokenStream, item: TokenStream) -> TokenStream {
    expand::constant(&arguments.into(), item.into()).into()
}
