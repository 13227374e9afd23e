//! NSProcessInfo: the version of the operating system.

use std::sync::{Mutex, PoisonError};

use objc2::define_class;
use objc2::rc::Retained;
use objc2::runtime::NSObject;
use objc2_foundation::{NSOperatingSystemVersion, NSString};

use crate::object::object;

/// Major, minor and patch version.
static SYSTEM: Mutex<[isize; 3]> = Mutex::new([15, 0, 0]);

/// Sets the version of the operating system for this process.
pub(crate) fn set_system(version: [isize; 3]) {
    *SYSTEM.lock().unwrap_or_else(PoisonError::into_inner) = version;
}

fn system() -> [isize; 3] {
    *SYSTEM.lock().unwrap_or_else(PoisonError::into_inner)
}

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
    #[unsafe(super(NSObject))]
    #[name = "NSProcessInfo"]
    #[ivars = ()]
    pub(crate) struct Process;

    impl Process {
        #[unsafe(method_id(processInfo))]
        fn process() -> Retained<Self> {
            object(())
        }

        #[unsafe(method(operatingSystemVersion))]
        fn version(&self) -> NSOperatingSystemVersion {
            let [major, minor, patch] = system();
            NSOperatingSystemVersion { majorVersion: major, minorVersion: minor, patchVersion: patch }
        }

        #[unsafe(method(isOperatingSystemAtLeastVersion:))]
        fn is_at_least(&self, version: NSOperatingSystemVersion) -> bool {
            system() >= [version.majorVersion, version.minorVersion, version.patchVersion]
        }

        #[unsafe(method_id(operatingSystemVersionString))]
        fn text(&self) -> Retained<NSString> {
            let [major, minor, patch] = system();
            NSString::from_str(&format!("Version {major}.{minor}.{patch}"))
        }

        #[unsafe(method(processorCount))]
        fn processors(&self) -> usize {
            std::thread::available_parallelism().map_or(1, usize::from)
        }
    }
);
