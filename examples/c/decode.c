// Attention from C: one call over tensors, then a decode loop of two sequences and a fork over KV caches, of floats and of 8-bit codes. Each
// result is compared with attention as it is defined, in double; the exit status is 1 where one differs.
//
//     cargo build --release -p flashtile-c
//     cc -Icrates/c examples/c/decode.c -o decode target/release/libflashtile_c.a -lm -lpthread -ldl && ./decode

#include "flashtile.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 2, Q_HEADS = 4, KV_HEADS = 2, DIM = 64, MAX_TOKENS = 64, MAX_SEQUENCES = 3 };

static void must(FlashtileStatus status, const char *what) {
    if (status != FLASHTILE_STATUS_OK) {
        fprintf(stderr, "%s: status %d: %s\n", what, (int)status, flashtile_last_error());
        exit(1);
    }
}

// Elements that differ from tensor to tensor, between -1 and 1.
static void fill(float *rows, size_t count, unsigned seed) {
    unsigned x = seed * 2654435761u + 1;
    for (size_t i = 0; i < count; i++) {
        x = x * 1664525u + 1013904223u;
        rows[i] = (float)(x >> 8) / 8388608.0f - 1.0f;
    }
}

// A tensor of a model: [tokens, heads, DIM].
static FlashtileTensor packed(const float *rows, size_t heads, size_t tokens) {
    FlashtileTensor tensor = {rows, FLASHTILE_DTYPE_F32, {1, heads, tokens, DIM}, {0, DIM, heads * DIM, 1}};
    return tensor;
}

static FlashtileTensorMut packed_mut(float *rows, size_t heads, size_t tokens) {
    FlashtileTensorMut tensor = {rows, FLASHTILE_DTYPE_F32, {1, heads, tokens, DIM}, {0, DIM, heads * DIM, 1}};
    return tensor;
}

// Attention of one query of one head to the keys first..last, as it is defined. Rows of keys and values are KV_HEADS * DIM apart. Returns the
// logsumexp.
static double naive(const float *q, const float *k, const float *v, size_t first, size_t last, float *out) {
    double score[MAX_TOKENS], max = -INFINITY, sum = 0.0;
    for (size_t j = first; j < last; j++) {
        double dot = 0.0;
        for (size_t d = 0; d < DIM; d++) {
            dot += (double)q[d] * k[j * KV_HEADS * DIM + d];
        }
        score[j] = dot / sqrt(DIM);
        max = fmax(max, score[j]);
    }
    for (size_t j = first; j < last; j++) {
        sum += exp(score[j] - max);
    }
    for (size_t d = 0; d < DIM; d++) {
        double x = 0.0;
        for (size_t j = first; j < last; j++) {
            x += exp(score[j] - max) / sum * v[j * KV_HEADS * DIM + d];
        }
        out[d] = (float)x;
    }
    return max + log(sum);
}

// Keys and values of a sequence, as the loop remembers them to check the cache.
typedef struct {
    FlashtileSequence id;
    size_t tokens;
    float k[LAYERS][MAX_TOKENS][KV_HEADS][DIM];
    float v[LAYERS][MAX_TOKENS][KV_HEADS][DIM];
} Sequence;

// Compares `tokens` rows [tokens, Q_HEADS, DIM], the last of a sequence, with the definition; returns the largest difference.
static double compare(const Sequence *of, size_t layer, size_t window, const float *q, const float *got, size_t tokens) {
    double worst = 0.0;
    for (size_t t = 0; t < tokens; t++) {
        size_t position = of->tokens - tokens + t, first = position > window ? position - window : 0;
        for (size_t h = 0; h < Q_HEADS; h++) {
            size_t kv_head = h / (Q_HEADS / KV_HEADS), row = (t * Q_HEADS + h) * DIM;
            float want[DIM];
            naive(q + row, of->k[layer][0][kv_head], of->v[layer][0][kv_head], first, position + 1, want);
            for (size_t d = 0; d < DIM; d++) {
                worst = fmax(worst, fabs((double)got[row + d] - want[d]));
            }
        }
    }
    return worst;
}

// One step: new tokens of each sequence through all layers, the second with a window of 10 keys.
static double step(FlashtileCache *cache, Sequence *sequences, const size_t *tokens, size_t count, unsigned seed) {
    static float q[MAX_TOKENS * Q_HEADS * DIM], k[MAX_TOKENS * KV_HEADS * DIM], v[MAX_TOKENS * KV_HEADS * DIM];
    static float out[MAX_TOKENS * Q_HEADS * DIM];
    FlashtileNewTokens batch[MAX_SEQUENCES];
    size_t total = 0;
    double worst = 0.0;
    for (size_t s = 0; s < count; s++) {
        batch[s].sequence = sequences[s].id;
        batch[s].tokens = tokens[s];
        sequences[s].tokens += tokens[s];
        total += tokens[s];
    }
    must(flashtile_step_begin(cache, batch, count), "begin");
    for (size_t layer = 0; layer < LAYERS; layer++) {
        fill(q, total * Q_HEADS * DIM, 8 * seed + layer);
        fill(k, total * KV_HEADS * DIM, 8 * seed + layer + 2);
        fill(v, total * KV_HEADS * DIM, 8 * seed + layer + 4);
        FlashtileTensors tensors = {packed(q, Q_HEADS, total), packed(k, KV_HEADS, total), packed(v, KV_HEADS, total),
                                    packed_mut(out, Q_HEADS, total), {NULL, 0}};
        FlashtileOptions options = {0};
        options.causal = 1;
        options.has_window = layer == 1;
        options.window_left = layer == 1 ? 9 : 0;
        must(flashtile_step_attend(cache, layer, &tensors, &options), "attend");
        for (size_t s = 0, row = 0; s < count; row += tokens[s], s++) {
            size_t before = sequences[s].tokens - tokens[s], bytes = tokens[s] * KV_HEADS * DIM * sizeof(float);
            memcpy(sequences[s].k[layer][before], k + row * KV_HEADS * DIM, bytes);
            memcpy(sequences[s].v[layer][before], v + row * KV_HEADS * DIM, bytes);
            size_t window = layer == 1 ? 9 : MAX_TOKENS, at = row * Q_HEADS * DIM;
            worst = fmax(worst, compare(&sequences[s], layer, window, q + at, out + at, tokens[s]));
        }
    }
    must(flashtile_step_finish(cache), "finish");
    return worst;
}

