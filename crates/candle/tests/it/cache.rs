//! KV caches.

use crate::{check, distance, random, same, swap};
use candle_core::{DType, Result, Tensor};
use flashtile_candle::flashtile::{CacheDesc, CacheLayout, CacheShape, Codec};
use flashtile_candle::{KvCache, Options, TensorLayout, attention, flash_attn, flash_attn_windowed};

const LAYERS: usize = 2;

fn cache(layout: CacheLayout, codec: Codec) -> KvCache {
    let shape = CacheShape { layers: LAYERS, kv_heads: 2, head_dim: 32, value_dim: 32 };
    KvCache::new(CacheDesc::new(layout, shape, codec)).unwrap()
}

/// q, k and v `(tokens, heads, dim)` of a layer.
fn layer(tokens: usize, layer: u64, dtype: DType) -> [Tensor; 3] {
    [(8, 1), (2, 2), (2, 3)]
        .map(|(heads, seed)| random(&[tokens, heads, 32], 10 * layer + seed).to_dtype(dtype).unwrap())
}

/// Causal attention of all tokens at once.
fn whole([q, k, v]: &[Tensor; 3]) -> Result<Tensor> {
    let scale = 1.0 / 32f32.sqrt();
    flash_attn(&q.unsqueeze(0)?, &k.unsqueeze(0)?, &v.unsqueeze(0)?, scale, true)?.squeeze(0)
}

#[test]
fn chunks_and_tokens_give_the_bits_of_full_attention() -> Result<()> {
    let paged = CacheLayout::Paged { pages: 16, page_size: 8 };
    for (layout, dtype, codec) in [
        (paged, DType::F32, Codec::F32),
        (paged, DType::F16, Codec::F16),
        (CacheLayout::Contiguous { slots: 2, capacity: 64 }, DType::BF16, Codec::BF16),
    ] {
        let mut cache = cache(layout, codec);
        let (a, b) = (cache.create()?, cache.create()?);
        let tensors: Vec<_> = (0..LAYERS as u64).map(|n| layer(43, n, dtype)).collect();
        let expected = tensors.iter().map(whole).collect::<Result<Vec<_>>>()?;
        let mut outs = vec![vec![]; LAYERS];
        let mut at = 0;
        for tokens in [30, 5, 1, 1, 6] {
            // The other sequence gets the same tokens: its results are the same.
            let mut step = cache.step(&[(a, tokens), (b, tokens)])?;
            for (n, tensors) in tensors.iter().enumerate() {
                let twice = tensors.each_ref().map(|x| {
                    let new = x.narrow(0, at, tokens).unwrap();
                    Tensor::cat(&[&new, &new], 0).unwrap()
                });
                let out = step.attend(n, &twice[0], &twice[1], &twice[2])?;
                assert!(same(&out.narrow(0, 0, tokens)?, &out.narrow(0, tokens, tokens)?));
                outs[n].push(out.narrow(0, 0, tokens)?);
            }
            assert_eq!(step.lens()[0].kv_len, at + tokens);
            step.finish()?;
            at += tokens;
        }
        for (outs, expected) in outs.iter().zip(&expected) {
            assert!(same(&Tensor::cat(outs, 0)?, expected));
        }
        assert_eq!((cache.len(a)?, cache.len(b)?), (43, 43));
    }
    Ok(())
}

#[test]
fn batches_of_equal_lengths() -> Result<()> {
    let mut cache = cache(CacheLayout::Paged { pages: 16, page_size: 8 }, Codec::F32);
    let (a, b) = (cache.create()?, cache.create()?);
    for tokens in [5, 1] {
        // (sequences, heads, tokens, dim), as projections give it and as rotary embeddings do.
        let [q, k, v] =
            [(8, 1), (2, 2), (2, 3)].map(|(heads, seed)| swap(&random(&[2, tokens, heads, 32], seed)));
        let mut step = cache.step(&[(a, tokens), (b, tokens)])?;
        let outs = [
            step.attend(0, &q, &k, &v)?,
            step.attend(1, &q.contiguous()?, &k.contiguous()?, &v.contiguous()?)?,
        ];
        let (bshd, _) = step.attend_with(
            0,
            &swap(&q),
            &swap(&k),
            &swap(&v),
            &Options::decode().layout(TensorLayout::Bshd),
        )?;
        assert!(same(&swap(&bshd), &outs[0]));
        step.finish()?;
        assert_eq!(outs[0].dims(), [2, 8, tokens, 32]);
        assert!(same(&outs[0], &outs[1]));
        if tokens == 5 {
            check(&outs[0], &attention(&q, &k, &v, &Options::causal())?.0.to_dtype(DType::F64)?);
        }
    }
    Ok(())
}

