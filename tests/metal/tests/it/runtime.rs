//! The runtime below: what it reports, and Foundation.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use objc2::rc::{Weak, autoreleasepool};
use objc2::runtime::{AnyClass, ProtocolObject};
use objc2_foundation::{NSArray, NSData, NSDictionary, NSError, NSNumber, NSString};
use objc2_metal::*;

use crate::host::{Host, refused, says, string};

#[test]
fn messages_to_what_is_gone() {
    let host = Host::new();
    let e = refused(|| {
        let buffer = host.zeros(16);
        let at: *const ProtocolObject<dyn MTLBuffer> = &*buffer;
        drop(buffer);
        let _ = unsafe { &*at }.length();
    });
    says(&e, "message to a freed object: -[StandinBuffer length]");
}

#[test]
fn what_is_missing_has_a_name() {
    let host = Host::new();
    let e = refused(|| drop(host.device.newDefaultLibrary()));
    says(&e, "-[StandinDevice newDefaultLibrary]");
}

/// Every message is checked against the types that the bindings, made from Apple's headers, give it.
#[test]
#[cfg(debug_assertions)]
fn types_of_messages_are_checked() {
    let host = Host::new();
    let e = refused(|| {
        let _: u8 = unsafe { objc2::msg_send![&*host.device, maxBufferLength] };
    });
    says(&e, "expected return to have type code");
}

/// macOS leaks what is autoreleased without a pool, and says nothing.
#[test]
fn pools_are_there() {
    let host = Host::new();
    let e = std::thread::scope(|s| {
        let queue = &host.queue;
        s.spawn(move || {
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(queue.commandBuffer()))).is_err()
        })
        .join()
        .unwrap()
    });
    assert!(e, "an autorelease without a pool");
}

/// NSAutoreleasePool is a pool as any other: what it holds goes with it.
#[test]
fn pools_as_objects() {
    let host = Host::new();
    let pool: objc2::rc::Retained<objc2::runtime::NSObject> =
        unsafe { objc2::msg_send![AnyClass::get(c"NSAutoreleasePool").unwrap(), new] };
    let commands = host.commands();
    let weak = Weak::from_retained(&commands);
    drop(commands);
    drop(pool);
    assert!(weak.load().is_none());
}

#[test]
fn weak_references() {
    let host = Host::new();
    let buffer = host.zeros(16);
    let weak = Weak::from_retained(&buffer);
    assert_eq!(weak.load().map(|b| b.length()), Some(16));
    let copy = weak.clone();
    drop(buffer);
    assert!(weak.load().is_none() && copy.load().is_none());
}

#[test]
fn strings_and_numbers() {
    autoreleasepool(|_| {
        let text = string("größer");
        assert_eq!((text.len(), text.len_utf16(), text.to_string()), (8, 6, "größer".into()));
        assert!(text == string("größer") && text != string("kleiner"));
        assert_eq!(string("").to_string(), "");
        let number = NSNumber::new_f64(2.5);
        assert_eq!((number.as_i32(), number.as_f64(), number.as_bool()), (2, 2.5, true));
        assert_eq!(NSNumber::new_u64(u64::MAX).as_u64(), u64::MAX);
        assert_eq!(NSNumber::new_i8(-3).as_i64(), -3);
    });
}

#[test]
fn collections() {
    autoreleasepool(|_| {
        let array = NSArray::from_retained_slice(&[string("a"), string("b")]);
        assert_eq!(array.iter().map(|s| s.to_string()).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(array.to_vec().len(), 2);
        assert_eq!(array.firstObject().unwrap().to_string(), "a");
        says(&refused(|| drop(array.objectAtIndex(2))), "index 2 of an array of 2 objects");
        let keys = [&*string("x"), &*string("y"), &*string("x")];
        let dictionary = NSDictionary::<NSString, NSNumber>::from_slices(
            &keys,
            &[&*NSNumber::new_i32(1), &*NSNumber::new_i32(2), &*NSNumber::new_i32(3)],
        );
        assert_eq!((dictionary.count(), dictionary.objectForKey(&string("x")).unwrap().as_i32()), (2, 3));
        assert!(dictionary.objectForKey(&string("z")).is_none());
        assert_eq!(dictionary.keys().map(|k| k.to_string()).collect::<Vec<_>>(), ["x", "y"]);
        assert_eq!(dictionary.allValues().count(), 2);
        assert_eq!(NSData::with_bytes(&[1, 2, 3]).to_vec(), [1, 2, 3]);
        let error = NSError::new(7, &string("domain"));
        assert_eq!((error.code(), error.domain().to_string()), (7, "domain".into()));
        says(&error.localizedDescription().to_string(), "domain error 7");
    });
}

/// A block that is copied, called and released frees what it holds, once.
#[test]
fn blocks_free_what_they_hold() {
    let counter = Arc::new(AtomicUsize::new(0));
    let held = counter.clone();
    let block = block2::StackBlock::new(move |n: usize| held.fetch_add(n, SeqCst));
    let copy = block.copy();
    let again = copy.copy();
    drop(block);
    let _ = again.call((2,));
    assert_eq!(Arc::strong_count(&counter), 2);
    drop((copy, again));
    assert_eq!((counter.load(SeqCst), Arc::strong_count(&counter)), (2, 1));
}
