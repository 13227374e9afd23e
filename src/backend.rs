//! The backends of this machine, and the choice between them.

use crate::any_plan::{AnyFacts, AnyPlan, BackendKind};
use crate::backend_name::BackendName;
use crate::choice::{CudaPresence, Machine, MetalPresence, choose};
use crate::error::Result;
use flashtile_core::plan::{PlanOptions, Unsupported};
use flashtile_core::problem::Problem;
use flashtile_cpu::cpu::Cpu;
#[cfg(feature = "cuda")]
use flashtile_cuda::{Cuda, CudaError, Gpu};
#[cfg(all(feature = "metal", any(target_vendor = "apple", metal_standin)))]
use flashtile_metal::{Metal, MetalError};

/// A backend of this machine.
///
/// ```
/// use flashtile::{Backend, Dims, Dtype, ProblemDesc};
/// let dims = Dims { batch: 1, q_heads: 8, kv_heads: 2, q_len: 64, kv_len: 64, head_dim: 64, value_dim: 64 };
/// let problem = ProblemDesc::new(dims, Dtype::F32).validate()?;
/// let choice = Backend::auto(&problem);
/// println!("{choice}"); // cpu: no NVIDIA driver on this machine: tried libcuda.so, libcuda.so.1
/// println!("{}", choice.plan?); // kernel, tiles, tasks, splits, workspace
/// # Ok::<(), flashtile::Error>(())
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Backend {
    /// The processor.
    Cpu(Cpu),
    /// A CUDA device.
    #[cfg(feature = "cuda")]
    #[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
    Cuda(Cuda),
    /// A Metal device; on Apple's systems.
    #[cfg(all(feature = "metal", any(target_vendor = "apple", metal_standin)))]
    Metal(Metal),
}

impl Backend {
    /// The fastest backend of this machine for a problem whose tensors are in host memory, and why: [`choose`] with the facts
    /// of this machine. A CUDA device counts as present if it starts and NVRTC is found. Of several CUDA devices the first is
    /// considered; `CUDA_VISIBLE_DEVICES` makes another one the first. The Metal device counts as present if it computes two small
    /// problems as the reference does ([`Metal::self_check`](https://docs.rs/flashtile-metal)).
    ///
    /// The first call in a process starts the driver, which may take a second where there is a CUDA device, or checks the Metal device,
    /// which takes as long where that was not done on this system before. Every call plans: keep the choice and use [`Backend::plan`] for
    /// further problems of the same size.
    #[must_use]
    pub fn auto(problem: &Problem) -> Choice {
        Self::auto_with(problem, PlanOptions::default())
    }

    /// [`Backend::auto`] with options of the planner.
    #[must_use]
    pub fn auto_with(problem: &Problem, options: PlanOptions) -> Choice {
        let cpu = Cpu::new();
        let (device, metal) = (Device::first(), MetalDevice::default_of_system());
        let machine = Machine::new(*cpu.facts()).with_cuda(device.presence()).with_metal(metal.presence());
        let chosen = choose(problem, options, &machine);
        let backend = match chosen.kind {
            BackendKind::Cpu => Self::Cpu(cpu),
            BackendKind::Cuda => {
                device.into_backend().unwrap_or_else(|| unreachable!("a device that was chosen is present"))
            }
            BackendKind::Metal => {
                metal.into_backend().unwrap_or_else(|| unreachable!("a device that was chosen is present"))
            }
        };
        Choice { backend, plan: chosen.plan, reason: chosen.reason }
    }

    /// The backend that a user's text names: `auto`, `cpu`, `metal`, `cuda`, or `cuda:1` for another device.
    ///
    /// # Errors
    /// [`Error::BackendName`](crate::Error::BackendName) where the text names none, and the errors of [`BackendName::open`].
    pub fn named(name: &str, problem: &Problem) -> Result<Choice> {
        name.parse::<BackendName>()?.open(problem, PlanOptions::default())
    }

