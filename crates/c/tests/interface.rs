//! Functions as a C program calls them: answers have the bits of the crate `flashtile`, and what breaks the contract is refused.

#![allow(unsafe_code, reason = "the functions are for C")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use flashtile::{
    Attention, CacheDesc, CacheLayout, CacheShape, Codec, KvCache, KvCacheExt as _, MaskView, Outputs,
    QOffset, Runner, TensorView, TensorViewMut,
};
use flashtile_c::*;
use std::ffi::{CStr, c_char, c_void};
use std::ptr::{null, null_mut};

const Q_HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 16;

fn text(of: *const c_char) -> String {
    assert!(!of.is_null());
    // SAFETY: texts of the interface end with a zero, and live until the next call.
    unsafe { CStr::from_ptr(of) }.to_str().unwrap().to_owned()
}

/// The refusal of a call must have this status, and its text these words.
#[track_caller]
fn refused(got: FlashtileStatus, status: FlashtileStatus, words: &str) {
    assert_eq!(got, status, "{}", text(flashtile_last_error()));
    let said = text(flashtile_last_error());
    assert!(said.contains(words), "'{said}' lacks '{words}'");
}

#[track_caller]
fn done(got: FlashtileStatus) {
    assert_eq!(got, FlashtileStatus::Ok, "{}", text(flashtile_last_error()));
}

fn rows(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 37 + seed * 101) % 61) as f32 / 24.0 - 1.2).collect()
}

/// Tensors of a call, `[tokens, heads, DIM]`.
struct Memory {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    out: Vec<f32>,
    lse: Vec<f32>,
}

impl Memory {
    fn new(q_len: usize, kv_len: usize, seed: usize) -> Self {
        let [q, kv] = [q_len * Q_HEADS * DIM, kv_len * KV_HEADS * DIM];
        let (out, lse) = (vec![f32::NAN; q], vec![f32::NAN; q_len * Q_HEADS]);
        Self { q: rows(q, seed), k: rows(kv, seed + 1), v: rows(kv, seed + 2), out, lse }
    }

    fn tensors(&mut self) -> FlashtileTensors {
        let of = |data: &[f32], heads: usize| FlashtileTensor {
            data: data.as_ptr().cast(),
            dtype: FlashtileDtype::F32 as u32,
            shape: [1, heads, data.len() / heads / DIM, DIM],
            strides: [0, DIM, heads * DIM, 1],
        };
        let (q, k, v) = (of(&self.q, Q_HEADS), of(&self.k, KV_HEADS), of(&self.v, KV_HEADS));
        let FlashtileTensor { dtype, shape, strides, .. } = q;
        let out = FlashtileTensorMut { data: self.out.as_mut_ptr().cast(), dtype, shape, strides };
        let lse = FlashtileFloatsMut { data: self.lse.as_mut_ptr(), len: self.lse.len() };
        FlashtileTensors { q, k, v, out, lse }
    }

    fn views(&self) -> [TensorView<'_>; 3] {
        let of =
            |data, heads| TensorView::packed::<f32>(data, [data.len() / heads / DIM, heads, DIM]).unwrap();
        [of(&self.q, Q_HEADS), of(&self.k, KV_HEADS), of(&self.v, KV_HEADS)]
    }

    /// `out` and `lse` of these options by the crate `flashtile`.
    fn expected(&self, options: &Attention<'_>) -> (Vec<f32>, Vec<f32>) {
        let [q, k, v] = self.views();
        let (mut out, mut lse) = (vec![0.0; self.out.len()], vec![0.0; self.lse.len()]);
        let view = TensorViewMut::packed(&mut out, [self.out.len() / Q_HEADS / DIM, Q_HEADS, DIM]).unwrap();
        let mut outputs = Outputs::new(view);
        outputs.lse = Some(&mut lse);
        Runner::new().run(&options.desc(&q, &k, &v), &options.inputs(q, k, v), &mut outputs).unwrap();
        (out, lse)
    }
}

/// Options with all bytes 0, as C programs begin with.
fn options() -> FlashtileOptions {
    // SAFETY: numbers, null pointers.
    unsafe { std::mem::zeroed() }
}

fn floats(of: &[f32]) -> FlashtileFloats {
    FlashtileFloats { data: of.as_ptr(), len: of.len() }
}

fn sizes(of: &[usize]) -> FlashtileSizes {
    FlashtileSizes { data: of.as_ptr(), len: of.len() }
}

