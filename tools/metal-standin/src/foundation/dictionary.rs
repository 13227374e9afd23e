//! NSDictionary.

use objc2::rc::{Allocated, Retained};
use objc2::runtime::{AnyObject, NSObject};
use objc2::{DefinedClass, Message, define_class, msg_send};
use objc2_foundation::{NSArray, NSDictionary, NSFastEnumerationState};

use super::array::{array, list};
use super::enumerator::{Enumerator, enumerate, enumerator};
use crate::object::{initialized, object};

/// Keys, and the value of each.
#[derive(Default)]
pub(crate) struct Entries {
    keys: Vec<Retained<AnyObject>>,
    values: Vec<Retained<AnyObject>>,
}

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
    #[unsafe(super(NSObject))]
    #[name = "NSDictionary"]
    #[ivars = Entries]
    pub(crate) struct Dictionary;

    impl Dictionary {
        #[unsafe(method_id(init))]
        fn init(this: Allocated<Self>) -> Retained<Self> {
            initialized(this, Entries::default())
        }

        #[unsafe(method_id(initWithObjects:forKeys:count:))]
        fn init_with_objects(
            this: Allocated<Self>,
            objects: *const *const AnyObject,
            keys: *const *const AnyObject,
            count: usize,
        ) -> Retained<Self> {
            // SAFETY: the caller passes that many of both.
            let (keys, values) = unsafe { (list(keys, count), list(objects, count)) };
            let mut entries = Entries::default();
            for (key, value) in keys.into_iter().zip(values) {
                // The last value of a key stays.
                if let Some(at) = entries.position(&key) {
                    entries.values[at] = value;
                } else {
                    entries.keys.push(key);
                    entries.values.push(value);
                }
            }
            initialized(this, entries)
        }

        #[unsafe(method(count))]
        fn count(&self) -> usize {
            self.ivars().keys.len()
        }

        #[unsafe(method_id(objectForKey:))]
        fn get(&self, key: &AnyObject) -> Option<Retained<AnyObject>> {
            let entries = self.ivars();
            entries.position(key).map(|at| entries.values[at].clone())
        }

        #[unsafe(method_id(allKeys))]
        fn keys(&self) -> Retained<NSArray<AnyObject>> {
            array(self.ivars().keys.clone())
        }

        #[unsafe(method_id(allValues))]
        fn values(&self) -> Retained<NSArray<AnyObject>> {
            array(self.ivars().values.clone())
        }

        #[unsafe(method_id(keyEnumerator))]
        fn key_enumerator(&self) -> Retained<Enumerator> {
            enumerator(self.ivars().keys.clone())
        }

        #[unsafe(method_id(objectEnumerator))]
        fn object_enumerator(&self) -> Retained<Enumerator> {
            enumerator(self.ivars().values.clone())
        }

        #[unsafe(method(getObjects:andKeys:count:))]
        fn all(&self, objects: *mut *const AnyObject, keys: *mut *const AnyObject, count: usize) {
            let entries = self.ivars();
            for i in 0..count.min(entries.keys.len()) {
                // SAFETY: the caller has room for `count` of each that is not NULL.
                unsafe {
                    if !objects.is_null() {
                        objects.add(i).write(Retained::as_ptr(&entries.values[i]));
                    }
                    if !keys.is_null() {
                        keys.add(i).write(Retained::as_ptr(&entries.keys[i]));
                    }
                }
            }
        }

        #[unsafe(method(countByEnumeratingWithState:objects:count:))]
        fn enumerate(&self, state: &mut NSFastEnumerationState, _buffer: *mut *mut AnyObject, _capacity: usize) -> usize {
            enumerate(&self.ivars().keys, state)
        }
    }
);

impl Entries {
    fn position(&self, key: &AnyObject) -> Option<usize> {
        // SAFETY: every object answers isEqual:.
        self.keys.iter().position(|k| unsafe { msg_send![&**k, isEqual: Some(key)] })
    }
}

/// A dictionary of these keys and values.
pub(crate) fn dictionary<K: Message, V: Message>(
    pairs: Vec<(Retained<K>, Retained<V>)>,
) -> Retained<NSDictionary<K, V>> {
    let (keys, values) =
        pairs.into_iter().map(|(k, v)| (crate::object::any(k), crate::object::any(v))).unzip();
    let this: Retained<Dictionary> = object(Entries { keys, values });
    // SAFETY: the class is NSDictionary, and keys and values are of these types.
    unsafe { Retained::cast_unchecked(this) }
}

/// Keys and values of a dictionary.
pub(crate) fn pairs_of<K: Message, V: Message>(
    of: &NSDictionary<K, V>,
) -> Vec<(Retained<AnyObject>, Retained<AnyObject>)> {
    let entries = crate::object::ours::<Dictionary, _>(of).ivars();
    entries.keys.iter().cloned().zip(entries.values.iter().cloned()).collect()
}
