//! Attention by the portable kernels on their simulator.

use super::padding::{held, padding};
use super::run::{RunReport, Runner, RunnerError, accumulation_of_portable};
use flashtile_core::inputs::{Inputs, Outputs};
use flashtile_core::plan::Unsupported;
use flashtile_core::problem::Problem;
use flashtile_gpu::SessionError;
use flashtile_gpu::engine::PortableEngine;
use flashtile_gpu::session::{HostTables, Session};
use flashtile_gpu::simulator::{DECODE_TILE, PREFILL_TILE, find, no_native};
use flashtile_gpu::tile::Tiling;
use flashtile_gpu::upload::{Placement, Results, Uploaded};
use flashtile_kernel::simulator::{Fault, Memory, Simulator};
use flashtile_kernel::{Device, HostAccess, Instance, Launch, Limits, ScalarType, bf16, f16};

/// Runs problems on the simulator, with uninitialised scratch memory, and padding of keys and values that faults when
/// read.
///
/// The simulator runs native code, which exists for dimensions 64 and 128, elements of q's dtype and a few codecs;
/// other problems are unsupported.
#[derive(Debug, Clone, Copy)]
pub struct SimulatorRunner {
    tiling: Tiling,
    /// Pages of codes start at multiples of this many bytes.
    page_align: usize,
    /// Finds the instance with native code.
    find: fn(&Instance) -> Option<Instance>,
    max_scores: u64,
    limits: Limits,
}

/// The alignment of pages that are read in vectors, in bytes.
const ALIGNED: usize = 16;

impl Default for SimulatorRunner {
    fn default() -> Self {
        Self::new()
    }
}

impl SimulatorRunner {
    /// By the kernel of prefill, for problems that it takes.
    #[must_use]
    pub fn prefill() -> Self {
        Self { tiling: PREFILL_TILE.into(), ..Self::new() }
    }

    /// With two SIMD groups per threadgroup and two splits, so that both merges take place.
    #[must_use]
    pub fn new() -> Self {
        Self {
            tiling: DECODE_TILE,
            page_align: ALIGNED,
            find,
            max_scores: u64::MAX,
            limits: Limits::default(),
        }
    }

    /// With a tile and native code from the caller; rows and pages are aligned as they happen to be.
    #[doc(hidden)]
    #[must_use]
    pub fn with_tile(tile: impl Into<Tiling>, find: fn(&Instance) -> Option<Instance>) -> Self {
        Self { tiling: tile.into(), page_align: 1, find, max_scores: u64::MAX, limits: Limits::default() }
    }

    /// Like [`SimulatorRunner::with_tile`], with pages of codes that start at multiples of 16 bytes, whatever their size.
    #[doc(hidden)]
    #[must_use]
    pub const fn padded(mut self) -> Self {
        self.page_align = ALIGNED;
        self
    }

    /// On a device whose threadgroups have `bytes` of shared memory, instead of the least that kernels are made for.
    #[doc(hidden)]
    #[must_use]
    pub const fn with_shared_bytes(mut self, bytes: usize) -> Self {
        self.limits.shared_bytes = bytes;
        self
    }

    /// Refuses problems with more scores than this: the simulator computes ten to a hundred thousand per second.
    #[must_use]
    pub const fn at_most(mut self, scores: u64) -> Self {
        self.max_scores = scores;
        self
    }
}

/// A device with the simulator's memory.
struct OnMemory<'a, D>(&'a D);

impl<D: Device<Memory = Memory>> Device for OnMemory<'_, D> {
    type Memory = Memory;
    type Error = Trouble<D::Error>;

    fn limits(&self) -> Limits {
        self.0.limits()
    }

    fn launch(&self, launch: Launch<'_, Memory>) -> Result<(), Self::Error> {
        self.0.launch(launch).map_err(Trouble::Device)
    }
}

impl<D: Device<Memory = Memory>> HostAccess for OnMemory<'_, D> {
    fn zeroed(&self, element: ScalarType, len: usize) -> Result<Memory, Self::Error> {
        Simulator::new().zeroed(element, len).map_err(Trouble::Memory)
    }

    fn uninit(&self, element: ScalarType, len: usize) -> Result<Memory, Self::Error> {
        Simulator::new().uninit(element, len).map_err(Trouble::Memory)
    }

    fn write(&self, memory: &mut Memory, at: usize, bytes: &[u8]) -> Result<(), Self::Error> {
        Simulator::new().write(memory, at, bytes).map_err(Trouble::Memory)
    }

    fn read(&self, memory: &Memory, at: usize, bytes: &mut [u8]) -> Result<(), Self::Error> {
        Simulator::new().read(memory, at, bytes).map_err(Trouble::Memory)
    }
}

