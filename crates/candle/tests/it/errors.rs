//! Calls that are refused, and their messages.

use crate::random;
use candle_core::{DType, Device, Result, Tensor, Var};
use flashtile_candle::flashtile::{CacheDesc, CacheLayout, CacheShape, Codec};
use flashtile_candle::*;

fn said<T: std::fmt::Debug>(result: Result<T>) -> String {
    // A backtrace follows if the environment asks for one.
    result.unwrap_err().to_string().lines().next().unwrap_or_default().to_owned()
}

#[test]
fn dtypes() -> Result<()> {
    let (q, kv) = (random(&[1, 4, 2, 8], 1), random(&[1, 4, 2, 8], 2));
    let half = kv.to_dtype(DType::F16)?;
    assert_eq!(said(flash_attn(&q, &half, &half, 1.0, false)), "k is f16, expected f32");
    assert_eq!(said(flash_attn(&q, &kv, &half, 1.0, false)), "v is f16, expected f32");
    let double = q.to_dtype(DType::F64)?;
    assert_eq!(said(flash_attn(&double, &kv, &kv, 1.0, false)), "q is F64, expected F32, F16 or BF16");
    let bytes = Tensor::ones((4, 4), DType::U8, &Device::Cpu)?;
    assert_eq!(
        said(sdpa(&q, &kv, &kv, Some(&bytes), false, 1.0, 1.0)),
        "mask is U8, expected F32, F16 or BF16, which is added to scores"
    );
    let visible = Options::full().mask(Mask::Visible(q.get(0)?.get(0)?));
    assert_eq!(said(attention(&q, &kv, &kv, &visible)), "mask is F32, expected U8, where 1 is visible");
    let slopes = Tensor::ones(2, DType::F64, &Device::Cpu)?;
    assert_eq!(
        said(flash_attn_alibi(&q, &kv, &kv, &slopes, 1.0, false)),
        "alibi_slopes is F64 of shape [2], expected F32 of one axis or two"
    );
    Ok(())
}

#[test]
fn shapes() -> Result<()> {
    let (q, kv) = (random(&[1, 4, 2, 8], 1), random(&[1, 4, 2, 8], 2));
    let flat = q.squeeze(0)?;
    assert_eq!(
        said(flash_attn(&flat, &kv, &kv, 1.0, false)),
        "q has shape [4, 2, 8], expected (batch, seq, heads, dim)"
    );
    assert_eq!(
        said(attention(&flat, &kv, &kv, &Options::full())),
        "q has shape [4, 2, 8], expected (batch, heads, seq, dim)"
    );
    let other = random(&[1, 4, 2, 16], 1);
    assert_eq!(
        said(flash_attn(&q, &other, &kv, 1.0, false)),
        "k has shape [1, 4, 2, 16], expected [1, 4, 2, 8]"
    );
    let three = random(&[1, 4, 3, 8], 1);
    let error = said(flash_attn(&q, &three, &three, 1.0, false));
    assert!(error.contains("q_heads") && error.contains('3'), "{error}");
    let long = random(&[1, 4, 2, 513], 1);
    let error = said(flash_attn(&long, &long, &long, 1.0, false));
    assert!(error.contains("513") && error.contains("512"), "{error}");
    let mask = random(&[1, 4, 4], 1);
    assert_eq!(
        said(sdpa(&q, &kv, &kv, Some(&mask), false, 1.0, 1.0)),
        "mask has shape [1, 4, 4], expected (queries, keys) or (batch, heads, queries, keys)"
    );
    let mask = random(&[1, 1, 2, 3], 1);
    let error = said(sdpa(&q, &kv, &kv, Some(&mask), false, 1.0, 1.0));
    assert_eq!(error, "mask has shape [1, 1, 2, 3], expected [1, 4, 2, 2] with any axis 1");
    let error = said(flash_attn_alibi(&q, &kv, &kv, &Tensor::ones(3, DType::F32, &Device::Cpu)?, 1.0, false));
    assert_eq!(error, "alibi_slopes has shape [3], expected [2], or [sequences, 2]");
    // Slopes of three batch entries with two heads, and their transpose.
    let (q, slopes) = (random(&[3, 4, 2, 8], 1), random(&[3, 2], 5));
    let of_entry = |n: usize| {
        let [q, slopes] = [q.narrow(0, n, 1)?, slopes.narrow(0, n, 1)?.squeeze(0)?];
        flash_attn_alibi(&q, &q, &q, &slopes, 1.0, true)
    };
    let apart = Tensor::cat(&(0..3).map(of_entry).collect::<Result<Vec<_>>>()?, 0)?;
    let together = flash_attn_alibi(&q, &q, &q, &slopes, 1.0, true)?;
    assert_eq!(together.flatten_all()?.to_vec1::<f32>()?, apart.flatten_all()?.to_vec1::<f32>()?);
    let error = said(flash_attn_alibi(&q, &q, &q, &slopes.t()?, 1.0, true));
    assert_eq!(error, "alibi_slopes has shape [2, 3], expected [2], or [sequences, 2]");
    Ok(())
}

