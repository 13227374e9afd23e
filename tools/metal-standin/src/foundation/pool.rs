//! NSAutoreleasePool.

use std::cell::Cell;
use std::ffi::c_void;

use objc2::ffi::{objc_autoreleasePoolPop, objc_autoreleasePoolPush};
use objc2::rc::{Allocated, Retained};
use objc2::runtime::NSObject;
use objc2::{DefinedClass, define_class};

use crate::object::initialized;

/// The pool of the runtime, until it is popped.
pub(crate) struct PoolIvars(Cell<Option<*mut c_void>>);

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses. A pool is pushed and popped on the thread of the caller.
    #[unsafe(super(NSObject))]
    #[name = "NSAutoreleasePool"]
    #[ivars = PoolIvars]
    pub(crate) struct Pool;

    impl Pool {
        #[unsafe(method_id(init))]
        fn init(this: Allocated<Self>) -> Retained<Self> {
            // SAFETY: it is popped by `drain` or by `Drop` of the instance variables.
            initialized(this, PoolIvars(Cell::new(Some(unsafe { objc_autoreleasePoolPush() }))))
        }

        #[unsafe(method(drain))]
        fn drain(&self) {
            self.ivars().pop();
        }
    }
);

impl PoolIvars {
    fn pop(&self) {
        if let Some(pool) = self.0.take() {
            // SAFETY: the pool was pushed by `init` and is popped once.
            unsafe { objc_autoreleasePoolPop(pool) };
        }
    }
}

impl Drop for PoolIvars {
    fn drop(&mut self) {
        self.pop();
    }
}
