//! A program before clang sees it: its kernels, its function constants, and faults that Metal would refuse
//! and clang accept.
//!
//! ```text
//! source -> includes -> lex -> reader -> checks of tokens -> attributes -> declarations -> checks -> rewrites -> kernels
//! ```
//!
//! The program is cut into tokens, checked, and edited in place, so that every line keeps its number.

mod attributes;
mod checks;
pub(crate) mod constants;
mod declarations;
pub(crate) mod diagnostic;
mod edits;
pub(crate) mod includes;
pub(crate) mod kernels;
mod lex;
mod reader;
mod rewrite;
mod threadgroup;
mod words;

use constants::DeclaredConstant;
use diagnostic::Checked;
use edits::Edits;
use kernels::Kernel;
use reader::Reader;

/// A program that clang can compile.
#[derive(Debug, Default)]
pub(crate) struct Program {
    /// The source for clang.
    pub(crate) source: String,
    pub(crate) kernels: Vec<Kernel>,
    pub(crate) constants: Vec<DeclaredConstant>,
}

/// Reads a program whose includes have been stripped and whose macros have been expanded.
///
/// # Errors
/// For the first thing found that Metal or the stand-in does not have.
pub(crate) fn parse(source: &str) -> Checked<Program> {
    let mut edits = Edits::default();
    let reader = Reader::new(source);
    checks::tokens(&reader)?;
    rewrite::tokens(&reader, &mut edits);
    let reader = attributes::take(reader, &mut edits)?;
    let declarations = declarations::read(&reader)?;
    checks::pointers(&reader, &declarations)?;
    checks::statics(&reader, &declarations)?;
    checks::recursion(&reader, &declarations)?;
    checks::casts(&reader)?;
    rewrite::constant_members(&reader, &declarations, &mut edits)?;
    rewrite::constructors(&reader, &mut edits);
    threadgroup::rewrite(&reader, &declarations.functions, &mut edits)?;
    let constants = constants::rewrite(&reader, &declarations, &mut edits)?;
    let kernels = kernels::read(&reader, &declarations, &constants)?;
    Ok(Program { source: edits.apply(source), kernels, constants })
}
