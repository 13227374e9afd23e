//! Errors in a program, with their lines.

/// An error, and the line of the program that it is in.
#[derive(Clone, Debug)]
pub(crate) struct Diagnostic {
    /// Counted from 1.
    pub(crate) line: usize,
    pub(crate) message: String,
}

pub(super) type Checked<T> = Result<T, Diagnostic>;
