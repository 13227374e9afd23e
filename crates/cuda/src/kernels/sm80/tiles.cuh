// Layouts of tiles in shared memory, and the threads that copy them.

// Threads that copy a tile of keys or values together: eight warps over rows divide the two between them.
constexpr int LOADERS = WARPS_SPLIT_KEYS ? 32 : WARPS_Q == 8 ? 128 : THREADS;

// Keys of a tile that is copied.
constexpr int COPY_KEYS = WARP_KEYS;

// Copies of a thread in one piece of code, which computes their addresses at once: all of a tile.
constexpr int COPY_UNROLL = 64;

typedef SwizzledTile<HEAD_DIM, BLOCK_M, ELEMENT_BYTES> QTile;
typedef SwizzledTile<HEAD_DIM, WARP_KEYS, ELEMENT_BYTES> KTile;
typedef SwizzledTile<VALUE_DIM, WARP_KEYS, ELEMENT_BYTES> VTile;
