//! Codes of a vector as bit planes.
//!
//! A code of `b` bits is a sign and the index of a magnitude. Widths are cut into planes of 4, 2 and 1 bits, the sign in the top
//! bit of the last: 2 = 2, 3 = 2 + 1, 4 = 4, 5 = 4 + 1, 6 = 4 + 2. A vector is cut into blocks of 128 coordinates and a last one
//! of what is left. In a block of `n`, with `m = ceil(n / 2)` or `ceil(n / 4)`:
//!
//! ```text
//! plane of 4 bits: byte j has coordinate j in its low half, j + m in its high one       (m = ceil(n / 2) bytes)
//! plane of 2 bits: byte j has coordinates j, j + m, j + 2 m, j + 3 m, lowest bits first  (m = ceil(n / 4) bytes)
//! plane of 1 bit:  byte j has coordinates 8 j to 8 j + 7, lowest bit first               (ceil(n / 8) bytes)
//! ```
//!
//! so that a vector register of bytes splits into registers of neighbouring coordinates by shifts and masks alone. Bits of
//! coordinates that are not there are 0.

/// Coordinates of a block.
const BLOCK: usize = 128;

/// Planes of codes of `bits`, 2 to 6: the bits of each, from the lowest of the code on.
pub(crate) const fn planes(bits: usize) -> &'static [usize] {
    match bits {
        2 => &[2],
        3 => &[2, 1],
        4 => &[4],
        5 => &[4, 1],
        _ => &[4, 2],
    }
}

/// Bytes of a plane of `bits` of a vector.
pub(crate) const fn plane_bytes(dim: usize, bits: usize) -> usize {
    dim / BLOCK * (BLOCK * bits / 8) + (dim % BLOCK * bits).div_ceil(8)
}

/// Where the bits of a coordinate are: byte, and shift.
const fn place(dim: usize, bits: usize, i: usize) -> (usize, usize) {
    let (block, i) = (i / BLOCK, i % BLOCK);
    let rest = dim - block * BLOCK;
    let n = if rest < BLOCK { rest } else { BLOCK };
    let first = block * (BLOCK * bits / 8);
    if bits == 1 {
        return (first + i / 8, i % 8);
    }
    let m = n.div_ceil(8 / bits);
    (first + i % m, i / m * bits)
}

/// Writes a plane of codes: `bits` of each from bit `from` on.
pub(crate) fn pack(codes: &[u8], from: usize, bits: usize, plane: &mut [u8]) {
    plane.fill(0);
    for (i, code) in codes.iter().enumerate() {
        let (byte, shift) = place(codes.len(), bits, i);
        plane[byte] |= (code >> from & ((1 << bits) - 1)) << shift;
    }
}

/// Adds a plane to codes.
pub(crate) fn unpack(plane: &[u8], from: usize, bits: usize, codes: &mut [u8]) {
    let dim = codes.len();
    for (i, code) in codes.iter_mut().enumerate() {
        let (byte, shift) = place(dim, bits, i);
        *code |= (plane[byte] >> shift & ((1 << bits) - 1)) << from;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_come_back_and_take_the_bytes_of_their_bits() {
        for bits in 2..=6 {
            assert_eq!(planes(bits).iter().sum::<usize>(), bits);
            for dim in [1, 7, 33, 64, 80, 96, 127, 128, 129, 192, 256, 300, 512] {
                let codes: Vec<u8> = (0..dim).map(|i| (i * 37 + i / 5) as u8 & ((1 << bits) - 1)).collect();
                let mut back = vec![0u8; dim];
                let (mut from, mut total) = (0, 0);
                for &width in planes(bits) {
                    let mut plane = vec![0xAA; plane_bytes(dim, width)];
                    pack(&codes, from, width, &mut plane);
                    unpack(&plane, from, width, &mut back);
                    (from, total) = (from + width, total + plane.len());
                }
                assert_eq!(codes, back, "{bits} bits, {dim}");
                assert!(
                    total * 8 >= dim * bits && total <= (dim * bits).div_ceil(8) + 1,
                    "{bits} {dim}: {total}"
                );
            }
        }
        let bytes = |bits| planes(bits).iter().map(|&w| plane_bytes(128, w)).sum::<usize>() + 2;
        assert_eq!([2, 3, 4, 5, 6].map(bytes), [34, 50, 66, 82, 98]);
    }

    #[test]
    fn places_are_those_of_the_format() {
        assert_eq!(place(128, 4, 5), (5, 0));
        assert_eq!(place(128, 4, 69), (5, 4));
        assert_eq!(place(128, 2, 100), (4, 6));
        assert_eq!(place(128, 1, 19), (2, 3));
        assert_eq!(place(256, 4, 128), (64, 0));
        assert_eq!(place(160, 4, 145), (65, 4));
    }
}
