//! Cases on a Metal device: copies of their tensors there, surrounded by memory that must not be touched.

#![allow(unsafe_code)]

use super::padding::{held, padding};
use super::run::{RunReport, Runner, RunnerError, accumulation_of_portable};
use flashtile_core::inputs;
use flashtile_core::inputs::{Inputs, Outputs};
use flashtile_core::plan::PlanOptions;
use flashtile_core::problem::Problem;
use flashtile_gpu::tensors::GpuOutputs;
use flashtile_gpu::upload::{Results, Uploaded};
use flashtile_kernel::{Device, HostAccess, Launch, Limits, ScalarType};
use flashtile_metal::objc2::rc::autoreleasepool;
use flashtile_metal::objc2_metal::{MTLCommandBuffer, MTLCommandEncoder, MTLCommandQueue};
use flashtile_metal::{
    DeviceError, DispatchType, Gpu, Memory, Metal, MetalError, MetalPlan, Session, SessionError,
};
use std::sync::{Mutex, PoisonError};

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
    /// Whether tensors start at multiples of 256 bytes instead, which kernels read in vectors.
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

/// Bytes before and after a tensor.
const BAND: usize = 256;

/// A device whose memory lies between bands that nothing may touch.
struct Banded {
    gpu: Gpu,
    aligned: bool,
    bands: Mutex<Vec<Band>>,
}

/// A tensor's bytes in a buffer, and what surrounds them.
struct Band {
    buffer: Memory,
    start: usize,
    end: usize,
}

/// What bands hold: NaN in every dtype.
const FILL: u8 = 0xFF;

impl Banded {
    /// The first byte outside of tensors that is not what it was.
    fn touched(&self) -> Result<Option<usize>, DeviceError> {
        for band in self.bands.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let mut bytes = vec![0u8; band.buffer.len()];
            self.gpu.read(&band.buffer, 0, &mut bytes)?;
            let outside = |at: &usize| *at < band.start || *at >= band.end;
            if let Some(at) = (0..bytes.len()).filter(outside).find(|&at| bytes[at] != FILL) {
                return Ok(Some(at));
            }
        }
        Ok(None)
    }
}

impl Device for Banded {
    type Memory = Memory;
    type Error = DeviceError;

    fn limits(&self) -> Limits {
        self.gpu.limits()
    }

    fn launch(&self, launch: Launch<'_, Memory>) -> Result<(), DeviceError> {
        self.gpu.launch(launch)
    }
}

impl HostAccess for Banded {
    fn zeroed(&self, element: ScalarType, len: usize) -> Result<Memory, DeviceError> {
        let mut memory = self.uninit(element, len)?;
        self.write(&mut memory, 0, &vec![0; len * element.bytes()])?;
        Ok(memory)
    }

    /// Elements of NaN.
    fn uninit(&self, element: ScalarType, len: usize) -> Result<Memory, DeviceError> {
        let (size, bytes) = (element.bytes(), len * element.bytes());
        // Bytes are of elements or scales of up to four.
        let start = match (self.aligned, size) {
            (true, _) => BAND,
            (false, 1) => BAND + 4,
            (false, size) => BAND + size,
        };
        let buffer = self.gpu.buffer_from(&vec![FILL; start + bytes + BAND])?;
        // SAFETY: nothing but runs, which follow each other, accesses the elements.
        let memory = unsafe { self.gpu.borrow(buffer.buffer().clone(), start, element, len) }?;
        let band = Band { buffer, start, end: start + bytes };
        self.bands.lock().unwrap_or_else(PoisonError::into_inner).push(band);
        Ok(memory)
    }

    fn write(&self, memory: &mut Memory, at: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        self.gpu.write(memory, at, bytes)
    }

    fn read(&self, memory: &Memory, at: usize, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.gpu.read(memory, at, bytes)
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
        let gpu = self.metal.gpu();
        let device = Banded { gpu: gpu.clone(), aligned: self.aligned, bands: Mutex::default() };
        let page_align = if self.aligned { BAND } else { 1 };
        let mut uploaded = Uploaded::with_page_align(&device, inputs, page_align).map_err(of_device)?;
        let mut results = Results::new(&device, outputs).map_err(of_device)?;
        let (strides, held) =
            ([uploaded.inputs().k.strides, uploaded.inputs().v.strides], held(problem, inputs));
        for ((memory, strides), view) in
            uploaded.kv_mut().into_iter().zip(strides).zip([&inputs.k, &inputs.v])
        {
            let mut bytes = vec![0u8; memory.len()];
            device.read(memory, 0, &mut bytes).map_err(of_device)?;
            padding(view, strides, &held).into_iter().for_each(|unused| bytes[unused].fill(FILL));
            device.write(memory, 0, &bytes).map_err(of_device)?;
        }
        let mut session = self.metal.session_with(self.options);
        let launched = self.launch(&mut session, |session| {
            let (mut inputs_there, mut outputs) = (uploaded.inputs(), results.outputs());
            // Addresses are as odd as the bands are.
            for kv in [&mut inputs_there.k, &mut inputs_there.v] {
                kv.aligned = kv.aligned.min(1 << (kv.bytes.memory().offset() | 16).trailing_zeros());
            }
            let outputs: &mut GpuOutputs<'_, Memory> = &mut outputs;
            match inputs.tables {
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
