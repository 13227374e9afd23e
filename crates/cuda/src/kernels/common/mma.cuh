// Products of the matrix unit, for warps: accumulators are m16n8 fragments, whose lane 4 g + t holds columns 2 t and 2 t + 1 of rows g
// (elements 0 and 1) and g + 8 (elements 2 and 3).

// c += a b: a is 16x16, b 16x8.
template <Dtype T>
DEVICE void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if (T == F16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c += a b of tf32: a is 16x8, b 8x8.
DEVICE void mma_m16n8k8_tf32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// f32 to the nearest tf32.
DEVICE u32 to_tf32(float x) {
    u32 y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}

// An f32 as the sum of two tf32, which hold 22 bits of it. `finite` is `high` where the f32 is finite, and else 0, as `low` is.
struct SplitTf32 {
    u32 high, low, finite;
};

DEVICE SplitTf32 split_tf32(u32 x) {
    bool nonfinite = (x & 0x7f800000u) == 0x7f800000u;
    u32 high = to_tf32(__int_as_float(x));
    u32 low = to_tf32(__int_as_float(x) - __int_as_float(high));
    return {high, nonfinite ? 0 : low, nonfinite ? 0 : high};
}

// The left operand of a product: 16 rows of 32 bytes.
template <Dtype T>
struct AFragment {
    u32 x[4];

    DEVICE void set(const u32 (&words)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = words[i];
    }

    // c += a b.
    DEVICE void mma(float (&c)[4], u32 b0, u32 b1) const { mma_m16n8k16<T>(c, x, b0, b1); }
};

template <>
struct AFragment<F32> {
    u32 high[4], low[4], finite[4];

    DEVICE void set(const u32 (&words)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            SplitTf32 split = split_tf32(words[i]);
            high[i] = split.high, low[i] = split.low, finite[i] = split.finite;
        }
    }

    // c += a b of f32 by three products of tf32. The matrix unit truncates where it adds: every product starts from 0 and is added to
    // c by an addition that rounds to nearest. An infinite factor is multiplied with the higher part of the other alone, whose sign is
    // that of the factor.
    DEVICE void mma(float (&c)[4], u32 b0, u32 b1) const {
        SplitTf32 x0 = split_tf32(b0), x1 = split_tf32(b1);
        float x[4] = {0.f, 0.f, 0.f, 0.f};
        mma_m16n8k8_tf32(x, low, x0.finite, x1.finite);
        mma_m16n8k8_tf32(x, finite, x0.low, x1.low);
        mma_m16n8k8_tf32(x, high, x0.high, x1.high);
#pragma unroll
        for (int i = 0; i < 4; i++) c[i] += x[i];
    }
};
