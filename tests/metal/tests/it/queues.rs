//! Several queues, events, handlers and threads.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::channel;
use std::time::Duration;

use block2::RcBlock;
use flashtile_metal_standin::{Order, Profile, Timing};
use objc2::rc::autoreleasepool;
use objc2::runtime::ProtocolObject;
use objc2_metal::*;

use crate::host::{Host, encode, finish, read, refused, says, wait};

/// A queue writes, another one reads: with an event between, or not.
fn across(host: &Host, with_event: bool) -> Result<Vec<u32>, String> {
    autoreleasepool(|_| {
        let (x, y) = (host.zeros(256), host.zeros(256));
        let event = host.device.newEvent().unwrap();
        let other = host.device.newCommandQueue().unwrap();
        let (writer, reader) = (host.commands(), other.commandBuffer().unwrap());
        if with_event {
            reader.encodeWaitForEvent_value(&event, 1);
        }
        encode(&reader, |e| host.copy(e, &x, &y));
        encode(&writer, |e| host.put(e, &x, 0, 4));
        if with_event {
            writer.encodeSignalEvent_value(&event, 1);
        }
        reader.commit();
        writer.commit();
        // Waiting for the reader brings the writer about, where it must.
        wait(&reader)?;
        wait(&writer)?;
        Ok(read(&y))
    })
}

#[test]
fn events_order_queues() {
    let host = Host::new();
    assert_eq!(across(&host, true), Ok(vec![4; 64]));
    let e = across(&host, false).unwrap_err();
    says(&e, "use bytes 0..256 of a resource, one of them writes, and no event orders them");
    for seed in 0..6 {
        host.control.set_order(Order::Random(seed));
        assert_eq!(across(&host, true), Ok(vec![4; 64]));
    }
}

#[test]
fn values_only_grow() {
    let host = Host::new();
    autoreleasepool(|_| {
        let event = host.device.newSharedEvent().unwrap();
        event.setSignaledValue(3);
        says(&refused(|| event.setSignaledValue(2)), "signaledValue 2 of an event whose value is 3");
        let commands = host.commands();
        commands.encodeSignalEvent_value(ProtocolObject::from_ref(&*event), 3);
        says(
            &finish(&commands).unwrap_err(),
            "value 3 is signaled for an event whose value is 3: values only grow",
        );
    });
}

#[test]
fn the_cpu_signals_and_waits() {
    let host = Host::new();
    autoreleasepool(|_| {
        let x = host.zeros(256);
        let event = host.device.newSharedEvent().unwrap();
        let commands = host.commands();
        let as_event: &ProtocolObject<dyn MTLEvent> = ProtocolObject::from_ref(&*event);
        commands.encodeWaitForEvent_value(as_event, 1);
        encode(&commands, |e| host.put(e, &x, 0, 1));
        commands.encodeSignalEvent_value(as_event, 2);
        commands.commit();
        assert!(!event.waitUntilSignaledValue_timeoutMS(2, 30));
        assert_eq!((event.signaledValue(), read::<u32>(&x)[0]), (0, 0));
        event.setSignaledValue(1);
        assert!(event.waitUntilSignaledValue_timeoutMS(2, 20_000));
        assert_eq!((event.signaledValue(), read::<u32>(&x)[0]), (2, 1));
        assert_eq!(wait(&commands), Ok(()));
        // A second event object, made from the event's handle, has its value.
        let other = host.device.newSharedEventWithHandle(&event.newSharedEventHandle()).unwrap();
        assert_eq!(other.signaledValue(), 2);
    });
}

#[test]
fn listeners_are_told() {
    let host = Host::new();
    host.control.set_timing(Timing::Immediate);
    autoreleasepool(|_| {
        let event = host.device.newSharedEvent().unwrap();
        let (sender, told) = channel();
        let block = RcBlock::new(move |event: NonNull<ProtocolObject<dyn MTLSharedEvent>>, value: u64| {
            sender.send((unsafe { event.as_ref() }.signaledValue(), value)).unwrap();
        });
        let listener = MTLSharedEventListener::new();
        unsafe { event.notifyListener_atValue_block(&listener, 2, RcBlock::as_ptr(&block)) };
        event.setSignaledValue(1);
        assert!(told.recv_timeout(Duration::from_millis(30)).is_err());
        let commands = host.commands();
        commands.encodeSignalEvent_value(ProtocolObject::from_ref(&*event), 5);
        commands.commit();
        assert_eq!(told.recv_timeout(Duration::from_secs(20)), Ok((5, 5)));
        wait(&commands).unwrap();
    });
}

#[test]
fn work_that_nothing_releases_times_out() {
    let mut profile = Profile::m3_max();
    profile.event_timeout = Duration::from_millis(50);
    let host = Host::with(profile);
    autoreleasepool(|_| {
        let commands = host.commands();
        commands.encodeWaitForEvent_value(&host.device.newEvent().unwrap(), 1);
        says(&finish(&commands).unwrap_err(), "GPU Timeout");
        assert_eq!(commands.error().unwrap().code(), MTLCommandBufferError::Timeout.0 as isize);
        assert_eq!(commands.status(), MTLCommandBufferStatus::Error);
    });
}

