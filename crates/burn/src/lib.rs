#![doc = include_str!("../README.md")]

mod attention;
mod error;
mod operand;

pub use attention::{Options, attention, attention_with, attention_with_lse, step_attend};
pub use error::{Error, Result};
pub use flashtile;
