// Keys and query rows of a lane of the warps that have keys, 16 each.
//
// Rows of accumulators are keys, columns are query rows: register 4 j + 2 h + n of a lane is of key `key() + 8 h` and row
// `column() + 8 j + n`, of wgmma and mma.sync alike. Probabilities and gradients of scores, rounded and packed in pairs, are left operands of the
// products that make d_v and d_k.

constexpr int TILE_SCORES = BLOCK_M / 2, TILE_WORDS = BLOCK_M / 4;

struct KeyLane {
    u32 warp, lane;

    DEVICE KeyLane() : warp(uniform(threadIdx.x / 32)), lane(threadIdx.x % 32) {}

    // The lane's first key of the block, and its first column of a tile.
    DEVICE u32 key() const { return 16 * warp + lane / 4; }
    DEVICE u32 column() const { return 2 * (lane % 4); }
};
