// Definitions that both targets share.
#ifdef FT_METAL
// There is no offsetof: a struct whose size is the sum of its fields' has no padding, so offsets are sums of sizes too.
#define FT_LAYOUT(S, field, offset) static_assert(sizeof(S) >= offset + sizeof(S::field), "layout of " #S "." #field)
#else
#define FT_LAYOUT(S, field, offset) static_assert(FT_OFFSET(S, field) == offset, "layout of " #S "." #field)
#endif
#define FT_SIZE(S, bytes) static_assert(sizeof(S) == bytes, "size of " #S)

FT_DEVICE uint ft_thread_position(FT_THREAD_CONTEXT) {
    return ft_group_x(ft) * ft_threads(ft) + ft_thread_index(ft);
}

// Arrays that are values.
template <typename T, size_t N> struct ft_array {
    T elements[N];
#ifdef FT_METAL
    thread T& operator[](size_t i) thread { return elements[i]; }
    const thread T& operator[](size_t i) const thread { return elements[i]; }
    // Of params.
    const constant T& operator[](size_t i) const constant { return elements[i]; }
#else
    FT_DEVICE T& operator[](size_t i) { return elements[i]; }
    FT_DEVICE const T& operator[](size_t i) const { return elements[i]; }
#endif
};
// A copy: no part of memory.
template <typename T> FT_DEVICE T ft_value(T x) { return x; }
template <typename T, typename... More> FT_DEVICE ft_array<T, 1 + sizeof...(More)> ft_array_of(T first, More... more) {
    return {{first, T(more)...}};
}
template <size_t N, typename T> FT_DEVICE ft_array<T, N> ft_repeat(T x) {
    ft_array<T, N> all;
    FT_UNROLL
    for (size_t n = 0; n < N; n++) {
        all.elements[n] = x;
    }
    return all;
}

// Types.
template <typename T> struct ft_type;
#define FT_INTEGER(T, U, SIGNED, WIDTH, MIN, MAX) \
    template <> struct ft_type<T> { \
        typedef U unsigned_type; \
        static FT_DEVICE T most() { return MAX; } \
        static FT_DEVICE T least() { return MIN; } \
        static FT_DEVICE uint bits() { return WIDTH; } \
        static FT_DEVICE bool negative(T x) { return SIGNED && (U(x) >> (WIDTH - 1)) != 0; } \
        static FT_DEVICE T cast(T x) { return x; } \
        template <typename X> static FT_DEVICE T cast(X x) { return T(x); } \
        /* The bounds as floats: the least is exact, the greatest + 1 too. */ \
        static FT_DEVICE T cast(float x) { \
            return x > float(MIN) ? (x < float(MAX / 2 + 1) * 2.0f ? T(x) : T(MAX)) : ((x <= float(MIN)) ? T(MIN) : T(0)); \
        } \
    };
FT_INTEGER(uchar, uchar, false, 8, 0, 255)
FT_INTEGER(ft_i8, uchar, true, 8, -128, 127)
FT_INTEGER(ushort, ushort, false, 16, 0, 65535)
FT_INTEGER(short, ushort, true, 16, -32768, 32767)
FT_INTEGER(uint, uint, false, 32, 0u, 4294967295u)
FT_INTEGER(int, uint, true, 32, (-2147483647 - 1), 2147483647)
FT_INTEGER(ulong, ulong, false, 64, ulong(0), ulong(18446744073709551615ul))
FT_INTEGER(ft_i64, ulong, true, 64, (-ft_i64(9223372036854775807ul) - 1), ft_i64(9223372036854775807ul))
template <> struct ft_type<float> {
    static FT_DEVICE float most() { return 3.40282347e38f; }
    static FT_DEVICE float least() { return -3.40282347e38f; }
    template <typename X> static FT_DEVICE float cast(X x) { return float(x); }
};
template <> struct ft_type<bool> {
    static FT_DEVICE bool cast(bool x) { return x; }
};
template <typename T> FT_DEVICE T ft_max_of() { return ft_type<T>::most(); }
template <typename T> FT_DEVICE T ft_min_of() { return ft_type<T>::least(); }
template <typename T> FT_DEVICE uint ft_bits_of() { return ft_type<T>::bits(); }
#define ft_min_positive 1.17549435e-38f
#define ft_epsilon 1.1920929e-7f

