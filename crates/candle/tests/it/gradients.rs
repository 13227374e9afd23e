//! Gradients of q, k and v against candle's own, of a composition of its operators in f64.

use crate::{Terms, distance, hide, random, reference, same, swap};
use candle_core::{DType, Device, Result, Tensor, Var};
use flashtile_candle::flashtile::QOffset;
use flashtile_candle::{Mask, Options, TensorLayout, attention, flash_attn};

/// q, k and v as variables of a dtype.
fn variables(dtype: DType) -> Result<[Var; 3]> {
    let of = |shape: [usize; 4], seed| Var::from_tensor(&random(&shape, seed).to_dtype(dtype)?);
    Ok([of([2, 4, 9, 32], 1)?, of([2, 2, 40, 32], 2)?, of([2, 2, 40, 16], 3)?])
}

/// The gradients of `sum(out * factors)`, whose factors all differ.
fn gradients(vars: &[Var; 3], out: &Tensor) -> Result<[Tensor; 3]> {
    let factors = random(&[2, 4, 9, 16], 7).to_dtype(out.dtype())?;
    let store = (out * factors)?.sum_all()?.backward()?;
    let of = |var: &Var| store.get(var.as_tensor()).expect("a variable of the result").clone();
    Ok([of(&vars[0]), of(&vars[1]), of(&vars[2])])
}

/// Compares with the reference, by the largest element of each gradient.
fn check(dtype: DType, options: &Options, terms: &Terms) -> Result<()> {
    let vars = variables(dtype)?;
    let [q, k, v] = vars.each_ref().map(Var::as_tensor);
    let got = gradients(&vars, &attention(q, k, v, options)?.0)?;
    let want = gradients(&vars, &reference(q, k, v, terms)?.0)?;
    let relative = match dtype {
        DType::F32 => 2e-6,
        DType::F16 => 2e-3,
        _ => 2e-2,
    };
    for (got, want) in got.iter().zip(&want) {
        let largest = want.to_dtype(DType::F64)?.abs()?.max_all()?.to_scalar::<f64>()?;
        let distance = distance(got, want);
        assert!(
            got.dtype() == dtype && distance <= relative * largest,
            "{distance:e} of {largest:e}, {dtype:?}"
        );
    }
    Ok(())
}

const SCALE: f64 = std::f64::consts::SQRT_2 / 8.0;

#[test]
fn of_every_dtype() -> Result<()> {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        check(dtype, &Options::full(), &Terms::scale(SCALE))?;
    }
    Ok(())
}

#[test]
fn with_masks_biases_softcap_and_sinks() -> Result<()> {
    let dims = [2, 4, 9, 40];
    let window = Options::causal().q_offset(QOffset::BottomRight).window(12, None).softcap(0.9).scale(0.5);
    let terms = Terms::scale(0.5).bias(dims, |[_, _, i, j]| hide(j > i + 31 || j + 12 < i + 31));
    check(DType::F32, &window, &Terms { softcap: Some(0.9), ..terms })?;
    let bias = random(&[2, 4, 9, 40], 5);
    let terms = Terms { bias: Some(bias.to_dtype(DType::F64)?), ..Terms::scale(SCALE) };
    check(DType::F32, &Options::full().mask(Mask::Additive(bias)), &terms)?;
    let sinks = random(&[4], 6);
    let terms = Terms { sinks: Some(sinks.clone()), ..Terms::scale(SCALE) };
    check(DType::F32, &Options::full().sinks(&sinks), &terms)?;
    let lens = Terms::scale(SCALE).bias(dims, |[b, _, _, j]| hide(j >= [40, 17][b]));
    check(DType::F32, &Options::full().kv_lens(&[40, 17]), &lens)
}

#[test]
fn of_other_layouts_and_operators() -> Result<()> {
    let vars = variables(DType::F32)?;
    let [q, k, v] = vars.each_ref().map(Var::as_tensor);
    let want = gradients(&vars, &attention(q, k, v, &Options::decode())?.0)?;
    let swapped = [swap(q), swap(k), swap(v)];
    let bshd = Options::decode().layout(TensorLayout::Bshd);
    let got = gradients(&vars, &swap(&attention(&swapped[0], &swapped[1], &swapped[2], &bshd)?.0))?;
    let flash = flash_attn(&swapped[0], &swapped[1], &swapped[2], SCALE as f32, true)?;
    let of_flash = gradients(&vars, &swap(&flash))?;
    for n in 0..3 {
        assert!(same(&got[n], &want[n]) && same(&of_flash[n], &want[n]), "{n}");
    }
    Ok(())
}

#[test]
fn of_packed_sequences_and_one_projection() -> Result<()> {
    // q, k and v are parts of one variable, whose gradient adds up from all three.
    let fused = Var::from_tensor(&random(&[7, 3, 2, 16], 4))?;
    let part = |n: usize| fused.narrow(1, n, 1)?.squeeze(1);
    let (q, k, v) = (part(0)?, part(1)?, part(2)?);
    let packed = Options::causal().cu_seqlens(&[0, 3, 7], &[0, 3, 7]);
    let out = attention(&q, &k, &v, &packed)?.0;
    let factors = random(&[7, 2, 16], 5);
    let got = (out * &factors)?.sum_all()?.backward()?.get(fused.as_tensor()).expect("a variable").clone();
    let mut loss = Tensor::zeros((), DType::F32, &Device::Cpu)?;
    for (start, len) in [(0, 3), (3, 4)] {
        let rows = |x: &Tensor| x.narrow(0, start, len)?.transpose(0, 1)?.unsqueeze(0)?.contiguous();
        let out = attention(&rows(&q)?, &rows(&k)?, &rows(&v)?, &Options::causal())?.0;
        loss = (loss + (out * rows(&factors)?)?.sum_all()?)?;
    }
    let want = loss.backward()?.get(fused.as_tensor()).expect("a variable").clone();
    assert!(distance(&got, &want) < 1e-6);
    Ok(())
}
