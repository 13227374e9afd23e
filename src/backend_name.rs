//! Names of backends, as users write them.

use crate::backend::Backend;
use crate::backends::{BACKENDS, Registered};
use crate::choice::Choice;
use crate::error::{BackendNameError, Result};
use flashtile_core::plan::PlanOptions;
use flashtile_core::problem::Problem;
use std::str::FromStr;
use std::sync::Arc;

/// A backend as a user names it: `auto`, `cpu`, `cuda`, `cuda:1`, `metal`, `reference` or `simulator`. Every build knows every name;
/// [`BackendName::open`] refuses backends that the build or the machine lacks. The default is `auto`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct BackendName {
    /// The backend and its device; `auto` without.
    named: Option<(&'static str, usize)>,
}

impl BackendName {
    /// `auto`: the fastest backend of this machine for a problem.
    pub const AUTO: Self = Self { named: None };

    /// Every backend of this machine and build, or why it cannot be opened, each numbered device by its own name.
    #[must_use]
    pub fn all() -> Vec<(Self, Result<Arc<dyn Backend>>)> {
        let devices = |of: &'static Registered| {
            let name = move |device| Self { named: Some((of.name, device)) };
            match (of.count)() {
                Ok(count) => (0..count).map(|device| (name(device), (of.open)(device))).collect(),
                Err(why) => vec![(name(0), Err(why))],
            }
        };
        BACKENDS.iter().flat_map(devices).collect()
    }

    /// Names and descriptions of all backends, also of those that this build lacks.
    pub fn list() -> impl Iterator<Item = (&'static str, &'static str)> {
        BACKENDS.iter().map(|of| (of.name, of.about))
    }

    /// Returns true for `auto`.
    #[must_use]
    pub const fn is_auto(self) -> bool {
        self.named.is_none()
    }

    /// The backend without the number of a device: `cpu`, `cuda`; `auto`.
    #[must_use]
    pub fn backend(self) -> &'static str {
        self.named.map_or("auto", |(backend, _)| backend)
    }

    /// Number of the device, counted from 0.
    #[must_use]
    pub fn device(self) -> usize {
        self.named.map_or(0, |(_, device)| device)
    }

    /// Opens the backend.
    ///
    /// # Errors
    /// [`Error::Feature`](crate::Error::Feature) where the build lacks the backend, [`Error::System`](crate::Error::System) where it is not for
    /// this operating system, [`Error::Device`](crate::Error::Device) where there is no driver or no such device, and
    /// [`Error::Unsupported`](crate::Error::Unsupported) where the device is older than the kernels. `auto` is refused: the choice needs a
    /// problem, see [`BackendName::choose`].
    pub fn open(self) -> Result<Arc<dyn Backend>> {
        let (backend, device) = self.named.ok_or(BackendNameError::Auto)?;
        let found = BACKENDS.iter().find(|of| of.name == backend);
        found.map_or_else(|| Err(unknown(backend).into()), |of| (of.open)(device))
    }

    /// Opens the backend and plans a problem; `auto` is [`Choice::auto_with`]. A problem that the backend has no plan for is no error here but
    /// [`Choice::plan`].
    ///
    /// # Errors
    /// As [`BackendName::open`].
    pub fn choose(self, problem: &Problem, options: PlanOptions) -> Result<Choice> {
        if self.is_auto() {
            return Ok(Choice::auto_with(problem, options));
        }
        Ok(Choice::of(self.open()?, problem, options, "asked for"))
    }
}

impl std::fmt::Display for BackendName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.named {
            Some((backend, 0)) => f.write_str(backend),
            Some((backend, device)) => write!(f, "{backend}:{device}"),
            None => f.write_str("auto"),
        }
    }
}

impl FromStr for BackendName {
    type Err = BackendNameError;

    fn from_str(name: &str) -> std::result::Result<Self, Self::Err> {
        if name == "auto" {
            return Ok(Self::AUTO);
        }
        let (backend, number) = match name.split_once(':') {
            Some((backend, number)) => (backend, Some(number)),
            None => (name, None),
        };
        let found = BACKENDS.iter().find(|of| of.name == backend && (number.is_none() || of.is_numbered));
        let found = found.ok_or_else(|| unknown(name))?;
        // `parse` alone would take a plus sign.
        let parsed = number.map_or(Some(0), |number| {
            number.bytes().all(|byte| byte.is_ascii_digit()).then(|| number.parse().ok()).flatten()
        });
        let device =
            parsed.ok_or_else(|| BackendNameError::Device { backend: found.name, name: name.to_owned() })?;
        Ok(Self { named: Some((found.name, device)) })
    }
}

fn unknown(name: &str) -> BackendNameError {
    let numbered = |of: &Registered| of.is_numbered.then(|| format!("{}:N", of.name));
    let names = BACKENDS.iter().flat_map(|of| [Some(of.name.to_owned()), numbered(of)]).flatten();
    BackendNameError::Unknown { name: name.to_owned(), known: names.collect() }
}

impl Choice {
    /// The backend that a user's text names, such as `auto`, `cpu`, `cuda`, or `cuda:1` for another device, with its plan for a problem.
    ///
    /// # Errors
    /// [`Error::BackendName`](crate::Error::BackendName) where the text names none, and the errors of [`BackendName::open`].
    pub fn named(name: &str, problem: &Problem) -> Result<Self> {
        name.parse::<BackendName>()?.choose(problem, PlanOptions::default())
    }
}
