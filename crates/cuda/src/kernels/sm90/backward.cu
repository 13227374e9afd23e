// The backward pass of attention for compute capability 9.0: d_q, d_k and d_v in five products, with the same bits in every run.
//
// A cluster of two blocks has 256 keys of a key/value head, and goes through the tiles of query rows that see them. Both blocks compute scores and
// d_k, d_v of their own 128 keys; each computes d_q of every second tile over the keys of both, of gradients of scores that the other sends. So a
// tile of d_q is added to memory once for 256 keys, in turn: steps.cuh has the order.

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1) backward(const __grid_constant__ Sm90BackwardParams params) {
    const BackwardParams& p = params.backward;
    extern __shared__ __align__(1024) u8 bytes[];
    BackwardMemory& memory = *(BackwardMemory*)bytes;
    const u32 group = uniform(threadIdx.x / WARPGROUP_THREADS), rank = cluster_rank();
    const Work work(p);
    if (threadIdx.x == 0) init_barriers(memory);
    cluster_sync();
    if (group == COPY_GROUP) {
        release_registers<COPY_REGISTERS>();
        const u32 thread = threadIdx.x % WARPGROUP_THREADS;
        if (work.steps && thread == 0) copy_tiles(params, work, memory, rank);
        if (work.steps && thread == 32) add_tiles(p, work, memory, rank);
    } else if (group == D_Q_GROUP) {
        release_registers<D_Q_REGISTERS>();
        if (work.steps) compute_d_q(p, work, memory, rank);
    } else {
        take_registers<KEY_REGISTERS>();
        KeyGroup keys(params, work, memory, rank);
        if (work.steps) keys.compute();
        keys.store();
    }
    __syncwarp();
    // Nobody writes to a block's shared memory, or arrives at its barriers, after its end.
    cluster_sync();
}
