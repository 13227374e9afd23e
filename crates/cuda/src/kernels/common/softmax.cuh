// The online softmax of a warp's rows, in registers.
//
// In lane 4 g + t, element [m][half] of row_max and row_sum is for row 16 m + 8 half + g. Fragments of scores and of the output are
// accumulators of `mma.cuh`.

// row_max may grow by this power of 2 before row_sum and the output are scaled: probabilities are at most
// 2^8, which every dtype holds, and most tiles scale nothing. MAX_PROB is 2 to that power.
constexpr float RESCALE_THRESHOLD = 8.f, MAX_PROB = 256.f;
// True if the output is scaled before probabilities are computed, which takes fewer registers. Otherwise it
// is scaled after, which leaves one sequence of instructions without a branch.
constexpr bool RESCALE_FIRST = MMA_M * PV_MMA_N >= 32;

// Sums of probabilities times values may overflow where their means do not, for dtypes whose largest value is
// near that of f32. Sums that overflow are recomputed with values times SHRINK, a power of two: the sum over
// the largest number of keys, with probabilities up to 2^RESCALE_THRESHOLD, is then no larger than a value.
constexpr bool CAN_OVERFLOW = DTYPE != F16;
constexpr float SHRINK = 9.094947017729282e-13f, SHRINK_LOG2 = -40.f;
// The largest finite value of the dtype.
constexpr float MAX_VALUE = DTYPE == F32 ? MAX_F32 : DTYPE == BF16 ? 3.38953138925153547590e+38f : 65504.f;

// Scores of a tile, and then their probabilities.
typedef float Scores[MMA_M][QK_MMA_N][4];

// `sum * factor * unshrink`, within the dtype's finite range where the sum is finite: values are of the dtype, so only rounding, also that of the
// probabilities, takes a mean beyond it.
DEVICE float finite_mean(float sum, float factor, float unshrink) {
    const float x = sum * factor * unshrink;
    return fabsf(sum) < INF && fabsf(factor) < INF ? fminf(fmaxf(x, -MAX_VALUE), MAX_VALUE) : x;
}

// Maxima and sums of a warp's rows. row_sum is of a lane's own columns until `reduce_row_sum`.
struct RowStats {
    float row_max[MMA_M][2], row_sum[MMA_M][2];

    // Adds a tile's sums of probabilities.
    DEVICE void add_to_row_sum(const float (&sums)[MMA_M][2]) {
#pragma unroll
        for (int m = 0; m < MMA_M; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) row_sum[m][half] += sums[m][half];
    }

    // Sets row_max to 0 in rows that have none yet.
    DEVICE void begin_at_zero() {
#pragma unroll
        for (int m = 0; m < MMA_M; m++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                if (row_max[m][half] == -INF) row_max[m][half] = 0.f;
    }

    // Adds up row_sum over all columns, and brings row_max to units of log2.
    DEVICE void reduce_row_sum(const ForwardParams& p) {
#pragma unroll
        for (int m = 0; m < MMA_M; m++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float& sum = row_sum[m][half];
                sum += __shfl_xor_sync(ALL_LANES, sum, 1);
                sum += __shfl_xor_sync(ALL_LANES, sum, 2);
                if (!Scoring::HAS_BIAS && row_max[m][half] != -INF) row_max[m][half] *= p.scale;
            }
        }
    }
};

// The running state of a warp's rows.
struct OnlineSoftmax : RowStats {
    float out[MMA_M][PV_MMA_N][4];

    DEVICE void reset() {
#pragma unroll
        for (int m = 0; m < MMA_M; m++) {
#pragma unroll
            for (int half = 0; half < 2; half++) row_max[m][half] = -INF, row_sum[m][half] = 0.f;
#pragma unroll
            for (int n = 0; n < PV_MMA_N; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) out[m][n][i] = 0.f;
        }
    }