template <typename T> using ft_unsigned = typename ft_type<T>::unsigned_type;
// Steps of a range.
template <typename T, typename S> FT_DEVICE ft_unsigned<T> ft_steps(T start, typename ft_same<T>::type end, S step) {
    typedef ft_unsigned<T> U;
    return start < end ? (U(end) - U(start) - 1) / step + 1 : 0;
}

// Conversions as Rust's.
template <typename T, typename X> FT_DEVICE T ft_cast(X x) { return ft_type<T>::cast(x); }
template <typename T> FT_DEVICE T ft_from_f32(float x) { return ft_float<T>::from_f32(x); }
template <typename T> FT_DEVICE T ft_from_bits(uint x) { return ft_float<T>::from_bits(x); }

FT_DEVICE bool ft_not(bool x) { return !x; }
template <typename T> FT_DEVICE T ft_not(T x) { return ~x; }
template <typename T> FT_DEVICE T ft_rem(T a, typename ft_same<T>::type b) { return a % b; }
FT_DEVICE float ft_rem(float a, float b) { return ft_fmod(a, b); }
template <typename T> FT_DEVICE T ft_select(bool condition, T a, typename ft_same<T>::type b) {
    return condition ? a : b;
}

// Floats.
FT_DEVICE bool ft_is_nan(float x) { return (ft_to_bits(x) & 0x7fffffffu) > 0x7f800000u; }
FT_DEVICE bool ft_is_finite(float x) { return (ft_to_bits(x) & 0x7fffffffu) < 0x7f800000u; }
FT_DEVICE bool ft_is_infinite(float x) { return (ft_to_bits(x) & 0x7fffffffu) == 0x7f800000u; }
FT_DEVICE float ft_copysign(float x, float sign) {
    return ft_from_bits<float>((ft_to_bits(x) & 0x7fffffffu) | (ft_to_bits(sign) & 0x80000000u));
}
FT_DEVICE float ft_abs(float x) { return ft_from_bits<float>(ft_to_bits(x) & 0x7fffffffu); }
FT_DEVICE float ft_mul_add(float a, float b, float c) { return ft_fma(a, b, c); }
FT_DEVICE float ft_powf(float x, float y) { return ft_powf_of(x, y); }

// Numbers.
FT_DEVICE float ft_min(float a, float b) { return ft_fmin(a, b); }
FT_DEVICE float ft_max(float a, float b) { return ft_fmax(a, b); }
template <typename T> FT_DEVICE T ft_min(T a, typename ft_same<T>::type b) { return b < a ? b : a; }
template <typename T> FT_DEVICE T ft_max(T a, typename ft_same<T>::type b) { return b > a ? b : a; }
template <typename T>
FT_DEVICE T ft_clamp(T x, typename ft_same<T>::type low, typename ft_same<T>::type high) {
    return x < low ? low : (x > high ? high : x);
}

