//! The part of an Objective-C runtime that `objc2` calls with its feature `gnustep-2-1`, for tests on Linux.
//!
//! With that feature `objc2` asks `objc_msg_lookup` for the function of a message and calls it itself, so that the runtime needs no
//! assembly, and arguments travel as Rust's `extern "C-unwind"` passes them on both sides.
//!
//! It is strict where a real runtime is lenient:
//!
//! - Memory of a freed object is kept: a message, a retain and a release that reach it panic with its class.
//! - An autorelease without a pool panics, since the object would leak; pools that are not popped in order panic.
//! - Objects are counted per class ([`live`], [`all_live`]), so that a test can say that nothing leaks.
//! - A message that no method answers panics with class and selector.
//!
//! Classes that other crates refer to by symbol are declared with [`export_classes`] and filled by `define_class!`; one that nobody
//! declares is an undefined symbol when a test is linked. Protocols have no descriptions: `objc_getProtocol` returns NULL, as on
//! macOS for a protocol that no loaded binary refers to, and `objc2` then checks methods against the types of each message only.
//!
//! Exceptions do not exist: what is invalid is a Rust panic, which unwinds through methods.
#![allow(unsafe_code, reason = "the runtime is an interface of raw pointers")]
#![allow(clippy::panic, clippy::expect_used, reason = "panics are how this tool reports faults of a test")]
#![allow(non_snake_case, non_upper_case_globals, reason = "names of the Objective-C runtime")]
#![allow(
    unsafe_op_in_unsafe_fn,
    clippy::missing_safety_doc,
    reason = "functions of the runtime are unsafe as a whole: a caller passes objects, classes and texts that are what their types \
              say, which `objc2` proves at each call"
)]

mod abi;
mod associated;
mod block;
mod class;
mod classes;
mod encoding;
mod header;
mod members;
mod messages;
mod objects;
mod pools;
mod protocols;
mod root;
mod selectors;
mod weak;

pub use class::Class;
pub use classes::export;
pub use objects::{all_live, immortal, live};

/// Declares the symbols of classes that bindings link to. `define_class!` of a class with that name fills it.
///
/// ```
/// flashtile_objc_standin::export_classes! {
///     Thing = "._OBJC_CLASS_Thing";
/// }
///
/// fn main() {
///     // Before the first message, such as in `.init_array`.
///     export_classes();
/// }
/// ```
#[macro_export]
macro_rules! export_classes {
    ($($name:ident = $symbol:literal;)*) => {
        $(
            // SAFETY: the symbol is of this runtime's own kind of class, and no other crate defines it.
            #[unsafe(export_name = $symbol)]
            static $name: $crate::Class = $crate::Class::new(false);
        )*

        /// Tells the runtime of the classes that have symbols.
        fn export_classes() {
            $({
                static META: $crate::Class = $crate::Class::new(true);
                $crate::export(stringify!($name), &$name, &META);
            })*
        }
    };
}
