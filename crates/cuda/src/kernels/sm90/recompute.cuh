// The output of a warp's rows once more, where its products may be wrong: a product hands an infinity or a NaN of a value to every row, also
// to those that do not see its key, and sums of bf16 values may overflow where their means do not.
//
// This is rare. The warp multiplies by mma.sync what it loads from device memory, 16 keys at a time, and the infinities and NaN of values
// are added to the rows that see them. row_max and row_sum are right already.

// Two elements of a row from a column on; those past `columns` are 0.
DEVICE u32 load_pair(u64 row, u32 column, u32 columns) {
    const u16* from = (const u16*)row + column;
    return row == 0 ? 0u : (column < columns ? from[0] : 0u) | (column + 1 < columns ? (u32)from[1] << 16 : 0u);
}

DEVICE u32 load_one(u64 row, u32 column, u32 columns) { return row && column < columns ? ((const u16*)row)[column] : 0u; }

// The address of a key's row, 0 where the work tile does not have the key.
DEVICE u64 key_address(const ForwardParams& p, const Tensor& tensor, const Keys& keys, u64 head, u32 j) {
    return j >= keys.begin && j < keys.end ? head + (u64)key_offset(p, tensor, keys, j) : 0;
}

// The score of a product for a key that the row sees.
DEVICE float score_of(const ForwardParams&, const UnbiasedRow&, u32, float product) { return product; }

DEVICE float score_of(const ForwardParams& p, const BiasedRow& row, u32 j, float product) { return score_mod<true>(p, row, j, product); }

// Which of 16 keys from key0 on a lane's two rows see: a bit for each key, 16 for each row.
DEVICE u32 visible_bits(const ForwardParams& p, const Row* rows, u32 key0) {
    u32 g = threadIdx.x % 32 / 4, bits = 0;
#pragma unroll 1
    for (u32 n = 0; n < 32; n++) bits |= (u32)is_visible(p, rows[n / 16 * 8 + g], key0 + n % 16) << n;
    return bits;
}

// out += prob x for the infinities and NaN of 16 keys, in eight columns: `b0` and `b1` are their words as a right operand.
DEVICE void add_nonfinite_words(float (&out)[4], const u32 (&probs)[4], u32 visible, u32 b0, u32 b1) {
    u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll 1
    for (u32 key = 0; key < 16; key++) {
        u32 pair = key % 8 / 2;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 word = __shfl_sync(ALL_LANES, key < 8 ? b0 : b1, 4 * (2 * t + i) + pair);
            float x = unpack<DTYPE>(word, key % 2);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float prob = unpack<DTYPE>(__shfl_sync(ALL_LANES, key < 8 ? probs[half] : probs[2 + half], 4 * g + pair), key % 2);
                if (!(fabsf(x) < INF) && visible >> (16 * half + key) & 1) out[2 * half + i] += prob * x;
            }
        }
    }
}

// Replaces acc.out; of finite values it sums SHRINK times the value where sums can overflow. `rows` are the warp's, from the work tile's row
// `first_row` on.
DEVICE void recompute_out(const ForwardParams& p, const WorkTile& work_tile, u32 first_row, const Row* rows, OnlineSoftmax& acc) {
    u32 lane = opaque(threadIdx.x % 32), g = lane / 4, t = lane % 4;
    const float scale = Scoring::HAS_BIAS ? 1.f : p.scale;
    float shift[2];
#pragma unroll
    for (int half = 0; half < 2; half++) shift[half] = acc.row_max[0][half] == -INF ? 0.f : acc.row_max[0][half] * scale;
#pragma unroll
    for (int n = 0; n < PV_MMA_N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc.out[0][n][i] = 0.f;
#pragma unroll 1
    for (u32 key0 = work_tile.begin / 16 * 16; key0 < work_tile.end; key0 += 16) {
        // Addresses are found again for each 16 keys, which takes no registers from the others.
        const WorkTile& found = *opaque(&work_tile);
        const KvSource source(p, found);
        u64 q[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 row = found.row + first_row + 8 * half + g;
            q[half] = row < row_count(p, found) ? row_address(p.q, found, q_row(p, found.kv_head, row)) : 0;
        }
        float s[2][4] = {};
        u64 k[2];
#pragma unroll
        for (int n = 0; n < 2; n++) k[n] = key_address(p, p.k, source.keys, source.k, key0 + 8 * n + g);
#pragma unroll 1
        for (u32 column = 2 * t; column < HEAD_DIM; column += 16) {
            AFragment<DTYPE> a;
#pragma unroll
            for (int i = 0; i < 4; i++) a.x[i] = load_pair(q[i % 2], column + i / 2 * 8, p.head_dim);
#pragma unroll
            for (int n = 0; n < 2; n++) a.mma(s[n], load_pair(k[n], column, p.head_dim), load_pair(k[n], column + 8, p.head_dim));
        }
        const u32 visible = visible_bits(p, rows, key0);
        AFragment<DTYPE> probs;
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float x[2];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const u32 key = 8 * n + 2 * t + i;
                    float score = -INF;
                    if (visible >> (16 * half + key) & 1) score = score_of(p, rows[8 * half + g], key0 + key, s[n][2 * half + i]);
                    x[i] = exp2_approx(Scoring::HAS_BIAS ? score - shift[half] : fmaf(score, scale, -shift[half]));
                }
                probs.x[2 * n + half] = pack<DTYPE>(x[0], x[1]);
            }
        u64 v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = key_address(p, p.v, source.keys, source.v, key0 + i / 2 * 8 + 2 * t + i % 2);
#pragma unroll
        for (int n = 0; n < PV_MMA_N; n++) {
            u32 column = opaque(8 * n + g), b[2];
#pragma unroll
            for (int i = 0; i < 2; i++) b[i] = load_one(v[2 * i], column, source.value_dim) | load_one(v[2 * i + 1], column, source.value_dim) << 16;
            if (__any_sync(ALL_LANES, has_nonfinite<DTYPE>(b[0]) || has_nonfinite<DTYPE>(b[1])))
                add_nonfinite_words(acc.out[0][n], probs.x, visible, b[0], b[1]);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                u32 x = zero_nonfinite<DTYPE>(b[i]);
                b[i] = CAN_OVERFLOW ? pack<DTYPE>(unpack<DTYPE>(x, 0) * SHRINK, unpack<DTYPE>(x, 1) * SHRINK) : x;
            }
            probs.mma(acc.out[0][n], b[0], b[1]);
        }
    }
}
