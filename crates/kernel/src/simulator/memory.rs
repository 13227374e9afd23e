//! Simulated memory, and the checks of every access to it.

use super::FaultKind;
use super::machine::Machine;
use super::shadow::{Shadow, Use};
use crate::device::{Span, View, ViewMut};
use crate::scalar::{Plain, Scalar, ScalarType};
use std::cell::RefCell;
use std::fmt;
use std::ops::Range;
use std::panic::Location;
use std::rc::Rc;

/// Memory of the simulator: scalars of one type, each initialised or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Memory {
    element: ScalarType,
    content: Content,
}

/// Why values were not read out of a [`Memory`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemoryError {
    /// The memory holds values of another type.
    Element {
        /// The type in memory.
        expected: ScalarType,
        /// The type asked for.
        found: ScalarType,
    },
    /// Nothing was written to an element.
    Uninitialised {
        /// The first such element.
        index: usize,
    },
}

impl fmt::Display for MemoryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Element { expected, found } => write!(f, "the memory holds {expected}, {found} asked for"),
            Self::Uninitialised { index } => write!(f, "element {index} of the memory is uninitialised"),
        }
    }
}

impl std::error::Error for MemoryError {}

impl Memory {
    /// Memory that holds `values`.
    pub fn from_slice<T: Scalar>(values: &[T]) -> Self {
        let mut bytes = Vec::with_capacity(values.len() * T::BYTES);
        values.iter().for_each(|x| x.write(&mut bytes));
        Self { element: T::TYPE, content: Content { bytes, initialised: None } }
    }

    /// Memory of `len` elements nothing was written to: a kernel that reads one before writing it faults.
    pub fn uninit<T: Scalar>(len: usize) -> Self {
        Self { element: T::TYPE, content: Content::uninit(len * T::BYTES) }
    }

    /// Marks elements as uninitialised: padding that must not be read. What is beyond the memory is left out.
    pub fn poison(&mut self, elements: Range<usize>) {
        let (size, len) = (self.element.bytes(), self.content.bytes.len());
        let flags = self.content.initialised.get_or_insert_with(|| vec![true; len]);
        let (start, end) = (elements.start.saturating_mul(size), elements.end.saturating_mul(size));
        flags.iter_mut().take(end).skip(start).for_each(|flag| *flag = false);
    }

    /// The type of the elements.
    pub fn element(&self) -> ScalarType {
        self.element
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.content.bytes.len() / self.element.bytes()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.content.bytes.is_empty()
    }

    /// The values.
    ///
    /// # Errors
    /// Where they are of another type, or one is uninitialised.
    pub fn to_vec<T: Scalar>(&self) -> Result<Vec<T>, MemoryError> {
        let flags = self.content.initialised.as_ref();
        match flags.and_then(|flags| flags.iter().position(|flag| !flag)) {
            Some(byte) => Err(MemoryError::Uninitialised { index: byte / self.element.bytes() }),
            None => self.to_vec_or(T::default()),
        }
    }

    /// The values, with `fill` for those that are uninitialised.
    ///
    /// # Errors
    /// Where they are of another type.
    pub fn to_vec_or<T: Scalar>(&self, fill: T) -> Result<Vec<T>, MemoryError> {
        if self.element != T::TYPE {
            return Err(MemoryError::Element { expected: self.element, found: T::TYPE });
        }
        let starts = (0..self.content.bytes.len()).step_by(T::BYTES);
        Ok(starts
            .map(|at| match self.content.is_initialised(at..at + T::BYTES) {
                true => T::read(&mut &self.content.bytes[at..]),
                false => fill,
            })
            .collect())
    }

    /// All of it, to be read.
    pub fn view(&self) -> View<'_, Self> {
        View::new(self, self.span())
    }

    /// All of it, to be read and written.
    pub fn view_mut(&mut self) -> ViewMut<'_, Self> {
        let span = self.span();
        ViewMut::new(self, span)
    }

    fn span(&self) -> Span {
        Span { element: self.element, offset: 0, len: self.len() }
    }

    /// The bytes of `span`, if they are inside.
    pub(super) fn range(&self, span: Span) -> Option<Range<usize>> {
        let size = span.element.bytes();
        let start = span.offset.checked_mul(size)?;
        let end = span.len.checked_mul(size)?.checked_add(start)?;
        (end <= self.content.bytes.len()).then_some(start..end)
    }

    pub(super) fn content_mut(&mut self) -> &mut Content {
        &mut self.content
    }

    pub(super) fn content(&self) -> &Content {
        &self.content
    }
}

