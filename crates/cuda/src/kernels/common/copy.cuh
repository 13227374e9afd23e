// Asynchronous copies, shared memory, barriers.

// ---- asynchronous copies to shared memory

// Copies `bytes` (0 to 16) bytes and fills the rest of the 16 with zeros.
DEVICE void cp_async16(u32 to, const void* from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most N of this thread's committed groups are in flight.
template <int N>
DEVICE void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Waits for all copies of this thread.
DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Fetches the line of an address into the second-level cache.
DEVICE void prefetch_l2(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// Fetches the line of an address into the multiprocessor's own cache. No kernel may write there: that cache is not coherent.
DEVICE void prefetch_l1(const void* at) { asm volatile("prefetch.global.L1 [%0];" ::"l"(at)); }

// ---- barriers

// Orders this thread's accesses, and those that it has synchronized with, before later accesses, for the
// whole device.
DEVICE void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Adds to a counter in device memory, and returns its value before. Threads that read the sum see earlier
// writes of this thread and of the threads that it has synchronized with.
DEVICE u32 atomic_add_acq_rel(u32* at, u32 x) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(at), "r"(x) : "memory");
    return before;
}

// Loads a counter: the other side of `atomic_add_acq_rel`.
DEVICE u32 load_acquire(const u32* at) {
    u32 x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
    return x;
}

// Reads a word without ordering: an acquire would invalidate the first-level cache.
DEVICE u32 load_relaxed(const u32* at) {
    u32 x;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
    return x;
}

// Writes a word after this thread's earlier writes.
DEVICE void store_release(u32* at, u32 x) { asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(x) : "memory"); }

// Named barriers join N threads of a block.
template <int N>
DEVICE void named_barrier_sync(int barrier) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(N) : "memory"); }

template <int N>
DEVICE void named_barrier_arrive(int barrier) { asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(N) : "memory"); }

// Waits, and returns whether `x` holds for any of the threads.
template <int N>
DEVICE bool named_barrier_any(int barrier, bool x) {
    u32 any;
    asm volatile("{ .reg .pred a, b; setp.ne.u32 a, %3, 0; bar.red.or.pred b, %1, %2, a; selp.u32 %0, 1, 0, b; }"
                 : "=r"(any) : "r"(barrier), "n"(N), "r"((u32)x) : "memory");
    return any;
}

// ---- shared memory, by its 32-bit addresses

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE void st_shared4(u32 to, u32 x) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory"); }

DEVICE void st_shared16(u32 to, uint4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

DEVICE uint4 ld_shared16(u32 from) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from) : "memory");
    return x;
}

DEVICE u32 ld_shared4(u32 from) {
    u32 x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
    return x;
}

// Loads four 8x8 matrices of 16-bit elements; lane l gives the address of a row of matrix l / 8.
DEVICE void ldmatrix_x4(u32 (&x)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from));
}

// Loads four 8x8 matrices of 16-bit elements, and transposes each of them.
DEVICE void ldmatrix_x4_trans(u32 (&x)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from));
}

// The swizzled layout of a tile of R rows and C columns in shared memory: panels of 128 bytes, or 64, whose chunks of 16 are permuted by
// the row, so that a matrix of 8 rows and 16 bytes covers all banks.
template <int C, int R, int ELEMENT>
struct SwizzledTile {
    static constexpr int COLUMNS = C, ROW_BYTES = C * ELEMENT;
    static constexpr int PANEL = ROW_BYTES % 128 == 0 ? 128 : 64, PANEL_CHUNKS = PANEL / 16;
    static constexpr int ROW_CHUNKS = ROW_BYTES / 16, BYTES = ROW_BYTES * R;
    DEVICE static u32 permute(u32 row) { return PANEL == 128 ? row & 7 : (row >> 1) & 3; }
    // Bytes from the start of the tile to a chunk of a row.
    DEVICE static u32 chunk(u32 row, u32 c) {
        return (c / PANEL_CHUNKS) * (PANEL * R) + row * PANEL + (((c % PANEL_CHUNKS) ^ permute(row)) << 4);
    }
    // Bytes to chunk 2 * pair + (0 or 1) of a row, from those to chunk 0 or 1 of it.
    DEVICE static u32 pair(u32 first, int pair) {
        return (first ^ ((2 * pair % PANEL_CHUNKS) << 4)) + (2 * pair / PANEL_CHUNKS) * (PANEL * R);
    }
};
