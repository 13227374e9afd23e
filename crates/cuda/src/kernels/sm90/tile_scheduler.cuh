// The order in which a block of threads computes work tiles.

// Synchronizes the threads that copy keys.
DEVICE void sync_loaders() {
    if (TMA) __syncwarp();
    else named_barrier_sync<LOADERS>(CONSUMER_BARRIER + CONSUMERS);
}

// The number of blocks in the grid, read where it is needed: otherwise the compiler keeps it in one of a producer thread's few registers.
DEVICE u32 num_blocks() {
    u32 n;
    asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(n));
    return n;
}

// The entry after a work tile, NONE after the last: of this block's list, or the next in the queue of all blocks. A block asks the queue only
// when it has started all copies of keys, else it would keep work tiles from others that could begin them at once.
DEVICE u32 next_entry(const PrefillParams& params, PrefillMemory& memory, const WorkTile& work_tile) {
    if (!params.queued) return work_tile.next ? work_tile.next : NONE;
    if (threadIdx.x % LOADERS == 0) {
        u32* counter = (u32*)params.forward.counters;
        const u32 ticket = atomicAdd(counter, 1u), entry = ticket + num_blocks();
        // Every work tile but each block's first is taken by a ticket, and every block is told by one that there are no more.
        if (ticket + 1 == params.queued) *counter = 0;
        memory.next_entry = entry < params.queued ? entry : NONE;
    }
    sync_loaders();
    const u32 entry = memory.next_entry;
    sync_loaders();
    return entry;
}
