FT_DEVICE float loops(FT_THREAD_CONTEXT, const uint n, const size_t m) {
    auto sum = 0.0f;
    for (uint i = 0; i < n; ++i) {
        sum += ft_cast<float>(i);
    }
    for (uint i = 0, i_end = n * 2; i < i_end; ++i) {
        if (i == 3) {
            continue;
        }
        sum += ft_cast<float>(i);
    }
    for (uint i = 1, i_more = i <= n; i_more > 0; i_more = i < n, i += i_more) {
        sum += ft_cast<float>(i);
    }
    FT_UNROLL
    for (uint i = 1; i <= 8; ++i) {
        sum += ft_cast<float>(i);
    }
    for (uint i = 0, i_left = i < n ? (n - i - 1) / 4 + 1 : 0; i_left > 0; --i_left, i += 4) {
        sum += ft_cast<float>(i);
    }
    auto step = size_t(1);
    const auto step_2 = step;
    for (uint i = n, i_end = n + 100, i_left = i < i_end ? (i_end - i - 1) / step_2 + 1 : 0; i_left > 0; --i_left, i += step_2) {
        step += 1;
        sum += ft_cast<float>(i);
    }
    for (uint i = n; i > 0;) {
        --i;
        sum += ft_cast<float>(i);
    }
    for (uint i = n * n; i > n;) {
        --i;
        sum += ft_cast<float>(i);
    }
    FT_UNROLL
    for (size_t i = 0; i < m; ++i) {
        sum += ft_cast<float>(i);
    }
    FT_UNROLL
    for (uint unused = 0; unused < 4; ++unused) {
        sum += 1.0f;
    }
    auto j = n;
    while (j > 0 && sum < 100.0f) {
        j -= 1;
        while (true) {
            sum -= 1.0f;
            if (sum < 50.0f) {
                break;
            }
        }
    }
    for (decltype(+count(ft, n)) i = 0, i_end = count(ft, n); i < i_end; ++i) {
        sum += ft_cast<float>(i);
    }
    return sum;
}

template <size_t N, bool WIDE>
FT_DEVICE float constants(FT_THREAD_CONTEXT, const ft_array<float, N> x) {
    static_assert(N % 4 == 0 && N >= 8, "N is a multiple of 4");
    auto sum = 0.0f;
    FT_UNROLL
    for (size_t i = 0; i < N; ++i) {
        sum += x[i];
    }
    FT_UNROLL
    for (size_t i = 0, i_left = i < N ? (N - i - 1) / 8 + 1 : 0; i_left > 0; --i_left, i += 8) {
        sum += x[i];
    }
    FT_UNROLL
    for (size_t i = N; i > 0;) {
        --i;
        sum += x[i];
    }
    FT_UNROLL
    for (size_t i = 0, i_more = i <= N; i_more > 0; i_more = i < N, i += i_more) {
        sum -= ft_cast<float>(i);
    }
    if (WIDE) {
        return sum * 2.0f;
    } else {
        return sum;
    }
}

FT_DEVICE uint values(FT_THREAD_CONTEXT, const uint a, const bool b, FT_PARAMS(Params) params) {
    const auto x = b ? a : 0u;
    const auto y = a > 3 ? 1u : a > 2 ? x : 3u;
    uint z;
    if (b) {
        const auto t = a * 2;
        z = t + 1;
    } else if (a == 7) {
        return 5;
    } else {
        z = y;
    }
    uint w;
    {
        const auto t = z * z;
        w = t + 1;
    }
    auto v = w;
    v = b ? v : v + 1;
    if (b) {
        const auto t = v + 1;
        v = t * t;
    } else {
        v = v + 1;
    }
    {
        const auto v_2 = 5u;
        (void)next(ft, v_2);
        next(ft, v_2);
    }
    const auto u = ft_select(params.n > a, params.n, 7);
    if (a > u) {
        if (b) {
            return v;
        } else {
            return w;
        }
    }
    if (v > 3) {
        const auto s = v;
        return s;
    } else {
        return v;
    }
}

FT_DEVICE void nothing(FT_THREAD_CONTEXT, FT_REF(float) x) {
    if (x < 0.0f) {
        return;
    }
    x = ft_sqrt(x);
    x *= 2.0f;
}

FT_DEVICE ft_i64 steps(
    FT_THREAD_CONTEXT,
    const int low,
    const int high,
    const ft_i64 from,
    const Ends ends,
    uint step) {
    auto sum = ft_i64(0);
    for (uint i_at = uint(low), i_left = ft_steps<int>(low, high, 4); i_left > 0; --i_left, i_at += 4) {
        const int i = int(i_at);
        sum += ft_cast<ft_i64>(i);
    }
    const auto step_2 = ft_cast<size_t>(step);
    for (uint i_at = uint(-7), i_left = ft_steps<int>(-7, high - low, step_2); i_left > 0; --i_left, i_at += step_2) {
        const int i = int(i_at);
        step += 1;
        sum += ft_cast<ft_i64>(i);
    }
    const auto start = low + 1;
    for (uint unused_at = uint(start), unused_left = ft_steps<int>(start, 1, 3); unused_left > 0; --unused_left, unused_at += 3) {
        sum += 1;
    }
    for (ulong i_at = ulong(from), i_left = ft_steps<ft_i64>(from, -ft_i64(3000000000u), size_t(5000000000ul)); i_left > 0; --i_left, i_at += size_t(5000000000ul)) {
        const ft_i64 i = ft_i64(i_at);
        sum += i;
    }
    for (ft_unsigned<decltype(+ends.low)> i_at = ft_unsigned<decltype(+ends.low)>(ends.low), i_left = ft_steps<decltype(+ends.low)>(ends.low, ends.high, 2); i_left > 0; --i_left, i_at += 2) {
        const decltype(+ends.low) i = decltype(+ends.low)(i_at);
        sum += ft_cast<ft_i64>(i);
    }
    for (ft_unsigned<decltype(+ends.high)> i_at = ft_unsigned<decltype(+ends.high)>(0), i_left = ft_steps<decltype(+ends.high)>(0, ends.high, 2); i_left > 0; --i_left, i_at += 2) {
        const decltype(+ends.high) i = decltype(+ends.high)(i_at);
        sum += ft_cast<ft_i64>(i);
    }
    FT_UNROLL
    for (uint i_at = uint(-8), i_left = ft_steps<int>(-8, 8, 2); i_left > 0; --i_left, i_at += 2) {
        const int i = int(i_at);
        sum += ft_cast<ft_i64>(i);
    }
    return sum;
}
