// What attention kernels share: work tiles, copies of keys, scores, probabilities, sums, results.
//
// A block of threads computes work tiles: tiles of BM query rows of one key/value head over a range of keys. A row is a pair
// (position, head of the group), ordered by position. Scores and values stay in registers; keys and values come through
// rings of ST tiles in shared memory, by asynchronous copies. A step multiplies the probabilities of one tile with its values and
// then q with the keys of the next: the matrix unit has both products without a pause, and the probabilities that it waits for are
// made between steps.
//
// Where several work tiles share a tile of rows, each leaves its sums in memory, and the threads that come last add them up in the
// order of the keys.
//
//   DTYPE               F32, F16 or BF16
//   D, DV               head dimension and columns of v that a work tile computes, rounded up to a multiple of 32
//   WQ, WKV             warps over rows (prefill.cu) or over keys (decode.cu), the other 1
//   MF                  fragments of 16 rows of a warp
//   BN                  keys of a tile; where warps divide keys, of a warp's part
//   ST                  tiles of a ring
//   CTAS                blocks of threads that fit a multiprocessor
//   QREG                whether fragments of q stay in registers
//   PAGED               whether keys lie in pages
//   VECTOR              whether every row of every tensor starts on 16 bytes
//   BIAS                whether scores are changed: softcap, ALiBi, tree mask, a scale that is not positive
//   MASK                whether there is a materialised mask (with BIAS)
//   MASK_TILE_ROWS      query rows of a mask tile
//   GROUP               parts that are added up first where there are many
//   AGAIN               work tiles of a block of threads that can be computed again

// WorkTile, Tensor, Divisor and ForwardParams are declared in Rust (work_tile.rs, params.rs) and precede this text. Of a work tile,
// keys `begin..end` of a sequence and head are for the rows from `row`; every row sees those of `full_begin..full_end`. The result goes to
// partial `slot` of `splits` from `first`, or with one split to the output. Where `splits` has the bit GROUPED, groups of GROUP splits are
// added up first, into the partials behind them. Entry `next` is the next work tile, if it is not 0.

// x / d for x < 2^31, where `multiplier` and `shift` were made for d.
DEVICE u32 quotient(u32 x, const Divisor& d) { return (u32)(((u64)x * d.multiplier) >> d.shift); }

constexpr u32 NONE = 0xffffffffu;
constexpr u32 GROUPED = 0x80000000u;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
// Of a bias of a greater magnitude, 2^126, what is above it counts HUGE_RATE instead of log2 e: in units of log2 the largest of f32
// would be infinite. Differences as large as the spacing of such numbers decide a softmax at any rate.
constexpr float HUGE_BIAS = 8.507059173023462e+37f, HUGE_RATE = 0.5f, HUGE_SCORE = HUGE_BIAS * LOG2E;

constexpr int E = DTYPE == F32 ? 4 : 2;
constexpr int WARPS = WQ * WKV, THREADS = 32 * WARPS;
constexpr bool PRIVATE = WQ == 1;
constexpr int ROWS = 16 * MF, BM = ROWS * WQ;
constexpr int TILE = BN * WKV;
// Threads that copy a tile together: eight warps over rows divide keys and values.
constexpr int LOADERS = PRIVATE ? 32 : WQ == 8 ? 128 : THREADS;
// Fragments: 8 keys of scores, 8 columns of values; steps of 32 bytes of a row of q and k.
constexpr int SF = BN / 8, OF = DV / 8, STEPS = D * E / 32;
// Fragments of keys and values that are asked for ahead of their products.
constexpr int AHEAD = PRIVATE || D > 128 ? 2 : D > 64 ? 3 : 1;
// Whether sums are scaled before probabilities are made, which takes fewer registers, or after, which leaves one run of instructions.
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

constexpr int K_BYTES = ST * KLayout::SIZE, V_BYTES = ST * VLayout::SIZE;

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

// What the host takes them for.

DEVICE u32 clamp(i64 x, u32 most) { return x < 0 ? 0u : x > (i64)most ? most : (u32)x; }

// A row of the packed rows of a sequence and head: where it is in the tensors.
struct Place {
    u32 position, head;
};

DEVICE Place place(const ForwardParams& p, u32 kv_head, u32 row) {
    u32 position = quotient(row, p.group);
    return {position, kv_head * p.group.value + (row - position * p.group.value)};
}

DEVICE u64 row_of(const Tensor& tensor, const WorkTile& work_tile, Place at) {
    return tensor.at + (u64)(work_tile.batch * tensor.batch + at.head * tensor.head + (i64)(work_tile.q_start + at.position) * tensor.row);
}

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

// Where the keys of a work tile lie.
struct Keys {
    u32 begin, end;
    u64 table;
};