/// A failed launch, or a failed access to memory, of [`OnMemory`].
#[derive(Debug)]
enum Trouble<E> {
    Device(E),
    Memory(Fault),
}

impl<E: std::fmt::Display> std::fmt::Display for Trouble<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Device(error) => error.fmt(f),
            Self::Memory(fault) => fault.fmt(f),
        }
    }
}

impl<E: std::error::Error> std::error::Error for Trouble<E> {}

/// Checks that a run has written every element.
fn check_written(memory: &Memory) -> Result<(), RunnerError> {
    let written = match memory.element() {
        ScalarType::F16 => memory.to_vec::<f16>().map(|_| ()),
        ScalarType::Bf16 => memory.to_vec::<bf16>().map(|_| ()),
        _ => memory.to_vec::<f32>().map(|_| ()),
    };
    written.map_err(|e| RunnerError::Error(e.to_string()))
}

impl Runner for SimulatorRunner {
    fn name(&self) -> String {
        let Tiling { tile, splits } = self.tiling;
        let op = if tile.is_prefill() { "prefill" } else { "decode" };
        format!("simulator {op} {}x{} simds {} splits {splits}", tile.rows(), tile.keys(), tile.simds())
    }

    fn run(
        &self,
        problem: &Problem,
        inputs: &Inputs<'_>,
        outputs: &mut Outputs<'_>,
    ) -> Result<RunReport, RunnerError> {
        self.run_on(&Simulator::new().with_limits(self.limits), problem, inputs, outputs)
    }
}

impl SimulatorRunner {
    /// Runs a problem on a device with simulator memory.
    pub fn run_on(
        &self,
        device: &impl Device<Memory = Memory>,
        problem: &Problem,
        inputs: &Inputs<'_>,
        outputs: &mut Outputs<'_>,
    ) -> Result<RunReport, RunnerError> {
        let invalid = |e: flashtile_core::inputs::RunError| RunnerError::Error(e.to_string());
        flashtile_core::inputs::check(problem, inputs, outputs).map_err(invalid)?;
        let dims = problem.dims();
        let scores = problem.sequences().iter().map(|s| s.q_len as u64 * s.kv_len as u64).sum::<u64>();
        let scores = scores.saturating_mul(dims.q_heads as u64);
        if scores > self.max_scores {
            let max = self.max_scores;
            return Err(RunnerError::Unsupported(format!(
                "more scores than the simulator takes, {max}: {scores}"
            )));
        }
        let device = OnMemory(device);
        let error = |e: Trouble<_>| RunnerError::Error(e.to_string());
        let failed = |e: SessionError<_>| match e {
            SessionError::Unsupported(Unsupported::Instance { why }) if why == no_native(problem) => {
                RunnerError::Unsupported(why)
            }
            SessionError::Unsupported(why) => {
                RunnerError::Unsupported(format!("no kernel takes the problem: {why}"))
            }
            other => RunnerError::Error(other.to_string()),
        };
        let placement = Placement { page_align: self.page_align, ..Placement::default() };
        let mut uploaded = Uploaded::placed(&device, inputs, placement).map_err(error)?;
        let mut results = Results::new(&device, outputs).map_err(error)?;
        let strides = [uploaded.inputs().k.strides, uploaded.inputs().v.strides];
        let held = held(problem, inputs);
        for ((memory, strides), view) in
            uploaded.kv_mut().into_iter().zip(strides).zip([&inputs.k, &inputs.v])
        {
            padding(view, strides, &held).into_iter().for_each(|bytes| memory.poison(bytes));
        }
        let engine = PortableEngine::with_tiling(self.tiling).with_native(self.find, no_native);
        let mut session = Session::new(OnMemory(device.0), engine);
        let entry = session.plan(problem.desc()).map_err(failed)?.launches().entry();
        let (uploaded, mut given) = (uploaded.inputs(), results.outputs());
        match HostTables::of(inputs) {
            Some(tables) => session.run_paged(problem.desc(), &uploaded, tables, &mut given),
            None => session.run(problem.desc(), &uploaded, &mut given),
        }
        .map_err(failed)?;
        let (out, lse) = results.memories();
        check_written(out)?;
        lse.map_or(Ok(()), check_written)?;
        results.download(&device, outputs).map_err(error)?;
        Ok(RunReport::new(entry).accumulated(accumulation_of_portable(problem)))
    }
}
