// Attention of tiles of query rows over ranges of keys.
//
// A block of threads computes items: tiles of BM query rows of one key/value head over a range of keys. A row is a pair
// (position, head of the group), ordered by position. Scores and values stay in registers; keys and values come through
// rings of ST tiles in shared memory, by asynchronous copies. Warps divide a tile's rows (WQ of them) or a tile's keys (WKV).
// Where keys are divided, each warp copies and waits for its own keys alone, and the warps' results are merged at the end of
// the item.
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

struct Sequence {
    u32 batch, q_start, q_len, kv_start, kv_len, unused;
    i64 q_offset;
};

// Keys `begin..end` of sequence and head for the rows from `row`; every row sees those of `full_begin..full_end`. The result
// goes to slot `slot` of `splits` from `first`, or with one split to the output.
struct Item {
    u32 sequence, kv_head, row, panel;
    u32 begin, end, full_begin, full_end;
    u32 slot, first, splits, counter;
    u32 next, unused[3];
};

struct Tensor {
    u64 at;
    // Bytes between batch entries (or pages), heads and rows.
    i64 batch, head, row;
};

struct Params {
    Tensor q, k, v, out, mask;
    u64 lse, tree, alibi, sinks;
    u64 table, sequences, items, counters, classes, partials;
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
constexpr int LOADERS = PRIVATE ? 32 : THREADS;
// Fragments: 8 keys of scores, 8 columns of values; steps of 32 bytes of a row of q and k.
constexpr int SF = BN / 8, OF = DV / 8, STEPS = D * E / 32;
// Query positions of a class of a mask.
constexpr u32 CLASS_ROWS = 16;
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
static_assert(SHARED_BYTES == SHARED && sizeof(Params) == PARAMS && sizeof(Item) == ITEM && sizeof(Sequence) == SEQUENCE);

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

// Copies BN keys from `j0` on, by `LOADERS` threads; keys outside the item's are 0.
template <typename L>
DEVICE void copy_keys(const Params& p, const Tensor& tensor, const Keys& keys, u64 head, u32 to, u32 j0, u32 dim) {
    constexpr int CHUNKS = L::ROW_CHUNKS, COPIES = (BN * CHUNKS + LOADERS - 1) / LOADERS;
    u32 thread = PRIVATE ? threadIdx.x % 32 : threadIdx.x;
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

DEVICE void meet() {
    if (PRIVATE) __syncwarp();
    else __syncthreads();
}

// c += a b for fragments of the dtype.
struct Left {
    u32 x[4];
#if DTYPE == F32
    u32 low[4];
#endif
    DEVICE void split() {
#if DTYPE == F32
#pragma unroll
        for (int i = 0; i < 4; i++) halves(x[i], x[i], low[i]);
#endif
    }
    DEVICE void times(float (&c)[4], u32 b0, u32 b1) const {
#if DTYPE == F32
        mma_f32(c, x, low, b0, b1);
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

// Adds what infinities and NaN of visible keys come to, and takes them out of the tile, so that the product that follows does
// not hand them to rows that do not see the key. Warps that share the tile come here together.
DEVICE void set_aside(const Params& p, State& state, const float (&weights)[MF][SF][4], const Row* rows, u32 v, u32 j0) {
    float copy[MF * SF * 4];
#pragma unroll
    for (int i = 0; i < MF * SF * 4; i++) copy[i] = weights[i / (SF * 4)][i / 4 % SF][i % 4];
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
    meet();
    for (u32 index = PRIVATE ? lane : threadIdx.x; index < BN * VLayout::ROW_CHUNKS; index += LOADERS) {
        u32 at = v + VLayout::chunk(index / VLayout::ROW_CHUNKS, index % VLayout::ROW_CHUNKS);
        uint4 x = load16(at);
        u32* words = &x.x;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 word = words[i], kept = word;
            if (DTYPE == F32) {
                if (not_finite(word)) kept = 0;
            } else {
                u32 ones = DTYPE == F16 ? 0x7c00u : 0x7f80u;
                if ((word & ones) == ones) kept &= 0xffff0000u;
                if ((word >> 16 & ones) == ones) kept &= 0xffffu;
            }
            words[i] = kept;
        }
        store16(at, x);
    }
    meet();
}

// Whether the warps' tile of v holds anything but finite numbers.
DEVICE bool any_not_finite(u32 v) {
    bool found = false;
    for (u32 index = PRIVATE ? threadIdx.x % 32 : threadIdx.x; index < BN * VLayout::ROW_CHUNKS; index += LOADERS) {
        uint4 x = load16(v + VLayout::chunk(index / VLayout::ROW_CHUNKS, index % VLayout::ROW_CHUNKS));
        found |= not_finite(x.x) || not_finite(x.y) || not_finite(x.z) || not_finite(x.w);
    }
    return PRIVATE ? __any_sync(0xffffffffu, found) : __syncthreads_or(found);
}

// One tile of keys: scores, weights, values.
template <bool MASKED>
DEVICE void scores_to_weights(const Params& p, State& state, float (&s)[MF][SF][4], const Row* rows, u32 j0) {
    u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#if BIAS
    constexpr float c = 1.f;
#else
    float c = p.scale;
#endif
    bool grown = false;
    float factor[MF][2];
#pragma unroll
    for (int mf = 0; mf < MF; mf++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
#if BIAS
            Row row = rows[mf * 16 + half * 8 + g];
#else
            Row row = {0, 0};
            if (MASKED) row = rows[mf * 16 + half * 8 + g];
#endif
            float most = -INF;
#pragma unroll
            for (int n = 0; n < SF; n++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float& x = s[mf][n][2 * half + i];
                    u32 j = j0 + n * 8 + 2 * t + i;
#if BIAS
                    x = changed(p, row, j, x, MASKED);
#else
                    if (MASKED && (j < row.begin || j >= row.end)) x = -INF;
#endif
                    most = fmaxf(most, x);
                }
            }
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
            float& m = state.m[mf][half];
            bool grows = (most - m) * c > SLACK;
            factor[mf][half] = 1.f;
            if (grows) {
                // From -inf, where nothing was summed yet, by 0.
                factor[mf][half] = exp2_approx((m - most) * c);
                m = most;
            }
            grown |= grows;
        }
    }
    if (__any_sync(0xffffffffu, grown)) {
#pragma unroll
        for (int mf = 0; mf < MF; mf++) {
#pragma unroll
            for (int half = 0; half < 2; half++) state.l[mf][half] *= factor[mf][half];
#pragma unroll
            for (int nf = 0; nf < OF; nf++)
#pragma unroll
                for (int i = 0; i < 4; i++) state.o[mf][nf][i] *= factor[mf][i / 2];
        }
    }
#pragma unroll
    for (int mf = 0; mf < MF; mf++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float m = state.m[mf][half];
            float shift = m == -INF ? 0.f : m * c;
#pragma unroll
            for (int n = 0; n < SF; n++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float& x = s[mf][n][2 * half + i];
                    x = exp2_approx(BIAS ? x - shift : fmaf(x, c, -shift));
                    state.l[mf][half] += x;
                }
            }
        }
    }
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