#[test]
fn strides() -> Result<()> {
    let (q, kv) = (random(&[1, 4, 2, 8], 1), random(&[1, 8, 2, 4], 2).transpose(1, 3)?);
    assert_eq!(
        said(flash_attn(&q, &kv, &q, 1.0, false)),
        "k has strides [64, 1, 4, 8], expected 1 for the last axis: call contiguous() on it"
    );
    assert!(flash_attn(&q, &kv.contiguous()?, &q, 1.0, false).is_ok());
    assert_eq!(
        said(sdpa(&q, &q, &q, Some(&random(&[2, 2], 1).t()?), false, 1.0, 1.0)),
        "mask has strides [1, 2], expected 0 or 1 for the last axis: call contiguous() on it"
    );
    Ok(())
}

#[test]
fn options() -> Result<()> {
    let (q, kv) = (random(&[1, 2, 4, 8], 1), random(&[1, 2, 9, 8], 2));
    let error = said(attention(&q, &kv, &kv, &Options::causal()));
    assert!(error.contains("q_offset"), "{error}");
    for (scale, cap) in [(f32::NAN, 1.0), (1.0, 0.0), (1.0, -3.0), (f32::INFINITY, 1.0)] {
        assert!(sdpa(&q, &kv, &kv, None, false, scale, cap).is_err(), "{scale} {cap}");
    }
    assert!(flash_attn_alibi_windowed_softcap(&q, &q, &q, None, 1.0, None, None, -1.0).is_err());
    assert!(attention(&q, &kv, &kv, &Options::full().kv_lens(&[10])).is_err());
    let mut cached = Options::full();
    cached.sequences = flashtile::Sequences::Cached { cu_seqlens_q: vec![0, 2], kv_lens: vec![8] };
    let error = said(attention(&random(&[2, 2, 8], 1), &kv, &kv, &cached));
    assert_eq!(error, "tables is missing: the problem has it");
    let tables = flashtile::BlockTables::from_rows(&[0], &[9], 9).unwrap();
    let mut unused = Options::full();
    unused.tables = Some(tables.clone());
    assert_eq!(said(attention(&q, &kv, &kv, &unused)), "tables was given but the problem does not have it");
    // The last setting counts.
    let again = Options::full().paged(&[0, 4], tables).kv_lens(&[9]);
    assert_eq!(attention(&q, &kv, &kv, &again)?.0.dims(), [1, 2, 4, 8]);
    Ok(())
}

