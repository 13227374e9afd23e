//! KV caches, and steps over them.

#![allow(unsafe_code, reason = "caches are addresses to their owner")]

use crate::attention::{FlashtileOptions, options};
use crate::status::{Failure, FlashtileStatus, guard};
use crate::tensors::{FlashtileFloats, FlashtileTensors, Views, given, known, list};
use flashtile::{
    CacheDesc, CacheLayout, CacheShape, Codec, KvCache, KvCacheExt as _, SeqId, Step, StepTensors,
};
use self_cell::{MutBorrow, self_cell};
use std::collections::HashMap;
use std::fmt;
use std::mem;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

/// How a cache lays out tokens.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "a header has all values")]
pub enum FlashtileLayout {
    /// Sequences take pages as they grow, and forked ones share them.
    Paged = 0,
    /// Each sequence has a slot, a page of its own, for its first `page_size` tokens.
    Contiguous = 1,
    /// Each sequence has a slot, a page of its own, for its last `page_size` tokens. A window of `w` keys to the left and steps of `n`
    /// tokens need `w + n`.
    Ring = 2,
}

/// How the row of one token and one head is stored. Bytes are for 128 elements.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "a header has all values")]
pub enum FlashtileCodec {
    /// Elements as F32: 512 bytes.
    F32 = 0,
    /// Elements as F16: 256 bytes.
    F16 = 1,
    /// Elements as BF16: 256 bytes.
    Bf16 = 2,
    /// Values of 8 bits (e4m3) and a scale: 130 bytes.
    Fp8 = 3,
    /// Rotated, integers of 8 bits and a scale: 130 bytes.
    Int8 = 4,
    /// Rotated, a codebook of 6 bits and a scale: 98 bytes.
    Tq6 = 5,
    /// Rotated, a codebook of 5 bits and a scale: 82 bytes.
    Tq5 = 6,
    /// Rotated, a codebook of 4 bits and a scale: 66 bytes.
    Tq4 = 7,
    /// Rotated, a codebook of 3 bits and a scale: 50 bytes.
    Tq3 = 8,
    /// Rotated, a codebook of 2 bits and a scale: 34 bytes.
    Tq2 = 9,
    /// Rotated, elements as F16 without a scale, beside codes: 256 bytes.
    Rot16 = 10,
}

/// The codec of each value of [`FlashtileCodec`].
const CODECS: [Codec; 11] = [
    Codec::F32,
    Codec::F16,
    Codec::BF16,
    Codec::Fp8,
    Codec::Int8,
    Codec::Tq6,
    Codec::Tq5,
    Codec::Tq4,
    Codec::Tq3,
    Codec::Tq2,
    Codec::Rot16,
];

/// Description of a cache.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(clippy::exhaustive_structs, reason = "C programs fill all fields")]
pub struct FlashtileCacheDesc {
    /// A `FlashtileLayout`.
    pub layout: u32,
    /// Pages, or slots: the capacity of the cache is `pages * page_size` tokens.
    pub pages: usize,
    /// Tokens of a page or slot.
    pub page_size: usize,
    /// Layers of the model. All of them hold the same tokens.
    pub layers: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of a key: 1 to 512.
    pub head_dim: usize,
    /// Elements of a value: 1 to 512.
    pub value_dim: usize,
    /// A `FlashtileCodec`, for keys.
    pub k_codec: u32,
    /// A `FlashtileCodec`, for values.
    pub v_codec: u32,
}

/// Memory use of a cache.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs, reason = "C programs read all fields")]
pub struct FlashtileCacheMemory {
    /// Bytes of all pages. The system provides them on first write.
    pub bytes_reserved: usize,
    /// Bytes of the pages in use.
    pub bytes_used: usize,
    /// Pages, or slots.
    pub pages: usize,
    /// Free pages.
    pub pages_free: usize,
    /// Pages with several holders.
    pub pages_shared: usize,
    /// Sequences.
    pub sequences: usize,
    /// Kept tokens, summed over sequences: shared ones count once for each.
    pub tokens: usize,
}

