// Products of warpgroups: four warps multiply a tile of 64 rows, asynchronously. `Wgmma<T, N>`, printed by the host before this file, is
// the instruction m64nNk16:
// `c += a b` over 16 elements of the sum, or `c = a b` without `accumulate`. CUTLASS's names of its forms:
//
//   shared            SS: a and b in shared memory, both K-major (q k^T)
//   shared_mn_major   SS: a K-major, b MN-major (p v of prefill_wide.cu, where p is in shared memory)
//   shared_both_mn_major   SS: a and b MN-major (d_q of backward.cu, of gradients of scores [keys][queries])
//   registers         RS: a in registers, b in shared memory, MN-major (p v)
//
// Operands in shared memory are panels of 64 columns of 16 bits: rows of 128 bytes with the 128-byte swizzle, as TMA writes them, from a
// multiple of 1024 bytes on. The panels of a tile follow each other.
//
// An accumulator of N columns has N / 2 registers a thread. Register i of lane 4 g + t of warp w is row 16 w + g + 8 (i / 2 % 2) and column
// 8 (i / 4) + 2 t + i % 2: registers 8 j to 8 j + 7, packed in pairs, are the left operand of step j of a next product.

constexpr int PANEL_COLUMNS = 64, PANEL_ROW_BYTES = 128, WARPGROUP_THREADS = 128, WARPGROUP_ROWS = 64;

// Descriptors of operands: the address in units of 16 bytes, the distances between groups of eight rows and between panels, and the
// swizzle.
//
// K-major: an operand whose row holds consecutive elements of the sum, as rows of q and k do. A step of 16 columns is 32 bytes
// further; after four follows the next panel.
DEVICE u64 k_major_descriptor(u32 at) { return 0x4000004000010000ull | at >> 4; }

// MN-major: the right operand whose rows are the elements of the sum, as rows of v are, in panels of ROWS rows. A step of 16 rows is
// 2048 bytes further.
template <int ROWS>
DEVICE u64 mn_major_descriptor(u32 at) {
    static_assert(ROWS % 8 == 0);
    return 0x4000004000000000ull | (u64)(ROWS * PANEL_ROW_BYTES / 16) << 16 | at >> 4;
}

// Bytes from a tile's start, in panels of ROWS rows, to step `step` of a product with a K-major operand.
template <int ROWS>
DEVICE constexpr u32 k_major_step(int step) {
    return step / 4 * (ROWS * PANEL_ROW_BYTES) + step % 4 * 32;
}

// Bytes from a tile's start, in panels of any number of rows, to step `step` of a product with an MN-major
// operand.
DEVICE constexpr u32 mn_major_step(int step) { return step * 16 * PANEL_ROW_BYTES; }

// The descriptor of an operand `bytes` further. Shared memory has less than 2^18 bytes: the sum carries into nothing else.
DEVICE u64 advance_descriptor(u64 descriptor, u32 bytes) {
    return descriptor & 0xffffffff00000000ull | ((u32)descriptor + bytes / 16);
}

// Orders a thread's accesses to registers before the products that follow and use them.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Ends a group of products.
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING groups are being computed.
template <int PENDING>
DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving accesses to these registers over this place: it does not know that products run on after their
// instruction. It stands before the fence of a group and behind the wait for it, for accumulators and for left operands. Each statement takes
// compile time, so several registers share one.
template <int N>
DEVICE void pin_registers(float (&x)[N]) {
    static_assert(N % 8 == 0);
#pragma unroll
    for (int i = 0; i < N; i += 8)
        asm volatile("" : "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3]), "+f"(x[i + 4]), "+f"(x[i + 5]), "+f"(x[i + 6]), "+f"(x[i + 7])::"memory");
}

template <int N>
DEVICE void pin_registers(u32 (&x)[N]) {
    static_assert(N % 4 == 0);
#pragma unroll
    for (int i = 0; i < N; i += 4) asm volatile("" : "+r"(x[i]), "+r"(x[i + 1]), "+r"(x[i + 2]), "+r"(x[i + 3])::"memory");
}

// Orders this thread's writes to shared memory before reads by products and TMA that follow a barrier.
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
