// The C interface of flashtile: fused attention over the caller's memory, and KV caches that it attends to.
//
// - Functions return a FlashtileStatus. flashtile_last_error() has the reason of the last refusal on this thread, with numbers.
// - Codes are numbers: a field of type uint32_t names the enumeration whose values it takes, and any other value is refused. A struct whose
//   bytes are all 0 has the defaults, where there are any.
// - Sizes and strides are in elements; only names with "bytes" count bytes.
// - What is written here as a contract and cannot be checked (that memory is as large as shapes and strides say, that what is written is apart
//   from what is read, that a cache is used by one thread at a time) is the caller's to keep. Everything else is checked: null pointers, codes,
//   lengths of lists, shapes, strides, alignment.
// - No panic leaves the library: a mistake of its own is FLASHTILE_STATUS_INTERNAL.
// - Everything runs on the processor, in main memory. Memory of a GPU is not accepted yet.
//
// Made by cbindgen from the sources of flashtile-c: change those, and write this file anew by
// FLASHTILE_BLESS=1 cargo test -p flashtile-c --test header


#ifndef FLASHTILE_H
#define FLASHTILE_H

#include <stddef.h>
#include <stdint.h>

// The version of this header.
#define FLASHTILE_VERSION "0.1.0"

// Result of a function. `flashtile_last_error` has the reason in words, with the numbers that caused it.
typedef enum FlashtileStatus {
  // Done.
  FLASHTILE_STATUS_OK = 0,
  // The arguments contradict each other or the contract: a null pointer, a shape that does not fit, an unknown sequence. Nothing was
  // changed, but that `flashtile_step_attend` may have stored the rows of its layer.
  FLASHTILE_STATUS_INVALID = 1,
  // The request is valid, and the backend has no kernel for it.
  FLASHTILE_STATUS_UNSUPPORTED = 2,
  // The cache has too few free pages or slots, or the sequence would become longer than its slot. Nothing was changed.
  FLASHTILE_STATUS_FULL = 3,
  // There is no memory for a cache, a workspace or a result.
  FLASHTILE_STATUS_MEMORY = 4,
  // A device, or the system's threads, failed.
  FLASHTILE_STATUS_DEVICE = 5,
  // The call needs an open step where there is none, or no open step where there is one.
  FLASHTILE_STATUS_STEP = 6,
  // A mistake of the library's own. A cache that was used in the call refuses all further calls but `flashtile_cache_free`.
  FLASHTILE_STATUS_INTERNAL = 7,
} FlashtileStatus;

// How the row of one token and one head is stored. Bytes are for 128 elements.
typedef enum FlashtileCodec {
  // Elements as F32: 512 bytes.
  FLASHTILE_CODEC_F32 = 0,
  // Elements as F16: 256 bytes.
  FLASHTILE_CODEC_F16 = 1,
  // Elements as BF16: 256 bytes.
  FLASHTILE_CODEC_BF16 = 2,
  // Values of 8 bits (e4m3) and a scale: 130 bytes.
  FLASHTILE_CODEC_FP8 = 3,
  // Rotated, integers of 8 bits and a scale: 130 bytes.
  FLASHTILE_CODEC_INT8 = 4,
  // Rotated, a codebook of 6 bits and a scale: 98 bytes.
  FLASHTILE_CODEC_TQ6 = 5,
  // Rotated, a codebook of 5 bits and a scale: 82 bytes.
  FLASHTILE_CODEC_TQ5 = 6,
  // Rotated, a codebook of 4 bits and a scale: 66 bytes.
  FLASHTILE_CODEC_TQ4 = 7,
  // Rotated, a codebook of 3 bits and a scale: 50 bytes.
  FLASHTILE_CODEC_TQ3 = 8,
  // Rotated, a codebook of 2 bits and a scale: 34 bytes.
  FLASHTILE_CODEC_TQ2 = 9,
  // Rotated, elements as F16 without a scale, beside codes: 256 bytes.
  FLASHTILE_CODEC_ROT16 = 10,
} FlashtileCodec;

// Element type of a tensor.
typedef enum FlashtileDtype {
  // IEEE 754 binary32: `float`.
  FLASHTILE_DTYPE_F32 = 0,
  // IEEE 754 binary16.
  FLASHTILE_DTYPE_F16 = 1,
  // bfloat16: the upper half of a binary32.
  FLASHTILE_DTYPE_BF16 = 2,
} FlashtileDtype;

