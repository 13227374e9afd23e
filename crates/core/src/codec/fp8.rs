//! Eight-bit floating point, e4m3: a sign, four exponent bits with bias 7, three mantissa bits. There are no
//! infinities, two NaN codes (0x7F and 0xFF), and the largest value is 448 (OCP 8-bit floating point specification,
//! "E4M3FN").

/// The largest value.
pub(crate) const MAX: f32 = 448.0;

/// The smallest exponent of a normal value; subnormal ones are multiples of `2^-9`.
const MIN_EXPONENT: i32 = -6;

/// The e4m3 code nearest to a finite `x`: ties to even, saturating. There are no branches, so that the compiler vectorises it.
#[inline(always)]
pub(crate) fn from_f32(x: f32) -> u8 {
    let bits = x.to_bits();
    // Values of one sign compare like their bits.
    let magnitude = (bits & i32::MAX as u32).min(MAX.to_bits());
    // The exponent of x, at least that of subnormal e4m3 values. Zero and f32's own subnormal values lie far below it.
    let exponent = ((magnitude >> 23) as i32 - 127).max(MIN_EXPONENT);
    // The last bit of this value is one step of that exponent, 2^(exponent - 3), so adding it rounds to whole steps, ties to even.
    let rounder = (((exponent - 3 + 23 + 127) as u32) << 23) | 1 << 22;
    let steps = (f32::from_bits(magnitude) + f32::from_bits(rounder)).to_bits() - rounder;
    // A normal value is 8 to 16 steps; 16 carries into the exponent.
    (bits >> 24 & 0x80) as u8 | ((((exponent - MIN_EXPONENT) as u32) << 3) + steps) as u8
}

/// Decodes codes, multiplying by one factor and then by the other. The two NaN codes give NaN; they are searched for in all codes at once,
/// which leaves four operations per code.
#[inline(always)]
pub(crate) fn to_f32s(codes: &[u8], factors: [f32; 2], into: &mut [f32]) {
    // The factor is 2 to the difference of the exponent biases; multiplying by it also makes subnormal values normal.
    const BIAS: f32 = f32::from_bits((127 + 127 - 7) << 23);
    let first = BIAS * factors[0];
    let mut none = false;
    for (x, code) in into.iter_mut().zip(codes) {
        none |= is_nan(*code);
        // The sign moves to the top bit; other bits that move along are cleared.
        let bits = (i32::from(code.cast_signed()) << 20).cast_unsigned() & 0x87f0_0000;
        *x = f32::from_bits(bits) * first * factors[1];
    }
    if none {
        for (x, _) in into.iter_mut().zip(codes).filter(|(_, code)| is_nan(**code)) {
            *x = f32::NAN;
        }
    }
}

/// Returns true if a code is NaN.
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
