//! NSArray.

use objc2::rc::{Allocated, Retained};
use objc2::runtime::{AnyObject, NSObject};
use objc2::{DefinedClass, Message, define_class};
use objc2_foundation::{NSArray, NSFastEnumerationState, NSRange};

use super::enumerator::{Enumerator, enumerate, enumerator};
use crate::object::{initialized, object};

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
    #[unsafe(super(NSObject))]
    #[name = "NSArray"]
    #[ivars = Vec<Retained<AnyObject>>]
    pub(crate) struct Array;

    impl Array {
        #[unsafe(method_id(init))]
        fn init(this: Allocated<Self>) -> Retained<Self> {
            initialized(this, Vec::new())
        }

        #[unsafe(method_id(initWithObjects:count:))]
        fn init_with_objects(this: Allocated<Self>, objects: *const *const AnyObject, count: usize) -> Retained<Self> {
            // SAFETY: the caller passes that many objects.
            let objects = unsafe { list(objects, count) };
            initialized(this, objects)
        }

        #[unsafe(method(count))]
        fn count(&self) -> usize {
            self.ivars().len()
        }

        #[unsafe(method_id(objectAtIndex:))]
        fn at(&self, index: usize) -> Retained<AnyObject> {
            let all = self.ivars();
            assert!(index < all.len(), "NSRangeException: index {index} of an array of {} objects", all.len());
            all[index].clone()
        }

        #[unsafe(method_id(firstObject))]
        fn first(&self) -> Option<Retained<AnyObject>> {
            self.ivars().first().cloned()
        }

        #[unsafe(method_id(lastObject))]
        fn last(&self) -> Option<Retained<AnyObject>> {
            self.ivars().last().cloned()
        }

        #[unsafe(method(getObjects:))]
        fn all(&self, out: *mut *const AnyObject) {
            for (i, object) in self.ivars().iter().enumerate() {
                // SAFETY: the caller has room for all.
                unsafe { out.add(i).write(Retained::as_ptr(object)) };
            }
        }

        #[unsafe(method(getObjects:range:))]
        fn objects(&self, out: *mut *const AnyObject, range: NSRange) {
            let all = self.ivars();
            assert!(range.end() <= all.len(), "NSRangeException: {range:?} of an array of {} objects", all.len());
            for (i, object) in all[range.location..range.end()].iter().enumerate() {
                // SAFETY: the caller has room for the range.
                unsafe { out.add(i).write(Retained::as_ptr(object)) };
            }
        }

        #[unsafe(method_id(objectEnumerator))]
        fn enumerator(&self) -> Retained<Enumerator> {
            enumerator(self.ivars().clone())
        }

        #[unsafe(method(countByEnumeratingWithState:objects:count:))]
        fn enumerate(&self, state: &mut NSFastEnumerationState, _buffer: *mut *mut AnyObject, _capacity: usize) -> usize {
            enumerate(self.ivars(), state)
        }
    }
);

/// Retains objects that lie one after the other.
///
/// # Safety
/// There are that many.
pub(super) unsafe fn list(at: *const *const AnyObject, count: usize) -> Vec<Retained<AnyObject>> {
    // SAFETY: the caller's promise; no element of a collection is nil.
    (0..count).map(|i| unsafe { (**at.add(i)).retain() }).collect()
}

/// An array of these objects.
pub(crate) fn array<T: Message>(objects: Vec<Retained<T>>) -> Retained<NSArray<T>> {
    let objects = objects.into_iter().map(crate::object::any).collect();
    let this: Retained<Array> = object(objects);
    // SAFETY: the class is NSArray, and its objects are of this type.
    unsafe { Retained::cast_unchecked(this) }
}

/// The objects of an array.
pub(crate) fn objects_of<T: Message>(array: &NSArray<T>) -> Vec<Retained<T>> {
    let ours: &Array = crate::object::ours(array);
    // SAFETY: the array's type says what its objects are.
    ours.ivars().iter().map(|o| unsafe { Retained::cast_unchecked(o.clone()) }).collect()
}
