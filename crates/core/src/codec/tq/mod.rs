//! The codebooks of `tq2` to `tq6`.

pub(super) mod codebook;
pub(super) mod lloyd;
