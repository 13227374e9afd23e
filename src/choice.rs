//! The choice of the backend that computes a problem, as a pure function of facts.
//!
//! A device is chosen where it is present, has a plan, and its estimated time is below the processor's, start and copies
//! included.

use crate::any_plan::{AnyPlan, BackendKind};
#[cfg(any(feature = "cuda", feature = "metal"))]
use crate::estimate::{Estimate, Rates, op, time};
use flashtile_core::plan::{PlanOptions, Unsupported};
use flashtile_core::problem::Problem;
use flashtile_cpu::plan::{CpuFacts, CpuPlan};
#[cfg(feature = "cuda")]
use flashtile_cuda::plan::{CudaFacts, CudaPlan};
#[cfg(feature = "metal")]
use flashtile_metal::{MetalFacts, MetalPlan};

/// The facts of a machine, which may be absent: a processor, and the devices of [`Machine::with_cuda`] and
/// [`Machine::with_metal`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Machine {
    /// The processor.
    pub cpu: CpuFacts,
    /// The first CUDA device, or why there is none.
    pub cuda: CudaPresence,
    /// The default Metal device, or why there is none.
    pub metal: MetalPresence,
}

impl Machine {
    /// A machine without devices, as a build that lacks their cargo features sees it.
    #[must_use]
    pub const fn new(cpu: CpuFacts) -> Self {
        Self { cpu, cuda: CudaPresence::NotBuilt, metal: MetalPresence::OtherSystem }
    }

    /// Sets the CUDA device of the machine, or the reason why it has none.
    #[must_use]
    pub fn with_cuda(self, cuda: CudaPresence) -> Self {
        Self { cuda, ..self }
    }

    /// Sets the Metal device of the machine, or the reason why it has none.
    #[must_use]
    pub fn with_metal(self, metal: MetalPresence) -> Self {
        Self { metal, ..self }
    }
}

/// A CUDA device, or why there is none.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum CudaPresence {
    /// The build lacks the cargo feature `cuda`.
    NotBuilt,
    /// The machine has no device that can be used.
    Absent {
        /// The reason, in the words of whatever found it out.
        why: String,
    },
    /// A device that can be used.
    #[cfg(feature = "cuda")]
    #[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
    Present {
        /// The device's own name.
        name: String,
        /// Its facts.
        facts: CudaFacts,
    },
}

/// A Metal device, or why there is none.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum MetalPresence {
    /// The machine runs no system of Apple's.
    OtherSystem,
    /// The build lacks the cargo feature `metal`.
    NotBuilt,
    /// The machine has no device that can be used.
    Absent {
        /// The reason, in the words of whatever found it out.
        why: String,
    },
    /// A device that can be used.
    #[cfg(feature = "metal")]
    #[cfg_attr(docsrs, doc(cfg(feature = "metal")))]
    Present {
        /// The device's own name.
        name: String,
        /// Its facts.
        facts: MetalFacts,
    },
}

/// The result of [`choose`].
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Chosen {
    /// The backend.
    pub kind: BackendKind,
    /// Its plan; where no backend has one, the refusal of the CPU.
    pub plan: Result<AnyPlan, Unsupported>,
    /// Why this backend, in one sentence.
    pub reason: String,
}

impl std::fmt::Display for Chosen {
    /// The backend and the reason: `cpu: this build lacks the cargo feature cuda`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.kind, self.reason)
    }
}

