// Barriers in shared memory (mbarrier): threads and asynchronous copies arrive, threads wait. A phase ends when all have arrived; phase n
// has parity n % 2.

// For `count` arrivals a phase. `mbarrier_publish` follows the last of a block.
DEVICE void mbarrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Shows barriers that this thread has made to asynchronous copies; other threads see them after a barrier of the block.
DEVICE void mbarrier_publish() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void mbarrier_arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }

// Arrives, and has the phase wait for `bytes` bytes of copies besides.
DEVICE void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Returns true if the phase with this parity has ended. The thread may sleep for a while before it returns false.
DEVICE bool mbarrier_try_wait(u32 barrier, u32 parity) {
    u32 ended;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(ended) : "r"(barrier), "r"(parity) : "memory");
    return ended;
}

// Returns true if the phase with this parity has ended, at once.
DEVICE bool mbarrier_test(u32 barrier, u32 parity) {
    u32 ended;
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(ended) : "r"(barrier), "r"(parity) : "memory");
    return ended;
}

// Waits for the end of the phase of a parity.
DEVICE void mbarrier_wait(u32 barrier, u32 parity) {
    while (!mbarrier_try_wait(barrier, parity)) {}
}

// A place in a ring of STAGES tiles. `full` and `empty` are the first of STAGES barriers each: one that copies end, and one where every
// consumer arrives.
template <int STAGES>
struct RingStage {
    // Counts through the ring twice: in one register for both.
    u32 count = 0;

    DEVICE u32 stage() const { return count < STAGES ? count : count - STAGES; }

    DEVICE u32 parity() const { return count >= STAGES; }

    // Waits, as a consumer, for this stage's tile.
    DEVICE void wait_full(u32 full) const { mbarrier_wait(full + 8 * stage(), parity()); }

    // Returns true if this stage's tile has arrived.
    DEVICE bool test_full(u32 full) const { return mbarrier_test(full + 8 * stage(), parity()); }

    // Waits, as a producer, until this stage's last tile was consumed. The first pass through the ring waits for nothing.
    DEVICE void wait_empty(u32 empty) const { mbarrier_wait(empty + 8 * stage(), parity() ^ 1); }

    DEVICE void advance() {
        if (++count == 2 * STAGES) count = 0;
    }
};

// ---- registers: every warp of a warpgroup gives up registers that it was launched with, or takes ones that others gave up.

template <int REGISTERS>
DEVICE void release_registers() {
    static_assert(REGISTERS % 8 == 0);
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
DEVICE void take_registers() {
    static_assert(REGISTERS % 8 == 0);
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
