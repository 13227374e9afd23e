//! Status of a call, the text of the last error, and the wall that panics do not cross.

#![allow(unsafe_code, reason = "functions have the names by which C programs call them")]

use flashtile::cache::CacheError;
use flashtile::{Error, RunError};
use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Result of a function. `flashtile_last_error` has the reason in words, with the numbers that caused it.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
#[allow(clippy::exhaustive_enums, reason = "a header has all values")]
pub enum FlashtileStatus {
    /// Done.
    Ok = 0,
    /// The arguments contradict each other or the contract: a null pointer, a shape that does not fit, an unknown sequence. Nothing was
    /// changed, but that `flashtile_step_attend` may have stored the rows of its layer.
    Invalid = 1,
    /// The request is valid, and the backend has no kernel for it.
    Unsupported = 2,
    /// The cache has too few free pages or slots, or the sequence would become longer than its slot. Nothing was changed.
    Full = 3,
    /// There is no memory for a cache, a workspace or a result.
    Memory = 4,
    /// A device, or the system's threads, failed.
    Device = 5,
    /// The call needs an open step where there is none, or no open step where there is one.
    Step = 6,
    /// A mistake of the library's own. A cache that was used in the call refuses all further calls but `flashtile_cache_free`.
    Internal = 7,
}

/// Why a call is refused.
#[derive(Debug)]
pub(crate) struct Failure {
    status: FlashtileStatus,
    text: String,
}

impl Failure {
    pub(crate) fn new(status: FlashtileStatus, text: impl fmt::Display) -> Self {
        Self { status, text: text.to_string() }
    }

    /// An argument breaks its contract.
    pub(crate) fn invalid(text: impl fmt::Display) -> Self {
        Self::new(FlashtileStatus::Invalid, text)
    }
}

impl<E: Into<Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        let error = error.into();
        let status = match &error {
            Error::Unsupported(_) | Error::Feature { .. } | Error::System { .. } => {
                FlashtileStatus::Unsupported
            }
            Error::Cache(
                CacheError::OutOfPages { .. } | CacheError::OutOfSlots { .. } | CacheError::Capacity { .. },
            ) => FlashtileStatus::Full,
            Error::Cache(CacheError::LayerNotWritten { .. }) => FlashtileStatus::Step,
            Error::Memory { .. } | Error::Cache(CacheError::Memory { .. }) => FlashtileStatus::Memory,
            Error::Device(_) | Error::Run(RunError::Threads { .. }) => FlashtileStatus::Device,
            Error::Fault(_) => FlashtileStatus::Internal,
            // The rest is about arguments; `Error` is non-exhaustive.
            _ => FlashtileStatus::Invalid,
        };
        Self::new(status, error)
    }
}

thread_local! {
    static LAST: RefCell<Option<CString>> = const { RefCell::new(None) };
}

/// Keeps the text of an error for the calling thread.
fn keep(text: &str) {
    let text = CString::new(text.replace('\0', " ")).ok();
    // While a thread ends, its values are gone.
    let _ = LAST.try_with(|last| last.replace(text));
}

/// Runs the body of a function of the interface: refusals become codes with a text, and a panic ends here.
pub(crate) fn guard(body: impl FnOnce() -> Result<(), Failure>) -> FlashtileStatus {
    let failure = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return FlashtileStatus::Ok,
        Ok(Err(failure)) => failure,
        Err(panic) => Failure::new(
            FlashtileStatus::Internal,
            format_args!("a mistake of flashtile's own: {}", message(&*panic)),
        ),
    };
    keep(&failure.text);
    failure.status
}

/// The message of a panic.
fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("a panic without a message")
}

/// The text of the last error of the calling thread, in UTF-8, or an empty text. It is the library's, and valid until the next call
/// of a flashtile function on this thread. A call that succeeds does not clear it.
#[unsafe(no_mangle)]
pub extern "C" fn flashtile_last_error() -> *const c_char {
    let last = LAST.try_with(|last| last.borrow().as_deref().map(CStr::as_ptr));
    last.ok().flatten().unwrap_or(c"".as_ptr())
}

/// The version of the library: `0.1.0`. A text of static storage. Before 1.0, structs may change between minor versions: compare with
/// `FLASHTILE_VERSION` of the header.
#[unsafe(no_mangle)]
pub extern "C" fn flashtile_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    CStr::from_bytes_with_nul(VERSION.as_bytes()).unwrap_or_default().as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last() -> String {
        // SAFETY: the text is valid until the next call on this thread.
        unsafe { CStr::from_ptr(flashtile_last_error()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn a_panic_is_a_code_and_a_text() {
        assert_eq!(guard(|| panic!("{} is odd", 3)), FlashtileStatus::Internal);
        assert_eq!(last(), "a mistake of flashtile's own: 3 is odd");
        assert_eq!(guard(|| panic!("odd")), FlashtileStatus::Internal);
        assert_eq!(last(), "a mistake of flashtile's own: odd");
        assert_eq!(guard(|| Ok(())), FlashtileStatus::Ok);
        assert_eq!(last(), "a mistake of flashtile's own: odd");
    }

    #[test]
    fn a_text_with_a_zero_is_whole() {
        assert_eq!(guard(|| Err(Failure::invalid("a\0b"))), FlashtileStatus::Invalid);
        assert_eq!(last(), "a b");
    }
}
