//! Quantized vectors: rotation, codebooks, codes.

mod format;
mod fp8;
mod lloyd;
mod planes;
mod rotation;
mod vector;
