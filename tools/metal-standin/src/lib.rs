//! A software Metal device: the classes behind `objc2-metal`, running printed MSL on the CPU, for tests on Linux.
//!
//! A test builds with `--cfg metal_standin` in the workspace of `tests/metal`, calls [`install`] or [`device`], and runs the host as it
//! is: the same bindings, selectors, blocks and errors as on a Mac.
//!
//! ```no_run
//! use flashtile_metal_standin::{Profile, Timing, control, device};
//!
//! let device = device(Profile::m1());
//! control(&device).set_timing(Timing::Immediate);
//! ```
//!
//! # Checks
//!
//! - Metal's rules of use: a host that breaks one while it encodes gets a panic that starts with `Metal API validation:`. Rules that
//!   the order of work decides (unordered dispatches and encoders, the CPU's writes to memory in flight, values of events, buffers that
//!   are freed too early) fail the command buffer, whose error says which, and are listed by [`Control::take_violations`].
//! - Kernels: bounds, races, barriers and NaN of threadgroup memory, by `flashtile-msl-standin`.
//! - Ownership: leaks ([`all_live`]), messages to freed objects, autoreleases without a pool, by `flashtile-objc-standin`.
//! - A method that is missing here, or that the profile's system lacks, panics with its name; a missing class is an error of the linker.
//!
//! # Behavior
//!
//! By default work is as late as it may be ([`Timing::Late`]), so that a host that reads too early reads old
//! bytes. Handlers are called on a thread of their queue. [`Order::Random`] runs unordered work in random
//! order.
//!
//! # Limits
//!
//! - That Apple's compiler takes a program, fast-math, real limits of registers, speed, and the words of Apple's validation layer.
//! - Threadgroups that are not whole in `dispatchThreads`, textures, argument encoders, indirect command buffers, render encoders.
//! - Apple's documents are read narrowly, and by people: a rule that they leave open may be stricter or laxer on a device.
#![allow(unsafe_code, reason = "classes of Objective-C are made of raw pointers")]
#![allow(clippy::panic, clippy::expect_used, reason = "panics are how this tool reports faults of a host")]

mod answer;
mod archive;
mod blit_encoder;
mod buffer;
mod capture;
mod command_buffer;
mod commands;
mod compile;
mod completion;
mod compute_encoder;
mod constants;
mod control;
mod counters;
mod cpu_writes;
mod device;
mod encoder;
mod execute;
mod foundation;
mod hazards;
mod heap;
mod library;
mod machine;
mod memory;
mod object;
mod passes;
mod pipeline;
mod pipeline_descriptor;
mod profile;
mod queue;
mod residency;
mod rules;
mod scheduler;
mod symbols;
mod sync;

use objc2::rc::Retained;
use objc2::runtime::ProtocolObject;
use objc2_metal::MTLDevice;

pub use control::{Control, control};
pub use flashtile_objc_standin::{all_live, live};
pub use library::metallib;
pub use machine::{Counters, Entry};
pub use profile::{Order, Profile, Timing};

/// A new device of a profile. The operating system, which `NSProcessInfo` and `respondsToSelector:` of compile options tell of, is from then
/// on that of the profile for this thread, and for threads that have made no device.
pub fn device(profile: Profile) -> Retained<ProtocolObject<dyn MTLDevice>> {
    install();
    device::new_device(profile)
}

/// Sets what `MTLCreateSystemDefaultDevice` returns, before its first call: a device of a profile, [`Profile::default`] where nothing is
/// set, or no device.
///
/// # Panics
/// After the first call.
pub fn set_default_device(profile: Option<Profile>) {
    install();
    device::set_default(profile);
}

/// Keeps this crate in a program that refers to it by symbols alone.
pub fn install() {
    std::hint::black_box(symbols::AT_START);
}
