//! Eight-bit floating point, e4m3: a sign, four bits of exponent with bias 7, three of mantissa; no infinities, two NaN (0x7F and
//! 0xFF), the largest number 448 (OCP 8-bit floating point specification, "E4M3FN").

/// The largest number.
pub(crate) const MAX: f32 = 448.0;

/// Least exponent of a normal number; below are multiples of `2^-9`.
const MIN_EXPONENT: i32 = -6;

/// The nearest e4m3 number of a finite `x`, ties to even; beyond the largest, the largest. Without branches, for vectors.
#[inline(always)]
pub(crate) fn from_f32(x: f32) -> u8 {
    let bits = x.to_bits();
    // Numbers of one sign are ordered as their bits.
    let magnitude = (bits & i32::MAX as u32).min(MAX.to_bits());
    // The exponent of x, or that of subnormal numbers; zero and f32's own subnormal numbers are far below.
    let exponent = ((magnitude >> 23) as i32 - 127).max(MIN_EXPONENT);
    // A number whose last bit is a step of that exponent, 2^(exponent - 3): a sum with it is rounded to steps, ties to even.
    let rounder = (((exponent - 3 + 23 + 127) as u32) << 23) | 1 << 22;
    let steps = (f32::from_bits(magnitude) + f32::from_bits(rounder)).to_bits() - rounder;
    // Steps of 8 to 16 of a normal number: 16 carries into the exponent by itself.
    (bits >> 24 & 0x80) as u8 | ((((exponent - MIN_EXPONENT) as u32) << 3) + steps) as u8
}

/// The numbers of codes, NaN for the two that are none, times one factor and then another. Whether there is a NaN is asked of all codes
/// at once: that leaves four operations for each.
#[inline(always)]
pub(crate) fn to_f32s(codes: &[u8], factors: [f32; 2], into: &mut [f32]) {
    // What is missing of the exponent, as a factor: subnormal numbers become normal ones by it.
    const BIAS: f32 = f32::from_bits((127 + 127 - 7) << 23);
    let first = BIAS * factors[0];
    let mut none = false;
    for (x, code) in into.iter_mut().zip(codes) {
        none |= is_nan(*code);
        // The sign comes to the first bit, and to others that are cleared.
        let bits = (i32::from(code.cast_signed()) << 20).cast_unsigned() & 0x87f0_0000;
        *x = f32::from_bits(bits) * first * factors[1];
    }
    if none {
        for (x, _) in into.iter_mut().zip(codes).filter(|(_, code)| is_nan(**code)) {
            *x = f32::NAN;
        }
    }
}

/// Whether a code is that of no number.
#[inline(always)]
const fn is_nan(code: u8) -> bool {
    code & 0x7f == 0x7f
}

#[cfg(test)]
mod tests {
    use super::*;

    fn to_f32(code: u8) -> f32 {
        let mut x = [0.0];
        to_f32s(&[code], [1.0; 2], &mut x);
        x[0]
    }

    #[test]
    fn every_number_comes_back_and_others_go_to_the_nearest() {
        assert_eq!([0x38, 0x7E, 0x08, 0x01, 0xC0].map(to_f32), [1.0, 448.0, 0.015625, 0.001953125, -2.0]);
        let codes: Vec<u8> = (0..=255).collect();
        let mut x = vec![0.0f32; 256];
        to_f32s(&codes, [1.0 / 256.0, 3.0], &mut x);
        for (code, x) in codes.into_iter().zip(x) {
            let want = to_f32(code) * (1.0 / 256.0) * 3.0;
            assert!(
                want.to_bits() == x.to_bits() && x.is_nan() == is_nan(code),
                "{code:#x}: {x}, not {want}"
            );
        }
        for code in 0..0x7Fu8 {
            for sign in [0, 0x80] {
                assert_eq!(from_f32(to_f32(code | sign)), code | sign, "{code:#x}");
            }
            if code < 0x7E {
                let (low, high) = (to_f32(code), to_f32(code + 1));
                let middle = (low + high) / 2.0;
                assert_eq!(from_f32(middle), code + code % 2, "tie after {code:#x}");
                assert_eq!(from_f32(middle.next_down()), code);
                assert_eq!(from_f32(middle.next_up()), code + 1);
            }
        }
        assert_eq!([449.0, 1e30, -1e30, 1e-30, -0.0].map(from_f32), [0x7E, 0x7E, 0xFE, 0x00, 0x80]);
    }
}
