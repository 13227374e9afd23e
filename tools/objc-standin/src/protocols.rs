//! Protocols. There are none: no binary has descriptions of protocols, so that whoever asks for one is told that it is not there.

use std::ffi::{c_char, c_uint, c_void};
use std::ptr::{null, null_mut};

use crate::class::Class;

#[unsafe(no_mangle)]
extern "C-unwind" fn objc_getProtocol(_name: *const c_char) -> *const c_void {
    null()
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn objc_copyProtocolList(count: *mut c_uint) -> *mut *const c_void {
    none(count)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn class_copyProtocolList(
    _class: *const Class,
    count: *mut c_uint,
) -> *mut *const c_void {
    none(count)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn protocol_copyProtocolList(
    _protocol: *const c_void,
    count: *mut c_uint,
) -> *mut *const c_void {
    none(count)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn protocol_copyMethodDescriptionList(
    _protocol: *const c_void,
    _is_required: u8,
    _is_instance: u8,
    count: *mut c_uint,
) -> *mut c_void {
    none::<c_void>(count).cast()
}

unsafe fn none<T>(count: *mut c_uint) -> *mut *const T {
    if !count.is_null() {
        *count = 0;
    }
    null_mut()
}

#[unsafe(no_mangle)]
extern "C-unwind" fn class_addProtocol(_class: *mut Class, _protocol: *const c_void) -> u8 {
    0
}

#[unsafe(no_mangle)]
extern "C-unwind" fn class_conformsToProtocol(_class: *const Class, _protocol: *const c_void) -> u8 {
    0
}

#[unsafe(no_mangle)]
extern "C-unwind" fn protocol_conformsToProtocol(_protocol: *const c_void, _other: *const c_void) -> u8 {
    0
}

#[unsafe(no_mangle)]
extern "C-unwind" fn protocol_getName(_protocol: *const c_void) -> *const c_char {
    c"".as_ptr()
}

#[unsafe(no_mangle)]
extern "C-unwind" fn protocol_isEqual(a: *const c_void, b: *const c_void) -> u8 {
    u8::from(a == b)
}
