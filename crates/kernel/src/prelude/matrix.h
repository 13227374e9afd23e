// Products of 8x8 matrices, two left operands at a time. A lane has two neighbouring elements of a row.
#ifndef FT_METAL
template <typename T>
struct Left {
    uint low;
};
template <>
struct Left<float> {
    uint low, high;
};
// Rows 2 * pair and 2 * pair + 1 of the column of the lane's row.
template <typename T>
struct Right {
    uint low;
};
template <>
struct Right<float> {
    uint low, high;
};

FT_DEVICE uint matrix_row(FT_THREAD_CONTEXT) { return ft_simd_lane(ft) / 4; }
FT_DEVICE uint matrix_pair(FT_THREAD_CONTEXT) { return ft_simd_lane(ft) % 4; }
FT_DEVICE uint matrix_lane(FT_THREAD_CONTEXT, const uint row, const uint pair) { return 4 * row + pair; }
FT_DEVICE uint byte_signs(FT_THREAD_CONTEXT, const uint a, const uint b, const uint selector) {
    uint signs;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(signs) : "r"(a), "r"(b), "r"(selector | 0x8888));
    return signs;
}

template <typename T>
FT_DEVICE uint ft_pack(const float x, const float y) {
    return uint(ft_to_bits(ft_from_f32<T>(x))) | uint(ft_to_bits(ft_from_f32<T>(y))) << 16;
}
#if __CUDA_ARCH__ >= 800
template <>
FT_DEVICE uint ft_pack<ft_f16>(const float x, const float y) {
    uint both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(y), "f"(x));
    return both;
}
template <>
FT_DEVICE uint ft_pack<ft_bf16>(const float x, const float y) {
    uint both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(y), "f"(x));
    return both;
}
#endif

template <typename T>
struct ft_matrix {
    FT_DEVICE static Left<T> left(const uint low, const uint) { return Left<T>{low}; }
    FT_DEVICE static Left<T> left_from(const float x, const float y) { return Left<T>{ft_pack<T>(x, y)}; }
    FT_DEVICE static Left<T> left_of(const T x, const T y) { return left(uint(ft_to_bits(x)) | uint(ft_to_bits(y)) << 16, 0); }
    FT_DEVICE static Right<T> right_of(const Left<T> x) { return Right<T>{x.low}; }
    FT_DEVICE static Right<T> right(const float x, const float y) {
        const uint rows = ft_pack<T>(x, y);
#if __CUDA_ARCH__ >= 750
        uint columns;
        asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(columns) : "r"(rows));
        return Right<T>{columns};
#else
        const uint lane = threadIdx.x % 32, row = lane / 4, pair = lane % 4;
        const uint first = __shfl_sync(0xffffffffu, rows, 8 * pair + row / 2);
        const uint second = __shfl_sync(0xffffffffu, rows, 8 * pair + 4 + row / 2);
        return Right<T>{row % 2 ? (first >> 16 | (second & 0xffff0000u)) : ((first & 0xffffu) | second << 16)};
#endif
    }
    FT_DEVICE static Right<T> right_transposed(const float x, const float y) { return Right<T>{ft_pack<T>(x, y)}; }
    FT_DEVICE static Right<T> zero() { return Right<T>{0}; }
    FT_DEVICE static float first(const uint low, const uint) { return ft_to_f32(ft_from_bits<T>(ushort(low))); }
    FT_DEVICE static float second(const uint low, const uint) { return ft_to_f32(ft_from_bits<T>(ushort(low >> 16))); }
    FT_DEVICE static uint high(const Left<T>&) { return 0; }
    FT_DEVICE static uint high(const Right<T>&) { return 0; }
};
template <>
struct ft_matrix<float> {
    FT_DEVICE static Left<float> left(const uint low, const uint high) { return Left<float>{low, high}; }
    FT_DEVICE static Left<float> left_from(const float x, const float y) { return Left<float>{ft_to_bits(x), ft_to_bits(y)}; }
    FT_DEVICE static Left<float> left_of(const float x, const float y) { return left_from(x, y); }
    FT_DEVICE static Right<float> right_of(const Left<float> x) { return Right<float>{x.low, x.high}; }
    FT_DEVICE static Right<float> right(const float x, const float y) {
        const uint lane = threadIdx.x % 32, row = lane / 4, pair = lane % 4;
        const float x0 = __shfl_sync(0xffffffffu, x, 8 * pair + row / 2);
        const float y0 = __shfl_sync(0xffffffffu, y, 8 * pair + row / 2);
        const float x1 = __shfl_sync(0xffffffffu, x, 8 * pair + 4 + row / 2);
        const float y1 = __shfl_sync(0xffffffffu, y, 8 * pair + 4 + row / 2);
        return right_transposed(row % 2 ? y0 : x0, row % 2 ? y1 : x1);
    }
    FT_DEVICE static Right<float> right_transposed(const float x, const float y) {
        return Right<float>{ft_to_bits(x), ft_to_bits(y)};
    }
    FT_DEVICE static Right<float> zero() { return Right<float>{0, 0}; }
    FT_DEVICE static float first(const uint low, const uint) { return ft_from_bits<float>(low); }
    FT_DEVICE static float second(const uint, const uint high) { return ft_from_bits<float>(high); }
    FT_DEVICE static uint high(const Left<float>& x) { return x.high; }
    FT_DEVICE static uint high(const Right<float>& x) { return x.high; }
};

