FT_DEVICE ft_i64 beside_known_types(
    FT_THREAD_CONTEXT,
    const int a,
    const uint b,
    const ft_i64 c,
    const ulong d,
    const size_t n) {
    auto e = c + -ft_i64(3000000000u);
    e += -ft_i64(3000000000u);
    e -= -ft_i64(0xb2d05e00u);
    e ^= ft_i64(3000000000u);
    e &= -ft_i64(0x80000001u);
    const auto least = (c & ft_i64(0x8000000000000000ul)) + ft_cast<ft_i64>(a | (-2147483647 - 1));
    const auto less = c < -ft_i64(2147483649u) || (-2147483647 - 1) > c || c == (-2147483647 - 1) || a < (-2147483647 - 1);
    const auto twice = c * -(-ft_i64(2147483648u));
    const auto words = b ^ 0xffffffffu ^ 4294967295u;
    const auto wide = d ^ ulong(18446744073709551615ul) ^ ulong(3000000000u) ^ ulong(5000000000ul) ^ ft_cast<ulong>(n);
    return e + (less ? -ft_i64(3000000000u) : ft_i64(5)) + least + twice + ft_cast<ft_i64>(words) + ft_cast<ft_i64>(wide);
}

FT_DEVICE bool beside_unknown_types(FT_THREAD_CONTEXT, const Held s, const bool low) {
    auto t = s;
    t.wide += -ft_i64(3000000000u);
    t.wide = -ft_i64(0xffffffffu);
    t.wide -= low ? ft_i64(3000000000u) : -ft_i64(5);
    t.wide ^= -(low ? ft_i64(2147483648u) : ft_i64(7));
    const auto a = s.wide + -ft_i64(4294967296ul) - (-2147483647 - 1) + ft_i64(4294967295u);
    const auto b = -ft_i64(3000000000u) - wide(ft, -ft_i64(3000000000u));
    const auto c = ft_array<ft_i64, 3>{{s.wide, -ft_i64(3000000000u), ft_i64(3000000000u)}};
    const auto d = 7 % s.wide + ft_cast<ft_i64>(s.word) % -3 + 3000000000u % t.wide + ft_rem(s.wide, t.wide);
    const auto e = s.word ^ (low ? 3000000000u : 5);
    const auto f = ft_array<ft_i64, 2>{{-ft_i64(3000000000u), ft_i64(3000000000u)}};
    return a < -ft_i64(3000000000u) && b > s.wide && c[1] == -ft_i64(5000000000ul) && d != ft_i64(2147483648u) && e > 2147483648u && f[0] < 0;
}

FT_DEVICE ft_i8 narrow(FT_THREAD_CONTEXT, const Held s, const bool low) {
    const auto a = ft_i8(-128);
    const ft_array<short, 2> b = ft_array<short, 2>{{short(-32768), short(-(short(-7)))}};
    const auto c = ft_repeat<2>(ft_i8(-5));
    const auto d = low ? s.tiny : ft_i8(-5);
    const auto e = int(ushort(short(-32768))) + int(ft_i8(-1));
    if (e < ft_cast<int>(b[0])) {
        return a;
    } else if (low) {
        return c[0];
    } else {
        return d;
    }
}

FT_DEVICE ft_i64 constants(FT_THREAD_CONTEXT) {
    const auto a = of<(-2147483647 - 1)>(ft) + of<-3>(ft);
    const auto b = ft_repeat<0x10>(0u);
    const auto c = ft_i64(-ft_i64(3000000000u)) + ft_i64((-2147483647 - 1)) + ft_i64(0xffffffffu);
    const auto d = int(-ft_i64(5)) + int(-ft_i64(3000000000u));
    return c + a + ft_cast<ft_i64>(b[3]) + ft_cast<ft_i64>(d);
}
