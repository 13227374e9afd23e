//! Objects. Their memory is never given back, so that whatever reaches a freed one is found.

use std::alloc::{Layout, alloc_zeroed};
use std::ffi::{c_char, c_void};
use std::ptr::{from_ref, null, null_mut};
use std::sync::atomic::{AtomicPtr, Ordering::SeqCst};

use crate::abi::objc_msg_lookup;
use crate::associated;
use crate::block::{_Block_copy, _Block_release, is_block};
use crate::class::Class;
use crate::classes::{all, class_named};
use crate::header::{FREED, HEADER, class_of, count, is_class};
use crate::selectors::{Sel, selector};
use crate::weak;

/// The number of objects of a class that are alive.
pub fn live(class: &str) -> isize {
    class_named(class).map_or(0, |c| c.live.load(SeqCst))
}

/// The classes with objects that are alive, by name, and how many.
pub fn all_live() -> Vec<(String, isize)> {
    let counts = all().into_iter().map(|c| (c.text(), c.live.load(SeqCst)));
    counts.filter(|(_, live)| *live != 0).collect()
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn class_createInstance(
    class: *const Class,
    extra: usize,
) -> *mut c_void {
    let bytes = HEADER + (*class).size.load(SeqCst) + extra;
    let layout = Layout::from_size_align(bytes, HEADER).expect("a size of an object");
    let at = alloc_zeroed(layout);
    assert!(!at.is_null(), "out of memory: {bytes} bytes");
    let object = at.byte_add(HEADER).cast::<c_void>();
    count(object).store(1, SeqCst);
    (*object.cast::<AtomicPtr<Class>>()).store(class.cast_mut(), SeqCst);
    (*class).live.fetch_add(1, SeqCst);
    object
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn object_dispose(object: *mut c_void) -> *mut c_void {
    class_of(object).live.fetch_sub(1, SeqCst);
    count(object).store(FREED, SeqCst);
    associated::removed(object);
    null_mut()
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn object_getClass(object: *const c_void) -> *const Class {
    if object.is_null() { null() } else { class_of(object) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn object_getClassName(object: *const c_void) -> *const c_char {
    if object.is_null() { c"nil".as_ptr() } else { class_of(object).name_pointer() }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn object_isClass(object: *const c_void) -> u8 {
    u8::from(!object.is_null() && is_class(object))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn objc_retain(object: *mut c_void) -> *mut c_void {
    if object.is_null() {
        return object;
    }
    if is_block(object) {
        return _Block_copy(object);
    }
    if !is_class(object) {
        let before = count(object).fetch_add(1, SeqCst);
        assert!(before < FREED && before > 0, "retain of a freed {}", class_of(object).text());
    }
    object
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn objc_release(object: *mut c_void) {
    if object.is_null() {
        return;
    }
    if is_block(object) {
        return _Block_release(object);
    }
    if is_class(object) {
        return;
    }
    let before = count(object).fetch_sub(1, SeqCst);
    assert!(before < FREED && before > 0, "release of a freed {}", class_of(object).text());
    if before == 1 {
        weak::cleared(object);
        let sel = selector(c"dealloc");
        type Dealloc = unsafe extern "C-unwind" fn(*mut c_void, Sel);
        let dealloc =
            std::mem::transmute::<unsafe extern "C-unwind" fn(), Dealloc>(objc_msg_lookup(object, sel));
        dealloc(object, sel);
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn objc_retainBlock(block: *const c_void) -> *mut c_void {
    _Block_copy(block)
}

/// A class as an object.
pub(crate) fn as_object(class: &'static Class) -> *mut c_void {
    from_ref(class).cast_mut().cast()
}

/// Has an object stay for ever, uncounted: constants of a framework are no leaks.
///
/// # Safety
/// `object` is an object that is alive and no class or block.
pub unsafe fn immortal(object: *mut c_void) {
    count(object).store(FREED / 2, SeqCst);
    class_of(object).live.fetch_sub(1, SeqCst);
}
