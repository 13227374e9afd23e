//! Memory of the host that a device uses without a copy.

#![allow(unsafe_code)]

use super::error::Error;
use super::memory::Memory;
use super::object::MetalDevice;
use crate::scalar::ScalarType;
use block2::RcBlock;
use memmap2::MmapMut;
use objc2_metal::{MTLDevice, MTLResourceOptions};
use std::ffi::c_void;
use std::ptr::NonNull;

/// Bytes of a page of Apple's processors, which memory that a device uses without a copy starts and ends at.
const PAGE: usize = 16 << 10;

/// Whole pages of the host's memory, mapped from the system. [`Gpu::adopt`](super::Gpu::adopt) makes them memory of a device without a copy.
#[derive(Debug)]
pub struct HostPages {
    map: MmapMut,
    /// Bytes of the map before the pages.
    start: usize,
    size: usize,
}

impl HostPages {
    /// As many pages as hold `bytes` bytes, at least one, of zeros; `None` where the system has no such memory.
    #[must_use]
    pub fn zeroed(bytes: usize) -> Option<Self> {
        let size = bytes.max(1).checked_next_multiple_of(PAGE)?;
        // Systems with smaller pages map more, of which whole pages are taken.
        let map = MmapMut::map_anon(size.checked_add(PAGE)?).ok()?;
        let start = map.as_ptr().align_offset(PAGE);
        Some(Self { map, start, size })
    }

    /// All bytes of the pages.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.map[self.start..self.start + self.size]
    }

    /// All bytes of the pages, to be written.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.map[self.start..self.start + self.size]
    }

    /// Memory of a device, which frees the pages when the last command buffer and the last value that use it are gone.
    pub(super) fn adopt(mut self, device: &MetalDevice, element: ScalarType) -> Result<Memory, Error> {
        let (start, bytes) = (NonNull::from(self.bytes_mut()).cast::<c_void>(), self.size);
        let pages = std::cell::Cell::new(Some(self));
        let free = RcBlock::new(move |_: NonNull<c_void>, _: usize| drop(pages.take()));
        // SAFETY: the pages are whole, and live until the buffer calls the block, which it does once, when it is freed.
        let buffer = unsafe {
            device.newBufferWithBytesNoCopy_length_options_deallocator(
                start,
                bytes,
                MTLResourceOptions::StorageModeShared,
                Some(&free),
            )
        };
        let buffer = buffer.ok_or_else(|| Error::Memory { bytes, max: device.maxBufferLength() })?;
        Ok(Memory::of(buffer, 0, element, bytes / element.bytes()))
    }
}
