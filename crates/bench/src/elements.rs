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

#[cfg(test)]
mod tests {
    use super::*;

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
