//! Where the lanes of a SIMD group have the elements of an 8x8 fragment.

/// The row and the first column of the elements of `lane`.
pub(crate) const fn position_of(lane: u32) -> (u32, u32) {
    let quad = lane / 4;
    ((quad & 4) + (lane / 2) % 4, (quad & 2) * 2 + (lane % 2) * 2)
}