/// A sequence of a cache. No other cache accepts it, and its own refuses it once it is removed: numbers are not used again, and none is 0.
pub type FlashtileSequence = u64;

/// Tokens that a step adds to a sequence.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs, reason = "C programs fill all fields")]
pub struct FlashtileNewTokens {
    /// The sequence.
    pub sequence: FlashtileSequence,
    /// Tokens.
    pub tokens: usize,
}

/// The number of the next sequence of any cache.
static NEXT_SEQUENCE: AtomicU64 = AtomicU64::new(1);

/// A KV cache in main memory: keys and values of sequences that grow token by token. One thread at a time may use it.
#[derive(Debug)]
pub struct FlashtileCache {
    state: State,
    sequences: HashMap<FlashtileSequence, SeqId>,
    /// True during a call, and for good after one that ended in a panic: the state may be in the middle of a change.
    is_busy: bool,
}

enum State {
    Idle(Box<KvCache>),
    Open(Running),
    /// While a step begins or ends.
    Moving,
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Idle(cache) => cache.fmt(f),
            Self::Open(running) => running.borrow_dependent().fmt(f),
            Self::Moving => f.write_str("Moving"),
        }
    }
}

/// A step, until it ends.
type Begun<'c> = Option<Step<'c>>;

self_cell!(
    struct Running {
        owner: MutBorrow<Box<KvCache>>,

        #[covariant]
        dependent: Begun,
    }
);

impl FlashtileCache {
    fn with<T>(
        &mut self,
        run: impl FnOnce(&mut State, &mut HashMap<FlashtileSequence, SeqId>) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        if self.is_busy {
            let text = "the cache is in another call, or an earlier call over it has failed";
            return Err(Failure::new(FlashtileStatus::Internal, text));
        }
        self.is_busy = true;
        let result = run(&mut self.state, &mut self.sequences);
        self.is_busy = false;
        result
    }

    /// Calls a function with the cache; refused while a step is open.
    fn idle<T>(
        &mut self,
        run: impl FnOnce(&mut KvCache, &mut HashMap<FlashtileSequence, SeqId>) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        self.with(|state, sequences| match state {
            State::Idle(cache) => run(cache, sequences),
            State::Open(_) | State::Moving => Err(is_open()),
        })
    }

    fn begin(&mut self, batch: &[FlashtileNewTokens]) -> Result<(), Failure> {
        self.with(|state, sequences| {
            let new = |of: &FlashtileNewTokens| Ok((find(sequences, of.sequence)?, of.tokens));
            let batch = batch.iter().map(new).collect::<Result<Vec<(SeqId, usize)>, Failure>>()?;
            let cache = match mem::replace(state, State::Moving) {
                State::Idle(cache) => cache,
                other @ (State::Open(_) | State::Moving) => {
                    *state = other;
                    return Err(is_open());
                }
            };
            let begun = Running::try_new_or_recover(MutBorrow::new(cache), |cache| {
                cache.borrow_mut().step(&batch).map(Some)
            });
            let (next, result) = match begun {
                Ok(running) => (State::Open(running), Ok(())),
                Err((cache, why)) => (State::Idle(cache.into_inner()), Err(why.into())),
            };
            *state = next;
            result
        })
    }

    /// # Safety
    /// The contracts of tensors and options.
    unsafe fn attend(
        &mut self,
        layer: usize,
        tensors: *const FlashtileTensors,
        options: *const FlashtileOptions,
    ) -> Result<(), Failure> {
        // SAFETY: the contract is the same.
        let (views, mut outputs, attention) = unsafe {
            let tensors = given("tensors", tensors)?;
            (tensors.views()?, tensors.outputs()?, self::options(options)?)
        };
        let Views { q, k, v } = views;
        self.with(|state, _| {
            let State::Open(running) = state else { return Err(is_not_open()) };
            running.with_dependent_mut(|_, step| {
                let step = step.as_mut().ok_or_else(is_not_open)?;
                Ok(step.attend_with(layer, StepTensors { q, k, v }, &attention, &mut outputs)?)
            })
        })
    }