    /// Plans a problem for this backend.
    ///
    /// # Errors
    /// As [`AnyPlan::new`].
    pub fn plan(&self, problem: &Problem, options: PlanOptions) -> std::result::Result<AnyPlan, Unsupported> {
        match self {
            Self::Cpu(cpu) => cpu.plan(problem, options).map(AnyPlan::Cpu),
            #[cfg(feature = "cuda")]
            Self::Cuda(cuda) => cuda.plan(problem, options).map(AnyPlan::Cuda),
            #[cfg(all(feature = "metal", any(target_vendor = "apple", metal_standin)))]
            Self::Metal(metal) => metal.plan(problem, options).map(AnyPlan::Metal),
        }
    }

    /// Facts of the device, for the planner.
    #[must_use]
    pub fn facts(&self) -> AnyFacts {
        match self {
            Self::Cpu(cpu) => AnyFacts::Cpu(*cpu.facts()),
            #[cfg(feature = "cuda")]
            Self::Cuda(cuda) => AnyFacts::Cuda(*cuda.facts()),
            #[cfg(all(feature = "metal", any(target_vendor = "apple", metal_standin)))]
            Self::Metal(metal) => AnyFacts::Metal(*metal.facts()),
        }
    }

    /// Which backend it is.
    #[must_use]
    pub const fn kind(&self) -> BackendKind {
        match self {
            Self::Cpu(_) => BackendKind::Cpu,
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => BackendKind::Cuda,
            #[cfg(all(feature = "metal", any(target_vendor = "apple", metal_standin)))]
            Self::Metal(_) => BackendKind::Metal,
        }
    }
}

/// A backend, its plan for the problem, and why it was chosen. [`Display`](std::fmt::Display) is `{backend}: {reason}`.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Choice {
    /// The backend.
    pub backend: Backend,
    /// Its plan for the problem, or why it has none. [`Backend::auto`] chooses a backend without a plan only where no other has
    /// one.
    pub plan: std::result::Result<AnyPlan, Unsupported>,
    /// Why this backend, in one sentence.
    pub reason: String,
}

impl Choice {
    fn asked(backend: Backend, problem: &Problem, options: PlanOptions) -> Self {
        Self { plan: backend.plan(problem, options), backend, reason: "asked for".to_owned() }
    }
}

impl std::fmt::Display for Choice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.backend.kind(), self.reason)
    }
}

impl BackendName {
    /// Opens the backend of this name for a problem; [`BackendName::Auto`] is [`Backend::auto_with`].
    ///
    /// # Errors
    /// [`Error::Feature`](crate::Error::Feature) where the build lacks the backend. Of CUDA, `Error::Cuda` where there is no driver or no device of the number,
    /// with the number of devices, and [`Error::Unsupported`](crate::Error::Unsupported) where the device is older than the kernels. Of Metal, [`Error::System`](crate::Error::System) on
    /// systems other than Apple's, `Error::Metal` where there is no device, and [`Error::Unsupported`](crate::Error::Unsupported) where it is none of Apple's own. A problem that the backend has no plan for is no error here but
    /// [`Choice::plan`].
    pub fn open(self, problem: &Problem, options: PlanOptions) -> Result<Choice> {
        match self {
            Self::Auto => Ok(Backend::auto_with(problem, options)),
            Self::Cpu => Ok(Choice::asked(Backend::Cpu(Cpu::new()), problem, options)),
            #[cfg(feature = "cuda")]
            Self::Cuda { device } => Ok(Choice::asked(Backend::Cuda(device_of(device)?), problem, options)),
            #[cfg(not(feature = "cuda"))]
            Self::Cuda { .. } => {
                Err(crate::error::Error::Feature { asked: self.to_string(), feature: "cuda" })
            }
            #[cfg(all(feature = "metal", any(target_vendor = "apple", metal_standin)))]
            Self::Metal => Ok(Choice::asked(Backend::Metal(shared_metal()?), problem, options)),
            #[cfg(all(not(feature = "metal"), any(target_vendor = "apple", metal_standin)))]
            Self::Metal => Err(crate::error::Error::Feature { asked: self.to_string(), feature: "metal" }),
            #[cfg(not(any(target_vendor = "apple", metal_standin)))]
            Self::Metal => {
                Err(crate::error::Error::System { asked: self.to_string(), systems: "a system of Apple's" })
            }
        }
    }
}

