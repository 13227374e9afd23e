//! Attention by the portable kernels on their simulator.

mod natives;

use super::machine::{Machine, Values, blank};
use super::run::{RunReport, Runner, RunnerError};
use super::staging::{ALIGNED, Layout, StagedInputs, accumulation};
use flashtile_core::codec::KvView;
use flashtile_core::dtype::Dtype;
use flashtile_core::inputs::{Inputs, Outputs};
use flashtile_core::problem::Problem;
use flashtile_core::problem::Sequence;
use flashtile_gpu::tile::{PortableTile, Tiling};
use flashtile_kernel::simulator::{Memory, Simulator};
use flashtile_kernel::{Device, Instance, bf16, f16};
pub(crate) use natives::find;
use natives::{CODECS, DIMS};
use std::collections::HashSet;
use std::ops::Range;

/// Runs problems on the simulator, with uninitialised scratch memory, and padding of keys and values that faults when
/// read.
///
/// The simulator runs native code, which exists for dimensions 64 and 128, elements of q's dtype and a few codecs;
/// other problems are unsupported.
#[derive(Debug, Clone, Copy)]
pub struct SimulatorRunner {
    pub(crate) tiling: Tiling,
    /// The largest alignment of rows that is declared.
    pub(crate) aligned: usize,
    /// Whether pages of codes start at multiples of [`ALIGNED`] bytes, whatever their size.
    pub(crate) padded: bool,
    /// Finds the instance with native code.
    pub(crate) find: fn(&Instance) -> Option<Instance>,
    max_scores: u64,
}

impl Default for SimulatorRunner {
    fn default() -> Self {
        Self::new()
    }
}

pub(crate) use crate::gpu_bench::PREFILL_TILE;

impl SimulatorRunner {
    /// By the kernel of prefill, for problems that it takes.
    #[must_use]
    pub fn prefill() -> Self {
        Self { tiling: PREFILL_TILE.into(), ..Self::new() }
    }

    /// With two SIMD groups per threadgroup and two splits, so that both merges take place.
    #[must_use]
    pub fn new() -> Self {
        let tiling = PortableTile::new(8, 16, 2, 1).with_splits(2);
        Self { tiling, aligned: ALIGNED, padded: true, find, max_scores: u64::MAX }
    }

    /// With a tile and native code from the caller; rows and pages are aligned as they happen to be.
    #[doc(hidden)]
    #[must_use]
    pub fn with_tile(tile: impl Into<Tiling>, find: fn(&Instance) -> Option<Instance>) -> Self {
        Self { tiling: tile.into(), aligned: ALIGNED, padded: false, find, max_scores: u64::MAX }
    }

    /// Like [`SimulatorRunner::with_tile`], with pages of codes that start at multiples of 16 bytes, whatever their size.
    #[doc(hidden)]
    #[must_use]
    pub const fn padded(mut self) -> Self {
        self.padded = true;
        self
    }

    /// Refuses problems with more scores than this: the simulator computes ten to a hundred thousand per second.
    #[must_use]
    pub const fn at_most(mut self, scores: u64) -> Self {
        self.max_scores = scores;
        self
    }
}

/// Why a problem has no native code.
fn no_native(problem: &Problem) -> String {
    let dims = problem.dims();
    let codecs = CODECS.map(|[k, v]| if k == v { k.to_string() } else { format!("{k}+{v}") });
    format!(
        "the simulator has no native code: q {}, keys {} of {} and values {} of {}, expected elements of the dtype of q or {}, of {}",
        problem.dtype(),
        problem.k_codec(),
        dims.head_dim,
        problem.v_codec(),
        dims.value_dim,
        codecs.join(", "),
        DIMS.map(|dim| dim.to_string()).join(" or "),
    )
}

