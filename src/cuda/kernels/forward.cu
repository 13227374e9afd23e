// Attention of tiles of query rows over ranges of keys.
//
// A block of threads computes items: tiles of BM query rows of one key/value head over a range of keys. A row is a pair
// (position, head of the group), ordered by position. Scores and values stay in registers; keys and values come through
// rings of ST tiles in shared memory, by asynchronous copies. Warps divide a tile's rows (WQ of them) or a tile's keys (WKV).
//
// A step of the loop multiplies the weights of one tile with its values and then q with the keys of the next: the matrix unit
// has both products without a pause, and the weights that it waits for are made between steps. Eight warps over rows are two
// teams of four that take turns at the matrix unit: while one multiplies, the other makes weights. The first team copies
// keys and values for both. Where keys are divided, each warp copies and waits for its own keys alone, and the warps' results
// are merged at the end of the item.
//
// Where several items share a tile of rows, each leaves its sums in memory, and the block that comes last adds them up in the
// order of the keys.
//
//   DTYPE               F32, F16 or BF16
//   D, DV               head dimension and columns of v that an item computes, rounded up to a multiple of 32
//   WQ, WKV             warps over rows and over keys, one of them 1
//   MF                  fragments of 16 rows of a warp
//   BN                  keys of a tile; where warps divide keys, of a warp's part
//   ST                  tiles of a ring
//   CTAS                blocks of threads that fit a multiprocessor
//   QREG                whether fragments of q stay in registers
//   PAGED               whether keys lie in pages
//   VECTOR              whether every row of every tensor starts on 16 bytes
//   BIAS                whether scores are changed: softcap, ALiBi, tree mask, a scale that is not positive
//   MASK                whether there is a materialised mask (with BIAS)
//   CLASS_ROWS          query positions of a class of a mask

// Keys `begin..end` of a sequence and head for the rows from `row`; every row sees those of `full_begin..full_end`. The result
// goes to slot `slot` of `splits` from `first`, or with one split to the output. Entry `next` is the next item, if it is not 0.
struct Item {
    u32 sequence, kv_head, row, panel;
    u32 begin, end, full_begin, full_end;
    u32 slot, first, splits, counter;
    u32 next, batch, q_start, q_len;
    u32 kv_start, kv_len;
    i64 q_offset;
};

struct Tensor {
    u64 at;
    // Bytes between batch entries (or pages), heads and rows.
    i64 batch, head, row;
};

struct Params {
    Tensor q, k, v, out, mask;
    u64 lse, tree, alibi, sinks;
    u64 table, items, counters, classes, partials;
    i64 tree_row, left, right;
    Divisor page, width, group;
    u32 heads, q_len, head_dim, value_dim;
    // In units of log2: scores are multiplied by `scale`, or are `cap * tanh(scale * score)`.
    float scale, cap;
    u32 mask_kind, mask_step, tree_step, every_tile_partial;
    u32 class_q_tiles, class_k_blocks, table_width;
};

constexpr u32 NONE = 0xffffffffu;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

constexpr int E = DTYPE == F32 ? 4 : 2;
constexpr int WARPS = WQ * WKV, THREADS = 32 * WARPS;
constexpr bool PRIVATE = WQ == 1;
constexpr int ROWS = 16 * MF, BM = ROWS * WQ;
constexpr int TILE = BN * WKV;
// Two teams of warps, of which the first copies for both.
constexpr bool TEAMS = WQ == 8;
constexpr int LOADERS = PRIVATE ? 32 : TEAMS ? 128 : THREADS;
// Fragments: 8 keys of scores, 8 columns of values; steps of 32 bytes of a row of q and k.
constexpr int SF = BN / 8, OF = DV / 8, STEPS = D * E / 32;
// Fragments of keys and values that are asked for ahead of their products.
constexpr int AHEAD = 2;
// Whether sums are scaled before weights are made, which takes fewer registers, or after, which leaves one run of instructions.
constexpr bool SCALE_FIRST = MF * OF >= 32;
// A row's maximum may grow by so many powers of 2 before what was summed is scaled again.
constexpr float SLACK = 8.f;

// Rows of C columns are stored in panels of 128 bytes, or 64, whose chunks of 16 are permuted by the row, so that a matrix of
// 8 rows and 16 bytes covers all banks.
template <int C, int R>
struct Layout {
    static constexpr int BYTES = C * E, PANEL = BYTES % 128 == 0 ? 128 : 64, CHUNKS = PANEL / 16;
    static constexpr int ROW_CHUNKS = BYTES / 16, SIZE = BYTES * R;
    DEVICE static u32 permute(u32 row) { return PANEL == 128 ? row & 7 : (row >> 1) & 3; }
    // Bytes from the start to a chunk of a row.
    DEVICE static u32 chunk(u32 row, u32 c) {
        return (c / CHUNKS) * (PANEL * R) + row * PANEL + (((c % CHUNKS) ^ permute(row)) << 4);
    }
    // The same for chunk 2 * pair + (0 or 1), from the offset of that chunk for pair 0.
    DEVICE static u32 pair(u32 first, int pair) {
        return (first ^ ((2 * pair % CHUNKS) << 4)) + (2 * pair / CHUNKS) * (PANEL * R);
    }
};

typedef Layout<D, BM> QLayout;
typedef Layout<D, BN> KLayout;
typedef Layout<DV, BN> VLayout;
typedef Layout<DV, BM> OLayout;

constexpr int Q_BYTES = QLayout::SIZE > OLayout::SIZE ? QLayout::SIZE : OLayout::SIZE;
constexpr int K_BYTES = ST * KLayout::SIZE, V_BYTES = ST * VLayout::SIZE;
constexpr int GROUPS = PRIVATE ? WKV : 1;
constexpr int MERGE_ROW = DV + 8;
constexpr int RING_BYTES = GROUPS * (K_BYTES + V_BYTES);
constexpr int MERGE_BYTES = PRIVATE ? WKV * BM * (MERGE_ROW + 2) * 4 : 0;
constexpr int BODY_BYTES = RING_BYTES > MERGE_BYTES ? RING_BYTES : MERGE_BYTES;

