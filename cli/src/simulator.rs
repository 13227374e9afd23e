//! The simulator of the kernel language, and native code of the kernels: in builds with the feature `simulator`.

use crate::failure::{Failure, Result};
use flashtile::{Inputs, Outputs, Problem};
#[cfg(feature = "check")]
use flashtile_testkit::Runner;

/// Refuses to continue in builds without the simulator.
pub(crate) fn require() -> Result<()> {
    if cfg!(feature = "simulator") { Ok(()) } else { Err(absent()) }
}

fn absent() -> Failure {
    let what = "this build is without the simulator, \
        cargo build --release -p flashtile-cli --features simulator makes one that has it";
    Failure::at("--backend", what)
}

/// Computes a problem by the portable kernels, with every access checked. More than `max_scores` scores are refused, since the simulator is
/// slow.
#[cfg(feature = "simulator")]
pub(crate) fn compute(
    max_scores: u64,
    problem: &Problem,
    inputs: &Inputs<'_>,
    outputs: &mut Outputs<'_>,
) -> Result<()> {
    use flashtile::Unsupported;
    use flashtile::simulator::{DECODE_TILE, SessionError, no_native, session};
    let refused =
        |why: &str| Failure::new(format_args!("{why}; --backend auto, cpu or reference takes this problem"));
    let scores = problem.sequences().iter().map(|s| s.q_len as u64 * s.kv_len as u64).sum::<u64>();
    let scores = scores.saturating_mul(problem.dims().q_heads as u64);
    if scores > max_scores {
        return Err(refused(&format!("more scores than the simulator takes, {max_scores}: {scores}")));
    }
    session(DECODE_TILE).compute(problem.desc(), inputs, outputs).map_err(|why| match why {
        SessionError::Unsupported(Unsupported::Instance { why }) if why == no_native(problem) => {
            refused(&why)
        }
        SessionError::Unsupported(why) => refused(&format!("no kernel takes the problem: {why}")),
        // A fault of the kernels, not of the user.
        fault => Failure::wrong(fault),
    })
}

/// Refuses, since this build has no simulator.
#[cfg(not(feature = "simulator"))]
pub(crate) fn compute(_: u64, _: &Problem, _: &Inputs<'_>, _: &mut Outputs<'_>) -> Result<()> {
    Err(absent())
}

/// The runner of `check`, with the same bound.
#[cfg(all(feature = "check", feature = "simulator"))]
pub(crate) fn runner(max_scores: u64) -> Result<Box<dyn Runner>> {
    Ok(Box::new(flashtile_testkit::SimulatorRunner::new().at_most(max_scores)))
}

/// Refuses, since this build has no simulator.
#[cfg(all(feature = "check", not(feature = "simulator")))]
pub(crate) fn runner(_: u64) -> Result<Box<dyn Runner>> {
    Err(absent())
}
