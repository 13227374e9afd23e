//! The words before and at the start of each object: the count of references, and the class.
//!
//! Two words lie before each object, the first of which counts references.

use std::ffi::c_void;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering::SeqCst};

use crate::block::is_block;
use crate::class::Class;

/// Bytes before an object.
pub(crate) const HEADER: usize = 16;

/// The count of an object whose `dealloc` has returned. Half of the range is left for references that are released too often.
pub(crate) const FREED: usize = usize::MAX / 2;

/// The count of references to an object.
pub(crate) unsafe fn count(object: *const c_void) -> &'static AtomicUsize {
    &*object.byte_sub(HEADER).cast::<AtomicUsize>()
}

/// The class of an object, the metaclass of a class.
pub(crate) unsafe fn class_of(object: *const c_void) -> &'static Class {
    (*object.cast::<AtomicPtr<Class>>()).load(SeqCst).as_ref().expect("an object has a class")
}

/// Returns true if an object is a class.
pub(crate) unsafe fn is_class(object: *const c_void) -> bool {
    class_of(object).is_meta
}

/// Returns true if an object, which is no class, is gone.
pub(crate) unsafe fn is_freed(object: *const c_void) -> bool {
    !is_block(object) && count(object).load(SeqCst) >= FREED
}

/// A reference more, unless the last one is gone.
pub(crate) unsafe fn try_retain(object: *mut c_void) -> bool {
    count(object).fetch_update(SeqCst, SeqCst, |n| (n > 0 && n < FREED).then(|| n + 1)).is_ok()
}

/// The references to an object.
pub(crate) unsafe fn references(object: *const c_void) -> usize {
    count(object).load(SeqCst)
}