template <typename T>
FT_DEVICE Left<T> left(FT_THREAD_CONTEXT, const uint low, const uint high) {
    return ft_matrix<T>::left(low, high);
}
template <typename T>
FT_DEVICE Left<T> left_from(FT_THREAD_CONTEXT, const float x, const float y) {
    return ft_matrix<T>::left_from(x, y);
}
template <typename T>
FT_DEVICE Right<T> right(FT_THREAD_CONTEXT, const float x, const float y) {
    return ft_matrix<T>::right(x, y);
}
template <typename T>
FT_DEVICE Right<T> right_transposed(FT_THREAD_CONTEXT, const float x, const float y) {
    return ft_matrix<T>::right_transposed(x, y);
}
template <typename T>
FT_DEVICE Right<T> right_zero(FT_THREAD_CONTEXT) {
    return ft_matrix<T>::zero();
}

// Loads of a 16x16 matrix from shared memory, whose lines are `stride` elements apart, as four 8x8 matrices: two in each line where
// ALONG, otherwise two in each column, come first. Of each a lane gets two neighbouring elements of a line, or of a column where
// TRANSPOSED.
template <typename T, bool ALONG, bool TRANSPOSED>
FT_DEVICE ft_array<Left<T>, 4> ft_load_matrices(const T* memory, const uint offset, const uint stride) {
    ft_array<Left<T>, 4> all;
    const uint lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 750
    if constexpr (sizeof(T) == 2) {
        // Lane l gives the address of line l % 8 of matrix l / 8.
        const uint line = lane % 8 + (ALONG ? lane / 16 : lane / 8 % 2) * 8, column = (ALONG ? lane / 8 % 2 : lane / 16) * 8;
        const uint from = uint(__cvta_generic_to_shared(memory)) + uint(sizeof(T)) * (line * stride + column) + uint(sizeof(T)) * offset;
        uint x[4];
        if constexpr (TRANSPOSED) {
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from));
        } else {
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from));
        }
#pragma unroll
        for (int n = 0; n < 4; n++) all[n] = ft_matrix<T>::left(x[n], 0);
        return all;
    }
#endif
    const uint row = lane / 4, pair = lane % 4 * 2;
    const uint step = TRANSPOSED ? stride : 1;
    const T* from = memory + offset + (TRANSPOSED ? pair * stride + row : row * stride + pair);
#pragma unroll
    for (uint n = 0; n < 4; n++) {
        const uint at = (ALONG ? n / 2 : n % 2) * 8 * stride + (ALONG ? n % 2 : n / 2) * 8;
        all[n] = ft_matrix<T>::left_of(from[at], from[at + step]);
    }
    return all;
}
// As right operands: held alike, but for the name.
template <typename T>
FT_DEVICE ft_array<Right<T>, 4> ft_rights_of(const ft_array<Left<T>, 4> lefts) {
    ft_array<Right<T>, 4> all;
#pragma unroll
    for (int n = 0; n < 4; n++) all[n] = ft_matrix<T>::right_of(lefts[n]);
    return all;
}
template <typename T>
FT_DEVICE ft_array<Left<T>, 4> load_lefts(FT_THREAD_CONTEXT, FT_SHARED(T) memory, const uint offset, const uint stride) {
    return ft_load_matrices<T, false, false>(memory, offset, stride);
}
template <typename T>
FT_DEVICE ft_array<Right<T>, 4> load_rights(FT_THREAD_CONTEXT, FT_SHARED(T) memory, const uint offset, const uint stride) {
    return ft_rights_of<T>(ft_load_matrices<T, false, true>(memory, offset, stride));
}
template <typename T>
FT_DEVICE ft_array<Right<T>, 4> load_rights_transposed(FT_THREAD_CONTEXT, FT_SHARED(T) memory, const uint offset, const uint stride) {
    return ft_rights_of<T>(ft_load_matrices<T, true, false>(memory, offset, stride));
}

