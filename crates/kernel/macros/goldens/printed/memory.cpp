// Parameters.
struct Params {
    // Rows.
    uint n;
    float scale;
    ft_array<ulong, 3> strides;
    ft_array<ft_array<int, 2>, 4> signs;
    float float_;
    uint last;
};
FT_LAYOUT(Params, n, 0);
FT_LAYOUT(Params, scale, 4);
FT_LAYOUT(Params, strides, 8);
FT_LAYOUT(Params, signs, 32);
FT_LAYOUT(Params, float_, 64);
FT_LAYOUT(Params, last, 68);
FT_SIZE(Params, 72);

FT_SHARED_ARRAY(float, tile, N * 32);
FT_SHARED_ARRAY(uint, sums, size_t(LANES));
const auto i = ft_thread_position(ft);
tile[i] = ft_to_f32(x[i]) * register_;
tile[ft_thread_index(ft)] += params.scale;
sums[0] |= 1u << ft_simd_lane(ft);
ft_barrier(ft);
const auto lanes = ft_simd_ballot(ft, tile[i] > 0.0f);
const auto v = ft_load<4>(x, i * 4);
const auto w = ft_load_as<ushort, 8>(words, i);
const auto first = ft_load<4>(x, i)[0];
ft_store(out, i * 4, ft_array<T, 4>{{v[0], first, v[2], v[3]}});
ft_store_as(counts, i, ft_array<uint, 2>{{0u, ft_cast<uint>(w[1])}});
const auto old = ft_atomic_add(counts, 0, 1u);
ft_atomic_max(sums, 1, old);
auto seen = ft_atomic_compare_exchange(counts, 1, 0u, lanes);
seen = ft_atomic_exchange(counts, 2, seen);
if (ft_atomic_add(counts, 3, 1u) == params.n - 1) {
    seen = 0;
}
out[params.strides.elements[1] + ft_cast<ulong>(i)] = ft_from_f32<T>(LEVELS[ft_cast<size_t>(i % 4)] + BIAS);
fill(ft, out, tile, sums, params, v);
const auto row = read_row<T, N>(ft, x, params);
if (wide && row[3] > 0.0f) {
    counts[i] -= seen;
}

template <typename T>
FT_DEVICE void fill(
    FT_THREAD_CONTEXT,
    FT_BUFFER_MUT(T) out,
    FT_SHARED_MUT(float) tile,
    FT_SHARED(uint) sums,
    FT_PARAMS(Params) params,
    const ft_array<T, 4> v) {
    for (decltype(+params.n) i = 0; i < params.n; ++i) {
        out[i] = v[i % 4];
        tile[i] = ft_cast<float>(sums[i]);
    }
    fill_again(ft, out, tile, sums, params);
    fill_again(ft, out, tile, sums, params);
}

template <size_t N, size_t R>
FT_DEVICE ft_array<ft_array<float, N>, R> arrays(
    FT_THREAD_CONTEXT,
    FT_REF(ft_array<ft_array<float, N>, R>) acc,
    ft_array<float, N> row,
    FT_REF(float) total,
    FT_REF(Pair) pair) {
    auto copy = acc;
    FT_UNROLL
    for (size_t r = 0; r < R; ++r) {
        FT_UNROLL
        for (size_t c = 0; c < N; ++c) {
            acc[r][c] += row[c];
            copy[r][c] = acc[r][c] * total;
            row[c] = 0.0f;
        }
    }
    total += row[0];
    pair.a = row[0];
    pair.values[1] += row[1];
    reset(ft, copy, total, pair.a);
    return copy;
}

FT_SHARED_ARRAY(float, tile, 64);
auto acc = ft_repeat<2>(ft_fragment_zero<float>());
const auto left = ft_fragment_load<T>(ft, a, 0u, 8u);
const auto right = ft_fragment_load_transposed<T>(ft, b, 8 * ft_group_x(ft), 8u);
FT_UNROLL
for (uint i = 0; i < 2; ++i) {
    acc[i] = ft_fragment_multiply_accumulate(ft, left, right, acc[i]);
}
ft_fragment_set_element(acc[0], 1u, ft_fragment_element(acc[1], 0u) * 2.0f);
ft_fragment_store(ft, acc[0], tile, 0u, 8u);
ft_simd_barrier(ft);
ft_fragment_store(ft, acc[1], out, ft_group_x(ft) * 64, 8u);
out[0] = tile[0] + ft_simd_sum(ft, 1.0f) + ft_simd_shuffle_xor(ft, tile[1], 1u);
