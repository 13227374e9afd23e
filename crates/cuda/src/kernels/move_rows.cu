// Moves rows of keys and values: into the pages of a cache, out of them, and from page to page.
//
// A run is consecutive tokens of one page. Each warp moves one row of one head, and converts it where element types differ.

DEVICE float load_element(u64 row, u32 dtype, u32 i) {
    if (dtype == F32) return ((const float*)row)[i];
    u16 x = ((const u16*)row)[i];
    return dtype == F16 ? f16_to_f32(x) : bf16_to_f32(x);
}

DEVICE void store_element(u64 row, u32 dtype, u32 i, float x) {
    if (dtype == F32) ((float*)row)[i] = x;
    else ((u16*)row)[i] = (u16)(dtype == F16 ? pack<F16>(x, 0.f) : pack<BF16>(x, 0.f));
}

extern "C" __global__ void __launch_bounds__(128) move_rows(const __grid_constant__ MoveParams p) {
    u32 index = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y, which = blockIdx.z;
    if (index >= p.rows) return;
    // The last run that starts at or before the row.
    u32 low = 0, high = p.runs;
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if (p.run[middle].first <= index) low = middle;
        else high = middle;
    }
    const Run run = p.run[low];
    u32 row = index - run.first;
    const Side &source = p.from[which], &target = p.to[which];
    u64 from = source.at + (u64)(run.other_page * source.page + head * source.head + (i64)(run.other_row + row) * source.row);
    u64 to = target.at + (u64)(run.page * target.page + head * target.head + (i64)(run.row + row) * target.row);
    u32 dim = p.dim[which];
    if (source.dtype != target.dtype) {
        for (u32 i = lane; i < dim; i += 32) store_element(to, target.dtype, i, load_element(from, source.dtype, i));
        return;
    }
    // Bits are copied as they are, in the widest words that addresses and length allow.
    u32 bytes = dim * (source.dtype == F32 ? 4 : 2);
    if (((from | to | bytes) & 15) == 0) {
        for (u32 i = lane; i < bytes / 16; i += 32) ((uint4*)to)[i] = ((const uint4*)from)[i];
    } else if (source.dtype == F32) {
        for (u32 i = lane; i < dim; i += 32) ((u32*)to)[i] = ((const u32*)from)[i];
    } else {
        for (u32 i = lane; i < dim; i += 32) ((u16*)to)[i] = ((const u16*)from)[i];
    }
}
