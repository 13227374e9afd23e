//! Counts of a launch.

/// Counts of one launch on the simulator, over all its threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// Bytes read from buffers.
    pub device_read: u64,
    /// Bytes written to buffers.
    pub device_written: u64,
    /// Bytes read from shared arrays.
    pub shared_read: u64,
    /// Bytes written to shared arrays.
    pub shared_written: u64,
    /// Atomic operations.
    pub atomics: u64,
    /// SIMD operations, each counted once for its SIMD group: matrix operations, exchanges and barriers of SIMD groups.
    pub simd_operations: u64,
    /// SIMD operations by which a lane learns of the values of other lanes: shuffles, votes, sums. A sum over a SIMD group is one of
    /// them, whatever a device makes of it.
    pub exchanges: u64,
    /// Products of two 8x8 matrices, each with its sum, counted once for their SIMD group.
    pub matrix_products: u64,
    /// 8x8 matrices that SIMD groups load from memory. Their bytes count as read too.
    pub matrix_loads: u64,
    /// 8x8 matrices that SIMD groups store to memory. Their bytes count as written too.
    pub matrix_stores: u64,
    /// Barriers, each counted once for its threadgroup.
    pub barriers: u64,
    /// Barriers of SIMD groups, each counted once for its SIMD group.
    pub simd_barriers: u64,
    /// Calls of `exp2` and `exp`, each counted once for its thread.
    pub exponentials: u64,
}

/// Counts of the accesses of one launch to one of its buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BufferReport {
    /// The parameter.
    pub name: &'static str,
    /// Bytes read, each as often as a thread reads it.
    pub read: u64,
    /// Bytes that some thread reads, each once; in whole elements of the memory.
    pub distinct_read: u64,
    /// Bytes written, each as often as a thread writes it.
    pub written: u64,
}
