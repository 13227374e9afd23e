//! Zeroed memory, whose pages the system provides on first touch.

#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed};
use std::ops::{Deref, DerefMut};

/// Alignment of the first byte: a cache line.
const ALIGN: usize = 64;

/// Zeroed bytes that start on a cache line.
pub struct Zeroed {
    // Allocators return untouched pages for a zeroed allocation of small alignment, but clear one of large alignment
    // by hand. So the allocation is larger and the first aligned byte is found inside it.
    memory: Box<[u8]>,
    start: usize,
    len: usize,
}

impl Zeroed {
    /// `len` zeroed bytes, or `None` if the allocation fails.
    pub fn new(len: usize) -> Option<Self> {
        let size = len.checked_add(ALIGN)?;
        let layout = Layout::array::<u8>(size).ok()?;
        // SAFETY: the size is at least ALIGN, so it is not 0.
        let memory = unsafe { alloc_zeroed(layout) };
        if memory.is_null() {
            return None;
        }
        // SAFETY: the memory is a new allocation of the global allocator with the layout of this boxed slice, and
        // every byte is initialised.
        let memory = unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(memory, size)) };
        let start = (memory.as_ptr() as usize).next_multiple_of(ALIGN) - memory.as_ptr() as usize;
        prefer_huge_pages(&memory);
        Some(Self { memory, start, len })
    }
}

/// Asks the system for huge pages, which are only an optimization: rows of a cache lie far apart, and with small
/// pages most loads would miss the TLB.
#[cfg(target_os = "linux")]
fn prefer_huge_pages(memory: &[u8]) {
    // The usual size of a huge page, and a multiple of any smaller page.
    const HUGE: usize = 2 << 20;
    let address = memory.as_ptr() as usize;
    let (start, end) = (address.next_multiple_of(HUGE), (address + memory.len()) / HUGE * HUGE);
    if start < end {
        let offset = start - address;
        // SAFETY: the range is part of the allocation, and the advice changes neither its contents nor its
        // protection.
        unsafe {
            libc::madvise(memory.as_ptr().add(offset).cast_mut().cast(), end - start, libc::MADV_HUGEPAGE);
        }
    }
}

#[cfg(not(target_os = "linux"))]
fn prefer_huge_pages(_: &[u8]) {}

impl std::fmt::Debug for Zeroed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.len)
    }
}

impl Deref for Zeroed {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.len]
    }
}

impl DerefMut for Zeroed {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_on_a_line_and_is_zero() {
        for len in [0, 1, 63, 64, 4097] {
            let mut memory = Zeroed::new(len).unwrap();
            assert_eq!(memory.len(), len);
            assert!((memory.as_ptr() as usize).is_multiple_of(ALIGN));
            assert!(memory.iter().all(|&x| x == 0));
            memory.fill(1);
        }
        assert!(Zeroed::new(usize::MAX).is_none());
        assert!(Zeroed::new(isize::MAX as usize - ALIGN).is_none());
    }
}