// How a cache lays out tokens.
typedef enum FlashtileLayout {
  // Sequences take pages as they grow, and forked ones share them.
  FLASHTILE_LAYOUT_PAGED = 0,
  // Each sequence has a slot, a page of its own, for its first `page_size` tokens.
  FLASHTILE_LAYOUT_CONTIGUOUS = 1,
  // Each sequence has a slot, a page of its own, for its last `page_size` tokens. A window of `w` keys to the left and steps of `n`
  // tokens need `w + n`.
  FLASHTILE_LAYOUT_RING = 2,
} FlashtileLayout;

// Kind of the elements of a mask.
typedef enum FlashtileMaskKind {
  // A byte: the key is visible where it is not 0.
  FLASHTILE_MASK_KIND_BOOL = 0,
  // Added to the score, as F32. Minus infinity hides the key.
  FLASHTILE_MASK_KIND_F32 = 1,
  // Added to the score, as F16.
  FLASHTILE_MASK_KIND_F16 = 2,
  // Added to the score, as BF16.
  FLASHTILE_MASK_KIND_BF16 = 3,
} FlashtileMaskKind;

// Key position of query row 0. Where causality, a window or ALiBi meets `q_len != kv_len` or `kv_lens`, it has to be said.
typedef enum FlashtileQOffset {
  // Not said. In a step of a cache each token sits at its place in its sequence.
  FLASHTILE_Q_OFFSET_NONE = 0,
  // Row 0 sits at key 0.
  FLASHTILE_Q_OFFSET_TOP_LEFT = 1,
  // The last row sits at the last key of its sequence.
  FLASHTILE_Q_OFFSET_BOTTOM_RIGHT = 2,
  // Row 0 sits at the key `q_offset_at`.
  FLASHTILE_Q_OFFSET_AT = 3,
} FlashtileQOffset;

// A KV cache in main memory: keys and values of sequences that grow token by token. One thread at a time may use it.
typedef struct FlashtileCache FlashtileCache;

// A tensor that is read: `[batch, heads, rows, dim]`, whatever the order in memory. Every element that `shape` reaches from `data` with
// `strides` is readable, and nothing writes it during the call. `data` is a multiple of the size of an element, and may be null where
// the shape has a 0.
typedef struct FlashtileTensor {
  // The first element.
  const void *data;
  // A `FlashtileDtype`.
  uint32_t dtype;
  // Elements of each axis: batch, heads, rows, dim.
  size_t shape[4];
  // Elements between neighbours of each axis. The last one is 1.
  size_t strides[4];
} FlashtileTensor;

// A tensor that is written: like `FlashtileTensor`, every element writable, without a stride by which two elements share memory, and
// apart from everything that the call reads. Its memory may be uninitialized.
typedef struct FlashtileTensorMut {
  // The first element.
  void *data;
  // A `FlashtileDtype`.
  uint32_t dtype;
  // Elements of each axis: batch, heads, rows, dim.
  size_t shape[4];
  // Elements between neighbours of each axis. The last one is 1.
  size_t strides[4];
} FlashtileTensorMut;

// A list that is written; `{NULL, 0}` is no list. Its memory may be uninitialized, and is apart from everything that the call reads.
typedef struct FlashtileFloatsMut {
  // The first element.
  float *data;
  // Elements.
  size_t len;
} FlashtileFloatsMut;

// The tensors of one attention: q `[batch, q_heads, q_len, head_dim]`, k `[batch, kv_heads, kv_len, head_dim]` and v `[batch, kv_heads,
// kv_len, value_dim]` give out `[batch, q_heads, q_len, value_dim]`. All have one dtype; `q_heads` is a multiple of `kv_heads`.
typedef struct FlashtileTensors {
  // Queries.
  struct FlashtileTensor q;
  // Keys.
  struct FlashtileTensor k;
  // Values.
  struct FlashtileTensor v;
  // Results.
  struct FlashtileTensorMut out;
  // The logsumexp of each row, dense `[batch, q_heads, q_len]`, if wanted. Where a call is refused it may be set to 0.
  struct FlashtileFloatsMut lse;
} FlashtileTensors;

// A list that is read; `{NULL, 0}` is no list.
typedef struct FlashtileFloats {
  // The first element.
  const float *data;
  // Elements.
  size_t len;
} FlashtileFloats;

// A mask: `[batch, heads, queries, keys]`. An axis of size 1, or of stride 0, stands for all. The memory from the first element to the
// last is readable and initialized.
typedef struct FlashtileMask {
  // The first element.
  const void *data;
  // A `FlashtileMaskKind`.
  uint32_t kind;
  // Elements of each axis: batch, heads, queries, keys.
  size_t shape[4];
  // Elements between neighbours of each axis. The last one is 1, or 0 where all keys of a query have the same element.
  size_t strides[4];
} FlashtileMask;