// What a row sees and adds to its scores.
struct Row {
    u32 begin, end;
#if BIAS
    i64 p;
    float slope;
    u32 tree_key;
    u64 tree, mask;
#endif
};

constexpr int SHARED_BYTES = Q_BYTES + BODY_BYTES + BM * (int)sizeof(Row) + 16;

// What the host takes them for.
static_assert(SHARED_BYTES == SHARED && sizeof(Params) == PARAMS && sizeof(Item) == ITEM);

DEVICE u32 clamp(i64 x, u32 most) { return x < 0 ? 0u : x > (i64)most ? most : (u32)x; }

// The 16 bytes of a row from `chunk` on, as a vector or element by element; columns past `dim` are 0.
DEVICE void copy_chunk(u32 to, u64 row, u32 chunk, u32 dim, bool exists) {
    int rest = (int)(dim * E) - (int)(chunk * 16);
    u32 bytes = !exists || rest <= 0 ? 0 : rest < 16 ? rest : 16;
#if VECTOR
    copy16(to, (const void*)(row + chunk * 16), bytes);
#else
    u32 x[4] = {0, 0, 0, 0};
    if (E == 4) {
        const u32* from = (const u32*)(row + chunk * 16);
#pragma unroll
        for (int i = 0; i < 4; i++) if (i * 4 < bytes) x[i] = from[i];
    } else {
        const u16* from = (const u16*)(row + chunk * 16);
#pragma unroll
        for (int i = 0; i < 8; i++) if (i * 2 < bytes) x[i / 2] |= (u32)from[i] << (16 * (i % 2));
    }
    store16(to, make_uint4(x[0], x[1], x[2], x[3]));
#endif
}

// Where the keys of an item lie.
struct Keys {
    u32 begin, end;
    u64 table;
};

// Bytes from the head's first row to that of a key; the key exists.
DEVICE i64 key_offset(const Params& p, const Tensor& tensor, const Keys& keys, u32 j) {
#if PAGED
    u32 block = quotient(j, p.page), row = j - block * p.page.value;
    if (p.width.value) block -= quotient(block, p.width) * p.width.value;
    u32 page = __ldg((const u32*)keys.table + block);
    return (i64)page * tensor.batch + (i64)row * tensor.row;
#else
    return (i64)j * tensor.row;
#endif
}

// What a thread copies of a tile that lies in strides of whole rows.
struct Strided {
    // Its first chunk of the sequence's first tile, and from the start of a place in shared memory.
    u64 from;
    u32 to;
};

template <typename L>
DEVICE Strided strided(const Tensor& tensor, u64 head) {
    u32 thread = PRIVATE ? threadIdx.x % 32 : threadIdx.x, row = thread / L::ROW_CHUNKS, chunk = thread % L::ROW_CHUNKS;
    return {head + (u64)((i64)row * tensor.row) + chunk * 16, L::chunk(row, chunk)};
}

// Copies BN keys from `j0` on, by `LOADERS` threads; keys outside the item's are 0.
template <typename L, int C>
DEVICE void copy_keys(const Params& p, const Tensor& tensor, const Keys& keys, u64 head, const Strided& mine, u32 to, u32 j0, u32 dim) {
    constexpr int CHUNKS = L::ROW_CHUNKS, COPIES = (BN * CHUNKS + LOADERS - 1) / LOADERS;
    u32 thread = PRIVATE ? threadIdx.x % 32 : threadIdx.x;
#if VECTOR && !PAGED
    // All of the tile.
    constexpr int PASS = LOADERS / CHUNKS;
    if (LOADERS % CHUNKS == 0 && dim >= C && j0 >= keys.begin && j0 + BN <= keys.end) {
        u64 from = mine.from + (u64)((i64)j0 * tensor.row);
#pragma unroll
        for (int n = 0; n < COPIES; n++) {
            // The permutation of a row is that of the first wherever 8 rows lie between them.
            u32 place = PASS % 8 == 0 ? mine.to + n * PASS * L::PANEL : L::chunk(thread / CHUNKS + n * PASS, thread % CHUNKS);
            copy16(to + place, (const void*)(from + (u64)(n * PASS * tensor.row)), 16);
        }
        return;
    }
#endif
#if PAGED
    // One look-up a key: every lane finds one, and hands it to those that copy its row.
    i64 found = 0;
    if (PRIVATE && BN <= 32) {
        u32 j = j0 + thread;
        if (thread < BN && j >= keys.begin && j < keys.end) found = key_offset(p, tensor, keys, j);
    }
#endif
#pragma unroll
    for (int n = 0; n < COPIES; n++) {
        u32 index = thread + n * LOADERS;
        u32 row = index / CHUNKS, chunk = index % CHUNKS;
        if ((BN * CHUNKS) % LOADERS != 0 && index >= BN * CHUNKS) break;
        u32 j = j0 + row;
        bool exists = j >= keys.begin && j < keys.end;
        i64 offset;
#if PAGED
        if (PRIVATE && BN <= 32) offset = __shfl_sync(0xffffffffu, found, row);
        else offset = exists ? key_offset(p, tensor, keys, j) : 0;
#else
        offset = exists ? key_offset(p, tensor, keys, j) : 0;
#endif
        copy_chunk(to + L::chunk(row, chunk), head + offset, chunk, dim, exists);
    }
}

// ---- turns: a step begins when what it reads is in shared memory and what it overwrites was read

template <int N>
DEVICE void named_sync(int barrier) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(N) : "memory"); }

template <int N>
DEVICE void named_arrive(int barrier) { asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(N) : "memory"); }

DEVICE void begin_turn(u32 team) {
    if (PRIVATE) __syncwarp();
    else if (TEAMS) named_sync<256>(1 + team);
    else __syncthreads();
}

DEVICE void end_turn(u32 team) {
    if (TEAMS) named_arrive<256>(2 - team);
}

