//! Devices of tests.

use flashtile_metal::Metal;
use flashtile_metal_standin::{Profile, device};

/// A new device of a profile.
pub(crate) fn metal(profile: Profile) -> Metal {
    Metal::with_device(device(profile)).unwrap()
}
