// The pre-pass over a materialised mask: a `MaskTile` for each plane, MASK_TILE_ROWS query positions and block of keys, one byte each.
// MaskTileParams has the bytes between sequences, heads and query positions.

extern "C" __global__ void __launch_bounds__(128) mask_tiles(const __grid_constant__ MaskTileParams p) {
    u32 block = blockIdx.x, tile = blockIdx.y, plane = blockIdx.z;
    u64 base = p.mask + (u64)(i64)(plane / p.heads) * p.sequence + (u64)(i64)(plane % p.heads) * p.head;
    u32 rows = p.rows - tile * MASK_TILE_ROWS < MASK_TILE_ROWS ? p.rows - tile * MASK_TILE_ROWS : MASK_TILE_ROWS;
    u32 keys = p.keys - block * p.block < p.block ? p.keys - block * p.block : p.block;
    bool open = false, hidden = false, biased = false;
    for (u32 n = threadIdx.x; n < rows * keys; n += 128) {
        u64 row = base + (u64)(tile * MASK_TILE_ROWS + n / keys) * p.row, at = (u64)(block * p.block + n % keys) * p.step;
        float bias = mask_value(p.kind, row, at);
        bool is_open = bias == 0.f, is_hidden = bias == -INF;
        open |= is_open, hidden |= is_hidden, biased |= !is_open && !is_hidden;
    }
    bool any_open = __syncthreads_or(open), any_hidden = __syncthreads_or(hidden), any_biased = __syncthreads_or(biased);
    if (threadIdx.x == 0) {
        u8 mask_tile = any_biased || (any_open && any_hidden) ? PARTIAL : any_open ? FULL : SKIP;
        ((u8*)p.mask_tiles)[((u64)plane * p.q_tiles + tile) * p.k_blocks + block] = mask_tile;
    }
}