#[test]
fn options_of_a_layer() -> Result<()> {
    let mut cache = cache(CacheLayout::Paged { pages: 16, page_size: 8 }, Codec::F32);
    let seq = cache.create()?;
    let [q, k, v] = layer(20, 0, DType::F32);
    let mut step = cache.step(&[(seq, 20)])?;
    let options = Options::decode().window(4, 0).lse();
    let (out, lse) = step.attend_with(0, &q, &k, &v, &options)?;
    let [q4, k4, v4] = [&q, &k, &v].map(|x| x.unsqueeze(0).unwrap());
    let scale = 1.0 / 32f32.sqrt();
    assert!(same(&out, &flash_attn_windowed(&q4, &k4, &v4, scale, Some(4), Some(0))?.squeeze(0)?));
    let (_, expected) = attention(&q4, &k4, &v4, &options.layout(TensorLayout::Bshd))?;
    assert!(same(&lse.expect("asked for"), &expected.expect("asked for").squeeze(0)?));
    let error = step.attend_with(1, &q, &k, &v, &Options::decode().kv_lens(&[20])).unwrap_err().to_string();
    assert!(error.contains("a step does that"), "{error}");
    // Layer 1 did not attend, so the step removes its tokens.
    let error = step.finish().unwrap_err().to_string();
    assert!(error.contains("layer 1"), "{error}");
    assert_eq!(cache.len(seq)?, 0);
    Ok(())
}

#[test]
fn quantized_rows_are_close() -> Result<()> {
    let mut cache = cache(CacheLayout::Paged { pages: 16, page_size: 8 }, Codec::Int8);
    let seq = cache.create()?;
    let tensors = layer(40, 0, DType::F32);
    let mut step = cache.step(&[(seq, 40)])?;
    let outs = [
        step.attend(0, &tensors[0], &tensors[1], &tensors[2])?,
        step.attend(1, &tensors[0], &tensors[1], &tensors[2])?,
    ];
    step.finish()?;
    assert!(same(&outs[0], &outs[1]));
    let off = distance(&outs[0], &whole(&tensors)?);
    assert!(off > 0.0 && off < 0.02, "{off}");
    Ok(())
}

#[test]
fn sequences_fork_and_roll_back() -> Result<()> {
    let mut cache = cache(CacheLayout::Paged { pages: 8, page_size: 8 }, Codec::F32);
    let a = cache.create()?;
    let [q, k, v] = layer(12, 0, DType::F32);
    let run = |cache: &mut KvCache, seq, from: usize, tokens: usize| {
        let mut step = cache.step(&[(seq, tokens)])?;
        let part = |x: &Tensor| x.narrow(0, from, tokens);
        let mut last = None;
        for n in 0..LAYERS {
            last = Some(step.attend(n, &part(&q)?, &part(&k)?, &part(&v)?)?);
        }
        step.finish()?;
        Ok::<_, candle_core::Error>(last.expect("layers"))
    };
    run(&mut cache, a, 0, 9)?;
    let b = cache.fork(a)?;
    let of_a = run(&mut cache, a, 9, 3)?;
    assert!(same(&run(&mut cache, b, 9, 3)?, &of_a));
    cache.truncate(b, 9)?;
    assert!(same(&run(&mut cache, b, 9, 3)?, &of_a));
    cache.remove(a)?;
    assert!(cache.len(a).is_err() && cache.memory().sequences == 1);
    let error = cache.step(&[(b, 1000)]).unwrap_err().to_string();
    assert!(error.contains("pages"), "{error}");
    assert_eq!(cache.len(b)?, 12);
    Ok(())
}
