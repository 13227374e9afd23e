// The two products of a warp by mma.sync: scores = q k^T and out += probs v.
//
// Fragments are loaded from shared memory some products before they are used.

// Fragments of keys and values that are loaded ahead of their products.
constexpr int AHEAD = WARPS_SPLIT_KEYS || HEAD_DIM > 128 ? 2 : HEAD_DIM > 64 ? 3 : 1;

// ---- scores

// Products of 32 bytes of a row of q and k.
constexpr int QK_STEPS = HEAD_DIM * ELEMENT_BYTES / 32;

// The address of this lane's row of a fragment: of q from a warp's first row on, and of a tile of keys.
DEVICE u32 q_fragment(u32 warp_row) {
    u32 lane = threadIdx.x % 32;
    return QTile::chunk(warp_row + (lane & 7) + (lane & 8), lane >> 4);
}

DEVICE u32 k_fragment() {
    u32 lane = threadIdx.x % 32;
    return KTile::chunk((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
}

DEVICE void load_q_fragment(u32 (&x)[4], u32 q, int m, int step) { ldmatrix_x4(x, QTile::pair(q, step) + m * 16 * QTile::PANEL); }

// The fragments of a warp's rows of q: kept in registers, or loaded with every tile.
template <Dtype T, bool IN_REGISTERS>
struct QFragments {
    static_assert(T != F32, "fragments of f32 are split in two: registers do not hold them");
    AFragment<T> kept[MMA_M][QK_STEPS];

    DEVICE void load(u32 q) {
#pragma unroll
        for (int step = 0; step < QK_STEPS; step++)
#pragma unroll
            for (int m = 0; m < MMA_M; m++) load_q_fragment(kept[m][step].x, q, m, step);
    }

    DEVICE void get(AFragment<T>& a, const u32 (&)[4], int m, int step) const { a = kept[m][step]; }
};

template <Dtype T>
struct QFragments<T, false> {
    DEVICE void load(u32) {}

    DEVICE void get(AFragment<T>& a, const u32 (&loaded)[4], int, int) const { a.set(loaded); }
};

typedef QFragments<DTYPE, Q_IN_REGISTERS> WarpQ;

// scores = q k^T for a warp's rows of q, which lie at `q` or are in registers, and the tile of keys at `k`.
DEVICE void qk_gemm(Scores& scores, const WarpQ& warp_q, u32 q, u32 k) {
#pragma unroll
    for (int m = 0; m < MMA_M; m++)
#pragma unroll
        for (int n = 0; n < QK_MMA_N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) scores[m][n][i] = 0.f;
    constexpr int PAIRS = QK_MMA_N / 2, PRODUCTS = QK_STEPS * PAIRS;
    // Steps whose fragments of q are loaded while one step is multiplied.
    constexpr int Q_AHEAD = AHEAD / PAIRS + 1;
    AFragment<DTYPE> a[MMA_M];
    u32 q_loaded[Q_AHEAD][MMA_M][4], b[AHEAD + 1][4];
#pragma unroll
    for (int i = 0; i < PRODUCTS + AHEAD; i++) {
        if (!Q_IN_REGISTERS && i < PRODUCTS && i % PAIRS == 0)
#pragma unroll
            for (int m = 0; m < MMA_M; m++) load_q_fragment(q_loaded[i / PAIRS % Q_AHEAD][m], q, m, i / PAIRS);
        if (i < PRODUCTS) ldmatrix_x4(b[i % (AHEAD + 1)], KTile::pair(k, i / PAIRS) + i % PAIRS * 16 * KTile::PANEL);
        if (i < AHEAD) continue;
        const int at = i - AHEAD, step = at / PAIRS, n = at % PAIRS;
        const u32 (&x)[4] = b[at % (AHEAD + 1)];
#pragma unroll
        for (int m = 0; m < MMA_M; m++) {
            if (n == 0) warp_q.get(a[m], q_loaded[step % Q_AHEAD][m], m, step);
            a[m].mma(scores[m][2 * n], x[0], x[1]);
            a[m].mma(scores[m][2 * n + 1], x[2], x[3]);
        }
    }
}

// ---- values

// A step of the product is 16 keys, of f32 8. A fragment of values is 16 columns, of f32 8 in its first two words.
constexpr int PV_STEP_KEYS = DTYPE == F32 ? 8 : 16, PV_STEPS = WARP_KEYS / PV_STEP_KEYS;
constexpr int V_FRAGMENTS = DTYPE == F32 ? PV_MMA_N : PV_MMA_N / 2, V_WORDS = DTYPE == F32 ? 2 : 4;

// The address of this lane's row of a fragment of values.
DEVICE u32 v_fragment() {
    u32 lane = threadIdx.x % 32;
    return DTYPE == F32 ? 0 : VTile::chunk((lane & 7) + (lane & 8), lane >> 4);
}

DEVICE void load_v_fragment(u32 (&b)[4], u32 v, int step, int n) {
    if constexpr (DTYPE == F32) {
        // The order of keys within a product is free: lane t has keys 2t and 2t + 1.
        u32 lane = threadIdx.x % 32, g = lane / 4, chunk = 2 * n + g / 4, row = step * 8 + 2 * (lane % 4);
        b[0] = ld_shared4(v + VTile::chunk(row, chunk) + g % 4 * 4);
        b[1] = ld_shared4(v + VTile::chunk(row + 1, chunk) + g % 4 * 4);
    } else {
        ldmatrix_x4_trans(b, VTile::pair(v, n) + step * 16 * VTile::PANEL);
    }
}

// The probabilities of a step as a left operand.
DEVICE void probs_fragment(AFragment<DTYPE>& a, const Probs& probs, int m, int step) {
    const u32 (&x)[4] = probs.x[m][step];
    if constexpr (DTYPE == F32) a.set({x[0], x[2], x[1], x[3]});
    else a.set(x);
}

DEVICE void pv_mma(OnlineSoftmax& acc, const AFragment<DTYPE>& a, const u32 (&b)[4], int m, int n) {
    if constexpr (DTYPE == F32) {
        a.mma(acc.out[m][n], b[0], b[1]);
    } else {
        a.mma(acc.out[m][2 * n], b[0], b[1]);
        a.mma(acc.out[m][2 * n + 1], b[2], b[3]);
    }
}

// out += probs v for the tile of values at `v`.
DEVICE void pv_gemm(OnlineSoftmax& acc, const Probs& probs, u32 v) {
    constexpr int PRODUCTS = PV_STEPS * V_FRAGMENTS, V_AHEAD = DTYPE == F32 ? 0 : AHEAD;
    v += v_fragment();
    AFragment<DTYPE> a[MMA_M];
    u32 b[V_AHEAD + 1][4];
#pragma unroll
    for (int i = 0; i < PRODUCTS + V_AHEAD; i++) {
        if (i < PRODUCTS) load_v_fragment(b[i % (V_AHEAD + 1)], v, i / V_FRAGMENTS, i % V_FRAGMENTS);
        if (i < V_AHEAD) continue;
        const int at = i - V_AHEAD;
#pragma unroll
        for (int m = 0; m < MMA_M; m++) {
            if (at % V_FRAGMENTS == 0) probs_fragment(a[m], probs, m, at / V_FRAGMENTS);
            pv_mma(acc, a[m], b[at % (V_AHEAD + 1)], m, at % V_FRAGMENTS);
        }
    }
}

// ---- values that are not finite
//
// A product hands an infinity or a NaN of a value to every row. In tiles that may have such values, the
// products are of the finite values alone, and infinities and NaN are added to the rows that see their keys.
// This is rare: it uses local memory and loops that are not unrolled, rather than registers that the mainloop
// needs.

// The accumulators of a warp in local memory.
typedef float LocalOut[MMA_M * PV_MMA_N * 4];

// Returns true, in all lanes, if a value of a key of the tile is not finite.
DEVICE bool key_has_nonfinite(u32 v, u32 key, u32 lane) {
    bool found = false;
    for (u32 c = lane; c < VTile::ROW_CHUNKS; c += 32) {
        uint4 x = ld_shared16(v + VTile::chunk(key, c));
        found |= has_nonfinite<DTYPE>(x.x) || has_nonfinite<DTYPE>(x.y) || has_nonfinite<DTYPE>(x.z) || has_nonfinite<DTYPE>(x.w);
    }
    return __any_sync(ALL_LANES, found);
}

// Adds the products with infinities and NaN of the tile to the rows that see their keys.
DEVICE void add_nonfinite_values(const ForwardParams& p, LocalOut& out, const Probs& probs, const TileRows& tile, u32 v) {
    u32 lane = opaque(threadIdx.x % 32), g = lane / 4, t = lane % 4;
#pragma unroll 1
    for (u32 key = 0; key < WARP_KEYS; key++) {
        if (!key_has_nonfinite(v, key, lane)) continue;
#pragma unroll 1
        for (u32 n = 0; n < 2 * MMA_M; n++) {
            u32 m = n / 2, half = n % 2;
            float own = probs.at(m, key / 8, half, key % 2);
            float prob = __shfl_sync(ALL_LANES, own, 4 * g + key % 8 / 2);
            bool visible = is_visible(p, tile.rows[m * 16 + half * 8 + g], tile.key0 + key);
#pragma unroll 1
            for (u32 c = 0; c < 2 * PV_MMA_N; c++) {
                u32 column = c / 2 * 8 + 2 * t + c % 2, byte = column * ELEMENT_BYTES;
                float x = unpack<DTYPE>(ld_shared4(v + VTile::chunk(key, byte / 16) + (byte % 16 & ~3u)), column % 2);
                if (visible && (isinf(x) || isnan(x))) out[(m * PV_MMA_N + c / 2) * 4 + 2 * half + c % 2] += prob * x;
            }
        }
    }
}

// A word of values times SHRINK.
DEVICE u32 shrink(u32 x) {
    if constexpr (DTYPE == F32) return __float_as_uint(__uint_as_float(x) * SHRINK);
    else return pack<DTYPE>(unpack<DTYPE>(x, 0) * SHRINK, unpack<DTYPE>(x, 1) * SHRINK);
}

// `pv_gemm` where values may be infinite or NaN; finite values are multiplied with SHRINK where `shrinks`.
DEVICE void pv_gemm_nonfinite(const ForwardParams& p, OnlineSoftmax& acc, const Probs& probs, const TileRows& tile, u32 v, bool shrinks) {
    Probs local_probs;
    LocalOut local_out;
    constexpr int F = Probs::FRAGMENTS;
#pragma unroll
    for (int i = 0; i < MMA_M * F * 4; i++) local_probs.x[i / (F * 4)][i / 4 % F][i % 4] = probs.x[i / (F * 4)][i / 4 % F][i % 4];
#pragma unroll
    for (int i = 0; i < MMA_M * PV_MMA_N * 4; i++) local_out[i] = acc.out[i / (PV_MMA_N * 4)][i / 4 % PV_MMA_N][i % 4];
    add_nonfinite_values(p, local_out, local_probs, tile, v);
#pragma unroll
    for (int i = 0; i < MMA_M * PV_MMA_N * 4; i++) acc.out[i / (PV_MMA_N * 4)][i / 4 % PV_MMA_N][i % 4] = local_out[i];
    v += v_fragment();
#pragma unroll 1
    for (int step = 0; step < PV_STEPS; step++) {
        AFragment<DTYPE> a[MMA_M];
#pragma unroll
        for (int m = 0; m < MMA_M; m++) probs_fragment(a[m], local_probs, m, step);
#pragma unroll
        for (int n = 0; n < V_FRAGMENTS; n++) {
            u32 b[4];
            load_v_fragment(b, v, step, n);
#pragma unroll
            for (int i = 0; i < V_WORDS; i++) {
                u32 x = zero_nonfinite<DTYPE>(b[i]);
                b[i] = CAN_OVERFLOW && shrinks ? shrink(x) : x;
            }
#pragma unroll
            for (int m = 0; m < MMA_M; m++) pv_mma(acc, a[m], b, m, n);
        }
    }
}