typedef ft_array<ft_array<float, 2>, 2> ft_sums;

// Through shuffles: operations that the matrix unit lacks.
template <typename T>
FT_DEVICE ft_sums ft_multiply_add(const ft_array<Left<T>, 2>& a, const Right<T>& b, ft_sums c) {
    const uint lane = threadIdx.x % 32, row = lane / 4, pair = lane % 4;
    const uint b_high = ft_matrix<T>::high(b);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const uint low0 = __shfl_sync(0xffffffffu, b.low, 8 * pair + k), low1 = __shfl_sync(0xffffffffu, b.low, 8 * pair + 4 + k);
        const uint high0 = sizeof(T) == 2 ? 0 : __shfl_sync(0xffffffffu, b_high, 8 * pair + k);
        const uint high1 = sizeof(T) == 2 ? 0 : __shfl_sync(0xffffffffu, b_high, 8 * pair + 4 + k);
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const uint low = __shfl_sync(0xffffffffu, a[n].low, 4 * row + k);
            const uint high = sizeof(T) == 2 ? 0 : __shfl_sync(0xffffffffu, ft_matrix<T>::high(a[n]), 4 * row + k);
            const float x = ft_matrix<T>::first(low, high), y = ft_matrix<T>::second(low, high);
            c[n][0] = fmaf(y, ft_matrix<T>::second(low0, high0), fmaf(x, ft_matrix<T>::first(low0, high0), c[n][0]));
            c[n][1] = fmaf(y, ft_matrix<T>::second(low1, high1), fmaf(x, ft_matrix<T>::first(low1, high1), c[n][1]));
        }
    }
    return c;
}
template <typename T>
FT_DEVICE ft_sums multiply_add(FT_THREAD_CONTEXT, const ft_array<Left<T>, 2> a, const Right<T> b, ft_sums c) {
    return ft_multiply_add<T>(a, b, c);
}
#if __CUDA_ARCH__ >= 750
template <>
FT_DEVICE ft_sums multiply_add<ft_f16>(FT_THREAD_CONTEXT, const ft_array<Left<ft_f16>, 2> a, const Right<ft_f16> b, ft_sums c) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[1][0]), "+f"(c[1][1])
                 : "r"(a[0].low), "r"(a[1].low), "r"(b.low));
    return c;
}
#endif
#if __CUDA_ARCH__ >= 800
template <>
FT_DEVICE ft_sums multiply_add<ft_bf16>(FT_THREAD_CONTEXT, const ft_array<Left<ft_bf16>, 2> a, const Right<ft_bf16> b, ft_sums c) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[1][0]), "+f"(c[1][1])
                 : "r"(a[0].low), "r"(a[1].low), "r"(b.low));
    return c;
}
#endif
template <typename T>
FT_DEVICE ft_sums multiply_add_twice(FT_THREAD_CONTEXT, const ft_array<Left<T>, 2> a, const Right<T> b, const ft_array<Left<T>, 2> a_next,
                           const Right<T> b_next, ft_sums c) {
    return multiply_add<T>(ft, a_next, b_next, multiply_add<T>(ft, a, b, c));
}
#if __CUDA_ARCH__ >= 800
template <>
FT_DEVICE ft_sums multiply_add_twice<ft_f16>(FT_THREAD_CONTEXT, const ft_array<Left<ft_f16>, 2> a, const Right<ft_f16> b,
                                         const ft_array<Left<ft_f16>, 2> a_next, const Right<ft_f16> b_next, ft_sums c) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[1][0]), "+f"(c[1][1])
                 : "r"(a[0].low), "r"(a[1].low), "r"(a_next[0].low), "r"(a_next[1].low), "r"(b.low), "r"(b_next.low));
    return c;
}
template <>
FT_DEVICE ft_sums multiply_add_twice<ft_bf16>(FT_THREAD_CONTEXT, const ft_array<Left<ft_bf16>, 2> a, const Right<ft_bf16> b,
                                         const ft_array<Left<ft_bf16>, 2> a_next, const Right<ft_bf16> b_next, ft_sums c) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[1][0]), "+f"(c[1][1])
                 : "r"(a[0].low), "r"(a[1].low), "r"(a_next[0].low), "r"(a_next[1].low), "r"(b.low), "r"(b_next.low));
    return c;
}
#endif
FT_DEVICE float matrix_column_max(FT_THREAD_CONTEXT, float x) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lanes));
    return x;
}
FT_DEVICE float matrix_column_sum(FT_THREAD_CONTEXT, float x) {
#pragma unroll
    for (int lanes = 16; lanes > 2; lanes /= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
    return x;
}
FT_DEVICE float matrix_row_max(FT_THREAD_CONTEXT, float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
FT_DEVICE float matrix_row_sum(FT_THREAD_CONTEXT, float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 2);
    return x + __shfl_xor_sync(0xffffffffu, x, 1);
}
#else
template <typename T>
struct Left {
    metal::simdgroup_matrix<T, 8, 8> matrix;
};
template <typename T>
struct Right {
    metal::simdgroup_matrix<T, 8, 8> matrix;
};

FT_DEVICE uint matrix_row(FT_THREAD_CONTEXT) {
    const uint lane = ft_simd_lane(ft);
    return (lane / 4 & 4) + lane / 2 % 4;
}
FT_DEVICE uint matrix_pair(FT_THREAD_CONTEXT) {
    const uint lane = ft_simd_lane(ft);
    return (lane / 4 & 2) + lane % 2;
}
FT_DEVICE uint matrix_lane(FT_THREAD_CONTEXT, const uint row, const uint pair) {
    return (row & 4) * 4 + (pair & 2) * 4 + (row & 3) * 2 + (pair & 1);
}
FT_DEVICE uint byte_signs(FT_THREAD_CONTEXT, const uint a, const uint b, const uint selector) {
    return (ft_byte_permute(a, b, selector) >> 7 & 0x01010101u) * 0xffu;
}

// Elements are set one at a time: thread_elements() refers to the lane's two elements, by a type of Apple's
// own.
template <typename T>
struct ft_matrix {
    static metal::simdgroup_matrix<T, 8, 8> of(const T x, const T y) {
        metal::simdgroup_matrix<T, 8, 8> matrix;
        matrix.thread_elements()[0] = x;
        matrix.thread_elements()[1] = y;
        return matrix;
    }
    static metal::simdgroup_matrix<T, 8, 8> of_words(const uint low, const uint) {
        return of(as_type<T>(ushort(low)), as_type<T>(ushort(low >> 16)));
    }
};
template <>
struct ft_matrix<float> {
    static metal::simdgroup_matrix<float, 8, 8> of(const float x, const float y) {
        metal::simdgroup_matrix<float, 8, 8> matrix;
        matrix.thread_elements()[0] = x;
        matrix.thread_elements()[1] = y;
        return matrix;
    }
    static metal::simdgroup_matrix<float, 8, 8> of_words(const uint low, const uint high) {
        return of(as_type<float>(low), as_type<float>(high));
    }
};

template <typename T>
FT_DEVICE Left<T> left(FT_THREAD_CONTEXT, const uint low, const uint high) {
    Left<T> x;
    x.matrix = ft_matrix<T>::of_words(low, high);
    return x;
}
template <typename T>
FT_DEVICE Left<T> left_from(FT_THREAD_CONTEXT, const float x, const float y) {
    Left<T> l;
    l.matrix = ft_matrix<T>::of(T(x), T(y));
    return l;
}
template <typename T>
FT_DEVICE ft_array<Left<T>, 4> load_lefts(FT_THREAD_CONTEXT, FT_SHARED(T) memory, const uint offset, const uint stride) {
    ft_array<Left<T>, 4> all;
    FT_UNROLL
    for (uint n = 0; n < 4; n++) metal::simdgroup_load(all[n].matrix, memory + offset + n % 2 * 8 * stride + n / 2 * 8, stride);
    return all;
}
template <typename T>
FT_DEVICE ft_array<Right<T>, 4> load_rights(FT_THREAD_CONTEXT, FT_SHARED(T) memory, const uint offset, const uint stride) {
    ft_array<Right<T>, 4> all;
    FT_UNROLL
    for (uint n = 0; n < 4; n++) metal::simdgroup_load(all[n].matrix, memory + offset + n % 2 * 8 * stride + n / 2 * 8, stride);
    return all;
}
template <typename T>
FT_DEVICE ft_array<Right<T>, 4> load_rights_transposed(FT_THREAD_CONTEXT, FT_SHARED(T) memory, const uint offset, const uint stride) {
    ft_array<Right<T>, 4> all;
    FT_UNROLL
    for (uint n = 0; n < 4; n++) {
        const uint at = n / 2 * 8 * stride + n % 2 * 8;
        metal::simdgroup_load(all[n].matrix, memory + offset + at, stride, metal::ulong2(0), true);
    }
    return all;
}
template <typename T>
FT_DEVICE Right<T> right(FT_THREAD_CONTEXT, const float x, const float y) {
    Right<T> r;
    r.matrix = ft_matrix<T>::of(T(x), T(y));
    return r;
}
template <typename T>
FT_DEVICE Right<T> right_transposed(FT_THREAD_CONTEXT, const float x, const float y) {
    const uint row = matrix_row(ft), pair = matrix_pair(ft);
    const ushort first = ushort(matrix_lane(ft, 2 * pair, row / 2)), second = ushort(matrix_lane(ft, 2 * pair + 1, row / 2));
    const float x0 = metal::simd_shuffle(x, first), y0 = metal::simd_shuffle(y, first);
    const float x1 = metal::simd_shuffle(x, second), y1 = metal::simd_shuffle(y, second);
    return right<T>(ft, row % 2 ? y0 : x0, row % 2 ? y1 : x1);
}
template <typename T>
FT_DEVICE Right<T> right_zero(FT_THREAD_CONTEXT) {
    return right<T>(ft, 0.0f, 0.0f);
}
template <typename T>
FT_DEVICE ft_array<ft_array<float, 2>, 2> multiply_add(FT_THREAD_CONTEXT, const ft_array<Left<T>, 2> a, const Right<T> b,
                                                       ft_array<ft_array<float, 2>, 2> c) {
    for (uint n = 0; n < 2; n++) {
        metal::simdgroup_matrix<float, 8, 8> sum = ft_matrix<float>::of(c[n][0], c[n][1]);
        metal::simdgroup_multiply_accumulate(sum, a[n].matrix, b.matrix, sum);
        c[n][0] = sum.thread_elements()[0];
        c[n][1] = sum.thread_elements()[1];
    }
    return c;
}
template <typename T>
FT_DEVICE ft_array<ft_array<float, 2>, 2> multiply_add_twice(FT_THREAD_CONTEXT, const ft_array<Left<T>, 2> a, const Right<T> b, const ft_array<Left<T>, 2> a_next,
                           const Right<T> b_next, ft_array<ft_array<float, 2>, 2> c) {
    return multiply_add<T>(ft, a_next, b_next, multiply_add<T>(ft, a, b, c));
}
FT_DEVICE float matrix_column_max(FT_THREAD_CONTEXT, float x) {
    x = metal::fmax(x, metal::simd_shuffle_xor(x, ushort(2)));
    x = metal::fmax(x, metal::simd_shuffle_xor(x, ushort(4)));
    return metal::fmax(x, metal::simd_shuffle_xor(x, ushort(16)));
}
FT_DEVICE float matrix_column_sum(FT_THREAD_CONTEXT, float x) {
    x += metal::simd_shuffle_xor(x, ushort(16));
    x += metal::simd_shuffle_xor(x, ushort(4));
    return x + metal::simd_shuffle_xor(x, ushort(2));
}
FT_DEVICE float matrix_row_max(FT_THREAD_CONTEXT, float x) {
    x = metal::fmax(x, metal::simd_shuffle_xor(x, ushort(1)));
    return metal::fmax(x, metal::simd_shuffle_xor(x, ushort(8)));
}
FT_DEVICE float matrix_row_sum(FT_THREAD_CONTEXT, float x) {
    x += metal::simd_shuffle_xor(x, ushort(8));
    return x + metal::simd_shuffle_xor(x, ushort(1));
}
#endif
