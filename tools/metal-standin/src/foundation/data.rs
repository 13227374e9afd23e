//! NSData.

use std::ffi::c_void;

use objc2::rc::{Allocated, Retained};
use objc2::runtime::NSObject;
use objc2::{DefinedClass, define_class};
use objc2_foundation::NSData;

use crate::object::{initialized, object};

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
    #[unsafe(super(NSObject))]
    #[name = "NSData"]
    #[ivars = Vec<u8>]
    pub(crate) struct Data;

    impl Data {
        #[unsafe(method_id(initWithBytes:length:))]
        fn init_with_bytes(this: Allocated<Self>, bytes: *const c_void, length: usize) -> Retained<Self> {
            let bytes = if length == 0 {
                Vec::new()
            } else {
                // SAFETY: the caller passes that many bytes.
                unsafe { std::slice::from_raw_parts(bytes.cast::<u8>(), length) }.to_vec()
            };
            initialized(this, bytes)
        }

        #[unsafe(method(bytes))]
        fn bytes(&self) -> *const c_void {
            self.ivars().as_ptr().cast()
        }

        #[unsafe(method(length))]
        fn length(&self) -> usize {
            self.ivars().len()
        }
    }
);

/// Data of these bytes.
pub(crate) fn data(bytes: Vec<u8>) -> Retained<NSData> {
    let this: Retained<Data> = object(bytes);
    // SAFETY: the class is NSData.
    unsafe { Retained::cast_unchecked(this) }
}
