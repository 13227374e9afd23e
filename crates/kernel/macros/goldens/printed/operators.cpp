FT_DEVICE uint integers(
    FT_THREAD_CONTEXT,
    const uint a,
    const uint b,
    const int c,
    const ulong d,
    const size_t n) {
    const auto sum = a + b * 3 - (a - b);
    const auto bits = (a & 0xff) | ((b << 8) ^ (a >> 4));
    const auto mask = (a & b) == 0;
    const auto other = ft_not(a);
    const auto negative = -c;
    const auto remainder = a % b;
    const auto wide = d * ulong(3000000000u) + 5;
    const auto wider = d + ulong(0xfffffffffffffffful);
    const auto large = a & 0x80000000u;
    const auto place = n * 4 + ft_cast<size_t>(a);
    const auto least = c + (-2147483647 - 1);
    const auto nested = a - (b - ft_cast<uint>(c));
    const auto compared = ((a < b) == (c < 3) && !mask) || a >= 7;
    if (compared) {
        return sum;
    } else {
        return bits + other + ft_cast<uint>(negative) + remainder + ft_cast<uint>(wide) + ft_cast<uint>(wider) + large + ft_cast<uint>(place) + ft_cast<uint>(least) + nested;
    }
}

FT_DEVICE float floats(FT_THREAD_CONTEXT, const float x, const float y) {
    const auto a = x * 2.0f + 1.0f - 0.001f;
    const auto b = -ft_exp2(x) * ft_max(-1.5f, y);
    const auto c = ft_clamp(ft_mul_add(x, y, 0.5f), 0.0f, 1.0f);
    const auto d = x < y ? (-ft_infinity) : ft_max_of<float>();
    const auto e = ft_from_bits<float>(ft_to_bits(x) ^ 0x80000000u);
    return a + b / c - d * e;
}

FT_DEVICE bool bools(FT_THREAD_CONTEXT, const bool a, const bool b) {
    const auto both = bool(a & b);
    const auto either = bool(bool(a | b) ^ !both);
    auto all = (a && b) || !either;
    all &= b;
    all ^= true;
    return all == either;
}

FT_DEVICE ulong literals(FT_THREAD_CONTEXT) {
    const auto a = 1u;
    const auto b = 2;
    const auto c = ulong(3);
    const uchar d = 4;
    const ft_i64 e = -ft_i64(5);
    const auto f = 0xffu;
    const size_t g = 8;
    const auto h = (-2147483647 - 1);
    const ft_i64 i = ft_i64(0x8000000000000000ul);
    const auto j = 4294967295u;
    const auto k = uchar(97);
    const ulong l = ulong(18446744073709551615ul);
    const auto m = ft_array<uint, 3>{{0u, 1u, 2u}};
    const ft_array<ushort, 3> n = ft_array<ushort, 3>{{ushort(0), ushort(1), ushort(2)}};
    const auto o = ft_repeat<2>(ft_repeat<4>(0.0f));
    const ft_array<ft_array<uint, 2>, 2> p = ft_array<ft_array<uint, 2>, 2>{{ft_repeat<2>(0u), ft_array<uint, 2>{{1u, 2u}}}};
    const auto q = ft_max_of<uint>() - ft_bits_of<int>();
    return c + ft_cast<ulong>(a) + ft_cast<ulong>(b) + ft_cast<ulong>(d) + ft_cast<ulong>(e) + ft_cast<ulong>(f) + ft_cast<ulong>(g) + ft_cast<ulong>(h) + ft_cast<ulong>(i) + ft_cast<ulong>(j) + ft_cast<ulong>(k) + l + ft_cast<ulong>(m[0]) + ft_cast<ulong>(n[1]) + ft_cast<ulong>(o[0][1]) + ft_cast<ulong>(p[1][1]) + ft_cast<ulong>(q);
}

template <size_t N>
FT_DEVICE uint casts(FT_THREAD_CONTEXT, const float x, const int i, const uchar u) {
    const auto a = ft_cast<uint>(x);
    const auto b = ft_cast<uint>(i);
    const auto c = ft_cast<uint>(u);
    const auto d = uint(N);
    const auto e = ulong(5);
    const auto f = ft_i64(-1);
    const auto g = ft_cast<float>(i);
    const auto h = ft_cast<int>(ft_cast<ft_i8>(ft_cast<uchar>(i)));
    return a + b + c + d + ft_cast<uint>(e) + ft_cast<uint>(f) + ft_cast<uint>(g) + ft_cast<uint>(h);
}

FT_DEVICE uint methods(FT_THREAD_CONTEXT, const uint a, const int b, const ulong d, const float x) {
    const auto p = ft_clamp(ft_max(ft_min(a, 7u), ft_unsigned_abs(b)), 1u, 9u);
    const auto q = ft_count_ones(ft_rotate_left(ft_wrapping_add(a, 5u), 3u));
    const auto r = ft_leading_zeros(ft_saturating_sub(d, ulong(1))) + ft_abs_diff(b, -3);
    const auto s = ft_select(ft_is_nan(x), 0u, p);
    const auto t = ft_select(x > 0.0f, 1, b);
    return p + q + r + s + ft_cast<uint>(t) + ft_cast<uint>(ft_round_ties_even(x));
}

FT_DEVICE float remainders(FT_THREAD_CONTEXT, const float x, const float y, const uint a, const Held s) {
    auto left = ft_rem(x, y) + ft_rem(x, 3.0f) * 2.0f;
    left = ft_rem(left, y + 1.0f);
    auto t = s;
    t.x = ft_rem(t.x, y);
    t.n %= 7;
    t.n %= a;
    t.n = ft_rem(t.n, s.n);
    return left + ft_rem(t.x, s.x) + ft_cast<float>(t.n % 5 + 5 % t.n + ft_rem(s.n, t.n));
}
