// Tiles of a sequence's query rows, which keys a query position sees, and ALiBi's biases.
//
// Constants of all kernels of the backward pass, which the host prints: DTYPE; BLOCK_M, BLOCK_N and UNIT_BLOCKS (steps.cuh); UNIT_WARPS, the warps of a unit
// that have keys; COLUMN_WARPS (lanes.cuh); HAS_SOFTCAP, HAS_ALIBI
// and HAS_CHUNKS, without any of which scores stay products q . k until exp2, as in forward.

constexpr bool HAS_SCORE_MOD = HAS_SOFTCAP || HAS_ALIBI || HAS_CHUNKS;

// Tiles of a head's query rows.
DEVICE u32 tile_count(const BackwardSequence& s) { return (s.q_len + BLOCK_M - 1) / BLOCK_M; }

// The number of a head's tile among the tiles of all heads and sequences.
DEVICE u64 tile_index(const BackwardParams& p, const BackwardSequence& s, u32 head, u32 tile) {
    return (u64)s.tiles_before * p.q_heads + head * tile_count(s) + tile;
}

// Keys from `first` to `last`; none where `last < first`.
struct VisibleKeys {
    i32 first, last;

    DEVICE bool contains(i32 key) const { return key >= first && key <= last; }

    // The position from which ALiBi counts distances: the own one, or that of the nearest key that is seen. The distance between the two is common
    // to all keys of a row, and part of its logsumexp.
    DEVICE i32 nearest(i32 position) const { return last < first ? position : min(max(position, first), last); }
};

DEVICE VisibleKeys visible_keys(const BackwardParams& p, const BackwardSequence& s, i32 position) {
    VisibleKeys keys = {max(position - p.left, 0), min(position + p.right, (i32)s.kv_len - 1)};
    if (HAS_CHUNKS) {
        // Positions before key 0 are in no chunk that has keys.
        const i32 start = position - position % p.chunk;
        keys.first = max(keys.first, start), keys.last = position < 0 ? -1 : min(keys.last, start + p.chunk - 1);
    }
    return keys;
}

// The largest magnitude of an ALiBi slope, 2^86, as the host has it.
constexpr float MAX_ALIBI_SLOPE = 77371252455336267181195264.f;

// The slope of a head of a sequence; NaN where its biases would overflow.
DEVICE float alibi_slope(const BackwardParams& p, u32 sequence, u32 head) {
    const float slope = ((const float*)p.alibi_slopes)[(u64)sequence * p.alibi_stride + head];
    return fabsf(slope) <= MAX_ALIBI_SLOPE ? slope : NAN;
}

// The distance of a key from where a position counts distances from.
DEVICE float alibi_distance(const BackwardParams& p, const BackwardSequence& s, i32 position, i32 key) {
    return fabsf((float)(key - visible_keys(p, s, position).nearest(position)));
}