fn attention(tensors: &FlashtileTensors, options: *const FlashtileOptions) -> FlashtileStatus {
    // SAFETY: tests describe the memory that they have.
    unsafe { flashtile_attention(tensors, options) }
}

#[track_caller]
fn agrees(memory: &mut Memory, options: &FlashtileOptions, expected: &Attention<'_>) {
    done(attention(&memory.tensors(), options));
    let (out, lse) = memory.expected(expected);
    assert_eq!(memory.out, out);
    assert_eq!(memory.lse, lse);
    memory.out.fill(f32::NAN);
}

#[test]
fn options_are_those_of_the_library() {
    let mut memory = Memory::new(5, 9, 0);
    agrees(&mut memory, &options(), &Attention::full());
    let mut of = options();
    of.scale = 0.3;
    of.softcap = 2.0;
    agrees(&mut memory, &of, &Attention::full().scale(0.3).softcap(2.0));

    let mut of = options();
    of.causal = 1;
    for (code, at, offset) in [
        (1, 0, QOffset::TopLeft),
        (2, 0, QOffset::BottomRight),
        (3, 2, QOffset::At(2)),
        (3, -1, QOffset::At(-1)),
    ] {
        (of.q_offset, of.q_offset_at) = (code, at);
        agrees(&mut memory, &of, &Attention::causal().q_offset(offset));
    }
    (of.causal, of.q_offset, of.q_offset_at, of.has_window) = (0, 2, 0, 1);
    let right = Attention::full().q_offset(QOffset::BottomRight);
    for (left, right_keys, expected) in
        [(3, 0, right.window(3, 0)), (-1, 2, right.window(None, 2)), (0, -1, right.window(0, None))]
    {
        (of.window_left, of.window_right) = (left, right_keys);
        agrees(&mut memory, &of, &expected);
    }

    let heads = [0.5, 0.25, 1.0, 0.0];
    let mut of = options();
    (of.q_offset, of.alibi_slopes, of.sinks) = (2, floats(&heads), floats(&heads));
    agrees(&mut memory, &of, &right.alibi(&heads).sinks(&heads));
}

#[test]
fn masks_and_lengths_are_those_of_the_library() {
    let mut memory = Memory::new(5, 9, 3);
    let visible: Vec<u8> = (0..45).map(|i| u8::from(i % 4 != 1) * 7).collect();
    let mut mask = FlashtileMask {
        data: visible.as_ptr().cast(),
        kind: FlashtileMaskKind::Bool as u32,
        shape: [1, 1, 5, 9],
        strides: [0, 0, 9, 1],
    };
    let mut of = options();
    of.mask = &raw const mask;
    agrees(
        &mut memory,
        &of,
        &Attention::full().mask(MaskView::bool_bytes(&visible, [1, 1, 5, 9], [0, 0, 9, 1]).unwrap()),
    );

    let bias = rows(45, 8);
    (mask.data, mask.kind) = (bias.as_ptr().cast(), FlashtileMaskKind::F32 as u32);
    of.mask = &raw const mask;
    agrees(&mut memory, &of, &Attention::full().mask(MaskView::dense_additive(&bias, [5, 9]).unwrap()));
    let half: Vec<half::bf16> = bias.iter().map(|&x| half::bf16::from_f32(x)).collect();
    (mask.data, mask.kind) = (half.as_ptr().cast(), FlashtileMaskKind::Bf16 as u32);
    of.mask = &raw const mask;
    agrees(&mut memory, &of, &Attention::full().mask(MaskView::dense_additive(&half, [5, 9]).unwrap()));

    let mut of = options();
    of.kv_lens = sizes(&[7]);
    agrees(&mut memory, &of, &Attention::full().kv_lens(&[7]));
    let (of_q, of_k) = ([0, 2, 5], [0, 4, 9]);
    let mut of = options();
    (of.cu_seqlens_q, of.cu_seqlens_k) = (sizes(&of_q), sizes(&of_k));
    agrees(&mut memory, &of, &Attention::full().cu_seqlens(&of_q, &of_k));
}

