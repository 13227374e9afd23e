//! Against burn's own attention, over tensors of every layout; and what is refused.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use burn::tensor::module::attention as of_burn;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, DType, Device, Tensor, TensorData};
use flashtile_burn::flashtile::{
    Attention, CacheDesc, CacheLayout, CacheShape, Codec, KvCache, KvCacheExt, QOffset,
};
use flashtile_burn::{Error, Options, attention, attention_with, attention_with_lse, step_attend};

fn tensor(shape: [usize; 4], seed: usize) -> Tensor<4> {
    let elements =
        (0..shape.iter().product()).map(|i: usize| ((i * 37 + seed * 101) % 61) as f32 / 24.0 - 1.2);
    Tensor::from_data(TensorData::new(elements.collect::<Vec<f32>>(), shape), &Device::flex())
}

/// True at every third element.
fn mask(shape: [usize; 4]) -> Tensor<4, Bool> {
    let elements = (0..shape.iter().product()).map(|i: usize| i % 3 == 1);
    Tensor::from_data(TensorData::new(elements.collect::<Vec<bool>>(), shape), &Device::flex())
}

fn elements<const D: usize>(of: Tensor<D>) -> Vec<f32> {
    of.into_data().convert::<f32>().try_to_vec().unwrap()
}

#[track_caller]
fn close(got: Tensor<4>, want: Tensor<4>, limit: f32) {
    assert_eq!((got.dims(), got.dtype()), (want.dims(), want.dtype()));
    let worst = elements(got).iter().zip(elements(want)).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst <= limit, "{worst}");
}

fn options(is_causal: bool, scale: Option<f64>, softcap: Option<f64>) -> AttentionModuleOptions {
    AttentionModuleOptions { scale, softcap, is_causal }
}

#[test]
fn it_is_burns_attention() {
    let (q, k, v) = (tensor([2, 4, 7, 24], 0), tensor([2, 4, 11, 24], 1), tensor([2, 4, 11, 40], 2));
    let masks = [None, Some([2, 4, 7, 11]), Some([2, 1, 7, 11]), Some([1, 4, 1, 11]), Some([2, 1, 7, 1])];
    let all = [options(false, None, None), options(true, None, None), options(true, Some(0.3), Some(2.0))];
    for of_mask in masks {
        for of_bias in masks {
            for options in all {
                let call = || (of_mask.map(mask), of_bias.map(|shape| tensor(shape, 3)));
                let ((hidden, bias), (of, and)) = (call(), call());
                let want = of_burn(q.clone(), k.clone(), v.clone(), hidden, bias, options);
                close(attention(q.clone(), k.clone(), v.clone(), of, and, options).unwrap(), want, 2e-6);
            }
        }
    }
}

#[test]
fn fewer_keys_than_queries_and_hidden_rows_are_burns() {
    let (q, kv) = (tensor([1, 2, 9, 16], 0), tensor([1, 2, 4, 16], 1));
    let causal = options(true, None, None);
    let want = of_burn(q.clone(), kv.clone(), kv.clone(), None, None, causal);
    let got = attention(q.clone(), kv.clone(), kv.clone(), None, None, causal).unwrap();
    assert!(elements(got.clone())[..5 * 16].iter().all(|&x| x == 0.0));
    close(got, want, 1e-6);
    let all = mask([1, 1, 1, 1]).bool_not();
    let got = attention(q, kv.clone(), kv, Some(all), None, options(false, None, None)).unwrap();
    assert!(elements(got).iter().all(|&x| x == 0.0));
}

#[test]
fn tensors_of_any_layout_are_read() {
    let want = |q: &Tensor<4>, kv: &Tensor<4>| {
        of_burn(q.clone(), kv.clone(), kv.clone(), None, None, options(false, None, None))
    };
    let (q, kv) = (tensor([2, 5, 3, 16], 0), tensor([2, 6, 3, 16], 1));
    let fused = tensor([2, 6, 3, 40], 2);
    let turned = tensor([2, 3, 16, 6], 3);
    let of_one = tensor([2, 1, 6, 16], 4);
    let q = q.swap_dims(1, 2);
    for kv in [
        kv.clone().swap_dims(1, 2),
        kv.clone().swap_dims(1, 2).flip([2]),
        fused.clone().narrow(3, 11, 16).swap_dims(1, 2),
        turned.swap_dims(2, 3),
        of_one.expand([2, 3, 6, 16]),
        fused.narrow(0, 1, 1).narrow(3, 20, 16).swap_dims(1, 2).expand([2, 3, 6, 16]),
    ] {
        close(
            attention_with(q.clone(), kv.clone(), kv.clone(), Attention::full()).unwrap(),
            want(&q, &kv),
            2e-6,
        );
    }
    // Masks and biases too.
    let kv = kv.swap_dims(1, 2);
    let hidden = mask([1, 1, 8, 12]).narrow(2, 3, 5).narrow(3, 4, 6);
    let columns = mask([1, 1, 6, 5]).swap_dims(2, 3);
    let rows = mask([2, 1, 5, 1]).expand([2, 3, 5, 6]);
    for hidden in [hidden, columns, rows] {
        let bias = Some(tensor([2, 3, 6, 5], 5).swap_dims(2, 3));
        let none = options(false, None, None);
        let want = of_burn(q.clone(), kv.clone(), kv.clone(), Some(hidden.clone()), bias.clone(), none);
        let got =
            attention(q.clone(), kv.clone(), kv.clone(), Some(hidden.clone()), bias.clone(), none).unwrap();
        close(got, want, 2e-6);
        let want = of_burn(q.clone(), kv.clone(), kv.clone(), Some(hidden.clone()), None, none);
        close(attention(q.clone(), kv.clone(), kv.clone(), Some(hidden), None, none).unwrap(), want, 2e-6);
    }
}

