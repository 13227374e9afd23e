//! Autorelease pools, a stack on each thread.

use std::cell::RefCell;
use std::ffi::c_void;

use crate::header::class_of;
use crate::objects::{objc_release, objc_retain};

thread_local! {
    /// Objects that pools release, oldest first.
    static OBJECTS: RefCell<Vec<*mut c_void>> = const { RefCell::new(Vec::new()) };
    /// For each pool that is open, the objects that are older.
    static OPEN: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

#[unsafe(no_mangle)]
extern "C-unwind" fn objc_autoreleasePoolPush() -> *mut c_void {
    let older = OBJECTS.with_borrow(Vec::len);
    OPEN.with_borrow_mut(|o| {
        o.push(older);
        o.len() as *mut c_void
    })
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn objc_autoreleasePoolPop(pool: *mut c_void) {
    let open = OPEN.with_borrow(Vec::len);
    assert_eq!(pool as usize, open, "autorelease pools are not popped in order");
    let older = OPEN.with_borrow(|o| o[open - 1]);
    // A release may autorelease more, into this pool, which is still open.
    while let Some(object) = OBJECTS.with_borrow_mut(|o| if o.len() > older { o.pop() } else { None }) {
        objc_release(object);
    }
    OPEN.with_borrow_mut(|o| o.pop());
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn objc_autorelease(object: *mut c_void) -> *mut c_void {
    if !object.is_null() && !class_of(object).is_meta {
        let is_open = !OPEN.with_borrow(Vec::is_empty);
        assert!(is_open, "autorelease of {} without a pool: it would leak", class_of(object).text());
        OBJECTS.with_borrow_mut(|o| o.push(object));
    }
    object
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn objc_autoreleaseReturnValue(object: *mut c_void) -> *mut c_void {
    objc_autorelease(object)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn objc_retainAutoreleasedReturnValue(object: *mut c_void) -> *mut c_void {
    objc_retain(object)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn objc_retainAutorelease(object: *mut c_void) -> *mut c_void {
    objc_autorelease(objc_retain(object))
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn objc_retainAutoreleaseReturnValue(object: *mut c_void) -> *mut c_void {
    objc_autorelease(objc_retain(object))
}