#[test]
fn what_breaks_the_contract_is_refused() {
    use FlashtileStatus::Invalid;
    let mut memory = Memory::new(5, 9, 0);
    let good = memory.tensors();
    let with = |change: fn(&mut FlashtileTensors)| {
        let mut tensors = good;
        change(&mut tensors);
        attention(&tensors, null())
    };
    // SAFETY: the null pointer is what is tested.
    refused(unsafe { flashtile_attention(null(), null()) }, Invalid, "tensors is null");
    refused(with(|t| t.q.data = null()), Invalid, "q is null and has shape [1, 4, 5, 16]");
    refused(with(|t| t.out.data = null_mut()), Invalid, "out is null");
    refused(with(|t| t.k.dtype = 3), Invalid, "dtype of k is 3, expected 0 to 2");
    refused(with(|t| t.v.dtype = FlashtileDtype::F16 as u32), Invalid, "v is f16, expected f32");
    refused(with(|t| t.q.data = t.q.data.wrapping_byte_add(1)), Invalid, "q: memory is not aligned");
    refused(with(|t| t.k.shape[2] = 8), Invalid, "v has shape [1, 2, 9, 16], expected [1, 2, 8, 16]");
    refused(with(|t| t.k.strides[3] = 2), Invalid, "k: innermost stride is 2");
    refused(with(|t| t.q.strides[2] = usize::MAX), Invalid, "q: shape times strides is not addressable");
    refused(with(|t| t.out.strides[2] = 0), Invalid, "out: elements overlap");
    refused(with(|t| t.lse.len -= 1), Invalid, "19");
    refused(with(|t| t.lse.data = null_mut()), Invalid, "lse is null and has 20 elements");

    let of = |change: fn(&mut FlashtileOptions)| {
        let mut options = options();
        change(&mut options);
        attention(&good, &raw const options)
    };
    refused(of(|o| o.causal = 1), Invalid, "needs q_offset");
    refused(of(|o| o.causal = 2), Invalid, "causal is 2, expected 0 to 1");
    refused(of(|o| o.window_left = 4), Invalid, "has_window is 0");
    refused(of(|o| (o.has_window, o.window_right) = (1, -2)), Invalid, "window_right is -2");
    refused(of(|o| o.q_offset = 4), Invalid, "q_offset is 4, expected 0 to 3");
    refused(of(|o| (o.q_offset, o.q_offset_at) = (2, 1)), Invalid, "q_offset_at is 1");
    refused(of(|o| o.scale = f32::NAN), Invalid, "scale");
    refused(of(|o| o.sinks.len = 4), Invalid, "sinks is null and has 4 elements");
    refused(of(|o| o.sinks = floats(&[1.0, 2.0])), Invalid, "sinks");
    refused(of(|o| o.kv_lens = sizes(&[10])), Invalid, "10");
    refused(of(|o| o.cu_seqlens_q = sizes(&[0, 5])), Invalid, "or none of them");
    let empty = FlashtileMask { data: null(), kind: 0, shape: [1, 1, 5, 9], strides: [0, 0, 9, 1] };
    let mut masked = options();
    masked.mask = &raw const empty;
    refused(attention(&good, &raw const masked), Invalid, "mask is null");
    let kind = FlashtileMask { data: good.q.data, kind: 4, ..empty };
    masked.mask = &raw const kind;
    refused(attention(&good, &raw const masked), Invalid, "kind of mask is 4");
    assert!(memory.out.iter().all(|x| x.is_nan()), "a refused call has written");
}

#[test]
fn tensors_without_elements_may_be_null() {
    let mut memory = Memory::new(5, 9, 0);
    let mut tensors = memory.tensors();
    for kv in [&mut tensors.k, &mut tensors.v] {
        (kv.data, kv.shape[2]) = (null(), 0);
    }
    done(attention(&tensors, null()));
    assert!(memory.out.iter().all(|&x| x == 0.0));
    assert!(memory.lse.iter().all(|&x| x == f32::NEG_INFINITY));
}

#[test]
fn a_plan_is_explained_before_there_is_memory() {
    let tensor = |heads: usize, rows: usize| FlashtileTensor {
        data: null::<c_void>(),
        dtype: FlashtileDtype::Bf16 as u32,
        shape: [1, heads, rows, 128],
        strides: [0; 4],
    };
    let (q, kv) = (tensor(32, 1), tensor(8, 4096));
    let FlashtileTensor { dtype, shape, strides, .. } = q;
    let out = FlashtileTensorMut { data: null_mut(), dtype, shape, strides };
    let lse = FlashtileFloatsMut { data: null_mut(), len: 0 };
    let mut tensors = FlashtileTensors { q, k: kv, v: kv, out, lse };
    let mut said = null_mut();
    // SAFETY: nothing reads elements, and the text is freed once.
    unsafe {
        done(flashtile_explain(&raw const tensors, null(), &raw mut said));
        let plan = text(said);
        flashtile_text_free(said);
        assert!(plan.contains("kernel     cpu-decode-bf16-d128"), "{plan}");
        assert!(plan.lines().any(|line| line.starts_with("workspace")), "{plan}");

        refused(
            flashtile_explain(&raw const tensors, null(), null_mut()),
            FlashtileStatus::Invalid,
            "text is null",
        );
        tensors.v.shape[1] = 4;
        let status = flashtile_explain(&raw const tensors, null(), &raw mut said);
        refused(
            status,
            FlashtileStatus::Invalid,
            "v has shape [1, 4, 4096, 128], expected [1, 8, 4096, 128]",
        );
        assert!(said.is_null());
        flashtile_text_free(null_mut());
    }
}