/// The device of a number, which all callers of the process share with its kernels.
#[cfg(feature = "cuda")]
fn device_of(ordinal: usize) -> std::result::Result<Cuda, CudaError> {
    let context = Gpu::primary_context(ordinal).map_err(CudaError::Device)?;
    Cuda::shared(&context)
}

/// The first CUDA device of this machine, or why it cannot be used.
#[cfg(feature = "cuda")]
struct Device(std::result::Result<Cuda, String>);

#[cfg(feature = "cuda")]
impl Device {
    /// A device that starts, and for which kernels can be compiled.
    fn first() -> Self {
        let found = device_of(0).map_err(|error| match error {
            CudaError::Unsupported(why) => format!("CUDA device 0 cannot be used: {why}"),
            other => other.to_string(),
        });
        Self(found.and_then(|cuda| match cuda.compiler() {
            Ok(_) => Ok(cuda),
            Err(why) => Err(format!("{} cannot be used: {why}", cuda.name())),
        }))
    }

    fn presence(&self) -> CudaPresence {
        match &self.0 {
            Ok(cuda) => CudaPresence::Present { name: cuda.name().to_owned(), facts: *cuda.facts() },
            Err(why) => CudaPresence::Absent { why: why.clone() },
        }
    }

    fn into_backend(self) -> Option<Backend> {
        self.0.ok().map(Backend::Cuda)
    }
}

/// No device: the build lacks the feature.
#[cfg(not(feature = "cuda"))]
struct Device;

#[cfg(not(feature = "cuda"))]
impl Device {
    const fn first() -> Self {
        Self
    }

    const fn presence(&self) -> CudaPresence {
        CudaPresence::NotBuilt
    }

    const fn into_backend(self) -> Option<Backend> {
        None
    }
}

/// The system's default Metal device, which all callers of the process share with its kernels.
#[cfg(all(feature = "metal", any(target_vendor = "apple", metal_standin)))]
fn shared_metal() -> std::result::Result<Metal, MetalError> {
    static DEVICE: std::sync::OnceLock<std::result::Result<Metal, MetalError>> = std::sync::OnceLock::new();
    DEVICE.get_or_init(Metal::new).clone()
}

/// The system's default Metal device, or why it cannot be used.
#[cfg(all(feature = "metal", any(target_vendor = "apple", metal_standin)))]
struct MetalDevice(std::result::Result<Metal, String>);

#[cfg(all(feature = "metal", any(target_vendor = "apple", metal_standin)))]
impl MetalDevice {
    /// The system's default device, if it passes its self-check.
    fn default_of_system() -> Self {
        let found = shared_metal().map_err(|error| error.to_string());
        Self(found.and_then(|metal| metal.self_check().map(|()| metal)))
    }

    fn presence(&self) -> MetalPresence {
        match &self.0 {
            Ok(metal) => MetalPresence::Present { name: metal.name().to_owned(), facts: *metal.facts() },
            Err(why) => MetalPresence::Absent { why: why.clone() },
        }
    }

    fn into_backend(self) -> Option<Backend> {
        self.0.ok().map(Backend::Metal)
    }
}

/// No device: the build lacks the feature, or the system is none of Apple's.
#[cfg(not(all(feature = "metal", any(target_vendor = "apple", metal_standin))))]
struct MetalDevice;

#[cfg(not(all(feature = "metal", any(target_vendor = "apple", metal_standin))))]
impl MetalDevice {
    const fn default_of_system() -> Self {
        Self
    }

    const fn presence(&self) -> MetalPresence {
        if cfg!(any(target_vendor = "apple", metal_standin)) {
            MetalPresence::NotBuilt
        } else {
            MetalPresence::OtherSystem
        }
    }

    const fn into_backend(self) -> Option<Backend> {
        None
    }
}
