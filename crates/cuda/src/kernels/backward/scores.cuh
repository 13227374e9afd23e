// Scores of a tile, probabilities, and gradients of scores.

// Probabilities are multiplied by this before they are rounded, so that small ones keep their digits in f16, whose least normal number is 2^-14.
// `prepare` adds its logarithm to `-lse`, and divides delta by it.
constexpr float PROB_SCALE = DTYPE == F16 ? 16384.f : 1.f;

// 1 / x, with an error of one unit in the last place.
DEVICE float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// A softcap's score in units of log2, `p.softcap tanh(y)` of `y = p.softcap_scale x`, and its derivative 1 - tanh^2(y), which keeps its digits where
// the score saturates.
DEVICE float softcap(const BackwardParams& p, float x, float& derivative) {
    const float y = x * p.softcap_scale, a = fabsf(y), e = exp2_approx(-2 * LOG2E * a), r = reciprocal_approx(1 + e);
    derivative = 4 * e * r * r;
    return p.softcap * copysignf(a < TANH_FAR ? tanh_near(a) : fmaf(-2 * e, r, 1), y);
}

// Products q . k to scores in units of log2, in their place; -inf where a query does not see the key. With a softcap, `factors` are what gradients
// of scores are multiplied by: pairs of bf16, whose exponents f16 lacks.
DEVICE void score_mod(float (&s)[TILE_SCORES], u32 (&factors)[TILE_WORDS], const BackwardParams& p, const Work& work, const Step& step, i32 first_key,
                      const KeyLane& at) {
    const i32 first = work.sequence.offset + (i32)(step.tile * BLOCK_M + at.column()), key = first_key + (i32)at.key();
    const float slope = HAS_ALIBI ? alibi_slope(p, work.unit.sequence, step.query_head(p, work)) * LOG2E : 0;
#pragma unroll
    for (int j = 0; j < WARP_M / 8; j++) {
        float derivatives[2][2];
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const i32 position = first + 8 * j + n;
            const VisibleKeys seen = visible_keys(p, work.sequence, position);
            const i32 nearest = HAS_ALIBI ? seen.nearest(position) : 0;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float& x = s[4 * j + 2 * h + n];
                x = HAS_SOFTCAP ? softcap(p, x, derivatives[h][n]) : x * p.scale_log2;
                if (HAS_ALIBI) x = fmaf(-slope, fabsf((float)(key + 8 * h - nearest)), x);
                if (!seen.contains(key + 8 * h)) x = -INF;
            }
        }
        if (HAS_SOFTCAP)
            for (int h = 0; h < 2; h++) factors[2 * j + h] = pack<BF16>(derivatives[h][0], derivatives[h][1]);
    }
}

// Two neighbouring columns of a list of rows.
DEVICE float2 ld_shared_pair(u32 from) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
    return x;
}

// Hides the pairs of a tile that no query sees, where there may be some.
DEVICE void hide_scores(float (&s)[TILE_SCORES], const BackwardParams& p, const Work& work, u32 tile, u32 first_key, const KeyLane& at) {
    const BackwardSequence& sequence = work.sequence;
    const i32 first = sequence.offset + (i32)(tile * BLOCK_M), last = first + BLOCK_M - 1, low = (i32)first_key;
    const bool is_full = low + BLOCK_N <= (i32)sequence.kv_len && low >= last - p.left && low + BLOCK_N - 1 <= first + p.right;
    if (is_full) return;
    const i32 key = low + (i32)at.key(), distance = key - first - (i32)at.column();
#pragma unroll
    for (int i = 0; i < TILE_SCORES; i++) {
        const int below = 8 * (i / 2 % 2), column = 8 * (i / 4) + i % 2;
        const i32 away = distance + below - column;
        const bool sees = away <= p.right && away >= -p.left && key + below < (i32)sequence.kv_len;
        s[i] = sees ? s[i] : p.hidden;
    }
}

