//! The failure of a command: one line and an exit status.

use crate::escape::escaped;
use std::fmt;
use std::process::ExitCode;

/// Exit status of a command that cannot do what was asked.
pub(crate) const REFUSED: u8 = 2;

/// Exit status of a command that found a wrong answer.
pub(crate) const WRONG: u8 = 1;

/// A failure in one line for the user: where, what, and what was expected.
#[derive(Debug)]
pub(crate) struct Failure {
    line: String,
    status: u8,
}

pub(crate) type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    pub(crate) fn new(what: impl fmt::Display) -> Self {
        Self { line: what.to_string(), status: REFUSED }
    }

    /// A failure caused by a file, an option or a tensor.
    pub(crate) fn at(place: impl fmt::Display, what: impl fmt::Display) -> Self {
        Self::new(format_args!("{place}: {what}"))
    }

    /// A failure that the user did not cause: a kernel gave a wrong answer.
    pub(crate) fn wrong(what: impl fmt::Display) -> Self {
        Self { status: WRONG, ..Self::new(what) }
    }

    /// Keeps the line and sets the status of a wrong answer.
    pub(crate) fn into_wrong(self) -> Self {
        Self { status: WRONG, ..self }
    }

    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.status)
    }
}

impl From<flashtile::Error> for Failure {
    fn from(error: flashtile::Error) -> Self {
        match error {
            flashtile::Error::Feature { asked, feature } => Self::at(
                "--backend",
                format_args!(
                    "this build is without the backend {asked}, \
                     cargo build --release -p flashtile-cli --features {feature} makes one that has it"
                ),
            ),
            flashtile::Error::System { .. } => Self::at("--backend", error),
            flashtile::Error::Fault(_) => Self::wrong(error),
            error => Self::new(error),
        }
    }
}

impl fmt::Display for Failure {
    /// Escapes line breaks, so that a failure is always one line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&escaped(&self.line, &[]))
    }
}