/// Command buffers run in the order of `enqueue`, not of `commit`.
#[test]
fn enqueue_reserves_a_place() {
    let host = Host::new();
    autoreleasepool(|_| {
        let x = host.zeros(256);
        let (first, second) = (host.commands(), host.commands());
        first.enqueue();
        second.enqueue();
        encode(&second, |e| host.put(e, &x, 0, 2));
        encode(&first, |e| host.put(e, &x, 0, 1));
        second.commit();
        assert_eq!(second.status(), MTLCommandBufferStatus::Committed);
        first.commit();
        assert_eq!((wait(&second), read::<u32>(&x)[0]), (Ok(()), 2));
        assert_eq!(first.status(), MTLCommandBufferStatus::Completed);
    });
}

#[test]
fn a_command_buffer_that_is_only_enqueued_holds_its_queue() {
    let mut profile = Profile::m3_max();
    profile.event_timeout = Duration::from_millis(50);
    let host = Host::with(profile);
    autoreleasepool(|_| {
        let (first, second) = (host.commands(), host.commands());
        first.enqueue();
        second.commit();
        says(
            &refused(|| second.waitUntilCompleted()),
            "behind a command buffer that is enqueued and is not committed",
        );
        first.commit();
        assert_eq!(wait(&second), Ok(()));
    });
}

#[test]
fn handlers_are_called_once_in_order() {
    let host = Host::new();
    autoreleasepool(|_| {
        let calls = Arc::new(std::sync::Mutex::new(Vec::new()));
        let commands = host.commands();
        let handler = |n: u32| {
            let calls = calls.clone();
            RcBlock::new(move |b: NonNull<ProtocolObject<dyn MTLCommandBuffer>>| {
                calls.lock().unwrap().push((n, unsafe { b.as_ref() }.status()));
            })
        };
        unsafe {
            commands.addScheduledHandler(RcBlock::as_ptr(&handler(1)));
            commands.addCompletedHandler(RcBlock::as_ptr(&handler(2)));
            commands.addCompletedHandler(RcBlock::as_ptr(&handler(3)));
        }
        commands.commit();
        wait(&commands).unwrap();
        let calls = calls.lock().unwrap().clone();
        let completed = MTLCommandBufferStatus::Completed;
        assert_eq!(calls.iter().map(|c| c.0).collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!((calls[1].1, calls[2].1), (completed, completed));
    });
}

#[test]
fn a_handler_must_not_wait_for_its_queue_nor_panic() {
    let host = Host::new();
    autoreleasepool(|_| {
        let (commands, later) = (host.commands(), host.commands());
        later.commit();
        struct Send<T>(T);
        unsafe impl<T> std::marker::Send for Send<T> {}
        let waits = Send(later.clone());
        let block = RcBlock::new(move |_| waits.0.waitUntilCompleted());
        let first = host.commands();
        drop(first);
        unsafe { commands.addCompletedHandler(RcBlock::as_ptr(&block)) };
        commands.commit();
        // `later` was committed first and is complete when the handler runs: it returns.
        assert_eq!(wait(&commands), Ok(()));

        let (commands, later) = (host.commands(), host.commands());
        let waits = Send(later.clone());
        let block = RcBlock::new(move |_| waits.0.waitUntilCompleted());
        unsafe { commands.addCompletedHandler(RcBlock::as_ptr(&block)) };
        commands.commit();
        later.commit();
        says(&refused(|| commands.waitUntilCompleted()), "in a handler of the same queue");

        let commands = host.commands();
        let block = RcBlock::new(|_| panic!("an assertion of the host"));
        unsafe { commands.addCompletedHandler(RcBlock::as_ptr(&block)) };
        commands.commit();
        says(&refused(|| commands.waitUntilCompleted()), "a handler panicked: an assertion of the host");
    });
}

#[test]
fn threads_have_queues_of_their_own() {
    let host = Host::new();
    host.control.set_timing(Timing::Immediate);
    let done = AtomicUsize::new(0);
    let pipeline = host.pipeline("put");
    std::thread::scope(|s| {
        for n in 0..3u32 {
            let (device, pipeline, done) = (host.device.clone(), &pipeline, &done);
            s.spawn(move || {
                autoreleasepool(|_| {
                    let queue = device.newCommandQueue().unwrap();
                    let x = device
                        .newBufferWithLength_options(256, MTLResourceOptions::StorageModeShared)
                        .unwrap();
                    for i in 0..10 {
                        let commands = queue.commandBuffer().unwrap();
                        encode(&commands, |e| {
                            e.setComputePipelineState(pipeline);
                            crate::host::bind(e, &[&x]);
                            crate::host::set(e, &(n * 100 + i), 1);
                            e.dispatchThreadgroups_threadsPerThreadgroup(
                                crate::host::size(1),
                                crate::host::size(64),
                            );
                        });
                        finish(&commands).unwrap();
                        assert_eq!(read::<u32>(&x), vec![n * 100 + i; 64]);
                        done.fetch_add(1, SeqCst);
                    }
                });
            });
        }
    });
    assert_eq!((done.load(SeqCst), host.control.counters().dispatches), (30, 30));
}