/// Bytes, and which of them were written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Content {
    bytes: Vec<u8>,
    /// One flag a byte; none where all are initialised.
    initialised: Option<Vec<bool>>,
}

impl Content {
    pub(super) fn uninit(bytes: usize) -> Self {
        Self { bytes: vec![0; bytes], initialised: Some(vec![false; bytes]) }
    }

    fn is_initialised(&self, range: Range<usize>) -> bool {
        self.initialised.as_ref().is_none_or(|flags| flags[range].iter().all(|flag| *flag))
    }

    fn read(&self, at: usize, size: usize) -> u64 {
        let mut raw = [0; 8];
        raw[..size].copy_from_slice(&self.bytes[at..at + size]);
        u64::from_le_bytes(raw)
    }

    fn write(&mut self, at: usize, size: usize, raw: u64) {
        self.bytes[at..at + size].copy_from_slice(&raw.to_le_bytes()[..size]);
        if let Some(flags) = &mut self.initialised {
            flags[at..at + size].fill(true);
        }
    }
}

/// A memory during a launch.
#[derive(Debug)]
pub(super) struct Storage {
    content: Content,
    shadow: Shadow,
    /// Bytes of what one entry of the shadow stands for.
    unit: usize,
}

impl Storage {
    pub(super) fn new(content: Content, element: ScalarType) -> Rc<RefCell<Self>> {
        Rc::new(RefCell::new(Self { content, shadow: Shadow::default(), unit: element.bytes() }))
    }

    pub(super) fn take(&mut self) -> Content {
        std::mem::take(&mut self.content)
    }
}

/// A run of elements in a memory during a launch: what a handle refers to.
#[derive(Clone, Debug)]
pub struct Region(Rc<Parts>);

#[derive(Debug)]
struct Parts {
    machine: Rc<Machine>,
    storage: Rc<RefCell<Storage>>,
    /// The bytes of the memory.
    bytes: Range<usize>,
    /// Bytes of an element.
    size: usize,
    name: &'static str,
    shared: bool,
}

impl Region {
    pub(super) fn new(
        machine: &Rc<Machine>,
        storage: Rc<RefCell<Storage>>,
        bytes: Range<usize>,
        size: usize,
        (name, shared): (&'static str, bool),
    ) -> Self {
        Self(Rc::new(Parts { machine: Rc::clone(machine), storage, bytes, size, name, shared }))
    }

    /// The parameter or variable it was made for.
    pub(crate) fn name(&self) -> &'static str {
        self.0.name
    }

    /// Elements.
    pub(super) fn len(&self) -> usize {
        self.0.bytes.len() / self.0.size
    }

    /// The bits of element `index`.
    #[track_caller]
    pub(crate) fn get(&self, index: u64) -> u64 {
        let (at, size) = (self.locate(index, self.0.size, "read"), self.0.size);
        self.note(index, at..at + size, Use::Read);
        self.0.machine.count(self.0.shared, false, size);
        self.0.storage.borrow().content.read(at, size)
    }

    /// Replaces the bits of element `index`.
    #[track_caller]
    pub(crate) fn set(&self, index: u64, raw: u64) {
        let (at, size) = (self.locate(index, self.0.size, "written"), self.0.size);
        self.note(index, at..at + size, Use::Write);
        self.0.machine.count(self.0.shared, true, size);
        self.0.storage.borrow_mut().content.write(at, size, raw);
    }

    /// Gives the bits of `count` values of type `scalar` from element `index` on to `put`.
    #[track_caller]
    pub(crate) fn load(&self, index: u64, scalar: ScalarType, count: usize, put: &mut dyn FnMut(u64)) {
        let size = scalar.bytes();
        let at = self.locate(index, count * size, "read");
        self.align(index, at, count * size);
        self.note(index, at..at + count * size, Use::Read);
        self.0.machine.count(self.0.shared, false, count * size);
        let storage = self.0.storage.borrow();
        (0..count).for_each(|n| put(storage.content.read(at + n * size, size)));
    }

    /// Writes the bits of `count` values of type `scalar`, taken from `next`, from element `index` on.
    #[track_caller]
    pub(crate) fn store(&self, index: u64, scalar: ScalarType, count: usize, next: &mut dyn FnMut() -> u64) {
        let size = scalar.bytes();
        let at = self.locate(index, count * size, "written");
        self.align(index, at, count * size);
        self.note(index, at..at + count * size, Use::Write);
        self.0.machine.count(self.0.shared, true, count * size);
        let mut storage = self.0.storage.borrow_mut();
        (0..count).for_each(|n| storage.content.write(at + n * size, size, next()));
    }