    /// Ends the step, and keeps its tokens or takes them back.
    fn end(&mut self, keep: bool) -> Result<(), Failure> {
        self.with(|state, _| match mem::replace(state, State::Moving) {
            State::Open(mut running) => {
                let result = running.with_dependent_mut(|_, step| match step.take() {
                    Some(step) if keep => step.finish().map_err(Failure::from),
                    _ => Ok(()),
                });
                *state = State::Idle(running.into_owner().into_inner());
                result
            }
            other @ (State::Idle(_) | State::Moving) => {
                *state = other;
                Err(is_not_open())
            }
        })
    }
}

fn is_open() -> Failure {
    Failure::new(FlashtileStatus::Step, "a step of this cache is open: finish it or cancel it")
}

fn is_not_open() -> Failure {
    Failure::new(FlashtileStatus::Step, "no step of this cache is open")
}

fn find(
    sequences: &HashMap<FlashtileSequence, SeqId>,
    sequence: FlashtileSequence,
) -> Result<SeqId, Failure> {
    let found = sequences.get(&sequence).copied();
    found.ok_or_else(|| Failure::invalid(format_args!("the cache has no sequence {sequence}")))
}

/// A sequence gets a number.
fn enter(sequences: &mut HashMap<FlashtileSequence, SeqId>, id: SeqId) -> FlashtileSequence {
    let number = NEXT_SEQUENCE.fetch_add(1, Ordering::Relaxed);
    sequences.insert(number, id);
    number
}

/// A cache that the caller uses.
///
/// # Safety
/// The pointer is null or comes from [`flashtile_cache_new`], was not freed, and no other thread uses the cache.
unsafe fn owned<'a>(cache: *mut FlashtileCache) -> Result<&'a mut FlashtileCache, Failure> {
    // SAFETY: the contract is the same.
    unsafe { cache.as_mut() }.ok_or_else(|| Failure::invalid("cache is null"))
}

/// Writes a result of a call.
///
/// # Safety
/// The pointer is null or writable.
unsafe fn write<T>(
    name: &str,
    to: *mut T,
    value: impl FnOnce() -> Result<T, Failure>,
) -> Result<(), Failure> {
    if to.is_null() || !to.is_aligned() {
        return Err(Failure::invalid(format_args!("{name} is null or not aligned")));
    }
    let value = value()?;
    // SAFETY: the pointer is not null, and aligned; it is writable by the contract.
    unsafe { to.write(value) };
    Ok(())
}

fn describe(desc: &FlashtileCacheDesc) -> Result<CacheDesc, Failure> {
    let FlashtileCacheDesc { pages, page_size, layers, kv_heads, head_dim, value_dim, .. } = *desc;
    let layouts = [
        CacheLayout::Paged { pages, page_size },
        CacheLayout::Contiguous { slots: pages, capacity: page_size },
        CacheLayout::Ring { slots: pages, capacity: page_size },
    ];
    let shape = CacheShape { layers, kv_heads, head_dim, value_dim };
    let k = known("k_codec", desc.k_codec, &CODECS)?;
    let mut cache = CacheDesc::new(known("layout", desc.layout, &layouts)?, shape, k);
    cache.v = known("v_codec", desc.v_codec, &CODECS)?;
    Ok(cache)
}

