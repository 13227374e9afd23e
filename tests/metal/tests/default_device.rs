//! A process of its own, whose default device is another one.
#![cfg(metal_standin)]

use flashtile_metal_standin::{Profile, set_default_device};
use objc2::rc::autoreleasepool;
use objc2_foundation::{NSString, NSURL};
use objc2_metal::{MTLCreateSystemDefaultDevice, MTLDevice};

#[test]
fn the_default_device_is_chosen_before_it_is_used() {
    set_default_device(Some(Profile::m1()));
    autoreleasepool(|_| {
        let device = MTLCreateSystemDefaultDevice().unwrap();
        assert_eq!(device.name().to_string(), "Apple M1");
        assert!(
            device.newLibraryWithURL_error(&NSURL::fileURLWithPath(&NSString::from_str("/none"))).is_err()
        );
    });
    assert!(std::panic::catch_unwind(|| set_default_device(None)).is_err(), "it is in use");
}
