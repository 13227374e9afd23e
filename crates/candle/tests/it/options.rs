//! `attention` with every option.

use crate::{Terms, check, distance, hide, random, reference, same, swap};
use candle_core::{DType, Device, Result, Tensor};
use flashtile_candle::flashtile::{BlockTables, QOffset};
use flashtile_candle::{Mask, Options, TensorLayout, attention, flash_attn};

fn inputs() -> [Tensor; 3] {
    [([2, 4, 9, 32], 1), ([2, 2, 40, 32], 2), ([2, 2, 40, 16], 3)].map(|(shape, seed)| random(&shape, seed))
}

const SCALE: f64 = std::f64::consts::SQRT_2 / 8.0;

#[test]
fn defaults_and_logsumexp() -> Result<()> {
    let [q, k, v] = &inputs();
    let (out, none) = attention(q, k, v, &Options::full())?;
    let (expected, lse_expected) = reference(q, k, v, &Terms::scale(SCALE))?;
    check(&out, &expected);
    assert!(none.is_none());
    let (with, lse) = attention(q, k, v, &Options::full().lse())?;
    let lse = lse.expect("asked for");
    assert!(same(&with, &out) && lse.dtype() == DType::F32);
    assert!(distance(&lse, &lse_expected) < 2e-6);
    let (with, lse_bshd) =
        attention(&swap(q), &swap(k), &swap(v), &Options::full().layout(TensorLayout::Bshd).lse())?;
    assert!(same(&swap(&with), &out) && with.is_contiguous());
    assert!(same(&lse_bshd.expect("asked for"), &lse));
    let (q, k, v) = (swap(q).get(0)?, swap(k).get(0)?, swap(v).get(0)?);
    let (with, packed) = attention(&q, &k, &v, &Options::full().cu_seqlens(&[0, 9], &[0, 40]).lse())?;
    assert!(same(&swap(&with.unsqueeze(0)?), &out.narrow(0, 0, 1)?));
    assert!(same(&packed.expect("asked for"), &lse.get(0)?));
    Ok(())
}

#[test]
fn positions() -> Result<()> {
    let [q, k, v] = &inputs();
    let dims = [2, 4, 9, 40];
    for (offset, at) in [(QOffset::BottomRight, 31), (QOffset::TopLeft, 0)] {
        let options = Options::causal().q_offset(offset).window(5, None).scale(0.5).softcap(0.9);
        let terms = Terms::scale(0.5).bias(dims, |[_, _, i, j]| hide(j > i + at || j + 5 < i + at));
        let terms = Terms { softcap: Some(0.9), ..terms };
        check(&attention(q, k, v, &options)?.0, &reference(q, k, v, &terms)?.0);
    }
    assert!(same(
        &attention(q, k, v, &Options::decode())?.0,
        &attention(q, k, v, &Options::causal().q_offset(QOffset::BottomRight))?.0
    ));
    let slopes = Tensor::new(&[0.5f32, 0.1, 0.2, 0.7], &Device::Cpu)?;
    let terms = Terms::scale(SCALE)
        .bias(dims, |[_, h, i, j]| -f64::from([0.5f32, 0.1, 0.2, 0.7][h]) * (i + 31).abs_diff(j) as f64);
    let options = Options::full().q_offset(QOffset::BottomRight).alibi(&slopes);
    check(&attention(q, k, v, &options)?.0, &reference(q, k, v, &terms)?.0);
    Ok(())
}

#[test]
fn masks_and_sinks() -> Result<()> {
    let [q, k, v] = &inputs();
    let seen = |b: usize, h: usize, i: usize, j: usize| !(b * 3 + h * 5 + i * 7 + j * 11).is_multiple_of(4);
    for dims @ [b, h, i, j] in [[2, 4, 9, 40], [1, 4, 9, 40], [2, 1, 1, 40], [1, 1, 9, 40]] {
        let all: Vec<u8> = (0..b * h * i * j)
            .map(|n| seen(n / (h * i * j), n / (i * j) % h, n / j % i, n % j).into())
            .collect();
        let mask = Tensor::from_vec(all, &dims, &Device::Cpu)?;
        let terms = Terms::scale(SCALE).bias(dims, |[b, h, i, j]| hide(!seen(b, h, i, j)));
        let expected = reference(q, k, v, &terms)?.0;
        check(&attention(q, k, v, &Options::full().mask(Mask::Visible(mask.clone())))?.0, &expected);
        if b == 1 && h == 1 {
            let flat = Options::full().mask(Mask::Visible(mask.reshape((i, j))?));
            check(&attention(q, k, v, &flat)?.0, &expected);
            // 1 where a key is hidden, as models of candle have it.
            let hidden = mask.eq(0u8)?;
            check(&attention(q, k, v, &Options::full().mask(Mask::Visible(hidden.eq(0u8)?)))?.0, &expected);
        }
    }
    let sinks = Tensor::new(&[0.5f32, -2.0, 1.0, f32::NEG_INFINITY], &Device::Cpu)?;
    let added = random(&[9, 40], 5);
    let mut terms = Terms::scale(SCALE);
    terms.bias = Some(added.to_dtype(DType::F64)?);
    terms.sinks = Some(sinks.clone());
    let options = Options::full().mask(Mask::Additive(added)).sinks(&sinks).lse();
    let (out, lse) = attention(q, k, v, &options)?;
    let (expected, lse_expected) = reference(q, k, v, &terms)?;
    check(&out, &expected);
    assert!(distance(&lse.expect("asked for"), &lse_expected) < 2e-6);
    Ok(())
}

