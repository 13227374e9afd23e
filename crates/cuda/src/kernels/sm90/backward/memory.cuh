// The shared memory of a block of backward.cu, and its barriers.
//
// A cluster of two blocks has CLUSTER_N keys of one key/value head, each block BLOCK_N of them. Steps go through tiles of BLOCK_M query rows,
// which both blocks have. COLUMNS, head dimensions rounded up to panels, are 64 or 128.

constexpr int CLUSTER_N = 2 * BLOCK_N, PANELS = COLUMNS / PANEL_COLUMNS;
// A tile of d_q has as many elements, whatever its columns: two halves of 64 x 64.
constexpr int TILE_ELEMENTS = 8192;
static_assert(BLOCK_N == 128 && BLOCK_M * COLUMNS == TILE_ELEMENTS && UNIT_BLOCKS == CLUSTER);
constexpr int KV_BYTES = BLOCK_N * COLUMNS * 2, Q_BYTES = BLOCK_M * COLUMNS * 2, D_SCORE_BYTES = BLOCK_N * BLOCK_M * 2;
constexpr int HALF_BYTES = TILE_ELEMENTS * 4 / 2, STAGES = 2;
static_assert(HALF_BYTES == 16384);

// Warpgroups: two have 64 keys each, one computes d_q, one copies.
constexpr int KEY_GROUPS = 2, D_Q_GROUP = 2, COPY_GROUP = 3, THREADS = 4 * WARPGROUP_THREADS;
constexpr int KEY_REGISTERS = 208, D_Q_REGISTERS = 64, COPY_REGISTERS = 32;
static_assert(KEY_GROUPS * KEY_REGISTERS + D_Q_REGISTERS + COPY_REGISTERS <= 512);

struct BackwardMemory {
    u8 k[KV_BYTES], v[KV_BYTES], peer_k[KV_BYTES];
    u8 q[STAGES][Q_BYTES], d_out[STAGES][Q_BYTES];
    // Gradients of scores of a tile whose d_q this block computes, [keys][queries]: of this block's keys, and of its peer's.
    u8 d_scores[2][D_SCORE_BYTES];
    // Gradients of scores for the peer.
    u8 to_peer[D_SCORE_BYTES];
    // A half of a tile of d_q: 16 bytes of each thread, then 16 further bytes of each.
    u8 d_q[HALF_BYTES];
    // `-lse` in units of log2, and delta, of each row.
    float rows[STAGES][2][BLOCK_M];
    u64 kv_full;
    // Gradients of scores are there; they are read, here and by the peer, which has this block's other half.
    u64 d_scores_full, d_scores_empty, peer_empty;
    // A half of d_q is there, its place is free, and the sum of the other units is in its place.
    u64 d_q_full, d_q_empty, d_q_sum;
    u64 q_full[STAGES], d_out_full[STAGES], q_empty[STAGES], d_out_empty[STAGES];
};
static_assert(sizeof(BackwardMemory) == SHARED_BYTES);

DEVICE void init_barriers(BackwardMemory& memory) {
    auto init = [](u64& barrier, u32 arrivals) { mbarrier_init(shared_address(&barrier), arrivals); };
    init(memory.kv_full, 1);          // TMA, announced by one thread
    init(memory.d_scores_full, 9);    // each warp with keys, and the bytes of the peer, announced by one thread
    init(memory.d_scores_empty, 4);   // each warp of the d_q group
    init(memory.peer_empty, 4);       // each warp of the peer's
    init(memory.d_q_full, 4);         // each warp of the d_q group
    init(memory.d_q_empty, 1);        // the reducer
    init(memory.d_q_sum, 1);          // a copy, announced by the reducer
    for (int n = 0; n < STAGES; n++) {
        init(memory.q_full[n], 1), init(memory.d_out_full[n], 1);      // TMA, announced by one thread
        init(memory.q_empty[n], 16), init(memory.d_out_empty[n], 16);  // each warp with keys, of both blocks
    }
    mbarrier_publish();
}

// An address in descriptors of products: without the block's number in the cluster, which its high bits have.
DEVICE u32 operand_address(u32 at) { return at & 0x3ffff; }
