//! The functions of candle-flash-attn.

use crate::{Terms, check, hide, random, reference, same, swap, tolerance};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::attention::{AttnMask, flash_attn_varlen_cpu};
use flashtile_candle::*;

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// q, k and v `(batch, seq, heads, dim)`.
fn inputs([b, q_len, kv_len, heads, kv_heads, d]: [usize; 6], dtype: DType) -> [Tensor; 3] {
    [([b, q_len, heads, d], 1), ([b, kv_len, kv_heads, d], 2), ([b, kv_len, kv_heads, d], 3)]
        .map(|(shape, seed)| random(&shape, seed).to_dtype(dtype).unwrap())
}

fn expected(qkv: &[Tensor; 3], terms: &Terms) -> Tensor {
    let [q, k, v] = qkv.each_ref().map(swap);
    swap(&reference(&q, &k, &v, terms).unwrap().0)
}

#[test]
fn dense_matches_matmul_and_softmax() -> Result<()> {
    for dtype in DTYPES {
        for shape in [
            [1, 1, 1, 1, 1, 8],
            [2, 33, 33, 4, 4, 64],
            [2, 17, 65, 8, 2, 32],
            [1, 1, 300, 6, 1, 128],
            [1, 9, 9, 2, 1, 13],
        ] {
            let qkv @ [q, k, v] = &inputs(shape, dtype);
            let [b, q_len, kv_len, heads, ..] = shape;
            for causal in [false, true] {
                let terms = Terms::scale(0.3);
                let terms = if causal {
                    terms.bias([b, heads, q_len, kv_len], |[_, _, i, j]| hide(j + q_len > i + kv_len))
                } else {
                    terms
                };
                let out = flash_attn(q, k, v, 0.3, causal)?;
                assert_eq!((out.dims(), out.dtype()), (q.dims(), dtype));
                check(&out, &expected(qkv, &terms));
            }
        }
    }
    Ok(())
}

/// Returns true if candle-flash-attn hides key `j` from query `i`.
fn hidden([i, j]: [usize; 2], [q_len, kv_len]: [usize; 2], window: [Option<usize>; 2]) -> bool {
    let at = i as i64 + kv_len as i64 - q_len as i64;
    let [left, right] = window.map(|side| side.filter(|&n| n <= kv_len).map(|n| n as i64));
    let right = right.or(left.and(Some(kv_len as i64)));
    left.is_some_and(|n| (j as i64) < at - n) || right.is_some_and(|n| j as i64 > at + n)
}

