// The backward pass of attention by mma.sync: d_q, d_k and d_v in five products, with the same bits in every run.
//
// A block of threads has BLOCK_N keys of a key/value head and goes through the tiles of query rows that see them. Each warp has 16 keys, or each two
// warps where rows are long (lanes.cuh). d_k and d_v stay in registers. Each tile of d_q is added to sums in memory, in turn: steps.cuh has the
// order. A step computes
//
//   S = K Q^T,  P = exp(scale S - lse)
//   dP = V dO^T,  dV += P dO
//   dS = P (dP - delta)             to registers, and to shared memory for d_q
//   dK += dS Q
//   dQ = dS^T K                     while the next tile is copied
//
// Constants in addition: HEAD_DIM and VALUE_DIM, head dimensions rounded up to multiples of 32.

constexpr int WARPS = KEY_WARPS * COLUMN_WARPS, THREADS = 32 * WARPS;
// Columns of d_k and d_v of a warp.
constexpr int K_COLUMNS = HEAD_DIM / COLUMN_WARPS, V_COLUMNS = VALUE_DIM / COLUMN_WARPS;
static_assert(UNIT_WARPS == WARPS);

typedef SwizzledTile<HEAD_DIM, BLOCK_N, 2> KTile;
typedef SwizzledTile<VALUE_DIM, BLOCK_N, 2> VTile;
typedef SwizzledTile<HEAD_DIM, BLOCK_M, 2> QTile;
typedef SwizzledTile<VALUE_DIM, BLOCK_M, 2> DOutTile;
// Gradients of scores, and probabilities where two warps have the same keys: a row for each key.
typedef SwizzledTile<BLOCK_M, BLOCK_N, 2> DScoreTile;
constexpr int STAGED_TILES = COLUMN_WARPS;

struct BackwardMemory {
    u8 k[KTile::BYTES], v[VTile::BYTES], q[QTile::BYTES], d_out[DOutTile::BYTES], staged[STAGED_TILES][DScoreTile::BYTES];
    // `-lse` in units of log2, and delta, of each row.
    float rows[2][BLOCK_M];
};
static_assert(sizeof(BackwardMemory) == SHARED_BYTES);

// ---- copies

// Copies rows of a head; rows from `present` on and columns behind the last are 0.
template <typename Tile, int ROWS>
DEVICE void copy_rows(u32 to, const Tensor& tensor, u32 batch, u32 head, u32 row, u32 present, u32 columns) {
    const u8* from = (const u8*)(tensor.at + (u64)(batch * tensor.batch + head * tensor.head + row * tensor.row));
    for (u32 n = threadIdx.x; n < ROWS * Tile::ROW_CHUNKS; n += THREADS) {
        const u32 i = n / Tile::ROW_CHUNKS, c = n % Tile::ROW_CHUNKS;
        const bool exists = i < present && 8 * c < columns;
        cp_async16(to + Tile::chunk(i, c), exists ? from + i * tensor.row + 16 * c : from, exists ? 16 : 0);
    }
}

// Rows of a tile that a sequence has.
DEVICE u32 rows_from(u32 first, u32 length) { return length > first ? length - first : 0; }

DEVICE void copy_keys(const Sm80BackwardParams& p, const Work& work, BackwardMemory& memory) {
    const BackwardSequence& s = work.sequence;
    const u32 first = work.first_key(0), present = rows_from(first, s.kv_len), head = work.unit.kv_head;
    if (!present) return;
    copy_rows<KTile, BLOCK_N>(shared_address(memory.k), p.k, s.batch, head, s.kv_start + first, present, p.backward.head_dim);
    copy_rows<VTile, BLOCK_N>(shared_address(memory.v), p.v, s.batch, head, s.kv_start + first, present, p.value_dim);
}

DEVICE void copy_step(const Sm80BackwardParams& params, const Work& work, BackwardMemory& memory, const Step& at) {
    const BackwardParams& p = params.backward;
    const BackwardSequence& s = work.sequence;
    const u32 first = at.tile * BLOCK_M, present = rows_from(first, s.q_len), head = at.query_head(p, work);
    copy_rows<QTile, BLOCK_M>(shared_address(memory.q), params.q, s.batch, head, s.q_start + first, present, p.head_dim);
    copy_rows<DOutTile, BLOCK_M>(shared_address(memory.d_out), params.d_out, s.batch, head, s.q_start + first, present, params.value_dim);
    constexpr u32 CHUNKS = BLOCK_M / 4;
    if (threadIdx.x < 2 * CHUNKS) {
        const u32 which = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
        const u64 list = which ? p.delta : p.neg_lse;
        cp_async16(shared_address(memory.rows[which]) + 16 * chunk, (const float*)list + at.index(p, work) * BLOCK_M + 4 * chunk, 16);
    }
    cp_async_commit();
}