fn desc(layout: FlashtileLayout, codec: FlashtileCodec) -> FlashtileCacheDesc {
    FlashtileCacheDesc {
        layout: layout as u32,
        pages: 6,
        page_size: 4,
        layers: 2,
        kv_heads: KV_HEADS,
        head_dim: DIM,
        value_dim: DIM,
        k_codec: codec as u32,
        v_codec: FlashtileCodec::Int8 as u32,
    }
}

/// A cache that is freed.
struct Cache(*mut FlashtileCache);

impl Cache {
    fn new(desc: &FlashtileCacheDesc) -> Self {
        let mut cache = null_mut();
        // SAFETY: the description and the pointer are the test's.
        done(unsafe { flashtile_cache_new(desc, &raw mut cache) });
        Self(cache)
    }

    fn create(&self) -> FlashtileSequence {
        let mut sequence = 0;
        // SAFETY: the cache is not freed, here and in the following functions.
        done(unsafe { flashtile_cache_create(self.0, &raw mut sequence) });
        sequence
    }

    fn begin(&self, batch: &[(FlashtileSequence, usize)]) -> FlashtileStatus {
        let batch: Vec<_> =
            batch.iter().map(|&(sequence, tokens)| FlashtileNewTokens { sequence, tokens }).collect();
        // SAFETY: the list is the test's.
        unsafe { flashtile_step_begin(self.0, batch.as_ptr(), batch.len()) }
    }

    fn attend(
        &self,
        layer: usize,
        tensors: &FlashtileTensors,
        options: *const FlashtileOptions,
    ) -> FlashtileStatus {
        // SAFETY: tests describe the memory that they have.
        unsafe { flashtile_step_attend(self.0, layer, tensors, options) }
    }

    fn finish(&self) -> FlashtileStatus {
        // SAFETY: the cache is not freed.
        unsafe { flashtile_step_finish(self.0) }
    }

    fn len(&self, sequence: FlashtileSequence) -> usize {
        let mut len = usize::MAX;
        // SAFETY: the number is the test's.
        done(unsafe { flashtile_cache_length(self.0, sequence, &raw mut len) });
        len
    }

    fn memory(&self) -> FlashtileCacheMemory {
        // SAFETY: numbers.
        let mut memory = unsafe { std::mem::zeroed() };
        // SAFETY: the struct is the test's.
        done(unsafe { flashtile_cache_memory(self.0, &raw mut memory) });
        memory
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        // SAFETY: the cache is freed once.
        unsafe { flashtile_cache_free(self.0) };
    }
}

#[test]
fn every_codec_has_the_name_of_its_code() {
    let codes = [
        (FlashtileCodec::F32, Codec::F32),
        (FlashtileCodec::F16, Codec::F16),
        (FlashtileCodec::Bf16, Codec::BF16),
        (FlashtileCodec::Fp8, Codec::Fp8),
        (FlashtileCodec::Int8, Codec::Int8),
        (FlashtileCodec::Tq6, Codec::Tq6),
        (FlashtileCodec::Tq5, Codec::Tq5),
        (FlashtileCodec::Tq4, Codec::Tq4),
        (FlashtileCodec::Tq3, Codec::Tq3),
        (FlashtileCodec::Tq2, Codec::Tq2),
        (FlashtileCodec::Rot16, Codec::Rot16),
    ];
    for (code, codec) in codes {
        steps(FlashtileLayout::Paged, CacheLayout::Paged { pages: 6, page_size: 4 }, (code, codec));
    }
}

#[test]
fn every_layout_has_its_code() {
    let slots = (6, 4);
    let int8 = (FlashtileCodec::Int8, Codec::Int8);
    steps(FlashtileLayout::Contiguous, CacheLayout::Contiguous { slots: slots.0, capacity: slots.1 }, int8);
    steps(FlashtileLayout::Ring, CacheLayout::Ring { slots: slots.0, capacity: slots.1 }, int8);
}

