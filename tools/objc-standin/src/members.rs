//! Methods and instance variables.

use std::ffi::{CStr, c_char, c_uint, c_void};
use std::ptr::{from_ref, null};
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use crate::abi::{objc_release, objc_retain};
use crate::class::{Class, Imp, Ivar, Method};
use crate::encoding::{copied_list, copied_text, types};
use crate::header::class_of;
use crate::selectors::Sel;

fn add(class: &Class, sel: Sel, imp: Imp, types: &CStr) {
    let method = Method { sel: sel as usize, imp: AtomicUsize::new(imp as usize), types: types.to_owned() };
    let mut methods = class.methods.write().unwrap_or_else(PoisonError::into_inner);
    methods.insert(sel as usize, Box::leak(Box::new(method)));
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn class_addMethod(
    class: *const Class,
    sel: Sel,
    imp: Imp,
    types: *const c_char,
) -> u8 {
    let is_new =
        !(*class).methods.read().unwrap_or_else(PoisonError::into_inner).contains_key(&(sel as usize));
    if is_new {
        add(&*class, sel, imp, CStr::from_ptr(types));
    }
    u8::from(is_new)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn class_getInstanceMethod(class: *const Class, sel: Sel) -> *const Method {
    (*class).find(sel).map_or(null(), from_ref)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn class_getClassMethod(class: *const Class, sel: Sel) -> *const Method {
    class_getInstanceMethod((*class).isa.load(SeqCst), sel)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn class_copyMethodList(
    class: *const Class,
    count: *mut c_uint,
) -> *mut *const Method {
    let methods: Vec<&'static Method> =
        (*class).methods.read().unwrap_or_else(PoisonError::into_inner).values().copied().collect();
    copied_list(methods.into_iter().map(from_ref), count)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn method_getName(method: *const Method) -> Sel {
    (*method).sel as Sel
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn method_getImplementation(method: *const Method) -> Imp {
    (*method).imp()
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn method_setImplementation(method: *const Method, imp: Imp) -> Imp {
    let before = (*method).imp();
    (*method).imp.store(imp as usize, SeqCst);
    before
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn method_exchangeImplementations(a: *const Method, b: *const Method) {
    let before = method_setImplementation(a, (*b).imp());
    method_setImplementation(b, before);
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn method_getTypeEncoding(method: *const Method) -> *const c_char {
    (*method).types.as_ptr()
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn method_getNumberOfArguments(method: *const Method) -> c_uint {
    types(&(*method).types).len() as c_uint - 1
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn method_copyReturnType(method: *const Method) -> *mut c_char {
    copied_text(types(&(*method).types).first().copied())
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn method_copyArgumentType(method: *const Method, index: c_uint) -> *mut c_char {
    copied_text(types(&(*method).types).get(index as usize + 1).copied())
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn class_addIvar(
    class: *const Class,
    name: *const c_char,
    size: usize,
    align: u8,
    types: *const c_char,
) -> u8 {
    let c = &*class;
    let offset = c.size.load(SeqCst).next_multiple_of(1 << align);
    c.size.store(offset + size, SeqCst);
    let (name, types) = (CStr::from_ptr(name).to_owned(), CStr::from_ptr(types).to_owned());
    let ivar = Ivar { name, offset: offset as isize, types };
    c.ivars.write().unwrap_or_else(PoisonError::into_inner).push(Box::leak(Box::new(ivar)));
    1
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn class_getInstanceVariable(
    class: *const Class,
    name: *const c_char,
) -> *const Ivar {
    let name = CStr::from_ptr(name);
    let mut at = class.as_ref();
    while let Some(c) = at {
        let ivars = c.ivars.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(&found) = ivars.iter().find(|i| i.name.as_c_str() == name) {
            return found;
        }
        at = c.parent();
    }
    null()
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn class_getClassVariable(class: *const Class, name: *const c_char) -> *const Ivar {
    class_getInstanceVariable((*class).isa.load(SeqCst), name)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn class_copyIvarList(class: *const Class, count: *mut c_uint) -> *mut *const Ivar {
    let ivars: Vec<&'static Ivar> = (*class).ivars.read().unwrap_or_else(PoisonError::into_inner).clone();
    copied_list(ivars.into_iter().map(from_ref), count)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn ivar_getOffset(ivar: *const Ivar) -> isize {
    (*ivar).offset
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn ivar_getName(ivar: *const Ivar) -> *const c_char {
    (*ivar).name.as_ptr()
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn ivar_getTypeEncoding(ivar: *const Ivar) -> *const c_char {
    (*ivar).types.as_ptr()
}

unsafe fn ivar_at(object: *mut c_void, ivar: *const Ivar) -> *mut *mut c_void {
    object.byte_offset((*ivar).offset).cast()
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn object_getIvar(object: *mut c_void, ivar: *const Ivar) -> *mut c_void {
    if object.is_null() || ivar.is_null() { std::ptr::null_mut() } else { *ivar_at(object, ivar) }
}

/// Stores an object without retaining it, as GNUstep's runtime does.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn object_setIvar(object: *mut c_void, ivar: *const Ivar, value: *mut c_void) {
    if !object.is_null() && !ivar.is_null() {
        *ivar_at(object, ivar) = value;
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn object_getInstanceVariable(
    object: *mut c_void,
    name: *const c_char,
    out: *mut *mut c_void,
) -> *const Ivar {
    let ivar = class_getInstanceVariable(class_of(object), name);
    if !out.is_null() {
        *out = object_getIvar(object, ivar);
    }
    ivar
}

/// Retains the new object and releases the one before.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn objc_storeStrong(at: *mut *mut c_void, value: *mut c_void) {
    let before = std::ptr::replace(at, objc_retain(value));
    objc_release(before);
}