// c += a b for fragments of the dtype.
struct Left {
    u32 x[4];
#if DTYPE == F32
    u32 low[4], finite[4];
#endif
    DEVICE void split() {
#if DTYPE == F32
#pragma unroll
        for (int i = 0; i < 4; i++) {
            Halves parts = halves(x[i]);
            x[i] = parts.high, low[i] = parts.low, finite[i] = parts.finite;
        }
#endif
    }
    DEVICE void times(float (&c)[4], u32 b0, u32 b1) const {
#if DTYPE == F32
        mma_f32(c, x, low, finite, b0, b1);
#else
        mma16<DTYPE>(c, x, b0, b1);
#endif
    }
};

#if BIAS
// tanh with an error of two units in the last place.
DEVICE float hyperbolic_tangent(float x) {
    float a = fabsf(x), a2 = a * a;
    // (tanh(a) / a - 1) / a^2 on [0, 0.55], a least-squares fit at Chebyshev points: relative error of tanh 1e-7.
    float fit = fmaf(a2, fmaf(a2, fmaf(a2, fmaf(a2, -3.92890302e-3f, 1.94836594e-2f), -5.34950122e-2f), 1.33296296e-1f), -3.33332539e-1f);
    float near = fmaf(a, a2 * fit, a);
    float far = 1.f - 2.f / (1.f + exp2f(2.f * LOG2E * a));
    return copysignf(a < 0.55f ? near : far, x);
}
#endif

#if MASK
// What the mask adds at a key, in its own units.
DEVICE float mask_bias(const Params& p, u64 row, u32 j) {
    u64 at = (u64)j * p.mask_step;
    switch (p.mask_kind) {
        case F32: return *(const float*)(row + 4 * at);
        case F16: return f16_to_f32(*(const u16*)(row + 2 * at));
        case BF16: return bf16_to_f32(*(const u16*)(row + 2 * at));
        default: return *(const u8*)(row + at) ? 0.f : -INF;
    }
}
#endif

#if BIAS
// Whether a row sees a key, and the score in units of log2 with everything added.
DEVICE bool sees(const Params& p, const Row& row, u32 j) {
    if (j < row.begin || j >= row.end) return false;
    if (row.tree && j >= row.tree_key && !*(const u8*)(row.tree + (u64)(j - row.tree_key) * p.tree_step)) return false;
#if MASK
    if (mask_bias(p, row.mask, j) == -INF) return false;
#endif
    return true;
}

DEVICE float changed(const Params& p, const Row& row, u32 j, float score, bool partial) {
    float x = score * p.scale;
    if (p.cap != 0.f) x = p.cap * hyperbolic_tangent(x);
    if (row.slope != 0.f) {
        i64 distance = row.p - (i64)j;
        x = fmaf(-row.slope, (float)(distance < 0 ? -distance : distance), x);
    }
    if (!partial) return x;
    if (j < row.begin || j >= row.end) return -INF;
    if (row.tree && j >= row.tree_key && !*(const u8*)(row.tree + (u64)(j - row.tree_key) * p.tree_step)) return -INF;
#if MASK
    float bias = mask_bias(p, row.mask, j);
    if (bias == -INF) return -INF;
    x = fmaf(bias, LOG2E, x);
#endif
    return x;
}
#else
DEVICE bool sees(const Params& p, const Row& row, u32 j) { return j >= row.begin && j < row.end; }
#endif

#if MASK
// The rows of a tile as the mask's classes see them.
struct Classes {
    const u8* table;
    u64 plane_bytes;
    u32 first_q, q_tiles, planes, blocks;
    bool partial;

    // 0: no row sees a key of the block, 2: every row sees all of them and nothing is added, 1: otherwise.
    DEVICE u32 of(u32 block) const {
        if (partial) return 1;
        bool some = false, other = false;
        for (u32 n = threadIdx.x % 32; n < q_tiles * planes; n += 32) {
            u8 c = table[(n / q_tiles) * plane_bytes + (u64)(first_q + n % q_tiles) * blocks + block];
            some |= c != 0;
            other |= c != 2;
        }
        if (!__any_sync(0xffffffffu, some)) return 0;
        return __any_sync(0xffffffffu, other) ? 1 : 2;
    }
};
#endif

DEVICE bool not_finite(u32 x) {
    // Exponents of all ones: of an f32, or of either half.
    if (DTYPE == F32) return (x & 0x7f800000u) == 0x7f800000u;
    u32 ones = DTYPE == F16 ? 0x7c00u : 0x7f80u;
    return (x & ones) == ones || (x >> 16 & ones) == ones;
}

DEVICE float element(u32 word, int half) {
    if (DTYPE == F32) return __int_as_float(word);
    u16 x = (u16)(half ? word >> 16 : word);
    return DTYPE == F16 ? f16_to_f32(x) : bf16_to_f32(x);
}

// The running state of a warp's rows: sums of weights are of a lane's own columns until they are folded.
struct State {
    float o[MF][OF][4];
    float m[MF][2], l[MF][2];
};

// The weights of a tile as left operands of their product with the values.
#if DTYPE == F32
typedef float Weights[MF][SF][4];
#else
typedef u32 Weights[MF][SF / 2][4];
#endif

// The weight of row 16 mf + 8 half + lane / 4 and key 8 n + 2 (lane % 4) + i.
DEVICE float weight_of(const Weights& weights, int mf, int n, int half, int i) {
#if DTYPE == F32
    return weights[mf][n][2 * half + i];
#else
    return element(weights[mf][n / 2][n % 2 * 2 + half], i);
#endif
}

// Without what is not finite.
DEVICE u32 finite(u32 x) {
    if (DTYPE == F32) return not_finite(x) ? 0 : x;
    u32 ones = DTYPE == F16 ? 0x7c00u : 0x7f80u;
    if ((x & ones) == ones) x &= 0xffff0000u;
    if ((x >> 16 & ones) == ones) x &= 0xffffu;
    return x;
}

