//! One vector: to codes and a scale, and back. The oracle of the SIMD codecs, which give the same bytes.

use super::lloyd;
use super::rotation::Rotation;
use half::f16;

/// What a scale is to make right: of keys inner products, which it makes unbiased, of values the mean square error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ScaleRule {
    /// `<x, x> / <x, c>`: the inner product with the vector itself is exact.
    Unbiased,
    /// `<x, c> / <c, c>`: least squares.
    LeastSquares,
}

/// Why a vector has no codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NotEncoded {
    /// A NaN or an infinity.
    NotFinite,
    /// The scale is beyond f16.
    Range,
}

/// Scales that are tried for a table: `(72 + 5 t) / 100` of the root mean square. A vector whose greatest coordinate is small is
/// better off with a smaller one than its norm suggests: that gains 0.7 dB at 4 bits and 0.9 dB at 5 and 6.
const TRIALS: usize = 8;

/// Partial sums of a reduction.
const LANES: usize = 16;

/// Sum of products in a fixed order, that of SIMD code: coordinate `i` goes to partial sum `i % 16`, and those are added in
/// halves. Nothing is fused.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; LANES];
    for (a, b) in a.chunks(LANES).zip(b.chunks(LANES)) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            sums[i] += sums[i + width];
        }
        width /= 2;
    }
    sums[0]
}

/// Codes of `bits` with a Lloyd-Max table: bit `bits - 1` is the sign, the others the index of the magnitude.
#[derive(Debug, Clone)]
pub(crate) struct Table {
    bits: usize,
    magnitudes: Vec<f32>,
    /// Between neighbours; a number on an edge belongs to the greater magnitude.
    edges: Vec<f32>,
}

impl Table {
    pub(crate) fn new(bits: usize) -> Self {
        let half = lloyd::half(bits);
        let edges = half.windows(2).map(|pair| ((pair[0] + pair[1]) / 2.0) as f32).collect();
        Self { bits, magnitudes: half.iter().map(|&c| c as f32).collect(), edges }
    }

    fn code(&self, x: f32) -> u8 {
        let index = self.edges.iter().filter(|&&edge| x.abs() >= edge).count();
        index as u8 | u8::from(x.is_sign_negative()) << (self.bits - 1)
    }

    fn value(&self, code: u8) -> f32 {
        let magnitude = self.magnitudes[usize::from(code & ((1 << (self.bits - 1)) - 1))];
        if code >> (self.bits - 1) & 1 == 1 { -magnitude } else { magnitude }
    }
}

/// A rotated codec of one dimension.
#[derive(Debug, Clone)]
pub(crate) struct Quantizer {
    rotation: Rotation,
    /// None for 8-bit integers.
    table: Option<Table>,
}

impl Quantizer {
    /// Of `bits` 2 to 6, or 8 for integers.
    pub(crate) fn new(dim: usize, bits: usize) -> Self {
        Self { rotation: Rotation::new(dim), table: (bits < 8).then(|| Table::new(bits)) }
    }

    /// Codes and scale of a vector, which is left rotated. All zeros are codes of the first magnitude with scale 0.
    pub(crate) fn encode(&self, x: &mut [f32], rule: ScaleRule, codes: &mut [u8]) -> Result<f16, NotEncoded> {
        if x.iter().any(|x| !x.is_finite()) {
            return Err(NotEncoded::NotFinite);
        }
        self.rotation.apply(x);
        let mut values = vec![0.0f32; x.len()];
        let energy = dot(x, x);
        if energy == 0.0 {
            codes.fill(self.table.as_ref().map_or(0, |table| table.code(0.0)));
            return Ok(f16::ZERO);
        }
        if !energy.is_finite() {
            return Err(NotEncoded::Range);
        }
        match &self.table {
            None => {
                let most = x.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                let inverse = 127.0 / most;
                for ((x, code), value) in x.iter().zip(&mut *codes).zip(&mut values) {
                    *value = (x * inverse).round_ties_even();
                    *code = *value as i8 as u8;
                }
            }
            Some(table) => {
                let rms = (energy / x.len() as f32).sqrt();
                let mut best = -1.0f32;
                let mut trial = vec![0u8; x.len()];
                for t in 0..TRIALS {
                    let inverse = 1.0 / (rms * ((72 + 5 * t) as f32 / 100.0));
                    for ((x, code), value) in x.iter().zip(&mut trial).zip(&mut values) {
                        *code = table.code(x * inverse);
                        *value = table.value(*code);
                    }
                    let (xc, cc) = (dot(x, &values), dot(&values, &values));
                    // What least squares explains of the energy.
                    let explained = xc * xc / cc;
                    if explained > best {
                        best = explained;
                        codes.copy_from_slice(&trial);
                    }
                }
                for (value, code) in values.iter_mut().zip(&*codes) {
                    *value = table.value(*code);
                }
            }
        }
        let xc = dot(x, &values);
        let scale = match rule {
            ScaleRule::Unbiased => energy / xc,
            ScaleRule::LeastSquares => xc / dot(&values, &values),
        };
        let scale = f16::from_f32(scale);
        if scale.is_finite() { Ok(scale) } else { Err(NotEncoded::Range) }
    }