/// Steps of two sequences: bits and memory of a cache of the crate `flashtile`.
fn steps(layout: FlashtileLayout, of_layout: CacheLayout, (code, codec): (FlashtileCodec, Codec)) {
    let cache = Cache::new(&desc(layout, code));
    let shape = CacheShape { layers: 2, kv_heads: KV_HEADS, head_dim: DIM, value_dim: DIM };
    let mut of = CacheDesc::new(of_layout, shape, codec);
    of.v = Codec::Int8;
    let mut want = KvCache::new(of).unwrap();
    let (a, b) = (cache.create(), cache.create());
    assert!(a != b && a != 0 && b != 0);
    let ids = [want.create().unwrap(), want.create().unwrap()];
    for (n, tokens) in [[3, 1], [1, 1]].into_iter().enumerate() {
        done(cache.begin(&[(a, tokens[0]), (b, tokens[1])]));
        let mut step = want.step(&[(ids[0], tokens[0]), (ids[1], tokens[1])]).unwrap();
        for layer in 0..2 {
            let mut memory = Memory::new(tokens[0] + tokens[1], tokens[0] + tokens[1], 10 * n + layer);
            let mut causal = options();
            (causal.causal, causal.softcap) = (1, 4.0);
            done(cache.attend(layer, &memory.tensors(), &raw const causal));
            let [q, k, v] = memory.views();
            let mut out = vec![0.0f32; memory.out.len()];
            let mut lse = vec![0.0; memory.lse.len()];
            let mut outputs =
                Outputs::new(TensorViewMut::packed(&mut out, [q.shape()[2], Q_HEADS, DIM]).unwrap());
            outputs.lse = Some(&mut lse);
            let tensors = flashtile::StepTensors { q, k, v };
            step.attend_with(layer, tensors, &Attention::causal().softcap(4.0), &mut outputs).unwrap();
            assert_eq!((&memory.out, &memory.lse), (&out, &lse), "{codec}");
        }
        done(cache.finish());
        step.finish().unwrap();
        assert_eq!([cache.len(a), cache.len(b)], ids.map(|id| want.len(id).unwrap()));
    }
    let (got, want) = (cache.memory(), want.memory());
    assert_eq!((got.bytes_reserved, got.bytes_used), (want.bytes_reserved, want.bytes_used));
    assert_eq!(
        (got.pages, got.pages_free, got.pages_shared),
        (want.pages, want.pages_free, want.pages_shared)
    );
    assert_eq!((got.sequences, got.tokens), (want.sequences, want.tokens));
}

/// Adds tokens to a sequence.
fn grow(cache: &Cache, sequence: FlashtileSequence, tokens: usize) {
    done(cache.begin(&[(sequence, tokens)]));
    let mut memory = Memory::new(tokens, tokens, 0);
    (0..2).for_each(|layer| done(cache.attend(layer, &memory.tensors(), null())));
    done(cache.finish());
}

#[test]
fn sequences_fork_shrink_and_end() {
    use FlashtileStatus::{Full, Invalid};
    let cache = Cache::new(&desc(FlashtileLayout::Paged, FlashtileCodec::F32));
    let (a, mut fork) = (cache.create(), 0);
    grow(&cache, a, 10);
    // SAFETY: the cache is not freed, and numbers are the test's.
    unsafe {
        done(flashtile_cache_fork(cache.0, a, &raw mut fork));
        assert_eq!((cache.len(fork), cache.memory().pages_shared), (10, 3));
        done(flashtile_cache_truncate(cache.0, fork, 8));
        done(flashtile_cache_forget(cache.0, a, 4));
        assert_eq!((cache.len(fork), cache.len(a)), (8, 10));
        refused(flashtile_cache_truncate(cache.0, fork, 9), Invalid, "9");
        refused(cache.begin(&[(a, 99)]), Full, "pages");
        refused(cache.begin(&[(a, 1), (a, 1)]), Invalid, "twice");
        done(flashtile_cache_remove(cache.0, a));
        refused(flashtile_cache_remove(cache.0, a), Invalid, &format!("the cache has no sequence {a}"));
        refused(cache.begin(&[(a, 1)]), Invalid, "no sequence");

        let other = Cache::new(&desc(FlashtileLayout::Contiguous, FlashtileCodec::F32));
        refused(flashtile_cache_remove(other.0, fork), Invalid, "no sequence");
        (0..6).for_each(|_| assert_ne!(other.create(), 0));
        refused(flashtile_cache_create(other.0, &raw mut fork), Full, "slots");
    }
}

