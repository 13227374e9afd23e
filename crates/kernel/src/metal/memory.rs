//! Memory of a device.

#![allow(unsafe_code)]

use super::error::Error;
use super::object::{Buffer, MetalDevice, Shared};
use crate::device::{DeviceMemory, Span, View, ViewMut};
use crate::scalar::ScalarType;
use objc2::rc::autoreleasepool;
use objc2::runtime::ProtocolObject;
use objc2_metal::{MTLBuffer, MTLDevice, MTLResource, MTLResourceOptions};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Elements of one type in an `MTLBuffer`, from a byte offset on: allocated by [`Gpu::buffer_from`](super::Gpu::buffer_from) or
/// [`Gpu::uninit`](super::Gpu::uninit), or lent by its owner ([`Gpu::borrow`](super::Gpu::borrow)).
///
/// Command buffers of a [`Gpu`](super::Gpu) keep the buffers that they use: a value may be dropped while work is in flight.
#[derive(Debug)]
pub struct Memory {
    buffer: Shared<Buffer>,
    /// The address of the device, which the buffer keeps.
    device: usize,
    /// Bytes before the first element.
    offset: usize,
    element: ScalarType,
    len: usize,
    /// True if others may use the buffer too, whose uses are not known here.
    is_borrowed: bool,
    /// The command buffers that use it and are not known to have completed, and those that failed.
    tickets: Mutex<Vec<Arc<Ticket>>>,
}

/// The state of a command buffer: unknown, completed, or failed.
#[derive(Debug, Default)]
pub(super) struct Ticket {
    result: OnceLock<Result<(), Error>>,
    /// True if the command buffer is not known here, so that its result will not be known either.
    is_foreign: bool,
}

impl Ticket {
    /// Of an encoder whose command buffer only the caller knows.
    pub(super) fn foreign() -> Self {
        Self { is_foreign: true, ..Self::default() }
    }

    /// The command buffer has completed or failed.
    pub(super) fn complete(&self, result: Result<(), Error>) {
        // Of two threads that find it out both are right.
        let _ = self.result.set(result);
    }

    pub(super) fn result(&self) -> Option<&Result<(), Error>> {
        self.result.get()
    }

    fn has_succeeded(&self) -> bool {
        matches!(self.result(), Some(Ok(())))
    }

    fn is_complete(&self) -> bool {
        self.result().is_some()
    }
}

impl Memory {
    /// Memory that CPU and GPU share, of any contents.
    pub(super) fn uninit(device: &MetalDevice, element: ScalarType, len: usize) -> Result<Self, Error> {
        let bytes = len.saturating_mul(element.bytes());
        let too_large = || Error::Memory { bytes, max: device.maxBufferLength() };
        if bytes > device.maxBufferLength() {
            return Err(too_large());
        }
        // A buffer without bytes cannot be.
        let buffer = device
            .newBufferWithLength_options(bytes.max(16), MTLResourceOptions::StorageModeShared)
            .ok_or_else(too_large)?;
        Ok(Self::of(buffer, 0, element, len))
    }

    /// Elements of a buffer, from byte `offset` on, that nothing else uses.
    pub(super) fn of(buffer: Buffer, offset: usize, element: ScalarType, len: usize) -> Self {
        let device = autoreleasepool(|_| address(&buffer.device()));
        let (buffer, tickets) = (Shared::buffer(buffer), Mutex::default());
        Self { buffer, device, offset, element, len, is_borrowed: false, tickets }
    }

    /// Marks the buffer as one that others may use too.
    pub(super) fn borrowed(self) -> Self {
        Self { is_borrowed: true, ..self }
    }

    /// The buffer. Its owner may only ask for properties that never change, such as its length: command
    /// buffers in flight may use it.
    #[must_use]
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Bytes of the buffer before the first element.
    #[must_use]
    pub const fn offset(&self) -> usize {
        self.offset
    }

    /// The type of its elements.
    #[must_use]
    pub const fn element(&self) -> ScalarType {
        self.element
    }

    /// Its elements.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns true if it has no elements.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes of all elements.
    pub(super) const fn bytes(&self) -> usize {
        self.len * self.element.bytes()
    }

