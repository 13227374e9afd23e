//! Results that a block is called with, on a thread that is not the host's.

use block2::DynBlock;
use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::ProtocolObject;
use objc2_foundation::NSError;

use crate::object::{Protocol, Sent};

fn pointer<T: objc2::Message>(object: Option<&Retained<T>>) -> *mut T {
    object.map_or(std::ptr::null_mut(), |o| Retained::as_ptr(o).cast_mut())
}

/// The arguments with which a thread calls a block.
type Answer<T> = Sent<Result<Protocol<T>, Retained<NSError>>>;

/// Calls a block with an object or an error, later.
pub(crate) fn answer<T: ?Sized + 'static>(
    result: Result<Protocol<T>, Retained<NSError>>,
    block: &DynBlock<dyn Fn(*mut ProtocolObject<T>, *mut NSError)>,
) {
    // SAFETY: the host passes a block that may be called on another thread. Objects of this crate may be used there.
    let (result, block): (Answer<T>, _) = unsafe { (Sent::new(result), Sent::new(block.copy())) };
    std::thread::spawn(move || {
        autoreleasepool(|_| block.call((pointer(result.as_ref().ok()), pointer(result.as_ref().err()))));
        drop((result, block));
    });
}
