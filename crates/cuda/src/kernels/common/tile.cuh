// The tile of a block of threads, from the constants that the host prints before this file:
//
//   DTYPE               element type of q, k, v and out
//   HEAD_DIM            head dimension, rounded up to a multiple of 32
//   VALUE_DIM           sm80: columns of v that a work tile computes (a panel), rounded up to a multiple of 32. sm90: the columns that one consumer
//                       computes, of which VALUE_CONSUMERS consumers together have the panel
//   WARPS_Q, WARPS_K    sm80: warps over the rows or over the keys of a tile, the other 1. sm90: 4 warps for each 64 rows, and VALUE_CONSUMERS
//   VALUE_CONSUMERS     consumers that share rows, of which each computes VALUE_DIM columns: 2 in prefill_wide.cu, else 1
//   MMA_M               fragments of 16 rows of a warp; sm90: 1
//   WARP_KEYS           keys of a tile that one warp multiplies at a time
//   STAGES              tiles of values, and of keys, in shared memory (sm90 may have one more of keys)
//   PAGED               true if keys lie in pages
//   VECTOR_ROWS         true if every row of every tensor starts on 16 bytes
//   SHARED_BYTES        shared memory of a block of threads
//   MASK_TILE_ROWS      query positions of a mask tile
//   MERGE_GROUP         splits of a tile that are merged first where they are many
//   Scoring             changes to scores before the softmax:
//     HAS_BIAS            softcap, ALiBi, a tree mask, a mask, or a scale that is not positive or exceeds 2^10
//     HAS_MASK            a materialised mask
//
// Only of sm80 (shared_memory.cuh has those that only sm90 gets):
//
//   BLOCKS_PER_SM       blocks of threads that a multiprocessor holds at a time
//   Q_IN_REGISTERS      true if fragments of q stay in registers
//   MAX_RECOMPUTED      work tiles that a block of threads can recompute

constexpr int ELEMENT_BYTES = DTYPE == F32 ? 4 : 2;
constexpr int WARPS = WARPS_Q * WARPS_K, THREADS = 32 * WARPS;
constexpr int WARP_ROWS = 16 * MMA_M, BLOCK_M = WARP_ROWS * WARPS_Q, BLOCK_N = WARP_KEYS * WARPS_K;
// The consumer of a thread that multiplies, among the consumers that share its rows. 0 where each has rows of its own.
DEVICE u32 value_consumer() { return VALUE_CONSUMERS > 1 && threadIdx.x < THREADS ? threadIdx.x / 128 : 0; }

// True if each warp copies and multiplies keys of its own.
constexpr bool WARPS_SPLIT_KEYS = WARPS_Q == 1;

// Accumulator fragments of a warp: of 8 keys of scores, and of 8 columns of the output.
constexpr int QK_MMA_N = WARP_KEYS / 8, PV_MMA_N = VALUE_DIM / 8;
