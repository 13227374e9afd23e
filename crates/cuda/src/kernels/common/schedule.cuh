// Work tiles: the work of a block of threads, and the addresses of its rows.
//
// A work tile is BLOCK_M query rows of one key/value head over a range of keys. A row is a pair (position,
// head of the GQA group), ordered by position. WorkTile, Tensor, Divisor and ForwardParams are declared in
// Rust (`plan/work_tile.rs`, `params.rs`) and printed before this file.

// The sequence of a work tile that does not exist; a tile or a partial that does not.
constexpr u32 NONE = 0xffffffffu;
// Of WorkTile::splits: splits are merged in groups of MERGE_GROUP first, into the partials behind them.
constexpr u32 SPLITS_GROUPED = 0x80000000u;

// x / d for x < 2^31.
DEVICE u32 quotient(u32 x, const Divisor& d) { return (u32)(((u64)x * d.multiplier) >> d.shift); }

DEVICE u32 num_splits(const WorkTile& work_tile) { return work_tile.splits & ~SPLITS_GROUPED; }

// Entry `entry` of the launch's work tiles.
DEVICE const WorkTile* work_tile_at(const ForwardParams& p, u32 entry) { return (const WorkTile*)p.work_tiles + entry; }

// Rows of the sequence and key/value head of a work tile.
DEVICE u32 row_count(const ForwardParams& p, const WorkTile& work_tile) { return work_tile.q_len * p.gqa_group.value; }

// The number of rows of a work tile's tile that exist, from its row `first` on and at most `most`.
DEVICE u32 tile_row_count(const ForwardParams& p, const WorkTile& work_tile, u32 first, u32 most) {
    u32 rest = row_count(p, work_tile) - work_tile.row;
    return rest <= first ? 0 : rest - first < most ? rest - first : most;
}

// The panel of values whose columns this thread's team computes.
DEVICE u32 value_panel(const WorkTile& work_tile) { return work_tile.panel * VALUE_CONSUMERS + value_consumer(); }

// The columns of values from that panel on: none where another team has the last.
DEVICE u32 value_columns(const ForwardParams& p, const WorkTile& work_tile) {
    u32 before = value_panel(work_tile) * VALUE_DIM;
    return VALUE_CONSUMERS > 1 && before > p.value_dim ? 0 : p.value_dim - before;
}

// The tile of keys behind the last of a work tile.
DEVICE u32 end_block(const WorkTile& work_tile) { return (work_tile.end + BLOCK_N - 1) / BLOCK_N; }

// A row's position in its sequence, and its query head.
struct QRow {
    u32 position, head;
};

DEVICE QRow q_row(const ForwardParams& p, u32 kv_head, u32 row) {
    u32 position = quotient(row, p.gqa_group);
    return {position, kv_head * p.gqa_group.value + (row - position * p.gqa_group.value)};
}

// The address of a row of q or of the output.
DEVICE u64 row_address(const Tensor& tensor, const WorkTile& work_tile, QRow at) {
    return tensor.at + (u64)(work_tile.batch * tensor.batch + at.head * tensor.head + (i64)(work_tile.q_start + at.position) * tensor.row);
}