#[test]
fn gradients() -> Result<()> {
    let (q, kv) = (random(&[1, 2, 4, 8], 1), random(&[1, 2, 4, 8], 2));
    let var = |shape: &[usize]| Var::ones(shape, DType::F32, &Device::Cpu);
    let refused = |name: &str| {
        format!("{name} is a variable or computed from one, and has no gradient here: call detach() on it")
    };
    let with = |options: &Options| said(attention(&q, &kv, &kv, options));
    let of_two = (var(&[2])?.as_tensor() * 1.0)?;
    assert_eq!(
        with(&Options::full().mask(Mask::Additive(var(&[4, 4])?.as_tensor().clone()))),
        refused("mask")
    );
    assert_eq!(with(&Options::causal().alibi(&of_two)), refused("alibi_slopes"));
    assert_eq!(with(&Options::full().sinks(&of_two)), refused("sinks"));
    assert!(attention(&q, &kv, &kv, &Options::full().sinks(&of_two.detach())).is_ok());
    let v = var(&[1, 2, 4, 8])?;
    assert_eq!(said(attention(&q, &kv, &v, &Options::full().lse())), refused("v"));
    let tables = flashtile::BlockTables::from_rows(&[0], &[4], 4).unwrap();
    let (row, pages) = (random(&[1, 2, 8], 3), var(&[1, 2, 4, 8])?);
    let (out, _) = attention(&row, &pages, &pages, &Options::decode().paged(&[0, 1], tables))?;
    let error = said(out.sum_all()?.backward());
    assert_eq!(error, "no backward pass: keys and values in the pages of a cache have no gradients");
    Ok(())
}

#[test]
fn lengths_and_pages() -> Result<()> {
    let (q, kv) = (random(&[6, 2, 8], 1), random(&[6, 2, 8], 2));
    let list = |all: &[u32]| Tensor::new(all, &Device::Cpu).unwrap();
    let run = |sq: &Tensor, sk: &Tensor, max: usize| {
        said(flash_attn_varlen(&q, &kv, &kv, sq, sk, max, max, 1.0, true))
    };
    let good = list(&[0, 2, 6]);
    assert_eq!(run(&good.unsqueeze(0)?, &good, 9), "seqlens_q has shape [1, 3], expected one axis");
    assert_eq!(run(&good, &good, 3), "max_seqlen_q is 3, the longest sequence of seqlens_q has 4");
    assert_eq!(
        run(&list(&[0]), &list(&[0]), 9),
        "seqlens_q has 1 elements, expected 2 or more: 0, then the end of each sequence"
    );
    assert_eq!(
        run(&good, &list(&[0, 6]), 9),
        "seqlens_q has 3 elements, seqlens_k 2, expected equal numbers"
    );
    assert_eq!(run(&good.to_dtype(DType::F32)?, &good, 9), "seqlens_q is F32, expected U32, I32 or I64");
    let negative = Tensor::new(&[0i32, -2, 6], &Device::Cpu)?;
    assert_eq!(run(&negative, &good, 9), "seqlens_q has -2, expected 0 or more");
    for bad in [[0, 2, 5], [0, 4, 7], [1, 2, 6], [0, 7, 6]] {
        assert!(flash_attn_varlen(&q, &kv, &kv, &list(&bad), &good, 99, 99, 1.0, true).is_err(), "{bad:?}");
        assert!(flash_attn_varlen(&q, &kv, &kv, &good, &list(&bad), 99, 99, 1.0, true).is_err(), "{bad:?}");
    }
    let pool = random(&[3, 4, 2, 8], 3);
    let table = Tensor::new(&[[0u32], [2]], &Device::Cpu)?;
    let paged_with =
        |seqlens_q: &Tensor, seqlens_k: &Tensor, table: &Tensor, ranges: Option<&Tensor>, page| {
            let no_max = usize::MAX;
            flash_attn_varlen_paged_windowed(
                &q,
                &pool,
                &pool,
                seqlens_q,
                seqlens_k,
                table,
                ranges,
                no_max,
                no_max,
                1.0,
                None,
                Some(0),
                page,
                None,
            )
        };
    let paged = |table: &Tensor, ranges: Option<&Tensor>, page| paged_with(&good, &good, table, ranges, page);
    assert!(paged(&table, None, 4).is_ok());
    assert_eq!(
        said(paged(&table, None, 8)),
        "k has shape [3, 4, 2, 8], expected (blocks, 8, heads, dim), as page_block_size is 8"
    );
    assert_eq!(
        said(paged(&table.narrow(0, 0, 1)?, None, 4)),
        "block_table has shape [1, 1], expected (2, blocks)"
    );
    assert_eq!(said(paged(&table.to_dtype(DType::I64)?, None, 4)), "block_table is I64, expected U32 or I32");
    let error = said(paged(&Tensor::new(&[[0u32], [3]], &Device::Cpu)?, None, 4));
    assert!(error.contains("page 3") && error.contains('3'), "{error}");
    let ranges = Tensor::zeros((2, 1, 2), DType::I32, &Device::Cpu)?;
    let huge = list(&[0, u32::MAX - 1, u32::MAX]);
    let error = said(paged_with(&huge, &huge, &table, Some(&ranges), 4));
    assert_eq!(
        error,
        "seqlens_k has a sequence of 4294967294 keys, block_table has room for 4: 1 blocks of 4"
    );
    let longer = list(&[0, 2, 7]);
    let error = said(paged_with(&longer, &good, &table, Some(&ranges), 4));
    assert_eq!(error, "seqlens_q ends at 7, expected 6, the rows of q");
    let ranges = Tensor::zeros((2, 1, 3), DType::I32, &Device::Cpu)?;
    assert_eq!(
        said(paged(&table, Some(&ranges), 4)),
        "mm_prefix_ranges is I32 of shape [2, 1, 3], expected I32 of (2, ranges, 2)"
    );
    Ok(())
}

