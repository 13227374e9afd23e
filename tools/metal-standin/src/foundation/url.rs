//! NSURL, of files.

use std::path::PathBuf;

use objc2::rc::{Allocated, Retained};
use objc2::runtime::NSObject;
use objc2::{DefinedClass, define_class};
use objc2_foundation::{NSString, NSURL};

use crate::object::{initialized, object};

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
    #[unsafe(super(NSObject))]
    #[name = "NSURL"]
    #[ivars = String]
    pub(crate) struct Url;

    impl Url {
        #[unsafe(method_id(fileURLWithPath:))]
        fn file(path: &NSString) -> Retained<Self> {
            object(path.to_string())
        }

        #[unsafe(method_id(fileURLWithPath:isDirectory:))]
        fn file_or_folder(path: &NSString, _is_folder: bool) -> Retained<Self> {
            object(path.to_string())
        }

        #[unsafe(method_id(initFileURLWithPath:))]
        fn init_file(this: Allocated<Self>, path: &NSString) -> Retained<Self> {
            initialized(this, path.to_string())
        }

        #[unsafe(method_id(initFileURLWithPath:isDirectory:))]
        fn init_file_or_folder(this: Allocated<Self>, path: &NSString, _is_folder: bool) -> Retained<Self> {
            initialized(this, path.to_string())
        }

        #[unsafe(method_id(path))]
        fn path(&self) -> Option<Retained<NSString>> {
            Some(NSString::from_str(self.ivars()))
        }

        #[unsafe(method_id(absoluteString))]
        fn absolute(&self) -> Option<Retained<NSString>> {
            Some(NSString::from_str(&format!("file://{}", self.ivars())))
        }

        #[unsafe(method(isFileURL))]
        fn is_file(&self) -> bool {
            true
        }
    }
);

/// The file that a URL names.
pub(crate) fn path_of(url: &NSURL) -> PathBuf {
    PathBuf::from(crate::object::ours::<Url, _>(url).ivars())
}
