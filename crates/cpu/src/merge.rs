//! Attention states over disjoint sets of keys, merged into the state over all of them.

#![allow(unsafe_code)]

use crate::pool;
use flashtile_core::dtype::Dtype;
use flashtile_core::inputs::Outputs;
use flashtile_core::isa::FloatEnv;
use flashtile_core::tensor::TensorView;
use half::{bf16, f16};
use rayon::prelude::*;

/// The result of attention over some of the keys: a normalised output and its logsumexp.
#[derive(Debug, Clone, Copy)]
#[allow(clippy::exhaustive_structs)]
pub struct AttentionState<'a> {
    /// `[batch, q_heads, q_len, value_dim]`. Rows whose logsumexp is `-inf` are not read.
    pub out: TensorView<'a>,
    /// Logsumexp, dense `[batch, q_heads, q_len]`.
    pub lse: &'a [f32],
}

/// Why states were not merged. Nothing was written.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum MergeError {
    /// The shape of a state's out is not the shape of the output.
    Shape {
        /// Index of the state.
        state: usize,
        /// Shape of the output.
        expected: [usize; 4],
        /// Shape of the state.
        got: [usize; 4],
    },
    /// The output has no elements, but more rows than `usize` counts.
    TooLong {
        /// Shape of the output.
        shape: [usize; 4],
    },
    /// The number of elements of a logsumexp is not the number of rows.
    Length {
        /// Index of the state; `None` is the output.
        state: Option<usize>,
        /// Rows: `batch * q_heads * q_len`.
        expected: usize,
        /// Elements given.
        got: usize,
    },
    /// The threads that compute cannot start.
    Threads {
        /// The system's message.
        reason: String,
    },
}

impl std::fmt::Display for MergeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Shape { state, expected, got } => {
                write!(f, "out of state {state} has shape {got:?}, expected {expected:?}")
            }
            Self::TooLong { shape } => {
                write!(f, "out of shape {shape:?} has more rows than can be counted")
            }
            Self::Length { state: Some(state), expected, got } => {
                write!(f, "lse of state {state} has {got} elements, expected {expected}")
            }
            Self::Length { state: None, expected, got } => {
                write!(f, "lse has {got} elements, expected {expected}")
            }
            Self::Threads { reason } => write!(f, "the threads of the pool cannot start: {reason}"),
        }
    }
}

impl std::error::Error for MergeError {}

