// Recomputes the elements of a warp's output that are not finite, since they may be wrong: a product passes a
// value's infinity or NaN to every row, even to rows that do not see its key, and sums of bf16 and f32 values
// may overflow where their means do not.
//
// This is rare. The warp loads operands from device memory and multiplies them by mma.sync, a step of keys at
// a time (16 keys; of f32 8, permuted as lanes hold them), and adds infinities and NaN of values only to rows
// that see them. row_max and row_sum are right already.

// Elements of a word of an operand of mma.sync; a step has 8 times as many keys and columns.
constexpr int WORD_ELEMENTS = DTYPE == F32 ? 1 : 2, STEP_KEYS = 8 * WORD_ELEMENTS, STEP_COLUMNS = 8 * WORD_ELEMENTS;

// The element of a row in a column, 0 where one of them does not exist.
DEVICE u32 load_element(u64 row, u32 column, u32 columns) {
    if (!row || column >= columns) return 0;
    if constexpr (DTYPE == F32) return ((const u32*)row)[column];
    else return ((const u16*)row)[column];
}

// A word of a row from a column on.
DEVICE u32 load_word(u64 row, u32 column, u32 columns) {
    const u32 x = load_element(row, column, columns);
    if constexpr (WORD_ELEMENTS == 1) return x;
    else return x | load_element(row, column + 1, columns) << 16;
}

// The address of a key's row, 0 where the work tile does not have the key.
DEVICE u64 key_address(const ForwardParams& p, const Tensor& tensor, const Keys& keys, u64 head, u32 j) {
    return j >= keys.begin && j < keys.end ? head + (u64)key_offset(p, tensor, keys, j) : 0;
}

// The score of a key that its row sees, so that no mask hides it.
struct VisibleScore {
    float& x;
    const BiasedRow& row;
    u32 j;

    template <typename F>
    DEVICE void for_each(F f) { f(x); }
    template <typename F>
    DEVICE void for_each_row(F f) { f(row, *this); }
    template <typename F>
    DEVICE void for_each_distance(i64 position, F f) {
        const i64 distance = position - (i64)j;
        f(x, (float)(distance < 0 ? -distance : distance));
    }
    DEVICE void hide_outside(u32, u32) {}
    template <typename F>
    DEVICE void for_each_in(u32, u32, F) {}
    DEVICE void add_mask(const ForwardParams& p, const BiasedRow&) { x = add_bias(x, mask_bias(p, row.mask, j)); }
};

// The score of a product for a key that the row sees.
DEVICE float score_of(const ForwardParams&, const UnbiasedRow&, u32, float product) { return product; }

DEVICE float score_of(const ForwardParams& p, const BiasedRow& row, u32 j, float product) {
    score_mod<true>(p, VisibleScore{product, row, j});
    return product;
}

// Which of STEP_KEYS keys from key0 on a lane's two rows see: a bit for each key, 16 for each row.
DEVICE u32 visible_bits(const ForwardParams& p, const Row* rows, u32 key0) {
    u32 g = threadIdx.x % 32 / 4, bits = 0;
#pragma unroll 1
    for (u32 n = 0; n < 2 * STEP_KEYS; n++) {
        const u32 half = n / STEP_KEYS, key = n % STEP_KEYS;
        bits |= (u32)is_visible(p, rows[half * 8 + g], key0 + key) << (16 * half + key);
    }
    return bits;
}

// The products of a warp's rows of q, from the work tile's row `first_row` on, with STEP_KEYS keys from key0 on.
DEVICE void recompute_products(const ForwardParams& p, const WorkTile& work_tile, u32 first_row, const KvSource& source, u32 key0, float (&s)[WORD_ELEMENTS][4]) {
    u32 lane = opaque(threadIdx.x % 32), g = lane / 4, t = lane % 4;
    u64 q[2], k[WORD_ELEMENTS];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 row = work_tile.row + first_row + 8 * half + g;
        q[half] = row < row_count(p, work_tile) ? row_address(p.q, work_tile, q_row(p, work_tile.kv_head, row)) : 0;
    }
#pragma unroll
    for (int n = 0; n < WORD_ELEMENTS; n++) {
        k[n] = key_address(p, p.k, source.keys, source.k, key0 + 8 * n + g);
#pragma unroll
        for (int i = 0; i < 4; i++) s[n][i] = 0.f;
    }
#pragma unroll 1
    for (u32 column = WORD_ELEMENTS * t; column < HEAD_DIM; column += STEP_COLUMNS) {
        constexpr u32 HALF = STEP_COLUMNS / 2;
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) words[i] = load_word(q[i % 2], column + i / 2 * HALF, p.head_dim);
        AFragment<DTYPE> a;
        a.set(words);
#pragma unroll
        for (int n = 0; n < WORD_ELEMENTS; n++) a.mma(s[n], load_word(k[n], column, p.head_dim), load_word(k[n], column + HALF, p.head_dim));
    }
}

// out += prob x for the infinities and NaN of STEP_KEYS keys, in eight columns: `b` are their words as a right operand.
DEVICE void add_nonfinite_words(float (&out)[4], const u32 (&probs)[4], u32 visible, const u32 (&b)[2]) {
    u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll 1
    for (u32 key = 0; key < STEP_KEYS; key++) {
        // The lane of a group of four that has the key, its word, and the element of the word.
        const u32 owner = key % 8 / 2, second = DTYPE == F32 ? key % 2 : key / 8, element = key % WORD_ELEMENTS;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 word = __shfl_sync(ALL_LANES, second ? b[1] : b[0], 4 * (2 * t + i) + owner);
            float x = unpack<DTYPE>(word, element);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float prob = unpack<DTYPE>(__shfl_sync(ALL_LANES, second ? probs[2 + half] : probs[half], 4 * g + owner), element);
                if (!(fabsf(x) < INF) && visible >> (16 * half + key) & 1) out[2 * half + i] += prob * x;
            }
        }
    }
}

