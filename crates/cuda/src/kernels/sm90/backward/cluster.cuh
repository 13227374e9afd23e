// Clusters of two blocks of threads: addresses, barriers and copies between their shared memories.

constexpr u32 CLUSTER = 2;

// This block's number in its cluster.
DEVICE u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Waits for all threads of the cluster, and shows them this thread's writes.
DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address of the same place in a block's shared memory.
DEVICE u32 address_in(u32 at, u32 rank) {
    u32 mapped;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(at), "r"(rank));
    return mapped;
}

// Arrives at a barrier of a block of the cluster, without release: what the waiting threads overwrite was only read.
DEVICE void mbarrier_arrive_in(u32 barrier, u32 rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in(barrier, rank)) : "memory");
}

// Copies shared memory to a block's; `barrier`, which that block has, counts the bytes.
DEVICE void copy_to_block(u32 to, u32 from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "r"(from), "r"(bytes), "r"(barrier) : "memory");
}

// Copies device memory to shared memory, multiples of 16 bytes.
DEVICE void copy_from_device(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// Copies shared memory to device memory, and adds shared memory to f32 there, multiples of 16 bytes: in a group of copies.
DEVICE void copy_to_device(void* to, u32 from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
DEVICE void add_to_device(void* to, u32 from, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}

// Rows of a sequence that go to both blocks, and rows that are stored.
struct ClusterRows : RaggedRows {
    DEVICE ClusterRows(u32 start, u32 length) : RaggedRows(start, length) {}

    // `load` to the same place of both blocks, whose barriers count its bytes.
    DEVICE void load_both(u32 to, const TensorMap* map, u32 barrier, u32 column, u32 head, u32 row) const {
        asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                     "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;"
                     ::"r"(to), "l"(map), "r"(barrier), "r"(column), "r"(head), "r"(rows + (i32)row), "r"(start), "r"(end), "h"((u16)3)
                     : "memory");
    }

    // Stores a box of the map; rows behind the sequence are not written.
    DEVICE void store(const TensorMap* map, u32 from, u32 column, u32 head, u32 row) const {
        asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];"
                     ::"l"(map), "r"(from), "r"(column), "r"(head), "r"(rows + (i32)row), "r"(start), "r"(end) : "memory");
    }
};

// Ends a group of copies from shared memory, which the thread has started.
DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until this thread's copies have read their shared memory.
DEVICE void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Waits until this thread's copies have ended.
DEVICE void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Orders this thread's accesses to any memory before copies that follow.
DEVICE void fence_async_proxy_of_all() { asm volatile("fence.proxy.async;" ::: "memory"); }
