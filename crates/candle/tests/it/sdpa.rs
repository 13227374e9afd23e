//! `sdpa`, with the parameters of candle-nn.

use crate::{Terms, check, hide, random, reference, same};
use candle_core::{DType, Device, Result, Tensor};
use flashtile_candle::sdpa;

/// q, k and v `(batch, heads, seq, dim)`, values of another dimension.
fn inputs(dtype: DType, q_len: usize) -> [Tensor; 3] {
    [([2, 6, q_len, 32], 1), ([2, 3, 21, 32], 2), ([2, 3, 21, 48], 3)]
        .map(|(shape, seed)| random(&shape, seed).to_dtype(dtype).unwrap())
}

#[test]
fn every_argument_is_obeyed() -> Result<()> {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for q_len in [1, 8] {
            let [q, k, v] = &inputs(dtype, q_len);
            let mask = random(&[2, 6, q_len, 21], 7).to_dtype(dtype)?;
            let added = mask.to_dtype(DType::F64)?;
            let added = added.flatten_all()?.to_vec1::<f64>()?;
            for (masked, causal, cap) in [
                (false, false, 1.0),
                (false, true, 1.0),
                (true, false, 1.0),
                (true, true, 1.0),
                (true, true, 0.5),
                (false, false, 3.0),
            ] {
                let dims = [2, 6, q_len, 21];
                let terms = Terms::scale(0.4).bias(dims, |[b, h, i, j]| {
                    let at = ((b * 6 + h) * q_len + i) * 21 + j;
                    hide(causal && j + q_len > i + 21) + if masked { added[at] } else { 0.0 }
                });
                let terms = Terms { softcap: (cap != 1.0).then_some(cap), ..terms };
                let out = sdpa(q, k, v, masked.then_some(&mask), causal, 0.4, cap as f32)?;
                assert_eq!(out.dims(), [2, 6, q_len, 48]);
                check(&out, &reference(q, k, v, &terms)?.0);
            }
        }
    }
    Ok(())
}

#[test]
fn masks_broadcast() -> Result<()> {
    let [q, k, v] = &inputs(DType::F32, 8);
    let small = random(&[1, 1, 8, 21], 7);
    let whole = small.expand((2, 6, 8, 21))?.contiguous()?;
    let out = sdpa(q, k, v, Some(&whole), false, 0.4, 1.0)?;
    for mask in [small.clone(), small.expand((2, 6, 8, 21))?, small.reshape((8, 21))?] {
        assert!(same(&sdpa(q, k, v, Some(&mask), false, 0.4, 1.0)?, &out));
    }
    // One element for all keys of a query changes nothing but rounding.
    let column = random(&[2, 1, 8, 1], 8).expand((2, 6, 8, 21))?;
    let flat = sdpa(q, k, v, Some(&column.contiguous()?), false, 0.4, 1.0)?;
    assert!(same(&sdpa(q, k, v, Some(&column), false, 0.4, 1.0)?, &flat));
    // A mask of another dtype than q.
    let half = small.to_dtype(DType::BF16)?;
    let out = sdpa(q, k, v, Some(&half), false, 0.4, 1.0)?;
    assert!(same(&out, &sdpa(q, k, v, Some(&half.to_dtype(DType::F32)?), false, 0.4, 1.0)?));
    Ok(())
}

#[test]
fn a_row_without_keys_is_0() -> Result<()> {
    let [q, k, v] = &inputs(DType::F32, 8);
    let mask = Tensor::full(f32::NEG_INFINITY, (8, 21), &Device::Cpu)?;
    let out = sdpa(q, k, v, Some(&mask), false, 0.4, 1.0)?;
    assert_eq!(out.abs()?.max_all()?.to_scalar::<f32>()?, 0.0);
    Ok(())
}