// Adds what infinities and NaN of keys come to in the rows that see them: the product that follows leaves them out, since it
// would hand them to every row.
DEVICE void add_not_finite(const Params& p, State& state, const Weights& weights, const Row* rows, u32 v, u32 j0) {
    float copy[MF * SF * 4];
#pragma unroll
    for (int i = 0; i < MF * SF * 4; i++) copy[i] = weight_of(weights, i / (SF * 4), i / 4 % SF, i / 2 % 2, i % 2);
    u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll 1
    for (u32 key = 0; key < BN; key++) {
        bool found = false;
        for (u32 c = lane; c < VLayout::ROW_CHUNKS; c += 32) {
            uint4 x = load16(v + VLayout::chunk(key, c));
            found |= not_finite(x.x) || not_finite(x.y) || not_finite(x.z) || not_finite(x.w);
        }
        if (!__any_sync(0xffffffffu, found)) continue;
#pragma unroll
        for (int mf = 0; mf < MF; mf++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                // The lane that holds the key's weight has it at an index known at run time alone.
                float mine = copy[(mf * SF + key / 8) * 4 + 2 * half + key % 2];
                float weight = __shfl_sync(0xffffffffu, mine, 4 * g + key % 8 / 2);
                bool seen = sees(p, rows[mf * 16 + half * 8 + g], j0 + key);
#pragma unroll
                for (int nf = 0; nf < OF; nf++) {
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        u32 column = nf * 8 + 2 * t + i, byte = column * E;
                        u32 word = load4(v + VLayout::chunk(key, byte / 16) + (byte % 16 & ~3u));
                        float x = element(word, column % 2);
                        if (seen && (isinf(x) || isnan(x))) state.o[mf][nf][2 * half + i] += weight * x;
                    }
                }
            }
        }
    }
}

// Adds the product of weights and values; where `CAREFUL`, of values that are finite.
template <bool CAREFUL>
DEVICE void add_values(State& state, const Weights& weights, u32 v) {
    u32 lane = threadIdx.x % 32;
#if DTYPE == F32
    u32 g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < SF; n++) {
        Left a[MF];
#pragma unroll
        for (int mf = 0; mf < MF; mf++) {
            // The order of keys within a product is free: lane t has keys 2t and 2t + 1.
            const float (&x)[4] = weights[mf][n];
            a[mf].x[0] = __float_as_uint(x[0]), a[mf].x[1] = __float_as_uint(x[2]);
            a[mf].x[2] = __float_as_uint(x[1]), a[mf].x[3] = __float_as_uint(x[3]);
            a[mf].split();
        }
#pragma unroll
        for (int nf = 0; nf < OF; nf++) {
            u32 chunk = 2 * nf + g / 4, row = n * 8 + 2 * t;
            u32 b0 = load4(v + VLayout::chunk(row, chunk) + g % 4 * 4);
            u32 b1 = load4(v + VLayout::chunk(row + 1, chunk) + g % 4 * 4);
            if (CAREFUL) b0 = finite(b0), b1 = finite(b1);
#pragma unroll
            for (int mf = 0; mf < MF; mf++) a[mf].times(state.o[mf][nf], b0, b1);
        }
    }
#else
    v += VLayout::chunk((lane & 7) + (lane & 8), lane >> 4);
    constexpr int PAIRS = OF / 2, ALL = SF / 2 * PAIRS;
    u32 b[AHEAD + 1][4];
#pragma unroll
    for (int i = 0; i < ALL + AHEAD; i++) {
        // Fragments are asked for before those of earlier products are used.
        if (i < ALL) transposed(b[i % (AHEAD + 1)], VLayout::pair(v, i % PAIRS) + i / PAIRS * 16 * VLayout::PANEL);
        if (i < AHEAD) continue;
        const int at = i - AHEAD, n = at / PAIRS, nf = at % PAIRS;
        u32 x[4];
#pragma unroll
        for (int k = 0; k < 4; k++) x[k] = CAREFUL ? finite(b[at % (AHEAD + 1)][k]) : b[at % (AHEAD + 1)][k];
#pragma unroll
        for (int mf = 0; mf < MF; mf++) {
            Left a;
#pragma unroll
            for (int k = 0; k < 4; k++) a.x[k] = weights[mf][n][k];
            a.times(state.o[mf][2 * nf], x[0], x[1]);
            a.times(state.o[mf][2 * nf + 1], x[2], x[3]);
        }
    }
#endif
}

// Scores of a tile to weights, of which the sums are kept; values summed before are scaled where maxima grow.
template <bool MASKED>
DEVICE void to_weights(const Params& p, State& state, float (&s)[MF][SF][4], Weights& weights, const Row* rows, u32 j0) {
    u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#if BIAS
    constexpr float c = 1.f;
#else
    float c = p.scale;
#endif
    float most[MF][2];
#pragma unroll
    for (int mf = 0; mf < MF; mf++) most[mf][0] = most[mf][1] = -INF;
#if BIAS
#pragma unroll
    for (int mf = 0; mf < MF; mf++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            Row row = rows[mf * 16 + half * 8 + g];
#pragma unroll
            for (int n = 0; n < SF; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float& x = s[mf][n][2 * half + i];
                    x = changed(p, row, j0 + n * 8 + 2 * t + i, x, MASKED);
                }
        }
    }
#else
    if (MASKED) {
#pragma unroll
        for (int mf = 0; mf < MF; mf++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                // Counted from the lane's first key.
                Row row = rows[mf * 16 + half * 8 + g];
                int begin = (int)row.begin - (int)(j0 + 2 * t), end = (int)row.end - (int)(j0 + 2 * t);
#pragma unroll
                for (int n = 0; n < SF; n++)
#pragma unroll
                    for (int i = 0; i < 2; i++)
                        if (n * 8 + i < begin || n * 8 + i >= end) s[mf][n][2 * half + i] = -INF;
            }
        }
    }
#endif
#pragma unroll
    for (int n = 0; n < SF; n++)
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int mf = 0; mf < MF; mf++)
#pragma unroll
                for (int half = 0; half < 2; half++) most[mf][half] = fmaxf(most[mf][half], s[mf][n][2 * half + i]);
    bool grown = false;
    float factor[MF][2];