#[test]
fn a_step_is_open_or_not() {
    use FlashtileStatus::{Invalid, Step};
    let cache = Cache::new(&desc(FlashtileLayout::Paged, FlashtileCodec::Int8));
    let a = cache.create();
    let mut memory = Memory::new(2, 2, 0);
    let tensors = memory.tensors();
    refused(cache.attend(0, &tensors, null()), Step, "no step");
    refused(cache.finish(), Step, "no step");
    done(cache.begin(&[(a, 2)]));
    refused(cache.begin(&[(a, 2)]), Step, "a step of this cache is open");
    let mut len = 77;
    // SAFETY: the cache is not freed, and the number is the test's.
    refused(unsafe { flashtile_cache_length(cache.0, a, &raw mut len) }, Step, "open");
    assert_eq!(len, 77);
    refused(cache.attend(2, &tensors, null()), Invalid, "2");
    let mut lengths = options();
    lengths.kv_lens = sizes(&[2]);
    refused(cache.attend(0, &tensors, &raw const lengths), Invalid, "kv_lens");
    // A layer is missing: the tokens are taken back.
    done(cache.attend(0, &tensors, null()));
    refused(cache.finish(), Step, "1");
    assert_eq!(cache.len(a), 0);

    done(cache.begin(&[(a, 2)]));
    // SAFETY: as above.
    done(unsafe { flashtile_step_cancel(cache.0) });
    assert_eq!(cache.len(a), 0);
    grow(&cache, a, 2);
    assert_eq!(cache.len(a), 2);

    // A cache is freed with an open step, and a row that a codec cannot store is refused.
    done(cache.begin(&[(a, 2)]));
    memory.k[5] = f32::INFINITY;
    refused(cache.attend(0, &memory.tensors(), null()), Invalid, "k");
}

#[test]
fn caches_are_refused() {
    use FlashtileStatus::Invalid;
    let mut cache = null_mut();
    let mut new = |change: fn(&mut FlashtileCacheDesc)| {
        let mut desc = desc(FlashtileLayout::Paged, FlashtileCodec::F32);
        change(&mut desc);
        // SAFETY: the description and the pointer are the test's.
        let status = unsafe { flashtile_cache_new(&raw const desc, &raw mut cache) };
        assert!(cache.is_null());
        status
    };
    refused(new(|d| d.layout = 3), Invalid, "layout is 3, expected 0 to 2");
    refused(new(|d| d.k_codec = 11), Invalid, "k_codec is 11, expected 0 to 10");
    refused(new(|d| d.v_codec = 99), Invalid, "v_codec is 99");
    refused(new(|d| d.head_dim = 0), Invalid, "head_dim");
    refused(new(|d| d.pages = usize::MAX), Invalid, "pages");
    // SAFETY: the null pointers are what is tested.
    unsafe {
        refused(flashtile_cache_new(null(), &raw mut cache), Invalid, "desc is null");
        refused(flashtile_cache_create(null_mut(), null_mut()), Invalid, "cache is null");
        refused(flashtile_step_finish(null_mut()), Invalid, "cache is null");
        flashtile_cache_free(null_mut());
        let cache = Cache::new(&desc(FlashtileLayout::Paged, FlashtileCodec::Tq4));
        refused(flashtile_cache_create(cache.0, null_mut()), Invalid, "sequence is null");
        assert_eq!(cache.memory().sequences, 0, "a sequence that nobody can name");
        refused(flashtile_step_begin(cache.0, null(), 1), Invalid, "batch is null");
        let mean = rows(KV_HEADS * DIM, 1);
        refused(flashtile_cache_set_key_mean(cache.0, 2, floats(&mean)), Invalid, "2");
        refused(flashtile_cache_set_key_mean(cache.0, 0, floats(&mean[1..])), Invalid, "31");
        done(flashtile_cache_set_key_mean(cache.0, 0, floats(&mean)));
        let factors = vec![-2.0; KV_HEADS * DIM];
        refused(flashtile_cache_set_key_factors(cache.0, 2, floats(&factors)), Invalid, "2");
        refused(
            flashtile_cache_set_key_factors(cache.0, 0, floats(&[0.0; KV_HEADS * DIM])),
            Invalid,
            "factor",
        );
        done(flashtile_cache_set_key_factors(cache.0, 0, floats(&factors)));
    }
}

#[test]
fn the_version_is_that_of_the_package() {
    assert_eq!(text(flashtile_version()), env!("CARGO_PKG_VERSION"));
}
