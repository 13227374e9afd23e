//! The Walsh-Hadamard transform as plain loops.

/// Element types of a rotation: f32, or f64 for the oracle.
pub(super) trait Real:
    Copy + From<f32> + std::ops::Add<Output = Self> + std::ops::Sub<Output = Self> + std::ops::Mul<Output = Self>
{
    fn from_f64(x: f64) -> Self;
}

impl Real for f32 {
    #[inline(always)]
    fn from_f64(x: f64) -> Self {
        x as Self
    }
}

impl Real for f64 {
    #[inline(always)]
    fn from_f64(x: f64) -> Self {
        x
    }
}

/// Butterflies of `distance`, of twice that, and so on. From distance 1 on, this is the unscaled Walsh-Hadamard transform.
#[inline(always)]
pub(super) fn butterflies<T: Real>(x: &mut [T], mut distance: usize) {
    while distance < x.len() {
        for pair in x.chunks_exact_mut(2 * distance) {
            let (low, high) = pair.split_at_mut(distance);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        distance *= 2;
    }
}
