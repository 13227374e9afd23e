// The project's wrappers of instructions, for a thread of the stand-in. Products are done at once.

// ---- numbers

inline float exp2_approx(float x) {
    float y = exp2f(x);
    // Denormals are flushed.
    return fabsf(y) < 1.17549435e-38f ? 0.f : y;
}
inline float reciprocal_approx(float x) { return 1 / x; }
inline u32 bf16_bits(float x) {
    u32 bits = __float_as_uint(x);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
inline u32 f16_bits(float x) { return bits_as<u16>((_Float16)x); }
inline float f16_to_f32(u16 x) { return (float)bits_as<_Float16>(x); }
template <Dtype T>
inline u32 pack(float low, float high) {
    return T == F16 ? f16_bits(low) | f16_bits(high) << 16 : bf16_bits(low) | bf16_bits(high) << 16;
}
template <Dtype T>
inline float element_of(u16 x) {
    return T == F16 ? f16_to_f32(x) : __uint_as_float((u32)x << 16);
}
template <Dtype T>
inline u32 add_zero_times(u32 sum, u32 x) {
    auto half = [](u16 sum, u16 x) { return element_of<T>(sum) + element_of<T>(x) * 0.f; };
    return pack<T>(half((u16)sum, (u16)x), half((u16)(sum >> 16), (u16)(x >> 16)));
}
inline u32 to_tf32(float x) {
    u32 bits = __float_as_uint(x);
    return (bits & 0x7f800000u) == 0x7f800000u ? bits : (bits + 0x1000u) & 0xffffe000u;
}
template <typename T>
inline const T* opaque(const T* x) { return x; }

// ---- shared memory

constexpr u32 SHARED_LIMIT = 256 << 10;

inline u8* shared_at(u32 at) {
    if (at >= SHARED_LIMIT) {
        fprintf(stderr, "cuda-standin: shared memory has no byte %u\n", at);
        abort();
    }
    return standin_shared + at;
}
inline void st_shared4(u32 to, u32 x) { memcpy(shared_at(to), &x, 4); }
inline void st_shared16(u32 to, uint4 x) { memcpy(shared_at(to), &x, 16); }
inline uint4 ld_shared16(u32 from) {
    uint4 x;
    memcpy(&x, shared_at(from), 16);
    return x;
}
inline u32 ld_shared4(u32 from) {
    u32 x;
    memcpy(&x, shared_at(from), 4);
    return x;
}
inline float2 ld_shared_pair(u32 from) {
    float2 x;
    memcpy(&x, shared_at(from), 8);
    return x;
}
inline void cp_async16(u32 to, const void* from, u32 bytes) {
    shared_at(to);
    standin_cp_async(to, from, bytes);
}
inline void cp_async_commit() { standin_cp_async_commit(); }
template <int N>
inline void cp_async_wait() { standin_cp_async_wait(N); }
inline void cp_async_wait_all() { standin_cp_async_commit(), standin_cp_async_wait(0); }
inline void prefetch_l2(const void*) {}
inline void prefetch_l1(const void*) {}
inline void fence_device() {}
inline u32 atomic_add_acq_rel(u32* at, u32 x) { return atomicAdd(at, x); }
inline u32 load_acquire(const u32* at) { return *at; }
inline void fence_async_proxy() {}
inline void prefetch_map(const void*) {}

// ---- barriers

template <int N>
inline void named_barrier_sync(int barrier) { standin_barrier(barrier, N, 1); }
template <int N>
inline void named_barrier_arrive(int barrier) { standin_barrier(barrier, N, 0); }
template <int N>
inline bool named_barrier_any(int barrier, bool x) { return standin_barrier_any(barrier, N, x); }

inline void mbarrier_init(u32 barrier, u32 count) { standin_mbarrier_init(barrier, count); }
inline void mbarrier_publish() {}
inline void mbarrier_arrive(u32 barrier) { standin_mbarrier_arrive(barrier, 0); }
inline void mbarrier_arrive_expect(u32 barrier, u32 bytes) { standin_mbarrier_arrive(barrier, bytes); }
inline bool mbarrier_try_wait(u32 barrier, u32 parity) {
    if (!standin_mbarrier_ended(barrier, parity)) standin_yield();
    return standin_mbarrier_ended(barrier, parity);
}
inline bool mbarrier_test(u32 barrier, u32 parity) { return standin_mbarrier_ended(barrier, parity); }
inline u32 num_blocks() { return gridDim.x; }

// ---- clusters: an address of a block's shared memory has the block's number, counted from 1, above 18 bits

inline u32 cluster_rank() { return standin_cluster_rank(); }
inline void cluster_sync() { standin_cluster_barrier(); }
inline u32 address_in(u32 at, u32 rank) { return (rank + 1) << 18 | at; }
inline void mbarrier_arrive_in(u32 barrier, u32 rank) { standin_mbarrier_arrive(address_in(barrier, rank), 0); }
inline void copy_to_block(u32 to, u32 from, u32 bytes, u32 barrier) { standin_copy_shared(to, from, bytes, barrier); }
inline void copy_from_device(u32 to, const void* from, u32 bytes, u32 barrier) { standin_copy_in(to, from, bytes, barrier); }
inline void copy_to_device(void* to, u32 from, u32 bytes) { standin_copy_out(to, from, bytes, 0); }
inline void add_to_device(void* to, u32 from, u32 bytes) { standin_copy_out(to, from, bytes, 1); }
inline void bulk_commit() {}
inline void bulk_wait_read() { standin_wait_copies(); }
inline void bulk_wait() { standin_wait_copies(); }
inline u32 load_relaxed(const u32* at) {
    standin_yield();
    return *at;
}
inline void store_release(u32* at, u32 x) { *at = x; }
inline void fence_async_proxy_of_all() {}

template <int REGISTERS>
inline void release_registers() {}
template <int REGISTERS>
inline void take_registers() {}

// ---- fragments

inline u32 lane() { return standin_thread() % 32; }

// Addresses of the rows of four matrices, by lane.
struct MatrixRows {
    unsigned long long at[32];

    explicit MatrixRows(u32 from) { standin_gather(from, at); }
    u16 element(u32 matrix, u32 row, u32 column) const {
        u16 x;
        memcpy(&x, shared_at((u32)at[8 * matrix + row] + 2 * column), 2);
        return x;
    }
};
inline void ldmatrix_x4(u32 (&x)[4], u32 from) {
    MatrixRows rows(from);
    u32 row = lane() / 4, column = lane() % 4 * 2;
    for (u32 i = 0; i < 4; i++) x[i] = rows.element(i, row, column) | (u32)rows.element(i, row, column + 1) << 16;
}
inline void ldmatrix_x4_trans(u32 (&x)[4], u32 from) {
    MatrixRows rows(from);
    u32 row = lane() % 4 * 2, column = lane() / 4;
    for (u32 i = 0; i < 4; i++) x[i] = rows.element(i, row, column) | (u32)rows.element(i, row + 1, column) << 16;
}

inline void stmatrix_x4(u32 to, u32 a, u32 b, u32 c, u32 d) {
    MatrixRows rows(to);
    const u32 x[4] = {a, b, c, d};
    for (u32 i = 0; i < 4; i++) memcpy(shared_at((u32)rows.at[8 * i + lane() / 4] + lane() % 4 * 4), &x[i], 4);
}

// The two rows of a left operand, 16x16, that this lane's accumulators are for.
template <Dtype T>
inline void a_rows(float (&rows)[2][16], const u32 (&a)[4]) {
    unsigned long long words[4][32];
    for (int i = 0; i < 4; i++) standin_gather(a[i], words[i]);
    for (u32 half = 0; half < 2; half++)
        for (u32 k = 0; k < 16; k++) rows[half][k] = element_of<T>((u16)(words[k / 8 * 2 + half][lane() / 4 * 4 + k % 8 / 2] >> 16 * (k % 2)));
}

template <Dtype T>
inline void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    float rows[2][16];
    a_rows<T>(rows, a);
    unsigned long long b[2][32];
    standin_gather(b0, b[0]), standin_gather(b1, b[1]);
    for (u32 i = 0; i < 4; i++) {
        u32 column = lane() % 4 * 2 + i % 2;
        for (u32 k = 0; k < 16; k++) c[i] += rows[i / 2][k] * element_of<T>((u16)(b[k / 8][4 * column + k % 8 / 2] >> 16 * (k % 2)));
    }
}

inline void mma_m16n8k8_tf32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    unsigned long long x[4][32], b[2][32];
    for (int i = 0; i < 4; i++) standin_gather(a[i], x[i]);
    standin_gather(b0, b[0]), standin_gather(b1, b[1]);
    for (u32 i = 0; i < 4; i++) {
        u32 column = lane() % 4 * 2 + i % 2;
        for (u32 k = 0; k < 8; k++)
            c[i] += __uint_as_float((u32)x[k / 4 * 2 + i / 2][lane() / 4 * 4 + k % 4]) * __uint_as_float((u32)b[k / 4][4 * column + k % 4]);
    }
}

// ---- products of warpgroups

inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int PENDING>
inline void wgmma_wait() {}
template <typename T, int N>
inline void pin_registers(T (&)[N]) {}