    // Returns true if rows may be wrong: NaN of a key may have reached rows that do not see it, or sums
    // overflowed.
    DEVICE bool needs_recompute(bool may_mask) const {
        // 0 times the elements, NaN if one is infinite or NaN.
        float zeros[2] = {};
        bool has_nan = false;
#pragma unroll
        for (int m = 0; m < MMA_M; m++)
#pragma unroll
            for (int n = 0; n < PV_MMA_N; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    if (CAN_OVERFLOW) zeros[i % 2] = fmaf(out[m][n][i], 0.f, zeros[i % 2]);
                    else has_nan |= isnan(out[m][n][i]);
                }
        return CAN_OVERFLOW ? zeros[0] + zeros[1] != 0.f : may_mask && has_nan;
    }

    // After `reduce_row_sum`, for sums of values times SHRINK: rows that do not overflow are scaled back; of the others the probabilities
    // shrink too.
    DEVICE void unshrink() {
#pragma unroll
        for (int m = 0; m < MMA_M; m++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 overflows = 0;
#pragma unroll
                for (int n = 0; n < 2 * PV_MMA_N; n++) {
                    float x = out[m][n / 2][2 * half + n % 2];
                    overflows |= fabsf(x) < INF && fabsf(x) > SHRINK * MAX_F32;
                }
                overflows |= __shfl_xor_sync(ALL_LANES, overflows, 1);
                overflows |= __shfl_xor_sync(ALL_LANES, overflows, 2);
                if (overflows) row_max[m][half] -= SHRINK_LOG2, row_sum[m][half] *= SHRINK;
                float by = overflows ? 1.f : 1.f / SHRINK;
#pragma unroll
                for (int n = 0; n < 2 * PV_MMA_N; n++) out[m][n / 2][2 * half + n % 2] *= by;
            }
        }
    }
};

// The probabilities of a tile as the words of left operands: of f32 one a word, else two.
struct __align__(16) Probs {
    static constexpr int FRAGMENTS = DTYPE == F32 ? QK_MMA_N : QK_MMA_N / 2;
    u32 x[MMA_M][FRAGMENTS][4];

    DEVICE void set(const Scores& probs) {
#pragma unroll
        for (int m = 0; m < MMA_M; m++)
#pragma unroll
            for (int n = 0; n < QK_MMA_N; n++) {
                const float (&from)[4] = probs[m][n];
                if constexpr (DTYPE == F32) {
#pragma unroll
                    for (int i = 0; i < 4; i++) x[m][n][i] = __float_as_uint(from[i]);
                } else {
#pragma unroll
                    for (int half = 0; half < 2; half++) x[m][n / 2][n % 2 * 2 + half] = pack<DTYPE>(from[2 * half], from[2 * half + 1]);
                }
            }
    }

    // The probability of row 16 m + 8 half + g and key 8 n + 2 t + i.
    DEVICE float at(int m, int n, int half, int i) const {
        if constexpr (DTYPE == F32) return __uint_as_float(x[m][n][2 * half + i]);
        else return unpack<DTYPE>(x[m][n / 2][n % 2 * 2 + half], i);
    }
};

// The rows of a warp, and the first of the keys that it multiplies.
struct TileRows {
    const Row* rows;
    u32 key0;
};

// ---- scores of a tile: masked, raised to probabilities, and accumulated

// The scores of a lane's keys in one row of a tile: key0 + 8 n and key0 + 8 n + 1.
struct RowScores {
    Scores& s;
    int m, half;
    u32 key0;

    template <typename F>
    DEVICE void for_each_distance(i64 position, F f) {
        const int from = (int)(position - (i64)key0);
#pragma unroll
        for (int n = 0; n < QK_MMA_N; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) f(s[m][n][2 * half + i], fabsf((float)(from - (n * 8 + i))));
    }

    template <typename F>
    DEVICE void for_each_in(u32 begin, u32 end, F f) {
#pragma unroll
        for (int n = 0; n < QK_MMA_N; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u32 j = key0 + n * 8 + i;
                if (j < begin || j >= end) continue;
                f(s[m][n][2 * half + i], j);
            }
    }

