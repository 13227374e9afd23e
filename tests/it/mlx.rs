//! The format of mlx-native: bytes, against its tables and a scalar f64 encoder and decoder; attention over its
//! caches.

use crate::support::quantizing;
use flashtile::codec::{CodePages, PagesError, Side};
use flashtile::quality::{Quality, quality};
use flashtile::{
    BlockTables, CacheDesc, CacheLayout, CacheShape, Codec, Cpu, Dtype, HeadShape, Inputs, KvCache, KvView,
    Outputs, PlanOptions, ProblemDesc, SeqId, SeqLens, TensorView, Visibility,
};
use flashtile_testkit::{Guarded, Layout, MlxRows, MlxStep, Rng, mlx_decode, mlx_encode};
use half::f16;

const CODECS: [Codec; 7] = [
    Codec::MlxTq4,
    Codec::MlxTq5,
    Codec::MlxTq6,
    Codec::MlxTq8,
    Codec::MlxTq5Plain,
    Codec::MlxTq6Plain,
    Codec::MlxTq8Plain,
];

fn normal(seed: u64, count: usize) -> Vec<f32> {
    let mut rng = Rng::new(seed);
    (0..count).map(|_| rng.normal()).collect()
}

/// Bytes of a row's codes.
fn code_bytes(codec: Codec, dim: usize) -> usize {
    if codec == Codec::MlxTq4 { dim / 2 } else { dim }
}

/// Codes and norms of rows `[rows, dim]` as this library encodes them.
fn written(codec: Codec, dim: usize, x: &[f32]) -> (Vec<u8>, Vec<f32>) {
    let rows = x.len() / dim;
    let mut pages = CodePages::new(codec, Side::Values, [1, 1, rows, dim]).unwrap();
    for (row, x) in x.chunks(dim).enumerate() {
        pages.store([0, 0, row], x).unwrap();
    }
    let (mut codes, mut norms) = (vec![0; rows * code_bytes(codec, dim)], vec![f32::NAN; rows * dim / 256]);
    pages.to_mlx(&mut codes, &mut norms).unwrap();
    (codes, norms)
}