    /// Replaces the bits of element `index` by `new` of them in one step; returns what they were.
    #[track_caller]
    pub(crate) fn update(&self, index: u64, new: &dyn Fn(u64) -> u64) -> u64 {
        self.0.machine.before_atomic();
        let (at, size) = (self.locate(index, self.0.size, "updated"), self.0.size);
        self.note(index, at..at + size, Use::Atomic);
        self.0.machine.count_atomic();
        let mut storage = self.0.storage.borrow_mut();
        let old = storage.content.read(at, size);
        storage.content.write(at, size, new(old));
        old
    }

    /// The byte of the memory where `bytes` bytes from element `index` on are, all of them inside.
    #[track_caller]
    fn locate(&self, index: u64, bytes: usize, verb: &str) -> usize {
        let Parts { machine, bytes: range, size, name, .. } = &*self.0;
        let offset = usize::try_from(index).ok().and_then(|index| index.checked_mul(*size));
        match offset.and_then(|offset| Some((offset, offset.checked_add(bytes)?))) {
            Some((offset, end)) if end <= range.len() => range.start + offset,
            _ => {
                let what = match bytes == *size {
                    true => format!("{name}[{index}] is {verb}"),
                    false => format!("{bytes} bytes from {name}[{index}] on are {verb}"),
                };
                machine.fault(
                    FaultKind::OutOfBounds,
                    Location::caller(),
                    format_args!("{what}, {name} has {} elements", self.len()),
                )
            }
        }
    }

    /// Checks a vector access of `bytes` bytes at byte `at` of the memory.
    #[track_caller]
    fn align(&self, index: u64, at: usize, bytes: usize) {
        let Parts { machine, name, .. } = &*self.0;
        let unit = match bytes {
            1 | 2 | 4 | 8 | 16 => bytes,
            _ if bytes > 0 && bytes.is_multiple_of(16) => 16,
            _ => machine.fault(
                FaultKind::Misaligned,
                Location::caller(),
                format_args!(
                    "{bytes} bytes from {name}[{index}] on: neither 1, 2, 4, 8 nor a multiple of 16"
                ),
            ),
        };
        if !at.is_multiple_of(unit) {
            machine.fault(
                FaultKind::Misaligned,
                Location::caller(),
                format_args!(
                    "{bytes} bytes from {name}[{index}] on start at byte {at}, which is no multiple of {unit}"
                ),
            );
        }
    }

    /// Checks a use of bytes of the memory against what was written and what other threads do.
    #[track_caller]
    fn note(&self, index: u64, bytes: Range<usize>, how: Use) {
        let Parts { machine, storage, name, size, .. } = &*self.0;
        let now = machine.access(Location::caller());
        let mut storage = storage.borrow_mut();
        let Storage { content, shadow, unit } = &mut *storage;
        for element in bytes.start / *unit..bytes.end.div_ceil(*unit) {
            if let Err((earlier, other)) = shadow.note(element, how, now) {
                let element = index + ((element * *unit).saturating_sub(bytes.start) / size) as u64;
                let verb = |how| match how {
                    Use::Read => "reads",
                    Use::Write => "writes",
                    Use::Atomic => "updates",
                };
                let where_ = match other.group == now.group {
                    true => format!("thread {} of the group", other.thread),
                    false => format!("thread {} of another group", other.thread),
                };
                machine.fault(
                    FaultKind::Race,
                    now.location,
                    format_args!(
                        "race on {name}[{element}]: the thread {} it, {where_} {} it at {}:{}, nothing orders them",
                        verb(how),
                        verb(earlier),
                        other.location.file(),
                        other.location.line(),
                    ),
                );
            }
        }
        // After the races: where another thread's write is missing or still to come, that says more.
        if how != Use::Write && !content.is_initialised(bytes.clone()) {
            let first = bytes.clone().find(|&byte| !content.is_initialised(byte..byte + 1));
            let element = index + (first.unwrap_or(bytes.start) - bytes.start) as u64 / *size as u64;
            machine.fault(
                FaultKind::Uninitialised,
                now.location,
                format_args!("{name}[{element}] is read, nothing was written to it"),
            );
        }
    }
}
