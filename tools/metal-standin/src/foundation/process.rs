//! NSProcessInfo: the version of the operating system.

use std::cell::Cell;
use std::sync::{Mutex, PoisonError};

use objc2::define_class;
use objc2::rc::Retained;
use objc2::runtime::NSObject;
use objc2_foundation::{NSOperatingSystemVersion, NSString};

use crate::object::object;

/// The facts that hosts ask of the operating system.
#[derive(Clone, Copy, Debug)]
pub(crate) struct System {
    /// Major, minor and patch version.
    pub(crate) version: [isize; 3],
    /// True if compile options have a math mode.
    pub(crate) has_math_mode: bool,
}

/// The system of the device made last.
static LAST: Mutex<System> = Mutex::new(System { version: [15, 0, 0], has_math_mode: true });

thread_local! {
    /// The system of the device that this thread made last: tests run side by side.
    static OWN: Cell<Option<System>> = const { Cell::new(None) };
}

/// Sets the operating system for this thread, and for those that set none.
pub(crate) fn set_system(system: System) {
    *LAST.lock().unwrap_or_else(PoisonError::into_inner) = system;
    OWN.set(Some(system));
}

/// The operating system.
pub(crate) fn system() -> System {
    OWN.get().unwrap_or_else(|| *LAST.lock().unwrap_or_else(PoisonError::into_inner))
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
            let [major, minor, patch] = system().version;
            NSOperatingSystemVersion { majorVersion: major, minorVersion: minor, patchVersion: patch }
        }

        #[unsafe(method(isOperatingSystemAtLeastVersion:))]
        fn is_at_least(&self, version: NSOperatingSystemVersion) -> bool {
            system().version >= [version.majorVersion, version.minorVersion, version.patchVersion]
        }

        #[unsafe(method_id(operatingSystemVersionString))]
        fn text(&self) -> Retained<NSString> {
            let [major, minor, patch] = system().version;
            NSString::from_str(&format!("Version {major}.{minor}.{patch}"))
        }

        #[unsafe(method(processorCount))]
        fn processors(&self) -> usize {
            std::thread::available_parallelism().map_or(1, usize::from)
        }
    }
);