// Integers.
template <typename T> FT_DEVICE T ft_wrapping_add(T a, typename ft_same<T>::type b) {
    typedef typename ft_type<T>::unsigned_type U;
    return T(U(a) + U(b));
}
template <typename T> FT_DEVICE T ft_wrapping_sub(T a, typename ft_same<T>::type b) {
    typedef typename ft_type<T>::unsigned_type U;
    return T(U(a) - U(b));
}
template <typename T> FT_DEVICE T ft_wrapping_mul(T a, typename ft_same<T>::type b) {
    typedef typename ft_type<T>::unsigned_type U;
    return T(U(a) * U(b));
}
template <typename T> FT_DEVICE T ft_wrapping_neg(T a) { return ft_wrapping_sub(T(0), a); }
template <typename T> FT_DEVICE T ft_wrapping_shl(T a, uint by) {
    typedef typename ft_type<T>::unsigned_type U;
    return T(U(a) << (by & (ft_bits_of<T>() - 1)));
}
template <typename T> FT_DEVICE T ft_wrapping_shr(T a, uint by) { return a >> (by & (ft_bits_of<T>() - 1)); }
template <typename T> FT_DEVICE T ft_saturating_add(T a, typename ft_same<T>::type b) {
    const T sum = ft_wrapping_add(a, b);
    if (ft_type<T>::negative(b)) { return sum > a ? ft_min_of<T>() : sum; }
    return sum < a ? ft_max_of<T>() : sum;
}
template <typename T> FT_DEVICE T ft_saturating_sub(T a, typename ft_same<T>::type b) {
    const T difference = ft_wrapping_sub(a, b);
    if (ft_type<T>::negative(b)) { return difference < a ? ft_max_of<T>() : difference; }
    return difference > a ? ft_min_of<T>() : difference;
}
template <typename T> FT_DEVICE T ft_abs(T x) { return ft_type<T>::negative(x) ? -x : x; }
template <typename T> FT_DEVICE typename ft_type<T>::unsigned_type ft_unsigned_abs(T x) {
    typedef typename ft_type<T>::unsigned_type U;
    return ft_type<T>::negative(x) ? U(0) - U(x) : U(x);
}
template <typename T> FT_DEVICE typename ft_type<T>::unsigned_type ft_abs_diff(T a, typename ft_same<T>::type b) {
    typedef typename ft_type<T>::unsigned_type U;
    return a < b ? U(b) - U(a) : U(a) - U(b);
}
template <typename T> FT_DEVICE T ft_div_ceil(T a, typename ft_same<T>::type b) { return a / b + T(a % b != 0); }
template <typename T> FT_DEVICE bool ft_is_multiple_of(T a, typename ft_same<T>::type b) {
    return b == 0 ? a == 0 : a % b == 0;
}
template <typename T> FT_DEVICE T ft_pow(T x, uint exponent) {
    T power = 1;
    for (uint n = 0; n < exponent; n++) {
        power *= x;
    }
    return power;
}
FT_DEVICE uint ft_popcount(ulong x) { return ft_popcount(uint(x)) + ft_popcount(uint(x >> 32)); }
FT_DEVICE uint ft_clz(ulong x) {
    return uint(x >> 32) != 0 ? ft_clz(uint(x >> 32)) : 32 + ft_clz(uint(x));
}
FT_DEVICE ulong ft_reverse(ulong x) { return (ulong(ft_reverse(uint(x))) << 32) | ft_reverse(uint(x >> 32)); }
template <typename T> FT_DEVICE uint ft_count_ones(T x) { return ft_popcount(typename ft_type<T>::unsigned_type(x)); }
template <typename T> FT_DEVICE uint ft_leading_zeros(T x) { return ft_clz(typename ft_type<T>::unsigned_type(x)); }
template <typename T> FT_DEVICE T ft_reverse_bits(T x) { return T(ft_reverse(typename ft_type<T>::unsigned_type(x))); }
template <typename T> FT_DEVICE uint ft_trailing_zeros(T x) { return ft_leading_zeros(ft_reverse_bits(x)); }
template <typename T> FT_DEVICE T ft_rotate_left(T x, uint by) {
    typedef typename ft_type<T>::unsigned_type U;
    const uint mask = ft_bits_of<T>() - 1;
    return T((U(x) << (by & mask)) | (U(x) >> ((0u - by) & mask)));
}
template <typename T> FT_DEVICE T ft_rotate_right(T x, uint by) { return ft_rotate_left(x, 0u - by); }

// Words.
FT_DEVICE ft_array<float, 2> ft_pair_f16(uint word) { return {{ft_low_f16(word), ft_high_f16(word)}}; }
FT_DEVICE ft_array<float, 2> ft_pair_bf16(uint word) {
    return {{ft_from_bits<float>(word << 16), ft_from_bits<float>(word & 0xffff0000u)}};
}

// Lanes.
template <typename T> FT_DEVICE T ft_simd_shuffle(FT_THREAD_CONTEXT, T x, uint lane) { return ft_lane_of(x, lane); }
template <typename T> FT_DEVICE T ft_simd_shuffle_xor(FT_THREAD_CONTEXT, T x, uint mask) { return ft_lane_xor(x, mask); }
template <typename T> FT_DEVICE T ft_simd_broadcast(FT_THREAD_CONTEXT, T x, uint lane) { return ft_lane_of(x, lane); }
#define FT_BUTTERFLY(name, expression) \
    template <typename T> FT_DEVICE T ft_simd_##name(FT_THREAD_CONTEXT, T x) { \
        FT_UNROLL \
        for (uint distance = 16; distance > 0; distance /= 2) { \
            const T y = ft_lane_xor(x, distance); \
            x = expression; \
        } \
        return x; \
    }