#pragma unroll
    for (int mf = 0; mf < MF; mf++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float x = most[mf][half];
            x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
            x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
            float& m = state.m[mf][half];
            bool grows = (x - m) * c > SLACK;
            // From -inf, where nothing was summed yet, by 0.
            factor[mf][half] = grows ? exp2_approx((m - x) * c) : 1.f;
            if (grows) m = x;
            grown |= grows;
        }
    }
    auto scale = [&] {
        if (!__any_sync(0xffffffffu, grown)) return;
#pragma unroll
        for (int mf = 0; mf < MF; mf++) {
#pragma unroll
            for (int half = 0; half < 2; half++) state.l[mf][half] *= factor[mf][half];
#pragma unroll
            for (int nf = 0; nf < OF; nf++)
#pragma unroll
                for (int i = 0; i < 4; i++) state.o[mf][nf][i] *= factor[mf][i / 2];
        }
    };
    if (SCALE_FIRST) scale();
    float sums[MF][2] = {};
#pragma unroll
    for (int mf = 0; mf < MF; mf++) {
        float shift[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float m = state.m[mf][half];
            shift[half] = m == -INF ? 0.f : m * c;
        }
#pragma unroll
        for (int n = 0; n < SF; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float& x = s[mf][n][i];
                x = exp2_approx(BIAS ? x - shift[i / 2] : fmaf(x, c, -shift[i / 2]));
                sums[mf][i / 2] += x;
            }
#if DTYPE == F32
#pragma unroll
            for (int i = 0; i < 4; i++) weights[mf][n][i] = s[mf][n][i];
#else
#pragma unroll
            for (int half = 0; half < 2; half++)
                weights[mf][n / 2][n % 2 * 2 + half] = pack<DTYPE>(s[mf][n][2 * half], s[mf][n][2 * half + 1]);
#endif
        }
    }
    if (!SCALE_FIRST) scale();
#pragma unroll
    for (int mf = 0; mf < MF; mf++)
#pragma unroll
        for (int half = 0; half < 2; half++) state.l[mf][half] += sums[mf][half];
}

// Writes columns `column..column + 4` of a row of the output.
DEVICE void write4(const Params& p, u64 row, u32 column, float4 x) {
    float values[4] = {x.x, x.y, x.z, x.w};
    if (VECTOR && column + 4 <= p.value_dim) {
        if (DTYPE == F32) *(float4*)(row + column * E) = x;
        else *(uint2*)(row + column * E) = make_uint2(pack<DTYPE>(x.x, x.y), pack<DTYPE>(x.z, x.w));
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (column + i >= p.value_dim) break;
        if (DTYPE == F32) ((float*)row)[column + i] = values[i];
        else ((u16*)row)[column + i] = (u16)pack<DTYPE>(values[i], 0.f);
    }
}

// A row of the packed rows of a sequence and head: where it is in the tensors.
struct Place {
    u32 position, head;
};

DEVICE Place place(const Params& p, u32 kv_head, u32 row) {
    u32 position = quotient(row, p.group);
    return {position, kv_head * p.group.value + (row - position * p.group.value)};
}

DEVICE u64 row_of(const Tensor& tensor, const Item& item, Place at) {
    return tensor.at + (u64)(item.batch * tensor.batch + at.head * tensor.head + (i64)(item.q_start + at.position) * tensor.row);
}

// What the sink of a head makes of a row's maximum and sum; returns the factor of its values.
DEVICE float finish(const Params& p, u32 head, float& m, float& l) {
    float factor = 1.f;
    if (p.sinks) {
        float sink = ((const float*)p.sinks)[head] * LOG2E;
        float most = fmaxf(m, sink);
        if (most != -INF) {
            factor = exp2f(m - most);
            l = l * factor + exp2f(sink - most);
            m = most;
        }
    }
    return l == 0.f ? 0.f : factor / l;
}

DEVICE float logsumexp(float m, float l) { return l == 0.f ? -INF : (m + log2f(l)) * LN2; }

DEVICE void write_lse(const Params& p, const Item& item, Place at, float m, float l) {
    if (!p.lse || item.panel) return;
    u64 index = ((u64)item.batch * p.heads + at.head) * p.q_len + item.q_start + at.position;
    ((float*)p.lse)[index] = logsumexp(m, l);
}

constexpr int SLOT = BM * (DV + 2);
constexpr int QUADS = DV / 4;
// Parts that are asked for at a time.
constexpr int PARTS = PRIVATE && DV > 128 ? 32 : 16;

// Sums of a row over parts: maximum, sum of weights, four columns of values.
struct Sums {
    float m, l;
    float4 o;
};

// Of parts `0..count`, in their order. All of a batch is asked for before any of it is used.
template <int BATCH, typename Parts>
DEVICE Sums sum_parts(u32 count, Parts parts) {
    Sums sums = {-INF, 0.f, {0.f, 0.f, 0.f, 0.f}};
#pragma unroll 1
    for (u32 first = 0; first < count; first += BATCH) {
        float m[BATCH], l[BATCH];
        float4 o[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            bool exists = first + i < count;
            m[i] = exists ? parts.maximum(first + i) : -INF;
            l[i] = exists ? parts.sum(first + i) : 0.f;
            o[i] = exists ? parts.values(first + i) : make_float4(0.f, 0.f, 0.f, 0.f);
        }
        float most = sums.m;
#pragma unroll
        for (int i = 0; i < BATCH; i++) most = fmaxf(most, m[i]);
        float shift = most == -INF ? 0.f : most;
        float weight = exp2_approx(sums.m - shift);
        sums.m = most;
        sums.l *= weight;
        sums.o.x *= weight, sums.o.y *= weight, sums.o.z *= weight, sums.o.w *= weight;
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            weight = exp2_approx(m[i] - shift);
            sums.l = fmaf(l[i], weight, sums.l);
            sums.o.x = fmaf(o[i].x, weight, sums.o.x);
            sums.o.y = fmaf(o[i].y, weight, sums.o.y);
            sums.o.z = fmaf(o[i].z, weight, sums.o.z);
            sums.o.w = fmaf(o[i].w, weight, sums.o.w);
        }
    }
    return sums;
}