// PROB_SCALE exp2(scale s - lse) of a tile, rounded; lse is in units of log2.
DEVICE void probabilities(u32 (&probs)[TILE_WORDS], const float (&s)[TILE_SCORES], float scale, u32 neg_lse) {
#pragma unroll
    for (int j = 0; j < WARP_M / 8; j++) {
        const float2 lse = ld_shared_pair(neg_lse + 32 * j);
#pragma unroll
        for (int h = 0; h < 2; h++)
            probs[2 * j + h] = pack<DTYPE>(exp2_approx(fmaf(s[4 * j + 2 * h], scale, lse.x)),
                                           exp2_approx(fmaf(s[4 * j + 2 * h + 1], scale, lse.y)));
    }
}

// Products q . k of a tile, in their place scores, to probabilities; `factors` as score_mod has them.
DEVICE void score_probabilities(u32 (&probs)[TILE_WORDS], float (&s)[TILE_SCORES], u32 (&factors)[TILE_WORDS], const BackwardParams& p,
                                const Work& work, const Step& step, u32 first_key, const KeyLane& at, u32 neg_lse) {
    if constexpr (HAS_SCORE_MOD) score_mod(s, factors, p, work, step, first_key, at);
    else hide_scores(s, p, work, step.tile, first_key, at);
    probabilities(probs, s, HAS_SCORE_MOD ? 1.f : p.scale_log2, neg_lse);
}

// P (dP - delta) of a tile, times the factors that `d_scores` holds where there is a softcap, rounded. Probabilities have the factor PROB_SCALE, and
// deltas its inverse. `add_bias(gradient, j, h, n)` gets each gradient of a bias.
template <typename AddBias>
DEVICE void score_gradients(u32 (&d_scores)[TILE_WORDS], const u32 (&probs)[TILE_WORDS], const float (&d_probs)[TILE_SCORES], u32 deltas,
                            AddBias add_bias) {
#pragma unroll
    for (int j = 0; j < WARP_M / 8; j++) {
        const float2 delta = ld_shared_pair(deltas + 32 * j);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const u32 pair = probs[2 * j + h];
            float x = unpack<DTYPE>(pair, 0) * fmaf(d_probs[4 * j + 2 * h], 1 / PROB_SCALE, -delta.x);
            float y = unpack<DTYPE>(pair, 1) * fmaf(d_probs[4 * j + 2 * h + 1], 1 / PROB_SCALE, -delta.y);
            add_bias(x, j, h, 0), add_bias(y, j, h, 1);
            if (HAS_SOFTCAP) x *= unpack<BF16>(d_scores[2 * j + h], 0), y *= unpack<BF16>(d_scores[2 * j + h], 1);
            d_scores[2 * j + h] = pack<DTYPE>(x, y);
        }
    }
}

// The sum of gradients of ALiBi's biases times distances, of a warp's pairs of one query head.
struct DistanceSum {
    float sum = 0;

    // Adds the gradient of a bias of a tile's pair, by the place of its score: register 4 j + 2 h + n.
    DEVICE void add(float d_bias, const BackwardParams& p, const Work& work, const Step& step, i32 first_key, const KeyLane& at, int j, int h, int n) {
        if (!HAS_ALIBI || !p.distance_sums) return;
        const i32 position = work.sequence.offset + (i32)(step.tile * BLOCK_M + at.column()) + 8 * j + n;
        sum = fmaf(d_bias, alibi_distance(p, work.sequence, position, first_key + (i32)at.key() + 8 * h), sum);
    }

    // Stores the sum of a head, and begins the next head's. `warp` counts the warps of a unit.
    DEVICE void store(const BackwardParams& p, u32 head, u32 warp) {
        if (!p.distance_sums) return;
        sum = warp_sum(sum);
        const u32 unit = blockIdx.x / UNIT_BLOCKS;
        if (threadIdx.x % 32 == 0) ((float*)p.distance_sums)[(u64)(unit * p.group + head) * UNIT_WARPS + warp] = sum;
        sum = 0;
    }
};
