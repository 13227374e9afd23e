//! NSObject, and what happens before `main`.

use std::ffi::{CStr, c_void};
use std::sync::Once;
use std::sync::atomic::Ordering::SeqCst;

use crate::class::{Class, Imp};
use crate::classes::{allocate, export, register};
use crate::header::{class_of, references};
use crate::members::class_addMethod;
use crate::messages::{objc_msg_lookup, unrecognized};
use crate::objects::{as_object, class_createInstance, objc_retain, object_dispose};
use crate::selectors::{Sel, selector};

#[unsafe(export_name = "._OBJC_CLASS_NSObject")]
static NSObject: Class = Class::new(false);
static NSObject_meta: Class = Class::new(true);

type Get = unsafe extern "C-unwind" fn(*mut c_void, Sel) -> *mut c_void;
type Act = unsafe extern "C-unwind" fn(*mut c_void, Sel);
type Ask = unsafe extern "C-unwind" fn(*mut c_void, Sel, *mut c_void) -> u8;
type Count = unsafe extern "C-unwind" fn(*mut c_void, Sel) -> usize;

/// Makes NSObject, once.
#[unsafe(no_mangle)]
extern "C-unwind" fn flashtile_objc_boot() {
    static BOOT: Once = Once::new();
    BOOT.call_once(|| {
        export("NSObject", &NSObject, &NSObject_meta);
        let root = allocate(None, c"NSObject").expect("NSObject is the first class");
        // SAFETY: the functions have the types of their encodings, and classes are never freed.
        unsafe { methods(root, &*root.isa.load(SeqCst)) };
        register(root);
    });
}

unsafe fn methods(root: &Class, meta: &Class) {
    let add = |class: &Class, name: &CStr, types: &CStr, imp: Imp| {
        class_addMethod(class, selector(name), imp, types.as_ptr());
    };
    let get =
        |class: &Class, name: &CStr, f: Get| add(class, name, c"@@:", std::mem::transmute::<Get, Imp>(f));
    let ask = |name: &CStr, types: &CStr, f: Ask| add(root, name, types, std::mem::transmute::<Ask, Imp>(f));
    get(meta, c"alloc", allocated);
    get(meta, c"new", new);
    add(meta, c"class", c"#@:", std::mem::transmute::<Get, Imp>(itself));
    get(root, c"init", itself);
    get(root, c"self", itself);
    get(root, c"copy", copy);
    get(root, c"mutableCopy", copy);
    add(root, c"class", c"#@:", std::mem::transmute::<Get, Imp>(class));
    add(root, c"dealloc", c"v@:", std::mem::transmute::<Act, Imp>(dealloc));
    add(root, c"hash", c"Q@:", std::mem::transmute::<Count, Imp>(hash));
    add(root, c"retainCount", c"Q@:", std::mem::transmute::<Count, Imp>(retain_count));
    add(root, c"doesNotRecognizeSelector:", c"v@::", std::mem::transmute::<Ask, Imp>(unknown));
    ask(c"isEqual:", c"C@:@", is_equal);
    ask(c"isKindOfClass:", c"C@:#", is_kind_of);
    ask(c"isMemberOfClass:", c"C@:#", is_member_of);
    ask(c"respondsToSelector:", c"C@::", responds);
    ask(c"conformsToProtocol:", c"C@:@", conforms);
}

unsafe extern "C-unwind" fn allocated(class: *mut c_void, _: Sel) -> *mut c_void {
    let c = &*class.cast::<Class>();
    assert!(c.is_registered.load(SeqCst), "alloc of {}, which is not registered", c.text());
    class_createInstance(class.cast(), 0)
}

unsafe extern "C-unwind" fn new(class: *mut c_void, sel: Sel) -> *mut c_void {
    let object = allocated(class, sel);
    let init = selector(c"init");
    std::mem::transmute::<Imp, Get>(objc_msg_lookup(object, init))(object, init)
}

unsafe extern "C-unwind" fn itself(object: *mut c_void, _: Sel) -> *mut c_void {
    object
}

unsafe extern "C-unwind" fn class(object: *mut c_void, _: Sel) -> *mut c_void {
    as_object(class_of(object))
}

unsafe extern "C-unwind" fn dealloc(object: *mut c_void, _: Sel) {
    object_dispose(object);
}

/// Objects that do not change are their own copies.
unsafe extern "C-unwind" fn copy(object: *mut c_void, _: Sel) -> *mut c_void {
    objc_retain(object)
}

unsafe extern "C-unwind" fn hash(object: *mut c_void, _: Sel) -> usize {
    object as usize
}

unsafe extern "C-unwind" fn retain_count(object: *mut c_void, _: Sel) -> usize {
    references(object)
}

unsafe extern "C-unwind" fn unknown(object: *mut c_void, _: Sel, sel: *mut c_void) -> u8 {
    unrecognized(object, sel.cast());
    0
}

unsafe extern "C-unwind" fn is_equal(object: *mut c_void, _: Sel, other: *mut c_void) -> u8 {
    u8::from(object == other)
}

unsafe extern "C-unwind" fn is_kind_of(object: *mut c_void, _: Sel, class: *mut c_void) -> u8 {
    u8::from(class_of(object).is_below(class.cast()))
}

unsafe extern "C-unwind" fn is_member_of(object: *mut c_void, _: Sel, class: *mut c_void) -> u8 {
    u8::from(std::ptr::eq(class_of(object), class.cast()))
}

unsafe extern "C-unwind" fn responds(object: *mut c_void, _: Sel, sel: *mut c_void) -> u8 {
    u8::from(class_of(object).find(sel.cast()).is_some())
}

unsafe extern "C-unwind" fn conforms(_object: *mut c_void, _: Sel, _protocol: *mut c_void) -> u8 {
    0
}

/// NSObject is there before the first message, which other crates may send before `main` too.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = {
    extern "C" fn start() {
        flashtile_objc_boot();
    }
    start
};
