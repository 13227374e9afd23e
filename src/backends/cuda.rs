//! CUDA devices.

use super::gpu::{GpuAttention, host_seconds};
use super::own_plan::{backward_plan_of, first, plan_of};
use crate::backend::{Backend, HostSession, Limit, Rate, TimedBackward, TimedRun, Unit};
use crate::error::{Error, Result};
use crate::presence::{Candidate, Presence};
use crate::step::{CurrentRunner, StepLayer, StepRunner};
use flashtile_core::dtype::Dtype;
use flashtile_core::gradients::{BackwardInputs, Gradients};
use flashtile_core::inputs::{Inputs, Outputs};
use flashtile_core::plan::{AnyBackwardPlan, AnyFacts, AnyPlan, PlanOptions};
use flashtile_core::problem::Problem;
use flashtile_cuda::limits::{self, ProductUnit};
use flashtile_cuda::plan::{CudaBackwardPlan, CudaPlan, machines};
use flashtile_cuda::{
    Cuda, CudaError, CudaStore, Gpu, GpuOutputs, GpuTensor, Memory, TimedBackwardRun, with_session,
};
use std::sync::Arc;

pub(crate) fn count() -> Result<usize> {
    match Cuda::count()? {
        // Opening the first device says so.
        0 => Ok(1),
        count => Ok(count),
    }
}

pub(crate) fn open(device: usize) -> Result<Arc<dyn Backend>> {
    Ok(Arc::new(shared(device)?))
}

/// The device of a number, which all callers of the process share with its kernels.
fn shared(device: usize) -> std::result::Result<Cuda, CudaError> {
    Cuda::shared(&Gpu::primary_context(device).map_err(CudaError::Device)?)
}

/// The first device, if it starts and kernels can be compiled for it.
pub(crate) fn candidate() -> Option<Candidate> {
    if cfg!(target_vendor = "apple") {
        return None;
    }
    let cuda = match shared(0) {
        Ok(cuda) => cuda,
        Err(CudaError::Unsupported(why)) => {
            return Some(Err(Presence::Absent { why: format!("CUDA device 0 cannot be used: {why}") }));
        }
        Err(other) => return Some(Err(Presence::Absent { why: other.to_string() })),
    };
    Some(match cuda.compiler() {
        Ok(_) => Ok(Arc::new(cuda)),
        Err(why) => Err(Presence::Absent { why: format!("{} cannot be used: {why}", cuda.name()) }),
    })
}

pub(crate) fn known() -> Vec<(&'static str, AnyFacts)> {
    machines::ALL_CUDA.iter().map(|(name, facts)| (*name, AnyFacts::new(*facts))).collect()
}

impl Backend for Cuda {
    fn name(&self) -> String {
        match self.context().ordinal() {
            0 => "cuda".to_owned(),
            device => format!("cuda:{device}"),
        }
    }

    fn device(&self) -> String {
        self.name().to_owned()
    }

    fn describe(&self) -> String {
        let (major, minor) = self.facts().capability;
        let kept = match self.cache_folder() {
            Some(folder) => format!("kernels are kept in {}", folder.display()),
            None => "kernels are not kept".to_owned(),
        };
        let compiler = match self.compiler() {
            Ok(((major, minor), place)) => format!("NVRTC {major}.{minor} ({place}); {kept}"),
            Err(why) => why.to_string(),
        };
        let (name, multiprocessors) = (self.name(), self.facts().multiprocessors);
        format!("{name}, compute capability {major}.{minor}, {multiprocessors} multiprocessors; {compiler}")
    }

    fn facts(&self) -> AnyFacts {
        AnyFacts::new(*self.facts())
    }

    fn prepare(&self, plan: &AnyPlan) -> Result<()> {
        let stream = self.context().new_stream().map_err(CudaError::driver("a stream"))?;
        self.prepare(plan_of(plan)?, &stream)?;
        Ok(())
    }

    fn session(&self, options: PlanOptions) -> Result<Box<dyn HostSession>> {
        let stream = self.context().new_stream().map_err(CudaError::driver("a stream"))?;
        Ok(Box::new(self.session_with(&stream, options)))
    }

    fn timed<'t>(
        &'t self,
        plan: &'t AnyPlan,
        inputs: &[Inputs<'t>],
        outputs: &Outputs<'_>,
    ) -> Result<Box<dyn TimedRun + 't>> {
        let inputs = first(inputs)?;
        Ok(Box::new(flashtile_cuda::TimedRun::new(self, plan_of(plan)?, inputs, outputs)?))
    }

    fn timed_backward<'t>(
        &'t self,
        plan: &'t AnyBackwardPlan,
        inputs: &BackwardInputs<'t>,
        gradients: &Gradients<'_>,
    ) -> Result<Box<dyn TimedBackward + 't>> {
        let plan: &CudaBackwardPlan = backward_plan_of(plan)?;
        Ok(Box::new(TimedBackwardRun::backward(self, plan, inputs, gradients)?))
    }

    fn unit(&self, plan: &AnyPlan) -> Option<Unit> {
        plan.of::<CudaPlan>()?;
        Some(unit(self, plan.problem()))
    }

    fn backward_unit(&self, plan: &AnyBackwardPlan) -> Option<Unit> {
        plan.of::<CudaBackwardPlan>()?;
        Some(unit(self, plan.problem()))
    }

    fn limit(&self, rate: Rate, unit: &Unit) -> Result<Limit> {
        let dtype = unit.dtype.unwrap_or(Dtype::F32);
        Ok(match rate {
            Rate::Arithmetic => {
                let peak = limits::matrix_peak(self, dtype)?;
                let by = match peak.unit {
                    ProductUnit::Wgmma => "wgmma",
                    ProductUnit::MmaSync => "mma.sync",
                    _ => "FMA",
                };
                Limit { per_second: peak.rate, by }
            }
            Rate::Bandwidth => Limit { per_second: limits::read_bandwidth(self)?, by: "read" },
        })
    }
}

/// The device as the unit of a problem's products.
fn unit(cuda: &Cuda, problem: &Problem) -> Unit {
    let (name, dtype) = (cuda.name().to_owned(), Some(problem.dtype()));
    Unit { name, threads: None, dtype, max_intensity: 1000.0 }
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

impl TimedRun for flashtile_cuda::TimedRun {
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

impl From<CudaError> for Error {
    fn from(error: CudaError) -> Self {
        match error {
            CudaError::Problem(error) => Self::Problem(error),
            CudaError::Unsupported(error) => Self::Unsupported(error),
            CudaError::Inputs(error) => Self::Run(error),
            CudaError::View(error) => error.into(),
            CudaError::KvCache(error) => Self::Cache(error),
            error => Self::device(error),
        }
    }
}

impl StepRunner<CudaStore> for CurrentRunner {
    fn attend(
        &mut self,
        layer: StepLayer<'_, CudaStore>,
        q: GpuTensor<'_, Memory>,
        options: &GpuAttention<'_, Memory>,
        outputs: &mut GpuOutputs<'_, Memory>,
    ) -> Result<()> {
        let stream = layer.cache.store().device().stream().clone();
        with_session(&stream, |session| session.attend(layer, q, options, outputs))?
    }
}
