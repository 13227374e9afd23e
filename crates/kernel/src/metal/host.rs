//! Memory of the host that a device uses without a copy.

#![allow(unsafe_code)]

use super::error::Error;
use super::memory::Memory;
use super::object::MetalDevice;
use crate::scalar::ScalarType;
use block2::RcBlock;
use objc2_metal::{MTLDevice, MTLResourceOptions};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::c_void;
use std::ptr::NonNull;

/// Bytes of a page of Apple's processors, which memory that a device uses without a copy starts and ends at.
const PAGE: usize = 16 << 10;

/// Whole pages of the host's memory. [`Gpu::adopt`](super::Gpu::adopt) makes them memory of a device without a copy.
#[derive(Debug)]
pub struct HostPages {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the pages belong to the value alone.
unsafe impl Send for HostPages {}
// SAFETY: shared references only read.
unsafe impl Sync for HostPages {}

impl HostPages {
    /// As many pages as hold `bytes` bytes, at least one, of zeros; `None` where the host has no such memory.
    #[must_use]
    pub fn zeroed(bytes: usize) -> Option<Self> {
        let size = bytes.max(1).checked_next_multiple_of(PAGE)?;
        let layout = Layout::from_size_align(size, PAGE).ok()?;
        // SAFETY: the layout has at least one page.
        NonNull::new(unsafe { alloc_zeroed(layout) }).map(|start| Self { start, layout })
    }

    /// All bytes of the pages.
    #[must_use]
    pub const fn bytes(&self) -> &[u8] {
        // SAFETY: the pages were allocated with this size, are initialised, and belong to the value.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.layout.size()) }
    }

    /// All bytes of the pages, to be written.
    #[must_use]
    pub const fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and nothing else refers to them.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.layout.size()) }
    }

    /// Memory of a device, which frees the pages when the last command buffer and the last value that use it are gone.
    pub(super) fn adopt(self, device: &MetalDevice, element: ScalarType) -> Result<Memory, Error> {
        let (start, bytes) = (self.start, self.layout.size());
        let pages = std::cell::Cell::new(Some(self));
        let free = RcBlock::new(move |_: NonNull<c_void>, _: usize| drop(pages.take()));
        // SAFETY: the pages are whole, and live until the buffer calls the block, which it does once, when it is freed.
        let buffer = unsafe {
            device.newBufferWithBytesNoCopy_length_options_deallocator(
                start.cast(),
                bytes,
                MTLResourceOptions::StorageModeShared,
                Some(&free),
            )
        };
        let buffer = buffer.ok_or_else(|| Error::Memory { bytes, max: device.maxBufferLength() })?;
        Ok(Memory::of(buffer, 0, element, bytes / element.bytes()))
    }
}

impl Drop for HostPages {
    fn drop(&mut self) {
        // SAFETY: allocated by `zeroed` with this layout, and freed once.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}
