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
    /// SIMD operations, each counted once for its SIMD group.
    pub simd_operations: u64,
    /// Barriers, each counted once for its threadgroup.
    pub barriers: u64,
}
