//! flashtile-candle over candle's Metal tensors, on the device that candle itself opens: none of candle's own kernels run, whose source the
//! software device does not compile. Copies, encoders, fences and memory are candle's.
#![cfg(metal_standin)]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use candle_core::{DType, Device, Result, Tensor, Var};
use flashtile_candle::flashtile::{BlockTables, CacheDesc, CacheLayout, CacheShape, Codec, QOffset};
use flashtile_candle::{
    KvCache, Mask, Options, TensorLayout, attention, flash_attn, flash_attn_alibi, flash_attn_varlen,
    flash_attn_windowed, gradients_of, sdpa,
};
use flashtile_metal_standin::{Control, Order, Timing, control};
use objc2::rc::autoreleasepool;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One test at a time: all devices of candle are of the system's one device.
static ALONE: Mutex<()> = Mutex::new(());

/// A new device of candle, which runs what nothing orders in random order, and what keeps other tests off it.
fn device(seed: u64) -> (Device, Control, MutexGuard<'static, ()>) {
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    flashtile_metal_standin::install();
    let device = Device::new_metal(0).unwrap();
    let control = control(device.as_metal_device().unwrap().metal_device().as_ref());
    control.set_timing(Timing::Immediate);
    control.set_order(Order::Random(seed));
    (device, control, alone)
}

/// Elements from -1 to 1 that differ from seed to seed.
fn tensor(shape: &[usize], seed: usize, dtype: DType) -> Tensor {
    let values = (0..shape.iter().product()).map(|n: usize| ((n * 7 + seed * 5) % 17) as f32 / 8.0 - 1.0);
    Tensor::from_iter(values, &Device::Cpu).unwrap().reshape(shape).unwrap().to_dtype(dtype).unwrap()
}

/// q, k and v `(batch, seq, heads, dim)`.
fn tensors(dtype: DType) -> [Tensor; 3] {
    let kv = |seed| tensor(&[2, 40, 2, 64], seed, dtype);
    [tensor(&[2, 33, 8, 64], 1, dtype), kv(2), kv(3)]
}

/// The largest difference of a tensor on a device from one on the CPU.
fn distance(expected: &Tensor, got: &Tensor) -> f32 {
    assert!(got.device().is_metal());
    assert_eq!((expected.dims(), expected.dtype()), (got.dims(), got.dtype()));
    let list = |of: &Tensor| {
        let of = of.to_device(&Device::Cpu)?.flatten_all()?.to_dtype(DType::F32)?;
        of.to_vec1::<f32>()
    };
    let (expected, got) = (list(expected).unwrap(), list(got).unwrap());
    let far = expected.iter().zip(got).map(|(a, b)| if *a == b { 0.0 } else { (a - b).abs() });
    far.fold(0.0, |max, far| if far > max || far.is_nan() { far } else { max })
}

/// In half precision, results are rounded once, and probabilities are.
fn tolerance(dtype: DType) -> f32 {
    match dtype {
        DType::F32 => 4e-6,
        DType::F16 => 4.0 * 2f32.powi(-11),
        _ => 4.0 * 2f32.powi(-8),
    }
}

/// Compares a function of tensors on a device with the same on the CPU.
fn compare<const N: usize>(
    device: &Device,
    here: &[Tensor; N],
    name: &str,
    run: impl Fn(&[Tensor; N]) -> Result<Tensor>,
) {
    let there = here.each_ref().map(|tensor| tensor.to_device(device).unwrap());
    let (expected, got) = (run(here).unwrap(), run(&there).unwrap_or_else(|error| panic!("{name}: {error}")));
    let far = distance(&expected, &got);
    assert!(far <= tolerance(expected.dtype()), "{name}: {far}");
}

#[test]
fn functions_give_what_they_give_on_the_cpu() {
    autoreleasepool(|_| {
        let (device, control, _alone) = device(1);
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let qkv = &tensors(dtype);
            compare(&device, qkv, "full", |[q, k, v]| flash_attn(q, k, v, 0.125, false));
            compare(&device, qkv, "causal", |[q, k, v]| flash_attn(q, k, v, 0.125, true));
            compare(&device, qkv, "window", |[q, k, v]| {
                flash_attn_windowed(q, k, v, 0.125, Some(9), Some(2))
            });
        }
        let [q, k, v] = tensors(DType::F32);
        let slopes = tensor(&[8], 4, DType::F32).abs().unwrap();
        compare(&device, &[q.clone(), k.clone(), v.clone(), slopes], "alibi", |[q, k, v, slopes]| {
            flash_attn_alibi(q, k, v, slopes, 0.125, true)
        });
        let mask = tensor(&[2, 1, 33, 40], 5, DType::F16);
        compare(&device, &[q, k, v, mask], "mask, softcap", |[q, k, v, mask]| {
            let [q, k, v] = [q, k, v].map(|x| x.transpose(1, 2).unwrap());
            sdpa(&q, &k, &v, Some(mask), true, 0.125, 3.0)
        });
        assert_eq!(control.take_violations(), [""; 0]);
    });
}

