// Mask tiles of a materialised mask: one byte for each plane, MASK_TILE_ROWS query rows and block of keys. MaskTileParams has the bytes
// between planes of a sequence, of a head, and between query rows.
//
//   0  no position sees a key of the block
//   2  every position sees all of them, and nothing is added to their scores
//   1  otherwise

extern "C" __global__ void __launch_bounds__(128) mask_tiles(const __grid_constant__ MaskTileParams p) {
    u32 block = blockIdx.x, tile = blockIdx.y, plane = blockIdx.z;
    u64 base = p.mask + (u64)(i64)(plane / p.heads) * p.sequence + (u64)(i64)(plane % p.heads) * p.head;
    u32 rows = p.rows - tile * MASK_TILE_ROWS < MASK_TILE_ROWS ? p.rows - tile * MASK_TILE_ROWS : MASK_TILE_ROWS;
    u32 keys = p.keys - block * p.block < p.block ? p.keys - block * p.block : p.block;
    bool open = false, hidden = false, other = false;
    for (u32 n = threadIdx.x; n < rows * keys; n += 128) {
        u64 row = base + (u64)(tile * MASK_TILE_ROWS + n / keys) * p.row, at = (u64)(block * p.block + n % keys) * p.step;
        float bias;
        switch (p.kind) {
            case F32: bias = *(const float*)(row + 4 * at); break;
            case F16: bias = f16_to_f32(*(const u16*)(row + 2 * at)); break;
            case BF16: bias = bf16_to_f32(*(const u16*)(row + 2 * at)); break;
            default: bias = *(const u8*)(row + at) ? 0.f : -INF;
        }
        bool is_open = bias == 0.f, is_hidden = bias == -INF;
        open |= is_open, hidden |= is_hidden, other |= !is_open && !is_hidden;
    }
    bool any_open = __syncthreads_or(open), any_hidden = __syncthreads_or(hidden), any_other = __syncthreads_or(other);
    if (threadIdx.x == 0) {
        u8 c = any_other || (any_open && any_hidden) ? 1 : any_open ? 2 : 0;
        ((u8*)p.mask_tiles)[((u64)plane * p.q_tiles + tile) * p.k_blocks + block] = c;
    }
}
