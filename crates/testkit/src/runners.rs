//! The runners of each backend by its name: the one place of the test kit that knows which ones a build has.

use super::run::Runner;
use flashtile_core::plan::PlanOptions;

/// How [`runners`] run cases.
#[derive(Debug, Clone, Copy)]
#[allow(clippy::exhaustive_structs)]
pub struct RunnerOptions {
    /// Options of every plan.
    pub plan: PlanOptions,
    /// True if allocations end where the tensors do, for memory checkers; otherwise NaN follow.
    pub exact: bool,
    /// Largest number of scores of a case on the simulator.
    pub max_scores: u64,
}

/// The runners of a backend's device by its number, or why it cannot be opened: aligned tensors, tensors at odd addresses, and other
/// ways to launch. None for backends of which this build has no runner.
#[allow(unused_variables, reason = "builds without GPUs have no runners here")]
#[must_use]
pub fn runners(
    backend: &str,
    device: usize,
    options: &RunnerOptions,
) -> Option<Result<Vec<Box<dyn Runner>>, String>> {
    match backend {
        #[cfg(feature = "cuda")]
        "cuda" => Some(cuda(device, options)),
        #[cfg(all(feature = "metal", any(target_vendor = "apple", metal_standin)))]
        "metal" => Some(metal(options)),
        #[cfg(feature = "simulator")]
        "simulator" => {
            let runner = crate::simulator::SimulatorRunner::new().at_most(options.max_scores);
            Some(Ok(vec![Box::new(runner)]))
        }
        _ => None,
    }
}

#[cfg(feature = "cuda")]
fn cuda(device: usize, options: &RunnerOptions) -> Result<Vec<Box<dyn Runner>>, String> {
    let cuda = flashtile_cuda::Cuda::new(device).map_err(|error| error.to_string())?;
    let runner = crate::cuda::CudaRunner::new(cuda).exact(options.exact).with(options.plan);
    Ok(vec![Box::new(runner.clone()), Box::new(runner.odd())])
}

#[cfg(all(feature = "metal", any(target_vendor = "apple", metal_standin)))]
fn metal(options: &RunnerOptions) -> Result<Vec<Box<dyn Runner>>, String> {
    use crate::metal::{MetalPath, MetalRunner};
    let metal = flashtile_metal::Metal::new().map_err(|error| error.to_string())?;
    let runner = MetalRunner::new(metal).with(options.plan);
    let concurrent = MetalPath::CommandBuffer(flashtile_metal::DispatchType::Concurrent);
    Ok(vec![Box::new(runner.clone()), Box::new(runner.clone().odd()), Box::new(runner.by(concurrent))])
}