#[test]
fn views_are_read_in_place_and_the_logsumexp_is_given() {
    autoreleasepool(|_| {
        let (device, control, _alone) = device(2);
        // q, k and v inside one projection, whose first rows are left out.
        compare(&device, &[tensor(&[2, 40, 3, 8, 64], 1, DType::F16)], "projection", |[all]| {
            let part = |n| all.narrow(1, 7, 33)?.narrow(2, n, 1)?.squeeze(2);
            flash_attn(&part(0)?, &part(1)?, &part(2)?, 0.125, true)
        });
        let [q, k, v] = tensors(DType::F32);
        let visible = Tensor::from_iter((0..33 * 40).map(|n| u8::from(n % 3 > 0)), &Device::Cpu).unwrap();
        let of = [q, k, v, visible.reshape((33, 40)).unwrap(), tensor(&[8], 6, DType::F32)];
        for at in 0..2 {
            compare(&device, &of, "visible keys, sinks, lse", |[q, k, v, visible, sinks]| {
                let options = Options::full().layout(TensorLayout::Bshd).q_offset(QOffset::BottomRight);
                let options = options.mask(Mask::Visible(visible.clone())).sinks(sinks).lse();
                let (out, lse) = attention(q, k, v, &options)?;
                Ok(if at == 0 { out } else { lse.unwrap() })
            });
        }
        assert_eq!(control.take_violations(), [""; 0]);
    });
}

#[test]
fn packed_and_paged_sequences() {
    autoreleasepool(|_| {
        let (device, control, _alone) = device(3);
        let ends = |of: &[u32]| Tensor::new(of, &Device::Cpu).unwrap();
        let kv = |seed| tensor(&[60, 2, 64], seed, DType::F16);
        let of = [tensor(&[30, 8, 64], 1, DType::F16), kv(2), kv(3), ends(&[0, 9, 30]), ends(&[0, 25, 60])];
        compare(&device, &of, "packed", |[q, k, v, q_ends, k_ends]| {
            flash_attn_varlen(q, k, v, q_ends, k_ends, 21, 35, 0.125, true)
        });
        let tables = BlockTables {
            table: vec![3, 1, 0, 4],
            width: 2,
            page_size: 16,
            lens: vec![20, 30],
            first: vec![0, 0],
            wraps: false,
        };
        let pool = |seed| tensor(&[5, 2, 16, 64], seed, DType::F16);
        let of = [tensor(&[7, 8, 64], 1, DType::F16), pool(2), pool(3)];
        compare(&device, &of, "paged", |[q, k, v]| {
            let options = Options::decode().paged(&[0, 1, 7], tables.clone());
            Ok(attention(q, k, v, &options)?.0)
        });
        assert_eq!(control.take_violations(), [""; 0]);
    });
}

/// Gradients of q, k and v on the CPU, by candle's `backward()` of `sum(out * d_out)`.
fn gradients_here(qkv: &[Tensor; 3], d_out: &Tensor, options: &Options) -> Result<[Tensor; 3]> {
    let vars = [Var::from_tensor(&qkv[0])?, Var::from_tensor(&qkv[1])?, Var::from_tensor(&qkv[2])?];
    let [q, k, v] = vars.each_ref().map(Var::as_tensor);
    let store = (attention(q, k, v, options)?.0 * d_out)?.sum_all()?.backward()?;
    Ok(vars.each_ref().map(|var| store.get(var.as_tensor()).unwrap().clone()))
}

