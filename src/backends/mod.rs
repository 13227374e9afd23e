//! Every backend that a build may have, a file each. This file is the registry: the one place that knows which ones a build has.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
#[cfg(feature = "metal")]
pub(crate) mod metal;
mod own_plan;
pub(crate) mod reference;
#[cfg(feature = "simulator")]
pub(crate) mod simulator;

use crate::backend::Backend;
#[cfg(not(all(feature = "cuda", feature = "metal", feature = "simulator")))]
use crate::error::Error;
use crate::error::Result;
use crate::presence::Candidate;
#[cfg(not(all(feature = "cuda", feature = "metal")))]
use crate::presence::Presence;
use flashtile_core::plan::AnyFacts;
use std::sync::Arc;

/// A backend by its name.
pub(crate) struct Registered {
    /// The name that users write, and with which the names of its kernels begin.
    pub(crate) name: &'static str,
    /// Its kernels and its devices, in a line for help.
    pub(crate) about: &'static str,
    /// True if its devices have numbers: `cuda:1`.
    pub(crate) is_numbered: bool,
    /// Devices of this machine.
    pub(crate) count: fn() -> Result<usize>,
    /// Opens a device by its number. Callers of a process share the device and its kernels.
    pub(crate) open: fn(usize) -> Result<Arc<dyn Backend>>,
    /// The device that the choice compares with the CPU, opened, or why it is not there; `None` where the backend is not for this system,
    /// or is never chosen.
    pub(crate) candidate: fn() -> Option<Candidate>,
    /// Machines by name, to plan for those that are absent.
    pub(crate) known: fn() -> Vec<(&'static str, AnyFacts)>,
}

impl Registered {
    /// A backend with one device, which is never chosen and has no named machines.
    const fn plain(
        name: &'static str,
        about: &'static str,
        open: fn(usize) -> Result<Arc<dyn Backend>>,
    ) -> Self {
        Self { name, about, is_numbered: false, count: || Ok(1), open, candidate: || None, known: Vec::new }
    }
}

/// Every backend, in the order of lists.
pub(crate) static BACKENDS: [Registered; 5] = [
    Registered { known: cpu::known, ..Registered::plain("cpu", "Kernels of this processor", cpu::open) },
    CUDA,
    METAL,
    Registered::plain("reference", "The definition in f64, on one thread", reference::open),
    Registered::plain(
        "simulator",
        "Kernels of the kernel language on the host, every access checked: for small problems, in builds with the cargo feature \
         simulator",
        SIMULATOR,
    ),
];

const ABOUT_CUDA: &str = "Kernels of the first CUDA device; cuda:1 is the second, and so on";
const ABOUT_METAL: &str = "Kernels of the default Metal device, on Apple's systems";

#[cfg(feature = "cuda")]
const CUDA: Registered = Registered {
    is_numbered: true,
    count: cuda::count,
    candidate: cuda::candidate,
    known: cuda::known,
    ..Registered::plain("cuda", ABOUT_CUDA, cuda::open)
};

#[cfg(not(feature = "cuda"))]
const CUDA: Registered = Registered {
    is_numbered: true,
    candidate: || (!cfg!(target_vendor = "apple")).then_some(Err(Presence::NotBuilt { feature: "cuda" })),
    ..Registered::plain("cuda", ABOUT_CUDA, |device| {
        let number = if device == 0 { String::new() } else { format!(":{device}") };
        Err(Error::Feature { asked: format!("cuda{number}"), feature: "cuda" })
    })
};

#[cfg(feature = "metal")]
const METAL: Registered = Registered {
    candidate: metal::candidate,
    known: metal::known,
    ..Registered::plain("metal", ABOUT_METAL, metal::open)
};

#[cfg(not(feature = "metal"))]
const METAL: Registered = Registered {
    candidate: || cfg!(target_vendor = "apple").then_some(Err(Presence::NotBuilt { feature: "metal" })),
    ..Registered::plain("metal", ABOUT_METAL, |_| {
        let asked = "metal".to_owned();
        Err(match cfg!(target_vendor = "apple") {
            true => Error::Feature { asked, feature: "metal" },
            false => Error::System { asked, systems: "a system of Apple's" },
        })
    })
};

#[cfg(feature = "simulator")]
const SIMULATOR: fn(usize) -> Result<Arc<dyn Backend>> = simulator::open;

#[cfg(not(feature = "simulator"))]
const SIMULATOR: fn(usize) -> Result<Arc<dyn Backend>> =
    |_| Err(Error::Feature { asked: "simulator".to_owned(), feature: "simulator" });

/// The machines and devices of [`machines`](crate::plan::machines) with the names that `flashtile plan --device` takes,
/// such as `avx2-8core`, `h200` and `m3-max`: to plan for hardware that is absent.
#[must_use]
pub fn known_machines() -> Vec<(&'static str, AnyFacts)> {
    BACKENDS.iter().flat_map(|of| (of.known)()).collect()
}
