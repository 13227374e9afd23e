//! Descriptions of problems: dimensions, dtype, visibility, bias. No memory, no device.
//!
//! A [`ProblemDesc`] is plain data. [`ProblemDesc::validate`] turns it into a [`Problem`], which proves that every
//! rule of this module holds.
//!
//! ```text
//! score[i, j] = softcap(scale * q[i] . k[j]) - slope[h] * |p(i) - j| + mask[i, j]
//! out[i]      = sum_j exp(score[i, j] - lse[i]) * v[j]
//! lse[i]      = ln(exp(sink[h]) + sum_j exp(score[i, j]))       over the keys j that row i sees
//! ```
//!
//! with `p(i) = i + q_offset` the key position of query row `i`. A row that sees no key has `out = 0` and `lse =
//! -inf` (or the sink's logit, if there is a sink).

mod desc;
mod dims;
mod error;
mod kept;
mod kept_error;
mod kv_storage;
mod prefix;
mod rules;
mod sequence;
mod validated;
mod visibility;

pub use desc::ProblemDesc;
pub use dims::{Dims, HeadShape};
pub use error::{Positional, ProblemError, Side};
pub use kept::{KeptTokens, KeyPart};
pub use kept_error::KeptError;
pub use kv_storage::{KeyColumnsError, KvStorage};
pub use prefix::SharedPrefix;
pub use sequence::{SeqLens, Sequence, Sequences};
pub use validated::Problem;
pub use visibility::{QOffset, Visibility};
