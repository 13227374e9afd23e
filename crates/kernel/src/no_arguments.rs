//! The arguments of native code without feature `simulator`: no launch makes any.

use crate::memory::Buffer;
use crate::scalar::{Plain, Scalar};

/// The arguments of a native function, of which there are none.
#[derive(Debug)]
#[allow(clippy::exhaustive_enums)]
pub enum Arguments {}

impl Arguments {
    /// The buffer of parameter `n`.
    pub fn buffer<T: Scalar>(&self, _n: usize) -> Buffer<T> {
        match *self {}
    }

    /// The value of parameter `n`.
    pub fn plain<T: Plain>(&self, _n: usize) -> T {
        match *self {}
    }

    /// The value of constant parameter `n`.
    pub fn constant<T: Scalar>(&self, _n: usize) -> T {
        match *self {}
    }
}
