//! Shared by the backends of GPUs: sessions over host tensors, and errors.

use crate::backend::HostSession;
use crate::error::{Error, Result};
use flashtile_core::inputs::{Inputs, Outputs};
use flashtile_core::problem::ProblemDesc;
use flashtile_gpu::SessionError;
use flashtile_gpu::cache::StoreError;
use flashtile_gpu::engine::Engine;
use flashtile_gpu::session::Session;
use std::error::Error as StdError;
use std::fmt;
use std::time::Instant;

/// Launches whose host time is measured.
const LAUNCHES: usize = 100;

/// Seconds of the host for one launch, of many.
#[cfg_attr(
    not(any(feature = "cuda", feature = "metal")),
    allow(dead_code, reason = "the simulator runs at once")
)]
pub(super) fn host_seconds(mut launch: impl FnMut() -> Result<()>) -> Result<f64> {
    let started = Instant::now();
    (0..LAUNCHES).try_for_each(|_| launch())?;
    Ok(started.elapsed().as_secs_f64() / LAUNCHES as f64)
}

impl<E> HostSession for Session<E>
where
    E: Engine + fmt::Debug,
    E::Device: fmt::Debug,
    Session<E>: Send,
    Error: From<E::Error>,
{
    fn compute(&mut self, desc: &ProblemDesc, inputs: &Inputs<'_>, outputs: &mut Outputs<'_>) -> Result<()> {
        Ok(self.compute(desc, inputs, outputs)?)
    }
}

impl<E: StdError + Send + Sync + 'static> From<SessionError<E>> for Error {
    fn from(error: SessionError<E>) -> Self {
        match error {
            SessionError::Problem(error) => Self::Problem(error),
            SessionError::Unsupported(error) => Self::Unsupported(error),
            SessionError::Inputs(error) => Self::Run(error),
            SessionError::View(error) => error.into(),
            error => Self::device(error),
        }
    }
}

impl<E: StdError + Send + Sync + 'static> From<StoreError<E>> for Error {
    fn from(error: StoreError<E>) -> Self {
        match error.into_session() {
            Ok(error) => error.into(),
            Err(error) => Self::Cache(error),
        }
    }
}
