// Scores: `softcap(scale * q . k) + bias` in units of log2, and which keys a row sees.

// The part of a bias above HUGE_BIAS (2^126) in magnitude is multiplied by HUGE_RATE instead of log2 e, so that it stays finite
// (docs/numerics.md, "What is exact in the bits").
constexpr float HUGE_BIAS = 8.507059173023462e+37f, HUGE_RATE = 0.5f, HUGE_SCORE = HUGE_BIAS * LOG2E;

// The largest magnitude of an ALiBi slope, 2^86, as the host has it.
constexpr float MAX_ALIBI_SLOPE = 77371252455336267181195264.f;

// Keys that a row sees, within its work tile.
struct UnbiasedRow {
    u32 begin, end;
};

// Keys that a row sees, within its work tile, and the biases of its scores.
struct BiasedRow : UnbiasedRow {
    // The position from which ALiBi counts distances.
    i64 alibi_position;
    float alibi_slope;
    // The first key of the tree mask; rows of the tree mask and of the mask, 0 where there is none.
    u32 tree_key;
    u64 tree_mask, mask;
};

// A row of a tile as scores need it: the keys that it sees, and where there are biases, how it finds them.
typedef Select<Scoring::HAS_BIAS, BiasedRow, UnbiasedRow>::Type Row;

DEVICE u32 clamp(i64 x, u32 max) { return x < 0 ? 0u : x > (i64)max ? max : (u32)x; }

// Keys of a work tile's sequence that a position sees by causality, window and length.
struct KeyRange {
    u32 begin, end;
};

DEVICE KeyRange visible_keys(const ForwardParams& p, const WorkTile& work_tile, i64 position) {
    u32 begin = p.window_left < 0 ? 0 : clamp(position - p.window_left, work_tile.kv_len);
    u32 end = p.window_right < 0 ? work_tile.kv_len : clamp(position + p.window_right + 1, work_tile.kv_len);
    if (p.chunk) {
        // Positions are below 2^32. One before key 0 is in no chunk that has keys.
        u32 at = clamp(position, ~0u), first = at - at % p.chunk;
        begin = max(begin, min(first, work_tile.kv_len));
        end = position < 0 ? 0 : min(end, clamp((i64)first + p.chunk, work_tile.kv_len));
    }
    return {begin, end};
}

// ---- ALiBi

// The slope of a head of a sequence. The host cannot refuse one whose biases would overflow: its rows are NaN.
DEVICE float alibi_slope(const ForwardParams& p, const WorkTile& work_tile, u32 head) {
    float slope = ((const float*)p.alibi_slopes)[work_tile.sequence * p.alibi_stride + head];
    return fabsf(slope) <= MAX_ALIBI_SLOPE ? slope : NAN;
}

// The position from which distances are counted: a row's own, or that of the nearest key that it sees. The distance between the two is
// common to all keys: it changes no probability, and would cost f32 the digits of the distances that do.
DEVICE i64 nearest_visible(const KeyRange& visible, i64 position) {
    if (visible.begin >= visible.end) return position;
    return position < (i64)visible.begin ? visible.begin : position >= (i64)visible.end ? visible.end - 1 : position;
}

// The bias of the distance from a row to `nearest_visible`, which its scores leave out.
DEVICE float alibi_shift(const ForwardParams& p, const WorkTile& work_tile, QRow at) {
    if (!p.alibi_slopes) return 0.f;
    i64 position = work_tile.q_offset + at.position;
    i64 distance = position - nearest_visible(visible_keys(p, work_tile, position), position);
    return -alibi_slope(p, work_tile, at.head) * (float)(distance < 0 ? -distance : distance);
}

// ---- rows

DEVICE void hide_all(UnbiasedRow& row, const ForwardParams&) { row.begin = row.end = 0; }

DEVICE void hide_all(BiasedRow& row, const ForwardParams& p) {
    row.begin = row.end = 0;
    row.alibi_position = 0, row.alibi_slope = 0.f, row.tree_mask = 0, row.mask = p.mask.at, row.tree_key = 0;
}

DEVICE void set_bias(UnbiasedRow&, const ForwardParams&, const WorkTile&, QRow, const KeyRange&, i64) {}

DEVICE void set_bias(BiasedRow& row, const ForwardParams& p, const WorkTile& work_tile, QRow at, const KeyRange& visible, i64 position) {
    row.alibi_position = nearest_visible(visible, position);
    if (p.alibi_slopes) row.alibi_slope = alibi_slope(p, work_tile, at.head) * LOG2E;
    row.tree_key = work_tile.kv_len - work_tile.q_len;
    if (p.tree_mask) row.tree_mask = p.tree_mask + (u64)((work_tile.q_start + at.position) * p.tree_row);
    if (p.mask.at) row.mask = p.mask.at + (u64)(work_tile.sequence * p.mask.batch + at.head * p.mask.head + at.position * p.mask.row);
}