/// Compares gradients on a device with those on the CPU, and with a second run; `options` puts its tensors where a function does.
fn compare_gradients(seed: u64, dtype: DType, options: impl Fn(&dyn Fn(&Tensor) -> Tensor) -> Options) {
    let (device, control, _alone) = device(seed);
    let there = |x: &Tensor| x.to_device(&device).unwrap();
    let (qkv, d_out) = (tensors(dtype), tensor(&[2, 33, 8, 64], 5, dtype));
    let want = gradients_here(&qkv, &d_out, &options(&Tensor::clone).layout(TensorLayout::Bshd)).unwrap();
    let options = options(&there).layout(TensorLayout::Bshd);
    let [q, k, v] = &qkv.each_ref().map(there);
    let (out, lse) = attention(q, k, v, &options.clone().lse()).unwrap();
    let results = [&out, &lse.unwrap(), &there(&d_out)];
    let got = gradients_of([q, k, v], results, &options).unwrap();
    for (want, got) in want.iter().zip(&got) {
        let largest = want.to_dtype(DType::F32).unwrap().abs().unwrap().max_all().unwrap();
        let (far, largest) = (distance(want, got), largest.to_scalar::<f32>().unwrap());
        assert!(largest > 0.0 && far <= 4.0 * tolerance(dtype) * largest, "{seed}: {far} of {largest}");
    }
    let first = got.map(|gradient| gradient.to_device(&Device::Cpu).unwrap());
    // Late: what runs before somebody waits for it would be seen.
    control.set_timing(Timing::LATE);
    let before = control.counters();
    let again = gradients_of([q, k, v], results, &options).unwrap();
    let after = control.counters();
    assert_eq!((after.dispatches, after.pipelines), (before.dispatches, before.pipelines), "{seed}");
    for (first, again) in first.iter().zip(&again) {
        assert_eq!(distance(first, again), 0.0, "{seed}");
    }
    assert_eq!(control.take_violations(), [""; 0]);
}

// Each on a device of its own: kernels reach 31 buffers on the software device, those included that candle keeps.
#[test]
fn gradients_are_those_on_the_cpu() {
    autoreleasepool(|_| compare_gradients(11, DType::F32, |_| Options::decode().softcap(3.0)));
    autoreleasepool(|_| {
        compare_gradients(12, DType::F32, |on| {
            let visible = Tensor::from_iter((0..33 * 40).map(|n| u8::from(n % 3 > 0)), &Device::Cpu);
            let mask = Mask::Visible(on(&visible.unwrap().reshape((33, 40)).unwrap()));
            Options::full().mask(mask).sinks(&on(&tensor(&[8], 6, DType::F32))).kv_lens(&[40, 21])
        });
    });
    autoreleasepool(|_| {
        compare_gradients(13, DType::F16, |on| {
            Options::decode().alibi(&on(&tensor(&[8], 4, DType::F32).abs().unwrap()))
        });
    });
    autoreleasepool(|_| compare_gradients(14, DType::BF16, |_| Options::decode().window(9, 0)));
}

#[test]
fn variables_keep_a_logsumexp_on_the_device() {
    autoreleasepool(|_| {
        let (device, control, _alone) = device(15);
        let here = tensors(DType::F32);
        let [q, k, v] = &here.each_ref().map(|x| x.to_device(&device).unwrap());
        let var = Var::from_tensor(q).unwrap();
        let out = flash_attn(var.as_tensor(), k, v, 0.125, true).unwrap();
        assert!(out.track_op());
        assert!(distance(&flash_attn(&here[0], &here[1], &here[2], 0.125, true).unwrap(), &out) < 4e-6);
        let of_lse = attention(var.as_tensor(), k, v, &Options::full().layout(TensorLayout::Bshd).lse());
        assert!(of_lse.unwrap_err().to_string().starts_with("q is a variable"));
        let mask = Var::from_tensor(&tensor(&[33, 40], 4, DType::F32).to_device(&device).unwrap()).unwrap();
        let options =
            Options::full().layout(TensorLayout::Bshd).mask(Mask::Additive(mask.as_tensor().clone()));
        assert!(attention(q, k, v, &options).unwrap_err().to_string().starts_with("mask is a variable"));
        assert_eq!(control.take_violations(), [""; 0]);
    });
}

/// Attention over what attention has given, with copies of candle's between, in memory that is used again and again; on every encoder
/// anew where `copies`.
fn chain([q, k, v]: &[Tensor; 3], rounds: usize, copies: bool) -> Result<Tensor> {
    let mut x = q.clone();
    for _ in 0..rounds {
        let next = flash_attn(&x, k, v, 0.125, true)?;
        // Launches may still read the tensor that is dropped here.
        x = if copies { next.copy()? } else { next };
    }
    Ok(x)
}

