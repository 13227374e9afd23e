//! Cases on a Metal device: copies of their tensors there, surrounded by memory that must not be touched.

#![allow(unsafe_code)]

use super::banded::Banded;
use super::run::{RunReport, Runner, RunnerError, accumulation_of_portable};
use flashtile_core::inputs;
use flashtile_core::inputs::{Inputs, Outputs};
use flashtile_core::plan::PlanOptions;
use flashtile_core::problem::Problem;
use flashtile_gpu::session::HostTables;
use flashtile_gpu::tensors::GpuOutputs;
use flashtile_gpu::upload::{Placement, Results, Uploaded};
use flashtile_metal::objc2::rc::autoreleasepool;
use flashtile_metal::objc2_metal::{MTLCommandBuffer, MTLCommandEncoder, MTLCommandQueue};
use flashtile_metal::{
    DeviceError, DispatchType, Encode, Memory, Metal, MetalError, MetalPlan, Session, SessionError,
};

/// Where the launches of a [`MetalRunner`] go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum MetalPath {
    /// Command buffers of the session.
    #[default]
    Queue,
    /// An encoder of this type in a command buffer of the caller's.
    CommandBuffer(DispatchType),
    /// An encoder of this type that the caller has made.
    Encoder(DispatchType),
}

/// The Metal backend with plan options. Tensors start at odd elements, between bands of NaN.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct MetalRunner {
    /// The device.
    pub metal: Metal,
    /// Options of every plan.
    pub options: PlanOptions,
    /// Where launches go.
    pub path: MetalPath,
    /// True if tensors start at multiples of 256 bytes instead, so that kernels read them in vectors.
    pub aligned: bool,
}

impl MetalRunner {
    /// A runner with default options, and aligned tensors.
    #[must_use]
    pub fn new(metal: Metal) -> Self {
        Self { metal, options: PlanOptions::default(), path: MetalPath::default(), aligned: true }
    }

    /// With other plan options.
    #[must_use]
    pub fn with(mut self, options: PlanOptions) -> Self {
        self.options = options;
        self
    }

    /// With launches that go elsewhere.
    #[must_use]
    pub fn by(mut self, path: MetalPath) -> Self {
        self.path = path;
        self
    }

    /// With tensors at odd elements.
    #[must_use]
    pub fn odd(mut self) -> Self {
        self.aligned = false;
        self
    }
}

impl Runner for MetalRunner {
    fn name(&self) -> String {
        let path = match self.path {
            MetalPath::Queue => "queue".to_owned(),
            MetalPath::CommandBuffer(dispatch) => format!("command buffer, {dispatch:?}"),
            MetalPath::Encoder(dispatch) => format!("encoder, {dispatch:?}"),
        };
        format!("{} {path}{}", self.metal.name(), if self.aligned { "" } else { ", odd" })
    }

    fn run(
        &self,
        problem: &Problem,
        inputs: &Inputs<'_>,
        outputs: &mut Outputs<'_>,
    ) -> Result<RunReport, RunnerError> {
        let error = |why: String| RunnerError::Error(why);
        let of_device = |why: DeviceError| error(why.to_string());
        inputs::check(problem, inputs, outputs).map_err(|why| error(why.to_string()))?;
        let plan = MetalPlan::new(problem, self.metal.facts(), self.options);
        let plan = plan.map_err(|why| RunnerError::Unsupported(why.to_string()))?;
        let device = Banded::new(self.metal.gpu().clone(), inputs, !self.aligned, false);
        let page_align = if self.aligned { 256 } else { 1 };
        let placement = Placement { page_align, ..Placement::default() };
        let mut uploaded = Uploaded::placed(&device, inputs, placement).map_err(of_device)?;
        let mut results = Results::new(&device, outputs).map_err(of_device)?;
        device.poison_padding(problem, inputs, &mut uploaded).map_err(of_device)?;
        let mut session = self.metal.session_with(self.options);
        let launched = self.launch(&mut session, |session| {
            let (inputs_there, mut outputs) = (uploaded.inputs(), results.outputs());
            let outputs: &mut GpuOutputs<'_, Memory> = &mut outputs;
            match HostTables::of(inputs) {
                Some(tables) => session.run_paged(problem.desc(), &inputs_there, tables, outputs),
                None => session.run(problem.desc(), &inputs_there, outputs),
            }
        });
        launched.map_err(|why| match why {
            SessionError::Unsupported(why) => RunnerError::Unsupported(why.to_string()),
            other => error(other.to_string()),
        })?;
        results.download(&device, outputs).map_err(of_device)?;
        if let Some(at) = device.touched().map_err(of_device)? {
            return Err(error(format!("memory outside of tensors was written, at byte {at} of its buffer")));
        }
        Ok(RunReport::new(plan.to_string()).accumulated(accumulation_of_portable(problem)))
    }
}

impl MetalRunner {
    /// Calls `work` with a session whose launches go where this runner's do, and waits for them.
    fn launch(
        &self,
        session: &mut Session,
        work: impl FnOnce(&mut Session) -> Result<(), MetalError>,
    ) -> Result<(), MetalError> {
        let dispatch = match self.path {
            MetalPath::Queue => return work(session),
            MetalPath::CommandBuffer(dispatch) | MetalPath::Encoder(dispatch) => dispatch,
        };
        autoreleasepool(|_| self.launch_in_buffer(session, dispatch, work))
    }

    fn launch_in_buffer(
        &self,
        session: &mut Session,
        dispatch: DispatchType,
        work: impl FnOnce(&mut Session) -> Result<(), MetalError>,
    ) -> Result<(), MetalError> {
        let device = |error| SessionError::Launch(flashtile_kernel::LaunchError::Device(error));
        let missing = || device(DeviceError::NoObject { what: "command buffer" });
        // Tensors were written on the queue.
        self.metal.gpu().synchronize().map_err(device)?;
        let commands =
            self.metal.gpu().queue().and_then(|queue| queue.commandBuffer()).ok_or_else(missing)?;
        if self.path == MetalPath::CommandBuffer(dispatch) {
            session.encode(&commands, dispatch, work)?;
        } else {
            let encoder = commands.computeCommandEncoderWithDispatchType(dispatch.into());
            let encoder = encoder.ok_or_else(missing)?;
            // SAFETY: the encoder is ended below, nobody else has it, and command buffers retain what they use unless asked not to.
            let worked = unsafe { session.encode_in(&encoder, work) };
            encoder.endEncoding();
            worked?;
        }
        commands.commit();
        commands.waitUntilCompleted();
        match commands.error() {
            None => Ok(()),
            Some(error) => Err(device(DeviceError::execution(&error))),
        }
    }
}
