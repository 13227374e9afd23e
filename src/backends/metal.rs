//! Metal devices: Apple's GPUs. Other systems have none, and builds for them only plan.

use flashtile_core::plan::AnyFacts;
use flashtile_metal::ALL_APPLE;

#[cfg(not(any(target_vendor = "apple", metal_standin)))]
pub(crate) use elsewhere::{candidate, open};
#[cfg(any(target_vendor = "apple", metal_standin))]
pub(crate) use on_apple::{candidate, open};

pub(crate) fn known() -> Vec<(&'static str, AnyFacts)> {
    ALL_APPLE.iter().map(|(name, facts)| (*name, AnyFacts::new(*facts))).collect()
}

#[cfg(not(any(target_vendor = "apple", metal_standin)))]
mod elsewhere {
    use crate::backend::Backend;
    use crate::error::{Error, Result};
    use crate::presence::Candidate;
    use std::sync::Arc;

    pub(crate) fn open(_: usize) -> Result<Arc<dyn Backend>> {
        Err(Error::System { asked: "metal".to_owned(), systems: "a system of Apple's" })
    }

    pub(crate) const fn candidate() -> Option<Candidate> {
        None
    }
}

#[cfg(any(target_vendor = "apple", metal_standin))]
mod on_apple {
    use crate::backend::{Backend, HostSession, Limit, Rate, TimedBackward, TimedRun, Unit};
    use crate::backends::gpu::host_seconds;
    use crate::backends::own_plan::{backward_plan_of, first, plan_of};
    use crate::error::{Error, Result};
    use crate::presence::{Candidate, Presence};
    use flashtile_core::dtype::Dtype;
    use flashtile_core::gradients::{BackwardInputs, Gradients};
    use flashtile_core::inputs::{Inputs, Outputs};
    use flashtile_core::plan::{AnyBackwardPlan, AnyFacts, AnyPlan, PlanOptions};
    use flashtile_core::problem::Problem;
    use flashtile_gpu::backward::planner::GpuBackwardPlan;
    use flashtile_metal::{
        DeviceError, Metal, MetalError, MetalPlan, SessionError, TimedBackwardRun, limits,
    };
    use std::sync::{Arc, OnceLock};

    pub(crate) fn open(_: usize) -> Result<Arc<dyn Backend>> {
        Ok(Arc::new(shared()?))
    }

    /// The system's default device, which all callers of the process share with its kernels.
    fn shared() -> std::result::Result<Metal, MetalError> {
        static DEVICE: OnceLock<std::result::Result<Metal, MetalError>> = OnceLock::new();
        DEVICE.get_or_init(Metal::new).clone()
    }

    /// The system's default device, if it passes its self-check.
    pub(crate) fn candidate() -> Option<Candidate> {
        let found = shared().map_err(|error| error.to_string());
        Some(match found.and_then(|metal| metal.self_check().map(|()| metal)) {
            Ok(metal) => Ok(Arc::new(metal)),
            Err(why) => Err(Presence::Absent { why }),
        })
    }

    impl Backend for Metal {
        fn name(&self) -> String {
            "metal".to_owned()
        }

        fn device(&self) -> String {
            self.name().to_owned()
        }

        fn describe(&self) -> String {
            let kept = match self.gpu().cache_folder() {
                Some(folder) => format!("kernels are kept in {}", folder.display()),
                None => "kernels are not kept".to_owned(),
            };
            let checked = match self.self_check() {
                Ok(()) => "passes the self-check".to_owned(),
                Err(why) => format!("fails the self-check: {why}"),
            };
            format!("{}, about {} cores; {checked}; {kept}", self.name(), self.facts().cores)
        }

        fn facts(&self) -> AnyFacts {
            AnyFacts::new(*self.facts())
        }

        fn prepare(&self, plan: &AnyPlan) -> Result<()> {
            Ok(self.prepare(plan_of(plan)?)?)
        }

        fn session(&self, options: PlanOptions) -> Result<Box<dyn HostSession>> {
            Ok(Box::new(self.session_with(options)))
        }

        fn timed<'t>(
            &'t self,
            plan: &'t AnyPlan,
            inputs: &[Inputs<'t>],
            outputs: &Outputs<'_>,
        ) -> Result<Box<dyn TimedRun + 't>> {
            let inputs = first(inputs)?;
            Ok(Box::new(flashtile_metal::TimedRun::new(self, plan_of(plan)?, inputs, outputs)?))
        }

        fn timed_backward<'t>(
            &'t self,
            plan: &'t AnyBackwardPlan,
            inputs: &BackwardInputs<'t>,
            gradients: &Gradients<'_>,
        ) -> Result<Box<dyn TimedBackward + 't>> {
            let plan: &GpuBackwardPlan = backward_plan_of(plan)?;
            Ok(Box::new(TimedBackwardRun::backward(self, plan.portable(), inputs, gradients)?))
        }

        fn unit(&self, plan: &AnyPlan) -> Option<Unit> {
            plan.of::<MetalPlan>()?;
            Some(unit(self, plan.problem()))
        }

        fn backward_unit(&self, plan: &AnyBackwardPlan) -> Option<Unit> {
            plan.of::<GpuBackwardPlan>()?;
            Some(unit(self, plan.problem()))
        }

        fn limit(&self, rate: Rate, unit: &Unit) -> Result<Limit> {
            let dtype = unit.dtype.unwrap_or(Dtype::F32);
            Ok(match rate {
                Rate::Arithmetic => {
                    Limit { per_second: limits::matrix_peak(self, dtype)?, by: "simdgroup matrix" }
                }
                Rate::Bandwidth => Limit { per_second: limits::copy_bandwidth(self)?, by: "copy" },
            })
        }
    }

    /// The device as the unit of a problem's products.
    fn unit(metal: &Metal, problem: &Problem) -> Unit {
        let (name, dtype) = (metal.name().to_owned(), Some(problem.dtype()));
        Unit { name, threads: None, dtype, max_intensity: 100.0 }
    }

    impl TimedBackward for TimedBackwardRun {
        fn launch(&mut self, _: &mut Gradients<'_>) -> Result<()> {
            Ok(self.launch()?)
        }

        fn seconds(&mut self, _: &mut Gradients<'_>) -> Result<f64> {
            Ok(self.seconds()?)
        }

        fn download(&mut self, gradients: &mut Gradients<'_>) -> Result<()> {
            Ok(Self::download(self, gradients)?)
        }
    }

    impl TimedRun for flashtile_metal::TimedRun {
        fn launch(&mut self, _: &mut Outputs<'_>) -> Result<()> {
            Ok(self.launch()?)
        }

        fn seconds(&mut self, _: &mut Outputs<'_>) -> Result<f64> {
            Ok(self.seconds()?)
        }

        fn download(&mut self, outputs: &mut Outputs<'_>) -> Result<()> {
            Ok(Self::download(self, outputs)?)
        }

        fn host_seconds(&mut self) -> Result<Option<f64>> {
            let seconds = host_seconds(|| Ok(self.launch()?))?;
            self.wait()?;
            Ok(Some(seconds))
        }
    }

    impl From<DeviceError> for Error {
        fn from(error: DeviceError) -> Self {
            Self::device(SessionError::device(error))
        }
    }
}