// ---- products

// This lane's row of a fragment: of a left operand whose rows are rows of the tile, of a right operand whose columns are, and of operands whose
// rows or columns are the tile's columns, which are loaded transposed.
template <typename Tile>
DEVICE u32 left_rows(u32 tile, u32 first_row) { return tile + Tile::chunk(first_row + threadIdx.x % 16, threadIdx.x % 32 / 16); }
template <typename Tile>
DEVICE u32 right_rows(u32 tile) { return tile + Tile::chunk(threadIdx.x % 8 + threadIdx.x % 32 / 16 * 8, threadIdx.x / 8 % 2); }
template <typename Tile>
DEVICE u32 left_columns(u32 tile) { return right_rows<Tile>(tile); }
template <typename Tile>
DEVICE u32 right_columns(u32 tile) { return left_rows<Tile>(tile, 0); }

// Adds two products of 16 columns, whose accumulators are at c[0] and c[4].
DEVICE void add_products(float* c, const u32 (&a)[4], const u32 (&b)[4]) {
    mma_m16n8k16<DTYPE>(*(float(*)[4])c, a, b[0], b[1]);
    mma_m16n8k16<DTYPE>(*(float(*)[4])(c + 4), a, b[2], b[3]);
}

// c = a b^T of this warp's 16 keys and its rows of a tile.
template <typename A, typename B>
DEVICE void row_products(float (&c)[TILE_SCORES], u32 a, u32 b) {
#pragma unroll
    for (int i = 0; i < TILE_SCORES; i++) c[i] = 0;
#pragma unroll
    for (int step = 0; step < A::COLUMNS / 16; step++) {
        u32 x[4], y[4];
        ldmatrix_x4(x, A::pair(a, step));
#pragma unroll
        for (int n = 0; n < WARP_M / 16; n++) {
            ldmatrix_x4(y, B::pair(b, step) + n * 16 * B::PANEL);
            add_products(c + 8 * n, x, y);
        }
    }
}

// c += a b over the query rows of a tile, for columns of b from 16 `first` on. The left operand is in registers, or its rows are at `staged`.
template <typename B, int COLUMNS>
DEVICE void add_gradient(float (&c)[COLUMNS / 2], const u32 (&a)[TILE_WORDS], u32 staged, u32 b, u32 first) {
#pragma unroll
    for (int i = 0; i < BLOCK_M / 16; i++) {
        u32 x[4];
        if constexpr (COLUMN_WARPS > 1) ldmatrix_x4(x, DScoreTile::pair(staged, i));
        else x[0] = a[4 * i], x[1] = a[4 * i + 1], x[2] = a[4 * i + 2], x[3] = a[4 * i + 3];
#pragma unroll
        for (int n = 0; n < COLUMNS / 16; n++) {
            u32 y[4];
            ldmatrix_x4_trans(y, B::pair(b, first + n) + i * 16 * B::PANEL);
            add_products(c + 8 * n, x, y);
        }
    }
}

// ---- d_q

// Warps over the rows and over the columns of a tile of d_q, and the columns of one.
constexpr int D_Q_ROW_WARPS = BLOCK_M / 16, D_Q_COLUMN_WARPS = WARPS / D_Q_ROW_WARPS, D_Q_COLUMNS = HEAD_DIM / D_Q_COLUMN_WARPS;
static_assert(D_Q_ROW_WARPS * D_Q_COLUMN_WARPS == WARPS && D_Q_COLUMNS % 16 == 0);

struct DQLane {
    u32 row_warp, column_warp, lane;

    DEVICE DQLane() : row_warp(threadIdx.x / 32 % D_Q_ROW_WARPS), column_warp(threadIdx.x / 32 / D_Q_ROW_WARPS), lane(threadIdx.x % 32) {}

    DEVICE u32 row() const { return 16 * row_warp + lane / 4; }
    DEVICE u32 column() const { return column_warp * D_Q_COLUMNS + 2 * (lane % 4); }
};

