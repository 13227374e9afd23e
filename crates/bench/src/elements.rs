//! Loops over elements of tensors as bytes. A command line that is compiled without optimization has its own loops over files and pixels
//! only.

use flashtile_core::codec::convert;
pub use flashtile_core::codec::convert::convert;
use flashtile_core::dtype::Dtype;

/// Appends whole elements, exact.
pub fn extend_f32(into: &mut Vec<f32>, from: Dtype, elements: &[u8]) {
    let first = into.len();
    into.resize(first + elements.len() / from.bytes(), 0.0);
    convert::to_f32(from, elements, &mut into[first..]);
}

/// Whole elements as f32, exact.
#[must_use]
pub fn to_f32(from: Dtype, elements: &[u8]) -> Vec<f32> {
    let mut values = Vec::new();
    extend_f32(&mut values, from, elements);
    values
}

/// Numbers of elements that are not finite.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(clippy::exhaustive_structs)]
pub struct NonFinite {
    /// NaN.
    pub nan: usize,
    /// Positive infinity.
    pub positive: usize,
    /// Negative infinity.
    pub negative: usize,
}

/// Counts the elements that are not finite.
#[must_use]
pub fn non_finite(from: Dtype, elements: &[u8]) -> NonFinite {
    // Bits of an element, with the sign as the highest bit of 32.
    let count = |mut all: NonFinite, bits: u32, infinity: u32| {
        match bits & 0x7fff_ffff {
            magnitude if magnitude > infinity => all.nan += 1,
            magnitude if magnitude < infinity => {}
            magnitude if magnitude == bits => all.positive += 1,
            _ => all.negative += 1,
        }
        all
    };
    let none = NonFinite::default();
    match from {
        Dtype::F32 => elements
            .as_chunks::<4>()
            .0
            .iter()
            .fold(none, |all, bytes| count(all, u32::from_ne_bytes(*bytes), 0x7f80_0000)),
        Dtype::F16 | Dtype::BF16 => {
            let infinity = if from == Dtype::F16 { 0x7c00_0000 } else { 0x7f80_0000 };
            elements
                .as_chunks::<2>()
                .0
                .iter()
                .fold(none, |all, bytes| count(all, u32::from(u16::from_ne_bytes(*bytes)) << 16, infinity))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_that_are_not_finite_are_counted() {
        let values =
            [1.0, f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::NEG_INFINITY, -0.0, 1e-40];
        let all = bytes_of(&values);
        for dtype in Dtype::ALL {
            let mut bytes = vec![0; values.len() * dtype.bytes()];
            convert(Dtype::F32, &all, dtype, &mut bytes);
            assert_eq!(non_finite(dtype, &bytes), NonFinite { nan: 2, positive: 1, negative: 2 }, "{dtype}");
        }
        let mut largest = [0; 4];
        convert(Dtype::F32, &bytes_of(&[65504.0, -65504.0]), Dtype::F16, &mut largest);
        assert_eq!(non_finite(Dtype::F16, &largest), NonFinite::default());
    }

    #[test]
    fn elements_are_appended() {
        let mut values = vec![1.0];
        let mut bytes = [0; 4];
        convert(Dtype::F32, &bytes_of(&[0.5, -3.0]), Dtype::BF16, &mut bytes);
        extend_f32(&mut values, Dtype::BF16, &bytes);
        assert_eq!(values, [1.0, 0.5, -3.0]);
        assert_eq!(to_f32(Dtype::BF16, &bytes[2..]), [-3.0]);
    }

    fn bytes_of(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|x| x.to_ne_bytes()).collect()
    }
}
