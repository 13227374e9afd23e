// Shared memory of a block of threads of the prefill kernels for compute capability 9.0: stages, barriers, and which warpgroup has which registers.
//
// A block has a producer warpgroup and consumer warpgroups. It computes a list of work tiles, or takes them from a queue. The producer copies
// through rings of stages: some of its warps copy descriptions of work tiles, tiles of keys and, by TMA, rows of q; others find which keys each row
// sees and copy tiles of values. Without TMA for q, each consumer copies its own rows. Consumers multiply: in prefill.cu and prefill_f32.cu each
// has rows of its own, in prefill_wide.cu consumers share rows.
//
// Constants in addition to tile.cuh's, where WARPS_Q is four for each consumer with rows of its own, and MMA_M is 1:
//
//   PING_PONG           true if consumers start their products in turn
//   Q_STAGES            work tiles whose rows of q are in shared memory: 2 if the next one's are copied early, else 1
//   EXTRA_K_STAGES      1 if there is room for a stage of keys more than of values, else 0
//   TMA                 true if keys and values are copied by TMA, else by the threads of the producer

constexpr int CONSUMER_WARPS = 4, CONSUMERS = WARPS / CONSUMER_WARPS, CONSUMER_ROWS = WARPGROUP_ROWS;
// Parts of q, of a warpgroup's rows each.
constexpr int Q_PARTS = BLOCK_M / CONSUMER_ROWS;
static_assert(MMA_M == 1 && WARPS_K == VALUE_CONSUMERS && CONSUMERS == Q_PARTS * VALUE_CONSUMERS && WARP_KEYS % 16 == 0 && !(TMA && DTYPE == F32));
// True if a consumer of prefill.cu computes q k^T of a tile and p v of the tile before at the same time. With NVRTC 12.0 to 12.8 it does not: they move
// registers between the two products, so ptxas serializes every wgmma (it warns of this as C7513 if asked by `-v`). Four consumers, and three consumers with more than
// 64 columns, lack the registers to hold the scores of one tile and the probabilities of another.
#if defined(__CUDACC_VER_MAJOR__) && __CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ < 9
constexpr bool OVERLAPS = false;
#else
constexpr bool OVERLAPS = CONSUMERS < 3 || (CONSUMERS == 3 && HEAD_DIM <= 64 && VALUE_DIM <= 64);
#endif
// Stages of keys that are used. Where products overlap, a step lets its keys go only after its probabilities, because a vote may want the scores
// again: one more stage gives their copies a step more of time.
constexpr int K_STAGES = OVERLAPS ? STAGES + EXTRA_K_STAGES : STAGES;
// Registers of a thread of the producer, and of a consumer, in multiples of 8. Their sum must not exceed the
// registers with which the block is launched, or setmaxnreg waits forever. A producer thread needs more
// registers to look up pages, to find tiles that a mask skips, to read the terms of a row's biases, and to
// split f32.
constexpr bool MANY_PRODUCER_REGISTERS = Scoring::HAS_MASK || (Scoring::HAS_BIAS && VALUE_DIM <= 128);
constexpr int LAUNCH_REGISTERS = 65536 / (THREADS + WARPGROUP_THREADS) / 8 * 8;
constexpr bool TMA_WITHOUT_BIAS = TMA && !Scoring::HAS_BIAS, FEW_PRODUCER_REGISTERS = TMA_WITHOUT_BIAS && !PAGED;
constexpr int PRODUCER_REGISTERS = DTYPE == F32                ? 104
                                   : CONSUMERS == 4            ? 32
                                   : CONSUMERS == 3            ? (TMA_WITHOUT_BIAS ? 32 : 56)
                                   : MANY_PRODUCER_REGISTERS   ? 56
                                   : FEW_PRODUCER_REGISTERS    ? 24
                                                               : 40;
constexpr int CONSUMER_REGISTERS = DTYPE == F32                ? (CONSUMERS == 1 ? 240 : 200)
                                   : CONSUMERS == 4            ? 112
                                   : CONSUMERS == 3            ? (TMA_WITHOUT_BIAS ? 160 : 152)
                                   : MANY_PRODUCER_REGISTERS   ? 224
                                   : FEW_PRODUCER_REGISTERS    ? 240
                                                               : 232;
static_assert(PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <= (CONSUMERS + 1) * LAUNCH_REGISTERS);

// The ring of work tiles: the one that is computed, and the next. Each of WORK_TILE_LOADERS threads copies 16 bytes.
constexpr int WORK_TILE_STAGES = 2, WORK_TILE_LOADERS = sizeof(WorkTile) / 16;

// Barriers in shared memory: a tile is there, and all that read it are done.
struct Barriers {
    u64 q_full[Q_STAGES][Q_PARTS], q_empty[Q_PARTS];
    u64 k_full[STAGES + EXTRA_K_STAGES], k_empty[STAGES + EXTRA_K_STAGES], v_full[STAGES], v_empty[STAGES];
    u64 work_tile_full[WORK_TILE_STAGES], work_tile_empty[WORK_TILE_STAGES], rows_full[WORK_TILE_STAGES];
};

// Shared memory of two consumers that share rows: the probabilities of a tile of 64 keys, and two values that each thread passes to the other consumer.
struct SharedRows {
    u8 probs[BLOCK_M * PANEL_ROW_BYTES];
    float exchange[CONSUMERS][WARPGROUP_THREADS][2];
};
static_assert(sizeof(SharedRows) % 1024 == 0);

struct OwnRows {};

// A stage of the ring of work tiles: a work tile, and which keys its rows see.
struct StagedTile {
    WorkTile work_tile;
    Row rows[BLOCK_M];
};
static_assert(sizeof(StagedTile) % 16 == 0);

struct PrefillMemory : Select<(VALUE_CONSUMERS > 1), SharedRows, OwnRows>::Type {
    u8 q[Q_STAGES][TERMS * QTile::BYTES];
    u8 k[STAGES + EXTRA_K_STAGES][TERMS * KTile::BYTES];
    u8 v[STAGES][TERMS * VTile::BYTES];
    StagedTile staged[WORK_TILE_STAGES];
    Barriers barriers;
    // A consumer's rows of a merge, and the number of consumers that share it: one thread of each consumer tells the others.
    u32 merge_messages[4];
    // The entry of the next work tile, for all threads that copy keys.
    u32 next_entry;
};
static_assert(sizeof(PrefillMemory) == SHARED_BYTES);

// Where a work tile's rows of q are, by its place in the ring of work tiles, and the parity of their barriers.
struct QStage {
    u32 stage, parity;

    DEVICE QStage(const RingStage<WORK_TILE_STAGES>& tile_at)
        : stage(Q_STAGES == 1 ? 0 : tile_at.stage()), parity(Q_STAGES == 1 ? tile_at.stage() : tile_at.parity()) {
        static_assert(WORK_TILE_STAGES == 2 && (Q_STAGES == 1 || Q_STAGES == WORK_TILE_STAGES));
    }
};

// Named barriers: a turn of each consumer, and the threads of each consumer.
constexpr int TURN_BARRIER = 1, CONSUMER_BARRIER = 4;
static_assert(!PING_PONG || TURN_BARRIER + CONSUMERS <= CONSUMER_BARRIER);

// The tiles of keys of a work tile that are computed: at least one, which may be hidden as a whole.
struct KeyBlocks {
    u32 first, end;

    DEVICE KeyBlocks(const ForwardParams& p, const WorkTile& work_tile) {
        end = end_block(work_tile);
        first = next_block(p, work_tile, work_tile.begin / BLOCK_N, end);
        if (first >= end) end = first + 1;
    }
};
