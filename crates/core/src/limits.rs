//! The largest problem that validation accepts.

/// Largest head dimension of q and k, and of v.
pub const MAX_HEAD_DIM: usize = 512;

/// Largest number of query rows, key rows or heads, and largest magnitude of a query offset.
pub const MAX_LEN: usize = (1 << 31) - 1;

/// Largest number of batch entries, or of packed or cached sequences: a validated problem lists each of them.
pub const MAX_SEQUENCES: usize = 1 << 22;

/// Largest magnitude of `scale` and of `scale / softcap`: `2^84`. Products `q . k` of f16 elements are below `2^41`,
/// so that scores in units of log2 are below `2^126`.
pub const MAX_SCALE: f32 = f32::from_bits((84 + 127) << 23);

/// Largest softcap: `2^64`. Before the tanh, scores are in units of the softcap, in which ordinary scores must not be
/// subnormal.
pub const MAX_SOFTCAP: f32 = f32::from_bits((64 + 127) << 23);

/// Largest magnitude of an ALiBi slope: `2^86`. Distances are below `2^33`, so that biases in units of log2 are below
/// `2^120`.
pub const MAX_ALIBI_SLOPE: f32 = f32::from_bits((86 + 127) << 23);
