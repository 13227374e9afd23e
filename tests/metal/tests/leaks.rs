//! A process of its own, whose objects are counted.
#![cfg(metal_standin)]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]
#![allow(
    unsafe_code,
    clippy::undocumented_unsafe_blocks,
    reason = "calls of Metal with what the tests have just made"
)]

#[path = "it/host.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod host;

use block2::RcBlock;
use flashtile_metal_standin::{Timing, all_live};
use host::{Host, encode, finish, string};
use objc2::rc::autoreleasepool;
use objc2::runtime::ProtocolObject;
use objc2_metal::*;

/// A host's run with an object of most kinds, failures included.
fn session(timing: Timing) {
    let host = Host::new();
    host.control.set_timing(timing);
    autoreleasepool(|_| {
        let (x, y) = (host.zeros(256), host.untracked(256));
        let fence = host.device.newFence().unwrap();
        let event = host.device.newSharedEvent().unwrap();
        let commands = host.commands();
        commands.setLabel(Some(&string("step")));
        let done = RcBlock::new(|_| {});
        unsafe { commands.addCompletedHandler(RcBlock::as_ptr(&done)) };
        encode(&commands, |e| {
            host.put(e, &x, 0, 1);
            host.copy(e, &x, &y);
            e.updateFence(&fence);
        });
        commands.encodeSignalEvent_value(ProtocolObject::from_ref(&*event), 1);
        finish(&commands).unwrap();
        assert!(host.library("no program").is_err());
        let failing = host.commands();
        host.control.fail_command_buffer(MTLCommandBufferError::Timeout);
        assert!(finish(&failing).is_err());
        let unused = host.commands();
        unused.computeCommandEncoder().unwrap().endEncoding();
        let set = host.device.newResidencySetWithDescriptor_error(&MTLResidencySetDescriptor::new()).unwrap();
        set.addAllocation(ProtocolObject::from_ref(&*x));
        set.commit();
        host.queue.addResidencySet(&set);
        let heap = MTLHeapDescriptor::new();
        heap.setSize(4096);
        heap.setStorageMode(MTLStorageMode::Shared);
        let heap = host.device.newHeapWithDescriptor(&heap).unwrap();
        let _kept = heap.newBufferWithLength_options(16, MTLResourceOptions::StorageModeShared).unwrap();
    });
}

#[test]
fn nothing_leaks() {
    for timing in [Timing::LATE, Timing::Immediate] {
        session(timing);
        assert_eq!(all_live(), []);
    }
    let kept = host::string("kept");
    assert_eq!(all_live(), [("NSString".to_owned(), 1)]);
    drop(kept);
}
