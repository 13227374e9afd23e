//! Zeroed memory whose pages the system provides when they are first touched.

#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed};
use std::ops::{Deref, DerefMut};

/// Alignment of the first byte: a cache line.
const ALIGN: usize = 64;

/// Zeroed bytes that start on a cache line.
pub(super) struct Zeroed {
    // Allocators hand out untouched pages for a zeroed allocation of small alignment and clear one of large alignment by
    // hand, so the first line is sought inside.
    memory: Box<[u8]>,
    start: usize,
    len: usize,
}

impl Zeroed {
    /// `len` zeroed bytes, or `None` where there is no memory for them.
    pub(super) fn new(len: usize) -> Option<Self> {
        let size = len.checked_add(ALIGN)?;
        let layout = Layout::array::<u8>(size).ok()?;
        // SAFETY: the size is at least ALIGN, so it is not 0.
        let memory = unsafe { alloc_zeroed(layout) };
        if memory.is_null() {
            return None;
        }
        // SAFETY: the memory is a new allocation of the global allocator, with the layout of this boxed slice, and every
        // byte of it is initialised.
        let memory = unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(memory, size)) };
        let start = (memory.as_ptr() as usize).next_multiple_of(ALIGN) - memory.as_ptr() as usize;
        Some(Self { memory, start, len })
    }
}

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