// A list of sizes that is read; `{NULL, 0}` is no list.
typedef struct FlashtileSizes {
  // The first element.
  const size_t *data;
  // Elements.
  size_t len;
} FlashtileSizes;

// Options of an attention. All bytes 0 are the defaults: every query sees every key, the scale is `1 / sqrt(head_dim)`.
//
// ```text
// score[i,j] = softcap(scale * q[i] . k[j]) + bias[i,j]      lse[i] = ln(exp(sink) + sum_j exp(score[i,j]))
// out[i]     = sum_j exp(score[i,j] - lse[i]) * v[j]         bias    = -slope * |p(i) - j| + mask[i,j]
// ```
//
// `j` runs over the visible keys, and `p(i)` is the key position of query `i`. A row that sees no key is 0, its lse minus infinity.
typedef struct FlashtileOptions {
  // 1: a query sees the keys up to its own position.
  uint32_t causal;
  // 1: a query sees `window_left` keys before and `window_right` keys after its own; -1 is unbounded. A causal window of 1024 keys
  // is 1023 and 0. If 0, both are 0.
  uint32_t has_window;
  // Keys before the query's own.
  int64_t window_left;
  // Keys after the query's own.
  int64_t window_right;
  // A `FlashtileQOffset`.
  uint32_t q_offset;
  // The key of row 0 with `FLASHTILE_Q_OFFSET_AT`, or else 0. It may be negative.
  int64_t q_offset_at;
  // Multiplier of `q . k`; 0 is `1 / sqrt(head_dim)`.
  float scale;
  // `c` of `softcap(x) = c * tanh(x / c)`; 0 is no softcap.
  float softcap;
  // Slopes of ALiBi, `[q_heads]` or `[sequences, q_heads]`.
  struct FlashtileFloats alibi_slopes;
  // Logits that join the denominator of the softmax, `[q_heads]`.
  struct FlashtileFloats sinks;
  // A mask, or null. It broadcasts to `[batch, q_heads, q_len, kv_len]`; for packed sequences and steps of a cache to
  // `[sequences, q_heads, longest q_len, longest kv_len]`.
  const struct FlashtileMask *mask;
  // Keys of each batch entry, `[batch]`: rows of k and v past it are padding, and not read.
  struct FlashtileSizes kv_lens;
  // Packed sequences lie one after another in the rows of q, in a single batch entry: the first row of each, then the total.
  struct FlashtileSizes cu_seqlens_q;
  // The first row of k and v of each packed sequence, then the total. Both lists are given, or none.
  struct FlashtileSizes cu_seqlens_k;
} FlashtileOptions;

// Description of a cache.
typedef struct FlashtileCacheDesc {
  // A `FlashtileLayout`.
  uint32_t layout;
  // Pages, or slots: the capacity of the cache is `pages * page_size` tokens.
  size_t pages;
  // Tokens of a page or slot.
  size_t page_size;
  // Layers of the model. All of them hold the same tokens.
  size_t layers;
  // Key/value heads.
  size_t kv_heads;
  // Elements of a key: 1 to 512.
  size_t head_dim;
  // Elements of a value: 1 to 512.
  size_t value_dim;
  // A `FlashtileCodec`, for keys.
  uint32_t k_codec;
  // A `FlashtileCodec`, for values.
  uint32_t v_codec;
} FlashtileCacheDesc;

// A sequence of a cache. No other cache accepts it, and its own refuses it once it is removed: numbers are not used again, and none is 0.
typedef uint64_t FlashtileSequence;

// Memory use of a cache.
typedef struct FlashtileCacheMemory {
  // Bytes of all pages. The system provides them on first write.
  size_t bytes_reserved;
  // Bytes of the pages in use.
  size_t bytes_used;
  // Pages, or slots.
  size_t pages;
  // Free pages.
  size_t pages_free;
  // Pages with several holders.
  size_t pages_shared;
  // Sequences.
  size_t sequences;
  // Kept tokens, summed over sequences: shared ones count once for each.
  size_t tokens;
} FlashtileCacheMemory;

// Tokens that a step adds to a sequence.
typedef struct FlashtileNewTokens {
  // The sequence.
  FlashtileSequence sequence;
  // Tokens.
  size_t tokens;
} FlashtileNewTokens;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The text of the last error of the calling thread, in UTF-8, or an empty text. It is the library's, and valid until the next call
// of a flashtile function on this thread. A call that succeeds does not clear it.
const char *flashtile_last_error(void);

