//! A device of a machine, or the reason why it cannot be used.

use crate::backend::Backend;
use flashtile_core::plan::AnyFacts;
use std::sync::Arc;

/// A device that can be used, or why it cannot.
pub(crate) type Candidate = Result<Arc<dyn Backend>, Presence>;

/// A device, or why there is none.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Presence {
    /// The build lacks the cargo feature of the backend.
    NotBuilt {
        /// The feature.
        feature: &'static str,
    },
    /// The machine has no device that can be used.
    Absent {
        /// The reason, in the words of whatever found it out.
        why: String,
    },
    /// A device that can be used.
    Present {
        /// The device's own name.
        name: String,
        /// Its facts.
        facts: AnyFacts,
    },
}
