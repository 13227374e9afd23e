//! Objects that are kept with other objects.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use crate::abi::{objc_release, objc_retain};

/// Value and whether it is retained, by the addresses of object and key.
type Table = HashMap<(usize, usize), (usize, bool)>;

static TABLE: LazyLock<Mutex<Table>> = LazyLock::new(Mutex::default);

fn table() -> MutexGuard<'static, Table> {
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// OBJC_ASSOCIATION_ASSIGN: the value is not retained.
const ASSIGN: usize = 0;

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn objc_setAssociatedObject(
    object: *mut c_void,
    key: *const c_void,
    value: *mut c_void,
    policy: usize,
) {
    let is_retained = policy != ASSIGN;
    if is_retained {
        objc_retain(value);
    }
    let at = (object as usize, key as usize);
    let before =
        if value.is_null() { table().remove(&at) } else { table().insert(at, (value as usize, is_retained)) };
    if let Some((before, true)) = before {
        objc_release(before as *mut c_void);
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn objc_getAssociatedObject(object: *mut c_void, key: *const c_void) -> *mut c_void {
    table().get(&(object as usize, key as usize)).map_or(null_mut(), |&(value, _)| value as *mut c_void)
}

/// An object is gone, and what is kept with it.
pub(crate) unsafe fn removed(object: *mut c_void) {
    let all: Vec<(usize, bool)> = {
        let mut table = table();
        let keys: Vec<_> = table.keys().filter(|k| k.0 == object as usize).copied().collect();
        keys.iter().filter_map(|k| table.remove(k)).collect()
    };
    for (value, _) in all.into_iter().filter(|v| v.1) {
        objc_release(value as *mut c_void);
    }
}
