//! Runs on a device that are timed.

use crate::device::Metal;
use crate::error::MetalError;
use crate::session::Session;
use flashtile_core::block_tables::BlockTables;
use flashtile_core::inputs::{self, Inputs, Outputs};
use flashtile_core::plan::PlanOptions;
use flashtile_core::problem::{Problem, ProblemDesc};
use flashtile_gpu::SessionError;
use flashtile_gpu::upload::{Results, Uploaded};
use flashtile_kernel::metal::{Error, Gpu, Memory};

/// A problem with copies of its tensors in a device's memory, to be measured.
#[derive(Debug)]
pub struct TimedRun {
    gpu: Gpu,
    launches: Launches,
}

/// What is launched.
#[derive(Debug)]
struct Launches {
    session: Session,
    desc: ProblemDesc,
    uploaded: Uploaded<Memory>,
    tables: Option<BlockTables>,
    results: Results<Memory>,
}

impl Launches {
    fn launch(&mut self) -> Result<(), MetalError> {
        let Self { session, desc, uploaded, tables, results } = self;
        match tables {
            Some(tables) => session.run_paged(desc, &uploaded.inputs(), tables, &mut results.outputs()),
            None => session.run(desc, &uploaded.inputs(), &mut results.outputs()),
        }
    }
}

impl TimedRun {
    /// Copies the inputs to the device, takes memory there for the outputs, and compiles the kernels.
    ///
    /// # Errors
    /// [`MetalError`].
    pub fn new(
        metal: &Metal,
        problem: &Problem,
        options: PlanOptions,
        inputs: &Inputs<'_>,
        outputs: &Outputs<'_>,
    ) -> Result<Self, MetalError> {
        inputs::check(problem, inputs, outputs)?;
        let mut session = metal.session_with(options);
        session.plan(problem.desc())?;
        let launches = Launches {
            session,
            desc: problem.desc().clone(),
            uploaded: Uploaded::new(metal.gpu(), inputs).map_err(failed)?,
            tables: inputs.tables.cloned(),
            results: Results::new(metal.gpu(), outputs).map_err(failed)?,
        };
        Ok(Self { gpu: metal.gpu().clone(), launches })
    }

    /// Runs once and copies the results to outputs of the shapes that [`TimedRun::new`] was given.
    ///
    /// # Errors
    /// [`MetalError`] of the run.
    pub fn compute(&mut self, outputs: &mut Outputs<'_>) -> Result<(), MetalError> {
        self.launch()?;
        self.launches.results.download(&self.gpu, outputs).map_err(failed)
    }

    /// Launches a run.
    ///
    /// # Errors
    /// [`MetalError`] of the launch.
    pub fn launch(&mut self) -> Result<(), MetalError> {
        self.launches.launch()
    }

    /// Waits for everything that was launched.
    ///
    /// # Errors
    /// [`Error::Execution`] where a run failed.
    pub fn wait(&self) -> Result<(), MetalError> {
        self.gpu.synchronize().map_err(failed)
    }

    /// Seconds of a run on the GPU. Caches hold what they held after the run before.
    ///
    /// # Errors
    /// [`MetalError`] of the launch and the run.
    pub fn seconds(&mut self) -> Result<f64, MetalError> {
        let launches = &mut self.launches;
        let timed = self.gpu.time(1, || launches.launch().map_err(Timed));
        timed.map(|timing| timing.least()).map_err(|Timed(error)| error)
    }
}

fn failed(error: Error) -> MetalError {
    SessionError::device(error)
}

/// An error of a run that is timed, or of the timing.
struct Timed(MetalError);

impl From<Error> for Timed {
    fn from(error: Error) -> Self {
        Self(failed(error))
    }
}
