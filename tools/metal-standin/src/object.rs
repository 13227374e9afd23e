//! How objects are made, told apart, and sent to other threads.

use std::ops::Deref;

use objc2::rc::{Allocated, Retained};
use objc2::runtime::{AnyObject, NSObject, ProtocolObject};
use objc2::{AnyThread, ClassType, DefinedClass, Message, msg_send};
use objc2_foundation::NSString;

/// An object that is known by a protocol.
pub(crate) type Protocol<T> = Retained<ProtocolObject<T>>;

/// An object of one of the classes defined here.
pub(crate) fn object<T>(ivars: T::Ivars) -> Retained<T>
where
    T: DefinedClass + ClassType<Super = NSObject> + AnyThread + Message,
{
    initialized(T::alloc(), ivars)
}

/// As [`object`], for an object that the host has allocated.
pub(crate) fn initialized<T>(allocated: Allocated<T>, ivars: T::Ivars) -> Retained<T>
where
    T: DefinedClass + ClassType<Super = NSObject> + Message,
{
    let this = allocated.set_ivars(ivars);
    // SAFETY: `init` of NSObject returns the object.
    unsafe { msg_send![super(this), init] }
}

/// The object behind a protocol or a class of the bindings, which has to be one of ours.
pub(crate) fn ours<T, O>(object: &O) -> &T
where
    T: ClassType,
    O: Message + ?Sized,
{
    // SAFETY: every `Message` is an object.
    let object: &AnyObject = unsafe { &*std::ptr::from_ref(object).cast::<AnyObject>() };
    let class = object.class();
    assert!(
        class == T::class(),
        "Metal API validation: a {} is expected, got an object of {}",
        T::NAME,
        class.name().to_string_lossy()
    );
    // SAFETY: the object is of this class.
    unsafe { &*std::ptr::from_ref(object).cast::<T>() }
}

/// A reference more to an object.
pub(crate) fn retained<T: Message>(object: &T) -> Retained<T> {
    object.retain()
}

/// An object as any object.
pub(crate) fn any<T: Message>(object: Retained<T>) -> Retained<AnyObject> {
    // SAFETY: every `Message` is an object.
    unsafe { Retained::cast_unchecked(object) }
}

/// A value that may be sent to another thread although its type does not say so.
#[derive(Clone, Debug)]
pub(crate) struct Sent<T>(T);

// SAFETY: `new` is unsafe, and its callers say why.
unsafe impl<T> Send for Sent<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Sent<T> {}

impl<T> Sent<T> {
    /// # Safety
    /// The value may be used and dropped on other threads.
    pub(crate) unsafe fn new(value: T) -> Self {
        Self(value)
    }
}

impl<T> Deref for Sent<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

/// A reference that keeps an object of ours alive; on which thread it is dropped does not matter.
pub(crate) type Kept = Sent<Retained<AnyObject>>;

/// Keeps an object of ours.
pub(crate) fn kept<T: Message + ThreadSafe>(object: &T) -> Kept {
    // SAFETY: objects of this class are used by any thread.
    unsafe { Sent::new(any(retained(object))) }
}

/// Classes whose objects any thread may use and free.
pub(crate) trait ThreadSafe: Send + Sync {}

/// Implements [`ThreadSafe`] for classes whose instance variables are.
macro_rules! thread_safe {
    ($($class:ty),*) => {
        $(
            // SAFETY: an object is its instance variables, which are `Send` and `Sync` as the constant below proves.
            unsafe impl Send for $class {}
            // SAFETY: as above.
            unsafe impl Sync for $class {}
            impl $crate::object::ThreadSafe for $class {}
            const _: () = {
                const fn is_thread_safe<T: Send + Sync>() {}
                is_thread_safe::<<$class as objc2::DefinedClass>::Ivars>();
            };
        )*
    };
}
pub(crate) use thread_safe;

/// The Rust text of an optional string.
pub(crate) fn text_of(text: Option<&NSString>) -> Option<String> {
    text.map(ToString::to_string)
}

/// Defines a class of settings: values that are copied and objects that are retained, with the accessors that the bindings call.
macro_rules! settings {
    (
        $(#[$doc:meta])*
        $name:literal as $class:ident of $ivars:ident;
        values { $($get:ident / $set:ident: $ty:ty = $default:expr;)* }
        objects { $($oget:ident / $oset:ident: $oty:ty;)* }
        also { $($more:tt)* }
    ) => {
        $(#[$doc])*
        #[allow(non_snake_case, reason = "selectors of Apple's")]
        pub(crate) struct $ivars {
            $(pub(crate) $get: std::cell::Cell<$ty>,)*
            $(pub(crate) $oget: std::cell::RefCell<Option<objc2::rc::Retained<$oty>>>,)*
        }

        impl Default for $ivars {
            fn default() -> Self {
                Self {
                    $($get: std::cell::Cell::new($default),)*
                    $($oget: std::cell::RefCell::new(None),)*
                }
            }
        }

        objc2::define_class!(
            // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
            #[unsafe(super(objc2::runtime::NSObject))]
            #[name = $name]
            #[ivars = $ivars]
            $(#[$doc])*
            pub(crate) struct $class;

            #[allow(non_snake_case, reason = "selectors of Apple's")]
            impl $class {
                #[unsafe(method_id(init))]
                fn init(this: objc2::rc::Allocated<Self>) -> objc2::rc::Retained<Self> {
                    $crate::object::initialized(this, $ivars::default())
                }
                $(
                    #[unsafe(method($get))]
                    fn $get(&self) -> $ty {
                        objc2::DefinedClass::ivars(self).$get.get()
                    }
                    #[unsafe(method($set:))]
                    fn $set(&self, value: $ty) {
                        objc2::DefinedClass::ivars(self).$get.set(value);
                    }
                )*
                $(
                    #[unsafe(method_id($oget))]
                    fn $oget(&self) -> Option<objc2::rc::Retained<$oty>> {
                        objc2::DefinedClass::ivars(self).$oget.borrow().clone()
                    }
                    #[unsafe(method($oset:))]
                    fn $oset(&self, value: Option<&$oty>) {
                        let value = value.map(objc2::Message::retain);
                        objc2::DefinedClass::ivars(self).$oget.replace(value);
                    }
                )*
                $($more)*
            }
        );
    };
}
pub(crate) use settings;
