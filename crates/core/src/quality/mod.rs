//! The distance of an answer from the reference, and the errors of codecs for given keys and values.

mod answer;
mod compare;
mod error;
mod head;
mod pair;
mod tolerance;

pub use answer::Answer;
pub use compare::{
    Comparison, Deviation, EQUALIZE_POWER, HeadAttention, KeyCodec, KeyErrors, MEAN_ROWS, RefusedRow, compare,
};
pub use error::QualityError;
pub use head::Head;
pub use pair::{Quality, quality};
pub use tolerance::{
    Accumulation, Report, Tolerance, compare_lse, compare_lse_off, compare_out, compare_out_off,
    compare_within, integer_errors, score_errors,
};
