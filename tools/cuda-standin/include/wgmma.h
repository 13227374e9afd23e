// Products of warpgroups: operands are found by their descriptors, as the instruction finds them. They are done at once.

inline u32 swizzled(u32 at) { return at ^ (at >> 7 & 7) << 4; }

template <Dtype T, int N>
struct Wgmma {
    static float element(u32 at) {
        u16 x;
        memcpy(&x, shared_at(swizzled(at)), 2);
        return element_of<T>(x);
    }
    static u32 start(u64 descriptor) { return (u32)(descriptor & 0x3fff) << 4; }
    // Bytes from one panel of an MN-major operand to the next.
    static u32 panel_bytes(u64 descriptor) { return (u32)(descriptor >> 16 & 0x3fff) << 4; }

    static void check(u64 descriptor) {
        u32 group_bytes = (u32)(descriptor >> 32 & 0x3fff) << 4;
        if (descriptor >> 62 != 1 || group_bytes != 1024) {
            fprintf(stderr, "cuda-standin: descriptor %llx has no 128-byte swizzle\n", descriptor);
            abort();
        }
    }

    // Row `major` of a K-major operand.
    static float k_major(u64 descriptor, u32 major, u32 k) { return element(start(descriptor) + major / 8 * 1024 + major % 8 * 128 + k * 2); }

    static float mn_major(u64 descriptor, u32 k, u32 column) {
        return element(start(descriptor) + column / 64 * panel_bytes(descriptor) + k / 8 * 1024 + k % 8 * 128 + column % 64 * 2);
    }

    template <bool MN_MAJOR>
    static void multiply(float (&c)[N / 2], const float (&a)[2][16], u64 b, bool accumulate) {
        check(b);
        for (int n = 0; n < N / 2; n++) {
            u32 column = n / 4 * 8 + standin_thread() % 4 * 2 + n % 2;
            float sum = accumulate ? c[n] : 0.f;
            for (u32 k = 0; k < 16; k++) sum += a[n / 2 % 2][k] * (MN_MAJOR ? mn_major(b, k, column) : k_major(b, column, k));
            c[n] = sum;
        }
    }

    template <bool MN_MAJOR>
    static void multiply_shared(float (&c)[N / 2], u64 a, u64 b, bool accumulate) {
        check(a);
        float rows[2][16];
        for (u32 half = 0; half < 2; half++)
            for (u32 k = 0; k < 16; k++) rows[half][k] = k_major(a, standin_thread() / 32 % 4 * 16 + standin_thread() % 32 / 4 + 8 * half, k);
        multiply<MN_MAJOR>(c, rows, b, accumulate);
    }

    static void shared(float (&c)[N / 2], u64 a, u64 b, bool accumulate) { multiply_shared<false>(c, a, b, accumulate); }

    static void shared_mn_major(float (&c)[N / 2], u64 a, u64 b, bool accumulate) { multiply_shared<true>(c, a, b, accumulate); }

    static void shared_both_mn_major(float (&c)[N / 2], u64 a, u64 b, bool accumulate) {
        check(a);
        float rows[2][16];
        for (u32 half = 0; half < 2; half++)
            for (u32 k = 0; k < 16; k++) rows[half][k] = mn_major(a, k, standin_thread() / 32 % 4 * 16 + standin_thread() % 32 / 4 + 8 * half);
        multiply<true>(c, rows, b, accumulate);
    }

    static void registers(float (&c)[N / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, bool accumulate) {
        float rows[2][16];
        a_rows<T>(rows, {a0, a1, a2, a3});
        multiply<true>(c, rows, b, accumulate);
    }
};
