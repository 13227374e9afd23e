//! The arguments that a launch passes to the native code of a kernel.

use crate::facts::Constant;
use crate::memory::Buffer;
use crate::region::Region;
use crate::scalar::{Plain, Scalar};

/// The arguments of a kernel's function in one thread, by the number of the parameter.
#[derive(Debug)]
pub struct Arguments(Vec<Value>);

/// The argument of one parameter.
#[derive(Debug)]
pub(crate) enum Value {
    Buffer(Region),
    Bytes(Vec<u8>),
    Constant(Constant),
}

impl Arguments {
    pub(crate) fn of(values: Vec<Value>) -> Self {
        Self(values)
    }

    /// A handle for buffer parameter `n`, whose elements are of type `T`.
    ///
    /// # Panics
    /// Where parameter `n` is of another kind. [`Launch::new`](crate::device::Launch::new) compares the arguments with the parameters,
    /// and `#[kernel]` makes the parameters and the calls of this alike.
    pub fn buffer<T: Scalar>(&self, n: usize) -> Buffer<T> {
        match &self.0[n] {
            Value::Buffer(region) => Buffer::new(region.clone()),
            other => mismatch(n, other),
        }
    }

    /// The value of scalar or `#[params]` parameter `n`.
    ///
    /// # Panics
    /// As [`buffer`](Self::buffer).
    pub fn plain<P: Plain>(&self, n: usize) -> P {
        match &self.0[n] {
            Value::Bytes(bytes) => P::read(&mut &bytes[..]),
            other => mismatch(n, other),
        }
    }

    /// The value of `#[constant]` parameter `n`.
    ///
    /// # Panics
    /// As [`buffer`](Self::buffer).
    pub fn constant<T: Scalar>(&self, n: usize) -> T {
        match &self.0[n] {
            Value::Constant(constant) => T::from_raw(constant.raw()),
            other => mismatch(n, other),
        }
    }
}

#[expect(clippy::panic, reason = "a Native that is not its kernel's; it becomes a fault")]
fn mismatch(n: usize, value: &Value) -> ! {
    panic!("parameter {n} of the native code is not {value:?}")
}