#[test]
fn launches_follow_candles_own_work_and_nothing_waits() {
    autoreleasepool(|_| {
        let (device, control, _alone) = device(4);
        // Late: what runs before somebody waits for it would be seen.
        control.set_timing(Timing::LATE);
        let there = tensors(DType::F32).map(|tensor| tensor.to_device(&device).unwrap());
        flash_attn(&there[0], &there[1], &there[2], 0.125, true).unwrap();
        device.synchronize().unwrap();
        let before = control.counters();
        let out = chain(&there, 6, false).unwrap();
        let after = control.counters();
        assert_eq!((after.dispatches, after.pipelines), (before.dispatches, before.pipelines));
        assert!(distance(&chain(&tensors(DType::F32), 6, false).unwrap(), &out) < 4e-6);
        assert!(control.counters().dispatches >= before.dispatches + 6);
        for (seed, copies) in [(5, false), (6, true), (7, true)] {
            control.set_timing(Timing::Immediate);
            control.set_order(Order::Random(seed));
            // More launches than one of candle's command buffers has.
            compare(&device, &tensors(DType::F32), "chain", |of| chain(of, 60, copies));
        }
        assert_eq!(control.take_violations(), [""; 0]);
    });
}

#[test]
fn numbers_of_sequences_are_written_between_launches_that_read_them() {
    autoreleasepool(|_| {
        let (device, control, _alone) = device(10);
        control.set_timing(Timing::LATE);
        let here = tensors(DType::F32);
        let there = here.each_ref().map(|tensor| tensor.to_device(&device).unwrap());
        // One plan and its memory serve all of them.
        let attend = |[q, k, v]: &[Tensor; 3], len: usize| {
            let options = Options::full().layout(TensorLayout::Bshd).kv_lens(&[len, 40 - len]);
            attention(q, k, v, &options).unwrap().0
        };
        attend(&there, 4);
        device.synchronize().unwrap();
        let before = control.counters().dispatches;
        // Few enough that all buffers of candle are resident: kernels reach 31 on the software device.
        let outs: Vec<Tensor> = (5..11).map(|len| attend(&there, len)).collect();
        assert_eq!(control.counters().dispatches, before, "something waited");
        for (len, out) in (5..11).zip(outs) {
            assert!(distance(&attend(&here, len), &out) < 4e-6, "{len}");
        }
        assert_eq!(control.take_violations(), [""; 0]);
    });
}

#[test]
fn threads_share_a_device() {
    let (device, control, _alone) = autoreleasepool(|_| device(8));
    std::thread::scope(|scope| {
        for rounds in 1..3 {
            let device = &device;
            scope.spawn(move || {
                autoreleasepool(|_| {
                    compare(device, &tensors(DType::F32), "thread", |of| chain(of, rounds, rounds == 2));
                });
            });
        }
    });
    assert_eq!(control.take_violations(), [""; 0]);
}

#[test]
fn what_is_wrong_is_refused() {
    autoreleasepool(|_| {
        let (device, control, _alone) = device(9);
        let here = tensors(DType::F32);
        let [q, k, v] = &here.each_ref().map(|tensor| tensor.to_device(&device).unwrap());
        let said = |result: Result<Tensor>| {
            result.unwrap_err().to_string().lines().next().unwrap_or_default().to_owned()
        };
        let attend = |q, k, v| said(flash_attn(q, k, v, 0.125, true));
        let on_cpu = attend(q, &here[1], v);
        assert!(on_cpu.starts_with("k is on Cpu, and q, k or v on Metal"), "{on_cpu}");
        let other = v.to_device(&Device::Cpu).unwrap().to_device(&Device::new_metal(0).unwrap()).unwrap();
        let elsewhere = attend(q, k, &other);
        assert!(elsewhere.starts_with("v is on another candle device of Metal"), "{elsewhere}");
        let half = tensors(DType::F16)[1].to_device(&device).unwrap();
        assert!(attend(q, &half, v).contains("k is f16, expected f32"));
        let short = &k.narrow(1, 0, 39).unwrap();
        assert_eq!(attend(q, k, short), "v has shape [2, 39, 2, 64], expected [2, 40, 2, 64]");
        let turned = &k.transpose(1, 3).unwrap();
        assert!(attend(q, turned, v).contains("call contiguous() on it"));
        let shape = CacheShape { layers: 1, kv_heads: 2, head_dim: 64, value_dim: 64 };
        let layout = CacheLayout::Paged { pages: 4, page_size: 16 };
        let mut cache = KvCache::new(CacheDesc::new(layout, shape, Codec::Int8)).unwrap();
        let seq = cache.create().unwrap();
        let row = &k.narrow(0, 0, 1).unwrap().squeeze(0).unwrap();
        let refused = said(cache.step(&[(seq, 40)]).unwrap().attend(0, row, row, row));
        assert!(refused.starts_with("q is on Metal"), "{refused}");
        assert_eq!(control.take_violations(), [""; 0]);
    });
}
