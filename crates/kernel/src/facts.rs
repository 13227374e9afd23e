//! Views of a device's memory, and the facts that the conditions of a kernel are checked on.

use crate::generic::Generic;
use crate::literal::literal;
use crate::scalar::{Plain, Scalar, ScalarType};

/// Elements of a device's memory that a kernel reads.
#[derive(Debug)]
pub struct View<'a, M> {
    memory: &'a M,
    span: Span,
}

/// Elements of a device's memory that a kernel reads and writes; nothing else refers to the memory meanwhile.
#[derive(Debug)]
pub struct ViewMut<'a, M> {
    memory: &'a mut M,
    span: Span,
}

/// A run of elements of a memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The type of the elements.
    pub element: ScalarType,
    /// Elements before the first.
    pub offset: usize,
    /// Elements.
    pub len: usize,
}

impl<M> Clone for View<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M> Copy for View<'_, M> {}

impl<'a, M> View<'a, M> {
    /// Elements `span` of `memory`. The maker of the memory, or its device, checks that they are inside.
    pub fn new(memory: &'a M, span: Span) -> Self {
        Self { memory, span }
    }

    /// The memory.
    pub fn memory(&self) -> &'a M {
        self.memory
    }
}

impl<'a, M> ViewMut<'a, M> {
    /// Elements `span` of `memory`. The maker of the memory, or its device, checks that they are inside.
    pub fn new(memory: &'a mut M, span: Span) -> Self {
        Self { memory, span }
    }

    /// The memory.
    pub fn memory(&self) -> &M {
        self.memory
    }

    /// The memory, to be written.
    pub fn memory_mut(&mut self) -> &mut M {
        self.memory
    }

    /// Borrows the view for a shorter time.
    pub fn reborrow(&mut self) -> ViewMut<'_, M> {
        ViewMut { memory: self.memory, span: self.span }
    }
}

macro_rules! spans {
    ($($View:ident)*) => {$(
        impl<M> $View<'_, M> {
            /// The elements.
            pub fn span(&self) -> Span {
                self.span
            }

            /// The type of the elements.
            pub fn element(&self) -> ScalarType {
                self.span.element
            }

            /// Elements.
            pub fn len(&self) -> usize {
                self.span.len
            }

            /// Returns true if there is no element.
            pub fn is_empty(&self) -> bool {
                self.span.len == 0
            }
        }
    )*};
}
spans!(View ViewMut);

/// The value of a `#[constant]` parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Constant {
    pub(crate) scalar: ScalarType,
    pub(crate) raw: u64,
}

impl Constant {
    /// A value.
    pub fn of<T: Scalar>(value: T) -> Self {
        Self { scalar: T::TYPE, raw: value.to_raw() }
    }

    /// Its type.
    pub fn scalar(self) -> ScalarType {
        self.scalar
    }

    /// Its bits, zero-extended.
    pub fn raw(self) -> u64 {
        self.raw
    }

    /// The value in C++.
    pub fn cpp(self) -> String {
        literal(self.scalar, self.raw)
    }
}

/// The launch as a kernel's conditions see it; the arguments fit the parameters.
#[derive(Clone, Copy, Debug)]
pub struct Facts<'a> {
    pub(crate) generics: &'a [Generic],
    /// One for each parameter, in order.
    pub(crate) arguments: &'a [Fact<'a>],
    pub(crate) groups: [u32; 3],
    pub(crate) threads: u32,
}

/// An argument as conditions see it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fact<'a> {
    Buffer(Span),
    Bytes(&'a [u8]),
    Constant(Constant),
}

impl Facts<'_> {
    /// The generics of the instance.
    pub fn generics(&self) -> &[Generic] {
        self.generics
    }

    /// Threadgroups along each coordinate.
    pub fn groups(&self) -> [u32; 3] {
        self.groups
    }

    /// Threads of a threadgroup.
    pub fn threads(&self) -> u32 {
        self.threads
    }

    /// The elements given for parameter `n`; none where it is no buffer.
    pub fn buffer(&self, n: usize) -> View<'static, ()> {
        let span = match self.arguments.get(n) {
            Some(Fact::Buffer(span)) => *span,
            _ => Span { element: ScalarType::U8, offset: 0, len: 0 },
        };
        View::new(&(), span)
    }

    /// The value of scalar or `#[params]` parameter `n`; of zeros where it is neither.
    pub fn plain<P: Plain>(&self, n: usize) -> P {
        match self.arguments.get(n) {
            Some(Fact::Bytes(bytes)) if bytes.len() == P::BYTES => P::read(&mut &**bytes),
            _ => P::read(&mut &*vec![0; P::BYTES]),
        }
    }

    /// The value of `#[constant]` parameter `n`; zero where it is none.
    pub fn constant<T: Scalar>(&self, n: usize) -> T {
        match self.arguments.get(n) {
            Some(Fact::Constant(constant)) => T::from_raw(constant.raw()),
            _ => T::from_raw(0),
        }
    }
}
