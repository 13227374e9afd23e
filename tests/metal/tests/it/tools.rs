//! Information of hosts for tools: labels, groups and captures.

use flashtile_metal_standin::Entry;
use objc2::rc::autoreleasepool;
use objc2_foundation::NSURL;
use objc2_metal::*;

use crate::host::{Host, encode, file, finish, refused, says, string};

#[test]
fn labels_and_groups_are_written_down() {
    let host = Host::new();
    autoreleasepool(|_| {
        host.queue.setLabel(Some(&string("decode")));
        let x = host.zeros(256);
        x.setLabel(Some(&string("keys")));
        let commands = host.commands();
        commands.setLabel(Some(&string("step 1")));
        commands.pushDebugGroup(&string("layer 0"));
        encode(&commands, |e| {
            e.setLabel(Some(&string("attention")));
            e.pushDebugGroup(&string("partials"));
            e.insertDebugSignpost(&string("here"));
            host.put(e, &x, 0, 1);
            e.popDebugGroup();
        });
        commands.popDebugGroup();
        finish(&commands).unwrap();
        assert_eq!(x.label().unwrap().to_string(), "keys");
        let label = |kind, label: &str| Entry::Label(kind, label.into());
        assert_eq!(
            host.control.log(),
            [
                label("queue", "decode"),
                label("buffer", "keys"),
                label("command buffer", "step 1"),
                Entry::Push("layer 0".into()),
                label("compute encoder", "attention"),
                Entry::Push("partials".into()),
                Entry::Signpost("here".into()),
                Entry::Dispatch("put".into()),
                Entry::Pop,
                Entry::Pop,
                Entry::Commit(Some("step 1".into())),
            ]
        );
    });
}

/// The environment of the process is changed in this test alone.
#[test]
fn captures() {
    let host = Host::new();
    let path = file("capture.gputrace");
    autoreleasepool(|_| {
        let manager = unsafe { MTLCaptureManager::sharedCaptureManager() };
        let descriptor = MTLCaptureDescriptor::new();
        descriptor.set_capture_device(&host.device);
        descriptor.setDestination(MTLCaptureDestination::GPUTraceDocument);
        descriptor.setOutputURL(Some(&NSURL::fileURLWithPath(&string(path.to_str().unwrap()))));
        assert!(!manager.supportsDestination(MTLCaptureDestination::GPUTraceDocument));
        let e = manager.startCaptureWithDescriptor_error(&descriptor).unwrap_err();
        assert_eq!(e.code(), MTLCaptureError::NotSupported.0);
        unsafe { std::env::set_var("METAL_CAPTURE_ENABLED", "1") };
        assert!(manager.supportsDestination(MTLCaptureDestination::GPUTraceDocument));
        manager.startCaptureWithDescriptor_error(&descriptor).unwrap();
        assert!(manager.isCapturing());
        let e = manager.startCaptureWithDescriptor_error(&descriptor).unwrap_err();
        assert_eq!(e.code(), MTLCaptureError::AlreadyCapturing.0);
        let scope = manager.newCaptureScopeWithCommandQueue(&host.queue);
        scope.setLabel(Some(&string("token")));
        scope.beginScope();
        scope.endScope();
        manager.stopCapture();
        assert!(!manager.isCapturing());
        says(&refused(|| scope.endScope()), "endScope of a capture scope without beginScope");
        let start = Entry::CaptureStart("StandinDevice".into(), Some(path.to_str().unwrap().into()));
        assert_eq!(
            host.control.log(),
            [
                start,
                Entry::Label("capture scope", "token".into()),
                Entry::ScopeBegin(Some("token".into())),
                Entry::ScopeEnd(Some("token".into())),
                Entry::CaptureStop,
            ]
        );
        unsafe { std::env::remove_var("METAL_CAPTURE_ENABLED") };
    });
}

#[test]
fn what_was_done_is_counted() {
    let host = Host::new();
    let x = host.zeros(256);
    host.run_as(MTLDispatchType::Concurrent, |e| {
        host.put(e, &x, 0, 1);
        e.memoryBarrierWithScope(MTLBarrierScope::Buffers);
        host.put(e, &x, 0, 2);
    })
    .unwrap();
    let c = host.control.counters();
    assert_eq!((c.dispatches, c.barriers, c.encoders, c.command_buffers), (2, 1, 1, 1));
    assert_eq!((c.buffers, c.bytes, c.libraries, c.pipelines), (1, 256, 2, 2));
}
