// Keys and query rows of a lane of the warps that have keys, 16 each. Where COLUMN_WARPS is 2, two warps have the same keys: each computes scores of
// half of a tile's query rows, and half of the columns of d_k and d_v.
//
// Rows of accumulators are keys, columns are query rows: register 4 j + 2 h + n of a lane is of key `key() + 8 h` and row
// `column() + 8 j + n`, of wgmma and mma.sync alike. Probabilities and gradients of scores, rounded and packed in pairs, are left operands of the
// products that make d_v and d_k.

constexpr int KEY_WARPS = BLOCK_N / 16;
// Query rows of a warp's scores.
constexpr int WARP_M = BLOCK_M / COLUMN_WARPS;
constexpr int TILE_SCORES = WARP_M / 2, TILE_WORDS = WARP_M / 4;

struct KeyLane {
    u32 warp, lane;

    DEVICE KeyLane() : warp(uniform(threadIdx.x / 32)), lane(threadIdx.x % 32) {}

    // The warp's number among the warps that have its keys.
    DEVICE u32 column_warp() const { return COLUMN_WARPS == 1 ? 0 : warp / KEY_WARPS; }
    // The lane's first key of the block, and its first column of a tile.
    DEVICE u32 key() const { return (COLUMN_WARPS == 1 ? warp : warp % KEY_WARPS) * 16 + lane / 4; }
    DEVICE u32 column() const { return column_warp() * WARP_M + 2 * (lane % 4); }
};