// Bytes from the head's first row to that of a key; the key exists.
DEVICE i64 key_offset(const ForwardParams& p, const Tensor& tensor, const Keys& keys, u32 j) {
#if PAGED
    u32 block = quotient(j, p.page), row = j - block * p.page.value;
    if (p.width.value) block -= quotient(block, p.width) * p.width.value;
    u32 page = __ldg((const u32*)keys.table + block);
    return (i64)page * tensor.batch + (i64)row * tensor.row;
#else
    return (i64)j * tensor.row;
#endif
}

// Where a thread begins to copy a tile that lies in strides of whole rows: bytes from the tile's first row and from the start of
// its place in shared memory.
struct Strided {
    u64 from;
    u32 to;
};

template <typename L>
DEVICE Strided strided(const Tensor& tensor) {
    u32 thread = threadIdx.x % LOADERS, row = thread / L::ROW_CHUNKS, chunk = thread % L::ROW_CHUNKS;
    return {(u64)((i64)row * tensor.row) + chunk * 16, L::chunk(row, chunk)};
}

// Copies BN keys from `j0` on, by `LOADERS` threads; keys outside the work tile's are 0.
template <typename L, int C>
DEVICE void copy_keys(const ForwardParams& p, const Tensor& tensor, const Keys& keys, u64 head, const Strided& mine, u32 to, u32 j0, u32 dim) {
    constexpr int CHUNKS = L::ROW_CHUNKS, COPIES = (BN * CHUNKS + LOADERS - 1) / LOADERS;
#if VECTOR && !PAGED
    // All of the tile: PASS rows at a time.
    constexpr int PASS = LOADERS / CHUNKS;
    if (LOADERS % CHUNKS == 0 && BN * CHUNKS % LOADERS == 0 && dim >= C && j0 >= keys.begin && j0 + BN <= keys.end) {
        static_assert(LOADERS % CHUNKS != 0 || PASS % 8 == 0 || L::PANEL == 128);
        u64 from = head + mine.from + (u64)((i64)j0 * tensor.row), step = (u64)(PASS * tensor.row);
        to += mine.to;
#pragma unroll
        for (int n = 0; n < COPIES; n++) {
            // A thread's rows differ in bits that its first has not.
            copy16((to ^ ((n * PASS % 8) << 4)) + n * PASS * L::PANEL, (const void*)from, 16);
            from += step;
        }
        return;
    }
#endif
    u32 thread = afresh(threadIdx.x % LOADERS);
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
DEVICE float mask_bias(const ForwardParams& p, u64 row, u32 j) {
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
DEVICE bool sees(const ForwardParams& p, const Row& row, u32 j) {
    if (j < row.begin || j >= row.end) return false;
    if (row.tree && j >= row.tree_key && !*(const u8*)(row.tree + (u64)(j - row.tree_key) * p.tree_step)) return false;
#if MASK
    if (mask_bias(p, row.mask, j) == -INF) return false;
#endif
    return true;
}

DEVICE float changed(const ForwardParams& p, const Row& row, u32 j, float score, bool partial) {
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
    // A NaN is no less than anything, and stays one.
    float core = bias < -HUGE_BIAS ? -HUGE_BIAS : bias > HUGE_BIAS ? HUGE_BIAS : bias;
    x = fmaf(bias - core, HUGE_RATE, fmaf(core, LOG2E, x));
#endif
    return x;
}
#else
DEVICE bool sees(const ForwardParams& p, const Row& row, u32 j) { return j >= row.begin && j < row.end; }
#endif

#if MASK
// The rows of a tile as the mask's classes see them.
struct MaskTiles {
    const u8* table;
    u64 plane_bytes;
    u32 first_q, q_tiles, planes, blocks;
    bool partial, by_key;

    DEVICE MaskTiles(const ForwardParams& p, const WorkTile& work_tile) {
        u32 all_rows = work_tile.q_len * p.group.value, rest = all_rows - work_tile.row, count = rest < BM ? rest : BM;
        u32 first_position = quotient(work_tile.row, p.group), last_position = quotient(work_tile.row + count - 1, p.group);
        bool by_head = p.mask.head != 0, by_row = p.mask.row != 0;
        plane_bytes = (u64)p.mask_q_tiles * p.mask_k_blocks;
        first_q = by_row ? first_position / MASK_TILE_ROWS : 0;
        q_tiles = by_row ? last_position / MASK_TILE_ROWS - first_q + 1 : 1;
        planes = by_head ? p.group.value : 1;
        blocks = p.mask_k_blocks;
        partial = p.every_tile_partial;
        by_key = p.mask_step != 0;
        u32 plane = (p.mask.batch ? work_tile.sequence : 0) * (by_head ? p.heads : 1) + (by_head ? work_tile.kv_head * p.group.value : 0);
        table = (const u8*)p.mask_tiles + plane * plane_bytes;
    }

    // 0: no row sees a key of the block, 2: every row sees all of them and nothing is added, 1: otherwise.
    DEVICE u32 of(u32 block) const {
        if (partial) return 1;
        // A mask that says the same of all keys has one block.
        if (!by_key) block = 0;
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

// The first tile from `block` on of which some row sees a key, at most `end`.
DEVICE u32 skip(const ForwardParams& p, const WorkTile& work_tile, u32 block, u32 end) {
#if MASK
    MaskTiles mask_tiles(p, work_tile);
    while (block < end && mask_tiles.of(block) == 0) block++;
#endif
    return block;
}

// Whether some row does not see some key of a tile, or adds something to its score. A tile past the work tile's keys stands for none.
DEVICE bool is_partial(const ForwardParams& p, const WorkTile& work_tile, u32 block) {
    u32 begin = block * TILE;
    if (begin >= work_tile.end) return true;
    bool partial = p.every_tile_partial || begin < work_tile.full_begin || begin + TILE > work_tile.full_end;
#if MASK
    partial |= MaskTiles(p, work_tile).of(block) != 2;
#endif
    return partial;
}

// The keys of a work tile in its sequence and head.
struct Source {
    Keys keys;
    u64 k, v;
    // Columns of values from the work tile's first on.
    u32 value_dim;

    DEVICE Source() {}
    DEVICE Source(const ForwardParams& p, const WorkTile& work_tile) {
        u32 value_column = work_tile.panel * DV;
        value_dim = p.value_dim - value_column;
        keys.begin = work_tile.begin, keys.end = work_tile.end, keys.table = 0;
        k = p.k.at + (u64)(work_tile.kv_head * p.k.head), v = p.v.at + (u64)(work_tile.kv_head * p.v.head) + value_column * E;
#if PAGED
        keys.table = p.table + (u64)work_tile.sequence * (p.table_width * 4);
#else
        k += (u64)(work_tile.batch * p.k.batch + (i64)work_tile.kv_start * p.k.row);
        v += (u64)(work_tile.batch * p.v.batch + (i64)work_tile.kv_start * p.v.row);
#endif
    }
};

#if BIAS
// 2^86, as the host has it.
constexpr float MAX_ALIBI_SLOPE = 77371252455336267181195264.f;

// The slope of a head. The host cannot refuse one whose biases would overflow: its rows are NaN.
DEVICE float alibi_slope(const ForwardParams& p, u32 head) {
    float slope = ((const float*)p.alibi)[head];
    return fabsf(slope) <= MAX_ALIBI_SLOPE ? slope : NAN;
}
#endif

// Keys of a work tile's sequence that a position sees by causality, window and length.
struct Visible {
    u32 begin, end;
};

DEVICE Visible visible(const ForwardParams& p, const WorkTile& work_tile, i64 position) {
    u32 begin = p.left < 0 ? 0 : clamp(position - p.left, work_tile.kv_len);
    u32 end = p.right < 0 ? work_tile.kv_len : clamp(position + p.right + 1, work_tile.kv_len);
    return {begin, end};
}

#if BIAS
// The position from which ALiBi counts distances: a row's own, or that of the nearest key that it sees. What is between the two is the
// same for all keys, changes no probability, and would leave f32 no digits for what does.
DEVICE i64 nearest(const Visible& seen, i64 position) {
    if (seen.begin >= seen.end) return position;
    return position < (i64)seen.begin ? seen.begin : position >= (i64)seen.end ? seen.end - 1 : position;
}

// What a row's scores lack because distances are from `nearest`.
DEVICE float alibi_shift(const ForwardParams& p, const WorkTile& work_tile, Place at) {
    if (!p.alibi) return 0.f;
    i64 position = work_tile.q_offset + at.position, distance = position - nearest(visible(p, work_tile, position), position);
    return -alibi_slope(p, at.head) * (float)(distance < 0 ? -distance : distance);
}
#endif

// What row n of a work tile's tile sees and adds; nothing past its rows.
DEVICE Row row_of_tile(const ForwardParams& p, const WorkTile& work_tile, u32 n) {
    Row row;
    row.begin = row.end = 0;
#if BIAS
    row.p = 0, row.slope = 0.f, row.tree = 0, row.mask = p.mask.at, row.tree_key = 0;
#endif
    if (work_tile.row + n >= work_tile.q_len * p.group.value) return row;
    Place at = place(p, work_tile.kv_head, work_tile.row + n);
    i64 position = work_tile.q_offset + at.position;
    Visible seen = visible(p, work_tile, position);
    row.begin = seen.begin < work_tile.begin ? work_tile.begin : seen.begin;
    row.end = seen.end > work_tile.end ? work_tile.end : seen.end;
#if BIAS
    row.p = nearest(seen, position);
    if (p.alibi) row.slope = alibi_slope(p, at.head) * LOG2E;
    row.tree_key = work_tile.kv_len - work_tile.q_len;
    if (p.tree) row.tree = p.tree + (u64)((work_tile.q_start + at.position) * p.tree_row);
    if (p.mask.at) row.mask = p.mask.at + (u64)(work_tile.sequence * p.mask.batch + at.head * p.mask.head + at.position * p.mask.row);
#endif
    return row;
}

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

// Sums of probabilities times values may overflow where their means do not, of dtypes whose largest value is near that of f32. Where sums are
// not finite they are made again of values times SHRINK, a power of two: more keys than there can be, of probabilities up to 2^SLACK, add up to
// no more than a value.
constexpr bool SHRINKS = DTYPE != F16;
constexpr float SHRINK = 9.094947017729282e-13f, SHRINK_LOG2 = -40.f, LARGEST = 3.40282346638528859812e+38f;

// A sum times a factor and a power of two: finite where the sum is, since the mean is no larger than a value but for rounding.
DEVICE float mean(float sum, float factor, float grows) {
    float x = sum * factor * grows;
    return SHRINKS && isinf(x) && !isinf(sum) && !isinf(factor) ? copysignf(LARGEST, x) : x;
}

// The running state of a warp's rows: sums of probabilities are of a lane's own columns until they are folded.
struct State {
    float o[MF][OF][4];
    float m[MF][2], l[MF][2];

    DEVICE void reset() {
#pragma unroll
        for (int mf = 0; mf < MF; mf++) {
#pragma unroll
            for (int half = 0; half < 2; half++) m[mf][half] = -INF, l[mf][half] = 0.f;
#pragma unroll
            for (int nf = 0; nf < OF; nf++)
#pragma unroll
                for (int i = 0; i < 4; i++) o[mf][nf][i] = 0.f;
        }
    }

    // Sums of all columns, and maxima in units of log2.
    DEVICE void fold(const ForwardParams& p) {
#pragma unroll
        for (int mf = 0; mf < MF; mf++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float& sum = l[mf][half];
                sum += __shfl_xor_sync(0xffffffffu, sum, 1);
                sum += __shfl_xor_sync(0xffffffffu, sum, 2);
                if (!BIAS && m[mf][half] != -INF) m[mf][half] *= p.scale;
            }
        }
    }

    // Whether to compute the rows again, with care: where NaN of a key may have reached rows that do not see it, or sums overflowed.
    DEVICE bool is_spoiled(bool any_partial) const {
        bool found = false;
#pragma unroll
        for (int mf = 0; mf < MF; mf++)
#pragma unroll
            for (int nf = 0; nf < OF; nf++)
#pragma unroll
                for (int i = 0; i < 4; i++) found |= SHRINKS ? !(fabsf(o[mf][nf][i]) < INF) : any_partial && isnan(o[mf][nf][i]);
        return found;
    }

    // After `fold`, of sums of values times SHRINK: rows that do not overflow without it are as they are without it; others have
    // smaller probabilities too.
    DEVICE void restore() {
#pragma unroll
        for (int mf = 0; mf < MF; mf++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 overflows = 0;
#pragma unroll
                for (int n = 0; n < 2 * OF; n++) {
                    float x = o[mf][n / 2][2 * half + n % 2];
                    overflows |= fabsf(x) < INF && isinf(x * (1.f / SHRINK));
                }
                overflows |= __shfl_xor_sync(0xffffffffu, overflows, 1);
                overflows |= __shfl_xor_sync(0xffffffffu, overflows, 2);
                if (overflows) m[mf][half] -= SHRINK_LOG2, l[mf][half] *= SHRINK;
                float by = overflows ? 1.f : 1.f / SHRINK;
#pragma unroll
                for (int n = 0; n < 2 * OF; n++) o[mf][n / 2][2 * half + n % 2] *= by;
            }
        }
    }
};

// The probabilities of a tile as left operands of their product with the values.
#if DTYPE == F32
typedef float Probs[MF][SF][4];
#else
typedef u32 Probs[MF][SF / 2][4];
#endif

// The probability of row 16 mf + 8 half + lane / 4 and key 8 n + 2 (lane % 4) + i.
DEVICE float prob_of(const Probs& probs, int mf, int n, int half, int i) {
#if DTYPE == F32
    return probs[mf][n][2 * half + i];
#else
    return element(probs[mf][n / 2][n % 2 * 2 + half], i);
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

// A word of values times SHRINK.
DEVICE u32 shrunk(u32 x) {
    if (DTYPE == F32) return __float_as_uint(__uint_as_float(x) * SHRINK);
    return pack<DTYPE>(element(x, 0) * SHRINK, element(x, 1) * SHRINK);
}

// A step of the product of probabilities and values: 16 keys, of f32 8, with pairs of fragments of values, of f32 single ones.
constexpr int STEP_KEYS = DTYPE == F32 ? 8 : 16, KEY_STEPS = BN / STEP_KEYS, PAIRS = DTYPE == F32 ? OF : OF / 2;

#if DTYPE == F32
typedef u32 Values[2];
#else
typedef u32 Values[4];
#endif

// Where this lane's fragments of a tile of values begin.
DEVICE u32 v_fragment() {
    u32 lane = threadIdx.x % 32;
    return DTYPE == F32 ? 0 : VLayout::chunk((lane & 7) + (lane & 8), lane >> 4);
}

DEVICE void load_values(Values& b, u32 v, int n, int pair) {
#if DTYPE == F32
    // The order of keys within a product is free: lane t has keys 2t and 2t + 1.
    u32 lane = threadIdx.x % 32, g = lane / 4, chunk = 2 * pair + g / 4, row = n * 8 + 2 * (lane % 4);
    b[0] = load4(v + VLayout::chunk(row, chunk) + g % 4 * 4);
    b[1] = load4(v + VLayout::chunk(row + 1, chunk) + g % 4 * 4);
#else
    transposed(b, VLayout::pair(v, pair) + n * 16 * VLayout::PANEL);
#endif
}

// The probabilities of a step as left operands.
DEVICE Left left_of(const Probs& probs, int mf, int n) {
    Left a;
#if DTYPE == F32
    const float(&x)[4] = probs[mf][n];
    a.x[0] = __float_as_uint(x[0]), a.x[1] = __float_as_uint(x[2]), a.x[2] = __float_as_uint(x[1]), a.x[3] = __float_as_uint(x[3]);
    a.split();
#else
#pragma unroll
    for (int i = 0; i < 4; i++) a.x[i] = probs[mf][n][i];
#endif
    return a;
}

DEVICE void multiply_values(State& state, const Left& a, const Values& b, int mf, int pair) {
#if DTYPE == F32
    a.times(state.o[mf][pair], b[0], b[1]);
#else
    a.times(state.o[mf][2 * pair], b[0], b[1]);
    a.times(state.o[mf][2 * pair + 1], b[2], b[3]);
#endif
}

// Adds the product of probabilities and values.
DEVICE void add_values(State& state, const Probs& probs, u32 v) {
    constexpr int ALL = KEY_STEPS * PAIRS, EARLY = DTYPE == F32 ? 0 : AHEAD;
    v += v_fragment();
    Left a[MF];
    Values b[EARLY + 1];
#pragma unroll
    for (int i = 0; i < ALL + EARLY; i++) {
        // Fragments are asked for before those of earlier products are used.
        if (i < ALL) load_values(b[i % (EARLY + 1)], v, i / PAIRS, i % PAIRS);
        if (i < EARLY) continue;
        const int at = i - EARLY;
#pragma unroll
        for (int mf = 0; mf < MF; mf++) {
            if (at % PAIRS == 0) a[mf] = left_of(probs, mf, at / PAIRS);
            multiply_values(state, a[mf], b[at % (EARLY + 1)], mf, at % PAIRS);
        }
    }
}

// The same where infinities and NaN of keys are for the rows that see them alone: a product would hand them to every row. Rare, so
// that it uses memory of the thread and loops that are not unrolled, rather than registers that the rest needs. Finite values are
// multiplied with SHRINK where asked for.
DEVICE void add_values_nonfinite(const ForwardParams& p, State& state, const Probs& probs, const Row* rows, u32 v, u32 j0, bool shrinks) {
    Probs prob_at;
    float sum_at[MF * OF * 4];
    constexpr int HELD = sizeof(Probs) / (MF * 16);
#pragma unroll
    for (int i = 0; i < MF * HELD * 4; i++) prob_at[i / (HELD * 4)][i / 4 % HELD][i % 4] = probs[i / (HELD * 4)][i / 4 % HELD][i % 4];
#pragma unroll
    for (int i = 0; i < MF * OF * 4; i++) sum_at[i] = state.o[i / (OF * 4)][i / 4 % OF][i % 4];
    u32 lane = afresh(threadIdx.x % 32), g = lane / 4, t = lane % 4;
#pragma unroll 1
    for (u32 key = 0; key < BN; key++) {
        bool found = false;
        for (u32 c = lane; c < VLayout::ROW_CHUNKS; c += 32) {
            uint4 x = load16(v + VLayout::chunk(key, c));
            found |= not_finite(x.x) || not_finite(x.y) || not_finite(x.z) || not_finite(x.w);
        }
        if (!__any_sync(0xffffffffu, found)) continue;
#pragma unroll 1
        for (u32 n = 0; n < 2 * MF; n++) {
            u32 mf = n / 2, half = n % 2;
            float mine = prob_of(prob_at, mf, key / 8, half, key % 2);
            float prob = __shfl_sync(0xffffffffu, mine, 4 * g + key % 8 / 2);
            bool seen = sees(p, rows[mf * 16 + half * 8 + g], j0 + key);
#pragma unroll 1
            for (u32 m = 0; m < 2 * OF; m++) {
                u32 column = m / 2 * 8 + 2 * t + m % 2, byte = column * E;
                float x = element(load4(v + VLayout::chunk(key, byte / 16) + (byte % 16 & ~3u)), column % 2);
                if (seen && (isinf(x) || isnan(x))) sum_at[(mf * OF + m / 2) * 4 + 2 * half + m % 2] += prob * x;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < MF * OF * 4; i++) state.o[i / (OF * 4)][i / 4 % OF][i % 4] = sum_at[i];
    v += v_fragment();
#pragma unroll 1
    for (int n = 0; n < KEY_STEPS; n++) {
        Left a[MF];
#pragma unroll
        for (int mf = 0; mf < MF; mf++) a[mf] = left_of(prob_at, mf, n);
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) {
            Values b;
            load_values(b, v, n, pair);
            for (u32& x : b) x = SHRINKS && shrinks ? shrunk(finite(x)) : finite(x);
#pragma unroll
            for (int mf = 0; mf < MF; mf++) multiply_values(state, a[mf], b, mf, pair);
        }
    }
}

typedef float Scores[MF][SF][4];

// Fragments of q, where they stay in registers.
struct Kept {
#if QREG
    Left x[MF][STEPS];
#endif
    DEVICE void load(u32 q) {
#if QREG
#pragma unroll
        for (int step = 0; step < STEPS; step++)
#pragma unroll
            for (int mf = 0; mf < MF; mf++) matrices(x[mf][step].x, QLayout::pair(q, step) + mf * 16 * QLayout::PANEL);
#endif
    }
};

// Products of a warp's rows of q, which lie at `q` or are kept, with the keys of a tile at `k`.
DEVICE void multiply_keys(Scores& scores, const Kept& kept, u32 q, u32 k) {
#pragma unroll
    for (int mf = 0; mf < MF; mf++)
#pragma unroll
        for (int n = 0; n < SF; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) scores[mf][n][i] = 0.f;
    constexpr int KEYS = SF / 2, ALL = STEPS * KEYS;
    // Steps of q that are on their way while one of them is taken up.
    constexpr int WAITING = AHEAD / KEYS + 1;
    Left a[MF];
    u32 ahead[WAITING][MF][4], b[AHEAD + 1][4];
#pragma unroll
    for (int i = 0; i < ALL + AHEAD; i++) {
        // Fragments are asked for before those of earlier products are used.
        if (!QREG && i < ALL && i % KEYS == 0)
#pragma unroll
            for (int mf = 0; mf < MF; mf++)
                matrices(ahead[i / KEYS % WAITING][mf], QLayout::pair(q, i / KEYS) + mf * 16 * QLayout::PANEL);
        if (i < ALL) matrices(b[i % (AHEAD + 1)], KLayout::pair(k, i / KEYS) + i % KEYS * 16 * KLayout::PANEL);
        if (i < AHEAD) continue;
        const int at = i - AHEAD, step = at / KEYS, n = at % KEYS;
        const u32 (&x)[4] = b[at % (AHEAD + 1)];
#pragma unroll
        for (int mf = 0; mf < MF; mf++) {
            if (n == 0) {
#if QREG
                a[mf] = kept.x[mf][step];
#else
#pragma unroll
                for (int i = 0; i < 4; i++) a[mf].x[i] = ahead[step % WAITING][mf][i];
                a[mf].split();
#endif
            }
            a[mf].times(scores[mf][2 * n], x[0], x[1]);
            a[mf].times(scores[mf][2 * n + 1], x[2], x[3]);
        }
    }
}

// This lane's rows of fragments: of q from a warp's first row on, and of a tile of keys.
DEVICE u32 q_fragment(u32 warp_row) {
    u32 lane = threadIdx.x % 32;
    return QLayout::chunk(warp_row + (lane & 7) + (lane & 8), lane >> 4);
}

DEVICE u32 k_fragment() {
    u32 lane = threadIdx.x % 32;
    return KLayout::chunk((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
}

// Scores of a tile to probabilities, of which the sums are kept; values summed before are scaled where maxima grow.
template <bool MASKED>
DEVICE void to_probs(const ForwardParams& p, State& state, Scores& s, Probs& probs, const Row* rows, u32 j0) {
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
            for (int i = 0; i < 4; i++) probs[mf][n][i] = s[mf][n][i];
#else
#pragma unroll
            for (int half = 0; half < 2; half++)
                probs[mf][n / 2][n % 2 * 2 + half] = pack<DTYPE>(s[mf][n][2 * half], s[mf][n][2 * half + 1]);
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
DEVICE void write4(const ForwardParams& p, u64 row, u32 column, float4 x) {
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

// A score in units of log2.
DEVICE float to_log2(float score) {
    float core = fminf(fmaxf(score, -HUGE_BIAS), HUGE_BIAS);
    // Of infinities and NaN the rest is what they are.
    return core * LOG2E + (score - core) * HUGE_RATE;
}

DEVICE float logsumexp(float m, float l) {
    if (l == 0.f) return -INF;
    float magnitude = fabsf(m);
    if (magnitude <= HUGE_SCORE || magnitude == INF) return (m + log2f(l)) * LN2;
    // What to_log2 made m from, or a bias and a score: their sum was rounded.
    return copysignf(fminf(HUGE_BIAS + (magnitude - HUGE_SCORE) / HUGE_RATE, 3.40282346638528859812e+38f), m);
}

// What a row's values are multiplied with, and its logsumexp.
struct Ended {
    float factor, lse;
};

// Ends a row with a maximum, in units of log2, and a sum; its head's sink joins them.
DEVICE Ended finish(const ForwardParams& p, const WorkTile& work_tile, Place at, float m, float l) {
    float shift = 0.f, factor = 1.f, sink = -INF, own = -INF, most = m;
#if BIAS
    shift = alibi_shift(p, work_tile, at);
#endif
    if (p.sinks) {
        sink = ((const float*)p.sinks)[at.head];
        own = to_log2(sink - shift);
        most = fmaxf(m, own);
        if (most != -INF) {
            factor = exp2f(m - most);
            l = l * factor + exp2f(own - most);
        }
    }
    Ended ended = {l == 0.f ? 0.f : factor / l, logsumexp(most, l)};
    // A sink that is the greatest has digits that it would lose to the shift.
    if (shift != 0.f) ended.lse = p.sinks && own >= m ? (l == 0.f ? -INF : sink + log2f(l) * LN2) : ended.lse + shift;
    return ended;
}

DEVICE void write_lse(const ForwardParams& p, const WorkTile& work_tile, Place at, float lse) {
    if (!p.lse || work_tile.panel) return;
    u64 index = ((u64)work_tile.batch * p.heads + at.head) * p.q_len + work_tile.q_start + at.position;
    ((float*)p.lse)[index] = lse;
}

constexpr int SLOT = BM * (DV + 2);
constexpr int QUADS = DV / 4;

// Sums of a row over parts: maximum, sum of probabilities, four columns of values.
struct Sums {
    float m, l;
    float4 o;

    DEVICE bool finite() const { return fabsf(o.x) < INF && fabsf(o.y) < INF && fabsf(o.z) < INF && fabsf(o.w) < INF; }
};

// Four columns of a row of the result, from sums that are to be `grows` times as large.
DEVICE void write_sums(const ForwardParams& p, const WorkTile& work_tile, u32 row, u32 column, Sums sums, float grows) {
    Place at = place(p, work_tile.kv_head, work_tile.row + row);
    Ended ended = finish(p, work_tile, at, sums.m, sums.l);
    float factor = ended.factor;
    u32 to_column = work_tile.panel * DV + column;
    float4 o = sums.o;
    if (to_column < p.value_dim)
        write4(p, row_of(p.out, work_tile, at), to_column,
               make_float4(mean(o.x, factor, grows), mean(o.y, factor, grows), mean(o.z, factor, grows), mean(o.w, factor, grows)));
    if (column == 0) write_lse(p, work_tile, at, ended.lse);
}

// Leaves four columns of a row in a slot.
DEVICE void leave_sums(const ForwardParams& p, u32 slot, u32 row, u32 column, Sums sums) {
    float* part = (float*)p.partials + (u64)slot * SLOT;
    __stcg((float4*)(part + row * DV + column), sums.o);
    if (column == 0) {
        __stcg(part + BM * DV + row, sums.m);
        __stcg(part + BM * DV + BM + row, sums.l);
    }
}

// Whether the N threads of a barrier are the last to have left a part of a tile; they see all the others then.
template <int N>
DEVICE bool is_last(const ForwardParams& p, u32 counter, u32 splits, u32* flag, int barrier) {
    named_sync<N>(barrier);
    if (threadIdx.x % N == 0) {
        // What the others have written before the barrier is published with this.
        u32* at = (u32*)p.counters + counter;
        fence();
        bool last = atomicAdd(at, 1) + 1 == splits;
        fence();
        if (last) *at = 0;
        *flag = last;
    }
    named_sync<N>(barrier);
    return *flag;
}

// Some rows of a tile, and which of some warps this one is.
struct Share {
    u32 first, count, warp, warps;
};

// Adds up a row of `count` parts from slot `slot` on in the order of their keys, four columns a lane; values times `by`, a power of two.
template <int BATCH>
DEVICE Sums sum_parts(const ForwardParams& p, u32 slot, u32 count, u32 row, u32 quad, float by) {
    const float* parts = (const float*)p.partials + (u64)slot * SLOT;
    const float *values_at = parts + row * DV + quad * 4, *stats = parts + BM * DV + row;
    u32 lane = threadIdx.x % 32;
    Sums sums = {-INF, 0.f, {0.f, 0.f, 0.f, 0.f}};
#pragma unroll 1
    for (u32 n = 0; n < count; n += BATCH) {
        // All of a batch is asked for before any of it is used. A lane has the maximum and the sum of one part.
        u32 rest = count - n;
        float4 o[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            o[i] = make_float4(0.f, 0.f, 0.f, 0.f);
            if (i < rest && quad < QUADS) o[i] = __ldcg((const float4*)(values_at + (u64)(n + i) * SLOT));
        }
        bool exists = lane < BATCH && lane < rest;
        float m = exists ? __ldcg(stats + (u64)(n + lane) * SLOT) : -INF;
        float l = exists ? __ldcg(stats + (u64)(n + lane) * SLOT + BM) : 0.f;
        float most = m;
#pragma unroll
        for (int i = 16; i; i /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, i));
        most = fmaxf(most, sums.m);
        float shift = most == -INF ? 0.f : most, old = exp2_approx(sums.m - shift), prob = exp2_approx(m - shift);
        l *= prob;
#pragma unroll
        for (int i = 16; i; i /= 2) l += __shfl_xor_sync(0xffffffffu, l, i);
        sums.m = most;
        sums.l = fmaf(sums.l, old, l);
        sums.o.x *= old, sums.o.y *= old, sums.o.z *= old, sums.o.w *= old;
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            float of_part = __shfl_sync(0xffffffffu, prob * by, i);
            sums.o.x = fmaf(o[i].x, of_part, sums.o.x);
            sums.o.y = fmaf(o[i].y, of_part, sums.o.y);
            sums.o.z = fmaf(o[i].z, of_part, sums.o.z);
            sums.o.w = fmaf(o[i].w, of_part, sums.o.w);
        }
    }
    return sums;
}

// Adds up parts of rows of a work tile's tile: `count` from slot `slot` on, into slot `to`, or NONE for the output.
template <int BATCH>
DEVICE void add_parts(const ForwardParams& p, const WorkTile& work_tile, const Share& share, u32 slot, u32 count, u32 to) {
    constexpr u32 RUNS = (QUADS + 31) / 32;
    u32 lane = threadIdx.x % 32;
    for (u32 unit = share.warp; unit < share.count * RUNS; unit += share.warps) {
        u32 row = share.first + unit / RUNS, quad = unit % RUNS * 32 + lane;
        Sums sums = sum_parts<BATCH>(p, slot, count, row, quad, 1.f);
        float grows = 1.f;
        // Sums of groups may have overflowed as well: of the parts themselves.
        if (SHRINKS && to == NONE && __any_sync(0xffffffffu, quad < QUADS && !sums.finite())) {
            Sums smaller = sum_parts<1>(p, work_tile.first, work_tile.splits & ~GROUPED, row, quad, SHRINK);
            if (!sums.finite()) sums = smaller, grows = 1.f / SHRINK;
        }
        if (quad >= QUADS) continue;
        if (to == NONE) write_sums(p, work_tile, row, quad * 4, sums, grows);
        else leave_sums(p, to, row, quad * 4, sums);
    }
}

// What follows when N threads have left a part of a tile: those that come last add up all of them.
template <int N, int BATCH>
DEVICE void end_part(const ForwardParams& p, const WorkTile& work_tile, const Share& share, u32 team, u32 teams, u32* flag, int barrier) {
    u32 slot = work_tile.first, count = work_tile.splits & ~GROUPED;
    if (work_tile.splits & GROUPED) {
        u32 group = (work_tile.slot - slot) / GROUP, rest = count - group * GROUP, size = rest < GROUP ? rest : GROUP;
        if (!is_last<N>(p, (work_tile.counter + 1 + group) * teams + team, size, flag, barrier)) return;
        add_parts<BATCH < GROUP ? BATCH : GROUP>(p, work_tile, share, slot + group * GROUP, size, slot + count + group);
        slot += count;
        count = (count + GROUP - 1) / GROUP;
    }
    if (is_last<N>(p, work_tile.counter * teams + team, count, flag, barrier)) add_parts<BATCH>(p, work_tile, share, slot, count, NONE);
}

