//! Blocks: closures of Objective-C, which move to the heap when they are copied. Their layout is that of clang's document "Block
//! Implementation Specification".

use std::ffi::{c_int, c_ulong, c_void};
use std::ptr::{copy_nonoverlapping, eq};
use std::sync::atomic::{AtomicI32, Ordering::SeqCst};

use crate::abi::{objc_release, objc_retain};
use crate::class::Class;
use crate::encoding::allocated;

#[unsafe(no_mangle)]
static _NSConcreteGlobalBlock: Class = Class::new(false);
#[unsafe(no_mangle)]
static _NSConcreteStackBlock: Class = Class::new(false);
#[unsafe(no_mangle)]
static _NSConcreteMallocBlock: Class = Class::new(false);

/// BLOCK_HAS_COPY_DISPOSE.
const HAS_HELPERS: i32 = 1 << 25;
/// The references to a block on the heap, in steps of 2.
const COUNT: i32 = 0xfffe;

#[repr(C)]
struct Block {
    isa: *const Class,
    flags: AtomicI32,
    reserved: i32,
    invoke: *const c_void,
    descriptor: *const Descriptor,
}

#[repr(C)]
struct Descriptor {
    reserved: c_ulong,
    size: c_ulong,
    copy: Option<unsafe extern "C-unwind" fn(*mut c_void, *const c_void)>,
    dispose: Option<unsafe extern "C-unwind" fn(*const c_void)>,
}

unsafe extern "C" {
    fn free(at: *mut c_void);
}

/// Returns true if an object is a block.
pub(crate) unsafe fn is_block(object: *const c_void) -> bool {
    let isa = *object.cast::<*const Class>();
    [&_NSConcreteGlobalBlock, &_NSConcreteStackBlock, &_NSConcreteMallocBlock].iter().any(|c| eq(*c, isa))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn _Block_copy(block: *const c_void) -> *mut c_void {
    if block.is_null() {
        return block.cast_mut();
    }
    let from = &*block.cast::<Block>();
    if eq(from.isa, &raw const _NSConcreteGlobalBlock) {
        return block.cast_mut();
    }
    if eq(from.isa, &raw const _NSConcreteMallocBlock) {
        from.flags.fetch_add(2, SeqCst);
        return block.cast_mut();
    }
    let descriptor = &*from.descriptor;
    let bytes = descriptor.size as usize;
    let new = allocated(bytes);
    copy_nonoverlapping(block.cast::<u8>(), new.cast(), bytes);
    let to = &mut *new.cast::<Block>();
    to.isa = &raw const _NSConcreteMallocBlock;
    let flags = to.flags.load(SeqCst) & !COUNT;
    to.flags.store(flags | 2, SeqCst);
    if flags & HAS_HELPERS != 0
        && let Some(copy) = descriptor.copy
    {
        copy(new, block);
    }
    new
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn _Block_release(block: *const c_void) {
    if block.is_null() {
        return;
    }
    let b = &*block.cast::<Block>();
    if !eq(b.isa, &raw const _NSConcreteMallocBlock) {
        return;
    }
    let before = b.flags.fetch_sub(2, SeqCst) & COUNT;
    assert!(before != 0, "release of a freed block");
    if before == 2 {
        if b.flags.load(SeqCst) & HAS_HELPERS != 0
            && let Some(dispose) = (*b.descriptor).dispose
        {
            dispose(block);
        }
        free(block.cast_mut());
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn _Block_object_assign(to: *mut c_void, object: *const c_void, _flags: c_int) {
    *to.cast::<*mut c_void>() = objc_retain(object.cast_mut());
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn _Block_object_dispose(object: *const c_void, _flags: c_int) {
    objc_release(object.cast_mut());
}
