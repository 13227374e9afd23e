//! Panics of native code: their message and place become a fault instead of output.

use std::cell::{Cell, RefCell};
use std::panic::PanicHookInfo;
use std::sync::Once;

thread_local! {
    /// True while a simulated thread runs on this thread of the host.
    static SIMULATING: Cell<bool> = const { Cell::new(false) };
    static PLACE: RefCell<Option<(String, u32)>> = const { RefCell::new(None) };
}

/// Runs `f` as a simulated thread: until it returns, panics on this thread of the host are noted, not printed.
///
/// The first call puts a panic hook in front of the program's own, which sees every other panic as before. A hook the
/// program sets later replaces both: panics of simulated threads are printed by it then, and still become faults.
pub(super) fn noted<R>(f: impl FnOnce() -> R) -> R {
    static INSTALL: Once = Once::new();
    // A hook cannot be set by a thread that is panicking.
    if !std::thread::panicking() {
        INSTALL.call_once(|| {
            let others = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |info: &PanicHookInfo<'_>| {
                if !SIMULATING.get() {
                    return others(info);
                }
                let place = info.location().map(|at| (at.file().to_owned(), at.line()));
                PLACE.with(|cell| cell.replace(place));
            }));
        });
    }
    let before = SIMULATING.replace(true);
    let result = f();
    SIMULATING.set(before);
    result
}

/// The place of the last panic noted.
pub(super) fn take_place() -> Option<(String, u32)> {
    PLACE.with(|cell| cell.take())
}

/// The message of a panic's payload.
pub(super) fn message(payload: &(dyn std::any::Any + Send)) -> String {
    match (payload.downcast_ref::<&str>(), payload.downcast_ref::<String>()) {
        (Some(message), _) => (*message).to_owned(),
        (_, Some(message)) => message.clone(),
        _ => "a panic without a message".to_owned(),
    }
}
