//! The threads of a launch.

/// The threads of a launch: how many, in how many blocks, with how much shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    /// Blocks along each axis.
    pub blocks: [usize; 3],
    /// Threads of a block.
    pub threads: usize,
    /// Bytes of dynamic shared memory of a block.
    pub shared: usize,
}

impl Grid {
    /// Blocks, threads and bytes as the driver takes them; `None` where a number does not fit.
    pub(super) fn numbers(&self) -> Option<([u32; 3], u32, u32)> {
        let number = |n: usize| u32::try_from(n).ok();
        let [x, y, z] = self.blocks.map(number);
        Some(([x?, y?, z?], number(self.threads)?, number(self.shared)?))
    }
}
