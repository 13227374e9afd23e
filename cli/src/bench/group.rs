//! The rows of one table.

use super::measure::Measured;
use super::rows::Kind;
use crate::machine::{Limit, Unit};

/// Rows of one kind and one unit, with the limit that was measured around them.
pub(super) struct Group {
    pub(super) kind: Kind,
    pub(super) unit: Unit,
    pub(super) limit: Limit,
    pub(super) rows: Vec<Measured>,
}
