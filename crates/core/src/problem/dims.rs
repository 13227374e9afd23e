//! Logical dimensions.

/// Logical dimensions. Tensors are q `[batch, q_heads, q_len, head_dim]`, k `[batch, kv_heads, kv_len, head_dim]`,
/// v `[batch, kv_heads, kv_len, value_dim]`, out `[batch, q_heads, q_len, value_dim]`, lse `[batch, q_heads, q_len]`.
///
/// Query head `h` reads key/value head `h / (q_heads / kv_heads)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
#[allow(clippy::exhaustive_structs)]
pub struct Dims {
    /// Batch entries; 1 for packed and cached sequences.
    pub batch: usize,
    /// Query heads `H`; a multiple of `kv_heads`.
    pub q_heads: usize,
    /// Key/value heads `Hkv`: equal to `q_heads` for MHA, 1 for MQA.
    pub kv_heads: usize,
    /// Query rows per batch entry; total query rows for packed and cached sequences.
    pub q_len: usize,
    /// Key rows per batch entry, including padding; total key rows for packed sequences; an upper bound of the
    /// lengths for cached sequences, whose keys lie in pages.
    pub kv_len: usize,
    /// Elements of a q or k vector, 1 to [`MAX_HEAD_DIM`](crate::limits::MAX_HEAD_DIM).
    pub head_dim: usize,
    /// Elements of a v or out vector, 1 to [`MAX_HEAD_DIM`](crate::limits::MAX_HEAD_DIM).
    pub value_dim: usize,
}

/// Heads and dimensions of attention over a cache, as every layer of a model has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
#[allow(clippy::exhaustive_structs)]
pub struct HeadShape {
    /// Query heads; a multiple of `kv_heads`.
    pub q_heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of a q or k vector.
    pub head_dim: usize,
    /// Elements of a v or out vector.
    pub value_dim: usize,
}

impl Dims {
    /// Query heads that share one key/value head; 0 without key/value heads.
    #[must_use]
    pub const fn gqa_group(&self) -> usize {
        match self.q_heads.checked_div(self.kv_heads) {
            Some(heads) => heads,
            None => 0,
        }
    }

    /// Shape of q: `[batch, q_heads, q_len, head_dim]`.
    #[must_use]
    pub const fn q_shape(&self) -> [usize; 4] {
        [self.batch, self.q_heads, self.q_len, self.head_dim]
    }

    /// Shape of k: `[batch, kv_heads, kv_len, head_dim]`.
    #[must_use]
    pub const fn k_shape(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.kv_len, self.head_dim]
    }

    /// Shape of v: `[batch, kv_heads, kv_len, value_dim]`.
    #[must_use]
    pub const fn v_shape(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.kv_len, self.value_dim]
    }

    /// Shape of out: `[batch, q_heads, q_len, value_dim]`.
    #[must_use]
    pub const fn out_shape(&self) -> [usize; 4] {
        [self.batch, self.q_heads, self.q_len, self.value_dim]
    }

    /// Shape of lse: `[batch, q_heads, q_len]`.
    #[must_use]
    pub const fn lse_shape(&self) -> [usize; 3] {
        [self.batch, self.q_heads, self.q_len]
    }
}
