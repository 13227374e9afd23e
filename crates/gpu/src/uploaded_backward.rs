//! A backward pass whose tensors were copied to a device, to be run again and again.

use crate::backward::upload::{BackwardResults, UploadedBackward};
use crate::engine::{Engine, MemoryOf};
use crate::error::SessionError;
use crate::session::Session;
use crate::uploaded_run::Repeated;
use flashtile_core::gradients::{self, BackwardInputs, Gradients};
use flashtile_core::problem::Problem;

/// A backward plan with copies of its tensors in a device's memory: benchmarks measure its launches.
pub struct UploadedBackwardRun<E: Engine> {
    session: Session<E>,
    problem: Problem,
    inputs: UploadedBackward<MemoryOf<E>>,
    results: BackwardResults<MemoryOf<E>>,
}

impl<E: Engine> std::fmt::Debug for UploadedBackwardRun<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UploadedBackwardRun").field("problem", self.problem.desc()).finish_non_exhaustive()
    }
}

impl<E: Engine> UploadedBackwardRun<E> {
    /// Prepares a plan, copies the inputs to the device and takes memory there for the gradients. The inputs have been read when this
    /// returns.
    ///
    /// # Errors
    /// [`SessionError::Inputs`] where the tensors do not fit the plan's problem, and the errors of the device.
    pub fn new(
        mut session: Session<E>,
        plan: E::BackwardPlan,
        inputs: &BackwardInputs<'_>,
        gradients: &Gradients<'_>,
    ) -> Result<Self, E::Error> {
        let problem = E::backward_problem(&plan).clone();
        gradients::check(&problem, inputs, gradients).map_err(SessionError::from)?;
        session.keep_backward_plan(plan)?;
        let uploaded = UploadedBackward::new(session.device(), inputs)?;
        let results = BackwardResults::new(session.device(), gradients)?;
        Ok(Self { session, problem, inputs: uploaded, results })
    }

    /// Copies the gradients of the last run to gradients of the shapes and lists of [`UploadedBackwardRun::new`], after it has ended.
    ///
    /// # Errors
    /// The errors of the device, also of earlier work that failed.
    pub fn download(&self, gradients: &mut Gradients<'_>) -> Result<(), E::Error> {
        Ok(self.results.download(self.session.device(), gradients)?)
    }
}

impl<E: Engine> Repeated for UploadedBackwardRun<E> {
    type Engine = E;

    fn launch(&mut self) -> Result<(), E::Error> {
        let Self { session, problem, inputs, results } = self;
        session.run_backward(problem.desc(), &inputs.inputs(), &mut results.gradients())
    }

    fn device(&self) -> &E::Device {
        self.session.device()
    }
}
