// Copies of tiles by the tensor memory accelerator (TMA), which one thread starts. A TensorMap, which the host encodes, is a parameter of the
// kernel (`__grid_constant__`).

DEVICE void prefetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// Rows of a sequence in a tensor whose map bounds every sequence by itself: of rank 5, (columns, heads, rows, and two dimensions of extent
// 2^31 - 1 whose strides are 2^34 elements less a row, and a row). The rows have an extent of 2^30, and a copy counts them so that the
// sequence's end is the tensor's: rows behind it are written as 0, and not read. The two other dimensions lead back to the sequence:
// addresses wrap at 2^64 bytes.
struct RaggedRows {
    i32 rows, start, end;

    // Of `length` rows, the first of which is the tensor's row `start`.
    DEVICE RaggedRows(u32 start, u32 length) : rows((1 << 30) - (i32)length), start(1 << 30), end((i32)(start + length)) {}

    // Copies a box of the map, from `column` and the sequence's row `row` on; `barrier` counts its bytes, absent rows too.
    DEVICE void load(u32 to, const TensorMap* map, u32 barrier, u32 column, u32 head, u32 row) const {
        asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
                     ::"r"(to), "l"(map), "r"(barrier), "r"(column), "r"(head), "r"(rows + (i32)row), "r"(start), "r"(end) : "memory");
    }
};