#[test]
fn windows_count_from_the_last_key() -> Result<()> {
    let sides = [None, Some(0), Some(1), Some(7), Some(1000)];
    for [q_len, kv_len] in [[20, 20], [5, 33], [12, 9]] {
        let qkv @ [q, k, v] = &inputs([1, q_len, kv_len, 2, 1, 16], DType::F32);
        for window in sides.into_iter().flat_map(|left| sides.map(|right| [left, right])) {
            let terms = Terms::scale(0.25)
                .bias([1, 1, q_len, kv_len], |[_, _, i, j]| hide(hidden([i, j], [q_len, kv_len], window)));
            let out = flash_attn_windowed(q, k, v, 0.25, window[0], window[1])?;
            // A row that sees no key is 0 here, NaN in the reference.
            let rows = |i: usize| (0..kv_len).any(|j| !hidden([i, j], [q_len, kv_len], window));
            let expected = expected(qkv, &terms);
            for i in 0..q_len {
                let row = out.narrow(1, i, 1)?;
                if rows(i) {
                    check(&row, &expected.narrow(1, i, 1)?);
                } else {
                    assert_eq!(row.abs()?.sum_all()?.to_scalar::<f32>()?, 0.0, "row {i}, window {window:?}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn alibi_and_softcap() -> Result<()> {
    let (q_len, kv_len) = (11, 30);
    let qkv @ [q, k, v] = &inputs([2, q_len, kv_len, 4, 2, 64], DType::F32);
    let slopes = Tensor::new(&[0.5f32, 0.25, 0.0625, 0.0], &Device::Cpu)?;
    let slope = [0.5, 0.25, 0.0625, 0.0];
    let bias = |window: [Option<usize>; 2]| {
        move |[_, h, i, j]: [usize; 4]| {
            let distance = (i + kv_len - q_len).abs_diff(j) as f64;
            hide(hidden([i, j], [q_len, kv_len], window)) - slope[h] * distance
        }
    };
    let dims = [2, 4, q_len, kv_len];
    for causal in [false, true] {
        let terms = Terms::scale(0.125).bias(dims, bias([None, causal.then_some(0)]));
        check(&flash_attn_alibi(q, k, v, &slopes, 0.125, causal)?, &expected(qkv, &terms));
    }
    let mut terms = Terms::scale(0.125).bias(dims, bias([Some(9), Some(2)]));
    let windowed = flash_attn_alibi_windowed(q, k, v, &slopes, 0.125, Some(9), Some(2))?;
    check(&windowed, &expected(qkv, &terms));
    // A softcap of 0 is off.
    let off = flash_attn_alibi_windowed_softcap(q, k, v, Some(&slopes), 0.125, Some(9), Some(2), 0.0)?;
    assert!(same(&off, &windowed));
    terms.softcap = Some(0.7);
    let on = flash_attn_alibi_windowed_softcap(q, k, v, Some(&slopes), 0.125, Some(9), Some(2), 0.7)?;
    check(&on, &expected(qkv, &terms));
    assert!(!same(&on, &off));
    let plain = flash_attn_alibi_windowed_softcap(q, k, v, None, 0.125, None, None, 0.0)?;
    assert!(same(&plain, &flash_attn(q, k, v, 0.125, false)?));
    Ok(())
}

#[test]
fn strided_tensors_are_read_in_place() -> Result<()> {
    for dtype in DTYPES {
        // One projection of q, k and v, which share memory: (batch, seq, (4 + 2 + 2) * 32).
        let fused = random(&[2, 10, 8 * 32], 4).to_dtype(dtype)?.reshape((2, 10, 8, 32))?;
        let [q, k, v] = [fused.narrow(2, 0, 4)?, fused.narrow(2, 4, 2)?, fused.narrow(2, 6, 2)?];
        assert!(!q.is_contiguous());
        let dense = flash_attn(&q.contiguous()?, &k.contiguous()?, &v.contiguous()?, 0.2, true)?;
        assert!(same(&flash_attn(&q, &k, &v, 0.2, true)?, &dense));
        // Memory in the order of heads, part of the keys, and one head for all.
        let heads_first = swap(&swap(&k).contiguous()?);
        assert!(same(&flash_attn(&q, &heads_first, &v, 0.2, true)?, &dense));
        let tail = flash_attn(&q.narrow(1, 4, 6)?, &k, &v, 0.2, true)?;
        assert!(same(&tail, &dense.narrow(1, 4, 6)?));
        let one = k.narrow(2, 0, 1)?.expand((2, 10, 4, 32))?;
        let repeated = flash_attn(&q, &one, &one, 0.2, true)?;
        assert!(same(&repeated, &flash_attn(&q, &one.contiguous()?, &one.contiguous()?, 0.2, true)?));
        let batch = k.narrow(0, 1, 1)?.expand((2, 10, 2, 32))?;
        assert!(same(
            &flash_attn(&q, &batch, &batch, 0.2, false)?,
            &flash_attn(&q, &batch.contiguous()?, &batch.contiguous()?, 0.2, false)?
        ));
    }
    Ok(())
}

#[test]
fn agrees_with_the_flash_attention_of_candle_nn() -> Result<()> {
    let close = |a: &Tensor, b: &Tensor| {
        let (distance, max) = (crate::distance(a, b), 2.0 * tolerance(a.dtype()));
        assert!(distance <= max, "{distance:e} from candle-nn, expected at most {max:e}");
    };
    let qkv @ [q, k, v] = &inputs([1, 40, 40, 8, 2, 64], DType::F32);
    let nn = |mask, alibi, cap| candle_nn::attention::flash_attn::<f32>(q, k, v, 0.125, mask, alibi, cap);
    close(&flash_attn(q, k, v, 0.125, false)?, &swap(&nn(AttnMask::None, None, None)?));
    close(&flash_attn(q, k, v, 0.125, true)?, &swap(&nn(AttnMask::causal(), None, None)?));
    let soft = flash_attn_alibi_windowed_softcap(q, k, v, None, 0.125, None, Some(0), 2.0)?;
    close(&soft, &swap(&nn(AttnMask::causal(), None, Some(2.0))?));
    check(&soft, &expected(qkv, &Terms { softcap: Some(2.0), ..causal_terms(40) }));
    // One token after 39 others.
    let (last, decode) = (q.narrow(1, 39, 1)?, AttnMask::causal_with_offset(39));
    let nn = candle_nn::attention::flash_attn::<f32>(&last, k, v, 0.125, decode, None, None)?;
    close(&flash_attn(&last, k, v, 0.125, true)?, &swap(&nn));
    for dtype in [DType::F32, DType::F16] {
        let [q, k, v] = &inputs([3, 20, 20, 4, 2, 32], dtype);
        let nn = match dtype {
            DType::F32 => {
                candle_nn::attention::flash_attn::<f32>(q, k, v, 0.2, AttnMask::causal(), None, None)?
            }
            _ => candle_nn::attention::flash_attn::<half::f16>(q, k, v, 0.2, AttnMask::causal(), None, None)?,
        };
        close(&flash_attn(q, k, v, 0.2, true)?, &swap(&nn));
    }
    Ok(())
}

fn causal_terms(len: usize) -> Terms {
    Terms::scale(0.125).bias([1, 1, len, len], |[_, _, i, j]| hide(j > i))
}

/// Three sequences, the second one without queries.
const Q_LENS: [usize; 3] = [7, 0, 20];
const K_LENS: [usize; 3] = [19, 5, 20];

/// Cumulative lengths, after a 0.
fn cumulative(lens: &[usize]) -> Tensor {
    let ends = lens.iter().scan(0u32, |sum, &n| {
        *sum += n as u32;
        Some(*sum)
    });
    let all: Vec<u32> = std::iter::once(0).chain(ends).collect();
    Tensor::new(all, &Device::Cpu).unwrap()
}

/// Packed q, k and v, and both lists of lengths.
fn packed(dtype: DType) -> Result<[Tensor; 5]> {
    let [q, k, v] = inputs([1, Q_LENS.iter().sum(), K_LENS.iter().sum(), 4, 2, 32], dtype);
    Ok([q.squeeze(0)?, k.squeeze(0)?, v.squeeze(0)?, cumulative(&Q_LENS), cumulative(&K_LENS)])
}

/// Applies `f` to q, k and v `(1, seq, heads, dim)` of each sequence by itself, and joins the results.
fn each_sequence(
    [q, k, v]: [&Tensor; 3],
    f: impl Fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    let (mut outs, mut q_at, mut k_at) = (Vec::new(), 0, 0);
    for (q_len, k_len) in Q_LENS.into_iter().zip(K_LENS) {
        if q_len > 0 {
            let part = |x: &Tensor, at, len| x.narrow(0, at, len)?.unsqueeze(0);
            outs.push(f(&part(q, q_at, q_len)?, &part(k, k_at, k_len)?, &part(v, k_at, k_len)?)?.squeeze(0)?);
        }
        (q_at, k_at) = (q_at + q_len, k_at + k_len);
    }
    Tensor::cat(&outs, 0)
}

#[test]
fn packed_sequences_are_independent() -> Result<()> {
    let slopes = &Tensor::new(&[0.5f32, 0.25, 0.0625, 1.0], &Device::Cpu)?;
    for dtype in DTYPES {
        let [q, k, v, sq, sk] = &packed(dtype)?;
        let qkv = [q, k, v];
        for causal in [false, true] {
            let out = flash_attn_varlen(q, k, v, sq, sk, 20, 64, 0.2, causal)?;
            assert!(same(&out, &each_sequence(qkv, |q, k, v| flash_attn(q, k, v, 0.2, causal))?));
            let out = flash_attn_varlen_alibi(q, k, v, slopes, sq, sk, 20, 20, 0.2, causal)?;
            assert!(same(
                &out,
                &each_sequence(qkv, |q, k, v| flash_attn_alibi(q, k, v, slopes, 0.2, causal))?
            ));
        }
        let (left, right) = (Some(4), Some(1));
        let out = flash_attn_varlen_windowed(q, k, v, sq, sk, 20, 20, 0.2, left, right)?;
        assert!(same(&out, &each_sequence(qkv, |q, k, v| flash_attn_windowed(q, k, v, 0.2, left, right))?));
        let out = flash_attn_varlen_alibi_windowed(q, k, v, slopes, sq, sk, 20, 20, 0.2, left, right)?;
        let alone = |q: &_, k: &_, v: &_| flash_attn_alibi_windowed(q, k, v, slopes, 0.2, left, right);
        assert!(same(&out, &each_sequence(qkv, alone)?));
        let out = flash_attn_varlen_alibi_windowed_softcap(
            q,
            k,
            v,
            Some(slopes),
            sq,
            sk,
            20,
            20,
            0.2,
            left,
            right,
            1.5,
        )?;
        let alone = |q: &_, k: &_, v: &_| {
            flash_attn_alibi_windowed_softcap(q, k, v, Some(slopes), 0.2, left, right, 1.5)
        };
        assert!(same(&out, &each_sequence(qkv, alone)?));
    }
    Ok(())
}

#[test]
fn lengths_may_be_signed_or_strided() -> Result<()> {
    let [q, k, v, sq, sk] = &packed(DType::F32)?;
    let out = flash_attn_varlen(q, k, v, sq, sk, 20, 20, 0.2, true)?;
    for dtype in [DType::I32, DType::I64] {
        let (sq, sk) = (sq.to_dtype(dtype)?, sk.to_dtype(dtype)?);
        assert!(same(&flash_attn_varlen(q, k, v, &sq, &sk, 20, 20, 0.2, true)?, &out));
    }
    let both = Tensor::stack(&[sq, sk], 1)?;
    let (sq, sk) = (both.narrow(1, 0, 1)?.squeeze(1)?, both.narrow(1, 1, 1)?.squeeze(1)?);
    assert!(same(&flash_attn_varlen(q, k, v, &sq, &sk, 20, 20, 0.2, true)?, &out));
    Ok(())
}

#[test]
fn agrees_with_the_packed_attention_of_candle_nn() -> Result<()> {
    // candle-nn takes lengths, and its queries start at key 0. With as many keys as queries, they also sit at the end.
    let lens = [13usize, 1, 26];
    let total = lens.iter().sum();
    let [q, k, v] = inputs([1, total, total, 4, 2, 32], DType::F32);
    let (q, k, v) = (q.squeeze(0)?, k.squeeze(0)?, v.squeeze(0)?);
    let cu = cumulative(&lens);
    let counts = Tensor::new(&[13u32, 1, 26], &Device::Cpu)?;
    for (causal, window) in [(false, None), (true, None), (true, Some(5))] {
        let nn =
            flash_attn_varlen_cpu(&q, &k, &v, None, &counts, &counts, 26, 26, 0.2, causal, window, None)?;
        let right = causal.then_some(0);
        let out = flash_attn_varlen_windowed(&q, &k, &v, &cu, &cu, 26, 26, 0.2, window, right)?;
        assert!(crate::distance(&out, &nn) <= 2.0 * tolerance(DType::F32));
    }
    Ok(())
}

#[test]
fn a_sequence_without_keys_gives_zeros() -> Result<()> {
    let [q, kv, _] = inputs([1, 5, 5, 4, 2, 32], DType::F32);
    let (q, kv) = (q.squeeze(0)?, kv.squeeze(0)?);
    let (sq, sk) = (cumulative(&[2, 3]), cumulative(&[0, 5]));
    let packed = flash_attn_varlen(&q, &kv, &kv, &sq, &sk, 3, 5, 0.2, true)?;
    let pool = kv.unsqueeze(0)?;
    let table = Tensor::new(&[[-1i32], [0]], &Device::Cpu)?;
    let right = Some(0);
    let paged = flash_attn_varlen_paged_windowed(
        &q, &pool, &pool, &sq, &sk, &table, None, 3, 5, 0.2, None, right, 5, None,
    )?;
    let alone = flash_attn(&q.narrow(0, 2, 3)?.unsqueeze(0)?, &pool, &pool, 0.2, true)?.squeeze(0)?;
    let expected = Tensor::cat(&[&Tensor::zeros((2, 4, 32), DType::F32, &Device::Cpu)?, &alone], 0)?;
    assert!(same(&packed, &expected) && same(&paged, &expected));
    Ok(())
}

/// Pools of pages with the rows of k and v, and a table. Pages lie in reverse order, and unused rows are NaN.
fn pages(k: &Tensor, v: &Tensor, page: usize) -> Result<[Tensor; 3]> {
    let width = K_LENS.iter().map(|len| len.div_ceil(page)).max().unwrap_or(0);
    let (heads, dim) = (k.dim(1)?, k.dim(2)?);
    let blocks = width * K_LENS.len() + 1;
    let mut table = vec![-1i32; K_LENS.len() * width];
    let mut free = blocks;
    let mut order = vec![None; blocks * page];
    let mut start = 0;
    for (sequence, len) in K_LENS.into_iter().enumerate() {
        for block in 0..len.div_ceil(page) {
            free -= 1;
            table[sequence * width + block] = free as i32;
            for row in 0..page.min(len - block * page) {
                order[free * page + row] = Some(start + block * page + row);
            }
        }
        start += len;
    }
    let nan = (Tensor::ones((1, heads, dim), DType::F32, &Device::Cpu)? * f64::NAN)?.to_dtype(k.dtype())?;
    let pool = |x: &Tensor| {
        let rows = order.iter().map(|at| at.map_or(Ok(nan.clone()), |at| x.narrow(0, at, 1)));
        let rows = rows.collect::<Result<Vec<_>>>()?;
        Tensor::cat(&rows, 0)?.reshape((blocks, page, heads, dim))
    };
    Ok([pool(k)?, pool(v)?, Tensor::from_vec(table, (K_LENS.len(), width), &Device::Cpu)?])
}

#[test]
fn pages_change_no_bit() -> Result<()> {
    for (dtype, page) in [(DType::F32, 4), (DType::F16, 16), (DType::BF16, 32)] {
        let [q, k, v, sq, sk] = &packed(dtype)?;
        let [pool_k, pool_v, table] = &pages(k, v, page)?;
        for (left, right, cap) in
            [(None, Some(0), None), (Some(3), Some(0), Some(0.0)), (None, None, Some(1.5))]
        {
            let out = flash_attn_varlen_paged_windowed(
                q, pool_k, pool_v, sq, sk, table, None, 20, 20, 0.2, left, right, page, cap,
            )?;
            let plain = flash_attn_varlen_alibi_windowed_softcap(
                q,
                k,
                v,
                None,
                sq,
                sk,
                20,
                20,
                0.2,
                left,
                right,
                cap.unwrap_or(0.0),
            )?;
            assert!(same(&out, &plain));
        }
    }
    Ok(())
}

#[test]
fn prefix_ranges_show_what_a_window_hides() -> Result<()> {
    let [q, k, v, sq, sk] = &packed(DType::F32)?;
    let [pool_k, pool_v, table] = &pages(k, v, 4)?;
    // Positions of queries: 12..19 of 19 keys, and 0..20 of 20. Empty and inverted ranges are no ranges.
    let ranges = [[[10, 17], [0, 0]], [[0, 3], [-1, -1]], [[2, 6], [15, 99]]];
    let tensor = Tensor::new(&ranges.map(|of| of.map(|range| range.map(|x: i32| x))), &Device::Cpu)?;
    let out = flash_attn_varlen_paged_windowed(
        q,
        pool_k,
        pool_v,
        sq,
        sk,
        table,
        Some(&tensor),
        20,
        20,
        0.2,
        Some(2),
        Some(0),
        4,
        None,
    )?;
    let sequence = std::cell::Cell::new(0);
    let expected = each_sequence([q, k, v], |q, k, v| {
        let ranges = ranges[sequence.replace(2)];
        let (q_len, kv_len) = (q.dim(1)?, k.dim(1)?);
        let terms = Terms::scale(0.2).bias([1, 1, q_len, kv_len], |[_, _, i, j]| {
            let at = (i + kv_len - q_len) as i32;
            let both =
                |[start, end]: [i32; 2]| (start..end).contains(&at) && (start..end).contains(&(j as i32));
            hide(hidden([i, j], [q_len, kv_len], [Some(2), Some(0)]) && !ranges.into_iter().any(both))
        });
        let [q, k, v] = [q, k, v].map(swap);
        reference(&q, &k, &v, &terms).map(|(out, _)| swap(&out))
    })?;
    check(&out, &expected);
    let without = flash_attn_varlen_windowed(q, k, v, sq, sk, 20, 20, 0.2, Some(2), Some(0))?;
    assert!(!same(&out, &without));
    Ok(())
}