    DEVICE void hide_outside(u32 row_begin, u32 row_end) {
        const int begin = (int)(row_begin - key0), end = (int)(row_end - key0);
#pragma unroll
        for (int n = 0; n < QK_MMA_N; n++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (n * 8 + i < begin || n * 8 + i >= end) s[m][n][2 * half + i] = -INF;
    }

    DEVICE void add_mask(const ForwardParams& p, const BiasedRow& row) {
        const u64 at = row.mask;
        const u32 step = p.mask_step;
        switch (p.mask_kind) {
            case F32: for_each_in(row.begin, row.end, [=](float& x, u32 j) { x = add_bias(x, ((const float*)at)[(u64)j * step]); }); break;
            case F16: for_each_in(row.begin, row.end, [=](float& x, u32 j) { x = add_bias(x, f16_to_f32(((const u16*)at)[(u64)j * step])); }); break;
            case BF16: for_each_in(row.begin, row.end, [=](float& x, u32 j) { x = add_bias(x, bf16_to_f32(((const u16*)at)[(u64)j * step])); }); break;
            default:
                for_each_in(row.begin, row.end, [=](float& x, u32 j) {
                    if (!((const u8*)at)[(u64)j * step]) x = -INF;
                });
        }
    }
};

// The scores of a lane in a tile from key0 on.
struct TileScores {
    Scores& s;
    const BiasedRow* rows;
    u32 key0;

    template <typename F>
    DEVICE void for_each(F f) {
#pragma unroll
        for (int m = 0; m < MMA_M; m++)
#pragma unroll
            for (int n = 0; n < QK_MMA_N; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) f(s[m][n][i]);
    }

    template <typename F>
    DEVICE void for_each_row(F f) {
        const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int m = 0; m < MMA_M; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) f(rows[m * 16 + half * 8 + g], RowScores{s, m, half, key0 + 2 * t});
    }
};

template <bool MASKED>
DEVICE void mask_scores(const ForwardParams& p, Scores& s, const BiasedRow* rows, u32 key0) {
    score_mod<MASKED>(p, TileScores{s, rows, key0});
}

template <bool MASKED>
DEVICE void mask_scores(const ForwardParams&, Scores& s, const UnbiasedRow* rows, u32 key0) {
    if (!MASKED) return;
    u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int m = 0; m < MMA_M; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            // Counted from the lane's first key.
            UnbiasedRow row = rows[m * 16 + half * 8 + g];
            int begin = (int)row.begin - (int)(key0 + 2 * t), end = (int)row.end - (int)(key0 + 2 * t);
#pragma unroll
            for (int n = 0; n < QK_MMA_N; n++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    if (n * 8 + i < begin || n * 8 + i >= end) s[m][n][2 * half + i] = -INF;
        }
    }
}

DEVICE void mask_scores(const ForwardParams& p, Scores& s, const Row* rows, u32 key0, bool masked) {
    if (masked) mask_scores<true>(p, s, rows, key0);
    else mask_scores<false>(p, s, rows, key0);
}

// By what row_sum and the output are to be scaled, where any row of the warp is.
struct Rescale {
    float factor[MMA_M][2];
    bool any;
};

// Maxima of a tile over a lane's own columns. Even and odd columns are chains of their own: a maximum takes longer than the next can wait.
DEVICE void lane_row_max(const Scores& s, float (&tile_max)[MMA_M][2]) {
    float chains[MMA_M][2][2];
#pragma unroll
    for (int n = 0; n < QK_MMA_N; n++)
#pragma unroll
        for (int m = 0; m < MMA_M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float& x = chains[m][i / 2][i % 2];
                x = n == 0 ? s[m][n][i] : fmaxf(x, s[m][n][i]);
            }
#pragma unroll
    for (int m = 0; m < MMA_M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) tile_max[m][half] = fmaxf(chains[m][half][0], chains[m][half][1]);
}

// Raises a row's row_max to the maximum `x` of a tile where that exceeds it by more than `threshold`. Returns the factor of what was
// accumulated before: 0 where row_max was -inf.
DEVICE float raise_row_max(float& row_max, float x, float scale, float threshold) {
    const bool grows = (x - row_max) * scale > threshold;
    const float factor = grows ? exp2_approx((row_max - x) * scale) : 1.f;
    if (grows) row_max = x;
    return factor;
}