static int decode(uint32_t codec, const char *name, double limit) {
    static Sequence sequences[MAX_SEQUENCES];
    FlashtileCacheDesc desc = {FLASHTILE_LAYOUT_PAGED, 16, 8, LAYERS, KV_HEADS, DIM, DIM, codec, codec};
    FlashtileCache *cache = NULL;
    double worst = 0.0;
    must(flashtile_cache_new(&desc, &cache), "cache");
    for (size_t s = 0; s < 2; s++) {
        must(flashtile_cache_create(cache, &sequences[s].id), "create");
        sequences[s].tokens = 0;
    }
    const size_t prompts[] = {11, 3}, next[] = {1, 1, 1};
    worst = fmax(worst, step(cache, sequences, prompts, 2, 1));
    for (unsigned n = 0; n < 6; n++) {
        worst = fmax(worst, step(cache, sequences, next, 2, 2 + n));
    }
    // A second answer to the first prompt: a fork that goes back to it.
    sequences[2] = sequences[0];
    must(flashtile_cache_fork(cache, sequences[0].id, &sequences[2].id), "fork");
    must(flashtile_cache_truncate(cache, sequences[2].id, prompts[0]), "truncate");
    sequences[2].tokens = prompts[0];
    for (unsigned n = 0; n < 6; n++) {
        worst = fmax(worst, step(cache, sequences, next, 3, 10 + n));
    }
    // The window of one layer does not keep tokens: the other still sees all. A sequence that is removed frees its pages.
    size_t length = 0;
    must(flashtile_cache_length(cache, sequences[2].id, &length), "length");
    must(flashtile_cache_remove(cache, sequences[1].id), "remove");
    if (flashtile_cache_remove(cache, sequences[1].id) != FLASHTILE_STATUS_INVALID) {
        fprintf(stderr, "a sequence was removed twice\n");
        return 1;
    }
    FlashtileCacheMemory memory;
    must(flashtile_cache_memory(cache, &memory), "memory");
    flashtile_cache_free(cache);
    printf("decode over %s: largest difference %.1e of %.0e; %zu tokens in %zu of %zu pages\n", name, worst, limit, memory.tokens,
           memory.pages - memory.pages_free, memory.pages);
    return length != sequences[2].tokens || !(worst <= limit);
}

static int dense(void) {
    enum { TOKENS = 40 };
    static Sequence sequence;
    static float q[TOKENS * Q_HEADS * DIM], out[TOKENS * Q_HEADS * DIM], lse[Q_HEADS * TOKENS];
    float *k = &sequence.k[0][0][0][0], *v = &sequence.v[0][0][0][0], row[DIM];
    sequence.tokens = TOKENS;
    fill(q, TOKENS * Q_HEADS * DIM, 101);
    fill(k, TOKENS * KV_HEADS * DIM, 102);
    fill(v, TOKENS * KV_HEADS * DIM, 103);
    FlashtileTensors tensors = {packed(q, Q_HEADS, TOKENS), packed(k, KV_HEADS, TOKENS), packed(v, KV_HEADS, TOKENS),
                                packed_mut(out, Q_HEADS, TOKENS), {lse, Q_HEADS * TOKENS}};
    FlashtileOptions options = {0};
    options.causal = 1;
    must(flashtile_attention(&tensors, &options), "attention");
    double worst = compare(&sequence, 0, MAX_TOKENS, q, out, TOKENS);
    // The logsumexp [Q_HEADS, TOKENS] of the last row of the last head.
    double want = naive(q + (TOKENS * Q_HEADS - 1) * DIM, k + DIM, v + DIM, 0, TOKENS, row);
    worst = fmax(worst, fabs(lse[Q_HEADS * TOKENS - 1] - want));
    printf("dense: largest difference %.1e\n", worst);

    char *text = NULL;
    must(flashtile_explain(&tensors, &options, &text), "explain");
    fputs(text, stdout);
    flashtile_text_free(text);

    // What does not fit is refused, with numbers.
    tensors.k.shape[2] = TOKENS - 1;
    if (flashtile_attention(&tensors, &options) != FLASHTILE_STATUS_INVALID) {
        fprintf(stderr, "more queries than keys need an offset, and were not refused\n");
        return 1;
    }
    printf("refused: %s\n", flashtile_last_error());
    return !(worst <= 1e-5);
}

int main(void) {
    if (strcmp(flashtile_version(), FLASHTILE_VERSION) != 0) {
        fprintf(stderr, "the library is %s, its header %s\n", flashtile_version(), FLASHTILE_VERSION);
        return 1;
    }
    int wrong = dense();
    wrong |= decode(FLASHTILE_CODEC_F32, "f32", 1e-5);
    wrong |= decode(FLASHTILE_CODEC_INT8, "int8", 3e-2);
    return wrong;
}