/// Makes an empty cache in main memory. `*cache` becomes the cache, which `flashtile_cache_free` frees, or null where the call is refused:
/// with `FLASHTILE_STATUS_INVALID` for a size of 0 or above its maximum and for a dimension that a codec does not store, with
/// `FLASHTILE_STATUS_MEMORY` where there is no memory.
///
/// # Safety
/// `desc` points to a description, and `cache` to a writable pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtile_cache_new(
    desc: *const FlashtileCacheDesc,
    cache: *mut *mut FlashtileCache,
) -> FlashtileStatus {
    guard(|| {
        // SAFETY: the contract is the same.
        unsafe {
            write("cache", cache, || Ok(ptr::null_mut()))?;
            let new = Box::new(KvCache::new(describe(given("desc", desc)?)?)?);
            let new = FlashtileCache { state: State::Idle(new), sequences: HashMap::new(), is_busy: false };
            cache.write(Box::into_raw(Box::new(new)));
        }
        Ok(())
    })
}

/// Frees a cache, with its sequences and an open step; null is ignored.
///
/// # Safety
/// `cache` is null, or comes from `flashtile_cache_new` and was not freed; no other thread uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtile_cache_free(cache: *mut FlashtileCache) {
    if !cache.is_null() {
        // SAFETY: `flashtile_cache_new` made it by `into_raw`, and nobody has freed it.
        let cache = unsafe { Box::from_raw(cache) };
        let _ = guard(|| {
            drop(cache);
            Ok(())
        });
    }
}

/// Makes an empty sequence. In contiguous and ring layouts it takes a slot: `FLASHTILE_STATUS_FULL` where none is free.
///
/// # Safety
/// `cache` comes from `flashtile_cache_new`, and no other thread uses it; `sequence` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtile_cache_create(
    cache: *mut FlashtileCache,
    sequence: *mut FlashtileSequence,
) -> FlashtileStatus {
    guard(|| {
        // SAFETY: the contract is the same.
        unsafe {
            let cache = owned(cache)?;
            write("sequence", sequence, || {
                cache.idle(|cache, sequences| Ok(enter(sequences, cache.create()?)))
            })
        }
    })
}

/// Makes a sequence of the same tokens as another: in the same pages, where the layout has pages, and else in a slot of its own, to which
/// the tokens are copied.
///
/// # Safety
/// `cache` comes from `flashtile_cache_new`, and no other thread uses it; `forked` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtile_cache_fork(
    cache: *mut FlashtileCache,
    sequence: FlashtileSequence,
    forked: *mut FlashtileSequence,
) -> FlashtileStatus {
    guard(|| {
        // SAFETY: the contract is the same.
        unsafe {
            let cache = owned(cache)?;
            write("forked", forked, || {
                cache.idle(|cache, sequences| {
                    let id = cache.fork(find(sequences, sequence)?)?;
                    Ok(enter(sequences, id))
                })
            })
        }
    })
}

/// Removes a sequence: pages that no other sequence holds are free again.
///
/// # Safety
/// `cache` comes from `flashtile_cache_new`, and no other thread uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtile_cache_remove(
    cache: *mut FlashtileCache,
    sequence: FlashtileSequence,
) -> FlashtileStatus {
    guard(|| {
        // SAFETY: the contract is the same.
        unsafe { owned(cache) }?.idle(|cache, sequences| {
            cache.remove(find(sequences, sequence)?)?;
            sequences.remove(&sequence);
            Ok(())
        })
    })
}

/// Removes the tokens from position `length` on, as speculative decoding rolls back.
///
/// # Safety
/// `cache` comes from `flashtile_cache_new`, and no other thread uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtile_cache_truncate(
    cache: *mut FlashtileCache,
    sequence: FlashtileSequence,
    length: usize,
) -> FlashtileStatus {
    guard(|| {
        // SAFETY: the contract is the same.
        unsafe { owned(cache) }?
            .idle(|cache, sequences| Ok(cache.truncate(find(sequences, sequence)?, length)?))
    })
}

/// Drops the tokens before position `before`, as a sequence that moves on with a window does. Positions and length stay what they are; a
/// query that would see a dropped token is refused.
///
/// # Safety
/// `cache` comes from `flashtile_cache_new`, and no other thread uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtile_cache_forget(
    cache: *mut FlashtileCache,
    sequence: FlashtileSequence,
    before: usize,
) -> FlashtileStatus {
    guard(|| {
        // SAFETY: the contract is the same.
        unsafe { owned(cache) }?
            .idle(|cache, sequences| Ok(cache.forget(find(sequences, sequence)?, before)?))
    })
}

