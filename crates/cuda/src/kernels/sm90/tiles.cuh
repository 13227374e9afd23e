// Layouts of tiles in shared memory: panels of 64 columns, the last filled with zeros.

// Terms of an element: f32 is multiplied as the sum of three bf16, and has a tile of each.
constexpr int TERMS = DTYPE == F32 ? 3 : 1;
constexpr Dtype TERM_DTYPE = DTYPE == F32 ? BF16 : DTYPE;

// Pairs of terms that are multiplied, the smallest products first: of f32 six of nine.
constexpr int TERM_PRODUCTS = DTYPE == F32 ? 6 : 1;

DEVICE constexpr int left_term(int product) { return TERMS == 1 || product > 3 ? 0 : product == 3 ? 1 : 2 - product; }

DEVICE constexpr int right_term(int product) { return TERMS == 1 || product == 3 || product == 5 ? 0 : product == 4 ? 1 : product; }

DEVICE constexpr int padded_columns(int columns) { return (columns + PANEL_COLUMNS - 1) / PANEL_COLUMNS * PANEL_COLUMNS; }

typedef SwizzledTile<padded_columns(HEAD_DIM), BLOCK_M, 2> QTile;
typedef SwizzledTile<padded_columns(HEAD_DIM), BLOCK_N, 2> KTile;
typedef SwizzledTile<padded_columns(VALUE_CONSUMERS * VALUE_DIM), BLOCK_N, 2> VTile;

// Threads that copy a tile of keys together, and as many of values: one warp by TMA, else half of the copying warpgroup.
constexpr int LOADERS = TMA ? 32 : WARPGROUP_THREADS / 2;

// Keys of a tile that is copied.
constexpr int COPY_KEYS = BLOCK_N;

// Copies of a thread in one piece of code, which computes their addresses at once: all take more registers than the copying warpgroup has.
constexpr int COPY_UNROLL = 4;