// Parts in memory, written by other blocks of threads.
struct Slots {
    const float *values_at, *stats;
    DEVICE float maximum(u32 n) const { return __ldcg(stats + (u64)n * SLOT); }
    DEVICE float sum(u32 n) const { return __ldcg(stats + (u64)n * SLOT + BM); }
    DEVICE float4 values(u32 n) const { return __ldcg((const float4*)(values_at + (u64)n * SLOT)); }
};

// Parts of the warps in shared memory.
struct Merge {
    const float *values_at, *stats;
    DEVICE float maximum(u32 n) const { return stats[n * BM * 2]; }
    DEVICE float sum(u32 n) const { return stats[n * BM * 2 + 1]; }
    DEVICE float4 values(u32 n) const { return *(const float4*)(values_at + n * BM * MERGE_ROW); }
};

// Four columns of a row of the result.
DEVICE void write_sums(const Params& p, const Item& item, u32 row, u32 column, Sums sums) {
    Place at = place(p, item.kv_head, item.row + row);
    float factor = finish(p, at.head, sums.m, sums.l);
    u32 to_column = item.panel * DV + column;
    float4 o = sums.o;
    if (to_column < p.value_dim)
        write4(p, row_of(p.out, item, at), to_column, make_float4(o.x * factor, o.y * factor, o.z * factor, o.w * factor));
    if (column == 0) write_lse(p, item, at, sums.m, sums.l);
}

