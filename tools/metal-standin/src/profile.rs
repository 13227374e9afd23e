//! Properties and behavior of a device, which tests choose.

use std::time::Duration;

use objc2_metal::{MTLGPUFamily, MTLLanguageVersion};

/// A chip, the system that it runs with, and limits that tests lower.
///
/// Names, families and limits are from Apple's "Metal Feature Set Tables" (developer.apple.com/metal/Metal-Feature-Set-Tables.pdf).
/// Sizes of memory are of common configurations.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Profile {
    /// The answer of `name`.
    pub name: String,
    /// The answer of `architecture` by its `name`; None before macOS 14 and iOS 17, where the method is
    /// missing.
    pub architecture: Option<String>,
    /// The families that `supportsFamily:` affirms.
    pub families: Vec<MTLGPUFamily>,
    /// Major, minor and patch version of the operating system.
    pub system: [isize; 3],
    /// The newest Metal Shading Language that its compiler takes.
    pub newest_language: MTLLanguageVersion,
    /// True if `newResidencySetWithDescriptor:error:` and its like exist: from macOS 15 and iOS 18 on.
    pub has_residency_sets: bool,
    /// True if `mathMode` of compile options exists: from macOS 15 and iOS 18 on.
    pub has_math_mode: bool,
    /// Threads that a threadgroup may have.
    pub max_threads: usize,
    /// `maxTotalThreadsPerThreadgroup` of each pipeline, where the registers of a kernel allow fewer than `max_threads`.
    pub pipeline_threads: usize,
    /// True if kernels that declare their threads are compiled for them, with registers spilled to memory
    /// where they do not suffice. Otherwise they are compiled for `pipeline_threads` as others are.
    pub compiles_for_declared_threads: bool,
    /// Bytes of threadgroup memory.
    pub max_threadgroup_memory: usize,
    /// Bytes of the longest buffer.
    pub max_buffer_length: usize,
    /// Bytes that all buffers together may have: past them a new buffer is nil.
    pub memory: usize,
    /// The answer of `recommendedMaxWorkingSetSize`.
    pub working_set: u64,
    /// True if a library without an explicit language version is refused. The default is the newest version
    /// of the system, so that a program that leaves it open compiles differently after an update.
    pub requires_language_version: bool,
    /// The time after which a command buffer that waits for an event fails, with the error of the GPU's watchdog, so that a test ends.
    pub event_timeout: Duration,
}

impl Profile {
    fn apple(name: &str, architecture: &str, newest: MTLGPUFamily, is_mac: bool) -> Self {
        let generations = [
            MTLGPUFamily::Apple1,
            MTLGPUFamily::Apple2,
            MTLGPUFamily::Apple3,
            MTLGPUFamily::Apple4,
            MTLGPUFamily::Apple5,
            MTLGPUFamily::Apple6,
            MTLGPUFamily::Apple7,
            MTLGPUFamily::Apple8,
            MTLGPUFamily::Apple9,
            MTLGPUFamily::Apple10,
        ];
        let mut families: Vec<_> = generations.into_iter().filter(|f| f.0 <= newest.0).collect();
        families.extend([
            MTLGPUFamily::Common1,
            MTLGPUFamily::Common2,
            MTLGPUFamily::Common3,
            MTLGPUFamily::Metal3,
        ]);
        if is_mac {
            families.push(MTLGPUFamily::Mac2);
        }
        Self {
            name: name.into(),
            architecture: Some(architecture.into()),
            families,
            system: [15, 0, 0],
            newest_language: MTLLanguageVersion::Version3_2,
            has_residency_sets: true,
            has_math_mode: true,
            max_threads: 1024,
            pipeline_threads: 1024,
            compiles_for_declared_threads: true,
            max_threadgroup_memory: 32768,
            max_buffer_length: 1 << 32,
            memory: 1 << 34,
            working_set: 11_453_251_584,
            requires_language_version: true,
            event_timeout: Duration::from_secs(10),
        }
    }

    /// An M1 with macOS 14: family Apple7, Metal 3.1, no residency sets and no `mathMode`.
    pub fn m1() -> Self {
        Self {
            system: [14, 6, 0],
            newest_language: MTLLanguageVersion::Version3_1,
            has_residency_sets: false,
            has_math_mode: false,
            ..Self::apple("Apple M1", "applegpu_g13g", MTLGPUFamily::Apple7, true)
        }
    }

    /// An M2 with macOS 15: family Apple8.
    pub fn m2() -> Self {
        Self::apple("Apple M2", "applegpu_g14g", MTLGPUFamily::Apple8, true)
    }

    /// An M3 Max with macOS 15: family Apple9.
    pub fn m3_max() -> Self {
        Self {
            max_buffer_length: 1 << 35,
            memory: 1 << 36,
            working_set: 51_539_607_552,
            ..Self::apple("Apple M3 Max", "applegpu_g15s", MTLGPUFamily::Apple9, true)
        }
    }

    /// An M5 with macOS 26.2: family Apple10, Metal 4.
    pub fn m5() -> Self {
        let mut profile = Self {
            system: [26, 2, 0],
            newest_language: MTLLanguageVersion::Version4_0,
            ..Self::apple("Apple M5", "applegpu_g17g", MTLGPUFamily::Apple10, true)
        };
        profile.families.push(MTLGPUFamily::Metal4);
        profile
    }

    /// An iPhone's A17 Pro with iOS 18: family Apple9, little memory.
    pub fn a17_pro() -> Self {
        Self {
            system: [18, 0, 0],
            max_buffer_length: 1 << 30,
            memory: 1 << 32,
            working_set: 5_726_623_061,
            ..Self::apple("Apple A17 Pro GPU", "applegpu_g16p", MTLGPUFamily::Apple9, false)
        }
    }
}

impl Default for Profile {
    fn default() -> Self {
        Self::m3_max()
    }
}

/// When committed work runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timing {
    /// At once, on the device's thread.
    Immediate,
    /// As late as it may be: when a thread waits for it, or for an effect that only it can have, or after
    /// this much time. A host that reads results before it waits sees the old bytes.
    Late(Duration),
}

impl Timing {
    /// [`Timing::Late`] with time enough for a test to see what it must not.
    pub const LATE: Self = Self::Late(Duration::from_secs(2));
}

/// The order of work that nothing orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// As it was encoded and committed.
    Encoded,
    /// Random, from a seed: dispatches of a concurrent encoder between barriers, threadgroups of a grid, and encoders of different
    /// queues.
    Random(u64),
}
