//! A problem whose tensors were copied to a device, to be run again and again.

use crate::engine::{Engine, MemoryOf};
use crate::error::SessionError;
use crate::session::Session;
use crate::upload::{Results, Uploaded};
use flashtile_core::block_tables::BlockTables;
use flashtile_core::inputs::{self, Inputs, Outputs};
use flashtile_core::problem::Problem;

/// A run whose tensors are in a device's memory, to be launched again and again.
pub trait Repeated {
    /// The engine that runs it.
    type Engine: Engine;

    /// Launches a run, and returns before it has ended.
    ///
    /// # Errors
    /// The errors of the session.
    fn launch(&mut self) -> Result<(), <Self::Engine as Engine>::Error>;

    /// The device of the runs.
    fn device(&self) -> &<Self::Engine as Engine>::Device;
}

/// A plan with copies of its tensors in a device's memory: benchmarks measure its launches.
pub struct UploadedRun<E: Engine> {
    session: Session<E>,
    problem: Problem,
    inputs: Uploaded<MemoryOf<E>>,
    /// Tables of one page a sequence, with which sessions may choose kernels that look up no table.
    single_pages: Option<BlockTables>,
    outputs: Results<MemoryOf<E>>,
}

impl<E: Engine> std::fmt::Debug for UploadedRun<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UploadedRun").field("problem", self.problem.desc()).finish_non_exhaustive()
    }
}

impl<E: Engine> UploadedRun<E> {
    /// Prepares a plan, copies the inputs to the device and takes memory there for the outputs. The inputs have been read when this returns.
    ///
    /// # Errors
    /// [`SessionError::Inputs`] where the tensors do not fit the plan's problem, and the errors of the
    /// device.
    pub fn new(
        mut session: Session<E>,
        plan: E::Plan,
        inputs: &Inputs<'_>,
        outputs: &Outputs<'_>,
    ) -> Result<Self, E::Error> {
        let problem = E::problem(&plan).clone();
        inputs::check(&problem, inputs, outputs).map_err(SessionError::from)?;
        session.keep_plan(plan)?;
        let mut uploaded = Uploaded::new(session.device(), inputs).map_err(SessionError::device)?;
        let single_pages = inputs.tables.filter(|tables| tables.width == 1 && !tables.wraps).cloned();
        if let Some(tables) = inputs.tables.filter(|_| single_pages.is_none()) {
            uploaded.upload_tables(session.device(), tables).map_err(SessionError::device)?;
        }
        if let Some(kept) = &inputs.kept {
            uploaded.upload_kept_tables(session.device(), kept).map_err(SessionError::device)?;
        }
        let results = Results::new(session.device(), outputs).map_err(SessionError::device)?;
        Ok(Self { session, problem, inputs: uploaded, single_pages, outputs: results })
    }

    /// Copies the results to outputs of the dtype, shapes and lists of [`UploadedRun::new`], after all work of the device before has ended.
    ///
    /// # Errors
    /// [`SessionError::Inputs`] where they differ, and the errors of the device, also of earlier work that
    /// failed.
    pub fn download(&self, outputs: &mut Outputs<'_>) -> Result<(), E::Error> {
        let out = (outputs.out.dtype(), outputs.out.shape());
        let lse = outputs.lse.as_ref().map(|lse| lse.len());
        inputs::check_outputs(&self.problem, out, lse).map_err(SessionError::from)?;
        Ok(self.outputs.download(self.session.device(), outputs).map_err(SessionError::device)?)
    }

    /// Runs once and copies the results.
    ///
    /// # Errors
    /// The errors of [`Repeated::launch`] and [`UploadedRun::download`].
    pub fn compute(&mut self, outputs: &mut Outputs<'_>) -> Result<(), E::Error> {
        self.launch()?;
        self.download(outputs)
    }

    /// The outputs on the device.
    #[must_use]
    pub const fn results(&self) -> &Results<MemoryOf<E>> {
        &self.outputs
    }
}

impl<E: Engine> Repeated for UploadedRun<E> {
    type Engine = E;

    fn launch(&mut self) -> Result<(), E::Error> {
        let Self { session, problem, inputs, single_pages, outputs } = self;
        let (desc, inputs, mut outputs) = (problem.desc(), inputs.inputs(), outputs.outputs());
        match single_pages {
            Some(tables) => session.run_paged(desc, &inputs, &*tables, &mut outputs),
            None => session.run(desc, &inputs, &mut outputs),
        }
    }

    fn device(&self) -> &E::Device {
        self.session.device()
    }
}
