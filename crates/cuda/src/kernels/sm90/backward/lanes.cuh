// Keys and query rows of a lane of the warpgroups that have keys.

// Registers of a lane's row 8 h of a tile of 64 keys, and column 8 j + n: [4 j + 2 h + n].
constexpr int TILE_SCORES = BLOCK_M / 2, TILE_WORDS = BLOCK_M / 4;

// Where keys and columns of a lane are.
struct KeyLane {
    u32 group, warp, lane;

    DEVICE KeyLane() : group(uniform(threadIdx.x / WARPGROUP_THREADS)), warp(uniform(threadIdx.x / 32 % 4)), lane(threadIdx.x % 32) {}

    // The lane's first key of the block, and its first column of a tile.
    DEVICE u32 key() const { return group * 64 + 16 * warp + lane / 4; }
    DEVICE u32 column() const { return 2 * (lane % 4); }
};