DEVICE u64 row_of(const Tensor& tensor, const Sequence& s, Place at) {
    return tensor.at + (u64)(s.batch * tensor.batch + at.head * tensor.head + (i64)(s.q_start + at.position) * tensor.row);
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

DEVICE void write_lse(const Params& p, const Sequence& s, const Item& item, Place at, float m, float l) {
    if (!p.lse || item.panel) return;
    u64 index = ((u64)s.batch * p.heads + at.head) * p.q_len + s.q_start + at.position;
    ((float*)p.lse)[index] = logsumexp(m, l);
}

constexpr int SLOT = BM * (DV + 2);

// Adds the sums of all parts of a tile in the order of the keys, if this block is the last to have left its own.
DEVICE void reduce(const Params& p, const Sequence& s, const Item& item, u32 count, u32* flag) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        u32* counter = (u32*)p.counters + item.counter;
        u32 before = atomicAdd(counter, 1);
        bool last = before + 1 == item.splits;
        if (last) *counter = 0;
        *flag = last;
    }
    __syncthreads();
    if (!*flag) return;
    __threadfence();
    const float* parts = (const float*)p.partials + (u64)item.first * SLOT;
    constexpr int QUADS = DV / 4;
    for (u32 index = threadIdx.x; index < count * QUADS; index += THREADS) {
        u32 row = index / QUADS, column = index % QUADS * 4;
        const float* stats = parts + BM * DV + row;
        float m = -INF;
#pragma unroll 8
        for (u32 n = 0; n < item.splits; n++) m = fmaxf(m, __ldcg(stats + (u64)n * SLOT));
        float shift = m == -INF ? 0.f : m, l = 0.f;
        float4 o = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
        for (u32 n = 0; n < item.splits; n++) {
            float weight = exp2_approx(__ldcg(stats + (u64)n * SLOT) - shift);
            float4 x = __ldcg((const float4*)(parts + (u64)n * SLOT + row * DV + column));
            l = fmaf(__ldcg(stats + (u64)n * SLOT + BM), weight, l);
            o.x = fmaf(x.x, weight, o.x);
            o.y = fmaf(x.y, weight, o.y);
            o.z = fmaf(x.z, weight, o.z);
            o.w = fmaf(x.w, weight, o.w);
        }
        Place at = place(p, item.kv_head, item.row + row);
        float factor = finish(p, at.head, m, l);
        u64 to = row_of(p.out, s, at);
        u32 to_column = item.panel * DV + column;
        if (to_column < p.value_dim)
            write4(p, to, to_column, make_float4(o.x * factor, o.y * factor, o.z * factor, o.w * factor));
        if (column == 0) write_lse(p, s, item, at, m, l);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) forward(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 memory[];
    Row* rows = (Row*)(memory + Q_BYTES + BODY_BYTES);
    u32* flag = (u32*)(memory + Q_BYTES + BODY_BYTES + BM * sizeof(Row));
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 warp_row = PRIVATE ? 0 : warp * ROWS;
    u32 q_at = shared_address(memory);
    u32 k_at = q_at + Q_BYTES + (PRIVATE ? warp * (K_BYTES + V_BYTES) : 0), v_at = k_at + K_BYTES;
    const Row* my_rows = rows + warp_row;

    for (u32 at = blockIdx.x;;) {
        Item item = ((const Item*)p.items)[at];
        if (item.sequence == NONE) return;
        Sequence s = ((const Sequence*)p.sequences)[item.sequence];
        u32 all_rows = s.q_len * p.group.value;
        u32 count = all_rows - item.row < BM ? all_rows - item.row : BM;
        u32 value_column = item.panel * DV, value_dim = p.value_dim - value_column;

        Keys keys = {item.begin, item.end, 0};
        u64 k_head = p.k.at + (u64)(item.kv_head * p.k.head), v_head = p.v.at + (u64)(item.kv_head * p.v.head) + value_column * E;
#if PAGED
        keys.table = p.table + (u64)item.sequence * (p.table_width * 4);
#else
        k_head += (u64)(s.batch * p.k.batch + (i64)s.kv_start * p.k.row);
        v_head += (u64)(s.batch * p.v.batch + (i64)s.kv_start * p.v.row);
#endif

        // Rows of q, of which those past the last are 0, and what they see.
        for (u32 index = threadIdx.x; index < BM * QLayout::ROW_CHUNKS; index += THREADS) {
            u32 row = index / QLayout::ROW_CHUNKS, chunk = index % QLayout::ROW_CHUNKS;
            bool exists = row < count;
            u64 from = exists ? row_of(p.q, s, place(p, item.kv_head, item.row + row)) : p.q.at;
            copy_chunk(q_at + QLayout::chunk(row, chunk), from, chunk, p.head_dim, exists);
        }
        for (u32 n = threadIdx.x; n < BM; n += THREADS) {
            Row row;
            row.begin = row.end = 0;
#if BIAS
            row.p = 0, row.slope = 0.f, row.tree = 0, row.mask = p.mask.at, row.tree_key = 0;
#endif
            if (n < count) {
                Place place_of = place(p, item.kv_head, item.row + n);
                i64 position = s.q_offset + place_of.position;
                row.begin = p.left < 0 ? 0 : clamp(position - p.left, s.kv_len);
                row.end = p.right < 0 ? s.kv_len : clamp(position + p.right + 1, s.kv_len);
                row.begin = row.begin < item.begin ? item.begin : row.begin;
                row.end = row.end > item.end ? item.end : row.end;
#if BIAS
                row.p = position;
                if (p.alibi) row.slope = ((const float*)p.alibi)[place_of.head] * LOG2E;
                row.tree_key = s.kv_len - s.q_len;
                if (p.tree) row.tree = p.tree + (u64)((s.q_start + place_of.position) * p.tree_row);
                if (p.mask.at)
                    row.mask = p.mask.at + (u64)(item.sequence * p.mask.batch + place_of.head * p.mask.head + place_of.position * p.mask.row);
#endif
            }
            rows[n] = row;
        }

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
        auto fetch_k = [&](u32 b, u32 slot) {
            u32 j0 = b * TILE + (PRIVATE ? warp * BN : 0);
            if (b < end) copy_keys<KLayout>(p, p.k, keys, k_head, k_at + slot * KLayout::SIZE, j0, p.head_dim);
            commit();
        };
        auto fetch_v = [&](u32 b, u32 slot) {
            u32 j0 = b * TILE + (PRIVATE ? warp * BN : 0);
            if (b < end) copy_keys<VLayout>(p, p.v, keys, v_head, v_at + slot * VLayout::SIZE, j0, value_dim);
            commit();
        };

        block = skip(block);
        // The block whose keys were asked for last; its values are asked for next.
        u32 fetched = block;
#pragma unroll
        for (int n = 0; n < ST; n++) {
            if (n > 0) {
                fetch_v(fetched, n - 1);
                fetched = skip(fetched + 1);
            }
            fetch_k(fetched, n);
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

        // Addresses of this lane's rows of fragments.
        u32 q_row = warp_row + (lane & 7) + (lane & 8), q_first = q_at + QLayout::chunk(q_row, lane >> 4);
        u32 k_first = KLayout::chunk((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
        u32 v_first = VLayout::chunk((lane & 7) + (lane & 8), lane >> 4);
#if DTYPE == F32
        u32 v_row = 2 * t;
#endif

        await<2 * ST - 2>();
        __syncthreads();
#if QREG
        Left q_kept[MF][STEPS];
#pragma unroll
        for (int step = 0; step < STEPS; step++)
#pragma unroll
            for (int mf = 0; mf < MF; mf++) matrices(q_kept[mf][step].x, QLayout::pair(q_first, step) + mf * 16 * QLayout::PANEL);
#endif

        u32 slot = 0;
        for (; block < end; block = skip(block + 1)) {
            u32 j0 = block * TILE + (PRIVATE ? warp * BN : 0);
            await<2 * ST - 2>();
            meet();
            fetch_v(fetched, slot == 0 ? ST - 1 : slot - 1);

            float scores[MF][SF][4];
#pragma unroll
            for (int mf = 0; mf < MF; mf++)
#pragma unroll
                for (int n = 0; n < SF; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) scores[mf][n][i] = 0.f;
            u32 k = k_at + slot * KLayout::SIZE + k_first;
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                Left a[MF];
#pragma unroll
                for (int mf = 0; mf < MF; mf++) {
#if QREG
                    a[mf] = q_kept[mf][step];
#else
                    matrices(a[mf].x, QLayout::pair(q_first, step) + mf * 16 * QLayout::PANEL);
                    a[mf].split();
#endif
                }
#pragma unroll
                for (int n = 0; n < SF / 2; n++) {
                    u32 b[4];
                    matrices(b, KLayout::pair(k, step) + n * 16 * KLayout::PANEL);
#pragma unroll
                    for (int mf = 0; mf < MF; mf++) {
                        a[mf].times(scores[mf][2 * n], b[0], b[1]);
                        a[mf].times(scores[mf][2 * n + 1], b[2], b[3]);
                    }
                }
            }

            u32 tile_begin = block * TILE;
            bool partial = p.every_tile_partial || tile_begin < item.full_begin || tile_begin + TILE > item.full_end;
#if MASK
            partial |= classes.of(p.mask_step ? block : 0) != 2;
#endif
            if (partial) scores_to_weights<true>(p, state, scores, my_rows, j0);
            else scores_to_weights<false>(p, state, scores, my_rows, j0);

            await<2 * ST - 2>();
            meet();
            fetched = skip(fetched + 1);
            fetch_k(fetched, slot);

            u32 v = v_at + slot * VLayout::SIZE;
            if (partial && any_not_finite(v)) set_aside(p, state, scores, my_rows, v, j0);
#if DTYPE == F32
#pragma unroll
            for (int n = 0; n < SF; n++) {
                Left a[MF];
#pragma unroll
                for (int mf = 0; mf < MF; mf++) {
                    // The order of keys within a product is free: lane t has keys 2t and 2t + 1.
                    float (&x)[4] = scores[mf][n];
                    a[mf].x[0] = __float_as_uint(x[0]), a[mf].x[1] = __float_as_uint(x[2]);
                    a[mf].x[2] = __float_as_uint(x[1]), a[mf].x[3] = __float_as_uint(x[3]);
                    a[mf].split();
                }
#pragma unroll
                for (int nf = 0; nf < OF; nf++) {
                    u32 chunk = 2 * nf + g / 4, row = n * 8 + v_row;
                    u32 b0 = load4(v + VLayout::chunk(row, chunk) + g % 4 * 4);
                    u32 b1 = load4(v + VLayout::chunk(row + 1, chunk) + g % 4 * 4);
#pragma unroll
                    for (int mf = 0; mf < MF; mf++) a[mf].times(state.o[mf][nf], b0, b1);
                }
            }
#else
            v += v_first;
#pragma unroll
            for (int n = 0; n < SF / 2; n++) {
                Left a[MF];
#pragma unroll
                for (int mf = 0; mf < MF; mf++) {
                    float (&low)[4] = scores[mf][2 * n], (&high)[4] = scores[mf][2 * n + 1];
                    a[mf].x[0] = pack<DTYPE>(low[0], low[1]), a[mf].x[1] = pack<DTYPE>(low[2], low[3]);
                    a[mf].x[2] = pack<DTYPE>(high[0], high[1]), a[mf].x[3] = pack<DTYPE>(high[2], high[3]);
                }
#pragma unroll
                for (int nf = 0; nf < OF / 2; nf++) {
                    u32 b[4];
                    transposed(b, VLayout::pair(v, nf) + n * 16 * VLayout::PANEL);
#pragma unroll
                    for (int mf = 0; mf < MF; mf++) {
                        a[mf].times(state.o[mf][2 * nf], b[0], b[1]);
                        a[mf].times(state.o[mf][2 * nf + 1], b[2], b[3]);
                    }
                }
            }
#endif
            slot = slot + 1 == ST ? 0 : slot + 1;
        }
        await<0>();

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
        if (PRIVATE) {
            // The warps' results, then for every row their sum.
            float* merge = (float*)(memory + Q_BYTES);
            float* stats = merge + WKV * BM * MERGE_ROW;
            __syncthreads();
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
            constexpr int QUADS = DV / 4;
            for (u32 index = threadIdx.x; index < count * QUADS; index += THREADS) {
                u32 row = index / QUADS, column = index % QUADS * 4;
                float m = -INF, l = 0.f;
#pragma unroll
                for (int w = 0; w < WKV; w++) m = fmaxf(m, stats[(w * BM + row) * 2]);
                float shift = m == -INF ? 0.f : m;
                float4 o = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
                for (int w = 0; w < WKV; w++) {
                    float weight = exp2_approx(stats[(w * BM + row) * 2] - shift);
                    float4 x = *(const float4*)(merge + (w * BM + row) * MERGE_ROW + column);
                    l = fmaf(stats[(w * BM + row) * 2 + 1], weight, l);
                    o.x = fmaf(x.x, weight, o.x);
                    o.y = fmaf(x.y, weight, o.y);
                    o.z = fmaf(x.z, weight, o.z);
                    o.w = fmaf(x.w, weight, o.w);
                }
                if (split) {
                    __stcg((float4*)(part + row * DV + column), o);
                    if (column == 0) {
                        __stcg(part + BM * DV + row, m);
                        __stcg(part + BM * DV + BM + row, l);
                    }
                } else {
                    Place place_of = place(p, item.kv_head, item.row + row);
                    float factor = finish(p, place_of.head, m, l);
                    u32 to_column = value_column + column;
                    if (to_column < p.value_dim)
                        write4(p, row_of(p.out, s, place_of), to_column, make_float4(o.x * factor, o.y * factor, o.z * factor, o.w * factor));
                    if (column == 0) write_lse(p, s, item, place_of, m, l);
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
                    if (t == 0 && row < count) write_lse(p, s, item, place_of, m, l);
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
                u64 to = row_of(p.out, s, place(p, item.kv_head, item.row + row)) + value_column * E + chunk * 16;
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
        if (split) reduce(p, s, item, count, flag);
        if (!item.next) return;
        at = item.next;
        __syncthreads();
    }
}
