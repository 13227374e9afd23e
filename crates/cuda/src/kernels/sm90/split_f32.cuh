// f32 as sums of three bf16, which the matrix unit multiplies: an f32 has 24 bits of mantissa, a bf16 has 8.
//
// Each term is the remainder after the earlier terms, truncated to bf16. Terms have the sign of the f32 and sum to it exactly, except for bits
// below 2^-133, the smallest bf16. The second term of an infinity or NaN is NaN. A tile in shared memory is a tile of each term, one after
// another.

// The terms of two f32, in words of two.
DEVICE void split_pair(float low, float high, u32 (&terms)[TERMS]) {
#pragma unroll
    for (int term = 0; term < TERMS; term++) {
        const u32 x = __float_as_uint(low), y = __float_as_uint(high);
        terms[term] = x >> 16 | (y & 0xffff0000u);
        low -= __uint_as_float(x & 0xffff0000u), high -= __uint_as_float(y & 0xffff0000u);
    }
}

// Chunks that a thread loads at a time.
constexpr int SPLIT_BATCH = 4;

// Loads the eight f32 of chunk `chunk` of a row; columns past `dim` are 0.
DEVICE void load_f32_chunk(float (&x)[8], u64 row, u32 chunk, u32 dim, bool exists) {
    const float* from = (const float*)row + chunk * 8;
    const u32 count = exists && dim > chunk * 8 ? dim - chunk * 8 : 0;
    if (VECTOR_ROWS && count >= 8) {
        const float4 a = __ldg((const float4*)from), b = __ldg((const float4*)from + 1);
        x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = i < count ? __ldg(from + i) : 0.f;
    }
}

// Stores the terms of eight f32 as a chunk of each term's tile.
template <typename T>
DEVICE void store_split_chunk(u32 to, const float (&x)[8]) {
    u32 words[4][TERMS];
#pragma unroll
    for (int i = 0; i < 4; i++) split_pair(x[2 * i], x[2 * i + 1], words[i]);
#pragma unroll
    for (int term = 0; term < TERMS; term++)
        st_shared16(to + term * T::BYTES, make_uint4(words[0][term], words[1][term], words[2][term], words[3][term]));
}

// Loads one batch of a thread's chunks of keys or values; LOADERS threads load a tile. Keys outside the work tile are 0.
template <typename T, int BATCH>
DEVICE void load_split_batch(float (&x)[BATCH][8], const ForwardParams& p, const KvRows& kv, u32 j0, int first) {
#pragma unroll
    for (int n = 0; n < BATCH; n++) {
        const u32 index = opaque(threadIdx.x % LOADERS) + (first + n) * LOADERS, j = j0 + index / T::ROW_CHUNKS;
        const bool exists = j >= kv.keys.begin && j < kv.keys.end;
        const i64 offset = exists ? key_offset(p, kv.tensor, kv.keys, j) : 0;
        load_f32_chunk(x[n], kv.head + offset, index % T::ROW_CHUNKS, kv.dim, exists);
    }
}

// Copies BLOCK_N keys or values from key `j0` on. Chunks are loaded while those before are split.
template <typename T>
DEVICE void copy_split_kv_tile(const ForwardParams& p, const KvRows& kv, u32 to, u32 j0) {
    constexpr int COPIES = BLOCK_N * T::ROW_CHUNKS / LOADERS, BATCH = COPIES % SPLIT_BATCH == 0 ? SPLIT_BATCH : 2;
    static_assert(BLOCK_N * T::ROW_CHUNKS % LOADERS == 0 && COPIES % BATCH == 0);
    float next[BATCH][8];
    load_split_batch<T>(next, p, kv, j0, 0);
#pragma unroll 1
    for (int first = 0; first < COPIES; first += BATCH) {
        float x[BATCH][8];
#pragma unroll
        for (int n = 0; n < BATCH; n++)
#pragma unroll
            for (int i = 0; i < 8; i++) x[n][i] = next[n][i];
        if (first + BATCH < COPIES) load_split_batch<T>(next, p, kv, j0, first + BATCH);
#pragma unroll
        for (int n = 0; n < BATCH; n++) {
            const u32 index = threadIdx.x % LOADERS + (first + n) * LOADERS;
            store_split_chunk<T>(to + T::chunk(index / T::ROW_CHUNKS, index % T::ROW_CHUNKS), x[n]);
        }
    }
}

// Copies a warp's WARP_ROWS rows of q, from `first_row` of the work tile on; rows past the last are 0.
DEVICE void copy_split_warp_q(const ForwardParams& p, const WorkTile& work_tile, u32 first_row, u32 to) {
    constexpr int CHUNKS = QTile::ROW_CHUNKS;
    const u32 lane = opaque(threadIdx.x % 32), own_row = work_tile.row + first_row + lane % WARP_ROWS;
    const bool own_exists = own_row < row_count(p, work_tile);
    const u64 own_address = own_exists ? row_address(p.q, work_tile, q_row(p, work_tile.kv_head, own_row)) : p.q.at;
#pragma unroll 4
    for (int n = 0; n < WARP_ROWS * CHUNKS / 32; n++) {
        const u32 index = n * 32 + lane, row = index / CHUNKS, chunk = index % CHUNKS;
        const u64 from = __shfl_sync(ALL_LANES, own_address, row);
        const bool exists = __shfl_sync(ALL_LANES, own_exists, row);
        float x[8];
        load_f32_chunk(x, from, chunk, p.head_dim, exists);
        store_split_chunk<QTile>(to + QTile::chunk(first_row + row, chunk), x);
    }
}
