//! One head of attention.

/// Keys `[tokens, head_dim]`, values `[tokens, value_dim]` and queries `[rows, head_dim]` of one head, row-major.
#[derive(Debug, Clone, Copy)]
#[allow(clippy::exhaustive_structs)]
pub struct Head<'a> {
    /// Keys.
    pub k: &'a [f32],
    /// Values.
    pub v: &'a [f32],
    /// Queries.
    pub q: &'a [f32],
    /// Elements of a key.
    pub head_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    /// Multiplier of `q . k`.
    pub scale: f32,
}
