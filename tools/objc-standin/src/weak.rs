//! Weak references: places that become NULL when the last reference to their object goes.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use crate::abi::{objc_autorelease, objc_release};
use crate::header::try_retain;

/// Addresses of the places that refer to an object, by its address.
static PLACES: LazyLock<Mutex<HashMap<usize, Vec<usize>>>> = LazyLock::new(Mutex::default);

fn places() -> MutexGuard<'static, HashMap<usize, Vec<usize>>> {
    PLACES.lock().unwrap_or_else(PoisonError::into_inner)
}

fn add(all: &mut HashMap<usize, Vec<usize>>, object: *mut c_void, place: *mut *mut c_void) {
    all.entry(object as usize).or_default().push(place as usize);
}

fn remove(all: &mut HashMap<usize, Vec<usize>>, object: *mut c_void, place: *mut *mut c_void) {
    if let Some(of_object) = all.get_mut(&(object as usize)) {
        of_object.retain(|&p| p != place as usize);
        if of_object.is_empty() {
            all.remove(&(object as usize));
        }
    }
}

/// The last reference to an object is gone.
pub(crate) unsafe fn cleared(object: *mut c_void) {
    let mut all = places();
    for place in all.remove(&(object as usize)).unwrap_or_default() {
        *(place as *mut *mut c_void) = null_mut();
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn objc_initWeak(place: *mut *mut c_void, object: *mut c_void) -> *mut c_void {
    *place = null_mut();
    objc_storeWeak(place, object)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn objc_storeWeak(place: *mut *mut c_void, object: *mut c_void) -> *mut c_void {
    // The object stays while its place is added: it may be on its way out on another thread.
    let kept = if !object.is_null() && try_retain(object) { object } else { null_mut() };
    {
        let mut all = places();
        remove(&mut all, *place, place);
        *place = kept;
        if !kept.is_null() {
            add(&mut all, kept, place);
        }
    }
    objc_release(kept);
    kept
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn objc_loadWeakRetained(place: *mut *mut c_void) -> *mut c_void {
    let _all = places();
    let object = *place;
    if !object.is_null() && try_retain(object) { object } else { null_mut() }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn objc_loadWeak(place: *mut *mut c_void) -> *mut c_void {
    objc_autorelease(objc_loadWeakRetained(place))
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn objc_destroyWeak(place: *mut *mut c_void) {
    let mut all = places();
    remove(&mut all, *place, place);
    *place = null_mut();
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn objc_copyWeak(to: *mut *mut c_void, from: *mut *mut c_void) {
    let object = objc_loadWeakRetained(from);
    objc_initWeak(to, object);
    objc_release(object);
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn objc_moveWeak(to: *mut *mut c_void, from: *mut *mut c_void) {
    objc_copyWeak(to, from);
    objc_destroyWeak(from);
}
