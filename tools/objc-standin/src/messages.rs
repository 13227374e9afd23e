//! Which function answers a message.

use std::ffi::c_void;
use std::sync::atomic::Ordering::SeqCst;

use crate::class::{Class, Imp, Method};
use crate::header::{class_of, is_freed};
use crate::selectors::{Sel, name_of, selector};

/// The receiver of a message to `super`.
#[repr(C)]
struct Super {
    receiver: *mut c_void,
    superclass: *const Class,
}

/// Panics with the message that nobody answers.
pub(crate) unsafe extern "C-unwind" fn unrecognized(receiver: *const c_void, sel: Sel) {
    let class = class_of(receiver);
    let sign = if class.is_meta { "+" } else { "-" };
    let what = if !class.is_meta && is_freed(receiver) {
        "message to a freed object"
    } else {
        "unrecognized selector"
    };
    panic!("{what}: {sign}[{} {}]", class.text(), name_of(sel));
}

fn unknown() -> Imp {
    let f: unsafe extern "C-unwind" fn(*const c_void, Sel) = unrecognized;
    // SAFETY: both are functions; every message passes a receiver and a selector first.
    unsafe { std::mem::transmute::<unsafe extern "C-unwind" fn(*const c_void, Sel), Imp>(f) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn objc_msg_lookup(receiver: *mut c_void, sel: Sel) -> Imp {
    let class = class_of(receiver);
    // Only dealloc reaches an object whose last reference is gone.
    if !class.is_meta && is_freed(receiver) && sel != selector(c"dealloc") {
        return unknown();
    }
    class.find(sel).map_or_else(unknown, Method::imp)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn objc_msg_lookup_super(sup: *const Super, sel: Sel) -> Imp {
    let _ = (*sup).receiver;
    (*(*sup).superclass).find(sel).map_or_else(unknown, Method::imp)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn class_getMethodImplementation(class: *const Class, sel: Sel) -> Imp {
    (*class).find(sel).map_or_else(unknown, Method::imp)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn object_setClass(object: *mut c_void, class: *const Class) -> *const Class {
    let before = class_of(object);
    before.live.fetch_sub(1, SeqCst);
    (*class).live.fetch_add(1, SeqCst);
    (*object.cast::<std::sync::atomic::AtomicPtr<Class>>()).store(class.cast_mut(), SeqCst);
    before
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn objc_exception_throw(_exception: *mut c_void) -> ! {
    panic!("an Objective-C exception")
}
