//! NSString.

use std::ffi::{CString, c_char, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};

use objc2::rc::{Allocated, Retained};
use objc2::runtime::{AnyObject, NSObject};
use objc2::{ClassType, DefinedClass, define_class};
use objc2_foundation::NSString;

use crate::object::initialized;

/// NSUTF8StringEncoding.
const UTF8: i32 = 4;

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
    #[unsafe(super(NSObject))]
    #[name = "NSString"]
    #[ivars = CString]
    pub(crate) struct Text;

    impl Text {
        #[unsafe(method_id(init))]
        fn init(this: Allocated<Self>) -> Retained<Self> {
            initialized(this, CString::default())
        }

        // GNUstep's encodings are `int` where Apple's are NSUInteger, and the bindings ask for that.
        #[unsafe(method_id(initWithBytes:length:encoding:))]
        fn init_with_bytes(this: Allocated<Self>, bytes: *const c_void, length: usize, encoding: i32) -> Retained<Self> {
            assert_eq!(encoding, UTF8, "NSString: an encoding other than UTF-8");
            let bytes: &[u8] = if length == 0 {
                &[]
            } else {
                // SAFETY: the caller passes that many bytes.
                unsafe { std::slice::from_raw_parts(bytes.cast(), length) }
            };
            assert!(std::str::from_utf8(bytes).is_ok(), "NSString: bytes that are not UTF-8");
            initialized(this, CString::new(bytes).expect("a string without NUL"))
        }

        #[unsafe(method(UTF8String))]
        fn utf8(&self) -> *const c_char {
            self.ivars().as_ptr()
        }

        #[unsafe(method(lengthOfBytesUsingEncoding:))]
        fn bytes(&self, encoding: i32) -> usize {
            assert_eq!(encoding, UTF8, "NSString: an encoding other than UTF-8");
            self.ivars().as_bytes().len()
        }

        #[unsafe(method(length))]
        fn length(&self) -> usize {
            self.text().encode_utf16().count()
        }

        #[unsafe(method(isEqualToString:))]
        fn equals(&self, other: &NSString) -> bool {
            self.text() == other.to_string()
        }

        #[unsafe(method(isEqual:))]
        fn is_equal(&self, other: Option<&AnyObject>) -> bool {
            other.filter(|o| o.class() == Self::class()).is_some_and(|other| {
                // SAFETY: the object is of this class.
                self.text() == unsafe { &*std::ptr::from_ref(other).cast::<Self>() }.text()
            })
        }

        #[unsafe(method(hash))]
        fn hash(&self) -> usize {
            let mut hasher = DefaultHasher::new();
            self.text().hash(&mut hasher);
            hasher.finish() as usize
        }

        #[unsafe(method_id(description))]
        fn description(&self) -> Retained<NSString> {
            NSString::from_str(self.text())
        }
    }
);

impl Text {
    fn text(&self) -> &str {
        self.ivars().to_str().expect("a string is UTF-8")
    }
}