/// Batch entries or pages, and their rows, that hold a token.
fn held(problem: &Problem, inputs: &Inputs<'_>) -> HashSet<(usize, usize)> {
    let place = |index: usize, s: &Sequence, position: usize| match inputs.tables {
        Some(tables) => tables.locate(index, position),
        None => Some((s.batch, s.kv_start + position)),
    };
    let sequences = problem.sequences().iter().enumerate();
    sequences.flat_map(|(index, s)| (0..s.kv_len).filter_map(move |at| place(index, s, at))).collect()
}

/// The byte ranges of keys or values, with these strides, that belong to no token.
fn padding(view: &KvView<'_>, strides: [usize; 3], held: &HashSet<(usize, usize)>) -> Vec<Range<usize>> {
    let [entries, heads, rows, _] = view.shape();
    let mut bytes = Vec::new();
    for (entry, head) in (0..entries).flat_map(|entry| (0..heads).map(move |head| (entry, head))) {
        let start = entry * strides[0] + head * strides[1];
        let unused = (0..rows).filter(|row| !held.contains(&(entry, *row)));
        match view {
            KvView::Elements(_) => bytes.extend(unused.map(|row| {
                let at = start + row * strides[2];
                at..at + strides[2]
            })),
            KvView::Codes(codes) => {
                for place in unused.flat_map(|row| codes.coder().format().places(rows, row..row + 1)) {
                    bytes.push(start + place.start..start + place.end);
                }
                bytes.push(start + codes.page(entry, head).len()..start + strides[1]);
            }
        }
    }
    bytes
}

/// Copies results from partial_out, row_max and row_sum, out and lse.
fn write(
    outputs: &mut Outputs<'_>,
    problem: &Problem,
    [_, _, out, lse]: &[Memory; 4],
) -> Result<(), RunnerError> {
    let dims = problem.dims();
    let read = |memory| Simulator::read(memory).map_err(RunnerError::Error);
    let out = read(out)?;
    for (n, row) in out.chunks_exact(dims.value_dim).enumerate() {
        let place = [n / dims.q_len / dims.q_heads, n / dims.q_len % dims.q_heads, n % dims.q_len];
        let bytes: Vec<u8> = match problem.dtype() {
            Dtype::F32 => row.iter().flat_map(|&x| (x as f32).to_le_bytes()).collect(),
            Dtype::F16 => row.iter().flat_map(|&x| f16::from_f64(x).to_le_bytes()).collect(),
            Dtype::BF16 => row.iter().flat_map(|&x| bf16::from_f64(x).to_le_bytes()).collect(),
        };
        outputs.out.row_bytes_mut(place).copy_from_slice(&bytes);
    }
    if let Some(to) = &mut outputs.lse {
        for (to, from) in to.iter_mut().zip(read(lse)?) {
            *to = from as f32;
        }
    }
    Ok(())
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
        self.run_on(&Simulator::new(), problem, inputs, outputs)
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
        let layout = Layout { tiling: self.tiling, aligned: self.aligned, padded: self.padded };
        let refused = |why| RunnerError::Unsupported(format!("no kernel takes the problem: {why}"));
        let staged = StagedInputs::new(problem, inputs, layout).map_err(refused)?;
        let entry = staged.launches.entry();
        let native = staged.launches.with_native(self.find);
        let launches = native.ok_or_else(|| RunnerError::Unsupported(no_native(problem)))?;
        let mut read = staged.inputs.each_ref().map(Values::simulated);
        let held = held(problem, inputs);
        for (n, view) in [&inputs.k, &inputs.v].into_iter().enumerate() {
            for bytes in padding(view, staged.strides[n], &held) {
                read[1 + n].poison(bytes);
            }
        }
        let mut written = staged.outputs.map(|(element, len)| blank(element, len));
        StagedInputs::launch(&launches, &staged.placed, device, &read, &mut written)
            .map_err(|e| RunnerError::Error(e.to_string()))?;
        write(outputs, problem, &written)?;
        Ok(RunReport::new(entry).accumulated(accumulation(problem)))
    }
}
