//! The thread of a queue, which calls handlers of its command buffers, in order.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

use objc2::rc::autoreleasepool;
use objc2_metal::MTLCommandBuffer;

use crate::commands::{Commands, Handler};
use crate::object::{Protocol, Sent};

/// Handlers of a command buffer that are due.
pub(crate) struct Call {
    pub(crate) commands: Arc<Commands>,
    pub(crate) object: Sent<Protocol<dyn MTLCommandBuffer>>,
    pub(crate) handlers: Vec<Handler>,
    pub(crate) is_completion: bool,
}

thread_local! {
    /// The queue whose handlers this thread calls.
    static QUEUE: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Returns true on the thread that calls the handlers of a queue: it must not wait for them.
pub(crate) fn is_thread_of(queue: u64) -> bool {
    QUEUE.get() == Some(queue)
}

/// Starts the thread of a queue, which ends when the queue is gone.
pub(crate) fn thread(queue: u64) -> Sender<Call> {
    let (sender, calls) = channel::<Call>();
    std::thread::Builder::new()
        .name("completion queue".into())
        .spawn(move || {
            QUEUE.set(Some(queue));
            for call in calls {
                done(call);
            }
        })
        .expect("a thread for the queue");
    sender
}

fn done(call: Call) {
    let Call { commands, object, handlers, is_completion } = call;
    let result = catch_unwind(AssertUnwindSafe(|| {
        autoreleasepool(|_| {
            for handler in &handlers {
                handler.call((NonNull::from(&**object),));
            }
        });
    }));
    // All that the handlers and the object hold is freed before anybody goes on.
    drop(handlers);
    drop(object);
    let panic = result.err().map(|p| format!("a handler panicked: {}", panic_text(&*p)));
    commands.change(|s| {
        s.panic = s.panic.take().or(panic);
        if is_completion {
            s.is_completed = true;
        }
        s.is_scheduled = true;
    });
    commands.machine.ring();
}

/// The text of a panic.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string))
        .unwrap_or_else(|| "something".into())
}