// Row n of a work tile's tile. Rows past the last see no key.
DEVICE Row row_of_tile(const ForwardParams& p, const WorkTile& work_tile, u32 n) {
    Row row;
    hide_all(row, p);
    if (work_tile.row + n >= row_count(p, work_tile)) return row;
    QRow at = q_row(p, work_tile.kv_head, work_tile.row + n);
    i64 position = work_tile.q_offset + at.position;
    KeyRange visible = visible_keys(p, work_tile, position);
    row.begin = visible.begin < work_tile.begin ? work_tile.begin : visible.begin;
    row.end = visible.end > work_tile.end ? work_tile.end : visible.end;
    set_bias(row, p, work_tile, at, visible, position);
    return row;
}

// ---- scores

// The bias of a materialised mask at a key, in units of e.
DEVICE float mask_bias(const ForwardParams& p, u64 row, u32 j) { return mask_value(p.mask_kind, row, (u64)j * p.mask_step); }

// Returns true if a row sees a key.
DEVICE bool is_visible(const ForwardParams&, const UnbiasedRow& row, u32 j) { return j >= row.begin && j < row.end; }

DEVICE bool is_visible(const ForwardParams& p, const BiasedRow& row, u32 j) {
    if (j < row.begin || j >= row.end) return false;
    if (row.tree_mask && j >= row.tree_key && !*(const u8*)(row.tree_mask + (u64)(j - row.tree_key) * p.tree_step)) return false;
    if constexpr (Scoring::HAS_MASK) {
        if (mask_bias(p, row.mask, j) == -INF) return false;
    }
    return true;
}

// A score in units of log2 with the bias of a mask; -inf where that is -inf.
DEVICE float add_bias(float x, float bias) {
    // Comparisons with NaN are false: it stays NaN.
    float core = bias < -HUGE_BIAS ? -HUGE_BIAS : bias > HUGE_BIAS ? HUGE_BIAS : bias;
    float sum = fmaf(bias - core, HUGE_RATE, fmaf(core, LOG2E, x));
    return bias == -INF ? -INF : sum;
}

// ---- the score formula

// The factor from scores, as `score_mod` leaves them, to units of log2. Without a bias they are products q . k until exp2, which multiplies by this
// factor in the same instruction that subtracts row_max; so row_max is a product too, until `reduce_row_sum`.
DEVICE float score_scale(const ForwardParams& p) { return Scoring::HAS_BIAS ? 1.f : p.scale; }

// Scores of products q . k in units of log2, in their place: softcap(scale * q . k) + bias; -inf where the row does not see the key. Tiles
// that are not MASKED are visible to all of their rows, and have no bias of a mask. A score function of the user's belongs here: a row
// is of one sequence, head and query position, which it has no fields for yet (`alibi_position` is the nearest visible key).
//
// A Tile is TileScores (softmax.cuh: the scores of a lane in a tile) or VisibleScore (sm90/recompute.cuh: one score). It has for_each(f(score)) and
// for_each_row(f(row, keys)). The keys of a row have for_each_distance(position, f(score, distance)),
// hide_outside(begin, end), for_each_in(begin, end, f(score, key)) and add_mask(p, row), which takes every bias of an additive mask through add_bias.
template <bool MASKED, typename Tile>
DEVICE void score_mod(const ForwardParams& p, Tile tile) {
    tile.for_each([&](float& x) { x *= p.scale; });
    if (p.softcap != 0.f) tile.for_each([&](float& x) { x = p.softcap * tanh_accurate(x); });
    tile.for_each_row([&](const BiasedRow& row, auto keys) {
        if (row.alibi_slope != 0.f) keys.for_each_distance(row.alibi_position, [&](float& x, float distance) { x = fmaf(-row.alibi_slope, distance, x); });
        if (!MASKED) return;
        keys.hide_outside(row.begin, row.end);
        if constexpr (Scoring::HAS_MASK) keys.add_mask(p, row);
        // Last, so that a NaN or infinite bias of a key that the tree mask hides is overwritten.
        if (row.tree_mask) {
            const u32 first = row.tree_key > row.begin ? row.tree_key : row.begin;
            keys.for_each_in(first, row.end, [&](float& x, u32 j) {
                if (!*(const u8*)(row.tree_mask + (u64)(j - row.tree_key) * p.tree_step)) x = -INF;
            });
        }
    });
}
