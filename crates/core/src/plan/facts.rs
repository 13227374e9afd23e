//! The planner and the plans of one kind of device, as each backend defines them.

use super::backward::AnyBackwardPlan;
use super::explanation::Explanation;
use super::options::{KernelChoice, PlanOptions};
use super::unsupported::Unsupported;
use crate::problem::{Problem, Sequence};
use crate::quality::Accumulation;
use std::any::Any;
use std::fmt;

/// Rows and keys of a tile: the unit that is skipped, computed whole or masked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)]
pub struct TileSize {
    /// Packed query rows: pairs of a position and a query head of the GQA group.
    pub rows: usize,
    /// Keys.
    pub keys: usize,
}

/// Kernels, tiles, splits and memory sizes that compute one problem on one kind of device.
/// [`Display`](fmt::Display) is one line: kernel, tiles, units of work, splits and workspace.
pub trait Plan: Any + fmt::Debug + fmt::Display + Send + Sync {
    /// The problem that the plan computes.
    fn problem(&self) -> &Problem;

    /// The options that it was made with.
    fn options(&self) -> PlanOptions;

    /// Name of the kernel, or names joined by `+`.
    fn kernel(&self) -> String;

    /// Bytes of memory that a run needs beside its tensors: host memory on the CPU, device memory on a device.
    fn workspace_bytes(&self) -> usize {
        0
    }

    /// The most splits into which the keys of a row are cut for parallel work.
    fn splits(&self) -> usize {
        1
    }

    /// Units of work: tasks of the CPU, work tiles or threadgroups of a device.
    fn task_count(&self) -> usize {
        1
    }

    /// The tile by which a sequence of the problem is computed.
    fn tile(&self, sequence: &Sequence) -> TileSize;

    /// The precision of the kernels, which decides how far their answers may be from the oracle's.
    fn accumulation(&self) -> Accumulation;

    /// Bytes of keys and values that a run has to read: each visible key once, and each key of a shared prefix that is computed
    /// once for all of its sequences.
    fn kv_bytes(&self) -> f64 {
        self.problem().kv_bytes()
    }

    /// The kind of the kernels, on devices that have native and portable ones.
    fn kernel_choice(&self) -> Option<KernelChoice> {
        None
    }
}

/// Facts about a device that its planner needs. They are data, so that problems can be planned for absent devices.
pub trait Facts: fmt::Debug + Clone + PartialEq + Send + Sync + 'static {
    /// Plans for such devices.
    type Plan: Plan + PartialEq;

    /// Name of the backend, with which the names of its kernels begin.
    const BACKEND: &'static str;

    /// Plans a problem. Pure.
    ///
    /// # Errors
    /// [`Unsupported`] where the device has no kernels for the problem.
    fn plan(&self, problem: &Problem, options: PlanOptions) -> Result<Self::Plan, Unsupported>;

    /// Plans the backward pass of a problem. Pure. Devices without backward kernels keep this refusal.
    ///
    /// # Errors
    /// [`Unsupported`] where the device has no backward kernels, or none for the problem.
    fn plan_backward(&self, problem: &Problem, options: PlanOptions) -> Result<AnyBackwardPlan, Unsupported> {
        let _ = (problem, options);
        Err(Unsupported::Backward { why: "the backend has no backward kernels" })
    }

    /// The rates that the device reaches with a plan, to compare devices.
    fn rates(&self, plan: &Self::Plan) -> Rates;

    /// The device and the plan in words, with reasons.
    fn explain(&self, plan: &Self::Plan) -> Explanation;
}

/// Rates that a device reaches for a problem. They estimate its time before anything runs, and are not limits.
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(clippy::exhaustive_structs)]
pub struct Rates {
    /// Seconds of launches, of the calls that copy tensors there and back, and of waiting for the result.
    pub start: f64,
    /// Bytes per second between tensors of the host and memory of the device; infinite on the CPU.
    pub copy: f64,
    /// Floating-point operations per second.
    pub flops: f64,
    /// Bytes per second that kernels read.
    pub bandwidth: f64,
}

impl Rates {
    /// Estimated seconds of a problem whose tensors are in host memory: start and copies, and the longer of arithmetic and reading.
    /// Cost: `O(query rows)`.
    #[must_use]
    pub fn seconds(&self, problem: &Problem) -> f64 {
        self.overhead(problem) + (problem.flops() / self.flops).max(problem.kv_bytes() / self.bandwidth)
    }

    /// Estimated seconds of start and copies.
    #[must_use]
    pub fn overhead(&self, problem: &Problem) -> f64 {
        self.start + copied_bytes(problem) / self.copy
    }
}

/// Bytes of tensors of the host that are copied to a device and back. A cache is there already: only new rows are copied.
fn copied_bytes(problem: &Problem) -> f64 {
    let dims = problem.dims();
    let elements = |shape: [usize; 4]| shape.iter().map(|&n| n as f64).product::<f64>();
    let rows = if problem.is_cached() {
        problem.sequences().iter().map(|s| s.q_len as f64).sum()
    } else {
        dims.batch as f64 * dims.kv_len as f64
    };
    let queries = (elements(dims.q_shape()) + elements(dims.out_shape())) * problem.dtype().bytes() as f64;
    queries + rows * dims.kv_heads as f64 * problem.kv_row_bytes() as f64
}
