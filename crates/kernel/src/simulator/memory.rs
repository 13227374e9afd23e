//! Simulated memory, and the checks of every access to it.

use super::FaultKind;
use super::machine::{self, Machine};
use super::report::BufferReport;
use super::shadow::{Access, Shadow, Use};
use crate::device::{DeviceMemory, Span, View, ViewMut};
use crate::region::{At, Region, RegionAccess};
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
    /// An element was never written.
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

    /// Uninitialised memory of `len` elements: a kernel that reads an element before one is written faults.
    pub fn uninit<T: Scalar>(len: usize) -> Self {
        Self::uninit_of(T::TYPE, len)
    }

    /// [`Memory::uninit`] with the type as a value.
    pub(super) fn uninit_of(element: ScalarType, len: usize) -> Self {
        Self { element, content: Content::uninit(len * element.bytes()) }
    }

    /// Marks elements as uninitialised: padding that must not be read. Elements beyond the memory are ignored.
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

    /// Returns true if there is no element.
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

    /// Zeros of a type.
    pub(super) fn zeroed(element: ScalarType, len: usize) -> Self {
        let bytes = vec![0; len * element.bytes()];
        Self { element, content: Content { bytes, initialised: None } }
    }

    /// Replaces bytes from byte `at` on.
    pub(super) fn write_bytes(&mut self, at: usize, bytes: &[u8]) {
        let range = at..at + bytes.len();
        self.content.bytes[range.clone()].copy_from_slice(bytes);
        if let Some(flags) = &mut self.content.initialised {
            flags[range].fill(true);
        }
    }

    /// Bytes from byte `at` on, initialised or not.
    pub(super) fn read_bytes(&self, at: usize, bytes: &mut [u8]) {
        bytes.copy_from_slice(&self.content.bytes[at..at + bytes.len()]);
    }

    pub(super) fn content_mut(&mut self) -> &mut Content {
        &mut self.content
    }

    pub(super) fn content(&self) -> &Content {
        &self.content
    }
}

impl DeviceMemory for Memory {
    fn view(&self) -> View<'_, Self> {
        self.view()
    }

    fn view_mut(&mut self) -> ViewMut<'_, Self> {
        self.view_mut()
    }
}

/// Bytes, and which of them were written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Content {
    bytes: Vec<u8>,
    /// One flag for each byte; `None` where all bytes are initialised.
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
    /// Bytes that one entry of the shadow stands for.
    unit: usize,
    /// Bytes read and written, each as often as it was.
    read: u64,
    written: u64,
}

impl Storage {
    pub(super) fn new(content: Content, element: ScalarType) -> Rc<RefCell<Self>> {
        let unit = element.bytes();
        Rc::new(RefCell::new(Self { content, shadow: Shadow::default(), unit, read: 0, written: 0 }))
    }

    /// Counts of the accesses.
    pub(super) fn report(&self, name: &'static str) -> BufferReport {
        let Self { read, written, .. } = *self;
        BufferReport { name, read, distinct_read: (self.shadow.elements_read() * self.unit) as u64, written }
    }

    pub(super) fn take(&mut self) -> Content {
        std::mem::take(&mut self.content)
    }
}

/// A run of elements in a memory during a launch, and the checks of every access to it.
#[derive(Debug)]
pub(super) struct CheckedRegion {
    pub(super) machine: Rc<Machine>,
    pub(super) storage: Rc<RefCell<Storage>>,
    /// The bytes of the memory.
    pub(super) bytes: Range<usize>,
    /// Bytes of an element.
    pub(super) size: usize,
    /// The parameter or variable.
    pub(super) name: &'static str,
    /// True if the memory is a threadgroup's.
    pub(super) shared: bool,
}

impl RegionAccess for CheckedRegion {
    fn name(&self) -> &'static str {
        self.name
    }

    fn len(&self) -> usize {
        self.bytes.len() / self.size
    }

    fn get(&self, index: u64, at: At) -> u64 {
        let byte = self.locate(index, self.size, "read", at);
        self.note(index, byte..byte + self.size, Use::Read, at);
        let mut storage = self.storage.borrow_mut();
        storage.read += self.machine.count(self.shared, false, self.size);
        storage.content.read(byte, self.size)
    }

    fn set(&self, index: u64, raw: u64, at: At) {
        let byte = self.locate(index, self.size, "written", at);
        self.note(index, byte..byte + self.size, Use::Write, at);
        let mut storage = self.storage.borrow_mut();
        storage.written += self.machine.count(self.shared, true, self.size);
        storage.content.write(byte, self.size, raw);
    }

    fn load(&self, index: u64, scalar: ScalarType, count: usize, put: &mut dyn FnMut(u64), at: At) {
        let size = scalar.bytes();
        let byte = self.locate(index, count * size, "read", at);
        self.align(index, byte, count * size, at);
        self.note(index, byte..byte + count * size, Use::Read, at);
        let mut storage = self.storage.borrow_mut();
        storage.read += self.machine.count(self.shared, false, count * size);
        (0..count).for_each(|n| put(storage.content.read(byte + n * size, size)));
    }

    fn store(&self, index: u64, scalar: ScalarType, count: usize, next: &mut dyn FnMut() -> u64, at: At) {
        let size = scalar.bytes();
        let byte = self.locate(index, count * size, "written", at);
        self.align(index, byte, count * size, at);
        self.note(index, byte..byte + count * size, Use::Write, at);
        let mut storage = self.storage.borrow_mut();
        storage.written += self.machine.count(self.shared, true, count * size);
        (0..count).for_each(|n| storage.content.write(byte + n * size, size, next()));
    }

    fn update(&self, index: u64, new: &dyn Fn(u64) -> u64, at: At) -> u64 {
        self.machine.before_atomic();
        let byte = self.locate(index, self.size, "updated", at);
        self.note(index, byte..byte + self.size, Use::Atomic, at);
        self.machine.count_atomic();
        let mut storage = self.storage.borrow_mut();
        let old = storage.content.read(byte, self.size);
        storage.content.write(byte, self.size, new(old));
        old
    }
}

