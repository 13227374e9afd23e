//! Classes and metaclasses.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::{from_ref, null, null_mut};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Mutex, PoisonError};

use crate::abi::flashtile_objc_boot;
use crate::class::Class;
use crate::encoding::copied_list;
use crate::selectors::Sel;

/// Classes with symbols, by name: class and metaclass.
static EXPORTED: Mutex<BTreeMap<&str, (&Class, &Class)>> = Mutex::new(BTreeMap::new());

/// Registered classes by name: addresses of `Class`.
static CLASSES: Mutex<BTreeMap<String, usize>> = Mutex::new(BTreeMap::new());

/// Has `objc_allocateClassPair` use this class and metaclass for the name.
pub fn export(name: &'static str, class: &'static Class, metaclass: &'static Class) {
    EXPORTED.lock().unwrap_or_else(PoisonError::into_inner).insert(name, (class, metaclass));
}

/// All registered classes.
pub(crate) fn all() -> Vec<&'static Class> {
    let all = CLASSES.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: only addresses of classes are in the table, and classes are never freed.
    all.values().map(|&c| unsafe { &*(c as *const Class) }).collect()
}

/// The class of this name.
pub(crate) fn class_named(name: &str) -> Option<&'static Class> {
    flashtile_objc_boot();
    let at = CLASSES.lock().unwrap_or_else(PoisonError::into_inner).get(name).copied()?;
    // SAFETY: as in `all`.
    Some(unsafe { &*(at as *const Class) })
}

/// A class and its metaclass with this name, `None` where there is one already.
pub(crate) fn allocate(superclass: Option<&'static Class>, name: &CStr) -> Option<&'static Class> {
    let text = name.to_string_lossy().into_owned();
    if CLASSES.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&text) {
        return None;
    }
    let exported = EXPORTED.lock().unwrap_or_else(PoisonError::into_inner).get(text.as_str()).copied();
    let (class, meta) = exported
        .unwrap_or_else(|| (Box::leak(Box::new(Class::new(false))), Box::leak(Box::new(Class::new(true)))));
    let name = name.to_owned().into_raw();
    class.name.store(name, SeqCst);
    meta.name.store(name, SeqCst);
    class.isa.store(meta.at(), SeqCst);
    // A metaclass is an object of its own: nobody asks for the class of one.
    meta.isa.store(meta.at(), SeqCst);
    match superclass {
        Some(s) => {
            class.superclass.store(s.at(), SeqCst);
            meta.superclass.store(s.isa.load(SeqCst), SeqCst);
            class.size.store(s.size.load(SeqCst), SeqCst);
        }
        None => meta.superclass.store(class.at(), SeqCst),
    }
    Some(class)
}

/// Makes a class known by its name.
pub(crate) fn register(class: &'static Class) {
    class.is_registered.store(true, SeqCst);
    CLASSES.lock().unwrap_or_else(PoisonError::into_inner).insert(class.text(), class.at() as usize);
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn objc_getClass(name: *const c_char) -> *const Class {
    class_named(&CStr::from_ptr(name).to_string_lossy()).map_or(null(), from_ref)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn objc_lookUpClass(name: *const c_char) -> *const Class {
    objc_getClass(name)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn objc_getMetaClass(name: *const c_char) -> *const Class {
    objc_getClass(name).as_ref().map_or(null(), |c| c.isa.load(SeqCst))
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn objc_getRequiredClass(name: *const c_char) -> *const Class {
    let name = CStr::from_ptr(name).to_string_lossy();
    class_named(&name).unwrap_or_else(|| panic!("the class {name} does not exist"))
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn objc_getClassList(out: *mut *const Class, capacity: c_int) -> c_int {
    let all = all();
    for (i, class) in all.iter().take(usize::try_from(capacity).unwrap_or(0)).enumerate() {
        out.add(i).write(*class);
    }
    all.len() as c_int
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn objc_copyClassList(count: *mut c_uint) -> *mut *const Class {
    copied_list(all().into_iter().map(from_ref), count)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn objc_allocateClassPair(
    superclass: *const Class,
    name: *const c_char,
    _extra: usize,
) -> *mut Class {
    flashtile_objc_boot();
    allocate(superclass.as_ref(), CStr::from_ptr(name)).map_or(null_mut(), Class::at)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn objc_registerClassPair(class: *mut Class) {
    register(&*class);
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn objc_disposeClassPair(class: *mut Class) {
    CLASSES.lock().unwrap_or_else(PoisonError::into_inner).remove(&(*class).text());
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn class_getName(class: *const Class) -> *const c_char {
    (*class).name_pointer()
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn class_getSuperclass(class: *const Class) -> *const Class {
    (*class).superclass.load(SeqCst)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn class_isMetaClass(class: *const Class) -> u8 {
    u8::from((*class).is_meta)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn class_getInstanceSize(class: *const Class) -> usize {
    (*class).size.load(SeqCst).next_multiple_of(align_of::<*const c_void>())
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn class_respondsToSelector(class: *const Class, sel: Sel) -> u8 {
    u8::from((*class).find(sel).is_some())
}

#[unsafe(no_mangle)]
extern "C-unwind" fn class_getIvarLayout(_class: *const Class) -> *const u8 {
    null()
}