#[test]
fn lengths_hide_padding() -> Result<()> {
    let [q, k, v] = &inputs();
    // Padding is never read.
    let poison = Tensor::full(f32::NAN, (1, 2, 10, 32), &Device::Cpu)?;
    let short = Tensor::cat(&[&k.narrow(0, 1, 1)?.narrow(2, 0, 30)?, &poison], 2)?;
    let k_padded = Tensor::cat(&[&k.narrow(0, 0, 1)?, &short], 0)?;
    let out = attention(q, &k_padded, v, &Options::full().kv_lens(&[40, 30]))?.0;
    let terms = Terms::scale(SCALE).bias([2, 1, 1, 40], |[b, _, _, j]| hide(b == 1 && j >= 30));
    check(&out, &reference(q, k, v, &terms)?.0);
    let none = attention(q, k, v, &Options::full().kv_lens(&[40, 0]))?.0;
    assert_eq!(none.get(1)?.abs()?.max_all()?.to_scalar::<f32>()?, 0.0);
    Ok(())
}

#[test]
fn pages_of_either_order() -> Result<()> {
    let (q, pool) = (random(&[3, 4, 32], 1), random(&[6, 2, 8, 32], 2));
    let tables = BlockTables::from_rows(&[4, 1, 2, 5, 0, u32::MAX], &[20, 11], 8).unwrap();
    let hnd = attention(&q, &pool, &pool, &Options::decode().paged(&[0, 1, 3], tables.clone()).lse())?;
    let nhd = swap(&pool).contiguous()?;
    let options = Options::decode().layout(TensorLayout::Bshd).paged(&[0, 1, 3], tables).lse();
    let (out, lse) = attention(&q, &nhd, &nhd, &options)?;
    assert!(same(&hnd.0, &out) && same(&hnd.1.expect("asked for"), &lse.expect("asked for")));
    let rows = |pages: &[usize], len| {
        let rows: Vec<_> = pages.iter().map(|&page| pool.get(page).unwrap()).collect();
        Tensor::cat(&rows, 1)?.narrow(1, 0, len)?.unsqueeze(0)
    };
    let first = rows(&[4, 1, 2], 20)?;
    check(
        &swap(&out.narrow(0, 0, 1)?.unsqueeze(0)?),
        &reference(&swap(&q.narrow(0, 0, 1)?.unsqueeze(0)?), &first, &first, &Terms::scale(SCALE))?.0,
    );
    let second = rows(&[5, 0], 11)?;
    let terms = Terms::scale(SCALE).bias([1, 1, 2, 11], |[_, _, i, j]| hide(j > i + 9));
    check(
        &swap(&out.narrow(0, 1, 2)?.unsqueeze(0)?),
        &reference(&swap(&q.narrow(0, 1, 2)?.unsqueeze(0)?), &second, &second, &terms)?.0,
    );
    Ok(())
}

#[test]
fn empty_tensors() -> Result<()> {
    let q = random(&[0, 4, 9, 32], 1);
    let kv = random(&[0, 2, 9, 32], 1);
    let (out, lse) = attention(&q, &kv, &kv, &Options::causal().lse())?;
    assert_eq!(
        (out.dims(), lse.expect("asked for").dims()),
        ([0, 4, 9, 32].as_slice(), [0, 4, 9].as_slice())
    );
    let [q, k, v] = &inputs();
    let out = attention(&q.narrow(2, 0, 0)?, k, v, &Options::full())?.0;
    assert_eq!(out.dims(), [2, 4, 0, 16]);
    let none = attention(q, &k.narrow(2, 0, 0)?, &v.narrow(2, 0, 0)?, &Options::full())?.0;
    assert_eq!(none.abs()?.max_all()?.to_scalar::<f32>()?, 0.0);
    Ok(())
}

/// q, k and v share memory to which another thread writes: taking the locks cannot deadlock.
#[test]
fn tensors_of_one_memory_beside_a_writer() -> Result<()> {
    let fused = random(&[1, 6, 12, 16], 1);
    let row = random(&[1, 6, 1, 16], 2);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| (0..2000).try_for_each(|n| fused.slice_set(&row, 2, n % 12)));
        for _ in 0..500 {
            let part = |at| fused.narrow(1, at, 2);
            flash_attn(&part(0)?, &part(2)?, &part(4)?, 0.25, true)?;
        }
        writer.join().expect("no panic")
    })
}