// Raises row_max to the maxima of a tile where they exceed it by more than `threshold`; `scale` brings scores to units of log2. Where no
// lane sees that, as in most tiles, lanes do not exchange their maxima.
DEVICE void update_row_max(OnlineSoftmax& acc, const Scores& s, float scale, float threshold, Rescale& rescale) {
    float tile_max[MMA_M][2];
    lane_row_max(s, tile_max);
    bool exceeds = false;
#pragma unroll
    for (int m = 0; m < MMA_M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) exceeds |= (tile_max[m][half] - acc.row_max[m][half]) * scale > threshold;
    rescale.any = __any_sync(ALL_LANES, exceeds);
    if (!rescale.any) return;
#pragma unroll
    for (int m = 0; m < MMA_M; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float x = tile_max[m][half];
            x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
            x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
            rescale.factor[m][half] = raise_row_max(acc.row_max[m][half], x, scale, threshold);
        }
    }
}

DEVICE void rescale_o(OnlineSoftmax& acc, const Rescale& rescale) {
    if (!rescale.any) return;
#pragma unroll
    for (int m = 0; m < MMA_M; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) acc.row_sum[m][half] *= rescale.factor[m][half];
#pragma unroll
        for (int n = 0; n < PV_MMA_N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc.out[m][n][i] *= rescale.factor[m][i / 2];
    }
}

// Scores to probabilities, 2^(score - row_max), and their sums of a lane's columns.
DEVICE void exponentiate(const OnlineSoftmax& acc, Scores& s, float scale, float (&sums)[MMA_M][2]) {
#pragma unroll
    for (int m = 0; m < MMA_M; m++) {
        float shift[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float row_max = acc.row_max[m][half];
            shift[half] = row_max == -INF ? 0.f : row_max * scale;
        }
#pragma unroll
        for (int n = 0; n < QK_MMA_N; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float& x = s[m][n][i];
                x = exp2_approx(Scoring::HAS_BIAS ? x - shift[i / 2] : fmaf(x, scale, -shift[i / 2]));
                sums[m][i / 2] += x;
            }
        }
    }
}

// `exponentiate`, after row_max was updated: also scales what was accumulated before, and adds the sums.
DEVICE void exponentiate_and_rescale(OnlineSoftmax& acc, Scores& s, float scale, const Rescale& rescale) {
    float sums[MMA_M][2] = {};
    exponentiate(acc, s, scale, sums);
    rescale_o(acc, rescale);
    acc.add_to_row_sum(sums);
}

// Returns true if row_max may be too small for a tile, or too large for a row that has seen no key before: if a lane's sum of probabilities
// exceeds MAX_PROB, or is less than 1 with a row_max of -inf, for which `exponentiate` takes 0. If it returns false for all lanes of a row, 0 may
// become such a row's row_max, and no probability exceeds MAX_PROB.
DEVICE bool row_max_is_unfit(const RowStats& acc, const float (&sums)[MMA_M][2]) {
    bool unfit = false;
#pragma unroll
    for (int m = 0; m < MMA_M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float sum = sums[m][half], least = acc.row_max[m][half] == -INF ? 1.f : 0.f;
            unfit |= !(sum >= least && sum <= MAX_PROB);
        }
    return unfit;
}

// Scores of a tile to probabilities; what was accumulated before is scaled where row_max grows.
template <bool MASKED>
DEVICE void online_softmax(const ForwardParams& p, OnlineSoftmax& acc, Scores& s, Probs& probs, const TileRows& tile) {
    const float scale = score_scale(p);
    mask_scores<MASKED>(p, s, tile.rows, tile.key0);
    Rescale rescale;
    update_row_max(acc, s, scale, RESCALE_THRESHOLD, rescale);
    if (RESCALE_FIRST) rescale_o(acc, rescale);
    float sums[MMA_M][2] = {};
    exponentiate(acc, s, scale, sums);
    probs.set(s);
    if (!RESCALE_FIRST) rescale_o(acc, rescale);
    acc.add_to_row_sum(sums);
}
