//! Launch parameters of the backward kernels, beside [`Attend`](crate::kernels::attend::Attend).

use flashtile_kernel::prelude::*;

/// Strides of tensors over batch entry, head and row, in elements, and the sizes of gradients.
#[params]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Backward {
    /// Strides of keys.
    pub k: [u64; 3],
    /// Strides of values.
    pub v: [u64; 3],
    /// Strides of out.
    pub out: [u64; 3],
    /// Strides of `d_out`.
    pub d_out: [u64; 3],
    /// Strides of `d_q`.
    pub d_q: [u64; 3],
    /// Strides of `d_k`.
    pub d_k: [u64; 3],
    /// Strides of `d_v`.
    pub d_v: [u64; 3],
    /// Rows of `d_k` and `d_v` of a batch entry, padding included; 0 where sequences are packed and have no padding.
    pub kv_rows: u32,
    /// Sequences.
    pub sequences: u32,
    /// Factor of `q . k` in the score, which is that of `d_q` and `d_k` too.
    pub scale: f32,
    /// Padding: 0.
    pub unused: u32,
}