// The version of the library: `0.1.0`. A text of static storage. Before 1.0, structs may change between minor versions: compare with
// `FLASHTILE_VERSION` of the header.
const char *flashtile_version(void);

// Computes attention on the processor, over the caller's memory. Reads and writes nothing past the elements that shapes and strides
// reach, and computes on the threads of a pool that all calls of the process share: as many as there are processors, or as the
// environment variable RAYON_NUM_THREADS says at the first call. Threads may call it at the same time. Each calling thread keeps the
// plans of its last problems and the workspace of its largest until it ends. A child of `fork` has no pool: it must not compute.
//
// `options` may be null: every query sees every key.
//
// Returns `FLASHTILE_STATUS_INVALID` where options contradict shapes or tensors do not fit each other, `FLASHTILE_STATUS_UNSUPPORTED`
// where the problem has too many tasks for a plan, `FLASHTILE_STATUS_MEMORY` where there is no memory for the workspace. `out` is not
// written then.
//
// # Safety
// `tensors` points to tensors, and `options` to options or is null; both as their types say.
enum FlashtileStatus flashtile_attention(const struct FlashtileTensors *tensors,
                                         const struct FlashtileOptions *options);

// Says how `flashtile_attention` would compute these tensors on this machine: instruction set, kernel, tiles, tasks, splits and workspace,
// and why. Only shapes and dtypes of q, k and v are looked at; `data` may be null. Lists and the mask are as for `flashtile_attention`.
//
// `*text` becomes a text of several lines in UTF-8, which `flashtile_text_free` frees, or null where the call is refused, for the
// reasons of `flashtile_attention`.
//
// # Safety
// `tensors` points to tensors, and `options` to options or is null; both as their types say, but no `data` of a tensor is read. `text` points to a writable
// pointer.
enum FlashtileStatus flashtile_explain(const struct FlashtileTensors *tensors,
                                       const struct FlashtileOptions *options,
                                       char **text);

// Frees a text of `flashtile_explain`; null is ignored.
//
// # Safety
// `text` is null, or comes from `flashtile_explain` and was not freed.
void flashtile_text_free(char *text);

// Makes an empty cache in main memory. `*cache` becomes the cache, which `flashtile_cache_free` frees, or null where the call is refused:
// with `FLASHTILE_STATUS_INVALID` for a size of 0 or above its maximum and for a dimension that a codec does not store, with
// `FLASHTILE_STATUS_MEMORY` where there is no memory.
//
// # Safety
// `desc` points to a description, and `cache` to a writable pointer.
enum FlashtileStatus flashtile_cache_new(const struct FlashtileCacheDesc *desc,
                                         struct FlashtileCache **cache);

// Frees a cache, with its sequences and an open step; null is ignored.
//
// # Safety
// `cache` is null, or comes from `flashtile_cache_new` and was not freed; no other thread uses it.
void flashtile_cache_free(struct FlashtileCache *cache);

// Makes an empty sequence. In contiguous and ring layouts it takes a slot: `FLASHTILE_STATUS_FULL` where none is free.
//
// # Safety
// `cache` comes from `flashtile_cache_new`, and no other thread uses it; `sequence` is writable.
enum FlashtileStatus flashtile_cache_create(struct FlashtileCache *cache, FlashtileSequence *sequence);

// Makes a sequence of the same tokens as another: in the same pages, where the layout has pages, and else in a slot of its own, to which
// the tokens are copied.
//
// # Safety
// `cache` comes from `flashtile_cache_new`, and no other thread uses it; `forked` is writable.
enum FlashtileStatus flashtile_cache_fork(struct FlashtileCache *cache,
                                          FlashtileSequence sequence,
                                          FlashtileSequence *forked);

// Removes a sequence: pages that no other sequence holds are free again.
//
// # Safety
// `cache` comes from `flashtile_cache_new`, and no other thread uses it.
enum FlashtileStatus flashtile_cache_remove(struct FlashtileCache *cache, FlashtileSequence sequence);

// Removes the tokens from position `length` on, as speculative decoding rolls back.
//
// # Safety
// `cache` comes from `flashtile_cache_new`, and no other thread uses it.
enum FlashtileStatus flashtile_cache_truncate(struct FlashtileCache *cache, FlashtileSequence sequence, size_t length);

// Drops the tokens before position `before`, as a sequence that moves on with a window does. Positions and length stay what they are; a
// query that would see a dropped token is refused.
//
// # Safety
// `cache` comes from `flashtile_cache_new`, and no other thread uses it.
enum FlashtileStatus flashtile_cache_forget(struct FlashtileCache *cache,
                                            FlashtileSequence sequence,
                                            size_t before);