/// The length of a sequence in tokens, dropped ones included: the position of its next token.
///
/// # Safety
/// `cache` comes from `flashtile_cache_new`, and no other thread uses it; `length` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtile_cache_length(
    cache: *mut FlashtileCache,
    sequence: FlashtileSequence,
    length: *mut usize,
) -> FlashtileStatus {
    guard(|| {
        // SAFETY: the contract is the same.
        unsafe {
            let cache = owned(cache)?;
            write("length", length, || {
                cache.idle(|cache, sequences| Ok(cache.len(find(sequences, sequence)?)?))
            })
        }
    })
}

/// Pages, tokens and bytes of a cache: whether a prompt has room.
///
/// # Safety
/// `cache` comes from `flashtile_cache_new`, and no other thread uses it; `memory` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtile_cache_memory(
    cache: *mut FlashtileCache,
    memory: *mut FlashtileCacheMemory,
) -> FlashtileStatus {
    guard(|| {
        // SAFETY: the contract is the same.
        unsafe {
            let cache = owned(cache)?;
            write("memory", memory, || {
                let of = cache.idle(|cache, _| Ok(cache.memory()))?;
                Ok(FlashtileCacheMemory {
                    bytes_reserved: of.bytes_reserved,
                    bytes_used: of.bytes_used,
                    pages: of.pages,
                    pages_free: of.pages_free,
                    pages_shared: of.pages_shared,
                    sequences: of.sequences,
                    tokens: of.tokens,
                })
            })
        }
    })
}

/// Sets the mean `[kv_heads, head_dim]` that is subtracted from the keys of a layer before they are quantized. It is a constant of the model,
/// and refused once the layer has rows or where keys are not quantized. Attention is exact with any mean.
///
/// # Safety
/// `cache` comes from `flashtile_cache_new`, and no other thread uses it; the elements of `mean` are readable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtile_cache_set_key_mean(
    cache: *mut FlashtileCache,
    layer: usize,
    mean: FlashtileFloats,
) -> FlashtileStatus {
    guard(|| {
        // SAFETY: the contract is the same.
        let (cache, mean) = unsafe { (owned(cache)?, mean.list("mean")?) };
        let mean = mean.ok_or_else(|| Failure::invalid("mean is null"))?;
        cache.idle(|cache, _| Ok(cache.set_key_mean(layer, mean)?))
    })
}

/// Sets the factors `[kv_heads, head_dim]` that the keys of a layer are divided by, after their mean is subtracted. They are constants of the
/// model, of magnitudes from 2^-32 to 2^32, and refused once the layer has rows or where keys are neither int8, tq6 to tq2 nor rot16. Attention
/// is exact with any factors.
///
/// # Safety
/// `cache` comes from `flashtile_cache_new`, and no other thread uses it; the elements of `factors` are readable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtile_cache_set_key_factors(
    cache: *mut FlashtileCache,
    layer: usize,
    factors: FlashtileFloats,
) -> FlashtileStatus {
    guard(|| {
        // SAFETY: the contract is the same.
        let (cache, factors) = unsafe { (owned(cache)?, factors.list("factors")?) };
        let factors = factors.ok_or_else(|| Failure::invalid("factors is null"))?;
        cache.idle(|cache, _| Ok(cache.set_key_factors(layer, factors)?))
    })
}