impl CheckedRegion {
    /// The byte of the memory at which `bytes` bytes from element `index` on start, all of them inside.
    fn locate(&self, index: u64, bytes: usize, verb: &str, at: At) -> usize {
        let Self { machine, bytes: range, size, name, .. } = self;
        let offset = usize::try_from(index).ok().and_then(|index| index.checked_mul(*size));
        match offset.and_then(|offset| Some((offset, offset.checked_add(bytes)?))) {
            Some((offset, end)) if end <= range.len() => range.start + offset,
            _ => {
                let what = match bytes == *size {
                    true => format!("{name}[{index}] is {verb}"),
                    false => format!("{bytes} bytes from {name}[{index}] on are {verb}"),
                };
                let len = self.len();
                machine.fault(FaultKind::OutOfBounds, at, format_args!("{what}, {name} has {len} elements"))
            }
        }
    }

    /// Checks a vector access of `bytes` bytes at byte `byte` of the memory, which starts at element `index`.
    fn align(&self, index: u64, byte: usize, bytes: usize, at: At) {
        let Self { machine, name, .. } = self;
        let unit = match bytes {
            1 | 2 | 4 | 8 | 16 => bytes,
            _ if bytes > 0 && bytes.is_multiple_of(16) => 16,
            _ => machine.fault(
                FaultKind::Misaligned,
                at,
                format_args!(
                    "{bytes} bytes from {name}[{index}] on: neither 1, 2, 4, 8 nor a multiple of 16"
                ),
            ),
        };
        if !byte.is_multiple_of(unit) {
            machine.fault(
                FaultKind::Misaligned,
                at,
                format_args!(
                    "{bytes} bytes from {name}[{index}] on start at byte {byte}, which is no multiple of {unit}"
                ),
            );
        }
    }

    /// Checks a use of bytes of the memory against earlier writes and the uses of other threads.
    fn note(&self, index: u64, bytes: Range<usize>, how: Use, at: At) {
        let Self { machine, storage, name, size, .. } = self;
        let now = machine.access(at);
        let mut storage = storage.borrow_mut();
        let Storage { content, shadow, unit, .. } = &mut *storage;
        for element in bytes.start / *unit..bytes.end.div_ceil(*unit) {
            if let Err((earlier, other)) = shadow.note(element, how, now) {
                let element = index + ((element * *unit).saturating_sub(bytes.start) / size) as u64;
                self.race(element, [(how, now), (earlier, other)]);
            }
        }
        // After the races: where another thread writes the element, the race says more.
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
    /// The fault of two uses of an element that nothing orders, the current thread's and another's.
    fn race(&self, element: u64, [(how, now), (earlier, other)]: [(Use, Access); 2]) -> ! {
        let Self { machine, name, .. } = self;
        let verb = |how| match how {
            Use::Read => "reads",
            Use::Write => "writes",
            Use::Atomic => "updates",
        };
        let other_thread = match other.group == now.group {
            true => format!("thread {} of the group", other.thread),
            false => format!("thread {} of another group", other.thread),
        };
        machine.fault(
            FaultKind::Race,
            now.location,
            format_args!(
                "race on {name}[{element}]: the thread {} it, {other_thread} {} it at {}:{}, nothing orders them",
                verb(how),
                verb(earlier),
                other.location.file(),
                other.location.line(),
            ),
        )
    }
}

/// The next shared array of the current thread's threadgroup.
#[track_caller]
pub(crate) fn shared(element: ScalarType, len: usize) -> Region {
    let machine = machine::current();
    let size = element.bytes();
    let bytes = len.saturating_mul(size);
    let region = machine.next_shared(|name| {
        Region::new(CheckedRegion {
            machine: Rc::clone(&machine),
            storage: Storage::new(Content::uninit(bytes), element),
            bytes: 0..bytes,
            size,
            name,
            shared: true,
        })
    });
    if region.len() != len {
        let message =
            format_args!("{} has {len} elements in this thread, {} in others", region.name(), region.len());
        machine.fault(FaultKind::DivergentBarrier, Location::caller(), message);
    }
    region
}
