//! Tables of the tokens that are kept in 16 bits.

use crate::block_tables::BlockTables;
use crate::problem::KeptTokens;

/// Which tokens of a batch are kept in 16 bits, and where they lie.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)]
pub struct KeptTables {
    /// The tokens, for [`ProblemDesc::kept`](crate::problem::ProblemDesc::kept).
    pub tokens: KeptTokens,
    /// Tables of the first tokens.
    pub first: Option<BlockTables>,
    /// Tables of the last tokens.
    pub last: Option<BlockTables>,
}
