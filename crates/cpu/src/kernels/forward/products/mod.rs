//! Products that only the forward pass has: with codes in place, and of few rows with values in place.
//!
//! | type | operands | vectors | tasks |
//! |---|---|---|---|
//! | [`Vnni`](vnni::Vnni) | integers and levels of codes | [`IntegerLanes`](vnni::IntegerLanes) | of any number of rows |
//! | [`ByteCodes`](byte_codes::ByteCodes) | f32 and codes of one byte | [`ByteLanes`](byte_codes::ByteLanes) | of sequences with few rows |

pub(crate) mod byte_codes;
pub(crate) mod code_block;
pub(crate) mod stream_values;
pub(crate) mod vnni;
