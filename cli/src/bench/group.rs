//! The rows of one table.

use super::measure::Measured;
use super::rows::Kind;
use crate::machine::Bound;
use flashtile::Unit;

/// Rows of one kind and one unit, with the limit that was measured around them.
pub(super) struct Group {
    pub(super) kind: Kind,
    pub(super) unit: Unit,
    pub(super) bound: Bound,
    pub(super) rows: Vec<Measured>,
}