#[test]
fn steps() -> Result<()> {
    let shape = CacheShape { layers: 1, kv_heads: 2, head_dim: 8, value_dim: 8 };
    let mut cache =
        KvCache::new(CacheDesc::new(CacheLayout::Contiguous { slots: 1, capacity: 8 }, shape, Codec::F32))?;
    let seq = cache.create()?;
    let (q, kv) = (random(&[3, 4, 8], 1), random(&[3, 2, 8], 2));
    let mut step = cache.step(&[(seq, 3)])?;
    assert!(said(step.attend(1, &q, &kv, &kv)).contains("layer"));
    assert!(said(step.attend(0, &q, &kv.unsqueeze(0)?, &kv)).contains("(tokens, heads, dim)"));
    // Three sequences of one token are not one of three.
    let [q3, kv3] = [&q, &kv].map(|x| x.unsqueeze(2).unwrap());
    assert_eq!(
        said(step.attend(0, &q3, &kv3, &kv3)),
        "q has 3 sequences of 1 tokens, the step has sequences of [3]"
    );
    assert_eq!(said(step.attend(0, &q.narrow(0, 0, 2)?, &kv, &kv)), "q has 2 tokens, the step has 3");
    let error = said(step.attend(0, &q, &kv.narrow(0, 0, 2)?, &kv));
    assert_eq!(error, "k has shape [2, 2, 8], expected [3, 2, 8]");
    // One sequence of three tokens is not three of one, in any of the tensors.
    let [q4, kv4] = [&q, &kv].map(|x| x.unsqueeze(0).unwrap().transpose(1, 2).unwrap());
    for (k, v, name) in [(&kv3, &kv4, "k"), (&kv4, &kv3, "v")] {
        assert_eq!(
            said(step.attend(0, &q4, k, v)),
            format!("{name} has 3 sequences of 1 tokens, the step has sequences of [3]")
        );
    }
    assert!(step.attend(0, &q4, &kv4, &kv4).is_ok());
    assert!(step.attend(0, &q, &kv, &kv).is_ok());
    step.finish()?;
    assert!(said(cache.create()).contains("slot"));
    assert!(
        KvCache::new(CacheDesc::new(CacheLayout::Paged { pages: 0, page_size: 8 }, shape, Codec::F32))
            .is_err()
    );
    Ok(())
}
