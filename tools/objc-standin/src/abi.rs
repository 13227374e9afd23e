//! Functions of the runtime by their symbols, for modules that lie below those that define them.

use std::ffi::c_void;

use crate::class::Imp;
use crate::selectors::Sel;

unsafe extern "C-unwind" {
    pub(crate) fn objc_retain(object: *mut c_void) -> *mut c_void;
    pub(crate) fn objc_release(object: *mut c_void);
    pub(crate) fn objc_autorelease(object: *mut c_void) -> *mut c_void;
    pub(crate) fn objc_msg_lookup(receiver: *mut c_void, sel: Sel) -> Imp;
    /// Makes NSObject.
    pub(crate) safe fn flashtile_objc_boot();
}
