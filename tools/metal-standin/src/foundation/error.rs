//! NSError, and the keys of its dictionary.
#![allow(non_upper_case_globals, reason = "symbols of Apple's")]

use std::sync::atomic::{AtomicPtr, Ordering::SeqCst};

use flashtile_objc_standin::immortal;
use objc2::rc::{Allocated, Retained};
use objc2::runtime::{AnyObject, NSObject};
use objc2::{DefinedClass, define_class, msg_send};
use objc2_foundation::{NSDictionary, NSError, NSString};

use super::dictionary::dictionary;
use crate::object::{any, initialized, object};

type UserInfo = NSDictionary<NSString, AnyObject>;

pub(crate) struct ErrorIvars {
    code: isize,
    domain: Retained<NSString>,
    info: Retained<UserInfo>,
}

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
    #[unsafe(super(NSObject))]
    #[name = "NSError"]
    #[ivars = ErrorIvars]
    pub(crate) struct Error;

    impl Error {
        #[unsafe(method_id(initWithDomain:code:userInfo:))]
        fn init(this: Allocated<Self>, domain: &NSString, code: isize, info: Option<&UserInfo>) -> Retained<Self> {
            let info = info.map_or_else(|| dictionary(Vec::new()), objc2::Message::retain);
            initialized(this, ErrorIvars { code, domain: objc2::Message::retain(domain), info })
        }

        #[unsafe(method(code))]
        fn code(&self) -> isize {
            self.ivars().code
        }

        #[unsafe(method_id(domain))]
        fn domain(&self) -> Retained<NSString> {
            self.ivars().domain.clone()
        }

        #[unsafe(method_id(userInfo))]
        fn info(&self) -> Retained<UserInfo> {
            self.ivars().info.clone()
        }

        #[unsafe(method_id(localizedDescription))]
        fn text(&self) -> Retained<NSString> {
            let key = NSString::from_str(NSLocalizedDescriptionKey_text);
            // SAFETY: the method exists, and descriptions are strings.
            let text: Option<Retained<NSString>> = unsafe { msg_send![&*self.ivars().info, objectForKey: &*key] };
            text.unwrap_or_else(|| {
                let ivars = self.ivars();
                NSString::from_str(&format!("The operation could not be completed. ({} error {}.)", ivars.domain, ivars.code))
            })
        }
    }
);

const NSLocalizedDescriptionKey_text: &str = "NSLocalizedDescription";

/// The key of an error's description, a symbol that the bindings link to.
#[unsafe(no_mangle)]
pub(crate) static NSLocalizedDescriptionKey: AtomicPtr<NSString> = AtomicPtr::new(std::ptr::null_mut());

/// Gives constants that are strings their values.
pub(super) fn keys() {
    constant(&NSLocalizedDescriptionKey, NSLocalizedDescriptionKey_text);
}

/// A string that stays, for a symbol that the bindings link to.
pub(crate) fn constant(symbol: &AtomicPtr<NSString>, text: &str) {
    let text = Retained::into_raw(NSString::from_str(text));
    // SAFETY: the object is alive, and its last reference is never released.
    unsafe { immortal(text.cast()) };
    symbol.store(text, SeqCst);
}

/// An error with a description, and what else its dictionary holds.
pub(crate) fn error(
    domain: &str,
    code: isize,
    text: &str,
    more: Vec<(&str, Retained<AnyObject>)>,
) -> Retained<NSError> {
    let mut info = vec![(NSString::from_str(NSLocalizedDescriptionKey_text), any(NSString::from_str(text)))];
    info.extend(more.into_iter().map(|(key, value)| (NSString::from_str(key), value)));
    let ivars = ErrorIvars { code, domain: NSString::from_str(domain), info: dictionary(info) };
    let this: Retained<Error> = object(ivars);
    // SAFETY: the class is NSError.
    unsafe { Retained::cast_unchecked(this) }
}

/// Stores an autoreleased error where the caller of a method wants it, and returns that there is no result.
pub(crate) fn refuse<T>(out: *mut *mut NSError, error: Retained<NSError>) -> Option<T> {
    if !out.is_null() {
        // SAFETY: the caller of the method passes room for an error.
        unsafe { *out = Retained::autorelease_ptr(error) };
    }
    None
}
