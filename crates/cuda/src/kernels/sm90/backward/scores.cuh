// Scores of a tile, and the factors of their gradients.

// 1 / x, with an error of one unit in the last place.
DEVICE float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// A softcap's score in units of log2: `p.softcap tanh(y)` of `p.softcap_scale x = 2 log2 e y`, and its derivative 1 - tanh^2(y), which keeps its
// digits where the score saturates.
DEVICE float softcap(const BackwardParams& p, float x, float& derivative) {
    const float half = reciprocal_approx(1 + exp2_approx(x * p.softcap_scale));
    derivative = 4 * half * (1 - half);
    return fmaf(-2 * p.softcap, half, p.softcap);
}

// Products q . k to scores in units of log2, in their place; -inf where a query does not see the key. With a softcap, `factors` are what gradients
// of scores are multiplied by: pairs of bf16, whose exponents f16 lacks.
DEVICE void score_mod(float (&s)[TILE_SCORES], u32 (&factors)[TILE_WORDS], const BackwardParams& p, const Work& work, const Step& step, i32 first_key,
                      const KeyLane& at) {
    const i32 first = work.sequence.offset + (i32)(step.tile * BLOCK_M + at.column()), key = first_key + (i32)at.key();
    const float slope = HAS_ALIBI ? alibi_slope(p, work.unit.sequence, step.query_head(p, work)) * LOG2E : 0;
#pragma unroll
    for (int j = 0; j < BLOCK_M / 8; j++) {
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
