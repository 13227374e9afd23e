// Which tiles of keys are computed, and which of them need their mask.

// The rows of the table of mask tiles, which the pre-pass `mask_tiles` has written, that a work tile's rows lie in.
struct MaskTiles {
    const u8* table;
    u64 plane_bytes;
    u32 first_q, q_tiles, planes, blocks;
    bool mask_every_tile, varies_by_key;

    DEVICE MaskTiles(const ForwardParams& p, const WorkTile& work_tile) {
        u32 count = tile_row_count(p, work_tile, 0, BLOCK_M);
        u32 first_position = quotient(work_tile.row, p.gqa_group), last_position = quotient(work_tile.row + count - 1, p.gqa_group);
        bool by_head = p.mask.head != 0, by_row = p.mask.row != 0;
        plane_bytes = (u64)p.mask_q_tiles * p.mask_k_blocks;
        first_q = by_row ? first_position / MASK_TILE_ROWS : 0;
        q_tiles = by_row ? last_position / MASK_TILE_ROWS - first_q + 1 : 1;
        planes = by_head ? p.gqa_group.value : 1;
        blocks = p.mask_k_blocks;
        mask_every_tile = p.mask_every_tile;
        varies_by_key = p.mask_step != 0;
        u32 plane = (p.mask.batch ? work_tile.sequence : 0) * (by_head ? p.q_heads : 1) + (by_head ? work_tile.kv_head * p.gqa_group.value : 0);
        table = (const u8*)p.mask_tiles + plane * plane_bytes;
    }

    // SKIP where no row sees a key of the block, FULL where every row sees all of them and nothing is added.
    DEVICE u32 at(u32 block) const {
        if (mask_every_tile) return PARTIAL;
        // A mask that is the same for all keys has one block.
        if (!varies_by_key) block = 0;
        bool any_seen = false, any_masked = false;
        for (u32 n = threadIdx.x % 32; n < q_tiles * planes; n += 32) {
            u8 tile = table[(n / q_tiles) * plane_bytes + (u64)(first_q + n % q_tiles) * blocks + block];
            any_seen |= tile != SKIP;
            any_masked |= tile != FULL;
        }
        if (!__any_sync(ALL_LANES, any_seen)) return SKIP;
        return __any_sync(ALL_LANES, any_masked) ? PARTIAL : FULL;
    }
};

// The first tile of keys from `block` on of which some row sees a key, at most `end`.
DEVICE u32 next_block(const ForwardParams& p, const WorkTile& work_tile, u32 block, u32 end) {
    if constexpr (Scoring::HAS_MASK) {
        MaskTiles mask_tiles(p, work_tile);
        while (block < end && mask_tiles.at(block) == SKIP) block++;
    }
    return block;
}

// Returns true if a tile needs masking: some row does not see some of its keys, or the mask adds to a score.
// A work tile without keys still computes one key block, past its end, which is masked as a whole.
DEVICE bool is_masked(const ForwardParams& p, const WorkTile& work_tile, u32 block) {
    u32 begin = block * BLOCK_N;
    if (begin >= work_tile.end) return true;
    bool masked = p.mask_every_tile || begin < work_tile.full_begin || begin + BLOCK_N > work_tile.full_end;
    if constexpr (Scoring::HAS_MASK) masked |= MaskTiles(p, work_tile).at(block) != FULL;
    return masked;
}
