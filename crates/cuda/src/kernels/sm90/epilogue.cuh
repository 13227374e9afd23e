// The end of a work tile: rows are divided by row_sum and stored, or left as a partial result.

// Ends a warp's rows, whose row_sum is of a lane's own columns.
DEVICE RowEnds reduce_and_end_rows(const ForwardParams& p, const WorkTile& work_tile, u32 first_row, const RowStats& stats) {
    RowStats reduced = stats;
    reduced.reduce_row_sum(p);
    return end_rows(p, work_tile, first_row, reduced);
}

// Stores a warp's rows. Returns false if a stored element is infinite or NaN: the rows may be wrong, and the caller stores them again.
DEVICE bool store_if_finite(const ForwardParams& p, const WorkTile& work_tile, u32 first_row, const OnlineSoftmax& acc, const RowEnds& ends) {
    // Without TMA there are too few registers to keep the address of the work tile. With TMA, finding it again was 1 % slower at D 64.
    store_lse(p, TMA ? work_tile : *opaque(&work_tile), first_row, ends);
    u32 nonfinite = 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 sum = 0;
        const RowOut row = ends.rows[half];
        store_words(row, value_columns(p, work_tile), [&](int n) {
            const float(&o)[4] = acc.out[0][n];
            u32 word = pack<DTYPE>(o[2 * half] * row.factor, o[2 * half + 1] * row.factor);
            sum = add_zero_times<DTYPE>(sum, word);
            return word;
        });
        nonfinite |= sum & 0x7fff7fffu;
    }
    return !__any_sync(ALL_LANES, nonfinite != 0);
}

// Stores a warp's rows of 16 bits element by element: rows that `store_if_finite` does not take because an element is infinite or NaN, or because
// vectors of four columns do not fit them. A loop over fragments keeps the code short, which compiles faster.
DEVICE void store_elements(const ForwardParams& p, const WorkTile& work_tile, u32 first_row, const OnlineSoftmax& acc) {
    const RowEnds ends = end_rows(p, work_tile, first_row, acc);
    store_lse(p, work_tile, first_row, ends);
    const u32 t = opaque(threadIdx.x % 4), columns = value_columns(p, work_tile);
#pragma unroll 1
    for (int n = 0; n < PV_MMA_N; n++) {
        float out[4];
#pragma unroll
        for (int m = 0; m < PV_MMA_N; m++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (m == n) out[i] = acc.out[0][m][i];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const RowOut row = ends.rows[i / 2];
            const u32 column = 8 * n + 2 * t + i % 2;
            if (row.at && column < columns) store_element(row.at, column, finite_mean(out[i], row.factor, 1.f));
        }
    }
}

// Stores a warp's rows of a work tile in the output. Rows of a split are stored as its partial, and the consumer then joins the merge of the tile's
// splits (`merge_splits`): it waits for the other splits if it has nothing else to do.
DEVICE void store(const Consumer& consumer, const RingStage<WORK_TILE_STAGES>& tile_at, const OnlineSoftmax& acc) {
    const ForwardParams& p = consumer.params.forward;
    const WorkTile& work_tile = consumer.memory.staged[tile_at.stage()].work_tile;
    if (work_tile.splits <= 1) {
        if (DTYPE == F32) store_rows(p, work_tile, consumer.first_row, acc);
        else store_elements(p, work_tile, consumer.first_row, acc);
        return;
    }
    store_split(p, work_tile, consumer.first_row, acc);
    u32 first_row = consumer.part * CONSUMER_ROWS, rows = tile_row_count(p, work_tile, first_row, CONSUMER_ROWS);
    MergeTeam merge = {consumer.index, CONSUMERS, consumer.memory.merge_messages + consumer.index, CONSUMER_BARRIER + (int)consumer.index,
                       first_row, rows, threadIdx.x / 32 % CONSUMER_WARPS, CONSUMER_WARPS};
    merge_splits<WARPGROUP_THREADS>(p, work_tile, merge, consumer.is_last(tile_at));
}

// Ends the work tile at `tile_at`: recomputes sums that are not finite, and stores the warp's rows or merges them.
template <typename Mainloop>
DEVICE void end_work_tile(const Consumer& consumer, const RingStage<WORK_TILE_STAGES>& tile_at, Mainloop& mainloop) {
    const ForwardParams& p = consumer.params.forward;
    const StagedTile& staged = consumer.memory.staged[tile_at.stage()];
    const WorkTile& work_tile = staged.work_tile;
    OnlineSoftmax& acc = mainloop.acc;
    auto row_ends = [&] {
        if constexpr (Mainloop::ENDS_EARLY) return mainloop.ends;
        else return reduce_and_end_rows(p, work_tile, consumer.first_row, acc);
    };
    if constexpr (DTYPE != F32)
        if (work_tile.splits <= 1 && has_vector_columns(p, work_tile) &&
            store_if_finite(p, work_tile, consumer.first_row, acc, row_ends()))
            return;
    const bool recompute = __any_sync(ALL_LANES, acc.needs_recompute(may_mask(p, work_tile)));
    if (recompute) recompute_out(p, work_tile, consumer.first_row, staged.rows + consumer.first_row, acc);
    acc.reduce_row_sum(p);
    if (CAN_OVERFLOW && recompute) acc.unshrink();
    store(consumer, tile_at, acc);
}
