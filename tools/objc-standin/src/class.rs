//! The parts of a class.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char};
use std::fmt;
use std::ptr::{from_ref, null_mut};
use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicPtr, AtomicUsize, Ordering::SeqCst};
use std::sync::{PoisonError, RwLock};

use crate::selectors::Sel;

/// The function of a method, whose true type its encoding tells.
pub(crate) type Imp = unsafe extern "C-unwind" fn();

/// A method of a class.
pub(crate) struct Method {
    /// A [`Sel`].
    pub(crate) sel: usize,
    /// An [`Imp`].
    pub(crate) imp: AtomicUsize,
    pub(crate) types: CString,
}

impl Method {
    pub(crate) fn imp(&self) -> Imp {
        // SAFETY: only functions are stored.
        unsafe { std::mem::transmute::<usize, Imp>(self.imp.load(SeqCst)) }
    }
}

/// An instance variable.
pub(crate) struct Ivar {
    pub(crate) name: CString,
    pub(crate) offset: isize,
    pub(crate) types: CString,
}

/// A class or a metaclass. Other crates can only give it a symbol
/// ([`export_classes`](crate::export_classes)).
#[repr(C)]
pub struct Class {
    pub(crate) isa: AtomicPtr<Class>,
    pub(crate) superclass: AtomicPtr<Class>,
    pub(crate) name: AtomicPtr<c_char>,
    pub(crate) size: AtomicUsize,
    /// Objects that are alive.
    pub(crate) live: AtomicIsize,
    pub(crate) is_meta: bool,
    pub(crate) is_registered: AtomicBool,
    pub(crate) methods: RwLock<BTreeMap<usize, &'static Method>>,
    pub(crate) ivars: RwLock<Vec<&'static Ivar>>,
}

impl fmt::Debug for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Class").field(&self.text()).finish()
    }
}

impl Class {
    /// A class without a name, which `objc_allocateClassPair` fills.
    pub const fn new(is_meta: bool) -> Self {
        Self {
            isa: AtomicPtr::new(null_mut()),
            superclass: AtomicPtr::new(null_mut()),
            name: AtomicPtr::new(null_mut()),
            size: AtomicUsize::new(size_of::<*const Self>()),
            live: AtomicIsize::new(0),
            is_meta,
            is_registered: AtomicBool::new(false),
            methods: RwLock::new(BTreeMap::new()),
            ivars: RwLock::new(Vec::new()),
        }
    }

    pub(crate) fn parent(&self) -> Option<&'static Self> {
        // SAFETY: classes are never freed.
        unsafe { self.superclass.load(SeqCst).as_ref() }
    }

    /// The name, as a text that stays.
    pub(crate) fn name_pointer(&self) -> *const c_char {
        self.name.load(SeqCst)
    }

    pub(crate) fn text(&self) -> String {
        let name = self.name.load(SeqCst);
        if name.is_null() {
            return "(a class that is not defined)".into();
        }
        // SAFETY: names of classes are texts that stay.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }

    /// The method of this class or of the nearest class above that has one.
    pub(crate) fn find(&self, sel: Sel) -> Option<&'static Method> {
        let own = self.methods.read().unwrap_or_else(PoisonError::into_inner).get(&(sel as usize)).copied();
        own.or_else(|| self.parent()?.find(sel))
    }

    /// Returns true if this class is the other, or lies below it.
    pub(crate) fn is_below(&self, other: *const Self) -> bool {
        std::ptr::eq(self, other) || self.parent().is_some_and(|p| p.is_below(other))
    }

    pub(crate) fn at(&self) -> *mut Self {
        from_ref(self).cast_mut()
    }
}
