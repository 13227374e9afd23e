//! Selectors: one address for each name.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char};
use std::sync::{Mutex, PoisonError};

/// The address of a name that stays.
pub(crate) type Sel = *const c_char;

static SELECTORS: Mutex<BTreeMap<CString, usize>> = Mutex::new(BTreeMap::new());

/// The selector of a name.
pub(crate) fn selector(name: &CStr) -> Sel {
    let mut all = SELECTORS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(&at) = all.get(name) {
        return at as Sel;
    }
    let at = name.to_owned().into_raw();
    all.insert(name.to_owned(), at as usize);
    at
}

/// The name of a selector.
pub(crate) unsafe fn name_of(sel: Sel) -> String {
    CStr::from_ptr(sel).to_string_lossy().into_owned()
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn sel_registerName(name: *const c_char) -> Sel {
    selector(CStr::from_ptr(name))
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn sel_getUid(name: *const c_char) -> Sel {
    selector(CStr::from_ptr(name))
}

#[unsafe(no_mangle)]
extern "C-unwind" fn sel_getName(sel: Sel) -> *const c_char {
    sel
}

#[unsafe(no_mangle)]
extern "C-unwind" fn sel_isEqual(a: Sel, b: Sel) -> u8 {
    u8::from(a == b)
}
