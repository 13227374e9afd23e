// Tiles of q, k and v: from device memory to shared memory by cp.async. QTile, KTile and VTile are their layouts; LOADERS threads copy a
// tile of keys or values together.

// Copies the 16 bytes of a row from `chunk` on, as a vector or by elements; columns past `dim` are 0.
DEVICE void copy_chunk(u32 to, u64 row, u32 chunk, u32 dim, bool exists) {
    int rest = (int)(dim * ELEMENT_BYTES) - (int)(chunk * 16);
    u32 bytes = !exists || rest <= 0 ? 0 : rest < 16 ? rest : 16;
    if constexpr (VECTOR_ROWS) {
        cp_async16(to, (const void*)(row + chunk * 16), bytes);
    } else {
        u32 x[4] = {0, 0, 0, 0};
        if constexpr (ELEMENT_BYTES == 4) {
            const u32* from = (const u32*)(row + chunk * 16);
#pragma unroll
            for (int i = 0; i < 4; i++) if (i * 4 < bytes) x[i] = from[i];
        } else {
            const u16* from = (const u16*)(row + chunk * 16);
#pragma unroll
            for (int i = 0; i < 8; i++) if (i * 2 < bytes) x[i / 2] |= (u32)from[i] << (16 * (i % 2));
        }
        st_shared16(to, make_uint4(x[0], x[1], x[2], x[3]));
    }
}

// The keys of a work tile.
struct Keys {
    u32 begin, end;
    // The sequence's row of the block table.
    u64 block_table;
};

// The keys and values of a work tile in device memory: addresses of key 0, or of page 0, of its head.
struct KvSource {
    Keys keys;
    u64 k, v;
    // Columns of values from the work tile's first on.
    u32 value_dim;

    DEVICE KvSource() {}
    DEVICE KvSource(const ForwardParams& p, const WorkTile& work_tile) {
        u32 value_column = value_panel(work_tile) * VALUE_DIM;
        value_dim = value_columns(p, work_tile);
        keys.begin = work_tile.begin, keys.end = work_tile.end, keys.block_table = 0;
        k = p.k.at + (u64)(work_tile.kv_head * p.k.head), v = p.v.at + (u64)(work_tile.kv_head * p.v.head) + value_column * ELEMENT_BYTES;
        if constexpr (PAGED) {
            keys.block_table = p.block_table + (u64)work_tile.sequence * (p.block_table_width * 4);
        } else {
            k += (u64)(work_tile.batch * p.k.batch + (i64)work_tile.kv_start * p.k.row);
            v += (u64)(work_tile.batch * p.v.batch + (i64)work_tile.kv_start * p.v.row);
        }
    }
};

// The page of a key that exists, and its row there.
struct PageRow {
    u32 page, row;

    DEVICE PageRow(const ForwardParams& p, u64 block_table, u32 j) {
        u32 block = quotient(j, p.page_size);
        row = j - block * p.page_size.value;
        if (p.ring_blocks.value) block -= quotient(block, p.ring_blocks) * p.ring_blocks.value;
        page = __ldg((const u32*)block_table + block);
    }
};

// Bytes from the source's address to key j, which exists.
DEVICE i64 key_offset(const ForwardParams& p, const Tensor& tensor, const Keys& keys, u32 j) {
    if constexpr (PAGED) {
        PageRow at(p, keys.block_table, j);
        return (i64)at.page * tensor.batch + (i64)at.row * tensor.row;
    } else {
        return (i64)j * tensor.row;
    }
}

// Where a thread begins to copy a tile of rows at one stride: bytes from the tile's first row, and from the start of the tile in
// shared memory.
struct CopyStart {
    u64 from;
    u32 to;
};

template <typename T>
DEVICE CopyStart copy_start(const Tensor& tensor) {
    u32 thread = threadIdx.x % LOADERS, row = thread / T::ROW_CHUNKS, chunk = thread % T::ROW_CHUNKS;
    return {(u64)((i64)row * tensor.row) + chunk * 16, T::chunk(row, chunk)};
}