// The length of a sequence in tokens, dropped ones included: the position of its next token.
//
// # Safety
// `cache` comes from `flashtile_cache_new`, and no other thread uses it; `length` is writable.
enum FlashtileStatus flashtile_cache_length(struct FlashtileCache *cache, FlashtileSequence sequence, size_t *length);

// Pages, tokens and bytes of a cache: whether a prompt has room.
//
// # Safety
// `cache` comes from `flashtile_cache_new`, and no other thread uses it; `memory` is writable.
enum FlashtileStatus flashtile_cache_memory(struct FlashtileCache *cache, struct FlashtileCacheMemory *memory);

// Sets the mean `[kv_heads, head_dim]` that is subtracted from the keys of a layer before they are quantized. It is a constant of the model,
// and refused once the layer has rows or where keys are not quantized. Attention is exact with any mean.
//
// # Safety
// `cache` comes from `flashtile_cache_new`, and no other thread uses it; the elements of `mean` are readable.
enum FlashtileStatus flashtile_cache_set_key_mean(struct FlashtileCache *cache,
                                                  size_t layer,
                                                  struct FlashtileFloats mean);

// Sets the factors `[kv_heads, head_dim]` that the keys of a layer are divided by, after their mean is subtracted. They are constants of the
// model, of magnitudes from 2^-32 to 2^32, and refused once the layer has rows or where keys are neither int8, tq6 to tq2 nor rot16. Attention
// is exact with any factors.
//
// # Safety
// `cache` comes from `flashtile_cache_new`, and no other thread uses it; the elements of `factors` are readable.
enum FlashtileStatus flashtile_cache_set_key_factors(struct FlashtileCache *cache,
                                                     size_t layer,
                                                     struct FlashtileFloats factors);

// Begins a step: adds tokens to each of `count` sequences, for every layer to fill in and attend to by `flashtile_step_attend`, and
// `flashtile_step_finish` to keep. Prompts, chunks of prompts and single tokens share a step. A sequence is listed once. Until the step ends,
// other calls over the cache return `FLASHTILE_STATUS_STEP`.
//
// Returns `FLASHTILE_STATUS_FULL` where there are too few pages, or a slot is too small; the cache is unchanged then.
//
// # Safety
// `cache` comes from `flashtile_cache_new`, and no other thread uses it; `batch` points to `count` elements, or is null where `count` is 0.
enum FlashtileStatus flashtile_step_begin(struct FlashtileCache *cache,
                                          const struct FlashtileNewTokens *batch,
                                          size_t count);

// Stores the keys and values of a layer, and attends to them and to the tokens that the cache holds. Tensors have one batch entry: q
// `[1, q_heads, tokens, head_dim]`, k `[1, kv_heads, tokens, head_dim]`, v `[1, kv_heads, tokens, value_dim]`, out `[1, q_heads, tokens,
// value_dim]`, where `tokens` are the new ones, sequence by sequence as the batch listed them. A model's `[tokens, heads, dim]` is such a
// tensor, with the strides `{0, dim, heads * dim, 1}`.
//
// `options` may be null: every token sees every key of its sequence. A language model sets `causal`. `kv_lens` and `cu_seqlens` are
// refused. It computes on the threads of `flashtile_attention`.
//
// Returns `FLASHTILE_STATUS_INVALID` where tensors or options do not fit, and where a quantizing codec cannot store a row (not finite, or a
// norm above 8192). The step stays open, and the layer may be tried again.
//
// # Safety
// `cache` comes from `flashtile_cache_new`, and no other thread uses it. `tensors` points to tensors, and `options` to options or is
// null; both as their types say.
enum FlashtileStatus flashtile_step_attend(struct FlashtileCache *cache,
                                           size_t layer,
                                           const struct FlashtileTensors *tensors,
                                           const struct FlashtileOptions *options);

// Ends the step and keeps its tokens. Where a layer is missing, returns `FLASHTILE_STATUS_STEP`: the step ends, and the sequences lose
// its tokens.
//
// # Safety
// `cache` comes from `flashtile_cache_new`, and no other thread uses it.
enum FlashtileStatus flashtile_step_finish(struct FlashtileCache *cache);

// Ends the step, and takes its tokens back: sequences have the lengths from before. Tokens that a ring gave up for the step are lost.
//
// # Safety
// `cache` comes from `flashtile_cache_new`, and no other thread uses it.
enum FlashtileStatus flashtile_step_cancel(struct FlashtileCache *cache);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* FLASHTILE_H */
