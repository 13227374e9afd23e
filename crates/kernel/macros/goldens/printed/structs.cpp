// A value and where it stands.
template <typename T, size_t N>
struct Best {
    ft_array<T, N> value;
    // The index.
    uint index;
    bool signed_;
};

struct Nested {
    Pair inner;
    float weight;
};

template <typename T, size_t N>
FT_DEVICE Best<T, N> make(FT_THREAD_CONTEXT, const ft_array<T, N> value, const uint index) {
    Best<T, N> result;
    result.index = index;
    result.value = value;
    result.signed_ = index > 3;
    return result;
}

FT_DEVICE Nested update(FT_THREAD_CONTEXT, const uint index, const Best<float, 4> other) {
    Best<float, 4> best;
    best.index = 0;
    best.value = ft_repeat<4>(0.0f);
    best.signed_ = false;
    Best<ft_f16, 8> again;
    again.index = index;
    again.value = ft_repeat<8>(ft_from_f32<ft_f16>(1.0f));
    again.signed_ = true;
    if (other.value[0] > best.value[0]) {
        best = other;
    }
    best.index += again.index;
    Pair pair;
    pair.a = best.value[0];
    pair.b = best.index;
    Pair pair_2;
    pair_2.a = pair.a;
    if (pair.b > 3) {
        const auto t = pair.b;
        pair_2.b = t * 2;
    } else {
        pair_2.b = 0;
    }
    if (pair_2.b == 7) {
        Nested result;
        result.inner = pair_2;
        result.weight = 0.5f;
        return result;
    }
    Nested result;
    result.inner.a = 1.0f;
    result.inner.b = 2;
    result.weight = pair_2.a;
    return result;
}

// Buffers that are passed together.
template <typename T>
struct Rows {
    // Row after row.
    FT_BUFFER(T) elements;
    FT_BUFFER(uint) table;
    uint stride;
};

template <typename T>
FT_DEVICE float element_of(FT_THREAD_CONTEXT, const Rows<T> rows, const uint index) {
    return ft_to_f32(rows.elements[rows.table[index] * rows.stride]) + at(ft, rows.elements, index);
}

template <typename T>
FT_DEVICE float first_of(FT_THREAD_CONTEXT, FT_BUFFER(T) elements, FT_BUFFER(uint) table) {
    Rows<T> rows;
    rows.elements = elements;
    rows.table = table;
    rows.stride = 2;
    const auto two = ft_load<2>(rows.elements, 4);
    return ft_to_f32(two[1]) + element_of(ft, rows, 0);
}

struct Both {
    Rows<float> rows;
    ft_array<Rows<ft_f16>, 2> two;
    uint first;
};
