//! A process of its own, on a machine without a device.
#![cfg(metal_standin)]

use flashtile_metal_standin::set_default_device;
use objc2::rc::autoreleasepool;
use objc2_metal::{MTLCopyAllDevices, MTLCreateSystemDefaultDevice};

#[test]
fn a_machine_without_a_device() {
    set_default_device(None);
    assert!(MTLCreateSystemDefaultDevice().is_none());
    autoreleasepool(|_| assert_eq!(MTLCopyAllDevices().count(), 0));
}
