//! NSEnumerator, and fast enumeration of lists of objects.

use std::cell::Cell;

use objc2::rc::Retained;
use objc2::runtime::{AnyObject, NSObject};
use objc2::{DefinedClass, define_class};
use objc2_foundation::NSFastEnumerationState;

use crate::object::object;

/// The objects, and how many were given out.
pub(crate) struct EnumeratorIvars {
    objects: Vec<Retained<AnyObject>>,
    next: Cell<usize>,
}

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
    #[unsafe(super(NSObject))]
    #[name = "NSEnumerator"]
    #[ivars = EnumeratorIvars]
    pub(crate) struct Enumerator;

    impl Enumerator {
        #[unsafe(method_id(nextObject))]
        fn next_object(&self) -> Option<Retained<AnyObject>> {
            let ivars = self.ivars();
            let next = ivars.objects.get(ivars.next.get()).cloned();
            ivars.next.set(ivars.next.get() + usize::from(next.is_some()));
            next
        }

        #[unsafe(method(countByEnumeratingWithState:objects:count:))]
        fn enumerate(&self, state: &mut NSFastEnumerationState, _buffer: *mut *mut AnyObject, _capacity: usize) -> usize {
            enumerate(&self.ivars().objects, state)
        }
    }
);

/// An enumerator of these objects.
pub(super) fn enumerator(objects: Vec<Retained<AnyObject>>) -> Retained<Enumerator> {
    object(EnumeratorIvars { objects, next: Cell::new(0) })
}

/// Gives out all objects at once: they lie in memory as fast enumeration wants them, since `Retained` is a pointer.
pub(super) fn enumerate(objects: &[Retained<AnyObject>], state: &mut NSFastEnumerationState) -> usize {
    if state.state != 0 {
        return 0;
    }
    state.state = 1;
    state.itemsPtr = objects.as_ptr().cast_mut().cast();
    // The pointer must point to memory that does not change during the enumeration.
    state.mutationsPtr = (&raw mut state.extra).cast();
    objects.len()
}