/// Chooses a backend for a problem whose tensors are in host memory. For cached problems the cache is already on the
/// backend: only queries, new rows of keys and values, and results are copied.
///
/// A device is chosen where it has a plan and its estimated time, with start and copies, is below that of the CPU; or where the CPU has
/// no plan. On Apple's systems that is the Metal device, on others the CUDA device. Masks are not counted, since a problem does not say
/// how large a broadcast one is; nor is the
/// compilation of kernels, which happens once and is kept on disk. Pure; costs a plan, or two where the CPU is estimated to be
/// faster than a device.
///
/// ```
/// use flashtile::plan::{Machine, choose, machines};
/// use flashtile::{Dims, Dtype, PlanOptions, ProblemDesc};
/// let dims = Dims { batch: 1, q_heads: 8, kv_heads: 2, q_len: 64, kv_len: 64, head_dim: 64, value_dim: 64 };
/// let problem = ProblemDesc::new(dims, Dtype::F32).validate()?;
/// let chosen = choose(&problem, PlanOptions::default(), &Machine::new(machines::AVX2_8));
/// assert_eq!(chosen.to_string(), "cpu: this build lacks the cargo feature cuda");
/// # Ok::<(), flashtile::Error>(())
/// ```
#[must_use]
pub fn choose(problem: &Problem, options: PlanOptions, machine: &Machine) -> Chosen {
    let cpu = |reason: String| {
        let plan = CpuPlan::new(problem, &machine.cpu, options).map(AnyPlan::Cpu);
        Chosen { kind: BackendKind::Cpu, plan, reason }
    };
    match &machine.metal {
        MetalPresence::OtherSystem => {}
        MetalPresence::NotBuilt => return cpu("this build lacks the cargo feature metal".to_owned()),
        MetalPresence::Absent { why } => return cpu(why.clone()),
        #[cfg(feature = "metal")]
        MetalPresence::Present { name, facts } => {
            return match MetalPlan::new(problem, facts, options) {
                Err(why) => cpu(format!("{name} has no plan: {why}")),
                Ok(plan) => {
                    let rates = Rates::of_metal(problem.dtype(), facts);
                    compare(&machine.cpu, AnyPlan::Metal(plan), &Device { name, kernels: None }, &rates)
                }
            };
        }
    }
    match &machine.cuda {
        CudaPresence::NotBuilt => cpu("this build lacks the cargo feature cuda".to_owned()),
        CudaPresence::Absent { why } => cpu(why.clone()),
        #[cfg(feature = "cuda")]
        CudaPresence::Present { name, facts } => match CudaPlan::new(problem, facts, options) {
            Err(why) => cpu(format!("{name} has no plan: {why}")),
            Ok(plan) => {
                let rates = Rates::of_cuda(&plan, facts);
                let kernels = if crate::estimate::is_portable(&plan) { "portable" } else { "native" };
                compare(&machine.cpu, AnyPlan::Cuda(plan), &Device { name, kernels: Some(kernels) }, &rates)
            }
        },
    }
}

/// A device, as reasons name it.
#[cfg(any(feature = "cuda", feature = "metal"))]
struct Device<'a> {
    name: &'a str,
    /// `native` or `portable`, where a backend has both.
    kernels: Option<&'static str>,
}

/// Chooses between the CPU and a device that has a plan.
#[cfg(any(feature = "cuda", feature = "metal"))]
fn compare(cpu: &CpuFacts, plan: AnyPlan, device: &Device<'_>, rates: &Rates) -> Chosen {
    let estimate = Estimate::new(plan.problem(), cpu, rates);
    let [on_cpu, on_device, overhead] = [estimate.cpu, estimate.device, estimate.overhead].map(time);
    let (name, op) = (device.name, op(plan.problem()));
    let on_the_device = |plan: AnyPlan, why: String| {
        let kernels = device.kernels.map_or(String::new(), |kernels| format!("{kernels} "));
        let reason = format!("{name}; {kernels}{op}, {why}");
        Chosen { kind: plan.kind(), plan: Ok(plan), reason }
    };
    if estimate.device < estimate.cpu {
        return on_the_device(plan, format!("about {on_device} with start and copies, {on_cpu} on the cpu"));
    }
    match CpuPlan::new(plan.problem(), cpu, plan.options()) {
        Err(why) => on_the_device(plan, format!("as the cpu has no plan: {why}")),
        Ok(plan) => {
            let reason =
                format!("about {on_cpu}, on {name} {on_device}, of which start and copies take {overhead}");
            Chosen { kind: BackendKind::Cpu, plan: Ok(AnyPlan::Cpu(plan)), reason }
        }
    }
}