    pub(super) fn is_of(&self, device: &MetalDevice) -> bool {
        self.device == address(device)
    }

    /// Notes that a command buffer uses it.
    pub(super) fn used_by(&self, ticket: &Arc<Ticket>) {
        let mut tickets = self.tickets();
        tickets.retain(|of| !of.has_succeeded());
        if !tickets.iter().any(|of| Arc::ptr_eq(of, ticket)) {
            tickets.push(Arc::clone(ticket));
        }
    }

    /// Returns true if no command buffer that is known here may still use it.
    pub(super) fn is_idle(&self) -> bool {
        !self.is_borrowed && self.tickets().iter().all(|ticket| ticket.is_complete())
    }

    /// Why its contents are not known, after all that was committed has completed: a command buffer that used it failed, which is said once,
    /// or is not committed.
    pub(super) fn take_failure(&self) -> Result<(), Error> {
        let mut tickets = self.tickets();
        let known = tickets.iter().filter(|ticket| !ticket.is_foreign);
        let results: Vec<_> = known.map(|ticket| ticket.result().cloned()).collect();
        tickets.retain(|ticket| !ticket.is_complete());
        results.into_iter().try_for_each(|result| result.unwrap_or(Err(Error::NotCommitted)))
    }

    fn tickets(&self) -> MutexGuard<'_, Vec<Arc<Ticket>>> {
        self.tickets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies bytes to those from byte `at` on.
    ///
    /// # Safety
    /// No work of the device accesses the bytes.
    pub(super) unsafe fn write(&mut self, at: usize, bytes: &[u8]) {
        let to = self.inside(at, bytes.len());
        // SAFETY: the range lies inside of the buffer, whose contents the CPU can access as it is shared; nothing else accesses them, by the
        // caller's contract.
        unsafe {
            let start = self.buffer.contents().as_ptr().cast::<u8>().add(to.start);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), start, bytes.len());
        }
    }

    /// Fills all elements with bytes of zero.
    ///
    /// # Safety
    /// As [`Memory::write`].
    pub(super) unsafe fn fill_zero(&mut self) {
        let all = self.inside(0, self.bytes());
        // SAFETY: as in `write`.
        unsafe {
            self.buffer.contents().as_ptr().cast::<u8>().add(all.start).write_bytes(0, all.len());
        }
    }

    /// Copies bytes from byte `at` on.
    ///
    /// # Safety
    /// No work of the device writes the bytes.
    pub(super) unsafe fn read(&self, at: usize, bytes: &mut [u8]) {
        let from = self.inside(at, bytes.len());
        // SAFETY: as in `write`; nothing writes the bytes, by the caller's contract.
        unsafe {
            let start = self.buffer.contents().as_ptr().cast::<u8>().add(from.start);
            std::ptr::copy_nonoverlapping(start, bytes.as_mut_ptr(), bytes.len());
        }
    }

    /// Where bytes of the elements lie in the buffer.
    ///
    /// # Panics
    /// If they do not lie inside the elements.
    pub(super) fn inside(&self, at: usize, count: usize) -> Range<usize> {
        let end = at.checked_add(count);
        assert!(end.is_some_and(|end| end <= self.bytes()), "{count} bytes at {at} of {}", self.bytes());
        self.offset + at..self.offset + at + count
    }

    /// All of it, to be read.
    #[must_use]
    pub fn view(&self) -> View<'_, Self> {
        View::new(self, self.span())
    }

    /// All of it, to be read and written.
    #[must_use]
    pub fn view_mut(&mut self) -> ViewMut<'_, Self> {
        let span = self.span();
        ViewMut::new(self, span)
    }

    const fn span(&self) -> Span {
        Span { element: self.element, offset: 0, len: self.len }
    }
}

fn address(device: &MetalDevice) -> usize {
    std::ptr::from_ref::<ProtocolObject<dyn MTLDevice>>(&**device).addr()
}

impl DeviceMemory for Memory {
    fn view(&self) -> View<'_, Self> {
        self.view()
    }

    fn view_mut(&mut self) -> ViewMut<'_, Self> {
        self.view_mut()
    }

    /// Buffers start at pages.
    fn address(&self) -> u64 {
        self.offset as u64
    }
}