DEVICE void d_q_product(float (&d_q)[D_Q_COLUMNS / 2], const BackwardMemory& memory, const DQLane& at) {
    const u32 d_scores = DScoreTile::pair(left_columns<DScoreTile>(shared_address(memory.staged[0])), at.row_warp);
    const u32 keys = right_columns<KTile>(shared_address(memory.k)), first = at.column_warp * (D_Q_COLUMNS / 16);
#pragma unroll
    for (int i = 0; i < D_Q_COLUMNS / 2; i++) d_q[i] = 0;
#pragma unroll
    for (int step = 0; step < BLOCK_N / 16; step++) {
        u32 x[4], y[4];
        ldmatrix_x4_trans(x, d_scores + step * 16 * DScoreTile::PANEL);
#pragma unroll
        for (int n = 0; n < D_Q_COLUMNS / 16; n++) {
            ldmatrix_x4_trans(y, KTile::pair(keys, first + n) + step * 16 * KTile::PANEL);
            add_products(d_q + 8 * n, x, y);
        }
    }
}

// Scales and writes a tile.
DEVICE void store_d_q(const BackwardParams& p, const Work& work, const Step& step, const float (&d_q)[D_Q_COLUMNS / 2], const DQLane& at) {
    const BackwardSequence& s = work.sequence;
    const u32 row = step.tile * BLOCK_M + at.row();
    u8* to = (u8*)p.d_q.at + (i64)(s.batch * p.d_q.batch + step.query_head(p, work) * p.d_q.head + (s.q_start + row) * p.d_q.row);
#pragma unroll
    for (int j = 0; j < D_Q_COLUMNS / 8; j++) {
        const u32 column = at.column() + 8 * j;
        if (column >= p.head_dim) continue;
        for (int h = 0; h < 2; h++)
            if (row + 8 * h < s.q_len)
                *(u32*)(to + 8 * h * p.d_q.row + 2 * column) = pack<DTYPE>(d_q[4 * j + 2 * h] * p.scale, d_q[4 * j + 2 * h + 1] * p.scale);
    }
}

// Adds a tile to the sums of the units before, when it is this unit's turn. The first unit stores, so that nothing has to be cleared; the last writes
// d_q.
DEVICE void add_tile(const BackwardParams& p, const Work& work, const Step& step, float (&d_q)[D_Q_COLUMNS / 2], const DQLane& at) {
    const Turn turn(p, work, step);
    if (turn.place > 0 || !turn.is_last()) {
        const u64 tile = step.index(p, work);
        u32* turns = (u32*)p.turns + tile;
        float4* sums = (float4*)p.d_q_sums + tile * (BLOCK_M * HEAD_DIM / 4) + threadIdx.x;
        if (turn.place > 0) {
            if (threadIdx.x == 0) wait_turn(turns, turn.place);
            __syncthreads();
#pragma unroll
            for (int j = 0; j < D_Q_COLUMNS / 8; j++) {
                const float4 sum = __ldcg(sums + j * THREADS);
                d_q[4 * j] += sum.x, d_q[4 * j + 1] += sum.y, d_q[4 * j + 2] += sum.z, d_q[4 * j + 3] += sum.w;
            }
        }
        if (!turn.is_last()) {
#pragma unroll
            for (int j = 0; j < D_Q_COLUMNS / 8; j++)
                __stcg(sums + j * THREADS, make_float4(d_q[4 * j], d_q[4 * j + 1], d_q[4 * j + 2], d_q[4 * j + 3]));
            __syncthreads();
            if (threadIdx.x == 0) store_release(turns, turn.place + 1);
        }
    }
    if (turn.is_last()) store_d_q(p, work, step, d_q, at);
}

// ---- keys

// Stores this warp's columns of a gradient, times `factor`.
template <int COLUMNS>
DEVICE void store_gradient(const float (&c)[COLUMNS / 2], const Tensor& tensor, const Work& work, u32 columns, float factor, const KeyLane& at) {
    const BackwardSequence& s = work.sequence;
    const u32 key = work.first_key(0) + at.key();
    u8* to = (u8*)tensor.at + (i64)(s.batch * tensor.batch + work.unit.kv_head * tensor.head + (s.kv_start + key) * tensor.row);
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j++) {
        const u32 column = at.column_warp() * COLUMNS + 8 * j + 2 * (at.lane % 4);
        if (column >= columns) continue;
        for (int h = 0; h < 2; h++)
            if (key + 8 * h < s.kv_rows)
                *(u32*)(to + 8 * h * tensor.row + 2 * column) = pack<DTYPE>(c[4 * j + 2 * h] * factor, c[4 * j + 2 * h + 1] * factor);
    }
}

struct KeyWarps {
    const Sm80BackwardParams& params;
    const BackwardParams& p;
    const Work& work;
    BackwardMemory& memory;
    const KeyLane at;
    float d_k[K_COLUMNS / 2], d_v[V_COLUMNS / 2];