// A word of finite values times SHRINK, where their sums may overflow.
DEVICE u32 shrink_word(u32 x) {
    if constexpr (DTYPE == F32) return __float_as_uint(__uint_as_float(x) * SHRINK);
    else return CAN_OVERFLOW ? pack<DTYPE>(unpack<DTYPE>(x, 0) * SHRINK, unpack<DTYPE>(x, 1) * SHRINK) : x;
}

// A warp's rows of a work tile, from its row `first` on, and row_max of a lane's two in units of log2, 0 where it is -inf.
struct WarpRows {
    u32 first;
    const Row* rows;
    float shift[2];
};

// The probabilities of STEP_KEYS keys from key0 on, of their products, as a left operand. `visible` are a lane's `visible_bits`.
DEVICE void recompute_probs(const ForwardParams& p, const WarpRows& warp, u32 key0, u32 visible, const float (&products)[WORD_ELEMENTS][4], u32 (&words)[4]) {
    const float scale = score_scale(p);
    const u32 lane = opaque(threadIdx.x % 32), g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < WORD_ELEMENTS; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float x[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u32 key = 8 * n + 2 * t + i;
                float score = -INF;
                if (visible >> (16 * half + key) & 1) score = score_of(p, warp.rows[8 * half + g], key0 + key, products[n][2 * half + i]);
                x[i] = exp2_approx(Scoring::HAS_BIAS ? score - warp.shift[half] : fmaf(score, scale, -warp.shift[half]));
            }
            if constexpr (DTYPE == F32) words[half] = __float_as_uint(x[0]), words[2 + half] = __float_as_uint(x[1]);
            else words[2 * n + half] = pack<DTYPE>(x[0], x[1]);
        }
}

// Columns of the output that are recomputed at a time, in fragments of eight: code for all of them would take most of a compilation, and threads of
// three or four warpgroups have few registers.
constexpr int RECOMPUTE_MMA_N = PV_MMA_N > 16 || WARPS > 8 ? 2 : 4;
static_assert(PV_MMA_N % RECOMPUTE_MMA_N == 0);

// The output of a warp's rows in RECOMPUTE_MMA_N fragments of columns, from fragment `first_n` on.
DEVICE void recompute_columns(const ForwardParams& p, const WorkTile& work_tile, const WarpRows& warp, u32 first_n, float (&out)[RECOMPUTE_MMA_N][4]) {
    const u32 lane = opaque(threadIdx.x % 32), g = lane / 4, t = lane % 4;
#pragma unroll 1
    for (u32 key0 = work_tile.begin / STEP_KEYS * STEP_KEYS; key0 < work_tile.end; key0 += STEP_KEYS) {
        // Addresses are recomputed in each step, so that they occupy no registers between steps.
        const WorkTile& found = *opaque(&work_tile);
        const KvSource source(p, found);
        float products[WORD_ELEMENTS][4];
        recompute_products(p, found, warp.first, source, key0, products);
        const u32 visible = visible_bits(p, warp.rows, key0);
        u32 words[4];
        recompute_probs(p, warp, key0, visible, products, words);
        AFragment<DTYPE> probs;
        probs.set(words);
        // The addresses of the value rows from which word i of a right operand takes its elements.
        u64 v[2][WORD_ELEMENTS];
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int e = 0; e < WORD_ELEMENTS; e++)
                v[i][e] = key_address(p, p.v, source.keys, source.v, key0 + 2 * t + (DTYPE == F32 ? i : 8 * i + e));
#pragma unroll
        for (int n = 0; n < RECOMPUTE_MMA_N; n++) {
            const u32 column = opaque(8 * (first_n + n) + g);
            u32 b[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                b[i] = load_element(v[i][0], column, source.value_dim);
                if constexpr (WORD_ELEMENTS == 2) b[i] |= load_element(v[i][1], column, source.value_dim) << 16;
            }
            if (__any_sync(ALL_LANES, has_nonfinite<DTYPE>(b[0]) || has_nonfinite<DTYPE>(b[1]))) add_nonfinite_words(out[n], words, visible, b);
#pragma unroll
            for (int i = 0; i < 2; i++) b[i] = shrink_word(zero_nonfinite<DTYPE>(b[i]));
            probs.mma(out[n], b[0], b[1]);
        }
    }
}

// Replaces the infinities and NaN of acc.out; other elements stay, so that a key's NaN changes nothing in rows that do not see it. If sums can
// overflow, all elements are then sums of values times SHRINK. `rows` are the warp's, from the work tile's row `first_row` on.
DEVICE void recompute_out(const ForwardParams& p, const WorkTile& work_tile, u32 first_row, const Row* rows, OnlineSoftmax& acc) {
    const float scale = score_scale(p);
    WarpRows warp = {first_row, rows};
#pragma unroll
    for (int half = 0; half < 2; half++) warp.shift[half] = acc.row_max[0][half] == -INF ? 0.f : acc.row_max[0][half] * scale;
#pragma unroll 1
    for (int first_n = 0; first_n < PV_MMA_N; first_n += RECOMPUTE_MMA_N) {
        float out[RECOMPUTE_MMA_N][4] = {};
        recompute_columns(p, work_tile, warp, first_n, out);
#pragma unroll
        for (int n = 0; n < PV_MMA_N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (n / RECOMPUTE_MMA_N * RECOMPUTE_MMA_N == first_n) {
                    float& x = acc.out[0][n][i];
                    x = fabsf(x) < INF ? x * (CAN_OVERFLOW ? SHRINK : 1.f) : out[n % RECOMPUTE_MMA_N][i];
                }
    }
}