/// FNV-1a.
fn digest(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// Digests computed independently of this library, from the tables and signs in the source of mlx-native 0.15.16. No
/// coordinate of these vectors is closer than 7e-5 to an edge.
#[test]
fn bytes_of_known_vectors() {
    let vector = |dim: u64, p: u64| -> Vec<f32> {
        (0..dim).map(|i| (((i * i * p + i * 37 + 11) % 97) as f32 - 48.0) / 16.0).collect()
    };
    let whole = vector(256, 48);
    let halves = vector(512, 51);
    for (codec, of_256, of_512) in [
        (Codec::MlxTq4, 0xdb4e_e7ff_1b3b_a29d, 0x1b50_5e78_f02d_b498),
        (Codec::MlxTq5, 0x9607_ac6b_4373_7258, 0x69ca_695c_79c7_dc8a),
        (Codec::MlxTq6, 0x0454_c2bc_5107_a732, 0xb2be_7009_07b1_838b),
        (Codec::MlxTq8, 0x9aa8_363a_21d7_7fb0, 0xa77c_2e90_f2e7_f123),
        (Codec::MlxTq5Plain, 0x6909_0a2a_8adb_5d06, 0xca4e_0c3f_c237_195d),
        (Codec::MlxTq6Plain, 0x9c28_9995_a8d6_5e48, 0x723a_0326_f0ba_66da),
        (Codec::MlxTq8Plain, 0xad3d_75c4_608c_9172, 0x1e6a_b7b0_1c85_04a5),
    ] {
        for (x, want) in [(&whole, of_256), (&halves, of_512)] {
            let (codes, _) = written(codec, x.len(), x);
            assert_eq!(digest(&codes), want, "{codec} of {}: {:02x?}", x.len(), &codes[..8]);
        }
    }
    let close = |got: &[f32], want: &[f64]| {
        assert_eq!(got.len(), want.len());
        got.iter().zip(want).for_each(|(a, b)| assert!((f64::from(*a) / b - 1.0).abs() < 3e-7, "{a} {b}"));
    };
    close(&written(Codec::MlxTq8, 256, &whole).1, &[27.555200280527814]);
    close(&written(Codec::MlxTq8, 512, &halves).1, &[1.955348343900926, 1.7502332259487146]);
    close(&written(Codec::MlxTq8Plain, 512, &halves).1, &[1.8577288866276849, 1.8535228282921146]);
}

#[test]
fn bytes_are_those_of_the_scalar_encoder() {
    for codec in CODECS {
        for dim in [256, 512] {
            let mut rng = Rng::new(dim as u64);
            let (mut near, mut all) = (0, 0);
            for n in 0..60 {
                let gain = 10f32.powi(n % 9 - 6);
                let mut x: Vec<f32> = (0..dim).map(|_| gain * rng.normal()).collect();
                if n % 4 == 0 {
                    x[n as usize] = 30.0 * gain;
                }
                let (codes, norms) = written(codec, dim, &x);
                let want = mlx_encode(codec, &x);
                for (got, want) in norms.iter().zip(&want.norms) {
                    assert!(
                        (f64::from(*got) / want - 1.0).abs() < 1e-6,
                        "{codec} of {dim}: {got}, not {want}"
                    );
                }
                let index = |codes: &[u8], d: usize| match codec {
                    Codec::MlxTq4 => i32::from(codes[d / 2] >> (4 * (d % 2)) & 15),
                    _ => i32::from(codes[d]),
                };
                for (d, margin) in want.margins.iter().enumerate() {
                    let difference = index(&codes, d).abs_diff(index(&want.codes, d));
                    let allowed = u32::from(*margin < 1e-5);
                    assert!(difference <= allowed, "{codec} of {dim}, {d}: {difference} at {margin:e}");
                    near += difference;
                    all += 1;
                }
            }
            println!("{codec} of {dim}: {near} of {all} codes beyond an edge at less than 1e-5");
        }
    }
}

#[test]
fn errors_are_those_of_the_shipped_tables() {
    for (codec, want) in [
        (Codec::MlxTq4, 9.50101e-3),
        (Codec::MlxTq5, 2.50467e-3),
        (Codec::MlxTq6, 6.486e-4),
        (Codec::MlxTq8, 6.274e-5),
        (Codec::MlxTq5Plain, 2.50467e-3),
        (Codec::MlxTq6Plain, 6.486e-4),
        (Codec::MlxTq8Plain, 6.274e-5),
    ] {
        for dim in [256, 512] {
            let x = normal(9, 2000 * dim);
            let mut pages = CodePages::new(codec, Side::Keys, [1, 1, 1, dim]).unwrap();
            let (mut error, mut energy, mut back) = (0.0f64, 0.0f64, vec![0.0; dim]);
            for x in x.chunks(dim) {
                pages.store([0, 0, 0], x).unwrap();
                pages.view().read(0, 0, 0, &mut back);
                error += x.iter().zip(&back).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
                energy += x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
            }
            println!("{codec} of {dim}: {:.4e}, of the table {want:.4e}", error / energy);
            assert!((error / energy / want - 1.0).abs() < 0.02, "{codec} of {dim}: {}", error / energy);
        }
    }
}

#[test]
fn zeros_and_norms_that_are_nearly_zero() {
    for (codec, middle) in [
        (Codec::MlxTq4, 0x77),
        (Codec::MlxTq5, 15),
        (Codec::MlxTq6, 31),
        (Codec::MlxTq8, 127),
        (Codec::MlxTq8Plain, 127),
    ] {
        for dim in [256, 512] {
            for (size, is_zero) in [(0.0f32, true), (-0.0, true), (1e-30, true), (1e-12, false)] {
                let mut x = vec![0.0f32; dim];
                (x[3], x[dim - 1]) = (size, size);
                let (codes, norms) = written(codec, dim, &x);
                assert!(codes.iter().all(|code| *code == middle), "{codec} of {dim}, {size}");
                assert!(norms.iter().all(|norm| (*norm == 0.0) == is_zero && *norm <= 1e-10), "{norms:?}");
                let pages = CodePages::from_mlx(codec, [1, 1, 1, dim], &codes, &norms).unwrap();
                let mut back = vec![f32::NAN; dim];
                pages.view().read(0, 0, 0, &mut back);
                assert!(back.iter().all(|x| x.abs() <= 1e-10 && (*x == 0.0 || !is_zero)));
            }
            // Half of a vector may be zero.
            let mut x = normal(4, dim);
            x[dim / 2..].fill(0.0);
            if codec == Codec::MlxTq8Plain && dim == 512 {
                let (codes, norms) = written(codec, dim, &x);
                assert!(norms[0] > 0.0 && norms[1] == 0.0 && codes[256..].iter().all(|code| *code == middle));
            }
        }
    }
}

/// A slot of `tokens` tokens from the scalar encoder, `[kv_heads, capacity, ..]`; rows without a token hold large
/// values.
struct Slot {
    codes: Vec<u8>,
    norms: Vec<f32>,
}

fn slot(codec: Codec, [kv_heads, capacity, dim]: [usize; 3], tokens: usize, seed: u64) -> Slot {
    let (bytes, scales) = (code_bytes(codec, dim), dim / 256);
    let mut slot = Slot {
        codes: vec![0xFF; kv_heads * capacity * bytes],
        norms: vec![1e30; kv_heads * capacity * scales],
    };
    let x = normal(seed, kv_heads * tokens * dim);
    for (at, x) in x.chunks(dim).enumerate() {
        // Only the last tokens are kept.
        let (head, token) = (at / tokens, at % tokens);
        if token + capacity < tokens {
            continue;
        }
        let row = head * capacity + token % capacity;
        let of = mlx_encode(codec, x);
        slot.codes[row * bytes..][..bytes].copy_from_slice(&of.codes);
        slot.norms[row * scales..][..scales]
            .iter_mut()
            .zip(of.norms)
            .for_each(|(to, norm)| *to = norm as f32);
    }
    slot
}

/// One step over a slot, on every instruction set.
fn attend(
    q: &[f32],
    (k, v): (KvView<'_>, KvView<'_>),
    tokens: usize,
    window: Option<usize>,
) -> Vec<(String, Vec<f32>)> {
    let [_, kv_heads, capacity, dim] = k.shape();
    let shape = HeadShape { q_heads: q.len() / dim, kv_heads, head_dim: dim, value_dim: dim };
    let mut desc = ProblemDesc::cached(shape, Dtype::F32, &[SeqLens::decode(tokens)]);
    (desc.k_codec, desc.v_codec) = (Some(k.codec()), Some(v.codec()));
    let seen = window.unwrap_or(tokens).min(capacity);
    desc.visibility = Visibility::causal().and(Visibility::window(Some(seen - 1), None));
    let problem = desc.validate().unwrap();
    let tables = BlockTables {
        table: vec![0],
        width: 1,
        page_size: capacity,
        wraps: tokens > capacity,
        lens: vec![tokens],
        first: vec![tokens.saturating_sub(capacity)],
    };
    let q = TensorView::packed::<f32>(q, [1, shape.q_heads, dim]).unwrap();
    let inputs = Inputs::paged_kv(q, k, v, &tables);
    let run = |cpu: &Cpu| {
        let plan = cpu.plan(&problem, PlanOptions::default()).unwrap();
        let mut out = Guarded::new(Dtype::F32, [1, shape.q_heads, 1, dim], Layout::Bhsd);
        cpu.run(&plan, &inputs, &mut Outputs::new(out.view_mut()), &mut plan.workspace()).unwrap();
        (plan.kernel().to_owned(), out.values())
    };
    quantizing(1).iter().map(|runner| run(&runner.cpu)).collect()
}

fn nrmse(got: &[f32], want: &[f64]) -> f64 {
    let error: f64 = got.iter().zip(want).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum();
    (error / want.iter().map(|x| x * x).sum::<f64>()).sqrt()
}

#[test]
fn attention_over_its_caches_is_its_own() {
    // Capacity, tokens so far, window.
    let caches =
        [(70, 37, None), (64, 64, Some(20)), (33, 100, Some(20)), (33, 50, None), (300, 290, Some(400))];
    let mut worst = 0.0f64;
    for (n, codec) in CODECS.into_iter().enumerate() {
        for dim in [256, 512] {
            for (m, (capacity, tokens, window)) in caches.into_iter().enumerate() {
                let [q_heads, kv_heads] = [[8, 2], [4, 4], [6, 1]][(n + m) % 3];
                let shape = [kv_heads, capacity, dim];
                let [k, v] = [1, 2].map(|seed| slot(codec, shape, tokens, seed));
                let q = normal(3, q_heads * dim);
                let pages = |slot: &Slot| {
                    CodePages::from_mlx(codec, [1, kv_heads, capacity, dim], &slot.codes, &slot.norms)
                        .unwrap()
                };
                let (k_pages, v_pages) = (pages(&k), pages(&v));
                let want = mlx_decode(&MlxStep {
                    q: &q,
                    k: MlxRows::Codes(codec, &k.codes, &k.norms),
                    v: MlxRows::Codes(codec, &v.codes, &v.norms),
                    shape,
                    kv_len: tokens.min(capacity),
                    ring_start: if tokens > capacity { tokens % capacity } else { 0 },
                    window,
                    scale: (1.0 / (dim as f64).sqrt()) as f32,
                });
                let views = (KvView::Codes(k_pages.view()), KvView::Codes(v_pages.view()));
                for (kernel, got) in attend(&q, views, tokens, window) {
                    let error = nrmse(&got, &want);
                    assert!(error <= 2e-6, "{kernel}, {capacity} {tokens} {window:?}: {error:e}");
                    worst = worst.max(error);
                }
            }
        }
    }
    println!("worst nrmse {worst:.2e}");
}

#[test]
fn attention_over_hybrid_caches() {
    for (codec, dim) in [(Codec::MlxTq8Plain, 256), (Codec::MlxTq5Plain, 512), (Codec::MlxTq6, 256)] {
        let (capacity, tokens, kv_heads) = (48, 100, 2);
        let shape = [kv_heads, capacity, dim];
        let k: Vec<f16> = normal(1, kv_heads * capacity * dim).into_iter().map(f16::from_f32).collect();
        let wide: Vec<f32> = k.iter().map(|x| x.to_f32()).collect();
        let v = slot(codec, shape, tokens, 2);
        let pages = CodePages::from_mlx(codec, [1, kv_heads, capacity, dim], &v.codes, &v.norms).unwrap();
        let q = normal(3, 8 * dim);
        let want = mlx_decode(&MlxStep {
            q: &q,
            k: MlxRows::Elements(&wide),
            v: MlxRows::Codes(codec, &v.codes, &v.norms),
            shape,
            kv_len: capacity,
            ring_start: tokens % capacity,
            window: Some(31),
            scale: (1.0 / (dim as f64).sqrt()) as f32,
        });
        let k = TensorView::bhsd::<f16>(&k, [1, kv_heads, capacity, dim]).unwrap();
        for (kernel, got) in attend(&q, (k.into(), KvView::Codes(pages.view())), tokens, Some(31)) {
            assert!(nrmse(&got, &want) <= 2e-6, "{kernel}: {:e}", nrmse(&got, &want));
        }
    }
}

/// The definition orders rows by age, and sees nothing where no row is left.
#[test]
fn the_scalar_decoder_sees_what_its_kernels_see() {
    let (codec, shape) = (Codec::MlxTq8, [1, 5, 256]);
    let [k, v] = [1, 2].map(|seed| slot(codec, shape, 5, seed));
    let q = normal(3, 256);
    let step = |kv_len, ring_start, window| {
        let k = MlxRows::Codes(codec, &k.codes, &k.norms);
        let v = MlxRows::Codes(codec, &v.codes, &v.norms);
        mlx_decode(&MlxStep { q: &q, k, v, shape, kv_len, ring_start, window, scale: 1.0 })
    };
    let value = |row: usize| {
        let mut x = vec![0.0; 256];
        let pages = CodePages::from_mlx(codec, [1, 1, 5, 256], &v.codes, &v.norms).unwrap();
        pages.view().read(0, 0, row, &mut x);
        x
    };
    // Only the newest token: the row before the oldest one.
    for (ring_start, newest) in [(0, 4), (3, 2), (1, 0)] {
        assert!(nrmse(&value(newest), &step(5, ring_start, Some(1))) < 1e-6);
    }
    assert!(nrmse(&value(1), &step(2, 0, Some(1))) < 1e-6);
    // Rows 0 and 1 are stale: older than both tokens that count.
    assert!(step(2, 2, None).iter().all(|x| *x == 0.0));
    assert_eq!(step(5, 2, Some(9)), step(5, 2, None));
}

#[test]
fn buffers_come_back_and_others_are_refused() {
    for codec in CODECS {
        for dim in [256, 512] {
            let shape = [3, 2, 9, dim];
            let (bytes, scales) = (code_bytes(codec, dim), dim / 256);
            let mut rng = Rng::new(8);
            let codes: Vec<u8> = (0..54 * bytes).map(|_| rng.below(256) as u8).collect();
            let mut norms: Vec<f32> = (0..54 * scales).map(|_| rng.normal().abs()).collect();
            let pages = CodePages::from_mlx(codec, shape, &codes, &norms).unwrap();
            let (mut codes_back, mut norms_back) = (vec![0; codes.len()], vec![0.0; norms.len()]);
            pages.to_mlx(&mut codes_back, &mut norms_back).unwrap();
            assert!(codes_back == codes && norms_back == norms, "{codec} of {dim}");
            // Slots, heads and rows keep their order.
            let mut x = vec![0.0; dim];
            pages.view().read(2, 1, 4, &mut x);
            let at = (2 * 2 + 1) * 9 + 4;
            let (codes_of, norms_of) = (&codes[at * bytes..][..bytes], &norms[at * scales..][..scales]);
            let one = CodePages::from_mlx(codec, [1, 1, 1, dim], codes_of, norms_of).unwrap();
            let mut alone = vec![0.0; dim];
            one.view().read(0, 0, 0, &mut alone);
            assert_eq!(x, alone);

            let refused = |codes: &[u8], norms: &[f32]| {
                CodePages::from_mlx(codec, shape, codes, norms).unwrap_err().to_string()
            };
            let short = &codes[1..];
            assert_eq!(
                refused(short, &norms),
                format!("codes has {} elements, expected {}", short.len(), codes.len())
            );
            let message = format!("norms has {} elements, expected {}", norms.len() + 1, norms.len());
            assert_eq!(refused(&codes, &[&norms[..], &[1.0]].concat()), message);
            let message = format!("codes has 0 elements, expected {}", codes.len());
            assert_eq!(pages.to_mlx(&mut [], &mut norms_back).unwrap_err().to_string(), message);
            for bad in [f32::NAN, f32::INFINITY, -1.0] {
                let at = ((9 + 7) * scales) + scales - 1;
                let good = std::mem::replace(&mut norms[at], bad);
                let message = format!("norm {bad} of row 7 of head 1 of slot 0 is negative or not finite");
                assert_eq!(refused(&codes, &norms), message);
                norms[at] = good;
            }
        }
    }
    let refused = |codec, dim| CodePages::from_mlx(codec, [1, 1, 1, dim], &[], &[]).unwrap_err();
    assert_eq!(refused(Codec::Tq4, 256), PagesError::Format { codec: Codec::Tq4 });
    assert_eq!(refused(Codec::F16, 256), PagesError::Elements { codec: Codec::F16 });
    assert_eq!(refused(Codec::MlxTq4, 128), PagesError::Dim { codec: Codec::MlxTq4, dim: 128 });
}

#[test]
fn other_dimensions_are_refused_at_every_door() {
    for codec in CODECS {
        for dim in [1, 64, 128, 255, 257, 384] {
            assert!(!codec.supports(dim));
            let message = CodePages::new(codec, Side::Keys, [1, 1, 1, dim]).unwrap_err().to_string();
            assert_eq!(message, format!("rows have {dim} elements, expected 256 or 512 for {codec}"));
            let layout = CacheLayout::Paged { pages: 2, page_size: 16 };
            let mut desc = CacheDesc::new(
                layout,
                CacheShape { layers: 1, kv_heads: 1, head_dim: 256, value_dim: 256 },
                codec,
            );
            assert!(KvCache::new(desc).is_ok());
            desc.value_dim = dim;
            let message = KvCache::new(desc).unwrap_err().to_string();
            assert_eq!(message, format!("v is {codec} with {dim} elements a row, expected 256 or 512"));
            let mut desc = ProblemDesc::cached(
                HeadShape { q_heads: 4, kv_heads: 2, head_dim: dim, value_dim: 512 },
                Dtype::F32,
                &[SeqLens::decode(30)],
            );
            (desc.k_codec, desc.v_codec) = (Some(codec), Some(codec));
            let message = desc.validate().unwrap_err().to_string();
            assert_eq!(message, format!("k is {codec} with {dim} elements a row, expected 256 or 512"));
            let x = vec![1.0; dim];
            let head =
                flashtile::quality::Head { k: &x, v: &x, q: &x, head_dim: dim, value_dim: dim, scale: 1.0 };
            let refusal = quality(&head, [Codec::F32, codec], false).unwrap_err();
            let message = format!("row 0 of v has {dim} elements, expected 256 or 512 for {codec}");
            assert_eq!(refusal.to_string(), message);
        }
    }
    assert!(!Codec::Tq4.supports(0) && Codec::Tq4.supports(512) && !Codec::Tq4.supports(513));
}

/// Attention over stored rows is as accurate as the tables allow.
#[test]
fn attention_over_normal_keys() {
    let set = flashtile_testkit::AttentionSet::normal([1024, 96, 256], 0.0, 5);
    let head = flashtile::quality::Head {
        k: &set.k,
        v: &set.v,
        q: &set.q,
        head_dim: 256,
        value_dim: 256,
        scale: 1.0 / 16.0,
    };
    for (codec, min, max) in [
        (Codec::MlxTq8, 0.007, 0.011),
        (Codec::MlxTq6, 0.022, 0.033),
        (Codec::MlxTq5, 0.045, 0.065),
        (Codec::MlxTq4, 0.085, 0.125),
    ] {
        let Quality { nrmse, kl, bits, .. } = quality(&head, [codec; 2], false).unwrap();
        println!("{codec}: {bits} bits, nrmse {nrmse:.4}, kl {kl:.2e}");
        assert!((min..max).contains(&nrmse), "{codec}: {nrmse}");
    }
}

/// Appends rows of a layer to a cache.
fn append(cache: &mut KvCache, seq: SeqId, seed: u64, tokens: usize) {
    let desc = *cache.desc();
    let rows = |seed, dim| normal(seed, tokens * desc.kv_heads * dim);
    let (k, v) = (rows(seed, desc.head_dim), rows(seed + 1, desc.value_dim));
    let view = |x, dim| TensorView::packed::<f32>(x, [tokens, desc.kv_heads, dim]).unwrap();
    cache.append(&[(seq, tokens)], &[(view(&k, desc.head_dim), view(&v, desc.value_dim))]).unwrap();
}

#[test]
fn caches_give_and_take_slots() {
    let layouts = [
        CacheLayout::Contiguous { slots: 2, capacity: 120 },
        CacheLayout::Ring { slots: 2, capacity: 40 },
        CacheLayout::Paged { pages: 40, page_size: 7 },
    ];
    for layout in layouts {
        for (k, v) in [(Codec::MlxTq4, Codec::MlxTq8), (Codec::F16, Codec::MlxTq5Plain)] {
            let mut desc = CacheDesc::new(
                layout,
                CacheShape { layers: 1, kv_heads: 2, head_dim: 256, value_dim: 512 },
                k,
            );
            desc.v = v;
            let mut cache = KvCache::new(desc).unwrap();
            let seq = cache.create().unwrap();
            append(&mut cache, seq, 1, 100);
            let kept = 100 - cache.first(seq).unwrap();
            // The rows of a slot belong to the tokens.
            let capacity = kept + 3;
            let values = cache.slot(0, seq, Side::Values, capacity).unwrap();
            assert_eq!(values.shape(), [1, 2, capacity, 512]);
            let (mut codes, mut norms) = (vec![0; 2 * capacity * 512], vec![0.0; 2 * capacity * 2]);
            values.to_mlx(&mut codes, &mut norms).unwrap();
            let from = CodePages::from_mlx(v, [1, 2, capacity, 512], &codes, &norms).unwrap();
            let keys = match k {
                Codec::F16 => None,
                _ => Some(cache.slot(0, seq, Side::Keys, capacity).unwrap()),
            };
            let refusal = cache.slot(0, seq, Side::Values, kept - 1).unwrap_err().to_string();
            assert_eq!(
                refusal,
                format!("the sequence would have {kept} tokens, expected at most {}", kept - 1)
            );
            let Some(keys) = keys else {
                let refusal = cache.slot(0, seq, Side::Keys, capacity).unwrap_err().to_string();
                assert_eq!(refusal, "k is stored as f16, which is not codes");
                // Keys in f16 `[1, kv_heads, capacity, head_dim]`, each token in its row.
                let mut tensor = Guarded::new(Dtype::F16, [1, 2, kept, 256], Layout::Bhsd);
                let mut scratch = Guarded::new(Dtype::F32, [1, 2, kept, 512], Layout::Bhsd);
                cache.linearize(seq, 0, &mut tensor.view_mut(), &mut scratch.view_mut()).unwrap();
                let mut slot = vec![f16::ZERO; 2 * capacity * 256];
                for (at, x) in slot.iter_mut().enumerate() {
                    let (head, row, d) = (at / 256 / capacity, at / 256 % capacity, at % 256);
                    let token = (100 - kept..100).find(|token| token % capacity == row);
                    if let Some(token) = token {
                        *x = f16::from_f32(tensor.get([0, head, token - (100 - kept), d]));
                    }
                }
                let view = TensorView::bhsd::<f16>(&slot, [1, 2, capacity, 256]).unwrap();
                assert_loaded(&cache, seq, view.into(), KvView::Codes(from.view()));
                continue;
            };
            assert_loaded(&cache, seq, KvView::Codes(keys.view()), KvView::Codes(from.view()));
        }
    }
}

/// Slots loaded into a new sequence of the same length give the bytes of the original sequence; a fork keeps its own.
fn assert_loaded(cache: &KvCache, seq: SeqId, k: KvView<'_>, v: KvView<'_>) {
    let bytes = |cache: &KvCache, seq| cache.snapshot(seq).unwrap().as_bytes().to_vec();
    let mut other = KvCache::new(*cache.desc()).unwrap();
    let copy = other.create().unwrap();
    append(&mut other, copy, 50, 100);
    let fork = other.fork(copy).unwrap();
    let before = bytes(&other, fork);
    let refusals = [
        (other.load(1, copy, &k, &v), "layer 1 asked for, the cache has 1".to_owned()),
        (other.load(0, copy, &k, &k), format!("v is {}, expected {}", k.codec(), v.codec())),
    ];
    for (got, want) in refusals {
        assert_eq!(got.unwrap_err().to_string(), want);
    }
    let short = CodePages::new(v.codec(), Side::Values, [1, 2, 5, 512]).unwrap();
    let refusal = other.load(0, copy, &k, &KvView::Codes(short.view())).unwrap_err().to_string();
    let kept = 100 - cache.first(seq).unwrap();
    assert_eq!(refusal, format!("v has shape [1, 2, 5, 512], expected [1, 2, {kept}, 512]"));
    assert_eq!(bytes(&other, copy), before);
    other.load(0, copy, &k, &v).unwrap();
    assert_eq!(bytes(&other, copy), bytes(cache, seq));
    assert_eq!(bytes(&other, fork), before);
}

#[test]
fn means_stay_out_of_its_buffers() {
    let layout = CacheLayout::Contiguous { slots: 2, capacity: 8 };
    let desc = CacheDesc::new(
        layout,
        CacheShape { layers: 1, kv_heads: 1, head_dim: 256, value_dim: 256 },
        Codec::MlxTq6,
    );
    let mut cache = KvCache::new(desc).unwrap();
    cache.set_key_mean(0, &normal(1, 256)).unwrap();
    let seq = cache.create().unwrap();
    append(&mut cache, seq, 2, 8);
    let slot = |side| cache.slot(0, seq, side, 8).unwrap();
    let (mut codes, mut norms) = (vec![0; 8 * 256], vec![0.0; 8]);
    assert_eq!(slot(Side::Keys).to_mlx(&mut codes, &mut norms), Err(PagesError::KeyTransform));
    slot(Side::Values).to_mlx(&mut codes, &mut norms).unwrap();
    let mut plain = KvCache::new(desc).unwrap();
    let other = plain.create().unwrap();
    plain.extend(&[(other, 8)]).unwrap();
    let (k, v) = (slot(Side::Keys), slot(Side::Values));
    let (k, v) = (KvView::Codes(k.view()), KvView::Codes(v.view()));
    let refusal = plain.load(0, other, &k, &v).unwrap_err().to_string();
    assert_eq!(refusal, "rows for layer 0 and this cache differ in the mean of their keys");
    // Attention accounts for the mean as with any other codec.
    let tables = cache.tables(&[seq]).unwrap();
    let mut desc = ProblemDesc::cached(
        HeadShape { q_heads: 2, kv_heads: 1, head_dim: 256, value_dim: 256 },
        Dtype::F32,
        &[SeqLens::decode(8)],
    );
    (desc.k_codec, desc.v_codec) = (Some(Codec::MlxTq6), Some(Codec::MlxTq6));
    let problem = desc.validate().unwrap();
    let q = normal(9, 512);
    let inputs = cache.inputs(0, TensorView::packed::<f32>(&q, [1, 2, 256]).unwrap(), &tables).unwrap();
    let want = flashtile::reference::attention(&problem, &inputs).unwrap();
    let cpu = Cpu::new();
    let plan = cpu.plan(&problem, PlanOptions::default()).unwrap();
    let mut out = Guarded::new(Dtype::F32, [1, 2, 1, 256], Layout::Bhsd);
    cpu.run(&plan, &inputs, &mut Outputs::new(out.view_mut()), &mut plan.workspace()).unwrap();
    assert!(nrmse(&out.values(), &want.out) <= 2e-6);
}