    DEVICE KeyWarps(const Sm80BackwardParams& params, const Work& work, BackwardMemory& memory)
        : params(params), p(params.backward), work(work), memory(memory) {
#pragma unroll
        for (int i = 0; i < K_COLUMNS / 2; i++) d_k[i] = 0;
#pragma unroll
        for (int i = 0; i < V_COLUMNS / 2; i++) d_v[i] = 0;
    }

    DEVICE u32 terms(int which) const { return shared_address(memory.rows[which]) + 4 * at.column(); }

    // Stores probabilities or gradients of scores, a row for each key.
    DEVICE void stage(u8* tile, const u32 (&words)[TILE_WORDS]) const {
        const u32 to = shared_address(tile) + 4 * (at.lane % 4), first = at.column_warp() * (WARP_M / 8);
#pragma unroll
        for (int j = 0; j < WARP_M / 8; j++)
            for (int h = 0; h < 2; h++) st_shared4(to + DScoreTile::chunk(at.key() + 8 * h, first + j), words[2 * j + h]);
    }

    // Adds to this warp's columns of d_v or d_k the product with d_out or q.
    template <typename B, int COLUMNS>
    DEVICE void add_rows(float (&c)[COLUMNS / 2], const u32 (&words)[TILE_WORDS], const u8* staged, u32 b) const {
        const u32 rows = left_rows<DScoreTile>(shared_address(staged), at.key() - at.lane / 4);
        add_gradient<B, COLUMNS>(c, words, rows, right_columns<B>(b), at.column_warp() * (COLUMNS / 16));
    }

    // The products of a step for this warp's keys. Afterwards all warps have read the tile, and stored their gradients of scores.
    DEVICE void multiply(const Step& step, DistanceSum& distances) {
        const u32 first_key = work.first_key(0), own_row = at.key() - at.lane / 4, queries = at.column_warp() * WARP_M;
        const u32 q = shared_address(memory.q), d_out = shared_address(memory.d_out);
        float s[TILE_SCORES];
        u32 probs[TILE_WORDS], d_scores[TILE_WORDS];
        row_products<KTile, QTile>(s, left_rows<KTile>(shared_address(memory.k), own_row), right_rows<QTile>(q) + queries * QTile::PANEL);
        score_probabilities(probs, s, d_scores, p, work, step, first_key, at, terms(0));
        row_products<VTile, DOutTile>(s, left_rows<VTile>(shared_address(memory.v), own_row),
                                      right_rows<DOutTile>(d_out) + queries * DOutTile::PANEL);
        u8* const staged_probs = memory.staged[STAGED_TILES - 1];
        if (COLUMN_WARPS > 1) stage(staged_probs, probs);
        else add_rows<DOutTile, V_COLUMNS>(d_v, probs, staged_probs, d_out);
        score_gradients(d_scores, probs, s, terms(1),
                        [&](float d_bias, int j, int h, int n) { distances.add(d_bias, p, work, step, first_key, at, j, h, n); });
        stage(memory.staged[0], d_scores);
        if (COLUMN_WARPS > 1) {
            __syncthreads();
            add_rows<DOutTile, V_COLUMNS>(d_v, probs, staged_probs, d_out);
        }
        add_rows<QTile, K_COLUMNS>(d_k, d_scores, memory.staged[0], q);
        __syncthreads();
    }

    DEVICE void compute() {
        const DQLane d_q_lane;
        DistanceSum distances;
        Step step(work);
        copy_keys(params, work, memory);
        copy_step(params, work, memory, step);
#pragma unroll 1
        for (u32 n = 0; n < work.steps; n++) {
            cp_async_wait_all();
            __syncthreads();
            multiply(step, distances);
            if (HAS_ALIBI && step.tile == work.unit.first_tile) distances.store(p, step.head, at.warp);
            Step next = step;
            next.advance(p, work);
            if (n + 1 < work.steps) copy_step(params, work, memory, next);
            float d_q[D_Q_COLUMNS / 2];
            d_q_product(d_q, memory, d_q_lane);
            add_tile(p, work, step, d_q, d_q_lane);
            step = next;
        }
    }

    DEVICE void store() const {
        store_gradient<K_COLUMNS>(d_k, params.d_k, work, p.head_dim, p.scale, at);
        store_gradient<V_COLUMNS>(d_v, params.d_v, work, params.value_dim, 1 / PROB_SCALE, at);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward(const __grid_constant__ Sm80BackwardParams params) {
    extern __shared__ __align__(1024) u8 bytes[];
    BackwardMemory& memory = *(BackwardMemory*)bytes;
    const Work work(params.backward);
    KeyWarps keys(params, work, memory);
    if (work.steps) keys.compute();
    keys.store();
}