FT_BUTTERFLY(sum, x + y)
FT_BUTTERFLY(max, ft_max(x, y))
FT_BUTTERFLY(min, ft_min(x, y))
template <typename T> FT_DEVICE T ft_simd_prefix_sum_inclusive(FT_THREAD_CONTEXT, T x) {
    const uint lane = ft_simd_lane(ft);
    FT_UNROLL
    for (uint distance = 1; distance < 32; distance *= 2) {
        const T y = ft_lane_of(x, (lane - distance) & 31);
        x = lane >= distance ? y + x : x;
    }
    return x;
}
template <typename T> FT_DEVICE T ft_simd_prefix_sum(FT_THREAD_CONTEXT, T x) {
    const uint lane = ft_simd_lane(ft);
    const T before = ft_lane_of(ft_simd_prefix_sum_inclusive(ft, x), (lane - 1) & 31);
    return lane == 0 ? T(0) : before;
}

// Vectors: by 16 bytes, or all at once where they are fewer.
template <size_t BYTES> struct ft_chunk;
template <> struct ft_chunk<1> { typedef uchar type; };
#ifdef FT_METAL
// Vectors, which the compiler lets alias every type.
template <> struct ft_chunk<2> { typedef metal::uchar2 type; };
template <> struct ft_chunk<4> { typedef metal::uchar4 type; };
template <> struct ft_chunk<8> { typedef metal::uint2 type; };
template <> struct ft_chunk<16> { typedef metal::uint4 type; };
#else
template <> struct ft_chunk<2> { typedef ushort type; };
template <> struct ft_chunk<4> { typedef uint type; };
template <> struct ft_chunk<8> { typedef uint2 type; };
template <> struct ft_chunk<16> { typedef uint4 type; };
#endif
template <typename T, size_t N> struct ft_vector {
    enum : size_t { BYTES = sizeof(T) * N < 16 ? sizeof(T) * N : 16 };
    static_assert(sizeof(T) * N % BYTES == 0, "a vector has 1, 2, 4, 8 or a multiple of 16 bytes");
    typedef typename ft_chunk<BYTES>::type chunk;
    union {
        chunk chunks[sizeof(T) * N / BYTES];
        ft_array<T, N> values;
    };
};
#define FT_VECTORS(SPACE) \
    template <typename U, size_t N, typename T> FT_DEVICE ft_array<U, N> ft_load_as(const SPACE T* x, size_t i) { \
        typedef typename ft_vector<U, N>::chunk chunk; \
        const SPACE chunk* from = reinterpret_cast<const SPACE chunk*>(x + i); \
        ft_vector<U, N> vector; \
        FT_UNROLL \
        for (size_t n = 0; n < sizeof(vector) / sizeof(chunk); n++) { \
            vector.chunks[n] = from[n]; \
        } \
        return vector.values; \
    } \
    template <size_t N, typename T> FT_DEVICE ft_array<T, N> ft_load(const SPACE T* x, size_t i) { \
        return ft_load_as<T, N>(x, i); \
    } \
    template <typename U, size_t N, typename T> \
    FT_DEVICE void ft_store_as(SPACE T* x, size_t i, ft_array<U, N> values) { \
        typedef typename ft_vector<U, N>::chunk chunk; \
        SPACE chunk* to = reinterpret_cast<SPACE chunk*>(x + i); \
        ft_vector<U, N> vector; \
        vector.values = values; \
        FT_UNROLL \
        for (size_t n = 0; n < sizeof(vector) / sizeof(chunk); n++) { \
            to[n] = vector.chunks[n]; \
        } \
    } \
    template <size_t N, typename T> FT_DEVICE void ft_store(SPACE T* x, size_t i, ft_array<T, N> values) { \
        ft_store_as(x, i, values); \
    }

template <typename T> FT_DEVICE ft_fragment<T> ft_fragment_filled(T x) {
    ft_fragment<T> f;
    ft_fragment_set_element(f, 0, x);
    ft_fragment_set_element(f, 1, x);
    return f;
}
template <typename T> FT_DEVICE ft_fragment<T> ft_fragment_zero() { return ft_fragment_filled<T>(ft_from_f32<T>(0.0f)); }
#ifdef FT_METAL
FT_VECTORS(device)
FT_VECTORS(threadgroup)
FT_FRAGMENTS(device)
FT_FRAGMENTS(threadgroup)
FT_ATOMICS(device)
FT_ATOMICS(threadgroup)
#else
FT_VECTORS()
FT_FRAGMENTS()
#endif