/// Begins a step: adds tokens to each of `count` sequences, for every layer to fill in and attend to by `flashtile_step_attend`, and
/// `flashtile_step_finish` to keep. Prompts, chunks of prompts and single tokens share a step. A sequence is listed once. Until the step ends,
/// other calls over the cache return `FLASHTILE_STATUS_STEP`.
///
/// Returns `FLASHTILE_STATUS_FULL` where there are too few pages, or a slot is too small; the cache is unchanged then.
///
/// # Safety
/// `cache` comes from `flashtile_cache_new`, and no other thread uses it; `batch` points to `count` elements, or is null where `count` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtile_step_begin(
    cache: *mut FlashtileCache,
    batch: *const FlashtileNewTokens,
    count: usize,
) -> FlashtileStatus {
    guard(|| {
        // SAFETY: the contract is the same.
        let (cache, batch) = unsafe { (owned(cache)?, list("batch", batch, count)?) };
        cache.begin(batch.unwrap_or_default())
    })
}

/// Stores the keys and values of a layer, and attends to them and to the tokens that the cache holds. Tensors have one batch entry: q
/// `[1, q_heads, tokens, head_dim]`, k `[1, kv_heads, tokens, head_dim]`, v `[1, kv_heads, tokens, value_dim]`, out `[1, q_heads, tokens,
/// value_dim]`, where `tokens` are the new ones, sequence by sequence as the batch listed them. A model's `[tokens, heads, dim]` is such a
/// tensor, with the strides `{0, dim, heads * dim, 1}`.
///
/// `options` may be null: every token sees every key of its sequence. A language model sets `causal`. `kv_lens` and `cu_seqlens` are
/// refused. It computes on the threads of `flashtile_attention`.
///
/// Returns `FLASHTILE_STATUS_INVALID` where tensors or options do not fit, and where a quantizing codec cannot store a row (not finite, or a
/// norm above 8192). The step stays open, and the layer may be tried again.
///
/// # Safety
/// `cache` comes from `flashtile_cache_new`, and no other thread uses it. `tensors` points to tensors, and `options` to options or is
/// null; both as their types say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtile_step_attend(
    cache: *mut FlashtileCache,
    layer: usize,
    tensors: *const FlashtileTensors,
    options: *const FlashtileOptions,
) -> FlashtileStatus {
    guard(|| {
        // SAFETY: the contract is the same.
        unsafe { owned(cache)?.attend(layer, tensors, options) }
    })
}

/// Ends the step and keeps its tokens. Where a layer is missing, returns `FLASHTILE_STATUS_STEP`: the step ends, and the sequences lose
/// its tokens.
///
/// # Safety
/// `cache` comes from `flashtile_cache_new`, and no other thread uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtile_step_finish(cache: *mut FlashtileCache) -> FlashtileStatus {
    guard(|| {
        // SAFETY: the contract is the same.
        unsafe { owned(cache) }?.end(true)
    })
}

/// Ends the step, and takes its tokens back: sequences have the lengths from before. Tokens that a ring gave up for the step are lost.
///
/// # Safety
/// `cache` comes from `flashtile_cache_new`, and no other thread uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtile_step_cancel(cache: *mut FlashtileCache) -> FlashtileStatus {
    guard(|| {
        // SAFETY: the contract is the same.
        unsafe { owned(cache) }?.end(false)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_in_which_a_panic_was_refuses_calls() {
        let desc = FlashtileCacheDesc {
            layout: 0,
            pages: 2,
            page_size: 4,
            layers: 1,
            kv_heads: 1,
            head_dim: 8,
            value_dim: 8,
            k_codec: 0,
            v_codec: 0,
        };
        let mut cache = ptr::null_mut();
        // SAFETY: the cache is used as the contracts say.
        unsafe {
            assert_eq!(flashtile_cache_new(&raw const desc, &raw mut cache), FlashtileStatus::Ok);
            let broken = guard(|| owned(cache)?.idle(|_, _| -> Result<(), Failure> { panic!("planted") }));
            assert_eq!(broken, FlashtileStatus::Internal);
            let mut sequence = 0;
            assert_eq!(flashtile_cache_create(cache, &raw mut sequence), FlashtileStatus::Internal);
            assert_eq!(sequence, 0);
            flashtile_cache_free(cache);
        }
    }
}