// Copies a whole tile of rows at one stride, without bounds.
template <typename T>
DEVICE void copy_whole_tile(const Tensor& tensor, u64 from, u32 to) {
    // Rows of a pass.
    constexpr int PASS = LOADERS / T::ROW_CHUNKS, COPIES = (COPY_KEYS * T::ROW_CHUNKS + LOADERS - 1) / LOADERS;
    static_assert(LOADERS % T::ROW_CHUNKS != 0 || PASS % 8 == 0 || T::PANEL == 128);
    u64 step = (u64)(PASS * tensor.row);
#pragma unroll
    for (int n = 0; n < COPIES; n++) {
        // A thread's rows differ in bits that are 0 in its first.
        cp_async16((to ^ ((n * PASS % 8) << 4)) + n * PASS * T::PANEL, (const void*)from, 16);
        from += step;
    }
}

// The keys of a work tile, or its values: key 0 of its head lies at `head`, and rows have `dim` columns.
struct KvRows {
    const Tensor& tensor;
    const Keys& keys;
    u64 head;
    u32 dim;
};

// Copies COPY_KEYS keys or values from key `j0` on, by LOADERS threads; keys outside the work tile's are 0.
template <typename T>
DEVICE void copy_kv_tile(const ForwardParams& p, const KvRows& kv, const CopyStart& start, u32 to, u32 j0) {
    const Keys& keys = kv.keys;
    constexpr int CHUNKS = T::ROW_CHUNKS, COPIES = (COPY_KEYS * CHUNKS + LOADERS - 1) / LOADERS;
    if constexpr (VECTOR_ROWS && !PAGED) {
        constexpr bool WHOLE_PASSES = LOADERS % CHUNKS == 0 && COPY_KEYS * CHUNKS % LOADERS == 0;
        if (WHOLE_PASSES && kv.dim >= T::COLUMNS && j0 >= keys.begin && j0 + COPY_KEYS <= keys.end) {
            copy_whole_tile<T>(kv.tensor, kv.head + start.from + (u64)((i64)j0 * kv.tensor.row), to + start.to);
            return;
        }
    }
    // One look-up of the block table for each key: every lane finds one, and hands it to those that copy its row.
    constexpr bool SHARED_LOOKUP = PAGED && WARPS_SPLIT_KEYS && COPY_KEYS <= 32;
    u32 thread = opaque(threadIdx.x % LOADERS);
    i64 found = 0;
    if (SHARED_LOOKUP) {
        u32 j = j0 + thread;
        if (thread < COPY_KEYS && j >= keys.begin && j < keys.end) found = key_offset(p, kv.tensor, keys, j);
    }
#pragma unroll (COPY_UNROLL)
    for (int n = 0; n < COPIES; n++) {
        u32 index = thread + n * LOADERS;
        u32 row = index / CHUNKS, chunk = index % CHUNKS;
        if ((COPY_KEYS * CHUNKS) % LOADERS != 0 && index >= COPY_KEYS * CHUNKS) break;
        u32 j = j0 + row;
        bool exists = j >= keys.begin && j < keys.end;
        i64 offset;
        if (SHARED_LOOKUP) offset = __shfl_sync(ALL_LANES, found, row);
        else offset = exists ? key_offset(p, kv.tensor, keys, j) : 0;
        copy_chunk(to + T::chunk(row, chunk), kv.head + offset, chunk, kv.dim, exists);
    }
}

// Copies a warp's WARP_ROWS rows of q, from `first_row` of the work tile on, to the tile at `to`; rows past the last are 0.
DEVICE void copy_warp_q(const ForwardParams& p, const WorkTile& work_tile, u32 first_row, u32 to) {
    constexpr int CHUNKS = QTile::ROW_CHUNKS;
    u32 lane = opaque(threadIdx.x % 32);
    // Every lane finds a row, and hands it to those that copy it.
    u32 own_row = first_row + lane % WARP_ROWS;
    bool own_exists = work_tile.row + own_row < row_count(p, work_tile);
    u64 own_address = own_exists ? row_address(p.q, work_tile, q_row(p, work_tile.kv_head, work_tile.row + own_row)) : p.q.at;
    // Few at a time: accumulators fill the registers.
#pragma unroll 2
    for (int n = 0; n < WARP_ROWS * CHUNKS / 32; n++) {
        u32 index = n * 32 + lane, row = index / CHUNKS, chunk = index % CHUNKS;
        u64 from = __shfl_sync(ALL_LANES, own_address, row);
        bool exists = __shfl_sync(ALL_LANES, own_exists, row);
        copy_chunk(to + QTile::chunk(first_row + row, chunk), from, chunk, p.head_dim, exists);
    }
}