    /// The rotated vector of codes and a scale.
    pub(crate) fn decode_rotated(&self, codes: &[u8], scale: f16, x: &mut [f32]) {
        let scale = scale.to_f32();
        for (x, &code) in x.iter_mut().zip(codes) {
            *x = scale * self.table.as_ref().map_or_else(|| f32::from(code as i8), |table| table.value(code));
        }
    }

    /// The vector of codes and a scale.
    pub(crate) fn decode(&self, codes: &[u8], scale: f16, x: &mut [f32]) {
        self.decode_rotated(codes, scale, x);
        self.rotation.undo(x);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::Rng;

    fn relative_error(dim: usize, bits: usize, rule: ScaleRule, vectors: usize) -> f64 {
        let quantizer = Quantizer::new(dim, bits);
        let mut rng = Rng::new(7);
        let (mut error, mut energy) = (0.0f64, 0.0f64);
        let mut codes = vec![0u8; dim];
        let mut back = vec![0.0f32; dim];
        for _ in 0..vectors {
            let x: Vec<f32> = (0..dim).map(|_| rng.normal()).collect();
            let scale = quantizer.encode(&mut x.clone(), rule, &mut codes).unwrap();
            quantizer.decode(&codes, scale, &mut back);
            for (x, y) in x.iter().zip(&back) {
                error += f64::from(x - y).powi(2);
                energy += f64::from(*x).powi(2);
            }
        }
        error / energy
    }

    #[test]
    fn errors_of_gaussian_vectors_are_those_of_the_format() {
        // Least squares, D 128.
        for (bits, want) in [(2, 0.114), (3, 3.18e-2), (4, 7.9e-3), (5, 1.96e-3), (6, 5.0e-4), (8, 4.15e-5)] {
            let got = relative_error(128, bits, ScaleRule::LeastSquares, 2000);
            println!("{bits} bits: {got:.3e}");
            assert!((got / want - 1.0).abs() < 0.05, "{bits} bits: {got:.3e}, not {want:.3e}");
        }
    }

    #[test]
    fn inner_products_with_the_vector_itself_are_exact_where_scales_are_unbiased() {
        let quantizer = Quantizer::new(96, 3);
        let mut rng = Rng::new(3);
        let (mut codes, mut back) = ([0u8; 96], [0.0f32; 96]);
        for _ in 0..50 {
            let mut x: Vec<f32> = (0..96).map(|_| rng.normal()).collect();
            let scale = quantizer.encode(&mut x, ScaleRule::Unbiased, &mut codes).unwrap();
            quantizer.decode_rotated(&codes, scale, &mut back);
            let product =
                |a: &[f32], b: &[f32]| -> f64 { a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum() };
            let ratio = product(&x, &back) / product(&x, &x);
            // The scale is rounded to f16.
            assert!((ratio - 1.0).abs() < 1e-3, "{ratio}");
        }
    }

    #[test]
    fn zeros_spikes_and_what_has_no_codes() {
        for bits in [2, 3, 4, 5, 6, 8] {
            let quantizer = Quantizer::new(64, bits);
            let (mut codes, mut back) = ([0xFFu8; 64], [1.0f32; 64]);
            let scale = quantizer.encode(&mut [0.0; 64], ScaleRule::Unbiased, &mut codes).unwrap();
            quantizer.decode(&codes, scale, &mut back);
            assert!(back.iter().all(|x| *x == 0.0), "{bits} bits");
            for (x, why) in [
                (f32::NAN, NotEncoded::NotFinite),
                (f32::INFINITY, NotEncoded::NotFinite),
                (3e38, NotEncoded::Range),
                (3e7, NotEncoded::Range),
            ] {
                let mut spike = [0.0f32; 64];
                spike[5] = x;
                let got = quantizer.encode(&mut spike, ScaleRule::LeastSquares, &mut codes);
                // An 8-bit scale is 127 times smaller than the coordinates.
                if !(bits == 8 && x == 3e7) {
                    assert_eq!(got, Err(why), "{bits} bits, {x}");
                }
            }
            // One coordinate, rotated, is equal magnitudes: a scale makes them exact.
            let mut spike = [0.0f32; 64];
            spike[5] = 3.0;
            let scale = quantizer.encode(&mut spike, ScaleRule::LeastSquares, &mut codes).unwrap();
            quantizer.decode(&codes, scale, &mut back);
            assert!((back[5] - 3.0).abs() < 2e-3, "{bits} bits: {}", back[5]);
        }
    }
}