/// Combines the results of the same queries over disjoint sets of keys: chunks of a long context, a shared prefix and the keys after it, or
/// the keys of several devices.
///
/// ```text
/// lse = ln(sum_i exp(lse_i))        out = sum_i exp(lse_i - lse) * out_i
/// ```
///
/// Exponents are relative to the largest `lse_i` of a row, so that the factors of `out_i` add up to 1, however large it is.
///
/// A state adds nothing to the rows in which its logsumexp is `-inf`, and its out is not read there. If no state adds anything to a row,
/// out is 0 and lse is `-inf`. Only one state may include an attention sink. States and output may have different dtypes: sums are f64 in
/// the order of the states, out is rounded once, and a single state of the output's dtype keeps its values. Each state is read once, on the
/// threads of the current rayon pool.
///
/// # Errors
/// [`MergeError`]; nothing is written then.
///
/// ```
/// use flashtile::{Outputs, AttentionState, TensorView, TensorViewMut, merge};
/// let shape = [1, 1, 1, 2]; // one row
/// let (near, far) = ([1.0f32, 0.0], [0.0f32, 1.0]);
/// let (near, far) = (TensorView::bhsd(&near, shape)?, TensorView::bhsd(&far, shape)?);
/// let states = [AttentionState { out: near, lse: &[3f32.ln()] }, AttentionState { out: far, lse: &[1f32.ln()] }];
/// let (mut out, mut lse) = ([0.0f32; 2], [0.0f32]);
/// let mut outputs = Outputs::new(TensorViewMut::bhsd(&mut out, shape)?);
/// outputs.lse = Some(&mut lse);
/// merge(&states, &mut outputs)?;
/// assert!((out[0] - 0.75).abs() < 1e-6 && (lse[0] - 4f32.ln()).abs() < 1e-6);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn merge(states: &[AttentionState<'_>], outputs: &mut Outputs<'_>) -> Result<(), MergeError> {
    let shape = outputs.out.shape();
    let [batch, heads, q_len, dim] = shape;
    // A shape without elements may have any other axes.
    let rows = if shape[..3].contains(&0) { Some(0) } else { batch.checked_mul(heads) };
    let expected = rows.and_then(|rows| rows.checked_mul(q_len)).ok_or(MergeError::TooLong { shape })?;
    for (index, state) in states.iter().enumerate() {
        if state.out.shape() != shape {
            return Err(MergeError::Shape { state: index, expected: shape, got: state.out.shape() });
        }
        if state.lse.len() != expected {
            return Err(MergeError::Length { state: Some(index), expected, got: state.lse.len() });
        }
    }
    if let Some(lse) = &outputs.lse
        && lse.len() != expected
    {
        return Err(MergeError::Length { state: None, expected, got: lse.len() });
    }
    pool::threads().map_err(|reason| MergeError::Threads { reason: reason.to_owned() })?;
    let out = &outputs.out;
    let rows = if dim == 0 { 0 } else { expected };
    (0..rows).into_par_iter().with_min_len(64).for_each(|row| {
        let _env = FloatEnv::ieee();
        let index = [row / (heads * q_len), row / q_len % heads, row % q_len];
        let (max, total) = max_sum(states, row);
        let dst = out.row(index[0], index[1], index[2]);
        for first in (0..dim).step_by(CHUNK) {
            let mut sum = [0.0; CHUNK];
            let sum = &mut sum[..CHUNK.min(dim - first)];
            for state in states {
                let lse_i = f64::from(state.lse[row]);
                if lse_i != f64::NEG_INFINITY {
                    add(
                        sum,
                        (lse_i - max).exp() / total,
                        state.out.dtype(),
                        &state.out.row_bytes(index)[first * state.out.dtype().bytes()..],
                    );
                }
            }
            // SAFETY: the row exists, its elements are neighbours, and rows of an output share no memory.
            unsafe { store(sum, out.dtype(), dst.add(first * out.dtype().bytes())) }
        }
    });
    if let Some(lse) = &mut outputs.lse {
        lse.par_iter_mut().with_min_len(256).enumerate().for_each(|(row, lse)| {
            let _env = FloatEnv::ieee();
            let (max, total) = max_sum(states, row);
            *lse = if total == 0.0 { f32::NEG_INFINITY } else { (max + total.ln()) as f32 };
        });
    }
    Ok(())
}

/// Elements of a row that are summed at a time.
const CHUNK: usize = 64;

/// The largest logsumexp of a row over all states, and the sum of the exponentials relative to it: 0 if no state has a key.
fn max_sum(states: &[AttentionState<'_>], row: usize) -> (f64, f64) {
    let lse = || states.iter().map(|state| f64::from(state.lse[row]));
    // f64::max ignores NaN, which still reaches the sum.
    let max = lse().fold(f64::NEG_INFINITY, f64::max);
    (max, lse().filter(|&x| x != f64::NEG_INFINITY).map(|x| (x - max).exp()).sum())
}

/// Adds a row's elements times `prob`.
fn add(sum: &mut [f64], prob: f64, dtype: Dtype, row: &[u8]) {
    match dtype {
        Dtype::F32 => {
            for (sum, &x) in sum.iter_mut().zip(row.as_chunks().0) {
                *sum += prob * f64::from(f32::from_ne_bytes(x));
            }
        }
        Dtype::F16 => {
            for (sum, &x) in sum.iter_mut().zip(row.as_chunks().0) {
                *sum += prob * f16::from_ne_bytes(x).to_f64();
            }
        }
        Dtype::BF16 => {
            for (sum, &x) in sum.iter_mut().zip(row.as_chunks().0) {
                *sum += prob * bf16::from_ne_bytes(x).to_f64();
            }
        }
    }
}

/// Rounds to the dtype of the output.
///
/// # Safety
/// `dst` is aligned to the dtype and valid for an element for each sum, which no other thread accesses.
unsafe fn store(sum: &[f64], dtype: Dtype, dst: *mut u8) {
    for (n, &x) in sum.iter().enumerate() {
        // SAFETY: the caller's contract.
        unsafe {
            match dtype {
                Dtype::F32 => *dst.cast::<f32>().add(n) = x as f32,
                Dtype::F16 => *dst.cast::<f16>().add(n) = f16::from_f64(x),
                Dtype::BF16 => *dst.cast::<bf16>().add(n) = bf16::from_f64(x),
            }
        }
    }
}