#[test]
fn halves_are_rounded_once() {
    let (q, kv) = (tensor([1, 4, 5, 32], 0), tensor([1, 4, 9, 32], 1));
    for (dtype, limit) in [(DType::F16, 1e-3), (DType::BF16, 8e-3)] {
        let [q, kv] = [&q, &kv].map(|x| x.clone().cast(dtype));
        let causal = options(true, None, None);
        let want = of_burn(q.clone(), kv.clone(), kv.clone(), None, None, causal);
        close(attention(q, kv.clone(), kv, None, None, causal).unwrap(), want, limit);
    }
}

#[test]
fn heads_of_a_group_are_not_repeated() {
    let (q, kv) = (tensor([1, 6, 5, 16], 0), tensor([1, 2, 5, 16], 1));
    let repeated = kv.clone().reshape([1, 2, 1, 5, 16]).expand([1, 2, 3, 5, 16]).reshape([1, 6, 5, 16]);
    let want = of_burn(q.clone(), repeated.clone(), repeated, None, None, options(true, None, None));
    close(attention_with(q, kv.clone(), kv, Attention::causal()).unwrap(), want, 2e-6);
}

#[test]
fn the_logsumexp_merges_a_window_with_the_rest() {
    let (q, kv) = (tensor([1, 2, 1, 16], 0), tensor([1, 2, 20, 16], 1));
    let part = |from, keys| {
        let kv = kv.clone().narrow(2, from, keys);
        attention_with_lse(q.clone(), kv.clone(), kv, Attention::full()).unwrap()
    };
    let (first, second) = (part(0, 13), part(13, 7));
    let share = |lse: &Tensor<3>| lse.clone().exp().reshape([1, 2, 1, 1]);
    let (a, b) = (share(&first.1), share(&second.1));
    let merged = (first.0 * a.clone() + second.0 * b.clone()) / (a + b);
    close(merged, attention_with(q.clone(), kv.clone(), kv, Attention::full()).unwrap(), 2e-6);
}

#[test]
fn a_quantized_cache_decodes() {
    let shape = CacheShape { layers: 1, kv_heads: 2, head_dim: 32, value_dim: 32 };
    let layout = CacheLayout::Paged { pages: 8, page_size: 16 };
    for (codec, limit) in [(Codec::F32, 2e-6), (Codec::Int8, 3e-2)] {
        let mut cache = KvCache::new(CacheDesc::new(layout, shape, codec)).unwrap();
        let sequence = cache.create().unwrap();
        let (q, kv) = (tensor([1, 4, 22, 32], 0), tensor([1, 2, 22, 32], 1));
        let window = Attention::causal().window(9, 0).q_offset(QOffset::BottomRight);
        let whole = attention_with(q.clone(), kv.clone(), kv.clone(), window).unwrap();
        for (from, tokens) in [(0, 20), (20, 1), (21, 1)] {
            let [q, kv, want] = [&q, &kv, &whole].map(|x| x.clone().narrow(2, from, tokens));
            let mut step = cache.step(&[(sequence, tokens)]).unwrap();
            close(step_attend(&mut step, 0, [q, kv.clone(), kv], window).unwrap(), want, limit);
            step.finish().unwrap();
        }
    }
}

#[test]
fn what_is_refused() {
    let x = tensor([1, 2, 5, 16], 0);
    let call =
        |q: Tensor<4>, options: Options<'_>| attention_with(q, x.clone(), x.clone(), options).unwrap_err();
    let full = || Options::from(Attention::full());
    let said = call(x.clone().cast(DType::F64), full()).to_string();
    assert_eq!(said, "q is F64, expected F32, F16 or BF16");
    // A gradient would be lost without a word.
    let tracked = Tensor::<4>::ones([1, 2, 5, 16], &Device::flex().autodiff());
    let error = call(tracked.clone(), full());
    assert!(matches!(&error, Error::Backend { tensor: "q", .. }), "{error}");
    let error = attention(x.clone(), x.clone(), x.clone(), None, Some(tracked), options(false, None, None))
        .unwrap_err();
    assert!(matches!(&error, Error::Backend { tensor: "attn_bias", .. }), "{error}");

    let error = call(tensor([1, 3, 5, 16], 0), full());
    assert!(matches!(&error, Error::Flashtile(_)), "{error}");
    let mut both = full();
    (both.hidden, both.bias) = (Some(mask([1, 1, 5, 4])), Some(tensor([1, 1, 5, 5], 0)));
    assert!(call(x.clone(), both).to_string().contains("[1, 1, 5, 4]"));
    let mut narrow = full();
    narrow.hidden = Some(mask([1, 1, 5, 4]));
    assert!(call(x.clone(), narrow).to_string().contains("[1, 1, 5, 4]"));
    let bits = [true; 25];
    let mut twice = Options::from(
        Attention::full().mask(flashtile_burn::flashtile::MaskView::dense_bool(&bits, [5, 5]).unwrap()),
    );
    twice.hidden = Some(mask([1, 1, 5, 5]));
    assert!(matches!(call(x.clone(), twice), Error::TwoMasks));
    let soft = attention(x.clone(), x.clone(), x, None, None, options(false, None, Some(-1.0))).unwrap_err();
    assert!(soft.to_string().contains("softcap"), "{soft}");
}
