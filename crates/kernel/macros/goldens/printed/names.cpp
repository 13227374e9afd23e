FT_DEVICE uint shadows(FT_THREAD_CONTEXT, const uint x) {
    const auto x_2 = x + 1;
    const auto y = x_2;
    {
        const auto x_3 = y * x_2;
        const auto y_2 = x_3;
        (void)next(ft, y_2);
    }
    const auto x_2_2 = x_2;
    for (uint x_3 = x_2; x_3 < x_2_2; ++x_3) {
        const auto x_4 = x_3;
        (void)next(ft, x_4);
    }
    for (uint i = 0; i < x_2; ++i) {
        (void)next(ft, i);
    }
    for (uint i = 0; i < x_2; ++i) {
        (void)next(ft, i);
    }
    return x_2;
}

FT_DEVICE float reserved(
    FT_THREAD_CONTEXT,
    const float float_,
    const uint int_,
    const uint kernel_,
    const float float4_) {
    const auto thread_ = float_ + ft_cast<float>(int_);
    const auto new_ = thread_ * 2.0f;
    const auto int_2 = int_ + kernel_;
    const auto half_ = ft_cast<float>(int_2);
    return new_ + half_ + float4_;
}

FT_DEVICE uint dot_(FT_THREAD_CONTEXT, const uint next) {
    const auto load_2 = next;
    const auto length = load(ft, load_2);
    return length;
}

// Adds.
// Twice.
FT_DEVICE float documented(FT_THREAD_CONTEXT, const float x) {
    return x + x;
}