// Whether this block of threads is the last to have left its part of a tile; it sees all the others then.
DEVICE bool is_last(const Params& p, const Item& item, u32* flag) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        u32* counter = (u32*)p.counters + item.counter;
        bool last = atomicAdd(counter, 1) + 1 == item.splits;
        if (last) *counter = 0;
        *flag = last;
    }
    __syncthreads();
    if (!*flag) return false;
    __threadfence();
    return true;
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) forward(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 memory[];
    Row* rows = (Row*)(memory + Q_BYTES + BODY_BYTES);
    u32* flag = (u32*)(memory + Q_BYTES + BODY_BYTES + BM * sizeof(Row));
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, team = warp / 4;
    u32 warp_row = PRIVATE ? 0 : warp * ROWS;
    u32 q_at = shared_address(memory);
    u32 k_at = q_at + Q_BYTES + (PRIVATE ? warp * (K_BYTES + V_BYTES) : 0), v_at = k_at + K_BYTES;
    const Row* my_rows = rows + warp_row;
    bool loads = !TEAMS || team == 0;

    // An item again, where NaN of a key may have reached rows that do not see it.
    bool careful = false;
    for (u32 at = blockIdx.x;;) {
        Item item = ((const Item*)p.items)[at];
        if (item.sequence == NONE) return;
        u32 all_rows = item.q_len * p.group.value;
        u32 count = all_rows - item.row < BM ? all_rows - item.row : BM;
        u32 value_column = item.panel * DV, value_dim = p.value_dim - value_column;

        Keys keys = {item.begin, item.end, 0};
        u64 k_head = p.k.at + (u64)(item.kv_head * p.k.head), v_head = p.v.at + (u64)(item.kv_head * p.v.head) + value_column * E;
#if PAGED
        keys.table = p.table + (u64)item.sequence * (p.table_width * 4);
#else
        k_head += (u64)(item.batch * p.k.batch + (i64)item.kv_start * p.k.row);
        v_head += (u64)(item.batch * p.v.batch + (i64)item.kv_start * p.v.row);
#endif
        u32 block = item.begin / TILE, end = item.end > item.begin ? (item.end + TILE - 1) / TILE : block;
#if MASK
        u32 first_position = quotient(item.row, p.group), last_position = quotient(item.row + count - 1, p.group);
        bool by_head = p.mask.head != 0;
        Classes classes;
        classes.plane_bytes = (u64)p.class_q_tiles * p.class_k_blocks;
        bool by_row = p.mask.row != 0;
        classes.first_q = by_row ? first_position / CLASS_ROWS : 0;
        classes.q_tiles = by_row ? last_position / CLASS_ROWS - classes.first_q + 1 : 1;
        classes.planes = by_head ? p.group.value : 1;
        classes.blocks = p.class_k_blocks;
        classes.partial = p.every_tile_partial;
        u32 plane = (p.mask.batch ? item.sequence : 0) * (by_head ? p.heads : 1) + (by_head ? item.kv_head * p.group.value : 0);
        classes.table = (const u8*)p.classes + plane * classes.plane_bytes;
        auto skip = [&](u32 b) {
            while (b < end && classes.of(p.mask_step ? b : 0) == 0) b++;
            return b;
        };
#else
        auto skip = [&](u32 b) { return b; };
#endif
        u32 warp_keys = PRIVATE ? warp * BN : 0;
        const Strided k_mine = strided<KLayout>(p.k, k_head), v_mine = strided<VLayout>(p.v, v_head);
        auto fetch_k = [&](u32 b, u32 slot) {
            if (loads && b < end) copy_keys<KLayout, D>(p, p.k, keys, k_head, k_mine, k_at + slot * KLayout::SIZE, b * TILE + warp_keys, p.head_dim);
        };
        auto fetch_v = [&](u32 b, u32 slot) {
            if (loads && b < end) copy_keys<VLayout, DV>(p, p.v, keys, v_head, v_mine, v_at + slot * VLayout::SIZE, b * TILE + warp_keys, value_dim);
        };

        // Group n of the copies is the keys of tile n and the values of tile n - 1.
        block = skip(block);
        u32 fetched = block;
        fetch_k(fetched, 0);
        // Rows of q, of which those past the last are 0, and what they see.
        for (u32 index = threadIdx.x; index < BM * QLayout::ROW_CHUNKS; index += THREADS) {
            u32 row = index / QLayout::ROW_CHUNKS, chunk = index % QLayout::ROW_CHUNKS;
            bool exists = row < count;
            u64 from = exists ? row_of(p.q, item, place(p, item.kv_head, item.row + row)) : p.q.at;
            copy_chunk(q_at + QLayout::chunk(row, chunk), from, chunk, p.head_dim, exists);
        }
        commit();
#pragma unroll
        for (int n = 1; n < ST - 1; n++) {
            fetch_v(fetched, n - 1);
            fetched = skip(fetched + 1);
            fetch_k(fetched, n);
            commit();
        }
        for (u32 n = threadIdx.x; n < BM; n += THREADS) {
            Row row;
            row.begin = row.end = 0;
#if BIAS
            row.p = 0, row.slope = 0.f, row.tree = 0, row.mask = p.mask.at, row.tree_key = 0;
#endif
            if (n < count) {
                Place place_of = place(p, item.kv_head, item.row + n);
                i64 position = item.q_offset + place_of.position;
                row.begin = p.left < 0 ? 0 : clamp(position - p.left, item.kv_len);
                row.end = p.right < 0 ? item.kv_len : clamp(position + p.right + 1, item.kv_len);
                row.begin = row.begin < item.begin ? item.begin : row.begin;
                row.end = row.end > item.end ? item.end : row.end;
#if BIAS
                row.p = position;
                if (p.alibi) row.slope = ((const float*)p.alibi)[place_of.head] * LOG2E;
                row.tree_key = item.kv_len - item.q_len;
                if (p.tree) row.tree = p.tree + (u64)((item.q_start + place_of.position) * p.tree_row);
                if (p.mask.at)
                    row.mask = p.mask.at + (u64)(item.sequence * p.mask.batch + place_of.head * p.mask.head + place_of.position * p.mask.row);
#endif
            }
            rows[n] = row;
        }

        State state;
#pragma unroll
        for (int mf = 0; mf < MF; mf++) {
#pragma unroll
            for (int half = 0; half < 2; half++) state.m[mf][half] = -INF, state.l[mf][half] = 0.f;
#pragma unroll
            for (int nf = 0; nf < OF; nf++)
#pragma unroll
                for (int i = 0; i < 4; i++) state.o[mf][nf][i] = 0.f;
        }

        // This lane's rows of fragments.
        u32 q_first = q_at + QLayout::chunk(warp_row + (lane & 7) + (lane & 8), lane >> 4);
        u32 k_first = KLayout::chunk((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);

        await<ST - 2>();
        __syncthreads();
        if (TEAMS && team == 1) end_turn(1);
#if QREG
        Left q_kept[MF][STEPS];
#pragma unroll
        for (int step = 0; step < STEPS; step++)
#pragma unroll
            for (int mf = 0; mf < MF; mf++) matrices(q_kept[mf][step].x, QLayout::pair(q_first, step) + mf * 16 * QLayout::PANEL);
#endif

        Weights weights;
        // The tile whose weights these are, and whether there is one; the slots of the next tile.
        u32 before = 0, slot = 0, last_slot = ST - 1;
        bool pending = false, was_partial = false, any_partial = false;
        for (;;) {
            await<ST - 2>();
            begin_turn(team);
            bool more = block < end;
            // Into the places of what the step before has read.
            auto fetch = [&] {
                fetch_v(fetched, last_slot == 0 ? ST - 1 : last_slot - 1);
                fetched = skip(fetched + 1);
                fetch_k(fetched, last_slot);
                commit();
            };
            if (!TEAMS && more) fetch();

            if (pending) {
                u32 v = v_at + last_slot * VLayout::SIZE;
                if (careful && was_partial) {
                    add_not_finite(p, state, weights, my_rows, v, before * TILE + warp_keys);
                    add_values<true>(state, weights, v);
                } else {
                    add_values<false>(state, weights, v);
                }
            }
            if (!more) break;

            float scores[MF][SF][4];
#pragma unroll
            for (int mf = 0; mf < MF; mf++)
#pragma unroll
                for (int n = 0; n < SF; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) scores[mf][n][i] = 0.f;
            u32 k = k_at + slot * KLayout::SIZE + k_first;
            constexpr int PAIRS = SF / 2, ALL = STEPS * PAIRS;
            // Steps of q that are on their way while one of them is taken up.
            constexpr int WAITING = AHEAD / PAIRS + 1;
            Left a[MF];
            u32 ahead[WAITING][MF][4], b[AHEAD + 1][4];
#pragma unroll
            for (int i = 0; i < ALL + AHEAD; i++) {
                // Fragments are asked for before those of earlier products are used.
                if (!QREG && i < ALL && i % PAIRS == 0)
#pragma unroll
                    for (int mf = 0; mf < MF; mf++)
                        matrices(ahead[i / PAIRS % WAITING][mf], QLayout::pair(q_first, i / PAIRS) + mf * 16 * QLayout::PANEL);
                if (i < ALL) matrices(b[i % (AHEAD + 1)], KLayout::pair(k, i / PAIRS) + i % PAIRS * 16 * KLayout::PANEL);
                if (i < AHEAD) continue;
                const int at = i - AHEAD, step = at / PAIRS, n = at % PAIRS;
                const u32 (&x)[4] = b[at % (AHEAD + 1)];
#pragma unroll
                for (int mf = 0; mf < MF; mf++) {
                    if (n == 0) {
#if QREG
                        a[mf] = q_kept[mf][step];
#else
#pragma unroll
                        for (int k = 0; k < 4; k++) a[mf].x[k] = ahead[step % WAITING][mf][k];
                        a[mf].split();
#endif
                    }
                    a[mf].times(scores[mf][2 * n], x[0], x[1]);
                    a[mf].times(scores[mf][2 * n + 1], x[2], x[3]);
                }
            }
            end_turn(team);
            if (TEAMS) fetch();

            u32 tile_begin = block * TILE, j0 = tile_begin + warp_keys;
            bool partial = p.every_tile_partial || tile_begin < item.full_begin || tile_begin + TILE > item.full_end;
#if MASK
            partial |= classes.of(p.mask_step ? block : 0) != 2;
#endif
            if (partial) to_weights<true>(p, state, scores, weights, my_rows, j0);
            else to_weights<false>(p, state, scores, weights, my_rows, j0);
            any_partial |= partial;
            was_partial = partial, before = block, pending = true;
            last_slot = slot;
            slot = slot + 1 == ST ? 0 : slot + 1;
            block = skip(block + 1);
        }
        if (TEAMS && team == 0) end_turn(0);
        await<0>();

        bool leaked = false;
        if (any_partial && !careful) {
#pragma unroll
            for (int mf = 0; mf < MF; mf++)
#pragma unroll
                for (int nf = 0; nf < OF; nf++)
#pragma unroll
                    for (int i = 0; i < 4; i++) leaked |= isnan(state.o[mf][nf][i]);
        }
        careful = __syncthreads_or(leaked);
        if (careful) continue;

        // Sums of all columns, and maxima in units of log2.
#pragma unroll
        for (int mf = 0; mf < MF; mf++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float& l = state.l[mf][half];
                l += __shfl_xor_sync(0xffffffffu, l, 1);
                l += __shfl_xor_sync(0xffffffffu, l, 2);
                if (!BIAS && state.m[mf][half] != -INF) state.m[mf][half] *= p.scale;
            }
        }

        bool split = item.splits > 1;
        float* part = (float*)p.partials + (u64)item.slot * SLOT;
        const float* parts = (const float*)p.partials + (u64)item.first * SLOT;
        if (PRIVATE) {
            // The warps' results, then for every row their sum.
            float* merge = (float*)(memory + Q_BYTES);
            float* stats = merge + WKV * BM * MERGE_ROW;
#pragma unroll
            for (int mf = 0; mf < MF; mf++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    u32 row = mf * 16 + half * 8 + g;
                    float* to = merge + (warp * BM + row) * MERGE_ROW + 2 * t;
#pragma unroll
                    for (int nf = 0; nf < OF; nf++)
                        *(float2*)(to + nf * 8) = make_float2(state.o[mf][nf][2 * half], state.o[mf][nf][2 * half + 1]);
                    if (t == 0) {
                        stats[(warp * BM + row) * 2] = state.m[mf][half];
                        stats[(warp * BM + row) * 2 + 1] = state.l[mf][half];
                    }
                }
            }
            __syncthreads();
            for (u32 index = threadIdx.x; index < count * QUADS; index += THREADS) {
                u32 row = index / QUADS, column = index % QUADS * 4;
                Sums sums = sum_parts<WKV>(WKV, Merge{merge + row * MERGE_ROW + column, stats + row * 2});
                if (split) {
                    __stcg((float4*)(part + row * DV + column), sums.o);
                    if (column == 0) {
                        __stcg(part + BM * DV + row, sums.m);
                        __stcg(part + BM * DV + BM + row, sums.l);
                    }
                } else {
                    write_sums(p, item, row, column, sums);
                }
            }
        } else if (split) {
#pragma unroll
            for (int mf = 0; mf < MF; mf++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    u32 row = warp_row + mf * 16 + half * 8 + g;
                    if (row >= count) continue;
#pragma unroll
                    for (int nf = 0; nf < OF; nf++)
                        __stcg((float2*)(part + row * DV + nf * 8 + 2 * t), make_float2(state.o[mf][nf][2 * half], state.o[mf][nf][2 * half + 1]));
                    if (t == 0) {
                        __stcg(part + BM * DV + row, state.m[mf][half]);
                        __stcg(part + BM * DV + BM + row, state.l[mf][half]);
                    }
                }
            }
        } else {
            // Through the rows of q that this warp alone has read, so that whole rows are written.
            __syncwarp();
#pragma unroll
            for (int mf = 0; mf < MF; mf++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    u32 row = warp_row + mf * 16 + half * 8 + g;
                    float m = state.m[mf][half], l = state.l[mf][half];
                    Place place_of = row < count ? place(p, item.kv_head, item.row + row) : Place{0, 0};
                    float factor = finish(p, place_of.head, m, l);
                    if (t == 0 && row < count) write_lse(p, item, place_of, m, l);
#pragma unroll
                    for (int nf = 0; nf < OF; nf++) {
                        float x = state.o[mf][nf][2 * half] * factor, y = state.o[mf][nf][2 * half + 1] * factor;
                        if (DTYPE == F32) {
                            u32 to = q_at + OLayout::chunk(row, 2 * nf + t / 2) + t % 2 * 8;
                            store4(to, __float_as_uint(x));
                            store4(to + 4, __float_as_uint(y));
                        } else {
                            store4(q_at + OLayout::chunk(row, nf) + t * 4, pack<DTYPE>(x, y));
                        }
                    }
                }
            }
            __syncwarp();
            for (u32 index = lane; index < ROWS * OLayout::ROW_CHUNKS; index += 32) {
                u32 row = warp_row + index / OLayout::ROW_CHUNKS, chunk = index % OLayout::ROW_CHUNKS;
                if (row >= count) break;
                uint4 x = load16(q_at + OLayout::chunk(row, chunk));
                u64 to = row_of(p.out, item, place(p, item.kv_head, item.row + row)) + value_column * E + chunk * 16;
                u32 column = value_column + chunk * (16 / E);
                if (VECTOR && column + 16 / E <= p.value_dim) {
                    *(uint4*)to = x;
                } else {
                    const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                    for (int i = 0; i < 16 / E; i++) {
                        if (column + i >= p.value_dim) break;
                        if (DTYPE == F32) ((u32*)to)[i] = words[i % 4];
                        else ((u16*)to)[i] = (u16)(words[i / 2 % 4] >> (i % 2 * 16));
                    }
                }
            }
        }
        if (split && is_last(p, item, flag)) {
            for (u32 index = threadIdx.x; index < count * QUADS; index += THREADS) {
                u32 row = index / QUADS, column = index % QUADS * 4;
                write_sums(p, item, row, column, sum_parts<PARTS>(item.splits, Slots{parts + row * DV + column, parts + BM * DV + row}));
            }
        }
        if (!item.next) return;
        at = item.next;
        __syncthreads();
    }
}
